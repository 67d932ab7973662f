"""The answer of a sweep: how often which schedule is the fastest, by how much, and where that changes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from statistics import median

from simdist.report.page.document import Section
from simdist.report.page.html import Html, conclusions, join, number, percent, table, tag
from simdist.report.page.sweep_model import ROUNDING, SweepReport, VaryingField
from simdist.sweep.selection import Fastest

_MOST_LISTED = 12  # values of a field that are told one by one
_N_PARTS = 4
_LEAST_PERCENT = 0.001  # that is written
_ABOUT = (
    "At each point the schedules are compared by their mean step time, over the same seeds; those that take equally "
    "long all count as the fastest. A lead is the step time of the second over that of the fastest."
)
_CLEAR = (
    "A lead is clear if the 95 % confidence intervals against all other schedules lie above 1. Where schedules are "
    "equal and only chance tells them apart, about one lead in twenty looks clear all the same."
)


def fastest_section(report: SweepReport) -> Section:
    """Show how often each schedule is the fastest, and at which values of the fields."""
    about = f"{_ABOUT} {_CLEAR}" if report.n_seeds > 1 else _ABOUT
    parts = [tag("p", about), conclusions([fastest_conclusion(report)]), _lines_table(report), *_changes(report)]
    return Section("fastest", "Which schedule is the fastest", join(parts))


def compared(report: SweepReport) -> dict[int, Fastest]:
    """Return the fastest schedule of the points at which there are two or more to compare."""
    return {point: each for point, each in report.best.items() if each.next_one}


def fastest_conclusion(report: SweepReport) -> str:
    """Say which schedules are the fastest at most points, all at equally many, and at how many."""
    found = compared(report)
    if not found:
        return "At no point were two schedules measured, so there is none that is faster."
    lines = _most_often(report, found)
    n_wins = sum(lines[0] in report.leaders[point] for point in found)
    where = "every one" if n_wins == len(found) else f"{n_wins:,} ({percent(n_wins / len(found))})"
    are = "is the fastest" if len(lines) == 1 else "are each the fastest"
    return f"{' and '.join(lines)} {are} at {where} of {len(found):,} point{'s' * (len(found) > 1)}."


def lead_percent(lead: float) -> str:
    """Return by how much the second takes longer than the fastest, so that it is never 0 where there is a lead.

    >>> lead_percent(1.1234), lead_percent(1.00042), lead_percent(1.000001), lead_percent(1.0)
    ('+12.3 %', '+0.042 %', '+<0.001 %', '+0 %')
    """
    percents = 100 * (lead - 1)
    if percents < _LEAST_PERCENT:
        return "+0 %" if lead - 1 <= ROUNDING else f"+<{_LEAST_PERCENT:g} %"
    return f"+{percents:.1f} %" if percents >= 1 else f"+{percents:.2g} %"


def _lines_table(report: SweepReport) -> Html:
    equally = ["equally with others"] if _has_ties(report) else []
    header = ["schedule", "points", "fastest at", "share", *equally, "clear leads", "speed-up, least", "median", "most"]
    lines = [_cells(report, line) for line in report.lines]
    return table(f"Schedules, with the range of their speed-up over {report.table.baseline}", header, lines)


def _cells(report: SweepReport, line: str) -> list[str]:
    found = compared(report)
    wins = [point for point in found if line in report.leaders[point]]
    n_ties = sum(len(report.leaders[point]) > 1 for point in wins)
    known = [clear for point in wins if (clear := report.is_clear(point)) is not None]
    n_measured = sum(each.row is not None and report.line_of(each) == line for each in report.table.results)
    speedups = report.speedups[line]
    factors = [number(pick(speedups), f"{pick(speedups):.2f}") if speedups else "-" for pick in (min, median, max)]
    return [
        line,
        number(n_measured, f"{n_measured:,}"),
        number(len(wins), f"{len(wins):,}"),
        percent(len(wins) / len(found)) if found else "-",
        *([number(n_ties, f"{n_ties:,}")] if _has_ties(report) else []),
        number(sum(known), f"{sum(known):,}") if known or not wins else "-",
        *factors,
    ]


def _has_ties(report: SweepReport) -> bool:
    return any(len(report.leaders[point]) > 1 for point in compared(report))


def _changes(report: SweepReport) -> Iterator[Html]:
    """Tell for each field which schedule is most often the fastest at its values, others varying."""
    stretches = list(_stretches(report))
    if not stretches:
        return
    yield tag("h3", "Where the fastest one changes")
    most = {lines for lines, _ in stretches}
    if len(most) == 1:
        what = "at every value of every field" if len(report.axes) > 1 else f"at every value of {report.axes[0].name}"
        always = most.pop()
        are = f"{' and '.join(always)} {'are' if len(always) > 1 else 'is'}"
        yield tag("p", f"Nowhere: {are} most often the fastest {what}.")
        return
    others = ", the other fields varying as they do" if len(report.axes) > 1 else ""
    quarters = "" if report.is_grid else " Of many values, each line is of one or more quarters of them."
    yield tag("p", f"The schedule that is most often the fastest, by values of a field{others}.{quarters}")
    header = ["field", "at", "fastest", "at points", "median lead"]
    cells = [each for _, each in stretches]
    yield table("The schedule that is most often the fastest", header, cells, words=["at", "fastest", "at points"])


def _stretches(report: SweepReport) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield the lines that are most often the fastest at neighbouring values of a field, and the cells that say so."""
    found = compared(report)
    for field in report.axes:
        parts = [
            (text, there) for text, points in _parts(field) if (there := [point for point in points if point in found])
        ]
        for lines, stretch in groupby(parts, key=lambda part: _most_often(report, part[1])):
            texts, of_texts = zip(*stretch, strict=True)
            points = list(chain(*of_texts))
            n_wins = sum(lines[0] in report.leaders[point] for point in points)
            wins = f"{n_wins:,}{' each' if len(lines) > 1 else ''} of {len(points):,}"
            won = [found[point].lead for point in points if {*report.leaders[point]} & {*lines}]
            lead = median(each for each in won if each)
            at = _range(texts, field)
            yield lines, [field.name, at, " and ".join(lines), wins, number(lead, lead_percent(lead))]


def _most_often(report: SweepReport, points: Iterable[int]) -> tuple[str, ...]:
    """Return the lines that are the fastest at most points, all at equally many."""
    wins = Counter(line for point in points for line in report.leaders[point])
    return tuple(line for line in report.lines if wins[line] == max(wins.values()))


def _range(texts: Sequence[str], field: VaryingField) -> str:
    first, last = texts[0].partition(" to ")[0], texts[-1].rpartition(" to ")[2]
    if field.numbers is None or (len(texts) <= 2 and first == texts[0]):
        return ", ".join(texts)
    return f"{first} to {last}"


def _parts(field: VaryingField) -> Iterator[tuple[str, list[int]]]:
    """Yield values with their points; of many values, quarters of the points in their order."""
    points: list[list[int]] = [[] for _ in field.texts]
    for point, code in enumerate(field.codes):
        if code is not None:
            points[code].append(point)
    if field.n_values <= _MOST_LISTED or field.numbers is None:
        yield from zip(field.texts, points, strict=True)
        return
    for part in range(_N_PARTS):
        first, last = part * field.n_values // _N_PARTS, (part + 1) * field.n_values // _N_PARTS - 1
        together = [point for each in points[first : last + 1] for point in each]
        yield f"{field.texts[first]} to {field.texts[last]}", together
