"""Calibration: a cluster that is derived from times gives back these times; what noise did to them is said."""

import ctypes
import itertools
import json
import math
import mmap
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import closed_forms
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from calibrations import command  # noqa: E402
from data_files import SampleSet, generate, read_index  # noqa: E402
from engine_runs import des  # noqa: E402
from processes import run  # noqa: E402
from scripts import ROOT  # noqa: E402

from real import calibrate  # noqa: E402
from real.calibration import calls, measure  # noqa: E402
from real.calibration.calls import CallTimes  # noqa: E402
from real.calibration.clusters import Cores, LinkForm, derive  # noqa: E402
from real.calibration.data import DataRates, Setup, drop_cached, fresh_readings, kernel_caches, measure_data, with_data  # noqa: E402  # noqa: E402
from real.calibration.line_fit import predicted_task_s  # noqa: E402
from real.calibration.measure import collective as collective_of  # noqa: E402
from real.calibration.measure import device_s, measure_task, one_op_plan, tasks  # noqa: E402
from real.calibration.tables import MEASURED_OPS, Hop, Measurement, MeasuringTask, hops, line, link_table, pooled  # noqa: E402
from real.data.sources import decode_raw  # noqa: E402
from real.data.storages import DataStorage, open_storage  # noqa: E402
from real.processes.launch import RankPlace  # noqa: E402
from simdist.cost import price  # noqa: E402
from simdist.cost.topology import LinkCost  # noqa: E402
from simdist.errors import RunError, ScenarioError  # noqa: E402
from simdist.plan.group import Group  # noqa: E402
from simdist.scenario import (  # noqa: E402
    Cluster,
    Device,
    Link,
    Scenario,
    Tensor,
    Workload,
    load,
    load_cluster,
    load_workload,
    presets,
)
from simdist.scenario.cluster import ClusterHost  # noqa: E402
from simdist.scenario.warnings import CALIBRATION, beyond_table  # noqa: E402
from simdist.schedules import Sync  # noqa: E402
from simdist.studies.published_errors import doubts_of  # noqa: E402
from simdist.traces.collectives import bus_factor  # noqa: E402

FABRIC = Link(latency_s=3e-6, bandwidth_Bps=3e9, efficiency=0.8)
NETWORK = Link(latency_s=25e-6, bandwidth_Bps=50e6, efficiency=0.95)
SIZES = tuple(1000 * 4**k for k in range(8))
TABLE = LinkForm("table")
DEVICE = Device(name="a device", memory_bandwidth_Bps=1e10)
WORKLOAD = Workload(tensors=(Tensor(name="w", count=1),), batch_size=1, forward_s=0.0)


def cluster_of(nodes=4, ranks_per_node=2, fabric=FABRIC, network=NETWORK):
    return Cluster(
        nodes=nodes, gpus_per_node=ranks_per_node, fabric=fabric, network=network, collectives={"library": "gloo"}
    )


def as_measured(cluster, *, factor=1.0, ops=MEASURED_OPS):
    """Return the tasks on a cluster, and measurements that took exactly what the cost model says."""
    todo = [task for task in tasks(cluster.nodes, cluster.gpus_per_node, SIZES, ops) if task.op != "sendrecv"]
    measured = [Measurement(task, (factor * predicted_task_s(cluster, task),) * 3) for task in todo]
    return todo, measured


def derived(measured, cluster, form=TABLE):
    return derive(
        measured,
        nodes=cluster.nodes,
        ranks_per_node=cluster.gpus_per_node,
        form=form,
        device=DEVICE,
        library=cluster.collectives.library,
        name="test",
        source="measured by a test",
    )


# ---------------------------------------------------------------- calls of the host


@pytest.mark.parametrize(
    ("call_s", "gpu_s", "enqueue_s", "result_s"), [(9e-6, 4e-6, 9e-6, 9.2e-6), (9e-6, 3e-5, 9e-6, 3e-5)]
)
def test_queued_calls_take_what_is_slower_of_the_host_and_the_gpu(monkeypatch, call_s, gpu_s, enqueue_s, result_s):
    at = {"host": 0.0, "gpu": 0.0}

    def act():
        at["host"] += call_s
        at["gpu"] = max(at["gpu"], at["host"]) + gpu_s

    def wait():
        at["host"] = max(at["host"], at["gpu"])

    monkeypatch.setattr(calls, "now_s", lambda: at["host"])
    assert calls.queued_s(act, wait) == (pytest.approx(enqueue_s), pytest.approx(result_s, rel=0.02))


