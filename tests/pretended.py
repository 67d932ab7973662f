"""Programs and watches that do nothing, or what a test wants, and the executor with them."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
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
IN_THREAD = Lanes(CPU, collectives_block=True)


class QuietWatch:
    """A watch over a run of one rank."""

    def __init__(self) -> None:
        self.position = -1
        self.failed = threading.Event()

    def check(self) -> None:
        if self.failed.is_set():
            raise RunError("rank 7 failed: it rained")


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
