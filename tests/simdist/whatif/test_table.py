"""Tables of operations: what is read of CSV and Parquet, and what is refused, where and why."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from operation_tables import PipelineJob, random_seconds, table, written

from simdist.errors import TraceError
from simdist.whatif.table import KINDS, read_table

FRAME = table(PipelineJob(), random_seconds(1), steps=(5, 9))


LENGTH = "seconds, 0 or more: it ends after it starts; at most 1e+16"


def refusal(folder: Path, frame: pd.DataFrame, name: str = "job.csv") -> str:
    path = written(folder, frame, name)
    with pytest.raises(TraceError) as raised:
        read_table(path)
    return str(raised.value).removeprefix(f"{path}: ")


def changed(column: str, row: int, value: object) -> pd.DataFrame:
    frame = FRAME.astype({column: object})
    frame.loc[row, column] = value
    return frame


def test_csv_and_parquet_are_read_alike_in_any_order_of_rows(tmp_path: Path) -> None:
    small = {"dp_rank": "int8", "stage": "int8", "step": "int64", "optype": "category", "gmc": "int16"}
    one = read_table(written(tmp_path, FRAME))
    for name, frame in (("job.parquet", FRAME.astype(small)), ("shuffled.csv", FRAME.sample(frac=1, random_state=1))):
        other = read_table(written(tmp_path, frame.assign(comment="of no interest"), name))
        assert other.kinds == one.kinds
        for field in (
            "step_numbers",
            "ranks",
            "step",
            "dp_rank",
            "stage",
            "kind",
            "start_s",
            "duration_s",
            "model_chunk",
        ):
            np.testing.assert_array_equal(getattr(other, field), getattr(one, field), err_msg=field)


def test_rounded_to_float32_times_are_compared_less_closely(tmp_path: Path) -> None:
    late = FRAME.assign(start_ts=(FRAME.start_ts + 1e5).astype("float32"))
    assert read_table(written(tmp_path, late, "job.parquet")).resolution_s == pytest.approx(1 / 128)
    assert read_table(written(tmp_path, late.astype({"start_ts": "float64"}), "job.parquet")).resolution_s == 0.0


def test_steps_are_chosen_by_their_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, FRAME)
    assert read_table(path, steps=range(6, 100)).step_numbers.tolist() == [9]
    with pytest.raises(TraceError, match=r"--steps 6:9: the steps in the table are 5 to 9"):
        read_table(path, steps=range(6, 9))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("duration", -0.25, f"row 3, column duration: -0.25: write {LENGTH}"),
        ("duration", float("inf"), f"row 3, column duration: inf: write {LENGTH}"),
        ("start_ts", None, "row 3, column start_ts: nothing: write seconds, at most 1e+16"),
        ("start_ts", "3 ms", "row 3, column start_ts: '3 ms': write seconds, at most 1e+16"),
        ("start_ts", -1e308, "row 3, column start_ts: -1e+308: write seconds, at most 1e+16"),
        ("duration", 1e308, f"row 3, column duration: 1e+308: write {LENGTH}"),
        ("stage", -1, "row 3, column stage: -1: write a whole number, 0 or more"),
        ("step", 1.5, "row 3, column step: 1.5: write a whole number, 0 or more"),
        ("mb_id", -2, "row 3, column mb_id: -2: write a whole number, 0 or more, or -1 if it is unknown"),
        ("gmc", "x", "row 3, column gmc: 'x': write a whole number, 0 or more, or -1 if it is unknown"),
        ("optype", None, f"row 3, column optype: nothing: write one of {', '.join(KINDS)}"),
        ("optype", "send-recv", f"row 3, column optype: 'send-recv': write one of {', '.join(KINDS)}"),
        ("optype", "Forward_Compute", "row 3, column optype: 'Forward_Compute': write forward-compute"),
        ("stage", 7, "stage 2 has no rows, stage 7 has some: write those of all stages"),
        ("rank", 9, "row 3, column rank: 9: write that of the other rows of its dp_rank and stage"),
    ],
)
def test_a_wrong_value_is_named_with_its_row_and_column(
    tmp_path: Path, column: str, value: object, message: str
) -> None:
    assert refusal(tmp_path, changed(column, 2, value)) == message


@pytest.mark.parametrize("digits", ["9" * 400, "-" + "9" * 5000, "1e999"], ids=["400", "negative", "exponent"])
@pytest.mark.parametrize("column", ["start_ts", "duration", "step", "dp_rank", "mb_id"])
def test_numbers_that_no_float_holds_are_refused(tmp_path: Path, column: str, digits: str) -> None:
    said = refusal(tmp_path, changed(column, 2, digits))
    assert said.startswith(f"row 3, column {column}: ")
    assert ": write " in said
    assert len(said) < 180


def test_the_same_operation_twice_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, pd.concat([FRAME, FRAME.iloc[:1]])).startswith(
        f"row {len(FRAME) + 1}, column seq_id: 0: write another number, the worker has one of that kind with it"
    )


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, FRAME.drop(columns=["stage", "duration"])).startswith(
        "lacks stage, duration: needs dp_rank"
    )
    assert refusal(tmp_path, FRAME.iloc[:0]) == "has no rows: write one for each operation"
    assert refusal(tmp_path, FRAME.assign(optype="train")) == (
        f"row 1, column optype: 'train': write one of {', '.join(KINDS)}"
    )
    for name, content in (("empty.csv", b""), ("text.parquet", b"step,stage"), ("latin.csv", b"st\xe9p\n1\n")):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(TraceError, match=f"{name}: is no table of {path.suffix[1:]}: "):
            read_table(path)
    with pytest.raises(TraceError, match=r"absent\.csv: there is no such file"):
        read_table(tmp_path / "absent.csv")


def test_cells_and_lines_are_no_larger_than_numbers_need(tmp_path: Path) -> None:
    huge = FRAME.head(2).assign(optype="x" * (70 << 20))
    assert "column optype holds 7" in refusal(tmp_path, huge, "huge.parquet")
    assert "line 2 has more than" in refusal(tmp_path, huge.astype({"step": "int64"}))


def test_ranks_are_of_one_worker_each(tmp_path: Path) -> None:
    assert refusal(tmp_path, FRAME.assign(rank=0)).startswith("rank 0 has several pairs of dp_rank and stage")


def test_times_that_cannot_be_seconds_and_jobs_that_only_go_forward_are_doubted(tmp_path: Path) -> None:
    table_of = read_table(
        written(tmp_path, FRAME.assign(start_ts=1e6 * FRAME["start_ts"], duration=1e6 * FRAME["duration"]))
    )
    assert any("must be in seconds" in note for note in table_of.notes)
    forward = read_table(written(tmp_path, FRAME[FRAME["optype"] == "forward-compute"], "forward.csv"))
    assert any("no backward-compute" in note for note in forward.notes)
    assert read_table(written(tmp_path, FRAME)).notes == ()


def test_an_unknown_kind_counts_as_computing_and_is_told(tmp_path: Path) -> None:
    (note,) = read_table(written(tmp_path, changed("optype", 2, "load-data"))).notes
    assert note.startswith("load-data: no known kind of operation: taken as computing, which waits for no other worker")
    assert "forward-compute, backward-compute" in note


def test_without_ranks_workers_are_numbered_stage_by_stage(tmp_path: Path) -> None:
    found = read_table(written(tmp_path, FRAME.drop(columns="rank")))
    assert found.ranks.tolist() == [[0, 2], [1, 3]]
