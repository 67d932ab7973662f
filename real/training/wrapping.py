"""Schedules for a training loop that exists already: wrap the model and the optimizer, and keep the loop.

    with real.wrap(model, optimizer, LocalSGD(period=4), n_steps=1000) as worker:
        for step in worker.steps():
            inputs, targets = batch(step, worker.rank)
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()

As with DistributedDataParallel and Horovod, nothing else changes: learning rate schedulers, gradient clipping, mixed
precision and hooks of the user work as before. When `backward()` returns, gradients are synchronised as the schedule
says; when `optimizer.step()` returns, parameters are. `real.training.hooks` tells how.

It performs a plan, the same that the simulator takes; nothing here knows what schedules are.
"""

import atexit
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from real.buffers import transforms
from real.buffers.memory import Memory, buffers_in_place
from real.checkpoints.checkpoint import Checkpoints, JobIdentity
from real.checkpoints.rank_state import LEARNED, SECTIONS, RankState, Stateful, carried_buffers, fingerprint
from real.collectives import byte_transfer
from real.collectives.worlds import ProcessWorld, groups_of, scratch_nbytes
from real.execution.executor import Executor, Lanes
from real.execution.running import forget
from real.processes.launch import Connection
from real.programs.binding import Binding
from real.programs.module import LoopProgram
from real.programs.optimizers import MakeOptimizer, Outer, Rating, nesterov
from real.programs.sharing import shared_update
from real.recording.clock import Clocks, common_start_s, compare
from real.recording.recorder import RecordedPart, Recorder, gather, part_path, salvage, write_part
from real.training.feeding import LoopBatches, open_batches
from real.training.hooks import Hooks
from real.training.planning import ENDLESS_STEPS, PlanRequest, check_optimizer, device_of, planned
from real.training.ranks import average, last_of, meet_ranks, patient_group, wait
from simdist.errors import RunError, ScenarioError
from simdist.files import locked
from simdist.plan import Load, Plan
from simdist.plan.delays import Delays
from simdist.plan.ops import entering
from simdist.runs import run_directory
from simdist.schedules import Schedule

_LAST_COLLECTIVE_S = 5.0  # for one that fails because another rank has


