"""Constraints of the user on a schedule, and the facts about it that its plan gives without a simulation.

A schedule declares which ranks exchange, and when. `simdist.proof` has proved it. A rank exchanges with a group in a
step if gradients or parameters are averaged over it.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simdist.cost import Costs, Shared, price
from simdist.cost.costs import used_by
from simdist.plan import COLLECTIVES, Result, occurrences
from simdist.runs.building import Built, job
from simdist.runs.memory import least_nbytes, memory_of, most_nbytes
from simdist.scenario import Link, Scenario
from simdist.settings.base import unchecked_copy
from simdist.settings.units import format_nbytes

_COUNTED_BPS = 1e12  # of a link that only counts bytes: any finite number

_Ranks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Constraints:
    """Limits that a schedule must keep to.

    Args:
        global_every: All ranks exchange at least once in this many steps.
        group_every: Pairs `[ranks, steps]` (int): groups of at least `ranks` exchange at least once in `steps`.
        max_nbytes (int or null): Limit of bytes that the busiest node sends per step.
        memory_nbytes, host_memory_nbytes (int or null): Limit of the bytes in use on a rank's device, and on its host.
    """

    global_every: int
    group_every: tuple[tuple[int, int], ...] = ()
    max_nbytes: float = math.inf
    memory_nbytes: float = math.inf
    host_memory_nbytes: float = math.inf

    def broken_by(self, group_sizes: _Ranks, world_size: int) -> Iterator["Breach"]:
        """Yield the constraints on exchanges that are broken."""
        limits = [(f"--global-every {self.global_every}", world_size, self.global_every)]
        limits += [(f"--group-every {ranks}:{steps}", ranks, steps) for ranks, steps in self.group_every]
        for limit, ranks, steps in limits:
            gap = longest_gap(group_sizes >= ranks)
            if gap > steps:
                yield Breach(limit, gap, steps, "steps")

    def broken_by_memory(self, device_nbytes: float) -> list["Breach"]:
        """Return the limit of a device's memory if so many bytes break it."""
        return _too_large("--memory", device_nbytes, self.memory_nbytes)


@dataclass(frozen=True, slots=True)
class Breach:
    """A constraint that a schedule breaks.

    Args:
        limit: The constraint, as on the command line.
        value: What the schedule has or needs.
        most: What the constraint allows.
        unit: Of both.
    """

    limit: str
    value: float
    most: float
    unit: Literal["bytes", "steps"]

    @property
    def excess(self) -> float:
        """How many times as much as allowed it is."""
        return self.value / self.most if self.most else math.inf

    @property
    def amount(self) -> str:
        """What the schedule has or needs, in words."""
        if self.unit == "bytes":
            return f"it needs {format_nbytes(self.value)}"
        return "it never exchanges so" if math.isinf(self.value) else f"it exchanges every {self.value:.0f} steps"

    @property
    def too_much(self) -> str:
        """How much more it is than allowed, in words."""
        return format_nbytes(self.value - self.most) if self.unit == "bytes" else f"{self.value - self.most:.0f} steps"


