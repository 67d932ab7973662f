"""`simdist results`: every number is that of `simdist compare`, every row stands once, what is missing is said."""

import csv
import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from commandline import SMALL, call, edited, write
from data_sets import DATA_CLUSTER

from simdist import sweeps
from simdist.cli import main
from simdist.errors import RunError, ScenarioError
from simdist.files import read_jsonl
from simdist.jobs.store import DESIGN, ROWS
from simdist.runs import run_directory
from simdist.scenario import loads as scenario_of
from simdist.studies.comparison import compare
from simdist.studies.facets import EPOCHS
from simdist.sweeps import InProcess, LocalPool, frame, load, read_results, write_plans
from simdist.sweeps.fastest import fastest
from simdist.sweeps.results import csv_text
from simdist.sweeps.table import columns
from simdist.traces.breakdown import break_down

SWEEP = """\
scenario: small.yaml
vary:
  cluster.nodes: [1, 2]
  schedules[1].period: [2, 4]
cases:
  - {name: slow, cluster.network.bandwidth: 1 Gbit/s}
  - {name: fast, cluster.network.bandwidth: 100 Gbit/s}
seeds: 3
"""
SCHEDULES = """\
  - kind: sync
  - {kind: local_sgd, period: 4}
  - {kind: hierarchical_sgd, levels: {2: 4, 4: world}}
"""
TWO = SMALL.replace("  - {kind: hierarchical_sgd, levels: {2: 4, 4: world}}\n", "")
VARIED = ["cluster.network.bandwidth_Bps", "cluster.nodes", "schedules[1].period"]
NUMBERS = ["step_s", "speedup", "compute_s", "comm_s", "wait_s", "io_s", "host_s"]


def computed(folder: Path, sweep: str = SWEEP, scenario: str = TWO) -> Path:
    """Compute a sweep in this process; return its folder."""
    folder.mkdir(exist_ok=True)
    write(folder / "small.yaml", scenario)
    sweeps.sweep(load(write(folder / "study.yaml", sweep)), folder / "out", workers=InProcess())
    return folder / "out"


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """The folder of a sweep; tests do not write there."""
    return computed(tmp_path_factory.mktemp("swept"))


@pytest.fixture
def mine(swept, tmp_path) -> Path:
    """A copy of it, to damage."""
    return shutil.copytree(swept, tmp_path / "out")


def edit_rows(folder: Path, change) -> None:
    """Change the records of a sweep: `change` returns a new one of each, or None to drop it."""
    records = list(read_jsonl(folder / ROWS))  # without checksums: lines that were edited have none
    kept = [new for number, record in enumerate(records) if (new := change(number, record)) is not None]
    (folder / ROWS).write_text("".join(f"{json.dumps(record)}\n" for record in kept))


# ---------------------------------------------------------------- the numbers


def test_every_number_is_that_of_compare(swept):
    table = frame(swept)
    of_one = table[(table.case == "slow") & (table["cluster.nodes"] == 2) & (table["schedules[1].period"] == 4)]
    rows = compare(scenario_of(edited(("25 Gbit/s", "1 Gbit/s"), text=TWO)), n_seeds=3)
    assert of_one.schedule.tolist() == [row.schedule for row in rows] == ["sync", "local-4"]
    for name in NUMBERS:
        assert of_one[name].tolist() == [row.document()[name] for row in rows], name
    for name in ("step_s", "speedup"):
        intervals = [row.document()[f"{name}_ci95"] for row in rows]
        assert list(zip(of_one[f"{name}_ci95_low"], of_one[f"{name}_ci95_high"], strict=True)) == intervals
    assert of_one.engine.tolist() == [row.engine for row in rows]
    assert of_one.seeds.tolist() == [3, 3]


def test_rows_stand_in_the_order_of_the_design_with_what_they_set_in_si_units(swept):
    table = frame(swept)
    assert table.point.tolist() == [number for number in range(8) for _ in range(2)]
    assert table.case.tolist() == ["slow"] * 8 + ["fast"] * 8
    assert table["cluster.nodes"].tolist() == [1, 1, 1, 1, 2, 2, 2, 2] * 2
    assert table.schedule.tolist() == ["sync", "local-2", "sync", "local-4"] * 4
    assert table.kind.tolist() == ["sync", "local_sgd"] * 8
    assert set(table["cluster.network.bandwidth_Bps"]) == {0.125e9, 12.5e9}


