"""What the simulator and three formulas say about published rows."""

import json
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
from rows import Collective, Training

from simdist.cost import Shared, price
from simdist.cost.plain import linear_s, plain_ring_s
from simdist.plan import AllGather, AllReduce, Broadcast, Buffer, Group, Plan, Reduce, ReduceScatter
from simdist.plan.delays import SeedDelays
from simdist.runs.building import Built, delay_sampler, job
from simdist.scenario import Cluster, Scenario, Tensor, Workload, load
from simdist.scenario.fields import find_field, parse_path, with_value
from simdist.settings.units import parse_seconds
from simdist.studies.measuring import ScheduleTimes, measure, measure_delays

N_SEEDS = 4
ITEM_NBYTES = 4
IDLE = Workload(tensors=(Tensor(name="none", count=1),), batch_size=1, forward_s=0.0)
_STEPS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0, "reduce": 1.0}


def built_of(scenario: Scenario) -> Built:
    """Return the plan with prices. It is not proved: with 400 tensors on 128 GPUs that takes seconds."""
    (schedule,) = scenario.schedules
    plan = schedule.plan(job(scenario))
    return Built(schedule, plan, price(plan, scenario.cluster, scenario.workload), n_proved_ranks=0)


def simulated(scenario: Scenario, built: Built) -> ScheduleTimes:
    """Return the times of the steps as stated, of seeds that are the same whichever seeds a study takes."""
    seeds = range(N_SEEDS if scenario.is_random else 1)
    delays = SeedDelays(seeds, partial(delay_sampler, scenario), is_random=scenario.is_random)
    return measure_delays(scenario, built, delays)


def studied(scenario: Scenario, built: Built) -> ScheduleTimes:
    """Return the times of the steps as a study has them, with whose seeds draws are compared."""
    return measure(scenario, built, n_seeds=N_SEEDS if scenario.is_random else 1)


def training_formulas_s(row: Training) -> tuple[float, float]:
    """Return the seconds of a step by linear scaling and by a plain ring, from the machine's rate if it is known."""
    scenario = row.scenario()
    if row.machine_per_s:
        step_s = row.batch_size * scenario.cluster.gpus_per_node / row.machine_per_s
        times = {"forward_s": step_s / 3, "backward_s": step_s * 2 / 3}
        scenario = scenario.changed(workload=scenario.workload.model_copy(update=times), disturbances=())
    return linear_s(scenario.workload, scenario.cluster), plain_ring_s(scenario.workload, scenario.cluster)


@cache
def _cluster(text: str) -> Cluster:
    document = {"cluster": json.loads(text), "workload": IDLE, "schedules": ["sync"], "steps": 1}
    return load(document).cluster


def cluster_of(row: Collective) -> Cluster:
    """Return the machines of a row."""
    return _cluster(json.dumps(row.cluster))


def collective_s(row: Collective, cluster: Cluster) -> float:
    """Return the simulated seconds of a collective."""
    group = Group(cluster.world_size)
    n_items = math.ceil(row.nbytes / ITEM_NBYTES / cluster.world_size) * cluster.world_size
    whole = Buffer("whole", n_items, initialized=True)
    part = Buffer("part", n_items // cluster.world_size, initialized=True)
    ops: dict[str, Callable[[], tuple[Any, tuple[Buffer, ...]]]] = {
        "all_reduce": lambda: (AllReduce("whole", group, algorithm=row.algorithm), (whole,)),
        "all_gather": lambda: (AllGather("part", "whole", group), (part, whole)),
        "reduce_scatter": lambda: (ReduceScatter("whole", "part", group), (whole, part)),
        "broadcast": lambda: (Broadcast("whole", group), (whole,)),
        "reduce": lambda: (Reduce("whole", group), (whole,)),
    }
    op, buffers = ops[row.collective]()
    plan = Plan.from_steps("one", world_size=cluster.world_size, buffers=buffers, steps=[(op,)])
    cost = price(plan, cluster, IDLE).of[op]
    assert isinstance(cost, Shared)
    return float(cost.alone_s)


def ring_s(row: Collective, cluster: Cluster) -> float:
    """Return the seconds of one ring over links by their data sheets: latencies, and bytes over the slowest link."""
    n = cluster.world_size
    steps = _STEPS[row.collective]
    links_Bps = [cluster.fabric.bandwidth_Bps]
    hop_s = cluster.fabric.latency_s
    if cluster.n_domains > 1:
        links_Bps.append(cluster.topology.nics_per_node * cluster.network.bandwidth_Bps)
        hop_s = cluster.network.latency_s
    return steps * (n - 1) * hop_s + steps * (n - 1) / n * row.nbytes / min(links_Bps)


def of_torch_s(row: Collective) -> float | None:
    """Return what PyTorch's `comm_analysis` estimates; None without torch, or if it lacks the GPU or collective."""
    analysis = _comm_analysis()
    types = {"volta": 0, "ampere": 1, "hopper": 2, "blackwell": 3}
    names = {"all_reduce": "ALL_REDUCE", "all_gather": "ALL_GATHER", "reduce_scatter": "REDUCE_SCATTER"}
    if analysis is None or row.collective not in names or row.generation not in types:
        return None
    gpu = analysis.NVIDIA_GPU_TYPE(types[row.generation])
    kind = getattr(analysis.NCCL_COLL, names[row.collective])
    cuda = analysis.torch.cuda
    with (
        mock.patch.object(analysis, "get_gpu_type", return_value=gpu),
        mock.patch.object(analysis, "_has_nvlink", return_value=True),
        mock.patch.object(cuda, "device_count", return_value=row.cluster["gpus_per_node"]),
        mock.patch.object(cuda, "is_available", return_value=True),
    ):
        return float(analysis.estimate_nccl_collective_runtime_impl(row.nbytes, row.n_gpus, kind)) * 1e-3


@cache
def _comm_analysis() -> Any:
    try:
        from torch._inductor import comm_analysis
    except ImportError:
        return None
    return comm_analysis


def by_place(row: Collective, cluster: Cluster) -> dict[str, Callable[[float], float]]:
    """Return by uncertain quantity what multiplies the time at a place in its range, from 0 to 1."""
    stated_s = collective_s(row, cluster)
    found: dict[str, Callable[[float], float]] = {}
    for text, each in cluster.uncertain.items():
        path = parse_path(text)
        field = find_field(cluster, path)
        low, high = (float(str(field.number(end))) for end in (each.from_, each.to))
        ratios = [collective_s(row, with_value(cluster, path, low + at * (high - low))) / stated_s for at in _PLACES]
        found[f"cluster.{text}"] = partial(_between, ratios=ratios)
    return found


def ranged_overhead_s(cluster: Cluster, at: Mapping[str, float]) -> float:
    """Return the host's seconds per call at a place in their range, which no doubt multiplies; 0 without a range."""
    stated = cluster.uncertain.get(_OVERHEAD)
    if stated is None:
        return 0.0
    low_s, high_s = (parse_seconds(str(end)) for end in (stated.from_, stated.to))
    return low_s + at[f"cluster.{_OVERHEAD}"] * (high_s - low_s)


_OVERHEAD = "collectives.overhead"
_PLACES = (0.0, 0.25, 0.5, 0.75, 1.0)


def _between(place: float, ratios: list[float]) -> float:
    return float(np.interp(place, _PLACES, ratios))
