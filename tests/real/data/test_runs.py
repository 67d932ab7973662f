"""`python -m real RUN --data URL`, end to end: what ranks read is what the plan says, whatever fails on the way."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from data_files import SampleSet, generate  # noqa: E402
from data_runs import (  # noqa: E402
    SAMPLE_NBYTES,
    perform,
    perform_and_die,
    perform_with_full_disk_and_outage,
    train,
)
from processes import Ending, places, run  # noqa: E402

from real.cli import main  # noqa: E402
from simdist.caching import epoch_order, on_disk_at_first  # noqa: E402
from simdist.plan import LEVELS, Plan  # noqa: E402
from simdist.runs import run_directory  # noqa: E402
from simdist.runs.building import build, delays  # noqa: E402
from simdist.scenario import loads  # noqa: E402
from simdist.traces.reads import Reads, differences, expected  # noqa: E402

N_SAMPLES, PER_EPOCH = 50, 4  # of 4 ranks with 3 samples each; 2 samples of each epoch are left out
SCENARIO = """\
cluster:
  nodes: 2
  gpus_per_node: {gpus}
  fabric: ideal
  network: ideal
  storage: {{latency: 0.1 ms, bandwidth: 1 GB/s}}
  disk: {{read: 1 GB/s, write: 1 GB/s{disk}}}
  memory: {{bandwidth: 8 GB/s{memory}}}
workload: {{tensors: [{{name: weight, count: 4}}], {batch}, forward: 1 ms, sample_size: {size} B}}
steps: 3 epochs
input: {{source: storage, prefetch: 2, readers: 3, data: {{samples: 50, file_size: {file_size} B{data}}}}}
schedules: [{{kind: sync, input: {{policy: {policy}}}}}]
"""
SIXTEEN = f", capacity: {16 * SAMPLE_NBYTES} B"
ONE = f", capacity: {SAMPLE_NBYTES} B"
RUNS: Mapping[str, Mapping[str, str]] = {
    "naive": {"policy": "naive"},
    "files": {"policy": "files"},
    "memory": {"policy": "memory"},
    "datacache": {"policy": "datacache"},
    "staged": {"policy": "staged"},
    "three passes a step": {"policy": "files", "batch": "batch_size: 1, micro_batches: 3"},
    "small caches": {"policy": "datacache", "disk": SIXTEEN, "memory": SIXTEEN},
    "small lru disk": {"policy": "files", "disk": SIXTEEN, "data": ", eviction: lru"},
    "tiny lru disk": {"policy": "files", "disk": ONE, "data": ", eviction: lru"},
    "tiny lru memory": {"policy": "memory", "memory": ONE, "data": ", eviction: lru"},
    "small lru memory": {"policy": "memory", "memory": SIXTEEN, "data": ", eviction: lru"},
    "small staged": {"policy": "staged", "disk": SIXTEEN, "data": ", shuffle: node"},
    "node": {"policy": "datacache", "data": ", shuffle: node"},
}
WARM = {"policy": "files", "data": ", start: warm"}
LAST_WORDS = 1


def write(path: Path, **changes: str) -> Path:
    """Write a run directory."""
    fields = {"gpus": "2", "disk": "", "memory": "", "data": "", "batch": "batch_size: 3"}
    sizes = {"size": str(SAMPLE_NBYTES), "file_size": str(SAMPLE_NBYTES)}
    scenario = loads(SCENARIO.format_map(fields | sizes | changes), folder=path.parent)
    run_directory.write(path, scenario, build(scenario, scenario.schedules[0]).plan, delays(scenario))
    return path


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("storage") / "set"
    samples = SampleSet(n_samples=N_SAMPLES, nbytes=SAMPLE_NBYTES, sigma=0.0, format="raw", n_classes=N_SAMPLES)
    generate(folder, samples)
    return folder


def arguments(runs: Sequence[Path], url: Path, cache: Path, program: str = "data_runs:job") -> list[object]:
    where = ("--backend", "gloo", "--device", "cpu", "--timeout", 20)
    return [*runs, "--program", program, *where, "--data", url, "--cache", cache]


def seen(endings: Mapping[int, Ending]) -> list[np.ndarray]:
    """Return what the models saw in each run, `[n_steps, world_size, batch_size]`."""
    by_rank = [_batches_of(endings[rank].output) for rank in sorted(endings)]
    return [np.stack(of_run, axis=1) for of_run in zip(*by_rank, strict=True)]


def _batches_of(output: str) -> list[np.ndarray]:
    runs: list[list[list[int]]] = []
    for line in output.splitlines():
        match line.split():
            case ["begin"]:
                runs.append([])
            case ["saw", *words]:
                half = len(words) // 2
                assert words[:half] == words[half + 1 :], line
                runs[-1].append([int(word) for word in words[:half]])
    return [np.array(batches) for batches in runs]


def order(plan: Plan) -> np.ndarray:
    """Return what the ranks should see, `[n_steps, world_size, batch_size]`."""
    epochs = range(plan.n_steps // plan.dataset.steps_per_epoch(plan.world_size))
    return np.concatenate([epoch_order(plan.dataset, epoch, plan.world_size) for epoch in epochs])


def wrong(path: Path) -> tuple[str, ...]:
    """Say where the counts of a run differ from those of its plan."""
    plan = run_directory.read(path).plan
    return differences(run_directory.read_reads(path / run_directory.REAL_READS, plan=plan), expected(plan))


def ended_well(endings: Mapping[int, Ending]) -> None:
    for rank, ending in endings.items():
        assert ending.code == 0, f"rank {rank}: {ending.output}"


def left_in(folder: Path) -> list[str]:
    """Return the files and folders that a run has left in a folder, if it is there."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_models_see_the_samples_of_the_plan_and_levels_give_as_many_as_planned(tmp_path: Path, url: Path) -> None:
    paths = {name: write(tmp_path / name, **changes) for name, changes in RUNS.items()}
    endings = run(perform, 4, *arguments([*paths.values()], url, tmp_path / "cache"))
    ended_well(endings)
    for (name, path), found in zip(paths.items(), seen(endings), strict=True):
        wanted = order(run_directory.read(path).plan)
        of_steps = found.reshape(len(wanted), -1, *found.shape[1:]).swapaxes(1, 2)  # [step, rank, pass, sample]
        assert np.array_equal(of_steps.reshape(wanted.shape), wanted), name
        assert wrong(path) == (), name
    report = json.loads((paths["small lru memory"] / run_directory.REPORT).read_text())["reads"]
    assert report["samples_not_as_planned"] == 0
    assert sum(report[f"samples_from_{name}"] for name in LEVELS) == 3 * PER_EPOCH * 12
    assert left_in(tmp_path / "cache") == []


