"""Actors change what a simulated cluster does, as closed forms say; observers hear of everything, in order.

The step of `SCENARIO` on two nodes: forward 40 ms, backward 80 ms, an all-reduce of 10 MB at 100 MB/s = 100 ms,
optimizer 10 ms; the host waits for the loss of its own step.
"""

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_runs import simulate
from hypothesis import given
from priced_runs import runs
from tiers import examples

import simdist
from simdist import scenario
from simdist.cost import price
from simdist.cost.costs import Stage
from simdist.cost.traffic import Background, Flight, LinkShares, Traffic
from simdist.errors import PlanError, RunError, UnsupportedError
from simdist.plan import AllReduce, Buffer, Forward, Load, Plan, Wait
from simdist.plan.group import Group
from simdist.plan.walk import walk
from simdist.runs import building
from simdist.scenario.cluster import Cluster, Link, Storage
from simdist.scenario.workload import Tensor, Workload

STEPS = 3
SCENARIO = scenario.loads(f"""
cluster: {{nodes: 2, gpus_per_node: 1, fabric: ideal, network: {{latency: 0 s, bandwidth: 100 MB/s}}}}
workload: {{tensors: [{{name: all, count: 2500000}}], batch_size: 1, forward: 40 ms, backward: 80 ms, optimize: 10 ms}}
schedules: [{{kind: sync}}]
steps: {STEPS}
""")
STEP_S, REDUCE_S, REDUCE_NBYTES = 0.23, 0.1, 1e7


def makespan_s(*actors, **settings):
    return building.simulate(SCENARIO, actors=actors, **settings).makespan_s


def doing_nothing(env, cluster):
    yield env.timeout(0.1)


def held(rank, stream, seconds, *, at_s=0.0):
    def holding(env, cluster):
        yield env.timeout(at_s)
        yield cluster.rank(rank).hold(stream, seconds)

    return holding


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("n_flows", [1, 2, 3])
def test_a_flooded_nic_is_shared_fairly(n_flows):
    """The all-reduce has one of k + 1 equal shares: it takes (k + 1) bytes / capacity."""

    def flooding(env, cluster):
        for _ in range(n_flows):
            cluster.flow(cluster.nic_out(0))
        yield env.timeout(0)

    assert makespan_s(flooding) == pytest.approx(STEPS * (STEP_S + n_flows * REDUCE_S), rel=1e-12)


def test_a_flow_shares_until_its_context_ends():
    """Half the rate from 0.12 s to 0.16 s: 20 ms later."""

    def flooding(env, cluster):
        with cluster.flow(cluster.nic_in(1)):
            yield env.timeout(0.16)

    assert makespan_s(flooding) == pytest.approx(STEPS * STEP_S + 0.02, rel=1e-12)


def test_a_flow_on_the_path_between_nodes_shares_their_nics_and_may_be_closed_twice():
    def flooding(env, cluster):
        flow = cluster.flow(*cluster.path(0, 1))
        yield env.timeout(0.16)
        flow.close()
        flow.close()

    assert makespan_s(flooding) == pytest.approx(STEPS * STEP_S + 0.02, rel=1e-12)


def test_a_link_at_half_rate_for_a_window_costs_half_the_window():
    def halving(env, cluster):
        yield env.timeout(0.14)
        cluster.nic_out(1).share = 0.5
        yield env.timeout(0.03)
        cluster.nic_out(1).share = 1

    assert makespan_s(halving) == pytest.approx(STEPS * STEP_S + 0.015, rel=1e-12)


def test_an_outage_in_the_middle_of_a_transfer_costs_its_length():
    def failing(env, cluster):
        yield env.timeout(0.15)
        cluster.nic_out(1).share = 0
        yield env.timeout(2.0)
        cluster.nic_out(1).share = 1

    assert makespan_s(failing) == pytest.approx(STEPS * STEP_S + 2.0, rel=1e-12)


def test_shares_of_several_actors_multiply():
    seen = []

    def halving(env, cluster):
        cluster.nic_out(0).share = 0.5
        yield env.timeout(0.01)
        seen.append(cluster.nic_out(0).share)

    def slowing(env, cluster):
        cluster.link("nic_out[0]").share = 0.4
        yield env.timeout(0.0)

    assert makespan_s(halving, slowing) == pytest.approx(STEPS * (STEP_S + 4 * REDUCE_S), rel=1e-12)
    assert seen == [0.2]


