"""Checkpoints that come by time: how many steps of each schedule they are apart, against closed forms."""

import json

import pytest
from commandline import call, write

from simdist.errors import ScenarioError
from simdist.plan.ops import Save
from simdist.runs import run_directory
from simdist.runs.building import build, in_steps, simulate
from simdist.scenario import dump, loads
from simdist.scenario.checkpoint import CheckpointSettings
from simdist.settings.units import Elapsed
from simdist.tuning.verdict import lines_of_scenario

FILE_S = 0.05 + 0.4  # 4 MB over the NIC of rank 0

SCENARIO = """
cluster:
  nodes: 2
  gpus_per_node: 1
  fabric: ideal
  network: {latency: 0 s, bandwidth: 10 MB/s}
  storage: {latency: 50 ms, bandwidth: unlimited}
workload: {tensors: [{name: all, count: 1000000}], batch_size: 1, forward: 40 ms, backward: 60 ms}
steps: 40
checkpoint: {every: EVERY, what: parameters}
disturbances: [{kind: persistent, delay: 1 s}]
schedules: [{kind: local_sgd, period: 4}, {kind: sync}]
"""


def scenario_of(every: str, text: str = SCENARIO):
    return loads(text.replace("EVERY", every))


@pytest.mark.parametrize(
    ("every", "local", "sync"),
    [  # 4 steps of local SGD take 0.8 s, a step of sync 0.5 s
        ("1 ms", 4, 1),
        ("0.8 s", 4, 2),
        ("801 ms", 8, 2),
        ("2 s", 12, 4),
        ("2.001 s", 12, 5),
        ("0.5 s", 4, 1),
        ("30 min", 9000, 3600),
        ("1 h", 18000, 7200),
    ],
)
def test_files_come_after_whole_periods_that_take_the_time(every: str, local: int, sync: int) -> None:
    scenario = scenario_of(every)
    found = [in_steps(scenario, schedule).checkpoint.every for schedule in scenario.schedules]
    assert found == [local, sync]


def test_steps_of_warm_up_do_not_count_and_longer_warm_up_changes_nothing() -> None:
    scenario = scenario_of("2 s").changed(schedules=[{"kind": "local_sgd", "period": 4, "warmup_steps": 30}])
    assert in_steps(scenario, scenario.schedules[0]).checkpoint.every == 12


def test_run_is_that_with_the_same_number_of_steps() -> None:
    """40 steps of sync at 0.5 s and 1 s of delay, and 10 files."""
    by_time = simulate(scenario_of("2 s"), label="sync")
    assert by_time.makespan_s == pytest.approx(40 * 1.5 + 10 * FILE_S)
    assert by_time.makespan_s == simulate(scenario_of("4"), label="sync").makespan_s


def test_scenario_keeps_the_time_and_the_plan_has_the_steps(tmp_path, capsys) -> None:
    path = write(tmp_path / "x.yaml", SCENARIO.replace("EVERY", "2 s"))
    answer = call(capsys, "plan", path, "-o", tmp_path / "runs")
    assert "checkpoint: every 2 s is every 12 steps of local-4; 4 steps of sync" in answer.err
    run = run_directory.read(tmp_path / "runs" / "sync")
    assert run.scenario.checkpoint.every == Elapsed(2.0)
    saving = [any(isinstance(op, Save) for op in body) for body in run.plan.bodies]
    steps = [step for step, body in enumerate(run.plan.body_of_steps()) if saving[body]]
    assert steps == list(range(3, 40, 4))
    assert loads(dump(run.scenario)) == run.scenario
    assert call(capsys, "simulate", tmp_path / "runs").code == 0


def test_compare_tells_it_and_what_files_add(tmp_path, capsys) -> None:
    path = write(tmp_path / "x.yaml", SCENARIO.replace("EVERY", "2 s"))
    answer = call(capsys, "compare", path, "--json")
    assert answer.code == 0, answer.err
    rows = {row["schedule"]: row for row in json.loads(answer.out)["rows"]}
    assert rows["sync"]["added_s"]["checkpoints"] == pytest.approx(FILE_S / 4)
    assert rows["local-4"]["added_s"]["checkpoints"] == pytest.approx(3 * FILE_S / 40)


def test_files_that_are_not_due_within_the_steps_are_named(tmp_path, capsys) -> None:
    path = write(tmp_path / "x.yaml", SCENARIO.replace("EVERY", "1 min"))
    answer = call(capsys, "compare", path)
    assert "every 60 s is every 300 steps of local-4, none within 40 steps; 120 steps of sync, none" in answer.err


