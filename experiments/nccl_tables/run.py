"""All-reduce of NCCL by size: what nccl-tests measured on four kinds of machines beside simulated times.

python experiments/nccl_tables/run.py           print the tables
python experiments/nccl_tables/run.py --write   write them into the README
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import median

from simdist.cost import Shared, price
from simdist.plan import AllReduce, Buffer, Group, Plan
from simdist.plan.ops import Algorithm
from simdist.report import page_command
from simdist.scenario import Cluster, Link, Tensor, Workload, load_cluster
from simdist.settings.units import format_nbytes

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
ITEM_NBYTES = 4  # nccl-tests reduce float
IDLE = Workload(tensors=(Tensor(name="none", count=1),), batch_size=1, forward_s=0.0)


@cache
def machines(name: str) -> Cluster:
    """Return the machines of a table."""
    return load_cluster(HERE / f"{name}.yaml")


def all_reduce_s(cluster: Cluster, nbytes: int, algorithm: Algorithm = "auto") -> float:
    """Return the seconds of an all-reduce over all GPUs; `auto` is what the simulator thinks that NCCL would take."""
    op = AllReduce("sum", Group(cluster.world_size), algorithm=algorithm)
    buffers = (Buffer("sum", nbytes // ITEM_NBYTES, initialized=True),)
    plan = Plan.from_steps("all-reduce", world_size=cluster.world_size, buffers=buffers, steps=[(op,)])
    cost = price(plan, cluster, IDLE).of[op]
    assert isinstance(cost, Shared)
    return float(cost.alone_s)


def table_rows(name: str, algorithm: Algorithm) -> Iterator[tuple[int, float, float]]:
    """Yield bytes, published and simulated seconds of a table by size."""
    for nbytes, published_us in PUBLISHED[name]["rows_bytes_us"]:
        yield nbytes, 1e-6 * published_us, all_reduce_s(machines(name), nbytes, algorithm)


def latency_rows(algorithm: Algorithm) -> Iterator[tuple[int, float, float]]:
    """Yield GPUs, published and simulated seconds of an all-reduce of 8 B over EFA."""
    cluster = machines("v100-efa")
    for n_gpus, published_us in PUBLISHED["v100-efa"]["gpus_us"].items():
        nodes = int(n_gpus) // cluster.gpus_per_node
        larger = cluster.model_copy(update={"nodes": nodes})
        yield int(n_gpus), 1e-6 * published_us, all_reduce_s(larger, 8, algorithm)


def busbw_Bps(cluster: Cluster, nbytes: int, seconds: float) -> float:
    """Return the bandwidth that nccl-tests call bus bandwidth: 2 (n - 1) / n of the bytes over the time."""
    n = cluster.world_size
    return 2 * (n - 1) / n * nbytes / seconds


TAKEN: dict[str, tuple[Algorithm, ...]] = {"a100-nvlink": ("ring",), "a100-efa": ("auto", "ring", "double_tree")}
"""Algorithms that a table is compared with: inside a machine NCCL has no trees, and `auto` is the ring."""


def size_table(name: str) -> Iterator[str]:
    """Yield the time of every size by each algorithm, and the published bus bandwidth."""
    algorithms = TAKEN[name]
    yield f"| bytes | published, us | busbw, GB/s | {' | '.join(f'{each}, us | error' for each in algorithms)} |"
    yield "|---|---|---|" + "---|---|" * len(algorithms)
    for rows in zip(*(table_rows(name, algorithm) for algorithm in algorithms), strict=True):
        nbytes, published_s, _ = rows[0]
        cells = " | ".join(f"{1e6 * ours_s:.1f} | {ours_s / published_s - 1:+.0%}" for _, _, ours_s in rows)
        bandwidth = 1e-9 * busbw_Bps(machines(name), nbytes, published_s)
        yield f"| {nbytes} | {1e6 * published_s:.1f} | {bandwidth:.2f} | {cells} |"


def latency_table() -> Iterator[str]:
    """Yield the time of 8 B over EFA by number of GPUs."""
    algorithms: tuple[Algorithm, ...] = ("auto", "ring", "double_tree")
    yield f"| GPUs | published, us | {' | '.join(f'{each}, us | error' for each in algorithms)} |"
    yield "|---|---|" + "---|---|" * len(algorithms)
    for rows in zip(*map(latency_rows, algorithms), strict=True):
        n_gpus, published_s, _ = rows[0]
        cells = " | ".join(f"{1e6 * ours_s:.1f} | {ours_s / published_s - 1:+.1%}" for _, _, ours_s in rows)
        yield f"| {n_gpus} | {1e6 * published_s:.1f} | {cells} |"


def tcp_table() -> Iterator[str]:
    """Yield the bus bandwidth over TCP on 100 Gbit/s."""
    low, high = PUBLISHED["v100-tcp"]["busbw_GBps"]
    cluster = machines("v100-tcp")
    yield "| bytes | published busbw, GB/s | simulated |"
    yield "|---|---|---|"
    for exponent in range(23, 28):
        ours = 1e-9 * busbw_Bps(cluster, 2**exponent, all_reduce_s(cluster, 2**exponent))
        yield f"| {2**exponent} | {low} to {high} | {ours:.2f} |"


RANGES = {"below 64 KiB": (0, 2**16), "64 KiB to 32 MiB": (2**16, 2**25), "32 MiB and more": (2**25, 2**62)}
"""Title -> smallest size, and the size that is too large."""


def errors(name: str, algorithm: Algorithm, sizes: tuple[int, int]) -> list[float]:
    """Return the errors of a table's sizes from the first to below the second."""
    rows = table_rows(name, algorithm)
    return [ours_s / published_s - 1 for nbytes, published_s, ours_s in rows if sizes[0] <= nbytes < sizes[1]]


