"""Operations on buffers of one rank: what they leave, in closed form."""

from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402

from real.buffers.memory import Memory, distinct_counts  # noqa: E402
from real.buffers.transforms import Transform, copy, transform, warm_up_transforms  # noqa: E402
from simdist.plan import (  # noqa: E402
    AllGather,
    Broadcast,
    Buffer,
    Copy,
    Densify,
    Group,
    Merge,
    Pack,
    Plan,
    Select,
    Unpack,
)
from simdist.plan.check import check  # noqa: E402

CPU = torch.device("cpu")


def memory_of(op: Transform | Copy, *buffers: Buffer) -> Memory:
    """Return memory for an operation that is legal on these buffers, which have contents from the beginning."""
    check(Plan.from_steps("one", world_size=1, buffers=buffers, steps=[(op,)]))
    return Memory(
        Plan.from_steps("one", world_size=1, buffers=buffers, steps=[(op,)]), CPU, {each.name for each in buffers}
    )


def fill(memory: Memory, name: str, values: Sequence[float], indices: Sequence[int] | None = None) -> None:
    if indices is None:
        memory.dense(name).copy_(torch.tensor(values))
    else:
        memory.sparse(name).values.copy_(torch.tensor(values))
        memory.sparse(name).indices.copy_(torch.tensor(indices))


def dense_of(memory: Memory, name: str, count: int) -> Tensor:
    """Return the dense vector that a sparse buffer stands for."""
    sparse = memory.sparse(name)
    return torch.zeros(count, dtype=sparse.values.dtype).index_add_(0, sparse.indices, sparse.values)


def merging(n_given: int, n_kept: int, divisor: int = 1, count: int = 10) -> tuple[Merge, Memory]:
    op = Merge("given", "kept", "residual", divisor)
    buffers = (
        Buffer("given", n_given, "float64", sparse=True, initialized=True),
        Buffer("kept", n_kept, "float64", sparse=True),
        Buffer("residual", count, "float64", initialized=True),
    )
    return op, memory_of(op, *buffers)


def test_equal_indices_are_summed_and_the_largest_sums_are_kept() -> None:
    op, memory = merging(6, 2)
    fill(memory, "given", [1.0, -2.0, 3.0, -3.5, 5.0, -2.5], [4, 7, 1, 1, 0, 7])  # 4: 1, 7: -4.5, 1: -0.5, 0: 5
    fill(memory, "residual", [100.0] * 10)
    transform(memory, op, step=0, rank=0)
    assert dense_of(memory, "kept", 10).tolist() == [5.0, 0, 0, 0, 0, 0, 0, -4.5, 0, 0]
    assert memory.dense("residual").tolist() == [100.0, 99.5, 100, 100, 101.0, 100, 100, 100, 100, 100]


def test_a_rank_keeps_its_share_of_what_a_merge_drops() -> None:
    op, memory = merging(4, 1, divisor=4)
    fill(memory, "given", [2.0, 8.0, 2.0, -1.0], [3, 5, 3, 9])
    transform(memory, op, step=0, rank=0)
    assert dense_of(memory, "kept", 10).tolist() == [0, 0, 0, 0, 0, 8.0, 0, 0, 0, 0]
    assert memory.dense("residual").tolist() == [0, 0, 0, 1.0, 0, 0, 0, 0, 0, -0.25]


