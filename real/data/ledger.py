"""How full a folder is that several processes write to: one number in a file, changed under a lock.

Locks are `flock`s, so the kernel lets go of those of a process that is killed. They are of files that stay empty or are
never replaced, and every lock has an open file of its own: it keeps out threads of the same process, too.

A process that is killed between two steps may leave a sum that is too large, never one that is too small, and the
next one that has the folder to itself counts anew.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the lock of a file, which is made if it is not there; gives its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        # A forked child may hold a copy of the descriptor: closing is not enough.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@final
class Ledger:
    """Knows how many bytes are kept in a folder.

    Args:
        path: Of its file.
        capacity_nbytes: No more than this is reserved; None: no limit.
    """

    def __init__(self, path: Path, capacity_nbytes: int | None) -> None:
        self._path = path
        self._capacity_nbytes = capacity_nbytes

    def used_nbytes(self) -> int:
        """Return the bytes that are reserved."""
        with locked(self._path) as descriptor:
            return _read(descriptor)

    def recount(self, count: Callable[[], int]) -> None:
        """Replace the sum by what `count` finds, while nobody else changes it."""
        with locked(self._path) as descriptor:
            _write(descriptor, count())

    def reserve(self, nbytes: int, *, make_room: Callable[[int], int] | None = None) -> bool:
        """Add bytes if they fit.

        Args:
            nbytes: To add.
            make_room: Called with the bytes that are too many, while the lock is held; returns those it freed.
        """
        with locked(self._path) as descriptor:
            used_nbytes = _read(descriptor)
            if self._capacity_nbytes is not None and nbytes <= self._capacity_nbytes and make_room is not None:
                missing_nbytes = used_nbytes + nbytes - self._capacity_nbytes
                used_nbytes -= make_room(missing_nbytes) if missing_nbytes > 0 else 0
            fits = self._capacity_nbytes is None or used_nbytes + nbytes <= self._capacity_nbytes
            _write(descriptor, max(0, used_nbytes) + (nbytes if fits else 0))
            return fits

    def give_back(self, nbytes: int) -> None:
        """Subtract bytes that are no longer kept."""
        with locked(self._path) as descriptor:
            _write(descriptor, max(0, _read(descriptor) - nbytes))


def _read(descriptor: int) -> int:
    text = os.pread(descriptor, 32, 0)
    return int(text) if text.strip().isdigit() else 0  # a new file is empty


def _write(descriptor: int, nbytes: int) -> None:
    os.pwrite(descriptor, b"%20d\n" % nbytes, 0)  # always as long, and in one call: never half a number
