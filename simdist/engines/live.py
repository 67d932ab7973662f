"""A cluster during a simulation: the part that actors change and observers watch.

Links are the resources that have a capacity. Transfers and flows of actors, the disturbances of a scenario and the
plan's own transfers meet on the same links and share them max-min fairly. Streams are SimPy resources. One operation,
or one hold, has a stream at a time, in the order of their requests.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from operator import index
from typing import Literal, TypeAlias

import numpy as np
import simpy

from simdist.cost.costs import Costs, Stage, Transfer
from simdist.engines.clock import Clock, Notice, Steps
from simdist.engines.network.fluid import FluidNetwork
from simdist.errors import RunError
from simdist.plan.lanes import Lane
from simdist.plan.walk import Instance
from simdist.traces.links import LinkRecorder

_State: TypeAlias = Literal["ready", "started", "ended", "held", "released", "share"]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of state.

    Args:
        time_s: When, seconds from the start of the run.
        who: A process or a link, by name: `rank 3 compute`, `AllReduce of step 2, group 0`, `nic_out[3]`.
        state: Of a rank's stream: an operation is `ready`, has `started` or `ended`, or the stream is `held` or
            `released`. Of a transfer, or an actor's flow: it has `started` or `ended`. Of a link: it has a new `share`.
        instance: The operation. None if the change does not belong to one.
        share: Share of the link's capacity that is left.
    """

    time_s: float
    who: str
    state: _State
    instance: Instance | None = None
    share: float | None = None


ChangeListener: TypeAlias = Callable[[Change], object]


class LiveLink:
    """A link, or another resource with a capacity.

    Args:
        name: Such as `nic_out[3]`, see `Resources.name`.
        index: Its number.
        capacity_Bps: Bytes per second when nothing disturbs it.
    """

    __slots__ = ("_cluster", "_shares", "capacity_Bps", "index", "name")

    def __init__(self, cluster: "LiveCluster", name: str, index: int, capacity_Bps: float) -> None:
        self._cluster = cluster
        self._shares: dict[object, float] = {}
        self.name = name
        self.index = index
        self.capacity_Bps = capacity_Bps

    @property
    def share(self) -> float:
        """Share of the capacity that is left, from 0 to 1. At 0 nothing passes.

        Every process sets a share of its own, which holds until it sets another. What is left is their product.
        """
        return math.prod(self._shares.values())

    @share.setter
    def share(self, share: float) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"share {share} of {self.name}: must be from 0 to 1")
        before = self.share
        self._shares[self._cluster.clock.active_process] = share
        if self.share != before:
            self._cluster.network.set_capacity_Bps(self.index, self.capacity_Bps * self.share)
            self._cluster.recorder.set_share(self._cluster.clock.now, self.name, self.share)
            self._cluster.tell(self.name, "share", share=self.share)


