"""Global top-k over 1 Gbit/s Ethernet: published throughput, simulated.

    python experiments/gtopk_1gbe/run.py              print published beside simulated
    python experiments/gtopk_1gbe/run.py --write      write them into the README

Published: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth
Networks, ICDCS 2019, arXiv 1901.04359; the numbers are those that its plots are made of,
scripts/icdcs2019/communication.py in github.com/hclhkbu/gtopkssgd.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from simdist.cost.plain import plain_ring_s
from simdist.report import markdown_table, page_command
from simdist.scenario import Scenario, Tensor, load
from simdist.studies.comparison import compare

HERE = Path(__file__).parent
WORKERS = (4, 8, 16, 32)
SCHEDULES = ("dense", "topk", "gtopk")


@dataclass(frozen=True)
class Published:
    """Measured speed of a model, in samples per second and GPU.

    Args:
        n_parameters: Of the model.
        batch_size: Samples per GPU and step.
        alone: Of one worker.
        together: Schedule -> of 4, 8, 16 and 32 workers.
    """

    n_parameters: int
    batch_size: int
    alone: float
    together: dict[str, tuple[float, ...]]

    def beyond_computing_s(self, schedule: str, n_workers: int) -> float:
        """Return the seconds of a step beyond those of one worker by itself."""
        return self.batch_size / self.together[schedule][WORKERS.index(n_workers)] - self.batch_size / self.alone


PUBLISHED = {
    "VGG-16": Published(
        n_parameters=14_728_266,
        batch_size=128,
        alone=1317.333,
        together={
            "dense": (104.2, 92.56, 39.48, 12.6),
            "topk": (110.576, 109.9, 97.865, 63.002),
            "gtopk": (131.06, 130.551, 126.434, 123.2),
        },
    ),
    "ResNet-50": Published(
        n_parameters=25_557_032,
        batch_size=256,
        alone=52.873,
        together={
            "dense": (39.002, 36.989, 23.176, 10.721),
            "topk": (37.729, 35.703, 34.495, 30.583),
            "gtopk": (39.795, 39.713, 39.06, 39.119),
        },
    ),
    "ResNet-20": Published(
        n_parameters=269_722,
        batch_size=128,
        alone=920.632,
        together={
            "dense": (821.7, 705.2, 520.4, 287.9),
            "topk": (908.837, 752.985, 737.594, 696.029),
            "gtopk": (916.26, 868.73, 808.5, 789.3),
        },
    ),
}
"""The models that are compared."""
ALEXNET = Published(
    n_parameters=61_100_840,
    batch_size=64,
    alone=173.469,
    together={
        "dense": (14.01, 12.118, 4.936, 1.234),
        "topk": (14.238, 13.865, 13.352, 9.236),
        "gtopk": (16.536, 16.446, 16.359, 15.777),
    },
)
"""Another model of the same source. It is not compared: what programs and network take beside is read off its rows."""

DENSITY = 1e-3
LATENCY_S, S_PER_BYTE = 0.436e-3, 9e-9  # scripts/icdcs2019/communication.py, as in cluster.yaml
TOPK_S = (
    2.18896957e-10  # torch.topk of x elements on a P102-100 takes so much times x log2 x (HKBU-HPML/OMGS-SGD, utils.py)
)


def selection_s(n_parameters: int) -> float:
    """Return the measured time of an exact top-k on the GPU of the published runs."""
    return TOPK_S * n_parameters * math.log2(n_parameters)


SCENARIOS = {name: load(HERE / f"{name.lower().replace('-', '')}.yaml") for name in PUBLISHED}


def step_s(scenario: Scenario, n_workers: int) -> dict[str, float]:
    """Return schedule -> seconds per step of computing, selection and network."""
    cluster = scenario.cluster.model_copy(update={"nodes": n_workers})
    select_s = selection_s(sum(scenario.workload.tensor_counts))
    rows = compare(scenario.changed(cluster=cluster), baseline="dense", n_seeds=1)
    return {row.schedule: row.step_s + (0.0 if row.schedule == "dense" else select_s) for row in rows}


@cache
def beside_s(n_workers: int) -> dict[str, float]:
    """Return schedule -> what a step of AlexNet took longer than simulated, seconds per parameter.

    It holds what its program does on the host, and what its network took longer than messages of one worker do.
    """
    step = ALEXNET.batch_size / ALEXNET.alone
    base = SCENARIOS["VGG-16"]
    tensors = (Tensor(name="all", count=ALEXNET.n_parameters),)
    workload = base.workload.model_copy(update={"tensors": tensors, "forward_s": step / 3, "backward_s": step * 2 / 3})
    simulated_s = step_s(base.changed(workload=workload), n_workers)
    return {
        schedule: (step + ALEXNET.beyond_computing_s(schedule, n_workers) - simulated_s[schedule])
        / ALEXNET.n_parameters
        for schedule in SCHEDULES
    }


@dataclass(frozen=True)
class Line:
    """A row of the table, in samples per second and GPU; `ring` is the plain formula of a dense all-reduce."""

    model: str
    schedule: str
    n_workers: int
    published: float
    simulated: float
    with_host: float
    ring: float | None


def lines() -> Iterator[Line]:
    """Yield what was published, what is simulated, and that with what AlexNet's runs took beside it."""
    for model, published in PUBLISHED.items():
        simulated_s = {n: step_s(SCENARIOS[model], n) for n in WORKERS}
        base = SCENARIOS[model]
        clusters = {n: base.cluster.model_copy(update={"nodes": n}) for n in WORKERS}
        rings = {n: published.batch_size / plain_ring_s(base.workload, clusters[n]) for n in WORKERS}
        for schedule in SCHEDULES:
            for n, rate in zip(WORKERS, published.together[schedule], strict=True):
                seconds = simulated_s[n][schedule]
                with_host_s = seconds + beside_s(n)[schedule] * published.n_parameters
                samples = published.batch_size
                ring = rings[n] if schedule == "dense" else None
                yield Line(model, schedule, n, rate, samples / seconds, samples / with_host_s, ring)


