"""From a sweep file to a sweep, with every problem at once."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, final

from pydantic import Field as Setting
from pydantic import ValidationError

from simdist import scenario as scenarios
from simdist.engines import Engine
from simdist.errors import ScenarioError
from simdist.scenario import Scenario, presets, strict_yaml
from simdist.scenario.files import read_text
from simdist.scenario.problems import problems_of, scenario_error
from simdist.scenario.strict_yaml import Document, Problem
from simdist.settings import FromFile, Settings, nearest, shown
from simdist.sweep.definition import Axis, Case, Choice, Sweep
from simdist.sweep.paths import Field, find_field, parse_path, replaced
from simdist.sweep.sampling import Distribution, Integers, Lognormal, LogUniform, Sampling, Uniform
from simdist.units import Seconds, Whole

__all__ = ["MAX_POINTS", "load", "loads"]

MAX_POINTS = 1_000_000
_NAME = "name"  # of a case; all other keys of it are paths
_SHAPE = "write scenario: FILE and vary: {path: [values]}"
_DISTRIBUTIONS: dict[str, type[Distribution]] = {
    "uniform": Uniform,
    "log_uniform": LogUniform,
    "integers": Integers,
    "median": Lognormal,
    "sigma": Lognormal,
}
_KINDS = "uniform: [low, high], log_uniform: [low, high], integers: [first, last] or median: M, sigma: S"


class _Settings(Settings):
    """The keys of a sweep file."""

    scenario: str | dict[str, Any]
    vary: dict[str, Any] = Setting(default_factory=dict)
    cases: tuple[dict[str, Any], ...] = ()
    sample: Sampling = Sampling()
    baseline: str = "sync"
    seeds: Annotated[Whole, Setting(ge=1, le=1_000_000)] = 20
    engine: Engine = "auto"
    time_limit_s: Seconds = 3600.0


def load(path: str | Path) -> Sweep:
    """Read a sweep file.

    Raises:
        ScenarioError: It cannot be read, or is wrong; a line for every problem.
    """
    path = Path(path)
    return loads(read_text(path), name=str(path), folder=path.parent)


def loads(text: str, *, name: str = "<text>", folder: Path = Path()) -> Sweep:
    """Read a sweep from text.

    Args:
        text: YAML.
        name: Of the file, for messages; its stem names the sweep.
        folder: Files that the text names are relative to it.

    Raises:
        ScenarioError: It is wrong; a line for every problem, each beginning with `name` and the line's number.
    """
    document = strict_yaml.parse(text)
    problems, settings = list(document.problems), None
    if isinstance(document.root, dict):
        try:
            settings = _Settings.model_validate(document.root, context=FromFile(folder))
        except ValidationError as error:
            problems += problems_of(error, document)
    elif not problems:
        found = "is empty" if document.root is None else f"{shown(document.root)} is not a sweep"
        problems.append(Problem(1, (), f"{found}: {_SHAPE}"))
    if settings is None or problems:
        raise scenario_error(name, problems)
    tree, base_folder, scenario = _base(settings.scenario, name, folder)
    reader = _Reader(document, scenario, tree, settings.sample.kind == "grid")
    axes, cases = reader.axes(settings.vary), reader.cases(settings.cases)
    reader.check(axes, settings)
    if reader.problems:
        raise scenario_error(name, reader.problems)
    return Sweep(
        Path(name).stem.strip("<>"),
        tree,
        scenario,
        base_folder,
        axes,
        cases,
        settings.sample,
        settings.baseline,
        settings.seeds,
        settings.engine,
        settings.time_limit_s,
    )


def _base(written: str | dict[str, Any], name: str, folder: Path) -> tuple[dict[str, Any], Path, Scenario]:
    """Return the scenario as a file has it, the folder of its files, and the scenario itself."""
    if isinstance(written, dict):
        text = strict_yaml.dump(written)
        try:
            return written, folder, scenarios.loads(text, name="scenario", folder=folder)
        except ScenarioError as error:
            raise ScenarioError(f"{name}: the scenario in it is wrong:\n{error}") from None
    path = folder / written
    if not path.is_file():
        known = presets.names("scenarios")
        if written not in known:
            raise ScenarioError(
                f"{name}: scenario: there is no file {path}, nor a preset {shown(written)}: {nearest(written, known)}"
            )
        path = presets.path("scenarios", written)
    scenario = scenarios.load(path)
    tree = strict_yaml.parse(read_text(path)).root
    assert isinstance(tree, dict)  # it was read as a scenario
    return tree, path.parent, scenario


@final
class _Reader:
    """Reads what is varied, and collects what is wrong with it."""

    def __init__(self, document: Document, scenario: Scenario, tree: Mapping[str, Any], is_grid: bool) -> None:
        self._document, self._scenario, self._tree, self._is_grid = document, scenario, tree, is_grid
        self.problems: list[Problem] = []

    def axes(self, vary: Mapping[str, Any]) -> tuple[Axis, ...]:
        """Return the axes that are right."""
        found = (self._axis(text, values) for text, values in vary.items())
        return tuple(axis for axis in found if axis)

    def cases(self, cases: tuple[dict[str, Any], ...]) -> tuple[Case, ...]:
        """Return the cases, each with what it sets."""
        found: list[Case] = []
        for number, case in enumerate(cases):
            at = ("cases", number)
            name = str(case.get(_NAME, number))
            if any(name == other.name for other in found):
                self._fault((*at, _NAME), f"{shown(name)} is the name of another case, too: write another")
            choices = []
            for text, written in case.items():
                field = self._field((*at, text), text) if text != _NAME else None
                choice = self._choice((*at, text), field, written) if field else None
                if field and choice:
                    choices.append((field, choice))
            found.append(Case(name, tuple(choices)))
        return tuple(found)

    def check(self, axes: tuple[Axis, ...], settings: _Settings) -> None:
        """Look at all of them together."""
        if not settings.vary and not settings.cases:
            self._fault((), f"nothing is varied: {_SHAPE}")
        if settings.sample.kind != "grid" and not settings.vary:
            self._fault(("sample",), "there is nothing to sample: write vary, or no sample")
        paths = {axis.field.path: axis.field for axis in axes}
        for number, case in enumerate(settings.cases):
            for text in case:
                if text in settings.vary:
                    self._fault(("cases", number, text), f"{text} stands in vary, too: write it in one of them")
        n_points = math.prod(len(axis.choices) for axis in axes) if self._is_grid else settings.sample.points or 0
        n_points *= max(1, len(settings.cases))
        if n_points > MAX_POINTS:
            self._fault(("vary",) if settings.vary else (), f"{n_points:,} points: write {MAX_POINTS:,} or fewer")
        for path in paths:
            below = [other for other in paths if other != path and other[: len(path)] == path]
            for other in below:
                text = next(key for key in settings.vary if parse_path(key) == other)
                self._fault(("vary", text), f"is part of {paths[path].column}, which is varied as a whole")

    def _axis(self, text: str, values: Any) -> Axis | None:
        at = ("vary", text)
        field = self._field(at, text)
        if field is None:
            return None
        match values:
            case list():
                if not values:
                    self._fault(at, "the list is empty: write one value or more")
                choices = [self._choice((*at, n), field, each) for n, each in enumerate(values)]
                return Axis(field, tuple(each for each in choices if each))
            case dict():
                return self._distributed(at, field, values)
            case _:
                self._fault(at, f"{shown(values)}: write a list of values, or a distribution: {_KINDS}")
                return None

    def _distributed(self, at: tuple[str, ...], field: Field, values: dict[Any, Any]) -> Axis | None:
        kind = next((_DISTRIBUTIONS[key] for key in values if key in _DISTRIBUTIONS), None)
        if kind is None:
            self._fault(at, f"{shown(values)}: write a list of values, or a distribution: {_KINDS}")
            return None
        if self._is_grid:
            self._fault(at, "a grid takes lists of values: write one, or sample: {kind: random, points: 100}")
            return None
        if not field.is_number:
            self._fault(at, f"{field.column} is no number: write a list of values")
            return None
        try:
            distribution = kind.model_validate(values, context=FromFile(Path()))
        except ValidationError as error:
            for each in error.errors(include_url=False, include_context=False, include_input=False):
                self._fault((*at, *each["loc"]), each["msg"])
            return None
        choices = [self._choice(at, field, bound) for bound in distribution.bounds()]
        numbers = [choice.number for choice in choices if choice]
        bounds = tuple(float(each) for each in numbers if isinstance(each, int | float))
        if len(bounds) < len(choices):
            return None
        if fault := distribution.problem(bounds):
            self._fault(at, fault)
        return Axis(field, distribution=distribution, bounds=bounds)

    def _field(self, at: tuple[str | int, ...], text: object) -> Field | None:
        try:
            path = parse_path(str(text))
            if path == ("name",):
                raise ValueError("the name of a scenario changes nothing: vary something else")
            field = find_field(self._scenario, path)
            replaced(self._tree, path, None)
        except ValueError as error:
            self._fault(at, str(error))
            return None
        return field

    def _choice(self, at: tuple[str | int, ...], field: Field, written: Any) -> Choice | None:
        try:
            return Choice(written, field.number(written))
        except ValueError as error:
            self._fault(at, str(error))
            return None

    def _fault(self, at: tuple[str | int, ...], message: str) -> None:
        place, path = self._document.locate(at)
        self.problems.append(Problem(place.line, path, message))
