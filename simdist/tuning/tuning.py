"""Find the fastest schedule for a scenario, and say whether to change to it.

First search all candidates with a few seeds. Then simulate the finalists again, with seeds that the search has not
seen. Only the second numbers are reported as results.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simdist.engines.run import rare_collections
from simdist.errors import ScenarioError
from simdist.runs.building import Built, in_steps
from simdist.runs.memory import not_counted
from simdist.scenario import AnyScenario, Scenario, load
from simdist.scenario.checkpoint import CheckpointSettings
from simdist.scenario.sampling import run_seeds
from simdist.schedules import Schedule, Sync
from simdist.settings.base import plural, unchecked_copy
from simdist.settings.units import format_nbytes, format_seconds
from simdist.studies import measuring
from simdist.studies.comparison import find_baseline, find_label, steps_in
from simdist.studies.draws import with_draws
from simdist.studies.known_delays import corrected
from simdist.studies.measuring import ScheduleTimes
from simdist.studies.resampling import longest_period, runs_of
from simdist.studies.statistics import TIMES_OF_DRAWS
from simdist.tuning.answer import Searched, Tuned, as_searched
from simdist.tuning.bounds import least_chain_step_s, least_step_s
from simdist.tuning.candidates import Candidate, Extras
from simdist.tuning.constraints import Constraints, broken
from simdist.tuning.evaluating import Evaluated, Evaluator, TooSlow, finalists, measure_finalists
from simdist.tuning.searching import search
from simdist.tuning.space import Progress, Space, space
from simdist.tuning.verdict import verdict

#: Up to this many candidates are all tried, unless the user sets another number.
_MOST_EXHAUSTIVE = 200

_SEEDS = 20
_SEEDS_OF_A_RECORDING = 200
_GLOBAL_EVERY = 8
_EVALUATIONS = 100  # if there are more candidates than that


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Request for a search.

    Args:
        constraints: Limits that a schedule must keep to.
        extras: The schedules that may be tried.
        baseline: Label or kind of the schedule that the others are compared with. None: the scenario's first.
        n_seeds: Seeds of the finalists. If absent, 20, or 200 if a recording is resampled: the spread of single runs
            gives the uncertainty, and a few runs estimate it only roughly.
        n_search_seeds: Seeds of the search.
        evaluations: Most candidates to evaluate; all if there are no more. None: all if there are few, 100 if many.
        seed: Seed of the search's sampler.
        counts_failures: Whether the time of the whole job per step that counts decides, and not that of a step.
    """

    constraints: Constraints
    extras: Extras = field(default_factory=Extras)
    baseline: str | None = None
    n_seeds: int | None = None
    n_search_seeds: int = 5
    evaluations: int | None = None
    seed: int = 0
    counts_failures: bool = False

    @property
    def per(self) -> Literal["step", "micro-batch"]:
        """The unit of compared times."""
        return "micro-batch" if self.extras.micro_batches else "step"

    def budget(self, n_candidates: int) -> int | None:
        """Return the number of candidates to evaluate; None: all."""
        return None if n_candidates <= (self.evaluations or _MOST_EXHAUSTIVE) else self.evaluations or _EVALUATIONS


@rare_collections()
def simulate_candidates(
    scenario: Scenario, wanted: TuneOptions, *, skips: bool = True, progress: Progress | None = None
) -> Searched:
    """Simulate candidates with the seeds of the search: all, or as many as the budget allows.

    Ctrl-C ends the search. The candidates simulated so far are then the result, unless there are none.

    Args:
        scenario: The scenario to tune. Its recorded disturbances are resampled.
        wanted: The request.
        skips: Whether to skip candidates whose step times are surely too long for a finalist.
        progress: See `Progress`.

    Raises:
        ScenarioError: No candidate is legal, global exchanges may be further apart than the scenario has steps, memory
            is limited but counted in part only, or the budget is too small for all without Optuna.
        PlanError: The baseline does not fit the cluster.
    """
    base = _baseline_of(scenario, wanted.baseline)
    _check_failures(scenario, wanted)
    files = scenario.checkpoint
    scenario = as_searched(scenario, counts_failures=wanted.counts_failures)
    scenario = in_steps(scenario, base)  # files are as many steps apart under every schedule
    constraints = wanted.constraints
    _check_global_every(scenario, constraints.global_every)
    _check_memory(scenario, constraints.memory_nbytes)
    own = longest_period(scenario, [base])
    found = space(runs_of(scenario, constraints.global_every).scenario, constraints, wanted.extras, progress=progress)
    between = wanted.extras.checkpoint_every
    runs = runs_of(scenario, max(found.longest_gap, own), checkpoint_every=max(between, default=0))
    drawn = runs.scenario
    budget = wanted.budget(len(found.candidates))
    n_seeds = wanted.n_search_seeds if drawn.is_random else 1

    def n_parts(its: Scenario) -> int:
        return 1 if wanted.per == "step" else its.workload.micro_batches

    def times_s(its: Scenario, built: Built) -> NDArray[np.float64]:
        if wanted.counts_failures:
            return _job_s(unchecked_copy(its, checkpoint=files), built, n_step_seeds=n_seeds) / n_parts(its)
        return measuring.step_times_s(its, built, n_seeds=n_seeds) / n_parts(its)

    def by_lanes_s(its: Scenario, built: Built) -> float:
        return least_step_s(built.plan, built.costs) / n_parts(its)

    def by_chains_s(its: Scenario, built: Built) -> float:
        return least_chain_step_s(built.plan, built.costs) / n_parts(its)

    bounds = (by_lanes_s, by_chains_s) if skips and not wanted.counts_failures else ()
    failures = scenario.failures if wanted.counts_failures else None
    evaluator = Evaluator(runs, constraints, times_s, bounds, failures)
    baseline = evaluator.baseline(base)
    tried, is_complete = _tried(found, evaluator, budget, wanted.seed, progress)
    evaluated = tuple(each for each in tried if isinstance(each, Evaluated))
    too_slow = tuple(each for each in tried if isinstance(each, TooSlow))
    n_illegal = found.n_illegal + evaluator.n_illegal
    excluded = found.excluded + evaluator.excluded
    if not (evaluated or excluded):
        raise _none_is_legal(drawn, n_illegal, found.refusal or evaluator.refusal)
    is_broken = not evaluated and broken(baseline.facts, constraints)
    nearest = evaluator.nearest(found.broken) if is_broken else None
    n_candidates = len(found.candidates)
    return Searched(runs, baseline, evaluated, too_slow, nearest, n_candidates, excluded, n_illegal, is_complete)


