"""Goodput under failures as a picture: where the time goes that is lost, and goodput by the rate of failures."""

from typing import TYPE_CHECKING, Any

import numpy as np

from simdist.report.figures import literal_text, new_figure, shortened, tidy
from simdist.report.palette import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE_GREEN,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    Style,
)
from simdist.runs.recovery import Category
from simdist.settings.units import format_duration
from simdist.studies.goodput import GoodputStudy, RatePoint, in_words, percent_in_range

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Look of the time that is lost.
_STYLES: dict[Category, Style] = {
    "wasted_progress": Style("", VERMILLION),
    "infrastructure_recovery": Style("", ORANGE, hatch="////"),
    "program_startup": Style("", YELLOW),
    "initialization": Style("", GREY, hatch="...."),
    "training_preparation": Style("", BLACK),
    "checkpoint_restore": Style("", SKY, hatch="\\\\\\\\"),
    "checkpoint_save": Style("", BLUE),
    "data_loading": Style("", PURPLE, hatch="xxxx"),
    "step_time_deviation": Style("", GREEN),
    "absent_replicas": Style("", PALE_GREEN, GREEN, "////"),
}
_COLORS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
_DASHES = ("-", "--", ":", "-.")
_VISIBLE = 5e-4  # of the time
_LEAST_LOST = 0.1  # % that an axis shows
_FEW = 2  # rows; a single one is no thicker than two


def goodput_figure(study: GoodputStudy) -> "Figure":
    """Draw the time that each schedule and policy loses and, if causes have rates, goodput against these.

    Args:
        study: One row or more.
    """
    n_lines = len(study)
    subject = study.title.rpartition(";")[0] or study.title  # without what columns are compared with
    figure = new_figure(11.0, 2.4 + 0.6 * max(2, n_lines) if study.curves else 2.4 + 0.4 * n_lines)
    with literal_text():
        panels = figure.subplots(1, 2 if study.curves else 1, squeeze=False)[0]
        figure.suptitle(shortened(subject, most=110), x=0.01, ha="left", fontsize="large", fontweight="bold")
        _draw_lost(panels[0], study)
        categories = panels[0].get_legend_handles_labels()
        figure.legend(*categories, loc="outside lower left", ncols=2 if study.curves else 5, frameon=False)
        if study.curves:
            _draw_curves(panels[1], study)
            figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower right", frameon=False)
    return figure


def _draw_lost(axes: "Axes", study: GoodputStudy) -> None:
    """Draw shares of the time by category, as stacked bars."""
    places = np.arange(len(study))
    left = np.zeros(len(study))
    for category, style in _STYLES.items():
        shares = 100 * np.array([row.shares[category] for row in study])
        if shares.max() < 100 * _VISIBLE:
            continue
        look: dict[str, Any] = {"color": style.face, "edgecolor": style.ink, "hatch": style.hatch, "linewidth": 0}
        axes.barh(places, shares, left=left, height=0.62, label=in_words(category), **look)
        left = left + shares
    ends = left.copy()
    for place, row in zip(places, study, strict=True):
        known = row.goodput_range90
        if known is not None:
            lost = 100 * (1 - np.array(known))
            ends[place] = max(left[place], lost[0])
            axes.plot(lost, [place, place], "-", marker="|", markersize=8, color=BLACK, linewidth=1.5)
        axes.annotate(
            f"goodput {100 * row.goodput:.1f} %"
            if known is None
            else f"goodput {percent_in_range(row.goodput, known)}",
            (ends[place], place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(places, [shortened(row.label) for row in study])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(max(len(study), _FEW) - 0.5, -0.5)
    is_known = study[0].goodput_range90 is None
    room = 1.45 if is_known else 1.95  # for what stands beside the bars
    axes.set_xlim(0, room * max(float(ends.max()), _LEAST_LOST))
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 100])
    axes.set_xlabel(
        "time that is lost (%)" if is_known else "time that is lost (%); lines: 90 % intervals of all of it"
    )
    tidy(axes, grid="x")


def _draw_curves(axes: "Axes", study: GoodputStudy) -> None:
    """Draw goodput against the time between failures, the longest on the left, and what is uncertain as bands."""
    curves = study.curves
    if study.between_range_s is not None:
        axes.axvspan(*study.between_range_s, color=GREY, alpha=0.35, linewidth=0, label="possible rates (90 %)")
    for number, curve in enumerate(curves):
        times_s = [point.between_failures_s for point in curve.points]
        shares = [100 * point.goodput for point in curve.points]
        color = _COLORS[number % len(_COLORS)]
        dashes = _DASHES[number % len(_DASHES)]
        axes.plot(times_s, shares, dashes, marker="o", markersize=4, color=color, label=shortened(curve.label))
        known = [point for point in curve.points if point.goodput_range90 is not None]
        bounds = 100 * np.array([point.goodput_range90 for point in known], dtype=float).reshape(-1, 2)
        at_s = [point.between_failures_s for point in known]
        axes.fill_between(at_s, bounds[:, 0], bounds[:, 1], color=color, alpha=0.15, linewidth=0)
        if curve.break_even_s is not None:
            axes.axvline(curve.break_even_s, color=color, linewidth=1, linestyle=(0, (4, 3)))
        if curve.break_even_range_s is not None:
            axes.axvspan(*curve.break_even_range_s, color=color, alpha=0.15, linewidth=0)
    first, *middle, last = curves[0].points
    points = [first, *(each for each in middle if each.factor == 1), last]
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks([each.between_failures_s for each in points], [_tick(each) for each in points])
    axes.invert_xaxis()
    lowest, highest = axes.get_ylim()
    axes.set_ylim(max(0.0, min(lowest, highest - _LEAST_LOST)), min(highest, 100 + _LEAST_LOST))
    axes.set_xlabel("time between failures that end an attempt")
    is_certain = all(curve.points[0].goodput_range90 is None for curve in curves)
    axes.set_ylabel("goodput (%)" if is_certain else "goodput (%), 90 % bands")
    tidy(axes)


def _tick(point: RatePoint) -> str:
    """Name the time between failures, and say which one is the scenario's."""
    return format_duration(point.between_failures_s) + ("\nas stated" if point.factor == 1 else "")
