"""The fluid network: exact timelines, bytes that neither vanish nor appear, components, and a common start."""

import math

import numpy as np
import pytest
from fluid import exact_end_s
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from simdist.cost import Stage, Transfer
from simdist.engines.network.fluid import FluidNetwork, Timeline, common_start_s

N_RESOURCES = 5


@st.composite
def stages(draw):
    resources = sorted(draw(st.sets(st.integers(0, N_RESOURCES - 1), min_size=1)))
    nbytes = draw(st.lists(st.sampled_from([1.0, 3.0, 1e3, 1e6]), min_size=len(resources), max_size=len(resources)))
    latency_s = draw(st.sampled_from([0.0, 0.0, 1e-6, 0.5]))
    return Stage(latency_s, np.array(resources), np.array(nbytes))


@st.composite
def small_stages(draw):
    resources = sorted(draw(st.sets(st.integers(0, N_RESOURCES - 1), min_size=1, max_size=3)))
    nbytes = draw(st.lists(st.integers(1, 9).map(float), min_size=len(resources), max_size=len(resources)))
    return Stage(draw(st.sampled_from([0.0, 0.5])), np.array(resources), np.array(nbytes))


small_transfers = st.builds(Transfer, st.lists(small_stages(), max_size=2).map(tuple))
transfers = st.builds(Transfer, st.lists(stages(), max_size=3).map(tuple))
capacities = st.lists(st.sampled_from([1.0, 2.0, 1e3, 1e9]), min_size=N_RESOURCES, max_size=N_RESOURCES).map(np.array)


def loads_Bps(flying, rates_Bps):
    """Return what stages at these rates put on every resource."""
    loads = np.zeros(N_RESOURCES)
    for stage, rate_Bps in zip(flying, rates_Bps, strict=True):
        loads[stage.resources] += rate_Bps * stage.nbytes / stage.nbytes.max()
    return loads


class Metered(FluidNetwork):
    """Goes on by one moment at a time. Counts the bytes that flow over every resource, and remembers rates.

    `settled` has the times when rates were found, and the stages in flight with their rates. `changed` has these times,
    and the resources of the flows that have another rate than before.
    """

    def __init__(self, env, capacity_Bps):
        super().__init__(env, capacity_Bps)
        self.flowed_nbytes = np.zeros(len(capacity_Bps))
        self.settled = []
        self.changed = []
        self._settled_s = 0.0
        self._rate_Bps = {}

    def go_on(self, until_s):
        now_s = self.next_s
        for flow, rate_Bps in self._rate_Bps.items():
            share = flow.stage.nbytes / flow.stage.nbytes.max()
            self.flowed_nbytes[flow.stage.resources] += rate_Bps * (now_s - self._settled_s) * share
        super().go_on(min(until_s, math.nextafter(now_s, math.inf)))
        before = self._rate_Bps
        self._settled_s = now_s
        self._rate_Bps = {flow: self._flows.rate_Bps(flow) for flow in self._flows.in_flight()}
        if self.next_s == now_s:
            return  # flows have ended, and rates are found when everything else of this moment has happened
        if self._rate_Bps:
            self.settled.append((now_s, [(flow.stage, rate_Bps) for flow, rate_Bps in self._rate_Bps.items()]))
        changed = [flow for flow, rate_Bps in self._rate_Bps.items() if rate_Bps != before.get(flow)]
        if changed:
            self.changed.append((now_s, sorted({int(each) for flow in changed for each in flow.stage.resources})))


def run(starts, capacity_Bps):
    """Start transfers at given times; return when each is done, and the network."""
    env = Timeline()
    fluid = Metered(env, capacity_Bps)
    end_s = np.full(len(starts), np.nan)

    def fly(number, start_s, transfer):
        yield env.timeout(start_s)
        yield fluid.start(transfer)
        end_s[number] = env.now

    for number, (start_s, transfer) in enumerate(starts):
        env.process(fly(number, start_s, transfer))
    env.run()
    return end_s, fluid


@examples(150)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.25, 1.0]), transfers), max_size=5), capacities)
def test_bytes_are_conserved(starts, capacity_Bps):
    """The integral of the rates on every resource is what the transfers put there; no resource is ever overloaded."""
    end_s, fluid = run(starts, capacity_Bps)
    assert np.isfinite(end_s).all()
    for _, flying in fluid.settled:
        load_Bps = loads_Bps([stage for stage, _ in flying], [rate_Bps for _, rate_Bps in flying])
        assert (load_Bps <= capacity_Bps * (1 + 1e-9)).all()
    wanted_nbytes = np.zeros(N_RESOURCES)
    for _, transfer in starts:
        for stage in transfer.stages:
            wanted_nbytes[stage.resources] += stage.nbytes
    resolution_nbytes = capacity_Bps * np.spacing(end_s.max(initial=0.0)) * 100
    assert (abs(fluid.flowed_nbytes - wanted_nbytes) <= 1e-9 * wanted_nbytes + resolution_nbytes).all()


