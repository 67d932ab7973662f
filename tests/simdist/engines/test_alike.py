"""Ranks that are alike are simulated once: the times are those of all ranks one by one."""

from dataclasses import replace

import numpy as np
import pytest
from engine_runs import alike, des
from hypothesis import assume, given
from hypothesis import strategies as st
from priced_runs import runs
from tiers import examples
from timeouts import within_cpu_s

from simdist.cost import price
from simdist.cost.costs import Costs, Stage
from simdist.engines import alike as alike_engine
from simdist.engines import symmetry
from simdist.engines.symmetry import Symmetry
from simdist.errors import RunError, UnsupportedError
from simdist.plan import AllReduce, Buffer, Copy, Delay, Forward, Lane, Load, Plan, Save, Tick
from simdist.plan.delays import DrawnDelays
from simdist.plan.group import Group
from simdist.plan.lanes import COMM
from simdist.plan.plan import Run
from simdist.runs.building import build, delay_sampler, delays
from simdist.runs.memory import memory_of
from simdist.scenario import loads
from simdist.scenario.cluster import Cluster, Link, Storage
from simdist.scenario.workload import Tensor, Workload
from simdist.studies.comparison import compare
from simdist.traces.breakdown import STATES, Attribution, break_down

ARRAYS = ("ready_s", "start_s", "end_s")
LINE = Link(latency_s=1e-3, bandwidth_Bps=1e6)
WORKLOAD = Workload(tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=0.1, backward_s=0.2)

SHARDED = """
cluster:
  nodes: {nodes}
  gpus_per_node: {gpus}
  fabric: {{latency: 3 us, bandwidth: 200 GB/s}}
  network: {{latency: 10 us, bandwidth: {bandwidth}}}
  topology:
    oversubscription: {oversubscription}
workload:
  tensors: [{tensors}]
  batch_size: 1
  micro_batches: {micro_batches}
  forward: {forward_ms} ms
  backward: {backward_ms} ms
  optimize: 1 ms
disturbances: [{disturbance}]
schedules: [{schedule}]
steps: {steps}
seed: {seed}
"""
DISTURBANCES = (
    "",
    "{kind: transient, on: host, probability: 5%, delay: 20 ms}",
    "{kind: transient, probability: 10%, delay: 3 ms}",
    "{kind: persistent, ranks: [1], delay: 5 ms}",
    "{kind: jitter, on: host, median: 1 ms, sigma: 0.5}",
)


def same(trace, reference):
    for name in ARRAYS:
        np.testing.assert_allclose(
            getattr(trace, name), getattr(reference, name), rtol=1e-12, atol=1e-12 * reference.makespan_s
        )


@examples(250)
@given(runs())
def test_all_times_are_those_of_the_ranks_one_by_one(run):
    plan, costs, drawn = run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alike_engine, "_MOST_KINDS", 1.0)
        try:
            trace = alike.simulate(plan, costs, DrawnDelays(drawn))
        except UnsupportedError:
            assume(False)
    same(trace, des.simulate(plan, costs, drawn))


@st.composite
def sharded_jobs(draw):
    nodes = draw(st.sampled_from([2, 4, 8]))
    gpus = draw(st.sampled_from([2, 4]))
    n = nodes * gpus
    sizes = draw(st.lists(st.sampled_from([1, 3, 10]), min_size=2, max_size=4))
    shard = draw(st.sampled_from([size for size in (2, 4, 8, 16) if size <= n]))
    hierarchical = f"{{kind: hierarchical_sgd, levels: {{1: {gpus}, 2: {n}}}}}"
    schedule = draw(st.sampled_from([f"{{kind: hsdp, shard: {shard}}}", "fsdp", "sync", hierarchical]))
    return SHARDED.format(
        nodes=nodes,
        gpus=gpus,
        bandwidth=draw(st.sampled_from(["5 GB/s", "25 GB/s"])),
        oversubscription=draw(st.sampled_from([1, 3])),
        tensors=", ".join(f"{{name: layers.{number}.w, count: {size}000000}}" for number, size in enumerate(sizes)),
        micro_batches=draw(st.sampled_from([1, 2])) if "sgd" not in schedule else 1,
        forward_ms=draw(st.sampled_from([2, 10])),
        backward_ms=draw(st.sampled_from([4, 20])),
        disturbance=draw(st.sampled_from(DISTURBANCES)),
        schedule=schedule,
        steps=draw(st.sampled_from([2, 5])),
        seed=draw(st.integers(0, 1000)),
    )


