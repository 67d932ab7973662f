"""Runs of compared schedules: their length, the draws of every seed, and the confidence of the result.

**Whole periods.** In 20 steps, schedules with periods 8 and 7 both average twice, although the latter averages more
often. Every schedule therefore runs for a whole number of its own periods: after a warm-up of W steps, with periods of
P, for W + ceil((L - W) / P) P steps. L is at least ten times the longest period compared, and a multiple of it, so that
periods that divide it run equally long. The interval of checkpoints counts as a period: the last file, which nothing
hides, is then one of at least ten. Delays are drawn by step and rank (`simdist.scenario.sampling`): runs of different
length have the same delays in common steps. With a data set, the number of steps is that of the scenario.

**Recordings** are resampled block by block. The scenario states the length of a block. Otherwise it is the longest
period, which a schedule averages over, at least n^(1/3) of n recorded steps, the best rate for estimating a variance,
and at most a fifth of the recording, because draws would hardly differ.

**Confidence.** The deviation of single runs shows the dependence on the recorded steps, up to three factors, which
`Runs.widening` combines:

    sqrt(L / n)            runs have L steps, the recording n: the m-out-of-n bootstrap
    1 / sqrt(1 - block/n) blocks are drawn around the recording's mean, which varies, too t(n/block - 1) / 1.96 few
    blocks estimate their spread roughly: Student's quantile replaces the normal

An imported scenario reproduces the traced steps with an error (`Scenario.imported`). Speed-ups are at least as
uncertain. Step times are scaled so that the baseline takes what it takes with the recorded steps in their order, as
`simulate` prints it. The mean of resampled runs is close to that.

On delays of Bernoulli, exponential and autoregressive kind, intervals from 20 recorded steps then hold the speed-up of
local SGD in endless runs in 96 % of the cases or more.

Source:
    Kuensch, The Jackknife and the Bootstrap for General Stationary Observations, Annals of Statistics 17, 1989;
    Hall, Horowitz & Jing, On Blocking Rules for the Bootstrap with Dependent Data, Biometrika 82, 1995;
    Bickel, Goetze & van Zwet, Resampling Fewer than n Observations: Gains, Losses, and Remedies for Losses,
    Statistica Sinica 7, 1997.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from simdist.errors import ScenarioError
from simdist.runs.building import dataset, in_steps, job
from simdist.scenario import Recorded, Scenario
from simdist.scenario.disturbances import Disturbance, read_recorded
from simdist.scenario.links import LinkDisturbance
from simdist.schedules import Schedule
from simdist.settings.base import unchecked_copy
from simdist.studies.remarks import Remark, remarks_of
from simdist.studies.statistics import NORMAL_QUANTILE, Interval, student_quantile

#: Speed-up below which a change is not proposed: models are not better than that, and changes cost work.
WORTHWHILE = 1.02

_FAR_LONGER = 10
_N_PERIODS = 10  # of the longest schedule in a run
_MOST_BLOCK_SHARE = 5  # of a recording, one in so many
_LEAST_BLOCKS = 2  # in a recording: one block has no spread


@dataclass(frozen=True, slots=True)
class ResampledRecording:
    """The recorded disturbances of a scenario.

    Args:
        n_steps: Recorded steps, of the shortest recording.
        block_steps: Consecutive ones that are drawn together.
        is_stated: Whether the user has said how long blocks are.
    """

    n_steps: int
    block_steps: int
    is_stated: bool


@dataclass(frozen=True)
class Runs:
    """How the schedules of one scenario are run.

    Args:
        scenario: Its recorded disturbances are resampled; a schedule runs for its steps or a few more.
        recording: The recording to resample, if there is one.
        longest_period: Of the schedules that are compared, in steps.
        as_imported: The scenario of an imported job with its recorded steps in their order, if these are resampled.
        steps_without_files: Steps of a run if there were no checkpoints; None if they do not matter.
    """

    scenario: Scenario
    recording: ResampledRecording | None
    longest_period: int
    as_imported: Scenario | None = None
    steps_without_files: int | None = None

    def scenario_for(self, schedule: Schedule, varied: Scenario | None = None) -> Scenario:
        """Return the scenario, or a varied one, in which a schedule runs for whole periods."""
        scenario = in_steps(varied or self.scenario, schedule)
        if dataset(scenario) is not None:
            return scenario
        cycle = schedule.cycle_with_checkpoints(job(scenario))
        n_periods = max(1, math.ceil((scenario.steps - cycle.start) / len(cycle)))
        return unchecked_copy(scenario, steps=cycle.start + n_periods * len(cycle))

    def from_seed(self, seed: int) -> "Runs":
        """Return the same runs, drawn with the seeds from this one on."""
        return replace(self, scenario=unchecked_copy(self.scenario, seed=seed))

    def problem(self, schedule: Schedule) -> str | None:
        """Say why nothing tells how sure the speed-up of a schedule is, if so."""
        if self.scenario.imported and self.scenario.imported.problem:
            return self.scenario.imported.problem
        if self.recording is None:
            return None
        period = len(schedule.cycle(job(self.scenario)))
        block = self.recording.block_steps
        needed = _LEAST_BLOCKS * max(period, block)
        if self.recording.n_steps >= needed:
            return None
        what = f"a period of {period} steps" if period > block else f"blocks of {block} steps"
        return f"{self.recording.n_steps} recorded steps are too few to be sure with {what}: record {needed} or more"

    def widening(self, *schedules: Schedule) -> float:
        """Return the factor from deviations of single runs to those of recordings; 1 without a recording."""
        if self.recording is None:
            return 1.0
        n_recorded = self.recording.n_steps
        block = self.recording.block_steps
        n_steps = max(self.scenario_for(schedule).steps for schedule in schedules)
        return (
            math.sqrt(n_steps / n_recorded / (1 - block / n_recorded))
            * student_quantile(n_recorded / block - 1)
            / NORMAL_QUANTILE
        )

    def with_error(self, speedup: float, interval: Interval | None) -> Interval | None:
        """Return an interval widened by the error of an imported scenario."""
        if not self.scenario.imported or not self.scenario.imported.uncertainty:
            return interval
        error = self.scenario.imported.uncertainty
        low, high = interval or (speedup, speedup)
        return low * max(0.0, 1 - error), high * (1 + error)

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """Runs that checkpoints make far longer, and blocks that are shorter than the periods of schedules."""
        found = []
        if self.steps_without_files is not None and self.scenario.steps >= _FAR_LONGER * self.steps_without_files:
            text = (
                f"runs have {self.scenario.steps:,} steps in place of {self.steps_without_files:,}, for {_N_PERIODS} "
                f"checkpoints or more: a smaller checkpoint.every makes them shorter"
            )
            found.append(Remark("derived", text, "checkpoint.every"))
        recording = self.recording
        if recording and recording.is_stated and recording.block_steps < self.longest_period:
            text = (
                f"blocks of {recording.block_steps} steps, as stated, are shorter than the longest period, "
                f"{self.longest_period} steps: delays that last longer are cut, and intervals may be too narrow"
            )
            found.append(Remark("accuracy", text))
        return tuple(found)


def remarks_as_run(scenario: Scenario) -> tuple[Remark, ...]:
    """Return the remarks on a scenario that is run as `runs_of` its own schedules says."""
    runs = runs_of(scenario, longest_period(scenario, scenario.schedules))
    return (*(each for each in runs.remarks if each.is_of_inputs), *remarks_of(runs.scenario))


def longest_period(scenario: Scenario, schedules: Sequence[Schedule]) -> int:
    """Return the longest period of some schedules, in steps."""
    described = job(scenario)
    return max(len(schedule.cycle(described)) for schedule in schedules)


def runs_of(
    scenario: Scenario, longest_period: int, *, block_steps: int | None = None, checkpoint_every: int = 0
) -> Runs:
    """Return how the schedules of a scenario are run.

    Args:
        scenario: The scenario to simulate.
        longest_period: Of the schedules that are compared, in steps.
        block_steps: Steps of a block; as the scenario states if None, and if it does not, chosen (see the module).
        checkpoint_every: Longest distance of checkpoints, if longer than that of the scenario.

    Raises:
        ScenarioError: A block is longer than the recording.
    """
    recording = _recording(scenario, longest_period, block_steps)
    as_imported = scenario if recording and scenario.imported and not _is_resampled(scenario) else None
    if recording:
        scenario = scenario.changed(disturbances=in_blocks(scenario.disturbances, recording.block_steps))
    if dataset(scenario) is not None:
        return Runs(scenario, recording, longest_period, as_imported)
    between = max(checkpoint_every, *(_steps_between_files(scenario, each) for each in scenario.schedules))
    own = max(recording.n_steps if recording else scenario.steps, _N_PERIODS * longest_period)
    steps = math.ceil(max(own, _N_PERIODS * between) / longest_period) * longest_period
    return Runs(scenario.changed(steps=steps), recording, longest_period, as_imported, own)


def _steps_between_files(scenario: Scenario, schedule: Schedule) -> int:
    """Return the steps from one checkpoint of a schedule to the next; 0 if there are none."""
    described = job(in_steps(scenario, schedule))
    return described.checkpoint.every if described.checkpoint else 0


def _is_resampled(scenario: Scenario) -> bool:
    return any(isinstance(each, Recorded) and each.resample_steps for each in scenario.disturbances)


def _recording(scenario: Scenario, longest_period: int, wanted: int | None) -> ResampledRecording | None:
    recorded = [each for each in scenario.disturbances if isinstance(each, Recorded)]
    if not recorded:
        return None
    n_steps = min(len(read_recorded(each)) for each in recorded)
    if wanted is not None and wanted > n_steps:
        hint = max(1, n_steps // _MOST_BLOCK_SHARE)
        raise ScenarioError(f"blocks of {wanted} steps; {n_steps} were recorded: write --block {hint}")
    stated = wanted or max(each.resample_steps or 0 for each in recorded)  # of several the most, which suits all
    if stated:
        return ResampledRecording(n_steps, min(stated, n_steps), is_stated=True)
    best = max(longest_period, math.ceil(math.cbrt(n_steps) - 1e-9))
    return ResampledRecording(n_steps, max(1, min(best, n_steps // _MOST_BLOCK_SHARE)), is_stated=False)


def in_blocks(
    disturbances: Sequence[Disturbance | LinkDisturbance], block_steps: int | None
) -> tuple[Disturbance | LinkDisturbance, ...]:
    """Return disturbances with recordings resampled in blocks of this many steps; None: played as they happened."""
    return tuple(
        unchecked_copy(each, resample_steps=block_steps) if isinstance(each, Recorded) else each
        for each in disturbances
    )
