"""Delays of traced jobs that accumulate gradients are those of the micro-batch in which they happened."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from commandline import call
from engine_runs import simulate
from kineto_truth import Device
from numpy.typing import NDArray
from profiled_jobs import Bucket, Delay, Truth, profiles_of
from sharded_traces import N_UNITS, SAMPLES, write_sharded
from traced_plans import step_s, write_traces

from simdist.plan.delays import Delays
from simdist.plan.ops import Channel
from simdist.profiles import ImportedJob, import_job
from simdist.profiles.steps.ranks import profile_rank
from simdist.runs.building import build
from simdist.scenario import Scenario, load, loads
from simdist.scenario.disturbances import Recorded, read_recorded

LATE_S = 0.030
N_STEPS = 10
N_RANKS = 4
NEAR_S = 2e-4
Cell = tuple[int, int, int]  # step, micro-batch, rank

ONE_EACH: dict[str, tuple[Cell, ...]] = {
    "in turn": ((3, 0, 1), (3, 1, 2), (7, 1, 1), (7, 0, 2)),
    "in the same one": ((3, 1, 1), (3, 1, 2), (6, 0, 1), (6, 0, 2)),
    "in every step": tuple((step, number, rank) for step in range(N_STEPS) for number, rank in ((0, 1), (1, 2))),
    "in turn in every step": tuple((step, (step + rank) % 2, rank) for step in range(N_STEPS) for rank in (1, 2)),
}


def late_s(late: tuple[Cell, ...], micro_batches: int) -> NDArray[np.float64]:
    seconds = np.zeros((N_STEPS, micro_batches, N_RANKS))
    for cell in late:
        seconds[cell] = LATE_S
    return seconds


def sharded(folder: Path, on: Channel, seconds: NDArray[np.float64], *, host: str) -> Scenario:
    np.savez(folder / "late.npz", **{on: seconds})
    return loads(f"""
cluster:
  nodes: 1
  gpus_per_node: {N_RANKS}
  fabric: {{latency: 3 us, bandwidth: 20 GB/s}}
  network: ideal
workload:
  tensors:
    - {{name: root.w, count: 400000, forward: 1 ms, backward: 2 ms}}
    - {{name: layers.0.w, count: 8000000, forward: 5 ms, backward: 9 ms}}
    - {{name: layers.1.w, count: 8000000, forward: 6 ms, backward: 10 ms}}
  batch_size: 1
  micro_batches: {seconds.shape[1]}
  optimize: 12 ms
host: {{{host}}}
disturbances: [{{kind: recorded, on: {on}, file: {folder / "late.npz"}}}]
steps: {N_STEPS}
schedules: [{{kind: fsdp, wrap: blocks, param_dtype: bfloat16, reduce_dtype: float32}}]
""")


def imported(folder: Path) -> ImportedJob:
    return import_job([profile_rank(path) for path in sorted(folder.glob("*.gz"))], name="job")


def cells(seconds: NDArray[np.float64]) -> tuple[Cell, ...]:
    return tuple((int(step), int(number), int(rank)) for step, number, rank in np.argwhere(seconds > LATE_S / 2))


def step_of(job: ImportedJob, delays: Delays) -> float:
    built = build(job.scenario, job.scenario.schedules[0])
    return simulate(built.plan, built.costs, delays).makespan_s / N_STEPS


def first_alone(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the delays of a step as one of its first micro-batch, for one run."""
    found = np.zeros_like(seconds[None])
    found[0, :, 0] = seconds.sum(axis=1)
    return found


