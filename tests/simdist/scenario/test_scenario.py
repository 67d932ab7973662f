"""Scenario files: good ones load and dump to equals; a broken one gives one clear error with file, line and path."""

# ruff: noqa: E501  (the tables are read row by row)

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from messages import assert_message

from simdist.errors import ScenarioError
from simdist.scenario import (
    Cluster,
    Device,
    DeviceOverride,
    Link,
    Scenario,
    TablePoint,
    Tensor,
    Transient,
    Workload,
    dump,
    load,
    load_cluster,
    loads,
    presets,
    strict_yaml,
)
from simdist.scenario.warnings import unstated, warnings_of
from simdist.schedules import kinds

DISTURBANCE = "{kind: transient, probability: 2%, delay: 1 s}"
NETWORK = "{latency: 25 us, bandwidth: 25 Gbit/s}"
TENSORS = """
    - {name: weight, count: 1000, flops: 1e6}
    - {name: bias, count: 10}
"""
GOOD = """\
cluster:
  nodes: 2
  gpus_per_node: 4
  fabric: ideal
  network: {latency: 25 us, bandwidth: 25 Gbit/s}
  device: {peak: 10 TFLOP/s}
workload:
  tensors:
    - {name: weight, count: 1000, flops: 1e6}
    - {name: bias, count: 10}
  batch_size: 32
  forward: 20 ms
steps: 100
seed: 1
disturbances:
  - {kind: transient, probability: 2%, delay: 1 s}
schedules:
  - kind: sync
  - {kind: local_sgd, period: 4}
"""


def edited(*edits):
    """Return GOOD with each text of a pair replaced by the other."""
    text = GOOD
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def message_of(text, **arguments):
    with pytest.raises(ScenarioError) as caught:
        loads(text, name="x.yaml", **arguments)
    return str(caught.value)


def test_one_pass_a_step_is_not_written():
    one, two = (loads(edited(("batch_size: 32", f"batch_size: 32\n  micro_batches: {n}"))) for n in (1, 2))
    assert dump(one) == dump(loads(GOOD))
    assert "micro_batches: 2" in dump(two)
    assert two.workload.samples_per_step == 64


def test_good_scenario_loads():
    scenario = loads(GOOD, name="folder/good.yaml")
    assert scenario.name == "good"
    assert scenario.cluster.world_size == 8
    assert scenario.cluster.fabric == Link.ideal()
    assert scenario.cluster.network.bandwidth_Bps == 3.125e9
    assert scenario.workload.tensor_counts == (1000, 10)
    assert scenario.workload.nbytes == 4040
    assert scenario.disturbances == (Transient(probability=0.02, delay_s=1.0),)
    assert [schedule.name for schedule in scenario.schedules] == ["sync", "local-4"]
    assert warnings_of(scenario) == ()


def test_scenario_written_in_python_equals_the_file():
    scenario = Scenario(
        name="good",
        cluster=Cluster(
            nodes=2,
            gpus_per_node=4,
            fabric=Link.ideal(),
            network=Link(latency_s=25e-6, bandwidth_Bps=3.125e9),
            device=Device(peak_flops=1e13),
        ),
        workload=Workload(
            tensors=(Tensor(name="weight", count=1000, flops=1e6), Tensor(name="bias", count=10)),
            batch_size=32,
            forward_s=0.02,
        ),
        steps=100,
        seed=1,
        disturbances=(Transient(probability=0.02, delay_s=1.0),),
        schedules=(kinds()["sync"](), kinds()["local_sgd"].model_validate({"period": 4})),
    )
    assert scenario == loads(GOOD, name="good.yaml")


def one_line(text: str) -> str:
    return " ".join(text.split())


