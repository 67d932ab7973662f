"""The answer of a sweep: how often which schedule is the fastest, by how much, and where that changes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from simdist.report.page.document import Section
from simdist.report.page.html import Html, join, number, percent, table, tag
from simdist.report.page.sweep_fields import VaryingField
from simdist.report.page.sweep_model import SweepReport
from simdist.sweep.fastest import Fastest

__all__ = ["compared", "fastest_conclusion", "fastest_section"]

_MOST_LISTED = 12  # values of a field that are told one by one
_N_PARTS = 4
_SAME = 1e-9  # leads that are smaller are rounding
_ABOUT = (
    "At each point the schedules are compared by their mean step time, over the same seeds. A lead, the step time of "
    "the second over that of the fastest, is clear if its 95 % confidence interval lies above 1."
)


def fastest_section(report: SweepReport) -> Section:
    """Show how often each schedule is the fastest, and at which values of the fields."""
    sentences = [tag("p", text, class_="conclusion") for text in fastest_conclusion(report)]
    parts = [tag("p", _ABOUT), *sentences, _lines_table(report), *_changes(report)]
    return Section("fastest", "Which schedule is the fastest", join(parts))


def compared(report: SweepReport) -> dict[int, Fastest]:
    """Return the fastest schedule of the points at which there are two or more to compare."""
    return {point: each for point, each in report.best.items() if each.next_one}


def fastest_conclusion(report: SweepReport) -> list[str]:
    """Say in sentences which schedule is the fastest, how often and how clearly, and what it gains."""
    found = compared(report)
    if not found:
        return ["At no point were two schedules measured, so there is none that is faster."]
    wins = Counter(report.line_of(each.result) for each in found.values())
    line, n_wins = wins.most_common(1)[0]
    where = "every one" if n_wins == len(found) else f"{n_wins:,} ({percent(n_wins / len(found))})"
    first = f"{line} is the fastest at {where} of {len(found):,} points{_clear(report, found, line)}."
    return [first, *_ties(found), *_gains(report)]


def _ties(found: dict[int, Fastest]) -> Iterator[str]:
    """Say where two schedules are the fastest together, so that naming one of them says nothing."""
    n_ties = sum(each.lead is not None and each.lead - 1 < _SAME for each in found.values())
    if n_ties:
        points = f"{n_ties:,} point{'s' * (n_ties > 1)}"
        yield f"At {points} the second takes just as long; the one that stands first in the sweep counts there."


def _clear(report: SweepReport, found: dict[int, Fastest], line: str) -> str:
    leads = [each.is_clear for each in found.values() if report.line_of(each.result) == line]
    if all(clear is None for clear in leads):
        return "; how clearly is not known, with one seed"
    n_clear = sum(clear is True for clear in leads)
    if n_clear == len(leads):
        return ", each time by more than the 95 % interval" if n_clear > 1 else ", by more than the 95 % interval"
    return f"; {n_clear:,} of these {len(leads):,} leads are beyond their 95 % intervals"


def _gains(report: SweepReport) -> Iterator[str]:
    """Say of each schedule but the baseline how many times as fast it is."""
    base = report.table.baseline
    for line in report.lines:
        found = [speedup for _, speedup in report.speedups(line)]
        if not found or line in report.base_lines:
            continue
        if len(found) == 1:
            yield f"{line} is {found[0]:.2f} times as fast as {base}."
            continue
        most = (
            f"{line} is {min(found):.2f} to {max(found):.2f} times as fast as {base}, {median(found):.2f} in the median"
        )
        yield f"{most}{_losses(report, line, len(found))}."


def _losses(report: SweepReport, line: str, n_points: int) -> str:
    """Say at how many points a schedule is slower than the baseline."""
    below = [row for row in report.compared_rows(line) if row.speedup < 1]
    if not below:
        return ""
    slower = f"; it is slower at {len(below):,} of {n_points:,} points"
    intervals = [row.speedup_ci95 for row in below if row.speedup_ci95]
    if not intervals:
        return slower
    n_clear = sum(high < 1 for _, high in intervals)
    return f"{slower}, {'all' if n_clear == len(below) else f'{n_clear:,}'} of these beyond the 95 % intervals"


def _lines_table(report: SweepReport) -> Html:
    header = ["schedule", "points", "fastest at", "share", "clear leads", "speed-up, least", "median", "most"]
    lines = [_cells(report, line) for line in report.lines]
    return table(f"Schedules, with the range of their speed-up over {report.table.baseline}", header, lines)


def _cells(report: SweepReport, line: str) -> list[str]:
    found = compared(report)
    wins = [each for each in found.values() if report.line_of(each.result) == line]
    known = [each for each in wins if each.is_clear is not None]
    n_measured = sum(each.row is not None and report.line_of(each) == line for each in report.table.results)
    speedups = [speedup for _, speedup in report.speedups(line)]
    factors = [number(pick(speedups), f"{pick(speedups):.2f}") if speedups else "-" for pick in (min, median, max)]
    return [
        line,
        number(n_measured, f"{n_measured:,}"),
        number(len(wins), f"{len(wins):,}"),
        percent(len(wins) / len(found)) if found else "-",
        number(sum(each.is_clear is True for each in known), f"{sum(each.is_clear is True for each in known):,}")
        if known or not wins
        else "-",
        *factors,
    ]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Values of a field that lie beside each other, at which the same schedules are most often the fastest."""

    lines: tuple[str, ...]
    texts: tuple[str, ...]
    n_wins: int
    n_points: int
    leads: tuple[float, ...]


