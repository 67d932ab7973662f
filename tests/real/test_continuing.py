"""`python -m real` with `on_failure: continue`: ranks go on when others fail, until these are back."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from commandline import call  # noqa: E402
from processes import Ending, run, run_as_main, torchrun_forks  # noqa: E402

from real import models  # noqa: E402
from real.cli import main  # noqa: E402
from simdist.plan.failures import StepFailure  # noqa: E402
from simdist.runs import run_directory  # noqa: E402
from simdist.runs.building import build, delays  # noqa: E402
from simdist.scenario import loads  # noqa: E402
from simdist.studies.validation import finished_steps  # noqa: E402
from simdist.traces.attempts import ATTEMPTS, AttemptLog  # noqa: E402
from simdist.traces.trace import Trace  # noqa: E402

TEXT = """\
cluster:
  {nodes: 3, gpus_per_node: 1, fabric: ideal, network: ideal, disk: {latency: 0 s, read: 1 GB/s, write: 1 GB/s}}
workload: WORKLOAD
checkpoint: {every: 4, what: state, to: disk, ranks: all}
steps: STEPS
failures:
  {causes: [{cause: kill, effect: process, at_steps: [0]}], on_failure: continue}
schedules: [SCHEDULE]
"""
SLEEPING = "{tensors: [{name: weight, count: 2000}], batch_size: 4, forward: 20 ms}"


def write(
    path: Path, failures: Sequence[StepFailure], *, steps: int, schedule: str = "{kind: sync}", workload: str = SLEEPING
) -> Path:
    text = TEXT.replace("WORKLOAD", workload).replace("STEPS", str(steps)).replace("SCHEDULE", schedule)
    scenario = loads(text)
    plan = build(scenario, scenario.schedules[0]).plan
    run_directory.write(path, scenario, plan, delays(scenario), failures)
    return path


def replica_or_host(*arguments: str) -> None:
    """Be the agent of a replica, or the meeting place of all on the last rank."""
    at = f"127.0.0.1:{os.environ['MASTER_PORT']}"
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    if rank == 3:
        run_as_main("real", True, *arguments, "--meet", at)
        return
    launch = ("--standalone", "--nproc-per-node=1", "--max-restarts=5")
    torchrun_forks(*launch, "-m", "real", *arguments, "--meet", at, "--replica", str(rank))


def perform(path: Path, *options: object) -> dict[int, Ending]:
    """Perform a run on three replicas."""
    endings = run(replica_or_host, 4, str(path), *map(str, options))
    assert {each.code for each in endings.values()} == {0}, endings
    return endings


def lost(step: int, rank: int, kind: str = "gone") -> StepFailure:
    return StepFailure(0, step, (rank,), kind, others_go_on=True)


def absent_steps(path: Path) -> dict[int, tuple[tuple[int, int], ...]]:
    trace = Trace.load(path / run_directory.REAL)
    assert finished_steps(trace) == trace.plan.n_steps
    return dict(trace.absent)


@pytest.mark.sentinel
def test_others_go_on_and_a_killed_rank_joins_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 also, which wrote the log until then. Both are back before the end."""
    path = write(tmp_path / "run", [lost(10, 1), lost(80, 0)], steps=200)
    perform(path, "--checkpoints", tmp_path / "saved")
    log = AttemptLog.load(path / ATTEMPTS)
    assert [each.first_step for each in log.attempts] == [0]
    assert [(each.rank, each.first_step) for each in log.absences] == [(1, 10), (0, 80)]
    assert all(each.last_step and each.last_step > each.first_step for each in log.absences)
    assert absent_steps(path) == {each.rank: ((each.first_step, each.last_step),) for each in log.absences}
    answer = call(capsys, "validate", path, "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)["rows"][0]["failures"]
    assert found["measured_absences"] == [[each.rank, each.first_step, each.last_step] for each in log.absences]
    assert found["measured_s"] == pytest.approx(log.attempts[0].ended_s - log.attempts[0].launched_s)
    measured_s = {each["category"]: each["measured_s"] for each in found["categories"]}
    assert min(measured_s.values()) >= 0
    assert measured_s["absent_replicas"] > 0


def trained(skips: dict[int, tuple[int, int]], steps: int) -> list[torch.Tensor]:
    """Train on three replicas in turn with torch alone; a rank that is absent adds no gradient."""
    job = models.build_job("mlp", batch_size=4, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    for step in range(steps):
        there = [rank for rank in range(3) if not skips.get(rank, (0, 0))[0] <= step < skips.get(rank, (0, 0))[1]]
        sums = [torch.zeros_like(each) for each in job.module.parameters()]
        for rank in there:
            job.module.zero_grad()
            inputs, targets = job.batch(step, rank)
            job.loss(job.module(inputs), targets).backward()
            for total, parameter in zip(sums, job.module.parameters(), strict=True):
                total += parameter.grad / len(there)
        for total, parameter in zip(sums, job.module.parameters(), strict=True):
            parameter.grad = total
        job.optimizer.step()
    return [each.detach() for each in job.module.parameters()]


@pytest.mark.parametrize("kind", ["gone", "planned"])
def test_values_are_those_of_torch_without_the_rank(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "run", [lost(6, 1, kind)], steps=400, workload="{preset: mlp, batch_size: 4}")
    perform(path, "--checkpoints", tmp_path / "saved", "--program", "mlp")
    ((first, last),) = absent_steps(path)[1]
    assert first == 6
    expected = trained({1: (first, last)}, 400)
    for rank in range(3):
        saved = torch.load(tmp_path / "saved" / f"step-000399-rank-{rank:05d}.pt")["model"]
        for found, wanted in zip(saved.values(), expected, strict=True):
            assert (found - wanted).norm() < 1e-4 * wanted.norm()  # a rank more or less in one step: over 1.8e-4


def test_a_hung_rank_is_left_behind_ends_and_joins(tmp_path: Path) -> None:
    path = write(tmp_path / "run", [lost(10, 2, "hang")], steps=400, schedule="{kind: local_sgd, period: 4}")
    endings = perform(path, "--checkpoints", tmp_path / "saved", "--timeout", 3)
    assert "this rank hung at the start of step 10" in endings[2].output
    log = AttemptLog.load(path / ATTEMPTS)
    (absence,) = log.absences
    assert len(log.pauses) == 2  # to leave it behind, and to take in the process that is started then
    assert (absence.rank, absence.first_step) == (2, 8)  # the steps since the last average are lost with it
    assert absence.last_step
    assert absence.last_step % 4 == 0
    assert absent_steps(path)[2][0][0] == 10  # those before it hung, it has done


def test_if_nobody_is_left_all_begin_from_the_newest_checkpoint(tmp_path: Path) -> None:
    everybody = StepFailure(0, 10, (0, 1, 2), "gone")
    path = write(tmp_path / "run", [everybody], steps=24)
    perform(path, "--checkpoints", tmp_path / "saved")
    log = AttemptLog.load(path / ATTEMPTS)
    assert [each.first_step for each in log.attempts] == [0, 8]
    assert absent_steps(path) == {}


def test_what_cannot_go_on_without_a_rank_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "run", [lost(6, 1)], steps=12, schedule="{kind: fsdp}")
    assert main([str(path)]) == 1
    assert "real ranks go on without one of them only where all meet in means" in capsys.readouterr().err
    path = write(tmp_path / "sync", [lost(6, 1)], steps=12)
    assert main([str(path), "--replica", "3", "--meet", "localhost:1"]) == 2
    assert "a replica from 0 to 2" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert main([str(path)]) == 2
    assert "each rank has a torchrun of its own" in capsys.readouterr().err
