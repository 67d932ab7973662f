"""Bandwidth between data centers that DiLoCo and its stream need: published by another simulation, beside this one's.

python experiments/streaming_diloco/run.py           print the tables
python experiments/streaming_diloco/run.py --write   write them into the README
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from simdist.cost import price
from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.plan import Plan
from simdist.report import markdown_table, page_command
from simdist.scenario.cluster import Cluster, Device, Link
from simdist.scenario.workload import Tensor, Workload
from simdist.schedules import Job, Schedule, Sync
from simdist.schedules.diloco import DiLoCo

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
UTILIZATIONS: list[float] = PUBLISHED["utilization"]
METHODS = [name for name, value in PUBLISHED["models"]["1B"].items() if isinstance(value, list)]
PERIOD = 100
GRID = [10 ** (-1 + 4 * number / 49) for number in range(50)]
"""Gbit/s: the published numbers are points of this scale, rounded; each is the first that suffices."""
REACH = (1e-3, 1e5)
"""Gbit/s between which the answer is sought."""


@dataclass(frozen=True)
class Line:
    """Bandwidth for a compute utilization, in Gbit/s: as published, and as needed here."""

    model: str
    method: str
    utilization: float
    published: float
    needed: float

    @property
    def on_grid(self) -> float:
        """The first point of the published scale that suffices."""
        return next(point for point in GRID if point >= self.needed)

    @property
    def error(self) -> float:
        """Relative, of the point on the grid."""
        return self.on_grid / self.published - 1


def schedule_of(method: str, model: dict[str, float]) -> Schedule:
    """Return what a method does; every tensor is a layer."""
    if method == "Data-Parallel":
        return Sync(first_bucket_nbytes=1, bucket_nbytes=1)
    if method == "Vanilla DiLoCo":
        return DiLoCo(period=PERIOD, synchronize=False)
    overlap_steps = 1 if "overlapped" in method else 0
    return DiLoCo(
        period=PERIOD,
        fragments=int(model["fragments"]),
        layers=int(model["layers"]),
        overlap_steps=overlap_steps,
        synchronize=False,
    )


def plan_of(method: str, model: dict[str, float]) -> tuple[Plan, Workload]:
    """Return three periods of a method on two replicas, and what is trained.

    Four bits are a quarter of as many numbers of 16: nothing here depends on how they are stored.
    """
    n_layers, step_s = int(model["layers"]), model["step_s"]
    count = round(model["parameters"] / n_layers / (4 if "FP4" in method else 1))
    workload = Workload(
        tensors=tuple(Tensor(name=f"layer {number}", count=count, flops=1.0) for number in range(n_layers)),
        batch_size=1,
        dtype="bfloat16",
        forward_s=step_s / 3,
        backward_s=2 * step_s / 3,
        optimize_s=0.0,
    )
    schedule = schedule_of(method, model)
    n_steps = 3 * schedule.period + schedule.overlap_steps if isinstance(schedule, DiLoCo) else 10
    job = Job(2, 1, n_steps, tensor_counts=workload.tensor_counts, dtype="bfloat16", run_ahead_steps=None)
    return schedule.plan(job), workload


def utilization(plan: Plan, workload: Workload, gbit_per_s: float) -> float:
    """Return the share of the time that passes in computing, with so much bandwidth between two data centers."""
    network = Link(latency_s=0.0, bandwidth_Bps=gbit_per_s * 1e9 / 8)
    cluster = Cluster(
        nodes=2,
        gpus_per_node=1,
        fabric=Link.ideal(),
        network=network,
        device=Device(memory_bandwidth_Bps=math.inf),
    )
    trace = run(plan, price(plan, cluster, workload), {}, observe=WholeTrace(), engine="fast")
    return plan.n_steps * (workload.forward_s + workload.backward_s) / trace.makespan_s


def needed(plan: Plan, workload: Workload, wanted: float) -> float:
    """Return the least bandwidth for a utilization, in Gbit/s, to a thousandth."""
    low, high = REACH
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if utilization(plan, workload, middle) >= wanted else (middle, high)
    return high


@cache
def lines() -> list[Line]:
    """Simulate every row."""
    found = []
    for name, model in PUBLISHED["models"].items():
        for method in METHODS:
            plan, workload = plan_of(method, model)
            for wanted, published in zip(UTILIZATIONS, model[method], strict=True):
                found.append(Line(name, method, wanted, published, needed(plan, workload, wanted)))
    return found


def rows() -> Iterator[str]:
    """Yield the rows of the table of bandwidths."""
    yield "| model | method | utilization | published, Gbit/s | needed here | on the published grid | error |"
    for each in lines():
        yield (
            f"| {each.model} | {each.method} | {each.utilization:.0%} | {each.published} | {each.needed:.3g} | "
            f"{each.on_grid:.3g} | {each.error:+.0%} |"
        )


def reductions() -> Iterator[str]:
    """Yield the rows of how much less bandwidth a method needs than data parallelism."""
    yield "| model | method | utilization | published | here | error |"
    of = {(each.model, each.method, each.utilization): each for each in lines()}
    for each in lines():
        if each.method != "Data-Parallel" and each.utilization in (0.5, 0.8, 0.95):
            whole = of[each.model, "Data-Parallel", each.utilization]
            published, here = whole.published / each.published, whole.needed / each.needed
            yield (
                f"| {each.model} | {each.method} | {each.utilization:.0%} | {published:.0f} x | {here:.0f} x | "
                f"{here / published - 1:+.0%} |"
            )


def summary() -> Iterator[str]:
    """Yield how far off each method is."""
    yield "| method | rows | median error | at utilizations up to 90 % | at 95 and 99 % |"
    for method in METHODS:
        own = [each for each in lines() if each.method == method]
        low = [abs(each.error) for each in own if each.utilization <= 0.9]
        high = [abs(each.error) for each in own if each.utilization > 0.9]
        every = median([*low, *high])
        yield f"| {method} | {len(own)} | {every:.0%} | {median(low):.0%} | {median(high):.0%} |"


def tables() -> dict[str, str]:
    """Return the tables of the README by name."""
    return {
        name: markdown_table(of())
        for name, of in (("summary", summary), ("bandwidth", rows), ("reduction", reductions))
    }


if __name__ == "__main__":
    page_command(__doc__ or "", HERE / "README.md", tables)
