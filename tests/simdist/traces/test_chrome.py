import gzip
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from commandline import call
from drawn_plans import legal_plans
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from traces import plan_of, trace_of

from simdist.errors import RunError, TraceError
from simdist.plan import AllReduce, Backward, Delay, Forward, Optimize, Pack, Tick, Unpack, Wait
from simdist.plan.group import Group
from simdist.traces.chrome import chrome_trace, write_chrome
from simdist.traces.trace import Trace

FORWARD = Forward(("param",), ("loss",))
BACKWARD = Backward(("param", "loss"), "grad.0")
MS = 1e-3


def parse(trace: Trace, **choice: object) -> dict:
    return json.loads("".join(chrome_trace(trace, **choice)))


def spans(document: dict) -> list[dict]:
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def threads(document: dict) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in document["traceEvents"]
        if event["name"] == "thread_name"
    }


def lane(document: dict, rank: int, thread: str) -> list[tuple[str, float, float]]:
    """Return name, start and length of the spans of a thread."""
    names = threads(document)
    return [
        (span["name"], span["ts"], span["dur"])
        for span in spans(document)
        if span["pid"] == rank and names[span["pid"], span["tid"]] == thread
    ]


def straggler() -> Trace:
    """Rank 1 sleeps 4 ms after its forward pass; rank 0 waits for it in the all-reduce. Then a step without a delay."""
    step = (FORWARD, Wait("loss"), Delay("host"), BACKWARD, AllReduce("grad.0", Group(2)))
    times = np.array(
        [
            [[0, 0], [0, 0], [2, 2]],
            [[2, 2], [2, 2], [2, 2]],
            [[2, 2], [2, 2], [2, 6]],
            [[2, 6], [2, 6], [5, 9]],
            [[5, 9], [9, 9], [10, 10]],
        ]
    )
    calm = times[:, :, [0, 0]] + 10
    calm[-1] = [[15, 15], [15, 15], [16, 16]]
    return trace_of(plan_of(step, step, world_size=2), [*(times * MS).tolist(), *(calm * MS).tolist()])


