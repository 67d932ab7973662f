"""One schedule that suffers failures: its steady pace, its goodput with many seeds, its best checkpoint interval.

The steady pace comes from the engines: steps with stragglers and without, data stalls, and what a checkpoint costs.
`simdist.runs.attempts` makes months of it. All schedules and policies meet the same failures of the same seeds.

    trained per second   steps that count x share of their samples / time of the job
    Young                sqrt(2 x time between failures x stall of a checkpoint)

Source:
    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17, 1974.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simdist.errors import UnsupportedError
from simdist.plan.ops import Destination
from simdist.runs.attempts import CATEGORIES, Goodput, LongJob, attempts
from simdist.runs.building import in_steps, job
from simdist.runs.checkpoint_costs import CheckpointCosts, checkpoint_costs
from simdist.runs.checkpointed_steps import Checkpoints, Survives
from simdist.runs.failing_job import job_of
from simdist.runs.recovery import Category
from simdist.scenario.failures import FailureCause, Failures, OnFailure
from simdist.scenario.sampling import run_seeds
from simdist.scenario.scenario import Scenario
from simdist.schedules import Schedule
from simdist.settings.base import unchecked_copy
from simdist.studies.statistics import Samples


class StepTimesOfSeeds(Protocol):
    """What a whole job takes from `simdist.studies.measuring.ScheduleTimes`, which has the same attributes."""

    @property
    def step_s(self) -> Samples:
        """Seconds per step of each seed."""
        ...

    @property
    def states_s(self) -> Mapping[str, Samples]:
        """Seconds per step in each state."""
        ...

    @property
    def drawn(self) -> Mapping[str, Samples]:
        """The same under draws."""
        ...


class StepsIn(Protocol):
    """Simulates the steps of a schedule in another scenario, with the same seeds."""

    def __call__(self, scenario: Scenario, /, *, draws: bool = False) -> StepTimesOfSeeds:
        """Return its times.

        Args:
            scenario: The other scenario.
            draws: Whether to simulate it also under draws of what is uncertain.
        """
        ...


_SURVIVES: dict[Destination, Survives] = {"storage": "all", "peer": "node", "disk": "process"}
_LOSING = ("process", "node", "hang", "slow", "corruption")  # effects that end an attempt
_MOST_FAILURES = 1_000_000  # of a job: 100,000 GPUs that fail every year meet 25,000 in three months
_ENOUGH_FAILURES = 1000  # in all seeds of a search together
_TIMES_FOUND = 10.0  # that a shorter job lasts as long as anything takes to be found
_LEAST_SEEDS = 2
_MOST_SEEDS = 200
_FIRST_FACTOR = 2.0  # between intervals that a search tries
_LAST_FACTOR = 1.15


@dataclass(frozen=True, slots=True)
class SteadySchedule:
    """How a schedule trains while nothing fails.

    Args:
        label: Of the schedule.
        job: Step times, length, machines and files.
        loading: Share of calm steps in which ranks wait for data.
        costs: Of one checkpoint; None if none are written.
        period: Steps of a period; checkpoints lie whole periods apart.
        drawn: Step times under draws, as `simdist.studies.measuring.ScheduleTimes` has them.
    """

    label: str
    job: LongJob
    loading: float
    costs: CheckpointCosts | None
    period: int
    drawn: Mapping[str, Samples] = field(default_factory=dict)

    def with_interval(self, n_steps: int) -> "SteadySchedule":
        """Return the same with checkpoints so many steps apart."""
        files = self.job.checkpoints
        assert files is not None
        return replace(self, job=replace(self.job, checkpoints=replace(files, every_steps=n_steps)))


@dataclass(frozen=True, slots=True)
class Suffered:
    """A schedule after failures, with many seeds.

    Args:
        outcomes: Of each seed.
        seconds: By category, of each seed, `[n_seeds]`.
        total_s: Time of the job, `[n_seeds]`.
    """

    outcomes: tuple[Goodput, ...]
    seconds: dict[Category, NDArray[np.float64]]
    total_s: NDArray[np.float64]

    @property
    def goodput(self) -> NDArray[np.float64]:
        """Share of the time that trains at the pace of calm steps, without data stalls, `[n_seeds]`."""
        return np.asarray(self.seconds["productive"] / self.total_s)

    @property
    def ettr(self) -> NDArray[np.float64]:
        """Effective training time ratio, `[n_seeds]`, see `simdist.runs.attempts.Goodput.ettr`."""
        return np.array([each.ettr for each in self.outcomes])

    @property
    def trained_per_s(self) -> NDArray[np.float64]:
        """Steps that count, weighed with the share of their samples, per second of the job, `[n_seeds]`."""
        return np.array([each.n_steps * each.n_samples_share for each in self.outcomes]) / self.total_s

    def mean(self, of: Callable[[Goodput], float]) -> float:
        """Return the mean of a number over seeds."""
        return float(np.mean([of(each) for each in self.outcomes]))


def steady(scenario: Scenario, schedule: Schedule, steps_in: StepsIn, *, draws: bool = False) -> SteadySchedule:
    """Return how a schedule of a scenario with failures trains while nothing fails.

    Args:
        scenario: The scenario.
        schedule: One of its schedules.
        steps_in: See `StepsIn`.
        draws: Whether its steps are also simulated under draws of what is uncertain.

    Raises:
        ScenarioError: It has no `failures`, or no `train_for`.
        PlanError: The schedule does not fit the cluster.
    """
    plain = unchecked_copy(scenario, checkpoint=None, failures=None)
    times = steps_in(plain, draws=draws)
    calm = times
    if plain.disturbances or plain.background or plain.actors:
        calm = steps_in(unchecked_copy(plain, disturbances=(), background=(), actors=()))
    step_s = float(times.step_s.mean())
    calm_step_s = float(calm.step_s.mean())
    costs = checkpoint_costs(scenario, schedule)
    suffering = job_of(
        scenario,
        schedule,
        step_s=step_s,
        calm_step_s=min(calm_step_s, step_s),
        checkpoints=None if costs is None else _checkpoints(scenario, schedule, costs),
    )
    return SteadySchedule(
        schedule.name,
        suffering,
        float(calm.states_s["io"].mean()) / calm_step_s,
        costs,
        len(schedule.cycle(job(plain))),
        times.drawn,
    )


def _checkpoints(scenario: Scenario, schedule: Schedule, costs: CheckpointCosts) -> Checkpoints:
    """Return the files of a schedule."""
    settings = in_steps(scenario, schedule).checkpoint
    assert settings is not None
    assert isinstance(settings.every, int)
    return Checkpoints(
        every_steps=settings.every,
        stall_s=costs.stall_s,
        write_s=max(0.0, costs.usable_s - costs.stall_s),
        load_s=costs.load_s,
        keep=settings.keep,
        survives=_SURVIVES[settings.to],
    )


def suffer(failures: Failures, trained: SteadySchedule, seeds: Sequence[int]) -> Suffered:
    """Let a schedule suffer the failures of some seeds.

    Raises:
        PlanError: The policy does not fit the schedule.
        UnsupportedError: More failures are expected than can be simulated.
    """
    _check_number(failures, trained.job)
    outcomes = tuple(attempts(failures, trained.job, seed=seed) for seed in seeds)
    seconds = {each: np.array([found.seconds[each] for found in outcomes]) for each in CATEGORIES}
    loading_s = seconds["productive"] * trained.loading
    seconds["data_loading"] = seconds["data_loading"] + loading_s
    seconds["productive"] = seconds["productive"] - loading_s
    return Suffered(outcomes, seconds, np.array([found.total_s for found in outcomes]))


def _check_number(failures: Failures, suffering: LongJob) -> None:
    """Refuse rates that are surely a mistake, and would take hours to simulate."""
    per_s = _per_s(suffering, failures.causes)
    n_failures = _length_s(suffering) * per_s
    if n_failures > _MOST_FAILURES:
        raise UnsupportedError(
            f"failures.causes: {n_failures:,.0f} failures are expected in this job, at most {_MOST_FAILURES:,} are "
            f"simulated: a rate counts for each component; check rate and of, or write a shorter train_for"
        )


def _per_s(suffering: LongJob, causes: Iterable[FailureCause]) -> float:
    """Return how often causes strike the job, recorded failures excepted."""
    return math.fsum(each.per_s(suffering.n_nodes, suffering.gpus_per_node) for each in causes)


def _length_s(suffering: LongJob) -> float:
    """Return the time that the job takes if nothing fails."""
    return suffering.horizon_s or (suffering.n_steps or 0) * suffering.step_s


def time_between_failures_s(failures: Failures, suffering: LongJob) -> float:
    """Return the mean time between failures of the job that end an attempt; infinite if none has a rate.

    Corruption ends one if it is found before the job is over.
    """
    losing = [each for each in failures.causes if each.effect in _LOSING]
    length_s = _length_s(suffering)
    late_s = {each.cause: each.found_after_s or 0.0 for each in losing if each.effect == "corruption"}
    per_s = math.fsum(
        _per_s(suffering, [each]) * max(0.0, 1.0 - late_s.get(each.cause, 0.0) / length_s) for each in losing
    )
    return 1 / per_s if per_s else math.inf


def young_s(failures: Failures, trained: SteadySchedule) -> float | None:
    """Return Young's interval of training between checkpoints, seconds; None without rates or without a stall."""
    between_s = time_between_failures_s(failures, trained.job)
    if trained.costs is None or not trained.costs.stall_s or math.isinf(between_s):
        return None
    return math.sqrt(2 * between_s * trained.costs.stall_s)


