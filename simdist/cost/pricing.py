"""Price of one operation. The only place where durations come from.

`price` turns a plan, a cluster and a workload into a table: per operation either seconds on every rank (`Local`) or the
transfers of its groups over shared resources (`Shared`). The network in `simdist.engines` decides the sharing of
resources. Injected delays were drawn with the scenario.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, assert_never

import numpy as np
from numpy.typing import NDArray

from simdist.cost.algorithms import collective_transfer
from simdist.cost.compute import ComputeCost
from simdist.cost.costs import (
    Alike,
    AlikeTransfers,
    Costs,
    Local,
    OpCost,
    Resources,
    Shared,
    Stage,
    Transfer,
    Varying,
    used_by,
)
from simdist.cost.topology import Call, HostCost, LinkCost, Messages, Topology
from simdist.errors import PlanError
from simdist.plan import Buffer, Plan, ops
from simdist.plan.first_come import FirstCome, spread_late
from simdist.plan.group import Group
from simdist.plan.lanes import Lane
from simdist.plan.ops import Level
from simdist.scenario.cluster import Cluster
from simdist.scenario.workload import Workload

if TYPE_CHECKING:
    from simdist.cost.loads import LoadCosts

_EVERY_RANK = Group(1)
_SEVERAL = -1
#: Algorithms that see where members sit, but not their numbers.
_OF_LIBRARIES = ("auto", "ring", "double_tree", "nvls", "broadcasts")


def price(
    plan: Plan,
    cluster: Cluster,
    workload: Workload,
    *,
    disturbed: Mapping[int, str] | None = None,
    shares: Mapping[int, float] | None = None,
) -> Costs:
    """Return the cost of every operation of `plan`.

    Args:
        plan: A legal plan.
        cluster: Cluster with the plan's number of ranks.
        workload: Workload with the plan's number of tensors.
        disturbed: Resources with a rate that changes or with flows of other jobs, and the cause: see `Traffic.causes`.
        shares: Remaining share of the rate of resources that are slow throughout; 1 for the others. The choice of
            algorithms ignores it.

    Raises:
        PlanError: The plan is for another number of ranks or tensors, or needs something that the cluster lacks.
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
    disturbed = disturbed or {}
    shares = shares or {}
    pricing = _Pricing(plan, cluster, workload, disturbed, shares)
    of = {op: pricing.cost(op) for op in plan.distinct_ops}
    shared = {op: cost for op, cost in of.items() if isinstance(cost, Shared)} | pricing.loads_together(of)
    contested = _contested_ops(shared, pricing.resources, disturbed)
    return Costs(pricing.topology, pricing.capacity_Bps, of, contested, shares, disturbed)


def resources_of(plan: Plan, cluster: Cluster) -> Resources:
    """Return the numbers of the resources of a cluster with the servers that a plan needs."""
    n_storage_servers = cluster.storage.servers if cluster.storage else 1
    n_servers = _n_servers(plan)
    return Resources(
        cluster.nodes,
        cluster.gpus_per_node,
        n_servers,
        n_storage_servers,
        nodes_per_domain=cluster.topology.nodes_per_domain,
        railed=cluster.topology.rails,
        machines_per_leaf=cluster.topology.leaf.nodes if cluster.topology.leaf else 0,
        n_workers=max(1, plan.dataset.workers) if plan.dataset else 1,
    )


@lru_cache(maxsize=64)
def alike(resources: Resources, group: Group) -> Alike:
    """Return which groups of a cluster look alike. This depends on nothing but their places."""
    return Alike(resources, np.array(group.members(resources.world_size)))


