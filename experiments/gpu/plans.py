"""A test of function: four processes share the GPU and perform plans, without and with stragglers.

The processes are two nodes of two ranks to the plan. Under gloo, tensors of the GPU travel through host memory, and
whatever needs the result of a collective waits for it on the host. So this tests the executor: order, delays, blame.
Its times measure the driver's time slices, and say nothing of a job with a GPU for each rank.

A row per schedule and trouble: makespans simulated and measured, the stragglers that alone made others wait, and those
of them that the measured trace charges with it, and what each kind of operation takes; and a row per trouble: how many
pairs of schedules are in order.
"""

import json
import sys
import tempfile
from pathlib import Path

import common

sys.path.append(str(common.ROOT / "experiments" / "emulated_cluster"))

RANKS, PER_NODE = 4, 2
SCHEDULES = [
    {"kind": "sync"},
    {"kind": "local_sgd", "period": 4},
    {"kind": "hierarchical_sgd", "levels": {2: 2, 4: 4}},
    {"kind": "hitopk", "density": 0.01},
]
TROUBLES: dict[str, list[dict[str, object]]] = {
    "none": [],
    "device, 5 % late by 100 ms": [{"kind": "transient", "on": "compute", "probability": "5%", "delay": "100 ms"}],
}


def run(part: common.Part) -> None:
    """Emit a row per trouble and schedule, and one per trouble."""
    import yaml

    model, batch_size, steps, budget = ("mlp", 8, 4, "0.5 s") if part.dry_run else ("resnet18", 16, 10, "3 s")
    where = ("--backend", "gloo", "--device", part.device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster, workload = folder / "cluster.yaml", folder / "workload.yaml"
        measured = ("--model", model, "--batch-size", batch_size, "--workload", workload, "--budget", budget)
        ops = ("--ops", "all_reduce,reduce_scatter,all_gather", "--gap", "5 ms")
        sizes = ("--max-size", "4 MB" if part.dry_run else "66 MB")  # up to a bucket, or all parameters of ResNet-18
        _ranks("real.calibrate", "-o", cluster, *measured, *ops, *sizes, *where)
        for number, (trouble, disturbances) in enumerate(TROUBLES.items()):
            document = {
                "cluster": {"file": str(cluster)},
                "workload": {"file": str(workload)},
                "disturbances": disturbances,
                "schedules": SCHEDULES,
                "steps": steps,
            }
            scenario = folder / f"scenario-{number}.yaml"
            scenario.write_text(yaml.safe_dump(document), encoding="utf-8")
            runs = folder / str(number)
            common.simdist("plan", scenario, "-o", runs)
            _ranks("real", runs, "--program", model, *where)
            _emit(part, trouble, runs, cluster)


def _ranks(*command: object) -> None:
    common.ranks(command, RANKS, ranks_per_node=PER_NODE, timeout_s=60.0)


def _emit(part: common.Part, trouble: str, runs: Path, cluster: Path) -> None:
    """Emit what `simdist validate` and the stragglers of the traces say of the runs in a folder."""
    document = json.loads(common.simdist("validate", runs, "--cluster", cluster, "--json"))
    for row in document["rows"]:
        simulated, measured, delays = _traces(Path(row["run"]), cluster)
        late, charged = _charged(simulated, measured, delays)
        part.emit(
            {
                "trouble": trouble,
                "schedule": row["schedule"],
                "ranks": RANKS,
                "steps": row["steps"],
                "simulated_ms": 1e3 * row["simulated_s"] / row["steps"],
                "measured_ms": 1e3 * row["measured_s"] / row["steps"],
                "error": row["error"],
                "stragglers": late,
                "charged": charged,
                "injected": [
                    {name: each[name] for name in ("channel", "count", "drawn_s", "measured_s", "difference_s")}
                    for each in row["injections"]
                ],
            }
            | ({} if row["injections"] else {"operations": _operations(simulated, measured)})
        )
    summary = document["summary"]
    part.emit({"trouble": trouble, "clear_pairs": summary["n_clear_pairs"], "right_pairs": summary["n_right_pairs"]})


def _traces(path: Path, cluster: Path):
    """Return the simulated trace, the measured one and the delays of the run in a folder."""
    from simdist.engines.observers import WholeTrace
    from simdist.engines.run import run as run_engine
    from simdist.runs import run_directory
    from simdist.runs.building import price_of
    from simdist.scenario import load_cluster

    run = run_directory.read(path)
    scenario = run.scenario.changed(cluster=load_cluster(cluster))
    simulated = run_engine(run.plan, price_of(run.plan, scenario), run.delays, observe=WholeTrace())
    measured = run_directory.read_trace(path / run_directory.REAL, plan=run.plan)
    return simulated, measured, run.delays


def _charged(simulated, measured, delays) -> tuple[int, int]:
    """Return how many stragglers alone made others wait in the simulation, and in the measurement too."""
    from study import charged  # of the experiment on the emulated cluster

    return charged(measured, simulated, delays)


def _operations(simulated, measured) -> dict[str, tuple[float, float]]:
    """Return kind of operation -> milliseconds of a step and rank, simulated and measured, without waits for others."""
    found = [_milliseconds(trace) for trace in (simulated, measured)]
    return {name: (found[0][name], found[1][name]) for name in found[0]}


def _milliseconds(trace) -> dict[str, float]:
    """Return kind of operation -> milliseconds of a step and rank."""
    frame = trace.frame()
    seconds = (frame.end_s - frame.start_s).groupby(frame.op).sum()
    return (1e3 * seconds / trace.plan.n_steps / trace.plan.world_size).to_dict()