@pytest.mark.parametrize("late", ONE_EACH.values(), ids=ONE_EACH)
@pytest.mark.parametrize(
    ("on", "micro_batches", "host"),
    [
        ("compute", 2, "waits_for: update"),
        ("compute", 3, "waits_for: loss"),
        ("compute", 4, "run_ahead_steps: null"),
        ("host", 4, "waits_for: loss"),
    ],
)
def test_a_sharded_job_waits_in_each_micro_batch_for_the_rank_that_is_late_in_it(
    tmp_path: Path, on: Channel, late: tuple[Cell, ...], micro_batches: int, host: str
) -> None:
    trace = write_traces(tmp_path, sharded(tmp_path, on, late_s(late, micro_batches), host=host))
    found = imported(tmp_path)
    assert cells(found.delays[on]) == tuple(sorted(late))
    assert found.delays[on][found.delays[on] > NEAR_S] == pytest.approx(LATE_S, abs=NEAR_S)
    assert found.scenario.cluster.slow_devices == ()
    assert found.proof.predicted_s == pytest.approx(step_s(trace), rel=1e-3)
    if len({cell[:2] for cell in late}) > len({cell[0] for cell in late}):
        of_steps = {channel: first_alone(seconds) for channel, seconds in found.delays.items()}
        assert step_of(found, of_steps) < step_s(trace) - LATE_S * len({step for step, *_ in late}) / N_STEPS / 2


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_slow_backward_passes_are_late_in_their_micro_batch(tmp_path: Path, micro_batches: int) -> None:
    late = {(1, 5, 0): 8.0, (2, 5, 1): 8.0, (1, 8, 1): 8.0, (2, 8, 1): 8.0}
    write_sharded(tmp_path, late, n_steps=N_STEPS, micro_batches=micro_batches)
    found = imported(tmp_path)
    assert cells(found.delays["compute"]) == ((5, 0, 1), (5, 1, 2), (8, 1, 1), (8, 1, 2))
    assert found.delays["compute"][5, 0, 1] == pytest.approx(N_UNITS * 0.008, rel=0.01)
    cost_s = 3 * N_UNITS * 0.008 / N_STEPS  # once where both are late in one micro-batch
    assert found.proof.predicted_s - found.proof.without_s[0] == pytest.approx(cost_s, rel=0.05)


@pytest.mark.parametrize("micro_batches", [2, 8])
def test_noise_of_micro_batches_costs_what_it_did(tmp_path: Path, micro_batches: int) -> None:
    """Undisturbed micro-batches are rarely all in one step."""
    noise_s = np.random.default_rng(3).uniform(0.0, LATE_S, (N_STEPS, micro_batches, N_RANKS))
    trace = write_traces(tmp_path, sharded(tmp_path, "compute", noise_s, host="waits_for: update"))
    found = imported(tmp_path)
    assert np.corrcoef(found.delays["compute"].ravel(), noise_s.ravel())[0, 1] > 0.99
    assert found.proof.predicted_s == pytest.approx(step_s(trace), rel=2e-3)


def test_a_slow_device_is_late_in_all_micro_batches(tmp_path: Path) -> None:
    plain = sharded(tmp_path, "compute", late_s(((3, 1, 2),), 3), host="waits_for: update")
    text = {"slow_devices": [{"ranks": [1], "speed": 0.8}]}
    cluster = type(plain.cluster).model_validate(plain.cluster.model_dump() | text)
    trace = write_traces(tmp_path, plain.model_copy(update={"cluster": cluster}))
    found = imported(tmp_path)
    (slow,) = found.scenario.cluster.slow_devices
    assert (slow.ranks, slow.speed) == ((1,), pytest.approx(0.8, abs=0.002))
    assert cells(found.delays["compute"]) == ((3, 1, 2),)
    assert found.proof.predicted_s == pytest.approx(step_s(trace), rel=0.01)


# ---------------------------------------------------------------- gradients that are exchanged once