class _Pricing:
    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        workload: Workload,
        disturbed: Mapping[int, str],
        shares: Mapping[int, float],
    ) -> None:
        self._plan = plan
        self._cluster = cluster
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._compute = ComputeCost(workload, cluster)
        resources = resources_of(plan, cluster)
        self.resources = resources
        self.topology = Topology(
            resources.n_nodes,
            resources.ranks_per_node,
            resources.n_servers,
            resources.n_storage_servers,
            _fabric_cost(cluster),
            LinkCost.of(cluster.network, n_parallel=cluster.topology.nics_per_node),
            switched=cluster.topology.oversubscription > 1 or resources.switch in (*disturbed, *shares),
            bridged=math.isfinite(cluster.topology.host_bridge_Bps),
            overhead_s=cluster.collectives.overhead_s,
            host_Bps=cluster.host.reduction_Bps,
            host=_host_cost(cluster),
            nodes_per_domain=cluster.topology.nodes_per_domain,
            railed=resources.railed,
            machines_per_leaf=resources.machines_per_leaf,
            n_workers=resources.n_workers,
            mesh=cluster.topology.mesh,
            spine_s=cluster.topology.leaf.latency_s if cluster.topology.leaf else 0.0,
        )
        self._undisturbed_Bps = self._capacity_Bps()
        self.capacity_Bps = self._undisturbed_Bps.copy()
        for resource, share in shares.items():
            self.capacity_Bps[resource] *= share
        self._loads = self._load_costs(workload) if plan.dataset else None
        self._collectives: dict[tuple[ops.Collective, int, bool], Shared] = {}

    def _load_costs(self, workload: Workload) -> "LoadCosts":
        from simdist.cost.loads import LoadCosts

        return LoadCosts(self._plan, self._cluster, workload, self.topology, self.capacity_Bps)

    def loads_together(self, costs: Mapping[ops.Op, OpCost]) -> dict[ops.Op, Shared]:
        """Return the total resource use of the varying operations over all occurrences."""
        varying = [op for op, cost in costs.items() if isinstance(cost, Varying)]
        if self._loads is None or not varying:
            return {}
        return dict.fromkeys(varying, Shared.of(_EVERY_RANK, self._loads.used(), self.capacity_Bps))

    def _capacity_Bps(self) -> NDArray[np.float64]:
        topology = self.topology
        storage = self._cluster.storage
        capacity_Bps = np.full(topology.n_resources, np.inf)
        nodes = np.arange(topology.n_nodes)
        machines = np.arange(topology.n_machines)
        capacity_Bps[: 2 * topology.world_size] = min(topology.fabric.capacity_Bps, topology.host_Bps)
        capacity_Bps[topology.nic_out(machines)] = topology.network.capacity_Bps
        capacity_Bps[topology.nic_in(machines)] = topology.network.capacity_Bps
        capacity_Bps[topology.bridge_up(nodes)] = self._cluster.topology.host_bridge_Bps
        capacity_Bps[topology.bridge_down(nodes)] = self._cluster.topology.host_bridge_Bps
        if topology.switched:
            network_Bps = topology.network.capacity_Bps * topology.n_machines
            capacity_Bps[topology.switch] = network_Bps / self._cluster.topology.oversubscription
        if storage:
            capacity_Bps[topology.storage_server(nodes)] = storage.bandwidth_Bps
            capacity_Bps[topology.storage_client(nodes)] = storage.client_bandwidth_Bps
            capacity_Bps[topology.storage_operations(nodes)] = storage.operations_per_s
        if disk := self._cluster.disk:
            capacity_Bps[topology.disk_read(nodes)] = disk.read_Bps
            capacity_Bps[topology.disk_write(nodes)] = disk.write_Bps
            capacity_Bps[topology.disk_operations(nodes)] = disk.files_per_s
        if memory := self._cluster.memory:
            capacity_Bps[topology.memory(nodes)] = memory.bandwidth_Bps
        if self._cluster.host.cores_per_node:
            capacity_Bps[topology.cores(nodes)] = self._cluster.host.cores_per_node
        ranks = np.arange(topology.world_size)
        if topology.railed:
            of_gpu_Bps = topology.network.capacity_Bps / topology.ranks_per_node
            capacity_Bps[topology.rail_out(ranks)] = capacity_Bps[topology.rail_in(ranks)] = of_gpu_Bps
        if leaf := self._cluster.topology.leaf:
            leaves = np.arange(topology.n_leaves)
            capacity_Bps[topology.leaf_up(leaves)] = capacity_Bps[topology.leaf_down(leaves)] = leaf.uplinks_Bps
        capacity_Bps[topology.decoders(ranks)] = 1.0
        for worker in range(topology.n_workers):
            capacity_Bps[topology.readers(ranks, worker)] = 1.0
        return capacity_Bps

    def cost(self, op: ops.Op) -> OpCost:
        cost = self._cost(op)
        if isinstance(cost, Local):
            cost = Local(self._compute.at_least(op, cost.seconds))
        host = self._cluster.host
        if (
            not host.is_charged
            or not isinstance(cost, Local)
            or isinstance(op, ops.Enter | ops.Delay | ops.Tick | ops.KernelLaunch)
        ):
            return cost
        return Local(cost.seconds + self._cluster.ranks_per_core * host.handover_s)

    def _cost(self, op: ops.Op) -> OpCost:  # noqa: C901 (one `match` over all operations)
        match op:
            case ops.Forward():
                return Local(self._compute.forward([buffer for buffer in map(self._buffer, op.srcs) if buffer.tensors]))
            case ops.Backward():
                return Local(self._compute.backward(self._buffer(op.dst)))
            case ops.Optimize():
                return Local(self._compute.optimize(op, [self._buffer(name) for name in op.slices or op.params]))
            case ops.Combine():
                return Local(self._compute.combine([*map(self._buffer, op.srcs)], self._buffer(op.dst)))
            case ops.Copy():
                seconds = self._compute.copy(op, self._buffer(op.src), self._buffer(op.dst))
                if op.by == _EVERY_RANK:
                    return Local(seconds)
                return Local(np.array([seconds * op.by.is_first(rank) for rank in range(self._plan.world_size)]))
            case ops.Pack():
                return Local(self._compute.fusion_copy([*map(self._buffer, op.srcs)], self._buffer(op.dst)))
            case ops.Unpack():
                return Local(self._compute.fusion_copy([*map(self._buffer, op.dsts)], self._buffer(op.src)))
            case ops.TrustRatios():
                return Local(self._compute.trust_ratios(op, [*map(self._buffer, op.params)], self._plan.world_size))
            case ops.Select():
                src, residual, dst = map(self._buffer, (op.src, op.residual, op.dst))
                return Local(self._compute.select(op, src, residual, dst))
            case ops.Merge():
                return Local(self._compute.merge(self._buffer(op.src), self._buffer(op.dst)))
            case ops.Densify():
                return Local(self._compute.densify(op, self._buffer(op.src), self._buffer(op.dst)))
            case ops.LowRank():
                return Local(self._compute.low_rank(op, self._buffer(op.grad)))
            case ops.AllReduce() | ops.Reduce() | ops.Broadcast():
                return self._collective(op, self._buffer(op.buffer).nbytes)
            case ops.ReduceScatter():
                return self._collective(op, self._buffer(op.src).nbytes)
            case ops.AllGather():
                return self._collective(op, self._buffer(op.dst).nbytes)
            case ops.Load():
                if self._loads and op.read:
                    return Varying(_EVERY_RANK, self._loads.transfers)
                return self._request(op.read[0] if op.read else "storage", self._buffer(op.dst).nbytes, inward=True)
            case ops.StageIn():
                assert self._loads is not None
                return Shared.of(op.group, self._loads.staging(op), self.capacity_Bps)
            case ops.Save():
                nbytes = sum(self._buffer(name).nbytes for name in op.srcs)
                return self._request(op.to, nbytes, inward=False, by=op.by)
            case ops.KernelLaunch():
                return Local(self._compute.launch(op))
            case ops.Enter() | ops.Delay() | ops.Wait() | ops.Tick():  # ticks: see `simdist.plan.ops`
                return Local(0.0)
            case _:
                assert_never(op)

    def _buffer(self, name: str) -> Buffer:
        return self._buffers[name]

    def _collective(self, op: ops.Collective, nbytes: int) -> Shared:
        """Return the price of a collective; those that differ in the names of buffers only have one."""
        sparse = isinstance(op, ops.AllGather) and self._buffer(op.dst).sparse
        like = ops.without_names(op), nbytes, sparse
        if like not in self._collectives:
            self._collectives[like] = self._new_collective(op, nbytes, sparse=sparse)
        return self._collectives[like]

    def _new_collective(self, op: ops.Collective, nbytes: int, *, sparse: bool) -> Shared:
        if isinstance(op, ops.AllReduce) and op.drop:
            return self._first_come(op, nbytes)
        transfers = self._transfers(op, nbytes, sparse=sparse)
        if math.isfinite(self.topology.host_Bps):
            transfers = [self._with_copies(transfer, op, nbytes) for transfer in transfers]
        shared = Shared.of(op.group, transfers, self.capacity_Bps)
        if not (self._cluster.collectives.chunkwise and self._cluster.collectives.library == "gloo"):
            return shared
        from simdist.cost.algorithms.gloo import segments

        return replace(shared, segments=segments(self._calls(op, nbytes, sparse=sparse), shared.alone_s))

    def _calls(self, op: ops.Collective, nbytes: int, *, sparse: bool) -> list[Call]:
        """Return the call of each group."""
        members = np.array(op.group.members(self._plan.world_size))
        topology = self.topology.of_collective(op)
        return [Call(op, of_group, nbytes, topology, number, sparse) for number, of_group in enumerate(members)]

    def _transfers(self, op: ops.Collective, nbytes: int, *, sparse: bool) -> Sequence[Transfer]:
        """Return the transfers of groups; those of groups that look alike are the same on other resources.

        What the library chooses depends on the places of members, but not on their numbers.
        """
        if op.algorithm not in _OF_LIBRARIES:
            return [self._transfer(call) for call in self._calls(op, nbytes, sparse=sparse)]
        groups = alike(self.resources, op.group)
        topology = self.topology.of_collective(op)
        bases = [
            self._transfer(Call(op, members, nbytes, topology, number, sparse))
            for number, members in zip(groups.firsts, groups.members, strict=True)
        ]
        return AlikeTransfers(groups, bases)

    def _transfer(self, call: Call) -> Transfer:
        return collective_transfer(call, self._cluster, self._undisturbed_Bps)

    def _first_come(self, op: ops.AllReduce, nbytes: int) -> Shared:
        """Price the exchange of the first ranks, and that of a last, late rank. Late ranks are spread evenly.

        The first ranks ask and get an answer. Then they push to servers and pull, or all-reduce among themselves. A
        late rank asks, gets an answer, and pulls: from the servers, or from a rank that is in.
        """
        n = op.group.size
        first = np.delete(np.arange(n), spread_late(n, op.drop))

        def among(some: NDArray[np.int64]) -> Transfer:
            call = Call(op, some, nbytes, self.topology)
            transfer = collective_transfer(call, self._cluster, self._undisturbed_Bps)
            if op.servers is None:
                transfer = Transfer((*self._asked(some), *transfer.stages))
            return self._with_copies(transfer, op, nbytes) if math.isfinite(self.topology.host_Bps) else transfer

        if op.servers is None:
            last = np.array([n - 1])
            pull = self.topology.transfer([Messages(first[:1], last, nbytes)])
            late = Transfer((*self._asked(last), *pull.stages))
            if math.isfinite(self.topology.host_Bps):
                late = self._with_copies(late, op, nbytes)
        else:
            ask, answer, _, pulled = among(np.array([n - 1])).stages
            late = Transfer((ask, answer, pulled))
        shared = Shared.of(op.group, [among(first)], self.capacity_Bps)
        rule = FirstCome(op.n_in, late.alone_s(self.capacity_Bps))
        return replace(shared, first_come=rule)

    def _asked(self, some: NDArray[np.int64]) -> tuple[Stage, ...]:
        """Return the stages in which members ask rank 0 whether they are in, and get its answer."""
        asked = np.zeros_like(some)
        messages = [Messages(some, asked, 0.0), Messages(asked, some, 0.0)]
        return self.topology.transfer(messages).stages

    def _with_copies(self, transfer: Transfer, op: ops.Collective, nbytes: int) -> Transfer:
        """Add the copies of a buffer to the host, back, or both if all members' buffers are replaced."""
        if not transfer.stages:
            return transfer
        copies_s = (1 + isinstance(op, ops.AllReduce)) * nbytes / self._cluster.device.host_bandwidth_Bps
        first = replace(transfer.stages[0], latency_s=transfer.stages[0].latency_s + copies_s)
        return Transfer((first, *transfer.stages[1:]))

    def _request(self, level: Level, nbytes: int, *, inward: bool, by: Group = _EVERY_RANK) -> Shared:
        """Price one read (`inward`) or write of the first rank of each group."""
        if level == "peer":
            return self._with_peer(nbytes, inward=inward, by=by)
        latency_s, paths = self._disk(inward=inward) if level == "disk" else self._storage(inward=inward)
        return self._shared(latency_s, paths, nbytes, by=by)

    def _with_peer(self, nbytes: int, *, inward: bool, by: Group) -> Shared:
        """Price a message between the memories of each rank's node and of the next node."""
        topology = self.topology
        if topology.n_nodes == 1:
            raise PlanError(f"plan {self._plan.name} saves to a peer; cluster {self._cluster.name} has one node")
        ranks = np.arange(topology.world_size)
        peers = (ranks + topology.ranks_per_node) % topology.world_size
        src, dst = (peers, ranks) if inward else (ranks, peers)

        def message(pair: NDArray[np.int64]) -> Transfer:
            return topology.transfer([Messages(pair[:1], pair[1:], nbytes)])

        pairs = np.stack([src, dst], axis=1)
        if by == _EVERY_RANK:
            groups = Alike(self.resources, pairs)
            bases = [message(pairs[first]) for first in groups.firsts]
            return Shared.of(by, AlikeTransfers(groups, bases), self.capacity_Bps)
        transfers = (message(pair) if by.is_first(rank) else Transfer(()) for rank, pair in enumerate(pairs))
        return Shared.of(_EVERY_RANK, transfers, self.capacity_Bps)

    def _disk(self, *, inward: bool) -> tuple[float, NDArray[np.int64]]:
        """Return the latency and, for each rank, the resources of reading its node's disk, or of writing to it."""
        disk = self._cluster.disk
        topology = self.topology
        if disk is None:
            raise PlanError(
                f"plan {self._plan.name} saves to disk; cluster {self._cluster.name} has none: set cluster.disk"
            )
        nodes = np.arange(topology.world_size) // topology.ranks_per_node
        used = topology.disk_read(nodes) if inward else topology.disk_write(nodes)
        return disk.latency_s, used[:, np.newaxis]

    def _storage(self, *, inward: bool) -> tuple[float, NDArray[np.int64]]:
        """Return the latency and, for each rank, the resources of reading from storage, or of writing to it."""
        storage = self._cluster.storage
        topology = self.topology
        if storage is None:
            raise PlanError(
                f"plan {self._plan.name} uses storage; cluster {self._cluster.name} has none: set cluster.storage"
            )
        nodes = np.arange(topology.world_size) // topology.ranks_per_node
        nics = topology.nic_in(nodes) if inward else topology.nic_out(nodes)
        paths = np.stack([nics, topology.storage_server(nodes), topology.storage_client(nodes)], axis=1)
        return storage.latency_s, paths

    def _shared(self, latency_s: float, paths: NDArray[np.int64], nbytes: int, *, by: Group = _EVERY_RANK) -> Shared:
        """Price a transfer of the first rank of each group over the resources of its path, `[world_size, n]`."""
        limited = np.isfinite(self.capacity_Bps[paths[0]])
        amounts = np.full(int(limited.sum()), float(nbytes))
        stages = ((Stage(latency_s, path[limited], amounts),) for path in paths)
        transfers = (Transfer(each if by.is_first(rank) else ()) for rank, each in enumerate(stages))
        return Shared.of(_EVERY_RANK, transfers, self.capacity_Bps)


