"""A node's store of decoded samples: shared memory that all its ranks read and write.

Samples have one size, so memory is a row of equal slots, and a table says which sample is in which slot. Which samples
live here is decided elsewhere; a store only refuses what it has no room for.

**Writing.** Under the lock a writer takes an empty slot; without it, it copies; under the lock again, it enters the
sample into the table. A writer that is killed while it copies leaves a slot that no sample points to. When a store is
full it looks for such slots: each bears the writer's process id and the time when that process began.

Ids must mean the same to all then: processes that do not see each other's (containers that share memory only) cannot
open one store. And a writer enters its sample only if the slot is still its own.

**Reading** takes no lock. A slot has a number that grows whenever its sample leaves. A reader that finds the same
number after its copy as before has read one sample, whole; else the sample has left while it read, and is not there.
This needs reads of memory in the order of the program. x86-64 keeps it; for others, as ARM, there is a fence between
the looks at the tables and the copy.

A table of zeros is an empty store: fields that may have no value hold it plus one.
"""

import os
import platform
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from real.data.board import Board
from real.data.segment import SHARED_MEMORY, SharedSegment
from real.processes.heartbeat import machine
from simdist.errors import RunError

Pixels: TypeAlias = NDArray[np.uint8]  # a decoded sample in host memory, uint8, contiguous

_EMPTY, _WRITING, _READY = 0, 1, 2
_ALIGNMENT = 64  # bytes of a cache line
_PAGE_NBYTES = 4096
_SEARCHED_FIRST = 4096  # slots
_KEEPS_ORDER = platform.machine() in {"x86_64", "AMD64"}  # "Reads are not reordered with other reads", Intel SDM 3A


@dataclass(frozen=True, slots=True)
class Geometry:
    """How large a store is.

    Args:
        n_samples: Of the data set: samples are numbers below it.
        n_slots: How many samples fit. A sample stays until every rank of the node is done with the load in which it is
            to leave, so give more than are to live here at a time: as many as come in the loads between the fastest
            rank and the slowest.
        sample_nbytes: Of each.
        ranks_per_node: That share it.
    """

    n_samples: int
    n_slots: int
    sample_nbytes: int
    ranks_per_node: int = 1

    def __str__(self) -> str:
        return (
            f"{self.n_slots} slots of {self.sample_nbytes} bytes for {self.n_samples} samples "
            f"and {self.ranks_per_node} ranks"
        )


@dataclass(frozen=True, slots=True)
class Loan:
    """Shows a sample where it lies, without a copy.

    Args:
        data: uint8 `[sample_nbytes]`. Not to be written to, nor held when the store is closed.
        is_intact: Whether it has been this sample all the time until now.
    """

    data: NDArray[np.uint8]
    is_intact: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Tables:
    """Everything in the segment but the samples; int64 if not said otherwise.

    Args:
        slot_of: `[n_samples]`, 1 + slot.
        kept_at: `[n_samples]`, 1 + the last load that kept it.
        state: uint8 `[n_slots]`.
        sample_in: `[n_slots]`.
        generation: `[n_slots]`, grows when a sample leaves.
        writer: `[n_slots]`, process id.
        writer_began: `[n_slots]`, when that process began.
        next_slot: `[1]`, where to look first for an empty slot.
    """

    slot_of: NDArray[np.int64]
    kept_at: NDArray[np.int64]
    state: NDArray[np.uint8]
    sample_in: NDArray[np.int64]
    generation: NDArray[np.int64]
    writer: NDArray[np.int64]
    writer_began: NDArray[np.int64]
    next_slot: NDArray[np.int64]


