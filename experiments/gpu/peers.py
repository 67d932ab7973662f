"""One real rank in a job of 8, 64 or 512, whose other ranks are simulated, without and with stragglers.

Passes and small operations are those that `alone` has calibrated, links those of the data sheet. A collective takes as
long as simulated, so the network is not tested. A row per number of ranks, trouble and schedule, whose run is kept, and
a row each without the copies by which the kernels of collectives slow down computing (`channels` 0).
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import common
import jobs
import kept

JOB = jobs.Job("resnet18", 16, "fp32")
RANK = 3
RANKS = (8, 64, 512)
CHANNELS = 16  # of NCCL on a machine of eight GPUs


def run(part: common.Part) -> None:
    """Emit the rows: each as soon as it is measured, those of fewer ranks first."""
    job = jobs.TINY if part.dry_run else JOB
    workload = jobs.workload(part, job)
    sizes = RANKS[::2] if part.dry_run else RANKS
    with tempfile.TemporaryDirectory() as name:
        folders = [_planned(part, workload, n_ranks, Path(name, str(n_ranks))) for n_ranks in sizes]
        _perform(part, job, CHANNELS, {key: folder for of_size in folders for key, folder in of_size.items()})
    with tempfile.TemporaryDirectory() as name:
        alike = (RANKS[0], "none")
        _perform(part, job, 0, {alike: _planned(part, workload, RANKS[0], Path(name))[alike]})


def _planned(part: common.Part, workload: Path, n_ranks: int, folder: Path) -> dict[tuple[int, str], Path]:
    """Write the run directories of a job; return its size and each trouble -> their folder."""
    found = {}
    for trouble, disturbances in jobs.troubles(n_ranks, RANK, "20 ms" if part.dry_run else "50 ms").items():
        scenario: common.Row = {
            "cluster": jobs.cluster(part, n_ranks),
            "workload": {"file": str(workload)},
            "input": {"source": "memory"},
            "disturbances": disturbances,
            "schedules": jobs.schedules(n_ranks),
            "steps": 4 if part.dry_run else 10,
        }
        found[n_ranks, trouble] = common.planned(scenario, folder / str(len(found)))
    return found


def _perform(part: common.Part, job: jobs.Job, channels: int, folders: Mapping[tuple[int, str], Path]) -> None:
    """Perform the runs in folders with one real rank."""
    options = ("--program", job.model, "--device", part.device, "--rank", RANK, "--peers", "simulated")
    runs: dict[Path, tuple[str, common.Row]] = {}
    for (n_ranks, trouble), folder in folders.items():
        about: common.Row = {"model": job.model, "trouble": trouble, "channels": channels}
        runs[folder] = f"peers/{n_ranks}-{channels}/{trouble}", about
    kept.perform(part, ("real", *runs, *options, "--channels", channels), 1, runs)
