"""How far predictions of a kind are from what was measured: the errors of published rows.

A kind is a step from what the user measured to what the scenario asks: from one batch size to another, from one GPU to
its machine, from a machine to several, the time of collectives inside machines and between them, and samples from
storage. The doubt of a kind is the distribution of

    log(measured seconds / simulated seconds)

over published rows of that kind, by hardware. A draw takes a place from 0 to 1 in it and multiplies prices: those of
forward and backward passes, with the doubt of the batch also of launching them, of collectives by their size, or of
reading. All schedules get the same draws. So an error of computing changes their ratio little, one of the network more.

`published_errors.json` has the distributions. `experiments/published_rows` estimates and tests them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal, TypeAlias

import numpy as np

from simdist.cost.compute import ComputeCost
from simdist.cost.costs import Costs, Local, OpCost, Resources, Shared, Transfer, Varying
from simdist.plan import (
    COLLECTIVES,
    AllGather,
    Backward,
    Buffer,
    Forward,
    KernelLaunch,
    Load,
    Plan,
    ReduceScatter,
    StageIn,
)
from simdist.plan.group import Group
from simdist.plan.ops import Collective, Op
from simdist.runs.building import job, lost_share
from simdist.runs.nccl_tests import CALIBRATED
from simdist.scenario import Cluster, Interference, Link, Scenario, Workload
from simdist.scenario.cluster import Transport
from simdist.scenario.uncertain import Range
from simdist.scenario.warnings import beyond_table
from simdist.schedules.sharded import ShardedSchedule
from simdist.settings.units import format_nbytes

_Kind: TypeAlias = Literal["batch", "machine", "machines", "sharded", "fabric", "network", "storage", "input"]

#: Distributions, as `published_errors.json` has them.
_Table: TypeAlias = Mapping[str, Any]

_TITLES: dict[_Kind, str] = {
    "batch": "from a measured batch size to another",
    "machine": "from one GPU to its machine",
    "machines": "from one machine to several",
    "sharded": "of sharded models, from one machine or several to more",
    "fabric": "collectives inside machines",
    "network": "collectives between machines",
    "storage": "reading that takes longer than computing",
    "input": "from a step without reading to one that reads from storage",
}
_TOOLS = "e.g. with real.calibrate or simdist init --from TABLE"
_MEASURE: dict[_Kind, str] = {
    "batch": "a step of this batch size, and add it to workload.step_times",
    "machine": "samples/s of one machine, and write interference: {machine_samples_per_s: ...}",
    "machines": "samples/s of two machines",
    "sharded": "the utilization on as many GPUs, and write it with utilization_ranks",
    "fabric": f"busbw of an all-reduce inside a machine, {_TOOLS}",
    "network": f"busbw of an all-reduce between machines, {_TOOLS}",
    "storage": "MB/s and files/s of the storage, e.g. with real.calibrate --data",
    "input": "samples/s of one machine with its data, and with data that are in memory",
}
#: The GPU bounds a step from this many times the host's time on, because the host's time varies by as much.
BOUND_BY_GPU = 1.25
_OF_COMPUTING = ("batch", "machine", "machines", "sharded", "input")
_CALIBRATED = "real.calibrate"  # measures both links; one that its line meets has no range
_OVERHEAD = "collectives.overhead"
_MACHINES_OF_RINGS = 4
#: 256 H100: 2 GB gathered at 200 GB/s, all-reduced at 340. 16, 32, 64 machines of 8 H100, "Communication Bandwidth by
#: Number of Nodes (size=256MB)": 24.5 to 126.7, 12.3 to 77.0, 6.2 to 44.4 GB/s gathered, 5 to 95 % quantiles.
_RING_STEPS = "17 us on 256 H100, nccl#1218; 10 to 80 us on 128 to 512 H100, The Ultra-Scale Playbook"
_OF_PCIE_BPS = 64e9  # PCIe 5.0 x16 has 63 GB/s; NVLink 1 has 80
_TRANSPORTS: dict[Transport, str] = {
    "rdma": "RDMA",
    "efa": "EFA",
    "tcp": "TCP",
    "tcpxo": "TCPXO",
    "slingshot": "Slingshot",
}


@dataclass(frozen=True, slots=True)
class Doubt:
    """The doubt of a kind of prediction.

    Args:
        kind: The kind.
        hardware: Class of the rows, such as `volta mixed`; empty: all.
        n_rows: Published rows of that class.
        n_families: Families of these.
        logs: log(measured / simulated) at evenly spaced places from 0 to 1, for each of `sizes`.
        sizes: Bytes of a collective, or microseconds that a step computes which reads from storage.
        known: Share of the time that is stated to be lost, and so already simulated.
    """

    kind: _Kind
    hardware: str
    n_rows: int
    n_families: int
    logs: tuple[tuple[float, ...], ...]
    sizes: tuple[int, ...] = (1,)
    known: float = 0.0

    @property
    def name(self) -> str:
        """Its name among the causes of an interval."""
        return f"doubt.{self.kind}"

    @property
    def in_words(self) -> str:
        """What it is, and the measurement that replaces it."""
        of = f", {self.hardware}" if self.hardware not in ("", self.kind) else ""
        errors = f"errors of {self.n_rows} published rows, {_TITLES[self.kind]}{of}"
        return f"{self.name} ({errors}): measure {_MEASURE[self.kind]}"

    def factor(self, place: float, size: float = 1) -> float:
        """Return what multiplies a time at a place from 0 to 1."""
        return self.factor_at(self.logs_at(place), size)

    def logs_at(self, place: float) -> list[float]:
        """Return log(measured / simulated) at a place from 0 to 1, for each of `sizes`."""
        return [_interpolated(each, place) for each in self.logs]

    def factor_at(self, logs: Sequence[float], size: float) -> float:
        """Return what multiplies a time, given the logarithms at its place."""
        between = float(np.interp(math.log(max(size, 1)), np.log(self.sizes), logs))
        return math.exp(between) / (1 + self.known)


def _interpolated(values: tuple[float, ...], place: float) -> float:
    """Return the value at a place from 0 to 1, given those at evenly spaced places."""
    places = np.linspace(0, 1, len(values))
    before = min(int(np.searchsorted(places, place, side="right")), len(values) - 1) - 1
    near = slice(max(before, 0), before + 2)
    return float(np.interp(place, places[near], values[near]))


def doubts_of(scenario: Scenario, table: _Table | None = None) -> tuple[Doubt, ...]:
    """Return the doubts of the kinds of step that a scenario takes.

    A scenario takes all its numbers as exact if it has neither ranges nor interference.

    Args:
        scenario: The scenario.
        table: Distributions instead of those of `published_errors.json`.
    """
    cluster = scenario.cluster
    hardware = cluster.device.generation
    if hardware is None or not scenario.is_of_machines:
        return ()
    return kinds_of_step(scenario, hardware, of_published_rows() if table is None else table)


def kinds_of_step(scenario: Scenario, hardware: str, table: _Table) -> tuple[Doubt, ...]:
    """Return the doubts of the kinds of step from what is measured to a scenario, on GPUs of a generation."""
    cluster = scenario.cluster
    of_training = (hardware, precision(scenario.workload))
    found: list[Doubt] = []
    if scenario.workload.batch_over_measured != 1:
        found.append(batch_doubt(table, scenario.workload, cluster))
    lost = _lost(scenario)
    n_measured = _measured_ranks(scenario)
    if n_measured < cluster.gpus_per_node and lost is not None and not scenario.imported:
        found.append(replace(_training_doubt(table, "machine", *of_training), known=lost))
    if cluster.n_domains > 1 and n_measured < cluster.world_size and not scenario.imported:
        is_sharded = n_measured >= cluster.gpus_per_node and _is_sharded(scenario)
        kind: _Kind = "sharded" if is_sharded else "machines"
        found.append(_training_doubt(table, kind, *of_training))
    links: tuple[tuple[Literal["fabric", "network"], int], ...] = (
        ("fabric", cluster.world_size // cluster.n_domains),
        ("network", cluster.n_domains),
    )
    for kind, n_members in links:
        if n_members > 1 and (beyond_table(scenario, kind) or not _is_measured(cluster, kind)):
            found.append(collective_doubt(table, kind, link_class(cluster, kind)))
    if scenario.input.source == "storage" and not scenario.imported:
        found += [each for each in storage_doubts(table) if each.kind == "input" or not _is_storage_measured(scenario)]
    return tuple(found)


def _is_sharded(scenario: Scenario) -> bool:
    """Tell whether all schedules share a model, and waits for the slowest of its GPUs are simulated, as of the rows."""
    all_share = all(isinstance(each, ShardedSchedule) for each in scenario.schedules)
    return all_share and bool(_interference(scenario))


def _lost(scenario: Scenario) -> float | None:
    """Return the share that a machine is stated to lose; None if a range of the loss is known."""
    if any(path.endswith(".lost") for path in scenario.uncertain):
        return None
    return math.fsum(lost_share(scenario, each) for each in _interference(scenario))


def _interference(scenario: Scenario) -> list[Interference]:
    return [each for each in scenario.disturbances if isinstance(each, Interference)]


def _measured_ranks(scenario: Scenario) -> int:
    """Return the GPUs that were measured together: at the workload's utilization, or at a rate."""
    per_node = scenario.cluster.gpus_per_node
    of_rates = [each.rate_ranks or per_node for each in _interference(scenario) if each.machine_samples_per_s]
    return max(scenario.workload.measured_ranks, *of_rates, 1)


