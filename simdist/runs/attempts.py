"""A job over months: attempts, failures, recoveries, and where the time goes.

The engines give the time of a step, and this gives what a long job makes of it. It is a loop over events in the order
of their times, each of which changes the pace of the steps, ends an attempt or brings a replica back. Between two
events, `CheckpointedSteps` goes on by arithmetic, so the cost is per event.

Failures come by the clock on the wall, so that policies and schedules meet the same ones. One that comes while the job
is down begins the recovery anew. While a job closes for a planned interruption, and while the other replicas wait for
one that is lost, failures wait for the end of it. Failures at the same step strike together and end one attempt: the
job knows it as soon as the first of them is found, and waits until all nodes are replaced.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import TypeAlias, get_args

from simdist.errors import PlanError, ScenarioError
from simdist.runs import recovery as parts_of
from simdist.runs.checkpointed_steps import CheckpointedSteps, Checkpoints, Pace
from simdist.runs.recovery import Category, Nodes, TimedPart
from simdist.scenario.failure_sampling import Failure, FailureChances, failures_at_steps, failures_of
from simdist.scenario.failures import Effect, FailureCause, Failures

_Action: TypeAlias = Callable[[], None]
_ENDING: tuple[Effect, ...] = ("process", "node", "hang", "planned")
_MOST_IN_VAIN = 1000  # failures without a newer file, after which a job with a number of steps never ends
CATEGORIES: tuple[Category, ...] = get_args(Category)
_Seconds: TypeAlias = dict[Category, float]
_Key: TypeAlias = tuple[int, int]  # of a failure: its cause and number
_LEAVE, _FORM, _JOIN, _FAIL = range(4)  # the order of what happens at the same step


@dataclass(frozen=True, slots=True)
class LongJob:
    """A job that is to suffer failures.

    Args:
        step_s: Seconds of a step, in the mean, with stragglers and without files.
        calm_step_s: Without stragglers; `step_s` if None. What it takes longer is `step_time_deviation`.
        n_steps: Steps to train; None trains for `horizon_s`.
        horizon_s: Time to train; None trains `n_steps`.
        n_nodes: Nodes.
        gpus_per_node: GPUs of each.
        ranks_per_replica: Consecutive ranks that hold a whole model and its state together; all if None.
        average_every: Steps from one average of the replicas to the next: 1 if gradients are averaged.
        checkpoints: Its files; None writes none.
        slowed: Factor of step times for each cause whose flaps leave a share of a link.
    """

    step_s: float
    n_nodes: int
    gpus_per_node: int
    calm_step_s: float | None = None
    n_steps: int | None = None
    horizon_s: float | None = None
    ranks_per_replica: int | None = None
    average_every: int = 1
    checkpoints: Checkpoints | None = None
    slowed: Mapping[str, float] = field(default_factory=dict)

    @property
    def n_ranks(self) -> int:
        """All ranks."""
        return self.n_nodes * self.gpus_per_node

    @property
    def n_replicas(self) -> int:
        """Replicas of the model."""
        return self.n_ranks // (self.ranks_per_replica or self.n_ranks)


@dataclass(frozen=True, slots=True)
class Attempt:
    """From one start of all ranks to the failure that ends it, or to the end of the job.

    Args:
        begin_s: When the failure before it came.
        first_step_s: When its first step begins; the same as `end_s` if it took none.
        end_s: When it ends.
        first_step: Steps that were done before: those of the file that it resumed from.
        last_step: Steps that are done at its end.
        cause: What ends it; None at the end of the job.
    """

    begin_s: float
    first_step_s: float
    end_s: float
    first_step: int
    last_step: int
    cause: str | None


@dataclass(frozen=True, slots=True)
class Strike:
    """A failure that stops the ranks or slows them down, at its place among the steps.

    Args:
        failure: It.
        attempt: Number of the attempt, from 0.
        step: Steps that are done.
        resume: Steps of the file that the next attempt resumes from; None if this one goes on. If replicas leave: the
            steps with their part in them, if that was announced.
        leaves: The replicas that it hits leave, and the others go on.
    """

    failure: Failure
    attempt: int
    step: int
    resume: int | None
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaAbsence:
    """A stretch of steps that count without a replica.

    Args:
        replica: It.
        first_step: The first of them.
        last_step: The step at which it is back, or the job or its attempt ends.
    """

    replica: int
    first_step: int
    last_step: int


@dataclass(slots=True)
class CauseLoss:
    """What the failures of one cause took.

    Args:
        n_failures: How many came.
        seconds: By category.
    """

    n_failures: int = 0
    seconds: _Seconds = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Where the time of a job went.

    Args:
        seconds: By category, all together `total_s`.
        by_cause: What each cause took of it, by its name.
        total_s: Time of the job.
        n_steps: Steps that count in the end.
        n_samples_share: Share of their samples that were trained; less than 1 if replicas were absent.
        n_repeated: Steps that were done again.
        n_attempts: Starts of all ranks.
        gave_up: Whether the job ended because no try to start it again succeeded, or because 1,000 failures in a row
            left no newer file.
        absences: Stretches of steps without a replica, in the order of their ends.
    """

    seconds: _Seconds
    by_cause: dict[str, CauseLoss]
    total_s: float
    n_steps: int
    n_samples_share: float
    n_repeated: int
    n_attempts: int
    gave_up: bool
    absences: tuple[ReplicaAbsence, ...] = ()

    @property
    def goodput(self) -> float:
        """Share of the time that trains the model at the pace of calm steps."""
        return self.seconds["productive"] / self.total_s

    @property
    def ettr(self) -> float:
        """Effective training time ratio: share of the time spent in steps that count, slow ones included.

        Source:
            Revisiting Reliability in Large-Scale Machine Learning Research Clusters, arXiv 2410.21680.
        """
        kept: tuple[Category, ...] = ("productive", "step_time_deviation", "absent_replicas")
        return math.fsum(self.seconds[each] for each in kept) / self.total_s


