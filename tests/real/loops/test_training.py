"""A wrapped training loop computes what its plan says, and is refused where it does not train in steps."""

import dataclasses
import re
import sys
from pathlib import Path

import loops
import numpy as np
import pytest
from loops import Extras, Loop, error_of, with_extras
from pool import Pool
from processes import run
from trainings import LATE, SCHEDULES, Torch, Training, assert_equal, by_plan, by_torch

import real
from simdist.cli import main
from simdist.errors import UnsupportedError
from simdist.plan import AllReduce, Backward, Delay, Forward, Optimize, Plan, Run, Select, Tick, occurrences, save
from simdist.plan.walk import walk
from simdist.schedules import HierarchicalSGD, LocalSGD, Schedule, Sync
from simdist.schedules.diloco import DiLoCo
from simdist.schedules.fsdp import FSDP
from simdist.schedules.fusion import Fusion, fuse
from simdist.schedules.gtopk import GTopK
from simdist.schedules.hitopk import HiTopK
from simdist.schedules.naive_ag import NaiveAllGather
from simdist.schedules.parameter_server import ParameterServer
from simdist.schedules.powersgd import PowerSGD
from simdist.schedules.torus import Torus
from simdist.traces.trace import Trace

plans = pytest.importorskip("real.loops.plans")

N_STEPS = 8  # two of the longest periods, after a warm-up
N_ACCUMULATED = 12  # three of the longest periods
SMALL = {"first_bucket_nbytes": 100, "bucket_nbytes": 300}
SHARING: list[Schedule] = [
    Sync(**SMALL, shared_update=True),
    Torus(**SMALL, shared_update=True),
    Sync(**SMALL, shared_update=2),
    Sync(**SMALL, shared_update=2, updates_sent_by="broadcast"),
    Sync(**SMALL, shared_update=True, updates_sent_by="broadcast"),
]
GRADIENT_SCHEDULES: list[Schedule] = [
    Sync(**SMALL, compression="fp16", parallel_optimizer=False),
    Torus(**SMALL),
    ParameterServer(servers=3, placement="greedy", **SMALL),
    NaiveAllGather(density=0.1, **SMALL),
    HiTopK(density=0.2, warmup_steps=2, **SMALL),
    GTopK(density=0.2, **SMALL),
    PowerSGD(rank=2, min_compression_rate=0.5, warmup_steps=2, **SMALL),
]
MODELS = ["mlp", "frozen", "tied", "conv", "dropout", "one rank uses it", "even backwards"]
STAND_FOR_OTHERS = {(0, model) for model in MODELS} | {(1, model) for model in MODELS[::2]}
STAND_FOR_OTHERS |= {(2, model) for model in ("dropout", *MODELS[1::2])}
STAND_FOR_OTHERS |= {(3, "tied"), (4, "conv"), (4, "one rank uses it"), (5, "mlp")}


# --- values ---


@pytest.mark.parametrize(
    ("schedule", "model"),
    [
        pytest.param(
            schedule,
            model,
            id=f"{schedule.name}-{model}",
            marks=[] if (number, model) in STAND_FOR_OTHERS else pytest.mark.full,
        )
        for number, schedule in enumerate([*SCHEDULES, *LATE])
        for model in MODELS
    ],
)
def test_a_wrapped_loop_ends_with_the_parameters_of_its_plan_to_the_last_bit(
    four: Pool, schedule: Schedule, model: str
) -> None:
    training = Training(model)
    looped = four.run(loops.train, Loop(schedule, training, N_STEPS, noisy=False, final_average=False))
    planned = four.run(by_plan, schedule.plan(training.job(4, N_STEPS)), training)
    for parameters, (expected, _) in zip(looped, planned, strict=True):
        np.testing.assert_array_equal(parameters, expected)


def test_a_wrapped_loop_has_only_the_steps_that_its_rank_does_not_sit_out(four: Pool, tmp_path: Path) -> None:
    schedule, training = LocalSGD(period=4, warmup_steps=1, inner_steps={1: 2, 3: 1}), Training("dropout")
    loop = Loop(schedule, training, N_STEPS, noisy=False, final_average=False)
    looped = four.run(loops.train, dataclasses.replace(loop, checkpoint=tmp_path, every=3))
    planned = four.run(by_plan, schedule.plan(training.job(4, N_STEPS)), training)
    assert_equal(looped, [parameters for parameters, _ in planned])
    errors = four.run(loops.error_of_loop, dataclasses.replace(loop, plain=True))
    assert all(f"the plan has {N_STEPS} steps, and all are done" in errors[rank] for rank in (1, 3))


