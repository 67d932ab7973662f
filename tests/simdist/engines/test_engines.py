"""The two engines are one: equal to the last bit without contention, and what both say is sane."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import drawn_plans
import numpy as np
import pytest
from engine_runs import alike, des, fast, simulate
from hypothesis import assume, event, given
from hypothesis import strategies as st
from priced_runs import WITHOUT_STORAGE, arrays, clusters, delays_of, runs, workloads
from tiers import examples

import simdist
from simdist.cost import price
from simdist.cost.costs import Shared, Stage, Transfer
from simdist.engines import choose, recurrence
from simdist.engines.network import fluid
from simdist.errors import PlanError, UnsupportedError
from simdist.plan import (
    COLLECTIVES,
    AllGather,
    AllReduce,
    Backward,
    Buffer,
    Delay,
    Forward,
    Load,
    Plan,
    ReduceScatter,
    Tick,
    TrustRatios,
    Wait,
    lane_of,
)
from simdist.plan.check import check
from simdist.plan.delays import DrawnDelays
from simdist.plan.group import Group
from simdist.plan.walk import drops_late, walk
from simdist.scenario.cluster import Cluster, Link, Storage
from simdist.scenario.workload import Tensor, Workload
from simdist.schedules import Job, kinds
from simdist.traces.breakdown import break_down

ARRAYS = ("ready_s", "start_s", "end_s")
STATES = ("compute_s", "comm_s", "wait_s", "io_s", "host_s")


def without_contention(op_kinds=WITHOUT_STORAGE):
    """Draw runs in which nothing can share a resource."""
    return runs(op_kinds=op_kinds).filter(lambda run: not run[1].contested)


@examples(150)
@given(runs())
def test_engines_agree(run):
    """To the last bit where nothing is shared, to 1e-9 where the fast engine takes shared resources on."""
    plan, costs, delays = run
    reference = des.simulate(plan, costs, delays)
    try:
        trace = fast.simulate(plan, costs, delays)
    except UnsupportedError:
        assert costs.contested
        event("refused")
        return
    event("shared, common start" if costs.contested else "not shared")
    for name in ARRAYS:
        found, expected = getattr(trace, name), getattr(reference, name)
        assert np.isfinite(expected).all()
        if costs.contested:
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-15)
        else:
            np.testing.assert_array_equal(found, expected)


@examples(100)
@given(without_contention())
def test_engines_agree_to_the_last_bit_without_contention(run):
    plan, costs, delays = run
    reference, trace = des.simulate(plan, costs, delays), fast.simulate(plan, costs, delays)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(trace, name), getattr(reference, name))


@examples(60)
@given(runs())
def test_order_written_out_step_by_step_gives_the_same_times(run):
    plan, costs, delays = run
    flat = drawn_plans.spelled_out(plan)
    try:
        trace, other = (fast.simulate(each, costs, delays) for each in (plan, flat))
    except UnsupportedError:
        trace, other = (des.simulate(each, costs, delays) for each in (plan, flat))
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(trace, name), getattr(other, name))


@examples(80)
@given(runs())
def test_measuring_without_a_trace_gives_the_breakdown_of_the_trace(run):
    plan, costs, delays = run
    try:
        expected = break_down(fast.simulate(plan, costs, delays))
    except UnsupportedError:
        with pytest.raises(UnsupportedError):
            fast.measure(plan, costs, DrawnDelays(delays), n_seeds=1)
        return
    measured = fast.measure(plan, costs, DrawnDelays(delays), n_seeds=1)
    for name in ("makespan_s", *STATES):
        np.testing.assert_array_equal(getattr(measured, name), getattr(expected, name))


@examples(150)
@given(st.data())
def test_transfers_that_end_together_take_what_the_network_gives_them(data):
    """The formula for equal transfers, beside the simulated network."""
    plan = data.draw(st.one_of(drawn_plans.legal_plans(op_kinds=WITHOUT_STORAGE), drawn_plans.schedule_plans()))
    costs = price(plan, data.draw(clusters(plan.world_size)), data.draw(workloads()))
    transfers = [cost.transfers for cost in costs.of.values() if isinstance(cost, Shared)]
    assume(transfers)
    found = [fluid.common_start_s(each, costs.capacity_Bps) for each in transfers]
    event(f"together: {any(fluid._together_s(each, costs.capacity_Bps) is not None for each in transfers)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fluid, "_together_s", lambda *_: None)
        expected = [fluid.common_start_s(each, costs.capacity_Bps) for each in transfers]
    for each, by_network in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, by_network, rtol=1e-12, atol=1e-18)


def test_transfers_of_different_sizes_do_not_end_together():
    one, two = (Transfer((Stage(0.0, np.array([0]), np.array([nbytes])),)) for nbytes in (1.0, 2.0))
    assert fluid.common_start_s([one, two], np.array([1.0])).tolist() == [2.0, 3.0]
    apart = Transfer((Stage(0.0, np.array([1]), np.array([2.0])),))
    assert fluid.common_start_s([one, apart], np.array([1.0, 2.0])).tolist() == [1.0, 1.0]
    late = Transfer((Stage(1.0, np.array([0]), np.array([1.0])),))
    assert fluid.common_start_s([one, late], np.array([1.0])).tolist() == [1.0, 2.0]


WITHOUT_DELAYS = tuple(kind for kind in drawn_plans.OP_KINDS if kind is not Delay)


@examples(120)
@given(st.data())
def test_one_rank_and_one_seed_stand_for_all_only_where_they_are_alike(data):
    """To the last bit, in every rank and seed, and with a price list for each seed."""
    plan = data.draw(st.one_of(drawn_plans.legal_plans(op_kinds=WITHOUT_DELAYS), drawn_plans.schedule_plans()))
    assume(not any(isinstance(op, Delay) for body in plan.bodies for op in body) and not drops_late(plan))
    cluster = data.draw(clusters(plan.world_size))
    costs, other = (price(plan, cluster, data.draw(workloads())) for _ in range(2))
    try:
        expected = break_down(fast.simulate(plan, costs, {}))
        together = fast.step_s(plan, [costs, other], DrawnDelays({}))
    except UnsupportedError:
        assume(False)
    measured = fast.measure(plan, costs, DrawnDelays({}), n_seeds=3)
    for name in STATES:
        np.testing.assert_array_equal(getattr(measured, name), np.repeat(getattr(expected, name), 3, axis=1))
    np.testing.assert_array_equal(measured.makespan_s, np.repeat(expected.makespan_s, 3))
    assert together.tolist() == [break_down(fast.simulate(plan, each, {})).step_s[0] for each in (costs, other)]
    stands_for_all = choose.all_ranks_are_alike(plan, costs)
    event("one for all" if stands_for_all else "each its own")


@examples(40)
@given(st.data())
def test_seeds_in_one_batch_do_not_touch_each_other(data):
    plan = data.draw(drawn_plans.legal_plans(op_kinds=WITHOUT_STORAGE))
    costs = price(plan, data.draw(clusters(plan.world_size)), data.draw(workloads()))
    assume(not costs.contested)
    delays = data.draw(delays_of(plan, n_seeds=3))
    together = fast.measure(plan, costs, DrawnDelays(delays), n_seeds=3)
    for seed in range(3):
        one = DrawnDelays({channel: array[[seed]] for channel, array in delays.items()})
        alone = fast.measure(plan, costs, one, n_seeds=1)
        assert together.makespan_s[seed] == alone.makespan_s[0]
        for name in STATES:
            np.testing.assert_array_equal(getattr(together, name)[:, seed], getattr(alone, name)[:, 0])


@examples(80)
@given(runs())
def test_every_operation_is_ready_then_starts_then_ends_after_what_it_needs(run):
    plan, costs, delays = run
    trace = des.simulate(plan, costs, delays)
    assert (trace.ready_s >= 0).all()
    assert (trace.ready_s <= trace.start_s).all()
    assert (trace.start_s <= trace.end_s).all()
    last = {}
    for instance in walk(plan):
        ready_s = trace.ready_s[instance.index]
        for index in (*instance.after, last.get(instance.lane)):
            assert index is None or (ready_s >= trace.end_s[index]).all()
        last[instance.lane] = instance.index
        if not isinstance(instance.op, COLLECTIVES):
            assert (trace.start_s[instance.index] == ready_s).all()


@examples(80)
@given(runs().filter(lambda run: not drops_late(run[0])))
def test_members_of_a_group_start_when_the_last_is_ready_and_end_together(run):
    plan, costs, delays = run
    trace = des.simulate(plan, costs, delays)
    for instance in walk(plan):
        if isinstance(instance.op, COLLECTIVES):
            for members in instance.op.group.members(plan.world_size):
                ready_s, start_s, end_s = (getattr(trace, name)[instance.index, members] for name in ARRAYS)
                assert (start_s == ready_s.max()).all()
                assert (end_s == end_s[0]).all()


@examples(80)
@given(st.data())
def test_more_delay_is_never_faster(data):
    """Every time is a maximum of sums; a link that is shared can reward lateness, so nothing is shared here.

    Nor does anything tick: a tick is reached by the rest of the way to it, which is rounded.
    """
    kinds_of_ops = tuple(kind for kind in WITHOUT_STORAGE if kind is not Tick)
    plan, costs, delays = data.draw(without_contention(kinds_of_ops))
    more = {channel: array + data.draw(arrays(array.shape)) for channel, array in delays.items()}
    before, after = des.simulate(plan, costs, delays), des.simulate(plan, costs, more)
    for name in ARRAYS:
        assert (getattr(after, name) >= getattr(before, name)).all()


@examples(80)
@given(runs(op_kinds=(Tick, *WITHOUT_STORAGE)))
def test_a_tick_holds_its_stream_for_less_than_a_period_and_until_a_multiple_of_it(run):
    plan, costs, delays = run
    trace = des.simulate(plan, costs, delays)
    for instance in walk(plan):
        if isinstance(instance.op, Tick):
            ready_s, end_s = trace.ready_s[instance.index], trace.end_s[instance.index]
            ticks = end_s / instance.op.period_s
            on_a_tick = np.isclose(ticks, np.round(ticks), rtol=1e-12, atol=1e-9)
            assert ((end_s == ready_s) | on_a_tick).all()
            assert (end_s - ready_s < instance.op.period_s * (1 + 1e-9)).all()


TICKING = (
    Buffer("param", 2, tensors=(0, 2), initialized=True),
    Buffer("grad.0", 1, tensors=(0, 1)),
    Buffer("grad.1", 1, tensors=(1, 2)),
    Buffer("loss", 1),
)
FORWARD = Forward(("param",), ("loss",))
BACKWARD_1, BACKWARD_0 = (Backward(("param", "loss"), f"grad.{n}") for n in (1, 0))
BOTH_ENGINES = pytest.mark.parametrize("engine", [des, fast], ids=["des", "fast"])
ALL_ENGINES = pytest.mark.parametrize("engine", [des, alike, fast], ids=["des", "alike", "fast"])  # of equal ranks


def ticking(engine, body, delays=((0.0, 0.0),), *, all_reduce_s=1.0):
    """Return the trace of steps of 2 s forward and 2 x 4 s backward on two ranks that all-reduce in so many seconds."""
    plan = Plan.from_steps("ticking", world_size=2, buffers=TICKING, steps=[(Delay("host"), *body)] * len(delays))
    check(plan)
    network = Link(latency_s=all_reduce_s / 2, bandwidth_Bps=np.inf)  # a ring of two sends twice
    tensors = tuple(Tensor(name=str(number), count=1, flops=1.0) for number in range(2))
    what = Workload(tensors=tensors, batch_size=1, forward_s=2.0, backward_s=8.0, optimize_s=0.0)
    costs = price(plan, Cluster(nodes=2, gpus_per_node=1, fabric=network, network=network), what)
    return engine.simulate(plan, costs, {"host": np.array([delays])})


def times_of(trace, row):
    """Return ready, start and end of an operation on each rank."""
    return [(*map(float, each),) for each in zip(*(getattr(trace, name)[row] for name in ARRAYS), strict=True)]


@BOTH_ENGINES
@pytest.mark.parametrize(
    ("late_s", "ticked_s", "reduced_s"),
    [
        (0.0, 8.0, 9.0),  # written at 6 s
        (1.0, 8.0, 9.0),
        (2.0, 8.0, 9.0),  # written on the tick: it need not wait for the next
        (2.5, 12.0, 13.0),
        (3.0, 12.0, 13.0),
    ],
)
def test_a_gradient_waits_for_the_next_tick_and_its_all_reduce_for_the_last_rank(engine, late_s, ticked_s, reduced_s):
    """Every 4 s: rank 0 writes its gradient at 6 s, rank 1 so much later."""
    body = (FORWARD, BACKWARD_1, Tick(("grad.1",), 4.0), AllReduce("grad.1", Group(2)))
    trace = ticking(engine, body, [(0.0, late_s)])
    ready_s = 6.0 + late_s
    assert times_of(trace, 3) == [(6.0, 6.0, 8.0), (ready_s, ready_s, ticked_s)]
    assert times_of(trace, 4) == [(8.0, ticked_s, reduced_s), (ticked_s, ticked_s, reduced_s)]


@ALL_ENGINES
@pytest.mark.parametrize(
    ("all_reduce_s", "second_tick"),
    [
        (1.0, (10.0, 10.0, 12.0)),  # the stream is free at 9 s; the second gradient is written at 10 s
        (3.0, (11.0, 11.0, 12.0)),
        (4.0, (12.0, 12.0, 12.0)),
        (6.0, (14.0, 14.0, 14.0)),  # the clock ticked at 12 s, while the stream was busy
    ],
)
def test_a_tick_that_passed_while_the_stream_was_busy_holds_nothing(engine, all_reduce_s, second_tick):
    """Every 4 s: gradients are written at 6 s and at 10 s; the first all-reduce starts at 8 s."""
    ticks = (Tick(("grad.1",), 4.0), Tick(("grad.0",), 4.0))
    reduces = (AllReduce("grad.1", Group(2)), AllReduce("grad.0", Group(2)))
    body = (FORWARD, BACKWARD_1, ticks[0], reduces[0], BACKWARD_0, ticks[1], reduces[1])
    trace = ticking(engine, body, all_reduce_s=all_reduce_s)
    assert times_of(trace, 3) == [(6.0, 6.0, 8.0)] * 2
    assert times_of(trace, 4) == [(8.0, 8.0, 8.0 + all_reduce_s)] * 2
    assert times_of(trace, 6) == [second_tick] * 2
    assert times_of(trace, 7) == [(second_tick[2], second_tick[2], second_tick[2] + all_reduce_s)] * 2


@ALL_ENGINES
def test_a_tick_for_several_buffers_counts_from_the_last_of_them(engine):
    body = (FORWARD, BACKWARD_1, BACKWARD_0, Tick(("grad.1", "grad.0"), 4.0), AllReduce("grad.0", Group(2)))
    assert times_of(ticking(engine, body), 4) == [(10.0, 10.0, 12.0)] * 2


@ALL_ENGINES
def test_the_clock_runs_from_the_start_of_the_run_and_not_of_the_step(engine):
    """Every 7 s: steps of 2 + 4 s start at 0 s, 8 s (after the all-reduce of 7-8 s) and 15 s."""
    body = (FORWARD, BACKWARD_1, Tick(("grad.1",), 7.0), AllReduce("grad.1", Group(2)), Wait("grad.1"))
    trace = ticking(engine, body, [(0.0, 0.0)] * 3)
    assert [times_of(trace, 3 + 6 * step)[0] for step in range(3)] == [
        (6.0, 6.0, 7.0),
        (14.0, 14.0, 14.0),
        (21.0, 21.0, 21.0),
    ]


@BOTH_ENGINES
def test_a_clock_of_milliseconds_does_not_tick_early_or_late_by_rounding(engine):
    """0.1 s are not a multiple of 1/10 in binary: what is written on a tick stays there, after 1,000 of them."""
    plan = Plan.from_steps(
        "ticking", world_size=1, buffers=TICKING, steps=[(FORWARD, Tick(("loss",), 0.1), Wait("loss"))] * 1000
    )
    tensors = tuple(Tensor(name=str(number), count=1) for number in range(2))
    what = Workload(tensors=tensors, batch_size=1, forward_s=0.1, backward_s=0.1)
    ideal = Link.ideal()
    trace = engine.simulate(plan, price(plan, Cluster(nodes=1, gpus_per_node=1, fabric=ideal, network=ideal), what), {})
    assert trace.end_s[1::3, 0] == pytest.approx(0.1 * np.arange(1, 1001), rel=1e-12)


def assert_permuted(plan, costs, delays, order):
    for engine in (des, fast):
        trace = engine.simulate(plan, costs, delays)
        other = engine.simulate(plan, costs, {channel: array[:, :, order] for channel, array in delays.items()})
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(other, name), getattr(trace, name)[:, order])


def meeting_everybody(plan):
    """Return the plan with the world in place of every other group."""

    def widened(op):
        return (
            dataclasses.replace(op, group=Group(plan.world_size), algorithm="ring")
            if isinstance(op, COLLECTIVES)
            else op
        )

    return dataclasses.replace(plan, bodies=tuple(tuple(map(widened, body)) for body in plan.bodies))


@examples(50)
@given(st.data())
def test_relabelling_ranks_permutes_the_trace(data):
    """Everybody meets everybody and does the same, so any two ranks may swap places."""
    different = (ReduceScatter, AllGather, TrustRatios)  # their members have slices, or shares, of their own
    kinds_of_ops = tuple(kind for kind in WITHOUT_STORAGE if kind not in different)
    plan = meeting_everybody(data.draw(drawn_plans.legal_plans(op_kinds=kinds_of_ops)))
    check(plan)
    costs = price(plan, data.draw(clusters(plan.world_size, uniform=True)), data.draw(workloads()))
    assume(not costs.contested)
    assert_permuted(plan, costs, data.draw(delays_of(plan)), data.draw(st.permutations(range(plan.world_size))))


@examples(30)
@given(st.data())
def test_relabelling_groups_permutes_the_trace(data):
    """Pairs inside fours inside eight: members of a pair may swap, pairs of a four, and fours."""
    levels = {1: 2, 2: 4, 4: "world"}
    schedule = kinds()["hierarchical_sgd"](levels=levels, intra_node_gradients=False)
    plan = schedule.plan(Job(8, 1, 8, tensor_counts=(250, 1_000), delay_channels=frozenset({"host", "compute"})))
    costs = price(plan, data.draw(clusters(8, uniform=True)), data.draw(workloads()))
    order = np.arange(8).reshape(2, 2, 2)
    for axis in range(3):
        order = np.flip(order, axis) if data.draw(st.booleans()) else order
    assume(not costs.contested)
    assert_permuted(plan, costs, data.draw(delays_of(plan)), order.ravel())


def tiny():
    plan = kinds()["sync"]().plan(Job(4, 2, 3, tensor_counts=(250,), delay_channels=frozenset({"host"})))
    line = Link(latency_s=1e-3, bandwidth_Bps=1e6)
    tensors = (Tensor(name="w", count=250),)
    what = Workload(tensors=tensors, batch_size=1, forward_s=0.1, backward_s=0.2, optimize_s=0.0)
    return plan, price(plan, Cluster(nodes=2, gpus_per_node=2, fabric=line, network=line), what)


def test_auto_takes_the_fast_engine_and_the_other_where_that_one_refuses():
    plan, costs = tiny()
    assert simulate(plan, costs, {"host": np.zeros((1, 3, 4))}).source == "simulated by fast"
    meeting = (*loading_and_averaging(wait=False), {})
    assert simulate(*meeting).source == "simulated by des"
    assert simulate(*tiny(), {"host": np.zeros((1, 3, 4))}, engine="des").source == "simulated by des"
    with pytest.raises(UnsupportedError, match="use --engine des"):
        simulate(*meeting, engine="fast")


def loading_and_averaging(*, wait):
    """A load and an all-reduce, which use the same NICs: at the same time, or one after the other."""
    buffers = (Buffer("flat", 1_000, initialized=True), Buffer("batch", 5_000, "uint8", place="host"))
    body = (Load("batch"), *((Wait("batch"),) if wait else ()), AllReduce("flat", Group(2)))
    plan = Plan.from_steps("averaging", world_size=2, buffers=buffers, steps=[body])
    line = Link(latency_s=1e-3, bandwidth_Bps=1e6)
    workload = Workload(tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=0.1, backward_s=0.2)
    storage = Storage(latency_s=0.0, bandwidth_Bps=5e6)
    return plan, price(plan, Cluster(nodes=2, gpus_per_node=1, fabric=line, network=line, storage=storage), workload)


def test_fast_engine_refuses_an_operation_that_meets_another_one_on_a_link():
    plan, costs = loading_and_averaging(wait=False)
    with pytest.raises(UnsupportedError, match="another operation may still use a link that it needs"):
        fast.simulate(plan, costs, {})
    load_s, reduce_s = des.simulate(plan, costs, {}).end_s[:, 0]
    assert (load_s, reduce_s) == pytest.approx((0.005 + 0.003, 0.002 + 0.004 + 0.003))  # 3 ms each at half the rate


def test_fast_engine_takes_operations_that_use_a_link_one_after_the_other():
    plan, costs = loading_and_averaging(wait=True)
    assert fast.simulate(plan, costs, {}).end_s[-1].tolist() == pytest.approx([0.005 + 0.006] * 2)


@pytest.mark.parametrize("engine", ["des", "fast", "auto"])
def test_delays_that_do_not_fit_are_refused(engine):
    plan, costs = tiny()
    with pytest.raises(PlanError, match="plan sync delays the host; no such delays are given, only: none"):
        simulate(plan, costs, {}, engine=engine)
    with pytest.raises(PlanError, match=r"\(1, 3, 5\); a run of plan sync takes \(1, 3, 4\): seeds x steps x ranks"):
        simulate(plan, costs, {"host": np.zeros((1, 3, 5))}, engine=engine)
    for shape in ((1, 2, 4), (2, 3, 4), (3, 4), (4,)):
        with pytest.raises(PlanError, match=rf"host delays have shape {re.escape(str(shape))}"):
            simulate(plan, costs, {"host": np.zeros(shape)}, engine=engine)
    for bad in (-1.0, np.nan, np.inf):
        delays = np.zeros((1, 3, 4))
        delays[0, 2, 1] = bad
        with pytest.raises(PlanError, match=r"at step 2, rank 1; delays are seconds, 0 or more"):
            simulate(plan, costs, {"host": delays}, engine=engine)


def test_delays_that_are_not_needed_are_ignored_and_longer_ones_accepted():
    plan, costs = tiny()
    long = {"host": np.zeros((1, 7, 4)), "io": np.zeros((1, 3, 4))}
    assert simulate(plan, costs, long).makespan_s == simulate(plan, costs, {"host": np.zeros((1, 3, 4))}).makespan_s


@pytest.mark.parametrize("engine", [des, fast], ids=["des", "fast"])
def test_progress_grows_to_the_number_of_steps(engine):
    plan, costs = tiny()
    told = []
    engine.simulate(plan, costs, {"host": np.ones((1, 3, 4))}, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 3


def test_drawn_delays_are_handed_out_in_order():
    source = DrawnDelays({"host": np.arange(6.0).reshape(1, 3, 2)})
    assert source.take(1)["host"].tolist() == [[[0.0, 1.0]]]
    assert source.take(2)["host"].tolist() == [[[2.0, 3.0], [4.0, 5.0]]]


def test_chunks_of_delays_do_not_change_any_time(monkeypatch):
    plan = kinds()["local_sgd"](period=3).plan(
        Job(4, 2, 31, tensor_counts=(250,), delay_channels=frozenset({"host", "compute"}))
    )
    line = Link(latency_s=1e-3, bandwidth_Bps=1e6)
    what = Workload(tensors=(Tensor(name="w", count=250),), batch_size=1, forward_s=0.1, backward_s=0.2)
    costs = price(plan, Cluster(nodes=2, gpus_per_node=2, fabric=line, network=line), what)
    delays = {channel: np.random.default_rng(1).random((2, 31, 4)) for channel in ("host", "compute")}
    whole = fast.measure(plan, costs, DrawnDelays(delays), n_seeds=2)
    for n_values in (1, 8, 24, 80):
        monkeypatch.setattr(recurrence._DelayFeed, "_CHUNK_VALUES", n_values)
        chunked = fast.measure(plan, costs, DrawnDelays(delays), n_seeds=2)
        np.testing.assert_array_equal(chunked.wait_s, whole.wait_s)
        np.testing.assert_array_equal(chunked.makespan_s, whole.makespan_s)


WRITE_A_TRACE = """
import hashlib, sys
from pathlib import Path
from engine_runs import simulate
from simdist import scenario
from simdist.runs import building
chosen = scenario.loads(sys.argv[1])
for number, schedule in enumerate(chosen.schedules):
    built = building.build(chosen, schedule)
    for engine in ("des", "fast"):
        path = Path(sys.argv[2]) / f"{number}-{engine}.npz"
        simulate(built.plan, built.costs, building.delays(chosen), engine=engine).save(path)
        print(schedule.name, engine, hashlib.sha256(path.read_bytes()).hexdigest())
