"""What `fully_shard` computes itself, such as copies and hooks, is told from what the model computes."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_runs import simulate
from sharded_traces import BACKWARD_MS, FORWARD_MS, NAMED_UNITS, UPDATE_MS, write_blocking

from simdist.profiles import ImportedJob, import_job
from simdist.profiles.estimates.base import parts
from simdist.profiles.job.job import assemble
from simdist.profiles.steps.model import RankStep, TracedCollective
from simdist.profiles.steps.ranks import profile_rank
from simdist.runs.building import build, delays
from simdist.scenario import Link, Scenario
from simdist.schedules import HSDP, HierarchicalSGD, LocalSGD, Schedule, Sync


def imported(folder: Path) -> ImportedJob:
    return import_job([profile_rank(path) for path in sorted(folder.glob("rank*"))], name="job")


def computing_ms(scenario: Scenario, schedule: Schedule) -> float:
    """Return the milliseconds of a step on ideal links, without any delay."""
    cluster = scenario.cluster.model_copy(update={"fabric": Link.ideal(), "network": Link.ideal()})
    undisturbed = scenario.model_copy(update={"cluster": cluster, "disturbances": ()})
    built = build(undisturbed, schedule)
    return 1e3 * simulate(built.plan, built.costs, delays(undisturbed)).makespan_s / scenario.steps


@pytest.mark.parametrize(
    ("settings", "again_ms"),
    [
        ({}, 0.0),
        ({"micro_batches": 3}, 0.0),
        ({"param_type": "c10::BFloat16"}, 0.0),
        ({"recompute_ms": FORWARD_MS}, FORWARD_MS),
        ({"shard": 2}, 0.0),
    ],
    ids=["fsdp", "gradient accumulation", "bfloat16", "activation checkpointing", "hsdp"],
)
def test_schedules_without_sharding_compute_what_the_model_does(
    tmp_path: Path, settings: dict[str, object], again_ms: float
) -> None:
    own_ms = write_blocking(tmp_path, **settings)
    found = imported(tmp_path)
    assert 1e3 * found.base.sharding_s == pytest.approx(own_ms, abs=1e-3)
    for tensor in found.scenario.workload.tensors:
        assert tensor.forward_s == pytest.approx(1e-3 * FORWARD_MS, abs=1e-5)
        assert tensor.backward_s == pytest.approx(1e-3 * (BACKWARD_MS + again_ms), abs=1e-5)
    assert found.proof.error == pytest.approx(0.0, abs=0.002)
    n_passes = found.scenario.workload.micro_batches
    n_units = len(NAMED_UNITS)
    model_ms = n_passes * n_units * (FORWARD_MS + BACKWARD_MS + again_ms) + found.model.whole_per_slice * UPDATE_MS
    # to average parameters, they are read and written twice: into a flat buffer, and back
    copies_ms = 1e3 * 4 * found.scenario.workload.nbytes / found.scenario.cluster.device.memory_bandwidth_Bps
    averaging = [(Sync(), 0.0), (LocalSGD(period=4), 1 / 4), (HierarchicalSGD(levels={2: 2, 4: 4}), 1 / 2)]
    for schedule, per_step in averaging:
        expected_ms = model_ms + per_step * copies_ms
        assert computing_ms(found.scenario, schedule) == pytest.approx(expected_ms, rel=0.001), schedule.name
    sharded_ms = model_ms - (found.model.whole_per_slice - 1) * UPDATE_MS + own_ms
    assert computing_ms(found.scenario, found.model.schedule) == pytest.approx(sharded_ms, rel=0.002)


def test_other_degrees_pay_for_the_bytes_that_they_copy(tmp_path: Path) -> None:
    """Per element: two slices read and written, the unit copied out twice, and its gradients once."""
    own_ms = write_blocking(tmp_path)
    found = imported(tmp_path)
    model_ms = len(NAMED_UNITS) * (FORWARD_MS + BACKWARD_MS)
    more_copies = (4 / 2 + 4 + 2) / (4 / 4 + 4 + 2)
    expected_ms = model_ms + 2 * UPDATE_MS + more_copies * own_ms
    other = HSDP(shard=2, blocking=True)
    assert computing_ms(found.scenario, other) == pytest.approx(expected_ms, rel=0.002)


def test_annotations_of_a_job_that_does_not_shard_change_nothing(tmp_path: Path) -> None:
    """`replicate` has the hooks of `fully_shard`, and no schedule of copies."""
    write_blocking(tmp_path, shard=1)
    found = imported(tmp_path)
    assert found.base.sharding_s == 0
    assert math.isinf(found.scenario.cluster.device.memory_bandwidth_Bps)


def test_beside_other_parallelism_it_counts_as_the_forward_pass(tmp_path: Path) -> None:
    """An all_to_all, as of experts, makes it a job that no schedule of shards describes."""
    own_ms = write_blocking(tmp_path)
    profiles = [profile_rank(path) for path in sorted(tmp_path.glob("rank*"))]
    steps = [[replace(step, calls=with_experts(step)) for step in each.steps] for each in profiles]
    changed = [replace(each, steps=tuple(of_rank)) for each, of_rank in zip(profiles, steps, strict=True)]
    found = parts(assemble(changed))
    model_ms = len(NAMED_UNITS) * FORWARD_MS + 0.01
    assert not found.sharding_s.any()
    assert 1e3 * found.forward_s == pytest.approx(np.full_like(found.forward_s, model_ms + own_ms), abs=1e-2)


def with_experts(step: RankStep) -> tuple[TracedCollective, ...]:
    return (replace(step.calls[0], kind="all_to_all"), *step.calls[1:])
