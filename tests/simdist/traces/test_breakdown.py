"""Where the time went: exact numbers of hand-made traces, and an independent count over random ones."""

import itertools

import drawn_plans
import numpy as np
import pytest
from engine_runs import des, fast
from hypothesis import given
from hypothesis import strategies as st
from priced_runs import WITHOUT_STORAGE, delays_of, runs, sharing
from tiers import examples

from simdist import scenario
from simdist.cost import price
from simdist.plan import AllReduce, Backward, Buffer, Copy, Forward, Load, Plan, Wait
from simdist.plan.group import Group
from simdist.plan.lanes import COMM, COMPUTE
from simdist.plan.walk import Template, walk
from simdist.runs.building import build, delay_sampler, delays
from simdist.scenario.cluster import Cluster, Disk, Link, Storage
from simdist.scenario.workload import Tensor, Workload
from simdist.traces.breakdown import Attribution, break_down
from simdist.traces.trace import Trace

STATES = ("compute_s", "comm_s", "wait_s", "io_s", "host_s")


def counted(trace):
    """Return seconds per state and rank `[5, world_size]`, by asking in every elementary interval what a rank does."""
    totals = np.zeros((len(STATES), trace.plan.world_size))
    kinds = np.array([instance.lane.kind for instance in walk(trace.plan)])
    for rank in range(trace.plan.world_size):
        ready_s, start_s, end_s = (array[:, rank] for array in (trace.ready_s, trace.start_s, trace.end_s))
        borders = np.unique(np.concatenate([[0.0, trace.makespan_s], ready_s, start_s, end_s]))
        rank_end_s = end_s.max()
        for low_s, high_s in itertools.pairwise(borders):
            middle_s = (low_s + high_s) / 2
            runs_now = (start_s < middle_s) & (middle_s < end_s)
            is_open = (ready_s < middle_s) & (middle_s < end_s) & (kinds == "comm")
            first = np.argmax(is_open)  # of those beside each other
            if (runs_now & (kinds == "compute")).any():
                state = "compute_s"
            elif is_open.any() and runs_now[first]:
                state = "comm_s"
            elif is_open.any() or middle_s > rank_end_s:
                state = "wait_s"
            elif (runs_now & np.isin(kinds, ["io", "save"])).any():
                state = "io_s"
            else:
                state = "host_s"
            totals[STATES.index(state), rank] += high_s - low_s
    return totals


def states(trace):
    found = break_down(trace)
    return np.stack([getattr(found, name)[:, 0] for name in STATES])


@examples(100)
@given(runs().filter(lambda run: run[0].n_instances))
def test_states_add_up_to_the_makespan_on_every_rank(run):
    trace = des.simulate(*run)
    found = break_down(trace)
    assert found.makespan_s.tolist() == [trace.makespan_s]
    np.testing.assert_allclose(states(trace).sum(axis=0), trace.makespan_s, rtol=1e-12, atol=1e-15)
    assert (states(trace) >= 0).all()
    assert sum(found.per_step_s(name.removesuffix("_s"))[0] for name in STATES) == pytest.approx(found.step_s[0])


@examples(150)
@given(runs(op_kinds=WITHOUT_STORAGE).filter(lambda run: run[0].n_instances))
def test_states_are_those_of_every_moment(run):
    trace = des.simulate(*run)
    atol_s = 1e-12 * max(1.0, trace.makespan_s)  # the borders of moments are rounded
    np.testing.assert_allclose(states(trace), counted(trace), rtol=1e-9, atol=atol_s)


