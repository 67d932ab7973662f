"""Traces that are broken, cut short, mixed up or of something else, through `simdist import`.

Either one message that names the file and says what would be right, and nothing is written; or a warning that names
what was left out, and then the scenario is as right as from the whole traces.
"""

# ruff: noqa: E501  (the tables are read row by row)

import gzip
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import SMALL, call, write
from kineto_traces import DIALECTS, Bucket, Delay, Device, Truth, write_job

from simdist import import_traces
from simdist.errors import ScenarioError, SimdistWarning
from simdist.profiles import ImportOptions
from simdist.scenario import Scenario, load
from simdist.scenario.disturbances import Recorded, read_recorded

LATE = Delay("compute", rank=1, step=2, seconds=0.020)
TRUTH = Truth(n_ranks=3, n_steps=5, delays=(LATE,))
OTHER = replace(TRUTH, buckets=(Bucket((500, 90_000), 0.004, 0.002),))

Edit = Callable[[dict[str, Any]], object]


def edit(path: Path, change: Edit) -> None:
    """Change what a trace says."""
    trace = json.loads(path.read_text())
    change(trace)
    path.write_text(json.dumps(trace))


def edit_all(paths: list[Path], change: Edit) -> None:
    for path in paths:
        edit(path, change)


def only(keep: Callable[[dict[str, Any]], bool]) -> Edit:
    """Return an edit that leaves out all other events."""

    def change(trace: dict[str, Any]) -> None:
        trace["traceEvents"] = [event for event in trace["traceEvents"] if keep(event)]

    return change


def without(*parts: str) -> Edit:
    """Return an edit that leaves out events whose name has one of some parts."""
    return only(lambda event: not any(part in event["name"] for part in parts))


def cut(path: Path, share: float = 0.7) -> bytes:
    """Cut a file off; return what was lost."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return content


def cut_at(path: Path, mark: bytes, beyond: int) -> None:
    """Cut a file off shortly after the first `mark` behind its middle."""
    content = path.read_bytes()
    path.write_bytes(content[: content.index(mark, len(content) // 2) + beyond])


def packed(path: Path, *, level: int = 6) -> Path:
    """Replace a trace by itself, compressed."""
    target = path.with_name(path.name + ".gz")
    target.write_bytes(gzip.compress(path.read_bytes(), level))
    path.unlink()
    return target


def of_another_job(paths: list[Path], truth: Truth, *, device: Device = "cpu") -> None:
    """Replace the last rank's trace by that of another job."""
    others = write_job(paths[0].parents[1] / "other", truth, device=device)
    shutil.copy(others[-1], paths[-1])


def rewrite(paths: list[Path], truth: Truth = TRUTH, *, device: Device = "cpu", version: str = "2.6") -> None:
    """Replace all traces by those of another job, or another profiler."""
    write_job(paths[0].parent, truth, device=device, version=version)


def zip_of(path: Path) -> None:
    packed_into = path.with_suffix(".zip")
    with zipfile.ZipFile(packed_into, "w") as file:
        file.write(path)
    packed_into.rename(path)