def summary_table() -> Iterator[str]:
    """Yield median and largest error of each range of sizes."""
    yield f"| machines | algorithm | {' | '.join(f'{title}: median | largest' for title in RANGES)} |"
    yield "|---|---|" + "---|---|" * len(RANGES)
    for name, algorithms in TAKEN.items():
        for algorithm in algorithms:
            found = (errors(name, algorithm, sizes) for sizes in RANGES.values())
            cells = " | ".join(f"{median(each):+.0%} | {max(each, key=abs):+.0%}" for each in found)
            yield f"| {name} | {algorithm} | {cells} |"


def with_link(cluster: Cluster, link: str, update: Callable[[Link], dict[str, float]]) -> Cluster:
    """Give the cluster another link, `fabric` or `network`."""
    old: Link = {"fabric": cluster.fabric, "network": cluster.network}[link]
    return cluster.model_copy(update={link: old.model_copy(update=update(old))})


KNOBS: dict[str, Callable[[Cluster], Cluster]] = {
    "NVLink latency": lambda cluster: with_link(cluster, "fabric", lambda old: {"latency_s": 1.1 * old.latency_s}),
    "NVLink efficiency": lambda cluster: with_link(cluster, "fabric", lambda old: {"efficiency": 1.1 * old.efficiency}),
    "network latency": lambda cluster: with_link(cluster, "network", lambda old: {"latency_s": 1.1 * old.latency_s}),
    "network efficiency": lambda cluster: with_link(
        cluster, "network", lambda old: {"efficiency": old.efficiency / 1.1}
    ),
    "overhead of a collective": lambda cluster: cluster.model_copy(
        update={"collective_overhead_s": 1.1 * cluster.collective_overhead_s}
    ),
}
"""Settings of the a100-efa machines that are changed by a tenth."""


def knobs_table() -> Iterator[str]:
    """Yield by how much the time of three sizes changes when a value changes by a tenth."""
    cases: tuple[tuple[int, Algorithm], ...] = ((8, "ring"), (2**20, "ring"), (2**30, "double_tree"))
    cluster = machines("a100-efa")
    titles = (f"{format_nbytes(nbytes)}, {algorithm}" for nbytes, algorithm in cases)
    yield f"| changed by a tenth | {' | '.join(titles)} |"
    yield "|---|" + "---|" * len(cases)
    for name, change in KNOBS.items():
        changes = (all_reduce_s(change(cluster), *case) / all_reduce_s(cluster, *case) - 1 for case in cases)
        yield f"| {name} | {' | '.join(f'{each:+.1%}' for each in changes)} |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    sized = {name: "\n".join(size_table(name)) for name in TAKEN}
    others = {"summary": summary_table, "latency": latency_table, "tcp": tcp_table, "knobs": knobs_table}
    return {**sized, **{name: "\n".join(table()) for name, table in others.items()}}


def main() -> None:
    """Run the experiment."""
    page_command(__doc__ or "", HERE / "README.md", tables)


if __name__ == "__main__":
    main()
