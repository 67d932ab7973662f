"""Evaluate candidates: build the plan, check the constraints, and simulate. Then simulate the finalists again.

A candidate is not simulated if a lower bound of its time shows that it would be no finalist. The finalists stay the
same.

All candidates meet the same delays of the same seeds, starting with the scenario's own. The best of the search are
simulated again with seeds that the search has not seen: those of a study that begins with the next one. The smallest of
many noisy numbers is too small. The first numbers select the finalists, but the reported results do not depend on them.

A confidence interval is that of the mean over seeds. It is the error of the simulation, which more seeds reduce. If
recordings are resampled, it expresses the uncertainty of the recording, which more seeds do not reduce. Deviations of
single runs then count; see `simdist.studies.resampling`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from simdist.errors import UnsupportedError
from simdist.plan import Plan
from simdist.plan.check import check
from simdist.runs.building import Built, build, job, price_of
from simdist.runs.failing_job import check_failures_fit
from simdist.scenario import Scenario
from simdist.scenario.checkpoint import CheckpointSettings
from simdist.scenario.failures import Failures
from simdist.schedules import Schedule
from simdist.studies import measuring
from simdist.studies.comparison import Row, row, with_ranges
from simdist.studies.measuring import ScheduleTimes
from simdist.studies.resampling import Runs
from simdist.studies.statistics import widened
from simdist.tuning.candidates import Candidate
from simdist.tuning.constraints import Breach, Constraints, Facts, broken, facts, with_memory, worst
from simdist.tuning.space import in_scenario, refusal_text

#: Returns the seconds per step, or per micro-batch, of a schedule of a scenario, `[n_seeds]`.
_Time: TypeAlias = Callable[[Scenario, Built], NDArray[np.float64]]
#: Returns a lower bound of these seconds.
_Bound: TypeAlias = Callable[[Scenario, Built], float]
#: Simulates a schedule of a scenario.
_Measure: TypeAlias = Callable[[Scenario, Built], ScheduleTimes]

_N_FASTEST = 3
_AS_FAST = 1.005  # times the fastest step: a difference below noise, and no reason to change more settings


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A simulated candidate.

    Args:
        candidate: The candidate; None is the baseline.
        schedule: Its schedule.
        facts: Facts from its plan.
        times_s: Seconds per step, or per micro-batch, of each seed of the search, `[n_seeds]`.
    """

    candidate: Candidate | None
    schedule: Schedule
    facts: Facts
    times_s: NDArray[np.float64]

    def scenario(self, runs: Runs) -> Scenario:
        """Return the scenario in which it is simulated."""
        return runs.scenario_for(self.schedule, self.candidate.in_scenario(runs.scenario) if self.candidate else None)

    @property
    def step_s(self) -> float:
        """Seconds per step, or per micro-batch, averaged over seeds; those that differ by rounding are equal."""
        return float(f"{self.times_s.mean():.12g}")


@dataclass(frozen=True, slots=True)
class TooSlow:
    """A candidate that is not simulated, because it would be no finalist.

    Args:
        candidate: The candidate.
        step_s: Seconds per step, or per micro-batch, that it takes at least.
    """

    candidate: Candidate
    step_s: float


@dataclass(frozen=True, slots=True)
class _Priced:
    """A legal candidate before a simulation."""

    scenario: Scenario
    built: Built
    facts: Facts
    least_s: float