DDP = Truth(
    n_steps=N_STEPS,
    micro_batches=4,
    input_s=0.0,
    copy_s=0.0,
    buckets=(Bucket((1000,), 0.01, 0.002), Bucket((2000,), 0.01, 0.003)),
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("on", ["compute", "host"])
def test_a_replicated_job_is_late_in_the_micro_batch_of_its_delay(
    device: Device, on: Literal["compute", "host"]
) -> None:
    late = ((3, 1, 1), (3, 2, 2), (6, 3, 1), (6, 3, 2))
    seconds = 0.12 if on == "host" else LATE_S  # the host of a GPU is ahead of it
    delays = tuple(Delay(on, rank, step, seconds, micro_batch=number) for step, number, rank in late)
    found = import_job(profiles_of(replace(DDP, delays=delays), device), name="job")
    assert cells(np.sum(list(found.delays.values()), axis=0)) == late
    assert found.proof.predicted_s == pytest.approx(found.proof.measured_s, rel=0.01)


def test_steps_of_the_profiler_are_micro_batches_where_one_exchange_follows_several() -> None:
    truth = replace(DDP, micro_batches=1, n_steps=12, first_step=0, delays=(Delay("compute", 1, 4, LATE_S),))
    profiles = [
        replace(
            profile,
            steps=tuple(
                step if step.number % 3 == 2 else replace(step, calls=(), buckets_s=(), held_s=(), optimize_s=0.0)
                for step in profile.steps
            ),
        )
        for profile in profiles_of(truth)
    ]
    assert cells(import_job(profiles, name="job").delays["compute"]) == ((1, 1, 1),)


def test_uneven_batches_take_longer_in_their_own_micro_batch() -> None:
    draws = np.random.default_rng(1).uniform(0, LATE_S, (N_STEPS, DDP.micro_batches, N_RANKS))
    delays = tuple(
        Delay("compute", rank, step, float(draws[step, number, rank]), micro_batch=number)
        for step, number, rank in np.ndindex(draws.shape)
    )
    found = import_job(profiles_of(replace(DDP, delays=delays), "cuda"), name="job")
    assert found.uneven is not None
    seconds = found.delays["compute"]
    assert np.corrcoef(seconds.ravel(), draws.ravel())[0, 1] > 0.97
    assert found.proof.predicted_s == pytest.approx(found.proof.measured_s, rel=0.02)


def test_backward_passes_beside_exchanges_keep_their_delays() -> None:
    """What exchanges cause stays on the last micro-batch, the only one that has some."""
    beside = tuple(0.1 * (step % 3) for step in range(N_STEPS))
    late = Delay("compute", 1, 4, LATE_S, micro_batch=0)
    found = import_job(profiles_of(replace(DDP, micro_batches=2, beside=beside, delays=(late,))), name="job")
    assert {"compute", "backward"} <= found.delays.keys()
    assert {seconds.ndim for channel, seconds in found.delays.items() if channel != "overlap"} == {3}
    assert found.proof.predicted_s == pytest.approx(found.proof.measured_s, rel=0.02)


def test_steps_that_do_not_show_their_passes_are_late_in_the_first_with_a_note() -> None:
    truth = replace(DDP, delays=(Delay("compute", 1, 3, LATE_S, micro_batch=2),))
    profiles = [
        replace(profile, steps=tuple(replace(step, of_passes=()) for step in profile.steps))
        for profile in profiles_of(truth)
    ]
    found = import_job(profiles, name="job")
    assert cells(found.delays["compute"]) == ((3, 0, 1),)
    assert any("40 of 40 steps of ranks do not show their 4 micro-batches" in note for note in found.notes)


def test_the_files_hold_delays_and_samples_of_micro_batches_and_whatif_reads_them(tmp_path: Path, capsys) -> None:
    late = {(rank, step, step % 2): 8.0 for rank in (1, 2) for step in (3, 4, 7)}
    path = tmp_path / "job.yaml"
    call(capsys, "import", write_sharded(tmp_path, late, n_steps=N_STEPS, micro_batches=2), "-o", path)
    scenario = load(path)
    assert (scenario.workload.micro_batches, scenario.workload.batch_size) == (2, SAMPLES)
    (recorded,) = scenario.disturbances
    assert isinstance(recorded, Recorded)
    assert read_recorded(recorded).shape == (N_STEPS, 2, N_RANKS)
    assert "stragglers" in call(capsys, "whatif", path).out
