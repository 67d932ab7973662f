"""How much faster would this job be under another schedule, and how sure is that?

Every schedule is simulated under the same disturbances as the baseline, many times over; the speed-up of each time is
one sample, and the interval holds the middle 95 % of them.

    recorded   each run is put together from blocks of consecutive recorded steps, all ranks and channels of a step
               together: a moving block bootstrap. Runs are as long as the recording, so the interval says how much the
               speed-up depends on which steps were recorded.
    random     each run draws its disturbances anew. Runs are as long as the scenario says, so the interval says how
               much such runs differ.
    fixed      nothing is random: one run says it all, and there is no interval.

A block must be long enough for what hangs together. It has n^(1/3) steps of a recording of n, which is the best rate
for estimating a variance, or one period of the longest schedule, because that is what a schedule averages over. With
fewer than three blocks in a recording, resampling would show less than the real spread, so there is no interval.

Source:
    Kuensch, The Jackknife and the Bootstrap for General Stationary Observations, Annals of Statistics 17, 1989;
    Hall, Horowitz & Jing, On Blocking Rules for the Bootstrap with Dependent Data, Biometrika 82, 1995;
    Politis & Romano, A Circular Block-Resampling Procedure for Stationary Data, 1992 (blocks go round the end).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.build import Built, build
from simdist.compare import Measured, measure
from simdist.errors import ScenarioError
from simdist.plan import COLLECTIVES, Plan
from simdist.plan.text import op_name
from simdist.scenario import Recorded, Scenario
from simdist.scenario.disturbances import read_recorded
from simdist.schedules import Schedule

__all__ = ["Drawn", "Gain", "Gains", "gains", "period_of"]

Drawn: TypeAlias = Literal["recorded", "random", "fixed"]
Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with a schedule's label, rank-steps done and rank-steps in all."""

_LEAST_BLOCKS = 3
_LONGEST_PERIOD = 4096  # longer ones are not looked for
_MIDDLE = (2.5, 97.5)  # percentiles that hold 95 %
_ROUNDING = 1e-6  # a speed-up without noise that differs less from 1 is none


@dataclass(frozen=True, slots=True)
class Gain:
    """What a schedule would gain.

    Args:
        schedule: Its label.
        step_s: Seconds per step, averaged over runs.
        speedup: Over the baseline, of these averages.
        interval: The middle 95 % of the speed-ups of single runs; None if it cannot be told, or nothing is random.
        engine: `fast` or `des`.
        problem: Why there is no interval, if chance plays a part.
    """

    schedule: str
    step_s: float
    speedup: float
    interval: tuple[float, float] | None
    engine: str
    problem: str | None = None

    @property
    def is_sure(self) -> bool:
        """Whether it is faster for all that is known."""
        if self.problem:
            return False
        return (self.interval[0] if self.interval else self.speedup) > 1 + _ROUNDING


@dataclass(frozen=True)
class Gains:
    """What other schedules would gain.

    Args:
        baseline: Label of the schedule that they are compared with.
        baseline_step_s: Its seconds per step.
        rows: The others, in the order given.
        drawn: Where disturbances come from.
        n_runs: Runs per schedule.
        n_steps: Steps of each run.
        n_recorded: Steps of the recording, if there is one.
        block_steps: Steps of a block, likewise.
    """

    baseline: str
    baseline_step_s: float
    rows: tuple[Gain, ...]
    drawn: Drawn
    n_runs: int
    n_steps: int
    n_recorded: int | None
    block_steps: int | None

    @property
    def best(self) -> Gain | None:
        """The fastest of the schedules that are faster for all that is known; None if there is none."""
        return max((row for row in self.rows if row.is_sure), key=lambda row: row.speedup, default=None)


def gains(
    scenario: Scenario,
    schedules: Sequence[Schedule],
    *,
    baseline: Schedule,
    n_runs: int,
    block_steps: int | None = None,
    progress: Progress | None = None,
) -> Gains:
    """Simulate schedules under the disturbances of a scenario, and compare them with a baseline.

    Args:
        scenario: Its recordings are resampled, other disturbances are drawn anew; its seed is that of the first run.
        schedules: What to compare with `baseline`.
        baseline: The schedule that the job has.
        n_runs: Runs of each schedule.
        block_steps: Steps of a block; as the scenario states if None, and if it does not, chosen (see the module).
        progress: See `Progress`.

    Raises:
        ScenarioError: A block is longer than the recording, or there are no runs.
        PlanError: A schedule does not fit the cluster.
    """
    if n_runs < 1:
        raise ScenarioError(f"{n_runs} resamples; must be at least 1")
    everyone = [baseline, *schedules]
    drawn = _drawn(scenario)
    n_recorded = _n_recorded(scenario)
    periods = [period_of(build(scenario, schedule).plan) for schedule in everyone]
    block = _block(n_recorded, periods, block_steps or _stated_block(scenario)) if n_recorded else None
    resampled = _resampled(scenario, block, _whole_periods(n_recorded, periods)) if n_recorded and block else scenario
    n_seeds = 1 if drawn == "fixed" else n_runs
    measured = [_measure(resampled, schedule, n_seeds, progress) for schedule in everyone]
    base = measured[0]
    rows = [
        _gain(each, base, drawn, _problem(n_recorded, block, period))
        for each, period in zip(measured[1:], periods[1:], strict=True)
    ]
    return Gains(
        baseline=baseline.name,
        baseline_step_s=float(base.step_s.mean()),
        rows=tuple(rows),
        drawn=drawn,
        n_runs=n_seeds,
        n_steps=resampled.steps,
        n_recorded=n_recorded,
        block_steps=block,
    )


