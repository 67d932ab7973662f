"""Transfers in flight share resources max-min fairly, as a fluid.

A stage of a transfer needs d_r bytes on each of its resources r; b = max over r of d_r. While it flows at rate x, it
takes x d_r / b of every resource. The rates are max-min fair: raise all together until a resource is full, fix the
rates of the transfers on it, go on with the rest. n streams on one NIC get an n-th each; pushes converge on a server;
a transfer that another resource holds back leaves its share to the others.

Between two changes of the set of transfers in flight all rates are constant, so only changes are events.

Source:
    Bertsekas & Gallager, Data Networks, section 6.5.2 (max-min fair rates by progressive filling).
"""

from collections.abc import Generator, Sequence

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import EventPriority

from simdist.cost import Stage, Transfer

__all__ = ["FluidNetwork", "common_start_s", "max_min_rates"]

_LAST = EventPriority(2)  # SimPy runs events of one moment by priority: 0 urgent, 1 normal
_TOGETHER = 1e-12  # transfers due within this share of the time to the next end end together


def max_min_rates(stages: Sequence[Stage], capacity_Bps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the max-min fair rate of each stage, in bytes per second on its most used resource, shape `[n_stages]`.

    >>> nic = np.array([0])
    >>> stages = [Stage(0.0, nic, np.array([1e6])), Stage(0.0, nic, np.array([5e6]))]
    >>> max_min_rates(stages, np.array([1e9])).tolist()
    [500000000.0, 500000000.0]
    """
    used = np.unique(np.concatenate([stage.resources for stage in stages]))
    weights = np.zeros((len(stages), len(used)))
    for row, stage in enumerate(stages):
        weights[row, np.searchsorted(used, stage.resources)] = stage.nbytes / stage.nbytes.max()
    rates = np.zeros(len(stages))
    left = capacity_Bps[used].astype(np.float64)
    rising = np.ones(len(stages), dtype=bool)
    while rising.any():
        load = weights[rising].sum(axis=0)
        level = np.divide(left, load, out=np.full(len(left), np.inf), where=load > 0)
        full = level <= level.min() * (1 + 1e-12)
        stopped = rising & (weights[:, full] > 0).any(axis=1)
        rates[stopped] = level.min()
        left = np.maximum(left - weights[stopped].sum(axis=0) * level.min(), 0.0)
        rising &= ~stopped
    return rates


class FluidNetwork:
    """Transfers in flight inside a SimPy environment."""

    def __init__(self, env: simpy.Environment, capacity_Bps: NDArray[np.float64]) -> None:
        self._env = env
        self._capacity_Bps = capacity_Bps
        self._flying: list[_Flow] = []
        self._changed_s = 0.0
        self._settling: simpy.Event | None = None
        self._version = 0

    def start(self, transfer: Transfer) -> simpy.Event:
        """Start a transfer; the event happens when its last stage has ended."""
        done = self._env.event()
        self._env.process(self._run(transfer, done))
        return done

    def _run(self, transfer: Transfer, done: simpy.Event) -> Generator[simpy.Event]:
        for stage in transfer.stages:
            if stage.latency_s:
                yield self._env.timeout(stage.latency_s)
            if len(stage.resources):
                flow = _Flow(stage, self._env.event())
                self._advance()
                self._flying.append(flow)
                self._settle_soon()
                yield flow.done
        done.succeed()

    def _advance(self) -> None:
        """Let the bytes flow until now."""
        elapsed_s = self._env.now - self._changed_s
        self._changed_s = self._env.now
        if elapsed_s:
            for flow in self._flying:
                flow.left_nbytes -= flow.rate_Bps * elapsed_s

    def _settle_soon(self) -> None:
        """Set the rates anew when all that happens at this moment has happened."""
        if self._settling is None:
            self._settling = self._env.event()
            self._settling.callbacks.append(self._settle)
            self._settling._ok, self._settling._value = True, None
            self._env.schedule(self._settling, priority=_LAST)

    def _settle(self, _: simpy.Event) -> None:
        self._settling = None
        self._version += 1
        if not self._flying:
            return
        rates = max_min_rates([flow.stage for flow in self._flying], self._capacity_Bps)
        left_s = np.array([flow.left_nbytes for flow in self._flying]) / rates
        for flow, rate_Bps in zip(self._flying, rates, strict=True):
            flow.rate_Bps = float(rate_Bps)
        next_s = max(float(left_s.min()), 0.0)
        ending = [flow for flow, each_s in zip(self._flying, left_s, strict=True) if each_s <= next_s * (1 + _TOGETHER)]
        self._env.process(self._end(ending, self._version, next_s))

    def _end(self, ending: list["_Flow"], version: int, after_s: float) -> Generator[simpy.Event]:
        """End the transfers that are due next, unless the rates have changed by then."""
        yield self._env.timeout(after_s)
        if version == self._version and self._settling is None:
            self._advance()
            self._flying = [flow for flow in self._flying if flow not in ending]
            for flow in ending:
                flow.done.succeed()
            self._settle_soon()


class _Flow:
    """A stage in flight."""

    __slots__ = ("done", "left_nbytes", "nbytes", "rate_Bps", "stage")

    def __init__(self, stage: Stage, done: simpy.Event) -> None:
        self.stage = stage
        self.done = done
        self.nbytes = float(stage.nbytes.max())
        self.left_nbytes = self.nbytes
        self.rate_Bps = 0.0


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