# Edits of GOOD (old text, new text); the line and path of the problem.
BROKEN = [
    # values with units
    ("25 Gbit/s", "25 GBit", 5, "cluster.network.bandwidth"),
    ("25 Gbit/s", "25", 5, "cluster.network.bandwidth"),
    ("25 Gbit/s", "0 B/s", 5, "cluster.network.bandwidth"),
    ("latency: 25 us", "latency: 25 kB", 5, "cluster.network.latency"),
    ("forward: 20 ms", "forward: -20 ms", 12, "workload.forward"),
    ("forward: 20 ms", "forward: 20", 12, "workload.forward"),
    ("forward: 20 ms", "forward: .nan", 12, "workload.forward"),
    ("10 TFLOP/s", "10 TFLOPS", 6, "cluster.device.peak"),
    ("10 TFLOP/s", "0 TFLOP/s", 6, "cluster.device.peak"),
    ("probability: 2%", "probability: 2", 16, "disturbances[0].probability"),
    # other values
    ("nodes: 2", "nodes: 0", 2, "cluster.nodes"),
    ("nodes: 2", "nodes: 2.5", 2, "cluster.nodes"),
    ("nodes: 2", "nodes: true", 2, "cluster.nodes"),
    ("nodes: 2", "nodes:", 2, "cluster.nodes"),
    ("nodes: 2", "nodes: 1000000", 2, "cluster.nodes"),
    ("steps: 100", "steps: 0", 13, "steps"),
    ("steps: 100", "steps: many", 13, "steps"),
    ("seed: 1", "seed: -1", 14, "seed"),
    ("count: 1000", "count: 0", 9, "workload.tensors[0].count"),
    ("flops: 1e6", "flops: -1", 9, "workload.tensors[0].flops"),
    ("name: bias", "name: weight", 10, "workload.tensors[1].name"),
    ("name: bias", "name: 7", 10, "workload.tensors[1].name"),
    ("batch_size: 32", "dtype: fp32", 11, "workload.dtype"),
    # shapes
    ("  fabric: ideal", "  fabric: fast", 4, "cluster.fabric"),
    (DISTURBANCE, "transient", 16, "disturbances[0]"),
    ("  - {kind: transient, probability: 2%, delay: 1 s}", "  kind: x", 15, "disturbances"),
    ("  - kind: sync\n  - {kind: local_sgd, period: 4}", "  []", 17, "schedules"),
    # keys
    ("gpus_per_node: 4", "gpus_per_nod: 4", 3, "cluster.gpus_per_nod"),
    ("latency: 25 us", "latency_s: 25 us", 5, "cluster.network.latency_s"),
    ("latency: 25 us, ", "", 5, "cluster.network.latency"),
    ("  gpus_per_node: 4\n", "", 1, "cluster.gpus_per_node"),
    ("steps: 100\n", "", 1, "steps"),
    ("seed: 1", "seed: 1\nseed: 2", 15, "seed"),
    ("seed: 1", "7: 1", 14, "[7]"),
    # kinds
    ("kind: transient", "kind: transiet", 16, "disturbances[0].kind"),
    ("kind: transient, ", "", 16, "disturbances[0].kind"),
    ("kind: local_sgd", "kind: localsgd", 19, "schedules[1].kind"),
    ("delay: 1 s", "dela: 1 s", 16, "disturbances[0].dela"),
    # settings that do not fit each other
    ("delay: 1 s", "delay: 1 s, ranks: [0, 8]", 16, "disturbances[0].ranks[1]"),
    ("delay: 1 s", "delay: 1 s, nodes: [2]", 16, "disturbances[0].nodes[0]"),
    ("delay: 1 s", "delay: 1 s, nodes: [1], ranks: [1]", 16, "disturbances[0].nodes"),
    ("steps: 100", "steps: 100\ninput: {source: storage}", 14, "input.source"),
    ("steps: 100", "steps: 100\ninput: {source: memory}", 14, "input.source"),
    ("  forward: 20 ms\n", "", 7, "workload.forward"),
    ("peak: 10 TFLOP/s}", "}\n  slow_devices: [{ranks: [9], speed: 0.5}]", 7, "cluster.slow_devices[0].ranks[0]"),
    ("peak: 10 TFLOP/s}", "}\n  slow_devices: [{speed: 0.5}]", 7, "cluster.slow_devices[0].ranks"),
    ("kind: local_sgd, period: 4", "kind: sync", 19, "schedules[1].label"),
    ("period: 4", "period: 0", 19, "schedules[1].period"),
    ("kind: local_sgd, period: 4", "kind: hierarchical_sgd, levels: {2: 3, 4: 8}", 19, "schedules[1].levels"),
    ("steps: 100", "steps: 100\ncheckpoint: {every: 10, what: state}", 14, "checkpoint.to"),
    ("steps: 100", "steps: 100\ncheckpoint: {every: 10, what: state, to: disk}", 14, "checkpoint.to"),
    ("steps: 100", "steps: 100\ncheckpoint: {every: 10, to: disk}", 14, "checkpoint.what"),
    ("steps: 100", "steps: 100\ncheckpoint: {every: 10, what: state, size: 2 GB}", 14, "checkpoint.what"),
    ("steps: 100", "steps: 100\ncheckpoint: {every: 0, what: state}", 14, "checkpoint.every"),
    ("steps: 100", "steps: 100\ncheckpoint: {every: 10, what: model}", 14, "checkpoint.what"),
    ("steps: 100", "steps: 100\ncheckpoint: {every: 10, size: 0 B}", 14, "checkpoint.size"),
    ("steps: 100", "steps: 100\ncheckpoint: {what: state}", 14, "checkpoint.every"),
    # presets and files
    ("  forward: 20 ms", "  preset: resnet19", 12, "workload.preset"),
    (TENSORS, " []\n  tensors_file: a.csv\n", 9, "workload.tensors_file"),
    ("probability: 2%, ", "", 16, "disturbances[0].probability"),
    (DISTURBANCE, "{kind: recorded, file: none.csv}", 16, "disturbances[0].file"),
    (DISTURBANCE, "{kind: recorded, file: none.txt}", 16, "disturbances[0].file"),
    (DISTURBANCE, "{kind: persistent}", 16, "disturbances[0].factor"),
    (DISTURBANCE, "{kind: bursts, enter: 0, leave: 0, delay: 1 s}", 16, "disturbances[0].enter"),
    (DISTURBANCE, "{kind: jitter, median: 1 s, sigma: wide}", 16, "disturbances[0].sigma"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line", "path"), BROKEN, ids=[f"{row[3]}:{row[1][:40]}" for row in BROKEN])
def test_broken_value_is_named_with_its_line_and_path(old, new, line, path):
    found = message_of(edited((old, new)))
    assert any(row.startswith(f"x.yaml:{line}: {path}: ") for row in found.splitlines()), found
    assert_message(f"scenario: {path}: {one_line(old)} -> {one_line(new) or 'nothing'}", found, Path.cwd())


# Whole files: the start of the error, and what it says besides.
BROKEN_FILES = [
    ("", "x.yaml:1: is empty, not a scenario: write cluster, workload, steps and schedules"),
    ("# nothing\n", "x.yaml:1: is empty"),
    ("- 1\n- 2", "x.yaml:1: [1, 2] is not a scenario: write cluster"),
    ("just text", "x.yaml:1: 'just text' is not a scenario"),
    ("a: [1", "x.yaml:1: not YAML: "),
    ("cluster:\n\tnodes: 2", "x.yaml:2: a tab in the indentation: indent with spaces"),
    ("cluster: " + "[" * 900, "x.yaml:1: cluster[0][0]: nested more than 50 levels deep"),
    ("cluster: ideel\n", "x.yaml:1: cluster: unknown preset 'ideel': did you mean 'ideal'?"),
    ("cluster: &x [*x]", "x.yaml:1: cluster[0]: *x has no anchor &x before it"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN_FILES, ids=[row[1][:50] for row in BROKEN_FILES])
def test_broken_file_is_one_clear_error(text, message):
    assert message_of(text).startswith(message)


def test_every_problem_is_reported_from_top_to_bottom():
    text = edited(
        ("nodes: 2", "nodes: none"),
        ("latency: 25 us", "latency: 25"),
        ("count: 10}", "count: ten}"),
        ("seed: 1", "seed: 1\nseed: 2"),
        ("period: 4", "period: 0"),
    )
    starts = [re.match(r"x\.yaml:(\d+): (\S+): ", line).groups() for line in message_of(text).splitlines()]
    assert starts == [
        ("2", "cluster.nodes"),
        ("5", "cluster.network.latency"),
        ("10", "workload.tensors[1].count"),
        ("15", "seed"),
        ("20", "schedules[1].period"),
    ]


def test_problems_across_settings_are_reported_beside_others():
    text = edited(("delay: 1 s", "delay: 1 s, ranks: [8]"), ("steps: 100", "steps: 0"), ("kind: sync", "kind: snyc"))
    assert len(message_of(text).splitlines()) == 3


def test_very_many_problems_are_cut_short():
    ranks = ", ".join(["9"] * 500)
    lines = message_of(edited(("delay: 1 s", f"delay: 1 s, ranks: [{ranks}]"))).splitlines()
    assert len(lines) == 101
    assert lines[-1] == "x.yaml: and 400 more"


def test_long_values_are_shortened():
    assert all(len(line) < 250 for line in message_of(edited(("nodes: 2", f"nodes: {'x' * 10_000}"))).splitlines())


@pytest.mark.parametrize(
    ("table", "path"),
    [
        ("[{size: 1 kB, time: 9 us}]", "table"),
        ("[{size: 1 kB, time: 0}, {size: 2 kB, time: 9 us}]", "table[0].time"),
        ("[{size: 2 kB, time: 9 us}, {size: 2 kB, time: 9 us}]", "table[1].size"),
        ("[{size: 1 kB, time: 9 us}, {size: 2 kB, time: 8 us}]", "table[1].time"),
        ("[{size: 1 kB, time: 9}, {size: 2 kB, time: 9 us}]", "table[0].time"),
        ("[{size: 1 kB}, {size: 2 kB, time: 9 us}]", "table[0].time"),
        ("[{size: 1 kB, tme: 0}, {size: 2 kB, time: 9 us}]", "table[0].tme"),
        ("[3, 4]", "table[0]"),
    ],
)
def test_broken_table_of_a_link_is_refused(table, path):
    found = message_of(edited((NETWORK, f"{{table: {table}}}")))
    assert any(row.startswith(f"x.yaml:5: cluster.network.{path}: ") for row in found.splitlines()), found
    assert_message(f"scenario: table of a link: {table}", found)


def test_table_of_a_link_stands_alone():
    table = "table: [{size: 1 kB, time: 9 us}, {size: 2 kB, time: 9 us}]"
    points = loads(edited((NETWORK, f"{{{table}}}"))).cluster.network.table
    assert points == (TablePoint(nbytes=1000, time_s=9e-6), TablePoint(nbytes=2000, time_s=9e-6))
    message = message_of(edited((NETWORK, f"{{{table}, efficiency: 0.5}}")))
    assert "x.yaml:5: cluster.network.efficiency: 'efficiency' has no meaning beside a table" in message


def test_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"name: a\nsource: \xff\n")
    with pytest.raises(ScenarioError, match=r"x\.yaml:2: byte 0xff is not UTF-8: save the file as UTF-8"):
        load(tmp_path / "x.yaml")


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(ScenarioError, match="cannot be read"):
        load(tmp_path / name)


def test_files_are_relative_to_the_scenario(tmp_path):
    (tmp_path / "tensors.csv").write_text("# a comment\nname,count,flops\nweight,1000,1e6\nbias,10,0\n")
    (tmp_path / "delays.csv").write_text("\n".join(["0,0.5,0,0,0,0,0,0"] * 100))
    text = edited(
        (f"tensors:{TENSORS}", "tensors_file: tensors.csv\n"),
        (DISTURBANCE, "{kind: recorded, file: delays.csv}"),
    )
    (tmp_path / "x.yaml").write_text(text)
    scenario = load(tmp_path / "x.yaml")
    assert scenario.workload.tensor_counts == (1000, 10)
    assert scenario.name == "x"
    assert loads(dump(scenario)) == scenario


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name,size\n", "begins with 'name,size': write name,count,flops"),
        ("", "begins with '': write name,count,flops"),
        ("name,count,flops\nw,ten,0\n", "x.csv:2: count: 'ten' is not a whole number"),
        ("# c\nname,count,flops\n\nw\n", "x.csv:4: has 1 columns, the first line 3: is it cut?"),
        ("name,count,flops\nw,1e30,0\n", "x.csv:2: count: 1e+30: write at most 1000000000000000"),
        ("name,count,flops\nw,1_000,0\n", "x.csv:2: count: '1_000' is not a whole number"),
        ("name,count,flops\nw,10,inf\n", "x.csv:2: flops: 'inf': should be a finite number"),
        ("name,count,flops\nw,10\n", "x.csv:2: has 2 columns, the first line 3"),
        ("name,count,flops\nw,10,0,5\n", "x.csv:2: has 4 columns, the first line 3"),
    ],
)
def test_broken_tensors_file_is_named_with_its_line(tmp_path, content, message):
    (tmp_path / "x.csv").write_text(content)
    text = "workload: {tensors_file: x.csv, batch_size: 1, forward: 1 ms}"
    found = message_of(text, folder=tmp_path).splitlines()
    assert any(row.startswith("x.yaml:1: workload.tensors_file: ") and message in row for row in found), found


