"""How the ranks read the samples of one batch."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.plan.dataset import LEVELS

__all__ = ["DISK", "MEMORY", "NOWHERE", "PEER", "STORAGE", "BatchReads"]

MEMORY, PEER, DISK, STORAGE = range(len(LEVELS))
NOWHERE = -1

Evicted: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class BatchReads:
    """How the ranks read the samples of one load.

    Args:
        number: Of the load, and so of the batch.
        epoch: That the batch belongs to.
        samples: Indices of the samples, `[world_size, batch_size]`.
        level: Where each is read, an index of `LEVELS`, uint8 of the same shape.
        owner: Which node's memory holds it, -1 if none does that the load may read; of the same shape.
        keeps_memory: Whether the node then keeps it in memory, bool of the same shape.
        keeps_disk: Whether it keeps the file on disk.
        evicted_memory: (node, sample) that leave memories to make room, in order. What the same batch has brought may
            be among them.
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