def attempts(
    failures: Failures,
    job: LongJob,
    *,
    seed: int,
    observe: Callable[[Attempt], None] | None = None,
    observe_strikes: Callable[[Strike], None] | None = None,
) -> Goodput:
    """Let a job suffer failures.

    Args:
        failures: What fails, and what the job does about it.
        job: It.
        seed: From 0 to 2**64 - 1; see `simdist.scenario.sampling.run_seeds`.
        observe: Takes each attempt when it ends.
        observe_strikes: Takes each failure when it strikes steps; one that comes during a recovery does not.

    Raises:
        ScenarioError: The job has no length.
        PlanError: The policy does not fit the job.
    """
    _check(failures, job)
    run = _Run(failures, job, FailureChances(seed), observe or _ignore, observe_strikes or _ignore)
    run.upcoming = _FailureQueue(failures_of(failures, seed=seed, n_nodes=job.n_nodes, gpus_per_node=job.gpus_per_node))
    at_steps = failures_at_steps(failures, n_nodes=job.n_nodes, gpus_per_node=job.gpus_per_node)
    for step, found in groupby(at_steps, key=lambda each: each[0]):
        run.at_step(step, _FAIL, partial(run.fail_at_step, [failure for _, failure in found]))
    return run.goodput()


def check_policy(failures: Failures, n_replicas: int) -> None:
    """Check that a policy has the replicas that it needs.

    Args:
        failures: What the job does about failures.
        n_replicas: Replicas of the model.

    Raises:
        PlanError: It needs another replica, and there is none.
    """
    asks = {"on_failure": "continue", "recovery.state": "replica"}
    has = {"on_failure": failures.on_failure, "recovery.state": failures.recovery.state}
    for key, value in asks.items():
        if has[key] == value and n_replicas < 2:
            raise PlanError(
                f"failures.{key}: {value}: all ranks hold one replica of the model together, so that nobody is left: "
                f"write a schedule with replicas, e.g. hsdp, or another {key}"
            )


def _check(failures: Failures, job: LongJob) -> None:
    if (job.n_steps is None) == (job.horizon_s is None):
        raise ScenarioError("how long is the job? Write train_for, e.g. 54 days, or 100000 steps")
    check_policy(failures, job.n_replicas)
    for cause in failures.causes:
        if cause.effect == "flap" and cause.share and cause.cause not in job.slowed:
            raise ScenarioError(f"slowed has no factor for the cause {cause.cause!r}, whose flaps leave a share")


def _ignore(_: Attempt | Strike) -> None:
    """Do nothing with what is observed."""


def _key(failure: Failure) -> _Key:
    """Return what tells a failure from others, also if it comes again."""
    return failure.cause, failure.number


@dataclass(slots=True)
class _FailureQueue:
    """Failures to come, of which the next one is known."""

    source: Iterator[Failure]
    head: Failure | None = None

    def __post_init__(self) -> None:
        self.head = next(self.source, None)

    @property
    def at_s(self) -> float:
        """When the next one comes."""
        return self.head.at_s if self.head else math.inf

    def pop(self) -> Failure:
        """Return the next one."""
        assert self.head is not None
        found = self.head
        self.head = next(self.source, None)
        return found


