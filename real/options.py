"""Types of options with units, of all commands that measure."""

from collections.abc import Callable

import click

from simdist.errors import ScenarioError
from simdist.settings.units import format_duration, parse_Bps, parse_nbytes, parse_seconds

_MOST_S = 86400.0


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """The type of options whose text a function parses."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        """Take the name of the type, and the function, whose ValueError tells the right form."""
        self.name = name
        self._parse = parse

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Return the value, or name the option in the error."""
        try:
            return self._parse(value)
        except ValueError as error:
            raise ScenarioError(f"{param.opts[-1] if param else self.name}: {error}") from None


def time_of(text: str) -> float:
    """Return the seconds of a time such as "8 s" or "2 min"; a number alone is one of seconds.

    Raises:
        ValueError: It is neither.
    """
    try:
        float(text)
    except ValueError:
        return parse_seconds(text)
    return parse_seconds(f"{text} s")


def _timeout_of(text: str) -> float:
    seconds = time_of(text)
    if not 1 <= seconds <= _MOST_S:
        raise ValueError(f"{format_duration(seconds)}: write 1 s to {format_duration(_MOST_S)}")
    return seconds


SIZE = Parsed("size", parse_nbytes)
TIME = Parsed("time", time_of)
RATE = Parsed("rate", parse_Bps)
timeout_option = click.option(
    "timeout_s", "--timeout", type=Parsed("time", _timeout_of), default="60 s", help="To wait for others."
)
