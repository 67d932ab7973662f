"""Links that misbehave, in closed form: one all-reduce of 100 MB between two nodes at 100 MB/s, from 2 s to 3 s."""

import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from engine_runs import fast
from engine_runs import simulate as simulate_plan
from messages import assert_message
from one_transfer import BASE, scenario_with

from simdist.errors import UnsupportedError
from simdist.runs.building import build, delays, price_of, simulate, traffic
from simdist.scenario import loads
from simdist.scenario.sampling import run_seeds
from simdist.studies.comparison import compare


def ends_s(engine="auto", seed=0, **links):
    return simulate(scenario_with(seed=seed, **links), engine=engine).makespan_s


@pytest.mark.parametrize(
    ("disturbance", "end_s"),
    [
        ("{kind: persistent, on: link, link: nic_out, nodes: [1], share: 50%, begin: 2.5 s, end: 3 s}", 3.25),
        ("{kind: persistent, on: link, link: nic_in, nodes: [0], share: 25%, begin: 2.5 s}", 4.5),
        ("{kind: persistent, on: link, link: nic, share: 50%, begin: 1 s, end: 2.5 s}", 3.25),
        ("{kind: persistent, on: link, link: nic, share: 50%, begin: 3 s}", 3.0),
        ("{kind: outages, on: link, link: nic, nodes: [0], at: 2.5 s, lasts: 2 s}", 5.0),
        ("{kind: outages, on: link, link: nic, nodes: [0], at: 0 s, lasts: 500 ms, every: 1 s}", 4.0),
        ("{kind: persistent, on: link, link: switch, share: 25%, begin: 2.5 s, end: 3 s}", 3.375),
    ],
)
def test_a_transfer_takes_what_the_rates_on_its_way_allow(disturbance, end_s):
    assert ends_s(disturbances=[disturbance]) == end_s


def test_shares_of_one_link_multiply():
    half = "{kind: persistent, on: link, link: nic, nodes: [0], share: 50%"
    assert ends_s(disturbances=[f"{half}}}", f"{half}, begin: 2.5 s}}"]) == 2.5 + 3.0
    assert ends_s(disturbances=[f"{half}, begin: 2 s, end: 9 s}}", f"{half}, begin: 2.5 s}}"]) == 2.5 + 3.0


@pytest.mark.parametrize(
    ("flows", "end_s"),
    [
        ("{kind: steady, from: 0, to: 1}", 4.0),
        ("{kind: steady, from: 1, to: 0, flows: 3}", 6.0),
        ("{kind: steady, from: 0, to: 1, begin: 2.5 s, end: 3 s}", 3.25),
        ("{kind: periodic, from: 0, to: 1, size: 25 MB, every: 10 s, begin: 2.5 s}", 3.25),
        ("{kind: periodic, from: 0, to: 1, size: 25 MB, every: 500 ms, begin: 2 s}", 4.0),
        ("{kind: on_off, from: 0, to: 1, on: 500 ms, off: 1.5 s, lengths: fixed, begin: 500 ms}", 3.25),
        ("{kind: steady, from: storage, to: 1}", 3.5),
    ],
)
def test_flows_of_other_jobs_share_fairly(flows, end_s):
    """Half the link is another flow's; storage at 50 MB/s leaves an all-reduce of 100 MB/s both directions at half."""
    right = 4.0 if "storage" in flows else end_s
    assert ends_s(background=[flows]) == right


def test_flows_that_come_and_go_take_what_a_markov_chain_says():
    """A transfer goes on at half speed while a flow is on.

    After work w (seconds at full rate), a flow is on with probability P(w), and a unit of work takes 1 + P(w) seconds.
    P begins at on / (on + off), and goes to a / (a + b) like exp(-(a + b) w), where a = 1 / off and b = 2 / on are the
    rates per unit of work at which flows come and go.
    """
    on_s, off_s, work_s = 0.5, 1.0, 1.0
    a, b = 1 / off_s, 2 / on_s
    first, last = on_s / (on_s + off_s), a / (a + b)
    right_s = work_s * (1 + last) + (first - last) * (1 - math.exp(-(a + b) * work_s)) / (a + b)
    flows = ["{kind: on_off, from: 0, to: 1, on: 500 ms, off: 1 s}"]
    scenario = scenario_with(background=flows)
    built = build(scenario, scenario.schedules[0])
    links = [traffic(scenario, built.costs, seed) for seed in range(400)]
    runs = (simulate_plan(built.plan, built.costs, {}, traffic=each) for each in links)
    found_s = np.array([run.makespan_s for run in runs]) - 2.0
    assert abs(found_s.mean() - right_s) < 3 * found_s.std(ddof=1) / math.sqrt(len(found_s))
    assert found_s.min() == pytest.approx(1.0)
    assert found_s.max() <= 2.0 + 1e-9


