"""Memory of a simulation grows no faster than the ranks, whatever groups a schedule divides them into."""

import tracemalloc

import pytest

from benchmarks.questions import MANY_GROUPS
from simdist.runs.building import simulate
from simdist.scenario import loads
from simdist.studies.comparison import compare

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
    scenario = loads(MANY_GROUPS.format(nodes=nodes, schedule=schedule))
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
