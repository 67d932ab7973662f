"""Caches that keep what they have: all loads of an epoch that are alike are looked up at once."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from simdist.caching.batches import DISK, NOWHERE, STORAGE, BatchReads
from simdist.plan import LEVELS, Dataset, Level, Load

ScalarT = TypeVar("ScalarT", bound=np.generic)


class KeepingCaches:
    """The disks and memories of all nodes, each of which keeps what it has and, of what comes, what still fits.

    Args:
        dataset: The data set that is read.
        world_size: Ranks.
        keep: Levels that are to keep anything; of the others nothing is noted for each sample.
    """

    def __init__(self, dataset: Dataset, world_size: int, keep: AbstractSet[Level]) -> None:
        n_nodes = world_size // dataset.ranks_per_node
        self._dataset, self._keep = dataset, keep
        self._file_nbytes = dataset.files_nbytes()
        self._on_disk = _noted(np.False_, (n_nodes, dataset.n_samples), for_each="disk" in keep)
        self._disk_room_nbytes = _room_nbytes(dataset.disk_nbytes, n_nodes)
        self.clear_memory()

    def clear_memory(self) -> None:
        """Forget what the memories hold, as between two runs."""
        self._owner = _noted(np.int64(NOWHERE), (self._dataset.n_samples,), for_each="memory" in self._keep)
        self._memory_room_nbytes = _room_nbytes(self._dataset.memory_nbytes, len(self._on_disk))

    def on_disk(self, node: int) -> NDArray[np.int64]:
        """Return the samples whose files a node's disk holds."""
        return np.flatnonzero(self._on_disk[node])

    def put_on_disk(self, node: int, samples: NDArray[np.int64]) -> None:
        """Put files on a disk that has room for them."""
        self._on_disk[node, samples] = True
        self._disk_room_nbytes[node] -= self._file_nbytes[samples].sum()

    def read(self, op: Load, epoch: int, number: int, samples: NDArray[np.int64]) -> Iterator[BatchReads]:
        """Look up the samples `[n_loads, world_size, batch_size]` of loads that follow one another in an epoch."""
        ranks = np.arange(samples.shape[1]) // self._dataset.ranks_per_node
        node = np.broadcast_to(ranks[:, None], samples.shape)
        held_by, on_disk = self._owner[samples], self._on_disk[node, samples]
        found = {"memory": held_by == node, "peer": (held_by != node) & (held_by != NOWHERE), "disk": on_disk}
        level = np.full(samples.shape, STORAGE, dtype=np.uint8)
        for name in reversed(op.read[:-1]):  # the last is storage
            level[found[name]] = LEVELS.index(name)
        owner = held_by if {"memory", "peer"} & {*op.read} else np.full_like(held_by, NOWHERE)
        keeps_memory, keeps_disk = (np.zeros(samples.shape, dtype=bool) for _ in range(2))
        if "memory" in op.keep:
            wanted = (level >= DISK) & (held_by == NOWHERE)
            sizes = np.broadcast_to(np.int64(self._dataset.sample_nbytes), samples.shape)
            keeps_memory = _kept(wanted, sizes, self._memory_room_nbytes)
            self._owner[samples[keeps_memory]] = node[keeps_memory]
        if "disk" in op.keep:
            wanted = (level == STORAGE) & ~on_disk
            keeps_disk = _kept(wanted, self._file_nbytes[samples], self._disk_room_nbytes)
            self._on_disk[node[keeps_disk], samples[keeps_disk]] = True
        for at, row in enumerate(zip(samples, level, owner, keeps_memory, keeps_disk, strict=True)):
            yield BatchReads(number + at, epoch, *row)


def _noted(value: ScalarT, shape: tuple[int, ...], *, for_each: bool) -> NDArray[ScalarT]:
    """Return an array of equal values that takes memory only if they are to change."""
    return np.full(shape, value) if for_each else np.broadcast_to(value, shape)


def _room_nbytes(capacity_nbytes: int | None, n_nodes: int) -> NDArray[np.float64]:
    return np.full(n_nodes, np.inf if capacity_nbytes is None else float(capacity_nbytes))


def _kept(wanted: NDArray[np.bool_], sizes: NDArray[np.int64], room_nbytes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which of the wanted `[n_loads, world_size, batch_size]` their nodes keep, and take them off the room."""
    kept = np.zeros(wanted.shape, dtype=bool)
    by_node = len(wanted), len(room_nbytes), -1
    sizes_by_node, wanted_by_node, kept_by_node = sizes.reshape(by_node), wanted.reshape(by_node), kept.reshape(by_node)
    for node in range(len(room_nbytes)):
        loads, places = np.nonzero(wanted_by_node[:, node])
        nbytes = sizes_by_node[loads, node, places]
        fits = that_fit(nbytes, room_nbytes[node])
        kept_by_node[loads[fits], node, places[fits]] = True
        room_nbytes[node] -= nbytes[fits].sum()
    return kept


def that_fit(sizes: NDArray[np.int64], room_nbytes: float) -> NDArray[np.bool_]:
    """Return which of a sequence of sizes are kept if each is, in turn, that still fits.

    >>> that_fit(np.array([3, 4, 2, 1, 9]), 6.0).tolist()
    [True, False, True, True, False]
    """
    fits = np.zeros(len(sizes), dtype=bool)
    left = np.flatnonzero(sizes <= room_nbytes)
    while len(left):
        totals = np.cumsum(sizes[left])
        n = int(np.searchsorted(totals, room_nbytes, side="right"))
        fits[left[:n]] = True
        room_nbytes -= totals[n - 1]
        left = left[n:]
        left = left[sizes[left] <= room_nbytes]
    return fits