@pytest.mark.parametrize("where", ["link: nic_out, nodes: [1]", "link: nic", "link: switch"])
def test_a_constant_share_is_a_slower_link_in_both_engines(where):
    slow = [f"{{kind: persistent, on: link, {where}, share: 25%}}"]
    late = "{kind: transient, probability: 50%, delay: 300 ms}"
    for disturbances in (slow, [late, *slow]):
        scenario = scenario_with(disturbances=disturbances, steps=5)
        traces = [simulate(scenario, engine=engine) for engine in ("fast", "des")]
        assert np.array_equal(traces[0].end_s, traces[1].end_s)
        assert traces[0].links == traces[1].links
    assert ends_s("fast", disturbances=slow) == 6.0


@pytest.mark.parametrize(
    "links",
    [
        {"disturbances": ["{kind: outages, on: link, link: nic, nodes: [1], at: 1 s, lasts: 1 s}"]},
        {"background": ["{kind: steady, from: 0, to: 1}"]},
    ],
    ids=["outages", "background"],
)
def test_fast_refuses_what_changes_and_names_link_and_cause(links):
    with pytest.raises(UnsupportedError) as caught:
        ends_s("fast", **links)
    assert_message(f"links: fast refuses {next(iter(links))}", str(caught.value))
    scenario = scenario_with(**links)
    built = build(scenario, scenario.schedules[0])
    with pytest.raises(UnsupportedError, match="is disturbed by"):
        fast.simulate(built.plan, built.costs, delays(scenario))


def test_a_disturbance_of_links_leaves_the_delays_of_ranks_as_they_are():
    late = "{kind: exponential, mean: 10 ms}"
    slow = "{kind: persistent, on: link, link: nic, share: 50%}"
    alone, beside = (delays(scenario_with(disturbances=[late, *more], steps=9)) for more in ([], [slow]))
    first = delays(scenario_with(disturbances=[slow, late], steps=9))
    assert np.array_equal(alone["host"], beside["host"])
    assert not np.array_equal(alone["host"], first["host"])  # its place counts
    assert alone.keys() == beside.keys() == {"host"}


def test_prices_without_links_are_those_of_before():
    scenario = loads(BASE)
    built = build(scenario, scenario.schedules[0])
    again = price_of(built.plan, scenario)
    assert (again.shares, again.disturbed, again.contested) == ({}, {}, frozenset())
    assert simulate(scenario, engine="des").links == {}


RANDOM = {
    "disturbances": [
        "{kind: jitter, on: link, link: nic, period: 200 ms, median: 70%, sigma: 0.5}",
        "{kind: outages, on: link, link: switch, up: 2 s, down: 200 ms}",
        "{kind: bursts, on: link, link: nic_in, period: 100 ms, enter: 10%, leave: 20%, share: 30%}",
    ],
    "background": ["{kind: on_off, from: 0, to: 1, on: 300 ms, off: 700 ms}"],
}


def makespans_s(seeds):
    return [ends_s(seed=seed, steps=3, **RANDOM) for seed in seeds]


def test_seeds_have_their_links_in_whatever_process_they_run():
    here = makespans_s(range(6))
    assert len(set(here)) == 6
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        there = list(pool.map(makespans_s, ([5, 0], [3], [4, 2, 1])))
    assert [each for part in there for each in part] == [here[seed] for seed in (5, 0, 3, 4, 2, 1)]
    assert min(here) > 3 * 3.0


def test_compare_gives_each_seed_its_own_links():
    (row,) = compare(scenario_with(steps=3, **RANDOM), n_seeds=6)
    assert row.step_s == pytest.approx(np.mean(makespans_s(run_seeds(0, 6))) / 3)
    assert row.step_s_ci95 is not None
    assert row.step_s_ci95[0] < row.step_s < row.step_s_ci95[1]
    assert row.engine == "des"
