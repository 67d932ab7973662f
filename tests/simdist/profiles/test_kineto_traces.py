"""The made-up traces are what they say: their timeline is the one drawn by hand, and their files hang together."""

import gzip
import json
from itertools import pairwise

import pytest
from kineto_traces import DIALECTS, Bucket, Delay, Truth, simulate, trace_of, write_job

# rank 0:  input 1 | forward 10 | backward 4 | backward 6 | waits      | optimizer 2
# rank 1:  input 1 | host 5 ............ | forward 10 | 4 | 6 | waits  | optimizer 2
# The first all-reduce (3) begins when rank 1 has its bucket (20), the second (8) after rank 1's backward (26).
DRAWN = Truth(
    n_ranks=2,
    n_steps=2,
    input_s=0.001,
    forward_s=0.010,
    optimize_s=0.002,
    buckets=(Bucket((10,), 0.004, 0.003), Bucket((20,), 0.006, 0.008)),
    delays=(Delay("host", 1, 0, 0.005),),
)


def test_timeline_of_two_ranks_is_the_one_drawn_by_hand():
    rank0, rank1 = ([one.step for one in lived] for lived in simulate(DRAWN, "cpu"))
    assert rank0[0].wait_s == pytest.approx(0.013)
    assert rank1[0].wait_s == pytest.approx(0.008)
    assert (rank0[0].host_s, rank1[0].host_s) == pytest.approx((0, 0.005))
    assert [call.end_s for call in rank0[0].calls] == pytest.approx([0.023, 0.034])
    assert [call.start_s for call in rank0[0].calls] == pytest.approx([0.015, 0.021])
    assert [call.start_s for call in rank1[0].calls] == pytest.approx([0.020, 0.026])
    assert rank0[0].end_s == rank1[0].end_s == pytest.approx(0.036)
    assert rank0[1].end_s - rank0[1].start_s == pytest.approx(0.031)


def test_buffers_keep_all_ranks_waiting_for_rank_0_and_it_for_none():
    late = Truth(
        n_steps=1, input_s=0.001, buffer_count=100, delays=(Delay("io", 0, 0, 0.030), Delay("io", 1, 0, 0.050))
    )
    sent = [lived[0].step.calls[0] for lived in simulate(late, "cpu")]
    assert [call.end_s - call.start_s for call in sent] == pytest.approx([0.0005, 0.0005, 0.0305, 0.0305])
    assert [call.of_gradients for call in sent] == [False] * 4


def test_host_that_runs_ahead_hides_a_late_batch():
    late = Truth(delays=(Delay("io", 1, 3, 0.015),), run_ahead=True)
    step = simulate(late, "cuda")[1][3].step
    assert step.input_s == pytest.approx(late.copy_s)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_parts_of_every_step_add_up_and_steps_follow_each_other(device, run_ahead):
    delays = (Delay("host", 0, 1, 0.05), Delay("io", 1, 2, 0.05), Delay("compute", 2, 3, 0.05))
    truth = Truth(delays=delays, jitter=0.1, run_ahead=run_ahead, skew_s=(0, 1, 2, 3), buffer_count=100)
    for lived in simulate(truth, device):
        steps = [one.step for one in lived]
        assert all(a.end_s == pytest.approx(b.start_s) for a, b in pairwise(steps))
        for s in steps:
            parts_s = s.input_s + s.forward_s + s.host_s + s.backward_s + s.wait_s + s.optimize_s
            assert parts_s == pytest.approx(s.end_s - s.start_s)
            assert sum(s.buckets_s) == pytest.approx(s.backward_s)


@pytest.mark.parametrize("version", DIALECTS)
def test_every_kernel_has_one_launch_and_streams_do_one_thing_at_a_time(version):
    events = trace_of(Truth(noise=True), 1, version=version)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and "correlation" in e["args"]]
    launches = [e for e in spans if e["cat"].lower() in ("runtime", "cuda_runtime")]
    work = [e for e in spans if e not in launches]
    correlations = [e["args"]["correlation"] for e in launches]
    assert len(set(correlations)) == len(correlations)
    early = {9_999}  # launched before the trace began
    assert {e["args"]["correlation"] for e in work} - early <= set(correlations)
    for stream in {e["tid"] for e in work}:
        ordered = sorted((e["ts"], e["ts"] + e["dur"]) for e in work if e["tid"] == stream)
        assert all(a[1] <= b[0] + 1 for a, b in pairwise(ordered))  # to a microsecond: old times are rounded


def test_only_ranks_that_are_there_leave_a_trace_packed_or_not(tmp_path):
    paths = write_job(tmp_path, Truth(missing=(2,)), gz=True)
    assert [path.name.split(".")[0] for path in paths] == ["rank0", "rank1", "rank3"]
    assert json.loads(gzip.decompress(paths[2].read_bytes()))["distributedInfo"]["rank"] == 3
