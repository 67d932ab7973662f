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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Protocol, TypeVar

import torch

from real.buffers.memory import Memory
from real.execution.gpu import GpuClock, Spin
from real.execution.lanes import CudaLane, DirectLane, Performer, ThreadLane
from real.execution.lifetimes import Lifetimes
from real.execution.ticks import Ended, Ticks
from real.programs.base import Program
from real.recording.recorder import Recorder
from real.recording.timing import sleep_s
from simdist.errors import RunError
from simdist.plan import Instance, Plan, ops
from simdist.plan.delays import Delays, delays_of, seconds_of
from simdist.plan.lanes import COMM, COMPUTE, HOST, IO
from simdist.plan.plan import StepIndex
from simdist.plan.walk import walk

OpT = TypeVar("OpT", bound=ops.Op)


@dataclass(frozen=True, slots=True)
class Lanes:
    """Settings of a rank's streams.

    Args:
        device: Device of computation.
        collectives_block: Collectives block their caller (gloo), so they need a thread. Those of NCCL are enqueued.
        compute_in_caller: On a CPU, the thread that walks the plan also computes, as in a user's own training loop.
            Otherwise a separate thread computes. On a GPU this makes no difference.
    """

    device: torch.device
    collectives_block: bool
    compute_in_caller: bool = False


class World(Protocol):
    """Performs collectives with the other ranks."""

    def perform(self, op: ops.Collective, memory: Memory) -> None:
        """Perform a collective; return when its result is ready, or enqueued on a GPU."""

    def is_over(self) -> bool:
        """Tell whether the next all-reduce that drops late ranks has happened without this rank."""


class Watch(Protocol):
    """Knows whether the run has failed, here or on another rank, and reports the progress of this rank.

    Args:
        position: Instance index of the last operation of the comm stream that has begun.
        failed: Set when the run has failed, which ends all waits.
    """

    position: int
    failed: threading.Event

    def check(self) -> None:
        """Raise RunError if the run has failed."""


