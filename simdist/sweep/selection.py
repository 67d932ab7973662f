"""Some rows of a table, and their order."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from simdist.errors import ScenarioError
from simdist.settings import nearest, shown
from simdist.sweep.table import Columns, Result, Table, columns, written_text

__all__ = ["find_column", "order", "short_names", "where"]

_UNIT = re.compile(r"_(per_s|s|Bps|nbytes)$")
_MANY = 12  # values that a message names


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
    return _without_unit(tail)


def _without_unit(name: str) -> str:
    return _UNIT.sub("", name)


def find_column(names: Sequence[str], wanted: str) -> str:
    """Return the column of that name, or the only one whose last parts it is, with its unit or without.

    Raises:
        ScenarioError: There is none, or there are several.

    >>> find_column(["point", "step_s", "cluster.network.latency_s"], "latency")
    'cluster.network.latency_s'
    """
    if wanted in names:
        return wanted
    found = [
        name for name in names if f".{name}".endswith(f".{wanted}") or _without_unit(f".{name}").endswith(f".{wanted}")
    ]
    if len(found) == 1:
        return found[0]
    hint = f"write {' or '.join(found)}" if found else nearest(wanted, [*names, *short_names(names)])
    raise ScenarioError(f"there is no column {shown(wanted)}: {hint}")


def where(table: Table, conditions: Sequence[str]) -> Table:
    """Return the rows that fulfil all conditions `COLUMN=VALUE`.

    A value is written as in the table, as in the sweep file, or in SI units.

    Raises:
        ScenarioError: A condition is no condition, or no row fulfils it.
    """
    kept = [True] * len(table.results)
    found = columns(table)
    for condition in conditions:
        name, equals, wanted = condition.partition("=")
        if not equals:
            raise ScenarioError(f"--where {shown(condition)}: write COLUMN=VALUE, e.g. schedule=sync")
        column = find_column(list(found), name.strip())
        pairs = zip(table.results, found[column], strict=True)
        fulfils = [_is(value, _written(each, column), wanted.strip()) for each, value in pairs]
        if table.results and not any(fulfils):
            raise ScenarioError(f"--where {condition}: no row has that; {column} is {_values(table, column)}")
        kept = [both and one for both, one in zip(kept, fulfils, strict=True)]
    return replace(table, results=tuple(each for each, keep in zip(table.results, kept, strict=True) if keep))


def _is(value: object, written: str | None, wanted: str) -> bool:
    if wanted in ("" if value is None else str(value), written):
        return True
    try:
        number = float(wanted)
    except ValueError:
        return written is not None and written.replace(" ", "") == wanted.replace(" ", "")
    return isinstance(value, int | float) and math.isclose(value, number, rel_tol=1e-9)


def _written(result: Result, column: str) -> str | None:
    return written_text(result.choices[column]) if column in result.choices else None


def _values(table: Table, column: str) -> str:
    """Name the values of a column, as they are written."""
    found = columns(table)[column]
    texts = dict.fromkeys(
        _written(each, column) or ("" if value is None else str(value))
        for each, value in zip(table.results, found, strict=True)
    )
    named = [text or "empty" for text in texts][:_MANY]
    return ", ".join(named) + (", ..." if len(texts) > _MANY else "")


def order(columns: Columns, column: str) -> list[int]:
    """Return the rows in the order of a column, `-COLUMN` the largest first; rows without a value come last.

    Raises:
        ScenarioError: There is no such column.

    >>> order({"schedule": ["a", "b", "c"], "step_s": [0.2, None, 0.3]}, "-step_s")
    [2, 0, 1]
    """
    values = columns[find_column(list(columns), column.removeprefix("-"))]
    with_value = (number for number, value in enumerate(values) if _has_value(value))
    without = (number for number, value in enumerate(values) if not _has_value(value))
    is_reversed = column.startswith("-")
    return [*sorted(with_value, key=lambda number: _sort_key(values[number]), reverse=is_reversed), *without]


def _has_value(value: object) -> bool:
    return value is not None and value != "" and value == value


def _sort_key(value: object) -> tuple[bool, float, str]:
    """Put numbers before text."""
    if isinstance(value, int | float):
        return False, value, ""
    return True, 0.0, str(value)
