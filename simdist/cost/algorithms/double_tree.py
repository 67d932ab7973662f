"""Two complementary binary trees over the nodes, each for half of the buffer, and a chain inside each node.

Half of the buffer is reduced up a binary tree and broadcast down again. The other half uses another tree, in which
inner nodes and leaves have changed places. So a node is an inner node of at most one tree, except for one node if their
number is odd. An inner node receives S/2 from each of two children and S/2 from its parent. As a leaf of the other tree
it receives S/2 more. So at most 2S bytes pass a NIC in each direction. All pieces flow at once, in the limit of perfect
pipelining. With m nodes of n members each, S bytes, latencies alpha_f in a node and alpha_n between nodes, and
capacities 1/beta_f and 1/beta_n:

    2 (n-1) alpha_f + 2 ceil(log2 m) alpha_n + max(2S beta_n, 2S beta_f)    for m > 3 and n > 2

A ring takes about 2m alpha_n and 2S beta_n (1 - 1/(mn)). With two nodes, each is the other's only child: S bytes pass
each NIC. Real pipelines have chunks and fall short of the limit. `simdist.cost.algorithms.nccl` states by how much
NCCL's pipelines do.

Source:
    Sanders, Speck, Traeff, Two-tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan, Parallel Computing
    2009; Jeaugey, Massively Scale Your Deep Learning Training with NCCL 2.4, NVIDIA developer blog, 2019-02-04; for the
    latency also NCCL, src/graph/tuning.cc.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simdist.cost.topology import Call, Messages, Paths
from simdist.plan import AllReduce
from simdist.plan.algorithms import CollectiveAlgorithm


def double_tree(call: Call) -> Iterator[Messages]:
    """Yield the messages of both trees, which run at the same time.

    Args:
        call: The all-reduce of one group.
    """
    sizes = np.array([len(chain) for chain in call.by_node()])
    heads = np.cumsum(sizes) - sizes  # places among the members
    (others,) = np.nonzero(np.isin(np.arange(call.n), heads, invert=True))
    trees = both_trees(len(sizes))
    below = np.concatenate([others, others, heads[trees.below]])  # chains in both trees
    above = np.concatenate([others - 1, others - 1, heads[trees.above]])
    low = call.members[below]
    high = call.members[above]
    leaves = call.topology.leaf(call.members[heads])
    yield Messages(
        np.concatenate([low, high]),
        np.concatenate([high, low]),
        call.nbytes / 2,
        latency=Paths(2 * (sizes - 1), 2 * trees.depths, 2 * far_depths(leaves)),
    )


ALGORITHM = CollectiveAlgorithm((AllReduce,), double_tree)


def far_depths(leaves: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the hops between leaf switches on the way from each node to the root, in the tree that has more.

    Args:
        leaves: Leaf switch of each node, `[n]`.
    """
    if (leaves == leaves[0]).all():
        return np.zeros_like(leaves)
    return np.maximum(*(_depths(parent, leaves != leaves[parent]) for parent in parents(len(leaves))))


@dataclass(frozen=True, slots=True)
class Trees:
    """Both trees over n nodes.

    Args:
        below: The nodes that have a parent in the first tree, then those of the second.
        above: The parent of each.
        depths: Hops from each node to the root, in the deeper tree, `[n]`.
    """

    below: NDArray[np.int64]
    above: NDArray[np.int64]
    depths: NDArray[np.int64]


@lru_cache(maxsize=64)
def both_trees(n: int) -> Trees:
    """Return both trees over n nodes."""
    both = parents(n)
    below = [np.flatnonzero(parent >= 0) for parent in both]
    above = [parent[each] for parent, each in zip(both, below, strict=True)]
    depths = np.maximum(*(_depths(parent) for parent in both))
    return Trees(np.concatenate(below), np.concatenate(above), depths)


def parents(n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the parent of every node in each tree; -1 for its root.

    The first tree covers 1 to n-1 in order, below 0: a node with a number that ends in z zero bits is z levels above
    the leaves. The second tree is the first one mirrored if n is even, and shifted by one if n is odd. So even numbers,
    which are inner nodes, become odd numbers, which are leaves.

    >>> parents(4)
    (array([-1,  2,  0,  2]), array([ 1,  3,  1, -1]))
    """
    first = _in_order(n)
    label = np.arange(n)[::-1] if n % 2 == 0 else (np.arange(n) + 1) % n
    second = np.empty_like(first)
    second[label] = np.where(first >= 0, label[first], -1)
    return first, second


def _in_order(n: int) -> NDArray[np.int64]:
    node = np.arange(n)
    lowest_bit = node & -node
    without = node - lowest_bit
    parent = without | (2 * lowest_bit)  # of the two neighbours a level higher, the one that is not its ancestor
    parent = np.where(parent < n, parent, without)
    parent[0] = -1
    return parent


def _depths(parent: NDArray[np.int64], counts: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """Return the number of hops from every node to the root; with `counts`, only of those from a node that counts."""
    depths = np.zeros_like(parent)
    at = np.arange(len(parent))
    while (parent[at] >= 0).any():
        has_parent = parent[at] >= 0
        depths += has_parent if counts is None else has_parent & counts[at]
        at = np.where(has_parent, parent[at], at)
    return depths
