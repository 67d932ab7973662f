"""Sweeps: which points there are, what their scenarios are, when rows are the same, and what is wrong with a file."""

# ruff: noqa: E501  (messages are exact)

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from commandline import call, write
from hypothesis import given
from hypothesis import strategies as st

import simdist.schedules
from simdist.errors import ScenarioError
from simdist.scenario import Scenario, presets, recordings, strict_yaml
from simdist.scenario import load as load_scenario
from simdist.schedules import LocalSGD
from simdist.settings.base import FromFile
from simdist.sweeps import definition, load, loads
from simdist.sweeps.definition import Sweep
from simdist.sweeps.keys import canonical, code_digest
from simdist.sweeps.reading import SweepFile
from simdist.sweeps.sampling import Distribution, Sampling, Spacing

BASE = """\
cluster:
  nodes: 2
  gpus_per_node: 4
  fabric: ideal
  network: {latency: 30 us, bandwidth: 25 Gbit/s}
workload: {preset: mlp, batch_size: 32, forward: 30 ms}
disturbances:
  - {kind: transient, probability: 2%, delay: 200 ms}
schedules:
  - kind: sync
  - {kind: local_sgd, period: 4}
steps: 50
"""
VARY = "vary: {cluster.nodes: [2]}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE, encoding="utf-8")
    return tmp_path


@pytest.fixture
def sweep_of(folder: Path):
    def read(text: str, *, name: str = "s.yaml") -> Sweep:
        return loads(f"scenario: base.yaml\n{text}", name=name, folder=folder)

    return read


@pytest.fixture
def error_of(folder: Path):
    """Return what is wrong with a sweep of BASE; line 1 names it."""

    def read(text: str, *, scenario: str = "scenario: base.yaml\n") -> str:
        with pytest.raises(ScenarioError) as caught:
            loads(scenario + text, name="s.yaml", folder=folder)
        return str(caught.value).replace(str(folder), "FOLDER")

    return read


def written(sweep: Sweep) -> list[list[object]]:
    return [[choice and choice.written for choice in point.choices] for point in sweep.points()]


def numbers(sweep: Sweep) -> list[list[object]]:
    return [[choice and choice.number for choice in point.choices] for point in sweep.points()]


def trees(sweep: Sweep) -> list[dict]:
    return [sweep.tree_of(point) for point in sweep.points()]


def keys(sweep: Sweep) -> list[list[str]]:
    return [[row.key for row in sweep.keys(tree)] for tree in trees(sweep)]


def scenario(sweep: Sweep, tree: dict) -> Scenario:
    return Scenario.model_validate({"name": "point", **tree}, context=FromFile(sweep.folder))


# ---------------------------------------------------------------- points


def test_a_grid_takes_all_combinations_and_the_last_axis_is_fastest(sweep_of):
    sweep = sweep_of("vary:\n  cluster.nodes: [2, 4]\n  disturbances[0].delay: [1 ms, 2 s, 3 s]")
    assert numbers(sweep) == [list(pair) for pair in itertools.product([2, 4], [1e-3, 2.0, 3.0])]
    assert [point.number for point in sweep.points()] == list(range(6))
    assert sweep.n_points == 6
    assert [field.column for field in sweep.fields] == ["cluster.nodes", "disturbances[0].delay_s"]


def test_cases_come_one_after_another_each_with_all_points(sweep_of):
    sweep = sweep_of(
        "vary: {cluster.nodes: [2, 4]}\n"
        "cases:\n  - {name: 10G, cluster.network.bandwidth: 10 Gbit/s, steps: 10}\n  - {cluster.network.bandwidth: 1 GB/s}\n"
    )
    assert [field.column for field in sweep.fields] == ["cluster.network.bandwidth_Bps", "steps", "cluster.nodes"]
    assert [point.case for point in sweep.points()] == ["10G", "10G", "1", "1"]
    assert numbers(sweep) == [[1.25e9, 10, 2], [1.25e9, 10, 4], [1e9, None, 2], [1e9, None, 4]]
    assert [tree["steps"] for tree in trees(sweep)] == [10, 10, 50, 50]


def test_a_case_may_leave_the_scenario_as_it_is(sweep_of):
    sweep = sweep_of("cases: [{name: as it is}, {name: long, steps: 500}]")
    assert [tree["steps"] for tree in trees(sweep)] == [50, 500]


