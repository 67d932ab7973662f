"""A node's cache of raw files on its own disk, shared by the processes and threads of the node.

    FOLDER/1f/0000031-9ad00f2b      sample 31, with the CRC-32 of its file; 256 sub-folders by the sample's last byte
    FOLDER/parts/*                  files being written, locked by their writers, so files of killed writers are known

* **Never a wrong byte.** A complete file is renamed to its name. The name contains the checksum in the index, so a file
  of another data set is not found. Contents are compared with size and checksum. A damaged file is removed and fetched
  again. So no `fsync` is needed: damage from a crash of the machine is detected.
* **Bounded** by the plan, which decides which files are kept and evicted (`evict`, `keep_only`). If the disk is full, a
  file is passed on and not kept.

Locks are `flock`s, so the kernel releases those of a killed process. If two processes fetch a file at once, both write
it, and the last one stays. The plan avoids this: a rank that is planned to find a file on disk waits for the rank that
brings it.

fsspec's own caches (`filecache`, `simplecache`) are not used, because they have no checksums.

A cache is in a folder of the data set.

    FOLDER/set-1f40ae21/node-0              kept from one warm run to the next
    FOLDER/set-1f40ae21/cold-9c1e-node-0    for one cold run; removed at its end

A cold run begins with an empty folder of its own. So leftover files cannot make it warm, and it takes nothing from a
warm run. Each user of such a folder holds a shared lock (flock) on it, which the kernel releases whenever and however
the process ends. If a leaving process gets an exclusive lock, it was the last user and removes the folder. Each process
that arrives or leaves also removes folders of killed users, for all data sets.

Training uses these samples, and a checksum protects against accidents, not attacks. The name of the default folder is
easy to guess, so the folder is used only if no other user can write to it.
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
        folder: Folder on the node's disk; created if missing. Only caches may write to it.
        index: Index of the data set.

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
                _remove_if_unused(part)  # unfinished files of dead writers, which have free locks
        except OSError as error:
            raise RunError(f"{error.filename or folder}: no cache can be here: {error.strerror}") from error

    def __contains__(self, sample: int) -> bool:
        """Tell whether a file of the sample's size is here; `get` checks its contents."""
        try:
            return self._path(sample).lstat().st_size == self._index[sample].nbytes
        except FileNotFoundError:
            return False

    def get(self, sample: int) -> bytes | None:
        """Return the file of a sample if it is here, complete and unchanged; a damaged file is removed.

        Raises:
            RunError: The file is here but cannot be opened: too many open files, or it belongs to another user.
        """
        path = self._path(sample)
        try:
            content = _content(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in {errno.EIO, errno.ELOOP}:  # the disk cannot read it any more; a link
                raise RunError(f"{path}: cannot be read: {error.strerror}") from error
            content = b""
        if not self._index[sample].matches(content):
            self._remove(path)
            return None
        return content

    def fetch(self, sample: int, read: Callable[[], bytes], *, keep: bool) -> bytes:
        """Return the file of a sample, from here or with `read`.

        Args:
            sample: Number of the sample.
            read: Reads the file elsewhere, and checks it. Its exceptions are passed on.
            keep: Keep the file after reading.
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
        """Remove all other files, of all data sets, before keeping more; return their number."""
        wanted = {self._path(sample) for sample in samples}
        return sum(self._remove(path) for path in self._folder.glob("[0-9a-f][0-9a-f]/*") if path not in wanted)

    def _keep(self, sample: int, content: bytes) -> None:
        """Write a file and rename it; warn once if files cannot be kept."""
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
        """Yield a new file and its descriptor, locked during writing and removed afterwards."""
        part = self._folder / "parts" / secrets.token_hex(8)
        while True:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:  # else a cleanup removed it before the lock
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
        except OSError:  # it is gone, or the disk is read-only: then it is found and compared again
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


# Only files with such names are removed, because a folder given by a user may contain anything.
_SET = re.compile(r"set-[0-9a-f]{8}")
_COLD = re.compile(r"cold-.+-node-\d+")
_ANOTHER = "remove it, or choose a folder with --cache"


def default_folder() -> Path:
    """Return this user's folder in the folder of temporary files; it is created if missing, and kept.

    Raises:
        RunError: The folder cannot be created, or other users could write to it.
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
    """Return the folder of a data set, which is separate because the capacity in a plan is for this set."""
    return folder / f"set-{zlib.crc32(index.nbytes.tobytes(), zlib.crc32(index.crc32.tobytes())):08x}"


def warm_folder(folder: Path, node: int) -> Path:
    """Return the folder that a node keeps from run to run, and remove folders of killed cold runs."""
    _sweep(folder)
    return folder / f"node-{node}"


@contextmanager
def cold_folder(folder: Path, run: str, node: int) -> Iterator[Path]:
    """Yield a folder that is empty for the first rank of a node, and removed when the last rank leaves.

    Raises:
        RunError: The folder cannot be created.
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
        with suppress(FileNotFoundError):  # the parent folder was empty and is gone
            path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_there(path, descriptor):
                return descriptor
            os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove the folders of cold runs without users, of this data set and of neighbouring ones."""
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
    except OSError:  # removed meanwhile, or owned by another user
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
