"""A sweep is computed once, whole, and the same, whatever happens to the processes that compute it."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import misbehaving
import numpy as np
import pytest
from commandline import call
from sweeps import BAD, children, compute, endless, failures, files, gated, only_linux, rows, start, sweep_file
from timeouts import TIMEOUT_S, await_end

from simdist import sweeps
from simdist.cli.sweep import progress_text
from simdist.errors import RunError
from simdist.files import read_jsonl
from simdist.jobs.store import DESIGN, ROWS
from simdist.progress import ProgressBar
from simdist.studies.measuring import measure
from simdist.sweeps import LocalPool, load, tasks
from simdist.sweeps.driver import SweepProgress
from simdist.sweeps.keys import code_version
from simdist.sweeps.tasks import TaskBatch, evaluate


@pytest.fixture
def bad(tmp_path, monkeypatch):
    """Let scenarios have schedules that misbehave."""
    place = tmp_path / "misbehaving"
    place.mkdir()
    with misbehaving.folder(place, monkeypatch):
        yield


def await_rows(folder: Path, n_rows: int, process: subprocess.Popen) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(list(read_jsonl(folder / ROWS))) < n_rows:
        assert process.poll() is None, process.communicate(timeout=TIMEOUT_S)
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_table_does_not_tell_how_many_processes_computed_it(tmp_path):
    path = sweep_file(tmp_path, "{cluster.nodes: [2, 3, 4], disturbances.0.delay: [10 ms, 20 ms, 30 ms, 50 ms]}")
    serial = compute(path, tmp_path / "serial")
    assert (serial.n_points, serial.n_rows, serial.n_new, serial.n_failed) == (12, 24, 24, 0)
    compute(path, tmp_path / "pool", n_workers=2)
    assert files(tmp_path / "pool") == files(tmp_path / "serial")
    design = list(read_jsonl(tmp_path / "serial" / DESIGN))
    assert [each["key"] for each in design[1:]] == [each["key"] for each in rows(tmp_path / "serial")]


@pytest.mark.sentinel
@only_linux
def test_killed_sweep_goes_on_where_it_was(tmp_path, bad):
    path, gate = gated(tmp_path)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    with start(path, "-o", killed, "--workers", 2) as process:
        await_rows(killed, 8, process)
        workers = children(process.pid)
        process.kill()
    assert len(workers) >= 2
    await_end(workers)
    n_kept = len(rows(killed))
    assert 8 <= n_kept < 36
    with (killed / ROWS).open("ab") as file:
        file.write(b'\n{"key": "0123", "schedule": "sy')  # torn
    gate.touch()
    resumed = compute(path, killed, n_workers=2)
    assert resumed.n_new == 36 - n_kept
    compute(path, whole, n_workers=2)
    assert files(killed) == files(whole)
    assert compute(path, killed).n_new == 0
    assert files(killed) == files(whole)


@only_linux
def test_interrupted_sweep_says_what_is_saved_and_leaves_no_process(tmp_path, bad):
    path, _ = gated(tmp_path)
    with start(path, "-o", tmp_path / "out", "--workers", 2) as process:
        await_rows(tmp_path / "out", 8, process)
        workers = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: everyone gets it
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert f"of 36 rows in {tmp_path / 'out' / ROWS}" in err
    assert "Traceback" not in err
    await_end(workers)


def test_killed_worker_is_replaced_and_its_rows_are_computed_again(tmp_path):
    path = sweep_file(tmp_path, "{seed: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]}")
    killed = []

    def kill(state: SweepProgress) -> None:
        if state.n_new and not killed:
            assert state.n_done < state.n_all
            killed.extend(multiprocessing.active_children()[:1])
            killed[0].kill()

    outcome = compute(path, tmp_path / "killed", n_workers=2, progress=kill)
    assert (outcome.n_new, outcome.n_failed, len(killed)) == (24, 0, 1)
    compute(path, tmp_path / "whole")
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_checkpoints_are_varied_as_a_whole_and_by_their_keys(tmp_path):
    vary = "{cluster.disk: [{read: 1 GB/s, write: 1 MB/s}], checkpoint: [null, {every: 2, what: state, to: disk}]}"
    whole = compute(sweep_file(tmp_path, vary), tmp_path / "whole")
    vary = "{checkpoint.every: [2, 4], checkpoint.mode: [blocking, async]}"
    path = sweep_file(tmp_path, vary)
    base = (
        (tmp_path / "base.yaml")
        .read_text()
        .replace("gpus_per_node", "disk: {read: 1 GB/s, write: 1 MB/s}\n  gpus_per_node")
    )
    (tmp_path / "base.yaml").write_text(f"{base}checkpoint: {{every: 2, what: state, to: disk}}\n")
    keys = compute(path, tmp_path / "keys")
    assert (whole.n_rows, whole.n_failed, keys.n_rows, keys.n_failed) == (4, 0, 8, 0)
    without, with_some = (rows(tmp_path / "whole")[row]["step_s"][0] for row in (0, 2))
    every_2, every_2_async, every_4, _ = (rows(tmp_path / "keys")[row]["step_s"][0] for row in (0, 2, 4, 6))
    assert every_2 == with_some > every_4 > without
    assert every_2 > every_2_async


def test_wrong_combinations_fail_alone(tmp_path):
    schedules = "[{kind: sync}, {kind: hierarchical_sgd, levels: {2: 4, 4: world}}]"
    vary = "{cluster.gpus_per_node: [4, 3], 'schedules[1].levels.2': [4, 3]}"
    outcome = compute(sweep_file(tmp_path, vary, schedules=schedules), tmp_path / "out")
    assert (outcome.n_rows, outcome.n_new, outcome.n_failed) == (8, 6, 2)
    assert ["failed" in each for each in rows(tmp_path / "out")] == [False, False, True, False, True, False]
    assert all(kind == "ScenarioError" for kind, _ in failures(tmp_path / "out"))
    assert all(message.startswith("schedules[1].levels") for _, message in failures(tmp_path / "out"))


@pytest.mark.parametrize("n_workers", [0, 1])
@pytest.mark.parametrize(
    ("does", "kind", "message"), [("raises", "ZeroDivisionError", "a defect"), ("leaves", "SystemExit", "left")]
)
def test_row_that_raises_fails_alone(tmp_path, bad, n_workers, does, kind, message):
    path = sweep_file(tmp_path, "{seed: [1, 2]}", schedules=f"[{{kind: sync}}, {BAD % (does, 'x')}]")
    outcome = compute(path, tmp_path / "out", n_workers=n_workers)
    assert (outcome.n_rows, outcome.n_failed) == (4, 2)
    assert failures(tmp_path / "out") == [(kind, message)] * 2


def test_row_that_kills_its_process_fails_alone(tmp_path, bad):
    path = sweep_file(
        tmp_path,
        "{'schedules[1].does': [exits, nothing], seed: [1, 2, 3]}",
        schedules=f"[{{kind: sync}}, {BAD % ('nothing', 'x')}]",
    )
    outcome = compute(path, tmp_path / "out", n_workers=2)
    assert (outcome.n_rows, outcome.n_failed) == (12, 3)
    assert {message for _, message in failures(tmp_path / "out")} == {
        "its worker died (BrokenProcessPool): out of memory, or killed?"
    }


def test_row_that_never_ends_is_interrupted(tmp_path, bad):
    assert compute(endless(tmp_path), tmp_path / "out").n_failed == 2
    assert all(message.startswith("not done after 0.5 s") for _, message in failures(tmp_path / "out"))


def test_row_that_never_ends_is_interrupted_in_a_thread_as_well(tmp_path, bad):
    path, outcomes = endless(tmp_path), []
    thread = threading.Thread(target=lambda: outcomes.append(compute(path, tmp_path / "out")), daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert [each.n_failed for each in outcomes] == [2]
    assert all(message.startswith("not done after 0.5 s") for _, message in failures(tmp_path / "out"))


def test_process_that_hangs_is_given_up(tmp_path, bad):
    """The other row is computed after it; whether in time is the machine's affair."""
    vary = "{'schedules[0].does': [hangs, nothing]}"
    keys = {"baseline": "misbehaving", "time_limit": "0.2 s"}
    path = sweep_file(tmp_path, vary, schedules=f"[{BAD % ('nothing', 'x')}]", **keys)
    outcome = compute(path, tmp_path / "out", n_workers=1, grace_s=0.2)
    assert (outcome.n_rows, outcome.n_new) == (2, 2)
    assert failures(tmp_path / "out")[0][1].startswith("not done after 0.2 s")
    assert "failed" in rows(tmp_path / "out")[0]


