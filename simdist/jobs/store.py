"""The folder of a sweep: what is to be computed, and what is.

    design.jsonl    a line about the sweep, then one per row: point, what it sets, schedule, key. Written at the start.
    rows.jsonl      a line per row that is measured or failed, found by its key. Appended as they come.
    .lock           held while a sweep is being computed here.

When all rows are there, they are put in the order of the design, so that the files do not tell how many workers there
were. Rows that the design does not have, of a sweep that was edited meanwhile, stay at the end.
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

_SYNC_S = 1.0
_MOST_NAMED = 5  # damaged lines


@final
class Store:
    """Writes the folder of a sweep; use it in a `with` statement, which keeps others out."""

    def __init__(self, folder: Path) -> None:
        """Take `folder`, which is made if it is not there."""
        self.folder = folder
        self._file: int | None = None
        self._lock = contextlib.ExitStack()
        self._synced_s = -math.inf

    def __enter__(self) -> Self:
        """Lock the folder.

        Raises:
            RunError: It cannot be made, or another process computes a sweep there.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            with naming_file(self.folder):
                self._open()
            self._lock = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Let others in."""
        self._close()
        self._lock.close()

    def design(self, lines: Iterable[dict[str, Any]]) -> None:
        """Write what is to be computed.

        Raises:
            RunError: It cannot be written.
        """
        _replace(self.folder / DESIGN, (json.dumps(line).encode() for line in lines))

    def done(self, damaged: list[int] | None = None) -> dict[str, bool]:
        """Return the keys of the rows that are there, and whether each failed.

        Args:
            damaged: Gets the numbers of the lines that are torn or damaged.
        """
        records = read_jsonl(self.folder / ROWS, damaged)
        return {record["key"]: "failed" in record for record in records if "key" in record}

    def append(self, records: Sequence[bytes]) -> None:
        """Save rows. When this returns they outlive the process; those of the last second perhaps not the machine.

        Raises:
            RunError: They cannot be written.
        """
        assert self._file is not None  # inside `with`
        with naming_file(self.folder / ROWS):
            left = b"".join(map(with_checksum, records))
            while left:
                left = left[os.write(self._file, left) :]  # a disk that fills up takes a part
            if time.monotonic() - self._synced_s > _SYNC_S:
                os.fsync(self._file)
                self._synced_s = time.monotonic()

    def arrange(self, order: Iterable[str]) -> None:
        """Put the rows in an order, by key; the last record of a key counts, torn lines go.

        Raises:
            RunError: It cannot be written.
        """
        path = self.folder / ROWS
        with naming_file(path, "read"), open_regular(path) as file:
            lines = list(lines_of(file))
        found = {record["key"]: line.rstrip(b"\n") for line in lines if (record := record_of(line))}
        keys = dict.fromkeys([*(key for key in order if key in found), *found])
        if lines == [found[key] + b"\n" for key in keys]:
            return
        with naming_file(path):
            _replace(path, (found[key] for key in keys))
            self._close()
            self._open()

    def _open(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            open_regular(self.folder / ROWS).close()
        self._file = os.open(self.folder / ROWS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what could not be saved was told when it was written
                os.fsync(self._file)
            os.close(self._file)
            self._file = None


def damaged_text(folder: Path, damaged: Sequence[int]) -> str:
    """Say which lines of the rows of a sweep are damaged."""
    numbers = ", ".join(f"{number:,}" for number in damaged[:_MOST_NAMED])
    more = f" and {len(damaged) - _MOST_NAMED:,} more" if len(damaged) > _MOST_NAMED else ""
    which = f"lines {numbers}{more} are" if len(damaged) > 1 else f"line {numbers} is"
    return f"{folder / ROWS}: {which} torn or damaged: left out, and computed again by `simdist sweep`"


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file; an interruption leaves the old one or none."""
    with replacing(path, on_disk=True) as part, part.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)