def test_a_rank_is_a_process_and_a_stream_a_thread_in_order():
    events = parse(straggler())["traceEvents"]
    named = [(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"]
    assert named == [(0, "rank 0"), (1, "rank 1")]
    for rank in (0, 1):
        order = {
            event["tid"]: event["args"]["sort_index"]
            for event in events
            if event["name"] == "thread_sort_index" and event["pid"] == rank
        }
        names = {tid: name for (pid, tid), name in threads({"traceEvents": events}).items() if pid == rank}
        assert [names[tid] for tid in sorted(order, key=order.__getitem__)] == ["steps", "host", "compute", "comm"]
        assert sorted(order) == sorted(order, key=order.__getitem__)


def test_no_two_threads_share_a_number_and_none_has_its_processs():
    """Viewers take thread 0 for the idle thread, and one with the number of its process for the main thread."""
    trace = trace_of(plan_of((FORWARD,), world_size=64), [(0.0, 0.0, 1.0)])
    keys = list(threads(parse(trace)))
    assert len({tid for _, tid in keys}) == len(keys)
    assert all(tid not in (0, pid) for pid, tid in keys)


def test_a_collective_holds_the_waiting_and_the_transfer():
    assert lane(parse(straggler(), steps=[0]), 0, "comm") == [
        ("all_reduce grad.0", 5000, 5000),
        ("wait for others", 5000, 4000),
        ("transfer", 9000, 1000),
    ]


def test_the_last_member_of_a_collective_waits_for_nobody():
    assert lane(parse(straggler(), steps=[0]), 1, "comm") == [
        ("all_reduce grad.0", 9000, 1000),
        ("transfer", 9000, 1000),
    ]


def test_waiting_names_the_rank_that_was_last():
    last = [span["args"]["last"] for span in spans(parse(straggler())) if span["name"] == "wait for others"]
    assert last == ["rank 1"]


def test_waiting_names_the_last_of_its_own_group():
    plan = plan_of((AllReduce("grad.0", Group(2, stride=2)),), world_size=4)
    document = parse(trace_of(plan, [([0.0, 9.0, 1.0, 5.0], [1.0, 9.0, 1.0, 9.0], 10.0)]))
    last = {span["pid"]: span["args"]["last"] for span in spans(document) if span["name"] == "wait for others"}
    assert last == {0: "rank 2", 3: "rank 1"}


def test_a_host_shows_its_waits_and_delays_and_leaves_out_those_of_no_length():
    document = parse(straggler())
    assert lane(document, 0, "host") == [("wait loss", 0, 2000), ("wait loss", 2000, 10000)]
    assert lane(document, 1, "host") == [("wait loss", 0, 2000), ("delay", 2000, 4000), ("wait loss", 6000, 6000)]


def test_steps_follow_one_another_on_their_own_thread():
    assert lane(parse(straggler()), 1, "steps") == [("step 0", 0, 10000), ("step 1", 10000, 6000)]


def test_work_of_no_length_stays():
    document = parse(trace_of(plan_of((FORWARD,), world_size=1), [(1.0, 1.0, 1.0)]))
    assert lane(document, 0, "compute") == [("forward loss", 1e6, 0)]


def test_what_did_not_run_is_left_out():
    nan = float("nan")
    trace = trace_of(plan_of((FORWARD, BACKWARD), world_size=1), [(0.0, 0.0, 1.0), (nan, nan, nan)])
    assert lane(parse(trace), 0, "compute") == [("forward loss", 0, 1e6)]


def test_arguments_tell_step_operation_bytes_and_group():
    reduce = next(span for span in spans(parse(straggler(), steps=[1])) if span["cat"] == "comm")
    assert reduce["args"] == {
        "step": 1,
        "op": "all_reduce(grad.0, mean over group of 2)",
        "bytes": 4000,
        "group": "group of 2",
    }
    forward = next(span for span in spans(parse(straggler())) if span["cat"] == "compute")
    assert forward["args"] == {"step": 0, "op": "forward(param -> loss)"}


def test_only_the_chosen_steps_and_ranks_are_written():
    document = parse(straggler(), steps=range(1, 2), ranks=[1])
    assert {event["pid"] for event in document["traceEvents"]} == {1}
    assert {span["args"]["step"] for span in spans(document)} == {1}
    assert lane(document, 1, "compute")[0] == ("forward loss", 10000, 2000)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"steps": [1, 2]}, "step 2 is not in the trace; choose among 0 to 1"),
        ({"ranks": [-1]}, "rank -1 is not in the trace; choose among 0 to 1"),
        ({"ranks": []}, "no rank is chosen; choose among 0 to 1"),
    ],
)
def test_a_step_or_rank_outside_of_the_trace_is_refused_at_once(choice, message):
    with pytest.raises(TraceError, match=message):
        chrome_trace(straggler(), **choice)


def test_the_file_says_what_it_shows():
    trace = straggler()
    document = parse(trace)
    assert document["displayTimeUnit"] == "ms"
    assert document["otherData"] == {"plan": "by hand", "digest": trace.plan.digest(), "source": "by hand"}


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw a trace of any times at all: out of order, below zero, missing, and awkward to write in microseconds."""
    plan = draw(legal_plans(max_times=2, max_runs=1))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([1e-9, 1e-6, 1e-3, 1.0, 1e4]))
    times = random.uniform(-0.1, 1.0, size=(3, plan.n_instances, plan.world_size))
    if draw(st.booleans()):
        times = np.cumsum(times, axis=1)
    times[:, random.random(times.shape[1:]) < draw(st.sampled_from([0.0, 0.2]))] = np.nan
    return Trace(plan, *(times * scale), source="random")


def stacks(document: dict) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return beginning and end of the spans of every thread, in nanoseconds as Perfetto reads them."""
    lanes = defaultdict(list)
    for span in spans(document):
        begin = int(span["ts"] * 1000)
        lanes[span["pid"], span["tid"]].append((begin, begin + int(span["dur"] * 1000)))
    return lanes


@examples(150)
@given(traces())
def test_spans_of_a_thread_nest_and_come_in_order(trace):
    document = parse(trace)
    for lane_spans in stacks(document).values():
        assert lane_spans == sorted(lane_spans, key=lambda span: span[0])
        stack = []
        for begin, end in lane_spans:
            assert 0 <= begin <= end
            while stack and stack[-1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1]
            stack.append(end)


@examples(50)
@given(st.lists(st.integers(0, 10**13), min_size=2, max_size=2, unique=True))
def test_perfetto_reads_back_every_nanosecond(instants):
    """It multiplies by 1000 and cuts: 1.001 us would become 1000 ns."""
    begin, end = sorted(instants)
    trace = trace_of(plan_of((FORWARD,), world_size=1), [(begin / 1e9, begin / 1e9, end / 1e9)])
    (compute,) = (stack for (_, tid), stack in stacks(parse(trace)).items() if tid == 12)
    assert compute == [(begin, end)]


