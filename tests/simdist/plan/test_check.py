"""Every way in which a plan can be illegal, with its message; and what is legal passes."""

import re
from dataclasses import replace

import pytest
from drawn_plans import ALGORITHMS, legal_plans, schedule_plans
from hypothesis import given
from messages import assert_message
from tiers import examples

from simdist.errors import PlanError
from simdist.plan import Buffer, Plan, Run, op_text, ops
from simdist.plan.check import check
from simdist.plan.group import MAX_WORLD_SIZE, Group
from simdist.plan.lanes import COMM

BUFFERS = (
    Buffer("param", 12, tensors=(0, 2), initialized=True),
    Buffer("grad.0", 8, tensors=(1, 2), initialized=True),
    Buffer("grad.1", 4, tensors=(0, 1), initialized=True),
    Buffer("momentum.0", 4, tensors=(1, 2), initialized=True),
    Buffer("sparse_grad", 12, tensors=(0, 2), sparse=True, initialized=True),
    Buffer("half", 12, "float16", tensors=(0, 2), initialized=True),
    Buffer("whole", 16, initialized=True),
    Buffer("slice", 4, initialized=True),
    Buffer("half_slice", 4, "float16"),
    Buffer("loss", 1),
    Buffer("batch", 4, "uint8", place="host", initialized=True),
    Buffer("input", 4, "uint8"),
    Buffer("top", 3, sparse=True, initialized=True),
    Buffer("residual", 16, initialized=True),
    Buffer("fused", 16, "float16", initialized=True, padding=4),
    Buffer("bytes", 12, "uint8", initialized=True),
    Buffer("few", 2, sparse=True, initialized=True),
    Buffer("half_few", 2, "float16", sparse=True),
    Buffer("half_residual", 16, "float16", initialized=True),
    Buffer("brain_residual", 16, "bfloat16", initialized=True),
    Buffer("few_bytes", 2, "uint8", sparse=True),
    Buffer("large", 2**31 - 1, initialized=True),
    Buffer("huge", 2**31, initialized=True),
    Buffer("many", 4, sparse=True),
    Buffer("ratios", 2),
    Buffer("one_ratio", 1, initialized=True),
    Buffer("byte_ratio", 1, "uint8"),
    Buffer("sparse_ratios", 2, sparse=True, initialized=True),
)
FIRST = ops.Wait("param")


def low_rank(*matrices: ops.Matrix) -> ops.LowRank:
    return ops.LowRank("left", "whole", "residual", "slice", "slice", matrices, seed=1)


