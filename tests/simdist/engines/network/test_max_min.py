"""Max-min fair rates: the definition, closed forms, exact fractions, and sums that rounding could ruin."""

import numpy as np
import pytest
from fluid import exact_rates
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from benchmarks.network import max_min_rates
from simdist.cost import Stage

N_RESOURCES = 5
CLOSE = 1e-9


def stage(*pairs):
    """Return a stage of `(resource, nbytes)`."""
    return Stage(0.0, np.array([resource for resource, _ in pairs]), np.array([float(nbytes) for _, nbytes in pairs]))


def stages(sizes):
    pairs = st.lists(
        st.tuples(st.integers(0, N_RESOURCES - 1), st.sampled_from(sizes)), min_size=1, unique_by=lambda pair: pair[0]
    )
    return pairs.map(lambda each: stage(*each))


flying_ones = st.lists(stages([1, 3, 1e3, 1e6]), min_size=1, max_size=8)
flying_evenly = st.lists(stages([1, 2, 3, 8]), min_size=1, max_size=8)
capacities = st.lists(st.sampled_from([1.0, 2.0, 7.0, 1e3, 1e9]), min_size=N_RESOURCES, max_size=N_RESOURCES).map(
    np.array
)
many = examples(150)


def loads_Bps(flying, rates_Bps, n_resources=N_RESOURCES):
    """Return what stages at these rates put on every resource."""
    loads = np.zeros(n_resources)
    for each, rate_Bps in zip(flying, rates_Bps, strict=True):
        loads[each.resources] += rate_Bps * each.nbytes / each.nbytes.max()
    return loads


def bottlenecks(number, flying, rates_Bps, capacity_Bps):
    """Return the full resources of a stage on which no flow is faster."""
    load_Bps = loads_Bps(flying, rates_Bps, len(capacity_Bps))
    return [
        resource
        for resource in flying[number].resources
        if load_Bps[resource] >= capacity_Bps[resource] * (1 - CLOSE)
        and all(
            other_Bps <= rates_Bps[number] * (1 + CLOSE)
            for other, other_Bps in zip(flying, rates_Bps, strict=True)
            if resource in other.resources
        )
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 50])
def test_n_equal_streams_get_an_nth_each(n):
    np.testing.assert_allclose(max_min_rates([stage((2, 10))] * n, np.full(N_RESOURCES, 12.0)), 12 / n, rtol=1e-15)


def test_stream_that_is_held_back_elsewhere_leaves_its_share_to_the_others():
    """The textbook example: links of 1, 2 and 1; one stream over all three, one over each of the first two."""
    flying = [stage((0, 1), (1, 1), (2, 1)), stage((0, 1)), stage((1, 1))]
    assert max_min_rates(flying, np.array([1.0, 2.0, 1.0, np.inf, np.inf])).tolist() == [0.5, 0.5, 1.5]


def test_stream_that_needs_less_of_a_resource_takes_less_of_it():
    """It puts 1 byte on link 1 for every 4 on link 0, where it is alone."""
    flying = [stage((0, 4), (1, 1)), stage((1, 1))]
    assert max_min_rates(flying, np.array([8.0, 10.0])).tolist() == [8.0, 8.0]
    assert max_min_rates(flying, np.array([4.0, 10.0])).tolist() == [4.0, 9.0]


def test_every_stream_of_a_staircase_stops_in_a_round_of_its_own():
    """
    Stream i has a link of i B/s for itself, and all share one: 1 + 2 + ... + 100 B/s fit on it, and 50 B/s more do not.
    """
    n = 150
    flying = [stage((0, 1), (number, 1)) for number in range(1, n + 1)]
    capacity_Bps = np.array([100 * 101 / 2 + 50 * 100.0, *range(1, n + 1)])
    assert max_min_rates(flying, capacity_Bps).tolist() == [min(number, 100) for number in range(1, n + 1)]


