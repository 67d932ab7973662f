"""`python -m real RUN`, end to end: what a run leaves; and each way to fail ends in one line that names the rank."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from commandline import call  # noqa: E402
from processes import Ending, Ranks, places, run, run_as_main, start, torchrun, torchrun_forks  # noqa: E402
from timeouts import TIMEOUT_S, await_end  # noqa: E402

import real.session  # noqa: E402
from real.cli import main  # noqa: E402
from real.processes.launch import connect  # noqa: E402
from real.programs.emulated import EmulatedProgram  # noqa: E402
from real.recording.clock import agree_on_start_s, compare_clocks, drift, to_common_s  # noqa: E402
from real.recording.timing import now_s  # noqa: E402
from simdist.cost import Resources  # noqa: E402
from simdist.cost.traffic import Traffic  # noqa: E402
from simdist.plan import COLLECTIVES, Delay, occurrences  # noqa: E402
from simdist.plan.walk import walk  # noqa: E402
from simdist.runs import run_directory  # noqa: E402
from simdist.runs.building import build, delays  # noqa: E402
from simdist.scenario import loads  # noqa: E402
from simdist.studies.validated_run import validate_run  # noqa: E402
from simdist.studies.validation import finished_steps  # noqa: E402
from simdist.traces.trace import Trace  # noqa: E402
from simdist.traces.waiting import attribute_waiting  # noqa: E402

SMALL = """\
cluster: {nodes: 1, gpus_per_node: 3, fabric: ideal, network: ideal}
workload:
  tensors:
    - {name: weight, count: 2000}
    - {name: bias, count: 100}
  batch_size: 4
  forward: 1 ms
steps: 5
schedules: [{kind: sync}]
"""
N_LONG = 100  # 4.5 s: long enough to do something to it under load, short enough to do it again
LONG = SMALL.replace("steps: 5", f"steps: {N_LONG}").replace("forward: 1 ms", "forward: 15 ms")
N_DONE = 12  # steps, before something happens
PAIR = SMALL.replace("gpus_per_node: 3", "gpus_per_node: 2")
MODEL = """\
cluster: {nodes: 1, gpus_per_node: 2, fabric: ideal, network: ideal}
workload: {preset: mlp, batch_size: 4}
steps: 3
schedules: [{kind: sync}, {kind: local_sgd, period: 2}]
"""
WIDE = """\
cluster: {nodes: 2, gpus_per_node: 2, fabric: ideal, network: ideal, storage: {latency: 1 ms, bandwidth: 1 GB/s}}
workload:
  tensors:
    - {name: first, count: 2000}
    - {name: second, count: 2000}
    - {name: third, count: 2000}
  batch_size: 4
  sample_size: 1 kB
  forward: 4 ms
input: {source: storage}
steps: 12
disturbances: [{kind: recorded, file: measured.npz}]
schedules:
  - {kind: sync, first_bucket_size: 4 kB, bucket_size: 4 kB}
  - {kind: hierarchical_sgd, levels: {2: 2, 4: world}, intra_node_gradients: false}
