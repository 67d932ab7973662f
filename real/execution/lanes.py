"""Streams of one rank: each performs its operations in order.

A *thread lane* hands them to a thread of its own. Streams on a CPU are thread lanes. So are, on all devices, streams
with calls that block (storage, collectives of gloo). A *direct lane* performs an operation immediately in the
submitting thread. On a GPU, this only enqueues kernels on a CUDA stream, and events record when they run. On a CPU,
direct lanes are the host itself and the compute stream of a user's own training loop.

The plan states the predecessors of an instance. `Performer.order` enforces the order: a CUDA stream waits for an event
without blocking the host; in all other cases the caller waits.

**Threads on a GPU.** Collectives of gloo accept CUDA tensors, and copy them to the host and back on streams of their
own. They return when the copy back is enqueued, not when it is done. So a thread lane also has a CUDA stream, and its
instance is done when that stream is done. On the default stream, on which the main thread computes, these copies would
queue behind all kernels that the host has enqueued ahead. The overlap would be lost.
"""

import abc
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch

from real.execution.gpu import GpuClock, Mark, NewEvent, await_event, own_stream, timed_event
from real.execution.ticks import Ended
from real.recording.recorder import Recorder
from real.recording.timing import now_s, precise_sleeps
from simdist.errors import RunError
from simdist.plan import Instance

Perform = Callable[[Instance], None]
OnEnd = Callable[[Instance, Ended], None]

_LOOK_S = 0.25  # interval at which a blocked thread checks whether the run has failed


class Performer(abc.ABC):
    """One stream of one rank.

    Args:
        perform: Performs an instance, or enqueues its kernels.
        recorder: Records the times; None to record none.
        on_end: Called with each instance that has ended, or will have ended when the GPU gets there, before others
            learn of it.
    """

    cuda_stream: torch.cuda.Stream | None = None  # the stream on which the lane enqueues, if any

    def __init__(self, perform: Perform, recorder: Recorder | None, on_end: OnEnd) -> None:
        self._perform = perform
        self._recorder = recorder
        self._on_end = on_end

    @abc.abstractmethod
    def submit(self, instance: Instance) -> None:
        """Take the next instance of the stream."""

    @abc.abstractmethod
    def order(self, index: int, cuda_stream: torch.cuda.Stream | None) -> None:
        """Make the next work wait for instance `index` of this lane.

        Args:
            index: Index of an instance that was submitted here.
            cuda_stream: Stream of the next work; None is the calling thread itself.
        """

    def active(self) -> AbstractContextManager[object]:
        """Return the context for operations of this lane."""
        return nullcontext()

    def begin(self, instance: Instance) -> None:
        """Record that an instance is ready and begins."""
        if self._recorder:
            self._recorder.begin(instance.index, now_s())

    def end(self, instance: Instance) -> None:
        """Record that an instance is done, or will be when the GPU gets there."""
        at_s = now_s()
        if self._recorder:
            self._recorder.end(instance.index, at_s)
        self._on_end(instance, lambda: at_s)

    def drain(self) -> None:  # noqa: B027  (nothing to wait for, unless a lane says otherwise)
        """Wait until all submitted instances are done and their times are recorded."""

    def close(self) -> None:  # noqa: B027
        """Accept no more instances."""

    def join(self, timeout_s: float) -> None:  # noqa: B027
        """Wait until no work of the lane is running, with a time limit."""


