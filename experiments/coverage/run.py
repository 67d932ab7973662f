"""Do 95 % intervals hold in 95 of 100 repeats? A grid of delays, schedules and numbers of seeds.

    python experiments/coverage/run.py                 simulate everything and print the tables (5 minutes on one core)
    python experiments/coverage/run.py --pool 400      fewer seeds, and so fewer repeats
    python experiments/coverage/run.py --write         also write the tables into the pages

Each seed is simulated once. A repeat takes the next 3, 5 or 20 of them, and computes a row as `compare` does. The truth
is the mean over all seeds.
"""

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simdist.report import print_tables, write_tables
from simdist.runs.building import Built, build
from simdist.scenario import Scenario, loads
from simdist.scenario.sampling import run_seeds
from simdist.schedules import Schedule
from simdist.studies.comparison import row
from simdist.studies.known_delays import CostOfDelay, corrected_by, cost_of_delay, known_delays
from simdist.studies.measuring import ScheduleTimes, measure
from simdist.studies.statistics import Interval

PAGE = Path(__file__).parent / "README.md"
VALIDITY = PAGE.parents[2] / "docs" / "background" / "validity.md"
SEEDS = (3, 5, 20)
AT_ONCE = 500  # seeds
MOST_REPEATS = 400
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
DELAYS = {
    "1 % x 200 ms": "{kind: transient, probability: 1%, delay: 200 ms}",
    "0.1 % x 1 s": "{kind: transient, probability: 0.1%, delay: 1 s}",
    "0.02 % x 2 s": "{kind: transient, probability: 0.02%, delay: 2 s}",
    "0.005 % x 10 s": "{kind: transient, probability: 0.005%, delay: 10 s}",
    "bursts": "{kind: bursts, enter: 0.05%, leave: 20%, delay: 100 ms}",
    "exponential": "{kind: exponential, mean: 20 ms}",
    "lognormal, sigma 2": "{kind: jitter, median: 2 ms, sigma: 2}",
    "Pareto, shape 2.5": "{kind: heavy_tail, scale: 5 ms, shape: 2.5}",
    "Pareto, shape 1.5 *": "{kind: heavy_tail, scale: 5 ms, shape: 1.5}",
    "Pareto, shape 1.1 *": "{kind: heavy_tail, scale: 5 ms, shape: 1.1}",
    "recorded, blocks of 10 steps": "{kind: recorded, file: recorded.npz, resample_steps: 10}",
}


@dataclass(frozen=True, slots=True)
class Pool:
    """One schedule of a scenario, simulated with all seeds.

    Args:
        scenario: The scenario.
        built: The schedule.
        times: As simulated.
        seeds: Those of all runs.
    """

    scenario: Scenario
    built: Built
    times: ScheduleTimes
    seeds: Sequence[int]

    def costs(self, n_seeds: int) -> list[CostOfDelay]:
        """Return what one delay more costs, for each disturbance that `compare` corrects for with so many seeds."""
        known = known_delays(self.scenario, self.seeds[:n_seeds])
        return [cost_of_delay(self.scenario, self.built, each) for each in known]

    def some(self, first: int, n_seeds: int) -> ScheduleTimes:
        """Return the times of some seeds."""
        seeds = slice(first, first + n_seeds)
        states_s = {state: seconds[seeds] for state, seconds in self.times.states_s.items()}
        return replace(self.times, step_s=self.times.step_s[seeds], states_s=states_s)


def pool(scenario: Scenario, schedule: Schedule, n_seeds: int) -> Pool:
    """Simulate a schedule with all seeds."""
    built = build(scenario, schedule)
    sizes = {seed: min(AT_ONCE, n_seeds - first) for seed, first in enumerate(range(0, n_seeds, AT_ONCE))}
    parts = [measure(scenario.changed(seed=seed), built, n_seeds=n, facets=()) for seed, n in sizes.items()]
    step_s = np.concatenate([part.step_s for part in parts])
    states_s = {state: np.concatenate([part.states_s[state] for part in parts]) for state in parts[0].states_s}
    seeds = [each for seed, n in sizes.items() for each in run_seeds(seed, n)]
    return Pool(scenario, built, replace(parts[0], step_s=step_s, states_s=states_s), seeds)