def test_the_outer_optimizer_of_a_wrapped_loop_is_the_users(four: Pool) -> None:
    plain = Loop(LocalSGD(period=3), Training(), N_STEPS, final_average=False)
    outer = dataclasses.replace(plain, schedule=DiLoCo(period=3), outer_lr=1.0)
    for one, other in zip(four.run(loops.train, plain), four.run(loops.train, outer), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("optimizer", ["momentum", "lars"])
@pytest.mark.parametrize("schedule", GRADIENT_SCHEDULES, ids=[each.name for each in GRADIENT_SCHEDULES])
def test_a_wrapped_loop_compresses_as_its_plan_to_the_last_bit(four: Pool, schedule: Schedule, optimizer: str) -> None:
    training = Training(optimizer=optimizer)
    looped = four.run(loops.train, Loop(schedule, training, N_STEPS, noisy=False))
    planned = four.run(by_plan, schedule.plan(training.job(4, N_STEPS)), training)
    assert_equal(looped, [parameters for parameters, _ in planned])


def test_a_wrapped_loop_fuses_gradients_and_ticks(four: Pool, tmp_path: Path) -> None:
    plan = Sync(first_bucket_nbytes=0, bucket_nbytes=0).plan(Training().job(4, N_STEPS))
    gradients = [op.dst for op in plan.bodies[0] if isinstance(op, Backward)]
    fused = fuse(plan, Fusion(buffer_nbytes=600, cycle_s=0.02), dict.fromkeys(gradients, 0.01))
    loop = Loop(fused, Training(), None, noisy=False, trace=tmp_path / "trace.npz")
    looped = four.run(loops.train, loop)
    assert_equal(looped, [parameters for parameters, _ in four.run(by_plan, fused, Training())])
    assert_equal(looped, four.run(loops.train, dataclasses.replace(loop, trace=None)))
    trace = Trace.load(tmp_path / "trace.npz")
    (tick,) = (each.rows for each in occurrences(fused) if isinstance(each.op, Tick))
    written = next(each.rows for each in occurrences(fused) if each.op == Backward(*backward_of(fused)))
    assert (np.floor(trace.end_s[tick] / 0.02) > np.floor(trace.end_s[written] / 0.02)).all()


def backward_of(plan: Plan) -> tuple[tuple[str, ...], str]:
    """Return sources and destination of the backward pass that the tick of a plan comes after."""
    (tick,) = {op for body in plan.bodies for op in body if isinstance(op, Tick)}
    return next((op.srcs, op.dst) for op in plan.bodies[0] if isinstance(op, Backward) and op.dst == tick.srcs[0])


def test_gradients_that_were_changed_after_their_trust_ratios_are_refused(four: Pool) -> None:
    for error in four.run(loops.clips_with_lars):
        assert error.startswith("RunError: step 0: gradients have changed since backward() returned")


@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [
        pytest.param(
            schedule,
            optimizer,
            marks=pytest.mark.full if optimizer == "groups" and number not in (1, 3) else (),
            id=f"{schedule.name}-{optimizer}",
        )
        for number, schedule in enumerate(SHARING)
        for optimizer in ("momentum", "groups")
    ],
)
def test_a_wrapped_loop_shares_updates_and_goes_on_after_a_checkpoint(
    four: Pool, schedule: Schedule, optimizer: str, tmp_path: Path
) -> None:
    training = Training(optimizer=optimizer)
    alone = four.run(loops.train, Loop(type(schedule)(**SMALL), training, N_STEPS, decay=True))
    begun = Loop(schedule, training, N_STEPS, decay=True, checkpoint=tmp_path / "saved", every=3, stop_before=5)
    four.run(loops.error_of_loop, begun)
    shared = four.run(loops.train, dataclasses.replace(begun, stop_before=None))
    for ours, theirs in zip(shared, alone, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-15)


@pytest.mark.parametrize("schedule", SHARING, ids=[each.name for each in SHARING])
def test_gradients_of_shared_updates_are_clipped_as_whole_ones_are(four: Pool, schedule: Schedule) -> None:
    clipped = Loop(schedule, Training(), N_STEPS, max_norm=0.01)
    looped = four.run(loops.train, clipped)
    for ours, theirs in zip(looped, four.run(loops.train, dataclasses.replace(clipped, schedule=Sync())), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-15)


