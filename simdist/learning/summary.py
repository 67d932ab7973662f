"""Training runs combined with simulated times: steps and time to a target, with confidence intervals.

Learning seed i runs with delay seed i. A schedule is compared with the baseline in pairs of seeds: intervals of
speed-ups are those of ratios of paired samples. An interval that contains 1 shows no difference. A run that does not
reach the target is *censored*: its time is longer than the run by an unknown amount. So a schedule with such runs has
no mean time to the target and no speed-up.

A run that has reached the target at an evaluation may have reached it at any step since the previous one. If all seeds
arrive at the same evaluation, their differences do not show this uncertainty. So the arrival is taken to be uniformly
distributed between the two evaluations. Its variance is added: d^2 / 12 for evaluations that are d apart.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simdist.learning.curves import TRAINING_LOSS, Curve, Target
from simdist.learning.timing import TimedSchedule
from simdist.learning.training import TaskSetting, Trainer, Training
from simdist.scenario.sampling import run_seeds
from simdist.studies.comparison import speedup_interval, step_interval
from simdist.studies.known_delays import chance_remarks, chances_of
from simdist.studies.remarks import Remark
from simdist.studies.statistics import NORMAL_QUANTILE, mean_interval, positive_interval, ratio_interval


@dataclass(frozen=True)
class Learned:
    """A schedule's runs: for each seed, one curve and the simulated times of one run.

    Args:
        timed: The schedule.
        curves: One curve per seed, all evaluated after the same steps.
    """

    timed: TimedSchedule
    curves: Sequence[Curve]

    @property
    def label(self) -> str:
        """Label of the schedule, with the factor of the learning rate if it is not 1."""
        factor = self.timed.lr_factor
        return self.timed.schedule.name + (f" lr x{factor:g}" if factor != 1 else "")

    @property
    def at_s(self) -> NDArray[np.float64]:
        """Simulated seconds at each evaluation, `[n_seeds, n_evaluations]`."""
        return np.pad(self.timed.ends_s, ((0, 0), (1, 0)))[:, self.curves[0].steps]

    def values(self, target: Target) -> NDArray[np.float64]:
        """Return the target's metric, `[n_seeds, n_evaluations]`."""
        return np.stack([target.values(curve) for curve in self.curves])

    def to_target(self, target: Target) -> NDArray[np.float64]:
        """Return steps and seconds to the target, `[2, n_seeds]`; infinite for runs that do not reach it."""
        found = np.full((2, len(self.curves)), np.inf)
        for seed, curve in enumerate(self.curves):
            if (at := target.reached(target.values(curve))) is not None:
                found[:, seed] = curve.steps[at], self.at_s[seed, at]
        return found

    def errors(self, target: Target) -> NDArray[np.float64]:
        """Return the standard errors of mean steps and seconds to the target that seeds do not show, `[2]`.

        They are due to rare evaluations and rare delays. All runs must reach the target.
        """
        found = np.zeros((2, len(self.curves)))
        for seed, curve in enumerate(self.curves):
            if at := target.reached(target.values(curve)):
                first = curve.steps[at - 1] + 1
                found[:, seed] = curve.steps[at] - first, self.at_s[seed, at] - self.timed.ends_s[seed, first - 1]
        errors = np.sqrt((found**2).sum(axis=1) / 12) / len(self.curves)
        steps, _ = self.to_target(target)
        unseen_s = float(steps.mean()) * self.timed.times.unseen_s / NORMAL_QUANTILE
        return np.array([errors[0], math.hypot(errors[1], unseen_s)])


