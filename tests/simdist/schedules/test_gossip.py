"""Gossip: who averages with whom, how long it takes, and how lateness spreads."""

from itertools import pairwise

import numpy as np
import pytest
from engine_runs import des, fast

from simdist import scenario
from simdist.cost import price
from simdist.engines import recurrence
from simdist.errors import ScenarioError
from simdist.plan import AllReduce, Backward, Buffer, Delay, Forward, Group, Optimize, Plan
from simdist.plan.lanes import AVERAGE
from simdist.runs.building import build, delays
from simdist.scenario.cluster import Cluster, Link
from simdist.schedules import Gossip
from simdist.schedules.job import Shape

ENGINES = pytest.mark.parametrize("engine", [des, fast], ids=["des", "fast"])
STEP_S = 0.05
EXCHANGE_S = 2 * (1e-3 + 2e6 / 100e6)  # halves of 4 MB, there and back


def gossiping(n_ranks, *schedules, disturbances="[]", steps=8):
    return scenario.loads(f"""
cluster:
  {{nodes: {n_ranks}, gpus_per_node: 1, fabric: ideal, network: {{latency: 1 ms, bandwidth: 100 MB/s}}}}
workload:
  {{tensors: [{{name: all, count: 1000000}}], batch_size: 1, forward: 15 ms, backward: 35 ms, optimize: 0 s}}
disturbances: {disturbances}
schedules: [{", ".join(schedules)}]
steps: {steps}
""")


def ends_s(found, engine, schedule=0):
    """Return when each rank finished each step, `[n_steps, world_size]`."""
    built = build(found, found.schedules[schedule])
    trace = engine.simulate(built.plan, built.costs, delays(found))
    first = built.plan.first_instances()
    return np.stack([trace.end_s[begin:end].max(axis=0) for begin, end in pairwise(first)])


@pytest.mark.parametrize("n_ranks", [2, 4, 10, 64])
def test_random_matchings_pair_every_rank_and_repeat(n_ranks):
    schedule, shape = Gossip(matchings=5, seed=3), Shape(n_ranks, 1)
    groups = [schedule.average(step, shape) for step in range(15)]
    for group in groups:
        assert sorted(rank for pair in group.members(n_ranks) for rank in pair) == list(range(n_ranks))
        assert {len(pair) for pair in group.members(n_ranks)} == {2}
    assert groups[:5] == groups[5:10] == groups[10:]
    assert n_ranks < 10 or len(set(groups)) == 5


def test_every_partner_of_a_random_matching_is_as_likely():
    """Rank 0 of 6 has each of 5 partners in a fifth of 5,000 matchings, within five standard errors."""
    shape = Shape(6, 1)
    drawn = [Gossip(seed=seed).average(step, shape) for seed in range(625) for step in range(8)]
    partners = np.bincount([next(pair for pair in group.members(6) if 0 in pair)[1] for group in drawn], minlength=6)
    assert partners[0] == 0
    assert np.abs(partners[1:] / len(drawn) - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / len(drawn))


def test_ranks_of_a_ring_average_with_each_neighbour_in_turn():
    schedule, shape = Gossip(matching="ring", period=2, warmup_steps=1), Shape(6, 2)
    turns = [schedule.average(step, shape) for step in range(9)]
    right, left = Group(2), Group.of([[0, 5], [1, 2], [3, 4]])
    assert turns == [None, None, right, None, left, None, right, None, left]


@ENGINES
@pytest.mark.parametrize("matching", ["ring", "random"])
def test_a_step_without_stragglers_takes_computing_and_one_exchange_of_a_pair(engine, matching):
    """Each rank sends half of the parameters and receives the sum of the other half: 2 (1 ms + 2 MB / 100 MB/s)."""
    found = gossiping(8, f"{{kind: gossip, matching: {matching}}}")
    expected = np.arange(1, 9) * (STEP_S + EXCHANGE_S)
    np.testing.assert_allclose(ends_s(found, engine), np.broadcast_to(expected[:, None], (8, 8)), rtol=1e-12)