def wrap(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule | Plan | Path | str,
    *,
    outer_optimizer: MakeOptimizer = nesterov,
    n_steps: int | None = None,
    first_step: int = 0,
    delays: Delays | None = None,
    checkpoint: Path | str | None = None,
    every: int = 100,
    also: Mapping[str, Stateful] | None = None,
    trace: Path | str | None = None,
    final_average: bool = True,
    average_buffers: bool = False,
    ranks_per_node: int | None = None,
    timeout_s: float = 60.0,
) -> "Worker":
    """Let a training loop follow a schedule; all ranks call this.

    Parameters, module buffers and the state of the optimizer become those of rank 0, or of the newest checkpoint.

    Args:
        module: The model that the loop calls, already on its device. Parameters that are not trained are left alone.
        optimizer: Of the module's parameters.
        schedule: The schedule; or a plan; or a plan file or run directory, as `simdist plan -o` writes.
        outer_optimizer: Makes DiLoCo's outer optimizer of a list of parameters, all that are trained; by default
            `torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)`.
        n_steps: Steps in all, of a schedule, or None: as many as the loop likes; a plan has its own.
        first_step: The step to begin with, where a script goes on from what it has saved itself.
        delays: Injected delays, channel -> float64 `[1, n_steps, world_size]`, seconds; by default those of the run
            directory, else none.
        checkpoint: Folder of checkpoints, which only rank 0 uses. The loop goes on from the newest one there.
        every: Steps from one checkpoint to the next. One is written after the last step, too.
        also: Other objects of a checkpoint, by name, such as learning rate schedulers and gradient scalers.
        trace: File in which rank 0 leaves the trace of the run.
        final_average: Average the parameters over all ranks at the end of the loop, if they differ then.
        average_buffers: Then average the buffers of floating-point numbers, too, such as BatchNorm's.
        ranks_per_node: Ranks of one machine, for a schedule; by default as torchrun says.
        timeout_s: For each wait for others.

    Returns:
        A context manager; without a `with` statement it is to be closed at the end.

    Raises:
        PlanError: The plan is not legal, or of another model.
        ScenarioError: The schedule does not fit the world.
        UnsupportedError: A training loop cannot perform the plan.
        RunError: A rank is missing, or wraps something else; a checkpoint is of another job, or damaged.
    """
    if every < 1:
        raise ScenarioError(f"every={every}; checkpoints are at least 1 step apart")
    if first_step < 0:
        raise ScenarioError(f"first_step={first_step}; steps count from 0")
    if timeout_s <= 0:
        raise ScenarioError(f"timeout_s={timeout_s}; write seconds, more than 0")
    if stateless := [name for name, each in (also or {}).items() if not isinstance(each, Stateful)]:
        raise ScenarioError(f"also: {', '.join(stateless)} has no state_dict() and load_state_dict(): leave it out")
    device = device_of(module)
    check_optimizer(module, optimizer)
    with ExitStack() as stack:
        connection = stack.enter_context(meet_ranks(device, timeout_s))
        wanted = PlanRequest(module, optimizer, n_steps, ranks_per_node, connection.place.world_size, final_average)
        found = planned(schedule, delays, wanted)
        plan = found.plan
        for doubt in found.doubts if connection.place.rank == 0 else ():
            warnings.warn(f"{plan.name} {doubt}", stacklevel=2)
        if trace and plan.n_steps == ENDLESS_STEPS:
            raise ScenarioError("n_steps=None; a trace has a row for every operation: write n_steps=...")
        connection.agree("the plan", f"{plan.name} ({plan.digest()[:12]})")
        connection.agree("the model", fingerprint(module, optimizer))
        connection.agree(
            "first_step, checkpoint and trace", f"{first_step} {every if checkpoint else 'no'} {bool(trace)}"
        )
        names = Binding.buffers_of(plan, in_loop=True)
        in_place = buffers_in_place(plan)
        memory = Memory(plan, device, names, scratch_nbytes=scratch_nbytes(plan), in_place=in_place)
        hooks = Hooks(plan, module, optimizer, memory)
        stack.callback(hooks.release)
        binding = Binding(plan, module, memory)
        stack.callback(binding.buckets.release)
        rating = Rating(plan, binding, optimizer, memory, connection.place.rank)
        stack.callback(rating.release)
        shared = shared_update(plan, binding, optimizer, memory, connection.place.rank)
        if shared:
            stack.callback(shared.release)
        outer = Outer(plan, binding, memory, outer_optimizer)
        # Batches and losses are the loop's.
        carried = {name: memory.tensors(name) for name in carried_buffers(plan) if name in memory}
        state = RankState(module, optimizer, carried, device, also or {}, shared or optimizer, outer.optimizer)
        resuming = _Resuming(
            plan,
            found.endless,
            state,
            connection,
            first_step=first_step,
            folder=Path(checkpoint) if checkpoint else None,
            every=every,
            until_closed=stack,
        )
        if not resuming.is_resumed:
            outer.begin()  # once the parameters are those of rank 0
        tracing = stack.enter_context(_tracing(plan, connection, Path(trace))) if trace else None
        program = LoopProgram(memory, rating, outer, connection.place.rank)
        executor = _executor(plan, found.delays, memory, connection, program, resuming.first_step, tracing)
        stack.callback(executor.close)
        averaging = _Averaging(binding, module, connection, at_end=final_average, buffers_at_end=average_buffers)
        worker = Worker(plan, connection, hooks, executor, resuming, averaging, tracing, stack.pop_all())
        hooks.drive(
            executor,
            binding,
            rating,
            shared,
            connection.guard,
            first_step=resuming.first_step,
            after_step=worker._after_step,
        )
    atexit.register(worker._part_unclosed)
    return worker


