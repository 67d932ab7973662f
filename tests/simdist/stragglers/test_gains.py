"""Gains of other schedules, and how sure they are."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from straggling_jobs import job

from simdist.errors import ScenarioError
from simdist.runs.building import build, delays
from simdist.scenario import Recorded, Scenario
from simdist.schedules import LocalSGD, Schedule, Sync
from simdist.stragglers import Gain, Gains, find_gains
from simdist.studies.measuring import measure
from simdist.studies.resampling import ResampledRecording

SYNC = Sync()
PAUSES = "{kind: transient, probability: 5%, delay: 100 ms}"


def recorded(scenario: Scenario, folder: Path) -> Scenario:
    """Return a scenario that plays what another one draws."""
    file = folder / f"recording-{scenario.seed}.npz"
    np.savez(file, delays(scenario)["host"][0])
    return scenario.changed(disturbances=(Recorded(file=file),))


def compared(scenario: Scenario, *schedules: Schedule, n_runs: int = 40, **options) -> Gains:
    return find_gains(scenario, schedules or (LocalSGD(period=4),), baseline=SYNC, n_runs=n_runs, **options)


def test_intervals_from_recordings_hold_what_long_runs_gain_nearly_always(tmp_path: Path) -> None:
    """Each of 20 recordings has 100 steps; 95 % of such intervals would hold the speed-up of endless runs."""
    endless = job(PAUSES, steps=20_000)
    step_s = [
        measure(endless, build(endless, schedule), n_seeds=1).step_s[0] for schedule in (SYNC, LocalSGD(period=4))
    ]
    speedup, n_held = step_s[0] / step_s[1], 0
    for seed in range(20):
        found = compared(recorded(job(PAUSES, steps=100).changed(seed=seed), tmp_path), n_runs=100)
        (row,) = found.rows
        assert row.interval is not None
        n_held += row.interval[0] <= speedup <= row.interval[1]
    assert n_held >= 18


def test_longer_recordings_give_narrower_intervals(tmp_path: Path) -> None:
    widths = []
    for steps in (60, 960):
        (row,) = compared(recorded(job(PAUSES, steps=steps), tmp_path), n_runs=100).rows
        assert row.interval is not None
        widths.append(row.interval[1] - row.interval[0])
    assert widths[1] < 0.5 * widths[0]


def test_runs_hold_ten_of_the_longest_periods_and_whole_ones(tmp_path: Path) -> None:
    found = compared(recorded(job(PAUSES, steps=103), tmp_path), LocalSGD(period=4), LocalSGD(period=8))
    assert found.n_steps == 104
    assert compared(recorded(job(PAUSES, steps=20), tmp_path), LocalSGD(period=8)).n_steps == 80
    assert (found.drawn, found.n_runs) == ("recorded", 40)


def test_every_schedule_averages_once_a_period_whatever_the_length_of_the_recording() -> None:
    """Without stragglers a step of local SGD takes what computing takes, and a share of the average."""
    scenario = job(steps=20)
    found = compared(scenario, *(LocalSGD(period=period) for period in (3, 4, 7, 8)))
    step_s = [row.step_s for row in found.rows]
    average_s = (step_s[0] - step_s[1]) / (1 / 3 - 1 / 4)
    assert step_s[2] - step_s[3] == pytest.approx(average_s * (1 / 7 - 1 / 8))


def test_a_recording_of_fewer_than_two_periods_gives_no_interval(tmp_path: Path) -> None:
    found = compared(recorded(job(PAUSES, steps=20), tmp_path), LocalSGD(period=2), LocalSGD(period=11))
    short, long = found.rows
    assert short.interval is not None
    assert (long.interval, long.is_sure) == (None, False)
    assert long.problem == ("20 recorded steps are too few to be sure with a period of 11 steps: record 22 or more")


def test_few_runs_are_never_sure(tmp_path: Path) -> None:
    for n_runs, are in ((1, "1 run is"), (39, "39 runs are")):
        found = compared(recorded(job(PAUSES, steps=60), tmp_path), n_runs=n_runs)
        assert found.rows[0].problem == f"{are} too few to be sure: write --resamples 100 or more"
        assert found.fastest == found.rows[0]
        assert found.best is None


def test_a_block_that_is_asked_for_is_taken_or_refused(tmp_path: Path) -> None:
    scenario = recorded(job(PAUSES, steps=20), tmp_path)
    found = compared(scenario, LocalSGD(period=2), block_steps=7)
    assert found.recording == ResampledRecording(20, 7, is_stated=True)
    assert found.rows[0].problem is None
    longer = compared(scenario, LocalSGD(period=2), block_steps=11).rows[0]
    assert longer.problem == "20 recorded steps are too few to be sure with blocks of 11 steps: record 22 or more"
    with pytest.raises(ScenarioError, match="blocks of 21 steps; 20 were recorded: write --block 4"):
        compared(scenario, block_steps=21)


def test_random_disturbances_are_drawn_anew_for_runs_as_long_as_the_scenario() -> None:
    found = compared(job(PAUSES, steps=50))
    assert (found.drawn, found.n_steps, found.recording) == ("random", 52, None)
    (row,) = found.rows
    assert row.interval is not None
    assert row.interval[0] < row.speedup < row.interval[1]
    assert row.is_sure
    assert found.best == row


def test_the_interval_is_that_of_runs_and_does_not_shrink_with_their_number() -> None:
    def mean_width(n_runs: int, seeds: Iterable[int]) -> float:
        scenario = job(PAUSES, steps=50)
        found = [compared(scenario.changed(seed=seed), n_runs=n_runs).rows[0].interval for seed in seeds]
        return float(np.mean([each[1] - each[0] for each in found if each]))

    assert mean_width(400, [0]) == pytest.approx(mean_width(50, range(10)), rel=0.2)


def test_a_rank_that_is_always_late_holds_up_every_schedule() -> None:
    """Local SGD saves three of four all-reduces, 14 ms each; the straggler's 100 ms stay."""
    scenario = job("{kind: persistent, delay: 100 ms, ranks: [3]}")
    found = compared(scenario, LocalSGD(period=4))
    (row,) = found.rows
    assert (found.drawn, found.n_runs, row.interval) == ("fixed", 1, None)
    undisturbed = compared(scenario.changed(disturbances=()), LocalSGD(period=4)).rows[0]
    assert row.speedup < undisturbed.speedup


