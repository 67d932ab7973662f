"""A program without a model: it sleeps for the duration of each operation in the scenario.

So communication, waiting and stragglers can be measured on machines without GPUs, with many ranks on few cores.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from real.programs.base import Computation, Feed, Program
from real.recording.timing import sleep_s
from simdist.errors import RunError
from simdist.plan import ops

# Delays a stream for some seconds: a sleep of its thread or, on a GPU, a kernel that spins on the current stream.
_Hold = Callable[[float], None]


@final
@dataclass(frozen=True, slots=True)
class EmulatedProgram(Program):
    """Sleeps.

    Args:
        seconds: Duration of each operation on this rank.
        compute: Delays the compute stream.
        comm: Delays the comm stream, possibly in another thread at the same time.
        interrupted: Ends the sleep of a load or save early; set when the run has failed.
        load_s: (load, number) -> seconds, for loads that are not in `seconds` because their durations differ.
        feed: Reads data instead of sleeping.
        save: Writes the checkpoint of a step instead of sleeping.
        state_nbytes: Size of the state that another rank would need.
    """

    seconds: Mapping[ops.Op, float]
    compute: _Hold
    comm: _Hold
    interrupted: threading.Event
    load_s: Callable[[ops.Load, int], float] | None = None
    feed: Feed | None = None
    save: Callable[[ops.Save, int], None] | None = None
    state_nbytes: int = 0

    def load(self, op: ops.Load, number: int) -> None:
        """Read the batch, or sleep for the undisturbed duration of the load."""
        if self.feed is not None:
            self.feed.load(op, number)
            return
        seconds = self.load_s(op, number) if self.load_s and op not in self.seconds else self._seconds_of(op)
        sleep_s(seconds, self.interrupted)

    def launch(self, op: ops.KernelLaunch) -> None:
        """Sleep for as long as launching takes."""
        sleep_s(self._seconds_of(op), self.interrupted)

    def perform(self, op: Computation, step: int) -> None:
        """Stage the node's files, or write a file, or spend the duration of the operation in its stream."""
        if isinstance(op, ops.StageIn) and self.feed is not None:
            self.feed.stage_in(op)
            return
        if isinstance(op, ops.Save) and self.save is not None:
            self.save(op, step)
            return
        seconds = self._seconds_of(op)
        match ops.lane_of(op).kind:
            case "io" | "save":
                sleep_s(seconds, self.interrupted)
            case "comm":
                self.comm(seconds)
            case _:
                self.compute(seconds)

    def forward(self, parts: Sequence[ops.Forward], step: int, complete: Callable[[], object]) -> None:
        """Spend the duration of each part in turn."""
        for part in parts:
            self.compute(self._seconds_of(part))
            complete()

    def backward(self, buckets: Sequence[ops.Backward], complete: Callable[[], object]) -> None:
        """Spend the duration of each bucket in turn."""
        for bucket in buckets:
            self.compute(self.seconds[bucket])
            complete()

    def state(self) -> Tensor:
        """Return as many bytes as the state would have."""
        return torch.zeros(self.state_nbytes, dtype=torch.uint8)

    def _seconds_of(self, op: ops.Op) -> float:
        seconds = self.seconds.get(op)
        if seconds is None:
            raise RunError(f"no seconds are known for {op}; the emulated program takes them from the scenario's costs")
        return seconds
