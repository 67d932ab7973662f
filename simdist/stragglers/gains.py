"""The speed-up of a job under other schedules, and its confidence.

Each schedule is simulated many times under the disturbances of the baseline. Each simulation gives one sample of the
speed-up. The deviations of the middle 95 % of the samples give the interval.

    recorded   each run is assembled from blocks of consecutive recorded steps, all ranks and channels of a step
               together: a moving block bootstrap. The interval shows the dependence on the recorded steps, regardless
               of the number and length of runs: see `simdist.studies.resampling`.
    random     each run draws its own disturbances. The interval shows the spread of such runs.
    fixed      nothing is random: one run is enough, and there is no interval.

Runs last for whole periods of each schedule; see `simdist.studies.resampling`.

Source:
    Politis & Romano, A Circular Block-Resampling Procedure for Stationary Data, 1992 (blocks go round the end).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from simdist.display import Pictured
from simdist.errors import ScenarioError
from simdist.runs.building import build
from simdist.scenario import Scenario
from simdist.schedules import Schedule
from simdist.studies.columns import frame_of_records
from simdist.studies.facets import GRADIENTS
from simdist.studies.known_delays import uncorrected_remarks, with_unseen
from simdist.studies.measuring import ScheduleTimes, measure
from simdist.studies.remarks import Remark
from simdist.studies.resampling import ResampledRecording, Runs, longest_period, runs_of
from simdist.studies.statistics import resampled_interval

if TYPE_CHECKING:
    import pandas as pd

_Drawn: TypeAlias = Literal["recorded", "random", "fixed"]
#: Called with a schedule's label, the rank-steps done and the total rank-steps.
_Progress: TypeAlias = Callable[[str, int, int], None]

_LEAST_RUNS = 40  # 2.5 % of them is one run
_ROUNDING = 1e-6  # without noise, a speed-up within this distance of 1 counts as none


@dataclass(frozen=True, slots=True)
class Gain:
    """Gain of a schedule.

    Args:
        schedule: Its label.
        step_s: Seconds per step, averaged over runs.
        speedup: Ratio of these averages, over the baseline.
        interval: 95 % interval, see the module; None if it is unknown, or nothing is random.
        engine: `fast` or `des`.
        problem: Why there is no interval although something is random.
        gradients_used: Share of the batches that contribute to updates.
    """

    schedule: str
    step_s: float
    speedup: float
    interval: tuple[float, float] | None
    engine: str
    problem: str | None = None
    gradients_used: float = 1.0

    @property
    def is_faster(self) -> bool:
        """Whether it is faster on average."""
        return self.speedup > 1 + _ROUNDING

    @property
    def is_sure(self) -> bool:
        """Whether it is faster with confidence: nothing is random, or the whole interval is above 1."""
        return self.is_faster and not self.problem and (self.interval is None or self.interval[0] > 1 + _ROUNDING)


@dataclass(frozen=True, repr=False)
class Gains(Pictured):
    """Gains of other schedules.

    Args:
        baseline: Label of the schedule to compare with.
        baseline_step_s: Its seconds per step.
        rows: The other schedules, in the given order.
        drawn: Source of the disturbances.
        n_runs: Runs per schedule.
        n_steps: Steps of each run; a few more if needed for whole periods.
        recording: The resampled recording, if there is one.
        remarks: Remarks on the runs.
        problem: Why no schedule may be recommended; None if one may.
    """

    baseline: str
    baseline_step_s: float
    rows: tuple[Gain, ...]
    drawn: _Drawn
    n_runs: int
    n_steps: int
    recording: ResampledRecording | None
    remarks: tuple[Remark, ...]
    problem: str | None = None

    def records(self) -> list[dict[str, object]]:
        """Return the baseline and the other schedules.

        Columns:
            schedule (str): Label.
            step_s, speedup, gradients_used (float64): As in "The gain of a schedule".
            speedup_ci95_low, speedup_ci95_high (float64): The ends of its `speedup_95`.
            engine (str): `fast` or `des`; empty for the baseline.
        """
        base = Gain(self.baseline, self.baseline_step_s, 1.0, None, "")
        return [
            {
                "schedule": each.schedule,
                "step_s": each.step_s,
                "speedup": each.speedup,
                "speedup_ci95": each.interval,
                "engine": each.engine,
                "gradients_used": each.gradients_used,
            }
            for each in (base, *self.rows)
        ]

    def frame(self) -> "pd.DataFrame":
        """Return one row per schedule, the baseline first; see `records`."""
        return frame_of_records(self.records())

    def __repr__(self) -> str:
        rows = (f"{each.schedule}: {each.speedup:.2f}" for each in self.rows)
        return f"<speed-up over {self.baseline}, {self.baseline_step_s:.4g} s per step: {', '.join(rows)}>"

    @property
    def fastest(self) -> Gain | None:
        """The fastest of the schedules that are faster on average; None if there is none."""
        return max((row for row in self.rows if row.is_faster), key=lambda row: row.speedup, default=None)

    @property
    def best(self) -> Gain | None:
        """The fastest of the schedules that are faster with confidence; None if there is none."""
        return max((row for row in self.rows if row.is_sure), key=lambda row: row.speedup, default=None)


def find_gains(
    scenario: Scenario,
    schedules: Sequence[Schedule],
    *,
    baseline: Schedule,
    n_runs: int,
    block_steps: int | None = None,
    progress: _Progress | None = None,
) -> Gains:
    """Simulate schedules under the disturbances of a scenario, and compare them with a baseline.

    Args:
        scenario: Its recordings are resampled. Other disturbances are drawn for each run.
        schedules: Schedules to compare with `baseline`.
        baseline: The job's own schedule.
        n_runs: Runs of each schedule.
        block_steps: Steps of a block. None: of the scenario, or chosen.
        progress: See `_Progress`.

    Raises:
        ScenarioError: A block is longer than the recording, or there are no runs.
        PlanError: A schedule does not fit the cluster.
    """
    if n_runs < 1:
        raise ScenarioError(f"{n_runs} resamples; must be at least 1")
    runs = runs_of(scenario, longest_period(scenario, [baseline, *schedules]), block_steps=block_steps)
    n_seeds = n_runs if runs.scenario.is_random else 1
    base = _measure(runs.scenario_for(baseline), baseline, n_seeds, progress)
    rows = [
        _gain(_measure(runs.scenario_for(each), each, n_seeds, progress), base, runs, (baseline, each))
        for each in schedules
    ]
    base_s = float(base.step_s.mean())
    if runs.as_imported:
        base_s = float(_measure(runs.as_imported, baseline, 1, None).step_s.mean())
        rows = [replace(each, step_s=base_s / each.speedup) for each in rows]
    return Gains(
        baseline=baseline.name,
        baseline_step_s=base_s,
        rows=tuple(rows),
        drawn="recorded" if runs.recording else "random" if scenario.is_random else "fixed",
        n_runs=n_seeds,
        n_steps=runs.scenario_for(baseline).steps,
        recording=runs.recording,
        remarks=(
            *(each for each in runs.remarks if not each.is_of_inputs),
            *uncorrected_remarks(runs.scenario_for(baseline), n_seeds),
        ),
        problem=scenario.imported.problem if scenario.imported else None,
    )


def _measure(scenario: Scenario, schedule: Schedule, n_seeds: int, progress: _Progress | None) -> ScheduleTimes:
    built = build(scenario, schedule)
    return with_unseen(scenario, built, measure(scenario, built, n_seeds=n_seeds, progress=progress))


def _gain(measured: ScheduleTimes, base: ScheduleTimes, runs: Runs, compared: tuple[Schedule, Schedule]) -> Gain:
    """Compare a schedule with the baseline."""
    if not measured.step_s.all():
        raise ScenarioError(f"{measured.label}: a step takes no time, so there is no speed-up")
    speedup = float(base.step_s.mean() / measured.step_s.mean())
    problem = _problem(runs, len(base.step_s), compared)
    interval = None
    if runs.scenario.is_random and not problem:
        speedups = base.step_s / measured.step_s
        widening = runs.widening(*compared)
        low, high = resampled_interval(speedup, speedups, widening=widening)
        interval = max(0.0, low), high
        if low == high and (np.ptp(speedups) > 0 or (base.unseen_s and measured.unseen_s)):
            interval = None
            problem = f"too few of {len(speedups)} runs differ, although delays are random: write more --resamples"
    if not problem:
        interval = runs.with_error(speedup, interval)
    step_s = float(measured.step_s.mean())
    used = measured.of(GRADIENTS).share
    return Gain(measured.label, step_s, speedup, interval, measured.engine, problem, used)


def _problem(runs: Runs, n_runs: int, compared: Sequence[Schedule]) -> str | None:
    """Return why there is no interval although the runs are random."""
    if not runs.scenario.is_random:
        return runs.problem(compared[0])
    if n_runs < _LEAST_RUNS:
        return f"{n_runs} run{'s are' if n_runs > 1 else ' is'} too few to be sure: write --resamples 100 or more"
    return next((problem for problem in map(runs.problem, compared) if problem), None)
