"""How much do backup workers gain? Published step times, and what light tails of the workers' times explain of them.

    python experiments/backup_workers/run.py            print step times with 0 to 6 backup workers
    python experiments/backup_workers/run.py --write    write them into the README

Published: TensorFlow (OSDI 2016), figures 7 and 8; Chen et al., arXiv 1604.00981: see published.json.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.plan import COLLECTIVES, occurrences
from simdist.report import markdown_table, page_command
from simdist.runs.building import build
from simdist.scenario import load
from simdist.schedules.backup_workers import BackupWorkers

HERE = Path(__file__).parent
SCENARIO = load(HERE / "scenario.yaml")
PUBLISHED = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
MOST_BACKUP = 6
N_SEEDS = 8


def mean_delay_s(n_workers: int, ratio: float) -> float:
    """Return the mean of exponential delays that make synchronous steps longer than asynchronous ones.

    A step computes for 1 s. The median of one worker's delay is ln 2 means, of the longest of n that of n.

    Args:
        n_workers: Workers.
        ratio: Of the medians of synchronous and asynchronous steps.
    """
    longest = -math.log(1 - 0.5 ** (1 / n_workers))
    return (ratio - 1) / (longest - ratio * math.log(2))


def step_s(n_needed: int, backup: int, delay_s: float) -> float:
    """Return the median seconds of a step that waits for so many of so many more workers."""
    n = n_needed + backup
    cluster = SCENARIO.cluster.model_copy(update={"nodes": n})
    scenario = SCENARIO.changed(cluster=cluster, schedules=[BackupWorkers(backup=backup)])
    scenario = scenario.changed(disturbances=[{"kind": "transient", "on": "compute", "probability": 1, "delay": "1 s"}])
    built = build(scenario, scenario.schedules[0])
    rows = np.concatenate([each.rows for each in occurrences(built.plan) if isinstance(each.op, COLLECTIVES)])
    found = []
    for seed in range(N_SEEDS):
        drawn = np.random.default_rng(seed).exponential(delay_s, (1, scenario.steps, n))
        trace = run(built.plan, built.costs, {"compute": drawn}, observe=WholeTrace(), engine="fast")
        found.append(np.diff(trace.end_s[rows].min(axis=1)))  # the first has it when it is there
    return float(np.median(found))


def measure() -> dict[int, float]:
    """Return the median step with every number of backup workers."""
    known = PUBLISHED["tensorflow"]
    delay_s = mean_delay_s(known["n_workers"], known["synchronous_over_asynchronous_median"])
    return {backup: step_s(known["n_workers"], backup, delay_s) for backup in range(MOST_BACKUP + 1)}


def normalised(measured: dict[int, float]) -> dict[int, float]:
    """Return the speedups for equal numbers of machines, as the TensorFlow paper has them."""
    n = PUBLISHED["tensorflow"]["n_workers"]
    return {backup: measured[0] / seconds * n / (n + backup) for backup, seconds in measured.items()}


def steps_table(measured: dict[int, float]) -> Iterator[str]:
    """Yield what is simulated and what is published of each number of backup workers."""
    known, speedups = PUBLISHED["tensorflow"], normalised(measured)
    yield "| backup workers | step, of one without | normalised speedup | published | error |"
    for backup, seconds in measured.items():
        published = known["best_normalised_speedup"] if backup == known["best_backup"] else None
        error = f"{published:.3f} | {speedups[backup] / published - 1:+.1%}" if published else " | "
        yield f"| {backup} | {seconds / measured[0]:.3f} | {speedups[backup]:.3f} | {error} |"


def best_table(measured: dict[int, float]) -> Iterator[str]:
    """Yield which numbers of backup workers are best."""
    known, speedups = PUBLISHED["tensorflow"], normalised(measured)
    yield "| | published | simulated |"
    fastest = min(measured, key=measured.__getitem__)
    yield f"| shortest step | {known['fastest_backup']} | {fastest} of 0 to {MOST_BACKUP} |"
    yield f"| best normalised speedup | {known['best_backup']} | {max(speedups, key=speedups.__getitem__)} |"


def tables(measured: dict[int, float]) -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {"steps": markdown_table(steps_table(measured)), "best": markdown_table(best_table(measured))}


def main() -> None:
    """Run the experiment."""
    page_command(str(__doc__), HERE / "README.md", lambda: tables(measure()))


if __name__ == "__main__":
    main()