def test_columns_and_their_types(swept):
    table = frame(swept)
    assert list(table.columns) == [
        *["point", "case", *VARIED, "source", "schedule", "kind", "step_s", "step_s_ci95_low", "step_s_ci95_high"],
        *["speedup", "speedup_ci95_low", "speedup_ci95_high", "compute_s", "comm_s", "wait_s", "io_s", "host_s"],
        *["engine", "seeds", "failed", "error"],
    ]
    types = table.dtypes
    assert {str(types[name]) for name in ("point", "cluster.nodes", "schedules[1].period", "seeds")} == {"int64"}
    assert {str(types[name]) for name in [*NUMBERS, VARIED[0], "step_s_ci95_low", "speedup_ci95_high"]} == {"float64"}
    for name in ("case", "source", "schedule", "kind", "engine", "failed", "error"):
        assert pd.api.types.is_string_dtype(table[name]), name
    assert set(table.source) == {"simulated"}
    assert set(table.failed) == {""}


def test_a_sweep_without_cases_has_no_column_of_them_and_one_seed_no_intervals(tmp_path):
    table = frame(computed(tmp_path, "{scenario: small.yaml, vary: {cluster.nodes: [1, 2]}, seeds: 1}"))
    assert "case" not in table
    assert table.step_s_ci95_low.isna().all()
    assert table.speedup_ci95_high.isna().all()
    assert table.speedup.notna().all()


def test_seeds_that_make_no_difference_give_intervals_of_no_width(tmp_path):
    quiet = edited(("disturbances:\n  - {kind: transient, probability: 10%, delay: 50 ms}\n", ""), text=TWO)
    table = frame(computed(tmp_path, scenario=quiet))
    assert table.step_s_ci95_low.tolist() == table.step_s.tolist() == table.step_s_ci95_high.tolist()


def test_the_baseline_of_a_point_is_found_by_kind_where_its_label_varies(tmp_path):
    table = frame(computed(tmp_path, SWEEP + "baseline: local_sgd\n"))
    assert table.speedup[1::2].tolist() == [1.0] * 8
    expected = (table.step_s[1::2].to_numpy() / table.step_s[::2].to_numpy()).tolist()
    assert table.speedup[::2].tolist() == expected


def test_another_baseline_can_be_asked_for(swept):
    table = frame(swept, baseline="local_sgd")
    assert table.speedup[1::2].tolist() == [1.0] * 8
    assert not (table.speedup[::2] == 1.0).any()


@pytest.mark.parametrize("loss", ["missing", "failed"])
def test_without_its_baseline_a_point_has_no_speedups_and_that_is_said_once(mine, capsys, loss):
    keys = {json.loads(line)["key"] for line in (mine / DESIGN).read_text().splitlines()[1:4:2]}  # sync, points 0 and 1

    def change(_, record):
        if record["key"] not in keys:
            return record
        return None if loss == "missing" else {"key": record["key"], "failed": "PlanError", "error": "no"}

    edit_rows(mine, change)
    table = read_results([mine])
    found = columns(table)
    of_two = [number for number, point in enumerate(found["point"]) if point in (0, 1)]
    assert all(found["speedup"][number] is None for number in of_two)
    assert sum(found["step_s"][number] is not None for number in of_two) == 2
    answer = call(capsys, "results", mine)
    assert answer.code == 0
    assert answer.err.count("no speed-ups at 2 points: no schedule called 'sync' was measured there") == 1


def test_epochs_of_a_data_set_have_columns(tmp_path):
    scenario = f"""{DATA_CLUSTER}\
workload: {{tensors: [{{name: w, count: 1000}}], batch_size: 4, sample_size: 1 kB, forward: 2 ms}}
input: {{source: storage, data: {{samples: 32, file_size: 100 kB}}}}
steps: 2 epochs
schedules: [{{kind: sync, input: {{policy: naive}}}}, {{kind: sync, input: {{policy: staged}}}}]
"""
    sweep = "{scenario: small.yaml, vary: {'cluster.storage.latency': [1 ms]}, seeds: 1, baseline: sync+naive}"
    table = frame(computed(tmp_path, sweep, scenario))
    naive, staged = (each.of(EPOCHS) for each in compare(scenario_of(scenario), baseline="sync+naive", n_seeds=1))
    assert table.staging_s.tolist() == [naive.staging_s, staged.staging_s]
    assert table.staging_s[1] > table.staging_s[0] == 0
    assert table.epoch_first_s.tolist() == [naive.epochs[0].seconds, staged.epochs[0].seconds]
    assert table.epoch_last_s.tolist() == [naive.epochs[1].seconds, staged.epochs[1].seconds]


# ---------------------------------------------------------------- rows that failed or are not there


