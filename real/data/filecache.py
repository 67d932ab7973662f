"""A node's cache of raw files on its own disk, shared by the processes and threads of the node.

    FOLDER/1f/0000031-9ad00f2b      sample 31, whose file has this CRC-32; 256 sub-folders by the sample's last byte
    FOLDER/parts/*                  being written; locked by their writers, so those of a killed writer can be told
    FOLDER/locks/*                  one lock for every 4096th sample: its fetcher; and one for all users of the cache
    FOLDER/used                     how many bytes are kept

* **Never a wrong byte.** A file appears under its name when it is whole, by a rename; its name holds the checksum of
  the index, so a file of another data set is not found; what is read is compared with size and checksum, and a
  damaged file is removed and fetched again. So no `fsync` is needed: what a crash of the machine spoils, is noticed.
* **One fetch per node.** The fetcher holds the lock of the sample; the others wait and find the file.
* **Bounded.** Bytes are reserved before they are written. A file for which the disk is full is handed on and not
  kept. Which files leave decides the caller (`evict`), or, without a plan, age (`eviction="lru"`). A process that is
  killed between two steps may leave a sum of bytes that is too large, never one that is too small; the next one that
  has the folder to itself counts again.

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
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal, final

from real.data.sample_index import SampleIndex
from simdist.errors import RunError, ScenarioError

N_LOCKS = 4096
FREED_AT_ONCE = 0.05  # share of the capacity that is freed beyond need when the oldest leave: looking through is dear
_FULL = {errno.ENOSPC, errno.EDQUOT}


@final
class FileCache(AbstractContextManager["FileCache"]):
    """Keeps raw files of a data set in a folder; use it in a `with` statement, or close it.

    Args:
        folder: On the node's disk; made if it is not there. Only caches write there. Several data sets may share it.
        index: Of the data set.
        capacity_nbytes: Of all files in the folder, the same for all processes; None: what the disk holds.
        eviction: `none`: a full cache keeps what it has; `lru`: the files leave that were not used for longest.
        now_ns: Clock for their use, the same for all processes, in nanoseconds.

    Raises:
        RunError: The folder cannot be used.
        ScenarioError: The capacity is negative.
    """

    def __init__(
        self,
        folder: Path,
        index: SampleIndex,
        *,
        capacity_nbytes: int | None,
        eviction: Literal["none", "lru"] = "none",
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if capacity_nbytes is not None and capacity_nbytes < 0:
            raise ScenarioError(f"capacity_nbytes is {capacity_nbytes}: write 0 or more")
        self._folder = folder
        self._index = index
        self._eviction = eviction
        self._now_ns = now_ns
        self._capacity_nbytes = capacity_nbytes
        self._used = folder / "used"
        self._unwarned = threading.Lock()
        self._users: int | None = None
        try:
            self._users = self._join()
        except OSError as error:
            self.close()
            raise RunError(f"{error.filename or folder}: no cache can be here: {error.strerror}") from error

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop using the cache; its files stay."""
        if self._users is not None:
            os.close(self._users)
            self._users = None

    def used_nbytes(self) -> int:
        """Return the bytes that all processes keep in the folder."""
        with locked(self._used) as descriptor:
            return _read(descriptor)

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
        if self._eviction == "lru":
            self._touch(path)
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
        return sum(self._remove(path) for path, _ in self._files() if path not in wanted)

    def _keep(self, sample: int, content: bytes) -> None:
        try:
            if not self._reserve(len(content)):
                self._warn(f"its {self._capacity_nbytes} bytes are full")
                return
            self._publish(self._path(sample), content)
        except OSError as error:
            self._warn("the disk is full" if error.errno in _FULL else str(error))

    def _reserve(self, nbytes: int) -> bool:
        """Count bytes as kept, if they fit; what is not used for longest makes room for them, if that may leave."""
        with locked(self._used) as descriptor:
            used_nbytes, capacity_nbytes = _read(descriptor), self._capacity_nbytes
            if capacity_nbytes is None:
                fits = True
            else:
                missing_nbytes = used_nbytes + nbytes - capacity_nbytes
                if missing_nbytes > 0 and nbytes <= capacity_nbytes and self._eviction == "lru":
                    used_nbytes -= self._evict_oldest(missing_nbytes)
                fits = used_nbytes + nbytes <= capacity_nbytes
            _write(descriptor, max(0, used_nbytes) + (nbytes if fits else 0))
            return fits

    def _give_back(self, nbytes: int) -> None:
        """Count bytes as no longer kept."""
        self._change_used(lambda used_nbytes: used_nbytes - nbytes)

    def _change_used(self, new: Callable[[int], int]) -> None:
        """Replace the sum by one that is made of it, while it cannot change."""
        with locked(self._used) as descriptor:
            _write(descriptor, max(0, new(_read(descriptor))))

    def _publish(self, path: Path, content: bytes) -> None:
        """Write a file and let it appear; what was reserved for it is given back if that fails."""
        try:
            with self._part() as (part, descriptor):
                _write_all(descriptor, content)
                path.parent.mkdir(exist_ok=True)
                if self._eviction == "lru":
                    self._touch(part)
                os.replace(part, path)
        except BaseException:
            self._give_back(len(content))
            raise

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

    def _warn(self, why: str) -> None:
        """Warn, once, that files are not kept."""
        if self._unwarned.acquire(blocking=False):
            warnings.warn(
                f"{self._folder}: {why}; files are read from elsewhere and not kept from now on", RuntimeWarning, 3
            )

    def _remove(self, path: Path) -> bool:
        try:
            nbytes = path.lstat().st_size
            path.unlink()
        except OSError:  # it is gone, or the disk takes no more changes: then it is found again, and compared again
            return False
        self._give_back(nbytes)
        return True

    def _touch(self, path: Path) -> None:
        now_ns = self._now_ns()
        with suppress(OSError):  # evicted meanwhile, or a disk that takes no more changes
            os.utime(path, ns=(now_ns, now_ns))

    def _evict_oldest(self, missing_nbytes: int) -> int:
        """Remove the files that were not used for longest, and a few more if they are small; return the bytes freed."""
        most_nbytes = missing_nbytes + int(FREED_AT_ONCE * (self._capacity_nbytes or 0))
        freed_nbytes = 0
        for _, nbytes, path in sorted((each.st_mtime_ns, each.st_size, path) for path, each in self._files()):
            if freed_nbytes >= missing_nbytes and freed_nbytes + nbytes > most_nbytes:
                break
            try:
                path.unlink()
            except FileNotFoundError:  # another process did, and gives its bytes back
                continue
            freed_nbytes += nbytes
        return freed_nbytes

    def _join(self) -> int:
        """Make the folder, clear away what killed processes left, and count if no other uses it; return the lock."""
        for each in (self._folder / "locks", self._folder / "parts"):
            each.mkdir(parents=True, exist_ok=True)
        users = open_own(self._folder / "locks" / "users")
        try:
            alone = try_lock(users)
            self._clear_parts()
            if alone:
                self._change_used(lambda _: sum(each.st_size for _, each in self._files()))
            fcntl.flock(users, fcntl.LOCK_SH)
        except BaseException:
            os.close(users)
            raise
        return users

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

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the files that are kept, of whatever data set."""
        for shard in range(256):
            try:
                files = list(os.scandir(self._folder / f"{shard:02x}"))
            except FileNotFoundError:
                continue
            for each in files:
                try:
                    yield Path(each.path), each.stat(follow_symlinks=False)
                except FileNotFoundError:  # evicted meanwhile
                    continue

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


def _read(descriptor: int) -> int:
    text = os.pread(descriptor, 32, 0)
    return int(text) if text.strip().isdigit() else 0  # a new file is empty


def _write(descriptor: int, nbytes: int) -> None:
    os.pwrite(descriptor, b"%20d\n" % nbytes, 0)  # always as long, and in one call: never half a number


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
