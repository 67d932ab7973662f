"""Recordings are played as they are, or put together by every seed from blocks of consecutive steps."""

from pathlib import Path

import numpy as np
import pytest

from simdist.errors import ScenarioError
from simdist.scenario import loads
from simdist.scenario.disturbances import Disturbance, Recorded, Transient
from simdist.scenario.sampling import DelaySampler, resampled_steps, sampler

N_RECORDED, WORLD_SIZE = 12, 3


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    """Write a recording whose every value tells its step and rank."""
    seconds = np.arange(N_RECORDED)[:, None] + np.arange(WORLD_SIZE) / 10
    np.savez(tmp_path / "late.npz", host=seconds, compute=seconds + 100)
    return tmp_path / "late.npz"


def drawn(recorded: Recorded, n_steps: int, *, seed: int = 0) -> np.ndarray:
    return sampler_of(recorded, seeds=[seed]).take(n_steps)[recorded.on][0]


def sampler_of(*recorded: Disturbance, seeds: list[int]) -> DelaySampler:
    return sampler(recorded, seeds=seeds, world_size=WORLD_SIZE, ranks_per_node=3, compute_s=np.ones(3))


def test_blocks_are_consecutive_recorded_steps_of_all_ranks(file: Path) -> None:
    seconds = drawn(Recorded(file=file, resample_steps=4), 40)
    steps = seconds[:, 0].astype(int)
    np.testing.assert_allclose(seconds, steps[:, None] + np.arange(WORLD_SIZE) / 10)
    inside = np.diff(steps.reshape(10, 4), axis=1) % N_RECORDED
    assert (inside == 1).all()
    assert (np.diff(steps)[3::4] % N_RECORDED != 1).any()


def test_every_recorded_step_is_as_likely() -> None:
    steps = np.concatenate([_steps(seed, block_steps=5, n_steps=50) for seed in range(200)])
    counts = np.bincount(steps, minlength=N_RECORDED)
    np.testing.assert_allclose(counts / counts.sum(), 1 / N_RECORDED, rtol=0.15)


def _steps(seed: int, *, block_steps: int, n_steps: int) -> np.ndarray:
    return resampled_steps(seed, N_RECORDED, block_steps, 0, n_steps)


def test_channels_that_were_recorded_together_stay_together(file: Path) -> None:
    none, late = Transient(probability=0.5, delay_s=0.0), Recorded(file=file, resample_steps=2)
    delays = sampler_of(none, late, Recorded(file=file, resample_steps=2, on="compute"), seeds=[5]).take(30)
    np.testing.assert_allclose(delays["compute"], delays["host"] + 100)


def test_seeds_differ_and_many_seeds_are_each_what_one_is(file: Path) -> None:
    recorded = Recorded(file=file, resample_steps=3)
    seconds = sampler_of(recorded, seeds=[4, 9]).take(20)["host"]
    assert not np.array_equal(seconds[0], seconds[1])
    for of_seed, seed in zip(seconds, (4, 9), strict=True):
        np.testing.assert_array_equal(of_seed, drawn(recorded, 20, seed=seed))


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_chunks_and_longer_runs_change_nothing(file: Path, chunk: int) -> None:
    recorded = Recorded(file=file, resample_steps=3)
    whole = drawn(recorded, 130)
    parts = sampler_of(recorded, seeds=[0])
    pieces = [parts.take(min(chunk, 130 - first))["host"][0] for first in range(0, 130, chunk)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    np.testing.assert_array_equal(drawn(recorded, 11), whole[:11])


SCENARIO = """
cluster: {nodes: 1, gpus_per_node: 3, fabric: ideal, network: ideal}
workload: {tensors: [{name: w, count: 10}], batch_size: 1, forward: 10 ms}
steps: 50
disturbances: [{kind: recorded, file: late.npz, resample_steps: STEPS}]
schedules: [{kind: sync}]
"""


def test_a_run_may_be_longer_than_its_recording_and_seeds_count(file: Path) -> None:
    scenario = loads(SCENARIO.replace("STEPS", "12"), folder=file.parent)
    assert scenario.is_random
    assert scenario.steps > N_RECORDED


def test_blocks_longer_than_the_recording_are_refused(file: Path) -> None:
    with pytest.raises(ScenarioError, match=r"resample_steps: blocks of 13 steps; late.npz holds 12: write 12 or less"):
        loads(SCENARIO.replace("STEPS", "13"), folder=file.parent)