class SlowStart:
    """A worker that is up only when it is done, for longer than its rows may take."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.executor = self
        self.n_underway = 1
        self.may_wait = False
        self.n_ended = 0

    def submit(self, function, batch: TaskBatch) -> Future:
        future: Future = Future()
        generous = replace(batch, time_limit_s=60.0)
        threading.Timer(self.start_s, lambda: future.set_result(function(generous))).start()
        return future

    def up_s(self, batch: Future) -> None:
        return None

    def end(self, batch: Future) -> None:
        self.n_ended += 1


def test_time_in_which_a_process_starts_does_not_count_against_its_rows(tmp_path):
    path = sweep_file(tmp_path, "{seed: [1, 2]}", time_limit="1 ms")
    workers = SlowStart(start_s=0.2)
    outcome = sweeps.sweep(load(path), tmp_path / "out", workers=workers, grace_s=0.0)
    assert (outcome.n_new, outcome.n_failed, workers.n_ended) == (4, 0, 0)


def test_process_is_up_when_it_has_imported_what_it_needs(tmp_path, monkeypatch):
    gate = tmp_path / "gate"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)\n"
    (tmp_path / "sitecustomize.py").write_text(wait, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    began_s = time.monotonic()
    with LocalPool(1) as pool:
        future = pool.executor.submit(os.getpid)
        assert pool.up_s(future) is None
        gate.touch()
        assert future.result(TIMEOUT_S) != os.getpid()
        assert began_s < pool.up_s(future) < time.monotonic()


HOLDING = """
import sys
from pathlib import Path
from simdist.jobs.store import Store
with Store(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_sweeps_do_not_share_a_folder(tmp_path, capsys):
    path = sweep_file(tmp_path, "{seed: [1, 2]}")
    command = [sys.executable, "-c", HOLDING, tmp_path / "out"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        answer = call(capsys, "sweep", path, "-o", tmp_path / "out", "--workers", 0)
        holder.communicate(timeout=TIMEOUT_S)
    assert answer.code == 1
    assert f"{tmp_path / 'out'}: process {holder.pid} on " in answer.err
    assert " writes there: wait for its end, or end it" in answer.err
    assert call(capsys, "sweep", path, "-o", tmp_path / "out", "--workers", 0).code == 0


def test_full_disk_is_one_error_and_keeps_what_is_done(tmp_path, capsys):
    pytest.importorskip("resource")
    path = sweep_file(tmp_path, "{seed: [1, 2, 3, 4, 5, 6]}", seeds=40)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000));"
        "from simdist.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "sweep", path, "-o", tmp_path / "out", "--workers", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path / 'out' / ROWS}: cannot be written: File too large\n"
    n_kept = len(rows(tmp_path / "out"))
    assert 0 < n_kept < 12
    answer = call(capsys, "sweep", path, "-o", tmp_path / "out", "--workers", 0, "--json")
    assert json.loads(answer.out)["new"] == 12 - n_kept
    assert len(rows(tmp_path / "out")) == 12


