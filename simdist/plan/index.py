"""The index of a data set: for every sample the name of its file, its label, its size and its checksum.

`index.csv` lies in the folder of the files. The first line is the header `name,label,nbytes,crc32`. One line per sample
follows, so sample 0 is the first line after the header. Names are unique paths relative to the folder, with `/`. The
checksum is zlib's CRC-32, in decimal. It detects a changed, truncated or mixed-up file.
"""

import csv
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from simdist.errors import ScenarioError
from simdist.files import read_content
from simdist.plan.plan import MAX_SAMPLE_FILE_NBYTES
from simdist.settings.units import read_whole

INDEX = "index.csv"
INDEX_COLUMNS = ("name", "label", "nbytes", "crc32")
_MAX_NBYTES = 2 << 30  # tens of millions of samples
_INT64 = (-(2**63), 2**63 - 1)


@dataclass(frozen=True, slots=True)
class Entry:
    """One sample: the name of its file, its label, and size and CRC-32 of the file."""

    name: str
    label: int
    nbytes: int
    crc32: int

    def matches(self, content: bytes) -> bool:
        """Return whether this is the unchanged content of the file."""
        return len(content) == self.nbytes and zlib.crc32(content) == self.crc32


def refuse_name(name: str, where: str) -> None:
    """Raise ScenarioError if a name is not the path of a file inside the folder.

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


def read_index(path: Path) -> bytes:
    """Return the content of an index.

    Raises:
        OSError: It cannot be read, is not a regular file, or is too large.
    """
    return read_content(path, most_nbytes=_MAX_NBYTES)


def parse_entries(content: bytes, *, where: str) -> Iterator[Entry]:
    """Yield the samples of an index in order.

    Args:
        content: Content of the file, UTF-8.
        where: The file's name, for messages.

    Raises:
        ScenarioError: A line is wrong, or repeats a file. The message names file, line, column and value.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{where}: byte {error.start} is not UTF-8") from error
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    line_of: dict[str, int] = {}
    try:
        header = next(lines, [])
        if tuple(header) != INDEX_COLUMNS:
            raise ScenarioError(f"{where}:1: {','.join(header)[:80]!r}: the header is {','.join(INDEX_COLUMNS)}")
        for line in lines:
            entry = _parse_line(line, f"{where}:{lines.line_num}")
            if (first := line_of.setdefault(entry.name, lines.line_num)) != lines.line_num:
                raise ScenarioError(
                    f"{where}:{lines.line_num}: name {entry.name!r} is in line {first} too; write each file once"
                )
            yield entry
    except csv.Error as error:
        raise ScenarioError(f"{where}:{lines.line_num}: {error}") from error
    if not text.endswith("\n"):
        raise ScenarioError(f"{where}:{lines.line_num}: ends without a line break: the file is truncated")


def _parse_line(line: Sequence[str], where: str) -> Entry:
    if len(line) != len(INDEX_COLUMNS):
        raise ScenarioError(f"{where}: {len(line)} columns ({','.join(line)[:80]!r}); there are {len(INDEX_COLUMNS)}")
    name, label, nbytes, crc32 = line
    refuse_name(name, where)
    return Entry(
        name,
        _whole(label, "label", where, *_INT64),
        _whole(nbytes, "nbytes", where, 1, MAX_SAMPLE_FILE_NBYTES),
        _whole(crc32, "crc32", where, 0, 2**32 - 1),
    )


def _whole(text: str, column: str, where: str, least: int, most: int) -> int:
    try:
        return read_whole(text, least, most)
    except ValueError as error:
        raise ScenarioError(f"{where}: {column} {error}") from None