@examples(60)
@given(sharded_jobs())
def test_sharded_jobs_take_the_times_of_the_ranks_one_by_one(text):
    scenario = loads(text)
    built = build(scenario, scenario.schedules[0])
    drawn = delays(scenario)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alike_engine, "_MOST_KINDS", 1.0)
        trace = alike.simulate(built.plan, built.costs, DrawnDelays(drawn))
    same(trace, des.simulate(built.plan, built.costs, drawn))


@examples(20)
@given(sharded_jobs())
def test_several_seeds_are_broken_down_like_their_traces(text):
    scenario = loads(text)
    built = build(scenario, scenario.schedules[0])
    seeds = [3, 4, 5]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alike_engine, "_MOST_KINDS", 1.0)
        measured = alike.measure(built.plan, built.costs, delay_sampler(scenario, seeds), n_seeds=len(seeds))
        step_s = alike.step_s(built.plan, built.costs, delay_sampler(scenario, seeds), n_seeds=len(seeds))
    np.testing.assert_allclose(step_s, measured.step_s, rtol=1e-12)
    for number, seed in enumerate(seeds):
        drawn = delay_sampler(scenario, [seed]).take(scenario.steps)
        expected = break_down(des.simulate(built.plan, built.costs, drawn))
        for state in STATES:
            np.testing.assert_allclose(
                getattr(measured, f"{state}_s")[:, number],
                getattr(expected, f"{state}_s")[:, 0],
                rtol=0,
                atol=1e-12 * float(expected.makespan_s[0]),
            )


def crossing(n_steps=1, delay="host"):
    """Return a plan in which pairs of neighbours and pairs across nodes average, and its prices: 2 nodes of 4."""
    buffers = (Buffer("near", 250, initialized=True), Buffer("far", 250, initialized=True))
    body = (Delay(delay), AllReduce("near", Group(4)), AllReduce("far", Group(2, stride=4)))
    plan = Plan.from_steps("crossing", world_size=8, buffers=buffers, steps=[body] * n_steps)
    return plan, price(plan, Cluster(nodes=2, gpus_per_node=4, fabric=LINE, network=LINE), WORKLOAD)


def test_a_straggler_makes_four_kinds_of_ranks():
    plan, costs = crossing()
    begins = np.zeros(8, dtype=np.int64)
    begins[1] = 1
    found = Symmetry(costs, plan.world_size).partition(begins)
    kinds = [sorted(np.flatnonzero(found.of_ranks == kind).tolist()) for kind in range(len(found.firsts))]
    assert sorted(kinds) == [[0, 2, 3], [1], [4, 6, 7], [5]]  # its node, itself, other nodes, its peer on them


def test_flows_that_share_a_link_are_one_flow_with_their_load():
    plan, costs = crossing()
    found = Symmetry(costs, plan.world_size).partition(np.zeros(8, dtype=np.int64))
    assert len(found.firsts) == 1
    ((stage,),) = found.meetings[id(costs.of[AllReduce("far", Group(2, stride=4))])].stages
    assert isinstance(stage, Stage)
    assert float(stage.nbytes.max()) == 1_000.0
    assert stage.together_nbytes.tolist() == [4_000.0] * len(stage.resources)  # 4 GPUs on the NIC of a node


def test_flows_of_groups_that_share_a_link_take_as_long_as_together():
    plan, costs = crossing()
    trace = alike.simulate(plan, costs, DrawnDelays({"host": np.zeros((1, 1, 8))}))
    same(trace, des.simulate(plan, costs, {"host": np.zeros((1, 1, 8))}))
    assert trace.end_s[2].max() == pytest.approx(trace.start_s[2].max() + 2e-3 + 4e-3)  # 4 x 1 kB at 1 MB/s


