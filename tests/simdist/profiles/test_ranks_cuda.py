"""Reading one rank's trace of a GPU: timelines drawn by hand, and jobs of which everything is known."""

import random
from pathlib import Path
from typing import Any

import pytest
from kineto_drawing import (
    ALL_REDUCE,
    AUTOGRAD,
    GPU,
    MAIN,
    NCCL_STREAM,
    SIDE_STREAM,
    TOLD,
    Drawing,
    draw_step,
    profile_without_some_events,
)
from kineto_traces import DIALECTS, Delay, Truth, simulate, write_job

from simdist.profiles.steps.model import RankProfile, RankStep
from simdist.profiles.steps.ranks import profile_rank
from simdist.profiles.steps.step_parts import StepPart


def ms(seconds) -> list[float]:
    return [round(1e3 * each, 3) for each in seconds]


def parts_s(step: RankStep) -> list[float]:
    return [step.input_s, step.forward_s, step.host_s, step.backward_s, step.wait_s, step.optimize_s]


def assert_adds_up(profile: RankProfile) -> None:
    for step in profile.steps:
        assert min(parts_s(step)) >= 0
        assert sum(parts_s(step)) == pytest.approx(step.end_s - step.start_s, abs=1e-9)
        if step.buckets_s:
            assert sum(step.buckets_s) == pytest.approx(step.backward_s, abs=1e-9)


@pytest.fixture
def drawn(tmp_path: Path) -> RankProfile:
    draw = Drawing(GPU)
    for number in range(2):
        draw_step(draw, number)
    return profile_rank(draw.write(tmp_path))


def test_phases_of_a_drawn_step_are_exact(drawn: RankProfile) -> None:
    first, second = drawn.steps
    assert ms([first.start_s, first.end_s, second.start_s, second.end_s]) == [0.0, 100.0, 100.0, 200.0]
    # the forward pass has the copy of the loss; the host's part are its sleeps from 30 to 50.2 ms and from 90.1 to 100
    assert ms(parts_s(first)) == ms(parts_s(second)) == [12.0, 18.1, 30.1, 17.8, 17.0, 5.0]
    assert_adds_up(drawn)


def test_parts_of_a_drawn_step_are_exact(drawn: RankProfile) -> None:
    for step in drawn.steps:
        found = {part.name: round(1e3 * seconds, 3) for part, seconds in zip(StepPart, step.parts_s, strict=True)}
        assert {name: time_ms for name, time_ms in found.items() if time_ms} == {
            "COMPUTE": 40.78,  # 12 to 30, 50.2 to 68, 85.02 to 90
            "ALL_REDUCE": 17.0,  # 68 to 85
            "COPY": 1.9,  # 10.2 to 12, 90 to 90.1
            "INPUT": 10.2,
            "SHORT_GAP": 0.02,  # 85 to 85.02, though the next kernel is queued
            "QUEUED": 0.045,  # from 0.05 behind the return of the launch, at 50.105, on
            "LONG_GAP": 0.355,  # the host ran operators from 50 on, and until 90.3
            "HOST_PAUSE": 29.7,  # 30 to 50, 90.3 to 100
        }


