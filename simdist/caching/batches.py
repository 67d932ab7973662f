"""Batches: in which order ranks read the samples, and how they read those of one batch.

The order is that of torch's `DistributedSampler`, which deals samples rank by rank, with drop_last.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.plan.ops import LEVELS
from simdist.plan.plan import Dataset

MEMORY, PEER, DISK, STORAGE = range(len(LEVELS))
NOWHERE = -1

Evicted: TypeAlias = tuple[tuple[int, int], ...]

#: Random keys that are held at once, or as many as samples are read.
_N_KEYS = 2**20


@dataclass(frozen=True, slots=True)
class BatchReads:
    """How the ranks read the samples of one load, and what it changes.

    Kept and evicted samples are the net result of the load: a sample that a full cache takes in and lets go for
    another of the same load is neither kept nor evicted, and so is one that it lets go and takes in again.

    Args:
        number: Of the load, and so of the batch.
        epoch: That the batch belongs to.
        samples: Indices of the samples, `[world_size, batch_size]`.
        level: Where each is read, an index of `LEVELS`, uint8 of the same shape.
        owner: Which node's memory holds it, -1 if none does that the load may read; of the same shape.
        keeps_memory: Whether the node has kept it in memory when the load is over, bool of the same shape.
        keeps_disk: Whether it has kept the file on disk.
        evicted_memory: (node, sample) that leave memories to make room, in order.
        evicted_disk: (node, sample) that leave disks.
    """

    number: int
    epoch: int
    samples: NDArray[np.int64]
    level: NDArray[np.uint8]
    owner: NDArray[np.int64]
    keeps_memory: NDArray[np.bool_]
    keeps_disk: NDArray[np.bool_]
    evicted_memory: Evicted = ()
    evicted_disk: Evicted = ()


def epoch_order(dataset: Dataset, epoch: int, world_size: int, *, n_steps: int | None = None) -> NDArray[np.int64]:
    """Return which samples every rank reads in an epoch, `[n_steps, world_size, batch_size]`.

    Samples are dealt to the ranks in turn, one after the other, from the shuffled whole, or to the ranks of each node
    from its own part. A rest that does not fill a last step is left out, as with `drop_last`.

    Args:
        dataset: Says how it is shuffled.
        epoch: From 0.
        world_size: Ranks.
        n_steps: Of its first so many steps, 1 or more, which takes less memory than all; all if None.

    >>> epoch_order(Dataset(9, 2, 1, 10, (5,), shuffle="none"), 0, world_size=2).tolist()
    [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    """
    n_parts = world_size // dataset.ranks_per_node if dataset.shuffle == "node" else 1
    size = dataset.n_samples // n_parts
    n_steps = dataset.steps_per_epoch(world_size) if n_steps is None else n_steps
    shape = n_steps, dataset.batch_size, world_size // n_parts
    dealt: list[NDArray[np.int64]] = []
    for part in range(n_parts):
        if dataset.shuffle == "none":
            first = np.arange(math.prod(shape))
        else:
            first = part * size + _least(np.random.PCG64([dataset.seed, epoch, part]), size, math.prod(shape))
        dealt.append(first.reshape(shape).swapaxes(1, 2))
    return np.concatenate(dealt, axis=1)


def node_part(dataset: Dataset, node: int, n_nodes: int) -> NDArray[np.int64]:
    """Return the samples that a node may read: its own equal part when shuffled within nodes, else all."""
    if dataset.shuffle != "node":
        return np.arange(dataset.n_samples)
    size = dataset.n_samples // n_nodes
    return np.arange(node * size, (node + 1) * size)


def _least(keys: np.random.PCG64, n: int, n_least: int) -> NDArray[np.int64]:
    """Return the places of the least of `n` random keys, in the order of the keys: the first samples of a shuffle.

    numpy keeps the raw numbers of its generators stable, but not those of its `permutation`.
    """
    held, places = np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    most = np.uint64(2**64 - 1)
    n_at_once = max(_N_KEYS, n_least)  # more than are read, so that the time goes with n
    for first in range(0, n, n_at_once):
        drawn = keys.random_raw(min(n_at_once, n - first))
        may_be = np.flatnonzero(drawn <= most)
        held, places = np.concatenate([held, drawn[may_be]]), np.concatenate([places, first + may_be])
        if len(held) > n_least:
            most = np.partition(held, n_least - 1)[n_least - 1]
            held, places = held[held <= most], places[held <= most]
    return places[np.argsort(held, kind="stable")[:n_least]]
