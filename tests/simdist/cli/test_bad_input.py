"""Wrong input of every kind, through the command line: exit code 2 and one message that says where, what and what else."""

# ruff: noqa: E501  (the tables are read row by row)

import errno
import io
import json
import os
import re
import shutil
import subprocess
import zipfile

import click
import numpy as np
import pytest
from commandline import LABELS, STORAGE, call, edited, process, write
from messages import assert_message

from simdist.cli import cli, common, inputs
from simdist.runs.run_directory import SIMULATED


def assert_refused(answer, *parts, case=None, folder=None):
    """One message on stderr that has all parts, and is the one that is recorded for the case; nothing on stdout."""
    assert answer.code == 2, answer
    assert answer.out == ""
    assert answer.err.startswith("error:")
    assert answer.err.count("error:") == 1, answer.err
    assert "Traceback" not in answer.err
    for part in parts:
        assert part in answer.err, f"{part!r} is not in:\n{answer.err}"
    if case:
        assert_message(f"bad input: {case}", answer.err, folder)


SYNC = "  - kind: sync\n"
NETWORK = "{latency: 25 us, bandwidth: 25 Gbit/s}"
TRANSIENT = "{kind: transient, probability: 10%, delay: 50 ms}"
LOCAL = "{kind: local_sgd, period: 4}"
LEVELS = "{2: 4, 4: world}"

SCENARIOS = {  # what is changed; where the message says so, and which key: the sentence is in golden/messages.txt
    "unknown key": ([("gpus_per_node", "gpu_per_node")], ["bad.yaml:3", "cluster.gpu_per_node"]),
    "unknown section": ([("steps: 12", "steps: 12\nschedule: []")], ["bad.yaml:14", "schedule"]),
    "duplicate key": ([("seed: 1", "seed: 1\nseed: 2")], ["bad.yaml:15", "seed"]),
    "bits for bytes": ([("sample_size: 1 kB", "sample_size: 1 kbit")], ["bad.yaml:11", "workload.sample_size"]),
    "bytes for bits": ([("25 Gbit/s", "25 GBps")], ["bad.yaml:5", "cluster.network.bandwidth"]),
    "bare number": ([("forward: 20 ms", "forward: 20")], ["bad.yaml:12", "workload.forward"]),
    "negative time": ([("latency: 25 us", "latency: -25 us")], ["bad.yaml:5", "cluster.network.latency"]),
    "NaN": ([("forward: 20 ms", "forward: .nan")], ["bad.yaml:12", "workload.forward"]),
    "infinity": ([("25 Gbit/s", "inf Gbit/s")], ["bad.yaml:5", "cluster.network.bandwidth"]),
    "zero bandwidth": ([("25 Gbit/s", "0 Gbit/s")], ["bad.yaml:5", "cluster.network.bandwidth"]),
    "zero ranks": ([("gpus_per_node: 4", "gpus_per_node: 0")], ["bad.yaml:3", "cluster.gpus_per_node"]),
    "huge ranks": ([("nodes: 2", "nodes: 1e9")], ["bad.yaml:2", "cluster.nodes"]),
    "zero steps": ([("steps: 12", "steps: 0")], ["bad.yaml:13", "steps"]),
    "steps as text": ([("steps: 12", "steps: many")], ["bad.yaml:13", "steps"]),
    "negative seed": ([("seed: 1", "seed: -1")], ["bad.yaml:14", "seed"]),
    "probability above 1": ([("10%", "110%")], ["bad.yaml:16", "disturbances[0].probability"]),
    "unknown disturbance": ([("kind: transient", "kind: transcient")], ["bad.yaml:16", "disturbances[0].kind"]),
    "unknown schedule": ([("kind: local_sgd", "kind: localsgd")], ["bad.yaml:19", "schedules[1].kind"]),
    "rank out of range": ([(TRANSIENT, "{kind: transient, probability: 10%, delay: 50 ms, ranks: [8]}")], ["bad.yaml:16", "disturbances[0].ranks"]),
    "zero period": ([("period: 4", "period: 0")], ["bad.yaml:19", "schedules[1].period"]),
    "period that does not divide": ([(LEVELS, "{2: 4, 3: world}")], ["bad.yaml:20", "schedules[2].levels"]),
    "group that does not divide the world": ([(LEVELS, "{2: 3, 4: world}")], ["bad.yaml:20", "schedules[2].levels"]),
    "equal labels": ([(LOCAL, "{kind: sync}")], ["bad.yaml:19", "schedules[1]"]),
    "no schedules": ([("  - kind: sync\n  - {kind: local_sgd, period: 4}\n  - {kind: hierarchical_sgd, levels: {2: 4, 4: world}}\n", "  []\n")], ["bad.yaml:17", "schedules"]),
    "storage that is not there": ([("seed: 1", "seed: 1\ninput: {source: storage}")], ["bad.yaml:15", "input.source"]),
    "unknown preset": ([("seed: 1", "seed: 1"), ("workload:\n", "workload:\n  preset: resnet51\n")], ["bad.yaml:7", "workload.preset"]),
    "missing recording": ([(TRANSIENT, "{kind: recorded, file: nowhere.npz}")], ["bad.yaml:16", "disturbances[0].file"]),
    "missing key": ([("  batch_size: 32\n", "")], ["bad.yaml:6", "workload"]),
    "two problems": ([("nodes: 2", "nodes: two"), ("steps: 12", "steps: 0")], ["bad.yaml:2", "cluster.nodes", "bad.yaml:13", "steps"]),
    "tab": ([("  batch_size", "\tbatch_size")], ["bad.yaml:10", "a tab in the indentation"]),
    "unclosed bracket": ([(LEVELS, "{2: 4")], ["bad.yaml:20", "not YAML"]),
}  # fmt: skip


