"""Evaluate candidates: build the plan, hold it to the constraints, and simulate what is left.

All candidates meet the same delays of the same seeds, those from the scenario's own on. What the search has found is
simulated again with seeds after those, which it has not seen: of many noisy numbers, the smallest is too small.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from simdist.errors import PlanError
from simdist.runs.building import Built, build
from simdist.scenario import Scenario
from simdist.schedules import Schedule
from simdist.studies.comparison import ScheduleTimes
from simdist.studies.resampling import Runs
from simdist.tune.candidates import Candidate
from simdist.tune.constraints import Constraints, Facts, broken, facts
from simdist.tune.space import legal

Measure = Callable[[Scenario, Built], ScheduleTimes]
"""Simulates a schedule of a scenario."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A candidate that was simulated.

    Args:
        candidate: What it is; None is the baseline.
        schedule: Its schedule.
        facts: What its plan says.
        measured: What the simulation says, with the seeds of the search.
    """

    candidate: Candidate | None
    schedule: Schedule
    facts: Facts
    measured: ScheduleTimes

    @property
    def step_s(self) -> float:
        """Seconds per step, averaged over seeds."""
        return float(self.measured.step_s.mean())


@final
class Evaluator:
    """Evaluates candidates, equal plans once, and counts."""

    def __init__(self, runs: Runs, constraints: Constraints, measure: Measure) -> None:
        """Evaluate nothing yet.

        Args:
            runs: What is simulated, and how long.
            constraints: What breaks one of them is not simulated.
            measure: How it is simulated.
        """
        self._runs, self._constraints, self._measure = runs, constraints, measure
        self._of_plan: dict[str, Evaluated] = {}
        self.excluded: Counter[str] = Counter()
        self.n_illegal = 0

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
        scenario = self._runs.scenario_for(schedule) if schedule else self._runs.scenario
        built = _built(scenario, schedule) if schedule else None
        if built is None:
            self.n_illegal += 1
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


def _built(scenario: Scenario, schedule: Schedule) -> Built | None:
    try:
        return build(scenario, schedule)
    except PlanError:
        return None
