"""Model of a page of a sweep: its fields, the rows that are there, and which schedule is the fastest where."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from simdist.errors import UnsupportedError
from simdist.files import read_jsonl
from simdist.jobs.store import DESIGN
from simdist.report.figures import shortened
from simdist.settings.units import SI, Unit, format_Bps, format_nbytes, format_seconds, unit_of
from simdist.sweeps.fastest import Fastest, fastest
from simdist.sweeps.fields import Choice
from simdist.sweeps.results import read_sweep
from simdist.sweeps.table import ResultRow, Table, short_names, shown_text, uses_kinds, written_text

#: Rows that a page holds: some 20 MB.
MOST_ROWS = 200_000

#: Relative differences that are no larger are rounding: the schedules take equally long.
_ROUNDING = 1e-9

_MOST_VALUES = 200  # of the only field of a grid; more are drawn as a sample

_CASE = "case"
_LISTED = 24  # values of a number that are called as they are written
_WIDE = 3.0  # ratio of the ends from which on a logarithmic axis may be better

_Measure: TypeAlias = tuple[Callable[[float], str], tuple[tuple[str, float], ...]]
#: End of a column -> how its values are written, and the units of an axis, the largest first; the first that fits.
_UNITS: dict[str, _Measure] = {
    "_per_s": (lambda value: f"{value:.4g} /s", (("1/s", 1.0),)),
    "_s": (format_seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))),
    "_Bps": (format_Bps, (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0))),
    "_nbytes": (format_nbytes, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))),
    "": ("{:.4g}".format, (("", 1.0),)),
}


@dataclass(frozen=True, slots=True)
class VaryingField:
    """A field that has different values at different points, or the cases of a sweep.

    Args:
        column: Its name in tables.
        name: A short one, without unit.
        texts: Its values, as people read them: numbers in their order, others as they first occur.
        numbers: The same in SI units; None if some are no numbers.
        codes: Place of the value of each point in `texts`; None where a point does not set the field.
        unit: Of the axis; empty if it has none.
        unit_size: Divisor of `numbers` for the axis.
        is_log: Whether a logarithmic axis spreads the values better.
    """

    column: str
    name: str
    texts: tuple[str, ...]
    numbers: tuple[float, ...] | None
    codes: tuple[int | None, ...]
    unit: str = ""
    unit_size: float = 1.0
    is_log: bool = False

    @property
    def n_values(self) -> int:
        """How many different values there are."""
        return len(self.texts)

    @property
    def is_left(self) -> bool:
        """Whether some points leave the field as the scenario has it."""
        return None in self.codes

    @property
    def title(self) -> str:
        """The name with the unit of the axis."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


def varying_fields(columns: Sequence[str], choices: Sequence[Sequence[Choice | None]]) -> list[VaryingField]:
    """Return the fields of a sweep.

    Args:
        columns: Their names.
        choices: Of each point, in the order of `columns`.
    """
    names = short_names(columns)
    of_fields = zip(*choices, strict=True) if choices else [()] * len(columns)
    return [_field(column, name, of_points) for column, name, of_points in zip(columns, names, of_fields, strict=True)]


def _case_field(cases: Sequence[str]) -> VaryingField:
    """Return the cases as a field."""
    texts = tuple(dict.fromkeys(cases))
    return VaryingField(_CASE, _CASE, texts, None, tuple(map(texts.index, cases)))


def _field(column: str, name: str, choices: Sequence[Choice | None]) -> VaryingField:
    found = {_key(choice): choice for choice in reversed(choices) if choice}
    there = [found[key] for key in dict.fromkeys(_key(choice) for choice in choices if choice)]
    numbers = [number for each in there if (number := _number(each)) is not None]
    if len(numbers) < len(there) or not numbers:
        texts = tuple(shortened(written_text(each)) for each in there)
        return VaryingField(column, name, texts, None, _codes(there, choices))
    in_order = [there[place] for place in sorted(range(len(there)), key=numbers.__getitem__)]
    numbers.sort()
    own = _own_unit(in_order)
    texts = _texts(column, in_order, numbers, own)
    codes = _codes(in_order, choices)
    unit, size = (own.text.strip(), float(own.size)) if own else _unit(column, max(map(abs, numbers)))
    return VaryingField(column, name, texts, tuple(numbers), codes, unit, size, _is_log(numbers))


