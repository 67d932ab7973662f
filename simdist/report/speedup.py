"""The speed-up table as bars."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simdist.errors import ScenarioError
from simdist.report.figures import literal_text, new_figure, shortened, tidy
from simdist.report.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PALE_GREEN, VERMILLION, Style, time_unit
from simdist.settings.units import in_range
from simdist.studies.columns import factor_with_interval
from simdist.studies.comparison import Row
from simdist.studies.facets import RANGES
from simdist.studies.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Look of the seconds in each state.
STATE_STYLES: dict[str, Style] = {
    "compute": Style("compute", BLUE),
    "comm": Style("exposed communication", GREEN, hatch="..."),
    "wait": Style("waiting for others", PALE_GREEN, GREEN, "////"),
    "io": Style("input and output", ORANGE, hatch="\\\\\\\\"),
    "host": Style("held up by the host", VERMILLION, BLACK, "xxxx"),
}

_VISIBLE = 1e-3  # of the longest bar
_TITLE_CHARACTERS = 110  # that fit into the width


def speedup_figure(rows: Sequence[Row], *, title: str) -> "Figure":
    """Draw the speed-up of every schedule with its interval, and where its step time goes.

    Args:
        rows: The lines of the table (see `simdist.studies.comparison`), drawn from top to bottom.
        title: Heading.

    Raises:
        ScenarioError: There are no rows.
    """
    if not rows:
        raise ScenarioError(f"{title}: no rows to draw")
    figure = new_figure(11.0, 1.5 + 0.45 * len(rows))
    with literal_text():
        left, right = figure.subplots(1, 2, sharey=True)
        heading = shortened(title, most=_TITLE_CHARACTERS)
        figure.suptitle(heading, x=0.01, ha="left", fontsize="large", fontweight="bold")
        _draw_speedups(left, rows)
        _draw_states(right, rows)
        left.set_yticks(range(len(rows)), [shortened(row.schedule) for row in rows])
        left.tick_params(axis="y", length=0)
        left.invert_yaxis()
        for axes in (left, right):
            axes.set_xlim(left=0)
            tidy(axes, grid="x")
        figure.legend(loc="outside lower right", ncols=len(STATE_STYLES) + 1, frameon=False, columnspacing=1.5)
    return figure


def _draw_speedups(axes: "Axes", rows: Sequence[Row]) -> None:
    places = range(len(rows))
    speedups = [row.speedup for row in rows]
    intervals = [row.speedup_range or row.speedup_ci95 for row in rows]
    colors = [GREY if speedup == 1 else BLUE for speedup in speedups]
    axes.barh(places, speedups, height=0.62, color=colors)
    _draw_whiskers(axes, speedups, intervals)
    axes.axvline(1, color=BLACK, linewidth=1, linestyle=(0, (4, 3)))
    for place, row in zip(places, rows, strict=True):
        _note(axes, place, _speedup_text(row))
    axes.set_xlabel(f"{_baseline_text(rows)}{_interval_text(rows, intervals)}")


def _draw_whiskers(
    axes: "Axes", values: Sequence[float], intervals: Sequence[Interval | None], scale: float = 1
) -> None:
    """Draw intervals around values, both in a unit that is `scale` times smaller; none of no width."""
    for place, (value, interval) in enumerate(zip(values, intervals, strict=True)):
        if interval and interval[0] < interval[1]:
            lengths = np.abs(np.array(interval) - value).reshape(2, 1) * scale
            style: dict[str, Any] = {"fmt": "none", "ecolor": BLACK, "elinewidth": 1.3, "capsize": 3.5}
            axes.errorbar(value * scale, place, xerr=lengths, **style)


def _interval_text(rows: Sequence[Row], intervals: Sequence[Interval | None]) -> str:
    """Say what the whiskers are, if there are any."""
    if not any(intervals):
        return ""
    return ", 90 % interval" if any(row.of(RANGES) for row in rows) else ", 95 % interval over seeds"


def _speedup_text(row: Row) -> str:
    if row.speedup_range and row.speedup != 1:
        return in_range(row.speedup, *row.speedup_range)
    if row.speedup == 1 or row.speedup_ci95 is None:
        return f"{row.speedup:.2f}"
    return factor_with_interval(row.speedup, row.speedup_ci95)


def _baseline_text(rows: Sequence[Row]) -> str:
    baselines = [row.schedule for row in rows if row.speedup == 1]
    return f"speed-up over {shortened(baselines[0], most=20)}" if len(baselines) == 1 else "speed-up"


def _draw_states(axes: "Axes", rows: Sequence[Row]) -> None:
    longest_s = max(row.step_s for row in rows)
    unit, scale = time_unit(longest_s)
    left = np.zeros(len(rows))
    for state, style in STATE_STYLES.items():
        widths = np.array([row.states_s[state] for row in rows]) * scale
        if widths.max() > _VISIBLE * longest_s * scale:
            look: dict[str, Any] = {"color": style.face, "edgecolor": style.ink, "linewidth": 0, "hatch": style.hatch}
            axes.barh(range(len(rows)), widths, left=left, height=0.62, label=style.label, **look)
        left += widths
    intervals = [row.step_s_range or row.step_s_ci95 for row in rows]
    _draw_whiskers(axes, [row.step_s for row in rows], intervals, scale)
    for place, row in enumerate(rows):
        number = row.step_s * scale
        _note(axes, place, f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}")
    axes.tick_params(left=False, labelleft=False)
    axes.set_xlabel(f"{unit} per step, mean over ranks{_interval_text(rows, intervals)}")


def _note(axes: "Axes", place: float, text: str) -> None:
    """Write into the column at the right of the axes."""
    axes.text(1.015, place, text, transform=axes.get_yaxis_transform(), va="center", ha="left")
