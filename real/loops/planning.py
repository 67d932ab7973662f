"""Makes the plan of a training loop from a schedule, a plan or a run directory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from real.collectives.worlds import check_servers
from real.loops.foreign import check_layers, unwrapped
from real.loops.mixed_types import split_by_type
from real.loops.nodes import ranks_per_node_for
from real.loops.step_shape import check_shape
from real.programs.binding import trained_parameters
from real.programs.optimizers import Lars
from simdist.errors import PlanError, RunError, ScenarioError, UnsupportedError
from simdist.plan import Delay, Group, Plan, Result, load
from simdist.plan.check import check
from simdist.plan.delays import Delays, check_delays
from simdist.plan.plan import DType
from simdist.proof import prove
from simdist.runs import run_directory
from simdist.schedules import Job, Schedule
from simdist.settings.base import shown

_NEEDS_ALL = "a schedule needs all parameters on every rank"
_SHARDS = (
    ": write Sync(shared_update=True) to shard the optimizer's state, or let `python -m real RUN --program "
    "MODULE:FUNCTION` perform a plan of fsdp or hsdp, which shards the model"
)
#: Classes, by name, so that they need not be imported: those that synchronise or shard parameters themselves.
_SYNCHRONISED: Mapping[str, str] = {
    "DistributedDataParallel": "real.wrap takes its place, so wrap the bare model, which is its .module",
    "DataParallel": "start one process per device, and wrap the bare model, which is its .module",
    "FullyShardedDataParallel": f"{_NEEDS_ALL}, so wrap the model without FSDP{_SHARDS}",
    "FSDPModule": f"{_NEEDS_ALL}, so wrap the model without fully_shard{_SHARDS}",
    "DTensor": "a schedule needs all of every parameter on every rank, so wrap the model before it is distributed",
}
ENDLESS_STEPS = 2**48  # of a loop whose end is not known
_LEAST_STEPS = 64  # that are written, to see that a schedule does repeat its cycle

_DTYPES: Mapping[torch.dtype, DType] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The training loop that needs a plan.

    Args:
        module: The model.
        optimizer: Optimizer of the model's parameters. Only `Lars` makes a difference.
        n_steps: Steps in all. For a schedule, None is a loop without end. For a plan, None takes its own number.
        ranks_per_node: Ranks of one machine, for a schedule. None takes those of `nodes`.
        world_size: Number of ranks.
        final_average: The loop averages parameters when it ends.
        nodes: Ranks of each machine, in order. Empty takes torchrun's number for all.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    n_steps: int | None
    ranks_per_node: int | None
    world_size: int
    final_average: bool = True
    nodes: tuple[int, ...] = ()


def plan_for(
    module: nn.Module,
    schedule: Schedule,
    world_size: int,
    *,
    n_steps: int,
    optimizer: torch.optim.Optimizer | None = None,
    ranks_per_node: int | None = None,
    delays: Delays | None = None,
) -> Plan:
    """Return the plan that `real.wrap` performs for a model. This needs no other rank.

    Args:
        module: The model, on any device. Its parameters do not change.
        schedule: The schedule.
        world_size: Ranks.
        n_steps: Steps in all.
        optimizer: The optimizer, if it is `real.Lars`.
        ranks_per_node: Ranks of one machine. The default is torchrun's number.
        delays: Injected delays, see `real.Experiment`.

    Raises:
        ScenarioError: The schedule does not fit the world.
        UnsupportedError: A training loop cannot perform the plan, or the model has several devices.

    >>> from simdist.schedules import LocalSGD
    >>> plan = plan_for(nn.Linear(4, 2), LocalSGD(period=2), 8, n_steps=6, ranks_per_node=4)
    >>> plan.name, plan.world_size, plan.n_steps
    ('local-2', 8, 6)
    """
    device_of(module)
    if optimizer is not None:
        optimizer = optimizer_of(module, optimizer)
    return planned(schedule, delays, PlanRequest(module, optimizer, n_steps, ranks_per_node, world_size)).plan


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a loop, with delays.

    Args:
        plan: The plan.
        delays: Injected delays of the plan.
        endless: The plan that identifies the job in checkpoints. For a schedule it has `ENDLESS_STEPS` steps, so that
            a job can resume with more steps.
        doubts: Warnings about the schedule, one sentence each.
    """

    plan: Plan
    delays: Delays
    endless: Plan
    doubts: tuple[str, ...]