def test_a_sample_takes_as_many_points_of_each_case(sweep_of):
    sweep = sweep_of(
        "vary:\n  disturbances[0].delay: {log_uniform: [1 ms, 1 s]}\n  cluster.nodes: [2, 4]\n"
        "sample: {kind: sobol, points: 8}\ncases: [{name: a}, {name: b, steps: 60}]"
    )
    found = numbers(sweep)
    assert sweep.n_points == len(found) == 16
    assert [row[1:] for row in found[:8]] == [row[1:] for row in found[8:]]
    assert sorted(row[2] for row in found[:8]) == [2] * 4 + [4] * 4


@pytest.mark.parametrize("kind", ["random", "sobol"])
def test_more_points_of_a_sample_leave_those_that_are_there(sweep_of, kind):
    text = "vary: {disturbances.0.delay: {uniform: [1 ms, 1 s]}}\nsample: {kind: KIND, points: N}".replace("KIND", kind)
    few, many = (keys(sweep_of(text.replace("N", n))) for n in ("5", "50"))
    assert many[:5] == few
    assert len({row[0] for row in many}) == 50


@pytest.mark.parametrize(
    ("path", "rule", "unit", "size"),
    [
        ("cluster.network.latency", "uniform: [10us, 50us]", "us", 1e-6),
        ("cluster.network.latency", "uniform: [0, 0.05 ms]", " ms", 1e-3),
        ("cluster.network.bandwidth", "log_uniform: [10 Gbit/s, 5 GB/s]", " Gbit/s", 0.125e9),
        ("cluster.network.bandwidth", "median: 400 MB/s, sigma: 0.1", " MB/s", 1e6),
        ("disturbances[0].probability", "median: 2 %, sigma: 0.1", " %", 0.01),
        ("disturbances[0].probability", "uniform: [0.01, 0.02]", "", 1),
        ("disturbances[0].delay", "uniform: [1 min, 2 min]", " min", 60),
    ],
)
def test_values_of_a_sample_are_written_in_the_unit_of_their_bounds_with_six_digits(sweep_of, path, rule, unit, size):
    sweep = sweep_of(f"vary:\n  {path}: {{{rule}}}\nsample: {{kind: random, points: 20}}")
    counts = []
    for (text,), (number,) in zip(written(sweep), numbers(sweep), strict=True):
        assert isinstance(text, str if unit else float)
        assert str(text).endswith(unit)
        counts.append(str(text).removesuffix(unit))
        assert len(counts[-1].replace(".", "").lstrip("0")) <= 6
        assert number == pytest.approx(float(counts[-1]) * size, rel=1e-15)
    assert len(set(counts)) == 20


def test_a_scenario_in_place_of_a_sweep_and_the_reverse_is_one_line(tmp_path, capsys):
    scenario, sweep = write(tmp_path / "small.yaml"), write(tmp_path / "s.yaml", "{scenario: small.yaml, vary: {}}")
    for command, path, start in (
        (["sweep", scenario, "-o", tmp_path / "out"], scenario, "is a scenario, and no sweep: simdist compare"),
        (["compare", sweep], sweep, "is a sweep, and no scenario: simdist sweep"),
        (["simulate", sweep], sweep, "is a sweep, and no scenario: simdist sweep"),
    ):
        answer = call(capsys, *command)
        assert answer.err.startswith(f"error: {path}: {start} {path}")
        assert (answer.code, answer.err.count("\n")) == (2, 1)


def test_a_list_that_is_given_by_its_ends_is_written_in_their_unit(sweep_of):
    sweep = sweep_of("vary: {cluster.network.bandwidth: {linear: [10 Gbit/s, 25 Gbit/s, 3]}}")
    assert [row[0] for row in written(sweep)] == ["10 Gbit/s", "17.5 Gbit/s", "25 Gbit/s"]


def test_whole_numbers_of_a_sample_stay_whole(sweep_of):
    sweep = sweep_of("vary: {cluster.nodes: {integers: [2, 9]}}\nsample: {kind: random, points: 20}")
    assert {row[0] for row in written(sweep)} <= set(range(2, 10))


