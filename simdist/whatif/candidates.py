"""A few schedules worth a look where a job has none but its own: rarer averages, of all ranks or of nodes first."""

from collections.abc import Iterator

from simdist.scenario import Scenario
from simdist.schedules import HierarchicalSGD, LocalSGD, Schedule

_PERIODS = (2, 4, 8)


def candidates(scenario: Scenario) -> tuple[Schedule, ...]:
    """Return schedules that fit the cluster of a scenario and average over all ranks in its steps.

    Local SGD of periods 2, 4 and 8; hierarchical SGD that averages within nodes (within halves of a single node) every
    2 steps and over all ranks every 4 or 8, and in three levels where there are four nodes or more.
    """
    cluster = scenario.cluster
    world_size, ranks_per_node = cluster.world_size, cluster.gpus_per_node
    labels = {schedule.name for schedule in scenario.schedules}
    return tuple(
        schedule
        for schedule in _all(world_size, ranks_per_node)
        if not list(schedule.problems(world_size, ranks_per_node))
        and not schedule.unused_settings(world_size, ranks_per_node, scenario.steps)
        and schedule.name not in labels
    )


def _all(world_size: int, ranks_per_node: int) -> Iterator[Schedule]:
    if world_size == 1:
        return
    yield from (LocalSGD(period=period) for period in _PERIODS)
    near = ranks_per_node if 1 < ranks_per_node < world_size else world_size // 2
    if near < 2:
        return
    for period in _PERIODS[1:]:
        yield HierarchicalSGD(levels={2: near, period: world_size}, intra_node_gradients=False)
    if world_size >= 4 * near:
        levels: dict[int, int] = {2: near, 4: 2 * near, 8: world_size}
        yield HierarchicalSGD(levels=levels, intra_node_gradients=False)