def changed_times(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Return an edit of all events that took some time."""

    def edit_events(trace: dict[str, Any]) -> None:
        for event in trace["traceEvents"]:
            if event["ph"] == "X":
                change(event)

    return edit_events


def says(**told: Any) -> Edit:
    """Return an edit of what a trace tells about its job."""
    return lambda trace: trace["distributedInfo"].update(told)


Break = Callable[[Path], object]
BreakJob = Callable[[list[Path]], object]
CHROME = {"traceEvents": [{"ph": "X", "cat": "blink", "name": "Layout", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]}
STEPS = ("ProfilerStep", "Optimizer", "DataLoader", "DistributedDataParallel")
BACKWARD = ("autograd", "Backward", "allreduce", "all_reduce")

UNREADABLE: dict[str, tuple[Break, str]] = {
    "empty": (lambda path: path.write_bytes(b""), "empty"),
    "white space": (lambda path: path.write_bytes(b" \n\n "), "white space"),
    "text": (lambda path: path.write_bytes(b"epoch 1: loss 2.3\n"), "JSON"),
    "HTML": (lambda path: path.write_bytes(b"<!DOCTYPE html><html>404</html>"), "JSON"),
    "zip archive": (lambda path: zip_of(path), "JSON"),
    "compressed nothing": (lambda path: path.write_bytes(gzip.compress(b"")), "empty"),
    "compressed data cut off at once": (lambda path: path.write_bytes(gzip.compress(path.read_bytes())[:30]), "end early"),
    "zeros, as a full disk leaves": (lambda path: path.write_bytes(bytes(4096)), "JSON"),
    "a number": (lambda path: path.write_bytes(b"42"), "JSON"),
    "no events": (lambda path: path.write_bytes(b"{}"), "traceEvents"),
    "empty list of events": (lambda path: edit(path, only(lambda event: False)), "0 events"),
    "brackets without end": (lambda path: path.write_bytes(b"[" * 100_000), "events"),
    "events that are a mapping": (lambda path: path.write_bytes(b'{"traceEvents": {"a": 1}}'), "traceEvents"),
    "events that are null": (lambda path: path.write_bytes(b'{"traceEvents": null}'), "traceEvents"),
    "another program's Chrome trace": (lambda path: path.write_bytes(json.dumps(CHROME).encode()), "`blink`"),
    "execution trace of PyTorch": (lambda path: path.write_bytes(b'{"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []}'), "`nodes`"),
    "cut off before the events": (lambda path: path.write_bytes(path.read_bytes().split(b'"traceEvents')[0]), "traceEvents"),
    "only kernels": (lambda path: edit(path, only(lambda event: event["ph"] == "X" and event["cat"] == "cuda_runtime")), "operators"),
    "no steps": (lambda path: edit(path, without(*STEPS, *BACKWARD)), "step"),
    "inference": (lambda path: edit(path, without("Optimizer", *BACKWARD)), "backward"),
    "all times NaN": (lambda path: edit(path, changed_times(lambda event: event.update(ts=math.nan))), "rank1"),
}  # fmt: skip

MIXED_UP: dict[str, tuple[BreakJob, list[str]]] = {
    "one rank of another job": (lambda paths: of_another_job(paths, OTHER), ["rank0", "rank2", "one job"]),
    "one rank on GPUs": (lambda paths: of_another_job(paths, TRUTH, device="cuda"), ["rank0", "rank2", "cpu", "cuda"]),
    "one rank of another number of steps and buckets": (lambda paths: of_another_job(paths, replace(OTHER, n_steps=9, shapes=False)), ["rank0", "rank2", "one job"]),
    "the same file under two names": (lambda paths: shutil.copy(paths[1], paths[1].with_name("copy.pt.trace.json")), ["copy", "rank1", "rank 1"]),
    "one rank number on two hosts": (lambda paths: edit(paths[2], says(rank=1)), ["rank1", "rank2", "rank 1"]),
    "worlds of two sizes": (lambda paths: edit(paths[1], says(world_size=8)), ["rank0", "rank1", "world size 3 against 8"]),
    "rank beyond the world": (lambda paths: edit(paths[2], says(rank=7)), ["rank2", "rank 7", "3 ranks"]),
    "absurd world": (lambda paths: edit_all(paths, says(world_size=10**12)), ["rank0", "1000000000000"]),
    "absurd world, of an older profiler": (lambda paths: (rewrite(paths, version="2.0"), edit_all(paths, says(world_size=10**12))), ["rank0", "1000000000000"]),
    "steps that do not overlap": (lambda paths: of_another_job(paths, replace(TRUTH, first_step=90)), ["rank0", "rank2", "step"]),
}  # fmt: skip


@pytest.fixture
def paths(tmp_path) -> list[Path]:
    """Write the traces of a good job."""
    return write_job(tmp_path / "traces", TRUTH, device="cpu")


def imported(capsys, tmp_path, *more):
    options = "--workers", 1, "--nodes", 1  # most of these traces do not name their host
    answer = call(capsys, "import", tmp_path / "traces", "-o", tmp_path / "job.yaml", *options, *more)
    assert "Traceback" not in answer.err
    return answer


def assert_refused(answer, *parts):
    """One short message on stderr that has all parts, nothing on stdout."""
    assert answer.code == 2, answer
    assert answer.out == ""
    assert answer.err.count("error:") == 1, answer.err
    message = answer.err[answer.err.index("error:") :]
    assert message.count("\n") <= 3, message
    for part in parts:
        assert part in message, f"{part!r} is not in:\n{message}"


def assert_right(path: Path, truth: Truth = TRUTH, *, n_steps: int | None = None) -> Scenario:
    """The scenario says what the job takes, and has the one late rank, and no other."""
    scenario = load(path)
    assert scenario.cluster.world_size == truth.n_ranks
    workload = scenario.workload
    assert workload.forward_s == pytest.approx(truth.forward_s, rel=0.05)
    backward_s = workload.backward_s or sum(tensor.backward_s or 0 for tensor in workload.tensors)
    assert backward_s == pytest.approx(sum(bucket.backward_s for bucket in truth.buckets), rel=0.05)
    assert workload.optimize_s == pytest.approx(truth.optimize_s, rel=0.05)
    assert workload.nbytes == sum(bucket.nbytes for bucket in truth.buckets)
    assert scenario.steps == (n_steps or truth.n_steps)
    delays_s = np.zeros((scenario.steps, truth.n_ranks))
    for each in scenario.disturbances:
        delays_s += read_recorded(each) if isinstance(each, Recorded) else 0
    late = {(row, rank): float(delays_s[row, rank]) for row, rank in np.argwhere(delays_s > 0.002).tolist()}
    expected = {(each.step, each.rank): each.seconds for each in truth.delays if each.rank not in truth.missing}
    assert late == pytest.approx(expected, rel=0.1)
    return scenario


def test_good_traces_are_imported_without_a_warning(tmp_path, capsys, paths):
    answer = imported(capsys, tmp_path)
    assert answer.code == 0, answer.err
    assert_right(tmp_path / "job.yaml")
    assert "left out" not in answer.err + answer.out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("version", DIALECTS)
def test_traces_of_every_version_tell_the_same(tmp_path, capsys, version, device):
    # without operators of c10d, a CPU's wait for the buffers looks like its forward pass
    truth = replace(TRUTH, noise=True, buffer_count=0 if (version, device) == ("1.8", "cpu") else 1000)
    write_job(tmp_path / "traces", truth, version=version, device=device, gz=True)
    answer = imported(capsys, tmp_path)
    assert answer.code == 0, answer.err
    assert_right(tmp_path / "job.yaml", truth)


@pytest.mark.parametrize(("broken", "part"), UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_trace_is_refused_with_one_message_that_names_it(tmp_path, capsys, paths, broken, part):
    broken(paths[1])
    answer = call(capsys, "import", paths[1], "-o", tmp_path / "job.yaml")
    assert_refused(answer, str(paths[1]), part)
    assert not (tmp_path / "job.yaml").exists()


@pytest.mark.parametrize(("broken", "part"), UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_trace_among_others_is_left_out_with_a_warning(tmp_path, capsys, paths, broken, part):
    broken(paths[1])
    answer = imported(capsys, tmp_path)
    assert answer.code == 0, answer.err
    warnings = [line for line in answer.err.splitlines() if line.startswith("warning: left out:")]
    assert len(warnings) == 1
    assert str(paths[1]) in warnings[0]
    assert part in warnings[0]
    assert_right(tmp_path / "job.yaml", replace(TRUTH, missing=(1,)))
    with pytest.warns(SimdistWarning, match="left out") as warned:
        in_python = import_traces(tmp_path / "traces", options=ImportOptions(nodes=1), n_workers=1)
    assert {each.filename for each in warned} == {__file__}
    said = [f"{'warning' if each.is_doubt else 'note'}: {each}" for each in in_python.remarks]
    assert said == [line for line in answer.err.splitlines() if not line.startswith("wrote ")]


def test_unreadable_trace_is_named_where_the_others_make_no_scenario(tmp_path, capsys, paths):
    paths[1].write_text("")
    answer = call(capsys, "import", tmp_path / "traces", "-o", tmp_path / "job.yaml", "--workers", 1)
    assert f"warning: left out: {paths[1]}" in answer.err
    assert "give --nodes" in answer.err
    with pytest.warns(SimdistWarning, match="left out"), pytest.raises(ScenarioError, match="give --nodes"):
        import_traces(tmp_path / "traces", n_workers=1)


def test_named_pipe_is_refused_and_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "rank0.json")
    answer = call(capsys, "import", tmp_path / "rank0.json", "-o", tmp_path / "job.yaml")
    assert_refused(answer, str(tmp_path / "rank0.json"), "it is a pipe: give a regular file")


def test_many_unreadable_traces_are_one_short_message(tmp_path, capsys):
    for rank in range(64):
        write(tmp_path / f"rank{rank}.json", "")
    answer = call(capsys, "import", tmp_path, "-o", tmp_path / "job.yaml", "--workers", 1)
    assert_refused(answer, "rank0.json", "empty", "64")


@pytest.mark.parametrize(("broken", "parts"), MIXED_UP.values(), ids=MIXED_UP)
def test_traces_that_contradict_each_other_are_refused(tmp_path, capsys, paths, broken, parts):
    broken(paths)
    assert_refused(imported(capsys, tmp_path), *parts)
    assert not (tmp_path / "job.yaml").exists()


def shuffled(trace: dict[str, Any]) -> None:
    events = trace["traceEvents"]
    order = np.random.default_rng(1).permutation(len(events))
    trace["traceEvents"] = [events[index] for index in order]


def some(change: dict[str, Any], name: str = "aten::as_strided") -> Edit:
    """Return an edit that adds events like others that came out wrong."""

    def add(trace: dict[str, Any]) -> None:
        event = next(each for each in trace["traceEvents"] if each["name"] == "aten::addmm")
        trace["traceEvents"] += [event | {"name": name} | change] * 3

    return add


def other_hosts_clock(seconds: float) -> Edit:
    return changed_times(lambda event: event.update(ts=event["ts"] + seconds * 1e6))


def bare_list(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text())["traceEvents"]))


def told_behind_the_events(trace: dict[str, Any]) -> None:
    trace["distributedInfo"] = trace.pop("distributedInfo")


# Breakages: the broken part, the words of the warning, and how many steps are left.
TOLERATED: dict[str, tuple[BreakJob, list[str], int]] = {
    "compressed data cut off": (lambda paths: cut(packed(paths[1])), ["rank 1", "missing"], 3),
    "compressed data with a wrong checksum": (lambda paths: flip(packed(paths[1]), -6), ["rank 1", "CRC"], 5),
    "cut off within an event": (lambda paths: cut_at(paths[1], b'"ts": ', 4), ["rank 1", "missing"], 2),
    "cut off within a string": (lambda paths: cut_at(paths[1], b'"name": "at', 11), ["rank 1", "missing"], 2),
    "bytes that are no text": (lambda paths: garbled(paths[1]), ["rank 1", "damaged"], 5),
    "rubbish behind the trace": (lambda paths: paths[1].write_bytes(paths[1].read_bytes() + b"\0\0 rubbish"), ["rank 1", "left out"], 5),
    "bare list of events": (lambda paths: bare_list(paths[1]), [], 5),
    "job told behind the events": (lambda paths: edit(paths[1], told_behind_the_events), [], 5),
    "byte order mark": (lambda paths: paths[1].write_bytes(b"\xef\xbb\xbf" + paths[1].read_bytes()), [], 5),
    "packed without a .gz": (lambda paths: paths[1].write_bytes(gzip.compress(paths[1].read_bytes())), [], 5),
    "fewer steps of one rank": (lambda paths: of_another_job(paths, replace(TRUTH, n_steps=3)), ["left out", "6", "7"], 3),
    "events in no order": (lambda paths: edit_all(paths, shuffled), [], 5),
    "clock off by hours": (lambda paths: edit(paths[1], other_hosts_clock(7200)), [], 5),
    "clock before the others'": (lambda paths: edit(paths[2], other_hosts_clock(-500)), [], 5),
    "negative durations": (lambda paths: edit_all(paths, some({"dur": -7})), [], 5),
    "times NaN": (lambda paths: edit_all(paths, some({"ts": math.nan})), [], 5),
    "times infinite": (lambda paths: edit_all(paths, some({"dur": math.inf})), [], 5),
    "absurd times": (lambda paths: edit_all(paths, some({"ts": 1e300})), [], 5),
    "correlation beyond all numbers": (lambda paths: (rewrite(paths, device="cuda"), edit_all(paths, some({"cat": "kernel", "args": {"correlation": 10**30}}))), [], 5),
    "times that are text": (lambda paths: edit_all(paths, some({"ts": "soon"})), [], 5),
    "events without times": (lambda paths: edit_all(paths, lambda trace: trace["traceEvents"].append({"ph": "X", "name": "x"})), [], 5),
    "events that are none": (lambda paths: edit_all(paths, lambda trace: trace["traceEvents"].extend([1, None, [], "x"])), [], 5),
    "a file beside the traces": (lambda paths: write(paths[0].with_name("notes.txt"), "tuesday"), [], 5),
    "folder named like a trace": (lambda paths: paths[0].with_name("rank9.pt.trace.json").mkdir(), [], 5),
    "noise": (lambda paths: rewrite(paths, replace(TRUTH, noise=True)), [], 5),
    "no shapes": (lambda paths: rewrite(paths, replace(TRUTH, shapes=False), device="cuda"), [], 5),
    "world of no ranks": (lambda paths: edit_all(paths, says(world_size=0)), [], 5),
    "rank below 0, but the file's name tells it": (lambda paths: edit(paths[2], says(rank=-1)), [], 5),
    "no ranks told": (lambda paths: edit_all(paths, lambda trace: trace.pop("distributedInfo")), [], 5),
}  # fmt: skip


def flip(path: Path, at: int) -> None:
    """Turn the bits of a byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def garbled(path: Path) -> None:
    """Break the text of some events that mean nothing."""
    edit(path, some({}, name="garbled"))
    path.write_bytes(path.read_bytes().replace(b'"garbled"', b'"gar"bl\xff\xfe"'))


@pytest.mark.parametrize(("broken", "parts", "n_steps"), TOLERATED.values(), ids=TOLERATED)
def test_what_can_be_spared_is_left_out_and_the_rest_is_right(tmp_path, capsys, paths, broken, parts, n_steps):
    broken(paths)
    answer = imported(capsys, tmp_path)
    assert answer.code == 0, answer.err
    for part in parts:
        assert part in answer.err + answer.out, f"{part!r} is not in:\n{answer.err}{answer.out}"
    truth = TRUTH if n_steps > LATE.step else replace(TRUTH, delays=())
    assert_right(tmp_path / "job.yaml", truth, n_steps=n_steps)


def test_empty_folder_is_refused(tmp_path, capsys):
    (tmp_path / "traces").mkdir()
    assert_refused(imported(capsys, tmp_path), str(tmp_path / "traces"), "trace")


def test_folder_without_traces_is_refused(tmp_path, capsys):
    (tmp_path / "traces").mkdir()
    write(tmp_path / "traces" / "notes.txt", "tuesday")
    assert_refused(imported(capsys, tmp_path), str(tmp_path / "traces"), "trace")


def test_missing_path_is_refused(tmp_path, capsys):
    assert_refused(imported(capsys, tmp_path), str(tmp_path / "traces"))


def test_scenario_in_place_of_a_trace_is_refused(tmp_path, capsys):
    path = write(tmp_path / "small.yaml", SMALL)
    answer = call(capsys, "import", path, "-o", tmp_path / "job.yaml")
    assert_refused(answer, str(path), "trace")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_file_that_may_not_be_read_is_left_out(tmp_path, capsys, paths):
    paths[1].chmod(0)
    answer = imported(capsys, tmp_path)
    assert answer.code == 0
    assert f"warning: left out: {paths[1]}: cannot be read: Permission denied\n" in answer.err


def test_file_that_the_disk_cannot_read_is_left_out(tmp_path, capsys, paths):
    paths[1].unlink()
    paths[1].symlink_to("/proc/self/mem")  # a file that fails with an I/O error, also for root
    answer = imported(capsys, tmp_path)
    assert answer.code == 0
    assert f"warning: left out: {paths[1]}: cannot be read: Input/output error\n" in answer.err


def test_the_same_file_named_twice_counts_once_or_is_refused(tmp_path, capsys, paths):
    answer = call(capsys, "import", *paths, paths[1], "-o", tmp_path / "job.yaml", "--workers", 1, "--nodes", 1)
    if answer.code == 0:
        assert_right(tmp_path / "job.yaml")
    else:
        assert_refused(answer, str(paths[1]))


def test_missing_rank_is_named_and_the_others_count(tmp_path, capsys):
    truth = replace(TRUTH, n_ranks=4, missing=(0,))
    write_job(tmp_path / "traces", truth, device="cpu")
    answer = imported(capsys, tmp_path)
    assert answer.code == 0, answer.err
    assert "no trace of rank 0 of 4" in answer.err
    assert_right(tmp_path / "job.yaml", truth)


def test_step_of_which_the_gpu_part_is_cut_off_within_the_update_is_left_out(tmp_path, capsys):
    truth = replace(TRUTH, n_ranks=2, delays=())
    paths = write_job(tmp_path / "traces", truth, device="cuda")
    content = paths[1].read_bytes()
    half = content.index(b"multi_tensor_apply_kernel", content.index(b"multi_tensor_apply_kernel") + 1)
    for _ in range(4):  # two in each step; this is the first of the third step
        last, half = half, content.index(b"multi_tensor_apply_kernel", half + 1)
    paths[1].write_bytes(content[: (last + half) // 2])
    answer = imported(capsys, tmp_path)
    assert answer.code == 0, answer.err
    assert_right(tmp_path / "job.yaml", truth, n_steps=2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_trace_cut_off_anywhere_costs_steps_and_not_the_truth(tmp_path, capsys, device):
    truth = replace(TRUTH, n_ranks=2, delays=())
    paths = write_job(tmp_path / "traces", truth, device=device)
    whole = paths[1].read_bytes()
    for share in np.linspace(0.2, 0.999, 24):
        paths[1].write_bytes(whole[: int(len(whole) * share)])
        answer = imported(capsys, tmp_path, "--force")
        if answer.code:
            assert_refused(answer, str(paths[1]))
        elif "left out: " + str(paths[1]) not in answer.err:
            assert_right(tmp_path / "job.yaml", truth, n_steps=load(tmp_path / "job.yaml").steps)


def test_two_windows_of_one_run_are_joined(tmp_path, capsys):
    write_job(tmp_path / "traces", TRUTH, device="cpu")
    for path in write_job(tmp_path / "later", replace(TRUTH, first_step=20, delays=()), device="cpu"):
        edit(path, other_hosts_clock(10))
        shutil.copy(path, tmp_path / "traces" / path.name.replace("1790", "1791"))
    answer = imported(capsys, tmp_path)
    assert answer.code == 0, answer.err
    assert_right(tmp_path / "job.yaml", n_steps=10)


def test_steps_without_marks_are_counted_from_0_after_the_first_update(tmp_path, capsys, paths):
    edit_all(paths, without("ProfilerStep"))
    answer = imported(capsys, tmp_path)
    assert answer.code == 0, answer.err
    assert "steps carry no marks" in answer.err
    assert_right(tmp_path / "job.yaml", replace(TRUTH, delays=(replace(LATE, step=LATE.step - 1),)), n_steps=4)


def test_single_process_without_collectives_is_a_job_of_one_rank(tmp_path, capsys):
    alone = Truth(n_ranks=1, n_steps=5)
    (path,) = write_job(tmp_path / "traces", alone, device="cpu")
    edit(path, without("all_reduce", "allreduce"))
    answer = imported(capsys, tmp_path)
    assert answer.code == 0, answer.err
    assert load(tmp_path / "job.yaml").cluster.world_size == 1


def test_several_ranks_without_collectives_need_to_be_told_the_links(tmp_path, capsys, paths):
    edit_all(paths, without("all_reduce", "allreduce"))
    assert_refused(imported(capsys, tmp_path), "no all_reduce", "--cluster")


def test_sizes_that_no_trace_tells_are_asked_for(tmp_path, capsys, paths):
    write_job(tmp_path / "traces", replace(TRUTH, shapes=False), device="cpu")
    answer = imported(capsys, tmp_path)
    assert "record_shapes" in answer.err + answer.out
    assert answer.code in (0, 2)


def test_output_that_exists_is_not_overwritten(tmp_path, capsys, paths):
    output = write(tmp_path / "job.yaml", "mine\n")
    assert_refused(imported(capsys, tmp_path), str(output), "exists")
    assert output.read_text() == "mine\n"


def test_output_folder_that_is_missing_is_named(tmp_path, capsys, paths):
    output = tmp_path / "nowhere" / "job.yaml"
    answer = call(capsys, "import", tmp_path / "traces", "-o", output)
    assert_refused(answer, str(output.parent)) if answer.code else assert_right(output)


@pytest.mark.parametrize("name", ["job.json", "job", "job.npz"])
def test_output_that_is_no_scenario_file_is_refused(tmp_path, capsys, paths, name):
    answer = call(capsys, "import", tmp_path / "traces", "-o", tmp_path / name)
    assert_refused(answer, name, ".yaml")
    assert not (tmp_path / name).exists()


def test_output_that_is_a_folder_is_refused(tmp_path, capsys, paths):
    (tmp_path / "job.yaml").mkdir()
    assert_refused(imported(capsys, tmp_path), str(tmp_path / "job.yaml"))


def test_trace_cut_off_before_its_first_backward_pass_says_that_it_ends_early(tmp_path, capsys) -> None:
    folder = tmp_path / "traces"
    (path,) = write_job(folder, replace(TRUTH, n_ranks=1), device="cpu")
    path.write_bytes(path.read_bytes().split(b"autograd::engine")[0])
    answer = call(capsys, "import", folder, "-o", tmp_path / "job.yaml")
    assert answer.code == 2
    assert "no backward pass in any of its 1 steps. Besides, the file ends early" in answer.err
