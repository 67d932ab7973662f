"""Data policies: which levels of storage the loads of each epoch read, and what the nodes keep.

    naive       every epoch reads from storage
    files       what was read from storage is kept on the node's disk, and read there the next time
    memory      what was read from storage is kept, decoded, in the node's memory; from the second epoch on all nodes
                read from one another's memories
    datacache   both: the first epoch reads from disk what an earlier run has left there, and else from storage
    staged      before the first step every node copies to its disk what it is going to read

A sample that is not where it should be, because a level was full, is read from the next one.

Source:
    Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters, MLSys 2021,
    arXiv 2010.10458, section 3.2: `datacache`.
"""

from typing import Literal, TypeAlias, assert_never, get_args

from simdist.plan import Level

Policy: TypeAlias = Literal["naive", "files", "memory", "datacache", "staged"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


def levels(policy: Policy, epoch: int) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """Return which levels the loads of an epoch read, the preferred one first, and where they keep what they read."""
    match policy:
        case "naive":
            return ("storage",), ()
        case "files":
            return ("disk", "storage"), ("disk",)
        case "memory":
            return (("memory", "peer", "storage") if epoch else ("storage",)), ("memory",)
        case "datacache":
            read: tuple[Level, ...] = ("memory", "peer", "disk", "storage") if epoch else ("disk", "storage")
            return read, ("disk", "memory")
        case "staged":
            return ("disk", "storage"), ()
        case _:
            assert_never(policy)


def uses_disk(policy: Policy) -> bool:
    """Tell whether a policy needs local disks."""
    return policy in ("files", "datacache", "staged")


def uses_memory(policy: Policy) -> bool:
    """Tell whether a policy keeps samples in memory."""
    return policy in ("memory", "datacache")
