"""Lets a loop of Accelerate follow a schedule.

    optimizer, loader = accelerator.prepare(optimizer, loader)
    model = follow(accelerator, model, optimizer, LocalSGD(period=4))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            ...

`accelerator.save_state()` and `save_model()` average the parameters first. `resume_from` goes on at the stored step.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from real.loops.options import Averaging, Experiment, Launch
from real.loops.worker import Worker
from real.loops.wrap import wrap
from simdist.errors import RunError
from simdist.schedules import Schedule

if TYPE_CHECKING:
    from accelerate import Accelerator

_AVERAGING = Averaging()
_EXPERIMENT = Experiment()
_LAUNCH = Launch()


def follow(
    accelerator: "Accelerator",
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    *,
    resume_from: Path | str | None = None,
    averaging: Averaging = _AVERAGING,
    experiment: Experiment = _EXPERIMENT,
    launch: Launch = _LAUNCH,
) -> Worker:
    """Let a model follow a schedule, in place of `accelerator.prepare(model)`. All ranks call this.

    Args:
        accelerator: The accelerator.
        model: The model, not prepared.
        optimizer: The prepared optimizer of its parameters.
        schedule: The schedule.
        resume_from: Folder of `accelerator.save_state()`, in place of `accelerator.load_state()`.
        averaging: As for `real.wrap`.
        experiment: As for `real.wrap`; `watching` reports late ranks.
        launch: As for `real.wrap`.

    Returns:
        The worker, which replaces the model. Call its `average()` before an evaluation, and `close()` at the end.
    """
    progress = _Progress()
    accelerator.register_for_checkpointing(progress)
    module = accelerator.prepare_model(model, evaluation_mode=True)  # which adds no DistributedDataParallel
    if resume_from is not None:
        accelerator.load_state(str(resume_from))
    worker = wrap(
        module,
        optimizer,
        schedule,
        first_step=progress.step,
        averaging=averaging,
        experiment=experiment,
        launch=launch,
    )
    progress.follow(worker)
    _save_averages(accelerator, worker)
    return worker


def _save_averages(accelerator: "Accelerator", worker: Worker) -> None:
    """Average before `save_state` and `save_model`, and save the wrapped model under the names of its own tensors."""
    state_dict_of = accelerator.get_state_dict
    save_model = accelerator.save_model

    def get_state_dict(model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        return in_memory_of_its_own(state_dict_of(worker.module if model is worker else model, unwrap))

    def average_and_save_model(model: nn.Module, *args: object, **options: object) -> None:
        if model is worker or model is worker.module:
            worker.average()
        save_model(model, *args, **options)

    def average_before(models: list[nn.Module], weights: list[dict[str, Tensor]], _folder: str) -> None:
        worker.average()
        weights[:] = [get_state_dict(each) for each in models]

    accelerator.get_state_dict = get_state_dict
    accelerator.save_model = average_and_save_model
    accelerator.register_save_state_pre_hook(average_before)


def in_memory_of_its_own(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory without being the same, as those of a bucket do.

    Accelerate takes them for tied ones and would save one of them only. Tied tensors stay tied.
    """
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    for tensor in state.values():
        copies.setdefault((tensor.data_ptr(), tensor.shape), tensor.clone())
    return {name: copies[tensor.data_ptr(), tensor.shape] for name, tensor in state.items()}


class _Progress:
    """The step of a worker, as Accelerate saves and loads it."""

    def __init__(self) -> None:
        self._step = 0
        self._worker: Worker | None = None

    @property
    def step(self) -> int:
        """The next step."""
        return self._worker.step if self._worker else self._step

    def follow(self, worker: Worker) -> None:
        """Take the step of a worker from now on."""
        self._worker = worker

    def state_dict(self) -> dict[str, int]:
        """Return the step."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the step of a checkpoint, before the worker is made."""
        if self._worker and self._worker.step != state["step"]:
            raise RunError(
                f"accelerator.load_state(): the checkpoint is of {state['step']} steps, and the schedule is at step "
                f"{self._worker.step}: write real.frameworks.accelerate.follow(..., resume_from=folder) in its place"
            )
        self._step = state["step"]
