"""Checkpoints that come by time, as a number of steps of each schedule.

A plan says in which steps a file is written, before anything is drawn. So a time becomes a number of steps:

    steps = whole periods of the schedule that take the time or longer, without disturbances and without files

The time is that of training between two files. A step takes the mean over a period, after warm-up. If delays make steps
longer, files come as many steps apart and so later.
"""

import math
from dataclasses import replace

from simdist.cost import price
from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.errors import ScenarioError
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
    n_periods = math.ceil(_LEAST_STEPS / len(cycle))
    ends_s = []
    for n_steps in (cycle.start + n_periods * len(cycle), cycle.start + 2 * n_periods * len(cycle)):
        plan = schedule.plan(replace(calm, n_steps=n_steps))
        costs = price(plan, scenario.cluster, scenario.workload)
        ends_s.append(run(plan, costs, {}, observe=WholeTrace()).makespan_s)
    period_s = (ends_s[1] - ends_s[0]) / n_periods
    if not period_s:
        raise ScenarioError(
            f"{scenario.name}: checkpoint.every: steps take no time without disturbances: write a number of steps"
        )
    n_apart = max(1, math.ceil(checkpoint.every.seconds / period_s * (1 - _ROUNDING)))
    return unchecked_copy(scenario, checkpoint=unchecked_copy(checkpoint, every=n_apart * len(cycle)))
