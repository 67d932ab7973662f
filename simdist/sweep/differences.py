"""In which fields scenarios differ, named as a sweep over these fields names its columns."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath

from pydantic.fields import FieldInfo

from simdist.scenario import Scenario, strict_yaml
from simdist.scenario.loading import path_text
from simdist.schedules import Schedule
from simdist.settings.base import Settings
from simdist.sweep.definition import Choice
from simdist.sweep.keys import canonical
from simdist.sweep.paths import Path

_APART = ("name", "schedules")  # have columns of their own
_MANY = 16  # items of a list that each get columns; a model has hundreds of tensors


def fields_of(scenario: Scenario) -> dict[str, Choice]:
    """Return all fields of a scenario but its name and its schedules, by column.

    >>> from simdist.scenario import load, presets
    >>> fields_of(load(presets.path("scenarios", "cloud-stragglers")))["cluster.network.bandwidth_Bps"]
    Choice(written='25 Gbit/s', number=3125000000.0)
    """
    written = scenario.model_dump(mode="json")
    found: dict[str, Choice] = {}
    for name, field in Scenario.model_fields.items():
        if name not in _APART:
            found.update(_leaves(dict(scenario)[name], written.get(_key(name, field)), (), name, field))
    return found


def schedule_fields_of(schedule: Schedule) -> dict[str, Choice]:
    """Return all fields of a schedule but its label, by column, such as `schedule.period`."""
    found = dict(_of_settings(schedule, schedule.model_dump(mode="json"), ("schedule",)))
    return {column: choice for column, choice in found.items() if column != "schedule.label"}


def differing(scenarios: Sequence[Mapping[str, Choice]]) -> tuple[str, ...]:
    """Return the columns in which scenarios differ, in their order; what some do not have differs."""
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
    """Yield what stands in an attribute of settings."""
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
    if len(values) > _MANY:
        digest = hashlib.sha256(canonical(written).encode()).hexdigest()[:6]
        text = f"{len(values)} items ({digest})"
        yield path_text(here), Choice(text, text)
        return
    for number, (value, item) in enumerate(zip(values, written, strict=True)):
        yield from _of_settings(value, item if isinstance(item, dict) else {}, (*here, number))


def _key(name: str, field: FieldInfo) -> str:
    return field.alias or name
