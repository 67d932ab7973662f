"""Operations on buffers of one rank: what they leave, in closed form."""

from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402

from real.memory import Memory  # noqa: E402
from real.transforms import Transform, copy, transform  # noqa: E402
from simdist.check import check  # noqa: E402
from simdist.plan import Buffer, Copy, Densify, Merge, Pack, Plan, Select, Unpack  # noqa: E402

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


def test_scattered_values_are_summed_and_divided() -> None:
    op = Densify("top", "grad", divisor=4)
    memory = memory_of(op, Buffer("top", 3, sparse=True, initialized=True), Buffer("grad", 4, initialized=True))
    fill(memory, "grad", [9.0, 9.0, 9.0, 9.0])
    fill(memory, "top", [4.0, -2.0, 6.0], [2, 0, 2])
    transform(memory, op, step=0, rank=0)
    assert memory.dense("grad").tolist() == [-0.5, 0.0, 2.5, 0.0]


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
    copy(memory, op)
    assert memory.tensors("half")[0].tolist() == [1.0, torch.inf]  # it rounds, and overflows
    if sparse:
        assert memory.sparse("half").indices.tolist() == [5, 6]
