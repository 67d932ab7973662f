"""Where a node keeps the files of a data set.

    FOLDER/set-1f40ae21/node-0              what warm runs find, and leave for the next
    FOLDER/set-1f40ae21/cold-9c1e-node-0    of one cold run; removed at its end

A cold run begins with an empty folder of its own, so nothing that lies about can make it warm, and it takes nothing
from a warm run. Every user of such a folder holds a shared lock (flock) on it, which the kernel drops when the process
ends, however it ends. A process that leaves and gets the lock for itself was the last and removes the folder; and every
process that comes or leaves removes those whose users were killed, of any data set.

Samples read here are trained on, and a checksum keeps out accidents, not intent. So the default folder, whose name is
easy to guess, is used only if no other user can write to it.
"""

import fcntl
import getpass
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from real.data.filecache import try_lock
from real.data.sample_index import SampleIndex
from simdist.errors import RunError

# Only what is called like this is ever removed: a folder that a user gave may hold anything.
_SET = re.compile(r"set-[0-9a-f]{8}")
_COLD = re.compile(r"cold-.+-node-\d+")
_ANOTHER = "remove it, or choose a folder with --cache"


def default_folder() -> Path:
    """Return this user's folder in the folder of temporary files; it is made if it is not there, and stays.

    Raises:
        RunError: It cannot be made, or other users could put files there.
    """
    path = Path(tempfile.gettempdir(), f"simdist-{getpass.getuser()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise RunError(f"{path}: no cache can be here: {error.strerror or error}; {_ANOTHER}") from error
    wrong = _open_to_others(found)
    if wrong:
        raise RunError(f"{path}: {wrong}, so others could choose the files that are read here; {_ANOTHER}")
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


def _open_to_others(found: os.stat_result) -> str:
    """Say why others could write to a folder; nothing if they cannot."""
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"has mode {stat.S_IMODE(found.st_mode):o}"
    return ""


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
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # removed meanwhile, or another user's
        return
    if try_lock(descriptor):
        shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
