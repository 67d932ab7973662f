"""Files that are there as a whole or not at all, and files from outside, which may be anything.

A file that simdist reads may be damaged, or made to harm: a pipe without a writer, a device without an end, a line of a
gigabyte, a few megabytes that unpack to many gigabytes. So nothing opens or reads one except by a function of this
module, or of `simdist.arrays`. A refusal is an `OSError`, like the operating system's: `naming_file` names the file.
"""

import errno
import gzip
import json
import os
import re
import secrets
import socket
import stat
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, Any

from simdist.errors import RunError, naming_file

#: A document that is read as a whole has no more bytes, a line of any text file neither.
MAX_DOCUMENT_NBYTES = 256 << 20
MAX_LINE_NBYTES = 32 << 20
_PART_NBYTES = 16 << 20
_NO_WAIT = os.O_NONBLOCK if os.name == "posix" else 0  # a pipe without a writer does not hold up
_NO_LINK = os.O_NOFOLLOW if os.name == "posix" else 0
_HELD = {errno.EACCES, errno.EAGAIN}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_HOLDER_NBYTES = 300
_ATTEMPTS = 100
_GZIP = b"\x1f\x8b"
_CHECKSUM = re.compile(rb', "crc32": (\d{1,10})\}\s*$')
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


class RefusedError(OSError):
    """A file is not read, because of its kind or its size."""


def open_regular(path: Path | str) -> BufferedReader:
    """Open a file for reading that is one, never a pipe, device or socket; this does not wait.

    Raises:
        RefusedError: It is something else.
        OSError: It cannot be opened.
    """
    _refuse_special(os.stat(path))
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NO_WAIT))  # noqa: SIM115 - for the caller
    try:
        _refuse_special(os.fstat(file.fileno()))  # it may have been exchanged
    except OSError:
        file.close()
        raise
    return file


def _refuse_special(found: os.stat_result) -> None:
    if kind := _KINDS.get(stat.S_IFMT(found.st_mode)):
        raise RefusedError(f"it is {kind}: give a regular file")


@contextmanager
def open_unpacked(path: Path | str) -> Iterator[BufferedReader | gzip.GzipFile]:
    """Open a file for reading, unpacked if its first bytes say that it is compressed with gzip.

    Raises:
        RefusedError: It is no regular file.
        OSError: It cannot be opened.
    """
    with open_regular(path) as file:
        if not file.peek(len(_GZIP)).startswith(_GZIP):
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield unpacked


def read_content(
    path: Path | str, *, most_nbytes: int = MAX_DOCUMENT_NBYTES, line_nbytes: int | None = MAX_LINE_NBYTES
) -> bytes:
    """Return the bytes of a file.

    Args:
        path: The file.
        most_nbytes: A larger one is refused.
        line_nbytes: One with a longer line is refused, too, unless this is None.

    Raises:
        RefusedError: It is no regular file, or too large.
        OSError: It cannot be read.
    """
    parts: list[bytes] = []
    nbytes = in_line = 0
    with open_regular(path) as file:
        _refuse_size(os.fstat(file.fileno()).st_size, most_nbytes)
        while part := file.read(_PART_NBYTES):
            parts.append(part)
            nbytes += len(part)
            _refuse_size(nbytes, most_nbytes)
            if line_nbytes is None:
                continue
            end = part.find(b"\n")
            if in_line + (len(part) if end < 0 else end) > line_nbytes:
                raise _long_line(sum(each.count(b"\n") for each in parts[:-1]) + 1, line_nbytes)
            in_line = in_line + len(part) if end < 0 else len(part) - part.rfind(b"\n") - 1
    return b"".join(parts)


def lines_of(file: IO[bytes] | BufferedReader | gzip.GzipFile) -> Iterator[bytes]:
    """Yield the lines of a file with their breaks.

    Raises:
        RefusedError: One is too long.
    """
    number = 1
    while line := file.readline(MAX_LINE_NBYTES + 1):
        if len(line) > MAX_LINE_NBYTES:
            raise _long_line(number, MAX_LINE_NBYTES)
        yield line
        number += 1