def test_recording_that_is_too_short_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", np.zeros((99, 8)))
    text = edited((DISTURBANCE, "{kind: recorded, file: x.npz}"))
    assert message_of(text, folder=tmp_path) == (
        "x.yaml:16: disturbances[0].file: x.npz holds 99 steps, the run has 100: record as many, or write "
        "resample_steps, e.g. 19"
    )


def test_preset_is_overridden_key_by_key():
    text = """\
cluster:
  preset: gcp-t4x4-32gbit
  nodes: 3
  network: {bandwidth: 10 Gbit/s}
workload: {preset: resnet18, batch_size: 7, forward: 1 ms}
steps: 1
schedules: [{kind: sync}]
"""
    original = load_cluster(presets.path("clusters", "gcp-t4x4-32gbit"))
    scenario = loads(text)
    assert scenario.cluster == original.model_copy(
        update={"nodes": 3, "network": original.network.model_copy(update={"bandwidth_Bps": 1.25e9})}
    )
    assert scenario.workload.batch_size == 7
    assert sum(scenario.workload.tensor_counts) == 11_689_512


def test_one_of_two_rival_keys_replaces_the_other_of_a_preset():
    text = "workload: {preset: resnet18, tensors: [{name: w, count: 5}], forward: 1 ms}\n"
    text += "cluster: {preset: gcp-t4x4-32gbit, network: {table: [{size: 1 B, time: 1 s}, {size: 2 B, time: 1 s}]}}\n"
    scenario = loads(text + "steps: 1\nschedules: [{kind: sync}]\n")
    assert scenario.workload.tensor_counts == (5,)
    assert scenario.cluster.network.table is not None


