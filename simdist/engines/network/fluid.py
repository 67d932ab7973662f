"""Transfers in flight share resources max-min fairly, as a fluid.

A stage of a transfer needs d_r bytes on each of its resources r; b = max over r of d_r. While it flows at rate x, it
takes x d_r / b of every resource. No rate can grow unless a rate that is no larger shrinks. So n streams on one NIC get
1/n of it each. Pushes converge on a server. A transfer with its bottleneck elsewhere leaves its share to the others.

Between two changes of the set of transfers in flight all rates are constant, so only changes are events. A change
affects only the transfers that share a resource with the one that came or went, directly or through others: its
*component*. Components are independent. The cost of an event depends on the size of its component.

Capacities may change while transfers are in flight. Nothing passes a resource of capacity 0, and transfers resume where
they stopped. Flows without an end share like transfers until they are closed.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappush
from typing import Any, TypeAlias

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import NORMAL, EventPriority

from simdist.cost.costs import Stage, Transfer, used_by
from simdist.engines.network.flows import Flow, Flows, nothing

LAST = EventPriority(2)  # SimPy runs events of one moment by priority: 0 urgent, 1 normal

_Then: TypeAlias = Callable[[], object]

_SLACK_ULPS = 4  # when a capacity changes, a flow due within this many units in the last place of the time has ended


class Timeline(simpy.Environment):
    """A SimPy environment that schedules events at absolute times, with a network. A delay in seconds would round."""

    network: "FluidNetwork | None" = None
    """It goes on after all other events of a moment, but before those later than `LAST`."""

    def at(self, at_s: float, *, priority: EventPriority = NORMAL) -> simpy.Event:
        """Return an event that happens at a time not before now."""
        event = simpy.Event(self)
        event._ok = True
        event._value = None
        heappush(self._queue, (at_s, priority, next(self._eid), event))
        return event

    def call_at(self, at_s: float, then: Callable[[simpy.Event], None], *, priority: EventPriority = NORMAL) -> None:
        """Call a function at a time not before now. Its argument is an event that it can ignore."""
        event: Any = _Call(then)
        heappush(self._queue, (at_s, priority, next(self._eid), event))

    def set_now(self, now_s: float) -> None:
        """Set the time, which is not before now."""
        self._now = now_s

    def step(self) -> None:
        """Process the next event, or let the network go on if that comes first.

        Raises:
            EmptySchedule: There is no event left.
        """
        network = self.network
        if network is None or network.next_s == math.inf:
            super().step()
        elif not self._queue:
            network.go_on(math.inf)
        else:
            at_s, priority, _, _ = self._queue[0]
            if network.next_s < at_s:
                network.go_on(at_s)
            elif network.next_s == at_s and priority > LAST:
                network.go_on(math.nextafter(at_s, math.inf))
            else:
                super().step()


class _Call:
    """The attributes that SimPy needs of an event that only calls a function."""

    __slots__ = ("callbacks",)

    _ok = True

    def __init__(self, then: Callable[[simpy.Event], None]) -> None:
        self.callbacks = (then,)


def _call(then: _Then, _: simpy.Event) -> None:
    then()


class FluidNetwork:
    """Transfers in flight on a timeline.

    Args:
        timeline: The clock that schedules the events.
        capacity_Bps: Bytes per second of every resource, `[n_resources]`; inf where unlimited.
        flows: Of an earlier network with these capacities, when all its transfers have ended. This saves time.
    """

    def __init__(self, timeline: Timeline, capacity_Bps: NDArray[np.float64], flows: Flows | None = None) -> None:
        if timeline.network is not None:
            raise ValueError("the timeline has a network already")
        timeline.network = self
        self._timeline = timeline
        self._flows = flows or Flows(capacity_Bps.tolist())
        self._changing: dict[int, float] = {}  # new capacities of resources from this moment on
        self.next_s = math.inf
        """When the network goes on next."""

    def start(self, transfer: Transfer) -> simpy.Event:
        """Start a transfer now. The event happens when its last stage has ended."""
        done = self._timeline.event()
        self.fly(transfer, done.succeed)
        return done

    def fly(self, transfer: Transfer, then: _Then, *, start_s: float | None = None) -> None:
        """Start a transfer at a time not before now. Call a function when its last stage has ended."""
        self._begin(transfer.stages, then, self._timeline.now if start_s is None else start_s)

    def set_capacity_Bps(self, resource: int, capacity_Bps: float) -> None:
        """Set the bytes per second of a resource from now on. Transfers due now end first.

        Args:
            resource: Its index.
            capacity_Bps: At least 0; nothing passes at 0.
        """
        self._changing[resource] = capacity_Bps
        self.next_s = self._timeline.now

    def open(self, stage: Stage) -> Flow:
        """Open a flow without an end and return it. It shares resources in proportion to the bytes of a stage."""
        flow = Flow(stage, nothing, math.inf)
        if self._flows.join(flow, self._timeline.now):
            self.next_s = self._timeline.now
        return flow

    def close(self, flow: Flow) -> None:
        """Close an open flow: it shares no longer."""
        use = self._flows.use(flow.stage)
        if use.most_nbytes:
            self._end_due(int(use.resources[0]))
            self._flows.take_out(flow, self._timeline.now)
            self.next_s = self._timeline.now

    def go_on(self, until_s: float) -> None:
        """Go on to the next end of transfers, but not up to a later time."""
        if self._changing and self._change_capacities():
            return  # what goes on then comes before rates are found
        ended = self._flows.advance(self._timeline.now, until_s)
        self.next_s = self._flows.next_s
        if ended:
            self._timeline.set_now(self.next_s)
            for flow in ended:
                flow.then()

    def _change_capacities(self) -> bool:
        """Set new capacities. Return whether transfers were due and have ended before."""
        changing = self._changing
        self._changing = {}
        has_ended = False
        for resource, capacity_Bps in changing.items():
            has_ended |= self._end_due(resource)
            self._flows.change_capacity(resource, capacity_Bps, self._timeline.now)
        return has_ended

    def _begin(self, stages: tuple[Stage, ...], then: _Then, start_s: float) -> None:
        """Begin the first of the stages, and let the others follow."""
        flow_s = start_s
        if stages:
            flow_s += stages[0].latency_s
            if len(stages) > 1:
                then = partial(self._go_on, stages[1:], then)
            if self._flows.join(Flow(stages[0], then), flow_s):
                if flow_s < self.next_s:
                    self.next_s = flow_s
                return
        if flow_s == self._timeline.now:
            then()
        else:
            self._timeline.call_at(flow_s, partial(_call, then))

    def _go_on(self, stages: tuple[Stage, ...], then: _Then) -> None:
        self._begin(stages, then, self._timeline.now)

    def _end_due(self, resource: int) -> bool:
        """End the transfers on a resource that are due now, up to rounding. Return whether there are any."""
        now_s = self._timeline.now
        ended = self._flows.end_due(resource, now_s, now_s + _SLACK_ULPS * math.ulp(now_s))
        for flow in ended:
            flow.then()
        return bool(ended)


def common_start_s(transfers: Sequence[Transfer], capacity_Bps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how long each transfer takes if all start together and no other is in flight, `[n_transfers]`."""
    together_s = _together_s(transfers, capacity_Bps)
    if together_s is not None:
        return np.full(len(transfers), together_s)
    timeline = Timeline()
    network = FluidNetwork(timeline, capacity_Bps)
    end_s = np.zeros(len(transfers))

    def record(index: int) -> None:
        end_s[index] = timeline.now

    for index, transfer in enumerate(transfers):
        network.fly(transfer, partial(record, index))
    timeline.run()
    return end_s


