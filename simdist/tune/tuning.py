"""Find the fastest schedule for a scenario, and say whether to change to it.

First a search over all candidates with a few seeds; then the finalists again, with seeds that the search has not seen.
Only the second numbers are shown as results.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from simdist.errors import ScenarioError
from simdist.runs.building import Built
from simdist.scenario import Scenario
from simdist.schedules import Schedule, Sync
from simdist.studies import comparison
from simdist.studies.comparison import ScheduleTimes, find_baseline, find_label, with_draws
from simdist.studies.resampling import Runs, longest_period, runs_of
from simdist.tune.candidates import Candidate, Extras
from simdist.tune.constraints import Constraints
from simdist.tune.evaluating import Evaluated, Evaluator, Finalist, finalists, measure_finalists
from simdist.tune.searching import search
from simdist.tune.space import space
from simdist.tune.verdict import Verdict, verdict

#: Candidates that are all tried unless another number is asked for.
MOST_EXHAUSTIVE = 200

_SEEDS = 20
_SEEDS_OF_A_RECORDING = 200
_EVALUATIONS = 100  # of more candidates than that
_LONGEST_PERIOD = 1_000  # that is tried where the scenario has no more steps: runs are ten times as long

#: Called with what is done, how much of it is done, and how much there is in all.
Progress = Callable[[str, float, float], None]


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Request for a search.

    Args:
        constraints: Limits that a schedule must keep to.
        extras: Which schedules may be tried.
        baseline: Label or kind of the schedule that the others are compared with.
        n_seeds: Seeds of the finalists; if absent 20, or 200 where a recording is resampled: the spread of single runs
            tells how sure it is, and few of them tell that roughly.
        n_search_seeds: Seeds of the search.
        evaluations: Most candidates to evaluate, all if there are no more; None: all of few, 100 of many.
        seed: Of the search's sampler.
    """

    constraints: Constraints
    extras: Extras = field(default_factory=Extras)
    baseline: str = "sync"
    n_seeds: int | None = None
    n_search_seeds: int = 5
    evaluations: int | None = None
    seed: int = 0

    @property
    def per(self) -> Literal["step", "micro-batch"]:
        """Of what times are compared."""
        return "micro-batch" if self.extras.micro_batches else "step"

    def budget(self, n_candidates: int) -> int | None:
        """Return how many of the candidates to evaluate; None: all."""
        return None if n_candidates <= (self.evaluations or MOST_EXHAUSTIVE) else self.evaluations or _EVALUATIONS


@dataclass(frozen=True)
class Searched:
    """What the first part of a search found: candidates, simulated with the seeds of the search.

    Args:
        runs: How they were simulated.
        baseline: The schedule that they are compared with.
        evaluated: Different plans, the baseline too if it is a candidate.
        n_candidates: Legal candidates that meet the demands on exchanges.
        excluded: How many candidates each constraint excluded.
        n_illegal: How many the schedules or the scenario refused.
    """

    runs: Runs
    baseline: Evaluated
    evaluated: tuple[Evaluated, ...]
    n_candidates: int
    excluded: Counter[str]
    n_illegal: int

    @property
    def n_evaluated(self) -> int:
        """Different plans that were simulated."""
        return len(self.evaluated)


@dataclass(frozen=True)
class Tuned:
    """Result of a search.

    Args:
        runs: How the finalists were simulated.
        finalists: The baseline too; the fastest first.
        verdict: Whether to change, and why.
        search: What was simulated before.
        per: Times are seconds per step, or per micro-batch.
    """

    runs: Runs
    finalists: tuple[Finalist, ...]
    verdict: Verdict
    search: Searched
    per: Literal["step", "micro-batch"] = "step"