def planned(schedule: Schedule | Plan | Path | str, delays: Delays | None, wanted: PlanRequest) -> Planned:
    """Return the plan and the delays.

    Args:
        schedule: See `real.wrap`.
        delays: See `real.wrap`.
        wanted: The training loop.

    Raises:
        PlanError: The plan or the delays are not legal, or do not fit.
        ScenarioError: The schedule does not fit the world.
        UnsupportedError: A training loop cannot perform the plan.
        RunError: The plan is for another number of ranks.
    """
    given = delays
    if isinstance(schedule, Schedule):
        written = _written(schedule, delays or {}, wanted)
        plan = written.plan
    elif isinstance(schedule, Plan):
        plan = schedule
        check(plan)
    elif not isinstance(schedule, Path | str):
        raise ScenarioError(
            f"{shown(schedule)}: write a schedule, such as LocalSGD(period=4), a Plan, or a path of one"
        )
    elif (path := Path(schedule)).is_dir():
        run = run_directory.read(path)
        plan = run.plan
        delays = run.delays if delays is None else delays
    else:
        plan = load(path)
        check(plan)
    if given is not None:
        _check_used(plan, given)
    _check_plan(plan, delays or {}, wanted)
    return written if isinstance(schedule, Schedule) else Planned(plan, delays or {}, plan, ())


def _check_used(plan: Plan, delays: Delays) -> None:
    """Raise an error if a script passes delays that its plan does not use."""
    delayed = {op.channel for body in plan.bodies for op in body if isinstance(op, Delay)}
    if unused := sorted(set(delays) - delayed):
        raise PlanError(f"plan {plan.name} does not delay {', '.join(unused)}: leave these delays out")


def _written(schedule: Schedule, delays: Delays, wanted: PlanRequest) -> Planned:
    """Return the plan of a schedule for a model, and the endless plan. Only a few periods are written out."""
    if wanted.n_steps is not None and (not isinstance(wanted.n_steps, int) or wanted.n_steps < 1):
        raise ScenarioError(f"n_steps={wanted.n_steps}; write how many steps the loop has in all, or None")
    if wanted.n_steps is None and delays:
        raise ScenarioError("n_steps=None; delays are given step by step: write n_steps=...")
    ranks_per_node = ranks_per_node_for(schedule, wanted.world_size, wanted.ranks_per_node, wanted.nodes)
    problems = schedule.problems(wanted.world_size, ranks_per_node)
    if problems:
        raise ScenarioError("; ".join(f"{schedule.name}: {name}: {problem}" for name, problem in problems))
    parameters = trained_parameters(wanted.module)
    types = [_DTYPES[parameter.dtype] for parameter in parameters]
    job = Job(
        world_size=wanted.world_size,
        ranks_per_node=ranks_per_node,
        n_steps=1,
        tensor_counts=tuple(parameter.numel() for parameter in parameters),
        tensor_rows=tuple(map(_rows, parameters)),
        dtype=types[-1],
        optimizer="lars" if isinstance(wanted.optimizer, Lars) else "sgd",
        run_ahead_steps=None,  # the loop looks at its losses when it likes to
        delay_channels=frozenset(delays),
    )
    cycle = schedule.cycle(job)
    job = replace(job, n_steps=max(cycle.start + 2 * len(cycle), _LEAST_STEPS))
    plan = split_by_type(schedule.plan(job), types, job.tensor_counts, job.dtype)
    check(plan)
    prove(plan, lambda step: schedule.result(step, job))
    endless = plan.repeated(cycle, ENDLESS_STEPS)
    performed = plan.repeated(cycle, wanted.n_steps) if wanted.n_steps else endless
    return Planned(performed, delays, endless, tuple(_doubts(schedule, job, wanted)))


def _rows(parameter: nn.Parameter) -> int:
    """Return how many rows a parameter has as a matrix: its outermost dimension in memory, or a vector's length."""
    dims = [(parameter.stride(at), size) for at, size in enumerate(parameter.shape) if size > 1]
    return max(dims)[1] if len(dims) > 1 else parameter.numel()