def test_groups_that_other_operations_have_are_told_apart():
    """A link that carries only operation a is not like a link that carries only operation b."""
    plan, costs = crossing(n_steps=2)
    shifted = {channel: np.array([[[0.0] * 8, [0.0, 0.5] + [0.0] * 6]]) for channel in ("host",)}
    same(alike.simulate(plan, costs, DrawnDelays(shifted)), des.simulate(plan, costs, shifted))


def test_a_kind_of_one_rank_is_not_taken_for_one_of_three():
    """In one seed three ranks save together and then one, in the other one first and then three."""
    buffers = (Buffer("copy", 750, initialized=True),)
    plan = Plan.from_steps("saving", world_size=4, buffers=buffers, steps=[(Delay("host"), Save(("copy",)))])
    cluster = Cluster(
        nodes=1,
        gpus_per_node=4,
        fabric=LINE,
        network=LINE,
        storage=Storage(latency_s=1e-3, bandwidth_Bps=1e6, client_bandwidth_Bps=3e5),
    )
    costs = price(plan, cluster, WORKLOAD)
    drawn = {"host": np.array([[[0.6, 0.3, 0.3, 0.3]], [[0.3, 0.6, 0.6, 0.6]]])}
    step_s = alike.step_s(plan, costs, DrawnDelays(drawn), n_seeds=2)
    assert step_s == pytest.approx([0.6 + 1e-3 + 0.01, 0.6 + 1e-3 + 0.03])


def counted_courses(monkeypatch):
    """Count the spans that are simulated."""
    courses = []
    run = alike_engine._Events.run

    def counting(events, *arguments):
        courses.append(events)
        return run(events, *arguments)

    monkeypatch.setattr(alike_engine._Events, "run", counting)
    return courses


def job(steps, disturbance="", *, schedule="{kind: hsdp, shard: 8}"):
    """Return a job on 4 nodes of 4."""
    return loads(
        SHARDED.format(
            nodes=4,
            gpus=4,
            bandwidth="5 GB/s",
            oversubscription=1,
            tensors=", ".join(f"{{name: layers.{number}.w, count: 10000000}}" for number in range(4)),
            micro_batches=1,
            forward_ms=2,
            backward_ms=4,
            disturbance=disturbance,
            schedule=schedule,
            steps=steps,
            seed=0,
        )
    )


def test_spans_that_recur_are_simulated_once(monkeypatch):
    courses = counted_courses(monkeypatch)
    scenario = job(50)
    built = build(scenario, scenario.schedules[0])
    alike.simulate(built.plan, built.costs, DrawnDelays({}))
    assert len(courses) <= 4  # the first steps differ from the others


def test_a_straggler_takes_the_same_course_on_any_rank(monkeypatch):
    courses = counted_courses(monkeypatch)
    scenario = job(64, DISTURBANCES[1])
    built = build(scenario, scenario.schedules[0])
    late_s = np.zeros((1, 64, 16))
    for rank in range(16):
        late_s[0, 1 + 4 * rank, rank] = 0.02
    trace = alike.simulate(built.plan, built.costs, DrawnDelays({"host": late_s}))
    same(trace, des.simulate(built.plan, built.costs, {"host": late_s}))
    assert len(courses) <= 12  # 4 x 16 steps, of which the last before the next straggler are alike


def saving(n_steps, every):
    """Return a plan whose checkpoints are still being written when the next step begins, over the NIC."""
    buffers = (Buffer("flat", 250, initialized=True), Buffer("copy", 2_000, initialized=True))
    step = (AllReduce("flat", Group(4)),)
    last = (*step, Save(("copy",)))
    steps = [last if number % every == 0 else step for number in range(n_steps)]
    plan = Plan.from_steps("saving", world_size=4, buffers=buffers, steps=steps)
    storage = Storage(latency_s=1e-3, bandwidth_Bps=2e6, client_bandwidth_Bps=1e6)
    cluster = Cluster(nodes=4, gpus_per_node=1, fabric=LINE, network=LINE, storage=storage)
    return plan, price(plan, cluster, WORKLOAD)


def test_transfers_that_go_on_in_the_next_step_are_simulated_with_it():
    plan, costs = saving(3, every=3)
    trace = alike.simulate(plan, costs, DrawnDelays({}))
    reference = des.simulate(plan, costs, {})
    assert reference.end_s[1].max() > reference.start_s[2].max()  # they do meet
    same(trace, reference)


