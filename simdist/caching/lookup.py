"""On which level every load finds its samples, and what the caches keep and let go.

Reads count in logical order: step by step, and within a step rank by rank, place by place of the batch. A level is
asked as the load says; `memory` and `peer` ask one set that all nodes share, in which every sample is on one node at
most: the one that read it first. What was read from disk or storage is kept where the load says, in the memory of the
node that read it if no node has it yet.

Full levels: with `eviction: none` a level keeps what it has, and of what comes next what still fits. An epoch reads
nothing twice, so of a whole shuffled epoch as much hits as the level holds. With `lru` the least recently used leaves.
That fits scans badly: with the share c of the data set kept, a shuffled epoch hits

    c + (1 - c) ln(1 - c)

of the time only: a sample with a share u of an epoch before it, and a share w of the next epoch after it, has not been
used while the share 1 - u w of all samples was; it is still there if that is at most c.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.caching.order import epoch_order, node_part
from simdist.plan import LEVELS, Dataset, Load, Plan, StageIn

__all__ = ["BatchReads", "look_up", "staged_samples"]

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
        evicted_memory: (node, sample) that leave memories to make room.
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


def look_up(plan: Plan) -> Iterator[BatchReads]:
    """Yield how every load of a plan reads, in order.

    Args:
        plan: A legal plan with a data set, all of whose loads name levels.
    """
    dataset = plan.dataset
    assert dataset is not None
    disks = _Disks(dataset, plan.world_size)
    if any(isinstance(op, StageIn) for body in plan.bodies for op in body):
        for node in range(disks.n_nodes):
            disks.fill(node, staged_samples(dataset, node, disks.n_nodes))
    if dataset.warm:
        for _ in _look_up(plan, dataset, disks):
            pass
    yield from _look_up(plan, dataset, disks)


def staged_samples(dataset: Dataset, node: int, n_nodes: int) -> NDArray[np.int64]:
    """Return the samples whose files are staged in to a node's disk: those that it may read, as far as they fit."""
    samples = node_part(dataset, node, n_nodes)
    if dataset.disk_nbytes is None:
        return samples
    return samples[np.cumsum(_file_nbytes(dataset)[samples]) <= dataset.disk_nbytes]


def _file_nbytes(dataset: Dataset) -> NDArray[np.int64]:
    return np.broadcast_to(np.array(dataset.file_nbytes, dtype=np.int64), dataset.n_samples)


def _look_up(plan: Plan, dataset: Dataset, disks: "_Disks") -> Iterator[BatchReads]:
    memories = _Memories(dataset, plan.world_size)
    caches = _Evicting(memories, disks) if dataset.eviction == "lru" else _Keeping(memories, disks)
    per_epoch = dataset.steps_per_epoch(plan.world_size)
    numbered = enumerate(plan.loads())
    for epoch, loads in groupby(numbered, key=lambda each: each[0] // per_epoch):
        order = epoch_order(dataset, epoch, plan.world_size)
        for op, alike in groupby(loads, key=lambda each: each[1]):
            numbers = [number for number, _ in alike]
            first = numbers[0] - epoch * per_epoch
            yield from caches.read(op, epoch, numbers[0], order[first : first + len(numbers)])


class _Disks:
    """The files on the disk of every node."""

    def __init__(self, dataset: Dataset, world_size: int) -> None:
        self.n_nodes = world_size // dataset.ranks_per_node
        self.nbytes = _file_nbytes(dataset)
        self.has = np.zeros((self.n_nodes, dataset.n_samples), dtype=bool)
        self.room_nbytes = np.inf if dataset.disk_nbytes is None else float(dataset.disk_nbytes)
        self.left_nbytes = np.full(self.n_nodes, self.room_nbytes)
        self.used: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(self.n_nodes)]

    def fill(self, node: int, samples: NDArray[np.int64]) -> None:
        """Put files on a disk that has room for them."""
        self.has[node, samples] = True
        self.left_nbytes[node] -= self.nbytes[samples].sum()
        self.used[node].update(dict.fromkeys(samples.tolist()))


class _Memories:
    """The decoded samples in the memory of every node."""

    def __init__(self, dataset: Dataset, world_size: int) -> None:
        self.ranks_per_node = dataset.ranks_per_node
        n_nodes = world_size // dataset.ranks_per_node
        self.owner = np.full(dataset.n_samples, NOWHERE, dtype=np.int64)
        room = dataset.n_samples if dataset.memory_nbytes is None else dataset.memory_nbytes // dataset.sample_nbytes
        self.left = np.full(n_nodes, min(room, dataset.n_samples), dtype=np.int64)
        self.used: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(n_nodes)]


