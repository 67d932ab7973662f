"""Where the files of a data set lie: a folder, a mount, an object store. One way to read them all.

What a URL means is fsspec's business (`/mnt/set`, `s3://bucket/set`, `memory://set`), and of the file systems that are
registered with it. What is added here is how an outage is borne: a read that fails is tried again, less and less often,
until `timeout_s` are over; then one error says what happened, where, and for how long it was tried. Who waits is told
why, see `real.data.outages`.

A read through the kernel (a folder, a mount) that does not return cannot be given up from here: how long a mount waits
for its server, its options say (`hard`, or `soft,timeo=...`).
"""

import errno
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import final

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from real.data.index import INDEX, Entry, Index, parse_index, refuse_name
from real.data.outages import Outage
from simdist.errors import RunError, ScenarioError

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0

# What a server or a kernel says of a file, or of us: no outage, and the same again however often it is asked.
_FINAL = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM),
    *(errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTSUP, errno.ENOSYS),
}
# Of a library: a mistake, no outage.
_MISTAKES = (TypeError, ValueError, LookupError, AttributeError, ImportError, NotImplementedError, AssertionError)


class Storage(ABC):
    """Holds the files of a data set; any number of threads may read at once.

    Args:
        url: Of the folder that the names are relative to, for messages.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read a whole file.

        Args:
            name: Relative to the storage's URL, with `/`.

        Raises:
            RunError: It cannot be read; names URL, file, what happened, and for how long it was tried.
            ScenarioError: The name leaves the folder.
        """


