"""One process over NCCL: what `real.wrap` costs beside DistributedDataParallel, and whether values are equal.

Rows: the largest difference of parameters after some steps; steps per second with `real.wrap` over those with
DistributedDataParallel, taken in turns; and a step of the plan that `python -m real` performs, by its trace.
"""

import os
import time
from collections.abc import Callable
from statistics import median

import common

N_VALUE_STEPS = 10
Step = Callable[[], None]


def run(part: common.Part) -> None:
    """Emit the rows."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may add in another order each time
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(common.free_port())}
    import torch
    import torch.distributed as dist

    device = torch.device(part.device, 0) if part.device == "cuda" else torch.device("cpu")
    dist.init_process_group("gloo" if part.dry_run else "cpu:gloo,cuda:nccl")  # real.wrap needs both
    model = "mlp" if part.dry_run else "resnet50"
    part.emit(_overhead(model, part, device))
    part.emit(_performed(model, part))
    part.emit(_values(device))  # the last, as an operator may have no deterministic kernel
    dist.destroy_process_group()


def _make(name: str, batch_size: int, device):
    """Return a job of real.models with its batch on the device."""
    import torch

    from real import models

    job = models.build_job(name, batch_size=batch_size, device=device, dtype=torch.float32, seed=0)
    return job, tuple(each.to(device) for each in job.batch(0, 0))


def _loop(job, batch, module) -> Step:
    """Return one step of a training loop, as most people write it."""
    inputs, targets = batch

    def step() -> None:
        job.optimizer.zero_grad()
        job.loss(module(inputs), targets).backward()
        job.optimizer.step()

    return step


def _with_ddp(name: str, batch_size: int, device):
    from torch.nn.parallel import DistributedDataParallel

    job, batch = _make(name, batch_size, device)
    return job, _loop(job, batch, DistributedDataParallel(job.module, broadcast_buffers=False))


def _with_simdist(name: str, batch_size: int, device, n_steps: int):
    import real
    from simdist.schedules import Sync

    job, batch = _make(name, batch_size, device)
    worker = real.wrap(job.module, job.optimizer, Sync(), n_steps=n_steps)
    return job, _loop(job, batch, job.module), worker


def _values(device) -> common.Row:
    """Train alike from the same seed, and compare the parameters."""
    import torch

    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        by_hand, step = _with_ddp("gpt-nano", 4, device)
        for _ in range(N_VALUE_STEPS):
            step()
        ours, step, worker = _with_simdist("gpt-nano", 4, device, N_VALUE_STEPS)
        for _ in range(N_VALUE_STEPS):
            step()
        worker.close()
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
    pairs = zip(by_hand.module.parameters(), ours.module.parameters(), strict=True)
    largest = max(float((one - other).detach().abs().max()) for one, other in pairs)
    return {"what": "values", "model": "gpt-nano", "steps": N_VALUE_STEPS, "largest_difference": largest}


def _overhead(name: str, part: common.Part, device) -> common.Row:
    """Take turns, some steps each, and return the median ratio of rounds; the first round warms up."""
    import torch

    n_rounds, n_steps, batch_size = (2, 2, 4) if part.dry_run else (8, 5, 64)
    _, by_hand = _with_ddp(name, batch_size, device)
    _, with_simdist, worker = _with_simdist(name, batch_size, device, (n_rounds + 1) * n_steps)
    rounds: list[tuple[float, float]] = []
    for number in range(n_rounds + 1):
        pair = [(0, by_hand), (1, with_simdist)]
        taken: dict[int, float] = {}
        for which, step in pair if number % 2 else reversed(pair):
            if device.type == "cuda":
                torch.cuda.synchronize()
            began_s = time.perf_counter()
            for _ in range(n_steps):
                step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            taken[which] = (time.perf_counter() - began_s) / n_steps
        if number:
            rounds.append((taken[0], taken[1]))
    worker.close()
    return {
        "what": "overhead",
        "model": name,
        "batch_size": batch_size,
        "ddp_ms": 1e3 * median(hand for hand, _ in rounds),
        "simdist_ms": 1e3 * median(ours for _, ours in rounds),
        "overhead": median(ours / hand for hand, ours in rounds) - 1,
    }


def _performed(name: str, part: common.Part) -> common.Row:
    """Perform a plan of one rank from the command line, and return the median step of its trace."""
    import numpy as np

    from simdist.traces.waiting import step_s

    batch_size, steps = (4, 4) if part.dry_run else (64, 30)
    document: common.Row = {
        "workload": {"preset": name, "batch_size": batch_size, "forward": "1 ms", "backward": "2 ms"},
        # as in the loops above: the batch is on the device, and nobody waits for a loss
        "input": {"source": "device"},
        "host": {"run_ahead_steps": None},
        "schedules": [{"kind": "sync"}],
        "steps": steps,
    }
    backend = "gloo" if part.dry_run else "nccl"
    _, trace = common.performed(document, "--program", name, "--device", part.device, "--backend", backend)
    is_whole = bool(np.isfinite([trace.ready_s, trace.start_s, trace.end_s]).all())
    return {
        "what": "plan",
        "model": name,
        "batch_size": batch_size,
        "step_ms": 1e3 * float(np.median(step_s(trace)[steps // 2 :])),
        "every_operation_ran": is_whole,
    }
