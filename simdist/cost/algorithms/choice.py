"""Which algorithm a collective takes: the one that it names, or the one that the cluster's library would choose.

NCCL estimates latency + size / bandwidth for each of its algorithms when a communicator is made, and takes the fastest
for the size at hand. So does `auto` here for an all_reduce over several nodes, between ring and double tree, by their
costs on this cluster when nobody else uses it. Inside a node, and for the other collectives, it is the ring. NCCL's
estimates differ in their constants: those of its own hop latencies and protocols, 0.9 of the bandwidth for the tree and
less at middle sizes. So it changes from tree to ring at smaller sizes; there both take about the same time here.

gloo has one algorithm for each collective.

Source:
    NCCL, src/graph/tuning.cc, ncclTopoTuneModel and ncclTopoGetAlgoTime.
"""

from collections.abc import Iterator
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from simdist.cost.algorithms.call import Call
from simdist.cost.algorithms.direct import direct
from simdist.cost.algorithms.double_tree import double_tree
from simdist.cost.algorithms.gloo import gloo
from simdist.cost.algorithms.halving_doubling import halving_doubling
from simdist.cost.algorithms.hierarchical import hierarchical
from simdist.cost.algorithms.ring import ring
from simdist.cost.algorithms.server import server
from simdist.cost.algorithms.tree import tree
from simdist.cost.topology import Messages
from simdist.cost.transfers import Transfer
from simdist.plan import AllReduce
from simdist.scenario.cluster import Library

__all__ = ["collective_transfer"]


def collective_transfer(call: Call, library: Library, capacity_Bps: NDArray[np.float64]) -> Transfer:
    """Return what a group moves.

    Args:
        call: The collective of one group.
        library: What `auto` means.
        capacity_Bps: Of every resource of the topology.

    Raises:
        PlanError: The collective has no such algorithm.
    """
    if call.n == 1 and call.op.algorithm != "server":
        return Transfer(())
    candidates = [call.topology.transfer(messages) for messages in _candidates(call, library)]
    return min(candidates, key=lambda candidate: candidate.alone_s(capacity_Bps))


def _candidates(call: Call, library: Library) -> tuple[Iterator[Messages], ...]:
    """Return what there is to choose from; of equally fast ones it is the first."""
    match call.op.algorithm:
        case "auto":
            return _candidates_of(library, call)
        case "ring":
            return (ring(call),)
        case "tree":
            return (tree(call),)
        case "double_tree":
            return (double_tree(call),)
        case "halving_doubling":
            return (halving_doubling(call),)
        case "direct":
            return (direct(call),)
        case "hierarchical":
            return (hierarchical(call),)
        case "server":
            return (server(call),)
        case _:
            assert_never(call.op.algorithm)


def _candidates_of(library: Library, call: Call) -> tuple[Iterator[Messages], ...]:
    match library:
        case "nccl" if isinstance(call.op, AllReduce) and call.n_nodes > 1:
            return ring(call), double_tree(call)
        case "nccl":
            return (ring(call),)
        case "gloo":
            return (gloo(call),)
        case _:
            assert_never(library)
