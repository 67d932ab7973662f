"""The data set of a plan, and the levels of storage that its loads read from.

A sample is a file on a storage server that all nodes share, its *raw* form; decoded it is a tensor of `sample_nbytes`.
From the fastest level to the slowest:

    memory    the decoded samples in the memory of the own node
    peer      those in the memory of another node, over the network
    disk      the raw files that the own node keeps on a local disk
    storage   the raw files on the server

A `Load` says which levels it may read, in order of preference, and where its node keeps what it had to read; which
sample it finds where follows from the plan alone (`simdist.caching`), so that all who interpret it read alike.

Source:
    Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters, MLSys 2021,
    arXiv 2010.10458, section 3.2 (DataCache).
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

MAX_SAMPLES = 2**31  # each epoch draws a random number for every one
MAX_FILE_NBYTES = 2**40
MAX_NBYTES = 2**62  # of all files; sums are int64

Level: TypeAlias = Literal["memory", "peer", "disk", "storage"]
LEVELS: tuple[Level, ...] = get_args(Level)

Shuffle: TypeAlias = Literal["global", "node", "none"]
Eviction: TypeAlias = Literal["none", "lru"]


@dataclass(frozen=True, slots=True)
class Dataset:
    """What is read, in which order, and what the caches of a node hold.

    Args:
        n_samples: Samples; an epoch reads each at most once. What does not fill a batch of all ranks is left out.
        batch_size: Samples of one rank and step.
        ranks_per_node: Ranks of one node; they are consecutive and share its disk and memory.
        sample_nbytes: Bytes of a decoded sample.
        file_nbytes: Bytes of the file of every sample, or one number for all.
        shuffle: `global`: each epoch deals all samples to all ranks anew; `node`: each node has its own part of the
            samples, which each epoch deals to its ranks anew; `none`: in order, the same in every epoch.
        seed: Of the shuffling.
        disk_nbytes: What a node's disk keeps; None without limit.
        memory_nbytes: What a node's memory keeps; None without limit.
        eviction: What happens when a level is full. `none`: it keeps what it has; `lru`: what was used least recently
            leaves it.
        warm: The disks hold what an earlier run of this plan has left.
        readers: Files that a rank reads at the same time.
        decoders: Samples that a rank decodes at the same time.
    """

    n_samples: int
    batch_size: int
    ranks_per_node: int
    sample_nbytes: int
    file_nbytes: tuple[int, ...]
    shuffle: Shuffle = "global"
    seed: int = 0
    disk_nbytes: int | None = None
    memory_nbytes: int | None = None
    eviction: Eviction = "none"
    warm: bool = False
    readers: int = 8
    decoders: int = 1

    def steps_per_epoch(self, world_size: int) -> int:
        """Return how many batches of all ranks there are in an epoch.

        >>> Dataset(100, 4, 2, 10, (5,)).steps_per_epoch(world_size=8)
        3
        """
        return self.n_samples // (self.batch_size * world_size)

    def files_nbytes(self) -> NDArray[np.int64]:
        """Return the bytes of the file of every sample, `[n_samples]`."""
        return np.broadcast_to(np.array(self.file_nbytes, dtype=np.int64), self.n_samples)
