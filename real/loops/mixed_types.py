"""Plans of models whose parameters have several data types.

A schedule writes its plan for one type. `split_by_type` splits each buffer of tensors where the type changes, and each
operation on it. So every tensor is averaged in its own type, as in DistributedDataParallel, whose buckets have one type
each.

    all_reduce(grad.0)      becomes     all_reduce(grad.0.bfloat16), all_reduce(grad.0.float32)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from simdist.errors import UnsupportedError
from simdist.plan import Body, Buffer, Op, Plan, ops
from simdist.plan.plan import ITEM_NBYTES, DType

_Pieces = Mapping[str, tuple[str, ...]]  # by the name of a buffer that holds tensors


def split_by_type(plan: Plan, types: Sequence[DType], counts: Sequence[int], written: DType) -> Plan:
    """Return a plan whose buffers of tensors have one type each.

    Args:
        plan: A plan that takes all tensors to be of one type.
        types: Type of each tensor. Tensors of one type follow each other.
        counts: Elements of each tensor.
        written: The type in the plan.

    Raises:
        UnsupportedError: The plan has an operation that puts tensors of several types together.
    """
    if set(types) == {written}:
        return plan
    runs = _runs(types)
    pieces: dict[str, tuple[str, ...]] = {}
    buffers: list[Buffer] = []
    for buffer in plan.buffers:
        if buffer.tensors is None:
            buffers.append(buffer)
            continue
        made = [*_pieces_of(buffer, runs, counts, written)]
        pieces[buffer.name] = tuple(each.name for each in made)
        buffers += made
    steps = [tuple(each for op in body for each in _split(plan, op, pieces, types)) for body in plan.bodies]
    return replace(plan, buffers=tuple(buffers), bodies=tuple(steps))


def _runs(types: Sequence[DType]) -> list[tuple[DType, int, int]]:
    """Return each type with the half-open range of its tensors."""
    runs: list[tuple[DType, int, int]] = []
    first = 0
    for dtype, members in groupby(types):
        last = first + len(list(members))
        runs.append((dtype, first, last))
        first = last
    return runs


def _pieces_of(
    buffer: Buffer, runs: Sequence[tuple[DType, int, int]], counts: Sequence[int], written: DType
) -> Iterator[Buffer]:
    assert buffer.tensors is not None
    first, last = buffer.tensors
    parts = [(own, max(first, begin), min(last, end)) for own, begin, end in runs if first < end and begin < last]
    for own, begin, end in parts:
        is_converted = buffer.dtype != written and ITEM_NBYTES[buffer.dtype] < ITEM_NBYTES[own]
        name = f"{buffer.name}.{own}" if len(parts) > 1 else buffer.name
        dtype = buffer.dtype if is_converted else own
        count = sum(counts[begin:end])
        padding = buffer.padding if len(parts) == 1 else 0
        yield replace(buffer, name=name, dtype=dtype, count=count + padding, tensors=(begin, end), padding=padding)


def _split(plan: Plan, op: Op, pieces: _Pieces, types: Sequence[DType]) -> Body:
    """Return the operations that do to the pieces what an operation does to whole buffers."""

    def of(*names: str) -> tuple[str, ...]:
        return tuple(piece for name in names for piece in pieces.get(name, (name,)))

    if not any(name in pieces for name in (*ops.reads(op), *ops.writes(op))):
        return (op,)
    match op:
        case ops.Forward():
            return (replace(op, srcs=of(*op.srcs), dsts=of(*op.dsts)),)
        case ops.Backward():  # the last tensors have their gradients first
            return tuple(replace(op, srcs=of(*op.srcs), dst=piece) for piece in reversed(of(op.dst)))
        case ops.Optimize() if not op.slices:
            return (replace(op, params=of(*op.params), grads=of(*op.grads)),)
        case ops.Wait():
            return tuple(replace(op, buffer=piece) for piece in of(op.buffer))
        case ops.AllReduce() if op.servers is None and not op.drop:
            return tuple(replace(op, buffer=piece) for piece in of(op.buffer))
        case ops.Copy() if len(of(op.src)) == len(of(op.dst)):
            return tuple(replace(op, src=src, dst=dst) for src, dst in zip(of(op.src), of(op.dst), strict=True))
        case ops.Combine() if len({len(of(name)) for name in (*op.srcs, op.dst)}) == 1:
            each_srcs = zip(*(of(name) for name in op.srcs), strict=True)
            return tuple(replace(op, srcs=srcs, dst=dst) for srcs, dst in zip(each_srcs, of(op.dst), strict=True))
    found = " and ".join(sorted(set(types)))
    raise UnsupportedError(
        f"plan {plan.name}: the model has parameters of {found}, and {type(op).__name__} takes one type: take Sync(), "
        f"LocalSGD, HierarchicalSGD or DiLoCo, without shared_update and fusion, or convert the model"
    )
