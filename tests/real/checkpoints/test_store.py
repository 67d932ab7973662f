"""A loop that goes on from a checkpoint ends as one that was never disturbed; a damaged checkpoint is noticed."""

import dataclasses
import hashlib
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import loops
import numpy as np
import pytest
from loops import Loop
from pool import Pool
from processes import restarting, run
from trainings import LATE, SCHEDULES, Training, assert_equal

from simdist.schedules import LocalSGD, Sync
from simdist.schedules.gtopk import GTopK
from simdist.schedules.hitopk import HiTopK
from simdist.schedules.powersgd import PowerSGD

torch = pytest.importorskip("torch")
from real.checkpoints import zip_file  # noqa: E402
from real.checkpoints.store import DamagedError, JobIdentity  # noqa: E402

LOOP = Loop(SCHEDULES[0], Training("dropout"), 12, every=4)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    made = {world_size: Pool(world_size) for world_size in (1, 2, 4)}
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture
def four(pools: dict[int, Pool]) -> Pool:
    return pools[4]


@pytest.fixture(scope="module")
def undisturbed(pools: dict[int, Pool]) -> list[np.ndarray]:
    return pools[4].run(loops.train, LOOP)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- going on ---


@pytest.mark.parametrize(
    ("schedule", "model"),
    [
        *((schedule, "dropout") for schedule in (*SCHEDULES, *LATE)),
        (SCHEDULES[1], "conv"),
        pytest.param(SCHEDULES[0], "conv", marks=pytest.mark.full),
        pytest.param(SCHEDULES[2], "conv", marks=pytest.mark.full),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_resumed_loop_ends_with_the_same_parameters_to_the_last_bit(
    four: Pool, schedule, model: str, tmp_path: Path
) -> None:
    loop = Loop(schedule, Training(model), 12, decay=True)
    expected = four.run(loops.train, loop)
    kept = dataclasses.replace(loop, checkpoint=tmp_path)
    stopped = four.run(loops.train, dataclasses.replace(kept, stop_before=8))
    assert not np.array_equal(stopped[0], expected[0])
    assert names(tmp_path) == ["step-0000000005.ckpt"]
    assert_equal(four.run(loops.train, kept), expected)
    assert names(tmp_path) == ["step-0000000010.ckpt", "step-0000000012.ckpt"]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_plain_loop_resumes_too(four: Pool, optimizer: str, tmp_path: Path) -> None:
    loop = Loop(SCHEDULES[2], Training("dropout", optimizer=optimizer), 8, plain=True)
    kept = dataclasses.replace(loop, checkpoint=tmp_path)
    four.run(loops.train, dataclasses.replace(kept, stop_before=6))
    assert_equal(four.run(loops.train, kept), four.run(loops.train, loop))


def test_a_finished_loop_is_not_done_again(four: Pool, undisturbed: list[np.ndarray], tmp_path: Path) -> None:
    kept = dataclasses.replace(LOOP, checkpoint=tmp_path)
    for _ in range(2):
        assert_equal(four.run(loops.train, kept), undisturbed)


@pytest.mark.parametrize("more", [12, None])
def test_a_finished_loop_goes_on_with_more_steps(
    four: Pool, undisturbed: list[np.ndarray], more: int | None, tmp_path: Path
) -> None:
    kept = dataclasses.replace(LOOP, checkpoint=tmp_path)
    four.run(loops.train, dataclasses.replace(kept, n_steps=6))
    assert_equal(four.run(loops.train, dataclasses.replace(kept, n_steps=more, stop_before=12)), undisturbed)
    for error in four.run(loops.error_of_loop, dataclasses.replace(kept, n_steps=8)):
        assert "its newest checkpoint is of 12 steps, and n_steps=8" in error


def test_files_that_a_killed_writer_has_left_are_deleted(pools: dict[int, Pool], tmp_path: Path) -> None:
    run(loops.killed_while_writing, 1, tmp_path / "step-0000000004.ckpt")
    assert len(names(tmp_path)) == 1
    loop = Loop(Sync(), Training(), 6, ranks_per_node=1, checkpoint=tmp_path, every=4, stop_before=5)
    pools[1].run(loops.train, loop)
    assert names(tmp_path) == ["step-0000000004.ckpt"]


@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [
        (HiTopK, "lars"),
        (GTopK, "momentum"),
        pytest.param(HiTopK, "momentum", marks=pytest.mark.full),
        pytest.param(GTopK, "lars", marks=pytest.mark.full),
    ],
)
def test_compression_goes_on_to_the_last_bit(four: Pool, schedule, optimizer: str, tmp_path: Path) -> None:
    """The residuals of padded slices and of merges, and the velocities of LARS, belong to the state."""
    compressed = schedule(density=0.2, method="dgc", first_bucket_nbytes=100, bucket_nbytes=300)
    loop = Loop(compressed, Training(optimizer=optimizer), 8)
    expected = four.run(loops.train, loop)
    four.run(loops.train, dataclasses.replace(loop, checkpoint=tmp_path, stop_before=6))
    assert_equal(four.run(loops.train, dataclasses.replace(loop, checkpoint=tmp_path)), expected)


def test_factors_go_on_to_the_last_bit(four: Pool, tmp_path: Path) -> None:
    """Q and the residual belong to the state; the step that draws Q may come before the checkpoint, or after it."""
    for name, warmup_steps in (("before", 2), ("after", 6)):
        schedule = PowerSGD(
            rank=2, min_compression_rate=0.5, warmup_steps=warmup_steps, first_bucket_nbytes=100, bucket_nbytes=300
        )
        loop = Loop(schedule, Training(), 9)
        expected = four.run(loops.train, loop)
        four.run(loops.train, dataclasses.replace(loop, checkpoint=tmp_path / name, stop_before=6))
        assert_equal(four.run(loops.train, dataclasses.replace(loop, checkpoint=tmp_path / name)), expected)


def test_residuals_belong_to_the_state(pools: dict[int, Pool], tmp_path: Path) -> None:
    expected = pools[2].run(loops.train_with_residual, None, None)
    pools[2].run(loops.train_with_residual, tmp_path, 5)
    assert_equal(pools[2].run(loops.train_with_residual, tmp_path, None), expected)


def test_training_goes_on_from_a_checkpoint_on_fewer_ranks(pools: dict[int, Pool], tmp_path: Path) -> None:
    expected = pools[4].run(loops.on_equal_batches, tmp_path, None)
    assert_equal(pools[2].run(loops.on_equal_batches, None, tmp_path / "step-0000000005.ckpt"), expected[:2])


# --- files ---


def test_equal_states_are_stored_once(four: Pool, tmp_path: Path) -> None:
    four.run(loops.train, dataclasses.replace(LOOP, checkpoint=tmp_path, stop_before=5))
    index = zip_file.read_zip_index(tmp_path / "step-0000000004.ckpt")
    of_rank = {section: [sections[section] for sections in index.ranks] for section in index.ranks[0]}
    assert len(set(of_rank.pop("random"))) == 4
    assert {section: len(set(names)) for section, names in of_rank.items()} == dict.fromkeys(of_rank, 1)


def test_a_damaged_checkpoint_is_left_for_the_one_before_with_a_warning(
    four: Pool, undisturbed: list[np.ndarray], tmp_path: Path
) -> None:
    kept = dataclasses.replace(LOOP, checkpoint=tmp_path)
    four.run(loops.train, dataclasses.replace(kept, stop_before=10))
    newest = tmp_path / "step-0000000008.ckpt"
    newest.write_bytes(newest.read_bytes()[:-100])
    results = four.run(loops.resumed, kept)
    assert_equal([parameters for parameters, _ in results], undisturbed)
    (warning,) = results[0][1]
    assert re.match(rf"{newest}: cut off.*; going on from {tmp_path / 'step-0000000004.ckpt'}", warning)
    assert [warned for _, warned in results[1:]] == [[], [], []]


def test_damaged_checkpoints_alone_are_an_error_on_every_rank(four: Pool, tmp_path: Path) -> None:
    (tmp_path / "step-0000000004.ckpt").write_bytes(b"PK\x03\x04and nothing else")
    for error in four.run(loops.error_of_loop, dataclasses.replace(LOOP, checkpoint=tmp_path)):
        assert re.match(r"RunError: no checkpoint is complete: .*step-0000000004.ckpt: .*; delete them", error)


def test_a_folder_that_cannot_hold_checkpoints_is_told_before_the_first_step(four: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = tmp_path / "file" / "checkpoints"
    for error in four.run(loops.error_of_loop, dataclasses.replace(LOOP, checkpoint=folder)):
        assert error.startswith(f"RunError: {folder}: cannot hold checkpoints: ")


def test_good_checkpoints_are_kept_beside_a_newer_one_that_is_damaged(four: Pool, tmp_path: Path) -> None:
    kept = dataclasses.replace(LOOP, checkpoint=tmp_path)
    four.run(loops.train, dataclasses.replace(kept, stop_before=5))
    damaged = tmp_path / "step-0000000099.ckpt"
    damaged.write_bytes(b"damaged")
    four.run(loops.resumed, dataclasses.replace(kept, stop_before=9))
    assert {path.name for path in tmp_path.iterdir()} == {"step-0000000004.ckpt", "step-0000000008.ckpt", damaged.name}


@pytest.mark.parametrize("world_size", [4, 2])
def test_a_checkpoint_of_another_job_is_refused(pools: dict[int, Pool], world_size: int, tmp_path: Path) -> None:
    pools[4].run(loops.train, dataclasses.replace(LOOP, checkpoint=tmp_path, stop_before=5))
    other = Loop(LocalSGD(period=2), Training("mlp"), 12, checkpoint=tmp_path)
    for error in pools[world_size].run(loops.error_of_loop, other):
        assert re.match(
            r"RunError: .*step-0000000004.ckpt is of plan sync \(\w{12}\) on 4 ranks, model Sequential of 83 elements "
            rf".*; this is plan local-2 \(\w{{12}}\) on {world_size} ranks, model Sequential of 155 elements .*: go on",
            error,
        )


def test_what_is_no_plain_data_is_refused_at_once(pools: dict[int, Pool], tmp_path: Path) -> None:
    (error,) = pools[1].run(loops.error_of, loops.saves_code, tmp_path)
    assert "RunError: the state of what `also` names holds other things than numbers, text, lists" in error


def test_a_plain_loop_cannot_say_when_others_are_saved(pools: dict[int, Pool], tmp_path: Path) -> None:
    (error,) = pools[1].run(loops.saves_also_in_plain_loop, tmp_path)
    assert "RunError: checkpoints of scheduler are written where the loop asks for its next step" in error


# --- the format ---

JOB = JobIdentity("sync", "0" * 64, 2, "Linear of 6 elements")


def write(path: Path, *texts: bytes) -> zip_file.CheckpointIndex:
    members = [
        (hashlib.sha256(text).hexdigest(), torch.frombuffer(bytearray(text), dtype=torch.uint8)) for text in texts
    ]
    index = zip_file.CheckpointIndex(3, JOB, ({"tensors": members[0][0]}, {"tensors": members[-1][0]}))
    zip_file.write_zip(path, index, members)
    return index


def contents(path: Path, index: zip_file.CheckpointIndex) -> list[bytes]:
    with zipfile.ZipFile(path) as archive:
        return [archive.read(sections["tensors"]) for sections in index.ranks]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "step.ckpt"
    written = write(path, b"one state", b"another")
    assert zip_file.read_zip_index(path) == written
    assert contents(path, written) == [b"one state", b"another"]


def test_every_cut_and_every_change_of_the_contents_is_noticed(tmp_path: Path) -> None:
    """Changes that are not noticed, such as another date of a member, change nothing."""
    path = tmp_path / "step.ckpt"
    written = write(path, b"one state", b"another")
    whole = path.read_bytes()
    n_unnoticed = 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at])
        with pytest.raises(DamagedError):
            zip_file.read_zip_index(path)
        for bit in (1, 128):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            try:
                index = zip_file.read_zip_index(path)
            except DamagedError:
                continue
            n_unnoticed += 1
            assert index == written
            assert contents(path, index) == [b"one state", b"another"]
    assert n_unnoticed < len(whole) / 2


