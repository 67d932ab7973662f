"""Cutting the text of a trace between its events, and decoding what is cut off.

A cut is found by its looks, the end of one event and the start of the next, and proved by decoding: text up to a wrong
cut, in a string or in a nested object, is no whole list of events. Where decoding fails, what profilers are known to do
wrong is repaired in all of the text; where that fails too, every event is decoded by itself, so that a broken one costs
no other.
"""

import json
import re
from dataclasses import dataclass

from msgspec.json import Decoder, encode

from simdist.profiles.kineto.events import Event

_KEYS = "ph|cat|name|pid|tid|ts|dur|args|id|s|bp|tts|cname"
_CUT = re.compile(rf'\}}\s*(,)\s*\{{\s*"(?:{_KEYS})"'.encode())
_RESUME = re.compile(rf'\}}\s*(?:,\s*(?=\{{\s*"(?:{_KEYS})")|(?=\]\s*(?:,\s*"|\}}|$)))')
_STRAY = re.compile(rf'\]\s*,?\s*\{{\s*"(?:{_KEYS})"')
_NEAR_NBYTES = 1 << 16  # the last cut is nearly always within so many bytes of the end

# Values that are no JSON: `inf` (https://github.com/pytorch/kineto/issues/105), none at all, and strings without quotes
# (https://github.com/pytorch/pytorch/pull/172353). Also in lists, where only numbers are known to be wrong.
_NO_VALUE = re.compile(rb'((?<!\\)"\s*:\s*)(?![\s"\\\[{\d]|-\d|true\b|false\b|null\b)[^,}\]\n"]*')
_NO_NUMBER = re.compile(rb"([\[,]\s*)[+-]?(?:nan|inf|infinity)\b", re.IGNORECASE)
_BACKSLASH = re.compile(rb'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\')  # lone ones stand in paths of Windows
_SPACES = bytes(code if code >= 0x20 else 0x20 for code in range(0x100))  # for control characters in strings:
# https://github.com/pytorch/pytorch/issues/136180

_EVENTS = Decoder(list[Event], strict=False)  # not strict: a time may be quoted
_EVENT = Decoder(Event, strict=False)
_JSON = json.JSONDecoder(strict=False)  # not strict: strings may hold control characters


@dataclass(frozen=True, slots=True)
class Taken:
    """What was taken from the front of a text.

    Args:
        events: In the order of the text.
        rest: What follows them.
        n_broken: Places at which no event could be made of the text, and which were left out.
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
        is_last: No more text follows, so decode up to its end and not only up to the last place that is easily found.
    """
    cut = _last_cut(text)
    if cut is None:
        return _one_by_one(text) if is_last else Taken([], text)
    head, tail = text[: cut.start(1)], text[cut.end(1) :]
    if (events := _decoded(head)) is None:
        front = _one_by_one(head)
        rest = front.rest + text[cut.start(1) :]
    else:
        front, rest = Taken(events, b""), tail
    if not is_last or front.is_end:
        return Taken(front.events, rest, front.n_broken, front.is_end)
    back = _one_by_one(rest)
    return Taken(front.events + back.events, back.rest, front.n_broken + back.n_broken, back.is_end)


def _decoded(text: bytes) -> list[Event] | None:
    """Decode events all at once, as they are or repaired; None if that fails."""
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
    """Decode event by event, up to the end of the list or the first one that is not all there."""
    source = repaired(text).decode()
    events: list[Event] = []
    at = n_broken = 0
    while (at := _next(source, at)) < len(source):
        if _STRAY.match(source, at):
            at, n_broken = at + 1, n_broken + 1
            continue
        if source[at] == "]":
            return Taken(events, source[at + 1 :].encode(errors="replace"), n_broken, is_end=True)
        try:
            value, end = _JSON.raw_decode(source, at)
        except (json.JSONDecodeError, RecursionError) as error:
            if _is_cut_short(error, source):
                break
            n_broken += 1
            at = _resumed(source, at)
            continue
        at = end
        if (event := _event(value)) is not None:
            events.append(event)
        else:
            n_broken += 1
    return Taken(events, source[at:].encode(errors="replace"), n_broken)


def _event(value: object) -> Event | None:
    try:
        return _EVENT.decode(encode(value))
    except (ValueError, OverflowError, RecursionError):
        return None


def _next(source: str, at: int) -> int:
    while at < len(source) and source[at] in " \t\r\n,":
        at += 1
    return at


def _is_cut_short(error: json.JSONDecodeError | RecursionError, source: str) -> bool:
    """Tell whether decoding failed for want of more text."""
    if isinstance(error, RecursionError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(source.rstrip()) - len("\\u0000")


def _resumed(source: str, at: int) -> int:
    """Find the next event after a broken one."""
    found = _RESUME.search(source, at)
    return found.end() if found else len(source)


def repaired(text: bytes) -> bytes:
    """Undo what profilers are known to do wrong; of text that is right it changes white space only."""
    text = text.decode(errors="replace").encode().translate(_SPACES)
    text = _BACKSLASH.sub(lambda found: found[1] or rb"\\", text)
    return _NO_NUMBER.sub(rb"\1null", _NO_VALUE.sub(rb"\1null", text))
