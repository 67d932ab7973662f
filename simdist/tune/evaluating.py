"""Evaluate candidates: build the plan, hold it to the constraints, and simulate what is left; then finalists again.

All candidates meet the same delays of the same seeds, those from the scenario's own on. The best of the search are
simulated again with seeds after those, which it has not seen: of many noisy numbers, the smallest is too small. Which
ones are simulated again was decided by those numbers; what is said about them does not depend on them.

An interval is of the mean over seeds: the error of the simulation, which more seeds make smaller. Where recordings are
resampled, it is what the recording can tell, which they do not: deviations of single runs count; see
`simdist.studies.resampling`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

from simdist.errors import PlanError
from simdist.runs.building import Built, build
from simdist.scenario import Scenario
from simdist.scenario.checkpoint import CheckpointSettings
from simdist.schedules import Schedule
from simdist.studies import comparison
from simdist.studies.comparison import Row, ScheduleTimes, row, with_ranges
from simdist.studies.resampling import Runs
from simdist.studies.statistics import widened
from simdist.tune.candidates import Candidate
from simdist.tune.constraints import Constraints, Facts, broken, facts
from simdist.tune.space import legal

#: Simulates a schedule of a scenario.
Measure: TypeAlias = Callable[[Scenario, Built], ScheduleTimes]

_N_FASTEST = 3
_AS_FAST = 1.005  # times the fastest step: less than chance, and no reason to change more


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A candidate that was simulated.

    Args:
        candidate: The candidate; None is the baseline.
        schedule: Its schedule.
        facts: Facts that its plan tells.
        measured: Results of the simulation with the seeds of the search.
    """

    candidate: Candidate | None
    schedule: Schedule
    facts: Facts
    measured: ScheduleTimes

    def scenario(self, runs: Runs) -> Scenario:
        """Return the scenario that it is simulated in."""
        return runs.scenario_for(self.schedule, self.candidate.in_scenario(runs.scenario) if self.candidate else None)

    @property
    def step_s(self) -> float:
        """Seconds per step, or per micro-batch, averaged over seeds."""
        return float(self.measured.step_s.mean())


@final
class Evaluator:
    """Evaluates candidates, equal plans once, and counts."""

    def __init__(self, runs: Runs, constraints: Constraints, measure: Measure) -> None:
        """Evaluate nothing yet.

        Args:
            runs: The scenario that is simulated, and how long.
            constraints: A schedule that breaks one of them is not simulated.
            measure: How it is simulated.
        """
        self._runs = runs
        self._constraints = constraints
        self._measure = measure
        self._of_plan: dict[str, Evaluated] = {}
        self.excluded: Counter[str] = Counter()
        self.n_illegal = 0
        self.refusal = ""  # why the first plan was refused

    @property
    def n_simulated(self) -> int:
        """How many plans were simulated, the baseline not counted."""
        return sum(each.candidate is not None for each in self._of_plan.values())

    def baseline(self, schedule: Schedule) -> Evaluated:
        """Simulate the schedule that others are compared with, whatever constraints it breaks.

        Raises:
            PlanError: It does not fit the cluster.
        """
        scenario = self._runs.scenario_for(schedule)
        built = build(scenario, schedule)
        return self._simulate(None, scenario, built, facts(scenario, built))

    def evaluate(self, candidate: Candidate) -> Evaluated | None:
        """Simulate a candidate, unless its plan was before; None if it is illegal or breaks a constraint."""
        schedule = legal(candidate, self._runs.scenario)
        scenario = candidate.in_scenario(self._runs.scenario)
        scenario = self._runs.scenario_for(schedule, scenario) if schedule else scenario
        built = _built(scenario, schedule) if schedule else None
        if not isinstance(built, Built):
            self.n_illegal += 1
            self.refusal = self.refusal or str(built or "").partition("\n")[0]
            return None
        known = self._of_plan.get(built.plan.digest())
        found = known.facts if known else facts(scenario, built)
        if faults := broken(found, self._constraints):  # as the baseline's may be, which was simulated all the same
            self.excluded.update(faults)
            return None
        return known or self._simulate(candidate, scenario, built, found)

    def _simulate(self, candidate: Candidate | None, scenario: Scenario, built: Built, found: Facts) -> Evaluated:
        evaluated = Evaluated(candidate, built.schedule, found, self._measure(scenario, built))
        self._of_plan[built.plan.digest()] = evaluated
        return evaluated


def _built(scenario: Scenario, schedule: Schedule) -> Built | PlanError:
    try:
        return build(scenario, schedule)
    except PlanError as error:
        return error


@dataclass(frozen=True)
class Finalist:
    """A schedule that was simulated again.

    Args:
        schedule: With its label.
        facts: Facts that its plan tells.
        row: Its line of the speed-up table, over the baseline, with fresh seeds.
        measured: The results that it follows from.
        search_step_s: Seconds per step, or per micro-batch, with the seeds of the search.
        micro_batches: Of a step.
        checkpoint: That it writes, if any.
        is_baseline: Whether the others are compared with it.
        on_front: Whether no finalist that exchanges with all ranks as often is faster.
        problem: Why its row has no interval, if chance plays a part.
    """

    schedule: Schedule
    facts: Facts
    row: Row
    measured: ScheduleTimes
    search_step_s: float
    micro_batches: int
    checkpoint: CheckpointSettings | None
    is_baseline: bool
    on_front: bool
    problem: str | None = None


