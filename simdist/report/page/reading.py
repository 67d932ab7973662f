"""Run directories become a report: their traces are read, and simulated where there is none."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from simdist.errors import ScenarioError, TraceError
from simdist.plan.delays import Delays
from simdist.report.page.machines import Machines
from simdist.report.page.model import Execution, Origin, Report, ReportedPoint, ReportedRun
from simdist.report.page.points import NamedRun, RunsOfPoint, points_of
from simdist.runs import run_directory
from simdist.runs.calibrated import Calibrated, simulate_run
from simdist.runs.run_directory import RunDirectory
from simdist.studies.comparison import find_label
from simdist.studies.validation import finished_steps, validate
from simdist.traces.trace import Trace
from simdist.traces.waiting import first_steps

T = TypeVar("T")
Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is done now, the runs done, and the runs in all."""

_COMMON = ("cluster", "workload", "data", "steps", "host", "input")
"""Settings of a scenario that runs must share: else their speed-ups are not those of schedules."""


def read_report(
    folder: Path,
    runs: Sequence[RunDirectory],
    *,
    baseline: str | None,
    calibrated: Calibrated | None = None,
    progress: Progress,
) -> Report:
    """Read the traces of runs, and simulate those that have none.

    Args:
        folder: Where they are, at any depth; those beside each other are compared.
        runs: One or more.
        baseline: Label or kind of the schedule to compare with; None takes `sync` if it is there, else the first.
        calibrated: Machines to simulate all runs with, instead of those of their scenarios.
        progress: See `Progress`.

    Raises:
        ScenarioError: There is no such baseline, or a scenario has another number of machines than `calibrated`.
        TraceError: A trace, or what belongs to it, is damaged or of no finished step.
        UnsupportedError: A run cannot be simulated.
    """
    points = points_of(folder, runs)
    wanted = baseline or _usual(points)
    places = [_place(point.runs, wanted) for point in points]
    if all(place is None for place in places):
        labels = ", ".join(dict.fromkeys(each.label for point in points for each in point.runs))
        raise ScenarioError(f"{folder.name}: no run is called {wanted!r} to compare with; there are: {labels}")
    done: list[ReportedPoint] = []
    for point, place in zip(points, places, strict=True):
        of_point: list[ReportedRun] = []
        for each in _with_first(point.runs, place or 0):
            progress(each.label, sum(len(other.runs) for other in done) + len(of_point), len(runs))
            of_point.append(_reported(each, calibrated))
        notes = tuple(_notes(point, place, wanted))
        done.append(ReportedPoint(point.folder, point.title, tuple(of_point), place is not None, notes))
    return Report(tuple(done), _base(points, places), calibrated)


def _usual(points: Sequence[RunsOfPoint]) -> str:
    """Return the schedule to compare with if none is asked for."""
    is_there = any(_place(point.runs, "sync") is not None for point in points)
    return "sync" if is_there else points[0].runs[0].schedule


def _place(runs: Sequence[NamedRun], wanted: str) -> int | None:
    """Return the place of the run with a label or, failing that, of the first of that schedule or kind."""
    labels = [run.label for run in runs]
    return labels.index(wanted) if wanted in labels else find_label([(run.schedule, run.kind) for run in runs], wanted)


def _base(points: Sequence[RunsOfPoint], places: Sequence[int | None]) -> str:
    """Say what speed-ups are over: the baseline of the only point, or that of all points."""
    found = [point.runs[place] for point, place in zip(points, places, strict=True) if place is not None]
    if len(points) == 1:
        return found[0].label
    names = {each.schedule for each in found}
    return names.pop() if len(names) == 1 else found[0].kind


def _with_first(items: Sequence[T], place: int) -> list[T]:
    return [items[place], *items[:place], *items[place + 1 :]]


def _notes(point: RunsOfPoint, place: int | None, wanted: str) -> Iterator[str]:
    """Tell of what is not compared, and of what is but should not be."""
    if place is None:
        yield f"{point.folder}: no run is called {wanted!r}, so there are no speed-ups."
        return
    first, *others = _with_first(point.runs, place)
    for each in others:
        yield from _differences(each.run, each.label, (first.run, first.label))


def _reported(named: NamedRun, calibrated: Calibrated | None) -> ReportedRun:
    run, label = named.run, named.label
    executions: dict[Origin, Execution] = {}
    notes = list(_partial(run))
    kept = _trace(run, run_directory.SIMULATED)
    real = _trace(run, run_directory.REAL)
    simulated_now = bool(calibrated) or (kept is None and real is None)
    simulated = simulate_run(run, calibrated, real=real) if simulated_now else kept
    if simulated_now and not calibrated:
        notes.append("It had no trace, so it was simulated for this page.")
    if simulated:
        executions["simulated"] = Execution.of(simulated, origin="simulated", label=label)
    if real:
        measured, more = _finished(run, real)
        executions["measured"] = Execution.of(measured, origin="measured", label=label)
        notes += more
    report = run.path / run_directory.REPORT
    return ReportedRun(
        label,
        run,
        executions,
        validation=validate(real, simulated, run.delays) if real and simulated else None,
        machines=Machines.read(report) if real and report.exists() else None,
        simulated_now=simulated_now,
        notes=tuple(notes),
    )


def _trace(run: RunDirectory, name: str) -> Trace | None:
    path = run.path / name
    return run_directory.read_trace(path, plan=run.plan) if path.exists() else None


def _finished(run: RunDirectory, real: Trace) -> tuple[Trace, list[str]]:
    """Return the steps that every rank finished, and say so if they are not all."""
    path, n_steps = run.path / run_directory.REAL, finished_steps(real)
    if n_steps == run.plan.n_steps:
        return real, []
    if n_steps == 0:
        raise TraceError(f"{path}: no step was finished by all ranks: measure the run again")
    note = f"Measured were {n_steps:,} of {run.plan.n_steps:,} steps: only those were finished by all ranks."
    return first_steps(real, n_steps), [note]


def _partial(run: RunDirectory) -> Iterator[str]:
    if (run.path / run_directory.PARTIAL).exists():
        yield f"{run_directory.PARTIAL}, of a measurement that ended early, is not on this page."


def _differences(run: RunDirectory, label: str, baseline: tuple[RunDirectory, str]) -> Iterator[str]:
    """Tell whether a run is of another scenario than the baseline."""
    base, base_label = baseline
    different = [name for name in _COMMON if getattr(run.scenario, name) != getattr(base.scenario, name)]
    if not _equal(run.delays, base.delays):
        different.append("delays")
    if different:
        yield (
            f"{label} is of another scenario than {base_label}: other {', '.join(different)}. So the difference in "
            f"speed is not that of the schedules alone."
        )


def _equal(a: Delays, b: Delays) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[channel], b[channel]) for channel in a)