"""

SHAKEN = """
cluster: {preset: v100x8-25gbit, nodes: 2}
workload: {preset: resnet18, forward: 20 ms, backward: 35 ms}
steps: 6
disturbances:
  - {kind: jitter, median: 3 ms, sigma: 0.7}
  - {kind: heavy_tail, scale: 1 ms, shape: 1.5, on: compute}
schedules: [{kind: sync}, {kind: local_sgd, period: 2}, {kind: hierarchical_sgd, levels: {1: 8, 2: 16}}]
"""


def test_two_processes_write_the_same_bytes(tmp_path):
    """With either engine, whatever the order of sets and dictionaries with hashed keys."""
    hashes = []
    for seed in ("0", "1", "4242"):
        root = Path(simdist.__file__).parents[1]
        path = os.pathsep.join([str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-c", WRITE_A_TRACE, SHAKEN, str(tmp_path)]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        hashes.append(done.stdout.splitlines())
    assert len(hashes[0]) == 3 * 2
    assert hashes[1:] == hashes[:1] * 2


def test_label_of_the_plan_does_not_change_any_time():
    plan, costs = tiny()
    renamed = dataclasses.replace(plan, name="another")
    delays = {"host": np.random.default_rng(0).random((1, 3, 4))}
    assert (simulate(plan, costs, delays).difference_s(simulate(renamed, costs, delays)) == 0).all()


def test_streams_run_in_order_and_concurrently():
    plan, costs = tiny()
    trace = des.simulate(plan, costs, {"host": np.random.default_rng(0).random((1, 3, 4))})
    by_stream = {}
    for instance in walk(plan):
        by_stream.setdefault(lane_of(instance.op).stream, []).append(instance.index)
    for rows in by_stream.values():
        assert (trace.start_s[rows[1:]] >= trace.end_s[rows[:-1]]).all()
