"""A schedule in two forms: simulated with the scenario's workload, and as a plan with the tensors of a task."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.errors import ScenarioError
from simdist.learning.training import TaskSetting
from simdist.plan import Plan
from simdist.plan.plan import ITEM_NBYTES
from simdist.plan.walk import drops_late
from simdist.runs.building import build, delays, job, live_of
from simdist.scenario import Scenario
from simdist.scenario.sampling import run_seeds
from simdist.scenario.scenario import InputSettings
from simdist.scenario.workload import Workload
from simdist.schedules import Schedule
from simdist.settings.base import unchecked_copy
from simdist.studies.known_delays import corrected_ends
from simdist.studies.measuring import ScheduleTimes
from simdist.traces.waiting import step_end_s

_Late: TypeAlias = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class TimedSchedule:
    """A schedule with the times of the scenario and a plan for the task.

    Args:
        scenario: The scenario, with the same number of steps.
        schedule: The schedule.
        times: Simulated times per step, without states.
        ends_s: Simulated seconds from the start until all ranks have ended a step, `[n_seeds, n_steps]`. Like `times`,
            they are corrected by what is known of rare and heavy delays.
        plan: Plan with the task's tensors.
        late: Late ranks by seed and operation instance; None if the plan drops no ranks.
        lr_factor: Factor of the task's learning rate.
    """

    scenario: Scenario
    schedule: Schedule
    times: ScheduleTimes
    ends_s: NDArray[np.float64]
    plan: Plan
    late: tuple[_Late | None, ...]
    lr_factor: float = 1.0

    @property
    def parts(self) -> bool:
        """Whether ranks diverge: some steps end before all ranks have exchanged their changes."""
        bodies = [*self.plan.body_of_steps()]
        described = job(self.scenario)
        results = [self.schedule.result(bodies.index(number), described) for number in set(bodies)]
        return any(max(each.gradients.size, each.parameters.size) < self.plan.world_size for each in results)


def timed(scenario: Scenario, schedule: Schedule, task: TaskSetting, *, n_seeds: int) -> TimedSchedule:
    """Simulate a schedule with the delays of many seeds, and write its plan for the task.

    Args:
        scenario: Its steps are those of the training.
        schedule: A schedule of the scenario, or another one.
        task: The task with its tensors.
        n_seeds: Number of seeds, see `simdist.scenario.sampling.run_seeds`.

    Raises:
        PlanError: The schedule does not fit the cluster, or the task's tensors.
        ScenarioError: See `PlanError`.
    """
    built = build(scenario, schedule)
    plan = training_plan(scenario, schedule, task)
    pairs = zip(drops_late(built.plan).items(), drops_late(plan).items(), strict=True)
    rows = {ours: theirs for one, other in pairs for ours, theirs in zip(one, other, strict=True)}
    ends_s = []
    late = []
    for seed in run_seeds(scenario.seed, n_seeds if scenario.is_random else 1):
        seeded = unchecked_copy(scenario, seed=seed)
        live = live_of(seeded, built.costs)
        trace = run(built.plan, built.costs, delays(seeded), observe=WholeTrace(), live=live)
        ends_s.append(step_end_s(trace).max(axis=1))
        late.append({rows[row]: ranks for row, ranks in trace.late.items()} if rows else None)
    n_times = n_seeds // len(late)
    times, corrected_s = corrected_ends(scenario, built, np.stack(ends_s * n_times))
    return TimedSchedule(scenario, schedule, times, corrected_s, plan, tuple(late * n_times))


def training_plan(scenario: Scenario, schedule: Schedule, task: TaskSetting) -> Plan:
    """Return the plan of a schedule for a task on the scenario's cluster, checked and proved.

    It computes, exchanges and updates. Operations that only take time are left out: delays, reads and checkpoints.

    Args:
        scenario: Its cluster, steps, micro-batches and optimizer are used.
        schedule: The schedule.
        task: The task with its tensors.

    Raises:
        PlanError: The schedule does not fit the tensors.
        ScenarioError: The tensors have several types, or a type that plans do not support.
    """
    tensors: list[dict[str, Any]] = [
        {"name": name, "count": math.prod(shape), "rows": shape[0] if len(shape) > 1 else None}
        for name, shape, _ in task.tensors
    ]
    its: dict[str, Any] = scenario.workload.model_dump(include={"micro_batches", "optimizer"})
    workload = Workload.model_validate(its | {"tensors": tensors, "batch_size": 1, "forward_s": 1.0})
    if (dtype := "/".join(dict.fromkeys(dtype for *_, dtype in task.tensors))) not in ITEM_NBYTES:
        raise ScenarioError(f"{task.name}: parameters are {dtype}: a plan has one type, of {', '.join(ITEM_NBYTES)}")
    workload = unchecked_copy(workload, dtype=dtype)  # float64, too, which scenarios do not have
    only_learns = {"checkpoint": None, "disturbances": (), "background": (), "input": InputSettings()}
    return build(unchecked_copy(scenario, workload=workload, **only_learns), schedule).plan
