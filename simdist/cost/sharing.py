"""Which operations may ever share a resource, decided before anything runs.

A resource belongs to ranks: a fabric port and the threads that read to one; the NIC, the host bridge, the disk, the
memory and the cores of a node to those of the node; the switch, the NIC of a parameter server and the storage server to
all. It is *exclusive* if only one stream uses it and
every transfer over it has all its owners as members: the owners' streams run in order, so one transfer ends before the
next begins. An operation that uses exclusive resources only takes its time alone, whatever happens elsewhere. Both
engines rely on this, so that they agree to the last bit on such plans.
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from simdist.cost.topology import Topology
from simdist.cost.transfers import Shared
from simdist.plan import Op, Stream, stream_of

__all__ = ["contested_ops"]


def contested_ops(shared: Mapping[Op, Shared], topology: Topology) -> frozenset[Op]:
    """Return the operations that use a resource that is not exclusive."""
    n_resources = topology.n_resources
    used = {op: _used(cost, n_resources) for op, cost in shared.items()}
    by_stream: defaultdict[Stream, NDArray[np.bool_]] = defaultdict(lambda: np.zeros(n_resources, dtype=bool))
    contested = np.zeros(n_resources, dtype=bool)
    for op, cost in shared.items():
        by_stream[stream_of(op)] |= used[op]
        contested |= used[op] & ~_closed(cost, topology)
    contested |= sum(by_stream.values(), start=np.zeros(n_resources, dtype=np.int64)) > 1
    return frozenset(op for op in shared if (used[op] & contested).any())


def _used(cost: Shared, n_resources: int) -> NDArray[np.bool_]:
    used = np.zeros(n_resources, dtype=bool)
    for transfer in cost.transfers:
        for stage in transfer.stages:
            used[stage.resources] = True
    return used


def _closed(cost: Shared, topology: Topology) -> NDArray[np.bool_]:
    """Tell for every resource whether its owners are all in one group."""
    world_size, ranks_per_node = topology.world_size, topology.ranks_per_node
    group_of = np.empty(world_size, dtype=np.int64)
    n_blocks, size, stride = cost.group.shape(world_size)
    group_of.reshape(n_blocks, size, stride)[:] = np.arange(n_blocks * stride).reshape(n_blocks, 1, stride)
    by_node = group_of.reshape(-1, ranks_per_node)
    node_closed = (by_node == by_node[:, :1]).all(axis=1)
    world_closed = np.array([size == world_size])
    nic_closed = np.concatenate([node_closed, np.repeat(world_closed, topology.n_servers)])
    ports_closed = np.ones(2 * world_size, dtype=bool)
    links = [ports_closed, nic_closed, nic_closed, node_closed, node_closed, world_closed, world_closed, node_closed]
    return np.concatenate([*links, world_closed, *[node_closed] * 4, ports_closed])