ILLEGAL: dict[str, ops.Op] = {  # what is wrong with each: golden/messages.txt
    "reads a buffer that is not declared": ops.Save(("velocity",)),
    "writes a buffer that is not declared": ops.Forward(("param",), ("logits",)),
    "reads what nothing has written": ops.Wait("loss"),
    "loads to the device": ops.Load("input"),
    "copies to another size": ops.Copy("grad.0", "grad.1"),
    "copies to another type": ops.Copy("slice", "input"),
    "copies other tensors": ops.Copy("grad.1", "momentum.0"),
    "forward pass writes nothing": ops.Forward(("param",), ()),
    "backward pass writes no gradient": ops.Backward(("param",), "whole"),
    "optimizer updates what is no parameter": ops.Optimize(("whole",), ("grad.0",)),
    "optimizer updates with what is no gradient": ops.Optimize(("param",), ("whole",)),
    "gradient missing": ops.Optimize(("param",), ("grad.0",)),
    "gradient twice": ops.Optimize(("param",), ("grad.0", "grad.1", "grad.1")),
    "gradient of other length": ops.Optimize(("momentum.0",), ("grad.0",)),
    "optimizer updates with a sparse gradient": ops.Optimize(("param",), ("sparse_grad",)),
    "all_reduce over a group that does not divide": ops.AllReduce("grad.0", Group(3)),
    "broadcast over a group that does not divide": ops.Broadcast("param", Group(4, 4)),
    "reduce over a group that does not divide": ops.Reduce("param", Group(2, 3)),
    "reduce_scatter over a group that does not divide": ops.ReduceScatter("whole", "slice", Group(5)),
    "all_gather over a group that does not divide": ops.AllGather("slice", "whole", Group(0)),
    "reduce_scatter by a tree": ops.ReduceScatter("whole", "slice", Group(4), "mean", "tree"),
    "all_gather by a tree": ops.AllGather("slice", "whole", Group(4), "tree"),
    "reduce by halving_doubling": ops.Reduce("param", Group(4), 0, "mean", "halving_doubling"),
    "broadcast by halving_doubling": ops.Broadcast("param", Group(4), 0, "halving_doubling"),
    "all_reduce of a sparse buffer": ops.AllReduce("top", Group(4)),
    "reduce of a sparse buffer": ops.Reduce("top", Group(4)),
    "reduce_scatter of a sparse buffer": ops.ReduceScatter("top", "top", Group(1)),
    "root outside the group of a reduce": ops.Reduce("param", Group(4), root=4),
    "root outside the group of a broadcast": ops.Broadcast("param", Group(2), root=-1),
    "reduce_scatter to slices of another size": ops.ReduceScatter("whole", "slice", Group(8)),
    "all_gather of slices of another size": ops.AllGather("slice", "param", Group(8)),
    "all_gather of slices that do not make the whole": ops.AllGather("slice", "whole", Group(2)),
    "reduce_scatter to another type": ops.ReduceScatter("whole", "half_slice", Group(4)),
    "densify of a dense buffer": ops.Densify("whole", "whole"),
    "densify into a sparse buffer": ops.Densify("top", "top"),
    "select into a dense buffer": ops.Select("whole", "slice", "residual", 4),
    "select another number than the buffer holds": ops.Select("whole", "top", "residual", 4),
    "select more than there is": ops.Select("loss_in", "top", "loss_in", 3),
    "residual of another size": ops.Select("param", "top", "residual", 3),
    "select from a sparse buffer": ops.Select("top", "top", "top", 3),
    "select with a residual of fewer bits": ops.Select("whole", "few", "half_residual", 2),
    "select with a residual of other bits": ops.Select("half_residual", "half_few", "brain_residual", 2),
    "select into more bits than the residual has": ops.Select("half_residual", "few", "half_residual", 2),
    "select from bytes": ops.Select("bytes", "few_bytes", "bytes", 2),
    "select from more than indices reach": ops.Select("huge", "few", "huge", 2),
    "densify into another type": ops.Densify("few", "half_residual"),
    "merge of a dense buffer": ops.Merge("whole", "few", "residual"),
    "merge into a dense buffer": ops.Merge("top", "slice", "residual"),
    "merge whose rest goes to a sparse buffer": ops.Merge("top", "few", "top"),
    "merge that keeps more than there is": ops.Merge("top", "many", "residual"),
    "merge with a residual of fewer bits": ops.Merge("top", "few", "half_residual"),
    "merge divided by nothing": ops.Merge("top", "few", "residual", divisor=0),
    "densify divided by a negative number": ops.Densify("top", "whole", divisor=-8),
    "fusion buffer of another size": ops.Pack(("grad.0",), "fused"),
    "fusion buffer of nothing": ops.Pack((), "fused"),
    "fusion buffer taken apart into another number of elements": ops.Unpack("fused", ("grad.0", "grad.1", "slice")),
    "fusion buffer taken apart into one buffer twice": ops.Unpack("fused", ("grad.1", "slice", "grad.1")),
    "fusion of bytes": ops.Pack(("bytes",), "fused"),
    "fusion of a sparse buffer": ops.Pack(("sparse_grad",), "fused"),
    "fusion into bytes": ops.Pack(("grad.0", "grad.1"), "bytes"),
    "trust ratios over a group that does not divide": ops.TrustRatios(
        ("param",), ("grad.0", "grad.1"), "one_ratio", Group(3)
    ),
    "trust ratios of what are no parameters": ops.TrustRatios(("whole",), ("grad.0",), "one_ratio", Group(1)),
    "trust ratios of gradients of other tensors": ops.TrustRatios(("param",), ("grad.0",), "ratios", Group(1)),
    "too few trust ratios for a share": ops.TrustRatios(("param",), ("grad.0", "grad.1"), "one_ratio", Group(1)),
    "more trust ratios than a share": ops.TrustRatios(("param",), ("grad.0", "grad.1"), "ratios", Group(4)),
    "trust ratios in bytes": ops.TrustRatios(("param",), ("grad.0", "grad.1"), "byte_ratio", Group(2)),
    "trust ratios in a sparse buffer": ops.TrustRatios(("param",), ("grad.0", "grad.1"), "sparse_ratios", Group(1)),
    "optimizer with too few trust ratios": ops.Optimize(("param",), ("grad.0", "grad.1"), "one_ratio"),
    "optimizer with trust ratios that no operation computed": ops.Optimize(("param",), ("grad.0", "grad.1"), "ratios"),
    "copy by groups that do not divide": ops.Copy("param", "half", Group(3)),
    "save by groups that do not divide": ops.Save(("param",), by=Group(3)),
    "save of nothing": ops.Save(()),
    "save to a file on the device": ops.Save(("param",), "input"),
    "clock without a period": ops.Tick(("grad.0",), 0.0),
    "clock that never ticks": ops.Tick(("grad.0",), float("inf")),
    "clock of no number": ops.Tick(("grad.0",), float("nan")),
    "tick for nothing": ops.Tick((), 0.005),
    "servers without the algorithm": ops.AllReduce("grad.0", Group(4), servers=ops.Servers((8,))),
    "algorithm without servers": ops.AllReduce("grad.0", Group(4), "mean", "server"),
    "servers that hold less than the buffer": ops.AllReduce("grad.0", Group(4), "mean", "server", ops.Servers((4, 3))),
    "server that holds less than nothing": ops.AllReduce("grad.0", Group(4), "mean", "server", ops.Servers((9, -1))),
    "no servers at all": ops.AllReduce("grad.0", Group(4), "mean", "server", ops.Servers(())),
    "other number of members than servers": ops.AllReduce(
        "grad.0", Group(4), "mean", "server", ops.Servers((4, 4), (0,))
    ),
    "one member as two servers": ops.AllReduce("grad.0", Group(4), "mean", "server", ops.Servers((4, 4), (2, 2))),
    "shared update over a group that does not divide": ops.Optimize(
        ("momentum.0",), ("momentum.0",), slices=("slice",), shared_by=Group(3)
    ),
    "shared update with trust ratios": ops.Optimize(
        ("momentum.0",), ("momentum.0",), "one_ratio", slices=("slice",), shared_by=Group(1)
    ),
    "shared update to fewer slices than parameters": ops.Optimize(
        ("param", "momentum.0"), ("grad.0",), slices=("slice",), shared_by=Group(4)
    ),
    "shared update to slices of another size": ops.Optimize(
        ("momentum.0",), ("momentum.0",), slices=("slice",), shared_by=Group(2)
    ),
    "shared update of what is no parameter": ops.Optimize(
        ("whole",), ("whole",), slices=("slice",), shared_by=Group(4)
    ),
    "shared update with gradients of other length": ops.Optimize(("momentum.0",), ("grad.0",), slices=("slice",)),
    "matrix beside its bucket": low_rank(ops.Matrix(10, 4, 4, 1)),
    "matrices that overlap": low_rank(ops.Matrix(0, 2, 4, 1), ops.Matrix(4, 2, 4, 1)),
    "factors of more columns than the matrix": low_rank(ops.Matrix(0, 2, 8, 3)),
    "factors of another size": low_rank(ops.Matrix(0, 2, 8, 1)),
    "tensors beside the matrices that go nowhere": low_rank(ops.Matrix(0, 3, 3, 1)),
    "server outside the group": ops.AllReduce("grad.0", Group(4), "mean", "server", ops.Servers((4, 4), (0, 4))),
}
for _algorithm in ("double_tree", "hierarchical", "server"):
    for _op in (
        ops.Reduce("param", Group(4)),
        ops.Broadcast("param", Group(4)),
        ops.AllGather("slice", "whole", Group(4)),
    ):
        ILLEGAL[f"{type(_op).__name__} by {_algorithm}"] = replace(_op, algorithm=_algorithm)
