"""Scenarios as people write them in Python: mappings, paths, names of schedules, copies that stay right."""

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

import simdist
from simdist.errors import ScenarioError
from simdist.runs.building import delays
from simdist.scenario import Device, Drawn, Link, Scenario, Transient, dump, load, loads, presets
from simdist.scenario.checkpoint import CheckpointSettings
from simdist.schedules import HierarchicalSGD, LocalSGD, Sync
from simdist.settings.base import Settings
from simdist.settings.precision import Peak

ROOT = Path(__file__).parents[3]
FIRST = ROOT / "docs" / "examples" / "first.yaml"
JOB = {
    "cluster": {
        "nodes": 2,
        "gpus_per_node": 2,
        "fabric": "ideal",
        "network": {"latency": "0 s", "bandwidth": "1 GB/s"},
    },
    "workload": {"tensors": [{"name": "all", "count": 1000}], "batch_size": 1, "forward_s": 0.04},
    "schedules": ["sync", "local-4"],
    "steps": 8,
}


def parts(value: object):
    """Yield all settings in a scenario."""
    if isinstance(value, Settings):
        yield value
        for _, item in value:
            yield from parts(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from parts(item)


def test_scenario_comes_from_a_mapping_a_path_a_name_or_itself() -> None:
    from_file = load(FIRST)
    assert load(str(FIRST)) == from_file
    assert load(from_file) is from_file
    assert load("cloud-stragglers") == load(presets.path("scenarios", "cloud-stragglers"))
    assert load(JOB).workload.forward_s == 0.04
    assert [type(each) for each in load(JOB).schedules] == [Sync, LocalSGD]
    assert load(from_file.model_dump()) == from_file


def test_compare_and_simulate_take_what_load_takes() -> None:
    assert [row.schedule for row in simdist.compare(JOB, n_seeds=1)] == ["sync", "local-4"]
    assert simdist.simulate(JOB, label="local-4").plan.name == "local-4"
    assert simdist.simulate(FIRST, label="sync").plan.n_steps == load(FIRST).steps


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (JOB | {"steps": 0, "name": "mine"}, r"^mine: steps: 0: write at least 1$"),
        (JOB | {"stepps": 3}, r"^scenario: stepps: unknown key 'stepps': did you mean 'steps'\?$"),
        (3, r"^3 is no scenario: write the name of a file, a mapping or a Scenario$"),
    ],
)
def test_wrong_mapping_is_refused_with_its_path(scenario: object, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        load(scenario)


def test_changed_takes_paths_and_keeps_the_rest() -> None:
    base = load(FIRST)
    changed = base.changed({"cluster.network.bandwidth": "100 Gbit/s", "disturbances[0].probability": np.float32(0.5)})
    assert changed.cluster.network.bandwidth_Bps == 12.5e9
    assert changed.cluster.network.latency_s == base.cluster.network.latency_s
    assert changed.disturbances[0].probability == 0.5
    assert base.changed("cluster.network.bandwidth_Bps", 12.5e9).cluster.network == changed.cluster.network
    assert base.changed("cluster.nodes", np.int64(8)).cluster.nodes == 8
    assert base.changed("schedules[1].period", 8).schedules[1].name == "local-8"
    storage = base.changed({"cluster.storage.latency": "1 ms", "cluster.storage.bandwidth": "1 GB/s"}).cluster.storage
    assert (storage.latency_s, storage.bandwidth_Bps) == (1e-3, 1e9)
    assert base.changed() == base


@pytest.mark.parametrize("own", [{}, {"launches": "3 ms"}])
def test_a_changed_time_replaces_what_a_preset_measured_with_the_old_one(own):
    base = load(JOB | {"cluster": "v100x8-25gbit", "workload": {"preset": "resnet50", **own}})
    assert base.workload.launches.passes_s > 0
    changed = base.changed("workload.forward", "10 ms").workload
    assert changed.launches.passes_s == pytest.approx(3e-3 if own else 0)
    assert base.changed("workload.batch_size", 8).workload.launches == base.workload.launches


def test_changes_that_are_right_together_only_are_made_together() -> None:
    base = load(JOB).changed(disturbances=[{"kind": "persistent", "factor": 2.0, "ranks": [0]}])
    changed = base.changed({"disturbances[0].factor": None, "disturbances[0].delay": "20 ms", "steps": 4})
    assert (changed.disturbances[0].delay_s, changed.steps) == (0.02, 4)
    with pytest.raises(ScenarioError, match=r"disturbances\[0\]\.factor: write either factor"):
        base.changed("disturbances[0].factor", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("cluster.nods", 8), r"first: there is no key 'nods' in cluster: did you mean 'nodes'\?"),
        (("cluster.nodes", -1), r"first: cluster.nodes: -1: write at least 1"),
        (("cluster.network.bandwidth", 100), r"first: cluster.network.bandwidth: 100: of which unit\?"),
        (("disturbances[9].probability", 1), r"first: disturbances has 1 item, counted from 0: there is no \[9\]"),
        (("schedules.sync", 1), r"first: schedules is a list: write schedules\[0\], counting from 0"),
        (("steps.a", 1), r"first: there is nothing below steps, which is 100: change it as a whole"),
        (("cluster..", 1), r"first: 'cluster..' is not a path"),
        (("cluster",), r"first: write changed\(path, value\), or changed\(\{path: value, ...\}\)"),
        (({"cluster": "ideal", "cluster.nodes": 3},), r"first: cluster is changed as a whole and in parts"),
        (({"cluster.nodes": 3, "cluster.gpus_per_node": 3},), r"first: schedules\[2\].levels: group of 4 at period 2"),
    ],
)
def test_wrong_change_is_refused_with_its_path(changes: tuple[object, ...], message: str) -> None:
    base = load(FIRST).changed(name="first", steps=100)
    with pytest.raises(ScenarioError, match=message):
        base.changed(*changes)


