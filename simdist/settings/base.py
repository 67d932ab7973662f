"""Base of everything that a user writes, and the wording of its errors.

A message says what is wrong, the value, and what would be right. Where it stands (file, line, path) is added once, in
`simdist.scenario.loading`.
"""

import difflib
import math
import os
import reprlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, PydanticSerializationError

#: A problem: the keys and indices that lead to the value, and the message.
Fault: TypeAlias = tuple[tuple[str | int, ...], str]
_SettingsT = TypeVar("_SettingsT", bound="Settings")

_ENDINGS = {
    "_per_s": "_per_s",
    "_s": "",  # a number per second has no unit beside it
    "_Bps": "",
    "_flops": "",
    "_nbytes": "_size",
}
_UNITS = {"_s": ("s", "55 ms"), "_Bps": ("B/s", "25 Gbit/s or 25 GB/s"), "_flops": ("FLOP/s", "125 TFLOP/s")}
_UNITS |= {"nbytes": ("B", "45 MB")}  # of attributes by their ends: the SI unit, and examples
_UNITS |= {"rate_per_s": ("per s", "17 % per year")}
_BOUNDS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
    "too_short": "a list of {min_length} or more",
}


@dataclass(frozen=True, slots=True)
class FromFile:
    """Validation context of values that stand in a file: units must be written, paths are relative to `folder`."""

    folder: Path


def folder_of(info: ValidationInfo) -> Path:
    """Return the folder that paths are relative to: that of the file, or else the current one."""
    return info.context.folder if isinstance(info.context, FromFile) else Path()


class Settings(BaseModel):
    """Base of everything that a user writes: frozen, and an unknown key is refused with the nearest known one.

    The key in a file is the attribute without its unit: `latency_s` is `latency`, `sample_nbytes` is `sample_size`.
    """

    model_config = ConfigDict(
        frozen=True,
        defer_build=True,  # most commands use few of the classes
        extra="forbid",
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        alias_generator=lambda name: key_of(name),
    )

    def __hash__(self) -> int:
        return hash((type(self), *map(_hashable, dict(self).values())))

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Return attributes and values for `repr`, without defaults."""
        fields = type(self).model_fields
        return [(name, value) for name, value in self if _is_changed(fields[name], value)]

    @model_validator(mode="wrap")
    @classmethod
    def _reword(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Put every error into words here, where the keys of the class are at hand."""
        if info.context is None:
            value = plain(value)
            faults = bare_numbers(cls, value)
        else:
            faults = _python_names(cls, value)
        try:
            settings = handler(value)
        except ValidationError as error:
            faults += [_fault(cls, details) for details in error.errors(include_url=False) if not _misleads(details)]
        if faults:
            raise _refusal(cls.__name__, faults)
        return settings

    @model_serializer(mode="wrap", when_used="json")
    def _leave_out(self, handler: SerializerFunctionWrapHandler) -> Any:
        """Leave out what is None because it was not written; put `kind` first."""
        optional = {field.alias or name for name, field in type(self).model_fields.items() if field.default is None}
        kept = {key: value for key, value in handler(self).items() if value is not None or key not in optional}
        if kind := self.kind_in_files():
            kept["kind"] = kind
        return dict(sorted(kept.items(), key=lambda item: item[0] != "kind"))

    def kind_in_files(self) -> str | None:
        """Return the `kind` by which a file names the class, where that is not its own."""
        return None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values of some attributes, validated as the constructor does.

        Args:
            update: Values by the name of the attribute, such as `bandwidth_Bps`. For a group, a mapping.
            deep: As in pydantic.

        Raises:
            ValidationError: There is no such attribute, or the changed settings are not valid.
        """
        if not update:
            return super().model_copy(deep=deep)
        fields = type(self).model_fields
        unknown = [name for name in update if name not in fields]
        refuse(
            type(self).__name__,
            [((name,), f"unknown attribute {shown(name)}: {_nearest_attribute(name, fields)}") for name in unknown],
        )
        written = {
            name: value for name, value in self if name in self.model_fields_set or _is_changed(fields[name], value)
        }
        here = dict(self)
        update = {
            name: here[name].model_copy(update=value)
            if isinstance(here[name], SettingsGroup) and isinstance(value, Mapping)
            else value
            for name, value in update.items()
        }
        checked = type(self).model_validate(written | update)
        return super().model_copy(update={name: getattr(checked, name) for name in update}, deep=deep)

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return the settings as pydantic does, which takes Ctrl-C meanwhile for an error of theirs.

        Plain numbers are in SI units, under the names of attributes, which tell the unit. JSON has the keys of files.
        """
        options.setdefault("by_alias", options.get("mode") == "json")
        try:
            return super().model_dump(**options)
        except PydanticSerializationError as error:
            if "KeyboardInterrupt" in str(error):  # it has no cause
                raise KeyboardInterrupt from None
            raise


