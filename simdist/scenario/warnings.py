"""Remarks on legal scenarios: doubtful units, recordings of other ranks, settings without effect, unstated numbers.

A unit is doubtful if the rest of the scenario implies another one: a bit for a byte, a second for a millisecond.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Literal

from simdist.scenario.cluster import Cluster, Transport
from simdist.scenario.disturbances import Recorded
from simdist.scenario.link import ends_flat
from simdist.scenario.scenario import Scenario
from simdist.scenario.workload import Workload
from simdist.schedules import Schedule
from simdist.settings.units import format_Bps, format_nbytes, format_seconds

#: What `cluster.source` begins with in a file of `real.calibrate`.
CALIBRATION = "measured by real.calibrate"
_ROUNDED = 1.01  # measured sizes are multiples of the slices of all ranks

_FACTOR = 4.0  # more is no matter of how well a model or a link is used
_BPS_PER_GBIT = 0.125e9

# Gbit/s of a network card: Ethernet, InfiniBand, and the instance types of AWS and Google Cloud
_CARDS_GBIT = (1, 2.5, 5, 10, 12.5, 15, 16, 20, 25, 30, 32, 37.5, 40, 50, 56, 75, 100, 200, 400, 800)
_MOST_GBIT: dict[Transport, float] = {
    "tcp": 100,  # gVNIC (Google Cloud, A2), ENA (AWS, P4d)
    "tcpxo": 200,  # Google Cloud, A3 Mega
    "efa": 400,  # AWS EC2 P6
    "slingshot": 400,  # HPE Slingshot 400
    "rdma": 800,  # ConnectX-8
}
_CARD_OVER_PCIE = 2.0  # a card may be of the next generation of PCIe, as in the preset hgx-b300
_NVLINK_BPS = 900e9  # of NVLink 5 per direction, NVIDIA DGX B200 datasheet
_PCIE_BPS = 7.9e9  # PCIe 3.0 x8: 8 x 8 GT/s x 128/130 / 8

_SLOWEST_FLOPS = 2.8e12  # a GK210 of the K80 at base clock, fp32, NVIDIA K80 board specification
_FASTEST_FLOPS = 2.25e15  # B200, dense fp16, NVIDIA Blackwell datasheet
_LEAST_SHARE = 0.05  # of the peak that a pass reaches, without a stated utilization
_MOST_SHARE = 1.0
_OVERHEAD_S = 0.25  # that Python and launches may take in a pass of few FLOPs
#: By transport and up to a line rate in Gbit/s: the share of it that payload reached, from and to, and a source.
_CARRIED: dict[Transport, tuple[tuple[float, float, float, str], ...]] = {
    "tcp": (
        (10, 0.72, 0.94, "iperf3 with Linux's defaults; 1,448 of 1,538 bytes of a frame are data"),
        (32, 0.45, 0.70, "nccl#209"),
        (math.inf, 0.32, 0.48, "nccl#398, nccl#450"),
    ),
    "rdma": ((math.inf, 0.48, 0.98, "nccl#465 without GPUDirect, nccl-tests#290 with it"),),
    "efa": ((math.inf, 0.64, 0.96, "nccl-tests#22, dstack#3961"),),
    "slingshot": ((math.inf, 0.68, 0.96, "rccl#1490"),),
}
_UNSTATED_FACTORS = (
    "cluster.device.orthonormalize is not stated, so powersgd makes factors orthonormal in no more time than their "
    "memory traffic takes, which is too little on a GPU: measure it, with python -m real.calibrate"
)


def warnings_of(scenario: Scenario) -> tuple[str, ...]:
    """Return the doubts of a scenario, values of doubtful units, and settings without effect, a sentence each."""
    doubts = (*scenario.doubts, *doubtful_units(scenario), *_beyond_tables(scenario), *_recordings(scenario))
    return (*doubts, *scenario.unused())


def beyond_table(scenario: Scenario, kind: Literal["fabric", "network"]) -> str:
    """Say why a table that `real.calibrate` measured does not tell the time of all parameters; empty if it does.

    Larger collectives are extrapolated, by up to a fifth too short for twice the largest one (experiments/nccl_tables).
    """
    cluster = scenario.cluster
    link = cluster.fabric if kind == "fabric" else cluster.network
    n_members = cluster.gpus_per_node if kind == "fabric" else cluster.nodes
    if link.table is None or not cluster.source.startswith(CALIBRATION):
        return ""
    measured_nbytes = n_members * link.table[-1].nbytes
    all_nbytes = scenario.workload.nbytes
    if all_nbytes <= _ROUNDED * measured_nbytes:
        return ""
    measured = f"{'ends flat' if ends_flat(link.table) else 'was measured'} up to {format_nbytes(measured_nbytes)}"
    return (
        f"cluster.{kind}.table {measured}, and the model has {format_nbytes(all_nbytes)}: times of larger collectives "
        f"are doubtful; run real.calibrate with a larger --max-size"
    )


def _beyond_tables(scenario: Scenario) -> Iterator[str]:
    yield from filter(None, (beyond_table(scenario, kind) for kind in ("fabric", "network")))


def _recordings(scenario: Scenario) -> Iterator[str]:
    """Yield a sentence for each recording of another number of ranks, or with a row for each micro-batch."""
    for i, disturbance in enumerate(scenario.delays):
        sentences = [disturbance.ranks_remark(scenario.cluster.world_size)] if disturbance else []
        if isinstance(disturbance, Recorded):
            sentences.append(disturbance.rows_remark(scenario.steps, scenario.workload.micro_batches))
        yield from (f"disturbances[{i}]: {sentence}" for sentence in sentences if sentence)


def unstated(cluster: Cluster, schedules: Iterable[Schedule]) -> list[str]:
    """List the speeds that default to unlimited, of links between nodes and of Gram-Schmidt, and GPUs without rows."""
    network = cluster.network
    is_stated = "efficiency" in network.model_fields_set or math.isinf(network.bandwidth_Bps)
    found = []
    if not is_stated and cluster.n_domains > 1:
        measured = _carried(cluster)
        reached = f"; {measured[2]} was reached" if measured else ""
        found.append(
            f"cluster.network.efficiency is not stated, and so 1{reached}: write it, or a range in cluster.uncertain"
        )
    if cluster.device.orthonormalize_s is None and any(each.orthonormalizes for each in schedules):
        found.append(_UNSTATED_FACTORS)
    if cluster.has_unknown_gpus and cluster.uncertain:
        found.append(
            f"cluster.device.name {cluster.device.name}: nothing published is about such GPUs, so there are no "
            f"intervals: write cluster.device.compute_capability if they are NVIDIA's"
        )
    return found


def _carried(cluster: Cluster) -> tuple[float, float, str] | None:
    """Return the share of the line rate that payload reaches over such a network, from and to, and both in words."""
    transport = cluster.likely_transport
    rate = cluster.network.bandwidth_Bps / _BPS_PER_GBIT
    for most, low, high, source in _CARRIED.get(transport, ()):
        if rate <= most:
            return low, high, f"{low:.0%} to {high:.0%} of {rate:g} Gbit/s over {transport} ({source})"
    return None


def _other_line_rate(cluster: Cluster) -> Iterator[str]:
    """Yield a sentence if an efficiency that is not measured, such as a preset's, is that of another line rate."""
    efficiency = cluster.network.efficiency
    measured = _carried(cluster)
    is_range = "network.efficiency" in cluster.uncertain and cluster.n_domains > 1
    if is_range and measured and not measured[0] <= efficiency <= measured[1]:
        stated = f"cluster.network.efficiency of {efficiency:.0%} is that of another line rate"
        yield f"{stated}; {measured[2]} was reached: write it, and a range in cluster.uncertain"