def simulate_candidates(scenario: Scenario, wanted: TuneOptions, *, progress: Progress | None = None) -> Searched:
    """Simulate candidates with the seeds of the search: all, or as many as the budget allows.

    Args:
        scenario: The scenario to tune. Its recorded disturbances are resampled.
        wanted: The request.
        progress: See `Progress`.

    Raises:
        ScenarioError: No candidate keeps to the constraints, or not all can be tried and Optuna is not installed.
        PlanError: The baseline does not fit the cluster.
    """
    base = baseline_of(scenario, wanted.baseline)
    most = max(scenario.steps, _LONGEST_PERIOD)
    within = replace(wanted.constraints, global_every=min(wanted.constraints.global_every, most))
    longest = max(within.global_every, longest_period(scenario, [base]))
    between = wanted.extras.checkpoint_every
    runs = runs_of(scenario, longest, checkpoint_every=max(between, default=0))
    drawn = runs.scenario
    found = space(drawn, within, wanted.extras)
    budget = wanted.budget(len(found.candidates))
    n_expected = len(found.candidates) if budget is None else min(budget, len(found.candidates))
    n_seeds = wanted.n_search_seeds if drawn.is_random else 1
    evaluator = Evaluator(runs, wanted.constraints, lambda its, built: _simulated(wanted, its, built, n_seeds))

    def evaluate(candidate: Candidate) -> Evaluated | None:
        if progress:
            progress("search", min(evaluator.n_simulated, n_expected), n_expected)
        return evaluator.evaluate(candidate)

    baseline = evaluator.baseline(base)
    evaluated = search(found, evaluate, budget=budget, seed=wanted.seed)
    excluded = found.excluded + evaluator.excluded
    n_illegal = found.n_illegal + evaluator.n_illegal
    if not evaluated:
        raise _nothing_left(drawn, excluded, n_illegal, found.refusal or evaluator.refusal)
    return Searched(runs, baseline, tuple(evaluated), len(found.candidates), excluded, n_illegal)


def tune(scenario: Scenario, wanted: TuneOptions, *, progress: Progress | None = None) -> Tuned:
    """Find the fastest schedule that keeps to the constraints.

    Args:
        scenario: The scenario to tune. Its recorded disturbances are resampled.
        wanted: The request.
        progress: See `Progress`.

    Raises:
        ScenarioError: As of `simulate_candidates`, as `PlanError`.
    """
    found = simulate_candidates(scenario, wanted, progress=progress)
    drawn = found.runs.scenario
    n_fresh = wanted.n_seeds or (_SEEDS_OF_A_RECORDING if found.runs.recording else _SEEDS)
    n_seeds, n_search_seeds = (n_fresh, wanted.n_search_seeds) if drawn.is_random else (1, 1)
    fresh = found.runs.from_seed(drawn.seed + n_search_seeds)
    again = finalists(found.evaluated)

    def measure_again(its: Scenario, built: Built) -> ScheduleTimes:
        if progress:
            progress(f"fresh seeds: {built.schedule.name}", next(numbers), len(again) + 1)
        return _simulated(wanted, its, built, n_seeds, is_drawn=True)

    numbers = iter(range(len(again) + 1))
    shown = measure_finalists(fresh, found.baseline, again, measure_again)
    return Tuned(fresh, tuple(shown), verdict(fresh, shown, wanted.constraints), found, wanted.per)


def _simulated(
    wanted: TuneOptions, scenario: Scenario, built: Built, n_seeds: int, *, is_drawn: bool = False
) -> ScheduleTimes:
    found = comparison.measure(scenario, built, n_seeds=n_seeds)
    found = with_draws(scenario, built, found) if is_drawn else found
    return found if wanted.per == "step" else found.divided(scenario.workload.micro_batches)


def baseline_of(scenario: Scenario, name: str) -> Schedule:
    """Return the schedule of that label or kind; synchronous SGD as it is by default, if the scenario has none.

    Raises:
        ScenarioError: There is none, and it is not `sync`.
    """
    found = find_label([(schedule.name, schedule.kind) for schedule in scenario.schedules], name)
    return Sync() if found is None and name == "sync" else find_baseline(scenario, name)


def _nothing_left(scenario: Scenario, excluded: Counter[str], n_illegal: int, refusal: str) -> ScenarioError:
    """Say which constraint excluded most."""
    if not excluded:
        why = f"; the first: {refusal}" if refusal else ""
        return ScenarioError(f"{scenario.name}: none of {n_illegal} candidates is legal on this cluster{why}")
    constraint, most = excluded.most_common(1)[0]
    others = ", ".join(f"{name} {number:,}" for name, number in excluded.most_common()[1:])
    return ScenarioError(
        f"{scenario.name}: no schedule keeps to the constraints: {constraint} excludes most, {most:,} candidates"
        f"{f' ({others})' if others else ''}: loosen it"
    )
