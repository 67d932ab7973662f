"""Tools for the streams of a GPU: times of its events, interruptible waits, and delays of a stream.

All functions run while the GPU works. Only `await_event`, `await_kernels` and the constructors wait for it.
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

_POLL_S = 50e-6  # largest delay with which a host notices an event
_RENEW_S = 1.0
_DRIFT = 1e-4  # upper bound of the rate difference between the clocks of a GPU and its host
_PATIENCE_S = 1.0
_N_MARKS = 8
# An idle GPU needs some tenths of a second to reach its full clock rate.
_TRIAL_S = 0.01
_N_TRIALS = 30
_SHORTEST_S = 1e-3  # shortest spin to learn from


def timed_event() -> torch.cuda.Event:
    """Return a new event that records its time."""
    return torch.cuda.Event(enable_timing=True)


def await_event(event: torch.cuda.Event, check: Callable[[], None]) -> None:
    """Block the host until an event has happened.

    `event.synchronize()` would not do: if the peers of a collective are gone, it never ends, and a thread that waits
    for it in the driver cannot be interrupted.

    Args:
        event: An event that was recorded.
        check: Called repeatedly; raises when the run has failed.
    """
    while not event.query():
        check()
        time.sleep(_POLL_S)


def await_kernels(device: torch.device) -> None:
    """Block the host until a device has nothing to do, if it is a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_memory(device: torch.device) -> None:
    """Give memory that is not in use back to a GPU, so that all streams can take it, and count its peak from now on."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def most_allocated_nbytes(device: torch.device) -> int:
    """Return the most bytes that tensors of this process had on a GPU since `count_memory`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Give the calling thread a CUDA stream of its own, if the device is a GPU.

    A new thread starts with GPU 0 and its default stream, on which the main thread computes.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


@dataclass(frozen=True, slots=True)
class Mark:
    """An event, and its time by the host's clock."""

    event: torch.cuda.Event
    at_s: float

    def time_s(self, event: torch.cuda.Event) -> float:
        """Return the time of a later event; torch gives the difference as float32 milliseconds."""
        return self.at_s + float(self.event.elapsed_time(event)) / 1e3


@final
class GpuClock:
    """Converts events of a GPU into times of the host's clock.

    A mark is an event on an otherwise empty stream, so it happens as soon as the host records it, between two readings
    of the host's clock. Clocks drift, and the float32 differences to a mark get coarse (8 us after 100 s). So marks are
    renewed. This must not block the host if the GPU responds late because others share it. So a caller waits for a new
    mark no longer than the possible error of the old one.

    Args:
        stream: A stream that nothing else uses.
        new_event: Makes an event.
        now: The host's clock.

    Raises:
        RunError: The GPU does not respond.
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
        """Return a mark and the uncertainty of its time; None if the GPU takes longer than a limit to respond."""
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
    """Delays the current CUDA stream for a given time, with a kernel that counts cycles.

    The length of a cycle changes with load and temperature, so each spin is timed, and later ones use the result. A
    spin is never shorter than its cycles, but may be longer if processes take turns on a GPU. So the fastest of the
    last few spins counts.

    Args:
        device: The GPU. It spins for a while immediately, for a first measurement.
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
        """Take the lengths of the finished spins."""
        while self._timed and self._timed[0][2].query():
            n_cycles, begin, end = self._timed.popleft()
            length_s = begin.elapsed_time(end) / 1e3
            if length_s >= _SHORTEST_S:
                self._cycles_per_s.append(n_cycles / length_s)