class MemoryStore:
    """Shares decoded samples among the processes of a node; the first one to open it makes it.

    Its `board` tells how far the ranks that share it are.

    Args:
        name: Of the store; the ranks of a node give the same.
        geometry: How large it is; the ranks agree.
        folder: A file system in memory.

    Raises:
        RunError: There is no room for it, or others use this name for something else.
    """

    def __init__(self, name: str, geometry: Geometry, *, folder: Path = SHARED_MEMORY) -> None:
        self.geometry = geometry
        stride = _rounded(geometry.sample_nbytes, _ALIGNMENT)
        begin = _rounded(sum(_rounded(nbytes, _ALIGNMENT) for nbytes in _table_nbytes(geometry)), _PAGE_NBYTES)
        layout = f"{geometry}; processes of {machine()}"
        self._segment = SharedSegment(name, begin + geometry.n_slots * stride, layout=layout, folder=folder)
        self._tables, self.board = _tables(self._segment, geometry)
        slots = self._segment.array(begin, geometry.n_slots * stride).reshape(geometry.n_slots, stride)
        self._slots: NDArray[np.uint8] = slots[:, : geometry.sample_nbytes]
        self._writer = _this_process()

    def put(self, sample: int, data: Pixels, *, number: int = 0) -> bool:
        """Keep a sample from load `number` on; return False if there is no room."""
        source = flat(data, self.geometry.sample_nbytes, sample)
        with self._segment.locked():
            slot = None if self._note_kept(sample, number) else self._take_slot(sample)
            generation = 0 if slot is None else int(self._tables.generation[slot])
        if slot is None:
            return sample in self
        np.copyto(self._slots[slot], source)
        with self._segment.locked():
            return self._publish(sample, slot, generation, number)

    def get(self, sample: int, out: Pixels) -> bool:
        """Copy a sample to `out`; return False if it is not there, and then `out` holds anything."""
        target = flat(out, self.geometry.sample_nbytes, sample)
        loan = self.borrow(sample)
        if loan is None:
            return False
        np.copyto(target, loan.data)  # lets other threads run
        return loan.is_intact()

    def get_many(self, samples: Sequence[int], outs: Sequence[Pixels]) -> list[bool]:
        """Copy several samples; return which were there."""
        return [self.get(sample, out) for sample, out in zip(samples, outs, strict=True)]

    def borrow(self, sample: int) -> Loan | None:
        """Return a sample where it lies; None if it is not there."""
        tables = self._tables
        slot = int(tables.slot_of[sample]) - 1
        if slot < 0:
            return None
        generation = int(tables.generation[slot])
        _fence()
        if tables.state[slot] != _READY or tables.sample_in[slot] != sample:
            return None
        _fence()

        def is_intact() -> bool:
            _fence()
            return int(tables.generation[slot]) == generation

        return Loan(self._slots[slot], is_intact)

    def evict(self, sample: int, *, number: int | None = None) -> bool:
        """Drop a sample, unless a load after `number` has kept it again; return whether it was dropped."""
        with self._segment.locked():
            slot = int(self._tables.slot_of[sample]) - 1
            if slot < 0 or (number is not None and self._tables.kept_at[sample] > number + 1):
                return False
            self._empty(slot)
        return True

    def unlink(self) -> None:
        """Remove the name, once all ranks have opened the store: it then goes with the last of them, even if killed."""
        self._segment.unlink()

    def close(self) -> None:
        """Leave; the store cannot be used any more. The last one removes it."""
        del self._tables, self.board, self._slots
        self._segment.close()

    def __contains__(self, sample: int) -> bool:
        return self.borrow(sample) is not None

    def __len__(self) -> int:
        return int(np.count_nonzero(self._tables.state == _READY))

    def _note_kept(self, sample: int, number: int) -> bool:
        """Note that a load keeps a sample that is there; return False if it is not."""
        if sample not in self:
            return False
        self._tables.kept_at[sample] = max(int(self._tables.kept_at[sample]), number + 1)
        return True

    def _take_slot(self, sample: int) -> int | None:
        """Return a slot to write to; None if there is none."""
        tables = self._tables
        slot = self._find_empty()
        if slot is None and self._reclaim():
            slot = self._find_empty()
        if slot is None:
            return None
        self._claim(slot)
        tables.sample_in[slot] = sample
        tables.next_slot[0] = (slot + 1) % self.geometry.n_slots
        return slot

    def _claim(self, slot: int) -> None:
        """Say that this process changes a slot."""
        tables = self._tables
        if self._writer[0] != os.getpid():
            self._writer = _this_process()
        tables.writer[slot], tables.writer_began[slot] = self._writer
        tables.state[slot] = _WRITING

    def _find_empty(self) -> int | None:
        """Look where the last search ended, then everywhere."""
        begin, state = int(self._tables.next_slot[0]), self._tables.state
        for first, part in ((begin, state[begin : begin + _SEARCHED_FIRST]), (0, state)):
            if part.size and part[found := int(np.argmin(part))] == _EMPTY:
                return first + found
        return None

    def _publish(self, sample: int, slot: int, generation: int, number: int) -> bool:
        """Enter a sample; if another writer was faster, leave its. Return whether the sample is there."""
        tables = self._tables
        is_mine = tables.state[slot] == _WRITING and tables.generation[slot] == generation
        if self._note_kept(sample, number):
            if is_mine:
                self._empty(slot)
            return True
        if not is_mine:  # it was taken from this process, as from a dead one
            return False
        tables.kept_at[sample] = number + 1
        tables.slot_of[sample] = slot + 1
        tables.state[slot] = _READY
        return True

    def _reclaim(self) -> bool:
        """Empty the slots of writers that have died while they wrote; return whether there were any."""
        tables = self._tables
        slots = np.flatnonzero(tables.state == _WRITING)
        dead = [s for s in slots.tolist() if _began(int(tables.writer[s])) != tables.writer_began[s]]
        for slot in dead:
            self._empty(slot)
        return bool(dead)

    def _empty(self, slot: int) -> None:
        """Take a sample out of the table before its slot: a process that dies between leaves a slot to reclaim."""
        tables = self._tables
        self._claim(slot)
        tables.generation[slot] += 1
        sample = int(tables.sample_in[slot])
        if tables.slot_of[sample] == slot + 1:
            tables.slot_of[sample] = 0
        tables.state[slot] = _EMPTY


