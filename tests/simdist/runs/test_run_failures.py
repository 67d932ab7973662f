"""Failures of a scenario as steps of a run directory."""

from pathlib import Path

import pytest

from simdist.errors import PlanError
from simdist.plan.failures import (
    StepFailure,
    check_step_failures,
    dump_step_failures,
    read_step_failures,
)
from simdist.runs import run_directory
from simdist.runs.building import Built, build, delays
from simdist.runs.run_failures import step_failures
from simdist.scenario import Scenario, loads

TEXT = """\
cluster:
  {nodes: 2, gpus_per_node: 2, fabric: ideal, network: ideal, disk: {latency: 0 s, read: 1 GB/s, write: 1 GB/s}}
workload: {tensors: [{name: weight, count: 2000}], batch_size: 4, forward: 1 s, backward: 2 s}
checkpoint: {every: 10, what: state, to: disk}
steps: 60
train_for: 60 steps
failures: {causes: [CAUSES], recovery: {timeouts: {collective: 10 s}}}
schedules: [{kind: sync}]
"""


def planned(*causes: str) -> tuple[Scenario, Built, tuple[StepFailure, ...]]:
    named = ", ".join(f"{{cause: cause {i}, {each}}}" for i, each in enumerate(causes))
    scenario = loads(TEXT.replace("CAUSES", named))
    built = build(scenario, scenario.schedules[0])
    return scenario, built, step_failures(scenario, built.plan, built.costs, delays(scenario))


def test_failures_at_steps_are_by_attempt() -> None:
    _, _, found = planned(
        "effect: process, at_steps: [15, 22], ranks: [3, 1]", "effect: node, at_steps: [17], ranks: [2]"
    )
    assert found == (
        StepFailure(0, 15, (3,), "gone"),
        StepFailure(1, 17, (2, 3), "lost"),
        StepFailure(2, 22, (1,), "gone"),
    )


def test_failures_at_the_same_step_are_of_one_attempt() -> None:
    _, built, found = planned("effect: hang, at_steps: [15, 22]", "effect: process, at_steps: [15, 22], ranks: [3, 1]")
    assert found == (
        StepFailure(0, 15, (3,), "gone"),
        StepFailure(0, 15, (0,), "hang"),
        StepFailure(1, 22, (1,), "gone"),
        StepFailure(1, 22, (0,), "hang"),
    )
    check_step_failures(built.plan, found)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ("effect: hang, at: [10 s], ranks: [1]", [StepFailure(0, 3, (1,), "hang")]),
        ("effect: flap, at: [10 s], ranks: [2], share: 0, lasts: 4 s", [StepFailure(0, 3, (2, 3), "pause", 4.0)]),
        ("effect: flap, at: [10 s], share: 0, lasts: 11 s", [StepFailure(0, 3, (0, 1), "hang")]),
        ("effect: flap, at: [10 s], share: 50 %, lasts: 4 s", []),
        ("effect: planned, at: [10 s]", [StepFailure(0, 4, (0, 1, 2, 3), "planned")]),
        ("effect: planned, at: [10 s], notice: 1 s", [StepFailure(0, 3, (0, 1, 2, 3), "gone")]),
        (
            "effect: slow, at: [9.5 s], ranks: [3], factor: 2, found_after: 6 s",
            [StepFailure(0, 3, (2, 3), "slow", 3.0), StepFailure(0, 5, (0, 1, 2, 3), "planned")],
        ),
        (
            "effect: corruption, at: [32 s], ranks: [2], found_after: 31 s",
            [StepFailure(0, 20, (2,), "gone", resume_before=11)],
        ),
    ],
)
def test_each_effect_has_a_kind(cause: str, expected: list[StepFailure]) -> None:
    """A step takes 3 s, so 10 s are in step 3. An announced end lets it finish."""
    _, built, found = planned(cause)
    assert [(each.attempt, each.step, each.ranks, each.kind, each.resume_before) for each in found] == [
        (each.attempt, each.step, each.ranks, each.kind, each.resume_before) for each in expected
    ]
    assert [each.pause_s for each in found] == pytest.approx([each.pause_s for each in expected], rel=1e-3)
    check_step_failures(built.plan, found)


def test_a_run_directory_has_them(tmp_path: Path) -> None:
    scenario, built, found = planned("effect: process, at_steps: [15]")
    run_directory.write(tmp_path, scenario, built.plan, delays(scenario), found)
    assert run_directory.read(tmp_path).failures == found
    calm = scenario.model_copy(update={"failures": None})
    run_directory.write(tmp_path, calm, built.plan, delays(calm), force=True)
    assert not (tmp_path / run_directory.FAILURES).exists()
    assert run_directory.read(tmp_path).failures == ()


@pytest.mark.parametrize(
    ("failure", "problem"),
    [
        (StepFailure(0, 60, (0,), "gone"), "step 60: the plan has steps 0 to 59"),
        (StepFailure(0, 5, (4,), "gone"), r"ranks \[4\]: name some of 0 to 3"),
        (StepFailure(1, 5, (0,), "gone"), "attempt 1: failures before it end 0 attempts"),
        (StepFailure(0, 5, (0,), "pause"), r"pause_s 0.0: write seconds above 0"),
    ],
)
def test_failures_that_cannot_strike_are_refused(tmp_path: Path, failure: StepFailure, problem: str) -> None:
    _, built, _ = planned("effect: process, at_steps: [15]")
    path = tmp_path / "failures.json"
    path.write_text(dump_step_failures([failure]))
    with pytest.raises(PlanError, match=rf"failures.json: failures\[0\]: {problem}"):
        read_step_failures(path, built.plan)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": "other"}', '{"format": "simdist-failures-1", "failures": 3}']
)
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    _, built, _ = planned("effect: process, at_steps: [15]")
    path = tmp_path / "failures.json"
    path.write_text(content)
    with pytest.raises(PlanError, match=r"failures\.json"):
        read_step_failures(path, built.plan)


@pytest.mark.parametrize(
    ("policy", "schedule", "reason"),
    [
        ("recovery: {state: replica}", "{kind: sync}", "can be simulated only"),
        ("on_failure: continue", "{kind: fsdp}", "on_failure: continue"),
        ("on_failure: continue", "{kind: naive_ag}", "real ranks go on without one of them only where"),
        ("on_failure: continue", "{kind: hierarchical_sgd, levels: {1: 2, 4: world}}", "only where all meet in means"),
        ("on_failure: continue", "{kind: local_sgd, period: 4, overlap_steps: 2}", "in flight during later steps"),
        ("on_failure: continue", "{kind: sync}", ""),
        ("on_failure: continue", "{kind: local_sgd, period: 4, warmup_steps: 3}", ""),
        ("on_failure: continue", "{kind: diloco, period: 4}", ""),
    ],
)
def test_what_real_ranks_cannot_do_is_only_simulated(policy: str, schedule: str, reason: str) -> None:
    text = TEXT.replace("recovery: {timeouts: {collective: 10 s}}", policy).replace("{kind: sync}", schedule)
    scenario = loads(text.replace("CAUSES", "{cause: kill, effect: process, at_steps: [15]}"))
    built = build(scenario, scenario.schedules[0])
    run = run_directory.RunDirectory(Path("run"), scenario, built.plan, delays(scenario))
    found = run.only_simulated
    assert found is None if not reason else found and reason in found
