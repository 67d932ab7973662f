"""Tensor fusion: what is reduced together, when, and that nothing else changes."""

import numpy as np
import pytest
from engine_runs import simulate
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from simdist.errors import PlanError
from simdist.plan import AllReduce, Backward, Copy, Forward, Group, Optimize, Pack, Plan, Tick, Unpack, op_text
from simdist.plan.plan import Buffer
from simdist.runs.building import build, job
from simdist.scenario import Scenario
from simdist.schedules import Job, Sync
from simdist.schedules.fusion import Fusion, fuse
from simdist.schedules.job import Shape

WORLD = Group(2)
MS = 1e-3


def unfused(counts: list[int]) -> Plan:
    """Return a step whose gradients, of so many elements each, are all-reduced one by one."""
    n = len(counts)
    names = [f"grad.{number}" for number in range(n)]
    buffers = [Buffer("param", sum(counts), tensors=(0, n), initialized=True), Buffer("loss", 1)]
    for number, count in enumerate(counts):
        buffers.append(Buffer(names[number], count, tensors=(n - 1 - number, n - number)))
    ops = [Forward(("param",), ("loss",))]
    for name in names:
        ops += [Backward(("param", "loss"), name), AllReduce(name, WORLD)]
    ops.append(Optimize(("param",), tuple(names)))
    return Plan.from_steps("unfused", world_size=2, buffers=buffers, steps=[tuple(ops)])


def lines(plan: Plan) -> list[str]:
    kinds = (Backward, Tick, Pack, AllReduce, Unpack, Copy)
    return [op_text(op).replace("mean over group of 2", "...") for op in plan.bodies[0] if isinstance(op, kinds)]


def test_gradients_that_are_ready_in_one_cycle_are_fused() -> None:
    ready_s = {"grad.0": 1 * MS, "grad.1": 4 * MS, "grad.2": 5 * MS, "grad.3": 11 * MS}
    fused = fuse(unfused([10, 20, 30, 40]), Fusion(buffer_nbytes=1000, cycle_s=5 * MS), ready_s)
    assert lines(fused) == [
        "backward(param, loss -> grad.0)",
        "backward(param, loss -> grad.1)",
        "backward(param, loss -> grad.2)",
        "tick(grad.0, grad.1, grad.2, every 5 ms)",
        "pack(grad.0, grad.1, grad.2 -> fused.0)",
        "all_reduce(fused.0, ...)",
        "unpack(fused.0 -> grad.0, grad.1, grad.2)",
        "backward(param, loss -> grad.3)",
        "tick(grad.3, every 5 ms)",
        "all_reduce(grad.3, ...)",
    ]


@pytest.mark.parametrize(("compression", "name"), [("none", "grad"), ("fp16", "half")])
def test_gradients_are_ready_in_the_order_of_the_backward_pass_in_whatever_type(compression: str, name: str) -> None:
    """The last tensor takes 1 ms, the one before 2 ms, the first 7 ms: ready after 1, 3 and 10 ms."""
    schedule = Sync(fusion=Fusion(cycle_s=5 * MS), compression=compression)
    plan = schedule.plan(Job(2, 2, 1, tensor_counts=(10, 20, 30), tensor_backward_s=(7 * MS, 2 * MS, 1 * MS)))
    ticks = [op.srcs for op in plan.bodies[0] if isinstance(op, Tick)]
    assert ticks == [(f"{name}.0", f"{name}.1"), (f"{name}.2",)]


def test_gradient_that_is_ready_at_a_tick_has_not_missed_it_by_rounding() -> None:
    ready_s = {"grad.0": 0.1, "grad.1": 0.1 + 0.2}
    assert ready_s["grad.1"] > 0.3
    fused = fuse(unfused([10, 20]), Fusion(buffer_nbytes=1000, cycle_s=0.3), ready_s)
    assert lines(fused)[2:4] == ["tick(grad.0, grad.1, every 300 ms)", "pack(grad.0, grad.1 -> fused.0)"]


def test_cycle_with_more_than_a_buffer_holds_is_reduced_in_several() -> None:
    ready_s = dict.fromkeys([f"grad.{number}" for number in range(4)], 1 * MS)
    fused = fuse(unfused([10, 20, 300, 5]), Fusion(buffer_nbytes=200, cycle_s=5 * MS), ready_s)
    assert lines(fused)[4:] == [
        "tick(grad.0, grad.1, grad.2, grad.3, every 5 ms)",
        "pack(grad.0, grad.1 -> fused.0)",
        "all_reduce(fused.0, ...)",
        "unpack(fused.0 -> grad.0, grad.1)",
        "all_reduce(grad.2, ...)",  # larger than the buffer
        "all_reduce(grad.3, ...)",
    ]


