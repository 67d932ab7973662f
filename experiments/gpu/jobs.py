"""What the parts train, on which cluster, under which schedules and stragglers."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import common

# Name of a GPU -> cluster preset with its data sheet.
CLUSTERS = {
    "H100": "dgx-h100",
    "H200": "dgx-h200",
    "B200": "dgx-b200",
    "A100": "dgx-a100",
    "V100": "v100x8-25gbit",
    "T4": "gcp-t4x4-32gbit",
}
PER_NODE = 8
# Of a dry run: computing is real, links are slow enough that they matter.
CPUS: common.Row = {
    "fabric": {"latency": "50 us", "bandwidth": "2 GB/s"},
    "network": {"latency": "100 us", "bandwidth": "1 GB/s"},
}
ONE_GPU = "one-gpu.yaml"


@dataclass(frozen=True, slots=True)
class Job:
    """A model as it is trained.

    Args:
        model: Of `real.models`.
        batch_size: Samples of a rank.
        precision: In which it is computed.
    """

    model: str
    batch_size: int
    precision: str

    @property
    def name(self) -> str:
        """Name it, for files and tables."""
        return f"{self.model}-{self.batch_size}-{self.precision}"


TINY = Job("mlp", 8, "fp32")  # of dry runs


def preset() -> str | None:
    """Return the cluster preset of the GPU; None if there is none."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((preset for gpu, preset in CLUSTERS.items() if gpu in name), None)


def cluster(part: common.Part, n_ranks: int) -> common.Row:
    """Return a cluster of so many GPUs: links by its data sheet, copies and small operations as measured on this one.

    Raises:
        PartError: No preset has this GPU, or the measurement failed.
    """
    name = None if part.dry_run else preset()
    if name is None and not part.dry_run:
        raise common.PartError(f"no cluster preset has this GPU; there are {', '.join(CLUSTERS)}")
    shape: common.Row = {"nodes": max(1, n_ranks // PER_NODE), "gpus_per_node": min(PER_NODE, n_ranks)}
    return ({"preset": name} if name else CPUS) | shape | _one_gpu(part)


def _one_gpu(part: common.Part) -> common.Row:
    """Return the keys of a cluster that one GPU and its host tell, measured unless an earlier part has.

    Raises:
        PartError: The measurement failed.
    """
    import yaml

    path = part.kept / ONE_GPU
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            measured = Path(folder, ONE_GPU)
            command = ("one_gpu", measured, "--backend", backend(part), "--device", part.device)
            common.ranks(command, 1, ranks_per_node=1, timeout_s=60.0)
            _keep(measured, path)
    found: common.Row = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def _keep(file: Path, path: Path) -> None:
    """Keep a file that was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")


def workload(part: common.Part, job: Job) -> Path:
    """Return the workload file of a job, which one rank measures unless an earlier part has.

    Raises:
        PartError: The measurement failed.
    """
    path = part.kept / f"workload-{job.name}.yaml"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            measured = Path(folder, "workload.yaml")
            command = ("real.calibrate", *measured_by(part, job), "--workload", measured)
            common.ranks(command, 1, ranks_per_node=1, timeout_s=60.0)
            _keep(measured, path)
    return path


def measured_by(part: common.Part, job: Job) -> tuple[object, ...]:
    """Return the options with which `real.calibrate` measures a job."""
    model = ("--model", job.model, "--batch-size", job.batch_size, "--precision", job.precision)
    return (*model, "--budget", "0.5 s" if part.dry_run else "8 s", "--backend", backend(part), "--device", part.device)


def backend(part: common.Part) -> str:
    """Return the library of collectives: NCCL, and gloo in its place on CPUs."""
    return "gloo" if part.dry_run else "nccl"


def schedules(n_ranks: int) -> list[common.Row]:
    """Return the schedules that so many ranks perform: six, or four for a rank that is alone."""
    inner = PER_NODE if n_ranks > PER_NODE else 2
    levels = {2: inner, 4: "world"} if n_ranks > inner else {2: "world"}
    of_any: list[common.Row] = [
        {"kind": "sync"},
        {"kind": "local_sgd", "period": 4},
        {"kind": "fsdp"},
        {"kind": "hitopk", "density": 0.01},
    ]
    of_groups: list[common.Row] = [
        {"kind": "hierarchical_sgd", "levels": levels},
        {"kind": "hsdp", "shard": min(inner, n_ranks)},
    ]
    return of_any + (of_groups if n_ranks > 1 else [])


def troubles(n_ranks: int, rank: int, delay: str) -> dict[str, list[common.Row]]:
    """Return name -> disturbances.

    Args:
        n_ranks: Of the job; few of them are late in a step, however many there are.
        rank: Is late more often.
        delay: How late.
    """
    found: dict[str, list[common.Row]] = {"none": []}
    for channel, where in (("host", "host"), ("compute", "device")):
        late = {"kind": "transient", "on": channel, "delay": delay}
        others = {"probability": min(0.05, 0.4 / n_ranks), "ranks": [each for each in range(n_ranks) if each != rank]}
        found[f"{where}, late by {delay}"] = [late | {"probability": 0.1, "ranks": [rank]}, late | others]
    return found
