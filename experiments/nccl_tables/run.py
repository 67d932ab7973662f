"""All-reduce of NCCL by size: what nccl-tests measured on twelve kinds of machines beside simulated times.

python experiments/nccl_tables/run.py           print the tables
python experiments/nccl_tables/run.py --write   write them into the README
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.stats import t as student

from simdist.cost import Shared, price
from simdist.plan import AllReduce, Buffer, Group, Plan
from simdist.plan.ops import Algorithm
from simdist.report import markdown_table, page_command
from simdist.scenario import Cluster, Link, Tensor, Workload, load_cluster, presets
from simdist.settings.units import format_nbytes

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
TABLES: dict[str, dict[str, Any]] = PUBLISHED["tables"]
ITEM_NBYTES = 4  # nccl-tests reduce float
NEAR, N_TABLES = 4.0, 3
IDLE = Workload(tensors=(Tensor(name="none", count=1),), batch_size=1, forward_s=0.0)


@cache
def machines(name: str) -> Cluster:
    """Return the machines of a table: a preset, or a file here."""
    if name not in TABLES:
        return load_cluster(HERE / f"{name}.yaml")
    table = TABLES[name]
    file = presets.path("clusters", table["preset"]) if "preset" in table else HERE / table["cluster"]
    return load_cluster(file).model_copy(update={"nodes": table["nodes"]})


def all_reduce_s(cluster: Cluster, nbytes: int, algorithm: Algorithm = "auto") -> float:
    """Return the seconds of an all-reduce over all GPUs; `auto` is what the simulator thinks that NCCL would take."""
    op = AllReduce("sum", Group(cluster.world_size), algorithm=algorithm)
    buffers = (Buffer("sum", nbytes // ITEM_NBYTES, initialized=True),)
    plan = Plan.from_steps("all-reduce", world_size=cluster.world_size, buffers=buffers, steps=[(op,)])
    cost = price(plan, cluster, IDLE).of[op]
    assert isinstance(cost, Shared)
    return float(cost.alone_s)


def plain_s(cluster: Cluster, nbytes: int) -> float:
    """Return the seconds of one ring over links by their data sheets: 2 (n - 1) latencies, 2 (n - 1) / n bytes."""
    n = cluster.world_size
    links_Bps = [cluster.fabric.bandwidth_Bps]
    hop_s = cluster.fabric.latency_s
    if cluster.nodes > 1:
        links_Bps.append(cluster.topology.nics_per_node * cluster.network.bandwidth_Bps)
        hop_s = cluster.network.latency_s
    return 2 * (n - 1) * hop_s + 2 * (n - 1) / n * nbytes / min(links_Bps)


def launches_s(name: str, nbytes: int) -> float:
    """Return the seconds in which one thread launches a call's kernels on all GPUs of a machine; 0 with a process each.

    NCCL takes a channel of LL for each 512 threads x 8 B x GPUs, 24 at most, and prepared the work of each one by one
    until it went with the kernel's arguments. The time with one channel is an input: the table's first row. What a
    further one takes of it is told by the other such table, from one channel to 16.
    """
    if "launched_as" not in TABLES[name]:
        return 0.0
    channel_nbytes = 512 * 8 * machines(name).gpus_per_node
    first_us, other = TABLES[name]["rows_bytes_us"][0][1], dict(TABLES[TABLES[name]["launched_as"]]["rows_bytes_us"])
    further = (other[16 * channel_nbytes] / other[channel_nbytes] - 1) / 15
    return float(1e-6 * first_us * (1 + further * (min(24, math.ceil(nbytes / channel_nbytes)) - 1)))


def is_input(name: str, nbytes: int) -> bool:
    """Whether a row of a table is an input."""
    return "launched_as" in TABLES[name] and nbytes == TABLES[name]["rows_bytes_us"][0][0]


def simulated_s(name: str, nbytes: int, cluster: Cluster | None = None) -> float:
    """Return the seconds between calls: that of the GPUs, or of their launches if these take longer."""
    gpus_s = all_reduce_s(cluster or machines(name), nbytes, TABLES[name].get("algorithm", "auto"))
    return max(gpus_s, launches_s(name, nbytes))


@cache
def table_rows(name: str) -> list[tuple[int, float, float, float]]:
    """Return bytes, published, plain and simulated seconds of a table by size."""
    return [
        (nbytes, 1e-6 * published_us, plain_s(machines(name), nbytes), simulated_s(name, nbytes))
        for nbytes, published_us in TABLES[name]["rows_bytes_us"]
    ]


@cache
def model_errors(name: str, nbytes: int) -> list[list[float]]:
    """Return log(published / simulated) of rows of other tables, of one machine or of several like this one.

    They are those of up to `NEAR` times the size, or as little, by table; of `N_TABLES` at least, from farther if need
    be. Two clusters that carry a third of their like are left out.
    """
    alike = [other for other in TABLES if (TABLES[other]["nodes"] > 1) == (TABLES[name]["nodes"] > 1)]
    found: list[list[float]] = []
    near = NEAR
    while len(found) < N_TABLES:
        every = (
            [
                math.log(published_s / ours_s)
                for other_nbytes, published_s, _, ours_s in table_rows(other)
                if 1 / near <= other_nbytes / nbytes <= near and not is_input(other, other_nbytes)
            ]
            for other in alike
            if other not in {name, *SLOW}
        )
        found, near = [each for each in every if each], 2 * near
    return found


@cache
def interval_s(name: str, nbytes: int) -> tuple[float, float]:
    """Return the seconds between which a row of a further table would lie with 95 %, by how far off other tables are.

    Tables differ by their means, and rows within a table: with few tables, the quantile is Student's (the prediction
    interval of random effects; Higgins, Thompson, Spiegelhalter, J. R. Stat. Soc. A 172, 2009).
    """
    tables = model_errors(name, nbytes)
    means = [float(np.mean(each)) for each in tables]
    within = np.concatenate([np.array(each) - mean for each, mean in zip(tables, means, strict=True)])
    spread = math.sqrt(float(np.var(means, ddof=1)) * (1 + 1 / len(means)) + float(np.mean(within**2)))
    most = float(student.ppf(0.975, len(means) - 1)) * spread
    ours_s, middle = simulated_s(name, nbytes), float(np.mean(means))
    return ours_s * math.exp(min(middle - most, 0.0)), ours_s * math.exp(max(middle + most, 0.0))


def is_inside(name: str, nbytes: int, published_s: float) -> bool:
    """Whether a published time is in its interval."""
    low, high = interval_s(name, nbytes)
    return low <= published_s <= high


def latency_rows() -> Iterator[tuple[int, float, float]]:
    """Yield GPUs, published and simulated seconds of an all-reduce of 8 B over EFA."""
    cluster = machines("v100-efa")
    for n_gpus, published_us in PUBLISHED["v100-efa"]["gpus_us"].items():
        larger = cluster.model_copy(update={"nodes": int(n_gpus) // cluster.gpus_per_node})
        yield int(n_gpus), 1e-6 * published_us, all_reduce_s(larger, 8)


def busbw_Bps(cluster: Cluster, nbytes: int, seconds: float) -> float:
    """Return the bandwidth that nccl-tests call bus bandwidth: 2 (n - 1) / n of the bytes over the time."""
    n = cluster.world_size
    return 2 * (n - 1) / n * nbytes / seconds


def size_table(name: str) -> Iterator[str]:
    """Yield the times of every size."""
    headings = "bytes | published, us | busbw, GB/s | plain ring, us | plain ring | simulated, us | error"
    yield f"| {headings} | interval, us | inside |"
    for nbytes, published_s, plainly_s, ours_s in table_rows(name):
        both = " | ".join(f"{1e6 * each:.1f} | {each / published_s - 1:+.0%}" for each in (plainly_s, ours_s))
        bandwidth = 1e-9 * busbw_Bps(machines(name), nbytes, published_s)
        low, high = (1e6 * end for end in interval_s(name, nbytes))
        shown = f"{low:.4g} - {high:.4g} | {'yes' if is_inside(name, nbytes, published_s) else 'no'}"
        if is_input(name, nbytes):
            both, shown = f"{1e6 * plainly_s:.1f} | | {1e6 * ours_s:.1f} | input", " | "
        yield f"| {nbytes} | {1e6 * published_s:.1f} | {bandwidth:.2f} | {both} | {shown} |"


def latency_table() -> Iterator[str]:
    """Yield the time of 8 B over EFA by number of GPUs."""
    yield "| GPUs | published, us | simulated, us | error |"
    for n_gpus, published_s, ours_s in latency_rows():
        yield f"| {n_gpus} | {1e6 * published_s:.1f} | {1e6 * ours_s:.1f} | {ours_s / published_s - 1:+.1%} |"


def tcp_table() -> Iterator[str]:
    """Yield the bus bandwidth over TCP on 100 Gbit/s."""
    low, high = PUBLISHED["v100-tcp"]["busbw_GBps"]
    cluster = machines("v100-tcp")
    yield "| bytes | published busbw, GB/s | simulated |"
    for exponent in range(23, 28):
        ours = 1e-9 * busbw_Bps(cluster, 2**exponent, all_reduce_s(cluster, 2**exponent))
        yield f"| {2**exponent} | {low} to {high} | {ours:.2f} |"


SLOW = {"a100-oci-2", "h100-ib"}
RANGES = {"below 64 KiB": (0, 2**16), "64 KiB to 32 MiB": (2**16, 2**25), "32 MiB and more": (2**25, 2**62)}
"""Title -> smallest size, and the size that is too large."""


def errors(name: str, sizes: tuple[int, int], *, plain: bool = False) -> list[float]:
    """Return the errors of a table's sizes from the first to below the second."""
    rows = (row for row in table_rows(name) if sizes[0] <= row[0] < sizes[1] and not is_input(name, row[0]))
    return [(plainly_s if plain else ours_s) / published_s - 1 for _, published_s, plainly_s, ours_s in rows]


