"""The proof accepts what computes the declared result, in any form, and refuses every mutation that does not."""

import dataclasses
import re
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from drawn_plans import groups
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from simdist.errors import PlanError
from simdist.plan import Body, Buffer, Plan, Result, Run, op_text, ops
from simdist.plan.check import check
from simdist.plan.group import Group
from simdist.plan.lanes import COMM
from simdist.proof import prove, prover
from simdist.proof.layout import AtomLayout
from simdist.proof.symbols import Tag, Value, Weights, gather, gathered
from simdist.schedules import InputPath, Job, Schedule, kinds
from simdist.schedules.fsdp import FSDP
from simdist.schedules.hsdp import HSDP
from simdist.schedules.sync import Sync
from simdist.schedules.units import ModelUnit

Declared = Callable[[int], Result]

WORLD = Group(8)
SYNC = Result(gradients=WORLD, parameters=Group(1))
FORWARD = ops.Forward(("param",), ("loss",))
BACKWARD = ops.Backward(("param", "loss"), "grad")
OPTIMIZE = ops.Optimize(("param",), ("grad",))
ADDED = dataclasses.replace(BACKWARD, adds=True)
AVERAGE = (ops.Copy("param", "flat"), ops.AllReduce("flat", WORLD), ops.Copy("flat", "param"))
BUFFERS = (
    Buffer("param", 64, tensors=(0, 1), initialized=True),
    Buffer("loss", 1),
    Buffer("grad", 64, tensors=(0, 1)),
    Buffer("flat", 64, tensors=(0, 1)),
    *(Buffer(f"slice.{n}", 64 // n) for n in (1, 2, 4, 8)),
    Buffer("batch", 8, "uint8", place="host"),
    Buffer("input", 8, "uint8"),
)


def plan_of(*steps: Body, buffers: tuple[Buffer, ...] = BUFFERS, world_size: int = 8) -> Plan:
    return Plan.from_steps("hand", world_size=world_size, buffers=buffers, steps=steps)


def verify(plan: Plan, result: Declared | Result) -> int:
    """Check and prove, as everybody does who uses a plan."""
    check(plan)
    return prove(plan, (lambda _: result) if isinstance(result, Result) else result)


def refusal(plan: Plan, result: Declared | Result) -> str:
    with pytest.raises(PlanError) as error:
        verify(plan, result)
    return str(error.value)


def synchronized(*collectives: ops.Op) -> Body:
    """Return a step that brings the gradients together by `collectives`."""
    return (FORWARD, BACKWARD, *collectives, OPTIMIZE)


# ---------------------------------------------------------------- equivalent forms

EQUIVALENT: dict[str, Body] = {
    "all_reduce": (ops.AllReduce("grad", WORLD),),
    "all_reduce twice": (ops.AllReduce("grad", WORLD), ops.AllReduce("grad", WORLD)),
    "within nodes, then across": (ops.AllReduce("grad", Group(4)), ops.AllReduce("grad", Group(2, 4))),
    "across nodes, then within": (ops.AllReduce("grad", Group(2, 4)), ops.AllReduce("grad", Group(4))),
    "sums over ones": (ops.AllReduce("grad", WORLD), ops.AllReduce("grad", Group(1), "sum")),
    "reduce_scatter, all_gather": (
        ops.ReduceScatter("grad", "slice.8", WORLD),
        ops.AllGather("slice.8", "grad", WORLD),
    ),
    "hierarchical reduce_scatter, all_reduce, all_gather": (
        ops.ReduceScatter("grad", "slice.4", Group(4)),
        ops.AllReduce("slice.4", Group(2, 4)),
        ops.AllGather("slice.4", "grad", Group(4)),
    ),
    "hierarchical over nodes of two": (
        ops.ReduceScatter("grad", "slice.2", Group(2)),
        ops.AllReduce("slice.2", Group(4, 2)),
        ops.AllGather("slice.2", "grad", Group(2)),
    ),
    "nested reduce_scatter, all_gather": (
        ops.ReduceScatter("grad", "slice.4", Group(4)),
        ops.ReduceScatter("slice.4", "slice.8", Group(2, 4)),
        ops.AllGather("slice.8", "slice.4", Group(2, 4)),
        ops.AllGather("slice.4", "grad", Group(4)),
    ),
    "reduce, broadcast": (ops.Reduce("grad", WORLD), ops.Broadcast("grad", WORLD)),
    "reduce, broadcast with other roots": (ops.Reduce("grad", WORLD, root=5), ops.Broadcast("grad", WORLD, root=5)),
    "reduce within nodes, all_reduce of leaders, broadcast": (
        ops.Reduce("grad", Group(4), root=1),
        ops.AllReduce("grad", Group(2, 4)),
        ops.Broadcast("grad", Group(4), root=1),
    ),
    "through a copy": (ops.Copy("grad", "flat"), ops.AllReduce("flat", WORLD), ops.Copy("flat", "grad")),
}


@pytest.mark.parametrize("form", EQUIVALENT)
def test_equivalent_forms_of_an_all_reduce_prove(form: str) -> None:
    assert verify(plan_of(*[synchronized(*EQUIVALENT[form])] * 3), SYNC) == 8


def test_a_gather_puts_the_parts_of_each_group_one_after_the_other() -> None:
    """Ranks 0 and 2 are a group, and so are ranks 1 and 3: one block of two members at a stride of two."""
    found = gather(np.arange(4).reshape(1, 2, 2, 1, 1))
    assert found[0, :, 0, :, 0].tolist() == [[0, 2]] * 2
    assert found[0, :, 1, :, 0].tolist() == [[1, 3]] * 2


@pytest.mark.parametrize("first", [(), (ops.AllReduce("grad", WORLD),)], ids=["in the last pass", "in both"])
def test_gradients_of_passes_that_share_their_input_add_up(first: Body) -> None:
    last = (ops.Forward(("param", "input"), ("loss",)), ADDED, ops.AllReduce("grad", WORLD), OPTIMIZE)
    step = (ops.Load("batch"), ops.Copy("batch", "input"), last[0], BACKWARD, *first, *last)
    verify(plan_of(step, step), Result(WORLD, Group(1), micro_batches=2))
    assert "trains on a batch that was used before" in refusal(plan_of(step), SYNC)


def test_parameters_may_be_averaged_in_place() -> None:
    step = (FORWARD, BACKWARD, OPTIMIZE, ops.AllReduce("param", WORLD))
    verify(plan_of(step, step), Result(gradients=Group(1), parameters=WORLD))


def test_average_of_equal_gradients_commutes_with_the_update() -> None:
    step = (FORWARD, BACKWARD, ops.AllReduce("grad", WORLD), *AVERAGE, OPTIMIZE)
    verify(plan_of(step), Result(gradients=WORLD, parameters=WORLD))


def test_waits_delays_and_saves_change_no_values() -> None:
    step = (
        ops.Delay("host"),
        FORWARD,
        ops.Wait("loss"),
        BACKWARD,
        ops.Delay("compute"),
        ops.AllReduce("grad", WORLD),
        OPTIMIZE,
    )
    verify(plan_of((*step, ops.Save(("param",)), ops.Delay("io"))), SYNC)


@pytest.mark.parametrize("saved", ["param", "copy"])
def test_checkpoint_holds_the_parameters_that_the_step_leaves_behind(saved: str) -> None:
    step = (FORWARD, BACKWARD, ops.AllReduce("grad", WORLD), OPTIMIZE)
    buffers = (*BUFFERS, Buffer("copy", 64, tensors=(0, 1), place="host"))
    copy, save = ops.Copy("param", "copy"), ops.Save((saved,))
    verify(plan_of((*step, copy, save), (*step, copy, save), buffers=buffers), SYNC)
    problem = rf"save\({saved}\) at step 1: {saved} is not param as the step leaves it; save it after updates"
    early = (copy, save, *step) if saved == "param" else (*step, save, copy)
    assert re.search(problem, refusal(plan_of((*step, copy, save), early, buffers=buffers), SYNC))


def test_buckets_may_be_reduced_and_applied_one_by_one() -> None:
    buffers = (
        Buffer("param.0", 8, tensors=(0, 2), initialized=True),
        Buffer("param.1", 8, tensors=(2, 5), initialized=True),
        Buffer("grad.0", 8, tensors=(0, 2)),
        Buffer("grad.1", 8, tensors=(2, 5)),
        Buffer("loss", 1),
    )
    params = ("param.0", "param.1")
    step = (
        ops.Forward(params, ("loss",)),
        ops.Backward((*params, "loss"), "grad.1"),
        ops.AllReduce("grad.1", WORLD),
        ops.Backward((*params, "loss"), "grad.0"),
        ops.AllReduce("grad.0", WORLD),
        ops.Optimize(("param.1",), ("grad.1",)),
        ops.Optimize(("param.0",), ("grad.0",)),
    )
    verify(plan_of(step, step, buffers=buffers), SYNC)
    assert "param.0" in refusal(plan_of(step[:-1], buffers=buffers), SYNC)


# ---------------------------------------------------------------- mistakes, by hand

MISTAKES: dict[str, tuple[Body, Result, str]] = {
    "no all_reduce": (
        synchronized(),
        SYNC,
        "backward(param, loss -> grad) at step 0: afterwards grad of rank 0 holds 1/1 of the gradient of rank 0; "
        "the schedule declares 1/8",
    ),
    "undeclared all_reduce": (
        synchronized(ops.AllReduce("grad", Group(2))),
        Result(Group(1), Group(1)),
        "all_reduce(grad, mean over group of 2) at step 0: afterwards grad of rank 0 holds 1/2 of the gradient of rank "
        "0; the schedule declares 1/1",
    ),
    "sum instead of mean": (
        synchronized(ops.AllReduce("grad", WORLD, "sum")),
        SYNC,
        "all_reduce(grad, sum over group of 8) at step 0: afterwards grad of rank 0 holds 1/1 of the gradient of rank "
        "0; the schedule declares 1/8",
    ),
    "gradient all-reduced twice by sums": (
        synchronized(ops.AllReduce("grad", WORLD), ops.AllReduce("grad", WORLD, "sum")),
        SYNC,
        "all_reduce(grad, sum over group of 8) at step 0: afterwards grad of rank 0 holds 1/1 of the gradient of rank "
        "0; the schedule declares 1/8",
    ),
    "wrong group": (
        synchronized(ops.AllReduce("grad", Group(4))),
        SYNC,
        "all_reduce(grad, mean over group of 4) at step 0: afterwards grad of rank 0 holds 1/4 of the gradient of rank "
        "0; the schedule declares 1/8",
    ),
    "right size, wrong stride": (
        synchronized(ops.AllReduce("grad", Group(4, 2))),
        Result(Group(4), Group(1)),
        "all_reduce(grad, mean over group of 4 at stride 2) at step 0: afterwards grad of rank 0 holds nothing of the "
        "gradient of rank 1; the schedule declares 1/4",
    ),
    "reduce without broadcast": (
        synchronized(ops.Reduce("grad", WORLD)),
        SYNC,
        "reduce(grad, mean over group of 8 to member 0) at step 0: afterwards grad of rank 1 holds nothing of the "
        "gradient of rank 0; the schedule declares 1/8",
    ),
    "reduce, where the others keep what they had": (
        synchronized(ops.Reduce("grad", Group(2), root=1)),
        Result(Group(2), Group(1)),
        "reduce(grad, mean over group of 2 to member 1) at step 0: afterwards grad of rank 0 holds 1/1 of the gradient "
        "of rank 0; the schedule declares 1/2",
    ),
    "broadcast from another root": (
        synchronized(ops.Reduce("grad", WORLD, root=1), ops.Broadcast("grad", WORLD, root=2)),
        SYNC,
        "broadcast(grad, group of 8 from member 2) at step 0: afterwards grad of rank 0 holds nothing of the gradient "
        "of rank 0; the schedule declares 1/8",
    ),
    "slices gathered over another group": (
        synchronized(ops.ReduceScatter("grad", "slice.4", Group(4)), ops.AllGather("slice.4", "grad", Group(4, 2))),
        Result(Group(4), Group(1)),
        "grad holds other tensors, or slices in another order, than it declares",
    ),
    "nested slices gathered in the wrong order": (
        synchronized(
            ops.ReduceScatter("grad", "slice.2", Group(2)),
            ops.ReduceScatter("slice.2", "slice.8", Group(4, 2)),
            ops.AllGather("slice.8", "slice.4", Group(2)),
            ops.AllGather("slice.4", "grad", Group(4, 2)),
        ),
        SYNC,
        "optimize(param with grad) at step 0: grad holds other tensors, or slices in another order, than it declares",
    ),
    "slices of different places reduced": (
        synchronized(ops.ReduceScatter("grad", "slice.2", Group(2)), ops.AllReduce("slice.2", Group(2))),
        SYNC,
        "all_reduce(slice.2, mean over group of 2) at step 0: reduces slices of different places; the members hold "
        "other parts of the model",
    ),
    "average before the optimizer": (
        (FORWARD, BACKWARD, *AVERAGE, OPTIMIZE),
        Result(Group(1), WORLD),
        "optimize(param with grad) at step 0: afterwards param of rank 0 holds 1/1 of the gradient of rank 0; the "
        "schedule declares 1/8",
    ),
    "undeclared average": (
        (*synchronized(ops.AllReduce("grad", WORLD)), *AVERAGE),
        SYNC,
        "copy(flat -> param) at step 0: afterwards param of rank 0 holds 1/8 of the parameters of rank 0; the schedule "
        "declares 1/1",
    ),
    "average not copied back": (
        (FORWARD, BACKWARD, OPTIMIZE, *AVERAGE[:-1]),
        Result(Group(1), WORLD),
        "optimize(param with grad) at step 0: afterwards param of rank 0 holds 1/1 of the gradient of rank 0; the "
        "schedule declares 1/8",
    ),
    "update twice": (
        (*synchronized(ops.AllReduce("grad", WORLD)), OPTIMIZE),
        SYNC,
        "optimize(param with grad) at step 0: afterwards param of rank 0 holds 1/4 of the gradient of rank 0; the "
        "schedule declares 1/8",
    ),
    "no update": (
        (FORWARD, BACKWARD, ops.AllReduce("grad", WORLD)),
        SYNC,
        "all_reduce(grad, mean over group of 8) at step 0: afterwards param of rank 0 holds nothing of the gradient of "
        "rank 0; the schedule declares 1/8",
    ),
    "no training at all": (
        (FORWARD,),
        SYNC,
        "forward(param -> loss) at step 0: afterwards param of rank 0 holds nothing of the gradient of rank 0; the "
        "schedule declares 1/8",
    ),
    "update before the all_reduce": (
        (FORWARD, BACKWARD, OPTIMIZE, ops.AllReduce("grad", WORLD)),
        SYNC,
        "optimize(param with grad) at step 0: afterwards param of rank 0 holds 1/1 of the gradient of rank 0; the "
        "schedule declares 1/8",
    ),
    "forward pass without parameters": (
        (ops.Forward((), ("loss",)), *synchronized(ops.AllReduce("grad", WORLD))[1:]),
        SYNC,
        "forward( -> loss) at step 0: does not read all parameters as they are when the step begins; add them to srcs",
    ),
    "forward pass on updated parameters": (
        (*synchronized(ops.AllReduce("grad", WORLD)), FORWARD),
        SYNC,
        "forward(param -> loss) at step 0: does not read all parameters as they are when the step begins; add them to "
        "srcs",
    ),
    "backward pass of nothing": (
        (FORWARD, ops.Backward(("param",), "grad"), ops.AllReduce("grad", WORLD), OPTIMIZE),
        SYNC,
        "backward(param -> grad) at step 0: reads nothing that a forward pass wrote; add its activations or loss to "
        "srcs",
    ),
    "backward pass on changed parameters": (
        (FORWARD, ops.AllReduce("param", WORLD), BACKWARD, ops.AllReduce("grad", WORLD), OPTIMIZE),
        Result(WORLD, WORLD),
        "backward(param, loss -> grad) at step 0: reads parameters that have changed since the step began",
    ),
    "all_reduce before the last pass only": (
        (FORWARD, BACKWARD, ops.AllReduce("grad", WORLD), FORWARD, ADDED, OPTIMIZE),
        Result(WORLD, Group(1), micro_batches=2),
        "afterwards grad of rank 0 holds 1/1 of the gradient of micro-batch 1 of rank 0; the schedule declares 1/8",
    ),
    "second pass writes over the first": (
        (FORWARD, BACKWARD, FORWARD, BACKWARD, ops.AllReduce("grad", WORLD), OPTIMIZE),
        Result(WORLD, Group(1), micro_batches=2),
        "afterwards grad of rank 0 holds nothing of the gradient of rank 0; the schedule declares 1/8",
    ),
    "a pass too few": (
        (FORWARD, BACKWARD, FORWARD, ADDED, ops.AllReduce("grad", WORLD), OPTIMIZE),
        Result(WORLD, Group(1), micro_batches=3),
        "afterwards grad of rank 0 holds nothing of the gradient of micro-batch 2 of rank 0; the schedule declares 1/8",
    ),
    "a pass too many": (
        (FORWARD, BACKWARD, FORWARD, ADDED, ops.AllReduce("grad", WORLD), OPTIMIZE),
        SYNC,
        "afterwards grad of rank 0 holds 1/8 of the gradient of micro-batch 1 of rank 0; the schedule declares nothing",
    ),
    "average of losses": (
        (FORWARD, ops.AllReduce("loss", WORLD), BACKWARD, ops.AllReduce("grad", WORLD), OPTIMIZE),
        SYNC,
        "backward(param, loss -> grad) at step 0: reads the activations of other ranks; each rank computes on its own",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_refused_with_its_step_and_operation(mistake: str) -> None:
    step, declared, message = MISTAKES[mistake]
    text = refusal(plan_of(step, step), declared)
    assert text.startswith("plan hand: ")
    assert message in text
    assert "\nbody 0:\n" in text
    assert len(re.findall(r"^--> ", text, re.MULTILINE)) == 1


def test_plan_without_parameters_is_refused() -> None:
    buffers = tuple(dataclasses.replace(buffer, tensors=None) for buffer in BUFFERS)
    assert refusal(plan_of((ops.Wait("param"),), buffers=buffers), SYNC) == (
        "plan hand: no buffer holds parameters; declare one initialized, with tensors"
    )


def test_declaration_is_asked_for_every_step() -> None:
    local, average = (FORWARD, BACKWARD, OPTIMIZE), (FORWARD, BACKWARD, OPTIMIZE, *AVERAGE)
    plan = plan_of(local, average, local, average)
    declared = {0: Group(1), 1: WORLD, 2: Group(1), 3: WORLD}
    verify(plan, lambda step: Result(Group(1), declared[step]))
    text = refusal(plan, lambda step: Result(Group(1), WORLD if step == 2 else declared[step]))
    assert "optimize(param with grad) at step 2: afterwards param of rank 0 holds 1/1 of the gradient" in text
    text = refusal(plan, lambda step: Result(Group(1), Group(1) if step == 3 else declared[step]))
    assert "copy(flat -> param) at step 3: afterwards param of rank 0 holds 1/8 of the gradient" in text


# ---------------------------------------------------------------- from one step to the next


def test_gradient_of_the_step_before_is_stale() -> None:
    good = synchronized(ops.AllReduce("grad", WORLD))
    text = refusal(plan_of(good, good, good, (FORWARD, ops.AllReduce("grad", WORLD), OPTIMIZE)), SYNC)
    assert "at step 3: afterwards grad of rank 0 holds nothing of the gradient of rank 0" in text


def test_gradient_of_the_activations_of_the_step_before_is_stale() -> None:
    good = synchronized(ops.AllReduce("grad", WORLD))
    assert "at step 2: afterwards grad of rank 0 holds nothing of the gradient" in refusal(
        plan_of(good, good, good[1:]), SYNC
    )


def test_gradient_that_is_added_to_that_of_the_step_before_is_refused() -> None:
    step = (FORWARD, BACKWARD, ops.AllReduce("grad", WORLD), OPTIMIZE)
    assert "holds 1/8 of the gradient, one step old, of rank 0" in refusal(
        plan_of(step, (FORWARD, ADDED, *step[2:])), SYNC
    )


def test_update_that_arrives_one_step_late_is_refused() -> None:
    late = (FORWARD, OPTIMIZE, BACKWARD, ops.AllReduce("grad", WORLD))
    assert "at step 1: reads parameters that have changed since the step began" in refusal(
        plan_of(synchronized(ops.AllReduce("grad", WORLD)), late), SYNC
    )


def test_average_of_the_parameters_of_the_step_before_is_stale() -> None:
    good = (FORWARD, BACKWARD, OPTIMIZE, *AVERAGE)
    stale = (FORWARD, BACKWARD, OPTIMIZE, *AVERAGE[1:])
    text = refusal(plan_of(good, stale), Result(Group(1), WORLD))
    assert "copy(flat -> param) at step 1: afterwards param of rank 0 holds nothing of the gradient of rank 0" in text


def test_a_mistake_in_a_late_repetition_is_found() -> None:
    good = synchronized(ops.AllReduce("grad", WORLD))
    text = refusal(plan_of(*[good] * 500, synchronized(ops.AllReduce("grad", Group(4))), *[good] * 10), SYNC)
    assert "all_reduce(grad, mean over group of 4) at step 500: " in text


def test_a_long_plan_is_proved_by_its_distinct_steps() -> None:
    step = synchronized(ops.AllReduce("grad", WORLD))
    asked: list[int] = []

    def declared(step: int) -> Result:
        asked.append(step)
        return SYNC

    plan = Plan("long", 8, BUFFERS, (step,), (Run((0,), 20_000),))
    assert verify(plan, declared) == 8
    assert asked == list(range(20_000))


# ---------------------------------------------------------------- input

LOAD, UPLOAD = ops.Load("batch"), ops.Copy("batch", "input")
TRAIN = (ops.Forward(("param", "input"), ("loss",)), BACKWARD, ops.AllReduce("grad", WORLD), OPTIMIZE)


def test_every_step_may_train_on_a_batch_of_its_own() -> None:
    verify(plan_of((LOAD, UPLOAD, *TRAIN), (LOAD, UPLOAD, *TRAIN)), SYNC)


def test_batches_may_be_loaded_ahead() -> None:
    verify(plan_of((LOAD, UPLOAD, LOAD, *TRAIN), (UPLOAD, LOAD, *TRAIN), (UPLOAD, *TRAIN)), SYNC)


def test_a_step_that_was_proved_is_proved_anew_where_it_finds_other_data() -> None:
    ahead, last = (LOAD, UPLOAD, LOAD, *TRAIN), (UPLOAD, *TRAIN)
    verify(plan_of(ahead, last), SYNC)
    assert "forward(param, input -> loss) at step 2: trains on a batch that was used before" in refusal(
        plan_of(ahead, last, last), SYNC
    )


INPUT_MISTAKES: dict[str, tuple[tuple[Body, ...], str]] = {
    "same input twice": (
        ((LOAD, UPLOAD, *TRAIN), TRAIN),
        "forward(param, input -> loss) at step 1: trains on a batch that was used before; load another one first",
    ),
    "same batch copied twice": (
        ((LOAD, UPLOAD, *TRAIN), (UPLOAD, *TRAIN)),
        "forward(param, input -> loss) at step 1: trains on a batch that was used before; load another one first",
    ),
    "batch not copied to the device": (
        ((LOAD, UPLOAD, *TRAIN), (LOAD, *TRAIN)),
        "forward(param, input -> loss) at step 1: trains on a batch that was used before; load another one first",
    ),
    "batch not read": (
        ((LOAD, UPLOAD, FORWARD, *TRAIN[1:]),),
        "forward(param -> loss) at step 0: reads no batch, though the plan loads some; add the input to srcs",
    ),
    "batch skipped by a load": (
        ((LOAD, LOAD, UPLOAD, *TRAIN),),
        "load(-> batch) at step 0: overwrites a batch in batch that is still unused",
    ),
    "batch skipped by a copy": (
        ((LOAD, UPLOAD, LOAD, UPLOAD, *TRAIN),),
        "copy(batch -> input) at step 0: overwrites a batch in input that is still unused",
    ),
    "same batch on all ranks": (
        ((LOAD, UPLOAD, ops.Broadcast("input", WORLD), *TRAIN),),
        "forward(param, input -> loss) at step 0: reads the batch of other ranks; each rank computes on its own",
    ),
}


@pytest.mark.parametrize("mistake", INPUT_MISTAKES)
def test_wrong_input_is_refused(mistake: str) -> None:
    steps, message = INPUT_MISTAKES[mistake]
    assert message in refusal(plan_of(*steps), SYNC)


# ---------------------------------------------------------------- large worlds


@pytest.mark.parametrize(("world_size", "n_followed"), [(1, 1), (96, 96), (256, 256), (512, 64), (16_384, 16)])
def test_all_ranks_are_followed_in_small_worlds_and_a_sample_in_large_ones(world_size: int, n_followed: int) -> None:
    step = synchronized(ops.AllReduce("grad", Group(world_size)))
    plan = plan_of(step, world_size=world_size)
    assert verify(plan, Result(Group(world_size), Group(1))) == n_followed


@pytest.mark.parametrize("world_size", [96, 256, 512])
def test_wrong_group_is_found_in_worlds_of_any_size(world_size: int) -> None:
    step = synchronized(ops.AllReduce("grad", Group(world_size // 2)))
    text = refusal(plan_of(step, world_size=world_size), Result(Group(world_size), Group(1)))
    assert f"holds 1/{world_size // 2} of the gradient of rank 0; the schedule declares 1/{world_size}" in text


# ---------------------------------------------------------------- against numbers


def computed_mean(collectives: Body) -> bool:
    """Execute collectives on random gradients, element by element; tell whether all ranks end with the mean."""
    own = np.random.default_rng(0).standard_normal((8, 64))
    state: dict[str, np.ndarray] = {"grad": own.copy()}
    for op in collectives:
        _execute(op, state)
    return state["grad"].shape == own.shape and bool(np.allclose(state["grad"], own.mean(0)))


def _execute(op: ops.Op, state: dict[str, np.ndarray]) -> None:
    assert isinstance(op, ops.COLLECTIVES)
    src = state[op.buffer if isinstance(op, ops.AllReduce | ops.Reduce | ops.Broadcast) else op.src].copy()
    for members in op.group.members(8):
        scale = len(members) if getattr(op, "reduction", "sum") == "mean" else 1
        total = sum(src[rank] for rank in members) / scale
        match op:
            case ops.AllReduce():
                state[op.buffer][members] = total
            case ops.Reduce():
                state[op.buffer][members[op.root]] = total
            case ops.Broadcast():
                state[op.buffer][members] = src[members[op.root]]
            case ops.ReduceScatter():
                shards = np.split(total, len(members))
                out = state.setdefault(op.dst, np.empty((8, len(shards[0]))))
                for rank, shard in zip(members, shards, strict=True):
                    out[rank] = shard
            case ops.AllGather():
                whole = np.concatenate([src[rank] for rank in members])
                state.setdefault(op.dst, np.empty((8, len(whole))))[members] = whole


@st.composite
def collective_sequences(draw: st.DrawFn) -> Body:
    """Draw a correct sequence, with up to two operations dropped, doubled, inserted, swapped or given other groups."""
    operations = list(draw(st.sampled_from(list(EQUIVALENT.values()))))
    operations = [op for op in operations if not isinstance(op, ops.Copy)] or [ops.AllReduce("grad", WORLD)]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(operations) - 1))
        match draw(st.sampled_from(["drop", "double", "regroup", "insert", "swap"])):
            case "drop" if len(operations) > 1:
                del operations[at]
            case "double":
                operations.insert(at, operations[at])
            case "regroup":
                size = operations[at].group.size
                group = draw(st.sampled_from([Group(size, stride) for stride in (1, 2, 4) if size * stride <= 8]))
                operations[at] = dataclasses.replace(operations[at], group=group)
            case "insert":
                reduction = draw(st.sampled_from(["mean", "sum"]))
                operations.insert(at, ops.AllReduce("grad", draw(groups(8)), reduction))
            case "swap":
                operations[at], operations[at - 1] = operations[at - 1], operations[at]
    return tuple(operations)


@examples(300)
@given(collective_sequences())
def test_what_is_proved_is_what_numbers_give(collectives: Body) -> None:
    plan = plan_of(synchronized(*collectives))
    try:
        check(plan)
    except PlanError:
        return
    try:
        prove(plan, lambda _: SYNC)
    except PlanError:
        proved = False
    else:
        proved = True
    if proved:
        assert computed_mean(collectives)
    elif computed_mean(collectives):
        assert any(isinstance(op, ops.ReduceScatter | ops.AllGather) for op in collectives), "refused, but right"


# ---------------------------------------------------------------- mutations of every schedule

STORAGE = InputPath("storage", prefetch=2)
JOB = Job(
    world_size=8,
    ranks_per_node=4,
    n_steps=9,
    tensor_counts=(300_000, 300_000, 8),
    tensor_rows=(500, 100, 8),
    batch_nbytes=64,
    input_path=STORAGE,
    run_ahead_steps=1,
    delay_channels=frozenset({"host", "compute", "io"}),
)
SCHEDULES = [cls(**example) for cls in kinds().values() for example in cls.examples]
OTHER_GROUPS = [Group(1), Group(2), Group(4), Group(8), Group(2, 2), Group(2, 4), Group(4, 2)]


def is_repeated(op: ops.Op, before: Body) -> bool:
    """Tell whether a unit is gathered again, which saves memory: a plan that still holds it computes the same."""
    gathers = [each.dst for each in before if isinstance(each, ops.Copy | ops.AllGather)]
    return isinstance(op, ops.Copy | ops.AllGather) and op.dst in gathers


def mutations(body: Body, declared: Result) -> Iterator[tuple[str, Body]]:
    """Yield every mutation of a step that changes what it computes."""
    for at, op in enumerate(body):
        before, after = body[:at], body[at + 1 :]
        changes_nothing = isinstance(op, ops.Wait | ops.Delay | ops.Save | ops.Tick | ops.Broadcast)  # see gtopk
        if not changes_nothing and not is_repeated(op, before):
            yield f"drop {op_text(op)}", (*before, *after)
        match op:
            case ops.AllReduce():
                for group in OTHER_GROUPS:
                    if group != op.group:
                        yield f"{op_text(op)} over {group}", (*before, dataclasses.replace(op, group=group), *after)
                if op.group.size > 1 and op.reduction == "mean":
                    summed = dataclasses.replace(op, reduction="sum")
                    yield f"sum in {op_text(op)}", (*before, summed, *after)
                    yield f"{op_text(op)} again by sum", (*before, op, summed, *after)
                if op.group.size > 1:
                    yield f"{op_text(op)} by reduce", (*before, ops.Reduce(op.buffer, op.group), *after)
                    yield f"{op_text(op)} by broadcast", (*before, ops.Broadcast(op.buffer, op.group), *after)
                others = {each.buffer for each in body if isinstance(each, ops.AllReduce)} - {op.buffer, "flat"}
                for other in others if op.buffer != "flat" else ():
                    yield f"{op_text(op)} on {other}", (*before, dataclasses.replace(op, buffer=other), *after)
            case ops.Optimize():
                yield "update twice", (*before, op, op, *after)
                last = max((i for i, each in enumerate(before) if isinstance(each, ops.Backward)), default=0)
                if declared.gradients.size > declared.parameters.size:
                    yield "update before the last all_reduce", (*body[: last + 1], op, *body[last + 1 : at], *after)
                if after and declared.gradients.size < declared.parameters.size and not declared.late_steps:
                    yield "average before the update", (*before, *after, op)
            case ops.Load():
                yield f"{op_text(op)} twice", (*before, op, op, *after)
            case ops.Forward():
                yield "backward before forward", (*before, *_backward_first(after, op))
                yield "no parameters", (*before, ops.Forward(op.srcs[1:], op.dsts), *after)
                yield "no input", (*before, ops.Forward(op.srcs[:1], op.dsts), *after)
            case ops.Combine():
                for weights in (tuple(-each for each in op.weights), tuple(each + 1 for each in op.weights)):
                    yield f"{weights} in {op_text(op)}", (*before, dataclasses.replace(op, weights=weights), *after)
                yield f"{op_text(op)} of one", (*before, ops.Combine(op.srcs[:1], op.weights[:1], op.dst), *after)
            case ops.Copy() if op.dst == "param":
                yield "copy the wrong way", (*before, ops.Copy(op.dst, op.src), *after)
            case ops.AllGather():
                for group in OTHER_GROUPS:
                    if group != op.group:
                        yield f"{op_text(op)} over {group}", (*before, dataclasses.replace(op, group=group), *after)
            case ops.Densify():
                yield f"wrong divisor of {op_text(op)}", (*before, ops.Densify(op.src, op.dst, op.divisor + 1), *after)
            case ops.Merge():
                for divisor in {1, op.divisor // 2, op.divisor + 1, 2 * op.divisor} - {op.divisor}:
                    wrong = dataclasses.replace(op, divisor=divisor)
                    yield f"wrong divisor {divisor} of {op_text(op)}", (*before, wrong, *after)
            case ops.Select():
                others = {each.residual for each in body if isinstance(each, ops.Select)} - {op.residual}
                for other in others:
                    yield f"{op_text(op)} on {other}", (*before, dataclasses.replace(op, residual=other), *after)
            case ops.TrustRatios():
                for group in OTHER_GROUPS:
                    if group.size != op.group.size:
                        yield f"{op_text(op)} by {group}", (*before, dataclasses.replace(op, group=group), *after)
            case _:
                pass


def _backward_first(after: Body, forward: ops.Op) -> Body:
    """Put the forward pass behind the last backward pass."""
    last = max(i for i, op in enumerate(after) if isinstance(op, ops.Backward))
    return (*after[: last + 1], forward, *after[last + 1 :])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_schedule_is_proved(schedule: Schedule) -> None:
    assert verify(schedule.plan(JOB), lambda step: schedule.result(step, JOB)) == 8


def mistake_of(plan: Plan, schedule: Schedule) -> str:
    """Return how a plan is refused; nothing if it is not."""
    try:
        verify(plan, lambda step: schedule.result(step, JOB))
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_every_mutation_of_a_schedule_is_refused_with_its_step_and_operation(schedule: Schedule) -> None:
    plan = schedule.plan(JOB)
    steps = [plan.bodies[body] for body in plan.body_of_steps()]
    n_taken = JOB.n_steps - getattr(schedule, "overlap_steps", 0)  # what is sent later on, nobody takes
    last_step_of = {body: step for step, body in zip(range(n_taken), plan.body_of_steps(), strict=False)}  # rich late
    n_mutants = 0
    for step in last_step_of.values():
        for what, mutant in mutations(steps[step], schedule.result(step, JOB)):
            mutated = Plan.from_steps(
                "mutant", world_size=8, buffers=plan.buffers, steps=[*steps[:step], mutant, *steps[step + 1 :]]
            )
            text = mistake_of(mutated, schedule)
            assert text, f"{what} at step {step} was not refused"
            found = re.match(r"plan mutant: \w+\(.*\) at step (\d+): .*\nbody \d+:\n", text)
            assert found, f"{what} at step {step}: {text}"
            assert int(found[1]) >= step
            assert len(re.findall(r"^--> ", text, re.MULTILINE)) == 1
            n_mutants += 1
    assert n_mutants > 50


class Forgetful(dict):
    """Keeps nothing that was computed."""

    def __contains__(self, key: object) -> bool:
        return False


def weights_of_each_atom(self: AtomLayout, name: str, weights: dict[Tag, Weights]) -> Value:
    """Return what `AtomLayout.value` does, with weights of its own for every atom."""
    places = self.places(name)
    separate = {tag: Weights(each.of_atoms(places.n_atoms) + 0, each.denominator) for tag, each in weights.items()}
    return Value(places, separate)


def separately(patch: pytest.MonkeyPatch) -> None:
    """Let proofs compute each buffer by itself, and each of its atoms."""
    start = prover._StepState.__init__

    def forget(self: prover._StepState, *arguments: Any) -> None:
        start(self, *arguments)
        self.moved = Forgetful()
        self.compared = Forgetful()

    patch.setattr(prover._StepState, "__init__", forget)
    patch.setattr(AtomLayout, "value", weights_of_each_atom)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_a_proof_that_shares_weights_says_what_one_that_computes_each_says(schedule: Schedule) -> None:
    plan = schedule.plan(JOB)
    steps = [plan.bodies[body] for body in plan.body_of_steps()]
    for what, mutant in [("as it is", steps[-1]), *mutations(steps[-1], schedule.result(JOB.n_steps - 1, JOB))]:
        mutated = Plan.from_steps("mutant", world_size=8, buffers=plan.buffers, steps=[*steps[:-1], mutant])
        with pytest.MonkeyPatch.context() as patch:
            separately(patch)
            plain = mistake_of(mutated, schedule)
        assert mistake_of(mutated, schedule) == plain, what


# ---------------------------------------------------------------- outer optimizers, and averages that come late

HALVES = tuple(
    Buffer(f"{name}.{half}", 8, tensors=(half, half + 1), initialized=name in ("param", "anchor"))
    for name in ("param", "anchor", "outer", "sent", "flat")
    for half in range(2)
)
STREAM_BUFFERS = (*HALVES, Buffer("grad", 16, tensors=(0, 2)), Buffer("loss", 1))
LEARN: Body = (
    ops.Forward(("param.0", "param.1"), ("loss",)),
    ops.Backward(("param.0", "param.1", "loss"), "grad"),
    ops.Optimize(("param.0", "param.1"), ("grad",)),
)


def sent(half: int, group: Group = WORLD) -> Body:
    """Send the outer gradient of a half of the model."""
    return (
        ops.Combine((f"anchor.{half}", f"param.{half}"), (1.0, -1.0), f"outer.{half}"),
        ops.AllReduce(f"outer.{half}", group),
    )


def taken(half: int) -> Body:
    """Update the anchor of that half, of which a rank takes three quarters."""
    return (
        ops.Optimize((f"anchor.{half}",), (f"outer.{half}",), optimizer="outer"),
        ops.Combine((f"anchor.{half}", f"param.{half}"), (0.75, 0.25), f"param.{half}"),
    )


STREAM = [LEARN + sent(0), LEARN + sent(1), LEARN + taken(0), LEARN + taken(1)]


def stream(step: int) -> Result:
    """Declare that halves are taken in steps 2 and 3, each two steps after it was sent."""
    if step < 2:
        return Result(Group(1), Group(1))
    return Result(Group(1), WORLD, late_steps=2, tensors=((step - 2, step - 1),), mixing=0.25)


def test_a_stream_of_two_halves_proves() -> None:
    assert verify(plan_of(*STREAM, buffers=STREAM_BUFFERS), stream) == 8


STREAM_MISTAKES: dict[str, tuple[dict[int, Body], str]] = {
    "a fragment is forgotten": ({3: LEARN}, "at step 3: afterwards param.1 of rank 0 holds nothing of the anchor"),
    "it is never sent": ({1: LEARN}, "reads 'outer.1', which nothing has written yet"),
    "one is sent twice, the other not": ({1: LEARN + sent(0)}, "reads 'outer.1', which nothing has written yet"),
    "it is sent again before it was taken": (
        {1: LEARN + sent(1) + sent(0)},
        "at step 2: afterwards param.0 of rank 0 holds 21/32 of the anchor of rank 0; the schedule declares 3/4",
    ),
    "it is taken twice": ({2: LEARN + taken(0) + taken(0)}, "at step 2: afterwards param.0 of rank 0 holds"),
    "it is taken before it is declared to arrive": (
        {1: LEARN + sent(1) + taken(0)},
        "at step 1: afterwards param.0 of rank 0 holds",
    ),
    "the other fragment is taken": ({2: LEARN + taken(1)}, "at step 2: afterwards param.0 of rank 0 holds"),
    "over a group": ({0: LEARN + sent(0, Group(4))}, "at step 2: afterwards param.0 of rank 0 holds"),
    "anchors differ by rank": (
        {0: LEARN + sent(0) + (ops.AllReduce("anchor.1", Group(2)),)},
        "all_reduce(anchor.1, mean over group of 2) at step 0: afterwards anchor.1 of rank 0 holds 1/2 of the anchor "
        "of rank 0; the schedule declares 1/1",
    ),
    "anchors go on from what one rank has": (
        {2: LEARN + taken(0) + (ops.Copy("param.0", "anchor.0"),)},
        "copy(param.0 -> anchor.0) at step 2: afterwards anchor.0 of rank 0 holds",
    ),
    "another share is kept": (
        {2: (*LEARN, taken(0)[0], dataclasses.replace(taken(0)[1], weights=(0.5, 0.5)))},
        "at step 2: afterwards param.0 of rank 0 holds 1/2 of the anchor of rank 0; the schedule declares 3/4",
    ),
    "the gradient points the wrong way": (
        {0: (*LEARN, dataclasses.replace(sent(0)[0], weights=(-1.0, 1.0)), sent(0)[1])},
        "at step 2: afterwards param.0 of rank 0 holds",
    ),
    "of other tensors": (
        {
            0: (
                *LEARN,
                ops.Copy("param.1", "flat.1"),
                dataclasses.replace(sent(0)[0], srcs=("anchor.0", "flat.1")),
                sent(0)[1],
            )
        },
        "combine(anchor.0 - flat.1 -> outer.0) at step 0: copies tensors (1, 2) over tensors (0, 1)",
    ),
}


@pytest.mark.parametrize("mistake", STREAM_MISTAKES)
def test_mistake_of_a_stream_is_refused(mistake: str) -> None:
    changed, message = STREAM_MISTAKES[mistake]
    steps = [changed.get(step, body) for step, body in enumerate(STREAM)]
    assert message in refusal(plan_of(*steps, buffers=STREAM_BUFFERS), stream)


LATE_AVERAGE = (ops.Combine(("param", "flat", "was"), (1.0, 1.0, -1.0), "param"),)
SENT_AVERAGE = (ops.Copy("param", "was"), *AVERAGE[:-1])


def late(step: int) -> Result:
    """Declare an average of three steps ago in step 4, and none elsewhere."""
    return Result(Group(1), WORLD, late_steps=3) if step == 4 else Result(Group(1), Group(1))


@pytest.mark.parametrize(("sent_at", "is_right"), [(0, False), (1, True), (2, False), (3, False)])
def test_a_late_average_is_of_exactly_so_many_steps_ago(sent_at: int, is_right: bool) -> None:
    local = (FORWARD, BACKWARD, OPTIMIZE)
    steps = [local + SENT_AVERAGE if step == sent_at else local for step in range(4)]
    buffers = (*BUFFERS, Buffer("was", 64, tensors=(0, 1)))
    plan = plan_of(*steps, local + LATE_AVERAGE, buffers=buffers)
    if is_right:
        assert verify(plan, late) == 8
    else:
        assert "at step 4: afterwards param of rank 0 holds" in refusal(plan, late)


# ---------------------------------------------------------------- top-k

K = 6
TOP_BUFFERS = (
    *BUFFERS,
    Buffer("half", 64, "float16"),
    Buffer("residual", 64, initialized=True),
    Buffer("top", K, sparse=True),
    *(Buffer(f"tops.{n}", K * n, sparse=True) for n in (2, 4, 8)),
    Buffer("shard_residual", 16, initialized=True),
)
SELECT = ops.Select("grad", "top", "residual", K)
SHARD_SELECT = ops.Select("slice.4", "top", "shard_residual", K, lane=COMM)
SCATTER, GATHER = ops.ReduceScatter("grad", "slice.4", Group(4)), ops.AllGather("slice.4", "grad", Group(4))

MERGED: Body = (
    SELECT,
    *(
        op
        for n in (1, 2, 4)
        for op in (ops.AllGather("top", "tops.2", Group(2, n)), ops.Merge("tops.2", "top", "residual", 2 * n, COMM))
    ),
    ops.Densify("top", "grad", 8),
)
SPARSE_FORMS: dict[str, Body] = {
    "gather everything": (SELECT, ops.AllGather("top", "tops.8", WORLD), ops.Densify("tops.8", "grad", 8)),
    "mean of own selections": (SELECT, ops.Densify("top", "grad"), ops.AllReduce("grad", WORLD)),
    "shards of nodes, gathered across": (
        SCATTER,
        SHARD_SELECT,
        ops.AllGather("top", "tops.2", Group(2, 4)),
        ops.Densify("tops.2", "slice.4", 2, COMM),
        GATHER,
    ),
    "merged pair by pair": MERGED,
    "shards of nodes, merged across": (
        SCATTER,
        SHARD_SELECT,
        ops.AllGather("top", "tops.2", Group(2, 4)),
        ops.Merge("tops.2", "top", "shard_residual", 2, COMM),
        ops.Densify("top", "slice.4", 2, COMM),
        GATHER,
    ),
    "in half precision": (ops.Copy("grad", "half"), ops.AllReduce("half", WORLD), ops.Copy("half", "grad")),
}


@pytest.mark.parametrize("form", SPARSE_FORMS)
def test_compressed_forms_of_an_all_reduce_prove(form: str) -> None:
    assert verify(plan_of(*[synchronized(*SPARSE_FORMS[form])] * 3, buffers=TOP_BUFFERS), SYNC) == 8


SPARSE_MISTAKES: dict[str, tuple[Body, str]] = {
    "own selection only": (
        (SELECT, ops.Densify("top", "grad")),
        "densify(top -> grad) at step 0: afterwards grad of rank 0 holds 1/1 of the gradient of rank 0; the schedule "
        "declares 1/8",
    ),
    "sum instead of mean": (
        (SELECT, ops.AllGather("top", "tops.8", WORLD), ops.Densify("tops.8", "grad")),
        "densify(tops.8 -> grad) at step 0: afterwards grad of rank 0 holds 1/1 of the gradient of rank 0; the "
        "schedule declares 1/8",
    ),
    "wrong divisor": (
        (SELECT, ops.AllGather("top", "tops.8", WORLD), ops.Densify("tops.8", "grad", 4)),
        "densify(tops.8 / 4 -> grad) at step 0: afterwards grad of rank 0 holds 1/4 of the gradient of rank 0; the "
        "schedule declares 1/8",
    ),
    "divided twice": (
        (SELECT, ops.Densify("top", "grad", 8), ops.AllReduce("grad", WORLD)),
        "all_reduce(grad, mean over group of 8) at step 0: afterwards grad of rank 0 holds 1/64 of the gradient of "
        "rank 0; the schedule declares 1/8",
    ),
    "gathered within nodes only": (
        (SELECT, ops.AllGather("top", "tops.4", Group(4)), ops.Densify("tops.4", "grad", 8)),
        "densify(tops.4 / 8 -> grad) at step 0: afterwards grad of rank 0 holds nothing of the gradient of rank 4; the "
        "schedule declares 1/8",
    ),
    "gathered and summed again": (
        (
            SELECT,
            ops.AllGather("top", "tops.8", WORLD),
            ops.Densify("tops.8", "grad", 8),
            ops.AllReduce("grad", WORLD, "sum"),
        ),
        "all_reduce(grad, sum over group of 8) at step 0: afterwards grad of rank 0 holds 1/1 of the gradient of rank "
        "0; the schedule declares 1/8",
    ),
    "selections of other shards gathered": (
        (SCATTER, SHARD_SELECT, ops.AllGather("top", "tops.2", Group(2)), ops.Densify("tops.2", "slice.4", 2), GATHER),
        "all_gather(top -> tops.2, group of 2) at step 0: reduces slices of different places; the members hold other "
        "parts of the model",
    ),
    "shards gathered over another group": (
        (
            SCATTER,
            SHARD_SELECT,
            ops.AllGather("top", "tops.2", Group(2, 4)),
            ops.Densify("tops.2", "slice.4", 2),
            ops.AllGather("slice.4", "grad", Group(4, 2)),
        ),
        "grad holds other tensors, or slices in another order, than it declares",
    ),
    "shards not gathered across": (
        (SCATTER, SHARD_SELECT, ops.Densify("top", "slice.4"), GATHER),
        "all_gather(slice.4 -> grad, group of 4) at step 0: afterwards grad of rank 0 holds 1/4 of the gradient of "
        "rank 0; the schedule declares 1/8",
    ),
    "merged, and each rank keeps all that all drop": (
        tuple(dataclasses.replace(op, divisor=1) if isinstance(op, ops.Merge) else op for op in MERGED),
        "merge(tops.2 -> top, rest to residual) at step 0: 2 ranks hold the gradient of rank 0 and drop the same of "
        "it, each keeping all; the divisor must be their number",
    ),
    "merged, and the ranks keep too little of what they drop": (
        tuple(dataclasses.replace(op, divisor=8) if isinstance(op, ops.Merge) else op for op in MERGED),
        "merge(tops.2 -> top, rest / 8 to residual) at step 0: 2 ranks hold the gradient of rank 0 and drop the same "
        "of it, each keeping 1/8; the divisor must be their number",
    ),
    "merged with the same rank twice": (
        (
            SELECT,
            ops.AllGather("top", "tops.2", Group(2)),
            ops.Merge("tops.2", "top", "residual", 2),
            ops.AllGather("top", "tops.2", Group(2)),
            ops.Merge("tops.2", "top", "residual", 2),
            ops.AllGather("top", "tops.2", Group(2, 4)),
            ops.Merge("tops.2", "top", "residual", 4),
            ops.Densify("top", "grad", 8),
        ),
        "densify(top / 8 -> grad) at step 0: afterwards grad of rank 0 holds 1/4 of the gradient of rank 0; the "
        "schedule declares 1/8",
    ),
    "not scattered back": (
        (SELECT, ops.AllGather("top", "tops.8", WORLD)),
        "backward(param, loss -> grad) at step 0: afterwards grad of rank 0 holds 1/1 of the gradient of rank 0; the "
        "schedule declares 1/8",
    ),
}


@pytest.mark.parametrize("mistake", SPARSE_MISTAKES)
def test_mistake_with_selections_is_refused_with_its_step_and_operation(mistake: str) -> None:
    collectives, message = SPARSE_MISTAKES[mistake]
    assert message in refusal(plan_of(*[synchronized(*collectives)] * 2, buffers=TOP_BUFFERS), SYNC)


def test_selections_of_the_step_before_are_stale() -> None:
    good = synchronized(*SPARSE_FORMS["gather everything"])
    stale = tuple(op for op in good if op != SELECT)
    text = refusal(plan_of(good, stale, buffers=TOP_BUFFERS), SYNC)
    assert "at step 1: afterwards grad of rank 0 holds nothing of the gradient of rank 0" in text


def test_residual_is_no_parameter_though_it_holds_tensors() -> None:
    """Nothing demands that it be read by a forward pass, or updated."""
    merge_only = (ops.Select("grad", "top", "flat", K), ops.Merge("top", "top", "residual"), ops.Densify("top", "grad"))
    buffers = tuple(
        dataclasses.replace(buffer, initialized=True) if buffer.name == "flat" else buffer for buffer in TOP_BUFFERS
    )
    verify(plan_of(synchronized(*merge_only), buffers=buffers), Result(Group(1), Group(1)))


# ---------------------------------------------------------------- buckets: fusion, residuals, trust ratios

TWO_BUCKETS = (
    *(Buffer(f"param.{n}", 8, tensors=(n, n + 1), initialized=True) for n in range(2)),
    *(Buffer(f"grad.{n}", 8, tensors=(n, n + 1)) for n in range(2)),
    Buffer("loss", 1),
    Buffer("fused", 20, "float16", padding=4),
    *(Buffer(f"residual.{n}", 8, initialized=True) for n in range(2)),
    *(Buffer(f"top.{n}", 2, sparse=True) for n in range(2)),
    Buffer("all_top", 16, sparse=True),
    Buffer("ratio", 1),
    Buffer("other_ratio", 1),
    Buffer("ratios", 2),
    Buffer("shuffled", 2),
    Buffer("loaded_ratios", 2, initialized=True),
)
PARAMS, GRADS = ("param.0", "param.1"), ("grad.1", "grad.0")
PASSES = (
    ops.Forward(PARAMS, ("loss",)),
    ops.Backward((*PARAMS, "loss"), "grad.1"),
    ops.Backward((*PARAMS, "loss"), "grad.0"),
)
UPDATE = ops.Optimize(PARAMS, GRADS)
FUSED = (ops.Pack(GRADS, "fused"), ops.AllReduce("fused", WORLD), ops.Unpack("fused", GRADS))
REDUCED = (ops.AllReduce("grad.1", WORLD), ops.AllReduce("grad.0", WORLD))


def two_buckets(*steps: Body) -> Plan:
    return plan_of(*steps, buffers=TWO_BUCKETS)


def test_fused_gradients_prove() -> None:
    step = (*PASSES, ops.Tick(GRADS, 0.005), *FUSED, UPDATE)
    verify(two_buckets(step, step), SYNC)


FUSION_MISTAKES: dict[str, tuple[Body, str]] = {
    "taken apart in another order": (
        (*PASSES, *FUSED[:2], ops.Unpack("fused", GRADS[::-1]), UPDATE),
        "holds other tensors, or slices in another order, than it declares",
    ),
    "not taken apart": (
        (*PASSES, *FUSED[:2], UPDATE),
        "backward(param.0, param.1, loss -> grad.0) at step 0: afterwards grad.0 of rank 0 holds 1/1 of the gradient "
        "of rank 0; the schedule declares 1/8",
    ),
    "taken apart before the all_reduce": (
        (*PASSES, FUSED[0], FUSED[2], FUSED[1], UPDATE),
        "afterwards grad.0 of rank 0 holds 1/1 of the gradient of rank 0; the schedule declares 1/8",
    ),
    "packed before the last backward pass": (
        (*PASSES[:2], FUSED[0], PASSES[2], *FUSED[1:], UPDATE),
        "reads 'grad.0', which nothing has written yet",
    ),
    "one bucket twice": (
        (*PASSES, ops.Pack(("grad.1", "grad.1"), "fused"), *FUSED[1:], UPDATE),
        "holds other tensors, or slices in another order, than it declares",
    ),
    "one bucket reduced by itself as well, by a sum": (
        (*PASSES, *FUSED, ops.AllReduce("grad.0", WORLD, "sum"), UPDATE),
        "all_reduce(grad.0, sum over group of 8) at step 0: afterwards grad.0 of rank 0 holds 1/1 of the gradient",
    ),
    "taken apart into too few": (
        (*PASSES, *FUSED[:2], ops.Unpack("fused", ("both",)), UPDATE),
        "holds other tensors than the buffers it is taken apart into",
    ),
}


@pytest.mark.parametrize("mistake", FUSION_MISTAKES)
def test_mistake_of_fusion_is_refused(mistake: str) -> None:
    step, message = FUSION_MISTAKES[mistake]
    buffers = (*TWO_BUCKETS, Buffer("both", 16, tensors=(0, 1)))
    assert message in refusal(plan_of(step, step, buffers=buffers), SYNC)


def test_gradients_packed_before_they_are_computed_are_stale() -> None:
    good = (*PASSES, *FUSED, UPDATE)
    stale = (*PASSES[:2], FUSED[0], PASSES[2], *FUSED[1:], UPDATE)
    text = refusal(two_buckets(good, stale), SYNC)
    assert "unpack(fused -> grad.1, grad.0) at step 1: afterwards grad.0 of rank 0 holds nothing of the" in text


def compressed(residuals: tuple[str, str]) -> Body:
    """Return a step whose buckets are compressed one after the other, with these residuals."""
    exchanges = (
        (
            ops.Select(f"grad.{n}", f"top.{n}", residual, 2),
            ops.AllGather(f"top.{n}", "all_top", WORLD),
            ops.Densify("all_top", f"grad.{n}", 8),
        )
        for n, residual in enumerate(residuals)
    )
    return (*PASSES, *(op for exchange in exchanges for op in exchange), UPDATE)


def test_every_bucket_has_a_residual_of_its_own() -> None:
    step = compressed(("residual.0", "residual.1"))
    verify(two_buckets(step, step), SYNC)
    shared, swapped = compressed(("residual.0", "residual.0")), compressed(("residual.1", "residual.0"))
    for steps, at in (((shared,), 0), ((step, swapped), 1)):
        text = refusal(two_buckets(*steps), SYNC)
        assert f"at step {at}: residual." in text
        assert "holds the rest of other tensors, or slices, than those of grad." in text


# LARS: the four GPUs of a node share the work of the trust ratios; with two tensors, two of them have none.
RATIOS = ops.TrustRatios(PARAMS, GRADS, "ratios", Group(1))
SHARES = (ops.TrustRatios(PARAMS, GRADS, "ratio", Group(2)), ops.AllGather("ratio", "ratios", Group(2)))
RATED_UPDATE = ops.Optimize(PARAMS, GRADS, "ratios")


@pytest.mark.parametrize("rating", [(RATIOS,), SHARES], ids=["every rank all", "in shares"])
def test_trust_ratios_change_no_weights_and_prove(rating: Body) -> None:
    step = (*PASSES, *REDUCED, *rating, RATED_UPDATE)
    verify(two_buckets(step, step), SYNC)


def test_buckets_may_be_rated_and_updated_one_by_one() -> None:
    pairs = [(("param.1",), ("grad.1",), "ratio"), (("param.0",), ("grad.0",), "other_ratio")]
    rate = tuple(ops.TrustRatios(params, grads, ratio, Group(1)) for params, grads, ratio in pairs)
    update = tuple(ops.Optimize(*pair) for pair in pairs)
    step = (*PASSES, *REDUCED, *rate, *update)
    verify(two_buckets(step, step), SYNC)
    swapped = (*PASSES, *REDUCED, *rate, ops.Optimize(("param.1",), ("grad.1",), "other_ratio"), update[1])
    assert "other_ratio are trust ratios of other parameters or gradients than it updates" in refusal(
        two_buckets(swapped), SYNC
    )


OTHER = "ratios are trust ratios of other parameters or gradients than it updates"
ORDER = "ratios do not hold the trust ratios of all tensors, in order"
RATIO_MISTAKES: dict[str, tuple[Body, str]] = {
    "of gradients that were not reduced yet": ((*PASSES, RATIOS, *REDUCED, RATED_UPDATE), OTHER),
    "of parameters that were updated since": ((*PASSES, *REDUCED, RATIOS, UPDATE, RATED_UPDATE), OTHER),
    "of gradients of other ranks": (
        (*PASSES, *SHARES, *REDUCED, RATED_UPDATE),
        "grad.1 differs within a group of 2; share the work after the gradients are",
    ),
    "shares in another order": (
        (*PASSES, *REDUCED, SHARES[0], ops.AllGather("ratio", "ratios", Group(2, 2)), RATED_UPDATE),
        ORDER,
    ),
    "a share only": (
        (
            *PASSES,
            *REDUCED,
            ops.TrustRatios(("param.0",), ("grad.0",), "ratio", Group(4)),
            ops.Optimize(("param.0",), ("grad.0",), "ratio"),
            ops.Optimize(("param.1",), ("grad.1",)),
        ),
        "ratio do not hold the trust ratios of all tensors, in order",
    ),
    "nothing of the kind": ((*PASSES, *REDUCED, ops.Optimize(PARAMS, GRADS, "loaded_ratios")), f"loaded_{ORDER}"),
}


@pytest.mark.parametrize("mistake", RATIO_MISTAKES)
def test_wrong_trust_ratios_are_refused(mistake: str) -> None:
    step, message = RATIO_MISTAKES[mistake]
    text = refusal(two_buckets(step), SYNC)
    assert message in text
    assert "at step 0: " in text


def test_trust_ratios_of_the_step_before_are_stale() -> None:
    good = (*PASSES, *REDUCED, RATIOS, RATED_UPDATE)
    text = refusal(two_buckets(good, (*PASSES, *REDUCED, RATED_UPDATE)), SYNC)
    assert f"at step 1: {OTHER}" in text


def test_ranks_of_powersgd_project_on_the_same_factor() -> None:
    """A left factor that is averaged only after each rank has projected on its own is refused."""
    plan = kinds()["powersgd"](rank=1, warmup_steps=0).plan(Job(4, 2, 2, tensor_counts=(64,), tensor_rows=(8,)))
    body = plan.bodies[-1]
    stages = {op.stage: at for at, op in enumerate(body) if isinstance(op, ops.LowRank)}
    (of_left,) = (op for op in body if isinstance(op, ops.AllReduce) and op.buffer == body[stages["right"]].left)
    late = [op for op in body[: stages["right"] + 1] if op != of_left] + [of_left, *body[stages["right"] + 1 :]]
    assert "differs among ranks, which must project on the same" in refusal(
        dataclasses.replace(plan, bodies=(*plan.bodies[:-1], tuple(late))),
        Result(gradients=Group(4), parameters=Group(1)),
    )


def test_members_that_hold_different_things_gather_those_of_all():
    of_members = np.eye(2, dtype=np.int64).reshape(1, 2, 1, 1, 2)  # the first holds source 0, the second source 1
    found = gathered(of_members, 1)
    assert found.shape == (1, 2, 1, 2, 2)
    for member in range(2):
        assert found[0, member, 0].tolist() == [[1, 0], [0, 1]]


MANY = {  # ranks -> a schedule that cuts the model in one or several ways
    "fsdp, kept by 4": lambda world_size: FSDP(reshard_after_forward=4),
    "fsdp, kept by 64": lambda world_size: FSDP(reshard_after_forward=64),
    "hsdp, kept by 8": lambda world_size: HSDP(shard=world_size // 4, reshard_after_forward=8),
    "shared by all": lambda world_size: Sync(shared_update=True),
    "shared by a few nodes": lambda world_size: Sync(shared_update=world_size // 8),
}


def peak_nbytes(schedule: Schedule, world_size: int) -> int:
    units = tuple(ModelUnit(number, number + 1) for number in range(3))
    job = Job(world_size, 8, 2, tensor_counts=(48 * world_size,) * 3, units=units)
    plan = schedule.plan(job)
    tracemalloc.start()
    prove(plan, lambda step: schedule.result(step, job))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("name", MANY)
def test_a_proof_takes_memory_in_proportion_to_the_ranks(name: str) -> None:
    few, many = (peak_nbytes(MANY[name](world_size), world_size) for world_size in (512, 2048))
    assert many < 2 * 4 * few  # each group with each rank would be 16 times as many
