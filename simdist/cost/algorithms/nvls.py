"""Reduction in the switches of a fabric (NVLink SHARP): NCCL's NVLS and, over several nodes, its NVLSTree.

The switches add up what all GPUs of a node send, and hand the sum to all of them. With n members per node and S bytes,
every GPU sends and receives S (1 + 1/n) bytes. Over several nodes, the j-th part of the buffer is reduced between the
j-th GPUs along two trees, as in `double_tree`, so that at most 2 S bytes pass the NICs of a node:

    all_reduce    2 ceil(log2 m) alpha_n + max(S (1 + 1/n) beta_f, 2 S beta_n)

Rounds, chunks and NCCL's efficiency are those of `simdist.cost.algorithms.nccl`.

Source:
    Klenk et al., An In-Network Architecture for Accelerating Shared-Memory Multiprocessor Collectives, ISCA 2020;
    nccl-tests#212 for S (1 + 1/n).
"""

import math
from collections.abc import Iterator

import numpy as np

from simdist.cost.algorithms.double_tree import both_trees, far_depths
from simdist.cost.topology import Call, Messages, Paths
from simdist.plan import AllReduce
from simdist.plan.algorithms import CollectiveAlgorithm


def nvls(call: Call, wire: float | None = None) -> Iterator[Messages]:
    """Yield the messages, in the limit of a perfect pipeline.

    Args:
        call: The all-reduce of one group.
        wire: Bytes on the port of a GPU, over S; 1 + 1/n if None.
    """
    sizes = np.array([len(node) for node in call.by_node()])
    m = len(sizes)
    factor = 1 + 1 / int(sizes.min()) if wire is None else wire
    ends = np.cumsum(sizes)
    heads = ends - sizes  # places among the members
    following = np.arange(1, call.n + 1)
    following[ends - 1] = heads
    trees = both_trees(m)
    below = call.members[heads[trees.below]]
    above = call.members[heads[trees.above]]
    far_hops = 2 * int(far_depths(call.topology.leaf(call.members[heads])).max())
    yield Messages(
        np.concatenate([call.members, below, above]),
        np.concatenate([call.members[following], above, below]),
        np.concatenate([np.full(call.n, call.nbytes * factor), np.full(2 * len(below), call.nbytes / 2)]),
        latency=Paths(np.array([0]), np.array([2 * math.ceil(math.log2(m))]), np.array([far_hops])),
    )


ALGORITHM = CollectiveAlgorithm((AllReduce,), nvls)
