"""Rows and columns of a table: conditions such as `nodes>4` and `step_s<=200 ms`, the order, the fastest schedules."""

import difflib
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from simdist.errors import ScenarioError
from simdist.settings.base import nearest, shown
from simdist.settings.units import parse_Bps, parse_flops, parse_nbytes, parse_seconds
from simdist.studies.comparison import row
from simdist.studies.measuring import ScheduleTimes
from simdist.sweeps.table import Columns, ResultRow, Table, columns, shown_text, source_text, written_text

_UNIT = re.compile(r"_(per_s|s|Bps|nbytes)$")
_CONDITION = re.compile(r"([^<>=!]+)(>=|<=|!=|=|>|<)(.*)", re.DOTALL)
_ORDERS = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
_PARSERS: dict[str, Callable[[object], float]] = {
    "_s": parse_seconds,
    "_Bps": parse_Bps,
    "_nbytes": parse_nbytes,
    "_flops": parse_flops,
}
_INTERVAL = re.compile("_(low|high)$")
_SAME = 1e-9  # relative difference of numbers that are equal
_MANY = 12  # values that a message names
_KEPT = {"folder", "point", "case", "source", "schedule", "kind", "seeds"} | {
    f"{name}{end}" for name in ("step_s", "speedup") for end in ("", "_low", "_high")
}


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
        met = _fulfilling(table, found, text)
        kept = [both and one for both, one in zip(kept, met, strict=True)]
    return replace(table, results=tuple(each for each, keep in zip(table.results, kept, strict=True) if keep))


def _fulfilling(table: Table, found: Columns, text: str) -> list[bool]:
    """Tell which rows fulfil a condition."""
    parts = _CONDITION.fullmatch(text)
    if parts is None:
        raise ScenarioError(f"--where {shown(text)}: write COLUMN=VALUE, e.g. schedule=sync, or nodes>4")
    column = find_column(list(found), parts[1].strip())
    comparison = parts[2]
    wanted = parts[3].strip()
    values = found[column]
    number = _number(column, wanted)
    texts = [_texts(each, column, value) for each, value in zip(table.results, values, strict=True)]
    shown_texts = list(dict.fromkeys(of_row[-1] or "empty" for of_row in texts))
    known = ", ".join(shown_texts[:_MANY]) + (", ..." if len(shown_texts) > _MANY else "")
    if comparison not in _ORDERS:
        met = [
            (_is_close(value, number) or _bare(wanted) in map(_bare, of_row)) == (comparison == "=")
            for value, of_row in zip(values, texts, strict=True)
        ]
    elif any(isinstance(value, str) and value for value in values):
        raise ScenarioError(f"--where {text}: {column} is text: write = or !=")
    elif number is None:
        raise ScenarioError(f"--where {text}: {shown(wanted)} is not a value of {column}, which is {known}")
    else:
        met = [_is_number(value) and _ORDERS[comparison](value, number) for value in values]
    if table.results and not any(met):
        raise ScenarioError(f"--where {text}: no row has that; {column} is {known}")
    return met


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_close(value: object, number: float | None) -> bool:
    return number is not None and _is_number(value) and math.isclose(value, number, rel_tol=_SAME)


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


def _texts(result: ResultRow, column: str, value: object) -> list[str]:
    """Return all names of a value, the one on screen last."""
    texts = ["" if value is None else str(value)]
    if column in result.choices:
        texts += [written_text(result.choices[column]), shown_text(result.choices[column])]
    return [*texts, source_text(result.source)] if column == "source" else texts


def _bare(text: str) -> str:
    return text.replace(" ", "")


def short_names(columns: Sequence[str]) -> list[str]:
    """Return the last parts of columns, as few as tell them apart, without units.

    >>> short_names(["cluster.fabric.latency_s", "cluster.network.latency_s", "cluster.nodes", "schedules[1].period"])
    ['fabric.latency', 'network.latency', 'nodes', 'schedules[1].period']
    """
    return [_short_name(column, [other for other in columns if other != column]) for column in columns]