def test_transfers_that_never_end_with_a_step_are_simulated_in_one_span():
    plan, costs = saving(60, every=1)
    trace = alike.simulate(plan, costs, DrawnDelays({}))
    reference = des.simulate(plan, costs, {})
    assert reference.end_s[-1].max() - reference.end_s[-2].max() > 10e-3  # saves come late, and later and later
    same(trace, reference)


def test_a_span_of_too_many_instances_is_refused(monkeypatch):
    monkeypatch.setattr(alike_engine, "_MOST_INSTANCES", 20)
    plan, costs = saving(60, every=1)
    with pytest.raises(UnsupportedError, match="transfers go on from step to step"):
        alike.simulate(plan, costs, DrawnDelays({}))


def test_transfers_that_outlast_a_step_without_any_are_refused():
    """A load of step 0 and a save of step 2 share the storage server. Step 1 has no transfer."""
    buffers = (Buffer("batch", 4_096, dtype="uint8", place="host"), Buffer("copy", 1, initialized=True))
    plan = Plan.from_steps("apart", world_size=2, buffers=buffers, steps=[(Load("batch"),), (), (Save(("copy",)),)])
    plan = replace(plan, order=tuple(Run((body,)) for body in range(3)))
    storage = Storage(latency_s=1e-3, bandwidth_Bps=1e6, client_bandwidth_Bps=3e5)
    cluster = Cluster(nodes=2, gpus_per_node=1, fabric=LINE, network=LINE, storage=storage)
    with pytest.raises(UnsupportedError, match="still run when a later step begins"):
        alike.simulate(plan, price(plan, cluster, WORKLOAD), DrawnDelays({}))


def test_ranks_that_all_differ_are_refused():
    plan, costs = crossing()
    with pytest.raises(UnsupportedError, match="8 of 8 ranks are like no other"):
        alike.simulate(plan, costs, DrawnDelays({"host": np.arange(8.0).reshape(1, 1, 8)}))


def test_ranks_that_all_differ_in_a_later_step_are_refused_if_they_are_many(monkeypatch):
    plan, costs = crossing(n_steps=2)
    late_s = np.zeros((1, 2, 8))
    late_s[0, 1] = np.arange(8.0)
    same(alike.simulate(plan, costs, DrawnDelays({"host": late_s})), des.simulate(plan, costs, {"host": late_s}))
    monkeypatch.setattr(alike_engine, "_MOST_LATER", 4)
    with pytest.raises(UnsupportedError, match="8 of 8 ranks are like no other"):
        alike.simulate(plan, costs, DrawnDelays({"host": late_s}))


def test_groups_that_share_no_link_may_be_in_different_steps(monkeypatch):
    """A shard with a straggler falls behind the others until they average."""
    courses = counted_courses(monkeypatch)
    scenario = job(48, DISTURBANCES[3], schedule="{kind: hsdp, shard: 8, between: {kind: local_sgd, period: 16}}")
    built = build(scenario, scenario.schedules[0])
    drawn = delays(scenario)
    trace = alike.simulate(built.plan, built.costs, DrawnDelays(drawn))
    reference = des.simulate(built.plan, built.costs, drawn)
    last = built.plan.first_instances()[14]
    assert reference.start_s[last].max() > reference.end_s[last + 1].min() + 0.05  # far behind
    assert sum(len(each.ends) for each in courses) < built.plan.n_instances  # as far apart in each period
    same(trace, reference)


def test_a_link_is_busy_until_the_last_of_several_transfers_has_ended():
    """`near` ends, then `far`, then a second `near`, under which `far` of the next step begins on the same links."""
    buffers = (Buffer("near", 62_500, initialized=True), Buffer("far", 70_000, initialized=True))
    near = AllReduce("near", Group(4))
    far = AllReduce("far", Group(4), lane=Lane("replicate", "comm", "replicate"))
    steps = [(Delay("host"), near, far, near)] * 2
    plan = Plan.from_steps("overlapping", world_size=4, buffers=buffers, steps=steps)
    costs = price(plan, Cluster(nodes=4, gpus_per_node=1, fabric=LINE, network=LINE), WORKLOAD)
    late_s = np.broadcast_to(np.array([0.6, 0.9])[None, :, None], (1, 2, 4))
    reference = des.simulate(plan, costs, {"host": late_s})
    assert reference.end_s[1].max() < reference.end_s[2].max() < reference.start_s[6].min() < reference.end_s[3].max()
    same(alike.simulate(plan, costs, DrawnDelays({"host": late_s})), reference)