def test_what_a_distribution_draws_beyond_the_legal_makes_a_scenario_that_says_so(sweep_of):
    sweep = sweep_of("vary: {disturbances.0.probability: {median: 90%, sigma: 1}}\nsample: {kind: random, points: 20}")
    written_too_much = [float(tree["disturbances"][0]["probability"].removesuffix("%")) > 100 for tree in trees(sweep)]
    too_much = [tree for tree, is_more in zip(trees(sweep), written_too_much, strict=True) if is_more]
    assert [row[0] > 1 for row in numbers(sweep)] == written_too_much  # the column has SI units all the same
    assert too_much
    with pytest.raises(ValueError, match=r"is outside 0 to 1: write e\.g\. 2% or 0\.02"):
        scenario(sweep, too_much[0])


@pytest.mark.parametrize(
    ("path", "rule", "values"),
    [
        ("disturbances[0].probability", "linear: [0, 10%, 3]", [0, 0.05, 0.1]),
        ("cluster.network.latency", "geometric: [1 us, 100 us, 3]", [1e-6, 1e-5, 1e-4]),
        ("cluster.nodes", "geometric: [1, 16, 5]", [1, 2, 4, 8, 16]),
        ("cluster.nodes", "geometric: [1, 4, 9]", [1, 2, 3, 4]),  # rounded, each once
        ("steps", "linear: [10, 20, 3]", [10, 15, 20]),
    ],
)
def test_lists_may_be_given_by_their_ends(sweep_of, path, rule, values):
    assert [row[0] for row in numbers(sweep_of(f"vary:\n  {path}: {{{rule}}}"))] == values


def test_values_of_all_kinds_become_a_scenario_that_loads(sweep_of):
    sweep = sweep_of(
        """\
vary:
  cluster: [ideal, {preset: v100x8-25gbit, nodes: 4}]
  schedules:
    - [{kind: sync}]
    - [{kind: sync}, {kind: hierarchical_sgd, levels: {2: 8, 4: world}}]
  disturbances: [[], [{kind: jitter, median: 5 ms, sigma: 0.5}]]
  workload.backward: [null, 20 ms]
  seed: [0, 1]
"""
    )
    assert sweep.n_points == 32
    assert all(scenario(sweep, tree).schedules for tree in trees(sweep))
    assert numbers(sweep)[-1] == [
        "{preset: v100x8-25gbit, nodes: 4}",
        "[{kind: sync}, {kind: hierarchical_sgd, levels: {2: 8, 4: world}}]",
        "[{kind: jitter, median: 5 ms, sigma: 0.5}]",
        0.02,
        1,
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_a_whole_is_set_before_its_parts_whatever_the_order_in_the_file(sweep_of, order):
    lines = ["  cluster: [ideal, v100x8-25gbit]\n", "  cluster.nodes: [2, 4]\n"][::order]
    sweep = sweep_of("vary:\n" + "".join(lines))
    found = {(tree["cluster"]["preset"], tree["cluster"]["nodes"]) for tree in trees(sweep)}
    assert found == set(itertools.product(["ideal", "v100x8-25gbit"], [2, 4]))


def test_a_field_may_be_there_only_by_another_value_of_the_sweep(sweep_of):
    sweep = sweep_of(
        "vary: {disturbances.0.sigma: [0.5, 1]}\n"
        "cases:\n  - {name: jitter, disturbances.0: {kind: jitter, median: 5 ms, sigma: 0}}\n"
    )
    assert [scenario(sweep, tree).disturbances[0].sigma for tree in trees(sweep)] == [0.5, 1]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.lists(st.integers(1, 50), min_size=1, max_size=4))
def test_a_point_differs_from_the_scenario_only_in_its_fields(nodes, steps):
    text = strict_yaml.dump(
        {"scenario": strict_yaml.parse(BASE).root, "vary": {"cluster.nodes": nodes, "steps": steps}}
    )
    sweep = loads(text)
    for point, tree in zip(sweep.points(), trees(sweep), strict=True):
        expected = strict_yaml.parse(BASE).root
        expected["cluster"]["nodes"], expected["steps"] = (choice.written for choice in point.choices)
        assert tree == expected
    assert sweep.n_points == len(nodes) * len(steps)


# ---------------------------------------------------------------- where the scenario is


def test_a_scenario_may_stand_in_the_sweep(tmp_path):
    inside = "scenario:\n" + "".join(f"  {line}\n" for line in BASE.splitlines())
    sweep = loads(inside + VARY, name="runs/quick.yaml", folder=tmp_path)
    assert (sweep.name, sweep.scenario.name, sweep.folder) == ("quick", "quick", tmp_path)
    assert trees(sweep) == [strict_yaml.parse(BASE).root]


