"""How fast are the engines, and does memory stay flat?

    python benchmarks/engines.py            tables; exit code 1 if a target is missed
    python benchmarks/engines.py --quick    tiny sizes, to see that it works; seconds
    python benchmarks/engines.py --json     the numbers for machines

A rank-op is one operation executed by one rank. Ratios compare runs of one process on one machine, taken turn by turn,
the best of several; absolute numbers belong to the machine.
"""

import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tables import benchmark_parser, conclude, shown
from simdist import scenario
from simdist.engines.observers import WhereTimeWent, WholeTrace
from simdist.engines.run import run
from simdist.plan.delays import SeedDelays
from simdist.runs import building
from simdist.studies.comparison import compare

SYNC = "{kind: sync}"
LOCAL = "{kind: local_sgd, period: %d}"
HSGD = "{kind: hierarchical_sgd, intra_node_gradients: false, levels: {%s}}"
WITH_GRADIENTS = "{kind: hierarchical_sgd, label: hsgd and gradients in nodes, levels: {%s}}"
TARGETS = {
    "fast over des": 30.0,  # above 100 before `des` became three times as fast
    "des rank-ops/s": 100e3,
    "batch rank-ops/s": 100e6,
    "compare s": 10.0,
    "large s": 30.0,
    "large MiB": 4096.0,
}


@dataclass(frozen=True)
class Sizes:
    """How much to run."""

    ranks: int = 128
    steps: int = 200
    repetitions: int = 5
    batch_seeds: int = 128
    compare_ranks: int = 256
    compare_steps: int = 1000
    compare_seeds: int = 20
    large_ranks: tuple[int, ...] = (4096, 8192, 16384)
    large_steps: tuple[int, ...] = (500, 1000, 2000)


QUICK = Sizes(32, 8, 1, 4, 128, 16, 2, (128, 256, 512), (8, 16, 32))


def straggling(n_ranks: int, n_steps: int, schedules: Iterable[str]) -> scenario.Scenario:
    """Return ResNet-18 on nodes of 4 T4 with random stragglers."""
    return scenario.loads(
        f"cluster: {{preset: gcp-t4x4-32gbit, nodes: {n_ranks // 4}}}\n"
        "workload: {preset: resnet18, forward: 18 ms, backward: 37 ms, optimize: 0 s}\n"
        f"steps: {n_steps}\ndisturbances: [{{kind: transient, probability: 1%, delay: 1 s}}]\n"
        f"schedules: [{', '.join(schedules)}]\n"
    )


def best_s(act: Callable[[], object], repetitions: int) -> float:
    """Return the seconds of the fastest of several runs."""
    seconds = []
    for _ in range(repetitions):
        began_s = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


def engines(sizes: Sizes) -> list[dict[str, object]]:
    """Compare the engines on one seed, traces kept, and the fast one on a batch of seeds without traces."""
    n = sizes.ranks
    levels = f"2: {n // 16}, 4: {n // 4}, 8: {n}"
    schedules = [SYNC, LOCAL % 4, HSGD % levels, WITH_GRADIENTS % levels]
    chosen = straggling(n, sizes.steps, schedules)
    drawn = building.delays(chosen)
    batch = building.delay_sampler(chosen, range(sizes.batch_seeds)).take(sizes.steps)
    rows: list[dict[str, object]] = []
    for schedule in chosen.schedules:
        built = building.build(chosen, schedule)
        plan, costs = built.plan, built.costs
        n_rank_ops = plan.n_instances * plan.world_size
        fast_s, des_s, batch_s = [], [], []
        for _ in range(sizes.repetitions):
            keep, where = WholeTrace(), WhereTimeWent()
            fast_s.append(best_s(lambda: run(plan, costs, drawn, observe=keep, engine="fast"), 5))  # noqa: B023
            des_s.append(best_s(lambda: run(plan, costs, drawn, observe=keep, engine="des"), 1))  # noqa: B023
            batch_s.append(best_s(lambda: run(plan, costs, batch, observe=where, engine="fast"), 1))  # noqa: B023
        rows.append(
            {
                "schedule": schedule.name,
                "rank_ops": n_rank_ops,
                "des_rank_ops_per_s": n_rank_ops / min(des_s),
                "fast_rank_ops_per_s": n_rank_ops / min(fast_s),
                "fast_over_des": min(des_s) / min(fast_s),
                "batch_rank_ops_per_s": n_rank_ops * sizes.batch_seeds / min(batch_s),
            }
        )
    return rows


