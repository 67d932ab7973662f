"""Logs of delays, as timers write them: columns step, rank and seconds, with a row for each step and rank."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_PLACE = {"step", "rank"}
_SECONDS_OF = {"s": 1.0, "seconds": 1.0, "ms": 1e-3, "milliseconds": 1e-3, "us": 1e-6, "microseconds": 1e-6}
_MOST_PLACES = 1000  # for each row: a wrong column is refused before memory is taken
LOG_FORM = "write columns step, rank and seconds, or ms"
_EACH = "write one row for each step and rank, also of 0 s"


def is_log(names: Iterable[object]) -> bool:
    """Tell whether columns are those of a log, and not one for each rank."""
    return {*names} >= _PLACE


def is_bare_log(array: NDArray[np.float64]) -> bool:
    """Tell whether an array without names is surely a log: three columns, and each step and rank in one row."""
    if array.ndim != 2 or array.shape[1] != 3 or len(array) < 2:
        return False
    names = ("step", "rank", "seconds")
    try:
        table_of_log(names, lambda name: array[:, names.index(str(name))])
    except ValueError:
        return False
    return True


def table_of_log(names: Iterable[object], column: Callable[[object], ArrayLike]) -> NDArray[np.float64]:
    """Return the delays of a log.

    Args:
        names: Of its columns: `step`, `rank`, and the delay, whose name ends in its unit: `seconds`, `delay_ms`.
        column: Returns the values of a column by its name.

    Returns:
        Seconds, `[n_steps, world_size]`. The first step of the log is the first of the array.

    Raises:
        ValueError: There is no such column, or a step or rank is missing or stands there twice.
    """
    of_delay = [name for name in names if name not in _PLACE]
    if len(of_delay) != 1:
        others = ", ".join(map(str, of_delay)) or "none"
        raise ValueError(f"a log of steps and ranks, and which column is the delay ({others})? {LOG_FORM}")
    delays_s = _seconds(of_delay[0], np.asarray(column(of_delay[0])))
    steps = _numbers("step", column("step"))
    ranks = _numbers("rank", column("rank"))
    if not len(steps):
        raise ValueError(f"is empty: {LOG_FORM}")
    first = steps.min()
    shape = (int(steps.max() - first) + 1, int(ranks.max()) + 1)
    if shape[0] * shape[1] > _MOST_PLACES * len(steps):
        raise ValueError(f"{len(steps)} rows, and {shape[0]} steps of {shape[1]} ranks: {_EACH}")
    times = np.zeros(shape, dtype=np.int64)
    np.add.at(times, (steps - first, ranks), 1)
    for step, rank in np.argwhere(times != 1)[:1]:
        what = "is missing" if times[step, rank] == 0 else "stands there twice"
        raise ValueError(f"step {step + first} of rank {rank} {what}: {_EACH}")
    table = np.empty(shape)
    table[steps - first, ranks] = delays_s
    return table


def _numbers(name: str, values: ArrayLike) -> NDArray[np.int64]:
    found = np.asarray(values)
    if not (np.issubdtype(found.dtype, np.number) and (found == np.floor(found)).all() and (found >= 0).all()):
        raise ValueError(f"the column {name} of a log holds whole numbers, 0 or more")
    return found.astype(np.int64)


def _seconds(name: object, values: NDArray[Any]) -> NDArray[np.float64]:
    if np.issubdtype(values.dtype, np.timedelta64):
        return np.asarray(values / np.timedelta64(1, "s"), dtype=np.float64)
    unit = re.split(r"[_\W]+", str(name).strip(" )]"))[-1]
    if unit not in _SECONDS_OF:
        raise ValueError(f"the column {name} of a log: of which unit? {LOG_FORM}")
    return np.asarray(values, dtype=np.float64) * _SECONDS_OF[unit]
