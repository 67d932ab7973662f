"""Streams of one rank: whoever performs the operations of a stream, in order.

A *thread lane* hands them to a thread of its own; that is a stream on a CPU, and whatever blocks its caller elsewhere
(storage, collectives of gloo). A *direct lane* performs an operation at once in the thread that submits it: on a GPU
that only enqueues kernels on a CUDA stream, and events say when they run; on a CPU it is the host itself, and the
compute stream of a user's own training loop.

What an instance comes after is known from the plan. `Lane.order` puts it in order: a CUDA stream waits for an event,
without holding up the host; in all other cases the caller waits.
"""

import abc
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch

from real.recorder import Recorder
from real.timing import now_s, precise_sleeps
from simdist.plan import Instance

__all__ = ["CudaLane", "DirectLane", "Lane", "Perform", "ThreadLane"]

Perform = Callable[[Instance], None]

_LOOK_S = 0.25  # how often a blocked thread looks whether the run has failed
_REBASE_S = 10.0  # elapsed times of CUDA events are float32 milliseconds: at 10 s they are good to 1 us


class Lane(abc.ABC):
    """One stream of one rank."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

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

    @property
    def cuda_stream(self) -> torch.cuda.Stream | None:
        """The CUDA stream that the lane enqueues on, if it does."""
        return None

    def active(self) -> AbstractContextManager[object]:
        """Return the context in which operations of this lane are performed."""
        return nullcontext()

    def begin(self, instance: Instance) -> None:
        """Note that an instance is ready and begins."""
        self._recorder.begin(instance.index, now_s())

    def end(self, instance: Instance) -> None:
        """Note that an instance is done, or will be when the GPU gets there."""
        self._recorder.end(instance.index, now_s())

    def drain(self) -> None:  # noqa: B027  (nothing to wait for, unless a lane says otherwise)
        """Wait until all that was submitted is done and its times are recorded."""

    def close(self) -> None:  # noqa: B027
        """Take no more."""


@final
class ThreadLane(Lane):
    """A stream that is a thread.

    Args:
        name: Of the thread.
        perform: What to do with each instance; runs in the thread.
        failed: Set when the run has failed; nobody waits any longer then.
        on_error: Told about an exception of `perform`, after which the thread ends.
        recorder: For the times.
    """

    def __init__(
        self,
        name: str,
        perform: Perform,
        *,
        failed: Callable[[], None],
        on_error: Callable[[BaseException], None],
        recorder: Recorder,
    ) -> None:
        super().__init__(recorder)
        self._perform, self._failed, self._on_error = perform, failed, on_error
        self._queue: queue.SimpleQueue[Instance | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._done, self._submitted = -1, -1
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
                self._changed.wait(_LOOK_S)

    def end(self, instance: Instance) -> None:
        """Note that the instance is done, and tell those that wait for it."""
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

    def _run(self) -> None:
        precise_sleeps()
        try:
            for instance in self.instances():
                self._perform(instance)
        except BaseException as error:
            self._on_error(error)


@final
class DirectLane(Lane):
    """A stream whose operations the submitting thread performs at once."""

    def __init__(self, perform: Perform, *, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._perform = perform

    def submit(self, instance: Instance) -> None:
        """Perform the instance."""
        self._perform(instance)

    def order(self, index: int, cuda_stream: torch.cuda.Stream | None) -> None:
        """Do nothing: whatever was submitted is done."""


@final
class CudaLane(Lane):
    """A stream that is a CUDA stream: what is submitted is enqueued at once, and runs when the GPU gets there.

    Args:
        perform: Enqueues the kernels of an instance.
        stream: The CUDA stream.
        recorder: For the times, which events bring.
    """

    def __init__(self, perform: Perform, stream: torch.cuda.Stream, *, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._perform, self._stream = perform, stream
        self._lock = threading.Lock()
        self._began: dict[int, torch.cuda.Event] = {}
        self._ended: dict[int, torch.cuda.Event] = {}
        self._pending: deque[int] = deque()
        self._base, self._base_s = self._mark()

    @property
    def cuda_stream(self) -> torch.cuda.Stream:
        """The CUDA stream."""
        return self._stream

    def active(self) -> AbstractContextManager[object]:
        """Return the context that makes the stream current."""
        return torch.cuda.stream(self._stream)

    def submit(self, instance: Instance) -> None:
        """Enqueue the instance."""
        self._collect(wait=False)
        self._perform(instance)

    def order(self, index: int, cuda_stream: torch.cuda.Stream | None) -> None:
        """Let the CUDA stream, or the caller, wait for the event of the instance's end."""
        event = self._ended.get(index)
        if event is None:
            return  # its times are recorded already, so it is done
        if cuda_stream is None:
            event.synchronize()
        elif cuda_stream != self._stream:
            cuda_stream.wait_event(event)

    def begin(self, instance: Instance) -> None:
        """Enqueue the event of the beginning."""
        self._began[instance.index] = self._event()

    def end(self, instance: Instance) -> None:
        """Enqueue the event of the end."""
        self._ended[instance.index] = self._event()
        with self._lock:
            self._pending.append(instance.index)

    def drain(self) -> None:
        """Wait for the GPU, and record all times."""
        self._stream.synchronize()
        self._collect(wait=True)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _mark(self) -> tuple[torch.cuda.Event, float]:
        """Return an event, and when it happened by the host's clock."""
        event = self._event()
        event.synchronize()
        return event, now_s()

    def _collect(self, *, wait: bool) -> None:
        """Record the times of what is done, and let go of its events."""
        with self._lock:
            while self._pending and (wait or self._ended[self._pending[0]].query()):
                index = self._pending.popleft()
                began, ended = self._began.pop(index), self._ended.pop(index)
                self._recorder.begin(index, self._base_s + self._base.elapsed_time(began) / 1e3)
                self._recorder.end(index, self._base_s + self._base.elapsed_time(ended) / 1e3)
            if not self._pending and now_s() - self._base_s > _REBASE_S:
                self._base, self._base_s = self._mark()