def _is_measured(cluster: Cluster, kind: Literal["fabric", "network"]) -> bool:
    """Tell whether published rows say nothing of a link: it is measured or ideal, or the library is not NCCL."""
    link = cluster.fabric if kind == "fabric" else cluster.network
    efficiency = cluster.uncertain.get(f"{kind}.efficiency")
    is_told = efficiency is not None and efficiency.source.startswith(CALIBRATED)
    is_calibrated = any(each.source.startswith(_CALIBRATED) for each in cluster.uncertain.values())
    is_measured = is_calibrated or is_told or link.table is not None
    return is_measured or link == Link.ideal() or not cluster.collectives.library.startswith("nccl")


def _is_storage_measured(scenario: Scenario) -> bool:
    """Tell whether the rates of the storage are measured, or known as ranges."""
    storage = scenario.cluster.storage
    paths = (*scenario.uncertain, *(f"cluster.{path}" for path in scenario.cluster.uncertain))
    has_range = any(path.startswith("cluster.storage.") for path in paths)
    return has_range or (storage is not None and _CALIBRATED in storage.source)


def ring_step_range(scenario: Scenario) -> Range | None:
    """Return the range of `network.ring_step` where a schedule gathers over many machines and nobody measured it.

    Collectives of published rows, from which the doubt of the network is, are rings over four machines at most.
    """
    cluster = scenario.cluster
    is_known = cluster.network.ring_step_s is not None or _is_measured(cluster, "network")
    if is_known or not scenario.is_of_machines or cluster.device.generation is None:
        return None
    n_taught = _MACHINES_OF_RINGS * cluster.world_size // cluster.n_domains
    sharded = [each for each in scenario.schedules if isinstance(each, ShardedSchedule)]
    over_many = [each for each in sharded if each.sharers(cluster.world_size) > n_taught]
    if not over_many:
        return None
    most_nbytes = max(each.most_gathered_nbytes(job(scenario)) for each in over_many)
    most_ranks = max(each.sharers(cluster.world_size) for each in over_many)
    measure = f"the time of an all-gather of {format_nbytes(most_nbytes)} over {most_ranks} GPUs, and over half of them"
    return Range.model_validate({"from": "0 us", "to": "80 us", "source": _RING_STEPS, "measure": measure})


