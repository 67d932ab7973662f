"""Where a node keeps the files of a data set.

    FOLDER/set-1f40ae21/node-0              what warm runs find, and leave for the next
    FOLDER/set-1f40ae21/cold-9c1e-node-0    of one cold run; removed at its end

A cold run begins with an empty folder of its own, so nothing that lies about can make it warm, and it takes nothing
from a warm run. Whoever uses such a folder holds a shared lock (flock) on it, which the kernel drops when the process
ends, however it ends. Who leaves and gets the lock for itself was the last and removes the folder; and everybody who
comes or leaves removes those whose users were killed.
"""

import fcntl
import getpass
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from real.data.index import Index
from simdist.errors import RunError

__all__ = ["cold_folder", "default_folder", "folder_of_set", "warm_folder"]


def default_folder() -> Path:
    """Return this user's folder in the folder of temporary files."""
    return Path(tempfile.gettempdir(), f"simdist-{getpass.getuser()}")


def folder_of_set(folder: Path, index: Index) -> Path:
    """Return the folder of a data set: of its own, because the capacity that a plan gives is for this set."""
    return folder / f"set-{zlib.crc32(index.nbytes.tobytes(), zlib.crc32(index.crc32.tobytes())):08x}"


def warm_folder(folder: Path, node: int) -> Path:
    """Return the folder that a node keeps from run to run."""
    return folder / f"node-{node}"


@contextmanager
def cold_folder(folder: Path, run: str, node: int) -> Iterator[Path]:
    """Give a folder that was empty when the first rank of a node got it, and is gone when the last one leaves.

    Args:
        folder: Of the data set.
        run: What no other run is called.
        node: Whose folder it is.

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
        for empty in (folder, folder.parent):
            if empty in (folder, default_folder()):  # a folder that somebody gave stays
                with suppress(OSError):
                    empty.rmdir()


def _hold(path: Path) -> int:
    """Make a folder and lock it; whoever is removing it, goes first."""
    while True:
        with suppress(FileNotFoundError):  # the folder above was empty, and is gone
            path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_there(path, descriptor):
                return descriptor
            os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove the folders of cold runs that nobody holds any more."""
    for path in folder.glob("cold-*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # somebody else has removed it, or it is somebody else's
            continue
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
