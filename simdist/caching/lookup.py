"""On which level every load finds its samples, and what the caches keep and let go.

Reads count in logical order: step by step, and within a step rank by rank, place by place of the batch. A level is
asked as the load says; `memory` and `peer` ask one set that all nodes share, in which every sample is on one node at
most: the one that read it first. Samples read from disk or storage are kept where the load says, in the memory of the
node that read it if no node has it yet.

Full levels: with `eviction: none` a level keeps what it has, and of what comes next what still fits. An epoch reads
nothing twice, so of a whole shuffled epoch as much hits as the level holds. With `lru` the least recently used leaves.
That fits scans badly: with the share c of the data set kept, a shuffled epoch hits

    c + (1 - c) ln(1 - c)

of the time only: a sample with a share u of an epoch before it, and a share w of the next epoch after it, has not been
used while the share 1 - u w of all samples was; it is still there if that is at most c.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.caching.batches import BatchReads, epoch_order, node_part
from simdist.caching.evicting import EvictingCaches
from simdist.caching.keeping import KeepingCaches, that_fit
from simdist.plan import Dataset, Level, Load, Plan, StageIn

Caches: TypeAlias = KeepingCaches | EvictingCaches


def look_up(plan: Plan) -> Iterator[BatchReads]:
    """Yield how every load of a plan reads, in order.

    Args:
        plan: A legal plan with a data set.
    """
    dataset = plan.dataset
    assert dataset is not None
    yield from _look_up(plan, dataset, _caches_at_first(plan, dataset))


def on_disk_at_first(plan: Plan, node: int) -> NDArray[np.int64]:
    """Return the samples whose files a node's disk holds when the first load begins, in order."""
    dataset = plan.dataset
    assert dataset is not None
    return _caches_at_first(plan, dataset).on_disk(node)


def _caches_at_first(plan: Plan, dataset: Dataset) -> Caches:
    """Return the caches as the first load finds them: with what was staged in, and what an earlier run has left."""
    caches = _caches(plan, dataset)
    if _stages_in(plan):
        n_nodes = plan.world_size // dataset.ranks_per_node
        for node in range(n_nodes):
            caches.put_on_disk(node, staged_samples(dataset, node, n_nodes))
    if dataset.warm:
        for _ in _look_up(plan, dataset, caches):
            pass
        caches.clear_memory()
    return caches


def _caches(plan: Plan, dataset: Dataset) -> Caches:
    if dataset.eviction == "lru":
        return EvictingCaches(dataset, plan.world_size)
    keep: set[Level] = {level for body in plan.bodies for op in body if isinstance(op, Load) for level in op.keep}
    if _stages_in(plan):
        keep.add("disk")
    return KeepingCaches(dataset, plan.world_size, keep)


def _stages_in(plan: Plan) -> bool:
    return any(isinstance(op, StageIn) for body in plan.bodies for op in body)


def staged_samples(dataset: Dataset, node: int, n_nodes: int) -> NDArray[np.int64]:
    """Return the samples whose files are staged in to a node's disk: those that it may read, as far as they fit."""
    samples = node_part(dataset, node, n_nodes)
    if dataset.disk_nbytes is None:
        return samples
    return samples[that_fit(dataset.files_nbytes()[samples], dataset.disk_nbytes)]


def _look_up(plan: Plan, dataset: Dataset, caches: Caches) -> Iterator[BatchReads]:
    per_epoch = dataset.steps_per_epoch(plan.world_size)
    n_loads = sum(1 for _ in plan.loads())
    for epoch, numbered in groupby(enumerate(plan.loads()), key=lambda each: each[0] // per_epoch):
        n_steps = min(per_epoch, n_loads - epoch * per_epoch)
        order = epoch_order(dataset, epoch, plan.world_size, n_steps=n_steps)
        for _, alike in groupby(numbered, key=lambda each: (each[1].read, each[1].keep)):
            numbers, ops = zip(*alike, strict=True)
            first = numbers[0] - epoch * per_epoch
            yield from caches.read(ops[0], epoch, numbers[0], order[first : first + len(numbers)])