def test_a_killed_rank_is_named_and_nothing_is_left_behind(tmp_path: Path, url: Path) -> None:
    path, cache = write(tmp_path / "run", policy="datacache"), tmp_path / "cache"
    endings = run(perform_and_die, 4, 1, 5, *arguments([path], url, cache, program="emulated"))
    for rank in (0, 2, 3):
        assert endings[rank].code == LAST_WORDS
        assert "rank 1" in endings[rank].output.splitlines()[-1]
        assert "killed?" in endings[rank].output.splitlines()[-1]
    assert left_in(cache) == []
    partial, plan = Reads.load(path / "partial-reads.npz"), run_directory.read(path).plan
    partial.check(plan)
    done = partial.n_samples.sum(axis=2)
    assert (done[:5, 1] == 3).all()
    assert (done[6:, 1] == 0).all()
    full = done == 3
    assert np.array_equal(partial.n_samples[full], expected(plan).n_samples[full])


def test_a_full_disk_and_an_outage_of_the_storage_change_nothing_that_is_seen(tmp_path: Path, url: Path) -> None:
    path = write(tmp_path / "run", policy="files")
    endings = run(perform_with_full_disk_and_outage, 4, 4, 1.5, *arguments([path], url, tmp_path / "cache"))
    ended_well(endings)
    plan = run_directory.read(path).plan
    assert np.array_equal(seen(endings)[0], order(plan))
    found = run_directory.read_reads(path / run_directory.REAL_READS, plan=plan)
    assert (found.n_samples.sum(axis=2) == 3).all()
    kept = 4 * 4  # files, of which each is found again once or twice
    assert 0 < found.n_samples[:, :, LEVELS.index("disk")].sum() <= 2 * kept
    assert "not kept" in endings[0].output
    assert left_in(tmp_path / "cache") == []


@pytest.mark.sentinel
def test_a_second_run_is_warm_and_repairs_files_that_were_damaged_meanwhile(tmp_path: Path, url: Path) -> None:
    paths = [write(tmp_path / f"run-{number}", **WARM) for number in range(4)]
    cache = tmp_path / "cache"
    endings = run(perform, 4, *arguments(paths[:2], url, cache))
    ended_well(endings)
    assert wrong(paths[0])  # there was nothing yet
    assert wrong(paths[1]) == ()
    damaged, cut, gone, *_ = sorted(cache.glob("set-*/node-0/??/*"))
    damaged.write_bytes(bytes(SAMPLE_NBYTES))
    cut.write_bytes(cut.read_bytes()[:100])
    gone.unlink()
    endings = run(perform, 4, *arguments(paths[2:], url, cache))
    ended_well(endings)
    for found in seen(endings):
        assert np.array_equal(found, order(run_directory.read(paths[0]).plan))
    again = run_directory.read_reads(paths[2] / run_directory.REAL_READS, plan=run_directory.read(paths[2]).plan)
    assert again.n_samples[:, :, LEVELS.index("storage")].sum() == 3
    assert wrong(paths[3]) == ()


