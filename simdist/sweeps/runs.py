"""Run directories of a sweep: written, so that they can be run for real, and read as rows of its table, with one seed.

Runs in one folder are schedules of one point. The settings of a point stand in a file there, if a sweep has written it;
otherwise it is found by comparing the scenarios of all runs.

A run directory of a sweep has the delays of the sweep's first seed. So its simulation is one of those that the row of
the sweep averages over: it is left out where that row is there. Its measurement stays, and is compared with it.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from simdist.errors import PlanError, ScenarioError, SimdistError, TraceError, UnsupportedError
from simdist.files import read_content, replacing
from simdist.plan import Plan
from simdist.runs import run_directory
from simdist.runs.building import build, delays
from simdist.runs.run_failures import step_failures
from simdist.scenario import Scenario
from simdist.settings.base import unchecked_copy
from simdist.studies import facets
from simdist.studies.comparison import default_baseline
from simdist.studies.epochs import find_epochs
from simdist.studies.facets import Simulated
from simdist.studies.known_delays import Chances, remarks_on_run
from simdist.studies.measuring import ScheduleTimes, times_of
from simdist.studies.remarks import Remark
from simdist.sweeps.definition import Point, Sweep
from simdist.sweeps.fields import Choice, differing, fields_of, kept_choice, schedule_fields_of
from simdist.sweeps.table import (
    RUNS,
    ResultRow,
    Table,
    TraceSource,
    collected,
    compared,
    extras_of,
    joined,
    lonely,
    remarks_on_results,
)
from simdist.sweeps.tasks import alone
from simdist.traces.breakdown import break_down

#: Beside the run directories of a point: what it sets.
_POINT = "point.json"

#: Run directories that are written at most, as each is run by hand.
_MAX_PLANS = 1_000

#: Called with points that are done and points in all.
_Progress = Callable[[int, int], None]

_SAME = 1e-6  # relative difference of step times of two engines
_TRACES: tuple[tuple[TraceSource, str], ...] = (("simulated", run_directory.SIMULATED), ("real", run_directory.REAL))


@dataclass(frozen=True, slots=True)
class PlannedPoint:
    """A point of a sweep with run directories for its schedules."""

    number: int
    case: str
    choices: dict[str, Choice]

    def dumps(self) -> str:
        """Return the file of the point.

        Columns:
            point (int): Number.
            case (str): Its case, or empty.
            sets (object): Column -> `written`, the value as in the sweep, and `value`, in SI units.
        """
        choices = {name: {"written": each.written, "value": each.number} for name, each in self.choices.items()}
        return json.dumps({"point": self.number, "case": self.case, "sets": choices}, indent=1) + "\n"

    @staticmethod
    def load(path: Path) -> "PlannedPoint | None":
        """Read the file of a point; None if there is none.

        Raises:
            TraceError: It holds something else.
        """
        try:
            found = json.loads(read_content(path))
            choices = {name: Choice(each["written"], each["value"]) for name, each in found["sets"].items()}
            return PlannedPoint(int(found["point"]), str(found["case"]), choices)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise TraceError(f"{path}: is no point of a sweep ({error}): delete it") from None


@dataclass(frozen=True, slots=True)
class WrittenRuns:
    """Run directories that were written.

    Args:
        runs: The run directories.
        failed: Points that were left out: where, and why.
    """

    runs: tuple[Path, ...]
    failed: tuple[str, ...]


def write_plans(sweep: Sweep, folder: Path, *, progress: _Progress | None = None) -> WrittenRuns:
    """Write a run directory for every row of a sweep: FOLDER/runs/POINT/LABEL.

    They have the delays of the scenario's seed, the first of the sweep's seeds. The settings of a point stand beside
    its runs, so that tables show them. Schedules that fail are left out.

    Raises:
        ScenarioError: These are too many rows.
        RunError: A file cannot be written.
    """
    check_number(sweep)
    points = [(point, sweep.tree_of(point)) for point in sweep.points()]
    digits = len(str(len(points) - 1))
    runs: list[Path] = []
    failed: list[str] = []
    for number, (point, tree) in enumerate(points):
        if progress:
            progress(number, len(points))
        for row in sweep.keys(tree):
            path = folder / RUNS / f"{point.number:0{digits}}" / row.label
            try:
                _write(alone(tree, row, sweep.folder), path, name=f"{sweep.name}-{point.number}")
            except (ScenarioError, PlanError, UnsupportedError) as error:
                failed.append(f"point {point.number}, {row.label}: {error}")
            else:
                _write_point(sweep, point, path.with_name(_POINT), folder)
                runs.append(path)
    return WrittenRuns(tuple(runs), tuple(failed))


def check_number(sweep: Sweep) -> None:
    """Refuse to plan a sweep that has too many rows.

    Raises:
        ScenarioError: It has.
    """
    first = itertools.islice(sweep.points(), _MAX_PLANS)
    if sweep.n_points > _MAX_PLANS or sum(len(sweep.keys(sweep.tree_of(point))) for point in first) > _MAX_PLANS:
        raise ScenarioError(
            f"{sweep.name}: more than {_MAX_PLANS:,} run directories, of {sweep.n_points:,} points: vary less, or "
            f"write sample: {{kind: sobol, points: 64}}"
        )


def _write(scenario: Scenario, path: Path, *, name: str) -> None:
    """Write the run directory of the only schedule of a scenario."""
    one = unchecked_copy(scenario, name=name)
    built = build(one, one.schedules[0])
    drawn = delays(one)
    failures = step_failures(one, built.plan, built.costs, drawn)
    run_directory.write(path, one, built.plan, drawn, failures)


def _write_point(sweep: Sweep, point: Point, path: Path, folder: Path) -> None:
    """Write the settings of a point."""
    chosen = zip(sweep.fields, point.choices, strict=True)
    choices = {of_sweep.column: kept_choice(each, folder) for of_sweep, each in chosen if each}
    planned = PlannedPoint(point.number, point.case, choices)
    with replacing(path) as part:
        part.write_text(planned.dumps(), encoding="utf-8")


@dataclass(slots=True)
class _RunRows:
    """Part of the table that a run directory gives: its rows, and the settings of its scenario and remarks on it."""

    point: PlannedPoint | None
    results: list[ResultRow]
    fields: dict[str, Choice] = field(default_factory=dict)
    of_schedule: dict[str, Choice] = field(default_factory=dict)
    remarks: tuple[Remark, ...] = ()


def read_run_table(folder: Path, paths: Iterable[Path], *, baseline: str | None = None) -> Table:
    """Read the traces of run directories.

    Speed-ups are over the baseline of the same point, from a trace of the same source.

    Args:
        folder: That names are relative to.
        paths: The run directories, in their order.
        baseline: Label or kind of the schedule to compare with; None: the default of all runs.
    """
    runs = [_read(folder, path) for path in paths]
    alone = [run for run in runs if run.point is None and run.results]
    found = (*differing([run.fields for run in alone if run.fields]), *_of_schedules(alone))
    planned = tuple(dict.fromkeys(column for run in runs if run.point for column in run.point.choices))
    if baseline is None:
        every = [(each.schedule, each.kind) for run in runs for each in run.results]
        baseline = default_baseline(every) if every else ""
    groups: dict[object, list[ResultRow]] = {}
    for run in runs:
        for each in run.results:
            groups.setdefault(each.group, []).append(replace(each, choices=_choices(run, found)))
    compared_runs = {group: iter(compared(of_group, baseline)) for group, of_group in groups.items()}
    results = tuple(next(compared_runs[each.group]) for run in runs for each in run.results)
    n_lonely = len({each.point for each in results if each.row and not each.has_baseline})
    n_missing = sum(not run.results for run in runs)
    of_points = [(run.results[0].point, list(run.remarks)) for run in runs if run.results]
    by_group: dict[object, list[ResultRow]] = {}
    for each in results:
        by_group.setdefault(each.group, []).append(each)
    of_points += [(same[0].point, remarks_on_results(same, Chances())) for same in by_group.values()]
    remarks = [*collected(of_points)]
    if n_lonely:
        remarks.append(lonely(n_lonely, baseline))
    if n_missing:
        how = "`simdist simulate RUN` or `torchrun ... -m real RUN` makes one"
        remarks.append(Remark("result", f"{folder}: {n_missing:,} of {len(runs):,} runs have no trace yet: {how}"))
    varied = (*planned, *(column for column in found if column not in planned))
    return _with_links_note(Table(varied, results, n_missing, extras_of(results), tuple(remarks), baseline))


def _with_links_note(table: Table) -> Table:
    """Say of simulations that are compared with measurements which machine they are of."""
    if all(each.error_ratio is None for each in table.results):
        return table
    note = "sim. error: with the links of the scenario; `simdist validate RUN --cluster FILE` takes calibrated ones"
    return replace(table, remarks=tuple(dict.fromkeys((*table.remarks, Remark("assumption", note)))))


def _read(folder: Path, path: Path) -> _RunRows:
    """Read a run directory; an error becomes a failed row."""
    name = path.relative_to(folder).as_posix()
    above = path.parent.relative_to(folder).as_posix() if path != folder else name
    row = ResultRow(above, "", {}, "simulated", path.name, "", 1, run=name)
    point: PlannedPoint | None = None
    try:
        if point := PlannedPoint.load(path.parent / _POINT):
            row = replace(row, point=point.number, case=point.case)
        run = run_directory.read(path)
    except SimdistError as error:
        source: TraceSource = "real" if (path / run_directory.REAL).exists() else "simulated"
        return _RunRows(point, [_failed(replace(row, source=source), error)])
    schedule = run.scenario.schedules[0]
    row = replace(row, schedule=schedule.name, kind=schedule.kind)
    results = [_measured(replace(row, source=source), path / file, run.plan) for source, file in _TRACES]
    there = _with_error_ratio([each for each in results if each])
    of_scenario = remarks_on_run(run.scenario)
    return _RunRows(point, there, fields_of(run.scenario), schedule_fields_of(schedule), of_scenario)


def _failed(row: ResultRow, error: SimdistError) -> ResultRow:
    return replace(row, failed=type(error).__name__, error=str(error).replace("\n", "; "))


def _measured(row: ResultRow, path: Path, plan: Plan) -> ResultRow | None:
    """Complete a row with a trace; None if there is none."""
    if not path.exists():
        return None
    try:
        trace = run_directory.read_trace(path, plan=plan)
        if row.source == "real" and not trace.source.startswith("real"):
            raise TraceError(f"{path}: is {trace.source!r}, and no measurement: move it away")
        times = break_down(trace)
        found = find_epochs(trace) if plan.dataset else None
    except SimdistError as error:
        return _failed(row, error)
    measured = times_of(row.schedule, trace.source, Simulated(plan, (times,), (found,) if found else ()), facets.FACETS)
    return replace(row, measured=measured)


def _with_error_ratio(results: list[ResultRow]) -> list[ResultRow]:
    """Note how far the simulation of a run is from its measurement, if it has both."""
    match [each.measured for each in results]:
        case [ScheduleTimes() as simulated, ScheduleTimes() as real]:
            return [replace(each, error_ratio=_error_ratio(float(simulated.step_s[0]), real)) for each in results]
        case _:
            return results


def _error_ratio(simulated_s: float, real: ScheduleTimes) -> float | None:
    real_s = float(real.step_s[0])
    return (simulated_s - real_s) / real_s if real_s > 0 else None


def _of_schedules(runs: Sequence[_RunRows]) -> tuple[str, ...]:
    """Return the columns of schedules in which runs of the same label differ."""
    by_label: dict[str, list[dict[str, Choice]]] = {}
    for run in runs:
        for each in run.results[:1]:
            by_label.setdefault(each.schedule, []).append(run.of_schedule)
    return tuple(dict.fromkeys(column for fields in by_label.values() for column in differing(fields)))


def _choices(run: _RunRows, columns: Sequence[str]) -> dict[str, Choice]:
    if run.point:
        return run.point.choices
    there = run.fields | run.of_schedule
    return {column: there[column] for column in columns if column in there}


def merged(sweep: Table, runs: Table) -> Table:
    """Return the rows of both, point by point, schedules in the order of the sweep; each simulation once."""
    rows = {_key(each): each for each in sweep.results if each.measured}
    kept = list(_kept(runs, rows))
    places = {place: number for number, place in enumerate(dict.fromkeys(each.place for each in sweep.results))}
    order = {_key(each): number for number, each in enumerate(sweep.results)}
    kept.sort(key=lambda each: (order.get(_key(each), len(order)), each.run, each.source != "simulated"))
    results = [*sweep.results, *kept]
    results.sort(key=lambda each: places.get(each.place, len(places)))
    whole = joined([sweep, replace(runs, extras=extras_of(kept))])
    return _with_links_note(replace(whole, results=tuple(results)))


def _kept(runs: Table, rows: dict[object, ResultRow]) -> Iterator[ResultRow]:
    """Yield the rows of runs that say something new."""
    for each in runs.results:
        row = rows.get(_key(each))
        if row is None or row.measured is None or each.measured is None or _numbers(row) != _numbers(each):
            yield each
            continue
        simulated_s = float(row.measured.as_simulated.step_s[0])
        if each.source == "real":
            ratio = each.error_ratio
            yield replace(each, error_ratio=_error_ratio(simulated_s, each.measured) if ratio is None else ratio)
        elif not math.isclose(simulated_s, float(each.measured.step_s[0]), rel_tol=_SAME):
            yield each


def _key(result: ResultRow) -> object:
    return result.place, result.schedule


def _numbers(result: ResultRow) -> dict[str, object]:
    return {column: choice.number for column, choice in result.choices.items()}