def for_search(
    scenario: Scenario, failures: Failures, trained: SteadySchedule, *, n_failures: int = _ENOUGH_FAILURES
) -> tuple[SteadySchedule, list[int]]:
    """Return a job and seeds that meet enough failures for a search: a shorter job, or more seeds.

    Args:
        scenario: The scenario.
        failures: What the job suffers.
        trained: The whole job.
        n_failures: Failures that all seeds together meet.
    """
    length_s = _length_s(trained.job)
    n_met = length_s / time_between_failures_s(failures, trained.job)
    if not n_met:
        return trained, run_seeds(scenario.seed, _LEAST_SEEDS)
    found_s = max((each.found_after_s or 0.0 for each in failures.causes), default=0.0)
    part = max(n_failures / _LEAST_SEEDS / n_met, _TIMES_FOUND * found_s / length_s)
    n_seeds = max(_LEAST_SEEDS, math.ceil(min(n_failures / n_met, _MOST_SEEDS)))
    if part < 1:
        horizon_s = trained.job.horizon_s
        n_steps = trained.job.n_steps
        shorter = replace(
            trained.job,
            horizon_s=None if horizon_s is None else horizon_s * part,
            n_steps=None if n_steps is None else math.ceil(n_steps * part),
        )
        trained = replace(trained, job=shorter)
    return trained, run_seeds(scenario.seed, n_seeds)


