"""Ranks without a trace: what the waiting of the others tells of them is told, and what it cannot tell is said."""

from dataclasses import replace

import numpy as np
import pytest
from profiled_jobs import Bucket, Delay, profiles_of, without_input

from simdist.profiles import ImportOptions, import_job

ALIKE = tuple(Bucket((count,), 0.003, count * 16e-9) for count in (250_000, 260_000, 255_000, 255_000))
JOB = without_input(n_ranks=8, n_steps=20, gpus_per_node=4, jitter=0.05, missing=(5,))


def always(seconds, rank=5, channel="host"):
    return tuple(Delay(channel, rank, step, seconds) for step in range(20))


def imported(truth, device="cpu"):
    return import_job(profiles_of(truth, device), name="job")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_waiting_for_the_one_rank_without_a_trace_is_its_delay_and_none_of_the_links(device) -> None:
    job = imported(replace(JOB, buckets=ALIKE, delays=always(0.02)), device)
    assert [(each.kind, each.ranks) for each in job.stragglers] == [("persistent", (5,))]
    exposed_s = 0.02 if device == "cpu" else 0.01  # half of it hides behind the forward pass of the GPU
    assert 0.85 * exposed_s < job.stragglers[0].seconds < 1.02 * exposed_s
    assert [row.seconds for row in job.times] == pytest.approx([4 * n * 4e-9 for n in (250e3, 255e3, 260e3)], rel=0.02)
    assert "it is probably a persistent straggler" in job.notes[-1]
    assert abs(job.proof.error) < 0.05


def test_links_that_may_be_late_ranks_recommend_nothing() -> None:
    problem = "1 of 8 ranks left no trace, and waiting for late ones among them looks like slow links: trace all ranks"
    assert imported(JOB).scenario.imported.problem == problem
    given = import_job(profiles_of(JOB), name="job", options=ImportOptions(cluster=imported(JOB).scenario.cluster))
    assert problem not in (given.scenario.imported.problem or "")
    assert imported(replace(JOB, missing=())).scenario.imported.problem is None


def test_a_single_delay_of_the_rank_without_a_trace_is_found() -> None:
    job = imported(replace(JOB, buckets=ALIKE, delays=(Delay("host", 5, 7, 0.1),)))
    assert [(each.kind, each.ranks, each.steps) for each in job.stragglers] == [("transient", (5,), (10,))]
    assert job.stragglers[0].seconds == pytest.approx(0.1, rel=0.1)


def test_a_lag_that_all_collectives_of_a_step_wait_for_counts_once() -> None:
    apart = tuple(replace(bucket, backward_s=0.02) for bucket in ALIKE)  # each ends before the next begins
    job = imported(replace(JOB, buckets=apart, delays=(Delay("host", 5, 7, 0.012),)))
    assert [(each.ranks, each.steps) for each in job.stragglers] == [((5,), (10,))]
    assert job.stragglers[0].seconds == pytest.approx(0.012, rel=0.15)


def test_no_collective_is_bounded_by_less_than_its_shortest_call_in_few_steps() -> None:
    """The first one of a step takes longer than others of about its size, and no rank is late."""
    first = replace(ALIKE[0], transfer_s=1.5 * ALIKE[0].transfer_s)
    truth = replace(JOB, buckets=(first, *ALIKE[1:]), n_steps=3)
    seconds = {row.nbytes: row.seconds for row in imported(truth, "cuda").times}
    assert seconds[first.nbytes] >= 0.99 * first.transfer_s


def test_of_several_ranks_without_a_trace_none_is_blamed() -> None:
    job = imported(replace(JOB, buckets=ALIKE, delays=always(0.02), missing=(5, 6)))
    assert job.stragglers == ()
    assert "persistent straggler is probably among them, but which one cannot be told" in job.notes[-1]


@pytest.mark.parametrize("missing", [(5,), (5, 6)])
def test_without_a_straggler_the_rank_without_a_trace_is_not_blamed(missing) -> None:
    job = imported(replace(JOB, buckets=ALIKE, jitter=0.2, missing=missing))
    assert job.stragglers == ()
    assert "upper bounds: a persistent straggler among rank" in job.notes[-1]


def test_collectives_of_unlike_sizes_cannot_tell_and_the_note_says_so() -> None:
    job = imported(replace(JOB, delays=always(0.02, channel="compute")))
    assert job.stragglers == ()
    assert "no two collectives of a step are of one size" in job.notes[-1]


def test_all_traces_of_one_run_are_believed() -> None:
    job = import_job(profiles_of(replace(JOB, missing=(), jitter=0.6)), name="job")
    assert not [note for note in job.notes if "apart from those of the others" in note]
    assert np.allclose(job.clocks.apart_s, 0.0, atol=1e-6)
