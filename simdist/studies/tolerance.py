"""The rate of stragglers that a schedule tolerates: it loses no more than a given share of its time.

A straggler is a rank that is late in a step by a given delay, with a probability for each rank and step. The numbers
that decide who is late are the same at every probability, so that more of it never has fewer stragglers, and the
largest tolerable one is found by bisection.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from simdist.errors import ScenarioError
from simdist.runs.building import build
from simdist.scenario import Scenario
from simdist.scenario.disturbances import Transient
from simdist.schedules import Schedule
from simdist.studies.comparison import measure

_PRECISION = 1.02  # ratio of the probabilities between which the largest tolerable one is


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The stragglers that a schedule tolerates.

    Args:
        schedule: Label.
        step_s: Seconds per step without them.
        probability: The largest tolerable one, of each rank in each step: 1 if it tolerates them always, 0 if a single
            one in all simulated steps is too many.
        tolerated_step_s: Seconds per step at that probability.
    """

    schedule: str
    step_s: float
    probability: float
    tolerated_step_s: float

    @property
    def loss(self) -> float:
        """Share of the time that is lost at that probability."""
        return 1 - self.step_s / self.tolerated_step_s


def tolerance(
    scenario: Scenario,
    schedule: Schedule,
    *,
    delay_s: float,
    most_loss: float,
    n_seeds: int,
    progress: Callable[[float], None] | None = None,
) -> Tolerance:
    """Return the stragglers that a schedule tolerates.

    Args:
        scenario: With everything else that disturbs the job; its transient stragglers are replaced.
        schedule: One of its schedules.
        delay_s: How late a straggler is.
        most_loss: Share of the time, above 0 and below 1, that may be lost.
        n_seeds: Seeds to average over.
        progress: Called with the share that is done.

    Raises:
        ScenarioError: A step takes no time.
    """
    others = [each for each in scenario.disturbances if not isinstance(each, Transient)]
    n_places = scenario.steps * scenario.cluster.world_size * n_seeds

    def step_s(probability: float) -> float:
        stragglers = [Transient(probability=probability, delay_s=delay_s)] if probability else []
        changed = scenario.changed(disturbances=(*others, *stragglers))
        return float(measure(changed, build(changed, schedule), n_seeds=n_seeds).step_s.mean())

    without_s = step_s(0.0)
    if not without_s:
        raise ScenarioError(f"{schedule.name}: a step takes no time; give e.g. forward: 20 ms")
    most_s = without_s / (1 - most_loss)
    if (always_s := step_s(1.0)) <= most_s:
        return Tolerance(schedule.name, without_s, 1.0, always_s)
    low = 1 / n_places  # fewer are none in most simulations
    high = 1.0
    low_s = step_s(low)
    if low_s > most_s:
        return Tolerance(schedule.name, without_s, 0.0, without_s)
    n_halvings = math.ceil(math.log2(math.log(high / low) / math.log(_PRECISION)))
    n_done = 0
    while high / low > _PRECISION:
        middle = math.sqrt(low * high)
        middle_s = step_s(middle)
        if middle_s <= most_s:
            low = middle
            low_s = middle_s
        else:
            high = middle
        n_done += 1
        if progress:
            progress(min(n_done / n_halvings, 1.0))
    return Tolerance(schedule.name, without_s, low, low_s)