def doubtful_units(scenario: Scenario) -> Iterator[str]:
    """Yield a sentence for each value whose unit is probably wrong."""
    yield from _network(scenario.cluster)
    yield from _other_line_rate(scenario.cluster)
    yield from _fabric(scenario.cluster)
    yield from _passes(scenario.workload, scenario.cluster)


def _network(cluster: Cluster) -> Iterator[str]:
    link = cluster.network
    if math.isinf(link.bandwidth_Bps) or link.table is not None or cluster.n_domains == 1:
        return
    rate = link.bandwidth_Bps / _BPS_PER_GBIT
    stated = f"cluster.network.bandwidth of {format_Bps(link.bandwidth_Bps)} is {rate:g} Gbit/s per network card"
    transport = cluster.likely_transport
    most = _MOST_GBIT[transport]
    host_Bps = cluster.device.host_bandwidth_Bps
    is_card = _is_card(rate)
    if rate > most:
        hint = f"write {rate / 8:g} Gbit/s" if _is_card(rate / 8) else "check bits and bytes"
        limit = f"cards of {transport} have {most:g} at most: {hint}, or state cluster.collectives.transport"
        yield f"{stated}, and {limit}"
    elif link.bandwidth_Bps > _CARD_OVER_PCIE * host_Bps:
        pcie = f"the {format_Bps(host_Bps)} of cluster.device.host_bandwidth, its PCIe"
        yield f"{stated}, more than twice {pcie}: {_bits(rate)}"
    elif not is_card and rate > 8 and _is_card(rate / 8):
        yield f"{stated}, and no card has that rate: {_bits(rate)}"
    elif not is_card and rate > 1 and _is_card(rate * 8):
        yield f"{stated}, and no card has that rate: is {rate:g} GB/s meant?"


