"""Times and bandwidths of collectives: exact by hand, equal to closed forms when simulated; and their command."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from commandline import LABELS, SMALL, Answer, call, write
from traces import plan_of, trace_of

from simdist.plan import AllGather, AllReduce, Broadcast, Buffer, Op, Plan, Reduce, ReduceScatter, Wait
from simdist.plan.group import Group
from simdist.runs import run_directory
from simdist.runs.building import simulate
from simdist.scenario import loads
from simdist.traces.collectives import CollectiveRow, bus_factor, collective_rows, waiting_share
from simdist.traces.trace import Trace

NAN = float("nan")
BUFFERS = (
    Buffer("whole", 1_000, initialized=True),
    Buffer("slice", 250, initialized=True),
    Buffer("half", 1_000, "float16", initialized=True),
    Buffer("top", 10, sparse=True, initialized=True),
    Buffer("tops", 40, sparse=True),
)


def trace_with(op: Op, *times: tuple) -> Trace:
    """Return a trace of four ranks that do nothing but `op`, once for each of `times`."""
    return trace_of(Plan.from_steps("one", world_size=4, buffers=BUFFERS, steps=[(op,)] * len(times)), times)


def only_row(trace: Trace) -> CollectiveRow:
    (row,) = collective_rows(trace)
    return row


def test_a_call_takes_from_when_its_last_member_is_ready_until_its_last_member_is_done():
    """As measured: members end one after the other. The last is ready at 4 s and all are done at 6 s."""
    row = only_row(trace_with(AllReduce("whole", Group(4)), ([1.0, 4.0, 2.0, 3.0], 4.0, [5.0, 5.5, 6.0, 5.0])))
    assert (row.calls, row.time_s) == (1, 2.0)
    assert (row.algbw_Bps, row.busbw_Bps) == (4_000 / 2.0, 1.5 * 4_000 / 2.0)
    assert (row.wait_median_s, row.wait_mean_s) == (1.5, 1.5)
    assert (row.transfer_total_s, row.wait_total_s) == (4 * 2.0, 3.0 + 0.0 + 2.0 + 1.0)
    assert row.wait_share == 6 / 14


def test_a_member_that_leaves_early_does_not_make_a_call_longer():
    """As measured, a member of a reduce may have sent all it has before the root is ready, at 5 s."""
    row = only_row(trace_with(Reduce("whole", Group(4)), ([5.0, 0.0, 0.0, 4.0], [5, 1, 1, 5], [6, 1, 1, 5.5])))
    assert (row.time_s, row.wait_total_s) == (1.0, 3.0)


def test_every_group_makes_calls_of_its_own():
    """Ranks 0 and 2 meet at 2 s and take 1 s; ranks 1 and 3 meet at 5 s and take 3 s."""
    row = only_row(trace_with(AllReduce("whole", Group(2, 2)), ([0.0, 5.0, 2.0, 1.0], [2, 5, 2, 5], [3, 8, 3, 8])))
    assert (row.calls, row.time_s) == (2, 2.0)
    assert (row.wait_median_s, row.wait_mean_s) == (1.0, 1.5)
    assert (row.transfer_total_s, row.wait_total_s) == (2 * 1.0 + 2 * 3.0, 2.0 + 4.0)


def test_time_is_the_median_over_calls():
    row = only_row(trace_with(Broadcast("whole", Group(4)), (0.0, 0.0, 1.0), (2.0, 2.0, 9.0), (9.0, 9.0, 11.0)))
    assert (row.calls, row.time_s, row.busbw_Bps) == (3, 2.0, 2_000.0)


SIZES = {
    "all_reduce": (AllReduce("whole", Group(4)), 4_000, 1_000, 1.5),
    "all_reduce of halves": (AllReduce("half", Group(2)), 2_000, 1_000, 1.0),
    "reduce_scatter": (ReduceScatter("whole", "slice", Group(4)), 4_000, 250, 0.75),
    "all_gather": (AllGather("slice", "whole", Group(4)), 4_000, 250, 0.75),
    "sparse all_gather": (AllGather("top", "tops", Group(4)), 40 * 8, 10, 0.75),
    "reduce": (Reduce("whole", Group(4)), 4_000, 1_000, 1.0),
    "broadcast": (Broadcast("whole", Group(2)), 4_000, 1_000, 1.0),
}


@pytest.mark.parametrize("case", SIZES)
def test_size_count_and_factor_are_those_of_nccl_tests(case):
    op, nbytes, count, factor = SIZES[case]
    row = only_row(trace_with(op, (0.0, 0.0, 2.0)))
    assert (row.kind.nbytes, row.kind.count, row.kind.sparse) == (nbytes, count, case.startswith("sparse"))
    assert (row.algbw_Bps, row.busbw_Bps) == (nbytes / 2, nbytes / 2 * factor)


def test_bus_bandwidth_of_one_rank_is_none():
    assert [bus_factor(op, 1) for op in ("all_reduce", "reduce_scatter", "all_gather")] == [0.0] * 3


def test_collectives_are_told_apart_by_all_that_a_line_of_nccl_tests_says_and_sorted():
    ops = (
        Broadcast("whole", Group(4)),
        AllReduce("whole", Group(4)),
        AllReduce("half", Group(4)),
        AllReduce("whole", Group(2, 2)),
        AllReduce("whole", Group(2)),
        AllReduce("whole", Group(4), "sum"),  # the same line as the mean
        AllReduce("whole", Group(4), algorithm="tree"),
    )
    plan = Plan.from_steps("many", world_size=4, buffers=BUFFERS, steps=[ops])
    rows = collective_rows(trace_of(plan, [(0.0, 0.0, 1.0)] * len(ops)))
    assert [(row.kind.op, str(row.kind.group), row.kind.nbytes, row.kind.algorithm, row.calls) for row in rows] == [
        ("all_reduce", "group of 2", 4_000, "auto", 2),
        ("all_reduce", "group of 2 at stride 2", 4_000, "auto", 2),
        ("all_reduce", "group of 4", 2_000, "auto", 1),
        ("all_reduce", "group of 4", 4_000, "auto", 2),
        ("all_reduce", "group of 4", 4_000, "tree", 1),
        ("broadcast", "group of 4", 4_000, "auto", 1),
    ]


def test_calls_that_a_member_did_not_finish_do_not_count():
    """Of the second step, the group of ranks 2 and 3 was finished, that of ranks 0 and 1 was not."""
    unfinished = ([4.0, 9.0, 4.0, 5.0], [NAN, NAN, 5.0, 5.0], [NAN, NAN, 8.0, 8.0])
    row = only_row(trace_with(AllReduce("whole", Group(2)), (0.0, 0.0, 1.0), unfinished))
    assert (row.calls, row.time_s, row.wait_total_s, row.transfer_total_s) == (3, 1.0, 1.0, 2 * (1.0 + 1.0 + 3.0))
    apart = ([4.0, 9.0, 6.0, 5.0], [6.0, NAN, 6.0, NAN], [7.0, NAN, 8.0, NAN])
    row = only_row(trace_with(AllReduce("whole", Group(2, 2)), apart))
    assert (row.calls, row.time_s, row.wait_total_s) == (1, 2.0, 2.0)
    nothing = trace_with(AllReduce("whole", Group(2)), (NAN, NAN, NAN))
    assert collective_rows(nothing) == ()
    assert math.isnan(waiting_share(()))


def test_calls_of_no_length_have_no_bandwidth_and_no_share():
    row = only_row(trace_with(AllReduce("whole", Group(4)), (1.0, 1.0, 1.0)))
    assert math.isnan(row.algbw_Bps)
    assert math.isnan(row.busbw_Bps)
    assert math.isnan(row.wait_share)


def test_a_plan_without_collectives_has_no_rows():
    assert collective_rows(trace_of(plan_of((Wait("param"),), world_size=2), [(0.0, 0.0, 1.0)])) == ()


def test_simulated_ring_achieves_what_the_link_and_its_latency_allow():
    """A ring of 2 nodes: 2 (n - 1) hops of a latency each, and 2 (n - 1) / n of the size over each NIC."""
    text = SMALL.replace("gpus_per_node: 4", "gpus_per_node: 1")
    text = text[: text.index("disturbances:")] + "schedules: [{kind: sync}]\n"
    rows = collective_rows(simulate(loads(text)))
    assert sum(row.kind.count for row in rows) == 101_000
    for row in rows:
        seconds = 2 * 25e-6 + row.kind.nbytes / (25e9 / 8)
        assert row.time_s == pytest.approx(seconds, rel=1e-6)
        assert row.busbw_Bps == pytest.approx(row.kind.nbytes / seconds, rel=1e-6)
        assert row.calls == 12
        assert row.wait_total_s == pytest.approx(0.0, abs=1e-12)


# ---------------------------------------------------------------- the command


@pytest.fixture
def runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a directory with the runs of three schedules, simulated; sync was measured, too."""
    call(capsys, "simulate", write(tmp_path / "small.yaml"), "-o", tmp_path / "runs")
    simulated = Trace.load(tmp_path / "runs" / "sync" / run_directory.SIMULATED)
    slower = dataclasses.replace(
        simulated,
        **{name: 2 * getattr(simulated, name) for name in ("ready_s", "start_s", "end_s")},
        source="real gloo on cpu",
    )
    slower.save(tmp_path / "runs" / "sync" / run_directory.REAL)
    return tmp_path / "runs"


