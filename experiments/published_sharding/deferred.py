"""All-reduces between copies of a sharded model, in each micro-batch or once: published seconds of a step.

Source:
    NVIDIA/cosmos-framework, pull request 162 and issue 161: 2 x 8 A100 80 GB, Ethernet between machines, HSDP with two
    copies of the model, 64 samples a GPU and micro-batch. The model is not stated.
"""

from collections.abc import Iterator
from functools import cache

from simdist.runs.building import build
from simdist.scenario import Scenario, load
from simdist.studies.measuring import measure

COMPUTE_S = 10.8
"""A micro-batch without its all-reduce: the split that the pull request states. It is an input here."""
ONE_S = 22.2
"""Measured step of one micro-batch, for which the bandwidth of the network is solved."""
BLOCKS = 32
PARAMETERS = 200_000_000
"""Of a block. Only the ratio to the bandwidth counts, which is solved for."""
BACKWARD = 2 / 3
"""Share of the backward pass in the computation."""
PUBLISHED = {  # micro-batches and what copies all-reduce -> seconds; each: four times that of one, as the source has it
    (1, "each"): (22.2,),
    (4, "last"): (54.3, 54.3, 54.9),
    (4, "each"): (88.8,),
}
TOLERANCE = 1e-6


def scenario(bandwidth_Bps: float, micro_batches: int, all_reduce: str) -> Scenario:
    """Return the job."""
    tensors = [{"name": f"blocks.{number}.w", "count": PARAMETERS, "rows": 8000} for number in range(BLOCKS)]
    return load(
        {
            "name": "cosmos",
            "cluster": {"preset": "dgx-a100", "nodes": 2, "network": {"bandwidth": f"{bandwidth_Bps:.3f} B/s"}},
            "workload": {
                "tensors": tensors,
                "batch_size": 64,
                "micro_batches": micro_batches,
                "forward": f"{COMPUTE_S * (1 - BACKWARD)} s",
                "backward": f"{COMPUTE_S * BACKWARD} s",
                "optimizer": "adamw",
            },
            "host": {"run_ahead_steps": None},
            "schedules": [{"kind": "hsdp", "shard": 8, "param_dtype": "bfloat16", "all_reduce": all_reduce}],
            "steps": 2,
        }
    )


def step_s(bandwidth_Bps: float, micro_batches: int, all_reduce: str) -> float:
    """Simulate a step."""
    job = scenario(bandwidth_Bps, micro_batches, all_reduce)
    return float(measure(job, build(job, job.schedules[0]), n_seeds=1).step_s[0])


@cache
def solved_bandwidth_Bps() -> float:
    """Return the bandwidth of a card with which a step of one micro-batch takes as long as measured."""
    low = 1e6
    high = 1e12
    while high / low > 1 + TOLERANCE:
        middle = (low * high) ** 0.5
        if step_s(middle, 1, "each") > ONE_S:
            low = middle
        else:
            high = middle
    return high


def deferred_table() -> Iterator[str]:
    """Yield the seconds of a step: measured, simulated, and computation + exposed all-reduces."""
    yield "| micro-batches | all-reduce | measured, s | simulated, s | error | sum, s |"
    for (micro_batches, all_reduce), measured in PUBLISHED.items():
        simulated = step_s(solved_bandwidth_Bps(), micro_batches, all_reduce)
        n_exposed = micro_batches if all_reduce == "each" else 1
        summed = micro_batches * COMPUTE_S + n_exposed * (ONE_S - COMPUTE_S)
        mean = sum(measured) / len(measured)
        error = "calibrated" if micro_batches == 1 else f"{simulated / mean - 1:+.1%}"
        when = {"each": "in each", "last": "in the last"}[all_reduce]
        told = ", ".join(f"{each:.1f}" for each in measured)
        if (micro_batches, all_reduce) == (4, "each"):
            told += ", not measured"
        yield f"| {micro_batches} | {when} | {told} | {simulated:.1f} | {error} | {summed:.1f} |"