@final
class Evaluator:
    """Evaluates candidates and counts them. Equal plans are simulated once, and those that take the same course."""

    def __init__(
        self,
        runs: Runs,
        constraints: Constraints,
        time: _Time,
        bounds: Sequence[_Bound] = (),
        failures: Failures | None = None,
    ) -> None:
        """Set up without evaluating anything.

        Args:
            runs: The scenario to simulate, and the number of steps.
            constraints: A schedule that breaks one of them is not simulated.
            time: Simulates a schedule.
            bounds: Return lower bounds of these times; those that are less work first.
            failures: A schedule that does not fit what the job does about them is illegal.
        """
        self._runs = runs
        self._constraints = constraints
        self._time = time
        self._bounds = bounds
        self._failures = failures
        self._priced: dict[Candidate, _Priced | None] = {}  # those that are not evaluated yet
        self._of_plan: dict[tuple[object, ...], Evaluated | TooSlow] = {}
        self._of_course: dict[tuple[object, ...], Evaluated] = {}
        self._ranked: set[tuple[str, float, float]] = set()  # kind, global gap and seconds of those that may be chosen
        self._broken: list[tuple[float, Candidate]] = []  # and how far beyond a limit they are at least
        self.excluded: Counter[str] = Counter()
        self._illegal: Counter[str] = Counter()  # by the reason

    @property
    def n_illegal(self) -> int:
        """Number of candidates that cannot be planned."""
        return self._illegal.total()

    @property
    def refusal(self) -> str:
        """The first reason for which a candidate was illegal; empty without one."""
        return next(iter(self._illegal), "")

    @property
    def n_passed_over(self) -> int:
        """Number of candidates with a known bound that will not be simulated."""
        return sum(not (each and self._may_be_chosen(each)) for each in self._priced.values())

    def baseline(self, schedule: Schedule) -> Evaluated:
        """Simulate the schedule that others are compared with, even if it breaks constraints.

        Raises:
            PlanError: It does not fit the cluster.
        """
        scenario = self._runs.scenario_for(schedule)
        self._check_failures(scenario, schedule)
        built = build(scenario, schedule)
        found = facts(scenario, built, within=self._constraints)
        return self._simulate(None, scenario, built, with_memory(scenario, built, found, self._constraints))

    def least_s(self, candidate: Candidate) -> float:
        """Return seconds that a candidate takes at least; inf if it is illegal or breaks a limit but that of memory.

        Its plan is kept until it is evaluated.
        """
        if candidate not in self._priced:
            self._priced[candidate] = self._price(candidate)
        priced = self._priced[candidate]
        return priced.least_s if priced else math.inf

    def evaluate(self, candidate: Candidate) -> Evaluated | TooSlow | None:
        """Simulate a candidate, once per plan. Return None if it is illegal or breaks a constraint."""
        priced = self._priced.pop(candidate) if candidate in self._priced else self._price(candidate)
        if priced is None:
            return None
        content = _content(priced.built.plan)
        known = self._of_plan.get(content)
        if known is None:
            known = self._measured(candidate, priced)
        elif isinstance(known, Evaluated) and self._excludes(candidate, known.facts):
            return None
        if isinstance(known, Evaluated):
            self._ranked.add((known.schedule.kind, known.facts.global_gap, known.step_s))
        return known

    def _check_failures(self, scenario: Scenario, schedule: Schedule) -> None:
        if self._failures is not None:
            check_failures_fit(self._failures, schedule, scenario.cluster.world_size)

    def _price(self, candidate: Candidate) -> _Priced | None:
        """Return a candidate's prices and facts. Return None if it is illegal, or breaks a limit but that of memory."""
        try:
            scenario, schedule, plan = self._written(candidate)
            self._check_failures(scenario, schedule)
            built = _checked(scenario, schedule, plan)
        except ValueError as error:  # PlanError is one
            self._illegal[refusal_text(error)] += 1
            return None
        found = facts(scenario, built, within=self._constraints)
        if self._excludes(candidate, found):
            return None
        least_s = self._bounds[0](scenario, built) if self._bounds else 0.0
        return _Priced(scenario, built, found, least_s)

    def _measured(self, candidate: Candidate, priced: _Priced) -> Evaluated | TooSlow | None:
        """Simulate a candidate if it may be a finalist. Return None if it breaks the limit of memory."""
        scenario = priced.scenario
        built = priced.built
        for bound in self._bounds[1:]:
            if self._may_be_chosen(priced):
                priced = replace(priced, least_s=max(priced.least_s, bound(scenario, built)))
        if not self._may_be_chosen(priced):
            too_slow = TooSlow(candidate, priced.least_s)
            self._of_plan[_content(built.plan)] = too_slow
            return too_slow
        found = with_memory(scenario, built, priced.facts, self._constraints)
        if self._excludes(candidate, found):
            return None
        course = _course(scenario, built, found)
        twin = self._of_course.get(course) if course else None
        evaluated = self._simulate(candidate, scenario, built, found, times_s=twin.times_s if twin else None)
        if course:
            self._of_course.setdefault(course, evaluated)
        return evaluated

    def _may_be_chosen(self, priced: _Priced) -> bool:
        """Tell whether a candidate may be a finalist, given those that are surely faster; see `finalists`."""
        kind = priced.built.schedule.kind
        gap = priced.facts.global_gap
        faster = [each for each in self._ranked if each[2] < priced.least_s]
        return (
            len(faster) < _N_FASTEST
            or all(of_kind != kind for of_kind, _, _ in faster)
            or all(of_gap > gap for _, of_gap, _ in faster)
        )

    def nearest(self, excluded: Sequence[tuple[float, Candidate]] = ()) -> Evaluated | None:
        """Simulate the candidate that exceeds a constraint least. Return None if there is none.

        Args:
            excluded: Further candidates, with how many times a constraint they need at least.
        """
        best: tuple[float, Candidate, Scenario, Built, Facts] | None = None
        for least, candidate in sorted((*self._broken, *excluded), key=lambda each: each[0]):
            if best and least >= best[0]:
                break
            scenario, schedule, plan = self._written(candidate)
            built = _checked(scenario, schedule, plan)
            found = facts(scenario, built)
            excess = worst(broken(found, self._constraints)).excess
            if best is None or excess < best[0]:
                best = excess, candidate, scenario, built, found
        if best is None:
            return None
        _, candidate, scenario, built, found = best
        known = self._of_plan.get(_content(built.plan))
        return known if isinstance(known, Evaluated) else self._simulate(candidate, scenario, built, found)

    def _written(self, candidate: Candidate) -> tuple[Scenario, Schedule, Plan]:
        """Return a candidate's scenario, schedule and plan."""
        schedule = in_scenario(candidate, self._runs.scenario)
        scenario = self._runs.scenario_for(schedule, candidate.in_scenario(self._runs.scenario))
        return scenario, schedule, schedule.plan(job(scenario))

    def _excludes(self, candidate: Candidate, found: Facts) -> bool:
        """Tell whether a candidate breaks a constraint, and count it. The plan may be that of a baseline that does."""
        breaches = broken(found, self._constraints)
        if breaches:
            self.excluded.update(each.limit for each in breaches)
            self._broken.append((worst(breaches).excess, candidate))
        return bool(breaches)

    def _simulate(
        self,
        candidate: Candidate | None,
        scenario: Scenario,
        built: Built,
        found: Facts,
        times_s: NDArray[np.float64] | None = None,
    ) -> Evaluated:
        times_s = self._time(scenario, built) if times_s is None else times_s
        evaluated = Evaluated(candidate, built.schedule, found, times_s)
        self._of_plan[_content(built.plan)] = evaluated
        return evaluated


