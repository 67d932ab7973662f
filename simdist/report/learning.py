"""Curves of learning: a metric over steps and over simulated seconds."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from simdist.report.figures import literal_text, panels, shortened
from simdist.report.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, time_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
_STYLES = ("-", "--", ":", "-.")
_TITLE_CHARACTERS = 100


def learning_figure(found: Mapping[str, Any]) -> "Figure":
    """Draw a metric over steps and over simulated seconds.

    Lines are means over seeds, bands reach from the lowest seed to the highest.

    Args:
        found: As of `simdist.learning.summary.curves_record`, or all that `simdist learn --json` prints.
    """
    curves = found["curves"]
    figure, (left, right) = panels(2, height_in=4.6, sharey=True)
    unit, scale = time_unit(max(each["seconds"][-1] for each in curves))
    with literal_text():
        figure.suptitle(shortened(found["title"], most=_TITLE_CHARACTERS), x=0.01, ha="left", fontsize="medium")
        for number, each in enumerate(curves):
            mean, lowest, highest = (np.array(each[name], float) for name in ("mean", "lowest", "highest"))
            steps = np.array(each["steps"])
            seconds = np.array(each["seconds"]) * scale
            color = _COLORS[number % len(_COLORS)]
            style = _STYLES[number // len(_COLORS) % len(_STYLES)]
            for axes, at in ((left, steps), (right, seconds)):
                axes.fill_between(at, lowest, highest, color=color, alpha=0.15, linewidth=0)
                label = shortened(each["schedule"]) if axes is left else None
                axes.plot(at, mean, style, color=color, linewidth=1.6, label=label)
        for axes in () if found["target_value"] is None else (left, right):
            axes.axhline(found["target_value"], color=BLACK, linewidth=1, linestyle=(0, (4, 3)))
        left.set_ylabel(found["metric"])
        left.set_xlabel("steps")
        right.set_xlabel(f"simulated {unit}; bands: lowest to highest seed")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure
