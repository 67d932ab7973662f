"""The job of a scenario, as `simdist.runs.attempts` takes it."""

from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.errors import ScenarioError
from simdist.runs.attempts import LongJob, check_policy
from simdist.runs.building import build, job
from simdist.runs.checkpointed_steps import Checkpoints
from simdist.scenario.failures import FailureCause, Failures
from simdist.scenario.links import LinkPersistent
from simdist.scenario.scenario import Scenario
from simdist.schedules import Schedule
from simdist.schedules.hsdp import HSDP
from simdist.settings.base import unchecked_copy
from simdist.settings.units import Elapsed

_LEAST_STEPS = 20  # of whole periods, on which a slow link is measured


def job_of(
    scenario: Scenario,
    schedule: Schedule,
    *,
    step_s: float,
    calm_step_s: float | None = None,
    checkpoints: Checkpoints | None = None,
) -> LongJob:
    """Return the job of a scenario under a schedule.

    Args:
        scenario: One with `failures` and `train_for`.
        schedule: One of its schedules.
        step_s: Seconds of a step, in the mean, with stragglers and without files.
        calm_step_s: Without stragglers; `step_s` if None.
        checkpoints: Its files; None writes none.

    Raises:
        ScenarioError: It has no `failures`, or no `train_for`.
    """
    if scenario.failures is None:
        raise ScenarioError(f"{scenario.name}: failures: nothing fails: write its causes and their rates")
    if scenario.train_for is None:
        hint = "write train_for, e.g. 54 days, or 100000 steps"
        raise ScenarioError(f"{scenario.name}: failures: how long is the whole job? {hint}")
    length = scenario.train_for
    cluster = scenario.cluster
    flaps = [each for each in scenario.failures.causes if each.effect == "flap" and each.share]
    return LongJob(
        step_s=step_s,
        calm_step_s=calm_step_s,
        n_steps=None if isinstance(length, Elapsed) else int(length),
        horizon_s=length.seconds if isinstance(length, Elapsed) else None,
        n_nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        ranks_per_replica=ranks_per_replica(schedule, cluster.world_size),
        average_every=len(schedule.cycle(job(scenario))),
        checkpoints=checkpoints,
        slowed={each.cause: slowed_by_link(scenario, schedule, each) for each in flaps},
    )


def check_failures_fit(failures: Failures, schedule: Schedule, world_size: int) -> None:
    """Check that a schedule has the replicas that a job needs after failures.

    Raises:
        PlanError: All ranks hold one replica together.
    """
    check_policy(failures, world_size // ranks_per_replica(schedule, world_size))


def ranks_per_replica(schedule: Schedule, world_size: int) -> int:
    """Return how many ranks hold a model and its state together: one unless the schedule shards the model."""
    if isinstance(schedule, HSDP):
        return schedule.shard
    return world_size if schedule.shards else 1


def slowed_by_link(scenario: Scenario, schedule: Schedule, cause: FailureCause) -> float:
    """Return the factor of step times while the link of one node has a share of its rate, by the engines.

    Args:
        scenario: The scenario; its disturbances are left out.
        schedule: A schedule.
        cause: Flaps, which state link and share.
    """
    assert cause.share
    cycle = schedule.cycle(job(scenario))
    n_steps = cycle.start + max(_LEAST_STEPS, len(cycle))
    calm = unchecked_copy(scenario, steps=n_steps, disturbances=(), background=(), actors=(), checkpoint=None)
    slow = unchecked_copy(calm, disturbances=(LinkPersistent(link=cause.link, share=cause.share, nodes=(0,)),))
    times_s = []
    for each in (calm, slow):
        built = build(each, schedule, proves=False)
        times_s.append(run(built.plan, built.costs, {}, observe=WholeTrace()).makespan_s)
    return max(1.0, times_s[1] / times_s[0])
