"""Scenarios of any kind by number: clusters, networks, inputs, schedules; nothing random in most, a little in others.

Ranks are few and steps short, so that the reference engine takes a fraction of a second.
"""

import random
from typing import Any

from simdist.errors import SimdistError
from simdist.runs.building import build
from simdist.scenario.scenario import Scenario

_MOST_RANKS = 64
_ROWS = 32  # of matrices, for PowerSGD
_SCHEDULES = (
    *("hsdp", "hsdp", "hsdp", "fsdp", "fsdp", "sync", "local", "hsgd", "between", "diloco"),
    *("parameter_server", "torus", "hitopk", "naive_ag", "gtopk", "powersgd", "backup_workers"),
)


def random_scenario(number: int) -> Scenario:
    """Return scenario `number`, with one schedule that fits it."""
    for attempt in range(100):
        draw = random.Random(f"{number} {attempt}")
        try:
            scenario = Scenario.model_validate(_settings(draw))
            build(scenario, scenario.schedules[0], proves=False)
        except (SimdistError, ValueError):  # such as a group that does not divide the ranks
            continue
        return scenario
    raise AssertionError(f"nothing that is drawn for scenario {number} is valid")


def _settings(draw: random.Random) -> dict[str, Any]:
    nodes = draw.choice([1, 2, 3, 4, 4, 6, 8, 8, 16])
    gpus = draw.choice([n for n in (1, 2, 3, 4, 8) if n * nodes <= _MOST_RANKS])
    micro_batches = draw.choice([1, 1, 1, 2, 3])
    reads = draw.random() < 0.5
    forward_s = draw.uniform(1e-3, 30e-3)
    settings: dict[str, Any] = {
        "cluster": _cluster(draw, nodes, gpus),
        "workload": {
            "tensors": _tensors(draw),
            "batch_size": draw.choice([1, 4]),
            "micro_batches": micro_batches,
            "forward_s": forward_s,
            "backward_s": draw.choice([2 * forward_s, draw.uniform(1e-3, 60e-3)]),
            "optimize_s": draw.choice([0.0, draw.uniform(1e-5, 1e-3)]),
            "sample_nbytes": draw.choice([100_000, draw.randrange(1000, 2_000_000)]),
        },
        "input": {
            "source": "storage" if reads else draw.choice(["device", "memory"]),
            "prefetch": draw.choice([1, 2, 3]),
        },
        "host": {"run_ahead_steps": draw.choice([0, 0, 1, None])},
        "disturbances": _disturbances(draw, nodes * gpus),
        "schedules": [_schedule(draw, gpus, nodes * gpus)],
        "steps": draw.randrange(2, 13),
        "seed": draw.randrange(1000),
    }
    if settings["schedules"][0]["kind"] == "powersgd":
        for tensor in settings["workload"]["tensors"]:
            tensor |= {"count": tensor["count"] // _ROWS * _ROWS, "rows": _ROWS}
    if draw.random() < 0.15:
        ranks = draw.choice(["first", "all"])
        mode = draw.choice(["blocking", "async"])
        settings["checkpoint"] = {"every": draw.choice([1, 2, 3]), "what": "parameters", "ranks": ranks, "mode": mode}
    if draw.random() < 0.25:
        kinds = ("forward_s", "backward_s", "optimize_s")
        settings["workload"]["launches"] = {kind: draw.choice([0.0, draw.uniform(1e-3, 40e-3)]) for kind in kinds}
        small = {kind: draw.uniform(1e-6, 1e-3) for kind in ("collective_s", "copy_s", "select_s", "event_s")}
        settings["cluster"]["host"] = {"launches": small}
    return settings


def _cluster(draw: random.Random, nodes: int, gpus: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "nodes": nodes,
        "gpus_per_node": gpus,
        "fabric": _link(draw, 50e9, 300e9),
        "network": _link(draw, 1e9, 25e9),
        "topology": {"nics_per_node": draw.choice([1, 1, 2, gpus]), "oversubscription": draw.choice([1, 1, 1.5, 2, 3])},
        "device": {
            "memory_bandwidth_Bps": draw.choice([1e12, 3.35e12]),
            "host_bandwidth_Bps": draw.choice([1e10, 2e10]),
        },
        "storage": {
            "latency_s": draw.choice([0.0, draw.uniform(1e-6, 1e-3)]),
            "bandwidth_Bps": draw.uniform(1e8, 5e9),
            "servers": draw.choice([1, 1, 2, 3]),
        },
    }
    if draw.random() < 0.3:
        settings["topology"]["rails"] = True
    if draw.random() < 0.2:
        settings["storage"]["client_bandwidth_Bps"] = draw.uniform(1e8, 1e9)
    if draw.random() < 0.15:
        settings["topology"]["leaf"] = {"nodes": draw.choice([1, 2]), "bandwidth_Bps": draw.uniform(1e9, 2e10)}
        del settings["topology"]["oversubscription"]  # of one switch
    if draw.random() < 0.15:
        settings["topology"]["nodes_per_domain"] = 2
    if draw.random() < 0.1:
        settings["topology"]["host_bridge_Bps"] = draw.uniform(1e10, 3e10)
    if draw.random() < 0.15:
        settings["collectives"] = {"library": "gloo"}
    if draw.random() < 0.4:
        slow = sorted(draw.sample(range(nodes * gpus), draw.choice([1, 1, 2]) if nodes * gpus > 1 else 1))
        settings["slow_devices"] = [{"ranks": slow, "speed": draw.choice([0.5, 0.7, 1.3])}]
    return settings


def _link(draw: random.Random, least_Bps: float, most_Bps: float) -> dict[str, float]:
    return {
        "latency_s": draw.choice([0.0, 0.0, draw.uniform(1e-6, 3e-5)]),
        "bandwidth_Bps": draw.uniform(least_Bps, most_Bps),
    }


def _tensors(draw: random.Random) -> list[dict[str, Any]]:
    """Return tensors of blocks that are equal, or all differ."""
    equal = draw.choice([None, draw.randrange(10_000, 3_000_000)])
    return [
        {"name": f"h.{number}.w", "count": equal or draw.randrange(1000, 3_000_000)}
        for number in range(draw.choice([1, 2, 3, 5]))
    ]


def _disturbances(draw: random.Random, world_size: int) -> list[dict[str, Any]]:
    """Return nothing, or a few delays of few ranks."""
    kind = draw.choice(["none", "none", "none", "persistent", "transient", "pauses"])
    on = draw.choice(["host", "compute"])
    ranks = [draw.randrange(world_size)]
    delay_s = draw.uniform(1e-4, 2e-2)
    match kind:
        case "persistent":
            return [{"kind": kind, "on": on, "ranks": ranks, "delay_s": delay_s}]
        case "transient":
            return [{"kind": kind, "on": on, "probability": 0.03, "delay_s": delay_s}]
        case "pauses":
            return [{"kind": kind, "on": on, "ranks": ranks, "every": [2, 4], "delay_s": delay_s}]
    return []


def _schedule(draw: random.Random, gpus: int, world_size: int) -> dict[str, Any]:
    divisors = [n for n in range(2, world_size + 1) if world_size % n == 0] or [1]
    bucket = draw.choice([{}, {"first_bucket_nbytes": 0, "bucket_nbytes": 0}, {"bucket_nbytes": 4_000_000}])
    sharded = {
        "reshard_after_forward": draw.choice([None, True, False, draw.choice(divisors)]),
        "wrap": draw.choice(["all", "blocks"]),
        "forward_prefetch": draw.choice([1, 1, 2, 3]),
        "backward_prefetch": draw.choice([1, 1, 2, 3]),
        "reduce_buffers": draw.choice([1, 2]),
        "communicators": draw.choice([1, 2]),
        "accumulation": draw.choice(["reduce", "local"]),
        "reshard_after_backward": draw.choice([True, True, False]),
        "blocking": draw.random() < 0.1,
    }
    averages = {"synchronize": draw.choice([True, False]), "overlap_steps": draw.choice([0, 0, 1])}
    local = {"kind": "local_sgd", "period": draw.choice([2, 3]), **averages}
    diloco = {"kind": "diloco", "period": draw.choice([2, 3]), **averages}
    match draw.choice(_SCHEDULES):
        case "sync":
            return {"kind": "sync", **bucket}
        case "local":
            return local
        case "hsgd":
            levels = {draw.choice([1, 2]): draw.choice(divisors), 4: "world"}
            return {
                "kind": "hierarchical_sgd",
                "levels": levels,
                "intra_node_gradients": draw.random() < 0.5,
                **averages,
            }
        case "fsdp":
            return {"kind": "fsdp", **sharded}
        case "hsdp":
            return {
                "kind": "hsdp",
                "shard": draw.choice(divisors),
                "all_reduce": draw.choice(["each", "last"]),
                **sharded,
            }
        case "between":
            return {"kind": "hsdp", "shard": draw.choice(divisors), "between": draw.choice([local, diloco])}
        case "diloco":
            return {**diloco, "ranks_per_worker": draw.choice([1, gpus])}
        case "parameter_server":
            return {"kind": "parameter_server", "servers": draw.choice([1, 2, gpus]), **bucket}
        case "backup_workers":
            return {"kind": "backup_workers", "backup": draw.choice([0, 1])}
        case kind:
            return {"kind": kind, **bucket}
