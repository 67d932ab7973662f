"""Caches from which the least recently used leaves: looked up read by read."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.caching.batches import DISK, MEMORY, NOWHERE, PEER, STORAGE, BatchReads
from simdist.plan import LEVELS, Dataset, Load

_Held: TypeAlias = tuple[int, int]
Evicted: TypeAlias = list[_Held]


class EvictingCaches:
    """The disks and memories of all nodes; a full one lets go of what was used least recently.

    Args:
        dataset: The data set that is read.
        world_size: Ranks.
    """

    def __init__(self, dataset: Dataset, world_size: int) -> None:
        self._dataset = dataset
        self._n_nodes = world_size // dataset.ranks_per_node
        self._disks = [_Lru(dataset.disk_nbytes) for _ in range(self._n_nodes)]
        self.clear_memory()

    def clear_memory(self) -> None:
        """Forget what the memories hold, as between two runs."""
        self._owner: dict[int, int] = {}
        self._memories = [_Lru(self._dataset.memory_nbytes) for _ in range(self._n_nodes)]

    def on_disk(self, node: int) -> NDArray[np.int64]:
        """Return the samples whose files a node's disk holds."""
        return np.array(sorted(self._disks[node].held), dtype=np.int64)

    def put_on_disk(self, node: int, samples: NDArray[np.int64]) -> None:
        """Put files on a disk that has room for them."""
        for sample in samples.tolist():
            self._disks[node].keep(sample, self._file_nbytes(sample))

    def read(self, op: Load, epoch: int, number: int, samples: NDArray[np.int64]) -> Iterator[BatchReads]:
        """Look up the samples `[n_loads, world_size, batch_size]` of loads that follow one another in an epoch."""
        for at, batch in enumerate(samples):
            yield self._read_batch(op, epoch, number + at, batch)

    def _read_batch(self, op: Load, epoch: int, number: int, samples: NDArray[np.int64]) -> BatchReads:
        order = [LEVELS.index(name) for name in op.read]
        sees_memory, to_memory, to_disk = {MEMORY, PEER} & {*order}, "memory" in op.keep, "disk" in op.keep
        rows: list[tuple[int, int, bool, bool]] = []
        evicted_memory: Evicted = []
        evicted_disk: Evicted = []
        for rank, batch in enumerate(samples.tolist()):
            node = rank // self._dataset.ranks_per_node
            for sample in batch:
                owner = self._owner.get(sample, NOWHERE)
                level = self._use(order, node, sample, owner)
                in_memory = to_memory and level >= DISK and owner == NOWHERE
                in_memory = in_memory and self._keep_in_memory(node, sample, evicted_memory)
                on_disk = to_disk and level == STORAGE and self._keep_on_disk(node, sample, evicted_disk)
                rows.append((level, owner if sees_memory else NOWHERE, in_memory, on_disk))
        columns = np.array(rows, dtype=np.int64).reshape(*samples.shape, 4)
        level, owner, keeps_memory, keeps_disk = np.moveaxis(columns, -1, 0)
        kept = keeps_memory.astype(bool), keeps_disk.astype(bool)
        evicted = self._settle(samples, kept[0], evicted_memory), self._settle(samples, kept[1], evicted_disk)
        return BatchReads(number, epoch, samples, level.astype(np.uint8), owner, *kept, *evicted)

    def _settle(self, samples: NDArray[np.int64], keeps: NDArray[np.bool_], evicted: Evicted) -> tuple[_Held, ...]:
        """Take out of `keeps` and of what was evicted what cancels: a sample that came and went, or went and came."""
        if not evicted:
            return ()
        ranks, places = np.nonzero(keeps)
        nodes = ranks // self._dataset.ranks_per_node
        at = list(zip(ranks.tolist(), places.tolist(), strict=True))
        kept = dict(zip(zip(nodes.tolist(), samples[ranks, places].tolist(), strict=True), at, strict=True))
        left = []
        for each in evicted:
            if (place := kept.pop(each, None)) is None:
                left.append(each)  # of one that went, came and went, this is the second time
            else:
                keeps[place] = False
        return tuple(left)

    def _use(self, order: list[int], node: int, sample: int, owner: int) -> int:
        """Return the level where a sample is found, whose last use is now."""
        for level in order:
            if (level == MEMORY and owner == node) or (level == PEER and owner not in (node, NOWHERE)):
                self._memories[owner].held.move_to_end(sample)
                return level
            if level == DISK and sample in self._disks[node].held:
                self._disks[node].held.move_to_end(sample)
                return level
        return STORAGE

    def _keep_in_memory(self, node: int, sample: int, evicted: Evicted) -> bool:
        gone = self._memories[node].keep(sample, self._dataset.sample_nbytes)
        if gone is None:
            return False
        for oldest in gone:
            del self._owner[oldest]
            evicted.append((node, oldest))
        self._owner[sample] = node
        return True

    def _keep_on_disk(self, node: int, sample: int, evicted: Evicted) -> bool:
        if sample in self._disks[node].held:
            return False
        gone = self._disks[node].keep(sample, self._file_nbytes(sample))
        if gone is None:
            return False
        evicted.extend((node, oldest) for oldest in gone)
        return True

    def _file_nbytes(self, sample: int) -> int:
        sizes = self._dataset.file_nbytes
        return sizes[sample] if len(sizes) > 1 else sizes[0]


class _Lru:
    """Contents of one disk or memory, least recently used first: sample -> bytes."""

    __slots__ = ("_capacity_nbytes", "_nbytes", "held")

    def __init__(self, capacity_nbytes: int | None) -> None:
        self.held: OrderedDict[int, int] = OrderedDict()
        self._capacity_nbytes = np.inf if capacity_nbytes is None else capacity_nbytes
        self._nbytes = 0

    def keep(self, sample: int, nbytes: int) -> list[int] | None:
        """Take a sample in and return what had to leave; None if it is larger than all there is."""
        if nbytes > self._capacity_nbytes:
            return None
        gone = []
        while self._nbytes + nbytes > self._capacity_nbytes:
            oldest, oldest_nbytes = self.held.popitem(last=False)
            self._nbytes -= oldest_nbytes
            gone.append(oldest)
        self.held[sample] = nbytes
        self._nbytes += nbytes
        return gone
