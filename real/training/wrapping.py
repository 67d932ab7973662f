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

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, final

import numpy as np
import torch
from torch import Tensor, nn

from real.buffers import transforms
from real.buffers.memory import Memory
from real.checkpoints.checkpoint import Checkpoints, JobIdentity
from real.checkpoints.rank_state import LEARNED, SECTIONS, RankState, Stateful, carried_buffers, fingerprint
from real.collectives import byte_transfer
from real.collectives.worlds import ProcessWorld, groups_of, scratch_nbytes
from real.execution.executor import Executor, Lanes
from real.programs.binding import Binding
from real.programs.module import LoopProgram
from real.programs.optimizers import Rating
from real.recording.clock import Clocks, common_start_s, compare
from real.recording.recorder import Recorder, gather
from real.training.feeding import LoopBatches, open_batches
from real.training.hooks import Hooks
from real.training.planning import PlanRequest, check_optimizer, device_of, planned
from real.training.ranks import Ranks, meet_ranks
from simdist.errors import RunError, ScenarioError
from simdist.plan import Plan
from simdist.plan.delays import Delays
from simdist.runs import run_directory
from simdist.schedules import Schedule

_LAST_COLLECTIVE_S = 5.0  # for one that fails because another rank has


def wrap(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule | Plan | Path | str,
    *,
    n_steps: int | None = None,
    delays: Delays | None = None,
    checkpoint: Path | str | None = None,
    every: int = 100,
    also: Mapping[str, Stateful] | None = None,
    trace: Path | str | None = None,
    ranks_per_node: int | None = None,
    timeout_s: float = 60.0,
) -> "Worker":
    """Let a training loop follow a schedule; all ranks call this.

    Parameters, module buffers and the state of the optimizer become those of rank 0, or of the newest checkpoint.

    Args:
        module: The model that the loop calls, already on its device. Parameters that are not trained are left alone.
        optimizer: Of the module's parameters.
        schedule: The schedule; or a plan; or a plan file or run directory, as `simdist plan -o` writes.
        n_steps: Steps in all, of a schedule; a plan has its own.
        delays: Injected delays, channel -> float64 `[1, n_steps, world_size]`, seconds; by default those of the run
            directory, else none.
        checkpoint: Folder of checkpoints, which only rank 0 uses. The loop goes on from the newest one there.
        every: Steps from one checkpoint to the next. One is written after the last step, too.
        also: Other objects of a checkpoint, by name, such as learning rate schedulers and gradient scalers.
        trace: File in which rank 0 leaves the trace of the run.
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
    device = device_of(module)
    check_optimizer(module, optimizer)
    with ExitStack() as stack:
        ranks = stack.enter_context(meet_ranks(device, timeout_s))
        plan, delays = planned(
            schedule, delays, PlanRequest(module, optimizer, n_steps, ranks_per_node, ranks.world_size)
        )
        ranks.agree("the plan", f"{plan.name} ({plan.digest()[:12]})")
        ranks.agree("the model", fingerprint(module, optimizer))
        ranks.agree("checkpoint and trace", f"{every if checkpoint else 'no'} {bool(trace)}")
        memory = Memory(plan, device, Binding.buffers_of(plan), scratch_nbytes=scratch_nbytes(plan))
        hooks = Hooks(plan, module, optimizer, memory)
        stack.callback(hooks.release)
        binding = Binding(plan, module, memory)
        stack.callback(binding.buckets.release)
        rating = Rating(plan, binding, optimizer, memory, ranks.rank)
        stack.callback(rating.release)
        carried = tuple(name for name in carried_buffers(plan) if name in memory)  # batches and losses are the loop's
        state = RankState(module, optimizer, memory, carried, device, also or {})
        resuming = _Resuming(plan, state, ranks, folder=Path(checkpoint) if checkpoint else None, every=every)
        tracing = _Tracing(plan, ranks, Path(trace)) if trace else None
        program = LoopProgram(memory, rating, ranks.rank)
        executor = _executor(plan, delays, memory, ranks, program, resuming.first_step, tracing)
        stack.callback(executor.close)
        worker = Worker(plan, ranks, hooks, executor, resuming, tracing, stack.pop_all())
        hooks.drive(executor, binding, rating, ranks, first_step=resuming.first_step, after_step=worker._after_step)
    return worker


@final
class Worker:
    """One rank of a training loop that follows a plan; made by `wrap`.

    Attributes:
        rank: Which one, from 0.
        world_size: How many ranks there are.
        device: Where the model is.
        plan: The plan that is performed.
        n_steps: Steps in all.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        hooks: Hooks,
        executor: Executor,
        resuming: "_Resuming",
        tracing: "_Tracing | None",
        until_closed: ExitStack,
    ) -> None:
        self.rank, self.world_size, self.device = ranks.rank, ranks.world_size, ranks.device
        self.plan, self.n_steps = plan, plan.n_steps
        self._ranks, self._hooks, self._executor = ranks, hooks, executor
        self._resuming, self._tracing, self._until_closed = resuming, tracing, until_closed
        self._iterating = self._closed = False

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
        opened = open_batches(self.plan, self._ranks, first_step=self.step, url=url, cache=folder, timeout_s=timeout_s)
        return self._until_closed.enter_context(opened)

    def steps(self) -> Iterator[int]:
        """Yield every step that is left to do; checkpoints are written where the loop asks for the next one.

        Raises:
            RunError: The loop asks for the next step and has not done this one; or see `wrap`.
        """
        self._iterating = True
        self._resuming.rewind_random()
        while self.step < self.n_steps:
            step = self.step
            yield step
            self._hooks.settle()
            if self.step != step + 1:
                raise RunError(
                    f"step {step}: the loop asks for the next one {self._hooks.where}; a step is one forward pass in "
                    f"training mode, one loss.backward() and one optimizer.step()"
                )
            self._resuming.after(self.step, self._executor)

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
        if error is not None:
            try:
                self._until_closed.__exit__(kind, error, traceback)
            finally:
                self._executor.join(_LAST_COLLECTIVE_S)
            return
        with self._until_closed:
            self._hooks.settle()
            self._executor.drain()
            with self._leaving_early():
                self._ranks.agree("the step at the end of the loop", str(self.step))
            if self._tracing:
                self._tracing.finish()

    @contextmanager
    def _leaving_early(self) -> Iterator[None]:
        """Say, if the others do not end their loops, that it was this rank that left."""
        try:
            yield
        except RunError as error:
            if self.step == self.n_steps:
                raise
            left = f"this rank left its loop before step {self.step} of {self.n_steps}"
            raise RunError(f"{left}; all ranks have to leave before the same one: {error}") from None

    def _after_step(self) -> None:
        if not self._iterating:
            self._resuming.check_also()
            self._resuming.after(self.step, self._executor)


