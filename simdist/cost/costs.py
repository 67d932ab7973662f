"""Prices: the costs of operations, as engines read them.

An operation takes seconds of its own rank (`Local`), or its groups move bytes (`Shared`, `Varying`).
A transfer is a sequence of *stages*. A stage has a latency and puts bytes on resources, such as the fabric ports of
GPUs or the network cards (NICs) of nodes. Alone, a stage takes

    latency + max over resources (bytes / capacity)

and stages follow one another. `simdist.cost.algorithms` and `Topology` decide which bytes use which resources.
`simdist.engines` decides the sharing of a resource by several transfers.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeAlias, final, overload

import numpy as np
from numpy.typing import NDArray

from simdist.plan.first_come import FirstCome
from simdist.plan.group import Group
from simdist.plan.ops import Op


@dataclass(frozen=True, slots=True)
class Resources:
    """Numbers ranks, machines and resources.

    Machines are the nodes, followed by parameter servers apart from the ranks. Each machine has a NIC. Such a server
    sends and receives as if it were the first rank of its machine. Resources are numbered: fabric out of each rank,
    fabric into each rank, NIC out of each machine, NIC into each machine, host bridge of each node up, host bridge of
    each node down, switch, storage servers, storage client of each node; then, for data sets, the servers' operations,
    each node's disk for reading, for writing, its memory, its cores, and the threads of each rank that read and that
    decode. If GPUs have cards of their own, the cards of each rank out and in follow; if there are leaf switches, the
    uplinks of each leaf, up and down. Resources that are not links count operations, or seconds of work, where links
    count bytes.

    Args:
        n_nodes: Nodes.
        ranks_per_node: Ranks of each.
        n_servers: Parameter servers that are machines of their own.
        n_storage_servers: Storage servers. Node n uses server n modulo their number.
        nodes_per_domain: Nodes that the fabric joins.
        railed: Whether each GPU has cards of its own.
        machines_per_leaf: Machines below one leaf switch; 0 if there are no leaves.
        n_workers: Workers of a rank that load whole batches; 1 if its reading threads share each batch.
    """

    n_nodes: int
    ranks_per_node: int
    n_servers: int
    n_storage_servers: int
    nodes_per_domain: int = field(default=1, kw_only=True)
    railed: bool = field(default=False, kw_only=True)
    machines_per_leaf: int = field(default=0, kw_only=True)
    n_workers: int = field(default=1, kw_only=True)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.n_nodes * self.ranks_per_node

    @property
    def n_machines(self) -> int:
        """Number of nodes and servers."""
        return self.n_nodes + self.n_servers

    def node(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the machine of a rank, or of a server."""
        return rank // self.ranks_per_node

    def domain(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the domain of a rank, numbered by its first node; of a server, its machine."""
        machine = self.node(rank)
        if self.nodes_per_domain == 1:
            return machine
        return np.where(machine < self.n_nodes, machine // self.nodes_per_domain * self.nodes_per_domain, machine)

    def server(self, number: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the pseudo-rank of a server on a machine of its own."""
        return (self.n_nodes + number) * self.ranks_per_node

    def fabric_out(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a rank's outgoing fabric port."""
        return rank

    def fabric_in(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a rank's incoming fabric port."""
        return self.world_size + rank

    def nic_out(self, machine: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a machine's outgoing network cards."""
        return 2 * self.world_size + machine

    def nic_in(self, machine: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a machine's incoming network cards."""
        return 2 * self.world_size + self.n_machines + machine

    def bridge_up(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a node's host bridge, from its GPUs."""
        return 2 * (self.world_size + self.n_machines) + node

    def bridge_down(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a node's host bridge, to its GPUs."""
        return 2 * (self.world_size + self.n_machines) + self.n_nodes + node

    @property
    def switch(self) -> int:
        """The switch between the machines."""
        return 2 * (self.world_size + self.n_machines + self.n_nodes)

    def storage_server(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of the storage server that a node uses."""
        return self.switch + 1 + node % self.n_storage_servers

    def storage_client(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a node's storage client."""
        return self.switch + 1 + self.n_storage_servers + node

    def storage_operations(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of the work, in operations, of the storage server that a node uses."""
        return self.switch + 1 + self.n_storage_servers + self.n_nodes + node % self.n_storage_servers

    def is_of_storage(self, resources: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which resources are storage servers, their operations, or clients of storage."""
        return (self.switch < resources) & (resources < self._first_disk)

    @property
    def _first_disk(self) -> int:
        return self.switch + 1 + 2 * self.n_storage_servers + self.n_nodes

    def disk_read(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of reading from a node's disk."""
        return self._first_disk + node

    def disk_write(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of writing to a node's disk."""
        return self._first_disk + self.n_nodes + node

    def disk_operations(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of the work, in operations, of a node's disk."""
        return self._first_disk + 2 * self.n_nodes + node

    def memory(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of copying samples out of a node's memory."""
        return self._first_disk + 3 * self.n_nodes + node

    def cores(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a node's CPU cores, in seconds of work."""
        return self._first_disk + 4 * self.n_nodes + node

    def readers(self, rank: NDArray[np.int64], worker: int = 0) -> NDArray[np.int64]:
        """Return the resource of a rank's reading threads, in seconds of all threads together, or of one worker."""
        return self._first_disk + 5 * self.n_nodes + rank * self.n_workers + worker

    def decoders(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a rank's decoding threads, in seconds of all threads together."""
        return self._first_disk + 5 * self.n_nodes + self.world_size * self.n_workers + rank

    @property
    def _first_rail(self) -> int:
        return self._first_disk + 5 * self.n_nodes + self.world_size * (self.n_workers + 1)

    @property
    def _first_leaf(self) -> int:
        return self._first_rail + (2 * self.world_size if self.railed else 0)

    @property
    def n_leaves(self) -> int:
        """Number of leaf switches; 0 if there are none."""
        return -(-self.n_machines // self.machines_per_leaf) if self.machines_per_leaf else 0

    def leaf(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the leaf switch of a rank's machine, or of a server; of all 0 if there are none."""
        return self.node(rank) // self.machines_per_leaf if self.machines_per_leaf else np.zeros_like(rank)

    def rail_out(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a rank's own cards, outgoing."""
        return self._first_rail + rank

    def rail_in(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a rank's own cards, incoming."""
        return self._first_rail + self.world_size + rank

    def leaf_up(self, leaf: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a leaf's uplinks, from its machines."""
        return self._first_leaf + leaf

    def leaf_down(self, leaf: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a leaf's uplinks, to its machines."""
        return self._first_leaf + self.n_leaves + leaf

    def moved(
        self,
        resources: NDArray[np.int64],
        n_ranks: int | NDArray[np.int64],
        n_nodes: int | NDArray[np.int64],
        n_leaves: int | NDArray[np.int64] = 0,
    ) -> NDArray[np.int64]:
        """Return the resources that ranks and nodes use whose numbers are larger by so much; of the switch, the same.

        Args:
            resources: Ports of ranks, cards of machines or ranks, host bridges, uplinks, the switch.
            n_ranks: Added to ranks; one number, or several that broadcast with `resources`.
            n_nodes: Added to nodes, likewise.
            n_leaves: Added to leaves, likewise.
        """
        of_port = resources < 2 * self.world_size
        of_rank = of_port | ((self._first_rail <= resources) & (resources < self._first_leaf))
        of_node = ~of_port & (resources < self.switch)
        of_leaf = self._first_leaf <= resources
        return np.asarray(resources + n_ranks * of_rank + n_nodes * of_node + n_leaves * of_leaf)

    @property
    def n_resources(self) -> int:
        """Number of resources."""
        return self._first_leaf + 2 * self.n_leaves

    def name(self, index: int) -> str:
        """Return the name of a resource: its function and its rank, machine or node, such as `nic_out[3]`.

        Raises:
            IndexError: There is no such resource.
        """
        left = index if 0 <= index < self.n_resources else -1
        for name, n_alike in self._kinds():
            if 0 <= left < (n_alike or 1):
                return name if n_alike is None else f"{name}[{left}]"
            left -= n_alike or 1
        raise IndexError(f"resource {index} of {self.n_resources}")

    def _kinds(self) -> tuple[tuple[str, int | None], ...]:
        """Return names and numbers of resources in order; no number for single resources."""
        of_ranks = self.world_size
        of_machines = self.n_machines
        of_nodes = self.n_nodes
        of_storage = self.n_storage_servers if self.n_storage_servers > 1 else None
        return (
            ("fabric_out", of_ranks),
            ("fabric_in", of_ranks),
            ("nic_out", of_machines),
            ("nic_in", of_machines),
            ("bridge_up", of_nodes),
            ("bridge_down", of_nodes),
            ("switch", None),
            ("storage_server", of_storage),
            ("storage_client", of_nodes),
            ("storage_operations", of_storage),
            ("disk_read", of_nodes),
            ("disk_write", of_nodes),
            ("disk_operations", of_nodes),
            ("memory", of_nodes),
            ("cores", of_nodes),
            ("readers", of_ranks * self.n_workers),
            ("decoders", of_ranks),
            *((("rail_out", of_ranks), ("rail_in", of_ranks)) if self.railed else ()),
            *((("leaf_up", self.n_leaves), ("leaf_down", self.n_leaves)) if self.n_leaves else ()),
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """A latency, then bytes on resources.

    Args:
        latency_s: Seconds before the bytes flow.
        resources: Indices of the resources used, each once.
        nbytes: Bytes on each of them.
        together_nbytes: Bytes that it and others that always flow with it, at its rate, put on each of them. Such a
            stage stands for them all. None if it stands for itself.
    """

    latency_s: float
    resources: NDArray[np.int64]
    nbytes: NDArray[np.float64]
    together_nbytes: NDArray[np.float64] | None = None

    def alone_s(self, capacity_Bps: NDArray[np.float64]) -> float:
        """Return its duration if it shares its resources with no other."""
        flow_s = float((self.nbytes / capacity_Bps[self.resources]).max()) if len(self.resources) else 0.0
        return self.latency_s + flow_s

    def later(self, seconds: float) -> "Stage":
        """Return a stage whose bytes flow some seconds later."""
        return replace(self, latency_s=self.latency_s + seconds) if seconds else self


@dataclass(frozen=True, slots=True)
class Transfer:
    """Traffic of one group (or one rank) in one operation: stages, one after the other."""

    stages: tuple[Stage, ...]

    def alone_s(self, capacity_Bps: NDArray[np.float64]) -> float:
        """Return its duration if it shares its resources with no other."""
        return math.fsum(stage.alone_s(capacity_Bps) for stage in self.stages)

    def scaled(self, factor: float) -> "Transfer":
        """Return traffic that takes `factor` times as long."""
        stages = (Stage(each.latency_s * factor, each.resources, each.nbytes * factor) for each in self.stages)
        return Transfer(tuple(stages))


@final
class Alike:
    """Groups that look alike on a cluster: all machines are alike, and so are domains, and the GPUs of one machine.

    Args:
        resources: Numbers of ranks, nodes and resources.
        members: Ranks of each group, `[n_groups, n_members]`.
    """

    def __init__(self, resources: Resources, members: NDArray[np.int64]) -> None:
        self._resources = resources
        self._moved: dict[tuple[int, bytes], NDArray[np.int64]] = {}
        self.base = np.full(len(members), _NONE)
        """Which of the different groups each group is like, `[n_groups]`."""
        self.moves = np.zeros((len(members), 3), dtype=np.int64)
        """By how many ranks, nodes and leaves each group lies behind the one that it is like, `[n_groups, 3]`."""
        self.firsts: list[int] = []
        """Number of the first group of each kind."""
        self.members: list[NDArray[np.int64]] = []
        """Its members."""
        places = members, resources.node(members), resources.leaf(members), resources.domain(members)
        while (self.base == _NONE).any():
            first = int(np.argmax(self.base == _NONE))
            behind = [each - each[first] for each in places]
            is_alike = self.base == _NONE
            for each in behind:
                is_alike &= (each == each[:, :1]).all(axis=1)
            self.base[is_alike] = len(self.firsts)
            self.moves[is_alike] = np.stack([each[is_alike, 0] for each in behind[:3]], axis=1)
            self.firsts.append(first)
            self.members.append(members[first])

    def moved(self, number: int, resources: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resources of all groups of a kind, `[n, n_used]`, given those of the first group of the kind."""
        key = number, resources.tobytes()
        if key not in self._moved:
            n_ranks, n_nodes, n_leaves = self.moves[self.base == number].T[..., np.newaxis]
            self._moved[key] = self._resources.moved(resources[np.newaxis], n_ranks, n_nodes, n_leaves)
        return self._moved[key]

    def moved_by(self, group: int, resources: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resources of one group, given those of the first group of its kind."""
        return self._resources.moved(resources, *self.moves[group].tolist())


@final
class AlikeTransfers(Sequence[Transfer]):
    """The transfers of groups that are like a few of them, elsewhere; each is made when it is asked for.

    Args:
        alike: Which groups are alike.
        bases: Transfers of the first group of each kind.
    """

    def __init__(self, alike: Alike, bases: Sequence[Transfer]) -> None:
        self.bases = bases
        self.alike = alike
        self._made: dict[int, Transfer] = {}

    @overload
    def __getitem__(self, number: int) -> Transfer: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[Transfer, ...]: ...

    def __getitem__(self, number: int | slice) -> Transfer | tuple[Transfer, ...]:
        if isinstance(number, slice):
            return tuple(self[at] for at in range(*number.indices(len(self))))
        number = range(len(self))[number]
        if number not in self._made:
            base = self.bases[self.alike.base[number]]
            stages = (replace(stage, resources=self.alike.moved_by(number, stage.resources)) for stage in base.stages)
            self._made[number] = Transfer(tuple(stages))
        return self._made[number]

    def __len__(self) -> int:
        return len(self.alike.base)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def scaled(self, factor: float) -> "AlikeTransfers":
        """Return transfers that take `factor` times as long."""
        return AlikeTransfers(self.alike, [each.scaled(factor) for each in self.bases])

    def used(self) -> Iterator[tuple[NDArray[np.int64], int, Stage, NDArray[np.int64]]]:
        """See `used_by`."""
        for number, base in enumerate(self.bases):
            groups = np.flatnonzero(self.alike.base == number)
            for at, stage in enumerate(base.stages):
                yield groups, at, stage, self.alike.moved(number, stage.resources)

    def alone_s(self, capacity_Bps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the duration of each if it shares its resources with no other, `[n_groups]`."""
        if all((capacity_Bps[used] == capacity_Bps[used[:1]]).all() for *_, used in self.used()):
            of_bases = np.array([each.alone_s(capacity_Bps) for each in self.bases])
            return np.asarray(of_bases[self.alike.base])
        return np.array([transfer.alone_s(capacity_Bps) for transfer in self])


def used_by(transfers: Sequence[Transfer]) -> Iterator[tuple[NDArray[np.int64], int, Stage, NDArray[np.int64]]]:
    """Yield some groups and a stage that they have in common but for its resources, until all were there.

    Yields:
        Numbers of the groups, `[n]`; the place of the stage in their transfers; the stage of one of them; the resources
        of all of them, `[n, n_used]`.
    """
    if isinstance(transfers, AlikeTransfers):
        yield from transfers.used()
        return
    first = 0
    for looks, run in groupby(transfers, _look):
        alike_ones = tuple(run)
        numbers = np.arange(first, first + len(alike_ones))
        first += len(alike_ones)
        for place in range(len(looks)):
            stages = [each.stages[place] for each in alike_ones]
            yield numbers, place, stages[0], np.stack([stage.resources for stage in stages])


def _look(transfer: Transfer) -> tuple[tuple[float, bytes, bytes], ...]:
    """Return what stages have in common with others that differ in resources only."""
    return tuple((each.latency_s, each.nbytes.tobytes(), _together(each)) for each in transfer.stages)


def _together(stage: Stage) -> bytes:
    return b"" if stage.together_nbytes is None else stage.together_nbytes.tobytes()


@dataclass(frozen=True, slots=True)
class Segments:
    """A ring with members that begin when they arrive and end when their own segments are done.

    Each member repeatedly receives a segment from the next member and sends one to the previous member. It posts the
    next pair when the last pair but one is done. A segment flows when both its ends have posted it. Phases follow one
    another.

    Args:
        overhead_s: Seconds from the arrival of a member until it posts.
        segment_s: Seconds that a segment to each member takes, `[n_groups, n_members]`.
        n_of_phases: Segments that each member receives, by phase.
    """

    overhead_s: float
    segment_s: NDArray[np.float64]
    n_of_phases: tuple[int, ...]

    def scaled(self, factor: float) -> "Segments":
        """Return segments that take `factor` times as long."""
        return replace(self, overhead_s=self.overhead_s * factor, segment_s=self.segment_s * factor)

    def end_s(self, come_s: NDArray[np.float64], segment_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the end of each member.

        Args:
            come_s: Arrival of each member, `[n_members, ...]`.
            segment_s: Seconds of its segments, in a shape to add to `come_s`.
        """
        posted_s = come_s + self.overhead_s
        through_s = np.zeros_like(posted_s)
        for n_segments in self.n_of_phases:
            before: list[NDArray[np.float64]] = []
            for number in range(n_segments + _POSTED):
                if number >= _POSTED:
                    received_s = before[number - _POSTED]
                    posted_s = np.maximum(np.maximum(posted_s, received_s), np.roll(received_s, 1, axis=0))
                if number < n_segments:
                    meet_s = np.maximum(posted_s, np.roll(posted_s, -1, axis=0))
                    through_s = np.maximum(meet_s, through_s) + segment_s
                    before.append(through_s)
        return posted_s


@dataclass(frozen=True, slots=True)
class Shared:
    """Transfers over resources that others may use too.

    Args:
        group: Groups that move bytes together.
        transfers: One per group, in the groups' order.
        alone_s: Duration of each if it shares its resources with no other, `[n_groups]`, or one number.
        segments: Separate starts and ends of members, if modelled and without sharing of resources.
        first_come: The rule, if the first members to arrive do not wait for the others.
    """

    group: Group
    transfers: Sequence[Transfer]
    alone_s: float | NDArray[np.float64]
    segments: Segments | None = None
    first_come: FirstCome | None = None

    @classmethod
    def of(cls, group: Group, transfers: Iterable[Transfer], capacity_Bps: NDArray[np.float64]) -> "Shared":
        """Return the transfers with their undisturbed durations."""
        if isinstance(transfers, AlikeTransfers):
            seconds = transfers.alone_s(capacity_Bps)
        else:
            transfers = tuple(transfers)
            seconds = np.array([transfer.alone_s(capacity_Bps) for transfer in transfers])
        return cls(group, transfers, float(seconds[0]) if (seconds == seconds[0]).all() else seconds)

    def scaled(self, factor: float) -> "Shared":
        """Return transfers that take `factor` times as long."""
        transfers = self.transfers
        if isinstance(transfers, AlikeTransfers):
            transfers = transfers.scaled(factor)
        else:
            transfers = tuple(each.scaled(factor) for each in transfers)
        first_come = self.first_come and replace(self.first_come, late_s=self.first_come.late_s * factor)
        segments = self.segments and self.segments.scaled(factor)
        return replace(
            self, transfers=transfers, alone_s=self.alone_s * factor, segments=segments, first_come=first_come
        )


@dataclass(frozen=True, slots=True)
class Local:
    """Seconds that an operation takes on its own rank: one number, or one per rank, `[world_size]`."""

    seconds: float | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Varying:
    """Transfers of single ranks that differ from one occurrence of the operation to the next.

    Args:
        group: Each rank is a group of its own.
        transfers: Number of the load -> one transfer for each rank.
    """

    group: Group
    transfers: Callable[[int], tuple[Transfer, ...]]


def alone_s(cost: Local | Shared, rank: int) -> float:
    """Return the time of an operation on a rank without sharing of resources."""
    seconds, place = (cost.seconds, rank) if isinstance(cost, Local) else (cost.alone_s, cost.group.number(rank))
    return float(seconds) if isinstance(seconds, float | int) else float(seconds[place])


_NONE = -1
_POSTED = 2  # segments that a member has posted at a time
OpCost: TypeAlias = Local | Shared | Varying


@dataclass(frozen=True)
class Costs:
    """The price list of a plan on a cluster.

    Args:
        resources: Their numbers.
        capacity_Bps: Bytes per second of every resource; inf where unlimited.
        of: The cost of every operation in the plan's bodies.
        contested: The operations that may meet another transfer on one of their resources, or use a disturbed resource.
            The others never do.
        shares: Remaining share, above 0 and at most 1, of each resource that is slow throughout. `capacity_Bps` already
            includes it.
        disturbed: Resources with a share that changes or with flows of other jobs, and the cause: see
            `Traffic.causes`.
    """

    resources: Resources
    capacity_Bps: NDArray[np.float64]
    of: Mapping[Op, OpCost]
    contested: frozenset[Op]
    shares: Mapping[int, float] = field(default_factory=dict)
    disturbed: Mapping[int, str] = field(default_factory=dict)

    @property
    def slow(self) -> dict[str, float]:
        """Remaining share of links that are slow throughout, by name."""
        return {self.resources.name(resource): share for resource, share in self.shares.items()}

    @property
    def undisturbed_Bps(self) -> NDArray[np.float64]:
        """Bytes per second of every resource, if nothing slowed it down."""
        capacity_Bps = self.capacity_Bps.copy()
        for resource, share in self.shares.items():
            capacity_Bps[resource] /= share
        return capacity_Bps