def test_tune_takes_the_steps_of_its_baseline(tmp_path, capsys) -> None:
    path = write(tmp_path / "x.yaml", SCENARIO.replace("EVERY", "2 s"))
    answer = call(capsys, "tune", path, "--only", "local_sgd", "--baseline", "sync", "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert {row["checkpoint"]["every"] for row in found["rows"]} == {4}


def test_tune_prints_the_time_as_it_was_written(tmp_path, capsys) -> None:
    path = write(tmp_path / "x.yaml", SCENARIO.replace("EVERY", "2 s"))
    same = call(capsys, "tune", path, "--only", "local_sgd").out
    assert "local-8 is " in same
    assert "checkpoint: {" not in same
    assert "The further apart" not in same
    other = call(capsys, "tune", path, "--only", "local_sgd", "--checkpoint-mode", "async").out
    assert "checkpoint: {every: 2.0 s, mode: async}" in other
    more = call(capsys, "tune", path, "--only", "local_sgd", "--checkpoint-every", "9").out
    assert "checkpoint: {every: 9, mode: blocking}" in more
    assert "The further apart" in more


def test_tune_still_names_persistent_stragglers(tmp_path, capsys) -> None:
    late = SCENARIO.replace("delay: 1 s}", "delay: 1 s, ranks: [1]}")
    path = write(tmp_path / "x.yaml", late.replace("EVERY", "2 s").replace("steps: 40", "steps: 80"))
    assert (
        "a persistent straggler, rank 1: 100% of the waiting" in call(capsys, "tune", path, "--only", "local_sgd").out
    )


def test_winner_of_a_race_has_the_time_as_it_was_written() -> None:
    scenario = scenario_of("2 s")
    local = scenario.schedules[0]
    simulated = in_steps(scenario, scenario.schedules[1])
    own = simulated.checkpoint
    lines = lines_of_scenario(scenario, local, 1, own, own=own)
    assert lines == "schedules:\n  - {kind: local_sgd, period: 4}"
    changed = simulated.changed("checkpoint.mode", "async").checkpoint
    assert "checkpoint: {every: 2.0 s, mode: async}" in lines_of_scenario(scenario, local, 1, changed, own=own)


def test_runs_that_files_make_far_longer_are_named(tmp_path, capsys) -> None:
    sentence = "runs have 3,000 steps in place of 40, for 10 checkpoints or more: a smaller checkpoint.every"
    path = write(tmp_path / "x.yaml", SCENARIO.replace("EVERY", "1 min"))
    assert sentence in call(capsys, "tune", path, "--only", "local_sgd", "--global-every", "2").err
    path = write(tmp_path / "x.yaml", SCENARIO.replace("EVERY", "6 s"))  # 10 times 32 steps of local SGD
    assert "in place of" not in call(capsys, "tune", path, "--only", "local_sgd", "--global-every", "2").err


def test_sweep_varies_the_time(tmp_path, capsys) -> None:
    write(tmp_path / "x.yaml", SCENARIO.replace("EVERY", "2 s"))
    sweep = write(tmp_path / "sweep.yaml", "{scenario: x.yaml, vary: {checkpoint.every: [1 s, 2 s, 4]}, seeds: 1}")
    answer = call(capsys, "sweep", sweep, "-o", tmp_path / "out", "--workers", "0")
    assert answer.code == 0, answer.err
    rows = json.loads(call(capsys, "results", tmp_path / "out", "--json").out)["rows"]
    step_s = [row["step_s"] for row in rows if row["schedule"] == "sync"]
    assert step_s == pytest.approx([1.5 + FILE_S / 2, 1.5 + FILE_S / 4, 1.5 + FILE_S / 4])


@pytest.mark.parametrize(
    ("every", "problem"),
    [
        ("0 s", "checkpoint.every: '0 s': write a time above 0 s, e.g. 30 min, or a number of steps"),
        ("30", None),
        ("30 minutes", "checkpoint.every: '30 minutes'"),
        ("-1 min", "checkpoint.every: '-1 min'"),
        ("1.5", "checkpoint.every: 1.5 is not a whole number"),
        ("[1]", "checkpoint.every: [1] is not a whole number"),
        ("0", "checkpoint.every: 0: write at least 1"),
    ],
)
def test_time_that_is_none_is_refused(every: str, problem: str | None) -> None:
    if problem is None:
        assert scenario_of(every).checkpoint.every == 30
        return
    with pytest.raises(ScenarioError) as refused:
        scenario_of(every)
    assert problem in str(refused.value)


def test_steps_that_take_no_time_have_no_time_between_files() -> None:
    free = SCENARIO.replace("forward: 40 ms, backward: 60 ms", "forward: 0 s, backward: 0 s").replace(
        "{latency: 0 s, bandwidth: 10 MB/s}", "ideal"
    )
    with pytest.raises(ScenarioError, match="steps take no time without disturbances: write a number of steps"):
        build(scenario_of("1 s", free), scenario_of("1 s", free).schedules[1])


def test_python_takes_a_time_as_text_or_as_it_is() -> None:
    assert CheckpointSettings(every="30 min", what="state").every == Elapsed(1800.0)
    assert CheckpointSettings(every=Elapsed(5.0), what="state").every == Elapsed(5.0)
    assert CheckpointSettings(every=7, what="state").every == 7
