"""The attempts of a run with failures, simulated against measured: how long all of it takes, and where the time goes.

The parts of a measured run are between moments that are noted: see `simdist.traces.attempts`. Its steps are those of
its traces. The categories are those of `simdist.runs.attempts`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from simdist.plan.failures import StepFailure
from simdist.runs.recovery import Category
from simdist.runs.run_directory import RunDirectory, read_trace
from simdist.runs.run_failures import SufferedRun, suffer_run
from simdist.scenario import Scenario
from simdist.settings.units import format_error, format_seconds
from simdist.studies import statistics
from simdist.studies.columns import Column
from simdist.studies.tables import BOTH, table_text
from simdist.traces.attempts import ATTEMPTS, Absence, AttemptLog, MetFailure, attempt_trace_name
from simdist.traces.times_of_steps import TimesOfSteps, times_of_steps
from simdist.traces.trace import Trace

_COLUMNS = (Column("category"), *BOTH)


@dataclass(frozen=True, slots=True)
class CategoryTime:
    """Where some of the time of a run with failures went.

    Args:
        category (str): Category, see `simdist goodput`. What steps that count take longer than calm ones is part of
            `productive`.
        simulated_s: Time.
        measured_s: Time.
    """

    category: Category
    simulated_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class MeasuredRecovery:
    """What the recoveries of a run took, in the mean, to state it in the scenario of another run.

    Args:
        detect_s: From the end of processes until they are started again; None if none ended.
        timeout_s: From the begin of a hang until then; None without one.
        schedule_s: From the loss of a node until then, beyond `detect_s`; None without one.
        start_s: Until libraries are loaded.
        connect_s: Until all ranks have met.
        load_s: Loading of the checkpoint.
        warm_up_s: Until the first step begins.
    """

    detect_s: float | None
    timeout_s: float | None
    schedule_s: float | None
    start_s: float
    connect_s: float
    load_s: float
    warm_up_s: float

    def text(self) -> str:
        """Return it as `recovery` of a scenario."""
        detect = "" if self.detect_s is None else f"detect: {format_seconds(self.detect_s)}, "
        timeout = "" if self.timeout_s is None else f"timeouts: {{collective: {format_seconds(self.timeout_s)}}}, "
        schedule = "" if self.schedule_s is None else f"schedule: {format_seconds(self.schedule_s)}, "
        names = ("start", "connect", "load", "warm_up")
        parts = ", ".join(f"{name}: {format_seconds(getattr(self, f'{name}_s'))}" for name in names)
        return f"recovery: {{{detect}{timeout}{schedule}{parts}}}"


@dataclass(frozen=True, slots=True)
class AttemptsValidation:
    """A run with failures, simulated against measured.

    Args:
        categories: Where its time went; all together, the time of the job.
        simulated_steps: First and last step of each attempt, the last one excluded.
        measured_steps: The same.
        recovery: Parts of the measured recoveries; None if nothing failed.
        simulated_absences: Rank, first and last step of each stretch of steps that count without it.
        measured_absences: The same.
    """

    categories: tuple[CategoryTime, ...]
    simulated_steps: tuple[tuple[int, int], ...]
    measured_steps: tuple[tuple[int, int], ...]
    recovery: MeasuredRecovery | None
    simulated_absences: tuple[tuple[int, int, int], ...] = ()
    measured_absences: tuple[tuple[int, int, int], ...] = ()

    @property
    def simulated_s(self) -> float:
        """Time of the job, simulated."""
        return math.fsum(each.simulated_s for each in self.categories)

    @property
    def measured_s(self) -> float:
        """Time of the job, measured."""
        return math.fsum(each.measured_s for each in self.categories)

    @property
    def error(self) -> float:
        """Error of the time of the job."""
        return statistics.relative_error(self.simulated_s, self.measured_s)

    def document(self) -> dict[str, object]:
        """Return it as JSON.

        Columns:
            simulated_s, measured_s, error (float): Time of the job, from the start of its processes to its end.
            categories (list): "Where the time of a run with failures went".
            simulated_steps, measured_steps (list): First step of each attempt, and the step at which it ended.
            simulated_repeated, measured_repeated (int): Steps that were done again.
            recovery (object or null): Mean `detect_s`, `timeout_s`, `schedule_s`, `start_s`, `connect_s`, `load_s` and
                `warm_up_s` of the measured recoveries.
            simulated_absences, measured_absences (list): Only if ranks went on without others: rank, first step without
                it, and the step at which it was back or the job ended.
        """
        absences = {"simulated_absences": self.simulated_absences, "measured_absences": self.measured_absences}
        return {
            "simulated_s": self.simulated_s,
            "measured_s": self.measured_s,
            "error": self.error,
            "categories": [asdict(each) for each in self.categories],
            "simulated_steps": self.simulated_steps,
            "measured_steps": self.measured_steps,
            "simulated_repeated": n_repeated(self.simulated_steps),
            "measured_repeated": n_repeated(self.measured_steps),
            "recovery": None if self.recovery is None else asdict(self.recovery),
            **(absences if self.simulated_absences or self.measured_absences else {}),
        }

    def text(self) -> Iterator[str]:
        """Yield the paragraphs that say the same."""
        both = f"simulated {format_seconds(self.simulated_s)}, measured {format_seconds(self.measured_s)}"
        yield f"with failures: {both}, error {format_error(self.error)}"
        simulated, measured = map(_steps_text, (self.simulated_steps, self.measured_steps))
        same = simulated == measured
        yield f"attempts: {measured}" if same else f"attempts: simulated {simulated}; measured {measured}"
        if self.simulated_absences or self.measured_absences:
            simulated, measured = map(_absences_text, (self.simulated_absences, self.measured_absences))
            yield f"absent: simulated {simulated}; measured {measured}"
        yield table_text(
            "where the time of the whole job goes",
            _COLUMNS,
            [asdict(each) for each in self.categories],
        )
        if self.recovery:
            yield f"measured, for the scenarios of other runs: {self.recovery.text()}"


def n_repeated(steps: Sequence[Sequence[int]]) -> int:
    """Return how many steps attempts have done again, from the first and last step of each."""
    return sum(last for _, last in steps) - sum(first for first, _ in steps) - max(last for _, last in steps)


def validate_attempts(
    run: RunDirectory, scenario: Scenario, simulated: Trace, real: Trace
) -> AttemptsValidation | None:
    """Compare the attempts of a run; None if it has no failures, or was measured without.

    Args:
        run: The run.
        scenario: Its scenario, with the machines that were simulated.
        simulated: The simulated trace.
        real: The measured trace of all attempts together.

    Raises:
        TraceError: A file of an attempt is damaged.
    """
    path = run.path / ATTEMPTS
    if scenario.failures is None or not path.exists():
        return None
    log = AttemptLog.load(path)
    if log.run != real.run:
        return None
    suffered = suffer_run(scenario, simulated)
    measured = _measured(run, log, real)
    categories = [
        CategoryTime(name, seconds, measured.seconds.get(name, 0.0))
        for name, seconds in _in_categories(suffered).items()
        if seconds or measured.seconds.get(name)
    ]
    steps = tuple((each.first_step, each.last_step) for each in suffered.attempts)
    return AttemptsValidation(
        tuple(categories),
        steps,
        measured.steps,
        measured.recovery,
        tuple((each.replica, each.first_step, each.last_step) for each in suffered.goodput.absences),
        tuple((each.rank, each.first_step, _last_step(each, run)) for each in log.absences),
    )


def _in_categories(suffered: SufferedRun) -> dict[Category, float]:
    """Return the simulated seconds by category, as far as they can be measured."""
    seconds = dict(suffered.goodput.seconds)
    seconds["productive"] += seconds.pop("step_time_deviation")
    return seconds


@dataclass(frozen=True, slots=True)
class _MeasuredJob:
    seconds: dict[Category, float]
    steps: tuple[tuple[int, int], ...]
    recovery: MeasuredRecovery | None


@dataclass(frozen=True, slots=True)
class _Failed:
    """The end of an attempt: when, at which step, and what ended it; None for the end of the job."""

    at_s: float
    step: int
    failure: StepFailure | None


def _measured(run: RunDirectory, log: AttemptLog, real: Trace) -> _MeasuredJob:
    attempts = log.attempts
    ends = [_end_of(number, run, log) for number in range(len(attempts))]
    seconds: dict[Category, float] = dict.fromkeys(
        (
            "productive",
            "absent_replicas",
            "checkpoint_save",
            "checkpoint_restore",
            "program_startup",
            "initialization",
            "training_preparation",
            "infrastructure_recovery",
            "wasted_progress",
        ),
        0.0,
    )
    for number, (attempt, end) in enumerate(zip(attempts, ends, strict=True)):
        began_s = attempt.connected_s if attempt.began_s is None else attempt.began_s
        seconds["program_startup"] += attempt.started_s - attempt.launched_s
        seconds["initialization"] += attempt.connected_s - attempt.started_s
        seconds["checkpoint_restore"] += attempt.load_s
        seconds["training_preparation"] += began_s - attempt.connected_s - attempt.load_s
        if number + 1 < len(attempts):
            seconds["infrastructure_recovery"] += attempts[number + 1].launched_s - end.at_s
        kept = min([later.first_step for later in attempts[number + 1 :]], default=run.plan.n_steps)
        times = _times_of(number, run, real, is_last=attempt.ended_s is not None)
        paused_s = math.fsum(each.length_s for each in log.pauses if began_s <= each.begin_s < end.at_s)
        kept_s = 0.0
        if times is not None and kept > attempt.first_step:
            kept_s = (
                times.begin_s(kept, attempt.first_step) if attempt.ended_s is None else end.at_s - began_s - paused_s
            )
            saved_s = times.stalls_s(attempt.first_step, kept)
            if attempt.ended_s is not None:  # the job ends with its last file
                saved_s += real.makespan_s - float(times.begin_next_s[-1])
            share = _share_absent(run, log, times, attempt.first_step, kept) if log.absences else 0.0
            seconds["checkpoint_save"] += saved_s
            seconds["productive"] += (kept_s - saved_s) * (1 - share)
            seconds["absent_replicas"] += (kept_s - saved_s) * share
        for pause in log.pauses:
            if began_s <= pause.begin_s < end.at_s:
                seconds["infrastructure_recovery"] += pause.waiting_s
                seconds["initialization"] += pause.connect_s
                seconds["checkpoint_restore"] += pause.load_s
        seconds["wasted_progress"] += end.at_s - began_s - kept_s - paused_s
    steps = tuple((attempt.first_step, end.step) for attempt, end in zip(attempts, ends, strict=True))
    return _MeasuredJob(seconds, steps, _recovery(run, log, ends))


def _last_step(absence: Absence, run: RunDirectory) -> int:
    """Return the step at which a rank was back, or the job ended."""
    return run.plan.n_steps if absence.last_step is None else absence.last_step


def _share_absent(run: RunDirectory, log: AttemptLog, times: TimesOfSteps, first_step: int, last_step: int) -> float:
    """Return which share of the time of some steps, of all ranks together, ranks were absent for."""
    begins_s = np.concatenate([[0.0], times.begin_next_s[:-1]])
    steps_s = np.nan_to_num(times.end_s - begins_s)
    absent = np.zeros(run.plan.n_steps)
    for each in log.absences:
        absent[each.first_step : _last_step(each, run)] += 1 / run.plan.world_size
    kept = slice(first_step, last_step)
    return float((steps_s * absent)[kept].sum() / steps_s[kept].sum())


def _end_of(number: int, run: RunDirectory, log: AttemptLog) -> _Failed:
    """Return when an attempt ended: as noted or, if nothing was, with the last operation of its trace."""
    attempt = log.attempts[number]
    if attempt.ended_s is not None:
        return _Failed(attempt.ended_s, run.plan.n_steps, None)
    next_s = log.attempts[number + 1].launched_s
    for met in log.met:
        failure = run.failures[met.number]
        if failure.ends_attempt and attempt.launched_s <= met.at_s < next_s:
            return _Failed(met.at_s, met.step, failure)
    times = _times_of(number, run, None, is_last=False)
    if times is None or attempt.began_s is None:
        return _Failed(attempt.began_s or next_s, attempt.first_step, None)
    done = [step for step in range(run.plan.n_steps) if times.end_s[step] == times.end_s[step]]
    last = max(done, default=attempt.first_step - 1)
    return _Failed(attempt.began_s + times.begin_s(last + 1, attempt.first_step), last + 1, None)


def _times_of(number: int, run: RunDirectory, real: Trace | None, *, is_last: bool) -> TimesOfSteps | None:
    """Return the times of an attempt's steps; None if it has left no trace."""
    path = run.path / attempt_trace_name(number)
    if is_last:
        assert real is not None
        return times_of_steps(real)
    return times_of_steps(read_trace(path, plan=run.plan)) if path.exists() else None


