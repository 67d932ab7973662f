"""From a file to a scenario, with every problem at once, and back."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from simdist.errors import ScenarioError
from simdist.scenario import strict_yaml
from simdist.scenario.files import read_text
from simdist.scenario.problems import problems_of, scenario_error
from simdist.scenario.scenario import Scenario
from simdist.scenario.strict_yaml import Problem
from simdist.settings.base import FromFile, shown

_SHAPE = "write cluster, workload, steps and schedules, each as `key: value`"


def load(path: str | Path) -> Scenario:
    """Read a scenario file.

    Raises:
        ScenarioError: It cannot be read, or is wrong; a line for every problem.
    """
    path = Path(path)
    return loads(read_text(path), name=str(path), folder=path.parent)


def loads(text: str, *, name: str = "<text>", folder: Path = Path()) -> Scenario:
    """Read a scenario from text.

    Args:
        text: YAML.
        name: Of the file, for messages; its stem names the scenario unless the text does.
        folder: Files that the text names are relative to it.

    Raises:
        ScenarioError: It is wrong; a line for every problem, each beginning with `name` and the line's number.
    """
    document = strict_yaml.parse(text)
    if isinstance(document.root, dict) and _is_sweep(document.root):
        raise ScenarioError(f"{name}: is a sweep, and no scenario: simdist sweep {name} -o DIR")
    problems, scenario = list(document.problems), None
    if isinstance(document.root, dict):
        tree = {"name": Path(name).stem.strip("<>")} | document.root
        try:
            scenario = Scenario.model_validate(tree, context=FromFile(folder))
        except ValidationError as error:
            problems += problems_of(error, document)
    elif document.root is not None:
        problems.append(Problem(1, (), f"{shown(document.root)} is not a scenario: {_SHAPE}"))
    elif not problems:
        problems.append(Problem(1, (), f"is empty: {_SHAPE}"))
    if scenario is None or problems:
        raise scenario_error(name, problems)
    return scenario


def _is_sweep(root: Mapping[str | int, object]) -> bool:
    return "scenario" in root and not root.keys() & {"cluster", "workload", "schedules"}


def dump(scenario: Scenario) -> str:
    """Write YAML that loads to an equal scenario without any other file, recordings excepted."""
    return strict_yaml.dump(_with_numbers_as_keys(scenario.model_dump(mode="json")))


def _with_numbers_as_keys(value: object) -> object:
    """Undo that JSON has only text as keys: `levels: {2: 8}` must not become `levels: {'2': 8}`."""
    match value:
        case dict():
            return {int(key) if key.isdigit() else key: _with_numbers_as_keys(item) for key, item in value.items()}
        case list():
            return [_with_numbers_as_keys(item) for item in value]
        case _:
            return value
