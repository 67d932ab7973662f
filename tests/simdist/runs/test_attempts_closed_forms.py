"""Attempts against closed forms, where their assumptions hold and where they fail."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from simdist.runs.attempts import LongJob, attempts
from simdist.runs.checkpointed_steps import Checkpoints
from simdist.scenario.failures import Failures
from simdist.scenario.sampling import run_seeds

DAY_S = 86_400.0
MINUTE_S = 60.0
HOUR_S = 3600.0


def failing(mtbf_s: float, *more: dict, **recovery: object) -> Failures:
    """Return failures of the job, memoryless, so that all their recovery is one part."""
    cause = {"cause": "any", "of": "job", "rate": f"1 per {mtbf_s!r} s", "effect": "process"}
    return Failures.model_validate({"causes": [cause, *more], "recovery": recovery})


def goodputs(failures: Failures, job: LongJob, n_seeds: int) -> np.ndarray:
    return np.array([attempts(failures, job, seed=seed).goodput for seed in run_seeds(0, n_seeds)])


def best_s(failures: Failures, *, near_s: float, save_s: float, mtbf_s: float, step_s: float = 10.0) -> float:
    """Return the best time between files, from a parabola through five times, with the same failures for all."""
    counts = [round(near_s * factor / step_s) for factor in (0.5, 0.7, 1.0, 1.4, 2.0)]
    means = [
        goodputs(failures, LongJob(step_s, 1, 1, horizon_s=1000 * mtbf_s, checkpoints=Checkpoints(count, save_s)), 4)
        for count in counts
    ]
    curve = np.polyfit(np.log(counts), np.mean(means, axis=1), 2)
    return math.exp(-curve[1] / (2 * curve[0])) * step_s


# ---------------------------------------------------------------- where their assumptions hold


def daly_s(save_s: float, mtbf_s: float) -> float:
    """Return the best time between files, to higher order.

    Source:
        Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006, equation 37.
    """
    x = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_s


def daly_total_s(interval_s: float, mtbf_s: float) -> float:
    """Return the time of 500 h of work: restart 10 min, dump 5 min; failures during a restart begin it anew."""
    restarts = mtbf_s * math.exp(10 * MINUTE_S / mtbf_s)
    return restarts * math.expm1((interval_s + 5 * MINUTE_S) / mtbf_s) * 500 * HOUR_S / interval_s


@pytest.mark.parametrize(
    ("mtbf_s", "minutes", "n_seeds"), [(24 * HOUR_S, 117, 20), (6 * HOUR_S, 57, 20), (900.0, 9, 3), (900.0, 12, 3)]
)
def test_dalys_three_cases(mtbf_s: float, minutes: int, n_seeds: int) -> None:
    job = LongJob(MINUTE_S, 1, 1, n_steps=30_000, checkpoints=Checkpoints(minutes, 5 * MINUTE_S))
    failures = failing(mtbf_s, detect="10 min")
    totals_s = np.array([attempts(failures, job, seed=seed).total_s for seed in run_seeds(0, n_seeds)])
    error_s = totals_s.std(ddof=1) / math.sqrt(n_seeds)
    assert totals_s.mean() == pytest.approx(daly_total_s(minutes * MINUTE_S, mtbf_s), abs=3 * error_s)
    best_minutes = daly_s(5 * MINUTE_S, mtbf_s) / MINUTE_S
    assert best_minutes == pytest.approx({24 * HOUR_S: 117, 6 * HOUR_S: 57, 900.0: 9.1}[mtbf_s], abs=0.5)


def test_young_is_right_within_2_percent_if_failures_are_rare() -> None:
    """Young: sqrt(2 Tf Ts). With restart Tr, between the ends of two files: Ts + sqrt(2 (Tf + Tr) Ts + Ts^2)."""
    mtbf_s, save_s, restart_s = 100_000.0, 60.0, 600.0
    young_s = math.sqrt(2 * mtbf_s * save_s)
    assert best_s(failing(mtbf_s), near_s=young_s, save_s=save_s, mtbf_s=mtbf_s) == pytest.approx(young_s, rel=0.02)
    with_restart_s = save_s + math.sqrt(2 * (mtbf_s + restart_s) * save_s + save_s**2)
    best = best_s(failing(mtbf_s, detect=f"{restart_s} s"), near_s=young_s, save_s=save_s, mtbf_s=mtbf_s)
    assert best + save_s == pytest.approx(with_restart_s, rel=0.02)


def test_24_steps_of_a_published_example_cost_nothing_against_the_best() -> None:
    """One in 6,000 s, recovery 600 s, save 10 s, step 15 s: 24 steps (changlan.org, Optimal Checkpointing Frequency).

    Its formula is of first order. With memoryless failures, 23 steps are best, whatever the recovery takes.
    """
    mtbf_s, recovery_s, save_s, step_s = 6000.0, 600.0, 10.0, 15.0
    assert round(math.sqrt(2 * (mtbf_s + recovery_s) * save_s) / step_s) == 24
    exact = [math.expm1((count * step_s + save_s) / mtbf_s) / count for count in range(1, 100)]
    assert 1 + int(np.argmin(exact)) == 23
    failures = failing(mtbf_s, detect=f"{recovery_s} s")
    of_count = {
        count: goodputs(
            failures, LongJob(step_s, 1, 1, horizon_s=2e6, checkpoints=Checkpoints(count, save_s)), 3
        ).mean()
        for count in (12, 23, 24, 48)
    }
    assert of_count[24] == pytest.approx(of_count[23], rel=0.002)
    assert of_count[24] > 1.01 * max(of_count[12], of_count[48])


def late(keep: int | None, hours: Sequence[float]) -> list[float]:
    """Return goodput by hours between files, if corruption is found after 6 h."""
    mtbf_s = 100_000.0
    corruption = {"cause": "sdc", "of": "job", "rate": "1 per 2e6 s", "effect": "corruption", "found_after": "6 h"}
    failures = failing(mtbf_s, corruption)
    counts = [int(each * 360) for each in hours]
    jobs = [
        LongJob(10.0, 1, 1, horizon_s=300 * mtbf_s, checkpoints=Checkpoints(each, 30.0, keep=keep)) for each in counts
    ]
    return [float(goodputs(failures, each, 3).mean()) for each in jobs]


def test_if_detection_takes_longer_than_the_interval_the_best_is_at_least_as_long() -> None:
    """With a file before the last one, the best interval is Te or more (arXiv 2410.18124)."""
    hours = [1, 2, 4, 6.1, 8, 12]
    assert hours[int(np.argmax(late(2, hours)))] == 6.1


# ---------------------------------------------------------------- where they fail


def test_with_all_files_kept_late_detection_asks_for_no_longer_interval() -> None:
    """The rule above assumes that older files are gone. If they are kept, one from before the corruption is there."""
    hours = [1, 2, 4, 6.1]
    found = late(None, hours)
    assert found == sorted(found, reverse=True)


def test_young_fails_if_a_failure_comes_within_a_few_files() -> None:
    """It takes half an interval as lost, and saves as free of failures. Jobs of 9 and 12 min are simulated above."""
    mtbf_s, save_s = 900.0, 300.0
    young_s = math.sqrt(2 * mtbf_s * save_s)
    assert round(young_s / MINUTE_S, 1) == 12.2
    assert daly_total_s(young_s, mtbf_s) > 1.02 * daly_total_s(daly_s(save_s, mtbf_s), mtbf_s)
    assert daly_total_s(120 * MINUTE_S, 24 * HOUR_S) < 1.001 * daly_total_s(117 * MINUTE_S, 24 * HOUR_S)


def test_the_mean_time_to_failure_does_not_tell_what_failures_that_come_together_cost() -> None:
    """Closed forms assume independent failures. Here 3 of 4 come 10 min after another one, on the same node."""
    again = {"cause": "any", "of": "job", "rate": "1 per 4e5 s", "effect": "process"}
    again |= {"again": {"probability": "75 %", "after": "10 min"}}
    together = Failures.model_validate({"causes": [again]})
    job = LongJob(10.0, 1, 1, horizon_s=4e7, checkpoints=Checkpoints(360, 60.0))
    one, other = (goodputs(each, job, 4) for each in (failing(1e5), together))
    counts = [attempts(each, job, seed=0).by_cause["any"].n_failures for each in (failing(1e5), together)]
    assert counts[0] == pytest.approx(counts[1], rel=0.25)
    assert (1 - other.mean()) < 0.85 * (1 - one.mean())
