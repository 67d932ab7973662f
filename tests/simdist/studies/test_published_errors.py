"""Doubts of kinds of predictions: which count, what they scale, and what they leave alone."""

import math
from dataclasses import replace

import numpy as np
import pytest

from simdist import scenario
from simdist.plan import COLLECTIVES, Backward, Forward, Load
from simdist.runs.building import build
from simdist.settings.units import format_nbytes
from simdist.studies import comparison, draws, measuring
from simdist.studies.comparison import compare
from simdist.studies.facets import RANGES
from simdist.studies.published_errors import Doubt, doubted, doubts_of, link_class, of_published_rows, ranged_overhead_s
from simdist.studies.uncertainty import RING_STEP, quantities

TEXT = """
cluster: {{preset: {preset}, nodes: {nodes}{more}}}
workload: {{preset: resnet18, batch_size: 32, {precision}forward: 20 ms, backward: 40 ms}}
steps: 4
{disturbances}
schedules: [{{kind: sync}}, {{kind: local_sgd, period: 4}}]
"""


def job(preset="dgx-a100", nodes=2, more="", precision="", disturbances=""):
    text = TEXT.format(preset=preset, nodes=nodes, more=more, precision=precision, disturbances=disturbances)
    return scenario.loads(text)


def names(found):
    return [each.name for each in doubts_of(found)]


def test_steps_from_what_is_measured_to_what_is_asked_count():
    both = ["doubt.machine", "doubt.machines", "doubt.fabric", "doubt.network"]
    assert names(job()) == both
    assert names(job(nodes=1)) == ["doubt.machine", "doubt.fabric"]
    rate = "disturbances: [{kind: interference, machine_samples_per_s: 3900}]"
    assert names(job(disturbances=rate)) == both[1:]
    of_all = "disturbances: [{kind: interference, machine_samples_per_s: 7800, rate_ranks: 16}]"
    assert names(job(disturbances=of_all)) == both[2:]
    of_one = "disturbances: [{kind: interference, machine_samples_per_s: 500, rate_ranks: 1}]"
    assert names(job(disturbances=of_one)) == both
    lost = "disturbances: [{kind: interference, lost: 5%}]\nuncertain: {'disturbances[0].lost': {from: 0%, to: 30%}}"
    assert names(job(disturbances=lost)) == both[1:]


def test_what_is_exact_or_measured_has_no_doubt():
    assert names(job(more=", uncertain: {}")) == []
    assert names(job(preset="ideal", nodes=2)) == []
    calibrated = ", uncertain: {network.efficiency: {from: 90%, to: 96%, source: 'real.calibrate: 3 %'}}"
    assert names(job(more=calibrated)) == ["doubt.machine", "doubt.machines"]
    assert names(job(more=", collectives: {library: gloo}")) == ["doubt.machine", "doubt.machines"]


def test_classes_follow_from_gpus_precision_and_links():
    of = {each.kind: each.hardware for each in doubts_of(job(precision="precision: bf16, "))}
    assert of == {"machine": "ampere mixed", "machines": "ampere mixed", "fabric": "NVLink", "network": "RDMA"}
    assert [each.hardware for each in doubts_of(job())][:2] == ["ampere single", "ampere single"]
    again = scenario.loads(scenario.dump(job()))
    assert doubts_of(again) == doubts_of(job()), "a scenario that is written and read has other doubts"
    efa, tcp = (job(preset=name).cluster for name in ("aws-p5", "v100x8-25gbit"))
    assert [link_class(each, "network") for each in (efa, tcp)] == ["EFA", "TCP"]
    told = job(more=", collectives: {transport: slingshot}").cluster
    assert link_class(told, "network") == "Slingshot"
    names_of_fabrics = {"gcp-t4x4-32gbit": "PCIe", "mi300x": "xGMI", "dgx-h100": "NVLink"}
    assert {name: link_class(job(preset=name).cluster, "fabric") for name in names_of_fabrics} == names_of_fabrics


