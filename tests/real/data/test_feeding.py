"""Parts that feed a rank with samples, one by one: folders, checks, waits, counts and prices."""

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from data_files import content_of, index_of  # noqa: E402
from data_runs import Looking, Still  # noqa: E402

from real import jobs  # noqa: E402
from real.buffers.memory import Memory  # noqa: E402
from real.data.filecache import (  # noqa: E402
    FileCache,
    cold_folder,
    default_folder,
    folder_of_set,
    warm_folder,
)
from real.data.inputs import (  # noqa: E402
    DataOptions,
    _file_cache,
    _meet,
    most_kept,
)
from real.data.loader import LoadCounts  # noqa: E402
from real.data.memory import Board, wait_until_all_staged  # noqa: E402
from real.data.sample_index import SampleIndex, check_index, make_index  # noqa: E402
from real.data.sources import choose_decode, decode_image, decode_raw, sample_shape  # noqa: E402
from real.data.tallies import Tally, reads_of, salvage_tallies, tally_path, totals  # noqa: E402
from real.processes.rendezvous import RankPlace  # noqa: E402
from real.programs import emulated  # noqa: E402
from real.programs.base import Feed, normalised  # noqa: E402
from real.programs.binding import Binding  # noqa: E402
from real.programs.module import ModuleProgram  # noqa: E402
from real.recording.recorder import forget  # noqa: E402
from simdist.caching import on_disk_at_first  # noqa: E402
from simdist.errors import RunError, ScenarioError  # noqa: E402
from simdist.plan import Buffer, Copy, Dataset, Forward, Load, Plan, StageIn  # noqa: E402
from simdist.runs import run_directory  # noqa: E402
from simdist.runs.building import build, delays  # noqa: E402
from simdist.scenario import loads  # noqa: E402

CPU = torch.device("cpu")
SET = Dataset(4, 1, 1, 27, (1000,))
SCENARIO = """\
cluster:
  nodes: 2
  gpus_per_node: 2
  fabric: ideal
  network: {{latency: 0 s, bandwidth: 10 GB/s}}
  storage: {{latency: 1 ms, bandwidth: 1 MB/s}}
  disk: {{read: 100 kB/s, write: 1 GB/s}}
  memory: {{bandwidth: 1 MB/s, capacity: 4 kB}}
workload: {{tensors: [{{name: weight, count: 4}}], batch_size: 2, forward: 1 ms, sample_size: 1000 B}}
steps: 2 epochs
input:
  source: storage
  prefetch: 1
  data: {{samples: 17, file_size: [{sizes}], shuffle: node, policy: {policy}{more}}}
schedules: [{{kind: sync}}]
"""
SIZES = [1000] * 8 + [2000] * 9  # the second node's files are larger


def run_of(path: Path, policy: str, more: str = "") -> run_directory.RunDirectory:
    scenario = loads(SCENARIO.format(sizes=", ".join(f"{size} B" for size in SIZES), policy=policy, more=more))
    plan = build(scenario, scenario.schedules[0]).plan
    return run_directory.RunDirectory(path, scenario, plan, delays(scenario))


# --- the data set of the plan ---


def test_the_data_set_of_the_plan_is_accepted() -> None:
    check_index(index_of(4), SET, "/set")
    check_index(index_of(4), replace(SET, file_nbytes=(1000,) * 4), "/set")


def test_a_data_set_of_other_samples_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"^/set: has 5 samples, the plan's data set 4; .*file_size: {index: "):
        check_index(index_of(5), SET, "/set")


def test_files_of_other_sizes_are_refused_by_name() -> None:
    planned = replace(SET, file_nbytes=(1000, 1000, 2345, 2345))
    with pytest.raises(ScenarioError, match=r"2 of 4 files .* sample 2 \(2\.jpg\): 1,000 bytes, planned are 2,345"):
        check_index(index_of(4), planned, "/set")


def test_raw_files_are_samples_and_others_images() -> None:
    index = index_of(2, nbytes=27)
    raw = replace(index, names=("a.raw", "b.raw"))
    assert choose_decode(index, (3, 3, 3), "/set") is decode_image
    assert choose_decode(raw, (27,), "/set") is decode_raw
    with pytest.raises(ScenarioError, match=r"1 of 2 files are \.raw; samples are all raw, or all images"):
        choose_decode(replace(index, names=("a.raw", "b.jpg")), (3, 3, 3), "/set")
    with pytest.raises(ScenarioError, match=r"a\.raw has 27 bytes; a raw file is a sample of .*, 12 bytes"):
        choose_decode(raw, (3, 2, 2), "/set")
    with pytest.raises(ScenarioError, match=r"1,000 bytes, are none; write e\.g\. 150528 B"):
        choose_decode(index, sample_shape(1000), "/set")


