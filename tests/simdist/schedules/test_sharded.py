"""Sharded schedules: timelines worked by hand, closed forms, and the schedules that they are equal to."""

import dataclasses

import pytest
from engine_runs import simulate
from fsdp_rules import rows_by_rules
from fsdp_settings import random_settings
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sharded import Seconds, plan_of, priced, rows_of, schedule_of, step_s, times

from simdist.errors import SimdistError
from simdist.plan import AllGather, AllReduce, Group, Wait, lane_of
from simdist.plan.check import check
from simdist.plan.plan import ITEM_NBYTES
from simdist.proof import prove
from simdist.runs.building import build
from simdist.scenario import dump, load, loads
from simdist.schedules import Job
from simdist.schedules.diloco import DiLoCo
from simdist.schedules.fsdp import FSDP
from simdist.schedules.hsdp import HSDP
from simdist.schedules.job import Shape
from simdist.schedules.local_sgd import LocalSGD
from simdist.schedules.sharded import ShardedSchedule
from simdist.schedules.sync import Sync
from simdist.schedules.tuning import OUTER_OPTIMIZER, Allowance
from simdist.schedules.units import ModelUnit, units_of_names, units_of_sizes
from simdist.settings.base import unchecked_copy
from simdist.tuning.constraints import sent_nbytes

NAMES = {
    "AG": "AllGather gathered",
    "F": "Forward activations",
    "B": "Backward grad",
    "RS": "ReduceScatter reduced",
    "AR": "AllReduce reduced",
    "AV": "AllReduce flat",
}
COMPUTE_BOUND = """
AG0 0 2    AG1 2 4    AG2 4 6    F0 2 6     F1 6 10    F2 10 14   AG2 10 12  B2 14 22   AG1 14 16
RS2 22 25  B1 22 30   AG0 25 27  RS1 30 33  B0 30 38   RS0 38 41  OPT 41 42
"""
BOUND_BY_GATHERS = """
AG0 0 5    AG1 5 10   AG2 10 15  F0 5 7     F1 10 12   F2 15 17   AG2 15 20  B2 20 28   AG1 20 25
RS2 28 31  B1 28 36   AG0 31 36  RS1 36 39  B0 36 44   RS0 44 47  OPT 47 48
"""
REPLICATED = """
AG0 0 1    AG1 1 2    AG2 2 3    F0 1 4     F1 4 7     F2 7 10    AG2 7 8    B2 10 15   AG1 10 11  RS2 15 17
B1 15 20   AR2 17 24  AG0 17 18  RS1 20 22  B0 20 25   AR1 24 31  RS0 25 27  AR0 31 38  OPT 38 39
"""
AVERAGED = """
AG0 0 1    AG1 1 2    AG2 2 3    F0 1 4     F1 4 7     F2 7 10    AG2 7 8    B2 10 15   AG1 10 11  RS2 15 17
B1 15 20   AG0 17 18  RS1 20 22  B0 20 25   RS0 25 27  OPT 27 28  AV0 28 35  AV1 35 42  AV2 42 49
AG0 35 36  AG1 42 43  AG2 49 50  F0 49 52   F1 52 55   F2 55 58   AG2 55 56  B2 58 63   AG1 58 59  RS2 63 65
B1 63 68   AG0 65 66  RS1 68 70  B0 68 73   RS0 73 75  OPT 75 76  AV0 76 83  AV1 83 90  AV2 90 97
"""


def named(text: str) -> set[tuple[str, float, float]]:
    words = text.split()
    rows = zip(words[::3], words[1::3], words[2::3], strict=True)
    return {(_long(name), float(start), float(end)) for name, start, end in rows}


def _long(name: str) -> str:
    if name == "OPT":
        return "Optimize param.0"
    kind = name.rstrip("0123456789")
    return f"{NAMES[kind]}.{name.removeprefix(kind)}"


@pytest.mark.parametrize("engine", ["fast", "des"])
def test_averages_between_copies_worked_by_hand(engine: str) -> None:
    """A unit is gathered once its slice is averaged, and used once all slices are."""
    plan = plan_of(HSDP(shard=2, between="local-1"), 3, n_steps=2)
    seconds = Seconds(3, 5, 1, 2, average=7)
    rows = times(plan, simulate(plan, priced(plan, seconds), {}, engine=engine))
    assert sorted(rows) == sorted(named(AVERAGED))