def document(answer: Answer) -> dict:
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


def test_rows_of_the_result_are_those_of_the_traces(runs, capsys):
    found = document(call(capsys, "trace", runs, "--collectives", "--json"))
    assert found["run"] == str(runs)
    assert sorted(row["schedule"] for row in found["rows"]) == sorted(LABELS)
    for row in found["rows"]:
        assert row["digest"] == run_directory.read(Path(row["run"])).plan.digest()
        for each in row["traces"]:
            expected = collective_rows(Trace.load(each["trace"]))
            assert [line["time_s"] for line in each["collectives"]] == [line.time_s for line in expected]
            assert each["wait_share"] == waiting_share(expected)


def test_both_traces_of_a_run_are_shown_one_below_the_other(runs, capsys):
    found = document(call(capsys, "trace", runs / "sync", "--collectives", "--json"))["rows"][0]
    simulated, measured = found["traces"]
    assert (simulated["which"], measured["which"]) == ("simulated", "measured")
    assert (simulated["source"], measured["source"]) == ("simulated by fast", "real gloo on cpu")
    for ours, theirs in zip(simulated["collectives"], measured["collectives"], strict=True):
        assert theirs["time_s"] == pytest.approx(2 * ours["time_s"])
        assert theirs["busbw_Bps"] == pytest.approx(ours["busbw_Bps"] / 2)
        assert theirs["wait_share"] == pytest.approx(ours["wait_share"])


