"""Ranks over two backends compute equal values: a model whose sums are exact in any order, under each schedule.

Gradients are whole numbers, and ranks are a power of two. So no sum is rounded, whatever order a library adds in, and
parameters must be equal to the last bit.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import common
import jobs

N_UNITS, COUNT = 6, 256
N_STEPS = 4
_PRIME = 1021


def model(*, batch_size: int, device, dtype, seed: int):
    """Return a job whose gradients are the inputs: whole numbers that differ by entry, step and rank."""
    import torch
    from torch import nn

    from real.models import TrainingJob

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(COUNT))

        def forward(self, inputs):
            return self.weight * inputs

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.units = nn.ModuleList(Scale() for _ in range(N_UNITS))

        def forward(self, inputs):
            return torch.stack([unit(row) for unit, row in zip(self.units, inputs, strict=True)])

    def batch(step: int, rank: int):
        places = torch.arange(N_UNITS * COUNT).view(N_UNITS, COUNT)
        sizes = (places * 37 + step * 101 + rank * 211) % _PRIME + 1
        return torch.where(places % 2 == 0, sizes, -sizes).to(dtype), torch.zeros(1, dtype=dtype)

    module = Scales().to(device, dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    return TrainingJob(module, lambda outputs, _: outputs.sum(), optimizer, batch)


def compare(part: common.Part, n_ranks: int, environ: Mapping[str, object]) -> None:
    """Perform the plans of all schedules over NCCL and over gloo, and emit a row per schedule.

    Args:
        part: Takes the rows.
        n_ranks: A power of two.
        environ: Variables of the ranks over NCCL.
    """
    tensors = [{"name": f"units.{unit}.weight", "count": COUNT, "rows": 1} for unit in range(N_UNITS)]
    scenario: common.Row = {
        "cluster": common.ONE_GPU | {"gpus_per_node": n_ranks, "disk": {"read": "1 GB/s", "write": "1 GB/s"}},
        "workload": {"tensors": tensors, "batch_size": 1, "forward": "1 ms", "backward": "2 ms"},
        "checkpoint": {"every": N_STEPS, "what": "parameters", "ranks": "all", "to": "disk"},
        "schedules": jobs.schedules(n_ranks),
        "steps": N_STEPS,
    }
    with tempfile.TemporaryDirectory() as name:
        folders = []
        for backend, variables in ((jobs.backend(part), environ), ("gloo", {})):
            runs = common.planned(scenario, Path(name, str(len(folders))))
            where = ("--program", "values:model", "--backend", backend, "--device", part.device)
            common.ranks(("real", runs, *where), n_ranks, ranks_per_node=n_ranks, timeout_s=60.0, environ=variables)
            folders.append(runs)
        for path in sorted(each.parent for each in folders[0].rglob("plan.json")):
            schedule = path.relative_to(folders[0])
            n_equal, n_all = _equal(path, folders[1] / schedule)
            outcome = "passed" if n_all and n_equal == n_all else "failed"
            row: common.Row = {"what": "values", "ranks": n_ranks, "schedule": path.name}
            part.emit(row | {"tensors": n_all, "equal": n_equal, "outcome": outcome})


def _equal(ours: Path, theirs: Path) -> tuple[int, int]:
    """Return how many parameters in the checkpoints of two runs are equal to the last bit, and how many there are."""
    n_equal, n_all = 0, 0
    for file in sorted(ours.glob("saved/*.pt")):
        one, other = (_parameters(each) for each in (file, theirs / "saved" / file.name))
        n_all += len(one.keys() | other.keys())
        n_equal += sum(value == other.get(name) for name, value in one.items())
    return n_equal, n_all


def _parameters(checkpoint: Path) -> dict[str, bytes]:
    """Return name -> bytes of the parameters in a checkpoint; of a sharded model, of the slices of this rank."""
    import torch

    content = torch.load(checkpoint, map_location="cpu")
    pieces = {name: piece for name, (_, piece) in content.get("pieces", {}).items()}
    return {name: value.numpy().tobytes() for name, value in (content["model"] | pieces).items()}