@pytest.mark.parametrize(
    ("schedule", "seconds", "drawn"),
    [
        (FSDP(), Seconds(4, 8, 2, 3), COMPUTE_BOUND),
        (FSDP(), Seconds(2, 8, 5, 3), BOUND_BY_GATHERS),
        (HSDP(shard=2), Seconds(3, 5, 1, 2, average=7), REPLICATED),
    ],
)
@pytest.mark.parametrize("engine", ["fast", "des"])
def test_timelines_worked_by_hand(schedule: ShardedSchedule, seconds: Seconds, drawn: str, engine: str) -> None:
    plan = plan_of(schedule, 3)
    rows = times(plan, simulate(plan, priced(plan, seconds), {}, engine=engine))
    assert set(rows) == named(drawn)
    assert len(rows) == len(named(drawn))


units = st.integers(3, 6)
whole = st.integers(1, 12)


@given(units, whole, whole, whole, whole)
def test_compute_bound(n: int, f: int, b: int, g: int, r: int) -> None:
    g = min(g, f)
    b = max(b, r + g)
    assert step_s(FSDP(), Seconds(f, b, g, r), n) == g + n * (f + b) + r + 1


@given(units, whole, whole, whole, whole)
def test_forward_pass_bound_by_gathers(n: int, f: int, b: int, g: int, r: int) -> None:
    g = max(g, f)
    b = max(b, r + g)
    assert step_s(FSDP(), Seconds(f, b, g, r), n) == (n + 1) * g + n * b + r + 1


@given(units, whole, whole, whole, whole, st.integers(1, 3))
def test_bound_by_one_communicator(n: int, f: int, b: int, g: int, r: int, cap: int) -> None:
    g = max(g, f)
    b = min(b, r + g)
    expected = (n + 1) * g + max(b, g) + (n - 2) * (g + r) + max(b, r) + r + 1
    assert step_s(FSDP(reduce_buffers=cap), Seconds(f, b, g, r), n) == expected
    if b <= min(g, r):
        assert expected == 2 * n * g + n * r + 1


@given(units, whole, whole, whole, whole, whole, st.integers(1, 3))
def test_replicas(n: int, f: int, b: int, g: int, r: int, a: int, k: int) -> None:
    g = min(g, f)
    b = max(b, r + g)
    seconds = Seconds(f, b, g, r, average=a)
    last = g + n * f + b + r + n * a if a >= b else g + n * (f + b) + r + a
    assert step_s(HSDP(shard=2), seconds, n) == last + 1
    assert step_s(HSDP(shard=2), seconds, n, micro_batches=k) == k * last + 1
    deferred = HSDP(shard=2, all_reduce="last")
    assert step_s(deferred, seconds, n, micro_batches=k) == (k - 1) * (g + n * (f + b) + r) + last + 1
    local = HSDP(shard=2, accumulation="local")
    assert step_s(local, seconds, n, micro_batches=k) == (k - 1) * (g + n * (f + b)) + last + 1


@given(units, whole, whole, whole, whole, st.integers(1, 3))
def test_bound_by_reduce_scatters(n: int, f: int, b: int, g: int, r: int, cap: int) -> None:
    g = min(g, f)
    r = max(r, b)
    kept = FSDP(reshard_after_forward=False, reduce_buffers=cap)
    expected = g + n * f + b + n * r + 1
    assert step_s(kept, Seconds(f, b, g, r), n) == expected
    if g <= b:
        assert step_s(FSDP(communicators=2, reduce_buffers=cap), Seconds(f, b, g, r), n) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reshard_after_forward": True}, 2 * 3),
        ({"reshard_after_forward": False}, 3),
        ({"reshard_after_forward": True, "reshard_after_backward": False}, 3 + 1),
        ({"reshard_after_forward": False, "reshard_after_backward": False}, 1),
    ],
)
def test_gathers_of_three_micro_batches(settings: dict[str, object], expected: int) -> None:
    plan = plan_of(FSDP(**settings), 4, micro_batches=3)
    gathered = [op.dst for op in plan.bodies[0] if isinstance(op, AllGather)]
    assert {name: gathered.count(name) for name in gathered} == dict.fromkeys(
        [f"gathered.{number}" for number in range(4)], expected
    )