def test_a_network_without_rows_is_like_all_other_networks():
    (tcp,) = (each for each in doubts_of(job(preset="v100x8-25gbit")) if each.kind == "network")
    assert tcp.hardware == "network"
    assert tcp.in_words.startswith(
        f"doubt.network (errors of {tcp.n_rows} published rows, collectives between machines):"
    )
    slingshot = job(more=", collectives: {transport: slingshot}")
    wide, other = (
        next(each for each in doubts_of(of) if each.kind == "network").factor(0.95, 2**21) for of in (slingshot, job())
    )
    assert wide > 2 * other > 2


def test_a_rack_is_one_domain_and_only_racks_have_a_network():
    assert names(job(preset="gb200-nvl72", nodes=18)) == ["doubt.machine", "doubt.fabric"]
    assert "doubt.network" in names(job(preset="gb200-nvl72", nodes=36))


def test_a_share_that_is_stated_to_be_lost_is_not_lost_twice():
    plain, stated = (
        doubts_of(job(disturbances=text))[0]
        for text in ("", "disturbances: [{kind: interference, lost: 25%, noise: 0%}]")
    )
    assert plain.name == stated.name == "doubt.machine"
    assert stated.factor(0.5) == pytest.approx(plain.factor(0.5) / 1.25)


def doubt(kind, *logs, sizes=(1,)):
    return Doubt(kind, "", 1, 1, logs, sizes)


def test_a_factor_lies_between_places_and_between_sizes():
    one = doubt("network", (0.0, 0.0), (0.2, 0.4), sizes=(2**10, 2**20))
    assert one.factor(0.5, 2**20) == pytest.approx(math.exp(0.3))
    assert one.factor(1.0, 2**15) == pytest.approx(math.exp(0.2))
    assert one.factor(1.0, 1) == 1.0
    assert one.factor(1.0, 2**40) == pytest.approx(math.exp(0.4))


def test_computing_and_collectives_are_scaled_and_nothing_else():
    found = job()
    built = build(found, found.schedules[0])
    at = {doubt("machine", (0.1,)): 0.5, doubt("machines", (0.2,)): 0.5, doubt("network", (0.5,)): 0.5}
    costs = doubted(built.plan, built.costs, at)
    for op, cost in built.costs.of.items():
        other = costs.of[op]
        if isinstance(op, Forward | Backward):
            assert np.allclose(other.seconds, cost.seconds * math.exp(0.3))
        elif isinstance(op, COLLECTIVES):
            assert other.alone_s == pytest.approx(cost.alone_s * math.exp(0.5))
            assert other.transfers[0].alone_s(costs.capacity_Bps) == pytest.approx(other.alone_s)
        else:
            assert other is cost


def test_the_hosts_time_per_call_with_a_range_of_its_own_is_not_doubted_again():
    found = job()
    built = build(found, found.schedules[0])
    at = {doubt("network", (0.5,)): 0.5}
    stays_s = 1e-5
    costs = doubted(built.plan, built.costs, at, ranged_s=stays_s)
    for op, cost in built.costs.of.items():
        if isinstance(op, COLLECTIVES):
            assert costs.of[op].alone_s == pytest.approx(stays_s + (cost.alone_s - stays_s) * math.exp(0.5))


@pytest.mark.parametrize(
    ("path", "ends", "ranged_s"),
    [("collectives.overhead", "20 us, to: 40 us", 3e-5), ("network.efficiency", "90%, to: 98%", 0)],
)
def test_the_hosts_time_per_call_is_apart_only_where_it_has_a_range(path, ends, ranged_s):
    found = job(more=f", collectives: {{overhead: 30 us}}, uncertain: {{{path}: {{from: {ends}}}}}")
    assert ranged_overhead_s(found) == ranged_s
    without = found.cluster.model_copy(update={"uncertain": {}})
    of_scenario = {f"cluster.{each}": found.cluster.uncertain[each] for each in (path,)}
    assert ranged_overhead_s(found.changed(cluster=without, uncertain=of_scenario)) == ranged_s


def test_collectives_inside_machines_have_the_doubt_of_the_fabric():
    torus = job().changed(schedules=[{"kind": "torus"}])
    built = build(torus, torus.schedules[0])
    costs = doubted(built.plan, built.costs, {doubt("fabric", (1.0,)): 0.5})
    ratios = {
        round(costs.of[op].alone_s / cost.alone_s, 6)
        for op, cost in built.costs.of.items()
        if isinstance(op, COLLECTIVES)
    }
    assert ratios == {1.0, round(math.e, 6)}