def _is_card(rate: float) -> bool:
    return any(math.isclose(rate, each, rel_tol=1e-6) for each in _CARDS_GBIT)


def _bits(rate: float) -> str:
    return f"is {rate / 8:g} Gbit/s meant?"


def _fabric(cluster: Cluster) -> Iterator[str]:
    link = cluster.fabric
    if math.isinf(link.bandwidth_Bps) or link.table is not None or cluster.gpus_per_node == 1:
        return
    has = f"cluster.fabric.bandwidth is {format_Bps(link.bandwidth_Bps)}"
    host_Bps = cluster.device.host_bandwidth_Bps
    memory_Bps = cluster.device.memory_bandwidth_Bps
    slowest_Bps = _PCIE_BPS if math.isinf(host_Bps) else host_Bps
    if link.bandwidth_Bps > min(_FACTOR * _NVLINK_BPS, memory_Bps):
        yield f"{has}, faster than NVLink or the memory of the device: check bits and bytes"
    elif cluster.collectives.library != "gloo" and link.bandwidth_Bps < slowest_Bps / _FACTOR:
        yield f"{has}, slower than a quarter of PCIe, {format_Bps(slowest_Bps)}: check bits and bytes"


def _passes(workload: Workload, cluster: Cluster) -> Iterator[str]:
    """Compare stated seconds with those that FLOPs take on the device, or on any GPU if its peak is not stated."""
    if workload.flops < sum(workload.tensor_counts):  # unknown, or weights of tensors: a parameter takes 2 or more
        return
    batch_size = workload.measured_batch_size or workload.batch_size
    stated = [
        ("forward", workload.stated_forward_s, batch_size, 1.0),
        ("backward", workload.backward_s, batch_size, 2.0),
        *((f"step_times[{i}]", each.time_s, each.batch_size, 3.0) for i, each in enumerate(workload.step_times)),
    ]
    for key, seconds, samples, forwards in stated:
        if seconds is None:
            continue
        shortest_s, longest_s = _range_s(workload, cluster, forwards * samples * workload.flops)
        if seconds < shortest_s / _FACTOR or seconds > longest_s * _FACTOR:
            usual = f"{format_seconds(shortest_s)} to {format_seconds(longest_s)}"
            stated_s = format_seconds(seconds)
            yield f"workload.{key} of {stated_s} does not fit its FLOPs, which take {usual}: check the unit"


def _range_s(workload: Workload, cluster: Cluster, flops: float) -> tuple[float, float]:
    """Return the shortest and the longest usual time of some FLOPs, in seconds."""
    peak_flops = cluster.device.peak_flops.at(workload.precision)
    share = workload.utilization.at(workload.precision)
    slowest_flops = peak_flops or (0.0 if cluster.collectives.library == "gloo" else _SLOWEST_FLOPS)
    shortest_s = flops / ((peak_flops or _FASTEST_FLOPS) * max(share or _MOST_SHARE, _MOST_SHARE))
    if not slowest_flops:  # CPUs, of any speed
        return shortest_s, math.inf
    return shortest_s, _OVERHEAD_S + flops / (slowest_flops * (share or _LEAST_SHARE))
