"""Curves of learning: a metric over steps and over simulated seconds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from simdist.learning.curves import TRAINING_LOSS, Target
from simdist.learning.summary import Learned
from simdist.report.figures import literal_text, panels, shortened
from simdist.report.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, time_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
_STYLES = ("-", "--", ":", "-.")
_TITLE_CHARACTERS = 100


def learning_figure(found: Sequence[Learned], target: Target | None, *, title: str) -> "Figure":
    """Draw the target's metric, or else the training loss, over steps and over simulated seconds.

    Lines are means over seeds, bands reach from the lowest seed to the highest.

    Args:
        found: Schedules with the same seeds.
        target: Drawn as a line, if there is one.
        title: Heading.
    """
    metric = target or TRAINING_LOSS
    figure, (left, right) = panels(2, height_in=4.6, sharey=True)
    unit, scale = time_unit(max(float(each.timed.ends_s[:, -1].mean()) for each in found))
    with literal_text():
        figure.suptitle(shortened(title, most=_TITLE_CHARACTERS), x=0.01, ha="left", fontsize="medium")
        for number, each in enumerate(found):
            values = each.values(metric)
            steps, seconds = np.array(each.curves[0].steps), each.at_s.mean(axis=0) * scale
            color, style = _COLORS[number % len(_COLORS)], _STYLES[number // len(_COLORS) % len(_STYLES)]
            for axes, at in ((left, steps), (right, seconds)):
                axes.fill_between(at, values.min(axis=0), values.max(axis=0), color=color, alpha=0.15, linewidth=0)
                label = shortened(each.label) if axes is left else None
                axes.plot(at, values.mean(axis=0), style, color=color, linewidth=1.6, label=label)
        for axes in (left, right) if target else ():
            axes.axhline(metric.value, color=BLACK, linewidth=1, linestyle=(0, (4, 3)))
        left.set_ylabel(metric.what)
        left.set_xlabel("steps")
        right.set_xlabel(f"simulated {unit}; bands: lowest to highest seed")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure
