"""TensorFlow's benchmarks on K80 GPUs that read ImageNet from EFS: images per second, published and simulated.

python experiments/efs_k80/run.py           print the tables
python experiments/efs_k80/run.py --write   write them into the README
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simdist.cost import price
from simdist.cost.plain import linear_s, plain_ring_s
from simdist.report import markdown_table, page_command
from simdist.runs.building import Built, job, simulate
from simdist.scenario import Exponential, Scenario, load, load_workload, presets
from simdist.studies.measuring import measure
from simdist.traces.waiting import step_end_s

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
MODELS: dict[str, int] = PUBLISHED["batch"]
GPUS: list[int] = PUBLISHED["gpus"]
N_WARMUP_STEPS = 10
RECORD_NBYTES = 114_660  # mlcommons/storage, configs/dlio/workload/resnet50_a100.yaml: record_length_bytes 114660.07
DECODE_SOURCE = ("Google Compute Engine", "AlexNet", 8)
"""The one row that is an input: what decoding costs is taken from it."""
PRESETS = {"InceptionV3": "inception-v3", "ResNet-50": "resnet50", "ResNet-152": "resnet152"}
MACHINES, N_PER_MACHINE = (1, 2, 4, 8), 8


def scenario(machine: str, model: str, n_gpus: int, *, bandwidth_Bps: float | None = None) -> Scenario:
    """Return a model on some GPUs, which compute a step as long as they did with synthetic data.

    Args:
        machine: Its disk and its rates of synthetic data.
        model: Name.
        n_gpus: GPUs of the machine that train.
        bandwidth_Bps: Of the disk; as published if None.
    """
    base, published = load(HERE / "scenario.yaml"), PUBLISHED["machines"][machine]
    cluster = base.cluster
    assert cluster.storage
    assert cluster.host.cores_per_node
    batch, images_per_s = MODELS[model], published["synthetic"][model][GPUS.index(n_gpus)]
    disk = cluster.storage.model_copy(update={"bandwidth_Bps": bandwidth_Bps or published["bandwidth_Bps"]})
    workload = base.workload.model_copy(update={"batch_size": batch, "forward_s": n_gpus * batch / images_per_s})
    cluster = cluster.model_copy(update={"gpus_per_node": n_gpus, "storage": disk})
    data = {"samples": base.steps * n_gpus * batch, "file_nbytes": RECORD_NBYTES}  # as many as are read
    update = {"decode_workers": base.cluster.host.cores_per_node // n_gpus, "data": data}
    return base.changed(cluster=cluster, workload=workload, input=base.input.model_copy(update=update))


def images_per_s(scenario: Scenario) -> float:
    """Simulate the images per second of all GPUs in the steps after warm-up."""
    end_s = step_end_s(simulate(scenario, engine="des")).max(axis=1)
    n_images = (scenario.steps - N_WARMUP_STEPS) * scenario.cluster.world_size * scenario.workload.batch_size
    return float(n_images / (end_s[-1] - end_s[N_WARMUP_STEPS - 1]))


def table(machine: str) -> Iterator[str]:
    """Yield what was published of a machine and what is simulated, for every model and number of GPUs."""
    yield (
        "| model | GPUs | synthetic | real, published | simulated | error | with a disk without limit "
        "| published, MB/s |"
    )
    for model in MODELS:
        for n_gpus in GPUS:
            yield row(machine, model, n_gpus)


def row(machine: str, model: str, n_gpus: int) -> str:
    """Return the line of a model on some GPUs."""
    place, published = GPUS.index(n_gpus), PUBLISHED["machines"][machine]
    real = published["real"][model][place]
    ours = images_per_s(scenario(machine, model, n_gpus))
    unlimited = images_per_s(scenario(machine, model, n_gpus, bandwidth_Bps=math.inf))
    error, needed = (_percent(ours / real - 1), f"{real * RECORD_NBYTES / 1e6:.1f}") if real else ("-", "-")
    if (machine, model, n_gpus) == DECODE_SOURCE:
        error = "an input"
    return (
        f"| {model} | {n_gpus} | {published['synthetic'][model][place]} | {real or 'excluded'} | {ours:.1f} "
        f"| {error} | {unlimited:.1f} | {needed} |"
    )


def _percent(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}"  # not -0.0 %


def cluster(row: dict[str, Any], n_machines: int) -> Scenario:
    """Return a model on some machines, each of which computes a step as long as it did by itself, in the mean.

    Half of what 8 GPUs take longer than one is noise: the longest of 8 exponential delays. A rank is a machine here, so
    the step has the time of 7 of them, and the last one is drawn.

    The benchmark trains Inception V3 without its auxiliary classifier (tensorflow/benchmarks, inception_model.py).
    """
    base, whole = load(HERE / "cluster.yaml"), load_workload(presets.path("workloads", PRESETS[row["model"]]))
    n_images = N_PER_MACHINE * row["batch"]
    step_s = n_images / row["machine"]
    lost_s = step_s - row["batch"] / row["gpu"]
    noise_s = lost_s / 2 / sum(1 / i for i in range(1, N_PER_MACHINE + 1))  # of one GPU, as of kind `interference`
    step_s -= noise_s
    update = {
        "tensors": tuple(tensor for tensor in whole.tensors if not tensor.name.startswith("auxiliary.")),
        "batch_size": n_images,
        "forward_s": step_s / 3,
        "backward_s": step_s * 2 / 3,
        "optimize_s": 0.0,
    }
    (servers,) = base.schedules
    barrier_s = n_machines**2 * base.cluster.collectives.overhead_s  # of a variable: a token for every pair of workers
    n_servers = row["servers_on_8"] if n_machines == MACHINES[-1] else n_machines
    return base.changed(
        cluster=base.cluster.model_copy(update={"nodes": n_machines, "collectives": {"overhead_s": barrier_s}}),
        workload=whole.model_copy(update=update),
        schedules=[servers.model_copy(update={"servers": n_servers})],
        disturbances=[Exponential(mean_s=noise_s, on="compute")],
    )


def cluster_rate(scenario: Scenario) -> float:
    """Simulate the images per second of all machines. The plan is not proved, which would take seconds."""
    (schedule,) = scenario.schedules
    plan = schedule.plan(job(scenario))
    built = Built(schedule, plan, price(plan, scenario.cluster, scenario.workload), n_proved_ranks=0)
    n_images = scenario.cluster.world_size * scenario.workload.batch_size
    return n_images / float(measure(scenario, built, n_seeds=2).step_s.mean())


def clusters_table() -> Iterator[str]:
    """Yield what was published of several machines and what is simulated."""
    yield "| model | images per GPU | GPUs | published | simulated | error | linear | plain ring | missing, ms |"
    for row in PUBLISHED["clusters"]["rows"]:
        for n_machines, published in zip(MACHINES, row["images_per_s"], strict=True):
            scenario = cluster(row, n_machines)
            n_images = n_machines * scenario.workload.batch_size
            (noise,) = scenario.disturbances
            assert isinstance(noise, Exponential)
            plain = (
                n_images / (of(scenario.workload, scenario.cluster) + noise.mean_s) for of in (linear_s, plain_ring_s)
            )
            rates = (cluster_rate(scenario), *plain)
            errors = " | ".join(_percent(rate / published - 1) for rate in rates)
            yield (
                f"| {row['model']} | {row['batch']} | {N_PER_MACHINE * n_machines} | {published} | {rates[0]:.0f} "
                f"| {errors} | {1e3 * (n_images / published - n_images / rates[0]):.0f} |"
            )


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {
        "ec2": markdown_table(table("Amazon EC2")),
        "gce": markdown_table(table("Google Compute Engine")),
        "clusters": markdown_table(clusters_table()),
    }


def main() -> None:
    """Run the experiment."""
    page_command(__doc__ or "", HERE / "README.md", tables)


if __name__ == "__main__":
    main()