def whole_comparison(sizes: Sizes) -> dict[str, object]:
    """Time a table of seven schedules, from plans to intervals, drawing included."""
    n = sizes.compare_ranks
    levels = [
        f"1: {n // 64}, 2: {n // 16}, 4: {n // 4}, 8: {n}",
        f"2: {n // 32}, 4: {n // 4}, 8: {n}",
        f"4: {n // 16}, 8: {n}",
    ]
    schedules = [SYNC, *(LOCAL % period for period in (2, 4, 8)), *(HSGD % each for each in levels)]
    chosen = straggling(n, sizes.compare_steps, schedules)
    began_s = time.perf_counter()
    rows = compare(chosen, n_seeds=sizes.compare_seeds, engine="fast")
    return {
        "ranks": n,
        "steps": sizes.compare_steps,
        "seeds": sizes.compare_seeds,
        "schedules": len(rows),
        "seconds": time.perf_counter() - began_s,
    }


def large(n_ranks: int, n_steps: int) -> dict[str, float]:
    """Build and measure hierarchical SGD; return seconds and the peak memory of this process."""
    levels = f"2: {max(2, n_ranks // 64)}, 4: {n_ranks // 8}, 8: {n_ranks}"
    chosen = straggling(n_ranks, n_steps, [HSGD % levels])
    began_s = time.perf_counter()
    built = building.build(chosen, chosen.schedules[0])
    built_s = time.perf_counter()
    delays = SeedDelays([0], partial(building.delay_sampler, chosen))
    run(built.plan, built.costs, delays, observe=WhereTimeWent(), engine="fast")
    return {
        "ranks": n_ranks,
        "steps": n_steps,
        "build_s": built_s - began_s,
        "measure_s": time.perf_counter() - built_s,
        "peak_MiB": peak_nbytes() / 2**20,
    }


def peak_nbytes() -> int:
    """Return the most memory that this process has held.

    On Linux `ru_maxrss` outlives exec: a child starts with what its parent held. `VmHWM` does not.
    """
    status = Path("/proc/self/status")
    if status.exists():
        [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def apart(n_ranks: int, n_steps: int) -> dict[str, float]:
    """Run `large` in a process of its own: peak memory never falls."""
    command = [sys.executable, __file__, "--large", str(n_ranks), str(n_steps)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def scaling(sizes: Sizes) -> dict[str, object]:
    """Grow ranks, then steps; ratios to the row before."""
    middle = sizes.large_steps[1]
    by_ranks = [apart(n_ranks, middle) for n_ranks in sizes.large_ranks]
    by_steps = [apart(sizes.large_ranks[-1], n_steps) for n_steps in sizes.large_steps if n_steps != middle]
    by_steps.insert(1, by_ranks[-1])
    return {"by_ranks": with_ratios(by_ranks), "by_steps": with_ratios(by_steps)}


def with_ratios(rows: list[dict[str, float]]) -> list[dict[str, float | None]]:
    """Add how time and memory grew since the row before."""
    found: list[dict[str, float | None]] = []
    for before, row in zip([None, *rows], rows, strict=False):
        ratios = {f"{name}_ratio": row[name] / before[name] if before else None for name in ("measure_s", "peak_MiB")}
        found.append({**row, **ratios})
    return found


def verdicts(found: dict[str, object], sizes: Sizes) -> list[dict[str, object]]:
    """Compare with the targets, which are stated for the full sizes."""
    rows = found["engines"]
    last = found["scaling"]["by_ranks"][-1]  # type: ignore[index]
    reached = {
        "fast over des": min(row["fast_over_des"] for row in rows),  # type: ignore[attr-defined]
        "des rank-ops/s": min(row["des_rank_ops_per_s"] for row in rows),  # type: ignore[attr-defined]
        "batch rank-ops/s": min(row["batch_rank_ops_per_s"] for row in rows),  # type: ignore[attr-defined]
        "compare s": found["compare"]["seconds"],  # type: ignore[index]
        "large s": last["build_s"] + last["measure_s"],
        "large MiB": last["peak_MiB"],
    }
    at_most = {"compare s", "large s", "large MiB"}
    return [
        {
            "what": what,
            "target": f"{'<' if what in at_most else '>='} {shown(target)}",
            "reached": reached[what],
            "holds": bool(reached[what] < target if what in at_most else reached[what] >= target),
        }
        for what, target in TARGETS.items()
    ]


def main() -> int:
    """Run everything and print it; return 1 if a target of the full sizes is missed."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--large", nargs=2, type=int, metavar=("RANKS", "STEPS"), help="measure this alone, print JSON")
    options = parser.parse_args()
    if options.large:
        print(json.dumps(large(*options.large)))
        return 0
    sizes = QUICK if options.quick else Sizes()
    rows = engines(sizes)
    compared = whole_comparison(sizes)
    scaled = scaling(sizes)
    found: dict[str, object] = {"engines": rows, "compare": compared, "scaling": scaled}
    tables = {
        f"engines, {sizes.ranks} ranks x {sizes.steps} steps": rows,
        "whole comparison": [compared],
        "one seed, fast, by ranks": scaled["by_ranks"],
        "one seed, fast, by steps": scaled["by_steps"],
    }
    return conclude(options, sizes, found, tables, verdicts(found, sizes))


if __name__ == "__main__":
    sys.exit(main())
