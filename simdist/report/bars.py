"""Results as bars, one for each schedule, knob or rank."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

import numpy as np

from simdist.errors import ScenarioError
from simdist.report.figures import literal_text, new_figure, panels, shortened, tidy
from simdist.report.palette import BLACK, BLUE, GREY, ORANGE, VERMILLION, time_unit
from simdist.stragglers.gains import Gains
from simdist.stragglers.slowdown import Slowdown
from simdist.studies.data_knobs import KnobEffects
from simdist.studies.tolerable_rate import Tolerances, probability_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEAST_SHOWN = 1e-6  # probability from which an axis begins


def bars_figure(result: KnobEffects | Tolerances | Slowdown | Gains) -> "Figure":
    """Draw an answer.

    Raises:
        ScenarioError: There is nothing to draw, or too much for one picture.
    """
    match result:
        case KnobEffects():
            return _knobs_figure(result)
        case Tolerances():
            return _tolerances_figure(result)
        case Slowdown():
            return _slowdown_figure(result)
        case Gains():
            return _gains_figure(result)
        case unknown:
            assert_never(unknown)


def _gains_figure(found: Gains) -> "Figure":
    """Draw the speed-up of each schedule, with its interval if it has one."""
    rows = found.rows
    if not rows:
        raise ScenarioError(f"no schedule is compared with {found.baseline}, so there is nothing to draw")
    labels = [found.baseline, *(each.schedule for each in rows)]
    speedups = np.array([1.0, *(each.speedup for each in rows)])
    intervals = np.array([(1.0, 1.0), *(each.interval or (each.speedup, each.speedup) for each in rows)])
    figure, axes = _horizontal(labels)
    axes.barh(range(len(labels)), speedups, height=0.62, color=[GREY, *([BLUE] * len(rows))])
    if any(each.interval for each in rows):
        whiskers = np.abs(intervals.T - speedups)
        axes.errorbar(
            speedups, range(len(labels)), xerr=whiskers, fmt="none", ecolor=BLACK, elinewidth=1.3, capsize=3.5
        )
    axes.axvline(1, color=BLACK, linewidth=1, linestyle=(0, (4, 3)))
    with literal_text():
        axes.set_xlabel(f"speed-up over {found.baseline}")
    return figure


def _tolerances_figure(found: Tolerances) -> "Figure":
    """Draw the largest tolerable probability of a straggler under each schedule."""
    if not found:
        raise ScenarioError("there are no schedules, so there is nothing to draw")
    percents = np.array([100 * max(each.probability, _LEAST_SHOWN) for each in found])
    figure, axes = _horizontal([each.schedule for each in found])
    axes.set_xscale("log")
    axes.set_xlim(percents.min() / 3, percents.max() * 5)
    axes.barh(range(len(found)), percents, height=0.62, color=BLUE)
    for place, (each, percent) in enumerate(zip(found, percents, strict=True)):
        axes.annotate(
            probability_text(each.probability), (percent, place), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axes.set_xlabel("largest tolerable probability of a straggler, per rank and step (%)")
    return figure


def _knobs_figure(found: KnobEffects) -> "Figure":
    """Draw the seconds of staging and all epochs with each knob, and how many of them are staging or stalls."""
    records = found.records()
    seconds = np.array([float(str(each["seconds"])) for each in records])
    waiting = np.array([float(str(each["staging_s"])) + float(str(each["stall_s"])) for each in records])
    unit, scale = time_unit(float(seconds.max()))
    figure, axes = _horizontal([str(each["knob"]) for each in records])
    places = range(len(records))
    axes.barh(places, (seconds - waiting) * scale, height=0.62, color=BLUE, label="training")
    axes.barh(
        places, waiting * scale, left=(seconds - waiting) * scale, height=0.62, color=ORANGE, label="staging and stalls"
    )
    axes.set_xlabel(unit)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure


def _slowdown_figure(found: Slowdown) -> "Figure":
    """Draw what each rank alone adds to an ideal step."""
    lost_s = (found.rank_slowdowns - 1) * found.ideal_s
    unit, scale = time_unit(float(lost_s.max()))
    figure, (axes,) = panels(1)
    axes.stairs(lost_s * scale, np.arange(found.world_size + 1) - 0.5, fill=True, color=VERMILLION)
    axes.set_xlabel("rank")
    axes.set_ylabel(f"{unit} that it alone adds to a step")
    return figure


def _horizontal(labels: Sequence[str]) -> "tuple[Figure, Axes]":
    figure = new_figure(8.0, 1.4 + 0.4 * len(labels))
    axes = figure.subplots()
    with literal_text():
        axes.set_yticks(range(len(labels)), [shortened(label) for label in labels])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    tidy(axes, grid="x")
    return figure, axes