def test_errors_of_computing_leave_a_ratio_alone_and_those_of_the_network_do_not():
    found = job(preset="v100x8-25gbit", nodes=4, more=", uncertain: {network.latency: {from: 30 us, to: 30.001 us}}")

    def rows(*doubts):
        measured = [
            draws.with_draws(found, built, measuring.measure(found, built, n_seeds=1), doubts=doubts)
            for built in (build(found, each) for each in found.schedules)
        ]
        return [comparison.row(each, measured[0]) for each in measured]

    def width(interval):
        return interval[1] / interval[0] - 1

    _, by_computing = rows(doubt("machine", (0.0, 0.3)))
    _, by_network = rows(doubt("network", (0.0, 0.3)))
    assert width(by_computing.step_s_range) > 0.2
    assert width(by_computing.speedup_range) < width(by_computing.step_s_range) / 2
    assert width(by_network.speedup_range) > width(by_network.step_s_range)


def test_the_largest_cause_is_named_with_its_measurement():
    from simdist.studies.uncertainty import causes

    sentence = causes(job(nodes=1), {"sync": {"doubt.machine": 0.8, "seeds": 0.1}})[0]
    assert "doubt.machine (errors of " in sentence
    assert "published rows, from one GPU to its machine, ampere single): measure samples/s of one machine" in sentence


def test_compare_shows_the_doubts_among_the_shares():
    (sync, _) = compare(job(nodes=1), n_seeds=1)
    assert {"doubt.machine", "doubt.fabric"} < sync.of(RANGES).keys()
    low_s, high_s = sync.step_s_range
    assert low_s <= sync.step_s < high_s


def test_published_distributions_rise_and_say_where_they_are_from():
    table = of_published_rows()
    assert {"source", "unit", "date"} < table.keys()
    entries = [*table["collectives"]["classes"].values()]
    entries += [entry for classes in table["training"].values() for entry in classes.values()]
    for entry in entries:
        assert entry["rows"] >= entry["families"] > 0
        assert all(np.all(np.diff(logs) >= 0) for logs in entry["logs"])


def test_interference_needs_no_range_to_count_and_an_imported_job_only_has_doubts_of_collectives():
    rate = "disturbances: [{kind: interference, machine_samples_per_s: 3900}]"
    assert names(job(more=", uncertain: {}", disturbances=rate)) == ["doubt.machines", "doubt.fabric", "doubt.network"]
    assert names(job().changed(imported={"step_s": 0.1, "error": 0.0})) == ["doubt.fabric", "doubt.network"]


def test_intervals_are_shown_if_the_first_row_alone_has_none():
    """The first row equals the baseline under another name: its speed-up has no variance."""
    text = TEXT.replace("[{{kind: sync}}", "[{{kind: sync, label: same}}, {{kind: sync}}")
    loaded = scenario.loads(text.format(preset="dgx-a100", nodes=2, more="", precision="", disturbances=""))
    compared = compare(loaded, n_seeds=2, baseline="sync")
    first, base, local = compared
    assert not first.of(RANGES)
    assert local.of(RANGES)
    assert base.step_s_range is not None
    assert "90 % intervals" in compared.title


READING = """
cluster:
  {CLUSTER, storage: {latency: 1 ms, bandwidth: RATE, source: SOURCE}, memory: {bandwidth: 10 GB/s, capacity: 9 GB}}
workload: {preset: resnet18, batch_size: 32, forward: 20 ms, backward: 40 ms, sample_size: 150 kB}
steps: 8
input: {source: storage, readers: 32DATA}
schedules: [{kind: sync}]
"""
FILES = ", data: {samples: 128, file_size: 100 kB, policy: memory}"


def reading(rate="1 GB/s", source="a data sheet", data="", cluster="preset: dgx-a100, nodes: 1, gpus_per_node: 2"):
    values = {"RATE": rate, "SOURCE": source, "DATA": data, "CLUSTER": cluster}
    text = READING
    for key, value in values.items():
        text = text.replace(key, value)
    return scenario.loads(text)


