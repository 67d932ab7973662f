"""A slow job is profiled, imported and predicted; then the schedules are run for real, on the same machines.

    python experiments/profile_round_trip/run.py            run everything and print the tables (root; 9 minutes)
    python experiments/profile_round_trip/run.py --write    also record the results, and write them into the pages
    python experiments/profile_round_trip/run.py --tables   print the tables of the recorded results (anybody); with
                                                            --write, write them into the pages again
    python experiments/profile_round_trip/run.py --keep D   leave traces, times and scenarios in D
    python experiments/profile_round_trip/run.py --again D  import and predict again what --keep has left in D
    python experiments/profile_round_trip/run.py --tiny     one job of few steps without a network of its own
    ... --sharded                                           only the jobs under `fully_shard` (3 minutes)

Nothing else should compute on the machine meanwhile.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "emulated_cluster")]

import network  # noqa: E402
import results as kept  # noqa: E402
import round_trip_jobs  # noqa: E402
from results import Computing, Delay, Result, Timing  # noqa: E402
from round_trip_jobs import CASES, CONVNETS, LOCAL_8, SHARDED, TINY, TINY_SHARDED, Case  # noqa: E402

from simdist.engines.observers import WholeTrace  # noqa: E402
from simdist.engines.run import run as run_engine  # noqa: E402
from simdist.report import markdown_table, print_tables, write_tables  # noqa: E402
from simdist.runs.building import build, delays  # noqa: E402
from simdist.scenario import Scenario, load  # noqa: E402
from simdist.stragglers.gains import find_gains  # noqa: E402

RESULTS = HERE / "results"
PAGE = HERE / "README.md"


def predict(scenario: Scenario, case: Case) -> dict[str, float]:
    """Return seconds per step by schedule, with the delays as they were recorded.

    The first schedule is that of the imported scenario; the others are not in the traces.
    """
    settings: list[object] = [scenario.schedules[0], *(schedule.setting for schedule in case.schedules[1:])]
    played = _as_recorded(scenario).changed(schedules=settings)
    found = {}
    for schedule in played.schedules:
        built = build(played, schedule)
        trace = run_engine(built.plan, built.costs, delays(played), observe=WholeTrace())
        found[schedule.name] = trace.makespan_s / played.steps
    return found


def stated(scenario: Scenario, case: Case) -> dict[str, tuple[float, float]]:
    """Return the intervals of speed-ups that `simdist whatif` states, by schedule; none if it recommends nothing."""
    others = scenario.changed(schedules=[each.setting for each in case.schedules[1:]]).schedules
    gains = find_gains(scenario, others, baseline=scenario.schedules[0], n_runs=200)
    return {} if gains.problem else {row.schedule: row.interval for row in gains.rows if row.interval}


def _as_recorded(scenario: Scenario) -> Scenario:
    disturbances = [each.model_copy(update={"resample_steps": None}) for each in scenario.disturbances]
    return scenario.changed(disturbances=disturbances)


def computing(scenario: Scenario, case: Case, folder: Path) -> Computing | None:
    """Return what a step without an exchange takes; None of a case without a profiled averaging schedule."""
    if LOCAL_8 not in case.schedules:
        return None
    workload = scenario.workload
    base_s = (workload.forward_s or 0.0) + (workload.optimize_s or 0.0)
    base_s += sum(tensor.backward_s or 0.0 for tensor in workload.tensors)
    found = delays(_as_recorded(scenario))
    late_s = sum((seconds for channel, seconds in found.items() if channel != "overlap"), np.zeros(1))
    calm_s = [round_trip_jobs.calm_s(case, folder / LOCAL_8.label, profiled=profiled) for profiled in (True, False)]
    return Computing(LOCAL_8.label, base_s + float(np.median(late_s)), *calm_s)


def stragglers(told: Sequence[dict], case: Case) -> tuple[Delay, ...]:
    """Return what was injected beside what was found."""
    found: dict[tuple[str, int, int | None], float] = {
        (each["kind"], rank, step): each["seconds"]
        for each in told
        for rank in each["ranks"]
        for step in (each["steps"] if each["kind"] == "transient" else (None,))
    }
    first = round_trip_jobs.first_profiled_step(case)
    injected: dict[tuple[str, int, int | None], float] = {}
    if case.slow_rank is not None:
        injected["persistent", case.slow_rank, None] = case.slow_s
    for row, rank in zip(*case.late_s.nonzero(), strict=True):
        injected["transient", int(rank), first + int(row)] = float(case.late_s[row, rank])
    keys = [*injected, *(key for key in found if key not in injected)]
    return tuple(Delay(*key, injected.get(key, 0.0), round(found.get(key, 0.0), 6)) for key in keys)


def measure(case: Case, folder: Path, nodes: Sequence[network.Node] | None) -> None:
    """Perform all schedules of a case."""
    for schedule in case.schedules:
        round_trip_jobs.perform(case, schedule, folder / schedule.label, nodes)
        print(f"{case.name}: {schedule.label} done", flush=True)


def conclude(case: Case, folder: Path) -> Result:
    """Import and predict what was performed."""
    told, path = round_trip_jobs.import_traces(case, folder)
    scenario = load(path)
    predicted = predict(scenario, case)
    intervals = stated(scenario, case) if case.schedules[1:] else {}
    timings = tuple(
        Timing(label, round_trip_jobs.measured_s(case, folder / label), predicted[label], intervals.get(label))
        for label in (schedule.label for schedule in case.schedules)
    )
    profiled_s = round_trip_jobs.profiled_s(case, folder / case.schedules[0].label)
    return Result(case.name, timings, profiled_s, computing(scenario, case, folder), stragglers(told, case))


def run(cases: Sequence[Case], folder: Path) -> None:
    """Perform all cases."""
    with network.cluster(max(case.world_size for case in cases), rate_bps=round_trip_jobs.RATE_BPS) as nodes:
        for case in cases:
            measure(case, folder / case.slug, nodes)


def record(results: Sequence[Result], cases: Sequence[Case], folder: Path) -> None:
    """Keep results, and the scenarios that they follow from."""
    RESULTS.mkdir(exist_ok=True)
    for case, result in zip(cases, results, strict=True):
        kept.save(result, RESULTS / f"{case.slug}.json")
        for path in (folder / case.slug).glob(f"{case.slug}.*"):
            (RESULTS / path.name).write_bytes(path.read_bytes())


def recorded(cases: Sequence[Case]) -> list[Result]:
    """Read the recorded results."""
    return [kept.load(RESULTS / f"{case.slug}.json") for case in cases]


def tables(asleep: Sequence[Result], convnets: Sequence[Result]) -> dict[str, str]:
    """Return the tables of jobs that are not sharded by their names in the README."""
    return {
        "summary": "\n".join(kept.summary(asleep, convnets)),
        "timings": markdown_table(kept.timing_table(asleep)),
        "computing": markdown_table(kept.computing_table([*asleep, *convnets])),
        "profiler": markdown_table(kept.profiler_table(asleep)),
        "stragglers": markdown_table(kept.straggler_table(asleep)),
        "convnet": markdown_table(kept.timing_table(convnets)),
        "convnet profiler": markdown_table(kept.profiler_table(convnets)),
        "convnet stragglers": markdown_table(kept.straggler_table(convnets)),
    }


def sharded_tables(results: Sequence[Result]) -> dict[str, str]:
    """Return the tables of sharded jobs by their names in the README."""
    return {
        "sharded summary": "\n".join(kept.sharded_summary(results)),
        "sharded": markdown_table(kept.sharded_table(results)),
        "sharded stragglers": markdown_table(kept.straggler_table(results)),
    }


def run_tiny(case: Case, folder: Path) -> Result:
    """Run one short job on this machine's loopback."""
    measure(case, folder, None)
    return conclude(case, folder)