def test_range_of_a_changed_number_is_dropped() -> None:
    network = {"network.bandwidth": {"from": "0.5 GB/s", "to": "2 GB/s"}}
    unsure = load(JOB | {"cluster": JOB["cluster"] | {"uncertain": network}})
    assert unsure.has_ranges
    assert not unsure.changed("cluster.network.bandwidth", "5 GB/s").has_ranges
    assert unsure.changed("cluster.nodes", 4).has_ranges


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"bandwidth_Bps": -1e9}, "write a finite number, 0 or more"),
        ({"efficiency": 5}, "5 is outside 0 to 1"),
        ({"bandwidth": 12.5e9}, "unknown attribute 'bandwidth': did you mean 'bandwidth_Bps'?"),
        ({"latancy_s": 0.1}, "unknown attribute 'latancy_s': did you mean 'latency_s'?"),
    ],
)
def test_copy_with_wrong_values_is_refused(update: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        load(FIRST).cluster.network.model_copy(update=update)
    assert message in str(caught.value)


def test_copy_validates_values_that_agree_with_each_other_only() -> None:
    late = load(JOB).changed(disturbances=[{"kind": "persistent", "factor": 2.0}]).disturbances[0]
    with pytest.raises(ValidationError, match="write either factor"):
        late.model_copy(update={"delay_s": 0.1})
    assert late.model_copy(update={"factor": None, "delay_s": 0.1}).delay_s == 0.1
    with pytest.raises(ValidationError, match="group of 4"):
        load(FIRST).model_copy(update={"cluster": load(JOB).cluster.model_copy(update={"gpus_per_node": 3})})


@pytest.mark.parametrize("name", presets.names("scenarios"))
def test_copy_with_its_own_values_is_equal(name: str) -> None:
    for part in parts(load(name)):
        for field, value in part:
            copy = part.model_copy(update={field: value})
            assert copy == part
            assert copy.model_fields_set == part.model_fields_set | {field}


def test_numbers_of_numpy_are_numbers() -> None:
    link = Link(latency_s=np.float32(0.5), bandwidth_Bps=np.int64(10**9))
    assert (link.latency_s, link.bandwidth_Bps) == (0.5, 1e9)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("sync", {"kind": "sync"}),
        ("local-8", {"kind": "local_sgd", "period": 8}),
        ("hsgd-2-2,8-world", {"kind": "hierarchical_sgd", "levels": {2: 2, 8: "world"}}),
        ("backup-1", {"kind": "backup_workers", "backup": 1}),
        ("diloco-16", {"kind": "diloco", "period": 16}),
        ("powersgd-4", {"kind": "powersgd", "rank": 4}),
        ("gtopk", {"kind": "gtopk"}),
        ("gtopk-0.01", {"kind": "gtopk", "density": 0.01}),
        ("naive-ag-0.01", {"kind": "naive_ag", "density": 0.01}),
        ("hitopk", {"kind": "hitopk"}),
    ],
)
def test_schedule_is_written_by_its_name(name: str, schedule: dict[str, object]) -> None:
    workload = JOB["workload"] | {"tensors": [{"name": "all", "count": 1000, "rows": 10}]}
    by_name, by_settings = (load(JOB | {"workload": workload, "schedules": [each]}) for each in (name, schedule))
    assert by_name == by_settings
    text = dump(by_name)
    assert loads(text) == by_name


