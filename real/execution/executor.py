"""The executor: walks a plan and performs each operation on this rank.

It knows operations, but not their purpose: no period, level or warm-up appears here. The host walks the plan and
submits each instance to the lane of its stream. A lane performs its instances in order. `Instance.after` lists the
dependencies of an instance on other lanes.

**A backward pass** is one call of autograd, but several operations of a plan: `Backward(bucket)` is done when the
gradients of that bucket are done. At that moment the compute lane is inside autograd, in the hook that completed the
bucket. There it ends this `Backward`, continues with the next operations of the plan, and returns into autograd when it
has begun the next `Backward`. So a hook may launch collectives (the overlap), or compute something in between.

**A forward pass** is one call of the model. If the model is sharded, the pass is several operations of a plan, one for
each unit. Before a module uses the next unit, its hook ends this `Forward`, continues with the plan, such as with the
copy of a gathered unit, and returns into the model when it has begun the next `Forward`.

**Control.** `Executor.run` performs a whole plan with a `Program`. Alternatively, the user's training loop drives the
executor: `reach` performs everything up to the next operation of a kind and begins that operation. The user's code
performs it, and `done` ends it.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar, final

import torch

from real.buffers.memory import Memory
from real.execution.gpu import Spin
from real.execution.lifetimes import Lifetimes
from real.execution.remaining import RemainingPlan
from real.execution.streams import Lanes, Streams
from real.execution.ticks import Ended, Ticks
from real.programs.base import Program
from real.recording.recorder import Recorder
from real.recording.timing import sleep_s
from simdist.errors import RunError
from simdist.plan import Instance, Plan, ops
from simdist.plan.delays import Delays, delays_of, seconds_of

_OpT = TypeVar("_OpT", bound=ops.Op)


class World(Protocol):
    """Performs collectives with the other ranks."""

    def perform(self, op: ops.Collective, memory: Memory) -> None:
        """Perform a collective; return when its result is ready, or enqueued on a GPU."""

    def is_over(self) -> bool:
        """Tell whether the next all-reduce that drops late ranks has happened without this rank."""


class _Watch(Protocol):
    """Knows whether the run has failed, here or on another rank, and reports the progress of this rank.

    Attributes:
        position: Instance index of the last operation of the comm stream that has begun.
    """

    position: int

    @property
    def failed(self) -> threading.Event:
        """Set when the run has failed, which ends all waits."""

    def check(self) -> None:
        """Raise RunError if the run has failed."""


@dataclass(slots=True)
class _Pass:
    """A running forward or backward pass: the operation of it that has begun, and the number of those still to end."""

    open: Instance
    n_left: int


@final
class Executor:
    """Performs a plan on one rank.

    Args:
        plan: A valid plan.
        rank: Number of this rank.
        delays: Those of one seed, see `simdist.plan.delays`.
        world: Performs collectives.
        program: Performs all other operations.
        memory: The buffers.
        lanes: Settings of the streams.
        recorder: Records the times; None to record none.
        watch: Checked wherever this rank waits for others.
        first_step: First step to perform, when resuming from a checkpoint.
        waiting: Makes the context in which the host or computation waits for communication.
        gives_back: Buffers of a sharded model have memory only while they are in use.
    """

    def __init__(  # noqa: PLR0913 (what a run is put together from)
        self,
        plan: Plan,
        *,
        rank: int,
        delays: Delays,
        world: World,
        program: Program,
        memory: Memory,
        lanes: Lanes,
        recorder: Recorder | None,
        watch: _Watch,
        first_step: int = 0,
        waiting: Callable[[], AbstractContextManager[object]] | None = None,
        gives_back: bool = False,
    ) -> None:
        self._world = world
        self._program = program
        self._memory = memory
        self._watch = watch
        self._submitted = -1
        self._pass: _Pass | None = None
        self._remaining = RemainingPlan(plan, first_step)
        self._entries = _Entries(self._remaining, rank)
        self._delays = _Delays(plan, delays, rank, lanes.device, watch.failed)
        self._ticks = Ticks(plan, watch.failed)
        self._streams = Streams(
            self._remaining,
            lanes,
            performed=(self._execute, recorder, self._on_end),
            has_ticks=self.has_ticks,
            check=watch.check,
            waiting=waiting,
        )
        let_wait = self._streams.let_wait if lanes.device.type == "cuda" else None
        first_step = self._remaining.loads.first_step
        self._lifetimes = Lifetimes(plan, memory, let_wait, first_step) if gives_back else None

    @property
    def has_ticks(self) -> bool:
        """Whether the plan contains ticks."""
        return bool(self._ticks)

    @property
    def peak_nbytes(self) -> int:
        """Most bytes that the buffers had at a time."""
        return self._memory.held_nbytes if self._lifetimes is None else self._lifetimes.peak_nbytes

    def start_clock(self, start_s: float) -> None:
        """Let ticks count from a moment of this rank's clock; by default they count from the executor's creation."""
        self._ticks.start_s = start_s

    def prepare(self) -> None:
        """Give back the memory of buffers that are not in use yet, once before `run`. No kernel may be running."""
        if self._lifetimes:
            self._lifetimes.start()

    def run(self) -> None:
        """Perform all steps.

        Raises:
            RunError: Something failed, here or on another rank.
        """
        try:
            for instance in self._remaining.order:
                self._submit(instance)
            self.drain()
            if self._lifetimes:
                self._lifetimes.finish()
        finally:
            self.close()

    def reach(self, kind: type[_OpT]) -> tuple[Instance, _OpT] | None:
        """Submit instances up to the next one of a kind, begin it and return it; None at the end of the plan."""
        for instance in self._remaining.order:
            if isinstance(instance.op, kind):
                self._submitted = instance.index
                self._begin(instance)
                if isinstance(instance.op, ops.Backward):
                    self._pass = _Pass(instance, len(self.buckets(instance)))
                return instance, instance.op
            self._submit(instance)
        return None

    def done(self, instance: Instance) -> None:
        """End an instance that `reach` began."""
        self._streams.lane(instance).end(instance)

    def sits_out(self, step: int) -> bool:
        """Tell whether this rank sits a step out, by the plan or because it was late when it was about to enter."""
        return self._entries.sits_out(step)

    def finish_step(self, step: int) -> None:
        """Submit the rest of a step."""
        last = self._remaining.steps.before(step + 1) - 1
        while self._submitted < last:
            self._submit(next(self._remaining.order))

    def advance_pass(self) -> bool:
        """End the running `Forward` or `Backward` and begin the next one of the pass; return whether there is one."""
        under_way = self._pass
        assert under_way is not None
        self._streams.lane(under_way.open).end(under_way.open)
        under_way.n_left -= 1
        if not under_way.n_left:
            self._pass = None
            return False
        arriving = self._streams.arriving_in_thread()
        for instance in self._remaining.order if arriving is None else arriving:
            (self._submit if arriving is None else self._execute)(instance)
            if isinstance(instance.op, type(under_way.open.op)):
                return True
        raise RunError("the plan ends within a pass")

    def buckets(self, first: Instance) -> tuple[ops.Backward, ...]:
        """Return the operations of the backward pass that begins with an instance, up to the next forward pass."""
        return tuple(op for op in self._remaining.pass_from(first) if isinstance(op, ops.Backward))

    def drain(self) -> None:
        """Wait until all submitted instances are done."""
        self._streams.drain()

    def close(self) -> None:
        """Tell the threads to end."""
        self._streams.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end: the interpreter must not exit while one is inside a collective."""
        self._streams.join(timeout_s)

    def _on_end(self, instance: Instance, ended: Ended) -> None:
        if self._ticks:
            self._ticks.ended(instance, ended)
        if self._lifetimes:
            has_run = self._streams.lane(instance).cuda_stream is None
            self._lifetimes.end(instance, self._remaining.body(instance), has_run=has_run)

    def _submit(self, instance: Instance) -> None:
        self._submitted = instance.index
        self._streams.check()
        if isinstance(instance.op, ops.Tick):
            self._ticks.submitted(instance)
        self._streams.submit(instance)

    def _execute(self, instance: Instance) -> None:
        """Perform an instance in its lane."""
        with self._streams.lane(instance).active():
            self._begin(instance)
            if self._entries.passes_over(instance):
                self._streams.lane(instance).end(instance)
            elif isinstance(instance.op, ops.Forward | ops.Backward):
                self._pass_through(instance)
            else:
                if instance.lane.kind == "comm":
                    self._watch.position = max(self._watch.position, instance.index)
                self._perform(instance)
                self._streams.lane(instance).end(instance)

    def _begin(self, instance: Instance) -> None:
        self._streams.await_before(instance)
        self._streams.lane(instance).begin(instance)
        if self._lifetimes:
            self._lifetimes.begin(instance, self._remaining.body(instance))

    def _pass_through(self, instance: Instance) -> None:
        """Perform the pass that an instance begins; within a pass, `advance_pass` takes it from here."""
        if self._pass is not None:
            self._pass.open = instance
            return
        if isinstance(instance.op, ops.Backward):
            buckets = self.buckets(instance)
            self._pass = _Pass(instance, len(buckets))
            self._program.backward(buckets, self.advance_pass)
        else:
            forwards = tuple(op for op in self._remaining.pass_from(instance) if isinstance(op, ops.Forward))
            self._pass = _Pass(instance, len(forwards))
            self._program.forward(forwards, instance.step, self.advance_pass)

    def _perform(self, instance: Instance) -> None:
        op = instance.op
        step = instance.step
        match op:
            case ops.AllReduce() | ops.ReduceScatter() | ops.AllGather() | ops.Reduce() | ops.Broadcast():
                self._world.perform(op, self._memory)
            case ops.Enter():
                if op.awaits and self._world.is_over():
                    self._entries.late_step = step
            case ops.Load():
                self._program.load(op, self._remaining.loads.number(instance))
            case ops.Tick():
                self._ticks.wait(instance)
            case ops.Delay():
                self._delays.sleep(op, step)
            case ops.KernelLaunch():
                self._program.launch(op)
            case ops.Wait() | ops.Forward() | ops.Backward():  # done when its dependencies are; passes are elsewhere
                pass
            case _:
                self._program.perform(op, step)


