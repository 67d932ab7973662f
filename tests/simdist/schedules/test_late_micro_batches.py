"""Ranks that are late in different micro-batches: where they meet decides what it costs."""

import numpy as np
import pytest
from engine_runs import simulate
from fsdp_ranks import late_jobs, random_lateness, rows_of_ranks
from fsdp_rules import rows_by_rules
from sharded import rows_of, schedule_of

from simdist.plan import Channel
from simdist.plan.delays import DrawnDelays, SomeSeeds
from simdist.runs.building import build, delay_sampler, delays
from simdist.scenario import Scenario, loads
from simdist.scenario.sampling import run_seeds
from simdist.studies.comparison import compare

JOB = """
cluster: {{nodes: 2, gpus_per_node: 8, fabric: ideal, network: ideal}}
workload:
  tensors:
  - {{name: h.0.w, count: 1e7}}
  - {{name: h.1.w, count: 1e7}}
  - {{name: h.2.w, count: 1e7}}
  - {{name: h.3.w, count: 1e7}}
  batch_size: 1
  forward: 40 ms
  backward: 60 ms
  micro_batches: {k}
disturbances: [{late}]
schedules: [sync, fsdp, {{kind: hsdp, shard: 8}}, {{kind: hsdp, shard: 8, all_reduce: last}}, local-4]
steps: {steps}
"""
PASS_S = 0.1


def job(late: str, *, k: int = 8, steps: int = 20) -> Scenario:
    return loads(JOB.format(late=late, k=k, steps=steps))


def step_s(scenario: Scenario, seeds: int) -> dict[str, float]:
    """Return mean step times as simulated, not corrected to the expected delays."""
    found = compare(scenario, n_seeds=seeds).measured
    return {each.label: float(each.as_simulated.step_s.mean()) for each in found}


