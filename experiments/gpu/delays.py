"""Delays on the stream of the device: how long they were to be, and how long they were.

One rank performs a plan whose computation is emulated, so that the delays alone are on trial. They are drawn over three
decades. A row per delay.
"""

import tempfile
from pathlib import Path

import common


def run(part: common.Part) -> None:
    """Emit a row per delay."""
    import numpy as np
    import yaml

    from simdist.plan import Delay, occurrences
    from simdist.runs import run_directory

    document = {
        "cluster": {
            "nodes": 1,
            "gpus_per_node": 1,
            "fabric": {"latency": "1 us", "bandwidth": "1 GB/s"},
            "network": "ideal",
            "device": {"name": "any", "memory_bandwidth": "1 GB/s"},
        },
        "workload": {"preset": "mlp", "batch_size": 1, "forward": "1 ms", "backward": "2 ms", "optimize": "1 ms"},
        "disturbances": [{"kind": "jitter", "on": "compute", "median": "3 ms", "sigma": 1.5}],
        "schedules": [{"kind": "sync"}],
        "steps": 5 if part.dry_run else 200,
    }
    with tempfile.TemporaryDirectory() as name:
        scenario, runs = Path(name, "scenario.yaml"), Path(name, "runs")
        scenario.write_text(yaml.safe_dump(document), encoding="utf-8")
        common.simdist("plan", scenario, "-o", runs)
        command = ("real", runs, "--device", part.device, "--backend", "gloo")
        common.ranks(command, 1, ranks_per_node=1, timeout_s=30.0)
        run = run_directory.read(next(iter(run_directory.find(runs))))
        trace = run_directory.read_trace(run.path / run_directory.REAL, plan=run.plan)
    drawn_s = run.delays["compute"][0, :, 0]
    for each in occurrences(run.plan):
        if isinstance(each.op, Delay) and each.op.channel == "compute":
            spans_s = (trace.end_s - trace.start_s)[each.rows, 0]
            for step, seconds in zip(each.steps, spans_s, strict=True):
                part.emit(
                    {
                        "step": int(step),
                        "injected_ms": 1e3 * float(drawn_s[step]),
                        "measured_ms": 1e3 * float(np.round(seconds, 9)),
                    }
                )
