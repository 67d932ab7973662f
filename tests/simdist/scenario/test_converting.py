"""Files of earlier releases: they become files of this one, and errors name the new keys."""

from pathlib import Path

import pytest

from simdist.errors import ScenarioError
from simdist.scenario import Cluster, Scenario, load, loads
from simdist.scenario.converting import convert, new_path_of
from simdist.settings.base import new_path

OLD = """\
# A job.
cluster:
  preset: dgx-a100
  nodes: 2
  # two cards of eight
  nics_per_node: 2
  library: gloo  # on CPUs
  chunkwise: true
  host: {copy: 3 GB/s}
  cores_per_node: 16
  storage: {latency: 1 ms, bandwidth: 1 GB/s, operations: 100}
  disk: {read: 1 GB/s, write: 1 GB/s}
  uncertain: {collective_overhead: {from: 1 us, to: 9 us}}
workload: {preset: resnet50, batch_size: 8}
data:
  samples: 4096  # images
  file_size: 110 kB
input: {source: storage, prefetch: 4}
disturbances: [{kind: interference, machine_rate: 1000}]
steps: 1 epoch
schedules:
  - {kind: sync, data: files, readers: 2}
  - kind: local_sgd
    period: 4
    prefetch: 2   # batches
uncertain: {cluster.network.efficiency: {from: 50%, to: 97%}}
"""
NEW = """\
# A job.
cluster:
  preset: dgx-a100
  nodes: 2
  topology:
    # two cards of eight
    nics_per_node: 2
  collectives:
    library: gloo  # on CPUs
    chunkwise: true
  host: {copy: 3 GB/s, cores_per_node: 16}
  storage: {latency: 1 ms, bandwidth: 1 GB/s, operations_per_s: 100}
  disk: {read: 1 GB/s, write: 1 GB/s}
  uncertain: {collectives.overhead: {from: 1 us, to: 9 us}}
workload: {preset: resnet50, batch_size: 8}
input:
  source: storage
  prefetch: 4
  data:
    samples: 4096  # images
    file_size: 110 kB
disturbances: [{kind: interference, machine_samples_per_s: 1000}]
steps: 1 epoch
schedules:
  - {kind: sync, input: {policy: files, readers: 2}}
  - kind: local_sgd
    period: 4
    input:
      prefetch: 2   # batches
uncertain: {cluster.network.efficiency: {from: 50%, to: 97%}}
"""


def test_a_scenario_keeps_its_comments_and_the_order_of_its_keys() -> None:
    assert convert(OLD) == NEW
    assert convert(NEW) == NEW


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{nodes: 2, mesh: true, rails: true}", "{nodes: 2, topology: {mesh: true, rails: true}}"),
        ("{library: gloo, nodes: 2}", "{collectives: {library: gloo}, nodes: 2}"),
        ('{"cluster": {"nodes": 2, "launch": "1 us"}}', '{"cluster": {"nodes": 2, "collectives": {"launch": "1 us"}}}'),
        ("cluster: &all\n  nodes: 1\n  rails: true\n", "cluster: &all\n  nodes: 1\n  topology:\n    rails: true\n"),
        (
            "scenario: {cluster: ideal, data: {samples: 2}}\n"
            "vary: {cluster.nics_per_node: [1, 2], data.policy: [naive]}\n",
            "scenario: {cluster: ideal, input: {data: {samples: 2}}}\n"
            "vary: {cluster.topology.nics_per_node: [1, 2], input.data.policy: [naive]}\n",
        ),
        (
            "nodes: 1\nhost: {copy: 1 GB/s, source: 'a\n  b'}\ncores_per_node: 2\n",
            "nodes: 1\nhost:\n  copy: 1 GB/s\n  source: 'a b'\n  cores_per_node: 2\n",
        ),
        ("workload: {preset: mlp, launch: 2 ms}  # host\n", "workload: {preset: mlp, launches: 2 ms}  # host\n"),
        ("batch_size: 4\nlaunch: 2 ms\ntensors: []\n", "batch_size: 4\nlaunches: 2 ms\ntensors: []\n"),
        ("vary: {workload.launch: [1 ms]}\n", "vary: {workload.launches: [1 ms]}\n"),
        ("workload: {tensors: []}\n", "workload: {tensors: []}\n"),
        ("", ""),
    ],
)  # fmt: skip
def test_keys_move(old: str, new: str) -> None:
    assert convert(old) == new


def test_what_is_no_yaml_is_refused_with_its_line() -> None:
    with pytest.raises(ScenarioError, match=r"old.yaml:2: is not YAML"):
        convert("a: 1\nb: {", name="old.yaml")


def test_each_old_key_of_a_file_is_an_error_that_names_the_new_one() -> None:
    with pytest.raises(ScenarioError) as caught:
        loads(OLD, name="old.yaml")
    lines = str(caught.value).splitlines()
    assert "old.yaml:6: cluster.nics_per_node: is now cluster.topology.nics_per_node" in lines
    assert "old.yaml:11: cluster.storage.operations: is now cluster.storage.operations_per_s" in lines
    assert "old.yaml:15: data: is now input.data" in lines
    assert "old.yaml:22: schedules[0].data: is now schedules[0].input.policy" in lines
    assert lines[-1] == "old.yaml: simdist init --from old.yaml -o old.yaml converts the file"


def test_old_names_in_python_and_old_paths_are_errors_that_name_the_new_one() -> None:
    scenario = load("cloud-stragglers")
    with pytest.raises(ScenarioError, match=r"cluster.nics_per_node is now cluster.topology.nics_per_node"):
        scenario.changed("cluster.nics_per_node", 2)
    with pytest.raises(ScenarioError, match=r"scenario: cluster.launch_s: is now cluster.collectives.launch"):
        load({"cluster": {"preset": "ideal", "launch_s": 1e-6}, "workload": "mlp", "steps": 1, "schedules": ["sync"]})


def test_every_moved_key_is_a_key() -> None:
    for old, new in Cluster.moved.items():
        *_, key = new.split(".")
        assert new_path(Cluster, old) == new
        assert new_path_of(f"cluster.{old}") == f"cluster.{new}"
        assert old not in Cluster.model_fields
        group = Cluster.model_fields[new.split(".")[0]].annotation
        assert key in {field.alias for field in group.model_fields.values()}
    assert Scenario.moved == {"data": "input.data"}


def test_a_converted_scenario_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(convert(OLD))
    scenario = load(file)
    assert scenario.cluster.topology.nics_per_node == 2
    assert scenario.cluster.host.cores_per_node == 16
    assert scenario.cluster.host.is_charged
    assert [each.name for each in scenario.schedules] == ["sync+files+readers2", "local-4+prefetch2"]
