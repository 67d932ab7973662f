"""Values from Python as a sweep file has them: text with units, mappings and lists in place of numbers and objects."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from simdist import scenario as scenarios
from simdist.errors import ScenarioError
from simdist.scenario import Scenario, strict_yaml
from simdist.scenario.fields import as_written, parse_path, path_in_files, refuse_bare, value_in_files
from simdist.scenario.strict_yaml import Path, path_text
from simdist.settings.base import Settings, bare_numbers, in_si, plain, shown

_NAME = "name"  # of a case; all other keys of it are paths


def as_in_a_file(sweep: Mapping[str, object], keys: type[Settings]) -> dict[str, Any]:
    """Return the keys and values of a sweep file for a mapping from Python.

    Raises:
        ScenarioError: Its scenario or a value is wrong, or a file cannot have a value.
    """
    found = {key: plain(value) for key, value in sweep.items()}
    faults = [f"sweep: {path_text(at)}: {message}" for at, message in bare_numbers(keys, found)]
    if faults:
        raise ScenarioError("\n".join(faults))
    for name, field in keys.model_fields.items():
        if name in found and field.alias:
            found[field.alias] = in_si(name, found.pop(name))
    scenario = _loaded(found.get("scenario"))
    if scenario is not None:
        match found.get("vary"):
            case dict() as vary:
                pairs = (_varied(scenario, ("vary", key), key, values) for key, values in vary.items())
                found["vary"] = dict(pairs)
        match found.get("cases"):
            case list() | tuple() as cases:
                found["cases"] = [_case(scenario, number, each) for number, each in enumerate(cases)]
        if not isinstance(found["scenario"], str):
            in_file = strict_yaml.parse(scenarios.dump(scenario)).root
            found["scenario"] = as_written(scenario, in_file, found["scenario"])
    return {key: _writable(value, (key,)) for key, value in found.items()}


def _loaded(base: object) -> Scenario | None:
    """Return the scenario of a sweep; None if there is none of that name, which is told with its place."""
    match base:
        case dict():
            return scenarios.load({"name": "sweep", **base})
        case Scenario():
            return base
        case str():
            with suppress(ScenarioError):
                return scenarios.load(base)
    return None


def _case(scenario: Scenario, number: int, case: Any) -> Any:
    """Return a case as a file has it; what is none is told with its place."""
    if not isinstance(case, dict):
        return case
    found: dict[Any, Any] = {}
    for key, value in case.items():
        if key == _NAME:
            found[key] = value
            continue
        name, (of_file,) = _varied(scenario, ("cases", number, key), key, [value])
        found[name] = of_file
    return found


def _varied(scenario: Scenario, at: Path, key: object, values: Any) -> tuple[Any, Any]:
    """Return the path of a varied field in files, and its values as they are written there."""
    try:
        path = parse_path(str(key))
        in_file = path_in_files(scenario, path)
    except ValueError:  # which is told with its place
        return key, values
    written: Any = values
    match values:
        case list() | tuple():
            places = [(*at, number) for number in range(len(values))] if at[0] == "vary" else [at]
            written = [_value(scenario, place, path, each) for place, each in zip(places, values, strict=True)]
        case dict():  # a rule, such as {linear: [0.1, 0.5, 5]}
            written = {rule: _bounds(scenario, at, path, rule, bounds) for rule, bounds in values.items()}
    return (key if in_file == path else path_text(in_file)), written


def _value(scenario: Scenario, at: Path, path: Path, value: object) -> object:
    """Return one value of a field as a file has it."""
    try:
        refuse_bare(scenario, path, value)
        if isinstance(value, str | int | float | None):
            return in_si(str(path[-1]), value)
        return value_in_files(scenario, path, value)
    except ValidationError as error:
        lines = [f"sweep: {path_text((*at, *each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
        raise ScenarioError("\n".join(lines)) from None
    except ValueError:  # the path leads nowhere here, but may after another value of the sweep
        return value


def _bounds(scenario: Scenario, at: Path, path: Path, rule: object, bounds: Any) -> Any:
    """Return the bounds of a rule as a file has them; the last of three is a number of values."""
    if rule == "sigma":  # a factor
        return bounds
    if not isinstance(bounds, list | tuple):
        return _value(scenario, (*at, str(rule)), path, bounds)
    ends = [_value(scenario, (*at, str(rule), number), path, each) for number, each in enumerate(bounds[:2])]
    return [*ends, *bounds[2:]]


def _writable(value: object, above: tuple[object, ...]) -> Any:
    """Return a value as YAML has it."""
    match value:
        case Settings():
            return value.model_dump(mode="json")
        case dict():
            return {key: _writable(item, (*above, key)) for key, item in value.items()}
        case list() | tuple():
            return [_writable(item, (*above, number)) for number, item in enumerate(value)]
        case None | str() | bool() | int() | float():
            return value
        case _:
            where = ".".join(map(str, above))
            raise ScenarioError(f"sweep: {where}: {shown(value)}: write numbers, text, or a list of them")
