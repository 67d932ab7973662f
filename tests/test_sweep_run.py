"""A sweep is computed once, whole, and the same, whatever happens to the processes that compute it."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import misbehaving
import pytest
from commandline import SMALL, call
from processes import TIMEOUT_S, await_end

from simdist.cli.sweeping import Ticker
from simdist.errors import RunError
from simdist.sweep import InProcess, LocalPool, load, run
from simdist.sweep.driver import State
from simdist.sweep.keys import code_version
from simdist.sweep.store import DESIGN, ROWS, Store, read_jsonl
from simdist.sweep.tasks import Batch, evaluate

BAD = "{kind: misbehaving, period: 4, does: %s, gate: %s}"
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@pytest.fixture
def bad(tmp_path, monkeypatch):
    """Let scenarios have schedules that misbehave."""
    place = tmp_path / "misbehaving"
    place.mkdir()
    with misbehaving.folder(place, monkeypatch):
        yield


def sweep_file(
    folder: Path, vary: str, *, schedules: str = "[{kind: sync}, {kind: local_sgd, period: 4}]", **keys
) -> Path:
    """Write a sweep over the small scenario, with these schedules."""
    begin = SMALL[: SMALL.index("schedules:")]
    (folder / "base.yaml").write_text(begin + f"schedules: {schedules}\n", encoding="utf-8")
    lines = [
        "scenario: base.yaml",
        f"vary: {vary}",
        *(f"{key}: {value}" for key, value in {"seeds": 2, **keys}.items()),
    ]
    path = folder / "s.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def compute(path: Path, folder: Path, *, n_workers: int = 0, **options):
    if n_workers == 0:
        return run(load(path), folder, workers=InProcess(), **options)
    with LocalPool(n_workers) as pool:
        return run(load(path), folder, workers=pool, **options)


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (DESIGN, ROWS)}


def rows(folder: Path) -> list[dict]:
    """Return the records that are complete; of each key one."""
    found = list(read_jsonl(folder / ROWS))
    assert len({each["key"] for each in found}) == len(found)
    return found


def failures(folder: Path) -> list[tuple[str, str]]:
    return [(each["failed"], each["error"]) for each in rows(folder) if "failed" in each]


def start(*args, **options) -> subprocess.Popen:
    """Start `simdist sweep` in a group of processes of its own, as a terminal does."""
    command = [sys.executable, "-m", "simdist", "sweep", *map(str, args)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **options)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def await_rows(folder: Path, n_rows: int, process: subprocess.Popen) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(list(read_jsonl(folder / ROWS))) < n_rows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def gated(folder: Path) -> tuple[Path, Path]:
    """Write a sweep of 36 different rows, 12 of which wait for a gate; return it and the gate."""
    gate = folder / "gate"
    vary = "{'schedules[1].does': [nothing, waits], seed: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]}"
    return sweep_file(folder, vary, schedules=f"[{{kind: sync}}, {BAD % ('nothing', gate)}]"), gate


def test_table_does_not_tell_how_many_processes_computed_it(tmp_path):
    path = sweep_file(tmp_path, "{cluster.nodes: [2, 3, 4], disturbances.0.delay: [10 ms, 20 ms, 30 ms, 50 ms]}")
    serial = compute(path, tmp_path / "serial")
    assert (serial.n_points, serial.n_rows, serial.n_new, serial.n_failed) == (12, 24, 24, 0)
    compute(path, tmp_path / "pool", n_workers=2)
    assert files(tmp_path / "pool") == files(tmp_path / "serial")
    design = list(read_jsonl(tmp_path / "serial" / DESIGN))
    assert [each["key"] for each in design[1:]] == [each["key"] for each in rows(tmp_path / "serial")]


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

    def kill(state: State) -> None:
        if state.n_new and not killed:
            assert state.n_done < state.n_all
            killed.extend(multiprocessing.active_children()[:1])
            killed[0].kill()

    outcome = compute(path, tmp_path / "killed", n_workers=2, progress=kill)
    assert (outcome.n_new, outcome.n_failed, len(killed)) == (24, 0, 1)
    compute(path, tmp_path / "whole")
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


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
    path = sweep_file(tmp_path, "{seed: [1]}", schedules=f"[{BAD % ('loops', 'x')}, {{kind: sync}}]", time_limit="2 s")
    outcome = compute(path, tmp_path / "out")
    assert outcome.n_failed == 1
    assert failures(tmp_path / "out")[0][1].startswith("not done after 2 s")


def test_row_that_never_ends_is_interrupted_in_a_thread_as_well(tmp_path, bad):
    path = sweep_file(tmp_path, "{seed: [1]}", schedules=f"[{BAD % ('loops', 'x')}, {{kind: sync}}]", time_limit="2 s")
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(compute(path, tmp_path / "out")))
    thread.start()
    thread.join()
    assert outcomes[0].n_failed == 1
    assert failures(tmp_path / "out")[0][1].startswith("not done after 2 s")


def test_process_that_hangs_is_given_up(tmp_path, bad):
    path = sweep_file(
        tmp_path, "{seed: [1, 2]}", schedules=f"[{BAD % ('nothing', 'x')}, {{kind: sync}}]", time_limit="2 s"
    )
    text = path.read_text().replace("seed: [1, 2]", "'schedules[0].does': [hangs, nothing]")
    path.write_text(text)
    outcome = compute(path, tmp_path / "out", n_workers=1, grace_s=1.0)
    assert (outcome.n_rows, outcome.n_failed) == (4, 1)
    assert failures(tmp_path / "out")[0][1].startswith("not done after 2 s")


def test_two_sweeps_do_not_share_a_folder(tmp_path, capsys):
    path = sweep_file(tmp_path, "{seed: [1, 2]}")
    with Store(tmp_path / "out"):
        answer = call(capsys, "sweep", path, "-o", tmp_path / "out", "--workers", 0)
    assert answer.code == 1
    assert f"process {os.getpid()} computes a sweep there" in answer.err
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
    assert json.loads(answer.out) == found


def test_command_groups_errors_of_failed_rows(tmp_path, bad, capsys):
    vary = "{'schedules[1].does': [raises, nothing], seed: [1, 2, 3]}"
    path = sweep_file(tmp_path, vary, schedules=f"[{{kind: sync}}, {BAD % ('nothing', 'x')}]")
    answer = call(capsys, "sweep", path, "-o", tmp_path / "out", "--workers", 0)
    assert answer.code == 1
    assert "error: 3 of 12 rows failed" in answer.err
    assert "  3 x ZeroDivisionError: a defect\n" in answer.err


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
    ticker = Ticker(stream, "s", every_s=0.0)
    ticker.tick(State("rows", 10, 1010))
    ticker.tick(State("rows", 510, 1010, n_new=500, n_failed=3))
    first, second = stream.text.splitlines()
    assert first == "s: 10 of 1,010 rows"
    assert second == "s: 510 of 1,010 rows, 3 failed, 0 min 0 s left"


def test_lines_of_progress_are_rare():
    stream = Recorder()
    ticker = Ticker(stream, "s")
    for n_done in range(100):
        ticker.tick(State("rows", n_done, 100, n_new=n_done))
    assert stream.text == ""


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
        Batch(code_version(), Path(), (), 1, "auto", 60.0),
        Batch("0.1.0, code 123", Path(), (), 1, "auto", 60.0),
    )
    assert evaluate(ours).records == ()
    with pytest.raises(RunError, match=f"a worker has simdist {code_version()}; this is 0.1.0, code 123"):
        evaluate(other)