def test_what_an_actor_sends_arrives_when_the_shared_link_has_carried_it():
    """Alone until 0.12 s, then both at half rate: 3 MB are left, which take 60 ms; the all-reduce loses 30 ms."""
    arrived_s = []

    def sending(env, cluster):
        yield cluster.send(0, 1, 15e6)
        arrived_s.append(env.now)

    assert makespan_s(sending) == pytest.approx(STEPS * STEP_S + 0.03, rel=1e-12)
    assert arrived_s == [pytest.approx(0.18, rel=1e-12)]


def test_an_actor_that_disturbs_nobody_changes_nothing():
    assert makespan_s(doing_nothing) == pytest.approx(STEPS * STEP_S, rel=1e-12)


def test_actors_that_still_run_are_ended_with_the_last_rank():
    ended = []

    def running(env, cluster):
        try:
            while True:
                yield env.timeout(0.05)
        finally:
            ended.append(env.now)

    assert makespan_s(running) == pytest.approx(STEPS * STEP_S, rel=1e-12)
    assert ended == [pytest.approx(STEPS * STEP_S)]


# ---------------------------------------------------------------- storage, holds


BUFFERS = (
    Buffer("param", 1, tensors=(0, 1), initialized=True),
    Buffer("flat", 1, initialized=True),
    Buffer("loss", 1),
    Buffer("batch", 8, "uint8", place="host"),
)
FORWARD, REDUCE, LOAD = Forward(("param",), ("loss",)), AllReduce("flat", Group(2)), Load("batch")
WORKLOAD = Workload(tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=2.0, backward_s=4.0, optimize_s=1.0)


def drawn(*body, n=2, times=2, **what):
    """Simulate a plan in which a forward pass takes 2 s, an all-reduce 1 s and a load 2 s."""
    plan = Plan.from_steps("drawn", world_size=n, buffers=BUFFERS, steps=[body] * times)
    slow = Link(latency_s=0.0, bandwidth_Bps=4.0)
    storage = Storage(latency_s=0.0, bandwidth_Bps=8.0)
    cluster = Cluster(nodes=n, gpus_per_node=1, fabric=Link.ideal(), network=slow, storage=storage)
    return simulate(plan, price(plan, cluster, WORKLOAD), {}, **what)


def test_reads_of_an_actor_share_storage_with_loads():
    """8 bytes each through a server of 8 B/s: two loads take 2 s, with a third reader 3 s. Its 12 bytes end at 4 s."""
    done_s = []

    def reading(env, cluster):
        yield cluster.transfer([cluster.link("storage_server")], 12.0)
        done_s.append(env.now)

    assert drawn(Load("batch"), times=1).end_s.tolist() == [[2, 2]]
    assert drawn(Load("batch"), times=1, actors=[reading]).end_s.tolist() == [[3, 3]]
    assert done_s == []  # the run has ended
    assert drawn(Load("batch"), times=2, actors=[reading]).end_s.max() == pytest.approx(5.5)
    assert done_s == [pytest.approx(4.5)]


@pytest.mark.parametrize(("name", "nic"), [("read", "nic_in"), ("write", "nic_out")])
def test_reads_and_writes_pass_the_nic_of_their_node(name, nic):
    def moving(env, cluster):
        cluster.link(f"{nic}[1]").share = 0.25
        began_s = env.now
        yield getattr(cluster, name)(1, 6.0)
        took_s.append(env.now - began_s)

    took_s = []
    drawn(FORWARD, times=10, actors=[moving])
    assert took_s == [pytest.approx(6.0)]


def test_a_held_compute_stream_finishes_what_runs_before_the_hold():
    """
    rank 0   FFAFF..A
    rank 1   FFAhhFFA    held from 1 s on for 3 s: 2 s to 5 s
    """
    trace = drawn(FORWARD, AllReduce("loss", Group(2)), actors=[held(1, "compute", 3.0, at_s=1.0)])
    assert trace.end_s.tolist() == [[2, 2], [3, 3], [5, 7], [8, 8]]


def test_an_idle_stream_is_held_at_once():
    """The comm stream of rank 1 is held from 1 s to 4 s; its all-reduce would be ready at 2 s."""
    trace = drawn(FORWARD, AllReduce("loss", Group(2)), times=1, actors=[held(1, "comm", 3.0, at_s=1.0)])
    assert trace.ready_s[1].tolist() == [2, 4]


def test_holds_of_one_stream_follow_one_another():
    trace = drawn(FORWARD, times=2, actors=[held(0, "compute", 3.0, at_s=1.0), held(0, "compute", 1.0, at_s=1.5)])
    assert trace.start_s.tolist() == [[0, 0], [6, 2]]


