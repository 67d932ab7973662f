"""Schedules for an existing training loop: wrap the model and the optimizer, and keep the loop.

    with real.wrap(model, optimizer, LocalSGD(period=4), n_steps=1000) as worker:
        for step in worker.steps():
            inputs, targets = batch(step, worker.rank)
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()

As with DistributedDataParallel and Horovod, nothing else changes: learning rate schedulers, gradient clipping, mixed
precision and the user's hooks work as before. When `backward()` returns, gradients are synchronised as the schedule
says. When `optimizer.step()` returns, parameters are. `real.loops.hooks` describes the details.

The loop performs the same plan that the simulator takes. This module does not depend on the kind of schedule.
"""

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from real.buffers import transforms
from real.buffers.memory import buffers_in_place
from real.execution.executor import Executor
from real.execution.running import make_executor
from real.loops.bound_model import BoundModel, bound
from real.loops.foreign import device_of, optimizer_of
from real.loops.nodes import meet_nodes
from real.loops.options import Averaging, Checkpointing, Experiment, Launch, check_groups
from real.loops.planning import ENDLESS_STEPS, Planned, PlanRequest, plan_loop
from real.loops.ranks import everyone, meet_peers, meet_ranks
from real.loops.resuming import Resuming, resume
from real.loops.shards import shards_of
from real.loops.tracing import Measuring, Tracing, kept_times
from real.loops.worker import Worker
from real.processes.launch import Connection
from real.programs.binding import Binding
from real.programs.module import LoopProgram
from real.programs.rank_state import RankState, Stateful, fingerprint
from real.session import Session, Start, open_session
from real.watching.watch import StepWatch
from simdist.errors import ScenarioError
from simdist.plan import Plan
from simdist.plan.liveness import carried_buffers
from simdist.schedules import Schedule

_AVERAGING = Averaging()
_EXPERIMENT = Experiment()
_LAUNCH = Launch()


def wrap(  # noqa: PLR0913 (one for each option)
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule | Plan | Path | str,
    *,
    n_steps: int | None = None,
    first_step: int = 0,
    averaging: Averaging = _AVERAGING,
    checkpointing: Checkpointing | None = None,
    experiment: Experiment = _EXPERIMENT,
    launch: Launch = _LAUNCH,
) -> Worker:
    """Let a training loop follow a schedule. All ranks call this.

    Parameters, module buffers and the optimizer's state become those of rank 0, or of the newest checkpoint.

    Args:
        module: The model that the loop calls, already on its device. Frozen parameters do not change.
        optimizer: Optimizer of the module's parameters. Those of Accelerate and Lightning are unwrapped.
        schedule: The schedule; or a plan; or a plan file or run directory from `simdist plan -o`.
        n_steps: Steps in all, for a schedule. With None, the loop may end after any step. A plan has its own number.
        first_step: First step, if the script resumes from a checkpoint of its own.
        averaging: DiLoCo's outer optimizer, and the average at the end of the loop.
        checkpointing: Options for checkpoints. The loop resumes from the newest one. None writes none.
        experiment: A trace of the run, injected delays, and reports of late ranks.
        launch: Ranks of one machine, and the timeout of ranks.

    Returns:
        A context manager. Without a `with` statement, close it at the end.

    Raises:
        TypeError: A value is not a group of options.
        PlanError: The plan is not legal, or is for another model.
        ScenarioError: The schedule does not fit the world.
        UnsupportedError: A training loop cannot perform the plan.
        RunError: A rank is missing, or wraps something else; or a checkpoint is damaged or belongs to another job.
    """
    check_groups(averaging, checkpointing, experiment, launch)
    if first_step < 0:
        raise ScenarioError(f"first_step={first_step}; steps count from 0")
    shards = shards_of(module)
    device = device_of(module)
    optimizer = optimizer_of(module, optimizer)
    with ExitStack() as stack:
        connection = stack.enter_context(meet_ranks(device, launch.timeout_s, launch.start_timeout_s))
        request = PlanRequest(
            module,
            optimizer,
            n_steps,
            launch.ranks_per_node,
            connection.place.world_size,
            averaging.final_average,
            meet_nodes(connection),
            shards,
        )
        found = plan_loop(schedule, experiment.delays, request)
        plan = found.plan
        for doubt in found.doubts if connection.place.rank == 0 else ():
            warnings.warn(f"{plan.name} {doubt}", stacklevel=2)
        trace = Path(experiment.trace) if experiment.trace else None
        if trace and plan.n_steps == ENDLESS_STEPS:
            raise ScenarioError("n_steps=None; a trace has a row for every operation: write n_steps=...")
        every = checkpointing.every if checkpointing else "no"
        _agree(connection, plan, fingerprint(module, optimizer), f"{first_step} {every} {bool(trace)}")
        session = _open_session(stack, connection, found, trace)
        model = stack.enter_context(bound(session, module, optimizer, averaging.outer_optimizer, shards))
        peers = everyone(connection) if shards is None else meet_peers(connection, shards.groups())
        state = _state_of(session, model, checkpointing.also if checkpointing else {})
        resuming = resume(
            state,
            connection,
            found,
            first_step=first_step,
            checkpointing=checkpointing,
            until_closed=stack,
            shards=shards,
            peers=peers,
        )
        with model.staged():
            if not resuming.is_resumed:
                model.outer.begin()  # once the parameters are those of rank 0
            transforms.warm_up_transforms(session.plan, session.memory)
        step_watch = _watch(stack, experiment, model, resuming.first_step)
        program = LoopProgram(session.memory, model.rating, model.outer, session.rank)
        executor = _warm_executor(session, program, resuming, step_watch)
        stack.callback(executor.close)
        tracing = None
        if trace:
            tracing = Tracing(session, _start(session, executor), trace)
        elif executor.has_ticks:  # they fall at the same time on all ranks
            _start(session, executor)
        measuring = Measuring(tracing, step_watch)
        return Worker(session, model, executor, resuming, averaging, measuring, peers, stack.pop_all())


