"""Do intervals of `simdist learn` hold? Training runs on digits, put together with delays again and again.

    python experiments/coverage/learned.py            print the table from the recorded training runs (1 minute)
    python experiments/coverage/learned.py --write    also write it into the page
    python experiments/coverage/learned.py --train    train again, and record it (4 minutes of CPU time)

What a run learns does not depend on its delays. So 150 runs are trained once. A repeat takes 3 or 5 of them, with
delays of its own, and computes a row as `learn` does. The truth is the mean over all trained runs and 2,000 other runs
of delays.
"""

import argparse
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.learning.curves import Curve, parse_target
from simdist.learning.summary import Learned, learned_row
from simdist.learning.timing import TimedSchedule, training_plan
from simdist.learning.training import describe
from simdist.plan.codec import dumps
from simdist.report import markdown_table, print_tables, write_tables
from simdist.runs.building import Built, build, delays
from simdist.scenario import Scenario, loads
from simdist.scenario.sampling import run_seeds
from simdist.studies.known_delays import corrected_ends
from simdist.studies.measuring import ScheduleTimes
from simdist.traces.waiting import step_end_s

HERE = Path(__file__).parent
RECORDED = HERE / "learned.json"
TRAINED = 150
SEEDS = (3, 5)
REPEATS = 200
OTHERS = 2000
FIRST_OTHER = 2**50  # seeds that no study has
EVERY = 3  # steps between evaluations
TARGET = parse_target("accuracy >= 0.5")
SCENARIO = """
cluster:
  nodes: 2
  gpus_per_node: 2
  fabric: {{latency: 6 us, bandwidth: 100 GB/s}}
  network: {{latency: 25 us, bandwidth: 25 Gbit/s, efficiency: 0.8}}
workload: {{preset: resnet50, forward: 30 ms, backward: 60 ms}}
disturbances: [{disturbance}]
steps: 66
schedules: [sync, local-4]
"""
DELAYS = {
    "1 % x 200 ms": "{kind: transient, probability: 1%, delay: 200 ms}",
    "0.1 % x 2 s": "{kind: transient, probability: 0.1%, delay: 2 s}",
}
METRICS = ("steps_to_target", "target_s", "target_speedup")


def train() -> dict[str, list[list[float]]]:
    """Train all runs in this process; return the accuracy at each evaluation, by schedule and seed."""
    import torch

    from real.learn import main as learn

    torch.set_num_threads(1)
    scenario = loads(SCENARIO.format(disturbance=""))
    task = describe("digits", EVERY)
    found: dict[str, list[list[float]]] = {}
    for schedule in scenario.schedules:
        plan = HERE / "plan.json"
        plan.write_text(dumps(training_plan(scenario, schedule, task)), encoding="utf-8")
        for seed in range(TRAINED):
            request = {"task": "digits", "plan": str(plan), "seed": seed, "evaluate_every": EVERY}
            out = io.StringIO()
            learn(io.StringIO(json.dumps(request)), out)
            told = [json.loads(line) for line in out.getvalue().splitlines()]
            accuracies = [round(each["average"]["accuracy"], 4) for each in told if "step" in each]
            found.setdefault(schedule.name, []).append(accuracies)
        plan.unlink()
    return found


def curve(accuracies: Sequence[float]) -> Curve:
    """Return a training run as `learn` has it."""
    n = len(accuracies)
    steps = [EVERY * number for number in range(n)]
    nothing: list[float | None] = [None] * n
    return Curve(steps, [np.nan] * n, {}, {"accuracy": [*accuracies]}, [0.0] * n, nothing, nothing, {}, None)


def ends_s_of(scenario: Scenario, built: Built, seeds: Sequence[int]) -> NDArray[np.float64]:
    """Return simulated seconds from the start to the end of each step, `[n_seeds, n_steps]`."""
    found = []
    for seed in seeds:
        trace = run(built.plan, built.costs, delays(scenario.changed(seed=seed)), observe=WholeTrace())
        found.append(step_end_s(trace).max(axis=1))
    return np.stack(found)


def learned(
    scenario: Scenario, built: Built, curves: Sequence[Curve], ends_s: NDArray[np.float64], *, corrected: bool
) -> Learned:
    """Return training runs with the simulated ends of their steps."""
    times = ScheduleTimes(built.schedule.name, "", ends_s[:, -1] / scenario.steps, {})
    if corrected:
        times, ends_s = corrected_ends(scenario, built, ends_s)
    timed = TimedSchedule(scenario, built.schedule, times, ends_s, built.plan, (None,) * len(curves))
    return Learned(timed, curves)