class SettingsGroup(Settings):
    """Base of settings that only group attributes of the settings above them."""


def unchecked_copy(settings: _SettingsT, **update: object) -> _SettingsT:
    """Return a copy with other values of some attributes that are known to be right.

    `Settings.model_copy` validates, which takes longer, and reads the files that the settings name.
    """
    return BaseModel.model_copy(settings, update=update)


def stated(settings: object, in_file: Any) -> Any:
    """Return settings as a file has them without defaults that nobody wrote."""
    if isinstance(settings, tuple) and isinstance(in_file, list):
        return [stated(*each) for each in zip(settings, in_file, strict=True)]
    if not (isinstance(settings, Settings) and isinstance(in_file, dict)):
        return in_file
    found = dict(in_file)
    for name, field in type(settings).model_fields.items():
        key = field.alias or name
        value = getattr(settings, name)
        if key not in found or key == "kind":
            continue
        if name in settings.model_fields_set or _is_changed(field, value):
            found[key] = stated(value, found[key])
        else:
            del found[key]
    return found


def refuse(title: str, faults: Iterable[Fault]) -> None:
    """Raise one pydantic ValidationError for all faults, or return if there are none."""
    faults = list(faults)
    if faults:
        raise _refusal(title, faults)


class Kinds(Protocol):
    """The classes of settings that a `kind` may name."""

    def names(self) -> Iterable[str]:
        """Return all kinds."""
        ...

    def find(self, kind: str, folder: Path) -> "type[Settings] | None":
        """Return the class of a kind; None if there is none.

        Raises:
            ValueError: There is something wrong with it.
        """
        ...


def validate_by_kind(value: object, kinds: Kinds, info: ValidationInfo) -> Any:
    """Validate a mapping as the class that its `kind` names; leave what is validated already.

    Unlike a discriminated union of pydantic, this keeps the paths in errors the same as in the file.
    """
    if isinstance(value, Settings):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"{shown(value)}: not a mapping: write e.g. {{kind: {next(iter(kinds.names()))}, ...}}")
    if "kind" not in value:
        refuse("kind", [(("kind",), f"required key 'kind' is missing: {nearest('', kinds.names())}")])
    kind = value["kind"]
    cls = None
    if isinstance(kind, str):
        try:
            cls = kinds.find(kind, folder_of(info))
        except ValueError as error:
            refuse("kind", [(("kind",), str(error))])
    if cls is None:
        refuse("kind", [(("kind",), f"unknown kind {shown(kind)}: {nearest(kind, kinds.names())}")])
        raise AssertionError("refuse raises")
    return cls.model_validate(value | {"kind": cls.model_fields["kind"].default}, context=info.context)