def train_schedules(found: Sequence[TimedSchedule], task: TaskSetting, trainer: Trainer) -> list[Learned]:
    """Train schedules with all their seeds.

    Args:
        found: Simulated schedules, with their plans for the task.
        task: The task and its training settings.
        trainer: The trainer.

    Raises:
        ScenarioError: The training program refuses a run.
        RunError: Runs fail. The results of the others are kept.
    """
    runs = [
        Training(each.schedule.name, each.plan, task, seed, each.lr_factor, late)
        for each in found
        for seed, late in zip(run_seeds(each.scenario.seed, len(each.late)), each.late, strict=True)
    ]
    curves = iter(trainer.train(runs))
    return [Learned(each, tuple(islice(curves, len(each.late)))) for each in found]


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def learned_row(one: Learned, base: Learned, target: Target | None) -> dict[str, Any]:
    """Return the row of a schedule as JSON: means over seeds, and their 95 % intervals `_ci95`.

    Columns:
        schedule (str): Label, and `lr_factor` if not 1.
        lr_factor (float): Factor of the task's learning rate.
        runs, reached (int): Runs, one for each seed, and those that reach the target.
        step_s, speedup (float): Simulated, per step.
        steps_to_target, target_s, target_speedup (float or null): Steps and simulated seconds until all runs reach the
            target, and the speed-up in that time, paired by seeds.
        final (float or null): Metric, or training loss, at the last evaluation.
        step_s_ci95, speedup_ci95, steps_to_target_ci95, target_s_ci95, target_speedup_ci95, final_ci95 (list or null):
            Intervals.
        final_ranks (list or null): Lowest and highest `final` metric of ranks' own models.
        drift (float or null): Largest distance of ranks' parameters from their average, as a share of its norm.
        curvature (float or null): Curvature of the loss along it. Averaging gained curvature x drift^2 / 2.
        noise_scale (float or null): Last gradient noise scale in samples, median of seeds.

    Args:
        one: The schedule.
        base: The baseline, with the same seeds.
        target: The target, if any. Without one, its columns are omitted.

    Raises:
        ScenarioError: The task has no such metric.
    """
    times = one.timed.times
    base_times = base.timed.times
    step_s = float(times.step_s.mean())
    speedup = float(base_times.step_s.mean()) / step_s
    furthest = (curve.curvature[int(np.nanargmax(curve.drift))] for curve in one.curves)
    curvatures = [each for each in furthest if each is not None]
    scales = [each for curve in one.curves for each in [*filter(None, curve.noise_scale)][-1:]]
    found = {"schedule": one.label, "lr_factor": one.timed.lr_factor, "runs": len(one.curves)} | {
        "step_s": step_s,
        "step_s_ci95": step_interval(times),
        "speedup": speedup,
        "speedup_ci95": speedup_interval(speedup, times, base_times),
        **_mean("final", one.values(target or TRAINING_LOSS)[:, -1]),
        "drift": float(np.mean([np.nanmax(curve.drift) for curve in one.curves])),
        "curvature": float(np.mean(curvatures)) if curvatures else None,
        "noise_scale": float(np.median(scales)) if scales else None,
    }
    if target and target.model != "training":
        ends = np.mean([each.ranks.get(target.metric, (np.nan, np.nan)) for each in one.curves], axis=0)
        found["final_ranks"] = ends.tolist() if np.isfinite(ends).all() else None
    if target:
        steps, ours_s = one.to_target(target)
        _, theirs_s = base.to_target(target)
        of_steps, of_ours_s = one.errors(target)
        _, of_theirs_s = base.errors(target)
        found |= {"reached": int(np.isfinite(ours_s).sum()), **_positive_mean("steps_to_target", steps, of_steps)}
        error = 0.0 if one is base else math.hypot(of_ours_s / ours_s.mean(), of_theirs_s / theirs_s.mean())
        found |= _positive_mean("target_s", ours_s, of_ours_s) | _ratio("target_speedup", theirs_s, ours_s, error)
    return found


def curves_record(found: Iterable[Learned], target: Target | None, *, title: str) -> dict[str, Any]:
    """Return curves as JSON, which `simdist.report.learning` draws."""
    metric = target or TRAINING_LOSS
    value = target and target.value
    curves = [_curve(each, metric) for each in found]
    return {"title": title, "metric": metric.what, "target_value": value, "curves": curves}


def _curve(one: Learned, metric: Target) -> dict[str, Any]:
    """Return a learning curve of a schedule as JSON.

    Columns:
        schedule (str): Label, as in its row.
        steps (list): Steps before each evaluation (int).
        seconds (list): Simulated seconds until then, means over seeds (float).
        mean, lowest, highest (list): Metric over seeds (float or null).
    """
    values = one.values(metric)
    rows = {"mean": values.mean(axis=0), "lowest": values.min(axis=0), "highest": values.max(axis=0)}
    found = {name: [None if np.isnan(value) else float(value) for value in row] for name, row in rows.items()}
    seconds = one.at_s.mean(axis=0).tolist()
    return {"schedule": one.label, "steps": one.curves[0].steps, "seconds": seconds} | found


def _mean(name: str, samples: NDArray[np.float64]) -> dict[str, Any]:
    if not np.isfinite(samples).all():
        return {name: None}
    return {name: float(samples.mean()), f"{name}_ci95": mean_interval(samples)}


def _positive_mean(name: str, samples: NDArray[np.float64], error: float = 0.0) -> dict[str, Any]:
    if not np.isfinite(samples).all():
        return {name: None}
    interval = positive_interval(samples, error=error) if math.isfinite(error) else None
    return {name: float(samples.mean()), f"{name}_ci95": interval}


def _ratio(
    name: str, above: NDArray[np.float64], below: NDArray[np.float64], relative_error: float = 0.0
) -> dict[str, Any]:
    if not (np.isfinite([above, below]).all() and below.mean()):
        return {name: None}
    ratio = float(above.mean() / below.mean())
    is_known = math.isfinite(relative_error)
    interval = ratio_interval(ratio, above, below, error=ratio * relative_error) if is_known else None
    return {name: ratio, f"{name}_ci95": interval}


