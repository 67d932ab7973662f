"""Schedules to propose for a job: a few for `whatif` and `import` to compare it with, and the levels that `tune` tries.

A chain of levels {2: 8, 4: 32, 8: 64} is a chain of periods, each a multiple of the one before, beside a chain of group
sizes, each a multiple of the one before and the last the world. Whether a schedule with them is legal, the schedule
says itself; the chains are only written so that nearly all of them are.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product

from simdist.scenario import Scenario
from simdist.schedules import HierarchicalSGD, LocalSGD, Schedule, Sync
from simdist.schedules.fsdp import FSDP
from simdist.schedules.hsdp import HSDP
from simdist.schedules.job import Shape
from simdist.schedules.sharded import ShardedSchedule
from simdist.schedules.tuning import Levels

_PERIODS = (2, 4, 8)  # of the few
_MOST_LEVELS = 4  # GPUs, node, rack, world: deeper hierarchies are not built
_EVERY_ONE_TO = 8  # beyond, two periods per doubling are close enough


def _averaging(levels: Levels) -> Schedule:
    """Return local SGD of one level, hierarchical SGD of several; gradients are not averaged.

    >>> _averaging(((4, 64),)).name, _averaging(((2, 8), (4, 64))).name
    ('local-4', 'hsgd-2-8,4-64')
    """
    if len(levels) == 1:
        return LocalSGD(period=levels[0][0])
    return HierarchicalSGD(levels=dict(levels), intra_node_gradients=False)


def few_schedules(scenario: Scenario) -> tuple[Schedule, ...]:
    """Return a few schedules that fit the cluster of a scenario and average over all ranks in its steps.

    Local SGD of periods 2, 4 and 8; hierarchical SGD that averages within nodes (within halves of a single node) every
    2 steps and over all ranks every 4 or 8, and in three levels where there are four nodes or more.
    """
    world_size = scenario.cluster.world_size
    ranks_per_node = scenario.cluster.gpus_per_node
    near = ranks_per_node if 1 < ranks_per_node < world_size else world_size // 2
    chains: list[Levels] = [((period, world_size),) for period in _PERIODS]
    chains += [((2, near), (period, world_size)) for period in _PERIODS[1:]] if near > 1 else []
    chains += [((2, near), (4, 2 * near), (8, world_size))] if 1 < near <= world_size // 4 else []
    labels = {schedule.name for schedule in scenario.schedules}
    shape = Shape(world_size, ranks_per_node, scenario.steps)
    return tuple(
        schedule
        for schedule in (map(_averaging, chains) if world_size > 1 else ())
        if not schedule.problems(shape) and not schedule.unused_settings(shape) and schedule.name not in labels
    )


def traced_schedules(
    traced: Sync, n_steps: int, *, nodes: int, gpus_per_node: int, has_links: bool
) -> tuple[Schedule, ...]:
    """Return the schedule of a traced job, and local and hierarchical SGD by several periods.

    Hierarchical SGD averages over a node first; on several nodes also with gradients averaged within each node in every
    step, as PyTorch's hook does. Schedules that would never average over all ranks in the run are omitted.

    Args:
        traced: Synchronous SGD, with the buckets that were seen.
        n_steps: Of the scenario.
        nodes: Machines.
        gpus_per_node: Ranks of each.
        has_links: Whether links are known well enough for hierarchical SGD.
    """
    world_size = nodes * gpus_per_node
    if world_size == 1:
        return (traced,)
    found: list[Schedule] = [traced, *(_averaging(((period, world_size),)) for period in _PERIODS if period <= n_steps)]
    levels = _levels_by_node(nodes, gpus_per_node) if has_links else ()
    if levels and levels[-1][0] <= n_steps:
        hierarchical = _averaging(levels)
        found.append(hierarchical)
        if nodes > 1 and gpus_per_node > 1:
            found.append(HierarchicalSGD(levels=dict(levels), label=f"{hierarchical.name}-node-gradients"))
    return tuple(found)


def sharded_schedules(
    traced: ShardedSchedule, n_steps: int, *, nodes: int, gpus_per_node: int, has_links: bool
) -> tuple[Schedule, ...]:
    """Return the schedule of a traced job whose model is sharded, and a few that shard it otherwise.

    They keep units after the forward pass or free them, gather one more unit ahead, and share a copy of the model among
    all ranks or among those of a node. Then copies may also average parameters once in several steps.

    Args:
        traced: As seen.
        n_steps: Of the scenario.
        nodes: Machines.
        gpus_per_node: Ranks of each.
        has_links: Whether links are known well enough for groups inside nodes.
    """
    world_size = nodes * gpus_per_node
    common = traced.model_dump(exclude_unset=True, include=set(ShardedSchedule.model_fields) - {"kind", "label"})
    keeps = traced.reshard_after_forward is False
    settings = traced.model_dump(exclude_unset=True, exclude={"label"}) | {"kind": traced.kind}
    reshards = {key: value for key, value in settings.items() if key not in ("reshard_after_forward", "keep_last_unit")}
    ahead = {
        "forward_prefetch": traced.forward_prefetch + 1,
        "backward_prefetch": traced.backward_prefetch + 1,
        "label": f"{traced.name}-prefetch-{traced.forward_prefetch + 1}",
    }
    found: list[Schedule] = [
        traced,
        type(traced).model_validate(reshards if keeps else reshards | {"reshard_after_forward": False}),
        type(traced).model_validate(settings | ahead),
    ]
    if traced.sharers(world_size) != world_size:
        found.append(FSDP.model_validate(common))
    if has_links and 1 < gpus_per_node < world_size:
        inside = common | {"shard": gpus_per_node}
        if traced.sharers(world_size) != gpus_per_node:
            found.append(HSDP.model_validate(inside))
        periods = (period for period in _PERIODS[1:] if period <= n_steps)
        found += [HSDP.model_validate(inside | {"between": LocalSGD(period=period)}) for period in periods]
    each_once = {schedule.name: schedule for schedule in reversed(found)}
    return tuple(
        each for each in found if each_once[each.name] is each and not each.problems(Shape(world_size, gpus_per_node))
    )


def _levels_by_node(nodes: int, gpus_per_node: int) -> Levels:
    """Return a chain of levels: a node first, then at most one size between, then the world; empty where none fits.

    >>> _levels_by_node(8, 8), _levels_by_node(1, 4)
    (((2, 8), (4, 32), (8, 64)), ((2, 2), (4, 4)))
    """
    *parts, world_size = _divisors(nodes * gpus_per_node)
    if not parts:
        return ()
    first = min(parts, key=lambda size: (size != gpus_per_node, abs(size - math.sqrt(world_size)), size))
    between = [size for size in parts if size % first == 0 and size > first]
    return tuple(zip(_PERIODS, (first, *between[-1:], world_size), strict=False))


def periods(most: int) -> tuple[int, ...]:
    """Return the periods to try, up to `most` steps: all up to 8, then 2^k and 3 x 2^k, and `most` itself.

    >>> periods(20)
    (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20)
    """
    doubled = {base * 2**k for base in (2, 3) for k in range(most.bit_length())}
    every_one = set(range(1, _EVERY_ONE_TO + 1))
    return tuple(sorted(period for period in every_one | doubled | {most} if period <= most))


def _divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number from 2 on, itself included.

    >>> _divisors(12)
    (2, 3, 4, 6, 12)
    """
    return tuple(size for size in range(2, number + 1) if number % size == 0)


def _chains(last: int, values: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    """Yield the growing chains of a given length that end with `last`, in which each value divides the next.

    >>> list(_chains(8, (1, 2, 4, 8), 3))
    [(1, 2, 8), (1, 4, 8), (2, 4, 8)]
    """
    if length == 1:
        yield (last,)
        return
    for value in values:
        if value < last and last % value == 0:
            yield from ((*chain, last) for chain in _chains(value, values, length - 1))


def level_chains(world_size: int, most_steps: int) -> Iterator[Levels]:
    """Yield every way to average over growing groups, the world at least every `most_steps` steps.

    >>> list(level_chains(4, 2))
    [((1, 4),), ((2, 4),), ((1, 2), (2, 4))]
    """
    ladder = periods(most_steps)
    sizes = _divisors(world_size)
    for length in range(1, _MOST_LEVELS + 1):
        grown = list(_chains(world_size, sizes, length))
        for last in ladder:
            for steps, ranks in product(_chains(last, ladder, length), grown):
                yield tuple(zip(steps, ranks, strict=True))