def test_a_checkpoint_that_unpacks_to_more_than_it_is_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step-0000000001.ckpt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0" * 64, bytes(64 << 20))
        archive.writestr("index.json", "{}")
    monkeypatch.setattr(zipfile.ZipFile, "testzip", None)  # it unpacks
    with pytest.raises(DamagedError, match=r"its members have 67,108,866 bytes, the file \d"):
        zip_file.read_zip_index(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a pipe"):
        zip_file.read_zip_index(tmp_path / "pipe")


def test_an_interruption_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "step.ckpt"
    path.write_bytes(b"old")

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield "0" * 64, torch.zeros(3, dtype=torch.uint8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zip_file.write_zip(path, zip_file.CheckpointIndex(3, JOB, ()), interrupted())
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["step.ckpt"]


# --- a worker that is killed ---


@pytest.mark.sentinel
def test_a_restarted_loop_ends_as_if_undisturbed(tmp_path: Path) -> None:
    marker, kept = tmp_path / "marker", tmp_path / "kept"
    undisturbed = run(loops.restarted, 4, None)
    (restarted,) = run(restarting, 1, loops.killed_once, 4, marker, kept).values()
    assert restarted.code == 0, restarted.output
    assert marker.exists()
    assert re.fullmatch(r"loss \d\.\d+\n", undisturbed[0].output)
    assert re.findall(r"^loss .*\n", restarted.output, re.MULTILINE) == [undisturbed[0].output]
    assert names(kept) == ["step-0000000040.ckpt", "step-0000000048.ckpt"]
