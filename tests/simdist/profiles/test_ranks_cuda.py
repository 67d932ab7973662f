"""Reading one rank's trace of a GPU: timelines drawn by hand, and jobs of which everything is known."""

import random
from pathlib import Path

import pytest
from kineto_drawing import AUTOGRAD, NCCL_STREAM, SIDE_STREAM, Drawing
from kineto_traces import DIALECTS, Delay, Truth, simulate, write_job

from simdist.errors import TraceError
from simdist.profiles.steps.model import RankProfile, RankStep
from simdist.profiles.steps.ranks import profile_rank

GPU = {
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}, {"id": 1, "name": "NVIDIA H100"}],
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
}
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
TOLD = {
    "Collective_name": "allreduce",
    "In_msg_nelems": 1000,
    "Out_msg_nelems": 1000,
    "dtype": "BFloat16",
    "Group_size": 8,
    "Process_Group_Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
}


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


def draw_step(draw: Drawing, number: int, *, reads_loss: bool = True, **told) -> None:
    """Draw a step of 100 ms on the host, of which its GPU is busy or waiting until 90.1 ms."""
    at = 100.0 * number
    nccl = {"tid": AUTOGRAD, "stream": NCCL_STREAM} | (told or TOLD)
    draw.note(f"ProfilerStep#{number}", at, at + 100)
    draw.note("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at, at + 10)
    draw.op("aten::to", at + 10, at + 10.2)
    draw.gpu("Memcpy HtoD (Pinned -> Device)", at + 10.1, at + 10.2, at + 12, cat="gpu_memcpy")
    draw.note("DistributedDataParallel.forward", at + 10.25, at + 10.5)
    draw.gpu("sgemm", at + 10.3, at + 12, at + 20)
    draw.gpu("sgemm", at + 10.4, at + 20, at + 30)
    draw.node("AddmmBackward0", at + 50, at + 50.3, tid=AUTOGRAD)
    draw.gpu("sgemm", at + 50.1, at + 50.2, at + 60, tid=AUTOGRAD)
    draw.gradient(at + 50.3, at + 50.6, [10], issue=at + 50.5, tid=AUTOGRAD)
    draw.gpu(ALL_REDUCE, at + 50.55, at + 60.05, at + 75, **nccl)
    draw.node("AddmmBackward0", at + 50.7, at + 51, tid=AUTOGRAD)
    draw.gpu("sgemm", at + 50.8, at + 60, at + 68, tid=AUTOGRAD)
    draw.gradient(at + 51, at + 51.4, [10, 10], issue=at + 51.25, tid=AUTOGRAD)
    draw.gpu(ALL_REDUCE, at + 51.3, at + 75, at + 85, **nccl)
    draw.note("Optimizer.step#AdamW.step", at + 52, at + 53)
    draw.gpu("multi_tensor_apply_kernel", at + 52.5, at + 85.02, at + 90)
    if reads_loss:
        draw.op("aten::item", at + 53.1, at + 90.3)
        draw.gpu("Memcpy DtoH (Device -> Pageable)", at + 53.2, at + 90, at + 90.1, cat="gpu_memcpy")
        draw.call("cudaStreamSynchronize", at + 53.3, at + 90.2)


@pytest.fixture
def drawn(tmp_path: Path) -> RankProfile:
    draw = Drawing(GPU)
    for number in range(2):
        draw_step(draw, number)
    return profile_rank(draw.write(tmp_path))


def test_phases_of_a_drawn_step_are_exact(drawn: RankProfile) -> None:
    first, second = drawn.steps
    assert ms([first.start_s, first.end_s, second.start_s, second.end_s]) == [0.0, 90.1, 90.1, 190.1]
    # the forward pass has the copy of the loss; the host's part is its sleep from 30 to 50.2 ms
    assert ms(parts_s(first)) == [12.0, 18.1, 20.2, 17.8, 17.0, 5.0]
    # and, in the second step, from 90.1 to 100 ms, when it asked for a batch
    assert ms(parts_s(second)) == [12.0, 18.1, 30.1, 17.8, 17.0, 5.0]
    assert_adds_up(drawn)


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
    assert drawn.notes == ()


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
    assert ms(parts_s(step)) == [12.0, 18.1, 20.2, 17.8, 17.0, 5.0]
    assert [call.of_gradients for call in step.calls] == [False, True, True]


def test_collective_in_the_forward_pass_is_waited_for(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    draw.gpu(ALL_REDUCE, 10.45, 30.1, 45.0, stream=NCCL_STREAM, **TOLD)
    draw.gpu("batch_norm", 10.47, 45.01, 47.01)  # in the queue behind it, as in synchronised batch norm
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert ms(parts_s(step)) == [12.0, 20.11, 3.19, 17.8, 32.0, 5.0]


def test_host_blocked_by_a_collective_counts_as_waiting(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    draw.gpu(ALL_REDUCE, 10.45, 30.1, 50.0, stream=NCCL_STREAM, **TOLD)
    draw.call("cudaStreamSynchronize", 10.5, 50.04)  # a barrier; the next kernel is launched behind it
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert ms(parts_s(step)) == [12.0, 18.1, 0.0, 18.0, 37.0, 5.0]


def test_copies_on_other_streams_take_no_time_of_a_step(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    draw.gpu("Memcpy HtoD (Pinned -> Device)", 10.48, 31.0, 49.0, stream=SIDE_STREAM, cat="gpu_memcpy")
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert ms(parts_s(step)) == [12.0, 18.1, 20.2, 17.8, 17.0, 5.0]


def test_kernels_on_several_streams_are_counted_once(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    draw_step(draw, 0)
    draw.gpu("sgemm", 10.45, 21.0, 29.0, stream=SIDE_STREAM)
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert ms(parts_s(step)) == [12.0, 18.1, 20.2, 17.8, 17.0, 5.0]


def test_what_was_launched_before_the_trace_belongs_to_no_step(tmp_path: Path) -> None:
    draw = Drawing(GPU)
    for number in range(2):
        draw_step(draw, number)
    draw.gpu("multi_tensor_apply_kernel", None, -5.0, 4.0)
    first, second = profile_rank(draw.write(tmp_path)).steps
    assert ms([first.start_s, first.end_s, second.end_s]) == [4.0, 90.1, 190.1]
    assert ms(parts_s(first)) == [8.0, 18.1, 20.2, 17.8, 17.0, 5.0]


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
    assert ms(parts_s(step)) == [12.0, 18.1, 20.2, 17.8, 17.0, 5.0]


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
    gone = rng.sample(sorted({event["name"] for event in draw.events}), rng.randrange(4))
    lost = rng.random() * 0.3
    draw.events = [event for event in draw.events if event["name"] not in gone and rng.random() > lost]
    path = draw.write(tmp_path)
    refusal = ""
    try:
        profile = profile_rank(path)
    except TraceError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith(f"{path}: ")
        return
    assert profile.steps
    assert_adds_up(profile)
