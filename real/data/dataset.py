"""A data set for a training loop of one's own, without a plan: memory, then the disk, then storage."""

import copy
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from real.data.samples import SampleStore
from real.data.sources import Sources


class CachedDataset(Dataset[tuple[Tensor, int]]):
    """Keeps what it has read: files on the node's disk, decoded samples in its memory, as far as they fit.

    Workers of a `DataLoader` share both with each other, and with other ranks of the node that open a store of the same
    name.

        store = MemoryStore("imagenet", Geometry(len(index), n_slots=200_000, sample_nbytes=3 * 224 * 224))
        sources = Sources(index, storage, decode_image, (3, 224, 224), files)
        loader = DataLoader(CachedDataset(sources, store), batch_size=64, shuffle=True, num_workers=4)

    Args:
        sources: Of files; `sources.files` is the disk.
        store: The memory; None for none.
    """

    def __init__(self, sources: Sources, store: SampleStore | None = None) -> None:
        self.sources, self.store, self._pid = sources, store, os.getpid()

    def __len__(self) -> int:
        return len(self.sources.index.names)

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        """Return a decoded sample, uint8 of the sources' shape, and its label."""
        out = np.empty(self.sources.shape, np.uint8)
        if self.store is None or not self.store.get(sample, out):
            sources = self._own_sources()
            data, _ = sources.read(sample, keep=True)
            sources.decode_into(sample, data, out)
            if self.store is not None:
                self.store.put(sample, out)
        return torch.from_numpy(out), int(self.sources.index.labels[sample])

    def __getitems__(self, samples: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Return several; a `DataLoader` asks for a batch at a time."""
        return [self[sample] for sample in samples]

    def _own_sources(self) -> Sources:
        """Open again, in a forked worker, what belongs to its parent: connections, and locks that a thread may hold."""
        if os.getpid() != self._pid:
            storage, files = copy.copy(self.sources.storage), copy.copy(self.sources.files)
            self.sources, self._pid = replace(self.sources, storage=storage, files=files), os.getpid()
        return self.sources