def test_folder_that_cannot_be_made_is_one_error(tmp_path, capsys):
    path = sweep_file(tmp_path, "{seed: [1, 2]}")
    answer = call(capsys, "sweep", path, "-o", path / "out", "--workers", 0)
    assert answer.code == 1
    assert answer.err == f"error: {path / 'out'}: cannot be written: Not a directory\n"


def test_more_values_compute_only_what_is_new(tmp_path):
    path = sweep_file(tmp_path, "{seed: [1, 2], cluster.nodes: [2, 4]}")
    compute(path, tmp_path / "out")
    path = sweep_file(tmp_path, "{seed: [1, 5, 2], cluster.nodes: [2, 4, 8]}")
    outcome = compute(path, tmp_path / "out")
    assert (outcome.n_rows, outcome.n_new) == (18, 10)
    compute(path, tmp_path / "anew")
    assert files(tmp_path / "out") == files(tmp_path / "anew")


def test_rows_of_values_that_are_gone_stay_at_the_end(tmp_path):
    compute(sweep_file(tmp_path, "{seed: [1, 2, 3]}"), tmp_path / "out")
    all_rows = rows(tmp_path / "out")
    outcome = compute(sweep_file(tmp_path, "{seed: [3]}"), tmp_path / "out")
    assert (outcome.n_rows, outcome.n_new) == (2, 0)
    assert rows(tmp_path / "out") == all_rows[4:] + all_rows[:4]