@final
class Worker(nn.Module):
    """One rank of a training loop that follows a plan; made by `wrap`.

    To call it is to call the model. As a `DistributedDataParallel` it has `module`, `no_sync`, `join` and
    `require_backward_grad_sync`, so it may take that one's place in a script.

    Attributes:
        module: The model that was wrapped.
        rank: Which one, from 0.
        world_size: How many ranks there are.
        device: Where the model is.
        plan: The plan that is performed.
        n_steps: Steps in all; None if the end is not known.
    """

    def __init__(
        self,
        plan: Plan,
        connection: Connection,
        hooks: Hooks,
        executor: Executor,
        resuming: "_Resuming",
        averaging: "_Averaging",
        tracing: "_Tracing | None",
        until_closed: ExitStack,
    ) -> None:
        super().__init__()
        self.module = averaging.module
        self.rank = connection.place.rank
        self.world_size = connection.place.world_size
        self.device = connection.device
        self.plan = plan
        self.n_steps = None if plan.n_steps == ENDLESS_STEPS else plan.n_steps
        self._connection = connection
        self._hooks = hooks
        self._executor = executor
        self._resuming = resuming
        self._tracing = tracing
        self._until_closed = until_closed
        self._averaging = averaging
        self._concluded = resuming.first_step
        self._iterating = self._ended = self._closed = self._told = False
        self._reads = not any(isinstance(op, Load) for body in plan.bodies for op in body)  # as the plan says, or not
        self._join_group: dist.ProcessGroup | None = None

    def forward(self, *inputs: object, **options: object) -> object:
        """Call the model."""
        if self.module.training and torch.is_grad_enabled():
            self._check_open("a pass in training mode")
        return self.module(*inputs, **options)

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
        """Copy the bare model, as `AveragedModel` does."""
        return copy.deepcopy(self.module, memo)

    @property
    def step(self) -> int:
        """The step under way, or else the next one; at the beginning, the first one to do."""
        return self._hooks.step

    def feed(self, url: str, *, cache: Path | str | None = None, timeout_s: float = 60.0) -> LoopBatches:
        """Read the plan's data set for this rank, from the next step on; all ranks call this.

            batches = worker.feed("/mnt/imagenet", cache="/nvme/cache")
            for step, (images, labels) in zip(worker.steps(), batches):
                ...

        Args:
            url: Of the folder with `index.csv`; it must be the data set of the plan.
            cache: Folder on this node's disk for files; it is kept, so that a restart finds them. By default a
                temporary one of this user.
            timeout_s: How long a file is tried, and other ranks are waited for.

        Returns:
            An iterator over batches, uint8 `[batch_size, *sample shape]` and int64 labels, on the device of the model.

        Raises:
            ScenarioError: The plan has no data set, or this is another one.
            RunError: It cannot be reached; or a rank is missing.
        """
        folder = None if cache is None else Path(cache)
        opened = open_batches(
            self.plan, self._connection, first_step=self.step, url=url, cache=folder, timeout_s=timeout_s
        )
        self._reads = True
        return self._until_closed.enter_context(opened)

    def steps(self) -> Iterator[int]:
        """Yield every step that is left to do; checkpoints are written where the loop asks for the next one.

        Steps that the plan lets this rank sit out are not among them.

        A loop over epochs calls this in each of them; a step that was yielded and not begun is yielded again then.

        Raises:
            RunError: The loop asks for the next step and has not done this one; or see `wrap`.
        """
        self._check_open("worker.steps()")
        self._iterating = True
        self._hooks.settle()
        self._conclude()
        self._resuming.rewind_random()
        while self.step < self.plan.n_steps:
            if self._hooks.pass_over_step():
                self._conclude()
                continue
            step = self.step
            yield step
            self._hooks.settle()
            if self.step != step + 1:
                raise RunError(
                    f"step {step}: the loop asks for the next one {self._hooks.where}; a step is one forward pass in "
                    f"training mode, one loss.backward() and one optimizer.step(); in another epoch, call "
                    f"worker.steps() again"
                )
            self._conclude()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next pass belongs to the plan; one that does not only adds up gradients, as in `no_sync`."""
        return not self._hooks.accumulate

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._hooks.accumulate = not value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: passes in this context add theirs up on this rank, as in DDP's `no_sync`.

            for step, micro_batches in zip(worker.steps(), batches):
                optimizer.zero_grad()
                for inputs, targets in micro_batches[:-1]:
                    with worker.no_sync():
                        loss_of(model(inputs), targets).backward()
                loss_of(model(micro_batches[-1].inputs), micro_batches[-1].targets).backward()
                optimizer.step()

        The pass after them belongs to the plan, and exchanges their sum. Both the forward and the backward pass of a
        micro-batch belong inside.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Train on data of which ranks have unequally much, as in DDP's `join`; all ranks do this together.

            with worker.join():
                for inputs, targets in loader:
                    ...

        A rank that is through takes part in the steps of the others without a gradient, and means are still those over
        all ranks. In the end all ranks have parameters, buffers and the optimizer's state of one that trained
        longest. Every step costs one exchange more.
        """
        self._check_open("worker.join()")
        self._hooks.check_unshared("worker.join()")
        if any(map(entering, self.plan.bodies)):
            raise RunError(f"worker.join(): ranks of {self.plan.name} sit steps out; give all of them enough data")
        if self._join_group is None:
            self._join_group = patient_group(self._connection)
        group = self._join_group
        last = 0
        active = True

        def meet() -> bool:
            nonlocal last
            found = wait(self._connection, lambda: last_of(active, group), "a step of joined ranks")
            last = last if found is None else found
            return found is not None

        with self._hooks.joined(meet):
            yield
        self._hooks.settle()
        self._conclude()
        active = False
        while meet():
            self._hooks.idle_step()
            self._conclude()
        self._executor.drain()
        wait(self._connection, lambda: self._resuming.take_over(last, group), "the end of joined ranks")

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients as `torch.nn.utils.clip_grad_norm_` does, also where ranks share updates.

        There, each has a slice of the mean gradients, so all ranks call this, before `optimizer.step()`.

        Args:
            max_norm: Of all gradients together.

        Returns:
            Their norm before, a scalar.

        Raises:
            RunError: The backward pass is not over; or a rank is missing.
        """
        return self._hooks.clip_grad_norm(max_norm, self._connection.group)

    def average(self, *, buffers: bool = False) -> None:
        """Replace the parameters by their means over all ranks, between two passes, such as for an evaluation.

        All ranks call this before the same pass. It changes what training goes on from: under local SGD it is one
        average more than the schedule has.

        Args:
            buffers: Also the buffers of floating-point numbers.

        Raises:
            RunError: A pass or an update is under way, or the loop is closed; or a rank is missing.
        """
        self._check_open("worker.average()")
        self._hooks.check_between_steps("worker.average()")
        self._executor.drain()
        self._averaging.average(buffers=buffers)
        self._tell_left_out()

    def close(self) -> None:
        """Wait for what is under way, write the trace, and part from the other ranks.

        Raises:
            RunError: The ranks have not done the same steps, or one of them has failed.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._part_unclosed)
        try:
            if error is not None:
                self._until_closed.__exit__(kind, error, traceback)
                return
            with self._until_closed:
                self._hooks.settle()
                self._executor.drain()
                self._conclude(at_end=True)
                if self._tracing:
                    self._tracing.finish()
        finally:
            self._executor.join(_LAST_COLLECTIVE_S)

    @contextmanager
    def _leaving_early(self) -> Iterator[None]:
        """Say, if the others do not end their loops, that it was this rank that left."""
        try:
            yield
        except RunError as error:
            if self.n_steps is None or self.step == self.n_steps:
                raise
            left = f"this rank left its loop before step {self.step} of {self.n_steps}"
            raise RunError(f"{left}; all ranks have to leave before the same one: {error}") from None

    def _part_unclosed(self) -> None:
        """Part from the other ranks as a script ends that has not closed its loop; rank 0 says what was left out."""
        if error := vars(sys).get("last_value"):
            self._connection.guard.fail(str(error) or type(error).__name__)
        elif self.rank == 0 and not self._ended:
            warnings.warn(
                f"{self.plan.name}: the loop was not closed, so nothing was averaged or saved at its end: call "
                f"worker.close() on all ranks, before the model is saved and the process group is destroyed",
                RuntimeWarning,
                stacklevel=1,
            )
        self._connection.guard.leave()
        self._executor.close()
        self._executor.join(_LAST_COLLECTIVE_S)

    def _check_open(self, doing: str) -> None:
        """Refuse what would not be synchronised any more."""
        if self._closed:
            raise RunError(f"{doing} after the loop was closed; do that before, or call real.wrap again")

    def _after_step(self) -> None:
        if not self._iterating:
            self._resuming.check_also()
            self._conclude()

    def _conclude(self, *, at_end: bool = False) -> None:
        """Do what comes after the last step that was done; at the end of the loop, average, both once."""
        is_new = self.step > self._concluded
        self._concluded = self.step
        is_last = self.step == self.plan.n_steps or (at_end and self.n_steps is None)
        ends = meets = (at_end or is_last) and not self._ended
        if ends:
            self._ended = True
            with self._leaving_early():
                self._connection.agree("the step at the end of the loop", str(self.step))
        if is_new and not is_last:
            meets |= self._resuming.after(self.step, self._executor)
        if ends:
            self._executor.drain()
            if self._averaging.at_end:
                self._averaging.average(buffers=self._averaging.buffers_at_end)
            if is_last and self.step > self._resuming.first_step:
                self._resuming.after(self.step, self._executor, is_last=True)
        if meets:
            self._tell_left_out()
        if is_new and not self._reads and self.rank == 0:
            self._reads = True
            warnings.warn(
                f"{self.plan.name} reads its batches, and the loop brings its own, so what the plan says of that has "
                f"no effect and takes no time in a trace: use worker.feed(...), with `data` in the scenario",
                RuntimeWarning,
                stacklevel=2,
            )

    def _tell_left_out(self) -> None:
        """Warn once if ranks have left out different updates; all of them are here."""
        found = self._connection.exchange("updates that were left out", self._hooks.left_out)
        if len(set(found)) == 1 or self._told:
            return
        self._told = True
        if self.rank == 0:
            named = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(found) if each != "0")
            warnings.warn(
                f"{self.plan.name} until step {self.step}: ranks have left out different optimizer.step(), as gradient "
                f"scalers do after an overflow, so the scales of their scalers may differ: {named}",
                RuntimeWarning,
                stacklevel=2,
            )