def test_a_held_host_enqueues_later():
    trace = drawn(Wait("loss"), FORWARD, times=2, actors=[held(0, "host", 5.0, at_s=1.0)])
    assert trace.start_s[:, 0].tolist() == [0, 0, 6, 6]
    assert trace.start_s[:, 1].tolist() == [0, 0, 2, 2]


def test_a_held_io_stream_loads_later():
    trace = drawn(LOAD, times=2, actors=[held(0, "io", 5.0, at_s=1.0)])
    assert trace.start_s.tolist() == [[0, 0], [7, 2]]


def test_a_held_collective_waits_for_the_held_member():
    trace = drawn(REDUCE, times=2, actors=[held(0, "comm", 5.0, at_s=0.5)])
    assert trace.start_s.tolist() == [[0, 0], [6, 6]]


# ---------------------------------------------------------------- what goes wrong


def test_a_run_in_which_nothing_can_happen_any_more_names_who_waits_and_where():
    def failing(env, cluster):
        yield env.timeout(0.15)
        cluster.nic_out(1).share = 0

    with pytest.raises(RunError) as caught:
        makespan_s(failing)
    message = str(caught.value)
    assert "nothing can happen any more" in message
    assert "AllReduce of step 0, group 0 waits for nic_out[1], of which nothing is left" in message
    assert "rank 1 compute waits for the end of all_reduce(grad.0, mean over group of 2) at step 0" in message


def test_only_a_few_of_many_who_wait_are_named():
    def failing(env, cluster):
        cluster.nic_out(1).share = 0
        yield env.timeout(0.0)

    with pytest.raises(RunError, match=r"; and \d+ more$"):
        drawn(FORWARD, AllReduce("loss", Group(16)), n=16, times=1, actors=[failing])


def raising(env, cluster):
    yield env.timeout(0.25)
    cluster.rank(17)


def yielding_a_number(env, cluster):
    yield 3


def going_round_in_circles(env, cluster):
    while True:
        yield env.timeout(0)


def no_generator(env, cluster):
    return 3


def slowing_what_is_unlimited(env, cluster):
    yield env.timeout(0)
    cluster.link("fabric_out[0]").share = 0.5


def misspelling(env, cluster):
    yield cluster.transfer([cluster.link("nic[0]")], 1.0)


def reading_nowhere(env, cluster):
    yield cluster.read(0, 1.0)


def sending_home(env, cluster):
    yield cluster.send(1, 1, 1.0)


def sending_less_than_nothing(env, cluster):
    yield cluster.send(0, 1, -1.0)


def opening_nothing(env, cluster):
    yield cluster.flow()


def sharing_too_little(env, cluster):
    cluster.nic_in(0).share = -0.5
    yield env.timeout(0)


def sharing_too_much(env, cluster):
    cluster.nic_in(0).share = 2
    yield env.timeout(0)


def misspelling_share(env, cluster):
    cluster.nic_in(0).shar = 0.5
    yield env.timeout(0)


def holding_a_fraction(env, cluster):
    yield cluster.rank(0.5).hold("compute", 1.0)


def holding_for_ever(env, cluster):
    yield cluster.rank(0).hold("compute", float("inf"))


def holding_what_is_no_stream(env, cluster):
    yield cluster.rank(0).hold("network", 1.0)


def waiting_for_who_fails(env, cluster):
    yield env.process(raising(env, cluster))


def closing_badly(env, cluster):
    try:
        yield env.timeout(1e9)
    finally:
        raise OSError("disk full")


@pytest.mark.parametrize(
    ("actor", "says"),
    [
        (raising, r"actor raising failed at 0.25 s: ValueError: rank 17: there are 0 to 1"),
        (yielding_a_number, r"actor yielding_a_number failed at 0 s: TypeError: it yielded 3; an actor yields events"),
        (going_round_in_circles, r"going_round_in_circles failed .*: it waited for 100000 events without letting time"),
        (no_generator, r"no_generator.* is no generator function: it returned 3"),
        (
            slowing_what_is_unlimited,
            r"link 'fabric_out\[0\]': no such link limits anything here; those that do: nic_out, nic_in, ",
        ),
        (misspelling, r"link 'nic\[0\]': no such link limits anything here; those that do: nic_out"),
        (reading_nowhere, r"this cluster has no storage that limits anything"),
        (sending_home, r"from node 1 to node 1: no link between nodes is on the way"),
        (sending_less_than_nothing, r"transfer of -1.0 bytes: must be a number from 0 on"),
        (opening_nothing, r"a flow needs a link"),
        (sharing_too_little, r"share -0.5 of nic_in\[0\]: must be from 0 to 1"),
        (sharing_too_much, r"share 2 of nic_in\[0\]: must be from 0 to 1"),
        (misspelling_share, r"misspelling_share failed at 0 s: AttributeError: .*'shar'"),
        (holding_a_fraction, r"holding_a_fraction failed at 0 s: TypeError: 'float' object"),
        (lambda: iter(()), r"actor .* is called with the environment and the cluster: .* 0 positional arguments"),
        (holding_for_ever, r"hold of inf s: must be a number of seconds from 0 on"),
        (holding_what_is_no_stream, r"lane 'network': there are host, compute, comm, io"),
        (waiting_for_who_fails, r"actor waiting_for_who_fails failed at 0.25 s: ValueError: rank 17"),
        (closing_badly, r"actor closing_badly failed at 0.69 s: OSError: disk full"),
    ],
)
def test_an_actor_that_does_wrong_is_named(actor, says):
    with pytest.raises(RunError, match=says):
        makespan_s(actor)