def test_rows_that_failed_have_a_label_and_an_error_and_no_numbers(tmp_path, capsys):
    sweep = "{scenario: small.yaml, vary: {'schedules[2].levels': [{2: 4, 4: world}, {2: 3}]}, seeds: 2}"
    folder = computed(tmp_path, sweep, SMALL)
    table = frame(folder)
    failed = table[table.failed != ""]
    assert failed.schedule.tolist() == ["hsgd-2-3"]
    assert failed.failed.tolist() == ["ScenarioError"]
    assert failed[NUMBERS].isna().all(axis=None)
    assert failed.seeds.tolist() == [2]
    answer = call(capsys, "results", folder)
    assert "1 row failed: --failed shows why" in answer.err
    shown = call(capsys, "results", folder, "--failed")
    why, where = shown.out.split("\n\nwhere\n\n")
    assert why.startswith("1 row failed, for 1 reason\n")
    assert why.splitlines()[4].split()[:4] == ["1", "1", "ScenarioError:", "schedules[2].levels:"]
    assert where.split("\n")[0].split() == ["point", "schedules[2].levels", "schedule", "reason"]
    assert where.splitlines()[2].split() == ["1", "{'2':", "3}", "hsgd-2-3", "1"]
    assert "speed-up" not in shown.out
    assert len(call(capsys, "results", folder, "--csv", "-").out.splitlines()) == 7


def test_rows_that_are_not_there_yet_are_counted(mine, capsys):
    edit_rows(mine, lambda number, record: record if number < 10 else None)
    answer = call(capsys, "results", mine)
    assert f"{mine}: 2 of 16 rows are not there yet: `simdist sweep` into it goes on" in answer.err
    assert answer.out.startswith("14 rows, simulated;")
    assert json.loads(call(capsys, "results", mine, "--json").out)["missing"] == 2


def test_the_last_record_of_a_row_counts_and_torn_lines_do_not(mine):
    lines = (mine / ROWS).read_text().splitlines()
    first = json.loads(lines[0])
    old = {"key": first["key"], "failed": "RunError", "error": "killed"}
    (mine / ROWS).write_text("\n".join([json.dumps(old), *lines[:-1], lines[-1][:50]]))
    table = read_results([mine])
    assert (table.n_failed, table.n_missing, len(table.results)) == (0, 1, 15)


@pytest.mark.parametrize(
    "change",
    [
        {"step_s": []},
        {"step_s": "long"},
        {"step_s": [0.1, None, 0.1]},
        {"wait_s": "long"},
        {"engine": None},
        {"epochs_s": 3},
    ],
    ids=str,
)
def test_a_damaged_row_is_an_error_that_says_which(mine, change):
    edit_rows(mine, lambda number, record: record | change if number == 3 else record)
    key = json.loads((mine / ROWS).read_text().splitlines()[3])["key"]
    with pytest.raises(RunError, match=f"{ROWS}: the record of {key} is damaged: delete its line"):
        read_results([mine])


@pytest.mark.parametrize("line", [0, 1, -1])
@pytest.mark.parametrize("instead", ["", "[]", '{"point": 0}', '{"point": 0, "ca'])
def test_a_damaged_design_is_an_error(mine, line, instead):
    lines = (mine / DESIGN).read_text().splitlines(keepends=True)
    lines[line] = f"{instead}\n"
    (mine / DESIGN).write_text("".join(lines))
    with pytest.raises(RunError, match=f"{DESIGN}: is damaged: run `simdist sweep` into {mine} again"):
        read_results([mine])


def test_a_design_that_lacks_points_is_an_error(mine):
    lines = (mine / DESIGN).read_text().splitlines(keepends=True)
    (mine / DESIGN).write_text("".join(lines[:-2]))
    with pytest.raises(RunError, match=f"{DESIGN}: is damaged"):
        read_results([mine])


# ---------------------------------------------------------------- files


def test_csv_has_every_number_to_the_last_bit(swept, tmp_path, capsys):
    answer = call(capsys, "results", swept, "--csv", tmp_path / "all.csv")
    assert answer.code == 0
    assert f"wrote {tmp_path / 'all.csv'}" in answer.err
    text = (tmp_path / "all.csv").read_text()
    assert text == call(capsys, "results", swept, "--csv", "-").out
    rows = list(csv.DictReader(io.StringIO(text)))
    table = frame(swept)
    assert [row["schedule"] for row in rows] == table.schedule.tolist()
    for name in [*NUMBERS, "step_s_ci95_low", "speedup_ci95_high", VARIED[0]]:
        assert [float(row[name]) for row in rows] == table[name].tolist(), name