@pytest.mark.parametrize("form", [TABLE, LinkForm("line", NETWORK.bandwidth_Bps)], ids=["table", "line"])
def test_what_waiting_adds_to_a_call_is_overhead_and_no_part_of_a_link(form):
    """Events time collectives without the host. A program that waits takes longer by what waiting adds."""
    queued = cluster_of()
    waits_s = 2.2e-5
    todo, measured = as_measured(queued)
    least_s = min(each.median_s for each in measured)
    times = CallTimes(enqueue_s=9e-6, queued_s=least_s, waited_s=least_s + waits_s)
    found = derived(measured, queued, replace(form, calls=times))
    assert found.cluster.collectives.overhead_s == pytest.approx(waits_s, rel=1e-3)
    assert any("22 us for waiting" in note for note in found.notes)
    ahead = found.cluster.model_copy(update={"collectives": {"overhead_s": 0.0}})
    for task, each in zip(todo, measured, strict=True):
        if task.where in ("node", "one per node") and task.op == "all_reduce":
            assert predicted_task_s(found.cluster, task) == pytest.approx(each.median_s + waits_s, rel=1e-3)
            assert predicted_task_s(ahead, task) == pytest.approx(predicted_task_s(queued, task), rel=1e-3)


# ---------------------------------------------------------------- the round trip

each_shape = pytest.mark.parametrize(
    ("nodes", "ranks_per_node"), [(4, 2), (3, 3), pytest.param(2, 4, marks=pytest.mark.full)]
)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(4, 2), (2, 4), (3, 3), (1, 8), (8, 1)])
@pytest.mark.parametrize("library", ["gloo", "nccl"])
def test_cluster_with_tables_gives_back_the_collectives_it_is_from(nodes, ranks_per_node, library):
    """Each collective is as much slower than on the known links as its own factor says."""
    known = cluster_of(nodes, ranks_per_node).model_copy(update={"collectives": {"library": library}})
    factors = {"all_reduce": 1.0, "all_gather": 1.7, "reduce_scatter": 0.6}
    todo, measured = as_measured(known, ops=tuple(factors))
    measured = [Measurement(each.task, tuple(factors[each.task.op] * s for s in each.seconds)) for each in measured]
    found = derived(measured, known).cluster
    compared = [(t, m) for t, m in zip(todo, measured, strict=True) if t.where in ("node", "one per node")]
    assert {task.op for task, _ in compared} == set(factors)
    for task, each in compared:
        if library == "gloo" or task.op != "all_reduce" or nodes == 1:  # NCCL takes trees between nodes
            assert predicted_task_s(found, task) == pytest.approx(each.median_s, rel=1e-9), str(task)


PUBLISHED = json.loads((ROOT / "experiments" / "nccl_tables" / "published.json").read_text(encoding="utf-8"))["tables"]


