"""Fields of a scenario by their paths, as its error messages write them: `cluster.network.bandwidth`.

A path leads through the scenario file as the user wrote it, so that to set a field is to edit the file. Where the file
has only the name of a preset, setting a field below it overrides that field of the preset.

>>> from simdist.scenario.fields import parse_path
>>> settings = {"cluster": "aws-p3", "disturbances": [{"kind": "transient", "probability": "1%"}]}
>>> replaced(settings, parse_path("cluster.nodes"), 4)["cluster"]
{'preset': 'aws-p3', 'nodes': 4}
>>> replaced(settings, parse_path("disturbances[0].probability"), "5%")["disturbances"]
[{'kind': 'transient', 'probability': '5%'}]
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from pydantic.fields import FieldInfo

from simdist.scenario import Scenario, strict_yaml
from simdist.scenario.fields import BASED, beyond
from simdist.scenario.recordings import kept
from simdist.scenario.strict_yaml import Path, path_text
from simdist.schedules import Schedule, settings_of_name
from simdist.settings.base import Settings, shown
from simdist.sweeps.keys import canonical

#: The folder for arrays from Python in the folder of a sweep.
ARRAYS = "arrays"

_MAX_ITEMS = 16  # of a list that each get columns; a model has hundreds of tensors


@dataclass(frozen=True)
class Choice:
    """A value of a field.

    Args:
        written: As a scenario file has it.
        number: As tables have it: in SI units.
    """

    written: Any
    number: object


def kept_choice(choice: Choice, folder: FilePath) -> Choice:
    """Return a value with the arrays from Python that are in it as files in the folder of a sweep."""
    written, number = (kept(each, folder / ARRAYS, name=ARRAYS) for each in (choice.written, choice.number))
    return Choice(written, number)


def replaced(tree: object, path: Path, value: object) -> Any:
    """Return a scenario, in the form of a file, with another value at a path; other parts are shared.

    Raises:
        ValueError: The path leads nowhere.
    """
    return _replaced(tree, path, value, ())


def _replaced(tree: object, path: Path, value: object, above: Path) -> object:
    if not path:
        return value
    key = path[0]
    below = path[1:]
    if isinstance(tree, str) and len(above) == 1 and above[0] in BASED:
        tree = {"preset": tree}
    if len(above) == 2 and above[0] == "schedules":
        tree = settings_of_name(tree)
    match tree:
        case list() if isinstance(key, int):
            if key >= len(tree):
                raise ValueError(beyond(above, len(tree), key))
            return [_replaced(item, below, value, (*above, key)) if n == key else item for n, item in enumerate(tree)]
        case dict():
            return {**tree, key: _replaced(tree.get(key), below, value, (*above, key))}
        case None if isinstance(key, str):
            return {key: _replaced(None, below, value, (*above, key))}
        case _:
            found = "not written" if tree is None else shown(tree)
            raise ValueError(
                f"{path_text(above)} is {found} in the scenario: write it out there, or vary it as a whole"
            )


def fields_of(scenario: Scenario) -> dict[str, Choice]:
    """Return all fields of a scenario but its name and its schedules, by column.

    >>> from simdist.scenario import load, presets
    >>> fields_of(load(presets.path("scenarios", "cloud-stragglers")))["cluster.network.bandwidth_Bps"]
    Choice(written='25 Gbit/s', number=3125000000.0)
    """
    found = dict(_of_settings(scenario, scenario.model_dump(mode="json"), ()))
    return {column: each for column, each in found.items() if column != "name" and not column.startswith("schedules")}


def schedule_fields_of(schedule: Schedule) -> dict[str, Choice]:
    """Return all fields of a schedule but its label, by column, such as `schedule.period`."""
    found = dict(_of_settings(schedule, schedule.model_dump(mode="json"), ("schedule",)))
    return {column: choice for column, choice in found.items() if column != "schedule.label"}


def differing(scenarios: Sequence[Mapping[str, Choice]]) -> tuple[str, ...]:
    """Return the columns in which scenarios differ, in their order; a missing value differs."""
    numbers: dict[str, set[object]] = {}
    for fields in scenarios:
        for column, choice in fields.items():
            numbers.setdefault(column, set()).add(choice.number)
    there = {column: sum(column in fields for fields in scenarios) for column in numbers}
    return tuple(
        column
        for column, found in numbers.items()
        if found != {None} and (len(found) > 1 or there[column] < len(scenarios))
    )


def _leaves(value: object, written: object, above: Path, name: str, field: FieldInfo) -> Iterator[tuple[str, Choice]]:
    """Yield the values in an attribute of settings."""
    if name == "source" and field.annotation is str:  # where numbers are from changes nothing
        return
    here = (*above, _key(name, field))
    match value:
        case Settings() if isinstance(written, dict):
            yield from _of_settings(value, written, here)
        case tuple() if value and all(isinstance(item, Settings) for item in value) and isinstance(written, list):
            yield from _of_list(value, written, here)
        case bool() | int() | float() | str() | None:
            yield path_text((*above, name)), Choice(written, value)
        case FilePath():
            yield path_text((*above, name)), Choice(written, str(value))
        case _:
            yield path_text(here), Choice(written, strict_yaml.dump_line(written))


def _of_settings(value: Settings, written: Mapping[str, object], here: Path) -> Iterator[tuple[str, Choice]]:
    for name, field in type(value).model_fields.items():
        yield from _leaves(dict(value)[name], written.get(_key(name, field)), here, name, field)


def _of_list(values: Sequence[Settings], written: Sequence[object], here: Path) -> Iterator[tuple[str, Choice]]:
    if len(values) > _MAX_ITEMS:
        digest = hashlib.sha256(canonical(written).encode()).hexdigest()[:6]
        text = f"{len(values)} items ({digest})"
        yield path_text(here), Choice(text, text)
        return
    for number, (value, item) in enumerate(zip(values, written, strict=True)):
        yield from _of_settings(value, item if isinstance(item, dict) else {}, (*here, number))


def _key(name: str, field: FieldInfo) -> str:
    return field.alias or name