def _short_name(column: str, others: Sequence[str]) -> str:
    parts = column.split(".")
    for count in range(1, len(parts) + 1):
        tail = ".".join(parts[-count:])
        is_alone = not any(f".{other}".endswith(f".{tail}") for other in others)
        of_item = count == 1 and len(parts) > 1 and parts[-2].endswith("]")  # a period is a period of something
        if is_alone and not of_item:
            break
    return _UNIT.sub("", tail)


def find_column(names: Sequence[str], wanted: str) -> str:
    """Return the column of that name, or the only one that ends with it, with or without unit.

    Raises:
        ScenarioError: There is none, or there are several.

    >>> find_column(["point", "step_s", "cluster.network.latency_s"], "latency")
    'cluster.network.latency_s'
    """
    if wanted in names:
        return wanted
    found = [name for name in names if any(f".{each}".endswith(f".{wanted}") for each in (name, _UNIT.sub("", name)))]
    if len(found) == 1:
        return found[0]
    hint = f"write {' or '.join(found)}" if found else _nearest(wanted, names)
    raise ScenarioError(f"there is no column {shown(wanted)}: {hint}")


def _nearest(wanted: str, names: Sequence[str]) -> str:
    """Return the end of a message: the column that was meant, or each once, the most similar first."""
    pairs = zip(names, short_names(names), strict=True)
    known = [short if "." in name else name for name, short in pairs]
    known.sort(key=lambda name: -difflib.SequenceMatcher(None, wanted, name).ratio())
    return nearest(wanted, known)


@dataclass(frozen=True, slots=True)
class Fastest:
    """The fastest schedule of a point.

    Args:
        result: Its row.
        n_schedules: Number of compared schedules, without failed ones.
        next_one: The second fastest; empty if there is no other.
        lead: Step time of the second / that of the fastest; None if there is no other.
        lead_ci95: 95 % confidence interval of that, over seeds; None with one seed.
        is_clear: Whether it is faster than every other schedule by more than the interval of their difference, and not
            only than the second: a third may vary too much. None with one seed. Of schedules that are
            equal, about one in twenty looks clear by chance.
    """

    result: ResultRow
    n_schedules: int
    next_one: str = ""
    lead: float | None = None
    lead_ci95: tuple[float, float] | None = None
    is_clear: bool | None = None


def fastest(table: Table) -> list[Fastest]:
    """Return the fastest schedule of each point and source, in the order of the table."""
    points: dict[object, list[tuple[float, ResultRow, ScheduleTimes]]] = {}
    for each in table.results:
        if each.measured:
            points.setdefault(each.group, []).append((float(each.measured.step_s.mean()), each, each.measured))
    return [_fastest(of_point) for of_point in points.values()]


def _fastest(of_point: Sequence[tuple[float, ResultRow, ScheduleTimes]]) -> Fastest:
    (_, first, measured), *others = sorted(of_point, key=lambda item: item[0])
    if not others:
        return Fastest(first, 1)
    compared = [row(measured, slower) for _, _, slower in others]  # in pairs: the seeds are the same
    intervals = [each.speedup_ci95 for each in compared]
    is_clear = all(each[0] > 1 for each in intervals if each) if all(intervals) else None
    second = others[0][1]
    return Fastest(first, len(of_point), second.schedule, compared[0].speedup, intervals[0], is_clear)


def fastest_columns(table: Table, found: Sequence[Fastest]) -> Columns:
    """Return a table of the fastest schedules, a row per point and source.

    Columns:
        schedules (int): Schedules at the point.
        next (str): Label of the second.
        lead (float or null): Step time of the second / step time of the fastest.
        lead_low, lead_high (float or null): Ends of its 95 % confidence interval, over the same seeds.
        clear (bool or null): The intervals of its leads over all other schedules of the point are above 1. By chance,
            this holds for about one in twenty of equal schedules.

    Args:
        table: The table of the rows.
        found: Results of `fastest` in it, in any order.
    """
    whole = columns(replace(table, results=tuple(each.result for each in found)))
    intervals = [each.lead_ci95 or (None, None) for each in found]
    return {name: values for name, values in whole.items() if name in table.varied or name in _KEPT} | {
        "schedules": [each.n_schedules for each in found],
        "next": [each.next_one for each in found],
        "lead": [each.lead for each in found],
        "lead_low": [low for low, _ in intervals],
        "lead_high": [high for _, high in intervals],
        "clear": [each.is_clear for each in found],
    }
