"""A node's cache of raw files on its own disk, shared by the processes and threads of the node.

    FOLDER/1f/0000031-9ad00f2b      sample 31, whose file has this CRC-32; 256 sub-folders by the sample's last byte
    FOLDER/parts/*                  being written; locked by their writers, so those of a killed writer can be told

* **Never a wrong byte.** A file appears under its name when it is whole, by a rename; its name holds the checksum of
  the index, so a file of another data set is not found; what is read is compared with size and checksum, and a
  damaged file is removed and fetched again. So no `fsync` is needed: what a crash of the machine spoils, is noticed.
* **Bounded** by who decides which files are kept and which leave (`evict`, `keep_only`): the plan. A file for which the
  disk is full is handed on and not kept.

Locks are `flock`s, so the kernel drops those of a process that is killed. Two that fetch a file at once both write it,
and the last one stays; by plan there are no two, because who finds a file on disk waits for who brings it.

fsspec's own caches (`filecache`, `simplecache`) are not used: they have no checksum, and writers do not see each other.

A cache is in a folder of the data set.

    FOLDER/set-1f40ae21/node-0              what warm runs find, and leave for the next
    FOLDER/set-1f40ae21/cold-9c1e-node-0    of one cold run; removed at its end

A cold run begins with an empty folder of its own, so nothing that lies about can make it warm, and it takes nothing
from a warm run. Every user of such a folder holds a shared lock (flock) on it, which the kernel drops when the process
ends, however it ends. A process that leaves and gets the lock for itself was the last and removes the folder; and every
process that comes or leaves removes those whose users were killed, of any data set.

Samples read here are trained on, and a checksum keeps out accidents, not intent. So the default folder, whose name is
easy to guess, is used only if no other user can write to it.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from real.data.sample_index import SampleIndex
from simdist.errors import RunError

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
            (folder / "parts").mkdir(parents=True, exist_ok=True)
            for part in (folder / "parts").iterdir():
                _remove_if_unused(part)  # what is unfinished, of writers that are gone: their locks are free
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
        """Return the file of a sample: from here, or by `read`.

        Args:
            sample: Its number.
            read: Reads it elsewhere, and checks it; what it raises, is passed on.
            keep: Keep what was read.
        """
        content = self.get(sample)
        if content is None:
            content = read()
            if keep:
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
        while True:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:  # else one that clears away was here before the lock
                break
            os.close(descriptor)
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

    def _path(self, sample: int) -> Path:
        return self._folder / f"{sample % 256:02x}" / f"{sample:07d}-{int(self._index.crc32[sample]):08x}"


def _content(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read()


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


# Only what is called like this is ever removed: a folder that a user gave may hold anything.
_SET = re.compile(r"set-[0-9a-f]{8}")
_COLD = re.compile(r"cold-.+-node-\d+")
_ANOTHER = "remove it, or choose a folder with --cache"


def default_folder() -> Path:
    """Return this user's folder in the folder of temporary files; it is made if it is not there, and stays.

    Raises:
        RunError: It cannot be made, or other users could put files there.
    """
    path = Path(tempfile.gettempdir(), f"simdist-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise RunError(f"{path}: no cache can be here: {error.strerror or error}; {_ANOTHER}") from error
    is_shared = found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_shared or not stat.S_ISDIR(found.st_mode):
        what = "is no folder to which this user alone can write, so others could choose the files that are read here"
        raise RunError(f"{path}: {what}; {_ANOTHER}")
    return path


def folder_of_set(folder: Path, index: SampleIndex) -> Path:
    """Return the folder of a data set: of its own, because the capacity that a plan gives is for this set."""
    return folder / f"set-{zlib.crc32(index.nbytes.tobytes(), zlib.crc32(index.crc32.tobytes())):08x}"


def warm_folder(folder: Path, node: int) -> Path:
    """Return the folder that a node keeps from run to run, and clear away what killed cold runs have left."""
    _sweep(folder)
    return folder / f"node-{node}"


@contextmanager
def cold_folder(folder: Path, run: str, node: int) -> Iterator[Path]:
    """Give a folder that was empty when the first rank of a node got it, and is gone when the last one leaves.

    Args:
        folder: Of the data set.
        run: A name that no other run has.
        node: The node of the folder.

    Raises:
        RunError: It cannot be made.
    """
    path = folder / f"cold-{run}-node-{node}"
    try:
        _sweep(folder)
        held = _hold(path)
    except OSError as error:
        raise RunError(f"{error.filename or path}: no cache can be here: {error.strerror or error}") from error
    try:
        yield path
    finally:
        os.close(held)
        _sweep(folder)
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def _hold(path: Path) -> int:
    """Make a folder and lock it; a process that is removing it goes first."""
    while True:
        with suppress(FileNotFoundError):  # the folder above was empty, and is gone
            path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_there(path, descriptor):
                return descriptor
            os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove the folders of cold runs without users: of this data set, and of those beside it."""
    sets = [each for each in folder.parent.glob("set-*") if _SET.fullmatch(each.name) and each != folder]
    for each in (folder, *sets):
        colds = [path for path in each.glob("cold-*") if _COLD.fullmatch(path.name)]
        for path in colds:
            _remove_if_unused(path)
        if colds and each != folder:
            with suppress(OSError):  # it is not empty
                each.rmdir()


def _remove_if_unused(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # removed meanwhile, or another user's
        return
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    os.close(descriptor)


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
