"""Lower bounds of the time of an epoch: the work on each resource over its speed.

Each limit assumes that everything else is free and never late. For a shared resource, it is the load of the epoch over
the capacity. For a rank, it is the time of its compute stream, of its collectives alone, or of its reading and
decoding, load after load. Injected delays do not count. The busiest of several nodes or ranks counts.

    simulated epoch >= the largest limit

except for batches that are read ahead: the first of an epoch are read during the previous one. An epoch exceeds its
largest limit if its parts wait for each other.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from simdist.cost import Costs, Local, Resources, Shared, Varying
from simdist.errors import PlanError
from simdist.plan import Load, Op, Plan, StageIn, lane_of
from simdist.plan.group import Group

#: Names of the limits: see `EpochLimits`.
LIMITS = (
    "computing",
    "communication",
    "server",
    "operations",
    "clients",
    "network",
    "disk",
    "memory",
    "decoding",
    "reading",
)
_SERVER = "server"  # the only one that more bandwidth of the storage server removes


@dataclass(frozen=True, slots=True)
class EpochLimits:
    """Lower bounds for the time of an epoch, or of staging.

    Args:
        epoch: From 0; None is staging, before the first.
        seconds: By each of `LIMITS`: `computing` and `communication` of the slowest rank; bandwidth of the busiest
            storage `server` and its `operations`; storage `clients` of the nodes; the `network`, NICs and switch, where
            gradients travel too; `disk` and `memory` of the nodes; `decoding` by the workers of a rank and the cores of
            a node; `reading` by the threads of a rank.
        storage_nbytes: Bytes of files that come from storage.
        server_nbytes: Those of the storage server that delivers most.
        relieved_s: Likewise, if the storage server had unlimited bandwidth, which also makes reading a file shorter.
    """

    epoch: int | None
    seconds: dict[str, float]
    storage_nbytes: float
    server_nbytes: float
    relieved_s: dict[str, float]

    @property
    def least_s(self) -> float:
        """Seconds that it takes at least."""
        return max(self.seconds.values())

    @property
    def name(self) -> str:
        """Which limit that is, the first of `LIMITS` if several are equal."""
        return max(LIMITS, key=lambda name: self.seconds[name])

    @property
    def next_name(self) -> str:
        """The largest limit that remains if the storage server has unlimited bandwidth."""
        return max(LIMITS, key=lambda name: self.relieved_s[name])

    @property
    def needed_Bps(self) -> float | None:
        """Bandwidth at which the busiest storage server takes as long as the largest limit that more bandwidth leaves.

        None if nothing is read from it, or if nothing else takes time.
        """
        next_s = self.relieved_s[self.next_name]
        return self.server_nbytes / next_s if next_s and self.server_nbytes else None


def epoch_limits(plan: Plan, costs: Costs, *, relieved: Costs | None = None) -> tuple[EpochLimits, ...]:
    """Return the limits of staging, if files are staged in, and of every epoch.

    Args:
        plan: With a data set.
        costs: Of the plan.
        relieved: The same with unlimited bandwidth of the storage server.

    Raises:
        PlanError: The plan has no data set.
    """
    if plan.dataset is None:
        raise PlanError(f"plan {plan.name} has no data set, so it has no epochs")
    found = _all_limits(plan, costs)
    without = found if relieved is None else _all_limits(plan, relieved)
    return tuple(
        replace(each, relieved_s=other.seconds | {_SERVER: 0.0})
        for each, other in zip(found, without, strict=True)
        if each.epoch is not None or each.least_s
    )


def _all_limits(plan: Plan, costs: Costs) -> list[EpochLimits]:
    work_of_body = [_of_ops((op for op in body if not isinstance(op, Load | StageIn)), costs) for body in plan.bodies]
    has_staging = any(isinstance(op, StageIn) for body in plan.bodies for op in body)
    staged = _of_ops((op for body in plan.bodies for op in body if isinstance(op, StageIn)), costs)
    staging = [_limits(staged, None, costs)] if has_staging else []
    return [*staging, *_of_epochs(plan, costs, work_of_body)]


def _of_epochs(plan: Plan, costs: Costs, work_of_body: Sequence["_Work"]) -> Iterator[EpochLimits]:
    """Yield the limits of every epoch: its loads, and as many steps, of which each reads a batch."""
    assert plan.dataset is not None
    per_epoch = plan.dataset.steps_per_epoch(plan.world_size)
    bodies = list(plan.body_of_steps())
    loads = list(plan.loads())
    for epoch, first in enumerate(range(0, plan.n_steps, per_epoch)):
        work = _nothing(costs.resources)
        for body, n_steps in Counter(bodies[first : first + per_epoch]).items():
            work = work + work_of_body[body] * n_steps
        for number, op in enumerate(loads[first : first + per_epoch], first):
            work = work + _of_transfers(op, costs, number)
        yield _limits(work, epoch, costs)


_COMPUTING, _READING, _DECODING = range(3)


@dataclass(frozen=True, slots=True)
class _Work:
    """Amounts of work.

    Args:
        ranks_s: Seconds of every rank, `[3, world_size]`: `_COMPUTING` of its compute lane; `_READING` latencies of
            first files, besides what the resource of the reading threads has; `_DECODING` those, and the decoding of
            last samples, besides what that of the decoding threads has.
        amounts: Bytes, operations or seconds on every resource, `[n_resources]`.
        exchanges_s: Seconds of the collectives by lane, each alone, `[world_size]`.
    """

    ranks_s: NDArray[np.float64]
    amounts: NDArray[np.float64]
    exchanges_s: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    def __add__(self, other: "_Work") -> "_Work":
        exchanges_s = dict(self.exchanges_s)
        for name, seconds in other.exchanges_s.items():
            exchanges_s[name] = exchanges_s[name] + seconds if name in exchanges_s else seconds
        return _Work(self.ranks_s + other.ranks_s, self.amounts + other.amounts, exchanges_s)

    def __mul__(self, times: int) -> "_Work":
        exchanges_s = {name: seconds * times for name, seconds in self.exchanges_s.items()}
        return _Work(self.ranks_s * times, self.amounts * times, exchanges_s)


def _nothing(resources: Resources) -> _Work:
    return _Work(np.zeros((3, resources.world_size)), np.zeros(resources.n_resources))


def _of_ops(ops: Iterable[Op], costs: Costs) -> _Work:
    """Return the work of operations."""
    work = _nothing(costs.resources)
    for op in ops:
        match costs.of[op]:
            case Local(seconds):
                work = work + _on_lane(op, seconds, costs.resources)
            case Shared(group, _, alone_s):
                on_ranks_s = _on_ranks(group, alone_s, costs.resources.world_size)
                work = work + _on_lane(op, on_ranks_s, costs.resources) + _of_transfers(op, costs)
            case Varying():
                raise AssertionError("only loads vary")
            case never:
                assert_never(never)
    return work


def _on_lane(op: Op, seconds: float | NDArray[np.float64], resources: Resources) -> _Work:
    """Return seconds of every rank as work of the lane of an operation, if that is computing or communication."""
    work = _nothing(resources)
    lane = lane_of(op)
    if lane.kind == "compute":
        work.ranks_s[_COMPUTING] = seconds
    elif lane.kind == "comm":
        work.exchanges_s[lane.name] = np.zeros(resources.world_size) + seconds
    return work


def _on_ranks(group: Group, of_groups: float | NDArray[np.float64], world_size: int) -> NDArray[np.float64]:
    """Return a number of each group, or of all, for every rank."""
    on_ranks = np.zeros(world_size)
    members = group.members(world_size)
    for ranks, value in zip(members, np.broadcast_to(of_groups, len(members)), strict=True):
        on_ranks[ranks] = value
    return on_ranks


def _of_transfers(op: Op, costs: Costs, number: int = 0) -> _Work:
    """Return the load of an operation's transfers on resources; for a load of a given number, also its latencies."""
    cost = costs.of[op]
    assert isinstance(cost, Shared | Varying)
    transfers = cost.transfers if isinstance(cost, Shared) else cost.transfers(number)
    work = _nothing(costs.resources)
    for stage in (stage for transfer in transfers for stage in transfer.stages):
        work.amounts[stage.resources] += stage.nbytes
    if isinstance(op, Load | StageIn):
        latencies_s = [[stage.latency_s for stage in transfer.stages] for transfer in transfers]
        reading_s = [math.fsum(each[:1]) for each in latencies_s]
        decoding_s = [math.fsum(each) if len(each) > 1 else 0.0 for each in latencies_s]  # the last is decoding
        for kind, seconds in {_READING: reading_s, _DECODING: decoding_s}.items():
            work.ranks_s[kind] = _on_ranks(cost.group, np.array(seconds), costs.resources.world_size)
    return work


