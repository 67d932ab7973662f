"""A node's cache of raw files on its own disk, shared by the processes and threads of the node.

    FOLDER/1f/0000031-9ad00f2b      sample 31, whose file has this CRC-32; 256 sub-folders by the sample's last byte
    FOLDER/parts/*                  being written; locked by their writers, so those of a killed writer can be told
    FOLDER/locks/*                  one lock for every 4096th sample: its fetcher; and one for all parts

* **Never a wrong byte.** A file appears under its name when it is whole, by a rename; its name holds the checksum of
  the index, so a file of another data set is not found; what is read is compared with size and checksum, and a
  damaged file is removed and fetched again. So no `fsync` is needed: what a crash of the machine spoils, is noticed.
* **One fetch per node.** The fetcher holds the lock of the sample; the others wait and find the file.
* **Bounded** by who decides which files are kept and which leave (`evict`, `keep_only`): the plan. A file for which the
  disk is full is handed on and not kept.

Locks are `flock`s, so the kernel drops those of a process that is killed. They are of files that stay empty or are
never replaced, and every lock has an open file of its own: it keeps out threads of the same process, too.

fsspec's own caches (`filecache`, `simplecache`) are not used: they have no checksum, no limit, and no lock that lets
one process of a node fetch for all.
"""

import errno
import fcntl
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import final

from real.data.sample_index import SampleIndex
from simdist.errors import RunError

N_LOCKS = 4096
_FULL = {errno.ENOSPC, errno.EDQUOT}


@final
class FileCache:
    """Keeps raw files of a data set in a folder.

    Args:
        folder: On the node's disk; made if it is not there. Only caches write there. Several data sets may share it.
        index: Of the data set.

    Raises:
        RunError: The folder cannot be used.
    """

    def __init__(self, folder: Path, index: SampleIndex) -> None:
        self._folder = folder
        self._index = index
        self._unwarned = threading.Lock()
        try:
            for each in (folder / "locks", folder / "parts"):
                each.mkdir(parents=True, exist_ok=True)
            self._clear_parts()
        except OSError as error:
            raise RunError(f"{error.filename or folder}: no cache can be here: {error.strerror}") from error

    def __contains__(self, sample: int) -> bool:
        """Tell whether a file of the sample's size is here; whether it is unchanged, `get` finds out."""
        try:
            return self._path(sample).lstat().st_size == self._index[sample].nbytes
        except FileNotFoundError:
            return False

    def get(self, sample: int) -> bytes | None:
        """Return the file of a sample if it is here, whole and unchanged; a damaged one is removed.

        Raises:
            RunError: It is here, and cannot be opened: too many open files, or it belongs to another user.
        """
        path = self._path(sample)
        try:
            content = _content(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in {errno.EIO, errno.ELOOP}:  # a disk which cannot read it any more; a link
                raise RunError(f"{path}: cannot be read: {error.strerror}") from error
            content = b""
        if not self._index[sample].matches(content):
            self._remove(path)
            return None
        return content

    def fetch(self, sample: int, read: Callable[[], bytes], *, keep: bool) -> bytes:
        """Return the file of a sample: from here, or by `read`; of all that ask at once, one reads and keeps it.

        Args:
            sample: Its number.
            read: Reads it elsewhere, and checks it; what it raises, is passed on, and the next one that waits tries for
                itself.
            keep: Keep what was read. Otherwise no thread waits for another.
        """
        if not keep:
            content = self.get(sample)
            return read() if content is None else content
        with ExitStack() as held:
            with suppress(OSError):  # no room even for a lock: every thread reads for itself
                held.enter_context(locked(self._folder / "locks" / f"{sample % N_LOCKS:03x}"))
            content = self.get(sample)
            if content is None:
                content = read()
                self._keep(sample, content)
            return content

    def evict(self, sample: int) -> bool:
        """Remove the file of a sample; return whether it was here."""
        return self._remove(self._path(sample))

    def keep_only(self, samples: Iterable[int]) -> int:
        """Remove all other files, of any data set, before more is kept; return how many there were."""
        wanted = {self._path(sample) for sample in samples}
        return sum(self._remove(path) for path in self._folder.glob("[0-9a-f][0-9a-f]/*") if path not in wanted)

    def _keep(self, sample: int, content: bytes) -> None:
        """Write a file and let it appear; warn, once, that files are not kept."""
        path = self._path(sample)
        try:
            with self._part() as (part, descriptor):
                _write_all(descriptor, content)
                path.parent.mkdir(exist_ok=True)
                os.replace(part, path)
        except OSError as error:
            if self._unwarned.acquire(blocking=False):
                why = "the disk is full" if error.errno in _FULL else str(error)
                unkept = "files are read from elsewhere and not kept from now on"
                warnings.warn(f"{self._folder}: {why}; {unkept}", RuntimeWarning, stacklevel=2)

    @contextmanager
    def _part(self) -> Iterator[tuple[Path, int]]:
        """Give a new file and its descriptor, locked while it is written, and gone afterwards."""
        part = self._folder / "parts" / secrets.token_hex(8)
        with locked(self._folder / "locks" / "parts"):  # a process that clears away looks only at files that are locked
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield part, descriptor
        finally:
            part.unlink(missing_ok=True)
            os.close(descriptor)

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink()
        except OSError:  # it is gone, or the disk takes no more changes: then it is found again, and compared again
            return False
        return True

    def _clear_parts(self) -> None:
        """Remove the unfinished files of writers that are gone: their locks are free."""
        with locked(self._folder / "locks" / "parts"):
            for part in (self._folder / "parts").iterdir():
                try:
                    descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                except FileNotFoundError:
                    continue
                if try_lock(descriptor):
                    part.unlink(missing_ok=True)
                os.close(descriptor)

    def _path(self, sample: int) -> Path:
        return self._folder / f"{sample % 256:02x}" / f"{sample:07d}-{int(self._index.crc32[sample]):08x}"


def _content(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read()


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the lock of a file, which is made if it is not there; gives its descriptor."""
    descriptor = open_own(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        # A forked child may hold a copy of the descriptor: closing is not enough.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def open_own(path: Path) -> int:
    """Open a file of this user, to which no other one has access, or make it; follow no link.

    Raises:
        PermissionError: It is another user's, who could change what is in it.
    """
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            with suppress(FileNotFoundError):  # removed meanwhile
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                break
        else:
            break
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(errno.EACCES, "it belongs to another user", str(path))
    return fd


def try_lock(fd: int) -> bool:
    """Lock a file exclusively unless another process or descriptor has locked it; return whether it could."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
