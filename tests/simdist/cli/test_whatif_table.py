"""`simdist whatif` of a table of operations: what it prints, and what it refuses."""

import json
from pathlib import Path

import pandas as pd
import pytest
from commandline import call
from operation_tables import PipelineJob, steady, table, written

SLOW_STAGE = table(PipelineJob(), lambda dp, stage, *of: (1 + stage) * steady()(dp, stage, *of), steps=(2, 30))


def test_json_has_what_the_text_has(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path, SLOW_STAGE, "job.parquet")
    found = json.loads(call(capsys, "whatif", path, "--json", "--steps", "30:").out)
    assert found["steps"] == 1
    assert (found["slowdown"], found["fixed_by_last_stage"]) == pytest.approx((15 / 13.5, 2))
    assert [each["rank"] for each in found["ranks"]] == [0, 2, 1, 3]
    assert [each["alone"] for each in found["ranks"]] == pytest.approx([1, 16.5 / 13.5, 1, 16.5 / 13.5])
    assert [(each["step"], each["slowest_rank"]) for each in found["by_step"]] == [(30, 2)]
    assert [each["slowdown"] for each in found["dp_ranks"]] == pytest.approx([15 / 13.5, 15 / 13.5])


def test_the_ideal_of_computing_may_be_the_median(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    late = table(PipelineJob(), lambda dp, stage, kind, number: steady()(dp, stage, kind, number) + dp * stage * number)
    path = written(tmp_path, late)
    by_median = json.loads(call(capsys, "whatif", path, "--json", "--ideal", "median").out)
    assert (by_median["ideal_compute"], by_median["ideal_s"]) == ("median", 9)
    assert json.loads(call(capsys, "whatif", path, "--json").out)["ideal_s"] == pytest.approx(9 + 3 * 2 / 8)


def test_what_was_left_out_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path, SLOW_STAGE.query("step == 2 or rank != 3"))
    answer = call(capsys, "whatif", path, "--json")
    note = "left out 1 of 2 steps (30): step 30, dp_rank 1, stage 1: has no rows: every step needs those of all workers"
    assert answer.err == f"warning: {path}: {note}\n"
    assert json.loads(answer.out)["notes"] == [note]


def test_a_replay_that_is_off_is_warned_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    load = SLOW_STAGE.iloc[:1].assign(optype="load-data", start_ts=0.0, duration=8.0)
    answer = call(capsys, "whatif", path := written(tmp_path, pd.concat([SLOW_STAGE, load])))
    assert f"warning: {path}: load-data: no known kind of operation: taken as computing" in answer.err
    assert (
        f"warning: {path}: the replay is off by more than 2.0 % in 1 of 2 steps, most in step 2, by 20.0 %: operations "
        "do not wait for each other as assumed\n"
    ) in answer.err


@pytest.mark.parametrize("option", ["schedule", "trace", "schedules", "resamples", "block", "seed", "cluster"])
def test_options_of_scenarios_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str) -> None:
    value = {"trace": "real", "resamples": "200", "block": "2", "seed": "1"}.get(option, "sync")
    answer = call(capsys, "whatif", path := written(tmp_path, SLOW_STAGE), f"--{option}", value)
    message = "a table of operations is replayed, not simulated: leave it out; --steps, --ideal and --json apply"
    assert (answer.code, answer.err) == (2, f"error: {path}: --{option}: {message}\n")


def test_the_ideal_of_scenarios_is_no_choice(capsys: pytest.CaptureFixture[str]) -> None:
    answer = call(capsys, "whatif", "docs/examples/recorded.yaml", "--ideal", "mean")
    message = "is for tables of operations, .csv or .parquet; leave it out"
    assert (answer.code, answer.err) == (2, f"error: docs/examples/recorded.yaml: --ideal mean: {message}\n")


def test_a_missing_table_is_no_missing_scenario(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answer = call(capsys, "whatif", tmp_path / "no.parquet")
    assert (answer.code, answer.err) == (2, f"error: {tmp_path / 'no.parquet'}: there is no such file\n")
