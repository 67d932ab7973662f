"""A node's store of decoded samples, in shared memory that all its ranks read and write.

All samples have the same size. So memory is an array of equal slots, and a table maps samples to slots. The choice of
samples is made elsewhere. A store only refuses samples for which it has no room.

**Writing.** A writer takes an empty slot under the lock, copies without the lock, and enters the sample into the table
under the lock. If a writer is killed during the copy, no sample points to its slot, and the run ends.

**Reading** takes no lock. A slot has a number that grows whenever its sample leaves. If a reader finds the same number
before and after its copy, it has read one complete sample. Otherwise the sample left during the copy, and counts as
missing. This requires that memory reads keep the program order. x86-64 guarantees it. Other processors, such as ARM,
need a fence between the accesses to the tables and the copy.

A table of zeros is an empty store: fields that may be without a value hold the value plus one.

The memory has no name, so the kernel frees it when the last process that shares it ends. One process makes it and sends
its `path` to the others, which open it. The path is valid as long as that process lives.

**Board.** In the same memory, ranks report the progress of their loads. A rank makes two reports on load k, in this
order. It *has read* all samples, so it no longer needs samples that leave the caches with load k. It *has kept* its
samples, so others can find them. In between it may have to wait for room, which others make after all ranks have read.
"""

import errno
import fcntl
import mmap
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from real.processes.beats import ranks_have
from simdist.errors import RunError

_LOOK_AGAIN_S = 0.002
_HAS_LEFT = -1


@dataclass(frozen=True, slots=True)
class Want:
    """A sample, and when it came into a node's memory.

    Args:
        sample: Number of the sample.
        local_rank: The rank of the node, from 0, that kept it.
        number: Number of the load that kept it; -1 if unknown, then no rank waits for it.
    """

    sample: int
    local_rank: int = 0
    number: int = -1


@dataclass(frozen=True, slots=True)
class Board:
    """The progress of the ranks of a node.

    Args:
        n_read: int64 `[ranks_per_node]`, number of loads that each rank has read.
        n_kept: int64 `[ranks_per_node]`, number of loads that each rank has also kept.
        n_staged: int64 `[ranks_per_node]`, number of times that each rank has staged its files.
        kept_on_disk: int64 `[n_samples]`, 1 + the last load that keeps a sample on the node's disk; 0: none yet; -1: it
            left.
        locked: Excludes the other ranks.
    """

    n_read: NDArray[np.int64]
    n_kept: NDArray[np.int64]
    n_staged: NDArray[np.int64]
    kept_on_disk: NDArray[np.int64]
    locked: Callable[[], AbstractContextManager[None]]

    def slowest(self) -> int:
        """Return the number of loads that all ranks of the node have read."""
        return int(self.n_read.min())

    def keep_on_disk(self, sample: int, number: int) -> None:
        """Mark a file as staying on disk, before a load keeps it there."""
        with self.locked():
            self.kept_on_disk[sample] = max(int(self.kept_on_disk[sample]), number + 1)

    def leave_disk(self, sample: int, number: int, drop: Callable[[int], object]) -> None:
        """Drop a file, unless a load after `number` keeps it again, or another rank has dropped it."""
        if self.kept_on_disk[sample] == _HAS_LEFT:
            return
        with self.locked():
            if _HAS_LEFT < self.kept_on_disk[sample] <= number + 1:
                drop(sample)
                self.kept_on_disk[sample] = _HAS_LEFT


def wait_for(
    want: Want, is_there: Callable[[int], bool], board: Board, *, wait_s: float, stop: threading.Event
) -> bool:
    """Wait until a sample is in memory, its rank has passed the load that keeps it, or the time limit has passed.

    Args:
        want: The sample.
        is_there: Whether a sample is in this node's memory.
        board: Board of this node.
        wait_s: Longest wait.
        stop: Ends the wait when set.

    Returns:
        Whether the sample is there.
    """
    deadline_s = time.monotonic() + wait_s
    while not is_there(want.sample):
        if board.n_kept[want.local_rank] > want.number:
            return is_there(want.sample)  # it may have arrived between the two checks
        if time.monotonic() >= deadline_s or stop.wait(_LOOK_AGAIN_S):
            return False
    return True


def wait_until_all_staged(
    board: Board, local_rank: int, *, first_rank: int, timeout_s: float, stop: threading.Event
) -> None:
    """Record that a rank has staged its files, and wait until all ranks of its node have done so equally often.

    Raises:
        RunError: Ranks are missing (the error names them), or the run has failed.
    """
    board.n_staged[local_rank] += 1
    deadline_s = time.monotonic() + timeout_s
    while True:
        late = np.flatnonzero(board.n_staged < board.n_staged[local_rank])
        if not len(late):
            return
        have_not = f"rank {first_rank + local_rank}: {ranks_have((late + first_rank).tolist())} not staged their files"
        if time.monotonic() > deadline_s:
            raise RunError(f"{have_not} within {timeout_s:g} s; see the output there")
        if stop.wait(_LOOK_AGAIN_S):
            raise RunError(f"{have_not}; the run has failed")


