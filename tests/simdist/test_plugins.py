"""Classes and algorithms of users: every command and study takes them as those that ship."""

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from chakra_messages import read_trace
from commandline import SMALL, Answer, call, edited, write
from engine_runs import des, fast

import simdist
from simdist import scenario as scenarios
from simdist.errors import PlanError, ScenarioError
from simdist.plan import AllReduce, Broadcast, Group, algorithms
from simdist.runs import run_directory
from simdist.runs.building import build, delay_sampler, delays
from simdist.schedules import KINDS, LocalSGD, Sync
from simdist.settings import plugins
from simdist.testing import check_algorithm, check_disturbance, check_schedule
from simdist.tuning import Constraints, Extras, TuneOptions, tune
from simdist.tuning.space import space

ROOT = Path(__file__).resolve().parents[2]
MODULES = ROOT / "tests" / "user_modules"
EXAMPLE = ROOT / "docs" / "examples" / "node-sgd"
BY_MODULE = {
    "schedule": "node_sgd:NodeSGD",
    "disturbance": "node_sgd:Maintenance",
    "algorithm": "node_sgd:STAR",
    "actor": "node_sgd_machines:Nightly",
    "storage": "node_sgd_machines:Objects",
}
BY_NAME = {
    "schedule": "node_sgd",
    "disturbance": "maintenance",
    "algorithm": "star",
    "actor": "nightly",
    "storage": "objects",
}


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python find the modules, as PYTHONPATH does."""
    monkeypatch.syspath_prepend(MODULES)
    monkeypatch.syspath_prepend(EXAMPLE)


def install(folder: Path) -> Path:
    """Write what an installer leaves of the example package besides its module."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"node_sgd-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8")
    lines = [
        line
        for group, names in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in names.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(params=["module", "entry point"])
def names(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the names of the example's classes: by their module, and as an installed package declares them."""
    if request.param == "module":
        return BY_MODULE
    monkeypatch.syspath_prepend(install(tmp_path / "site-packages"))
    return BY_NAME


def text_of(names: dict[str, str]) -> str:
    own = {key: f"'{name}'" for key, name in names.items()}
    return edited(
        ("kind: transient, probability: 10%,", f"kind: {own['disturbance']}, interval: 4,"),
        ("{kind: local_sgd, period: 4}", f"{{kind: {own['schedule']}, period: 4}}"),
        (
            "kind: hierarchical_sgd, levels: {2: 4, 4: world}",
            f"kind: local_sgd, period: 4, algorithm: {own['algorithm']}",
        ),
    )


@pytest.fixture
def file(names: dict[str, str], tmp_path: Path) -> Path:
    return write(tmp_path / "own.yaml", text_of(names))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def called(*args: object) -> Answer:
        answer = call(capsys, *args)
        assert answer.code == 0, answer.err
        return answer

    return called


# ---------------------------------------------------------------- every consumer


def test_scenario_is_read_and_written_with_the_names(names: dict[str, str], file: Path) -> None:
    scenario = scenarios.load(file)
    dumped = scenarios.dump(scenario)
    assert scenarios.loads(dumped, name="own.yaml") == scenario
    assert f"{{kind: {names['schedule']}, " in dumped or f"kind: '{names['schedule']}'" in dumped
    assert scenario.schedules[1].name == "node-4"
    assert [each.kind_in_files() for each in scenario.schedules] == ["sync", names["schedule"], "local_sgd"]
    assert scenario.changed(steps=8).schedules == scenario.schedules


def test_compare_shows_a_schedule_like_the_one_that_ships_and_does_the_same(file: Path, tmp_path: Path, run) -> None:
    found = json.loads(run("compare", file, "--seeds", 3, "--json").out)
    shipped = file.read_text(encoding="utf-8")
    own = next(line for line in shipped.splitlines() if "node_sgd" in line and "period" in line)
    alike = "  - {kind: hierarchical_sgd, levels: {4: world}, label: node-4}"
    reference = json.loads(
        run("compare", write(tmp_path / "alike.yaml", shipped.replace(own, alike)), "--seeds", 3, "--json").out
    )
    assert [row["schedule"] for row in found["rows"]] == ["sync", "node-4", "local-4"]
    assert found["rows"][1]["step_s"] == reference["rows"][1]["step_s"]


def test_both_engines_agree_on_plan_delays_and_prices(file: Path) -> None:
    scenario = scenarios.load(file)
    for schedule in scenario.schedules:
        built = build(scenario, schedule)
        traces = [engine.simulate(built.plan, built.costs, delays(scenario)) for engine in (des, fast)]
        assert np.nanmax(np.abs(traces[0].difference_s(traces[1]))) <= 1e-9 * traces[0].makespan_s


def test_run_directories_are_simulated_shown_and_exported(file: Path, tmp_path: Path, run) -> None:
    runs = tmp_path / "runs"
    assert "proved" in run("plan", file, "-o", runs).out
    read = run_directory.read(runs / "node-4")
    assert read.scenario.schedules[0].kind == "node_sgd"
    assert read.plan.digest() == build(read.scenario, read.scenario.schedules[0]).plan.digest()
    run("simulate", file, "-o", runs)
    chrome = tmp_path / "chrome.json"
    run("trace", runs / "node-4" / run_directory.SIMULATED, "--chrome", chrome)
    assert json.loads(chrome.read_text(encoding="utf-8"))["traceEvents"]
    page = tmp_path / "page.html"
    run("report", runs, "-o", page)
    assert "node-4" in page.read_text(encoding="utf-8")
    run("plan", file, "--schedule", "node-4", "--chakra", tmp_path / "chakra")
    assert sum(1 for _ in read_trace(next((tmp_path / "chakra").glob("*.et")))) > 0


def test_validate_marks_what_is_only_simulated(names: dict[str, str], file: Path, tmp_path: Path, run) -> None:
    runs = tmp_path / "runs"
    run("plan", file, "--schedule", "local-4", "-o", runs)
    answer = run("validate", runs)
    assert answer.out.startswith(
        f"local-4: only simulated: all_reduce(flat, mean over group of 8, {names['algorithm']}) takes an algorithm "
    )
    (row,) = json.loads(run("validate", runs, "--json").out)["rows"]
    assert (row["schedule"], row["run"]) == ("local-4", str(runs))
    assert "takes an algorithm of your own, which can be simulated only" in row["only_simulated"]


def test_whatif_tells_what_stragglers_cost_under_it(file: Path, run) -> None:
    found = json.loads(run("whatif", file, "--schedule", "node-4", "--json").out)
    assert found["schedule"] == "node-4"


def test_tune_tries_the_values_that_it_declares(names: dict[str, str], file: Path) -> None:
    scenario = scenarios.load(file)
    found = space(scenario, Constraints(global_every=8), Extras())
    periods = [dict(each.changed)["period"] for each in found.candidates if each.kind == names["schedule"]]
    assert sorted(periods) == [2, 4, 8]
    assert found.candidates[0].kind in KINDS.shipped()
    tuned = tune(scenario, TuneOptions(Constraints(4), Extras(only=(names["schedule"],)), n_seeds=2, n_search_seeds=1))
    assert {each.schedule.name for each in tuned.finalists} == {"sync", "node-2", "node-4"}


def test_tune_command_lists_kinds_of_installed_packages_and_writes_their_names(
    names: dict[str, str], file: Path, run
) -> None:
    listed = run("tune", "--help").out.replace("\n", "").replace(" ", "")
    assert ("|node_sgd]" in listed) == (names is BY_NAME)
    found = json.loads(run("tune", file, "--only", names["schedule"], "--seeds", 2, "--search-seeds", 1, "--json").out)
    entries = {row["schedule"]: row["entry"] for row in found["rows"]}
    (again,) = scenarios.loads(SMALL.partition("schedules:")[0] + "schedules:\n  " + entries["node-2"]).schedules
    assert again.name == "node-2"


@pytest.mark.parametrize("n_workers", [0, 2])
def test_sweep_computes_rows_here_and_in_other_processes(
    file: Path, tmp_path: Path, run, n_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = write(tmp_path / "sweep.yaml", f"scenario: {file.name}\nvary: {{schedules.1.period: [2, 4]}}\nseeds: 2\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLE), *sys.path]))
    out = tmp_path / "sweep"
    run("sweep", sweep, "-o", out, "--workers", n_workers)
    found = json.loads(run("results", out, "--json").out)
    assert (found["failed"], found["missing"]) == (0, 0)
    assert {row["schedule"] for row in found["rows"]} == {"sync", "node-2", "node-4", "local-4"}


def test_keys_of_a_sweep_count_the_code_of_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from simdist.sweeps.keys import Content

    schedule = {"kind": "changing:One"}
    digests = []
    monkeypatch.syspath_prepend(tmp_path)
    for period in (1, 2):
        code = f"from racks import RackSGD\nclass One(RackSGD):\n    number = {period}\n"
        write(tmp_path / "changing.py", code.replace("number", "number: int"))
        sys.modules.pop("changing", None)
        plugins.user_code_digest.cache_clear()
        digests.append(Content({}, tmp_path).text(schedule))
    assert digests[0] != digests[1]
    assert Content({}, tmp_path).text({"kind": "sync"}) == "{'kind':'sync'}"


# ---------------------------------------------------------------- what they do


def test_delays_of_a_disturbance_are_its_own(file: Path) -> None:
    scenario = scenarios.load(file)
    found_s = delay_sampler(scenario, [0, 1]).take(12)["host"]
    assert found_s.shape == (2, 12, 8)
    assert set(np.unique(found_s)) == {0.0, 0.05}
    assert (found_s.reshape(2, 3, 4, 8).sum(axis=2) == 0.05).all()  # once in each interval of 4 steps
    assert (found_s[..., :4] == found_s[..., :1]).all()  # the whole node
    assert (found_s[0] != found_s[1]).any()


def test_price_of_an_algorithm_is_that_of_its_messages(names: dict[str, str]) -> None:
    text = edited(
        ("nodes: 2\n  gpus_per_node: 4", "nodes: 3\n  gpus_per_node: 1\n  collectives: {library: gloo}"),
        ("- kind: sync", f"- {{kind: sync, algorithm: '{names['algorithm']}', bucket_size: null}}"),
    ).partition("  - {kind: local_sgd")[0]
    built = build(scenario := scenarios.loads(text), scenario.schedules[0])
    (op,) = {op for body in built.plan.bodies for op in body if getattr(op, "algorithm", None) == names["algorithm"]}
    assert op.group == Group(3)
    assert built.costs.of[op].alone_s == pytest.approx(2 * (25e-6 + 2 * 404_000 / 3.125e9))


def test_algorithm_carries_only_what_it_declares() -> None:
    with pytest.raises(ScenarioError, match="node_sgd:STAR moves whole buffers, not slices: write auto, direct, halv"):
        scenarios.loads(edited(("- kind: sync", "- {kind: torus, algorithm: 'node_sgd:STAR'}")))
    assert algorithms.carries("node_sgd:STAR", AllReduce)
    assert not algorithms.carries("node_sgd:STAR", AllReduce, Broadcast)


def test_tune_varies_a_required_parameter_over_what_the_scenario_writes() -> None:
    text = edited(("{kind: local_sgd, period: 4}", "{kind: 'racks:RackSGD', ranks: 4}"))
    scenario = scenarios.loads(text)
    found = space(scenario, Constraints(8), Extras(only=("racks:RackSGD",)))
    assert [each.changed for each in found.candidates] == [(("ranks", 4),)]
    with pytest.raises(ScenarioError, match="--only racks:RackSGD: no value of ranks is known, which must be written"):
        space(scenarios.loads(SMALL), Constraints(8), Extras(only=("racks:RackSGD",)))


def test_tune_says_why_a_schedule_is_not_tried() -> None:
    scenario = scenarios.loads(edited(("{kind: local_sgd, period: 4}", "{kind: 'hypercube_sgd:HypercubeSGD'}")))
    wanted = TuneOptions(Constraints(8), Extras(only=("hypercube_sgd:HypercubeSGD",)), n_seeds=2, n_search_seeds=1)
    refusal = r"none of 1 candidates is legal .*; the first: hypercube_sgd:HypercubeSGD: hypercube-1 never averages"
    with pytest.raises(ScenarioError, match=refusal):
        tune(scenario, wanted)


def test_subclass_of_one_that_ships_is_another_schedule() -> None:
    scenario = scenarios.loads(edited(("{kind: local_sgd, period: 4}", "{kind: 'small_buckets:SmallBuckets'}")))
    sync, small, _ = scenario.schedules
    assert isinstance(small, Sync)
    assert (small.name, small.bucket_nbytes, sync.model_copy().name) == ("small-buckets", 1_000_000, "sync")
    found = space(scenario, Constraints(1), Extras())
    assert "small_buckets:SmallBuckets" in {each.kind for each in found.candidates}
    again = scenarios.loads(edited(("{kind: local_sgd, period: 4}", "{kind: 'small_buckets:SameKind', label: own}")))
    assert scenarios.loads(scenarios.dump(again)).schedules[1].kind_in_files() == "small_buckets:SameKind"


STORED = """\
cluster:
  nodes: 2
  gpus_per_node: 1
  fabric: ideal
  network: {latency: 0 s, bandwidth: 100 MB/s}
  storage: STORAGE
workload:
  tensors: [{name: all, count: 2500000}]
  batch_size: 1
  sample_size: 1 MB
  forward: 40 ms
  backward: 80 ms
  optimize: 10 ms
input: INPUT
actors: ACTORS
schedules: [{kind: sync}, {kind: local_sgd, period: 1}]
steps: 3
"""
PLAIN = "{latency: 200 ms, bandwidth: 100 MB/s}"
FILES = "{source: storage, data: {samples: 100, file_size: 4 MiB}}"


def stored(*, storage: str = PLAIN, actors: str = "[]", source: str = "{}") -> scenarios.Scenario:
    text = STORED.replace("STORAGE", storage).replace("ACTORS", actors).replace("INPUT", source)
    return scenarios.loads(text, name="own.yaml")


def test_actor_of_a_scenario_takes_bandwidth_as_one_that_is_passed_in_python(names: dict[str, str]) -> None:
    """Beside 3 flows, the all-reduce of 10 MB has a quarter of the card."""

    def flood(env, cluster):
        for _ in range(3):
            cluster.flow(cluster.nic_out(0))
        yield env.timeout(0)

    quiet = stored()
    named = stored(actors=f"[{{kind: '{names['actor']}', begin: 0 s, flows: 3}}]")
    assert scenarios.loads(scenarios.dump(named), name="own.yaml") == named
    found = simdist.simulate(named)
    assert found.source == "simulated by des"
    assert found.makespan_s == pytest.approx(3 * (0.13 + 4 * 0.1), abs=1e-9)
    assert found.makespan_s == simdist.simulate(quiet, actors=[flood]).makespan_s
    both = simdist.simulate(named, actors=[flood]).makespan_s
    assert both == pytest.approx(3 * (0.13 + 7 * 0.1), abs=1e-9)
    first, *_ = simdist.compare(named, n_seeds=2).document()["rows"]
    assert first["step_s"] == pytest.approx(0.53, abs=1e-9)
    assert first["added_s"] == {"links": pytest.approx(0.3, abs=1e-9)}


def test_run_with_an_actor_is_only_simulated(names: dict[str, str], tmp_path: Path, run) -> None:
    named = stored(actors=f"[{{kind: '{names['actor']}', begin: 1 s}}]")
    file = write(tmp_path / "own.yaml", scenarios.dump(named))
    run("plan", file, "--schedule", "sync", "-o", tmp_path / "runs")
    (row,) = json.loads(run("validate", tmp_path / "runs", "--json").out)["rows"]
    reason = f"actors ({names['actor']}) can be simulated only: they are processes of the simulation"
    assert row["only_simulated"].startswith(reason)


def test_storage_of_ones_own_says_what_each_file_waits_for(names: dict[str, str]) -> None:
    """A file of 4 MiB takes 4 requests, of which this storage makes two in turn, as one with requests of 2 MiB does."""
    own = PLAIN.replace("{", f"{{kind: '{names['storage']}', ")
    alike = PLAIN.replace("}", ", request_size: 2 MiB}")
    own_s, alike_s, plain_s = (
        simdist.simulate(stored(storage=each, source=FILES)).makespan_s for each in (own, alike, PLAIN)
    )
    assert own_s == alike_s < plain_s
    named = stored(storage=own, source=FILES)
    assert scenarios.loads(scenarios.dump(named), name="own.yaml") == named
    faster = named.changed("cluster.storage.latency", "100 ms")
    assert type(faster.cluster.storage) is type(named.cluster.storage)
    assert simdist.simulate(faster).makespan_s < own_s


@pytest.mark.parametrize(
    ("given", "place", "message"),
    [
        ({"storage": "{kind: 'broken:Helper'}"}, "cluster.storage.kind", "is no storage: write a class that extends"),
        ({"storage": "{kind: nfs}"}, "cluster.storage.kind", "unknown kind 'nfs'"),
        ({"actors": "[{kind: 'broken:Helper'}]"}, "actors[0].kind", "is no actor: write a class that extends simdist"),
        ({"actors": "[{kind: 'node_sgd_machines:Nightli'}]"}, "actors[0].kind", "did you mean 'Nightly'?"),
        ({"actors": "[{kind: 'node_sgd_machines:Nightly'}]"}, "actors[0].begin", "required key 'begin' is missing"),
    ],
)
def test_actor_or_storage_that_is_wrong_is_told_with_its_place(given: dict[str, str], place: str, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        stored(**given)
    assert place in str(caught.value)
    assert message in str(caught.value)


# ---------------------------------------------------------------- rules


def test_schedules_of_users_keep_the_rules() -> None:
    from hypercube_sgd import HypercubeSGD
    from racks import RackSGD
    from small_buckets import SmallBuckets

    for cls in (HypercubeSGD, RackSGD, SmallBuckets):
        check_schedule(cls)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Overstated", r"overstated on 2 nodes of 4 GPUs: plan overstated.* step 0"),
        ("NoAxis", r"sync: axis 'speed' is none of the fields: kind, label"),
        ("NoPermit", r"sync: axis bucket_nbytes asks for 'magic': write it in `permits`"),
    ],
)
def test_schedule_that_breaks_a_rule_is_told(name: str, message: str) -> None:
    import broken

    with pytest.raises(AssertionError, match=message):
        check_schedule(vars(broken)[name])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Forgetful", "delays_s returns other delays for the same numbers: draw none of its own"),
        ("Restarting", "delays are others when drawn in chunks"),
        ("Negative", "delays_s returns -1 s: return seconds, finite and 0 or more"),
        ("Shapeless", r"delays_s returns float64 \[7\]: return seconds that broadcast to \[25, 8, 3\]"),
    ],
)
def test_disturbance_that_breaks_a_rule_is_told(name: str, message: str) -> None:
    import broken

    with pytest.raises(AssertionError, match=message):
        check_disturbance(vars(broken)[name]())


@pytest.mark.parametrize("disturbance", ["transient", "jitter", "bursts", "interference"])
def test_disturbances_that_ship_keep_the_rules(disturbance: str) -> None:
    settings: dict[str, dict[str, object]] = {
        "transient": {"probability": 0.3, "delay_s": 0.1, "ranks": (5,)},
        "jitter": {"median_s": 0.1, "sigma": 1.0},
        "bursts": {"enter": 0.1, "leave": 0.3, "delay_s": 0.1},
        "interference": {"lost": 0.1},
    }
    check_disturbance(scenarios.disturbances.KINDS.shipped()[disturbance](**settings[disturbance]))


@pytest.mark.parametrize("name", [name for name in algorithms.names() if name not in ("auto", "server")])
def test_algorithms_that_ship_keep_the_rules(name: str) -> None:
    check_algorithm(name)


def test_plan_that_is_not_what_the_schedule_declares_is_refused_by_every_command(tmp_path: Path, capsys) -> None:
    file = write(tmp_path / "s.yaml", edited(("{kind: local_sgd, period: 4}", "{kind: 'broken:Overstated'}")))
    for command in (["compare", "--seeds", 1], ["simulate"], ["plan", "-o", tmp_path / "runs"]):
        answer = call(capsys, command[0], file, *command[1:])
        assert answer.code == 2
        assert "plan overstated" in answer.err
    with pytest.raises(PlanError, match="plan overstated"):
        build(scenario := scenarios.load(file), scenario.schedules[1])


# ---------------------------------------------------------------- what is wrong, and where

WRONG = {
    "no_such:Schedule": "no module 'no_such' in the current directory, on PYTHONPATH or installed; correct the name, "
    "install its package, or write PYTHONPATH=FOLDER before the command",
    "hypercube_sgd:Hypercube": "hypercube_sgd.py has no 'Hypercube'; did you mean 'HypercubeSGD'?",
    "broken:Helper": "is no schedule: write a class that extends simdist.schedules.base.Schedule",
    "broken:Abstract": "the class is abstract: write average, default_label",
    "broken:Nameless": 'the class has no kind: write kind: Literal["nameless"] = "nameless"',
    "raising:Schedule": "importing raising fails: RuntimeError: the licence server does not answer (",
    "__main__:Schedule": "no other process finds a class of a script: put it in a module",
    "a b:C": "write module:Class, such as gossip_sgd:GossipSGD",
}


@pytest.mark.parametrize("kind", WRONG)
def test_schedule_that_is_not_there_is_told_with_its_place(kind: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        scenarios.loads(edited(("{kind: local_sgd, period: 4}", f"{{kind: '{kind}'}}")), name="own.yaml")
    first, *others = str(caught.value).splitlines()
    assert first.startswith(f"own.yaml:19: schedules[1].kind: '{kind}': ")
    assert WRONG[kind] in first
    assert not others


def test_wrong_settings_of_a_schedule_are_told_as_of_any() -> None:
    text = edited(("{kind: local_sgd, period: 4}", "{kind: 'racks:RackSGD', ranks: 3, perod: 3}"))
    with pytest.raises(
        ScenarioError, match=r"own.yaml:19: schedules\[1\].perod: unknown key 'perod': did you mean 'peri"
    ):
        scenarios.loads(text, name="own.yaml")
    with pytest.raises(ScenarioError, match=r"own.yaml:19: schedules\[1\].ranks: racks of 3 do not divide 8 ranks"):
        scenarios.loads(text.replace(", perod: 3", ""), name="own.yaml")
    with pytest.raises(ScenarioError, match=r"own.yaml:19: schedules\[1\]: period 3 is odd: write an even one"):
        scenarios.loads(text.replace("perod", "period"), name="own.yaml")


@pytest.mark.parametrize(
    ("kind", "message"),
    [("broken:Helper", "is no disturbance"), ("transients", "unknown kind 'transients': did you mean 'transient'?")],
)
def test_disturbance_that_is_not_there_is_told_with_its_place(kind: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=r"own.yaml:16: disturbances\[0\].kind: ") as caught:
        scenarios.loads(edited(("kind: transient,", f"kind: '{kind}',")), name="own.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("rnig", "unknown algorithm 'rnig': did you mean 'ring'?"),
        ("NVLSTree", "unknown algorithm 'NVLSTree': write nvls, which is NCCL's NVLSTree over several nodes"),
        ("broken:NOTHING", "'broken:NOTHING': carries names no collectives: write e.g. (AllReduce,)"),
        ("broken:Helper", "is no algorithm: write a simdist.plan.algorithms.CollectiveAlgorithm"),
    ],
)
def test_algorithm_that_is_not_there_is_told_with_its_place(algorithm: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=r"own.yaml:18: schedules\[0\].algorithm: ") as caught:
        scenarios.loads(edited(("- kind: sync", f"- {{kind: sync, algorithm: '{algorithm}'}}")), name="own.yaml")
    assert message in str(caught.value)


def entry_point(folder: Path, package: str, group: str, line: str) -> None:
    info = folder / f"{package}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {package}\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{group}]\n{line}\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        (
            "cube = hypercube_sgd:HypercubeSGD",
            "cube",
            "has kind 'hypercube_sgd': give the entry point that name",
        ),
        ("lost = no_such:One", "lost", "package mine, entry point lost = no_such:One: importing no_such fails"),
        ("none = racks:One", "none", "racks.py has no 'One': correct the package's pyproject.toml"),
    ],
)
def test_entry_point_that_is_wrong_is_told_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, kind: str, message: str
) -> None:
    entry_point(tmp_path, "mine", "simdist.schedules", line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ScenarioError) as caught:
        scenarios.loads(edited(("{kind: local_sgd, period: 4}", f"{{kind: {kind}}}")), name="own.yaml")
    assert message in str(caught.value)
    assert scenarios.loads(SMALL).schedules[1] == LocalSGD(period=4)  # others are read all the same
    with pytest.raises(ScenarioError, match="package mine, entry point"):
        Extras().kinds()


