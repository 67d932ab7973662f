"""Transfers in flight share resources max-min fairly, as a fluid.

A stage of a transfer needs d_r bytes on each of its resources r; b = max over r of d_r. While it flows at rate x, it
takes x d_r / b of every resource. No rate can grow unless one that is no larger shrinks: n streams on one NIC get an
n-th each; pushes converge on a server; a transfer that another resource holds back leaves its share to the others.

Between two changes of the set of transfers in flight all rates are constant, so only changes are events. A change is
felt by those who share a resource with who came or went, directly or through others: a *component*. Components do not
know of each other; an event costs the size of the component that it happens in, however many transfers fly elsewhere.
A component that somebody leaves may fall apart, so those who stay join again, like those who arrive.

A few flows are solved again at every event: schedules repeat themselves, the same stages meet in every step, and on
alike nodes alike ones. The rates of sets that met before are remembered, and whether those who stay have anything in
common. Where many flows share, sets hardly ever meet again; `flows` keeps their state in arrays, and a compiled kernel
fills them anew.

Capacities may change while transfers fly; nothing passes a resource of capacity 0, and what was in flight goes on where
it stopped. Flows without an end share like transfers until they are closed.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappush
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import NORMAL, EventPriority

from simdist.cost.costs import Stage, Transfer
from simdist.engines.network.flows import Flow, Kernel, ManyFlows, nothing

LAST = EventPriority(2)  # SimPy runs events of one moment by priority: 0 urgent, 1 normal

Then: TypeAlias = Callable[[], object]
_Kinds: TypeAlias = tuple[int, ...]
_Parts: TypeAlias = tuple[list[int], list[int], bool]
_Form: TypeAlias = tuple[tuple[int, ...], bytes, tuple[float, ...], tuple[int, ...]]

_TOGETHER = 1e-12  # transfers due within this share of the time to the next end end together
_REMEMBERED = 4096  # sets of stages
_NUMBERED = 65536  # stages, before they are renumbered
_FEW = 16  # flows whose rates are looked up
# After this many, and this many for each that is left, many flows may have fallen apart.
_JOINED = 64
_JOINED_EACH = 16
_SLACK_ULPS = 4  # a flow due within so many units in the last place of the time has ended when a capacity changes


class Timeline(simpy.Environment):
    """A SimPy environment that can be told when something happens, not in how many seconds, which would round."""

    def at(self, at_s: float, *, priority: EventPriority = NORMAL) -> simpy.Event:
        """Return an event that happens at a time, which is not before now."""
        event = simpy.Event(self)
        event._ok = True
        event._value = None
        heappush(self._queue, (at_s, priority, next(self._eid), event))
        return event

    def call_at(self, at_s: float, then: Callable[[simpy.Event], None], *, priority: EventPriority = NORMAL) -> None:
        """Call a function at a time, which is not before now; its argument is an event of no interest."""
        event: Any = _Call(then)
        heappush(self._queue, (at_s, priority, next(self._eid), event))

    def is_last(self) -> bool:
        """Return whether nothing else is to happen at this moment."""
        return not self._queue or self._queue[0][0] > self._now


class _Call:
    """What SimPy needs to know of an event that only calls a function."""

    __slots__ = ("callbacks",)

    _ok = True

    def __init__(self, then: Callable[[simpy.Event], None]) -> None:
        self.callbacks = (then,)


class FluidNetwork:
    """Transfers in flight on a timeline.

    Args:
        timeline: When what happens.
        capacity_Bps: Bytes per second of every resource, `[n_resources]`; inf where unlimited.
        few: Components of so many flows are looked up.
    """

    def __init__(self, timeline: Timeline, capacity_Bps: NDArray[np.float64], *, few: int = _FEW) -> None:
        self._timeline = timeline
        self._few = few
        self._capacity_Bps: list[float] = capacity_Bps.tolist()
        self._changing: dict[int, float] = {}  # capacities from this moment on
        self._component_on: list[_Component | None] = [None] * len(capacity_Bps)
        self._n_components = 0
        self._joining: list[Flow | _Component] = []
        self._is_settling = False
        self._kernel = Kernel()
        self._solver: ManyFlows | None = None  # of few flows, at the capacities as they are
        self._kind_of: dict[int, tuple[int, Stage]] = {}  # by id; stages are kept, so that no other takes it
        self._first_kind = 0
        self._rates_Bps: dict[_Kinds, list[float]] = {}  # while capacities are what they are
        self._rates_of_form_Bps: dict[_Form, list[float]] = {}
        self._parts: dict[tuple[_Kinds, _Kinds], _Parts] = {}

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
        self._changing[resource] = capacity_Bps
        self._settle_soon()

    def open(self, stage: Stage) -> Flow:
        """Let a flow without an end share resources, in proportion to the bytes of a stage, from now on; return it."""
        flow = Flow(stage, nothing)
        flow.left_nbytes = math.inf
        if flow.most_nbytes:
            self._joining.append(flow)
            self._settle_soon()
        return flow

    def close(self, flow: Flow) -> None:
        """Let a flow that was opened share no longer."""
        if not flow.most_nbytes:
            return
        component = self._without_due(flow.resources[0])
        if component is None or flow in self._joining:
            self._joining.remove(flow)
            return
        self._advance(component)
        if component.many is not None:
            component.many.take_out(flow)
            self._stay(component, component.many)
        else:
            self._joining += [each for each in self._dissolve(component) if each is not flow]
        self._settle_soon()

    def _begin(self, stages: tuple[Stage, ...], then: Then, start_s: float) -> None:
        """Begin the first of some stages, if one is left."""
        flow_s = start_s + stages[0].latency_s if stages else start_s
        if flow_s == self._timeline.now:
            self._flow(stages, then)
        else:
            self._timeline.call_at(flow_s, partial(self._flow_now, stages, then))

    def _flow_now(self, stages: tuple[Stage, ...], then: Then, _: simpy.Event) -> None:
        is_settling = self._is_settling
        self._is_settling = True
        self._flow(stages, then)
        if not is_settling:
            self._settle_now()

    def _flow(self, stages: tuple[Stage, ...], then: Then) -> None:
        """Let the bytes of the first of some stages flow, and the other stages follow."""
        if not stages:
            then()
            return
        go_on = partial(self._go_on, stages[1:], then) if len(stages) > 1 else then
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

    def _settle_now(self) -> None:
        """Recompute the rates where there is something new, without an event if nothing else happens at this moment."""
        self._is_settling = False
        if self._joining or self._changing:
            if self._timeline.is_last():
                self._settle()
            else:
                self._settle_soon()

    def _settle(self, _: simpy.Event | None = None) -> None:
        changed: list[_Component] = []
        for resource, capacity_Bps in self._changing.items():
            changed += self._change(resource, capacity_Bps)
        self._changing.clear()
        self._is_settling = False
        for each in self._joining:
            component = self._join(each) if isinstance(each, Flow) else each
            if component.number is None:
                component.number = self._n_components
                self._n_components += 1
            changed.append(component)
        self._joining.clear()
        if len(changed) > 1:
            changed = sorted({each for each in changed if not each.is_gone}, key=_number)
        for component in changed:
            if not component.is_gone:
                self._set_rates(component)

    def _change(self, resource: int, capacity_Bps: float) -> "list[_Component]":
        """Let a resource carry so many bytes per second; those who are due now, up to rounding, have ended before."""
        component = self._without_due(resource)
        before_Bps = self._capacity_Bps[resource]
        self._capacity_Bps[resource] = capacity_Bps
        self._rates_Bps.clear()
        self._solver = None
        if component is None:
            return []
        self._advance(component)
        if component.many is None:
            return [component]
        if math.inf in (before_Bps, capacity_Bps):
            self._joining += self._dissolve(component)
            return []
        component.many.change_capacity(resource, capacity_Bps)
        return [component]

    def _without_due(self, resource: int) -> "_Component | None":
        """Return the component on a resource, of which those have ended who are due now."""
        component = self._component_on[resource]
        slack_s = _SLACK_ULPS * math.ulp(self._timeline.now)
        if component is not None and component.next_end_s <= self._timeline.now + slack_s:
            self._end_due(component)
        return self._component_on[resource]

    def _join(self, flow: Flow) -> "_Component":
        """Take a flow into the component that it shares resources with, and make one of several; return it."""
        found = dict.fromkeys(map(self._component_on.__getitem__, flow.resources))
        components = [each for each in found if each is not None]
        for component in components:
            self._advance(component)
        if not components:
            component = _Component(self._timeline.now)
        elif len(components) == 1:
            component = components[0]
        else:
            component = max(sorted(components, key=_number), key=lambda each: (each.many is not None, len(each)))
            for other in components:
                if other is not component:
                    self._take(component, self._dissolve(other))
        self._take(component, [flow])
        return component

    def _take(self, component: "_Component", flows: list[Flow]) -> None:
        for flow in flows:
            for resource in flow.resources:
                self._component_on[resource] = component
            if component.many is not None:
                component.many.join(flow)
        if component.many is None:
            component.flows += flows
            component.kinds = ()

    def _dissolve(self, component: "_Component") -> list[Flow]:
        """Take a component out; return those who were in it."""
        component.is_gone = True
        if component.many is not None:
            self._component_on = [None if each is component else each for each in self._component_on]
            return component.many.leave(self._timeline.now)
        for flow in component.flows:
            for resource in flow.resources:
                self._component_on[resource] = None
        return component.flows

    def _advance(self, component: "_Component") -> None:
        """Let the bytes of a component flow until now; what was planned for later is void."""
        elapsed_s = self._timeline.now - component.settled_s
        component.settled_s = self._timeline.now
        component.n_plans += 1
        if elapsed_s:
            for flow in component.flows:
                flow.left_nbytes -= flow.rate_Bps * elapsed_s

    def _set_rates(self, component: "_Component") -> None:
        if component.many is None and len(component.flows) > self._few:
            component.many = ManyFlows(self._capacity_Bps, self._timeline.now, self._kernel)
            for flow in component.flows:
                component.many.join(flow)
            component.flows = []
        if component.many is None:
            component.next_end_s = self._timeline.now + self._find_rates(component)
        else:
            component.next_end_s = component.many.settle(self._timeline.now)
        component.n_plans += 1
        if component.next_end_s < math.inf:
            self._timeline.call_at(component.next_end_s, partial(self._end, component, component.n_plans))

    def _find_rates(self, component: "_Component") -> float:
        """Set the rates of a few flows; return in how many seconds the first of them end."""
        if not component.kinds:
            self._sort(component)
        left_s = []
        for flow, rate_Bps in zip(component.flows, self._fair_rates_Bps(component), strict=True):
            flow.rate_Bps = rate_Bps
            left_nbytes = flow.left_nbytes
            left_s.append(left_nbytes / rate_Bps if rate_Bps > 0 and left_nbytes < math.inf else math.inf)
        component.left_s = left_s
        return max(min(left_s), 0.0)

    def _sort(self, component: "_Component") -> None:
        """Sort a few flows by their stages: one set to remember, whichever came first."""
        if len(self._kind_of) > _NUMBERED:
            self._forget_kinds()
        for flow in component.flows:
            if flow.kind < self._first_kind:
                kind = self._first_kind + len(self._kind_of)
                flow.kind, _ = self._kind_of.setdefault(id(flow.stage), (kind, flow.stage))
        component.flows.sort(key=_kind)
        component.kinds = tuple([flow.kind for flow in component.flows])

    def _forget_kinds(self) -> None:
        """Renumber the stages, so that those that never come again are not kept."""
        self._first_kind += len(self._kind_of)
        self._kind_of.clear()
        self._rates_Bps.clear()
        self._parts.clear()

    def _fair_rates_Bps(self, component: "_Component") -> list[float]:
        rates_Bps = self._rates_Bps.get(component.kinds)
        if rates_Bps is None:
            form = _form(component.flows, self._capacity_Bps)
            rates_Bps = self._rates_of_form_Bps.get(form)
            if rates_Bps is None:
                _make_room(self._rates_of_form_Bps)
                if self._solver is None:
                    self._solver = ManyFlows(self._capacity_Bps, 0.0, self._kernel)
                rates_Bps = self._solver.solve(component.flows)
                self._rates_of_form_Bps[form] = rates_Bps
            _make_room(self._rates_Bps)
            self._rates_Bps[component.kinds] = rates_Bps
        return rates_Bps

    def _after_end(self, component: "_Component", ending: tuple[int, ...]) -> _Parts:
        key = component.kinds, ending
        parts = self._parts.get(key)
        if parts is None:
            _make_room(self._parts)
            parts = self._parts[key] = _fall_apart(component.flows, ending)
        return parts

    def _end(self, component: "_Component", plan: int, _: simpy.Event) -> None:
        """End the transfers that are due, unless the rates have changed since."""
        if component.n_plans == plan:
            is_settling = self._is_settling
            self._is_settling = True
            self._end_due(component)
            if not is_settling:
                self._settle_now()

    def _end_due(self, component: "_Component") -> None:
        self._advance(component)
        component.next_end_s = math.inf
        if component.many is not None:
            ended = component.many.end()
            self._stay(component, component.many)
        else:
            ended = self._end_few(component)
        if self._joining:
            self._settle_soon()
        for flow in ended:
            flow.then()

    def _end_few(self, component: "_Component") -> list[Flow]:
        """Those who stay join again, unless they are a component as they stand."""
        flows = component.flows
        left_s = component.left_s
        latest_s = max(min(left_s), 0.0) * (1 + _TOGETHER)
        ending = tuple([at for at, each_s in enumerate(left_s) if each_s <= latest_s])
        staying, freed, is_connected = self._after_end(component, ending)
        if is_connected:
            component.flows = [flows[at] for at in staying]
            component.kinds = tuple([component.kinds[at] for at in staying])
            for resource in freed:
                self._component_on[resource] = None
            component.number = None  # as if it were a new one
            self._joining.append(component)
        else:
            self._dissolve(component)
            self._joining += [flows[at] for at in staying]
        return [flows[at] for at in ending]

    def _stay(self, component: "_Component", many: ManyFlows) -> None:
        """Those who stay join again only if they are few, or may have fallen apart."""
        n_staying = many.n_staying()
        if n_staying <= self._few // 2 or many.n_joined > _JOINED + _JOINED_EACH * n_staying:
            self._joining += self._dissolve(component)
        else:
            self._joining.append(component)


class _Component:
    """Flows that are joined by shared resources, with rates that hold from `settled_s` until the latest of `n_plans`.

    A few are kept in `flows`, which end after `left_s`; `kinds` are the numbers of their stages, if known. Many are in
    `many`. A new one gets its number when rates are set.
    """

    __slots__ = ("flows", "is_gone", "kinds", "left_s", "many", "n_plans", "next_end_s", "number", "settled_s")

    def __init__(self, settled_s: float) -> None:
        self.number: int | None = None
        self.settled_s = settled_s
        self.flows: list[Flow] = []
        self.kinds: _Kinds = ()
        self.left_s: list[float] = []
        self.many: ManyFlows | None = None
        self.n_plans = 0
        self.next_end_s = math.inf
        self.is_gone = False

    def __len__(self) -> int:
        return len(self.flows) if self.many is None else len(self.many)


_kind = attrgetter("kind")


def _make_room(remembered: dict[Any, Any]) -> None:
    if len(remembered) >= _REMEMBERED:
        remembered.clear()


def _form(flows: Sequence[Flow], capacity_Bps: Sequence[float]) -> _Form:
    """Return what the rates of flows depend on, whichever their resources are: alike nodes have the same."""
    numbers: dict[int, int] = {}
    used = tuple([numbers.setdefault(resource, len(numbers)) for flow in flows for resource in flow.resources])
    put = b"".join([flow.stage.nbytes.tobytes() for flow in flows])
    return used, put, tuple([capacity_Bps[each] for each in numbers]), tuple([len(flow.resources) for flow in flows])


def _fall_apart(flows: Sequence[Flow], ending: Sequence[int]) -> _Parts:
    """Return who stays when some end, which resources nobody uses then, and whether those who stay are connected."""
    used = [set(flow.resources) for flow in flows]
    staying = [at for at in range(len(flows)) if at not in ending]
    kept = set[int]().union(*(used[at] for at in staying))
    freed = set[int]().union(*(used[at] for at in ending)) - kept
    reached = used[staying[0]] if staying else set()
    waiting = staying[1:]
    while near := [at for at in waiting if not used[at].isdisjoint(reached)]:
        reached = reached.union(*(used[at] for at in near))
        waiting = [at for at in waiting if at not in near]
    return staying, sorted(freed), bool(staying) and not waiting


def _number(component: _Component) -> float:
    return math.inf if component.number is None else component.number


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