@pytest.mark.parametrize("case", SCENARIOS)
def test_broken_scenario_is_refused(tmp_path, capsys, case):
    edits, parts = SCENARIOS[case]
    path = write(tmp_path / "bad.yaml", edited(*edits))
    for command in ("plan", "simulate", "compare"):
        answer = call(capsys, command, path, "--json")
        assert_refused(answer, str(path), *parts, case=f"scenario: {case}", folder=tmp_path)


FILES = {
    "empty": (b"", ["bad.yaml:1", "is empty", "write cluster"]),
    "a list": (b"- 1\n- 2\n", ["bad.yaml:1", "is not a scenario", "write cluster"]),
    "binary": (b"steps: 1\n\xff\xfe\x00\x01", ["bad.yaml:2", "0xff is not UTF-8"]),
    "a zero byte": (b"steps: \x00", ["bad.yaml:1", "not text"]),
    "billion laughs": (b"a: &a [1,1,1,1,1,1,1,1,1,1]\n" + b"".join(b"%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n" % (n + 1, n + 1, *[n] * 10) for n in range(97, 106)), ["bad.yaml", "aliases expand to more than"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_file_that_is_no_scenario_is_refused(tmp_path, capsys, case):
    content, parts = FILES[case]
    (tmp_path / "bad.yaml").write_bytes(content)
    answer = call(capsys, "plan", tmp_path / "bad.yaml")
    assert_refused(answer, *parts, case=f"file: {case}", folder=tmp_path)


def test_file_that_cannot_be_read_is_refused(tmp_path, capsys):
    assert_refused(call(capsys, "plan", tmp_path / "none.yaml"), "none.yaml", "no such file", "nor a preset")
    for path, why in ((tmp_path / "none.txt", "there is no such file"), (tmp_path, "is no regular file")):
        assert_refused(call(capsys, "init", "--from", path), f"{path}: {why}")
    assert_refused(call(capsys, "plan", tmp_path), str(tmp_path), "is a directory, no file, nor a preset")
    assert_refused(call(capsys, "plan", "-"), "-: standard input is not supported", "name a file")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    assert_refused(call(capsys, "plan", tmp_path / "loop.yaml"), "loop.yaml")


OPTIONS = {
    "unknown baseline": (["compare", "--baseline", "ddp"], ["'ddp'", *LABELS]),
    "unknown label": (["simulate", "--schedule", "local-5"], ["scenario.yaml", "'local-5'", "did you mean 'local-4'"]),
    "unknown label of a plan": (["plan", "--schedule", "x"], ["scenario.yaml", "'x'", *LABELS]),
    "no seeds": (["compare", "--seeds", "0"], ["--seeds", "0", "1<=x"]),
    "half a seed": (["compare", "--seeds", "0.5"], ["--seeds", "0.5", "whole number"]),
    "unknown engine": (["simulate", "--engine", "slow"], ["--engine", "slow", "'fast'"]),
    "unknown option": (["compare", "--seed", "1"], ["--seed", "simdist compare --help"]),
    "unknown type of picture": (["compare", "--plot", "x.gif"], ["x.gif", "'.gif'", ".png"]),
    "picture in no directory": (["simulate", "--plot", "no/where/x.png"], ["no/where/x.png", "there is no directory"]),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_wrong_option_is_refused(tmp_path, capsys, case):
    (command, *rest), parts = OPTIONS[case]
    path = write(tmp_path / "scenario.yaml")
    answer = call(capsys, command, path, *rest)
    assert_refused(answer, *parts, case=f"option: {case}", folder=tmp_path)


def test_wrong_command_is_refused(capsys):
    assert_refused(call(capsys, "simulat"), "'simulat'", "simdist --help")
    assert_refused(call(capsys, "compare"), "SCENARIO", "simdist compare --help")
    assert_refused(call(capsys, "presets", "cluster"), "'cluster'", "'clusters'")
    assert_refused(call(capsys, "presets", "clusters", "dgx-a10"), "'dgx-a10'", "did you mean 'dgx-a100'")


def test_fast_engine_refuses_what_only_the_other_can_do(tmp_path, capsys):
    text = edited(("seed: 1", "seed: 1\ninput: {source: storage}"), (NETWORK, f"{NETWORK}\n  {STORAGE}"))
    path = write(tmp_path / "scenario.yaml", text)
    for command in ("simulate", "compare"):
        answer = call(capsys, command, path, "--engine", "fast")
        assert_refused(answer, "scenario.yaml", "sync", "load(-> batch.", "at step", "--engine des")
    assert call(capsys, "simulate", path, "--json").code == 0


def test_label_that_is_no_name_of_a_directory_is_refused(tmp_path, capsys):
    path = write(tmp_path / "scenario.yaml", edited((SYNC, "  - {kind: sync, label: ..}\n")))
    answer = call(capsys, "plan", path, "-o", tmp_path / "runs" / "run")
    assert_refused(answer, "label '..'", "names rows and folders", "such as local-4")
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A run directory with a trace, and one of another schedule."""
    from simdist.cli import main

    folder = tmp_path_factory.mktemp("template")
    assert main(["simulate", str(write(folder / "scenario.yaml")), "-o", str(folder / "runs")]) == 0
    return folder / "runs"


@pytest.fixture
def run(template, tmp_path):
    """A run directory of synchronous SGD, without a trace."""
    shutil.copytree(template / "sync", tmp_path / "run", ignore=shutil.ignore_patterns(SIMULATED))
    return tmp_path / "run"


def op(document, name):
    return next(op for body in document["bodies"] for op in body if op["op"] == name)


PLANS = {
    "no operation": (lambda d: d["bodies"][0][0].update(op="Sing"), ["bodies[0][0]", "Sing", "'Forward'"]),
    "unknown field": (lambda d: op(d, "Forward").update(x=1), ["bodies[0][0].x", "unknown field", "known: dsts, op, srcs"]),
    "number as text": (lambda d: d.update(world_size="8"), ["world_size", "integer", "found '8'"]),
    "fraction of a rank": (lambda d: d.update(world_size=8.5), ["world_size", "integer", "found 8.5"]),
    "missing field": (lambda d: op(d, "Optimize").pop("grads"), ["bodies[0]", "grads", "required"]),
    "unknown type of elements": (lambda d: d["buffers"][0].update(dtype="int3"), ["buffers[0].dtype", "int3", "'float32'"]),
    "unknown stream": (lambda d: op(d, "Delay").update(channel="gpu"), ["channel", "gpu", "'compute'"]),
    "another format": (lambda d: d.update(format="simdist-plan-0"), ["format", "simdist-plan-1"]),
    "unknown buffer": (lambda d: op(d, "AllReduce").update(buffer="grad.9"), ["'grad.9' is not declared", "declared: ", "grad.0", "-->"]),
    "buffer declared twice": (lambda d: d["buffers"].append(d["buffers"][0]), ["'param'", "2 times", "unique"]),
    "read before it is written": (lambda d: d["bodies"][0].insert(0, {"op": "Wait", "buffer": "loss.0"}), ["wait(loss.0) at step 0", "nothing has written yet", "-->"]),
    "group that does not divide": (lambda d: op(d, "AllReduce").update(group={"size": 3, "stride": 1}), ["all_reduce(grad.0", "group of 3 does not divide 8 ranks", "1, 2, 4, 8"]),
    "body that is not there": (lambda d: d["order"][0].update(bodies=[7]), ["order[0]", "body 7 does not exist", "0 to 0"]),
    "no elements": (lambda d: d["buffers"][0].update(count=0), ["'param'", "count 0", "at least 1"]),
    "negative times": (lambda d: d["order"][0].update(times=-12), ["steps is -12", "scenario.yaml has 12"]),
    "more steps than the scenario": (lambda d: d["order"][0].update(times=10**15), [f"steps is {10**15}", "scenario.yaml has 12"]),
    "other ranks than the scenario": (lambda d: d.update(world_size=16), ["world_size is 16", "scenario.yaml has 8", "different runs"]),
    "tensors that the workload has not": (lambda d: [b.update(tensors=[0, 9]) for b in d["buffers"] if b["tensors"] == [0, 2]], ["'param'", "tensors 0:9", "has 2"]),
    "a channel without delays": (lambda d: op(d, "Delay").update(channel="io"), ["delays the io; no such delays are given, only: host"]),
    "an operation on storage that is not there": (lambda d: d["bodies"][0].append({"op": "Save", "srcs": ["param"]}), ["uses storage", "set cluster.storage"]),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANS)
def test_broken_plan_is_refused(run, capsys, case):
    edit, parts = PLANS[case]
    document = json.loads((run / "plan.json").read_text())
    edit(document)
    (run / "plan.json").write_text(json.dumps(document))
    where = "delays.npz" if "delays the" in parts[0] else "run" if "storage" in parts[0] else "plan.json"
    answer = call(capsys, "simulate", run, "--json")
    assert_refused(answer, str(run), where, *parts, case=f"plan: {case}", folder=run.parent)


TEXTS = {
    "truncated": (lambda text: text[: len(text) // 2], "not a JSON document"),
    "empty": (lambda text: "", "not a JSON document"),
    "no object": (lambda text: "[1, 2]", "should be an object"),
    "a number of 5000 digits": (lambda text: text.replace("12", "1" * 5000, 1), "not a JSON document"),
    "nested too deep": (lambda text: "[" * 100_000, "not a JSON document"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_file_that_is_no_plan_is_refused(run, capsys, case):
    edit, part = TEXTS[case]
    text = (run / "plan.json").read_text()
    (run / "plan.json").write_text(edit(text) if "12" in text else pytest.fail("nothing to replace"))
    answer = call(capsys, "simulate", run)
    assert_refused(answer, str(run / "plan.json"), part, case=f"plan file: {case}", folder=run.parent)


def host(*places, shape=(12, 8), dtype=np.float64):
    delays = np.zeros(shape, dtype=dtype)
    for place, value in places:
        delays[place] = value
    return {"host": delays}


DELAYS = {
    "too few steps": (host(shape=(11, 8)), ["host is float64 (11, 8)", "takes float64 (12, 8)"]),
    "too many steps": (host(shape=(13, 8)), ["host is float64 (13, 8)", "takes float64 (12, 8)"]),
    "other ranks": (host(shape=(12, 4)), ["host is float64 (12, 4)", "takes float64 (12, 8)"]),
    "one dimension": (host(shape=(96,)), ["host is float64 (96,)", "steps and ranks"]),
    "single precision": (host(dtype=np.float32), ["host is float32", "float64"]),
    "negative": (host(((3, 5), -1e-3)), ["host delay -0.001 at step 3, rank 5", "0 or more"]),
    "NaN": (host(((0, 7), np.nan)), ["host delay nan at step 0, rank 7", "0 or more"]),
    "infinite": (host(((11, 0), np.inf)), ["host delay inf at step 11, rank 0", "0 or more"]),
    "unknown channel": ({"gpu": np.zeros((12, 8))}, ["gpu is no channel", "host, compute, io"]),
    "other channel": ({"io": np.zeros((12, 8))}, ["delays the host; no such delays are given, only: io"]),
    "nothing": ({}, ["delays the host; no such delays are given, only: none"]),
    "objects": ({"host": np.array([None])}, ["cannot be read as delays"]),
}  # fmt: skip


@pytest.mark.parametrize("case", DELAYS)
def test_wrong_delays_are_refused(run, capsys, case):
    arrays, parts = DELAYS[case]
    np.savez(run / "delays.npz", **arrays)
    answer = call(capsys, "simulate", run)
    assert_refused(answer, str(run / "delays.npz"), *parts, case=f"delays: {case}", folder=run.parent)


def damaged(content):
    """Yield a file in every kind of damage that numpy and zipfile have another exception for."""
    yield "empty", b""
    yield "truncated", content[: len(content) // 2]
    yield "cut at the end", content[:-1]
    yield "no zip", b"hello"
    yield (
        "compressed by an unknown program",
        content.replace(b"PK\x01\x02\x14\x03\x14\x00\x00\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x00\x00\x63\x00"),
    )
    yield "header of an array cut", content.replace(b"'fortran_order': False", b"'fortran_order': (alse", 1)
    one_array = io.BytesIO()
    np.save(one_array, np.zeros(3))
    yield "an array, not several", one_array.getvalue()
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme.txt", "hello")
    yield "another zip", other.getvalue()


def test_damaged_delays_are_refused(run, capsys):
    for kind, content in damaged((run / "delays.npz").read_bytes()):
        (run / "delays.npz").write_bytes(content)
        answer = call(capsys, "simulate", run)
        assert_refused(answer, str(run / "delays.npz"))
        assert "cannot be read" in answer.err or "is no channel" in answer.err, kind


def test_damaged_trace_is_refused(run, template, tmp_path, capsys):
    trace = run / SIMULATED
    for _, content in damaged((template / "sync" / SIMULATED).read_bytes()):
        trace.write_bytes(content)
        for args in (["trace", trace], ["trace", run], ["simulate", run]):
            extra = ["--chrome", tmp_path / "x.json"] if args[0] == "trace" else []
            assert_refused(call(capsys, *args, *extra), f"{trace}: cannot be read as a trace", "simdist simulate")
    assert not (tmp_path / "x.json").exists()


def test_trace_of_another_plan_is_refused(run, template, tmp_path, capsys):
    shutil.copy(template / "local-4" / SIMULATED, run / "trace.real.npz")
    parts = ("trace.real.npz: is a trace of plan local-4", "plan.json is sync", "move the trace away")
    assert_refused(call(capsys, "simulate", run), *parts)
    assert_refused(call(capsys, "trace", run, "--chrome", tmp_path / "x.json"), *parts)


def test_trace_that_does_not_fit_its_own_plan_is_refused(run, template, tmp_path, capsys):
    with np.load(template / "sync" / SIMULATED) as archive:
        arrays = dict(archive.items())
    trace = tmp_path / "short.npz"
    np.savez(trace, **(arrays | {"ready_s": arrays["ready_s"][:-1]}))
    answer = call(capsys, "trace", trace, "--chrome", tmp_path / "x.json")
    assert_refused(answer, str(trace), "ready_s is float64", "operation instances x ranks")


def test_files_of_different_runs_are_refused(run, template, tmp_path, capsys):
    longer = write(tmp_path / "longer.yaml", edited(("steps: 12", "steps: 13")))
    assert call(capsys, "plan", longer, "--schedule", "sync", "-o", tmp_path / "longer").code == 0
    for name, parts in {
        "scenario.yaml": ("plan.json: steps is 12", "scenario.yaml has 13"),
        "plan.json": ("plan.json: steps is 13", "scenario.yaml has 12"),
        "delays.npz": ("delays.npz: host is float64 (13, 8)", "takes float64 (12, 8)"),
    }.items():
        mixed = tmp_path / f"mixed-{name}"
        shutil.copytree(run, mixed)
        shutil.copy(tmp_path / "longer" / name, mixed / name)
        assert_refused(call(capsys, "simulate", mixed), str(mixed), *parts)


def test_scenario_of_a_run_is_checked_like_any_other(run, capsys):
    text = (run / "scenario.yaml").read_text()
    (run / "scenario.yaml").write_text(text.replace("nodes: 2", "nodes: two"))
    assert_refused(call(capsys, "simulate", run), str(run / "scenario.yaml"), "cluster.nodes", "'two'")


def test_missing_files_are_named(run, tmp_path, capsys):
    (run / "delays.npz").unlink()
    assert_refused(call(capsys, "simulate", run), str(run), "delays.npz missing", "simdist plan SCENARIO -o RUN")
    (run / "plan.json").unlink()
    assert_refused(call(capsys, "simulate", run), str(run), "is no run directory", "plan.json")
    assert_refused(
        call(capsys, "trace", tmp_path / "none.npz", "--chrome", tmp_path / "x"), "none.npz", "there is no such"
    )
    assert_refused(call(capsys, "trace", run, "--chrome", tmp_path / "x"), str(run), "is no run directory")


def test_run_without_a_trace_and_several_runs_say_what_to_do(run, template, tmp_path, capsys):
    chrome = ("--chrome", tmp_path / "x.json")
    assert_refused(call(capsys, "trace", run, *chrome), str(run), "has no trace.real.npz", f"simdist simulate {run}")
    assert_refused(call(capsys, "trace", template, *chrome), "several runs", *(str(template / name) for name in LABELS))
    assert_refused(call(capsys, "simulate", template, "--schedule", "x"), str(template), "'x'", *LABELS)


SELECTIONS = {
    "steps": (["--steps", "3"], ["--steps", "'3'", "A:B"]),
    "negative steps": (["--steps=-3:"], ["--steps", "'-3:'", "A:B"]),
    "steps that are not there": (["--steps", "12:"], ["step 12", "0 to 11"]),
}


@pytest.mark.parametrize("case", SELECTIONS)
def test_wrong_selection_is_refused(template, tmp_path, capsys, case):
    args, parts = SELECTIONS[case]
    answer = call(capsys, "trace", template / "sync", "--chrome", tmp_path / "x.json", *args)
    assert_refused(answer, *parts, case=f"selection: {case}", folder=template)


def test_run_directory_is_not_overwritten(template, tmp_path, capsys):
    path = write(tmp_path / "scenario.yaml")
    runs = tmp_path / "runs"
    shutil.copytree(template, runs)
    remedy = ("another directory with -o",)
    assert_refused(
        call(capsys, "plan", path, "--schedule", "local-4", "-o", runs / "sync"),
        "sync/plan.json: holds another plan",
        *remedy,
        "--force",
    )
    assert_refused(
        call(capsys, "plan", path, "--schedule", "sync", "-o", runs), "holds a run for each of", *LABELS, *remedy
    )
    assert_refused(
        call(capsys, "simulate", path, "-o", runs / "sync"), "run directory of one plan, 3 need another", "-o"
    )
    other = write(tmp_path / "other.yaml", edited(("50 ms", "60 ms")))
    assert_refused(
        call(capsys, "simulate", other, "-o", runs), "is there already with other contents", *remedy, "--force"
    )
    assert call(capsys, "simulate", other, "-o", runs, "--force", "--json").code == 0


def test_debug_shows_where_it_was_raised(tmp_path, capsys):
    answer = call(capsys, "plan", tmp_path / "none.yaml", "--debug")
    assert answer.code == 2
    assert "Traceback" in answer.err
    assert "ScenarioError" in answer.err


@pytest.mark.parametrize(
    "args", [["plan", "bad.yaml"], ["compare", "bad.yaml", "--json"], ["simulate", "nowhere"], ["--bad"]]
)
def test_wrong_input_ends_a_process_with_code_2(tmp_path, args):
    write(tmp_path / "bad.yaml", edited(("steps: 12", "steps: 0")))
    command, environment = process(*args)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(r"error: .*\n\Z", done.stderr)


# Paths that the operating system cannot look up

PATHS = re.compile("RUN|SCENARIO|SWEEP|FILE|FOLDER|DIR|GLOB")
OF_TEXT = {"--schedules", "--scheduler"}  # lists of labels, and addresses


def path_parameters():
    """Return each command with each of its parameters that takes a path."""
    found = []
    for name in cli.list_commands(None):
        command = cli.get_command(None, name)
        groups = command.commands.items() if isinstance(command, click.Group) else [("", command)]
        found += [(f"{name} {inner}".split(), each) for inner, one in groups for each in one.params]
    return [(words, each) for words, each in found if takes_path(each)]


def takes_path(parameter):
    is_named = PATHS.search(parameter.metavar or "") and not OF_TEXT.intersection(parameter.opts)
    assert not is_named or isinstance(parameter.type, common.PathType), parameter
    return is_named


def test_every_command_with_a_path_is_tried():
    names = {words[0] for words, _ in path_parameters()}
    assert names == set(cli.list_commands(None)) - {"presets"}
    options = {option for _, each in path_parameters() for option in each.opts}
    assert {"-o", "--csv", "--plot", "--cluster", "--chrome", "--task", "--tensors", "--calibrate"} <= options


@pytest.mark.parametrize(
    ("words", "parameter"),
    [pytest.param(*case, id=f"{'-'.join(case[0])} {case[1].opts[0]}") for case in path_parameters()],
)
@pytest.mark.parametrize(
    "path", ["x" * 100_000, "x" * 300, "nul\0"], ids=["100,000 letters", "300 letters", "a zero byte"]
)
def test_path_that_cannot_be_looked_up_is_refused_with_its_argument(words, parameter, path, capsys):
    is_option = isinstance(parameter, click.Option)
    given = [parameter.opts[-1], path] if is_option else [path]
    answer = call(capsys, *words, *given)
    assert_refused(answer, parameter.opts[-1] if is_option else parameter.metavar, "give another path", path[:3])
    assert len(answer.err) < 400


def test_list_of_labels_may_be_longer_than_a_name_of_a_file(tmp_path, capsys):
    path = write(tmp_path / "small.yaml")
    answer = call(capsys, "whatif", path, "--schedules", ",".join(["nowhere"] * 100))
    assert_refused(answer, "--schedules 'nowhere'", "no label of a schedule")


@pytest.mark.parametrize(
    ("code", "number"), [(2, errno.EACCES), (2, errno.ENAMETOOLONG), (1, errno.EMFILE), (1, errno.EIO)]
)
def test_file_that_the_system_refuses_is_named_and_is_not_an_error_of_printing(
    code, number, tmp_path, capsys, monkeypatch
):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number), str(tmp_path / "kept.yaml"))

    monkeypatch.setattr(inputs, "read_scenario", refuse)
    answer = call(capsys, "compare", write(tmp_path / "small.yaml"))
    more = ": give another path" if code == 2 else ""
    assert (answer.code, answer.err) == (code, f"error: {tmp_path / 'kept.yaml'}: {os.strerror(number)}{more}\n")


def test_error_of_the_system_without_a_file_is_not_an_error_of_printing(tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(inputs, "read_scenario", refuse)
    answer = call(capsys, "compare", write(tmp_path / "small.yaml"))
    assert (answer.code, answer.err) == (1, f"error: the operating system refuses: {os.strerror(errno.EAGAIN)}\n")


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["presets", "cluster", "dgx-a100"], "did you mean 'clusters'"),
        (["comprae", "scenario.yaml"], "did you mean 'compare'"),
        (["simulate", "scenario.yaml", "--engine", "fsat"], "did you mean 'fast'"),
    ],
)
def test_misspelt_word_of_a_command_is_told_with_the_nearest(args, hint, capsys):
    assert_refused(call(capsys, *args), hint)
