"""Memory that the processes of one machine share, without a name: the kernel frees it when the last of them ends.

One process makes it and tells the others its `path`, which leads to it as long as that process lives; they open it.
"""

import errno
import fcntl
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simdist.errors import RunError

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
