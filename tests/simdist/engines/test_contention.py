"""Groups that share links and start apart: the fast engine gives the times of the discrete-event engine."""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
from engine_runs import des, fast
from hypothesis import assume, given
from hypothesis import strategies as st
from priced_runs import delays_of, workloads
from tiers import examples

from simdist.cost import price
from simdist.engines import contention, recurrence
from simdist.engines.contention import Contention, MeetingEstimate, SharedLinks
from simdist.errors import UnforeseenError, UnsupportedError
from simdist.plan import AllReduce, Backward, Buffer, Delay, Forward, Lane, Optimize, Plan
from simdist.plan.check import check
from simdist.plan.delays import DrawnDelays
from simdist.plan.group import Group
from simdist.plan.lanes import COMM
from simdist.scenario.cluster import Cluster, Link
from simdist.scenario.workload import Tensor, Workload
from simdist.traces.breakdown import STATES, break_down

PASSES = (Buffer("loss", 1), Buffer("grad", 1_000, tensors=(0, 1)))
ARRAYS = ("ready_s", "start_s", "end_s")


@st.composite
def shared_plans(draw):
    """Draw a plan of steps that average over groups, most of which share a link, and its number of ranks."""
    world_size = draw(st.sampled_from([4, 8, 12]))
    sizes = [(size, stride) for size in range(2, world_size) for stride in (1, 2) if world_size % (size * stride) == 0]
    groups = st.one_of(st.just(Group(world_size)), *[st.builds(Group, st.just(n), st.just(at)) for n, at in sizes])
    buffers = (
        Buffer("param", 1_000, tensors=(0, 1), initialized=True),
        Buffer("loss", 1),
        Buffer("grad", 1_000, tensors=(0, 1)),
    )
    flats = tuple(Buffer(f"flat.{number}", draw(st.sampled_from([10, 3_000])), initialized=True) for number in range(3))
    kept = draw(st.booleans())
    bodies = []
    for _ in range(draw(st.integers(1, 3))):
        body = [Delay("host"), Forward(("param",), ("loss",)), Delay("compute"), Backward(("loss", "param"), "grad")]
        body += [AllReduce(each.name, draw(groups)) for each in draw(st.lists(st.sampled_from(flats), max_size=3))]
        body += [Optimize(("param",), ("grad",))]
        if not kept:
            body.remove(Delay("host"))
        bodies.append(tuple(body))
    n_steps = draw(st.integers(2, 7))
    steps = list(itertools.islice(itertools.cycle(bodies), n_steps))
    plan = Plan.from_steps("drawn", world_size=world_size, buffers=(*buffers, *flats), steps=steps)
    check(plan)
    return plan


@st.composite
def shared_runs(draw, *, n_seeds=1):
    plan = draw(shared_plans())
    line = Link(latency_s=draw(st.sampled_from([0.0, 1e-3])), bandwidth_Bps=draw(st.sampled_from([1e4, 2e5])))
    gpus = draw(st.sampled_from([1, 2, 4]))
    cluster = Cluster(
        nodes=plan.world_size // gpus,
        gpus_per_node=gpus,
        fabric=line,
        network=line,
        topology={
            "oversubscription": draw(st.sampled_from([1, 4])),
            "host_bridge_Bps": draw(st.sampled_from([np.inf, 3e4])),
        },
    )
    costs = price(plan, cluster, draw(workloads()))
    assume(costs.contested)
    return plan, costs, draw(delays_of(plan, n_seeds=n_seeds))


@examples(150)
@given(shared_runs(), st.booleans())
def test_operations_of_one_stream_share_links_as_in_the_discrete_event_engine(run, is_large):
    plan, costs, delays = run
    reference = des.simulate(plan, costs, delays)
    with pytest.MonkeyPatch.context() as patch:
        if is_large:
            patch.setattr(recurrence, "_LARGE", 1)
            patch.setattr(recurrence._DelayFeed, "_CHUNK_VALUES", 1)
        trace = fast.simulate(plan, costs, delays)
        measured = fast.measure(plan, costs, DrawnDelays(delays), n_seeds=1)
    for name in ARRAYS:
        np.testing.assert_allclose(getattr(trace, name), getattr(reference, name), rtol=1e-12, atol=1e-15)
    expected = break_down(reference)
    for name in STATES:
        np.testing.assert_allclose(
            getattr(measured, f"{name}_s"),
            getattr(expected, f"{name}_s"),
            rtol=0,
            atol=1e-12 * float(expected.makespan_s[0]),
        )


@examples(60)
@given(shared_runs(n_seeds=3), st.booleans())
def test_seeds_side_by_side_have_the_times_of_each_alone(run, is_large):
    plan, costs, delays = run
    with pytest.MonkeyPatch.context() as patch:
        if is_large:
            patch.setattr(recurrence, "_LARGE", 1)
            patch.setattr(recurrence._DelayFeed, "_CHUNK_VALUES", 1)
        together = fast.measure(plan, costs, DrawnDelays(delays), n_seeds=3)
        step_s = fast.step_s(plan, [costs] * 3, DrawnDelays(delays))
    for seed in range(3):
        alone = des.simulate(plan, costs, {channel: each[[seed]] for channel, each in delays.items()})
        np.testing.assert_allclose(together.makespan_s[seed], alone.makespan_s, rtol=1e-12)
        np.testing.assert_allclose(step_s[seed], alone.makespan_s / plan.n_steps, rtol=1e-12)


