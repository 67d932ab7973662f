"""Evaluate candidates: build the plan, hold it to the constraints, and simulate what is left.

All candidates meet the same delays of the same seeds, those from the scenario's own on. What the search has found is
simulated again with seeds after those, which it has not seen: of many noisy numbers, the smallest is too small.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from simdist.build import Built, build
from simdist.compare import Measured
from simdist.errors import PlanError
from simdist.scenario import Recorded, Scenario
from simdist.scenario.disturbances import read_recorded
from simdist.schedules import Schedule
from simdist.tune.candidates import Candidate
from simdist.tune.constraints import Constraints, Facts, broken, facts
from simdist.tune.space import legal

__all__ = ["Evaluated", "Evaluator", "Measure", "resampled"]

_LEAST_BLOCKS = 3  # of a recording: with fewer, draws would hardly differ

Measure = Callable[[Scenario, Built], Measured]
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
    measured: Measured

    @property
    def step_s(self) -> float:
        """Seconds per step, averaged over seeds."""
        return float(self.measured.step_s.mean())


@final
class Evaluator:
    """Evaluates candidates, equal plans once, and counts."""

    def __init__(self, scenario: Scenario, constraints: Constraints, measure: Measure) -> None:
        """Evaluate nothing yet.

        Args:
            scenario: What is simulated.
            constraints: What breaks one of them is not simulated.
            measure: How it is simulated.
        """
        self._scenario, self._constraints, self._measure = scenario, constraints, measure
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
        built = build(self._scenario, schedule)
        return self._simulate(None, built, facts(self._scenario, built))

    def evaluate(self, candidate: Candidate) -> Evaluated | None:
        """Simulate a candidate, unless its plan was before; None if it is illegal or breaks a constraint."""
        built = self._built(candidate)
        if built is None:
            self.n_illegal += 1
            return None
        known = self._of_plan.get(built.plan.digest())
        found = known.facts if known else facts(self._scenario, built)
        if faults := broken(found, self._constraints):  # as the baseline's may be, which was simulated all the same
            self.excluded.update(faults)
            return None
        return known or self._simulate(candidate, built, found)

    def _built(self, candidate: Candidate) -> Built | None:
        schedule = legal(candidate, self._scenario)
        try:
            return build(self._scenario, schedule) if schedule else None
        except PlanError:
            return None

    def _simulate(self, candidate: Candidate | None, built: Built, found: Facts) -> Evaluated:
        evaluated = Evaluated(candidate, built.schedule, found, self._measure(self._scenario, built))
        self._of_plan[built.plan.digest()] = evaluated
        return evaluated


def resampled(scenario: Scenario, longest_period: int) -> Scenario:
    """Return a scenario in which every seed draws recorded disturbances anew, block by block.

    A block is as long as the longest period, so that what delays neighbouring steps stays together as far as any
    schedule looks, but a third of the recording at most. Recordings that are drawn already are left as they are.

    Args:
        scenario: What is simulated.
        longest_period: Steps.
    """

    def drawn(recorded: Recorded) -> Recorded:
        rows = len(read_recorded(recorded))
        block_steps = max(1, min(longest_period, rows // _LEAST_BLOCKS), math.ceil(rows ** (1 / 3) - 1e-9))
        return recorded.model_copy(update={"resample_steps": recorded.resample_steps or block_steps})

    return scenario.changed(
        disturbances=tuple(drawn(each) if isinstance(each, Recorded) else each for each in scenario.disturbances)
    )
