"""Which mitigation for which straggler: rivals of synchronous SGD, simulated on 64 to 1,024 GPUs.

python experiments/mitigations/run.py           print the tables (some minutes)
python experiments/mitigations/run.py --write   write them into the README
python experiments/mitigations/run.py --nodes 2 --seeds 1 --steps 64     a quick look
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from simdist.report import markdown_table, print_tables, write_tables
from simdist.scenario import Scenario, load
from simdist.studies.comparison import Row, compare

HERE = Path(__file__).parent
NODES = (8, 32, 128)
RANKS_PER_BACKUP = 16
STRAGGLERS: dict[str, list[dict[str, object]]] = {
    "none": [],
    "transient": [{"kind": "transient", "probability": "1%", "delay": "500 ms"}],
    "persistent": [{"kind": "persistent", "on": "compute", "factor": 1.5, "ranks": [3]}],
    "bursts": [{"kind": "bursts", "enter": "0.05%", "leave": "5%", "delay": "200 ms"}],
    "link": [
        {"kind": "bursts", "on": "link", "link": "nic", "period": "1 s", "enter": "0.5%", "leave": "10%", "share": 0.25}
    ],
}
"""Name -> disturbances; README.md says why these."""


@dataclass(frozen=True)
class Study:
    """How much to simulate.

    Args:
        nodes: Machines of 8 GPUs, of each size.
        n_seeds: Random draws.
        steps: Instead of those of the scenario.
        ring: Also backup workers with a ring among the ranks that are in, which the tables leave out.
    """

    nodes: Sequence[int] = NODES
    n_seeds: int = 5
    steps: int | None = None
    ring: bool = False

    def scenario(self, nodes: int, straggler: str) -> Scenario:
        """Return the scenario of a size with one kind of straggler."""
        base = load(HERE / "scenario.yaml")
        cluster = base.cluster.model_copy(update={"nodes": nodes})
        backup = cluster.world_size // RANKS_PER_BACKUP
        schedules = []
        for each in base.schedules:
            if each.kind != "backup_workers":
                schedules.append(each)
                continue
            schedules.append(each.model_copy(update={"backup": backup}))
            if self.ring:
                by_ring = {"backup": backup, "algorithm": "ring", "label": f"{each.name}-ring"}
                schedules.append(each.model_copy(update=by_ring))
        changed = base.changed(cluster=cluster, schedules=tuple(schedules), disturbances=STRAGGLERS[straggler])
        return changed.changed(steps=self.steps) if self.steps else changed

    def rows(self) -> dict[str, dict[int, dict[str, Row]]]:
        """Return straggler -> ranks -> schedule -> row."""
        return {
            straggler: {8 * nodes: self._rows(nodes, straggler) for nodes in self.nodes} for straggler in STRAGGLERS
        }

    def _rows(self, nodes: int, straggler: str) -> dict[str, Row]:
        return {row.schedule: row for row in compare(self.scenario(nodes, straggler), n_seeds=self.n_seeds)}


Rows = Mapping[str, Mapping[int, Mapping[str, Row]]]


def speedups(rows: Rows) -> Iterator[str]:
    """Yield the speed-up of every schedule over `sync`, for each straggler and size."""
    sizes = list(next(iter(rows.values())))
    yield "| schedule | " + " | ".join(f"{straggler}, {size:,}" for straggler in rows for size in sizes) + " |"
    for schedule in rows["none"][sizes[0]]:
        cells = (_cell(rows[straggler][size], schedule) for straggler in rows for size in sizes)
        yield f"| `{schedule}` | " + " | ".join(cells) + " |"
    times = (f"{1e3 * rows[straggler][size]['sync'].step_s:.0f}" for straggler in rows for size in sizes)
    yield "| ms per step of `sync` | " + " | ".join(times) + " |"


def _cell(rows: Mapping[str, Row], schedule: str) -> str:
    fastest = max(rows.values(), key=lambda row: row.speedup)
    text = f"{rows[schedule].speedup:.2f}"
    return f"**{text}**" if rows[schedule] is fastest else text


def lost(rows: Rows) -> Iterator[str]:
    """Yield by how much a straggler lengthens a step of each schedule, for each size."""
    sizes = list(next(iter(rows.values())))
    stragglers = [straggler for straggler in rows if straggler != "none"]
    yield "| schedule | " + " | ".join(f"{straggler}, {size:,}" for straggler in stragglers for size in sizes) + " |"
    for schedule in rows["none"][sizes[0]]:
        added = (
            1e3 * (rows[straggler][size][schedule].step_s - rows["none"][size][schedule].step_s)
            for straggler in stragglers
            for size in sizes
        )
        yield f"| `{schedule}` | " + " | ".join(f"{each:.0f}" for each in added) + " |"


def tables(study: Study) -> dict[str, str]:
    """Return the tables of the README by name."""
    rows = study.rows()
    return {"speedups": markdown_table(speedups(rows)), "lost": markdown_table(lost(rows))}


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into README.md")
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="machines of 8 GPUs")
    parser.add_argument("--seeds", type=int, default=Study.n_seeds)
    parser.add_argument("--steps", type=int, help="instead of those of the scenario")
    arguments = parser.parse_args()
    found = tables(Study(arguments.nodes, arguments.seeds, arguments.steps))
    if arguments.write:
        write_tables(HERE / "README.md", found)
    else:
        print_tables(found)


if __name__ == "__main__":
    main()
