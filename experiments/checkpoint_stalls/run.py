"""Published times of checkpoints: do bytes over stated bandwidths say them?

python experiments/checkpoint_stalls/run.py           print the tables
python experiments/checkpoint_stalls/run.py --write   write them into the README
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from simdist.report import page_command
from simdist.runs.checkpoint_costs import checkpoint_costs
from simdist.scenario import load
from simdist.studies.statistics import relative_error

HERE = Path(__file__).parent
ABOUT = {"save": "training waits for the file", "load": "all ranks read it", "copy": "training waits for the copy"}


@dataclass(frozen=True)
class Row:
    """A published time.

    Args:
        what: Model and destination.
        source: Of the number.
        does: `save`, `load` or `copy`.
        published_s: Seconds.
        simulated_s: Seconds by the simulator.
    """

    what: str
    source: str
    does: str
    published_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """(simulated - published) / published."""
        return relative_error(self.simulated_s, self.published_s)


@cache
def rows() -> tuple[Row, ...]:
    """Predict each published time."""
    lines = (line for line in (HERE / "published.csv").read_text(encoding="utf-8").splitlines() if line[0] != "#")
    return tuple(
        Row(each["what"], each["source"], each["does"], float(each["published_s"]), simulated_s(each))
        for each in csv.DictReader(lines)
    )


def simulated_s(row: dict[str, str]) -> float:
    """Return the seconds of a row by the simulator: every rank has a file, and a node's mount the stated bandwidth."""
    mode = "async" if row["does"] == "copy" else "blocking"
    mount = float(row["storage_Bps"] or "inf")
    storage = {"latency_s": 0.0, "bandwidth_Bps": mount * int(row["nodes"]), "client_bandwidth_Bps": mount}
    scenario = load(
        {
            "cluster": {"preset": row["cluster"], "nodes": int(row["nodes"]), "storage": storage},
            "workload": {"preset": "resnet50", "batch_size": 32, "forward_s": 1.0},
            "steps": 1,
            "checkpoint": {"every": 1, "nbytes": int(row["nbytes"]), "ranks": "all", "mode": mode},
            "schedules": ["sync"],
        }
    )
    costs = checkpoint_costs(scenario, scenario.schedules[0])
    assert costs is not None
    return costs.load_s if row["does"] == "load" else costs.stall_s


def rows_table(does: Sequence[str]) -> Iterator[str]:
    """Yield the rows of some kinds."""
    yield "| | source | | published, s | simulated, s | error |"
    yield "|---|---|---|---|---|---|"
    for each in rows():
        if each.does in does:
            cells = f"{each.published_s:g} | {each.simulated_s:.3g} | {each.error:+.0%}"
            yield f"| {each.what} | {each.source} | {ABOUT[each.does]} | {cells} |"


def tables() -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {"storage": "\n".join(rows_table(("save", "load"))), "copies": "\n".join(rows_table(("copy",)))}


def median_error(*does: str) -> float:
    """Return the median size of the errors of some kinds."""
    return median(abs(each.error) for each in rows() if each.does in does)


if __name__ == "__main__":
    page_command(__doc__ or "", HERE / "README.md", tables)
