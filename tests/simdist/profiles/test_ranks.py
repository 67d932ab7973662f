"""Reading one rank's trace of a CPU: timelines drawn by hand, recorded traces, and what is odd in training loops."""

import json
import random
from pathlib import Path

import pytest
from kineto_drawing import AUTOGRAD, Drawing, profile_without_some_events

from simdist.errors import TraceError
from simdist.profiles.steps.model import RankProfile, RankStep
from simdist.profiles.steps.ranks import profile_rank

RECORDED = Path(__file__).resolve().parents[3] / "tests" / "data" / "profiles"
PHASES = ("input_s", "forward_s", "host_s", "backward_s", "wait_s", "optimize_s")
GLOO = {"distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 4}}


def phases_ms(step: RankStep) -> list[float]:
    return [round(1e3 * seconds, 3) for seconds in _phases_s(step)]


def _phases_s(step: RankStep) -> list[float]:
    return [step.input_s, step.forward_s, step.host_s, step.backward_s, step.wait_s, step.optimize_s]


def ms(seconds) -> list[float]:
    return [round(1e3 * each, 3) for each in seconds]


def assert_adds_up(profile: RankProfile) -> None:
    for step in profile.steps:
        assert min(_phases_s(step)) >= 0
        assert sum(_phases_s(step)) == pytest.approx(step.end_s - step.start_s, abs=1e-9)
        if step.buckets_s:
            assert sum(step.buckets_s) == pytest.approx(step.backward_s, abs=1e-9)
            assert len(step.buckets_s) == sum(call.of_gradients for call in step.calls)


def draw_step(draw: Drawing, number: int, at: float, *, sleep: float = 0.0, copies: bool = True) -> float:
    """Draw a step that takes 80 ms and its sleep; return its end."""

    def t(ms_in_step: float) -> float:
        return at + ms_in_step + (sleep if ms_in_step > 31 else 0)

    draw.note(f"ProfilerStep#{number}", t(0), t(79.9))
    draw.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", t(0), t(5))
    draw.note("DistributedDataParallel.forward", t(5.2), t(30))
    draw.op("aten::linear", t(5.2), t(15), Input_Dims=[[16, 700], [700, 700], [700]], Input_type=["float"] * 3)
    draw.op("aten::addmm", t(6), t(14))
    draw.op("aten::relu", t(15.1), t(30))
    draw.op("aten::cross_entropy_loss", t(30), t(31))
    draw.node("NllLossBackward0", t(31.1), t(40))
    draw.gradient(t(40), t(42), [700], issue=t(41.5))
    draw.node("AddmmBackward0", t(42), t(50))
    draw.gradient(t(50), t(52), [700, 700], issue=t(51.5))
    draw.gloo(t(41.6), t(55), 0)
    draw.gloo(t(51.6), t(65), 1)
    if copies:
        draw.op("torch.distributed.ddp.reducer::copy_bucket_to_grad", t(55), t(56))
        draw.op("torch.distributed.ddp.reducer::copy_bucket_to_grad", t(65), t(66))
    draw.note("Optimizer.step#SGD.step", t(66.4), t(75))
    draw.op("aten::add_", t(70), t(71))
    return t(80)


@pytest.fixture
def drawn(tmp_path: Path) -> RankProfile:
    draw = Drawing(GLOO | {"record_shapes": 1, "host_name": "node7"})
    end = draw_step(draw, 3, 1000.0, sleep=20.0)
    draw_step(draw, 4, end)
    return profile_rank(draw.write(tmp_path))


def test_phases_of_a_drawn_step_are_exact(drawn: RankProfile) -> None:
    late, usual = drawn.steps
    assert [late.number, usual.number] == [3, 4]
    assert ms([late.start_s, late.end_s, usual.start_s, usual.end_s]) == [1000.0, 1100.0, 1100.0, 1179.9]
    # the pauses of 0.2, 0.1 and 0.4 ms belong to what is around them; 75 to 80 ms, to the next mark, is the host's
    assert phases_ms(late) == [5.0, 26.0, 25.1, 22.9, 12.0, 9.0]
    assert phases_ms(usual) == [5.0, 26.1, 4.9, 22.9, 12.0, 9.0]
    assert_adds_up(drawn)


def test_backward_pass_is_cut_where_buckets_were_handed_over(drawn: RankProfile) -> None:
    assert ms(drawn.steps[1].buckets_s) == [10.4, 12.5]


def test_gradients_have_the_backward_time_since_the_one_before(drawn: RankProfile) -> None:
    assert [gradient.count for gradient in drawn.gradients] == [700, 490_000]
    assert ms(gradient.backward_s for gradient in drawn.gradients) == [9.9, 10.0]


def test_collectives_are_told_apart_and_sized(drawn: RankProfile) -> None:
    step = drawn.steps[1]
    first, second = step.calls
    assert (first.kind, first.nbytes, first.ranks, first.n_ranks, first.of_gradients) == (
        "all_reduce",
        400,
        (0, 1, 2, 3),
        4,
        True,
    )
    times = [
        (call.issued_s - step.start_s, call.start_s - step.start_s, call.end_s - step.start_s)
        for call in (first, second)
    ]
    assert [ms(each) for each in times] == [[41.5, 41.6, 55.0], [51.5, 51.6, 65.0]]


def test_one_mark_around_many_updates_is_no_step(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    end = 0.0
    for number in range(6):
        end = draw_step(draw, number, end)
    draw.events = [each for each in draw.events if not each["name"].startswith("ProfilerStep")]
    draw.note("ProfilerStep#1", 0, end)
    profile = profile_rank(draw.write(tmp_path))
    assert [round(1e3 * (step.end_s - step.start_s)) for step in profile.steps] == [80] * 5
    assert any("one step is marked, with 6 updates in it" in note for note in profile.notes)


def test_operators_beside_a_collective_are_counted(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    draw_step(draw, 0, 0.0)
    draw.op("aten::mm", 33, 39)
    draw.op("aten::mm", 43, 49)  # gloo's threads have collectives from 41.6 to 65 ms
    (step,) = profile_rank(draw.write(tmp_path)).steps
    assert ms([step.beside_s]) == [6.0]
    assert sum(step.parts_s) == pytest.approx(step.end_s - step.start_s)


def test_what_else_the_trace_tells_is_read(drawn: RankProfile) -> None:
    assert (drawn.rank, drawn.world_size, drawn.hostname, drawn.backend) == (0, 4, "node7", "gloo")
    assert (drawn.device, drawn.local_gpu, drawn.dtype, drawn.batch_size) == ("cpu", None, "float32", 16)
    assert drawn.host_waits
    assert drawn.notes == ()


def test_without_buckets_copied_back_the_wait_ends_with_the_last_collective(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    draw_step(draw, 0, 0.0, copies=False)
    step = profile_rank(draw.write(tmp_path)).steps[0]
    # 52 to 65 ms; what follows to the optimizer's step at 66.4 ms is a pause of more than 0.5 ms
    assert phases_ms(step) == [5.0, 26.1, 6.3, 20.9, 13.0, 8.6]


def test_collective_that_is_reported_late_ends_when_ddp_went_on(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    draw_step(draw, 0, 0.0)
    for event in draw.events:
        if event["name"] == "gloo:all_reduce" and event["ts"] == 51_600:
            event["dur"] += 3_000  # its thread got the processor only 3 ms later
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert phases_ms(step)[3:5] == [22.9, 12.0]
    assert ms([step.calls[1].end_s]) == [65.0]


def test_collective_that_waits_for_a_thread_of_the_backend_keeps_when_it_was_issued(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    draw_step(draw, 0, 0.0)
    for event in draw.events:
        if event["name"] == "gloo:all_reduce" and event["ts"] == 51_600:
            event |= {"ts": 55_100, "dur": 9_900, "tid": 180}  # on the thread of the first, when that was done
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert [ms([call.issued_s, call.start_s, call.end_s]) for call in step.calls] == [
        [41.5, 41.6, 55.0],
        [51.5, 55.1, 65.0],
    ]
    assert ms(step.buckets_s) == [10.4, 12.5]


def test_blocking_collective_in_the_forward_pass_is_waited_for(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    draw_step(draw, 0, 0.0, sleep=20.0)
    draw.op("c10d::broadcast_", 31.1, 31.2)  # right behind the loss, where the main thread pauses for 20 ms
    draw.gloo(31.15, 41.2, kind="broadcast")
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert phases_ms(step)[2:5] == [14.8, 22.9, 22.0]
    assert [(call.kind, call.of_gradients) for call in step.calls] == [
        ("broadcast", False),
        ("all_reduce", True),
        ("all_reduce", True),
    ]


def test_barrier_at_the_end_of_the_last_step_is_waited_for(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    draw_step(draw, 0, 0.0)
    draw.op("c10d::barrier", 75.1, 75.2)
    draw.note("gloo:barrier", 75.15, 79.2, tid=180)
    profile = profile_rank(draw.write(tmp_path))
    step = profile.steps[0]
    assert ms([step.wait_s, step.host_s]) == [16.0, 0.7]
    assert profile.notes == ()  # a barrier has no size that could be missed


def test_pause_during_which_a_collective_goes_on_is_not_a_wait(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    draw_step(draw, 0, 0.0, sleep=20.0)
    draw.op("c10d::allreduce_", 31.1, 31.2)
    draw.gloo(31.15, 68.0, n=1)  # ends in the backward pass, 17 ms after the pause
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert phases_ms(step)[2:5] == [24.8, 22.9, 12.0]


def accumulating(folder: Path, n_batches: int = 0, *, exchanges: bool = False) -> RankProfile:
    """Draw a step of two passes of 8 samples, that fetches some batches from its loader; read it."""
    draw = Drawing(GLOO)
    draw.note("ProfilerStep#0", 0, 60)
    for at in (0, 30)[:n_batches]:
        draw.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, at + 0.1)
    for at in (0, 30):
        draw.note("DistributedDataParallel.forward", at, at + 9.8)
        draw.op("aten::linear", at, at + 10, Input_Dims=[[8, 10], [10, 10]], Input_type=["float"] * 2)
        draw.node("AddmmBackward0", at + 10, at + 18)
        draw.gradient(at + 18, at + 20, [100], issue=at + 19.5 if at or exchanges else None)
    draw.op("aten::add", 20.1, 21)
    if exchanges:
        draw.gloo(19.6, 24)
    draw.gloo(49.6, 54)
    draw.note("Optimizer.step#SGD.step", 54.2, 60)
    return profile_rank(draw.write(folder))


def test_accumulated_gradients_belong_to_one_step(tmp_path: Path) -> None:
    profile = accumulating(tmp_path)
    step = profile.steps[0]
    # 10 ms forward twice and 1 ms between; the host pauses from 21 to 30 ms; the update ends the step
    assert phases_ms(step) == [0.0, 21.0, 9.0, 20.0, 4.0, 6.0]
    assert ms(step.buckets_s) == [20.0]  # the first pass reduced nothing
    assert (step.micro_batches, *ms([step.earlier_s])) == (2, 10.0)
    assert [gradient.count for gradient in profile.gradients] == [100]
    assert ms([profile.gradients[0].backward_s]) == [9.0]


@pytest.mark.parametrize("n_batches", [0, 1, 2])
def test_a_pass_has_the_samples_that_its_first_layer_takes(tmp_path: Path, n_batches: int) -> None:
    profile = accumulating(tmp_path, n_batches)
    assert profile.batch_size == 8
    said = [note.partition(":")[0] for note in profile.notes if "micro-batches" in note]
    assert said == ["2 micro-batches of 8 samples in a step"]


@pytest.mark.parametrize(("n_batches", "batch_size"), [(0, 16), (2, 16), (1, 8)])
def test_passes_that_all_exchange_gradients_count_together(tmp_path: Path, n_batches: int, batch_size: int) -> None:
    profile = accumulating(tmp_path, n_batches, exchanges=True)
    assert (profile.batch_size, profile.steps[0].micro_batches) == (batch_size, 1)
    said = [note.partition(": ")[2] for note in profile.notes if "micro-batches" in note]
    assert said == ["their forward and backward passes count together"] * (batch_size == 16)


def test_update_that_runs_the_model_itself_begins_behind_the_backward_pass(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    draw_step(draw, 0, 0.0, sleep=20.0)
    draw.events = [event for event in draw.events if not event["name"].startswith("Optimizer")]
    draw.note("Optimizer.step#Adam.step", 5.1, 95)  # with a closure, as PyTorch Lightning calls it
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert phases_ms(step) == [5.0, 26.0, 25.0, 22.9, 12.0, 9.0]


def test_forward_pass_between_backward_pass_and_update_is_no_update(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    draw_step(draw, 0, 0.0)
    draw.events = [event for event in draw.events if not event["name"].startswith(("Optimizer", "aten::add_"))]
    draw.note("DistributedDataParallel.forward", 66.1, 70)
    draw.op("aten::linear", 66.1, 70)
    draw.note("Optimizer.step#Adam.step", 70.1, 79.9)
    step = profile_rank(draw.write(tmp_path)).steps[0]
    assert phases_ms(step) == [5.0, 30.2, 0.0, 22.9, 12.0, 9.8]


def test_steps_that_do_not_train_are_left_out(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    end = draw_step(draw, 0, 0.0)
    draw.note("ProfilerStep#1", end, end + 50)
    draw.op("aten::linear", end, end + 49)
    draw_step(draw, 2, end + 50)
    profile = profile_rank(draw.write(tmp_path))
    assert [step.number for step in profile.steps] == [0, 2]
    assert "steps without a backward pass were left out: 1" in profile.notes


def test_last_step_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    end = draw_step(draw, 0, 0.0)
    end = draw_step(draw, 1, end)
    draw_step(draw, 2, end)
    draw.events = [event for event in draw.events if event["ts"] < 1e3 * (end + 60)]
    profile = profile_rank(draw.write(tmp_path))
    assert [step.number for step in profile.steps] == [0, 1]
    assert "step 2 ends before its update and was left out" in profile.notes


@pytest.mark.parametrize("gone", [[], ["Optimizer"], ["Optimizer", "enumerate"]])
def test_steps_without_marks_are_found_by_what_repeats(tmp_path: Path, gone: list[str]) -> None:
    draw = Drawing(GLOO)
    end = 0.0
    for number in range(4):
        end = draw_step(draw, number, end)
    draw.events = [event for event in draw.events if not event["name"].startswith(("ProfilerStep", *gone))]
    profile = profile_rank(draw.write(tmp_path))
    assert [step.number for step in profile.steps] == [0, 1, 2]
    assert all(step.end_s - step.start_s == pytest.approx(0.08) for step in profile.steps)
    assert ms([profile.steps[1].backward_s, profile.steps[1].wait_s]) == [22.9, 12.0]
    assert any("steps carry no marks" in note for note in profile.notes)
    assert_adds_up(profile)


def test_trace_without_shapes_says_how_to_get_sizes(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    draw_step(draw, 0, 0.0)
    for event in draw.events:
        event["args"] = {}
    profile = profile_rank(draw.write(tmp_path))
    assert [call.nbytes for call in profile.steps[0].calls] == [None, None]
    assert profile.gradients == ()
    assert (profile.dtype, profile.batch_size) == ("", None)
    assert profile.notes == ("sizes of 2 of 2 collectives are unknown; profile with `record_shapes=True`",)


def test_collectives_whose_end_is_missing_are_counted(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    draw_step(draw, 0, 0.0)
    draw.events = [event for event in draw.events if event["tid"] != 181]
    profile = profile_rank(draw.write(tmp_path))
    assert len(profile.steps[0].calls) == 1
    assert profile.notes == ("the ends of 1 of 2 collectives are not in the trace",)


def test_trace_without_a_backward_pass_is_refused(tmp_path: Path) -> None:
    draw = Drawing()
    draw.note("ProfilerStep#0", 0, 10)
    draw.op("aten::linear", 0, 10)
    with pytest.raises(TraceError, match=r"rank0\.json: no backward pass in any of its 1 steps; is this training\?"):
        profile_rank(draw.write(tmp_path))


def test_trace_without_a_whole_step_is_refused(tmp_path: Path) -> None:
    draw = Drawing()
    draw.op("aten::linear", 0, 10)
    with pytest.raises(TraceError, match=r"rank0\.json: no whole step: .*call `profiler\.step\(\)` after every step"):
        profile_rank(draw.write(tmp_path))


def test_trace_of_the_gpu_alone_is_refused(tmp_path: Path) -> None:
    draw = Drawing()
    draw.gpu("sgemm", 0.0, 1.0, 2.0)
    with pytest.raises(TraceError, match=r"rank0\.json: no operators of the host; profile with `ProfilerActivity.CPU`"):
        profile_rank(draw.write(tmp_path))


def test_trace_of_the_host_alone_is_refused_where_a_gpu_computed(tmp_path: Path) -> None:
    draw = Drawing()
    draw_step(draw, 0, 0.0)
    draw.note("nccl:all_reduce", 41.5, 41.6, tid=AUTOGRAD)
    with pytest.raises(TraceError, match=r"no kernels of its GPU; profile with `activities=\[ProfilerActivity.CPU, "):
        profile_rank(draw.write(tmp_path))


def test_trace_with_launches_and_no_kernel_is_of_no_cpu(tmp_path: Path) -> None:
    draw = Drawing()
    draw_step(draw, 0, 0.0)
    draw.call("cudaLaunchKernel", 12.0, 12.01)
    with pytest.raises(TraceError, match="the job launches kernels, but the trace has no kernels of its GPU"):
        profile_rank(draw.write(tmp_path))


def test_a_cut_trace_without_kernels_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    draw = Drawing()
    draw_step(draw, 0, 0.0)
    draw.note("nccl:all_reduce", 41.5, 41.6, tid=AUTOGRAD)
    path = draw.write(tmp_path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: text.rindex("]")], encoding="utf-8")
    with pytest.raises(TraceError, match=r"no kernels of its GPU; .* Besides, the file ends early: what follows its"):
        profile_rank(path)


def recorded(job: str) -> list[RankProfile]:
    return [profile_rank(RECORDED / job / f"rank{rank}.json.gz") for rank in range(4)]


@pytest.mark.parametrize("job", ["late", "slow"])
def test_phases_of_recorded_steps_add_up(job: str) -> None:
    for profile in recorded(job):
        assert len(profile.steps) == (6 if job == "late" else 4)
        assert_adds_up(profile)


def test_sleeps_of_50_ms_are_found_where_they_were() -> None:
    found = {
        (profile.rank, step.number): step.host_s
        for profile in recorded("late")
        for step in profile.steps
        if step.host_s > 0.04
    }
    assert found.keys() == {(number % 4, number) for number in range(3, 9)}
    assert all(0.05 <= host_s < 0.055 for host_s in found.values())


def test_slow_and_late_ranks_are_told_apart() -> None:
    profiles = recorded("slow")
    late = {(p.rank, step.number) for p in profiles for step in p.steps if step.host_s > 0.09}
    assert late == {(0, 35), (3, 35)}
    for step in range(4):
        backward_s = [profile.steps[step].backward_s for profile in profiles]
        assert backward_s[1] / min(backward_s) == pytest.approx(1.4, rel=0.1)
    assert all(len(step.buckets_s) == 4 for profile in profiles for step in profile.steps)
    assert [gradient.count for gradient in profiles[0].gradients] == [10, 3500] + [350, 122_500] * 4
    assert all(profile.batch_size == 8 for profile in profiles)


@pytest.mark.parametrize("seed", range(40))
def test_trace_with_events_missing_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    draw = Drawing(GLOO)
    end = 0.0
    for number in range(3):
        end = draw_step(draw, number, end, sleep=rng.choice([0, 20]), copies=rng.random() < 0.5)
    profile, refusal = profile_without_some_events(draw, rng, tmp_path)
    if profile is None:
        assert refusal.startswith("no ")
        return
    assert profile.steps
    assert_adds_up(profile)


def test_order_of_events_does_not_matter(tmp_path: Path) -> None:
    draw = Drawing(GLOO)
    draw_step(draw, 0, 0.0)
    expected = profile_rank(draw.write(tmp_path)).steps
    random.Random(1).shuffle(draw.events)
    (tmp_path / "rank0.json").write_text(json.dumps(GLOO | {"traceEvents": draw.events}))
    assert profile_rank(tmp_path / "rank0.json").steps == expected
