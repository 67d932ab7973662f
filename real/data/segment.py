"""Memory that the processes of one machine share, and that does not outlive them.

A segment is a file in `/dev/shm`. Every user holds a shared lock (flock) on it, which the kernel drops when the process
ends, however it ends. So a process gets an exclusive lock exactly if no other one uses the file:

* a process that opens it and gets that lock is the first, and overwrites what a killed one left there;
* a process that closes it and gets that lock is the last, and removes it;
* a process that starts something new tries every file of this kind, and removes those of killed processes.

Between finding a file and locking it, another process may remove it. Then it has no name any more: try again.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simdist.errors import RunError

SHARED_MEMORY = Path("/dev/shm")

_PREFIX = "simdist-"
_HEADER_NBYTES = 4096


class SharedSegment:
    """Opens a segment, or makes it: zeros to begin with.

    Args:
        name: Of the segment; processes that give the same name share it.
        nbytes: Its size.
        layout: Its layout in words; all users must agree.
        folder: Where it is; a file system in memory.

    Raises:
        RunError: There is no room, or others use a segment of this name with another layout.
    """

    def __init__(self, name: str, nbytes: int, *, layout: str, folder: Path = SHARED_MEMORY) -> None:
        self.path = folder / f"{_PREFIX}{name}"
        remove_stale(folder)
        self._fd = _open(self.path, _HEADER_NBYTES + nbytes, layout)
        try:
            self._check(layout)
            # Pages are found now, all at once: one by one, the first copies would be slow.
            self._map = mmap.mmap(self._fd, _HEADER_NBYTES + nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(self._fd)
            raise
        self._mutex_fd, self._mutex, self._pid = self._own_fd(), threading.Lock(), os.getpid()

    def array(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return a part of it. Memory is given back when the segment is closed and no part is held any more."""
        return np.frombuffer(self._map, np.uint8, nbytes, _HEADER_NBYTES + offset)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude all other threads and processes; a process that dies inside lets the others in."""
        if os.getpid() != self._pid:  # forked: a lock belongs to an open file, which the child shares with its parent
            self._mutex_fd, self._mutex, self._pid = self._own_fd(), threading.Lock(), os.getpid()
        with self._mutex:
            _record_lock(self._mutex_fd, fcntl.F_WRLCK)
            try:
                yield
            finally:
                _record_lock(self._mutex_fd, fcntl.F_UNLCK)

    def unlink(self) -> None:
        """Remove the name: its users keep the segment, no other process can open it, and nothing is left at the end.

        Call it when all users have opened the segment.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
                self.path.unlink()

    def close(self) -> None:
        """Leave; the last one removes the file."""
        del self._map
        os.close(self._mutex_fd)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        if try_lock(self._fd):
            self.unlink()
        os.close(self._fd)

    def _own_fd(self) -> int:
        """Open the file again, by a way that needs no name."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)

    def _check(self, layout: str) -> None:
        found = os.pread(self._fd, _HEADER_NBYTES, 0).rstrip(b"\0").decode(errors="replace")
        if found != layout:
            raise RunError(f"{self.path}: others share it as {found}, this process as {layout}; give it another name")


def remove_stale(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Remove segments without users; return which."""
    removed = []
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # removed meanwhile, or another user's
            continue
        if try_lock(fd) and os.fstat(fd).st_nlink:  # else the name may be that of a newer one
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
        os.close(fd)
    return removed


def _open(path: Path, nbytes: int, layout: str) -> int:
    """Return a file that is complete, and locked so that it is not removed."""
    while True:
        try:
            fd = open_own(path)
        except OSError as error:
            raise RunError(f"{path}: shared memory cannot be opened: {error.strerror}") from error
        try:
            if try_lock(fd) and os.fstat(fd).st_nlink:
                _write(fd, path, nbytes, layout)
            fcntl.flock(fd, fcntl.LOCK_SH)  # waits for its writer
            if os.fstat(fd).st_nlink and os.fstat(fd).st_size:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def open_own(path: Path) -> int:
    """Open a file of this user, to which no other one has access, or make it; follow no link.

    Raises:
        PermissionError: It is another user's, who could change what is in it.
    """
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                break
        else:
            break
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(errno.EACCES, "it belongs to another user", str(path))
    return fd


def _write(fd: int, path: Path, nbytes: int, layout: str) -> None:
    """Take the memory now: a file with holes would end the process that first writes where no memory is left."""
    os.ftruncate(fd, 0)
    try:
        room = os.statvfs(path.parent)
        if room.f_blocks and nbytes > room.f_bavail * room.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, nbytes)
        os.pwrite(fd, layout.encode(), 0)
    except OSError as error:
        os.ftruncate(fd, 0)
        path.unlink(missing_ok=True)
        left = room.f_bavail * room.f_frsize
        raise RunError(
            f"{path}: needs {nbytes:,} bytes of shared memory, {path.parent} has {left:,} left ({error.strerror}); "
            "keep fewer samples, or give it more room (docker run --shm-size, mount -o remount,size=)"
        ) from error


def try_lock(fd: int) -> bool:
    """Lock a file exclusively unless another process or descriptor has locked it; return whether it could."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _record_lock(fd: int, kind: int) -> None:
    """Lock or unlock the first byte: struct flock of 64-bit Linux. These locks belong to open files and ignore flock.

    Source: fcntl(2), "Open file description locks (non-POSIX)".
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0))