def averaging_now_and_then(n_steps=30):
    """Two groups over one switch, that average in every tenth of many short steps."""
    buffers = (
        Buffer("param", 1_000, tensors=(0, 1), initialized=True),
        Buffer("loss", 1),
        Buffer("grad", 1_000, tensors=(0, 1)),
    )
    step = (
        Delay("host"),
        Forward(("param",), ("loss",)),
        Backward(("loss", "param"), "grad"),
        Optimize(("param",), ("grad",)),
    )
    bodies = [(*step, AllReduce("param", Group(2))) if number % 10 == 0 else step for number in range(n_steps)]
    plan = Plan.from_steps("seldom", world_size=4, buffers=buffers, steps=bodies)
    check(plan)
    line = Link(latency_s=1e-3, bandwidth_Bps=1e6)
    workload = Workload(tensors=(Tensor(name="w", count=1_000),), batch_size=1, forward_s=0.1, backward_s=0.2)
    costs = price(
        plan, Cluster(nodes=4, gpus_per_node=1, fabric=line, network=line, topology={"oversubscription": 4}), workload
    )
    delays = np.random.default_rng(0).random((2, n_steps, 4)) * 1e-3
    return plan, costs, {"host": delays}


def test_times_between_rare_averages_need_not_be_kept(monkeypatch):
    plan, costs, delays = averaging_now_and_then()
    kept = []
    settle = recurrence.Recurrence._settle

    def counting(self, open_from):
        kept.append(len(self._told))
        settle(self, open_from)

    monkeypatch.setattr(recurrence.Recurrence, "_settle", counting)
    expected = fast.measure(plan, costs, DrawnDelays(delays), n_seeds=2)
    assert max(kept) > 30  # all instances of ten steps
    kept.clear()
    monkeypatch.setattr(recurrence, "_KEPT_NBYTES", 0)
    found = fast.measure(plan, costs, DrawnDelays(delays), n_seeds=2)
    assert max(kept) < 8
    assert found.makespan_s.tolist() == expected.makespan_s.tolist()
    alone = des.simulate(plan, costs, {channel: each[[1]] for channel, each in delays.items()})
    assert found.makespan_s[1] == pytest.approx(alone.makespan_s, rel=1e-12)


def test_many_transfers_that_share_a_link_are_left_to_the_discrete_event_engine(monkeypatch):
    plan, costs, delays = averaging_now_and_then()
    monkeypatch.setattr(contention, "_MOST_FLIGHTS", 1)
    with pytest.raises(
        UnsupportedError, match=r"all_reduce\(param, .*\) at step 0: 2 transfers share links: use --eng"
    ):
        fast.measure(plan, costs, DrawnDelays(delays), n_seeds=2)


# ---------------------------------------------------------------- by hand


def in_pairs(*strides: int, nodes: int = 4, n_steps: int = 2, lanes: tuple[Lane, ...] = (), **topology: float):
    """Return a plan in which pairs of ranks average, of two GPUs on each node, and its prices.

    With a stride of 2, the two pairs of nodes 0 and 1 share NICs, and so do those of nodes 2 and 3. With a stride of 4,
    nodes 0 and 2, and 1 and 3.
    """
    buffers = (Buffer("near", 1_000, initialized=True), Buffer("far", 3_000, initialized=True))
    lanes = lanes or (COMM,) * len(strides)
    averages = [
        AllReduce(("near", "far")[at % 2], Group(2, stride=stride), lane=lane)
        for at, (stride, lane) in enumerate(zip(strides, lanes, strict=True))
    ]
    plan = Plan.from_steps("pairs", world_size=2 * nodes, buffers=buffers, steps=[(Delay("host"), *averages)] * n_steps)
    check(plan)
    line = Link(latency_s=1e-3, bandwidth_Bps=1e6)
    workload = Workload(tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=0.1, backward_s=0.2)
    cluster = Cluster(nodes=nodes, gpus_per_node=2, fabric=line, network=line, topology=topology)
    return plan, price(plan, cluster, workload)


@pytest.mark.parametrize(
    ("strides", "topology"),
    [
        ((2, 2, 2), {}),
        ((2, 4, 2), {}),  # all nodes share NICs through others
        ((2, 4), {"oversubscription": 4}),
        ((2, 2), {"host_bridge_Bps": 5e5}),  # which the same bytes pass as the NIC
    ],
)
def test_pairs_on_the_nics_of_two_gpus_take_the_times_of_events(strides, topology):
    plan, costs = in_pairs(*strides, **topology)
    drawn = np.random.default_rng(0).choice([0.0, 1e-3, 4e-3, 0.03], (4, plan.n_steps, 8))
    together = fast.measure(plan, costs, DrawnDelays({"host": drawn}), n_seeds=len(drawn))
    for seed, delays in enumerate(drawn):
        one = {"host": delays[np.newaxis]}
        expected = des.simulate(plan, costs, one)
        np.testing.assert_allclose(fast.simulate(plan, costs, one).end_s, expected.end_s, rtol=1e-12)
        assert together.makespan_s[seed] == pytest.approx(expected.makespan_s, rel=1e-12)