@pytest.mark.parametrize("model_nbytes", [2**22, 2**27, 2**30], ids=["4 MiB", "128 MiB", "1 GiB"])
@pytest.mark.parametrize("max_nbytes", [2**22, 2**26, 2**28, 2**30])
@pytest.mark.parametrize("name", ["h200", "a100", "a100-oci"])
def test_published_times_of_8_gpus_are_given_back_or_doubted(name, max_nbytes, model_nbytes):
    """The calibration gets a published table as its measurement, up to some size."""
    rows = {nbytes: us * 1e-6 for nbytes, us in PUBLISHED[name]["rows_bytes_us"]}
    measured = [
        Measurement(MeasuringTask("all_reduce", "node", Group(8), nbytes // 4), (seconds,))
        for nbytes, seconds in rows.items()
        if nbytes <= max_nbytes
    ]
    known = cluster_of(1, 8).model_copy(update={"collectives": {"library": "nccl"}})
    found = derived(measured, known).cluster.model_copy(update={"source": f"{CALIBRATION}: a test"})
    task = MeasuringTask("all_reduce", "node", Group(8), model_nbytes // 4)
    miss = predicted_task_s(found, task) / rows[model_nbytes] - 1
    workload = Workload(tensors=(Tensor(name="w", count=model_nbytes // 4),), batch_size=1, forward_s=1.0)
    doubt = beyond_table(Scenario(cluster=found, workload=workload, schedules=(Sync(),), steps=1), "fabric")
    assert doubt or abs(miss) < 0.05
    assert bool(doubt) == (model_nbytes > max_nbytes)


def test_an_interval_has_the_errors_of_unmeasured_links_if_the_model_is_larger_than_what_was_measured():
    overhead = {"from": "1 us", "to": "2 us", "source": "a test"}
    cluster = Cluster(
        source=f"{CALIBRATION}: a test",
        nodes=1,
        gpus_per_node=8,
        fabric=Link(table=((1000, 1e-5), (10**6, 2e-5))),
        network=Link.ideal(),
        device=Device(name="NVIDIA H200"),
        collectives={"overhead_s": 1.5e-6},
        uncertain={"collectives.overhead": overhead},
    )

    def kinds(count):
        workload = Workload(tensors=(Tensor(name="w", count=count),), batch_size=1, forward_s=1.0)
        found = Scenario(cluster=cluster, workload=workload, schedules=(Sync(),), steps=1)
        return {each.kind for each in doubts_of(found)}

    assert "fabric" in kinds(10**7)
    assert "fabric" not in kinds(10**6)


@each_shape
def test_lines_tell_the_overhead_of_a_collective_from_the_latency_of_its_hops(nodes, ranks_per_node):
    known = cluster_of(nodes, ranks_per_node).model_copy(update={"collectives": {"overhead_s": 2e-3}})
    _, measured = as_measured(known)
    found = derived(measured, known, LinkForm("line", NETWORK.bandwidth_Bps)).cluster
    assert found.collectives.overhead_s == pytest.approx(2e-3, rel=1e-6)
    assert found.fabric.latency_s == pytest.approx(FABRIC.latency_s, rel=1e-4)
    assert found.network.latency_s == pytest.approx(NETWORK.latency_s, rel=1e-4)
    assert found.network.efficiency == pytest.approx(NETWORK.efficiency, rel=1e-6)


@each_shape
def test_cluster_with_lines_gives_back_everything(nodes, ranks_per_node):
    known = cluster_of(nodes, ranks_per_node)
    todo, measured = as_measured(known)
    found = derived(measured, known, LinkForm("line", NETWORK.bandwidth_Bps)).cluster
    assert found.network.bandwidth_Bps == NETWORK.bandwidth_Bps
    assert found.network.efficiency == pytest.approx(0.95, rel=1e-4)
    assert (found.fabric.efficiency, found.fabric.bandwidth_Bps) == (1.0, pytest.approx(2.4e9, rel=1e-4))
    for task, each in zip(todo, measured, strict=True):
        assert predicted_task_s(found, task) == pytest.approx(each.median_s, rel=1e-4), str(task)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 8), (8, 1)])
def test_lines_of_one_kind_of_link_leave_the_other_ideal(nodes, ranks_per_node):
    known = cluster_of(nodes, ranks_per_node)
    todo, measured = as_measured(known)
    found = derived(measured, known, LinkForm("line", NETWORK.bandwidth_Bps)).cluster
    assert (found.fabric == Link.ideal(), found.network == Link.ideal()) == (ranks_per_node == 1, nodes == 1)
    for task, each in zip(todo, measured, strict=True):
        assert predicted_task_s(found, task) == pytest.approx(each.median_s, rel=1e-4), str(task)


@each_shape
def test_what_a_core_takes_is_told_from_the_links(nodes, ranks_per_node):
    """On faster links, only what the wire takes shrinks; the file says so, and how far off its rates may be."""
    host = ClusterHost(copy_Bps=8e9, collective_s=3e-4, handover_s=2e-5, cores_per_node=2, shares_cores=True)
    known = cluster_of(nodes, ranks_per_node).model_copy(update={"host": host, "network": NETWORK})
    todo, measured = as_measured(known)
    between = Group(nodes, stride=ranks_per_node)
    for nbytes in (10**6, 4 * 10**6):  # a message is delayed by nothing but its link
        seconds = 1e-3 + nbytes / (NETWORK.bandwidth_Bps * NETWORK.efficiency)
        measured.append(Measurement(MeasuringTask("sendrecv", "pair of nodes", between, nbytes // 4), (seconds,)))
    form = LinkForm("line", NETWORK.bandwidth_Bps, Cores(2, shared=True, handover_s=2e-5))
    found = derived(measured, known, form)
    assert found.cluster.host.collective_s == pytest.approx(3e-4, rel=1e-3)
    assert found.cluster.host.copy_Bps == pytest.approx(8e9, rel=1e-3)
    assert found.cluster.network.efficiency == pytest.approx(NETWORK.efficiency, rel=1e-9)
    assert set(found.cluster.uncertain) <= {"network.efficiency", "fabric.bandwidth"}  # nothing is missed here
    scattered = [
        Measurement(each.task, tuple(seconds * (1.01 if number % 2 else 0.99) for seconds in each.seconds))
        for number, each in enumerate(measured)
    ]
    assert set(derived(scattered, known, form).cluster.uncertain) == {"network.efficiency", "fabric.bandwidth"}
    faster = {"network": NETWORK.model_copy(update={"bandwidth_Bps": 4 * NETWORK.bandwidth_Bps})}
    for task in todo:
        here, there = (each.model_copy(update=faster) for each in (known, found.cluster))
        assert predicted_task_s(there, task) == pytest.approx(predicted_task_s(here, task), rel=2e-3), str(task)


def test_a_parameter_at_its_bound_is_said():
    known = cluster_of().model_copy(update={"network": NETWORK.model_copy(update={"efficiency": 1.0})})
    _, measured = as_measured(known, factor=0.97)
    notes = derived(measured, known, LinkForm("line", NETWORK.bandwidth_Bps)).notes
    assert any(note.startswith("at its bound: the time of a byte on the network") for note in notes)


def test_a_fabric_faster_than_can_be_told_is_said_and_has_no_range():
    known = cluster_of().model_copy(update={"fabric": Link(latency_s=1e-5, bandwidth_Bps=1e15)})
    found = derived(as_measured(known)[1], known, LinkForm("line", NETWORK.bandwidth_Bps))
    assert any(note.startswith("at its bound: the time of a byte on the fabric") for note in found.notes)
    assert found.cluster.fabric.bandwidth_Bps == pytest.approx(1e11)
    assert set(found.cluster.uncertain) == {"network.efficiency"}


def test_hops_are_those_of_the_textbook_ring():
    n, nbytes = 4, 64_000
    seconds = closed_forms.ring_all_reduce_s(n, nbytes, 3e-5, 1e9)
    (hop,) = hops(
        [Measurement(MeasuringTask("all_reduce", "node", Group(n), nbytes // 4), (seconds,))],
        "node",
        "all_reduce",
        "gloo",
    )
    assert (hop.nbytes, hop.time_s) == (16_000, pytest.approx(3e-5 + 16_000 / 1e9, rel=1e-12))


def test_hops_take_the_median_and_only_what_was_measured_there():
    measured = [
        Measurement(MeasuringTask("all_reduce", "node", Group(2), 200), (1.0, 4.0, 2.0)),
        Measurement(MeasuringTask("all_reduce", "world", Group(8), 200), (9.0,)),
        Measurement(MeasuringTask("all_gather", "node", Group(2), 200), (9.0,)),
    ]
    assert hops(measured, "node", "all_reduce", "gloo") == [Hop(400, 1.0, 3.0)]
    assert hops(measured, "node", "all_gather", "gloo") == [Hop(400, 9.0)]


@pytest.mark.parametrize("form", [LinkForm("table"), LinkForm("line", NETWORK.bandwidth_Bps)])
def test_prediction_of_groups_at_once_is_what_the_simulator_says(form):
    known = cluster_of()
    todo, measured = as_measured(known)
    found = derived(measured, known, form).cluster
    for task in todo:
        if task.where in ("node", "all per node", "world"):
            plan = one_op_plan(collective_of(task.op, task.group), task.count, found.world_size)
            trace = des.simulate(plan, price(plan, found, WORKLOAD), {})
            assert predicted_task_s(found, task) == pytest.approx(trace.makespan_s, rel=1e-9), str(task)


# ---------------------------------------------------------------- noise


points = st.lists(
    st.tuples(st.integers(1, 10**8), st.floats(1e-6, 1.0), st.integers(1, 50)),
    min_size=2,
    max_size=12,
    unique_by=lambda row: row[0],
).map(lambda rows: [Hop(nbytes, time_s, float(weight)) for nbytes, time_s, weight in sorted(rows)])


@given(points)
def test_pooled_times_do_not_shrink_and_keep_every_size_and_the_weighted_sum(given_points):
    found = pooled(given_points)
    assert [hop.nbytes for hop in found] == [hop.nbytes for hop in given_points]
    assert all(a.time_s <= b.time_s for a, b in itertools.pairwise(found))
    sums = [math.fsum(hop.weight * hop.time_s for hop in each) for each in (found, given_points)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-9)


@given(points)
def test_pooling_leaves_times_that_grow_as_they_are(given_points):
    times = sorted(hop.time_s for hop in given_points)
    growing = [Hop(hop.nbytes, time_s, hop.weight) for hop, time_s in zip(given_points, times, strict=True)]
    assert [hop.time_s for hop in pooled(growing)] == pytest.approx(times, rel=1e-12)  # equal ones are rounded


@given(points)
def test_every_measured_table_is_a_link(given_points):
    assert len(link_table(given_points).table) == len(given_points)


def test_pooling_weighs_by_repetitions():
    found = pooled([Hop(1, 4.0, 1.0), Hop(2, 1.0, 3.0)])
    assert [hop.time_s for hop in found] == [1.75, 1.75]


def shrinking(at, factor):
    """Return measurements on a known cluster, of which one size within nodes took `factor` times as long."""
    known = cluster_of()
    _, measured = as_measured(known, ops=("all_reduce",))
    for index, each in enumerate(measured):
        if each.task.where == "node" and each.task.nbytes == sorted({m.task.nbytes for m in measured})[at]:
            measured[index] = Measurement(each.task, tuple(factor * s for s in each.seconds))
    return derived(measured, known)


def test_pooled_points_are_said():
    notes = shrinking(3, 1e-3).notes
    assert any(
        note.startswith("warning: fabric: times shrink though sizes grow, among hops of 2 kB (") for note in notes
    )
    assert not any("ends flat" in note for note in notes)


def test_table_that_ends_flat_is_said():
    assert any("fabric: the table ends flat" in note for note in shrinking(-1, 1e-3).notes)
    assert derived(as_measured(cluster_of())[1], cluster_of()).notes == ()


def test_a_table_of_one_collective_that_ends_flat_is_said():
    known = cluster_of()
    _, measured = as_measured(known)
    largest = max(each.task.nbytes for each in measured)
    for index, each in enumerate(measured):
        if (each.task.op, each.task.where, each.task.nbytes) == ("all_gather", "node", largest):
            measured[index] = Measurement(each.task, tuple(1e-3 * s for s in each.seconds))
    assert any("fabric, all_gather: the table ends flat" in note for note in derived(measured, known).notes)


def test_one_size_makes_no_link():
    with pytest.raises(ScenarioError, match=r"1 size.* lower --min-size or raise --max-size"):
        link_table([Hop(100, 1.0)])


# ---------------------------------------------------------------- lines


def on_line(alpha_s, rate_Bps, sizes=SIZES):
    return [Hop(nbytes, alpha_s + nbytes / rate_Bps) for nbytes in sizes]


def misses(given_points):
    """Return by which share of its time the line misses each point."""
    link = line(given_points)
    return [(link.latency_s + hop.nbytes / link.bandwidth_Bps) / hop.time_s - 1 for hop in given_points]


def test_line_lies_between_points_that_are_on_none():
    exact = on_line(1e-4, 1e8)
    assert max(map(abs, misses(exact))) < 1e-12
    late = [*exact[:-1], Hop(exact[-1].nbytes, 1.1 * exact[-1].time_s)]
    missed = misses(late)
    assert missed[-1] < 0 < missed[-2]
    assert max(map(abs, missed)) < 0.1


def test_line_weighs_relative_misses_so_that_small_messages_count():
    link = line([*on_line(1e-3, 1e8, SIZES[:4]), Hop(10**9, 11.0)])
    assert link.latency_s == pytest.approx(1e-3, rel=0.1)


def test_efficiency_above_one_is_said_and_written_as_one():
    known = cluster_of()
    found = derived(as_measured(known)[1], known, LinkForm("line", 40e6))
    assert (found.cluster.network.efficiency, found.cluster.network.bandwidth_Bps) == (1.0, 40e6)
    assert any("at its bound: the time of a byte on the network" in note for note in found.notes)


def test_line_of_times_that_do_not_grow_takes_the_stated_rate_or_is_refused():
    shrinking_times = [Hop(nbytes, 1e-3 / (k + 1)) for k, nbytes in enumerate(SIZES)]
    link = line(shrinking_times, 1e12)
    assert link.efficiency == 1.0
    assert 1e-4 < link.latency_s < 1e-3
    with pytest.raises(ScenarioError, match=r"times do not grow .* larger --max-size, or --links table"):
        line(shrinking_times)


def test_latency_of_a_line_is_never_negative():
    bent = [Hop(1000, 1e-6), Hop(4000, 1e-5), Hop(16000, 1e-4)]
    assert line(bent).latency_s == 0.0


# ---------------------------------------------------------------- what else is said


def test_gathers_over_half_of_the_nodes_and_over_all_tell_the_step_of_a_ring():
    network = Link(latency_s=3e-6, bandwidth_Bps=25e9, efficiency=0.9, ring_step_s=40e-6)
    truth = cluster_of(8, 2, Link(latency_s=3e-6, bandwidth_Bps=100e9), network).model_copy(
        update={"collectives": {"library": "nccl"}}
    )
    todo = [each for each in tasks(8, 2, (2**16, 2**28), ("all_reduce",), halves=True) if each.op != "sendrecv"]
    assert [str(task.where) for task in todo if task.op == "all_gather"] == ["half of the nodes", "world"]
    measured = [Measurement(task, (predicted_task_s(truth, task),) * 3) for task in todo]
    found = derived(measured, truth, LinkForm("line", rate_Bps=25e9))
    assert found.cluster.network.ring_step_s == pytest.approx(40e-6, rel=0.3)
    assert any(note.startswith("step of a ring between nodes:") for note in found.notes)
    assert not [each for each in tasks(2, 2, (2**20,), ("all_reduce",), halves=True) if each.op == "all_gather"]
    assert not [each for each in tasks(8, 2, (2**20,), ("all_reduce",)) if each.op == "all_gather"]


def test_bus_factors_are_those_of_nccl_tests():
    factors = {op: bus_factor(op, 8) for op in MEASURED_OPS}
    assert factors == {"all_reduce": 1.75, "reduce_scatter": 0.875, "all_gather": 0.875, "broadcast": 1, "reduce": 1}


def test_link_that_was_not_measured_is_ideal_and_said_in_the_source():
    one_node, one_rank = cluster_of(1, 8), cluster_of(8, 1)
    found = derived(as_measured(one_node)[1], one_node).cluster
    assert found.network == Link.ideal()
    assert "network was not measured" in found.source
    found = derived(as_measured(one_rank)[1], one_rank).cluster
    assert found.fabric == Link.ideal()
    assert "fabric was not measured" in found.source


def test_every_collective_is_cut_into_equal_slices():
    for task in tasks(3, 4, SIZES, MEASURED_OPS):
        assert task.count % task.group.size == 0
        assert 12 % len(task.taking_part(12)[0]) == 0


class Stream:
    """A stream of a device whose host enqueues everything at once; its time passes with what it does."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.done: list[str] = []

    def act(self, name: str, seconds: float) -> None:
        self.done.append(name)
        self.time_s += seconds

    def event(self) -> "StreamEvent":
        return StreamEvent(self)


class StreamEvent:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def record(self) -> None:
        self.stream.done.append("event")
        self.at_s = self.stream.time_s

    def elapsed_time(self, later: "StreamEvent") -> float:
        assert self.stream.done[-1] == "waited"
        return 1e3 * (later.at_s - self.at_s)


def test_a_collective_on_a_device_lasts_from_the_end_of_one_before_to_its_own():
    """Neither waiting for the members, which the first one does, nor enqueueing counts."""
    stream = Stream()
    seconds = iter((5.0, 0.25))
    found = device_s(
        lambda: stream.act("collective", next(seconds)),
        lambda: stream.act("delay", 1.0),
        stream.event,
        lambda: stream.act("waited", 0.0),
    )
    assert found == 0.25
    assert stream.done == ["delay", "collective", "event", "collective", "event", "waited"]


class FakeBench:
    """Measures without ranks: a collective takes a second for each kB."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def compare_clocks(self) -> None:
        pass

    def agrees(self, answer: bool) -> bool:
        return answer

    def measure(self, task: MeasuringTask, share_s: float) -> Measurement:
        self.clock[0] += 4 * task.nbytes / 1000
        return Measurement(task, (task.nbytes / 1000,) * 3)


@pytest.mark.parametrize(
    ("budget_s", "sure_nbytes", "largest"),
    [(0, math.inf, 64_000), (0, 4000, 4000), (400, 4000, 16_000), (1e4, 0, 64_000)],
)
def test_sizes_that_the_budget_does_not_reach_are_left_out(monkeypatch, budget_s, sure_nbytes, largest):
    clock = [0.0]
    monkeypatch.setattr(measure, "ProcessWorld", lambda *_, **__: None)
    monkeypatch.setattr(measure, "precise_sleeps", lambda: None)
    monkeypatch.setattr(measure, "compare_clocks", lambda: None)
    monkeypatch.setattr(measure, "now_s", lambda: clock[0])
    monkeypatch.setattr(measure, "_Bench", lambda *_: FakeBench(clock))
    todo = tasks(1, 2, (1000, 4000, 16_000, 64_000), ("all_reduce", "all_gather"))
    connection = SimpleNamespace(timeout_s=1.0)
    found = measure_task(connection, todo, budget_s=budget_s, gap_s=0.0, sure_nbytes=sure_nbytes)
    assert max(each.task.nbytes for each in found) == largest
    assert [each.task for each in found] == todo[: len(found)]


# ---------------------------------------------------------------- the command


def environment(monkeypatch, world_size, local_world_size):
    values = {"RANK": 0, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local_world_size}
    for name, value in (values | {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}).items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--min-size", "1 kb"], "--min-size: '1 kb': 'kb' is no unit of size: write 1 kB"),
        (["--min-size", "2 kB", "--max-size", "1 kB"], "--min-size is 2000 B and --max-size 1000 B"),
        (["--ops", "all_reduce,gather"], "--ops: 'gather' is no collective; there are all_reduce"),
        (["-o", "c.yaml", "--ops", "broadcast"], "--ops leaves out all_reduce, from which the links of -o follow"),
        (["--links", "line"], '--links line states the rate of the network: give it, e.g. --rate "25 Gbit/s"'),
        (["--rate", "1 Gbit/s"], "--rate has no meaning for a table"),
        (["--data", "/mnt/set"], "--data measures what a cluster file states: give -o CLUSTER with it"),
        (["-o", "c.yaml", "--data", "/mnt/set", "--sample-size", "0 B"], "--sample-size is 0 B"),
        (["--model", "mlp"], "--model and --workload go together"),
        (["--model", "alexnet", "--workload", "w.yaml"], "--model alexnet: there is no such model; there are"),
    ],
)
def test_wrong_option_is_refused_before_anybody_waits(monkeypatch, capsys, arguments, message):
    environment(monkeypatch, 4, 2)
    assert calibrate.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_one_rank_has_no_links(monkeypatch, capsys):
    environment(monkeypatch, 1, 1)
    assert calibrate.main(["-o", "c.yaml"]) == 2
    assert "one rank has no links to measure" in capsys.readouterr().err


def test_without_torchrun_says_how_to_start(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert calibrate.main([]) == 1
    assert "not started by torchrun" in capsys.readouterr().err


QUICK = ("--budget", "0 s", "--gap", "1 ms", "--min-size", "1 kB", "--max-size", "4 kB", "--device", "cpu")
SCENARIO = """\
cluster: CLUSTER
workload: WORKLOAD
steps: 2
schedules:
  - {kind: sync}
"""


def scenario_of(folder: Path, *, cluster: str = "ideal", workload: str = "mlp"):
    text = SCENARIO.replace("CLUSTER", cluster).replace("WORKLOAD", workload)
    (folder / "scenario.yaml").write_text(text, encoding="utf-8")
    return load(folder / "scenario.yaml")


@pytest.mark.sentinel
def test_two_nodes_of_two_ranks_are_measured_and_a_scenario_takes_the_cluster(tmp_path: Path) -> None:
    cluster, raw = tmp_path / "cluster.yaml", tmp_path / "raw.json"
    samples = SampleSet(n_samples=16, nbytes=4000, sigma=0.0, format="raw")
    generate(tmp_path / "set", samples)
    data = ("--data", str(tmp_path / "set"), "--cache", str(tmp_path / "cache"), "--readers", "2")
    size = ("--sample-size", f"{3 * samples.side**2} B")
    endings = run(command, 4, 2, "-o", str(cluster), "--json", str(raw), *data, *size, *QUICK, timeout_s=120.0)
    for ending in endings.values():
        assert "exit code 0" in ending.output, ending.output
    assert "all per node (2)" in endings[0].output
    assert "all_reduce" not in endings[1].output  # rank 0 speaks
    found = load_cluster(cluster)
    assert (found.nodes, found.gpus_per_node, found.topology.nics_per_node) == (2, 2, 1)
    assert "measured by real.calibrate: gloo, torch" in found.source
    assert "4 ranks on 2 nodes" in found.source
    assert [point.nbytes for point in found.network.table] == [
        496,
        2000,
    ]  # the nearest to 1 kB that 4 ranks cut is 992 B
    assert 0 < found.device.memory_bandwidth_Bps < math.inf
    assert scenario_of(tmp_path, cluster="{file: cluster.yaml}").cluster == found
    results = json.loads(raw.read_text(encoding="utf-8"))
    check_raw(results, found)
    check_data(results["data"], found)
    assert not list((tmp_path / "cache").iterdir())


def test_a_model_is_measured_on_one_rank_and_a_scenario_takes_the_workload(tmp_path: Path) -> None:
    workload = tmp_path / "workload.yaml"
    arguments = ("--model", "mlp", "--batch-size", "4", "--precision", "bf16", "--workload", str(workload))
    (ending,) = run(command, 1, 1, *arguments, *QUICK, timeout_s=120.0).values()
    assert "exit code 0" in ending.output, ending.output
    found = load_workload(workload)
    assert (found.name, found.batch_size, found.precision) == ("Multilayer perceptron", 4, "bf16")
    assert found.tensors == load_workload(presets.path("workloads", "mlp")).tensors
    assert all(0 < seconds < math.inf for seconds in (found.forward_s, found.backward_s, found.optimize_s))
    assert scenario_of(tmp_path, workload="{file: workload.yaml}").workload == found


def check_raw(results, found: Cluster) -> None:
    """The raw results hold every operation, and the table of the network follows from them."""
    rows = {(row["op"], row["where"], row["nbytes"]): row["seconds"] for row in results["measurements"]}
    assert len(rows) == 2 * (5 * 4 + 2)
    times = results["calls"]
    assert 0 < times["enqueue_s"] <= times["queued_s"]
    assert times["waited_s"] > 0
    assert found.collectives.overhead_s == 0  # gloo's host moves the data
    assert all(min(seconds) > 0 for seconds in rows.values())
    assert len(rows["all_reduce", "all per node", 4000]) == 2 * len(rows["all_reduce", "one per node", 4000])
    hop_s = [statistics.median(rows["all_reduce", "one per node", 2 * p.nbytes]) / 2 for p in found.network.table]
    weighted = pooled([Hop(point.nbytes, s, 3.0) for point, s in zip(found.network.table, hop_s, strict=True)])
    assert [p.time_s for p in found.network.table] == pytest.approx([hop.time_s for hop in weighted], rel=1e-9)


def check_data(levels, found: Cluster) -> None:
    """The cluster states what was measured of storage, disk and memory."""
    assert found.storage.bandwidth_Bps == levels["storage_Bps"]
    assert found.storage.client_bandwidth_Bps in (levels["client_Bps"], math.inf)
    assert (found.storage.open_s, found.storage.latency_s) == (levels["open_s"], 0)
    assert (found.disk.read_Bps, found.disk.write_Bps) == (levels["disk_read_Bps"], levels["disk_write_Bps"])
    assert found.memory.bandwidth_Bps == levels["memory_Bps"]
    assert "pages of the files were dropped from the nodes' caches before; of 28 reads 12 were" in found.storage.source
    assert "shortly after they were written, from the page cache" in found.disk.source
    network_s = 2 * LinkCost.of(found.network).latency_s
    assert found.memory.latency_s == pytest.approx(max(levels["request_s"] - network_s, 0.0))
    assert all(0 < levels[key] < math.inf for key in ("storage_Bps", "client_Bps", "memory_Bps", "decode_s"))


def test_a_cluster_takes_the_levels_that_were_measured_on_it():
    rates = DataRates(
        storage_Bps=4e8,
        client_Bps=1e8,
        open_s=2e-3,
        disk_read_Bps=2e9,
        disk_write_Bps=1e9,
        disk_s=1e-4,
        memory_Bps=1e10,
        request_s=3e-4,
        decode_s=5e-3,
        storage_caches="cached by nobody",
    )
    found = with_data(cluster_of(), rates, source="a test")
    assert (found.storage.bandwidth_Bps, found.storage.client_bandwidth_Bps, found.storage.open_s) == (4e8, 1e8, 2e-3)
    assert (found.disk.read_Bps, found.disk.write_Bps, found.disk.latency_s) == (2e9, 1e9, 1e-4)
    assert found.memory.bandwidth_Bps == 1e10
    assert (found.storage.source, found.memory.source) == ("a test; cached by nobody", "a test")
    assert found.memory.latency_s == pytest.approx(3e-4 - 2 * NETWORK.latency_s)
    assert with_data(cluster_of(nodes=1), rates, source="a test").storage.client_bandwidth_Bps == math.inf


def test_a_node_that_reads_as_fast_alone_as_all_together_has_no_limit_of_its_own():
    rates = DataRates(
        storage_Bps=4e8,
        client_Bps=3.9e8,
        open_s=0.0,
        disk_read_Bps=2e9,
        disk_write_Bps=1e9,
        disk_s=0.0,
        memory_Bps=1e10,
        request_s=0.0,
        decode_s=5e-3,
        storage_caches="",
    )
    assert with_data(cluster_of(), rates, source="a test").storage.client_bandwidth_Bps == math.inf


def place_of(rank: int, world_size: int = 4, local_world_size: int = 2) -> RankPlace:
    return RankPlace(rank, world_size, rank % local_world_size, local_world_size)


def test_no_file_of_the_storage_is_read_twice_while_there_are_others():
    readings = [fresh_readings(place_of(rank), n_each=40, n_samples=32 + 80 + 160) for rank in range(4)]
    read = [sample for each in readings for part in (each.alone, each.of_node, each.of_all) for sample in part]
    assert sorted(read) == list(range(32 + 80 + 160))
    assert {(len(each.alone), len(each.of_node), len(each.of_all)) for each in readings} == {
        (32, 40, 40),
        (0, 40, 40),
        (0, 0, 40),
    }
    assert {each.said for each in readings} == {"every file was read once"}


def test_ranks_share_no_file_in_a_reading_of_a_small_data_set_and_it_is_said():
    readings = [fresh_readings(place_of(rank), n_each=4, n_samples=16) for rank in range(4)]
    assert sorted(sample for each in readings for sample in each.of_all) == list(range(16))
    assert readings[0].said == "of 28 reads 12 were of files read before, for the data set has no more"


LIBC = ctypes.CDLL(None, use_errno=True)


def is_cached(path: Path) -> bool:
    """Tell whether the first page of a file lies in the page cache; asking reads nothing, as mincore(2) says."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        first, resident = ctypes.c_char.from_buffer(pages), ctypes.c_ubyte()
        failed = LIBC.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(1), ctypes.byref(resident))
        del first  # it holds the map
    if failed:
        raise OSError(ctypes.get_errno(), "mincore fails")
    return bool(resident.value & 1)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with a data set, on a file system with a page cache."""
    generate(tmp_path / "set", SampleSet(n_samples=8, nbytes=8000, sigma=0.0, format="raw"))
    index = read_index(tmp_path / "set" / "index.csv")
    drop_cached(open_storage(str(tmp_path / "set")), index, range(8))
    try:
        if is_cached(tmp_path / "set" / index.names[0]):
            pytest.skip("the folder of temporary files lies in memory")
    except OSError as error:
        pytest.skip(f"cannot tell here what is cached: {error}")
    return tmp_path / "set"


class Alone:
    """The connection of a rank without others."""

    place = place_of(0, 1, 1)

    def barrier(self, what: str) -> None:
        pass

    def exchange(self, what: str, value: str) -> list[str]:
        return [value]

    def share_token(self, nbytes: int) -> bytes:
        return b"1" * nbytes


def test_the_storage_is_never_measured_by_the_page_cache_of_a_node(stored: Path, monkeypatch: pytest.MonkeyPatch):
    """Eight files are read by one thread, by a node, and by all: 24 times."""
    read_once, cached = DataStorage.read, []

    def watched(self: DataStorage, name: str) -> bytes:
        cached.append(is_cached(stored / name))
        return read_once(self, name)

    monkeypatch.setattr(DataStorage, "read", watched)
    index, storage = read_index(stored / "index.csv"), open_storage(str(stored))
    setup = Setup(index, storage, decode_raw, (int(index.nbytes[0]),), stored.parent / "cache", 2)
    rates = measure_data(Alone(), setup)
    assert cached[:24] == [False] * 24
    assert "of 24 reads 16 were of files read before" in rates.storage_caches


def test_what_is_known_of_the_page_cache_is_said(tmp_path: Path):
    folder, object_store = open_storage(str(tmp_path)), open_storage("memory://set")
    assert kernel_caches(folder, dropped=False) == "the nodes' page caches may have held the files"
    assert kernel_caches(object_store, dropped=False) == "read without a page cache of the nodes"


def test_a_file_that_is_there_is_not_replaced_and_all_ranks_end(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("precious", encoding="utf-8")
    endings = run(command, 2, 2, "-o", str(tmp_path / "cluster.yaml"), *QUICK)
    for ending in endings.values():
        assert "is there already; replace it with --force" in ending.output
        assert "exit code 0" not in ending.output
    assert (tmp_path / "cluster.yaml").read_text(encoding="utf-8") == "precious"


def test_write_replaces_only_by_force_and_leaves_nothing_else(tmp_path: Path) -> None:
    from real.calibration import output

    output.write_file(tmp_path / "c.yaml", "one", force=False)
    with pytest.raises(ScenarioError, match="--force"):
        output.write_file(tmp_path / "c.yaml", "two", force=False)
    output.write_file(tmp_path / "c.yaml", "three", force=True)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("c.yaml", "three")]
    with pytest.raises(RunError, match="cannot be written"):
        output.write_file(tmp_path / "none" / "c.yaml", "four", force=False)
