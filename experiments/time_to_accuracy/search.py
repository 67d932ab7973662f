"""Does `simdist tune --target` find what training every candidate to the end finds, and with how many steps?

    python experiments/time_to_accuracy/search.py            train, and print the table
    python experiments/time_to_accuracy/search.py --write    also record it, and write it into the README
    python experiments/time_to_accuracy/search.py --tables   print the recorded table

Tasks on 64 virtual ranks; synchronous, local and hierarchical SGD, with several learning rates. The search trains
first, and is not told what the exhaustive training, which follows with the same seed, finds.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from simdist.jobs.workers import LocalPool, Workers
from simdist.learning.curves import parse_target
from simdist.learning.summary import train_schedules
from simdist.learning.training import Trainer, describe
from simdist.machine import n_cores
from simdist.report import markdown_table, print_tables, write_tables
from simdist.scenario import load
from simdist.tuning import Constraints, Extras, TuneOptions
from simdist.tuning.racing import race, simulate_entrants

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "README.md", HERE / "search.json"
EVERY = 10
"""Steps between evaluations."""


@dataclass(frozen=True)
class Case:
    """A task, and what is searched.

    Args:
        task: Its name.
        kinds: Of schedules.
        global_every: Most steps between averages of all ranks.
        lr_factors: Factors of the task's learning rate.
        targets: Each is searched for.
    """

    task: str
    kinds: tuple[str, ...]
    global_every: int
    lr_factors: tuple[float, ...]
    targets: tuple[str, ...]


LOCAL = ("sync", "local_sgd")
CASES = (
    Case("split", LOCAL, 16, (0.5, 1.0, 2.0, 4.0), ("accuracy >= 0.5", "accuracy >= 0.65", "accuracy >= 0.8")),
    Case("digits", (*LOCAL, "hierarchical_sgd"), 4, (1.0, 2.0), ("accuracy >= 0.5", "accuracy >= 0.8")),
    Case("quadratic", LOCAL, 16, (0.25, 0.5, 1.0), ("average.loss <= 0.05", "average.loss <= 0.02")),
)


@dataclass(frozen=True)
class Search:
    """What a search found, beside the truth.

    Args:
        n_entrants: Schedules times learning rates, without those that learn the same as a faster one.
        steps: That the search trained, and all entrants to the end.
        n_fell: Entrants that it gave up before another one was there.
        found: Label of the best that it found.
        found_s: When that one reaches the target, in the exhaustive training.
        best: Label of the best of all.
        best_s: When it reaches the target.
        n_reach: Entrants that reach it at all.
    """

    task: str
    target: str
    n_entrants: int
    steps: tuple[int, int]
    n_fell: int
    found: str
    found_s: float
    best: str
    best_s: float
    n_reach: int


def searches(case: Case, pool: Workers) -> Iterator[Search]:
    """Search, then train all."""
    scenario, task = load(HERE / "search.yaml"), describe(case.task, EVERY)
    wanted = TuneOptions(Constraints(global_every=case.global_every), Extras(only=case.kinds), n_search_seeds=1)
    exhaustive = Trainer(None, pool, lambda *_: None)
    _, entrants = simulate_entrants(scenario, wanted, task, exhaustive, case.lr_factors)
    for text in case.targets:
        target, trainer = parse_target(text), Trainer(None, pool, lambda *_: None)
        train = partial(train_schedules, task=task, trainer=trainer)
        (first, *_), _, n_fell = race(entrants, train, target, every=EVERY, n_base=len(case.lr_factors))
        times = {each.label: each.to_target(target)[1, 0] for each in train_schedules(entrants, task, exhaustive)}
        (found,) = train_schedules([first], task, exhaustive)
        best, n_all = min(times, key=lambda label: times[label]), len(entrants) * scenario.steps
        yield Search(
            case.task,
            text,
            len(entrants),
            (trainer.n_steps, n_all),
            n_fell,
            found.label,
            times[found.label],
            best,
            times[best],
            int(np.isfinite([*times.values()]).sum()),
        )


def tables(results: list[Search]) -> dict[str, str]:
    """Return the table of the README by its name."""
    lines = [
        "| task | target | candidates | reach it | steps trained | of all | given up | found | s | best of all | s |"
    ]
    for each in results:
        ours, every = each.steps
        cells = f"| {each.task} | {each.target} | {each.n_entrants} | {each.n_reach} | {ours:,} | {ours / every:.0%} "
        named = f"| {each.n_fell} | `{each.found}` | {each.found_s:.2f} | `{each.best}` | {each.best_s:.2f} |"
        lines.append(cells + named)
    return {"search": markdown_table(lines)}


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
            results = [each for case in CASES for each in searches(case, pool)]
    if arguments.write:
        RESULTS.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n", encoding="utf-8")
        write_tables(PAGE, tables(results))
    print_tables(tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