def test_a_scenario_may_be_a_preset():
    sweep = loads("scenario: cloud-stragglers\n" + VARY)
    assert sweep.scenario.name == "cloud-stragglers"
    assert trees(sweep)[0]["cluster"] == {"preset": "v100x8-25gbit", "nodes": 2}


def test_a_file_is_read_and_files_in_its_scenario_are_relative_to_the_scenario(folder):
    (folder / "below").mkdir()
    (folder / "below" / "s.yaml").write_text("scenario: ../base.yaml\n" + VARY, encoding="utf-8")
    sweep = load(folder / "below" / "s.yaml")
    assert sweep.name == "s"
    assert sweep.folder.resolve() == folder.resolve()


# ---------------------------------------------------------------- keys


def test_every_row_of_different_points_has_a_key_of_its_own(sweep_of):
    sweep = sweep_of("vary:\n  cluster.nodes: [2, 4]\n  seed: [0, 1]\n  schedules[1].period: [2, 4]")
    found = [key for row in keys(sweep) for key in row]
    assert len(found) == 16
    assert len(set(found)) == 8 + 4  # `sync` does not know the other's period


def test_two_sweeps_that_reach_the_same_scenario_share_rows(sweep_of, folder):
    one = sweep_of("vary: {cluster.nodes: [2, 4, 8], seed: [0, 1]}")
    (folder / "base.yaml").write_text("name: another\nseed: 1\n" + BASE.replace("nodes: 2", "nodes: 16"), "utf-8")
    other = sweep_of("vary: {cluster.nodes: [8.0]}\nsample: {kind: random, points: 1}", name="other.yaml")
    assert keys(other)[0] == keys(one)[5]


@pytest.mark.parametrize(
    "change",
    [
        ("steps: 50", "steps: 51"),
        ("probability: 2%", "probability: 3%"),
        ("kind: sync", "{kind: sync, label: plain}"),  # it is in the results
        ("kind: sync", "{kind: sync, algorithm: ring}"),
    ],
    ids=lambda change: change[1],
)
def test_another_scenario_has_other_keys(sweep_of, folder, change):
    before = keys(sweep_of(VARY))
    (folder / "base.yaml").write_text(BASE.replace(*change), encoding="utf-8")
    assert keys(sweep_of(VARY))[0][0] != before[0][0]


@pytest.mark.parametrize("setting", ["seeds: 3", "engine: des"])
def test_how_rows_are_measured_is_in_their_keys(sweep_of, setting):
    assert keys(sweep_of(VARY + setting)) != keys(sweep_of(VARY))


@pytest.mark.parametrize(
    ("schedules", "vary", "baseline"),
    [
        ("[fsdp, local-4]", "{cluster.nodes: [2]}", "fsdp"),
        ("[local-4, sync]", "{cluster.nodes: [2]}", "sync"),
        ("[local-4, torus]", "{'schedules[0].period': [2, 4]}", "local_sgd"),
    ],
)
def test_without_a_baseline_a_sweep_compares_with_sync_or_else_the_first(schedules, vary, baseline):
    base = f"{{cluster: v100x8-25gbit, workload: resnet50, steps: 4, schedules: {schedules}}}"
    assert loads(f"scenario: {base}\nvary: {vary}").baseline == baseline


@pytest.mark.parametrize("setting", ["time_limit: 5 s", "baseline: local_sgd"])
def test_what_changes_no_number_is_not_in_the_keys(sweep_of, setting):
    assert keys(sweep_of(VARY + setting)) == keys(sweep_of(VARY))


def test_another_version_of_simdist_has_other_keys(sweep_of, monkeypatch):
    before = keys(sweep_of(VARY))
    monkeypatch.setattr(definition, "__version__", "0.0.0")
    assert keys(sweep_of(VARY)) != before


def test_a_schedule_that_is_edited_has_other_keys(sweep_of, tmp_path, monkeypatch):
    before, digest = keys(sweep_of(VARY)), code_digest()
    assert code_digest() == digest
    (tmp_path / "mine.py").write_text("# period 4\n", encoding="utf-8")
    monkeypatch.setattr(simdist.schedules, "__path__", [*simdist.schedules.__path__, str(tmp_path)])
    added = code_digest()
    assert keys(sweep_of(VARY)) != before
    (tmp_path / "mine.py").write_text("# period 8\n", encoding="utf-8")
    assert len({digest, added, code_digest()}) == 3