@dataclass(frozen=True, slots=True)
class _Averaging:
    """Averages parameters, and buffers of the module, over all ranks.

    Args:
        binding: Of the parameters.
        module: The module.
        connection: To the others.
        at_end: Average at the end of the loop.
        buffers_at_end: Then average buffers, too.
    """

    binding: Binding
    module: nn.Module
    connection: Connection
    at_end: bool
    buffers_at_end: bool

    def average(self, *, buffers: bool) -> None:
        """Average now."""
        floating = [each for each in self.module.buffers() if buffers and each.is_floating_point()]
        average(self.connection, [*self.binding.parameter_buffers, *floating])


@contextmanager
def _tracing(plan: Plan, connection: Connection, path: Path) -> Iterator["_Tracing"]:
    """Note times in files beside the trace; all ranks take part.

    Of a run that fails, `NAME.partial.npz` has them; of one that is killed, after the next start.
    """
    parts = path.with_suffix(".parts")
    partial = path.with_suffix(".partial.npz")
    rank = connection.place.rank

    def keep() -> str:
        found = salvage(parts, plan)
        if found:
            run_directory.save_trace(found, partial, on_disk=True)
        return f"what was done is in {partial}" if found else ""

    def begin() -> Recorder:
        forget(parts, rank)
        return Recorder(plan, part_path(parts, rank))

    with ExitStack() as stack:
        problem = ""
        if rank == 0:
            try:
                stack.enter_context(locked(parts))
                if kept := keep():
                    warnings.warn(f"{path}: an earlier run ended early: {kept}", RuntimeWarning, stacklevel=2)
                recorder = begin()
            except RunError as error:
                problem = str(error)
        byte_transfer.raise_on_all(problem, group=connection.group)
        if rank:
            try:
                recorder = begin()
            except RunError:
                recorder = Recorder(plan)  # another machine need not have the folder
        try:
            yield _Tracing(plan, connection, path, parts, recorder)
        except BaseException as error:
            try:
                note = keep()
            except RunError as full:
                note = f"what was done is still in {parts}, and the next start keeps it ({full})"
            if note:
                error.add_note(note)
            raise
        forget(parts, rank)
    with suppress(OSError):
        parts.rmdir()


