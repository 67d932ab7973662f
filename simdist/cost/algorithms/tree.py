"""Binomial trees without pipelining: in each round, every member with the data sends it to one more.

With n members, S bytes, and one kind of link (latency alpha, 1/beta bytes per second):

    all_reduce          2 ceil(log2 n) (alpha + S beta)
    broadcast, reduce   ceil(log2 n) (alpha + S beta)

The nearest members meet first on the way to the root, so most bytes stay inside a node.

Source:
    Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, IJHPCA 2005.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from simdist.cost.topology import Call, Messages
from simdist.plan import AllReduce, Broadcast, Reduce
from simdist.plan.algorithms import CollectiveAlgorithm


def tree(call: Call) -> Iterator[Messages]:
    """Yield the messages of a binomial tree, which moves whole buffers."""
    match call.op:
        case AllReduce():
            yield from _binomial(call.members, call.nbytes, towards_root=True)
            yield from _binomial(call.members, call.nbytes, towards_root=False)
        case Reduce(root=root):
            yield from _binomial(np.roll(call.members, -root), call.nbytes, towards_root=True)
        case Broadcast(root=root):
            yield from _binomial(np.roll(call.members, -root), call.nbytes, towards_root=False)


ALGORITHM = CollectiveAlgorithm((AllReduce, Reduce, Broadcast), tree)


def _binomial(members: NDArray[np.int64], nbytes: int, *, towards_root: bool) -> Iterator[Messages]:
    n = len(members)
    distances = [1 << level for level in range(math.ceil(math.log2(n)))]
    for distance in distances if towards_root else reversed(distances):
        near = np.arange(0, n - distance, 2 * distance)
        far = near + distance
        src, dst = (far, near) if towards_root else (near, far)
        yield Messages(members[src], members[dst], float(nbytes))
