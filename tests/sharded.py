"""Sharded plans with given seconds for every operation, and their times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from engine_runs import simulate
from fsdp_settings import ROOT, OneRank, Root, Settings

from simdist.cost.costs import Costs, Local, OpCost, Resources, Shared
from simdist.engines.choose import Engine
from simdist.plan import Plan, ops
from simdist.plan.check import check
from simdist.plan.delays import Delays, delay_shapes
from simdist.plan.walk import walk
from simdist.proof import prove
from simdist.schedules import Job
from simdist.schedules.fsdp import FSDP
from simdist.schedules.hsdp import HSDP
from simdist.schedules.sharded import ShardedSchedule
from simdist.schedules.units import ModelUnit
from simdist.traces.trace import Trace

ENGINES: tuple[Engine, ...] = ("fast", "des")


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
        tensor_counts=(24,) * n_units,
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


def _times(trace: Trace, index: int, rank: int = 0) -> tuple[float, float]:
    return float(trace.start_s[index, rank]), float(trace.end_s[index, rank])


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


def schedule_of(settings: Settings) -> ShardedSchedule | None:
    """Return the schedule with the settings of a job under `fully_shard`; None if it states other things.

    A root on both sides of the units is one unit for `fully_shard`, and two here. The settings of micro-batches before
    the last one are alike, and each backward pass waits for its reductions.
    """
    root = settings.root
    earlier = set(settings.micro_batches[:-1])
    last_unit = settings.units[-1].reshard_after_forward
    if settings.shard == 1 or settings.input_needs_gradient or len(earlier) > 1:
        return None
    if (root and root.before and root.after) or (root and root.after and last_unit is False):
        return None
    if any(not each.is_last or (not each.all_reduces and not each.reduces) for each in earlier):
        return None
    first = settings.micro_batches[0]
    common: dict[str, object] = {
        "reshard_after_forward": settings.reshard_after_forward,
        "wrap": "blocks" if root else "all",
        "keep_last_unit": last_unit is False,
        "forward_prefetch": max(1, settings.forward_prefetch),
        "backward_prefetch": max(1, settings.backward_prefetch),
        "reduce_buffers": settings.max_input_buffers,
        "communicators": 2 if settings.separate_group else 1,
        "accumulation": "reduce" if first.reduces else "local",
        "reshard_after_backward": first.reshards or len(settings.micro_batches) == 1,
    }
    if settings.replicas == 1:
        return FSDP.model_validate(common)
    return HSDP.model_validate(
        common | {"shard": settings.shard, "all_reduce": "each" if first.all_reduces else "last"}
    )


def rows_of(
    settings: Settings, schedule: ShardedSchedule, late: Sequence[OneRank] = (), rank: int = 0
) -> list[tuple[object, ...]]:
    """Return when each operation of a rank runs by the simulator, in order. Ranks are alike, or late as stated."""
    root = settings.root
    numbers = [*range(len(settings.units))]
    if root:
        numbers = [ROOT, *numbers] if root.before else [*numbers, ROOT]
    job = Job(
        settings.shard * settings.replicas,
        settings.shard * settings.replicas,
        settings.n_steps,
        tensor_counts=(24,) * len(numbers),
        micro_batches=len(settings.micro_batches),
        run_ahead_steps=None,
        units=tuple(ModelUnit(at, at + 1, is_block=number != ROOT) for at, number in enumerate(numbers)),
        delay_channels=frozenset({"compute"} if late else ()),
    )
    plan = schedule.plan(job)
    check(plan)
    prove(plan, lambda step: schedule.result(step, job))
    seconds = {op: _given(op, settings, numbers, schedule) for body in plan.bodies for op in body}
    of_ranks = np.array([each.late for each in late], dtype=np.float64)  # and of steps and micro-batches
    delays: Delays = {"compute": np.moveaxis(of_ranks, 0, 2).reshape(delay_shapes(plan)[-1])} if late else {}
    trace, again = (simulate(plan, priced(plan, seconds), delays, engine=engine) for engine in ENGINES)
    assert np.array_equal(trace.end_s, again.end_s)
    return sorted(
        (_KIND[type(each.op)], numbers[_number(each.op)], *_times(trace, each.index, rank))
        for each in walk(plan)
        if isinstance(each.op, ops.Forward | ops.Backward | ops.Collective)
    )


_KIND = {
    ops.Forward: "forward",
    ops.Backward: "backward",
    ops.AllGather: "gather",
    ops.ReduceScatter: "reduce_scatter",
    ops.AllReduce: "all_reduce",
}


def _number(op: ops.Op) -> int:
    return int(ops.writes(op)[0].rpartition(".")[2])


def _given(op: ops.Op, settings: Settings, numbers: list[int], schedule: ShardedSchedule) -> float:
    if isinstance(op, ops.Optimize):
        of_root = settings.root.optimize if settings.root else 0
        return of_root + sum(each.optimize for each in settings.units)
    if isinstance(op, ops.Copy) and op.src.startswith("gathered."):
        return settings.copy_out
    if not isinstance(op, ops.Forward | ops.Backward | ops.Collective):
        return 0.0
    number = numbers[_number(op)]
    times = settings.units[number] if number != ROOT else settings.root
    assert times is not None
    match op:
        case ops.Forward() | ops.Backward():
            of = times if not isinstance(times, Root) else times.before or times.after
            assert of is not None
            return of.forward if isinstance(op, ops.Forward) else of.backward
        case ops.AllGather():
            is_again = op.group.size < schedule.sharers(settings.shard * settings.replicas)
            return times.regather if is_again and times.regather is not None else times.gather
        case ops.ReduceScatter():
            return times.reduce_scatter
        case _:
            return times.all_reduce
