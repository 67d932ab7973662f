"""Published rows, and the scenario of each by a rule: no value is set for a single row.

Rows of this folder are in training.csv and collectives.csv, their families in families.yaml. Rows of other experiments
are read from their `published.json`, with the cluster files of these experiments.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from simdist.scenario import Scenario, load, presets

HERE = Path(__file__).parent
EXPERIMENTS = HERE.parent
STEPS = 10
LOST = {"volta": (0.052, 0.114), "ampere": (0.023, 0.05), "hopper": (0.011, 0.015)}
"""Typical loss of a machine, single and mixed precision (docs/how-to/describe-your-cluster.md); 5 % of older GPUs."""
PRESETS = {"InceptionV3": "inception-v3", "ResNet-50": "resnet50", "ResNet-101": "resnet101"}
PRESETS |= {"ResNet-152": "resnet152", "VGG16": "vgg16", "VGG-16": "vgg16"}


@dataclass(frozen=True)
class Training:
    """A published rate of training.

    Args:
        family: Rows with the same source, machines and model.
        name: What tells the row from others of its family.
        precision: `single` or `mixed`.
        cluster: As a scenario has it.
        workload: As a scenario has it, without times.
        schedule: As a scenario has it.
        batch_size: Samples of a GPU and pass.
        micro_batches: Passes of a step.
        one_gpu_per_s: Samples per second of one GPU, if the source states it.
        machine_per_s: Samples per second of one machine, if it is an input.
        measured_per_s: Samples per second of all GPUs.
    """

    family: str
    name: str
    precision: str
    cluster: Mapping[str, Any]
    workload: Mapping[str, Any]
    schedule: Mapping[str, Any]
    batch_size: int
    micro_batches: int
    one_gpu_per_s: float | None
    machine_per_s: float | None
    measured_per_s: float

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of step from what was measured to the row."""
        machine = () if self.machine_per_s or self.cluster["gpus_per_node"] == 1 else ("machine",)
        return (*machine, *(("machines",) if self.cluster["nodes"] > 1 else ()))

    @property
    def n_gpus(self) -> int:
        """Number of GPUs."""
        return int(self.cluster["nodes"] * self.cluster["gpus_per_node"])

    @property
    def measured_s(self) -> float:
        """Seconds of a step."""
        return self.n_gpus * self.batch_size * self.micro_batches / self.measured_per_s

    def lost(self, document: Mapping[str, Any]) -> float:
        """Return the share that a machine is assumed to lose; 0 if its rate is an input."""
        if self.machine_per_s or self.cluster["gpus_per_node"] == 1:
            return 0.0
        hardware = load({**document, "schedules": ["sync"], "steps": 1}).cluster.device.generation
        return LOST.get(hardware or "", (0.05, 0.05))[self.precision == "mixed"]

    def scenario(self) -> Scenario:
        """Return the scenario: a third of a GPU's time is forward, and the rate of a machine tells what it loses."""
        gpus_per_node = self.cluster["gpus_per_node"]
        rate_per_s = self.one_gpu_per_s or (self.machine_per_s or 0.0) / gpus_per_node
        times = {"forward_s": self.batch_size / rate_per_s / 3, "backward_s": self.batch_size / rate_per_s * 2 / 3}
        passes = {"micro_batches": self.micro_batches} if self.micro_batches > 1 else {}
        precision = "fp16" if self.precision == "mixed" else "fp32"
        workload = {**self.workload, **times, **passes, "batch_size": self.batch_size, "optimize_s": 0.0}
        workload["precision"] = precision
        document: dict[str, Any] = {"name": self.family, "cluster": self.cluster, "workload": workload}
        if self.machine_per_s:
            document["disturbances"] = [{"kind": "interference", "machine_samples_per_s": self.machine_per_s}]
        elif lost := self.lost(document):
            document["disturbances"] = [{"kind": "interference", "lost": lost}]
        return load(document | {"schedules": [self.schedule], "steps": STEPS * self.schedule.get("period", 1)})


@dataclass(frozen=True)
class Collective:
    """A published time of one collective over all GPUs.

    Args:
        family: Table, or tables of the same machines.
        generation: Of the GPUs.
        collective: Such as `all_reduce`.
        cluster: As a scenario has it.
        algorithm: As a schedule has it.
        nbytes: As nccl-tests count them.
        measured_s: Seconds.
        how: What tells the row from others of its family; most need nothing.
    """

    family: str
    generation: str
    collective: str
    cluster: Mapping[str, Any]
    algorithm: str
    nbytes: int
    measured_s: float
    how: str = ""

    @property
    def n_gpus(self) -> int:
        """Number of GPUs."""
        return int(self.cluster["nodes"] * self.cluster["gpus_per_node"])


def training_rows() -> Iterator[Training]:
    """Yield all rows of training."""
    yield from _own_training()
    yield from _one_machine()
    yield from _aws()
    yield from _horovod()


