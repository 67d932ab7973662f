"""Horovod on 16 and 128 GPUs with 25 Gbit/s: published images per second beside simulated ones.

python experiments/horovod_scaling/run.py           print the tables
python experiments/horovod_scaling/run.py --write   write them into the README
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from simdist.cost import price
from simdist.cost.plain import linear_s, plain_ring_s
from simdist.engines.choose import Engine
from simdist.report import markdown_table, page_command
from simdist.runs.building import Built, job
from simdist.scenario import Link, Scenario, Workload, load, load_cluster, load_workload, presets
from simdist.schedules.parameter_server import ParameterServer
from simdist.schedules.sync import Sync
from simdist.studies import comparison
from simdist.studies.draws import with_draws
from simdist.studies.measuring import measure

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
PRESETS = {"InceptionV3": "inception-v3", "ResNet-101": "resnet101", "VGG-16": "vgg16"}
NCCL = {"TCP Horovod NCCL": "tcp", "RDMA Horovod NCCL": "rdma"}
"""Published row -> the network that carried it."""
SERVERS_TF = ("Distributed TF", "Distributed TF vars CPU")
MPI = {"TCP Horovod MPI CPU": "tcp", "RDMA Horovod MPI CPU": "rdma"}
CLUSTERS = {"gpus_16": 4, "gpus_64_40g": 16}
"""Published rows with parameter servers -> servers."""

GRPC = ((1e6, 550e6), (128e6, 446e6), (1024e6, 102e6))
"""Measured bytes of a message, and bytes per second; see parameter-server.yaml."""
FITTED = (613e6, 7.25e-18)
"""Constants of parameter-server.yaml: bytes per second, and seconds per square byte."""
SEND_BPS = 2.56e9
"""What one worker was seen to send to eight servers (tensorflow#6116)."""
GPU_COPIES_S = 1 / 196.11e6 - 1 / 256.12e6
"""Seconds per byte of a tensor on a GPU, which is copied and serialised in the host's memory (tensorflow#11261)."""
MPI_Bps = (0.424e9, 1.073e9)
"""Of a process that moves and adds up: Open MPI with 32 in a machine (ucc#1082, 64 MiB) and gloo, alone (gloo#248)."""


@dataclass(frozen=True)
class Row:
    """Images per second of all GPUs, published and simulated."""

    published: float
    simulated: float
    interval: tuple[float, float] = (0.0, 0.0)

    @property
    def inside(self) -> str:
        """Whether what was published is in the interval."""
        return "yes" if self.interval[0] <= self.published <= self.interval[1] else "no"

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


def one_gpu(cluster: str) -> dict[str, float]:
    """Return the images per second of one GPU of a cluster."""
    return PUBLISHED[cluster]["one_gpu"] if "one_gpu" in PUBLISHED[cluster] else PUBLISHED["one_gpu"]


def grpc(rate_Bps: float, square_s: float) -> Link:
    """Return a link whose receiving end takes S / rate + square S^2 for S bytes."""
    base = load(HERE / "parameter-server.yaml").cluster.network
    assert base.table
    sizes = [point.nbytes for point in base.table]
    times = [base.table[0].time_s + nbytes / rate_Bps + square_s * nbytes**2 for nbytes in sizes]
    return Link.model_validate({"table": tuple(zip(sizes, times, strict=True)), "send_Bps": rate_Bps})


def through(first: int, second: int) -> tuple[float, float]:
    """Return the constants that two of the measurements of gRPC give exactly."""
    sizes, rates = np.array([GRPC[first], GRPC[second]]).T
    line_s, square_s = np.linalg.solve(np.stack([sizes, sizes**2], axis=1), sizes / rates)
    return 1 / float(line_s), float(square_s)


def parameter_servers(
    model: str, system: str = SERVERS_TF[1], cluster: str = "gpus_16", law: tuple[float, float] = FITTED
) -> Scenario:
    """Return Distributed TensorFlow training `model` on servers with 4 GPUs each, a worker and a server on each."""
    base, n = load(HERE / "parameter-server.yaml"), CLUSTERS[cluster]
    worker_Bps = law[0] if system.endswith("CPU") else 1 / (1 / law[0] + GPU_COPIES_S)
    update = {"nodes": n, "network": grpc(*law), "host": {"reduction_Bps": worker_Bps}}
    base = base.changed(cluster=base.cluster.model_copy(update=update))
    return training(model, with_servers(base, servers=n), one_gpu(cluster))


def mpi(model: str, network: str, cluster: str, rate_Bps: float = math.fsum(MPI_Bps) / 2) -> Scenario:
    """Return Horovod with MPI on CPUs: it gets a gradient when it is in the host's memory, so cycles count."""
    on_host = load_cluster(HERE / f"cluster-{network}.yaml").model_copy(update={"host": {"reduction_Bps": rate_Bps}})
    base = with_fusion(load(HERE / "horovod.yaml"), cycle_s=5e-3)
    return training(model, base.changed(cluster=on_host), one_gpu(cluster))


def images_per_s(scenario: Scenario, *, gpus_per_rank: int = 1) -> float:
    """Simulate the images per second of all GPUs, as stated."""
    n_images = scenario.cluster.world_size * gpus_per_rank * scenario.workload.batch_size
    stated = scenario.changed(uncertain={}, cluster=scenario.cluster.model_copy(update={"uncertain": {}}))
    return n_images / _simulated(stated).step_s


def in_interval(published: float, scenario: Scenario, *, ideal: float = 1.0) -> Row:
    """Simulate also what is uncertain; rates are shares of `ideal`."""
    found, n_images = _simulated(scenario), scenario.cluster.world_size * scenario.workload.batch_size
    assert found.step_s_range
    low, high = (n_images / step_s / ideal for step_s in reversed(found.step_s_range))
    return Row(published, n_images / found.step_s / ideal, (low, high))


def _simulated(scenario: Scenario) -> comparison.Row:
    """Simulate steps.

    Plans are not proved here, as `simdist.runs.building.build` would do: with 314 tensors on 128 GPUs that takes half a
    minute. Tensors of different queues share links, which the fast engine would find out in the first step.
    """
    (schedule,) = scenario.schedules
    engine: Engine = "des" if isinstance(schedule, ParameterServer) else "auto"
    plan = schedule.plan(job(scenario))
    built = Built(schedule, plan, price(plan, scenario.cluster, scenario.workload), n_proved_ranks=0)
    times = with_draws(scenario, built, measure(scenario, built, engine=engine, n_seeds=2 if scenario.is_random else 1))
    return comparison.row(times, times)


@cache
def nccl_rows() -> dict[tuple[str, str], Row]:
    """Return the rows of Horovod with NCCL: published system and model -> images per second."""
    return {
        (system, model): in_interval(PUBLISHED["gpus_16"][system][model], horovod(model, network))
        for system, network in NCCL.items()
        for model in PRESETS
    }


@cache
def large_rows() -> dict[tuple[int, str], Row]:
    """Return the rows with RDMA: GPUs and model -> share of as many times one GPU."""
    return {
        (n_gpus, model): in_interval(
            efficiency, horovod(model, "rdma", servers=n_gpus // 4), ideal=n_gpus * PUBLISHED["one_gpu"][model]
        )
        for n_gpus in (128, 512)
        for model, efficiency in PUBLISHED[f"gpus_{n_gpus}_rdma_efficiency"].items()
    }


def efficiency_of(model: str, n_gpus: int, *, batch_size: int = 64) -> float:
    """Simulate many GPUs with RDMA; a GPU is as fast whatever the batch."""
    base = horovod(model, "rdma", servers=n_gpus // 4)
    base = base.changed(workload=workload(model, batch_size, PUBLISHED["one_gpu"][model]))
    return images_per_s(base) / (n_gpus * PUBLISHED["one_gpu"][model])


def other_cluster(model: str) -> Scenario:
    """Return Horovod training `model` on the cluster with 40 GbE."""
    scenario = load(HERE / "horovod.yaml").changed(cluster=load_cluster(HERE / "cluster-tcp-40g.yaml"))
    return training(model, scenario, PUBLISHED["gpus_64_40g"]["one_gpu"])


@cache
def other_rows() -> dict[str, Row]:
    """Return the rows of the cluster with 40 GbE: model -> images per second of 64 GPUs."""
    rates = PUBLISHED["gpus_64_40g"]["TCP Horovod NCCL"]
    return {model: in_interval(rates[model], other_cluster(model)) for model in PRESETS}


@cache
def server_rows() -> dict[tuple[str, str, str], Row]:
    """Return the rows of Distributed TensorFlow: cluster, published system and model -> images per second."""
    return {
        (cluster, system, model): Row(
            PUBLISHED[cluster][system][model],
            with_server_knob(AS_IT_IS, model, system, cluster),
        )
        for cluster in CLUSTERS
        for system in SERVERS_TF
        for model in PRESETS
    }


@cache
def mpi_rows() -> dict[tuple[str, str, str], Row]:
    """Return the rows of Horovod with MPI on CPUs: cluster, published system and model -> images per second."""
    networks = {
        **{("gpus_16", system): name for system, name in MPI.items()},
        ("gpus_64_40g", next(iter(MPI))): "tcp-40g",
    }
    rates = (sum(MPI_Bps) / 2, *MPI_Bps)
    found = {
        (cluster, system, model): [images_per_s(mpi(model, network, cluster, rate_Bps)) for rate_Bps in rates]
        for (cluster, system), network in networks.items()
        for model in PRESETS
    }
    return {
        (cluster, system, model): Row(PUBLISHED[cluster][system][model], middle, (low, high))
        for (cluster, system, model), (middle, low, high) in found.items()
    }


def interval(model: str, system: str, cluster: str) -> tuple[float, float]:
    """Return the images per second of all GPUs with what measurements of gRPC and of its ends leave open."""
    laws = [parameter_servers(model, system, cluster, law) for law in (through(0, 2), through(1, 2))]
    rates = [images_per_s(scenario, gpus_per_rank=4) for scenario in laws]
    rates += [with_server_knob(knob, model, system, cluster) for knob in (SENDS_AS_IT_RECEIVES, SENDS_AS_MEASURED)]
    return min(rates), max(rates)


def plain(published: float, scenario: Scenario) -> str:
    """Return the errors of linear scaling and of a plain ring, as cells of a table."""
    n_images = scenario.cluster.world_size * scenario.workload.batch_size
    rates = (n_images / of(scenario.workload, scenario.cluster) for of in (linear_s, plain_ring_s))
    return " | ".join(f"{rate / published - 1:+.1%}" for rate in rates)


def ring_of(cluster: str, model: str) -> Scenario:
    """Return the ring of a cluster over TCP, for the formulas."""
    return horovod(model, "tcp") if cluster == "gpus_16" else other_cluster(model)


def nccl_table(rows: dict[tuple[str, str], Row]) -> Iterator[str]:
    """Yield images per second, and what they say of a step: how long communication kept the GPUs waiting."""
    yield f"| published row | model | {HEADING} | interval | inside | exposed, ms: published | simulated |"
    for (system, model), row in rows.items():
        alone_s = 64 / PUBLISHED["one_gpu"][model]
        exposed = (1e3 * (16 * 64 / rate - alone_s) for rate in (row.published, row.simulated))
        yield (
            f"| {system} | {model} | {row.published:.1f} | {row.simulated:.1f} | {row.error:+.1%} "
            f"| {plain(row.published, horovod(model, NCCL[system]))} | {row.interval[0]:.0f} - {row.interval[1]:.0f} "
            f"| {row.inside} | {' | '.join(f'{ms:.0f}' for ms in exposed)} |"
        )


def large_table() -> Iterator[str]:
    """Yield the efficiency on many GPUs."""
    yield (
        "| GPUs | model | published efficiency | simulated | error | linear | plain ring | interval | inside "
        "| simulated, batch 32 |"
    )
    for (n_gpus, model), row in large_rows().items():
        ideal = n_gpus * PUBLISHED["one_gpu"][model]
        small = efficiency_of(model, n_gpus, batch_size=32)
        yield (
            f"| {n_gpus} | {model} | {row.published:.0%} | {row.simulated:.1%} | {row.error:+.1%} "
            f"| {plain(row.published * ideal, horovod(model, 'rdma', servers=n_gpus // 4))} "
            f"| {row.interval[0]:.0%} - {row.interval[1]:.0%} | {row.inside} | {small:.1%} |"
        )


def other_table(rows: dict[str, Row]) -> Iterator[str]:
    """Yield images per second of the cluster with 40 GbE."""
    yield f"| model | {HEADING} | interval | inside |"
    for model, row in rows.items():
        ends = f"{row.interval[0]:.0f} - {row.interval[1]:.0f} | {row.inside}"
        cells = f"{plain(row.published, other_cluster(model))} | {ends}"
        yield f"| {model} | {row.published:.1f} | {row.simulated:.1f} | {row.error:+.1%} | {cells} |"


HEADING = "published, images/s | simulated | error | linear | plain ring"


def server_table() -> Iterator[str]:
    """Yield images per second of Distributed TensorFlow."""
    yield f"| GPUs | published row | model | {HEADING} | gRPC's range | inside |"
    for (cluster, system, model), row in server_rows().items():
        low, high = interval(model, system, cluster)
        yield (
            f"| {4 * CLUSTERS[cluster]} | {system} | {model} | {row.published:.1f} | {row.simulated:.1f} "
            f"| {row.error:+.1%} | {plain(row.published, ring_of(cluster, model))} | {low:.0f} - {high:.0f} "
            f"| {'yes' if low <= row.published <= high else 'no'} |"
        )


def mpi_table() -> Iterator[str]:
    """Yield images per second of Horovod on CPUs."""
    yield f"| GPUs | published row | model | {HEADING} | a process's range | inside |"
    for (cluster, system, model), row in mpi_rows().items():
        yield (
            f"| {4 * CLUSTERS[cluster]} | {system} | {model} | {row.published:.1f} | {row.simulated:.1f} "
            f"| {row.error:+.1%} | {plain(row.published, ring_of(cluster, model))} "
            f"| {row.interval[0]:.0f} - {row.interval[1]:.0f} | {row.inside} |"
        )


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
    for name, change in KNOBS.items():
        errors = (
            images_per_s(change(horovod(model, NCCL[system]))) / PUBLISHED["gpus_16"][system][model] - 1
            for system, model in columns
        )
        yield f"| {name} | {' | '.join(f'{error:+.1%}' for error in errors)} |"


def with_send(scenario: Scenario, send_Bps: float | None) -> Scenario:
    """Say what a sending end carries; None: as little as a receiving one."""
    return with_network(scenario, send_Bps=send_Bps)


def with_servers(scenario: Scenario, **update: object) -> Scenario:
    """Change the parameter servers."""
    (schedule,) = scenario.schedules
    return scenario.changed(schedules=(schedule.model_copy(update=update),))


def slower(scenario: Scenario, lost: float) -> Scenario:
    """Let computing take longer by a share of what it then takes."""
    times = {name: getattr(scenario.workload, name) / (1 - lost) for name in ("forward_s", "backward_s")}
    return scenario.changed(workload=scenario.workload.model_copy(update=times))


AS_IT_IS = "as it is"
SENDS_AS_IT_RECEIVES = "sending takes as long as receiving"
SENDS_AS_MEASURED = "sending at 2.56 GB/s (tensorflow#6116, to 8 servers)"
SERVER_KNOBS: dict[str, Callable[[Scenario], Scenario]] = {
    AS_IT_IS: lambda scenario: scenario,
    SENDS_AS_IT_RECEIVES: lambda scenario: with_send(scenario, None),
    SENDS_AS_MEASURED: lambda scenario: with_send(scenario, SEND_BPS),
    "a machine computes 5 % longer, as above with NCCL": lambda scenario: slower(scenario, 0.05),
    "a variable is pulled when all have pushed it": lambda scenario: with_servers(scenario, pull="tensor"),
    "pushed after the backward pass, all at once": lambda scenario: with_servers(
        scenario, pull="bucket", bucket_nbytes=None
    ),
}


@cache
def with_server_knob(knob: str, model: str, system: str, cluster: str) -> float:
    """Simulate the images per second of Distributed TensorFlow with one thing changed."""
    scenario = SERVER_KNOBS[knob](parameter_servers(model, system, cluster))
    return images_per_s(scenario, gpus_per_rank=4)


def server_knobs_table() -> Iterator[str]:
    """Yield the errors of Distributed TensorFlow with variables on the CPU, with other servers."""
    yield f"| changed | {' | '.join(f'{4 * n} GPUs, {model}' for n in CLUSTERS.values() for model in PRESETS)} |"
    for name in SERVER_KNOBS:
        errors = (
            with_server_knob(name, model, SERVERS_TF[1], cluster) / PUBLISHED[cluster][SERVERS_TF[1]][model] - 1
            for cluster in CLUSTERS
            for model in PRESETS
        )
        yield f"| {name} | {' | '.join(f'{error:+.0%}' for error in errors)} |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {
        "nccl": markdown_table(nccl_table(nccl_rows())),
        "large": markdown_table(large_table()),
        "other": markdown_table(other_table(other_rows())),
        "servers": markdown_table(server_table()),
        "mpi": markdown_table(mpi_table()),
        "tcp": markdown_table(tcp_table()),
        "knobs": markdown_table(knobs_table()),
        "server-knobs": markdown_table(server_knobs_table()),
    }


def main() -> None:
    """Run the experiment."""
    page_command(__doc__ or "", HERE / "README.md", tables)


if __name__ == "__main__":
    main()