@pytest.mark.parametrize(
    ("path", "value", "file"),
    [
        ("disturbances", [{"kind": "recorded", "file": "late.csv"}], "late.csv"),
        ("workload.tensors_file", "tensors.csv", "tensors.csv"),
        ("cluster.file", "cluster.yaml", "cluster.yaml"),
        ("workload", {"file": "workload.yaml"}, "inside.csv"),  # which workload.yaml names
        ("input.data", {"samples": 3, "file_size": {"index": "index.csv"}}, "index.csv"),
    ],
)
def test_a_file_that_a_scenario_names_is_in_the_keys_of_its_rows_and_of_no_others(sweep_of, folder, path, value, file):
    (folder / "workload.yaml").write_text("tensors_file: inside.csv\nbatch_size: 8\n", encoding="utf-8")
    sweep = strict_yaml.dump({"vary": {path: [value]}})
    found = []
    for content in ("1", "2", None, "1"):
        (folder / file).unlink(missing_ok=True)
        if content:
            (folder / file).write_text(content, encoding="utf-8")
        found.append(keys(sweep_of(sweep)))
    assert found[0] == found[3]
    assert len({found[0][0][0], found[1][0][0], found[2][0][0]}) == 3
    (folder / "other.csv").write_text("3", encoding="utf-8")
    assert keys(sweep_of(sweep)) == found[0]


def test_a_folder_that_is_moved_keeps_its_keys(sweep_of, folder, tmp_path_factory):
    (folder / "late.csv").write_text("1", encoding="utf-8")
    text = "scenario: base.yaml\nvary: {disturbances.0: [{kind: recorded, file: late.csv}]}"
    moved = tmp_path_factory.mktemp("moved")
    shutil.copytree(folder, moved, dirs_exist_ok=True)
    assert keys(loads(text, folder=folder)) == keys(loads(text, folder=moved))


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"levels": {2: 4, 4: 8}}, {"levels": {4: 8, 2: 4}}, False),  # a hierarchy whose periods shrink is an error
        ({2: 4}, {"2": 4}, False),
        (1000.0, 1000, True),
        (1, True, False),
        ("1", 1, False),
        (None, "null", False),
        ([1, 2], [2, 1], False),
        ("a,b", ["a", "b"], False),
    ],
)
def test_what_means_the_same_is_written_alike_and_what_does_not_is_not(one, other, are_equal):
    assert (canonical(one) == canonical(other)) is are_equal


def test_keys_do_not_depend_on_what_is_remembered_of_the_scenario(sweep_of):
    sweep = sweep_of("vary: {cluster.nodes: [2, 4]}")
    copied = [json.loads(json.dumps(tree)) for tree in trees(sweep)]  # equal, but other objects
    assert [[row.key for row in sweep.keys(tree)] for tree in copied] == keys(sweep)
    assert keys(replace(sweep, tree=json.loads(json.dumps(dict(sweep.tree))))) == keys(sweep)