def test_each_rank_keeps_the_state_of_its_slice(four: Pool) -> None:
    n_elements = sum(Training().job(4, 1).tensor_counts)
    by_broadcast = Sync(shared_update=2, updates_sent_by="broadcast")
    for schedule, sharers in (
        (Sync(shared_update=True), 4),
        (Torus(shared_update=True), 2),
        (Sync(shared_update=2), 2),
        (by_broadcast, 2),
        (Sync(), 1),
    ):
        counts = four.run(loops.state_counts, schedule)
        assert sum(counts) == 2 * n_elements * 4 // sharers  # Adam's two moments
        assert max(counts) <= 2 * -(-n_elements // sharers)


def test_what_cannot_be_done_to_slices_is_refused(four: Pool) -> None:
    expected = [
        "step 0: gradients have changed since backward() returned, and ranks update with slices of the mean",
        "the state of the optimizer is shared: each rank has a slice of it",
        "worker.join() with shared updates: others would wait for the slice of a rank that is through",
        "plan sync-shared shares updates: Adafactor does not update each element of parameter group 0 by itself: it "
        "gives slices of a matrix other values than the matrix",
        "has param_dtype: ranks would keep slices of the parameters in another type than the model",
    ]
    for errors in four.run(loops.misuses_of_shared_updates):  # each rank's own, or that of one that came first
        assert [part in error for part, error in zip(expected, errors, strict=True)] == [True] * 5, errors


def test_an_optimizer_is_left_as_it_was(one: Pool) -> None:
    assert one.run(loops.lars_after_wrap) == [True]


def test_servers_beside_the_ranks_are_refused_before_the_first_step(four: Pool) -> None:
    for error in four.run(loops.error_of_loop, Loop(ParameterServer(servers=2, apart=True), Training(), N_STEPS)):
        assert "goes through servers beside the ranks, which can be simulated only; let ranks be the servers" in error


def test_a_plain_loop_computes_the_same(four: Pool) -> None:
    loop = Loop(SCHEDULES[2], Training("dropout"), N_STEPS)
    assert_equal(four.run(loops.train, dataclasses.replace(loop, plain=True)), four.run(loops.train, loop))


def test_a_plan_file_and_a_plan_do_the_same_as_their_schedule(four: Pool, tmp_path: Path) -> None:
    loop = Loop(SCHEDULES[2], Training(), N_STEPS)
    expected = four.run(loops.train, loop)
    plan = SCHEDULES[2].plan(Training().job(4, N_STEPS))
    save(plan, tmp_path / "plan.json")
    for source in (plan, tmp_path / "plan.json"):
        assert_equal(four.run(loops.train, dataclasses.replace(loop, schedule=source, n_steps=None)), expected)


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_accumulated_gradients_are_synchronised_as_by_ddp(four: Pool, optimizer: str) -> None:
    training = Training(optimizer=optimizer, micro_batches=3)
    expected = four.run(by_torch, Torch(), training, N_ACCUMULATED)
    for ours, (theirs, _) in zip(
        four.run(loops.accumulated, Sync(**SMALL), training, N_ACCUMULATED), expected, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize(
    ("schedule", "how"),
    [
        (LocalSGD(period=4, phase=0), Torch(ddp=False, levels=((4, 4),), plain=True)),
        (
            HierarchicalSGD(levels={2: 2, 4: "world"}, phase=0, intra_node_gradients=False),
            Torch(local_after=0, levels=((2, 2), (4, 4))),
        ),
    ],
)
def test_accumulated_parameters_are_averaged_as_by_torchs_averagers_to_the_last_bit(
    four: Pool, schedule: Schedule, how: Torch, optimizer: str
) -> None:
    training = Training(optimizer=optimizer, micro_batches=3)
    expected = four.run(by_torch, how, training, N_ACCUMULATED)
    ours = four.run(loops.accumulated, schedule, training, N_ACCUMULATED)
    assert_equal(ours, [parameters for parameters, _ in expected])


@pytest.mark.parametrize(("schedule", "by_itself"), list(zip(SCHEDULES, (False, True, False), strict=True)))
def test_a_loop_does_the_passes_of_its_plan(four: Pool, schedule: Schedule, by_itself: bool, tmp_path: Path) -> None:
    training = Training("one rank uses it", micro_batches=3)
    plan = schedule.plan(training.job(4, N_STEPS))
    looped = four.run(loops.accumulated, plan, training, N_STEPS, tmp_path / "trace.npz", by_itself)
    assert_equal(looped, [parameters for parameters, _ in four.run(by_plan, plan, training)])
    trace = Trace.load(tmp_path / "trace.npz")
    passes = [each.index for each in walk(plan) if isinstance(each.op, Forward | Backward)]
    assert (trace.end_s[passes[:-1]] <= trace.start_s[passes[1:]]).all()


@pytest.mark.parametrize(("n_passes", "problem"), [(2, "optimizer.step() between two of"), (4, "pass 3 in worker.no")])
def test_a_loop_with_other_passes_than_its_plan_is_refused(one: Pool, n_passes: int, problem: str) -> None:
    (error,) = one.run(loops.passes_unlike_the_plan, n_passes)
    assert problem in error
    assert "plan sync has 3 passes in a step; the last of the accumulated passes must be outside" in error


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_uneven_data_is_trained_on_as_by_join_of_ddp(four: Pool, optimizer: str) -> None:
    ours, ddp = (four.run(loops.uneven, by_ddp, optimizer) for by_ddp in (False, True))
    for each, other in zip(ours, ddp, strict=True):
        np.testing.assert_allclose(each, other, rtol=0, atol=1e-12)


def test_a_joined_rank_takes_part_in_averages_with_its_last_parameters(four: Pool) -> None:
    (*_, longest), joined = (four.run(loops.uneven_and_local, by_hand) for by_hand in (True, False))
    for each in joined:
        np.testing.assert_allclose(each, longest, rtol=0, atol=1e-14)


def test_averages_between_steps_are_those_of_local_sgd(four: Pool) -> None:
    expected = four.run(loops.train, Loop(LocalSGD(period=3), Training(), 6, noisy=False))
    assert_equal(four.run(loops.averaged_by_hand, 3, 6), expected)


def test_a_loop_that_goes_on_by_itself_follows_the_schedule_from_its_first_step(four: Pool) -> None:
    loop = Loop(LocalSGD(period=4, warmup_steps=6), Training(optimizer="sgd"), 13, noisy=False)
    assert_equal(four.run(loops.in_two_parts, 6, 13), four.run(loops.train, loop))


@pytest.mark.parametrize("buffers", [False, True])
def test_parameters_are_averaged_at_the_end_and_buffers_by_choice(four: Pool, buffers: bool) -> None:
    local, averaged = (four.run(loops.means_at_the_end, each, buffers) for each in (False, True))
    parameters, means = (np.mean(each, axis=0) for each in zip(*local, strict=True))
    for (ours, our_means), (_, own_means) in zip(averaged, local, strict=True):
        np.testing.assert_allclose(ours, parameters, rtol=0, atol=1e-15)
        np.testing.assert_allclose(our_means, means if buffers else own_means, rtol=0, atol=1e-15)


@pytest.mark.parametrize("how", ["steps first", "batches first", "without steps"])
def test_epochs_neither_lose_nor_count_a_step(one: Pool, how: str, tmp_path: Path) -> None:
    expected = one.run(loops.train, Loop(Sync(), Training(), 12, ranks_per_node=1, noisy=False))
    assert_equal(one.run(loops.in_epochs, how, tmp_path), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000008.ckpt", "step-0000000012.ckpt"]


@pytest.mark.parametrize(
    ("custom", "optimizer"),
    [
        ("compiled", "adamw"),
        pytest.param("compiled", "momentum", marks=pytest.mark.full),
        ("compiled before", "adamw"),
        ("frozen", "adamw"),
        ("checkpoint", "adamw"),
        ("averaged", "adamw"),
    ],
)
def test_customs_of_users_work_as_with_ddp(four: Pool, custom: str, optimizer: str) -> None:
    of_wrap, of_ddp, of_bare = (four.run(loops.with_customs, custom, optimizer, by) for by in ("wrap", "ddp", "bare"))
    for ours, ddp, bare in zip(of_wrap, of_ddp, of_bare, strict=True):
        np.testing.assert_allclose(ours[0], ddp[0], rtol=0, atol=1e-12)
        assert ours[1] == ddp[1]
        assert ours[2] == bare[2]


@pytest.mark.parametrize("schedule", [SCHEDULES[1], HierarchicalSGD(levels={2: 2, 70: "world"})])
def test_a_loop_without_end_computes_the_same(four: Pool, schedule: Schedule) -> None:
    loop = Loop(schedule, Training("dropout"), 75)
    endless = dataclasses.replace(loop, n_steps=None, stop_before=75)
    assert_equal(four.run(loops.train, endless), four.run(loops.train, loop))


@pytest.mark.parametrize("n_steps", [1_000_000, None])
def test_the_start_of_a_long_loop_takes_no_longer(one: Pool, n_steps: int | None) -> None:
    schedule = LocalSGD(period=8)
    assert one.run(loops.cpu_s_to_start, n_steps, schedule) < [2 * one.run(loops.cpu_s_to_start, 1_000, schedule)[0]]


@pytest.mark.parametrize(
    "extras",
    [
        Extras(clip=True),
        Extras(overflow=True),
        Extras(autocast=True),
        Extras(evaluate=True),
        Extras(overflow=True, keep_grads=True),
    ],
    ids=["clip", "overflow", "autocast", "evaluate", "zero_grad keeps gradients"],
)
def test_what_else_users_do_works_as_with_ddp(four: Pool, extras: Extras) -> None:
    for ours, ddp in zip(four.run(with_extras, extras, False), four.run(with_extras, extras, True), strict=True):
        np.testing.assert_allclose(ours[0], ddp[0], rtol=0, atol=1e-6)
        np.testing.assert_allclose(ours[1], ddp[1], rtol=1e-5)  # when backward() returns, gradients are averaged


@pytest.mark.parametrize(
    ("schedule", "fused", "expected"),
    [
        (Sync(), False, []),
        (LocalSGD(period=2), False, ["rank 1: 1, last in step 1"]),
        (LocalSGD(period=2), True, ["rank 1: 1"]),
    ],
)
def test_ranks_whose_gradient_scalers_part_are_told(four: Pool, schedule, fused: bool, expected: list[str]) -> None:
    told, *others = (texts for texts, _ in four.run(loops.with_scalers, schedule, fused))
    assert [text.partition("may differ: ")[2] for text in told] == expected
    assert others == [[]] * 3


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("schedule", [HiTopK(density=0.2, **SMALL), NaiveAllGather(density=0.1, **SMALL)])
def test_what_overflows_does_not_come_back_by_error_feedback(four: Pool, schedule: Schedule, fused: bool) -> None:
    assert four.run(loops.with_scalers, schedule, fused) == [([], 2.0**15)] * 4  # halved once


def test_a_trace_that_cannot_be_written_is_told_on_all_ranks_before_they_train(four: Pool, tmp_path: Path) -> None:
    lock = tmp_path / "trace.parts" / ".lock"
    lock.mkdir(parents=True)  # nothing can be written there, even by root
    for error in four.run(loops.error_of_loop, Loop(SCHEDULES[0], Training(), 3, trace=tmp_path / "trace.npz")):
        assert error == f"RunError: {lock}: cannot be written: Is a directory"


def test_plan_for_returns_the_plan_that_wrap_performs(four: Pool) -> None:
    for performed, planned in four.run(loops.digests, 5):
        assert performed == planned


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "whole", "penalty"])
def test_passes_within_a_backward_pass_are_no_backward_passes(one: Pool, how: str) -> None:
    wrapped, bare = (one.run(loops.with_passes_within_passes, how, wrapped) for wrapped in (True, False))
    assert_equal(wrapped, bare)


def test_hooks_of_the_user_are_called(one: Pool) -> None:
    assert one.run(loops.order_of_hooks)[0] == ["forward", "gradient", "update"]


# --- traces and delays ---


def test_the_trace_shows_all_reduces_under_way_in_the_backward_pass(four: Pool, tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    four.run(loops.train, Loop(SCHEDULES[0], Training(), N_STEPS, trace=path, slow_s=0.02))
    trace = Trace.load(path)
    assert trace.plan.n_steps == N_STEPS
    assert not np.isnan(trace.end_s).any()
    rows = {type(each.op): each.rows for each in occurrences(trace.plan)}
    first = next(each.rows for each in occurrences(trace.plan) if isinstance(each.op, AllReduce))
    overlaps = trace.ready_s[first] < trace.end_s[rows[Backward]]  # the first bucket's, and the last Backward
    assert overlaps.any(axis=0).all()
    assert (trace.end_s[rows[AllReduce]] <= trace.ready_s[rows[Optimize]]).all()


def test_the_trace_shows_a_selection_under_way_in_the_backward_pass(four: Pool, tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    schedule = HiTopK(density=0.2, **SMALL)
    four.run(loops.train, Loop(schedule, Training(), N_STEPS, trace=path, slow_s=0.02))
    trace = Trace.load(path)
    rows = [each.rows for each in occurrences(trace.plan) if isinstance(each.op, Select)]
    last_backward = [each.rows for each in occurrences(trace.plan) if isinstance(each.op, Backward)][-1]
    overlaps = trace.ready_s[rows[0]] < trace.end_s[last_backward]
    assert len(rows) > 1
    assert overlaps.any(axis=0).all()


def test_a_run_directory_brings_its_delays(four: Pool, tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text(SCENARIO, encoding="utf-8")
    assert main(["plan", str(tmp_path / "scenario.yaml"), "-o", str(tmp_path / "run")]) == 0
    path = tmp_path / "trace.npz"
    four.run(loops.train, Loop(tmp_path / "run", Training(dtype=loops.SINGLE), None, trace=path))
    trace = Trace.load(path)
    (delay,) = (each for each in occurrences(trace.plan) if isinstance(each.op, Delay))
    took_s = trace.end_s[delay.rows] - trace.start_s[delay.rows]
    assert (took_s[:, 1] >= 0.003).all()
    assert (np.delete(took_s, 1, axis=1) < 0.003).any()


def test_a_delay_of_one_micro_batch_arrives_in_its_pass(four: Pool, tmp_path: Path) -> None:
    late_s = np.zeros((6, 3, 4))
    late_s[2, 1, 1] = 0.2
    np.savez(tmp_path / "late.npz", compute=late_s)
    text = SCENARIO.replace(
        "{kind: persistent, delay: 3 ms, ranks: [1]}", "{kind: recorded, on: compute, file: late.npz}"
    )
    text = text.replace("  forward: 1 ms", "  forward: 1 ms\n  micro_batches: 3")
    (tmp_path / "scenario.yaml").write_text(text, encoding="utf-8")
    assert main(["plan", str(tmp_path / "scenario.yaml"), "-o", str(tmp_path / "run")]) == 0
    training = Training(dtype=loops.SINGLE, micro_batches=3)
    four.run(loops.accumulated, tmp_path / "run", training, 6, tmp_path / "trace.npz")
    trace = Trace.load(tmp_path / "trace.npz")
    took_s = np.empty_like(late_s)
    for each in occurrences(trace.plan):
        if isinstance(each.op, Delay):
            took_s[each.steps, each.op.micro_batch] = trace.end_s[each.rows] - trace.start_s[each.rows]
    assert took_s[2, 1, 1] >= 0.2
    assert took_s[2, 1, 1] == took_s.max()


SCENARIO = """
cluster: {preset: ideal, nodes: 2, gpus_per_node: 2}
workload:
  tensors: [{name: a, count: 48}, {name: b, count: 8}, {name: c, count: 64}, {name: d, count: 8},
            {name: e, count: 24}, {name: f, count: 3}]
  batch_size: 5
  forward: 1 ms
disturbances: [{kind: persistent, delay: 3 ms, ranks: [1]}]
schedules: [{kind: sync}]
steps: 6
"""


# --- refused ---

MISUSES = {
    loops.two_forwards: "a second forward pass in training mode, between the forward and the backward pass",
    loops.update_without_backward: "RunError: step 0: optimizer.step() between the forward and the backward pass",
    loops.update_in_eval_mode: "RunError: step 0: optimizer.step() before the forward pass; call the model that was",
    loops.clipped_too_early: "step 0: worker.clip_grad_norm_() before the forward pass; it belongs before",
    loops.two_updates: "RunError: step 1: optimizer.step() before the forward pass",
    loops.closure_again_and_again: "RunError: step 0: LBFGS.step(closure) calls its closure several times",
    loops.closure_after_a_pass: "so a step would have two; compute the gradients in the closure alone. To accumulate "
    "gradients, do all passes but a step's last in `with worker.no_sync():`",
    loops.unknown_wrapper: "its .inner is an optimizer of torch: write real.wrap(model, optimizer.inner, schedule)",
    loops.optimizer_that_shards: "ZeroRedundancyOptimizer synchronises ranks itself: wrap a plain optimizer, and",
    loops.sparse_layer: "UnsupportedError: Sequential: layer '1.0' (EmbeddingBag) has sparse gradients, and those of a",
    loops.sparse_gradient: "RunError: step 0: the gradient of table is sparse, and those of a plan are dense",
    loops.updated_by_another: "RunError: step 0: parameters have changed since backward() returned, but not in the ste",
    loops.too_many_steps: "RunError: step 2: the plan has 2 steps, and all are done; wrap with a larger n_steps",
    loops.no_zero_grad: "RunError: step 1: gradients of the step before are still there",
    loops.accumulation: "to accumulate them, do all passes but a step's last in `with worker.no_sync():`",
    loops.never_synchronised: "; the last of the accumulated passes must be outside worker.no_sync()",
    loops.average_within_a_step: "step 0: worker.average() between the forward and the backward pass; do that between",
    loops.two_backwards: "RunError: step 0: a second backward pass before optimizer.step()",
    loops.idle_loop: "RunError: step 0: the loop asks for the next one before the forward pass",
    loops.half_step: "RunError: step 0: the loop asks for the next one between the forward and the backward pass",
    loops.moved: "RunError: step 0: the model was moved, converted or wrapped again after real.wrap",
    loops.differentiated_twice: "RunError: step 0: loss.backward(create_graph=True); gradients are moved into buckets",
    loops.unfrozen: "RunError: step 0: parameters were unfrozen, replaced or added after real.wrap",
    loops.layer_replaced: "RunError: step 0: parameters were unfrozen, replaced or added after real.wrap",
    loops.group_added: "RunError: step 3: parameters were unfrozen, replaced or added after real.wrap",
    loops.ddp_inside: "has a DistributedDataParallel: real.wrap takes its place, so wrap the bare model, which is its",
    loops.distributed_tensors: "has a DTensor, distributed by hand, which a plan does not know: shard the model by",
    loops.strange_optimizer: "UnsupportedError: SGD updates 2 tensors that are no parameters of Linear",
    loops.two_types_in_slices: "the model has parameters of float32 and float64, and ReduceScatter takes one type",
    loops.two_types_compressed: "the model has parameters of float32 and float64, and Select takes one type: take Sync",
    loops.complex_numbers: "UnsupportedError: Linear has parameters of torch.complex64; a plan takes float64, float32",
    loops.nothing_to_train: "UnsupportedError: Linear has no parameter that is trained",
    loops.no_steps: "ScenarioError: n_steps=0; write how many steps the loop has in all, or None",
    loops.begun_before_the_beginning: "ScenarioError: first_step=-1; steps count from 0",
    loops.trained_after_close: "RunError: a pass in training mode after the loop was closed; do that before, or call",
    loops.averaged_after_close: "RunError: worker.average() after the loop was closed",
    loops.two_optimizers: "UnsupportedError: list is no torch.optim.Optimizer: write real.wrap(model, optimizer, sched",
    loops.begun_after_the_end: "RunError: first_step=3, and n_steps=2: choose a larger number",
    loops.endless_trace: "n_steps=None; a trace has a row for every operation: write n_steps=",
    loops.endless_delays: "n_steps=None; delays are given step by step: write n_steps=",
    loops.large_nodes: "ScenarioError: ranks_per_node=3 does not divide 1 ranks",
    loops.schedule_for_more: "ScenarioError: hsgd-2-2,4-4: levels: group of 2 at period 2 does not divide 1 ranks",
    loops.undelayed_channel: "PlanError: plan sync does not delay io: leave these delays out",
    loops.short_delays: "PlanError: host delays have shape (1, 3, 1); a run of plan sync takes (1, 4, 1)",
    loops.another_model: "PlanError: plan sync: buffer param has 8 elements; this model's tensors 0:2 have 6",
    loops.plan_for_more: "RunError: plan sync is for 2 ranks, and there are 1",
    loops.other_n_steps: "PlanError: plan sync has 9 steps; n_steps=4: leave it out",
    loops.missing_plan: "PlanError: no/such/plan.json: cannot be read",
    loops.every_zero: "ScenarioError: every=0; checkpoints are at least 1 step apart",
    loops.half_a_step: "ScenarioError: n_steps=2.5; write how many steps",
    loops.class_of_schedules: "LocalSGD'>: write a schedule, such as LocalSGD(period=4), a Plan, or a path of one",
    loops.epoch_beside: "ScenarioError: also: epoch has no state_dict() and load_state_dict(): leave it out",
    loops.no_patience: "ScenarioError: timeout_s=0.0; write seconds, more than 0",
    loops.unnamed_nodes: "ScenarioError: LOCAL_WORLD_SIZE is not set, as torchrun does: write ranks_per_node=",
}


IN_EVERY_STEP = "averages gradients over all ranks in every step, so averages of parameters change nothing: use Sync()"
DOUBTS = [
    (Sync(), {}, []),
    (HierarchicalSGD(levels={2: 2, 4: "world"}, intra_node_gradients=False), {"n_steps": 6}, []),
    (HierarchicalSGD(levels={4: "world"}), {"launch": real.Launch(ranks_per_node=4)}, [IN_EVERY_STEP]),
    (HierarchicalSGD(levels={2: 2, 4: "world"}), {}, ["over groups of 2, whose gradients are averaged in every step"]),
    (LocalSGD(period=1), {}, ["averages parameters over all ranks in every step: Sync() does as much"]),
    (LocalSGD(period=16), {}, ["never averages over all ranks in 8 steps"]),
    (
        LocalSGD(period=3),
        {"averaging": loops.LOCAL_TO_THE_END},
        ["does not average over all ranks in the last of 8"],
    ),
    (
        LocalSGD(period=4, input={"prefetch": 2}),
        {},
        ["has input.prefetch, without effect: the loop brings its own batches"],
    ),
]


@pytest.mark.parametrize(("schedule", "options", "expected"), DOUBTS)
def test_what_a_schedule_cannot_do_here_is_said_once_on_rank_0(four: Pool, schedule, options, expected) -> None:
    told, *others = four.run(loops.doubts, schedule, options)
    assert len(told) == len(expected)
    assert all(part in text for part, text in zip(expected, told, strict=True))
    assert others == [[]] * 3


def test_a_loop_with_batches_of_its_own_is_told_once_that_its_plan_reads_some(one: Pool) -> None:
    ((told,),) = one.run(loops.brings_its_own_batches)
    assert "reads its batches, and the loop brings its own" in told


def test_an_optimizer_of_a_part_is_told(one: Pool) -> None:
    ((told,),) = one.run(loops.doubts, Sync(), {"launch": loops.ONE}, True)
    assert "finds 4 of 6 trained parameters that SGD leaves out: freeze them, or let their own optimizer" in told


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.__name__)
def test_a_loop_that_does_not_train_in_steps_is_refused(one: Pool, misuse) -> None:
    (error,) = one.run(error_of, misuse)
    assert MISUSES[misuse] in error


def body_of(plan: Plan, body: tuple) -> Plan:
    return dataclasses.replace(plan, bodies=(body,), order=(Run((0,), plan.n_steps),))


def test_plans_that_are_no_training_loop_are_refused() -> None:
    plan = Sync(first_bucket_nbytes=8, bucket_nbytes=8).plan(Training().job(4, 3))
    (body,) = plan.bodies
    plans.check_shape(plan)
    update = next(op for op in body if isinstance(op, Optimize))
    others = tuple(op for op in body if op != update)
    for changed, problem in {
        (*body, *body): "its passes are Forward, Backward, .*, Optimize, Forward",
        (update, *others): "its passes are Optimize, Forward",
        others: "its passes are Forward, Backward",
        tuple(op for op in body if getattr(op, "dst", "") != "grad.1"): "its backward pass computes tensors .* of 6",
        (*others, dataclasses.replace(update, grads=("param",))): "it updates with param, which is no bucket",
    }.items():
        with pytest.raises(UnsupportedError, match=problem):
            plans.check_shape(body_of(plan, changed))


def test_a_plan_that_shards_the_model_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"it shards the model, which .* perform this plan with `python -m real`"
    ):
        plans.check_shape(FSDP().plan(Training().job(4, 3)))


# --- connected by `wrap`, as under torchrun ---


FAILURES = {
    "raises": "bad batch",
    "is killed": "ended without a word",
    "skips a bad batch": "failed: step 3: a second forward pass in training mode",
}


@pytest.mark.parametrize("how", FAILURES)
def test_the_others_learn_who_failed(how: str) -> None:
    endings = run(loops.fails_on_one_rank, 3, how)
    for rank in (0, 2):
        assert "RunError" in endings[rank].output
        assert "rank 1" in endings[rank].output
        assert FAILURES[how] in endings[rank].output
    assert how != "raises" or "ValueError: bad batch" in endings[1].output


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_of_a_loop_that_was_not_closed_part_as_they_exit(fails: bool) -> None:
    """As commands, because functions leave out what the interpreter does at its exit."""
    endings = run([sys.executable, "-c", f"import loops; loops.never_closed({fails})"], 2)
    assert [endings[rank].code for rank in range(2)] == [fails, fails], endings
    told = r"rank 1 \(.*\) failed: bad batch" if fails else "RuntimeWarning: local-4: the loop was not closed"
    assert re.search(told, endings[0].output)
    assert "the loop was not closed" not in endings[1].output


def test_ranks_that_end_well_say_so() -> None:
    assert {ending.output for ending in run(loops.fails_on_one_rank, 2, "not").values()} == {"done\n"}


def test_all_ranks_wrap_the_same() -> None:
    for ending in run(loops.wraps_another_model, 3).values():
        assert "must be the same on every rank" in ending.output
        assert "on rank 1" in ending.output
