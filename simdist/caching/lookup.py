"""The level on which each load finds its samples, and the samples that caches keep and evict.

Reads count in logical order: by step, then by rank, then by place in the batch. A load states the levels that it tries,
in order. `memory` and `peer` share one set for all nodes, in which each sample is on at most one node: the node that
read it first. A load also states the levels that keep samples read from disk or storage. In memory, a sample is kept on
the node that read it, unless another node already has it.

Full levels: with `eviction: none`, a level keeps its samples and adds only samples that still fit. An epoch reads no
sample twice. So the hit rate of a whole shuffled epoch is the share of the data set that the level holds. With `lru`,
the least recently used sample is evicted. That suits scans badly: if a share c of the data set is kept, the hit rate of
a shuffled epoch is only

    c + (1 - c) ln(1 - c)

Consider a sample with a share u of one epoch before it and a share w of the next epoch after it. Between its two uses,
a share 1 - u w of all samples is used. It is still there if that is at most c.

For caches without eviction, all similar loads of an epoch are looked up at once; with `lru`, reads one by one.

Ranks read in the order of torch's `DistributedSampler` with drop_last, which deals samples rank by rank.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from simdist.plan import LEVELS, Dataset, Level, Load, Plan, StageIn

MEMORY, PEER, DISK, STORAGE = range(len(LEVELS))
_NOWHERE = -1

Evicted: TypeAlias = tuple[tuple[int, int], ...]

#: Random keys to hold at once, or the number of samples to read if that is larger.
_N_KEYS = 2**20


@dataclass(frozen=True, slots=True)
class BatchReads:
    """How the ranks read the samples of one load, and the changes to caches.

    Kept and evicted samples are the net result of the load. A sample that a full cache adds and evicts within the load
    is neither kept nor evicted. The same holds for a sample that it evicts and adds again.

    Args:
        number: Number of the load, and so of the batch.
        epoch: Epoch of the batch.
        samples: Indices of the samples, `[world_size, batch_size]`.
        level: Level from which each is read, an index of `LEVELS`, uint8 of the same shape.
        owner: Node with the sample in a memory that the load may read, -1 if there is none; of the same shape.
        keeps_memory: Whether the node keeps it in memory after the load, bool of the same shape.
        keeps_disk: Whether the node keeps the file on disk, bool of the same shape.
        evicted_memory: Evictions from memories, as (node, sample), in order.
        evicted_disk: Evictions from disks, as (node, sample).
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
    """Return the samples that each rank reads in an epoch, `[n_steps, world_size, batch_size]`.

    Samples are dealt to the ranks in turn, from the shuffled whole, or to the ranks of each node from its own part.
    Samples that do not fill a last step are left out, as with `drop_last`.

    Args:
        dataset: The data set, which states how it is shuffled.
        epoch: Number of the epoch, from 0.
        world_size: Ranks.
        n_steps: Number of first steps to return, 1 or more, which takes less memory than all; all if None.

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
    """Return the places of the smallest of `n` random keys, in the order of the keys: the first samples of a shuffle.

    numpy guarantees stable raw numbers of its generators, but not stable results of its `permutation`.
    """
    held = np.empty(0, dtype=np.uint64)
    places = np.empty(0, dtype=np.int64)
    most = np.uint64(2**64 - 1)
    n_at_once = max(_N_KEYS, n_least)  # at least as many as are read, so that the time is proportional to n
    for first in range(0, n, n_at_once):
        drawn = keys.random_raw(min(n_at_once, n - first))
        may_be = np.flatnonzero(drawn <= most)
        held = np.concatenate([held, drawn[may_be]])
        places = np.concatenate([places, first + may_be])
        if len(held) > n_least:
            most = np.partition(held, n_least - 1)[n_least - 1]
            fits = held <= most
            held = held[fits]
            places = places[fits]
    return places[np.argsort(held, kind="stable")[:n_least]]


_Held: TypeAlias = tuple[int, int]
_Evicted: TypeAlias = list[_Held]


class _EvictingCaches:
    """The disks and memories of all nodes; a full one evicts the least recently used sample."""

    def __init__(self, dataset: Dataset, world_size: int) -> None:
        self._dataset = dataset
        self._n_nodes = world_size // dataset.ranks_per_node
        self._disks = [_Lru(dataset.disk_nbytes) for _ in range(self._n_nodes)]
        self.clear_memory()

    def clear_memory(self) -> None:
        """Clear the memories, as between two runs."""
        self._owner: dict[int, int] = {}
        self._memories = [_Lru(self._dataset.memory_nbytes) for _ in range(self._n_nodes)]

    def on_disk(self, node: int) -> NDArray[np.int64]:
        """Return the samples that a node's disk holds as files."""
        return np.array(sorted(self._disks[node].held), dtype=np.int64)

    def put_on_disk(self, node: int, samples: NDArray[np.int64]) -> None:
        """Add files to a disk with enough room."""
        for sample in samples.tolist():
            self._disks[node].keep(sample, self._file_nbytes(sample))

    def read(self, op: Load, epoch: int, number: int, samples: NDArray[np.int64]) -> Iterator[BatchReads]:
        """Look up the samples `[n_loads, world_size, batch_size]` of consecutive loads of an epoch."""
        for at, batch in enumerate(samples):
            yield self._read_batch(op, epoch, number + at, batch)

    def _read_batch(self, op: Load, epoch: int, number: int, samples: NDArray[np.int64]) -> BatchReads:
        order = [LEVELS.index(name) for name in op.read]
        sees_memory = {MEMORY, PEER} & {*order}
        to_memory = "memory" in op.keep
        to_disk = "disk" in op.keep
        rows: list[tuple[int, int, bool, bool]] = []
        evicted_memory: _Evicted = []
        evicted_disk: _Evicted = []
        for rank, batch in enumerate(samples.tolist()):
            node = rank // self._dataset.ranks_per_node
            for sample in batch:
                owner = self._owner.get(sample, _NOWHERE)
                level = self._use(order, node, sample, owner)
                in_memory = to_memory and level >= DISK and owner == _NOWHERE
                in_memory = in_memory and self._keep_in_memory(node, sample, evicted_memory)
                on_disk = to_disk and level == STORAGE and self._keep_on_disk(node, sample, evicted_disk)
                rows.append((level, owner if sees_memory else _NOWHERE, in_memory, on_disk))
        columns = np.array(rows, dtype=np.int64).reshape(*samples.shape, 4)
        level, owner, keeps_memory, keeps_disk = np.moveaxis(columns, -1, 0)
        kept = keeps_memory.astype(bool), keeps_disk.astype(bool)
        evicted = self._settle(samples, kept[0], evicted_memory), self._settle(samples, kept[1], evicted_disk)
        return BatchReads(number, epoch, samples, level.astype(np.uint8), owner, *kept, *evicted)

    def _settle(self, samples: NDArray[np.int64], keeps: NDArray[np.bool_], evicted: _Evicted) -> tuple[_Held, ...]:
        """Remove from `keeps` and from the evictions samples that were added and evicted, or evicted and added."""
        if not evicted:
            return ()
        ranks, places = np.nonzero(keeps)
        nodes = ranks // self._dataset.ranks_per_node
        at = list(zip(ranks.tolist(), places.tolist(), strict=True))
        kept = dict(zip(zip(nodes.tolist(), samples[ranks, places].tolist(), strict=True), at, strict=True))
        left = []
        for each in evicted:
            if (place := kept.pop(each, None)) is None:
                left.append(each)  # the second eviction of a sample that was evicted, added and evicted
            else:
                keeps[place] = False
        return tuple(left)

    def _use(self, order: list[int], node: int, sample: int, owner: int) -> int:
        """Return the level of a sample, and mark the sample as just used."""
        for level in order:
            if (level == MEMORY and owner == node) or (level == PEER and owner not in (node, _NOWHERE)):
                self._memories[owner].held.move_to_end(sample)
                return level
            if level == DISK and sample in self._disks[node].held:
                self._disks[node].held.move_to_end(sample)
                return level
        return STORAGE

    def _keep_in_memory(self, node: int, sample: int, evicted: _Evicted) -> bool:
        gone = self._memories[node].keep(sample, self._dataset.sample_nbytes)
        if gone is None:
            return False
        for oldest in gone:
            del self._owner[oldest]
            evicted.append((node, oldest))
        self._owner[sample] = node
        return True

    def _keep_on_disk(self, node: int, sample: int, evicted: _Evicted) -> bool:
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
    """Contents of one disk or memory, as sample -> bytes, the least recently used first."""

    __slots__ = ("_capacity_nbytes", "_nbytes", "held")

    def __init__(self, capacity_nbytes: int | None) -> None:
        self.held: OrderedDict[int, int] = OrderedDict()
        self._capacity_nbytes = np.inf if capacity_nbytes is None else capacity_nbytes
        self._nbytes = 0

    def keep(self, sample: int, nbytes: int) -> list[int] | None:
        """Add a sample and return the evicted ones; None if it is larger than the whole cache."""
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


