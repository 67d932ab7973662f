"""How well does a sweep use several processes?

    python benchmarks/sweep.py                  a table; exit code 1 if the target is missed
    python benchmarks/sweep.py --points 1000    fewer points than 10,000
    python benchmarks/sweep.py --quick          so few that the numbers mean nothing; seconds
    python benchmarks/sweep.py --json           the numbers for machines

Points of one small schedule each are computed in this process and in a pool, turn by turn in several parts, so that
whatever else runs on the machine meets both. The efficiency of n processes is T(this process) / (n T(pool)), the start
of the processes included. With other work on the machine it says little; the processor share hardly changes with that:
of the pool's processor time, what this process alone needs.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tables import table
from simdist import sweeps
from simdist.jobs.store import ROWS
from simdist.sweeps import InProcess, LocalPool, Sweep, loads

TARGET = 0.8
SWEEP = """
scenario:
  cluster: {nodes: 2, gpus_per_node: 4, fabric: ideal, network: {latency: 25 us, bandwidth: 25 Gbit/s}}
  workload: {tensors: [{name: weight, count: 1000000}], batch_size: 32, forward: 20 ms}
  disturbances: [{kind: transient, probability: 2%%, delay: 50 ms}]
  schedules: [{kind: sync}]
  steps: 50
vary:
  disturbances.0.probability: {log_uniform: [0.1%%, 10%%]}
  cluster.network.bandwidth: {uniform: [10 Gbit/s, 100 Gbit/s]}
sample: {kind: random, points: %d, seed: %d}
seeds: 20
"""


@dataclass(frozen=True)
class Spent:
    """Resources of a run: seconds that passed, and seconds of all its processors."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


def spent(work: Callable[[], object]) -> Spent:
    """Return what some work takes, in this process and in those that it starts and ends."""
    cpu_s, began_s = processor_s(), time.perf_counter()
    work()
    return Spent(time.perf_counter() - began_s, processor_s() - cpu_s)


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measured(n_points: int, n_processes: int, n_parts: int) -> dict[str, object]:
    """Compute the same points in both ways, part by part."""
    serial, pool, n_rows = Spent(), Spent(), 0
    with tempfile.TemporaryDirectory() as name:
        for part in range(n_parts):
            sweep = loads(SWEEP % (n_points // n_parts, part))
            one, many = Path(name, f"serial{part}"), Path(name, f"pool{part}")
            serial += spent(lambda: sweeps.sweep(sweep, one, workers=InProcess()))  # noqa: B023
            pool += spent(lambda: in_pool(sweep, many, n_processes))  # noqa: B023
            assert (one / ROWS).read_bytes() == (many / ROWS).read_bytes()
            n_rows += len((one / ROWS).read_bytes().splitlines())
    return {
        "rows": n_rows,
        "processes": n_processes,
        "serial_rows_per_s": n_rows / serial.wall_s,
        "pool_rows_per_s": n_rows / pool.wall_s,
        "efficiency": serial.wall_s / (n_processes * pool.wall_s),
        "processor_share": serial.cpu_s / pool.cpu_s,
        "load": os.getloadavg()[0],
    }


def in_pool(sweep: Sweep, folder: Path, n_processes: int) -> None:
    """Compute a sweep in processes that are started for it."""
    with LocalPool(n_processes) as pool:
        sweeps.sweep(sweep, folder, workers=pool)


def main() -> int:
    """Measure, print; return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="40 points")
    parser.add_argument("--points", type=int, default=10_000, metavar="N", help="how many")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="of the pool")
    options = parser.parse_args()
    found = measured(*((40, options.processes, 2) if options.quick else (options.points, options.processes, 2)))
    efficiency = found["efficiency"]
    assert isinstance(efficiency, float)
    target = {"what": "efficiency", "target": f">= {TARGET}", "reached": efficiency, "holds": efficiency >= TARGET}
    if options.json:
        print(json.dumps({**found, "targets": [target]}, indent=1))
    else:
        print(table(f"{found['rows']:,} rows in this process and in {options.processes}", [found]))
        print(table("target (for 10,000 rows)", [target]))
    return int(not options.quick and efficiency < TARGET)


if __name__ == "__main__":
    sys.exit(main())
