"""Programs, watches, CUDA streams, memory that do nothing, or what a test wants, and the executor with them."""

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from real.buffers.memory import Memory
from real.execution.executor import Executor
from real.execution.streams import Lanes
from real.programs.base import Program
from real.recording.recorder import Recorder
from simdist.errors import RunError
from simdist.plan import (
    AllReduce,
    Backward,
    Buffer,
    Delay,
    Forward,
    Load,
    Op,
    Optimize,
    Plan,
    Wait,
)
from simdist.plan.group import Group

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
IN_THREAD = Lanes(CPU, collectives_block=True)


class Stream:
    """A CUDA stream."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_event(self, event: "Event") -> None:
        pass

    def record_event(self) -> "Event":
        return Event()


class Event:
    """An event of a stream, which happens when it was asked for a few times."""

    n_events = 0

    def __init__(self, enable_timing: bool = False) -> None:
        Event.n_events += 1
        self.number = Event.n_events
        self.n_queries = 0

    def record(self, stream: Stream) -> None:
        pass

    def query(self) -> bool:
        self.n_queries += 1
        return self.n_queries > 3

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later.number - self.number)


class Cuda:
    """What the executor takes of `torch.cuda`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.default = Stream()
        self._of_thread = threading.local()
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @property
    def current(self) -> Stream:
        return getattr(self._of_thread, "current", self.default)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._of_thread.current = self.current, stream
        try:
            yield
        finally:
            self._of_thread.current = before


class QuietWatch:
    """A watch over a run of one rank."""

    def __init__(self) -> None:
        self.position = -1
        self.failed = threading.Event()

    def check(self) -> None:
        if self.failed.is_set():
            raise RunError("rank 7 failed: it rained")


class PooledMemory:
    """Buffers of a GPU: what a stream gives back serves what it takes next, at once and whatever still runs.

    All buffers have memory at first.

    Args:
        plan: Has the buffers.
        current_stream: Returns the stream that takes memory.

    Attributes:
        blocks: Name of a buffer -> number of the block that it has.
        takers: Name of a buffer -> the streams that took memory for it after the beginning.
    """

    kept: frozenset[str] = frozenset()

    def __init__(self, plan: Plan, current_stream: Callable[[], Hashable]) -> None:
        self.blocks: dict[str, int] = {}
        self.takers: defaultdict[str, set[Hashable]] = defaultdict(set)
        self._current_stream = current_stream
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._free: defaultdict[tuple[Hashable, int], list[int]] = defaultdict(list)
        self._pools: list[tuple[Hashable, int]] = []
        for name in self._buffers:
            self.take(name)
        self.takers.clear()

    def __contains__(self, name: object) -> bool:
        return name in self._buffers

    def dense(self, name: str) -> Buffer:
        return self._buffers[name]

    @property
    def held_nbytes(self) -> int:
        return sum(self._buffers[name].nbytes for name in self.blocks)

    def take(self, name: str) -> None:
        stream = self._current_stream()
        self.takers[name].add(stream)
        pool = stream, self._buffers[name].nbytes
        if not self._free[pool]:
            self._free[pool].append(len(self._pools))
            self._pools.append(pool)
        self.blocks[name] = self._free[pool].pop()

    def give_back(self, name: str) -> None:
        block = self.blocks.pop(name)
        self._free[self._pools[block]].append(block)


class Pretended(Program):
    """Does nothing, or what a test wants at an operation; notes in which order and in which thread."""

    def __init__(self, act: Callable[[Op], None] | None = None) -> None:
        self.seen: list[object] = []
        self.threads: dict[object, str] = {}
        self.act = act or (lambda op: None)

    def note(self, op: object) -> None:
        self.seen.append(op)
        self.threads[op] = threading.current_thread().name

    def load(self, op: Load, number: int) -> None:
        self.perform(op, number)

    def perform(self, op: Op, _step_or_memory: object) -> None:
        """Perform what a program does, or a world."""
        self.note(op)
        self.act(op)

    def forward(self, parts: Sequence[Forward], step: int, complete: Callable[[], object]) -> None:
        for part in parts:
            self.perform(part, step)
            complete()

    def backward(self, buckets: Sequence[Backward], complete: Callable[[], object]) -> None:
        for bucket in buckets:
            self.note(bucket.dst)
            complete()


def execute(
    plan: Plan,
    program: Pretended,
    lanes: Lanes = IN_THREAD,
    delay_s: float = 0.0,
    first_step: int = 0,
    start_s: float | None = None,
    watch: QuietWatch | None = None,
):
    delays = {channel: np.full((1, plan.n_steps, plan.world_size), delay_s) for channel in ("host", "compute", "io")}
    recorder, watch = Recorder(plan), watch or QuietWatch()
    executor = Executor(
        plan,
        rank=0,
        delays=delays,
        world=program,
        program=program,
        memory=Memory(plan, CPU, ()),
        lanes=lanes,
        recorder=recorder,
        watch=watch,
        first_step=first_step,
    )
    if start_s is not None:
        executor.start_clock(start_s)
    executor.run()
    return recorder.times_s, watch


STEP = (
    Forward(("param",), ("activations", "loss")),
    Wait("loss"),
    Delay("host"),
    Backward(("param", "activations"), "grad.0"),
    AllReduce("grad.0", Group(2)),
    Backward(("param", "activations"), "grad.1"),
    AllReduce("grad.1", Group(2)),
    Optimize(("param",), ("grad.0", "grad.1")),
)