@pytest.mark.parametrize("name", ["locl-8", "local-", "local-x", "hsgd-2", "hsgd-2-4,", "local-8-by-night", ""])
def test_schedule_of_no_such_name_is_refused(name: str) -> None:
    with pytest.raises(ScenarioError, match=r"schedules\[0\]: there is no schedule .*write its kind, such as sync"):
        load(JOB | {"schedules": [name]})


def test_names_of_schedules_stand_in_files_too() -> None:
    text = FIRST.read_text(encoding="utf-8")
    head, _, _ = text.partition("schedules:")
    found = loads(f"{head}schedules: [sync, local-4, 'hsgd-2-4,4-world']\nsteps: 10\n" if "steps" not in head else head)
    assert isinstance(found, Scenario)


def test_label_of_a_named_hierarchy_is_its_name() -> None:
    found = load(FIRST).changed(schedules=["hsgd-2-4,4-16"]).schedules[0]
    assert isinstance(found, HierarchicalSGD)
    assert found.name == "hsgd-2-4,4-16"


def test_array_of_delays_is_drawn_with_equal_probabilities() -> None:
    values = np.array([0.0, 0.01, 0.03])
    scenario = load(JOB).changed(steps=500, disturbances=[{"kind": "drawn", "values": values}])
    drawn_s = delays(scenario)["host"]
    found, counts = np.unique(drawn_s, return_counts=True)
    assert found.tolist() == values.tolist()
    assert (abs(counts / drawn_s.size - 1 / 3) < 0.05).all()
    assert loads(dump(scenario)) == scenario
    assert not Drawn(values=[0.5, 0.5]).is_random


def test_function_of_uniform_numbers_gives_delays() -> None:
    exponential = load(JOB).changed(steps=50, disturbances=[{"kind": "exponential", "mean": "10 ms"}])
    by_hand = exponential.changed(disturbances=[Drawn(quantile=lambda u: -0.01 * np.log(u))])
    assert np.allclose(delays(by_hand)["host"], delays(exponential)["host"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"write either values, e.g. \[0 s, 0 s, 50 ms\], or quantile, a function"),
        ({"quantile": 3}, "3: write a function, or its name in a file"),
        ({"values": []}, r"disturbances\[0\].values: \[\]: write a list of 1 or more"),
        ({"values": [-1.0]}, r"disturbances\[0\].values\[0\]: -1.0: write a finite number, 0 or more"),
        (
            {"quantile": lambda u: u - 1},
            "disturbance drawn: quantile returns -.* s: return seconds, finite and 0 or more",
        ),
        ({"quantile": lambda u: np.ones(3)}, r"disturbance drawn: quantile returns float64 \[3\]: return seconds"),
    ],
)
def test_wrong_distribution_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        delays(load(JOB).changed(disturbances=[{"kind": "drawn", **settings}]))


