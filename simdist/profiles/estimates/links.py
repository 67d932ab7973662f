"""Links from times of all_reduces, and of a sharded model's gathers and reduce-scatters: the cost model, inverted.

A ring all_reduce of S bytes over n members is 2 (n - 1) hops of S / n bytes. So one hop took t / (2 (n - 1)). A
gather and a reduce-scatter of S bytes are n - 1 such hops, but a reduce-scatter of gloo is an all_reduce. A link with
a table of these times reproduces the measured times. This fails if the library takes another algorithm, or if the
ring has hops of two kinds. The times of the table are then scaled by measured / predicted until they do. A tree sends
messages of other sizes than a ring. If scaling does not converge for that reason, a latency and a bandwidth are
fitted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from simdist.cost import Shared, price
from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.errors import PlanError, TraceError
from simdist.plan import AllGather, AllReduce, Buffer, Plan, ReduceScatter
from simdist.plan.group import Group
from simdist.profiles.estimates.collectives import CollectiveTimes
from simdist.profiles.kineto.columns import Floats
from simdist.profiles.kineto.messages import CollectiveKind
from simdist.profiles.steps.model import RankProfile
from simdist.scenario import Cluster, Link, Tensor, Workload, load_cluster, presets
from simdist.settings.units import format_nbytes

_Which: TypeAlias = Literal["fabric", "network"]

#: The kinds of collectives that tell the links of a job whose gradients are averaged.
AVERAGED: tuple[CollectiveKind, ...] = ("all_reduce",)
#: The same if its model is sharded.
SHARDED: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")

_WHICH: tuple[_Which, ...] = ("fabric", "network")
_WORKLOAD = Workload(tensors=(Tensor(name="none", count=1),), batch_size=1, forward_s=0.0)
_SAME_SIZE = 1.25  # sizes within this factor determine one rate, not a latency and a rate
_BEYOND = 1024  # times the largest size; larger messages are not sent
_FLATTEST = 0.1  # slope at the end over time / size there; below, times hardly grow and larger messages would be free
_ROUNDS = 30  # of scaling
_NEAR = 1e-4  # relative error that is tolerated
_MOST = 300  # evaluations to fit a line
_TOLD = 0.05  # relative error from which a note says so


_NVLINK = {  # names, as CUDA reports them, of GPUs that always have NVLink -> cluster preset, which has the sources
    "V100-SXM2": "v100x8-25gbit",
    "A100-SXM4": "dgx-a100",
    "H100 80GB HBM3": "dgx-h100",  # the SXM5 module; the others are called `H100 PCIe` and `H100 NVL`
}


@dataclass(frozen=True, slots=True)
class Fabric:
    """The links inside nodes, not measured.

    Args:
        link: One of them.
        source: Its source, in words.
    """

    link: Link
    source: str


def fabric_of_gpus(profiles: Sequence[RankProfile]) -> Fabric | None:
    """Return the links that the kind of a job's GPUs implies; None if it implies none."""
    names = {profile.device_name for profile in profiles}
    kinds = {preset for name in names for kind, preset in _NVLINK.items() if kind in name and "MIG" not in name}
    if len(kinds) != 1 or not all(any(kind in name for kind in _NVLINK) for name in names):
        return None
    (preset,) = kinds
    cluster = load_cluster(presets.path("clusters", preset))
    return Fabric(cluster.fabric, f"that of the preset {preset} (NVLink), by the GPUs' name")


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a cluster, and their sources.

    Args:
        fabric: Inside nodes.
        network: Between nodes.
        measured: The links that the traces determine.
        notes: Assumptions.
        fabric_source: Source of the links inside nodes, if they are known but not measured.
        is_complete: Neither of the two links is merely assumed to equal the other.
    """

    fabric: Link
    network: Link
    measured: tuple[_Which, ...]
    notes: tuple[str, ...]
    fabric_source: str = ""
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class _Point:
    """A collective of one kind and size, measured."""

    kind: CollectiveKind
    nbytes: int
    group: Group
    seconds: float
    calls: int
    library: str

    @property
    def hop_nbytes(self) -> int:
        return max(1, round(self.nbytes / self.group.size))

    @property
    def hop_s(self) -> float:
        is_whole = self.kind == "all_reduce" or (self.kind == "reduce_scatter" and self.library == "gloo")
        n_rounds = 2 if is_whole else 1
        return self.seconds / (n_rounds * (self.group.size - 1))


def derive_links(
    times: Sequence[CollectiveTimes],
    cluster: Cluster,
    *,
    kinds: Sequence[CollectiveKind] = AVERAGED,
    given: Fabric | None = None,
    usual: Fabric | None = None,
) -> Links:
    """Return the links that explain the times of collectives.

    Args:
        times: Measured.
        cluster: Its nodes, GPUs and library are used; its links are ignored.
        kinds: The kinds of collectives that tell links.
        given: Links inside nodes to use instead of measured ones; links between nodes are then fitted.
        usual: Links inside nodes to use if none were measured.

    Raises:
        TraceError: No collective determines a link.
    """
    if cluster.world_size == 1:
        return Links(Link.ideal(), Link.ideal(), (), ())
    times = [each for each in times if each.kind in kinds]
    inside = _points(times, cluster, between_nodes=False)
    between = _points(times, cluster, between_nodes=True)
    if not inside and not between:
        raise TraceError(
            f"no {' or '.join(kinds)} of known size and group took any time in these traces, so they do not tell how "
            f"fast the links are: give --cluster FILE|PRESET"
        )
    notes: list[str] = []
    links: dict[_Which, Link] = {}
    has_both = cluster.nodes > 1 and cluster.gpus_per_node > 1
    stated = (given or (usual if not inside else None)) if has_both and between else None
    if stated:
        links["fabric"] = stated.link
        notes.append(f"fabric is not measured but {stated.source}; network is what then explains the collectives")
    measured: list[_Which] = []
    for name, points in zip(_WHICH, ([] if stated else inside, between), strict=True):
        if points:
            links[name], more = _fitted(name, points, cluster, links)
            notes += more
            measured.append(name)
    if len(links) == 1 and has_both:
        missing, known = ("fabric", "network") if "network" in links else ("network", "fabric")
        where = "inside" if missing == "fabric" else "between"
        notes.append(
            f"warning: no collective ran only {where} nodes, so {missing} is taken to be like {known}; hierarchical "
            f"schedules, which depend on it, are left out: give {'--fabric' if missing == 'fabric' else '--cluster'}"
        )
    any_link = next(iter(links.values()))
    fabric = links.get("fabric", any_link) if cluster.gpus_per_node > 1 else Link.ideal()
    network = links.get("network", any_link) if cluster.nodes > 1 else Link.ideal()
    is_complete = len(links) == 2 or not has_both
    return Links(fabric, network, tuple(measured), tuple(notes), stated.source if stated else "", is_complete)


def predicted_s(cluster: Cluster, group: Group, nbytes: int, kind: CollectiveKind = "all_reduce") -> float:
    """Return the time of a collective by the cost model when nothing else uses the links.

    If it runs in several groups at once, as between copies of a sharded model, these share links.

    Args:
        cluster: The machines.
        group: The members.
        nbytes: Of the whole, on all of them together.
        kind: An all_reduce, an all_gather, or a reduce_scatter.
    """
    part = max(1, nbytes // 4 // group.size)
    whole = part * group.size if kind in ("all_gather", "reduce_scatter") else max(1, nbytes // 4)
    buffers = [Buffer("data", whole, initialized=True), Buffer("part", part, initialized=True)]
    op: AllReduce | AllGather | ReduceScatter
    match kind:
        case "all_gather":
            op = AllGather("part", "data", group)
        case "reduce_scatter":
            op = ReduceScatter("data", "part", group)
        case _:
            op = AllReduce("data", group)
            buffers = buffers[:1]
    plan = Plan.from_steps(kind, world_size=cluster.world_size, buffers=buffers, steps=[(op,)])
    costs = price(plan, cluster, _WORKLOAD)
    if group.size < cluster.world_size:
        return run(plan, costs, {}, observe=WholeTrace()).makespan_s
    cost = costs.of[op]
    assert isinstance(cost, Shared)  # as for every collective
    return float(np.max(cost.alone_s))


def as_group(members: Sequence[int], world_size: int) -> Group | None:
    """Return the partition of the ranks in which these members are one group; None if there is none."""
    group = Group(len(members), members[1] - members[0] if len(members) > 1 else 1)
    try:
        return group if list(members) in group.members(world_size) else None
    except PlanError:
        return None


def _points(times: Sequence[CollectiveTimes], cluster: Cluster, *, between_nodes: bool) -> list[_Point]:
    """Return the collectives inside nodes or between them, by size; similar sizes of a kind are one point."""
    blocks: list[list[_Point]] = []
    points = (_point(each, cluster) for each in times if each.between_nodes == between_nodes)
    for point in sorted(filter(None, points), key=lambda point: point.hop_nbytes):
        first = blocks[-1][0] if blocks else None
        is_like = first is not None and (point.kind, point.group) == (first.kind, first.group)
        if first and is_like and point.hop_nbytes < _SAME_SIZE * first.hop_nbytes:
            blocks[-1].append(point)
        else:
            blocks.append([point])
    return [_mean(block) for block in blocks]


def _point(times: CollectiveTimes, cluster: Cluster) -> _Point | None:
    group = as_group(times.group, cluster.world_size)
    if not times.nbytes or times.seconds <= 0 or group is None or group.size < 2:
        return None
    return _Point(times.kind, times.nbytes, group, times.seconds, times.calls, cluster.collectives.library)


def _mean(block: Sequence[_Point]) -> _Point:
    calls = sum(point.calls for point in block)
    nbytes = round(math.fsum(point.nbytes * point.calls for point in block) / calls)
    seconds = math.fsum(point.seconds * point.calls for point in block) / calls
    return replace(block[0], nbytes=nbytes, seconds=seconds, calls=calls)


def _fitted(name: _Which, points: list[_Point], cluster: Cluster, known: dict[_Which, Link]) -> tuple[Link, list[str]]:
    """Return the link with which the cost model reproduces the measured times best."""
    hops_s = _growing(points, [point.hop_s for point in points])
    targets_s = [hop_s * point.seconds / point.hop_s for hop_s, point in zip(hops_s, points, strict=True)]

    def ratios(link: Link) -> list[float]:
        fabric, network = (link if which == name else known.get(which, link) for which in _WHICH)
        whole = cluster.model_copy(update={"fabric": fabric, "network": network})
        return [
            target_s / predicted_s(whole, point.group, point.nbytes, point.kind)
            for target_s, point in zip(targets_s, points, strict=True)
        ]

    tries: list[tuple[float, Link, list[str]]] = []
    for _ in range(_ROUNDS):
        link, notes = _link(name, points, hops_s)
        misses = ratios(link)
        worst = max(abs(miss - 1) for miss in misses)
        tries.append((worst, link, notes))
        if worst < _NEAR:
            break
        hops_s = _growing(points, [hop_s * miss for hop_s, miss in zip(hops_s, misses, strict=True)])
    worst, link, notes = min(tries, key=lambda each: each[0])
    if worst > _TOLD and len(points) > 1:
        line = fitted_line(_started(points, hops_s), ratios)
        off = max(abs(miss - 1) for miss in ratios(line))
        if off < worst:
            worst = off
            link = line
            notes = []
    if worst > _TOLD:
        what = " and ".join(sorted({f"{point.kind}s" for point in points}))
        warning = f"warning: {name}: no link gives all times of {what} back; at the worst {worst:.0%} are missed"
        notes = [*notes, warning]
    pairs = zip(targets_s, ratios(link), points, strict=True)
    all_s = math.fsum(target_s / miss * point.calls for target_s, miss, point in pairs)
    factor = math.fsum(point.seconds * point.calls for point in points) / all_s
    return (_slower(link, factor) if len(points) > 1 and abs(factor - 1) > _NEAR else link), notes


def _slower(link: Link, factor: float) -> Link:
    """Return a link on which everything takes a factor longer: all collectives together as long as measured."""
    if link.table:
        points = [(point.nbytes, float(f"{factor * point.time_s:.6g}")) for point in link.table]
        return Link.model_validate({"table": points})
    latency_s = float(f"{factor * link.latency_s:.4g}")
    return Link(latency_s=latency_s, bandwidth_Bps=max(1.0, float(f"{link.bandwidth_Bps / factor:.6g}")))


def _started(points: Sequence[_Point], hops_s: Sequence[float]) -> Link:
    """Return the line through the smallest and the largest point, if it rises."""
    (small, small_s), (large, large_s) = ((points[i].hop_nbytes, hops_s[i]) for i in (0, -1))
    rate_Bps = (large - small) / (large_s - small_s) if large_s > small_s and large > small else large / large_s
    return Link(latency_s=max(0.0, small_s - small / rate_Bps), bandwidth_Bps=rate_Bps)


def _link(name: _Which, points: Sequence[_Point], hops_s: Sequence[float]) -> tuple[Link, list[str]]:
    """Return a table through the points, or a line if all have one size."""
    by_size = {point.hop_nbytes: float(f"{hop_s:.6g}") for point, hop_s in zip(points, hops_s, strict=True)}
    sizes = list(by_size)
    times = list(by_size.values())
    largest = format_nbytes(points[-1].nbytes)
    if len(sizes) == 1:
        note = (
            f"{name}: {points[0].kind}s of one size only ({largest}): a line without latency; much smaller ones will "
            f"be predicted too fast"
        )
        return Link(latency_s=0.0, bandwidth_Bps=float(max(1, round(sizes[0] / times[0])))), [note]
    notes = []
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
    average = times[-1] / sizes[-1]
    if not _FLATTEST * average <= slope <= average:
        notes.append(
            f"{name}: from one size to the next, times grow as no link's do; {points[-1].kind}s beyond {largest} "
            f"are predicted at the rate of that size"
        )
        slope = average
    sizes.append(sizes[-1] * _BEYOND)
    times.append(float(f"{times[-1] + slope * (sizes[-1] - sizes[-2]):.6g}"))
    return Link.model_validate({"table": [*zip(sizes, times, strict=True)]}), notes


def _growing(points: Sequence[_Point], hops_s: Sequence[float]) -> list[float]:
    """Replace decreasing times of growing sizes by their common mean, until no time decreases.

    Points with equal hop sizes get one time.

    Source:
        Barlow, Bartholomew, Bremner, Brunk, Statistical Inference under Order Restrictions, 1972: pool adjacent
        violators.
    """
    from scipy.optimize import isotonic_regression

    _, places, counts = np.unique([point.hop_nbytes for point in points], return_inverse=True, return_counts=True)
    means_s = np.bincount(places, weights=hops_s) / counts
    growing_s: list[float] = isotonic_regression(means_s, weights=counts).x[places].tolist()
    return growing_s


def fitted_line(start: Link, ratios: Callable[[Link], list[float]]) -> Link:
    """Return the line nearest to the measured times, by the sum of squared logarithms of the ratios.

    Args:
        start: A line to start from.
        ratios: A function from a link to the ratios measured / predicted time.

    Source:
        Nelder, Mead, A Simplex Method for Function Minimization, The Computer Journal 7, 1965.
    """
    from scipy.optimize import minimize  # takes half a second

    def miss(factors: Floats) -> float:
        return math.fsum(math.log(ratio) ** 2 for ratio in ratios(_line(factors)))

    first = np.log([max(start.latency_s, 1e-6), start.bandwidth_Bps])
    found = minimize(miss, first, method="Nelder-Mead", options={"maxfev": _MOST, "xatol": _NEAR, "fatol": _NEAR**2})
    return _line(found.x)


def _line(factors: Floats) -> Link:
    latency_s, bandwidth_Bps = np.exp(np.clip(factors, -30, 40)).tolist()
    return Link(latency_s=float(f"{latency_s:.4g}"), bandwidth_Bps=float(f"{bandwidth_Bps:.6g}"))
