"""Schedules that an imported scenario compares: what was traced, and what may be faster on these machines."""

import math

from simdist.profiles.estimates.tensors import Model
from simdist.profiles.job.layout import RankLayout
from simdist.schedules import HierarchicalSGD, LocalSGD, Schedule, Sync

_PERIODS = (2, 4, 8)


def candidates(model: Model, layout: RankLayout, n_steps: int, *, hierarchical: bool = True) -> tuple[Schedule, ...]:
    """Return synchronous SGD with the buckets that were seen, and local and hierarchical SGD by several periods.

    Hierarchical SGD averages over a node first; on several nodes also with gradients averaged within each node in every
    step, as PyTorch's hook does. What would never average over all ranks in so many steps is left out.

    Args:
        model: What is averaged.
        layout: Nodes and GPUs.
        n_steps: Of the scenario.
        hierarchical: Whether links are known well enough for hierarchical SGD.
    """
    sync = Sync() if model.has_default_buckets else _with_buckets(model)
    world_size = layout.nodes * layout.gpus_per_node
    if world_size == 1:
        return (sync,)
    found: list[Schedule] = [sync, *(LocalSGD(period=period) for period in _PERIODS if period <= n_steps)]
    of_groups = levels(layout) if hierarchical else {}
    if of_groups and max(of_groups) <= n_steps:
        label = "hsgd-" + ",".join(f"{period}-{size}" for period, size in of_groups.items())
        found.append(HierarchicalSGD(levels=of_groups, intra_node_gradients=False))
        if layout.nodes > 1 and layout.gpus_per_node > 1:
            found.append(HierarchicalSGD(levels=of_groups, label=f"{label}-node-gradients"))
    return tuple(found)


def levels(layout: RankLayout) -> dict[int, int]:
    """Return groups by period: a node first, then at most one size between, then the world; nothing where none fits.

    >>> levels(RankLayout(8, 8, "")), levels(RankLayout(1, 4, ""))
    ({2: 8, 4: 32, 8: 64}, {2: 2, 4: 4})
    """
    world_size = layout.nodes * layout.gpus_per_node
    divisors = [size for size in range(2, world_size) if world_size % size == 0]
    if not divisors:
        return {}
    node = layout.gpus_per_node
    first = node if node in divisors else min(divisors, key=lambda size: (abs(size - math.sqrt(world_size)), size))
    between = [size for size in divisors if size % first == 0 and size > first]
    sizes = [first, *between[-1:], world_size]
    return dict(zip(_PERIODS, sizes, strict=False))


def _with_buckets(model: Model) -> Sync:
    return Sync(first_bucket_nbytes=model.first_bucket_nbytes, bucket_nbytes=model.bucket_nbytes)
