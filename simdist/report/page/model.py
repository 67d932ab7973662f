"""Model of a page of runs: executions of plans, simulated and measured, and results from their traces."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from simdist.errors import TraceError
from simdist.runs.calibrated import Calibrated
from simdist.runs.run_directory import RunDirectory
from simdist.studies import facets
from simdist.studies.comparison import Row, row
from simdist.studies.facets import Simulated
from simdist.studies.measuring import ScheduleTimes, times_of
from simdist.studies.validation import Validation
from simdist.traces.breakdown import break_down
from simdist.traces.links import Held
from simdist.traces.trace import Trace
from simdist.traces.waiting import Waiting, attribute_waiting

Origin: TypeAlias = Literal["simulated", "measured"]
_ORIGINS: tuple[Origin, ...] = ("simulated", "measured")


@dataclass(frozen=True)
class Execution:
    """One execution of a plan, simulated or measured, and results from its trace.

    Args:
        origin: Which of both.
        trace: Trace of the steps that every rank finished.
        times: Step time, and seconds per step in each state, averaged over ranks.
        waits: Waiting between ranks.
    """

    origin: Origin
    trace: Trace
    times: ScheduleTimes
    waits: Waiting

    @classmethod
    def of(cls, trace: Trace, *, origin: Origin, label: str, held: Held | None = None) -> "Execution":
        """Analyse a complete trace, and the delays `held` by links.

        Raises:
            TraceError: An operation did not run on some rank, or none takes any time.
        """
        where = break_down(trace, held)
        if not where.makespan_s[0]:
            raise TraceError(f"{label}, {origin}: no operation takes any time; give e.g. forward: 20 ms")
        times = times_of(label, trace.source, Simulated(trace.plan, (where,)), facets.FACETS)
        return cls(origin, trace, times, attribute_waiting(trace, held))

    @property
    def n_steps(self) -> int:
        """Steps that every rank finished."""
        return self.trace.plan.n_steps

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return float(self.times.step_s[0])

    def state_s(self, state: str) -> float:
        """Return the seconds per step in a state of `simdist.traces.breakdown`, averaged over ranks."""
        return float(self.times.states_s[state][0])


@dataclass(frozen=True)
class ReportedRun:
    """A run directory on the page.

    Args:
        label: Name, unlike all others on the page; see `simdist.report.page.reading`.
        run: The run that was executed.
        executions: Simulated, measured, or both; at least one.
        validation: How both compare, if there are both.
        machines: Description of its machines by the measurement; empty if there is none.
        simulated_now: It was simulated for the page: it had no trace, or other machines are simulated.
        notes: Notes for the reader, in sentences.
    """

    label: str
    run: RunDirectory
    executions: Mapping[Origin, Execution]
    validation: Validation | None
    machines: str
    simulated_now: bool
    notes: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Its directory, which tells it apart from all others."""
        return self.run.path


@dataclass(frozen=True)
class RunsReport:
    """Everything that a page of runs shows.

    Args:
        runs: One or more, schedules that are compared with each other; the baseline first.
        notes: Notes for the reader about all of them, in sentences.
        calibrated: Simulated machines that replace those of the scenarios, if any.
    """

    runs: tuple[ReportedRun, ...]
    notes: tuple[str, ...]
    calibrated: Calibrated | None

    @property
    def base(self) -> str:
        """The label of the baseline."""
        return self.runs[0].label

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Simulated and measured, if any run was."""
        return tuple(origin for origin in _ORIGINS if any(origin in run.executions for run in self.runs))

    def rows(self, origin: Origin) -> dict[str, Row]:
        """Return the lines of the speed-up table, by label; none if the baseline was not simulated, or measured."""
        base = self.runs[0].executions.get(origin)
        done = {run.label: run.executions[origin] for run in self.runs if origin in run.executions} if base else {}
        return {label: row(each.times, base.times) for label, each in done.items()} if base else {}

    def executions(self) -> list[tuple[ReportedRun, Execution]]:
        """Return every execution with its run, in the order of the page."""
        return [(run, run.executions[origin]) for run in self.runs for origin in _ORIGINS if origin in run.executions]