@pytest.mark.parametrize(("eviction", "stays"), [("none", True), ("lru", False)])
def test_a_disk_with_a_limit_keeps_of_what_is_there_when_a_run_goes_on_what_the_run_will_keep(
    tmp_path: Path, eviction: str, stays: bool
) -> None:
    dataset = Dataset(8, 2, 1, 27, (1000,), disk_nbytes=3000, eviction=eviction)
    load = Load("input", read=("disk", "storage"), keep=("disk",))
    plan = Plan.from_steps(
        "files", world_size=1, buffers=[Buffer("input", 54, "uint8")], steps=[(load,)] * 4, dataset=dataset
    )
    index, place = index_of(8), RankPlace(0, 1, 0, 1)
    before = FileCache(warm_folder(folder_of_set(tmp_path, index), 0), index)
    for sample in range(8):
        before.fetch(sample, lambda sample=sample: content_of(sample), keep=True)
    with ExitStack() as stack:
        options = DataOptions("/set", tmp_path, cold=False, timeout_s=1.0)
        files = _file_cache(stack, plan, dataset, options, index, "run", place)
    wanted = on_disk_at_first(replace(plan, dataset=replace(dataset, warm=True)), 0).tolist() if stays else []
    assert [sample for sample in range(8) if sample in files] == wanted
    assert len(wanted) == 3 * stays


# --- folders ---


def test_a_cold_folder_is_shared_by_a_node_and_gone_when_the_last_rank_has_left(tmp_path: Path) -> None:
    given = tmp_path / "cache"
    given.mkdir()
    with cold_folder(given / "set-1", "abc", 0) as first:
        with cold_folder(given / "set-1", "abc", 0) as second:
            assert first == second
            (first / "file").touch()
        assert list(first.iterdir()) == [first / "file"]
        with cold_folder(given / "set-1", "abc", 1) as other:
            assert list(other.iterdir()) == []
    assert list(given.iterdir()) == []


def test_cold_folders_of_killed_runs_are_removed_and_warm_ones_stay(tmp_path: Path) -> None:
    warm = warm_folder(tmp_path, 0)
    left, used = tmp_path / "cold-dead-node-0", tmp_path / "cold-alive-node-0"
    for folder in (warm, left / "1f", used):
        folder.mkdir(parents=True)
    (left / "1f" / "file").touch()
    holder = os.open(used, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_SH)
    with cold_folder(tmp_path, "abc", 0):
        assert sorted(each.name for each in tmp_path.iterdir()) == ["cold-abc-node-0", used.name, warm.name]
    os.close(holder)


HOLD = """
import sys, time
from pathlib import Path
from real.data.filecache import cold_folder
with cold_folder(Path(sys.argv[1]), "dead", int(sys.argv[2])) as folder:
    (folder / "file").touch()
    print("held", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("is_cold", [True, False])
def test_what_several_killed_ranks_have_left_goes_with_the_next_run_of_any_data_set(
    tmp_path: Path, is_cold: bool
) -> None:
    theirs, mine = tmp_path / "set-00000001", tmp_path / "set-00000002"
    with ExitStack() as stack:
        ranks = []
        for node in (0, 1):
            command = [sys.executable, "-c", HOLD, str(theirs), str(node)]
            rank = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(rank.kill)
            ranks.append(rank)
        assert [rank.stdout.readline() for rank in ranks] == ["held\n"] * 2
        warm_folder(mine, 0)
        assert len(list(theirs.iterdir())) == 2  # they live
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()
    assert len(list(theirs.iterdir())) == 2
    with cold_folder(mine, "abc", 0) if is_cold else nullcontext(warm_folder(mine, 0)):
        assert not theirs.exists()


def test_nothing_but_folders_of_cold_runs_is_removed(tmp_path: Path) -> None:
    precious = [
        tmp_path / name / "file"
        for name in ("set-theory/cold-war-node-1", "set-00000001/cold-war", "set-00000001/node-0", "cold-1-node-0")
    ]
    for path in precious:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "set-00000001" / "cold-link-node-0").symlink_to(tmp_path)
    with cold_folder(tmp_path / "set-00000002", "abc", 0):
        pass
    assert all(path.exists() for path in precious)


def test_a_cold_folder_that_is_being_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is locked, somebody else may find it without users."""
    path, flock = tmp_path / "cold-abc-node-0", fcntl.flock
    removals = iter([True, False])

    def removed_and_locked(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH and next(removals):
            path.rmdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_and_locked)
    with cold_folder(tmp_path, "abc", 0) as folder:
        assert folder.is_dir()
    assert next(removals, "both") == "both"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunError, match=r"file/set-1.*: no cache can be here: Not a directory"),
        cold_folder(tmp_path / "file" / "set-1", "abc", 0),
    ):
        pass


