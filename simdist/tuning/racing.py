"""Search by time to a target: successive halving at equal simulated time, with the free results of simulation.

*Free.* The end of each step of a candidate is known before any training. So of candidates with plans that learn the
same, only the fastest races. All others are compared at the same simulated moment, whatever their numbers of steps.
None is trained beyond the moment at which another one reached the target.

*Rungs.* All candidates are trained for an eighth of the time of the fastest complete run. The best third is trained for
a third of that time. The best third of these is trained to the end or to the best time so far. At least two are left.
Candidates that reached the target rank before those that did not. Others rank by the metric. A rung starts from
scratch.

*Second chances.* A candidate that starts slowly and ends well, as with small learning rates, may be eliminated at the
first rung. The search may spend a third of an exhaustive search's steps. The remaining steps re-train eliminated
candidates to the best time so far, the best first. If they suffice for all, the result is that of an exhaustive search.

Source:
    Jamieson & Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization, AISTATS 2016, arXiv
    1502.07943: successive halving.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np

from simdist.errors import ScenarioError
from simdist.learning.answer import learning_document, learning_text
from simdist.learning.curves import Target
from simdist.learning.summary import Learned, learned_row, remarks_on_learning, train_schedules
from simdist.learning.timing import TimedSchedule, timed
from simdist.learning.training import TaskSetting, Trainer
from simdist.plan import Plan
from simdist.scenario import Scenario
from simdist.scenario.sampling import run_seeds
from simdist.settings.base import picked, plural, unchecked_copy
from simdist.studies.remarks import Remark, remarks_of
from simdist.tuning.constraints import broken
from simdist.tuning.evaluating import front
from simdist.tuning.tuning import TuneOptions, simulate_candidates
from simdist.tuning.verdict import (
    Outcome,
    entry,
    factor_text,
    lines_of_scenario,
    nothing_keeps,
    staying,
    surely_gains,
)

_SHARES = (1 / 8, 1 / 3, math.inf)  # of the fastest run, per rung
_KEPT = 3  # one in this many goes on
_LEAST_KEPT = 2
_BUDGET = 1 / 3  # of the steps of an exhaustive search
_N_FINALISTS = 3  # besides the baseline
_SEEDS = 5

#: Trains schedules.
_Train = Callable[[Sequence[TimedSchedule]], Sequence[Learned]]


@dataclass(frozen=True, repr=False)
class Raced:
    """Result of a search by time to a target.

    Args:
        scenario: The scenario to tune, as the user wrote it.
        target: The target.
        task: The task, and its training settings.
        finalists: Trained with fresh seeds. The baseline is first, the others follow in their order in the search.
        winner: The schedule to change to; None: stay with the baseline.
        outcome: See `simdist.tuning.verdict`.
        sentence: The verdict.
        on_front: The finalists that no other one beats in both time to the target and final metric.
        n_entrants: Candidates with their learning rates, without those that learn the same as a faster one.
        n_fell: Number of entrants that were eliminated before another one had reached the target.
        n_steps: Steps that the search trained.
    """

    scenario: Scenario
    target: Target
    task: TaskSetting
    finalists: tuple[Learned, ...]
    winner: Learned | None
    outcome: Outcome
    sentence: str
    on_front: tuple[int, ...]
    n_entrants: int
    n_fell: int
    n_steps: int

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """What to know beside the table."""
        fell = f"given up early, so perhaps sooner: {self.n_fell:,} of {self.n_entrants:,} candidates"
        return (
            *(each for each in remarks_of(self.scenario) if each.kind != "accuracy"),  # runs have whole periods
            *([Remark("accuracy", fell)] if self.n_fell else []),
            *remarks_on_learning(self.finalists, self.finalists[0], self.target),
            Remark("result", "*: no other finalist is there sooner and better in the end"),
        )

    def document(self) -> dict[str, Any]:
        """Return the search as JSON.

        Columns:
            verdict, outcome (str): What to do, and `change`, `stay` or `unsure`.
            n_entrants, n_fell (int): Candidates with different learning; those eliminated early.
            n_steps, n_exhaustive_steps (int): Steps trained, and steps of training all candidates to the end.
            entries (str or null): Schedule to change to, and other changes, as in a scenario.
        """
        base = self.finalists[0]
        about = {
            "scenario": self.scenario.name,
            "baseline": base.label,
            "verdict": self.sentence,
            "entries": self._entries(),
            "n_exhaustive_steps": self._n_exhaustive_steps,
            **picked(self, "outcome", "n_entrants", "n_fell", "n_steps"),
        }
        rows = [self._record(number) for number in range(len(self.finalists))]
        return learning_document(
            about, self.finalists, rows, self.remarks, title=self._title(), task=self.task, target=self.target
        )

    def text(self) -> str:
        """Return the search as a table, with sentences about it, and the winner as a scenario has it."""
        return learning_text(self.document())

    @property
    def _n_exhaustive_steps(self) -> int:
        return self.n_entrants * self.scenario.steps

    def _record(self, number: int) -> dict[str, Any]:
        """Return a finalist as JSON.

        Columns:
            front (str): `*` if no finalist beats it in time to the target and in the final metric.
            entry (str): Line for `schedules`.
        """
        finalist = self.finalists[number]
        front = "*" if number in self.on_front else ""
        row = learned_row(finalist, self.finalists[0], self.target)
        return row | {"front": front, "entry": entry(finalist.timed.schedule)}

    def _title(self) -> str:
        base = self.finalists[0]
        scenario = self.scenario
        tried = f"{self.n_entrants:,} {plural(self.n_entrants, 'candidate')} trained for {self.n_steps:,} steps"
        share = f"{self.n_steps / self._n_exhaustive_steps:.0%} of all for {scenario.steps:,}"
        again = f"finalists again with {len(base.curves)} other seeds"
        ranks = f"{scenario.cluster.world_size:,} ranks"
        return f"{scenario.name}: {ranks}; {tried}, {share}; {again}; speed-up over {base.label}"

    def _entries(self) -> str | None:
        """Return the lines that a scenario takes, and a comment where the learning rate is another one."""
        if self.winner is None:
            return None
        its = self.winner.timed
        own = self.finalists[0].timed.scenario.checkpoint
        saved = its.scenario.checkpoint
        lines = lines_of_scenario(self.scenario, its.schedule, its.scenario.workload.micro_batches, saved, own=own)
        if its.lr_factor == 1:
            return lines
        return f"{lines}\n# with {its.lr_factor:g} times the learning rate of the task"

    def __repr__(self) -> str:
        return self.text()


def race(
    entrants: Sequence[TimedSchedule], train: _Train, target: Target, *, every: int, n_base: int = 1
) -> tuple[list[TimedSchedule], TimedSchedule, int]:
    """Return the candidates, the best first; the baseline at its best rate; the number eliminated too early to judge.

    Args:
        entrants: Each is trained with the first of its seeds.
        train: Trains.
        target: The target.
        every: Steps from one evaluation to the next. A rung ends with an evaluation.
        n_base: The first `n_base` entrants are the baseline with different learning rates.
    """
    horizon_s = min(each.ends_s[:, -1].mean() for each in entrants)
    scores: dict[int, tuple[float, ...]] = {}
    seen_s: dict[int, float] = {}
    ran: set[tuple[int, int]] = set()
    best_s = math.inf

    def run(some: Sequence[TimedSchedule], until_s: float) -> None:
        nonlocal best_s
        parts = [within(each, until_s, every) for each in some]
        for each, learned in zip(some, train(parts), strict=True):
            scores[id(each)] = _score(learned, target)
            seen_s[id(each)] = until_s
            best_s = min(best_s, scores[id(each)][0])
            ran.add((id(each), learned.timed.plan.n_steps))

    order = list(entrants)
    n_left = len(entrants)
    for share in _SHARES:
        if math.isfinite(share) and n_left <= _LEAST_KEPT:
            continue  # none would be eliminated
        for wave in [order[:n_left]] if math.isfinite(share) else [order[:1], order[1:n_left]]:
            run(wave, min(share * horizon_s, best_s))
        order[:n_left] = sorted(order[:n_left], key=lambda each: scores[id(each)])
        n_left = max(_LEAST_KEPT, math.ceil(n_left / _KEPT))
    base, *others = sorted(entrants[:n_base], key=lambda each: scores[id(each)])
    if others:
        run([base], math.inf)
        run(others, scores[id(base)][0])
        base = min(base, *others, key=lambda each: scores[id(each)])
    fell = [each for each in order if seen_s[id(each)] < best_s]
    costs = np.cumsum([within(each, best_s, every).plan.n_steps for each in fell])
    spare = _BUDGET * sum(each.plan.n_steps for each in entrants) - sum(n_steps for _, n_steps in ran)
    run(fell[: int(np.searchsorted(costs, spare, side="right"))], best_s)
    order.sort(key=lambda each: scores[id(each)] if seen_s[id(each)] >= best_s else (math.inf, math.inf))
    return order, base, int(sum(seen_s[id(each)] < best_s for each in order))


def within(entrant: TimedSchedule, seconds: float, every: int) -> TimedSchedule:
    """Return a schedule cut at its last evaluation within some simulated seconds, with its first seed.

    It includes at least the first evaluation. Its times are means over the seeds.
    """
    ends_s = entrant.ends_s.mean(axis=0, keepdims=True)
    plan = entrant.plan
    late = entrant.late[0]
    n_steps = int(np.searchsorted(ends_s[0], seconds, side="right"))
    n_steps = n_steps if n_steps == plan.n_steps else min(max(1, n_steps // every) * every, plan.n_steps)
    bodies = [plan.bodies[number] for number in plan.body_of_steps()][:n_steps]
    plan = Plan.from_steps(plan.name, world_size=plan.world_size, buffers=plan.buffers, steps=bodies)
    late = late and {row: ranks for row, ranks in late.items() if row < plan.n_instances}
    return replace(entrant, ends_s=ends_s[:, :n_steps], plan=plan, late=(late,))


def _score(found: Learned, target: Target) -> tuple[float, ...]:
    """Return the time to the target, the final metric and seconds per step, signed so that less is better."""
    value = -target.sign * found.values(target)[0, -1]
    ends_s = found.timed.ends_s[0]
    return float(found.to_target(target)[1, 0]), float(np.nan_to_num(value, nan=np.inf)), ends_s[-1] / len(ends_s)


def tune_to_target(
    scenario: Scenario,
    wanted: TuneOptions,
    target: Target,
    task: TaskSetting,
    trainer: Trainer,
    lr_factors: Sequence[float],
) -> Raced:
    """Find the schedule and learning rate that reach a target first.

    Args:
        scenario: The scenario to tune. Its number of steps is that of a run.
        wanted: The request, as for step times.
        target: The target.
        task: The task, and its training settings.
        trainer: Trains, and reports progress.
        lr_factors: Factors of the task's learning rate to try.

    Raises:
        ScenarioError: See `simdist.tuning.tuning.simulate_candidates`, or an error of the task.
        RunError: Some runs fail. The others are kept.
    """
    base, entrants = simulate_entrants(scenario, wanted, task, trainer, lr_factors)
    n = len(entrants)
    n_all = len(entrants) * scenario.steps
    trainer.say(f"{n:,} candidates: the search trains a third of {n_all:,} steps, more if they are few; then finalists")
    train = partial(train_schedules, task=task, trainer=trainer)
    order, rated, n_fell = race(entrants, train, target, every=task.evaluate_every, n_base=len(lr_factors))
    n_steps = trainer.n_steps
    (seed,) = run_seeds(scenario.seed, 1, first=wanted.n_search_seeds)
    base = replace(base, lr_factor=rated.lr_factor)
    others = [each for each in order if (each.schedule, each.lr_factor) != (base.schedule, base.lr_factor)]
    finals = [base, *others[:_N_FINALISTS]]
    again = [
        timed(unchecked_copy(each.scenario, seed=seed), each.schedule, task, n_seeds=wanted.n_seeds or _SEEDS)
        for each in finals
    ]
    again = [replace(one, lr_factor=each.lr_factor) for one, each in zip(again, finals, strict=True)]
    learned = train_schedules(again, task, trainer)
    points = [(each.to_target(target)[1].mean(), -target.sign * each.values(target)[:, -1].mean()) for each in learned]
    on_front = tuple(number for number in front(points) if math.isfinite(points[number][0]))
    return Raced(
        scenario, target, task, tuple(learned), *_verdict(learned, target), on_front, len(entrants), n_fell, n_steps
    )


def simulate_entrants(
    scenario: Scenario, wanted: TuneOptions, task: TaskSetting, trainer: Trainer, lr_factors: Sequence[float]
) -> tuple[TimedSchedule, list[TimedSchedule]]:
    """Return the baseline, and the fastest of all candidates that learn the same, with every learning rate.

    Args and errors are those of `tune_to_target`.
    """
    found = simulate_candidates(scenario, wanted, skips=False, progress=trainer.progress)
    if not found.is_complete:
        raise KeyboardInterrupt  # a race without all entrants answers nothing
    if found.nearest:
        breaches = broken(found.nearest.facts, wanted.constraints)
        raise ScenarioError(f"{scenario.name}: {nothing_keeps(found.nearest.schedule, breaches)}")
    of_plan: dict[str, list[TimedSchedule]] = {}
    tried = [found.baseline, *found.evaluated]
    for number, each in enumerate(tried):
        trainer.progress(f"simulating {each.schedule.name}", number, len(tried))
        its = unchecked_copy(each.scenario(found.runs), steps=scenario.steps)
        simulated = timed(its, each.schedule, task, n_seeds=wanted.n_search_seeds)
        of_plan.setdefault(f"{simulated.plan.digest()} {simulated.late[0]}", []).append(simulated)
    fastest = [min(alike, key=lambda each: each.ends_s[:, -1].mean()) for alike in of_plan.values()]
    (base, *_), *_ = of_plan.values()
    return base, [replace(each, lr_factor=factor) for each in fastest for factor in lr_factors]


def _verdict(found: Sequence[Learned], target: Target) -> tuple[Learned | None, Outcome, str]:
    """Say whether to change from the first to another one: to the best in the search, unless one is surely faster."""
    base, *others = found
    there = [each for each in others if np.isfinite(each.to_target(target)).all()]
    steps = base.to_target(target)[0]
    n_runs = len(steps)
    n_reached = int(np.isfinite(steps).sum())
    n_steps = base.timed.scenario.steps
    if not steps.any():
        return None, "unsure", f"{target} is met before the first step: ask for more"
    if not there and n_reached < n_runs:
        return None, "unsure", f"no schedule surely reaches {target} in {n_steps:,} steps: write more --steps"
    best = reduce(lambda one, other: other if _surely_sooner(other, one, target) else one, there or [base])
    if n_reached < n_runs:
        sentence = f"{best.label} reaches the target in all {n_runs} runs, {base.label} in {n_reached}"
        return (None, "unsure", sentence) if n_reached else (best, "change", sentence)
    if not (sure := next((each for each in (best, *there) if _surely_sooner(each, base, target)), None)):
        row = learned_row(best, base, target)
        return None, *staying(base.label, row["target_speedup"], row["target_speedup_ci95"])
    row = learned_row(sure, base, target)
    gain = factor_text(row["target_speedup"], row["target_speedup_ci95"])
    return sure, "change", f"{sure.label} is {gain} times as fast as {base.label} in time to the target"


def _surely_sooner(one: Learned, other: Learned, target: Target) -> bool:
    row = learned_row(one, other, target)
    return row["target_speedup"] is not None and surely_gains(row["target_speedup"], row["target_speedup_ci95"])
