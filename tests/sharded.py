"""Sharded plans with given seconds for every operation, and their times."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from simdist.cost.costs import Costs, Local, OpCost, Resources, Shared
from simdist.engines import simulate
from simdist.plan import Plan, ops
from simdist.plan.check import check
from simdist.plan.walk import walk
from simdist.proof import prove
from simdist.schedules import Job
from simdist.schedules.sharded import ShardedSchedule
from simdist.schedules.units import ModelUnit
from simdist.traces.trace import Trace


@dataclass(frozen=True)
class Seconds:
    """Seconds of every operation of a unit, and of the optimizer. Copies take none.

    Args:
        forward: Of a unit.
        backward: Of a unit.
        gather: Of a unit.
        reduce: A reduce-scatter.
        update: The optimizer.
        average: An all-reduce between copies of the model.
    """

    forward: float
    backward: float
    gather: float
    reduce: float
    update: float = 1.0
    average: float = 0.0


def plan_of(
    schedule: ShardedSchedule, n_units: int, *, world_size: int = 4, micro_batches: int = 1, n_steps: int = 1
) -> Plan:
    """Return the checked and proved plan of equal units, with a host that runs ahead."""
    job = Job(
        world_size,
        world_size,
        n_steps,
        (24,) * n_units,
        micro_batches=micro_batches,
        run_ahead_steps=None,
        units=tuple(ModelUnit(number, number + 1) for number in range(n_units)),
    )
    plan = schedule.plan(job)
    check(plan)
    prove(plan, lambda step: schedule.result(step, job))
    return plan


def priced(plan: Plan, seconds: Seconds | Mapping[ops.Op, float]) -> Costs:
    """Return prices of a plan: of a kind of operation each, or of every operation."""
    given = seconds if isinstance(seconds, Mapping) else None
    of: dict[ops.Op, OpCost] = {}
    for op in dict.fromkeys(op for body in plan.bodies for op in body):
        took_s = given.get(op, 0.0) if given is not None else _seconds(op, seconds)
        of[op] = Shared(op.group, (), took_s) if isinstance(op, ops.COLLECTIVES) else Local(took_s)
    resources = Resources(1, plan.world_size, 0, 1)
    return Costs(resources, np.full(resources.n_resources, np.inf), of, frozenset())


def times(plan: Plan, trace: Trace) -> list[tuple[str, float, float]]:
    """Return what rank 0 computes and communicates: the name of what is written, start and end."""
    return [
        (f"{type(each.op).__name__} {ops.writes(each.op)[0]}", *_times(trace, each.index))
        for each in walk(plan)
        if isinstance(each.op, ops.Forward | ops.Backward | ops.Optimize | ops.Collective)
    ]


def step_s(schedule: ShardedSchedule, seconds: Seconds, n_units: int, **job: int) -> float:
    """Return the seconds of a step of equal units, the same by both engines."""
    plan = plan_of(schedule, n_units, **job)
    costs = priced(plan, seconds)
    fast, des = (simulate(plan, costs, {}, engine=engine).makespan_s for engine in ("fast", "des"))
    assert fast == des
    return fast


def _times(trace: Trace, index: int) -> tuple[float, float]:
    return float(trace.start_s[index, 0]), float(trace.end_s[index, 0])


def _seconds(op: ops.Op, seconds: Seconds) -> float:
    match op:
        case ops.Forward():
            return seconds.forward
        case ops.Backward():
            return seconds.backward
        case ops.AllGather():
            return seconds.gather
        case ops.ReduceScatter():
            return seconds.reduce
        case ops.AllReduce():
            return seconds.average
        case ops.Optimize():
            return seconds.update
        case _:
            return 0.0