def repeated(
    pools: Sequence[Pool], costs: Sequence[Sequence[CostOfDelay]], first: int, n_seeds: int
) -> list[ScheduleTimes]:
    """Return the times of some seeds of each schedule, as `compare` corrects them; without costs as simulated."""
    scenario = pools[0].scenario
    times = [each.some(first, n_seeds) for each in pools]
    if any(costs):
        drawn = known_delays(scenario, pools[0].seeds[first : first + n_seeds])
        for number, own in enumerate(costs):
            for each, cost in zip(drawn, own, strict=True):
                times[number] = corrected_by(each, cost, times[number], n_steps=scenario.steps)
    return times


def shares(
    pools: Sequence[Pool], costs: Sequence[Sequence[CostOfDelay]], true_s: Sequence[float], n_seeds: int, n_repeats: int
) -> tuple[str, str, str]:
    """Return how often intervals of step times and speed-ups hold, and how wide the former are, over all schedules."""
    held = np.zeros((n_repeats, len(pools), 2))
    widths = np.zeros((n_repeats, len(pools)))
    for repeat in range(n_repeats):
        times = repeated(pools, costs, repeat * n_seeds, n_seeds)
        for number, (one, truth_s) in enumerate(zip(times, true_s, strict=True)):
            found = row(one, times[0])
            held[repeat, number] = _holds(found.step_s_ci95, truth_s), _holds(found.speedup_ci95, true_s[0] / truth_s)
            low, high = found.step_s_ci95 or (0.0, 0.0)
            widths[repeat, number] = (high - low) / 2 / found.step_s
    share = held.mean(axis=0)
    return _span(share[:, 0], digits=0), _span(share[1:, 1], digits=0), _span(np.median(widths, axis=0), digits=1)


def _holds(interval: Interval | None, truth: float) -> bool:
    return interval is not None and interval[0] * (1 - ROUNDING) <= truth <= interval[1] * (1 + ROUNDING)


def _span(shares: NDArray[np.float64], *, digits: int) -> str:
    low, high = (f"{100 * each:.{digits}f}" for each in (shares.min(), shares.max()))
    return low if low == high else f"{low} to {high}"


def tables(n_all: int) -> dict[str, str]:
    """Return the tables of the pages."""
    lines = [
        "| delays | seeds | step time holds, % | speed-up holds, % | half width, % "
        "| uncorrected: step time | speed-up | half width, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        recorded_s = np.random.default_rng(1).exponential(0.02, (RECORDED_STEPS, 16))
        np.savez(Path(folder) / "recorded.npz", host=recorded_s)
        for name, disturbance in DELAYS.items():
            scenario = loads(SCENARIO.format(disturbance=disturbance), name=name, folder=Path(folder))
            pools = [pool(scenario, each, n_all) for each in scenario.schedules]
            of_all = [each.costs(n_all) for each in pools]
            true_s = [float(each.step_s.mean()) for each in repeated(pools, of_all, 0, n_all)]
            for n_seeds in SEEDS:
                n_repeats = min(MOST_REPEATS, n_all // n_seeds)
                costs = [each.costs(n_seeds) for each in pools]
                corrected = shares(pools, costs, true_s, n_seeds, n_repeats)
                none: list[list[CostOfDelay]] = [[] for _ in pools]
                plain = shares(pools, none, true_s, n_seeds, n_repeats) if any(costs) else ("", "", "")
                lines.append(f"| {name} | {n_seeds} | {' | '.join(corrected + plain)} |")
                print(lines[-1], flush=True)
    return {"coverage": "\n".join(lines), "coverage in short": in_short(lines)}


def in_short(lines: Sequence[str]) -> str:
    """Return a line for each kind of delays: the ranges of all numbers of seeds together."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    short = [
        "| delays | step time holds, % | speed-up holds, % | uncorrected: step time | speed-up |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(each[0] for each in cells):
        of_name = [each for each in cells if each[0] == name]
        spans = [_joined(each[column] for each in of_name) for column in (2, 3, 5, 6)]
        short.append(f"| {' | '.join([name, *spans])} |")
    return "\n".join(short)


def _joined(spans: Iterable[str]) -> str:
    """Return the range of some ranges such as `93 to 95`; nothing of none."""
    ends = [float(end) for span in spans if span for end in span.split(" to ")]
    return f"{min(ends):.0f} to {max(ends):.0f}" if ends else ""


def main() -> None:
    """Simulate the grid, and print or write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=int, default=4000, help="seeds of each schedule, which repeats take in turn")
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    options = parser.parse_args()
    found = tables(options.pool)
    if options.write:
        write_tables(PAGE, {"coverage": found["coverage"]})
        write_tables(VALIDITY, {"coverage in short": found["coverage in short"]})
    else:
        print_tables(found)


if __name__ == "__main__":
    main()