def truth(curves: Mapping[str, Sequence[Curve]], ends_s: Mapping[str, NDArray[np.float64]]) -> dict[str, list[float]]:
    """Return the means of each metric, by schedule, over all pairs of training runs and runs of delays."""
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for name, of_seeds in curves.items():
        reached = [TARGET.reached(TARGET.values(each)) for each in of_seeds]
        steps = np.array([each.steps[at] for each, at in zip(of_seeds, reached, strict=True) if at is not None])
        assert len(steps) == len(of_seeds), "all runs reach the target"
        found["steps_to_target"].append(float(steps.mean()))
        found["target_s"].append(float(ends_s[name].mean(axis=0)[steps - 1].mean()))
        found["target_speedup"].append(found["target_s"][0] / found["target_s"][-1])
    return found


def rows_of(name: str, curves: Mapping[str, Sequence[Curve]], n_repeats: int) -> list[str]:
    """Return the rows of the table for one kind of delays."""
    scenario = loads(SCENARIO.format(disturbance=DELAYS[name]), name=name)
    built = {each.name: build(scenario, each) for each in scenario.schedules}
    others = [FIRST_OTHER + number for number in range(OTHERS)]
    true = truth(curves, {label: ends_s_of(scenario, each, others) for label, each in built.items()})
    numbers = np.random.default_rng(0)
    rows = []
    for n_seeds in SEEDS:
        held: dict[bool, list[list[list[bool]]]] = {True: [], False: []}
        widths = []
        for repeat in range(n_repeats):
            its = scenario.changed(seed=repeat)
            chosen = numbers.choice(TRAINED, n_seeds, replace=False)
            ends_s = {label: ends_s_of(its, each, run_seeds(repeat, n_seeds)) for label, each in built.items()}
            for corrected, so_far in held.items():
                found = [
                    learned(its, each, [curves[label][i] for i in chosen], ends_s[label], corrected=corrected)
                    for label, each in built.items()
                ]
                documents = [learned_row(each, found[0], TARGET) for each in found]
                so_far.append([_holds(documents, metric, true[metric]) for metric in METRICS])
                if corrected:
                    widths.append([_half_width(each) for each in documents])
        cells = [*_spans(held[True]), _span(np.median(widths, axis=0), digits=0), *_spans(held[False])[1:]]
        rows.append(f"| {name} | {n_seeds} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


def _half_width(row: Mapping[str, tuple[float, float]]) -> float:
    low, high = row["target_s_ci95"]
    return (high - low) / 2 / row["target_s"]


def _holds(rows: Sequence[Mapping[str, tuple[float, float]]], metric: str, true: Sequence[float]) -> list[bool]:
    intervals = [each[f"{metric}_ci95"] for each in rows]
    return [low <= value <= high for (low, high), value in zip(intervals, true, strict=True)]


def _spans(held: Sequence[Sequence[Sequence[bool]]]) -> list[str]:
    """Return how often intervals of each metric hold, over schedules; of speed-ups, without the baseline's."""
    of_metrics = np.array(held).mean(axis=0)
    return [
        _span(each[1:] if name == "target_speedup" else each) for name, each in zip(METRICS, of_metrics, strict=True)
    ]


def _span(shares: NDArray[np.float64], *, digits: int = 0) -> str:
    low, high = (f"{100 * each:.{digits}f}" for each in (shares.min(), shares.max()))
    return low if low == high else f"{low} to {high}"


def table(recorded: Mapping[str, Sequence[Sequence[float]]], n_repeats: int) -> str:
    """Return the table of the page."""
    curves = {name: [curve(each) for each in of_seeds] for name, of_seeds in recorded.items()}
    headings = (
        "| delays | seeds | steps to target hold, % | time to target holds, % | speed-up to target holds, % "
        "| half width of the time, % | uncorrected: time to target | speed-up |"
    )
    return markdown_table([headings, *(row for name in DELAYS for row in rows_of(name, curves, n_repeats))])


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train again, and record it")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="repeats of each cell")
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    options = parser.parse_args()
    if options.train:
        lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in train().items())
        RECORDED.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
    found = {"learned": table(json.loads(RECORDED.read_text(encoding="utf-8")), options.repeats)}
    if options.write:
        write_tables(HERE / "README.md", found)
    else:
        print_tables(found)


if __name__ == "__main__":
    main()
