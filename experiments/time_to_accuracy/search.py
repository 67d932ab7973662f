"""Does `simdist tune --target` find what training every candidate to the end finds, and with how many steps?

    python experiments/time_to_accuracy/search.py            train, and print the table
    python experiments/time_to_accuracy/search.py --write    also record it, and write it into the README
    python experiments/time_to_accuracy/search.py --tables   print the recorded table

A task on 64 virtual ranks; synchronous SGD, and local SGD of periods up to 16, with four learning rates. The search
trains first, and is not told what the exhaustive training, which follows with the same seed, finds.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from simdist.learning.curves import parse_target
from simdist.learning.summary import learn
from simdist.learning.training import Trainer, describe
from simdist.report import print_tables, write_tables
from simdist.scenario import load
from simdist.sweep.workers import LocalPool, n_cores
from simdist.tune import Constraints, Extras, TuneOptions
from simdist.tune.racing import race, simulate_entrants

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "README.md", HERE / "search.json"
TARGETS = {"split": "accuracy >= 0.5"}
LR_FACTORS = (0.5, 1.0, 2.0, 4.0)
EVERY = 10
"""Steps between evaluations."""
WANTED = TuneOptions(Constraints(global_every=16), Extras(only=("sync", "local_sgd")), n_search_seeds=1)


@dataclass(frozen=True)
class Search:
    """What a search found, beside the truth.

    Args:
        n_entrants: Schedules times learning rates, without those that learn the same as a faster one.
        steps: That the search trained, and all entrants to the end.
        found: Label of the best that it found.
        found_s: When that one reaches the target, in the exhaustive training.
        best: Label of the best of all.
        best_s: When it reaches the target.
        n_reach: Entrants that reach it at all.
    """

    task: str
    n_entrants: int
    steps: tuple[int, int]
    found: str
    found_s: float
    best: str
    best_s: float
    n_reach: int


def search(name: str, trainer: Trainer) -> Search:
    """Search, then train all."""
    scenario, target, task = load(HERE / "search.yaml"), parse_target(TARGETS[name]), describe(name, EVERY)
    _, entrants = simulate_entrants(scenario, WANTED, task, trainer, LR_FACTORS)
    first, *_ = race(entrants, lambda some: learn(some, task, trainer), target, every=EVERY)
    n_steps = trainer.n_steps
    times = {each.label: each.to_target(target)[1, 0] for each in learn(entrants, task, trainer)}
    (found,) = learn([first], task, trainer)
    best = min(times, key=lambda label: times[label])
    n_reach, n_all = int(np.isfinite([*times.values()]).sum()), len(entrants) * scenario.steps
    return Search(name, len(entrants), (n_steps, n_all), found.label, times[found.label], best, times[best], n_reach)


def tables(results: list[Search]) -> dict[str, str]:
    """Return the table of the README by its name."""
    lines = ["| task | candidates | reach it | steps trained | of all | found | seconds | best of all | seconds |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for each in results:
        ours, every = each.steps
        cells = f"| {each.task} | {each.n_entrants} | {each.n_reach} | {ours:,} | {ours / every:.0%} "
        lines.append(f"{cells}| `{each.found}` | {each.found_s:.1f} | `{each.best}` | {each.best_s:.1f} |")
    return {"search": "\n".join(lines)}


def recorded() -> list[Search]:
    """Read the recorded results."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    return [Search(**row | {"steps": tuple(row["steps"])}) for row in rows]


def main() -> int:
    """Run the searches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the results, and write them into the page")
    parser.add_argument("--tables", action="store_true", help="print the recorded table")
    arguments = parser.parse_args()
    if arguments.tables:
        results = recorded()
    else:
        with LocalPool(n_cores()) as pool:
            results = [search(name, Trainer(None, pool, lambda *_: None)) for name in TARGETS]
    if arguments.write:
        RESULTS.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n", encoding="utf-8")
        write_tables(PAGE, tables(results))
    print_tables(tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