def test_function_without_a_name_cannot_be_read_from_a_file() -> None:
    written = dump(load(JOB).changed(disturbances=[{"kind": "drawn", "quantile": lambda u: u}]))
    with pytest.raises(ScenarioError, match=r"disturbances\[0\].quantile: .*lambda.*write module:"):
        loads(written)


@pytest.mark.parametrize(
    ("made", "attribute", "value"),
    [
        (lambda: Link(latency_s=0, bandwidth_Bps=10), "bandwidth_Bps", 10.0),
        (lambda: Link(latency_s=0, bandwidth="10 Gbit/s"), "bandwidth_Bps", 1.25e9),
        (lambda: Link(latency=0, bandwidth=math.inf), "bandwidth_Bps", math.inf),
        (lambda: Transient(probability=0.5, delay=timedelta(milliseconds=200)), "delay_s", 0.2),
        (lambda: Transient(probability=0.5, delay_s=pd.Timedelta("200 ms")), "delay_s", 0.2),
        (lambda: Transient(probability=0.5, delay=np.timedelta64(200, "ns")), "delay_s", 2e-7),
        (lambda: Transient(probability=np.float32(0.5), delay_s=np.int64(2), ranks=np.array([0, 1])), "ranks", (0, 1)),
        (lambda: Drawn(values=pd.Series([0.0, 0.5])), "values", (0.0, 0.5)),
        (lambda: Drawn(values=pd.to_timedelta([0, 500], unit="ms")), "values", (0.0, 0.5)),
        (lambda: HierarchicalSGD(levels={np.int64(2): 4, np.int64(4): "world"}), "levels", {2: 4, 4: "world"}),
        (lambda: Device(peak_flops={"fp16": 125e12}), "peak_flops", Peak(fp16=125e12)),
        (lambda: CheckpointSettings(every=7, what="state", size=None), "every", 7),
    ],
)
def test_value_from_python_is_read_whatever_library_it_is_of(made, attribute: str, value: object) -> None:
    assert dict(made())[attribute] == value


@pytest.mark.parametrize(
    ("path", "value", "example"),
    [
        ("cluster.network.bandwidth", 25e9, "25 Gbit/s or 25 GB/s, or bandwidth_Bps in SI units"),
        ("cluster.network.bandwidth", np.int64(25), "25 Gbit/s or 25 GB/s, or bandwidth_Bps in SI units"),
        ("workload.forward", 0.03, "55 ms, or forward_s in SI units"),
        ("workload.sample_size", 150_000, "45 MB, or sample_nbytes in SI units"),
        ("cluster.device.peak", {"fp16": 125}, "125 TFLOP/s, or peak_flops in SI units"),
    ],
)
def test_number_without_a_unit_is_refused_in_a_mapping_as_in_a_change(path: str, value: object, example: str) -> None:
    message = f"{re.escape(path)}: .*: of which unit.*{example}"
    with pytest.raises(ScenarioError, match=message):
        load(JOB).changed(path, value)
    part, *above, key = path.split(".")
    written = dict(JOB[part])
    here = written
    for name in above:
        here[name] = dict(here.get(name, {}))
        here = here[name]
    here[key] = value
    with pytest.raises(ScenarioError, match=message):
        load(JOB | {part: written})


LOG = pd.DataFrame([(step, rank, 50.0 * rank) for step in range(10, 18) for rank in range(4)])
LOG.columns = ["step", "rank", "ms"]


@pytest.mark.parametrize(
    "log",
    [
        LOG,
        LOG.sample(frac=1.0, random_state=0).rename(columns={"ms": "delay_ms"}),
        LOG.assign(seconds=LOG["ms"] / 1000).drop(columns="ms"),
        LOG.assign(late=pd.to_timedelta(LOG["ms"], unit="ms")).drop(columns="ms"),
        LOG.pivot(index="step", columns="rank", values="ms") / 1000,
        [[0.0, 0.05, 0.1, 0.15]] * 8,
    ],
    ids=["ms", "shuffled", "seconds", "timedelta", "wide", "lists"],
)
def test_log_of_delays_is_a_recording(log: object) -> None:
    scenario = load(JOB).changed(disturbances=[{"kind": "recorded", "file": log}])
    assert delays(scenario)["host"][0] == pytest.approx(np.tile([0.0, 0.05, 0.1, 0.15], (8, 1)))