def test_samples_from_storage_have_two_doubts_unless_its_rates_are_measured_or_a_range():
    others = ["doubt.machine", "doubt.fabric"]
    assert names(reading()) == [*others, "doubt.storage", "doubt.input"]
    assert names(reading(source="'measured by real.calibrate: gloo'")) == [*others, "doubt.input"]
    base = reading()
    ranges = {"cluster.storage.bandwidth": {"from": "0.5 GB/s", "to": "2 GB/s"}}
    assert names(base.changed(uncertain=ranges)) == [*others, "doubt.input"]
    assert names(base.changed(input={"source": "memory"})) == others
    assert names(base.changed(imported={"step_s": 0.1, "error": 0.0})) == ["doubt.fabric"]
    assert names(reading(cluster="nodes: 1, gpus_per_node: 2, fabric: ideal, network: ideal")) == []


def step_s(found, *doubts):
    """Return the seconds of a step with doubts at their upper ends."""
    built = build(found, found.schedules[0])
    costs = doubted(built.plan, built.costs, dict.fromkeys(doubts, 1.0))
    return measuring.measure(found, replace(built, costs=costs), n_seeds=1, facets=()).step_s[0]


def test_an_error_of_storage_lengthens_steps_that_wait_for_it_and_one_of_the_input_the_others():
    double = math.log(2)
    ideal = "nodes: 1, gpus_per_node: 2, fabric: ideal, network: ideal"
    slow, fast = (reading(rate, cluster=ideal) for rate in ("20 MB/s", "9 GB/s"))
    storage, passes = doubt("storage", (0.0, double)), doubt("input", (0.0, double))
    assert step_s(slow, storage) == pytest.approx(2 * step_s(slow), rel=0.05)
    assert step_s(slow, passes) == pytest.approx(step_s(slow), rel=0.05)
    assert step_s(fast, storage) == pytest.approx(step_s(fast), rel=0.05)
    assert step_s(fast, passes) == pytest.approx(2 * step_s(fast), rel=0.05)


def test_loads_of_files_take_longer_in_the_epoch_that_reads_them_from_storage_and_in_no_other():
    """Two steps read all files; later ones find them in memory."""
    found = reading(data=FILES)
    built = build(found, found.schedules[0])
    costs = doubted(built.plan, built.costs, {doubt("storage", (math.log(3),)): 0.5})
    load = next(op for op in built.plan.bodies[0] if isinstance(op, Load))
    capacity_Bps = costs.capacity_Bps
    for number, factor in ((0, 3), (1, 3), (2, 1), (5, 1)):
        before, after = (each.of[load].transfers(number) for each in (built.costs, costs))
        for one, other in zip(before, after, strict=True):
            assert other.alone_s(capacity_Bps) == pytest.approx(factor * one.alone_s(capacity_Bps))


def test_compare_names_the_storage_where_it_is_the_largest_cause():
    found = reading("40 MB/s")
    (sync,) = compare(found, n_seeds=1)
    shares = sync.of(RANGES)
    assert max(shares, key=lambda name: shares[name]) == "doubt.storage"
    low_s, high_s = sync.step_s_range
    assert low_s < 0.9 * sync.step_s < 1.15 * sync.step_s < high_s
    from simdist.studies.uncertainty import causes

    (sentence,) = causes(found, {"sync": shares})
    assert "reading that takes longer than computing): measure MB/s and files/s of the storage" in sentence


SHARDED = """
cluster: {{preset: dgx-a100, nodes: {nodes}{more}}}
workload:
  transformer: {{layers: 4, hidden: 1024, heads: 8, vocabulary: 1000, sequence: 128}}
  batch_size: 1
  forward: {forward}
steps: 2
schedules: [{schedules}]
"""
BOTH = "{kind: fsdp}, {kind: hsdp, shard: 8}"


def sharded(nodes=8, more="", schedules=BOTH, forward="20 ms"):
    return scenario.loads(SHARDED.format(nodes=nodes, more=more, schedules=schedules, forward=forward))


def open_names(found):
    return {each.name for each in quantities(found)}


