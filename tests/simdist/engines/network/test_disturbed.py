"""Capacities that change while transfers fly, and flows without an end: closed forms, and exact fractions."""

import math

import numpy as np
import pytest
from fluid import exact_end_s
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from simdist.cost import Stage, Transfer
from simdist.engines.network.fluid import FluidNetwork, Timeline

N_RESOURCES = 4


def stage(*pairs, latency_s=0.0):
    """Return a stage of `(resource, nbytes)`."""
    resources, nbytes = zip(*pairs, strict=True)
    return Stage(latency_s, np.array(resources), np.array(nbytes, dtype=np.float64))


def flow(nbytes, *links):
    """Return a transfer of so many bytes on each of these links."""
    return Transfer((stage(*((link, nbytes) for link in links)),))


def run(starts, capacity_Bps, changes=(), background=()):
    """Start transfers, change capacities, open and close flows at given times; return when each transfer is done."""
    timeline = Timeline()
    network = FluidNetwork(timeline, np.array(capacity_Bps, dtype=np.float64))
    end_s = np.full(len(starts), np.nan)
    for number, (start_s, transfer) in enumerate(starts):
        timeline.call_at(
            start_s,
            lambda _, number=number, transfer=transfer: network.fly(
                transfer, lambda: end_s.__setitem__(number, timeline.now)
            ),
        )
    for at_s, resource, capacity in changes:
        timeline.call_at(
            at_s, lambda _, resource=resource, capacity=capacity: network.set_capacity_Bps(resource, capacity)
        )
    for begin_s, until_s, shared in background:
        opened = []
        timeline.call_at(begin_s, lambda _, opened=opened, shared=shared: opened.append(network.open(shared)))
        timeline.call_at(until_s, lambda _, opened=opened: network.close(opened.pop()))
    timeline.run()
    return end_s


def test_link_at_half_rate_for_a_window():
    """10 B at 2 B/s, at 1 B/s from 1 s to 3 s: 2 + 2 B, and 6 B more until 6 s."""
    assert run([(0.0, flow(10, 0))], [2.0], [(1.0, 0, 1.0), (3.0, 0, 2.0)]).tolist() == [6.0]


def test_transfer_goes_on_after_an_outage_where_it_stopped():
    """A and B of 4 B and 8 B share 2 B/s. From 1 s to 11 s nothing passes. B is alone from 14 s, with 4 B left."""
    starts = [(0.0, flow(4, 0)), (0.0, flow(8, 0))]
    assert run(starts, [2.0], [(1.0, 0, 0.0), (11.0, 0, 2.0)]).tolist() == [14.0, 16.0]


def test_outage_stops_who_uses_the_link_and_leaves_the_others_what_he_does_not_use():
    """
    A of 6 B over links 0 and 1, B of 9 B over link 1; 1 and 2 B/s. Each has 1 B/s, until link 0 is down at 2 s. B then
    has 7 B left, at 2 B/s until link 0 is up at 4 s: 3 B left, and A 4: 1 each until 7 s and 8 s.
    """
    starts = [(0.0, flow(6, 0, 1)), (0.0, flow(9, 1))]
    assert run(starts, [1.0, 2.0], [(2.0, 0, 0.0), (4.0, 0, 1.0)]).tolist() == [8.0, 7.0]


def test_transfer_that_begins_in_an_outage_waits_for_its_end():
    assert run([(2.0, flow(4, 0))], [2.0], [(1.0, 0, 0.0), (5.0, 0, 2.0)]).tolist() == [7.0]


@pytest.mark.parametrize("n_flows", [1, 40])
def test_outage_without_end_is_not_waited_for(n_flows):
    assert np.isnan(run([(0.0, flow(4, 0))] * n_flows, [2.0], [(1.0, 0, 0.0)])).all()


def test_latency_is_not_disturbed():
    """The bytes would flow from 3 s on, when the link is up again."""
    started = (0.0, Transfer((stage((0, 4.0), latency_s=3.0),)))
    assert run([started], [2.0], [(0.0, 0, 0.0), (3.0, 0, 2.0)]).tolist() == [5.0]


def test_fair_background_takes_half_of_a_link_while_it_is_there():
    """12 B at 2 B/s; from 1 s to 4 s two share: 2 + 3 B, and 7 B more until 7.5 s."""
    assert run([(0.0, flow(12, 0))], [2.0], (), [(1.0, 4.0, stage((0, 5.0)))]).tolist() == [7.5]


def test_two_flows_without_end_take_two_thirds():
    """12 B at 3 B/s: 3 B until 1 s, 3 B at 1 B/s until 4 s, 6 B until 6 s."""
    background = [(1.0, 4.0, stage((0, 1.0)))] * 2
    assert run([(0.0, flow(12, 0))], [3.0], (), background).tolist() == [6.0]


