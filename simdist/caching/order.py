"""The order in which ranks read the samples: as torch's `DistributedSampler` deals them, rank by rank, drop_last."""

import math

import numpy as np
from numpy.typing import NDArray

from simdist.plan.dataset import Dataset

__all__ = ["epoch_order", "node_part"]


def epoch_order(dataset: Dataset, epoch: int, world_size: int) -> NDArray[np.int64]:
    """Return which samples every rank reads in an epoch, `[steps_per_epoch, world_size, batch_size]`.

    Samples are dealt to the ranks in turn, one after the other, from the shuffled whole, or to the ranks of each node
    from its own part. What does not fill a last step is left out, as with `drop_last`.

    >>> epoch_order(Dataset(9, 2, 1, 10, (5,), shuffle="none"), 0, world_size=2).tolist()
    [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    """
    n_steps = dataset.steps_per_epoch(world_size)
    if dataset.shuffle == "node":
        n_nodes, n_ranks = world_size // dataset.ranks_per_node, dataset.ranks_per_node
        parts = [_shuffled(node_part(dataset, node, n_nodes), dataset, epoch, node) for node in range(n_nodes)]
    else:
        everything, n_ranks = np.arange(dataset.n_samples), world_size
        parts = [everything if dataset.shuffle == "none" else _shuffled(everything, dataset, epoch)]
    shape = n_steps, dataset.batch_size, n_ranks
    dealt = [part[: math.prod(shape)].reshape(shape).swapaxes(1, 2) for part in parts]
    return np.concatenate(dealt, axis=1)


def node_part(dataset: Dataset, node: int, n_nodes: int) -> NDArray[np.int64]:
    """Return the samples that a node may read: its own equal part when shuffled within nodes, else all."""
    if dataset.shuffle != "node":
        return np.arange(dataset.n_samples)
    size = dataset.n_samples // n_nodes
    return np.arange(node * size, (node + 1) * size)


def _shuffled(samples: NDArray[np.int64], dataset: Dataset, epoch: int, node: int = 0) -> NDArray[np.int64]:
    """Sort by random keys: numpy keeps the raw numbers of its generators stable, but not those of its `permutation`."""
    keys = np.random.PCG64([dataset.seed, epoch, node]).random_raw(len(samples))
    return samples[np.argsort(keys, kind="stable")]