_SHARED_MEMORY = Path("/dev/shm")


class _SharedSegment:
    """A segment of shared memory: a new one, initially zero, or that of another process.

    Args:
        nbytes: Its size.
        path: Path of the other process's segment; None makes a new one.
        folder: Folder for a new one, on a file system in memory.

    Raises:
        RunError: There is no room, or the path does not exist.
    """

    def __init__(self, nbytes: int, *, path: str | None = None, folder: Path = _SHARED_MEMORY) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0) if path is None else open(path, "r+b", 0)  # noqa: SIM115
        except OSError as error:
            raise RunError(f"{path or folder}: shared memory cannot be opened: {error.strerror}") from error
        self.path = path or f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        try:
            if path is None:
                _take(self._file.fileno(), folder, nbytes)
            # Pages are mapped now, all at once: one by one, they would slow the first copies.
            self._map = mmap.mmap(self._file.fileno(), nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            self._file.close()
            raise
        self._mutex = threading.Lock()

    def array(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return a part of it. Memory is freed when the segment is closed and no part is in use."""
        return np.frombuffer(self._map, np.uint8, nbytes, offset)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Take the lock that excludes all other threads and processes; it is released if its process dies."""
        with self._mutex:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the lock."""
        del self._map
        self._file.close()


def _take(descriptor: int, folder: Path, nbytes: int) -> None:
    """Allocate the memory now: a sparse file would kill the process that writes when no memory is left."""
    room = os.statvfs(folder)
    left = room.f_bavail * room.f_frsize
    try:
        if room.f_blocks and nbytes > left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        raise RunError(
            f"{folder}: {nbytes:,} bytes of shared memory are needed, {left:,} are left ({error.strerror}); "
            "keep fewer samples, or give it more room (docker run --shm-size, mount -o remount,size=)"
        ) from error


Pixels: TypeAlias = NDArray[np.uint8]  # a decoded sample in host memory, uint8, contiguous

_EMPTY = 0
_WRITING = 1
_READY = 2
_ALIGNMENT = 64  # bytes of a cache line
_PAGE_NBYTES = 4096
_KEEPS_ORDER = platform.machine() in {"x86_64", "AMD64"}  # "Reads are not reordered with other reads", Intel SDM 3A


@dataclass(frozen=True, slots=True)
class Geometry:
    """The size of a store.

    Args:
        n_samples: Number of samples in the data set; samples are numbers below it.
        n_slots: Number of samples that fit. A sample stays until all ranks of the node have finished the load with
            which it leaves. So more slots are needed than samples are planned here: add the samples of the loads
            between the fastest and the slowest rank.
        sample_nbytes: Bytes of each sample.
        ranks_per_node: Number of ranks that share the store.
    """

    n_samples: int
    n_slots: int
    sample_nbytes: int
    ranks_per_node: int = 1


@dataclass(frozen=True, slots=True)
class Loan:
    """A view of a sample in the store, without a copy.

    Args:
        data: uint8 `[sample_nbytes]`. Do not write to it, and release it before the store is closed.
        is_intact: Whether it has been this sample all the time until now.
    """

    data: NDArray[np.uint8]
    is_intact: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Tables:
    """Everything in the segment except the samples; int64 unless stated otherwise.

    Args:
        slot_of: `[n_samples]`, 1 + slot.
        kept_at: `[n_samples]`, 1 + the last load that kept it.
        state: uint8 `[n_slots]`.
        sample_in: `[n_slots]`.
        generation: `[n_slots]`, grows when a sample leaves.
    """

    slot_of: NDArray[np.int64]
    kept_at: NDArray[np.int64]
    state: NDArray[np.uint8]
    sample_in: NDArray[np.int64]
    generation: NDArray[np.int64]


class MemoryStore:
    """Shares decoded samples among the processes of a node: one process makes it, the others open it at its `path`.

    Its `board` has the progress of the ranks that share it.

    Args:
        geometry: Its size, equal on all ranks.
        path: Path of another process's store; None makes a new one.
        folder: Folder for a new one, on a file system in memory.

    Raises:
        RunError: There is no room for it, or it does not exist.
    """

    def __init__(self, geometry: Geometry, *, path: str | None = None, folder: Path = _SHARED_MEMORY) -> None:
        self.geometry = geometry
        stride = _rounded(geometry.sample_nbytes, _ALIGNMENT)
        begin = _rounded(sum(_rounded(nbytes, _ALIGNMENT) for nbytes in _table_nbytes(geometry)), _PAGE_NBYTES)
        self._segment = _SharedSegment(begin + geometry.n_slots * stride, path=path, folder=folder)
        self.path = self._segment.path
        self._tables, self.board = _tables(self._segment, geometry)
        slots = self._segment.array(begin, geometry.n_slots * stride).reshape(geometry.n_slots, stride)
        self._slots: NDArray[np.uint8] = slots[:, : geometry.sample_nbytes]

    def put(self, sample: int, data: Pixels, *, number: int = 0) -> bool:
        """Keep a sample from load `number` on; return False if there is no room."""
        source = flat(data, self.geometry.sample_nbytes, sample)
        with self._segment.locked():
            if self._note_kept(sample, number):
                return True
            slot = self._find_empty()
            if slot is None:
                return False
            self._tables.state[slot] = _WRITING
        np.copyto(self._slots[slot], source)
        with self._segment.locked():
            self._publish(sample, slot, number)
        return True

    def get(self, sample: int, out: Pixels) -> bool:
        """Copy a sample to `out`; return False if it is not there, with `out` undefined."""
        target = flat(out, self.geometry.sample_nbytes, sample)
        loan = self.borrow(sample)
        if loan is None:
            return False
        np.copyto(target, loan.data)  # lets other threads run
        return loan.is_intact()

    def get_many(self, samples: Sequence[int], outs: Sequence[Pixels]) -> list[bool]:
        """Copy several samples; return which of them were there."""
        return [self.get(sample, out) for sample, out in zip(samples, outs, strict=True)]

    def borrow(self, sample: int) -> Loan | None:
        """Return a view of a sample; None if it is not there."""
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
            self._tables.generation[slot] += 1
            self._tables.slot_of[sample] = 0
            self._tables.state[slot] = _EMPTY
        return True

    def close(self) -> None:
        """Close the store."""
        del self._tables, self.board, self._slots
        self._segment.close()

    def __contains__(self, sample: int) -> bool:
        return self.borrow(sample) is not None

    def __len__(self) -> int:
        return int(np.count_nonzero(self._tables.state == _READY))

    def _note_kept(self, sample: int, number: int) -> bool:
        """Record that a load keeps an existing sample; return False if it is not there."""
        if sample not in self:
            return False
        self._tables.kept_at[sample] = max(int(self._tables.kept_at[sample]), number + 1)
        return True

    def _find_empty(self) -> int | None:
        state = self._tables.state
        return found if state.size and state[found := int(np.argmin(state))] == _EMPTY else None

    def _publish(self, sample: int, slot: int, number: int) -> None:
        """Enter a sample, unless another writer has already entered it."""
        tables = self._tables
        if self._note_kept(sample, number):
            tables.state[slot] = _EMPTY
            return
        tables.kept_at[sample] = number + 1
        tables.sample_in[slot] = sample
        tables.slot_of[sample] = slot + 1
        tables.state[slot] = _READY


def _fence() -> None:
    """Order memory reads: all reads before this call are done before those after it.

    Reads before the release of a lock stay before it, and reads after the next acquisition stay after it. With a lock
    of its own, no thread waits, and a forked child never finds the lock held.
    """
    if not _KEEPS_ORDER:
        lock = threading.Lock()
        for _ in range(2):
            with lock:
                pass


def _tables(segment: _SharedSegment, geometry: Geometry) -> tuple[_Tables, Board]:
    """Return the tables as parts of a segment."""
    arrays = []
    offset = 0
    for nbytes in _table_nbytes(geometry):
        arrays.append(segment.array(offset, nbytes))
        offset += _rounded(nbytes, _ALIGNMENT)
    state, *words = arrays
    n_read, n_kept, n_staged, on_disk, slot_of, kept_at, sample_in, generation = (
        array.view(np.int64) for array in words
    )
    board = Board(n_read, n_kept, n_staged, on_disk, segment.locked)
    return _Tables(slot_of, kept_at, state, sample_in, generation), board


def _table_nbytes(geometry: Geometry) -> list[int]:
    """Return the size of each table: states, then words of ranks, of samples and of slots."""
    ranks = geometry.ranks_per_node
    samples = geometry.n_samples
    slots = geometry.n_slots
    return [slots, *(8 * count for count in (*[ranks] * 3, *[samples] * 3, *[slots] * 2))]


def flat(data: Pixels, nbytes: int, sample: int) -> NDArray[np.uint8]:
    """Return the bytes of a sample as a vector, without a copy.

    Raises:
        RunError: The sample has another size or type, or is not contiguous.
    """
    if data.dtype != np.uint8 or data.nbytes != nbytes or not data.flags.c_contiguous:
        raise RunError(
            f"sample {sample}: {data.dtype} {list(data.shape)} of strides {data.strides}; "
            f"must be contiguous uint8 of {nbytes} bytes"
        )
    return data.reshape(-1)


def _rounded(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
