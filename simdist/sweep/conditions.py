"""Conditions of rows, such as `schedule=sync`, `nodes>4` and `step_s<=200 ms`."""

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from simdist.errors import ScenarioError
from simdist.settings.base import shown
from simdist.settings.units import parse_Bps, parse_flops, parse_nbytes, parse_seconds
from simdist.sweep.selection import find_column
from simdist.sweep.table import Result, Table, columns, shown_text, source_text, written_text

_CONDITION = re.compile(r"([^<>=!]+)(>=|<=|!=|=|>|<)(.*)", re.DOTALL)
_ORDERS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_PARSERS: dict[str, Callable[[object], float]] = {
    "_s": parse_seconds,
    "_Bps": parse_Bps,
    "_nbytes": parse_nbytes,
    "_flops": parse_flops,
}
_INTERVAL = re.compile("_(low|high)$")
_SAME = 1e-9  # relative difference of numbers that are equal
_MANY = 12  # values that a message names


@dataclass(frozen=True, slots=True)
class _Condition:
    """What a row must fulfil; `number` is what is wanted in SI units, None if that is no number."""

    column: str
    comparison: str
    wanted: str
    number: float | None

    def is_met(self, result: Result, value: object) -> bool:
        """Tell whether a row fulfils it, with `value` in the column."""
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
        if order := _ORDERS.get(self.comparison):
            return number is not None and self.number is not None and order(number, self.number)
        texts = map(_bare, _texts(result, self.column, value))
        is_equal = _is_close(number, self.number) or _bare(self.wanted) in texts
        return is_equal == (self.comparison == "=")


def _is_close(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and math.isclose(one, other, rel_tol=_SAME)


def where(table: Table, conditions: Sequence[str]) -> Table:
    """Return the rows that fulfil all conditions.

    Args:
        table: Of results.
        conditions: `COLUMN=VALUE`, or with `!=`, `<`, `<=`, `>` or `>=`. A value is written as in the table on a
            screen, as in the sweep file, in any unit that fits, or as a number in SI units.

    Raises:
        ScenarioError: A condition is no condition, or no row fulfils it.
    """
    kept = [True] * len(table.results)
    found = columns(table)
    for text in conditions:
        condition = _parsed(text, list(found))
        values = found[condition.column]
        _check_order(table, condition, values, text)
        fulfils = [condition.is_met(each, value) for each, value in zip(table.results, values, strict=True)]
        if table.results and not any(fulfils):
            known = _values(table, condition.column, values)
            raise ScenarioError(f"--where {text}: no row has that; {condition.column} is {known}")
        kept = [both and one for both, one in zip(kept, fulfils, strict=True)]
    return replace(table, results=tuple(each for each, keep in zip(table.results, kept, strict=True) if keep))


def _parsed(text: str, names: Sequence[str]) -> _Condition:
    parts = _CONDITION.fullmatch(text)
    if parts is None:
        raise ScenarioError(f"--where {shown(text)}: write COLUMN=VALUE, e.g. schedule=sync, or nodes>4")
    column, wanted = find_column(names, parts[1].strip()), parts[3].strip()
    return _Condition(column, parts[2], wanted, _number(column, wanted))


def _check_order(table: Table, condition: _Condition, values: Sequence[object], text: str) -> None:
    """Refuse to order what has no order."""
    if condition.comparison not in _ORDERS:
        return
    if any(isinstance(value, str) and value for value in values):
        raise ScenarioError(f"--where {text}: {condition.column} is text: write = or !=")
    if condition.number is None:
        known = _values(table, condition.column, values)
        wrong = f"{shown(condition.wanted)} is no value of {condition.column}, which is {known}"
        raise ScenarioError(f"--where {text}: {wrong}")


def _number(column: str, text: str) -> float | None:
    """Read a value of a column: in SI units, with a unit that fits, or in percent."""
    try:
        return float(text)
    except ValueError:
        pass
    name = _INTERVAL.sub("", column)
    parse = next((parse for end, parse in _PARSERS.items() if name.endswith(end)), None)
    try:
        if text.endswith("%") and parse is None:
            return float(text[:-1]) / 100
        return parse(text) if parse and not name.endswith("_per_s") else None
    except ValueError:
        return None


def _texts(result: Result, column: str, value: object) -> set[str]:
    """Return all that a value may be called."""
    texts = {"" if value is None else str(value)}
    if column in result.choices:
        texts |= {written_text(result.choices[column]), shown_text(result.choices[column])}
    return texts | ({source_text(result.source)} if column == "source" else set())


def _bare(text: str) -> str:
    return text.replace(" ", "")


def _values(table: Table, column: str, values: Sequence[object]) -> str:
    """Name the values of a column, as a screen shows them."""
    pairs = zip(table.results, values, strict=True)
    texts = dict.fromkeys(_shown(each, column, value) or "empty" for each, value in pairs)
    return ", ".join(list(texts)[:_MANY]) + (", ..." if len(texts) > _MANY else "")


def _shown(result: Result, column: str, value: object) -> str:
    if column in result.choices:
        return shown_text(result.choices[column])
    if column == "source":
        return source_text(result.source)
    return "" if value is None else str(value)
