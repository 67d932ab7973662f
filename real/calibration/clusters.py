"""From measurements to a cluster, and back: what the cost model says that the same operations take."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from real.calibration.line_fit import Fit, fit, predicted_s
from real.calibration.tables import Hop, Measurement, Where, hops, is_flat_at_end, line, table
from simdist.scenario import Cluster, Device, Library, Link
from simdist.settings.units import format_Bps, format_nbytes, format_seconds

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
    library: Library,
    name: str,
    source: str,
) -> Derived:
    """Return the cluster that explains the all_reduces.

    Tables are of those inside nodes, and of those between one rank of each node. Lines are fitted to these and those of
    the world together; groups that share the network at the same time do so unevenly, and tell less.

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
        library=library,
        chunkwise=library == "gloo",
        device=device,
    )
    notes = [*fabric_notes, *network_notes]
    if form.links == "line":
        alone = [each for each in _all_reduces(measurements) if each.task.where != "all per node"]
        fitted = fit(cluster, alone)
        cluster = fitted.cluster
        notes += _fit_notes(fitted, alone)
    notes += [*_sharing_note(measurements, cluster), *missing]
    return Derived(cluster, tuple(notes))


def _all_reduces(measurements: Sequence[Measurement]) -> list[Measurement]:
    return [each for each in measurements if each.task.op == "all_reduce"]


def _fit_notes(fitted: Fit, measured: Sequence[Measurement]) -> list[str]:
    cluster = fitted.cluster
    notes = [
        f"{name}: {format_seconds(link.latency_s)} + size / ({format_Bps(link.bandwidth_Bps)} x {link.efficiency:.3g})"
        for name, link in (("fabric", cluster.fabric), ("network", cluster.network))
        if link != Link.ideal()
    ]
    notes.append(f"overhead of a collective: {format_seconds(cluster.collective_overhead_s)}")
    misses = zip(measured, fitted.residuals, strict=True)
    return [
        *notes,
        *(f"{each.task.where}, {format_nbytes(each.task.nbytes)}: {100 * miss:+.1f} %" for each, miss in misses),
    ]


def _link(name: str, points: list[Hop], form: Form) -> tuple[Link, list[str]]:
    """Return the link, and what to say about it."""
    if not points:
        return Link.ideal(), []
    if form.links == "line":
        link, reached = line(points, form.rate_Bps)
        return link, _line_notes(name, link, reached)
    link = table(points)
    return link, _table_notes(name, points, link)


def _line_notes(name: str, link: Link, reached: float) -> list[str]:
    """Say that a link seems to be faster than it can be."""
    if reached <= 1:
        return []
    return [
        f"warning: {name}: the fit reaches {reached:.3g} of the stated {format_Bps(link.bandwidth_Bps)}; "
        f"an efficiency above 1 cannot be, so it is 1: is --rate right, are messages large enough?"
    ]


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
    for each in sorted(_all_reduces(measurements), key=lambda each: each.task.nbytes):
        largest[each.task.where] = each
    if "one per node" not in largest or "all per node" not in largest:
        return []
    alone, together = largest["one per node"], largest["all per node"]
    found = together.median_s / alone.median_s
    expected = _all_reduce_s(cluster, together) / _all_reduce_s(cluster, alone)
    if abs(found / expected - 1) <= _SHARING_TOLERANCE:
        return []
    return [
        f"warning: all {cluster.gpus_per_node} ranks of a node take {found:.3g} times as long for "
        f"{format_nbytes(alone.task.nbytes)} as one alone; in the cluster, where they share one NIC, {expected:.3g} "
        f"times: perhaps a rank alone does not fill the network, or the node has several NICs"
    ]


def _all_reduce_s(cluster: Cluster, measured: Measurement) -> float:
    """Return what the cost model says of an all_reduce between nodes."""
    seconds = predicted_s(cluster, measured.task)
    assert seconds is not None
    return seconds


def _absent(nodes: int, ranks_per_node: int) -> list[str]:
    """Say which link could not be measured."""
    one_node = ["the network was not measured, because there was one node: it is ideal"] if nodes == 1 else []
    one_rank = ["the fabric was not measured, because nodes had one rank: it is ideal"] if ranks_per_node == 1 else []
    return one_node + one_rank
