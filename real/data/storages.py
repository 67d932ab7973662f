"""Storage of a data set's files, with one interface: a folder, a mount, or an object store.

fsspec and its registered file systems handle URLs (`/mnt/set`, `s3://bucket/set`, `memory://set`). This module adds the
handling of outages. A failed read is retried at growing intervals until `timeout_s` have passed. Then one error states
the cause, the place, and the duration of the attempts. During a long outage, a warning informs the user.

If a read through the kernel (a folder, a mount) hangs, it cannot be cancelled from here. The options of the mount
determine how long it waits for its server (`hard`, or `soft,timeo=...`).
"""

import errno
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from real.data.sample_index import SampleIndex, make_index
from simdist.errors import RunError, ScenarioError
from simdist.files import RefusedError
from simdist.plan.index import INDEX, Entry, parse_entries, read_index, refuse_name

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_PATIENCE_S = 5.0  # shorter outages cause no warning

# Answers of a server or a kernel about a file, or about us: no outages, and the same again however often it is asked.
_FINAL = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EINVAL,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTSUP,
    errno.ENOSYS,
}
# Libraries raise these kinds without a number, too; and of a library, others are a mistake, no outage.
_FINAL_KINDS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_MISTAKES = (TypeError, ValueError, LookupError, AttributeError, ImportError, NotImplementedError, AssertionError)


class DataStorage:
    """Reads the files in a folder of an fsspec file system, with retries; several threads may use it at once.

    Args:
        url: URL of the folder, for messages.
        filesystem: File system with the folder.
        root: Path of the folder on the file system.
        timeout_s: How long to retry a read.
        stop: Ends the retries when set.
        now: Clock, in seconds.
        sleep: Waits for a number of seconds; by default, it ends early when `stop` is set.
    """

    def __init__(
        self,
        url: str,
        filesystem: AbstractFileSystem,
        root: str,
        *,
        timeout_s: float,
        stop: threading.Event | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.url = url
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._timeout_s = timeout_s
        self._now = now
        self._stop = stop or threading.Event()
        self._sleep = sleep or self._stop.wait

    @property
    def local_folder(self) -> Path | None:
        """The folder, if the kernel reads its files, on this machine or a mount; None if a library reads them."""
        return Path(self._root) if isinstance(self._filesystem, LocalFileSystem) else None

    def is_folder(self) -> bool:
        """Return whether the URL is a folder."""
        return bool(self._filesystem.isdir(self._root))

    def read(self, name: str) -> bytes:
        """Read a whole file, with retries after failures that may be temporary.

        Args:
            name: Name relative to the storage's URL, with `/`.

        Raises:
            RunError: The file cannot be read. The error states URL, file, cause, and the duration of the attempts.
            ScenarioError: The name points outside the folder.
        """
        refuse_name(name, self.url)
        start_s = self._now()
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return bytes(self._filesystem.cat_file(f"{self._root}/{name}"))
            except Exception as error:
                self._bear(error, f"{self.url}: {name}", start_s, pause_s)
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _bear(self, error: Exception, where: str, start_s: float, pause_s: float) -> None:
        """Raise errors that end a read; warn if it has failed for a while."""
        now_s = self._now()
        if _is_final(error):
            raise RunError(f"{where}: {_said(error)}") from error
        if self._stop.is_set():
            raise RunError(f"{where}: the run has failed; last: {_reason(error)}") from error
        if now_s - start_s + pause_s >= self._timeout_s:
            raise RunError(
                f"{where}: cannot be read; tried for {now_s - start_s:.3g} s of {self._timeout_s:g} s, "
                f"last: {_reason(error)}"
            ) from error
        if now_s - start_s >= _PATIENCE_S:  # Python shows equal warnings once
            text = f"cannot reach {self.url}: {_reason(error)}; trying until {self._timeout_s:g} s are over"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def open_storage(url: str, *, timeout_s: float = 60.0, stop: threading.Event | None = None) -> DataStorage:
    """Open the storage at a URL, without reading yet.

    Args:
        url: A folder (`/mnt/set`), or another URL that fsspec knows (`s3://bucket/set`).
        timeout_s: How long to retry a read before it fails.
        stop: Ends the retries when set.

    Raises:
        ScenarioError: The kind of URL is unknown.
        RunError: A library for it is missing, or refuses the URL.
    """
    if not timeout_s > 0:
        raise ScenarioError(f"timeout_s is {timeout_s}: write a number of seconds above 0")
    filesystem, root = filesystem_of(url)
    return DataStorage(url, filesystem, root, timeout_s=timeout_s, stop=stop)


def filesystem_of(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL, and the path of its folder on it.

    Raises:
        ScenarioError: The kind of URL is unknown.
        RunError: A library for it is missing, or refuses the URL.
    """
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except ImportError as error:  # s3fs and others are separate packages
        raise RunError(f"{url}: {error}") from error
    except ValueError as error:
        advice = "write a folder, or a URL that fsspec knows; an NFS server: mount it and write the folder"
        raise ScenarioError(f"{url}: {error}; {advice}") from error
    return filesystem, str(root)


def read_storage_index(storage: DataStorage) -> SampleIndex:
    """Read the index of the data set in a storage.

    Raises:
        RunError: The index cannot be read.
        ScenarioError: There is no index, or a line of it is invalid.
    """
    try:
        content = storage.read(INDEX) if storage.local_folder is None else _local_index(storage, storage.local_folder)
    except RunError as error:
        if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise
        wrong = f"has no {INDEX}; `python -m real.data.indexing FOLDER` makes one"
        raise ScenarioError(f"{storage.url}: {wrong if storage.is_folder() else 'there is no such folder'}") from error
    return make_index(parse_entries(content, where=f"{storage.url}: {INDEX}"))


def read_sample(storage: DataStorage, entry: Entry) -> bytes:
    """Read the file of a sample, and check it against the index; after a first mismatch, it is read again.

    Raises:
        RunError: The file cannot be read, or has changed on the storage since the index was made.
    """
    content = storage.read(entry.name)
    if not entry.matches(content):  # a server may be in the middle of a change
        content = storage.read(entry.name)
    if not entry.matches(content):
        what = f"{len(content)} bytes, the index says {entry.nbytes}" if len(content) != entry.nbytes else "other bytes"
        raise RunError(
            f"{storage.url}: {entry.name}: has changed on the storage since the index was made ({what}, read twice); "
            f"put the file back, or make a new index with `python -m real.data.indexing`"
        )
    return content


def _local_index(storage: DataStorage, folder: Path) -> bytes:
    try:
        return read_index(folder / INDEX)
    except RefusedError as error:
        raise ScenarioError(f"{folder / INDEX}: cannot be read: {error}") from error
    except OSError:  # the storage retries, and reports for how long
        return storage.read(INDEX)


def _is_final(error: Exception) -> bool:
    if isinstance(error, OSError):
        return isinstance(error, _FINAL_KINDS) or error.errno in _FINAL
    return isinstance(error, _MISTAKES)


def _said(error: Exception) -> str:
    """Describe an exception and its type; a bare FileNotFoundError names only the path."""
    strerror = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {strerror or error or 'no reason given'}"


def _reason(error: Exception) -> str:
    """Describe why a storage cannot be reached, with the type of a library's exception, as its text may be useless."""
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or _said(error)