@pytest.mark.parametrize(
    ("settings", "n_gathers"), [({}, 8), ({"reshard_after_forward": False}, 4), ({"forward_prefetch": 2}, 8)]
)
def test_on_cpus_everything_runs_in_turn(settings: dict[str, object], n_gathers: int) -> None:
    seconds = Seconds(forward=4, backward=8, gather=2, reduce=3, update=1)
    serial_s = 4 * (4 + 8) + n_gathers * 2 + 4 * 3 + 1
    assert step_s(FSDP(blocking=True, **settings), seconds, 4) == serial_s
    in_copies = HSDP(shard=2, blocking=True, **settings)
    assert step_s(in_copies, dataclasses.replace(seconds, average=5), 4) == serial_s + 4 * 5


def runs_as_under_fully_shard(seed: int) -> bool:
    """Compare a random job with torch's own code on a virtual clock; return False if no schedule has its settings."""
    settings = random_settings(seed)
    schedule = schedule_of(settings)
    if schedule is None:
        return False
    expected = sorted(
        ("gather" if row.kind == "backward_gather" else row.kind, row.unit, row.start, row.end)
        for row in rows_by_rules(settings)
        if row.kind != "optimize"
    )
    assert rows_of(settings, schedule) == expected, (seed, schedule)
    return True


@pytest.mark.parametrize("seed", [47, 97, 110, 137])
def test_random_jobs_with_most_waits_run_as_under_fully_shard(seed: int) -> None:
    assert runs_as_under_fully_shard(seed)


def test_random_jobs_run_as_under_fully_shard() -> None:
    """`fsdp_rules` says what torch's own code does on a virtual clock, see tests/real/fsdp."""
    assert sum(map(runs_as_under_fully_shard, range(1_200))) > 300


JOB = Job(
    8,
    4,
    4,
    tensor_counts=(30, 7, 500, 12),
    tensor_rows=(10, 7, 25, 4),
    micro_batches=2,
    units=(ModelUnit(0, 1), ModelUnit(1, 3), ModelUnit(3, 4)),
)

OF_EIGHT = {
    "cluster": {"nodes": 2, "gpus_per_node": 4, "fabric": "ideal", "network": "ideal"},
    "workload": {"tensors": [{"name": "w", "count": 64}], "batch_size": 1, "forward": "1 ms"},
    "steps": 4,
}


def test_one_rank_a_copy_is_sync_and_one_copy_is_fsdp() -> None:
    assert HSDP(shard=1).plan(JOB).digest() == Sync().plan(JOB).digest()
    assert HSDP(shard=8).plan(JOB).digest() == FSDP().plan(JOB).digest()


@pytest.mark.parametrize("schedule", [FSDP(), HSDP(shard=2), HSDP(shard=1)])
def test_a_candidate_with_many_settings_has_a_plan_however_long_its_label_is(schedule: ShardedSchedule) -> None:
    named = unchecked_copy(schedule, label=f"{schedule.name}-{'many-settings-' * 8}")
    assert named.result(0, JOB) == schedule.result(0, JOB)
    assert named.plan(JOB).bodies == schedule.plan(JOB).bodies


