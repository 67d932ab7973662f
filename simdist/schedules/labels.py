"""Labels of schedules: one description of each kind writes them and reads them back.

A label is the word of the kind and a piece for each setting that it shows: `hsdp-8-local-4-keep`. Settings that it does
not show are read as their defaults.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
_NEVER = object()  # is no setting's value
_OTHER = r"-([a-z]+(?:_[a-z]+)+)-(\w+(?:\.\d+)?)"  # of a field that has no piece, as in `fsdp-forward_prefetch-2`
#: Where settings that have no piece may begin in a label.
OTHERS: Final = re.compile(_OTHER)
_WORDS = {"None": None, "True": True, "False": False}


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a label that shows one setting.

    Args:
        field: Name of the setting.
        pattern: Regular expression of its texts.
        text: Returns the text of a value; empty if the label does not show it.
        read: Returns the value of a text; ValueError if there is none.
        silent: Value that labels do not show, if it is not the default of the field.
        is_required: Whether every label has it.
    """

    field: str
    pattern: str
    text: Callable[[Any], str]
    read: Callable[[str], object]
    silent: object = None
    is_required: bool = False


#: The word of the kind, and the pieces in their order.
LabelForm: TypeAlias = tuple[str, tuple[Piece, ...]]
REQUIRED: Final = _NEVER


def piece(
    field: str,
    texts: Sequence[tuple[object, str]] = (),
    *,
    before: str | None = None,
    default: object = None,
    silent: object = None,
) -> Piece:
    """Return a piece with a text for each of some values, and for numbers.

    Args:
        field: Name of the setting.
        texts: Values that have a text of their own.
        before: Text before a number; None: the piece shows none.
        default: Number that is not shown; `REQUIRED`: all are.
        silent: See `Piece`.
    """
    values = {text: value for value, text in texts}

    def text(value: object) -> str:
        for each, shown in texts:
            if each == value and isinstance(each, bool) == isinstance(value, bool):
                return shown
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return before + _number_text(value) if before is not None and is_number and value != default else ""

    def read(found: str) -> object:
        return values[found] if found in values else _number(found.removeprefix(before or ""))

    patterns = [re.escape(each) for each in sorted(values, key=len, reverse=True)]
    patterns += [] if before is None else [re.escape(before) + _NUMBER]
    return Piece(field, "|".join(patterns), text, read, silent, is_required=default is REQUIRED)


def written(settings: object, form: LabelForm) -> str:
    """Return the label of a schedule."""
    word, pieces = form
    return word + texts(settings, pieces)


def texts(settings: object, pieces: Sequence[Piece]) -> str:
    """Return the texts of some settings of a schedule."""
    values: dict[str, object] = vars(settings)
    return "".join(each.text(values[each.field]) for each in pieces)


def parse_label(form: LabelForm, label: str) -> dict[str, object] | None:
    """Return the settings that a label shows; None if it is not of this form.

    >>> form = ("local", (piece("period", before="-", default=REQUIRED), piece("overlap_steps", before="-overlap")))
    >>> parse_label(form, "local-8-overlap2"), parse_label(form, "local"), parse_label(form, "sync")
    ({'period': 8, 'overlap_steps': 2}, None, None)
    """
    found = _expression(form).fullmatch(label)
    if found is None:
        return None
    settings: dict[str, object] = {}
    try:
        for number, each in enumerate(form[1]):
            if text := found[f"p{number}"]:
                settings[each.field] = each.read(text)
            elif each.silent is not None:
                settings[each.field] = each.silent
    except ValueError:  # of a label inside it
        return None
    return settings


def read_others(text: str) -> dict[str, object] | None:
    """Return settings that are written as their names and values, such as `-forward_prefetch-2`."""
    if not re.fullmatch(f"(?:{_OTHER})*", text):
        return None
    return {name: _WORDS[value] if value in _WORDS else _value(value) for name, value in re.findall(_OTHER, text)}


@cache
def _expression(form: LabelForm) -> "re.Pattern[str]":
    word, pieces = form
    parts = (f"(?P<p{number}>{each.pattern}){'' if each.is_required else '?'}" for number, each in enumerate(pieces))
    return re.compile(re.escape(word) + "".join(parts), re.ASCII)


def _number(text: str) -> int | float:
    return int(text) if text.isdecimal() else float(text)


def _number_text(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _value(text: str) -> object:
    return _number(text) if re.fullmatch(_NUMBER, text) else text