def counted_instances(monkeypatch):
    """Count the instances that a breakdown takes one by one."""
    counted = []
    add = Attribution.add

    def counting(attribution, index, *arguments):
        counted.append(index)
        add(attribution, index, *arguments)

    monkeypatch.setattr(Attribution, "add", counting)
    return counted


@pytest.mark.parametrize(
    "schedule", ["{kind: hsdp, shard: 8}", "{kind: hsdp, shard: 8, between: {kind: local_sgd, period: 4}}", "sync"]
)
@pytest.mark.parametrize("disturbance", [DISTURBANCES[0], DISTURBANCES[3], DISTURBANCES[1].replace("5%", "1%")])
def test_steps_that_recur_add_as_much_to_a_breakdown_as_one_by_one(monkeypatch, schedule, disturbance):
    scenario = job(64, disturbance, schedule=schedule)
    built = build(scenario, scenario.schedules[0])
    drawn = delays(scenario)
    expected = break_down(des.simulate(built.plan, built.costs, drawn))
    counted = counted_instances(monkeypatch)
    found = alike.measure(built.plan, built.costs, DrawnDelays(drawn), n_seeds=1)
    assert len(counted) < 0.8 * built.plan.n_instances
    for name in ("makespan_s", *(f"{state}_s" for state in STATES)):
        atol = 1e-12 * float(expected.makespan_s[0])
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=0, atol=atol)


@pytest.mark.parametrize("disturbance", [DISTURBANCES[3], DISTURBANCES[1].replace("5%", "1%")])
def test_ranks_that_were_alike_so_far_have_one_row_of_a_breakdown(monkeypatch, disturbance):
    """Ranks part when a straggler comes. Before, they have one row, and the breakdown is the same to the last bit."""
    scenario = job(64, disturbance, schedule="{kind: hsdp, shard: 8}")
    built = build(scenario, scenario.schedules[0])
    drawn = DrawnDelays(delay_sampler(scenario, [1, 2]).take(scenario.steps))
    expected = alike.measure(built.plan, built.costs, drawn, n_seeds=2)
    monkeypatch.setattr("simdist.engines.alike._FEW_RANKS", 0)
    n_rows = []
    split = Attribution.split
    monkeypatch.setattr(Attribution, "split", lambda self, rows: (n_rows.append(len(rows)), split(self, rows))[1])
    again = DrawnDelays(delay_sampler(scenario, [1, 2]).take(scenario.steps))
    found = alike.measure(built.plan, built.costs, again, n_seeds=2)
    assert n_rows
    assert n_rows[0] < built.plan.world_size
    for name in ("makespan_s", *(f"{state}_s" for state in STATES)):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_a_step_that_recurs_after_a_longer_one_begins_later():
    """All numbers are sums of powers of two, so the step after the delay is like the others to the last bit."""
    line = Link(latency_s=2**-10, bandwidth_Bps=2**20)
    buffers = (Buffer("near", 256, initialized=True), Buffer("far", 256, initialized=True))
    body = (Delay("host"), AllReduce("near", Group(4)), AllReduce("far", Group(2, stride=4)))
    plan = Plan.from_steps("crossing", world_size=8, buffers=buffers, steps=[body] * 12)
    costs = price(plan, Cluster(nodes=2, gpus_per_node=4, fabric=line, network=line), WORKLOAD)
    late_s = np.full((1, 12, 8), 0.25)
    late_s[0, 5] = 2.0
    expected = break_down(des.simulate(plan, costs, {"host": late_s}))
    found = alike.measure(plan, costs, DrawnDelays({"host": late_s}), n_seeds=1)
    assert found.makespan_s.tolist() == expected.makespan_s.tolist()
    np.testing.assert_array_equal(found.comm_s, expected.comm_s)


