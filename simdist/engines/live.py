"""A cluster while it is simulated: what actors change of it, and what observers hear of it.

Links are the resources that have a capacity. Transfers and flows of actors, the disturbances of a scenario and the
plan's own transfers meet on the same links and share them max-min fairly. Streams are resources of SimPy that one
operation, or one hold, has at a time, in the order in which they asked for it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import simpy

from simdist.cost.costs import Costs, Stage, Transfer
from simdist.engines.clock import Clock, Notice, Steps
from simdist.engines.network.fluid import FluidNetwork
from simdist.plan.ops import STREAMS, Stream
from simdist.plan.walk import Instance
from simdist.traces.links import LinkRecorder

State: TypeAlias = Literal["ready", "started", "ended", "held", "released", "share"]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of state.

    Args:
        time_s: When, seconds from the start of the run.
        who: A process or a link, by name: `rank 3 compute`, `AllReduce of step 2, group 0`, `nic_out[3]`.
        state: Of a rank's stream: an operation is `ready`, has `started` or `ended`, or the stream is `held` or
            `released`. Of a transfer, or an actor's flow: it has `started` or `ended`. Of a link: it has a new `share`.
        instance: The operation; None where there is none.
        share: What is left of the link's capacity.
    """

    time_s: float
    who: str
    state: State
    instance: Instance | None = None
    share: float | None = None


Observer: TypeAlias = Callable[[Change], object]


class LiveLink:
    """A link, or another resource with a capacity.

    Args:
        name: Such as `nic_out[3]`, see `Resources.name`.
        index: Its number.
        capacity_Bps: Bytes per second when nothing disturbs it.
    """

    def __init__(self, cluster: "LiveCluster", name: str, index: int, capacity_Bps: float) -> None:
        self._cluster = cluster
        self._shares: dict[object, float] = {}
        self.name, self.index, self.capacity_Bps = name, index, capacity_Bps

    @property
    def share(self) -> float:
        """What is left of the capacity, at least 0; nothing passes at 0.

        Every process sets a share of its own, which holds until it sets another, and what is left is their product.
        """
        return math.prod(self._shares.values())

    @share.setter
    def share(self, share: float) -> None:
        if not 0 <= share < math.inf:
            raise ValueError(f"share {share} of {self.name}: must be a number from 0 on")
        before = self.share
        self._shares[self._cluster.clock.active_process] = share
        if self.share != before:
            self._cluster.network.set_capacity_Bps(self.index, self.capacity_Bps * self.share)
            self._cluster.recorder.set_share(self._cluster.clock.now, self.name, self.share)
            self._cluster.tell(self.name, "share", share=self.share)


