"""Makes the plan of a training loop from a schedule, a plan or a run directory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from real.collectives.worlds import check_performable
from real.kernels.topk import KERNELS_FROM
from real.loops.foreign import PLAN_DTYPES, device_of, optimizer_of
from real.loops.nodes import ranks_per_node_for
from real.loops.plans import check_shape, split_by_type
from real.loops.shards import Shards, shards_of
from real.programs.binding import trained_parameters
from real.programs.optimizers import Lars
from simdist.errors import PlanError, RunError, ScenarioError, UnsupportedError
from simdist.plan import Delay, Group, Optimize, Plan, Result, load
from simdist.plan.check import check
from simdist.plan.copies import check_copies, over_copies
from simdist.plan.delays import Delays, check_delays
from simdist.proof import prove
from simdist.runs import run_directory
from simdist.schedules import InputPath, Job, Schedule
from simdist.schedules.gradient import GradientSchedule
from simdist.schedules.job import Shape
from simdist.schedules.sharded import ShardedSchedule
from simdist.settings.base import shown

ENDLESS_STEPS = 2**48  # of a loop whose end is not known
_LEAST_STEPS = 64  # that are written, to see that a schedule does repeat its cycle

_MASTERS = (
    "has param_dtype: ranks would keep slices of the parameters in another type than the model, which loops and their "
    "checkpoints do not: leave param_dtype out, and write shared_update alone"
)


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
        shards: The slices of a model under `fully_shard`. None: each rank has the whole model.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    n_steps: int | None
    ranks_per_node: int | None
    world_size: int
    final_average: bool = True
    nodes: tuple[int, ...] = ()
    shards: Shards | None = None

    @property
    def tensors(self) -> list[nn.Parameter]:
        """The tensors of the plan."""
        return trained_parameters(self.shards.model if self.shards else self.module)

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that share a copy of the model."""
        return self.shards.ranks_per_copy if self.shards else 1

    @property
    def n_copies(self) -> int:
        """Copies of the model. Each is a rank to its schedule."""
        return self.world_size // self.ranks_per_copy

    def copies_per_node(self, schedule: Schedule) -> int:
        """Return how many copies one machine has. A copy that is shared by several machines counts as a machine.

        Raises:
            ScenarioError: The number is not known, or machines differ and the schedule needs equal ones.
        """
        n_sharers = self.ranks_per_copy
        if n_sharers == 1:
            return ranks_per_node_for(schedule, self.world_size, self.ranks_per_node, self.nodes)
        if self.ranks_per_node is not None or not self.nodes:
            ranks_per_node = ranks_per_node_for(schedule, self.world_size, self.ranks_per_node, ())
            return ranks_per_node // n_sharers if ranks_per_node % n_sharers == 0 else 1
        if any(n_ranks % n_sharers for n_ranks in self.nodes):
            return 1
        return ranks_per_node_for(schedule, self.n_copies, None, [n_ranks // n_sharers for n_ranks in self.nodes])


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
        module: The model, on any device. Its parameters do not change. One under `fully_shard` needs all its ranks.
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
    shards = shards_of(module)
    device_of(module)
    if optimizer is not None:
        optimizer = optimizer_of(module, optimizer)
    request = PlanRequest(module, optimizer, n_steps, ranks_per_node, world_size, shards=shards)
    return plan_loop(schedule, delays, request).plan


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a loop, with delays.

    Args:
        plan: The plan.
        delays: Injected delays of the plan.
        endless: The plan that identifies the job in checkpoints. For a schedule it has `ENDLESS_STEPS` steps.
        doubts: Warnings about the schedule, one sentence each.
        kernels_from: See `real.kernels.topk.TopK`. That of the cluster, for a run directory whose cluster states it.
    """

    plan: Plan
    delays: Delays
    endless: Plan
    doubts: tuple[str, ...]
    kernels_from: int = KERNELS_FROM


def plan_loop(schedule: Schedule | Plan | Path | str, delays: Delays | None, wanted: PlanRequest) -> Planned:
    """Return the plan and the delays.

    Raises:
        PlanError: The plan or the delays are not legal, or do not fit.
        ScenarioError: The schedule does not fit the world.
        UnsupportedError: A training loop cannot perform the plan.
        RunError: The plan is for another number of ranks.
    """
    given = delays
    kernels_from = KERNELS_FROM
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
        plan = _between_copies_of(run, wanted) if wanted.shards else run.plan
        delays = run.delays if delays is None else delays
        kernels_from = run.scenario.cluster.device.select_kernels_from or KERNELS_FROM
    else:
        plan = load(path)
        check(plan)
    if given is not None:
        _check_used(plan, given)
    _check_plan(plan, delays or {}, wanted)
    return written if isinstance(schedule, Schedule) else Planned(plan, delays or {}, plan, (), kernels_from)


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
    if isinstance(schedule, ShardedSchedule):
        schedule = _between_copies(schedule, wanted)
    if isinstance(schedule, GradientSchedule) and schedule.param_dtype:
        raise UnsupportedError(f"{schedule.name} {_MASTERS}")
    ranks_per_node = wanted.copies_per_node(schedule)
    problems = schedule.problems(Shape(wanted.n_copies, ranks_per_node))
    if problems:
        of = " of copies" if wanted.shards else ""
        raise ScenarioError("; ".join(f"{schedule.name}{of}: {name}: {problem}" for name, problem in problems))
    parameters = wanted.tensors
    types = [PLAN_DTYPES[parameter.dtype] for parameter in parameters]
    job = Job(
        world_size=wanted.n_copies,
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
    if wanted.shards:
        plan = over_copies(plan, wanted.ranks_per_copy)
    endless = plan.repeated(cycle, ENDLESS_STEPS)
    performed = plan.repeated(cycle, wanted.n_steps) if wanted.n_steps else endless
    return Planned(performed, delays, endless, tuple(_doubts(schedule, job, wanted)))


def _between_copies(schedule: ShardedSchedule, wanted: PlanRequest) -> Schedule:
    """Return what copies of the model exchange under a schedule that shards it."""
    if wanted.shards is None:
        raise UnsupportedError(
            f"{schedule.name} shards the model, of which this loop has all parameters on every rank: apply "
            f"fully_shard to it before real.wrap"
        )
    n_sharers = schedule.sharers(wanted.world_size)
    if n_sharers != wanted.ranks_per_copy:
        raise ScenarioError(
            f"{schedule.name}: {n_sharers} of {wanted.world_size} ranks share a copy, and fully_shard shards over "
            f"{wanted.ranks_per_copy}: write HSDP(shard={wanted.ranks_per_copy}), or choose another mesh"
        )
    return schedule.between_copies()


def _between_copies_of(run: run_directory.RunDirectory, wanted: PlanRequest) -> Plan:
    """Return the plan of a run directory between the copies of a sharded model, with the delays of all ranks."""
    from simdist.runs import building  # what only this needs takes a while to import

    assert wanted.shards is not None
    (schedule,) = run.scenario.schedules
    if run.plan.world_size != wanted.world_size:
        raise RunError(f"{run.path}: its plan is for {run.plan.world_size} ranks, and there are {wanted.world_size}")
    if not isinstance(schedule, ShardedSchedule):
        raise UnsupportedError(
            f"{run.path}: ranks of {schedule.name} hold whole models, and fully_shard shards this one over "
            f"{wanted.ranks_per_copy} ranks: write kind: hsdp with shard: {wanted.ranks_per_copy} in its scenario, or "
            f"give real.wrap a schedule between copies"
        )
    between = _between_copies(schedule, wanted)
    described = building.job(run.scenario)
    if described.tensor_counts != wanted.shards.whole_counts:
        raise PlanError(
            f"{run.path} is for a model of {len(described.tensor_counts)} tensors with "
            f"{sum(described.tensor_counts):,} elements; this one has {len(wanted.tensors)} with "
            f"{sum(wanted.shards.whole_counts):,}, or others: build the plan with this model's workload"
        )
    job = replace(
        described,
        world_size=wanted.n_copies,
        ranks_per_node=wanted.copies_per_node(between),
        tensor_counts=tuple(parameter.numel() for parameter in wanted.tensors),
        tensor_rows=tuple(map(_rows, wanted.tensors)),
        input_path=InputPath(),
        checkpoint=None,
        speeds=(),
        units=(),
    )
    types = [PLAN_DTYPES[parameter.dtype] for parameter in wanted.tensors]
    plan = split_by_type(between.plan(job), types, job.tensor_counts, job.dtype)
    check(plan)
    prove(plan, lambda step: between.result(step, job))
    return over_copies(plan, wanted.ranks_per_copy)


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
        yield from schedule.unused_settings(replace(job, n_steps=n_steps))
    yield from schedule.unused_in(job)
    if unread := sorted(key for key, value in schedule.input if value is not None):
        yield f"has input.{', input.'.join(unread)}, without effect: the loop brings its own batches"
    if job.world_size == 1 and len(cycle) > 1:
        yield f"has one {'copy of the model' if wanted.shards else 'rank'}, and nothing to average"
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
    updates = (op for body in plan.bodies for op in body if isinstance(op, Optimize))
    if any(plan.buffer(name).initialized for op in updates for name in op.slices):
        raise UnsupportedError(f"plan {plan.name} {_MASTERS}")
    if wanted.shards:
        check_copies(plan, wanted.ranks_per_copy)
    check_performable(plan)
    check_delays(plan, delays)
    if plan.world_size != wanted.world_size:
        raise RunError(f"plan {plan.name} is for {plan.world_size} ranks, and there are {wanted.world_size}")
    if wanted.n_steps not in (None, plan.n_steps):
        raise PlanError(f"plan {plan.name} has {plan.n_steps} steps; n_steps={wanted.n_steps}: leave it out")
