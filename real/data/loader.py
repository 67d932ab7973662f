"""The reader of a rank: fills the batches of a plan's loads, each sample from where the plan says.

Samples in the own node's memory are copied at once. The others go to threads: *readers* fetch files and samples of
other nodes, *decoders* turn files into samples, so that the first is decoded while others are still read.

The plan has decided where each sample is; whatever is not there all the same (a peer has died, a file is damaged, a
process was killed before it wrote) comes from the next place: memory, peer, disk, storage. Storage has everything, so
a batch is complete and right, or the load fails with one error.

**Waiting for others.** A sample may be planned from memory, or from disk, which another rank of the node is only about
to bring there. Then the reader waits until that rank has passed its load, or at most `wait_s`.

**Leaving.** A sample that leaves a cache with load k may still be needed by ranks that are not there yet. It leaves
when all ranks of the node have read load k, and `grace` more loads, for the ranks of other nodes. One that a later load
has brought back by then stays. All ranks carry this out; the first one does it. A rank that closes its loader when all
ranks of the node have read all loads carries out everything: then the node's caches hold what the plan says.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import groupby

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
        self._reads = iter(reads)
        self._place = place
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
        rank = self._place.rank
        world_size = len(batch.samples)
        columns = batch.samples, batch.level, batch.owner, batch.keeps_memory, batch.keeps_disk
        values = [column[rank].tolist() for column in columns]
        outs = out.numpy().reshape(len(values[0]), -1)
        return [
            PlannedRead(
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


_ROOM_S = 0.005  # between two looks whether others have made room
_LOOK_UP_S = 0.1  # how often a wait looks whether the run has failed elsewhere


@dataclass(frozen=True, slots=True)
class LoaderLimits:
    """Bounds what a loader does at once, and how long.

    Args:
        readers: Files, or requests to peers, at a time.
        decoders: Samples decoded at a time.
        wait_s: For a sample that another rank is to bring, and for room in memory.
        timeout_s: Of a load.
        grace: Loads that ranks of other nodes may be behind those of this one.
    """

    readers: int = 8
    decoders: int = 1
    wait_s: float = 30.0
    timeout_s: float = 600.0
    grace: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LoadCounts:
    """Says what a load has done, which is what the plan says unless something failed.

    Args:
        n_samples: int64 `[len(LEVELS)]`, samples that came from each level.
        nbytes: Likewise: of files from disk and storage, of decoded samples from memory and peers.
        n_elsewhere: Samples that came from another level than planned.
        n_not_kept: Samples for which memory had no room.
    """

    n_samples: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    n_elsewhere: int
    n_not_kept: int


class LoadProgress:
    """Collects what threads report about the reads of a load.

    Args:
        where: The load, to begin messages with.
        reads: All of them.
        names: Of the files of all samples.
    """

    def __init__(self, where: str, reads: Sequence[PlannedRead], names: Sequence[str]) -> None:
        self.not_kept: list[PlannedRead] = []
        self._where = where
        self._names = names
        self._missing = {id(read): read for read in reads}
        self._n_samples, self._nbytes = np.zeros((2, len(LEVELS)), dtype=np.int64)
        self._n_elsewhere = 0
        self._error: RunError | None = None
        self._changed = threading.Condition()

    @property
    def is_over(self) -> bool:
        """Whether it has failed: no thread waits for it any more."""
        return self._error is not None

    def done(self, read: PlannedRead, came_from: int, nbytes: int, *, kept: bool = True) -> None:
        """Report a sample that is where it should be."""
        with self._changed:
            del self._missing[id(read)]
            self._n_samples[came_from] += 1
            self._nbytes[came_from] += nbytes
            self._n_elsewhere += came_from != read.planned
            if not kept:
                self.not_kept.append(read)
            self._changed.notify_all()

    def fail(self, read: PlannedRead | None, error: BaseException) -> None:
        """Report an error; the first one counts."""
        about = "" if read is None else f"sample {read.sample} ({self._names[read.sample]}): "
        reason = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        with self._changed:
            if self._error is None:
                self._error = RunError(f"{self._where}: {about}{reason}")
                self._error.__cause__ = error
            self._changed.notify_all()

    def wait(self, *, timeout_s: float, stop: threading.Event) -> None:
        """Wait until every sample is there.

        Raises:
            RunError: One failed, or the run has failed elsewhere, or time is over.
        """
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
        """Return what was done."""
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
        reads: Of all loads of the plan, in order.
        sources: Of files.
        place: Which rank this is.
        store: The node's memory.
        peers: The memory of other nodes, if there are any.
        limits: Threads and times.
        failed: Set when the run has failed; ends every wait.
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
        self._agenda = Agenda(reads, len(sources.index.names), place)
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
            number: Of the load, greater than that of the last one.
            out: uint8 `[batch, *shape]`, contiguous, in host memory.
            labels: int64 `[batch]`.

        Returns:
            Samples and bytes by level.

        Raises:
            RunError: A sample cannot be had; names it. Or the run has failed elsewhere, or time is over.
        """
        batch = self._agenda.advance(number)
        self._number = number
        mine = self._place.local_rank
        self._board.n_read[mine] = self._board.n_kept[mine] = number
        reads = self._agenda.rows(batch, out)
        labels.copy_(torch.from_numpy(self._sources.index.labels[batch.samples[self._place.rank]]))
        under_way = LoadProgress(f"load {number} of rank {self._place.rank}", reads, self._sources.index.names)
        self._start(reads, under_way)
        under_way.wait(timeout_s=self._limits.timeout_s, stop=self._failed)
        self._board.n_read[mine] = number + 1
        self._agenda.leaving.note(batch)
        self._keep_the_rest(under_way.not_kept)
        self._board.n_kept[mine] = number + 1
        return under_way.counts()

    def close(self) -> None:
        """End all threads, once what they are reading is there; the last rank of a node that has read all tidies up."""
        if not self._closed:
            self._leave_all()
        self._closed = True
        if self._peers is not None:
            self._peers.close()
        self._readers.shutdown(cancel_futures=True)
        self._decoders.shutdown(cancel_futures=True)

    def _leave_all(self) -> None:
        """Carry out what is still to leave if no rank of the node reads any more.

        Ranks of other nodes may still ask for it. They read it from elsewhere then, as this node is about to go.
        """
        n_read = self._number + 1
        if self._board.slowest() >= n_read > 0 and self._agenda.is_over():
            self._agenda.leaving.carry_out(n_read, self._store, self._sources.files, self._board)

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _start(self, reads: Sequence[PlannedRead], under_way: LoadProgress) -> None:
        """Give the slow reads to the threads, then copy from memory."""
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
        self, pool: ThreadPoolExecutor, under_way: LoadProgress, read: PlannedRead, function: Callable[[], None]
    ) -> None:
        """Let a thread do something for a sample; an error is the load's."""

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

    def _from_memory(self, read: PlannedRead, under_way: LoadProgress) -> None:
        """Wait for the rank that brings a sample; if it does not come, bring it."""
        if self._awaited(read.in_memory, self._store.__contains__) and self._store.get(read.sample, read.out):
            under_way.done(read, MEMORY, read.out.nbytes)
        else:
            self._from_files(read, under_way, keep=True)

    def _from_peer(self, reads: Sequence[PlannedRead], under_way: LoadProgress) -> None:
        """Ask a node for several samples; what it has not is read like anything else."""
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

    def _read_file(self, read: PlannedRead, under_way: LoadProgress) -> None:
        keep = read.keeps_memory
        self._submit(self._readers, under_way, read, partial(self._from_files, read, under_way, keep=keep))

    def _from_files(self, read: PlannedRead, under_way: LoadProgress, *, keep: bool) -> None:
        """Read a file; a decoder goes on with it. A file that is missing on disk is put there again."""
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

    def _keep_the_rest(self, reads: list[PlannedRead]) -> None:
        """Carry out what may leave; if memory had no room for some samples, keep them as others let more leave.

        Samples that leave with the last `grace` loads of this rank leave only when it goes on: no need to wait.
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


def _by_owner(reads: Sequence[PlannedRead], n_requests: int) -> Iterator[list[PlannedRead]]:
    """Cut reads into about so many requests, each to one node."""
    size = max(1, -(-len(reads) // n_requests))
    for _, group in groupby(sorted(reads, key=lambda read: read.owner), key=lambda read: read.owner):
        of_owner = list(group)
        yield from (of_owner[first : first + size] for first in range(0, len(of_owner), size))
