"""ResNet-50 on 128 and 64 V100 in the cloud (DAWNBench): what communication costs, and how many bytes it sends.

python experiments/dawnbench_resnet50/run.py           print the tables
python experiments/dawnbench_resnet50/run.py --write   write them into the README
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simdist.cost import Shared
from simdist.cost.plain import plain_ring_s
from simdist.report import markdown_table, page_command
from simdist.runs.building import build
from simdist.scenario import Scenario, load
from simdist.studies.measuring import measure

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
DDP_BUCKETS_NBYTES = 25 * 1024**2
"""PyTorch's default, with which most of the all-reduces overlap with the backward pass."""
TCP_SHARE = 1 + 66 / 8949 + 66 / (2 * 8949)
"""Bytes that a card counts per byte of payload: Ethernet, IP and TCP headers (66 B) on each frame of AWS's MTU of 9001
bytes (8949 B of payload), and one acknowledgement of 66 B for two frames of the other direction."""


@dataclass(frozen=True)
class Resolution:
    """One resolution of the Alibaba Cloud entries: seconds per iteration of 1 and of 16 machines."""

    px: int
    alone_s: float
    together_s: float

    @property
    def extra_s(self) -> float:
        """Seconds that an iteration takes more on 16 machines."""
        return self.together_s - self.alone_s


def resolutions() -> Iterator[Resolution]:
    """Yield what was published, an iteration's share of each epoch."""
    alibaba = PUBLISHED["alibaba"]
    for row in alibaba["rows"]:
        alone_s, together_s = (
            row["epoch_s"][nodes] * row["batch"][nodes] / alibaba["images_per_epoch"] for nodes in ("1", "16")
        )
        yield Resolution(row["px"], alone_s, together_s)


def computing_for(scenario: Scenario, alone_s: float) -> Scenario:
    """Return it with GPUs that compute for `alone_s`, a third of it forward."""
    times = {"forward_s": alone_s / 3, "backward_s": alone_s * 2 / 3}
    return scenario.changed(workload=scenario.workload.model_copy(update=times))


def iteration_s(scenario: Scenario, nodes: int, alone_s: float) -> float:
    """Simulate an iteration on some machines, whose GPUs compute for `alone_s`."""
    computing = computing_for(scenario, alone_s)
    cluster = computing.cluster.model_copy(update={"nodes": nodes})
    optimizer = computing.workload.optimizer if nodes > 1 else "sgd"
    changed = computing.changed(
        cluster=cluster, workload=computing.workload.model_copy(update={"optimizer": optimizer})
    )
    return float(measure(changed, build(changed, changed.schedules[0]), n_seeds=1).step_s[0])


def extra_s(scenario: Scenario, alone_s: float) -> float:
    """Simulate how much longer an iteration takes on all machines than on one."""
    return iteration_s(scenario, scenario.cluster.nodes, alone_s) - iteration_s(scenario, 1, alone_s)


def with_schedule(scenario: Scenario, **update: object) -> Scenario:
    """Reduce gradients in another way."""
    (schedule,) = scenario.schedules
    return scenario.changed(schedules=(schedule.model_copy(update=update),))


def with_network(scenario: Scenario, **update: float) -> Scenario:
    """Give the cluster another network."""
    network = scenario.cluster.network.model_copy(update=update)
    return scenario.changed(cluster=scenario.cluster.model_copy(update={"network": network}))


def extra_table() -> Iterator[str]:
    """Yield what 16 machines cost per iteration, published and simulated, at every resolution."""
    scenario = load(HERE / "alibaba.yaml")
    overlapping = with_schedule(scenario, bucket_nbytes=DDP_BUCKETS_NBYTES)
    yield (
        "| px | 1 machine, ms | 16 machines, ms | published extra | simulated extra | error | if it overlapped "
        "| iteration: simulated | linear | plain ring |"
    )
    for row in resolutions():
        ours_s, overlapped_s = extra_s(scenario, row.alone_s), extra_s(overlapping, row.alone_s)
        computing = computing_for(scenario, row.alone_s)
        iterations_s = (row.alone_s + ours_s, row.alone_s, plain_ring_s(computing.workload, computing.cluster))
        errors = " | ".join(f"{iteration_s / row.together_s - 1:+.1%}" for iteration_s in iterations_s)
        yield (
            f"| {row.px} | {1e3 * row.alone_s:.1f} | {1e3 * row.together_s:.1f} | {1e3 * row.extra_s:.1f} "
            f"| {1e3 * ours_s:.1f} | {ours_s / row.extra_s - 1:+.1%} | {1e3 * overlapped_s:.1f} | {errors} |"
        )


def nic_nbytes(scenario: Scenario) -> float:
    """Return the payload that the network card of a machine receives in one step."""
    costs = build(scenario, scenario.schedules[0]).costs
    nic = int(costs.resources.nic_in(np.zeros(1, dtype=np.int64))[0])
    stages = [
        stage
        for cost in costs.of.values()
        if isinstance(cost, Shared)
        for transfer in cost.transfers
        for stage in transfer.stages
    ]
    return float(sum(stage.nbytes[stage.resources == nic].sum() for stage in stages))


def nic_table() -> Iterator[str]:
    """Yield the bytes that a network card receives per iteration, measured and simulated."""
    payload = nic_nbytes(load(HERE / "fastai.yaml"))
    ours = payload * TCP_SHARE
    yield "| px | batch per GPU | measured, MB | payload, MB | with headers, MB | error | as logged, MB |"
    for row in PUBLISHED["fastai"]["rows"]:
        measured, logged = (row["nic_Gbps"] * 1e9 / 8 * row[key] for key in ("logged_iteration_s", "mean_iteration_s"))
        yield (
            f"| {row['px']} | {row['batch_per_gpu']} | {measured / 1e6:.1f} | {payload / 1e6:.1f} | {ours / 1e6:.1f} "
            f"| {ours / measured - 1:+.1%} | {logged / 1e6:.1f} |"
        )


KNOBS: dict[str, Callable[[Scenario], Scenario]] = {
    "as it is": lambda scenario: scenario,
    "network efficiency 0.6, not 0.7": lambda scenario: with_network(scenario, efficiency=0.6),
    "network efficiency 0.8": lambda scenario: with_network(scenario, efficiency=0.8),
    "latency of a network hop twice": lambda scenario: with_network(
        scenario, latency_s=2 * scenario.cluster.network.latency_s
    ),
    "gradients in single precision": lambda scenario: scenario.changed(
        workload=scenario.workload.model_copy(update={"dtype": "float32"})
    ),
    "double trees of NCCL": lambda scenario: with_schedule(scenario, algorithm="double_tree"),
    "gradients in buckets of 25 MiB, as they get ready": lambda scenario: with_schedule(
        scenario, bucket_nbytes=DDP_BUCKETS_NBYTES
    ),
}


def knobs_table() -> Iterator[str]:
    """Yield how the extra time at 224 px changes with what it depends on."""
    scenario = load(HERE / "alibaba.yaml")
    row = next(each for each in resolutions() if each.px == 224)
    yield "| changed | simulated extra, ms |"
    for name, change in KNOBS.items():
        yield f"| {name} | {1e3 * extra_s(change(scenario), row.alone_s):.1f} |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {
        "extra": markdown_table(extra_table()),
        "nic": markdown_table(nic_table()),
        "knobs": markdown_table(knobs_table()),
    }


def main() -> None:
    """Run the experiment."""
    page_command(__doc__ or "", HERE / "README.md", tables)


if __name__ == "__main__":
    main()
