"""Paths lead to fields of a scenario as its file has it; setting one changes that field and nothing else."""

import copy
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simdist.scenario import Scenario, loads, strict_yaml
from simdist.scenario.fields import find_field, flat_text, parse_path
from simdist.scenario.strict_yaml import path_text
from simdist.sweeps.fields import replaced

TEXT = """\
cluster:
  nodes: 2
  gpus_per_node: 4
  fabric: ideal
  network: {latency: 30 us, bandwidth: 25 Gbit/s}
workload: {preset: resnet50, batch_size: 32, forward: 30 ms}
disturbances:
  - {kind: transient, probability: 2%, delay: 200 ms}
schedules:
  - kind: sync
  - {kind: local_sgd, period: 4}
  - {kind: hierarchical_sgd, levels: {2: 4, 4: world}}
steps: 50
"""

KEYS = st.from_regex(r"[A-Za-z_][A-Za-z_0-9]{0,5}", fullmatch=True)
INDICES = st.integers(0, 10**9 - 1)
PATHS = st.tuples(KEYS).flatmap(lambda first: st.lists(KEYS | INDICES, max_size=5).map(lambda rest: (*first, *rest)))
VALUES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
TREES = st.recursive(
    VALUES, lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS | st.integers(0, 9), below, max_size=3)
)


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return loads(TEXT)


@pytest.fixture
def tree() -> object:
    return strict_yaml.parse(TEXT).root


def places(tree: object, above: tuple = ()) -> list[tuple]:
    """Return the paths of all values in a tree."""
    match tree:
        case dict():
            items = tree.items()
        case list():
            items = enumerate(tree)
        case _:
            return [above]
    return [above, *(path for key, item in items for path in places(item, (*above, key)))]


def at(tree: object, path: tuple) -> object:
    for key in path:
        tree = tree[key]
    return tree


# ---------------------------------------------------------------- paths


@given(PATHS)
def test_a_path_that_is_written_is_read_back(path):
    assert parse_path(path_text(path)) == path


def test_an_index_may_be_written_as_a_key():
    assert parse_path("disturbances.0.delay") == parse_path("disturbances[0].delay") == ("disturbances", 0, "delay")


@pytest.mark.parametrize(
    "text", ["", "3", "[0]", ".nodes", "cluster.", "cluster..nodes", "a[b]", "a[0", "a b", "a[-1]", "ä", f"a[{10**9}]"]
)
def test_what_is_no_path_is_refused(text):
    with pytest.raises(ValueError, match=r" is not a path: write e.g. cluster.nodes or disturbances\[0\].probability$"):
        parse_path(text)


# ---------------------------------------------------------------- replaced


@given(st.dictionaries(KEYS, TREES, min_size=1, max_size=3), st.data())
def test_replacing_a_value_changes_only_what_is_at_the_path(tree, data):
    path = data.draw(st.sampled_from(places(tree)[1:]))
    before = copy.deepcopy(tree)
    changed = replaced(tree, path, "new")
    assert at(changed, path) == "new"
    assert tree == before
    assert replaced(changed, path, at(tree, path)) == tree
    apart = [other for other in places(tree) if other[: len(path)] != path and path[: len(other)] != other]
    assert all(at(changed, other) is at(tree, other) for other in apart)


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("cluster.nodes", {"preset": "aws-p3", "nodes": 9}),
        ("cluster.device.peak.fp16", {"preset": "aws-p3", "device": {"peak": {"fp16": 9}}}),
        ("cluster.preset", {"preset": 9}),
        ("cluster", 9),
    ],
)
def test_a_field_below_the_name_of_a_preset_overrides_that_of_the_preset(path, written):
    assert replaced({"cluster": "aws-p3"}, parse_path(path), 9) == {"cluster": written}


