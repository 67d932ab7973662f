"""What the runs of a page are called, and which are compared: those in one folder, which are schedules of a point.

A label is unlike all others on the page: that of the schedule if there is one folder, else where the run is.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simdist.report.figures import shortened
from simdist.runs.run_directory import RunDirectory
from simdist.sweep.fields import Choice, differing, fields_of
from simdist.sweep.runs import POINT, PlannedPoint
from simdist.sweep.selection import short_names
from simdist.sweep.table import written_text

_MOST_FIELDS = 4  # that a title names


@dataclass(frozen=True, slots=True)
class NamedRun:
    """A run directory, and what it is called on the page."""

    run: RunDirectory
    label: str

    @property
    def schedule(self) -> str:
        """Label of its schedule."""
        return self.run.scenario.schedules[0].name

    @property
    def kind(self) -> str:
        """Kind of its schedule."""
        return self.run.scenario.schedules[0].kind


@dataclass(frozen=True, slots=True)
class RunsOfPoint:
    """The runs in one folder.

    Args:
        folder: Relative to that of all runs; empty if there is just one folder.
        title: The folder, and what its scenario has that others have not; empty as well.
        runs: One or more.
    """

    folder: str
    title: str
    runs: tuple[NamedRun, ...]


def points_of(folder: Path, runs: Sequence[RunDirectory]) -> list[RunsOfPoint]:
    """Group runs by the folder that they are in.

    Args:
        folder: Where all of them are, at any depth.
        runs: One or more, in their order.

    Raises:
        TraceError: A file that tells what a point sets is damaged.
    """
    labels = _labels(folder, runs)
    named = [NamedRun(run, label) for run, label in zip(runs, labels, strict=True)]
    groups: dict[Path, list[NamedRun]] = {}
    for each in named:
        groups.setdefault(each.run.path.parent, []).append(each)
    if len(groups) == 1:
        return [RunsOfPoint("", "", tuple(named))]
    sets = _what_is_set(groups)
    names = [path.relative_to(folder).as_posix() for path in groups]
    return [
        RunsOfPoint(name, f"{name}: {what}" if what else name, tuple(of_point))
        for name, what, of_point in zip(names, sets, groups.values(), strict=True)
    ]


def _labels(folder: Path, runs: Sequence[RunDirectory]) -> list[str]:
    schedules = [run.scenario.schedules[0].name for run in runs]
    if len({run.path.parent for run in runs}) == 1:
        times = Counter(schedules)
        places = [run.path.name for run in runs]
        labels = [
            schedule if times[schedule] == 1 or schedule == place else f"{schedule} ({place})"
            for schedule, place in zip(schedules, places, strict=True)
        ]
    else:
        places = [run.path.relative_to(folder).as_posix() for run in runs]
        labels = [
            place if run.path.name == schedule else f"{schedule} ({place})"
            for run, schedule, place in zip(runs, schedules, places, strict=True)
        ]
    return labels if len(set(labels)) == len(labels) else places


def _what_is_set(groups: dict[Path, list[NamedRun]]) -> list[str]:
    """Tell what each point sets: as the sweep that planned it says, or else in which fields its scenario differs."""
    planned = [PlannedPoint.load(path / POINT) for path in groups]
    fields = [fields_of(runs[0].run.scenario) for runs in groups.values()]
    different = differing(fields)
    chosen = [
        point.choices if point else {column: each[column] for column in different if column in each}
        for point, each in zip(planned, fields, strict=True)
    ]
    cases = [point.case if point else "" for point in planned]
    columns = list(dict.fromkeys(column for choices in chosen for column in choices))
    names = dict(zip(columns, short_names(columns), strict=True))
    return [", ".join(_texts(case, choices, names)) for case, choices in zip(cases, chosen, strict=True)]


def _texts(case: str, choices: dict[str, Choice], names: dict[str, str]) -> list[str]:
    texts = [f"{names[column]} {shortened(written_text(choice))}" for column, choice in choices.items()]
    n_more = len(texts) - _MOST_FIELDS
    more = [f"{n_more} more"] if n_more > 0 else []
    return [*([case] if case else []), *texts[:_MOST_FIELDS], *more]