def test_a_merge_with_room_for_more_than_there_is_fills_it_with_nothing() -> None:
    op, memory = merging(4, 3)
    fill(memory, "given", [1.0, 2.0, 3.0, 4.0], [6, 6, 6, 6])
    transform(memory, op, step=0, rank=0)
    assert dense_of(memory, "kept", 10).tolist() == [0, 0, 0, 0, 0, 0, 10.0, 0, 0, 0]
    assert not memory.dense("residual").any()
    assert ((memory.sparse("kept").indices >= 0) & (memory.sparse("kept").indices < 10)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_merge_loses_nothing_whatever_the_type(dtype: str) -> None:
    op = Merge("given", "kept", "residual")
    buffers = (
        Buffer("given", 64, dtype, sparse=True, initialized=True),
        Buffer("kept", 9, dtype, sparse=True),
        Buffer("residual", 20, dtype, initialized=True),
    )
    memory = memory_of(op, *buffers)
    generator = torch.Generator().manual_seed(0)
    memory.sparse("given").values.copy_(torch.randint(-8, 9, (64,), generator=generator))  # exact in any type
    memory.sparse("given").indices.copy_(torch.randint(20, (64,), generator=generator))
    before = dense_of(memory, "given", 20)
    transform(memory, op, step=0, rank=0)
    kept, dropped = dense_of(memory, "kept", 20), memory.dense("residual")
    assert torch.equal(kept + dropped, before)
    assert kept.count_nonzero() == 9
    assert kept[kept != 0].abs().min() >= dropped.abs().max()


def test_what_is_merged_adds_to_what_is_selected_next() -> None:
    select = Select("grad", "top", "residual", 1)
    buffers = (
        Buffer("grad", 4, initialized=True),
        Buffer("top", 1, sparse=True),
        Buffer("residual", 4, initialized=True),
    )
    memory = memory_of(select, *buffers)
    fill(memory, "residual", [0.0, 0.75, 0.0, 0.0])
    fill(memory, "grad", [1.0, 0.5, 0.0, -1.0])
    transform(memory, select, step=0, rank=0)
    assert dense_of(memory, "top", 4).tolist() == [0.0, 1.25, 0.0, 0.0]
    assert memory.dense("residual").tolist() == [1.0, 0.0, 0.0, -1.0]


def test_what_a_selected_value_loses_in_half_precision_stays_in_the_residual() -> None:
    op = Select("grad", "top", "residual", 1)
    buffers = (
        Buffer("grad", 3, initialized=True),
        Buffer("top", 1, "float16", sparse=True),
        Buffer("residual", 3, initialized=True),
    )
    memory = memory_of(op, *buffers)
    fill(memory, "residual", [0.25, 0.0, 0.5])
    fill(memory, "grad", [2**-13, 1 + 2**-12, 0.0])  # half precision has steps of 2^-12 at 0.25 and 2^-10 at 1
    transform(memory, op, step=0, rank=0)
    assert dense_of(memory, "top", 3).tolist() == [0.0, 1.0, 0.0]
    assert memory.dense("residual").tolist() == [0.25 + 2**-13, 2**-12, 0.5]


def test_a_half_precision_gradient_is_added_to_a_residual_of_more_bits() -> None:
    op = Select("grad", "top", "residual", 1)
    buffers = (
        Buffer("grad", 2, "float16", initialized=True),
        Buffer("top", 1, "float16", sparse=True),
        Buffer("residual", 2, initialized=True),
    )
    memory = memory_of(op, *buffers)
    fill(memory, "residual", [0.25, 4.0])
    fill(memory, "grad", [2**-13, 0.0])
    transform(memory, op, step=0, rank=0)
    assert memory.dense("residual").tolist() == [0.25 + 2**-13, 0.0]


def test_an_infinite_value_is_sent_and_leaves_nothing() -> None:
    op = Select("grad", "top", "residual", 1)
    buffers = (
        Buffer("grad", 2, initialized=True),
        Buffer("top", 1, sparse=True),
        Buffer("residual", 2, initialized=True),
    )
    memory = memory_of(op, *buffers)
    fill(memory, "grad", [1.0, torch.inf])
    transform(memory, op, step=0, rank=0)
    assert dense_of(memory, "top", 2).tolist() == [0.0, torch.inf]
    assert memory.dense("residual").tolist() == [1.0, 0.0]


def test_a_merge_of_half_precision_drops_what_the_kept_sums_lose_and_shares_that_in_more_bits() -> None:
    op = Merge("given", "kept", "residual", divisor=8)
    buffers = (
        Buffer("given", 4, "float16", sparse=True, initialized=True),
        Buffer("kept", 1, "float16", sparse=True),
        Buffer("residual", 3, initialized=True),
    )
    memory = memory_of(op, *buffers)
    fill(memory, "given", [1.0, 2**-12, 2**-24, 2**-24], [0, 0, 2, 2])  # an eighth of 2^-23 is no half
    transform(memory, op, step=0, rank=0)
    assert dense_of(memory, "kept", 3).tolist() == [1.0, 0.0, 0.0]
    assert memory.dense("residual").tolist() == [2**-15, 0.0, 2**-26]


def test_scattered_values_are_summed_and_divided() -> None:
    op = Densify("top", "grad", divisor=4)
    memory = memory_of(op, Buffer("top", 3, sparse=True, initialized=True), Buffer("grad", 4, initialized=True))
    fill(memory, "grad", [9.0, 9.0, 9.0, 9.0])
    fill(memory, "top", [4.0, -2.0, 6.0], [2, 0, 2])
    transform(memory, op, step=0, rank=0)
    assert memory.dense("grad").tolist() == [-0.5, 0.0, 2.5, 0.0]


def test_ranks_selections_are_told_apart_wherever_they_went() -> None:
    """They are gathered, copied and sent on; what else may be in a buffer makes slices shorter."""
    ops = (
        Select("grad", "top", "residual", 6),
        AllGather("top", "gathered", Group(2)),
        Copy("gathered", "copied"),
        AllGather("copied", "all", Group(2, stride=2)),
        Broadcast("all", Group(4)),
        Merge("gathered", "merged", "residual"),
        Copy("merged", "copied"),
        AllGather("begun", "with", Group(2)),
    )
    sizes = {"top": 6, "gathered": 12, "copied": 12, "all": 24, "merged": 12, "begun": 3, "with": 6}
    buffers = [Buffer(name, count, sparse=True, initialized=name == "begun") for name, count in sizes.items()]
    dense = (Buffer("grad", 40, initialized=True), Buffer("residual", 40, initialized=True))
    plan = Plan.from_steps("one", world_size=4, buffers=(*buffers, *dense), steps=[ops])
    assert distinct_counts(plan) == {
        "top": 6, "gathered": 6, "copied": 6, "all": 6, "merged": 12, "begun": 1, "with": 1
    }  # fmt: skip
    assert Memory(plan, CPU, {"all"}, n_ranks=4).row(1).sparse("all").n_distinct == 6


def test_gathered_selections_are_added_one_after_the_other() -> None:
    """In single precision the order shows: 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1."""
    ops = (Select("grad", "top", "residual", 2), AllGather("top", "all", Group(3)), Densify("all", "sum"))
    buffers = (
        Buffer("grad", 4, initialized=True),
        Buffer("residual", 4, initialized=True),
        Buffer("top", 2, sparse=True),
        Buffer("all", 6, sparse=True),
        Buffer("sum", 4),
    )
    plan = Plan.from_steps("one", world_size=3, buffers=buffers, steps=[ops])
    check(plan)
    memory = Memory(plan, CPU, {each.name for each in buffers})
    assert memory.sparse("all").n_distinct == 2
    fill(memory, "all", [1e8, 1e8, 1.0, -1e8, 1.0, -1e8], [0, 3, 0, 3, 3, 0])
    transform(memory, ops[-1], step=0, rank=0)
    assert memory.dense("sum").tolist() == [0.0, 0.0, 0.0, 1.0]


def test_warming_up_leaves_no_trace() -> None:
    ops = (
        Select("grad", "top", "residual", 2),
        Merge("top", "kept", "residual"),
        Densify("kept", "grad"),
        Pack(("grad",), "fused"),
        Unpack("fused", ("grad",)),
    )
    buffers = (
        Buffer("grad", 4, initialized=True),
        Buffer("residual", 4, initialized=True),
        Buffer("top", 2, sparse=True),
        Buffer("kept", 1, sparse=True),
        Buffer("fused", 5, padding=1),
    )
    plan = Plan.from_steps("one", world_size=1, buffers=buffers, steps=[ops])
    memory = Memory(plan, CPU, {each.name for each in buffers})
    tensors = [tensor for each in buffers for tensor in memory.tensors(each.name)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number % 4)
    before = [(tensor.clone(), tensor._version) for tensor in tensors]
    warm_up_transforms(plan, memory)
    for tensor, (contents, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, contents)
        assert tensor._version > version, "it was not written"


def test_a_fusion_buffer_is_packed_in_order_and_its_padding_is_zero() -> None:
    op = Pack(("b", "a"), "fused")
    parts = (Buffer("a", 2, initialized=True), Buffer("b", 1, initialized=True))
    memory = memory_of(op, *parts, Buffer("fused", 5, "float16", padding=2, initialized=True))
    for name, values in {"a": [1.0, 1 / 3], "b": [3.0], "fused": [7.0] * 5}.items():
        fill(memory, name, values)
    transform(memory, op, step=0, rank=0)
    assert memory.dense("fused").dtype == torch.float16
    assert memory.dense("fused").tolist() == [3.0, 1.0, float(torch.tensor(1 / 3).half()), 0.0, 0.0]


def test_a_fusion_buffer_is_taken_apart_in_order() -> None:
    op = Unpack("fused", ("b", "a"))
    parts = (Buffer("a", 2), Buffer("b", 1))
    memory = memory_of(op, *parts, Buffer("fused", 5, "float16", padding=2, initialized=True))
    fill(memory, "fused", [3.0, 1.0, 2.0, 9.0, 9.0])
    transform(memory, op, step=0, rank=0)
    assert memory.dense("b").tolist() == [3.0]
    assert memory.dense("a").tolist() == [1.0, 2.0]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_copy_converts(sparse: bool) -> None:
    op = Copy("wide", "half")
    memory = memory_of(
        op,
        Buffer("wide", 2, "float64", sparse=sparse, initialized=True),
        Buffer("half", 2, "float16", sparse=sparse),
    )
    fill(memory, "wide", [1 + 2**-12, 70_000.0], [5, 6] if sparse else None)
    copy(memory, op, rank=0)
    assert memory.tensors("half")[0].tolist() == [1.0, torch.inf]  # it rounds, and overflows
    if sparse:
        assert memory.sparse("half").indices.tolist() == [5, 6]