def test_damaged_row_is_told_by_its_number_and_computed_again(tmp_path):
    folder = computed(tmp_path)
    whole = (folder / ROWS).read_bytes()
    lines = whole.splitlines(keepends=True)
    at = lines[2].index(b'"step_s": [') + 13
    lines[2] = lines[2][:at] + (b"1" if lines[2][at : at + 1] != b"1" else b"2") + lines[2][at + 1 :]
    assert json.loads(lines[2])  # it is JSON, with another number
    old = {name: value for name, value in json.loads(lines[4]).items() if name != "crc32"}
    lines[4] = json.dumps(old).encode() + b"\n"  # of an older version
    (folder / ROWS).write_bytes(b"".join(lines))
    table = read_results([folder])
    assert table.n_missing == 1
    assert any(f"{folder / ROWS}: line 3 is torn or damaged" in each.text for each in table.remarks)
    outcome = sweeps.sweep(load(tmp_path / "study.yaml"), folder, workers=InProcess())
    assert (outcome.n_new, outcome.damaged) == (1, (3,))
    assert [json.loads(line)["key"] for line in whole.splitlines()] == [
        json.loads(line)["key"] for line in (folder / ROWS).read_bytes().splitlines()
    ]
    assert (folder / ROWS).read_bytes().splitlines()[2] == whole.splitlines()[2]


def test_csv_is_the_same_however_many_processes_computed_it(swept, tmp_path):
    write(tmp_path / "small.yaml", TWO)
    with LocalPool(2) as pool:
        sweeps.sweep(load(write(tmp_path / "study.yaml", SWEEP)), tmp_path / "pool", workers=pool)
    of_pool, of_one = (csv_text(columns(read_results([folder]))) for folder in (tmp_path / "pool", swept))
    assert of_pool.encode() == of_one.encode()


def test_a_file_that_cannot_be_written_is_an_error_and_nothing_is_left(swept, tmp_path, capsys):
    (tmp_path / "taken.csv").mkdir()
    answer = call(capsys, "results", swept, "--csv", tmp_path / "taken.csv")
    assert answer.code == 1
    assert f"{tmp_path / 'taken.csv'}: cannot be written" in answer.err
    assert [file.name for file in tmp_path.iterdir()] == ["taken.csv"]
    answer = call(capsys, "results", swept, "--csv", tmp_path / "nowhere" / "a.csv")
    assert (answer.code, answer.out) == (2, "")
    assert "there is no directory" in answer.err


def test_json_has_the_columns_as_keys(swept, capsys):
    found = json.loads(call(capsys, "results", swept, "--json").out)
    assert (found["folders"], found["baseline"], found["missing"], found["failed"]) == ([str(swept)], "sync", 0, 0)
    assert list(found["rows"][0]) == list(frame(swept).columns)
    assert [row["step_s"] for row in found["rows"]] == frame(swept).step_s.tolist()
    assert json.loads(call(capsys, "results", swept, "--json", "--fastest").out)["rows"][0]["clear"] in (True, False)


# ---------------------------------------------------------------- choosing rows


def test_a_drawn_value_is_shown_with_four_digits(tmp_path, capsys):
    vary = (
        "{cluster.network.bandwidth: {uniform: [1 Gbit/s, 4 Gbit/s]}, disturbances.0.probability: {uniform: [0, 5%]}}"
    )
    sample = "{kind: sobol, points: 2}"
    folder = computed(tmp_path, f"{{scenario: small.yaml, vary: {vary}, sample: {sample}, seeds: 1}}")
    row = call(capsys, "results", folder).out.splitlines()[4].split()
    assert row[2] == "Gbit/s"
    assert row[3].endswith("%")
    assert len(row[1].replace(".", "")) <= 4 < len(str(frame(folder)["cluster.network.bandwidth_Bps"][0] / 0.125e9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fastest", "--failed"], "--fastest with --failed"),
        (["--json", "--csv", "-"], "--csv - with --json"),
    ],
)
def test_a_wrong_choice_says_what_would_be_right(swept, capsys, options, message):
    answer = call(capsys, "results", swept, *options)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err


# ---------------------------------------------------------------- tables for people


def test_a_table_shows_values_as_they_were_written(swept, capsys):
    lines = call(capsys, "results", swept).out.splitlines()
    assert lines[0] == "16 rows, simulated; speed-up over sync, 95 % confidence"
    assert lines[2].split()[:5] == ["point", "case", "bandwidth", "nodes", "schedules[1].period"]
    assert lines[4].split()[:6] == ["0", "slow", "1", "Gbit/s", "1", "2"]
    assert len(lines) == 4 + 16 + 2
    assert lines[-1] == "In every row: compute 60 ms; io 0 s; host 5 ms."


