"""Compression of gradients with error feedback, on the buffers of a plan."""

import torch

from real.kernels import topk
from real.memory import Memory
from simdist.groups import MAX_WORLD_SIZE
from simdist.plan import Densify, Select

__all__ = ["densify", "select"]


def select(memory: Memory, op: Select, *, step: int, rank: int) -> None:
    """Take the largest magnitudes of the gradient plus the residual; what is not taken stays in the residual.

    Args:
        memory: Has the buffers of the operation.
        op: Which buffers, how many values, by which method.
        step: With the rank, the seed of methods that sample, so that a resumed run goes on as an undisturbed one.
        rank: Whose gradient it is.

    Source:
        Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018, algorithm 1.
    """
    residual, taken = memory.dense(op.residual), memory.sparse(op.dst)
    residual.add_(memory.dense(op.src))
    generator = torch.Generator().manual_seed(step * MAX_WORLD_SIZE + rank)
    values, indices = topk.select(residual, op.k, op.method, generator=generator)
    taken.values.copy_(values)
    taken.indices.copy_(indices)
    residual.index_fill_(0, indices.long(), 0)


def densify(memory: Memory, op: Densify) -> None:
    """Scatter-add the values into the dense buffer, which starts from zero."""
    taken = memory.sparse(op.src)
    topk.densify(taken.values, taken.indices, memory.dense(op.dst))
