"""A lane of a name that nothing in simdist knows: each consumer of a plan treats it by its kind."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_runs import simulate
from traces import plan_of

from simdist.chakra.export import Export
from simdist.cost import price
from simdist.engines import replay
from simdist.engines.live import LiveCluster
from simdist.errors import PlanError
from simdist.plan import AllReduce, Copy, Dataset, Group, Lane, Op, Plan, dumps, lane_of, loads
from simdist.plan.check import check
from simdist.plan.lanes import AVERAGE, IO, LANES, pull_from, push_to
from simdist.plan.text import body_text
from simdist.proof import prove
from simdist.report.page.packing import rows_of_streams
from simdist.report.timeline import timeline_figure
from simdist.runs import building
from simdist.scenario import loads as read_scenario
from simdist.stragglers.ideal import ideal
from simdist.stragglers.recording import measured_delays
from simdist.studies.epoch_bounds import epoch_limits
from simdist.studies.validation import validate
from simdist.traces.breakdown import break_down
from simdist.traces.chrome import chrome_trace
from simdist.traces.waiting import attribute_waiting

EIGHTH = Lane("eighth", "comm", "eighth")
SCENARIO = read_scenario(
    """
    cluster:
      nodes: 2
      gpus_per_node: 2
      fabric: ideal
      network: {latency: 50 us, bandwidth: 1 Gbit/s}
    workload: {preset: mlp, batch_size: 8, forward: 1 ms, sample_size: 12288 B, decode: 1 us}
    disturbances: [{kind: transient, on: host, probability: 20%, delay: 20 ms}]
    schedules: [{kind: hierarchical_sgd, levels: {3: world}, overlap_steps: 1, algorithm: ring}]
    steps: 12
    """
)


TWO_NODES = SCENARIO.cluster.model_copy(update={"gpus_per_node": 1})


def renamed(plan: Plan, lane: Lane = EIGHTH) -> Plan:
    """Return the plan with another lane in place of the one for averages."""

    def moved(op: Op) -> Op:
        return replace(op, lane=lane) if isinstance(op, AllReduce) and op.lane == AVERAGE else op

    return replace(plan, bodies=tuple(tuple(map(moved, body)) for body in plan.bodies))


@pytest.fixture(scope="module")
def known():
    """A plan with the lane for averages, its prices and its delays."""
    built = building.build(SCENARIO, SCENARIO.schedules[0])
    return built.plan, built.costs, building.delays(SCENARIO), built.schedule


@pytest.fixture(scope="module")
def other(known):
    """The same with a lane of its own in place of it."""
    plan = renamed(known[0])
    costs = price(plan, SCENARIO.cluster, SCENARIO.workload)
    return plan, costs, known[2], known[3]


def traces_of(*runs, engine="fast"):
    return [simulate(plan, costs, delays, engine=engine) for plan, costs, delays, _ in runs]


def test_plan_lists_it_after_the_lanes_that_all_plans_have(known, other):
    assert known[0].lanes == LANES
    assert other[0].lanes == (*LANES, EIGHTH)
    assert other[0].streams[-1] == "eighth"
    check(other[0])


def test_file_keeps_it(other):
    assert loads(dumps(other[0])) == other[0]


def test_text_names_it(other):
    assert any("eighth   all_reduce" in body_text(body) for body in other[0].bodies)


def test_proof_is_the_same(known, other):
    job = building.job(SCENARIO)
    n_ranks = [prove(plan, lambda step: known[3].result(step, job)) for plan in (known[0], other[0])]
    assert n_ranks[0] == n_ranks[1]


@pytest.mark.parametrize("engine", ["fast", "des"])
def test_engines_give_the_same_times(known, other, engine):
    one, two = traces_of(known, other, engine=engine)
    np.testing.assert_array_equal(one.end_s, two.end_s)
    np.testing.assert_array_equal(one.ready_s, two.ready_s)


def test_prices_are_the_same(known, other):
    seconds = [sorted(str(cost) for cost in costs.of.values()) for _, costs, _, _ in (known, other)]
    assert seconds[0] == seconds[1]
    assert len(known[1].contested) == len(other[1].contested)


def test_breakdown_counts_it_as_communication(known, other):
    one, two = map(break_down, traces_of(known, other))
    assert two.comm_s.sum() > 0
    for state in ("compute_s", "comm_s", "wait_s", "io_s", "host_s"):
        np.testing.assert_array_equal(getattr(one, state), getattr(two, state))


def test_exposed_exchange_is_communication_and_no_time_of_the_host():
    """Two steps that compute nothing and average on the lane: each rank is in an exchange, or waits for the others."""
    step = (AllReduce("param", Group(4), lane=EIGHTH), Copy("param", "copy"))
    plan = plan_of(step, step, world_size=4, count=100_000)
    costs = price(plan, SCENARIO.cluster, SCENARIO.workload)
    found = break_down(simulate(plan, costs, {}, engine="des"))
    np.testing.assert_allclose(found.comm_s + found.compute_s, found.makespan_s + np.zeros((4, 1)), rtol=1e-12)
    assert found.comm_s.min() > 0.9 * found.makespan_s
    assert found.host_s.max() == 0


def test_waiting_replay_and_what_if_are_the_same(known, other):
    one, two = traces_of(known, other)
    for function in (lambda t: attribute_waiting(t).caused_s, lambda t: replayed(t)):
        np.testing.assert_array_equal(function(one), function(two))
    kinds = [[(kind.name, kind.channel) for kind in ideal(t.plan, replay.timing(t)).kinds] for t in (one, two)]
    assert kinds[0] == kinds[1]
    late = [
        measured_delays(t, replay.timing(t), costs) for t, costs in zip((one, two), (known[1], other[1]), strict=True)
    ]
    assert late[0].keys() == late[1].keys()
    for channel, seconds in late[0].items():
        np.testing.assert_array_equal(seconds, late[1][channel])


def replayed(trace):
    return replay.replayed_step_end_s(trace.plan, replay.timing(trace), n_variants=1)


def test_validation_shows_its_operations(known, other):
    for (plan, costs, delays, _), stream in ((known, "average"), (other, "eighth")):
        (trace,) = traces_of((plan, costs, delays, None))
        kinds = {(kind.op, kind.stream) for kind in validate(trace, trace, delays, costs).kinds}
        assert ("all_reduce", stream) in kinds


def test_limits_of_an_epoch_count_it(known, other):
    """The longest lane of communication is a limit: none has to wait for another one."""
    dataset = Dataset(192, batch_size=4, ranks_per_node=2, sample_nbytes=1, file_nbytes=(1,))
    one, two = (epoch_limits(replace(plan, dataset=dataset), costs) for plan, costs, _, _ in (known, other))
    assert [each.seconds for each in one] == [each.seconds for each in two]
    exchange_s = max(cost.alone_s for op, cost in other[1].of.items() if lane_of(op) == EIGHTH)
    assert one[0].seconds["communication"] >= 3 * exchange_s > 0


def test_pictures_have_a_row_for_it(known, other):
    one, two = traces_of(known, other)
    rows = rows_of_streams(other[0])
    np.testing.assert_array_equal(rows["eighth"], rows_of_streams(known[0])["average"])
    assert "eighth" in {text.get_text() for axes in timeline_figure(two).axes for text in axes.texts}
    threads = []
    for trace in (one, two):
        events = json.loads("".join(chrome_trace(trace)))["traceEvents"]
        names = {
            (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
        }
        assert len(names) == len({*names})
        threads.append(sorted(names[event["pid"], event["tid"]] for event in events if event["ph"] == "X"))
    assert threads[1] == sorted("eighth" if name == "average" else name for name in threads[0])


def test_many_lanes_have_threads_of_their_own_in_a_viewer():
    step = [AllReduce(f"param.{n}", Group(2), lane=Lane(f"own {n}", "comm", f"own {n}")) for n in range(8)]
    plan = plan_of(tuple(step), world_size=2)
    trace = simulate(plan, price(plan, TWO_NODES, SCENARIO.workload), {}, engine="des")
    events = json.loads("".join(chrome_trace(trace)))["traceEvents"]
    spans = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X" and event["cat"].startswith("own")}
    assert len(spans) == 2 * 8
    assert not {tid for _, tid in spans} & {pid for pid, _ in spans}


def test_chakra_trace_has_its_dependencies(known, other):
    one, two = (list(exported(*each).messages(rank=1)) for each in (known, other))
    for mine, its in zip(one[1:], two[1:], strict=True):
        assert (list(mine.data_deps), list(mine.ctrl_deps)) == (list(its.data_deps), list(its.ctrl_deps))


def exported(plan, costs, delays, _):
    return Export(plan, costs, SCENARIO.workload, delays, plan.n_steps)


@pytest.mark.parametrize("name", ["eighth", "compute"])
def test_an_actor_can_hold_it(other, name):
    def actor(_clock, cluster: LiveCluster):
        yield cluster.rank(1).hold(name, 1.0)

    plan, costs, delays, _ = other
    trace = simulate(plan, costs, delays, engine="des", actors=[actor])
    assert trace.end_s.max() > 1.0


def test_a_lane_that_is_not_in_the_plan_cannot_be_held(known):
    def actor(_clock, cluster: LiveCluster):
        yield cluster.rank(1).hold("eighth", 1.0)

    plan, costs, delays, _ = known
    with pytest.raises(Exception, match="lane 'eighth': there are host, compute, comm, io, save, average"):
        simulate(plan, costs, delays, engine="des", actors=[actor])


def test_pushes_and_pulls_are_shown_as_communication():
    assert {push_to(3).stream, pull_from(3).stream} == {"comm"}
    assert push_to(3) != pull_from(3)


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        (AllReduce("param", Group(2), lane=IO), "runs on the lane 'io' of kind io; it runs on one of kind comm"),
        (Copy("param", "copy", lane=IO), "runs on the lane 'io' of kind io; it runs on one of kind compute or comm"),
        (Copy("param", "copy", lane=Lane("two", "compute")), "a rank has one lane of kind compute"),
        (AllReduce("param", Group(2), lane=Lane("two", "comm")), "a lane of kind comm names a communicator"),
        (Copy("param", "copy", lane=Lane("comm", "comm", "own")), "two lanes are called 'comm'"),
    ],
)
def test_lane_that_does_not_fit_is_refused(op, problem):
    plan = plan_of((AllReduce("param", Group(2)), Copy("param", "copy"), op), world_size=2)
    with pytest.raises(PlanError, match=problem):
        check(plan)


@pytest.mark.parametrize("lane", LANES)
def test_lanes_of_simdist_are_told_apart_by_kind(lane):
    assert (lane.kind == "comm") == bool(lane.communicator)
    assert lane.stream == lane.name


def test_no_code_compares_the_name_of_a_lane():
    """By name, a lane that is not known is forgotten without an error."""
    root = Path(__file__).resolve().parents[3]
    wrong = []
    for path in (*root.glob("simdist/**/*.py"), *root.glob("real/**/*.py")):
        if "profiles" in path.parts:  # these streams are those of a GPU that was profiled
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if ".stream ==" in line or ".stream in (" in line or 'lane.name == "' in line:
                wrong.append(f"{path.relative_to(root)}:{number}")
    assert wrong == []
