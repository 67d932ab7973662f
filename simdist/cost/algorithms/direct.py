"""Direct exchange: each member sends to all others at once, or all members send to the root.

With n members, S bytes, and one kind of link (latency alpha, 1/beta bytes per second):

    all_reduce                   2 alpha + 2(n-1)/n S beta
    reduce_scatter, all_gather   alpha + (n-1)/n S beta
    reduce, broadcast            alpha + (n-1) S beta: incast at the root, or outcast from it

Data is not passed on. So if a node has k members, each of them sends to all n-k members elsewhere over one NIC:
k(n-k)/n S bytes per NIC. A ring sends (n-1)/n S.

Source:
    Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, IJHPCA 2005: pairwise
    exchange, here without rounds.
"""

from collections.abc import Iterator
from typing import assert_never

import numpy as np

from simdist.cost.topology import Call, Messages
from simdist.errors import PlanError
from simdist.plan import AllGather, AllReduce, Broadcast, Reduce, ReduceScatter, op_text
from simdist.plan.algorithms import CollectiveAlgorithm

_MOST_MEMBERS = 4096  # 16 million messages


def _direct(call: Call) -> Iterator[Messages]:
    """Yield the messages of a direct exchange.

    Raises:
        PlanError: There are too many members.
    """
    match call.op:
        case AllReduce():
            yield from (_everybody(call),) * 2
        case ReduceScatter() | AllGather():
            yield _everybody(call)
        case Broadcast(root=root):
            others = np.delete(call.members, root)
            yield Messages(np.full_like(others, call.members[root]), others, call.nbytes)
        case Reduce(root=root):
            others = np.delete(call.members, root)
            yield Messages(others, np.full_like(others, call.members[root]), call.nbytes)
        case _:
            assert_never(call.op)


ALGORITHM = CollectiveAlgorithm((AllReduce, ReduceScatter, AllGather, Reduce, Broadcast), _direct)


def _everybody(call: Call) -> Messages:
    """Return the messages of a slice from each member to each other."""
    if call.n > _MOST_MEMBERS:
        raise PlanError(
            f"{op_text(call.op)}: a direct exchange of {call.n} members is {call.n * (call.n - 1)} messages; at most "
            f"{_MOST_MEMBERS} members are supported; use ring"
        )
    src, dst = np.nonzero(~np.eye(call.n, dtype=bool))
    return Messages(call.members[src], call.members[dst], call.nbytes / call.n)
