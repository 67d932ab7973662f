"""Waiting for late ranks is never counted as communication, and a broadcast hides no straggler."""

from dataclasses import replace
from pathlib import Path

import pytest
from kineto_traces import Delay, Truth, write_job
from profiled_jobs import profiles_of

from simdist.profiles import import_job
from simdist.profiles.job.exchanges import transfers_of
from simdist.profiles.job.kind import find_kind
from simdist.profiles.job.step_budget import step_budget
from simdist.profiles.steps.ranks import profile_rank
from simdist.profiles.steps.step_parts import EXPOSED

IN_TURNS = tuple(Delay("io", step % 4, step, 0.1) for step in range(0, 24, 2))
JOB = Truth(n_ranks=4, n_steps=24, input_s=0.0, buffer_count=50, delays=IN_TURNS, gpus_per_node=4)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> list:
    folder: Path = tmp_path_factory.mktemp("traces")
    write_job(folder, JOB, device="cuda", version="2.13")
    return [profile_rank(path) for path in sorted(folder.iterdir())]


def test_a_broadcast_before_the_forward_pass_hides_no_straggler(traced: list) -> None:
    imported = import_job(traced, name="job")
    late = {(each.ranks, step) for each in imported.stragglers for step in each.steps}
    assert late == {((delay.rank,), JOB.first_step + delay.step) for delay in IN_TURNS}
    assert [each.seconds for each in imported.stragglers] == pytest.approx([0.1] * len(imported.stragglers), rel=0.02)


def test_ranks_that_are_late_in_turns_make_no_other_kind_of_job(traced: list) -> None:
    kind = find_kind(traced, waiting_s=0.0)
    assert kind.is_modelled
    calls, share = kind.left_out["broadcast"]
    step_s = import_job(traced, name="job").proof.measured_s
    assert calls == 1
    assert share * step_s == pytest.approx(JOB.buffer_s, rel=0.1)


def test_what_is_exposed_beyond_transfers_is_waiting(traced: list) -> None:
    budget = step_budget(traced)
    exposed_s = budget.of_all_s[list(EXPOSED.values())].sum()
    transfer_s = JOB.buffer_s + sum(bucket.transfer_s for bucket in JOB.buckets)
    assert exposed_s - budget.waiting_s <= 1.02 * transfer_s
    assert "communication-bound" not in budget.verdict
    quiet = step_budget(profiles_of(replace(JOB, delays=(), buffer_count=0), "cuda"))
    assert quiet.waiting_s == pytest.approx(0.0, abs=1e-6)


def test_the_transfer_of_a_call_is_that_of_the_rank_that_came_last() -> None:
    profiles = profiles_of(replace(JOB, buffer_count=0), "cuda")
    for rank in transfers_of(profiles):
        for step in rank:
            assert [each.seconds for each in step] == pytest.approx([0.006, 0.009], abs=1e-9)
