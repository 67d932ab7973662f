"""The reads of a rank, load by load: its part of the plan, which rank brings what, what leaves when."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from real.data.board import Board, Want
from real.data.filecache import FileCache
from real.data.memory import MemoryStore
from real.processes.rendezvous import RankPlace
from simdist.caching import BatchReads
from simdist.errors import RunError


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRead:
    """Says how one sample is to be read.

    Args:
        sample: Which.
        planned: Where it should be, an index of `LEVELS`.
        owner: Which node's memory has it, if any.
        keeps_memory: Whether memory then keeps it.
        keeps_disk: Whether the disk keeps its file.
        in_memory: Which rank brought it into the owner's memory, and when.
        on_disk: Which rank brought its file to this node's disk, and when.
        out: Where it goes, uint8, flat.
    """

    sample: int
    planned: int
    owner: int
    keeps_memory: bool
    keeps_disk: bool
    in_memory: Want
    on_disk: Want
    out: NDArray[np.uint8]


class Agenda:
    """Goes through the loads of a plan as one rank sees them.

    Args:
        reads: Of all loads, in order.
        n_samples: Of the data set.
        place: Which rank this is.
    """

    def __init__(self, reads: Iterable[BatchReads], n_samples: int, place: RankPlace) -> None:
        self._reads, self._place = iter(reads), place
        self._brought_to_memory, self._brought_to_disk = np.full((2, n_samples), -1, dtype=np.int64)
        self._current: BatchReads | None = None
        self.leaving = Leaving(place)

    def advance(self, number: int) -> BatchReads:
        """Return how a load reads; what the loads before it bring has been brought.

        Raises:
            RunError: The plan has no such load, or it lies behind.
        """
        first = 0 if self._current is None else self._current.number + 1
        if number < first:
            raise RunError(f"load {number} of rank {self._place.rank}: the next one is {first}")
        if self._current is not None:
            self._note(self._current)
        for batch in self._reads:
            self._current = batch
            if batch.number == number:
                return batch
            self._note(batch)
        raise RunError(f"load {number} of rank {self._place.rank}: the plan has no such load")

    def is_over(self) -> bool:
        """Return whether the plan has no more loads; if it has, nothing can be read any more."""
        return next(self._reads, None) is None

    def rows(self, batch: BatchReads, out: Tensor) -> list[PlannedRead]:
        """Return how each sample of this rank is to be read.

        Args:
            batch: The load.
            out: uint8 `[batch, *shape]`, contiguous, in host memory.
        """
        rank, world_size = self._place.rank, len(batch.samples)
        columns = batch.samples, batch.level, batch.owner, batch.keeps_memory, batch.keeps_disk
        values = [column[rank].tolist() for column in columns]
        outs = out.numpy().reshape(len(values[0]), -1)
        return [
            PlannedRead(
                *(sample, planned, owner, keeps_memory, keeps_disk),
                in_memory=self._want(sample, int(self._brought_to_memory[sample]), world_size),
                on_disk=self._want(sample, int(self._brought_to_disk[sample]), world_size),
                out=row,
            )
            for sample, planned, owner, keeps_memory, keeps_disk, row in zip(*values, outs, strict=True)
        ]

    def _want(self, sample: int, access: int, world_size: int) -> Want:
        if access < 0:
            return Want(sample)
        number, rank = divmod(access, world_size)
        return Want(sample, rank % self._place.local_world_size, number)

    def _note(self, batch: BatchReads) -> None:
        """Remember which rank brings what with a load, and what leaves."""
        rank = np.arange(len(batch.samples))[:, None]
        accesses = np.broadcast_to(batch.number * len(rank) + rank, batch.samples.shape)
        self._brought_to_memory[batch.samples[batch.keeps_memory]] = accesses[batch.keeps_memory]
        here = batch.keeps_disk & (rank // self._place.local_world_size == self._place.node)
        self._brought_to_disk[batch.samples[here]] = accesses[here]


class Leaving:
    """Carries out what leaves a node's caches, once no rank needs it any more.

    Args:
        place: Which rank this is.
    """

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        self._loads: deque[tuple[int, list[int], list[int]]] = deque()  # number, samples of memory, and of disk

    def makes_room(self, n_read: int) -> bool:
        """Return whether anything leaves memory with the first so many loads."""
        return any(memory for number, memory, _ in self._loads if number < n_read)

    def note(self, batch: BatchReads) -> None:
        """Remember what leaves this node with a load."""
        memory, disk = (
            [sample for node, sample in evicted if node == self._place.node]
            for evicted in (batch.evicted_memory, batch.evicted_disk)
        )
        if memory or disk:
            self._loads.append((batch.number, memory, disk))

    def carry_out(self, n_read: int, store: MemoryStore, files: FileCache | None, board: Board) -> None:
        """Drop what leaves with loads that so many have read; not what a later load has brought back.

        Args:
            n_read: Loads that all ranks which may need it have read.
            store: The node's memory.
            files: On the node's disk.
            board: Of the node.
        """
        while self._loads and self._loads[0][0] < n_read:
            number, memory, disk = self._loads.popleft()
            for sample in memory:
                store.evict(sample, number=number)
            if files is not None:
                for sample in disk:
                    board.leave_disk(sample, number, files.evict)