def test_log_in_a_file_is_a_recording(tmp_path: Path) -> None:
    LOG.to_csv(tmp_path / "log.csv", index=False)
    scenario = load(JOB).changed(disturbances=[{"kind": "recorded", "file": tmp_path / "log.csv"}])
    assert delays(scenario)["host"][0] == pytest.approx(np.tile([0.0, 0.05, 0.1, 0.15], (8, 1)))


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (LOG.rename(columns={"ms": "delay"}), r"the column delay of a log: of which unit\?"),
        (LOG.iloc[1:], "step 10 of rank 0 is missing: write one row for each step and rank, also of 0 s"),
        (pd.concat([LOG, LOG.iloc[:1]]), "step 10 of rank 0 stands there twice"),
        (LOG.assign(node=0), r"which column is the delay \(ms, node\)\?"),
        (LOG.assign(rank="a"), "the column rank of a log holds whole numbers"),
        (LOG.rename(columns={"rank": "worker"}), r"which rank is which column\? Name them 0, 1"),
    ],
)
def test_log_that_leaves_something_open_is_refused(log: object, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        load(JOB).changed(disturbances=[{"kind": "recorded", "file": log}])


def test_function_with_random_numbers_of_its_own_is_refused() -> None:
    generator = np.random.default_rng(0)
    drawn = load(JOB).changed(disturbances=[Drawn(quantile=lambda u: generator.exponential(0.05, u.shape))])
    with pytest.raises(ScenarioError, match="quantile returns other delays for the same numbers"):
        delays(drawn)


@pytest.mark.parametrize("value", [True, None, [10], "10", "10 s", float("nan"), -1])
def test_what_is_no_bandwidth_is_refused_under_either_name(value: object) -> None:
    for name in ("bandwidth", "bandwidth_Bps"):
        with pytest.raises(ValidationError):
            Link(latency_s=0, **{name: value})


@pytest.mark.parametrize("name", presets.names("scenarios"))
def test_equal_scenarios_have_one_hash(name: str) -> None:
    first = load(name)
    again = loads(dump(first))
    assert {first: "found"}[again] == "found"
    assert len({first, first.changed("seed", first.seed + 1)}) == 2


def test_hash_takes_mappings() -> None:
    levels = {2: 4, 4: "world"}
    assert len({HierarchicalSGD(levels=levels), HierarchicalSGD(levels=dict(levels))}) == 1
    assert len({HierarchicalSGD(levels=levels), HierarchicalSGD(levels={2: 2, 4: "world"})}) == 2


@dataclass
class Stretched:
    """A quantile function that has no hash, as it is compared by its values."""

    scale_s: float

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        return self.scale_s * numbers


def test_hash_takes_functions_that_have_none() -> None:
    one, same, other = (Drawn(quantile=Stretched(scale_s)) for scale_s in (0.1, 0.1, 0.2))
    assert len({one, same, other}) == 2


def test_repr_of_a_scenario_names_its_parts() -> None:
    scenario = load("cloud-stragglers").changed(schedules=[f"local-{period}" for period in range(2, 102)], name="many")
    assert (
        repr(scenario)
        == str(scenario)
        == (
            "Scenario(name='many', cluster=<v100x8-25gbit: 16 x 8 GPUs>, workload=<ResNet-50: batch_size 64>, "
            "schedules=<local-2, local-3, local-4, local-5, local-6, local-7, local-8, local-9, 92 more>, steps=400)"
        )
    )


def test_repr_of_settings_leaves_out_defaults() -> None:
    assert repr(Link(latency_s=1e-6, bandwidth_Bps=1e9)) == "Link(latency_s=1e-06, bandwidth_Bps=1000000000.0)"
    assert "tensors=<161 tensors>" in repr(load("cloud-stragglers").workload)