@final
class ThreadLane(Performer):
    """A stream that is a thread.

    Args:
        perform: Runs in the thread; see `Performer`.
        recorder: See `Performer`.
        on_end: See `Performer`.
        name: Name of the thread.
        device: Device of its tensors.
        failed: Raises when the run has failed, which ends all waits.
        on_error: Called with an exception of `perform`, after which the thread ends.
    """

    def __init__(
        self,
        perform: Perform,
        recorder: Recorder | None,
        on_end: OnEnd,
        *,
        name: str,
        device: torch.device,
        failed: Callable[[], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        super().__init__(perform, recorder, on_end)
        self._device = device
        self._failed = failed
        self._on_error = on_error
        self._queue: queue.SimpleQueue[Instance | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._done = -1
        self._submitted = -1
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, instance: Instance) -> None:
        """Hand the instance to the thread."""
        self._submitted = instance.index
        self._queue.put(instance)

    def instances(self) -> Iterator[Instance]:
        """Yield the instances as they arrive, until the lane is closed; only for the lane's own thread."""
        while (instance := self._queue.get()) is not None:
            yield instance

    def order(self, index: int, cuda_stream: torch.cuda.Stream | None) -> None:
        """Wait until instance `index` is done."""
        if self._done >= index:
            return
        with self._changed:
            while self._done < index:
                self._failed()
                if not self._thread.is_alive():
                    raise RunError(f"the {self._thread.name} stream has ended and was still to do operation {index}")
                self._changed.wait(_LOOK_S)

    def end(self, instance: Instance) -> None:
        """Record that the instance is done, and notify the threads that wait for it."""
        if self._device.type == "cuda":
            await_event(torch.cuda.current_stream(self._device).record_event(), self._failed)
        super().end(instance)
        with self._changed:
            self._done = instance.index
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all submitted instances are done."""
        self.order(self._submitted, None)

    def close(self) -> None:
        """Let the thread end after its queued work."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        precise_sleeps()
        try:
            with own_stream(self._device):
                for instance in self.instances():
                    self._perform(instance)
        except BaseException as error:
            self._on_error(error)


@final
class DirectLane(Performer):
    """A stream with operations that the submitting thread performs immediately."""

    def submit(self, instance: Instance) -> None:
        """Perform the instance."""
        self._perform(instance)

    def order(self, index: int, cuda_stream: torch.cuda.Stream | None) -> None:
        """Do nothing: all submitted instances are done."""


@final
class CudaLane(Performer):
    """A CUDA stream: submitted instances are enqueued immediately, and run when the GPU gets there.

    Args:
        perform: See `Performer`.
        recorder: Records the times of events.
        on_end: See `Performer`.
        stream: The CUDA stream.
        clock: Converts events into times.
        failed: Raises when the run has failed, which ends all waits.
        new_event: Makes an event.
    """

    def __init__(
        self,
        perform: Perform,
        recorder: Recorder | None,
        on_end: OnEnd,
        stream: torch.cuda.Stream,
        *,
        clock: GpuClock,
        failed: Callable[[], None],
        new_event: NewEvent = timed_event,
    ) -> None:
        super().__init__(perform, recorder, on_end)
        self.cuda_stream = self._stream = stream
        self._clock = clock
        self._failed = failed
        self._new_event = new_event
        self._began: dict[int, tuple[Mark, torch.cuda.Event]] = {}
        self._ended: dict[int, torch.cuda.Event] = {}
        self._pending: deque[int] = deque()  # instances with an event at their end, but no times yet

    def active(self) -> AbstractContextManager[object]:
        """Return the context that makes the stream current."""
        return torch.cuda.stream(self._stream)

    def submit(self, instance: Instance) -> None:
        """Enqueue the instance."""
        self._collect()
        self._perform(instance)

    def order(self, index: int, cuda_stream: torch.cuda.Stream | None) -> None:
        """Let the CUDA stream, or the caller, wait for the event of the instance's end."""
        event = self._ended.get(index)
        if event is None:
            return  # its times are already recorded, so it is done
        if cuda_stream is None:
            await_event(event, self._failed)
        elif cuda_stream != self._stream:
            cuda_stream.wait_event(event)

    def begin(self, instance: Instance) -> None:
        """Enqueue the event of the beginning."""
        self._began[instance.index] = self._clock.mark(), self._event()

    def end(self, instance: Instance) -> None:
        """Enqueue the event of the end."""
        event = self._event()
        mark, _ = self._began[instance.index]
        self._on_end(instance, lambda: mark.time_s(event))
        self._ended[instance.index] = event
        self._pending.append(instance.index)

    def drain(self) -> None:
        """Wait for the GPU, and record all times."""
        if self._pending:
            await_event(self._ended[self._pending[-1]], self._failed)
        self._collect()

    def _event(self) -> torch.cuda.Event:
        event = self._new_event()
        event.record(self._stream)
        return event

    def _collect(self) -> None:
        """Record the times of finished instances, and release their events."""
        while self._pending and self._ended[self._pending[0]].query():
            index = self._pending.popleft()
            mark, began = self._began.pop(index)
            ended = self._ended.pop(index)
            if self._recorder:
                self._recorder.begin(index, mark.time_s(began))
                self._recorder.end(index, mark.time_s(ended))