def _number(choice: Choice) -> float | None:
    number = choice.number
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        return None
    return float(number)


def _key(choice: Choice) -> tuple[str, str]:
    """Return what equal values share: True is no 1 here, but 2 and 2.0 are the same."""
    number = _number(choice)
    return (type(choice.number).__name__, str(choice.number)) if number is None else ("number", repr(number))


def _codes(there: Sequence[Choice], choices: Sequence[Choice | None]) -> tuple[int | None, ...]:
    places = {_key(choice): place for place, choice in enumerate(there)}
    return tuple(places[_key(choice)] if choice else None for choice in choices)


def _own_unit(there: Sequence[Choice]) -> Unit | None:
    """Return the unit that the user has written all values in; None without one, or with several."""
    units = {unit_of(each.written) for each in there}
    return units.pop() if len(units) == 1 and SI not in units else None


def _texts(column: str, in_order: Sequence[Choice], numbers: Sequence[float], own: Unit | None) -> tuple[str, ...]:
    """Return values as they are written; long ones rounded, in SI units unless all are written in one unit."""
    if len(in_order) <= _LISTED and len({written_text(each) for each in in_order}) == len(in_order):
        texts = tuple(written_text(each) for each in in_order)
        if all(len(text) <= len("100 Gbit/s") for text in texts):
            return texts
    if own:
        texts = tuple(map(shown_text, in_order))
        return texts if len(set(texts)) == len(texts) else tuple(map(written_text, in_order))
    write, _ = _measure(column)
    return tuple(map(write, numbers))


def _unit(column: str, largest: float) -> tuple[str, float]:
    _, units = _measure(column)
    return next(((name, size) for name, size in units if largest >= size), units[-1])


def _measure(column: str) -> _Measure:
    return next(measure for end, measure in _UNITS.items() if column.endswith(end))


def _is_log(numbers: Sequence[float]) -> bool:
    """Tell whether numbers, in their order, are spread better by their logarithms: the middle one decides.

    >>> _is_log([2, 4, 8, 16]), _is_log([1, 2, 3, 4, 5]), _is_log([0, 1, 10])
    (True, False, False)
    """
    low = numbers[0]
    high = numbers[-1]
    if low <= 0 or high / low < _WIDE:
        return False
    half = len(numbers) // 2
    middle = numbers[half] if len(numbers) % 2 else math.sqrt(numbers[half - 1] * numbers[half])
    return abs(math.log(middle / math.sqrt(low * high))) < abs(math.log(middle / ((low + high) / 2)))