class RetryingStorage(Storage):
    """Reads again what could not be read; whoever extends it reads once.

    Args:
        url: Of the storage.
        timeout_s: How long a read is tried.
        stop: Ends the trying when set.
        now: Clock, in seconds.
        sleep: Waits for so many seconds; by default, also no longer than until `stop` is set.
        tell: Takes a line about an outage that lasts, and one about its end; by default nobody is told.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        stop: threading.Event | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(url)
        self._timeout_s = timeout_s
        self._stop = stop or threading.Event()
        self._now = now
        self._sleep = sleep or self._stop.wait
        self._lock = threading.Lock()
        self._n_retries = 0
        self._outage = Outage(url, timeout_s=timeout_s, tell=tell or _keep_quiet)

    @property
    def n_retries(self) -> int:
        """Number of times that a read was tried again, by any thread."""
        return self._n_retries

    @abstractmethod
    def read_once(self, name: str) -> bytes:
        """Read a whole file, or raise any exception."""

    @final
    def read(self, name: str) -> bytes:
        """Read a whole file, trying again after failures that may pass."""
        refuse_name(name, self.url)
        start_s = self._now()
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                content = self.read_once(name)
            except Exception as error:
                now_s = self._now()
                tried_s = now_s - start_s
                if _is_final(error):
                    raise RunError(f"{self.url}: {name}: {_said(error)}") from error
                if self._stop.is_set():
                    raise RunError(f"{self.url}: {name}: the run has failed; last: {_reason(error)}") from error
                if tried_s + pause_s >= self._timeout_s:
                    raise RunError(
                        f"{self.url}: {name}: cannot be read; tried for {tried_s:.3g} s of {self._timeout_s:g} s, "
                        f"last: {_reason(error)}"
                    ) from error
                self._outage.note_failure(_reason(error), start_s=start_s, now_s=now_s)
            else:
                self._outage.note_success(now_s=self._now())
                return content
            with self._lock:
                self._n_retries += 1
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


@final
class FilesystemStorage(RetryingStorage):
    """Reads the files in a folder of an fsspec file system.

    Args:
        url: Of the folder.
        filesystem: That it lies in.
        root: The folder's path there.
        timeout_s: How long a read is tried.
        stop: Ends the trying when set.
        tell: Takes a line about an outage that lasts, and one about its end.
    """

    def __init__(
        self,
        url: str,
        filesystem: AbstractFileSystem,
        root: str,
        *,
        timeout_s: float,
        stop: threading.Event | None = None,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(url, timeout_s=timeout_s, stop=stop, tell=tell)
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    def read_once(self, name: str) -> bytes:
        """Read a file in as few round trips as the file system needs."""
        return bytes(self._filesystem.cat_file(f"{self._root}/{name}"))

    @property
    def local_folder(self) -> Path | None:
        """The folder whose files the kernel reads, of this machine or a mount; None if a library reads them."""
        return Path(self._root) if isinstance(self._filesystem, LocalFileSystem) else None

    def is_folder(self) -> bool:
        """Return whether there is a folder at the URL."""
        return bool(self._filesystem.isdir(self._root))


def open_storage(
    url: str,
    *,
    timeout_s: float = 60.0,
    stop: threading.Event | None = None,
    tell: Callable[[str], object] | None = None,
) -> RetryingStorage:
    """Open the storage at a URL; nothing is read yet.

    Args:
        url: A folder (`/mnt/set`), or another URL that fsspec knows (`s3://bucket/set`).
        timeout_s: How long a read is tried before it fails.
        stop: Ends the trying when set, because nobody waits for the result any more.
        tell: Takes a line about an outage that lasts, and one about its end.

    Raises:
        ScenarioError: There is no such kind of URL.
        RunError: A library for it is missing, or refuses.
    """
    if not timeout_s > 0:
        raise ScenarioError(f"timeout_s is {timeout_s}: write a number of seconds above 0")
    filesystem, root = _from_url(url)
    return FilesystemStorage(url, filesystem, root, timeout_s=timeout_s, stop=stop, tell=tell)


def read_storage_index(storage: Storage) -> Index:
    """Read the index of the data set in a storage.

    Raises:
        RunError: It cannot be read.
        ScenarioError: There is none, or a line of it is wrong.
    """
    try:
        content = storage.read(INDEX)
    except RunError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise ScenarioError(_without_index(storage)) from error
        raise
    return parse_index(content, where=f"{storage.url}: {INDEX}")


def read_sample(storage: Storage, entry: Entry) -> bytes:
    """Read the file of a sample, and check that it is the one of the index; a first mismatch is read again.

    Raises:
        RunError: It cannot be read, or has changed on the storage since the index was made.
    """
    content = storage.read(entry.name)
    if not entry.matches(content):  # a server may be in the middle of something
        content = storage.read(entry.name)
    if not entry.matches(content):
        what = f"{len(content)} bytes, the index says {entry.nbytes}" if len(content) != entry.nbytes else "other bytes"
        raise RunError(
            f"{storage.url}: {entry.name}: has changed on the storage since the index was made ({what}, read twice); "
            f"put the file back, or make a new index with `python -m real.data.indexing`"
        )
    return content


def _without_index(storage: Storage) -> str:
    if isinstance(storage, FilesystemStorage) and not storage.is_folder():
        return f"{storage.url}: there is no such folder"
    return f"{storage.url}: has no {INDEX}; `python -m real.data.indexing FOLDER` makes one"


def _from_url(url: str) -> tuple[AbstractFileSystem, str]:
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except ImportError as error:  # s3fs and the like are packages of their own
        raise RunError(f"{url}: {error}") from error
    except ValueError as error:
        raise ScenarioError(
            f"{url}: {error}; write a folder, or a URL that fsspec knows; an NFS server: mount it and write the folder"
        ) from error
    return filesystem, str(root)


def _is_final(error: Exception) -> bool:
    if isinstance(error, OSError):
        # Libraries raise these kinds without a number, too.
        kinds = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
        return isinstance(error, kinds) or error.errno in _FINAL
    return isinstance(error, _MISTAKES)


def _said(error: Exception) -> str:
    """Say what an exception says, and of which kind it is; a bare FileNotFoundError names only the path."""
    strerror = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {strerror or error or 'no reason given'}"


def _reason(error: Exception) -> str:
    """Say why a storage cannot be reached: of a library's exception the kind, too, because its text may say nothing."""
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or _said(error)


def _keep_quiet(_line: str) -> None:
    pass
