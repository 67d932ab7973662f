"""Are ranks named that are late, and only these? A grid of noise, delays, ranks and steps, drawn and looked at.

    python experiments/late_ranks/run.py              draw everything and print the tables (20 minutes on one core)
    python experiments/late_ranks/run.py --jobs 20    fewer jobs of each kind
    python experiments/late_ranks/run.py --write      also write the tables into the README

The scale of a noise is its 90th percentile above its median. Delays are multiples of it. A step counts as short, so
that no delay is too small to be worth a line.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.estimates.stragglers import DelayTable, find_stragglers
from simdist.profiles.job.layout import RankLayout
from simdist.report import markdown_table, print_tables, write_tables

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, int], Floats]

PAGE = Path(__file__).parent / "README.md"
MEMORY = 0.7  # correlation of one step with the next
WIDEST = 3.0  # times as much noise on the last rank as on the first
STEP_S = 1e-6
QUIETEST = 0.05  # of the steps: the undisturbed time that delays are counted from
SIZES = ((2, 20), (8, 20), (64, 20), (4, 100), (16, 200), (8, 1000), (64, 1000))  # ranks, steps
DELAYS = (1.0, 2.0, 3.0, 5.0, 8.0, 15.0, 30.0)
RATES = (0.001, 0.01, 0.04, 0.1)
PLANTED_IN = ((8, 20), (4, 100), (16, 200), (8, 1000))
LARGEST = 20_000  # delays; of larger jobs, a tenth is drawn


def _lasting(rng: np.random.Generator, n_steps: int, n_ranks: int) -> Floats:
    from scipy.special import log_ndtr

    normal = rng.normal(size=(n_steps, n_ranks))
    for step in range(1, n_steps):
        normal[step] = MEMORY * normal[step - 1] + np.sqrt(1 - MEMORY**2) * normal[step]
    return np.asarray(-log_ndtr(-normal))


NOISES: dict[str, Draw] = {
    "normal": lambda rng, n_steps, n_ranks: rng.normal(size=(n_steps, n_ranks)),
    "exponential": lambda rng, n_steps, n_ranks: rng.exponential(size=(n_steps, n_ranks)),
    "lognormal, sigma 0.5": lambda rng, n_steps, n_ranks: rng.lognormal(0, 0.5, (n_steps, n_ranks)),
    "lognormal, sigma 1": lambda rng, n_steps, n_ranks: rng.lognormal(0, 1, (n_steps, n_ranks)),
    "Pareto, shape 3": lambda rng, n_steps, n_ranks: rng.pareto(3, (n_steps, n_ranks)),
    "Pareto, shape 2": lambda rng, n_steps, n_ranks: rng.pareto(2, (n_steps, n_ranks)),
    "autocorrelated": _lasting,
    "rank-dependent": lambda rng, n_steps, n_ranks: (
        rng.normal(size=(n_steps, n_ranks)) * np.geomspace(1, WIDEST, n_ranks)
    ),
}


@dataclass(frozen=True, slots=True)
class Counts:
    """What was found in jobs of one kind.

    Args:
        planted: Delays.
        found: Of these.
        known: Of these, delays above what noise of the known distribution exceeds in one of 20 jobs.
        wrong: Delays named that were not planted.
        named: Delays named.
        size: Mean ratio of the sizes told and planted.
    """

    planted: int
    found: int
    known: int
    wrong: int
    named: int
    size: float


def named(delay_s: Floats) -> Floats:
    """Return how late each rank is told to be in each step, NaN where it is not, `[n_steps, n_ranks]`."""
    n_steps, n_ranks = delay_s.shape
    above_s = np.maximum(0.0, delay_s - np.quantile(delay_s, QUIETEST))
    delays = DelayTable({"host": above_s}, range(n_ranks), range(n_steps), step_s=STEP_S)
    told_s = np.full(delay_s.shape, np.nan)
    for each in find_stragglers(delays, RankLayout(1, n_ranks, "")):
        told_s[np.ix_(each.steps, each.ranks)] = each.seconds
    return told_s


def false_alarms(draw: Draw, n_ranks: int, n_steps: int, n_jobs: int) -> float:
    """Return the share of jobs without stragglers of which one is told."""
    rng = np.random.default_rng(1)
    return float(np.mean([np.isfinite(named(draw(rng, n_steps, n_ranks))).any() for _ in range(n_jobs)]))


def detected(draw: Draw, times: float, rates: tuple[float, ...], sizes: tuple[tuple[int, int], ...], n: int) -> Counts:
    """Return what is found of delays of some multiple of the noise's scale."""
    rng = np.random.default_rng(2)
    planted = found = known = wrong = n_named = 0
    ratios = []
    for n_ranks, n_steps in sizes:
        largest_s = [float(draw(rng, n_steps, n_ranks).max()) for _ in range(max(40, n))]
        limit_s = float(np.quantile(largest_s, 0.95))
        for rate in rates:
            for _ in range(n):
                noise_s = draw(rng, n_steps, n_ranks)
                delay_s = times * float(np.quantile(noise_s, 0.9) - np.median(noise_s))
                is_late = rng.random(noise_s.shape) < rate
                late_s = noise_s + np.where(is_late, delay_s, 0.0)
                told_s = named(late_s)
                is_told = np.isfinite(told_s)
                planted += int(is_late.sum())
                found += int((is_told & is_late).sum())
                known += int((late_s[is_late] > limit_s).sum())
                wrong += int((is_told & ~is_late).sum())
                n_named += int(is_told.sum())
                ratios += (told_s[is_told & is_late] / delay_s).tolist()
    return Counts(planted, found, known, wrong, n_named, float(np.mean(ratios)) if ratios else float("nan"))


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def tables(n_jobs: int) -> dict[str, str]:
    """Return the tables of the page."""
    sizes = [f"{n_ranks} x {n_steps:,}" for n_ranks, n_steps in SIZES]
    alarms = [f"| noise | {' | '.join(sizes)} |"]
    for name, draw in NOISES.items():
        cells = []
        for n_ranks, n_steps in SIZES:
            n = n_jobs if n_ranks * n_steps < LARGEST else max(1, n_jobs // 10)
            cells.append(f"{100 * false_alarms(draw, n_ranks, n_steps, n):.1f} %")
        alarms.append(f"| {name} | {' | '.join(cells)} |")
        print(alarms[-1], flush=True)
    multiples = " | ".join(f"{times:g}" for times in DELAYS)
    found = [f"| noise | {multiples} | named, but noise | size told |"]
    for name, draw in NOISES.items():
        rows = [detected(draw, times, RATES, PLANTED_IN, max(1, n_jobs // 20)) for times in DELAYS]
        cells = [f"{_share(row.found, row.planted)} ({_share(row.known, row.planted)})" for row in rows]
        wrong = _share(sum(row.wrong for row in rows), sum(row.named for row in rows))
        sizes_told = np.mean([row.size for row in rows if row.found > 0.5 * row.planted] or [np.nan])
        found.append(f"| {name} | {' | '.join(cells)} | {wrong} | {sizes_told:.2f} |")
        print(found[-1], flush=True)
    return {"late alarms": markdown_table(alarms), "late found": markdown_table(found)}


def main() -> None:
    """Draw the grid, and print or write its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=400, help="jobs without stragglers of each kind")
    parser.add_argument("--write", action="store_true", help="write the tables into the README")
    options = parser.parse_args()
    found = tables(options.jobs)
    if options.write:
        write_tables(PAGE, found)
    else:
        print_tables(found)


if __name__ == "__main__":
    main()
