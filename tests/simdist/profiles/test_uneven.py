"""What a step loses, by cause: uneven work is neither noise nor stragglers, and all ranks at once lose time, too."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from engine_runs import simulate
from profiled_jobs import Delay, Truth, profiles_of, without_input

from simdist.profiles import ImportedJob, import_job
from simdist.runs.building import build
from simdist.stragglers import find_slowdown

JOB = without_input(n_ranks=4, n_steps=24, jitter=0.02)
CELLS = [(rank, step) for rank in range(4) for step in range(24)]
LENGTHS: dict[
    str, Callable[[random.Random, int, int], float]
] = {  # of batches: rank, step -> more seconds of computing
    "lognormal": lambda rng, rank, step: 0.01 * rng.lognormvariate(0, 0.7),
    "uniform": lambda rng, rank, step: 0.03 * rng.random(),
    "longer on later ranks": lambda rng, rank, step: (0.01 + 0.004 * rank) * rng.random(),
    "alike on all ranks of a step": lambda rng, rank, step: 0.02 * random.Random(step).random(),
}


def imported(truth: Truth, device="cuda") -> ImportedJob:
    return import_job(profiles_of(truth, device), name="job")


def lengths_of(name: str) -> tuple[Delay, ...]:
    rng = random.Random(1)
    return tuple(Delay("compute", rank, step, LENGTHS[name](rng, rank, step)) for rank, step in CELLS)


def lost_in_whatif(job: ImportedJob) -> float:
    built = build(job.scenario, job.scenario.schedules[0])
    trace = simulate(built.plan, built.costs, {channel: seconds[None] for channel, seconds in job.delays.items()})
    return find_slowdown(trace, ranks_per_node=job.scenario.cluster.gpus_per_node).lost_share


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_batches_of_several_lengths_are_uneven_work(lengths: str, device) -> None:
    job = imported(replace(JOB, delays=lengths_of(lengths)), device)
    assert job.uneven is not None
    assert (job.stragglers, job.common, job.noise.count) == ((), (), 0)
    assert job.lost.uneven > 0.015
    assert job.lost.uneven == pytest.approx(job.lost.total, abs=0.01)
    assert job.lost.total == pytest.approx(lost_in_whatif(job), abs=1e-6)


def test_passes_of_a_step_are_uneven_together() -> None:
    job = imported(replace(JOB, micro_batches=3, delays=lengths_of("uniform")))
    assert job.uneven is not None
    assert not job.stragglers


def test_a_straggler_is_found_beside_uneven_work() -> None:
    late = tuple(Delay("host", 2, step, 0.1) for step in (3, 9, 17))
    job = imported(replace(JOB, delays=(*lengths_of("uniform"), *late)))
    assert job.uneven is not None
    assert {(each.ranks, each.channel, each.steps) for each in job.stragglers} == {
        ((2,), "host", (JOB.first_step + each.step,)) for each in late
    }
    assert min(job.lost.stragglers, job.lost.uneven) > 0.1


def test_noise_of_hosts_is_no_uneven_work() -> None:
    rng = random.Random(2)
    job = imported(replace(JOB, delays=tuple(Delay("host", *cell, rng.expovariate(1 / 0.008)) for cell in CELLS)))
    assert (job.uneven, job.stragglers) == (None, ())
    assert job.lost.noise > 0.1
    assert job.lost.total == pytest.approx(lost_in_whatif(job), abs=1e-6)


@pytest.mark.parametrize("channel", ["host", "compute", "io"])
def test_a_rank_that_is_late_is_no_uneven_work(channel) -> None:
    job = imported(replace(JOB, delays=tuple(Delay(channel, 1, step, 0.02) for step in range(0, 24, 5))))
    assert job.uneven is None
    assert {each.ranks for each in job.stragglers} == {(1,)}


@pytest.mark.parametrize("channel", ["host", "compute", "io"])
def test_delays_of_all_ranks_at_once_are_lost(channel) -> None:
    """As when loaders start their workers again every 12 steps."""
    late = tuple(Delay(channel, rank, step, 0.3 + 0.01 * rank) for rank in range(4) for step in (2, 14))
    job = imported(replace(JOB, n_steps=26, delays=late))
    lost_s = job.proof.predicted_s * job.lost.common
    assert lost_s == pytest.approx(0.3 * 2 / 26, rel=0.06)
    assert job.lost.total == pytest.approx(lost_in_whatif(job), abs=1e-6)
    assert job.lost.noise < 0.02
