"""What each part should hold, and whether its rows do. A miss is a finding, and no failure of the part.

Imports nothing but the standard library, as tools/gpu.py reads this before it knows what is installed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = Mapping[str, Any]
Rows = Sequence[Row]

ALONE = 0.03  # of a makespan
BOUND_BY_LAUNCHES = 0.05
OF_KIND = 0.10  # of the time of a kind of operation
PEERS_MEDIAN = 0.03
PEERS_WORST = 0.06
MEMORY = 0.05
SELECTION = 0.05  # MSTopK over `torch.topk`
OVERHEAD = 0.01  # over DistributedDataParallel
BATCH_SIZES = 0.10

LEAST_SHARE = 0.02  # of the step: kinds of operations that take less are not compared


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a part holds a limit.

    Args:
        what: What is limited.
        found: The error furthest off, or what is more than allowed, as a share.
        limit: The most that is allowed.
        is_excess: Less than the other is fine; otherwise errors of both signs count.
    """

    what: str
    found: float
    limit: float
    is_excess: bool = False

    @property
    def is_held(self) -> bool:
        """Whether the limit is held."""
        return (self.found if self.is_excess else abs(self.found)) <= self.limit

    def __str__(self) -> str:
        return f"{'held' if self.is_held else 'MISSED'}: {self.what}: {self.found:+.1%}, limit {self.limit:.0%}"


def furthest_off(row: Row) -> tuple[str, float]:
    """Return the operation whose time is furthest off, of those that take a share of the step, and its error."""
    errors = {
        name: simulated_ms / measured_ms - 1
        for name, (simulated_ms, measured_ms) in row["operations"].items()
        if measured_ms > LEAST_SHARE * row["measured_ms"] and name != "wait"
    }
    name = max(errors, key=lambda each: abs(errors[each]), default="")
    return name, errors.get(name, 0.0)


def _alone(rows: Rows) -> Iterator[Verdict]:
    for is_bound, what, limit in (
        (False, "makespans of steps that the GPU bounds", ALONE),
        (True, "makespans of steps that launches bound", BOUND_BY_LAUNCHES),
    ):
        errors = [row["error"] for row in rows if row["launch_bound"] is is_bound]
        if errors:
            yield Verdict(what, _worst(errors), limit)
    yield Verdict("times of each kind of operation", _worst([furthest_off(row)[1] for row in rows]), OF_KIND)


def _peers(rows: Rows) -> Iterator[Verdict]:
    compared = [row for row in rows if row["channels"]]
    for n_ranks in sorted({row["ranks"] for row in compared}):
        errors = [row["error"] for row in compared if row["ranks"] == n_ranks]
        yield Verdict(f"median makespan in a job of {n_ranks}", median(map(abs, errors)), PEERS_MEDIAN)
        yield Verdict(f"worst makespan in a job of {n_ranks}", _worst(errors), PEERS_WORST)


def _sharding(rows: Rows) -> Iterator[Verdict]:
    yield Verdict("allocated memory against the column `memory`", _worst([row["error"] for row in rows]), MEMORY)


def _selection(rows: Rows) -> Iterator[Verdict]:
    """Yield whether selections as a run performs them, without a calibration, are as fast as those of torch."""
    by_default = [row["default_kernels_from"] for row in rows if "default_kernels_from" in row]
    excess = [
        row["kernels_ms"] / row["torch_ms"] - 1 if 2 ** row["recorded_log2_size"] >= kernels_from else 0.0
        for row in rows
        if "recorded_log2_size" in row
        for kernels_from in by_default
    ]
    if excess:
        yield Verdict("MSTopK over `torch.topk`, as a run performs them", max(excess), SELECTION, is_excess=True)


def _single(rows: Rows) -> Iterator[Verdict]:
    by_what = {row["what"]: row for row in rows}
    if "overhead" not in by_what:
        return
    overhead = by_what["overhead"]
    yield Verdict("`real.wrap` over DistributedDataParallel", overhead["overhead"], OVERHEAD, is_excess=True)
    if "plan" in by_what:
        excess = by_what["plan"]["step_ms"] / overhead["ddp_ms"] - 1
        yield Verdict("`python -m real` over DistributedDataParallel", excess, OVERHEAD, is_excess=True)


def _steps(rows: Rows) -> Iterator[Verdict]:
    compared = [row for row in rows if row.get("two_sizes_ms") is not None]
    for model in dict.fromkeys(row["model"] for row in compared):
        errors = [row["two_sizes_ms"] / row["step_ms"] - 1 for row in compared if row["model"] == model]
        yield Verdict(f"steps of other batch sizes of {model}", _worst(errors), BATCH_SIZES)


def _worst(errors: Sequence[float]) -> float:
    return max(errors, key=abs)


_PARTS: Mapping[str, Callable[[Rows], Iterator[Verdict]]] = {
    "alone": _alone,
    "peers": _peers,
    "selection": _selection,
    "sharding": _sharding,
    "single": _single,
    "steps": _steps,
}


def verdicts(part: str, rows: Rows) -> tuple[Verdict, ...]:
    """Return whether the rows of a part hold its limits; nothing if it has none, or no rows for them."""
    return tuple(_PARTS[part](rows)) if rows and part in _PARTS else ()