def _tried(
    known: Space, evaluator: Evaluator, budget: int | None, seed: int, progress: Progress | None
) -> tuple[list[Evaluated | TooSlow], bool]:
    """Search a space; return what was tried, and whether the search came to its end."""
    n_candidates = len(known.candidates)
    n_expected = n_candidates if budget is None else min(budget, n_candidates)
    so_far: dict[int, Evaluated | TooSlow] = {}  # by identity: equal plans share one
    n_priced = count()
    n_evaluated = count()

    def least_s(candidate: Candidate) -> float:
        if progress:
            progress("lower bounds", next(n_priced), n_candidates)
        return evaluator.least_s(candidate)

    def evaluate(candidate: Candidate) -> Evaluated | TooSlow | None:
        if progress:
            n_settled = next(n_evaluated) + evaluator.n_passed_over
            progress(_best_so_far(so_far.values()), n_settled if budget is None else len(so_far), n_expected)
        found = evaluator.evaluate(candidate)
        if found is not None:
            so_far[id(found)] = found
        return found

    try:
        return search(known, evaluate, least_s=least_s, budget=budget, seed=seed), True
    except KeyboardInterrupt:
        if not so_far:
            raise
        return list(so_far.values()), False


def _best_so_far(tried: Collection[Evaluated | TooSlow]) -> str:
    """Return the name of the stage of progress, with the fastest candidate so far."""
    evaluated = [each for each in tried if isinstance(each, Evaluated)]
    if not evaluated:
        return "search"
    best = min(evaluated, key=lambda each: each.step_s)
    return f"search, best so far {best.schedule.name}, {format_seconds(best.step_s)}"


def _check_memory(scenario: Scenario, limit_nbytes: float) -> None:
    """Refuse a limit of memory that is counted in part only."""
    in_part = not_counted(scenario.workload)
    if in_part and math.isfinite(limit_nbytes):
        raise ScenarioError(f"{scenario.name}: --memory '{format_nbytes(limit_nbytes)}': {in_part}")


def usual_global_every(scenario: Scenario, baseline: str | None) -> int:
    """Return the most steps between exchanges of all ranks if the user sets none: 8, or as many as the baseline has.

    Raises:
        ScenarioError: See `_baseline_of`.
    """
    own = longest_period(scenario, [_baseline_of(scenario, baseline)])
    return min(scenario.steps, max(_GLOBAL_EVERY, own))


def _check_global_every(scenario: Scenario, global_every: int) -> None:
    """Refuse periods that do not fit into the steps."""
    if global_every > scenario.steps:
        raise ScenarioError(
            f"{scenario.name}: --global-every {global_every}: the scenario has {scenario.steps:,} "
            f"{plural(scenario.steps, 'step')}, so all ranks might never exchange: write {scenario.steps} or less, or "
            f"more steps"
        )