def _fabric_cost(cluster: Cluster) -> LinkCost:
    """Return the link inside a node. If CPU cores move bytes, ranks share the cores."""
    link = LinkCost.of(cluster.fabric, n_parallel=max(1, cluster.gpus_per_node - 1) if cluster.topology.mesh else 1)
    if not cluster.host.is_charged or link.table is not None:
        return link
    return replace(link, capacity_Bps=link.capacity_Bps / cluster.ranks_per_core)


def _host_cost(cluster: Cluster) -> HostCost | None:
    host = cluster.host
    if not host.is_charged:
        return None
    n_ranks = cluster.world_size if host.shares_cores else cluster.gpus_per_node
    return HostCost(host, host.cores_per_node or math.inf, n_ranks, host.shares_cores)


def _n_servers(plan: Plan) -> int:
    """Return the number of machines for the parameter servers of a plan. Operations use the same machines.

    Each group of an operation has its own servers.
    """
    n_servers = 0
    for op in (op for body in plan.bodies for op in body):
        if isinstance(op, ops.AllReduce) and op.servers and not op.servers.members:
            n_servers = max(n_servers, len(op.servers.parts) * (plan.world_size // op.group.size))
        elif isinstance(op, ops.Reduce | ops.Broadcast) and op.server and op.server.apart:
            n_servers = max(n_servers, op.server.number + 1)
    return n_servers


def _contested_ops(
    shared: Mapping[ops.Op, Shared], resources: Resources, disturbed: Iterable[int]
) -> frozenset[ops.Op]:
    """Return the operations that may ever share a resource or find it disturbed. This is decided before the run.

    A resource belongs to ranks. A fabric port, cards of a GPU and the threads that read belong to one rank. The NIC,
    the host bridge, the disk, the memory and the cores of a node belong to the ranks of the node, uplinks to those
    below their leaf. The switch and the NIC of a parameter server belong to all, a storage server to the ranks of its
    nodes. A resource is *exclusive* if only one lane uses it, and if every transfer over it has all its owners as
    members or only one group ever uses it: lanes run in order, so one transfer ends before the next begins. An
    operation that uses only exclusive resources takes its time alone, whatever happens elsewhere. Both engines rely on
    this, so they agree to the last bit on such plans.
    """
    n_resources = resources.n_resources
    uses: dict[int, _Uses] = {}  # by identity: many operations have one price
    by_lane: defaultdict[Lane, NDArray[np.bool_]] = defaultdict(lambda: np.zeros(n_resources, dtype=bool))
    foreign = np.zeros(n_resources, dtype=bool)
    n_users = np.zeros(n_resources, dtype=np.int64)
    for op, cost in shared.items():
        if id(cost) not in uses:
            uses[id(cost)] = _uses(cost, resources)
        use = uses[id(cost)]
        foreign |= use.is_foreign
        n_users += use.n_users
        by_lane[ops.lane_of(op)] |= use.n_users > 0
    contested = foreign & (n_users > 1)
    contested[list(disturbed)] = True
    contested |= sum(by_lane.values(), start=np.zeros(n_resources, dtype=np.int64)) > 1
    return frozenset(op for op, cost in shared.items() if ((uses[id(cost)].n_users > 0) & contested).any())


@dataclass(frozen=True, slots=True)
class _Uses:
    """How an operation uses resources.

    Args:
        n_users: Stages of transfers that use each resource, `[n_resources]`.
        is_foreign: Whether a group uses a resource that has other owners too, `[n_resources]`.
    """

    n_users: NDArray[np.int64]
    is_foreign: NDArray[np.bool_]


def _uses(cost: Shared, resources: Resources) -> _Uses:
    """Return the uses by all groups of an operation."""
    if not isinstance(cost.transfers, AlikeTransfers) or cost.transfers.alike is not alike(resources, cost.group):
        return _counted(cost.transfers, cost.group, resources)
    of_bases = [[stage.resources.tobytes() for stage in base.stages] for base in cost.transfers.bases]
    return _uses_of_alike(resources, cost.group, tuple(map(tuple, of_bases)))


@lru_cache(maxsize=64)
def _uses_of_alike(resources: Resources, group: Group, of_bases: tuple[tuple[bytes, ...], ...]) -> _Uses:
    """Return the uses of groups that look alike, given the resources of each stage of the first group of each kind.

    Uses do not depend on bytes, latencies and capacities, so prices that differ in these have the same.
    """
    nothing = np.empty(0)
    bases = [
        Transfer(tuple(Stage(0.0, np.frombuffer(used, dtype=np.int64), nothing) for used in of)) for of in of_bases
    ]
    return _counted(AlikeTransfers(alike(resources, group), bases), group, resources)


def _counted(transfers: Sequence[Transfer], group: Group, resources: Resources) -> _Uses:
    owner = _owner(group, resources)
    n_users = np.zeros(resources.n_resources, dtype=np.int64)
    is_foreign = np.zeros(resources.n_resources, dtype=bool)
    for groups, _, _, used in used_by(transfers):
        n_users += np.bincount(used.ravel(), minlength=resources.n_resources)
        is_foreign[used[owner[used] != groups[:, np.newaxis]]] = True
    return _Uses(n_users, is_foreign)


def _owner(group: Group, resources: Resources) -> NDArray[np.int64]:
    """Return, for every resource, the group that all its owners are in."""
    world_size = resources.world_size
    ranks_per_node = resources.ranks_per_node
    n_blocks, size, stride = group.shape(world_size)
    numbers = np.arange(n_blocks * stride).reshape(n_blocks, 1, stride)
    of_rank = group.joined(np.broadcast_to(numbers, (n_blocks, size, stride)))
    by_node = of_rank.reshape(-1, ranks_per_node)
    of_node = np.where((by_node == by_node[:, :1]).all(axis=1), by_node[:, 0], _SEVERAL)
    of_world = np.array([0 if size == world_size else _SEVERAL])
    of_machine = np.concatenate([of_node, np.repeat(of_world, resources.n_servers)])
    on_servers = np.arange(resources.n_nodes) % resources.n_storage_servers
    of_storage = np.full(resources.n_storage_servers, _SEVERAL)
    for server in range(min(resources.n_nodes, resources.n_storage_servers)):
        groups = of_node[on_servers == server]
        of_storage[server] = groups[0] if (groups == groups[0]).all() else _SEVERAL
    links = [of_rank, of_rank, of_machine, of_machine, of_node, of_node, of_world, of_storage, of_node]
    rails = [of_rank, of_rank] if resources.railed else []
    of_leaf = np.full(resources.n_leaves, _SEVERAL)
    leaf_of_machine = np.arange(resources.n_machines) // max(resources.machines_per_leaf, 1)
    for leaf in range(resources.n_leaves):
        groups = of_machine[leaf_of_machine == leaf]
        of_leaf[leaf] = groups[0] if (groups == groups[0]).all() else _SEVERAL
    threads = [np.repeat(of_rank, resources.n_workers), of_rank]
    return np.concatenate([*links, of_storage, *[of_node] * 5, *threads, *rails, of_leaf, of_leaf])
