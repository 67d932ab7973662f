"""What happens at the events of a trainer. test_scripts.py runs real ones."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from fake_worker import FakeWorker

from real.frameworks import transformers
from simdist.errors import RunError, UnsupportedError
from simdist.schedules import LocalSGD


class FakeTrainer:
    """Calls its callbacks as the Trainer of transformers 5 does."""

    def __init__(self, save_steps: int = 3, eval_steps: int = 5, **features: bool) -> None:
        self.model = object()
        self.optimizer = object()
        self.state = SimpleNamespace(global_step=0)
        self.is_fsdp_enabled = features.get("fsdp", False)
        self.is_deepspeed_enabled = False
        self._every = save_steps, eval_steps
        self._callbacks: list[transformers.TrainerEvents] = []
        self._wrap_model: Callable[..., FakeWorker]

    def add_callback(self, callback: transformers.TrainerEvents) -> None:
        self._callbacks.append(callback)

    def train(self, n_steps: int, first_step: int = 0, *, knows_step: bool = True) -> None:
        self.state.global_step = first_step if knows_step else 0
        worker = self._wrap_model(self.model)
        self.state.global_step = first_step
        self._call("on_train_begin", False, False)
        for step in range(first_step + 1, n_steps + 1):
            worker.step = self.state.global_step = step
            self._call("on_step_end", *(step % each == 0 for each in self._every))
            self._wrap_model(self.model, training=False)
        self._call("on_epoch_end", True, False)
        self._call("on_train_end", False, False)

    def _call(self, event: str, should_save: bool, should_evaluate: bool) -> None:
        control = SimpleNamespace(should_save=should_save, should_evaluate=should_evaluate)
        for callback in self._callbacks:
            assert getattr(callback, event)(None, self.state, control, model=self.model) is None


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(TrainerCallback=object))
    return FakeWorker.made_by_wrap(monkeypatch, transformers)


def test_a_trainer_averages_before_its_checkpoints_and_evaluations_and_closes_the_loop(
    workers: list[FakeWorker],
) -> None:
    trainer = FakeTrainer()
    transformers.follow(trainer, LocalSGD(period=4))
    trainer.train(7)
    (worker,) = workers
    assert worker.calls == ["average 3", "average 5", "average 6", "average 7", "close 7"]


def test_a_trainer_that_resumes_begins_at_its_step(workers: list[FakeWorker]) -> None:
    trainer = FakeTrainer()
    transformers.follow(trainer, LocalSGD(period=4))
    trainer.train(6)
    trainer.train(8, first_step=6)
    assert [worker.first_step for worker in workers] == [0, 6]
    assert workers[1].calls == ["average 8", "close 8"]


def test_a_trainer_that_learns_its_step_too_late_is_refused(workers: list[FakeWorker]) -> None:
    trainer = FakeTrainer()
    transformers.follow(trainer, LocalSGD(period=4))
    with pytest.raises(
        RunError, match="resumes at step 6, and the schedule would begin at step 0: take transformers 5"
    ):
        trainer.train(8, first_step=6, knows_step=False)


def test_a_trainer_that_shards_by_itself_is_refused(workers: list[FakeWorker]) -> None:
    with pytest.raises(UnsupportedError, match="FSDP or DeepSpeed synchronises its ranks"):
        transformers.follow(FakeTrainer(fsdp=True), LocalSGD(period=4))
