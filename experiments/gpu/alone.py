"""One rank alone: its passes and small operations are calibrated in steps, then plans are simulated and performed.

What such a plan takes is what the rank itself does: passes, updates, small kernels, and the host that launches them.
A row per model and schedule, whose run is kept.
"""

import tempfile
from pathlib import Path

import common
import jobs
import kept

JOBS = (
    jobs.Job("resnet50", 64, "fp32"),  # bound by the GPU
    jobs.Job("resnet18", 4, "fp32"),  # bound by launches
    jobs.Job("gpt2-medium", 4, "bf16"),
)


def run(part: common.Part) -> None:
    """Emit the rows."""
    for job in (jobs.TINY,) if part.dry_run else JOBS:
        scenario: common.Row = {
            "cluster": jobs.cluster(part, 1),
            "workload": {"file": str(jobs.workload(part, job))},
            "input": {"source": "memory"},
            "schedules": jobs.schedules(1),
            "steps": 4 if part.dry_run else 12,
        }
        with tempfile.TemporaryDirectory() as name:
            runs = common.planned(scenario, Path(name))
            where = ("--program", job.model, "--device", part.device, "--backend", jobs.backend(part))
            about: common.Row = {"model": job.model, "batch_size": job.batch_size, "precision": job.precision}
            kept.perform(part, ("real", runs, *where), 1, {runs: (f"alone/{job.name}", about)})