# ---------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "s.yaml:1: nothing is varied: write scenario: FILE and vary: {path: [values]}"),
        ("vary: []", "s.yaml:2: vary: []: not a mapping: write `key: value` lines"),
        ("vary: {cluster.nodes: []}", "s.yaml:2: vary.cluster.nodes: the list is empty: write one value or more"),
        (
            "vary: {cluster.nodes: 3}",
            "s.yaml:2: vary.cluster.nodes: 3: write a list of values; or linear: [low, high, 5] or geometric: [low, high, 5]; "
            "or, in a sample, uniform: [low, high], log_uniform: [low, high], integers: [first, last] or median: M, sigma: S",
        ),
        (
            "vary:\n  cluster.nodes: [2]\n  cluster.nodez: [2]",
            "s.yaml:4: vary.cluster.nodez: there is no key 'nodez' in cluster: did you mean 'nodes'?",
        ),
        (
            "vary:\n  3: [2]",
            "s.yaml:3: vary[3]: '3' is not a path: write e.g. cluster.nodes or disturbances[0].probability",
        ),
        (
            "vary:\n  cluster.nodes:\n    - 2\n    - 0\n    - x",
            "s.yaml:5: vary.cluster.nodes[1]: 0: write at least 1\n"
            "s.yaml:6: vary.cluster.nodes[2]: 'x' is not a whole number: write e.g. 8",
        ),
        (
            "vary: {cluster.nodes: {uniform: [2, 8]}}",
            "s.yaml:2: vary.cluster.nodes: a grid takes lists of values: write one, linear: [low, high, 5] or geometric: "
            "[low, high, 5], or sample: {kind: random, points: 100}",
        ),
        (
            "vary: {disturbances[0].delay: [1 s]}",
            "s.yaml:2: not YAML: did not find expected ',' or '}' while parsing a flow mapping: 'vary: {disturbances[0].delay: [1 s]}'",
        ),
        (
            "vary:\n  disturbances.0.delay: [1 s]\n  disturbances[0].delay: [1 s]",
            "s.yaml:4: vary.disturbances[0].delay: vary.disturbances.0.delay sets the same: remove one of them",
        ),
        (
            "vary: {steps: [1]}\ncases: [{steps: 2}]",
            "s.yaml:3: cases[0].steps: vary.steps sets the same: remove one of them",
        ),
        ("cases: 3", "s.yaml:2: cases: 3: not a list: write [...], or lines that begin with '- '"),
        ("cases: [3]", "s.yaml:2: cases[0]: 3: not a mapping: write `key: value` lines"),
        (
            "cases:\n  - {name: a, steps: 1}\n  - {name: a, steps: 2}",
            "s.yaml:4: cases[1].name: 'a' is the name of another case, too: write another",
        ),
        ("cases: [{name: [a], steps: 2}]", "s.yaml:2: cases[0].name: ['a']: write a name, such as 25G"),
        (
            "cases: [{title: a, steps: 2}]",
            "s.yaml:2: cases[0].title: there is no key 'title' in a scenario: known: name, cluster, workload, input, steps, train_for, "
            "seed, host, checkpoint, disturbances, failures, background, actors, schedules, imported, uncertain, doubts",
        ),
        ("cases: [{steps: 0}]", "s.yaml:2: cases[0].steps: 0: write at least 1"),
        ("steps: 3", "s.yaml:2: steps: unknown key 'steps': did you mean 'seeds'?"),
        (VARY + "seeds: 0", "s.yaml:3: seeds: 0: write at least 1"),
        (VARY + "engine: slow", "s.yaml:3: engine: 'slow': write 'auto', 'des' or 'fast'"),
        (VARY + "time_limit: 5", "s.yaml:3: time_limit: 5: a time needs a unit: write e.g. 55 ms"),
        (
            VARY + "baseline: fast",
            "s.yaml:3: baseline: no schedule is called 'fast' to compare with; there are: sync, local-4: write one of them",
        ),
        (VARY + "sample: 3", "s.yaml:3: sample: 3: not a mapping: write `key: value` lines (kind, points, seed)"),
        (VARY + "sample: {kind: sobol}", "s.yaml:3: sample.points: how many sobol points? Write e.g. points: 256"),
        (
            VARY + "sample: {kind: random, points: 2e6}",
            "s.yaml:3: sample.points: 2,000,000 points: write 1,000,000 or fewer",
        ),
        (
            "cases: [{steps: 2}]\nsample: {kind: random, points: 9}",
            "s.yaml:3: sample: there is nothing to sample: write vary, or no sample",
        ),
        (
            "vary:\n  seed: {linear: [0, 5000, 5001]}\n  steps: {linear: [1, 5000, 5000]}",
            "s.yaml:2: vary: 25,005,000 points: write 1,000,000 or fewer",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line_its_path_and_a_remedy(error_of, text, message):
    assert error_of(text) == message


@pytest.mark.parametrize(
    ("path", "rule", "message"),
    [
        ("cluster.nodes", "{uniform: [2, 8]}", "cluster.nodes is a whole number: write integers: [first, last]"),
        (
            "cluster.network.latency",
            "{integers: [1, 2]}",
            "cluster.network.latency_s need not be whole: write uniform: [low, high], or a list of values",
        ),
        (
            "cluster.collectives.library",
            "{uniform: [1, 2]}",
            "cluster.collectives.library is no number: write a list of values",
        ),
        ("cluster.network.latency", "{uniform: [2 us, 1 us]}", "2 us is not below 1 us: write the lower one first"),
        ("cluster.network.latency", "{uniform: [1, 2 us]}", "1: a time needs a unit: write e.g. 55 ms"),
        ("cluster.network.bandwidth", "{uniform: [1 GB/s, unlimited]}", "'unlimited': write a finite value"),
        ("cluster.network.latency", "{log_uniform: [0 s, 2 us]}", "0 has no logarithm: write a lower value above 0"),
        ("workload.backward", "{uniform: [null, 2 us]}", "null: write a number"),
        ("steps", "{integers: [1 epoch, 3 epochs]}", "'1 epoch': write a number\n'3 epochs': write a number"),
        (
            "cluster.network.latency",
            "{median: 0 s, sigma: 1}",
            "a median of 0 leaves nothing to vary: write one above 0",
        ),
    ],
)
def test_a_distribution_that_does_not_fit_its_field_is_refused(error_of, path, rule, message):
    at = f"s.yaml:2: vary.{path}: "
    expected = "\n".join(at + line for line in message.splitlines())
    assert error_of(f"vary: {{{path}: {rule}}}\nsample: {{kind: random, points: 9}}") == expected


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{uniform: [1 us]}", "latency.uniform: ['1 us']: write two values, [low, high]"),
        ("{median: 1 us}", "latency.sigma: required key 'sigma' is missing: write e.g. sigma: 1.5"),
        (
            "{uniform: [1 us, 2 us], log_uniform: [1 us, 2 us]}",
            "latency.log_uniform: 'log_uniform' beside 'uniform': write one of them",
        ),
    ],
)
def test_a_mistake_inside_a_distribution_is_told_where_it_is(error_of, rule, message):
    text = f"sample: {{kind: random, points: 9}}\nvary: {{cluster.network.latency: {rule}}}"
    assert error_of(text) == f"s.yaml:3: vary.cluster.network.{message}"


