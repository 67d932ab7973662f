"""A worker that notes what it is asked to do, for tests of who asks."""

from collections.abc import Callable
from types import ModuleType

import pytest


class FakeWorker:
    """Notes its calls, each with the step."""

    def __init__(self, module: object, first_step: int) -> None:
        self.module = module
        self.first_step = first_step
        self.step = first_step
        self.require_backward_grad_sync = True
        self.calls: list[str] = []
        self.at_average: Callable[[], object] = lambda: None

    def average(self) -> None:
        self.at_average()
        self.calls.append(f"average {self.step}")

    def close(self) -> None:
        self.calls.append(f"close {self.step}")

    @classmethod
    def made_by_wrap(cls, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list["FakeWorker"]:
        """Let `wrap` in a module make such workers. Return the list of those that it makes."""
        made: list[FakeWorker] = []

        def wrap(wrapped: object, _optimizer: object, _schedule: object, *, first_step: int, **_: object) -> FakeWorker:
            made.append(cls(wrapped, first_step))
            return made[-1]

        monkeypatch.setattr(module, "wrap", wrap)
        return made