def _this_process() -> tuple[int, int]:
    """Return id and begin of this process, which together no later one has."""
    return os.getpid(), _began(os.getpid())


def _began(pid: int) -> int:
    """Return when a process began, in clock ticks; 0 if it has ended. Source: proc_pid_stat(5), fields 3 and 22."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in {"Z", "X"} else int(fields[19])


def _fence() -> None:
    """Let all reads of memory before this be done before those after it.

    Reads before a lock is dropped stay before it, and reads after it is taken again stay after that; a lock
    of its own makes no thread wait, and a forked child finds none that is held.
    """
    if not _KEEPS_ORDER:
        lock = threading.Lock()
        for _ in range(2):
            with lock:
                pass


def _tables(segment: SharedSegment, geometry: Geometry) -> tuple[_Tables, Board]:
    """Cut the tables out of a segment."""
    arrays, offset = [], 0
    for nbytes in _table_nbytes(geometry):
        arrays.append(segment.array(offset, nbytes))
        offset += _rounded(nbytes, _ALIGNMENT)
    state, *words = arrays
    n_read, n_kept, n_staged, on_disk, slot_of, kept_at, sample_in, generation, writer, began, next_slot = (
        array.view(np.int64) for array in words
    )
    board = Board(n_read, n_kept, n_staged, on_disk, segment.locked)
    return _Tables(slot_of, kept_at, state, sample_in, generation, writer, began, next_slot), board


def _table_nbytes(geometry: Geometry) -> list[int]:
    """Return the size of each table: states, then words of ranks, of samples, of slots, and one more."""
    ranks, samples, slots = geometry.ranks_per_node, geometry.n_samples, geometry.n_slots
    return [slots, *(8 * count for count in (*[ranks] * 3, *[samples] * 3, *[slots] * 4, 1))]


def flat(data: Pixels, nbytes: int, sample: int) -> NDArray[np.uint8]:
    """Return a sample's bytes as a vector, without a copy.

    Raises:
        RunError: It has another size or type, or is not contiguous.
    """
    if data.dtype != np.uint8 or data.nbytes != nbytes or not data.flags.c_contiguous:
        raise RunError(
            f"sample {sample}: {data.dtype} {list(data.shape)} of strides {data.strides}; "
            f"must be contiguous uint8 of {nbytes} bytes"
        )
    return data.reshape(-1)


def _rounded(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