def test_all_mistakes_are_told_at_once(error_of):
    found = error_of("vary:\n  cluster.nodez: [2]\n  steps: [0]\ncases:\n  - {seed: -1}")
    assert [line.split(":")[1] for line in found.splitlines()] == ["3", "4", "6"]


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("", "s.yaml:1: scenario: required key 'scenario' is missing: write e.g. scenario: first.yaml"),
        (
            "scenario: 3\n",
            "s.yaml:1: scenario: 3: write the name of a file or of a preset, or the scenario itself",
        ),
        (
            "scenario: cloud-straglers\n",
            "s.yaml:1: scenario: there is no file FOLDER/cloud-straglers, nor a preset 'cloud-straglers': did you mean 'cloud-stragglers'?",
        ),
        (
            "scenario:\n  cluster: ideal\n  workload: mlp\n  steps: 0\n  schedules:\n    - {kind: local_sgd}\n",
            "s.yaml:4: scenario.steps: 0: write at least 1\n"
            "s.yaml:6: scenario.schedules[0].period: required key 'period' is missing: write e.g. period: 8",
        ),
    ],
)
def test_a_scenario_that_is_wrong_or_not_there_is_told_with_its_line(error_of, scenario, message):
    assert error_of(VARY, scenario=scenario) == message


def test_mistakes_in_a_scenario_file_have_the_name_and_line_of_that_file(folder, error_of):
    (folder / "base.yaml").write_text(BASE.replace("steps: 50", "steps: 0"), encoding="utf-8")
    assert error_of(VARY) == "FOLDER/base.yaml:12: steps: 0: write at least 1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "s.yaml:1: is empty, not a sweep: write scenario: FILE and vary: {path: [values]}"),
        ("just words", "s.yaml:1: 'just words' is not a sweep: write scenario: FILE and vary: {path: [values]}"),
    ],
)
def test_what_is_no_sweep_is_refused(error_of, text, message):
    assert error_of(text, scenario="") == message


def test_a_sweep_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ScenarioError, match=r"none.yaml: cannot be read: No such file or directory$"):
        load(tmp_path / "none.yaml")


def test_every_scenario_that_ships_can_be_swept():
    for name in presets.names("scenarios"):
        baseline = load_scenario(presets.path("scenarios", name)).schedules[0].name
        assert loads(f"scenario: {name}\nvary: {{cluster.nodes: [2]}}\nbaseline: {baseline}").n_points == 1


# ---------------------------------------------------------------- the page