def _recovery(run: RunDirectory, log: AttemptLog, ends: Sequence[_Failed]) -> MeasuredRecovery | None:
    """Return the mean parts of the recoveries; None if there are none.

    Where others go on, what a rank takes to start counts from the moment when these know that it is gone.
    """
    later = log.attempts[1:]
    if not later and not log.absences:
        return None
    found = [(after.launched_s - end.at_s, end.failure) for end, after in zip(ends, later, strict=False)]
    hangs = [seconds for seconds, failure in found if failure and failure.kind == "hang"]
    deaths = [seconds for seconds, failure in found if failure and failure.kind == "gone"]
    losses = [seconds for seconds, failure in found if failure and failure.kind == "lost"]
    starts = [each.started_s - each.launched_s for each in later]
    deaths_of_lost: list[float] = []  # these close no connection, so that a time-out finds them
    starts_of_lost: list[float] = []
    found_after_s = {"hang": hangs, "gone": deaths, "lost": deaths_of_lost}
    for met, absence in _noticed(run, log):
        kind = run.failures[met.number].kind
        if kind in found_after_s:
            found_after_s[kind].append(absence.noticed_s - met.at_s)
        if absence.started_s is not None:
            began_after_s = max(0.0, absence.started_s - absence.noticed_s)
            (starts_of_lost if kind == "lost" else starts).append(began_after_s)
    detect_s = _mean(deaths or deaths_of_lost)
    start_s = _mean(starts) or 0.0
    beyond_s = [each - (detect_s or 0.0) for each in losses] + [each - start_s for each in starts_of_lost]
    schedule_s = _mean(beyond_s)
    meetings = [each.connected_s - each.started_s for each in later] + [each.connect_s for each in log.pauses]
    loads = [each.load_s for each in later] + [each.load_s for each in log.pauses if each.load_s]
    warm_ups = [(each.began_s or each.connected_s) - each.connected_s - each.load_s for each in later]
    warm_ups += [each.ready_s - each.started_s for each in log.absences if each.ready_s and each.started_s]
    return MeasuredRecovery(
        detect_s=detect_s,
        timeout_s=_mean(hangs),
        schedule_s=None if schedule_s is None else max(0.0, schedule_s),
        start_s=start_s,
        connect_s=_mean(meetings) or 0.0,
        load_s=_mean(loads) or 0.0,
        warm_up_s=_mean(warm_ups) or 0.0,
    )


def _noticed(run: RunDirectory, log: AttemptLog) -> Iterator[tuple[MetFailure, Absence]]:
    """Yield each failure that others went on after, with the absence of each of its ranks."""
    for met in log.met:
        failure = run.failures[met.number]
        for rank in failure.ranks if failure.others_go_on else ():
            later = [each for each in log.absences if each.rank == rank and each.noticed_s > met.at_s]
            yield from ((met, each) for each in later[:1])


def _mean(seconds: Sequence[float]) -> float | None:
    return math.fsum(seconds) / len(seconds) if seconds else None


def _steps_text(steps: Sequence[Sequence[int]]) -> str:
    text = ", ".join(f"{first} to {last}" for first, last in steps)
    return f"{len(steps)}, steps {text}; {n_repeated(steps)} steps repeated"


def _absences_text(absences: Sequence[tuple[int, int, int]]) -> str:
    return ", ".join(f"rank {rank} in steps {first} to {last}" for rank, first, last in absences) or "nobody"