def test_failed_rows_are_computed_again_on_request(tmp_path, bad):
    gate = tmp_path / "gate"
    path = sweep_file(tmp_path, "{seed: [1, 2]}", schedules=f"[{{kind: sync}}, {BAD % ('needs', gate)}]")
    assert compute(path, tmp_path / "out").n_failed == 2
    gate.touch()
    again = compute(path, tmp_path / "out")
    assert (again.n_new, again.n_failed) == (0, 2)
    retried = compute(path, tmp_path / "out", retry=True)
    assert (retried.n_new, retried.n_failed) == (2, 0)
    compute(path, tmp_path / "anew")
    assert files(tmp_path / "out") == files(tmp_path / "anew")


def test_equal_points_are_computed_once_and_shown_twice(tmp_path):
    path = sweep_file(tmp_path, "{seed: [1, 2, 1]}")
    outcome = compute(path, tmp_path / "out")
    assert (outcome.n_points, outcome.n_rows, outcome.n_new) == (3, 6, 4)
    design = list(read_jsonl(tmp_path / "out" / DESIGN))[1:]
    assert [each["point"] for each in design] == [0, 0, 1, 1, 2, 2]
    assert [each["key"] for each in design[:2]] == [each["key"] for each in design[4:]]


def test_command_says_what_there_is_and_what_to_do_next(tmp_path, capsys):
    path = sweep_file(tmp_path, "{seed: [1, 2]}")
    answer = call(capsys, "sweep", path, "-o", tmp_path / "out", "--workers", 0)
    assert answer.code == 0
    assert answer.out == f"s: 2 points, 4 rows, 4 new, 0 failed\nnext: simdist results {tmp_path / 'out'}\n"
    answer = call(capsys, "sweep", path, "-o", tmp_path / "out", "--workers", 0, "--json")
    found = {"sweep": "s", "points": 2, "rows": 4, "new": 0, "failed": 0, "path": str(tmp_path / "out")}
    document = json.loads(answer.out)
    (unstated,) = document.pop("remarks")
    assert unstated["place"] == "cluster.network.efficiency"
    assert document == found


def test_command_says_how_many_rows_failed_and_what_shows_why(tmp_path, bad, capsys):
    vary = "{'schedules[1].does': [raises, nothing], seed: [1, 2, 3]}"
    path = sweep_file(tmp_path, vary, schedules=f"[{{kind: sync}}, {BAD % ('nothing', 'x')}]")
    answer = call(capsys, "sweep", path, "-o", tmp_path / "out", "--workers", 0)
    assert answer.code == 1
    assert "error: 3 of 12 rows failed" in answer.err
    assert f"`simdist results {tmp_path / 'out'} --failed` shows why" in answer.err
    assert "3  ZeroDivisionError: a defect\n" in call(capsys, "results", tmp_path / "out", "--failed").out


def test_command_tells_of_settings_without_effect(tmp_path, capsys):
    path = sweep_file(tmp_path, "{seed: [1]}", schedules="[{kind: sync}, {kind: local_sgd, period: 400}]")
    answer = call(capsys, "sweep", path, "-o", tmp_path / "out", "--workers", 0)
    assert f"warning: {path}: " in answer.err


