"""One run of the command line: what was asked for, what goes to which stream, what was saved."""

import json
import math
import sys
from dataclasses import dataclass, field

import click


@dataclass
class Session:
    """What the commands share.

    Args:
        as_json: The result is wanted as JSON.
        debug: The traceback of an error is wanted.
        saved: What is safe on disk, for the message after an interruption.
    """

    as_json: bool = False
    debug: bool = False
    saved: list[str] = field(default_factory=list)

    def say(self, message: str) -> None:
        """Tell the person; never part of the result."""
        click.echo(message, err=True)

    def result(self, document: object, text: str) -> None:
        """Print the result, as JSON or as text."""
        click.echo(json.dumps(_finite(document), allow_nan=False) if self.as_json else _encodable(text))

    def wrote(self, path: object) -> None:
        """Remember and tell that a file or directory was written."""
        self.saved.append(str(path))
        self.say(f"wrote {path}")


def _encodable(text: str) -> str:
    """Return the text with plain characters for those that stdout has not."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace("±", "+-").replace("─", "-").encode(encoding, "replace").decode(encoding)
    return text


def _finite(value: object) -> object:
    """Replace what JSON has no number for by null."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value
