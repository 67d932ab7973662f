"""What a collective moves: stages of messages, and the bytes they put on every resource of a two-level cluster.

A collective over a group is a sequence of *stages*. A stage has a latency and puts bytes on resources: the fabric ports
of GPUs, the network cards (NICs) of nodes, an oversubscribed switch. Alone, a stage takes

    latency + max over resources (bytes / capacity)

and stages follow one another. Messages between GPUs of one node use their fabric ports, others the NICs of both nodes.

With n members, S bytes, and one kind of link (latency alpha, 1/beta bytes per second) this gives the textbook times:

    ring               all_reduce      2(n-1) alpha + 2(n-1)/n S beta
                       reduce_scatter, all_gather   (n-1) alpha + (n-1)/n S beta
    tree (binomial)    all_reduce      2 ceil(log2 n) (alpha + S beta)
    halving_doubling   all_reduce      2 log2 n alpha + 2(n-1)/n S beta

Rings pass through the members in rank order, and their latency is that of the longest chain of dependent sends. In
trees and in halving/doubling the nearest members come first, so that the most
bytes stay inside a node. A collective of several members also takes the cluster's overhead, once.

Source:
    Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, IJHPCA 2005; Patarasuk &
    Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 2009.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from simdist.cost.links import LinkCost
from simdist.errors import PlanError
from simdist.groups import Group
from simdist.plan import AllGather, AllReduce, Broadcast, Collective, Reduce, ReduceScatter, op_text

__all__ = ["Messages", "Shared", "Stage", "Topology", "Transfer", "collective_messages"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A latency, then bytes on resources.

    Args:
        latency_s: Seconds before the bytes flow.
        resources: Indices of the resources used, each once.
        nbytes: Bytes on each of them.
    """

    latency_s: float
    resources: NDArray[np.int64]
    nbytes: NDArray[np.float64]

    def alone_s(self, capacity_Bps: NDArray[np.float64]) -> float:
        """Return its duration when nobody shares its resources."""
        flow_s = float((self.nbytes / capacity_Bps[self.resources]).max()) if len(self.resources) else 0.0
        return self.latency_s + flow_s


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one group (or one rank) moves in one operation: stages, one after the other."""

    stages: tuple[Stage, ...]

    def alone_s(self, capacity_Bps: NDArray[np.float64]) -> float:
        """Return its duration when nobody shares its resources."""
        return sum(stage.alone_s(capacity_Bps) for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Shared:
    """Transfers over resources that others may use too.

    Args:
        group: Who moves bytes together.
        transfers: One per group, in the groups' order.
        alone_s: What each takes when nobody shares its resources, `[n_groups]`, or one number if all are equal.
    """

    group: Group
    transfers: tuple[Transfer, ...]
    alone_s: float | NDArray[np.float64]

    @classmethod
    def of(cls, group: Group, transfers: Iterable[Transfer], capacity_Bps: NDArray[np.float64]) -> "Shared":
        """Return the transfers with their undisturbed durations."""
        transfers = tuple(transfers)
        seconds = np.array([transfer.alone_s(capacity_Bps) for transfer in transfers])
        return cls(group, transfers, float(seconds[0]) if (seconds == seconds[0]).all() else seconds)


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages that go at the same time, `rounds` times over.

    Args:
        src: Sending ranks. dst: Receiving ranks, of the same shape. nbytes: Bytes of each message. rounds: How often
        they follow one another. latency: Which latency counts: that of the slowest message in every round; in a
        `ring`, where each round hands on
            what the one before brought, that of the longest chain of sends; on a `line` (a pipeline), that of all hops.
    """

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    nbytes: float
    rounds: int = 1
    latency: Literal["slowest", "ring", "line"] = "slowest"