"""
SLOW_LINK = """\
cluster: {nodes: 3, gpus_per_node: 1, fabric: ideal, network: {latency: 0 s, bandwidth: 1 GB/s}}
workload: {tensors: [{name: weight, count: 2000}], batch_size: 4, forward: 1 ms}
steps: 5
disturbances: [{kind: persistent, on: link, link: nic_out, nodes: [1], share: 50%}]
background: [{kind: steady, from: 2, to: 0}]
schedules: [{kind: sync}]
"""
STRAGGLER, LATE_STEPS, LATE_S = 2, [3, 7], 0.5  # longer than a busy machine holds up others
SYNC = ["forward", "wait", "backward", "all_reduce", "optimize"]  # operations of a step of SMALL
SHOWN = re.compile(r"^real: rank (\d+): error: (.*)$", re.MULTILINE)


def write(path: Path, text: str = SMALL) -> Path:
    """Write the run directory of each schedule; return the one that holds them."""
    scenario = loads(text, folder=path.parent)
    for schedule in scenario.schedules:
        one = scenario.model_copy(update={"schedules": (schedule,)})
        folder = path if len(scenario.schedules) == 1 else path / schedule.name
        run_directory.write(folder, one, build(one, schedule).plan, delays(one))
    return path


# what a rank does


def perform(*args: object) -> None:
    sys.exit(main([str(arg) for arg in args]))


def perform_own(*of_ranks: Sequence[object]) -> None:
    """Each rank with arguments of its own."""
    perform(*of_ranks[int(os.environ["RANK"])])


def perform_and_raise(stray: int, *args: object) -> None:
    """One rank cannot compute from a forward pass on."""
    forward = EmulatedProgram.forward

    def fail(self: EmulatedProgram, parts, step: int, complete) -> None:
        if step == N_DONE:
            raise ValueError("the loss is\nNaN")
        forward(self, parts, step, complete)

    if int(os.environ["RANK"]) == stray:
        EmulatedProgram.forward = fail
    perform(*args)


def perform_links(folder: Path, *args: object) -> None:
    """What performs the links notes what it was asked for, and when the run began."""

    @contextmanager
    def note(traffic: Traffic, resources: Resources, node: int) -> Iterator[Callable[[float], None]]:
        shares = [(resources.name(each.resources[0]), list(each.shares())) for each in traffic.shares]
        flows = [[resources.name(int(each)) for each in other.stage.resources] for other in traffic.background]
        begun_s: list[float] = []
        yield begun_s.append
        path = folder / f"links-{node}.json"
        path.write_text(json.dumps([shares, flows, len(begun_s), now_s() > begun_s[0] > 0]), encoding="utf-8")

    sys.modules["noting"] = noting = types.ModuleType("noting")
    noting.note = note  # type: ignore[attr-defined]
    perform(*args, "--links", "noting:note")


def perform_and_die(where: str, *args: object) -> None:
    """Rank 1 is killed at a point outside the steps."""

    def die(*_args: object, **_options: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "1":
        setattr(real.session, where, die)
    perform(*args)


def perform_without_room(*args: object) -> None:
    """Rank 0 finds no room for the trace."""

    def fail(trace: Trace, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    if os.environ["RANK"] == "0":
        Trace.save = fail  # type: ignore[assignment]
    perform(*args)


# what a test sees


def finished(path: Path, world_size: int) -> int:
    """Return how many instances every rank has done so far."""
    try:
        ends = [np.load(path / "parts" / f"rank-{rank:05d}.npy", mmap_mode="r")[2] for rank in range(world_size)]
    except (OSError, ValueError, EOFError):
        return 0
    return min(int(np.isfinite(end).sum()) for end in ends)


def until_running(path: Path, ranks: Ranks) -> None:
    """Wait until each of three ranks has done some steps."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while finished(path, 3) < N_DONE * len(SYNC):
        ended = [rank for rank in ranks.names if ranks.code(rank) is not None]
        assert not ended, "".join(map(ranks.output, ended))
        assert time.monotonic() < deadline_s, "the run does not start"
        time.sleep(0.01)


def shown(output: str) -> dict[int, str]:
    """Return the error line of each rank; no rank may have two, and none a traceback."""
    lines = SHOWN.findall(output)
    assert len({rank for rank, _ in lines}) == len(lines), output
    assert "Traceback" not in output.split("torch/distributed/elastic")[0], output
    return {int(rank): text for rank, text in lines}


def errors(endings: dict[int, Ending], code: int = 1) -> dict[int, str]:
    """Return the one line in which each rank says why it failed, and nothing else."""
    for rank, ending in endings.items():
        assert ending.code == code, ending.output
        assert list(shown(ending.output)) == [rank], ending.output
    return {rank: shown(ending.output)[rank] for rank, ending in endings.items()}


def kept(path: Path) -> Trace:
    """Return the trace of a run that ended early: each stream of each rank is done up to somewhere, then nothing."""
    trace = Trace.load(path / run_directory.PARTIAL)
    assert not (path / run_directory.REAL).exists()
    assert 10 <= finished_steps(trace) < trace.plan.n_steps
    ran = np.isfinite([trace.ready_s, trace.start_s, trace.end_s])
    assert (ran == ran[0]).all()
    streams = np.array([instance.lane.stream for instance in walk(trace.plan)])
    for stream in np.unique(streams):
        assert (np.diff(ran[0, streams == stream].astype(int), axis=0) <= 0).all()
    assert (np.diff([trace.ready_s, trace.start_s, trace.end_s], axis=0)[:, ran[0]] >= 0).all()
    return trace


def assert_runs_again(path: Path, world_size: int = 3) -> None:
    endings = run(perform, world_size, path)
    assert [ending.code for ending in endings.values()] == [0] * world_size, endings
    assert np.isfinite(Trace.load(path / run_directory.REAL).end_s).all()
    assert sorted(file.name for file in path.iterdir()) == [
        "delays.npz",
        "plan.json",
        "real.json",
        "scenario.yaml",
        "trace.real.npz",
    ]