class _Keeping:
    """Caches that keep what they have. All loads of an epoch that are alike are looked up at once."""

    def __init__(self, memories: _Memories, disks: _Disks) -> None:
        self._memories, self._disks = memories, disks

    def read(self, op: Load, epoch: int, number: int, samples: NDArray[np.int64]) -> Iterator[BatchReads]:
        """Look up the samples `[n_loads, world_size, batch_size]` of loads that follow one another in an epoch."""
        memories, disks = self._memories, self._disks
        node = (np.arange(samples.shape[1]) // memories.ranks_per_node)[None, :, None]
        level = np.full(samples.shape, STORAGE, dtype=np.uint8)
        owner = memories.owner[samples] if {"memory", "peer"} & set(op.read) else np.full(samples.shape, NOWHERE)
        on_disk = disks.has[node, samples]
        found = {"memory": owner == node, "peer": (owner != node) & (owner != NOWHERE), "disk": on_disk}
        for name in reversed(op.read):
            if name != "storage":
                level[found[name]] = LEVELS.index(name)
        keeps_memory = np.zeros(samples.shape, dtype=bool)
        keeps_disk = np.zeros(samples.shape, dtype=bool)
        if "memory" in op.keep:
            wanted = (level >= DISK) & (memories.owner[samples] == NOWHERE)
            keeps_memory = self._kept(wanted, np.ones_like(samples), memories.left)
            memories.owner[samples[keeps_memory]] = np.broadcast_to(node, samples.shape)[keeps_memory]
        if "disk" in op.keep:
            keeps_disk = self._kept((level == STORAGE) & ~on_disk, disks.nbytes[samples], disks.left_nbytes)
            disks.has[np.broadcast_to(node, samples.shape)[keeps_disk], samples[keeps_disk]] = True
        rows = zip(samples, level, owner, keeps_memory, keeps_disk, strict=True)
        for at, row in enumerate(rows):
            yield BatchReads(number + at, epoch, *row)

    def _kept(
        self, wanted: NDArray[np.bool_], sizes: NDArray[np.int64], left: NDArray[np.float64] | NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return which of the wanted still fit on their node, and take them off what is left there."""
        by_node = (wanted.shape[0], len(left), -1)
        sizes = np.moveaxis((sizes * wanted).reshape(by_node), 1, 0).reshape(len(left), -1)
        fits = np.cumsum(sizes, axis=1) <= left[:, None]
        left -= (sizes * fits).sum(axis=1).astype(left.dtype)
        per_load = fits.reshape(len(left), wanted.shape[0], -1).swapaxes(0, 1).reshape(wanted.shape)
        return np.asarray(per_load & wanted)


class _Evicting:
    """Caches from which the least recently used leaves, read by read."""

    def __init__(self, memories: _Memories, disks: _Disks) -> None:
        self._memories, self._disks = memories, disks

    def read(self, op: Load, epoch: int, number: int, samples: NDArray[np.int64]) -> Iterator[BatchReads]:
        """Look up the samples `[n_loads, world_size, batch_size]` of loads that follow one another in an epoch."""
        for at, batch in enumerate(samples):
            yield self._read_batch(op, epoch, number + at, batch)

    def _read_batch(self, op: Load, epoch: int, number: int, samples: NDArray[np.int64]) -> BatchReads:
        level = np.full(samples.shape, STORAGE, dtype=np.uint8)
        owner = np.full(samples.shape, NOWHERE)
        keeps_memory, keeps_disk = (np.zeros(samples.shape, dtype=bool) for _ in range(2))
        evicted_memory: list[tuple[int, int]] = []
        evicted_disk: list[tuple[int, int]] = []
        for rank, place in np.ndindex(samples.shape):
            node, sample = rank // self._memories.ranks_per_node, int(samples[rank, place])
            level[rank, place] = self._level(op, node, sample)
            if {"memory", "peer"} & set(op.read):
                owner[rank, place] = self._memories.owner[sample]
            self._touch(node, sample, int(level[rank, place]))
            if "memory" in op.keep and level[rank, place] >= DISK and self._memories.owner[sample] == NOWHERE:
                keeps_memory[rank, place] = self._keep_in_memory(node, sample, evicted_memory)
            if "disk" in op.keep and level[rank, place] == STORAGE and not self._disks.has[node, sample]:
                keeps_disk[rank, place] = self._keep_on_disk(node, sample, evicted_disk)
        evicted = tuple(evicted_memory), tuple(evicted_disk)
        return BatchReads(number, epoch, samples, level, owner, keeps_memory, keeps_disk, *evicted)

    def _level(self, op: Load, node: int, sample: int) -> int:
        owner = self._memories.owner[sample]
        found = {
            "memory": owner == node,
            "peer": owner not in (node, NOWHERE),
            "disk": self._disks.has[node, sample],
            "storage": True,
        }
        return LEVELS.index(next(name for name in op.read if found[name]))

    def _touch(self, node: int, sample: int, level: int) -> None:
        if level in (MEMORY, PEER):
            self._memories.used[self._memories.owner[sample]].move_to_end(sample)
        elif level == DISK:
            self._disks.used[node].move_to_end(sample)

    def _keep_in_memory(self, node: int, sample: int, evicted: list[tuple[int, int]]) -> bool:
        memories, used = self._memories, self._memories.used[node]
        if not memories.left[node]:
            if not used:
                return False
            oldest, _ = used.popitem(last=False)
            memories.owner[oldest] = NOWHERE
            memories.left[node] += 1
            evicted.append((node, oldest))
        used[sample] = None
        memories.owner[sample] = node
        memories.left[node] -= 1
        return True

    def _keep_on_disk(self, node: int, sample: int, evicted: list[tuple[int, int]]) -> bool:
        disks, used = self._disks, self._disks.used[node]
        if disks.nbytes[sample] > disks.room_nbytes:
            return False
        while disks.left_nbytes[node] < disks.nbytes[sample]:
            oldest, _ = used.popitem(last=False)
            disks.has[node, oldest] = False
            disks.left_nbytes[node] += disks.nbytes[oldest]
            evicted.append((node, oldest))
        used[sample] = None
        disks.has[node, sample] = True
        disks.left_nbytes[node] -= disks.nbytes[sample]
        return True
