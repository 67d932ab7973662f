"""The algorithms of collectives, as far as plans and schedules know them: their names and the collectives they carry.

A shipped algorithm is a module of that name in `simdist.cost.algorithms`, which declares it as `ALGORITHM`. A user's
algorithm is a `CollectiveAlgorithm` in any module. Plans and scenarios name it as `module:NAME`, or by an entry point
of group `simdist.algorithms`. An algorithm is imported on first use, as a plan only names it.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import get_args

from simdist.plan import ops
from simdist.settings.base import nearest, shown
from simdist.settings.plugins import ALGORITHMS, entry_points_of, is_reference, load_entry_point, load_reference

AUTO = "auto"  # the choice of the cluster's library, which has an algorithm for every collective
_SHIPPED = "simdist.cost.algorithms"
_OF_NCCL = {"nvlstree": "write nvls, which is NCCL's NVLSTree over several nodes"}
_NAME_OF = {
    ops.AllReduce: "all_reduce",
    ops.ReduceScatter: "reduce_scatter",
    ops.AllGather: "all_gather",
    ops.Reduce: "reduce",
    ops.Broadcast: "broadcast",
}


@dataclass(frozen=True, slots=True)
class CollectiveAlgorithm:
    """How the members of a group carry out a collective.

    Args:
        carries: Classes of operations that it carries out, such as `AllReduce`.
        messages: Yields the `simdist.cost.topology.Messages` of one group, given its `simdist.cost.topology.Call`.
            `broadcasts` yields calls instead: the library carries them out, one after the other.
        needs_power_of_two: The number of members of a group must be a power of two.
    """

    carries: tuple[type[ops.Collective], ...]
    messages: Callable[..., Iterable[object]]
    needs_power_of_two: bool = False


def names() -> tuple[str, ...]:
    """Return the names of all algorithms but users' `module:NAME`, `auto` first."""
    shipped = (name for name in _modules() if _shipped_as(name))
    return (AUTO, *shipped, *entry_points_of(ALGORITHMS))


@lru_cache(maxsize=1)
def _modules() -> tuple[str, ...]:
    folders = importlib.import_module(_SHIPPED).__path__
    return tuple(sorted(each.name for each in pkgutil.iter_modules(folders)))


def _shipped_as(name: str) -> CollectiveAlgorithm | None:
    """Return the shipped algorithm of that name; None if there is none."""
    if name not in _modules():
        return None
    found: CollectiveAlgorithm | None = vars(importlib.import_module(f"{_SHIPPED}.{name}")).get("ALGORITHM")
    return found


@lru_cache(maxsize=64)
def find(name: str, folder: Path = Path()) -> CollectiveAlgorithm:
    """Return the algorithm of a name other than `auto`.

    Args:
        name: As a plan or a scenario writes it.
        folder: Folder of the file that names it. Used only for a hint in the error.

    Raises:
        ValueError: There is none, or the name stands for something that is not an algorithm.
    """
    if shipped := _shipped_as(name):
        return shipped
    if is_reference(name):
        found = load_reference(name, folder)
    elif name in entry_points_of(ALGORITHMS):
        found = load_entry_point(entry_points_of(ALGORITHMS)[name])
    else:
        hint = _OF_NCCL.get(name.lower().replace("_", ""), nearest(name, names()))
        raise ValueError(f"unknown algorithm {shown(name)}: {hint}")
    if not isinstance(found, CollectiveAlgorithm):
        raise ValueError(f"{shown(name)}: is no algorithm: write a simdist.plan.algorithms.CollectiveAlgorithm")
    if not found.carries or not set(found.carries) <= set(get_args(ops.Collective)):
        raise ValueError(f"{shown(name)}: carries names no collectives: write e.g. (AllReduce,)")
    return found


def is_of_user(name: str) -> bool:
    """Tell whether an algorithm is a user's, by `module:NAME` or by an entry point.

    >>> is_of_user("node_sgd:STAR"), is_of_user("ring"), is_of_user("auto")
    (True, False, False)
    """
    return is_reference(name) or (name != AUTO and name not in _modules())


def carries(name: str, *collectives: type[ops.Collective]) -> bool:
    """Tell whether an algorithm can carry out all of these collectives.

    >>> carries("ring", ops.AllReduce), carries("tree", ops.ReduceScatter), carries("auto", ops.AllGather)
    (True, False, True)
    """
    return name == AUTO or set(collectives) <= set(find(name).carries)


def needs_power_of_two(name: str) -> bool:
    """Tell whether an algorithm needs groups with a power of two members."""
    return name != AUTO and find(name).needs_power_of_two


def problems(op: ops.Collective) -> Iterator[str]:
    """Yield what is wrong with the algorithm of a collective."""
    if op.algorithm == AUTO:
        return
    try:
        found = find(op.algorithm)
    except ValueError as error:
        yield str(error)
        return
    size = op.n_in if isinstance(op, ops.AllReduce) else op.group.size
    if found.needs_power_of_two and size & (size - 1):
        without = f" without {op.group.size - size}" if size < op.group.size else ""
        yield f"{op.algorithm} over a {op.group}{without}; it needs a power of two, or choose ring"
    if type(op) not in found.carries:
        carried = ", ".join(_NAME_OF[each] for each in found.carries)
        yield f"{op.algorithm} is an algorithm of {carried} only; choose ring"
