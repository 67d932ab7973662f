"""`simdist tune --failures`: the time of the whole job per step that counts decides."""

from functools import partial

import numpy as np
import pytest

import simdist
from simdist.errors import ScenarioError
from simdist.scenario import loads
from simdist.scenario.sampling import run_seeds
from simdist.studies.comparison import steps_in
from simdist.studies.suffering import steady, suffer
from simdist.tuning import Constraints, Extras, TuneOptions
from simdist.tuning.tuning import tune

JOB = """
name: job
cluster: {nodes: 2, gpus_per_node: 1, fabric: ideal, network: ideal, storage: {latency: 0 s, bandwidth: 1 GB/s}}
workload: {tensors: [{name: all, count: 1000}], batch_size: 1, forward: 1 s}
steps: 8
train_for: 10 days
checkpoint: {every: 600, size: 5 GB}
failures: {causes: [{cause: gpu, of: gpu, rate: 1 per day, effect: process}], recovery: {start: 5 min}}
schedules: [sync]
"""
ONLY = Extras(only=("local_sgd",))


def test_times_are_those_of_the_job_per_step_that_counts() -> None:
    scenario = loads(JOB)
    found = tune(scenario, TuneOptions(Constraints(4), ONLY, n_seeds=3, counts_failures=True))
    fresh = found.runs.scenario
    whole = fresh.changed(checkpoint=scenario.checkpoint)
    sync = scenario.schedules[0]
    trained = steady(whole, sync, partial(steps_in, schedule=sync, n_seeds=3))
    suffered = suffer(scenario.failures, trained, run_seeds(fresh.seed, 3))
    assert found.baseline.row.step_s == pytest.approx(float(np.mean(1 / suffered.trained_per_s)))
    assert found.baseline.row.step_s > 1.01 * trained.job.step_s
    assert any("time of the whole job per step that counts" in str(each) for each in found.remarks)


@pytest.mark.parametrize(
    ("change", "extras", "message"),
    [
        ({"failures": None}, ONLY, "the scenario has no failures"),
        ({"train_for": None}, ONLY, "the scenario has no train_for"),
        ({}, Extras(only=("local_sgd",), checkpoint_mode=("async",)), "finds the best interval"),
    ],
)
def test_what_cannot_be_counted_is_refused(change, extras, message) -> None:
    with pytest.raises(ScenarioError, match=message):
        tune(loads(JOB).changed(**change), TuneOptions(Constraints(4), extras, counts_failures=True))


def test_a_schedule_without_replicas_is_no_candidate_where_ranks_go_on_without_others() -> None:
    scenario = loads(JOB.replace("5 min}}", "5 min}, on_failure: continue}"))
    extras = Extras(only=("sync", "fsdp"), allow=("sharding",))
    found = tune(scenario, TuneOptions(Constraints(4), extras, n_seeds=1, counts_failures=True))
    assert {each.schedule.kind for each in found.finalists} == {"sync"}


def test_without_the_option_failures_change_nothing() -> None:
    scenario = loads(JOB)
    wanted = TuneOptions(Constraints(4), ONLY)
    rows = [tune(each, wanted).document()["rows"] for each in (scenario, scenario.changed(failures=None))]
    for with_failures, without in zip(*rows, strict=True):
        assert with_failures["step_s"] == without["step_s"]


def test_python_takes_the_same_option() -> None:
    found = simdist.tune(loads(JOB), global_every=2, n_seeds=2, counts_failures=True)
    assert found.counts_failures


def test_tables_say_that_times_are_those_of_the_job() -> None:
    text = tune(loads(JOB), TuneOptions(Constraints(2), ONLY, n_seeds=2, counts_failures=True)).text()
    assert "the whole job of 10 days, with failures" in text
    assert "job per step that counts" in text
    assert "step time " not in text


def test_uncertain_rates_widen_what_is_compared() -> None:
    """Every rank is lost once a day, or up to 8 times: the time of a step that counts has that doubt."""
    ranges = "uncertain: {failures.causes.0.rate: {from: 0.5 per day, to: 8 per day}}\n"
    wanted = TuneOptions(Constraints(2), ONLY, n_seeds=2, counts_failures=True)
    plain, ranged = (tune(loads(JOB + each), wanted).baseline.row for each in ("", ranges))
    assert plain.step_s_range is None
    assert ranged.step_s == plain.step_s
    assert ranged.step_s_range is not None
    low_s, high_s = ranged.step_s_range
    assert low_s < plain.step_s < 0.97 * high_s