for _op in (
    ops.AllReduce("grad.0", Group(12), "mean", "halving_doubling"),
    ops.ReduceScatter("param", "one", Group(12), "mean", "halving_doubling"),
    ops.AllGather("one", "param", Group(12), "halving_doubling"),
):
    ILLEGAL[f"{type(_op).__name__} by halving_doubling over a group that is no power of two"] = _op


def plan_with(op: ops.Op, *, world_size: int = 8) -> Plan:
    """Return a plan in which `op` is the second operation of step 2."""
    buffers = BUFFERS
    if isinstance(op, ops.Select) and op.src == "loss_in":
        buffers = (*BUFFERS, Buffer("loss_in", 2, initialized=True))
    if isinstance(op, ops.COLLECTIVES) and op.group.size == 12:
        buffers, world_size = (*BUFFERS, Buffer("one", 1, initialized=True)), 12
    return Plan("broken", world_size, buffers, ((FIRST,), (FIRST, op, FIRST)), (Run((0,), 2), Run((1,), 3)))


@pytest.mark.parametrize("what", ILLEGAL)
def test_illegal_operation_is_reported_with_its_place_and_what_would_be_right(what: str) -> None:
    op = ILLEGAL[what]
    with pytest.raises(PlanError) as error:
        check(plan_with(op))
    first, *body = str(error.value).splitlines()
    assert first.startswith(f"plan broken: {op_text(op)} at step 2: ")
    assert body == [
        "body 1:",
        "    host     wait(param)",
        f"--> {ops.lane_of(op).stream:8s} {op_text(op)}",
        "    host     wait(param)",
    ]
    assert_message(f"illegal operation: {what}", first)


