"""Rings through the members, in the order of their ranks.

With n members, S bytes, and one kind of link (latency alpha, 1/beta bytes per second):

    all_reduce                   2(n-1) alpha + 2(n-1)/n S beta
    reduce_scatter, all_gather   (n-1) alpha + (n-1)/n S beta
    broadcast, reduce            (n-1) alpha + S beta, a pipeline along the chain

A ring over whole nodes crosses each NIC once in each direction. Its latency is that of the longest chain of dependent
sends. Hops inside a node add the latency of the fabric, hops between nodes that of the network.

Source:
    Patarasuk & Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 2009.
"""

from collections.abc import Iterator
from typing import assert_never

import numpy as np

from simdist.cost.topology import Call, Messages
from simdist.plan import AllGather, AllReduce, Broadcast, Reduce, ReduceScatter
from simdist.plan.algorithms import CollectiveAlgorithm


def ring(call: Call) -> Iterator[Messages]:
    """Yield the messages of a ring."""
    match call.op:
        case AllReduce():
            yield around(call, times=2)
        case ReduceScatter() | AllGather():
            yield around(call, times=1)
        case Broadcast(root=root):  # every hop carries the whole buffer
            chain = np.roll(call.members, -root)
            yield Messages(chain[:-1], chain[1:], call.nbytes, latency="line")
        case Reduce(root=root):
            chain = np.roll(call.members, -root - 1)
            yield Messages(chain[:-1], chain[1:], call.nbytes, latency="line")
        case _:
            assert_never(call.op)


ALGORITHM = CollectiveAlgorithm((AllReduce, ReduceScatter, AllGather, Reduce, Broadcast), ring)


def around(call: Call, *, times: int) -> Messages:
    """Return the messages that pass every slice through all members: once to reduce or gather, twice for both."""
    rounds = times * (call.n - 1)
    return Messages(call.members, np.roll(call.members, -1), call.nbytes / call.n, rounds=rounds, latency="ring")
