"""What does garbage collection cost if each process collects when it likes? A published comparison, from pauses alone.

    python experiments/garbage_collection/run.py            print the tables
    python experiments/garbage_collection/run.py --write    write them into the README

Published: see published.json. Nothing is fitted: the time of the run with automatic collection is predicted, not read.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.report import markdown_table, page_command
from simdist.runs.building import build, delays
from simdist.scenario import Host, Pauses, Scenario, load

HERE = Path(__file__).parent
N_SEEDS = 100
N_WARM_UP = 10  # updates before those that are measured
NOTHING_S = (0.0, 0.0)


@dataclass(frozen=True)
class Facts:
    """Published facts of a pair of runs.

    Args:
        processes: Processes that update together.
        updates: Measured updates.
        collections: Full collections of all processes, if they collect when they like.
        steps_with_collections: Steps in which they fell.
        every: Least and most steps from one collection of a process to its next.
        periodic_s: Mean pause of the slowest process, in collections that all begin together.
        pause_s: Shortest and longest pause.
        coordinated_before_final_s: Seconds of the run that collects together, before its last collection.
        n_before_final: Collections of that run before the last one.
        automatic_s: Seconds of the run that is predicted; used only to tell the error.
        coordinated_s: Seconds of the run that collects together.
    """

    processes: int
    updates: int
    collections: int
    steps_with_collections: int
    every: tuple[int, int]
    periodic_s: float
    pause_s: tuple[float, float]
    coordinated_before_final_s: float
    n_before_final: int
    automatic_s: float
    coordinated_s: float

    @property
    def step_s(self) -> float:
        """Seconds of an update without pauses: those of the run that collects together, less its collections."""
        return (self.coordinated_before_final_s - self.n_before_final * self.periodic_s) / self.updates

    @property
    def saved_s(self) -> float:
        """Seconds that collecting together saved."""
        return self.automatic_s - self.coordinated_s


def read_facts(path: Path) -> Facts:
    """Read the published facts of a job."""
    document = json.loads(path.read_text(encoding="utf-8"))
    automatic: Mapping[str, Any] = document["automatic"]
    together: Mapping[str, Any] = document["coordinated"]
    shortest_s, longest_s = together["slowest_periodic_s"]
    low, high = document["steps_between_collections"]
    return Facts(
        processes=document["processes"],
        updates=document["updates"],
        collections=automatic["collections"],
        steps_with_collections=automatic["steps_with_collections"],
        every=(low, high),
        periodic_s=(shortest_s + longest_s) / 2,
        pause_s=(shortest_s, together["slowest_final_s"]),
        coordinated_before_final_s=together["elapsed_before_final_s"],
        n_before_final=together["collections_before_final"],
        automatic_s=automatic["elapsed_s"],
        coordinated_s=together["elapsed_s"],
    )


def scenario_of(facts: Facts, *pauses: Pauses, host: Host | None = None) -> Scenario:
    """Return the job, of equal processes that update together."""
    base = load(HERE / "scenario.yaml")
    workload = base.workload.model_copy(update={"forward_s": facts.step_s})
    return base.changed(workload=workload, disturbances=pauses, host=host or base.host)


def placed_s(facts: Facts, covered_s: tuple[float, float], seed: int) -> NDArray[np.float64]:
    """Return the published number of pauses in the published number of steps, seconds `[1, updates, processes]`.

    Each of the steps has a pause at least; the others fall into any of them. Which process pauses makes no difference.
    """
    random = np.random.default_rng(seed)
    steps = random.choice(facts.updates, facts.steps_with_collections, replace=False)
    further = random.choice(steps, facts.collections - facts.steps_with_collections)
    at = np.sort(np.concatenate([steps, further]))
    ranks = np.arange(facts.collections) % facts.processes
    lasts_s = random.uniform(*facts.pause_s, facts.collections)
    late_s = np.zeros((1, facts.updates, facts.processes))
    late_s[0, at, ranks] = np.maximum(lasts_s - random.uniform(*covered_s, facts.collections), 0.0)
    return late_s


def placed_run_s(facts: Facts, covered_s: tuple[float, float], seed: int, host: Host | None = None) -> float:
    """Return the simulated seconds of the updates, with pauses placed as published."""
    scenario = scenario_of(facts, Pauses(every=facts.every, delay_s=facts.pause_s), host=host)
    built = build(scenario, scenario.schedules[0])
    drawn = {"host": placed_s(facts, covered_s, seed)}
    return run(built.plan, built.costs, drawn, observe=WholeTrace()).makespan_s


def drawn_run(facts: Facts, covered_s: tuple[float, float], seed: int) -> tuple[float, int, int]:
    """Return seconds, pauses and steps with pauses of a run whose processes begin at random moments."""
    pauses = Pauses(every=facts.every, delay_s=facts.pause_s, covered_s=covered_s)
    scenario = scenario_of(facts, pauses).changed(seed=seed)
    built = build(scenario, scenario.schedules[0])
    trace = run(built.plan, built.costs, delays(scenario), observe=WholeTrace())
    uncovered = scenario.changed(disturbances=[pauses.model_copy(update={"covered_s": NOTHING_S})])
    pausing = delays(uncovered)["host"][0] > 0
    return trace.makespan_s, int(pausing.sum()), int(pausing.any(axis=1).sum())


def coordinated_run_s(facts: Facts) -> float:
    """Return the simulated seconds of the run that collects together, before its last collection."""
    n_later = facts.n_before_final - 1
    apart = facts.updates // n_later
    pause_s = (facts.periodic_s, facts.periodic_s)
    at_first = Pauses(every=(facts.updates, facts.updates), first=(0, 0), delay_s=pause_s)
    second = apart - N_WARM_UP
    later = Pauses(every=(apart, apart), first=(second, second), delay_s=pause_s)
    scenario = scenario_of(facts, at_first, later)
    built = build(scenario, scenario.schedules[0])
    return run(built.plan, built.costs, delays(scenario), observe=WholeTrace()).makespan_s


@dataclass(frozen=True)
class Prediction:
    """Seconds of the run with automatic collection, one number per seed."""

    what: str
    elapsed_s: NDArray[np.float64]


def predictions(facts: Facts, n_seeds: int) -> list[Prediction]:
    """Return predictions from the placed pauses, each with another rule for what the device hides."""
    over_a_step = (0.0, facts.step_s)
    summed_s = facts.updates * facts.step_s + facts.collections * sum(facts.pause_s) / 2
    seeds = range(n_seeds)
    longest = [placed_run_s(facts, NOTHING_S, seed) for seed in seeds]
    hidden = [placed_run_s(facts, over_a_step, seed) for seed in seeds]
    ahead = [placed_run_s(facts, NOTHING_S, seed, Host(run_ahead_steps=1)) for seed in seeds]
    return [
        Prediction("sum of all pauses", np.array([summed_s])),
        Prediction("longest pause of each step, between updates", np.array(longest)),
        Prediction("**longest pause of each step, at any moment of the update**", np.array(hidden)),
        Prediction("hosts a whole update ahead", np.array(ahead)),
    ]


def saved_table(facts: Facts, n_seeds: int) -> Iterator[str]:
    """Yield each prediction beside the published difference."""
    yield "| pauses count as | automatic | saved by collecting together | published | error |"
    for each in predictions(facts, n_seeds):
        saved_s = each.elapsed_s - facts.coordinated_s
        low, high = np.quantile(saved_s, [0.025, 0.975])
        shown = f"{saved_s.mean():.1f} s" + (f" ({low:.1f} to {high:.1f})" if high - low > 0.05 else "")
        error = f"{saved_s.mean() / facts.saved_s - 1:+.0%}"
        yield f"| {each.what} | {each.elapsed_s.mean():.1f} s | {shown} | {facts.saved_s:.1f} s | {error} |"


def drawn_table(facts: Facts, n_seeds: int) -> Iterator[str]:
    """Yield what comes of pauses whose steps are drawn, not placed."""
    found = np.array([drawn_run(facts, (0.0, facts.step_s), seed) for seed in range(n_seeds)])
    elapsed_s, pauses, steps = found.T
    saved_s = elapsed_s - facts.coordinated_s
    yield "| | drawn, mean (95 % of runs) | published |"
    for what, values, published, form in (
        ("collections", pauses, facts.collections, ".0f"),
        ("steps with a collection", steps, facts.steps_with_collections, ".0f"),
        ("saved, s", saved_s, facts.saved_s, ".1f"),
    ):
        low, high = np.quantile(values, [0.025, 0.975])
        yield f"| {what} | {values.mean():{form}} ({low:{form}} to {high:{form}}) | {published:{form}} |"


def known_table(facts: Facts) -> Iterator[str]:
    """Yield what follows from the published numbers alone."""
    lost_s = facts.automatic_s - facts.updates * facts.step_s
    share = lost_s / facts.steps_with_collections / (sum(facts.pause_s) / 2)
    yield "| | |"
    yield f"| update without pauses | {facts.step_s:.3f} s |"
    together_s = coordinated_run_s(facts)
    yield f"| run that collects together, before its last collection, simulated | {together_s:.1f} s |"
    yield f"| lost to automatic collection, published | {lost_s:.1f} s |"
    yield f"| of the longest pauses, that is | {share:.0%} |"


def tables(facts: Facts, n_seeds: int = N_SEEDS) -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {
        "saved": markdown_table(saved_table(facts, n_seeds)),
        "drawn": markdown_table(drawn_table(facts, n_seeds)),
        "known": markdown_table(known_table(facts)),
    }


if __name__ == "__main__":
    page_command(str(__doc__), HERE / "README.md", lambda: tables(read_facts(HERE / "published.json")))
