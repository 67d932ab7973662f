"""Sweeps on a Dask cluster: found by its address, or made of jobs; the table is that of one process."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import misbehaving
import pytest
from commandline import call
from sweeps import (
    BAD,
    children,
    compute,
    endless,
    failures,
    files,
    gated,
    only_linux,
    rows,
    start,
    sweep_file,
)
from timeouts import TIMEOUT_S, await_end

from simdist import sweeps
from simdist.errors import RunError, ScenarioError
from simdist.jobs import dask
from simdist.sweeps import load

pytest.importorskip("distributed")

QUICK = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"}  # a batch whose worker died is not tried again


@contextlib.contextmanager
def cluster(folder: Path, n_workers: int = 2) -> Iterator[tuple[Path, subprocess.Popen]]:
    """Start a scheduler and workers; give the scheduler's file, and its process."""
    file = folder / "scheduler.json"
    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(launched("dask_scheduler", "--port", "0", "--scheduler-file", file))
        deadline_s = time.monotonic() + TIMEOUT_S
        while not file.exists():
            assert scheduler.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        if n_workers:
            options = ("--nworkers", n_workers, "--nthreads", 1, "--local-directory", folder)
            stack.enter_context(launched("dask_worker", "--scheduler-file", file, *options))
        yield file, scheduler