def test_an_observer_that_fails_is_named():
    def misled(change):
        raise KeyError(change.who)

    with pytest.raises(RunError, match=r"observer .*misled.* failed at Change\(time_s=0.0, who='rank 0 "):
        building.simulate(SCENARIO, observers=[misled])


def test_the_fast_engine_refuses_actors_and_observers_and_auto_takes_the_other():
    for what in ({"actors": [doing_nothing]}, {"observers": [print]}):
        with pytest.raises(UnsupportedError, match="actors and observers need every event"):
            building.simulate(SCENARIO, engine="fast", **what)
    assert building.simulate(SCENARIO, actors=[doing_nothing]).source == "simulated by des"


# ---------------------------------------------------------------- observers


@examples(60)
@given(runs())
def test_observers_hear_what_the_trace_says_in_order_of_time(run):
    plan, costs, _ = run
    changes = []
    ordinary, trace = (simulate(*run, engine="des", observers=each) for each in ([], [changes.append]))
    for name in ("ready_s", "start_s", "end_s"):
        if costs.contested:
            np.testing.assert_allclose(getattr(trace, name), getattr(ordinary, name), rtol=1e-9, atol=1e-15)
        else:
            np.testing.assert_array_equal(getattr(trace, name), getattr(ordinary, name))
    assert all(one.time_s <= other.time_s for one, other in itertools.pairwise(changes))
    heard = {(change.who, change.instance.index, change.state): change.time_s for change in changes}
    for instance in walk(plan):
        for rank in range(plan.world_size):
            for state, table in (("ready", trace.ready_s), ("started", trace.start_s), ("ended", trace.end_s)):
                who = f"rank {rank} {instance.lane.stream}"
                told_s = heard[who, instance.index, state]
                if trace.late:  # then the trace ends with its last result, and who is late goes on
                    told_s = min(told_s, trace.makespan_s)
                assert told_s == table[instance.index, rank]


@examples(40)
@given(runs())
def test_an_actor_that_does_nothing_changes_nothing(run):
    ordinary, trace = (simulate(*run, engine="des", actors=each) for each in ([], [doing_nothing]))
    for name in ("ready_s", "start_s", "end_s"):
        if run[1].contested:
            np.testing.assert_allclose(getattr(trace, name), getattr(ordinary, name), rtol=1e-9, atol=1e-15)
        else:
            np.testing.assert_array_equal(getattr(trace, name), getattr(ordinary, name))


def test_observers_hear_of_links_transfers_and_holds():
    def acting(env, cluster):
        cluster.nic_out(0).share = 0.5
        with cluster.flow(cluster.nic_in(1)):
            yield cluster.send(1, 0, 1e6)
            yield cluster.rank(1).hold("io", 0.25)

    changes = []
    makespan_s(acting, observers=[changes.append])
    found = [(round(c.time_s, 6), c.who, c.state, c.share) for c in changes if c.instance is None]
    assert found == [
        (0.0, "nic_out[0]", "share", 0.5),
        (0.0, "actor acting on nic_in[1]", "started", None),
        (0.0, "actor acting on nic_out[1], nic_in[0]", "started", None),
        (0.01, "actor acting on nic_out[1], nic_in[0]", "ended", None),
        (0.01, "rank 1 io", "held", None),
        (0.26, "rank 1 io", "released", None),
        (0.26, "actor acting on nic_in[1]", "ended", None),
    ]