def test_problem_below_a_preset_is_at_the_line_that_overrides():
    text = "workload: resnet18\nsteps: 1\nschedules: [{kind: sync}]\ncluster:\n  preset: ideal\n  device: {speed: 0}\n"
    assert message_of(text) == (
        "x.yaml:6: cluster.device.speed: 0 is not a factor: write a finite number above 0, e.g. 1.5"
    )


def test_anchors_share_values():
    text = edited(("fabric: ideal", "fabric: &link {latency: 1 us, bandwidth: 1 GB/s}"), (NETWORK, "*link"))
    assert loads(text).cluster.network == loads(text).cluster.fabric


@pytest.mark.parametrize("cluster", presets.names("clusters"))
def test_dumped_scenario_loads_to_an_equal_one_without_presets(cluster):
    text = f"cluster: {cluster}\nworkload: resnet18\nsteps: 7\nhost: {{run_ahead_steps: null}}\nschedules: [{{kind: sync}}]\n"
    text += "disturbances: [{kind: jitter, median: 1 ms, sigma: 0.3}]\n" if cluster != "ideal" else ""
    if "peak" not in presets.path("clusters", cluster).read_text():
        text = text.replace("resnet18", "{preset: resnet18, forward: 3 ms}")
    scenario = loads(text, name="round.yaml")
    assert "preset:" not in dump(scenario)
    assert loads(dump(scenario), name="elsewhere.yaml") == scenario
    assert dump(loads(dump(scenario))) == dump(scenario)


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        ("steps: 100", "steps: 100\ninput: {copy: pageable}", "input.copy has no effect: with input.source device"),
        ("steps: 100", "steps: 100\ninput: {prefetch: 4}", "input.prefetch has no effect: with input.source device"),
        (NETWORK, f"{NETWORK}\n  storage: {{latency: 1 ms, bandwidth: 1 GB/s}}", "cluster.storage has no effect"),
        (NETWORK, f"{NETWORK}\n  disk: {{read: 1 GB/s, write: 1 GB/s}}", "cluster.disk has no effect"),
        (
            "steps: 100",
            "steps: 100\ncheckpoint: {every: 101, size: 1 B}",
            "checkpoint has no effect: none is due within",
        ),
        ("forward: 20 ms", "forward: 20 ms\n  utilization: 50%", "workload.utilization has no effect"),
        ("delay: 1 s", "delay: 1 s, on: io", "disturbances[0] has no effect: it is on io"),
        ("delay: 1 s", "delay: 0", "disturbances[0] has no effect: it never delays"),
        ("probability: 2%", "probability: 0", "disturbances[0] has no effect: it never delays"),
        ("transient, probability: 2%, delay: 1 s", "persistent, delay: 1 s", "seed has no effect: nothing is random"),
        ("nodes: 2", "nodes: 1\n  topology: {oversubscription: 2}", "cluster.topology.oversubscription has no effect"),
    ],
)
def test_setting_without_effect_warns(old, new, warning):
    storage = () if NETWORK in old else ((NETWORK, f"{NETWORK}\n  storage: {{latency: 1 ms, bandwidth: 1 GB/s}}"),)
    edits = ((old, new), *(storage if "checkpoint" in new else ()))
    (found,) = warnings_of(loads(edited(*edits)))
    assert found.startswith(warning)


