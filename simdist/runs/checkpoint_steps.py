"""Checkpoints that come by time, as a number of steps of each schedule.

A plan says in which steps a file is written, before anything is drawn. So a time becomes a number of steps:

    steps = whole periods of the schedule that take the time or longer, without disturbances and without files

The time is that of training between two files. A step takes the mean over a period, after warm-up. If delays make steps
longer, files come as many steps apart and so later.
"""

import math
from dataclasses import replace

from simdist.cost import price
from simdist.engines.observers import StepSeconds
from simdist.engines.run import run
from simdist.errors import ScenarioError
from simdist.plan import Plan
from simdist.scenario import Scenario
from simdist.schedules import Job, Schedule
from simdist.settings.base import unchecked_copy
from simdist.settings.units import Elapsed

_LEAST_STEPS = 20  # of whole periods; as many before them count as warm-up
_ROUNDING = 1e-9


def with_checkpoint_steps(scenario: Scenario, schedule: Schedule, job: Job) -> Scenario:
    """Return a scenario whose checkpoints come every so many steps, if they came by time.

    Raises:
        PlanError: The schedule does not fit the cluster.
        ScenarioError: Steps take no time.
    """
    checkpoint = scenario.checkpoint
    if checkpoint is None or not isinstance(checkpoint.every, Elapsed):
        return scenario
    calm = replace(job, checkpoint=None, delay_channels=frozenset())
    cycle = schedule.cycle(calm)
    period_s = len(cycle) * undisturbed_step_s(scenario, schedule, calm)
    if not period_s:
        raise ScenarioError(
            f"{scenario.name}: checkpoint.every: steps take no time without disturbances: write a number of steps"
        )
    n_apart = max(1, math.ceil(checkpoint.every.seconds / period_s * (1 - _ROUNDING)))
    return unchecked_copy(scenario, checkpoint=unchecked_copy(checkpoint, every=n_apart * len(cycle)))


def undisturbed_step_s(scenario: Scenario, schedule: Schedule, calm: Job) -> float:
    """Return the mean seconds of a step over whole periods, after warm-up, if nothing is disturbed.

    Args:
        scenario: The scenario.
        schedule: A schedule.
        calm: Its job, without checkpoints and delays.

    Raises:
        PlanError: The schedule does not fit the cluster.
    """
    cycle = schedule.cycle(calm)
    n_periods = math.ceil(_LEAST_STEPS / len(cycle))
    lengths = (cycle.start + n * n_periods * len(cycle) for n in (1, 2))
    shorter_s, longer_s = (undisturbed_s(scenario, schedule.plan(replace(calm, n_steps=n))) for n in lengths)
    return (longer_s - shorter_s) / (n_periods * len(cycle))


def undisturbed_s(scenario: Scenario, plan: Plan) -> float:
    """Return the makespan of a plan without delays, on links that nothing disturbs."""
    costs = price(plan, scenario.cluster, scenario.workload)
    (step_s,) = run(plan, costs, {}, observe=StepSeconds(kinds_first=True))
    return float(step_s) * plan.n_steps
