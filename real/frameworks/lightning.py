"""Lets a Lightning trainer follow a schedule.

    torch.distributed.init_process_group("gloo")
    callbacks = [schedule_callback(LocalSGD(period=4), network="net")]
    trainer = Trainer(devices=1, plugins=[LightningEnvironment()], callbacks=callbacks)
    trainer.fit(task, loader)

Each rank has a trainer of one device. Parameters are averaged before each validation and each checkpoint, which rank 0
writes. A resumed trainer goes on at the step of its checkpoint. Gradients are accumulated as the trainer says.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from real.loops.options import Averaging, Experiment, Launch
from real.loops.worker import Worker
from real.loops.wrap import wrap
from simdist.errors import UnsupportedError
from simdist.schedules import Schedule

if TYPE_CHECKING:
    from lightning import Callback, LightningModule, Trainer

_AVERAGING = Averaging()
_EXPERIMENT = Experiment()
_LAUNCH = Launch()


def schedule_callback(
    schedule: Schedule,
    *,
    network: str,
    averaging: Averaging = _AVERAGING,
    experiment: Experiment = _EXPERIMENT,
    launch: Launch = _LAUNCH,
) -> "Callback":
    """Return a callback by which a trainer follows a schedule.

    Args:
        schedule: The schedule.
        network: Name of the attribute of the `LightningModule` that `training_step` calls once, such as `net`.
        averaging: As for `real.wrap`.
        experiment: As for `real.wrap`; `watching` reports late ranks.
        launch: As for `real.wrap`.
    """
    from lightning import Callback

    class ScheduleCallback(_FitEvents, Callback):  # type: ignore[misc]
        """Takes part in the events of the trainer."""

    return ScheduleCallback(schedule, network, averaging, experiment, launch)


class _FitEvents:
    """What has to happen at the events of a trainer."""

    def __init__(
        self, schedule: Schedule, network: str, averaging: Averaging, experiment: Experiment, launch: Launch
    ) -> None:
        self._schedule = schedule
        self._network = network
        self._averaging = averaging
        self._experiment = experiment
        self._launch = launch
        self._worker: Worker | None = None
        self._averaged_at = -1

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Wrap the network. A trainer that resumes has loaded its checkpoint."""
        if trainer.world_size > 1 or len(trainer.optimizers) != 1:
            raise UnsupportedError(
                f"schedule_callback: the trainer has {trainer.world_size} ranks and {len(trainer.optimizers)} "
                f"optimizers: start one process per rank, each with one optimizer, and write "
                f"Trainer(devices=1, plugins=[LightningEnvironment()])"
            )
        self._averaged_at = -1
        self._worker = wrap(
            pl_module.get_submodule(self._network),
            trainer.optimizers[0],
            self._schedule,
            first_step=trainer.global_step,
            averaging=self._averaging,
            experiment=self._experiment,
            launch=self._launch,
        )
        if dist.get_rank():
            trainer.strategy.checkpoint_io = _ReadOnly(trainer.strategy.checkpoint_io)

    def on_train_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: object, batch_idx: int
    ) -> None:
        """Exchange gradients in the last of the accumulated passes only."""
        batches = trainer.fit_loop.epoch_loop.batch_progress  # which knows the last batch of a loader without a length
        is_last_of_epoch = batches.is_last_batch or batch_idx + 1 == trainer.num_training_batches
        if self._worker:
            self._worker.require_backward_grad_sync = (
                is_last_of_epoch or (batch_idx + 1) % trainer.accumulate_grad_batches == 0
            )

    def on_validation_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Average before a validation within the training."""
        self._average()

    def on_save_checkpoint(
        self, trainer: "Trainer", pl_module: "LightningModule", checkpoint: Mapping[str, object]
    ) -> None:
        """Average before a checkpoint is written. It refers to the tensors of the network."""
        self._average()

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """End the loop."""
        worker = self._worker
        self._worker = None
        if worker:
            worker.close()

    def _average(self) -> None:
        """Average once before a step. After a validation, a rank may save alone: each has its own metrics."""
        worker = self._worker
        if worker and worker.step != self._averaged_at:
            worker.average()
            self._averaged_at = worker.step


class _Files(Protocol):
    """How Lightning reads checkpoints."""

    def load_checkpoint(self, path: str, *options: object, **more: object) -> dict[str, object]:
        """Return a checkpoint."""

    def teardown(self) -> None:
        """End."""


class _ReadOnly:
    """Reads checkpoints, and leaves it to rank 0 to write and remove them."""

    def __init__(self, files: _Files) -> None:
        self._files = files

    def save_checkpoint(self, checkpoint: object, path: str, storage_options: object = None) -> None:
        """Write nothing."""

    def remove_checkpoint(self, path: str) -> None:
        """Remove nothing."""

    def load_checkpoint(self, path: str, *options: object, **more: object) -> dict[str, object]:
        """Return a checkpoint."""
        return self._files.load_checkpoint(path, *options, **more)

    def teardown(self) -> None:
        """End."""
        self._files.teardown()
