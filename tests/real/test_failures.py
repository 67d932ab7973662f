"""`python -m real` with failures under torchrun: each strikes once, and the job goes on from its newest checkpoint."""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from commandline import call  # noqa: E402
from processes import places, run, torchrun_forks  # noqa: E402

from real.cli import main  # noqa: E402
from simdist.plan import Op, Optimize, occurrences  # noqa: E402
from simdist.plan.failures import StepFailure  # noqa: E402
from simdist.runs import run_directory  # noqa: E402
from simdist.runs.building import build, delays  # noqa: E402
from simdist.scenario import loads  # noqa: E402
from simdist.studies.validation import finished_steps  # noqa: E402
from simdist.traces.attempts import ATTEMPTS, AttemptLog  # noqa: E402
from simdist.traces.trace import Trace  # noqa: E402

SLEEPING = """\
cluster:
  {nodes: 1, gpus_per_node: 2, fabric: ideal, network: ideal, disk: {latency: 0 s, read: 1 GB/s, write: 1 GB/s}}
workload: {tensors: [{name: weight, count: 2000}], batch_size: 4, forward: 2 ms}
checkpoint: {every: 25, what: state, to: disk}
steps: 300
schedules: [{kind: sync}]
"""
TRAINING = """\
cluster:
  {nodes: 1, gpus_per_node: 2, fabric: ideal, network: ideal, disk: {latency: 0 s, read: 1 GB/s, write: 1 GB/s}}
workload: {preset: mlp, batch_size: 4}
checkpoint: {every: 4, what: state, to: disk, ranks: all}
steps: 14
schedules: [SCHEDULE]
"""


def write(path: Path, text: str, failures: Sequence[StepFailure]) -> Path:
    scenario = loads(text)
    plan = build(scenario, scenario.schedules[0]).plan
    run_directory.write(path, scenario, plan, delays(scenario), failures)
    return path


def perform(path: Path, saved: Path, *options: object, environ: Mapping[str, str] | None = None) -> str:
    """Run on two ranks under torchrun, which starts them again up to five times; return what they print."""
    command = ("--standalone", "--nproc-per-node=2", "--max-restarts=5", "-m", "real", path, "--checkpoints", saved)
    (ending,) = run(torchrun_forks, 1, *command, *options, environ=environ).values()
    assert ending.code == 0, ending.output
    return ending.output


def rows(trace: Trace, kind: type[Op]) -> np.ndarray:
    """Return the row of each step's operation of a kind."""
    found = np.zeros(trace.plan.n_steps, dtype=np.int64)
    for each in occurrences(trace.plan):
        if isinstance(each.op, kind):
            found[each.steps] = each.rows
    return found


def updated(trace: Trace) -> np.ndarray:
    """Tell of each step whether all ranks have updated the model."""
    return np.isfinite(trace.end_s[rows(trace, Optimize)]).all(axis=1)


def gone(attempt: int, step: int, rank: int = 0) -> StepFailure:
    return StepFailure(attempt, step, (rank,), "gone")


def test_deaths_give_the_attempts_of_ezpz(tmp_path: Path) -> None:
    """300 steps, a checkpoint every 25, deaths at 60, 145 and 240: resumed from 50, 125, 225.

    Source: ezpz, pull request 225.
    """
    path = write(tmp_path / "run", SLEEPING, [gone(0, 60, 1), gone(1, 145), gone(2, 240, 1)])
    output = perform(path, tmp_path / "saved")
    assert output.count("ended without a word (killed?)") == 3
    log = AttemptLog.load(path / ATTEMPTS)
    assert [each.first_step for each in log.attempts] == [0, 50, 125, 225]
    assert [each.step for each in log.met] == [60, 145, 240]
    repeated = [met.step - later.first_step for met, later in zip(log.met, log.attempts[1:], strict=True)]
    assert repeated == [10, 20, 15]
    for number, (attempt, met) in enumerate(zip(log.attempts, log.met, strict=False)):
        part = Trace.load(path / f"trace.attempt-{number}.npz")
        done = updated(part)
        assert done[attempt.first_step : met.step].all()
        assert not done[: attempt.first_step].any()
        assert not done[met.step :].any()
    whole = Trace.load(path / run_directory.REAL)
    assert finished_steps(whole) == 300
    assert whole.run == log.run == run_directory.read_real_report(path, whole)["run"]
    assert sorted(file.name for file in path.iterdir()) == [
        "attempts.json",
        "delays.npz",
        "failures.json",
        "plan.json",
        "real.json",
        "scenario.yaml",
        *(f"trace.attempt-{number}.npz" for number in range(3)),
        "trace.real.npz",
    ]
    times_s = [(each.launched_s, each.started_s, each.connected_s, each.began_s) for each in log.attempts]
    assert all(list(each) == sorted(each) for each in times_s)
    assert all(met.at_s < later.launched_s for met, later in zip(log.met, log.attempts[1:], strict=True))