def best_interval(failures: Failures, trained: SteadySchedule, seeds: Sequence[int]) -> int | None:
    """Return the steps between checkpoints with which most is trained per second; None without files or rates.

    The search begins at Young's interval, in whole periods. It goes to half of an interval or to its double while that
    trains more, and then on by smaller factors. All intervals meet the same failures.
    """
    of_young_s = young_s(failures, trained)
    if of_young_s is None:
        return None
    tried: dict[int, float] = {}

    def trained_with(n_periods: int) -> float:
        if n_periods not in tried:
            found = suffer(failures, trained.with_interval(n_periods * trained.period), seeds)
            tried[n_periods] = float(found.trained_per_s.mean())
        return tried[n_periods]

    best = max(1, round(of_young_s / (trained.job.step_s * trained.period)))
    factor = _FIRST_FACTOR
    while factor >= _LAST_FACTOR:
        others = (max(1, round(best / factor)), round(best * factor))
        better = max((best, *others), key=trained_with)
        factor = math.sqrt(factor) if better == best else factor
        best = better
    return best * trained.period


def scaled(failures: Failures, factor: float) -> Failures:
    """Return failures whose rates are multiplied by a factor; recorded ones stay."""
    return unchecked_copy(failures, causes=tuple(each.scaled(factor) for each in failures.causes))


def policies(failures: Failures) -> list[OnFailure]:
    """Return the policies that are compared unless the user says: the scenario's and, beside it, restart."""
    return [*dict.fromkeys((failures.on_failure, "restart"))]


def under(failures: Failures, policy: OnFailure) -> Failures:
    """Return failures with another policy, which has no part of the step times that the scenario's own takes more."""
    if policy == failures.on_failure:
        return failures
    spares = 0 if policy == "restart" else failures.spares
    return unchecked_copy(failures, on_failure=policy, spares=spares, step_factor=1.0)
