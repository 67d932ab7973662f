"""Needs of the streams of a GPU: times of its events, waiting that ends, and a way to hold a stream up.

Everything here goes on while the GPU works: nothing but `await_event` and the constructors wait for it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch

from real.recording.timing import now_s
from simdist.errors import RunError

NewEvent = Callable[[], torch.cuda.Event]

_POLL_S = 50e-6  # how late a host may notice that an event has happened
_RENEW_S = 1.0
_DRIFT = 1e-4  # more than the clocks of a GPU and its host may differ in rate
_PATIENCE_S = 1.0
_N_MARKS = 8
# A GPU that was idle needs some tenths of a second to reach its clock.
_TRIAL_S = 0.01
_N_TRIALS = 30
_SHORTEST_S = 1e-3  # of a spin from which to learn


def timed_event() -> torch.cuda.Event:
    """Return a new event that knows when it happens."""
    return torch.cuda.Event(enable_timing=True)


def await_event(event: torch.cuda.Event, check: Callable[[], None]) -> None:
    """Hold up the host until an event has happened.

    Not by `event.synchronize()`: a collective whose peers are gone never ends, and nothing gets the thread back that
    waits for it in the driver.

    Args:
        event: Recorded before.
        check: Called again and again; raises when the run has failed.
    """
    while not event.query():
        check()
        time.sleep(_POLL_S)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Give the calling thread a CUDA stream of its own, if the device is a GPU.

    A new thread begins with GPU 0 and its default stream, which is where the main thread computes.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


@dataclass(frozen=True, slots=True)
class Mark:
    """An event, and when it happened by the host's clock."""

    event: torch.cuda.Event
    at_s: float

    def time_s(self, event: torch.cuda.Event) -> float:
        """Return when a later event happened; torch has the difference as float32 milliseconds."""
        return self.at_s + float(self.event.elapsed_time(event)) / 1e3


@final
class GpuClock:
    """Tells when events of a GPU happened, by the host's clock.

    A mark is an event on a stream where nothing else is, so that it happens as soon as the host records it, between two
    looks at the host's clock. Clocks drift, and the float32 differences to a mark grow coarse (after 100 s, 8 us). So
    marks are renewed, but must not hold up the host where the GPU does not answer at once, because others share it:
    a caller that wants a new mark waits no longer for it than the old one may be wrong by.

    Args:
        stream: Nothing else may use it.
        new_event: Makes an event.
        now: The host's clock.

    Raises:
        RunError: The GPU does not answer.
    """

    def __init__(
        self, stream: torch.cuda.Stream, *, new_event: NewEvent = timed_event, now: Callable[[], float] = now_s
    ) -> None:
        self._stream = stream
        self._new_event = new_event
        self._now = now
        marks = [mark for mark in (self._take(_PATIENCE_S) for _ in range(_N_MARKS)) if mark]
        if not marks:
            raise RunError(f"the GPU has not got to an event on an empty stream for {_PATIENCE_S:g} s: see nvidia-smi")
        self._latest, _ = min(marks, key=lambda mark: mark[1])
        self._tried_s = now()

    def mark(self) -> Mark:
        """Return the latest mark, after an attempt to renew it if it is old."""
        now_s = self._now()
        if now_s - self._tried_s > _RENEW_S:
            taken = self._take(_DRIFT * (now_s - self._latest.at_s))
            self._latest = taken[0] if taken else self._latest
            self._tried_s = self._now()
        return self._latest

    def _take(self, patience_s: float) -> tuple[Mark, float] | None:
        """Return a mark and how unsure its time is; None if the GPU takes longer than that to answer."""
        event = self._new_event()
        before_s = self._now()
        event.record(self._stream)
        while not event.query():
            if self._now() - before_s > patience_s:
                return None
        after_s = self._now()
        return Mark(event, (before_s + after_s) / 2), after_s - before_s


@final
class Spin:
    """Holds up the current CUDA stream for a given time, by a kernel that counts cycles.

    The length of a cycle changes with load and temperature, so every spin is timed, and the next ones learn from it.
    A spin is never shorter than it counts, but may be longer where processes take turns on a GPU: the fastest of the
    last few counts.

    Args:
        device: The GPU; it spins for a while at once, to be measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timed: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._cycles_per_s: deque[float] = deque([1e9], maxlen=5)
        for _ in range(_N_TRIALS):
            self(_TRIAL_S)
            torch.cuda.current_stream(device).synchronize()

    def __call__(self, seconds: float) -> None:
        """Enqueue a spin; nothing for 0 or less."""
        if seconds <= 0:
            return
        self._learn()
        n_cycles = int(seconds * max(self._cycles_per_s))
        stream = torch.cuda.current_stream(self._device)
        begin = timed_event()
        end = timed_event()
        begin.record(stream)
        torch.cuda._sleep(n_cycles)
        end.record(stream)
        self._timed.append((n_cycles, begin, end))

    def _learn(self) -> None:
        """Take the lengths of the spins that are over."""
        while self._timed and self._timed[0][2].query():
            n_cycles, begin, end = self._timed.popleft()
            length_s = begin.elapsed_time(end) / 1e3
            if length_s >= _SHORTEST_S:
                self._cycles_per_s.append(n_cycles / length_s)
