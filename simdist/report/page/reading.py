"""Run directories become a report: their traces are read, and simulated where there is none."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from simdist import rundir
from simdist.analysis import first_steps
from simdist.cost import price
from simdist.engines import simulate
from simdist.engines.delays import Delays
from simdist.errors import PlanError, ScenarioError, TraceError, UnsupportedError
from simdist.report.page.machines import Machines
from simdist.report.page.model import Execution, Origin, Report, ReportedRun
from simdist.rundir import RunDirectory
from simdist.trace import Trace
from simdist.validate import finished_steps, validate

__all__ = ["read_report"]

T = TypeVar("T")
Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is done now, the runs done, and the runs in all."""

_COMMON = ("cluster", "workload", "data", "steps", "host", "input")
"""Settings of a scenario that runs must share: else their speed-ups are not those of schedules."""


def read_report(name: str, runs: Sequence[RunDirectory], *, baseline: str | None, progress: Progress) -> Report:
    """Read the traces of runs, and simulate those that have none.

    Args:
        name: What the runs are called together.
        runs: One or more.
        baseline: Label or kind of the schedule to compare with; None takes `sync` if it is there, else the first.
        progress: See `Progress`.

    Raises:
        ScenarioError: There is no such baseline.
        TraceError: A trace, or what belongs to it, is damaged or of no finished step.
        UnsupportedError: A run without a trace cannot be simulated.
    """
    labels = _labels(runs)
    place = _baseline(runs, labels, baseline, name)
    first, *others = _with_first(list(zip(runs, labels, strict=True)), place)
    notes = tuple(note for run, label in others for note in _differences(run, label, first))
    done = []
    for number, (run, label) in enumerate((first, *others)):
        progress(label, number, len(runs))
        done.append(_reported(run, label))
    return Report(tuple(done), notes)


def _labels(runs: Sequence[RunDirectory]) -> list[str]:
    labels = [run.scenario.schedules[0].name for run in runs]
    times = Counter(labels)
    return [
        label if times[label] == 1 else f"{label} ({run.path.name})" for label, run in zip(labels, runs, strict=True)
    ]


def _baseline(runs: Sequence[RunDirectory], labels: Sequence[str], wanted: str | None, name: str) -> int:
    """Return the place of the run with a label or, failing that, of the first of that kind."""
    kinds = [run.scenario.schedules[0].kind for run in runs]
    for names in (labels, kinds):
        if (wanted or "sync") in names:
            return names.index(wanted or "sync")
    if wanted is None:
        return 0
    raise ScenarioError(f"{name}: no run is called {wanted!r} to compare with; there are: {', '.join(labels)}")


def _with_first(items: list[T], place: int) -> list[T]:
    return [items[place], *items[:place], *items[place + 1 :]]


def _reported(run: RunDirectory, label: str) -> ReportedRun:
    executions: dict[Origin, Execution] = {}
    notes = list(_partial(run))
    simulated = _trace(run, rundir.SIMULATED)
    real = _trace(run, rundir.REAL)
    simulated_now = simulated is None and real is None
    if simulated_now:
        simulated = _simulated(run)
        notes.append("It had no trace, so it was simulated for this page.")
    if simulated:
        executions["simulated"] = Execution.of(simulated, origin="simulated", label=label)
    if real:
        measured, more = _finished(run, real)
        executions["measured"] = Execution.of(measured, origin="measured", label=label)
        notes += more
    report = run.path / rundir.REPORT
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
    return rundir.read_trace(path, plan=run.plan) if path.exists() else None


def _simulated(run: RunDirectory) -> Trace:
    try:
        costs = price(run.plan, run.scenario.cluster, run.scenario.workload)
        return simulate(run.plan, costs, run.delays)
    except (PlanError, ScenarioError, UnsupportedError) as error:
        raise type(error)(f"{run.path}: {error}") from None


def _finished(run: RunDirectory, real: Trace) -> tuple[Trace, list[str]]:
    """Return the steps that every rank finished, and say so if they are not all."""
    path, n_steps = run.path / rundir.REAL, finished_steps(real)
    if n_steps == run.plan.n_steps:
        return real, []
    if n_steps == 0:
        raise TraceError(f"{path}: no step was finished by all ranks: measure the run again")
    note = f"Measured were {n_steps:,} of {run.plan.n_steps:,} steps: only those were finished by all ranks."
    return first_steps(real, n_steps), [note]


def _partial(run: RunDirectory) -> Iterator[str]:
    if (run.path / rundir.PARTIAL).exists():
        yield f"{rundir.PARTIAL}, of a measurement that ended early, is not on this page."


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
