"""Checkpoints that a plan writes: the files hold the step that they are of, and training ends as without them."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from pool import Pool
from processes import places, run
from trainings import Training, by_plan, loss

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from real.checkpoints.planned import CheckpointFiles  # noqa: E402
from real.cli import main  # noqa: E402
from real.execution import virtual  # noqa: E402
from simdist.errors import RunError, ScenarioError  # noqa: E402
from simdist.plan import Plan, Save, occurrences  # noqa: E402
from simdist.plan.check import check  # noqa: E402
from simdist.plan.group import Group  # noqa: E402
from simdist.proof import prove  # noqa: E402
from simdist.runs import run_directory  # noqa: E402
from simdist.runs.building import build, delays  # noqa: E402
from simdist.scenario import loads  # noqa: E402
from simdist.schedules import LocalSGD, Schedule, Sync  # noqa: E402
from simdist.schedules.job import Checkpoint  # noqa: E402

N_STEPS = 6
SLEEPING = """\
cluster:
  nodes: 1
  gpus_per_node: 2
  fabric: ideal
  network: ideal
  storage: {latency: 200 ms, bandwidth: 1 GB/s}
workload: {tensors: [{name: weight, count: 2000}], batch_size: 4, forward: 1 ms}
steps: 4
checkpoint: {every: 2, size: 1500001 B, ranks: RANKS}
schedules: [{kind: sync}]
"""


def plan_of(schedule: Schedule, training: Training, checkpoint: Checkpoint | None) -> Plan:
    job = dataclasses.replace(training.job(2, N_STEPS), checkpoint=checkpoint)
    plan = schedule.plan(job)
    check(plan)
    prove(plan, lambda step: schedule.result(step, job))
    return plan


def states_after_steps(plan: Plan, training: Training) -> list[list[tuple[dict[str, Any], list[Any]]]]:
    """Return what the model and the optimizer of every rank hold after every step, in the virtual world."""
    optimizers: dict[int, torch.optim.Optimizer] = {}
    found = []

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        module, optimizers[rank] = training.make(rank)
        return module, optimizers[rank]

    def note(step: int, modules: Sequence[nn.Module]) -> None:
        models = [{name: each.detach().clone() for name, each in module.named_parameters()} for module in modules]
        momenta = [
            [state["momentum_buffer"].clone() for state in optimizers[rank].state_dict()["state"].values()]
            for rank in range(len(modules))
        ]
        found.append(list(zip(models, momenta, strict=True)))

    virtual.train_together(plan, make, loss, training.batch, on_step=note)
    return found


@pytest.mark.parametrize("by", [Group(1), Group(2)], ids=["all", "first"])
@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("schedule", [Sync(), LocalSGD(period=4)], ids=lambda each: each.name)
def test_files_hold_the_step_that_they_are_of(
    two: Pool, tmp_path: Path, schedule: Schedule, is_async: bool, by: Group
) -> None:
    training = Training()
    plan = plan_of(schedule, training, Checkpoint(2, "state", by=by, is_async=is_async))
    ours = two.run(by_plan, plan, training, False, tmp_path)
    without = two.run(by_plan, plan_of(schedule, training, None), training)
    for (parameters, losses), (expected, expected_losses) in zip(ours, without, strict=True):
        np.testing.assert_array_equal(parameters, expected)
        np.testing.assert_array_equal(losses, expected_losses)
    states = states_after_steps(plan, training)
    writers = [rank for rank in range(2) if by.is_first(rank)]
    names = [f"step-{step:06d}-rank-{rank:05d}.pt" for step in (1, 3, 5) for rank in writers]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for step in (1, 3, 5):
        for rank in writers:
            found = torch.load(tmp_path / f"step-{step:06d}-rank-{rank:05d}.pt", weights_only=True)
            model, momenta = states[step][rank]
            assert found["step"] == step
            assert found["model"].keys() == model.keys()
            assert all(torch.equal(found["model"][name], each) for name, each in model.items())
            saved = [state["momentum_buffer"] for state in found["optimizer"]["state"].values()]
            assert all(map(torch.equal, saved, momenta))
            module, optimizer = training.make(rank)
            module.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])


def test_bytes_are_as_many_as_asked_and_take_the_place_of_the_former(tmp_path: Path) -> None:
    for nbytes in (1, 999, 1024**2, 3 * 1024**2 + 5):
        CheckpointFiles(str(tmp_path / "new"), rank=3).write_bytes(nbytes, "rank-00003.bin")
        assert [(path.name, path.stat().st_size) for path in (tmp_path / "new").iterdir()] == [
            ("rank-00003.bin", nbytes)
        ]


def test_files_go_wherever_fsspec_can_write() -> None:
    CheckpointFiles("memory://checkpoints", rank=0).write("a.bin", lambda file: file.write(b"123"))
    assert fsspec.filesystem("memory").cat_file("/checkpoints/a.bin") == b"123"


def test_only_the_newest_files_are_kept_beside_the_one_that_is_written(tmp_path: Path) -> None:
    files, other = (CheckpointFiles(str(tmp_path), rank, ".bin", keep=2) for rank in (1, 0))
    other.write_bytes(1, other.name(0))
    for step in (9, 19, 29, 39):
        files.write_bytes(1, files.name(step))
    assert files.steps() == [19, 29, 39]
    files.delete_old()
    assert files.steps() == [29, 39]
    assert other.steps() == [0]
    assert files.has(29, rank=1)
    assert files.read(29, rank=1)
    with pytest.raises(RunError, match=r"step-000009-rank-00001.bin: cannot be read .* all ranks need to reach"):
        files.read(9, rank=1)


def test_what_cannot_be_written_names_rank_and_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file: cannot be made a folder: File exists"):
        CheckpointFiles(str(tmp_path / "file"), rank=1)
    with pytest.raises(ScenarioError, match="nowhere://x: "):
        CheckpointFiles("nowhere://x", rank=1)
    files = CheckpointFiles(str(tmp_path / "folder"), rank=1)
    (tmp_path / "folder" / "rank-00001.bin").mkdir()
    with pytest.raises(RunError, match=r"checkpoint of rank 1: .*/folder/rank-00001.bin: cannot be written: Is a dir"):
        files.write_bytes(10, "rank-00001.bin")


# --- python -m real ---


def perform(*args: object) -> None:
    sys.exit(main([str(arg) for arg in args]))


def write(path: Path, text: str) -> Path:
    scenario = loads(text)
    run_directory.write(path, scenario, build(scenario, scenario.schedules[0]).plan, delays(scenario))
    return path


@pytest.mark.parametrize("ranks", ["first", "all"])
def test_a_program_that_sleeps_writes_as_many_bytes(tmp_path: Path, ranks: str) -> None:
    where = write(tmp_path / "run", SLEEPING.replace("RANKS", ranks))
    endings = run(perform, 2, where, "--checkpoints", tmp_path / "files")
    assert {rank: each.code for rank, each in endings.items()} == {0: 0, 1: 0}, endings
    writers = range(2 if ranks == "all" else 1)
    found = sorted((path.name, path.stat().st_size) for path in (tmp_path / "files").iterdir())
    assert found == [(f"rank-{rank:05d}.bin", 1_500_001) for rank in writers]
    done = run_directory.read(where)
    trace = run_directory.read_trace(where / run_directory.REAL, plan=done.plan)
    (save,) = (each for each in occurrences(done.plan) if isinstance(each.op, Save))
    took_s = (trace.end_s - trace.start_s)[save.rows]
    assert (took_s[:, 0] > 1e-4).all()  # a file
    assert (took_s < 0.2).any()  # and no sleep of 200 ms


def test_a_program_that_sleeps_does_so_for_files_that_have_no_place(tmp_path: Path) -> None:
    where = write(tmp_path / "run", SLEEPING.replace("RANKS", "first"))
    assert {each.code for each in run(perform, 2, where).values()} == {0}
    done = run_directory.read(where)
    trace = run_directory.read_trace(where / run_directory.REAL, plan=done.plan)
    (save,) = (each for each in occurrences(done.plan) if isinstance(each.op, Save))
    took_s = (trace.end_s - trace.start_s)[save.rows]
    assert (took_s[:, 0] >= 0.2).all()
    assert (took_s[:, 1] < 0.2).all()


def test_a_place_for_checkpoints_of_a_plan_without_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = SLEEPING.replace("checkpoint: {every: 2, size: 1500001 B, ranks: RANKS}\n", "")
    where = write(tmp_path / "run", plain)
    for name, value in places(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    assert main([str(where), "--checkpoints", str(tmp_path)]) == 2
    told = f"{where}: its plan writes none; give its scenario `checkpoint`, or leave --checkpoints out"
    assert told in capsys.readouterr().err


def test_a_file_that_cannot_be_written_ends_the_run_and_is_named(tmp_path: Path) -> None:
    where = write(tmp_path / "run", SLEEPING.replace("RANKS", "all"))
    (tmp_path / "files" / "rank-00001.bin").mkdir(parents=True)
    endings = run(perform, 2, where, "--checkpoints", tmp_path / "files")
    assert {each.code for each in endings.values()} == {1}
    assert "checkpoint of rank 1: " in endings[1].output
    assert "rank-00001.bin: cannot be written: Is a directory" in endings[1].output
