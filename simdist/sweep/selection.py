"""Columns by their names, and the order of rows."""

import difflib
import re
from collections.abc import Sequence

from simdist.errors import ScenarioError
from simdist.settings.base import nearest, shown
from simdist.sweep.table import Columns

_UNIT = re.compile(r"_(per_s|s|Bps|nbytes)$")


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
    hint = f"write {' or '.join(found)}" if found else _nearest(wanted, names)
    raise ScenarioError(f"there is no column {shown(wanted)}: {hint}")


def _nearest(wanted: str, names: Sequence[str]) -> str:
    """Return the end of a message: the column that was meant, or each once, the most similar first."""
    pairs = zip(names, short_names(names), strict=True)
    known = [short if "." in name else name for name, short in pairs]
    known.sort(key=lambda name: -difflib.SequenceMatcher(None, wanted, name).ratio())
    return nearest(wanted, known)


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
