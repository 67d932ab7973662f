"""Algorithms of gloo, as torch uses it: rings, and trees that post all sends at once.

With n members, S bytes, and one kind of link (latency alpha, 1/beta bytes per second):

    all_reduce       the ring
    reduce_scatter   an all_reduce; each member then keeps its slice: 2(n-1) alpha + 2(n-1)/n S beta
    all_gather       the ring
    reduce           reduce-scatter by the ring, then the root gathers: n alpha + 2(n-1)/n S beta
    broadcast        a binomial tree, d = ceil(log2 n) deep: d alpha + d(d+1)/2 S beta for n = 2^d

A member that has received a broadcast sends to all its children at once, over one NIC. Copies inside a node are far
faster than between nodes. They count with the stage that brought the data to the node. On 4 nodes, a broadcast to one
rank of each takes 3 S beta, and to two ranks of each 6 S beta.

In an all_reduce, a member cuts each of its n slices into segments of at most 1 MiB, at least two. It sends a segment to
the previous member while it receives one from the next. It posts another pair when the last pair but one is done. So a
member that comes early has already sent segments when the last one comes, and a member far from the last one ends
before its neighbours: see `segments`.

Source:
    gloo, gloo/allreduce.cc, allgather.cc, reduce.cc and broadcast.cc; torch, ProcessGroupGloo.cpp, for reduce_scatter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from simdist.cost.algorithms.ring import around
from simdist.cost.costs import Segments, Transfer
from simdist.cost.topology import Call, Messages, Paths, longest_chain_s
from simdist.plan import AllGather, AllReduce, Broadcast, Reduce, ReduceScatter

_SEGMENT_NBYTES = 1024 * 1024  # gloo/allreduce.h: kMaxSegmentSize


def gloo(call: Call) -> Iterator[Messages]:
    """Yield the messages that gloo sends."""
    match call.op:
        case AllReduce() | ReduceScatter():
            yield around(call, times=2)
        case AllGather():
            yield around(call, times=1)
        case Reduce(root=root):
            yield around(call, times=1)
            others = np.delete(call.members, root)
            yield Messages(others, np.full_like(others, call.members[root]), call.nbytes / call.n)
        case Broadcast(root=root):
            yield from _tree(call, root)
        case _:
            assert_never(call.op)


def host_s(call: Call) -> float:
    """Return the CPU seconds of a collective on its members' cores.

    An all_reduce scales each member's data and adds received data. A reduce_scatter all_reduces a copy of the data, and
    every member then copies its slice out of it. An all_gather receives into new memory, which the kernel finds and
    clears, and copies the data out of it. With two members each copies only its own half, see
    `real.collectives.worlds`. Servers are addressed one after the other. Each message to them is launched and waited
    for like a collective.
    """
    assert call.topology.host is not None
    gathered = (3.0 if call.n > 2 else 0.5) + (1 + 1 / call.n) * call.sparse
    passes = {AllReduce: 2.0, Reduce: 2.0, ReduceScatter: 3 + 1 / call.n, AllGather: gathered, Broadcast: 0.0}
    servers = call.op.servers if isinstance(call.op, AllReduce) else None
    n_rounds = 2 * len(servers.parts) if servers else 1
    return call.topology.host.seconds(call, passes[type(call.op)], n_rounds)


def two_at_a_time(call: Call, transfer: Transfer, capacity_Bps: NDArray[np.float64]) -> Transfer:
    """Return a ring's transfer with two segments of each slice in flight. Latency is exposed where no link is busy.

    A segment waits for the last but one to arrive. So the ring takes as long as the busiest link or the longest chain
    of segments that are passed on, whichever is longer.
    """
    ring, *others = transfer.stages
    if isinstance(call.op, Broadcast):
        return transfer
    rounds = (call.n - 1) * (2 if isinstance(call.op, AllReduce | ReduceScatter) else 1)
    hop_s = call.topology.hops_s(call.members, np.roll(call.members, -1), call.nbytes / call.n / 2)
    flow_s = replace(ring, latency_s=0.0).alone_s(capacity_Bps)
    waits_s = max(0.0, longest_chain_s(hop_s, rounds) - flow_s)
    return Transfer((replace(ring, latency_s=call.topology.overhead_s + waits_s), *others))


def segments(calls: Sequence[Call], alone_s: float | NDArray[np.float64]) -> Segments | None:
    """Return how members of rings begin and end on their own; None unless the collectives are all-reduces by a ring.

    Each segment takes its share of the ring's duration when all members come together. On faster links it takes less,
    in proportion to the time of their messages.

    Args:
        calls: The calls of all groups.
        alone_s: Durations of their rings.
    """
    first = calls[0]
    overhead_s = first.topology.overhead_s + (host_s(first) if first.topology.host and first.n > 1 else 0.0)
    if (
        first.n == 1
        or not isinstance(first.op, AllReduce | ReduceScatter)
        or first.op.algorithm not in ("auto", "ring")
    ):
        return None
    n_of_member = max(2, -(-first.nbytes // (_SEGMENT_NBYTES * first.n)))
    n_of_phase = n_of_member * (first.n - 1)
    hop_s = np.stack(
        [call.topology.hops_s(np.roll(call.members, -1), call.members, call.nbytes / call.n) for call in calls]
    )
    slowest_s = (np.broadcast_to(alone_s, len(calls)) - overhead_s) / (2 * n_of_phase)
    segment_s = slowest_s[:, np.newaxis] * hop_s / hop_s.max(axis=1, keepdims=True)
    return Segments(overhead_s, segment_s, (n_of_phase, n_of_phase))


def _tree(call: Call, root: int) -> Iterator[Messages]:
    """Yield the stages of a broadcast: member 2^i + j, for j < 2^i, receives from member j."""
    members = np.roll(call.members, -root)
    child = np.arange(1, call.n)
    parent = child - (1 << (np.frexp(child)[1] - 1))  # the child's number without its highest bit
    leaves_node = call.topology.node(members[child]) != call.topology.node(members[parent])
    slow = leaves_node if leaves_node.any() else ~leaves_node
    stage = np.zeros(call.n, dtype=np.int64)
    fast_hops = np.zeros(call.n, dtype=np.int64)
    for one, above, is_slow in zip(child.tolist(), parent.tolist(), slow.tolist(), strict=True):
        stage[one] = stage[above] + is_slow
        fast_hops[one] = 0 if is_slow else fast_hops[above] + 1
    begins = stage[parent]  # a message belongs to the first stage in which its node has the data
    for number in range(int(begins.max()) + 1):
        now = begins == number
        fabric_hops = fast_hops[child[now]]
        network_hops = slow[now].astype(np.int64)
        if not leaves_node.any():
            fabric_hops, network_hops = network_hops, fabric_hops
        src = members[parent[now]]
        dst = members[child[now]]
        far_hops = (call.topology.leaf(src) != call.topology.leaf(dst)).astype(np.int64)
        yield Messages(src, dst, call.nbytes, latency=Paths(fabric_hops, network_hops, far_hops))