@examples(60)
@given(st.data())
def test_states_of_schedules_are_those_of_every_moment(data):
    plan = data.draw(drawn_plans.schedule_plans())
    storage = Storage(latency_s=1e-3, bandwidth_Bps=1e6)
    line = Link(latency_s=1e-5, bandwidth_Bps=1e8)
    tensors = tuple(Tensor(name=str(number), count=1) for number in range(drawn_plans.N_TENSORS))
    workload = Workload(tensors=tensors, batch_size=1, forward_s=0.02, backward_s=0.03, optimize_s=0.001)
    cluster = Cluster(
        nodes=2, gpus_per_node=4, fabric=line, network=line, storage=storage, disk=Disk(read_Bps=1e6, write_Bps=5e5)
    )
    trace = des.simulate(plan, price(plan, cluster, workload), data.draw(delays_of(plan)))
    np.testing.assert_allclose(states(trace), counted(trace), rtol=1e-9, atol=1e-12)


def test_gather_of_the_next_step_beside_a_wait_for_a_checkpoint_is_communication():
    """The copy of a checkpoint waits until the one before it is written. The first gather of the next step does not."""
    chosen = scenario.loads(
        "cluster: {preset: ideal, nodes: 1, fabric: {latency: 10 us, bandwidth: 1 GB/s}, "
        "storage: {latency: 1 ms, bandwidth: 100 MB/s}}\n"
        "workload: {preset: resnet18, forward: 20 ms, backward: 35 ms}\n"
        "checkpoint: {every: 1, what: parameters, mode: async}\n"
        "schedules: [{kind: fsdp}]\nsteps: 4\n"
    )
    built = build(chosen, chosen.schedules[0])
    drawn = delays(chosen)
    trace = des.simulate(built.plan, built.costs, drawn)
    found = states(trace)
    np.testing.assert_allclose(found, counted(trace), rtol=1e-12, atol=1e-12)
    measured = fast.measure(built.plan, built.costs, delay_sampler(chosen, [0]), n_seeds=1)
    np.testing.assert_allclose([getattr(measured, name)[:, 0] for name in STATES], found, rtol=1e-12, atol=1e-12)


BUFFERS = (
    Buffer("param", 1, tensors=(0, 1), initialized=True),
    Buffer("grad", 1, tensors=(0, 1)),
    Buffer("other", 1, tensors=(0, 1)),
    Buffer("loss", 1),
    Buffer("batch", 1, "uint8", place="host"),
    Buffer("input", 1, "uint8"),
)
WORLD = Group(2)


def trace_of(body, *times):
    """Return a trace of one step: a line per operation, `(ready, start, end)` per rank."""
    plan = Plan.from_steps("made", world_size=2, buffers=BUFFERS, steps=[body])
    array = np.array(times, dtype=np.float64)
    return Trace(plan, array[:, :, 0].copy(), array[:, :, 1].copy(), array[:, :, 2].copy(), source="made by hand")


def test_exposed_communication_and_waiting_are_told_apart():
    """
    rank 0   FFBBB....AA       rank 1   FF    BBB AA (late by 4 s, its host asleep)
    """
    trace = trace_of(
        (Forward(("param",), ("loss",)), Backward(("param",), "grad"), AllReduce("grad", WORLD)),
        [(0, 0, 2), (0, 0, 2)],
        [(2, 2, 5), (6, 6, 9)],
        [(5, 9, 11), (9, 9, 11)],
    )
    assert states(trace).tolist() == [[5, 5], [2, 2], [4, 0], [0, 0], [0, 4]]


def test_communication_behind_compute_costs_nothing():
    """Of the 4 s of the all-reduce, 3 are hidden behind the second backward pass."""
    ops = (Backward(("param",), "grad"), AllReduce("grad", WORLD), Backward(("param",), "other"))
    trace = trace_of(
        (*ops, Copy("grad", "other")),
        [(0, 0, 1), (0, 0, 1)],
        [(1, 1, 5), (1, 1, 5)],
        [(1, 1, 4), (1, 1, 4)],
        [(5, 5, 6), (5, 5, 6)],
    )
    assert states(trace).tolist() == [[5, 5], [1, 1], [0, 0], [0, 0], [0, 0]]