@pytest.mark.parametrize("base", [{"preset": "aws-p3"}, {"file": "cluster.yaml"}, {"preset": "aws-p3", "nodes": 2}])
def test_a_field_beside_a_preset_or_a_file_overrides_it(base):
    assert replaced({"cluster": base}, ("cluster", "nodes"), 4) == {"cluster": base | {"nodes": 4}}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "cluster.fabric.latency",
            "cluster.fabric is 'ideal' in the scenario: write it out there, or vary it as a whole",
        ),
        ("cluster.nodes.x", "cluster.nodes is 2 in the scenario: write it out there, or vary it as a whole"),
        (
            "cluster.slow_devices[0].speed",
            "cluster.slow_devices is not written in the scenario: write it out there, or vary it as a whole",
        ),
        ("disturbances[1].delay", "disturbances has 1 item, counted from 0: there is no [1]"),
        ("schedules[3]", "schedules has 3 items, counted from 0: there is no [3]"),
    ],
)
def test_a_path_that_leads_nowhere_in_the_file_is_refused(tree, path, message):
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        replaced(tree, parse_path(path), 1)


# ---------------------------------------------------------------- find_field


@pytest.mark.parametrize(
    ("path", "column", "written", "number"),
    [
        ("cluster.nodes", "cluster.nodes", 4, 4),
        ("cluster.nodes", "cluster.nodes", 1e3, 1000),
        ("cluster.network.latency", "cluster.network.latency_s", "30 us", 3e-5),
        ("cluster.network.latency", "cluster.network.latency_s", "0.03ms", 3e-5),
        ("cluster.network.bandwidth", "cluster.network.bandwidth_Bps", "25 Gbit/s", 3.125e9),
        ("cluster.network.bandwidth", "cluster.network.bandwidth_Bps", "unlimited", float("inf")),
        ("cluster.collectives.library", "cluster.collectives.library", "gloo", "gloo"),
        ("cluster.network", "cluster.network", "ideal", "ideal"),
        (
            "cluster.network",
            "cluster.network",
            {"latency": "1 us", "bandwidth": "1 GB/s"},
            "{latency: 1 us, bandwidth: 1 GB/s}",
        ),
        ("cluster.storage.request_size", "cluster.storage.request_nbytes", "1 MiB", 1048576),
        ("cluster.memory.capacity", "cluster.memory.capacity_nbytes", None, "null"),
        ("cluster.device.peak.fp16", "cluster.device.peak.fp16", "1 TFLOP/s", 1e12),
        ("cluster.device.peak", "cluster.device.peak", {"fp16": "1 TFLOP/s"}, "{fp16: 1 TFLOP/s}"),
        ("cluster", "cluster", "dgx-h100", "dgx-h100"),
        ("cluster.preset", "cluster.preset", "dgx-h100", "dgx-h100"),
        ("cluster.file", "cluster.file", "cluster.yaml", "cluster.yaml"),
        ("workload.preset", "workload.preset", "vgg19", "vgg19"),
        ("workload.tensors_file", "workload.tensors_file", "t.csv", "t.csv"),
        ("workload.backward", "workload.backward_s", None, "null"),
        ("workload.tensors[0].count", "workload.tensors[0].count", 7, 7),
        ("input.data.file_size.median", "input.data.file_size.median_nbytes", "100 kB", 100_000),
        ("input.source", "input.source", "memory", "memory"),
        ("host.run_ahead_steps", "host.run_ahead_steps", 2, 2),
        ("disturbances", "disturbances", [], "[]"),
        ("disturbances[0].probability", "disturbances[0].probability", "2%", 0.02),
        ("disturbances[0].ranks", "disturbances[0].ranks", [0, 1], "[0, 1]"),
        ("disturbances[0].kind", "disturbances[0].kind", "jitter", "jitter"),
        ("schedules[1].period", "schedules[1].period", 8, 8),
        ("schedules[2].levels", "schedules[2].levels", {2: 4, 4: "world"}, "{2: 4, 4: world}"),
        ("schedules[2].levels.4", "schedules[2].levels[4]", "world", "world"),
        ("schedules[2].intra_node_gradients", "schedules[2].intra_node_gradients", False, False),
        ("schedules[0].label", "schedules[0].label", "plain", "plain"),
        ("seed", "seed", 3, 3),
        ("steps", "steps", "3 epochs", "3 epochs"),
        ("steps", "steps", 1e3, 1000),
    ],
)
def test_a_field_has_a_column_with_its_unit_and_its_values_are_read_as_the_scenario_reads_them(
    scenario, path, column, written, number
):
    field = find_field(scenario, parse_path(path))
    found = field.number(written)
    assert (field.column, found, type(found)) == (column, number, type(number))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("cluster.nodes", 0, "0: write at least 1"),
        ("cluster.nodes", "four", "'four' is not a whole number: write e.g. 8"),
        ("cluster.nodes", [1, 2], "[1, 2] is not a whole number: write e.g. 8"),
        ("cluster.network.latency", 5, "5: a time needs a unit: write e.g. 55 ms"),
        ("cluster.network.bandwidth", None, "null is not a bandwidth: write e.g. 25 Gbit/s"),
        ("cluster.network.bandwidth", "25 Gbps", "'25 Gbps': 'Gbps' is no unit of bandwidth: write 25 Gbit/s"),
        ("disturbances[0].probability", "200%", "'200%' is outside 0 to 1: write e.g. 2% or 0.02"),
        ("host.waits_for", "lost", "'lost': write 'loss' or 'update'"),
        ("schedules[2].intra_node_gradients", "perhaps", "'perhaps': write true or false"),
        ("steps", 0, "0: write at least 1"),
        ("steps", "3 years", "'3 years' is not a whole number: write e.g. 8"),
    ],
)
def test_a_value_that_is_wrong_by_itself_is_refused_in_the_words_of_the_scenario(scenario, path, value, message):
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        find_field(scenario, parse_path(path)).number(value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("step", "there is no key 'step' in a scenario: did you mean 'steps'?"),
        ("cluster.nodez", "there is no key 'nodez' in cluster: did you mean 'nodes'?"),
        ("cluster.network.latency_s", "there is no key 'latency_s' in cluster.network: did you mean 'latency'?"),
        ("disturbances[0].sigma", "there is no key 'sigma' in disturbances[0]: known: ranks, nodes, on, kind, "),
        ("disturbances[1].delay", "disturbances has 1 item, counted from 0: there is no [1]"),
        ("disturbances.delay", "disturbances is a list: write disturbances[0], counting from 0"),
        (
            "cluster.nodes.x",
            "there is nothing below cluster.nodes that has a name of its own: vary it as a whole",
        ),
        ("name", "name is for people and changes no number: vary something else"),
        ("cluster.source", "cluster.source is for people and changes no number: vary something else"),
    ],
)
def test_a_field_that_is_not_there_is_refused_with_the_nearest(scenario, path, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        find_field(scenario, parse_path(path))


@pytest.mark.parametrize(
    ("path", "is_number", "is_whole"),
    [
        ("cluster.nodes", True, True),
        ("cluster.network.latency", True, False),
        ("cluster.storage.request_size", True, True),
        ("workload.backward", True, False),
        ("steps", True, True),
        ("schedules[2].intra_node_gradients", False, False),
        ("schedules[2].levels.4", False, False),
        ("input.source", False, False),
        ("cluster.network", False, False),
    ],
)
def test_a_field_knows_whether_numbers_can_be_drawn_for_it(scenario, path, is_number, is_whole):
    field = find_field(scenario, parse_path(path))
    assert (field.is_number, field.is_whole) == (is_number, is_whole)


@pytest.mark.parametrize(
    ("path", "number", "written"),
    [
        ("cluster.nodes", 3.4, 3),
        ("cluster.network.latency", 0.00108303, "1.08303 ms"),
        ("cluster.network.bandwidth", 3.125e9, "25 Gbit/s"),
        ("cluster.storage.request_size", 1234.4, "1234 B"),
        ("workload.backward", 0.02, "20 ms"),
        ("disturbances[0].probability", 0.02, 0.02),
        ("disturbances[0].probability", 1.5, 1.5),  # too much: the scenario says so
    ],
)
def test_a_number_in_si_units_is_written_as_in_a_scenario_file(scenario, path, number, written):
    assert find_field(scenario, parse_path(path)).text(number) == written


@given(st.floats(1e-9, 1e9).map(lambda value: float(f"{value:.6g}")))
def test_what_is_written_is_read_as_the_same_number(number):
    field = find_field(loads(TEXT), ("cluster", "network", "latency"))
    assert field.number(field.text(number)) == number


@pytest.mark.parametrize(("value", "text"), [(None, "null"), ([1, {"a": "b"}], "[1, {a: b}]"), (2, 2), ("x", "x")])
def test_what_is_no_single_value_is_one_line_of_text(value, text):
    assert flat_text(value) == text
