"""YAML without surprises: what stands there is what is meant, and every value knows its line.

Plain YAML loaders read `NO` as false, `1:30` as 90 and `1e9` as text, and take the last of two equal keys. Here:

* only `true` and `false` are truth values, `null`, `~` and nothing are null;
* numbers are those of YAML 1.2 (`1e9` is one) that fit 64 bits; anything else is text;
* keys are text or whole numbers and may not repeat; tags and merge keys are refused; anchors and aliases work;
* nesting is limited, and so is what aliases expand to.

The document is built from the parser's events, without recursion in foreign code: no input can exhaust the stack.

>>> document = parse("a: {b: NO, c: 1e9}")
>>> document.root, document.locate(("a", "c"))[0]
({'a': {'b': 'NO', 'c': 1000000000.0}}, TextPosition(line=1, column=12))
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import yaml

from simdist.settings.base import shown

try:
    from yaml import CSafeLoader as _Loader
except ImportError:  # PyYAML without libyaml
    from yaml import SafeLoader as _Loader  # type: ignore[assignment]


Path: TypeAlias = tuple[str | int, ...]

#: Keys of a cluster, a workload or failures under which it names, or has, what its other keys override.
BASES = ("preset", "file", "base")
#: Keys that say the same in two ways, or that belong to a measurement. One written over a preset replaces the others.
RIVALS = {
    "tensors": ("tensors_file", "transformer"),
    "tensors_file": ("tensors", "transformer"),
    "transformer": ("tensors", "tensors_file"),
    "latency": ("table",),
    "bandwidth": ("table",),
    "efficiency": ("table",),
    "table": ("latency", "bandwidth", "efficiency"),
    "forward": ("step_times", "measured_batch_size", "launches"),
    "step_times": ("forward", "backward", "measured_batch_size", "launches"),
    "utilization": ("utilization_batch_size", "utilization_ranks"),
}

_MAX_DEPTH = 50
_MAX_VALUES = 1_000_000
_INTEGER = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "~": None, "": None}


def path_text(path: Path) -> str:
    """Write a path as people do.

    >>> path_text(("cluster", "slow_devices", 0, "speed"))
    'cluster.slow_devices[0].speed'
    """
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


class TextPosition(NamedTuple):
    """Where a key, or an item of a list, begins; both count from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong at a line; `path` leads to the value, and is empty if there is none."""

    line: int
    path: Path
    message: str


@dataclass(slots=True)
class Document:
    """A parsed file: its value, the places in it, and what was wrong with the YAML itself."""

    root: object = None
    problems: list[Problem] = field(default_factory=list)
    places: dict[tuple[int, str | int], TextPosition] = field(default_factory=dict)
    """By the id of the container in `root` and the key in it: an alias is stored once, however often it is used."""

    def locate(self, path: Path) -> tuple[TextPosition, Path]:
        """Return where the value is that `path` leads to, or the last one on the way that exists.

        A path that goes on below a value that is no container names no value (but, say, one of the types it could have
        had); the path that is returned is without it.
        """
        value = self.root
        place = TextPosition(1, 1)
        for depth, key in enumerate(path):
            if not isinstance(value, dict | list):
                return place, path[:depth]
            found = self.places.get((id(value), key))
            if found is None:
                break
            place = found
            value = value[key]  # type: ignore[index]  # `places` has only keys that fit
        return place, path


def parse(text: str) -> Document:
    """Parse one YAML document; problems are collected in the result, not raised."""
    document = Document()
    try:
        _Builder(text, document).build()
    except _StopError as stop:
        document.problems.append(stop.problem)
    except yaml.MarkedYAMLError as error:
        document.problems.append(_syntax_problem(text, error))
    except (yaml.YAMLError, UnicodeError) as error:
        document.problems.append(Problem(1, (), f"not text that YAML can hold: {str(error).splitlines()[0]}"))
    return document


def with_numbers_as_keys(value: object) -> object:
    """Undo that JSON has only text as keys: `levels: {2: 8}` must not become `levels: {'2': 8}`."""
    match value:
        case dict():
            return {int(key) if key.isdigit() else key: with_numbers_as_keys(item) for key, item in value.items()}
        case list():
            return [with_numbers_as_keys(item) for item in value]
        case _:
            return value


def dump(value: object) -> str:
    """Write YAML that `parse` reads back as the same value, and other loaders too."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def dump_line(value: object) -> str:
    """Write a mapping or list on one line.

    >>> dump_line({"levels": {2: 4, 4: "world"}})
    '{levels: {2: 4, 4: world}}'
    """
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31, default_flow_style=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


