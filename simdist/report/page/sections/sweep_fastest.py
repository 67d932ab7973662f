"""The answer of a sweep: how often which schedule is the fastest, and how its speed-up varies."""

from collections import Counter
from collections.abc import Iterable
from statistics import median

from simdist.report.page.document import Section
from simdist.report.page.html import Html, conclusions, join, number, percent, table, tag
from simdist.report.page.sweep_model import SweepReport
from simdist.settings.base import plural
from simdist.sweeps.fastest import Fastest

_ABOUT = (
    "At each point the schedules are compared by their mean step time, over the same seeds; those that take equally "
    "long all count as the fastest. A lead is the step time of the second over that of the fastest."
)
_CLEAR = (
    "A lead is clear if the 95 % confidence intervals against all other schedules lie above 1. Where schedules are "
    "equal and only chance tells them apart, about one lead in twenty looks clear all the same."
)


def fastest_section(report: SweepReport) -> Section:
    """Show how often each schedule is the fastest."""
    about = f"{_ABOUT} {_CLEAR}" if report.n_seeds > 1 else _ABOUT
    parts = [tag("p", about), conclusions([fastest_conclusion(report)]), _lines_table(report)]
    return Section("fastest", "Which schedule is the fastest", join(parts))


def compared_points(report: SweepReport) -> dict[int, Fastest]:
    """Return the fastest schedule of the points at which there are two or more to compare."""
    return {point: each for point, each in report.best.items() if each.next_one}


def fastest_conclusion(report: SweepReport) -> str:
    """Say which schedules are the fastest at most points, all at equally many, at how many, and at how many clearly."""
    found = compared_points(report)
    if not found:
        return "At no point were two schedules measured, so there is none that is faster."
    lines = _most_often(report, found)
    n_wins = sum(lines[0] in report.leaders[point] for point in found)
    where = "every one" if n_wins == len(found) else f"{n_wins:,} ({percent(n_wins / len(found))})"
    where = f"at {where} of {len(found):,} {plural(len(found), 'point')}"
    names = " and ".join(lines)
    is_one = len(lines) == 1
    fastest_where = f"{names} {'is' if is_one else 'are each'} the fastest {where}"
    n_clear = [_n_clear(report, line) for line in lines]
    if n_clear[0] is None:
        return f"{fastest_where}."
    if not any(n_clear):
        return f"No lead is clear: {names} {'has' if is_one else 'each have'} the least mean step time {where}."
    return f"{fastest_where}, clearly at {' and '.join(f'{n:,}' for n in n_clear)}."


def _n_clear(report: SweepReport, line: str) -> int | None:
    """Return at how many points a line has a clear lead; None if its leads have no intervals."""
    known = [report.is_clear(point) for point in compared_points(report) if line in report.leaders[point]]
    if known and all(each is None for each in known):
        return None
    return sum(each is True for each in known)


def _lines_table(report: SweepReport) -> Html:
    equally = ["equally with others"] if _has_ties(report) else []
    header = ["schedule", "points", "fastest at", "share", *equally, "clear leads", "speed-up, least", "median", "most"]
    lines = [_cells(report, line) for line in report.lines]
    return table(f"Schedules, with the range of their speed-up over {report.table.baseline}", header, lines)


def _cells(report: SweepReport, line: str) -> list[str]:
    found = compared_points(report)
    wins = [point for point in found if line in report.leaders[point]]
    n_ties = sum(len(report.leaders[point]) > 1 for point in wins)
    n_clear = _n_clear(report, line)
    n_measured = sum(each.row is not None and report.line_of(each) == line for each in report.table.results)
    speedups = report.speedups[line]
    factors = [number(pick(speedups), f"{pick(speedups):.2f}") if speedups else "-" for pick in (min, median, max)]
    return [
        line,
        number(n_measured, f"{n_measured:,}"),
        number(len(wins), f"{len(wins):,}"),
        percent(len(wins) / len(found)) if found else "-",
        *([number(n_ties, f"{n_ties:,}")] if _has_ties(report) else []),
        "-" if n_clear is None else number(n_clear, f"{n_clear:,}"),
        *factors,
    ]


def _has_ties(report: SweepReport) -> bool:
    return any(len(report.leaders[point]) > 1 for point in compared_points(report))


def _most_often(report: SweepReport, points: Iterable[int]) -> tuple[str, ...]:
    """Return the lines that are the fastest at most points, all at equally many."""
    wins = Counter(line for point in points for line in report.leaders[point])
    return tuple(line for line in report.lines if wins[line] == max(wins.values()))
