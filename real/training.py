"""Schedules for a training loop that exists already: wrap the model and the optimizer, and keep the loop.

    with real.wrap(model, optimizer, LocalSGD(period=4), n_steps=1000) as worker:
        for step in worker.steps():
            inputs, targets = batch(step, worker.rank)
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()

As with DistributedDataParallel and Horovod, nothing else changes: learning rate schedulers, gradient clipping, mixed
precision and hooks of the user work as before. When `backward()` returns, gradients are synchronised as the schedule
says; when `optimizer.step()` returns, parameters are. `real.hooks` tells how.

What is performed is a plan, the same that the simulator takes; nothing here knows what schedules are.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, final

import numpy as np
import torch
from torch import nn

from real.clock import Clocks, common_start_s, compare
from real.executor import Executor, Lanes
from real.hooks import Hooks, check_shape
from real.memory import Memory
from real.peers import Peers, meet_peers
from real.programs.binding import Binding, trained_parameters
from real.programs.loop import LoopProgram
from real.recorder import Recorder, Silent
from real.resuming import Resuming
from real.states import State, Stateful, carried_buffers, fingerprint
from real.traces import gather
from real.worlds import ProcessWorld, groups_of
from simdist import rundir
from simdist.check import check
from simdist.engines.delays import Delays, check_delays
from simdist.errors import PlanError, RunError, ScenarioError, UnsupportedError
from simdist.plan import Delay, Plan, load
from simdist.plan.plan import DType
from simdist.proof import prove
from simdist.schedules import Job, Schedule

__all__ = ["Worker", "wrap"]

_LAST_COLLECTIVE_S = 5.0  # for one that fails because another rank has

_DTYPES: Mapping[torch.dtype, DType] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


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
        module: What the loop calls, already on its device. Parameters that are not trained are left alone.
        optimizer: Of the module's parameters.
        schedule: The schedule; or a plan; or a plan file or run directory, as `simdist plan -o` writes.
        n_steps: Steps in all, of a schedule; a plan has its own.
        delays: Injected delays, channel -> float64 `[n_steps, world_size]`, seconds; by default those of the run
            directory, else none.
        checkpoint: Folder of checkpoints, which only rank 0 uses. The loop goes on from the newest one there.
        every: Steps from one checkpoint to the next. One is written after the last step, too.
        also: What else belongs into a checkpoint, by name, such as learning rate schedulers and gradient scalers.
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
    device = _device(module)
    _check_optimizer(module, optimizer)
    with ExitStack() as stack:
        peers = stack.enter_context(meet_peers(device, timeout_s))
        plan, delays = _planned(schedule, delays, _Wanted(module, n_steps, ranks_per_node, peers.world_size))
        peers.agree("the plan", f"{plan.name} ({plan.digest()[:12]})")
        peers.agree("the model", fingerprint(module, optimizer))
        peers.agree("checkpoint and trace", f"{every if checkpoint else 'no'} {bool(trace)}")
        memory = Memory(plan, device, Binding.buffers_of(plan))
        hooks = Hooks(plan, module, optimizer, memory)
        binding = Binding(plan, module, memory)
        state = State(module, optimizer, memory, carried_buffers(plan), device, also or {})
        resuming = Resuming(plan, state, peers, folder=Path(checkpoint) if checkpoint else None, every=every)
        tracing = _Tracing(plan, peers, Path(trace)) if trace else None
        executor = _executor(plan, delays, memory, peers, resuming.first_step, tracing)
        stack.callback(executor.close)
        stack.callback(hooks.release)
        worker = Worker(plan, peers, hooks, executor, resuming, tracing, stack.pop_all())
        hooks.drive(executor, binding, peers, first_step=resuming.first_step, after_step=worker._after_step)
    return worker


@final
class Worker:
    """One rank of a training loop that follows a plan; made by `wrap`."""

    def __init__(
        self,
        plan: Plan,
        peers: Peers,
        hooks: Hooks,
        executor: Executor,
        resuming: Resuming,
        tracing: "_Tracing | None",
        until_closed: ExitStack,
    ) -> None:
        self._plan, self._peers, self._hooks, self._executor = plan, peers, hooks, executor
        self._resuming, self._tracing, self._until_closed = resuming, tracing, until_closed
        self._iterating = self._closed = False

    @property
    def rank(self) -> int:
        """Who this is, from 0."""
        return self._peers.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._peers.world_size

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._peers.device

    @property
    def plan(self) -> Plan:
        """What is performed."""
        return self._plan

    @property
    def n_steps(self) -> int:
        """Steps in all."""
        return self._plan.n_steps

    @property
    def step(self) -> int:
        """The step under way, or else the next one; at the beginning, the first one to do."""
        return self._hooks.step

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
            self._peers.agree("the step at the end of the loop", str(self.step))
            if self._tracing:
                self._tracing.finish()

    def _after_step(self) -> None:
        if not self._iterating:
            self._resuming.check_also()
            self._resuming.after(self.step, self._executor)


@final
class _Tracing:
    """Notes times, and brings them together at the end."""

    def __init__(self, plan: Plan, peers: Peers, path: Path) -> None:
        self._plan, self._peers, self._path = plan, peers, path
        self.recorder = Recorder(plan)
        self._at_start = compare()
        self._start_s = common_start_s(self._at_start)

    def finish(self) -> None:
        """Write the trace; all ranks take part."""
        times_s = self.recorder.times_s
        times_s[:, np.isnan(times_s[2])] = np.nan  # what has begun and not ended did not run
        clocks: tuple[Clocks, Clocks] = self._at_start, compare()
        source = f"training loop, {self._peers.backend} on {self._peers.device.type}"
        trace = gather(self.recorder, self._plan, start_s=self._start_s, clocks=clocks, source=source)
        if trace:
            rundir.save_trace(trace, self._path)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a plan is wanted for."""

    module: nn.Module
    n_steps: int | None
    ranks_per_node: int | None
    world_size: int


