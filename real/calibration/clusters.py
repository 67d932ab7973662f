"""From measurements to a cluster, and back to the times that the cost model predicts for the same operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from real.calibration.calls import CallTimes
from real.calibration.line_fit import Fit, fit
from real.calibration.tables import Hop, Measurement, RingOp, Where, hops, line, link_table
from simdist.runs.nccl_tests import NcclTable, ring_step_s
from simdist.scenario import Cluster, Device, Library, Link, TablePoint
from simdist.scenario.cluster import ClusterCollectives, ClusterHost
from simdist.scenario.link import ends_flat
from simdist.scenario.uncertain import Range
from simdist.settings.units import format_Bps, format_nbytes, format_seconds

_MEASURE = "the links again: real.calibrate with a larger --budget"
_MOST_OFF = 0.5  # largest distance of the ends of a range from the value, as a share


@dataclass(frozen=True, slots=True)
class Cores:
    """Facts about CPU cores that are known before the links.

    Args:
        per_node: Cores of a machine.
        shared: All nodes are on one machine.
        handover_s: Core seconds of overhead per operation.
    """

    per_node: int
    shared: bool
    handover_s: float


@dataclass(frozen=True, slots=True)
class LinkForm:
    """The form of the derived links.

    Args:
        links: As the measured table, or as a line.
        rate_Bps: Rate of the network, for a line.
        cores: For a line with gloo: the CPU cores of a machine. None ignores the core time of communication.
        calls: With NCCL: what a call takes the host. With gloo, the host itself moves the data, and its time belongs to
            the links or to `host`.
    """

    links: Literal["table", "line"]
    rate_Bps: float | None = None
    cores: Cores | None = None
    calls: CallTimes | None = None


@dataclass(frozen=True, slots=True)
class _Derived:
    """A cluster, and notes on it."""

    cluster: Cluster
    notes: tuple[str, ...]


def derive(
    measurements: Sequence[Measurement],
    *,
    nodes: int,
    ranks_per_node: int,
    form: LinkForm,
    device: Device,
    library: Library,
    name: str,
    source: str,
) -> _Derived:
    """Return the cluster that explains the collectives.

    Tables come from the collectives inside nodes, and from those between one rank of each node. Lines are fitted to
    these and to those of the world together, with gloo also to reduce_scatters and all_gathers. Groups that use the
    network at the same time share it unevenly, so they are less informative.

    With times of calls, the overhead of a collective has what waiting adds.

    Raises:
        ScenarioError: Too few sizes were measured, or times do not grow with them.
    """
    rate_Bps = form.rate_Bps
    fabric, fabric_notes = _link("fabric", _hops(measurements, "node", library), LinkForm(form.links))
    network, network_notes = _link(
        "network", _hops(measurements, "one per node", library), LinkForm(form.links, rate_Bps)
    )
    missing = _absent(nodes, ranks_per_node)
    cluster = Cluster(
        name=name,
        source="; ".join([source, *missing]),
        nodes=nodes,
        gpus_per_node=ranks_per_node,
        fabric=fabric,
        network=network,
        collectives=ClusterCollectives(library=library, chunkwise=library == "gloo"),
        device=device,
    )
    notes = [*fabric_notes, *network_notes]
    if form.links == "line":
        fitted = fit(_with_cores(cluster, form.cores), measurements)
        cluster = fitted.cluster.model_copy(update={"uncertain": _ranges(fitted)})
        notes += _fit_notes(fitted)
        cluster, of_step = _with_ring_step(cluster, measurements)
        notes += of_step
    if form.calls:
        overhead_s = cluster.collectives.overhead_s + form.calls.waiting_s
        cluster = cluster.model_copy(update={"collectives": {"overhead_s": overhead_s}})
        added = format_seconds(form.calls.waiting_s)
        notes.append(f"{form.calls.in_words}: collectives.overhead has {added} for waiting")
    return _Derived(cluster, (*notes, *missing))


def _with_ring_step(cluster: Cluster, measurements: Sequence[Measurement]) -> tuple[Cluster, list[str]]:
    """Return a cluster with the step of a ring that gathers over half of the nodes and over all tell, and a note."""
    gathers = [each for each in measurements if each.task.op == "all_gather"]
    halves = [each for each in gathers if each.task.where == "half of the nodes"]
    if not halves:
        return cluster, []
    half = halves[-1]
    every = next(each for each in gathers if each.task.where == "world" and each.task.count == half.task.count)
    few, many = (
        NcclTable(
            "all_gather",
            ((each.task.nbytes, each.median_s),),
            nodes=each.task.group.size // cluster.gpus_per_node,
            gpus_per_node=cluster.gpus_per_node,
        )
        for each in (half, every)
    )
    step_s = max(0.0, ring_step_s(few, many, cluster))
    network = cluster.network.model_copy(update={"ring_step_s": float(f"{step_s:.3g}")})
    note = f"step of a ring between nodes: {format_seconds(step_s)}, by gathers over half of the nodes and over all"
    return cluster.model_copy(update={"network": network}), [note]


def _with_cores(cluster: Cluster, cores: Cores | None) -> Cluster:
    """Return a cluster in which communication uses CPU cores, with usual values as a start."""
    if cores is None:
        return cluster
    host = ClusterHost(
        cores_per_node=cores.per_node,
        shares_cores=cores.shared,
        copy_Bps=5e9,
        collective_s=2e-4,
        handover_s=cores.handover_s,
        source=cluster.source,
    )
    fabric = cluster.fabric if cluster.fabric == Link.ideal() else Link(latency_s=1e-4, bandwidth_Bps=3e9)
    return cluster.model_copy(update={"host": host, "fabric": fabric})


def _ranges(fitted: Fit) -> dict[str, Range]:
    """Return the ranges of the links' rates, +- twice the root mean square relative error of large messages.

    A rate at its bound has no range, because its distance from the bound is unknown. Nor has one that misses nothing.
    """
    large = max(each.task.nbytes for each in fitted.measured) / 4
    pairs = [each for each in zip(fitted.measured, fitted.residuals, strict=True) if each[0].task.nbytes >= large]
    rates: list[tuple[str, float, Callable[[float], str]]] = [
        ("fabric.bandwidth", fitted.cluster.fabric.bandwidth_Bps, format_Bps),
        ("network.efficiency", fitted.cluster.network.efficiency, lambda share: f"{100 * min(1.0, share):.4g}%"),
    ]
    found = {}
    for path, rate, text in rates:
        link = path.partition(".")[0]
        misses = [miss for each, miss in pairs if (each.task.where == "node") == (link == "fabric")]
        if not misses or f"the time of a byte on the {link}" in fitted.at_bounds:
            continue
        missed = float(np.sqrt(np.mean(np.square(misses))))
        off = min(_MOST_OFF, 2 * missed)
        cut = f", cut at {100 * _MOST_OFF:.0f} %: a line does not fit" if 2 * missed > _MOST_OFF else ""
        ends = {"from": text(rate * (1 - off)), "to": text(rate * (1 + off))}
        if ends["from"] == ends["to"]:  # nothing is missed
            continue
        source = f"real.calibrate: twice the root mean square of what the line misses, {100 * missed:.2g} %{cut}"
        found[path] = Range.model_validate({**ends, "source": source, "measure": _MEASURE})
    return found


def _fit_notes(fitted: Fit) -> list[str]:
    cluster = fitted.cluster
    host = fitted.cluster.host
    notes = [
        f"{name}: {format_seconds(link.latency_s)} + size / ({format_Bps(link.bandwidth_Bps)} x {link.efficiency:.3g})"
        for name, link in (("fabric", cluster.fabric), ("network", cluster.network))
        if link != Link.ideal()
    ]
    if not host.is_charged:
        notes.append(f"overhead of a collective: {format_seconds(cluster.collectives.overhead_s)}")
    else:
        whose = "of all nodes together" if host.shares_cores else "of a node"
        notes.append(
            f"of a core, {host.cores_per_node} of them {whose}: {format_seconds(host.collective_s)} a collective, "
            f"{format_Bps(host.copy_Bps)} over a buffer, {format_seconds(host.handover_s)} an operation"
        )
    notes += [f"at its bound: {name}, which the fit would have lower still" for name in fitted.at_bounds]
    misses = zip(fitted.measured, fitted.residuals, strict=True)
    return [*notes, *(f"{each.task}: {100 * miss:+.1f} %" for each, miss in misses)]


def _hops(measurements: Sequence[Measurement], where: Where, library: Library) -> dict[str, list[Hop]]:
    return {op: hops(measurements, where, op, library) for op in get_args(RingOp)}


def _link(name: str, of_ops: dict[str, list[Hop]], form: LinkForm) -> tuple[Link, list[str]]:
    """Return the link, and notes on it."""
    points = of_ops["all_reduce"]
    if not points:
        return Link.ideal(), []
    if form.links == "line":
        return line(points, form.rate_Bps), []
    others = {op: some for op, some in of_ops.items() if op != "all_reduce"}
    link = link_table(points, others)
    notes = _table_notes(name, points, link.table)
    for key, table in link.tables.items():
        notes += _table_notes(f"{name}, {key}", others[key], table) if table else []
    return link, notes


def _table_notes(name: str, points: list[Hop], table: Sequence[TablePoint] | None) -> list[str]:
    """Name the points with times that differ from the measurement."""
    table = table or ()
    pairs = zip(points, table, strict=True)
    moved = [
        f"{format_nbytes(hop.nbytes)} ({format_seconds(hop.time_s)})" for hop, at in pairs if hop.time_s != at.time_s
    ]
    notes = []
    if moved:
        notes.append(
            f"warning: {name}: times shrink though sizes grow, among hops of {', '.join(moved)}: the table has their "
            f"means"
        )
    if ends_flat(table):
        notes.append(
            f"warning: {name}: the table ends flat, so larger messages would cost nothing more: measure again, with a "
            f"larger --max-size or --budget"
        )
    return notes


def _absent(nodes: int, ranks_per_node: int) -> list[str]:
    """Name the link that could not be measured."""
    one_node = ["the network was not measured, because there was one node: it is ideal"] if nodes == 1 else []
    one_rank = ["the fabric was not measured, because nodes had one rank: it is ideal"] if ranks_per_node == 1 else []
    return one_node + one_rank