_ScalarT = TypeVar("_ScalarT", bound=np.generic)


class _KeepingCaches:
    """The disks and memories of all nodes; each keeps its samples, and adds those that still fit.

    Args:
        dataset: The data set that is read.
        world_size: Ranks.
        keep: Levels that keep samples. For the others, no arrays by sample are stored.
    """

    def __init__(self, dataset: Dataset, world_size: int, keep: AbstractSet[Level]) -> None:
        n_nodes = world_size // dataset.ranks_per_node
        self._dataset = dataset
        self._keep = keep
        self._file_nbytes = dataset.files_nbytes()
        self._on_disk = _noted(np.False_, (n_nodes, dataset.n_samples), for_each="disk" in keep)
        self._disk_room_nbytes = _room_nbytes(dataset.disk_nbytes, n_nodes)
        self.clear_memory()

    def clear_memory(self) -> None:
        """Clear the memories, as between two runs."""
        self._owner = _noted(np.int64(_NOWHERE), (self._dataset.n_samples,), for_each="memory" in self._keep)
        self._memory_room_nbytes = _room_nbytes(self._dataset.memory_nbytes, len(self._on_disk))

    def on_disk(self, node: int) -> NDArray[np.int64]:
        """Return the samples that a node's disk holds as files."""
        return np.flatnonzero(self._on_disk[node])

    def put_on_disk(self, node: int, samples: NDArray[np.int64]) -> None:
        """Add files to a disk with enough room."""
        self._on_disk[node, samples] = True
        self._disk_room_nbytes[node] -= self._file_nbytes[samples].sum()

    def read(self, op: Load, epoch: int, number: int, samples: NDArray[np.int64]) -> Iterator[BatchReads]:
        """Look up the samples `[n_loads, world_size, batch_size]` of consecutive loads of an epoch."""
        ranks = np.arange(samples.shape[1]) // self._dataset.ranks_per_node
        node = np.broadcast_to(ranks[:, None], samples.shape)
        held_by = self._owner[samples]
        on_disk = self._on_disk[node, samples]
        found = {"memory": held_by == node, "peer": (held_by != node) & (held_by != _NOWHERE), "disk": on_disk}
        level = np.full(samples.shape, STORAGE, dtype=np.uint8)
        for name in reversed(op.read[:-1]):  # the last is storage
            level[found[name]] = LEVELS.index(name)
        owner = held_by if {"memory", "peer"} & {*op.read} else np.full_like(held_by, _NOWHERE)
        keeps_memory, keeps_disk = (np.zeros(samples.shape, dtype=bool) for _ in range(2))
        if "memory" in op.keep:
            wanted = (level >= DISK) & (held_by == _NOWHERE)
            sizes = np.broadcast_to(np.int64(self._dataset.sample_nbytes), samples.shape)
            keeps_memory = _kept(wanted, sizes, self._memory_room_nbytes)
            self._owner[samples[keeps_memory]] = node[keeps_memory]
        if "disk" in op.keep:
            wanted = (level == STORAGE) & ~on_disk
            keeps_disk = _kept(wanted, self._file_nbytes[samples], self._disk_room_nbytes)
            self._on_disk[node[keeps_disk], samples[keeps_disk]] = True
        for at, row in enumerate(zip(samples, level, owner, keeps_memory, keeps_disk, strict=True)):
            yield BatchReads(number + at, epoch, *row)