def test_flow_without_end_over_two_links_takes_of_each_in_proportion_to_its_bytes():
    """
    It flows at 1 B/s on link 0, which it shares with A, and at 0.5 B/s on link 1: B has 1.5 B/s of 2.
    """
    starts = [(0.0, flow(4, 0)), (0.0, flow(6, 1))]
    assert run(starts, [2.0, 2.0], (), [(0.0, 9.0, stage((0, 2.0), (1, 1.0)))]).tolist() == [4.0, 4.0]


def test_flow_that_was_closed_when_it_was_opened_never_shares():
    timeline = Timeline()
    network = FluidNetwork(timeline, np.array([2.0]))
    ended_s = []
    network.close(network.open(stage((0, 1.0))))
    network.fly(flow(4, 0), lambda: ended_s.append(timeline.now))
    network.close(network.open(Stage(0.0, np.array([0]), np.array([0.0]))))
    timeline.run()
    assert ended_s == [2.0]


@pytest.mark.parametrize("n_flows", [1, 40])
def test_who_is_due_when_an_outage_begins_has_ended_before(n_flows):
    """Up to rounding: 0.1 s and 0.2 s are more than 0.3 s, by a unit in the last place."""
    transfer = Transfer((stage((0, 2.0 / n_flows), latency_s=0.1),))
    end_s = run([(0.0, transfer)] * n_flows, [10.0], [(0.3, 0, 0.0), (9.0, 0, 10.0)])
    np.testing.assert_allclose(end_s, 0.3, rtol=1e-15)


@pytest.mark.parametrize("n_flows", [1, 2, 40])
def test_flow_without_end_over_unlimited_links_disturbs_nobody(n_flows):
    background = [(0.5, 1.5, stage((1, 1.0)))]
    starts = [(0.0, flow(4, 0, 1))] * n_flows
    assert run(starts, [2.0, math.inf], (), background) == pytest.approx([2.0 * n_flows] * n_flows, rel=1e-14)


def test_flows_on_a_link_that_flaps_go_on_where_they_stopped():
    """Up every other second: 100 B take 100 s of 1 B/s each, until 199 s. 50 B are left: 25 s without outages."""
    timeline = Timeline()
    network = FluidNetwork(timeline, np.array([2.0]))
    ended_s = []
    for nbytes in (100, 150):
        network.fly(flow(nbytes, 0), lambda: ended_s.append(timeline.now))
    for second in range(0, 200, 2):
        for at_s, capacity_Bps in ((second + 1, 0.0), (second + 2, 2.0)):
            timeline.call_at(at_s, lambda _, each=capacity_Bps: network.set_capacity_Bps(0, each))
    timeline.run()
    assert ended_s == [199.0, 225.0]


def test_flows_on_alike_links_end_to_the_last_bit_as_on_each_alone():
    nbytes, capacity_Bps = [3.0, 3.0, 5.0, 3.0], [0.7, 0.7, 0.7, 0.9]
    ended_s = [run([(0.0, flow(each, 0))] * 3, [Bps])[0] for each, Bps in zip(nbytes, capacity_Bps, strict=True)]
    timeline = Timeline()
    network = FluidNetwork(timeline, np.array(capacity_Bps))
    found_s = {}
    for link, each in enumerate(nbytes):
        for _ in range(3):
            network.fly(flow(each, link), lambda link=link: found_s.update({link: timeline.now}))
    timeline.run()
    assert [found_s[link] for link in range(4)] == ended_s


def some_stages(latencies_s):
    pairs = st.lists(
        st.tuples(st.integers(0, N_RESOURCES - 1), st.integers(1, 9)), min_size=1, max_size=3, unique_by=lambda p: p[0]
    )
    return st.builds(lambda each, latency_s: stage(*each, latency_s=latency_s), pairs, st.sampled_from(latencies_s))


times_s = st.integers(0, 12).map(lambda quarters: quarters / 4)
several_starts = st.lists(
    st.tuples(times_s, st.lists(some_stages([0.0, 0.5]), max_size=2).map(lambda each: Transfer(tuple(each)))),
    max_size=5,
)
several_changes = st.lists(
    st.tuples(times_s, st.integers(0, N_RESOURCES - 1), st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0])),
    max_size=5,
    unique_by=lambda each: each[:2],
)
several_flights = st.lists(
    st.tuples(times_s, times_s, some_stages([0.0])).map(lambda each: (each[0], each[0] + each[1] + 0.25, each[2])),
    max_size=3,
)
some_capacities = st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=N_RESOURCES, max_size=N_RESOURCES)


@examples(200)
@given(several_starts, some_capacities, several_changes, several_flights)
def test_times_are_those_of_exact_fractions(starts, capacity_Bps, changes, background):
    """All links are as they were at first from 4 s on, so that everybody ends."""
    changes = [*changes, *((4.0, resource, each) for resource, each in enumerate(capacity_Bps))]
    end_s = run(starts, capacity_Bps, changes, background)
    np.testing.assert_allclose(end_s, exact_end_s(starts, capacity_Bps, changes, background), rtol=1e-9)
