"""Reads per level of storage: those a plan expects, those a run counts, and their differences."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from commandline import edited, write
from traces import trace_of

from simdist import scenario
from simdist.errors import RunError, TraceError
from simdist.plan import LEVELS, Buffer, Copy, Dataset, Load, Plan
from simdist.runs import building, run_directory
from simdist.traces.reads import Reads, differences, expected
from simdist.traces.trace import write_npz

MEMORY, PEER, DISK, STORAGE = range(4)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
IN_ORDER = Dataset(8, 2, ranks_per_node=1, sample_nbytes=10, file_nbytes=SIZES, shuffle="none")
"""Two ranks, two steps an epoch: rank 0 reads samples 0 and 2, then 4 and 6; rank 1 reads 1 and 3, then 5 and 7."""


def plan_of(*loads: Load, dataset: Dataset | None = IN_ORDER) -> Plan:
    """Return a plan of 2 ranks with a load a step."""
    buffers = (Buffer("batch", 20, "uint8", place="host"), Buffer("input", 20, "uint8"))
    steps = [(load, Copy("batch", "input")) for load in loads]
    return Plan.from_steps("by hand", world_size=2, buffers=buffers, steps=steps, dataset=dataset)


STORED = Load("batch", ("storage",))
KEPT = Load("batch", ("storage",), ("memory",))
CACHED = Load("batch", ("memory", "peer", "storage"), ("memory",))


def reads_of(plan: Plan, changes: dict[tuple[int, int, int], tuple[int, int]]) -> Reads:
    """Return what a plan expects, but for (load, rank, level): (samples, bytes) more."""
    found = expected(plan)
    for place, (n_samples, nbytes) in changes.items():
        found.n_samples[place] += n_samples
        found.nbytes[place] += nbytes
    return found


# Reads expected of a plan


def test_bytes_from_storage_are_those_of_the_files():
    found = expected(plan_of(STORED, STORED, STORED))
    assert found.n_samples[:, :, STORAGE].tolist() == [[2, 2], [2, 2], [2, 2]]
    assert found.nbytes[:, :, STORAGE].tolist() == [[1 + 4, 2 + 8], [16 + 64, 32 + 128], [1 + 4, 2 + 8]]
    assert not found.n_samples[:, :, :STORAGE].any()
    assert not found.nbytes[:, :, :STORAGE].any()


def test_bytes_from_memories_are_those_of_decoded_samples():
    shuffled = dataclasses.replace(IN_ORDER, shuffle="global")
    found = expected(plan_of(KEPT, KEPT, CACHED, CACHED, dataset=shuffled))
    assert found.n_samples[:2].sum(axis=(0, 1)).tolist() == [0, 0, 0, 8]
    assert found.nbytes[:2].sum() == sum(SIZES)
    in_memory, at_peers, *others = found.n_samples[2:].sum(axis=(0, 1)).tolist()
    assert (in_memory + at_peers, others) == (8, [0, 0])
    assert at_peers > 0
    assert (found.nbytes[2:] == 10 * found.n_samples[2:]).all()


def test_every_load_of_every_rank_reads_a_batch():
    found = expected(plan_of(KEPT, CACHED, STORED, CACHED, CACHED))
    assert (found.n_samples.sum(axis=2) == 2).all()


def test_files_of_one_size_need_one_number():
    one = dataclasses.replace(IN_ORDER, file_nbytes=(7,))
    assert (expected(plan_of(STORED, dataset=one)).nbytes[0, :, STORAGE] == 14).all()


def test_more_bytes_than_can_be_counted_are_refused():
    large = dataclasses.replace(IN_ORDER, file_nbytes=(2**59,))
    assert expected(plan_of(STORED, dataset=large)).nbytes.sum() == 4 * 2**59
    with pytest.raises(TraceError, match=r"plan by hand reads up to 11529 PB; 9223 PB \(2\^63 B\) can be counted"):
        expected(plan_of(*[STORED] * 5, dataset=large))


def test_plan_without_a_data_set_is_refused():
    with pytest.raises(TraceError, match="plan by hand has no data set"):
        expected(plan_of(Load("batch"), dataset=None))


# In what reads differ


def test_identical_reads_do_not_differ():
    plan = plan_of(STORED, STORED)
    assert differences(expected(plan), expected(plan)) == ()


def test_sample_that_came_from_another_level_is_a_sentence_for_both():
    plan = plan_of(KEPT, KEPT, CACHED, CACHED)
    found = reads_of(plan, {(3, 1, MEMORY): (-1, -10), (3, 1, STORAGE): (1, 128)})
    where = "1 of 4 loads differ, the first is 3 on rank 1"
    assert differences(found, expected(plan)) == (
        f"memory: 7 samples instead of 8; {where}",
        f"storage: 9 samples instead of 8; {where}",
    )


def test_equal_sums_by_other_loads_differ():
    plan = plan_of(STORED, STORED)
    found = reads_of(plan, {(0, 1, STORAGE): (-1, -8), (1, 0, STORAGE): (1, 8)})
    assert differences(found, expected(plan)) == (
        "storage: 8 samples instead of 8; 2 of 2 loads differ, the first is 0 on rank 1",
    )


def test_equal_samples_of_other_sizes_differ():
    plan = plan_of(STORED)
    found = reads_of(plan, {(0, 1, STORAGE): (0, 1000)})
    assert differences(found, expected(plan)) == (
        "storage: 1,015 bytes instead of 15; 1 of 1 loads differ, the first is 0 on rank 1",
    )


def test_reads_of_different_plans_are_not_compared():
    with pytest.raises(TraceError, match="reads of different plans"):
        differences(expected(plan_of(STORED)), expected(plan_of(KEPT)))


# Files


def test_file_gives_back_the_reads(tmp_path):
    found = reads_of(plan_of(KEPT, CACHED), {(1, 0, DISK): (3, 99)})
    found.save(tmp_path / "reads.npz")
    back = Reads.load(tmp_path / "reads.npz")
    assert (back.n_samples == found.n_samples).all()
    assert (back.nbytes == found.nbytes).all()
    assert back.digest == found.digest


def test_equal_reads_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        expected(plan_of(KEPT, CACHED)).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def file_of(path: Path, *, kind: str = "simdist-reads-1", levels=LEVELS, n_samples=None, nbytes=None) -> Path:
    header = json.dumps({"format": kind, "levels": levels, "digest": "0"})
    counts = np.zeros((1, 2, 4), dtype=np.int64)
    arrays = {
        "header": np.frombuffer(header.encode(), dtype=np.uint8),
        "n_samples": counts if n_samples is None else n_samples,
        "nbytes": counts if nbytes is None else nbytes,
    }
    write_npz(path, arrays)
    return path


def negative() -> np.ndarray:
    counts = np.zeros((1, 2, 4), dtype=np.int64)
    counts[0, 1, DISK] = -3
    return counts


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"kind": "simdist-trace-1"}, "not a simdist-reads-1 file; a real run with a data set writes one"),
        (
            {"levels": ["memory", "tape"]},
            "counts by the levels ['memory', 'tape']; they are memory, peer, disk, storage",
        ),
        ({"n_samples": np.zeros((1, 2, 4))}, "n_samples is float64 (1, 2, 4); reads are int64 (loads, ranks, 4)"),
        (
            {"nbytes": np.zeros((1, 2, 3), dtype=np.int64)},
            "nbytes is int64 (1, 2, 3); reads are int64 (loads, ranks, 4)",
        ),
        ({"nbytes": np.zeros((2, 2, 4), dtype=np.int64)}, "n_samples is of shape (1, 2, 4), nbytes (2, 2, 4)"),
        ({"n_samples": negative()}, "n_samples is -3 at load 0, rank 1, from disk; counts are 0 or more"),
    ],
)
def test_file_with_other_contents_is_refused(tmp_path, contents, message):
    path = file_of(tmp_path / "reads.npz", **contents)
    with pytest.raises(TraceError) as refusal:
        Reads.load(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert message in str(refusal.value)


@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: whole[:100], lambda whole: b"no zip" + whole[:9]])
def test_damaged_file_is_refused(tmp_path, damage):
    path = file_of(tmp_path / "reads.npz")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TraceError, match=r"reads\.npz: cannot be read as counts of reads"):
        Reads.load(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"none\.npz: cannot be read as counts of reads .*No such file"):
        Reads.load(tmp_path / "none.npz")


def test_reads_are_checked_against_a_plan():
    one, two = plan_of(STORED), plan_of(STORED, STORED)
    expected(one).check(one)
    with pytest.raises(TraceError, match="reads of another plan"):
        expected(one).check(two)
    with pytest.raises(TraceError, match=r"reads of \(1, 2\) loads and ranks; plan by hand has \(2, 2\)"):
        dataclasses.replace(expected(one), digest=two.digest()).check(two)


# Run directories

DATA = edited(
    ("  network:", "  storage: {latency: 0 s, bandwidth: 100 MB/s}\n  network:"),
    ("steps: 12", "input: {source: storage, data: {samples: 1024, file_size: 10 kB}}\nsteps: 2 epochs"),
)


@pytest.fixture
def run(tmp_path):
    """A run directory of a plan with a data set."""
    read = scenario.load(write(tmp_path / "s.yaml", DATA))
    one = read.model_copy(update={"schedules": read.schedules[:1]})
    plan = building.build(one, one.schedules[0]).plan
    run_directory.write(tmp_path / "run", one, plan, building.delays(one))
    return run_directory.read(tmp_path / "run")


def test_run_directory_holds_what_a_run_has_read(run):
    path = run.path / run_directory.REAL_READS
    expected(run.plan).save(path)
    assert (run_directory.read_reads(path, plan=run.plan).nbytes == expected(run.plan).nbytes).all()
    run_directory.read(run.path)


def test_reads_of_another_plan_in_a_run_directory_are_refused(run):
    expected(plan_of(STORED)).save(run.path / run_directory.REAL_READS)
    with pytest.raises(TraceError, match=r"real-reads\.npz: reads of another plan .*: move the file away, or"):
        run_directory.read(run.path)


def test_replacing_a_run_deletes_what_it_has_read(run):
    expected(run.plan).save(run.path / run_directory.REAL_READS)
    other = run.scenario.model_copy(update={"steps": 5})
    plan = building.build(other, other.schedules[0]).plan
    run_directory.write(run.path, other, plan, building.delays(other), force=True)
    assert not (run.path / run_directory.REAL_READS).exists()


def test_replacing_a_run_deletes_what_one_that_ended_early_has_read(run):
    expected(run.plan).save(run.path / run_directory.PARTIAL_READS)
    other = run.scenario.model_copy(update={"steps": 5})
    plan = building.build(other, other.schedules[0]).plan
    run_directory.write(run.path, other, plan, building.delays(other), force=True)
    assert not (run.path / run_directory.PARTIAL_READS).exists()


@pytest.mark.parametrize(
    ("report", "reads", "other"),
    [
        ("{}", run_directory.REAL_READS, run_directory.PARTIAL_READS),
        (None, run_directory.PARTIAL_READS, run_directory.REAL_READS),
    ],
)
def test_a_new_trace_does_not_stand_beside_what_an_earlier_run_has_read(run, report, reads, other):
    for name in (reads, other):
        expected(run.plan).save(run.path / name)
    measured = trace_of(plan_of(STORED), [(0.0, 0.0, 0.0)] * 2)
    run_directory.save_measured(run.path, measured, report=report)
    assert not (run.path / reads).exists()
    assert (run.path / other).exists()


def test_reads_that_cannot_be_written_fail_the_run(run):
    trace = trace_of(plan_of(STORED), [(0.0, 0.0, 0.0)] * 2)
    with pytest.raises(RunError, match=r"nowhere/partial-reads\.npz: cannot be written: No such file or"):
        run_directory.save_measured(run.path / "nowhere", trace, report=None, reads=expected(run.plan))
