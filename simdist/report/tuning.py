"""The front of step time and how seldom all ranks exchange, as a picture."""

import math
from typing import TYPE_CHECKING

import numpy as np

from simdist.report.figures import literal_text, shortened, tidy
from simdist.report.palette import BLACK, BLUE, GREY, VERMILLION, time_unit
from simdist.tune.evaluating import Finalist
from simdist.tune.tuning import Tuned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MOST_TICKS = 10
_TITLE_CHARACTERS = 90  # that fit into the width


def front_figure(tuned: Tuned) -> "Figure":
    """Draw the step time of all finalists against the steps from one exchange of all ranks to the next.

    Other candidates stand behind them, with the numbers of the search.
    """
    from matplotlib.figure import Figure

    scale_unit, scale = time_unit(max(each.row.step_s for each in tuned.finalists))
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    with literal_text():
        axes = figure.subplots()
        tried = [each for each in tuned.evaluated if math.isfinite(each.facts.global_gap)]
        gaps, steps = [each.facts.global_gap for each in tried], [each.step_s * scale for each in tried]
        axes.plot(gaps, steps, ".", color=GREY, alpha=0.5, label="tried, seeds of the search")
        shown = [each for each in tuned.finalists if math.isfinite(each.facts.global_gap)]
        _draw_finalists(axes, shown, scale)
        _label(axes, sorted({int(each.facts.global_gap) for each in shown}), scale_unit, tuned.per)
        lines = (tuned.runs.scenario.name, tuned.verdict.sentence)
        heading = "\n".join(shortened(line, most=_TITLE_CHARACTERS) for line in lines)
        axes.set_title(heading, loc="left", fontsize="medium", fontweight="bold")
        axes.legend(frameon=False)
    return figure


def _draw_finalists(axes: "Axes", shown: list[Finalist], scale: float) -> None:
    front = sorted((each for each in shown if each.on_front), key=lambda each: each.facts.global_gap)
    axes.step(*_points(front, scale), where="post", color=BLUE, linewidth=1, label="front")
    groups = (
        ("on the front", "o", BLUE, front),
        ("other finalists", "s", BLACK, [each for each in shown if not each.on_front and not each.is_baseline]),
        ("baseline", "D", VERMILLION, [each for each in shown if each.is_baseline]),
    )
    for label, marker, color, found in groups:
        if found:
            reaches, name = np.transpose([_reach_s(each) for each in found]) * scale, f"{label}, fresh seeds"
            axes.errorbar(*_points(found, scale), yerr=reaches, fmt=marker, color=color, capsize=3, label=name)
    for each in shown:
        if each.on_front or each.is_baseline:
            place = (each.facts.global_gap, each.row.step_s * scale)
            offset = (5, 7) if each.is_baseline else (5, -12)  # on the front nothing is slower
            name = shortened(each.schedule.name)
            axes.annotate(name, place, xytext=offset, textcoords="offset points", fontsize="small")


def _points(finalists: list[Finalist], scale: float) -> tuple[list[float], list[float]]:
    return [each.facts.global_gap for each in finalists], [each.row.step_s * scale for each in finalists]


def _reach_s(finalist: Finalist) -> tuple[float, float]:
    """Return how far the interval of a step reaches below it, and above."""
    row = finalist.row
    low_s, high_s = row.step_s_range or row.step_s_ci95 or (row.step_s, row.step_s)
    return max(0.0, row.step_s - low_s), max(0.0, high_s - row.step_s)


def _label(axes: "Axes", gaps: list[int], unit: str, per: str) -> None:
    axes.set_xscale("log", base=2)
    ticks = gaps if len(gaps) <= _MOST_TICKS else gaps[:: math.ceil(len(gaps) / _MOST_TICKS)]
    axes.set_xticks(ticks, [str(gap) for gap in ticks])
    axes.minorticks_off()
    axes.set_xlim(min(gaps) / 1.15, max(gaps) * 1.4)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.set_xlabel("steps from one exchange of all ranks to the next")
    axes.set_ylabel(f"{unit} per {per}")
    tidy(axes)