def _drawn(scenario: Scenario) -> Drawn:
    if any(isinstance(disturbance, Recorded) for disturbance in scenario.disturbances):
        return "recorded"
    return "random" if scenario.is_random else "fixed"


def _n_recorded(scenario: Scenario) -> int | None:
    """Return the steps of the shortest recording, if there is one."""
    lengths = [len(read_recorded(each)) for each in scenario.disturbances if isinstance(each, Recorded)]
    return min(lengths, default=None)


def _stated_block(scenario: Scenario) -> int | None:
    """Return the steps of a block that the scenario states; of several the most, which suit all."""
    stated = [each.resample_steps or 0 for each in scenario.disturbances if isinstance(each, Recorded)]
    return max(stated, default=0) or None


def period_of(plan: Plan) -> int:
    """Return after how many steps a plan does the same again; all of its steps if it does not within half of them.

    It may begin with something else, as with a warm-up. That buffers are used in rotation does not count.
    """
    kinds = [
        tuple((op_name(op), op.group if isinstance(op, COLLECTIVES) else None) for op in body) for body in plan.bodies
    ]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    steps = np.array([numbers[kinds[body]] for body in plan.body_of_steps()])
    best, covered = len(steps), len(steps) / 2
    for period in range(1, min(len(steps) // 2, _LONGEST_PERIOD) + 1):
        differs = np.flatnonzero(steps[period:] != steps[:-period])
        repeats = len(steps) - (int(differs[-1]) + 1 if len(differs) else 0)
        if repeats >= 2 * period and repeats > covered:
            best, covered = period, repeats
        if covered == len(steps):
            break
    return best


def _block(n_recorded: int, periods: Sequence[int], wanted: int | None) -> int:
    if wanted is not None:
        if wanted > n_recorded:
            raise ScenarioError(
                f"blocks of {wanted} steps; {n_recorded} were recorded: write --block {n_recorded // 3}"
            )
        return wanted
    longest = max((period for period in periods if period * _LEAST_BLOCKS <= n_recorded), default=1)
    return max(longest, math.ceil(math.cbrt(n_recorded) - 1e-9))


def _whole_periods(n_recorded: int | None, periods: Sequence[int]) -> int:
    """Return as many steps as were recorded, without the last ones if they are only a part of a period."""
    n_steps, longest = n_recorded or 1, max(periods)
    return n_steps - n_steps % longest if longest <= n_steps else n_steps


def _resampled(scenario: Scenario, block_steps: int, n_steps: int) -> Scenario:
    disturbances = tuple(
        each.model_copy(update={"resample_steps": block_steps}) if isinstance(each, Recorded) else each
        for each in scenario.disturbances
    )
    return scenario.changed(disturbances=disturbances, steps=n_steps)


def _problem(n_recorded: int | None, block: int | None, period: int) -> str | None:
    """Say why a recording is too short for an interval, if it is."""
    if n_recorded is None or block is None:
        return None
    longest = max(block, period)
    if n_recorded >= _LEAST_BLOCKS * longest:
        return None
    what = f"a period of {period} steps" if period > block else f"blocks of {block} steps"
    return f"{n_recorded} recorded steps are too few for an interval with {what}: record {_LEAST_BLOCKS * longest}"


def _measure(scenario: Scenario, schedule: Schedule, n_seeds: int, progress: Progress | None) -> Measured:
    built: Built = build(scenario, schedule)
    return measure(scenario, built, n_seeds=n_seeds, progress=progress)


def _gain(measured: Measured, base: Measured, drawn: Drawn, problem: str | None) -> Gain:
    if not measured.step_s.all():
        raise ScenarioError(f"{measured.label}: a step takes no time, so there is no speed-up")
    ratios = base.step_s / measured.step_s
    return Gain(
        schedule=measured.label,
        step_s=float(measured.step_s.mean()),
        speedup=float(base.step_s.mean() / measured.step_s.mean()),
        interval=None if drawn == "fixed" or problem or len(ratios) < 2 else _middle(ratios),
        engine=measured.engine,
        problem=problem,
    )


def _middle(ratios: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(ratios, _MIDDLE)
    return float(low), float(high)