def test_plans_with_the_same_prices_share_courses(monkeypatch):
    scenario = job(8)
    built = build(scenario, scenario.schedules[0])
    expected_s = alike.step_s(built.plan, built.costs, DrawnDelays({}), n_seeds=1)
    memory_of(scenario, built)
    courses = counted_courses(monkeypatch)
    step_s = alike.step_s(built.plan, built.costs, DrawnDelays({}), n_seeds=1, courses=built.courses)
    assert len(courses) <= 1  # two steps are known
    assert step_s.tolist() == expected_s.tolist()


def test_partitions_that_are_forgotten_give_the_same_times(monkeypatch):
    monkeypatch.setattr(symmetry, "_MOST_KNOWN", 2)
    plan, costs = crossing(n_steps=12)
    late_s = np.zeros((1, 12, 8))
    for step in range(12):
        late_s[0, step, : step % 5] = 0.1 * step
    found = Symmetry(costs, plan.world_size)
    for row in late_s[0]:
        found.partition(np.unique(row, return_inverse=True)[1])
        assert max(len(found._forms), len(found._known)) <= 2
    same(alike.simulate(plan, costs, DrawnDelays({"host": late_s})), des.simulate(plan, costs, {"host": late_s}))


def test_transfers_that_never_end_are_named(monkeypatch):
    plan, costs = crossing()
    monkeypatch.setattr(alike_engine, "TOGETHER", -1e-3)  # then not even the transfer that is due first is due
    text = r"nothing can happen any more at [\d.]+ s: all_reduce\(far.* still has .* bytes at .* B/s"
    with within_cpu_s(10.0), pytest.raises(RunError, match=text):
        alike.simulate(plan, costs, DrawnDelays({"host": np.zeros((1, 1, 8))}))


def test_links_that_differ_are_refused():
    plan, costs = crossing()
    slow = Costs(costs.resources, costs.capacity_Bps, costs.of, costs.contested, shares={0: 0.5})
    with pytest.raises(UnsupportedError, match="links differ from others"):
        alike.simulate(plan, slow, DrawnDelays({"host": np.zeros((1, 1, 8))}))


def test_a_comparison_takes_one_rank_of_each_kind_and_gives_the_same_answer(monkeypatch):
    scenario = job(5, DISTURBANCES[2].replace("10%", "2%"))
    by_events = compare(scenario, n_seeds=4, engine="des", baseline="hsdp-8")
    courses = counted_courses(monkeypatch)
    (row,) = compare(scenario, n_seeds=4, baseline="hsdp-8")
    assert courses
    assert row.engine == "des"
    assert row.step_s == pytest.approx(by_events[0].step_s, rel=1e-12)
    assert row.wait_s == pytest.approx(by_events[0].wait_s, rel=1e-9)


# ---------------------------------------------------------------- what kinds of ranks, groups and links are told by

REPLICATE = Lane("replicate", "comm", "replicate")


def by_both(plan, costs, late_s=None):
    """Simulate by kinds, compare with the ranks one by one, and return the latter's trace."""
    drawn = {} if late_s is None else {"host": np.array(late_s)}
    reference = des.simulate(plan, costs, drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alike_engine, "_MOST_KINDS", 1.0)
        same(alike.simulate(plan, costs, DrawnDelays(drawn)), reference)
    return reference