def sections() -> dict[str, str]:
    page = Path(__file__).resolve().parents[3] / "docs" / "reference" / "sweep.md"
    parts = re.split(r"^## (.*)\n", page.read_text(encoding="utf-8"), flags=re.M)
    return {heading.replace("`", ""): body for heading, body in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize(("heading", "cls"), [("The file", SweepFile), ("sample", Sampling)])
def test_every_key_of_the_file_is_on_its_page_and_no_other(heading, cls):
    keys = {field.alias or name for name, field in cls.model_fields.items()}
    assert set(re.findall(r"^\| `(\w+)` \|", sections()[heading], re.M)) == keys


@pytest.mark.parametrize(("heading", "cls"), [("The file", SweepFile), ("sample", Sampling)])
def test_every_default_on_the_page_is_that_of_the_code(heading, cls):
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| `([^`]*)` \|", sections()[heading], re.M)
    written = {key: strict_yaml.parse(default).root for key, default in rows}
    required = {"scenario": "first.yaml"} if cls is SweepFile else {}
    explicit = cls.model_validate(required | written, context=FromFile(Path()))
    assert explicit == cls.model_validate(required, context=FromFile(Path()))
    optional = {field.alias or name for name, field in cls.model_fields.items() if not field.is_required()}
    assert written.keys() == optional - {"points", "baseline"}


def test_every_distribution_is_on_the_page():
    kinds = [*Distribution.__subclasses__(), *Spacing.__subclasses__()]
    named = [", ".join(f"{key}: " for key in cls.model_fields) for cls in kinds]
    shown = [
        re.sub(r"\[[^]]*\]|[A-Z](?=,|$)", "", text)
        for text in re.findall(r"^\| `(\w+: [^`]*)` \|", sections()["Values"], re.M)
    ]
    assert sorted(shown) == sorted(named)


NETWORK = {"latency": "25 us", "bandwidth": "1 GB/s"}
IN_PYTHON = {
    "cluster": {"nodes": 2, "gpus_per_node": 2, "fabric": "ideal", "network": NETWORK},
    "workload": {"preset": "resnet18", "forward_s": 0.02},
    "disturbances": [
        {"kind": "drawn", "values": np.array([0.0, 0.1])},
        {"kind": "transient", "probability": 0, "delay_s": 1},
    ],
    "steps": np.int64(4),
    "schedules": ["sync", LocalSGD(period=2)],
}
_BPS = "cluster.network.bandwidth_Bps"


@pytest.mark.parametrize(
    ("vary", "column", "numbers"),
    [
        ({"cluster.nodes": pd.Series([2, 4])}, "cluster.nodes", [2, 4]),
        ({"disturbances[1].delay_s": np.array([0.1, 0.2])}, "disturbances[1].delay_s", [0.1, 0.2]),
        ({"disturbances[1].delay": pd.to_timedelta([100, 200], unit="ms")}, "disturbances[1].delay_s", [0.1, 0.2]),
        ({_BPS: {"linear": [1e9, 2e9, 3]}}, _BPS, [1e9, 1.5e9, 2e9]),
        ({"workload.forward_s": (0.01, 0.02)}, "workload.forward_s", [0.01, 0.02]),
    ],
)
def test_values_from_python_are_varied_whatever_library_they_are_of(vary, column, numbers):
    (axis,) = load({"scenario": IN_PYTHON, "vary": vary}).axes
    assert (axis.field.column, [each.number for each in axis.choices]) == (column, numbers)


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ({"disturbances[1].delay": [0.1]}, r"disturbances\[1\].delay\[0\]: 0.1: of which unit"),
        ({"cluster.nodes": [object()]}, r"vary.cluster.nodes\[0\]: <object .* is not a whole number"),
        ({"cluster.nods": [2]}, "there is no key 'nods' in cluster: did you mean 'nodes'"),
    ],
)
def test_value_from_python_that_no_file_has_is_refused(vary, message):
    with pytest.raises(ScenarioError, match=message):
        load({"scenario": IN_PYTHON, "vary": vary})


def test_rows_over_an_array_have_the_same_keys_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = np.eye(50, 4) / 10
    texts = []
    for number, table in enumerate((late, late, 2 * late)):  # each process has a folder of its own for arrays
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setattr(recordings, "_folder", lambda folder=folder: SimpleNamespace(name=folder))
        disturbances = [{"kind": "recorded", "file": table}]
        scenario = strict_yaml.parse(BASE).root | {"disturbances": disturbances}
        sweep = load({"scenario": scenario, "vary": {"steps": [8]}})
        (point,) = sweep.points()
        texts.append([row.key for row in sweep.keys(sweep.tree_of(point))])
    assert texts[0] == texts[1]
    assert set(texts[0]).isdisjoint(texts[2])