def _refuse_size(nbytes: int, most_nbytes: int) -> None:
    if nbytes > most_nbytes:
        raise RefusedError(f"it has {nbytes:,} bytes or more; write at most {most_nbytes:,}")


def _long_line(number: int, most_nbytes: int) -> RefusedError:
    return RefusedError(f"line {number:,} has more than {most_nbytes:,} bytes: it is damaged, or no text")


@contextmanager
def replacing(path: Path, *, on_disk: bool = False) -> Iterator[Path]:
    """Give the file to write, which then replaces `path`; an interruption leaves the old one or none.

    It has a name of its own, because several processes may write one directory at the same time.

    Args:
        path: The file to replace.
        on_disk: Go on only when its contents and its name are on the disk, so that they outlive the machine, too.

    Raises:
        RunError: It cannot be written.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    with naming_file(path):
        try:
            yield part
            if on_disk:
                sync(part)
            os.replace(part, path)
            if on_disk and os.name == "posix":  # other systems open no folders
                sync(path.parent, os.O_RDONLY)
        finally:
            part.unlink(missing_ok=True)


def save_text(path: Path, text: str) -> int:
    """Write a file, or leave what is there; return its bytes. Half characters, as in names of files, become `?`.

    Raises:
        RunError: It cannot be written.
    """
    content = text.encode("utf-8", errors="replace")
    with replacing(path) as part:
        part.write_bytes(content)
    return len(content)


def sync(path: Path, flags: int = os.O_RDWR) -> None:
    """Wait until the contents of a file, or with `os.O_RDONLY` the names in a folder, are on the disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only process that writes to a folder, which is made; what holds the lock is the kernel, not a file.

    So the lock of a process that died is free. Where a file system has no locks, nothing is locked.

    Raises:
        RunError: Another process holds the lock; names it. Or the folder cannot be written.
    """
    lock = folder / ".lock"
    with naming_file(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with naming_file(lock):
        held = next(filter(None, (_lock(lock) for _ in range(_ATTEMPTS))), None)
    with held or nullcontext():
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()


def _lock(path: Path) -> FileIO | None:
    """Return a lock's file, which is locked until it is closed; None if who held it has just deleted it."""
    with ExitStack() as stack:
        file = stack.enter_context(
            open(path, "a+b", buffering=0, opener=lambda name, flags: os.open(name, flags | _NO_WAIT | _NO_LINK, 0o666))
        )
        try:
            if os.name == "posix":
                import fcntl

                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                file.seek(0)
                holder = file.read(_HOLDER_NBYTES).decode(errors="replace") or "another process"
                raise RunError(f"{path.parent}: {holder} writes there: wait for its end, or end it") from None
            if error.errno not in _NO_LOCKS:
                raise
        with suppress(FileNotFoundError):
            if os.path.samefile(path, file.fileno()):
                with suppress(OSError):  # no room for the name
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
                stack.pop_all()
                return file
    return None


def with_checksum(record: bytes) -> bytes:
    """Return an object of JSON as a line of a file of records, with the checksum of what stands before it.

    It begins with its line's break, so that a record torn by a crash does not swallow the next.
    """
    return b'\n%s, "crc32": %d}' % (record[:-1], zlib.crc32(record))


def record_of(line: bytes, *, need_key: bool = True) -> dict[str, Any] | None:
    """Return the record of a line; None if it is empty, torn or damaged. Lines of older versions have no checksum."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or (need_key and not isinstance(record.get("key"), str)):
        return None
    if record.pop("crc32", None) is not None:
        found = _CHECKSUM.search(line)
        if not found or zlib.crc32(line[: found.start()] + b"}") != int(found[1]):
            return None
    return record


def read_jsonl(path: Path, damaged: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, without lines that are torn or damaged; nothing if there is no file.

    Args:
        path: The file.
        damaged: Gets the numbers of those lines, from 1.

    Raises:
        RunError: It cannot be read.
    """
    with naming_file(path, "read"):
        if not path.exists():
            return
        with open_regular(path) as file:
            for number, line in enumerate(lines_of(file), 1):
                if record := record_of(line, need_key=False):
                    yield record
                elif damaged is not None and not line.isspace():
                    damaged.append(number)
