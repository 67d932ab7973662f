"""Run directories become a report: their traces are read, and simulated where there is none.

Runs in one folder are schedules of a point, and are compared with each other. A label is unlike all others on the page:
that of the schedule if there is one folder, else where the run is.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from simdist.errors import ScenarioError, TraceError
from simdist.plan.delays import Delays
from simdist.report.figures import shortened
from simdist.report.page.model import Execution, Origin, ReportedPoint, ReportedRun, RunsReport
from simdist.runs import run_directory
from simdist.runs.building import Built
from simdist.runs.calibrated import Calibrated, price_run, simulate_run, simulated_scenario
from simdist.runs.run_directory import RunDirectory
from simdist.studies.comparison import find_label, with_draws
from simdist.studies.held import find_held, with_links
from simdist.studies.validation import finished_steps, validate
from simdist.sweep.fields import Choice, differing, fields_of
from simdist.sweep.runs import POINT, PlannedPoint
from simdist.sweep.selection import short_names
from simdist.sweep.table import written_text
from simdist.traces.trace import Trace
from simdist.traces.waiting import first_steps

#: Called with what is done now, the runs done, and the runs in all.
Progress: TypeAlias = Callable[[str, int, int], None]

#: Settings of a scenario that runs must share: else their speed-ups are not those of schedules.
_COMMON = ("cluster", "workload", "data", "steps", "host", "input")
_MOST_FIELDS = 4  # that a title names


def read_report(
    folder: Path,
    runs: Sequence[RunDirectory],
    *,
    baseline: str | None,
    calibrated: Calibrated | None = None,
    progress: Progress,
) -> RunsReport:
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
    labels = _labels(folder, runs)
    groups: dict[Path, list[RunDirectory]] = {}
    for run in runs:
        groups.setdefault(run.path.parent, []).append(run)
    wanted = baseline or _usual(groups, labels)
    places = {path: _place(of_point, labels, wanted) for path, of_point in groups.items()}
    bases = [groups[path][place] for path, place in places.items() if place is not None]
    if not bases:
        known = ", ".join(dict.fromkeys(labels[run.path] for of_point in groups.values() for run in of_point))
        raise ScenarioError(f"{folder.name}: no run is called {wanted!r} to compare with; there are: {known}")
    names = {_name(run) for run in bases}
    base = labels[bases[0].path] if len(groups) == 1 else names.pop() if len(names) == 1 else _kind(bases[0])
    done: list[ReportedPoint] = []
    n_done = 0
    for (path, of_point), (name, title) in zip(groups.items(), _titles(folder, groups), strict=True):
        place = places[path]
        first = of_point[place or 0]
        found: list[ReportedRun] = []
        for run in (first, *(each for each in of_point if each is not first)):
            progress(labels[run.path], n_done, len(runs))
            found.append(_reported(run, labels[run.path], calibrated))
            n_done += 1
        no_base = f"{name}: no run is called {wanted!r}, so there are no speed-ups."
        notes = [no_base] if place is None else [note for each in found[1:] for note in _differences(each, found[0])]
        done.append(ReportedPoint(name, title, tuple(found), place is not None, tuple(notes)))
    return RunsReport(tuple(done), base, calibrated)


def _name(run: RunDirectory) -> str:
    return run.scenario.schedules[0].name


def _kind(run: RunDirectory) -> str:
    return run.scenario.schedules[0].kind


def _usual(groups: Mapping[Path, Sequence[RunDirectory]], labels: Mapping[Path, str]) -> str:
    """Return the schedule to compare with if none is asked for."""
    is_there = any(_place(runs, labels, "sync") is not None for runs in groups.values())
    return "sync" if is_there else _name(next(iter(groups.values()))[0])


def _place(runs: Sequence[RunDirectory], labels: Mapping[Path, str], wanted: str) -> int | None:
    """Return the place of the run with a label or, failing that, of the first of that schedule or kind."""
    of_runs = [labels[run.path] for run in runs]
    if wanted in of_runs:
        return of_runs.index(wanted)
    return find_label([(_name(run), _kind(run)) for run in runs], wanted)


def _labels(folder: Path, runs: Sequence[RunDirectory]) -> dict[Path, str]:
    """Return what each run is called, by its path."""
    has_one = len({run.path.parent for run in runs}) == 1
    times = Counter(_name(run) for run in runs)
    places = {run.path: run.path.name if has_one else run.path.relative_to(folder).as_posix() for run in runs}
    labels: dict[Path, str] = {}
    for run in runs:
        name, place = _name(run), places[run.path]
        if has_one:
            labels[run.path] = name if times[name] == 1 or name == place else f"{name} ({place})"
        else:
            labels[run.path] = place if run.path.name == name else f"{name} ({place})"
    return labels if len(set(labels.values())) == len(runs) else places


def _titles(folder: Path, groups: Mapping[Path, Sequence[RunDirectory]]) -> list[tuple[str, str]]:
    """Return the name and the title of each point; both are empty if there is just one.

    A title tells what the point sets: as the sweep that planned it says, or else in which fields its scenario differs.
    """
    if len(groups) == 1:
        return [("", "")]
    planned = [PlannedPoint.load(path / POINT) for path in groups]
    fields = [fields_of(runs[0].scenario) for runs in groups.values()]
    different = differing(fields)
    chosen = [
        point.choices if point else {column: each[column] for column in different if column in each}
        for point, each in zip(planned, fields, strict=True)
    ]
    columns = list(dict.fromkeys(column for choices in chosen for column in choices))
    short = dict(zip(columns, short_names(columns), strict=True))
    titles = []
    for path, point, choices in zip(groups, planned, chosen, strict=True):
        name = path.relative_to(folder).as_posix()
        what = ", ".join(_texts(point.case if point else "", choices, short))
        titles.append((name, f"{name}: {what}" if what else name))
    return titles


def _texts(case: str, choices: dict[str, Choice], names: dict[str, str]) -> list[str]:
    texts = [f"{names[column]} {shortened(written_text(choice))}" for column, choice in choices.items()]
    n_more = len(texts) - _MOST_FIELDS
    more = [f"{n_more} more"] if n_more > 0 else []
    return [*([case] if case else []), *texts[:_MOST_FIELDS], *more]


def _reported(run: RunDirectory, label: str, calibrated: Calibrated | None) -> ReportedRun:
    executions: dict[Origin, Execution] = {}
    notes: list[str] = []
    if (run.path / run_directory.PARTIAL).exists():
        notes.append(f"{run_directory.PARTIAL}, of a measurement that ended early, is not on this page.")
    kept = _trace(run, run_directory.SIMULATED)
    real = _trace(run, run_directory.REAL)
    planned, run = run, run_directory.as_measured(run, real) if real else run
    if kept and run is not planned:
        notes.append(f"It was measured without what its links do; {run_directory.SIMULATED} is not on this page.")
        kept = None
    simulated_now = bool(calibrated) or (kept is None and real is None)
    simulated = simulate_run(run, calibrated, real=real) if simulated_now else kept
    if simulated_now and not calibrated:
        notes.append("It had no trace, so it was simulated for this page.")
    costs = price_run(run, calibrated, real=real) if run.scenario.has_links else None
    real = with_links(run, real, costs) if real and costs else real
    if simulated:
        held = find_held(simulated, costs) if costs else None
        found = Execution.of(simulated, origin="simulated", label=label, held=held)
        scenario = simulated_scenario(run, calibrated, real=real)
        if scenario.has_ranges:
            built = Built(run.scenario.schedules[0], run.plan, costs or price_run(run, calibrated, real=real), 0)
            found = replace(found, times=with_draws(scenario, built, found.times))
        executions["simulated"] = found
    if real:
        measured, more = _finished(run, real)
        held = find_held(measured, costs) if costs else None
        executions["measured"] = Execution.of(measured, origin="measured", label=label, held=held)
        notes += more
    validation = validate(real, simulated, run.delays, costs) if real and simulated else None
    report = run_directory.read_report(run.path, real) if real else None
    machines = _machines_text(report) if report else ""
    return ReportedRun(label, run, executions, validation, machines, simulated_now, tuple(notes))


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


def _machines_text(found: Mapping[str, object]) -> str:
    """Say on which machines and with what a run was measured, as its `real.json` has it."""
    hosts, versions = found.get("hosts"), found.get("versions")
    n_ranks = Counter(map(str, hosts if isinstance(hosts, list) else ()))
    parts = [
        ", ".join(f"{name} {found.get(name) or 'unknown'}" for name in ("program", "backend", "device")),
        f"ranks: {', '.join(f'{count} on {host}' for host, count in n_ranks.items())}" if n_ranks else "",
        ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, dict) else "",
    ]
    return "; ".join(part for part in parts if part)


def _differences(reported: ReportedRun, baseline: ReportedRun) -> Iterator[str]:
    """Tell whether a run is of another scenario than the baseline."""
    run, base = reported.run, baseline.run
    different = [name for name in _COMMON if getattr(run.scenario, name) != getattr(base.scenario, name)]
    if not _equal(run.delays, base.delays):
        different.append("delays")
    if different:
        yield (
            f"{reported.label} is of another scenario than {baseline.label}: other {', '.join(different)}. So the "
            f"difference in speed is not that of the schedules alone."
        )


def _equal(a: Delays, b: Delays) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[channel], b[channel]) for channel in a)
