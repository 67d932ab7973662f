"""What one operation costs. The only place where durations come from.

`price` turns a plan, a cluster and a workload into a table: per operation either seconds on every rank (`Local`) or the
transfers of its groups over shared resources (`Shared`). How transfers share a resource is the network's business, in
`simdist.engines`; how long an injected delay lasts was drawn with the scenario.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from simdist.cost.algorithms import Call, collective_transfer, n_machines
from simdist.cost.compute import ComputeCost, compute_s, tensor_backward_s
from simdist.cost.links import LinkCost
from simdist.cost.loads import LoadCosts
from simdist.cost.sharing import contested_ops
from simdist.cost.topology import Topology
from simdist.cost.transfers import Shared, Stage, Transfer
from simdist.errors import PlanError
from simdist.plan import (
    COLLECTIVES,
    AllGather,
    AllReduce,
    Backward,
    Broadcast,
    Buffer,
    Collective,
    Copy,
    Delay,
    Densify,
    Forward,
    Load,
    Merge,
    Op,
    Optimize,
    Pack,
    Plan,
    Reduce,
    ReduceScatter,
    Save,
    Select,
    StageIn,
    Tick,
    TrustRatios,
    Unpack,
    Wait,
)
from simdist.plan.group import Group
from simdist.scenario.cluster import Cluster
from simdist.scenario.workload import Workload

__all__ = [
    "ComputeCost",
    "Costs",
    "LinkCost",
    "Local",
    "OpCost",
    "Shared",
    "Stage",
    "Topology",
    "Transfer",
    "Varying",
    "compute_s",
    "price",
    "tensor_backward_s",
]

_EVERY_RANK = Group(1)


@dataclass(frozen=True, slots=True)
class Local:
    """Seconds that an operation takes on its own rank: one number, or one per rank, `[world_size]`."""

    seconds: float | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Varying:
    """Transfers of every rank by itself that differ from one occurrence of the operation to the next.

    Args:
        group: Every rank by itself.
        transfers: Number of the load -> one transfer for each rank.
    """

    group: Group
    transfers: Callable[[int], tuple[Transfer, ...]]


OpCost: TypeAlias = Local | Shared | Varying


@dataclass(frozen=True)
class Costs:
    """The price list of a plan on a cluster.

    Args:
        topology: Numbers the resources.
        capacity_Bps: Bytes per second of every resource; inf where unlimited.
        of: The cost of every operation in the plan's bodies.
        contested: The operations that may find another transfer on a resource they use; the others never do.
    """

    topology: Topology
    capacity_Bps: NDArray[np.float64]
    of: Mapping[Op, OpCost]
    contested: frozenset[Op]


def price(plan: Plan, cluster: Cluster, workload: Workload) -> Costs:
    """Return what every operation of `plan` costs.

    Raises:
        PlanError: The plan is for another number of ranks or tensors, or asks for what the cluster lacks.
        ScenarioError: Compute times are neither given nor derivable.
    """
    if plan.world_size != cluster.world_size:
        raise PlanError(
            f"plan {plan.name} is for {plan.world_size} ranks; cluster {cluster.name} has {cluster.nodes} nodes x "
            f"{cluster.gpus_per_node} GPUs = {cluster.world_size}; build the plan again for this cluster"
        )
    n_tensors = len(workload.tensors)
    for buffer in plan.buffers:
        if buffer.tensors and buffer.tensors[1] > n_tensors:
            raise PlanError(
                f"plan {plan.name}: buffer {buffer.name!r} holds tensors {buffer.tensors[0]}:{buffer.tensors[1]}; "
                f"workload {workload.name or 'without a name'} has {n_tensors}; build the plan again for this workload"
            )
    pricing = _Pricing(plan, cluster, workload)
    distinct = dict.fromkeys(op for body in plan.bodies for op in body)
    of = {op: pricing.cost(op) for op in distinct}
    shared = {op: cost for op, cost in of.items() if isinstance(cost, Shared)} | pricing.loads_together(of)
    return Costs(pricing.topology, pricing.capacity_Bps, of, contested_ops(shared, pricing.topology))


class _Pricing:
    def __init__(self, plan: Plan, cluster: Cluster, workload: Workload) -> None:
        self._plan = plan
        self._cluster = cluster
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._compute = ComputeCost(workload, cluster)
        self.topology = Topology(
            cluster.nodes,
            cluster.gpus_per_node,
            LinkCost.of(cluster.fabric),
            LinkCost.of(cluster.network, n_parallel=cluster.nics_per_node),
            switched=cluster.oversubscription > 1,
            bridged=math.isfinite(cluster.host_bridge_Bps),
            overhead_s=cluster.collective_overhead_s,
            n_servers=_n_servers(plan),
        )
        self.capacity_Bps = self._capacity_Bps()
        self._loads = LoadCosts(plan, cluster, workload, self.topology, self.capacity_Bps) if plan.dataset else None

    def loads_together(self, costs: Mapping[Op, OpCost]) -> dict[Op, Shared]:
        """Return what the operations that vary use in all their occurrences together."""
        varying = [op for op, cost in costs.items() if isinstance(cost, Varying)]
        if self._loads is None or not varying:
            return {}
        return dict.fromkeys(varying, Shared.of(_EVERY_RANK, self._loads.used(), self.capacity_Bps))

    def _capacity_Bps(self) -> NDArray[np.float64]:
        topology, storage = self.topology, self._cluster.storage
        capacity_Bps = np.full(topology.n_resources, np.inf)
        nodes, machines = np.arange(topology.n_nodes), np.arange(topology.n_machines)
        capacity_Bps[: 2 * topology.world_size] = topology.fabric.capacity_Bps
        capacity_Bps[topology.nic_out(machines)] = topology.network.capacity_Bps
        capacity_Bps[topology.nic_in(machines)] = topology.network.capacity_Bps
        capacity_Bps[topology.bridge_up(nodes)] = self._cluster.host_bridge_Bps
        capacity_Bps[topology.bridge_down(nodes)] = self._cluster.host_bridge_Bps
        network_Bps = topology.network.capacity_Bps * topology.n_machines
        capacity_Bps[topology.switch] = network_Bps / self._cluster.oversubscription
        if storage:
            capacity_Bps[topology.storage_server] = storage.bandwidth_Bps
            capacity_Bps[topology.storage_client(nodes)] = storage.client_bandwidth_Bps
            capacity_Bps[topology.storage_operations] = storage.operations_per_s
        if disk := self._cluster.disk:
            capacity_Bps[topology.disk_read(nodes)] = disk.read_Bps
            capacity_Bps[topology.disk_write(nodes)] = disk.write_Bps
        if memory := self._cluster.memory:
            capacity_Bps[topology.memory(nodes)] = memory.bandwidth_Bps
        if self._cluster.cores_per_node:
            capacity_Bps[topology.cores(nodes)] = self._cluster.cores_per_node
        ranks = np.arange(topology.world_size)
        capacity_Bps[topology.readers(ranks)] = capacity_Bps[topology.decoders(ranks)] = 1.0
        return capacity_Bps

    def cost(self, op: Op) -> OpCost:
        match op:
            case Forward():
                return Local(self._compute.forward([buffer for buffer in map(self._buffer, op.srcs) if buffer.tensors]))
            case Backward():
                return Local(self._compute.backward(self._buffer(op.dst)))
            case Optimize():
                return Local(self._compute.optimize([self._buffer(name) for name in op.params]))
            case Copy():
                return Local(self._compute.copy(op, self._buffer(op.src), self._buffer(op.dst)))
            case Pack():
                return Local(self._compute.fusion_copy([*map(self._buffer, op.srcs)], self._buffer(op.dst)))
            case Unpack():
                return Local(self._compute.fusion_copy([*map(self._buffer, op.dsts)], self._buffer(op.src)))
            case TrustRatios():
                return Local(self._compute.trust_ratios(op, [*map(self._buffer, op.params)], self._plan.world_size))
            case Select():
                src, residual, dst = map(self._buffer, (op.src, op.residual, op.dst))
                return Local(self._compute.select(op, src, residual, dst))
            case Merge():
                return Local(self._compute.merge(self._buffer(op.src), self._buffer(op.dst)))
            case Densify():
                return Local(self._compute.densify(op, self._buffer(op.src), self._buffer(op.dst)))
            case AllReduce() | Reduce() | Broadcast():
                return self._collective(op, self._buffer(op.buffer).nbytes)
            case ReduceScatter():
                return self._collective(op, self._buffer(op.src).nbytes)
            case AllGather():
                return self._collective(op, self._buffer(op.dst).nbytes)
            case Load():
                if self._loads and op.read:
                    return Varying(_EVERY_RANK, self._loads.transfers)
                return self._storage(self._buffer(op.dst).nbytes, inward=True)
            case StageIn():
                assert self._loads is not None
                return Shared.of(op.group, self._loads.staging(op), self.capacity_Bps)
            case Save():
                return self._storage(sum(self._buffer(name).nbytes for name in op.srcs), inward=False)
            case Delay() | Wait() | Tick():  # ticks: see `simdist.plan.ops`
                return Local(0.0)
            case _:
                assert_never(op)

    def _buffer(self, name: str) -> Buffer:
        return self._buffers[name]

    def _collective(self, op: Collective, nbytes: int) -> Shared:
        groups = enumerate(map(np.array, op.group.members(self._plan.world_size)))
        calls = (Call(op, members, nbytes, self.topology, number) for number, members in groups)
        transfers = (collective_transfer(call, self._cluster.library, self.capacity_Bps) for call in calls)
        return Shared.of(op.group, transfers, self.capacity_Bps)

    def _storage(self, nbytes: int, *, inward: bool) -> Shared:
        storage, topology = self._cluster.storage, self.topology
        if storage is None:
            raise PlanError(
                f"plan {self._plan.name} uses storage; cluster {self._cluster.name} has none: set cluster.storage"
            )
        nodes = np.arange(topology.world_size) // topology.ranks_per_node
        nics = topology.nic_in(nodes) if inward else topology.nic_out(nodes)
        paths = np.stack([nics, np.full_like(nics, topology.storage_server), topology.storage_client(nodes)], axis=1)
        limited = np.isfinite(self.capacity_Bps[paths[0]])
        amounts = np.full(int(limited.sum()), float(nbytes))
        transfers = (Transfer((Stage(storage.latency_s, path[limited], amounts),)) for path in paths)
        return Shared.of(_EVERY_RANK, transfers, self.capacity_Bps)


def _n_servers(plan: Plan) -> int:
    """Return how many machines the parameter servers of a plan need: operations use the same ones."""
    collectives = (op for body in plan.bodies for op in body if isinstance(op, COLLECTIVES))
    return max((n_machines(op, plan.world_size) for op in collectives), default=0)