def conclude_all(cases: Sequence[Case], arguments: argparse.Namespace) -> list[Result]:
    """Perform cases, or take what was performed before; import and predict them."""
    if arguments.tables:
        return recorded(cases)
    left_in = arguments.again or arguments.keep
    with tempfile.TemporaryDirectory() if left_in is None else nullcontext(left_in) as folder:
        if not arguments.again:
            run(cases, Path(folder))
        found = [conclude(case, Path(folder, case.slug)) for case in cases]
        if arguments.write:
            record(found, cases, Path(folder))
    return found


def main() -> int:
    """Run the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the results, and write them into the pages")
    parser.add_argument("--tables", action="store_true", help="print the tables of the recorded results")
    parser.add_argument("--keep", type=Path, help="leave traces, times and scenarios in this folder")
    parser.add_argument("--again", type=Path, help="import and predict again what --keep has left in this folder")
    parser.add_argument("--tiny", action="store_true", help="one job of few steps without a network of its own")
    parser.add_argument("--sharded", action="store_true", help="only the jobs under fully_shard")
    arguments = parser.parse_args()
    if arguments.tiny:
        if arguments.write:
            parser.error("--tiny is no result: leave out --write")
        with tempfile.TemporaryDirectory() as folder:
            result = run_tiny(TINY_SHARDED if arguments.sharded else TINY, Path(folder))
        table = kept.sharded_table if arguments.sharded else kept.timing_table
        print_tables({"timings": markdown_table(table([result]))})
        return 0
    missing = network.missing()
    if missing and not (arguments.tables or arguments.again):
        print(f"skipped: {missing}")
        return 0
    cases = SHARDED if arguments.sharded else (*CASES, *CONVNETS)
    found = conclude_all(cases, arguments)
    shown = sharded_tables(found) if arguments.sharded else tables(found[: len(CASES)], found[len(CASES) :])
    if arguments.write:
        write_tables(PAGE, shown)
    print_tables(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