def test_one_domain_sends_nothing_through_a_switch():
    together = edited(("nodes: 2", "nodes: 2\n  topology: {nodes_per_domain: 2, oversubscription: 2}"))
    [found] = warnings_of(loads(together))
    assert found.startswith(
        "cluster.topology.oversubscription has no effect: one domain of 2 nodes sends nothing through"
    )
    assert warnings_of(loads(together.replace("nodes_per_domain: 2", "nodes_per_domain: 1"))) == ()
    apart = loads(together).changed(schedules=[{"kind": "parameter_server", "servers": 1, "apart": True}])
    assert warnings_of(apart) == ()


@pytest.mark.parametrize("shape", ["nodes: 1\n  topology: {NICS}", "nodes: 2\n  topology: {nodes_per_domain: 2, NICS}"])
def test_machines_may_have_nics_that_one_domain_does_not_use(shape):
    assert warnings_of(loads(edited(("nodes: 2", shape.replace("NICS", "nics_per_node: 2"))))) == ()


def test_network_that_one_domain_does_not_use_need_not_be_stated():
    scenario = loads(edited(("nodes: 2", "nodes: 2\n  topology: {nodes_per_domain: 2}")))
    assert unstated(scenario.cluster, scenario.schedules) == []
    assert len(unstated(loads(edited()).cluster, scenario.schedules)) == 1


