"""The fluid network: max-min fair rates, bytes that neither vanish nor appear, and a common start."""

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from simdist.cost import Stage, Transfer
from simdist.engines.network import FluidNetwork, common_start_s, max_min_rates

N_RESOURCES = 5


@st.composite
def stages(draw):
    resources = sorted(draw(st.sets(st.integers(0, N_RESOURCES - 1), min_size=1)))
    nbytes = draw(st.lists(st.sampled_from([1.0, 3.0, 1e3, 1e6]), min_size=len(resources), max_size=len(resources)))
    latency_s = draw(st.sampled_from([0.0, 0.0, 1e-6, 0.5]))
    return Stage(latency_s, np.array(resources), np.array(nbytes))


transfers = st.builds(Transfer, st.lists(stages(), max_size=3).map(tuple))
capacities = st.lists(st.sampled_from([1.0, 2.0, 1e3, 1e9]), min_size=N_RESOURCES, max_size=N_RESOURCES).map(np.array)


def loads_Bps(flying, rates_Bps):
    """Return what stages at these rates put on every resource."""
    loads = np.zeros(N_RESOURCES)
    for stage, rate_Bps in zip(flying, rates_Bps, strict=True):
        loads[stage.resources] += rate_Bps * stage.nbytes / stage.nbytes.max()
    return loads


class Metered(FluidNetwork):
    """Counts the bytes that flow over every resource, and remembers the rates."""

    def __init__(self, env, capacity_Bps):
        super().__init__(env, capacity_Bps)
        self.flowed_nbytes = np.zeros(N_RESOURCES)
        self.settled = []

    def _advance(self):
        elapsed_s = self._env.now - self._changed_s
        rates_Bps = [flow.rate_Bps for flow in self._flying]
        self.flowed_nbytes += loads_Bps([flow.stage for flow in self._flying], rates_Bps) * elapsed_s
        super()._advance()

    def _settle(self, event):
        super()._settle(event)
        self.settled.append((self._env.now, [(flow.stage, flow.rate_Bps) for flow in self._flying]))


def run(starts, capacity_Bps):
    """Start transfers at given times; return when each is done, and the network."""
    env = simpy.Environment()
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


@pytest.mark.parametrize("n", [1, 2, 3, 7, 50])
def test_n_equal_streams_get_an_nth_each(n):
    stage = Stage(0.0, np.array([2]), np.array([10.0]))
    np.testing.assert_allclose(max_min_rates([stage] * n, np.full(N_RESOURCES, 12.0)), 12 / n, rtol=1e-15)


def test_stream_that_is_held_back_elsewhere_leaves_its_share_to_the_others():
    """The textbook example: links of 1, 2 and 1; one stream over all three, one over each of the first two."""
    everywhere = Stage(0.0, np.array([0, 1, 2]), np.array([1.0, 1.0, 1.0]))
    first, second = (Stage(0.0, np.array([link]), np.array([1.0])) for link in (0, 1))
    capacity_Bps = np.array([1.0, 2.0, 1.0, np.inf, np.inf])
    assert max_min_rates([everywhere, first, second], capacity_Bps).tolist() == [0.5, 0.5, 1.5]


def test_stream_that_needs_less_of_a_resource_takes_less_of_it():
    """It puts 1 byte on link 1 for every 4 on link 0, where it is alone."""
    uneven = Stage(0.0, np.array([0, 1]), np.array([4.0, 1.0]))
    even = Stage(0.0, np.array([1]), np.array([1.0]))
    capacity_Bps = np.array([8.0, 10.0, 1.0, 1.0, 1.0])
    assert max_min_rates([uneven, even], capacity_Bps).tolist() == [8.0, 8.0]
    capacity_Bps = np.array([4.0, 10.0, 1.0, 1.0, 1.0])
    assert max_min_rates([uneven, even], capacity_Bps).tolist() == [4.0, 9.0]


@settings(max_examples=200, deadline=None)
@given(st.lists(stages(), min_size=1, max_size=6), capacities)
def test_rates_are_max_min_fair(flying, capacity_Bps):
    """Nothing is overloaded, and everyone crosses a full resource on which nobody is faster."""
    rates_Bps = max_min_rates(flying, capacity_Bps)
    load_Bps = loads_Bps(flying, rates_Bps)
    assert (rates_Bps > 0).all()
    assert (load_Bps <= capacity_Bps * (1 + 1e-9)).all()
    for stage, rate_Bps in zip(flying, rates_Bps, strict=True):
        bottlenecks = [
            resource
            for resource in stage.resources
            if load_Bps[resource] >= capacity_Bps[resource] * (1 - 1e-9)
            and all(
                other_Bps <= rate_Bps * (1 + 1e-9)
                for other, other_Bps in zip(flying, rates_Bps, strict=True)
                if resource in other.resources
            )
        ]
        assert bottlenecks


@settings(max_examples=100, deadline=None)
@given(st.lists(stages(), min_size=1, max_size=6), capacities, st.randoms())
def test_order_of_streams_does_not_matter(flying, capacity_Bps, random):
    places = list(range(len(flying)))
    random.shuffle(places)
    shuffled = max_min_rates([flying[place] for place in places], capacity_Bps)
    np.testing.assert_allclose(shuffled, max_min_rates(flying, capacity_Bps)[places], rtol=1e-9)


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0]), transfers), max_size=5), capacities)
def test_nobody_is_faster_than_alone(starts, capacity_Bps):
    end_s, _ = run(starts, capacity_Bps)
    for (start_s, transfer), each_s in zip(starts, end_s, strict=True):
        assert each_s - start_s >= transfer.alone_s(capacity_Bps) * (1 - 1e-9) - 1e-12


@settings(max_examples=100, deadline=None)
@given(transfers, capacities)
def test_single_transfer_takes_its_time_alone(transfer, capacity_Bps):
    alone_s = transfer.alone_s(capacity_Bps)
    assert common_start_s([transfer], capacity_Bps).tolist() == pytest.approx([alone_s], rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(transfers, max_size=5), capacities, st.sampled_from([0.0, 0.5, 3.0]))
def test_common_start_is_the_network_from_a_common_start(together, capacity_Bps, start_s):
    end_s, _ = run([(start_s, transfer) for transfer in together], capacity_Bps)
    np.testing.assert_allclose(common_start_s(together, capacity_Bps), end_s - start_s, rtol=1e-9, atol=1e-12)


@settings(max_examples=100, deadline=None)
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
    assert rates_Bps == [(0, [2]), (1, [1, 1]), (3, [2]), (5, [])]


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
    flows = [Transfer(()), Transfer((Stage(0.5, *nothing), Stage(0.25, *nothing)))]
    assert common_start_s(flows, np.ones(N_RESOURCES)).tolist() == [0.0, 0.75]


def test_transfers_that_are_due_together_end_together():
    """Sums of thirds: rounding must not leave a sliver of one for another event."""
    flows = [Transfer((Stage(0.1, np.array([0]), np.array([nbytes])),)) for nbytes in (1 / 3, 1 / 3, 1 / 3, 1.0)]
    end_s, fluid = run([(0.0, flow) for flow in flows], np.full(N_RESOURCES, 0.7))
    assert end_s[0] == end_s[1] == end_s[2] < end_s[3]
    assert [len(flying) for _, flying in fluid.settled] == [4, 1, 0]