class _StopError(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class _Builder:
    """Builds the value of a document from the parser's events."""

    def __init__(self, text: str, document: Document) -> None:
        self._events: Iterator[yaml.Event] = iter(yaml.parse(text, Loader=_Loader))
        self._document = document
        self._anchors: dict[str, tuple[object, int]] = {}  # value, and the number of values that it expands to
        self._n_values = 0

    def build(self) -> None:
        next(self._events)  # the stream begins
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return
        self._document.root = self._value(next(self._events), ())
        next(self._events)  # the document ends
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise _StopError(Problem(_place(after).line, (), "a second document begins: write one per file"))

    def _value(self, event: Any, path: Path) -> object:
        if len(path) > _MAX_DEPTH:
            raise _StopError(Problem(_place(event).line, path[:3], f"nested more than {_MAX_DEPTH} levels deep"))
        if isinstance(event, yaml.AliasEvent):
            return self._expand(event, path)
        if event.tag is not None:
            self._report(event, path, f"tag {shown(event.tag)}: tags are not supported, remove it")
        before = self._n_values
        self._count(event, path, 1)
        if isinstance(event, yaml.ScalarEvent):
            value: object = _scalar(event.value) if event.implicit[0] else event.value
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._sequence(path)
        else:
            value = self._mapping(path)
        if event.anchor:
            self._anchors[event.anchor] = value, self._n_values - before
        return value

    def _sequence(self, path: Path) -> list[object]:
        items: list[object] = []
        while True:
            event = next(self._events)
            if isinstance(event, yaml.SequenceEndEvent):
                return items
            self._document.places[id(items), len(items)] = _place(event)
            items.append(self._value(event, (*path, len(items))))

    def _mapping(self, path: Path) -> dict[str | int, object]:
        items: dict[str | int, object] = {}
        while True:
            event = next(self._events)
            if isinstance(event, yaml.MappingEndEvent):
                return items
            key = self._key(event, path)
            value = self._value(next(self._events), (*path, key))
            if key in items:
                first = self._document.places[id(items), key].line
                self._report(event, (*path, key), f"duplicate key {shown(key)}: line {first} has it too, remove one")
            elif key == "<<":
                self._report(event, (*path, key), "merge keys are not supported: write the keys out, or use `preset:`")
            else:
                self._document.places[id(items), key] = _place(event)
                items[key] = value

    def _key(self, event: Any, path: Path) -> str | int:
        if not isinstance(event, yaml.ScalarEvent):
            what = "a key is text or a whole number, not a list, a mapping or an alias"
            raise _StopError(Problem(_place(event).line, path, what))
        key = _scalar(event.value) if event.implicit[0] else event.value
        return key if type(key) is int else str(event.value)

    def _expand(self, event: Any, path: Path) -> object:
        if event.anchor not in self._anchors:
            raise _StopError(
                Problem(_place(event).line, path, f"*{event.anchor} has no anchor &{event.anchor} before it")
            )
        value, n_values = self._anchors[event.anchor]
        self._count(event, path, n_values)
        return value

    def _count(self, event: Any, path: Path, n_values: int) -> None:
        self._n_values += n_values
        if self._n_values > _MAX_VALUES:
            raise _StopError(Problem(_place(event).line, path[:3], f"aliases expand to more than {_MAX_VALUES} values"))

    def _report(self, event: Any, path: Path, message: str) -> None:
        self._document.problems.append(Problem(_place(event).line, path, message))


class _Dumper(yaml.SafeDumper):
    """Quotes what any loader may misread; writes equal values twice rather than with an alias."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # Otherwise rare characters (U+0085, U+2028) stand there as they are and are read as line breaks.
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"^(?:{_FLOAT.pattern})$"), list("-+.0123456789"))


def _scalar(text: str) -> object:
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text) and len(text) < 70:
        number = int(text, 0) if text[:2] in ("0x", "0o") else int(text)
        return number if abs(number) < 2**64 else text
    return float(text) if _FLOAT.fullmatch(text) and math.isfinite(float(text)) else text


def _place(event: Any) -> TextPosition:
    return TextPosition(event.start_mark.line + 1, event.start_mark.column + 1)


def _syntax_problem(text: str, error: yaml.MarkedYAMLError) -> Problem:
    lines = text.splitlines()
    number = min(error.problem_mark.line if error.problem_mark else 0, len(lines) - 1)  # the end is no line
    line = lines[number]
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return Problem(number + 1, (), "a tab in the indentation: indent with spaces")
    if "nesting depth" in (error.problem or ""):  # the parser's own limit is 1,000
        return Problem(number + 1, (), f"nested more than {_MAX_DEPTH} levels deep")
    context = f" {error.context}" if error.context else ""
    return Problem(number + 1, (), f"not YAML: {error.problem}{context}: {shown(line.strip())}")
