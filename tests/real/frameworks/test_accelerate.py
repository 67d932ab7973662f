"""What happens when Accelerate saves. test_scripts.py trains with the real one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_worker import FakeWorker
from torch import Tensor, nn

from real.frameworks import accelerate
from simdist.errors import RunError
from simdist.schedules import LocalSGD


class FakeAccelerator:
    """Saves and loads in memory, in the order of Accelerate."""

    def __init__(self, saved: dict[str, list] | None = None) -> None:
        self.saved = saved or {}
        self._models: list[nn.Module] = []
        self._objects: list[accelerate._Progress] = []
        self._hooks: list[Callable[..., None]] = []

    def prepare_model(self, model: nn.Module, *, evaluation_mode: bool) -> nn.Module:
        assert evaluation_mode
        self._models.append(model)
        return model

    def register_for_checkpointing(self, each: accelerate._Progress) -> None:
        self._objects.append(each)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> None:
        self._hooks.append(hook)

    def get_state_dict(self, model: nn.Module, unwrap: bool) -> dict[str, Tensor]:
        return model.state_dict()

    def save_model(self, model: nn.Module, folder: str) -> None:
        self.saved[folder] = [[self.get_state_dict(model, True)], []]

    def save_state(self, folder: str) -> None:
        weights = [self.get_state_dict(each, True) for each in self._models]
        for hook in self._hooks:
            hook(self._models, weights, folder)
        self.saved[folder] = [weights, [each.state_dict() for each in self._objects]]

    def load_state(self, folder: str) -> None:
        for each, state in zip(self._objects, self.saved[folder][1], strict=True):
            each.load_state_dict(state)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    return FakeWorker.made_by_wrap(monkeypatch, accelerate)


def test_a_state_is_saved_after_an_average_with_its_step(workers: list[FakeWorker]) -> None:
    accelerator = FakeAccelerator()
    model = nn.Linear(2, 1)
    worker = accelerate.follow(accelerator, model, None, LocalSGD(period=4))
    worker.step = 3
    weight = model.weight
    workers[0].at_average = lambda: nn.init.ones_(weight)
    accelerator.save_state("folder")
    assert worker.calls == ["average 3"]
    assert accelerator.saved["folder"][0][0]["weight"].tolist() == [[1.0, 1.0]]
    again = accelerate.follow(FakeAccelerator(accelerator.saved), model, None, LocalSGD(period=4), resume_from="folder")
    assert again.first_step == 3


def test_a_state_that_is_loaded_under_the_worker_is_refused(workers: list[FakeWorker]) -> None:
    accelerator = FakeAccelerator({"folder": [[], [{"step": 3}]]})
    accelerate.follow(accelerator, nn.Linear(2, 1), None, LocalSGD(period=4))
    with pytest.raises(RunError, match=r"is of 3 steps, and the schedule is at step 0: write .*resume_from=folder"):
        accelerator.load_state("folder")
    again = FakeAccelerator(accelerator.saved)
    assert accelerate.follow(again, nn.Linear(2, 1), None, LocalSGD(period=4), resume_from=Path("folder")).step == 3


def test_tensors_of_one_bucket_are_saved_apart_and_tied_ones_together() -> None:
    bucket = torch.arange(6.0)
    state = {"first": bucket[:4].view(2, 2), "second": bucket[4:], "tied": bucket[4:], "start": bucket[:2]}
    found = accelerate.in_memory_of_its_own(state)
    assert all((found[name] == state[name]).all() for name in state)
    assert found["second"] is found["tied"]
    assert len({each.untyped_storage().data_ptr() for each in found.values()}) == 3
