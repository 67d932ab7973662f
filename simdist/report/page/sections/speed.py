"""How fast each schedule is, over the baseline."""

from collections.abc import Mapping
from pathlib import Path

from simdist.report.page.charts import Bar, BarGroup, Segment, bar_chart
from simdist.report.page.document import Section
from simdist.report.page.html import Html, duration, join, number, prose, table, tag
from simdist.report.page.model import Origin, Report, ReportedPoint, ReportedRun
from simdist.settings.units import format_seconds
from simdist.studies.comparison import Row
from simdist.traces.breakdown import STATES

STATE_WORDS = {
    "compute": "computing",
    "comm": "exposed communication",
    "wait": "waiting for others",
    "io": "loading and saving",
    "host": "ranks held up by their hosts",
}
"""The states of `simdist.traces.breakdown` in words."""

_SAME = 0.005  # step times that differ by less are called equal


def speed_section(report: Report) -> Section:
    """Show speed-ups over the baseline, simulated and measured beside each other."""
    rows = {origin: report.rows(origin) for origin in report.origins}
    shown = {origin: found for origin, found in rows.items() if found}
    base = report.base
    about = (
        "How many times as fast as {base} each schedule is: the seconds per step of {base} over its own. Every bar is "
        "one run of one seed, so there are no error bars; `simdist compare` averages over seeds."
    )
    if len(report.points) > 1:
        about += " Runs are compared with {base} in their own folder, with no others."
    groups = [_group(point, run, shown) for point in report.points for run in point.runs]
    chart = bar_chart(
        groups,
        element_id="speed-chart",
        title=f"Bars of the speed-up of each schedule over {base}; the table below has the numbers",
        axis=f"speed-up over {base}",
        mark=1.0,
    )
    sentences = [tag("p", sentence, class_="conclusion") for sentence in _conclusions(report)]
    beside = tag("div", chart, _table(report, shown), class_="beside")
    return Section("speed", "Speed-up", join([tag("p", prose(about, base=base)), *sentences, beside]))


def _group(point: ReportedPoint, run: ReportedRun, rows: Mapping[Origin, Mapping[Path, Row]]) -> BarGroup:
    bars = [
        Bar((Segment(origin, found[run.path].speedup, f"{run.label}, {origin}: {text}"),), f"{origin} {text}")
        for origin, found in rows.items()
        if run.path in found
        for text in [f"{found[run.path].speedup:.2f}"]
    ]
    return BarGroup(run.label, tuple(bars), point.title if run is point.runs[0] else "")


def _table(report: Report, rows: Mapping[Origin, Mapping[Path, Row]]) -> Html:
    names = [f"{what}, {origin}" for origin in rows for what in ("step time", "speed-up")]
    lines = [
        [run.label, *(cell for origin, found in rows.items() for cell in _cells(run, origin, found))]
        for run in report.runs
    ]
    return table(f"Step time, and speed-up over {report.base}", ["schedule", *names], lines)


def _cells(run: ReportedRun, origin: Origin, rows: Mapping[Path, Row]) -> tuple[str, str]:
    if origin not in run.executions:
        return "-", "-"
    speedup = rows[run.path].speedup if run.path in rows else None
    step_s = run.executions[origin].step_s
    return duration(step_s), "-" if speedup is None else number(speedup, f"{speedup:.2f}")


def _conclusions(report: Report) -> list[str]:
    """Say of each point which of its schedules is the fastest."""
    return [
        f"{f'{point.title}; ' if point.title else ''}{origin if point.title else origin.capitalize()}, "
        f"{speed_conclusion(_by_label(point, found), point.runs[0].label)}"
        for point in report.points
        for origin in report.origins
        if len(found := point.rows(origin)) > 1
    ]


def _by_label(point: ReportedPoint, rows: Mapping[Path, Row]) -> dict[str, Row]:
    return {run.label: rows[run.path] for run in point.runs if run.path in rows}


def speed_conclusion(rows: Mapping[str, Row], base: str) -> str:
    """Say which schedule is the fastest, by how much, and in which state it spends less.

    Args:
        rows: Lines of the speed-up table, two or more, by label.
        base: Label of the baseline.
    """
    best = max((label for label in rows if label != base), key=lambda label: rows[label].speedup)
    factor = rows[best].speedup
    if abs(factor - 1) < _SAME:
        return f"no schedule is faster than {base}; {best} takes as long, within {100 * _SAME:g} %."
    if factor < 1:
        next_best = f"{best} comes next, {factor:.2f} times as fast"
        return f"no schedule is faster than {base}; {next_best}: {_why(rows, best, base)}."
    return f"{best} is {factor:.2f} times as fast as {base}; {_why(rows, best, base)}."


def _why(rows: Mapping[str, Row], label: str, base: str) -> str:
    """Name the state that makes most of the difference between two schedules."""
    less_s = {state: _state_s(rows[label], state) - _state_s(rows[base], state) for state in STATES}
    total_s = rows[label].step_s - rows[base].step_s
    state = (min if total_s < 0 else max)(less_s, key=lambda state: less_s[state])
    share = less_s[state] / total_s
    part = "all" if share >= 0.995 else "most" if share > 0.5 else "the largest part"
    return f"{part} of the difference is {STATE_WORDS[state]} ({_signed(less_s[state])} a step)"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else ''}{format_seconds(seconds)}"


def _state_s(row: Row, state: str) -> float:
    return {
        "compute": row.compute_s,
        "comm": row.comm_s,
        "wait": row.wait_s,
        "io": row.io_s,
        "host": row.host_s,
    }[state]
