"""What a page of runs is about: executions of plans, simulated and measured, and what follows from their traces."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from simdist.analysis import Waiting, waiting
from simdist.breakdown import STATES, breakdown
from simdist.compare import Measured, Row, row
from simdist.errors import TraceError
from simdist.report.page.machines import Machines
from simdist.rundir import RunDirectory
from simdist.trace import Trace
from simdist.validate import Validation

__all__ = ["ORIGINS", "Execution", "Origin", "Report", "ReportedRun"]

Origin: TypeAlias = Literal["simulated", "measured"]
ORIGINS: tuple[Origin, ...] = ("simulated", "measured")


@dataclass(frozen=True)
class Execution:
    """One execution of a plan, in a simulation or on machines, and what its trace says.

    Args:
        origin: Which of both.
        trace: What happened in the steps that every rank finished.
        times: Step time, and seconds per step in each state, averaged over ranks.
        waits: Who waited for whom.
    """

    origin: Origin
    trace: Trace
    times: Measured
    waits: Waiting

    @classmethod
    def of(cls, trace: Trace, *, origin: Origin, label: str) -> "Execution":
        """Analyse a complete trace.

        Raises:
            TraceError: An operation did not run on some rank, or none takes any time.
        """
        where = breakdown(trace)
        if not where.makespan_s[0]:
            raise TraceError(f"{label}, {origin}: no operation takes any time; give e.g. forward: 20 ms")
        states_s = {state: where.per_step_s(state) for state in STATES}
        return cls(origin, trace, Measured(label, trace.source, where.step_s, states_s), waiting(trace))

    @property
    def n_steps(self) -> int:
        """Steps that every rank finished."""
        return self.trace.plan.n_steps

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return float(self.times.step_s[0])

    def state_s(self, state: str) -> float:
        """Return the seconds per step in a state of `simdist.breakdown`, averaged over ranks."""
        return float(self.times.states_s[state][0])


@dataclass(frozen=True)
class ReportedRun:
    """A run directory on the page.

    Args:
        label: The schedule's label; with the directory's name where two runs have the same.
        run: What was executed.
        executions: Simulated, measured, or both; at least one.
        validation: How both compare, if there are both.
        machines: What the measurement says of the machines, if it says anything.
        simulated_now: It had no trace, so that it was simulated for the page.
        notes: What a reader must know of it, in sentences.
    """

    label: str
    run: RunDirectory
    executions: Mapping[Origin, Execution]
    validation: Validation | None
    machines: Machines | None
    simulated_now: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Everything that a page of runs shows.

    Args:
        runs: One or more; the others are compared with the first.
        notes: What a reader must know of the runs together, in sentences.
    """

    runs: tuple[ReportedRun, ...]
    notes: tuple[str, ...]

    @property
    def baseline(self) -> ReportedRun:
        """The run that the others are compared with."""
        return self.runs[0]

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Simulated and measured, if any run was."""
        return tuple(origin for origin in ORIGINS if any(origin in run.executions for run in self.runs))

    def rows(self, origin: Origin) -> dict[str, Row]:
        """Return the lines of the speed-up table, by label; none if the baseline was not simulated, or measured."""
        base = self.baseline.executions.get(origin)
        if base is None:
            return {}
        done = {run.label: run.executions[origin] for run in self.runs if origin in run.executions}
        return {label: row(each.times, base.times) for label, each in done.items()}

    def executions(self) -> list[tuple[ReportedRun, Execution]]:
        """Return every execution with its run, in the order of the page."""
        return [(run, run.executions[origin]) for run in self.runs for origin in ORIGINS if origin in run.executions]
