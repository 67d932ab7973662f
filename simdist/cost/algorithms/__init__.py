"""The algorithms of collectives, one family in each file; here, which one a collective takes.

It is the one that the collective names, or the one that the cluster's library would choose.

NCCL estimates latency + size / bandwidth for each of its algorithms when a communicator is made, and takes the fastest
for the size at hand. So does `auto` here for an all_reduce over several nodes, between ring and double tree, by their
costs on this cluster when it is idle. Inside a node, and for the other collectives, it is the ring. The double
tree costs what it costs in NCCL, by choice or by name; on a cluster with another library it is a perfect pipeline.

gloo has one algorithm for each collective. An algorithm is imported where it is taken: a plan needs one or two.

Source:
    NCCL, src/graph/tuning.cc, ncclTopoTuneModel and ncclTopoGetAlgoTime.
"""

from typing import TYPE_CHECKING, assert_never

import numpy as np
from numpy.typing import NDArray

from simdist.cost.costs import Transfer
from simdist.cost.topology import Call
from simdist.plan import AllReduce

if TYPE_CHECKING:
    from simdist.cost.algorithms.nccl import NcclLibrary
    from simdist.scenario.cluster import Library


def collective_transfer(call: Call, library: "Library", capacity_Bps: NDArray[np.float64]) -> Transfer:
    """Return what a group moves.

    Args:
        call: The collective of one group.
        library: Library that decides the meaning of `auto`, and whose double tree it is.
        capacity_Bps: Of every resource of the topology.

    Raises:
        PlanError: The collective has no such algorithm.
    """
    if call.n == 1 and call.op.algorithm != "server":
        return Transfer(())
    move = call.topology.transfer
    match call.op.algorithm:
        case "auto":
            return _chosen_by(library, call, capacity_Bps)
        case "ring":
            from simdist.cost.algorithms import ring

            return move(ring.ring(call))
        case "tree":
            from simdist.cost.algorithms import tree

            return move(tree.tree(call))
        case "double_tree":
            from simdist.cost.algorithms import double_tree
            from simdist.cost.algorithms.nccl import nccl_tree

            return move(double_tree.double_tree(call)) if library == "gloo" else nccl_tree(call, library, capacity_Bps)
        case "halving_doubling":
            from simdist.cost.algorithms import halving_doubling

            return move(halving_doubling.halving_doubling(call))
        case "direct":
            from simdist.cost.algorithms import direct

            return move(direct.direct(call))
        case "hierarchical":
            from simdist.cost.algorithms import hierarchical

            return move(hierarchical.hierarchical(call))
        case "server":
            from simdist.cost.algorithms import server

            return move(server.server(call))
        case _:
            assert_never(call.op.algorithm)


def _chosen_by(library: "Library", call: Call, capacity_Bps: NDArray[np.float64]) -> Transfer:
    match library:
        case "nccl" | "nccl_simple":
            return _chosen_by_nccl(library, call, capacity_Bps)
        case "gloo":
            from simdist.cost.algorithms import gloo

            return call.topology.transfer(gloo.gloo(call))
        case _:
            assert_never(library)


def _chosen_by_nccl(library: "NcclLibrary", call: Call, capacity_Bps: NDArray[np.float64]) -> Transfer:
    """Return the faster of ring and double tree; of equally fast ones the ring."""
    from simdist.cost.algorithms import ring
    from simdist.cost.algorithms.nccl import nccl_tree

    by_ring = call.topology.transfer(ring.ring(call))
    if call.n_nodes == 1 or not isinstance(call.op, AllReduce):
        return by_ring
    by_tree = nccl_tree(call, library, capacity_Bps)
    return by_tree if by_tree.alone_s(capacity_Bps) < by_ring.alone_s(capacity_Bps) else by_ring
