"""The frame of collectives on two levels: slices of a bucket within each node, then each slice between nodes.

reduce_scatter(bucket -> shard)     within the node
...                                 on the shard, over the j-th GPUs of all nodes
all_gather(shard -> bucket)         within the node
"""

from simdist.plan import AllGather, Body, Buffer, Group, ReduceScatter
from simdist.plan.ops import Algorithm
from simdist.schedules.job import Job


def peers(job: Job) -> Group:
    """Return the groups of the j-th GPUs of all nodes."""
    return Group(job.world_size // job.ranks_per_node, stride=job.ranks_per_node)


def shard_of(bucket: Buffer, number: int, job: Job) -> Buffer:
    """Return the buffer of a GPU's slice of a bucket; with one GPU a node, that is the bucket itself."""
    if job.ranks_per_node == 1:
        return bucket
    return Buffer(f"shard.{number}", bucket.count // job.ranks_per_node, bucket.dtype)


def within_nodes(bucket: Buffer, shard: Buffer, between: Body, job: Job, *, algorithm: Algorithm) -> Body:
    """Return the operations `between` nodes, framed by those within each node."""
    if shard == bucket:
        return between
    node = Group(job.ranks_per_node)
    return (
        ReduceScatter(bucket.name, shard.name, node, algorithm=algorithm),
        *between,
        AllGather(shard.name, bucket.name, node, algorithm=algorithm),
    )