def test_communication_counts_before_a_load_and_a_load_before_the_host():
    """
    Until 1 s nothing, then a load to 4 s; an all-reduce from 2 to 3 s (rank 1 is ready at 1.5 s); compute from 5 s.
    """
    trace = trace_of(
        (Load("batch"), AllReduce("param", WORLD), Copy("batch", "input")),
        [(1, 1, 4), (1, 1, 4)],
        [(2, 2, 3), (1.5, 2, 3)],
        [(5, 5, 6), (5, 5, 6)],
    )
    assert states(trace).tolist() == [[1, 1], [1, 1], [0, 0.5], [2, 1.5], [2, 2]]


def test_rounding_leaves_no_load_behind_collectives_shorter_than_nothing():
    """A load until 1.1 s is hidden behind three all-reduces: 1.1 - 0.1 - (0.2 - 0.1) - (1.1 - 0.2) is below 0."""
    times = [(0, 0, 1.1)], [(0, 0, 0.1)], [(0.1, 0.1, 0.2)], [(0.2, 0.2, 1.1)]
    trace = trace_of((Load("batch"), *[AllReduce("param", WORLD)] * 3), *(each * 2 for each in times))
    assert states(trace)[3].tolist() == [0, 0]


def test_rounding_leaves_no_computing_shorter_than_nothing():
    """Forward passes that take no time, behind gaps of 0.1, 0.3 - 0.1 and 0.9 - 0.3 s: these are more than 0.9 s."""
    trace = trace_of((Forward(("param",), ("loss",)),) * 3, *([(at_s,) * 3] * 2 for at_s in (0.1, 0.3, 0.9)))
    assert states(trace)[0].tolist() == [0, 0]


def test_rank_that_is_done_waits_for_the_last_one():
    trace = trace_of((Forward(("param",), ("loss",)), Wait("loss")), [(0, 0, 2), (0, 0, 5)], [(2, 2, 2), (5, 5, 5)])
    assert states(trace).tolist() == [[2, 5], [0, 0], [3, 0], [0, 0], [0, 0]]
    assert break_down(trace).step_s.tolist() == [5]
    assert break_down(trace).per_step_s("wait").tolist() == [1.5]


def test_injected_slow_gpu_counts_as_compute_and_sleeping_host_as_host():
    chosen = scenario.loads(
        "cluster: {preset: ideal, nodes: 1}\nworkload: {preset: resnet18, forward: 1 s, backward: 2 s, optimize: 0 s}\n"
        "steps: 3\nschedules: [{kind: sync}]\n"
        "disturbances:\n"
        "  - {kind: persistent, delay: 0.5 s, ranks: [1], on: compute}\n"
        "  - {kind: persistent, delay: 4 s, ranks: [2], on: host}\n"
    )
    built = build(chosen, chosen.schedules[0])
    found = break_down(fast.simulate(built.plan, built.costs, delays(chosen)))
    assert found.compute_s[:, 0].tolist() == pytest.approx([9, 10.5, 9, 9])
    assert found.host_s[:, 0].tolist() == pytest.approx([0, 0, 12, 0])
    assert found.wait_s[:, 0].tolist() == pytest.approx([12, 10.5, 0, 12])


@pytest.mark.parametrize(
    ("cluster", "source", "disturbance"),
    [
        ("gcp-t4x4-32gbit", "device", "{kind: jitter, median: 5 ms, sigma: 1}"),
        ("gcp-t4x4-32gbit", "memory", "{kind: exponential, mean: 5 ms, on: compute}"),
        ("ideal", "storage", ""),  # readers start together, and have the network alone: the fast engine can do it
    ],
)
@pytest.mark.parametrize("kind", ["sync", "local_sgd, period: 2", "hierarchical_sgd, levels: {1: 2, 2: 8}"])
def test_measuring_many_seeds_gives_the_breakdown_of_each_trace(kind, cluster, source, disturbance):
    storage = ", storage: {latency: 1 ms, bandwidth: 4 GB/s}" if source == "storage" else ""
    chosen = scenario.loads(
        f"cluster: {{preset: {cluster}, nodes: 2{storage}}}\n"
        "workload: {preset: resnet18, forward: 20 ms, backward: 35 ms, sample_size: 1 MB}\n"
        "steps: 6\nhost: {run_ahead_steps: 1}\n"
        f"input: {{source: {source}}}\n"
        f"disturbances: [{disturbance}]\n"
        f"schedules: [{{kind: {kind}}}]\n"
    )
    built = build(chosen, chosen.schedules[0])
    measured = fast.measure(built.plan, built.costs, delay_sampler(chosen, [5, 6, 7]), n_seeds=3)
    for number, seed in enumerate((5, 6, 7)):
        one = delays(chosen.model_copy(update={"seed": seed}))
        expected = break_down(fast.simulate(built.plan, built.costs, one))
        for name in STATES:
            np.testing.assert_array_equal(getattr(measured, name)[:, number], getattr(expected, name)[:, 0])


