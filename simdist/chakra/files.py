"""Files of execution traces: one per rank, `PREFIX.<rank>.et`, messages that follow one another, each after its length.

The first message is the head, the others are nodes. There is no mark at the beginning and none at the end. A file may
be compressed with gzip, which readers in Python take, and simulators mostly do not.
"""

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, TypeVar

from simdist.chakra.messages import decode_metadata, decode_node, encode_metadata, encode_node
from simdist.chakra.schema import Metadata, Node
from simdist.chakra.wire import DamageError, varint
from simdist.errors import TraceError

MAX_MESSAGE_NBYTES = 64 * 1024**2  # nodes take hundreds of bytes, some thousands; a damaged length may say gigabytes
_MAX_LENGTH_NBYTES = 5  # a varint of 32 bits
_GZIP = b"\x1f\x8b"

_Message = TypeVar("_Message")


def write_trace(file: IO[bytes], metadata: Metadata, nodes: Iterable[Node]) -> int:
    """Write a trace and return its size in bytes."""
    nbytes = _write_message(file, encode_metadata(metadata))
    return nbytes + sum(_write_message(file, encode_node(node)) for node in nodes)


def _write_message(file: IO[bytes], message: bytes) -> int:
    return file.write(varint(len(message)) + message)


def read_trace(path: Path) -> Iterator[Metadata | Node]:
    """Yield the head of a trace, then its nodes; one of them is in memory at a time.

    Args:
        path: The file, plain or compressed with gzip.

    Raises:
        TraceError: It cannot be read or is damaged; names the byte, which of a compressed file is one of its contents.
    """
    try:
        with _open(path) as file:
            messages = _messages(path, file)
            at, first = next(messages)
            yield _decoded(path, at, first, decode_metadata)
            for at, message in messages:
                yield _decoded(path, at, message, decode_node)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: its compression is damaged: {error}: write or copy it again") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None


def _open(path: Path) -> BufferedReader | gzip.GzipFile:
    with path.open("rb") as file:
        is_compressed = file.read(len(_GZIP)) == _GZIP
    return gzip.open(path, "rb") if is_compressed else path.open("rb")


def _messages(path: Path, file: BufferedReader | gzip.GzipFile) -> Iterator[tuple[int, bytes]]:
    """Yield where each message begins, and its bytes. The first may be empty: a head without a version."""
    at, is_first = 0, True
    while (length := _read_length(path, file, at)) is not None:
        nbytes, at = length
        if not nbytes and not is_first and file.read(1):
            raise TraceError(f"{path}: byte {at}: a message of length 0, which ends a trace, and more behind it")
        if nbytes > MAX_MESSAGE_NBYTES:
            raise TraceError(
                f"{path}: byte {at}: a message of {nbytes:,} bytes, when a node has some hundreds: it is damaged, or "
                f"no Chakra trace; write an .et file of `chakra_converter` or `simdist chakra export`"
            )
        message = file.read(nbytes)
        if len(message) < nbytes:
            raise TraceError(
                f"{path}: byte {at}: ends {nbytes - len(message):,} bytes before the end of a message: it is cut "
                f"off, or no Chakra trace"
            )
        if nbytes or is_first:
            yield at, message
        at, is_first = at + nbytes, False
    if is_first:
        raise TraceError(f"{path}: is empty: a Chakra trace begins with its version")


def _read_length(path: Path, file: BufferedReader | gzip.GzipFile, at: int) -> tuple[int, int] | None:
    """Return the length that stands at byte `at`, and where its message begins; None at the end of the file."""
    length = 0
    for n in range(_MAX_LENGTH_NBYTES):
        byte = file.read(1)
        if not byte and n:
            raise TraceError(f"{path}: byte {at}: ends in the middle of a message's length: write or copy it again")
        if not byte:
            return None
        length |= (byte[0] & 0x7F) << 7 * n
        if byte[0] < 0x80:
            return length, at + n + 1
    raise TraceError(f"{path}: byte {at}: a length of more than {_MAX_LENGTH_NBYTES} bytes: it is no Chakra trace")


def _decoded(path: Path, at: int, message: bytes, decode: Callable[[bytes], _Message]) -> _Message:
    try:
        return decode(message)
    except DamageError as damage:
        what = "the head" if decode is decode_metadata else "a node"
        raise TraceError(
            f"{path}: byte {at + damage.at}: {damage}, in {what} that begins at byte {at}: it is damaged, or no Chakra "
            f"trace"
        ) from None
