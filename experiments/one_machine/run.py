"""From one GPU to all of a machine: published rates beside simulated ones.

python experiments/one_machine/run.py           print the tables
python experiments/one_machine/run.py --write   write them into the README
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from simdist.cost.plain import linear_s, plain_ring_s
from simdist.report import markdown_table, page_command
from simdist.runs.building import simulate
from simdist.scenario import Interference, Scenario, Workload, load, load_cluster, load_workload, presets

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
CLUSTERS = {
    "DGX-1, P100": HERE / "p100.yaml",
    "Google, K80": HERE / "k80.yaml",
    "Amazon, K80": HERE / "k80.yaml",
    "DGX-1, V100": presets.path("clusters", "v100x8-25gbit"),
    "DGX-1, V100 16 GB": presets.path("clusters", "v100x8-25gbit"),
    "DGX-1, V100 32 GB": presets.path("clusters", "v100x8-25gbit"),
    "DGX A100 80 GB": presets.path("clusters", "dgx-a100"),
}
MODELS = {"InceptionV3": "inception-v3", "ResNet-50": "resnet50", "ResNet-152": "resnet152", "VGG16": "vgg16"}
PRECISIONS = {"single": "single precision", "mixed": "mixed precision"}


@dataclass(frozen=True)
class Lost:
    """What a machine loses, as shares of forward and backward seconds.

    Args:
        least: Nothing may be lost.
        median: Of the machines whose rates are not compared.
        most: What 95 % of them, of both precisions, lose or less.
    """

    least: float
    median: float
    most: float


def lost_elsewhere(precision: str) -> list[float]:
    """Return what 8 GPUs of one machine took longer than one, as a share, for models that are not compared."""
    pairs = (pair for rows in PUBLISHED["others"][precision].values() for pair in rows)
    return [8 * one / eight - 1 for one, eight in pairs]


@cache
def lost(precision: str) -> Lost:
    """Return what is lost in `single` or `mixed` precision."""
    every = [share for each in PRECISIONS for share in lost_elsewhere(each)]
    return Lost(0.0, float(np.median(lost_elsewhere(precision))), float(np.quantile(every, 0.95)))


@dataclass(frozen=True)
class Row:
    """A published rate, in samples per second of all GPUs.

    Args:
        machine: Key of `CLUSTERS`.
        model: Name.
        precision: `single` or `mixed`.
        batch_size: Per GPU.
        n_gpus: That train.
        one_gpu: Rate of one GPU, an input.
        published: Rate of all.
        note: What else tells the row from others.
    """

    machine: str
    model: str
    precision: str
    batch_size: int
    n_gpus: int
    one_gpu: float
    published: float
    note: str = ""

    def scenario(self) -> Scenario:
        """Return the training, at the rate of one GPU."""
        base, step_s = load(HERE / "scenario.yaml"), self.batch_size / self.one_gpu
        update = {"nodes": 1, "gpus_per_node": self.n_gpus}
        cluster = load_cluster(CLUSTERS[self.machine]).model_copy(update=update)
        times = {"forward_s": step_s / 3, "backward_s": step_s * 2 / 3, "optimize_s": 0.0}
        workload = model(self.model).model_copy(update={"batch_size": self.batch_size, **times})
        return base.changed(cluster=cluster, workload=workload)

    def rate(self, step_s: float) -> float:
        """Return the samples per second of steps of that length."""
        return self.n_gpus * self.batch_size / step_s

    def simulated(self, lost: float) -> float:
        """Return the simulated rate if a share of forward and backward is lost."""
        scenario = self.scenario().changed(disturbances=[Interference(lost=lost, noise=0.0)], uncertain={})
        return self.rate(simulate(scenario).makespan_s / scenario.steps)


@cache
def model(name: str) -> Workload:
    """Return a model; TensorFlow's benchmark trains Inception V3 without its auxiliary classifier."""
    if name in MODELS:
        whole = load_workload(presets.path("workloads", MODELS[name]))
        tensors = tuple(tensor for tensor in whole.tensors if not tensor.name.startswith("auxiliary."))
        return whole.model_copy(update={"tensors": tensors})
    return Workload.model_validate({"tensors_file": str(HERE / "alexnet.csv"), "batch_size": 512, "forward_s": 1.0})


def rows_of_tensorflow() -> Iterator[Row]:
    """Yield the rows of P100 and K80."""
    gpus = PUBLISHED["tensorflow"]["gpus"]
    for machine, models in PUBLISHED["tensorflow"]["machines"].items():
        for name, batches in models.items():
            for batch, rates in batches.items():
                for n_gpus, rate in list(zip(gpus, rates, strict=True))[1:]:
                    yield Row(machine, name, "single", int(batch), n_gpus, rates[0], rate)