def test_a_long_table_shows_its_first_rows_and_how_many_more_there_are(tmp_path, capsys):
    folder = computed(
        tmp_path,
        "{scenario: small.yaml, vary: {steps: {integers: [2, 9]}}, sample: {kind: sobol, points: 16}, seeds: 1}",
    )
    out = call(capsys, "results", folder).out
    assert out.splitlines()[-1] == "2 more rows: --all shows them, --csv FILE writes them"
    assert len(out.splitlines()) == 4 + 30 + 2 + 2
    assert len(call(capsys, "results", folder, "--all").out.splitlines()) == 4 + 32 + 2


def test_the_fastest_schedule_leads_by_more_than_the_interval_or_not(swept, capsys):
    table = read_results([swept])
    steps = {(each.point, each.schedule): each.measured.step_s for each in table.results}
    for best in fastest(table):
        point = best.result.point
        first, second = steps[point, best.result.schedule], steps[point, best.next_one]
        assert first.mean() <= second.mean()
        assert best.lead == second.mean() / first.mean()
        low, high = best.lead_ci95
        assert low <= best.lead <= high
        assert best.is_clear == (low > 1)
    assert {each.is_clear for each in fastest(table)} == {True, False}
    out = call(capsys, "results", swept, "--fastest").out.splitlines()
    assert out[0].startswith("the fastest schedule at 8 points, simulated;")
    assert {line.split()[-1] for line in out[4 : 4 + 8]} == {"yes", "no"}


def test_what_failed_is_not_the_fastest_and_one_schedule_alone_leads_nobody(mine):
    keys = {json.loads(line)["key"] for line in (mine / DESIGN).read_text().splitlines()[1:2]}
    lost = {"failed": "PlanError", "error": "no"}
    edit_rows(mine, lambda _, record: {"key": record["key"], **lost} if record["key"] in keys else record)
    best = fastest(read_results([mine]))[0]
    assert (best.result.schedule, best.n_schedules, best.lead, best.is_clear) == ("local-2", 1, None, None)


# ---------------------------------------------------------------- runs


def measured(path: Path, factor: float) -> None:
    """Pretend that a run took `factor` times as long as it was simulated."""
    trace = run_directory.read_trace(path / run_directory.SIMULATED)
    times = {
        name: array * factor
        for name, array in zip(
            ("ready_s", "start_s", "end_s"), (trace.ready_s, trace.start_s, trace.end_s), strict=True
        )
    }
    run_directory.save_trace(replace(trace, **times, source="real gloo on cpu"), path / run_directory.REAL)


@pytest.fixture
def runs(tmp_path, capsys) -> Path:
    """Two points of two schedules as run directories; one run was measured, too."""
    for nodes, bandwidth in ((1, "25 Gbit/s"), (2, "1 Gbit/s")):
        text = edited(("nodes: 2", f"nodes: {nodes}"), ("25 Gbit/s", bandwidth), text=TWO)
        path = write(tmp_path / "small.yaml", text)
        assert call(capsys, "simulate", path, "-o", tmp_path / "runs" / "deep" / f"n{nodes}").code == 0
    for label in ("sync", "local-4"):
        measured(tmp_path / "runs" / "deep" / "n2" / label, 1.25 if label == "sync" else 1.5)
    return tmp_path / "runs"


def test_runs_give_the_columns_of_a_sweep_with_both_sources(runs, swept):
    table = frame(runs)
    assert list(table.columns) == [
        *["point", "cluster.nodes", "cluster.network.bandwidth_Bps", "source", "run"],
        *list(frame(swept).columns)[6:-2],
        *["error_ratio", "failed", "error"],
    ]
    assert table.point.tolist() == ["deep/n1"] * 2 + ["deep/n2"] * 4
    assert table.run[0] == "deep/n1/local-4"
    assert table.source.tolist() == ["simulated"] * 2 + ["simulated", "real"] * 2
    assert table["cluster.nodes"].tolist() == [1, 1, 2, 2, 2, 2]
    assert table["cluster.network.bandwidth_Bps"].tolist() == [3.125e9] * 2 + [0.125e9] * 4
    assert set(table.seeds) == {1}
    assert table.step_s_ci95_low.isna().all()


def test_numbers_of_runs_are_those_of_their_traces_and_speedups_stay_within_a_source(runs):
    table = frame(runs).set_index(["run", "source"])
    for run_name, source, file in (
        ("deep/n1/sync", "simulated", run_directory.SIMULATED),
        ("deep/n2/local-4", "real", run_directory.REAL),
    ):
        found = break_down(run_directory.read_trace(runs / run_name / file))
        row = table.loc[(run_name, source)]
        assert row.step_s == found.step_s[0]
        assert row.wait_s == found.per_step_s("wait")[0]
    of_local, of_sync = (table.loc[f"deep/n2/{label}"] for label in ("local-4", "sync"))
    assert of_local.speedup["real"] == of_sync.step_s["real"] / of_local.step_s["real"]
    assert of_local.speedup["real"] == pytest.approx(of_local.speedup["simulated"] * 1.25 / 1.5)
    assert of_local.error_ratio.tolist() == pytest.approx([1 / 1.5 - 1] * 2)
    assert of_sync.error_ratio.tolist() == pytest.approx([1 / 1.25 - 1] * 2)
    assert math.isnan(table.error_ratio["deep/n1/sync", "simulated"])
    assert table.engine["deep/n2/sync", "real"] == "real gloo on cpu"


