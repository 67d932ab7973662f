"""Exchanges of a few bytes are a fixed cost of a job. They make it no other kind of job, however long they take."""

from dataclasses import replace
from pathlib import Path

import pytest
from commandline import call
from profiled_jobs import profiles_of, without_input
from sharded_traces import write_sharded

from simdist.profiles import ImportedJob, import_job
from simdist.profiles.job.exchanges import are_fixed
from simdist.profiles.job.kind import find_kind
from simdist.profiles.steps.model import RankProfile, TracedCollective
from simdist.profiles.steps.ranks import profile_rank

GRADIENT_NBYTES = 4_000_000
OF_GRADIENTS = TracedCollective("all_reduce", GRADIENT_NBYTES, None, None, 0.0, 0.0, 0.0, True, dtype="float32")
(STEP, *_) = profiles_of(without_input())[0].steps


def exchange(kind: str, nbytes: int | None, *, behind: bool = False, dtype: str = "float32") -> TracedCollective:
    return TracedCollective(kind, nbytes, None, None, 0.0, 0.0, 0.001, False, dtype=dtype, after_passes=behind)


FIXED = {
    "the norm of 41 tensors": exchange("all_reduce", 164, behind=True),
    "the norm of 10,000 tensors": exchange("all_reduce", 40_000, behind=True),
    "found_inf of a gradient scaler": exchange("all_reduce", 4, behind=True),
    "a loss that is logged before the backward pass": exchange("all_reduce", 8),
    "metrics of all ranks": exchange("all_gather", 48),
    "a flag to stop": exchange("broadcast", 1, dtype="bool"),
    "a barrier": exchange("other", 0),
    "the map of unused parameters of DDP": exchange("all_reduce", 1200, dtype="int32"),
}
LEFT_OUT = {
    "activations of tensor parallelism": exchange("all_reduce", 262_144),
    "statistics of a layer": exchange("all_reduce", 1028),
    "the same of all ranks": exchange("all_gather", 1028),
    "gradients that are averaged by hand": exchange("all_reduce", GRADIENT_NBYTES, behind=True),
    "tokens for few experts": exchange("all_to_all", 32),
    "a pipeline's first bytes": exchange("point_to_point", 32),
    "an exchange of unknown size": exchange("all_reduce", None, behind=True),
}


@pytest.mark.parametrize("name", FIXED)
def test_an_exchange_of_a_few_numbers_is_part_of_no_schedule(name: str) -> None:
    assert are_fixed(replace(STEP, calls=(OF_GRADIENTS, FIXED[name])), is_sharded=False) == [False, True]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_an_exchange_of_layers_is_not_fixed(name: str) -> None:
    assert are_fixed(replace(STEP, calls=(OF_GRADIENTS, LEFT_OUT[name])), is_sharded=False) == [False, False]


def test_parameters_that_are_averaged_one_by_one_are_not_fixed() -> None:
    """Many are small, but not all of them together."""
    step = replace(STEP, calls=tuple(exchange("all_reduce", 512, behind=True) for _ in range(100)))
    assert not any(are_fixed(step, is_sharded=False))


def test_units_of_a_sharded_model_are_no_metrics() -> None:
    gather = exchange("all_gather", 48)
    reduction = replace(OF_GRADIENTS, kind="reduce_scatter")
    step = replace(STEP, calls=(gather, reduction, exchange("all_gather", 48, behind=True)))
    assert are_fixed(step, is_sharded=True) == [False, False, True]


def imported_sharded(folder: Path, norm_ms: float, count: int = 41) -> tuple[list[RankProfile], ImportedJob]:
    folder.mkdir(exist_ok=True)
    write_sharded(folder, {(2, 5): 20.0}, norm_ms=norm_ms, norm_count=count)
    profiles = [profile_rank(path) for path in sorted(folder.glob("*.gz"))]
    return profiles, import_job(profiles, name="job")


@pytest.mark.parametrize("norm_ms", [0.5, 3.0, 12.0])
def test_a_job_that_clips_gradients_is_reproduced_however_long_the_norm_takes(tmp_path: Path, norm_ms: float) -> None:
    _, plain = imported_sharded(tmp_path / "plain", 0.0)
    profiles, found = imported_sharded(tmp_path / "clipped", norm_ms)
    kind = find_kind(profiles, waiting_s=0.0, is_sharded=True)
    assert kind.is_modelled
    assert kind.left_out == {}
    (norm,) = kind.fixed
    assert (norm.kind, norm.nbytes, norm.per_step) == ("all_reduce", 164, 1.0)
    assert norm.seconds == pytest.approx(1e-3 * norm_ms, rel=1e-3)
    assert found.proof.measured_s - plain.proof.measured_s == pytest.approx(1e-3 * norm_ms, abs=2e-5)
    assert found.proof.predicted_s - plain.proof.predicted_s == pytest.approx(1e-3 * norm_ms, abs=2e-5)
    (note,) = (each for each in found.notes if "part of no schedule" in each)
    assert note.startswith("1 all_reduce of 164 B a step are part of no schedule, as those of a gradient norm")


def test_a_larger_exchange_in_its_place_is_another_kind_of_job(tmp_path: Path) -> None:
    profiles, _ = imported_sharded(tmp_path, 12.0, count=1_000_000)
    kind = find_kind(profiles, waiting_s=0.0, is_sharded=True)
    assert not kind.is_modelled
    assert kind.fixed == ()


def test_schedules_of_a_job_that_clips_are_compared(tmp_path: Path, capsys) -> None:
    write_sharded(tmp_path, {}, norm_ms=12.0)
    path = tmp_path / "job.yaml"
    done = call(capsys, "import", tmp_path, "--nodes", "1", "-o", path)
    assert "schedules are not compared" not in done.out
    assert "left_out" not in path.read_text()
