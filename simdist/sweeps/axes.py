"""Axes and cases from the fields of a sweep file, with every problem."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path as FilePath
from typing import Any, final

from pydantic import ValidationError

from simdist.scenario import Scenario
from simdist.scenario.fields import ScenarioField, find_field, parse_path
from simdist.scenario.strict_yaml import Document, Path, Problem, path_text
from simdist.settings.base import FromFile, shown
from simdist.settings.units import SI, Unit, unit_of
from simdist.sweeps import sampling
from simdist.sweeps.definition import Case, SweepAxis
from simdist.sweeps.fields import Choice, replaced
from simdist.sweeps.sampling import Distribution, Spacing

_NAME = "name"  # of a case; all other keys of it are paths
_KINDS: dict[str, type[Distribution] | type[Spacing]] = {
    "linear": sampling.Linear,
    "geometric": sampling.Geometric,
    "uniform": sampling.Uniform,
    "log_uniform": sampling.LogUniform,
    "integers": sampling.Integers,
    "median": sampling.LognormalFactor,  # and sigma
}
_LISTS = "linear: [low, high, 5] or geometric: [low, high, 5]"
_DISTRIBUTIONS = "uniform: [low, high], log_uniform: [low, high], integers: [first, last] or median: M, sigma: S"
_SHAPES = f"write a list of values; or {_LISTS}; or, in a sample, {_DISTRIBUTIONS}"


@final
class Reader:
    """Reads the varied fields, and collects errors."""

    def __init__(
        self, document: Document, scenario: Scenario, tree: Mapping[str, Any], folder: FilePath, *, is_grid: bool
    ) -> None:
        """Read of a scenario, given as settings and as a file in `folder` has it."""
        self._document = document
        self._scenario = scenario
        self._tree = tree
        self._folder = folder
        self._is_grid = is_grid
        self._wholes: list[tuple[Path, object]] = []
        self.problems: list[Problem] = []

    def read(
        self, vary: Mapping[str | int, Any], cases: tuple[Mapping[str | int, Any], ...]
    ) -> tuple[tuple[SweepAxis, ...], tuple[Case, ...]]:
        """Return the axes and cases that are right."""
        self._wholes = list(_mappings(vary, cases))
        self._refuse_doubles(vary, cases)
        axes = tuple(axis for text, values in vary.items() if (axis := self._axis(text, values)))
        return axes, tuple(self._cases(cases))

    def fault(self, at: Path, message: str) -> None:
        """Note a problem; the path leads through the sweep file."""
        place, path = self._document.locate(at)
        self.problems.append(Problem(place.line, path, message))

    def _refuse_doubles(self, vary: Mapping[str | int, Any], cases: tuple[Mapping[str | int, Any], ...]) -> None:
        varied: dict[Path, Path] = {}
        for text in vary:
            self._refuse_double(varied, ("vary", text))
        for number, case in enumerate(cases):
            taken = dict(varied)
            for text in case:
                if text != _NAME:
                    self._refuse_double(taken, ("cases", number, text))

    def _refuse_double(self, taken: dict[Path, Path], at: Path) -> None:
        path = _parsed(at[-1])
        if path in taken:
            self.fault(at, f"{path_text(taken[path])} sets the same: remove one of them")
        elif path:
            taken[path] = at

    def _cases(self, cases: tuple[Mapping[str | int, Any], ...]) -> Iterator[Case]:
        names: set[str] = set()
        for number, case in enumerate(cases):
            at = ("cases", number)
            name = case.get(_NAME, str(number))
            if not isinstance(name, str | int | float) or isinstance(name, bool):
                self.fault((*at, _NAME), f"{shown(name)}: write a name, such as 25G")
            elif str(name) in names:
                self.fault((*at, _NAME), f"{shown(name)} is the name of another case, too: write another")
            names.add(str(name))
            set_here = ((text, written) for text, written in case.items() if text != _NAME)
            pairs = [self._set(at, text, written) for text, written in set_here]
            yield Case(str(name), tuple(pair for pair in pairs if pair))

    def _set(self, at: Path, text: str | int, written: object) -> tuple[ScenarioField, Choice] | None:
        field = self._field((*at, text))
        choice = self._choice((*at, text), field, written) if field else None
        return (field, choice) if field and choice else None

    def _axis(self, text: str | int, values: Any) -> SweepAxis | None:
        at = ("vary", text)
        field = self._field(at)
        if field is None:
            return None
        match values:
            case list():
                if not values:
                    self.fault(at, "the list is empty: write one value or more")
                choices = [self._choice((*at, n), field, each) for n, each in enumerate(values)]
                return SweepAxis(field, tuple(each for each in choices if each))
            case dict():
                return self._numbers(at, field, values)
            case _:
                self.fault(at, f"{shown(values)}: {_SHAPES}")
                return None

    def _numbers(self, at: Path, field: ScenarioField, values: dict[Any, Any]) -> SweepAxis | None:
        """Read values that are not listed, but given by a rule."""
        found = [key for key in values if key in _KINDS]
        if len(found) != 1:
            both = f"{found[1]!r} beside {found[0]!r}: write one of them" if found else f"{shown(values)}: {_SHAPES}"
            self.fault((*at, found[1]) if found else at, both)
            return None
        kind = _KINDS[found[0]]
        if problem := self._kind_problem(kind, field):
            self.fault(at, problem)
            return None
        try:
            rule = kind.model_validate(values, context=FromFile(FilePath()))
        except ValidationError as error:
            for each in error.errors(include_url=False, include_context=False, include_input=False):
                self.fault((*at, *each["loc"]), each["msg"])
            return None
        return self._spaced(at, field, rule) if isinstance(rule, Spacing) else self._distributed(at, field, rule)

    def _kind_problem(self, kind: type[Distribution] | type[Spacing], field: ScenarioField) -> str | None:
        if self._is_grid and issubclass(kind, Distribution):
            return f"a grid takes lists of values: write one, {_LISTS}, or sample: {{kind: random, points: 100}}"
        if not field.is_number:
            return f"{field.column} is no number: write a list of values"
        if kind is sampling.Uniform and field.is_whole:
            return f"{field.column} is a whole number: write integers: [first, last]"
        if kind is sampling.Integers and not field.is_whole:
            return f"{field.column} need not be whole: write uniform: [low, high], or a list of values"
        return None

    def _spaced(self, at: Path, field: ScenarioField, rule: Spacing) -> SweepAxis | None:
        bounds = self._bounds(at, field, rule)
        if bounds is None:
            return None
        low, high = rule.bounds()
        unit = _unit(field, rule)
        between = [field.text(count, unit) for count in rule.numbers(*map(unit.count, bounds))[1:-1]]
        written = [low, *between, high]
        choices = {choice.number: choice for each in written if (choice := self._choice(at, field, each))}
        return SweepAxis(field, tuple(choices.values()))  # without whole numbers that rounding has made equal

    def _distributed(self, at: Path, field: ScenarioField, rule: Distribution) -> SweepAxis | None:
        bounds = self._bounds(at, field, rule)
        if bounds is None:
            return None
        unit = _unit(field, rule)
        return SweepAxis(field, distribution=rule, bounds=tuple(map(unit.count, bounds)), unit=unit)

    def _bounds(self, at: Path, field: ScenarioField, rule: Distribution | Spacing) -> tuple[float, ...] | None:
        """Return the bounds of a rule in SI units."""
        numbers: list[float] = []
        for each in rule.bounds():
            choice = self._choice(at, field, each)
            match choice and choice.number:
                case None:
                    pass
                case bool() | str():
                    self.fault(at, f"{shown(each)}: write a number")
                case int() | float() as number if abs(number) < math.inf:
                    numbers.append(number)
                case _:
                    self.fault(at, f"{shown(each)}: write a finite value")
        if len(numbers) < len(rule.bounds()):
            return None
        if fault := rule.problem(tuple(numbers)):
            self.fault(at, fault)
            return None
        return tuple(numbers)

    def _field(self, at: Path) -> ScenarioField | None:
        try:
            return self._find(parse_path(str(at[-1])))
        except ValueError as error:
            self.fault(at, str(error))
            return None

    def _find(self, path: Path) -> ScenarioField:
        """Find a field in the scenario, or else in the scenario after another value of the sweep."""
        try:
            return _found(self._scenario, self._tree, path)
        except ValueError:
            for above, written in self._wholes:
                with suppress(ValueError):  # also of pydantic
                    if len(path) > len(above) and path[: len(above)] == above:
                        tree = replaced(self._tree, above, written)
                        scenario = Scenario.model_validate({"name": "point", **tree}, context=FromFile(self._folder))
                        return _found(scenario, tree, path)
            raise

    def _choice(self, at: Path, field: ScenarioField, written: object) -> Choice | None:
        try:
            return Choice(written, field.number(written))
        except ValueError as error:
            self.fault(at, str(error))
            return None


def _unit(field: ScenarioField, rule: Distribution | Spacing) -> Unit:
    """Return the unit that bounds are written in, the first if there are two; none for whole numbers, such as bytes."""
    units = [] if field.is_whole else [unit_of(each) for each in rule.bounds()]
    return next((unit for unit in units if unit.text), SI)


def _mappings(
    vary: Mapping[str | int, Any], cases: tuple[Mapping[str | int, Any], ...]
) -> Iterator[tuple[Path, object]]:
    """Yield the values that may bring fields with them."""
    listed = ((text, each) for text, values in vary.items() if isinstance(values, list) for each in values)
    for text, written in (*listed, *(item for case in cases for item in case.items())):
        if isinstance(written, dict | list | str) and (path := _parsed(text)):
            yield path, written


def _parsed(text: str | int) -> Path:
    """Read a path; return an empty one if it is none, which is told elsewhere."""
    try:
        return parse_path(str(text))
    except ValueError:
        return ()


def _found(scenario: Scenario, tree: Mapping[str, Any], path: Path) -> ScenarioField:
    field = find_field(scenario, path)
    replaced(tree, path, None)
    return field