@pytest.mark.parametrize("n", [2, 4, 8])
def test_tensors_are_padded_by_rows(n: int) -> None:
    plan = HSDP(shard=n).plan(JOB)
    rows = [10, 7, 25, 4]
    widths = [3, 1, 20, 3]
    padded = [-(-row // n) * n * width for row, width in zip(rows, widths, strict=True)]
    expected = [padded[0], padded[1] + padded[2], padded[3]]
    assert [plan.buffer(f"gathered.{unit}").count for unit in range(3)] == expected
    assert [plan.buffer(f"param.{unit}").count * n for unit in range(3)] == expected


def test_a_wait_of_a_stream_delays_no_later_writer() -> None:
    """All-reduces between copies overlap with the backward pass of the unit that waited for their reduce-scatter."""
    plan = plan_of(HSDP(shard=2), 3)
    waits = [op for op in plan.bodies[0] if isinstance(op, Wait) and lane_of(op).kind == "compute"]
    assert [op.buffer for op in waits] == ["reduced.2", "reduced.1"]


@pytest.mark.parametrize("kept", [0, -2])
def test_no_ranks_cannot_keep_a_unit(kept: object) -> None:
    with pytest.raises(ValidationError, match=r"ranks keep a unit: write true, false, or 1 and more"):
        FSDP.model_validate({"reshard_after_forward": kept})


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype"])
def test_parameters_and_gradients_are_floating_point(field: str) -> None:
    with pytest.raises(ValidationError, match="bfloat16"):
        FSDP.model_validate({field: "uint8"})


def test_units_follow_from_names_or_sizes() -> None:
    names = ["embed.weight", "layers.0.a", "layers.0.b", "layers.1.a", "norm.weight", "output.weight"]
    units = units_of_names(names)
    assert [unit.tensors for unit in units] == [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert [unit.is_block for unit in units] == [False, True, True, False]
    assert [unit.tensors for unit in units_of_sizes([2, 3])] == [(0, 2), (2, 5)]


def test_the_root_is_gathered_first_and_reduced_last() -> None:
    job = dataclasses.replace(
        JOB, micro_batches=1, units=(ModelUnit(0, 1, False), ModelUnit(1, 3), ModelUnit(3, 4, False))
    )
    plan = FSDP(wrap="blocks").plan(job)
    gathers = [op.dst for op in plan.bodies[0] if isinstance(op, AllGather)]
    assert gathers == ["gathered.0", "gathered.2", "gathered.1", "gathered.1"]
    scattered = [op.dst for op in plan.bodies[0] if type(op).__name__ == "ReduceScatter"]
    assert scattered == ["reduced.1", "reduced.0", "reduced.2"]


def test_a_root_that_stands_first_is_gathered_again_after_the_last_unit() -> None:
    units = (ModelUnit(0, 1, False), ModelUnit(1, 3), ModelUnit(3, 4))
    job = dataclasses.replace(JOB, micro_batches=1, units=units)
    plan = FSDP(wrap="blocks", reshard_after_forward=True).plan(job)
    gathers = [op.dst for op in plan.bodies[0] if isinstance(op, AllGather)]
    assert gathers == [f"gathered.{number}" for number in (0, 1, 2, 2, 1, 0)]


def test_the_last_block_is_kept_although_the_root_stands_last() -> None:
    """As torchtitan wraps a model: the head belongs to the root, and the last block is not freed."""
    units = (ModelUnit(0, 1, False), ModelUnit(1, 2), ModelUnit(2, 3), ModelUnit(3, 4, False))
    job = dataclasses.replace(JOB, micro_batches=1, units=units)
    plan = FSDP(wrap="blocks", keep_last_unit=True).plan(job)
    gathers = [op.dst for op in plan.bodies[0] if isinstance(op, AllGather)]
    assert gathers == ["gathered.0", "gathered.3", "gathered.1", "gathered.2", "gathered.1"]


@pytest.mark.parametrize(("micro_batches", "dtype"), [(1, "bfloat16"), (2, "float32")])
def test_whole_gradients_add_up_in_the_type_in_which_they_are_reduced(micro_batches, dtype):
    """As `to_accumulated_grad_if_needed` of torch: they take twice the memory of the gradients of one pass."""
    local = FSDP(accumulation="local", param_dtype="bfloat16", reduce_dtype="float32")
    plan = plan_of(local, 2, micro_batches=micro_batches)
    assert {buffer.dtype for buffer in plan.buffers if buffer.name.startswith("grad.")} == {dtype}


@pytest.mark.parametrize(
    ("schedule", "n_gathers"),
    [
        (HSDP(shard=4), 2),
        (HSDP(shard=4, reshard_after_forward=False), 1),
        (HSDP(shard=4, param_dtype="bfloat16", reduce_dtype="float32"), 2),
        (FSDP(), 2),
        (FSDP(param_dtype="float16", reshard_after_forward=False), 1),
    ],
)
def test_bytes_that_a_rank_sends_are_those_of_rings(schedule: ShardedSchedule, n_gathers: int) -> None:
    """Gathers and reduce-scatters send (N - 1)/N of a padded unit, all-reduces 2 (R - 1)/R of a slice."""
    scenario = loads("""
    cluster: {nodes: 1, gpus_per_node: 8, fabric: {latency: 0 s, bandwidth: 1 GB/s}, network: ideal}
    workload:
      tensors: [{name: "h.0.w", count: 1300, rows: 13}, {name: "h.1.w", count: 700, rows: 7}, {name: "h.1.b", count: 5}]
      batch_size: 1
      forward: 10 ms
    schedules: [sync]
    steps: 3
    """)
    chosen = schedule.model_copy(update={"algorithm": "ring"})
    built = build(scenario, chosen)
    n = schedule.sharers(8)
    rows = [(13, 100), (7, 100), (5, 1)]
    padded = sum(-(-count // n) * n * width for count, width in rows)
    gathered = padded * ITEM_NBYTES[schedule.param_dtype or "float32"]
    reduced = padded * ITEM_NBYTES[schedule.reduce_dtype or schedule.param_dtype or "float32"]
    replicas = 8 // n
    expected = (n_gathers * gathered + reduced) * (n - 1) / n + 2 * (replicas - 1) / replicas * reduced / n
    assert sent_nbytes(scenario, built) == pytest.approx(expected, rel=1e-12)


def test_what_copies_exchange_is_a_schedule_whose_ranks_are_copies() -> None:
    assert FSDP(algorithm="ring").between_copies() == Sync(label="fsdp", algorithm="ring")
    assert HSDP(shard=4).between_copies() == Sync(label="hsdp-4")
    averaged = HSDP(shard=4, between="local-3", algorithm="ring")
    assert averaged.between_copies() == LocalSGD(label="hsdp-4-local-3", algorithm="ring", period=3)
    own = HSDP(shard=4, between={"kind": "diloco", "period": 9, "algorithm": "tree"}, algorithm="ring")
    assert own.between_copies() == DiLoCo(label="hsdp-4-diloco-9", algorithm="tree", period=9)


@pytest.mark.parametrize(
    ("between", "gradients", "parameters"),
    [
        ("local-2", [2, 2, 2, 2], [1, 8, 1, 8]),
        ("hsgd-1-2,4-world", [2, 2, 2, 2], [4, 4, 4, 8]),
        ({"kind": "hierarchical_sgd", "levels": {4: "world"}, "warmup_steps": 1}, [8, 4, 4, 4], [1, 1, 1, 1]),
        ({"kind": "diloco", "period": 2, "ranks_per_worker": 2}, [4, 4, 4, 4], [1, 8, 1, 8]),
        ({"kind": "diloco", "period": 2, "overlap_steps": 1}, [2, 2, 2, 2], [1, 1, 8, 1]),
    ],
)
def test_groups_of_copies_average_gradients_and_parameters(between, gradients, parameters) -> None:
    """Eight ranks on two nodes: two ranks share a copy, and a node has two copies."""
    if isinstance(between, str) and between.startswith("hsgd"):
        between = {"kind": "hierarchical_sgd", "levels": {1: 2, 4: "world"}, "intra_node_gradients": False}
    schedule = HSDP(shard=2, between=between)
    job = dataclasses.replace(JOB, ranks_per_node=4, n_steps=4)
    plan = schedule.plan(job)
    check(plan)
    prove(plan, lambda step: schedule.result(step, job))
    results = [schedule.result(step, job) for step in range(4)]
    assert [each.gradients.size for each in results] == gradients
    assert [each.parameters.size for each in results] == parameters


def test_fragments_are_whole_units() -> None:
    """Slices of 20, 520 and 6 elements: the first fragment ends at the unit boundary nearest to half of them."""
    schedule = HSDP(shard=2, between={"kind": "diloco", "period": 4, "fragments": 2})
    job = dataclasses.replace(JOB, n_steps=4)
    assert [schedule.result(step, job).tensors for step in range(4)] == [(), ((0, 1),), (), ((1, 3), (3, 4))]
    plan = schedule.plan(job)
    check(plan)
    prove(plan, lambda step: schedule.result(step, job))
    bodies = [plan.bodies[number] for number in plan.body_of_steps()]
    sent = [[op.buffer for op in body if isinstance(op, AllReduce)] for body in bodies]
    assert sent == [[], ["outer.0"], [], ["outer.1", "outer.2"]]


@pytest.mark.parametrize(
    ("between", "n_times", "item_nbytes"),
    [
        ("local-3", 1, 4),
        ({"kind": "diloco", "period": 3}, 1, 4),
        ({"kind": "diloco", "period": 3, "compression": "fp16"}, 1, 2),
        ({"kind": "diloco", "period": 3, "fragments": 2}, 1, 4),
        ({"kind": "local_sgd", "period": 1, "overlap_steps": 1}, 3, 4),
    ],
)
def test_copies_send_their_padded_slices(between: object, n_times: int, item_nbytes: int) -> None:
    plan = HSDP(shard=4, between=between).plan(dataclasses.replace(JOB, n_steps=3))
    sizes = [plan.buffer(f"param.{unit}").count for unit in range(3)]
    ops = [op for number in plan.body_of_steps() for op in plan.bodies[number] if isinstance(op, AllReduce)]
    assert {op.group for op in ops} == {Group(2, stride=4)}
    sent = sum(plan.buffer(op.buffer).count * ITEM_NBYTES[plan.buffer(op.buffer).dtype] for op in ops)
    assert sent == n_times * sum(sizes) * item_nbytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shard": 2, "between": "sync"}, r"between: sync: copies of the model average gradients unless"),
        ({"shard": 2, "between": "local"}, r"between: there is no schedule 'local'"),
        ({"shard": 2, "between": {"kind": "local_sgd"}}, r"between.period"),
        ({"shard": 1, "between": "local-2"}, r"shard: 1 with `between`"),
        ({"shard": 3, "between": "local-2"}, r"shard: 3 does not divide the 8 ranks"),
        ({"shard": 2, "between": {"kind": "local_sgd", "period": 2, "label": "x"}}, r"between: label: write it beside"),
        ({"shard": 2, "between": {"kind": "local_sgd", "period": 2, "inner_steps": {1: 1}}}, r"between: inner_steps"),
        ({"shard": 2, "between": "hsgd-2-4,4-8"}, r"between: of copies: levels: group of 8 .* does not divide 4 ranks"),
        ({"shard": 2, "period": 2}, r"period"),
        ({"shard": 2, "reshard_after_forward": 4}, r"reshard_after_forward: 4 does not divide the 2 ranks"),
    ],
)
def test_what_copies_cannot_exchange_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SimdistError, match=message):
        load(OF_EIGHT | {"schedules": [{"kind": "hsdp", **settings}]})


def test_a_scenario_with_a_schedule_between_copies_is_read_again() -> None:
    between = {"kind": "hierarchical_sgd", "levels": {2: 2, 4: "world"}}
    scenario = load(OF_EIGHT | {"schedules": [{"kind": "hsdp", "shard": 2, "between": between}]})
    assert loads(dump(scenario)).schedules == scenario.schedules
    assert scenario.schedules[0].name == "hsdp-2-hsgd-2-2,4-world"


def test_a_search_tries_levels_between_copies_and_an_outer_optimizer_only_if_allowed() -> None:
    """Eight nodes: two levels have groups of two copies of a node each, and of all."""
    job = dataclasses.replace(JOB, world_size=32)
    names = ("local-4", "local-16", "local-64", "hsgd-4-2,16-world", "hsgd-16-2,64-world")
    (between,) = (each for each in HSDP.axes(job, Allowance()) if each.name == "between")
    assert between.values == (None, *names)
    allowed = Allowance(frozenset({OUTER_OPTIMIZER.word}))
    (between,) = (each for each in HSDP.axes(job, allowed) if each.name == "between")
    assert between.values == (None, *names, "diloco-16", "diloco-64")
    assert all(
        HSDP(shard=4, between=each).between_copies().problems(Shape(8, 1)) == [] for each in between.values if each
    )