def heading(title: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def summary_table() -> Iterator[str]:
    """Yield the median error of each range of sizes, of the plain ring and simulated, and the largest one simulated."""
    yield f"| table | {' | '.join(f'{title}: plain | simulated | largest' for title in RANGES)} | in the interval |"
    for name, table in TABLES.items():
        cells = []
        for sizes in RANGES.values():
            ours = errors(name, sizes)
            plain = errors(name, sizes, plain=True)
            told = f"{median(plain):+.0%} | {median(ours):+.0%} | {max(ours, key=abs):+.0%}" if ours else " | | "
            cells.append(told)
        rows = [row for row in table_rows(name) if not is_input(name, row[0])]
        held = [is_inside(name, nbytes, published_s) for nbytes, published_s, *_ in rows]
        yield f"| [{table['title']}](#{heading(table['title'])}) | {' | '.join(cells)} | {sum(held)} of {len(held)} |"


def with_link(cluster: Cluster, link: str, update: Callable[[Link], dict[str, float]]) -> Cluster:
    """Give the cluster another link, `fabric` or `network`."""
    old: Link = {"fabric": cluster.fabric, "network": cluster.network}[link]
    return cluster.model_copy(update={link: old.model_copy(update=update(old))})


KNOBS: dict[str, Callable[[Cluster], Cluster]] = {
    "NVLink efficiency": lambda cluster: with_link(cluster, "fabric", lambda old: {"efficiency": old.efficiency / 1.1}),
    "network latency": lambda cluster: with_link(cluster, "network", lambda old: {"latency_s": 1.1 * old.latency_s}),
    "network efficiency": lambda cluster: with_link(
        cluster, "network", lambda old: {"efficiency": old.efficiency / 1.1}
    ),
    "overhead of a collective": lambda cluster: cluster.model_copy(
        update={"collectives": {"overhead_s": 1.1 * cluster.collectives.overhead_s}}
    ),
}
"""Settings that are changed by a tenth."""


def knobs_table() -> Iterator[str]:
    """Yield by how much the time of three sizes changes when a value changes by a tenth."""
    cases = [(name, nbytes) for name in ("h200", "p4de") for nbytes in (2**15, 2**20, 2**30)]
    yield f"| changed by a tenth | {' | '.join(f'{name}, {format_nbytes(nbytes)}' for name, nbytes in cases)} |"
    for title, change in KNOBS.items():
        changes = (
            all_reduce_s(change(machines(name)), nbytes) / all_reduce_s(machines(name), nbytes) - 1
            for name, nbytes in cases
        )
        yield f"| {title} | {' | '.join(f'{each:+.1%}' for each in changes)} |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    sized = {name: markdown_table(size_table(name)) for name in TABLES}
    others = {"summary": summary_table, "latency": latency_table, "tcp": tcp_table, "knobs": knobs_table}
    return {**sized, **{name: markdown_table(table()) for name, table in others.items()}}


def main() -> None:
    """Run the experiment."""
    page_command(__doc__ or "", HERE / "README.md", tables)


if __name__ == "__main__":
    main()
