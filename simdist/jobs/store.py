"""The folder of a sweep: the rows to compute, and the computed ones.

    design.jsonl    a line about the sweep, then one per row: point, settings, schedule, key. Written at the start.
    rows.jsonl      a line per measured or failed row, identified by its key. Appended as rows finish.
    remarks.jsonl   a line per point: what to know of its scenario. Appended likewise.
    .lock           held while a process computes a sweep here.

When all rows are done, they are sorted into the order of the design, so that the files do not depend on the number of
workers. If the sweep was edited meanwhile, rows that are no longer in the design stay at the end.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self, final

from simdist.errors import naming_file
from simdist.files import lines_of, locked, open_regular, read_jsonl, record_of, replacing, with_checksum

DESIGN = "design.jsonl"
ROWS = "rows.jsonl"
REMARKS = "remarks.jsonl"

_SYNC_S = 1.0
_MOST_NAMED = 5  # damaged lines


@final
class _Lines:
    """A file of JSON records, each with a key, a line each: appended to, and sorted in the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._synced_s = -math.inf

    def open(self) -> None:
        """Create the file if it is missing."""
        if self._file is None:
            with naming_file(self.path):
                with contextlib.suppress(FileNotFoundError):
                    open_regular(self.path).close()
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a failure to save was reported when it happened
                os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def append(self, records: Sequence[bytes]) -> None:
        self.open()
        assert self._file is not None
        with naming_file(self.path):
            left = b"".join(map(with_checksum, records))
            while left:
                left = left[os.write(self._file, left) :]  # a full disk accepts only a part
            if time.monotonic() - self._synced_s > _SYNC_S:
                os.fsync(self._file)
                self._synced_s = time.monotonic()

    def arrange(self, order: Iterable[str]) -> None:
        with naming_file(self.path, "read"), open_regular(self.path) as file:
            lines = list(lines_of(file))
        found = {record["key"]: line.rstrip(b"\n") for line in lines if (record := record_of(line))}
        keys = dict.fromkeys([*(key for key in order if key in found), *found])
        if lines == [found[key] + b"\n" for key in keys]:
            return
        with naming_file(self.path):
            _replace(self.path, (found[key] for key in keys))
            self.close()
            self.open()


@final
class Store:
    """Writes the folder of a sweep. Use it in a `with` statement, which locks the folder."""

    def __init__(self, folder: Path) -> None:
        """Use `folder`, which is created if missing."""
        self.folder = folder
        self._rows = _Lines(folder / ROWS)
        self._remarks = _Lines(folder / REMARKS)
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Lock the folder.

        Raises:
            RunError: The folder cannot be created, or another process computes a sweep in it.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            with naming_file(self.folder):
                self._rows.open()
            self._lock = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Unlock the folder."""
        self._rows.close()
        self._remarks.close()
        self._lock.close()

    def design(self, lines: Iterable[dict[str, Any]]) -> None:
        """Write the rows to compute.

        Raises:
            RunError: It cannot be written.
        """
        _replace(self.folder / DESIGN, (json.dumps(line).encode() for line in lines))

    def done(self, damaged: list[int] | None = None) -> dict[str, bool]:
        """Return the keys of the existing rows, and whether each failed.

        Args:
            damaged: Receives the numbers of incomplete or damaged lines.
        """
        records = read_jsonl(self.folder / ROWS, damaged)
        return {record["key"]: "failed" in record for record in records if "key" in record}

    def append(self, records: Sequence[bytes]) -> None:
        """Save rows. After that they survive the process. A crash of the machine may lose those of the last second.

        Raises:
            RunError: The rows cannot be written.
        """
        self._rows.append(records)

    def append_remarks(self, records: Sequence[bytes]) -> None:
        """Save remarks on points, as `append` saves rows.

        Raises:
            RunError: They cannot be written.
        """
        self._remarks.append(records)

    def arrange(self, order: Iterable[str], of_points: Iterable[str] = ()) -> None:
        """Sort the rows by a list of keys; the last record of a key counts, and incomplete lines are dropped.

        Args:
            order: Keys of rows.
            of_points: Keys of points, for their remarks.

        Raises:
            RunError: It cannot be written.
        """
        self._rows.arrange(order)
        if self._remarks.path.exists():
            self._remarks.arrange(of_points)


def read_remarks(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the records of remarks on points of a sweep, by the key of the point; damaged lines are left out."""
    path = folder / REMARKS
    records = read_jsonl(path, []) if path.exists() else ()
    return {str(record["key"]): record for record in records if {"key", "remarks"} <= record.keys()}


def damaged_text(folder: Path, damaged: Sequence[int]) -> str:
    """Describe the damaged lines of the rows of a sweep."""
    numbers = ", ".join(f"{number:,}" for number in damaged[:_MOST_NAMED])
    more = f" and {len(damaged) - _MOST_NAMED:,} more" if len(damaged) > _MOST_NAMED else ""
    which = f"lines {numbers}{more} are" if len(damaged) > 1 else f"line {numbers} is"
    return f"{folder / ROWS}: {which} torn or damaged: left out, and computed again by `simdist sweep`"


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file; an interruption leaves the old file or none."""
    with replacing(path, on_disk=True) as part, part.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)
