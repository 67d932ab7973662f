"""Lets the Trainer of Hugging Face follow a schedule.

    trainer = Trainer(model, args, train_dataset=samples)
    follow(trainer, LocalSGD(period=4))
    trainer.train()

Parameters are averaged before each evaluation and each checkpoint of the trainer, which rank 0 writes. A resumed
trainer goes on at the step of its checkpoint. Gradients are accumulated as its arguments say.
"""

from typing import TYPE_CHECKING

from torch import nn

from real.loops.options import Averaging, Experiment, Launch
from real.loops.worker import Worker
from real.loops.wrap import wrap
from simdist.errors import RunError, UnsupportedError
from simdist.schedules import Schedule

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState

_AVERAGING = Averaging()
_EXPERIMENT = Experiment()
_LAUNCH = Launch()


def follow(
    trainer: "Trainer",
    schedule: Schedule,
    *,
    averaging: Averaging = _AVERAGING,
    experiment: Experiment = _EXPERIMENT,
    launch: Launch = _LAUNCH,
) -> None:
    """Let a trainer follow a schedule, in place of DistributedDataParallel. All ranks call this before `train()`.

    Args:
        trainer: The trainer.
        schedule: The schedule.
        averaging: As for `real.wrap`.
        experiment: As for `real.wrap`; `watching` reports late ranks.
        launch: As for `real.wrap`.

    Raises:
        UnsupportedError: The trainer shards its model itself.
    """
    from transformers import TrainerCallback

    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise UnsupportedError("follow(trainer): FSDP or DeepSpeed synchronises its ranks: leave them out of its args")

    class Callback(TrainerEvents, TrainerCallback):  # type: ignore[misc]
        """Takes part in the events of the trainer."""

    events = Callback()

    def wrap_model(model: nn.Module, training: bool = True, dataloader: object = None) -> nn.Module:
        if not training:
            return model
        worker = wrap(
            trainer.model,
            trainer.optimizer,
            schedule,
            first_step=trainer.state.global_step,
            averaging=averaging,
            experiment=experiment,
            launch=launch,
        )
        events.begin(worker)
        return worker

    trainer._wrap_model = wrap_model  # where it would add DistributedDataParallel
    trainer.add_callback(events)


class TrainerEvents:
    """What has to happen at the events of a trainer."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def begin(self, worker: Worker) -> None:
        """Take the worker of a training that begins."""
        self._worker = worker

    def on_train_begin(self, args: object, state: "TrainerState", control: "TrainerControl", **_: object) -> None:
        """Check that the schedule begins at the step of the trainer."""
        worker = self._worker
        if worker is None:
            raise RunError("follow(trainer): the trainer has not wrapped its model; call follow before trainer.train()")
        if worker.step != state.global_step:
            raise RunError(
                f"follow(trainer): the trainer resumes at step {state.global_step}, and the schedule would begin at "
                f"step {worker.step}: take transformers 5 or newer, which knows the step when it wraps the model"
            )

    def on_step_end(self, args: object, state: "TrainerState", control: "TrainerControl", **_: object) -> None:
        """Average before an evaluation or a checkpoint."""
        if self._worker and (control.should_evaluate or control.should_save):
            self._worker.average()

    def on_epoch_end(self, args: object, state: "TrainerState", control: "TrainerControl", **_: object) -> None:
        """Average before an evaluation or a checkpoint of an epoch."""
        self.on_step_end(args, state, control)

    def on_train_end(self, args: object, state: "TrainerState", control: "TrainerControl", **_: object) -> None:
        """End the loop."""
        if self._worker:
            self._worker.close()
            self._worker = None