@contextlib.contextmanager
def launched(what: str, *args: object) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", f"distributed.cli.{what}", "--no-dashboard", *map(str, args)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, env=os.environ | QUICK) as process:
        try:
            yield process
        finally:
            workers = children(process.pid)
            process.terminate()
            process.wait(TIMEOUT_S)
            await_end(workers)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A cluster of two workers that know the schedule that misbehaves."""
    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch, misbehaving.folder(folder, patch), cluster(folder) as (file, _):
        yield file


@pytest.mark.sentinel
@only_linux
def test_table_of_a_cluster_is_that_of_one_process(tmp_path, shared, capsys):
    path = sweep_file(tmp_path, "{cluster.nodes: [2, 3, 4], seed: [1, 2, 3, 4]}")
    answer = call(capsys, "sweep", path, "-o", tmp_path / "cluster", "--scheduler", shared)
    assert answer.code == 0, answer.err
    compute(path, tmp_path / "serial")
    assert files(tmp_path / "cluster") == files(tmp_path / "serial")


@only_linux
def test_row_that_kills_its_worker_fails_alone_on_a_cluster(tmp_path, shared):
    vary = "{'schedules[1].does': [exits, nothing], seed: [1, 2]}"
    path = sweep_file(tmp_path, vary, schedules=f"[{{kind: sync}}, {BAD % ('nothing', 'x')}]")
    with dask.connected(str(shared)) as workers:
        outcome = sweeps.sweep(load(path), tmp_path / "out", workers=workers)
    assert (outcome.n_rows, outcome.n_failed) == (8, 2)
    assert {message for _, message in failures(tmp_path / "out")} == {
        "its worker died (KilledWorker): out of memory, or killed?"
    }


@only_linux
def test_row_that_never_ends_is_interrupted_on_a_cluster(tmp_path, shared):
    path = endless(tmp_path)
    with dask.connected(str(shared)) as workers:
        outcome = sweeps.sweep(load(path), tmp_path / "out", workers=workers)
    assert outcome.n_failed == 2
    assert all(message.startswith("not done after 0.5 s") for _, message in failures(tmp_path / "out"))


@only_linux
def test_lost_scheduler_is_one_error_and_the_sweep_goes_on_elsewhere(tmp_path, monkeypatch):
    place = tmp_path / "misbehaving"
    place.mkdir()
    with misbehaving.folder(place, monkeypatch):
        path, gate = gated(tmp_path)
        out = tmp_path / "out"
        with cluster(tmp_path) as (file, scheduler), start(path, "-o", out, "--scheduler", file) as process:
            deadline_s = time.monotonic() + TIMEOUT_S
            while (
                not (out / "rows.jsonl").exists() or len(rows(out)) < 4
            ):  # two batches of a point each, if one worker is late
                assert process.poll() is None, process.communicate(timeout=TIMEOUT_S)
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            scheduler.kill()
            _, err = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 1
            assert "connection" in err
            assert "lost" in err
            assert "Traceback" not in err
            gate.touch()
        n_kept = len(rows(out))
        assert compute(path, out).n_new == 36 - n_kept


@only_linux
def test_cluster_without_workers_is_one_error(tmp_path):
    with (
        cluster(tmp_path, n_workers=0) as (file, _),
        pytest.raises(RunError, match=r"no worker within 0\.5 s"),
        dask.connected(str(file), timeout_s=TIMEOUT_S, worker_timeout_s=0.5),
    ):
        pass


def test_scheduler_that_does_not_answer_is_one_error():
    with (
        pytest.raises(RunError, match=r"no Dask scheduler answers at tcp://127.0.0.1:9 within 0.5 s"),
        dask.connected("tcp://127.0.0.1:9", timeout_s=0.5),
    ):
        pass


def started_by(process: subprocess.Popen) -> set[int]:
    """Wait until a process ends, and return all that it started; kill it and them if that takes too long."""
    found: set[int] = set()
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        while process.poll() is None:
            found.update(children(process.pid))
            assert time.monotonic() < deadline_s, "the sweep does not end"
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return found


def test_python_of_a_job_is_quoted_or_the_users(monkeypatch):
    dask_settings = pytest.importorskip("dask").config
    monkeypatch.setattr(sys, "executable", "/a folder/python")
    assert dask._python("slurm", "slurm") == "'/a folder/python'"
    with dask_settings.set({"jobqueue.slurm.python": "python3"}):
        assert dask._python("slurm", "slurm") == "python3"
    with pytest.raises(RunError, match="starts no Python whose path has a space: /a folder/python"):
        dask._python("local", "local")


@only_linux
@pytest.mark.skipif(" " in sys.executable, reason="local jobs start no Python whose path has a space")
def test_jobs_compute_and_end(tmp_path, monkeypatch):
    pytest.importorskip("dask_jobqueue")
    # Its usual folder in /tmp may hold what another user's workers have left there.
    monkeypatch.setenv("DASK_TEMPORARY_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("DASK_JOBQUEUE__LOCAL__CORES", "1")
    monkeypatch.setenv("DASK_JOBQUEUE__LOCAL__MEMORY", "1GB")
    path = sweep_file(tmp_path, "{cluster.nodes: [2, 3], seed: [1, 2]}")
    with (
        start(path, "-o", tmp_path / "jobs", "--scheduler", "local", "--workers", 1, cwd=tmp_path) as process,
        ThreadPoolExecutor(1) as reader,
    ):
        texts = reader.submit(process.communicate)  # a pipe that is full would stop it
        workers = started_by(process)
        out, err = texts.result(TIMEOUT_S)
    assert (process.returncode, out.splitlines()[:1]) == (0, ["s: 4 points, 8 rows, 8 new, 0 failed"]), err
    assert workers
    await_end(sorted(workers))
    compute(path, tmp_path / "serial")
    assert files(tmp_path / "jobs") == files(tmp_path / "serial")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("slum", "did you mean 'slurm'?"),
        ("foo://host:1", "unknown address scheme 'foo'"),
        ("host:8786", "write e.g. tcp://host:8786"),
    ],
)
def test_wrong_address_is_refused(tmp_path, capsys, where, message):
    path = sweep_file(tmp_path, "{seed: [1]}")
    answer = call(capsys, "sweep", path, "-o", tmp_path / "out", "--scheduler", where)
    assert answer.code == 2
    assert message in answer.err


def test_system_without_its_command_is_one_error(tmp_path, capsys, monkeypatch):
    pytest.importorskip("dask_jobqueue")
    monkeypatch.setenv("PATH", str(tmp_path))
    path = sweep_file(tmp_path, "{seed: [1]}")
    answer = call(capsys, "sweep", path, "-o", tmp_path / "out", "--scheduler", "slurm")
    assert answer.code == 1
    assert "there is no command sbatch here" in answer.err


def test_number_of_workers_of_a_running_cluster_is_its_own(tmp_path, capsys):
    path = sweep_file(tmp_path, "{seed: [1]}")
    answer = call(capsys, "sweep", path, "-o", tmp_path / "out", "--scheduler", "tcp://host:1", "--workers", 3)
    assert answer.code == 2
    assert "--workers" in answer.err


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    message = r"needs the package distributed: .*pip install .*\[dask\]"
    with pytest.raises(ScenarioError, match=message), dask.connected("tcp://host:8786"):
        pass
