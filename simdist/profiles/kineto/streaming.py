"""Reading the bytes of a trace file, compressed or not, a few megabytes at a time."""

import gzip
import zlib
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path

from simdist.errors import TraceError

CHUNK_NBYTES = 4 << 20  # so large that the time per chunk does not count, so small that memory does not
_START_NBYTES = 64  # enough to see what a file is
_GZIP = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OTHERS = {
    b"PK\x03\x04": "a zip archive: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it",
    b"\xfd7zXZ\x00": "compressed with xz: unpack it",
    b"BZh": "compressed with bzip2: unpack it",
    b"\xff\xfe": "UTF-16 text: convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text: convert it to UTF-8",
    b"\x80\x02": "a Python pickle",
    b"\x80\x03": "a Python pickle",
    b"\x80\x04": "a Python pickle",
    b"\x80\x05": "a Python pickle",
    b"SQLite format 3": "an SQLite database, such as Nsight Systems exports",
    b"<": "HTML or XML, perhaps the error page of a download",
}


class Chunks:
    """The unpacked bytes of a file, chunk by chunk, without a byte order mark.

    Args:
        path: The file. What is compressed with gzip is found by its first bytes, not by its name.
        chunk_nbytes: Bytes to read at once.

    Raises:
        TraceError: The file cannot be read, is empty, or begins as no JSON does.

    Attributes:
        damage: Why the file ended early; empty if it did not.
    """

    def __init__(self, path: Path, *, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        self.damage = ""
        self._path = path
        self._chunk_nbytes = chunk_nbytes

    def __iter__(self) -> Iterator[bytes]:
        try:
            with _opened(self._path) as file:
                yield from self._chunks(file)
        except OSError as error:
            raise TraceError(f"{self._path}: cannot be read: {error.strerror or error}") from error

    def _chunks(self, file: BufferedIOBase) -> Iterator[bytes]:
        chunk = self._read(file, max(self._chunk_nbytes, _START_NBYTES)).removeprefix(_BYTE_ORDER_MARK)
        if not chunk:
            raise TraceError(f"{self._path}: {self.damage or 'the file is empty'}; expected a profiler trace in JSON")
        while not (start := chunk.lstrip()):
            chunk = self._read(file, self._chunk_nbytes)
            if not chunk:
                raise TraceError(f"{self._path}: holds nothing but white space; expected a profiler trace in JSON")
        _check_start(self._path, start)
        yield start
        while chunk := self._read(file, self._chunk_nbytes):
            yield chunk

    def _read(self, file: BufferedIOBase, nbytes: int) -> bytes:
        """Read a chunk; of damaged data what comes before the damage, as far as the decompressor gives it out."""
        if self.damage:
            return b""
        parts: list[bytes] = []
        try:
            while nbytes and (part := file.read1(nbytes)):
                parts.append(part)
                nbytes -= len(part)
        except EOFError:
            self.damage = "its compressed data end early"
        except (zlib.error, gzip.BadGzipFile) as error:
            self.damage = f"its compressed data are damaged: {error}"
        return b"".join(parts)


def _opened(path: Path) -> BufferedIOBase:
    if not path.is_file():  # also what would wait for a writer: a named pipe
        raise TraceError(f"{path}: {'is not a regular file' if path.exists() else 'no such file'}")
    with path.open("rb") as file:
        is_packed = file.read(len(_GZIP)) == _GZIP
    return gzip.open(path, "rb") if is_packed else path.open("rb")


def _check_start(path: Path, start: bytes) -> None:
    """Refuse what cannot be JSON, and say what it looks like."""
    if start.startswith((b"{", b"[")):
        return
    for magic, kind in _OTHERS.items():
        if start.startswith(magic):
            raise TraceError(f"{path}: is {kind}; expected a profiler trace in JSON, plain or compressed with gzip")
    raise TraceError(f"{path}: begins with {start[:16]!r}; a profiler trace in JSON begins with {{ or [")