@final
class _Tracing:
    """Notes times, and brings them together at the end."""

    def __init__(self, plan: Plan, connection: Connection, path: Path, parts: Path, recorder: Recorder) -> None:
        self._plan = plan
        self._connection = connection
        self._path = path
        self.recorder = recorder
        self._at_start = compare(group=connection.group)
        self.start_s = common_start_s(self._at_start, group=connection.group)
        with suppress(OSError):
            write_part(parts, RecordedPart(connection.place.rank, plan.digest(), self.start_s))

    def finish(self) -> None:
        """Write the trace, unless there is nothing to tell, as of a job that was through; all ranks take part."""
        times_s = self.recorder.times_s
        times_s[:, np.isnan(times_s[2])] = np.nan  # what has begun and not ended did not run
        clocks: tuple[Clocks, Clocks] = self._at_start, compare(group=self._connection.group)
        source = f"training loop, {self._connection.backend} on {self._connection.device.type}"
        group = self._connection.group
        trace = gather(self.recorder, self._plan, start_s=self.start_s, clocks=clocks, source=source, group=group)
        problem = ""
        try:
            if trace and not np.isnan(trace.end_s).all():
                run_directory.save_trace(trace, self._path, on_disk=True)
        except RunError as error:
            problem = str(error)
        byte_transfer.raise_on_all(problem, group=group)


