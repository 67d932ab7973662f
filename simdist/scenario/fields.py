"""Fields of settings by their paths, as their error messages write them: `cluster.network.bandwidth`."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path as FilePath
from types import UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError, create_model

from simdist.scenario import strict_yaml
from simdist.scenario.strict_yaml import BASES, RIVALS, Path, path_text
from simdist.settings.base import (
    FromFile,
    Settings,
    bare_numbers,
    key_of,
    nearest,
    plain,
    refuse,
    shown,
    unchecked_copy,
)
from simdist.settings.units import SI, Unit

_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+|\[\d+\])*", re.ASCII)
_PARTS = re.compile(r"\w+", re.ASCII)
_MAX_DIGITS = 9  # of an index
#: Parts of a scenario that may be just a name.
BASED = ("cluster", "workload", "failures")

_STANDING_FOR_OTHERS = {  # keys that are read before the settings are
    **{(part, base): f"{part}.{base}" for part in BASED for base in BASES},
    ("workload", "tensors_file"): "workload.tensors_file",
    ("workload", "transformer"): "workload.transformer",
}
_FOR_PEOPLE = ("name", "source")
_OF_OTHERS = ("steps",)  # `3 epochs` are as many as cluster and data say
#: Of values that are read by themselves, where no files are at hand.
ANYWHERE = FromFile(folder=FilePath())


@dataclass(frozen=True)
class ScenarioField:
    """A field of a scenario that is varied.

    Args:
        path: Keys and indices that lead to it.
        column: Its name in tables: the path, ending in the name with its unit, such as `cluster.network.bandwidth_Bps`.
        is_number: Whether its values are numbers, so that distributions of them make sense.
        is_whole: Whether they are whole numbers.
        reader: Reads and writes values of it; None if it is no single value.
        wording: Settings with the one key `value`, which say what is wrong with a value as a scenario does.
    """

    path: Path
    column: str
    is_number: bool = False
    is_whole: bool = False
    reader: TypeAdapter[Any] | None = None
    wording: type[Settings] | None = None

    def number(self, value: object) -> object:
        """Return a value as tables have it: in SI units, or as text if it is null or no single value.

        Raises:
            ValueError: It is wrong, whatever the rest of the scenario is.
        """
        if self.reader is None:
            return flat_text(value)
        if isinstance(value, str) and self.path == _OF_OTHERS:
            if fault := self._fault(value):
                raise ValueError(fault)
            return value
        try:
            found: object = self.reader.validate_python(value, context=ANYWHERE)
        except ValidationError:
            raise ValueError(self._fault(value) or f"{shown(value)} is not a value of {self.column}") from None
        return flat_text(value) if found is None else found

    def text(self, count: float, unit: Unit = SI) -> object:
        """Return so many of a unit as they are written in a scenario file; where they must be whole, the nearest one.

        Args:
            count: How many.
            unit: That of bounds in a file; without one, `count` is in SI units, and the shortest text is returned.
        """
        if unit.text:
            return unit.written(count)
        number = count
        number = round(number) if self.is_whole else number
        if self.reader is None:
            return number
        try:
            return self.reader.dump_python(self.reader.validate_python(number), mode="json")
        except ValidationError:
            return number  # more than the field allows; the scenario that has it says so

    def _fault(self, value: object) -> str | None:
        """Say what is wrong with a value, if anything."""
        try:
            if self.wording:
                self.wording.model_validate({"value": value}, context=ANYWHERE)
        except ValidationError as error:
            return "; ".join(each["msg"] for each in error.errors(include_url=False))
        return None


def parse_path(text: str) -> Path:
    """Read a path; an index may also be written as a key, because YAML takes `[` inside braces for a list.

    Raises:
        ValueError: It is none.

    >>> parse_path("schedules[1].levels.2"), parse_path("schedules.1.levels.2")
    (('schedules', 1, 'levels', 2), ('schedules', 1, 'levels', 2))
    """
    parts = _PARTS.findall(text) if _PATH.fullmatch(text) else []
    if not parts or any(part.isdigit() and len(part) > _MAX_DIGITS for part in parts):
        raise ValueError(f"{shown(text)} is not a path: write e.g. cluster.nodes or disturbances[0].probability")
    return tuple(int(part) if part.isdigit() else part for part in parts)


def find_field(settings: Settings, path: Path) -> ScenarioField:
    """Find a field by its path.

    Args:
        settings: Those that have it, or could have it, such as a scenario.
        path: Keys and indices, as in a scenario file.

    Raises:
        ValueError: There is no such field, or it changes nothing; the message names the nearest.
    """
    if path in _STANDING_FOR_OTHERS:
        return ScenarioField(path, _STANDING_FOR_OTHERS[path])
    here: object = settings
    for depth, key in enumerate(path[:-1]):
        here = _below(here, key, path[:depth])
    last = path[-1]
    above = path[:-1]
    if not _is_settings(here):
        _below(here, last, above)
        return ScenarioField(path, path_text(path))
    model = here if isinstance(here, type) else type(here)
    name = _attribute(model, last, above)
    field = model.model_fields[name]
    if name in _FOR_PEOPLE and field.annotation is str:
        raise ValueError(f"{path_text(path)} is for people and changes no number: vary something else")
    kinds = _single_types(field.annotation)
    if kinds is None or name == "kind":  # another kind is settings of another class
        return ScenarioField(path, path_text(path))
    column = path_text((*above, name))
    return ScenarioField(path, column, kinds <= {int, float}, kinds == {int}, *_read_alone(model, name))


@lru_cache(maxsize=256)
def _read_alone(model: type[BaseModel], name: str) -> tuple[TypeAdapter[Any], type[Settings]]:
    """Return the reader of a field, and its wording: see `ScenarioField`."""
    field = model.model_fields[name]
    alone: Any = Annotated[field.annotation, *field.metadata, ""]
    return TypeAdapter(alone), create_model("_Value", __base__=Settings, __module__=__name__, value=(alone, ...))


def path_in_files(settings: Settings, path: Path) -> Path:
    """Return a path with the keys of files in place of names of attributes: `bandwidth` for `bandwidth_Bps`.

    Raises:
        ValueError: The path leads nowhere.
    """
    found: Path = ()
    here: object = settings
    for key in path:
        if _is_settings(here):
            field = (here if isinstance(here, type) else type(here)).model_fields.get(str(key))
            key = field.alias or key if field else key
        here = _below(here, key, found)
        found = (*found, key)
    return found


def _below(here: object, key: str | int, above: Path) -> object:
    """Return what is at a key; a class of settings where one could be, but is not."""
    match here:
        case BaseModel() | type() if _is_settings(here):
            model = here if isinstance(here, type) else type(here)
            name = _attribute(model, key, above)
            held = dict(here)[name] if isinstance(here, BaseModel) else None
            return _settings_class(model.model_fields[name].annotation) if held is None else held
        case tuple() if isinstance(key, int):
            if key >= len(here):
                raise ValueError(beyond(above, len(here), key))
            return here[key]
        case tuple():
            raise ValueError(f"{path_text(above)} is a list: write {path_text((*above, 0))}, counting from 0")
        case Mapping():
            return here.get(key)
        case _:
            raise ValueError(
                f"there is nothing below {path_text(above)} that has a name of its own: vary it as a whole"
            )


def beyond(above: Path, n_items: int, key: int) -> str:
    """Say that a list is shorter than an index."""
    items = "1 item" if n_items == 1 else f"{n_items} items"
    return f"{path_text(above)} has {items}, counted from 0: there is no [{key}]"


def _is_settings(here: object) -> TypeGuard[BaseModel | type[BaseModel]]:
    return isinstance(here, BaseModel) or (isinstance(here, type) and issubclass(here, BaseModel))


def _attribute(model: type[BaseModel], key: str | int, above: Path) -> str:
    """Return the attribute that a key in a file means."""
    keys = {field.alias or name: name for name, field in model.model_fields.items()}
    if key not in keys:
        where = f"in {path_text(above)}" if above else f"in a {model.__name__.lower()}"
        raise ValueError(f"there is no key {shown(key)} {where}: {nearest(key, keys)}")
    return keys[str(key)]


def value_at(settings: Settings, path: Path) -> object:
    """Return the value of a field that `find_field` has found; a class of settings where one could be, but is not."""
    here: object = settings
    for depth, key in enumerate(path):
        here = _below(here, key, path[:depth])
    return here


def refuse_bare(settings: Settings, path: Path, value: object) -> None:
    """Refuse a number without a unit for a field whose key in files does not tell the unit.

    Raises:
        ValidationError: It is one; the message names the attribute, which takes numbers in SI units.
        ValueError: The path leads nowhere.
    """
    above = value_at(settings, path[:-1])
    if _is_settings(above):
        model = above if isinstance(above, type) else type(above)
        if issubclass(model, Settings):
            refuse(model.__name__, [((), message) for _, message in bare_numbers(model, {path[-1]: value})])


def value_in_files(settings: Settings, path: Path, value: object) -> Any:
    """Return a value from Python for a field as a file has it: an object, a mapping, an array, a list of them.

    Args:
        settings: Those that have the field, such as a scenario.
        path: Of the field, in keys of files or names of attributes.
        value: The new value.

    Raises:
        ValidationError: It is wrong.
        ValueError: The path leads nowhere.
    """
    annotation = _annotation(settings, path)
    if annotation is None:
        return value
    written = plain(value)
    alone = create_model("_Value", __base__=Settings, __module__=__name__, value=(annotation, ...))
    try:
        found: Any = alone.model_validate({"value": written})
    except ValidationError as error:
        refuse(path_text(path), [(each["loc"][1:], each["msg"]) for each in error.errors(include_url=False)])
        raise
    in_file: Any = strict_yaml.with_numbers_as_keys(found.model_dump(mode="json", by_alias=True))
    return as_written(found.value, in_file["value"], written)


def _annotation(settings: Settings, path: Path) -> Any:
    """Return the type of a field, or of an item of a list; None if it has none of its own."""
    above = value_at(settings, path[:-1])
    if _is_settings(above):
        model = above if isinstance(above, type) else type(above)
        name = str(path[-1]) if path[-1] in model.model_fields else _attribute(model, path[-1], path[:-1])
        field = model.model_fields[name]
        return Annotated[field.annotation, *field.metadata, ""]
    if isinstance(above, tuple) and isinstance(path[-1], int):
        of_list = _annotation(settings, path[:-1])
        while of_list is not None and get_origin(of_list) is Annotated:
            of_list = get_args(of_list)[0]
        return get_args(of_list)[0] if get_origin(of_list) is tuple else None
    return None


def as_written(found: object, in_file: Any, written: object) -> Any:
    """Return settings as a file has them, with the keys that a value from Python has and no others.

    Args:
        found: The settings, or a list of them.
        in_file: The same, as a file has them.
        written: What they were made of, under the keys of files or under names of attributes.
    """
    if isinstance(written, str):  # such as the name of a preset
        return written
    if isinstance(found, tuple) and isinstance(written, list | tuple) and len(found) == len(written):
        return [as_written(*each) for each in zip(found, in_file, written, strict=True)]
    if not (isinstance(found, Settings) and isinstance(written, Mapping)):
        return in_file
    alias_of: dict[str, str] = {name: field.alias or name for name, field in type(found).model_fields.items()}
    name_of = {alias: name for name, alias in alias_of.items()}
    kept: dict[str, Any] = {}
    for key, value in written.items():
        alias = str(alias_of.get(key, key))
        if alias in name_of and alias in in_file:
            kept[alias] = as_written(getattr(found, name_of[alias]), in_file[alias], value)
        else:  # `preset`, or null
            kept[alias] = value
    return kept


def with_value(here: Any, path: Path, value: object) -> Any:
    """Return settings with another value of a field that `find_field` has found, not validated again."""
    if not path:
        return value
    key = path[0]
    below = path[1:]
    match here:
        case Settings():
            name = _attribute(type(here), key, ())
            return unchecked_copy(here, **{name: with_value(getattr(here, name), below, value)})
        case tuple() if isinstance(key, int):
            return (*here[:key], with_value(here[key], below, value), *here[key + 1 :])
        case _:
            return {**here, key: with_value(here[key], below, value)}


def changed_at(here: object, changes: Mapping[Path, object], above: Path = ()) -> object:
    """Return settings with other values of some fields, each level validated once with all of its changes.

    Args:
        here: Settings, or a part of them.
        changes: New values as `plain` returns them, by their path from `here`.
        above: Path that leads to `here`, for messages.

    Raises:
        ValueError: A path leads nowhere, or a value is wrong.
    """
    if () in changes:
        if len(changes) > 1:
            raise ValueError(f"{path_text(above)} is changed as a whole and in parts: write one of them")
        return changes[()]
    by_key: dict[str | int, dict[Path, object]] = {}
    for path, value in changes.items():
        by_key.setdefault(path[0], {})[path[1:]] = value
    match here:
        case Settings():
            update: dict[str, object] = {}
            whole = {key: below[()] for key, below in by_key.items() if () in below}
            bare = bare_numbers(type(here), whole)
            refuse(type(here).__name__, [((*above, *at), message) for at, message in bare])
            for key, below in by_key.items():
                name = key if key in type(here).model_fields else _attribute(type(here), key, above)
                update[str(name)] = changed_at(getattr(here, str(name)), below, (*above, key))
            update = _unless_rivals(here, update) | update
            if "uncertain" in type(here).model_fields:
                update.setdefault("uncertain", _still_uncertain(dict(here)["uncertain"], changes))
            return _validated_copy(here, update, above)
        case tuple():
            items = list(here)
            for key, below in by_key.items():
                place = _place_in(here, key, above)
                items[place] = changed_at(here[place], below, (*above, key))
            return tuple(items)
        case Mapping() | None:  # None: settings that are not there yet
            kept = {} if here is None else dict(here)
            return kept | {key: changed_at(kept.get(key), below, (*above, key)) for key, below in by_key.items()}
        case _:
            raise ValueError(f"there is nothing below {path_text(above)}, which is {shown(here)}: change it as a whole")


def _unless_rivals(here: Settings, update: Iterable[str]) -> dict[str, object]:
    """Return the defaults of what a preset states in another way than the fields that change."""
    rivals = {rival for name in update for rival in RIVALS.get(key_of(name), ())}
    found: dict[str, object] = {}
    for name, field in type(here).model_fields.items() if rivals else ():
        default = field.get_default(call_default_factory=True)
        if key_of(name) in rivals and name not in here.model_fields_set and getattr(here, name) != default:
            found[name] = default
    return found


def _still_uncertain(ranges: Mapping[str, object], changes: Mapping[Path, object]) -> dict[str, object]:
    """Return the ranges of a part without those of fields that change: their new values are known."""
    paths = {text: parse_path(text) for text in ranges}
    return {text: ranges[text] for text, path in paths.items() if not any(path[: len(at)] == at for at in changes)}


def _validated_copy(here: Settings, update: Mapping[str, object], above: Path) -> Settings:
    if not above:  # the caller validates the whole
        return unchecked_copy(here, **update)
    try:
        return here.model_copy(update=update)
    except ValidationError as error:
        faults = [((*above, *each["loc"]), each["msg"]) for each in error.errors(include_url=False)]
        refuse(type(here).__name__, faults)
        raise


def _place_in(here: tuple[object, ...], key: str | int, above: Path) -> int:
    if not isinstance(key, int):
        raise ValueError(f"{path_text(above)} is a list: write {path_text((*above, 0))}, counting from 0")
    if key >= len(here):
        raise ValueError(beyond(above, len(here), key))
    return key


def _settings_class(annotation: object) -> type[Settings] | None:
    """Return the only class of settings in an annotation such as `Storage | None`."""
    parts = (annotation, *get_args(annotation))
    classes = (get_args(each)[0] if get_origin(each) is Annotated else each for each in parts)
    found = [each for each in classes if isinstance(each, type) and issubclass(each, Settings)]
    return found[0] if len(found) == 1 else None


def _single_types(annotation: object) -> set[type] | None:
    """Return the types of a single value that an annotation allows besides None, or None if it allows others."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is Annotated:
        return _single_types(args[0])
    if origin is Literal:
        return {type(each) for each in args}
    if origin in (Union, UnionType):
        parts = [_single_types(each) for each in args if each is not type(None)]
        return None if None in parts else set().union(*(part for part in parts if part))
    return {annotation} if isinstance(annotation, type) and annotation in (int, float, str, bool) else None


def flat_text(value: object) -> object:
    """Write a mapping, a list or null on one line, as a scenario file could have it."""
    return strict_yaml.dump_line(value) if value is None or isinstance(value, dict | list) else value
