"""A sweep: one scenario, and its varied fields.

    scenario: first.yaml                      # a file beside this one, a preset, or the scenario itself
    vary:
      cluster.nodes: [2, 4, 8, 16]
      disturbances[0].probability: [1%, 2%, 5%]
    cases:                                    # fields that change together
      - {name: 25G, cluster.network.bandwidth: 25 Gbit/s, cluster.network.latency: 30 us}
      - {name: 100G, cluster.network.bandwidth: 100 Gbit/s, cluster.network.latency: 5 us}
    seeds: 20
    baseline: sync                            # absent: sync, or else the first schedule

A point is the scenario as if its file had been edited at these places. Every point is measured for every schedule: a
row. A row is named by a hash of all inputs of its numbers, so that it is found in any sweep.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

from simdist import __version__
from simdist.display import Displayed
from simdist.engines.choose import Engine
from simdist.scenario import Scenario
from simdist.scenario.fields import ANYWHERE, ScenarioField, parse_path
from simdist.scenario.strict_yaml import Path as FieldPath
from simdist.schedules import KINDS, settings_of_name
from simdist.settings.plugins import kind_of
from simdist.settings.units import SI, Unit
from simdist.sweeps.fields import Choice, replaced
from simdist.sweeps.keys import Content, code_digest
from simdist.sweeps.sampling import Distribution, Sampling, unit_cube

_KEY_DIGITS = 32


@dataclass(frozen=True)
class SweepAxis:
    """A field that is varied: over listed values, or a distribution.

    Args:
        field: Which one.
        choices: Values that are listed.
        distribution: Of its values, instead of a list.
        bounds: Numbers that define the distribution, in `unit`.
        unit: That the bounds are written in, and so are the values; plain SI numbers if it is none.
    """

    field: ScenarioField
    choices: tuple[Choice, ...] = ()
    distribution: Distribution | None = None
    bounds: tuple[float, ...] = ()
    unit: Unit = SI

    def at(self, u: float) -> Choice:
        """Return the value at a share `u` of the distribution, 0 < u < 1; listed values are equally likely."""
        if self.distribution is None:
            return self.choices[min(int(u * len(self.choices)), len(self.choices) - 1)]
        count = self.distribution.quantile(u, self.bounds)
        written = self.field.text(count, self.unit)
        try:
            return Choice(written, self.field.number(written))
        except ValueError:  # more than the field allows, as 130 % is; its rows fail and say so
            return Choice(written, self.unit.number(count))


@dataclass(frozen=True)
class Case:
    """Values of fields that change together."""

    name: str
    choices: tuple[tuple[ScenarioField, Choice], ...]


@dataclass(frozen=True)
class Point:
    """A scenario of a sweep.

    Args:
        number: From 0, in the order of the sweep.
        case: Name of the case; empty if the sweep has none.
        choices: Values of the fields, in the order of `Sweep.fields`; None where a case leaves one as it is.
    """

    number: int
    case: str
    choices: tuple[Choice | None, ...]


@dataclass(frozen=True, slots=True)
class RowKey:
    """A row: one schedule of one point.

    Args:
        position: Of the schedule among those of the point, from 0.
        key: Hash of all that the numbers of the row follow from.
        label: Of the schedule; its kind if the schedule is wrong.
        kind: Of the schedule.
    """

    position: int
    key: str
    label: str
    kind: str


@final
@dataclass(frozen=True)
class Sweep(Displayed):
    """Definition of a sweep; `load` reads one.

    Args:
        name: For people.
        tree: The scenario as a file has it.
        scenario: The same, read.
        folder: Files in the scenario are relative to it.
        axes: The axes, the last one fastest.
        cases: Settings that change together.
        sampling: Which points are taken.
        baseline: Label or kind of the schedule that speed-ups are over.
        n_seeds: Number of seeds of delays that each row is measured with.
        engine: `auto` takes the fast engine wherever it is exact.
        time_limit_s: Seconds after which a row is given up.
    """

    name: str
    tree: Mapping[str, Any]
    scenario: Scenario
    folder: Path
    axes: tuple[SweepAxis, ...]
    cases: tuple[Case, ...]
    sampling: Sampling
    baseline: str
    n_seeds: int
    engine: Engine
    time_limit_s: float

    @cached_property
    def fields(self) -> tuple[ScenarioField, ...]:
        """The fields that differ between points: fields of cases, then varied fields."""
        of_cases = [field for case in self.cases for field, _ in case.choices]
        return tuple({field.path: field for field in (*of_cases, *(axis.field for axis in self.axes))}.values())

    @property
    def n_points(self) -> int:
        """How many points there are."""
        n_cases = max(1, len(self.cases))
        if self.sampling.kind == "grid":
            return n_cases * math.prod(len(axis.choices) for axis in self.axes)
        return n_cases * (self.sampling.points or 0)

    def points(self) -> Iterator[Point]:
        """Yield all points, case by case."""
        numbers = itertools.count()
        for case in self.cases or (Case("", ()),):
            set_by_case = {field.path: choice for field, choice in case.choices}
            for choices in self._combinations():
                at = set_by_case | {axis.field.path: choice for axis, choice in zip(self.axes, choices, strict=True)}
                yield Point(next(numbers), case.name, tuple(at.get(field.path) for field in self.fields))

    def tree_of(self, point: Point) -> dict[str, Any]:
        """Return the scenario of a point, as a file has it.

        Steps are computed with stated values, so that only ranges of failures stay, and of these none that is varied.

        Raises:
            ValueError: A path leads nowhere, because another value removed its parent.
        """
        tree: Any = self.tree
        chosen = [field.path for field, choice in zip(self.fields, point.choices, strict=True) if choice]
        for n in self._outer_first:
            if choice := point.choices[n]:
                tree = replaced(tree, self.fields[n].path, choice.written)
        cluster = tree.get("cluster")
        if isinstance(cluster, dict) and "uncertain" in cluster:
            tree = tree | {"cluster": cluster | {"uncertain": {}}}
        failures = tree.get("failures")
        if isinstance(failures, dict) and isinstance(failures.get("uncertain"), dict):
            kept = _still_uncertain(failures["uncertain"], ("failures",), chosen)
            tree = tree | {"failures": failures | {"uncertain": kept}}
        ranges = {text: each for text, each in tree.get("uncertain", {}).items() if text.startswith("failures")}
        rest = {key: value for key, value in tree.items() if key != "uncertain"}
        return rest | ({"uncertain": kept} if (kept := _still_uncertain(ranges, (), chosen)) else {})

    def keys(self, tree: Mapping[str, Any]) -> list[RowKey]:
        """Return the rows of a point, one for each of its schedules."""
        schedules = tree.get("schedules")
        each = list(schedules) if isinstance(schedules, list) and schedules else [schedules]
        shared = {name: item for name, item in tree.items() if name not in ("schedules", "name")}
        before = self._how.copy()
        before.update(self._content.text(shared).encode())
        return [self._row_key(before, position, schedule) for position, schedule in enumerate(each)]

    def _row_key(self, before: "hashlib._Hash", position: int, schedule: object) -> RowKey:
        text = self._content.text(schedule)
        digest = before.copy()
        digest.update(text.encode())
        if text not in self._labels:
            self._labels[text] = _label_and_kind(schedule)
        return RowKey(position, digest.hexdigest()[:_KEY_DIGITS], *self._labels[text])

    def digests(self, trees: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """Return the hash of each file that points name, as it was when their rows were named."""
        return self._content.digests(trees)

    def _combinations(self) -> Iterator[tuple[Choice, ...]]:
        if self.sampling.kind == "grid":
            yield from itertools.product(*(axis.choices for axis in self.axes))
            return
        for point in unit_cube(self.sampling, len(self.axes)):
            yield tuple(axis.at(float(u)) for axis, u in zip(self.axes, point, strict=True))

    @cached_property
    def _outer_first(self) -> list[int]:
        """Places of `fields` in the order in which they are set: a mapping before its parts."""
        return sorted(range(len(self.fields)), key=lambda n: len(self.fields[n].path))

    @cached_property
    def _how(self) -> "hashlib._Hash":
        how = f"{__version__} {code_digest()} {self.engine} {self.n_seeds} "
        return hashlib.sha256(how.encode())

    @cached_property
    def _content(self) -> Content:
        return Content(self.tree, self.folder)

    @cached_property
    def _labels(self) -> dict[str, tuple[str, str]]:
        """Label and kind of each schedule, by its text, so that each is read once."""
        return {}


def _label_and_kind(schedule: object) -> tuple[str, str]:
    """Return the label of a schedule and its kind, also of one that is wrong, so that rows that fail have names.

    >>> _label_and_kind({"kind": "local_sgd", "period": 4})
    ('local-4', 'local_sgd')
    >>> _label_and_kind({"kind": "local_sgd", "period": "often"})
    ('local_sgd', 'local_sgd')
    """
    with suppress(ValueError):
        schedule = settings_of_name(schedule)
    settings = schedule if isinstance(schedule, dict) else {}
    kind = str(settings.get("kind", ""))
    label = str(settings.get("label", ""))
    with suppress(ValueError):
        if cls := KINDS.find(kind):
            found = cls.model_validate(settings | {"kind": kind_of(cls)}, context=ANYWHERE)
            return found.name, found.kind
    return label or kind, kind


def _still_uncertain(ranges: Mapping[str, Any], above: FieldPath, chosen: Sequence[FieldPath]) -> dict[str, Any]:
    """Return the ranges of what is not varied."""
    paths = {text: (*above, *parse_path(text)) for text in ranges}
    return {text: ranges[text] for text, path in paths.items() if not any(path[: len(at)] == at for at in chosen)}