def finalists(evaluated: Sequence[Evaluated]) -> list[Evaluated]:
    """Return the fastest three, the fastest of each kind, and the front of step time and global exchanges.

    Args:
        evaluated: Different plans, the baseline too if it keeps to the constraints.
    """
    ranked = sorted(evaluated, key=lambda each: each.step_s)
    of_kinds = {each.schedule.kind: each for each in reversed(ranked)}
    on_front = front([(each.facts.global_gap, each.step_s) for each in evaluated])
    chosen = [*ranked[:_N_FASTEST], *of_kinds.values(), *(evaluated[index] for index in on_front)]
    return sorted({id(each): each for each in chosen}.values(), key=lambda each: each.step_s)


def measure_finalists(runs: Runs, baseline: Evaluated, others: Iterable[Evaluated], measure: Measure) -> list[Finalist]:
    """Simulate the baseline and the others again; return them, the fastest first.

    Args:
        runs: From a seed that the search has not seen.
        baseline: The schedule that the others are compared with.
        others: The baseline may be among them.
        measure: Simulates a plan for all fresh seeds.
    """
    each_once = [baseline, *(each for each in others if each is not baseline)]
    scenarios = [each.scenario(runs) for each in each_once]
    measured = [measure(its, build(its, each.schedule)) for its, each in zip(scenarios, each_once, strict=True)]
    step_s = [float(each.step_s.mean()) for each in measured]
    scale = _in_order_s(runs.as_imported, baseline.schedule) / step_s[0] if runs.as_imported else 1.0
    on_front = front([(each.facts.global_gap, time_s) for each, time_s in zip(each_once, step_s, strict=True)])
    found = [
        Finalist(
            each.schedule,
            each.facts,
            _scaled(_row(runs, (each.schedule, again), (baseline.schedule, measured[0])), scale),
            again,
            each.step_s,
            scenarios[index].workload.micro_batches,
            scenarios[index].checkpoint,
            is_baseline=each is baseline,
            on_front=index in on_front,
            problem=runs.problem(each.schedule) or runs.problem(baseline.schedule),
        )
        for index, (each, again) in enumerate(zip(each_once, measured, strict=True))
    ]
    return sorted(found, key=lambda each: each.row.step_s)


def _row(runs: Runs, one: tuple[Schedule, ScheduleTimes], base: tuple[Schedule, ScheduleTimes]) -> Row:
    """Return the line of a schedule; its intervals are those of the recording, if there is one."""
    found = row(one[1], base[1])
    if runs.problem(one[0]) or runs.problem(base[0]):
        return replace(row(replace(one[1], drawn={}), base[1]), step_s_ci95=None, speedup_ci95=None)
    return with_ranges(_with_chance(runs, found, one[0], base[0]), one[1], base[1])


def _in_order_s(scenario: Scenario, schedule: Schedule) -> float:
    """Return the seconds of a step with recorded delays as they happened."""
    return float(comparison.measure(scenario, build(scenario, schedule), n_seeds=1).step_s.mean())


def _scaled(found: Row, scale: float) -> Row:
    """Return the line of a schedule with other step times, and the same speed-up."""
    if scale == 1:
        return found
    pair = found.step_s_ci95
    wide = found.step_s_range
    return replace(
        found,
        step_s=found.step_s * scale,
        step_s_ci95=(pair[0] * scale, pair[1] * scale) if pair else None,
        step_s_range=(wide[0] * scale, wide[1] * scale) if wide else None,
        compute_s=found.compute_s * scale,
        comm_s=found.comm_s * scale,
        wait_s=found.wait_s * scale,
        io_s=found.io_s * scale,
        host_s=found.host_s * scale,
    )


def _with_chance(runs: Runs, found: Row, schedule: Schedule, base: Schedule) -> Row:
    """Return the line of a schedule with the intervals of the recording, and of an import's error."""
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
    """Tell whether the interval of the ratio of step times, in pairs of seeds, is above 1."""
    if one.problem or other.problem:
        return False
    compared = _row(runs, (one.schedule, one.measured), (other.schedule, other.measured))
    return (compared.speedup_range or compared.speedup_ci95 or (compared.speedup,))[0] > 1


def chosen(runs: Runs, found: Sequence[Finalist], *, baseline: Schedule) -> Finalist:
    """Return the one that the search found fastest, unless another one is clearly faster with fresh seeds.

    Of those that are as fast, it is the one with the fewest changes: a schedule of the baseline's kind, which learns as
    much in a step, before others. To take the fastest with fresh seeds would again be to choose by the numbers that are
    then shown.

    Args:
        runs: The runs of the finalists.
        found: The fastest with fresh seeds first.
        baseline: The schedule that they are compared with.
    """
    least_s = min(each.search_step_s for each in found)
    as_fast = (each for each in found if each.search_step_s <= _AS_FAST * least_s)
    best = min(as_fast, key=lambda each: (*_changes(each.schedule, baseline), each.search_step_s))
    faster = (each for each in found if best.row.step_s > _AS_FAST * each.row.step_s)
    return next((each for each in faster if clearly_faster(runs, each, best)), best)


def _changes(schedule: Schedule, baseline: Schedule) -> tuple[bool, int]:
    """Return whether a schedule is of another kind, and how many of its settings differ."""
    ours, theirs = (each.model_dump(exclude={"label"}) for each in (schedule, baseline))
    return schedule.kind != baseline.kind, sum(value != theirs.get(name) for name, value in ours.items())


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return which points no other one beats: as small or smaller in both numbers, and smaller in one.

    Of equal points the first counts. They are in the order of the first number, so that the second falls.

    >>> front([(1, 9.0), (2, 9.5), (4, 5.0), (8, 5.0), (8, 3.0)])
    [0, 2, 4]
    """
    found: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: (*points[index], index)):
        if not found or points[index][1] < points[found[-1]][1]:
            found.append(index)
    return found
