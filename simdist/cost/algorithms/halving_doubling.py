"""Recursive halving and doubling: pairs at distance 1, 2, 4, ... exchange halves of their data.

With n members, a power of two, S bytes, and one kind of link (latency alpha, 1/beta bytes per second):

    all_reduce                   2 log2 n alpha + 2(n-1)/n S beta
    reduce_scatter, all_gather   log2 n alpha + (n-1)/n S beta

The nearest members exchange the largest halves, so most bytes stay inside a node.

Source:
    Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, IJHPCA 2005.
"""

from collections.abc import Iterator

import numpy as np

from simdist.cost.topology import Call, Messages
from simdist.plan import AllGather, AllReduce, ReduceScatter
from simdist.plan.algorithms import CollectiveAlgorithm


def _halving_doubling(call: Call) -> Iterator[Messages]:
    """Yield the messages of halving, of doubling, or of both."""
    match call.op:
        case AllReduce():
            yield from _exchanges(call)
            yield from reversed(list(_exchanges(call)))
        case ReduceScatter():
            yield from _exchanges(call)
        case AllGather():
            yield from reversed(list(_exchanges(call)))


ALGORITHM = CollectiveAlgorithm((AllReduce, ReduceScatter, AllGather), _halving_doubling, needs_power_of_two=True)


def _exchanges(call: Call) -> Iterator[Messages]:
    """Yield the exchanges of S/2 with the neighbour, of S/4 at distance 2, and so on."""
    places = np.arange(call.n)
    for level in range(call.n.bit_length() - 1):
        yield Messages(call.members, call.members[places ^ (1 << level)], call.nbytes / 2 ** (level + 1))