@pytest.mark.parametrize("n_kept", [1, 16])
def test_warm_evicting_disks_hold_what_the_plan_says_whatever_was_there_before(
    tmp_path: Path, url: Path, n_kept
) -> None:
    """First a run without a limit fills them; then come two with one, of which the second finds what the first left."""
    small = {"disk": f", capacity: {n_kept * SAMPLE_NBYTES} B", "data": ", start: warm, eviction: lru"}
    everything = write(tmp_path / "everything", **WARM)
    limited = [write(tmp_path / f"limited-{number}", policy="files", **small) for number in range(2)]
    cache, plan = tmp_path / "cache", run_directory.read(limited[0]).plan
    ended_well(run(perform, 4, *arguments([everything, *limited], url, cache)))
    assert wrong(limited[1]) == ()
    for node in range(2):
        kept = sorted(int(file.name.split("-")[0]) for file in cache.glob(f"set-*/node-{node}/??/*"))
        assert kept == on_disk_at_first(plan, node).tolist()
        assert len(kept) == n_kept


def test_a_file_that_has_changed_on_the_storage_ends_the_run_with_its_name(tmp_path: Path, url: Path) -> None:
    changed = tmp_path / "set"
    shutil.copytree(url, changed)
    path = write(tmp_path / "run", policy="memory", gpus="1")
    sample = int(order(run_directory.read(path).plan)[2, 1, 1])
    name = f"{sample:04d}/{sample:08d}.raw"
    (changed / name).write_bytes(bytes(SAMPLE_NBYTES))
    endings = run(perform, 2, *arguments([path], changed, tmp_path / "cache"))
    assert [endings[rank].code for rank in range(2)] == [1] * 2
    for ending in endings.values():
        assert f"load 2 of rank 1: sample {sample} ({name})" in ending.output.splitlines()[-1]
        assert "has changed on the storage" in ending.output.splitlines()[-1]


def test_another_data_set_than_the_plans_is_refused(tmp_path: Path, url: Path) -> None:
    path = write(tmp_path / "run", policy="naive", file_size="4000", gpus="1")
    endings = run(perform, 2, *arguments([path], url, tmp_path / "cache"))
    for ending in endings.values():
        assert ending.code == 2
        assert (
            "50 of 50 files have other sizes than in the plan; the first is sample 0 (0000/00000000.raw): 4,107 "
            in (ending.output)
        )
    assert left_in(tmp_path / "cache") == []


def test_options_without_use_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for name, value in places(0, 4, 1).items():
        monkeypatch.setenv(name, value)
    with_data, without = write(tmp_path / "run", policy="files"), tmp_path / "without"
    scenario = loads("""\
cluster: {nodes: 4, gpus_per_node: 1, fabric: ideal, network: ideal}
workload: {tensors: [{name: weight, count: 4}], batch_size: 3, forward: 1 ms}
steps: 3
schedules: [{kind: sync}]
""")
    run_directory.write(without, scenario, build(scenario, scenario.schedules[0]).plan, delays(scenario))
    assert main([str(without), "--data", "/set"]) == 2
    assert "without: its plan reads no data set; give its scenario `data`" in capsys.readouterr().err
    assert main([str(with_data), "--cache", "/cache"]) == 2
    assert "--cache /cache: there is nothing to keep without --data" in capsys.readouterr().err


def test_after_a_restart_a_training_loop_sees_every_sample_that_is_left_once(tmp_path: Path, url: Path) -> None:
    path, cache, notes = write(tmp_path / "run", policy="datacache", gpus="1"), tmp_path / "cache", tmp_path / "notes"
    notes.mkdir()
    places = path, url, cache, tmp_path / "checkpoints", notes
    killed = run(train, 2, *places, 11)
    assert "rank 1" in killed[0].output.splitlines()[-1]
    restarted = run(train, 2, *places, None)
    ended_well(restarted)
    wanted = order(run_directory.read(path).plan)
    for rank in range(2):
        lines = [line.split() for line in (notes / f"{rank}.txt").read_text().splitlines()]
        steps = [int(line[0]) for line in lines]
        assert steps == [*range(len(steps) - 15), *range(9, 24)]  # the checkpoint was written before step 9
        for step, *words in lines:
            assert words[:3] == words[4:] == [str(sample) for sample in wanted[int(step), rank]]
        assert "left nothing" in restarted[rank].output
    assert list(cache.glob("set-*/node-*/parts/*")) == []
    sizes = {file.stat().st_size for file in cache.glob("set-*/node-*/??/*")}
    assert sizes == {SAMPLE_NBYTES}
