"""Reads the results of run directories: what was simulated and what was measured of each, with one seed.

Runs in one folder are schedules of one point. What a point sets stands in a file there, if a sweep has written it;
otherwise it is found by comparing the scenarios of all runs.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from simdist.errors import SimdistError, TraceError
from simdist.plan import Plan
from simdist.runs import run_directory
from simdist.studies.comparison import Measured
from simdist.studies.epochs import epochs
from simdist.sweep.definition import Choice
from simdist.sweep.differences import differing, fields_of, schedule_fields_of
from simdist.sweep.table import EPOCHS, Result, Source, Table, compared, lonely
from simdist.traces.breakdown import STATES, breakdown

POINT = "point.json"
"""Beside the run directories of a point: what it sets."""

_TRACES: tuple[tuple[Source, str], ...] = (("simulated", run_directory.SIMULATED), ("real", run_directory.REAL))


@dataclass(frozen=True, slots=True)
class PlannedPoint:
    """A point of a sweep whose schedules are run directories.

    Args:
        number: Of the point.
        case: Of the sweep, or empty.
        choices: What it sets, by column.
    """

    number: int
    case: str
    choices: dict[str, Choice]

    def dumps(self) -> str:
        """Return the file of the point."""
        choices = {name: {"written": each.written, "value": each.number} for name, each in self.choices.items()}
        return json.dumps({"point": self.number, "case": self.case, "sets": choices}, indent=1) + "\n"

    @staticmethod
    def load(path: Path) -> "PlannedPoint | None":
        """Read the file of a point; None if there is none.

        Raises:
            TraceError: It holds something else.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            choices = {name: Choice(each["written"], each["value"]) for name, each in found["sets"].items()}
            return PlannedPoint(int(found["point"]), str(found["case"]), choices)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise TraceError(f"{path}: is no point of a sweep ({error}): delete it") from None


@dataclass(slots=True)
class _Run:
    """What the table takes from a run directory: its rows, and what its scenario sets."""

    point: PlannedPoint | None
    results: list[Result]
    fields: dict[str, Choice] = field(default_factory=dict)
    of_schedule: dict[str, Choice] = field(default_factory=dict)


def read_runs(folder: Path, paths: Iterable[Path], *, baseline: str = "sync") -> Table:
    """Read the traces of run directories.

    Speed-ups are over the baseline of the same point, from a trace of the same source.

    Args:
        folder: That names are relative to.
        paths: The run directories, in their order.
        baseline: Label or kind of the schedule to compare with.
    """
    runs = [_read(folder, path) for path in paths]
    alone = [run for run in runs if run.point is None and run.results]
    found = (*differing([run.fields for run in alone if run.fields]), *_of_schedules(alone))
    planned = tuple(dict.fromkeys(column for run in runs if run.point for column in run.point.choices))
    groups: dict[object, list[Result]] = {}
    for run in runs:
        for each in run.results:
            groups.setdefault(each.group, []).append(replace(each, choices=_choices(run, found)))
    compared_runs = {group: iter(compared(of_group, baseline)) for group, of_group in groups.items()}
    results = tuple(next(compared_runs[each.group]) for run in runs for each in run.results)
    n_lonely = len({each.point for each in results if each.row and not each.has_baseline})
    n_missing = sum(not run.results for run in runs)
    notes = [lonely(n_lonely, baseline)] if n_lonely else []
    if n_missing:
        how = "`simdist simulate RUN` or `torchrun ... -m real RUN` makes one"
        notes.append(f"{folder}: {n_missing:,} of {len(runs):,} runs have no trace yet: {how}")
    varied = (*planned, *(column for column in found if column not in planned))
    return with_links_note(Table(varied, results, n_missing, extras_of(results), tuple(notes), baseline))


def with_links_note(table: Table) -> Table:
    """Say of simulations that are compared with measurements which machine they are of."""
    if all(each.error_ratio is None for each in table.results):
        return table
    note = "sim. error: with the links of the scenario; `simdist validate RUN --cluster FILE` takes calibrated ones"
    return replace(table, notes=tuple(dict.fromkeys((*table.notes, note))))


def _read(folder: Path, path: Path) -> _Run:
    """Read a run directory; what is wrong with it becomes a row that failed."""
    name = path.relative_to(folder).as_posix()
    above = path.parent.relative_to(folder).as_posix() if path != folder else name
    point: PlannedPoint | None = None
    try:
        point = PlannedPoint.load(path.parent / POINT)
        run = run_directory.read(path)
    except SimdistError as error:
        source: Source = "real" if (path / run_directory.REAL).exists() else "simulated"
        row = Result(point.number if point else above, point.case if point else "", {}, source, path.name, "", 1)
        return _Run(point, [replace(row, run=name, failed=type(error).__name__, error=str(error).replace("\n", "; "))])
    schedule = run.scenario.schedules[0]
    row = Result(point.number if point else above, point.case if point else "", {}, "simulated", run.plan.name, "", 1)
    row = replace(row, schedule=schedule.name, kind=schedule.kind, run=name)
    results = [_measured(replace(row, source=source), path / file, run.plan) for source, file in _TRACES]
    there = _with_error_ratio([each for each in results if each])
    return _Run(point, there, fields_of(run.scenario), schedule_fields_of(schedule))


def _measured(row: Result, path: Path, plan: Plan) -> Result | None:
    """Complete a row with a trace; None if there is none."""
    if not path.exists():
        return None
    try:
        trace = run_directory.read_trace(path, plan=plan)
        if row.source == "real" and not trace.source.startswith("real"):
            raise TraceError(f"{path}: is {trace.source!r}, and no measurement: move it away")
        times = breakdown(trace)
        found = epochs(trace) if plan.dataset else None
    except SimdistError as error:
        return replace(row, failed=type(error).__name__, error=str(error).replace("\n", "; "))
    states_s = {state: times.per_step_s(state) for state in STATES}
    staging_s = found.staging_s if found else 0.0
    measured = Measured(row.schedule, trace.source, times.step_s, states_s, staging_s=staging_s)
    return replace(row, measured=measured, epochs_s=tuple(each.seconds for each in found.epochs) if found else ())


def _with_error_ratio(results: list[Result]) -> list[Result]:
    """Note how far the simulation of a run is from its measurement, if it has both."""
    match [each.measured for each in results]:
        case [Measured() as simulated, Measured() as real] if real.step_s[0] > 0:
            ratio = float((simulated.step_s[0] - real.step_s[0]) / real.step_s[0])
            return [replace(each, error_ratio=ratio) for each in results]
        case _:
            return results


def _of_schedules(runs: Sequence[_Run]) -> tuple[str, ...]:
    """Return the columns of schedules in which runs of the same label differ."""
    by_label: dict[str, list[dict[str, Choice]]] = {}
    for run in runs:
        for each in run.results[:1]:
            by_label.setdefault(each.schedule, []).append(run.of_schedule)
    return tuple(dict.fromkeys(column for fields in by_label.values() for column in differing(fields)))


def _choices(run: _Run, columns: Sequence[str]) -> dict[str, Choice]:
    if run.point:
        return run.point.choices
    there = run.fields | run.of_schedule
    return {column: there[column] for column in columns if column in there}


def extras_of(results: Sequence[Result]) -> frozenset[str]:
    """Return which of the columns that only some tables have rows of runs need."""
    found = {
        "run": any(each.run for each in results),
        "case": any(each.case for each in results),
        "error_ratio": any(each.error_ratio is not None for each in results),
        **dict.fromkeys(EPOCHS, any(each.epochs_s for each in results)),
    }
    return frozenset(name for name, there in found.items() if there)
