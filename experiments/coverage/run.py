"""Do 95 % intervals hold in 95 of 100 repeats? A grid of delays, schedules and numbers of seeds.

    python experiments/coverage/run.py                 simulate everything and print the table (9 minutes on one core)
    python experiments/coverage/run.py --repeats 40    fewer repeats
    python experiments/coverage/run.py --write         also write the table into the README

Each seed is simulated once. A repeat takes the next 3, 5 or 20 of them, and computes a row as `compare` does. The truth
is the mean over all seeds.
"""

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simdist.report import print_tables, write_tables
from simdist.runs.building import build
from simdist.scenario import Scenario, loads
from simdist.studies.comparison import row
from simdist.studies.known_delays import CostOfDelay, KnownDelays, corrected_by, cost_of_delay, known_delays
from simdist.studies.measuring import ScheduleTimes, measure
from simdist.studies.statistics import Interval

PAGE = Path(__file__).parent / "README.md"
SEEDS = (3, 5, 20)
AT_ONCE = 500  # seeds
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
    """One schedule, simulated with all seeds.

    Args:
        times: As simulated.
        drawn: What was drawn of rare and heavy delays.
        costs: What one delay more of each costs.
        n_steps: Of a run.
    """

    times: ScheduleTimes
    drawn: tuple[KnownDelays, ...]
    costs: tuple[CostOfDelay, ...]
    n_steps: int

    def repeat(self, first: int, n_seeds: int, *, is_corrected: bool = True) -> ScheduleTimes:
        """Return the times of some seeds, by default as `compare` corrects them."""
        some = slice(first, first + n_seeds)
        states_s = {state: seconds[some] for state, seconds in self.times.states_s.items()}
        found = replace(self.times, step_s=self.times.step_s[some], states_s=states_s)
        for each, cost in zip(self.drawn, self.costs, strict=True):
            own = replace(each, drawn_s=each.drawn_s[some], n_late=each.n_late[some])
            found = corrected_by(own, cost, found, n_steps=self.n_steps) if is_corrected else found
        return found


def pools_of(scenario: Scenario, n_seeds: int) -> list[Pool]:
    """Simulate the schedules of a scenario with all seeds."""
    drawn = known_delays(scenario, n_seeds)
    found = []
    for schedule in scenario.schedules:
        built = build(scenario, schedule)
        parts = [
            measure(scenario.changed(seed=first), built, n_seeds=min(AT_ONCE, n_seeds - first), facets=())
            for first in range(0, n_seeds, AT_ONCE)
        ]
        step_s = np.concatenate([part.step_s for part in parts])
        states_s = {state: np.concatenate([part.states_s[state] for part in parts]) for state in parts[0].states_s}
        costs = tuple(cost_of_delay(scenario, built, each) for each in known_delays(scenario, max(SEEDS)))
        times = replace(parts[0], step_s=step_s, states_s=states_s)
        found.append(Pool(times, drawn, costs, scenario.steps))
    return found


def shares(pools: list[Pool], n_seeds: int, n_repeats: int, *, is_corrected: bool) -> tuple[str, str, str]:
    """Return how often intervals of step times and speed-ups hold, and how wide the former are, over all schedules."""
    n_pool = len(pools[0].times.step_s)
    true_s = [float(each.repeat(0, n_pool).step_s.mean()) for each in pools]
    held = np.zeros((n_repeats, len(pools), 2))
    widths = np.zeros((n_repeats, len(pools)))
    for repeat in range(n_repeats):
        times = [each.repeat(repeat * n_seeds, n_seeds, is_corrected=is_corrected) for each in pools]
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


def tables(n_repeats: int) -> dict[str, str]:
    """Return the table of the page."""
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
            pools = pools_of(scenario, n_repeats * max(SEEDS))
            for n_seeds in SEEDS:
                corrected = shares(pools, n_seeds, n_repeats, is_corrected=True)
                plain = shares(pools, n_seeds, n_repeats, is_corrected=False) if pools[0].drawn else ("", "", "")
                lines.append(f"| {name} | {n_seeds} | {' | '.join(corrected + plain)} |")
                print(lines[-1], flush=True)
    return {"coverage": "\n".join(lines)}


def main() -> None:
    """Simulate the grid, and print or write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400, help="repeats of each cell")
    parser.add_argument("--write", action="store_true", help="write the table into the README")
    options = parser.parse_args()
    found = tables(options.repeats)
    if options.write:
        write_tables(PAGE, found)
    else:
        print_tables(found)


if __name__ == "__main__":
    main()