@many
@given(flying_ones, capacities)
def test_no_resource_carries_more_than_it_can(flying, capacity_Bps):
    assert (loads_Bps(flying, max_min_rates(flying, capacity_Bps)) <= capacity_Bps * (1 + CLOSE)).all()


@many
@given(flying_ones, capacities)
def test_everybody_has_a_full_resource_on_which_nobody_is_faster(flying, capacity_Bps):
    rates_Bps = max_min_rates(flying, capacity_Bps)
    assert (rates_Bps > 0).all()
    assert all(bottlenecks(number, flying, rates_Bps, capacity_Bps) for number in range(len(flying)))


@many
@given(flying_ones, capacities)
def test_resource_has_room_only_where_all_are_held_back_elsewhere(flying, capacity_Bps):
    rates_Bps = max_min_rates(flying, capacity_Bps)
    has_room = loads_Bps(flying, rates_Bps) < capacity_Bps * (1 - CLOSE)
    for each in flying:
        assert not has_room[each.resources].all()


@many
@given(flying_evenly, capacities)
def test_rates_are_those_of_exact_fractions(flying, capacity_Bps):
    expected_Bps = [float(rate) for rate in exact_rates(flying, capacity_Bps)]
    np.testing.assert_allclose(max_min_rates(flying, capacity_Bps), expected_Bps, rtol=1e-6)


@many
@given(flying_evenly, st.lists(st.sampled_from([1.0, 2.0, 7.0]), min_size=N_RESOURCES, max_size=N_RESOURCES))
def test_rates_are_exact_to_twelve_digits_where_capacities_are_alike(flying, capacity_Bps):
    expected_Bps = [float(rate) for rate in exact_rates(flying, capacity_Bps)]
    np.testing.assert_allclose(max_min_rates(flying, np.array(capacity_Bps)), expected_Bps, rtol=1e-12)


@many
@given(flying_evenly, capacities, st.sampled_from([2.0**-30, 0.3, 8.0, 1e9]))
def test_faster_resources_make_everybody_as_much_faster(flying, capacity_Bps, factor):
    rates_Bps = max_min_rates(flying, capacity_Bps)
    np.testing.assert_allclose(max_min_rates(flying, capacity_Bps * factor), rates_Bps * factor, rtol=CLOSE)


@many
@given(flying_ones, capacities, st.randoms())
def test_order_of_streams_does_not_matter(flying, capacity_Bps, random):
    places = list(range(len(flying)))
    random.shuffle(places)
    shuffled_Bps = max_min_rates([flying[place] for place in places], capacity_Bps)
    np.testing.assert_allclose(shuffled_Bps, max_min_rates(flying, capacity_Bps)[places], rtol=CLOSE)


@many
@given(flying_ones, capacities, st.data())
def test_who_leaves_never_makes_the_slowest_slower(flying, capacity_Bps, data):
    gone = data.draw(st.integers(0, len(flying) - 1))
    before_Bps = max_min_rates(flying, capacity_Bps)
    after_Bps = max_min_rates(flying[:gone] + flying[gone + 1 :], capacity_Bps)
    assert after_Bps.min(initial=np.inf) >= before_Bps.min() * (1 - CLOSE)


def test_who_leaves_may_make_another_one_slower():
    """A and B share link 0, B and C link 1. Without A, B takes more of link 1, and C gets less."""
    a, b, c = stage((0, 1)), stage((0, 1), (1, 1)), stage((1, 1))
    capacity_Bps = np.array([2.0, 4.0])
    assert max_min_rates([a, b, c], capacity_Bps).tolist() == [1.0, 1.0, 3.0]
    assert max_min_rates([b, c], capacity_Bps).tolist() == [2.0, 2.0]