@final
class _Tracing:
    """Notes times, and brings them together at the end."""

    def __init__(self, plan: Plan, ranks: Ranks, path: Path) -> None:
        self._plan, self._ranks, self._path = plan, ranks, path
        self.recorder = Recorder(plan)
        self._at_start = compare()
        self.start_s = common_start_s(self._at_start)

    def finish(self) -> None:
        """Write the trace; all ranks take part."""
        times_s = self.recorder.times_s
        times_s[:, np.isnan(times_s[2])] = np.nan  # what has begun and not ended did not run
        clocks: tuple[Clocks, Clocks] = self._at_start, compare()
        source = f"training loop, {self._ranks.backend} on {self._ranks.device.type}"
        trace = gather(self.recorder, self._plan, start_s=self.start_s, clocks=clocks, source=source)
        if trace:
            run_directory.save_trace(trace, self._path)


def _executor(
    plan: Plan,
    delays: Delays,
    memory: Memory,
    ranks: Ranks,
    program: LoopProgram,
    first_step: int,
    tracing: _Tracing | None,
) -> Executor:
    world = ProcessWorld(groups_of(plan), timeout_s=ranks.timeout_s)
    transforms.warm_up(plan, memory)
    world.warm_up(plan, ranks.device)
    executor = Executor(
        plan,
        rank=ranks.rank,
        delays=delays,
        world=world,
        program=program,
        memory=memory,
        lanes=Lanes(ranks.device, collectives_block=ranks.collectives_block, compute_in_caller=True),
        recorder=tracing.recorder if tracing else None,
        watch=ranks.watch,
        first_step=first_step,
    )
    if tracing:
        executor.start_clock(tracing.start_s)
    elif executor.has_ticks:  # they fall at the same time on all ranks
        executor.start_clock(common_start_s(compare()))
    return executor


@final
class _Resuming:
    """Keeps the state of one rank.

    Args:
        plan: The plan to perform.
        state: Of this rank.
        ranks: The others; all of them make this together.
        folder: For checkpoints; None writes none.
        every: Steps from one to the next.

    Raises:
        RunError: The checkpoint is of another job, or damaged; the state holds what cannot be saved.
    """

    def __init__(self, plan: Plan, state: RankState, ranks: Ranks, *, folder: Path | None, every: int) -> None:
        self._plan, self._state, self._ranks, self._every = plan, state, ranks, every
        self.first_step = 0
        self._random: Tensor | None = None
        self._checkpoints: Checkpoints | None = None
        if folder:
            state.restore("also", state.pack("also"))  # now, and not after the first hours, see that it can be saved
            model = fingerprint(state.module, state.optimizer)
            job = JobIdentity(plan.name, plan.digest(), plan.world_size, model)
            self._checkpoints = Checkpoints(folder, job, group=ranks.patient_group(), wait=self._wait)
        self._begin()

    def rewind_random(self) -> None:
        """Set the random numbers to where they were before the first step, if that is after a checkpoint."""
        if self._random is not None:
            self._state.restore("random", self._random)

    def after(self, step: int, executor: Executor) -> None:
        """Write a checkpoint, if one is due after so many steps.

        Args:
            step: The next step.
            executor: Is waited for.
        """
        if self._checkpoints and (step % self._every == 0 or step == self._plan.n_steps):
            executor.drain()
            self._checkpoints.save(step, self._packed(SECTIONS))

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
            self.first_step, self._random = resumed.step, resumed.sections["random"]
            return
        sent = self._packed(LEARNED) if self._ranks.rank == 0 else {}
        for section in LEARNED:
            self._state.restore(section, byte_transfer.broadcast(sent.get(section)))

    def _packed(self, sections: tuple[str, ...]) -> Mapping[str, Tensor]:
        return {section: self._state.pack(section) for section in sections}

    def _wait(self, function: Callable[[], None]) -> None:
        self._ranks.wait(function, "a checkpoint")