# a run


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two schedules of 4 ranks, performed in one start of torchrun; rank 2 sleeps longer in two steps."""
    folder = tmp_path_factory.mktemp("measured")
    drawn_s = np.full((12, 4), 3e-3)
    drawn_s[LATE_STEPS, STRAGGLER] = LATE_S
    np.savez(folder / "measured.npz", drawn_s)
    path = write(folder / "run", WIDE)
    (ending,) = run(torchrun_forks, 1, *as_torchrun(4, path)).values()
    assert ending.code == 0, ending.output
    assert "error" not in ending.output
    assert len(re.findall(r"4 ranks, 12 steps, .* a step \(real gloo on cpu, emulated\)", ending.output)) == 2
    return path


LABELS = ["sync", "hsgd-2-2,4-world"]


@pytest.fixture(params=LABELS)
def done(measured: Path, request: pytest.FixtureRequest) -> run_directory.RunDirectory:
    return run_directory.read(measured / request.param)


@pytest.fixture
def trace(done: run_directory.RunDirectory) -> Trace:
    return run_directory.read_trace(done.path / run_directory.REAL, plan=done.plan)


def test_every_instance_ran_and_in_order(trace: Trace) -> None:
    assert np.isfinite([trace.ready_s, trace.start_s, trace.end_s]).all()
    assert (trace.ready_s >= 0).all()
    assert (trace.ready_s <= trace.start_s).all()
    assert (trace.start_s <= trace.end_s).all()
    last: dict[str, int] = {}
    for instance in walk(trace.plan):
        before = [*instance.after, *([last[instance.lane.stream]] if instance.lane.stream in last else [])]
        for index in before:
            assert (trace.ready_s[instance.index] >= trace.end_s[index]).all(), (instance, index)
        last[instance.lane.stream] = instance.index


def test_members_of_a_group_begin_a_collective_together(trace: Trace) -> None:
    n_collectives = 0
    for each in (each for each in occurrences(trace.plan) if isinstance(each.op, COLLECTIVES)):
        for ranks in map(list, each.op.group.members(4)):
            start_s = trace.start_s[each.rows][:, ranks]
            assert (start_s == start_s[:, :1]).all()
            assert (start_s[:, 0] == trace.ready_s[each.rows][:, ranks].max(axis=1)).all()
            n_collectives += 1
    assert n_collectives >= 2


def test_injected_delays_come_back(done: run_directory.RunDirectory, trace: Trace) -> None:
    """None ends early. On a busy machine sleepers oversleep, but not all of them."""
    over_s: list[float] = []
    for each in (each for each in occurrences(trace.plan) if isinstance(each.op, Delay)):
        meant_s = done.delays[each.op.channel][0, each.steps]
        over_s += ((trace.end_s - trace.start_s)[each.rows] - meant_s).ravel().tolist()
    assert len(over_s) == 12 * 4
    assert -1e-6 < min(over_s) < 2e-3


def test_waiting_is_blamed_on_the_rank_that_slept(trace: Trace) -> None:
    caused_s = attribute_waiting(trace).caused_s[LATE_STEPS]
    assert (caused_s.argmax(axis=1) == STRAGGLER).all()
    assert (caused_s[:, STRAGGLER] > 0.5 * caused_s.sum(axis=1)).all()
    assert (caused_s[:, STRAGGLER] > 0.5 * LATE_S).all()


def test_report_tells_clocks_and_what_tracing_cost(done: run_directory.RunDirectory, trace: Trace) -> None:
    report = json.loads((done.path / run_directory.REPORT).read_text())
    assert report["digest"] == done.plan.digest()
    assert (report["backend"], report["program"]) == ("gloo", "emulated")
    assert report["hosts"] == [socket.gethostname()] * 4
    assert report["makespan_s"] == trace.makespan_s > 12 * 4e-3
    assert report["clock_ahead_s"] == report["clock_uncertainty_s"] == [[0.0] * 4] * 2
    sent = {op.buffer for body in done.plan.bodies for op in body if isinstance(op, COLLECTIVES)}
    assert report["buffers_nbytes"] == [sum(buffer.nbytes for buffer in done.plan.buffers if buffer.name in sent)] * 4
    assert 0 < report["tracing_share"] < 1
    assert report["tracing_share"] == pytest.approx(report["tracing_s"] / report["makespan_s"])


def test_a_run_leaves_its_trace_and_nothing_else(done: run_directory.RunDirectory) -> None:
    files = sorted(file.name for file in done.path.iterdir() if file.name != run_directory.SIMULATED)
    assert files == ["delays.npz", "plan.json", "real.json", "recording-0.npz", "scenario.yaml", "trace.real.npz"]


def test_commands_read_the_trace(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from simdist.cli import main as simdist

    answer = call(capsys, "validate", measured)
    assert answer.code == 0, answer.err
    assert f"rank {STRAGGLER} is blamed most in both" in answer.out
    chrome = tmp_path / "chrome.json"
    assert simdist(["trace", str(measured / "sync"), "--trace", "real", "--chrome", str(chrome)]) == 0
    assert len(json.loads(chrome.read_text())["traceEvents"]) > 100


def test_models_train_and_leave_traces(tmp_path: Path) -> None:
    path = write(tmp_path / "run", MODEL)
    for ending in run(perform, 2, path, "--program", "mlp").values():
        assert ending.code == 0, ending.output
    for label in ("sync", "local-2"):
        trace = run_directory.read_trace(path / label / run_directory.REAL)
        assert trace.source == "real gloo on cpu, mlp fp32"
        validated = validate_run(run_directory.read(path / label))
        assert not any("was computed in" in each.text for each in validated.remarks)
        assert np.isfinite(trace.end_s).all()


def test_a_model_in_low_precision_trains(tmp_path: Path) -> None:
    path = write(tmp_path / "run", MODEL.replace("mlp", "gpt-nano").replace("steps: 3", "steps: 2"))
    for ending in run(perform, 2, path, "--program", "gpt-nano", "--precision", "bf16", "--schedule", "sync").values():
        assert ending.code == 0, ending.output
    trace = run_directory.read_trace(path / "sync" / run_directory.REAL)
    assert np.isfinite(trace.end_s).all()
    assert not (path / "local-2" / run_directory.REAL).exists()
    assert run_directory.read_real_report(path / "sync", trace)["precision"] == "bf16"
    remarks = [each.text for each in validate_run(run_directory.read(path / "sync")).remarks]
    assert any("was computed in bf16, and workload.precision is fp32: perform it with" in text for text in remarks)


@pytest.mark.sentinel
def test_one_rank_performs_one_step(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run", SMALL.replace("gpus_per_node: 3", "gpus_per_node: 1").replace("steps: 5", "steps: 1")
    )
    assert_runs_again(path, world_size=1)
    assert (
        errors(run(perform, 1, path), code=2)[0]
        == f"{path / run_directory.REAL}: is there already; replace it with --force"
    )
    (ending,) = run(torchrun, 1, *as_torchrun(1, path, "--force")).values()
    assert ending.code == 0, ending.output
    assert ending.output.startswith("sync: 1 ranks, 1 steps, "), ending.output


# refused before anything happens


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run rank 0 in this process, for what is refused before it connects."""

    def call_main(*args: object, world_size: int = 3) -> tuple[int, str]:
        for name, value in places(0, world_size, 1).items():
            monkeypatch.setenv(name, value)
        code = main([str(arg) for arg in args])
        err = capsys.readouterr().err
        assert err.count("\n") == 1, err
        return code, shown(err)[0]

    return call_main


