"""How long does a job take that fails? Real ranks are killed, hang, pause and are interrupted, and start again.

    python experiments/failures/run.py            calibrate, predict, perform and compare 12 runs (25 minutes)
    python experiments/failures/run.py --write    also record the results, and write the table into the README
    python experiments/failures/run.py --tables   print the table of the recorded results (seconds)
    python experiments/failures/run.py --tiny     one short run, to see that it works

One run calibrates the parts of a recovery and the overhead of a collective. Every other run is predicted from these,
and then performed. Steps sleep, and torchrun starts three processes again and again, so a busy machine disturbs starts.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from simdist.report import print_tables, write_tables
from simdist.runs import run_directory
from simdist.runs.building import build, delays
from simdist.runs.run_failures import step_failures
from simdist.scenario import Scenario, load
from simdist.studies.validated_attempts import MeasuredRecovery, n_repeated
from simdist.studies.validated_run import validate_run
from simdist.studies.validation import corrected

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
TIMEOUT_S = 6.0
N_AT_ONCE = 2
_MOST_S = 900.0
PAUSE_S = 5.0


@dataclass(frozen=True)
class Case:
    """A run with failures.

    Args:
        failures: Effect, step at which it comes, rank.
        every: Steps between checkpoints.
        mode: Of checkpoints.
    """

    failures: Sequence[tuple[str, int, int]]
    every: int
    mode: str = "blocking"


CALIBRATING = Case([("process", 35, 1), ("hang", 75, 2), ("process", 118, 0)], every=10)
CASES = (
    Case([("process", 77, 0)], every=10),
    Case([("hang", 48, 1)], every=20),
    Case([("flap", 90, 2)], every=10),
    Case([("node", 33, 2), ("process", 129, 1)], every=25),
    Case([("process", 64, 1), ("hang", 97, 0)], every=15),
    Case([("flap", 21, 0), ("process", 108, 2)], every=10, mode="async"),
    Case([("process", 60, 1), ("process", 61, 1), ("process", 145, 0)], every=25),
    Case([("hang", 18, 2), ("flap", 80, 1), ("node", 119, 0)], every=30),
    Case([("process", 9, 0), ("hang", 71, 1), ("process", 133, 2)], every=10),
    Case([("process", 60, 2), ("process", 85, 0), ("process", 110, 1), ("process", 139, 2)], every=25),
    Case([("process", 26, 1), ("flap", 57, 0), ("hang", 88, 2), ("node", 126, 1)], every=15, mode="async"),
    Case([("planned", 40, 0), ("process", 79, 1), ("planned", 101, 0), ("process", 140, 2)], every=20),
)
TINY = Case([("process", 7, 1)], every=5)


@dataclass(frozen=True)
class Result:
    """One run, predicted and measured."""

    failures: Sequence[tuple[str, int, int]]
    every: int
    mode: str
    predicted_s: float
    measured_s: float
    predicted_attempts: Sequence[Sequence[int]]
    measured_attempts: Sequence[Sequence[int]]
    categories: Mapping[str, tuple[float, float]]
    """Category -> seconds predicted, measured."""
    load: float
    """Processes that wanted a core at the end of the run."""

    @property
    def error(self) -> float:
        """Error of the total time."""
        return self.predicted_s / self.measured_s - 1

    @property
    def error_beyond_steps(self) -> float:
        """Error of what the run takes beyond the steps that count, which mostly sleep."""
        predicted_s, measured_s = self.categories["productive"]
        return (self.predicted_s - predicted_s) / (self.measured_s - measured_s) - 1


def scenario_of(case: Case, like: Scenario, recovery: Mapping[str, object]) -> Scenario:
    """Return the scenario of a case, with what recoveries take."""
    more = {"flap": {"share": 0, "lasts": f"{PAUSE_S} s"}}
    causes = [
        {"cause": f"{number}", "effect": effect, "at_steps": [step], "ranks": [rank], **more.get(effect, {})}
        for number, (effect, step, rank) in enumerate(case.failures)
    ]
    checkpoint = {"every": case.every, "what": "state", "to": "disk", "mode": case.mode}
    return like.changed(checkpoint=checkpoint, failures={"causes": causes, "recovery": recovery})


def as_settings(found: MeasuredRecovery) -> dict[str, object]:
    """Return measured parts of recoveries as settings."""
    parts = {
        name: f"{getattr(found, f'{name}_s') or 0.0} s" for name in ("detect", "start", "connect", "load", "warm_up")
    }
    return {**parts, "timeouts": {"collective": f"{found.timeout_s or TIMEOUT_S} s"}}


def perform(scenario: Scenario, folder: Path) -> run_directory.RunDirectory:
    """Write a run directory, and let real ranks perform it."""
    built = build(scenario, scenario.schedules[0])
    drawn = delays(scenario)
    failures = step_failures(scenario, built.plan, built.costs, drawn)
    run_directory.write(folder / "run", scenario, built.plan, drawn, failures)
    launch = ("torch.distributed.run", "--standalone", f"--nproc-per-node={built.plan.world_size}", "--max-restarts=9")
    wanted = ("real", str(folder / "run"), "--checkpoints", str(folder / "saved"), "--timeout", f"{TIMEOUT_S:g}")
    command = [sys.executable, "-m", *launch, "-m", *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return run_directory.read(folder / "run")


def compare(case: Case, calibrated: Scenario, recovery: Mapping[str, object], folder: Path) -> Result:
    """Predict a case, perform it, and compare."""
    found = validate_run(perform(scenario_of(case, calibrated, recovery), folder)).attempts
    assert found is not None
    result = Result(
        case.failures,
        case.every,
        case.mode,
        found.simulated_s,
        found.measured_s,
        found.simulated_steps,
        found.measured_steps,
        {each.category: (each.simulated_s, each.measured_s) for each in found.categories},
        os.getloadavg()[0],
    )
    print(
        f"{failures_text(result)}: {result.predicted_s:.1f} s, {result.measured_s:.1f} s", file=sys.stderr, flush=True
    )
    return result


def calibrate(like: Scenario, case: Case, folder: Path) -> tuple[Scenario, dict[str, object]]:
    """Measure what recoveries take, and what steps take beyond their sleeps."""
    run = perform(scenario_of(case, like, {"timeouts": {"collective": f"{TIMEOUT_S} s"}}), folder)
    done = validate_run(run)
    assert done.attempts is not None
    assert done.attempts.recovery is not None
    cluster, told = corrected(run, None, done.real)
    recovery = as_settings(done.attempts.recovery)
    print(f"{told}\n{done.attempts.recovery.text()}", file=sys.stderr, flush=True)
    return like.model_copy(update={"cluster": cluster}), recovery


def measure(*, tiny: bool, keep: Path | None) -> list[Result]:
    """Calibrate, then perform every case."""
    like = load(HERE / "scenario.yaml")
    like = like.changed(steps=12, train_for="12 steps") if tiny else like
    calibrating, cases = (TINY, [TINY]) if tiny else (CALIBRATING, CASES)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(N_AT_ONCE) as pool:
        folder = Path(temporary) if keep is None else keep
        calibrated, recovery = calibrate(like, calibrating, folder / "calibrating")
        running = [
            pool.submit(compare, case, calibrated, recovery, folder / str(number)) for number, case in enumerate(cases)
        ]
        return [each.result() for each in running]


def failures_text(result: Result) -> str:
    """Name the failures of a run."""
    return ", ".join(f"{effect} {step}" for effect, step, _ in result.failures)


def rows(results: Sequence[Result]) -> Iterator[str]:
    """Yield the rows of the table of runs."""
    yield "| failures at steps | file every | attempts | repeated steps | predicted | measured | error | load |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in results:
        predicted, measured = (
            [tuple(pair) for pair in steps] for steps in (each.predicted_attempts, each.measured_attempts)
        )
        same = f"{n_repeated(measured)}" if predicted == measured else f"{n_repeated(predicted)} predicted, "
        repeated = same if predicted == measured else f"{same}{n_repeated(measured)}"
        mode = ", async" if each.mode == "async" else ""
        yield (
            f"| {failures_text(each)} | {each.every}{mode} | {len(measured)} | {repeated} | {each.predicted_s:.1f} s | "
            f"{each.measured_s:.1f} s | {each.error:+.1%} | {each.load:.0f} |"
        )


def parts(results: Sequence[Result]) -> Iterator[str]:
    """Yield the rows of the table of categories, of all runs together."""
    yield "| where the time went | predicted | measured | error of a run, median of its size |"
    yield "|---|---|---|---|"
    names = dict.fromkeys(name for each in results for name in each.categories)
    for name in names:
        found = [each.categories[name] for each in results if name in each.categories]
        predicted_s, measured_s = (math.fsum(each[side] for each in found) for side in (0, 1))
        errors = [abs(predicted / measured - 1) for predicted, measured in found if predicted and measured]
        error = f"{statistics.median(errors):.1%}" if errors else ""
        yield f"| {name.replace('_', ' ')} | {predicted_s:.1f} s | {measured_s:.1f} s | {error} |"


def overview(results: Sequence[Result]) -> str:
    """Say how large the errors are."""
    errors = [abs(each.error) for each in results]
    beyond = [abs(each.error_beyond_steps) for each in results]
    n_same = sum([*map(list, each.predicted_attempts)] == [*map(list, each.measured_attempts)] for each in results)
    return (
        f"Of {len(results)} runs, the error of the total time is {statistics.median(errors):.1%} in the median and "
        f"{max(errors):.1%} at worst. The attempts and repeated steps of {n_same} are exactly those predicted. "
        f"Of the time beyond the steps that count, which mostly sleep, the error is {statistics.median(beyond):.1%} in "
        f"the median and {max(beyond):.1%} at worst."
    )


def tables(results: Sequence[Result]) -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {"overview": overview(results), "runs": "\n".join(rows(results)), "parts": "\n".join(parts(results))}


def recorded() -> list[Result]:
    """Return the recorded results."""
    return [Result(**each) for each in json.loads(RESULTS.read_text(encoding="utf-8"))]


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the results, and write the tables into README.md")
    parser.add_argument("--tables", action="store_true", help="use the recorded results")
    parser.add_argument("--tiny", action="store_true", help="one short run")
    parser.add_argument("--keep", type=Path, help="leave run directories in this folder")
    arguments = parser.parse_args()
    if arguments.tiny and arguments.write:
        parser.error("--tiny is no result: leave out --write")
    results = recorded() if arguments.tables else measure(tiny=arguments.tiny, keep=arguments.keep)
    if arguments.write and not arguments.tables:
        RESULTS.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n", encoding="utf-8")
    if arguments.write:
        write_tables(HERE / "README.md", tables(results))
    else:
        print_tables(tables(results))


if __name__ == "__main__":
    main()
