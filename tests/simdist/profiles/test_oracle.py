"""Steps read from a trace are those that the rank lived through, on GPUs and CPUs, in all versions of the profiler."""

from dataclasses import astuple, replace
from pathlib import Path

import pytest
from kineto_traces import DIALECTS, Bucket, Delay, Device, Truth, simulate, write_job

from simdist.profiles.job.job import assemble
from simdist.profiles.job.layout import find_layout
from simdist.profiles.steps.model import RankProfile, RankStep
from simdist.profiles.steps.ranks import profile_rank

PHASES = ("input_s", "forward_s", "host_s", "backward_s", "wait_s", "optimize_s")
NEAR_S = 100e-6  # moments between operators, which belong to no phase

TRUTH = Truth(
    n_ranks=3,
    n_steps=5,
    delays=(Delay("host", 1, 2, 0.050), Delay("compute", 2, 3, 0.030), Delay("io", 0, 4, 0.020)),
    jitter=0.05,
    skew_s=(0.0, 3600.0, -5.0),
    noise=True,
)
JOBS: dict[str, Truth] = {
    "host that runs ahead": replace(TRUTH, run_ahead=True),
    "host that is the bottleneck": replace(TRUTH, run_ahead=True, input_s=0.060),
    "buffers sent before each forward pass": replace(TRUTH, buffer_count=500),
    "no shapes": replace(TRUTH, shapes=False),
    "no noise": replace(TRUTH, noise=False, jitter=0.0),
    "one bucket": replace(TRUTH, buckets=(Bucket((7_000, 490_000), 0.020, 0.015),)),
    "many small buckets": replace(TRUTH, buckets=tuple(Bucket((100 + n,), 0.002, 0.001) for n in range(12))),
    "slow link": replace(TRUTH, buckets=(Bucket((10,), 0.005, 0.030), Bucket((20,), 0.005, 0.030))),
    "three passes a step": replace(TRUTH, micro_batches=3),
    "late in one of four passes": replace(
        TRUTH,
        micro_batches=4,
        delays=(Delay("compute", 1, 2, 0.03, micro_batch=1), Delay("host", 2, 2, 0.05, micro_batch=2)),
    ),
    "no copy of the batch": replace(TRUTH, copy_s=0.0),
    "hosts that pause in backward": replace(
        TRUTH, delays=(Delay("host", 1, 2, 0.05, bucket=1), Delay("host", 0, 4, 0.03)), jitter=0.0
    ),
    "16 GPUs in two machines": replace(TRUTH, n_ranks=16, n_steps=3, skew_s=()),
}


def read(folder: Path, truth: Truth, device: Device, version: str = "2.6") -> list[RankProfile]:
    return [profile_rank(path) for path in write_job(folder, truth, device=device, version=version)]


def assert_same(found: RankStep, lived: RankStep) -> None:
    assert found.number == lived.number
    for phase in PHASES:
        assert getattr(found, phase) == pytest.approx(getattr(lived, phase), abs=NEAR_S), (phase, lived.number)
    assert found.held_s == pytest.approx(lived.held_s, abs=NEAR_S), lived.number
    assert found.buckets_s == pytest.approx(lived.buckets_s, abs=NEAR_S)
    assert found.micro_batches == lived.micro_batches
    for own, of_truth in zip(found.of_passes, lived.of_passes, strict=True):
        assert astuple(own) == pytest.approx(astuple(of_truth), abs=NEAR_S), lived.number
    assert found.earlier_s == pytest.approx(lived.earlier_s, abs=NEAR_S)
    assert found.end_s - found.start_s == pytest.approx(lived.end_s - lived.start_s, abs=NEAR_S)
    assert len(found.calls) == len(lived.calls)
    for call, of_truth in zip(found.calls, lived.calls, strict=True):
        assert (call.kind, call.of_gradients) == (of_truth.kind, of_truth.of_gradients)
        assert call.nbytes in (of_truth.nbytes, None)
        assert call.n_ranks in (of_truth.n_ranks, None)
        assert call.end_s - call.start_s == pytest.approx(of_truth.end_s - of_truth.start_s, abs=NEAR_S)
        ready_s = of_truth.issued_s - lived.start_s  # both on the rank's own clock
        assert call.issued_s - found.start_s == pytest.approx(ready_s, abs=NEAR_S)


def assert_read(profiles: list[RankProfile], truth: Truth, device: Device) -> None:
    for profile, lived in zip(profiles, simulate(truth, device), strict=True):
        assert len(profile.steps) == len(lived)
        for found, one in zip(profile.steps, lived, strict=True):
            assert_same(found, one.step)
        counts = [count for bucket in truth.buckets for count in bucket.counts]
        assert profile.batch_size in (truth.batch_size, None)
        assert [gradient.count for gradient in profile.gradients] == (counts if truth.shapes else [])
        assert profile.device == device
        assert profile.host_waits == (device == "cpu" or not truth.run_ahead)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("version", DIALECTS)
def test_every_version_tells_what_every_rank_lived_through(tmp_path, version, device):
    profiles = read(tmp_path, TRUTH, device, version)
    assert_read(profiles, TRUTH, device)
    assert [profile.rank for profile in profiles] == [0, 1, 2]
    assert {profile.world_size for profile in profiles} == {None if version == "1.8" else 3}
    assert {profile.batch_size for profile in profiles} == {TRUTH.batch_size}
    assert {profile.dtype for profile in profiles} == {"float32"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("truth", JOBS.values(), ids=JOBS)
def test_every_kind_of_job_is_read(tmp_path, truth, device):
    assert_read(read(tmp_path, truth, device), truth, device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_without_marks_are_found_and_only_the_first_is_lost(tmp_path, device):
    unmarked = replace(TRUTH, marks=False)
    for profile, lived in zip(read(tmp_path, unmarked, device), simulate(unmarked, device), strict=True):
        assert [step.number for step in profile.steps] == [0, 1, 2, 3]
        for found, one in zip(profile.steps, lived[1:], strict=True):
            assert_same(replace(found, number=one.step.number), one.step)


def test_gpu_of_a_rank_and_its_name_are_read(tmp_path):
    profiles = read(tmp_path, replace(TRUTH, n_ranks=10, n_steps=2, skew_s=()), "cuda", "2.13")
    assert [profile.local_gpu for profile in profiles] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert {profile.device_name for profile in profiles} == {"NVIDIA A100-SXM4-80GB"}
    assert [profile.hostname for profile in profiles] == ["node0"] * 8 + ["node1"] * 2
    assert {profile.n_gpus for profile in profiles} == {8}


def test_files_named_after_ranks_do_not_make_a_machine_of_each(tmp_path):
    """A user gives each rank a name where the handler of the profiler takes that of the host."""
    paths = write_job(tmp_path, replace(TRUTH, n_ranks=8, n_steps=2, skew_s=()), device="cuda")
    named = (
        path.rename(path.with_name(f"job-r{rank}_12.1690000000000.pt.trace.json")) for rank, path in enumerate(paths)
    )
    found = find_layout(assemble([profile_rank(path) for path in named]))
    assert found.nodes == 1
    assert "hosts in the names of files do not agree" in found.notes[0]