class Recorder:
    """A stream that is no terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_line_of_progress_tells_rows_failures_and_time_left():
    stream = Recorder()
    with ProgressBar(stream, line_every_s=0.0) as bar:
        for state in (SweepProgress("rows", 10, 1010), SweepProgress("rows", 510, 1010, n_new=500, n_failed=3)):
            bar.update(progress_text("s", state), state.n_done, state.n_all)
    first, second = stream.text.splitlines()
    assert first == "s: 10 of 1,010 rows: 1%"
    assert second == "s: 510 of 1,010 rows, 3 failed: 50%, 0 min 0 s left"


def test_lost_workers_end_the_sweep_with_one_error(tmp_path, monkeypatch):
    """Processes that cannot start are not the fault of rows."""
    path = sweep_file(tmp_path, "{seed: [1, 2]}")
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(3)\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RunError, match="workers fail before they have work"):
        compute(path, tmp_path / "out", n_workers=1)
    assert rows(tmp_path / "out") == []


def test_worker_with_other_code_refuses():
    ours, other = (
        TaskBatch(code_version(), Path(), {}, (), 1, "auto", 60.0),
        TaskBatch("0.1.0, code 123", Path(), {}, (), 1, "auto", 60.0),
    )
    assert evaluate(ours).records == ()
    with pytest.raises(RunError, match=f"a worker has simdist {code_version()}; this is 0.1.0, code 123"):
        evaluate(other)


RECORDED = """\
scenario:
  cluster: {nodes: 2, gpus_per_node: 2, fabric: ideal, network: {latency: 30 us, bandwidth: 25 Gbit/s}}
  workload: {preset: resnet50, batch_size: 32, forward: 30 ms, backward: 60 ms, optimize: 1 ms}
  disturbances: [{kind: recorded, on: host, file: late.npz}]
  schedules: [{kind: sync}]
  steps: 5
vary: {cluster.network.bandwidth: [1 Gbit/s, 2 Gbit/s, 5 Gbit/s]}
seeds: 1
"""


def recorded(folder: Path, delay_s: float) -> Path:
    """Write the file of delays that the sweep `RECORDED` names, of the same size for any delay, and the sweep."""
    np.savez(folder / "late.npz", host=np.full((5, 4), delay_s))
    path = folder / "recorded.yaml"
    path.write_text(RECORDED, encoding="utf-8")
    return path


@pytest.mark.parametrize("n_workers", [0, 1])
def test_file_that_is_edited_while_a_sweep_runs_ends_it(tmp_path, n_workers):
    path = recorded(tmp_path, 0.0)
    n_points = 200 if n_workers else 6  # more than a worker is ahead of the edit
    many = ", ".join(f"{number} Mbit/s" for number in range(1000, 1000 + n_points))
    path.write_text(RECORDED.replace("1 Gbit/s, 2 Gbit/s, 5 Gbit/s", many), encoding="utf-8")
    edited = []

    def edit(state: SweepProgress) -> None:
        if state.n_new and not edited:
            np.savez(tmp_path / "late.npz", host=np.ones((5, 4)))
            edited.append(state.n_new)

    with pytest.raises(RunError, match=r"late\.npz: has changed since the sweep began, or is another file on "):
        compute(path, tmp_path / "out", n_workers=n_workers, progress=edit)
    np.savez(tmp_path / "late.npz", host=np.zeros((5, 4)))
    again = compute(path, tmp_path / "out")
    assert again.n_new > 0
    assert again.n_failed == 0
    compute(path, tmp_path / "anew")
    assert files(tmp_path / "out") == files(tmp_path / "anew")


def test_file_that_is_edited_while_a_row_is_computed_ends_the_sweep(tmp_path, monkeypatch):
    path = recorded(tmp_path, 0.0)

    def edited(*args, **options):
        recorded(tmp_path, 1.0)
        return measure(*args, **options)

    monkeypatch.setattr(tasks, "measure", edited)
    with pytest.raises(RunError, match=r"late\.npz: has changed"):
        compute(path, tmp_path / "out")
    assert rows(tmp_path / "out") == []


def test_script_without_a_guard_is_told_what_to_write(tmp_path):
    sweep_file(tmp_path, "{seed: [1, 2]}")
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from simdist.sweeps import LocalPool, load, sweep\n"
        "with LocalPool(1) as pool:\n"
        "    sweep(load('s.yaml'), Path('out'), workers=pool)\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    what = "write `if __name__ == '__main__':` above what runs the sweep"
    assert f"in a script, {what}" in done.stderr.splitlines()[-1]


def test_header_of_the_design_says_how_points_were_taken(tmp_path):
    for sample, kind in (("{}", "grid"), ("{kind: sobol, points: 2}", "sobol")):
        compute(sweep_file(tmp_path, "{seed: [1, 2]}", sample=sample), tmp_path / kind)
        assert next(read_jsonl(tmp_path / kind / DESIGN))["sampling"] == kind
