"""A program without a model: it sleeps as long as the scenario says that each operation takes.

So communication, waiting and stragglers can be measured for real on machines without GPUs, many ranks on few cores,
because who sleeps needs no core.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import final

from real.programs.base import Program
from real.timing import sleep_s
from simdist.errors import RunError
from simdist.plan import Backward, Copy, Densify, Forward, Load, Op, Optimize, Save, Select

__all__ = ["EmulatedProgram"]


@final
class EmulatedProgram(Program):
    """Sleeps.

    Args:
        seconds: How long each operation takes on this rank.
        interrupted: Ends a sleep early; set when the run has failed.
    """

    def __init__(self, seconds: Mapping[Op, float], interrupted: threading.Event) -> None:
        self._seconds = seconds
        self._interrupted = interrupted
        self._backward_s: dict[str, float] = {op.dst: s for op, s in seconds.items() if isinstance(op, Backward)}

    def load(self, op: Load, step: int) -> None:
        """Sleep for the seconds that the load takes undisturbed."""
        self._sleep(op)

    def copy(self, op: Copy, step: int) -> None:
        """Sleep for the copy's seconds."""
        self._sleep(op)

    def forward(self, op: Forward, step: int) -> None:
        """Sleep for the forward pass's seconds."""
        self._sleep(op)

    def backward(self, buckets: Iterable[str], complete: Callable[[], None]) -> None:
        """Sleep for the seconds of each bucket in turn."""
        for bucket in buckets:
            sleep_s(self._backward_s[bucket], self._interrupted)
            complete()

    def optimize(self, op: Optimize) -> None:
        """Sleep for the update's seconds."""
        self._sleep(op)

    def select(self, op: Select) -> None:
        """Sleep for the selection's seconds."""
        self._sleep(op)

    def densify(self, op: Densify) -> None:
        """Sleep for the scatter-add's seconds."""
        self._sleep(op)

    def save(self, op: Save, step: int) -> None:
        """Sleep for the seconds that the save takes undisturbed."""
        self._sleep(op)

    def _sleep(self, op: Op) -> None:
        seconds = self._seconds.get(op)
        if seconds is None:
            raise RunError(f"no seconds are known for {op}; the emulated program takes them from the scenario's costs")
        sleep_s(seconds, self._interrupted)
