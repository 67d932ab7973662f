"""Clusters and workloads in files of their own: overridden like presets, wrong values named with file and line."""

import pytest
from commandline import SMALL, call, edited, write

from simdist import scenario
from simdist.errors import ScenarioError
from simdist.runs import run_directory
from simdist.scenario import (
    Cluster,
    Device,
    DeviceOverride,
    Link,
    Storage,
    dump_cluster,
    dump_workload,
    load,
    load_cluster,
    load_workload,
    presets,
)
from simdist.scenario.warnings import warnings_of

CLUSTER = """\
name: two machines
nodes: 2
gpus_per_node: 4
fabric: ideal
network: {latency: 25 us, bandwidth: 25 Gbit/s}
"""
WORKLOAD = """\
tensors_file: tensors.csv
batch_size: 32
forward: 20 ms
"""
REST = """\
steps: 12
schedules:
  - kind: sync
"""
INLINE = SMALL[: SMALL.index("workload:")]


@pytest.fixture
def folder(tmp_path):
    """A folder with a cluster, and with a workload whose tensors are beside it in a folder below."""
    (tmp_path / "models").mkdir()
    write(tmp_path / "cluster.yaml", CLUSTER)
    write(tmp_path / "models" / "net.yaml", WORKLOAD)
    write(tmp_path / "models" / "tensors.csv", "name,count,flops\nweight,1000,0\nbias,10,0\n")
    return tmp_path


def scenario_of(folder, cluster="{file: cluster.yaml}", workload="{file: models/net.yaml}"):
    return write(folder / "s.yaml", f"cluster: {cluster}\nworkload: {workload}\n{REST}")


def problems(path):
    with pytest.raises(ScenarioError) as caught:
        load(path)
    return str(caught.value).splitlines()


def test_files_stand_for_what_they_hold(folder):
    found = load(scenario_of(folder))
    assert found.cluster == load_cluster(folder / "cluster.yaml")
    assert found.workload == load_workload(folder / "models" / "net.yaml")
    assert (found.cluster.world_size, found.workload.tensor_counts) == (8, (1000, 10))


def test_keys_beside_the_file_override_it_and_mappings_are_merged(folder):
    found = load(scenario_of(folder, "{file: cluster.yaml, nodes: 4, network: {latency: 50 us}}")).cluster
    assert (found.nodes, found.gpus_per_node) == (4, 4)
    assert (found.network.latency_s, found.network.bandwidth_Bps) == (50e-6, 25e9 / 8)


def test_table_beside_the_file_replaces_its_line(folder):
    table = "{table: [{size: 0 B, time: 1 us}, {size: 1 MB, time: 1 ms}]}"
    found = load(scenario_of(folder, f"{{file: cluster.yaml, network: {table}}}")).cluster
    assert found.network.table[1].time_s == 1e-3


def test_tensors_beside_the_file_replace_its_tensors_file(folder):
    found = load(scenario_of(folder, workload="{file: models/net.yaml, tensors: [{name: all, count: 7}]}"))
    assert found.workload.tensor_counts == (7,)


def test_files_are_found_from_any_folder(folder, monkeypatch):
    scenario_of(folder)
    absolute = load(folder / "s.yaml")
    monkeypatch.chdir(folder.parent)
    relative = load(f"{folder.name}/s.yaml")
    monkeypatch.chdir(folder / "models")
    assert absolute == relative == load("../s.yaml")


def test_file_without_settings_of_its_own_gives_no_warnings(folder):
    write(folder / "cluster.yaml", f"{CLUSTER}storage: {{latency: 1 ms, bandwidth: 1 GB/s}}\n")
    assert warnings_of(load(scenario_of(folder))) == ()
    path = scenario_of(folder, "{file: cluster.yaml, storage: {latency: 2 ms}}")
    assert warnings_of(load(path)) == ("cluster.storage has no effect: with input.source device nothing reads from it",)


def test_file_in_python_is_relative_to_the_working_directory(folder, monkeypatch):
    found = load(scenario_of(folder))
    monkeypatch.chdir(folder)
    assert found.changed(cluster={"file": "cluster.yaml", "nodes": 1}).cluster.world_size == 4


# Wrong files


def test_problems_in_the_file_are_named_with_both_files_and_lines(folder):
    write(folder / "cluster.yaml", CLUSTER.replace("nodes: 2", "nodes: two").replace("25 us", "25"))
    path = scenario_of(folder)
    where = f"{path}:1: cluster.file: {folder / 'cluster.yaml'}"
    assert problems(path) == [
        f"{where}:2: nodes: 'two' is not a whole number: write e.g. 8",
        f"{where}:5: network.latency: 25: a time needs a unit: write e.g. 55 ms",
    ]


