"""The own work of a rank: the time of a step without the time in which the rank waits for others.

A rank *arrives* at an exchange with others, waits, and *leaves* it when the exchange is done. A step lasts from the
last leave of the step before to its own last leave:

    work = (last leave of this step - last leave of the step before) - sum of (leave - arrival) in this step

All ranks leave an exchange at about the same moment, so all of them measure the same span, and clocks need not agree. A
rank is late if its own work takes longer. Waiting is never work. The time after the last leave of a step counts to the
next step, because the others wait there for it. A step without an exchange ends where the loop says so.

On a CPU, the host's clock tells the time. On a GPU, events on the stream of computation do: a host that is late delays
no other rank while its GPU still works. Events are read when they have happened, so nothing waits for the GPU.
"""

import abc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar, final

import torch

from real.recording.timing import now_s

_MomentT = TypeVar("_MomentT")

_N_WARM_UP = 2  # steps


class StepClock(abc.ABC, Generic[_MomentT]):
    """Takes moments, and tells later how far apart they are."""

    @abc.abstractmethod
    def take(self) -> _MomentT:
        """Return the present moment, without waiting for anything."""

    @abc.abstractmethod
    def has_passed(self, moment: _MomentT) -> bool:
        """Tell whether a moment is known."""

    @abc.abstractmethod
    def seconds(self, begin: _MomentT, end: _MomentT) -> float:
        """Return the seconds between two moments that have passed."""


@final
class HostStepClock(StepClock[float]):
    """The monotonic clock of the host."""

    def take(self) -> float:
        """Return the present moment."""
        return now_s()

    def has_passed(self, moment: float) -> bool:
        """Return True: a moment of the host is known at once."""
        return True

    def seconds(self, begin: float, end: float) -> float:
        """Return the seconds between two moments."""
        return end - begin


@final
class CudaStepClock(StepClock[torch.cuda.Event]):
    """Events on the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_passed(self, moment: torch.cuda.Event) -> bool:
        """Tell whether the GPU has reached an event."""
        return bool(moment.query())

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two events."""
        return float(begin.elapsed_time(end)) / 1e3


@dataclass(frozen=True, slots=True)
class StepMoments(Generic[_MomentT]):
    """The moments of one step.

    Args:
        step: Number of the step.
        begin: Last leave of the step before.
        end: Last leave of this step, or its end if it has no exchange.
        waits: Arrival and leave of each exchange.
    """

    step: int
    begin: _MomentT
    end: _MomentT
    waits: tuple[tuple[_MomentT, _MomentT], ...]


@dataclass(frozen=True, slots=True)
class StepWork:
    """How long one step took on this rank."""

    step: int
    work_s: float
    step_s: float


@final
class WorkRecorder(Generic[_MomentT]):
    """Records the moments of steps.

    Attributes:
        clock: The same.
        n_waits: Exchanges so far.
    """

    def __init__(self, clock: StepClock[_MomentT]) -> None:
        self.clock = clock
        self.n_waits = 0
        self._depth = 0
        self._arrived: _MomentT | None = None
        self._waits: list[tuple[_MomentT, _MomentT]] = []
        self._begin: _MomentT | None = None
        self._n_steps = 0

    def arrive(self) -> None:
        """Note that this rank begins to wait for others. Within another exchange this changes nothing."""
        self._depth += 1
        if self._depth == 1:
            self._arrived = self.clock.take()

    def leave(self) -> None:
        """Note that the exchange is done."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._arrived is not None:
            self._waits.append((self._arrived, self.clock.take()))
            self._arrived = None
            self.n_waits += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark an exchange with other ranks."""
        self.arrive()
        try:
            yield
        finally:
            self.leave()

    def end_step(self, step: int) -> StepMoments[_MomentT] | None:
        """End a step. Return its moments; None for the first two.

        The beginning of the first step is not known. The second contains the rest of the first.
        """
        waits = tuple(self._waits)
        self._waits.clear()
        begin = self._begin
        end = waits[-1][1] if waits else self.clock.take()
        self._begin = end
        self._depth = 0
        self._arrived = None
        self._n_steps += 1
        return None if begin is None or self._n_steps <= _N_WARM_UP else StepMoments(step, begin, end, waits)


def measured(moments: StepMoments[_MomentT], clock: StepClock[_MomentT]) -> StepWork:
    """Return how long a step took. All its moments have passed.

    >>> measured(StepMoments(step=7, begin=2.0, end=5.0, waits=((3.0, 3.5), (4.0, 5.0))), HostStepClock())
    StepWork(step=7, work_s=1.5, step_s=3.0)
    """
    step_s = clock.seconds(moments.begin, moments.end)
    waited_s = math.fsum(clock.seconds(arrival, leave) for arrival, leave in moments.waits)
    return StepWork(moments.step, max(0.0, step_s - waited_s), step_s)
