"""Lines for all links at once, from all all_reduces that were measured: inside nodes, between them, and of the world.

By the cost model, the time of a ring all_reduce is a sum: the overhead of the collective, the latency of each link
times the hops over it in the longest chain of sends, and the seconds per byte of the link that decides times the bytes.
The factors follow from the cost model itself: each is how much the time grows if one parameter does. So the parameters
are the solution of linear least squares, none of them below zero, for the relative misses of all measurements together.
Each counts once, however often it was repeated: what a line misses outweighs what noise does.

One group size alone cannot tell the overhead of a collective from the latency of its hops. Groups of several sizes can:
those of nodes, of one rank per node, and the world have other numbers of hops, but one overhead each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from real.calibration.measure import collective, one_op_plan
from real.calibration.tables import Measurement, MeasuringTask, non_negative
from simdist.cost import Costs, Shared, Stage, price
from simdist.scenario import Cluster, Link, Tensor, Workload

_WORKLOAD = Workload(tensors=(Tensor(name="none", count=1),), batch_size=1, forward_s=0.0)


def predicted_s(cluster: Cluster, task: MeasuringTask) -> float | None:
    """Return what the cost model says that a collective takes; None for a message, which is no operation of a plan.

    Groups that share a link share it evenly, as in the simulator.
    """
    if task.op == "sendrecv":
        return None
    op = collective(task.op, task.group)
    costs = price(one_op_plan(op, task.count, cluster.world_size), cluster, _WORKLOAD)
    shared = costs.of[op]
    assert isinstance(shared, Shared)  # as of every collective
    transfers = shared.transfers[: len(task.taking_part(cluster.world_size))]
    return sum(_stage_s(stages, costs) for stages in zip(*(each.stages for each in transfers), strict=True))


def _stage_s(stages: Sequence[Stage], costs: Costs) -> float:
    """Return what equal stages take that all groups go through at the same time."""
    nbytes = np.zeros(costs.resources.n_resources)
    for stage in stages:
        nbytes[stage.resources] += stage.nbytes
    return max(stage.latency_s for stage in stages) + float((nbytes / costs.capacity_Bps).max())


_N_ROUNDS = 5  # which link decides, and which chain is longest, depends on the parameters themselves
_STEP = 1e-2


@dataclass(frozen=True, slots=True)
class Fit:
    """A cluster of lines, and how well it explains what it is from.

    Args:
        cluster: With fitted links and overhead.
        residuals: By which share of the measured time the cluster misses each measurement; positive where it is slower.
    """

    cluster: Cluster
    residuals: tuple[float, ...]


def fit(first: Cluster, measured: Sequence[Measurement]) -> Fit:
    """Return the cluster with the least relative misses.

    Args:
        first: The cluster to begin with: lines, with the stated rate of the network and the efficiency below or at 1.
        measured: All_reduces, with what they took.
    """
    times_s = np.array([each.median_s for each in measured])
    weights = 1 / times_s
    found = _values(first)
    least = np.array([0.0, 0.0, 0.0, 0.0, 1 / first.network.bandwidth_Bps])
    free = np.array([parameter in _free(first) for parameter in range(len(found))])
    for _ in range(_N_ROUNDS):
        factors = _factors(first, found, free, [each.task for each in measured])
        rest_s = times_s - factors @ np.where(free, least, found)
        found = np.where(free, least, found)
        found[free] += non_negative(factors[:, free] * weights[:, None], rest_s * weights)
    cluster = _with(first, found)
    misses = [(predicted_s(cluster, each.task) or 0.0) / each.median_s - 1 for each in measured]
    return Fit(cluster, tuple(misses))


def _free(cluster: Cluster) -> set[int]:
    """Return which parameters the measurements of a cluster can tell."""
    inside, between = cluster.gpus_per_node > 1, cluster.nodes > 1
    return ({0} if inside and between else set()) | ({1, 2} if inside else set()) | ({3, 4} if between else set())


def _values(cluster: Cluster) -> NDArray[np.float64]:
    fabric, network = cluster.fabric, cluster.network
    slopes = [1 / (link.bandwidth_Bps * link.efficiency) for link in (fabric, network)]
    return np.array([cluster.collective_overhead_s, fabric.latency_s, slopes[0], network.latency_s, slopes[1]])


def _with(cluster: Cluster, values: NDArray[np.float64]) -> Cluster:
    overhead_s, fabric_latency_s, fabric_slope, network_latency_s, network_slope = (float(value) for value in values)
    links = {}
    if fabric_slope > 0:
        links["fabric"] = Link(latency_s=fabric_latency_s, bandwidth_Bps=1 / fabric_slope)
    if network_slope > 0:
        rate_Bps = cluster.network.bandwidth_Bps
        efficiency = min(1.0, 1 / (network_slope * rate_Bps))
        links["network"] = Link(latency_s=network_latency_s, bandwidth_Bps=rate_Bps, efficiency=efficiency)
    return cluster.model_copy(update={**links, "collective_overhead_s": overhead_s})


def _factors(
    cluster: Cluster, values: NDArray[np.float64], free: NDArray[np.bool_], tasks: Sequence[MeasuringTask]
) -> NDArray[np.float64]:
    """Return how much the time of each task grows with each parameter, around `values`, `[n_tasks, n_parameters]`.

    Those that are not free, of links that are not there, are 0.
    """
    columns = []
    for parameter, value in enumerate(values):
        if not free[parameter]:
            columns.append([0.0] * len(tasks))
            continue
        step = _STEP * (value or float(values[values > 0].min(initial=1e-6)))
        more = values.copy()
        more[parameter] += step
        after, before = _with(cluster, more), _with(cluster, values)
        columns.append(
            [((predicted_s(after, task) or 0.0) - (predicted_s(before, task) or 0.0)) / step for task in tasks]
        )
    return np.array(columns).T
