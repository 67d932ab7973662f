"""The folder of a sweep: what is to be computed, and what is.

    design.jsonl    a line about the sweep, then one per row: point, what it sets, schedule, key. Written at the start.
    rows.jsonl      a line per row that is measured or failed, found by its key. Appended as they come.
    sweep.lock      held while a sweep is being computed here.

A record begins with its line's break, so that one torn by a crash does not swallow the next. When all rows are there,
they are put in the order of the design, so that the files do not tell how many workers there were. Rows that the
design does not have, of a sweep that was edited meanwhile, stay at the end.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, final

from simdist.errors import RunError

__all__ = ["DESIGN", "LOCK", "ROWS", "Store", "read_jsonl"]

DESIGN, ROWS, LOCK = "design.jsonl", "rows.jsonl", "sweep.lock"


@final
class Store:
    """Writes the folder of a sweep; use it in a `with` statement, which keeps others out."""

    def __init__(self, folder: Path) -> None:
        """Take `folder`, which is made if it is not there."""
        self.folder = folder
        self._file: IO[bytes] | None = None
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> "Store":
        """Lock the folder.

        Raises:
            RunError: It cannot be made, or another process computes a sweep there.
        """
        with _saying(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.folder / LOCK)
            self._file = (self.folder / ROWS).open("ab")
        return self

    def __exit__(self, *_: object) -> None:
        """Let others in."""
        for file in (self._file, self._lock):
            if file:
                file.close()

    def design(self, lines: Iterable[dict[str, Any]]) -> None:
        """Write what is to be computed.

        Raises:
            RunError: It cannot be written.
        """
        _replace(self.folder / DESIGN, (json.dumps(line).encode() for line in lines))

    def done(self) -> dict[str, bool]:
        """Return the keys of the rows that are there, and whether each failed."""
        return {record["key"]: "failed" in record for record in read_jsonl(self.folder / ROWS) if "key" in record}

    def append(self, records: Sequence[bytes]) -> None:
        """Save rows; when this returns they outlive the process and the machine.

        Raises:
            RunError: They cannot be written.
        """
        assert self._file is not None  # inside `with`
        with _saying(self.folder / ROWS):
            self._file.write(b"".join(b"\n" + record for record in records))
            self._file.flush()
            os.fsync(self._file.fileno())

    def arrange(self, order: Iterable[str]) -> None:
        """Put the rows in an order, by key; the last record of a key counts, torn lines go.

        Raises:
            RunError: It cannot be written.
        """
        path = self.folder / ROWS
        found: dict[str, bytes] = {}
        for line in path.read_bytes().splitlines():
            if record := _record(line):
                found[record["key"]] = line
        first = dict.fromkeys(key for key in order if key in found)
        _replace(path, (found[key] for key in (first | found)))
        assert self._file is not None  # inside `with`
        self._file.close()
        self._file = path.open("ab")


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, without lines that are torn or damaged; nothing if there is no file.

    Raises:
        RunError: It cannot be read.
    """
    with _saying(path, "read"):
        if not path.exists():
            return
        with path.open("rb") as file:
            for line in file:
                if record := _record(line, need_key=False):
                    yield record


def _record(line: bytes, *, need_key: bool = True) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and (not need_key or isinstance(record.get("key"), str)) else None


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file; an interruption leaves the old one or none."""
    part = path.with_name(f".{path.name}.part")
    with _saying(path):
        with part.open("wb") as file:
            for line in lines:
                file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


def _locked(path: Path) -> IO[bytes]:
    """Open a file that only one process may hold."""
    file = path.open("ab+")
    try:
        import fcntl
    except ImportError:  # Windows has other locks; there nothing keeps a second sweep out
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().decode(errors="replace").strip()
        file.close()
        raise RunError(
            f"{path.parent}: process {holder} computes a sweep there: wait for it, or choose another -o"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()).encode())
    file.flush()
    return file


@contextlib.contextmanager
def _saying(path: Path, what: str = "written") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.filename or path}: cannot be {what}: {error.strerror or error}") from None