@examples(150)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0]), small_transfers), max_size=5),
    st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=N_RESOURCES, max_size=N_RESOURCES).map(np.array),
)
def test_times_are_those_of_exact_fractions(starts, capacity_Bps):
    end_s, _ = run(starts, capacity_Bps)
    np.testing.assert_allclose(end_s, exact_end_s(starts, capacity_Bps), rtol=1e-11)


@examples(150)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0]), transfers), max_size=5), capacities)
def test_nobody_is_faster_than_alone(starts, capacity_Bps):
    end_s, _ = run(starts, capacity_Bps)
    for (start_s, transfer), each_s in zip(starts, end_s, strict=True):
        assert each_s - start_s >= transfer.alone_s(capacity_Bps) * (1 - 1e-9) - 1e-12


@examples(100)
@given(transfers, capacities)
def test_single_transfer_takes_its_time_alone(transfer, capacity_Bps):
    alone_s = transfer.alone_s(capacity_Bps)
    assert common_start_s([transfer], capacity_Bps).tolist() == pytest.approx([alone_s], rel=1e-12)


@examples(100)
@given(st.lists(transfers, max_size=5), capacities, st.sampled_from([0.0, 0.5, 3.0]))
def test_common_start_is_the_network_from_a_common_start(together, capacity_Bps, start_s):
    end_s, _ = run([(start_s, transfer) for transfer in together], capacity_Bps)
    np.testing.assert_allclose(common_start_s(together, capacity_Bps), end_s - start_s, rtol=1e-9, atol=1e-12)


@examples(100)
@given(st.lists(st.sampled_from([1.0, 5.0, 8.0, 1e3]), min_size=1, max_size=8), st.sampled_from([1.0, 3.0, 1e6]))
def test_one_resource_is_always_busy_and_serves_the_smallest_first(sizes, capacity_Bps):
    """Processor sharing: when a flow is done, smaller ones are done, and larger ones have flowed as much."""
    flows = [Transfer((Stage(0.0, np.array([0]), np.array([nbytes])),)) for nbytes in sizes]
    end_s = common_start_s(flows, np.full(N_RESOURCES, capacity_Bps))
    expected_s = [sum(min(each, nbytes) for each in sizes) / capacity_Bps for nbytes in sizes]
    np.testing.assert_allclose(end_s, expected_s, rtol=1e-12)


def test_late_transfer_shares_from_then_on():
    """
    A of 8 B starts at 0, B of 2 B at 1 s, on a link of 2 B/s: 2, then 1 each until B is done at 3 s, A at 5 s.
    """
    a, b = (Transfer((Stage(0.0, np.array([0]), np.array([nbytes])),)) for nbytes in (8.0, 2.0))
    end_s, fluid = run([(0.0, a), (1.0, b)], np.full(N_RESOURCES, 2.0))
    assert end_s.tolist() == [5.0, 3.0]
    rates_Bps = [(now_s, [rate_Bps for _, rate_Bps in flying]) for now_s, flying in fluid.settled]
    assert rates_Bps == [(0, [2]), (1, [1, 1]), (3, [2])]


def flow(nbytes, *links):
    """Return a transfer of so many bytes on each of these links."""
    return Transfer((Stage(0.0, np.array(links), np.full(len(links), float(nbytes))),))


def test_three_transfers_over_two_links_share_as_they_come_and_go():
    """
    Link 0 carries 2 B/s, link 1 carries 3. A: 5 B over both, B: 2 B over link 0, from 0. C: 11 B over link 1 from 1 s.

    0 to 1 s: A and B 1 each. Until 2 s: A and B 1, C 2; B is done. Then A and C 1.5 each: A has 3 B left and is done at
    4 s. C has 11 - 2 - 3 = 6 B left, alone: 6 s.
    """
    starts = [(0.0, flow(5, 0, 1)), (0.0, flow(2, 0)), (1.0, flow(11, 1))]
    end_s, fluid = run(starts, np.array([2.0, 3.0]))
    assert end_s.tolist() == [4.0, 2.0, 6.0]
    rates_Bps = [(now_s, sorted(rate_Bps for _, rate_Bps in flying)) for now_s, flying in fluid.settled]
    assert rates_Bps == [(0, [1, 1]), (1, [1, 1, 2]), (2, [1.5, 1.5]), (4, [3])]


def test_transfer_that_comes_when_another_goes_does_not_meet_it():
    end_s, fluid = run([(0.0, flow(4, 0)), (2.0, flow(6, 0))], np.array([2.0]))
    assert end_s.tolist() == [2.0, 5.0]
    assert [[rate_Bps for _, rate_Bps in flying] for _, flying in fluid.settled] == [[2.0], [2.0]]


def test_change_on_one_link_leaves_those_on_others_alone():
    """Two on each of two links of 2 B/s: rates are set when they start, and where the shorter one has left."""
    starts = [(0.0, flow(nbytes, link)) for link, nbytes in ((0, 1), (0, 3), (1, 2), (1, 4))]
    end_s, fluid = run(starts, np.full(2, 2.0))
    assert end_s.tolist() == [1.0, 2.0, 2.0, 3.0]
    assert fluid.changed == [(0.0, [0, 1]), (1.0, [0]), (2.0, [1])]


