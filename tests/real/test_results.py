"""Nothing measured is lost, or mixed with another run, when a disk is full, a writer is killed, or two runs start."""

import json
import socket
import time
from pathlib import Path

import faults
import pytest
from commandline import call
from processes import run, run_as_main, start
from timeouts import TIMEOUT_S

from simdist.errors import RunError
from simdist.runs import run_directory
from simdist.runs.building import build, delays
from simdist.runs.run_directory import PARTIAL, REAL, REPORT, SIMULATED
from simdist.scenario import loads
from simdist.studies.validation import finished_steps
from simdist.traces.trace import Trace

SMALL = """\
cluster: {nodes: 1, gpus_per_node: 1, fabric: ideal, network: ideal}
workload: {tensors: [{name: weight, count: 2000}], batch_size: 4, forward: 1 ms}
steps: 5
schedules: [{kind: sync}]
"""
FILES = ["delays.npz", "plan.json", "real.json", "scenario.yaml", "trace.real.npz"]


def write(path: Path, text: str = SMALL, *, force: bool = False) -> Path:
    scenario = loads(text, folder=path.parent)
    run_directory.write(path, scenario, build(scenario, scenario.schedules[0]).plan, delays(scenario), force=force)
    return path


def result(path: Path) -> tuple[bytes, bytes]:
    return (path / REAL).read_bytes(), (path / REPORT).read_bytes()


def measure(path: Path, *options: str) -> str:
    (ending,) = run(run_as_main, 1, "real", True, str(path), *options).values()
    assert ending.code == 0, ending.output
    assert sorted(file.name for file in path.iterdir() if file.name != SIMULATED) == FILES
    return ending.output


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write(tmp_path_factory.mktemp("once") / "run")
    measure(path)
    return path


@pytest.fixture
def measured(once: Path, tmp_path: Path) -> Path:
    """A run directory with a result, to measure again."""
    path = write(tmp_path / "run")
    for name in (REAL, REPORT):
        (path / name).write_bytes((once / name).read_bytes())
    return path


@pytest.mark.parametrize(("fault", "name"), [("torn", REAL), ("torn", REPORT), ("killed", REAL), ("killed", REPORT)])
def test_a_result_is_that_of_one_run_wherever_its_writer_is_killed(
    measured: Path, capsys: pytest.CaptureFixture[str], fault: faults.Fault, name: str
) -> None:
    before = result(measured)
    (ending,) = run(faults.perform, 1, fault, name, measured, "--force").values()
    assert ending.code == -9, ending.output
    trace = Trace.load(measured / REAL)
    assert run_directory.read_real_report(measured, trace)["makespan_s"] == trace.makespan_s
    assert (result(measured) == before) == ((fault, name) != ("killed", REPORT))
    assert call(capsys, "validate", measured).code == 0
    said = measure(measured, "--force")
    assert f"an earlier run ended early: what was done is in {measured / PARTIAL}" in said


def test_a_disk_that_is_full_at_the_end_leaves_the_old_result_and_all_times(measured: Path) -> None:
    before = result(measured)
    (ending,) = run(faults.perform, 1, "full", REPORT, measured, "--force").values()
    assert ending.code == 1
    assert f"error: {measured / REPORT}: cannot be written: No space left on device; what was done is" in ending.output
    assert result(measured) == before
    assert finished_steps(Trace.load(measured / PARTIAL)) == 5