def test_problems_of_the_overriding_keys_are_those_of_the_scenario(folder):
    path = write(folder / "s.yaml", f"cluster:\n  file: cluster.yaml\n  nodes: 0\nworkload: resnet18\n{REST}")
    assert problems(path) == [f"{path}:3: cluster.nodes: 0: write at least 1"]


def test_tensors_file_may_state_rows(folder):
    tensors = folder / "models" / "tensors.csv"
    write(tensors, "name,count,flops,rows\nweight,1000,0,25\nbias,10,0,10\n")
    path = scenario_of(folder)
    found = load(path).workload
    assert (found.tensor_counts, found.tensor_rows) == ((1000, 10), (25, 10))
    assert load_workload(write(folder / "written.yaml", dump_workload(found))) == found
    write(tensors, "name,count,flops,rows\nweight,1000,0,30\n")
    (problem,) = problems(path)
    assert "tensors.csv" in problem
    assert "30 do not divide 1000 elements: write its first dimension" in problem


def test_powersgd_wants_to_know_the_rows(folder):
    path = write(scenario_of(folder), scenario_of(folder).read_text().replace("kind: sync", "kind: powersgd"))
    (problem,) = problems(path)
    assert problem.endswith(
        "powersgd: no tensor of the workload states its rows: write e.g. {name: weight, count: 1000, rows: 10}"
    )


def test_problem_of_a_tensors_file_is_named_through_all_files(folder):
    write(folder / "models" / "tensors.csv", "name,count,flops\nweight,none,0\n")
    path = scenario_of(folder)
    (problem,) = problems(path)
    assert problem.startswith(f"{path}:2: workload.file: {folder / 'models' / 'net.yaml'}:1: tensors_file: ")
    assert "tensors.csv:2: count: 'none'" in problem


def test_every_problem_is_reported_beside_those_of_a_file(folder):
    write(folder / "cluster.yaml", CLUSTER.replace("nodes: 2", "nodes: 0"))
    path = write(folder / "s.yaml", f"cluster: {{file: cluster.yaml}}\nworkload: resnet19\n{REST}seed: x\n")
    assert [line.split(": ")[1] for line in problems(path)] == ["cluster.file", "workload", "seed"]


REFUSED = {
    "no such file": ("{file: none.yaml}", "cluster.file", "none.yaml: there is no such file: write the name"),
    "a folder": ("{file: models}", "cluster.file", "models: is no regular file"),
    "a number": ("{file: 3}", "cluster.file", "3 is not a file: write e.g. cluster.yaml"),
    "nothing": ("{file: }", "cluster.file", "null is not a file"),
    "empty text": ("{file: ''}", "cluster.file", "'' is not a file"),
    "a preset, too": ("{file: cluster.yaml, preset: ideal}", "cluster.preset", "'preset' beside 'file': write one"),
    "the name alone": ("cluster.yaml", "cluster", "if that is a file, write {file: cluster.yaml}"),
    "a file as preset": ("{preset: a.yml}", "cluster.preset", "if that is a file, write {file: a.yml}"),
    "a workload": ("{file: models/net.yaml}", "cluster.file", "net.yaml:1: tensors_file: unknown key 'tensors_file'"),
}  # fmt: skip


