"""Transfers in flight share resources max-min fairly, as a fluid.

A stage of a transfer needs d_r bytes on each of its resources r; b = max over r of d_r. While it flows at rate x, it
takes x d_r / b of every resource. The rates are those of `fairness`: n streams on one NIC get an n-th each; pushes
converge on a server; a transfer that another resource holds back leaves its share to the others.

Between two changes of the set of transfers in flight all rates are constant, so only changes are events. A change is
felt by those who share a resource with who came or went, directly or through others: a *component*. Components do not
know of each other; an event costs the size of the component that it happens in, however many transfers fly elsewhere.
A component that somebody leaves may fall apart, so those who stay join anew, like those who arrive.

Schedules repeat themselves: the same stages meet in every step. The rates of small components are remembered.
"""

from collections.abc import Generator, Sequence
from functools import lru_cache, partial

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import EventPriority

from simdist.cost import Stage, Transfer
from simdist.engines.fairness import max_min_rates

__all__ = ["FluidNetwork", "common_start_s"]

_LAST = EventPriority(2)  # SimPy runs events of one moment by priority: 0 urgent, 1 normal
_TOGETHER = 1e-12  # transfers due within this share of the time to the next end end together
_NOBODY = -1
_REMEMBERED = 4096  # sets of stages
_SMALL = 64  # stages; larger sets seldom meet again