def test_processes_are_named():
    seen = []

    def looking(env, cluster):
        yield env.timeout(0.15)
        seen.extend(process.name for process in cluster.processes)
        seen.append(env.active_process.name)

    building.simulate(SCENARIO, actors=[looking])
    streams = [f"rank {rank} {stream}" for rank in range(2) for stream in ("host", "compute", "comm")]
    assert seen == [*streams, "actor looking", "actor looking"]


# ---------------------------------------------------------------- traffic


def with_traffic(traffic):
    [schedule] = SCENARIO.schedules
    plan = building.build(SCENARIO, schedule).plan
    costs = price(plan, SCENARIO.cluster, SCENARIO.workload, disturbed=traffic.causes)
    return simulate(plan, costs, building.delays(SCENARIO), traffic=traffic).makespan_s


def nic_out(node):
    return SCENARIO.cluster.world_size * 2 + node


def test_traffic_changes_shares_and_adds_flows_without_stopping_who_runs_ahead():
    """Half the rate from 0.14 s to 0.17 s; another job's 2 MB in step 2, and its endless flow for 30 ms in step 3."""
    stage = Stage(0.0, np.array([nic_out(0)]), np.ones(1))
    flights = [Flight(0.365, nbytes=2e6), Flight(0.64, end_s=0.67)]
    background = Background(stage, lambda: iter(flights), "background[0]")
    shares = LinkShares((nic_out(1),), lambda: iter([(0.0, 1.0), (0.14, 0.5), (0.17, 1.0)]), "disturbances[0]")
    expected_s = STEPS * STEP_S + 0.015 + 0.02 + 0.015
    assert with_traffic(Traffic((shares,), (background,))) == pytest.approx(expected_s, rel=1e-12)


def test_endless_traffic_ends_with_the_run():
    """The rate changes every 10 ms, also while nothing is sent; the transfers are integrated by hand."""
    shares = LinkShares((nic_out(1),), lambda: ((0.01 * n, 1 - n % 2 / 2) for n in itertools.count()))
    now_ms = 0.0
    for _ in range(STEPS):
        now_ms, left_ms = now_ms + 120, 100.0
        while left_ms > 1e-9:
            rate = 1 - int(now_ms // 10 + 1e-9) % 2 / 2
            pass_ms = min(10 - now_ms % 10, left_ms / rate)
            now_ms, left_ms = now_ms + pass_ms, left_ms - rate * pass_ms
        now_ms += 10
    assert with_traffic(Traffic((shares,))) == pytest.approx(now_ms / 1e3, rel=1e-9)


def test_flows_of_others_that_are_late_follow_one_another():
    """The second begins when the first has ended; the third, whose time is over by then, not at all."""
    stage = Stage(0.0, np.array([nic_out(0)]), np.ones(1))
    flights = [Flight(0.0, nbytes=13e6), Flight(0.01, nbytes=1e6), Flight(0.02, end_s=0.03), Flight(0.7, nbytes=1e9)]
    assert with_traffic(Traffic((), (Background(stage, lambda: iter(flights)),))) == pytest.approx(0.69 + 0.02)


def test_traffic_that_prices_do_not_know_is_refused():
    [schedule] = SCENARIO.schedules
    built = building.build(SCENARIO, schedule)
    traffic = Traffic((LinkShares((nic_out(1),), lambda: iter([(0.0, 0.5)])),))
    with pytest.raises(PlanError, match=r"plan .*: its prices do not know that nic_out\[1\] is disturbed"):
        simulate(built.plan, built.costs, building.delays(SCENARIO), engine="des", traffic=traffic)


# ---------------------------------------------------------------- again


def test_another_process_gives_the_same_times():
    code = (
        "import hashlib, sys; sys.path.insert(0, 'tests/simdist/engines'); sys.path.insert(0, 'tests')\n"
        "import test_actors\nprint(test_actors.digest())"
    )
    for seed in ("1", "2"):
        ended = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(simdist.__file__).parents[1],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ended.stdout.split() == [digest()]


def digest():
    """Return a digest of a run in which much happens."""

    def acting(env, cluster):
        flows = [cluster.flow(cluster.nic_out(0)) for _ in range(3)]
        for n in range(20):
            cluster.nic_in(n % 2).share = 1 / (1 + n % 3)
            cluster.send(n % 2, 1 - n % 2, 1e5 * (n + 1))
            yield cluster.rank(n % 2).hold("compute", 0.01 / (n + 1))
        for flow in flows:
            flow.close()

    changes = []
    trace = building.simulate(SCENARIO, actors=[acting, doing_nothing], observers=[changes.append])
    text = repr([(change.time_s, change.who, change.state, change.share) for change in changes])
    return hashlib.sha256(trace.end_s.tobytes() + text.encode()).hexdigest()
