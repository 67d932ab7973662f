"""All-reduce by levels: reduce-scatter inside each node, rings between the nodes, all-gather inside each node.

With m nodes of n members each, S bytes, latency alpha_f and 1/beta_f bytes per second in a node, alpha_n and 1/beta_n
of the NIC:

    2(n-1) alpha_f + 2(n-1)/n S beta_f + 2(m-1) alpha_n + 2(m-1)/m S beta_n

The j-th members of all nodes form a ring that reduces the j-th slice; the n rings share the NIC of each node. This is
the 2-D torus, called hierarchical all-reduce in Horovod.

Source:
    Mikami et al., Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash, arXiv 1811.05233; Horovod,
    nccl_operations.cc, NCCLHierarchicalAllreduce.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from simdist.cost.topology import Call, Messages
from simdist.errors import PlanError
from simdist.plan import AllReduce, op_text
from simdist.plan.algorithms import CollectiveAlgorithm


def _hierarchical(call: Call) -> Iterator[Messages]:
    """Yield the messages of the three steps; empty ones, of a single node or member, are omitted.

    Raises:
        PlanError: Nodes have unequal numbers of members.
    """
    grid = _grid(call)
    m, n = grid.shape
    inside = Messages(grid.ravel(), np.roll(grid, -1, axis=1).ravel(), call.nbytes / n, rounds=n - 1)
    if n > 1:
        yield inside
    if m > 1:
        yield Messages(grid.ravel(), np.roll(grid, -1, axis=0).ravel(), call.nbytes / (n * m), rounds=2 * (m - 1))
    if n > 1:
        yield inside


ALGORITHM = CollectiveAlgorithm((AllReduce,), _hierarchical)


def _grid(call: Call) -> NDArray[np.int64]:
    """Return the members, a row for each node."""
    rows = call.by_node()
    sizes = sorted({len(row) for row in rows})
    if len(sizes) > 1:
        raise PlanError(
            f"{op_text(call.op)}: hierarchical needs equally many members on each node; the group of rank "
            f"{call.members[0]} has from {sizes[0]} to {sizes[-1]}; use ring"
        )
    return np.stack(rows)
