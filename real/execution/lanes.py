"""Streams of one rank: each performs its operations in order.

A *thread lane* hands them to a thread of its own; that is a stream on a CPU, and whatever blocks its caller elsewhere
(storage, collectives of gloo). A *direct lane* performs an operation at once in the thread that submits it: on a GPU
that only enqueues kernels on a CUDA stream, and events say when they run; on a CPU it is the host itself, and the
compute stream of a user's own training loop.

The plan tells the predecessors of an instance. `Performer.order` puts it in order: a CUDA stream waits for an event,
without holding up the host; in all other cases the caller waits.

**Threads on a GPU.** Collectives of gloo take CUDA tensors, and copy them to the host and back on streams of their own;
they return when the copy back is enqueued, not when it is done. A thread lane therefore has a CUDA stream too, and an
instance of it is done when that stream is. On the default stream, where the main thread computes, its copies would
queue behind all that the host has run ahead with, and the overlap would be lost.
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

_LOOK_S = 0.25  # how often a blocked thread looks whether the run has failed


class Performer(abc.ABC):
    """One stream of one rank.

    Args:
        perform: Performs an instance, or enqueues its kernels.
        recorder: For the times; None if they are not wanted.
        on_end: Told of each instance that it has ended, or will have when the GPU gets there, before others are.
    """

    cuda_stream: torch.cuda.Stream | None = None  # that the lane enqueues on, if it does

    def __init__(self, perform: Perform, recorder: Recorder | None, on_end: OnEnd) -> None:
        self._perform = perform
        self._recorder = recorder
        self._on_end = on_end

    @abc.abstractmethod
    def submit(self, instance: Instance) -> None:
        """Take the next instance of the stream."""

    @abc.abstractmethod
    def order(self, index: int, cuda_stream: torch.cuda.Stream | None) -> None:
        """Let what comes next come after instance `index` of this lane.

        Args:
            index: Of an instance that was submitted here.
            cuda_stream: Where the next comes; None is the calling thread itself.
        """

    def active(self) -> AbstractContextManager[object]:
        """Return the context in which operations of this lane are performed."""
        return nullcontext()

    def begin(self, instance: Instance) -> None:
        """Note that an instance is ready and begins."""
        if self._recorder:
            self._recorder.begin(instance.index, now_s())

    def end(self, instance: Instance) -> None:
        """Note that an instance is done, or will be when the GPU gets there."""
        at_s = now_s()
        if self._recorder:
            self._recorder.end(instance.index, at_s)
        self._on_end(instance, lambda: at_s)

    def drain(self) -> None:  # noqa: B027  (nothing to wait for, unless a lane says otherwise)
        """Wait until all that was submitted is done and its times are recorded."""

    def close(self) -> None:  # noqa: B027
        """Take no more."""

    def join(self, timeout_s: float) -> None:  # noqa: B027
        """Wait until nothing of the lane runs any longer, but not for ever."""


@final
class ThreadLane(Performer):
    """A stream that is a thread.

    Args:
        perform: Runs in the thread; see `Performer`.
        recorder: See `Performer`.
        on_end: See `Performer`.
        name: Of the thread.
        device: Of the tensors that it works on.
        failed: Raises when the run has failed; no wait goes on then.
        on_error: Told about an exception of `perform`, after which the thread ends.
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
        """Yield the instances as they come, until the lane is closed; only for the lane's own thread."""
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
        """Note that the instance is done, and tell those that wait for it."""
        if self._device.type == "cuda":
            await_event(torch.cuda.current_stream(self._device).record_event(), self._failed)
        super().end(instance)
        with self._changed:
            self._done = instance.index
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all that was submitted is done."""
        self.order(self._submitted, None)

    def close(self) -> None:
        """Let the thread end when it has done what it has."""
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
    """A stream whose operations the submitting thread performs at once."""

    def submit(self, instance: Instance) -> None:
        """Perform the instance."""
        self._perform(instance)

    def order(self, index: int, cuda_stream: torch.cuda.Stream | None) -> None:
        """Do nothing: whatever was submitted is done."""


@final
class CudaLane(Performer):
    """A stream that is a CUDA stream: what is submitted is enqueued at once, and runs when the GPU gets there.

    Args:
        perform: See `Performer`.
        recorder: Takes the times that events bring.
        on_end: See `Performer`.
        stream: The CUDA stream.
        clock: Knows when events happened.
        failed: Raises when the run has failed; no wait goes on then.
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
        self._pending: deque[int] = deque()  # which have an event of their end, and no times yet

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
            return  # its times are recorded already, so it is done
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
        """Record the times of what is done, and let go of its events."""
        while self._pending and self._ended[self._pending[0]].query():
            index = self._pending.popleft()
            mark, began = self._began.pop(index)
            ended = self._ended.pop(index)
            if self._recorder:
                self._recorder.begin(index, mark.time_s(began))
                self._recorder.end(index, mark.time_s(ended))
