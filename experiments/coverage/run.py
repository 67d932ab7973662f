"""Do 95 % intervals hold in 95 of 100 repeats? A grid of delays, schedules and numbers of seeds.

    python experiments/coverage/run.py                 simulate everything and print the tables (20 minutes of CPU time)
    python experiments/coverage/run.py --repeats 40    fewer repeats
    python experiments/coverage/run.py --write         also write the tables into the pages
    python experiments/coverage/run.py --write --delays bursts "0.1 % x 1 s"       only these rows; the others stay

A repeat is a comparison with a seed of its own, and computes a row as `compare` does. The truth is a mean that does not
come from the correction, see `truths.py`; where there is none, the mean of all repeats.
"""

import argparse
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
sys.path.append(str(HERE))

from truths import Truth, step_s_of_seeds, truth_of  # noqa: E402

from simdist.report import markdown_table, print_tables, write_tables  # noqa: E402
from simdist.runs.building import Built, build  # noqa: E402
from simdist.scenario import Scenario, loads  # noqa: E402
from simdist.scenario.sampling import run_seeds  # noqa: E402
from simdist.schedules import Schedule  # noqa: E402
from simdist.studies.comparison import speedup_interval, step_interval  # noqa: E402
from simdist.studies.known_delays import (  # noqa: E402
    CostOfDelay,
    KnownDelays,
    corrected_by,
    cost_of_delay,
    known_delays,
)
from simdist.studies.measuring import ScheduleTimes  # noqa: E402
from simdist.studies.statistics import NORMAL_QUANTILE, Interval  # noqa: E402

PAGE = HERE / "README.md"
VALIDITY = HERE.parents[1] / "docs" / "background" / "validity.md"
SEEDS = (3, 5, 20)
REPEATS = 400
PILOTED = 20  # repeats that simulate what one delay costs; the others take turns with their results
OTHERS = 20_000  # runs of a truth
OTHERS_OF_SLOW = 500  # likewise of backup workers, of which a run takes fifty times as long
SLOWNESS = 4  # as few repeats do they have
RECORDED_STEPS = 200
ROUNDING = 1e-9
SCENARIO = """
cluster:
  nodes: 4
  gpus_per_node: 4
  fabric: {{latency: 6 us, bandwidth: 100 GB/s}}
  network: {{latency: 25 us, bandwidth: 25 Gbit/s, efficiency: 0.8}}
workload: {{preset: resnet50, forward: 30 ms, backward: 60 ms}}
disturbances: [{disturbance}]
steps: 96
schedules:
  [sync, local-4, local-16, "hsgd-4-4,16-world", {{kind: backup_workers, backup: 1}}, {{kind: diloco, period: 8}}]
"""
ONE_SLOW = "{kind: persistent, on: compute, factor: 1.5, ranks: [3]}"
HALF_SLOW = "{kind: persistent, on: compute, factor: 1.5, nodes: [0, 1]}"
DELAYS = {
    "1 % x 200 ms": "{kind: transient, probability: 1%, delay: 200 ms}",
    "0.1 % x 1 s": "{kind: transient, probability: 0.1%, delay: 1 s}",
    "0.02 % x 2 s": "{kind: transient, probability: 0.02%, delay: 2 s}",
    "0.005 % x 10 s": "{kind: transient, probability: 0.005%, delay: 10 s}",
    "one slow rank, 1 % x 200 ms": f"{ONE_SLOW}, {{kind: transient, probability: 1%, delay: 200 ms}}",
    "half of the ranks slow, 0.1 % x 60 ms": f"{HALF_SLOW}, {{kind: transient, probability: 0.1%, delay: 60 ms}}",
    "bursts": "{kind: bursts, enter: 0.05%, leave: 20%, delay: 100 ms}",
    "pauses, every 200 to 600 steps": "{kind: pauses, every: [200, 600], delay: [0.5 s, 1.5 s]}",
    "exponential": "{kind: exponential, mean: 20 ms}",
    "lognormal, sigma 2": "{kind: jitter, median: 2 ms, sigma: 2}",
    "Pareto, shape 2.5": "{kind: heavy_tail, scale: 5 ms, shape: 2.5}",
    "Pareto, shape 1.5 *": "{kind: heavy_tail, scale: 5 ms, shape: 1.5}",
    "Pareto, shape 1.1 *": "{kind: heavy_tail, scale: 5 ms, shape: 1.1}",
    "recorded, blocks of 10 steps": "{kind: recorded, file: recorded.npz, resample_steps: 10}",
}


