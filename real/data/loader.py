"""The reader of a rank: fills the batches of a plan's loads, with each sample from its planned level.

Samples in the own node's memory are copied immediately. The others go to threads. *Readers* fetch files and samples of
other nodes. *Decoders* turn files into samples. So the first file is decoded while others are still being read.

The plan determines the level of each sample. If a sample is not there (a peer has died, a file is damaged, a process
was killed before it wrote), it comes from the next level: memory, peer, disk, storage. Storage has everything. So a
batch is complete and correct, or the load fails with one error.

Workers of a plan read whole batches instead: each load in the thread of its lane, one sample after the other.

**Waiting for others.** A sample may be planned from memory or disk before another rank of the node has brought it
there. Then the reader waits until that rank has passed its load, at most `wait_s`.

**Eviction.** A sample that leaves a cache with load k may still be needed by ranks that have not reached this load. So
it leaves when all ranks of the node have read load k, and `grace` more loads, for the ranks of other nodes. It stays if
a later load has brought it back by then. All ranks try to evict it; the first one does it. If a rank closes its loader
when all ranks of the node have read all loads, it performs all remaining evictions.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from real.data.filecache import FileCache
from real.data.memory import Board, MemoryStore, Want, wait_for
from real.data.peers import PeerClient
from real.data.sources import Sources
from real.processes.rendezvous import RankPlace
from real.recording.timing import give_way
from simdist.caching import BatchReads
from simdist.caching.lookup import DISK, MEMORY, PEER, STORAGE
from simdist.errors import RunError
from simdist.plan import LEVELS


@dataclass(frozen=True, slots=True, eq=False)
class _PlannedRead:
    """How to read one sample.

    Args:
        sample: Number of the sample.
        planned: Planned level, an index of `LEVELS`.
        owner: Node with the sample in memory, if any.
        keeps_memory: Memory keeps it afterwards.
        keeps_disk: The disk keeps its file.
        in_memory: The rank that brought it into the owner's memory, and the load.
        on_disk: The rank that brought its file to this node's disk, and the load.
        out: Target, uint8, flat.
    """

    sample: int
    planned: int
    owner: int
    keeps_memory: bool
    keeps_disk: bool
    in_memory: Want
    on_disk: Want
    out: NDArray[np.uint8]


class _Agenda:
    """Iterates over the loads of a plan for one rank."""

    def __init__(self, reads: Iterable[BatchReads], n_samples: int, place: RankPlace) -> None:
        self._reads = iter(reads)
        self._place = place
        self._brought_to_memory, self._brought_to_disk = np.full((2, n_samples), -1, dtype=np.int64)
        self._current: BatchReads | None = None
        self.leaving = Leaving(place)

    def advance(self, number: int) -> BatchReads:
        """Return how a load reads, after the earlier loads."""
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
        """Return whether the plan has no more loads; after a further load, nothing can be read any more."""
        return next(self._reads, None) is None

    def rows(self, batch: BatchReads, out: Tensor) -> list[_PlannedRead]:
        """Return how to read each sample of this rank.

        Args:
            batch: The load.
            out: uint8 `[batch, *shape]`, contiguous, in host memory.
        """
        rank = self._place.rank
        world_size = len(batch.samples)
        columns = batch.samples, batch.level, batch.owner, batch.keeps_memory, batch.keeps_disk
        values = [column[rank].tolist() for column in columns]
        outs = out.numpy().reshape(len(values[0]), -1)
        return [
            _PlannedRead(
                sample,
                planned,
                owner,
                keeps_memory,
                keeps_disk,
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
        """Record the samples that each rank brings with a load, and the evictions."""
        rank = np.arange(len(batch.samples))[:, None]
        accesses = np.broadcast_to(batch.number * len(rank) + rank, batch.samples.shape)
        self._brought_to_memory[batch.samples[batch.keeps_memory]] = accesses[batch.keeps_memory]
        here = batch.keeps_disk & (rank // self._place.local_world_size == self._place.node)
        self._brought_to_disk[batch.samples[here]] = accesses[here]


class Leaving:
    """Evicts samples from a node's caches when no rank needs them any more."""

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        self._loads: deque[tuple[int, list[int], list[int]]] = deque()  # number, samples in memory, and samples on disk

    def makes_room(self, n_read: int) -> bool:
        """Return whether any sample leaves memory with a number of first loads."""
        return any(memory for number, memory, _ in self._loads if number < n_read)

    def note(self, batch: BatchReads) -> None:
        """Record the evictions of this node with a load."""
        memory, disk = (
            [sample for node, sample in evicted if node == self._place.node]
            for evicted in (batch.evicted_memory, batch.evicted_disk)
        )
        if memory or disk:
            self._loads.append((batch.number, memory, disk))

    def carry_out(self, n_read: int, store: MemoryStore, files: FileCache | None, board: Board) -> None:
        """Evict the samples of loads that have been read, except those that a later load has brought back.

        Args:
            n_read: Number of loads that all ranks that may need the samples have read.
            store: The node's memory.
            files: Files on the node's disk.
            board: Board of the node.
        """
        while self._loads and self._loads[0][0] < n_read:
            number, memory, disk = self._loads.popleft()
            for sample in memory:
                store.evict(sample, number=number)
            if files is not None:
                for sample in disk:
                    board.leave_disk(sample, number, files.evict)


