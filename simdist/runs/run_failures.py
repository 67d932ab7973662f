"""The failures of a run directory: which of a scenario's failures strike in its steps, and what becomes of it then.

`simdist.runs.attempts` says when each failure strikes and where the job goes on. Real ranks cannot be held to times,
so a run directory has failures by step: real ranks fail at the start of the step that is in progress in the simulation.
A failure that comes during a recovery has no step, so it is simulated only.
"""

from dataclasses import dataclass

from simdist.cost import Costs
from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.plan import Plan, ops
from simdist.plan.delays import Delays
from simdist.plan.failures import FailureKind, StepFailure
from simdist.runs.attempts import Attempt, Goodput, LongJob, Strike, attempts
from simdist.runs.building import job as job_shape
from simdist.runs.building import live_of
from simdist.runs.checkpointed_steps import Checkpoints
from simdist.runs.failing_job import ranks_per_replica, slowed_by_link
from simdist.scenario import Scenario
from simdist.scenario.failures import Failures
from simdist.traces.times_of_steps import TimesOfSteps, times_of_steps
from simdist.traces.trace import Trace

_KINDS: dict[str, FailureKind] = {"node": "lost", "hang": "hang", "flap": "hang", "slow": "slow", "planned": "planned"}


@dataclass(frozen=True, slots=True)
class SufferedRun:
    """A run with its failures, simulated.

    Args:
        goodput: Where its time goes.
        attempts: Its attempts.
        failures: Those of its steps, in the order in which they strike.
    """

    goodput: Goodput
    attempts: tuple[Attempt, ...]
    failures: tuple[StepFailure, ...]


def step_failures(scenario: Scenario, plan: Plan, costs: Costs, delays: Delays) -> tuple[StepFailure, ...]:
    """Return the failures of a run directory. Unless all come at steps, the plan is simulated.

    Args:
        scenario: Its scenario, with one schedule.
        plan: The plan of that.
        costs: Prices of the plan.
        delays: Those of the scenario's seed.

    Raises:
        PlanError: The policy does not fit the job.
    """
    failures = scenario.failures
    if failures is None:
        return ()
    timeless = all(each.at_steps and each.effect in ("process", "node", "hang") for each in failures.causes)
    if timeless and failures.on_failure != "continue":
        return _suffer(scenario, failures, plan, None).failures
    simulated = run(plan, costs, delays, observe=WholeTrace(), live=live_of(scenario, costs))
    return _suffer(scenario, failures, plan, times_of_steps(simulated)).failures


def suffer_run(scenario: Scenario, simulated: Trace) -> SufferedRun:
    """Let a run suffer its failures.

    Args:
        scenario: A scenario with failures and one schedule.
        simulated: A trace of its plan.

    Raises:
        PlanError: The policy does not fit the job.
    """
    assert scenario.failures is not None
    return _suffer(scenario, scenario.failures, simulated.plan, times_of_steps(simulated))


def _suffer(scenario: Scenario, failures: Failures, plan: Plan, times: TimesOfSteps | None) -> SufferedRun:
    seen: list[Attempt] = []
    strikes: list[Strike] = []
    cluster = scenario.cluster
    step_s = times.step_s if times else 1.0
    job = LongJob(
        step_s=step_s,
        n_steps=plan.n_steps,
        n_nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        ranks_per_replica=ranks_per_replica(scenario.schedules[0], cluster.world_size),
        average_every=len(scenario.schedules[0].cycle(job_shape(scenario))),
        checkpoints=_checkpoints(scenario, plan, times),
        slowed={
            each.cause: slowed_by_link(scenario, scenario.schedules[0], each)
            for each in failures.causes
            if each.effect == "flap" and each.share
        },
    )
    goodput = attempts(failures, job, seed=scenario.seed, observe=seen.append, observe_strikes=strikes.append)
    struck = (_step_failure(each, failures, job, step_s) for each in strikes if each.step < plan.n_steps)
    return SufferedRun(goodput, tuple(seen), tuple(struck))


def _checkpoints(scenario: Scenario, plan: Plan, times: TimesOfSteps | None) -> Checkpoints | None:
    """Return the checkpoints of a plan. Without times, they take none, which changes no failure at a step."""
    if scenario.checkpoint is None or not plan.has_saves:
        return None
    saving = {number for number, body in enumerate(plan.bodies) if any(isinstance(op, ops.Save) for op in body)}
    every_steps = 1 + next(step for step, body in enumerate(plan.body_of_steps()) if body in saving)
    stall_s = times.stall_s if times else 0.0
    write_s = times.write_s if times else 0.0
    return Checkpoints(every_steps, stall_s, write_s, keep=scenario.checkpoint.keep)


def _step_failure(strike: Strike, failures: Failures, job: LongJob, step_s: float) -> StepFailure:
    failure = strike.failure
    cause = failures.causes[failure.cause]
    of_node = range(failure.first_node * job.gpus_per_node, (failure.first_node + failure.n_nodes) * job.gpus_per_node)
    ranks = tuple(of_node) if cause.is_of_node else (failure.rank,)
    kind = _KINDS.get(cause.effect, "gone")
    seconds = 0.0
    resume_before = None
    if strike.leaves:
        kind = kind if strike.resume is None else "planned"
    elif strike.resume is None:
        kind = "slow" if cause.effect == "slow" else "pause"
        seconds = (cause.factor or 1.0) * step_s - step_s if kind == "slow" else cause.lasts_s or 0.0
    elif cause.effect in ("slow", "planned") or (cause.effect == "flap" and strike.resume == strike.step):
        kind = "planned" if strike.resume == strike.step else "gone"
        ranks = tuple(range(job.n_ranks))
    elif cause.effect == "corruption":
        resume_before = strike.resume + 1
    return StepFailure(strike.attempt, strike.step, ranks, kind, seconds, resume_before, others_go_on=strike.leaves)