def test_every_data_set_has_a_folder_of_its_own() -> None:
    assert folder_of_set(Path("/cache"), index_of(4)) != folder_of_set(Path("/cache"), index_of(5))


@pytest.fixture
def usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is taken if none is chosen; not made yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"simdist-{os.getuid()}"


def test_the_usual_folder_is_the_users_own_and_private(usual: Path) -> None:
    mask = os.umask(0)
    try:
        assert default_folder() == usual
    finally:
        os.umask(mask)
    assert stat.S_IMODE(usual.lstat().st_mode) == 0o700
    with cold_folder(folder_of_set(default_folder(), index_of(4)), "abc", 0):
        pass
    assert list(usual.iterdir()) == []  # and no other user can take its name meanwhile
    assert default_folder() == usual


def link(path: Path) -> None:
    path.with_name("elsewhere").mkdir()
    path.symlink_to("elsewhere")


def shared(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (link, "is no folder to which this user alone"),
        (shared, "is no folder to which this user alone"),
        (Path.touch, "no cache can be here: File exists"),
    ],
)
def test_a_usual_folder_that_others_could_write_to_is_refused(
    usual: Path, prepare: Callable[[Path], object], message: str
) -> None:
    prepare(usual)
    with pytest.raises(RunError, match=rf"{usual.name}: {message}.*; remove it, or choose a folder with --cache"):
        default_folder()


def test_a_usual_folder_of_somebody_else_is_refused(usual: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: usual.stat().st_uid + 1)
    with pytest.raises(
        RunError, match=r"is no folder to which this user alone can write, so others could choose the files"
    ):
        default_folder()


# --- ranks that meet ---


class Told:
    """Another rank, which has told what it has."""

    def __init__(self) -> None:
        self.values: list[str] = []

    def exchange(self, what: str, value: str) -> list[str]:
        self.values.append(value)
        return self.values

    def share_token(self, nbytes: int) -> bytes:
        return b"1" * nbytes


def swapped(index: SampleIndex) -> SampleIndex:
    return make_index(index[sample] for sample in (1, 0, *range(2, len(index))))


@pytest.mark.parametrize(
    "change",
    [
        swapped,
        lambda index: replace(index, labels=index.labels[::-1].copy()),
        lambda index: replace(index, names=tuple(f"other/{name}" for name in index.names)),
        lambda index: replace(index, nbytes=index.nbytes + 1),
    ],
)
def test_ranks_with_different_indexes_of_the_same_files_are_refused(
    change: Callable[[SampleIndex], SampleIndex],
) -> None:
    index, others = index_of(4), Told()
    index = replace(index, labels=np.arange(4))
    run = _meet(others, RankPlace(0, 3, 0, 1), index)
    assert _meet(others, RankPlace(1, 3, 0, 1), replace(index)) == run
    with pytest.raises(RunError, match=r"rank 2 .*read another index than rank 0: give all ranks the same data set"):
        _meet(others, RankPlace(2, 3, 0, 1), change(index))


# --- a node ---


def board_of(n_ranks: int) -> Board:
    return Board(*(np.zeros(n_ranks, np.int64) for _ in range(4)), nullcontext)


def test_ranks_of_a_node_wait_for_each_other_every_time() -> None:
    board, stop = board_of(2), threading.Event()
    thread = threading.Thread(target=lambda: wait_until_all_staged(board, 1, first_rank=6, timeout_s=60.0, stop=stop))
    thread.start()
    wait_until_all_staged(board, 0, first_rank=6, timeout_s=60.0, stop=stop)
    thread.join()
    with pytest.raises(RunError, match=r"rank 7 has not staged their files within 0\.01 s"):
        wait_until_all_staged(board, 0, first_rank=6, timeout_s=0.01, stop=stop)


def test_ranks_that_do_not_come_are_named() -> None:
    board, stop = board_of(3), threading.Event()
    with pytest.raises(RunError, match=r"^rank 7: ranks 6, 8 have not staged their files within 0\.05 s"):
        wait_until_all_staged(board, 1, first_rank=6, timeout_s=0.05, stop=stop)
    stop.set()
    with pytest.raises(RunError, match=r"^rank 7: ranks 6, 8 have not staged their files; the run has failed"):
        wait_until_all_staged(board, 1, first_rank=6, timeout_s=60.0, stop=stop)


@pytest.mark.parametrize("more", ["", ", eviction: lru"])
def test_memory_has_room_for_what_the_plan_keeps_and_no_more(tmp_path: Path, more: str) -> None:
    """A node reads 8 samples of 1 kB in an epoch, and 4 kB hold 4."""
    plan = run_of(tmp_path, "memory", more).plan
    assert [most_kept(plan, plan.dataset, node) for node in (0, 1)] == [4, 4]
    files = run_of(tmp_path, "files").plan
    assert most_kept(files, files.dataset, 0) == 0