def legal(**changes: object) -> Plan:
    fields: dict[str, object] = {
        "name": "broken",
        "world_size": 8,
        "buffers": BUFFERS,
        "bodies": ((FIRST,),),
        "order": (Run((0,), 2),),
    }
    return Plan(**{**fields, **changes})


PLAN_PROBLEMS: dict[str, dict[str, object]] = {
    "no ranks": {"world_size": 0},
    "too many ranks": {"world_size": MAX_WORLD_SIZE + 1},
    "buffer twice": {"buffers": (*BUFFERS, Buffer("loss", 2))},
    "buffers twice and three times": {"buffers": (*BUFFERS, Buffer("param", 2), Buffer("loss", 2), Buffer("param", 2))},
    "buffer of nothing": {"buffers": (*BUFFERS, Buffer("none", 0))},
    "empty range of tensors": {"buffers": (*BUFFERS, Buffer("x", 1, tensors=(2, 2)))},
    "range of tensors before the first": {"buffers": (*BUFFERS, Buffer("x", 1, tensors=(-1, 2)))},
    "as much padding as elements": {"buffers": (*BUFFERS, Buffer("x", 4, padding=4))},
    "negative padding": {"buffers": (*BUFFERS, Buffer("x", 4, padding=-1))},
    "unknown body": {"order": (Run((0,)), Run((0, 1)))},
    "negative body": {"order": (Run((-1,)),)},
    "run of no times": {"order": (Run((0,), 0),)},
    "run of no bodies": {"order": (Run(()),)},
    "empty order": {"order": ()},
}


@pytest.mark.parametrize("what", PLAN_PROBLEMS)
def test_illegal_plan_is_reported_with_what_would_be_right(what: str) -> None:
    check(legal())
    with pytest.raises(PlanError) as error:
        check(legal(**PLAN_PROBLEMS[what]))
    assert str(error.value).startswith("plan broken: ")
    assert_message(f"illegal plan: {what}", str(error.value))


