"""Measured runs whose results keep everything that a prediction needs, so that it can be made again with a later model.

Of each run are kept: its scenario with cluster and workload, its delays, and its trace, which holds the plan. Of one
real rank among simulated ones, also what these did. A folder of such runs becomes one archive beside the results.
"""

import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import common

if TYPE_CHECKING:
    from simdist.traces.trace import Trace

sys.path.append(str(common.ROOT / "experiments" / "emulated_cluster"))

SUFFIX = ".tar.xz"  # of the archive beside a file of results
PEERS = "peers.npz"  # of one real rank among simulated ones: what operations took in the simulation that it met
DIGITS = 12  # of its seconds, so that equal ones have equal bytes
TICK_S = 2.0**-24  # 60 ns, to which kept times are rounded: they take half the bytes


def perform(
    part: common.Part, command: Sequence[object], n_ranks: int, runs: Mapping[Path, tuple[str, common.Row]]
) -> None:
    """Perform runs, keep each as soon as it is measured, and emit its row.

    Args:
        part: Takes the rows.
        command: Module and arguments that measure the runs, each of which may hold several.
        n_ranks: Of the world.
        runs: Folder of run directories -> its name among kept runs, and what its rows begin with.

    Raises:
        PartError: See `common.ranks`. What was measured before is kept.
    """
    from simdist.runs import run_directory

    missing = {path: given for folder, given in runs.items() for path in run_directory.find(folder)}

    def emit_measured() -> None:
        for path in [path for path in missing if (path / run_directory.REAL).exists()]:
            name, about = missing.pop(path)
            part.emit(about | keep(part, path, f"{name}/{path.name}"))

    common.ranks(command, n_ranks, ranks_per_node=n_ranks, timeout_s=120.0, meanwhile=emit_measured)


def keep(part: common.Part, run: Path, name: str) -> common.Row:
    """Keep a measured run, and return its row: `kept` and what `numbers` says.

    Args:
        part: Has the folder of kept runs.
        run: The run directory.
        name: Of the run in that folder.
    """
    import numpy as np

    from simdist.engines.replay import timing
    from simdist.files import replacing
    from simdist.runs import run_directory
    from simdist.runs.calibrated import simulate_run
    from simdist.traces.trace import write_npz

    found = run_directory.read(run)
    trace = run_directory.read_trace(run / run_directory.REAL, plan=found.plan)

    ready_s, start_s, end_s = (np.round(each / TICK_S) * TICK_S for each in (trace.ready_s, trace.start_s, trace.end_s))
    folder = part.kept / name
    folder.mkdir(parents=True, exist_ok=True)
    contents = run_directory.contents(found.scenario, found.plan, found.delays)
    for file, content in contents.items():
        if file != run_directory.PLAN:  # the trace has it
            with replacing(folder / file) as beside:
                beside.write_bytes(content)
    rounded = replace(trace, ready_s=ready_s, start_s=start_s, end_s=end_s)
    run_directory.save_trace(rounded, folder / run_directory.REAL)
    if trace.real_rank is not None:
        took = timing(simulate_run(found, None, real=None))
        gaps_s = np.zeros_like(took.durations_s) if took.gaps_s is None else took.gaps_s
        with replacing(folder / PEERS) as beside:
            write_npz(beside, {"gaps_s": gaps_s.round(DIGITS), "durations_s": took.durations_s.round(DIGITS)})
    return {"kept": name} | numbers(folder)


def numbers(folder: Path) -> common.Row:
    """Return what today's model says of a kept run, beside what was measured.

    Columns:
        schedule, ranks, steps: Of the plan.
        simulated_ms, measured_ms, error: A step; of one real rank among simulated ones, its own.
        operations: Kind of operation -> milliseconds of a step and rank, simulated and measured.
        launch_bound: The host takes longer to launch a pass than the GPU to perform it.
        overlap: Share of the measured waiting that the simulation charges to the same rank in the same step.
        stragglers, charged: Those that alone made others wait in the simulation, and those of them that the measured
            trace charges with it; only if all ranks are real.
        injected: Injected delays by channel.
    """
    from study import charged  # of the experiment on the emulated cluster

    from simdist import scenario as scenarios
    from simdist.cost.compute import ComputeCost
    from simdist.runs import run_directory
    from simdist.runs.calibrated import simulate_run
    from simdist.runs.run_directory import RunDirectory
    from simdist.studies.validation import validate

    trace = run_directory.read_trace(folder / run_directory.REAL)
    delays = run_directory.read_delays(folder / run_directory.DELAYS, trace.plan)
    run = RunDirectory(folder, scenarios.load(folder / run_directory.SCENARIO), trace.plan, delays)
    simulated = simulate_run(run, None, real=trace)
    if trace.real_rank is not None:
        simulated = _among_its_peers(simulated, folder / PEERS, trace.real_rank)
    found = validate(trace, simulated, delays)
    n_ranks = 1 if trace.real_rank is not None else trace.plan.world_size
    per_step = 1e3 / found.n_steps
    row: common.Row = {
        "schedule": found.schedule,
        "ranks": trace.plan.world_size,
        "steps": found.n_steps,
        "simulated_ms": per_step * found.simulated_s,
        "measured_ms": per_step * found.measured_s,
        "error": found.error,
        "launch_bound": not ComputeCost(run.scenario.workload, run.scenario.cluster).hides_launches,
        "operations": {
            f"{kind.op} {kind.group}".strip(): (
                per_step / n_ranks * kind.simulated_total_s,
                per_step / n_ranks * kind.measured_total_s,
            )
            for kind in found.kinds
        },
        "overlap": found.overlap if found.overlap == found.overlap else None,
        "injected": [
            {name: getattr(each, name) for name in ("channel", "count", "drawn_s", "measured_s", "difference_s")}
            for each in found.injections
        ],
    }
    if trace.real_rank is None:
        row["stragglers"], row["charged"] = charged(trace, simulated, delays)
    return row