def test_one_run_is_a_table_of_its_own(runs):
    table = frame(runs / "deep" / "n1" / "sync")
    assert (table.point.tolist(), table.run.tolist(), table.speedup.tolist()) == (["."], ["."], [1.0])


def test_several_folders_are_one_table_that_names_them(runs, swept, capsys):
    table = frame(swept, runs)
    assert table.columns[0] == "folder"
    assert table.folder.tolist() == [str(swept)] * 16 + [str(runs)] * 6
    assert pd.api.types.is_string_dtype(table.point)
    assert table["cluster.nodes"].tolist() == [1, 1, 1, 1, 2, 2, 2, 2] * 2 + [1, 1, 2, 2, 2, 2]
    assert table["schedules[1].period"].isna().sum() == 6
    assert call(capsys, "results", swept, runs).out.startswith("22 rows, simulated and measured;")
    assert call(capsys, "results", swept, swept, "--csv", "-").out.splitlines()[0].startswith("point,")


def test_a_damaged_run_is_a_row_that_failed(runs, capsys):
    (runs / "deep" / "n1" / "sync" / run_directory.SIMULATED).write_bytes(b"half")
    (runs / "deep" / "n2" / "sync" / run_directory.DELAYS).unlink()
    table = frame(runs)
    failed = table[table.failed != ""].set_index("run")
    assert failed.failed.to_dict() == {"deep/n1/sync": "TraceError", "deep/n2/sync": "ScenarioError"}
    assert "delays.npz missing" in failed.error["deep/n2/sync"]
    assert table[table.point == "deep/n1"].speedup.isna().all()


def test_runs_without_a_trace_are_counted(runs, capsys):
    (runs / "deep" / "n1" / "sync" / run_directory.SIMULATED).unlink()
    answer = call(capsys, "results", runs)
    assert f"{runs}: 1 of 4 runs have no trace yet" in answer.err
    assert answer.out.startswith("5 rows, simulated and measured;")


def test_a_simulation_in_place_of_a_measurement_is_refused(runs):
    run_path = runs / "deep" / "n1" / "sync"
    shutil.copy(run_path / run_directory.SIMULATED, run_path / run_directory.REAL)
    row = frame(runs).set_index(["run", "source"]).loc[("deep/n1/sync", "real")]
    assert row.failed == "TraceError"
    assert "no measurement" in row.error


def test_schedules_of_one_label_that_differ_have_a_column_for_it(tmp_path, capsys):
    for period in (2, 3):
        text = edited(("{kind: local_sgd, period: 4}", f"{{kind: local_sgd, period: {period}, label: mine}}"), text=TWO)
        call(capsys, "simulate", write(tmp_path / "small.yaml", text), "-o", tmp_path / "runs" / f"p{period}")
    table = frame(tmp_path / "runs")
    assert table[table.schedule == "mine"]["schedule.period"].tolist() == [2, 3]
    assert table[table.schedule == "sync"]["schedule.period"].isna().all()


# ---------------------------------------------------------------- sweeps that are run for real


def test_plans_of_a_sweep_are_run_directories_that_keep_what_their_point_sets(mine, tmp_path):
    write(tmp_path / "small.yaml", TWO)
    sweep = load(write(tmp_path / "study.yaml", SWEEP))
    planned = write_plans(sweep, mine)
    assert (len(planned.runs), planned.failed) == (16, ())
    assert run_directory.find(mine) == sorted(planned.runs)
    path = mine / "runs" / "5" / "local-4"
    assert run_directory.read(path).scenario.cluster.network.bandwidth_Bps == 12.5e9
    main(["simulate", str(path)])
    measured(path, 2.0)
    table = frame(mine)
    assert len(table) == 17
    of_point = table[(table.point == 5) & (table.schedule == "local-4")]
    assert of_point.source.tolist() == ["simulated", "real"]  # its own simulation is one seed of the sweep's
    assert of_point.seeds.tolist() == [3, 1]
    assert of_point.case.tolist() == ["fast"] * 2
    for name in VARIED:
        assert of_point[name].nunique() == 1, name
    assert of_point.error_ratio.tolist()[1:] == pytest.approx([-0.5])