@ENGINES
def test_lateness_spreads_by_one_neighbour_on_each_side_a_step(engine):
    """Rank 4 is late once, in step 2, where it averages with rank 5."""
    late_s = np.zeros((8, 10))
    late_s[2, 4] = 1.0
    found = gossiping(10, "{kind: gossip, matching: ring}")
    late = found.changed(disturbances=[{"kind": "recorded", "file": late_s}])
    lateness_s = ends_s(late, engine) - ends_s(found, engine)
    ranks = np.arange(10)
    for step in range(8):
        holds_up = 1 + step - 2  # neighbours to the right; to the left one fewer, because rank 4 begins with rank 5
        is_late = (ranks >= 4 - (holds_up - 1)) & (ranks <= 4 + holds_up) if step >= 2 else np.zeros(10, dtype=bool)
        np.testing.assert_allclose(lateness_s[step], np.where(is_late, 1.0, 0.0), atol=1e-12)


@ENGINES
def test_lateness_of_all_ranks_reaches_a_rank_as_the_latest_of_those_it_has_met_by_now(engine):
    """After each step, both ranks of a pair have the time of the later one."""
    found = gossiping(
        8,
        "{kind: gossip, matchings: 5, seed: 2}",
        disturbances="[{kind: exponential, mean: 30 ms}, {kind: persistent, ranks: [3], delay: 20 ms}]",
        steps=12,
    )
    drawn_s = sum(np.asarray(delays(found)[channel][0]) for channel in delays(found))
    expected = np.zeros(8)
    ends = ends_s(found, engine)
    for step in range(12):
        expected += STEP_S + drawn_s[step]
        for pair in found.schedules[0].average(step, Shape(8, 1)).members(8):
            expected[pair] = expected[pair].max() + EXCHANGE_S
        np.testing.assert_allclose(ends[step], expected, rtol=1e-9)


def test_an_odd_number_of_ranks_is_refused_with_the_place():
    with pytest.raises(ScenarioError, match="matching: pairs ranks, and 7 are odd: take an even number"):
        gossiping(7, "{kind: gossip}")


def test_settings_of_random_matchings_are_without_effect_in_a_ring():
    schedule, shape = Gossip(matching="ring", seed=1, matchings=3), Shape(8, 1, 20)
    assert schedule.unused_settings(shape) == ["has matchings and seed without effect: a ring is not drawn"]
    assert Gossip(seed=1).unused_settings(shape) == []
    (sentence,) = Gossip(warmup_steps=20).unused_settings(shape)
    assert "warms up in all of the 20 steps" in sentence


def test_two_matchings_that_wait_for_the_same_operation_keep_their_own_last_ranks(monkeypatch):
    """Both all-reduces of a step wait for the backward pass, on lanes of their own and with other pairs."""
    monkeypatch.setattr(recurrence, "_LARGE", 1)
    found = gossiping(8, "{kind: sync}", disturbances="[{kind: exponential, on: compute, mean: 30 ms}]", steps=6)
    buffers = (
        Buffer("param", 1_000_000, tensors=(0, 1), initialized=True),
        Buffer("grad", 1_000_000, tensors=(0, 1)),
        Buffer("loss", 1),
    )
    matching = Gossip().average(0, Shape(8, 1))
    body = (
        Forward(("param",), ("loss",)),
        Delay("compute"),
        Backward(("param", "loss"), "grad"),
        AllReduce("grad", Group(2)),
        AllReduce("loss", matching, lane=AVERAGE),
        Optimize(("param",), ("grad",)),
    )
    plan = Plan.from_steps("two", world_size=8, buffers=buffers, steps=[body] * 6)
    cluster = Cluster(nodes=8, gpus_per_node=1, fabric=Link.ideal(), network=Link.ideal())  # no lane waits for a link
    costs = price(plan, cluster, found.workload)
    found_s, expected_s = (engine.step_s(plan, costs, delays(found)) for engine in (fast, des))
    np.testing.assert_allclose(found_s, expected_s, rtol=1e-12)