@rare_collections()
def tune(scenario: AnyScenario, wanted: TuneOptions | None = None, *, progress: Progress | None = None) -> Tuned:
    """Find the fastest schedule that keeps to the constraints.

    Ctrl-C during the search ends it: see `simulate_candidates`. The finalists are still simulated again.

    Args:
        scenario: The scenario to tune, or what `simdist.scenario.load` takes for one. Its recorded
            disturbances are resampled.
        wanted: The request. None: no limits but `usual_global_every`.
        progress: See `Progress`.

    Raises:
        ScenarioError: See `simulate_candidates`.
        PlanError: See `simulate_candidates`.
    """
    scenario = load(scenario)
    wanted = wanted or TuneOptions(Constraints(usual_global_every(scenario, None)))
    found = simulate_candidates(scenario, wanted, progress=progress)
    drawn = found.runs.scenario
    n_fresh = wanted.n_seeds or (_SEEDS_OF_A_RECORDING if found.runs.recording else _SEEDS)
    is_random = drawn.is_random or wanted.counts_failures
    n_seeds, n_search_seeds = (n_fresh, wanted.n_search_seeds) if is_random else (1, 1)
    fresh = found.runs.from_seed(*run_seeds(drawn.seed, 1, first=n_search_seeds))
    again = [found.nearest] if found.nearest else finalists(found.evaluated, found.baseline.schedule)

    def measure_again(its: Scenario, built: Built) -> ScheduleTimes:
        if progress:
            progress(f"fresh seeds: {built.schedule.name}", next(numbers), len(again) + 1)
        return _simulated(wanted, its, built, n_seeds, scenario.checkpoint)

    numbers = iter(range(len(again) + 1))
    shown = measure_finalists(fresh, wanted.constraints, found.baseline, again, measure_again)
    return Tuned(
        scenario,
        wanted.constraints,
        fresh,
        tuple(shown),
        verdict(fresh, shown),
        found,
        wanted.per,
        counts_failures=wanted.counts_failures,
    )


def _simulated(
    wanted: TuneOptions, scenario: Scenario, built: Built, n_seeds: int, files: CheckpointSettings | None
) -> ScheduleTimes:
    found = measuring.measure(scenario, built, n_seeds=n_seeds)
    if wanted.counts_failures:
        found = _of_job(corrected(scenario, built, found), unchecked_copy(scenario, checkpoint=files), built, n_seeds)
    else:
        found = corrected(scenario, built, with_draws(scenario, built, found, quiet=True))
    return found if wanted.per == "step" else found.divided(scenario.workload.micro_batches)


def _of_job(found: ScheduleTimes, whole: Scenario, built: Built, n_seeds: int) -> ScheduleTimes:
    """Return the times of a schedule with the seconds of the whole job per step that counts as its step times."""
    from simdist.studies.drawn_failures import drawn_job, draws_for
    from simdist.studies.suffering import steady, suffer

    failures = whole.failures
    assert failures is not None
    steps = partial(steps_in, schedule=built.schedule, n_seeds=n_seeds)
    trained = steady(whole, built.schedule, steps, draws=True)
    job_s = np.asarray(1 / suffer(failures, trained, run_seeds(whole.seed, n_seeds)).trained_per_s)
    job = drawn_job(draws_for(whole, [trained]), failures.on_failure, trained)
    drawn = {}
    if job is not None:
        stated_s = np.full(len(job.trained), job_s.mean())
        drawn = {**dict(zip(TIMES_OF_DRAWS, (stated_s / job.trained, stated_s), strict=True)), **job.places}
    return replace(found, step_s=job_s, drawn=drawn, uncorrected=None, unseen_s=0.0)


def _job_s(scenario: Scenario, built: Built, *, n_step_seeds: int) -> NDArray[np.float64]:
    """Return the seconds of the whole job per step that counts, with enough failures for a search, `[n_seeds]`.

    Args:
        scenario: The scenario, with failures.
        built: One of its schedules.
        n_step_seeds: Seeds of the steps.
    """
    from simdist.studies.suffering import for_search, steady, suffer

    failures = scenario.failures
    assert failures is not None
    trained = steady(scenario, built.schedule, partial(steps_in, schedule=built.schedule, n_seeds=n_step_seeds))
    return np.asarray(1 / suffer(failures, *for_search(scenario, failures, trained)).trained_per_s)


def _check_failures(scenario: Scenario, wanted: TuneOptions) -> None:
    """Refuse to count failures if there are none, or no end of the job."""
    if not wanted.counts_failures:
        return
    if scenario.failures is None or scenario.train_for is None:
        lacks = "failures" if scenario.failures is None else "train_for"
        raise ScenarioError(f"{scenario.name}: --failures: the scenario has no {lacks}: write it")
    if wanted.extras.checkpoint_every or wanted.extras.checkpoint_mode:
        why = "this search tells schedules apart by steps without files, so that it would find no difference"
        hint = "`simdist goodput` finds the best interval, and `simdist sweep` compares modes"
        raise ScenarioError(f"{scenario.name}: --failures with --checkpoint-every or --checkpoint-mode: {why}: {hint}")


def _baseline_of(scenario: Scenario, name: str | None) -> Schedule:
    """Return the schedule of that label or kind; the scenario's first if no name is given.

    A scenario without synchronous SGD can still be compared with its default: `sync`. If it was imported from a job
    with a sharded model, `sync` stands for the schedule of the job.
    """
    if name is None:
        return scenario.schedules[0]
    found = find_label([(schedule.name, schedule.kind) for schedule in scenario.schedules], name)
    is_absent = found is None and name == "sync" and scenario.traced_sharding is None
    return Sync() if is_absent else find_baseline(scenario, name)


def _none_is_legal(scenario: Scenario, n_illegal: int, refusal: str) -> ScenarioError:
    why = f"; the first: {refusal}" if refusal else ""
    return ScenarioError(f"{scenario.name}: none of {n_illegal} candidates is legal on this cluster{why}")