class FluidNetwork:
    """Transfers in flight inside a SimPy environment.

    Args:
        env: The environment.
        capacity_Bps: Bytes per second of every resource, `[n_resources]`; inf where unlimited.
    """

    def __init__(self, env: simpy.Environment, capacity_Bps: NDArray[np.float64]) -> None:
        self._env = env
        self._capacity_Bps = capacity_Bps
        self._components: dict[int, _Component] = {}
        self._component_on = np.full(len(capacity_Bps), _NOBODY)
        self._n_components = 0
        self._joining: list[_Flow] = []
        self._settling: simpy.Event | None = None
        self._stages: list[Stage] = []
        self._kind_of: dict[int, int] = {}
        self._remembered = lru_cache(maxsize=_REMEMBERED)(self._fair_rates_Bps)

    def start(self, transfer: Transfer) -> simpy.Event:
        """Start a transfer; the event happens when its last stage has ended."""
        done = self._env.event()
        self._env.process(self._run(transfer, done))
        return done

    def _run(self, transfer: Transfer, done: simpy.Event) -> Generator[simpy.Event]:
        for stage in transfer.stages:
            if stage.latency_s:
                yield self._env.timeout(stage.latency_s)
            if stage.nbytes.any():
                yield self._flow(stage)
        done.succeed()

    def _flow(self, stage: Stage) -> simpy.Event:
        """Let the bytes of a stage flow; the event happens when all have."""
        flow = _Flow(self._kind(stage), stage, self._env.event())
        self._joining.append(flow)
        self._settle_soon()
        return flow.done

    def _kind(self, stage: Stage) -> int:
        """Return the number of a stage; stages are kept, so that no other takes its id."""
        kind = self._kind_of.setdefault(id(stage), len(self._stages))
        if kind == len(self._stages):
            self._stages.append(stage)
        return kind

    def _settle_soon(self) -> None:
        """Set the rates anew when all that happens at this moment has happened."""
        if self._settling is None:
            self._settling = self._env.event()
            self._settling.callbacks.append(self._settle)
            self._settling._ok, self._settling._value = True, None
            self._env.schedule(self._settling, priority=_LAST)

    def _settle(self, _: simpy.Event) -> None:
        self._settling = None
        joined = {self._join(flow) for flow in self._joining}
        self._joining.clear()
        for number in sorted(joined & self._components.keys()):
            self._set_rates(self._components[number])

    def _join(self, flow: "_Flow") -> int:
        """Take a flow into the component that it shares resources with, and make one of several; return its number."""
        touched = sorted({*self._component_on[flow.stage.resources].tolist()} - {_NOBODY})
        components = [self._components[number] for number in touched] or [self._new_component()]
        for component in components:
            self._advance(component)
        largest = max(components, key=lambda component: len(component.flows))
        for component in components:
            if component is not largest:
                del self._components[component.number]
                self._take(largest, component.flows)
        self._take(largest, [flow])
        return largest.number

    def _new_component(self) -> "_Component":
        component = _Component(self._n_components, self._env.now)
        self._n_components += 1
        self._components[component.number] = component
        return component

    def _take(self, component: "_Component", flows: list["_Flow"]) -> None:
        component.flows += flows
        for flow in flows:
            self._component_on[flow.stage.resources] = component.number

    def _advance(self, component: "_Component") -> None:
        """Let the bytes of a component flow until now; what was planned for later is void."""
        elapsed_s = self._env.now - component.settled_s
        component.settled_s = self._env.now
        component.next_end = None
        if elapsed_s:
            for flow in component.flows:
                flow.left_nbytes -= flow.rate_Bps * elapsed_s

    def _set_rates(self, component: "_Component") -> None:
        component.flows.sort(key=lambda flow: flow.kind)  # one set to remember, whoever came first
        kinds = tuple([flow.kind for flow in component.flows])
        rates_Bps = self._remembered(kinds) if len(kinds) <= _SMALL else self._fair_rates_Bps(kinds)
        left_s = np.array([flow.left_nbytes for flow in component.flows]) / rates_Bps
        next_s = max(float(left_s.min()), 0.0)
        for flow, rate_Bps in zip(component.flows, rates_Bps.tolist(), strict=True):
            flow.rate_Bps = rate_Bps
        component.is_ending = (left_s <= next_s * (1 + _TOGETHER)).tolist()
        component.next_end = self._env.timeout(next_s)
        component.next_end.callbacks.append(partial(self._end, component))

    def _fair_rates_Bps(self, kinds: tuple[int, ...]) -> NDArray[np.float64]:
        return max_min_rates([self._stages[kind] for kind in kinds], self._capacity_Bps)

    def _end(self, component: "_Component", end: simpy.Event) -> None:
        """End the transfers that are due, unless the rates have changed since; those who stay join anew."""
        if component.next_end is not end:
            return
        self._advance(component)
        del self._components[component.number]
        for flow, ends in zip(component.flows, component.is_ending, strict=True):
            self._component_on[flow.stage.resources] = _NOBODY
            if ends:
                flow.done.succeed()
            else:
                self._joining.append(flow)
        if self._joining:
            self._settle_soon()


class _Flow:
    """A stage in flight."""

    __slots__ = ("done", "kind", "left_nbytes", "rate_Bps", "stage")

    def __init__(self, kind: int, stage: Stage, done: simpy.Event) -> None:
        self.kind = kind
        self.stage = stage
        self.done = done
        self.left_nbytes = float(stage.nbytes.max())
        self.rate_Bps = 0.0


class _Component:
    """Flows that are joined by shared resources, with rates that hold from `settled_s` until `next_end`."""

    __slots__ = ("flows", "is_ending", "next_end", "number", "settled_s")

    def __init__(self, number: int, settled_s: float) -> None:
        self.number = number
        self.settled_s = settled_s
        self.flows: list[_Flow] = []
        self.is_ending: list[bool] = []
        self.next_end: simpy.Event | None = None


def common_start_s(transfers: Sequence[Transfer], capacity_Bps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how long each transfer takes when all start together and nobody else is there, shape `[n_transfers]`."""
    env = simpy.Environment()
    network = FluidNetwork(env, capacity_Bps)
    end_s = np.zeros(len(transfers))

    def record(index: int) -> Generator[simpy.Event]:
        yield network.start(transfers[index])
        end_s[index] = env.now

    for index in range(len(transfers)):
        env.process(record(index))
    env.run()
    return end_s