def test_buffer_written_by_an_earlier_operation_of_the_step_may_be_read() -> None:
    check(legal(bodies=((ops.Forward(("param",), ("loss",)), ops.Wait("loss")),)))


def test_buffer_written_by_an_earlier_step_may_be_read() -> None:
    write, read = (ops.Forward(("param",), ("loss",)),), (ops.Wait("loss"),)
    check(legal(bodies=(write, read), order=(Run((0, 1), 3),)))
    with pytest.raises(PlanError, match=r"wait\(loss\) at step 0: reads 'loss', which nothing has written yet"):
        check(legal(bodies=(write, read), order=(Run((1, 0), 3),)))


LEGAL: dict[str, ops.Op] = {
    "copy to fewer bits": ops.Copy("param", "half"),
    "copy to more bits": ops.Copy("half", "param"),
    "pack with conversion and padding": ops.Pack(("grad.0", "grad.1"), "fused"),
    "unpack in another order": ops.Unpack("fused", ("grad.1", "grad.0")),
    "trust ratios of all tensors on every rank": ops.TrustRatios(("param",), ("grad.0", "grad.1"), "ratios", Group(1)),
    "trust ratios in shares": ops.TrustRatios(("param",), ("grad.1", "grad.0"), "one_ratio", Group(2, 2)),
    "more members than tensors": ops.TrustRatios(("param",), ("grad.1", "grad.0"), "one_ratio", Group(8)),
    "one trust ratio for one tensor": ops.Optimize(("momentum.0",), ("momentum.0",), "one_ratio"),
    "merge to fewer": ops.Merge("top", "few", "residual", divisor=8, lane=COMM),
    "merge to as many": ops.Merge("few", "few", "residual"),
    "select from half precision with a residual of more bits": ops.Select("half_residual", "half_few", "residual", 2),
    "select into half precision": ops.Select("whole", "half_few", "residual", 2),
    "merge into half precision": ops.Merge("top", "half_few", "residual"),
    "select from as many as indices reach": ops.Select("large", "few", "large", 2),
    "servers beside the ranks": ops.AllReduce("grad.0", Group(4), "sum", "server", ops.Servers((3, 5))),
    "servers on members, in any order": ops.AllReduce(
        "grad.0", Group(4), "mean", "server", ops.Servers((8, 0), (3, 1))
    ),
    "reduce directly": ops.Reduce("param", Group(4), algorithm="direct"),
}


@pytest.mark.parametrize("what", LEGAL)
def test_legal_operation_passes(what: str) -> None:
    check(plan_with(LEGAL[what]))


VECTOR_BUFFERS = (
    *(Buffer(f"vector.{n}", n, initialized=True) for n in (16, 24)),
    Buffer("shard", 16, initialized=True),
    Buffer("given", 2, sparse=True, initialized=True),
    Buffer("top", 2, sparse=True),
    Buffer("other_top", 2, sparse=True),
    Buffer("tops", 4, sparse=True),
)
SELECT_16 = ops.Select("vector.16", "top", "shard", 2)
PAIRS = ops.AllGather("top", "tops", Group(2))


