"""What one rank did when, written to a file as it happens, so that a rank that is killed leaves what it had.

The file is a .npy of float64 `[3, n_instances]` (ready, start, end), mapped into memory: the kernel keeps what was
written even if the process is gone. Times are of the rank's own monotonic clock; `real.recording.traces` brings
them together.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from real.recording.memmap import mapped
from simdist.plan import Plan

Times = np.ndarray[tuple[int, int], np.dtype[np.float64]]


class Notes(Protocol):
    """Takes the times of one rank."""

    def begin(self, index: int, at_s: float) -> None:
        """Note when an instance was ready."""
        ...

    def end(self, index: int, at_s: float) -> None:
        """Note when an instance was done."""
        ...


class Silent:
    """Takes no notes: a run that nobody looks at afterwards needs no memory for them."""

    def begin(self, index: int, at_s: float) -> None:
        """Do nothing."""

    def end(self, index: int, at_s: float) -> None:
        """Do nothing."""


class Recorder:
    """The times of one rank.

    Args:
        plan: What is executed.
        path: The file to write; without one, times are kept in memory.

    Raises:
        RunError: The file cannot be written.
    """

    def __init__(self, plan: Plan, path: Path | None = None) -> None:
        shape = (3, plan.n_instances)
        unknown: NDArray[np.float64] = np.full(shape, np.nan)
        self.times_s = unknown if path is None else mapped(path, unknown)
        self._ready_s, self._start_s, self._end_s = self.times_s

    def begin(self, index: int, at_s: float) -> None:
        """Note when an instance was ready, and so began; who began late because of others is found out later."""
        self._ready_s[index] = self._start_s[index] = at_s

    def end(self, index: int, at_s: float) -> None:
        """Note when an instance was done."""
        self._end_s[index] = at_s