@pytest.fixture
def confirmed(tmp_path) -> Path:
    """A sweep of two points, simulated as runs as well, and measured at the second."""
    folder = computed(tmp_path, "{scenario: small.yaml, vary: {cluster.nodes: [1, 2]}, seeds: 3, baseline: local-4}")
    for path in write_plans(load(tmp_path / "study.yaml"), folder).runs:
        main(["simulate", str(path)])
        if path.parent.name == "1":
            measured(path, 1.25 if path.name == "sync" else 1.5)
    return folder


def test_runs_in_the_folder_of_a_sweep_stand_at_their_points_and_are_compared_with_its_baseline(confirmed, capsys):
    table = frame(confirmed)
    assert table.point.tolist() == [0, 0, 1, 1, 1, 1]
    assert table.source.tolist() == ["simulated"] * 4 + ["real"] * 2
    assert table.schedule.tolist() == ["sync", "local-4"] * 3
    assert table.speedup.tolist()[1::2] == [1.0, 1.0, 1.0]
    assert table.speedup[4] == pytest.approx(table.step_s[5] / table.step_s[4])
    assert table.speedup[4] != 1.0
    out = call(capsys, "results", confirmed, "--fastest").out
    assert out.startswith("the fastest schedule at 2 points, simulated and measured;")
    assert len(out.split("\n\n")[1].splitlines()) == 2 + 3


def test_a_measurement_is_compared_with_the_seed_of_the_sweep_that_it_repeats(confirmed):
    with_traces = frame(confirmed).error_ratio.tolist()
    for trace in confirmed.rglob(run_directory.SIMULATED):
        trace.unlink()
    without = frame(confirmed).error_ratio.tolist()
    assert without[4:] == pytest.approx([1 / 1.25 - 1, 1 / 1.5 - 1]) == with_traces[4:]


def test_a_simulation_that_is_another_than_that_of_the_sweep_stands_beside_it(confirmed):
    edit_rows(confirmed, lambda _, record: record | {"run_s": [1.01 * each for each in record["run_s"]]})
    table = frame(confirmed)
    assert table.seeds.tolist() == [3, 3, 1, 1] * 1 + [3, 3, 1, 1, 1, 1]


def test_a_simulation_stays_where_the_row_of_the_sweep_is_not_there(confirmed):
    edit_rows(confirmed, lambda number, record: record if number else None)
    table = frame(confirmed)
    assert table[table.point == 0].seeds.tolist() == [3, 1]
    assert table[table.point == 0].schedule.tolist() == ["local-4", "sync"]


def test_runs_that_are_not_in_folders_have_no_column_of_points_on_the_screen(runs, capsys):
    assert call(capsys, "results", runs).out.splitlines()[2].split()[0] == "point"
    out = call(capsys, "results", runs / "deep" / "n2").out.splitlines()
    assert out[2].split()[:2] == ["source", "schedule"]
    assert out[0] == "4 rows, simulated and measured; speed-up over sync"


def test_results_say_with_which_links_simulation_and_measurement_are_compared(runs, capsys):
    said = "sim. error: with the links of the scenario"
    assert said in call(capsys, "results", runs / "deep" / "n2").err
    assert said not in call(capsys, "results", runs / "deep" / "n1").err


def test_plans_are_the_same_when_written_again_and_others_are_not_replaced(tmp_path):
    write(tmp_path / "small.yaml", edited(("steps: 12", "steps: 2"), text=TWO))
    two = "{scenario: small.yaml, vary: {cluster.nodes: [1, 2]}}"
    sweep = load(write(tmp_path / "study.yaml", two))
    write_plans(sweep, tmp_path)
    before = {file: file.read_bytes() for file in (tmp_path / "runs").rglob("*") if file.is_file()}
    write_plans(sweep, tmp_path)
    assert before == {file: file.read_bytes() for file in (tmp_path / "runs").rglob("*") if file.is_file()}
    other = load(write(tmp_path / "study.yaml", two.replace("[1, 2]", "[1, 3]")))
    planned = write_plans(other, tmp_path)
    assert len(planned.failed) == 2
    assert "holds another plan" in planned.failed[0]


