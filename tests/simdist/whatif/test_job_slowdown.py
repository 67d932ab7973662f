"""The slowdown of jobs with pipelines: hand-drawn ones, of which all numbers are known."""

from pathlib import Path

import numpy as np
import pytest
from operation_tables import PipelineJob, Seconds, random_seconds, steady, table, written

from simdist.errors import TraceError
from simdist.whatif.job_slowdown import IdealCompute, JobSlowdown, find_job_slowdown
from simdist.whatif.table import read_table

TWO_BY_TWO = PipelineJob()  # 1F1B of 2 stages and 2 micro-batches: (2 + 2 - 1) forward and backward passes, 9 s


def found(
    folder: Path, seconds: Seconds, *, job: PipelineJob = TWO_BY_TWO, compute: IdealCompute = "mean"
) -> JobSlowdown:
    return find_job_slowdown(read_table(written(folder, table(job, seconds, steps=(2, 30)))), compute=compute)


def test_an_even_job_has_no_slowdown(tmp_path: Path) -> None:
    even = found(tmp_path, steady())
    assert even.traced_s.tolist() == even.replayed_s.tolist() == even.step_s.tolist() == even.ideal_s.tolist() == [9, 9]
    assert even.slowdown == 1
    assert even.fixed_by_workers is even.fixed_by_last_stage is None


def test_slow_last_stage(tmp_path: Path) -> None:
    """Stage 0 takes 1 s and 2 s, stage 1 twice that: 15 s; with 1.5 s and 3 s everywhere 13.5 s."""
    slow = found(tmp_path, lambda dp, stage, kind, number: (1 + stage) * steady()(dp, stage, kind, number))
    assert slow.step_s == pytest.approx([15, 15])
    assert slow.slowdown == pytest.approx(15 / 13.5)
    # 1.5 s and 3 s on stage 0 with 2 s and 4 s on stage 1 take 16.5 s; 1 s and 2 s with 1.5 s and 3 s take 12 s.
    assert slow.stage_slowdowns == pytest.approx([12 / 13.5, 16.5 / 13.5])
    assert slow.fixed_by_last_stage == pytest.approx((15 - 12) / (15 - 13.5))
    assert {part.name: part.lost_s for part in slow.kinds if part.channel == "compute"} == pytest.approx(
        {"backward-compute": 1.0, "forward-compute": 0.5, "optimizer": 0.0}
    )


def test_slow_worker(tmp_path: Path) -> None:
    """The worker of data-parallel rank 1 and stage 0 computes half as fast: 13 s, by the median 9 s."""
    seconds = lambda dp, stage, kind, number: (2 if (dp, stage) == (1, 0) else 1) * steady()(dp, stage, kind, number)  # noqa: E731
    slow = found(tmp_path, seconds, compute="median")
    assert (slow.slowdown, slow.ideal_s.tolist()) == (pytest.approx(13 / 9), [9, 9])
    assert slow.table.ranks.ravel()[list(slow.slowest_workers)].tolist() == [1]
    assert slow.worker_slowdowns == pytest.approx([1, 1, 13 / 9, 1])
    assert slow.alone_slowdowns == pytest.approx([1, 1, 13 / 9, 1])
    assert slow.fixed_by_workers == pytest.approx(1)
    assert slow.worker_step_s[1] == pytest.approx([9, 9, 13, 9])
    mean = found(tmp_path, seconds)
    assert mean.ideal_s == pytest.approx([9 * 1.25] * 2)
    assert mean.slowdown == pytest.approx(13 / (9 * 1.25))


def test_slow_link(tmp_path: Path) -> None:
    """Receiving takes 0.25 s, and 0.75 s from stage 0 to stage 1 of data-parallel rank 1, the second time only."""

    def seconds(dp: int, stage: int, kind: str, number: int) -> float:
        is_slow = (dp, kind, number) == (1, "forward-recv", 1)
        return steady(forward_recv=0.75 if is_slow else 0.25)(dp, stage, kind, number)

    slow = found(tmp_path, seconds)
    # The second input is sent at 2 s. It is there before the first backward pass ends, at 4.25 s, so nothing is lost.
    assert slow.slowdown == pytest.approx(1)
    late = found(tmp_path, lambda dp, stage, kind, number: seconds(dp, stage, kind, 1 - number))
    assert late.slowdown == pytest.approx(9.75 / 9.25)
    (link,) = [part for part in late.kinds if part.lost_s > 1e-9]
    assert (link.name, link.channel, link.lost_s) == ("forward-pp-comm", "communication", pytest.approx(0.5))
    assert late.dp_rank_slowdowns == pytest.approx([1, 9.75 / 9.25])


def test_slow_kind_of_operation(tmp_path: Path) -> None:
    """Clipping takes 1 s on one of the four workers; all begin it together, so one optimizer step is late."""
    slow = found(
        tmp_path, lambda dp, stage, kind, number: steady(optimizer_clip_main_grad=dp * stage)(dp, stage, kind, number)
    )
    assert [(part.name, part.lost_s) for part in slow.kinds if part.lost_s > 1e-9] == [
        ("optimizer-clip-main-grad", pytest.approx(1))
    ]


def test_waiting_for_a_late_rank_is_no_part_of_a_collective(tmp_path: Path) -> None:
    """Data-parallel rank 1 computes longer; rank 0 waits in its reduction, which takes 0.5 s on both."""
    slow = found(
        tmp_path,
        lambda dp, stage, kind, number: (1 + dp) * steady()(dp, stage, kind, number) + 0.5 * ("scatter" in kind),
    )
    assert "grads-reduce-scatter" not in [part.name for part in slow.kinds if part.lost_s > 1e-9]
    assert slow.step_s == pytest.approx([18.5, 18.5])


def test_slowest_workers_are_three_percent(tmp_path: Path) -> None:
    found_slow = found(tmp_path, random_seconds(3), job=PipelineJob(n_dp=17, n_stages=2))
    assert len(found_slow.slowest_workers) == 2
    costs = found_slow.worker_slowdowns
    assert costs[list(found_slow.slowest_workers)].min() >= np.sort(costs)[-2]


def test_variants_in_small_batches_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, told = found(tmp_path, random_seconds(3)), []
    monkeypatch.setattr("simdist.whatif.job_slowdown._BATCH_VALUES", 1)
    path = written(tmp_path, table(TWO_BY_TWO, random_seconds(3), steps=(2, 30)))
    parts = find_job_slowdown(read_table(path), progress=lambda done, total: told.append((done, total)))
    np.testing.assert_array_equal(parts.worker_step_s, whole.worker_step_s)
    assert parts.kinds == whole.kinds
    assert [done for done, _ in told] == list(range(1, told[-1][1] + 1))


def test_a_job_that_takes_no_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the ideal step takes no time"):
        found(tmp_path, lambda dp, stage, kind, number: 0.0)