def _limits(work: _Work, epoch: int | None, costs: Costs) -> EpochLimits:
    resources = costs.resources
    nodes, machines, ranks = (np.arange(n) for n in (resources.n_nodes, resources.n_machines, resources.world_size))
    busy_s = work.amounts / costs.capacity_Bps

    computing_s, reading_s, decoding_s = work.ranks_s
    decodes = (decoding_s > 0) | (resources.n_workers > 1)  # what does not, is done with its files as they come
    threads_s = np.sum([busy_s[resources.readers(ranks, worker)] for worker in range(resources.n_workers)], axis=0)
    cores_s = busy_s[resources.cores(resources.node(ranks))]
    decoding_s = np.maximum(decoding_s + busy_s[resources.decoders(ranks)], cores_s)

    def busiest_s(*numbers: NDArray[np.int64]) -> float:
        return float(busy_s[np.concatenate(numbers)].max())

    seconds = {
        "computing": float(computing_s.max()),
        "communication": max((float(each_s.max()) for each_s in work.exchanges_s.values()), default=0.0),
        "server": busiest_s(resources.storage_server(nodes)),
        "operations": busiest_s(resources.storage_operations(nodes)),
        "clients": busiest_s(resources.storage_client(nodes)),
        "network": max(
            busiest_s(resources.nic_in(machines), resources.nic_out(machines)), float(busy_s[resources.switch])
        ),
        "disk": busiest_s(resources.disk_read(nodes), resources.disk_write(nodes), resources.disk_operations(nodes)),
        "memory": busiest_s(resources.memory(nodes)),
        "decoding": float(decoding_s.max(where=decodes, initial=0.0)),
        "reading": float(((reading_s + threads_s) / resources.n_workers).max()),
    }
    of_servers = work.amounts[np.unique(resources.storage_server(nodes))]
    return EpochLimits(epoch, seconds, float(of_servers.sum()), float(of_servers.max()), {})