def _changes(report: SweepReport) -> Iterator[Html]:
    """Tell for each field which schedule is most often the fastest at its values, others varying."""
    stretches = [(field, each) for field in report.axes for each in _stretches(report, field)]
    if not stretches:
        return
    yield tag("h3", "Where the fastest one changes")
    most = {each.lines for _, each in stretches}
    if len(most) == 1:
        what = "at every value of every field" if len(report.axes) > 1 else f"at every value of {report.axes[0].name}"
        yield tag("p", f"Nowhere: {' and '.join(most.pop())} is most often the fastest {what}.")
        return
    others = ", the other fields varying as they do" if len(report.axes) > 1 else ""
    quarters = "" if report.is_grid else " Of many values, each line is of one or more quarters of them."
    yield tag("p", f"The schedule that is most often the fastest, by values of a field{others}.{quarters}")
    header = ["field", "at", "fastest", "at points", "median lead"]
    lines = [_stretch_cells(field, each) for field, each in stretches]
    yield table("The schedule that is most often the fastest", header, lines, words=["at", "fastest", "at points"])


def _stretch_cells(field: VaryingField, each: _Stretch) -> list[str]:
    lead = median(each.leads)
    together = " and " if len(each.lines) > 1 else ""
    wins = f"{each.n_wins:,}{' each' if together else ''} of {each.n_points:,}"
    at = _range(each.texts, field)
    return [field.name, at, " and ".join(each.lines), wins, number(lead, f"+{100 * (lead - 1):.2g} %")]


def _stretches(report: SweepReport, field: VaryingField) -> list[_Stretch]:
    """Return the values of a field from the first to the last, those with the same answer together."""
    found = compared(report)
    stretches: list[_Stretch] = []
    for text, points in _parts(field):
        there = [found[point] for point in points if point in found]
        if not there:
            continue
        new = _stretch(report, text, there)
        if stretches and stretches[-1].lines == new.lines:
            new = _together(stretches.pop(), new)
        stretches.append(new)
    return stretches


def _stretch(report: SweepReport, text: str, there: Sequence[Fastest]) -> _Stretch:
    wins = Counter(report.line_of(each.result) for each in there)
    most = max(wins.values())
    lines = tuple(line for line in report.lines if wins[line] == most)
    leads = tuple(each.lead for each in there if each.lead is not None and report.line_of(each.result) in lines)
    return _Stretch(lines, (text,), most, len(there), leads)


def _together(a: _Stretch, b: _Stretch) -> _Stretch:
    return _Stretch(a.lines, a.texts + b.texts, a.n_wins + b.n_wins, a.n_points + b.n_points, a.leads + b.leads)


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
