"""How the ranks read the samples of one batch."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.plan.ops import LEVELS

MEMORY, PEER, DISK, STORAGE = range(len(LEVELS))
NOWHERE = -1

Evicted: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class BatchReads:
    """How the ranks read the samples of one load, and what it changes.

    What is kept and what leaves is the net result of the load: a sample that a full cache takes in and lets go for
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
