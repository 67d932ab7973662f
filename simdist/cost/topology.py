"""Placement of ranks, their links, the load of messages on links, and calls of collectives.

A message inside a node uses the fabric ports of both GPUs. A message between nodes uses the NICs of both nodes, and the
switch if it is oversubscribed. If the GPUs of a node share one PCIe host bridge, all data that they send crosses it
upstream and all data that they receive crosses it downstream, also on the way to and from the NIC.

If GPUs have cards of their own (rails), the bytes of a node go over the cards of its GPUs that take part, in equal
parts. Messages between leaf switches also use the uplinks of both leaves, and take the latency of the spine.

If the fabric joins several nodes (an NVLink domain), messages inside the domain use it. Those between domains use the
NICs of all nodes that take part, because NCCL's channels begin at all of them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.cost.costs import Resources, Stage, Transfer
from simdist.cost.routes import LinkLoad, Routes, SendOrder, Wiring, routes_of
from simdist.plan.ops import Collective
from simdist.plan.text import op_name
from simdist.scenario.cluster import ClusterHost
from simdist.scenario.link import Link, TablePoint

_Table: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class LinkCost:
    """A link: `latency_s` until a message's first byte arrives, then `capacity_Bps`.

    With a measured table, a message of b bytes takes the interpolated time T(b), extrapolated along the last slope.
    T(b) is split into the startup T(smallest size) and the rest. The rest is expressed as the bytes that would flow for
    that long at the average rate of the table. Sharing, rounds and parallel links then treat it like any other link.

    Args:
        latency_s: Startup of a message, seconds.
        capacity_Bps: Bytes per second of all parallel links together.
        n_parallel: Number of links side by side.
        table: Measured `(nbytes, seconds)` of one link.
        tables: By collective, the table of its messages, if it has one of its own.
        send_Bps: If the receiving end is the slower one: bytes per second of one link's sending end.
        rendezvous_s: Startup besides, of a message of more than `eager_nbytes`.
        eager_nbytes: Largest message that is sent without asking.
        gap_s: Seconds from one message of a process to its next, at least. Messages that ask take two.
        ring_step_s: Seconds of each step of a ring, beside its hops and bytes.
    """

    latency_s: float
    capacity_Bps: float
    n_parallel: int = 1
    table: _Table | None = None
    send_Bps: float | None = None
    rendezvous_s: float = 0.0
    eager_nbytes: float = 0.0
    gap_s: float = 0.0
    ring_step_s: float = 0.0
    tables: tuple[tuple[str, _Table], ...] = ()

    @classmethod
    def of(cls, link: Link, *, n_parallel: int = 1) -> "LinkCost":
        """Return the cost of `n_parallel` links of a scenario in parallel."""
        if link.table is None:
            capacity_Bps = link.bandwidth_Bps * link.efficiency * n_parallel
            return cls(
                link.latency_s,
                capacity_Bps,
                n_parallel,
                rendezvous_s=link.rendezvous_s,
                eager_nbytes=float(link.eager_nbytes),
                gap_s=link.gap_s,
                ring_step_s=link.ring_step_s or 0.0,
            )
        table = _seconds(link.table)
        smallest, startup_s = table[0]
        largest, last_s = table[-1]
        average_Bps = (largest - smallest) / (last_s - startup_s) if last_s > startup_s else math.inf
        tables = tuple((key, _seconds(points)) for key, points in link.tables.items() if points is not None)
        return cls(startup_s, average_Bps * n_parallel, n_parallel, table, link.send_Bps, tables=tables)

    def of_collective(self, name: str) -> "LinkCost":
        """Return the cost of the messages of a collective: by its own table if there is one, on the same link."""
        own = dict(self.tables).get(name)
        return self if own is None else replace(self, latency_s=own[0][1], table=own)

    def startup_s(self, nbytes: float) -> float:
        """Return the startup of a message of `nbytes`."""
        return self.latency_s + (self.rendezvous_s if nbytes > self.eager_nbytes else 0.0)

    def spacing_s(self, nbytes: float) -> float:
        """Return the seconds from one message of a process to its next, at least (g of the LogGP model)."""
        return self.gap_s * (2 if 0 < self.eager_nbytes < nbytes else 1)

    def sent(self, nbytes: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bytes that messages put on the sending end of the link, see `flowing`."""
        if self.send_Bps is None or math.isinf(self.capacity_Bps):
            return self.flowing(nbytes)
        return np.asarray(nbytes, dtype=np.float64) * (self.capacity_Bps / self.n_parallel / self.send_Bps)

    def flowing(self, nbytes: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bytes that messages of `nbytes` put on the link (0 on an unlimited one), of the same shape."""
        nbytes = np.asarray(nbytes, dtype=np.float64)
        if math.isinf(self.capacity_Bps):
            return np.zeros_like(nbytes)
        if self.table is None:
            return nbytes
        return np.asarray((self._message_s(nbytes) - self.latency_s) * self.capacity_Bps / self.n_parallel)

    def _message_s(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return T(nbytes) of the table."""
        sizes, seconds = np.array(self.table, dtype=np.float64).T
        slope_s_per_byte = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        beyond_s = seconds[-1] + (nbytes - sizes[-1]) * slope_s_per_byte
        return np.asarray(np.where(nbytes <= sizes[-1], np.interp(nbytes, sizes, seconds), beyond_s))


@dataclass(frozen=True, slots=True)
class Paths:
    """Chains of dependent sends. The slowest chain counts.

    Args:
        fabric_hops: Number of sends of each path inside a node, `[n_paths]`.
        network_hops: Number of sends between nodes, of the same shape.
        far_hops: How many of these are between leaf switches, of the same shape.
    """

    fabric_hops: NDArray[np.int64]
    network_hops: NDArray[np.int64]
    far_hops: NDArray[np.int64]


_Latency: TypeAlias = SendOrder | Paths


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages that are sent at the same time, `rounds` times.

    Args:
        src: Sending ranks.
        dst: Receiving ranks, of the same shape.
        nbytes: Bytes of each message: one number, or of the same shape.
        rounds: Number of rounds, one after the other.
        latency: The latency that counts: by default that of the slowest message in every round; in a `ring`, where each
            round passes on the data of the one before, that of the longest chain of sends; on a `line` (a pipeline),
            that of all hops; or that of the slowest of some paths.
    """

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    nbytes: float | NDArray[np.float64]
    rounds: int = 1
    latency: _Latency = "slowest"


@dataclass(frozen=True, slots=True)
class HostCost:
    """CPU work of a collective. If more ranks than cores work, they take turns.

    Args:
        settings: Settings of one core.
        n_cores: Cores of a machine.
        n_ranks: Ranks that share them.
        shared: Whether all nodes are on one machine.
    """

    settings: ClusterHost
    n_cores: float
    n_ranks: int
    shared: bool

    def seconds(self, call: "Call", n_passes: float, n_rounds: int = 1) -> float:
        """Return the CPU seconds of a group's members, with this many passes of each over the whole buffer.

        Inside a node, all ranks of the machine work at the same time. Groups between nodes share links, so one works
        while another sends. Then only the members of a group share the cores.
        """
        n_ranks = self.n_ranks if call.n_nodes == 1 else call.n if self.shared else max(map(len, call.by_node()))
        of_one_s = n_rounds * self.settings.collective_s + n_passes * call.nbytes / self.settings.copy_Bps
        every = max(1.0, self.n_ranks / self.n_cores) * self.settings.handover_s
        return every + max(1.0, n_ranks / self.n_cores) * of_one_s


@dataclass(frozen=True, slots=True)
class Topology(Resources):
    """Links that join the machines, and the resources that messages use.

    Args:
        fabric: Link of a GPU to the others of its node.
        network: Link of all NICs of a machine to the switch.
        switched: Whether the switch limits the NICs.
        bridged: Whether a host bridge limits the GPUs of a node.
        overhead_s: Seconds of a collective in addition to its messages.
        host_Bps: Bytes per second that the process of a rank moves, without GPUs. Then all messages use the ports.
        host: CPU work of collectives; None if there is none.
        mesh: Whether the fabric is a link to each other GPU of a node, all of which make up a port.
        spine_s: Seconds that a message between leaf switches takes besides.
    """

    fabric: LinkCost
    network: LinkCost
    switched: bool = False
    bridged: bool = False
    overhead_s: float = 0.0
    host_Bps: float = math.inf
    host: HostCost | None = None
    mesh: bool = False
    spine_s: float = 0.0

    def of_collective(self, op: Collective) -> "Topology":
        """Return the same with the links as an operation uses them, see `LinkCost.of_collective`."""
        name = op_name(op)
        if name not in dict((*self.fabric.tables, *self.network.tables)):
            return self
        return replace(self, fabric=self.fabric.of_collective(name), network=self.network.of_collective(name))

    def transfer(self, messages: Iterable[Messages]) -> Transfer:
        """Return the transfer that sends `messages` one after the other."""
        stages = []
        for number, each in enumerate(messages):
            routes = self.routes(each)
            latency_s = slowest_s(each, routes, self.hops(each)) + (self.overhead_s if number == 0 else 0.0)
            spaced = self.spaced(Stage(latency_s, *self.load(each, routes)), each)
            stages.append(spaced.later(self.steps_s(each)))
        return Transfer(tuple(stages))

    def spaced(self, stage: Stage, messages: Messages, message_nbytes: float | None = None) -> Stage:
        """Return a stage that waits until a process has sent one message in every round, see `LinkCost.gap_s`.

        Args:
            stage: The stage of the messages.
            messages: The messages. Those inside a domain need no gap.
            message_nbytes: Bytes that a process sends at once; those of the largest message by default.
        """
        if not self.network.gap_s or not self._leaves_domains(messages):
            return stage
        largest_nbytes = float(np.max(messages.nbytes)) if message_nbytes is None else message_nbytes
        at_least_s = messages.rounds * self.network.spacing_s(largest_nbytes)
        n_ports = 2 * self.world_size
        of_port = stage.resources < n_ports
        of_card = ~of_port & (stage.resources < n_ports + 2 * self.n_machines)
        link_Bps = np.select([of_port, of_card], [self.fabric.capacity_Bps, self.network.capacity_Bps], np.inf)
        flow_s = float((stage.nbytes / link_Bps).max(initial=0.0))
        return replace(stage, latency_s=max(stage.latency_s, at_least_s - flow_s))

    def steps_s(self, messages: Messages) -> float:
        """Return the seconds of the steps of a ring between domains, beside hops and bytes; 0 of other messages.

        Only rings have several rounds, and those of two members are marked as rings.
        """
        is_ring = messages.latency == "ring" or messages.rounds > 1
        if not (is_ring and self.network.ring_step_s and self._leaves_domains(messages)):
            return 0.0
        return messages.rounds * self.network.ring_step_s

    def _leaves_domains(self, messages: Messages) -> bool:
        return bool((self.domain(messages.src) != self.domain(messages.dst)).any())

    def hops_s(self, src: NDArray[np.int64], dst: NDArray[np.int64], nbytes: float) -> NDArray[np.float64]:
        """Return the seconds of messages alone, inside a node or between nodes."""
        inside_s, outside_s = (
            link.startup_s(nbytes) + float(link.flowing(nbytes) / link.capacity_Bps)
            for link in (self.fabric, self.network)
        )
        spine_s = np.where(self.leaf(src) == self.leaf(dst), 0.0, self.spine_s)
        return np.where(self.domain(src) == self.domain(dst), inside_s, outside_s + spine_s)

    def routes(self, messages: Messages) -> Routes:
        """Return the routes of messages."""
        resources = Resources(
            self.n_nodes,
            self.ranks_per_node,
            self.n_servers,
            self.n_storage_servers,
            nodes_per_domain=self.nodes_per_domain,
            railed=self.railed,
            machines_per_leaf=self.machines_per_leaf,
            n_workers=self.n_workers,
        )
        wiring = Wiring(resources, self.switched, self.bridged, self.mesh, math.isfinite(self.host_Bps))
        return routes_of(wiring, messages.src, messages.dst)

    def load(self, messages: Messages, routes: Routes) -> LinkLoad:
        """Return the resources that messages use, each once, and the bytes on each."""
        return routes.load(
            {
                "fabric": _of_each(messages, self.fabric.flowing(messages.nbytes)),
                "sent": _of_each(messages, self.network.sent(messages.nbytes)),
                "received": _of_each(messages, self.network.flowing(messages.nbytes)),
                "plain": _of_each(messages, messages.nbytes),
            }
        )

    def hops(self, messages: Messages) -> "Hops":
        """Return the seconds of a send of the largest message until its first byte arrives."""
        largest_nbytes = float(np.max(messages.nbytes, initial=0.0))
        network_s = self.network.startup_s(largest_nbytes)
        return Hops(self.fabric.startup_s(largest_nbytes), network_s, self.spine_s)


@dataclass(frozen=True, slots=True)
class Hops:
    """Seconds of a send until its first byte arrives: inside a domain, between domains, and between leaves besides."""

    fabric_s: float
    network_s: float
    spine_s: float


def slowest_s(messages: Messages, routes: Routes, hops: Hops) -> float:
    """Return the latency of messages: the seconds of the slowest chain of sends."""
    if isinstance(messages.latency, Paths):
        paths = messages.latency
        near_s = paths.fabric_hops * hops.fabric_s + paths.network_hops * hops.network_s
        return float((near_s + paths.far_hops * hops.spine_s).max())
    chains = routes.chains(messages.latency, messages.rounds)
    return max(
        inside * hops.fabric_s + outside * hops.network_s + far * hops.spine_s for inside, outside, far in chains
    )


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that one group performs.

    Args:
        op: The collective.
        members: Ranks of the group, in its order, `[n]`.
        nbytes: Size of the whole (not of a slice), S in the formulas.
        topology: Topology with the places of the ranks.
        number: Number of the group, among those of the operation.
        sparse: Whether values and indices go in one message. They are copied into it and out of it.
    """

    op: Collective
    members: NDArray[np.int64]
    nbytes: int
    topology: Topology
    number: int = 0
    sparse: bool = False

    @property
    def n(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def n_nodes(self) -> int:
        """Number of nodes that the members are on; of domains, if the fabric joins several nodes."""
        return len(self.by_node())

    def by_node(self) -> tuple[NDArray[np.int64], ...]:
        """Return the members on each of the group's nodes, or domains, in order."""
        return _parts(self.members.tobytes(), self.topology.domain(self.members).tobytes())


@lru_cache(maxsize=64)
def _parts(numbers: bytes, marks: bytes) -> tuple[NDArray[np.int64], ...]:
    """Cut numbers where their marks change. Both are bytes of integers."""
    borders = np.flatnonzero(np.diff(np.frombuffer(marks, dtype=np.int64))) + 1
    return tuple(np.split(np.frombuffer(numbers, dtype=np.int64), borders))


def _seconds(points: Iterable[TablePoint]) -> _Table:
    return tuple((float(point.nbytes), point.time_s) for point in points)


def _of_each(messages: Messages, nbytes: float | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the bytes of each message in all rounds."""
    return np.broadcast_to(np.asarray(nbytes, dtype=np.float64) * messages.rounds, messages.src.shape)


def longest_chain_s(hop_s: NDArray[np.float64], n_sends: int) -> float:
    """Return the latency of the slowest `n_sends` successive hops of a ring."""
    times_around, rest = divmod(n_sends, len(hop_s))
    ahead = np.concatenate(([0.0], np.cumsum(np.concatenate((hop_s, hop_s[:rest])))))
    return times_around * math.fsum(hop_s) + float((ahead[rest:] - ahead[: len(ahead) - rest]).max())
