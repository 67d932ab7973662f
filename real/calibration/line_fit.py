"""Lines for all links at once, from all measured rings: inside nodes, between nodes, and of the world.

In the cost model, the time of a ring follows from the overhead of a collective, the latency of each link, and its
seconds per byte. So these are a least-squares fit to the relative errors of all measurements, with no value below zero.
Large errors count less than their squares, because a busy machine occasionally causes some. Each measurement counts
once, however often it was repeated, because the error of a line exceeds the noise.

One group size alone cannot separate the overhead of a collective from the latency of its hops. Groups of several sizes
can: groups of a node, of one rank per node, and of the world have different numbers of hops, but one overhead each.

**CPU cores.** With gloo, ranks move their data themselves. Then the overhead and the seconds per byte inside a node are
those of a core (`Cluster.host`). So are the seconds of a pass over a buffer. reduce_scatter makes more such passes than
all_reduce, and all_gather fewer, so all three are needed. These costs would look like a slower network, but a faster
network does not reduce them. So the network's own seconds per byte come from messages between two ranks, which nothing
else delays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from real.calibration.measure import collective, one_op_plan
from real.calibration.tables import Measurement, MeasuringTask
from simdist.cost import Costs, Shared, Stage, price
from simdist.scenario import Cluster, Link, Tensor, Workload

_WORKLOAD = Workload(tensors=(Tensor(name="none", count=1),), batch_size=1, forward_s=0.0)


def predicted_task_s(cluster: Cluster, task: MeasuringTask) -> float | None:
    """Return the predicted time of a collective; None for a message, which is not an operation of a plan.

    Groups that share a link share it evenly, as in the simulator.
    """
    if task.op == "sendrecv":
        return None
    op = collective(task.op, task.group)
    costs = price(one_op_plan(op, task.count, cluster.world_size), cluster, _WORKLOAD)
    shared = costs.of[op]
    assert isinstance(shared, Shared)  # as for every collective
    transfers = shared.transfers[: len(task.taking_part(cluster.world_size))]
    return math.fsum(_stage_s(stages, costs) for stages in zip(*(each.stages for each in transfers), strict=True))


def _stage_s(stages: Sequence[Stage], costs: Costs) -> float:
    """Return the time of equal stages that all groups perform at the same time."""
    nbytes = np.zeros(costs.resources.n_resources)
    for stage in stages:
        nbytes[stage.resources] += stage.nbytes
    return max(stage.latency_s for stage in stages) + float((nbytes / costs.capacity_Bps).max())


_FITTED = ("all_reduce", "reduce_scatter", "all_gather")
_LARGE = 0.05  # larger relative errors count less
_TINY = 1e-6  # of a parameter's usual size: smaller values are at the bound
_LEAST_FABRIC_S = 1e-11  # per byte inside a node: faster rates cannot be measured
_USUAL = (1e-3, 1e-4, 1e-9, 1e-4, 1e-9, 1e-10)  # sizes of the parameters, so that all steps have equal scale
_NAMES = (
    "the overhead of a collective",
    "the latency of the fabric",
    "the time of a byte on the fabric",
    "the latency of the network",
    "the time of a byte on the network",
    "the time of a byte in a buffer",
)


@dataclass(frozen=True, slots=True)
class Fit:
    """A cluster of lines, and how well it explains its measurements.

    Args:
        cluster: The cluster with fitted links and overhead.
        measured: The measurements.
        residuals: Relative error of the cluster for each measurement; positive if the cluster is slower.
        at_bounds: Parameters at their lower bounds, in words.
    """

    cluster: Cluster
    measured: tuple[Measurement, ...]
    residuals: tuple[float, ...]
    at_bounds: tuple[str, ...]


def fit(first: Cluster, measurements: Sequence[Measurement]) -> Fit:
    """Return the cluster with the smallest relative errors.

    Args:
        first: The initial cluster: lines, with the stated rate of the network and an efficiency of at most 1. With
            `host`, the core time of communication is also fitted, and the efficiency is that of messages.
        measurements: Collectives, and messages between nodes. Groups that share the network do so unevenly. They are
            less informative and do not count.
    """
    from scipy.optimize import least_squares

    ops = _FITTED if first.host else _FITTED[:1]
    measured = [each for each in measurements if each.task.op in ops and each.task.where != "all per node"]
    known_s = _message_s_per_byte(measurements) if first.host else None
    start = _values(first)
    least = np.zeros(len(_USUAL))
    least[2] = _LEAST_FABRIC_S
    least[4] = 1 / first.network.bandwidth_Bps
    if known_s is not None:
        start[4] = max(known_s, least[4])
    free = np.array([parameter in _free(first, known_s) for parameter in range(len(start))])

    def misses(values: NDArray[np.float64]) -> NDArray[np.float64]:
        found = start.copy()
        found[free] = values * usual
        cluster = _with(first, found)
        return np.array([(predicted_task_s(cluster, each.task) or 0.0) / each.median_s - 1 for each in measured])

    usual = np.array(_USUAL)[free]
    lowest = least[free]
    begin = np.maximum(start[free], lowest + _TINY * usual) / usual
    bounds = (lowest / usual, np.inf)
    solved = least_squares(misses, begin, bounds=bounds, loss="soft_l1", f_scale=_LARGE, xtol=1e-12, ftol=1e-12)
    found = start.copy()
    found[free] = np.where(solved.x - lowest / usual < _TINY, lowest / usual, solved.x) * usual
    at_bounds = [name for name, at in zip(np.array(_NAMES)[free], found[free] <= lowest, strict=True) if at]
    return Fit(_with(first, found), tuple(measured), tuple(solved.fun.tolist()), tuple(at_bounds))


def _message_s_per_byte(measurements: Sequence[Measurement]) -> float | None:
    """Return the seconds per byte of a message between nodes, from the two largest sizes; None if there are fewer."""
    found = sorted(
        (each.task.nbytes, each.median_s)
        for each in measurements
        if each.task.op == "sendrecv" and each.task.where == "pair of nodes"
    )
    if len(found) < 2 or found[-1][1] <= found[-2][1]:
        return None
    (smaller, before_s), (larger, after_s) = found[-2:]
    return (after_s - before_s) / (larger - smaller)


def _free(cluster: Cluster, known_s: float | None) -> set[int]:
    """Return the parameters that the measurements of a cluster determine."""
    inside = cluster.gpus_per_node > 1
    between = cluster.nodes > 1
    is_charged = cluster.host.is_charged
    found = ({0} if is_charged or (inside and between) else set()) | ({1, 2} if inside else set())
    found |= {3} if between else set()
    return found | ({4} if between and known_s is None else set()) | ({5} if is_charged else set())


def _values(cluster: Cluster) -> NDArray[np.float64]:
    fabric = cluster.fabric
    network = cluster.network
    host = cluster.host
    slopes = [1 / (link.bandwidth_Bps * link.efficiency) for link in (fabric, network)]
    overhead_s = host.collective_s if host.is_charged else cluster.collectives.overhead_s
    pass_s = 1 / host.copy_Bps if host.is_charged else 0.0
    return np.array([overhead_s, fabric.latency_s, slopes[0], network.latency_s, slopes[1], pass_s])


def _with(cluster: Cluster, values: NDArray[np.float64]) -> Cluster:
    overhead_s, fabric_latency_s, fabric_slope, network_latency_s, network_slope, pass_s = values.tolist()
    links = {}
    if fabric_slope > 0:
        links["fabric"] = Link(latency_s=fabric_latency_s, bandwidth_Bps=1 / fabric_slope)
    if network_slope > 0:
        rate_Bps = cluster.network.bandwidth_Bps
        efficiency = min(1.0, 1 / (network_slope * rate_Bps))
        links["network"] = Link(latency_s=network_latency_s, bandwidth_Bps=rate_Bps, efficiency=efficiency)
    if not cluster.host.is_charged:
        return cluster.model_copy(update={**links, "collectives": {"overhead_s": overhead_s}})
    work = {"collective_s": overhead_s, "copy_Bps": 1 / pass_s if pass_s > 0 else math.inf}
    return cluster.model_copy(update={**links, "host": work})