def test_breakdown_reads_traces_of_shared_links():
    np.testing.assert_allclose(states(des.simulate(*sharing())), counted(des.simulate(*sharing())), atol=1e-15)


@pytest.mark.parametrize("seeds", [range(1), range(5)])
def test_gaps_are_added_in_the_same_order_in_batches_and_one_by_one(seeds, monkeypatch):
    chosen = scenario.loads(
        "cluster: {preset: gcp-t4x4-32gbit, nodes: 2}\n"
        "workload: {preset: resnet18, forward: 20 ms, backward: 35 ms}\n"
        "disturbances: [{kind: exponential, mean: 5 ms}]\n"
        "schedules: [{kind: hierarchical_sgd, levels: {2: 4, 4: 8}}]\n"
        "steps: 40\n"
    )
    built = build(chosen, chosen.schedules[0])

    def found(small, batch_values):
        monkeypatch.setattr("simdist.traces.breakdown._SMALL", small)
        monkeypatch.setattr("simdist.traces.breakdown._BATCH_VALUES", batch_values)
        states = fast.measure(built.plan, built.costs, delay_sampler(chosen, seeds), n_seeds=len(seeds))
        return np.array([getattr(states, name) for name in STATES])

    one_by_one = found(0, 1)
    for batch_values in (64, 500, 10**6):
        np.testing.assert_array_equal(found(1000, batch_values), one_by_one)


def test_a_step_that_recurs_counts_by_what_came_before_it():
    """Between some steps the rank does nothing for longer, which is not part of the steps themselves."""
    op = Backward(("param",), "grad")
    reduced = Template(0, 1, AllReduce("grad", Group(2)), COMM, None, (1,))
    computed = Template(0, 0, op, COMPUTE, None, (1,))
    begins_s = [0.0, 4.0, 8.0, 12.0, 19.0, 23.0, 30.0, 34.0]

    def add(attribution, begin_s, index):
        compute_s = (np.full((1, 1), begin_s + each) for each in (0.0, 0.0, 1.0))
        reduce_s = (np.full((1, 1), begin_s + each) for each in (1.0, 1.5, 3.5))
        attribution.add(index, computed, *compute_s)
        attribution.add(index + 1, reduced, *reduce_s)

    at_once = Attribution(1, 1)
    for number, begin_s in enumerate(begins_s):
        add(at_once, begin_s, 2 * number)
    turned = Attribution(1, 1)
    taken = []
    for number, by_s in enumerate(np.diff(begins_s, prepend=0.0)):
        turned.turn(np.array([by_s]), 2 if number else 0)
        turned.repeat("step", lambda: (taken.append(1), add(turned, 0.0, 0)))
    expected = at_once.finish(8)
    found = turned.finish(8)
    assert (float(expected.comm_s[0, 0]), float(expected.wait_s[0, 0])) == (16.0, 4.0)
    assert float(expected.host_s[0, 0]) == 3 * 0.5 + 3.5 + 0.5 + 3.5 + 0.5
    for name in ("makespan_s", *STATES):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    assert len(taken) == 3  # the first one, and one after each kind of pause