def nearest(word: object, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the nearest known one, or all of them.

    >>> nearest("bandwith", ["latency", "bandwidth"])
    "did you mean 'bandwidth'?"
    """
    known = list(known)
    close = difflib.get_close_matches(str(word)[:80], known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"


def plain(value: object) -> object:
    """Return a value from Python as a file could have it, whatever library it is of.

    Numbers of other libraries are numbers, arrays, columns and iterators are lists, paths are text, and durations are
    text with a unit. Masked values are NaN. Tables stay: only recordings take them.

    >>> plain({"nodes": np.int64(2), "delay": timedelta(milliseconds=200), "values": np.array([0.0, 0.5])})
    {'nodes': 2, 'delay': '0.2 s', 'values': [0.0, 0.5]}
    """
    match value:
        case np.generic() | timedelta() | Decimal() | Fraction():
            return _plain_number(value)
        case str() | int() | float() | None:  # most values
            return value
        case os.PathLike():
            return os.fspath(value)
        case Mapping():
            return {plain(key): plain(item) for key, item in value.items()}
        case list() | range():
            return [plain(item) for item in value]
        case tuple():
            return tuple(plain(item) for item in value)
        case set() | frozenset():
            return sorted((plain(item) for item in value), key=repr)
        case Iterator():
            return [plain(item) for item in value]
        case _ if hasattr(value, "__array__"):  # of numpy, or a column of pandas or another library
            array = without_mask(value)
            is_indexed = getattr(getattr(value, "index", None), "nlevels", 1) > 1
            if array.dtype.names or is_indexed:  # records, and columns by step and rank: only recordings take them
                return value
            return value if array.ndim > 1 else plain(list(array) if array.ndim else array[()])
        case _:
            return value


def _plain_number(value: np.generic | timedelta | Decimal | Fraction) -> object:
    match value:
        case np.timedelta64():
            return f"{float(value / np.timedelta64(1, 's'))!r} s"
        case np.generic():
            return value.item()
        case timedelta():
            return f"{value.total_seconds()!r} s"
        case _:
            number = float(value)
            return int(number) if number.is_integer() else number


def without_mask(value: object) -> NDArray[Any]:
    """Return an array with NaN in place of masked values."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        return np.asarray(np.ma.filled(value.astype(np.float64), np.nan))
    return np.asarray(value)


def bare_numbers(cls: type[Settings], value: object) -> list[Fault]:
    """Return a fault for each plain number whose key does not tell the unit, as `bandwidth` does not."""
    if not isinstance(value, dict):
        return []
    with_unit = _without_unit_in_files(cls)
    return [
        ((key,), f"{shown(item)}: of which unit? Write text, such as {example}, or {name} in SI units")
        for key, item in value.items()
        if key in with_unit and _is_bare(item)
        for name, example in (with_unit[key],)
    ]


@cache
def _without_unit_in_files(cls: type[Settings]) -> dict[object, tuple[str, str]]:
    """Return the keys of quantities: key -> the attribute, which tells the unit, and an example."""
    return {
        field.alias: (name, example)
        for name, field in cls.model_fields.items()
        for ending, (_, example) in _UNITS.items()
        if field.alias != name and name.endswith(ending)
    }


def in_si(name: str, value: object) -> Any:
    """Return numbers as text with the SI unit that the name of an attribute tells; other values stay.

    >>> in_si("delay_s", [0.1, "5 ms"]), in_si("sigma", 0.1)
    (['0.1 s', '5 ms'], 0.1)
    """
    match value:
        case list() | tuple():
            return [in_si(name, each) for each in value]
        case int() | float() if not isinstance(value, bool):
            units = [unit for ending, (unit, _) in _UNITS.items() if name.endswith(ending)]
            is_count = name.endswith("_per_s") and not name.endswith("rate_per_s")
            return f"{value!r} {units[-1]}" if units and not is_count else value
        case _:
            return value


def _is_bare(value: object) -> bool:
    """Tell whether there is a number without a unit in a value; 0 and infinity need none."""
    match value:
        case bool():
            return False
        case int() | float():
            return value != 0 and value != math.inf
        case list() | tuple():
            return any(map(_is_bare, value))
        case dict():
            return any(map(_is_bare, value.values()))
        case _:
            return False


def plural(n: int, noun: str) -> str:
    """Return a regular noun as it stands after a number.

    >>> f"1 {plural(1, 'step')}, 2 {plural(2, 'step')}, 0 {plural(0, 'step')}"
    '1 step, 2 steps, 0 steps'
    """
    return noun if n == 1 else f"{noun}s"


def listed(numbers: Sequence[int]) -> str:
    """Write numbers in ascending order as ranges.

    >>> listed([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def picked(found: object, *names: str, **keys: str) -> dict[str, Any]:
    """Return attributes as JSON has them: some by their names, others by a key of their own.

    >>> picked(range(2, 8, 3), "start", "step", end="stop")
    {'start': 2, 'step': 3, 'end': 8}
    """
    return {key: getattr(found, name) for key, name in {**dict(zip(names, names, strict=True)), **keys}.items()}


def shown(value: object) -> str:
    """Return a value as it stands in a file, shortened to fit a line."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    short.maxlevel = 2
    return short.repr(value)


def key_of(name: str) -> str:
    """Return the key in a file of an attribute: its name without the unit.

    >>> key_of("memory_bandwidth_Bps"), key_of("sample_nbytes")
    ('memory_bandwidth', 'sample_size')
    """
    for ending, replacement in _ENDINGS.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + replacement
    return name


def _hashable(value: object) -> object:
    """Return a value to hash in place of one that has mappings or lists in it, or that cannot be hashed."""
    match value:
        case Mapping():
            return frozenset((key, _hashable(item)) for key, item in value.items())
        case list() | tuple():
            return tuple(map(_hashable, value))
        case np.ndarray():
            return value.shape, value.dtype.str, value.tobytes()
        case Hashable():
            return value
        case _:
            return type(value)  # such as a callable dataclass; equality tells such values apart


def _is_changed(field: FieldInfo, value: object) -> bool:
    """Tell whether an attribute has another value than it has by default."""
    return field.is_required() or bool(value != field.get_default(call_default_factory=True, validated_data={}))


def _nearest_attribute(name: str, attributes: Iterable[str]) -> str:
    """Return the end of a message about an unknown attribute: the one that a key of files means, or the nearest."""
    attributes = list(attributes)
    means = [each for each in attributes if key_of(each) == name]
    return f"did you mean {means[0]!r}?" if means else nearest(name, attributes)


def _refusal(title: str, faults: Iterable[Fault]) -> ValidationError:
    return ValidationError.from_exception_data(
        title,
        [
            InitErrorDetails(type=PydanticCustomError("fault", "{text}", {"text": text}), loc=loc, input=None)
            for loc, text in faults
        ],
    )


def _python_names(cls: type[Settings], value: object) -> list[Fault]:
    """Return a fault for every attribute that is called by its name in Python, which has the unit."""
    aliases = {name for name, field in cls.model_fields.items() if field.alias not in (None, name)}
    written = value.keys() if isinstance(value, dict) else ()
    return [((name,), f"unknown key {shown(name)}: {nearest(name, _keys(cls))}") for name in written if name in aliases]


def _fault(cls: type[Settings], details: ErrorDetails) -> Fault:
    loc = details["loc"]
    kind = details["type"]
    context = details.get("ctx", {})
    match kind:
        case "fault":
            return loc, context["text"]
        case "value_error":
            return loc, str(context["error"])
        case "extra_forbidden" | "unexpected_keyword_argument" | "invalid_key":
            known = f": {nearest(loc[-1], _keys(cls))}" if len(loc) == 1 else ""
            return loc, f"unknown key {shown(loc[-1])}{known}"
        case "missing":
            return loc, f"required key {loc[-1]!r} is missing{_example(cls, loc[-1])}"
        case _:
            return loc, f"{shown(details['input'])}: {_remedy(cls, details)}"


def _misleads(details: ErrorDetails) -> bool:
    """Tell whether a list only seems too short: pydantic leaves out the items that have faults of their own."""
    return details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"]


def _remedy(cls: type[Settings], details: ErrorDetails) -> str:
    match details["type"]:
        case kind if kind in _BOUNDS:
            return f"write {_BOUNDS[kind].format(**details['ctx'])}"
        case "model_type" | "model_attributes_type" | "named_tuple_type" | "dict_type":
            return "not a mapping: write `key: value` lines" + (
                f" ({', '.join(_keys(cls))})" if not details["loc"] else ""
            )
        case "tuple_type" | "list_type":
            return "not a list: write [...], or lines that begin with '- '"
        case "string_type":
            return f"not text: write it in quotes, e.g. {str(details['input'])[:60]!r}"
        case "bool_type" | "bool_parsing":
            return "write true or false"
        case _:
            return details["msg"].replace("Input should", "should")


def _keys(cls: type[Settings]) -> dict[str, list[Any] | None]:
    return {field.alias or name: field.examples for name, field in cls.model_fields.items()}


def _example(cls: type[Settings], key: str | int) -> str:
    examples = _keys(cls).get(str(key))
    return f": write e.g. {key}: {examples[0]}" if examples else ""