def test_the_command_writes_plans_beside_the_results(tmp_path, capsys):
    write(tmp_path / "small.yaml", edited(("steps: 12", "steps: 2"), text=SMALL))
    vary = "{'schedules[2].levels': [{2: 4, 4: world}, {2: 3}]}"
    sweep = write(tmp_path / "s.yaml", f"{{scenario: small.yaml, vary: {vary}, seeds: 1}}")
    answer = call(capsys, "sweep", sweep, "-o", tmp_path / "out", "--workers", 0, "--plans", "--json")
    assert answer.code == 1  # a row failed
    assert json.loads(answer.out)["runs"] == len(run_directory.find(tmp_path / "out")) == 5
    assert f"wrote 5 run directories in {tmp_path / 'out' / 'runs'}" in answer.err
    assert "warning: 1 row without a run directory: point 1, hsgd-2-3: " in answer.err
    assert "5 of 5 runs have no trace yet" in call(capsys, "results", tmp_path / "out").err


def test_schedules_that_fail_are_left_out_of_the_plans(tmp_path):
    write(tmp_path / "small.yaml", SMALL)
    vary = "{'schedules[2].levels': [{2: 4, 4: world}, {2: 3}]}"
    planned = write_plans(load(write(tmp_path / "s.yaml", f"{{scenario: small.yaml, vary: {vary}}}")), tmp_path)
    assert len(planned.runs) == 5
    assert [each.partition(": ")[0] for each in planned.failed] == ["point 1, hsgd-2-3"]


def test_too_many_plans_are_refused_before_any_is_written(tmp_path):
    write(tmp_path / "small.yaml", TWO.replace("batch_size: 32", "batch_size: 32\n  measured_batch_size: 32"))
    vary = "{workload.batch_size: {integers: [1, 9999]}}"
    sweep = f"{{scenario: small.yaml, vary: {vary}, sample: {{kind: random, points: 501}}}}"
    with pytest.raises(ScenarioError, match="more than 1,000 run directories, of 501 points"):
        write_plans(load(write(tmp_path / "s.yaml", sweep)), tmp_path)
    assert not (tmp_path / "runs").exists()


def test_points_of_the_same_number_in_other_folders_are_other_points(tmp_path, capsys):
    for name, forward in (("a", "20 ms"), ("b", "40 ms")):
        write(tmp_path / "small.yaml", edited(("steps: 12", "steps: 2"), ("20 ms", forward), text=TWO))
        sweep = load(write(tmp_path / "s.yaml", "{scenario: small.yaml, vary: {cluster.nodes: [1]}}"))
        for path in write_plans(sweep, tmp_path / "both" / name).runs:
            call(capsys, "simulate", path)
    table = frame(tmp_path / "both")
    assert table.point.tolist() == [0] * 4
    assert table[table.schedule == "sync"].speedup.tolist() == [1.0, 1.0]
    assert len(fastest(read_results([tmp_path / "both"]))) == 2


# ---------------------------------------------------------------- errors


def test_a_folder_that_holds_nothing_is_refused(tmp_path, capsys):
    answer = call(capsys, "results", tmp_path / "nowhere")
    assert answer.code == 2
    assert f"{tmp_path / 'nowhere'}: there is no such folder" in answer.err
    answer = call(capsys, "results", tmp_path)
    assert answer.code == 2
    assert f"{tmp_path}: holds neither a sweep nor runs" in answer.err


def test_a_folder_with_sweeps_in_it_is_refused_with_their_names(mine, capsys):
    shutil.copytree(mine, mine.parent / "other")
    answer = call(capsys, "results", mine.parent)
    assert answer.code == 2
    assert f"holds sweeps, but is none: write which, e.g. simdist results {mine.parent / 'other'} {mine}" in answer.err


def test_a_damaged_point_is_a_row_that_failed(runs):
    (runs / "deep" / "n1" / "point.json").write_text("[]")
    table = frame(runs)
    assert table[table.point == "deep/n1"].failed.tolist() == ["TraceError"] * 2
    assert "is no point of a sweep" in table.error[0]


def test_points_whose_gathers_span_many_machines_say_which_one_to_measure(tmp_path, capsys):
    path = tmp_path / "sweep.yaml"
    cluster = "{preset: dgx-a100, nodes: 2}"
    workload = "{tensors: [{name: w, count: 1000}], batch_size: 1, forward: 1 ms}"
    base = f"{{cluster: {cluster}, workload: {workload}, schedules: [fsdp, {{kind: hsdp, shard: 8}}], steps: 2}}"
    path.write_text(f"scenario: {base}\nvary: {{cluster.nodes: [4, 8]}}\nseeds: 2\n")
    folder = tmp_path / "out"
    assert call(capsys, "sweep", path, "-o", folder, "--workers", 0).code == 0
    (said,) = (each for each in read_results([folder]).remarks if each.place == "cluster.network.ring_step")
    assert said.points == (1,)
    assert str(said).startswith("unclear how long gathers over many machines take")
    assert "an all-gather of 4 kB over 64 GPUs, and over half of them" in str(said)