def _executor(
    plan: Plan,
    delays: Delays,
    memory: Memory,
    connection: Connection,
    program: LoopProgram,
    first_step: int,
    tracing: _Tracing | None,
) -> Executor:
    world = ProcessWorld(groups_of(plan), timeout_s=connection.timeout_s, everyone=connection.group)
    connection.made.extend(world.made)
    transforms.warm_up(plan, memory)
    world.warm_up(plan, connection.device)
    executor = Executor(
        plan,
        rank=connection.place.rank,
        delays=delays,
        world=world,
        program=program,
        memory=memory,
        lanes=Lanes(connection.device, collectives_block=connection.backend == "gloo", compute_in_caller=True),
        recorder=tracing.recorder if tracing else None,
        watch=connection.guard,
        first_step=first_step,
    )
    if tracing:
        executor.start_clock(tracing.start_s)
    elif executor.has_ticks:  # they fall at the same time on all ranks
        executor.start_clock(common_start_s(compare(group=connection.group), group=connection.group))
    return executor


@final
class _Resuming:
    """Keeps the state of one rank.

    Args:
        plan: The plan to perform.
        endless: What the job is known by.
        state: Of this rank.
        connection: To the others; all of them make this together.
        first_step: Where to begin without a checkpoint.
        folder: For checkpoints; None writes none.
        every: Steps from one to the next.
        until_closed: The folder is locked until then.

    Raises:
        RunError: The checkpoint is of another job, or damaged; the state holds what cannot be saved.
    """

    def __init__(
        self,
        plan: Plan,
        endless: Plan,
        state: RankState,
        connection: Connection,
        *,
        first_step: int,
        folder: Path | None,
        every: int,
        until_closed: ExitStack,
    ) -> None:
        self._state = state
        self._connection = connection
        self._every = every
        self.first_step = first_step
        self._random: Tensor | None = None
        self._checkpoints: Checkpoints | None = None
        if folder:
            state.restore("also", state.pack("also"))  # now, and not after the first hours, see that it can be saved
            model = fingerprint(state.module, state.optimizer)
            job = JobIdentity(plan.name, endless.digest(), plan.world_size, model)
            group = patient_group(connection)
            self._checkpoints = Checkpoints(folder, job, group=group, wait=self._wait, until_closed=until_closed)
        self._begin()
        if not 0 <= self.first_step <= plan.n_steps:
            begins = f"{folder}: its newest checkpoint is of {self.first_step} steps"
            raise RunError(
                f"{begins if self.is_resumed else f'first_step={first_step}'}, and n_steps={plan.n_steps}: "
                f"choose a larger number, or another folder"
            )

    @property
    def is_resumed(self) -> bool:
        """Whether the state is that of a checkpoint."""
        return self._random is not None

    def rewind_random(self) -> None:
        """Set the random numbers, once, to where they were before the first step, if that is after a checkpoint."""
        if self._random is not None:
            self._state.restore("random", self._random)
            self._random = None

    def after(self, step: int, executor: Executor, *, is_last: bool = False) -> bool:
        """Write a checkpoint, if one is due after so many steps, and tell whether.

        Args:
            step: The next step.
            executor: Is waited for.
            is_last: There is none.
        """
        if not self._checkpoints or (step % self._every and not is_last):
            return False
        executor.drain()
        self._checkpoints.save(step, self._packed(SECTIONS))
        return True

    def take_over(self, rank: int, group: dist.ProcessGroup | None) -> None:
        """Let all ranks have what one of them has learned."""
        sent = self._packed(LEARNED) if self._connection.place.rank == rank else {}
        for section in LEARNED:
            self._state.restore(section, byte_transfer.broadcast(sent.get(section), src=rank, group=group))

    def check_also(self) -> None:
        """Refuse what would be saved too early: a loop without `steps()` has not told that its step is over."""
        if self._checkpoints and self._state.also:
            names = ", ".join(self._state.also)
            raise RunError(
                f"checkpoints of {names} are written where the loop asks for its next step: "
                f"write `for step in worker.steps():`"
            )

    def _begin(self) -> None:
        resumed = self._checkpoints.resume() if self._checkpoints else None
        if resumed:
            for section in SECTIONS:
                self._state.restore(section, resumed.sections[section])
            self.first_step = resumed.step
            self._random = resumed.sections["random"]
            return
        self.take_over(0, self._connection.group)

    def _packed(self, sections: tuple[str, ...]) -> Mapping[str, Tensor]:
        return {section: self._state.pack(section) for section in sections}

    def _wait(self, function: Callable[[], None]) -> None:
        wait(self._connection, function, "a checkpoint")
