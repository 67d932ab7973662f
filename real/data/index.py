"""The index of a data set in columns, for what reads it; and files of it. `simdist.plan.index` says what its lines are.

`python -m real.data.indexing FOLDER` makes the index of a folder of images.
"""

import csv
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simdist.errors import ScenarioError
from simdist.plan.index import COLUMNS, INDEX, Entry, parse_entries, refuse_name

__all__ = [
    "INDEX",
    "Entry",
    "Index",
    "make_index",
    "parse_index",
    "read_index",
    "refuse_name",
    "write_entries",
    "write_index",
]


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """Holds the lines of an index, in columns: sample i is element i of each.

    Args:
        names: Of the files, relative to their folder.
        labels: int64.
        nbytes: Size of each file, int64, at least 1.
        crc32: CRC-32 of each file, uint32.

    Raises:
        ScenarioError: Columns differ in length or have another dtype.
    """

    names: tuple[str, ...]
    labels: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    crc32: NDArray[np.uint32]

    def __post_init__(self) -> None:
        n_samples = len(self.names)
        for column, values, dtype in (
            ("labels", self.labels, np.int64),
            ("nbytes", self.nbytes, np.int64),
            ("crc32", self.crc32, np.uint32),
        ):
            if values.shape != (n_samples,) or values.dtype != dtype:
                raise ScenarioError(
                    f"index: {column} is {values.dtype.name}{list(values.shape)}; {n_samples} names need "
                    f"{np.dtype(dtype).name}[{n_samples}]"
                )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, sample: int) -> Entry:
        """Return the line of a sample, which counts from 0."""
        return Entry(self.names[sample], int(self.labels[sample]), int(self.nbytes[sample]), int(self.crc32[sample]))


def make_index(entries: Iterable[Entry]) -> Index:
    """Make an index of its lines."""
    lines = list(entries)
    return Index(
        names=tuple(each.name for each in lines),
        labels=np.array([each.label for each in lines], dtype=np.int64),
        nbytes=np.array([each.nbytes for each in lines], dtype=np.int64),
        crc32=np.array([each.crc32 for each in lines], dtype=np.uint32),
    )


def read_index(path: Path) -> Index:
    """Read an index from a file.

    Raises:
        ScenarioError: It cannot be read, or a line of it is wrong; names file, line, column and value.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ScenarioError(
            f"{path}: {error.strerror}; `python -m real.data.indexing {path.parent}` makes one"
        ) from error
    return parse_index(content, where=str(path))


def parse_index(content: bytes, *, where: str) -> Index:
    """Read an index from the content of its file.

    Args:
        content: UTF-8.
        where: The file's name, for messages.

    Raises:
        ScenarioError: A line of it is wrong; names file, line, column and value.
    """
    return make_index(parse_entries(content, where=where))


def write_index(index: Index, path: Path) -> None:
    """Write an index to a file, which is there as a whole or not at all."""
    write_entries((index[sample] for sample in range(len(index))), path)


def write_entries(entries: Iterable[Entry], path: Path) -> int:
    """Write an index line by line as they come, as `write_index` does; return the number of samples."""
    n_samples = 0
    with _replacing(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
        for each in entries:
            refuse_name(each.name, str(path))
            lines.writerow((each.name, each.label, each.nbytes, each.crc32))
            n_samples += 1
        file.flush()
        os.fsync(file.fileno())
    return n_samples


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give the file to write, which then replaces `path`; an interruption leaves the old one or none."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