def test_each_seed_has_the_links_of_its_own_prices():
    drawn = np.random.default_rng(0).choice([0.0, 1e-3, 4e-3, 0.03], (2, 2, 8))
    plan, wide = in_pairs(2, 2)
    _, narrow = in_pairs(2, 2, host_bridge_Bps=3e5)
    step_s = fast.step_s(plan, [wide, narrow], DrawnDelays({"host": drawn}))
    for costs, delays, found_s in zip((wide, narrow), drawn, step_s, strict=True):
        expected = des.simulate(plan, costs, {"host": delays[np.newaxis]})
        assert found_s == pytest.approx(expected.makespan_s / plan.n_steps, rel=1e-12)


REPLICATE = Lane("replicate", "comm", "replicate")


def on_two_nodes(lane: Lane = COMM):
    """Return the links of two nodes, and two operations on their NICs, the second one on some lane."""
    plan, costs = in_pairs(2, 2, nodes=2, lanes=(COMM, lane))
    _, near, far = plan.bodies[0]
    return SharedLinks([costs], plan.world_size), near, far


def times(*seconds: float) -> np.ndarray:
    """Return times of groups, of one seed."""
    return np.array(seconds)[:, np.newaxis]


def test_an_operation_that_starts_before_others_have_ended_is_refused_after_they_left():
    links, near, far = on_two_nodes(REPLICATE)
    for start_s, is_refused in ((2.0, True), (3.0, False)):
        transfers = Contention(links, 1)
        transfers.ends(near, 0, 0, times(1.0, 1.0), times(3.0, 3.0))
        assert transfers.leave(times(5.0))
        with pytest.raises(UnforeseenError, match="may still use a link") if is_refused else nullcontext():
            transfers.ends(far, 1, 0, times(start_s, start_s), times(6.0, 6.0))


def test_an_operation_of_another_lane_is_refused_while_others_are_under_way():
    links, near, far = on_two_nodes(REPLICATE)
    transfers = Contention(links, 1)
    transfers.ends(near, 0, 0, times(1.0, 1.0), times(3.0, 3.0))
    with pytest.raises(UnforeseenError, match="may still use a link"):
        transfers.ends(far, 1, 0, times(2.0, 2.0), times(6.0, 6.0))


def test_groups_that_start_together_before_others_have_ended_are_refused():
    links, near, far = on_two_nodes(REPLICATE)
    transfers = Contention(links, 1)
    of_near, of_far = (transfers.of(op).of_one_rank() for op in (near, far))
    of_near.ends(0, 0, times(1.0), times(3.0))
    with pytest.raises(UnforeseenError, match="may still use a link"):
        of_far.ends(1, 0, times(2.0), times(6.0))


def test_a_recurrence_that_cannot_go_back_refuses_operations_of_one_lane_that_meet():
    links, near, far = on_two_nodes()
    for may_go_back in (True, False):
        estimate = MeetingEstimate(links, 1, may_go_back=may_go_back)
        estimate.of(near).ends(0, 0, times(1.0, 1.0), times(3.0, 3.0))
        with nullcontext() if may_go_back else pytest.raises(UnforeseenError, match="may still use a link"):
            estimate.of(far).ends(1, 0, times(2.0, 4.0), times(6.0, 6.0))


def test_no_time_is_final_before_all_transfers_have_ended_and_the_recurrence_has_come_again():
    links, near, far = on_two_nodes()
    transfers = Contention(links, 1)
    transfers.ends(near, 0, 0, times(1.0, 1.0), times(1.01, 1.01))
    assert not transfers.leave(times(1.005))
    found_s, first = transfers.ends(far, 1, 0, times(1.002, 2.0), times(1.03, 2.03))
    assert found_s is None
    assert first == 0  # it slows down the first one, which ends later
    assert not transfers.leave(times(9.0))


def test_all_that_start_at_another_time_are_computed_again():
    """In seed 0 both meet, and the first one then starts later. In seed 1 they are apart, and the second one does."""
    links, near, far = on_two_nodes()
    transfers = Contention(links, 2)
    near_s, far_s = np.array([[1.0, 1.0]] * 2), np.array([[1.002, 5.0]] * 2)
    transfers.ends(near, 0, 0, near_s, near_s + 0.01)
    found_s, _ = transfers.ends(far, 1, 0, far_s, far_s + 0.03)
    assert found_s is None
    transfers.ends(near, 0, 0, near_s + np.array([5e-4, 0.0]), near_s + 0.01)
    found_s, first = transfers.ends(far, 1, 0, far_s + np.array([0.0, 1.0]), far_s + 0.03)
    assert found_s is None
    assert first == 0