@cache
def families() -> dict[str, dict[str, Any]]:
    """Return the families of this folder, with models."""
    return dict(yaml.safe_load((HERE / "families.yaml").read_text(encoding="utf-8")))


def _read(file: str) -> Iterator[dict[str, str]]:
    with (HERE / file).open(encoding="utf-8", newline="") as lines:
        yield from csv.DictReader(lines)


def _own_training() -> Iterator[Training]:
    for row in _read("training.csv"):
        family = families()["training"][row["family"]]
        sizes = {"nodes": int(row["nodes"]), "gpus_per_node": int(row["gpus_per_node"])}
        transformer = families()["models"].get(row["model"])
        workload = {"transformer": transformer} if transformer else {"preset": row["model"], "dtype": "float32"}
        period = int(row["period"] or 1)
        own = family.get("schedule", {"kind": "sync"})
        schedule = own if period == 1 else {"kind": "local_sgd", "period": period}
        yield Training(
            row["family"],
            row["name"],
            row["precision"],
            family["cluster"] | sizes,
            workload,
            schedule,
            int(row["batch_size"]),
            int(row["micro_batches"]),
            float(row["one_gpu_per_s"] or 0) or None,
            float(row["machine_per_s"] or 0) or None,
            float(row["measured_per_s"]),
        )


def _published(experiment: str) -> dict[str, Any]:
    return dict(json.loads((EXPERIMENTS / experiment / "published.json").read_text(encoding="utf-8")))


def _model(name: str) -> dict[str, Any]:
    if name == "AlexNet":
        return {"tensors_file": str(EXPERIMENTS / "one_machine" / "alexnet.csv")}
    return {"preset": PRESETS.get(name, name), "dtype": "float32"}


_MACHINES = {
    "DGX-1, P100": {"file": str(EXPERIMENTS / "one_machine" / "p100.yaml")},
    "Google, K80": {"file": str(EXPERIMENTS / "one_machine" / "k80.yaml")},
    "Amazon, K80": {"file": str(EXPERIMENTS / "one_machine" / "k80.yaml")},
    "DGX-1, V100": {"preset": "v100x8-25gbit"},
    "DGX-1, V100 16 GB": {"preset": "v100x8-25gbit"},
    "DGX-1, V100 32 GB": {"preset": "v100x8-25gbit"},
    "DGX A100 80 GB": {"preset": "dgx-a100"},
}
_SYNC = {"kind": "sync"}


def _one_machine() -> Iterator[Training]:
    """Yield rows from one GPU to more of its machine."""
    published = _published("one_machine")

    def row(family: str, name: str, precision: str, batch: int, n_gpus: int, rates: tuple[float, float]) -> Training:
        sized = {**_MACHINES[family], "nodes": 1, "gpus_per_node": n_gpus}
        model = _model(name.split(" ")[0])
        return Training(family, name, precision, sized, model, _SYNC, batch, 1, rates[0], None, rates[1])

    for machine, models in published["tensorflow"]["machines"].items():
        for model, batches in models.items():
            for batch, rates in batches.items():
                for n_gpus, rate in list(zip(published["tensorflow"]["gpus"], rates, strict=True))[1:]:
                    yield row(machine, f"{model} {batch}", "single", int(batch), n_gpus, (rates[0], rate))
    batch_of = published["nvidia"]["batch"]
    for machine, by_kind in published["nvidia"]["machines"].items():
        for kind, (one, eight) in by_kind.items():
            precision = "mixed" if kind == "AMP" else "single"
            yield row(machine, f"ResNet-50 {kind}", precision, batch_of[kind], 8, (one, eight))
    for data in ("synthetic data", "ImageNet"):
        one, eight = published["tensorflow_2018"][data]
        yield row("DGX-1, V100", f"ResNet-50 {data}", "mixed", 256, 8, (one, eight))


_AWS_CLUSTER = {"preset": "v100x8-25gbit", "network": {"efficiency": 0.68}, "collectives": {"overhead": "8.4 us"}}
_HOROVOD = {"kind": "sync", "algorithm": "ring", "fusion": {"buffer": "64 MiB", "cycle": None}}


