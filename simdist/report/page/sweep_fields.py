"""The fields of a sweep as a page shows them: their values in order, what they are called, and a scale that suits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simdist.report.figures import shortened
from simdist.settings.units import format_Bps, format_nbytes, format_seconds
from simdist.sweep.fields import Choice
from simdist.sweep.selection import short_names
from simdist.sweep.table import written_text

CASE = "case"
_LISTED = 24  # values of a number that are called as they are written
_WIDE = 3.0  # ratio of the ends from which on a logarithmic axis may be better

_UNITS: dict[str, tuple[Callable[[float], str], tuple[tuple[str, float], ...]]] = {
    "_per_s": (lambda value: f"{value:.4g} /s", (("1/s", 1.0),)),
    "_s": (format_seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))),
    "_Bps": (format_Bps, (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0))),
    "_nbytes": (format_nbytes, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))),
}
"""End of a column -> how its values are written, and the units of an axis, the largest first."""


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
        unit_size: What `numbers` are divided by for the axis.
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


def case_field(cases: Sequence[str]) -> VaryingField:
    """Return the cases as a field.

    Args:
        cases: Of each point.
    """
    texts = tuple(dict.fromkeys(cases))
    return VaryingField(CASE, CASE, texts, None, tuple(map(texts.index, cases)))


def _field(column: str, name: str, choices: Sequence[Choice | None]) -> VaryingField:
    found = {_key(choice): choice for choice in reversed(choices) if choice}
    there = [found[key] for key in dict.fromkeys(_key(choice) for choice in choices if choice)]
    numbers = [number for each in there if (number := _number(each)) is not None]
    if len(numbers) < len(there) or not numbers:
        texts = tuple(shortened(written_text(each)) for each in there)
        return VaryingField(column, name, texts, None, _codes(there, choices))
    in_order = [there[place] for place in sorted(range(len(there)), key=numbers.__getitem__)]
    numbers.sort()
    unit, size = _unit(column, max(map(abs, numbers)))
    return VaryingField(
        column,
        name,
        _texts(column, in_order, numbers),
        tuple(numbers),
        _codes(in_order, choices),
        unit,
        size,
        is_log(numbers),
    )


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


def _texts(column: str, in_order: Sequence[Choice], numbers: Sequence[float]) -> tuple[str, ...]:
    """Return values as they are written; those that a sample has drawn, rounded."""
    if len(in_order) <= _LISTED and len({written_text(each) for each in in_order}) == len(in_order):
        texts = tuple(written_text(each) for each in in_order)
        if all(len(text) <= len("100 Gbit/s") for text in texts):
            return texts
    kind = next((end for end in _UNITS if column.endswith(end)), None)
    if kind is None:
        return tuple(f"{number:.4g}" for number in numbers)
    return tuple(_UNITS[kind][0](number) for number in numbers)


def _unit(column: str, largest: float) -> tuple[str, float]:
    kind = next((end for end in _UNITS if column.endswith(end)), None)
    if kind is None:
        return "", 1.0
    units = _UNITS[kind][1]
    return next(((name, size) for name, size in units if largest >= size), units[-1])


def is_log(numbers: Sequence[float]) -> bool:
    """Tell whether numbers, in their order, are spread better by their logarithms: the middle one decides.

    >>> is_log([2, 4, 8, 16]), is_log([1, 2, 3, 4, 5]), is_log([0, 1, 10])
    (True, False, False)
    """
    low, high = numbers[0], numbers[-1]
    if low <= 0 or high / low < _WIDE:
        return False
    half = len(numbers) // 2
    middle = numbers[half] if len(numbers) % 2 else math.sqrt(numbers[half - 1] * numbers[half])
    return abs(math.log(middle / math.sqrt(low * high))) < abs(math.log(middle / ((low + high) / 2)))
