"""Find the fastest schedule for a scenario, and say whether to change to it.

First search all candidates with a few seeds. Then simulate the finalists again, with seeds that the search has not
seen. Only the second numbers are reported as results.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from simdist.errors import ScenarioError
from simdist.runs.building import Built, in_steps
from simdist.scenario import AnyScenario, Scenario, load
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

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

#: Up to this many candidates are all tried, unless the user sets another number.
MOST_EXHAUSTIVE = 200

_SEEDS = 20
_SEEDS_OF_A_RECORDING = 200
_EVALUATIONS = 100  # if there are more candidates than that
_LONGEST_PERIOD = 1_000  # longest period tried if the scenario has no more steps: runs are ten times as long

#: Called with the name of the stage, the amount done, and the total.
Progress = Callable[[str, float, float], None]


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Request for a search.

    Args:
        constraints: Limits that a schedule must keep to.
        extras: The schedules that may be tried.
        baseline: Label or kind of the schedule that the others are compared with.
        n_seeds: Seeds of the finalists. If absent, 20, or 200 if a recording is resampled: the spread of single runs
            gives the uncertainty, and a few runs estimate it only roughly.
        n_search_seeds: Seeds of the search.
        evaluations: Most candidates to evaluate; all if there are no more. None: all if there are few, 100 if many.
        seed: Seed of the search's sampler.
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
        """The unit of compared times."""
        return "micro-batch" if self.extras.micro_batches else "step"

    def budget(self, n_candidates: int) -> int | None:
        """Return the number of candidates to evaluate; None: all."""
        return None if n_candidates <= (self.evaluations or MOST_EXHAUSTIVE) else self.evaluations or _EVALUATIONS


@dataclass(frozen=True)
class Searched:
    """Result of the first part of a search: candidates, simulated with the seeds of the search.

    Args:
        runs: The runs of the simulation.
        baseline: The schedule that they are compared with.
        evaluated: Different plans, including the baseline if it is a candidate.
        n_candidates: Legal candidates that keep to the constraints on exchanges.
        excluded: Number of candidates that each constraint excluded.
        n_illegal: Number of candidates that the schedules or the scenario refused.
    """

    runs: Runs
    baseline: Evaluated
    evaluated: tuple[Evaluated, ...]
    n_candidates: int
    excluded: Counter[str]
    n_illegal: int

    @property
    def n_evaluated(self) -> int:
        """Number of different plans that were simulated."""
        return len(self.evaluated)


@dataclass(frozen=True)
class Tuned:
    """Result of a search.

    Args:
        runs: The runs of the finalists.
        finalists: The finalists, including the baseline; the fastest first.
        verdict: Whether to change, and why.
        search: Results of the search.
        per: Unit of times: seconds per step, or per micro-batch.
    """

    runs: Runs
    finalists: tuple[Finalist, ...]
    verdict: Verdict
    search: Searched
    per: Literal["step", "micro-batch"] = "step"

    def frame(self) -> "pd.DataFrame":
        """Return a row per finalist, with the columns of `simdist.studies.comparison.frame`, the fastest first."""
        return comparison.frame([each.row for each in self.finalists])

    def plot(self) -> "Figure":
        """Draw the speed-ups of the finalists, and where their step time goes."""
        from simdist import plot

        return plot(self)

    def _repr_html_(self) -> str:
        from simdist import html_of

        return html_of(self)


def simulate_candidates(scenario: Scenario, wanted: TuneOptions, *, progress: Progress | None = None) -> Searched:
    """Simulate candidates with the seeds of the search: all, or as many as the budget allows.

    Args:
        scenario: The scenario to tune. Its recorded disturbances are resampled.
        wanted: The request.
        progress: See `Progress`.

    Raises:
        ScenarioError: No candidate keeps to the constraints, or the budget is too small for all without Optuna.
        PlanError: The baseline does not fit the cluster.
    """
    base = baseline_of(scenario, wanted.baseline)
    scenario = in_steps(scenario, base)  # files are as many steps apart under every schedule
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

    def times_s(its: Scenario, built: Built) -> NDArray[np.float64]:
        n_parts = 1 if wanted.per == "step" else its.workload.micro_batches
        return comparison.step_times_s(its, built, n_seeds=n_seeds) / n_parts

    evaluator = Evaluator(runs, wanted.constraints, times_s)

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


def tune(scenario: AnyScenario, wanted: TuneOptions, *, progress: Progress | None = None) -> Tuned:
    """Find the fastest schedule that keeps to the constraints.

    Args:
        scenario: The scenario to tune, or what `simdist.scenario.load` takes for one. Its recorded
            disturbances are resampled.
        wanted: The request.
        progress: See `Progress`.

    Raises:
        ScenarioError: See `simulate_candidates`.
        PlanError: See `simulate_candidates`.
    """
    found = simulate_candidates(load(scenario), wanted, progress=progress)
    drawn = found.runs.scenario
    n_fresh = wanted.n_seeds or (_SEEDS_OF_A_RECORDING if found.runs.recording else _SEEDS)
    n_seeds, n_search_seeds = (n_fresh, wanted.n_search_seeds) if drawn.is_random else (1, 1)
    fresh = found.runs.from_seed(drawn.seed + n_search_seeds)
    again = finalists(found.evaluated)

    def measure_again(its: Scenario, built: Built) -> ScheduleTimes:
        if progress:
            progress(f"fresh seeds: {built.schedule.name}", next(numbers), len(again) + 1)
        return _simulated(wanted, its, built, n_seeds)

    numbers = iter(range(len(again) + 1))
    shown = measure_finalists(fresh, found.baseline, again, measure_again)
    return Tuned(fresh, tuple(shown), verdict(fresh, shown, wanted.constraints), found, wanted.per)


def _simulated(wanted: TuneOptions, scenario: Scenario, built: Built, n_seeds: int) -> ScheduleTimes:
    found = comparison.measure(scenario, built, n_seeds=n_seeds)
    found = with_draws(scenario, built, found)
    return found if wanted.per == "step" else found.divided(scenario.workload.micro_batches)


def baseline_of(scenario: Scenario, name: str) -> Schedule:
    """Return the schedule of that label or kind. If the scenario has none, return default synchronous SGD.

    In a scenario that was imported from a job with a sharded model, `sync` stands for the schedule of the job.

    Raises:
        ScenarioError: There is none, and the name is not `sync`.
    """
    found = find_label([(schedule.name, schedule.kind) for schedule in scenario.schedules], name)
    is_absent = found is None and name == "sync" and scenario.traced_sharding is None
    return Sync() if is_absent else find_baseline(scenario, name)


def _nothing_left(scenario: Scenario, excluded: Counter[str], n_illegal: int, refusal: str) -> ScenarioError:
    """Name the constraint that excluded the most candidates."""
    if not excluded:
        why = f"; the first: {refusal}" if refusal else ""
        return ScenarioError(f"{scenario.name}: none of {n_illegal} candidates is legal on this cluster{why}")
    constraint, most = excluded.most_common(1)[0]
    others = ", ".join(f"{name} {number:,}" for name, number in excluded.most_common()[1:])
    return ScenarioError(
        f"{scenario.name}: no schedule keeps to the constraints: {constraint} excludes most, {most:,} candidates"
        f"{f' ({others})' if others else ''}: loosen it"
    )
