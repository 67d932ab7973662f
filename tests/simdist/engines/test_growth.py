"""Memory of a simulation grows no faster than the ranks, whatever groups a schedule divides them into."""

import tracemalloc

import pytest

from simdist.runs.building import simulate
from simdist.scenario import loads
from simdist.studies.comparison import compare

JOB = """\
cluster: {{preset: dgx-h100, nodes: {nodes}, uncertain: {{}}}}
workload:
  tensors: [{{name: embed, count: 100000}}, {{name: h.0, count: 150000}}, {{name: h.1, count: 150000}}]
  batch_size: 2
  forward: 4 ms
  backward: 9 ms
disturbances: [{{kind: pauses, on: host, every: [3, 5], delay: 50 ms, ranks: [0, 3]}}]
schedules: [{schedule}]
steps: 4
"""
SCHEDULES = [
    "{kind: fsdp, reshard_after_forward: 4}",
    "{kind: hsdp, shard: 2}",
    "{kind: hsdp, shard: 64}",
    "{kind: hierarchical_sgd, levels: {1: 2, 2: 8, 4: world}}",
    "{kind: torus}",
    "{kind: hitopk}",
]


def peak_nbytes(schedule, nodes):
    """Return the most memory of a comparison and of a trace."""
    scenario = loads(JOB.format(nodes=nodes, schedule=schedule))
    tracemalloc.start()
    try:
        compare(scenario, n_seeds=2)
        simulate(scenario)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_grows_no_faster_than_the_ranks(schedule):
    """With the square of the ranks it would be four times as much."""
    peak_nbytes(schedule, 8)  # imports
    assert peak_nbytes(schedule, 128) < 2.5 * peak_nbytes(schedule, 64)