@pytest.mark.parametrize(("cluster", "key", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_name_of_a_file_is_refused(folder, cluster, key, message):
    path = scenario_of(folder, cluster)
    found = problems(path)
    assert any(line.startswith(f"{path}:1: {key}: ") and message in line for line in found), found


CONTENTS = {
    "nothing": (b"", ":1: is empty, not a cluster: write nodes"),
    "a list": (b"- 1\n", ":1: [1] is not a cluster: write nodes"),
    "no YAML": (b"a: [1", ":1: not YAML"),
    "binary": (b"nodes: 1\n\xff", ":2: byte 0xff is not UTF-8"),
    "a preset": (b"preset: ideal\n", ":1: preset: unknown key 'preset'"),
    "half a cluster": (b"nodes: 1\n", ":1: gpus_per_node: required key 'gpus_per_node' is missing"),
    "a scenario": (INLINE.encode(), ":1: cluster: unknown key 'cluster'"),
    "a key twice": (b"nodes: 1\nnodes: 2\n", ":2: nodes: duplicate key 'nodes'"),
}


@pytest.mark.parametrize(("content", "message"), CONTENTS.values(), ids=CONTENTS)
def test_file_that_is_no_cluster_is_refused(folder, content, message):
    file = folder / "cluster.yaml"
    file.write_bytes(content)
    with pytest.raises(ScenarioError) as caught:
        load_cluster(file)
    assert f"{file}{message}" in str(caught.value)
    path = scenario_of(folder)
    assert f"{path}:1: cluster.file: {file}{message}" in "\n".join(problems(path))


def test_file_that_is_no_workload_is_refused(folder):
    write(folder / "models" / "net.yaml", "batch_size: 3\n")
    with pytest.raises(ScenarioError, match=r"net\.yaml:1: tensors: required key 'tensors' is missing"):
        load_workload(folder / "models" / "net.yaml")


def test_missing_file_cannot_be_loaded(tmp_path):
    with pytest.raises(ScenarioError, match=r"none\.yaml: cannot be read: No such file"):
        load_cluster(tmp_path / "none.yaml")


def test_command_line_refuses_a_wrong_file(folder, capsys):
    write(folder / "cluster.yaml", CLUSTER.replace("25 Gbit/s", "25 GBps"))
    answer = call(capsys, "simulate", scenario_of(folder))
    assert (answer.code, answer.out) == (2, "")
    assert "s.yaml:1: cluster.file: " in answer.err
    assert "cluster.yaml:5: network.bandwidth: '25 GBps'" in answer.err


# Writing


CLUSTERS = {
    **{name: load_cluster(presets.path("clusters", name)) for name in presets.names("clusters")},
    "everything": Cluster(
        name="measured: 3 machines # really",
        source="line one\nline two",
        nodes=3,
        gpus_per_node=2,
        fabric=Link(latency_s=1.2345678901234567e-6, bandwidth_Bps=1e11 / 3, efficiency=0.7),
        network=Link(table=((0, 1e-5), (1000, 1.1e-5), (10**9, 1 / 3))),
        topology={"nics_per_node": 2, "host_bridge_Bps": 12e9, "oversubscription": 1.5},
        collectives={"library": "gloo"},
        device=Device(name="cpu", memory_bandwidth_Bps=1e10 / 7, peak_flops={"fp32": 1e12 / 3}, speed=0.9),
        slow_devices=(DeviceOverride(nodes=(1,), speed=0.3),),
        storage=Storage(latency_s=1e-3, bandwidth_Bps=1e9),
    ),
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_cluster_that_is_written_loads_as_an_equal_one(tmp_path, cluster):
    assert load_cluster(write(tmp_path / "c.yaml", dump_cluster(cluster))) == cluster


@pytest.mark.parametrize("name", presets.names("workloads"))
def test_workload_that_is_written_loads_as_an_equal_one_without_its_tensors_file(tmp_path, name):
    workload = load_workload(presets.path("workloads", name))
    assert load_workload(write(tmp_path / "w.yaml", dump_workload(workload))) == workload
    assert [file.name for file in tmp_path.iterdir()] == ["w.yaml"]


def test_preset_and_its_file_are_the_same():
    by_name = scenario.loads(f"cluster: dgx-a100\nworkload: resnet18\n{REST}")
    by_file = scenario.loads(
        f"cluster: {{file: '{presets.path('clusters', 'dgx-a100')}'}}\n"
        f"workload: {{file: '{presets.path('workloads', 'resnet18')}'}}\n{REST}"
    )
    assert by_name == by_file


def test_run_directory_needs_no_cluster_file(folder, capsys):
    path = scenario_of(folder, "{file: cluster.yaml, nodes: 1}")
    expected = load(path)
    assert call(capsys, "simulate", path, "-o", folder / "run").code == 0
    for name in ("cluster.yaml", "models/net.yaml", "models/tensors.csv"):
        (folder / name).unlink()
    found = run_directory.read(folder / "run").scenario
    assert (found.cluster, found.workload) == (expected.cluster, expected.workload)
    assert "file:" not in (folder / "run" / "scenario.yaml").read_text()
    assert call(capsys, "simulate", folder / "run").code == 0


def test_inline_cluster_is_the_same_as_its_file(folder):
    inline = load(write(folder / "inline.yaml", edited(("  - {kind: local_sgd, period: 4}\n", ""))))
    text = dump_cluster(inline.cluster)
    write(folder / "cluster.yaml", text)
    other = write(folder / "other.yaml", SMALL.replace(INLINE, "cluster: {file: cluster.yaml}\n"))
    assert load(other).cluster == inline.cluster