@final
class _Entries:
    """Which steps a rank sits out.

    Args:
        remaining: The plan.
        rank: The rank.

    Attributes:
        late_step: The last step that the rank sat out because it was late.
    """

    def __init__(self, remaining: RemainingPlan, rank: int) -> None:
        self.late_step = -1
        self._remaining = remaining
        self._rank = rank
        self._enters = [ops.entering(body) for body in remaining.plan.bodies]
        self._has_any = any(self._enters)

    def sits_out(self, step: int) -> bool:
        """Tell whether the rank sits a step out, by the plan or because it was late when it was about to enter."""
        enter = self._enters[self._remaining.steps.body(step)]
        return enter is not None and (self._rank in enter.absent or self.late_step == step)

    def passes_over(self, instance: Instance) -> bool:
        """Tell whether the rank passes over an instance of a step that it sits out."""
        enter = self._enters[self._remaining.body(instance)] if self._has_any else None
        return ops.is_passed_over(instance.op, enter) and self.sits_out(instance.step)


@final
class _Delays:
    """Performs the delays of one rank.

    Args:
        plan: The plan.
        delays: Those of one seed.
        rank: The rank.
        device: Device of computation. On a GPU, a kernel performs delays of computation.
        interrupted: Ends a delay early.
    """

    def __init__(
        self, plan: Plan, delays: Delays, rank: int, device: torch.device, interrupted: threading.Event
    ) -> None:
        self._late_s = {op: seconds_of(op, delays)[0, :, rank].tolist() for op in delays_of(plan)}
        of_device = (any(late_s) for op, late_s in self._late_s.items() if ops.lane_of(op).kind == "compute")
        self._spin = Spin(device) if device.type == "cuda" and any(of_device) else None
        self._interrupted = interrupted

    def sleep(self, op: ops.Delay, step: int) -> None:
        """Perform a delay of a step."""
        seconds = self._late_s[op][step]
        if ops.lane_of(op).kind == "compute" and self._spin:
            self._spin(seconds)
        else:
            sleep_s(seconds, self._interrupted)
