"""From measurements to a cluster, and back: what the cost model says that the same operations take."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from real.calibration.measure import ITEM_NBYTES, Task, collective, one_op_plan
from real.calibration.tables import Hop, Line, Measurement, Where, hops, is_flat_at_end, line, table
from simdist.cost import Costs, Shared, Stage, price
from simdist.groups import Group
from simdist.scenario import Cluster, Device, Link, Tensor, Workload
from simdist.units import format_Bps, format_nbytes, format_seconds

__all__ = ["Derived", "Form", "derive", "predicted_s"]

_WORKLOAD = Workload(tensors=(Tensor(name="none", count=1),), batch_size=1, forward_s=0.0)
_SHARING_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Form:
    """How links are written down.

    Args:
        links: As the measured table, or as a line.
        rate_Bps: Of the network, for a line.
    """

    links: Literal["table", "line"]
    rate_Bps: float | None = None


@dataclass(frozen=True, slots=True)
class Derived:
    """A cluster and what there is to say about it."""

    cluster: Cluster
    notes: tuple[str, ...]


def derive(
    measurements: Sequence[Measurement],
    *,
    nodes: int,
    ranks_per_node: int,
    form: Form,
    device: Device,
    name: str,
    source: str,
) -> Derived:
    """Return the cluster that explains the all_reduces: inside nodes, and between one rank of each node.

    Raises:
        ScenarioError: Too few sizes were measured, or times do not grow with them.
    """
    rate_Bps = form.rate_Bps
    fabric, fabric_notes = _link("fabric", hops(measurements, "node"), Form(form.links))
    network, network_notes = _link("network", hops(measurements, "one per node"), Form(form.links, rate_Bps))
    missing = _absent(nodes, ranks_per_node)
    cluster = Cluster(
        name=name,
        source="; ".join([source, *missing]),
        nodes=nodes,
        gpus_per_node=ranks_per_node,
        fabric=fabric,
        network=network,
        device=device,
    )
    notes = [*fabric_notes, *network_notes, *_sharing_note(measurements, cluster), *missing]
    return Derived(cluster, tuple(notes))


def predicted_s(cluster: Cluster, task: Task) -> float | None:
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
    nbytes = np.zeros(costs.topology.n_resources)
    for stage in stages:
        nbytes[stage.resources] += stage.nbytes
    return max(stage.latency_s for stage in stages) + float((nbytes / costs.capacity_Bps).max())


def _link(name: str, points: list[Hop], form: Form) -> tuple[Link, list[str]]:
    """Return the link, and what to say about it."""
    if not points:
        return Link.ideal(), []
    if form.links == "line":
        fitted = line(points, form.rate_Bps)
        return fitted.link, _line_notes(name, points, fitted)
    link = table(points)
    return link, _table_notes(name, points, link)


def _line_notes(name: str, points: list[Hop], fitted: Line) -> list[str]:
    link = fitted.link
    notes = [
        f"{name}: {format_seconds(link.latency_s)} + size / ({format_Bps(link.bandwidth_Bps)} x {link.efficiency:.3g})"
    ]
    if fitted.reached > 1:
        notes.append(
            f"warning: {name}: the fit reaches {fitted.reached:.3g} of the stated {format_Bps(link.bandwidth_Bps)}; an "
            f"efficiency above 1 cannot be, so it is 1: is --rate right, are messages large enough?"
        )
    misses = zip(points, fitted.residuals, strict=True)
    return [*notes, *(f"{name}: {format_nbytes(hop.nbytes)} a hop: {100 * miss:+.1f} %" for hop, miss in misses)]


def _table_notes(name: str, points: list[Hop], link: Link) -> list[str]:
    """Name the points that were pooled, block by block."""
    rows = zip(points, [point.time_s for point in link.table or ()], strict=True)
    blocks = [(time_s, [hop for hop, _ in block]) for time_s, block in groupby(rows, key=lambda row: row[1])]
    moved = [(time_s, block) for time_s, block in blocks if any(hop.time_s != time_s for hop in block)]
    notes = [_pooling_note(name, block, time_s) for time_s, block in moved]
    if is_flat_at_end(link):
        notes.append(
            f"warning: {name}: the table ends flat, so larger messages would cost nothing more: measure again, with a "
            f"larger --max-size or --budget"
        )
    return notes


def _pooling_note(name: str, block: list[Hop], time_s: float) -> str:
    first, last = format_nbytes(block[0].nbytes), format_nbytes(block[-1].nbytes)
    times = ", ".join(format_seconds(hop.time_s) for hop in block)
    mean = format_seconds(time_s)
    return f"warning: {name}: times shrink from {first} to {last} a hop ({times}); the table has their mean, {mean}"


def _sharing_note(measurements: Sequence[Measurement], cluster: Cluster) -> list[str]:
    """Say how ranks of a node share the network, if it is not as in the cluster: evenly, one NIC."""
    largest: dict[Where, Measurement] = {}
    for each in measurements:
        if each.op == "all_reduce" and (each.where not in largest or each.nbytes > largest[each.where].nbytes):
            largest[each.where] = each
    if "one per node" not in largest or "all per node" not in largest:
        return []
    alone, together = largest["one per node"], largest["all per node"]
    found = together.median_s / alone.median_s
    expected = _all_reduce_s(cluster, together) / _all_reduce_s(cluster, alone)
    if abs(found / expected - 1) <= _SHARING_TOLERANCE:
        return []
    return [
        f"warning: all {cluster.gpus_per_node} ranks of a node take {found:.3g} times as long for "
        f"{format_nbytes(alone.nbytes)} as one alone; in the cluster, where they share one NIC, {expected:.3g} times: "
        f"perhaps a rank alone does not fill the network, or the node has several NICs"
    ]


def _all_reduce_s(cluster: Cluster, measured: Measurement) -> float:
    """Return what the cost model says of an all_reduce between nodes."""
    group = Group(cluster.nodes, stride=cluster.gpus_per_node)
    seconds = predicted_s(cluster, Task("all_reduce", measured.where, group, measured.nbytes // ITEM_NBYTES))
    assert seconds is not None
    return seconds


def _absent(nodes: int, ranks_per_node: int) -> list[str]:
    """Say which link could not be measured."""
    one_node = ["the network was not measured, because there was one node: it is ideal"] if nodes == 1 else []
    one_rank = ["the fabric was not measured, because nodes had one rank: it is ideal"] if ranks_per_node == 1 else []
    return one_node + one_rank