def precision(workload: Workload) -> str:
    """Return `single` or `mixed`."""
    return "mixed" if workload.precision in ("fp16", "bf16") else "single"


def link_class(cluster: Cluster, kind: _Kind) -> str:
    """Return the class of the links of a kind as rows have it."""
    if kind == "network":
        return _TRANSPORTS[cluster.likely_transport]
    if cluster.topology.mesh:
        return "xGMI"
    if cluster.fabric.bandwidth_Bps < _OF_PCIE_BPS:
        return "PCIe"
    return "NVLink"


def batch_doubt(table: _Table, workload: Workload, cluster: Cluster) -> Doubt:
    """Return the doubt of the time of a batch that was not measured, by its size over the nearest measured one.

    If launching takes a known time, that of a smaller batch is by what the GPU takes over it. A larger batch has less
    doubt if the GPU bounds all measured sizes. Otherwise they tell little of the GPU.
    """
    at = workload.batch_over_measured
    distance = 1.0
    name = "two sizes" if len(workload.step_times) > 1 else "one size"
    launch_s = workload.launches.passes_s
    if launch_s:
        compute = ComputeCost(workload, cluster)
        passes_s = compute.forward_s + compute.backward_s
        if at < 1:
            name = f"{name} and launches, smaller"
            distance = min(1.0, -math.log2(at))  # the rows are of half the size and less
            at = passes_s / launch_s
        elif _smallest_measured_s(workload, passes_s) >= BOUND_BY_GPU * launch_s:
            name = f"{name} and launches, larger"
    found = table["batch"]["classes"][name]
    places = np.log(found["at"])
    logs = tuple(distance * float(np.interp(math.log(at), places, each)) for each in zip(*found["logs"], strict=True))
    return Doubt("batch", name, found["rows"], found["families"], (logs,))


