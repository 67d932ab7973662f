"""Which plans a training loop can perform, and plans of models whose parameters have several data types.

A loop has forward and backward passes, as many in each step, and one update.

A schedule writes its plan for one type. `split_by_type` splits each buffer of tensors where the type changes, and each
operation on it. So every tensor is averaged in its own type, as in DistributedDataParallel.

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


def n_passes(plan: Plan) -> int:
    """Return the number of forward passes in a step."""
    return sum(isinstance(op, ops.Forward) for op in plan.bodies[0])


def check_shape(plan: Plan) -> None:
    """Check that a training loop can perform the steps of a plan.

    Raises:
        UnsupportedError: A step has several updates, its passes do not add up, other steps have another number of
            passes, or the order is different.
    """
    n_tensors = max((buffer.tensors[1] for buffer in plan.buffers if buffer.tensors), default=0)
    for number, body in enumerate(plan.bodies):
        if problem := _problem(plan, body, n_tensors):
            raise UnsupportedError(
                f"plan {plan.name}, body {number}: {problem}; a training loop has forward and backward passes, "
                f"as many in each step, and one update of everything: perform this plan with `python -m real`"
            )


def _problem(plan: Plan, body: Body, n_tensors: int) -> str:
    if any(buffer.sharded_over != ops.ALONE for buffer in plan.buffers):
        return "it shards the model, which fully_shard does in a loop; give real.wrap the schedule, or a run directory"
    body = tuple(op for op in body if not (isinstance(op, ops.Optimize) and op.optimizer == "outer"))
    kinds = [type(op) for op in body if isinstance(op, ops.Forward | ops.Backward | ops.Optimize)]
    backwards = [(op.dst, op.adds) for op in body if isinstance(op, ops.Backward)]
    buckets = [name for name, adds in backwards if not adds]
    if kinds != [*[ops.Forward, *[ops.Backward] * len(buckets)] * n_passes(plan), ops.Optimize] or not buckets:
        return f"its passes are {', '.join(kind.__name__ for kind in kinds) or 'none'}"
    if backwards != [(name, number > 0) for number in range(n_passes(plan)) for name in buckets]:
        return "its passes do not add up"
    if ops.drops(body) is not None:
        return (
            "it drops the late, who pass over steps, and so over what loops do in them, such as clipping; in a loop, "
            "LocalSGD(period=...), with overlap_steps or inner_steps, waits less for slow ranks"
        )
    if any(isinstance(op, ops.Save) for op in body):
        return "it saves checkpoints, which `real.wrap` writes by itself (`checkpointing=`)"
    update = next(op for op in body if isinstance(op, ops.Optimize))
    for what, names in (("its backward pass computes", buckets), ("it updates", update.params)):
        covered = sorted(plan.buffer(name).tensors or (0, 0) for name in names)
        if [*(first for first, _ in covered), n_tensors] != [0, *(last for _, last in covered)]:
            return f"{what} tensors {covered} of {n_tensors}"
    if not update.slices and (strange := set(update.grads) - set(buckets)):
        return f"it updates with {', '.join(sorted(strange))}, which is no bucket of its backward pass"
    return ""
