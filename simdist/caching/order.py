"""The order in which ranks read the samples: as torch's `DistributedSampler` deals them, rank by rank, drop_last."""

import math

import numpy as np
from numpy.typing import NDArray

from simdist.plan.plan import Dataset

_N_KEYS = 2**20
"""Random keys that are held at once, or as many as samples are read."""


def epoch_order(dataset: Dataset, epoch: int, world_size: int, *, n_steps: int | None = None) -> NDArray[np.int64]:
    """Return which samples every rank reads in an epoch, `[n_steps, world_size, batch_size]`.

    Samples are dealt to the ranks in turn, one after the other, from the shuffled whole, or to the ranks of each node
    from its own part. What does not fill a last step is left out, as with `drop_last`.

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