def _executor(
    plan: Plan, delays: Delays, memory: Memory, peers: Peers, first_step: int, tracing: _Tracing | None
) -> Executor:
    world = ProcessWorld(groups_of(plan), timeout_s=peers.timeout_s)
    world.warm_up(peers.device)
    return Executor(
        plan,
        rank=peers.rank,
        delays=delays,
        world=world,
        program=LoopProgram(memory),
        memory=memory,
        lanes=Lanes(peers.device, collectives_block=peers.collectives_block, compute_in_caller=True),
        recorder=tracing.recorder if tracing else Silent(),
        watch=peers.watch,
        first_step=first_step,
    )


def _planned(schedule: Schedule | Plan | Path | str, delays: Delays | None, wanted: _Wanted) -> tuple[Plan, Delays]:
    """Return the plan and the delays, checked."""
    if isinstance(schedule, Schedule):
        plan = _written(schedule, delays or {}, wanted)
    elif isinstance(schedule, Plan):
        plan = schedule
    elif (path := Path(schedule)).is_dir():
        run = rundir.read(path)
        plan, delays = run.plan, run.delays if delays is None else delays
    else:
        plan = load(path)
    _check_plan(plan, delays or {}, wanted)
    return plan, delays or {}


def _written(schedule: Schedule, delays: Delays, wanted: _Wanted) -> Plan:
    """Write the plan of a schedule for a model, and prove it."""
    if wanted.n_steps is None or wanted.n_steps < 1:
        raise ScenarioError(f"n_steps={wanted.n_steps}; write how many steps the loop has in all")
    ranks_per_node = _ranks_per_node(wanted)
    problems = schedule.problems(wanted.world_size, ranks_per_node)
    if problems:
        raise ScenarioError("; ".join(f"{schedule.name}: {name}: {problem}" for name, problem in problems))
    parameters = trained_parameters(wanted.module)
    job = Job(
        world_size=wanted.world_size,
        ranks_per_node=ranks_per_node,
        n_steps=wanted.n_steps,
        tensor_counts=tuple(parameter.numel() for parameter in parameters),
        dtype=_DTYPES[parameters[0].dtype],
        run_ahead_steps=None,  # the loop looks at its losses when it likes to
        delay_channels=frozenset(delays),
    )
    plan = schedule.plan(job)
    check(plan)
    prove(plan, lambda step: schedule.result(step, job))
    return plan


def _ranks_per_node(wanted: _Wanted) -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if wanted.ranks_per_node is None and not text.isdecimal():
        raise ScenarioError("LOCAL_WORLD_SIZE is not set, as torchrun does: write ranks_per_node=...")
    ranks_per_node = int(text) if wanted.ranks_per_node is None else wanted.ranks_per_node
    if ranks_per_node < 1 or wanted.world_size % ranks_per_node:
        raise ScenarioError(f"ranks_per_node={ranks_per_node} does not divide {wanted.world_size} ranks")
    return ranks_per_node


def _check_plan(plan: Plan, delays: Delays, wanted: _Wanted) -> None:
    check(plan)
    check_shape(plan)
    check_delays(plan, delays)
    if plan.world_size != wanted.world_size:
        raise RunError(f"plan {plan.name} is for {plan.world_size} ranks, and there are {wanted.world_size}")
    if wanted.n_steps not in (None, plan.n_steps):
        raise PlanError(f"plan {plan.name} has {plan.n_steps} steps; n_steps={wanted.n_steps}: leave it out")
    delayed = {op.channel for body in plan.bodies for op in body if isinstance(op, Delay)}
    if unused := sorted(set(delays) - delayed):
        raise PlanError(f"plan {plan.name} does not delay {', '.join(unused)}: leave these delays out")


def _device(module: nn.Module) -> torch.device:
    """Return where the trained parameters are; refuse what a plan cannot hold."""
    parameters = trained_parameters(module)
    if not parameters:
        raise UnsupportedError(f"{type(module).__name__} has no parameter that is trained")
    devices = {parameter.device for parameter in parameters}
    dtypes = {parameter.dtype for parameter in parameters}
    if len(devices) > 1 or devices.pop().type not in {"cpu", "cuda"}:
        found = ", ".join(sorted({str(parameter.device) for parameter in parameters}))
        raise UnsupportedError(f"{type(module).__name__} is on {found}; a wrapped model is on one CPU or CUDA device")
    if len(dtypes) > 1 or not dtypes <= _DTYPES.keys():
        found = ", ".join(sorted(map(str, dtypes)))
        raise UnsupportedError(
            f"{type(module).__name__} has parameters of {found}; a plan takes one type of: "
            f"{', '.join(_DTYPES.values())}"
        )
    return parameters[0].device


def _check_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    known = {id(parameter) for parameter in module.parameters()}
    strange = sum(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"])
    if strange:
        raise UnsupportedError(
            f"{type(optimizer).__name__} updates {strange} tensors that are no parameters of {type(module).__name__}, "
            f"so they would not be synchronised: make it of model.parameters()"
        )
