"""What a collective computes if all members of a group hold what this rank holds.

So it is for a rank that is alone in its group, and for one whose peers are simulated. Nothing is sent.
"""

from typing import assert_never

from real.buffers.memory import Memory
from simdist.plan import ops


def combine_equal(op: ops.Collective, memory: Memory, rank: int) -> None:
    """Perform a collective among members with equal buffers.

    Means and broadcasts leave a buffer as it is. A sum is as many times it. An all-gather repeats the rank's slice.
    """
    size = op.group.size
    match op:
        case ops.AllReduce():
            if op.reduction == "sum" and size > 1:
                memory.dense(op.buffer).mul_(size)
        case ops.Reduce():
            if op.reduction == "sum" and size > 1 and op.group.member(rank) == op.root:
                memory.dense(op.buffer).mul_(size)
        case ops.Broadcast():
            pass
        case ops.ReduceScatter():
            dst = memory.dense(op.dst)
            dst.copy_(memory.dense(op.src).view(size, -1)[op.group.member(rank)])
            if op.reduction == "sum" and size > 1:
                dst.mul_(size)
        case ops.AllGather():
            for src, dst in zip(memory.tensors(op.src), memory.tensors(op.dst), strict=True):
                dst.view(size, -1).copy_(src)
        case _:
            assert_never(op)