@dataclass(frozen=True, slots=True)
class Pool:
    """One schedule of a scenario, simulated with the seeds of all repeats.

    Args:
        label: The schedule's label.
        step_s: Step seconds as simulated, `[n_repeats, most seeds]`.
        costs: By number of seeds and repeat, what one delay more costs, for each disturbance that `compare` corrects
            for.
        truth: The mean over endless seeds, if it is known.
    """

    label: str
    step_s: NDArray[np.float64]
    costs: dict[int, list[list[CostOfDelay]]]
    truth: Truth | None

    def times(self, repeat: int, n_seeds: int, known: Sequence[KnownDelays], *, n_steps: int) -> ScheduleTimes:
        """Return the times of a repeat, corrected by some disturbances."""
        found = ScheduleTimes(self.label, "", self.step_s[repeat, :n_seeds], {})
        costs = self.costs[n_seeds][repeat % len(self.costs[n_seeds])]
        for each, cost in zip(known, costs, strict=False):
            found = corrected_by(each, cost, found, n_steps=n_steps)
        return found


def pool(scenario: Scenario, schedule: Schedule, n_repeats: int) -> Pool:
    """Simulate a schedule with all seeds."""
    built = build(scenario, schedule)
    is_slow = schedule.kind == "backup_workers"
    n_repeats = n_repeats // SLOWNESS if is_slow else n_repeats
    seeds = [run_seeds(repeat, max(SEEDS)) for repeat in range(n_repeats)]
    step_s = step_s_of_seeds(scenario, built, [*chain.from_iterable(seeds)]).reshape(n_repeats, -1)
    n_piloted = min(PILOTED // SLOWNESS if is_slow else PILOTED, n_repeats)
    costs = {n: [_costs(scenario, built, repeat, n) for repeat in range(n_piloted)] for n in SEEDS}
    return Pool(schedule.name, step_s, costs, truth_of(scenario, built, OTHERS_OF_SLOW if is_slow else OTHERS))


def _costs(scenario: Scenario, built: Built, repeat: int, n_seeds: int) -> list[CostOfDelay]:
    its = scenario.changed(seed=repeat)
    return [cost_of_delay(its, built, each) for each in known_delays(its, run_seeds(repeat, n_seeds))]


def repeated(
    one: Pool, base: Pool, known: Sequence[Sequence[KnownDelays]], n_seeds: int, n_steps: int
) -> list[tuple[ScheduleTimes, ScheduleTimes]]:
    """Return the times of a schedule and the baseline in each repeat, corrected by the disturbances known of it."""
    return [
        (one.times(repeat, n_seeds, its, n_steps=n_steps), base.times(repeat, n_seeds, its, n_steps=n_steps))
        for repeat, its in enumerate(known[: len(one.step_s)])
    ]


def means_s(repeats: Sequence[tuple[ScheduleTimes, ScheduleTimes]]) -> NDArray[np.float64]:
    """Return mean step seconds of a schedule, `[n_repeats]`."""
    return np.array([one.step_s.mean() for one, _ in repeats])


def shares(
    repeats: Sequence[tuple[ScheduleTimes, ScheduleTimes]], true_s: float, true_base_s: float
) -> tuple[float, float, float]:
    """Return how often intervals of the step time and speed-up of a schedule hold, and half the width of the former.

    Args:
        repeats: The times of the schedule and the baseline in each.
        true_s: The mean step seconds of the schedule over endless seeds.
        true_base_s: The baseline's.
    """
    found = []
    for one, base in repeats:
        mean_s = float(one.step_s.mean())
        interval = step_interval(one)
        of_speedup = speedup_interval(float(base.step_s.mean()) / mean_s, one, base)
        low, high = interval or (0.0, 0.0)
        found.append([_holds(interval, true_s), _holds(of_speedup, true_base_s / true_s), (high - low) / 2 / mean_s])
    step, speedup, _ = np.mean(found, axis=0).tolist()
    return step, speedup, float(np.median(found, axis=0)[2])


def _holds(interval: Interval | None, truth: float) -> bool:
    return interval is not None and interval[0] * (1 - ROUNDING) <= truth <= interval[1] * (1 + ROUNDING)


def _span(shares: NDArray[np.float64], *, digits: int) -> str:
    low, high = (f"{100 * each:.{digits}f}" for each in (shares.min(), shares.max()))
    return low if low == high else f"{low} to {high}"


def measured(name: str, n_repeats: int) -> tuple[list[str], str]:
    """Return the rows of the tables for one kind of delays: of coverage, and of the correction if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        recorded_s = np.random.default_rng(1).exponential(0.02, (RECORDED_STEPS, 16))
        np.savez(Path(folder) / "recorded.npz", host=recorded_s)
        scenario = loads(SCENARIO.format(disturbance=DELAYS[name]), name=name, folder=Path(folder))
        pools = [pool(scenario, each, n_repeats) for each in scenario.schedules]
        known = {n: [known_delays(scenario, run_seeds(repeat, n)) for repeat in range(n_repeats)] for n in SEEDS}
    n_steps = scenario.steps
    base = pools[0]
    all_s = [means_s(repeated(each, base, known[max(SEEDS)], max(SEEDS), n_steps)) for each in pools]
    true_s = [each.truth.mean_s if each.truth else float(of.mean()) for each, of in zip(pools, all_s, strict=True)]
    lines = []
    for n_seeds in SEEDS:
        cells: list[str] = []
        nothing: list[Sequence[KnownDelays]] = [()] * n_repeats
        for corrected_for in (known[n_seeds], nothing) if any(known[n_seeds]) else (nothing,):
            found = [
                shares(repeated(each, base, corrected_for, n_seeds, n_steps), true, true_s[0])
                for each, true in zip(pools, true_s, strict=True)
            ]
            steps, speedups, widths = np.array(found).T
            cells += [_span(steps, digits=0), _span(speedups[1:], digits=0), _span(widths, digits=1)]
        cells += [""] * (6 - len(cells))
        lines.append(f"| {name} | {n_seeds} | {' | '.join(cells)} |")
    biases = [_bias(each.truth, of) for each, of in zip(pools, all_s, strict=True)]
    return lines, f"| {name} | {' | '.join(biases)} |" if any(known[max(SEEDS)]) else ""


def _bias(truth: Truth | None, found_s: NDArray[np.float64]) -> str:
    """Return by how much corrected means differ from the truth, in per cent, with a 95 % interval."""
    if truth is None:
        return ""
    error_s = math.hypot(truth.error_s, float(found_s.std(ddof=1)) / math.sqrt(len(found_s)))
    percent = 100 / truth.mean_s
    return f"{percent * (found_s.mean() - truth.mean_s):+.2f} ± {percent * NORMAL_QUANTILE * error_s:.2f}"


def tables(names: Sequence[str], n_repeats: int, *, n_workers: int) -> dict[str, str]:
    """Return the tables of the pages: rows of some delays are measured, the others are those of the page."""
    coverage, biases = (recorded(table) for table in ("coverage", "bias"))
    with ProcessPoolExecutor(n_workers) as workers:
        for name, (rows, bias) in zip(names, workers.map(partial(measured, n_repeats=n_repeats), names), strict=True):
            print("\n".join([*rows, bias]), flush=True)
            coverage[name] = rows
            biases[name] = [bias] if bias else []
    labels = [each.name for each in loads(SCENARIO.format(disturbance=ONE_SLOW)).schedules]
    lines = [
        "| delays | seeds | step time holds, % | speed-up holds, % | half width, % "
        "| uncorrected: step time | speed-up | half width, % |",
        *chain.from_iterable(coverage.get(name, []) for name in DELAYS),
    ]
    of_biases = [
        f"| delays | {' | '.join(f'`{each}`' for each in labels)} |",
        *chain.from_iterable(biases.get(name, []) for name in DELAYS),
    ]
    table = markdown_table(lines)
    return {"coverage": table, "bias": markdown_table(of_biases), "coverage in short": in_short(table.splitlines())}


def recorded(table: str) -> dict[str, list[str]]:
    """Return the rows of a table of the page by the kind of delays."""
    (text,) = re.findall(rf"<!-- table {table} -->\n(.*?)<!-- end -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    found: dict[str, list[str]] = {}
    for line in text.splitlines()[2:]:
        found.setdefault(line.split("|")[1].strip(), []).append(line)
    return found


def in_short(lines: Sequence[str]) -> str:
    """Return a line for each kind of delays: the ranges of all numbers of seeds together."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    short = ["| delays | step time holds, % | speed-up holds, % |"]
    for name in dict.fromkeys(each[0] for each in cells):
        of_name = [each for each in cells if each[0] == name]
        spans = [_joined(each[column] for each in of_name) for column in (2, 3)]
        short.append(f"| {' | '.join([name, *spans])} |")
    return markdown_table(short)


def _joined(spans: Iterable[str]) -> str:
    """Return the range of some ranges such as `93 to 95`; nothing of none."""
    ends = [float(end) for span in spans if span for end in span.split(" to ")]
    return f"{min(ends):.0f} to {max(ends):.0f}" if ends else ""


def main() -> None:
    """Simulate the grid, and print or write its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="repeats of each cell")
    parser.add_argument("--delays", nargs="+", choices=DELAYS, default=[*DELAYS], help="rows that are measured")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    options = parser.parse_args()
    found = tables(options.delays, options.repeats, n_workers=options.workers)
    if options.write:
        write_tables(PAGE, {name: found[name] for name in ("coverage", "bias")})
        write_tables(VALIDITY, {"coverage in short": found["coverage in short"]})
    else:
        print_tables(found)


if __name__ == "__main__":
    main()
