"""The bytes of a trace file, split between its events into chunks of a few megabytes, and decoded.

A cut is placed where the text looks like the end of one event and the start of the next. Decoding confirms it: text up
to a wrong cut, in a string or in a nested object, is not a complete list of events. If decoding fails, known errors of
profilers are repaired in the whole text. If that fails too, each event is decoded separately.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

from msgspec.json import Decoder, encode

from simdist.errors import TraceError, naming_file
from simdist.files import open_unpacked
from simdist.profiles.kineto.events import Event

CHUNK_NBYTES = 4 << 20  # large enough for the time per chunk to be negligible, small enough for its memory to be
_MAX_BLANK_NBYTES = 32 << 20  # white space before a trace begins
_START_NBYTES = 64  # enough to see what a file is
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Chunks:
    """The unpacked bytes of a file, chunk by chunk, without a byte order mark.

    Args:
        path: The file. A file compressed with gzip is recognised by its first bytes, not by its name.
        chunk_nbytes: Bytes to read at once.

    Raises:
        TraceError: The file cannot be read, is empty, or does not begin like JSON.

    Attributes:
        damage: Why the file ended early; empty if it did not.
    """

    def __init__(self, path: Path, *, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        self.damage = ""
        self._path = path
        self._chunk_nbytes = chunk_nbytes

    def __iter__(self) -> Iterator[bytes]:
        with naming_file(self._path, "read", TraceError), open_unpacked(self._path) as file:
            yield from self._chunks(file)

    def _chunks(self, file: BufferedIOBase) -> Iterator[bytes]:
        chunk = self._read(file, max(self._chunk_nbytes, _START_NBYTES)).removeprefix(_BYTE_ORDER_MARK)
        if not chunk:
            raise TraceError(f"{self._path}: {self.damage or 'the file is empty'}; expected a profiler trace in JSON")
        n_blank = 0
        while not (start := chunk.lstrip()):
            n_blank += len(chunk)
            chunk = self._read(file, self._chunk_nbytes)
            if not chunk or n_blank > _MAX_BLANK_NBYTES:
                raise TraceError(f"{self._path}: holds nothing but white space; expected a profiler trace in JSON")
        _check_start(self._path, start)
        yield start
        while chunk := self._read(file, self._chunk_nbytes):
            yield chunk

    def _read(self, file: BufferedIOBase, nbytes: int) -> bytes:
        """Read a chunk; of damaged data, the part before the damage that the decompressor returns."""
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


def _check_start(path: Path, start: bytes) -> None:
    """Refuse a file that cannot be JSON, with its apparent format."""
    if start.startswith((b"{", b"[")):
        return
    raise TraceError(
        f"{path}: begins with {start[:16]!r}; a profiler trace is JSON, which begins with {{ or [, plain or compressed "
        f"with gzip"
    )


_KEYS = "ph|cat|name|pid|tid|ts|dur|args|id|s|bp|tts|cname"
_CUT = re.compile(rf'\}}\s*(,)\s*\{{\s*"(?:{_KEYS})"'.encode())
_RESUME = re.compile(rf'\}}\s*(?:,\s*(?=\{{\s*"(?:{_KEYS})")|(?=\]\s*(?:,\s*"|\}}|$)))')
_STRAY = re.compile(rf'\]\s*,?\s*\{{\s*"(?:{_KEYS})"')
_GAP = re.compile(r"[ \t\r\n,]*")
_NEAR_NBYTES = 1 << 16  # the last cut is nearly always this close to the end

# Values that are not JSON: `inf` (https://github.com/pytorch/kineto/issues/105), missing values, and strings without
# quotes (https://github.com/pytorch/pytorch/pull/172353). In lists, only numbers are known to be wrong.
_NO_VALUE = re.compile(rb'((?<!\\)"\s*:\s*)(?![\s"\\\[{\d]|-\d|true\b|false\b|null\b)[^,}\]\n"]*')
_NO_NUMBER = re.compile(rb"([\[,]\s*)[+-]?(?:nan|inf|infinity)\b", re.IGNORECASE)
_BACKSLASH = re.compile(rb'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\')  # single ones occur in Windows paths
_SPACES = bytes(code if code >= 0x20 else 0x20 for code in range(0x100))  # for control characters in strings:
# https://github.com/pytorch/pytorch/issues/136180

_EVENTS = Decoder(list[Event], strict=False)  # not strict: a time may be quoted
_EVENT = Decoder(Event, strict=False)
_LONGEST_WHOLE = 100  # digits; `int` refuses thousands of digits


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= _LONGEST_WHOLE else float(digits)


_JSON = json.JSONDecoder(strict=False, parse_int=_whole)  # not strict: strings may hold control characters


@dataclass(frozen=True, slots=True)
class Taken:
    """Events taken from the front of a text.

    Args:
        events: In the order of the text.
        rest: The bytes after them.
        n_broken: Number of places that could not be decoded as an event and were left out.
        is_end: The list of events ended: `rest` begins after its bracket.
    """

    events: list[Event]
    rest: bytes
    n_broken: int = 0
    is_end: bool = False


def take(text: bytes, *, is_last: bool) -> Taken:
    """Decode the events at the front of a text that begins between two events.

    Args:
        text: From the inside of the list of events.
        is_last: No more text follows, so decode up to its end, not only up to the last cut that is easy to find.
    """
    cut = _last_cut(text)
    if cut is None:
        return _one_by_one(text) if is_last else Taken([], text)
    head = text[: cut.start(1)]
    tail = text[cut.end(1) :]
    if (events := _decoded(head)) is None:
        front = _one_by_one(head)
        rest = front.rest + text[cut.start(1) :]
    else:
        front = Taken(events, b"")
        rest = tail
    if not is_last or front.is_end:
        return Taken(front.events, rest, front.n_broken, front.is_end)
    back = _one_by_one(rest)
    return Taken(front.events + back.events, back.rest, front.n_broken + back.n_broken, back.is_end)


def _decoded(text: bytes) -> list[Event] | None:
    """Decode all events at once, as they are or repaired; None if that fails."""
    for repair in (bytes, repaired):
        try:
            return _EVENTS.decode(b"[" + repair(text) + b"]")
        except (ValueError, RecursionError):
            continue
    return None


def _last_cut(text: bytes) -> re.Match[bytes] | None:
    """Find the last place that looks like the end of one event and the start of another."""
    for start in (max(0, len(text) - _NEAR_NBYTES), 0):
        if cuts := list(_CUT.finditer(text, start)):
            return cuts[-1]
    return None


def _one_by_one(text: bytes) -> Taken:
    """Decode event by event, up to the end of the list or the first incomplete event."""
    source = repaired(text).decode()
    events: list[Event] = []
    at = n_broken = 0
    while (at := _next(source, at)) < len(source):
        if _STRAY.match(source, at):
            at = at + 1
            n_broken = n_broken + 1
            continue
        if source[at] == "]":
            return Taken(events, source[at + 1 :].encode(errors="replace"), n_broken, is_end=True)
        try:
            value, end = _JSON.raw_decode(source, at)
        except (json.JSONDecodeError, RecursionError) as error:
            if _is_cut_short(error, source):
                break
            n_broken += 1
            found = _RESUME.search(source, at)  # the next event
            at = found.end() if found else len(source)
            continue
        at = end
        try:
            events.append(_EVENT.decode(encode(value)))
        except (ValueError, OverflowError, RecursionError):
            n_broken += 1
    return Taken(events, source[at:].encode(errors="replace"), n_broken)


def _next(source: str, at: int) -> int:
    gap = _GAP.match(source, at)
    return gap.end() if gap else at


def _is_cut_short(error: json.JSONDecodeError | RecursionError, source: str) -> bool:
    """Tell whether decoding failed because the text ends too early."""
    if isinstance(error, RecursionError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(source.rstrip()) - len("\\u0000")


def repaired(text: bytes) -> bytes:
    """Repair known errors of profilers; in correct text, only white space changes."""
    text = text.decode(errors="replace").encode().translate(_SPACES)
    text = _BACKSLASH.sub(lambda found: found[1] or rb"\\", text)
    return _NO_NUMBER.sub(rb"\1null", _NO_VALUE.sub(rb"\1null", text))
