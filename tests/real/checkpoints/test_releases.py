"""Checkpoints that a release wrote load to the last bit."""

import zipfile
from pathlib import Path

import loops
import numpy as np
import pytest
import sharded_loops
from loops import Loop
from pool import Pool
from sharded_loops import ShardedLoop
from trainings import Training, assert_equal

from simdist.schedules import LocalSGD, Sync

torch = pytest.importorskip("torch")
from real.checkpoints.loading import load_checkpoint  # noqa: E402

FILES = Path(__file__).parents[2] / "data" / "checkpoints"
WHOLE = Training("dropout", optimizer="adam")
SHARDED = Training("even", "adamw")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with zipfile.ZipFile(FILES / "0.1.0.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path


def parameters(folder: Path, job: str) -> np.ndarray:
    with np.load(folder / "parameters.npz") as arrays:
        return arrays[job]


def test_a_job_resumes_from_a_file(two: Pool, folder: Path) -> None:
    finished = Loop(LocalSGD(period=4), WHOLE, 6, decay=True, final_average=False, checkpoint=folder / "whole", every=6)
    expected = parameters(folder, "whole")
    assert not np.array_equal(*expected)  # each rank has parameters of its own
    assert_equal(two.run(loops.train, finished), expected)


def test_a_sharded_job_resumes_from_a_folder(two: Pool, folder: Path) -> None:
    finished = ShardedLoop(Sync(), SHARDED, 2, checkpoint=folder / "sharded")
    assert_equal(two.run(sharded_loops.train, finished), parameters(folder, "sharded"))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_state_is_loaded_without_the_job(folder: Path, rank: int) -> None:
    for job, name, training in (
        ("whole", "step-0000000006.ckpt", WHOLE),
        ("sharded", "step-0000000002", SHARDED),
    ):
        module, optimizer = training.make()
        step = load_checkpoint(folder / job / name, module, optimizer, rank=rank)
        assert np.array_equal(loops.vector(module), parameters(folder, job)[rank])
        steps = [state["step"].item() for state in optimizer.state.values()]
        assert steps == [step] * len(list(module.parameters()))