def test_times_that_find_no_room_are_kept_by_the_next_start(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    (ending,) = run(faults.perform, 1, "full", "trace.", path).values()
    assert (
        f"; what was done is still in {path / 'parts'}, and the next start keeps it ({path / PARTIAL}" in ending.output
    )
    (ending,) = run(faults.perform, 1, "torn", REAL, path).values()
    assert "an earlier run ended early: what was done is in" in ending.output
    assert finished_steps(Trace.load(path / PARTIAL)) == 5


def test_others_keep_what_was_done_when_the_writer_is_killed(tmp_path: Path) -> None:
    path = write(tmp_path / "run", SMALL.replace("gpus_per_node: 1", "gpus_per_node: 2"))
    endings = run(faults.perform, 2, "torn", REAL, path)
    assert [ending.code for ending in endings.values()] == [-9, 1]
    assert endings[1].output.endswith(f"; what was done is in {path / PARTIAL}\n"), endings[1].output
    assert finished_steps(Trace.load(path / PARTIAL)) == 5
    assert not (path / REAL).exists()


def test_a_run_directory_is_that_of_one_run_at_a_time(tmp_path: Path) -> None:
    path = write(tmp_path / "run", SMALL.replace("forward: 1 ms", "forward: 400 ms"))
    with start(run_as_main, 1, "real", True, str(path)) as ranks:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (path / "parts" / "rank-00000.json").exists():
            assert time.monotonic() < deadline_s, ranks.output(0)
            time.sleep(0.01)
        holder = f"{path}: process {ranks.pid(0)} on {socket.gethostname()} writes there"
        (second,) = run(run_as_main, 1, "real", True, str(path), "--force").values()
        with pytest.raises(RunError, match="writes there: wait for its end, or end it") as error:
            write(path, SMALL, force=True)
        (first,) = ranks.wait().values()
    assert (second.code, holder in second.output) == (1, True), second.output
    assert holder in str(error.value)
    assert first.code == 0, first.output
    assert sorted(file.name for file in path.iterdir()) == FILES


def test_a_run_that_ended_while_another_began_is_not_replaced(measured: Path) -> None:
    """The second looked before there was a result, and came to the lock when it was free."""
    before = result(measured)
    (ending,) = run(begin_before_it_is_measured, 1, str(measured)).values()
    assert (ending.code, "is there already; replace it with --force" in ending.output) == (2, True), ending.output
    assert result(measured) == before


def begin_before_it_is_measured(path: str) -> None:
    import real.cli

    real.cli._runs = lambda _options: [run_directory.read(Path(path))]  # type: ignore[assignment]
    run_as_main("real", True, path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    (path / ".lock").mkdir()  # nothing can be written there, even by root
    (ending,) = run(run_as_main, 1, "real", True, str(path)).values()
    assert (ending.code, f"error: {path / '.lock'}: cannot be written: Is a directory" in ending.output) == (1, True)


def test_a_trace_and_a_report_of_two_runs_are_refused(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.loads((measured / REPORT).read_text())
    (measured / REPORT).write_text(json.dumps(report | {"run": "another"}))
    message = f"{REPORT}: is of run 'another', {REAL} of run '{report['run']}'"
    for command in ("validate", "report"):
        more = ["-o", tmp_path / "page.html"] if command == "report" else []
        answer = call(capsys, command, measured, *more)
        assert (answer.code, message in answer.err) == (2, True), answer.err


def test_results_from_before_runs_had_names_are_read(measured: Path) -> None:
    report = json.loads((measured / REPORT).read_text())
    del report["run"]
    (measured / REPORT).write_text(json.dumps(report))
    trace = Trace.load(measured / REAL)
    Trace(trace.plan, trace.ready_s, trace.start_s, trace.end_s, trace.source).save(measured / REAL)
    assert run_directory.read_real_report(measured, Trace.load(measured / REAL)) == report


# in a training script


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.npz"


def train(*args: object) -> tuple[int, str]:
    (ending,) = run(faults.train, 1, *args).values()
    return ending.code, ending.output


def test_times_of_a_killed_script_are_kept_by_its_next_start(trace: Path) -> None:
    assert train({"trace": trace}, "is killed")[0] == -9
    code, output = train({"trace": trace})
    assert (code, f"an earlier run ended early: what was done is in {trace.parent / PARTIAL}" in output) == (0, True)
    assert [finished_steps(Trace.load(each)) for each in (trace, trace.parent / PARTIAL)] == [6, 3]
    assert sorted(file.name for file in trace.parent.iterdir()) == ["trace.npz", PARTIAL]


def test_times_of_a_script_that_raises_are_kept_at_once(trace: Path) -> None:
    code, output = train({"trace": trace}, "raises")
    assert (code, f"ValueError: bad batch\nwhat was done is in {trace.parent / PARTIAL}" in output) == (1, True), output
    assert finished_steps(Trace.load(trace.parent / PARTIAL)) == 3


def test_a_trace_of_a_script_that_finds_no_room_is_kept_by_the_next_start(trace: Path) -> None:
    code, output = train({"trace": trace}, "", "full", "trace.")
    assert (code, f"{trace}: cannot be written: No space left on device" in output) == (1, True), output
    assert f"\nwhat was done is still in {trace.with_suffix('.parts')}, and the next start keeps it" in output
    assert train({"trace": trace}, "is killed")[0] == -9
    assert finished_steps(Trace.load(trace.parent / PARTIAL)) == 6


def test_a_script_that_is_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(tmp_path: Path) -> None:
    assert train({"checkpoint": tmp_path}, "", "torn", "step-0000000004")[0] == -9
    assert train({"checkpoint": tmp_path}) == (0, "begins before step 2\n")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-0000000004.ckpt", "step-0000000006.ckpt"]


@pytest.mark.parametrize("kind", ["checkpoint", "trace"])
def test_a_script_that_is_started_twice_is_refused(tmp_path: Path, kind: str) -> None:
    with start(faults.train, 1, {kind: tmp_path / "trace.npz"}, "stops") as ranks:
        ranks.until("begins before step 0")
        code, output = train({kind: tmp_path / "trace.npz"})
        assert (code, f"process {ranks.pid(0)} on {socket.gethostname()} writes there" in output) == (1, True), output
