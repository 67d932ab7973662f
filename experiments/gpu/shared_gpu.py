"""Two ranks over NCCL on one GPU: do they compute what ranks over gloo compute?

NCCL allows it from 2.30 on, as an experiment. It tests function. Times on a shared GPU say nothing.
"""

import common
import jobs
import values

RANKS = 2


def run(part: common.Part) -> None:
    """Emit a row per schedule, or one that says why there are none."""
    import torch

    from real.processes.launch import SHARES_GPU, SHARING_NCCL

    if not part.dry_run:
        release = torch.cuda.nccl.version()
        if release[:2] < SHARING_NCCL:
            needed, found = (".".join(map(str, each)) for each in (SHARING_NCCL, release))
            part.emit({"skipped": f"ranks share a GPU over NCCL from {needed} on; this is {found}"})
            return
    values.compare(part, RANKS, {SHARES_GPU: 1} if jobs.backend(part) == "nccl" else {})
