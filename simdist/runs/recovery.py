"""What a recovery takes, part by part, and the nodes that take the places of others."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from simdist.scenario.failure_sampling import Failure, FailureChances
from simdist.scenario.failures import Failures, Recovery

#: Where the time of a job goes. Names of google/ml-goodput-measurement, but for `absent_replicas`: steps that a job
#: takes with fewer replicas.
Category: TypeAlias = Literal[
    "productive",
    "step_time_deviation",
    "absent_replicas",
    "checkpoint_save",
    "checkpoint_restore",
    "program_startup",
    "initialization",
    "training_preparation",
    "data_loading",
    "infrastructure_recovery",
    "wasted_progress",
]
TimedPart: TypeAlias = tuple[Category, float]


@dataclass(slots=True)
class Nodes:
    """Which nodes were replaced, and who waits to take their places.

    Args:
        recovery: How nodes are replaced.
        n_spares: Nodes that wait.
        replaced: Places whose first node is gone.
        repairs: Moments from which replaced nodes can be used again, a heap.
        n_failures: Of each node, since it is in its place.
    """

    recovery: Recovery
    n_spares: int
    replaced: set[int] = field(default_factory=set)
    repairs: list[float] = field(default_factory=list)
    n_failures: dict[int, int] = field(default_factory=dict)

    def is_excluded(self, failure: Failure) -> bool:
        """Count a failure after which its node could stay; tell whether it must go."""
        if self.recovery.exclude_after is None or failure.n_nodes != 1:
            return False
        node = failure.first_node
        self.n_failures[node] = self.n_failures.get(node, 0) + 1
        return self.n_failures[node] >= self.recovery.exclude_after

    def replace(self, failure: Failure, now_s: float, *, back_after_s: float | None) -> float:
        """Replace the nodes that a failure hit, and return the seconds until the others are there.

        Args:
            failure: It.
            now_s: When they are asked for.
            back_after_s: After which those that go are spares; None: they do not come back.
        """
        for node in range(failure.first_node, failure.first_node + failure.n_nodes):
            self.replaced.add(node)
            self.n_failures.pop(node, None)
        n_needed = max(failure.n_nodes, self.recovery.evicted_nodes)
        while self.repairs and self.repairs[0] <= now_s:
            heapq.heappop(self.repairs)
            self.n_spares += 1
        wait_s = self._taken(n_needed, now_s)
        if back_after_s is not None:
            for _ in range(n_needed):
                heapq.heappush(self.repairs, now_s + back_after_s)
        return wait_s

    def _taken(self, n_needed: int, now_s: float) -> float:
        """Take spares if there are enough, or nodes of the scheduler, or wait for repairs."""
        recovery = self.recovery
        if self.n_spares >= n_needed:
            self.n_spares -= n_needed
            return recovery.swap_s or 0.0
        n_missing = n_needed - self.n_spares
        if recovery.schedule_s is not None or len(self.repairs) < n_missing:
            return recovery.schedule_s or 0.0
        self.n_spares = 0
        last_s = max(heapq.heappop(self.repairs) for _ in range(n_missing))
        return last_s - now_s + (recovery.swap_s or 0.0)


def starting(recovery: Recovery, n_ranks: int, load_s: float) -> list[TimedPart]:
    """Return the parts that each start of a job has; nothing is loaded at the first."""
    connect_s = (recovery.connect_s or 0.0) + n_ranks * (recovery.connect_per_rank_s or 0.0)
    return [
        ("program_startup", recovery.start_s or 0.0),
        ("initialization", connect_s),
        ("checkpoint_restore", load_s),
    ]


def warming_up(recovery: Recovery) -> TimedPart:
    """Return the part after which the first step begins."""
    return "training_preparation", recovery.warm_up_s or 0.0


def finding(failures: Failures, failure: Failure) -> list[TimedPart]:
    """Return the parts until the job knows what has failed; none if it knew before."""
    recovery = failures.recovery
    cause = failures.causes[failure.cause]
    found_s: dict[str, float] = {
        "process": recovery.detect_s or 0.0,
        "node": recovery.detect_s or 0.0,
        "hang": failures.longest_timeout_s,
        "flap": failures.longest_timeout_s if is_blocked(failures, failure) else 0.0,
    }
    if cause.found_by is not None:
        found_s[cause.effect] = recovery.timeouts[cause.found_by]
    parts: list[TimedPart] = [("infrastructure_recovery", found_s.get(cause.effect, 0.0))]
    is_diagnosed = cause.effect in ("process", "node", "hang", "corruption") or found_s.get(cause.effect, 0.0) > 0
    if is_diagnosed:
        parts.append(("infrastructure_recovery", recovery.diagnose_s or 0.0))
    return parts


def is_blocked(failures: Failures, failure: Failure) -> bool:
    """Tell whether a flap blocks its link for so long that a time-out ends the job."""
    cause = failures.causes[failure.cause]
    return cause.share == 0 and cause.lasts_s is not None and cause.lasts_s >= failures.longest_timeout_s


def tried(recovery: Recovery, parts: list[TimedPart], failure: Failure, chances: FailureChances) -> Iterator[TimedPart]:
    """Yield parts of a start, and before them those of tries that fail; a last part without end if nobody helps."""
    tries = recovery.tries
    if tries is None:
        yield from parts
        return
    lost: list[TimedPart] = parts if tries.lost_s is None else [("infrastructure_recovery", tries.lost_s)]
    for _ in range(tries.most):
        if chances.next(failure) < tries.success:
            yield from parts
            return
        yield from lost
        yield "infrastructure_recovery", tries.back_off_s
    if tries.by_hand_s is None:
        yield "infrastructure_recovery", math.inf
        return
    yield "infrastructure_recovery", tries.by_hand_s
    yield from parts
