"""The scenarios that test users' classes: small clusters, and a model of four tensors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.errors import SimdistError, UnsupportedError
from simdist.plan import Channel
from simdist.runs.building import Built, delays
from simdist.scenario import Link, Scenario

N_STEPS = 25
_ENGINES_AGREE = 1e-9  # of the makespan
CLUSTERS = ((2, 4), (1, 8), (8, 1), (2, 3))  # nodes, and GPUs of each; the first is that of `examples`
_ALL_CHANNELS: tuple[Channel, ...] = ("host", "compute")


def scenario_of(nodes: int = 2, gpus_per_node: int = 4, changes: Mapping[str, object] | None = None) -> Scenario:
    """Return a scenario of one schedule, `sync`, with stragglers.

    Args:
        nodes: Machines.
        gpus_per_node: Ranks of each machine.
        changes: Keys of the scenario to set, with values.
    """
    cluster = {
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "fabric": Link(latency_s=5e-6, bandwidth_Bps=12e9),
        "network": Link(latency_s=30e-6, bandwidth_Bps=2e9),
        "storage": {"latency_s": 0.001, "bandwidth_Bps": 1e9},
        "device": {"memory_bandwidth_Bps": 1e12, "host_bandwidth_Bps": 1e10},
    }
    tensors = [
        {"name": "embedding", "count": 300_000, "rows": 500},
        {"name": "weight", "count": 300_000, "rows": 100},
        {"name": "bias", "count": 8},
        {"name": "head", "count": 500, "rows": 20},
    ]
    workload = {"tensors": tensors, "batch_size": 2, "sample_nbytes": 1000, "forward_s": 0.004, "backward_s": 0.008}
    disturbances = [
        {"kind": "transient", "on": channel, "probability": 0.2, "delay_s": 0.02} for channel in _ALL_CHANNELS
    ]
    settings: dict[str, object] = {
        "name": "rules",
        "cluster": cluster,
        "workload": workload,
        "disturbances": disturbances,
        "schedules": [{"kind": "sync"}],
        "steps": N_STEPS,
    }
    return Scenario.model_validate(settings | dict(changes or {}))


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Convert errors of simdist and of rules to an `AssertionError` that begins with `what`."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None
    except (SimdistError, ValueError) as error:
        raise AssertionError(f"{what}: {error}") from error


def engines_agree(scenario: Scenario, built: Built) -> None:
    """Check that both engines simulate the same times. Plans that `fast` does not support run only in `des`.

    Raises:
        AssertionError: The engines differ, or the run takes no time.
    """
    drawn = delays(scenario)
    reference = run(built.plan, built.costs, drawn, observe=WholeTrace(), engine="des")
    assert reference.makespan_s > 0, "the run takes no time"
    try:
        at_once = run(built.plan, built.costs, drawn, observe=WholeTrace(), engine="fast")
    except UnsupportedError:
        return
    difference_s = float(np.nanmax(np.abs(reference.difference_s(at_once))))
    assert difference_s <= _ENGINES_AGREE * reference.makespan_s, f"engines differ by {difference_s:g} s"
