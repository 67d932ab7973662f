"""The job of a scenario that suffers failures: its replicas, its length, and steps while a link flaps."""

import pytest

from simdist.errors import ScenarioError
from simdist.runs.attempts import attempts
from simdist.runs.checkpointed_steps import Checkpoints
from simdist.runs.failing_job import job_of
from simdist.scenario import loads

SCENARIO = """
cluster: {nodes: 4, gpus_per_node: 2, fabric: ideal, network: {latency: 0 s, bandwidth: 100 MB/s}}
workload: {tensors: [{name: all, count: 10000000}], batch_size: 1, forward: 200 ms, backward: 400 ms, units: [1]}
schedules: [sync, local-16, fsdp, hsdp-4]
steps: 4
train_for: 2 days
failures:
  causes:
  - {cause: gpu, of: gpu, rate: 40 per year, effect: node}
  - {cause: flap, of: node, rate: 100 per year, effect: flap, share: 50 %, lasts: 5 min}
"""


@pytest.mark.parametrize(
    ("number", "n_replicas", "average_every"), [(0, 8, 1), (1, 8, 16), (2, 1, 1), (3, 2, 1)], ids=str
)
def test_replicas_and_averages_are_those_of_the_schedule(number: int, n_replicas: int, average_every: int) -> None:
    scenario = loads(SCENARIO)
    job = job_of(scenario, scenario.schedules[number], step_s=0.7)
    assert (job.n_replicas, job.average_every) == (n_replicas, average_every)
    assert (job.n_steps, job.horizon_s) == (None, 2 * 86_400.0)


def test_a_slow_link_slows_steps_as_the_engines_say() -> None:
    """A ring of 8 ranks sends 7/4 of 40 MB over each NIC: 0.7 s, and 1.4 s if one is slow."""
    scenario = loads(SCENARIO.replace("backward: 400 ms", "backward: 0 ms"))
    job = job_of(scenario, scenario.schedules[0], step_s=0.8)
    assert job.slowed == {"flap": pytest.approx((0.2 + 1.4) / (0.2 + 0.7))}


def test_the_length_of_the_job_is_a_time_or_steps() -> None:
    scenario = loads(SCENARIO.replace("train_for: 2 days", "train_for: 5000 steps"))
    job = job_of(scenario, scenario.schedules[1], step_s=0.7, checkpoints=Checkpoints(100))
    assert (job.n_steps, job.horizon_s) == (5000, None)
    assert scenario.failures is not None
    assert attempts(scenario.failures, job, seed=0).n_steps == 5000


@pytest.mark.parametrize(
    ("left_out", "message"),
    [("train_for: 2 days\n", "how long is the whole job"), (SCENARIO[SCENARIO.index("failures:") :], "nothing fails")],
)
def test_what_is_missing_is_asked_for(left_out: str, message: str) -> None:
    scenario = loads(SCENARIO.replace(left_out, ""))
    with pytest.raises(ScenarioError, match=message):
        job_of(scenario, scenario.schedules[0], step_s=0.7)
