"""One real rank in a job of 8, 64 or 512, whose other ranks are simulated, without and with stragglers.

Passes are those that `alone` has calibrated, links those of the data sheet: a collective takes as long as simulated, so
the network is not tested. A row per number of ranks, trouble and schedule, whose run is kept, and a row each without
the copies by which the kernels of collectives slow down computing (`channels` 0).
"""

import tempfile
from pathlib import Path

import common
import jobs
import kept

JOB = jobs.Job("resnet18", 16, "fp32")
RANK = 3
RANKS = (8, 64, 512)
CHANNELS = 16  # of NCCL on a machine of eight GPUs


def run(part: common.Part) -> None:
    """Emit the rows: those of each number of ranks as soon as they are measured."""
    job = jobs.TINY if part.dry_run else JOB
    workload = jobs.workload(part, job)
    for n_ranks in RANKS[::2] if part.dry_run else RANKS:
        _emit(part, job, workload, n_ranks, CHANNELS)
    _emit(part, job, workload, RANKS[0], 0)


def _emit(part: common.Part, job: jobs.Job, workload: Path, n_ranks: int, channels: int) -> None:
    from simdist.runs import run_directory

    troubles = jobs.troubles(n_ranks, RANK, "20 ms" if part.dry_run else "50 ms")
    if not channels:
        troubles = {"none": []}
    with tempfile.TemporaryDirectory() as name:
        folders = {trouble: Path(name, str(number)) for number, trouble in enumerate(troubles)}
        for trouble, folder in folders.items():
            scenario: common.Row = {
                "cluster": jobs.cluster(part, n_ranks),
                "workload": {"file": str(workload)},
                "input": {"source": "memory"},
                "disturbances": troubles[trouble],
                "schedules": jobs.schedules(n_ranks),
                "steps": 4 if part.dry_run else 12,
            }
            common.planned(scenario, folder)
        options = ("--program", job.model, "--device", part.device, "--rank", RANK, "--peers", "simulated")
        try:
            command = ("real", *folders.values(), *options, "--channels", channels)
            common.ranks(command, 1, ranks_per_node=1, timeout_s=90.0)
        finally:  # also if it was too slow for some
            for trouble, folder in folders.items():
                for path in run_directory.find(folder):
                    if (path / run_directory.REAL).exists():
                        where = f"peers/{n_ranks}-{channels}/{trouble}/{path.name}"
                        row = kept.keep(part, path, where)
                        part.emit({"model": job.model, "trouble": trouble, "channels": channels, **row})
