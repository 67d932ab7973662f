"""Backup workers and unequal inner steps: who takes part in a step, and when it is over."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from engine_runs import des, fast
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from simdist import sweeps
from simdist.chakra.export import Export
from simdist.engines.replay import timing
from simdist.errors import PlanError, TraceError
from simdist.plan import AllReduce, Enter, Group, Plan, Result, Servers
from simdist.plan.check import check
from simdist.plan.delays import DrawnDelays, delay_shapes
from simdist.plan.ops import entering
from simdist.plan.walk import drops_late
from simdist.proof import prove
from simdist.report.page.pages import runs_page
from simdist.report.page.reading import read_report
from simdist.report.page.sections.timelines import shown_runs
from simdist.runs import run_directory
from simdist.runs.building import build, delays
from simdist.scenario import Scenario, loads
from simdist.schedules import Job, LocalSGD, Sync
from simdist.schedules.backup_workers import BackupWorkers
from simdist.schedules.job import Shape
from simdist.studies.comparison import compare
from simdist.studies.facets import GRADIENTS, GradientsUsed
from simdist.studies.validation import validate
from simdist.sweeps import InProcess
from simdist.sweeps import loads as loads_sweep
from simdist.sweeps.results import frame, read_results
from simdist.traces.breakdown import STATES, break_down
from simdist.traces.trace import Trace, read_with_header, write_with_header
from simdist.tuning.candidates import Extras, schedule_of
from simdist.tuning.constraints import Constraints
from simdist.tuning.space import space

N = 8
JOB = Job(N, 4, 6, tensor_counts=(20, 30, 7), delay_channels=frozenset({"compute"}))
ARRAYS = ("ready_s", "start_s", "end_s")
FREE = "ideal"
SLOW = "{latency: 30 us, bandwidth: 1 GB/s}"


def scenario_of(
    schedule: str,
    *,
    network: str = FREE,
    n_steps: int = 20,
    more: str = "slow_devices: []",
    compute: str = "1 s",
    nodes: int = N,
) -> Scenario:
    return loads(f"""
        cluster:
          {{nodes: {nodes}, gpus_per_node: {N // nodes}, fabric: ideal, network: {network}, {more}}}
        workload:
          tensors: [{{name: all, count: 1000000}}]
          batch_size: 1
          forward: {compute}
          backward: 0 s
        disturbances: [{{kind: transient, on: compute, probability: 0.5, delay: 1 s}}]
        schedules: [{schedule}]
        steps: {n_steps}
    """)


def by_vectors(delays_s: np.ndarray, compute_s: float, drop: int) -> tuple[list[float], list[set[int]], list[set[int]]]:
    """Return when each step is over, who was late in it, and who sat it out, where the exchange costs nothing.

    Args:
        delays_s: Of each step and rank, `[n_steps, n]`.
        compute_s: Of a step.
        drop: Ranks that no step waits for.
    """
    free_s, over_s = np.zeros(delays_s.shape[1]), 0.0
    ends_s, late, sat_out = [], [], []
    for step_s in delays_s + compute_s:
        arrival_s = np.maximum(free_s, over_s) + step_s
        order = sorted(range(len(arrival_s)), key=lambda rank: (arrival_s[rank], rank))
        over_s = arrival_s[order[len(order) - drop - 1]]
        late.append(set(order[len(order) - drop :]))
        sat_out.append({rank for rank in range(len(order)) if free_s[rank] >= over_s})
        free_s = np.where(free_s >= over_s, free_s, np.maximum(arrival_s, over_s))
        ends_s.append(float(over_s))
    return ends_s, late, sat_out


@examples(40)
@given(st.integers(1, N - 1), st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0, 5.0]))
def test_first_ranks_to_come_end_a_step_and_late_ones_go_on_with_the_newest(drop: int, seed: int, scale: float) -> None:
    built = build(scenario := scenario_of(f"{{kind: backup_workers, backup: {drop}}}"), scenario.schedules[0])
    drawn = np.random.default_rng(seed).exponential(scale, (scenario.steps, N))
    ends_s, late, sat_out = by_vectors(drawn, 1.0, drop)
    for engine in (des, fast):
        trace = engine.simulate(built.plan, built.costs, {"compute": drawn[np.newaxis]})
        rows = drops_late(built.plan)
        assert [set(trace.late[row]) for row in rows] == late
        assert [set(trace.late.get(entering, ())) for entering in rows.values()] == sat_out
        found_s = [min(np.delete(trace.end_s[row], sorted(trace.late[row]))) for row in rows]
        np.testing.assert_allclose(found_s, ends_s, rtol=1e-12)
        np.testing.assert_allclose(trace.makespan_s, ends_s[-1], rtol=1e-12)


@examples(40)
@given(
    st.sampled_from([FREE, SLOW]),
    st.integers(1, N - 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 3]),
    st.sampled_from(["servers: node", "servers: world", "servers: 1", "servers: 3", "algorithm: ring"]),
    st.sampled_from([8, 2]),
)
def test_engines_agree_on_who_is_late_to_the_last_bit(
    network: str, drop: int, seed: int, micro_batches: int, transport: str, nodes: int
) -> None:
    schedule = f"{{kind: backup_workers, backup: {drop}, {transport}}}"
    scenario = scenario_of(schedule, network=network, nodes=nodes)
    workload = scenario.workload.model_copy(update={"micro_batches": micro_batches, "optimize_s": 0.01})
    scenario = scenario.model_copy(update={"workload": workload})
    built = build(scenario, scenario.schedules[0])
    shape = delay_shapes(built.plan)[-1]
    drawn = {"compute": np.random.default_rng(seed).integers(0, 4, shape) / 2}  # many come together
    one, other = (engine.simulate(built.plan, built.costs, drawn) for engine in (des, fast))
    assert dict(one.late) == dict(other.late)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    observed = des.simulate(built.plan, built.costs, drawn, observers=[lambda change: None])
    np.testing.assert_array_equal(observed.end_s, one.end_s)
    expected = break_down(other)
    measured = fast.measure(built.plan, built.costs, DrawnDelays(drawn), n_seeds=1)
    for name in ("makespan_s", *(f"{state}_s" for state in STATES)):
        np.testing.assert_array_equal(getattr(measured, name), getattr(expected, name))


@pytest.mark.parametrize("drop", [1, 3, 6])
def test_a_step_takes_an_order_statistic_of_exponential_delays(drop: int) -> None:
    """The k-th of n comes after sum of 1 / (n - i), i = 0 ... k - 1, of the mean delay."""
    scenario = scenario_of(f"{{kind: backup_workers, backup: {drop}}}", n_steps=1)
    built, n_seeds = build(scenario, scenario.schedules[0]), 1500
    drawn = np.random.default_rng(drop).exponential(1.0, (n_seeds, 1, N))
    step_s = fast.measure(built.plan, built.costs, DrawnDelays({"compute": drawn}), n_seeds=n_seeds).step_s
    expected_s = 1.0 + sum(1 / (N - i) for i in range(N - drop))
    assert abs(step_s.mean() - expected_s) < 3 * step_s.std() / math.sqrt(n_seeds)


@pytest.mark.parametrize(("drop", "probability"), [(1, 0.1), (2, 0.3), (4, 0.5)])
def test_a_step_is_held_up_where_more_ranks_are_than_it_can_do_without(drop: int, probability: float) -> None:
    scenario = scenario_of(f"{{kind: backup_workers, backup: {drop}}}", n_steps=1)
    built, n_seeds = build(scenario, scenario.schedules[0]), 1500
    drawn = 1.0 * (np.random.default_rng(drop).random((n_seeds, 1, N)) < probability)
    step_s = fast.measure(built.plan, built.costs, DrawnDelays({"compute": drawn}), n_seeds=n_seeds).step_s
    held = 1 - sum(math.comb(N, k) * probability**k * (1 - probability) ** (N - k) for k in range(drop + 1))
    assert set(np.unique(step_s)) == {1.0, 2.0}
    assert abs(step_s.mean() - 1 - held) < 3 * math.sqrt(held * (1 - held) / n_seeds)


def test_without_backup_it_is_synchronous_sgd_with_one_bucket() -> None:
    assert BackupWorkers(backup=0, servers=1).plan(JOB).digest() == BackupWorkers(backup=0).plan(JOB).digest()
    assert BackupWorkers(backup=0).plan(JOB).digest() == Sync(bucket_nbytes=None).plan(JOB).digest()


@pytest.mark.parametrize(
    ("nodes", "servers", "times", "late_times"),
    [
        (8, 1, 5, 1),  # the others push to rank 0
        (8, 2, 5 / 2, 1),
        (8, 4, 5 / 4, 1),
        (8, "node", 7 / 8, 7 / 8),  # each rank pushes 7 of 8 parts, and 5 or 6 ranks push one to it
        (8, "world", 7 / 8, 7 / 8),
        (2, 1, 3, 1),  # the first three of the other node push to rank 0's
        (2, "node", 3 / 2, 1 / 2),
        (2, "world", 3 / 2, 1 / 2),  # eighths to four servers of the other node
    ],
)
def test_exchange_costs_a_push_and_a_pull_of_those_who_are_waited_for_and_a_late_one_its_pull(
    nodes: int, servers: int | str, times: float, late_times: float
) -> None:
    """Rank 0 is asked, and answers; then so many times S bytes cross the busiest card of a node, and come back.

    Ranks 3 and 7 are late in the price, those that come late here are others.
    """
    schedule = f"{{kind: backup_workers, backup: 2, servers: {servers}}}"
    scenario = scenario_of(schedule, network=SLOW, n_steps=1, nodes=nodes)
    built = build(scenario, scenario.schedules[0])
    late_s = np.zeros((1, 1, N))
    late_s[..., 3:5] = 100.0, 200.0
    trace = fast.simulate(built.plan, built.costs, {"compute": late_s})
    nbytes, Bps, latency_s = 4e6, 1e9, 30e-6
    assert trace.makespan_s == pytest.approx(1 + 4 * latency_s + 2 * times * nbytes / Bps, rel=1e-12)
    cost = next(cost for op, cost in built.costs.of.items() if isinstance(op, AllReduce))
    assert cost.first_come.late_s == pytest.approx(3 * latency_s + late_times * nbytes / Bps, rel=1e-12)


@pytest.mark.parametrize("engine", [des, fast])
def test_first_ranks_all_reduce_among_themselves_and_a_late_one_pulls_from_one_of_them(engine) -> None:
    """
    Three ranks; a column is 1 ms. Latency is 1 ms, 1 GB/s carry the gradient of 4 MB in 4 ms. F computes for 10 ms, z
    is a delay. q asks rank 0, a is the answer. A ring of two ranks has 2 rounds of 1 + 2 ms: R. Rank 2 comes 7 ms late,
    and has the question, the answer and 1 + 4 ms of a pull before it: P.

            0         10        20        30        40
            |         |         |         |         |
    rank 0  FFFFFFFFFFqaRRRRRRFFFFFFFFFFqaRRRRRR
    rank 1  FFFFFFFFFFqaRRRRRRFFFFFFFFFFqaRRRRRR
    rank 2  zzzzzzzFFFFFFFFFFqaPPPPP

    Rank 2 has the first average at 24 ms, begins the second step and comes at 34 ms, when the others are in. It would
    have the result at 41 ms, but a trace ends with the last result, at 36 ms.
    """
    scenario = loads("""
        cluster: {nodes: 3, gpus_per_node: 1, fabric: ideal, network: {latency: 1 ms, bandwidth: 1 GB/s}}
        workload: {tensors: [{name: all, count: 1000000}], batch_size: 1, forward: 10 ms, backward: 0 s, optimize: 0 s}
        disturbances: [{kind: persistent, on: compute, ranks: [2], delay: 1 ms}]
        schedules: [{kind: backup_workers, backup: 1, algorithm: ring}]
        steps: 2
    """)
    built = build(scenario, scenario.schedules[0])
    delays_s = np.array([[[0.0, 0.0, 7e-3], [0.0, 0.0, 0.0]]])
    trace = engine.simulate(built.plan, built.costs, {"compute": delays_s})
    first, second = drops_late(built.plan)
    assert trace.late[first] == trace.late[second] == (2,)
    np.testing.assert_allclose(trace.end_s[first], [18e-3, 18e-3, 24e-3], rtol=1e-12)
    np.testing.assert_allclose(trace.ready_s[second], [28e-3, 28e-3, 34e-3], rtol=1e-12)
    assert trace.makespan_s == pytest.approx(36e-3, rel=1e-12)


@pytest.mark.parametrize(("n", "drop"), [(8, 1), (8, 2), (8, 7), (4, 3)])
def test_a_ring_of_the_first_costs_a_ring_of_as_many_and_the_question(n: int, drop: int) -> None:
    """2 alpha + 2 (m - 1) (alpha + S beta / m), m = n - b; a late rank 3 alpha + S beta."""
    scenario = loads(f"""
        cluster: {{nodes: {n}, gpus_per_node: 1, fabric: ideal, network: {SLOW}}}
        workload: {{tensors: [{{name: all, count: 1000000}}], batch_size: 1, forward: 1 s, backward: 0 s}}
        schedules: [{{kind: backup_workers, backup: {drop}, algorithm: ring}}]
        steps: 1
    """)
    built = build(scenario, scenario.schedules[0])
    [cost] = [cost for op, cost in built.costs.of.items() if isinstance(op, AllReduce)]
    nbytes, Bps, latency_s, m = 4e6, 1e9, 30e-6, n - drop
    assert cost.alone_s == pytest.approx(2 * latency_s + 2 * (m - 1) * (latency_s + nbytes / m / Bps), rel=1e-12)
    assert cost.first_come.late_s == pytest.approx(3 * latency_s + nbytes / Bps, rel=1e-12)


def test_algorithm_of_the_first_ranks_has_to_fit_their_number_and_needs_no_servers() -> None:
    assert BackupWorkers(backup=2, algorithm="ring").name == "backup-2-ring"
    assert BackupWorkers(backup=4, algorithm="halving_doubling").problems(Shape(N, 4)) == []
    [(field, says)] = BackupWorkers(backup=2, algorithm="halving_doubling").problems(Shape(N, 4))
    assert field == "algorithm"
    assert says == "halving_doubling needs a power of two; the world without 2 has 6 ranks: choose ring"
    plan = BackupWorkers(backup=2, algorithm="halving_doubling").plan(JOB)
    with pytest.raises(PlanError, match=r"over a .* without 2; it needs a power of two, or choose ring"):
        check(plan)
    [says] = BackupWorkers(backup=1, algorithm="ring", servers=2).unused_settings(Shape(N, 4, 1))
    assert says == "the first ranks all-reduce among themselves: servers has no effect"


def test_tune_tries_backup_workers_by_servers_and_by_a_ring() -> None:
    scenario = scenario_of("{kind: sync}", nodes=4)
    found = space(scenario, Constraints(global_every=8), Extras(only=("backup_workers",), allow=("backup",)))
    names = {schedule_of(candidate).name for candidate in found.candidates}
    assert names == {"backup-1", "backup-1-ps-1", "backup-1-ps-8", "backup-1-ring"}


def test_servers_that_do_not_fit_are_refused_or_said_to_be_idle() -> None:
    assert BackupWorkers(backup=2, servers=8).problems(Shape(N, 4)) == []
    assert BackupWorkers(backup=2, servers="world").name == "backup-2-ps-world"
    for servers in (0, 9):
        [(field, says)] = BackupWorkers(backup=2, servers=servers).problems(Shape(N, 4))
        assert (field, says) == ("servers", f"{servers} on 8 ranks: write 1 to 8, node or world")
    [says] = BackupWorkers(backup=1, run_ahead_steps=2).unused_settings(Shape(N, 4, 1))
    assert says.endswith("run_ahead_steps has no effect")
    [says] = BackupWorkers(backup=0, servers=1).unused_settings(Shape(N, 4, 1))
    assert says == "waits for all ranks, which need no servers: servers has no effect"


def test_a_trace_says_who_was_late(tmp_path: Path) -> None:
    scenario = scenario_of("{kind: backup_workers, backup: 2}")
    built = build(scenario, scenario.schedules[0])
    trace = fast.simulate(built.plan, built.costs, delays(scenario))
    trace.save(tmp_path / "trace.npz")
    assert dict(Trace.load(tmp_path / "trace.npz").late) == dict(trace.late)
    with pytest.raises(TraceError, match="drops the late: at other speeds others would be"):
        timing(trace)
    header = {}
    _, arrays = read_with_header(
        tmp_path / "trace.npz", "simdist-trace-1", ARRAYS, lambda found, _: header.update(found), what="", hint=""
    )
    for wrong in ({"999999": [0]}, {"3": [N]}, {"x": [0]}, [3]):
        write_with_header(tmp_path / "wrong.npz", header | {"late": wrong}, dict(zip(ARRAYS, arrays, strict=True)))
        with pytest.raises(TraceError, match="`late` is no table of the plan's all-reduces"):
            Trace.load(tmp_path / "wrong.npz")


def test_proof_counts_who_is_dropped() -> None:
    schedule = BackupWorkers(backup=2)
    plan = schedule.plan(JOB)
    with pytest.raises(PlanError, match="holds 1/6 of the gradient of rank 0; the schedule declares 1/8"):
        prove(plan, lambda step: Result(Group(N), Group(1)))
    with pytest.raises(PlanError, match="holds 1/6 of the gradient of rank 0; the schedule declares 1/5"):
        prove(plan, lambda step: Result(Group(N), Group(1), drop=3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda op: dataclasses.replace(op, drop=N), "drops 8; write fewer than all 8 ranks"),
        (lambda op: dataclasses.replace(op, group=Group(4)), "write fewer than all 8 ranks, over all ranks"),
        (lambda op: dataclasses.replace(op, drop=0), "a step that may be late waits for its parameters first"),
        (lambda op: dataclasses.replace(op, servers=Servers((57,), (1,))), "the first of them member 0"),
        (lambda op: dataclasses.replace(op, servers=Servers((0, 57), (0, 1))), "member 0, with a part"),
        (lambda op: (op, AllReduce("grad.0", Group(2))), "stands beside an all-reduce that drops the late"),
        (lambda op: (Enter(awaits="param"), op), "stands in the middle of a step; put it first"),
    ],
)
def test_plan_that_cannot_be_late_is_refused(change, says: str) -> None:
    plan = BackupWorkers(backup=2, servers=1).plan(JOB)
    changed = (change(op) if isinstance(op, AllReduce) else op for op in plan.bodies[0])
    body = tuple(op for each in changed for op in (each if isinstance(each, tuple) else (each,)))
    with pytest.raises(PlanError, match=says):
        check(dataclasses.replace(plan, bodies=(body,)))


@pytest.mark.parametrize(
    "schedule", ["{kind: backup_workers, backup: 2}", "{kind: local_sgd, period: 2, inner_steps: {1: 1}}"]
)
def test_execution_traces_of_steps_that_ranks_sit_out_are_refused(schedule: str) -> None:
    scenario = scenario_of(schedule)
    built = build(scenario, scenario.schedules[0])
    with pytest.raises(PlanError, match="ranks sit steps out, and execution traces are the same on every rank"):
        Export(built.plan, built.costs, scenario.workload, delays(scenario), scenario.steps)


# ---------------------------------------------------------------- unequal inner steps


def entered(plan: Plan) -> list[tuple[int, ...]]:
    """Return the ranks that sit out each step."""
    enters = [entering(plan.bodies[number]) for number in plan.body_of_steps()]
    return [enter.absent if enter else () for enter in enters]


def test_slow_ranks_do_the_last_steps_of_a_period() -> None:
    job = dataclasses.replace(JOB, n_steps=11)
    schedule = LocalSGD(period=4, warmup_steps=1, inner_steps={6: 3, 1: 1})
    assert entered(schedule.plan(job)) == [(), (1, 6), (1,), (1,), (), (1, 6), (1,), (1,), (), (1, 6), (1,)]
    by_phase = LocalSGD(period=4, phase=1, inner_steps={1: 1})
    assert entered(by_phase.plan(job)) == [(1,), (), (1,), (1,), (1,), (), (1,), (1,), (1,), (), (1,)]


@pytest.mark.parametrize("engine", [des, fast])
def test_a_round_takes_the_longest_of_steps_times_their_seconds(engine) -> None:
    inner = {1: 2, 3: 3, 4: 1}
    more = "slow_devices: [{ranks: [1], speed: 0.25}, {ranks: [3], speed: 0.8}]"
    scenario = scenario_of(f"{{kind: local_sgd, period: 4, inner_steps: {inner}}}", more=more, n_steps=12)
    scenario = scenario.model_copy(update={"disturbances": ()})
    built = build(scenario, scenario.schedules[0])
    round_s = max(2 / 0.25, 3 / 0.8, 1, 4)
    assert engine.simulate(built.plan, built.costs, {}).makespan_s == pytest.approx(3 * round_s, rel=1e-12)


def test_a_device_of_half_the_speed_costs_nothing() -> None:
    slow = "slow_devices: [{ranks: [2], speed: 0.5}]"
    makespan_s = []
    for more, schedule in [
        ("slow_devices: []", "{kind: local_sgd, period: 4}"),
        (slow, "{kind: local_sgd, period: 4, inner_steps: by_speed}"),
        (slow, "{kind: local_sgd, period: 4}"),
    ]:
        scenario = scenario_of(schedule, more=more).model_copy(update={"disturbances": ()})
        built = build(scenario, scenario.schedules[0])
        one, other = (engine.simulate(built.plan, built.costs, {}) for engine in (des, fast))
        np.testing.assert_array_equal(one.end_s, other.end_s)
        makespan_s.append(one.makespan_s)
    assert makespan_s == pytest.approx([20, 20, 40], rel=1e-12)


@examples(30)
@given(st.integers(0, 2**32 - 1), st.dictionaries(st.integers(0, N - 1), st.integers(1, 4), max_size=5))
def test_engines_agree_where_ranks_sit_steps_out(seed: int, inner: dict[int, int]) -> None:
    scenario = scenario_of(f"{{kind: local_sgd, period: 4, inner_steps: {inner}}}", network=SLOW)
    built = build(scenario, scenario.schedules[0])
    drawn = {"compute": np.random.default_rng(seed).exponential(1.0, (1, scenario.steps, N))}
    one, other = (engine.simulate(built.plan, built.costs, drawn) for engine in (des, fast))
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    measured = fast.measure(built.plan, built.costs, DrawnDelays(drawn), n_seeds=1)
    np.testing.assert_array_equal(measured.compute_s, break_down(one).compute_s)


def test_unequal_steps_that_do_not_fit_are_refused() -> None:
    found = LocalSGD(period=4, inner_steps={8: 2, 1: 5}).problems(Shape(N, 4))
    assert [name for name, _ in found] == ["inner_steps"] * 2
    [(_, says)] = LocalSGD(period=4, inner_steps=dict.fromkeys(range(N), 3)).problems(Shape(N, 4))
    assert says == "no rank does all 4 steps: leave one out, or write period: 3"
    with pytest.raises(PlanError, match="it is not known here how fast the devices are"):
        LocalSGD(period=4, inner_steps="by_speed").plan(JOB)
    plan = LocalSGD(period=2, inner_steps={1: 1}).plan(JOB)
    for absent, says in [((1, 1), "write some of 8 in order"), ((8,), "write some of 8"), (tuple(range(N)), "not all")]:
        bodies = tuple((Enter(absent), *body[1:]) if entering(body) else body for body in plan.bodies)
        with pytest.raises(PlanError, match=says):
            check(dataclasses.replace(plan, bodies=bodies))
    late = tuple((Enter((1,)), *body) if not entering(body) else body for body in plan.bodies)
    with pytest.raises(PlanError, match="has to wait for ranks that sit the step out"):
        check(dataclasses.replace(plan, bodies=late))
    with pytest.raises(PlanError, match="rank 1 holds nothing of the gradient of rank 1; the schedule declares"):
        prove(plan, lambda step: Result(Group(1), Group(N) if step % 2 else Group(1)))


def test_share_of_the_gradients_that_updates_use_and_who_is_always_late_are_told() -> None:
    schedules = (
        "{kind: sync}, {kind: backup_workers, backup: 2}, {kind: backup_workers, backup: 1}, "
        "{kind: local_sgd, period: 4, inner_steps: {3: 2}}"
    )
    scenario = scenario_of(schedules, more="slow_devices: [{ranks: [3], speed: 0.1}]")
    rows = compare(scenario, n_seeds=3)
    assert [each.of(GRADIENTS).share for each in rows] == [1, 0.75, 0.875, 1 - 2 / 4 / N]
    assert [each.of(GRADIENTS).late for each in rows] == [{}, {3: 1.0}, {3: 1.0}, {}]
    assert [each.document().get("gradients_used") for each in rows] == [None, 0.75, 0.875, 1 - 2 / 4 / N]
    (remark,) = GradientsUsed(0.75, {3: 1.0, 4: 0.95}).remarks("backup-2")
    assert remark.text == (
        "backup-2 uses the gradients of 75.0 % of the batches: times are per step, not per sample; "
        "ranks 3, 4 come too late for 95.0 % or more of the updates"
    )
    assert GradientsUsed().remarks("sync") == []


def test_sweeps_runs_and_their_pages_say_which_share_of_the_gradients_updates_use(tmp_path: Path) -> None:
    scenario = scenario_of("{kind: sync}, {kind: backup_workers, backup: 1, label: spare}", n_steps=3)
    settings = {"scenario": scenario.model_dump(mode="json"), "vary": {"schedules[1].backup": [1, 2]}, "seeds": 1}
    sweep = loads_sweep(json.dumps(settings))
    sweep_folder, run_folder = tmp_path / "sweep", tmp_path / "runs"
    sweeps.sweep(sweep, sweep_folder, workers=InProcess())
    for schedule in scenario.schedules:
        one, built = scenario.model_copy(update={"schedules": (schedule,)}), build(scenario, schedule)
        drawn = delays(scenario)
        run_directory.write(run_folder / schedule.name, one, built.plan, drawn)
        run_directory.save_trace(
            fast.simulate(built.plan, built.costs, drawn), run_folder / schedule.name / run_directory.SIMULATED
        )
    for folder, wanted in ((sweep_folder, [1.0, 0.875, 1.0, 0.75]), (run_folder, [0.875, 1.0])):
        assert frame(folder).gradients_used.tolist() == wanted
    text = "spare uses the gradients of {} of the batches: times are per step, not per sample"
    used = [(each.text, each.points) for each in read_results([sweep_folder]).remarks if each.place == "spare"]
    assert used == [(text.format("87.5 %"), (0,)), (text.format("75.0 %"), (1,))]
    runs = [run_directory.read(run_folder / schedule.name) for schedule in scenario.schedules]
    page = runs_page(
        report := read_report(run_folder, runs, baseline=None, progress=lambda *_: None), shown_runs(report, None)
    )
    assert f"Simulated, {text.format('87.5 %')}." in page


@pytest.mark.parametrize(
    "schedule", ["{kind: backup_workers, backup: 3}", "{kind: local_sgd, period: 4, inner_steps: {1: 2, 6: 3}}"]
)
def test_delays_of_steps_that_a_rank_sits_out_are_not_injected(schedule: str) -> None:
    scenario = scenario_of(schedule)
    built = build(scenario, scenario.schedules[0])
    trace = fast.simulate(built.plan, built.costs, delays(scenario))
    (found,) = validate(trace, trace, delays(scenario)).injections
    assert 0 < found.count < (delays(scenario)["compute"] > 0).sum()
    assert found.drawn_s == pytest.approx(found.measured_s)