# --- counts ---


def counts(*n_samples: int) -> LoadCounts:
    taken = np.array(n_samples, dtype=np.int64)
    return LoadCounts(taken, 10 * taken, n_elsewhere=1, n_not_kept=2)


def test_counts_survive_a_rank_that_is_killed(tmp_path: Path) -> None:
    plan = run_of(tmp_path, "files").plan
    n_loads = sum(1 for _ in plan.loads())
    for rank in (1, 2):
        Tally(n_loads, tally_path(tmp_path / "parts", rank)).note(3, counts(0, rank, 0, 4))
    tally_path(tmp_path / "parts", 2).write_bytes(b"cut")
    rows = salvage_tallies(tmp_path / "parts", plan)
    reads = reads_of(rows, plan)
    reads.check(plan)
    assert reads.n_samples[3, 1].tolist() == [0, 1, 0, 4]
    assert reads.nbytes[3, 1].tolist() == [0, 10, 0, 40]
    assert reads.n_samples.sum() == 5
    assert {name: n for name, n in totals(rows).items() if n} == {
        "samples_from_peer": 1,
        "samples_from_storage": 4,
        "bytes_from_peer": 10,
        "bytes_from_storage": 40,
        "samples_not_as_planned": 1,
        "samples_not_kept": 2,
    }
    for rank in range(4):
        forget(tmp_path / "parts", rank)
    assert salvage_tallies(tmp_path / "parts", plan) is None


# --- programs ---


def test_images_are_copied_and_normalised() -> None:
    images = torch.arange(12, dtype=torch.uint8).view(2, 1, 2, 3)
    taken = normalised(images, torch.Size([6]), CPU, torch.float64)
    images.zero_()
    expected = (torch.arange(12, dtype=torch.float64).view(2, 6) / 255 - 0.449) / 0.226
    assert torch.allclose(taken, expected, rtol=0, atol=1e-12)


class Lent(Feed):
    """Has one batch, in buffers that the next one comes to."""

    def __init__(self) -> None:
        self.images, self.labels = torch.full((2, 1000), 7, dtype=torch.uint8), torch.tensor([3, 4])

    def load(self, op: Load, number: int) -> None:
        self.images.zero_()
        self.labels.zero_()

    def stage_in(self, op: StageIn) -> None:
        pass

    def batch(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images, self.labels


def test_a_model_computes_with_its_batch_while_the_next_one_comes(tmp_path: Path) -> None:
    plan, module, feed, seen = run_of(tmp_path, "naive").plan, Looking(), Lent(), []

    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(labels)
        return output

    memory = Memory(plan, CPU, Binding.buffers_of(plan))
    program = ModuleProgram(
        plan, module, loss, Still(), lambda _: (torch.zeros(2, 1000), feed.labels), memory, device=CPU, feed=feed
    )
    program.perform(ops_of(plan, Copy)[0], 0)
    program.load(ops_of(plan, Load)[0], 1)
    program.forward(ops_of(plan, Forward)[:1], 0, lambda: None)
    assert torch.equal(module.images, normalised(torch.full((2, 1000), 7), torch.Size([1000]), CPU, torch.float32))
    assert seen[0].tolist() == [3, 4]


def program_of(run: run_directory.RunDirectory, rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[float]]:
    slept: list[float] = []
    monkeypatch.setattr(emulated, "sleep_s", lambda seconds, _interrupted: slept.append(seconds))
    make = jobs.emulated_maker(rank, CPU, run, None, jobs.Saved(None))
    return make(Memory(run.plan, CPU, ()), threading.Event()), slept


def ops_of(plan: Plan, kind: type) -> list:
    return [op for body in plan.bodies for op in body if isinstance(op, kind)]


def test_without_data_a_load_sleeps_for_the_price_of_its_rank_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, from storage 1 ms and 1 MB/s, from disk 100 kB/s; each node reads its own part, of one size."""
    run = run_of(tmp_path, "files")
    for rank, nbytes in ((1, 1000), (2, 2000)):
        program, slept = program_of(run, rank, monkeypatch)
        for number in (0, 1, 2, 3):
            program.load([*run.plan.loads()][number], number)
        assert slept[:2] == pytest.approx([1e-3 + 2 * nbytes / 1e6] * 2, rel=1e-2)
        assert slept[2:] == pytest.approx([2 * nbytes / 1e5] * 2, rel=1e-2)


def test_without_data_staging_sleeps_for_the_price_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, "staged")
    for rank, nbytes in ((1, 1000), (3, 2000)):
        program, slept = program_of(run, rank, monkeypatch)
        program.perform(ops_of(run.plan, StageIn)[0], 0)
        assert slept == pytest.approx([1e-3 + 8 * nbytes / 1e6], rel=1e-2)
