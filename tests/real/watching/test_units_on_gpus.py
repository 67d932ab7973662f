"""On a GPU, the own work of a rank is what its stream of computation computes, however exchanges overlap with it."""

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from fsdp_clock import drive
from fsdp_settings import BACKWARD, FORWARD, OPTIMIZE, Settings, random_settings
from torch import nn

from real.watching.meetings import attach

N_SETTINGS = 60


class Moments:
    """Notes the clock of the stream at arrivals and leaves."""

    def __init__(self) -> None:
        self.waited = 0
        self.last_leave = 0
        self._arrived = 0

    def watch(self, model: nn.Module, now: Callable[[], int]) -> None:
        self._now = now
        attach(model, self)

    def arrive(self) -> None:
        self._arrived = self._now()

    def leave(self) -> None:
        self.last_leave = self._now()
        self.waited += self.last_leave - self._arrived


def measured_and_computed(settings: Settings) -> tuple[int, int]:
    moments = Moments()
    rows = drive(settings, watch=moments.watch)
    computed = sum(
        row.end - row.start
        for row in rows
        if row.kind in (FORWARD, BACKWARD, OPTIMIZE) and row.end <= moments.last_leave
    )
    return moments.last_leave - moments.waited, computed


@pytest.mark.parametrize("seed", range(N_SETTINGS))
def test_own_work_is_computing(seed: int) -> None:
    measured, computed = measured_and_computed(random_settings(seed))
    assert measured == computed