def _doubts(schedule: Schedule, job: Job, wanted: PlanRequest) -> Iterator[str]:
    """Yield warnings about settings without effect, and about ranks that end with different parameters."""
    cycle = schedule.cycle(job)
    n_steps = wanted.n_steps
    if wanted.optimizer is not None:
        yield from _left_out(wanted.module, wanted.optimizer)
    if n_steps is not None:
        yield from schedule.unused_settings(job.world_size, job.ranks_per_node, n_steps)
    yield from schedule.unused_in(job)
    if unread := sorted(schedule.model_fields_set & {"data", "prefetch", "readers", "decode_workers"}):
        yield f"has {', '.join(unread)}, without effect: the loop brings its own batches"
    if job.world_size == 1 and len(cycle) > 1:
        yield "has one rank, and nothing to average"
    results = [schedule.result(step, job) for step in cycle]
    averages = [each for each in results if each.parameters.size > 1]
    if (
        averages
        and n_steps
        and not wanted.final_average
        and schedule.result(n_steps - 1, job).parameters != Group(job.world_size)
    ):
        yield f"does not average over all ranks in the last of {n_steps} steps: another n_steps, or final_average"
    if averages and all(each.gradients.size == job.world_size for each in results):
        yield "averages gradients over all ranks in every step, so averages of parameters change nothing: use Sync()"
    elif len(averages) == len(results) and all(
        each == Result(each.gradients, Group(job.world_size)) for each in averages
    ):
        yield "averages parameters over all ranks in every step: Sync() does as much, and overlaps with backward()"
    elif vain := sorted({each.parameters.size for each in averages if each.parameters.size <= each.gradients.size}):
        yield (
            f"averages parameters over groups of {', '.join(map(str, vain))}, whose gradients are averaged in every "
            f"step: leave that level out, or write intra_node_gradients=False"
        )


def _left_out(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    trained = trained_parameters(module)
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if n_left := len(set(trained) - updated):
        yield (
            f"finds {n_left} of {len(trained)} trained parameters that {type(optimizer).__name__} leaves out: freeze "
            f"them, or let their own optimizer do its step before that one, and keep its state with also="
        )


def _check_plan(plan: Plan, delays: Delays, wanted: PlanRequest) -> None:
    """Raise an error if the loop, the number of ranks or the delays do not fit a legal plan."""
    check_shape(plan)
    check_servers(plan)
    check_delays(plan, delays)
    if plan.world_size != wanted.world_size:
        raise RunError(f"plan {plan.name} is for {plan.world_size} ranks, and there are {wanted.world_size}")
    if wanted.n_steps not in (None, plan.n_steps):
        raise PlanError(f"plan {plan.name} has {plan.n_steps} steps; n_steps={wanted.n_steps}: leave it out")


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the trained parameters.

    Raises:
        UnsupportedError: There are several devices, another data type, sparse gradients or no parameters; or something
            else synchronises or shards them.
    """
    parameters = trained_parameters(module)
    for each in (*module.modules(), *parameters):
        for base in type(each).__mro__:
            if advice := _SYNCHRONISED.get(base.__name__):
                raise UnsupportedError(f"{type(module).__name__} has a {base.__name__}: {advice}")
    check_layers(module)
    if not parameters:
        raise UnsupportedError(f"{type(module).__name__} has no parameter that is trained")
    devices = {parameter.device for parameter in parameters}
    dtypes = {parameter.dtype for parameter in parameters}
    if len(devices) > 1 or parameters[0].device.type not in {"cpu", "cuda"}:
        found = ", ".join(sorted(map(str, devices)))
        raise UnsupportedError(f"{type(module).__name__} is on {found}; a wrapped model is on one CPU or CUDA device")
    if not dtypes <= _DTYPES.keys():
        found = ", ".join(sorted(map(str, dtypes - _DTYPES.keys())))
        raise UnsupportedError(
            f"{type(module).__name__} has parameters of {found}; a plan takes {', '.join(_DTYPES.values())}"
        )
    return parameters[0].device


def optimizer_of(module: nn.Module, optimizer: object) -> torch.optim.Optimizer:
    """Return the optimizer of torch that an object is or forwards to. It updates only parameters of the module.

    Raises:
        UnsupportedError: It updates other tensors, or there is none.
    """
    inner = unwrapped(optimizer)
    _check_optimizer(module, inner)
    return inner


def _check_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    known = {id(parameter) for parameter in module.parameters()}
    strange = sum(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"])
    if strange:
        raise UnsupportedError(
            f"{type(optimizer).__name__} updates {strange} tensors that are no parameters of {type(module).__name__}, "
            f"so they would not be synchronised: make it of model.parameters()"
        )
