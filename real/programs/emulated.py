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
        hold: Holds up the stream of computation for some seconds: a sleep, or on a GPU a kernel that spins.
        interrupted: Ends the sleep of a load or save early; set when the run has failed.
    """

    def __init__(
        self, seconds: Mapping[Op, float], hold: Callable[[float], None], interrupted: threading.Event
    ) -> None:
        self._seconds, self._hold, self._interrupted = seconds, hold, interrupted
        self._backward_s: dict[str, float] = {op.dst: s for op, s in seconds.items() if isinstance(op, Backward)}

    def load(self, op: Load, step: int) -> None:
        """Sleep for the seconds that the load takes undisturbed."""
        sleep_s(self._seconds_of(op), self._interrupted)

    def copy(self, op: Copy, step: int) -> None:
        """Take the copy's seconds."""
        self._compute(op)

    def forward(self, op: Forward, step: int) -> None:
        """Take the forward pass's seconds."""
        self._compute(op)

    def backward(self, buckets: Iterable[str], complete: Callable[[], None]) -> None:
        """Take the seconds of each bucket in turn."""
        for bucket in buckets:
            self._hold(self._backward_s[bucket])
            complete()

    def optimize(self, op: Optimize) -> None:
        """Take the update's seconds."""
        self._compute(op)

    def select(self, op: Select, step: int) -> None:
        """Take the selection's seconds."""
        self._compute(op)

    def densify(self, op: Densify) -> None:
        """Take the scatter-add's seconds."""
        self._compute(op)

    def save(self, op: Save, step: int) -> None:
        """Sleep for the seconds that the save takes undisturbed."""
        sleep_s(self._seconds_of(op), self._interrupted)

    def _compute(self, op: Op) -> None:
        self._hold(self._seconds_of(op))

    def _seconds_of(self, op: Op) -> float:
        seconds = self._seconds.get(op)
        if seconds is None:
            raise RunError(f"no seconds are known for {op}; the emulated program takes them from the scenario's costs")
        return seconds