def test_entry_points_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_point(tmp_path, "one", "simdist.schedules", "rack_sgd = racks:RackSGD")
    entry_point(tmp_path, "other", "simdist.schedules", "rack_sgd = racks:Other")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ScenarioError, match=r"both declare 'rack_sgd' in simdist.schedules: uninstall one of them"):
        scenarios.loads(edited(("{kind: local_sgd, period: 4}", "{kind: rack_sgd, ranks: 4}")))


def test_entry_point_of_a_kind_that_ships_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_point(tmp_path, "mine", "simdist.schedules", "sync = small_buckets:SameKind")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ScenarioError, match=r"package mine declares 'sync' .* and simdist has a schedule of that kind"):
        Extras().kinds()


# ---------------------------------------------------------------- where modules are looked for


def command(*args: object, folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    """Run the command as its installed script does: the current directory is not on Python's path."""
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    program = [sys.executable, "-m", "simdist", *map(str, args)]
    return subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_modules_are_found_in_the_current_directory_and_not_beside_the_scenario(tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "racks.py").write_text((MODULES / "racks.py").read_text(encoding="utf-8"), encoding="utf-8")
    text = edited(("{kind: local_sgd, period: 4}", "{kind: 'racks:RackSGD', ranks: 4}"))
    file = write(beside / "own.yaml", text)
    found = command("compare", file, "--seeds", 1, folder=beside, path=str(ROOT))
    assert found.returncode == 0, found.stderr
    assert "rack-4-4" in found.stdout
    refused = command("compare", file, "--seeds", 1, folder=tmp_path, path=str(ROOT))
    assert refused.returncode == 2
    assert f"{beside} has one: run it from there, or write PYTHONPATH={beside} before the command" in refused.stderr
    with_path = command("compare", file, "--seeds", 1, folder=tmp_path, path=f"{ROOT}{os.pathsep}{beside}")
    assert with_path.stdout == found.stdout


def test_tests_of_the_example_package_pass() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLE)])}
    program = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", str(EXAMPLE)]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "4 passed" in ended.stdout


def test_no_list_of_kinds_stands_outside_of_schedules() -> None:
    """A kind as a text, in code that is not of the schedules: in a list of its own, a new one would be missing."""
    kinds = set(KINDS.shipped())
    allowed = {"sync"}  # the baseline by default, and the settings of inputs
    found = []
    for path in [*(ROOT / "simdist").rglob("*.py"), *(ROOT / "real").rglob("*.py")]:
        if path.is_relative_to(ROOT / "simdist" / "schedules"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in kinds - allowed:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}")
    assert found == []
