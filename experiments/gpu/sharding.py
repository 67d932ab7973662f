"""The memory that a sharded plan needs on a GPU, beside the column `memory` of the simulation.

Four processes share the GPU over gloo and train a model of equal layers, whose activations are small: what torch's
allocator has given out at most (`torch.cuda.max_memory_allocated`) is parameters, state of the optimizer, gathered
units, gradients, and what is sent. A row per schedule.
"""

import json
import os
import tempfile
from pathlib import Path

import common

RANKS = 4
SCHEDULES = [
    {"kind": "fsdp"},
    {"kind": "fsdp", "reshard_after_forward": False},
    {"kind": "hsdp", "shard": 2},
]
N_UNITS, N_LAYERS = 12, 8
WIDTH = "SIMDIST_GPU_WIDTH"


def model(*, batch_size: int, device, dtype, seed: int):
    """Return a job of units of equal linear layers without bias, trained by SGD with momentum."""
    import torch
    from torch import nn

    from real.models import TrainingJob

    width = int(os.environ[WIDTH])
    torch.manual_seed(seed)
    units = [nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(N_LAYERS))) for _ in range(N_UNITS)]
    module = nn.Sequential(*units).to(device, dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.ones(batch_size, width, dtype=dtype), torch.zeros(batch_size, width, dtype=dtype)
    return TrainingJob(module, nn.MSELoss(), optimizer, lambda step, rank: batch)


def run(part: common.Part) -> None:
    """Emit a row per schedule."""
    width, steps = (64, 2) if part.dry_run else (1536, 3)
    os.environ |= {WIDTH: str(width), "CUBLAS_WORKSPACE_CONFIG": ":16:8"}  # by default 32 MiB a process
    layers = [(unit, layer) for unit in range(N_UNITS) for layer in range(N_LAYERS)]
    document: common.Row = {
        "cluster": common.ONE_GPU | {"gpus_per_node": RANKS},
        "workload": {
            "tensors": [
                {"name": f"{unit}.{layer}.weight", "count": width * width, "rows": width} for unit, layer in layers
            ],
            "batch_size": 4,
            "forward": "5 ms",
            "backward": "10 ms",
        },
        "schedules": SCHEDULES,
        "steps": steps,
    }
    with tempfile.TemporaryDirectory() as name:
        runs = common.planned(document, Path(name))
        program = ("--program", "sharding:model", "--backend", "gloo", "--device", part.device)
        common.ranks(("real", runs, *program), RANKS, ranks_per_node=RANKS, timeout_s=60.0)
        _emit(part, runs)


def _emit(part: common.Part, runs: Path) -> None:
    from simdist.runs import run_directory
    from simdist.runs.building import build
    from simdist.runs.memory import memory_of

    for path in run_directory.find(runs):
        found = run_directory.read(path)
        schedule = found.scenario.schedules[0]
        column_nbytes = memory_of(found.scenario, build(found.scenario, schedule)).peak_nbytes
        report = json.loads((path / run_directory.REPORT).read_text(encoding="utf-8"))
        state_nbytes = sum(buffer.nbytes for buffer in found.plan.buffers if buffer.initialized)  # momentum
        allocated_nbytes = max(
            report["allocated_nbytes"] or [nbytes + state_nbytes for nbytes in report["buffers_nbytes"]]
        )
        part.emit(
            {
                "schedule": path.name,
                "column_MB": column_nbytes / 1e6,
                "allocated_MB": allocated_nbytes / 1e6,
                "all_buffers_MB": sum(buffer.nbytes for buffer in found.plan.buffers) / 1e6,
                "error": allocated_nbytes / column_nbytes - 1,
            }
        )
