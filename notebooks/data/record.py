"""Record what notebooks 03 and 05 show of real runs. It takes root, an idle machine and ten minutes.

    sudo .venv/bin/python notebooks/data/record.py

On the emulated cluster (experiments/emulated_cluster: network namespaces, links of a limited rate; gloo and TCP are
real, computation sleeps) it makes, in this folder:

    cluster.yaml, calibration.json   links of 4 nodes x 2 ranks at 400 Mbit/s, measured by all_reduces only
    job.json                         the schedules of job.yaml on 8 nodes x 2 ranks, performed three times
    control.json                     three of them without stragglers, on 4 and on 8 nodes, three times
    run/                             a run directory: 24 steps of hierarchical SGD with stragglers, performed

The notebooks predict these runs from the cluster and the scenario alone.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
EMULATED = HERE.parents[1] / "experiments" / "emulated_cluster"
sys.path.insert(0, str(EMULATED))

import network  # noqa: E402
import study  # noqa: E402

from simdist.runs import run_directory  # noqa: E402
from simdist.runs.building import build, delays  # noqa: E402
from simdist.scenario import Scenario, load, load_cluster  # noqa: E402

RATE = "400 Mbit/s"
N_REPEATS = 3
CONTROL_NODES, CONTROL_STEPS = (4, 8), 30
CONTROL_SCHEDULES = ("sync", "sync-fp16", "local-2")
RUN_SCHEDULE, RUN_STEPS = "hsgd-2-2,4-4,8-8", 24
TIMEOUT_S = 1800.0


def launch(n_nodes: int, ranks_per_node: int, command: list[str]) -> None:
    """Run a command on every rank of an emulated cluster."""
    rate_bps = study.rate_bps(study.Shape(n_nodes, ranks_per_node, RATE))
    with network.cluster(n_nodes, rate_bps=rate_bps) as nodes:
        print("\n".join(network.launch(nodes, ranks_per_node, command, timeout_s=TIMEOUT_S)), flush=True)


def calibrate() -> None:
    """Measure the links, and write the cluster and every repetition."""
    files = ["-o", str(HERE / "cluster.yaml"), "--json", str(HERE / "calibration.json"), "--force"]
    form = ["--links", "line", "--rate", RATE, "--ops", "all_reduce"]
    sizes = ["--min-size", "64 kB", "--max-size", "16 MB", "--budget", "60 s"]
    launch(4, 2, ["-m", "real.calibrate", *files, *form, *sizes])


def write_run(path: Path, scenario: Scenario, label: str) -> None:
    """Write the run directory of one schedule of a scenario."""
    (schedule,) = (each for each in scenario.schedules if each.name == label)
    alone = scenario.model_copy(update={"schedules": (schedule,)})
    run_directory.write(path, alone, build(scenario, schedule).plan, delays(scenario), force=True)


def measured_s(path: Path) -> float:
    """Return the makespan of a performed run."""
    return run_directory.read_trace(path / run_directory.REAL, plan=run_directory.read(path).plan).makespan_s


def perform(folder: Path, scenario: Scenario, labels: Sequence[str]) -> list[dict[str, object]]:
    """Perform some schedules of a scenario, the repeats in turn; return a row for each."""
    repeats = [folder / f"{number}" for number in range(N_REPEATS)]
    for repeat in repeats:
        for label in labels:
            write_run(repeat / label, scenario, label)
    cluster = scenario.cluster
    launch(cluster.nodes, cluster.gpus_per_node, ["-m", "real", *map(str, repeats), "--timeout", "60"])
    return [
        {
            "nodes": cluster.nodes,
            "schedule": label,
            "steps": scenario.steps,
            "measured_s": [measured_s(repeat / label) for repeat in repeats],
        }
        for label in labels
    ]


def perform_job(folder: Path) -> None:
    """Perform every schedule of the job, and write the makespans."""
    job = load(HERE / "job.yaml")
    write_rows(HERE / "job.json", perform(folder, job, [schedule.name for schedule in job.schedules]))


def perform_control(folder: Path) -> None:
    """Perform some schedules without stragglers on 4 and 8 nodes, to see whether links or processor cores decide."""
    job, rows = load(HERE / "job.yaml"), []
    for n_nodes in CONTROL_NODES:
        cluster = job.cluster.model_copy(update={"nodes": n_nodes})
        quiet = job.changed(cluster=cluster, disturbances=(), steps=CONTROL_STEPS)
        rows += perform(folder / f"{n_nodes}", quiet, CONTROL_SCHEDULES)
    write_rows(HERE / "control.json", rows)


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as JSON."""
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def perform_run() -> None:
    """Record one run directory with its measured trace."""
    cluster = study.cluster_of(study.CALIBRATED, load_cluster(HERE / "cluster.yaml"))
    chosen = study.Study("notebook", "scenario.yaml", ("2 MB",), ("4 % late by 100 ms",), RUN_STEPS)
    ((_, _, scenario),) = study.scenarios(cluster, chosen)
    path = HERE / "run"
    shutil.rmtree(path, ignore_errors=True)
    write_run(path, scenario, RUN_SCHEDULE)
    launch(4, 2, ["-m", "real", str(path), "--timeout", "60"])


def main() -> None:
    """Record everything, or what the command line names: calibration, run, job, control."""
    chosen = sys.argv[1:] or ["calibration", "run", "job", "control"]
    if "calibration" in chosen:
        calibrate()
    if "run" in chosen:
        perform_run()
    if "job" in chosen:
        with tempfile.TemporaryDirectory() as folder:
            perform_job(Path(folder))
    if "control" in chosen:
        with tempfile.TemporaryDirectory() as folder:
            perform_control(Path(folder))


if __name__ == "__main__":
    main()
