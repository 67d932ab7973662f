"""The messages of an all-reduce over two binary trees, each of which carries one half of the vector.

Who passes data on in one tree is a leaf in the other, so together they keep every port busy in both directions. In each
tree chunks travel up to the root and down again in a pipeline.

Source:
    Sanders, Speck, Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel Computing 35,
    2009. The shape of the trees is NCCL's (src/graph/trees.cc): in the first, the parent of a number is the number with
    its lowest bit moved up by one; the second is the first one mirrored, or shifted by one where the members are odd.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from expansion.round import Round

Ints = NDArray[np.int64]


def parents(n: int) -> tuple[Ints, Ints]:
    """Return the parent of every member in both trees; -1 for the root.

    >>> [tree.tolist() for tree in parents(4)]
    [[-1, 2, 0, 2], [1, 3, 1, -1]]
    """
    first = np.array([_parent(member, n) for member in range(n)])
    members = np.arange(n)
    names = n - 1 - members if n % 2 == 0 else (members + 1) % n  # of member i of the first tree in the second
    second = np.empty_like(first)
    second[names] = np.where(first < 0, -1, names[first])
    return first, second


def _parent(member: int, n: int) -> int:
    if member == 0:
        return -1
    bit = member & -member
    up = (member ^ bit) | (bit << 1)
    return up if up < n else member ^ bit


def double_tree(n: int, n_chunks: int) -> Iterator[Round]:
    """Yield the messages; each half of the vector is cut into `n_chunks`.

    In turn t, who is at depth d of a tree of height h sends up chunk t - (h - d), and gets down chunk t - h - (d - 1).
    """
    trees = parents(n)
    depths = [_depths(tree) for tree in trees]
    height = max(int(depth.max()) for depth in depths)
    for turn in range(n_chunks + 2 * height - 1):
        for number, (tree, depth) in enumerate(zip(trees, depths, strict=True)):
            child = np.flatnonzero(tree >= 0)
            for adds, chunk in ((True, turn - height + depth[child]), (False, turn - height - depth[child] + 1)):
                moves = (chunk >= 0) & (chunk < n_chunks)
                below, above = child[moves], tree[child[moves]]
                src, dst = (below, above) if adds else (above, below)
                yield Round(src, dst, number * n_chunks + chunk[moves], 1, 0.5 / n_chunks, adds)


def _depths(tree: Ints) -> Ints:
    depth = np.zeros_like(tree)
    above = tree.copy()
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, tree[above], -1)
    return depth