def _course(scenario: Scenario, built: Built, found: Facts) -> tuple[object, ...] | None:
    """Return what tells schedules apart that shard the model and meet random delays; None of all others.

    These are what each step exchanges, the path of the input, and the time of an undisturbed step. Schedules that agree
    in all of them differ in what no step shows, such as units that are gathered earlier than they are needed.
    """
    schedule = built.schedule
    if not (schedule.shards and scenario.is_random) or scenario.has_links or built.plan.dataset:
        return None
    try:
        calm_s = measuring.calm_step_s(built)
    except UnsupportedError:
        return None
    path = (schedule.run_ahead_steps, schedule.input)
    return schedule.kind, found.results, path, scenario.workload.micro_batches, scenario.checkpoint, f"{calm_s:.12g}"


def _checked(scenario: Scenario, schedule: Schedule, plan: Plan) -> Built:
    """Return a plan with its prices. A search proves only the plans that it shows."""
    check(plan)
    return Built(schedule, plan, price_of(plan, scenario), n_proved_ranks=0)


def _content(plan: Plan) -> tuple[object, ...]:
    """Return all of a plan but its name."""
    return plan.world_size, plan.buffers, plan.bodies, plan.order, plan.dataset


@dataclass(frozen=True)
class Finalist:
    """A schedule that was simulated again.

    Args:
        schedule: With its label.
        facts: Facts from its plan.
        breaches: The constraints that it breaks.
        row: Its line of the speed-up table, over the baseline, with fresh seeds.
        measured: The results behind the row.
        search_step_s: Seconds per step, or per micro-batch, with the seeds of the search.
        micro_batches: Micro-batches per step.
        checkpoint: The checkpoint that it writes, if any.
        is_baseline: Whether the others are compared with it.
        on_front: Whether it keeps to the constraints, and no other one that exchanges as often with all ranks is
            faster.
        problem: Why its row has no interval, although chance plays a part.
    """

    schedule: Schedule
    facts: Facts = field(repr=False)
    breaches: tuple[Breach, ...]
    row: Row
    measured: ScheduleTimes = field(repr=False)
    search_step_s: float
    micro_batches: int
    checkpoint: CheckpointSettings | None
    is_baseline: bool
    on_front: bool
    problem: str | None = None