def test_without_communication_and_stragglers_nothing_is_gained() -> None:
    scenario = job()
    ideal = scenario.cluster.model_copy(update={"network": scenario.cluster.fabric})
    found = compared(scenario.changed(cluster=ideal))
    assert found.rows[0].speedup == pytest.approx(1)
    assert found.best is None


def test_a_block_that_the_scenario_states_is_taken_but_not_its_number_of_steps(tmp_path: Path) -> None:
    scenario = recorded(job(PAUSES, steps=30), tmp_path)
    (playing,) = scenario.disturbances
    resampling = scenario.changed(disturbances=(playing.model_copy(update={"resample_steps": 5}),), steps=500)
    found = compared(resampling, LocalSGD(period=2))
    assert (found.recording, found.n_steps) == (ResampledRecording(30, 5, is_stated=True), 30)
    other = compared(resampling, LocalSGD(period=2), block_steps=6)
    assert other.recording == ResampledRecording(30, 6, is_stated=True)


def test_a_stated_block_that_is_shorter_than_a_period_is_told(tmp_path: Path) -> None:
    scenario = recorded(job(PAUSES, steps=30), tmp_path)
    found = compared(scenario, LocalSGD(period=8), block_steps=3)
    (remark,) = found.remarks
    assert remark.text.startswith("blocks of 3 steps, as stated, are shorter than the longest period, 8 steps")
    assert compared(scenario, LocalSGD(period=3), block_steps=3).remarks == ()
    assert compared(scenario, LocalSGD(period=8)).remarks == ()


@pytest.mark.parametrize(("interval", "is_sure"), [((0.9, 1.3), False), ((1.05, 1.3), True), (None, True)])
def test_a_gain_is_sure_if_all_of_its_interval_is_a_gain(interval: tuple[float, float] | None, is_sure: bool) -> None:
    gain = Gain("local-4", step_s=1.0, speedup=1.1, interval=interval, engine="fast")
    assert gain.is_faster
    assert gain.is_sure == is_sure
    assert not replace(gain, problem="too few").is_sure


def test_no_runs_are_refused() -> None:
    with pytest.raises(ScenarioError, match="0 resamples; must be at least 1"):
        compared(job(PAUSES), n_runs=0)