@pytest.mark.parametrize(
    ("operations", "name"),
    [
        pytest.param((SELECT_16, ops.Densify("top", "vector.24")), "top", id="scattered"),
        pytest.param((SELECT_16, PAIRS, ops.Densify("tops", "vector.24")), "tops", id="gathered"),
        pytest.param(
            (SELECT_16, ops.Copy("top", "other_top"), ops.Densify("other_top", "vector.24")), "other_top", id="copied"
        ),
        pytest.param((SELECT_16, PAIRS, ops.Merge("tops", "top", "vector.24")), "tops", id="rest"),
        pytest.param(
            (SELECT_16, ops.Merge("top", "other_top", "shard"), ops.Densify("other_top", "vector.24")),
            "other_top",
            id="merged",
        ),
        pytest.param(
            (ops.Densify("given", "vector.16"), ops.Copy("given", "top"), ops.Densify("top", "vector.24")),
            "top",
            id="given",
        ),
    ],
)
def test_entries_of_one_vector_go_into_no_vector_of_another_length(operations: tuple[ops.Op, ...], name: str) -> None:
    problem = (
        f"{op_text(operations[-1])} at step 0: takes {name!r} for entries of a vector of 24 elements; elsewhere they "
        f"are of one of 16: give the entries of each length a buffer of their own"
    )
    with pytest.raises(PlanError, match=re.escape(problem)):
        check(Plan("hand", 2, VECTOR_BUFFERS, (operations,), (Run((0,)),)))
    check(Plan("hand", 2, VECTOR_BUFFERS, (operations[:-1],), (Run((0,)),)))


def test_length_that_becomes_known_later_counts_for_the_operations_before() -> None:
    operations = (ops.Copy("given", "top"), ops.Densify("top", "vector.16"), ops.Densify("given", "vector.24"))
    with pytest.raises(PlanError, match=r"copy\(given -> top\) at step 0: takes 'top' for entries of a vector of 24"):
        check(Plan("hand", 2, VECTOR_BUFFERS, (operations,), (Run((0,)),)))


def test_entries_of_an_earlier_step_go_into_no_vector_of_another_length() -> None:
    bodies = ((SELECT_16,), (ops.Wait("top"), ops.Densify("top", "vector.24")))
    with pytest.raises(
        PlanError, match=r"densify\(top -> vector.24\) at step 3: takes 'top' for entries of a vector of"
    ):
        check(Plan("hand", 2, VECTOR_BUFFERS, bodies, (Run((0,), 3), Run((1,)))))


def test_copy_of_some_ranks_may_be_saved_by_the_same_and_read_by_nobody_else() -> None:
    copy = ops.Copy("param", "half", Group(4))
    check(legal(bodies=((copy, ops.Wait("half"), ops.Save(("half",), by=Group(4))),)))
    for reader in (ops.Save(("half",)), ops.Save(("half",), by=Group(2, 4)), ops.Forward(("half",), ("loss",))):
        problem = "reads 'half', which only the first of each group of 4 has copied"
        with pytest.raises(PlanError, match=re.escape(f"{op_text(reader)} at step 0: {problem}")):
            check(legal(bodies=((copy, reader),)))


def test_body_that_no_step_runs_is_refused() -> None:
    with pytest.raises(PlanError, match="body 1 stands in no run of the order; take it away, or give it a step"):
        check(legal(bodies=((FIRST,), (ops.Wait("nothing"),))))


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        (
            ops.AllReduce("bytes", Group(4)),
            "reduces 'bytes' of bytes (uint8); a reduction takes floating-point numbers",
        ),
        (ops.AllReduce("far", Group(4)), "works on 'far' in host memory; copy it to a buffer on the device first"),
        (ops.Pack(("far",), "whole"), "works on 'far' in host memory; copy it to a buffer on the device first"),
        (ops.Tick(("far",), 0.005), "works on 'far' in host memory; copy it to a buffer on the device first"),
        (ops.Forward(("far",), ("whole",)), "works on 'far' in host memory; copy it to a buffer on the device first"),
    ],
)
def test_what_no_gpu_can_do_is_refused(op: ops.Op, problem: str) -> None:
    buffers = (
        Buffer("bytes", 8, "uint8", initialized=True),
        Buffer("far", 8, place="host", initialized=True),
        Buffer("whole", 8),
    )
    with pytest.raises(PlanError, match=re.escape(problem)):
        check(Plan("hand", 8, buffers, ((op,),), (Run((0,)),)))


@examples(150)
@given(legal_plans(algorithms=ALGORITHMS))
def test_random_legal_plans_pass(plan: Plan) -> None:
    check(plan)


@examples(50)
@given(schedule_plans())
def test_plans_of_schedules_pass(plan: Plan) -> None:
    check(plan)
