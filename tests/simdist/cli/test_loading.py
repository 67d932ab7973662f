"""`simdist whatif --data`, and what `compare`, `validate` and `trace` say of a data set."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from commandline import Answer, call, edited, write
from data_sets import DATA_SCENARIO

from simdist import scenario
from simdist.cost import Costs
from simdist.plan import LEVELS, Plan
from simdist.runs import building, run_directory
from simdist.scenario.sampling import run_seeds
from simdist.studies.columns import shown_epochs
from simdist.studies.comparison import compare
from simdist.studies.epoch_bounds import epoch_limits
from simdist.studies.epochs import find_epochs
from simdist.studies.facets import EPOCHS
from simdist.traces.reads import Reads, expected
from simdist.traces.trace import Trace

STATED = edited(("bandwidth: 10 Gbit/s}", "bandwidth: 10 Gbit/s, efficiency: 1}"), text=DATA_SCENARIO)
DATA = f"""{STATED}\
schedules:
  - {{kind: sync}}
  - {{kind: sync, input: {{policy: files}}}}
  - {{kind: sync, input: {{policy: datacache}}}}
  - {{kind: sync, input: {{policy: staged}}}}
"""
LABELS = ["sync", "sync+files", "sync+datacache", "sync+staged"]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "data-dictionary.md"


@pytest.fixture
def small(tmp_path):
    return write(tmp_path / "small.yaml", DATA)


@pytest.fixture
def runs(tmp_path, small, capsys):
    """Run directories of two schedules; `sync+files` is measured too, half as fast as simulated."""
    text = edited(
        ("  - {kind: sync, input: {policy: datacache}}\n  - {kind: sync, input: {policy: staged}}\n", ""), text=DATA
    )
    call(capsys, "simulate", write(tmp_path / "two.yaml", text), "-o", tmp_path / "runs")
    path = tmp_path / "runs" / "sync+files"
    trace = Trace.load(path / run_directory.SIMULATED)
    slower = {name: 2 * getattr(trace, name) for name in ("ready_s", "start_s", "end_s")}
    dataclasses.replace(trace, **slower, source="real gloo on cpu").save(path / run_directory.REAL)
    return tmp_path / "runs"


def document(answer: Answer) -> dict:
    assert answer.code == 0, answer.err
    assert answer.out.count("\n") == 1
    return json.loads(answer.out)


def keys_of(value: object) -> set[str]:
    match value:
        case dict():
            return set(value).union(*(keys_of(item) for key, item in value.items() if key != "remarks"))
        case list():
            return set().union(*map(keys_of, value))
        case _:
            return set()


# simdist whatif --data


def test_epochs_of_a_scenario_are_those_of_its_traces(small, capsys):
    found = document(call(capsys, "whatif", small, "--data", "--json"))
    assert [row["schedule"] for row in found["rows"]] == LABELS
    for row in found["rows"]:
        (trace,) = row["traces"]
        known = find_epochs(building.simulate(scenario.load(small), label=row["schedule"]))
        assert (trace["which"], trace["staging_s"]) == ("simulated", known.staging_s)
        assert [each["seconds"] for each in trace["epochs"]] == [each.seconds for each in known.epochs]
        assert [each["stall_s"] for each in trace["epochs"]] == [each.stall_s for each in known.epochs]
        assert [tuple(each["samples"].values()) for each in trace["epochs"]] == [e.n_samples for e in known.epochs]
        assert row["errors"] == []
        assert [row[key] for key in ("run", "hits_identical", "hits_differences", "knobs")] == [None] * 4


def test_every_sample_is_read_once_an_epoch(small, capsys):
    for row in document(call(capsys, "whatif", small, "--data", "--json"))["rows"]:
        for epoch in row["traces"][0]["epochs"]:
            assert sum(epoch["samples"].values()) == 64
            assert sum(epoch["hits"].values()) == pytest.approx(1)


def test_table_for_people_says_where_compute_hides_the_loading(small, capsys):
    answer = call(capsys, "whatif", small, "--data", "--schedule", "sync+files")
    lines = answer.out.splitlines()
    assert lines[0] == "sync+files: 4 ranks, 12 steps, 4 an epoch; simulated by des"
    above = lines[: lines.index("limits: what an epoch would take if all but one were free")]
    rows = {line.split()[0]: line.split() for line in above if re.match(r" \d ", line)}
    assert rows["0"][-3:] == ["64", "(64", "MB)"]
    assert list(rows) == ["0", "1", "2"]
    assert "compute does not hide the loading: stalls are 1 % or more of every epoch" in lines


def test_epochs_that_compute_hides_are_named(tmp_path, capsys):
    one_node = edited(("nodes: 2", "nodes: 1"), ("gpus_per_node: 2", "gpus_per_node: 4"), text=DATA)
    answer = call(capsys, "whatif", write(tmp_path / "s.yaml", one_node), "--data", "--schedule", "sync+files")
    assert "compute hides the loading in epochs 1-2, but not in epoch 0" in answer.out.splitlines()
    slow = write(tmp_path / "s.yaml", edited(("forward: 10 ms", "forward: 10 s"), text=DATA))
    answer = call(capsys, "whatif", slow, "--data", "--schedule", "sync")
    assert "compute hides the loading: stalls are less than 1 % of every epoch" in answer.out.splitlines()


def test_staging_is_told_of(small, capsys):
    """Both nodes take all 64 files of 1 MB, at 100 MB/s together, after a latency of 1 ms."""
    answer = call(capsys, "whatif", small, "--data", "--schedule", "sync+staged")
    assert "staging in: 1.28 s before the first epoch" in answer.out.splitlines()


def test_run_that_was_measured_stands_beside_its_simulation(runs, capsys):
    rows = document(call(capsys, "whatif", runs, "--data", "--json"))["rows"]
    simulated, measured = next(row for row in rows if row["schedule"] == "sync+files")["traces"]
    assert (simulated["which"], measured["which"]) == ("simulated", "measured")
    for row in rows:
        assert row["run"] == str(runs / row["schedule"])
        assert len(row["traces"]) == 1 + (row["schedule"] == "sync+files")
        assert [each["error"] for each in row["errors"]] == [pytest.approx(-0.5)] * len(row["errors"])
    for ours, theirs in zip(simulated["epochs"], measured["epochs"], strict=True):
        assert theirs["seconds"] == pytest.approx(2 * ours["seconds"])
        assert theirs["stall_s"] == pytest.approx(2 * ours["stall_s"])


def limits_lines(answer: Answer) -> list[str]:
    return answer.out.partition("\n\nlimits: what an epoch would take if all but one were free\n\n")[2].splitlines()


def test_limits_stand_below_the_epochs_and_say_what_storage_would_have_to_deliver(small, capsys):
    """4 ranks read 16 files of 1 MB in a step of 30 ms; the server sends 100 MB/s."""
    header, *_, last = lines = limits_lines(call(capsys, "whatif", small, "--data", "--schedule", "sync"))
    assert re.split("  +", header.strip()) == ["epoch", "simulated"]
    assert "In every row: at least 640 ms; for server; computing 120 ms; communication 2.22 ms;" in " ".join(lines)
    assert last == (
        "storage would have to deliver 533 MB/s for computing to hide it in epoch 0; its bandwidth is 100 MB/s"
    )


def test_storage_that_is_fast_enough_has_to_deliver_less_than_it_does(tmp_path, capsys):
    path = write(tmp_path / "s.yaml", edited(("bandwidth: 100 MB/s", "bandwidth: 1 GB/s"), text=DATA))
    last = limits_lines(call(capsys, "whatif", path, "--data", "--schedule", "sync"))[-1]
    assert last == "storage has to deliver 533 MB/s for computing to hide it in epoch 0; its bandwidth is 1 GB/s"


@pytest.mark.parametrize(("bandwidth", "would"), [("50 MB/s", "would have"), ("10 GB/s", "has")])
def test_storage_need_not_be_faster_than_decoding(tmp_path, capsys, bandwidth, would):
    """A worker of each rank decodes 4 samples of 50 ms in each of 4 steps, from the first file, which takes 11 ms."""
    edits = (("100 MB/s", bandwidth), ("forward: 10 ms", "forward: 10 ms\n  decode: 50 ms"))
    path = write(tmp_path / "s.yaml", edited(*edits, text=DATA))
    answer = call(capsys, "whatif", path, "--data", "--schedule", "sync", "--json")
    found = document(answer)["rows"][0]["limits"][0]
    assert (found["next_limit"], found["needed_Bps"]) == ("decoding", pytest.approx(64e6 / 0.8072))
    needed = f"storage {would} to deliver 79.3 MB/s for decoding (807 ms) to limit epoch 0 first"
    last = limits_lines(call(capsys, "whatif", path, "--data", "--schedule", "sync"))[-1]
    assert last == f"{needed}; its bandwidth is {bandwidth}"


def test_staging_has_a_line_of_limits(small, capsys):
    lines = limits_lines(call(capsys, "whatif", small, "--data", "--schedule", "sync+staged"))
    assert re.split("  +", lines[2].strip())[:4] == ["staging", "1.28 s", "1.28 s", "server"]


def test_limits_in_json_are_those_of_every_epoch(small, runs, capsys):
    found = document(call(capsys, "whatif", small, "--data", "--json"))
    for row in found["rows"]:
        known = epoch_limits(*plan_and_costs(small, row["schedule"]))
        assert [each["epoch"] for each in row["limits"]] == [each.epoch for each in known]
        assert [each["least_s_by_limit"] for each in row["limits"]] == [each.seconds for each in known]
        assert [each["least_s"] for each in row["limits"]] == [each.least_s for each in known]
        assert {each["next_limit"] for each in row["limits"] if each["epoch"] is not None} == {"computing"}
    of_run = document(call(capsys, "whatif", runs / "sync", "--data", "--json"))["rows"][0]
    assert of_run["limits"] == found["rows"][0]["limits"]


def plan_and_costs(path: Path, label: str) -> tuple[Plan, Costs]:
    read = scenario.load(path)
    built = building.build(read, next(each for each in read.schedules if each.name == label))
    return built.plan, built.costs


def test_measured_table_ends_with_the_errors_and_the_levels(runs, capsys):
    answer = call(capsys, "whatif", runs / "sync+files", "--data")
    lines = answer.out.partition("\n\nlimits")[0].splitlines()
    assert lines[0].endswith("4 an epoch; simulated by des; measured: real gloo on cpu")
    assert lines[-2:] == [
        "error of an epoch: median 50.0 %, worst -50.0 %",
        "samples by level: the run has no real-reads.npz; shown is what the plan says",
    ]


def test_run_without_a_simulated_trace_is_simulated(runs, capsys):
    before = document(call(capsys, "whatif", runs, "--data", "--json"))["rows"]
    for path in runs.glob(f"*/{run_directory.SIMULATED}"):
        path.unlink()
    assert document(call(capsys, "whatif", runs, "--data", "--json"))["rows"] == before
    assert not list(runs.glob(f"*/{run_directory.SIMULATED}"))


def counted(run: Path, *, moved: int) -> Reads:
    """Write counts of a run in which so many samples of load 9, rank 1, came from storage instead of disk."""
    found = expected(run_directory.read(run).plan)
    place = np.s_[9, 1]
    assert found.n_samples[place][2] >= moved
    found.n_samples[place] += np.array([0, 0, -moved, moved])
    found.nbytes[place] += 1_000_000 * np.array([0, 0, -moved, moved])
    found.save(run / run_directory.REAL_READS)
    return found


def test_counts_as_the_plan_says_are_identical(runs, capsys):
    counted(runs / "sync+files", moved=0)
    (row,) = document(call(capsys, "whatif", runs / "sync+files", "--data", "--json"))["rows"]
    assert (row["hits_identical"], row["hits_differences"]) == (True, [])
    answer = call(capsys, "whatif", runs / "sync+files", "--data")
    assert "samples by level: as the plan says, in every load on every rank" in answer.out.splitlines()


def test_counts_that_differ_are_told_by_level(runs, capsys):
    counted(runs / "sync+files", moved=1)
    (row,) = document(call(capsys, "whatif", runs / "sync+files", "--data", "--json"))["rows"]
    assert row["hits_identical"] is False
    assert [each.partition(":")[0] for each in row["hits_differences"]] == ["disk", "storage"]
    simulated, measured = (trace["epochs"][2]["samples"] for trace in row["traces"])
    assert measured["disk"] == simulated["disk"] - 1
    assert measured["storage"] == simulated["storage"] + 1
    answer = call(capsys, "whatif", runs / "sync+files", "--data")
    lines = [line for line in answer.out.splitlines() if line.startswith("samples by level")]
    assert [line.partition(" samples instead")[0].rpartition(" ")[0] for line in lines] == [
        "samples by level: not as the plan says: disk:",
        "samples by level: not as the plan says: storage:",
    ]


def test_run_that_ended_early_is_compared_over_its_finished_steps(runs, capsys):
    path = runs / "sync+files" / run_directory.REAL
    real = Trace.load(path)
    end_s = real.end_s.copy()
    end_s[real.plan.first_instances()[7] :] = np.nan
    dataclasses.replace(real, end_s=end_s).save(path)
    answer = call(capsys, "whatif", runs / "sync+files", "--data", "--json")
    (row,) = document(answer)["rows"]
    assert f"{path}: only 7 of 12 steps were finished" in [each["text"] for each in row["remarks"]]
    for trace in row["traces"]:
        assert [epoch["steps"] for epoch in trace["epochs"]] == [4, 3]
    assert [each["error"] for each in row["errors"]] == [pytest.approx(-0.5)] * 2


def test_knobs_are_shown_below_the_epochs(small, capsys):
    answer = call(capsys, "whatif", small, "--data", "--schedule", "sync", "--knobs")
    lines = answer.out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(" as it is"))
    changes = [line for line in lines[first + 1 :] if "->" in line or line.startswith((" storage", " policy:"))]
    assert len(changes) == 2 + 3 + 4
    assert changes[0].startswith(" policy: ")


def test_knobs_in_json_are_sorted_by_the_time_of_the_run(small, capsys):
    (row,) = document(call(capsys, "whatif", small, "--data", "--schedule", "sync+files", "--knobs", "--json"))["rows"]
    knobs = row["knobs"]
    seconds = [round(effect["seconds"], 9) for effect in knobs["effects"]]
    assert seconds == sorted(seconds)
    assert seconds[0] < round(knobs["seconds"], 9) < seconds[-1]
    assert knobs["missing"] == {}
    simulated = row["traces"][0]["epochs"]
    assert knobs["waiting_s"] == pytest.approx(sum(epoch["stall_s"] for epoch in simulated))
    for effect in knobs["effects"]:
        waiting_s = effect["staging_s"] + sum(effect["stall_s"])
        assert effect["removed"] == pytest.approx(1 - waiting_s / knobs["waiting_s"])


def test_knobs_of_a_run_meet_its_own_delays(tmp_path, capsys):
    """Of 1 s in every step, edited after they were drawn."""
    text = DATA + "disturbances: [{kind: persistent, delay: 10 ms}]\n"
    run = tmp_path / "run"
    call(capsys, "plan", write(tmp_path / "s.yaml", text), "--schedule", "sync", "-o", run)
    np.savez(run / run_directory.DELAYS, host=np.ones((12, 4)))
    (row,) = document(call(capsys, "whatif", run, "--data", "--knobs", "--json"))["rows"]
    assert row["knobs"]["seconds"] == sum(each["seconds"] for each in row["traces"][0]["epochs"])
    assert min(effect["seconds"] for effect in row["knobs"]["effects"]) > 12


def test_knob_that_the_cluster_has_not_is_named(tmp_path, capsys):
    text = edited(
        ("  memory: {bandwidth: 8 GB/s}\n", ""), ("  - {kind: sync, input: {policy: datacache}}\n", ""), text=DATA
    )
    answer = call(capsys, "whatif", write(tmp_path / "s.yaml", text), "--data", "--schedule", "sync", "--knobs")
    assert answer.out.splitlines()[-2:] == [
        "policy: memory: not simulated, needs cluster.memory",
        "policy: datacache: not simulated, needs cluster.memory",
    ]


WITHOUT = edited(
    ("input: {source: storage, data: {samples: 64, file_size: 1 MB}}\nsteps: 3 epochs", "steps: 4"),
    (DATA[DATA.index("  - {kind: sync, input: {policy: files}}") :], ""),
    ("  storage: {latency: 1 ms, bandwidth: 100 MB/s}\n", ""),
    ("  disk: {read: 1 GB/s, write: 500 MB/s}\n  memory: {bandwidth: 8 GB/s}\n", ""),
    text=DATA,
)


def test_scenario_without_a_data_set_is_refused(tmp_path, capsys):
    path = write(tmp_path / "s.yaml", WITHOUT)
    answer = call(capsys, "whatif", path, "--data")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == (
        f"error: {path}: reads no data set, so it has no epochs: write input.data: {{samples: ..., file_size: ...}} "
        f"and input.source: storage\n"
    )


def test_data_set_that_nothing_reads_asks_for_the_input_only(tmp_path, capsys):
    text = edited(
        ("source: storage, ", ""),
        (DATA[DATA.index("  - {kind: sync, input: {policy: files}}") :], ""),
        text=DATA,
    )
    path = write(tmp_path / "s.yaml", text)
    answer = call(capsys, "whatif", path, "--data")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.splitlines()[-1] == (
        f"error: {path}: reads no data set, so it has no epochs: write input.source: storage"
    )


def test_runs_without_a_data_set_are_left_out_and_refused_if_there_is_no_other(tmp_path, runs, capsys):
    call(capsys, "plan", write(tmp_path / "s.yaml", WITHOUT), "-o", runs / "bare")
    answer = call(capsys, "whatif", runs, "--data", "--json")
    assert [row["schedule"] for row in document(answer)["rows"]] == ["sync", "sync+files"]
    assert f"warning: {runs / 'bare'}: left out: reads no data set" in answer.err
    answer = call(capsys, "whatif", runs / "bare", "--data")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"error: {runs / 'bare'}: reads no data set, so it has no epochs")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.yaml"], "there is no such file, nor a preset of that name"),
        (["small.yaml", "--schedule", "snyc"], "no schedule is labelled"),
        (["small.yaml", "--knob"], "No such option"),
    ],
)
def test_wrong_command_lines_are_refused(small, capsys, monkeypatch, args, message):
    monkeypatch.chdir(small.parent)
    answer = call(capsys, "whatif", *args, "--data")
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err


def test_damaged_counts_are_refused(runs, capsys):
    path = runs / "sync+files" / run_directory.REAL_READS
    path.write_bytes(b"PK")
    for command in (["whatif", "--data"], ["validate"]):
        answer = call(capsys, *command, runs / "sync+files")
        assert (answer.code, answer.out) == (2, "")
        assert f"{path}: cannot be read as counts of reads" in answer.err


def test_every_key_of_the_result_is_documented(runs, capsys):
    section = PAGE.read_text(encoding="utf-8").partition("\n## `simdist whatif --data`")[2].partition("\n## ")[0]
    found = document(call(capsys, "whatif", runs, "--data", "--knobs", "--json"))
    assert keys_of(found) - set(re.findall(r"`(\w+)`", section)) == set()


# simdist compare


def test_rows_of_a_comparison_have_epochs(small, capsys):
    found = document(call(capsys, "compare", small, "--seeds", "2", "--json"))
    for row in found["rows"]:
        known = find_epochs(building.simulate(scenario.load(small), label=row["schedule"]))
        assert row["staging_s"] == known.staging_s
        assert [each["epoch"] for each in row["epochs"]] == [0, 1, 2]
        assert [each["seconds"] for each in row["epochs"]] == [each.seconds for each in known.epochs]
        assert [each["stall_s"] for each in row["epochs"]] == [each.stall_s for each in known.epochs]
        assert [each["hits"] for each in row["epochs"]] == [each.hits for each in known.epochs]
        assert all(each.keys() == {"epoch", "seconds", "stall_s", "hits"} for each in row["epochs"])


def test_each_epoch_has_its_speed_up_over_that_of_the_baseline(small, capsys):
    rows = document(call(capsys, "compare", small, "--seeds", "1", "--json"))["rows"]
    base = next(row for row in rows if row["schedule"] == "sync+files")
    answer = call(capsys, "compare", small, "--seeds", "1", "--baseline", "sync+files")
    table = answer.out.partition("epochs: ")[2].splitlines()
    assert re.split("  +", table[2].strip())[:4] == ["schedule", "epoch", "time", "speed-up"]
    shown = {tuple(cells[:2]): cells[3] for cells in (re.split("  +", line.strip()) for line in table[4:]) if cells[3:]}
    assert len(shown) == 4 * 3
    for row in rows:
        for each, reference in zip(row["epochs"], base["epochs"], strict=True):
            speedup = f"{reference['seconds'] / each['seconds']:.2f}"
            assert shown[row["schedule"], str(each["epoch"])] == speedup


def test_epochs_are_averaged_over_seeds(tmp_path):
    text = DATA + "disturbances: [{kind: exponential, mean: 40 ms, on: io}]\n"
    read = scenario.load(write(tmp_path / "s.yaml", text))
    (row, *_) = compare(read, n_seeds=3)
    of_seeds = [
        find_epochs(building.simulate(read.model_copy(update={"seed": seed}), label="sync"))
        for seed in run_seeds(read.seed, 3)
    ]
    for number, epoch in enumerate(row.of(EPOCHS).epochs):
        same = [each.epochs[number] for each in of_seeds]
        assert len({each.seconds for each in same}) == 3
        assert epoch.seconds == pytest.approx(sum(each.seconds for each in same) / 3)
        assert epoch.stall_s == pytest.approx(sum(each.stall_s for each in same) / 3)


def test_second_table_of_a_comparison_is_by_epoch(small, capsys):
    answer = call(capsys, "compare", small, "--seeds", "1")
    _, second = answer.out.split("\nepochs: ")
    rows = [line.split() for line in second.splitlines() if line.strip().startswith("sync")]
    assert [row[:2] for row in rows] == [
        [label, epoch] for label in LABELS for epoch in (["staging"] * (label == "sync+staged") + ["0", "1", "2"])
    ]
    assert rows[0][-8:] == ["0", "%", "0", "%", "0", "%", "100.0", "%"]


def test_comparison_without_a_data_set_says_nothing_of_epochs(tmp_path, capsys):
    path = write(tmp_path / "s.yaml", WITHOUT)
    assert "epoch" not in call(capsys, "compare", path, "--seeds", "2").out
    (row,) = document(call(capsys, "compare", path, "--seeds", "2", "--json"))["rows"]
    assert not {"epochs", "staging_s"} & row.keys()


def test_of_many_epochs_the_first_and_the_last_are_shown():
    assert shown_epochs(range(6)) == [0, 1, 2, 3, 4, 5]
    assert shown_epochs(range(90)) == [0, 1, 2, 3, 4, None, 89]


# simdist validate


def test_validation_tells_of_epochs_and_levels(runs, capsys):
    counted(runs / "sync+files", moved=1)
    answer = call(capsys, "validate", runs / "sync+files")
    assert answer.out.splitlines()[-3] == "error of an epoch: median 50.0 %, worst -50.0 %"
    assert "samples by level: not as the plan says: disk: " in answer.out.splitlines()[-2]
    (row,) = document(call(capsys, "validate", runs / "sync+files", "--json"))["rows"]
    assert [each["error"] for each in row["epochs"]] == [pytest.approx(-0.5)] * 3
    assert row["hits_identical"] is False
    assert len(row["hits_differences"]) == 2
    section = PAGE.read_text(encoding="utf-8").partition("\n## `simdist validate`")[2].partition("\n## ")[0]
    assert {"epochs", "hits_identical", "hits_differences"} <= set(re.findall(r"`(\w+)`", section))


def test_validation_without_a_data_set_says_nothing_of_epochs(tmp_path, capsys):
    call(capsys, "simulate", write(tmp_path / "s.yaml", WITHOUT), "-o", tmp_path / "run")
    trace = Trace.load(tmp_path / "run" / run_directory.SIMULATED)
    dataclasses.replace(trace, source="real").save(tmp_path / "run" / run_directory.REAL)
    assert "epoch" not in call(capsys, "validate", tmp_path / "run").out
    (row,) = document(call(capsys, "validate", tmp_path / "run", "--json"))["rows"]
    assert not {"epochs", "hits_identical"} & row.keys()


# simdist trace


def loads_of(path: Path) -> list[dict]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["name"].startswith("load ")]


def test_spans_of_loads_tell_what_they_read(runs, tmp_path, capsys):
    found = counted(runs / "sync+files", moved=1)
    for which, reads in (("simulated", expected(run_directory.read(runs / "sync+files").plan)), ("real", found)):
        call(capsys, "trace", runs / "sync+files", "--trace", which, "--chrome", tmp_path / "t.json")
        spans = loads_of(tmp_path / "t.json")
        assert len(spans) == 12 * 4
        for rank in range(4):
            of_rank = [span["args"]["samples"] for span in spans if span["pid"] == rank]
            known = [dict(zip(LEVELS, row, strict=True)) for row in reads.n_samples[:, rank].tolist()]
            assert of_rank == [{level: n for level, n in each.items() if n} for each in known]


def test_spans_of_some_steps_tell_of_their_own_loads(runs, tmp_path, capsys):
    call(capsys, "trace", runs / "sync", "--chrome", tmp_path / "t.json", "--steps", "5:6")
    assert [span["args"]["samples"] for span in loads_of(tmp_path / "t.json")] == [{"storage": 4}] * 4


@pytest.mark.parametrize(
    ("bandwidth", "said"),
    [
        ("800 Mbit/s", "deliver 4,270 Mbit/s for computing to hide it in epoch 0; its bandwidth is 800 Mbit/s"),
        ("100MB/s", "deliver 533MB/s for computing to hide it in epoch 0; its bandwidth is 100MB/s"),
        ("0.0001 TB/s", "deliver 533 MB/s for computing to hide it in epoch 0; its bandwidth is 100 MB/s"),
    ],
)
def test_bandwidth_is_told_in_the_unit_of_the_file(tmp_path, capsys, bandwidth, said):
    path = write(tmp_path / "s.yaml", edited(("100 MB/s", bandwidth), text=DATA))
    assert limits_lines(call(capsys, "whatif", path, "--data", "--schedule", "sync"))[-1].endswith(said)


def test_unit_is_that_of_the_cluster_file_and_a_run_has_none(tmp_path, capsys):
    whole = write(tmp_path / "s.yaml", edited(("100 MB/s", "800 Mbit/s"), text=DATA))
    tree = yaml.safe_load(whole.read_text(encoding="utf-8"))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(tree["cluster"]), encoding="utf-8")
    apart = write(tmp_path / "apart.yaml", yaml.safe_dump(tree | {"cluster": {"file": "cluster.yaml"}}))
    last = limits_lines(call(capsys, "whatif", apart, "--data", "--schedule", "sync"))[-1]
    assert last.endswith("its bandwidth is 800 Mbit/s")
    assert call(capsys, "simulate", whole, "--schedule", "sync", "-o", tmp_path / "run").code == 0
    assert limits_lines(call(capsys, "whatif", tmp_path / "run", "--data"))[-1].endswith("its bandwidth is 100 MB/s")
