"""A small model that trains, and whose passes take the times of the scenario: each layer sleeps.

    torchrun ... -m real RUN --program sleeping_model:build

Ranks share two cores, so they sleep where ranks of their own would compute. Gradients are real, and so are losses: each
rank appends them to a file in the folder that `LOSSES` names, one line per forward pass: step, and loss in hexadecimal.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from real.models import TrainingJob
from simdist.scenario import load

WIDTH = 500
N_LAYERS = 4
SCENARIO = Path(__file__).parent / "scenario.yaml"
LOSSES = "SIMDIST_LOSSES"


class _Sleep(torch.autograd.Function):
    """The identity, which takes time in both passes."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class _Layer(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self._times_s = forward_s, backward_s

    def forward(self, inputs: Tensor) -> Tensor:
        """Sleep in place of most of the computation."""
        return _Sleep.apply(torch.tanh(self.linear(inputs)), *self._times_s)  # type: ignore[no-untyped-call,no-any-return]


def build(*, batch_size: int, device: torch.device, dtype: torch.dtype, seed: int) -> TrainingJob:
    """Return the model, which learns to reproduce its inputs, with its data."""
    workload = load(SCENARIO).workload
    times_s = (float(workload.forward_s) / N_LAYERS, float(workload.backward_s) / N_LAYERS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = nn.Sequential(*(_Layer(*times_s) for _ in range(N_LAYERS))).to(device=device, dtype=dtype)
    now = {"step": 0, "rank": 0}

    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        now.update(step=step, rank=rank)
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        inputs = torch.randn(batch_size, WIDTH, generator=generator)
        return inputs, inputs

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        found = nn.functional.mse_loss(outputs, targets)
        if folder := os.environ.get(LOSSES):
            with (Path(folder) / f"losses-{now['rank']}.txt").open("a") as file:
                file.write(f"{now['step']} {found.item().hex()}\n")
        return found

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return TrainingJob(module=module, loss=loss, optimizer=optimizer, batch=batch)
