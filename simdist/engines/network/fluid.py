"""Transfers in flight share resources max-min fairly, as a fluid.

A stage of a transfer needs d_r bytes on each of its resources r; b = max over r of d_r. While it flows at rate x, it
takes x d_r / b of every resource. The rates are those of `max_min_rates`: n streams on one NIC get an n-th each; pushes
converge on a server; a transfer that another resource holds back leaves its share to the others.

Between two changes of the set of transfers in flight all rates are constant, so only changes are events. A change is
felt by those who share a resource with who came or went, directly or through others: a *component*. Components do not
know of each other; an event costs the size of the component that it happens in, however many transfers fly elsewhere.
A component that somebody leaves may fall apart, so those who stay join again, like those who arrive.

A few flows are solved again at every event: schedules repeat themselves, the same stages meet in every step, and the
rates of sets that met before are remembered. Where many flows share, such as the readers of one server, sets hardly
ever meet again; `incremental` then changes the rates instead of recomputing them.

Capacities may change while transfers fly; nothing passes a resource of capacity 0, and what was in flight goes on where
it stopped. Flows without an end share like transfers until they are closed.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from heapq import heappush
from typing import TypeAlias

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import NORMAL, EventPriority

from simdist.cost.costs import Stage, Transfer
from simdist.engines.network.fair_share import Flow
from simdist.engines.network.incremental import IncrementalMaxMin
from simdist.engines.network.max_min import max_min_rates

LAST = EventPriority(2)  # SimPy runs events of one moment by priority: 0 urgent, 1 normal

Then: TypeAlias = Callable[[], object]

_TOGETHER = 1e-12  # transfers due within this share of the time to the next end end together
_NOBODY = -1
_REMEMBERED = 4096  # sets of stages
_NUMBERED = 65536  # stages, before they are renumbered
_FEW = 16  # flows whose rates are recomputed at every event
_SLACK_ULPS = 4  # a flow due within so many units in the last place of the time has ended when a capacity changes


class Timeline(simpy.Environment):
    """A SimPy environment that can be told when something happens, not in how many seconds, which would round."""

    def at(self, at_s: float, *, priority: EventPriority = NORMAL) -> simpy.Event:
        """Return an event that happens at a time, which is not before now."""
        event = simpy.Event(self)
        event._ok, event._value = True, None
        heappush(self._queue, (at_s, priority, next(self._eid), event))
        return event

    def call_at(self, at_s: float, then: Callable[[simpy.Event], None], *, priority: EventPriority = NORMAL) -> None:
        """Call a function at a time, which is not before now; its argument is an event of no interest."""
        self.at(at_s, priority=priority).callbacks.append(then)


class FluidNetwork:
    """Transfers in flight on a timeline.

    Args:
        timeline: When what happens.
        capacity_Bps: Bytes per second of every resource, `[n_resources]`; inf where unlimited.
        few: Larger components are solved incrementally.
    """

    def __init__(self, timeline: Timeline, capacity_Bps: NDArray[np.float64], *, few: int = _FEW) -> None:
        self._timeline = timeline
        self._few = few
        self._capacity_Bps = np.array(capacity_Bps, dtype=np.float64)
        self._former_Bps: dict[int, float] = {}  # of resources whose capacities are not what they were at first
        self._changing: dict[int, float] = {}  # capacities from this moment on
        self._components: dict[int, _Component] = {}
        self._component_on = [_NOBODY] * len(capacity_Bps)
        self._n_components = 0
        self._joining: list[Flow] = []
        self._left: set[int] = set()
        self._is_settling = False
        self._stages: list[Stage] = []
        self._kind_of: dict[int, int] = {}
        self._remembered = lru_cache(maxsize=_REMEMBERED)(self._fair_rates_Bps)

    def start(self, transfer: Transfer) -> simpy.Event:
        """Start a transfer now; the event happens when its last stage has ended."""
        done = self._timeline.event()
        self.fly(transfer, done.succeed)
        return done

    def fly(self, transfer: Transfer, then: Then, *, start_s: float | None = None) -> None:
        """Start a transfer at a time that is not before now, and call a function when its last stage has ended."""
        self._begin(transfer.stages, then, self._timeline.now if start_s is None else start_s)

    def set_capacity_Bps(self, resource: int, capacity_Bps: float) -> None:
        """Let a resource carry so many bytes per second from now on; who is due now ends before.

        Args:
            resource: Its index.
            capacity_Bps: At least 0; nothing passes at 0.
        """
        self._few = sys.maxsize
        self._changing[resource] = capacity_Bps
        self._settle_soon()

    def open(self, stage: Stage) -> Flow:
        """Let a flow without an end share resources, in proportion to the bytes of a stage, from now on; return it."""
        self._few = sys.maxsize
        flow = Flow(stage, _nothing)
        flow.left_nbytes = math.inf
        if flow.most_nbytes:
            self._joining.append(flow)
            self._settle_soon()
        return flow

    def close(self, flow: Flow) -> None:
        """Let a flow that was opened share no longer."""
        if not flow.most_nbytes:
            return
        if flow not in self._joining:
            component = self._components[self._component_on[flow.resources[0]]]
            self._advance(component)
            self._joining += self._dissolve(component)
            self._settle_soon()
        self._joining.remove(flow)

    def _solve_always(self) -> None:
        """Change no rates incrementally any more."""
        for component in [each for each in self._components.values() if each.incremental is not None]:
            self._end_if_due(component)
            if component.number in self._components:
                self._advance(component)
                self._joining += self._dissolve(component)

    def _begin(self, stages: tuple[Stage, ...], then: Then, start_s: float) -> None:
        """Begin the first of some stages, if one is left."""
        flow_s = start_s + stages[0].latency_s if stages else start_s
        flow = partial(self._flow, stages, then)
        if flow_s == self._timeline.now:
            flow()
        else:
            self._timeline.call_at(flow_s, flow)

    def _flow(self, stages: tuple[Stage, ...], then: Then, _: object = None) -> None:
        """Let the bytes of the first of some stages flow, and the other stages follow."""
        if not stages:
            then()
            return
        go_on = partial(self._go_on, stages[1:], then)
        flow = Flow(stages[0], go_on)
        if flow.most_nbytes:
            self._joining.append(flow)
            self._settle_soon()
        else:
            go_on()

    def _go_on(self, stages: tuple[Stage, ...], then: Then) -> None:
        self._begin(stages, then, self._timeline.now)

    def _settle_soon(self) -> None:
        """Recompute the rates when all that happens at this moment has happened."""
        if not self._is_settling:
            self._is_settling = True
            self._timeline.call_at(self._timeline.now, self._settle, priority=LAST)

    def _settle(self, _: simpy.Event) -> None:
        if self._few == sys.maxsize:
            self._solve_always()
        for resource, capacity_Bps in self._changing.items():
            self._change(resource, capacity_Bps)
        self._changing.clear()
        self._is_settling = False
        changed = self._left | {self._join(flow) for flow in self._joining}
        self._joining.clear()
        self._left.clear()
        for number in sorted(changed & self._components.keys()):
            self._set_rates(self._components[number])

    def _change(self, resource: int, capacity_Bps: float) -> None:
        """Let a resource carry so many bytes per second; those who are due now, up to rounding, have ended before."""
        if component := self._components.get(self._component_on[resource]):
            self._end_if_due(component)
        component = self._components.get(self._component_on[resource])
        if component is not None:
            self._advance(component)
            self._left.add(component.number)
        former_Bps = self._former_Bps.setdefault(resource, float(self._capacity_Bps[resource]))
        if former_Bps == capacity_Bps:
            del self._former_Bps[resource]
        self._capacity_Bps[resource] = capacity_Bps

    def _join(self, flow: Flow) -> int:
        """Take a flow into the component that it shares resources with, and make one of several; return its number."""
        touched = sorted({self._component_on[resource] for resource in flow.resources} - {_NOBODY})
        components = [self._components[number] for number in touched] or [self._new_component()]
        for component in components:
            self._advance(component)
        largest = max(components, key=lambda component: (component.incremental is not None, len(component)))
        for component in components:
            if component is not largest:
                self._take(largest, self._dissolve(component))
        self._take(largest, [flow])
        return largest.number

    def _new_component(self) -> "_Component":
        component = _Component(self._n_components, self._timeline.now)
        self._n_components += 1
        self._components[component.number] = component
        return component

    def _take(self, component: "_Component", flows: list[Flow]) -> None:
        for flow in flows:
            self._place(flow, component.number)
        if component.incremental is None:
            component.flows += flows
            return
        for flow in flows:
            component.incremental.join(flow, self._timeline.now)

    def _dissolve(self, component: "_Component") -> list[Flow]:
        """Take a component out; return those who were in it."""
        del self._components[component.number]
        if component.incremental is None:
            for flow in component.flows:
                self._place(flow, _NOBODY)
            return component.flows
        gone = component.number
        self._component_on = [_NOBODY if number == gone else number for number in self._component_on]
        return component.incremental.leave(self._timeline.now)

    def _place(self, flow: Flow, number: int) -> None:
        for resource in flow.resources:
            self._component_on[resource] = number

    def _advance(self, component: "_Component") -> None:
        """Let the bytes of a component flow until now; what was planned for later is void."""
        elapsed_s = self._timeline.now - component.settled_s
        component.settled_s = self._timeline.now
        component.n_plans += 1
        if elapsed_s:
            for flow in component.flows:
                flow.left_nbytes -= flow.rate_Bps * elapsed_s

    def _set_rates(self, component: "_Component") -> None:
        if component.incremental is None and len(component) > self._few:
            component.incremental = IncrementalMaxMin(self._capacity_Bps, self._timeline.now)
            flows, component.flows = component.flows, []
            self._take(component, flows)
        if component.incremental is None:
            next_end_s = self._timeline.now + self._find_rates(component)
        else:
            next_end_s = component.incremental.settle(self._timeline.now)
        component.next_end_s = next_end_s
        component.n_plans += 1
        if next_end_s < math.inf:
            self._timeline.call_at(next_end_s, partial(self._end, component, component.n_plans))

    def _find_rates(self, component: "_Component") -> float:
        """Set the rates of a few flows; return in how many seconds the first of them end, and remember which."""
        if len(self._stages) > _NUMBERED:
            self._forget_kinds()
        component.flows.sort(key=lambda flow: self._kind(flow.stage))  # one set to remember, whichever came first
        kinds = tuple([self._kind(flow.stage) for flow in component.flows])
        rates_Bps = self._remembered(kinds, self._unlike_before(component) if self._former_Bps else ())
        left_nbytes = np.array([flow.left_nbytes for flow in component.flows])
        ends = (rates_Bps > 0) & (left_nbytes < math.inf)
        left_s = np.divide(left_nbytes, rates_Bps, out=np.full(len(ends), math.inf), where=ends)
        next_s = max(float(left_s.min()), 0.0)
        for flow, rate_Bps in zip(component.flows, rates_Bps.tolist(), strict=True):
            flow.rate_Bps = rate_Bps
        component.is_ending = (left_s <= next_s * (1 + _TOGETHER)).tolist()
        return next_s

    def _unlike_before(self, component: "_Component") -> tuple[tuple[int, float], ...]:
        """Return the resources of a component that carry less or more than at first, and what they carry."""
        used = {resource for flow in component.flows for resource in flow.resources} & self._former_Bps.keys()
        return tuple((resource, float(self._capacity_Bps[resource])) for resource in sorted(used))

    def _kind(self, stage: Stage) -> int:
        """Return the number of a stage; stages are kept, so that no other takes its id."""
        kind = self._kind_of.setdefault(id(stage), len(self._stages))
        if kind == len(self._stages):
            self._stages.append(stage)
        return kind

    def _forget_kinds(self) -> None:
        """Renumber the stages, so that those that never come again are not kept."""
        self._stages.clear()
        self._kind_of.clear()
        self._remembered.cache_clear()

    def _fair_rates_Bps(self, kinds: tuple[int, ...], _: tuple[tuple[int, float], ...]) -> NDArray[np.float64]:
        return max_min_rates([self._stages[kind] for kind in kinds], self._capacity_Bps)

    def _end(self, component: "_Component", plan: int, _: simpy.Event) -> None:
        """End the transfers that are due, unless the rates have changed since."""
        if component.n_plans == plan:
            self._end_due(component)

    def _end_if_due(self, component: "_Component") -> None:
        """End who is due now, up to rounding."""
        if component.next_end_s <= self._timeline.now + _SLACK_ULPS * math.ulp(self._timeline.now):
            self._end_due(component)

    def _end_due(self, component: "_Component") -> None:
        self._advance(component)
        many = component.incremental
        ended = self._end_few(component) if many is None else self._end_incremental(component, many)
        for flow in ended:
            flow.then()

    def _end_few(self, component: "_Component") -> list[Flow]:
        """Those who stay join again."""
        flows = self._dissolve(component)
        staying = [flow for flow, ends in zip(flows, component.is_ending, strict=True) if not ends]
        if staying:
            self._joining += staying
            self._settle_soon()
        return [flow for flow, ends in zip(flows, component.is_ending, strict=True) if ends]

    def _end_incremental(self, component: "_Component", incremental: IncrementalMaxMin) -> list[Flow]:
        """Those who stay join again only if they are few, or have fallen apart."""
        ended = incremental.end(self._timeline.now)
        if len(incremental) <= self._few // 2 or incremental.is_apart:
            self._joining += self._dissolve(component)
        else:
            self._left.add(component.number)
        self._settle_soon()
        return ended


class _Component:
    """Flows that are joined by shared resources, with rates that hold from `settled_s` until the latest of `n_plans`.

    A few are kept in `flows`, many in `incremental`.
    """

    __slots__ = ("flows", "incremental", "is_ending", "n_plans", "next_end_s", "number", "settled_s")

    def __init__(self, number: int, settled_s: float) -> None:
        self.number = number
        self.settled_s = settled_s
        self.flows: list[Flow] = []
        self.is_ending: list[bool] = []
        self.incremental: IncrementalMaxMin | None = None
        self.n_plans = 0
        self.next_end_s = math.inf

    def __len__(self) -> int:
        return len(self.flows) if self.incremental is None else len(self.incremental)


def _nothing() -> None:
    """End as nobody waits for."""


def common_start_s(transfers: Sequence[Transfer], capacity_Bps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how long each transfer takes when all start together and no other is there, shape `[n_transfers]`."""
    timeline = Timeline()
    network = FluidNetwork(timeline, capacity_Bps)
    end_s = np.zeros(len(transfers))

    def record(index: int) -> None:
        end_s[index] = timeline.now

    for index, transfer in enumerate(transfers):
        network.fly(transfer, partial(record, index))
    timeline.run()
    return end_s