@dataclass(slots=True)
class _Run:
    """A job on its way.

    Args:
        failures: What fails, and what the job does about it.
        job: It.
        chances: Numbers of failures.
        observe: Takes attempts.
        observe_strikes: Takes strikes.
    """

    failures: Failures
    job: LongJob
    chances: FailureChances
    observe: Callable[[Attempt], None]
    observe_strikes: Callable[[Strike], None]
    upcoming: _FailureQueue = field(init=False)
    steps: CheckpointedSteps = field(init=False)
    nodes: Nodes = field(init=False)
    own_s: _Seconds = field(default_factory=dict)
    losses: list[CauseLoss] = field(default_factory=list)
    timers: list[tuple[float, int, _Action]] = field(default_factory=list)
    targets: list[tuple[int, int, int, _Action]] = field(default_factory=list)
    slow: dict[_Key, Failure] = field(default_factory=dict)
    defects: dict[int, Failure] = field(default_factory=dict)
    flaps: dict[int, list[float]] = field(default_factory=dict)
    blocked: dict[_Key, tuple[Failure, float]] = field(default_factory=dict)
    copies_gone: set[int] = field(default_factory=set)
    copies_of: int = 0
    corrupt: list[tuple[Failure, int, int]] = field(default_factory=list)
    absent: dict[int, int] = field(default_factory=dict)
    absent_from: dict[int, int] = field(default_factory=dict)
    absences: list[ReplicaAbsence] = field(default_factory=list)
    leaving: dict[_Key, Failure] = field(default_factory=dict)
    to_form: list[tuple[Failure, float]] = field(default_factory=list)
    stateless: set[int] = field(default_factory=set)
    to_replace: list[Failure] = field(default_factory=list)
    away_until_s: dict[int, float] = field(default_factory=dict)
    beside: Sequence[Failure] = ()
    all_there_s: float = 0.0
    n_timers: int = 0
    n_attempts: int = 0
    n_repeated: int = 0
    begin_s: float = 0.0
    first_step_s: float = 0.0
    first_step: int = 0
    n_in_vain: int = 0
    most_resumed: int = 0
    is_over: bool = False
    gave_up: bool = False

    def __post_init__(self) -> None:
        self.steps = CheckpointedSteps(self.job.checkpoints, Pace(self.step_s))
        self.nodes = Nodes(self.failures.recovery, self.failures.spares)
        self.losses += [CauseLoss() for _ in self.failures.causes]

    @property
    def step_s(self) -> float:
        """Seconds of a step of this policy when nothing is slow. A lone replica works with nobody."""
        is_alone = bool(self.absent) and len(self.absent) == self.job.n_replicas - 1
        return self.job.step_s * (1.0 if is_alone else self.failures.step_factor)

    @property
    def horizon_s(self) -> float:
        """When the job ends, if a time tells."""
        return math.inf if self.job.horizon_s is None else self.job.horizon_s

    @property
    def _n_steps(self) -> float:
        """Steps that end the job, if their number tells."""
        return math.inf if self.job.n_steps is None else self.job.n_steps

    def cause_of(self, failure: Failure) -> FailureCause:
        """Return the cause of a failure."""
        return self.failures.causes[failure.cause]

    # ---------------------------------------------------------------- from event to event

    def goodput(self) -> Goodput:
        """Run the job to its end."""
        recovery = self.failures.recovery
        first = [*parts_of.starting(recovery, self.job.n_ranks, 0.0), parts_of.warming_up(recovery)]
        interrupted_by = self._go_through(None, first)
        if interrupted_by is not None:
            self._recover(interrupted_by)
        elif not self.is_over:
            self._resume()
        while not self.is_over:
            self._go_on()
        return self._result()

    def _go_on(self) -> None:
        """Train until something happens, and let it."""
        steps = self.steps
        timer_s = self.timers[0][0] if self.timers else math.inf
        target = self.targets[0][0] if self.targets else math.inf
        n_steps = self._n_steps
        steps.advance(min(self.upcoming.at_s, timer_s, self.horizon_s), min(target, n_steps))
        if steps.now_s >= self.horizon_s:
            self._end()
        elif steps.has_done(n_steps) and self.to_form:
            self._form_again(self.n_attempts)
        elif steps.has_done(n_steps):
            steps.wait_for_file()
            self._end()
        elif steps.has_done(target):
            heapq.heappop(self.targets)[3]()
        elif timer_s <= self.upcoming.at_s:
            heapq.heappop(self.timers)[2]()
        else:
            self.fail(self.upcoming.pop())

    def after(self, at_s: float, action: _Action) -> None:
        """Do something at a time."""
        self.n_timers += 1
        heapq.heappush(self.timers, (at_s, self.n_timers, action))

    def at_step(self, step: int, order: int, action: _Action) -> None:
        """Do something when so many steps are done, in an order at the same step."""
        self.n_timers += 1
        heapq.heappush(self.targets, (step, order, self.n_timers, action))

    def fail_at_step(self, failures: Sequence[Failure]) -> None:
        """Let failures come now that come at the same step: those that end the attempt at last, and together."""
        step = self.steps.done
        n_attempts = self.n_attempts
        ending = []
        for each in sorted((replace(each, at_s=self.steps.now_s) for each in failures), key=self._ends_attempt):
            if self._ends_attempt(each):
                ending.append(each)
            else:
                self.fail(each)
        if ending and self.n_attempts > n_attempts:  # an alert has led to an eviction
            self.at_step(step, _FAIL, partial(self.fail_at_step, ending))
        elif ending:
            self._fail_together(ending)

    def _ends_attempt(self, failure: Failure) -> bool:
        """Tell whether all ranks start again because of a failure, unless it is only the last of many alerts."""
        is_end = self.cause_of(failure).effect in _ENDING or parts_of.is_blocked(self.failures, failure)
        return is_end and not self._others_go_on(failure)

    def _fail_together(self, failures: Sequence[Failure]) -> None:
        """End the attempt by the failure that is found first. What is planned comes too late beside others."""
        losing = [each for each in failures if self.cause_of(each).effect != "planned"]
        first = min(losing or failures, key=lambda each: parts_of.finding(self.failures, each)[0][1])
        self.beside = [each for each in failures if each is not first]
        for each in self.beside:
            self.losses[each.cause].n_failures += 1
        self.fail(first)

    def fail(self, failure: Failure) -> None:
        """Let a failure hit the job while it trains."""
        if self._is_void(failure):
            return
        self.losses[failure.cause].n_failures += 1
        cause = self.cause_of(failure)
        match cause.effect:
            case "slow":
                self._strike(failure, None)
                self._begin_unnoticed(failure)
            case "corruption":
                self._begin_unnoticed(failure)
            case "flap":
                self._flap(failure)
            case "planned":
                self._plan(failure)
            case _:
                self._lose(failure)

    def _is_void(self, failure: Failure) -> bool:
        """Tell whether a failure is that of a bad node that was replaced, or slows a node that is away."""
        if failure.is_excess and failure.first_node in self.nodes.replaced:
            return True
        only_slows = self.cause_of(failure).effect in ("slow", "flap")
        came_s = max(failure.at_s, self.steps.now_s)
        return only_slows and self.away_until_s.get(failure.first_node, 0.0) > came_s

    def _strike(self, failure: Failure, resume: int | None, *, leaves: bool = False) -> None:
        self.observe_strikes(Strike(failure, self.n_attempts - 1, self.steps.done, resume, leaves))

    # ---------------------------------------------------------------- effects

    def _begin_unnoticed(self, failure: Failure) -> None:
        """Begin what is found later: slowness, or corruption."""
        cause = self.cause_of(failure)
        assert cause.found_after_s is not None
        found_s = self.steps.now_s + cause.found_after_s
        if cause.effect == "corruption":
            self.corrupt.append((failure, self.steps.newest or 0, self.steps.n_usable))
            self.after(found_s, partial(self._find_corruption, failure))
            return
        self._slow_down(failure)
        self.after(found_s, partial(self._find_slow, failure))

    def _find_slow(self, failure: Failure) -> None:
        """Replace a slow node, unless it has been replaced."""
        if _key(failure) in self.slow:
            self._plan(failure)

    def _find_corruption(self, failure: Failure) -> None:
        """Go back to the newest file from before a corruption, or to the begin if that is not kept."""
        found = [each for each in self.corrupt if each[0] is failure]
        if not found:
            return
        _, clean, n_files = found[0]
        keep = self.job.checkpoints.keep if self.job.checkpoints else None
        is_kept = keep is None or self.steps.n_usable - n_files < keep
        self._restart(failure, clean if is_kept else 0)

    def _flap(self, failure: Failure) -> None:
        """Let a link lose its rate for a while; evict its node after too many alerts."""
        if parts_of.is_blocked(self.failures, failure):
            self._lose(failure)
        elif self._is_evicted(failure):
            self._plan(failure)
        else:
            if not self.cause_of(failure).share:
                self._strike(failure, None)
            self._begin_flap(failure)

    def _is_evicted(self, failure: Failure) -> bool:
        """Count an alert; tell whether there were too many."""
        alerts = self.failures.recovery.alerts
        if alerts is None:
            return False
        now_s = self.steps.now_s
        recent = [at_s for at_s in self.flaps.get(failure.first_node, ()) if at_s >= now_s - alerts.within_s]
        self.flaps[failure.first_node] = [*recent, now_s]
        return len(recent) + 1 >= alerts.count

    def _begin_flap(self, failure: Failure) -> None:
        cause = self.cause_of(failure)
        assert cause.lasts_s is not None
        self.after(self.steps.now_s + cause.lasts_s, partial(self._heal, failure))
        if cause.share:
            self._slow_down(failure)
        else:
            self.blocked[_key(failure)] = failure, self.steps.still_s
            self._set_pace()

    def _heal(self, failure: Failure) -> None:
        """End a flap, unless its node is gone."""
        if self.cause_of(failure).share:
            self._speed_up(failure)
        elif found := self.blocked.pop(_key(failure), None):
            self._set_pace()
            self._charge(failure, "step_time_deviation", self.steps.still_s - found[1])

    def _plan(self, failure: Failure) -> None:
        """Interrupt the job as announced, or to replace a node; without files or time to write one, steps repeat."""
        steps = self.steps
        notice_s = self.cause_of(failure).notice_s
        closing_s = steps.closing_s()
        others_go_on = self._others_go_on(failure)
        can_save = closing_s < math.inf and (notice_s is None or closing_s <= notice_s)
        if others_go_on or (notice_s is not None and not can_save):
            self.leaving.update((_key(each), each) for each in (failure, *self.beside))
            self.beside = ()
            if others_go_on:
                self.at_step(self._next_average(), _LEAVE, partial(self._leave_at_average, failure))
            if notice_s is not None:
                self.after(steps.now_s + notice_s, partial(self._interrupt, failure))
        elif not can_save:
            self._restart(failure, self._usable(failure))
        elif steps.now_s + closing_s > self.horizon_s:
            steps.advance(self.horizon_s)
        else:
            steps.close()
            if not steps.has_done(self._n_steps):
                self._restart(failure, steps.done)

    def _interrupt(self, failure: Failure) -> None:
        """Interrupt the job at the end of a notice, unless replicas have left or the attempt has ended meanwhile."""
        if self.leaving.pop(_key(failure), None):
            self._lose(failure)

    def _lose(self, failure: Failure) -> None:
        """Lose processes or nodes at once."""
        if self._others_go_on(failure):
            self._leave(failure)
        else:
            self._restart(failure, self._usable(failure))

    def _usable(self, failure: Failure) -> int:
        """Return the steps from which the job can go on after losing what a failure hits, and those beside it."""
        return min(map(self._usable_after, (failure, *self.beside)))

    def _usable_after(self, failure: Failure) -> int:
        self._lose_files(failure)
        self.stateless.update(self.absent, self._replicas(failure))
        if self.failures.recovery.state == "replica" and len(self.stateless) < self.job.n_replicas:
            return self.steps.done
        return self.steps.newest or 0

    def _lose_files(self, failure: Failure) -> None:
        """Lose the files of which nothing is left once the nodes that a failure hits are gone, too."""
        files = self.job.checkpoints
        cause = self.cause_of(failure)
        goes_away = cause.is_of_node or (cause.effect == "planned" and cause.of in ("node", "domain"))
        if files is None or not goes_away:
            return
        self._lose_copies(failure)
        pair_is_gone = any((node + 1) % self.job.n_nodes in self.copies_gone for node in self.copies_gone)
        if files.survives == "process" or (files.survives == "node" and pair_is_gone):
            self.steps.forget_files()
            self.corrupt = [(each, 0, n_files) for each, _, n_files in self.corrupt]

    def _lose_copies(self, failure: Failure) -> None:
        """Note the nodes whose memory has been lost since the newest file was written."""
        newest = self.steps.newest or 0
        if newest > self.copies_of:
            self.copies_gone.clear()
        self.copies_of = newest
        self.copies_gone.update(range(failure.first_node, failure.first_node + failure.n_nodes))

    # ---------------------------------------------------------------- restart

    def _restart(self, failure: Failure, resume: int) -> None:
        """End the attempt, recover, and begin the next one at a step."""
        for each in (failure, *self.beside):
            self._strike(each, resume)
        self.to_replace += self.beside
        self.beside = []
        self._end_attempt(self.cause_of(failure).cause)
        self._forget(failure, resume)
        self._recover(failure)

    def _recover(self, failure: Failure) -> None:
        """Go through the recovery from a failure, and from those that come meanwhile, until training goes on."""
        interrupted_by: Failure | None = failure
        while interrupted_by is not None and not self.is_over:
            failure = interrupted_by
            interrupted_by = self._go_through(failure, self._recovery(failure))
            if interrupted_by is not None:
                self._forget(interrupted_by, min(self.steps.done, self._usable(interrupted_by)))
        if not self.is_over:
            self._resume()

    def _forget(self, failure: Failure, resume: int) -> None:
        """Go back to a step, and take everything that ends with the ranks as ended."""
        n_done = self.steps.done
        self._charge(failure, "wasted_progress", self.steps.go_back(resume))
        self.n_repeated += n_done - resume
        self.corrupt = [each for each in self.corrupt if each[1] < resume]
        self.to_replace += self.leaving.values()
        self.leaving.clear()
        self.to_form.clear()
        self._end_absences(self.absent, n_done)
        self.stateless.update(self.absent)
        self.absent.clear()
        self._set_pace()
        self.n_in_vain = 0 if resume > self.most_resumed else self.n_in_vain + 1
        self.most_resumed = max(self.most_resumed, resume)
        if self.job.n_steps is not None and self.n_in_vain >= _MOST_IN_VAIN:
            self._give_up(failure)

    def _recovery(self, failure: Failure) -> Iterator[TimedPart]:
        """Yield the parts of a recovery of all ranks, which waits for all nodes."""
        self.to_replace.append(failure)
        yield from parts_of.finding(self.failures, failure)
        now_s = self.steps.now_s
        there_s = max(self._replaced(each, now_s) for each in self.to_replace)
        self.to_replace.clear()
        self.all_there_s = max(self.all_there_s, there_s)
        yield "infrastructure_recovery", self.all_there_s - now_s
        yield from self._starting(failure)

    def _starting(self, failure: Failure) -> Iterator[TimedPart]:
        """Yield the parts from the moment when all nodes are there."""
        recovery = self.failures.recovery
        starting = parts_of.starting(recovery, self.job.n_ranks, self._load_s() if self.steps.done else 0.0)
        yield from parts_of.tried(recovery, starting, failure, self.chances)
        yield parts_of.warming_up(recovery)

    def _load_s(self) -> float:
        """Return how long ranks take to get the state that they go on from."""
        files = self.job.checkpoints
        stated_s = self.failures.recovery.load_s
        return stated_s if stated_s is not None else files.load_s if files else 0.0

    def _replaced(self, failure: Failure, from_s: float) -> float:
        """Replace nodes from a time on if a failure asks for it; return when all of its nodes are there."""
        cause = self.cause_of(failure)
        hit = range(failure.first_node, failure.first_node + failure.n_nodes)
        can_stay = cause.effect in ("process", "hang") and not self.nodes.is_excluded(failure)
        if can_stay or cause.effect == "corruption":
            if cause.again:
                self.defects[failure.first_node if failure.n_nodes == 1 else -1] = failure
            return from_s
        is_away = cause.effect == "planned"
        if is_away and not (cause.of == "node" and self.nodes.n_spares):
            there_s = from_s + (cause.lasts_s or 0.0)
        else:
            self._forget_nodes(hit)
            self._lose_copies(failure)
            back_after_s = cause.lasts_s if is_away else self.failures.recovery.repair_s
            there_s = from_s + self.nodes.replace(failure, from_s, back_after_s=back_after_s)
        self.away_until_s.update(dict.fromkeys(hit, there_s))
        return there_s

    def _forget_nodes(self, nodes: range) -> None:
        """Take what was known of nodes as ended: others take their places."""
        for node in nodes:
            self.defects.pop(node, None)
            self.flaps.pop(node, None)
        self.leaving = {key: each for key, each in self.leaving.items() if each.first_node not in nodes}
        for each in [each for each in self.slow.values() if each.first_node in nodes]:
            self._speed_up(each)
        for each, _ in [flap for flap in self.blocked.values() if flap[0].first_node in nodes]:
            self._heal(each)

    def _go_through(self, failure: Failure | None, parts: "list[TimedPart] | Iterator[TimedPart]") -> Failure | None:
        """Spend the time of parts; return the failure that makes them begin anew, if one comes."""
        for category, seconds in parts:
            if seconds == math.inf:
                self._give_up(failure)
                return None
            end_s = self.steps.now_s + seconds
            while self.upcoming.at_s < min(end_s, self.horizon_s):
                other = self.upcoming.pop()
                if self._is_void(other):
                    continue
                self.losses[other.cause].n_failures += 1
                self._spend(failure, category, max(self.steps.now_s, other.at_s))
                if self._begins_anew(other):
                    return other
            self._spend(failure, category, min(end_s, self.horizon_s))
            if end_s >= self.horizon_s:
                self.is_over = True
                return None
        return None

    def _begins_anew(self, failure: Failure) -> bool:
        """Let a failure hit a job that is down; tell whether the recovery begins anew."""
        match self.cause_of(failure).effect:
            case "slow":
                self._begin_unnoticed(failure)
                return False
            case "flap" if not (parts_of.is_blocked(self.failures, failure) or self._is_evicted(failure)):
                self._begin_flap(failure)
                return False
            case "corruption":  # no rank has a state
                return False
        return True

    def _give_up(self, failure: Failure | None) -> None:
        """End the job; its machines wait until the time is over, if it has a time."""
        self.gave_up = True
        self.is_over = True
        if self.horizon_s < math.inf:
            self._spend(failure, "infrastructure_recovery", self.horizon_s)

    def _spend(self, failure: Failure | None, category: Category, until_s: float) -> None:
        """Let time go by in which the job is down."""
        self._charge(failure, category, until_s - self.steps.now_s)
        self.steps.now_s = until_s

    def _charge(self, failure: Failure | None, category: Category, seconds: float) -> None:
        """Count seconds."""
        into = self.own_s if failure is None else self.losses[failure.cause].seconds
        into[category] = into.get(category, 0.0) + seconds

    def _resume(self) -> None:
        """Begin the first step of an attempt."""
        self.n_attempts += 1
        self.first_step_s = self.steps.now_s
        self.first_step = self.steps.done
        self.stateless.clear()
        self._show_defects(range(self.job.n_replicas))

    def _show_defects(self, started: Iterable[int]) -> None:
        """Let failures come back in replicas that have just started, or never again."""
        for key, failure in list(self.defects.items()):
            if not {*started} & {*self._replicas(failure)}:
                continue
            again = self.cause_of(failure).again
            assert again is not None
            if self.chances.next(failure) < again.probability:
                at_s = self.steps.now_s + again.after_s
                self.defects[key] = replace(failure, at_s=at_s)
                self.after(at_s, partial(self._fail_again, key, self.defects[key]))
            else:
                del self.defects[key]

    def _fail_again(self, key: int, failure: Failure) -> None:
        """Let a failure come back, unless its ranks have started again since or its node was replaced."""
        if self.defects.get(key) is failure and not self._is_absent(failure):
            self.fail(failure)

    # ---------------------------------------------------------------- with a replica less

    def _replicas(self, failure: Failure) -> range:
        """Return the replicas that a failure hits."""
        size = self.job.ranks_per_replica or self.job.n_ranks
        if self.cause_of(failure).of == "gpu" and not self.cause_of(failure).is_of_node:
            return range(failure.rank // size, failure.rank // size + 1)
        first = failure.first_node * self.job.gpus_per_node
        last = first + failure.n_nodes * self.job.gpus_per_node - 1
        return range(first // size, last // size + 1)

    def _others_go_on(self, failure: Failure) -> bool:
        """Tell whether the other replicas go on without those that a failure hits."""
        if self.failures.on_failure != "continue":
            return False
        return len({*self.absent, *self._replicas(failure)}) < self.job.n_replicas

    def _is_absent(self, failure: Failure) -> bool:
        """Tell whether all replicas that a failure hits are absent, so that the others do not notice it."""
        return bool(self.absent) and self.absent.keys() >= {*self._replicas(failure)}

    def _leave_at_average(self, failure: Failure) -> None:
        """Let replicas leave as announced: after the next average, so that nothing is lost."""
        if self.leaving.pop(_key(failure), None) is None:
            return
        if not self._others_go_on(failure):
            self._plan(failure)
            return
        was_absent = self._is_absent(failure)
        self._return_later(failure, self.steps.done)
        if not was_absent:
            self._strike(failure, self.steps.done, leaves=True)
            self._form_at(self.steps.done, failure, self.steps.now_s)

    def _leave(self, failure: Failure) -> None:
        """Lose replicas at once; the others notice it at the next average, or later, and then average without them."""
        steps = self.steps
        self._lose_files(failure)
        n_leaving = len([each for each in self._replicas(failure) if each not in self.absent])
        _, unnoticed_s = parts_of.finding(self.failures, failure)[0]
        every = self.job.average_every
        begin = max(steps.done // every * every, self.first_step)
        lost_samples = (steps.position - begin) * n_leaving / self.job.n_replicas
        if n_leaving:
            self._strike(failure, None, leaves=True)
            next_average = math.floor(steps.position / every) * every + every
            self._form_at(next_average, failure, steps.now_s + unnoticed_s)
        self._return_later(failure, begin, lost_samples=lost_samples)

    def _next_average(self) -> int:
        """Return the step after which replicas meet next; the present one if they meet now."""
        every = self.job.average_every
        return math.ceil(self.steps.position / every) * every

    def _form_at(self, step: int, failure: Failure, noticed_s: float) -> None:
        """Let the others form their groups again after a step, once they know who has left."""
        self.to_form.append((failure, noticed_s))
        self.at_step(step, _FORM, partial(self._form_again, self.n_attempts))

    def _form_again(self, n_attempts: int) -> None:
        """Wait until the others know of all that have left, and form their groups without them."""
        if n_attempts != self.n_attempts:
            return
        for failure, noticed_s in self.to_form:
            self._pause(failure, "infrastructure_recovery", noticed_s - self.steps.now_s)
        if self.to_form:
            failure, _ = self.to_form[-1]
            self._pause(failure, *self._connecting())
        self.to_form.clear()

    def _connecting(self) -> TimedPart:
        """Return the part in which the replicas that are there form their groups."""
        n_ranks = self.job.n_ranks * (self.job.n_replicas - len(self.absent)) // self.job.n_replicas
        return parts_of.starting(self.failures.recovery, n_ranks, 0.0)[1]

    def _pause(self, failure: Failure, category: Category, seconds: float) -> None:
        """Let all ranks wait."""
        if seconds > 0:
            self._spend(failure, category, min(self.steps.now_s + seconds, self.horizon_s))

    def _return_later(self, failure: Failure, first_step: int, *, lost_samples: float = 0.0) -> None:
        """Begin the recovery of the replicas that a failure hit, beside the training of the others.

        Args:
            failure: It.
            first_step: The first step that counts without them.
            lost_samples: What is lost with them.
        """
        recovery = self.failures.recovery
        finding_s = math.fsum(seconds for _, seconds in parts_of.finding(self.failures, failure))
        there_s = max(self._replaced(failure, self.steps.now_s + finding_s), self._all_back_s(failure))
        self.all_there_s = max(self.all_there_s, there_s)
        starting = [parts_of.starting(recovery, self.job.n_ranks, 0.0)[0], parts_of.warming_up(recovery)]
        ready_s = there_s + math.fsum(s for _, s in parts_of.tried(recovery, starting, failure, self.chances))
        self.n_timers += 1
        for each in self._replicas(failure):
            self.absent[each] = self.n_timers
            self.absent_from.setdefault(each, first_step)
        self._set_pace(lost_samples=lost_samples)
        if ready_s < math.inf:
            self.after(ready_s, partial(self._is_ready, failure, self.n_timers))

    def _all_back_s(self, failure: Failure) -> float:
        """Return when the nodes of the replicas that a failure hits are all there, those that were lost before too."""
        hit = self._replicas(failure)
        size = self.job.ranks_per_replica or self.job.n_ranks
        first = hit.start * size // self.job.gpus_per_node
        last = (hit.stop * size - 1) // self.job.gpus_per_node
        return max(self.away_until_s.get(node, 0.0) for node in range(first, last + 1))

    def _is_ready(self, failure: Failure, token: int) -> None:
        """Let replicas that are ready again join at the next average."""
        if token in self.absent.values():
            self.at_step(self._next_average(), _JOIN, partial(self._join, failure, token))

    def _join(self, failure: Failure, token: int) -> None:
        """Take replicas back, which get the state of the others while these wait."""
        if token not in self.absent.values():
            return
        back = [each for each, of_each in self.absent.items() if of_each == token]
        self._end_absences(back, self.steps.done)
        self.absent = {each: of_each for each, of_each in self.absent.items() if of_each != token}
        self._pause(failure, *self._connecting())
        self._pause(failure, "checkpoint_restore", self._load_s())
        self._set_pace()
        self._show_defects(back)

    def _end_absences(self, replicas: Iterable[int], step: int) -> None:
        """Note for how long replicas were absent."""
        for each in replicas:
            self.absences.append(ReplicaAbsence(each, self.absent_from.pop(each), step))

    # ---------------------------------------------------------------- pace and result

    def _slow_down(self, failure: Failure) -> None:
        """Let steps take longer from now on."""
        self.slow[_key(failure)] = failure
        self._set_pace()

    def _speed_up(self, failure: Failure) -> None:
        """Let steps take no longer because of a failure."""
        self.slow.pop(_key(failure), None)
        self._set_pace()

    def _set_pace(self, *, lost_samples: float = 0.0) -> None:
        """Set the pace by who is absent, and by what makes the others slow or stand still."""
        factor = 1.0
        cause = None
        for failure in self.slow.values():
            of_cause = self.cause_of(failure)
            slower = of_cause.factor or self.job.slowed[of_cause.cause]
            if slower > factor and not self._is_absent(failure):
                factor = slower
                cause = failure.cause
        self.steps.is_still = not all(self._is_absent(each) for each, _ in self.blocked.values())
        share = 1.0 - len(self.absent) / self.job.n_replicas
        pace = Pace(self.step_s * factor, share, cause, factor)
        self.steps.set_pace(pace, lost_samples=lost_samples)

    def _end(self) -> None:
        self.is_over = True
        self._end_attempt(None)

    def _end_attempt(self, cause: str | None) -> None:
        steps = self.steps
        self.observe(Attempt(self.begin_s, self.first_step_s, steps.now_s, self.first_step, steps.done, cause))
        self.begin_s = steps.now_s

    def _result(self) -> Goodput:
        """Add up where the time went."""
        steps = self.steps
        calm_s = self.job.step_s if self.job.calm_step_s is None else self.job.calm_step_s
        kept_s, samples = steps.stretches[-1].at(steps.position)
        self._charge_slow_steps()
        self._end_absences(self.absent, steps.done)
        seconds: _Seconds = dict.fromkeys(CATEGORIES, 0.0)
        for into in (self.own_s, *(each.seconds for each in self.losses)):
            for category, of_category_s in into.items():
                seconds[category] += of_category_s
        seconds["productive"] = samples * calm_s
        seconds["absent_replicas"] = (steps.position - samples) * calm_s
        seconds["step_time_deviation"] = kept_s - steps.position * calm_s + steps.still_s
        seconds["checkpoint_save"] += steps.save_s
        return Goodput(
            seconds=seconds,
            by_cause={cause.cause: each for cause, each in zip(self.failures.causes, self.losses, strict=True)},
            total_s=steps.now_s,
            n_steps=steps.done,
            n_samples_share=samples / steps.position if steps.position else 1.0,
            n_repeated=self.n_repeated,
            n_attempts=self.n_attempts,
            gave_up=self.gave_up,
            absences=tuple(self.absences),
        )

    def _charge_slow_steps(self) -> None:
        """Count what steps that count took longer because of a cause."""
        ends = [each.begin for each in self.steps.stretches[1:]] + [self.steps.position]
        for stretch, end in zip(self.steps.stretches, ends, strict=True):
            if stretch.pace.cause is not None:
                longer_s = (end - stretch.begin) * stretch.pace.step_s * (1 - 1 / stretch.pace.factor)
                seconds = self.losses[stretch.pace.cause].seconds
                seconds["step_time_deviation"] = seconds.get("step_time_deviation", 0.0) + longer_s