def rows_of_tensor_cores() -> Iterator[Row]:
    """Yield the rows of ResNet-50 on V100 and A100."""
    batch = PUBLISHED["nvidia"]["batch"]
    for machine, rates in PUBLISHED["nvidia"]["machines"].items():
        for kind, (one, eight) in rates.items():
            precision = "mixed" if kind == "AMP" else "single"
            yield Row(machine, "ResNet-50", precision, batch[kind], 8, one, eight, kind)
    for data in ("synthetic data", "ImageNet"):
        one, eight = PUBLISHED["tensorflow_2018"][data]
        yield Row("DGX-1, V100", "ResNet-50", "mixed", 256, 8, one, eight, f"TensorFlow, {data}")


@dataclass(frozen=True)
class Line:
    """A row with what formulas and the simulator say."""

    row: Row
    linear: float
    ring: float
    simulated: float
    interval: tuple[float, float]

    @property
    def is_inside(self) -> bool:
        """Whether the published rate is in the interval."""
        return self.interval[0] <= self.row.published <= self.interval[1]

    def error(self, rate: float) -> float:
        """Return how much more a rate is than the published one, as a share."""
        return rate / self.row.published - 1


def line(row: Row) -> Line:
    """Compute a row."""
    scenario, known = row.scenario(), lost(row.precision)
    linear, ring = (row.rate(of(scenario.workload, scenario.cluster)) for of in (linear_s, plain_ring_s))
    ends = row.simulated(known.most), row.simulated(known.least)
    return Line(row, linear, ring, row.simulated(known.median), ends)


@cache
def lines(of: str) -> list[Line]:
    """Compute all rows of a table."""
    return [line(row) for row in (rows_of_tensorflow() if of == "tensorflow" else rows_of_tensor_cores())]


def cells(each: Line) -> str:
    """Return what every table shows of a row."""
    inside = "yes" if each.is_inside else "no"
    errors = (each.error(rate) for rate in (each.linear, each.ring, each.simulated))
    low, high = each.interval
    return (
        f"{each.row.published:.0f} | {each.simulated:.0f} | {' | '.join(f'{error:+.1%}' for error in errors)} "
        f"| {low:.0f} - {high:.0f} | {inside} |"
    )


HEADINGS = "published, samples/s | simulated | linear | plain ring | error | interval | inside |"


def tensor_cores_table() -> Iterator[str]:
    """Yield the rows of V100 and A100."""
    yield f"| machine | ResNet-50 | {HEADINGS}"
    for each in lines("tensor cores"):
        yield f"| {each.row.machine} | {each.row.note} | {cells(each)}"


def tensorflow_table() -> Iterator[str]:
    """Yield the rows of P100 and K80."""
    yield f"| machine | model, batch | GPUs | {HEADINGS}"
    for each in lines("tensorflow"):
        row = each.row
        yield f"| {row.machine} | {row.model}, {row.batch_size} | {row.n_gpus} | {cells(each)}"


def lost_table() -> Iterator[str]:
    """Yield what machines lose with models that are not compared."""
    yield "| | machines and models | least | median | 95 % lose less than | most |"
    for precision, name in PRECISIONS.items():
        yield _lost_row(name, lost_elsewhere(precision))
    yield _lost_row("both", [share for each in PRECISIONS for share in lost_elsewhere(each)])


def _lost_row(name: str, shares: list[float]) -> str:
    shown = (min(shares), float(np.median(shares)), float(np.quantile(shares, 0.95)), max(shares))
    return f"| {name} | {len(shares)} | {' | '.join(f'{share:.1%}' for share in shown)} |"


def summary() -> Iterator[str]:
    """Yield how near the formulas and the simulator come, by family."""
    yield "| rows | median error: linear | plain ring | simulated | worst | within 10 % | inside the interval |"
    families = {
        "V100 and A100, single precision": [e for e in lines("tensor cores") if e.row.precision == "single"],
        "V100, A100, mixed precision": [e for e in lines("tensor cores") if e.row.precision == "mixed"],
        **{
            name: [e for e in lines("tensorflow") if e.row.machine == name]
            for name in PUBLISHED["tensorflow"]["machines"]
        },
    }
    for name, each in families.items():
        medians = (np.median([abs(e.error(getattr(e, of))) for e in each]) for of in ("linear", "ring", "simulated"))
        worst = max((e.error(e.simulated) for e in each), key=abs)
        near = sum(abs(e.error(e.simulated)) <= 0.1 for e in each)
        yield (
            f"| {name} | {' | '.join(f'{median:.1%}' for median in medians)} | {worst:+.1%} "
            f"| {near} of {len(each)} | {sum(e.is_inside for e in each)} of {len(each)} |"
        )


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {
        "summary": markdown_table(summary()),
        "lost": markdown_table(lost_table()),
        "tensor cores": markdown_table(tensor_cores_table()),
        "tensorflow": markdown_table(tensorflow_table()),
    }


def main() -> None:
    """Run the experiment."""
    page_command(__doc__ or "", HERE / "README.md", tables)


if __name__ == "__main__":
    main()