def test_without_cycles_a_buffer_leaves_when_the_next_gradient_does_not_fit() -> None:
    fused = fuse(unfused([10, 20, 30]), Fusion(buffer_nbytes=120, cycle_s=None), {})
    assert lines(fused) == [
        "backward(param, loss -> grad.0)",
        "backward(param, loss -> grad.1)",
        "pack(grad.0, grad.1 -> fused.0)",
        "all_reduce(fused.0, ...)",
        "unpack(fused.0 -> grad.0, grad.1)",
        "backward(param, loss -> grad.2)",
        "all_reduce(grad.2, ...)",
    ]


@examples(60)
@given(
    counts=st.lists(st.integers(1, 100), min_size=1, max_size=12),
    nbytes=st.integers(4, 800),
    cycle_ms=st.one_of(st.none(), st.integers(1, 8)),
)
def test_every_gradient_is_reduced_once_and_in_order_and_no_buffer_overflows(
    counts: list[int], nbytes: int, cycle_ms: int | None
) -> None:
    plan = unfused(counts)
    ready_s = {f"grad.{number}": (number + 1) * MS for number in range(len(counts))}
    fused = fuse(plan, Fusion(buffer_nbytes=nbytes, cycle_s=cycle_ms and cycle_ms * MS), ready_s)
    packs = {op.dst: op.srcs for op in fused.bodies[0] if isinstance(op, Pack)}
    reduced = [op.buffer for op in fused.bodies[0] if isinstance(op, AllReduce)]
    assert [name for buffer in reduced for name in packs.get(buffer, (buffer,))] == list(ready_s)
    assert all(fused.buffer(name).nbytes <= nbytes for name in packs)
    assert all(len(srcs) > 1 for srcs in packs.values())
    n_ticks = sum(isinstance(op, Tick) for op in fused.bodies[0])
    assert n_ticks == (len({-(-number // cycle_ms) for number in range(1, len(counts) + 1)}) if cycle_ms else 0)


# ---------------------------------------------------------------- in a scenario


def scenario(**schedule: object) -> Scenario:
    """Return two nodes that need 1 s a MB, and three layers of 1 kB whose backward passes end at 20, 40 and 60 ms."""
    return Scenario.model_validate(
        {
            "cluster": {"nodes": 2, "gpus_per_node": 1, "fabric": "ideal", "network": LINK, "device": {"name": "any"}},
            "workload": {
                "tensors": [{"name": name, "count": 250} for name in "abc"],
                "batch_size": 1,
                "forward": "10 ms",
                "backward": "60 ms",
                "optimize": "0 s",
            },
            "schedules": [{"kind": "sync", **schedule}],
            "steps": 2,
        },
        by_alias=True,
        by_name=False,
    )


LINK = {"latency": "0 s", "bandwidth": "1 MB/s"}


def spans(scenario: Scenario, kind: type) -> list[tuple[float, float]]:
    """Return start and end of the operations of a kind on rank 0, in ms."""
    built = build(scenario, scenario.schedules[0])
    traces = [simulate(built.plan, built.costs, {}, engine=engine) for engine in ("des", "fast")]
    assert (traces[0].end_s == traces[1].end_s).all()
    ops = [op for number in built.plan.body_of_steps() for op in built.plan.bodies[number]]
    rows = [row for row, op in enumerate(ops) if isinstance(op, kind)]
    return [
        tuple((array[row, 0] / MS).round(6).item() for array in (traces[0].start_s, traces[0].end_s)) for row in rows
    ]


def test_fused_gradients_leave_at_the_next_tick_of_the_run() -> None:
    """Backward from 10 ms on: gradients at 30, 50, 70 ms. Cycles of 40 ms put the first two together: ready 50."""
    fused = scenario(fusion={"buffer": "1 MB", "cycle": "40 ms"})
    assert spans(fused, Tick) == [(50, 80), (82, 82), (133, 160), (162, 162)]
    # the clock ticks at 80: then 2 kB take 2 ms. The third, ready at 70, has seen that tick, too; step 2 begins at 83
    assert spans(fused, AllReduce) == [(80, 82), (82, 83), (160, 162), (162, 163)]


def test_plain_gradients_do_not_wait_for_ticks() -> None:
    assert spans(scenario(first_bucket_size="1 B", bucket_size="1 B"), AllReduce)[:3] == [(30, 31), (50, 51), (70, 71)]


def test_cycles_need_the_times_of_a_scenario() -> None:
    with pytest.raises(PlanError, match=r"fusion.cycle: .* build the plan from a scenario .*, or write cycle: null"):
        Sync(fusion=Fusion()).plan(Job(2, 1, 3, tensor_counts=(5, 5)))


def test_buckets_beside_fusion_are_refused() -> None:
    problems = Sync(fusion=Fusion(), bucket_nbytes=100).problems(Shape(2, 1))
    assert problems == [
        ("bucket_nbytes", "has no effect beside fusion, which sends every tensor by itself: leave it out")
    ]


def test_job_of_a_scenario_says_how_long_the_backward_pass_of_each_tensor_takes() -> None:
    assert job(scenario()).tensor_backward_s == pytest.approx((0.02, 0.02, 0.02))
    assert np.sum(job(scenario()).tensor_backward_s) == pytest.approx(0.06)