def _among_its_peers(today: "Trace", peers: Path, rank: int) -> "Trace":
    """Return a rank as it is simulated today among peers and collectives as they were simulated for the measurement.

    Args:
        today: The simulation of all ranks with today's model.
        peers: What operations took in the simulation that the real rank met.
        rank: The real rank.
    """
    import numpy as np

    from simdist.engines.replay import Timing, replay, timing
    from simdist.plan import COLLECTIVES
    from simdist.plan.walk import walk

    own = np.array([not isinstance(each.op, COLLECTIVES) for each in walk(today.plan)])
    ours = timing(today)
    with np.load(peers) as then:
        gaps_s, durations_s = then["gaps_s"], then["durations_s"]
    durations_s[own, rank] = ours.durations_s[own, rank].round(DIGITS)
    gaps_s[:, rank] = 0.0 if ours.gaps_s is None else ours.gaps_s[:, rank].round(DIGITS)
    times = _Times(today)
    replay(today.plan, Timing(gaps_s if gaps_s.any() else None, durations_s), times, n_variants=1)
    return replace(today, ready_s=times.seconds[0], start_s=times.seconds[1], end_s=times.seconds[2])


class _Times:
    """Keeps all times of a replay.

    Attributes:
        seconds: When operations were ready, began and ended, `[3, n_instances, world_size]`.
    """

    only_ends: ClassVar[bool] = False

    def __init__(self, of: "Trace") -> None:
        import numpy as np

        self.seconds = np.full((3, *of.end_s.shape), np.nan)

    def add(self, index: int, _template: object, *times: Any) -> None:
        """Take the times of an instance: ready, start, end, each `[world_size, 1]`."""
        for number, each in enumerate(times):
            self.seconds[number, index] = each[:, 0]


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """Return a folder with the files of an archive, which is removed at the end."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
        yield Path(folder)


def predict_again(results: Path) -> tuple[int, list[str]]:
    """Predict the rows of recorded results again with today's model, and write them.

    Predicted again are rows with a kept run, and step times. Of one real rank among simulated ones, its own
    operations are: it meets the peers and collectives of the simulation of its day, as in the measurement.

    Args:
        results: A file of results.

    Returns:
        How many rows were predicted, and what lacks.
    """
    document = json.loads(results.read_text(encoding="utf-8"))
    rows = [row for part in document["parts"].values() for row in part["rows"]]
    n_curves = _curves_again(document["parts"].get("steps", {"rows": []})["rows"])
    n_runs, lacks = _runs_again([row for row in rows if "kept" in row], results.with_suffix(SUFFIX))
    if n_lost := sum("simulated_ms" in row and "kept" not in row for row in rows):
        lacks.append(f"{results.name}: {n_lost} runs were not kept (cluster, workload and trace)")
    results.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return n_curves + n_runs, lacks


def _curves_again(rows: Sequence[common.Row]) -> int:
    """Predict step times again; return how many."""
    import steps

    curves: dict[tuple[object, object], list[common.Row]] = {}
    for row in rows:
        curves.setdefault((row["model"], row["precision"]), []).append(row)
    for curve in curves.values():
        steps.predict(curve)
    return sum(row["step_ms"] is not None for row in rows)


def _runs_again(rows: Sequence[common.Row], archive: Path) -> tuple[int, list[str]]:
    """Predict kept runs again; return how many, and what lacks."""
    from simdist.errors import SimdistError

    if not rows:
        return 0, []
    if not archive.exists():
        return 0, [f"{archive.name}: is not there, so {len(rows)} runs cannot be predicted again"]
    lacks = []
    with unpacked(archive) as folder:
        for row in rows:
            try:
                row |= numbers(folder / str(row["kept"]))
            except SimdistError as error:  # such as a key of the scenario that is gone
                lacks.append(f"{row['kept']}: cannot be predicted again: {str(error).removeprefix(f'{folder}/')}")
    return len(rows) - len(lacks), lacks
