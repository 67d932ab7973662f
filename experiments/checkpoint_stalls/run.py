"""Published times of checkpoints: do bytes over stated bandwidths say them?

python experiments/checkpoint_stalls/run.py           print the tables
python experiments/checkpoint_stalls/run.py --write   write them into the README
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from simdist.report import markdown_table, page_command
from simdist.runs.checkpoint_costs import checkpoint_costs
from simdist.scenario import load
from simdist.studies.statistics import relative_error

HERE = Path(__file__).parent
#: Least and most GB/s of copies to pageable memory on other machines: L20, page-locking included
#: (fzyzcjy/torch_memory_saver#111), and RTX 4090 over PCIe 4.0 (NVlabs/cuda-oxide#976).
PAGEABLE = ("2.6 GB/s", "12.3 GB/s")
ABOUT = {"save": "training waits for the file", "load": "all ranks read it"}


@dataclass(frozen=True)
class Row:
    """A published time.

    Args:
        what: Model and destination.
        source: Of the number.
        does: `save`, `load` or `copy`.
        memory: That is copied to: `pageable` or `pinned`; empty unless training waits only for the copy.
        published_s: Seconds.
        simulated_s: Seconds by the simulator.
        range_s: Seconds at the ends of `PAGEABLE`; None unless the memory is pageable.
    """

    what: str
    source: str
    does: str
    memory: str
    published_s: float
    simulated_s: float
    range_s: tuple[float, float] | None

    @property
    def error(self) -> float:
        """(simulated - published) / published."""
        return relative_error(self.simulated_s, self.published_s)


@cache
def rows() -> tuple[Row, ...]:
    """Predict each published time."""
    lines = (line for line in (HERE / "published.csv").read_text(encoding="utf-8").splitlines() if line[0] != "#")
    return tuple(_row(each) for each in csv.DictReader(lines))


def _row(row: dict[str, str]) -> Row:
    slowest, fastest = PAGEABLE
    range_s = (simulated_s(row, fastest), simulated_s(row, slowest)) if row["memory"] == "pageable" else None
    about = (row["what"], row["source"], row["does"], row["memory"], float(row["published_s"]))
    return Row(*about, simulated_s(row, "unlimited" if row["memory"] == "pinned" else None), range_s)


def simulated_s(row: dict[str, str], staging_bandwidth: str | None) -> float:
    """Return the seconds of a row by the simulator: every rank has a file, and a node's mount the stated bandwidth.

    Args:
        row: A line of published.csv.
        staging_bandwidth: Of the device; that of the preset if None.
    """
    device = {} if staging_bandwidth is None else {"device": {"staging_bandwidth": staging_bandwidth}}
    mode = "async" if row["does"] == "copy" else "blocking"
    mount = float(row["storage_Bps"] or "inf")
    storage = {"latency_s": 0.0, "bandwidth_Bps": mount * int(row["nodes"]), "client_bandwidth_Bps": mount}
    scenario = load(
        {
            "cluster": {"preset": row["cluster"], "nodes": int(row["nodes"]), "storage": storage, **device},
            "workload": {"preset": "resnet50", "batch_size": 32, "forward_s": 1.0},
            "steps": 1,
            "checkpoint": {"every": 1, "nbytes": int(row["nbytes"]), "ranks": "all", "mode": mode},
            "schedules": ["sync"],
        }
    )
    costs = checkpoint_costs(scenario, scenario.schedules[0])
    assert costs is not None
    return costs.load_s if row["does"] == "load" else costs.stall_s


def storage_table() -> Iterator[str]:
    """Yield the rows in which a storage decides."""
    yield "| | source | | published, s | simulated, s | error |"
    for each in rows():
        if each.does != "copy":
            cells = f"{each.published_s:g} | {each.simulated_s:.3g} | {each.error:+.0%}"
            yield f"| {each.what} | {each.source} | {ABOUT[each.does]} | {cells} |"


def copies_table() -> Iterator[str]:
    """Yield the rows in which training waits only for a copy."""
    yield f"| | source | memory | published, s | simulated, s | error | {' to '.join(reversed(PAGEABLE))}, s |"
    for each in rows():
        if each.does == "copy":
            cells = f"{each.published_s:g} | {each.simulated_s:.3g} | {each.error:+.0%}"
            ends = " - ".join(f"{end_s:.2g}" for end_s in each.range_s or ())
            yield f"| {each.what} | {each.source} | {each.memory} | {cells} | {ends} |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {"storage": markdown_table(storage_table()), "copies": markdown_table(copies_table())}


def median_error(*does: str) -> float:
    """Return the median size of the errors of some kinds."""
    return median(abs(each.error) for each in rows() if each.does in does)


if __name__ == "__main__":
    page_command(__doc__ or "", HERE / "README.md", tables)
