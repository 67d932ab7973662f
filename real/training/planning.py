"""From a schedule, a plan or a run directory to the plan of a training loop."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from real.collectives.worlds import check_servers
from real.programs.binding import trained_parameters
from real.programs.optimizers import Lars
from real.training.hooks import check_shape
from simdist.errors import PlanError, RunError, ScenarioError, UnsupportedError
from simdist.plan import Delay, Plan, load
from simdist.plan.check import check
from simdist.plan.delays import Delays, check_delays
from simdist.plan.plan import DType
from simdist.proof import prove
from simdist.runs import run_directory
from simdist.schedules import Job, Schedule

_DTYPES: Mapping[torch.dtype, DType] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The use that a plan is wanted for.

    Args:
        module: Whose parameters.
        optimizer: Of these parameters.
        n_steps: Of a schedule; of a plan, to compare.
        ranks_per_node: Of a schedule; None takes what torchrun says.
        world_size: Ranks that there are.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    n_steps: int | None
    ranks_per_node: int | None
    world_size: int


def planned(schedule: Schedule | Plan | Path | str, delays: Delays | None, wanted: PlanRequest) -> tuple[Plan, Delays]:
    """Return the plan and the delays.

    Args:
        schedule: See `real.wrap`.
        delays: See `real.wrap`.
        wanted: Purpose.

    Raises:
        PlanError: They are not legal, or do not fit.
        ScenarioError: The schedule does not fit the world.
        UnsupportedError: A training loop cannot perform the plan.
        RunError: The plan is for another number of ranks.
    """
    given = delays
    if isinstance(schedule, Schedule):
        plan = _written(schedule, delays or {}, wanted)
    elif isinstance(schedule, Plan):
        plan = schedule
        check(plan)
    elif (path := Path(schedule)).is_dir():
        run = run_directory.read(path)
        plan, delays = run.plan, run.delays if delays is None else delays
    else:
        plan = load(path)
        check(plan)
    if given is not None:
        _check_used(plan, given)
    _check_plan(plan, delays or {}, wanted)
    return plan, delays or {}


def _check_used(plan: Plan, delays: Delays) -> None:
    """Refuse delays that a script gives and its plan never asks for."""
    delayed = {op.channel for body in plan.bodies for op in body if isinstance(op, Delay)}
    if unused := sorted(set(delays) - delayed):
        raise PlanError(f"plan {plan.name} does not delay {', '.join(unused)}: leave these delays out")


def _written(schedule: Schedule, delays: Delays, wanted: PlanRequest) -> Plan:
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
        optimizer="lars" if isinstance(wanted.optimizer, Lars) else "sgd",
        run_ahead_steps=None,  # the loop looks at its losses when it likes to
        delay_channels=frozenset(delays),
    )
    plan = schedule.plan(job)
    check(plan)
    prove(plan, lambda step: schedule.result(step, job))
    return plan


def _ranks_per_node(wanted: PlanRequest) -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if wanted.ranks_per_node is None and not text.isdecimal():
        raise ScenarioError("LOCAL_WORLD_SIZE is not set, as torchrun does: write ranks_per_node=...")
    ranks_per_node = int(text) if wanted.ranks_per_node is None else wanted.ranks_per_node
    if ranks_per_node < 1 or wanted.world_size % ranks_per_node:
        raise ScenarioError(f"ranks_per_node={ranks_per_node} does not divide {wanted.world_size} ranks")
    return ranks_per_node


def _check_plan(plan: Plan, delays: Delays, wanted: PlanRequest) -> None:
    """Refuse a legal plan that the loop, its world or its delays do not fit."""
    check_shape(plan)
    check_servers(plan)
    check_delays(plan, delays)
    if plan.world_size != wanted.world_size:
        raise RunError(f"plan {plan.name} is for {plan.world_size} ranks, and there are {wanted.world_size}")
    if wanted.n_steps not in (None, plan.n_steps):
        raise PlanError(f"plan {plan.name} has {plan.n_steps} steps; n_steps={wanted.n_steps}: leave it out")


def device_of(module: nn.Module) -> torch.device:
    """Return where the trained parameters are.

    Raises:
        UnsupportedError: They are on several devices, of several types, or there are none.
    """
    parameters = trained_parameters(module)
    if not parameters:
        raise UnsupportedError(f"{type(module).__name__} has no parameter that is trained")
    devices = {parameter.device for parameter in parameters}
    dtypes = {parameter.dtype for parameter in parameters}
    if len(devices) > 1 or parameters[0].device.type not in {"cpu", "cuda"}:
        found = ", ".join(sorted(map(str, devices)))
        raise UnsupportedError(f"{type(module).__name__} is on {found}; a wrapped model is on one CPU or CUDA device")
    if len(dtypes) > 1 or not dtypes <= _DTYPES.keys():
        found = ", ".join(sorted(map(str, dtypes)))
        raise UnsupportedError(
            f"{type(module).__name__} has parameters of {found}; a plan takes one type of: "
            f"{', '.join(_DTYPES.values())}"
        )
    return parameters[0].device


def check_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of other tensors.

    Raises:
        UnsupportedError: It updates what is no parameter of the module.
    """
    known = {id(parameter) for parameter in module.parameters()}
    strange = sum(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"])
    if strange:
        raise UnsupportedError(
            f"{type(optimizer).__name__} updates {strange} tensors that are no parameters of {type(module).__name__}, "
            f"so they would not be synchronised: make it of model.parameters()"
        )
