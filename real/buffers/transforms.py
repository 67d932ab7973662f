"""Operations that turn buffers of a plan into others, on one rank: copies, fusion, compression with error feedback.

They need only the buffers, so all programs perform them in the same way.

**Ranks agree.** Ranks must compute equal results from equal data, or their parameters would drift apart. So values with
equal indices are summed in a fixed order, although a GPU scatters in any order. A merge sorts them first. Gathered
entries are scattered slice by slice. The selection of one rank contains no index twice, so their order does not matter.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias, assert_never

import torch
from torch import Tensor

from real.buffers.memory import TORCH_DTYPES, Memory
from real.kernels import lowrank, topk
from real.kernels.thresholds import uniform
from simdist.plan import Buffer, Plan, ops
from simdist.plan.group import MAX_WORLD_SIZE
from simdist.plan.lanes import Lane

_OnSparse: TypeAlias = ops.Select | ops.Merge | ops.Densify
Transform: TypeAlias = _OnSparse | ops.LowRank | ops.Pack | ops.Unpack | ops.Combine

_CPU = torch.device("cpu")


def transform(memory: Memory, op: Transform, *, step: int, rank: int) -> None:
    """Perform an operation on the buffers of a rank, or of all stacked ranks.

    Args:
        memory: The buffers of the operation.
        op: The operation.
        step: Together with the rank, the seed of selections that sample. So a resumed run continues alike.
        rank: Rank of the buffers; of stacked ranks, the first one.
    """
    match op:
        case ops.Select() | ops.Merge() | ops.Densify() | ops.LowRank() if memory.n_ranks is not None:
            for row in range(memory.n_ranks):
                transform(memory.row(row), op, step=step, rank=rank + row)
        case ops.Select() | ops.Merge() | ops.Densify():
            seed = step * MAX_WORLD_SIZE + rank
            drawn = uniform(torch.Generator().manual_seed(seed), _CPU).item() if isinstance(op, ops.Select) else 0.0
            if memory.graphs is None or not memory.graphs.replay(op, _tensors(memory, op), drawn):
                _on_sparse(memory, op, partial(torch.full, (), drawn, dtype=torch.float64, device=memory.device))
        case ops.LowRank():
            _low_rank(memory, op)
        case ops.Pack():
            _pack(map(memory.dense, op.srcs), memory.dense(op.dst))
        case ops.Unpack():
            _unpack(memory.dense(op.src), list(map(memory.dense, op.dsts)))
        case ops.Combine():
            _combine({name: memory.dense(name) for name in op.srcs}, op, memory.dense(op.dst))
        case _:
            assert_never(op)


def warm_up_transforms(plan: Plan, memory: Memory) -> None:
    """Perform each such operation of a plan once to compile or load kernels, and leave the buffers unchanged.

    On a GPU, those on sparse buffers are also recorded as graphs.

    Args:
        plan: The plan to perform.
        memory: Buffers of this rank, with all indices within their vectors.
    """
    for op in dict.fromkeys(op for body in plan.bodies for op in body if isinstance(op, Transform)):
        tensors = [tensor for name in ops.writes(op) for tensor in memory.tensors(name)]
        with memory.lent((*ops.reads(op), *ops.writes(op))):
            before = [tensor.clone() for tensor in tensors]
            transform(memory, op, step=0, rank=0)
            for tensor, contents in zip(tensors, before, strict=True):
                tensor.copy_(contents)
            if memory.graphs is not None and memory.n_ranks is None and isinstance(op, _OnSparse):
                memory.graphs.record(op, op.lane, _tensors(memory, op), partial(_enqueue, memory, op))


def selections(plan: Plan, memory: Memory) -> dict[str, str]:
    """Return, for each buffer that a selection fills, how its entries are found: a `Way`, and whether by a graph."""
    found = {}
    for op in dict.fromkeys(op for body in plan.bodies for op in body if isinstance(op, ops.Select)):
        if op.residual in memory:
            way = _selection(op, plan.buffer(op.residual), memory.device, memory.kernels_from).way
            is_recorded = memory.graphs is not None and op in memory.graphs
            found[op.dst] = f"{way}, recorded" if is_recorded else way
    return found


def selecting_nbytes(plan: Plan, device: torch.device, kernels_from: int) -> int:
    """Return the bytes that the selections of a rank need besides the buffers. Those of a lane share them."""
    needed: dict[Lane, int] = {}
    for op in dict.fromkeys(op for body in plan.bodies for op in body if isinstance(op, ops.Select)):
        nbytes = _selection(op, plan.buffer(op.residual), device, kernels_from).scratch_nbytes
        needed[op.lane] = max(needed.get(op.lane, 0), nbytes)
    return sum(needed.values())


def _selection(op: ops.Select, residual: Buffer, device: torch.device, kernels_from: int) -> topk.TopK:
    return topk.TopK(residual.count, op.k, op.method, TORCH_DTYPES[residual.dtype], device, kernels_from)


def _tensors(memory: Memory, op: _OnSparse) -> tuple[Tensor, ...]:
    """Return all tensors that an operation reads or writes."""
    names = dict.fromkeys((*ops.reads(op), *ops.writes(op)))
    return tuple(tensor for name in names for tensor in memory.tensors(name))


def _enqueue(memory: Memory, op: _OnSparse, drawn: Tensor) -> None:
    _on_sparse(memory, op, lambda: drawn)


def _on_sparse(memory: Memory, op: _OnSparse, draw: topk.DrawNumber) -> None:
    match op:
        case ops.Select():
            _select(memory, op, draw)
        case ops.Merge():
            _merge(memory, op)
        case ops.Densify():
            _densify(memory, op)


def copy(memory: Memory, op: ops.Copy, *, rank: int) -> None:
    """Copy a buffer, converted to the type of the other; from pinned memory without blocking the host.

    Of whole tensors, a sharded buffer takes the slice of this rank.
    """
    for src, dst in zip(memory.tensors(op.src), memory.tensors(op.dst), strict=True):
        taken = src if src.shape == dst.shape else memory.own_slice(op.dst, src, rank)
        dst.copy_(taken, non_blocking=True)


def _select(memory: Memory, op: ops.Select, draw: topk.DrawNumber) -> None:
    """Take the largest magnitudes of the gradient plus the residual; the rest stays in the residual.

    If values are converted to a type of fewer bits, the lost precision also stays in the residual.

    Source:
        Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018, algorithm 1.
    """
    residual = memory.dense(op.residual)
    taken = memory.sparse(op.dst)
    values, indices = topk.select_drawn(
        residual, op.k, op.method, draw, added=memory.dense(op.src), kernels_from=memory.kernels_from
    )
    taken.values.copy_(values)
    taken.indices.copy_(indices)
    residual.index_copy_(0, indices.long(), _lost(values, taken.values))


def _merge(memory: Memory, op: ops.Merge) -> None:
    """Keep the largest sums of values with equal indices; add the other sums, divided, to the residual.

    Sums have the residual's type. If kept sums are converted to fewer bits, the lost precision is dropped. If there are
    fewer distinct indices than room, the rest of the room holds zeros, which add nothing.

    Source:
        Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks,
        ICDCS 2019, arXiv 1901.04359.
    """
    given = memory.sparse(op.src)
    kept = memory.sparse(op.dst)
    residual = memory.dense(op.residual)
    sums, indices = _summed(given.values.to(residual.dtype), given.indices)
    values, places = topk.select_largest(sums, kept.values.numel(), "exact", kernels_from=memory.kernels_from)
    places = places.long()
    kept.values.copy_(values)
    kept.indices.copy_(indices[places])
    dropped = sums.index_copy(0, places, _lost(values, kept.values))
    residual.index_add_(0, indices, _divided(dropped, op.divisor))


def _combine(srcs: Mapping[str, Tensor], op: ops.Combine, dst: Tensor) -> None:
    """Add up in place, `dst` first if it is among the sources; in separate memory if its type differs."""
    weights = dict(sorted(zip(op.srcs, op.weights, strict=True), key=lambda each: each[0] != op.dst))
    (first, weight), *others = weights.items()
    total = torch.mul(srcs[first], weight, out=dst if dst.dtype == srcs[first].dtype else None)
    for name, weight in others:
        total.add_(srcs[name], alpha=weight)
    dst.copy_(total)


def _lost(values: Tensor, converted: Tensor) -> Tensor:
    """Return the loss of values by conversion; nothing without a conversion, even if they are infinite."""
    return torch.zeros_like(values) if converted.dtype == values.dtype else values - converted


def _densify(memory: Memory, op: ops.Densify) -> None:
    taken = memory.sparse(op.src)
    out = memory.dense(op.dst)
    values = _divided(taken.values, op.divisor)
    if taken.n_distinct > 1:
        _add_slices(values, taken.indices, out.zero_(), taken.n_distinct)
    elif values.is_cuda:
        topk.densify(*_summed(values, taken.indices), out)
    else:  # adds one after the other
        topk.densify(values, taken.indices, out)


def _divided(values: Tensor, divisor: int) -> Tensor:
    """Return quotients that are equal on all devices.

    By a number of the host, CUDA would multiply with its rounded reciprocal. By a number in its own memory, it divides.
    """
    if divisor == 1:
        return values
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)


def _add_slices(values: Tensor, indices: Tensor, out: Tensor, n_distinct: int) -> None:
    for some, where in zip(values.split(n_distinct), indices.split(n_distinct), strict=True):
        out.index_add_(0, where, some)


def _summed(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of values with equal indices, and these indices; both keep their length, with zeros at the end.

    Only the GPU knows the number of distinct indices, and the host does not wait for it.
    """
    ascending, order = torch.sort(indices, stable=True)
    begins = torch.ones_like(ascending, dtype=torch.bool)
    begins[1:] = ascending[1:] != ascending[:-1]
    number = begins.cumsum(0) - 1
    lengths = torch.zeros_like(number).index_add_(0, number, torch.ones_like(number))
    sums = torch.segment_reduce(values[order], "sum", lengths=lengths, unsafe=True, initial=0)
    return sums, torch.zeros_like(ascending).index_copy_(0, number, ascending)


