"""Parameter servers: every member pushes its part to each server and pulls the reduced parts.

There are two stages, a push and a pull. With n members on machines of their own, s servers beside them with S/s bytes
each, and one kind of link (latency alpha, 1/beta bytes per second):

    2 (alpha + max(n/s, 1) S beta)

A `Reduce` or `Broadcast` of a server's queue is the push or the pull of one buffer: alpha + n S beta. If the server is
a member, n - 1 replaces n. Concurrent servers share the members' NICs.

In the push, n members converge on the NIC of every server. In the pull, that NIC sends to n members. Members of a node
share its NIC. A server that is a member sends nothing to itself, and reaches the members of its node by the fabric.

With `drop`, the members of the call are the ranks in time. Servers may be among the late ranks. Before a member pushes,
it asks the first server whether it is in: two more stages, without bytes.

Source:
    Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014; Sergeev & Del Balso, Horovod,
    arXiv 1802.05799, for one server and many.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from simdist.cost.topology import Call, Messages
from simdist.errors import PlanError
from simdist.plan import AllReduce, Broadcast, Reduce, Server, Servers, op_text
from simdist.plan.algorithms import CollectiveAlgorithm


def server(call: Call) -> Iterator[Messages]:
    """Yield the push and the pull of an all-reduce, or the one of them that another operation stands for.

    Raises:
        PlanError: The collective does not state the contents of its servers.
    """
    if isinstance(call.op, Reduce | Broadcast) and call.op.server:
        yield from _one_way(call, call.op, call.op.server)
        return
    if not isinstance(call.op, AllReduce) or call.op.servers is None:
        raise PlanError(f"{op_text(call.op)}: server is an algorithm of an all_reduce with `servers`; use ring")
    servers = call.op.servers
    at = np.array(servers.members) if call.op.drop else _places(call, servers)
    parts_nbytes = np.array(servers.parts) * (call.nbytes / sum(servers.parts))
    member, part = (each.ravel() for each in np.meshgrid(call.members, np.arange(len(at)), indexing="ij"))
    moves = member != at[part]
    member = member[moves]
    holder = at[part[moves]]
    nbytes = parts_nbytes[part[moves]]
    if call.op.drop:
        first = np.full_like(call.members, at[0])
        yield Messages(call.members, first, 0.0)
        yield Messages(first, call.members, 0.0)
    if moves.any():
        yield Messages(member, holder, nbytes)
        yield Messages(holder, member, nbytes)


ALGORITHM = CollectiveAlgorithm((AllReduce, Reduce, Broadcast), server)


def _one_way(call: Call, op: Reduce | Broadcast, at: Server) -> Iterator[Messages]:
    root = call.topology.server(np.array(at.number)) if at.apart else call.members[op.root]
    members = call.members[call.members != root]
    if members.size:
        src = members
        dst = np.full_like(members, root)
        yield Messages(*((src, dst) if isinstance(op, Reduce) else (dst, src)), call.nbytes)


def _places(call: Call, servers: Servers) -> NDArray[np.int64]:
    """Return the rank of every server."""
    if servers.members:
        return call.members.take(servers.members)
    first = call.number * len(servers.parts)
    return call.topology.server(np.arange(first, first + len(servers.parts)))
