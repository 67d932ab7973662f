"""Rules for algorithms of collectives."""

import numpy as np

from simdist.cost import Shared, price
from simdist.plan import AllGather, AllReduce, Broadcast, Buffer, Collective, Group, Plan, Reduce, ReduceScatter
from simdist.plan import algorithms as registry
from simdist.plan.check import check
from simdist.testing.jobs import CLUSTERS, scenario_of, telling

_COUNTS = (840, 84_000, 8_400_000)  # elements


def check_algorithm(name: str) -> None:
    """Check an algorithm of collectives against the rules for every algorithm.

    On clusters of several shapes, each collective that it declares takes time, and no less for more bytes.

    Args:
        name: Its name in scenarios and plans, such as `ring` or `module:NAME`.

    Raises:
        AssertionError: It breaks a rule. The message names the rule and the case.
    """
    with telling(f"algorithm {name}"):
        found = registry.find(name)
    for nodes, gpus_per_node in CLUSTERS:
        world_size = nodes * gpus_per_node
        if found.needs_power_of_two and world_size & (world_size - 1):
            continue
        for carried in found.carries:
            with telling(f"algorithm {name}: {carried.__name__} on {nodes} nodes of {gpus_per_node} GPUs"):
                times_s = [_seconds(name, carried, count, nodes, gpus_per_node) for count in _COUNTS]
                assert times_s[0] > 0, "it takes no time"
                assert times_s == sorted(times_s), f"more bytes take less time: {times_s} s"


def _seconds(name: str, carried: type[Collective], count: int, nodes: int, gpus_per_node: int) -> float:
    world_size = nodes * gpus_per_node
    op = _op(name, carried, Group(world_size))
    buffers = (
        Buffer("whole", count, "float32", initialized=True),
        Buffer("slice", count // world_size, "float32", initialized=True),
    )
    plan = Plan.from_steps("rules", world_size=world_size, buffers=buffers, steps=[(op,)])
    check(plan)
    scenario = scenario_of(nodes, gpus_per_node)
    gloo = {"library": "gloo"}  # whose rings and trees are not NCCL's protocols
    cluster = scenario.cluster.model_copy(update={"collectives": gloo})
    costs = price(plan, cluster, scenario.workload)
    cost = costs.of[op]
    assert isinstance(cost, Shared)
    return float(np.max(cost.alone_s))


def _op(name: str, carried: type[Collective], group: Group) -> Collective:
    if carried is AllReduce:
        return AllReduce("whole", group, algorithm=name)
    if carried is ReduceScatter:
        return ReduceScatter("whole", "slice", group, algorithm=name)
    if carried is AllGather:
        return AllGather("slice", "whole", group, algorithm=name)
    if carried is Reduce:
        return Reduce("whole", group, algorithm=name)
    return Broadcast("whole", group, algorithm=name)