def _smallest_measured_s(workload: Workload, passes_s: float) -> float:
    """Return what the smallest measured batch takes the GPU at least: its share of the largest one's time."""
    measured = workload.step_times
    if not measured:
        return passes_s / workload.batch_over_measured
    return measured[-1].time_s * measured[0].batch_size / measured[-1].batch_size


def _training_doubt(table: _Table, kind: _Kind, hardware: str, precision: str) -> Doubt:
    """Return the doubt of a kind of training by the closest class that has rows."""
    classes = table["training"][kind]
    return _doubt(kind, classes, (f"{hardware} {precision}".strip(), hardware, ""), (1,))


def collective_doubt(table: _Table, kind: _Kind, link: str) -> Doubt:
    """Return the doubt of collectives over a class of link; if it has no rows, of all inside or between machines."""
    of = table["collectives"]
    return _doubt(kind, of["classes"], (link, kind, ""), tuple(of["sizes"]))


def storage_doubts(table: _Table) -> tuple[Doubt, Doubt]:
    """Return the doubts of loads that take longer than computing, and of passes beside loads that take less.

    Both depend on how long a step computes. Of a step of milliseconds, what the host does besides is a large part.
    """
    kinds: tuple[_Kind, _Kind] = ("storage", "input")
    of = table["storage"]
    reading, computing = (_doubt(kind, of["classes"], (kind,), tuple(of["step_us"])) for kind in kinds)
    return reading, computing


def _doubt(kind: _Kind, classes: Mapping[str, Any], names: Sequence[str], sizes: tuple[int, ...]) -> Doubt:
    name = next(each for each in names if each in classes)
    found = classes[name]
    logs = tuple(tuple(each) for each in found["logs"])
    return Doubt(kind, name, found["rows"], found["families"], logs, sizes)