def test_transfer_over_two_links_joins_them_until_it_has_gone():
    """
    10 B on each of three links of 2 B/s from 0, and 1 B over links 0 and 1 from 1 s to 2 s. Link 2 never notices; the
    other two have nothing in common any more when it has gone, and what comes to one at 3 s is not felt on the other.
    """
    starts = [*((0.0, flow(10, link)) for link in range(3)), (1.0, flow(1, 0, 1)), (3.0, flow(1, 1))]
    end_s, fluid = run(starts, np.full(3, 2.0))
    assert end_s.tolist() == [5.5, 6.0, 5.0, 2.0, 4.0]
    assert fluid.changed == [(0.0, [0, 1, 2]), (1.0, [0, 1]), (2.0, [0, 1]), (3.0, [1]), (4.0, [1])]


@examples(100)
@given(
    *[st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0]), transfers), max_size=4)] * 2,
    *[capacities] * 2,
)
def test_transfers_that_share_nothing_end_as_if_the_others_were_not_there(some, others, some_Bps, others_Bps):
    """To the last bit."""

    def moved(transfer):
        return Transfer(tuple(Stage(s.latency_s, s.resources + N_RESOURCES, s.nbytes) for s in transfer.stages))

    together = [*some, *((start_s, moved(transfer)) for start_s, transfer in others)]
    end_s, _ = run(together, np.concatenate([some_Bps, others_Bps]))
    assert end_s.tolist() == [*run(some, some_Bps)[0].tolist(), *run(others, others_Bps)[0].tolist()]


@examples(60)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0]), st.integers(0, 2)), max_size=8), st.data())
def test_stages_that_meet_again_share_as_they_did(starts, data):
    """The same stage many times over, and as many equal ones."""
    kinds = data.draw(st.lists(transfers, min_size=3, max_size=3))
    copied = [Transfer(tuple(Stage(s.latency_s, s.resources, s.nbytes) for s in kinds[n].stages)) for _, n in starts]
    capacity_Bps = data.draw(capacities)
    again_s, _ = run([(start_s, kinds[number]) for start_s, number in starts], capacity_Bps)
    new_s, _ = run([(start_s, copy) for (start_s, _), copy in zip(starts, copied, strict=True)], capacity_Bps)
    np.testing.assert_allclose(again_s, new_s, rtol=1e-9)


def test_transfer_over_unlimited_links_takes_no_time():
    assert run([(1.0, flow(5, 0)), (1.0, flow(5, 0, 1))], np.array([np.inf, 2.0]))[0].tolist() == [1.0, 3.5]


def test_latency_takes_no_bandwidth_and_stages_follow_one_another():
    """
    A: 1 s of latency, then 4 B on link 0, then 2 B on link 1. B: 4 B on link 0. Both links carry 2 B/s.

    B is alone until 1 s (2 B left); both share link 0 until B is done at 3 s; A has 2 B left: 4 s; link 1: 5 s.
    """
    a = Transfer((Stage(1.0, np.array([0]), np.array([4.0])), Stage(0.0, np.array([1]), np.array([2.0]))))
    b = Transfer((Stage(0.0, np.array([0]), np.array([4.0])),))
    end_s, _ = run([(0.0, a), (0.0, b)], np.full(N_RESOURCES, 2.0))
    assert end_s.tolist() == [5.0, 3.0]


def test_transfers_on_different_resources_do_not_notice_each_other():
    flows = [Transfer((Stage(0.0, np.array([place]), np.array([3.0])),)) for place in range(N_RESOURCES)]
    assert common_start_s(flows, np.array([1.0, 2.0, 3.0, 4.0, 6.0])).tolist() == [3.0, 1.5, 1.0, 0.75, 0.5]


def test_transfer_without_bytes_takes_its_latencies():
    nothing = np.empty(0, dtype=np.int64), np.empty(0)
    flows = [Transfer(()), Transfer((Stage(0.5, *nothing), Stage(0.25, *nothing))), flow(0, 1)]
    assert common_start_s(flows, np.ones(N_RESOURCES)).tolist() == [0.0, 0.75, 0.0]


@pytest.mark.parametrize("sizes", [(1 / 3, 1 / 3, 1 / 3, 1.0), (0.3, 0.1 + 0.2, 0.3, 1.0)])
def test_transfers_that_are_due_together_end_together(sizes):
    """Rounding must not leave a sliver of one for another event; 0.1 + 0.2 is not 0.3."""
    flows = [Transfer((Stage(0.1, np.array([0]), np.array([nbytes])),)) for nbytes in sizes]
    end_s, fluid = run([(0.0, flow) for flow in flows], np.full(N_RESOURCES, 0.7))
    assert end_s[0] == end_s[1] == end_s[2] < end_s[3]
    assert [len(flying) for _, flying in fluid.settled] == [4, 1]