def finalists(evaluated: Sequence[Evaluated], baseline: Schedule) -> list[Evaluated]:
    """Return the fastest three, the fastest of each kind, and the front of step time and global exchanges.

    Of those that take the same times and exchange as often, only the one nearest to the baseline counts.

    Args:
        evaluated: Different plans, including the baseline if it keeps to the constraints.
        baseline: The schedule that they are compared with.
    """
    ranked = _without_twins(sorted(evaluated, key=lambda each: each.step_s), baseline)
    of_kinds = {each.schedule.kind: each for each in reversed(ranked)}
    on_front = front([(each.facts.global_gap, each.step_s) for each in ranked])
    chosen = [*ranked[:_N_FASTEST], *of_kinds.values(), *(ranked[index] for index in on_front)]
    return sorted({id(each): each for each in chosen}.values(), key=lambda each: each.step_s)


def _without_twins(ranked: Iterable[Evaluated], baseline: Schedule) -> list[Evaluated]:
    found: dict[tuple[object, ...], Evaluated] = {}
    for each in ranked:
        key = (each.schedule.kind, each.facts.global_gap, each.step_s)
        other = found.get(key, each)
        found[key] = min(other, each, key=lambda one: _changes(one.schedule, baseline))
    return list(found.values())


def measure_finalists(
    runs: Runs, constraints: Constraints, baseline: Evaluated, others: Iterable[Evaluated], measure: _Measure
) -> list[Finalist]:
    """Simulate the baseline and the others again. Return them, the fastest first.

    Args:
        runs: Runs from a seed that the search has not seen.
        constraints: Limits that they may break.
        baseline: The schedule that the others are compared with.
        others: May include the baseline.
        measure: Simulates a plan for all fresh seeds.
    """
    each_once = [baseline, *(each for each in others if each is not baseline)]
    scenarios = [each.scenario(runs) for each in each_once]
    built = [build(its, each.schedule) for its, each in zip(scenarios, each_once, strict=True)]
    known = [facts(its, each) for its, each in zip(scenarios, built, strict=True)]
    breaches = [broken(each, constraints) for each in known]
    measured = [measure(its, each) for its, each in zip(scenarios, built, strict=True)]
    step_s = [float(each.step_s.mean()) for each in measured]
    scale = _in_order_s(runs.as_imported, baseline.schedule) / step_s[0] if runs.as_imported else 1.0
    kept = [index for index in range(len(each_once)) if not breaches[index]]
    on_front = [kept[index] for index in front([(known[each].global_gap, step_s[each]) for each in kept])]
    found = [
        Finalist(
            each.schedule,
            known[index],
            breaches[index],
            _row(runs, (each.schedule, measured[index]), (baseline.schedule, measured[0])).scaled(scale),
            measured[index],
            each.step_s,
            scenarios[index].workload.micro_batches,
            scenarios[index].checkpoint,
            is_baseline=each is baseline,
            on_front=index in on_front,
            problem=runs.problem(each.schedule) or runs.problem(baseline.schedule),
        )
        for index, each in enumerate(each_once)
    ]
    return sorted(found, key=lambda each: each.row.step_s)


