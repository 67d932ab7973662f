"""A node's store of decoded samples: shared memory that all its ranks read and write.

Samples have one size, so memory is a row of equal slots, and a table says which sample is in which slot. Which samples
live here is decided elsewhere; a store only refuses what it has no room for.

**Writing.** Under the lock a writer takes an empty slot; without it, it copies; under the lock again, it enters the
sample into the table. A writer that is killed while it copies leaves a slot that no sample points to; the run ends.

**Reading** takes no lock. A slot has a number that grows whenever its sample leaves. A reader that finds the same
number after its copy as before has read one sample, whole; else the sample has left while it read, and is not there.
This needs reads of memory in the order of the program. x86-64 keeps it; for others, as ARM, there is a fence between
the looks at the tables and the copy.

A table of zeros is an empty store: fields that may have no value hold it plus one.

The memory has no name: the kernel frees it when the last of the processes that share it ends. One of them makes it and
tells the others its `path`, which leads to it as long as that process lives; they open it.

**Board.** In the same memory, ranks tell how far they have come with their loads. A rank says two things of load k, in
this order: that it *has read* all its samples, so that it needs nothing any more that leaves the caches with load k;
and that it *has kept* what it had to, so that others find it. Between the two it may have to wait for room, which
others make once all have read.
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

from real.processes.heartbeat import ranks_have
from simdist.errors import RunError

_LOOK_AGAIN_S = 0.002
_HAS_LEFT = -1


@dataclass(frozen=True, slots=True)
class Want:
    """Names a sample, and when it came into a node's memory.

    Args:
        sample: Which.
        local_rank: The rank of the node, from 0, that kept it.
        number: The load in which it did; -1 if that is not known: then it is not waited for.
    """

    sample: int
    local_rank: int = 0
    number: int = -1


@dataclass(frozen=True, slots=True)
class Board:
    """Tells the ranks of a node how far each of them is.

    Args:
        n_read: int64 `[ranks_per_node]`, loads that each rank has read.
        n_kept: int64 `[ranks_per_node]`, loads that each rank has also kept.
        n_staged: int64 `[ranks_per_node]`, how often each rank has staged its files.
        kept_on_disk: int64 `[n_samples]`, 1 + the last load that keeps a sample on the node's disk; 0 if none has yet;
            -1 if it has left since.
        locked: Excludes the other ranks.
    """

    n_read: NDArray[np.int64]
    n_kept: NDArray[np.int64]
    n_staged: NDArray[np.int64]
    kept_on_disk: NDArray[np.int64]
    locked: Callable[[], AbstractContextManager[None]]

    def slowest(self) -> int:
        """Return how many loads all ranks of the node have read."""
        return int(self.n_read.min())

    def keep_on_disk(self, sample: int, number: int) -> None:
        """Say, before a load keeps a file on disk, that it is to stay there."""
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
    """Wait until a sample is in memory, or its rank has passed the load in which it kept it, or time is over.

    Args:
        want: The sample.
        is_there: Whether a sample is in this node's memory.
        board: Of this node.
        wait_s: At most.
        stop: Ends the wait when set.

    Returns:
        Whether it is there.
    """
    deadline_s = time.monotonic() + wait_s
    while not is_there(want.sample):
        if board.n_kept[want.local_rank] > want.number:
            return is_there(want.sample)  # it may have come between the two looks
        if time.monotonic() >= deadline_s or stop.wait(_LOOK_AGAIN_S):
            return False
    return True


def wait_until_all_staged(
    board: Board, local_rank: int, *, first_rank: int, timeout_s: float, stop: threading.Event
) -> None:
    """Note that a rank has staged its files, and wait until every rank of its node has done so as often.

    Args:
        board: Of this node.
        local_rank: This one.
        first_rank: Of the node.
        timeout_s: For the last one.
        stop: Ends the wait when set.

    Raises:
        RunError: Names the ranks that have not come; or the run has failed.
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


SHARED_MEMORY = Path("/dev/shm")


class SharedSegment:
    """Makes a segment, zeros to begin with, or opens that of another process.

    Args:
        nbytes: Its size.
        path: Of the other process's segment; None makes one.
        folder: Where it is made; a file system in memory.

    Raises:
        RunError: There is no room, or nothing at the path.
    """

    def __init__(self, nbytes: int, *, path: str | None = None, folder: Path = SHARED_MEMORY) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0) if path is None else open(path, "r+b", 0)  # noqa: SIM115
        except OSError as error:
            raise RunError(f"{path or folder}: shared memory cannot be opened: {error.strerror}") from error
        self.path = path or f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        try:
            if path is None:
                _take(self._file.fileno(), folder, nbytes)
            # Pages are found now, all at once: one by one, the first copies would be slow.
            self._map = mmap.mmap(self._file.fileno(), nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            self._file.close()
            raise
        self._mutex = threading.Lock()

    def array(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return a part of it. Memory is given back when the segment is closed and no part is held any more."""
        return np.frombuffer(self._map, np.uint8, nbytes, offset)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude all other threads and processes; a process that dies inside lets the others in."""
        with self._mutex:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Leave it."""
        del self._map
        self._file.close()


def _take(descriptor: int, folder: Path, nbytes: int) -> None:
    """Take the memory now: a file with holes would end the process that first writes where no memory is left."""
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
    """

    slot_of: NDArray[np.int64]
    kept_at: NDArray[np.int64]
    state: NDArray[np.uint8]
    sample_in: NDArray[np.int64]
    generation: NDArray[np.int64]


class MemoryStore:
    """Shares decoded samples among the processes of a node: one makes it, the others open it at its `path`.

    Its `board` tells how far the ranks that share it are.

    Args:
        geometry: How large it is; the ranks agree.
        path: Of the store that another process has made; None makes one.
        folder: Where it is made; a file system in memory.

    Raises:
        RunError: There is no room for it, or it is not there.
    """

    def __init__(self, geometry: Geometry, *, path: str | None = None, folder: Path = SHARED_MEMORY) -> None:
        self.geometry = geometry
        stride = _rounded(geometry.sample_nbytes, _ALIGNMENT)
        begin = _rounded(sum(_rounded(nbytes, _ALIGNMENT) for nbytes in _table_nbytes(geometry)), _PAGE_NBYTES)
        self._segment = SharedSegment(begin + geometry.n_slots * stride, path=path, folder=folder)
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
            self._tables.generation[slot] += 1
            self._tables.slot_of[sample] = 0
            self._tables.state[slot] = _EMPTY
        return True

    def close(self) -> None:
        """Leave; the store cannot be used any more."""
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

    def _find_empty(self) -> int | None:
        state = self._tables.state
        return found if state.size and state[found := int(np.argmin(state))] == _EMPTY else None

    def _publish(self, sample: int, slot: int, number: int) -> None:
        """Enter a sample; if another writer was faster, leave its."""
        tables = self._tables
        if self._note_kept(sample, number):
            tables.state[slot] = _EMPTY
            return
        tables.kept_at[sample] = number + 1
        tables.sample_in[slot] = sample
        tables.slot_of[sample] = slot + 1
        tables.state[slot] = _READY


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