def test_the_nanosecond_that_truncation_would_lose():
    trace = trace_of(plan_of((FORWARD,), world_size=1), [(0.0, 0.0, 1001e-9)])
    ((_, begin, length),) = lane(parse(trace), 0, "compute")
    assert (begin, int(length * 1000)) == (0, 1001)


def fused() -> Trace:
    """Horovod's way of three gradients: two meet in a fusion buffer, the third comes too late. A tick every 2.5 ms."""
    group = Group(2)
    step = (
        FORWARD,
        *(Backward(("param", "loss"), f"grad.{n}") for n in (2, 1, 0)),
        Tick(("grad.1",), 2.5 * MS),
        Pack(("grad.2", "grad.1"), "fused"),
        AllReduce("fused", group),
        Unpack("fused", ("grad.2", "grad.1")),
        Tick(("grad.0",), 2.5 * MS),
        AllReduce("grad.0", group),
        Optimize(("param",), ("grad.2", "grad.1", "grad.0")),
    )
    times = np.array(
        [
            [[0, 0], [0, 0], [2, 2]],
            [[2, 2], [2, 2], [4, 5]],
            [[4, 5], [4, 5], [6, 8]],
            [[6, 8], [6, 8], [9, 10]],
            [[6, 8], [6, 8], [7.5, 10]],
            [[7.5, 10], [7.5, 10], [8, 10.5]],
            [[8, 10.5], [10.5, 10.5], [12.5, 12.5]],
            [[12.5, 12.5], [12.5, 12.5], [13, 13]],
            [[13, 13], [13, 13], [13, 13]],
            [[13, 13], [13, 13], [14, 14]],
            [[14, 14], [14, 14], [15, 15]],
        ]
    )
    return trace_of(plan_of(step, world_size=2), (times * MS).tolist())


def test_the_comm_thread_shows_ticks_that_held_it_and_fusion_copies_by_their_buffer():
    document = parse(fused())
    assert lane(document, 0, "comm") == [
        ("tick", 6000, 1500),
        ("pack fused", 7500, 500),
        ("all_reduce fused", 8000, 4500),
        ("wait for others", 8000, 2500),
        ("transfer", 10500, 2000),
        ("unpack fused", 12500, 500),
        ("all_reduce grad.0", 13000, 1000),
        ("transfer", 13000, 1000),
    ]
    tick, pack = (span for span in spans(document) if span["name"] in ("tick", "pack fused") and span["pid"] == 0)
    assert tick["args"] == {"step": 0, "op": "tick(grad.1, every 2.5 ms)"}
    assert pack["args"] == {"step": 0, "op": "pack(grad.2, grad.1 -> fused)", "bytes": 8000}


def test_a_file_is_the_same_text_and_may_be_compressed(tmp_path: Path):
    text = "".join(chrome_trace(straggler(), ranks=[0]))
    write_chrome(tmp_path / "trace.json", chrome_trace(straggler(), ranks=[0]))
    write_chrome(tmp_path / "trace.json.gz", chrome_trace(straggler(), ranks=[0]))
    write_chrome(tmp_path / "again.json.gz", chrome_trace(straggler(), ranks=[0]))
    assert (tmp_path / "trace.json").read_text() == text
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).decode() == text
    assert (tmp_path / "trace.json.gz").read_bytes() == (tmp_path / "again.json.gz").read_bytes()
    assert (tmp_path / "trace.json.gz").read_bytes()[4:8] == bytes(4), "a time of writing"


def test_the_command_writes_that_text(tmp_path, capsys):
    fused().save(tmp_path / "trace.npz")
    answer = call(capsys, "trace", tmp_path / "trace.npz", "--chrome", tmp_path / "chrome.json")
    assert answer.code == 0, answer.err
    assert (tmp_path / "chrome.json").read_text() == "".join(chrome_trace(fused()))


def test_a_wrong_choice_leaves_no_file_behind(tmp_path: Path):
    with pytest.raises(TraceError):
        write_chrome(tmp_path / "trace.json", chrome_trace(straggler(), steps=[7]))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(RunError, match=r"nowhere.trace\.json: cannot be written \(No such file or directory\)"):
        write_chrome(tmp_path / "nowhere" / "trace.json", chrome_trace(straggler()))