def test_failures_at_the_same_step_end_one_attempt(tmp_path: Path) -> None:
    """A rank dies at the step at which the other one hangs, and torchrun ends that one."""
    together = [gone(0, 60, 1), StepFailure(0, 60, (0,), "hang")]
    path = write(tmp_path / "run", SLEEPING, [*together, gone(1, 145)])
    perform(path, tmp_path / "saved")
    log = AttemptLog.load(path / ATTEMPTS)
    assert [each.first_step for each in log.attempts] == [0, 50, 125]
    assert {0, 2} <= {each.number for each in log.met}


@pytest.mark.parametrize("schedule", ["{kind: sync}", "{kind: local_sgd, period: 3}", "{kind: fsdp}"])
def test_a_model_ends_as_if_nothing_had_failed(tmp_path: Path, schedule: str) -> None:
    text = TRAINING.replace("SCHEDULE", schedule)
    perform(write(tmp_path / "calm", text, []), tmp_path / "calm-saved", "--program", "mlp")
    failing = write(tmp_path / "failing", text, [gone(0, 6), gone(1, 11, 1)])
    perform(failing, tmp_path / "saved", "--program", "mlp")
    log = AttemptLog.load(failing / ATTEMPTS)
    assert [each.first_step for each in log.attempts] == [0, 4, 8]
    for rank in range(2):
        name = f"step-000011-rank-{rank:05d}.pt"
        calm, found = (torch.load(tmp_path / folder / name) for folder in ("calm-saved", "saved"))
        assert calm.keys() == found.keys() >= {"optimizer"}
        assert_equal(calm, found)


def assert_equal(one: object, other: object) -> None:
    match one:
        case torch.Tensor():
            assert torch.equal(one, other)
        case dict():
            assert isinstance(other, dict)
            assert one.keys() == other.keys()
            for key, value in one.items():
                assert_equal(value, other[key])
        case list() | tuple():
            assert isinstance(other, list | tuple)
            assert len(one) == len(other)
            for value, its in zip(one, other, strict=True):
                assert_equal(value, its)
        case _:
            assert one == other


def test_a_hang_is_found_by_the_timeout_and_a_pause_by_nobody(tmp_path: Path) -> None:
    text = SLEEPING.replace("steps: 300", "steps: 40").replace("every: 25", "every: 10")
    pause = StepFailure(0, 13, (0,), "pause", pause_s=0.5)
    path = write(tmp_path / "run", text, [pause, StepFailure(0, 25, (1,), "hang")])
    output = perform(path, tmp_path / "saved", "--timeout", 5)
    assert "rank 1 has not arrived" in output
    log = AttemptLog.load(path / ATTEMPTS)
    assert [each.first_step for each in log.attempts] == [0, 20]
    assert [(each.number, each.step) for each in log.met] == [(0, 13), (1, 25)]
    assert log.attempts[1].launched_s - log.met[1].at_s > 5
    whole = Trace.load(path / run_directory.REAL)
    steps_s = np.diff(whole.end_s[rows(whole, Optimize)], axis=0)
    assert (steps_s[12] > 0.5).all()  # rank 0 pauses in step 13, and rank 1 waits for it there


def fail_node(failure: StepFailure) -> None:
    """What lets nodes and links fail notes what it was asked for."""
    with Path(os.environ["NOTED"]).open("a") as file:
        file.write(f"{failure.kind} at step {failure.step}\n")
    if failure.kind == "lost":
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_lets_nodes_and_links_fail_is_asked_in_their_steps(tmp_path: Path) -> None:
    text = SLEEPING.replace("steps: 300", "steps: 20").replace("every: 25", "every: 5")
    pause = StepFailure(0, 3, (1,), "pause", pause_s=900.0)
    environ = {"NOTED": str(tmp_path / "noted")}
    path = write(tmp_path / "run", text, [pause, StepFailure(0, 8, (0,), "lost")])
    perform(path, tmp_path / "saved", "--failures", "tests.real.test_failures:fail_node", environ=environ)
    assert (tmp_path / "noted").read_text().splitlines() == ["pause at step 3", "lost at step 8"]
    log = AttemptLog.load(path / ATTEMPTS)
    assert [each.first_step for each in log.attempts] == [0, 5]