def _row(runs: Runs, one: tuple[Schedule, ScheduleTimes], base: tuple[Schedule, ScheduleTimes]) -> Row:
    """Return the line of a schedule. Its intervals are those of the recording, if there is one."""
    found = row(one[1], base[1])
    if runs.problem(one[0]) or runs.problem(base[0]):
        return replace(row(replace(one[1], drawn={}), base[1]), step_s_ci95=None, speedup_ci95=None)
    return with_ranges(_with_chance(runs, found, one[0], base[0]), one[1], base[1])


def _in_order_s(scenario: Scenario, schedule: Schedule) -> float:
    """Return the seconds of a step with recorded delays in their recorded order."""
    return float(measuring.measure(scenario, build(scenario, schedule), n_seeds=1).step_s.mean())


def _with_chance(runs: Runs, found: Row, schedule: Schedule, base: Schedule) -> Row:
    """Return the line of a schedule with intervals that cover the recording and the error of an import."""
    if runs.recording is not None:
        factor = math.sqrt(found.seeds) * runs.widening(schedule, base)  # from a mean over seeds to a single run
        found = replace(
            found,
            step_s_ci95=widened(found.step_s, found.step_s_ci95, factor),
            speedup_ci95=widened(found.speedup, found.speedup_ci95, factor),
        )
    if schedule is base:  # as fast as itself, whatever the error
        return found
    return replace(found, speedup_ci95=runs.with_error(found.speedup, found.speedup_ci95))


def clearly_faster(runs: Runs, one: Finalist, other: Finalist) -> bool:
    """Tell whether the confidence interval of the ratio of step times, paired by seeds, is above 1."""
    if one.problem or other.problem:
        return False
    compared = _row(runs, (one.schedule, one.measured), (other.schedule, other.measured))
    return (compared.speedup_range or compared.speedup_ci95 or (compared.speedup,))[0] > 1


def chosen(runs: Runs, found: Sequence[Finalist], *, baseline: Schedule) -> Finalist:
    """Return the finalist that was fastest in the search, unless another is clearly faster with fresh seeds.

    Among equally fast ones, it is the one with the fewest changes. Schedules of the baseline's kind, which learn as
    much per step, come first.

    Args:
        runs: The runs of the finalists.
        found: The finalists, the fastest with fresh seeds first.
        baseline: The schedule that they are compared with.
    """
    least_s = min(each.search_step_s for each in found)
    as_fast = (each for each in found if each.search_step_s <= _AS_FAST * least_s)
    best = min(as_fast, key=lambda each: (*_changes(each.schedule, baseline), each.search_step_s))
    faster = (each for each in found if best.row.step_s > _AS_FAST * each.row.step_s)
    return next((each for each in faster if clearly_faster(runs, each, best)), best)


def _changes(schedule: Schedule, baseline: Schedule) -> tuple[bool, int]:
    """Return whether a schedule is of another kind, and the number of settings that differ."""
    ours, theirs = (each.model_dump(exclude={"label"}) for each in (schedule, baseline))
    return schedule.kind != baseline.kind, sum(value != theirs.get(name) for name, value in ours.items())


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the points that no other point beats: as small or smaller in both numbers, and smaller in one.

    Of equal points the first counts. The result is ordered by the first number, so the second number falls.

    >>> front([(1, 9.0), (2, 9.5), (4, 5.0), (8, 5.0), (8, 3.0)])
    [0, 2, 4]
    """
    found: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: (*points[index], index)):
        if not found or points[index][1] < points[found[-1]][1]:
            found.append(index)
    return found