def test_wrong_input_is_refused_by_the_command(tmp_path: Path) -> None:
    endings = run(run_as_main, 1, "real", True, str(tmp_path))
    assert "is no run directory" in errors(endings, code=2)[0]
    assert endings[0].output.count("\n") == 1, endings[0].output


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_another_number_of_processes_is_refused(tmp_path: Path, called, world_size: int) -> None:
    code, error = called(write(tmp_path / "run"), world_size=world_size)
    assert code == 1
    assert f"plan sync is for 3 ranks, but {world_size} processes were started: torchrun --nproc-per-node 3" in error


def test_links_that_nobody_performs_are_refused_unless_left_out(
    tmp_path: Path, called, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "run", SLOW_LINK)
    code, output = called(path)
    assert code == 2
    assert (
        f"{path}: disturbances[0] (persistent) on nic_out[1]; background[0] (steady) on nic_out[2], nic_in[0]: nothing "
        "here can do that to links: name what can with --links MODULE:FUNCTION, or leave it out with --links none"
    ) in output
    assert {each.code for each in run(perform, 3, path, "--links", "none").values()} == {0}
    assert json.loads((path / run_directory.REPORT).read_text(encoding="utf-8"))["links"] == "none"
    answer = call(capsys, "validate", path, "--json")
    assert answer.code == 0
    (row,) = json.loads(answer.out)["rows"]
    assert any("measured without its disturbed links" in each["text"] for each in row["remarks"])
    assert "links" not in row
    assert not (path / run_directory.SIMULATED).exists()


