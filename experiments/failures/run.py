"""How long does a job take that fails? Ranks die or hang, nodes are lost, links flap, and the job starts again.

    python experiments/failures/run.py            calibrate, predict, perform and compare 18 runs (root; 45 minutes)
    python experiments/failures/run.py --write    also record the results, and write the tables into the README
    python experiments/failures/run.py --tables   print the tables of the recorded results (seconds)
    python experiments/failures/run.py --tiny     one short run on one machine, to see that it works (anybody)

Each node of the emulated cluster has a torchrun agent of its own: see `agents.py`. One run that starts again, and one
that continues, calibrate the parts of a recovery and the overhead of a collective. Every other run is predicted from
these, and then performed.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from simdist.report import markdown_table, print_tables, write_tables
from simdist.runs import run_directory
from simdist.runs.building import build, delays
from simdist.runs.run_failures import step_failures
from simdist.scenario import Scenario, load
from simdist.studies.validated_attempts import MeasuredRecovery, n_repeated
from simdist.studies.validated_run import validate_run
from simdist.studies.validation import corrected

HERE = Path(__file__).parent
EMULATED = HERE.parent / "emulated_cluster"
sys.path += [str(HERE), str(EMULATED)]

RESULTS = HERE / "results.json"
RATE_BPS = 400e6  # as in scenario.yaml
TIMEOUT_S = 8.0
SCHEDULE_S = 20.0  # after which the scheduler has another node
SWAP_S = 14.0  # after which a spare takes the place of a node
FLAP_S = 3.0  # TCP tries again after 0.2, 0.6, 1.4, 3.0 and 6.2 s, so a flap of 4 s would hold ranks for 6 s
_MOST_S = 600.0


@dataclass(frozen=True)
class Case:
    """A run with failures.

    Args:
        failures: Effect, step at which it comes, rank.
        every: Steps between checkpoints.
        mode: Of checkpoints.
        policy: What the job does about failures.
    """

    failures: Sequence[tuple[str, int, int]]
    every: int
    mode: str = "blocking"
    policy: Literal["restart", "spare", "continue"] = "restart"


CALIBRATING = {
    "restarted": Case([("process", 35, 1), ("hang", 75, 2), ("node", 118, 3), ("process", 160, 3)], every=10),
    "continued": Case([("process", 35, 1), ("hang", 75, 2), ("node", 118, 3)], every=10, policy="continue"),
}
CASES = (
    Case([("process", 77, 0)], every=10),
    Case([("node", 148, 1)], every=20),
    Case([("hang", 133, 3), ("process", 179, 1)], every=25),
    Case([("node", 64, 0), ("flap", 157, 3)], every=15, policy="spare"),
    Case([("process", 60, 1), ("process", 61, 1), ("node", 145, 2)], every=25),
    Case([("process", 26, 1), ("flap", 57, 0), ("hang", 88, 2), ("node", 176, 1)], every=15, mode="async"),
    Case([("flap", 90, 2)], every=10),
    Case([("planned", 40, 0), ("process", 79, 1), ("node", 101, 3), ("hang", 190, 2)], every=20),
    Case([("flap", 21, 0), ("process", 108, 2)], every=10, mode="async"),
    Case([("process", 9, 3), ("hang", 171, 1), ("flap", 183, 2)], every=10),
    Case([("process", 60, 2), ("process", 85, 0), ("process", 110, 1), ("process", 189, 3)], every=25),
    Case([("hang", 18, 2), ("flap", 80, 1), ("node", 119, 0)], every=30, policy="spare"),
    Case([("process", 77, 0)], every=10, policy="continue"),
    Case([("node", 90, 2)], every=20, policy="continue"),
    Case([("hang", 60, 1), ("process", 140, 3)], every=25, policy="continue"),
    Case([("process", 40, 1), ("process", 41, 2), ("planned", 120, 3)], every=20, policy="continue"),
    Case([("flap", 30, 3), ("hang", 75, 0), ("node", 120, 1)], every=15, policy="continue"),
    Case([("node", 50, 3), ("process", 60, 2), ("flap", 130, 1), ("hang", 160, 2)], every=10, policy="continue"),
)
TINY = Case([("process", 7, 1)], every=5)


@dataclass(frozen=True)
class Result:
    """One run, predicted and measured."""

    failures: Sequence[tuple[str, int, int]]
    every: int
    mode: str
    policy: str
    predicted_s: float
    measured_s: float
    predicted_attempts: Sequence[Sequence[int]]
    measured_attempts: Sequence[Sequence[int]]
    categories: Mapping[str, tuple[float, float]]
    """Category -> seconds predicted, measured."""
    n_losses: int
    """Losses of ranks and steps that should be those of an undisturbed run: of those that continue, until the first
    failure."""
    n_other_losses: int
    """Those of them that are not, to the last bit, in every attempt."""

    @property
    def error(self) -> float:
        """Error of the total time."""
        return self.predicted_s / self.measured_s - 1

    @property
    def error_beyond_steps(self) -> float:
        """Error of what the run takes beyond the steps that count."""
        predicted_s, measured_s = self.categories["productive"]
        return (self.predicted_s - predicted_s) / (self.measured_s - measured_s) - 1


def scenario_of(case: Case, like: Scenario, recovery: Mapping[str, object]) -> Scenario:
    """Return the scenario of a case, with what recoveries take."""
    more = {"flap": {"share": 0, "lasts": f"{FLAP_S} s"}}
    if case.policy == "continue":
        more["node"] = {"found_by": "collective"}  # it closes no connection
    causes = [
        {"cause": f"{number}", "effect": effect, "at_steps": [step], "ranks": [rank], **more.get(effect, {})}
        for number, (effect, step, rank) in enumerate(case.failures)
    ]
    checkpoint = {"every": case.every, "what": "state", "to": "disk", "mode": case.mode}
    failures = {"causes": causes, "recovery": recovery, "on_failure": case.policy}
    spares = {"spares": 4} if case.policy == "spare" else {}
    return like.changed(checkpoint=checkpoint, failures={**failures, **spares})


def as_settings(found: MeasuredRecovery) -> dict[str, object]:
    """Return measured parts of recoveries as settings.

    What a lost node takes beyond `SCHEDULE_S`, the start of its agent, a spare takes beyond `SWAP_S`.
    """
    parts = {
        name: f"{getattr(found, f'{name}_s') or 0.0} s"
        for name in ("detect", "schedule", "start", "connect", "load", "warm_up")
    }
    swap_s = max(0.0, (found.schedule_s or 0.0) - SCHEDULE_S + SWAP_S)
    return {**parts, "swap": f"{swap_s} s", "timeouts": {"collective": f"{found.timeout_s or TIMEOUT_S} s"}}


def perform(scenario: Scenario, folder: Path, *, policy: str = "restart", tiny: bool = False) -> Path:
    """Write a run directory, let real ranks perform it unless they have, and return it."""
    path = folder / "run"
    if (path / run_directory.REAL).exists():
        return path
    built = build(scenario, scenario.schedules[0])
    drawn = delays(scenario)
    failures = step_failures(scenario, built.plan, built.costs, drawn)
    run_directory.write(path, scenario, built.plan, drawn, failures)
    wanted = ["-m", "real", str(path), "--checkpoints", str(folder / "saved"), "--timeout", f"{TIMEOUT_S:g}"]
    wanted += ["--program", "sleeping_model:build"]
    environ = {"SIMDIST_LOSSES": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    n_ranks = built.plan.world_size
    if tiny:
        launch = ("torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}", "--max-restarts=9")
        command = [sys.executable, "-m", *launch, *wanted]
        settings = {**os.environ, **environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_S, check=False, env=settings)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        return path
    import agents  # it takes a machine that can play a cluster
    import network

    if failures:
        wanted += ["--failures", "node_failures:fail"]
    with network.cluster(n_ranks, rate_bps=RATE_BPS, servers_bps=[RATE_BPS]) as (*nodes, head):
        schedule_s = SWAP_S if policy == "spare" else SCHEDULE_S
        meeting = (
            agents.apart(nodes, head, wanted, str(path))
            if policy == "continue"
            else agents.together(nodes, head, wanted)
        )
        with meeting as commands:
            printed = agents.run(commands, nodes, schedule_s=schedule_s, timeout_s=_MOST_S, environ=environ)
    (folder / "printed.txt").write_text("\n".join(printed), encoding="utf-8")
    return path


def compare(
    case: Case, calibrated: Scenario, recovery: Mapping[str, object], undisturbed: Path, folder: Path, *, tiny: bool
) -> Result:
    """Predict a case, perform it, and compare."""
    path = perform(scenario_of(case, calibrated, recovery), folder, policy=case.policy, tiny=tiny)
    found = validate_run(run_directory.read(path)).attempts
    assert found is not None
    lost = [first for _, first, _ in found.measured_absences]
    expected = {
        place: those for place, those in read_losses(undisturbed).items() if place[1] < min(lost, default=math.inf)
    }
    losses = read_losses(folder)
    result = Result(
        failures=case.failures,
        every=case.every,
        mode=case.mode,
        policy=case.policy,
        predicted_s=found.simulated_s,
        measured_s=found.measured_s,
        predicted_attempts=found.simulated_steps,
        measured_attempts=found.measured_steps,
        categories={each.category: (each.simulated_s, each.measured_s) for each in found.categories},
        n_losses=len(expected),
        n_other_losses=sum(losses.get(place) != those for place, those in expected.items()),
    )
    print(
        f"{failures_text(result)}: {result.predicted_s:.1f} s, {result.measured_s:.1f} s", file=sys.stderr, flush=True
    )
    return result


def read_losses(folder: Path) -> dict[tuple[int, int], set[str]]:
    """Return the losses that ranks have written: (rank, step) -> those of all attempts, in hexadecimal."""
    found: dict[tuple[int, int], set[str]] = {}
    for path in folder.glob("losses-*.txt"):
        rank = int(path.stem.removeprefix("losses-"))
        for line in path.read_text(encoding="utf-8").splitlines():
            step, loss = line.split()
            found.setdefault((rank, int(step)), set()).add(loss)
    return found


def calibrate(like: Scenario, case: Case, folder: Path, *, tiny: bool) -> tuple[Scenario, dict[str, object]]:
    """Measure what recoveries take, and what steps take beyond their sleeps."""
    scenario = scenario_of(case, like, {"timeouts": {"collective": f"{TIMEOUT_S} s"}})
    path = perform(scenario, folder, policy=case.policy, tiny=tiny)
    run = run_directory.read(path)
    done = validate_run(run)
    assert done.attempts is not None
    assert done.attempts.recovery is not None
    cluster, told = corrected(run, None, done.real)
    recovery = as_settings(done.attempts.recovery)
    print(f"{told}\n{done.attempts.recovery.text()}", file=sys.stderr, flush=True)
    return like.model_copy(update={"cluster": cluster}), recovery


def measure(*, tiny: bool, keep: Path | None) -> list[Result]:
    """Calibrate, then perform every case, and the job without failures."""
    like = load(HERE / "scenario.yaml")
    if tiny:
        like = like.changed({"steps": 12, "train_for": "12 steps", "cluster.nodes": 2, "cluster.network": "ideal"})
    calibrating, cases = ({"restarted": TINY}, [TINY]) if tiny else (CALIBRATING, CASES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if keep is None else keep
        calibrated = {name: calibrate(like, case, folder / name, tiny=tiny) for name, case in calibrating.items()}
        undisturbed = folder / "undisturbed"
        perform(like, undisturbed, tiny=tiny)
        found = []
        for number, case in enumerate(cases):
            cluster, recovery = calibrated["continued" if case.policy == "continue" else "restarted"]
            found.append(compare(case, cluster, recovery, undisturbed, folder / str(number), tiny=tiny))
        return found


def failures_text(result: Result) -> str:
    """Name the failures of a run."""
    return ", ".join(f"{effect} {step}" for effect, step, _ in result.failures)


def rows(results: Sequence[Result]) -> Iterator[str]:
    """Yield the rows of the table of runs."""
    yield "| failures at steps | file every | policy | attempts | repeated steps | predicted | measured | error |"
    for each in results:
        predicted, measured = (
            [tuple(pair) for pair in steps] for steps in (each.predicted_attempts, each.measured_attempts)
        )
        same = f"{n_repeated(measured)}" if predicted == measured else f"{n_repeated(predicted)} predicted, "
        repeated = same if predicted == measured else f"{same}{n_repeated(measured)}"
        mode = ", async" if each.mode == "async" else ""
        yield (
            f"| {failures_text(each)} | {each.every}{mode} | {each.policy} | {len(measured)} | {repeated} | "
            f"{each.predicted_s:.1f} s | {each.measured_s:.1f} s | {each.error:+.1%} |"
        )


def parts(results: Sequence[Result]) -> Iterator[str]:
    """Yield the rows of the table of categories, of all runs together."""
    yield "| where the time went | predicted | measured | error of a run, median of its size |"
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
    n_losses = sum(each.n_losses for each in results)
    n_equal = n_losses - sum(each.n_other_losses for each in results)
    n_same = sum([*map(list, each.predicted_attempts)] == [*map(list, each.measured_attempts)] for each in results)
    return (
        f"Of {len(results)} runs, the error of the total time is {statistics.median(errors):.1%} in the median and "
        f"{max(errors):.1%} at worst. The attempts and repeated steps of {n_same} are exactly those predicted. "
        f"Of the time beyond the steps that count, which mostly sleep, the error is {statistics.median(beyond):.1%} in "
        f"the median and {max(beyond):.1%} at worst. {n_equal:,} of {n_losses:,} losses are those of a run without "
        f"failures, to the last bit."
    )


def tables(results: Sequence[Result]) -> dict[str, str]:
    """Return every table of the README by its name there."""
    return {
        "overview": overview(results),
        "runs": markdown_table(rows(results)),
        "parts": markdown_table(parts(results)),
    }


def recorded() -> list[Result]:
    """Return the recorded results."""
    return [Result(**each) for each in json.loads(RESULTS.read_text(encoding="utf-8"))]


def main() -> None:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the results, and write the tables into README.md")
    parser.add_argument("--tables", action="store_true", help="use the recorded results")
    parser.add_argument("--tiny", action="store_true", help="one short run")
    parser.add_argument("--keep", type=Path, help="leave run directories in this folder; those there are not performed")
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
