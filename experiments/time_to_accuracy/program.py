"""Tasks that train for real on an emulated device: each pass takes as long as the scenario says, mostly asleep.

    python -m real RUNS --program program:digits

A pass does the task's arithmetic and sleeps for the rest of its time, so eight ranks fit on two cores. What is noted,
loss by step and the model after every few steps, is written when the process ends, into the folder that SIMDIST_LEARNED
names.
"""

import atexit
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from real.models import TrainingJob, tasks

FORWARD_S, BACKWARD_S, OPTIMIZE_S = 0.02, 0.04, 0.008  # those of scenario.yaml
EVERY = 5
"""Steps between evaluations."""
_N_WARM_UP = 3  # passes before the first step, by `python -m real`


def flat(module: nn.Module) -> Tensor:
    """Return all numbers of a model that are no counts, buffers too."""
    return torch.cat([each.detach().flatten() for each in module.state_dict().values() if each.is_floating_point()])


class _Asleep(torch.autograd.Function):
    """Sleeps at the beginning of a backward pass, for what its arithmetic will leave of its time."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, device: "Device") -> Tensor:
        ctx.device = device
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.device.begin_backward()
        return gradient, None


class Device(nn.Module):
    """A model on an emulated device.

    Args:
        model: The model.
        name: Of the file of its notes.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []
        self.snapshots: list[Tensor] = []
        self._n_passes, self._began_s, self._slept_s = -_N_WARM_UP, 0.0, 0.0
        self._arithmetic_s = float("inf")
        self._update_s = 0.0
        atexit.register(self._write, Path(os.environ["SIMDIST_LEARNED"], f"{name}-{os.environ['RANK']}.pt"))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs, after the time of a forward pass."""
        began_s = time.perf_counter()
        if -_N_WARM_UP < self._n_passes <= 0:
            self._arithmetic_s = min(self._arithmetic_s, began_s - self._began_s - self._slept_s)
        if self._n_passes >= 0 and self._n_passes % EVERY == 0:
            self.snapshots.append(flat(self.model))
        self._n_passes += 1
        outputs: Tensor = self.model(inputs)
        time.sleep(max(0.0, began_s + FORWARD_S - time.perf_counter()))
        return _Asleep.apply(outputs, self)  # type: ignore[no-any-return, no-untyped-call]

    def begin_backward(self) -> None:
        """Sleep for what the rest of the pass leaves of its time, as the passes before the first step have shown."""
        self._began_s = time.perf_counter()
        time.sleep(max(0.0, BACKWARD_S - min(self._arithmetic_s, BACKWARD_S)))
        self._slept_s = time.perf_counter() - self._began_s

    def note(self, loss: Tensor) -> Tensor:
        """Note the loss of a step."""
        if self._n_passes > 0:
            self.losses.append(loss.item())
        return loss

    def before_update(self, *_: object) -> None:
        """Note when the update began."""
        self._update_s = time.perf_counter()

    def after_update(self, *_: object) -> None:
        """Sleep for the rest of an update."""
        time.sleep(max(0.0, self._update_s + OPTIMIZE_S - time.perf_counter()))

    def _write(self, path: Path) -> None:
        torch.save({"losses": self.losses, "snapshots": [*self.snapshots, flat(self.model)]}, path)


_made: dict[str, int] = {}


def build(task: str, *, batch_size: int, device: torch.device, dtype: torch.dtype, seed: int) -> TrainingJob:
    """Return a task as `python -m real --program` takes it; its files have the number of the run in their names."""
    number = _made[task] = _made.get(task, -1) + 1
    its = tasks.TaskFunctions(task, seed)
    module, optimizer, _ = its.make(int(os.environ["RANK"]))
    paced = Device(module, f"{task}-{number}")
    optimizer.register_step_pre_hook(paced.before_update)
    optimizer.register_step_post_hook(paced.after_update)
    return TrainingJob(
        module=paced,
        loss=lambda outputs, targets: paced.note(its.loss(outputs, targets)),
        optimizer=optimizer,
        batch=its.batch,
    )


digits, text, split = (partial(build, name) for name in ("digits", "text", "split"))
