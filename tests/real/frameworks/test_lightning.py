"""What happens at the events of a fit. test_scripts.py runs real trainers."""

import sys
from types import SimpleNamespace

import pytest
from fake_worker import FakeWorker

from real.frameworks import lightning
from simdist.errors import UnsupportedError
from simdist.schedules import LocalSGD


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(Callback=object))
    return FakeWorker.made_by_wrap(monkeypatch, lightning)


def fit(rank: int, monkeypatch: pytest.MonkeyPatch, *, n_batches: int = 5, first_step: int = 0, **trainer: object):
    """Call the callback as Lightning does: two passes per step, a validation after step 1, a checkpoint at the end."""
    monkeypatch.setattr(lightning.dist, "get_rank", lambda: rank)
    files = SimpleNamespace(load_checkpoint=lambda path, *_, **__: {"loaded": path}, teardown=lambda: None)
    fake = SimpleNamespace(
        world_size=1,
        optimizers=[object()],
        global_step=first_step,
        accumulate_grad_batches=2,
        num_training_batches=n_batches,
        strategy=SimpleNamespace(checkpoint_io=files),
    )
    batches = SimpleNamespace(is_last_batch=False)
    fake.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=batches))
    vars(fake).update(trainer)
    module = SimpleNamespace(get_submodule=lambda name: name)
    events = lightning.schedule_callback(LocalSGD(period=4), network="net")
    events.on_validation_start(fake, module)  # the sanity check, before the training
    events.on_train_start(fake, module)
    synchronised = []
    for number in range(n_batches):
        batches.is_last_batch = number == n_batches - 1
        events.on_train_batch_start(fake, module, None, number)
        synchronised.append(events._worker.require_backward_grad_sync)
        events._worker.step += synchronised[-1]
        if number == 1:
            events.on_validation_start(fake, module)
    events.on_save_checkpoint(fake, module, {})
    events.on_train_end(fake, module)
    events.on_save_checkpoint(fake, module, {})  # of the model after the end
    return fake, synchronised


def test_a_fit_averages_before_validations_and_checkpoints_and_accumulates(
    workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, synchronised = fit(0, monkeypatch)
    assert synchronised == [False, True, False, True, True]  # the last pass of the epoch is alone
    assert workers[0].calls == ["average 1", "average 3", "close 3"]
    assert workers[0].module == "net"


def test_a_fit_that_resumes_begins_at_its_step(workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    fit(0, monkeypatch, first_step=6)
    assert workers[0].first_step == 6


def test_only_rank_0_writes_checkpoints_and_all_ranks_read_them(
    workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = fit(0, monkeypatch)
    other, _ = fit(1, monkeypatch)
    assert isinstance(first.strategy.checkpoint_io, SimpleNamespace)
    files = other.strategy.checkpoint_io
    files.save_checkpoint({}, "path")  # which the files below could not
    files.remove_checkpoint("path")
    assert files.load_checkpoint("path") == {"loaded": "path"}


@pytest.mark.parametrize("trainer", [{"world_size": 2}, {"optimizers": []}, {"optimizers": [1, 2]}])
def test_trainers_of_several_ranks_or_optimizers_are_refused(
    workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch, trainer: dict[str, object]
) -> None:
    with pytest.raises(UnsupportedError, match=r"start one process per rank, each with one optimizer"):
        fit(0, monkeypatch, **trainer)