@pytest.mark.parametrize("level", ["storage: {latency: 0 s, bandwidth: 1 GB/s}", "disk: {read: 1 GB/s, write: 1 GB/s}"])
def test_what_checkpoints_are_written_to_does_not_warn(level):
    saved = f"steps: 100\ncheckpoint: {{every: 100, what: state, to: {level.split(':')[0]}}}"
    assert warnings_of(loads(edited((NETWORK, f"{NETWORK}\n  {level}"), ("steps: 100", saved)))) == ()


def test_storage_of_a_preset_does_not_warn():
    name = next(name for name in presets.names("clusters") if "storage:" in presets.path("clusters", name).read_text())
    text = f"cluster: {name}\nworkload: resnet18\nsteps: 1\nschedules: [{{kind: sync}}]\n"
    assert warnings_of(loads(text)) == ()


def test_device_speed_multiplies_the_overrides():
    cluster = Cluster(
        nodes=2,
        gpus_per_node=2,
        fabric=Link.ideal(),
        network=Link.ideal(),
        device=Device(speed=2.0),
        slow_devices=(DeviceOverride(nodes=(1,), speed=0.5), DeviceOverride(ranks=(3, 3), speed=0.5)),
    )
    assert cluster.device_speed().tolist() == [2.0, 2.0, 1.0, 0.5]
    assert math.isinf(cluster.fabric.bandwidth_Bps)


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ScenarioError, match="unknown preset 'ideel' of clusters: did you mean 'ideal'"):
        presets.path("clusters", "ideel")
    assert presets.path("clusters", "ideal").is_file()


tree = strict_yaml.parse(GOOD).root
values = st.sampled_from([None, True, 0, -1, 2**63, 1e308, "x", "5 ms", "1 GB/s", "2%", [], {}, [[]], {"kind": "sync"}])
values |= st.text(max_size=5) | st.floats() | st.integers()