def worst(breaches: Sequence[Breach]) -> Breach:
    """Return the breach of the constraint that is exceeded most."""
    return max(breaches, key=lambda each: each.excess)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a schedule that are known without a simulation.

    Args:
        results: What each step does.
        group_sizes: Ranks of the largest group that exchanges in each step, `[n_steps]`, from `late_steps` on.
        world_size: Ranks.
        sent_nbytes: Bytes that the busiest node sends per step; see `sent_nbytes`.
        device_nbytes: Bytes in use on a rank's device when most are: buffers, the optimizer's state, activations.
        host_nbytes: Bytes of a rank's buffers in host memory.
    """

    results: tuple[Result, ...]
    group_sizes: _Ranks
    world_size: int
    sent_nbytes: float
    device_nbytes: int
    host_nbytes: int

    @property
    def global_gap(self) -> float:
        """Longest gap, in steps, from one exchange of all ranks to the next; inf if there is none."""
        return longest_gap(self.group_sizes >= self.world_size)


def broken(known: Facts, constraints: Constraints) -> tuple[Breach, ...]:
    """Return the constraints that a schedule breaks."""
    return (
        *constraints.broken_by(known.group_sizes, known.world_size),
        *_too_large("--max-bytes", known.sent_nbytes, constraints.max_nbytes),
        *constraints.broken_by_memory(known.device_nbytes),
        *_too_large("--host-memory", known.host_nbytes, constraints.host_memory_nbytes),
    )


def _too_large(option: str, nbytes: float, most: float) -> list[Breach]:
    return [Breach(f"{option} '{format_nbytes(most)}'", nbytes, most, "bytes")] if nbytes > most else []


def facts(scenario: Scenario, built: Built, *, within: Constraints | None = None) -> Facts:
    """Return the facts about a schedule that its plan gives.

    Args:
        scenario: Of the schedule.
        built: The schedule.
        within: Count only what tells whether the schedule keeps to these. Bytes that nothing limits are 0, and so are
            those on the device: see `with_memory`.
    """
    plan = built.plan
    described = job(scenario)
    bodies = np.fromiter(plan.body_of_steps(), dtype=np.int64, count=plan.n_steps)
    _, first_steps, of_step = np.unique(bodies, return_index=True, return_inverse=True)
    results = [built.schedule.result(step, described) for step in first_steps.tolist()]
    group_sizes = exchanged(results)[of_step][late_steps(results) :]
    host_nbytes = sum(each.nbytes for each in plan.buffers if each.place == "host")
    is_counted = within is None or math.isfinite(within.max_nbytes)
    sent = sent_nbytes(scenario, built) if is_counted else 0.0
    of_steps = tuple(results[number] for number in of_step.tolist())
    device_nbytes = 0 if within else memory_of(scenario, built).peak_nbytes
    return Facts(of_steps, group_sizes, plan.world_size, sent, device_nbytes, host_nbytes)


def with_memory(scenario: Scenario, built: Built, known: Facts, constraints: Constraints) -> Facts:
    """Return facts with the bytes on the device: a lower bound if bounds tell whether they keep to the limit."""
    least = least_nbytes(built.plan, scenario.workload)
    limit_nbytes = constraints.memory_nbytes
    is_told = least > limit_nbytes or most_nbytes(built, scenario.workload) <= limit_nbytes
    return replace(known, device_nbytes=least if is_told else memory_of(scenario, built).peak_nbytes)


def exchanged(results: Sequence[Result]) -> _Ranks:
    """Return the ranks of the largest group that exchanges in each step, `[n_steps]`; 1 means none.

    If parts of the model take turns, only exchanges of the first part count.
    """
    turns = {(), next((each.tensors for each in results if each.tensors), ())}
    sizes = (max(each.gradients.size, each.parameters.size if each.tensors in turns else 1) for each in results)
    return np.array([*sizes], dtype=np.int64)


def late_steps(results: Sequence[Result]) -> int:
    """Return the steps from an exchange until it is applied. Steps before the first application are not a gap."""
    return max((each.late_steps for each in results), default=0)


def longest_gap(fires: NDArray[np.bool_]) -> float:
    """Return the most steps from one that fires to the next, from the start to the first and from the last to the end.

    >>> longest_gap(np.array([False, True, False, False, True, False])), longest_gap(np.array([False]))
    (3.0, inf)
    """
    at = np.flatnonzero(fires)
    if not len(at):
        return math.inf
    return float(np.diff(np.concatenate(([-1], at, [len(fires) - 1]))).max())


def sent_nbytes(scenario: Scenario, built: Built) -> float:
    """Return the bytes that collectives send out of the busiest node per step, averaged over steps.

    A parameter server on a machine of its own counts as a node. If the fabric joins all nodes, the result is the bytes
    that the busiest GPU sends over the fabric.
    """
    costs = _counting_costs(scenario, built)
    total = np.zeros(costs.resources.n_resources)
    n_times = Counter[int]()
    shared: dict[int, Shared] = {}
    for each in occurrences(built.plan):
        cost = costs.of[each.op]
        if isinstance(each.op, COLLECTIVES) and isinstance(cost, Shared):
            n_times[id(cost)] += len(each.steps)
            shared[id(cost)] = cost
    for key, cost in shared.items():
        for _, _, stage, used in used_by(cost.transfers):
            np.add.at(total, used, np.broadcast_to(stage.nbytes * n_times[key], used.shape))
    resources = costs.resources
    machines = np.arange(resources.n_machines)
    ranks = np.arange(resources.world_size)
    ports = resources.nic_out(machines) if _uses_nics(scenario, built) else resources.fabric_out(ranks)
    return float(total[ports].max()) / built.plan.n_steps


def _uses_nics(scenario: Scenario, built: Built) -> bool:
    """Tell whether collectives leave the fabric: for another domain, or for a parameter server apart."""
    return scenario.cluster.n_domains > 1 or built.costs.resources.n_servers > 0


def _counting_costs(scenario: Scenario, built: Built) -> Costs:
    """Return costs in bytes. Costs of a link with a table contain its time, and an unlimited link costs nothing."""
    cluster = scenario.cluster
    which = "network" if _uses_nics(scenario, built) else "fabric"
    link = cluster.network if which == "network" else cluster.fabric
    if link.table is None and math.isfinite(link.bandwidth_Bps):
        return built.costs
    plain = Link(latency_s=link.latency_s, bandwidth_Bps=_COUNTED_BPS)
    return price(built.plan, unchecked_copy(cluster, **{which: plain}), scenario.workload)
