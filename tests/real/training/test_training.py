"""A wrapped training loop computes what its plan says, and is refused where it does not train in steps."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import loops
import numpy as np
import pytest
from loops import Extras, Loop, error_of, with_extras
from pool import Pool
from processes import run
from trainings import SCHEDULES, Training, assert_equal, by_plan

from simdist.cli import main
from simdist.errors import UnsupportedError
from simdist.plan import AllReduce, Backward, Delay, Optimize, Plan, Run, Select, Tick, occurrences, save
from simdist.schedules import Schedule, Sync
from simdist.schedules.fusion import Fusion, fuse
from simdist.schedules.gtopk import GTopK
from simdist.schedules.hitopk import HiTopK
from simdist.schedules.naive_ag import NaiveAllGather
from simdist.schedules.parameter_server import ParameterServer
from simdist.schedules.torus import Torus
from simdist.traces.trace import Trace

real_hooks = pytest.importorskip("real.training.hooks")

N_STEPS = 8  # two of the longest periods, after a warm-up
SMALL = {"first_bucket_nbytes": 100, "bucket_nbytes": 300}
GRADIENT_SCHEDULES: list[Schedule] = [
    Sync(**SMALL, compression="fp16", parallel_optimizer=False),
    Torus(**SMALL),
    ParameterServer(servers=3, placement="greedy", **SMALL),
    NaiveAllGather(density=0.1, **SMALL),
    HiTopK(density=0.2, warmup_steps=2, **SMALL),
    GTopK(density=0.2, **SMALL),
]
MODELS = ["mlp", "frozen", "tied", "conv", "dropout", "one rank uses it", "even backwards"]
STAND_FOR_OTHERS = {(0, model) for model in MODELS} | {(1, model) for model in MODELS[::2]}
STAND_FOR_OTHERS |= {(2, model) for model in ("dropout", *MODELS[1::2])}


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def one() -> Iterator[Pool]:
    pool = Pool(1)
    yield pool
    pool.close()


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
        for number, schedule in enumerate(SCHEDULES)
        for model in MODELS
    ],
)
def test_a_wrapped_loop_ends_with_the_parameters_of_its_plan_to_the_last_bit(
    four: Pool, schedule: Schedule, model: str
) -> None:
    training = Training(model)
    looped = four.run(loops.train, Loop(schedule, training, N_STEPS, noisy=False))
    planned = four.run(by_plan, schedule.plan(training.job(4, N_STEPS)), training)
    for parameters, (expected, _) in zip(looped, planned, strict=True):
        np.testing.assert_array_equal(parameters, expected)


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


@pytest.mark.parametrize(
    "extras",
    [Extras(clip=True), Extras(overflow=True), Extras(autocast=True), Extras(evaluate=True), Extras(keep_grads=True)],
    ids=["clip", "overflow", "autocast", "evaluate", "zero_grad keeps gradients"],
)
def test_what_else_users_do_works_as_with_ddp(four: Pool, extras: Extras) -> None:
    for ours, ddp in zip(four.run(with_extras, extras, False), four.run(with_extras, extras, True), strict=True):
        np.testing.assert_allclose(ours[0], ddp[0], rtol=0, atol=1e-6)
        np.testing.assert_allclose(ours[1], ddp[1], rtol=1e-5)  # when backward() returns, gradients are averaged


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "penalty"])
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
    loops.two_updates: "RunError: step 1: optimizer.step() before the forward pass",
    loops.closure: "optimizer.step() without a closure",
    loops.too_many_steps: "RunError: the plan has 2 steps, and all are done; wrap with a larger n_steps",
    loops.no_zero_grad: "RunError: step 1: gradients of the step before are still there",
    loops.accumulation: "gradients cannot be accumulated over several steps",
    loops.two_backwards: "RunError: step 0: a second backward pass before optimizer.step()",
    loops.idle_loop: "RunError: step 0: the loop asks for the next one before the forward pass",
    loops.half_step: "RunError: step 0: the loop asks for the next one between the forward and the backward pass",
    loops.moved: "RunError: step 0: the model was moved or converted after real.wrap",
    loops.strange_optimizer: "UnsupportedError: SGD updates 2 tensors that are no parameters of Linear",
    loops.two_types: "UnsupportedError: Sequential has parameters of torch.float32, torch.float64",
    loops.nothing_to_train: "UnsupportedError: Linear has no parameter that is trained",
    loops.no_steps: "ScenarioError: n_steps=None; write how many steps the loop has in all",
    loops.large_nodes: "ScenarioError: ranks_per_node=3 does not divide 1 ranks",
    loops.schedule_for_more: "ScenarioError: hsgd-2-2,4-4: levels: group of 2 at period 2 does not divide 1 ranks",
    loops.undelayed_channel: "PlanError: plan sync does not delay io: leave these delays out",
    loops.short_delays: "PlanError: host delays have shape (1, 3, 1); a run of plan sync takes (1, 4, 1)",
    loops.another_model: "PlanError: plan sync: buffer param has 8 elements; this model's tensors 0:2 have 6",
    loops.plan_for_more: "RunError: plan sync is for 2 ranks, and there are 1",
    loops.other_n_steps: "PlanError: plan sync has 9 steps; n_steps=4: leave it out",
    loops.missing_plan: "PlanError: no/such/plan.json: cannot be read",
    loops.every_zero: "ScenarioError: every=0; checkpoints are at least 1 step apart",
    loops.unnamed_nodes: "ScenarioError: LOCAL_WORLD_SIZE is not set, as torchrun does: write ranks_per_node=",
}


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.__name__)
def test_a_loop_that_does_not_train_in_steps_is_refused(one: Pool, misuse) -> None:
    (error,) = one.run(error_of, misuse)
    assert MISUSES[misuse] in error


def body_of(plan: Plan, body: tuple) -> Plan:
    return dataclasses.replace(plan, bodies=(body,), order=(Run((0,), plan.n_steps),))


def test_plans_that_are_no_training_loop_are_refused() -> None:
    plan = Sync(first_bucket_nbytes=8, bucket_nbytes=8).plan(Training().job(4, 3))
    (body,) = plan.bodies
    real_hooks.check_shape(plan)
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
            real_hooks.check_shape(body_of(plan, changed))


# --- connected by `wrap`, as under torchrun ---


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_the_others_learn_who_failed(how: str) -> None:
    endings = run(loops.fails_on_one_rank, 3, how)
    for rank in (0, 2):
        assert "RunError" in endings[rank].output
        assert "rank 1" in endings[rank].output
        assert ("bad batch" if how == "raises" else "ended without a word") in endings[rank].output
    assert how == "is killed" or "ValueError: bad batch" in endings[1].output


def test_ranks_that_end_well_say_so() -> None:
    assert {ending.output for ending in run(loops.fails_on_one_rank, 2, "not").values()} == {"done\n"}


def test_all_ranks_wrap_the_same() -> None:
    for ending in run(loops.wraps_another_model, 3).values():
        assert "must be the same on every rank" in ending.output
        assert "on rank 1" in ending.output
