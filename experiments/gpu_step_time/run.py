"""Time of a training step on the GPU at hand, and how well the simulator predicts four ranks that share it.

    python experiments/gpu_step_time/run.py                                          on a GPU; some minutes
    python experiments/gpu_step_time/run.py --device cpu --model mlp --steps 3       a few steps, to see that it works

Both parts go through the commands that anybody would use: a plan is written, performed, and its trace read. Results go
to results/<GPU>.json, which names the GPU and versions and nothing else of the machine. Nothing else should use the GPU
meanwhile.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import yaml

from simdist.plan import Backward, Forward, Optimize, occurrences
from simdist.runs import run_directory

MODELS, PRECISIONS = ["resnet18", "resnet50"], ["fp32", "bf16"]
BATCH_SIZE, STEPS, RANKS = 32, 60, 4
SKIPPED_STEPS = 10  # at most half: the first steps of a run find memory and clocks cold
SCHEDULES = [
    {"kind": "sync"},
    {"kind": "local_sgd", "period": 4},
    {"kind": "hierarchical_sgd", "levels": {2: 2, 4: 4}},
]
STRAGGLERS = [{"kind": "transient", "on": "host", "probability": "5%", "delay": "100 ms"}]
TIMEOUT_S = 1800

# Plans do not depend on these times: the first part measures, and predicts nothing.
ANY_TIMES = {"forward": "1 ms", "backward": "2 ms", "optimize": "1 ms"}
ONE_GPU = {
    "nodes": 1,
    "gpus_per_node": 1,
    "fabric": {"latency": "1 us", "bandwidth": "1 GB/s"},
    "network": "ideal",
    "device": {"name": "any", "memory_bandwidth": "1 GB/s", "host_bandwidth": "1 GB/s"},
}


def call(*arguments: object, ranks: int = 0) -> str:
    """Run a module of this repository, in so many processes if it needs torchrun, and return what it prints."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks else []
    command = [sys.executable, "-m", *torchrun, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def write_runs(folder: Path, **scenario: object) -> Path:
    """Write a scenario and the run directories of its schedules; return where they are."""
    folder.mkdir(parents=True)
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(scenario), encoding="utf-8")
    call("simdist", "plan", path, "-o", folder / "runs")
    return folder / "runs"


def step_times(folder: Path, model: str, precision: str, options: argparse.Namespace) -> dict[str, object]:
    """Perform the plan of one rank, and return the medians of a step in milliseconds, from its trace."""
    workload = {"preset": model, "batch_size": options.batch_size, **ANY_TIMES}
    run = write_runs(
        folder,
        cluster=ONE_GPU,
        workload=workload,
        input={"source": "memory"},
        schedules=[{"kind": "sync"}],
        steps=options.steps,
    )
    call("real", run, "--program", model, "--precision", precision, "--device", options.device, ranks=1)
    trace = run_directory.read_trace(run / run_directory.REAL)
    kinds = {"forward": Forward, "backward": Backward, "optimize": Optimize}
    spans_ms = {name: np.zeros(options.steps) for name in kinds}
    for each in occurrences(trace.plan):
        for name in (name for name, kind in kinds.items() if isinstance(each.op, kind)):
            spans_ms[name][each.steps] += 1e3 * (trace.end_s - trace.start_s)[each.rows, 0]
    first = min(SKIPPED_STEPS, options.steps // 2)
    steps = {f"{name}_ms": round(float(np.median(span[first:])), 4) for name, span in spans_ms.items()}
    return {"model": model, "precision": precision, "batch_size": options.batch_size, **steps}


def comparison(folder: Path, model: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """Calibrate ranks that share the device, simulate, perform, and return how far apart makespans are."""
    folder.mkdir()
    cluster, workload = folder / "cluster.yaml", folder / "workload.yaml"
    where = ("--backend", "gloo", "--device", options.device)
    measured = ("--model", model, "--batch-size", options.batch_size, "--workload", workload)
    call("real.calibrate", "-o", cluster, *measured, "--budget", options.budget, *where, ranks=RANKS)
    runs = write_runs(
        folder / "runs",
        cluster={"file": str(cluster)},
        workload={"file": str(workload)},
        disturbances=STRAGGLERS,
        schedules=SCHEDULES,
        steps=options.steps,
    )
    call("real", runs, "--program", model, *where, ranks=RANKS)
    document = json.loads(call("simdist", "validate", runs, "--cluster", cluster, "--json"))
    return [
        {
            "model": model,
            "schedule": row["schedule"],
            "ranks": RANKS,
            "simulated_ms": round(1e3 * row["simulated_s"] / row["steps"], 3),
            "measured_ms": round(1e3 * row["measured_s"] / row["steps"], 3),
            "error": round(row["error"], 4),
        }
        for row in document["rows"]
    ]


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", action="append", help=f"may be repeated; by default {', '.join(MODELS)}")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="likewise")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--budget", default="30 s", help="time to calibrate collectives")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "There is no GPU here that torch can use, so nothing is measured. --device cpu --model mlp works anywhere."
        )
        return
    models = options.model or MODELS
    with tempfile.TemporaryDirectory() as folder:
        steps = [
            step_times(Path(folder, f"{model}-{precision}"), model, precision, options)
            for model in models
            for precision in options.precision or PRECISIONS
        ]
        rows = comparison(Path(folder, "shared"), models[0], options)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    results = {
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if options.device == "cuda" else None,
        "steps": steps,
        "ranks sharing it": rows,
    }
    text = json.dumps(results, indent=1) + "\n"
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{re.sub(r'[^A-Za-z0-9.]+', '-', device)}.json"
    path.write_text(text, encoding="utf-8")
    print(f"{text}wrote {path}")


if __name__ == "__main__":
    main()