def remarks_on_learning(found: Sequence[Learned], base: Learned, target: Target | None) -> Iterator[Remark]:
    """Yield remarks on the table: runs that miss the target, differences due to chance, easy tasks."""
    metric = target or TRAINING_LOSS
    n_seeds = len(base.curves)
    apart = [each for each in found if each.timed.parts]
    if lost := [each.label for each in found if np.isnan(each.values(TRAINING_LOSS)[:, -1]).any()]:
        yield Remark("result", f"diverged: runs of {', '.join(lost)}")
    unknown = [each.label for each in found if np.isnan(each.values(metric)[:, -1]).any() and each.label not in lost]
    if unknown:
        yield Remark("result", f"no number at the end is the {metric.what} of runs of {', '.join(unknown)}")
    if target:
        yield from _about_target(found, base, target)
    losses = base.values(TRAINING_LOSS)
    yield from chance_remarks(chances_of(base.timed.scenario, n_seeds), [each.timed.times for each in found])
    if n_seeds == 1:
        yield Remark("accuracy", "one seed does not tell how much is chance: write --seeds 5 or more")
    elif np.array_equal(losses, losses[[0] * n_seeds], equal_nan=True):
        alike = "all seeds learn the same, so intervals lack its chance: let the task's `make` or `batch` take `seed`"
        yield Remark("accuracy", alike)
    if apart and metric.model == "training":
        yield Remark(
            "accuracy",
            "the training loss is that of each rank's own parameters on its own batch, so it flatters schedules that "
            "average seldom: take a --target of the average model",
        )
    if unseen := [each.label for each in apart if not any(np.nanmax(curve.drift) for curve in each.curves)]:
        yield Remark(
            "accuracy",
            f"every evaluation is right after an average, where nothing drifts, of {', '.join(unseen)}: take an "
            f"--evaluate-every that is no multiple of the periods",
        )
    for why in dict.fromkeys(each.curves[0].why for each in found if each.curves[0].why):
        slow = ", ".join(each.label for each in found if each.curves[0].why == why)
        yield Remark("result", f"ranks were trained one after the other, which is slow, under {slow}: {why}")


def _about_target(found: Sequence[Learned], base: Learned, target: Target) -> Iterator[Remark]:
    n_seeds, n_steps = base.timed.ends_s.shape
    others = [each for each in found if each is not base]
    steps = {each.label: each.to_target(target)[0] for each in found}
    left = {label: int(np.isinf(its).sum()) for label, its in steps.items()}
    if never := ", ".join(f"{label} ({n} of {n_seeds} runs)" for label, n in left.items() if n):
        yield Remark("result", f"never got there in {n_steps:,} steps, so not ranked: {never}")
    gains = [learned_row(each, base, target).get("target_speedup_ci95") for each in others]
    if alike := [each.label for each, gain in zip(others, gains, strict=True) if gain and gain[0] <= 1 <= gain[1]]:
        seeds = f"in time to the target, {n_seeds} seeds do not tell {', '.join(alike)} from {base.label}"
        yield Remark("accuracy", f"{seeds}: the difference is within their noise")
    reached = {int(step) for its in steps.values() for step in its if np.isfinite(step)}
    if 0 in reached:
        yield Remark(
            "accuracy", f"{target} is met before the first step, so nothing is learnt on the way: ask for more"
        )
    elif not never and max(reached) <= (first := base.curves[0].steps[1]):
        hint = "take a harder target or task, or a smaller --evaluate-every"
        easy = f"too easy: every run is there by the first evaluation, after {first:,} steps: {hint}"
        yield Remark("accuracy", easy)
    elif reached and n_seeds > 1 and _same_rates_and_curves(found, base, target):
        noise = f"all schedules have the same curve over steps within the noise of {n_seeds} seeds"
        yield Remark("result", f"{noise}: as far as they tell, time to the target is a matter of step times")
    elif not never and len(reached) == 1:
        at = f"every run is there by the same evaluation, after {reached.pop():,} steps"
        yield Remark("accuracy", f"{at}: take a smaller --evaluate-every")


def _same_rates_and_curves(found: Sequence[Learned], base: Learned, target: Target) -> bool:
    """Tell whether schedules with other plans have the baseline's means over evaluations up to chance, by seed."""
    factors = {each.timed.lr_factor for each in found}
    digests = {each.timed.plan.digest() for each in found}
    means = [(each.values(target) - base.values(target))[:, 1:].mean(axis=1) for each in found if each is not base]
    intervals = [mean_interval(each) for each in means]
    return len(factors) == 1 < len(digests) and all(each and each[0] <= 0 <= each[1] for each in intervals)