def _agree(connection: Connection, plan: Plan, model: str, begins: str) -> None:
    """Check that all ranks wrap the same model with the same options."""
    connection.agree("the plan", f"{plan.name} ({plan.digest()[:12]})")
    connection.agree("the model", model)
    connection.agree("first_step, checkpoint and trace", begins)


def _open_session(stack: ExitStack, connection: Connection, found: Planned, trace: Path | None) -> Session:
    """Open a session. The stack closes it."""
    plan = found.plan
    return open_session(
        connection,
        plan,
        found.delays,
        buffers=Binding.buffers_of(plan, in_loop=True),
        in_place=buffers_in_place(plan),
        recording=stack.enter_context(kept_times(plan, connection, trace)) if trace else None,
        kernels_from=found.kernels_from,
    )


def _state_of(session: Session, model: BoundModel, also: Mapping[str, Stateful]) -> RankState:
    """Return the state of a rank, without batches and losses, which belong to the loop."""
    memory = session.memory
    carried = {name: memory.tensors(name) for name in carried_buffers(session.plan) if name in memory}
    return RankState(
        model.module,
        model.optimizer,
        carried,
        session.connection.device,
        also,
        model.shared or model.optimizer,
        model.outer.optimizer,
        model.shards is not None,
    )


def _watch(stack: ExitStack, experiment: Experiment, model: BoundModel, first_step: int) -> StepWatch | None:
    """Begin to watch for late ranks, if the loop should. Ranks of a copy also wait for one another in its passes."""
    if experiment.watching is None:
        return None
    module = model.module if model.shards else None
    device = device_of(model.module)
    return stack.enter_context(StepWatch(experiment.watching, first_step=first_step, device=device, module=module))


def _warm_executor(
    session: Session, program: LoopProgram, resuming: Resuming, step_watch: StepWatch | None
) -> Executor:
    """Warm up connections for the first step, then make the executor."""
    session.warm_up()
    return make_executor(
        session,
        program,
        session.world,
        first_step=resuming.first_step,
        compute_in_caller=True,
        waiting=step_watch.waiting if step_watch is not None else None,
    )


def _start(session: Session, executor: Executor) -> Start:
    start = session.start()
    executor.start_clock(start.start_s)
    return start
