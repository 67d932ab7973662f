"""Run directories become a report: their traces are read, and simulated where there is none.

Runs in one folder are schedules that are compared with each other. A label is unlike all others on the page.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from simdist.errors import ScenarioError, TraceError
from simdist.report.page.model import Execution, Origin, ReportedRun, RunsReport
from simdist.runs import run_directory
from simdist.runs.building import Built
from simdist.runs.calibrated import Calibrated, price_run, simulate_run, simulated_scenario
from simdist.runs.run_directory import RunDirectory
from simdist.studies.comparison import find_label
from simdist.studies.draws import with_draws
from simdist.studies.held import find_held, with_links
from simdist.studies.known_delays import remarks_on_run
from simdist.studies.validation import finished_steps, validate
from simdist.traces.trace import Trace
from simdist.traces.waiting import first_steps

#: Called with what is done now, the runs done, and the runs in all.
_Progress: TypeAlias = Callable[[str, int, int], None]

#: Settings of a scenario that runs must share: else their speed-ups are not those of schedules.
_COMMON = ("cluster", "workload", "steps", "host", "input")


def read_report(
    folder: Path,
    runs: Sequence[RunDirectory],
    *,
    baseline: str | None,
    calibrated: Calibrated | None = None,
    progress: _Progress,
) -> RunsReport:
    """Read the traces of runs, and simulate runs without one.

    Args:
        folder: Where they are.
        runs: One or more.
        baseline: Label or kind of the schedule to compare with; None takes `sync` if it is there, else the first.
        calibrated: Machines to simulate all runs with, instead of those of their scenarios.
        progress: See `_Progress`.

    Raises:
        ScenarioError: There is no such baseline, or a scenario has another number of machines than `calibrated`.
        TraceError: A trace, or what belongs to it, is damaged or of no finished step.
        UnsupportedError: A run cannot be simulated.
    """
    labels = _labels(runs)
    place = _place(runs, labels, baseline)
    if place is None:
        known = ", ".join(labels)
        raise ScenarioError(f"{folder.name}: no run is called {baseline!r} to compare with; there are: {known}")
    pairs = list(zip(runs, labels, strict=True))
    found: list[ReportedRun] = []
    for run, label in (pairs[place], *pairs[:place], *pairs[place + 1 :]):
        progress(label, len(found), len(runs))
        found.append(_reported(run, label, calibrated))
    notes = [note for each in found[1:] for note in _differences(each, found[0])]
    return RunsReport(tuple(found), tuple(notes), calibrated)


def _name(run: RunDirectory) -> str:
    return run.scenario.schedules[0].name


def _place(runs: Sequence[RunDirectory], labels: Sequence[str], wanted: str | None) -> int | None:
    """Return the place of the run with a label or, failing that, of the first of that schedule or kind."""
    if wanted in labels:
        return labels.index(wanted)
    return find_label([(_name(run), run.scenario.schedules[0].kind) for run in runs], wanted)


def _labels(runs: Sequence[RunDirectory]) -> list[str]:
    """Return the name of each run: its schedule, with its folder where others are called so, too."""
    times = Counter(map(_name, runs))
    places = [run.path.name for run in runs]
    labels = [
        name if times[name] == 1 or name == place else f"{name} ({place})"
        for name, place in zip(map(_name, runs), places, strict=True)
    ]
    return labels if len(set(labels)) == len(runs) else places


def _reported(run: RunDirectory, label: str, calibrated: Calibrated | None) -> ReportedRun:
    executions: dict[Origin, Execution] = {}
    notes: list[str] = []
    if (run.path / run_directory.PARTIAL).exists():
        notes.append(f"{run_directory.PARTIAL}, of a measurement that ended early, is not on this page.")
    kept = _trace(run, run_directory.SIMULATED)
    real = _trace(run, run_directory.REAL)
    if real and real.real_rank is not None:
        notes.append(f"{run_directory.REAL}, of rank {real.real_rank} among simulated peers, is not on this page.")
        real = None
    planned = run
    run = run_directory.as_measured(run, real) if real else run
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
        if scenario.is_of_machines:
            built = Built(run.scenario.schedules[0], run.plan, costs or price_run(run, calibrated, real=real), 0)
            found = replace(found, times=with_draws(scenario, built, found.times))
        executions["simulated"] = found
    if real:
        measured, more = _finished(run, real)
        held = find_held(measured, costs) if costs else None
        executions["measured"] = Execution.of(measured, origin="measured", label=label, held=held)
        notes += more
    validation = validate(real, simulated, run.delays, costs) if real and simulated else None
    report = run_directory.read_real_report(run.path, real) if real else None
    notes += [f"{each}." for each in remarks_on_run(run.scenario)]
    machines = _machines_text(report) if report else ""
    return ReportedRun(label, run, executions, validation, machines, simulated_now, tuple(notes))


def _trace(run: RunDirectory, name: str) -> Trace | None:
    path = run.path / name
    return run_directory.read_trace(path, plan=run.plan) if path.exists() else None


def _finished(run: RunDirectory, real: Trace) -> tuple[Trace, list[str]]:
    """Return the steps that every rank finished, and say so if they are not all."""
    path = run.path / run_directory.REAL
    n_steps = finished_steps(real)
    if n_steps == run.plan.n_steps:
        return real, []
    if n_steps == 0:
        raise TraceError(f"{path}: no step was finished by all ranks: measure the run again")
    note = f"Measured were {n_steps:,} of {run.plan.n_steps:,} steps: only those were finished by all ranks."
    return first_steps(real, n_steps), [note]


def _machines_text(found: Mapping[str, object]) -> str:
    """Return the machines and software of a measured run, from its `real.json`."""
    hosts = found.get("hosts")
    versions = found.get("versions")
    n_ranks = Counter(map(str, hosts if isinstance(hosts, list) else ()))
    parts = [
        ", ".join(f"{name} {found.get(name) or 'unknown'}" for name in ("program", "backend", "device")),
        f"ranks: {', '.join(f'{count} on {host}' for host, count in n_ranks.items())}" if n_ranks else "",
        ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, dict) else "",
    ]
    return "; ".join(part for part in parts if part)


def _differences(reported: ReportedRun, baseline: ReportedRun) -> Iterator[str]:
    """Tell whether a run is of another scenario than the baseline."""
    run = reported.run
    base = baseline.run
    different = [name for name in _COMMON if getattr(run.scenario, name) != getattr(base.scenario, name)]
    ours = run.delays
    theirs = base.delays
    if ours.keys() != theirs.keys() or not all(np.array_equal(ours[channel], theirs[channel]) for channel in ours):
        different.append("delays")
    if different:
        yield (
            f"{reported.label} is of another scenario than {baseline.label}: other {', '.join(different)}. So the "
            f"difference in speed is not that of the schedules alone."
        )
