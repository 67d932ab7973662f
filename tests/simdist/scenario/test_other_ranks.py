"""Recordings of another number of ranks than the run has, and recordings that are arrays of Python."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from commandline import call, write
from engine_runs import simulate

from simdist.errors import ScenarioError
from simdist.runs import run_directory
from simdist.runs.building import build, delays
from simdist.scenario import Recorded, load
from simdist.scenario.disturbances import Disturbance
from simdist.scenario.other_ranks import played_ranks
from simdist.scenario.sampling import sampler

N_STEPS, N_RECORDED = 50, 3
SECONDS = 10.0 * np.arange(N_STEPS)[:, None] + np.arange(N_RECORDED)  # the step, and the rank


def drawn(*recorded: Disturbance, world_size: int, seed: int = 0, n_steps: int = N_STEPS) -> np.ndarray:
    found = sampler(
        recorded, seeds=[seed], world_size=world_size, ranks_per_node=1, compute_s=np.ones(world_size)
    ).take(n_steps)
    return found["host"][0]


def test_more_ranks_play_whole_ranks_again_from_another_step() -> None:
    seconds = drawn(Recorded(file=SECONDS), world_size=9)
    np.testing.assert_array_equal(seconds[:, :3], SECONDS)
    shifts = set()
    for copy in (1, 2):
        block = seconds[:, 3 * copy : 3 * copy + 3]
        shift = int(block[0, 0] // 10)
        np.testing.assert_array_equal(block, np.roll(SECONDS, -shift, axis=0))
        shifts.add(shift)
    assert len(shifts) == 2


def test_ranks_of_an_incomplete_copy_are_drawn_without_replacement() -> None:
    ranks = {seed: tuple(drawn(Recorded(file=SECONDS), world_size=5, seed=seed)[0, 3:] % 10) for seed in range(60)}
    assert set(ranks.values()) == {(0, 1), (0, 2), (1, 2)}


def test_fewer_ranks_are_drawn_and_play_the_recorded_steps_in_order() -> None:
    for seed in range(20):
        seconds = drawn(Recorded(file=SECONDS), world_size=2, seed=seed)
        assert len({*(seconds[0] % 10)}) == 2
        np.testing.assert_array_equal(seconds // 10, np.repeat(np.arange(N_STEPS)[:, None], 2, axis=1))


@pytest.mark.parametrize("world_size", [2, 7])
@pytest.mark.parametrize("block", [None, 4])
def test_seeds_and_chunks_are_each_what_one_is(world_size: int, block: int | None) -> None:
    recorded = Recorded(file=SECONDS, resample_steps=block)
    about = {"world_size": world_size, "ranks_per_node": 1, "compute_s": np.ones(world_size)}
    both = sampler([recorded], seeds=[3, 9], **about)
    pieces = np.concatenate([both.take(n)["host"] for n in (1, 17, 22)], axis=1)
    for of_seed, seed in zip(pieces, (3, 9), strict=True):
        np.testing.assert_array_equal(of_seed, drawn(recorded, world_size=world_size, seed=seed, n_steps=40))
    assert not np.array_equal(*pieces)


def test_blocks_keep_the_ranks_of_a_copy_together() -> None:
    seconds = drawn(Recorded(file=SECONDS, resample_steps=5), world_size=6, n_steps=200)
    for block in (seconds[:, :3], seconds[:, 3:]):
        np.testing.assert_array_equal(block - block[:, :1], np.tile(np.arange(3), (200, 1)))
    assert len({*((seconds[:, 3] - seconds[:, 0]) % (10 * N_STEPS))}) == 1  # one shift for the run


def test_recordings_of_a_scenario_play_the_same_ranks_and_steps() -> None:
    together = drawn(Recorded(file=SECONDS), Recorded(file=SECONDS + 0.25), world_size=7)
    np.testing.assert_array_equal(together, 2 * drawn(Recorded(file=SECONDS), world_size=7) + 0.25)


def test_selected_ranks_play_what_they_play_without_selection() -> None:
    few = drawn(Recorded(file=SECONDS, ranks=(1, 6)), world_size=7)
    np.testing.assert_array_equal(few[:, [1, 6]], drawn(Recorded(file=SECONDS), world_size=7)[:, [1, 6]])
    assert not few[:, [0, 2, 3, 4, 5]].any()


def test_every_step_begins_a_copy_with_equal_probability() -> None:
    shifts = [int(played_ranks(seed, 5, 1, 2).shifts[1]) for seed in range(2000)]
    np.testing.assert_allclose(np.bincount(shifts) / 2000, 0.2, rtol=0.15)


JOB = {
    "cluster": {"nodes": 4, "gpus_per_node": 1, "fabric": "ideal", "network": "ideal"},
    "workload": {"tensors": [{"name": "w", "count": 10}], "batch_size": 1, "forward_s": 0.04, "backward_s": 0.06},
    "steps": 10,
    "schedules": ["sync", {"kind": "local_sgd", "period": 10}],
}


def test_more_ranks_are_late_more_often_than_were_recorded() -> None:
    """One rank, late by 1 s in step 7 of 10, is played by 4 from different steps: sync takes 1 s for each of them."""
    late = np.zeros((10, 1))
    late[7] = 1.0
    scenario = load(JOB | {"disturbances": [Recorded(file=late)]})
    assert scenario.is_random
    for row in (delays(scenario.changed(seed=seed))["host"][0] for seed in range(20)):
        assert row.sum(axis=0).tolist() == [1.0] * 4
        assert np.flatnonzero(row[:, 0]).tolist() == [7]
    n_late = set()
    for seed in range(8):
        chosen = scenario.changed(seed=seed)
        steps = np.flatnonzero(delays(chosen)["host"][0].any(axis=1))
        built = build(chosen, chosen.schedules[0])
        assert simulate(built.plan, built.costs, delays(chosen)).makespan_s == pytest.approx(10 * 0.1 + len(steps))
        n_late.add(len(steps))
    assert max(n_late) > 2


def test_commands_remark_it_and_runs_keep_the_recording(tmp_path: Path, capsys) -> None:
    np.savetxt(tmp_path / "late.csv", SECONDS / 1e4, delimiter=",")
    workload = {"tensors": [{"name": "w", "count": 10}], "batch_size": 1, "forward": "40 ms"}
    document = JOB | {"workload": workload, "disturbances": [{"kind": "recorded", "file": "late.csv"}]}
    path = write(tmp_path / "job.yaml", json.dumps(document))
    answer = call(capsys, "simulate", path, "-o", tmp_path / "runs")
    assert answer.code == 0, answer.err
    assert (
        "disturbances[0]: late.csv holds 3 ranks, the cluster has 4: ranks from 3 on play recorded ranks again, from a "
        "step that the seed draws; ranks of different copies are independent" in answer.err
    )
    run = run_directory.read(tmp_path / "runs" / "sync")
    np.testing.assert_array_equal(run.delays["host"][0], drawn(Recorded(file=SECONDS / 1e4), world_size=4)[:10])
    assert run.scenario.disturbances[0].ranks_remark(4) is not None
    fewer = call(capsys, "simulate", write(path, json.dumps(document | {"cluster": JOB["cluster"] | {"nodes": 2}})))
    assert "late.csv holds 3 ranks, the cluster has 2: every seed draws which of them are played" in fewer.err


# ---------------------------------------------------------------- arrays of Python


@pytest.mark.parametrize("form", [np.asarray, np.ndarray.tolist, pd.DataFrame, lambda array: array.astype(np.float32)])
def test_recording_may_be_an_array(form) -> None:
    recorded = Recorded(file=form(SECONDS))
    np.testing.assert_array_equal(drawn(recorded, world_size=3), SECONDS)
    assert recorded == Recorded(file=SECONDS)
    assert recorded != Recorded(file=SECONDS + 1)


def test_array_in_a_mapping_reaches_every_process() -> None:
    scenario = load(JOB | {"disturbances": [{"kind": "recorded", "file": np.full((10, 4), 0.5)}]})
    assert scenario.changed("cluster.network.latency", "1 us").disturbances == scenario.disturbances
    assert delays(scenario)["host"].sum() == 20.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(3), r"an array of shape \[3\] is not a recording: give it two dimensions"),
        (np.zeros((0, 3)), r"an array of shape \[0, 3\] is not a recording"),
        ([[1.0, 2.0], [3.0]], "is not a recording: write the name of a .npz or .csv file, or give a two-dimensional"),
        (None, r"an array of shape \[\] is not a recording"),
        (np.array([[-1.0]]), "delays are seconds, finite and 0 or more"),
        (np.array([[np.nan]]), "delays are seconds, finite and 0 or more"),
        (np.array([["late"]]), "is not a recording"),
    ],
)
def test_array_that_is_no_recording_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recorded(file=value)


def test_file_names_a_recording_and_does_not_hold_it(tmp_path: Path) -> None:
    text = "disturbances: [{kind: recorded, file: [[0.1, 0.2]]}]"
    with pytest.raises(ScenarioError, match=r"is not a recording: write the name of a \.npz or \.csv file"):
        load(write(tmp_path / "x.yaml", text))