def test_links_are_performed_on_every_node_from_the_moment_when_the_run_begins(tmp_path: Path) -> None:
    path = write(tmp_path / "run", SLOW_LINK)
    endings = run(perform_links, 3, tmp_path, path)
    assert {each.code for each in endings.values()} == {0}, endings
    expected = [[["nic_out[1]", [[0.0, 0.5]]]], [["nic_out[2]", "nic_in[0]"]], 1, True]
    for node in range(3):
        assert json.loads((tmp_path / f"links-{node}.json").read_text(encoding="utf-8")) == expected
    assert json.loads((path / run_directory.REPORT).read_text(encoding="utf-8"))["links"] == "noting:note"


def test_wrong_options_are_refused(tmp_path: Path, called) -> None:
    path = write(tmp_path / "run")
    for args, message in {
        ("--program", "mpl"): "there is no such program; there are emulated, bert-large, gpt-nano",
        ("--timeout", "nan"): "--timeout: 'nan s'",
        ("--timeout", "inf"): "--timeout: 'inf s'",
        ("--timeout", "500 ms"): "--timeout: 500 ms: write 1 s to 24 h",
        ("--timeout", "1 m"): "--timeout: '1 m': 'm' is no unit of time: write 1 min",
        ("--schedule", "local"): "no run is labelled 'local'; there are: sync",
        ("--precision", "fp8"): "'fp8' is not one of 'fp32', 'tf32', 'bf16', 'fp16'",
    }.items():
        code, error = called(path, *args)
        assert (code, message in error) == (2, True), error


PICKLE = b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."