@dataclass(frozen=True, slots=True)
class LiveRank:
    """A rank."""

    cluster: "LiveCluster"
    rank: int

    def hold(self, lane: str, seconds: float) -> simpy.Process:
        """Occupy a lane for some seconds, after everything that has the lane now or already waits for it.

        Running operations are not interrupted. An operation that still waits for its dependencies does not have its
        lane yet. A collective that waits for its members does. Later operations are ready after it.

        Args:
            lane: Name of a lane of the plan, such as `compute` or `comm`.
            seconds: How long.

        Returns:
            A process that ends with the hold.
        """
        known = [each.name for each in self.cluster.lanes]
        if lane not in known:
            raise ValueError(f"lane {lane!r}: there are {', '.join(known)}")
        if not 0 <= seconds < math.inf:
            raise ValueError(f"hold of {seconds} s: must be a number of seconds from 0 on")
        return self.cluster.clock.start(f"hold of rank {self.rank} {lane}", self._hold(lane, seconds))

    def _hold(self, lane: str, seconds: float) -> Steps:
        cluster = self.cluster
        who = f"rank {self.rank} {lane}"
        with cluster.lane_turns[self.rank, lane].request() as turn:
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
        lanes: Lanes of the plan.
        is_live: Whether there are actors or observers.
    """

    def __init__(
        self, clock: Clock, costs: Costs, observers: Sequence[ChangeListener], lanes: Sequence[Lane], *, is_live: bool
    ) -> None:
        self.clock = clock
        self.lanes = lanes
        self.is_live = is_live
        self.network = FluidNetwork(clock, costs.capacity_Bps)
        self.processes: list[simpy.Process] = []
        """Streams, by rank; then actors."""
        self.recorder = LinkRecorder(costs.slow)
        """What links do besides carrying the plan's transfers."""
        self.lane_turns: defaultdict[tuple[int, str], simpy.Resource] = defaultdict(partial(simpy.Resource, clock))
        """Turns on each lane of each rank, by rank and name of the lane."""
        self._costs = costs
        self._observers = observers
        self._moving: dict[Notice, tuple[str, Transfer]] = {}

    @cached_property
    def links(self) -> dict[int, LiveLink]:
        """Links by number, without unlimited ones, which no transfer has to share."""
        name = self._costs.resources.name
        limits_Bps = self._costs.capacity_Bps.tolist()
        return {n: LiveLink(self, name(n), n, limit) for n, limit in enumerate(limits_Bps) if limit < math.inf}

    @cached_property
    def _link_of(self) -> dict[str, LiveLink]:
        return {link.name: link for link in self.links.values()}

    def link(self, name: str) -> LiveLink:
        """Return a link by its name, such as `storage_server`.

        Raises:
            ValueError: There is none, or it is unlimited, so no transfer has to share it.
        """
        if name not in self._link_of:
            kinds = dict.fromkeys(each.partition("[")[0] for each in self._link_of)
            raise ValueError(f"link {name!r}: no such link limits anything here; those that do: {', '.join(kinds)}")
        return self._link_of[name]

    def nic_out(self, node: int) -> LiveLink:
        """Return the outgoing network cards of a node."""
        return self.link(f"nic_out[{node}]")

    def nic_in(self, node: int) -> LiveLink:
        """Return the incoming network cards of a node."""
        return self.link(f"nic_in[{node}]")

    def rank(self, rank: int) -> LiveRank:
        """Return a rank."""
        return LiveRank(self, _checked("rank", rank, self._costs.resources.world_size))

    def send(self, from_node: int, to_node: int, nbytes: float) -> simpy.Event:
        """Send bytes from one node to another. The event happens when they have arrived.

        They pass both nodes' network cards, and the switch if it has a limit. There is no latency.
        """
        return self.transfer(self.path(from_node, to_node), nbytes)

    def read(self, node: int, nbytes: float) -> simpy.Event:
        """Read bytes from storage on a node. The event happens when they have arrived."""
        return self.transfer(self._storage("nic_in", node), nbytes)

    def write(self, node: int, nbytes: float) -> simpy.Event:
        """Write bytes from a node to storage. The event happens when they have arrived."""
        return self.transfer(self._storage("nic_out", node), nbytes)

    def path(self, from_node: int, to_node: int) -> list[LiveLink]:
        """Return the links from one node to another, without unlimited ones."""
        if from_node == to_node:
            raise ValueError(f"from node {from_node} to node {to_node}: no link between nodes is on the way")
        nodes = [_checked("node", node, self._costs.resources.n_machines) for node in (from_node, to_node)]
        return self._limited(f"nic_out[{nodes[0]}]", f"nic_in[{nodes[1]}]", "switch")

    def transfer(self, links: Sequence[LiveLink], nbytes: float) -> simpy.Event:
        """Move bytes over all of the links. The event happens when this is done."""
        if not 0 <= nbytes < math.inf:
            raise ValueError(f"transfer of {nbytes} bytes: must be a number from 0 on")
        return self.carry(self._doing(links), Transfer((_stage(links, nbytes),)))

    def flow(self, *links: LiveLink) -> ExitStack:
        """Open a flow over all of the links. It shares them fairly until `close()` or the end of a `with` block."""
        if not links:
            raise ValueError("a flow needs a link")
        return self.open(self._doing(links), _stage(links, 1.0))

    def open(self, who: str, stage: Stage) -> ExitStack:
        """Open a named flow without an end."""
        flow = self.network.open(stage)
        self.tell(who, "started")
        self._record(stage, 1)
        closing = ExitStack()
        closing.callback(self.tell, who, "ended")
        closing.callback(self._record, stage, -1)
        closing.callback(self.network.close, flow)
        return closing

    def carry(
        self, who: str, transfer: Transfer, *, start_s: float | None = None, instance: Instance | None = None
    ) -> Notice:
        """Start a transfer, now or later. The event happens when it is done.

        Args:
            who: Name of the transfer.
            transfer: The transfer.
            start_s: When it begins, not before now. Now if left out.
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
        """Record that flows of others begin or end on links."""
        for resource in stage.resources.tolist():
            self.recorder.add_flows(self.clock.now, self._costs.resources.name(resource), n_flows)

    def tell(self, who: str, state: _State, instance: Instance | None = None, share: float | None = None) -> None:
        """Tell observers of a change."""
        if self._observers:
            change = Change(self.clock.now, who, state, instance, share)
            for observer in self._observers:
                try:
                    observer(change)
                except Exception as error:
                    raise RunError(f"observer {observer!r} failed at {change}: {error!r}") from error

    def stopped(self) -> list[str]:
        """Return the transfers that cannot go on, and the closed links of each."""
        closed = {number: link.name for number, link in self.links.items() if not link.share}
        used = {
            who: {closed[each] for stage in transfer.stages for each in stage.resources.tolist() if each in closed}
            for who, transfer in self._moving.values()
        }
        return [f"{who} waits for {', '.join(sorted(names))}, of which nothing is left" for who, names in used.items()]

    def _doing(self, links: Sequence[LiveLink]) -> str:
        """Return the name of a transfer that the running process starts."""
        process = self.clock.active_process
        return f"{process.name if process else 'somebody'} on {', '.join(link.name for link in links)}"

    def _storage(self, nic: str, node: int) -> list[LiveLink]:
        _checked("node", node, self._costs.resources.n_nodes)
        resources = self._costs.resources
        server = resources.name(int(resources.storage_server(np.array(node))))
        links = self._limited(f"storage_client[{node}]", server)
        if not links:
            raise ValueError("this cluster has no storage that limits anything")
        return [*self._limited(f"{nic}[{node}]"), *links]

    def _limited(self, *names: str) -> list[LiveLink]:
        return [self._link_of[name] for name in names if name in self._link_of]


def _checked(what: str, number: int, n: int) -> int:
    if not 0 <= index(number) < n:
        raise ValueError(f"{what} {number}: there are 0 to {n - 1}")
    return number


def _stage(links: Sequence[LiveLink], nbytes: float) -> Stage:
    indices = sorted({link.index for link in links})
    return Stage(0.0, np.array(indices, dtype=np.int64), np.full(len(indices), float(nbytes)))
