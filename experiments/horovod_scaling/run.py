"""Horovod on 16 and 128 GPUs with 25 Gbit/s: published images per second beside simulated ones.

python experiments/horovod_scaling/run.py           print the tables
python experiments/horovod_scaling/run.py --write   write them into the README
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from simdist.cost import price
from simdist.report import page_command
from simdist.runs.building import Built, job
from simdist.scenario import Link, Scenario, Workload, load, load_cluster, load_workload, presets
from simdist.schedules.sync import Sync
from simdist.studies.comparison import measure

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
PRESETS = {"InceptionV3": "inception-v3", "ResNet-101": "resnet101", "VGG-16": "vgg16"}
NCCL = {"TCP Horovod NCCL": "tcp", "RDMA Horovod NCCL": "rdma"}
"""Published row -> the network that carried it."""
SERVERS_TF = ("Distributed TF", "Distributed TF vars CPU")
MPI = ("TCP Horovod MPI CPU", "RDMA Horovod MPI CPU")


@dataclass(frozen=True)
class Row:
    """Images per second of all GPUs, published and simulated."""

    published: float
    simulated: float

    @property
    def error(self) -> float:
        """How much more is simulated than was published, as a share of it."""
        return self.simulated / self.published - 1


def workload(model: str, batch_size: int, images_per_s: float) -> Workload:
    """Return a model whose GPU computes at a published rate: an input, not a result.

    The benchmark trains Inception V3 without its auxiliary classifier (tensorflow/benchmarks, inception_model.py).
    """
    whole = load_workload(presets.path("workloads", PRESETS[model]))
    tensors = tuple(tensor for tensor in whole.tensors if not tensor.name.startswith("auxiliary."))
    step_s = batch_size / images_per_s
    times = {"forward_s": step_s / 3, "backward_s": step_s * 2 / 3, "optimize_s": 0.0}
    return whole.model_copy(update={"tensors": tensors, "batch_size": batch_size, **times})


def training(model: str, scenario: Scenario, one_gpu: dict[str, float]) -> Scenario:
    """Return the scenario with `model`, whose GPU alone computes `one_gpu[model]` images per second."""
    return scenario.changed(workload=workload(model, scenario.workload.batch_size, one_gpu[model]))


def horovod(model: str, network: str, *, servers: int = 4) -> Scenario:
    """Return Horovod training `model` on some servers, over `tcp` or `rdma`."""
    cluster = load_cluster(HERE / f"cluster-{network}.yaml").model_copy(update={"nodes": servers})
    return training(model, load(HERE / "horovod.yaml").changed(cluster=cluster), PUBLISHED["one_gpu"])


def parameter_servers(model: str) -> Scenario:
    """Return Distributed TensorFlow training `model` on 4 servers with 4 GPUs each."""
    return training(model, load(HERE / "parameter-server.yaml"), PUBLISHED["one_gpu"])


def images_per_s(scenario: Scenario, *, gpus_per_rank: int = 1) -> float:
    """Simulate the images per second of all GPUs.

    Plans are not proved here, as `simdist.runs.building.build` would do: with 314 tensors on 128 GPUs that takes half a
    minute.
    """
    (schedule,) = scenario.schedules
    plan = schedule.plan(job(scenario))
    costs = price(plan, scenario.cluster, scenario.workload)
    measured = measure(scenario, Built(schedule, plan, costs, n_proved_ranks=0), n_seeds=1)
    n_gpus = scenario.cluster.world_size * gpus_per_rank
    return n_gpus * scenario.workload.batch_size / float(measured.step_s[0])


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


def other_cluster(model: str) -> Scenario:
    """Return Horovod training `model` on the cluster with 40 GbE."""
    scenario = load(HERE / "horovod.yaml").changed(cluster=load_cluster(HERE / "cluster-tcp-40g.yaml"))
    return training(model, scenario, PUBLISHED["gpus_64_40g"]["one_gpu"])


def other_rows() -> dict[str, Row]:
    """Return the rows of the cluster with 40 GbE: model -> images per second of 64 GPUs."""
    rates = PUBLISHED["gpus_64_40g"]["TCP Horovod NCCL"]
    return {model: Row(rates[model], images_per_s(other_cluster(model))) for model in PRESETS}


def server_rows() -> dict[tuple[str, str], Row]:
    """Return the rows of Distributed TensorFlow; the simulator knows no difference between the two."""
    simulated = {model: images_per_s(parameter_servers(model), gpus_per_rank=4) for model in PRESETS}
    return {
        (system, model): Row(PUBLISHED["gpus_16"][system][model], simulated[model])
        for system in SERVERS_TF
        for model in PRESETS
    }


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


def other_table(rows: dict[str, Row]) -> Iterator[str]:
    """Yield images per second of the cluster with 40 GbE."""
    yield "| model | published, images/s | simulated | error |"
    yield "|---|---|---|---|"
    for model, row in rows.items():
        yield f"| {model} | {row.published:.1f} | {row.simulated:.1f} | {row.error:+.1%} |"


def server_table(rows: dict[tuple[str, str], Row]) -> Iterator[str]:
    """Yield images per second of Distributed TensorFlow, and of Horovod on CPUs, which is not simulated."""
    yield "| published row | model | published, images/s | simulated | error |"
    yield "|---|---|---|---|---|"
    for (system, model), row in rows.items():
        yield f"| {system} | {model} | {row.published:.1f} | {row.simulated:.1f} | {row.error:+.0%} |"
    for system in MPI:
        for model, rate in PUBLISHED["gpus_16"][system].items():
            yield f"| {system} | {model} | {rate:.1f} | not simulated | |"


def with_network(scenario: Scenario, **update: float) -> Scenario:
    """Give the cluster another network."""
    network = scenario.cluster.network.model_copy(update=update)
    return scenario.changed(cluster=scenario.cluster.model_copy(update={"network": network}))


TCP_SOURCES_Bps = {
    "1.70 GB/s: Azure, 25 Gbit/s (nccl-tests#83), base of 25 GbE": 1.70e9,
    "2.06 GB/s: Google, 32 Gbit/s, one ring (nccl#209), base of 40 GbE": 2.06e9,
    "2.13 GB/s: AWS, 100 Gbit/s (nccl#235)": 2.125e9,
}
"""Measured rates of NCCL over TCP -> bytes per second of a network card."""


def tcp_rows(rate_Bps: float) -> Iterator[Row]:
    """Yield the rows over TCP of both clusters, all models, if a card moves `rate_Bps`."""
    for model in PRESETS:
        yield Row(PUBLISHED["gpus_16"]["TCP Horovod NCCL"][model], _at_rate(horovod(model, "tcp"), rate_Bps))
    for model in PRESETS:
        yield Row(PUBLISHED["gpus_64_40g"]["TCP Horovod NCCL"][model], _at_rate(other_cluster(model), rate_Bps))


def _at_rate(scenario: Scenario, rate_Bps: float) -> float:
    share = rate_Bps / scenario.cluster.network.bandwidth_Bps
    return images_per_s(with_network(scenario, efficiency=share))


def tcp_table() -> Iterator[str]:
    """Yield the errors over TCP by who measured what TCP moves."""
    clusters = ("16 GPUs", "64 GPUs")
    yield f"| NCCL over TCP | {' | '.join(f'{cluster}, {model}' for cluster in clusters for model in PRESETS)} |"
    yield "|---|" + "---|" * len(clusters) * len(PRESETS)
    for name, rate_Bps in TCP_SOURCES_Bps.items():
        yield f"| {name} | {' | '.join(f'{row.error:+.1%}' for row in tcp_rows(rate_Bps))} |"


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


def with_rate(scenario: Scenario, bandwidth_Bps: float) -> Scenario:
    """Give servers and workers a rate that does not depend on the size of a message."""
    network = Link(latency_s=0.0, bandwidth_Bps=bandwidth_Bps)
    return scenario.changed(cluster=scenario.cluster.model_copy(update={"network": network}))


def with_servers(scenario: Scenario, **update: object) -> Scenario:
    """Change the parameter servers."""
    (schedule,) = scenario.schedules
    return scenario.changed(schedules=(schedule.model_copy(update=update),))


SERVER_KNOBS: dict[str, Callable[[Scenario], Scenario]] = {
    "as it is": lambda scenario: scenario,
    "0.55 GB/s for messages of any size": lambda scenario: with_rate(scenario, 0.55e9),
    "a worker reaches the server of its machine for nothing": lambda scenario: with_servers(scenario, apart=False),
    "buckets of 25 MiB, which overlap": lambda scenario: with_servers(scenario, bucket_nbytes=25 * 1024**2),
    "every variable cut evenly over the servers": lambda scenario: with_servers(scenario, placement="even"),
}


def server_knobs_table() -> Iterator[str]:
    """Yield the images per second of Distributed TensorFlow with other servers."""
    yield f"| changed | {' | '.join(PRESETS)} |"
    yield "|---|" + "---|" * len(PRESETS)
    for name, change in SERVER_KNOBS.items():
        rates = (images_per_s(change(parameter_servers(model)), gpus_per_rank=4) for model in PRESETS)
        yield f"| {name} | {' | '.join(f'{rate:.0f}' for rate in rates)} |"
    for system in SERVERS_TF:
        rates = (PUBLISHED["gpus_16"][system][model] for model in PRESETS)
        yield f"| published: {system} | {' | '.join(f'{rate:.0f}' for rate in rates)} |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {
        "nccl": "\n".join(nccl_table(nccl_rows())),
        "large": "\n".join(large_table(large_rows())),
        "other": "\n".join(other_table(other_rows())),
        "servers": "\n".join(server_table(server_rows())),
        "tcp": "\n".join(tcp_table()),
        "knobs": "\n".join(knobs_table()),
        "server-knobs": "\n".join(server_knobs_table()),
    }


def main() -> None:
    """Run the experiment."""
    page_command(__doc__ or "", HERE / "README.md", tables)


if __name__ == "__main__":
    main()