@dataclass(frozen=True)
class SweepReport:
    """Everything that the page of a sweep shows.

    Args:
        folder: Where it was computed.
        name: Of the sweep.
        scenario: Name of what it varies.
        version: Of the simdist that wrote its design.
        sampling: How points were taken: `grid`, `random` or `sobol`.
        n_seeds: Delays that each row is measured with.
        n_points: In its design.
        n_schedules: Of each point in the design.
        columns: All fields, those with one value included.
        case: The cases; None if there are none.
        table: The rows that are there.
        best: The fastest schedule of each point at which one was measured, by point.
    """

    folder: Path
    name: str
    scenario: str
    version: str
    sampling: str
    n_seeds: int
    n_points: int
    n_schedules: tuple[int, ...]
    columns: tuple[VaryingField, ...]
    case: VaryingField | None
    table: Table
    best: dict[int, Fastest]

    @cached_property
    def axes(self) -> tuple[VaryingField, ...]:
        """Dimensions along which points differ independently: the cases, and fields that are not set by them."""
        free = [field for field in self.columns if field.n_values > 1 and not self._follows_case(field)]
        return (*([self.case] if self.case and self.case.n_values > 1 else []), *free)

    @cached_property
    def differing(self) -> tuple[VaryingField, ...]:
        """Dimensions along which points differ: the axes, and then what follows the cases."""
        others = (field for field in self.columns if field.n_values > 1 or field.is_left)
        return (*self.axes, *(field for field in others if self._follows_case(field)))

    def _follows_case(self, field: VaryingField) -> bool:
        case = self.case
        return case is not None and len(set(zip(case.codes, field.codes, strict=True))) == case.n_values

    @cached_property
    def is_grid(self) -> bool:
        """Whether the points are all combinations of the values, and these few enough to be drawn one by one."""
        return self.sampling == "grid" and not (len(self.axes) == 1 and self.axes[0].n_values > _MOST_VALUES)

    @cached_property
    def _uses_kinds(self) -> bool:
        """Whether a kind says which schedule is meant where labels change from point to point."""
        return uses_kinds(self.table.results)

    def line_of(self, result: ResultRow) -> str:
        """Return what a row belongs to in charts: its schedule, by kind where settings of schedules are varied."""
        return result.kind if self._uses_kinds else result.schedule

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """All that rows belong to, in their order."""
        return tuple(dict.fromkeys(map(self.line_of, self.table.results)))

    @cached_property
    def base_lines(self) -> frozenset[str]:
        """Those whose speed-up is 1 everywhere, because they are the baseline."""
        base = self.table.baseline
        named = {self.line_of(each) for each in self.table.results if each.schedule == base}
        return frozenset(named or {self.line_of(each) for each in self.table.results if each.kind == base})

    @cached_property
    def leaders(self) -> dict[int, tuple[str, ...]]:
        """The fastest line of each point at which one was measured; several where they take equally long."""
        found: dict[int, list[tuple[float, str]]] = {}
        for each in self.table.results:
            if each.row:
                found.setdefault(int(each.point), []).append((each.row.step_s, self.line_of(each)))
        return {point: tuple(_least(of_point)) for point, of_point in found.items()}

    def is_clear(self, point: int) -> bool | None:
        """Tell whether the lead at a point is clear, which no lead at all is not; None if there are no intervals."""
        return self.best[point].is_clear and len(self.leaders[point]) == 1

    @cached_property
    def n_rows(self) -> int:
        """Rows of the design."""
        return len(self.table.results) + self.table.n_missing

    @cached_property
    def speedups(self) -> dict[str, list[float]]:
        """The speed-up of each row of a line that has one."""
        found: dict[str, list[float]] = {line: [] for line in self.lines}
        for each in self.table.results:
            if each.row and each.has_baseline:
                found[self.line_of(each)].append(each.row.speedup)
        return found


def read_sweep_report(folder: Path, *, baseline: str | None) -> SweepReport:
    """Read a sweep.

    Args:
        folder: Where `simdist sweep -o` wrote it.
        baseline: Label or kind of the schedule that speed-ups are over; that of the sweep if None.

    Raises:
        RunError: A file cannot be read, or is damaged.
        UnsupportedError: There are more rows than a page holds.
    """
    table = read_sweep(folder, baseline=baseline)
    if len(table.results) > MOST_ROWS:
        raise UnsupportedError(
            f"{folder}: {len(table.results):,} rows, of which a page holds {MOST_ROWS:,}: write them with "
            f"`simdist results {folder} --csv FILE`, or sweep a part of it"
        )
    header, *lines = read_jsonl(folder / DESIGN)
    points = {int(line["point"]): line for line in lines}
    choices = [_choices(line["written"], line["values"]) for line in points.values()]
    cases = [str(line["case"]) for line in points.values()]
    return SweepReport(
        folder=folder,
        name=str(header["sweep"]),
        scenario=str(header["scenario"]),
        version=str(header["simdist"]),
        sampling=str(header["sampling"]),
        n_seeds=int(header["seeds"]),
        n_points=len(points),
        n_schedules=tuple(Counter(int(line["point"]) for line in lines).values()),
        columns=tuple(varying_fields(table.varied, choices)),
        case=_case_field(cases) if header["has_cases"] else None,
        table=table,
        best={int(each.result.point): each for each in fastest(table)},
    )


def _least(step_s: Sequence[tuple[float, str]]) -> Iterator[str]:
    """Yield the lines with the least step time, but for rounding, each once."""
    most_s = min(seconds for seconds, _ in step_s) * (1 + _ROUNDING)
    yield from dict.fromkeys(line for seconds, line in step_s if seconds <= most_s)


def _choices(written: Sequence[object], values: Sequence[object]) -> list[Choice | None]:
    return [None if value is None else Choice(text, value) for text, value in zip(written, values, strict=True)]
