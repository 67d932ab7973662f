"""What simdist says of public traces of real jobs on GPUs, beside what the JSON shows.

    python experiments/public_traces/run.py FOLDER            the tables of README.md, of the traces found in FOLDER
    python experiments/public_traces/run.py FOLDER --write    write them there
    python experiments/public_traces/run.py FOLDER --check    exit with 1 if a time is more than 2 % of a step off

The traces are not part of this repository; README.md says where each is from. Each is read by itself: by `simdist
import`, as a user would, and by `oracle.py`, which shares no code with it. Those that FOLDER does not have are told.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle import Shown, shown

from simdist.report import markdown_table, print_tables, write_tables

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
PUBLIC = ("nccl_data", "negative_queue_rank0", "resnet50_1gpu", "sampled_rank-0", "sampled_rank-1")
MOST_OFF = 0.02  # of a step
TIMEOUT_S = 600
_OF_NCCL = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "point_to_point",
    "broadcast",
    "reduce",
    "other",
)
_GAPS = ("queued", "short_gap", "long_gap", "host_pause", "input")


@dataclass(frozen=True, slots=True)
class Told:
    """What simdist says of a trace.

    Args:
        seconds: Per step: `step`, `computing`, `exposed`, `copies`, `idle`; empty if the trace was refused.
        ahead_s: How far the host is ahead of its device.
        all_to_alls: Per step.
        bound: What the job is bound by.
        left_out: What the scenario leaves out of the job, if it is too much to compare schedules; empty otherwise.
        stragglers: How many were found.
        machines: The layout, or that it was asked for.
    """

    seconds: dict[str, float]
    ahead_s: float
    all_to_alls: float
    bound: str
    left_out: str
    stragglers: int
    machines: str


def imported(path: Path) -> Told:
    """Import a trace; say how many nodes there were only if simdist asks for it."""
    machines = ""
    for nodes in ((), ("--nodes", "1")):
        done = _import(path, *nodes)
        if "--nodes" in done.stderr and "error" in done.stderr and not nodes:
            machines = "asked for"
            continue
        if not done.stdout:
            return Told({}, 0.0, 0.0, done.stderr.strip().splitlines()[-1], "", 0, machines)
        found = json.loads(done.stdout)
        return _told(found, machines or f"{found.get('nodes', '?')} x {found.get('gpus_per_node', '?')}")
    raise AssertionError("unreachable")


def _import(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "simdist", "import", str(path), "-o", f"{folder}/job.yaml", "--json", *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def _told(found: dict[str, Any], machines: str) -> Told:
    where, job = found["where"], found["job"]
    seconds = {
        "step": where["step_s"],
        "computing": where["compute_s"],
        "exposed": math.fsum(where[f"{kind}_s"] for kind in _OF_NCCL),
        "copies": where["copy_s"],
        "idle": math.fsum(where[f"{part}_s"] for part in _GAPS),
    }
    all_to_alls = job["left_out"].get("all_to_all", {}).get("per_step", 0.0)
    left_out = "" if job["is_modelled"] else ", ".join(job["names"]) or "what the trace does not show"
    bound = where["verdict"].partition(":")[0]
    ahead_s = max(each["ahead_s"] for each in where["ranks"])
    return Told(seconds, ahead_s, all_to_alls, bound, left_out, len(found.get("stragglers", ())), machines)


def _columns(of: Shown) -> dict[str, float]:
    return {
        "step": of.step_s,
        "computing": of.compute_s,
        "exposed": of.exposed_s,
        "copies": of.copy_s,
        "idle": of.gap_s,
    }


def times_table(rows: Iterable[tuple[str, Told, Shown]]) -> str:
    """Return the table of times, in milliseconds per step: what simdist says / what the JSON shows."""
    lines = ["| trace | marks | device step | computing | exposed | copies | idle | host ahead |"]
    for name, told, of in rows:
        both = [f"{_ms(told.seconds.get(key))} / {_ms(value)}" for key, value in _columns(of).items()]
        lines.append(f"| {' | '.join([name, _ms(of.mark_s), *both, f'{_ms(told.ahead_s)} / {_ms(of.behind_s)}'])} |")
    return markdown_table(lines)


def conclusions_table(rows: Iterable[tuple[str, Told, Shown]]) -> str:
    """Return the table of what simdist concludes."""
    lines = ["| trace | bound by | stragglers | machines | all_to_alls a step | not modelled |"]
    for name, told, of in rows:
        counts = f"{told.all_to_alls:.3g} / {of.collectives.get('all_to_all', 0.0):.3g}"
        cells = [name, told.bound, str(told.stragglers), told.machines, counts, told.left_out or "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return markdown_table(lines)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def main() -> int:
    """Compare, and print, write or judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    paths = sorted(path for path in options.folder.rglob("*.json*") if path.name.endswith((".json", ".json.gz")))
    rows = [(path.name.partition(".")[0], imported(path), shown(path)) for path in paths]
    if not rows:
        sys.exit(f"{options.folder}: holds no .json or .json.gz")
    tables = {"times": times_table(rows), "conclusions": conclusions_table(rows)}
    if options.write:
        write_tables(README, tables)
    else:
        print_tables(tables)
    off = [
        f"{name}: {key} {_ms(told.seconds.get(key))} ms, the JSON shows {_ms(value)} ms"
        for name, told, of in rows
        for key, value in _columns(of).items()
        if abs(told.seconds.get(key, 0.0) - value) > MOST_OFF * of.step_s
    ]
    absent = [name for name in PUBLIC if name not in {name for name, *_ in rows}]
    print(*off, *([f"not in {options.folder}: {', '.join(absent)}"] if absent else ()), sep="\n", file=sys.stderr)
    return int(options.check and bool(off))


if __name__ == "__main__":
    sys.exit(main())