@dataclass(slots=True)
class _Pass:
    """A running forward or backward pass: the operation of it that has begun, and the number of those still to end."""

    open: Instance
    n_left: int


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
        gives_back: Buffers of a sharded model have memory only while they are in use. This has no effect on a GPU,
            where a buffer may be in use after its last operation was enqueued.
    """

    def __init__(
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
        watch: Watch,
        first_step: int = 0,
        waiting: Callable[[], AbstractContextManager[object]] | None = None,
        gives_back: bool = False,
    ) -> None:
        self._plan = plan
        self._late_s = {op: seconds_of(op, delays)[0, :, rank].tolist() for op in delays_of(plan)}
        self._world = world
        self._program = program
        self._memory = memory
        self._watch = watch
        self._waiting = waiting
        self._errors: list[BaseException] = []  # from lanes, the first cause first
        self._submitted = -1
        self._steps = StepIndex(plan, [len(body) for body in plan.bodies])
        self._first_index = self._steps.before(first_step)
        self._loads = _Loads(plan, self._steps, first_step)
        self._order = (
            each
            for each in walk(plan, self._loads.first_step)
            if each.step >= first_step or each.index in self._loads.early
        )
        self._pass: _Pass | None = None
        self._passes: dict[tuple[int, int], tuple[ops.Forward | ops.Backward, ...]] = {}  # by body and first place
        self._enters = [ops.entering(body) for body in plan.bodies]
        self._rank = rank
        self._late_step = -1  # the last step that this rank sat out because it was late
        self._recorder = recorder
        self._ticks = Ticks(plan, watch.failed)
        self._device = lanes.device
        self._lanes = self._make_lanes(lanes)
        self._lifetimes = Lifetimes(plan, memory) if gives_back and not self._on_gpu else None
        self._communicating = {each.stream for each in plan.lanes if each.kind == "comm"}
        of_device = (any(late_s) for op, late_s in self._late_s.items() if ops.lane_of(op).kind == "compute")
        self._spin = Spin(lanes.device) if self._on_gpu and any(of_device) else None

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

    def run(self) -> None:
        """Perform all steps.

        Raises:
            RunError: Something failed, here or on another rank.
        """
        if self._lifetimes:
            self._lifetimes.start()
        try:
            for instance in self._order:
                self._submit(instance)
            self.drain()
        finally:
            self.close()

    def reach(self, kind: type[OpT]) -> tuple[Instance, OpT] | None:
        """Submit instances up to the next one of a kind, begin it and return it; None at the end of the plan."""
        for instance in self._order:
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
        self._lane(instance).end(instance)

    def sits_out(self, step: int) -> bool:
        """Tell whether this rank sits a step out, by the plan or because it was late when it was about to enter."""
        enter = self._enters[self._steps.body(step)]
        return enter is not None and (self._rank in enter.absent or self._late_step == step)

    def finish_step(self, step: int) -> None:
        """Submit the rest of a step."""
        last = self._steps.before(step + 1) - 1
        while self._submitted < last:
            self._submit(next(self._order))

    def advance_pass(self) -> bool:
        """End the running `Forward` or `Backward` and begin the next one of the pass; return whether there is one."""
        under_way = self._pass
        assert under_way is not None
        self._lane(under_way.open).end(under_way.open)
        under_way.n_left -= 1
        if not under_way.n_left:
            self._pass = None
            return False
        for instance in self._computing():
            (self._execute if self._computes_in_thread else self._submit)(instance)
            if isinstance(instance.op, type(under_way.open.op)):
                return True
        raise RunError("the plan ends within a pass")

    def buckets(self, first: Instance) -> tuple[ops.Backward, ...]:
        """Return the operations of the backward pass that begins with an instance, up to the next forward pass."""
        return tuple(op for op in self._pass_from(first) if isinstance(op, ops.Backward))

    def forwards(self, first: Instance) -> tuple[ops.Forward, ...]:
        """Return the operations of the forward pass that begins with an instance, up to its backward pass."""
        return tuple(op for op in self._pass_from(first) if isinstance(op, ops.Forward))

    def _pass_from(self, first: Instance) -> tuple[ops.Forward | ops.Backward, ...]:
        """Return the operations of a pass from an instance on."""
        body = self._steps.body(first.step)
        if (body, first.position) not in self._passes:
            rest = (
                op for op in self._plan.bodies[body][first.position :] if isinstance(op, ops.Forward | ops.Backward)
            )
            self._passes[body, first.position] = tuple(takewhile(lambda op: type(op) is type(first.op), rest))
        return self._passes[body, first.position]

    def drain(self) -> None:
        """Wait until all submitted instances are done."""
        for lane in self._lanes.values():
            lane.drain()
        self._check()

    def close(self) -> None:
        """Tell the threads to end."""
        for lane in self._lanes.values():
            lane.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end: the interpreter must not exit while one is inside a collective."""
        for lane in self._lanes.values():
            lane.join(timeout_s)

    def _make_lanes(self, lanes: Lanes) -> dict[str, Performer]:
        """Make the performer of each stream; lanes that share a communicator take turns in program order."""
        performed = self._execute, self._recorder, self._on_end
        device = self._device
        failed = self._check

        def thread(stream: str) -> ThreadLane:
            return ThreadLane(*performed, name=stream, device=device, failed=failed, on_error=self._errors.append)

        compute: Performer
        in_thread = not self._on_gpu or lanes.collectives_block or bool(self._ticks)
        used = {COMM, IO, *(ops.lane_of(op) for body in self._plan.bodies for op in body)}
        if self._on_gpu:
            enqueued = partial(CudaLane, *performed, clock=GpuClock(torch.cuda.Stream(device)), failed=failed)
            compute = enqueued(torch.cuda.current_stream(device))
        else:
            compute = DirectLane(*performed) if lanes.compute_in_caller else thread("compute")
        made: dict[str, Performer] = {HOST.stream: DirectLane(*performed), COMPUTE.stream: compute}
        for each in self._plan.lanes:
            if each in used and each.stream not in made:
                enqueues = each.kind == "comm" and not in_thread
                made[each.stream] = enqueued(torch.cuda.Stream(device)) if enqueues else thread(each.stream)
        return made

    def _on_end(self, instance: Instance, ended: Ended) -> None:
        if self._ticks:
            self._ticks.ended(instance, ended)
        if self._lifetimes:
            self._lifetimes.end(instance, self._steps.body(instance.step))

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def _computes_in_thread(self) -> bool:
        return isinstance(self._lanes[COMPUTE.stream], ThreadLane)

    def _computing(self) -> Iterator[Instance]:
        """Return the source of the next compute operation."""
        lane = self._lanes[COMPUTE.stream]
        return lane.instances() if isinstance(lane, ThreadLane) else self._order

    def _lane(self, instance: Instance) -> Performer:
        return self._lanes[instance.lane.stream]

    def _submit(self, instance: Instance) -> None:
        self._submitted = instance.index
        self._check()
        if isinstance(instance.op, ops.Tick):
            self._ticks.submitted(instance)
        self._lane(instance).submit(instance)

    def _check(self) -> None:
        if self._errors:
            raise self._errors[0]
        self._watch.check()

    def _execute(self, instance: Instance) -> None:
        """Perform an instance in its lane."""
        with self._lane(instance).active():
            self._begin(instance)
            if self._passes_over(instance):
                self._lane(instance).end(instance)
            elif isinstance(instance.op, ops.Forward | ops.Backward):
                self._pass_through(instance)
            else:
                if instance.lane.kind == "comm":
                    self._watch.position = max(self._watch.position, instance.index)
                self._perform(instance)
                self._lane(instance).end(instance)

    def _passes_over(self, instance: Instance) -> bool:
        enter = self._enters[self._steps.body(instance.step)] if any(self._enters) else None
        return ops.is_passed_over(instance.op, enter) and self.sits_out(instance.step)

    def _begin(self, instance: Instance) -> None:
        lane = self._lane(instance)
        with self._context_of_wait(instance):
            for index in instance.after:
                if index >= self._first_index or index in self._loads.early:
                    self._lanes[self._stream(index, instance)].order(index, lane.cuda_stream)
        lane.begin(instance)
        if self._lifetimes:
            self._lifetimes.begin(instance, self._steps.body(instance.step))

    def _context_of_wait(self, instance: Instance) -> AbstractContextManager[object]:
        """Return the context in which an instance waits for those before it."""
        if self._waiting is None or instance.lane.kind not in {"compute", "host"}:
            return nullcontext()
        streams = (self._stream(index, instance) for index in instance.after if index >= self._first_index)
        return nullcontext() if self._communicating.isdisjoint(streams) else self._waiting()

    def _stream(self, index: int, later: Instance) -> str:
        """Return the stream of instance `index`, which comes before `later`."""
        step = later.step
        first = later.index - later.position
        if index < first:
            step = self._steps.step(index)
            first = self._steps.before(step)
        return ops.lane_of(self._plan.bodies[self._steps.body(step)][index - first]).stream

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
            forwards = self.forwards(instance)
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
                    self._late_step = step
            case ops.Load():
                self._program.load(op, self._loads.number(instance))
            case ops.Tick():
                self._ticks.wait(instance)
            case ops.Delay():
                self._delay(op, step)
            case ops.Wait() | ops.Forward() | ops.Backward():  # done when its dependencies are; passes are elsewhere
                pass
            case _:
                self._program.perform(op, step)

    def _delay(self, op: ops.Delay, step: int) -> None:
        seconds = self._late_s[op][step]
        if ops.lane_of(op).kind == "compute" and self._spin:
            self._spin(seconds)
        else:
            sleep_s(seconds, self._watch.failed)


class _Loads:
    """Numbers the loads of a plan, and finds loads before a first step with batches for it or for later steps.

    Attributes:
        early: Instances of these loads.
        first_step: The first step that contains one of them, or else the first step to perform.
    """

    def __init__(self, plan: Plan, steps: StepIndex, first_step: int) -> None:
        self._steps = steps
        self.first_step = first_step
        self._places = [[at for at, op in enumerate(body) if isinstance(op, ops.Load)] for body in plan.bodies]
        self._loads = StepIndex(plan, [len(places) for places in self._places])
        while self.first_step and self._loads.before(self.first_step) > first_step:
            self.first_step -= 1
        self.early = frozenset(
            steps.before(step) + at
            for step in range(self.first_step, first_step)
            for nth, at in enumerate(self._places[steps.body(step)])
            if self._loads.before(step) + nth >= first_step
        )

    def number(self, instance: Instance) -> int:
        """Return the number of a load, which is also the number of its batch."""
        places = self._places[self._steps.body(instance.step)]
        return self._loads.before(instance.step) + places.index(instance.position)