def damage_delays(array: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.savez(path / "delays.npz", host=array)


def pickled(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(PICKLE)


def objects(name: str) -> Callable[[Path], None]:
    """Arrays of Python objects are pickles inside an .npz."""
    return lambda path: np.savez(path / name, header=np.array([{}], dtype=object), host=np.array([{}], dtype=object))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (pickled("delays.npz"), r"delays\.npz: cannot be read as delays"),
        (objects("delays.npz"), r"delays\.npz: header is no channel of delays"),
        (pickled("trace.partial.npz"), r"trace\.partial\.npz: cannot be read as a trace.*or delete it"),
        (objects("trace.partial.npz"), r"trace\.partial\.npz: cannot be read as a trace .*objects instead of numbers"),
        (damage_delays(np.full((5, 3), np.nan)), r"host delay nan at step 0, rank 0"),
        (damage_delays(np.full((5, 3), np.inf)), r"host delay inf at step 0, rank 0"),
        (damage_delays(np.full((5, 3), -1.0)), r"host delay -1.0 at step 0, rank 0"),
        (damage_delays(np.zeros((5, 2))), r"host is float64 \(5, 2\); .*plan\.json takes float64 \(5, 3\)"),
        (damage_delays(np.zeros((5, 3), dtype=np.int64)), "host is int64"),
        (lambda path: (path / "plan.json").write_bytes(b"{}"), r"plan\.json"),
        (lambda path: (path / "plan.json").write_bytes(b"\xff\xfe"), r"plan\.json"),
        (lambda path: (path / "plan.json").write_bytes(b"[" * 100_000), r"plan\.json"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, called, damage: Callable[[Path], object], message: str) -> None:
    path = write(tmp_path / "run")
    damage(path)
    code, error = called(path)
    assert code == 2
    assert re.search(message, error), error


@pytest.mark.parametrize("count", [10**12, 10**17, 10**30, -1, 2.5])
def test_a_plan_that_wants_all_memory_is_refused_before_it_gets_any(tmp_path: Path, count: float) -> None:
    path = write(tmp_path / "run", SMALL.replace("gpus_per_node: 3", "gpus_per_node: 1"))
    plan = json.loads((path / "plan.json").read_text())
    for buffer in plan["buffers"]:
        buffer["count"] = count
    (path / "plan.json").write_text(json.dumps(plan))
    (ending,) = run(perform, 1, path).values()
    (error,) = shown(ending.output).values()
    assert ending.code in (1, 2)
    assert re.search(r"needs \S+ GB for its buffers; the host has \S+ GB free|plan\.json: .*count", error), error


@pytest.mark.parametrize("times", [10**9, 10**15])
def test_a_plan_of_endless_steps_is_refused(tmp_path: Path, called, times: int) -> None:
    path = write(tmp_path / "run")
    plan = json.loads((path / "plan.json").read_text())
    plan["order"][0]["times"] = times
    (path / "plan.json").write_text(json.dumps(plan))
    code, error = called(path)
    assert code == 2
    assert "plan.json: " in error


# ranks that do not fit together


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of two ranks with equal plans, and other delays in the second."""
    late = PAIR.replace("schedules", "disturbances: [{kind: persistent, delay: 1 ms}]\nschedules")
    later = late.replace("delay: 1 ms", "delay: 2 ms")
    return write(tmp_path / "a", late), write(tmp_path / "b", later)


def test_another_plan_on_one_rank_is_refused(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    other = write(tmp_path / "c", PAIR)
    for error in errors(run(perform_own, 2, [pair[0]], [other])).values():
        assert "plan must be the same on every rank" in error
        assert "on rank 1" in error
    assert not list(tmp_path.glob("*/parts"))


def test_other_delays_on_one_rank_are_refused(pair: tuple[Path, Path]) -> None:
    for error in errors(run(perform_own, 2, [pair[0]], [pair[1]])).values():
        assert re.search(r"(scenario\.yaml|delays\.npz) must be the same on every rank.* on rank 1", error)


def test_another_program_on_one_rank_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run", MODEL)
    for error in errors(run(perform_own, 2, [path], [path, "--program", "mlp"])).values():
        assert (
            "program must be the same on every rank; most have 'emulated fp32', but found 'mlp fp32' on rank 1" in error
        )


def test_more_runs_on_one_rank_than_on_another_are_told(pair: tuple[Path, Path]) -> None:
    endings = run(perform_own, 2, [pair[0], pair[1], "--timeout", 8], [pair[0], "--timeout", 8])
    assert endings[1].code == 0, endings[1].output
    assert errors({0: endings[0]})[0].startswith("plan: rank 1 has not come within 8 s")
    assert (pair[0] / run_directory.REAL).exists()


def test_a_model_that_the_plan_is_not_for_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run", PAIR)
    for error in errors(run(perform, 2, path, "--program", "mlp"), code=2).values():
        assert "plan sync is for a model of 2 tensors; this one has 6 that are trained" in error
    assert not (path / "parts").exists()


def test_ranks_that_never_start_are_named(tmp_path: Path) -> None:
    for error in errors(run(perform, 3, write(tmp_path / "run"), "--timeout", 8, ranks=[0, 2])).values():
        assert "rank 1 has not answered the roll call of 3 ranks within 8 s: see the output there" in error


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = errors(run(perform, 3, write(tmp_path / "run"), "--timeout", 2, port=port, ranks=[0, 1]))
    for rank, error in found.items():
        assert error.startswith(f"rank {rank} (")
        assert f"{port}" in error
        assert "choose another --master-port" in error


def test_nccl_without_gpus_is_refused(tmp_path: Path) -> None:
    endings = run(perform, 3, write(tmp_path / "run"), "--backend", "nccl", environ={"CUDA_VISIBLE_DEVICES": ""})
    for error in errors(endings).values():
        assert re.search(r"nccl needs a GPU for each rank, found 0 GPUs .*use --backend gloo", error)


# ranks that fail in the middle


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Path, Ranks]]:
    """Three ranks in the middle of a run."""
    path = write(tmp_path / "run", LONG)
    with start(perform, 3, path, "--timeout", 20) as ranks:
        until_running(path, ranks)
        yield path, ranks


def me(ranks: Ranks, rank: int) -> str:
    return f"rank {rank} ({socket.gethostname()}, pid {ranks.pid(rank)})"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_the_run_can_be_done_again(running: tuple[Path, Ranks], victim: int) -> None:
    path, ranks = running
    ranks.signal(victim, signal.SIGKILL)
    others = [rank for rank in range(3) if rank != victim]
    for error in errors(ranks.wait(others)).values():
        assert me(ranks, victim) in error
        assert error.endswith(f"what was done is in {path / run_directory.PARTIAL}")
    trace = kept(path)
    assert trace.source == "real, ended early"
    if victim:
        assert_runs_again(path)


def test_a_rank_that_stands_still_is_named(running: tuple[Path, Ranks]) -> None:
    path, ranks = running
    ranks.signal(1, signal.SIGSTOP)
    for error in errors(ranks.wait([0, 2])).values():
        assert f"{me(ranks, 1)} has been silent for" in error
    kept(path)


def test_interrupted_ranks_keep_what_was_done(running: tuple[Path, Ranks]) -> None:
    path, ranks = running
    for rank in range(3):
        ranks.signal(rank, signal.SIGINT)
    assert set(errors(ranks.wait(), code=130).values()) == {"interrupted"}
    kept(path)


def test_a_rank_that_is_interrupted_alone_ends_all(running: tuple[Path, Ranks]) -> None:
    path, ranks = running
    ranks.signal(2, signal.SIGINT)
    endings = ranks.wait()
    assert errors({2: endings.pop(2)}, code=130) == {2: "interrupted"}
    for error in errors(endings).values():
        assert f"{me(ranks, 2)} failed: KeyboardInterrupt" in error
    kept(path)


def test_an_error_in_a_program_of_one_rank_is_told_on_all(tmp_path: Path) -> None:
    path = write(tmp_path / "run", LONG)
    with start(perform_and_raise, 3, 1, path, "--timeout", 20) as ranks:
        found = errors(ranks.wait())
    assert found[1].startswith("sync: ValueError: the loss is NaN; what was done is in ")
    for rank in (0, 2):
        assert f"{me(ranks, 1)} failed: sync: ValueError: the loss is NaN" in found[rank]
    assert N_DONE - finished_steps(kept(path)) in (0, 1)  # others may be behind, in the update that rank 1 has done


def test_a_rank_that_is_later_than_the_timeout_is_named(tmp_path: Path) -> None:
    """It lives and beats, so only its position tells."""
    drawn_s = np.zeros((N_LONG, 3))
    drawn_s[N_DONE, 1] = 60.0
    np.savez(tmp_path / "late.npz", drawn_s)
    path = write(tmp_path / "run", LONG + "disturbances: [{kind: recorded, file: late.npz}]\n")
    with start(perform, 3, path, "--timeout", 8) as ranks:
        found = errors(ranks.wait())
    for rank in (0, 2):
        assert f"rank 1 has not arrived: {me(ranks, 1)} is at operation " in found[rank], found
    assert re.search(r"rank [02] \(.*failed: .*rank 1 has not arrived", found[1]), found
    kept(path)


def test_a_run_directory_that_disappears_ends_all_ranks(running: tuple[Path, Ranks]) -> None:
    path, ranks = running
    shutil.rmtree(path)
    found = errors(ranks.wait())
    assert "trace.real.npz: cannot be written" in found[0] or "real.json" in found[0]
    for rank in (1, 2):
        assert f"{me(ranks, 0)} failed: " in found[rank]


def test_a_rank_is_named_although_its_times_cannot_be_kept(running: tuple[Path, Ranks]) -> None:
    path, ranks = running
    (path / run_directory.PARTIAL).mkdir()  # nothing can replace a folder, even by root
    ranks.signal(1, signal.SIGKILL)
    for error in errors(ranks.wait([0, 2])).values():
        assert me(ranks, 1) in error
        assert (
            f"done is still in {path / 'parts'}, and the next start keeps it ({path / run_directory.PARTIAL}: " in error
        )


def test_a_trace_that_cannot_be_written_fails_all_ranks(tmp_path: Path) -> None:
    path = write(tmp_path / "run")
    found = errors(run(perform_without_room, 3, path))
    assert f"{path / run_directory.REAL}: cannot be written: No space left on device" in found[0]
    for rank in (1, 2):
        assert re.search(r"rank 0 \(.*\) failed: .*cannot be written: No space left", found[rank])
    assert finished(path, 3) == 5 * len(SYNC)  # the times are still in the parts
    assert_runs_again(path)


@pytest.mark.parametrize("where", ["ProcessWorld", "agree_on_start_s", "gather_trace"])
def test_a_rank_that_dies_before_or_after_the_steps_is_named(tmp_path: Path, where: str) -> None:
    path = write(tmp_path / "run")
    with start(perform_and_die, 3, where, path, "--timeout", 20) as ranks:
        found = errors(ranks.wait([0, 2]))
    for error in found.values():
        assert f"{me(ranks, 1)} ended without a word (killed?)" in error
    n_finished = (
        finished_steps(Trace.load(path / run_directory.PARTIAL)) if (path / run_directory.PARTIAL).exists() else 0
    )
    assert n_finished == (5 if where == "gather_trace" else 0)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system that has 32 kB."""
    folder = tmp_path / "full"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("file systems can be mounted by root only")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=20)


def test_a_full_disk_is_told(full: Path) -> None:
    path = write(full / "run", SMALL.replace("gpus_per_node: 3", "gpus_per_node: 1").replace("steps: 5", "steps: 500"))
    (error,) = errors(run(perform, 1, path)).values()
    assert error.startswith(f"{path / 'parts' / 'rank-00000.npy'}: cannot be written: No space left on device")


def test_times_of_an_earlier_start_stay_out_of_a_later_one(tmp_path: Path) -> None:
    path = write(tmp_path / "run", LONG)
    with start(perform, 3, path, "--timeout", 20) as ranks:
        until_running(path, ranks)
        ranks.signal(1, signal.SIGKILL)
        ranks.wait()
    assert finished(path, 3) > 0
    found = (path / run_directory.PARTIAL).read_bytes()
    other = write(path.parent / "other", LONG)
    errors(run(perform_own, 3, [path], [path], [other, "--program", "mlp"]))
    assert (path / run_directory.PARTIAL).read_bytes() == found
    assert finished(path, 3) == 0


# torchrun


def as_torchrun(world_size: int, *args: object) -> tuple[object, ...]:
    return "--standalone", f"--nproc-per-node={world_size}", "-m", "real", *args


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, task.read_text().split())
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize(
    ("number", "whom", "message"),
    [
        (signal.SIGKILL, "worker", r"rank 1 \(\S+, pid {pid}\) ended without a word \(killed\?\); what was done is in"),
        (signal.SIGKILL, "agent", r"torchrun, which hosts .* is gone|lost the process that started it"),
        (signal.SIGINT, "group", "^interrupted$"),
    ],
    ids=["worker-killed", "agent-killed", "interrupted"],
)
def test_under_torchrun_nobody_is_left_behind(tmp_path: Path, number: signal.Signals, whom: str, message: str) -> None:
    path = write(tmp_path / "run", LONG)
    with start(torchrun_forks, 1, *as_torchrun(3, path, "--timeout", 20)) as agent:
        until_running(path, agent)
        workers = children(agent.pid(0))
        assert len(workers) == 3
        rank_1 = next(pid for pid in workers if "rank-00001.npy" in Path(f"/proc/{pid}/maps").read_text())
        match whom:
            case "worker":
                os.kill(rank_1, number)
            case "agent":
                agent.signal(0, number)
            case _:
                os.killpg(agent.pid(0), number)
        (ending,) = agent.wait().values()
        await_end(workers)
        found = shown(agent.output(0))
    assert ending.code not in (0, None)
    assert set(found) == {0, 1, 2} - ({1} if whom == "worker" else set()), agent
    for error in found.values():
        assert re.search(message.format(pid=rank_1), error), error
    kept(path)


