"""How schedules are run to be compared: for whole periods, under resampled recordings, as sure as those can tell."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, final

import numpy as np
import pytest
from commandline import SMALL, edited

from simdist.errors import ScenarioError
from simdist.plan import Group
from simdist.runs.building import build, delays, job
from simdist.scenario import Recorded, Scenario, loads
from simdist.scenario.sampling import resampled_steps
from simdist.schedules import HierarchicalSGD, LocalSGD, Schedule, Sync, kinds
from simdist.schedules.averaging import AveragingSchedule
from simdist.schedules.job import Shape
from simdist.studies.resampling import Runs, runs_of
from simdist.tuning.constraints import facts

SCHEDULES = [cls(**example) for cls in kinds().values() for example in cls.examples]
EPOCHS = """\
input: {source: storage, data: {samples: 4096, file_size: 1 kB}}
"""
STORED = "  network: {latency: 25 us, bandwidth: 25 Gbit/s}\n  storage: {latency: 1 ms, bandwidth: 1 GB/s}\n"


def small(steps: int = 12) -> Scenario:
    return loads(SMALL).changed(steps=steps)


def recorded(folder: Path, n_steps: int, **settings: object) -> Scenario:
    np.savez(folder / "late.npz", np.arange(n_steps * 8.0).reshape(n_steps, 8))
    playing = Recorded.model_validate({"on": "host", "file": folder / "late.npz"} | settings)
    return small(n_steps).changed(disturbances=(playing,), seed=0)


def repeats(values: Sequence[object], period: int) -> bool:
    return list(values[period:]) == list(values[:-period])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_every_schedule_does_the_same_again_after_its_cycle_and_not_before(schedule: Schedule) -> None:
    described = replace(job(small()), n_steps=60)
    cycle = schedule.cycle(described)
    results = [schedule.result(step, described) for step in range(cycle.start, cycle.start + 4 * len(cycle))]
    assert repeats(results, len(cycle))
    assert not any(repeats(results, period) for period in range(1, len(cycle)))


@final
class _Now(AveragingSchedule):
    """Averages within pairs every 2 steps, and over all every 5; it does not say how long its period is."""

    kind: Literal["now"] = "now"

    def default_label(self) -> str:
        return "now"

    def average(self, step: int, shape: Shape) -> Group | None:
        return Group(shape.world_size) if self.fires(5, step) else Group(2) if self.fires(2, step) else None


def test_the_period_of_a_schedule_that_does_not_tell_it_is_seen_from_its_averages() -> None:
    assert _Now(warmup_steps=3).cycle(job(small())) == range(3, 13)


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        (Sync(), 80),
        (LocalSGD(period=4), 80),
        (LocalSGD(period=7), 84),
        (LocalSGD(period=8, warmup_steps=3), 83),
        (HierarchicalSGD(levels={3: 4, 6: 8}), 84),
    ],
)
def test_a_schedule_runs_for_whole_periods_after_its_warm_up(schedule: Schedule, steps: int) -> None:
    assert runs_of(small(20), 8).scenario_for(schedule).steps == steps


def test_runs_are_as_long_as_the_scenario_or_its_recording_but_ten_periods_at_least(tmp_path: Path) -> None:
    assert runs_of(small(1000), 8).scenario.steps == 1000
    assert runs_of(small(12), 3).scenario.steps == 30
    assert runs_of(recorded(tmp_path, 100), 3).scenario.steps == 102
    assert runs_of(recorded(tmp_path, 20, resample_steps=4).changed(steps=5000), 1).scenario.steps == 20


def test_runs_of_different_length_meet_the_same_delays() -> None:
    runs = runs_of(small(20), 8)
    short, long = (delays(runs.scenario_for(schedule))["host"] for schedule in (Sync(), LocalSGD(period=7)))
    assert long[:, : short.shape[1]].tolist() == short.tolist()


def test_with_a_data_set_the_steps_of_the_scenario_stand() -> None:
    text = edited(
        ("  network: {latency: 25 us, bandwidth: 25 Gbit/s}\n", STORED), ("steps: 12\n", "steps: 12\n" + EPOCHS)
    )
    runs = runs_of(loads(text), 8)
    assert runs.scenario_for(LocalSGD(period=7)).steps == runs.scenario.steps == 12


@pytest.mark.parametrize("period", [1, 3, 7, 8])
def test_bytes_per_step_are_exact_shares_of_the_model(period: int) -> None:
    """Around the ring of 8 ranks, 2 (8 - 1) / 8 of the model leave a node in each average."""
    scenario = runs_of(small(20), 8).scenario_for(LocalSGD(period=period))
    sent = facts(scenario, build(scenario, LocalSGD(period=period))).sent_nbytes
    assert sent == pytest.approx(2 * 7 / 8 * 404_000 / period, rel=1e-12)


@pytest.mark.parametrize(
    ("n_steps", "longest", "block"), [(60, 8, 8), (30, 8, 6), (27, 1, 3), (1000, 8, 10), (5, 8, 1), (1, 8, 1)]
)
def test_blocks_hold_a_period_if_the_recording_is_long_enough(
    tmp_path: Path, n_steps: int, longest: int, block: int
) -> None:
    runs = runs_of(recorded(tmp_path, n_steps), longest)
    assert runs.recording is not None
    assert (runs.recording.n_steps, runs.recording.block_steps) == (n_steps, block)
    (playing,) = runs.scenario.disturbances
    assert isinstance(playing, Recorded)
    assert playing.resample_steps == block


def test_blocks_that_are_stated_are_taken_and_told_if_they_are_short(tmp_path: Path) -> None:
    runs = runs_of(recorded(tmp_path, 60, resample_steps=3), 8)
    assert runs.recording is not None
    assert runs.recording.block_steps == 3
    (remark,) = runs.remarks
    assert "blocks of 3 steps, as stated, are shorter than the longest period, 8 steps" in remark.text
    assert runs_of(recorded(tmp_path, 60), 8).remarks == ()
    with pytest.raises(ScenarioError, match="blocks of 61 steps; 60 were recorded: write --block 12"):
        runs_of(recorded(tmp_path, 60), 8, block_steps=61)


def test_without_a_recording_nothing_is_widened_and_with_too_short_a_one_nothing_is_said(tmp_path: Path) -> None:
    assert runs_of(small(), 8).widening(Sync()) == 1
    short = runs_of(recorded(tmp_path, 15), 8)
    assert short.problem(Sync()) is None
    assert short.problem(LocalSGD(period=8)) == (
        "15 recorded steps are too few to be sure with a period of 8 steps: record 16 or more"
    )


@pytest.mark.parametrize("n_steps", [20, 60, 200])
@pytest.mark.parametrize("longest", [1, 8])
def test_intervals_of_95_percent_hold_the_truth_of_at_least_nine_in_ten_recordings(
    tmp_path: Path, n_steps: int, longest: int
) -> None:
    """Of exponential delays, the mean; runs are longer than the recording or as long."""
    runs: Runs = runs_of(recorded(tmp_path, n_steps), longest)
    assert runs.recording is not None
    block, length = runs.recording.block_steps, runs.scenario_for(Sync()).steps
    steps = np.array([resampled_steps(seed, n_steps, block, 0, length) for seed in range(200)])
    rng, n_held, widths = np.random.default_rng(0), 0, []
    for _ in range(400):
        delays_s = rng.exponential(1.0, n_steps)
        means_s = delays_s[steps].mean(axis=1)
        center_s = float(means_s.mean())
        low, high = center_s + runs.widening(Sync()) * (np.percentile(means_s, (2.5, 97.5)) - center_s)
        n_held += bool(low <= 1 <= high)
        widths.append(high - low)
    assert n_held >= 360
    assert np.mean(widths) < 2 * 2 * 1.96 / np.sqrt(n_steps)  # twice what the law of large numbers has
