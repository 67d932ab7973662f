"""The one place that says where something is wrong: `file.yaml:12: cluster.network.bandwidth: ...`."""

from collections.abc import Iterable

from pydantic import ValidationError

from simdist.errors import ScenarioError
from simdist.scenario.strict_yaml import Document, Path, Problem

_MAX_LINES = 100


def problems_of(error: ValidationError, document: Document) -> list[Problem]:
    """Return the problems of a failed validation, each with the line of its value in the document."""
    problems = []
    for details in error.errors(include_url=False, include_context=False, include_input=False):
        place, path = document.locate(details["loc"])
        problems.append(Problem(place.line, path, details["msg"]))
    return problems


def scenario_error(name: str, problems: Iterable[Problem]) -> ScenarioError:
    """Return one error for all problems of a file, a line each, from top to bottom."""
    lines = [_line(name, problem) for problem in sorted(problems, key=lambda problem: problem.line)]
    hidden = len(lines) - _MAX_LINES
    return ScenarioError("\n".join(lines[:_MAX_LINES] + ([f"{name}: and {hidden} more"] if hidden > 0 else [])))


def path_text(path: Path) -> str:
    """Write a path as people do.

    >>> path_text(("cluster", "slow_devices", 0, "speed"))
    'cluster.slow_devices[0].speed'
    """
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def _line(name: str, problem: Problem) -> str:
    path = f"{path_text(problem.path)}: " if problem.path else ""
    return f"{name}:{problem.line}: {path}{problem.message}"
