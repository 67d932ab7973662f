"""Seconds per step are those of whole traces, although an engine that keeps only ends takes short cuts."""

import numpy as np
import pytest

from simdist.engines.observers import StepSeconds, WholeTrace
from simdist.engines.recurrence import _LARGE
from simdist.engines.run import run
from simdist.plan.delays import SeedDelays
from simdist.runs.building import build, delay_sampler
from simdist.scenario import loads

N_SEEDS = 64
JOB = """\
cluster: {{preset: dgx-h100, nodes: 8, slow_devices: [{slow}]}}
workload:
  tensors: [{{name: a, count: 3000000}}, {{name: b, count: 2000000}}, {{name: c, count: 1000000}}]
  batch_size: 1
  forward: 3 ms
  backward: 7 ms
  optimize: 1 ms
disturbances: [{{kind: exponential, mean: 2 ms}}]
schedules: [{schedule}]
steps: 3
"""


@pytest.mark.parametrize("slow", ["", "{ranks: [5], speed: 0.9}"])
@pytest.mark.parametrize(
    "schedule",
    [
        "{kind: sync, first_bucket_size: 1 B, bucket_size: 1 B}",
        "{kind: torus, first_bucket_size: 1 B, bucket_size: 1 B}",
        "{kind: hierarchical_sgd, levels: {1: 8, 2: world}}",
        "{kind: fsdp, reshard_after_forward: 4}",
        "{kind: gossip}",
        "{kind: gossip, matching: ring, overlap_steps: 1}",
    ],
)
def test_step_seconds_are_those_of_traces(schedule, slow):
    """All seeds are one batch, so large that the last of groups are found without the times of their members."""
    scenario = loads(JOB.format(schedule=schedule, slow=slow))
    built = build(scenario, scenario.schedules[0])
    assert scenario.cluster.world_size * N_SEEDS >= _LARGE
    seeds = SeedDelays(range(N_SEEDS), lambda some: delay_sampler(scenario, some))
    found_s = run(built.plan, built.costs, seeds, observe=StepSeconds(kinds_first=False), engine="fast")
    for seed in range(0, N_SEEDS, 9):
        drawn = delay_sampler(scenario, [seed]).take(scenario.steps)
        trace = run(built.plan, built.costs, drawn, observe=WholeTrace(), engine="fast")
        assert found_s[seed] == trace.end_s.max() / scenario.steps
    assert len(np.unique(found_s)) == N_SEEDS