@pytest.mark.parametrize(
    ("more", "schedules", "nodes", "is_open"),
    [
        ("", BOTH, 8, True),
        ("", BOTH, 4, False),
        ("", "{kind: hsdp, shard: 8}", 8, False),
        ("", "{kind: sync}", 8, False),
        (", network: {ring_step: 20 us}", BOTH, 8, False),
        (", network: {ring_step: 0 us}", BOTH, 8, False),
        (", uncertain: {}", BOTH, 8, False),
        (", collectives: {library: gloo}", BOTH, 8, False),
    ],
)
def test_a_ring_step_that_nobody_measured_is_open_where_gathers_span_many_machines(more, schedules, nodes, is_open):
    assert (RING_STEP in open_names(sharded(nodes, more, schedules))) == is_open


def test_the_range_of_a_ring_step_names_the_gather_that_tells_it():
    (step,) = (each for each in quantities(sharded()) if each.name == RING_STEP)
    assert step.ends == pytest.approx((0, 80e-6))
    nbytes = 4 * (12 * 1024**2 + 13 * 1024)  # a block in float32
    measure = f"measure the time of an all-gather of {format_nbytes(nbytes)} over 64 GPUs, and over half of them"
    assert step.in_words.endswith(measure)


def test_whether_hsdp_is_faster_is_unclear_until_the_step_of_a_ring_is_known():
    found = compare(sharded(16), baseline="fsdp", n_seeds=1)
    low, high = found[1].speedup_range
    assert low < 1.02 < 1.2 < high
    (said,) = (str(each) for each in found.remarks if str(each).startswith("unclear"))
    assert said.startswith(
        "unclear whether hsdp-8 differs from fsdp by 2 % or more: measure the time of an all-gather "
    )
    measured = compare(sharded(16, ", network: {ring_step: 60 us}"), baseline="fsdp", n_seeds=1)
    assert measured[1].speedup_range[0] > 1
    assert not [each for each in measured.remarks if str(each).startswith("unclear")]


def test_the_doubt_grows_with_the_number_of_ranks():
    widths = []
    for nodes in (8, 32):
        base = compare(sharded(nodes, schedules="{kind: fsdp}"), n_seeds=1)[0]
        widths.append(base.step_s_range[1] - base.step_s)
    assert widths[1] > 3 * widths[0]


@pytest.mark.parametrize(
    ("schedules", "ranks", "lost", "expected"),
    [
        (BOTH, 8, True, "sharded"),
        (BOTH, 16, True, "sharded"),
        (BOTH, 8, False, "machines"),
        (BOTH, 4, True, "machines"),
        (f"{{kind: sync}}, {BOTH}", 8, True, "machines"),
        (BOTH, 64, True, ""),
    ],
)
def test_sharded_models_with_a_rate_of_whole_machines_have_a_doubt_of_their_own(schedules, ranks, lost, expected):
    workload = {"preset": "llama2-7b", "utilization": {"bf16": "40%"}, "utilization_ranks": ranks}
    found = scenario.load(
        {
            "cluster": {"preset": "dgx-a100", "nodes": 8},
            "workload": workload,
            "disturbances": [{"kind": "interference", "typical": True}] if lost else [],
            "schedules": scenario.loads(
                SHARDED.format(nodes=8, more="", schedules=schedules, forward="1 ms")
            ).schedules,
            "steps": 2,
        }
    )
    kinds = [each.kind for each in doubts_of(found) if each.kind in ("machines", "sharded")]
    assert kinds == [expected] * bool(expected)


def test_a_gpu_of_which_nothing_is_known_has_no_interval_and_says_so():
    def compared(device):
        return compare(job(preset="v100x8-25gbit", more=f", device: {{name: {device}}}"), n_seeds=2)

    unknown = compared("Gaudi 3")
    assert [row.step_s_range for row in unknown] == [None, None]
    assert any(
        "Gaudi 3: nothing published is about such GPUs, so there are no intervals" in str(each)
        for each in unknown.remarks
    )
    older = compared("Tesla P40")
    assert {each.kind: each.hardware for each in doubts_of(older.scenario)}["machine"] == "pascal single"
    low, high = older[0].step_s_range
    assert high / low > 1.1
    assert not any("no intervals" in str(each) for each in older.remarks)