@pytest.mark.parametrize("lanes", [(COMM,), (COMM, REPLICATE)], ids=["alone", "shared"])
def test_pairs_within_and_between_nodes_are_told_apart_by_their_links(lanes):
    """Of three GPUs a node, (0, 1) and (4, 5) average over the fabric, and (2, 3) over a network ten times slower.

    The slow pair is late in one seed, and the fast ones in the next: kinds in the same order, with other links.
    """
    averages = [AllReduce(f"flat.{number}", Group(2), lane=lane) for number, lane in enumerate(lanes)]
    buffers = tuple(Buffer(each.buffer, 250, initialized=True) for each in averages)
    plan = Plan.from_steps("pairs", world_size=6, buffers=buffers, steps=[(Delay("host"), *averages)])
    fabric = Link(latency_s=1e-3, bandwidth_Bps=1e7)
    costs = price(plan, Cluster(nodes=2, gpus_per_node=3, fabric=fabric, network=LINE), WORKLOAD)
    assert bool(costs.contested) == (len(lanes) > 1)
    late_s = np.array([[[float(rank in late) for rank in range(6)]] for late in ((2, 3), (0, 1, 4, 5))])
    found_s = alike.step_s(plan, costs, DrawnDelays({"host": late_s}), n_seeds=2)
    expected_s = [des.simulate(plan, costs, {"host": each[np.newaxis]}).makespan_s for each in late_s]
    assert found_s == pytest.approx(expected_s, rel=1e-12)
    assert expected_s[0] - 1 > 1.4 * (expected_s[1] - 1)  # the slow pair takes longer


def test_groups_on_links_that_others_use_are_not_like_groups_on_their_own():
    """Neighbours average in pairs, one of them over the NICs. So do pairs across nodes, on another lane, over these."""
    buffers = (Buffer("near", 250, initialized=True), Buffer("far", 250, initialized=True))
    averages = (AllReduce("near", Group(2)), AllReduce("far", Group(2, stride=3), lane=REPLICATE))
    plan = Plan.from_steps("beside", world_size=6, buffers=buffers, steps=[averages])
    costs = price(plan, Cluster(nodes=2, gpus_per_node=3, fabric=LINE, network=LINE), WORKLOAD)
    took_s = (by_both(plan, costs).end_s[0]).tolist()
    assert took_s[2] > 1.4 * took_s[0]


def test_stages_of_a_transfer_flow_at_rates_of_their_own():
    buffers = (Buffer("far", 2_000, initialized=True),)
    body = tuple(AllReduce("far", Group(8), algorithm="hierarchical", lane=lane) for lane in (COMM, REPLICATE))
    plan = Plan.from_steps("stages", world_size=8, buffers=buffers, steps=[body])
    fabric = Link(latency_s=1e-3, bandwidth_Bps=1e7)
    by_both(plan, price(plan, Cluster(nodes=2, gpus_per_node=4, fabric=fabric, network=LINE), WORKLOAD))


def test_ranks_of_another_speed_are_not_those_that_come_first():
    scenario = job(2, schedule="fsdp")
    slow = {"slow_devices": [{"ranks": [5], "speed": 0.5}]}
    document = scenario.model_dump(exclude_unset=True)
    built = build(
        scenario.model_copy(update={"cluster": scenario.cluster.model_validate(document["cluster"] | slow)}),
        scenario.schedules[0],
    )
    by_both(built.plan, built.costs)


def test_the_first_rank_has_the_times_of_its_kind():
    plan, costs = crossing()
    for late in range(8):
        late_s = {"host": np.eye(8)[[late]][np.newaxis]}
        reference = des.simulate(plan, costs, late_s)
        found = alike.times_of_first_rank(plan, costs, DrawnDelays(late_s))
        for its, expected in zip(found, (reference.start_s, reference.end_s), strict=True):
            np.testing.assert_allclose(its, expected[:, 0], rtol=1e-12)


# ---------------------------------------------------------------- from step to step


def test_a_stream_that_is_busy_goes_on_when_it_is_free():
    """The average ends at 5 ms, and the forward pass of 100 ms before what reads it."""
    buffers = (
        Buffer("far", 250, initialized=True),
        Buffer("copy", 250),
        Buffer("param", 1, tensors=(0, 1), initialized=True),
        Buffer("loss", 1),
    )
    body = (AllReduce("far", Group(2, stride=4)), Forward(("param",), ("loss",)), Copy("far", "copy"))
    plan = Plan.from_steps("busy", world_size=8, buffers=buffers, steps=[body])
    reference = by_both(plan, price(plan, Cluster(nodes=2, gpus_per_node=4, fabric=LINE, network=LINE), WORKLOAD))
    assert reference.end_s[0].max() < reference.ready_s[2].min() == 0.1