def by_hand(late_s: np.ndarray, *, shard: int = 8, period: int = 4) -> dict[str, float]:
    """Return the mean seconds of a step, by where ranks meet, given `[n_seeds, n_steps, k, world_size]`."""
    n_seeds, n_steps, k, world_size = late_s.shape
    busy_s = late_s + PASS_S
    of_copies = busy_s.reshape(n_seeds, n_steps, k, world_size // shard, shard).max(axis=4)
    of_periods = busy_s.sum(axis=2).reshape(n_seeds, n_steps // period, period, world_size).sum(axis=2)
    return {
        "sync": busy_s.sum(axis=2).max(axis=2).mean(),
        "fsdp": busy_s.max(axis=3).sum(axis=2).mean(),
        f"hsdp-{shard}": busy_s.max(axis=3).sum(axis=2).mean(),  # copies average in each micro-batch, as in torch
        f"hsdp-{shard}-last": of_copies.sum(axis=2).max(axis=2).mean(),
        f"local-{period}": of_periods.max(axis=2).mean() / period,
    }


def test_a_step_takes_the_largest_sum_or_the_sum_of_the_largest() -> None:
    """Sequences of 1 to 4 times the shortest; 2.55, 3.19 and 3.16 s are means over any steps and seeds."""
    scenario = job("{kind: uneven_work, lengths: [1, 4]}", steps=40)
    found = step_s(scenario, seeds=20)
    assert [found[name] for name in ("sync", "fsdp", "hsdp-8-last")] == pytest.approx([2.55, 3.19, 3.16], rel=0.01)
    drawn = delay_sampler(scenario, run_seeds(0, 20)).take(40)["compute"]
    assert found == pytest.approx(by_hand(drawn), rel=1e-12)
    lengths = np.random.default_rng(1).integers(1, 5, (100, 40, 8, 16)) * PASS_S
    assert found == pytest.approx(by_hand(lengths - PASS_S), rel=5e-3)


@pytest.mark.parametrize(
    ("balance", "expected"), [("sorted", [2.55, 2.65]), ("round_robin", [2.14, 2.14]), ("greedy", [2.05, 2.14])]
)
def test_lengths_that_are_dealt_again_cost_less(balance: str, expected: list[float]) -> None:
    """As the page on known troubles says."""
    scenario = job(f"{{kind: uneven_work, lengths: [1, 4], balance: {balance}}}", steps=40)
    found = step_s(scenario, seeds=10)
    assert [found[name] for name in ("sync", "fsdp")] == pytest.approx(expected, rel=0.01)
    assert found == pytest.approx(by_hand(delay_sampler(scenario, run_seeds(0, 10)).take(40)["compute"]), rel=1e-12)


@pytest.mark.parametrize(
    "late",
    [
        "{kind: uneven_work, lengths: [512, 4096], quadratic: 0.3}",
        "{kind: transient, on: compute, probability: 10%, delay: 300 ms}",
        "{kind: transient, on: host, probability: 10%, delay: 300 ms}",
        "{kind: transient, on: backward, probability: 10%, delay: 300 ms}",
        "{kind: jitter, on: compute, median: 50 ms, sigma: 0.8}",
        "{kind: exponential, on: host, mean: 100 ms}",
        "{kind: heavy_tail, on: compute, scale: 10 ms, shape: 1.5}",
        "{kind: pauses, every: [3, 9], delay: [200 ms, 400 ms]}",
        "{kind: drawn, on: compute, values: [0 s, 0 s, 120 ms]}",
        "{kind: bursts, enter: 20%, leave: 30%, delay: 80 ms}",
        "{kind: persistent, on: compute, ranks: [3], factor: 1.5}",
    ],
)
def test_every_kind_of_delay_is_met_in_its_micro_batch(late: str) -> None:
    scenario = job(late, k=4)
    (drawn,) = delay_sampler(scenario, run_seeds(0, 3)).take(20).values()
    assert drawn.shape == (3, 20, 4, 16)
    assert step_s(scenario, seeds=3) == pytest.approx(by_hand(drawn), rel=1e-12)


def test_two_ranks_that_are_late_in_different_micro_batches_hold_up_all_twice() -> None:
    scenario = job("{kind: transient, on: compute, probability: 0, delay: 1 s}", k=8, steps=1)
    late = np.zeros((1, 1, 8, 16))
    late[0, 0, 2, 3] = 1.0
    late[0, 0, 5, 11] = 1.0
    expected = {"sync": 1.8, "fsdp": 2.8, "hsdp-8": 2.8, "hsdp-8-last": 1.8, "local-4": 1.8}
    for schedule in scenario.schedules:
        built = build(scenario, schedule)
        ends = [simulate(built.plan, built.costs, {"compute": late}, engine=each) for each in ("fast", "des", "auto")]
        assert [each.makespan_s for each in ends] == pytest.approx([expected[schedule.name]] * 3), schedule.name


@pytest.mark.parametrize("channel", ["host", "compute", "backward", "overlap"])
def test_engines_agree_to_the_last_bit_where_micro_batches_are_late(channel: Channel) -> None:
    """Also one rank of each kind for all: links are shared, and few ranks are late."""
    text = JOB.replace(
        "fabric: ideal, network: ideal",
        "fabric: {{latency: 5 us, bandwidth: 100 GB/s}}, network: {{latency: 20 us, bandwidth: 25 Gbit/s}}",
    )
    late = f"{{kind: transient, on: {channel}, probability: 3%, delay: 300 ms}}"
    scenario = loads(text.format(late=late, k=3, steps=6))
    drawn = delays(scenario)
    assert drawn[channel].any()
    for schedule in scenario.schedules:
        built = build(scenario, schedule)
        reference = simulate(built.plan, built.costs, drawn, engine="des")
        found = simulate(built.plan, built.costs, drawn, engine="auto")
        np.testing.assert_allclose(found.end_s, reference.end_s, rtol=1e-9)


def test_only_the_exchange_of_the_last_micro_batch_overlaps_unless_the_model_is_sharded() -> None:
    """Under synchronous SGD, what slows a backward pass beside exchanges lies in the one pass that has any."""
    late = "{kind: persistent, on: overlap, delay: 80 ms}"
    found = step_s(job(late), seeds=1)
    assert found == pytest.approx(dict.fromkeys(found, 8 * PASS_S + 0.08) | {"local-4": 8 * PASS_S})


def test_random_jobs_with_late_ranks_run_as_under_fully_shard() -> None:
    """Each rank, operation by operation. `tests/real/fsdp` compares the rules with torch's own code."""
    jobs = [(seed, settings, schedule_of(settings)) for seed, settings in late_jobs(700)]
    jobs = [each for each in jobs if each[2]]
    assert len(jobs) > 30
    for seed, settings, schedule in jobs:
        assert schedule is not None
        late = random_lateness(settings, seed)
        for rank, rows in enumerate(rows_of_ranks(rows_by_rules, settings, late)):
            expected = sorted(
                ("gather" if row.kind == "backward_gather" else row.kind, row.unit, row.start, row.end)
                for row in rows
                if row.kind != "optimize"
            )
            assert rows_of(settings, schedule, late, rank) == expected, (seed, rank, schedule)


def test_runs_with_drawn_settings_meet_the_delays_of_their_seeds() -> None:
    """The order of the axes: micro-batches stand between steps and ranks."""
    drawn = delay_sampler(job("{kind: jitter, on: compute, median: 50 ms, sigma: 0.8}", k=4), range(3)).take(5)
    chosen = SomeSeeds(DrawnDelays(drawn), np.array([2, 0, 2, 1])).take(5)
    np.testing.assert_array_equal(chosen["compute"], drawn["compute"][[2, 0, 2, 1]])