def _together_s(transfers: Sequence[Transfer], capacity_Bps: NDArray[np.float64]) -> float | None:
    """Return how long transfers take that end every stage together; None if they do not.

    Suppose that all have the same bytes on their busiest resource, and that the resource that takes longest for the
    bytes of all takes equally long for every transfer. Then equal rates are max-min fair: each transfer has a full
    resource on which none has a larger rate.
    """
    stages = list(used_by(transfers))
    together_s = 0.0
    for at in range(1 + max((each[1] for each in stages), default=-1)):
        of_stage = [(groups, stage, used) for groups, place, stage, used in stages if place == at]
        if sum(len(groups) for groups, _, _ in of_stage) != len(transfers):
            return None
        load = np.zeros(len(capacity_Bps))
        for _, stage, used in of_stage:
            np.add.at(load, used, np.broadcast_to(stage.nbytes, used.shape))
        with np.errstate(divide="ignore", invalid="ignore"):
            flow_s = load / capacity_Bps
        ends_s: set[float] = set()
        most: set[float] = set()
        for _, stage, used in of_stage:
            most.add(float(stage.nbytes.max(initial=0.0)))
            ends_s.update((stage.latency_s + flow_s[used].max(axis=1, initial=0.0)).tolist())
        end_s = ends_s.pop()
        if ends_s or len(most) > 1 or not math.isfinite(end_s) or len({each.latency_s for _, each, _ in of_stage}) > 1:
            return None
        together_s += end_s
    return together_s