@st.composite
def mutated_trees(draw):
    """Draw GOOD with values replaced, keys renamed and items removed at random places."""

    def mutate(value):
        if draw(st.integers(0, 9)) == 0:
            return draw(values)
        if isinstance(value, dict):
            return {draw(st.sampled_from([key] * 9 + ["x"])): mutate(item) for key, item in value.items()}
        return [mutate(item) for item in value] if isinstance(value, list) else value

    return mutate(tree)


def assert_loads_or_refuses(text):
    try:
        scenario = loads(text)
    except ScenarioError:
        return
    assert loads(dump(scenario)) == scenario


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(mutated_trees())
def test_any_structure_loads_or_is_refused_with_a_scenario_error(value):
    assert_loads_or_refuses(strict_yaml.dump(value))


@settings(deadline=None)
@given(
    st.text() | st.builds(lambda at, text: GOOD[:at] + text + GOOD[at:], st.integers(0, len(GOOD)), st.text(max_size=9))
)
@example("[" * 5000 + "]" * 5000)
@example("? " * 5000)
@example("cluster: {nodes: " + "9" * 10_000 + "}")
@example("workload: {tensors_file: '\\0', batch_size: 1}")
def test_any_text_loads_or_is_refused_with_a_scenario_error(text):
    assert_loads_or_refuses(text)


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        ("{kind: local_sgd, period: 1000}", "schedules[0] (local-1000) never averages over all ranks in 100 steps"),
        ("{kind: local_sgd, period: 4, warmup_steps: 100}", "schedules[0] (local-4) warms up in all of the 100 steps"),
        ("{kind: hierarchical_sgd, levels: {2: 2, 1000: world}}", "never averages over all ranks in 100 steps"),
    ],
)
def test_schedule_that_never_does_its_job_is_warned_of(schedule: str, sentence: str) -> None:
    text = f"""
cluster: {{nodes: 2, gpus_per_node: 2, fabric: ideal, network: ideal}}
workload: {{preset: resnet18, forward: 20 ms}}
schedules: [{schedule}]
steps: 100
"""
    assert any(sentence in warning for warning in warnings_of(loads(text)))


@pytest.mark.parametrize("label", ["..", ".hidden", "-x", "a/b", " ", "\u202egnp", "x" * 101])
def test_label_that_is_no_name_of_a_folder_is_refused_with_its_line(label: str) -> None:
    text = f"""
cluster: {{nodes: 1, gpus_per_node: 2, fabric: ideal, network: ideal}}
workload: {{preset: resnet18, forward: 20 ms}}
schedules: [{{kind: sync, label: {json.dumps(label)}}}]
steps: 100
"""
    with pytest.raises(ScenarioError, match=r"x.yaml:4: schedules\[0\].label: label .* such as local-4"):
        loads(text, name="x.yaml")


def test_halving_on_a_world_that_is_no_power_of_two_is_refused_with_its_line() -> None:
    text = """
cluster: {nodes: 3, gpus_per_node: 2, fabric: ideal, network: ideal}
workload: {preset: resnet18, forward: 20 ms}
schedules: [{kind: sync, algorithm: halving_doubling}]
steps: 100
"""
    with pytest.raises(
        ScenarioError, match=r"x.yaml:4: schedules\[0\].algorithm: halving_doubling needs a power of two"
    ):
        loads(text, name="x.yaml")


@pytest.mark.parametrize(("schedule", "says"), [("{kind: powersgd, rank: 2}", "orthonormalize"), ("{kind: sync}", "")])
def test_low_rank_factors_on_a_device_that_states_no_time_for_them_are_doubtful(schedule: str, says: str) -> None:
    found = loads(f"""
        cluster: {{nodes: 1, gpus_per_node: 2, fabric: ideal, network: ideal}}
        workload: {{tensors: [{{name: all, count: 100, rows: 10}}], batch_size: 1, forward: 1 s, backward: 1 s}}
        schedules: [{schedule}]
        steps: 2
    """)
    assert [says in each for each in unstated(found.cluster, found.schedules)] == [True] * bool(says)
    measured = found.cluster.device.model_copy(update={"orthonormalize_s": 1e-5})
    assert not unstated(found.cluster.model_copy(update={"device": measured}), found.schedules)