class LiveFlow:
    """A flow without an end, which shares links until it is closed; as a context, until the end of the context."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """Let it share no longer; to close it again changes nothing."""
        close, self._close = self._close, None
        if close:
            close()

    def __enter__(self) -> "LiveFlow":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class LiveRank:
    """A rank.

    Args:
        cluster: Where it is.
        rank: Its number.
    """

    cluster: "LiveCluster"
    rank: int

    def hold(self, stream: Stream, seconds: float) -> simpy.Process:
        """Occupy a stream for some seconds: from now on, or from when what has it, or waits for it already, is done.

        What is running runs on. An operation that still waits for others does not have its stream yet, a collective
        that waits for its members does. What comes after the hold is ready when the stream is free again.

        Returns:
            A process that ends with the hold.
        """
        if stream not in STREAMS:
            raise ValueError(f"stream {stream!r}: there are {', '.join(STREAMS)}")
        if not 0 <= seconds < math.inf:
            raise ValueError(f"hold of {seconds} s: must be a number of seconds from 0 on")
        return self.cluster.clock.start(f"hold of rank {self.rank} {stream}", self._hold(stream, seconds))

    def _hold(self, stream: Stream, seconds: float) -> Steps:
        cluster, who = self.cluster, f"rank {self.rank} {stream}"
        with cluster.stream(self.rank, stream).request() as turn:
            yield turn
            cluster.tell(who, "held")
            yield cluster.clock.timeout(seconds)
        cluster.tell(who, "released")


class LiveCluster:
    """A cluster while it is simulated.

    Args:
        clock: Its environment.
        costs: Resources and their capacities.
        observers: Called with every change of state, in order of time.
    """

    def __init__(self, clock: Clock, costs: Costs, observers: Sequence[Observer]) -> None:
        self.clock = clock
        self.resources = costs.resources
        self.network = FluidNetwork(clock, costs.capacity_Bps)
        self.processes: list[simpy.Process] = []
        """Streams, by rank; then actors."""
        self.recorder = LinkRecorder(costs.slow)
        """What links do besides carrying the plan's transfers."""
        self._capacity_Bps = costs.capacity_Bps
        self._observers = observers
        self._links: dict[int, LiveLink] = {}
        self._streams: dict[tuple[int, Stream], simpy.Resource] = {}
        self._indices: dict[str, int] = {}
        self._moving: dict[Notice, tuple[str, Transfer]] = {}

    def link(self, name: str) -> LiveLink:
        """Return a link by its name, such as `storage_server`.

        Raises:
            ValueError: There is none, or it is unlimited, so that nothing shares it.
        """
        return self.link_at(self._index(name))

    def link_at(self, index: int) -> LiveLink:
        """Return a link by its number.

        Raises:
            ValueError: It is unlimited, so that nothing shares it.
        """
        link = self._links.get(index)
        if link is None:
            name, capacity_Bps = self.resources.name(index), float(self._capacity_Bps[index])
            if capacity_Bps == math.inf:
                raise ValueError(f"{name} is unlimited on this cluster: nothing shares it")
            link = self._links[index] = LiveLink(self, name, index, capacity_Bps)
        return link

    def nic_out(self, node: int) -> LiveLink:
        """Return the outgoing network cards of a node."""
        return self.link(f"nic_out[{node}]")

    def nic_in(self, node: int) -> LiveLink:
        """Return the incoming network cards of a node."""
        return self.link(f"nic_in[{node}]")

    def rank(self, rank: int) -> LiveRank:
        """Return a rank."""
        if not 0 <= rank < self.resources.world_size:
            raise ValueError(f"rank {rank}: there are 0 to {self.resources.world_size - 1}")
        return LiveRank(self, rank)

    def send(self, from_node: int, to_node: int, nbytes: float) -> simpy.Event:
        """Send bytes from one node to another; the event is that they have arrived.

        They pass both nodes' network cards, and the switch where it limits. There is no latency.
        """
        return self.transfer(self.path(from_node, to_node), nbytes)

    def read(self, node: int, nbytes: float) -> simpy.Event:
        """Read bytes from storage on a node; the event is that they are there."""
        return self.transfer(self._storage("nic_in", node), nbytes)

    def write(self, node: int, nbytes: float) -> simpy.Event:
        """Write bytes from a node to storage; the event is that they are there."""
        return self.transfer(self._storage("nic_out", node), nbytes)

    def path(self, from_node: int, to_node: int) -> list[LiveLink]:
        """Return the links from one node to another, unlimited ones left out."""
        if from_node == to_node:
            raise ValueError(f"from node {from_node} to node {to_node}: no link between nodes is on the way")
        return self._limited(f"nic_out[{from_node}]", f"nic_in[{to_node}]", "switch")

    def transfer(self, links: Sequence[LiveLink], nbytes: float) -> simpy.Event:
        """Move bytes over all of some links; the event is that it is done."""
        if not 0 <= nbytes < math.inf:
            raise ValueError(f"transfer of {nbytes} bytes: must be a number from 0 on")
        stage = _stage(links, nbytes)
        return self.carry(self._doing(links), Transfer((stage,)))

    def flow(self, *links: LiveLink) -> LiveFlow:
        """Open a flow without an end over all of some links; it shares them fairly until it is closed."""
        if not links:
            raise ValueError("a flow needs a link")
        return self.open(self._doing(links), _stage(links, 1.0))

    def open(self, who: str, stage: Stage) -> LiveFlow:
        """Open a flow without an end that has a name."""
        flow = self.network.open(stage)
        self.tell(who, "started")
        self._record(stage, 1)

        def close() -> None:
            self.network.close(flow)
            self._record(stage, -1)
            self.tell(who, "ended")

        return LiveFlow(close)

    def is_limited(self, index: int) -> bool:
        """Return whether a resource has a capacity, so that transfers share it."""
        return bool(self._capacity_Bps[index] < math.inf)

    def stream(self, rank: int, stream: Stream) -> simpy.Resource:
        """Return the resource that a stream of a rank is."""
        resource = self._streams.get((rank, stream))
        if resource is None:
            resource = self._streams[rank, stream] = simpy.Resource(self.clock)
        return resource

    def carry(
        self, who: str, transfer: Transfer, *, start_s: float | None = None, instance: Instance | None = None
    ) -> Notice:
        """Let a transfer begin, now or later; the event is that it is done.

        Args:
            who: Its name.
            transfer: What it moves.
            start_s: Not before now.
            instance: The operation, for observers.
        """
        done = Notice(self.clock)
        self._moving[done] = who, transfer
        self.tell(who, "started", instance)
        for stage in () if instance else transfer.stages:
            self._record(stage, 1)
        self.network.fly(transfer, partial(self._land, done, instance), start_s=start_s)
        return done

    def _land(self, done: Notice, instance: Instance | None) -> None:
        who, transfer = self._moving.pop(done)
        self.tell(who, "ended", instance)
        for stage in () if instance else transfer.stages:
            self._record(stage, -1)
        self.clock.happen(done)
        self.clock.go_on()

    def _record(self, stage: Stage, n_flows: int) -> None:
        """Take down that flows of others begin on links, or end."""
        for resource in stage.resources.tolist():
            self.recorder.add_flows(self.clock.now, self.resources.name(resource), n_flows)

    def tell(self, who: str, state: State, instance: Instance | None = None, share: float | None = None) -> None:
        """Tell observers of a change."""
        if self._observers:
            change = Change(self.clock.now, who, state, instance, share)
            for observer in self._observers:
                observer(change)

    def stopped(self) -> list[str]:
        """Return which transfers cannot go on, and where."""
        closed = {link.index: link.name for link in self._links.values() if not link.share}
        used = {
            who: {closed[index] for stage in transfer.stages for index in stage.resources.tolist() if index in closed}
            for who, transfer in self._moving.values()
        }
        return [f"{who} waits for {', '.join(sorted(names))}, of which nothing is left" for who, names in used.items()]

    def _doing(self, links: Sequence[LiveLink]) -> str:
        """Return what a transfer is called that the process at work starts."""
        process = self.clock.active_process
        return f"{process.name if process else 'somebody'} on {', '.join(link.name for link in links)}"

    def _storage(self, nic: str, node: int) -> list[LiveLink]:
        links = self._limited(f"storage_client[{node}]", "storage_server")
        if not links:
            raise ValueError("this cluster has no storage that limits anything")
        return [*self._limited(f"{nic}[{node}]"), *links]

    def _limited(self, *names: str) -> list[LiveLink]:
        indices = (self._index(name) for name in names)
        return [self.link_at(index) for index in indices if self.is_limited(index)]

    def _index(self, name: str) -> int:
        if not self._indices:
            self._indices = {self.resources.name(index): index for index in range(self.resources.n_resources)}
        if name not in self._indices:
            kinds = dict.fromkeys(each.partition("[")[0] for each in self._indices)
            raise ValueError(
                f"link {name!r}: there is none; links are {', '.join(kinds)}, most with a number: nic_out[0]"
            )
        return self._indices[name]


def _stage(links: Sequence[LiveLink], nbytes: float) -> Stage:
    indices = sorted({link.index for link in links})
    return Stage(0.0, np.array(indices, dtype=np.int64), np.full(len(indices), float(nbytes)))