@cache
def of_published_rows() -> dict[str, Any]:
    """Return the distributions of `published_errors.json`."""
    text = (resources.files("simdist.studies") / "published_errors.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def ranged_overhead_s(scenario: Scenario) -> float:
    """Return the seconds of each collective that have a range of their own, so that no doubt multiplies them.

    How long a host takes for a call depends on how the program calls, not on the links.
    """
    is_ranged = _OVERHEAD in scenario.cluster.uncertain or f"cluster.{_OVERHEAD}" in scenario.uncertain
    return scenario.cluster.collectives.overhead_s if is_ranged else 0.0


def doubted(plan: Plan, costs: Costs, at: Mapping[Doubt, float], *, ranged_s: float = 0.0) -> Costs:
    """Return prices with the errors of a draw.

    Args:
        plan: The plan.
        costs: Its prices.
        at: Place of each doubt in its distribution, from 0 to 1.
        ranged_s: Of a collective's seconds, those that no doubt multiplies; see `ranged_overhead_s`.
    """
    step_us = _computing_us(plan, costs)
    computing = math.prod(each.factor(place, step_us) for each, place in at.items() if each.kind in _OF_COMPUTING)
    launching = math.prod(each.factor(place) for each, place in at.items() if each.kind == "batch")
    reading = math.prod(each.factor(place, step_us) for each, place in at.items() if each.kind == "storage")
    by_kind = {each.kind: (each, each.logs_at(place)) for each, place in at.items()}
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    kinds: dict[Group, _Kind] = {}
    factors: dict[tuple[_Kind, int], float] = {}
    scaled: dict[tuple[int, float], Shared] = {}  # by identity: many operations have one price

    def factor(op: Collective) -> float:
        if op.group not in kinds:
            kinds[op.group] = _link_of(op.group, costs.resources)
        key = kinds[op.group], _nbytes(op, buffers)
        if key not in factors:
            doubt, logs = by_kind.get(key[0], (None, []))
            factors[key] = doubt.factor_at(logs, key[1]) if doubt else 1.0
        return factors[key]

    def price(op: Op, cost: OpCost) -> OpCost:
        if isinstance(cost, Local) and isinstance(op, Forward | Backward):
            return Local(cost.seconds * computing)
        if isinstance(cost, Local) and isinstance(op, KernelLaunch) and op.n_tensors:
            return Local(cost.seconds * launching)
        if isinstance(cost, Shared) and isinstance(op, COLLECTIVES):
            key = id(cost), factor(op)
            if key not in scaled:
                scaled[key] = cost.scaled(_but_for(ranged_s, cost, key[1]))
            return scaled[key]
        if isinstance(op, Load | StageIn) and not isinstance(cost, Local):
            return _read_slower(cost, reading, costs.resources)
        return cost

    return replace(costs, of={op: price(op, cost) for op, cost in costs.of.items()})


def _but_for(ranged_s: float, cost: Shared, factor: float) -> float:
    """Return the factor of a whole collective of which some seconds stay and the rest takes `factor` times as long."""
    if not ranged_s:
        return factor
    share = min(1.0, ranged_s / float(np.max(cost.alone_s)))
    return share + factor * (1 - share)


def _computing_us(plan: Plan, costs: Costs) -> float:
    """Return the microseconds that the first step computes, on the mean rank."""
    passes = (costs.of[op] for op in plan.bodies[0] if isinstance(op, Forward | Backward))
    return 1e6 * math.fsum(float(np.mean(cost.seconds)) for cost in passes if isinstance(cost, Local))


def _read_slower(cost: Shared | Varying, factor: float, resources: Resources) -> Shared | Varying:
    """Return loads with `factor` times the time where they read from storage."""

    def slower(transfer: Transfer) -> Transfer:
        of_storage = any(resources.is_of_storage(stage.resources).any() for stage in transfer.stages)
        return transfer.scaled(factor) if of_storage else transfer

    if factor == 1:
        return cost
    if isinstance(cost, Shared):
        return cost.scaled(factor)
    return replace(cost, transfers=lambda number: tuple(map(slower, cost.transfers(number))))


def _link_of(group: Group, resources: Resources) -> _Kind:
    places = resources.domain(np.array(group.members(resources.world_size)))
    return "network" if (places != places[:, :1]).any() else "fabric"


def _nbytes(op: Collective, buffers: Mapping[str, Buffer]) -> int:
    match op:
        case ReduceScatter() | AllGather():
            return max(buffers[op.src].nbytes, buffers[op.dst].nbytes)
        case _:
            return buffers[op.buffer].nbytes