@dataclass(frozen=True, slots=True)
class Topology:
    """Where ranks sit and which links join them.

    Resources are numbered: fabric out of each rank, fabric into each rank, NIC out of each node, NIC into each node,
    switch, storage server, storage client of each node.
    """

    n_nodes: int
    ranks_per_node: int
    fabric: LinkCost
    network: LinkCost
    switched: bool
    overhead_s: float = 0.0
    """Of a collective, besides its messages."""

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.n_nodes * self.ranks_per_node

    def fabric_out(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a rank's outgoing fabric port."""
        return rank

    def fabric_in(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a rank's incoming fabric port."""
        return self.world_size + rank

    def nic_out(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a node's outgoing network cards."""
        return 2 * self.world_size + node

    def nic_in(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a node's incoming network cards."""
        return 2 * self.world_size + self.n_nodes + node

    @property
    def switch(self) -> int:
        """The switch between the nodes."""
        return 2 * (self.world_size + self.n_nodes)

    @property
    def storage_server(self) -> int:
        """The storage server."""
        return self.switch + 1

    def storage_client(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the resource of a node's storage client."""
        return self.storage_server + 1 + node

    @property
    def n_resources(self) -> int:
        """How many resources there are."""
        return self.storage_server + 1 + self.n_nodes

    def transfer(self, messages: Iterator[Messages]) -> Transfer:
        """Return the transfer that sends `messages` one after the other."""
        return Transfer(tuple(self._stage(each, 0.0 if n else self.overhead_s) for n, each in enumerate(messages)))

    def _stage(self, messages: Messages, more_s: float) -> Stage:
        src_node, dst_node = messages.src // self.ranks_per_node, messages.dst // self.ranks_per_node
        outside = src_node != dst_node
        inside = ~outside
        fabric_nbytes, network_nbytes = self.fabric.flowing(messages.nbytes), self.network.flowing(messages.nbytes)
        used = [self.fabric_out(messages.src[inside]), self.fabric_in(messages.dst[inside])]
        nbytes = [np.full(len(part), fabric_nbytes * messages.rounds) for part in used]
        nics = [self.nic_out(src_node[outside]), self.nic_in(dst_node[outside])]
        if self.switched:
            nics.append(np.full(outside.sum(), self.switch, dtype=np.int64))
        used += nics
        nbytes += [np.full(len(part), network_nbytes * messages.rounds) for part in nics]
        resources, places = np.unique(np.concatenate(used), return_inverse=True)
        totals = np.bincount(places, weights=np.concatenate(nbytes), minlength=len(resources)).astype(np.float64)
        flows = totals > 0
        return Stage(self._latency_s(messages, outside) + more_s, resources[flows], totals[flows])

    def _latency_s(self, messages: Messages, outside: NDArray[np.bool_]) -> float:
        hop_s = np.where(outside, self.network.latency_s, self.fabric.latency_s)
        match messages.latency:
            case "slowest":
                return float(hop_s.max()) * messages.rounds
            case "ring":
                return _longest_chain_s(hop_s, messages.rounds)
            case "line":
                return math.fsum(hop_s)
            case _:
                assert_never(messages.latency)


def _longest_chain_s(hop_s: NDArray[np.float64], n_sends: int) -> float:
    """Return the latency of the slowest `n_sends` successive hops of a ring."""
    times_around, rest = divmod(n_sends, len(hop_s))
    ahead = np.concatenate(([0.0], np.cumsum(np.concatenate((hop_s, hop_s[:rest])))))
    return times_around * math.fsum(hop_s) + float((ahead[rest:] - ahead[: len(ahead) - rest]).max())


def collective_messages(op: Collective, members: NDArray[np.int64], nbytes: int) -> Iterator[Messages]:
    """Yield the messages of a collective over one group.

    Args:
        op: The collective; its algorithm `auto` is the ring.
        members: Ranks of the group, in order.
        nbytes: Size of the whole (not of a shard), S in the formulas.

    Raises:
        PlanError: The collective has no such algorithm.
    """
    n = len(members)
    if n == 1:
        return
    match op.algorithm:
        case "auto" | "ring":
            yield from _ring(op, members, nbytes)
        case "tree":
            yield from _tree(op, members, nbytes)
        case "halving_doubling":
            yield from _halving_doubling(op, members, nbytes)
        case "double_tree" | "direct" | "hierarchical" | "server":
            raise PlanError(f"{op_text(op)}: nobody knows yet what {op.algorithm} costs; use ring")
        case _:
            assert_never(op.algorithm)


def _ring(op: Collective, members: NDArray[np.int64], nbytes: int) -> Iterator[Messages]:
    n = len(members)
    match op:
        case AllReduce():
            yield Messages(members, np.roll(members, -1), nbytes / n, rounds=2 * (n - 1), latency="ring")
        case ReduceScatter() | AllGather():
            yield Messages(members, np.roll(members, -1), nbytes / n, rounds=n - 1, latency="ring")
        case Broadcast():  # a pipeline from the root: every hop carries everything
            chain = np.roll(members, -op.root)
            yield Messages(chain[:-1], chain[1:], nbytes, latency="line")
        case Reduce():
            chain = np.roll(members, -op.root - 1)
            yield Messages(chain[:-1], chain[1:], nbytes, latency="line")
        case _:
            assert_never(op)


def _tree(op: Collective, members: NDArray[np.int64], nbytes: int) -> Iterator[Messages]:
    match op:
        case AllReduce():
            yield from _binomial(members, nbytes, towards_root=True)
            yield from _binomial(members, nbytes, towards_root=False)
        case Reduce():
            yield from _binomial(np.roll(members, -op.root), nbytes, towards_root=True)
        case Broadcast():
            yield from _binomial(np.roll(members, -op.root), nbytes, towards_root=False)
        case ReduceScatter() | AllGather():
            raise PlanError(f"{op_text(op)}: a tree reduces and broadcasts whole buffers; use ring or halving_doubling")
        case _:
            assert_never(op)


def _binomial(members: NDArray[np.int64], nbytes: int, *, towards_root: bool) -> Iterator[Messages]:
    n = len(members)
    distances = [1 << level for level in range(math.ceil(math.log2(n)))]
    for distance in distances if towards_root else reversed(distances):
        near = np.arange(0, n - distance, 2 * distance)
        far = near + distance
        src, dst = (far, near) if towards_root else (near, far)
        yield Messages(members[src], members[dst], float(nbytes))


def _halving_doubling(op: Collective, members: NDArray[np.int64], nbytes: int) -> Iterator[Messages]:
    match op:
        case AllReduce():
            yield from _exchanges(members, nbytes)
            yield from reversed(list(_exchanges(members, nbytes)))
        case ReduceScatter():
            yield from _exchanges(members, nbytes)
        case AllGather():
            yield from reversed(list(_exchanges(members, nbytes)))
        case Reduce() | Broadcast():
            raise PlanError(f"{op_text(op)}: halving_doubling is no algorithm of a rooted collective; use ring or tree")
        case _:
            assert_never(op)


def _exchanges(members: NDArray[np.int64], nbytes: int) -> Iterator[Messages]:
    """Pairs exchange halves of what they hold: S/2 with the neighbour, S/4 at distance 2, ..."""
    places = np.arange(len(members))
    for level in range(int(math.log2(len(members)))):
        yield Messages(members, members[places ^ (1 << level)], nbytes / 2 ** (level + 1))