def test_only_a_long_gap_between_queued_kernels_is_unexplained(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    for number, begin in enumerate(
        (91.0, 91.515, 92.075)
    ):  # 15 us apart, as kernels are that follow each other, then 60
        draw.gpu("sgemm", 53.6 + number / 100, begin, begin + 0.5)
    parts = profile_rank(draw.write(tmp_path)).steps[0].parts_s
    assert ms([parts[StepPart.QUEUED]]) == [1.005]  # 50.155 to 50.2, 90.1 to 91, and the second of the gaps


@pytest.mark.parametrize("call", ["cudaLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync"])
def test_nothing_is_queued_while_the_call_that_launches_it_goes_on(tmp_path: Path, call: str) -> None:
    """A launch that takes 6.5 ms, of what begins when it returns, is the host's: nothing waits for an event."""
    draw = Drawing(GPU)
    draw_step(draw, 0)
    draw_called(draw, call, (91.0, 97.5), (97.5, 98.0))
    parts = profile_rank(draw.write(tmp_path)).steps[0].parts_s
    assert ms([parts[StepPart.QUEUED]]) == [0.045]  # as without this call
    assert parts[StepPart.LONG_GAP] >= 6.5e-3


def test_buckets_and_gradients_have_the_time_of_kernels_launched_before_them(drawn: RankProfile) -> None:
    assert ms(drawn.steps[1].buckets_s) == [9.8, 8.0]
    assert [gradient.count for gradient in drawn.gradients] == [10, 100]
    assert ms(gradient.backward_s for gradient in drawn.gradients) == [9.8, 8.0]


def test_collectives_are_those_of_the_gpu(drawn: RankProfile) -> None:
    first, second = drawn.steps[0].calls
    assert (first.kind, first.nbytes, first.n_ranks, first.ranks) == ("all_reduce", 2000, 8, tuple(range(8)))
    assert first.of_gradients
    assert second.of_gradients
    assert ms([first.issued_s, first.start_s, first.end_s]) == [50.55, 60.05, 75.0]
    assert ms([second.issued_s, second.start_s, second.end_s]) == [51.3, 75.0, 85.0]


def test_what_else_the_trace_tells_is_read(drawn: RankProfile) -> None:
    assert (drawn.rank, drawn.world_size, drawn.backend) == (0, 8, "nccl")
    assert (drawn.device, drawn.local_gpu, drawn.device_name) == ("cuda", 0, "NVIDIA H200")
    assert drawn.hints == {"loader processes", "pinned"}
    assert drawn.notes == ()


@pytest.mark.parametrize(
    ("n_events", "cost"), [(1_500, []), (1_600, ["at least 650 us and at most 2.11 ms of its 100 ms"])]
)
def test_the_cost_of_the_profiler_is_said_above_2_per_cent_of_a_step(tmp_path: Path, n_events: int, cost) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    for number in range(n_events):  # 1.3 us each at most
        draw.op("aten::as_strided", 31 + 0.01 * number, 31 + 0.01 * number + 0.005)
    notes = profile_rank(draw.write(tmp_path)).notes
    assert [note.partition("never idle, ")[2].partition(";")[0] for note in notes] == cost


def test_kernels_of_a_graph_belong_to_the_step_that_launched_it(tmp_path: Path) -> None:
    """The device runs a step behind; of a graph only the launch of the whole is seen, here of two streams."""
    draw = Drawing(GPU)
    for number in range(3):
        at = 100 * number
        draw.note(f"ProfilerStep#{number}", at, at + 100)
        draw.node("GraphedBackward", at + 20, at + 30, tid=AUTOGRAD)
        for part, launch, tid in ((0, at + 5, MAIN), (1, at + 25, AUTOGRAD)):
            graph = {"correlation": 900 + 2 * number + part}
            draw.op("cudaGraphLaunch", launch, launch + 0.1, tid=tid, cat="cuda_runtime", **graph)
            begin = at + 100 + 40 * part
            draw.gpu("sgemm", None, begin, begin + 10, **graph)
            draw.gpu("sgemm", None, begin + 10, begin + 20, **graph)
            draw.gpu("sgemm", None, begin + 10, begin + 40, stream=SIDE_STREAM, **graph)
    steps = profile_rank(draw.write(tmp_path)).steps
    assert [ms([step.start_s, step.end_s]) for step in steps] == [[0.0, 180.0], [180.0, 280.0], [280.0, 380.0]]
    assert [ms([step.forward_s, step.backward_s]) for step in steps[1:]] == [[40.0, 40.0]] * 2


def test_host_that_reads_the_loss_waits_for_its_device(tmp_path: Path) -> None:
    for reads_loss in (True, False):
        draw = Drawing(GPU)
        for number in range(3):
            draw_step(draw, number, reads_loss=reads_loss)
        assert profile_rank(draw.write(tmp_path)).host_waits is reads_loss


def test_waiting_for_another_stream_is_not_waiting_for_the_device(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    for number in range(3):
        draw_step(draw, number, reads_loss=False)
        draw.call("cudaEventSynchronize", 100 * number + 53.3, 100 * number + 53.4)  # the update ends at 90 ms
    assert not profile_rank(draw.write(tmp_path)).host_waits


def test_kernel_launched_late_waited_for_the_host_whatever_a_collective_did(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    draw.gpu(ALL_REDUCE, 10.45, 30.1, 45.0, stream=NCCL_STREAM, **TOLD)  # ends while the host sleeps
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert ms(parts_s(step)) == [12.0, 18.1, 30.1, 17.8, 17.0, 5.0]
    assert [call.of_gradients for call in step.calls] == [False, True, True]


def test_collective_in_the_forward_pass_is_waited_for(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    draw.gpu(ALL_REDUCE, 10.45, 30.1, 45.0, stream=NCCL_STREAM, **TOLD)
    draw.gpu("batch_norm", 10.47, 45.01, 47.01)  # in the queue behind it, as in synchronised batch norm
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert ms(parts_s(step)) == [12.0, 20.11, 13.09, 17.8, 32.0, 5.0]


def draw_called(draw: Drawing, call: str, called: tuple[float, float], ran: tuple[float, float]) -> None:
    """Draw a call that takes some time, and the work that it launched."""
    draw.op(call, *called, cat="cuda_runtime", correlation=901)
    what = ("Memcpy DtoD", "gpu_memcpy") if call == "cudaMemcpyAsync" else ("sgemm", "kernel")
    draw.gpu(what[0], None, *ran, cat=what[1])
    draw.events[-1]["args"]["correlation"] = 901


CALLS = ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaMemcpyAsync"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("called_ms", [30.2, 40.0, 44.0, 48.9])
def test_a_launch_takes_effect_when_its_call_returns(tmp_path: Path, call: str, called_ms: float) -> None:
    """However long the call takes, a collective that ends meanwhile holds nothing up."""
    draw = Drawing(GPU)
    draw_step(draw, 0)
    draw.gpu(ALL_REDUCE, 10.45, 30.1, 45.0, stream=NCCL_STREAM, **TOLD)
    draw_called(draw, call, (called_ms, 49.0), (49.0, 50.0))
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert ms(parts_s(step)) == [12.0, 19.1, 28.9, 18.0, 17.0, 5.0]


@pytest.mark.parametrize("call", CALLS)
def test_what_begins_before_its_call_returns_was_launched_by_then(tmp_path: Path, call: str) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    draw.gpu(ALL_REDUCE, 10.45, 30.1, 45.0, stream=NCCL_STREAM, **TOLD)
    draw_called(draw, call, (40.0, 49.0), (45.01, 47.01))
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert ms(parts_s(step)) == [12.0, 20.11, 13.09, 17.8, 32.0, 5.0]


def test_host_blocked_by_a_collective_counts_as_waiting(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    draw.gpu(ALL_REDUCE, 10.45, 30.1, 50.0, stream=NCCL_STREAM, **TOLD)
    draw.call("cudaStreamSynchronize", 10.5, 50.04)  # a barrier; the next kernel is launched behind it
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert ms(parts_s(step)) == [12.0, 18.1, 9.9, 18.0, 37.0, 5.0]


@pytest.mark.parametrize("wakes_ms", [0.02, 0.3])
def test_host_that_gloo_wakes_after_a_collective_has_waited_for_it(tmp_path: Path, wakes_ms: float) -> None:
    draw = Drawing(GPU | {"distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 8}})
    for number in range(2):
        draw_step(draw, number, gloo_wakes_ms=wakes_ms)
    for step in profile_rank(draw.write(tmp_path)).steps:
        assert 1e3 * step.wait_s == pytest.approx(17.0, abs=0.01)  # from 68 ms, when the device has nothing to do


def test_copies_on_other_streams_take_no_time_of_a_step(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    draw.gpu("Memcpy HtoD (Pinned -> Device)", 10.48, 31.0, 49.0, stream=SIDE_STREAM, cat="gpu_memcpy")
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert ms(parts_s(step)) == [12.0, 18.1, 30.1, 17.8, 17.0, 5.0]


def test_kernels_on_several_streams_are_counted_once(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    draw.gpu("sgemm", 10.45, 21.0, 29.0, stream=SIDE_STREAM)
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert ms(parts_s(step)) == [12.0, 18.1, 30.1, 17.8, 17.0, 5.0]


def test_several_gpus_of_a_process_count_as_one_and_it_is_said(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    draw.gpu("sgemm", 10.45, 25, 40)
    draw.events[-1]["pid"] = 1
    profile = profile_rank(draw.write(tmp_path))
    assert ms([profile.steps[0].parts_s[StepPart.COMPUTE]]) == [50.78]
    assert "this process computes on 2 GPUs: they count as one, which is busy if any of them is" in profile.notes


@pytest.mark.parametrize("number", [str, float, lambda link: link + 2**63, lambda link: link + 2**64])
def test_correlations_may_be_quoted_or_of_64_bits(tmp_path: Path, number) -> None:
    draw = Drawing(GPU)
    for step in range(2):
        draw_step(draw, step)
    for event in draw.events:
        if event["args"].get("correlation"):
            event["args"]["correlation"] = number(event["args"]["correlation"])
    for step in profile_rank(draw.write(tmp_path)).steps:
        assert ms(parts_s(step)) == [12.0, 18.1, 30.1, 17.8, 17.0, 5.0]


def test_a_mark_that_is_told_twice_is_one_step(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    for step in range(2):
        draw_step(draw, step)
        draw.op(f"ProfilerStep#{step}", 100 * step + 0.001, 100 * step + 99.999)
    assert [step.number for step in profile_rank(draw.write(tmp_path)).steps] == [0, 1]


def test_what_was_launched_before_the_trace_belongs_to_no_step(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    for number in range(2):
        draw_step(draw, number)
    draw.gpu("multi_tensor_apply_kernel", None, -5.0, 4.0)
    first, second = profile_rank(draw.write(tmp_path)).steps
    assert ms([first.start_s, first.end_s, second.end_s]) == [4.0, 100.0, 200.0]
    assert ms(parts_s(first)) == [8.0, 18.1, 30.1, 17.8, 17.0, 5.0]


def test_step_of_which_kernels_are_missing_is_left_out(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    for number in range(3):
        draw_step(draw, number)
    is_lost = [event["cat"] == "kernel" and event["ts"] > 255_000 for event in draw.events]
    draw.events = [event for event, lost in zip(draw.events, is_lost, strict=True) if not lost]
    profile = profile_rank(draw.write(tmp_path))
    assert [step.number for step in profile.steps] == [0, 1]
    assert profile.notes == ("steps of which kernels are missing were left out: 2",)


def test_kernel_without_its_launch_belongs_with_the_one_before(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    lost = [e for e in draw.events if e["cat"] == "cuda_runtime" and e["ts"] == 50_800]
    draw.events = [event for event in draw.events if event not in lost]
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert ms(parts_s(step)) == [12.0, 18.1, 30.1, 17.8, 17.0, 5.0]


def test_kernels_of_a_trace_without_any_launch_were_launched_as_they_began(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    for number in range(2):
        draw_step(draw, number)
    draw.events = [event for event in draw.events if event["cat"] != "cuda_runtime"]
    for step in profile_rank(draw.write(tmp_path)).steps:
        assert ms([step.end_s - step.start_s, step.parts_s[StepPart.COMPUTE]]) == [100.0, 40.78]


def test_sizes_that_kernels_do_not_tell_come_from_the_operators_around_their_launch(tmp_path: Path) -> None:
    draw = Drawing({"deviceProperties": [{"id": 0, "name": ""}]})
    draw_step(draw, 0, grid="[1, 1, 1]")
    step = profile_rank(draw.write(tmp_path)).steps[0]
    # `c10d::allreduce_` tells 100 elements, the kernel's name that they are bfloat16
    assert [(call.kind, call.nbytes, call.ranks) for call in step.calls] == [("all_reduce", 200, None)] * 2


def test_generic_kernel_is_named_by_its_arguments(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    for event in draw.events:
        if event["name"] == ALL_REDUCE:
            event["name"] = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert [(call.kind, call.nbytes) for call in step.calls] == [("all_reduce", 2000)] * 2


def of_amd(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event as ROCm 6.1 tells it: no kernel of RCCL says what it does, or which call launched it."""
    names = {"cudaLaunchKernel": "hipExtLaunchKernel", ALL_REDUCE: "ncclDevKernel_Generic(ncclDevComm*, channelMasks)"}
    name = names.get(event["name"], event["name"])
    cat = "hip_runtime" if event["cat"] == "cuda_runtime" else event["cat"]
    return event | {"name": name, "cat": cat} | ({"args": {"correlation": 0}} if event["name"] == ALL_REDUCE else {})


@pytest.mark.parametrize(("has_launches", "issued"), [(True, [50.55, 51.3]), (False, [50.5, 51.25])])
def test_kernels_of_rccl_belong_to_the_collectives_in_their_order(tmp_path: Path, has_launches: bool, issued) -> None:
    draw = Drawing(GPU)
    for number in range(2):
        draw_step(draw, number)
    draw.gpu(ALL_REDUCE, None, -2, -1, stream=NCCL_STREAM)
    of_rccl = {} if has_launches else {e["args"]["correlation"] for e in draw.events if e["name"] == ALL_REDUCE}
    draw.events = [
        of_amd(e) for e in draw.events if e["cat"] == "kernel" or e["args"].get("correlation") not in of_rccl
    ]
    for step in profile_rank(draw.write(tmp_path)).steps:
        assert [(call.kind, call.of_gradients) for call in step.calls] == [("all_reduce", True)] * 2
        assert ms([call.issued_s - 0.1 * step.number for call in step.calls]) == issued
        assert ms(step.buckets_s) == [9.8, 8.0]


def test_group_of_sends_is_named_by_those_before_its_launch(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    for number, name in enumerate(("c10d::send", "c10d::recv_")):
        draw.op(name, 31 + number / 10, 31.05 + number / 10)
    draw.note("nccl:coalesced", 31.3, 31.5)
    draw.gpu("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 31.4, 32, 40, stream=SIDE_STREAM)
    assert profile_rank(draw.write(tmp_path)).steps[0].calls[0].kind == "point_to_point"


@pytest.mark.parametrize("n_forward", [1, 2])
def test_all_reduces_that_the_forward_pass_does_as_well_are_of_no_gradients(tmp_path: Path, n_forward: int) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    for number in range(n_forward):
        draw.gpu(ALL_REDUCE, 31 + number, 31.1 + number, 31.5 + number, stream=NCCL_STREAM, **TOLD)
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert len(step.gradient_calls) == (2 if n_forward == 1 else 0)  # two are in the backward pass


def test_bitmap_of_unused_parameters_is_no_gradient(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    bitmap = TOLD | {"dtype": "Int"}
    draw.gpu(ALL_REDUCE, 51.35, 85.0, 85.01, tid=AUTOGRAD, stream=NCCL_STREAM, **bitmap)
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert [call.of_gradients for call in step.calls] == [True, True, False]
    assert ms(step.buckets_s) == [9.8, 8.0]


DELAYS = (Delay("compute", 2, 3, 0.02), Delay("host", 1, 2, 0.05), Delay("io", 0, 4, 0.03))


@pytest.mark.parametrize(
    ("device", "run_ahead"), [("cpu", False), ("cuda", False), ("cuda", True)], ids=["cpu", "cuda", "cuda-ahead"]
)
@pytest.mark.parametrize("version", DIALECTS)
def test_every_step_of_a_known_job_is_found(tmp_path: Path, version: str, device, run_ahead: bool) -> None:
    truth = Truth(delays=DELAYS, run_ahead=run_ahead, noise=True, skew_s=(0.0, 1.0, -2.0, 0.5))
    paths = write_job(tmp_path, truth, version=version, device=device)
    off_s = 250e-6 if version == "1.8" and device == "cpu" else 12e-6  # 1.8 does not tell where operators' hooks end
    for path, lived in zip(paths, simulate(truth, device), strict=True):
        profile = profile_rank(path)
        assert profile.host_waits is not truth.run_ahead
        assert [step.number for step in profile.steps] == [one.step.number for one in lived]
        for found, one in zip(profile.steps, lived, strict=True):
            known = one.step
            assert parts_s(found) == pytest.approx(parts_s(known), abs=off_s)
            assert found.buckets_s == pytest.approx(known.buckets_s, abs=off_s)
            assert [call.nbytes for call in found.calls] == [call.nbytes for call in known.calls]
            assert all(call.of_gradients for call in found.calls)
            apart_s = found.start_s - known.start_s
            for call, sent in zip(found.calls, known.calls, strict=True):
                times_s = (call.issued_s, call.start_s, call.end_s)
                assert [t - apart_s for t in times_s] == pytest.approx(
                    [sent.issued_s, sent.start_s, sent.end_s], abs=off_s
                )
        counts = [count for bucket in truth.buckets for count in bucket.counts]
        assert [gradient.count for gradient in profile.gradients] == counts
        assert_adds_up(profile)


@pytest.mark.parametrize("seed", range(40))
def test_trace_with_events_missing_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    draw = Drawing(GPU)
    for number in range(3):
        draw_step(draw, number, reads_loss=rng.random() < 0.5)
    profile, refusal = profile_without_some_events(draw, rng, tmp_path)
    if profile is None:
        assert refusal
        return
    assert profile.steps
    assert_adds_up(profile)
