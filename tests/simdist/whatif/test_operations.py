"""What waits for what in a table of operations, and its replay, against a recursion over single operations."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from operation_tables import PipelineJob, makespan, random_seconds, steady, table, timed, written

from simdist.errors import TraceError
from simdist.whatif.operations import OperationGraph, operation_graph, replay
from simdist.whatif.table import read_table

TRANSFERS = ["forward-send", "forward-recv", "backward-send", "backward-recv"]
SHAPES = [
    PipelineJob(),
    PipelineJob(n_dp=1),
    PipelineJob(n_stages=1, n_batches=3),
    PipelineJob(n_dp=3, n_stages=4, n_batches=5),
    PipelineJob(n_dp=2, n_stages=3, n_batches=3, n_chunks=2),
    PipelineJob(n_dp=2, n_stages=2, n_batches=4, n_chunks=3, overlaps=True),
]


def graph_of(folder: Path, frame: pd.DataFrame) -> OperationGraph:
    return operation_graph(read_table(written(folder, frame)))


def step_s(graph: OperationGraph) -> list[float]:
    return replay(graph, graph.work_s[:, np.newaxis])[:, 0].tolist()


@pytest.mark.parametrize("job", SHAPES, ids=str)
@pytest.mark.parametrize("is_told", [True, False])
def test_replay_agrees_with_a_recursion_over_single_operations(tmp_path: Path, job: PipelineJob, is_told: bool) -> None:
    unknown = [] if is_told else ["gmc", "mb_id", "rank", "seq_id", *["mc"] * (job.n_chunks == 1)]
    frame = table(job, random_seconds(1)).drop(columns=unknown)
    graph = graph_of(tmp_path, frame)
    assert step_s(graph) == pytest.approx([makespan(timed(job, random_seconds(1)))], rel=1e-12)
    assert graph.gap_s.max() == pytest.approx(0.0, abs=1e-12)
    rows = frame.assign(end=frame.start_ts + frame.duration, seq_id=table(job, random_seconds(1)).seq_id)
    rows = rows.sort_values(["step", "dp_rank", "stage", "start_ts", "end", "seq_id"])  # as the table of the graph
    for seconds in (random_seconds(2), random_seconds(3)):
        others_s = [seconds(row.dp_rank, row.stage, row.optype, row.seq_id) for row in rows.itertuples()]
        found_s = replay(graph, np.array(others_s)[:, np.newaxis])[0, 0]
        assert found_s == pytest.approx(makespan(timed(job, seconds)), rel=1e-12)


def with_idle_transfers(frame: pd.DataFrame, kind: str, *, misses_one: bool) -> pd.DataFrame:
    """Add transfers of nothing, as profilers record them: one for every computing operation that has none."""
    way, end = kind.split("-")
    rows = frame[frame.optype == f"{way}-compute"].sort_values("start_ts")
    worker = [rows.step, rows.dp_rank, rows.stage]
    ends_s = rows.start_ts + rows.duration
    at_s = ends_s.groupby(worker).shift(1, fill_value=0.0) if end == "recv" else ends_s
    at_end = rows.gmc == (0 if kind in ("forward-recv", "backward-send") else rows.gmc.max())
    if misses_one:
        at_end &= rows.groupby(worker).cumcount(ascending=end == "recv") > 0
    return pd.concat([frame, rows.assign(optype=kind, start_ts=at_s, duration=0.0, seq_id=-1, gmc=-1)[at_end]])


@pytest.mark.parametrize("kind", TRANSFERS)
@pytest.mark.parametrize("misses_one", [False, True])
def test_transfers_of_nothing_are_left_out(tmp_path: Path, kind: str, misses_one: bool) -> None:
    job = PipelineJob(n_dp=2, n_stages=3, n_batches=3, n_chunks=2)
    frame = table(job, random_seconds(4))
    longer = with_idle_transfers(frame, kind, misses_one=misses_one)
    graph, expected = graph_of(tmp_path, longer), graph_of(tmp_path, frame)
    assert len(graph.work_s) == len(expected.work_s) < len(longer)
    assert step_s(graph) == step_s(expected)
    count = len(longer) - len(frame)
    assert graph.table.notes == (
        f"left out {count} operations that transfer nothing, before the first stage or after the last: {kind}",
    )


def test_receive_after_all_computing_and_send_before_it_are_left_out(tmp_path: Path) -> None:
    frame = table(PipelineJob(), random_seconds(4))
    worker = frame[(frame.dp_rank == 0) & (frame.stage == 1) & (frame.optype == "forward-recv")].iloc[:1]
    late = worker.assign(start_ts=frame.start_ts.max(), seq_id=9)
    early = worker.assign(optype="backward-send", start_ts=0.0, duration=0.01, seq_id=9)
    graph = graph_of(tmp_path, pd.concat([frame, late, early]))
    assert step_s(graph) == step_s(graph_of(tmp_path, frame))
    assert "left out 2 operations" in graph.table.notes[0]


@pytest.mark.parametrize("kinds", ["forward-send", "forward-recv backward-recv", " ".join(TRANSFERS)])
def test_without_the_rows_of_a_transfer_it_takes_no_time_and_that_is_said(tmp_path: Path, kinds: str) -> None:
    frame = table(PipelineJob(n_stages=3, n_batches=4), instant_transfers)
    graph = graph_of(tmp_path, frame[~frame.optype.isin(kinds.split())])
    assert sorted(graph.table.notes) == sorted(f"no {kind} in the table: it takes no time" for kind in kinds.split())
    assert step_s(graph) == pytest.approx([(frame.start_ts + frame.duration).max()])


def instant_transfers(dp: int, stage: int, kind: str, number: int) -> float:
    return 0.0 if kind.endswith(("send", "recv")) else random_seconds(5)(dp, stage, kind, number)


@pytest.mark.parametrize(
    ("is_lost", "reason"),
    [
        ("optype == 'forward-recv' and seq_id == 1 and dp_rank == 1", "stage 1: 1 forward-recv for 2 transfers"),
        ("optype == 'forward-compute' and seq_id == 1 and stage == 0", "stage 0: 2 forward-send for 1 transfers"),
        ("optype == 'params-all-gather' and dp_rank == 0", "params-all-gather number 1 of 1 workers, not of 2"),
        ("optype == 'optimizer-clip-main-grad' and rank == 3", "number 1 of 3 workers, not of 4"),
        ("dp_rank == 1 and stage == 0", "dp_rank 1, stage 0: has no rows: every step needs those of all workers"),
    ],
)  # fmt: skip
def test_a_step_that_lacks_rows_is_left_out_and_named(tmp_path: Path, is_lost: str, reason: str) -> None:
    frame = table(PipelineJob(), random_seconds(6), steps=(3, 40, 41))
    lost = frame.query(f"step == 40 and {is_lost}").index
    graph = graph_of(tmp_path, frame.drop(index=lost))
    assert graph.table.step_numbers.tolist() == [3, 41]
    (note,) = graph.table.notes
    assert note.startswith("left out 1 of 3 steps (40): step 40, ")
    assert note.endswith(reason)
    with pytest.raises(TraceError, match=r"no step can be replayed: step 40, "):
        graph_of(tmp_path, frame.drop(index=lost).query("step == 40"))


def test_transfers_without_computing_are_refused(tmp_path: Path) -> None:
    frame = table(PipelineJob(), random_seconds(6))
    with pytest.raises(TraceError, match="has forward-send, but not the computing of that direction: write it, too"):
        graph_of(tmp_path, frame[frame.optype != "forward-compute"])


def test_what_computes_the_same_micro_batch_twice_is_told_by_order(tmp_path: Path) -> None:
    frame = table(PipelineJob(), random_seconds(7))
    assert step_s(graph_of(tmp_path, frame.assign(mb_id=0))) == step_s(graph_of(tmp_path, frame))


def test_workers_that_call_collectives_in_different_orders_are_refused(tmp_path: Path) -> None:
    frame = table(PipelineJob(), steady())
    kinds = ["grads-reduce-scatter", "optimizer-clip-main-grad"]
    one = frame.optype.isin(kinds) & (frame.dp_rank == 1)
    frame.loc[one, "start_ts"] += frame.loc[one, "optype"].map(dict(zip(kinds, (0.2, 0.1), strict=True)))
    with pytest.raises(TraceError, match=r"step 7, stage 0: .*: waits for itself"):
        graph_of(tmp_path, frame)


def test_gaps_between_operations_are_replayed_where_they_were(tmp_path: Path) -> None:
    frame = table(PipelineJob(), steady())
    is_tail = frame.optype.isin(["optimizer-clip-main-grad", "optimizer"])
    frame.loc[is_tail, "start_ts"] += 0.5
    graph = graph_of(tmp_path, frame.assign(start_ts=frame.start_ts + 100.0))
    work_s = graph.work_s[:, np.newaxis]
    assert (replay(graph, work_s)[0, 0], replay(graph, work_s, graph.gap_s)[0, 0]) == pytest.approx((9.0, 9.5))


def test_clocks_that_differ_are_told_of(tmp_path: Path) -> None:
    frame = table(PipelineJob(), steady(forward_recv=0.1))
    frame.loc[(frame.optype == "forward-recv") & (frame.dp_rank == 1), "start_ts"] -= 0.3
    (note,) = graph_of(tmp_path, frame).table.notes
    assert note == "ends of 2 operations lie before the start of their last member: clocks differ; they count as 0 s"