_ROOM_S = 0.005  # interval at which to check whether others have made room
_LOOK_UP_S = 0.1  # interval at which a wait checks whether the run has failed elsewhere


@dataclass(frozen=True, slots=True)
class LoaderLimits:
    """Limits on the threads and waits of a loader.

    Args:
        readers: Concurrent files or requests to peers.
        decoders: Samples decoded concurrently.
        wait_s: Longest wait for a sample that another rank brings, and for room in memory.
        timeout_s: Time limit of a load.
        grace: Number of loads by which ranks of other nodes may be behind those of this node.
    """

    readers: int = 8
    decoders: int = 1
    wait_s: float = 30.0
    timeout_s: float = 600.0
    grace: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LoadCounts:
    """The actual reads of a load, which match the plan unless something failed.

    Args:
        n_samples: int64 `[len(LEVELS)]`, samples that came from each level.
        nbytes: int64 `[len(LEVELS)]`, bytes of files from disk and storage, else of decoded samples.
        n_elsewhere: Samples that came from another level than planned.
        n_not_kept: Samples for which memory had no room.
    """

    n_samples: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    n_elsewhere: int
    n_not_kept: int


class _LoadProgress:
    """Collects the reports of threads on the reads of a load."""

    def __init__(self, where: str, reads: Sequence[_PlannedRead], names: Sequence[str]) -> None:
        self.not_kept: list[_PlannedRead] = []
        self._where = where
        self._names = names
        self._missing = {id(read): read for read in reads}
        self._n_samples, self._nbytes = np.zeros((2, len(LEVELS)), dtype=np.int64)
        self._n_elsewhere = 0
        self._error: RunError | None = None
        self._changed = threading.Condition()

    @property
    def is_over(self) -> bool:
        """Whether the load has failed, so that no thread waits for it any more."""
        return self._error is not None

    def done(self, read: _PlannedRead, came_from: int, nbytes: int, *, kept: bool = True) -> None:
        """Report a sample that is in its place."""
        with self._changed:
            del self._missing[id(read)]
            self._n_samples[came_from] += 1
            self._nbytes[came_from] += nbytes
            self._n_elsewhere += came_from != read.planned
            if not kept:
                self.not_kept.append(read)
            self._changed.notify_all()

    def fail(self, read: _PlannedRead | None, error: BaseException) -> None:
        """Report an error; the first one counts."""
        about = "" if read is None else f"sample {read.sample} ({self._names[read.sample]}): "
        reason = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        with self._changed:
            if self._error is None:
                self._error = RunError(f"{self._where}: {about}{reason}")
                self._error.__cause__ = error
            self._changed.notify_all()

    def wait(self, *, timeout_s: float, stop: threading.Event) -> None:
        """Wait until all samples are there."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self._missing and self._error is None:
                if stop.is_set():
                    self._error = RunError(f"{self._where}: the run has failed")
                elif time.monotonic() > deadline_s:
                    self._error = RunError(self._late(timeout_s))
                else:
                    self._changed.wait(_LOOK_UP_S)
        if self._error is not None:
            raise self._error

    def counts(self) -> LoadCounts:
        """Return the actual reads."""
        return LoadCounts(self._n_samples, self._nbytes, self._n_elsewhere, len(self.not_kept))

    def _late(self, timeout_s: float) -> str:
        first = next(iter(self._missing.values()))
        return (
            f"{self._where}: {len(self._missing)} samples have not come in {timeout_s:g} s, among them sample "
            f"{first.sample} ({self._names[first.sample]}), planned from {LEVELS[first.planned]}"
        )


class Loader(AbstractContextManager["Loader"]):
    """Fills batches, one load at a time, in order.

    Args:
        reads: Reads of all loads of the plan, in order.
        sources: Sources of files.
        place: Place of this rank.
        store: The node's memory.
        peers: The memory of other nodes, if there are any.
        limits: Threads and times.
        failed: Set when the run has failed, which ends all waits.
    """

    def __init__(
        self,
        reads: Iterable[BatchReads],
        sources: Sources,
        *,
        place: RankPlace,
        store: MemoryStore,
        failed: threading.Event,
        peers: PeerClient | None = None,
        limits: LoaderLimits | None = None,
    ) -> None:
        self._agenda = _Agenda(reads, len(sources.index.names), place)
        self._sources = sources
        self._place = place
        self._store = store
        self._board = store.board
        self._peers = peers
        self._failed = failed
        self._limits = limits or LoaderLimits()
        self._number = -1
        self._closed = False
        self._readers = ThreadPoolExecutor(self._limits.readers, "read", initializer=give_way)
        self._decoders = ThreadPoolExecutor(self._limits.decoders, "decode", initializer=give_way)

    def load(self, number: int, out: Tensor, labels: Tensor) -> LoadCounts:
        """Fill a batch.

        Args:
            number: Number of the load, greater than the last one.
            out: uint8 `[batch, *shape]`, contiguous, in host memory.
            labels: int64 `[batch]`.

        Returns:
            Samples and bytes by level.

        Raises:
            RunError: A sample cannot be read (the error names it), the run has failed elsewhere, or took too long.
        """
        batch = self._agenda.advance(number)
        self._number = number
        mine = self._place.local_rank
        self._board.n_read[mine] = self._board.n_kept[mine] = number
        reads = self._agenda.rows(batch, out)
        labels.copy_(torch.from_numpy(self._sources.index.labels[batch.samples[self._place.rank]]))
        under_way = _LoadProgress(f"load {number} of rank {self._place.rank}", reads, self._sources.index.names)
        self._start(reads, under_way)
        under_way.wait(timeout_s=self._limits.timeout_s, stop=self._failed)
        self._board.n_read[mine] = number + 1
        self._agenda.leaving.note(batch)
        self._keep_the_rest(under_way.not_kept)
        self._board.n_kept[mine] = number + 1
        return under_way.counts()

    def close(self) -> None:
        """End all threads after their current reads; the last rank of a node that has read all loads cleans up."""
        if not self._closed:
            self._leave_all()
        self._closed = True
        if self._peers is not None:
            self._peers.close()
        self._readers.shutdown(cancel_futures=True)
        self._decoders.shutdown(cancel_futures=True)

    def _leave_all(self) -> None:
        """Perform the remaining evictions if no rank of the node reads any more.

        Ranks of other nodes may still request these samples. Then they read them elsewhere.
        """
        n_read = self._number + 1
        if self._board.slowest() >= n_read > 0 and self._agenda.is_over():
            self._agenda.leaving.carry_out(n_read, self._store, self._sources.files, self._board)

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _start(self, reads: Sequence[_PlannedRead], under_way: _LoadProgress) -> None:
        """Hand the slow reads to the threads, then copy from memory."""
        for some in _by_owner([read for read in reads if read.planned == PEER], self._limits.readers):
            self._submit(self._readers, under_way, some[0], partial(self._from_peer, some, under_way))
        for read in reads:
            if read.planned in (DISK, STORAGE):
                self._read_file(read, under_way)
        local = [read for read in reads if read.planned == MEMORY]
        there = self._store.get_many([read.sample for read in local], [read.out for read in local])
        for read, is_there in zip(local, there, strict=True):
            if is_there:
                under_way.done(read, MEMORY, read.out.nbytes)
            else:
                self._submit(self._readers, under_way, read, partial(self._from_memory, read, under_way))

    def _submit(
        self, pool: ThreadPoolExecutor, under_way: _LoadProgress, read: _PlannedRead, function: Callable[[], None]
    ) -> None:
        """Run a task for a sample in a thread; an error fails the load."""

        def run() -> None:
            if under_way.is_over or self._closed:
                return
            try:
                function()
            except Exception as error:
                under_way.fail(read, error)

        try:
            pool.submit(run)
        except RuntimeError:
            under_way.fail(read, RunError("the loader was closed"))

    def _from_memory(self, read: _PlannedRead, under_way: _LoadProgress) -> None:
        """Wait for the rank that brings a sample; if it does not arrive, read the sample here."""
        if self._awaited(read.in_memory, self._store.__contains__) and self._store.get(read.sample, read.out):
            under_way.done(read, MEMORY, read.out.nbytes)
        else:
            self._from_files(read, under_way, keep=True)

    def _from_peer(self, reads: Sequence[_PlannedRead], under_way: _LoadProgress) -> None:
        """Request several samples from a node; missing ones are read like all others."""
        there = [False] * len(reads)
        if self._peers is not None:
            wants = [read.in_memory for read in reads]
            outs = [read.out for read in reads]
            there = self._peers.get_many(reads[0].owner, wants, outs, wait_s=self._limits.wait_s)
        for read, is_there in zip(reads, there, strict=True):
            if is_there:
                under_way.done(read, PEER, read.out.nbytes)
            else:
                self._read_file(read, under_way)

    def _read_file(self, read: _PlannedRead, under_way: _LoadProgress) -> None:
        keep = read.keeps_memory
        self._submit(self._readers, under_way, read, partial(self._from_files, read, under_way, keep=keep))

    def _from_files(self, read: _PlannedRead, under_way: _LoadProgress, *, keep: bool) -> None:
        """Read a file and pass it to a decoder. A file that is missing on disk is written again."""
        keeps_file = read.keeps_disk or read.planned == DISK
        if read.planned == DISK:
            self._awaited(read.on_disk, lambda _: False)
        if keeps_file:
            self._board.keep_on_disk(read.sample, self._number)
        data, came_from = self._sources.read(read.sample, planned=read.planned, keep=keeps_file)

        def decode() -> None:
            self._sources.decode_into(read.sample, data, read.out)
            kept = not keep or self._store.put(read.sample, read.out, number=self._number)
            under_way.done(read, came_from, len(data), kept=kept)

        self._submit(self._decoders, under_way, read, decode)

    def _awaited(self, want: Want, is_there: Callable[[int], bool]) -> bool:
        return wait_for(want, is_there, self._board, wait_s=self._limits.wait_s, stop=self._failed)

    def _keep_the_rest(self, reads: list[_PlannedRead]) -> None:
        """Perform possible evictions; if memory had no room for some samples, keep them as others make room.

        Samples of the last `grace` loads of this rank leave only when it continues, so waiting for them is useless.
        """
        leaving = self._agenda.leaving
        deadline_s = time.monotonic() + self._limits.wait_s
        n_mine = self._number + 1 - self._limits.grace
        while True:
            n_read = self._board.slowest() - self._limits.grace
            leaving.carry_out(n_read, self._store, self._sources.files, self._board)
            reads[:] = [read for read in reads if not self._store.put(read.sample, read.out, number=self._number)]
            over = time.monotonic() > deadline_s
            if not reads or over or not leaving.makes_room(n_mine) or self._failed.wait(_ROOM_S):
                return


@final
class WorkerLoader(AbstractContextManager["WorkerLoader"]):
    """Fills batches, several at once: each in the thread that asks for it, one sample after the other.

    Threads begin their loads in any order, and a load may end before an earlier one. Others see those up to the first
    open one.

    Args:
        reads: Reads of all loads of the plan, in order, from disk and storage.
        sources: Sources of files.
        place: Place of this rank.
        store: The node's memory, which keeps nothing.
        limits: Times.
        failed: Set when the run has failed, which ends all waits.
    """

    def __init__(
        self,
        reads: Iterable[BatchReads],
        sources: Sources,
        *,
        place: RankPlace,
        store: MemoryStore,
        failed: threading.Event,
        limits: LoaderLimits,
    ) -> None:
        self._agenda = _Agenda(reads, len(sources.index.names), place)
        self._sources = sources
        self._place = place
        self._store = store
        self._failed = failed
        self._limits = limits
        self._turn = threading.Lock()
        self._n_planned = 0
        self._planned: dict[int, tuple[BatchReads, list[_PlannedRead]]] = {}
        self._over: set[int] = set()
        self._n_over: int | None = None  # the first load that is not over, from the first that began

    def load(self, number: int, out: Tensor, labels: Tensor) -> LoadCounts:
        """Fill a batch, see `Loader.load`. Each number is asked for once."""
        batch, reads = self._begin(number)
        rows = out.numpy().reshape(len(reads), -1)
        reads = [replace(read, out=row) for read, row in zip(reads, rows, strict=True)]
        labels.copy_(torch.from_numpy(self._sources.index.labels[batch.samples[self._place.rank]]))
        under_way = _LoadProgress(f"load {number} of rank {self._place.rank}", reads, self._sources.index.names)
        for read in reads:
            if self._failed.is_set() or under_way.is_over:
                break
            try:
                self._read(number, read, under_way)
            except Exception as error:
                under_way.fail(read, error)
        under_way.wait(timeout_s=self._limits.timeout_s, stop=self._failed)
        self._end(number)
        return under_way.counts()

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Perform the remaining evictions if no rank of the node reads any more."""
        n_over = self._n_over or 0
        board = self._store.board
        if board.slowest() >= n_over > 0 and self._agenda.is_over():
            self._agenda.leaving.carry_out(n_over, self._store, self._sources.files, board)

    def _begin(self, number: int) -> tuple[BatchReads, list[_PlannedRead]]:
        """Return how a load reads. Where samples come from depends on the loads before, so all are planned in order."""
        with self._turn:
            while self._n_planned <= number:
                batch = self._agenda.advance(self._n_planned)
                self._planned[self._n_planned] = batch, self._agenda.rows(batch, torch.empty(0, dtype=torch.uint8))
                self._planned.pop(self._n_planned - 2 * self._limits.grace, None)  # of a run before this one
                self._n_planned += 1
            if number not in self._planned:
                raise RunError(f"load {number} of rank {self._place.rank}: it was asked for before")
            self._n_over = number if self._n_over is None else min(self._n_over, number)
            batch, reads = self._planned.pop(number)
            self._agenda.leaving.note(batch)
            self._show(self._n_over)
            return batch, reads

    def _end(self, number: int) -> None:
        """Note that a load is over, and evict what no rank needs any more."""
        with self._turn:
            self._over.add(number)
            n_over = self._n_over or 0
            while n_over in self._over:
                n_over += 1
            self._over.discard(n_over - 2 * self._limits.grace)  # no load that far back is under way
            self._n_over = n_over
            self._show(n_over)
            board = self._store.board
            n_read = board.slowest() - self._limits.grace
            self._agenda.leaving.carry_out(n_read, self._store, self._sources.files, board)

    def _show(self, n_over: int) -> None:
        mine = self._place.local_rank
        self._store.board.n_read[mine] = self._store.board.n_kept[mine] = n_over

    def _read(self, number: int, read: _PlannedRead, under_way: _LoadProgress) -> None:
        """Read a file and decode it. A file that is missing on disk is written again."""
        keeps_file = read.keeps_disk or read.planned == DISK
        if read.planned == DISK:
            board = self._store.board
            wait_for(read.on_disk, lambda _: False, board, wait_s=self._limits.wait_s, stop=self._failed)
        if keeps_file:
            self._store.board.keep_on_disk(read.sample, number)
        data, came_from = self._sources.read(read.sample, planned=read.planned, keep=keeps_file)
        self._sources.decode_into(read.sample, data, read.out)
        under_way.done(read, came_from, len(data))


def _by_owner(reads: Sequence[_PlannedRead], n_requests: int) -> Iterator[list[_PlannedRead]]:
    """Divide reads into about a given number of requests, each to one node."""
    size = max(1, -(-len(reads) // n_requests))
    for _, group in groupby(sorted(reads, key=lambda read: read.owner), key=lambda read: read.owner):
        of_owner = list(group)
        yield from (of_owner[first : first + size] for first in range(0, len(of_owner), size))