def test_an_announced_end_saves_first_and_a_slow_rank_is_evicted(tmp_path: Path) -> None:
    text = SLEEPING.replace("steps: 300", "steps: 40").replace("every: 25", "every: 10")
    slow = StepFailure(0, 12, (1,), "slow", pause_s=0.1)
    path = write(tmp_path / "run", text, [slow, StepFailure(0, 17, (0, 1), "planned"), gone(1, 19, 1)])
    perform(path, tmp_path / "saved")
    assert [each.first_step for each in AttemptLog.load(path / ATTEMPTS).attempts] == [0, 17, 17]
    whole = Trace.load(path / run_directory.REAL)
    steps_s = np.diff(whole.end_s[rows(whole, Optimize)], axis=0)
    assert (steps_s[11:16] > 0.1).all()
    assert np.median(steps_s) < 0.1


def test_validate_compares_attempts_and_where_time_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SLEEPING.replace("steps: 300", "steps: 30").replace("every: 25", "every: 10")
    kill, loss = (
        f"{{cause: {name}, effect: {name}, at_steps: [{at}]}}" for name, at in (("process", 15), ("node", 22))
    )
    causes = f"causes: [{kill}, {loss}]"
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(f"{text}train_for: 30 steps\nfailures:\n  {causes}\n  recovery: {{start: 1 s}}\n")
    path = tmp_path / "run"
    assert call(capsys, "plan", scenario, "-o", path).code == 0
    perform(path, tmp_path / "saved")
    answer = call(capsys, "validate", path, "--json")
    assert answer.code == 0, answer.err
    (row,) = json.loads(answer.out)["rows"]
    found = row["failures"]
    assert found["simulated_steps"] == found["measured_steps"] == [[0, 15], [10, 22], [20, 30]]
    assert found["simulated_repeated"] == found["measured_repeated"] == 7
    log = AttemptLog.load(path / ATTEMPTS)
    assert found["measured_s"] == pytest.approx(log.attempts[-1].ended_s - log.attempts[0].launched_s)
    assert found["simulated_s"] == pytest.approx(3 * 1.0 + 37 * 6e-3, rel=0.1)
    measured_s = {each["category"]: each["measured_s"] for each in found["categories"]}
    assert min(measured_s.values()) >= 0
    assert measured_s["productive"] > 30 * 6e-3
    assert found["recovery"]["detect_s"] > 0
    assert found["recovery"]["schedule_s"] >= 0
    assert "attempts: 3, steps 0 to 15, 10 to 22, 20 to 30; 7 steps repeated" in call(capsys, "validate", path).out


@pytest.mark.sentinel
def test_files_after_silent_corruption_are_not_used(tmp_path: Path) -> None:
    text = SLEEPING.replace("steps: 300", "steps: 40").replace("every: 25", "every: 10")
    corruption = StepFailure(0, 35, (0,), "gone", resume_before=30)
    path = write(tmp_path / "run", text, [corruption, gone(1, 33, 1)])
    perform(path, tmp_path / "saved")
    assert [each.first_step for each in AttemptLog.load(path / ATTEMPTS).attempts] == [0, 20, 30]


def test_a_second_measurement_takes_no_checkpoint_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SLEEPING.replace("steps: 300", "steps: 12").replace("every: 25", "every: 5")
    path = write(tmp_path / "run", text.replace("gpus_per_node: 2", "gpus_per_node: 1"), [gone(0, 7)])
    command = ("--standalone", "--nproc-per-node=1", "--max-restarts=1", "-m", "real", path)
    saved = ("--checkpoints", tmp_path / "saved")
    for options in ((), ("--force",)):
        (ending,) = run(torchrun_forks, 1, *command, *saved, *options).values()
        assert ending.code == 0, ending.output
        assert [each.first_step for each in AttemptLog.load(path / ATTEMPTS).attempts] == [0, 5]
    (path / run_directory.REAL).unlink()
    (ending,) = run(torchrun_forks, 1, *command, *saved).values()
    assert ending.code != 0
    assert "has files of steps 4 to 9 there, of another measurement: choose another folder" in ending.output


def test_what_cannot_go_on_after_a_failure_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in places(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    runs = [str(write(tmp_path / name, SLEEPING, [gone(0, 60)])) for name in ("a", "b")]
    assert main(runs) == 2
    assert "has failures, after which all ranks start again: give this run alone" in capsys.readouterr().err
    failures = json.loads((tmp_path / "a" / run_directory.FAILURES).read_text())
    failures["failures"][0]["step"] = 300
    (tmp_path / "a" / run_directory.FAILURES).write_text(json.dumps(failures))
    assert main(runs[:1]) == 2
    assert "failures[0]: step 300: the plan has steps 0 to 299" in capsys.readouterr().err