def _noted(value: _ScalarT, shape: tuple[int, ...], *, for_each: bool) -> NDArray[_ScalarT]:
    """Return an array of equal values, which takes memory only if they may change."""
    return np.full(shape, value) if for_each else np.broadcast_to(value, shape)


def _room_nbytes(capacity_nbytes: int | None, n_nodes: int) -> NDArray[np.float64]:
    return np.full(n_nodes, np.inf if capacity_nbytes is None else float(capacity_nbytes))


def _kept(wanted: NDArray[np.bool_], sizes: NDArray[np.int64], room_nbytes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which of the wanted samples `[n_loads, world_size, batch_size]` nodes keep, and reduce the free room."""
    kept = np.zeros(wanted.shape, dtype=bool)
    by_node = len(wanted), len(room_nbytes), -1
    sizes_by_node = sizes.reshape(by_node)
    wanted_by_node = wanted.reshape(by_node)
    kept_by_node = kept.reshape(by_node)
    for node in range(len(room_nbytes)):
        loads, places = np.nonzero(wanted_by_node[:, node])
        nbytes = sizes_by_node[loads, node, places]
        fits = that_fit(nbytes, room_nbytes[node])
        kept_by_node[loads[fits], node, places[fits]] = True
        room_nbytes[node] -= nbytes[fits].sum()
    return kept


def that_fit(sizes: NDArray[np.int64], room_nbytes: float) -> NDArray[np.bool_]:
    """Return which of a sequence of sizes are kept if each that still fits is kept in turn.

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


_Caches: TypeAlias = _KeepingCaches | _EvictingCaches


def look_up(plan: Plan) -> Iterator[BatchReads]:
    """Yield how each load of a plan reads, in order."""
    dataset = plan.dataset
    assert dataset is not None
    yield from _look_up(plan, dataset, _caches_at_first(plan, dataset))


def on_disk_at_first(plan: Plan, node: int) -> NDArray[np.int64]:
    """Return the samples that a node's disk holds as files when the first load begins, in order."""
    dataset = plan.dataset
    assert dataset is not None
    return _caches_at_first(plan, dataset).on_disk(node)


def _caches_at_first(plan: Plan, dataset: Dataset) -> _Caches:
    """Return the caches before the first load: with staged samples, and samples that an earlier run has left."""
    caches = _caches(plan, dataset)
    if _stages_in(plan):
        n_nodes = plan.world_size // dataset.ranks_per_node
        for node in range(n_nodes):
            caches.put_on_disk(node, staged_samples(dataset, node, n_nodes))
    if dataset.warm:
        for _ in _look_up(plan, dataset, caches):
            pass
        caches.clear_memory()
    return caches


def _caches(plan: Plan, dataset: Dataset) -> _Caches:
    if dataset.eviction == "lru":
        return _EvictingCaches(dataset, plan.world_size)
    keep: set[Level] = {level for body in plan.bodies for op in body if isinstance(op, Load) for level in op.keep}
    if _stages_in(plan):
        keep.add("disk")
    return _KeepingCaches(dataset, plan.world_size, keep)


def _stages_in(plan: Plan) -> bool:
    return any(isinstance(op, StageIn) for body in plan.bodies for op in body)


def staged_samples(dataset: Dataset, node: int, n_nodes: int) -> NDArray[np.int64]:
    """Return the samples with files that are staged to a node's disk: those that it may read, as far as they fit."""
    samples = node_part(dataset, node, n_nodes)
    if dataset.disk_nbytes is None:
        return samples
    return samples[that_fit(dataset.files_nbytes()[samples], dataset.disk_nbytes)]


def _look_up(plan: Plan, dataset: Dataset, caches: _Caches) -> Iterator[BatchReads]:
    per_epoch = dataset.steps_per_epoch(plan.world_size)
    n_loads = sum(1 for _ in plan.loads())
    for epoch, numbered in groupby(enumerate(plan.loads()), key=lambda each: each[0] // per_epoch):
        n_steps = min(per_epoch, n_loads - epoch * per_epoch)
        order = epoch_order(dataset, epoch, plan.world_size, n_steps=n_steps)
        for _, alike in groupby(numbered, key=lambda each: (each[1].read, each[1].keep)):
            numbers, ops = zip(*alike, strict=True)
            first = numbers[0] - epoch * per_epoch
            yield from caches.read(ops[0], epoch, numbers[0], order[first : first + len(numbers)])
