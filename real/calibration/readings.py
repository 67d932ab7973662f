"""Which files a measurement of a level reads, and how the page cache of this machine is kept out of it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from real.data.index import Index
from real.data.storages import FilesystemStorage, Storage
from real.processes.launch import Place

N_ALONE = 32  # files of one thread


@dataclass(frozen=True, slots=True)
class Readings:
    """Says which samples a rank reads in each of the three readings of a level.

    Args:
        alone: By one thread of rank 0; others leave them out.
        of_node: By the ranks of the first node; others leave them out.
        of_all: By all ranks.
        n_alone: How often each of `alone` is read; the quickest time counts.
        said: What is to be known about them.
    """

    alone: tuple[int, ...]
    of_node: tuple[int, ...]
    of_all: tuple[int, ...]
    n_alone: int
    said: str


def fresh_readings(place: Place, n_each: int, n_samples: int) -> Readings:
    """Return readings of which no two ranks, and no two readings, have a sample in common; as far as there are enough.

    Args:
        place: Of the rank that asks.
        n_each: Samples of a rank in a reading.
        n_samples: Of the data set.
    """
    n_alone = min(N_ALONE, n_each)
    begin_of_node = n_alone
    begin_of_all = begin_of_node + place.local_world_size * n_each
    n_wanted = begin_of_all + place.world_size * n_each

    def part(begin: int) -> tuple[int, ...]:
        return tuple(number % n_samples for number in range(begin, begin + n_each))

    said = "every file was read once"
    if n_wanted > n_samples:
        said = f"of {n_wanted} reads {n_wanted - n_samples} were of files read before, for the data set has no more"
    return Readings(
        alone=tuple(range(n_alone)) if place.rank == 0 else (),
        of_node=part(begin_of_node + place.rank * n_each) if place.rank < place.local_world_size else (),
        of_all=part(begin_of_all + place.rank * n_each),
        n_alone=1,
        said=said,
    )


def same_readings(samples: Sequence[int]) -> Readings:
    """Return readings of the same samples, for a level where they are kept."""
    mine = tuple(samples)
    return Readings(mine[:N_ALONE], mine, mine, n_alone=2, said="every file was read several times")


def drop_cached(storage: Storage, index: Index, samples: Sequence[int]) -> bool:
    """Drop what this machine's kernel holds of samples' files; return whether it could.

    Source: posix_fadvise(2): POSIX_FADV_DONTNEED frees clean pages, so those to be written are written first.
    """
    folder = storage.local_folder if isinstance(storage, FilesystemStorage) else None
    if folder is None:
        return False
    try:
        for sample in samples:
            descriptor = os.open(folder / index.names[sample], os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    except OSError:  # a file system that cannot; or no such file, which reading it tells better
        return False
    return True


def kernel_caches(storage: Storage, dropped: bool) -> str:
    """Say what the page cache of the nodes had to do with reads from a storage."""
    if not isinstance(storage, FilesystemStorage) or storage.local_folder is None:
        return "read without a page cache of the nodes"
    if dropped:
        return "pages of the files were dropped from the nodes' caches before"
    return "the nodes' page caches may have held the files"
