"""Horovod on 16 and 128 GPUs with 25 Gbit/s: published images per second beside simulated ones.

    python experiments/horovod_scaling/run.py           print the tables
    python experiments/horovod_scaling/run.py --write   write them into the README
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from simdist.build import Built, job
from simdist.compare import measure
from simdist.cost import price
from simdist.report import insert_tables
from simdist.scenario import Scenario, Workload, load, load_cluster, load_workload, presets
from simdist.schedules.sync import Sync

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
PRESETS = {"InceptionV3": "inception-v3", "ResNet-101": "resnet101", "VGG-16": "vgg16"}
NCCL = {"TCP Horovod NCCL": "tcp", "RDMA Horovod NCCL": "rdma"}
"""Published row -> whose network carried it."""


@dataclass(frozen=True)
class Row:
    """Images per second of all GPUs, published and simulated."""

    published: float
    simulated: float

    @property
    def error(self) -> float:
        """How much more is simulated than was published, as a share of it."""
        return self.simulated / self.published - 1


def workload(model: str, batch_size: int) -> Workload:
    """Return a model whose GPU computes at the published rate of one GPU: an input, not a result.

    The benchmark trains Inception V3 without its auxiliary classifier (tensorflow/benchmarks, inception_model.py).
    """
    whole = load_workload(presets.path("workloads", PRESETS[model]))
    tensors = tuple(tensor for tensor in whole.tensors if not tensor.name.startswith("auxiliary."))
    step_s = batch_size / PUBLISHED["one_gpu"][model]
    times = {"forward_s": step_s / 3, "backward_s": step_s * 2 / 3, "optimize_s": 0.0}
    return whole.model_copy(update={"tensors": tensors, "batch_size": batch_size, **times})


def horovod(model: str, network: str, *, servers: int = 4) -> Scenario:
    """Return Horovod training `model` on some servers, over `tcp` or `rdma`."""
    scenario = load(HERE / "horovod.yaml")
    cluster = load_cluster(HERE / f"cluster-{network}.yaml").model_copy(update={"nodes": servers})
    return scenario.changed(cluster=cluster, workload=workload(model, scenario.workload.batch_size))


def images_per_s(scenario: Scenario) -> float:
    """Simulate the images per second of all GPUs.

    Plans are not proved here, as `simdist.build.build` would do: with 314 tensors on 128 GPUs that takes half a minute.
    """
    (schedule,) = scenario.schedules
    plan = schedule.plan(job(scenario))
    costs = price(plan, scenario.cluster, scenario.workload)
    measured = measure(scenario, Built(schedule, plan, costs, n_proved_ranks=0), n_seeds=1)
    return scenario.cluster.world_size * scenario.workload.batch_size / float(measured.step_s[0])


def nccl_rows() -> dict[tuple[str, str], Row]:
    """Return the rows of Horovod with NCCL: published system and model -> images per second."""
    return {
        (system, model): Row(PUBLISHED["gpus_16"][system][model], images_per_s(horovod(model, network)))
        for system, network in NCCL.items()
        for model in PRESETS
    }


def large_rows() -> dict[str, Row]:
    """Return the rows of 128 GPUs with RDMA: model -> share of 128 times one GPU."""
    rows = {}
    for model, efficiency in PUBLISHED["gpus_128_rdma_efficiency"].items():
        ideal = 128 * PUBLISHED["one_gpu"][model]
        rows[model] = Row(efficiency, images_per_s(horovod(model, "rdma", servers=32)) / ideal)
    return rows


def nccl_table(rows: dict[tuple[str, str], Row]) -> Iterator[str]:
    """Yield images per second, and what they say of a step: how long communication kept the GPUs waiting."""
    yield "| published row | model | published, images/s | simulated | error | exposed, ms: published | simulated |"
    yield "|---|---|---|---|---|---|---|"
    for (system, model), row in rows.items():
        alone_s = 64 / PUBLISHED["one_gpu"][model]
        exposed = (1e3 * (16 * 64 / rate - alone_s) for rate in (row.published, row.simulated))
        yield (
            f"| {system} | {model} | {row.published:.1f} | {row.simulated:.1f} | {row.error:+.1%} "
            f"| {' | '.join(f'{ms:.0f}' for ms in exposed)} |"
        )


def large_table(rows: dict[str, Row]) -> Iterator[str]:
    """Yield the efficiency on 128 GPUs."""
    yield "| model | published efficiency | simulated | error |"
    yield "|---|---|---|---|"
    for model, row in rows.items():
        yield f"| {model} | {row.published:.0%} | {row.simulated:.1%} | {row.error:+.1%} |"


def with_network(scenario: Scenario, **update: float) -> Scenario:
    """Give the cluster another network."""
    network = scenario.cluster.network.model_copy(update=update)
    return scenario.changed(cluster=scenario.cluster.model_copy(update={"network": network}))


def with_fusion(scenario: Scenario, **update: float) -> Scenario:
    """Change tensor fusion."""
    (schedule,) = scenario.schedules
    assert isinstance(schedule, Sync)
    assert schedule.fusion
    fusion = schedule.fusion.model_copy(update=update)
    return scenario.changed(schedules=(schedule.model_copy(update={"fusion": fusion}),))


KNOBS: dict[str, Callable[[Scenario], Scenario]] = {
    "as it is": lambda scenario: scenario,
    "network a tenth slower": lambda scenario: with_network(
        scenario, efficiency=0.9 * scenario.cluster.network.efficiency
    ),
    "latency of a network hop twice": lambda scenario: with_network(
        scenario, latency_s=2 * scenario.cluster.network.latency_s
    ),
    "fusion by cycles of 5 ms of GPU time": lambda scenario: with_fusion(scenario, cycle_s=5e-3),
    "no fusion": lambda scenario: with_fusion(scenario, buffer_nbytes=1),
}


def knobs_table() -> Iterator[str]:
    """Yield how the error of each row changes with what it depends on."""
    columns = [(system, model) for system in NCCL for model in PRESETS]
    yield f"| changed | {' | '.join(f'{NCCL[system].upper()}, {model}' for system, model in columns)} |"
    yield "|---|" + "---|" * len(columns)
    for name, change in KNOBS.items():
        errors = (
            images_per_s(change(horovod(model, NCCL[system]))) / PUBLISHED["gpus_16"][system][model] - 1
            for system, model in columns
        )
        yield f"| {name} | {' | '.join(f'{error:+.1%}' for error in errors)} |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {
        "nccl": "\n".join(nccl_table(nccl_rows())),
        "large": "\n".join(large_table(large_rows())),
        "knobs": "\n".join(knobs_table()),
    }


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into README.md")
    if parser.parse_args().write:
        readme = HERE / "README.md"
        readme.write_text(insert_tables(readme.read_text(encoding="utf-8"), tables()), encoding="utf-8")
    else:
        for name, table in tables().items():
            print(f"\n{name}\n\n{table}")


if __name__ == "__main__":
    main()
