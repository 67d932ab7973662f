"""Which operations may ever share a resource, decided before anything runs.

A resource belongs to ranks: a fabric port and the threads that read to one; the NIC, the host bridge, the disk, the
memory and the cores of a node to those of the node; the switch, the NIC of a parameter server and the storage server to
all. It is *exclusive* if only one stream uses it and every transfer over it has all its owners as members: the owners'
streams run in order, so one transfer ends before the next begins. An operation that uses exclusive resources only takes
its time alone, whatever happens elsewhere. Both engines rely on this, so that they agree to the last bit on such plans.
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from simdist.cost.topology import Topology
from simdist.cost.transfers import Shared
from simdist.plan import Op, Stream, stream_of

_SEVERAL = -1


def contested_ops(shared: Mapping[Op, Shared], topology: Topology) -> frozenset[Op]:
    """Return the operations that use a resource that is not exclusive."""
    n_resources = topology.n_resources
    used = {op: np.zeros(n_resources, dtype=bool) for op in shared}
    by_stream: defaultdict[Stream, NDArray[np.bool_]] = defaultdict(lambda: np.zeros(n_resources, dtype=bool))
    contested = np.zeros(n_resources, dtype=bool)
    for op, cost in shared.items():
        owner = _owner(cost, topology)
        for group, transfer in enumerate(cost.transfers):
            for stage in transfer.stages:
                used[op][stage.resources] = True
                contested[stage.resources[owner[stage.resources] != group]] = True
        by_stream[stream_of(op)] |= used[op]
    contested |= sum(by_stream.values(), start=np.zeros(n_resources, dtype=np.int64)) > 1
    return frozenset(op for op in shared if (used[op] & contested).any())


def _owner(cost: Shared, topology: Topology) -> NDArray[np.int64]:
    """Return the group that all owners of a resource are in, for every resource."""
    world_size, ranks_per_node = topology.world_size, topology.ranks_per_node
    n_blocks, size, stride = cost.group.shape(world_size)
    of_rank = np.empty(world_size, dtype=np.int64)
    of_rank.reshape(n_blocks, size, stride)[:] = np.arange(n_blocks * stride).reshape(n_blocks, 1, stride)
    by_node = of_rank.reshape(-1, ranks_per_node)
    of_node = np.where((by_node == by_node[:, :1]).all(axis=1), by_node[:, 0], _SEVERAL)
    of_world = np.array([0 if size == world_size else _SEVERAL])
    of_machine = np.concatenate([of_node, np.repeat(of_world, topology.n_servers)])
    links = [of_rank, of_rank, of_machine, of_machine, of_node, of_node, of_world, of_world, of_node]
    return np.concatenate([*links, of_world, *[of_node] * 4, of_rank, of_rank])