def published_table() -> Iterator[str]:
    """Yield published and simulated throughput, and the errors."""
    headings = ("published", "simulated", "error", "with AlexNet's rest", "error", "linear", "plain ring")
    yield f"| model | schedule | GPUs | {' | '.join(headings)} |"
    for line in lines():
        rates = (line.simulated, line.with_host, PUBLISHED[line.model].alone, line.ring)
        simulated, host, linear, ring = (f"{rate / line.published - 1:+.0%}" if rate else "" for rate in rates)
        yield (
            f"| {line.model} | {line.schedule} | {line.n_workers} | {line.published:.1f} | {line.simulated:.1f} "
            f"| {simulated} | {line.with_host:.1f} | {host} | {linear} | {ring} |"
        )


def per_parameter_table() -> Iterator[str]:
    """Yield the published time beyond computing, over the number of parameters."""
    yield "| schedule | model | " + " | ".join(f"{n} GPUs" for n in WORKERS) + " |"
    for schedule in SCHEDULES:
        for model, published in (*PUBLISHED.items(), ("AlexNet", ALEXNET)):
            times_ns = (1e9 * published.beyond_computing_s(schedule, n) / published.n_parameters for n in WORKERS)
            yield f"| {schedule} | {model} | " + " | ".join(f"{time_ns:.0f}" for time_ns in times_ns) + " |"


def rest_table() -> Iterator[str]:
    """Yield what AlexNet's runs took beside what is simulated, per parameter."""
    yield "| schedule | " + " | ".join(f"{n} GPUs" for n in WORKERS) + " |"
    for schedule in SCHEDULES:
        yield f"| {schedule} | " + " | ".join(f"{1e9 * beside_s(n)[schedule]:.0f}" for n in WORKERS) + " |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {
        "published": markdown_table(published_table()),
        "per parameter": markdown_table(per_parameter_table()),
        "rest": markdown_table(rest_table()),
    }


def main() -> None:
    """Run the experiment."""
    page_command(str(__doc__), HERE / "README.md", tables)


if __name__ == "__main__":
    main()
