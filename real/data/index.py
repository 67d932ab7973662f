"""The index of a data set: what every sample's file is called, its label, its size and its checksum.

`index.csv` lies in the folder of the files: the header `name,label,nbytes,crc32`, then one line per sample; sample 0
is the first line after the header. Names are paths relative to the folder, with `/`. The checksum is zlib's CRC-32,
in decimal: enough to notice a changed, truncated or mixed-up file, and fast enough for every read.
`python -m real.data.indexing FOLDER` makes the index of a folder of images.
"""

import csv
import io
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simdist.errors import ScenarioError

__all__ = [
    "Entry",
    "Index",
    "make_index",
    "parse_index",
    "read_index",
    "refuse_name",
    "write_entries",
    "write_index",
]

INDEX = "index.csv"
COLUMNS = ("name", "label", "nbytes", "crc32")
_INT64 = (-(2**63), 2**63 - 1)


@dataclass(frozen=True, slots=True)
class Entry:
    """Holds one sample's line: its file's name, its label, and size and CRC-32 of the file."""

    name: str
    label: int
    nbytes: int
    crc32: int

    def matches(self, content: bytes) -> bool:
        """Return whether this is the content of the file."""
        return len(content) == self.nbytes and zlib.crc32(content) == self.crc32


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


def refuse_name(name: str, where: str) -> None:
    """Raise ScenarioError if a name is no path of a file inside the folder.

    >>> refuse_name("n01440764/1.JPEG", "index.csv")
    >>> refuse_name("../secret", "index.csv")
    Traceback (most recent call last):
    simdist.errors.ScenarioError: index.csv: name '../secret' leaves the folder; write a path inside it: class/1.jpg
    """
    parts = name.split("/")
    wrong = ""
    if name.startswith("/") or ".." in parts:
        wrong = "leaves the folder"
    elif not name or "" in parts or "." in parts or not name.isprintable():
        wrong = "is no path of a file"
    if wrong:
        raise ScenarioError(f"{where}: name {name!r} {wrong}; write a path inside it: class/1.jpg")


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
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{where}: byte {error.start} is not UTF-8") from error
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(lines, [])
        if tuple(header) != COLUMNS:
            raise ScenarioError(f"{where}: line 1: {','.join(header)!r}: the header is {','.join(COLUMNS)}")
        index = make_index(_parse_line(line, f"{where}: line {lines.line_num}") for line in lines)
    except csv.Error as error:
        raise ScenarioError(f"{where}: line {lines.line_num}: {error}") from error
    if not text.endswith("\n"):
        raise ScenarioError(f"{where}: line {lines.line_num}: ends without a line break: the file is truncated")
    return index


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


def _parse_line(line: Sequence[str], where: str) -> Entry:
    if len(line) != len(COLUMNS):
        raise ScenarioError(f"{where}: {len(line)} columns ({','.join(line)!r}); there are {len(COLUMNS)}")
    name, label, nbytes, crc32 = line
    refuse_name(name, where)
    return Entry(
        name,
        _whole(label, "label", where, *_INT64),
        _whole(nbytes, "nbytes", where, 1, _INT64[1]),
        _whole(crc32, "crc32", where, 0, 2**32 - 1),
    )


def _whole(text: str, column: str, where: str, least: int, most: int) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 20 and least <= int(text) <= most):
        raise ScenarioError(f"{where}: {column} {text!r}: write a whole number from {least} to {most}")
    return int(text)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give the file to write, which then replaces `path`; an interruption leaves the old one or none."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