# clocks

SHIFTS_S, RATES = (0.0, 1234.5, 0.0), (1.0, 1.001, 1.0)


def compare_fake_clocks() -> None:
    """Rank 1 is a machine of its own, whose clock is ahead and gains a millisecond a second."""
    with connect(timeout_s=20.0):
        rank = dist.get_rank()

        def at(true_s: float) -> float:
            return SHIFTS_S[rank] + RATES[rank] * true_s

        def clock() -> float:
            return at(now_s())

        machine = "other" if rank == 1 else "first"
        begins_s = [clock()]
        first = compare_clocks(clock=clock, machine=machine)
        start_s = agree_on_start_s(first, clock=clock)
        events_s = first.at_s + np.linspace(0.1, 0.4, 4)  # true times
        time.sleep(0.5)
        begins_s.append(clock())
        last = compare_clocks(clock=clock, machine=machine)
        common_s = to_common_s(at(events_s), start_s=start_s, drift=drift((first, last), rank))
        clocks = [[float(each.at_s), each.ahead_s.tolist(), each.uncertainty_s.tolist()] for each in (first, last)]
        print(json.dumps([clocks, common_s.tolist(), [begins_s[0], start_s, begins_s[1]]]))


def test_clocks_are_compared_within_the_stated_uncertainty() -> None:
    endings = run(compare_fake_clocks, 3)
    assert [ending.code for ending in endings.values()] == [0] * 3, endings
    said = [json.loads(ending.output) for ending in endings.values()]
    assert said[0][0] == said[1][0] == said[2][0]
    begin_s, _, begin_again_s = said[0][2]
    for asked_s, (at_s, ahead_s, uncertainty_s) in zip((begin_s, begin_again_s), said[0][0], strict=True):
        assert (ahead_s[0], ahead_s[2], uncertainty_s[0], uncertainty_s[2]) == (0.0,) * 4
        true_s = SHIFTS_S[1] + (RATES[1] - 1) * at_s
        moved_s = (RATES[1] - 1) * (at_s - asked_s)  # the clock gains on while it is asked
        assert abs(ahead_s[1] - true_s) <= uncertainty_s[1] + moved_s + 1e-6
        assert uncertainty_s[1] > 0


def test_events_of_one_moment_get_one_time_from_clocks_that_drift() -> None:
    said = [json.loads(ending.output) for ending in run(compare_fake_clocks, 3).values()]
    (_, _, first), (at_s, _, last) = said[0][0]
    begin_s, start_s, begin_again_s = said[0][2]
    moved_s = (RATES[1] - 1) * (
        2 * (start_s - begin_s) + at_s - begin_again_s
    )  # while it was asked, and until the start
    common_s = np.array([common_s for _, common_s, _ in said])
    assert np.abs(common_s[2] - common_s[0]).max() < 1e-9
    assert np.abs(common_s[1] - common_s[0]).max() <= 2 * first[1] + last[1] + moved_s + 1e-6