def _aws() -> Iterator[Training]:
    """Yield rows from a machine to several on AWS, also of users who had connections of 5 Gbit/s."""
    published = _published("aws_p3_scaling")
    users = {"AWS p3": published | {"model": "resnet50", "batch": 256}, **published["others"]}
    for user, of in users.items():
        rates = {int(n_gpus): float(rate) for n_gpus, rate in of["images_per_s"].items()}
        network = {"network": {"efficiency": of["network"]}} if "network" in of else {}
        buffer = {"fusion": {"buffer": f"{of['buffer_nbytes']} B", "cycle": None}} if "buffer_nbytes" in of else {}
        precision = "single" if user.startswith("horovod#396") else "mixed"
        for n_gpus, rate in rates.items():
            if n_gpus > 8:
                sized = {**_AWS_CLUSTER, **network, "nodes": n_gpus // 8, "gpus_per_node": 8}
                schedule = {**_HOROVOD, **buffer}
                yield Training(
                    f"AWS p3, {user}" if user != "AWS p3" else user,
                    of["model"],
                    precision,
                    sized,
                    _model(of["model"]),
                    schedule,
                    of["batch"],
                    1,
                    rates.get(1),
                    rates[8],
                    rate,
                )


def _horovod() -> Iterator[Training]:
    """Yield rows from one GPU to several machines of Horovod with NCCL."""
    published = _published("horovod_scaling")
    folder = EXPERIMENTS / "horovod_scaling"

    def row(family: str, model: str, file: str, n_gpus: int, rates: tuple[float, float]) -> Training:
        cluster = {"file": str(folder / file), "nodes": n_gpus // 4, "gpus_per_node": 4}
        return Training(family, model, "single", cluster, _model(model), _HOROVOD, 64, 1, rates[0], None, rates[1])

    one_gpu = published["one_gpu"]
    for network, system in (("tcp", "TCP Horovod NCCL"), ("rdma", "RDMA Horovod NCCL")):
        for model, rate in published["gpus_16"][system].items():
            yield row(f"Horovod {network.upper()}", model, f"cluster-{network}.yaml", 16, (one_gpu[model], rate))
    for n_gpus in (128, 512):
        for model, efficiency in published[f"gpus_{n_gpus}_rdma_efficiency"].items():
            rate = efficiency * n_gpus * one_gpu[model]
            yield row("Horovod RDMA", model, "cluster-rdma.yaml", n_gpus, (one_gpu[model], rate))
    large = published["gpus_64_40g"]
    for model, rate in large["TCP Horovod NCCL"].items():
        yield row("Horovod TCP 40G", model, "cluster-tcp-40g.yaml", 64, (large["one_gpu"][model], rate))


_GENERATIONS = {"a100": "ampere", "p4de": "ampere", "b200": "blackwell", "v100": "volta"}


def collective_rows() -> Iterator[Collective]:
    """Yield all rows of collectives.

    Where one process launches for all GPUs of a machine, the launch on this host is an input: the smallest all-reduce.
    """
    for is_one_process, rows in (*_own_collectives(), *_nccl_tables()):
        if not is_one_process:
            yield from rows
            continue
        smallest = min((each for each in rows if each.collective == "all_reduce"), key=lambda each: each.nbytes)
        launch_us = 1e6 * smallest.measured_s / smallest.cluster["gpus_per_node"]
        for row in rows:
            if row is not smallest:
                collectives = {**row.cluster.get("collectives", {}), "launch": f"{launch_us:.4g} us"}
                yield replace(row, cluster={**row.cluster, "collectives": collectives})


def _own_collectives() -> Iterator[tuple[bool, list[Collective]]]:
    """Yield the rows of a family, and whether one process launches them."""
    found: dict[str, list[Collective]] = {}
    for row in _read("collectives.csv"):
        family = families()["collectives"][row["family"]]
        if family["cluster"].get("preset", "ideal") not in presets.names("clusters"):
            continue
        if [row["collective"], int(row["nbytes"])] == family.get("input"):
            continue
        sizes = {"nodes": int(row["nodes"]), "gpus_per_node": int(row["gpus_per_node"])}
        found.setdefault(row["family"], []).append(
            Collective(
                family.get("family", row["family"]),
                family["generation"],
                row["collective"],
                family["cluster"] | sizes,
                "auto",
                int(row["nbytes"]),
                1e-6 * float(row["measured_us"]),
                family.get("how", ""),
            )
        )
    for name, rows in found.items():
        yield families()["collectives"][name].get("one_process", False), rows


def _nccl_tables() -> Iterator[tuple[bool, list[Collective]]]:
    folder = EXPERIMENTS / "nccl_tables"
    for name, table in _published("nccl_tables")["tables"].items():
        hardware = next((each for key, each in _GENERATIONS.items() if name.startswith(key)), "hopper")
        base = {"preset": table["preset"]} if "preset" in table else {"file": str(folder / table["cluster"])}
        stated = "nccl_version" in table
        version = {"collectives": {"nccl_version": table["nccl_version"]}} if stated else {}
        cluster = {**base, **version, "nodes": table["nodes"], "gpus_per_node": 8}
        algorithm = table.get("algorithm", "auto")
        yield (
            "launched_as" in table,
            [
                Collective(table["title"], hardware, "all_reduce", cluster, algorithm, nbytes, 1e-6 * measured_us)
                for nbytes, measured_us in table["rows_bytes_us"]
            ],
        )
