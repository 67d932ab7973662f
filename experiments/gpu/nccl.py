"""Two to eight GPUs, a rank on each, over NCCL: the identical plans, simulated and performed.

Rows: whether values equal those over gloo; a row per model, trouble and schedule, whose run is kept, and one per model
and trouble that says how many pairs of schedules are in order; and whether ranks name one that was killed. Links and
passes are calibrated with all ranks at work.
"""

import json
import signal
import tempfile
import time
from pathlib import Path

import common
import jobs
import kept
import values

MOST_RANKS = 8
DRY_RANKS = 4
JOB = jobs.Job("resnet18", 16, "fp32")
LARGE = jobs.Job("gpt2-medium", 1, "bf16")  # communication is a fifth of its step
VICTIM = 1
TIMEOUT_S = 10.0  # within which a killed rank is named
FEW = ("sync", "local_sgd", "fsdp")  # schedules of the large model


def run(part: common.Part) -> None:
    """Emit the rows, or one that says why there are none."""
    n_ranks = DRY_RANKS if part.dry_run else _n_ranks()
    if n_ranks < 2:
        part.emit({"skipped": "needs 2 GPUs or more"})
        return
    values.compare(part, n_ranks, {})
    _measure(part, jobs.TINY if part.dry_run else JOB, n_ranks)
    killed(part, n_ranks)
    if not part.dry_run:
        _measure(part, LARGE, n_ranks)


def _n_ranks() -> int:
    """Return how many ranks take part: a power of two."""
    import torch

    return 1 << (min(MOST_RANKS, torch.cuda.device_count()).bit_length() - 1)


def _measure(part: common.Part, job: jobs.Job, n_ranks: int) -> None:
    """Calibrate links and passes, then simulate and perform each plan."""
    is_short = part.dry_run or job == LARGE
    where = ("--backend", jobs.backend(part), "--device", part.device)
    about: common.Row = {"model": job.model, "precision": job.precision}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = ("-o", folder / "cluster.yaml", "--workload", folder / "workload.yaml")
        sizes = ("--max-size", "1 MB") if part.dry_run else ()
        command = ("real.calibrate", *jobs.measured_by(part, job), *files, *sizes)
        common.ranks(command, n_ranks, ranks_per_node=n_ranks, timeout_s=90.0)
        troubles = list(jobs.troubles(n_ranks, VICTIM, "50 ms").items())
        folders: dict[str, Path] = {}
        for trouble, disturbances in troubles[:2] if is_short else troubles:
            scenario: common.Row = {
                "cluster": {"file": str(folder / "cluster.yaml")},
                "workload": {"file": str(folder / "workload.yaml")},
                "input": {"source": "memory"},
                "disturbances": disturbances,
                "schedules": [each for each in jobs.schedules(n_ranks) if job != LARGE or each["kind"] in FEW],
                "steps": 4 if part.dry_run else 8 if job == LARGE else 12,
            }
            folders[trouble] = common.planned(scenario, folder / str(len(folders)))
        runs: dict[Path, tuple[str, common.Row]] = {
            path: (f"nccl/{job.name}/{trouble}", {"what": "plan", **about, "trouble": trouble})
            for trouble, path in folders.items()
        }
        kept.perform(part, ("real", *runs, "--program", job.model, *where), n_ranks, runs)
        for trouble, path in folders.items():
            summary = json.loads(common.simdist("validate", path, "--json"))["summary"]
            pairs = {"clear_pairs": summary["n_clear_pairs"], "right_pairs": summary["n_right_pairs"]}
            part.emit({"what": "order", **about, "trouble": trouble, **pairs})


def killed(part: common.Part, n_ranks: int) -> None:
    """Kill a rank in the middle of a run, and emit who has named it, and when."""
    scenario: common.Row = {
        "cluster": common.ONE_GPU | {"gpus_per_node": n_ranks},
        "workload": {"preset": "mlp", "batch_size": 1, "forward": "1 ms", "backward": "2 ms"},
        "input": {"source": "memory"},
        "schedules": [{"kind": "sync"}],
        "steps": 20_000,
    }
    with tempfile.TemporaryDirectory() as name:
        runs = common.planned(scenario, Path(name))
        where = ("--backend", jobs.backend(part), "--device", part.device, "--timeout", TIMEOUT_S)
        with common.started(("real", runs, *where), n_ranks, ranks_per_node=n_ranks) as world:
            world.until(lambda: len(list(runs.rglob("parts/*"))) >= n_ranks, timeout_s=60.0)
            time.sleep(1.0)
            began_s = time.monotonic()
            world.signal(VICTIM, signal.SIGKILL)
            codes = world.codes(began_s + 2 * TIMEOUT_S, grace_s=2 * TIMEOUT_S)
            seconds = time.monotonic() - began_s
            said = world.said()
    others = [code for rank, code in enumerate(codes) if rank != VICTIM]
    n_named = sum(f"rank {VICTIM} (" in line for line in said.splitlines() if line.startswith("real: "))
    is_named = all(code == 1 for code in others) and n_named >= len(others) and seconds <= TIMEOUT_S
    row: common.Row = {"what": "killed", "ranks": n_ranks, "named_by": n_named, "seconds": round(seconds, 1)}
    part.emit(row | {"outcome": "passed" if is_named else "failed"} | ({} if is_named else {"said": said[-1500:]}))
