"""Amounts of training that are a number of steps or a time, such as the distance of checkpoints."""

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import PlainSerializer, PlainValidator

from simdist.settings.base import shown
from simdist.settings.units import parse_seconds, parse_whole

_MOST_STEPS = 10**15


@dataclass(frozen=True, slots=True)
class Elapsed:
    """A time of training.

    Args:
        seconds: Above 0.
    """

    seconds: float


def _read(value: object) -> int | Elapsed:
    """Read a number of steps, or a time."""
    if isinstance(value, Elapsed):
        return value
    words = value.split() if isinstance(value, str) else []
    if len(words) == 2 and words[1] in ("step", "steps"):
        return _read_steps(words[0])
    if isinstance(value, str):
        seconds = parse_seconds(value)
        if not seconds:
            raise ValueError(f"{shown(value)}: write a time above 0 s, e.g. 30 min, or a number of steps")
        return Elapsed(seconds)
    return _read_steps(value)


def _read_steps(value: object) -> int:
    steps = int(value) if isinstance(value, str) and value.isdecimal() else parse_whole(value)
    if steps < 1:
        raise ValueError(f"{steps}: write at least 1")
    if steps > _MOST_STEPS:
        raise ValueError(f"{shown(value)}: write {_MOST_STEPS:,} steps or less")
    return steps


def _written(value: int | Elapsed) -> int | str:
    return f"{value.seconds!r} s" if isinstance(value, Elapsed) else value


#: A number of steps, or a time.
StepsOrTime: TypeAlias = Annotated[int | Elapsed, PlainValidator(_read), PlainSerializer(_written, when_used="json")]
