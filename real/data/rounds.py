"""A load under way: what has come from where, what is still to come, and the first thing that went wrong."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from real.data.board import Want
from simdist.errors import RunError
from simdist.plan import LEVELS

_LOOK_UP_S = 0.1  # how often a wait looks whether the run has failed elsewhere


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Says what a load has done, which is what the plan says unless something failed.

    Args:
        n_samples: int64 `[len(LEVELS)]`, samples that came from each level.
        nbytes: Likewise: of files from disk and storage, of decoded samples from memory and peers.
        n_elsewhere: Samples that came from another level than planned.
        n_not_kept: Samples for which memory had no room.
    """

    n_samples: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    n_elsewhere: int
    n_not_kept: int


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Says how one sample is to be read.

    Args:
        sample: Which.
        planned: Where it should be, an index of `LEVELS`.
        owner: Which node's memory has it, if any.
        keeps_memory: Whether memory then keeps it.
        keeps_disk: Whether the disk keeps its file.
        in_memory: Who brought it into the owner's memory, and when.
        on_disk: Who brought its file to this node's disk, and when.
        out: Where it goes, uint8, flat.
    """

    sample: int
    planned: int
    owner: int
    keeps_memory: bool
    keeps_disk: bool
    in_memory: Want
    on_disk: Want
    out: NDArray[np.uint8]


class Round:
    """Collects what threads report about the reads of a load.

    Args:
        where: The load, to begin messages with.
        reads: All of them.
        names: Of the files of all samples.
    """

    def __init__(self, where: str, reads: Sequence[Read], names: Sequence[str]) -> None:
        self.not_kept: list[Read] = []
        self._where, self._names = where, names
        self._missing = {id(read): read for read in reads}
        self._n_samples, self._nbytes = np.zeros((2, len(LEVELS)), dtype=np.int64)
        self._n_elsewhere = 0
        self._error: RunError | None = None
        self._changed = threading.Condition()

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._error is not None

    def done(self, read: Read, came_from: int, nbytes: int, *, kept: bool = True) -> None:
        """Report a sample that is where it should be."""
        with self._changed:
            del self._missing[id(read)]
            self._n_samples[came_from] += 1
            self._nbytes[came_from] += nbytes
            self._n_elsewhere += came_from != read.planned
            if not kept:
                self.not_kept.append(read)
            self._changed.notify_all()

    def fail(self, read: Read | None, error: BaseException) -> None:
        """Report an error; the first one counts."""
        about = "" if read is None else f"sample {read.sample} ({self._names[read.sample]}): "
        reason = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        with self._changed:
            if self._error is None:
                self._error = RunError(f"{self._where}: {about}{reason}")
                self._error.__cause__ = error
            self._changed.notify_all()

    def wait(self, *, timeout_s: float, stop: threading.Event) -> None:
        """Wait until every sample is there.

        Raises:
            RunError: One failed, or the run has failed elsewhere, or time is over.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self._missing and self._error is None:
                if stop.is_set():
                    self._error = RunError(f"{self._where}: the run has failed")
                elif time.monotonic() > deadline_s:
                    self._error = RunError(self._late(timeout_s))
                else:
                    self._changed.wait(_LOOK_UP_S)
        if self._error is not None:
            raise self._error

    def counts(self) -> Counts:
        """Return what was done."""
        return Counts(self._n_samples, self._nbytes, self._n_elsewhere, len(self.not_kept))

    def _late(self, timeout_s: float) -> str:
        first = next(iter(self._missing.values()))
        return (
            f"{self._where}: {len(self._missing)} samples have not come in {timeout_s:g} s, among them sample "
            f"{first.sample} ({self._names[first.sample]}), planned from {LEVELS[first.planned]}"
        )