@pytest.mark.parametrize("schedule", ["{kind: local_sgd, period: 4, overlap_steps: 3}", "{kind: diloco, period: 3}"])
def test_steps_that_wait_for_one_some_steps_before_take_the_times_of_the_ranks_one_by_one(schedule):
    scenario = job(13, DISTURBANCES[3], schedule=schedule)
    built = build(scenario, scenario.schedules[0])
    told = []
    trace = alike.simulate(built.plan, built.costs, DrawnDelays(delays(scenario)), progress=told.append)
    same(trace, des.simulate(built.plan, built.costs, delays(scenario)))
    assert told == list(range(1, 14))


def test_a_run_ends_with_the_last_transfer_of_any_step():
    """A save of 100 kB takes 100 ms, and the steps after it no time."""
    buffers = (Buffer("copy", 25_000, initialized=True),)
    tick = Tick(("copy",), 1e-3)  # with one, times count from the beginning of the run
    steps = [(Save(("copy",)), tick), *[(Delay("host"), tick)] * 3]
    plan = Plan.from_steps("saving", world_size=2, buffers=buffers, steps=steps)
    storage = Storage(latency_s=1e-3, bandwidth_Bps=2e6, client_bandwidth_Bps=1e6)
    costs = price(plan, Cluster(nodes=2, gpus_per_node=1, fabric=LINE, network=LINE, storage=storage), WORKLOAD)
    late_s = {"host": np.full((1, 4, 2), 1e-3)}
    (step_s,) = alike.step_s(plan, costs, DrawnDelays(late_s), n_seeds=1)
    assert 4 * step_s == pytest.approx(des.simulate(plan, costs, late_s).makespan_s, rel=1e-12)
    assert 4 * step_s > 0.1


def test_steps_after_as_many_as_are_joined_are_apart_again(monkeypatch):
    """A save goes on in the next step only. The step after that begins late."""
    monkeypatch.setattr(alike_engine, "_MOST_JOINED", 2)
    buffers = (Buffer("flat", 250, initialized=True), Buffer("copy", 1_700, initialized=True))
    late, average = Delay("host"), AllReduce("flat", Group(4))
    steps = [(late, average, Save(("copy",))), *[(late, average)] * 3]
    plan = Plan.from_steps("saving", world_size=4, buffers=buffers, steps=steps)
    storage = Storage(latency_s=1e-3, bandwidth_Bps=2e6, client_bandwidth_Bps=1e6)
    cluster = Cluster(nodes=4, gpus_per_node=1, fabric=LINE, network=LINE, storage=storage)
    late_s = np.zeros((1, 4, 4))
    late_s[0, 2:] = 0.1
    reference = by_both(plan, price(plan, cluster, WORKLOAD), late_s)
    assert reference.start_s[4].max() < reference.end_s[2].max() < reference.start_s[6].min()


def test_what_is_known_of_a_step_depends_on_the_links_that_are_busy():
    """Averages over NICs and within nodes take 6/1024 s each, in turns, and a step of nothing follows each of them.

    Others want the NICs before the last one has ended. All numbers are sums of powers of two.
    """
    line = Link(latency_s=2**-10, bandwidth_Bps=2**20)
    sizes = {"near": 1_024, "far": 256, "late": 256}
    buffers = tuple(Buffer(name, count, initialized=True) for name, count in sizes.items())
    far, near = AllReduce("far", Group(2, stride=4)), AllReduce("near", Group(2))
    again = AllReduce("late", Group(2, stride=4), lane=REPLICATE)
    steps = [*[(far,), (), (near,), ()] * 2, (far,), (), (Delay("host"), again)]
    plan = Plan.from_steps("idle", world_size=8, buffers=buffers, steps=steps)
    plan = replace(plan, order=tuple(Run((body,)) for body in plan.body_of_steps()))
    costs = price(plan, Cluster(nodes=2, gpus_per_node=4, fabric=line, network=line), WORKLOAD)
    early_s = {"host": np.full((1, len(steps), 8), 4.5 * 6 * 2**-10)}
    assert des.simulate(plan, costs, early_s).end_s[:2, 0].tolist() == [6 * 2**-10, 12 * 2**-10]
    with pytest.raises(UnsupportedError, match="still run when a later step begins"):
        alike.simulate(plan, costs, DrawnDelays(early_s))