def test_table_for_people_is_in_the_units_of_nccl_tests(runs, capsys):
    answer = call(capsys, "trace", runs / "sync", "--collectives")
    lines = answer.out.splitlines()
    assert lines[0] == "sync: 8 ranks, 12 steps; simulated by fast; measured: real gloo on cpu"
    table = [line.split() for line in lines if line.strip().startswith("all_reduce")]
    assert [row[1] for row in table] == ["simulated", "measured"]
    first = collective_rows(Trace.load(runs / "sync" / run_directory.SIMULATED))[0]
    sizes = f"algorithm auto; size (B) {first.kind.nbytes:,}; count {first.kind.count:,}; type float32; calls 12;"
    assert f"In every row: group group of 8; {sizes}" in " ".join(answer.out.split())
    numbers = [f"{first.time_s * 1e6:,.1f}", f"{first.algbw_Bps / 1e9:.2f}", f"{first.busbw_Bps / 1e9:.2f}"]
    assert table[0][:5] == ["all_reduce", "simulated", *numbers]
    share = waiting_share(collective_rows(Trace.load(runs / "sync" / run_directory.REAL)))
    assert lines[-1] == f"waiting, measured: {100 * share:.1f} % of the time that ranks spent in collectives"


def test_one_schedule_is_chosen_by_its_label(runs, capsys):
    found = document(call(capsys, "trace", runs, "--collectives", "--schedule", "local-4", "--json"))
    assert [row["schedule"] for row in found["rows"]] == ["local-4"]


def test_runs_without_a_trace_are_left_out_with_a_warning_and_refused_if_there_is_no_other(runs, capsys):
    (runs / "local-4" / run_directory.SIMULATED).unlink()
    answer = call(capsys, "trace", runs, "--collectives", "--json")
    assert sorted(row["schedule"] for row in document(answer)["rows"]) == sorted(set(LABELS) - {"local-4"})
    how = "`simdist simulate {}` writes one"
    alone = runs / "local-4"
    assert f"warning: {alone}: left out: holds no trace yet; {how.format(alone)}" in answer.err
    answer = call(capsys, "trace", alone, "--collectives")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.strip() == f"error: {alone}: holds no trace yet; {how.format(alone)}"


def test_the_run_of_fused_gradients_shows_the_fusion_buffers(tmp_path, capsys):
    """Of 3 tensors, two fit into a buffer of 100 kB."""
    small = "    - {name: bias, count: 1000}\n"
    text = SMALL.replace(small, small + "    - {name: more, count: 9000}\n")
    text = text[: text.index("schedules:")] + "schedules: [{kind: sync, fusion: {buffer: 100 kB, cycle: null}}]\n"
    call(capsys, "simulate", write(tmp_path / "fused.yaml", text), "-o", tmp_path / "run")
    (row,) = document(call(capsys, "trace", tmp_path / "run", "--collectives", "--json"))["rows"]
    sizes = [(line["count"], line["calls"]) for line in row["traces"][0]["collectives"]]
    assert sizes == [(10_000, 12), (100_000, 12)]


def test_a_run_in_which_nobody_communicated_says_so(runs, capsys):
    """One that ended before its first all-reduce."""
    path = runs / "sync" / run_directory.SIMULATED
    trace = Trace.load(path)
    nothing = np.full_like(trace.end_s, np.nan)
    dataclasses.replace(trace, ready_s=nothing, start_s=nothing, end_s=nothing).save(path)
    (runs / "sync" / run_directory.REAL).unlink()
    answer = call(capsys, "trace", runs / "sync", "--collectives")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "no collectives were done")


def test_every_key_of_the_result_is_documented(runs, capsys):
    def keys_of(value: object) -> set[str]:
        match value:
            case dict():
                return set(value).union(*map(keys_of, value.values()))
            case list():
                return set().union(*map(keys_of, value))
            case _:
                return set()

    page = Path(__file__).resolve().parents[3] / "docs" / "reference" / "data-dictionary.md"
    section = page.read_text(encoding="utf-8").partition("\n## `simdist trace --collectives`")[2].partition("\n## ")[0]
    found = keys_of(document(call(capsys, "trace", runs, "--collectives", "--json")))
    assert found - set(re.findall(r"`(\w+)`", section)) == set()