@many
@given(flying_evenly, flying_evenly, capacities, capacities)
def test_streams_that_share_nothing_have_the_rates_they_have_alone(some, others, some_Bps, others_Bps):
    """Together and apart are two orders of the same sums."""
    moved = [Stage(0.0, each.resources + N_RESOURCES, each.nbytes) for each in others]
    together_Bps = max_min_rates(some + moved, np.concatenate([some_Bps, others_Bps]))
    apart_Bps = np.concatenate([max_min_rates(some, some_Bps), max_min_rates(others, others_Bps)])
    np.testing.assert_allclose(together_Bps, apart_Bps, rtol=CLOSE)


@pytest.mark.parametrize("n_used", [3, 40])
def test_hundreds_of_streams_are_filled_fairly(n_used):
    rng = np.random.default_rng(n_used)
    used = (rng.choice(80, n_used, replace=False) for _ in range(200))
    flying = [Stage(0.0, resources, 10.0 ** rng.integers(-6, 7, n_used)) for resources in used]
    capacity_Bps = 10.0 ** rng.uniform(3, 6, 80)
    rates_Bps = max_min_rates(flying, capacity_Bps)
    assert (loads_Bps(flying, rates_Bps, 80) <= capacity_Bps * (1 + CLOSE)).all()
    assert all(bottlenecks(number, flying, rates_Bps, capacity_Bps) for number in range(200))


def test_load_that_rounding_swallowed_comes_back_when_the_large_ones_have_stopped():
    """B puts 1e-17 B on link 0 for every byte on link 2: 1 + 1e-17 = 1 in float64, and A's 1 goes when A stops."""
    a, b = stage((0, 1), (1, 1)), stage((0, 1e-17), (2, 1))
    assert max_min_rates([a, b], np.array([2.0, 1.0, np.inf])).tolist() == [1.0, pytest.approx(1e17, rel=1e-12)]
    assert max_min_rates([a, b], np.array([2.0, 1.0, 5.0])).tolist() == [1.0, 5.0]


@pytest.mark.parametrize("capacity_Bps", [0.3, 0.7])
def test_nobody_stops_below_those_who_stopped_before(capacity_Bps):
    """
    Many streams fill link 1 and leave 1.1e-12 of link 0, less than the rounding of their sum: to the last stream, which
    weighs next to nothing there, that is much or less than nothing.
    """
    flying = [*[stage((0, 1), (1, 1))] * 50_000, stage((0, 1e-15), (2, 1))]
    rates_Bps = max_min_rates(flying, np.array([capacity_Bps, capacity_Bps * (1 - 1.1e-12), np.inf]))
    assert rates_Bps[0] == pytest.approx(capacity_Bps / 50_000, rel=1e-9)
    assert rates_Bps[0] <= rates_Bps[-1] < np.inf


@pytest.mark.parametrize("capacity_Bps", [0.3, 0.7])
def test_a_slow_stream_has_its_pace_where_rounding_leaves_less_than_nothing(capacity_Bps):
    """As above, but link 2 lets the last stream have half of what the others get."""
    flying = [*[stage((0, 1), (1, 1))] * 50_000, stage((0, 1e-15), (2, 1))]
    slow_Bps = capacity_Bps / 100_000
    rates_Bps = max_min_rates(flying, np.array([capacity_Bps, capacity_Bps * (1 - 1.1e-12), slow_Bps]))
    assert rates_Bps[0] == pytest.approx(capacity_Bps / 50_000, rel=1e-9)
    assert rates_Bps[-1] == slow_Bps


def test_only_what_has_bytes_on_a_limited_resource_is_limited():
    nothing = Stage(0.0, np.empty(0, dtype=np.int64), np.empty(0))
    flying = [nothing, stage((0, 0)), stage((0, 0), (1, 3)), stage((0, 5), (2, 5)), stage((2, 1))]
    assert max_min_rates(flying, np.array([1.0, 2.0, np.inf])).tolist() == [np.inf, np.inf, 2.0, 1.0, np.inf]
    assert max_min_rates([nothing], np.array([1.0])).tolist() == [np.inf]
    assert max_min_rates([], np.array([1.0])).tolist() == []