def _low_rank(memory: Memory, op: ops.LowRank) -> None:
    """Perform a stage of PowerSGD, like `powerSGD_hook` of torch, which draws Q from the same random numbers."""
    grad = memory.dense(op.grad)
    residual = memory.dense(op.residual)
    sides = [memory.dense(op.left), memory.dense(op.right)]
    sizes = [[each.rows * each.rank, each.columns * each.rank] for each in op.matrices]
    factors = [side.split([size[number] for size in sizes]) for number, side in enumerate(sides)]
    generator = torch.Generator() if op.seed is None else torch.Generator().manual_seed(op.seed)
    for matrix, left, right in zip(op.matrices, *factors, strict=True):
        p = left.view(matrix.rows, matrix.rank)
        q = right.view(matrix.columns, matrix.rank)
        given, kept = (_as_matrix(flat, matrix) for flat in (grad, residual))
        match op.stage:
            case "left":
                kept.add_(given)
                if op.seed is not None:
                    q.copy_(torch.randn(1, *q.shape, dtype=q.dtype, generator=generator)[0])
                lowrank.orthonormalize(q)
                torch.mm(kept, q, out=p)
            case "right":
                lowrank.orthonormalize(p)
                torch.mm(kept.t(), p, out=q)
            case "product":
                torch.mm(p, q.t(), out=given)
                kept.sub_(given)
    for rest in map(memory.dense, op.others if op.stage != "right" else ()):
        others = list(_others(grad, op, rest.numel()))
        if op.stage == "left":
            _pack(others, rest)
        else:
            _unpack(rest, others)


def _as_matrix(flat: Tensor, matrix: ops.Matrix) -> Tensor:
    n_elements = matrix.rows * matrix.columns
    return flat[matrix.first : matrix.first + n_elements].view(matrix.rows, matrix.columns)


def _others(grad: Tensor, op: ops.LowRank, n_left: int) -> Iterator[Tensor]:
    """Yield `n_left` elements of a bucket between its matrices or after them, where padding may follow."""
    end = 0
    for matrix in sorted(op.matrices, key=lambda matrix: matrix.first):
        yield grad[end : matrix.first]
        n_left -= matrix.first - end
        end = matrix.first + matrix.rows * matrix.columns
    yield grad[end : end + n_left]


def _pack(parts: Iterable[Tensor], fused: Tensor) -> None:
    """Fill a fusion buffer; the rest of it is padding with zeros."""
    end = 0
    for part in parts:
        fused[..., end : (end := end + part.shape[-1])].copy_(part)
    fused[..., end:].zero_()


def _unpack(fused: Tensor, parts: Sequence[Tensor]) -> None:
    sizes = [part.shape[-1] for part in parts]
    for part, source in zip(parts, fused[..., : sum(sizes)].split(sizes, dim=-1), strict=True):
        part.copy_(source)
