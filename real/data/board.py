"""How far the ranks of a node have come with their loads, in memory that they share.

A rank says two things of load k, in this order: that it *has read* all its samples, so that it needs nothing any more
that leaves the caches with load k; and that it *has kept* what it had to, so that others find it. Between the two it
may have to wait for room, which others make once all have read.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from real.processes.heartbeat import ranks_have
from simdist.errors import RunError

_LOOK_AGAIN_S = 0.002
_HAS_LEFT = -1


@dataclass(frozen=True, slots=True)
class Want:
    """Names a sample, and when it came into a node's memory.

    Args:
        sample: Which.
        local_rank: The rank of the node, from 0, that kept it.
        number: The load in which it did; -1 if that is not known: then it is not waited for.
    """

    sample: int
    local_rank: int = 0
    number: int = -1


@dataclass(frozen=True, slots=True)
class Board:
    """Tells the ranks of a node how far each of them is.

    Args:
        n_read: int64 `[ranks_per_node]`, loads that each rank has read.
        n_kept: int64 `[ranks_per_node]`, loads that each rank has also kept.
        n_staged: int64 `[ranks_per_node]`, how often each rank has staged its files.
        kept_on_disk: int64 `[n_samples]`, 1 + the last load that keeps a sample on the node's disk; 0 if none has yet;
            -1 if it has left since.
        locked: Excludes the other ranks.
    """

    n_read: NDArray[np.int64]
    n_kept: NDArray[np.int64]
    n_staged: NDArray[np.int64]
    kept_on_disk: NDArray[np.int64]
    locked: Callable[[], AbstractContextManager[None]]

    def slowest(self) -> int:
        """Return how many loads all ranks of the node have read."""
        return int(self.n_read.min())

    def keep_on_disk(self, sample: int, number: int) -> None:
        """Say, before a load keeps a file on disk, that it is to stay there."""
        with self.locked():
            self.kept_on_disk[sample] = max(int(self.kept_on_disk[sample]), number + 1)

    def leave_disk(self, sample: int, number: int, drop: Callable[[int], object]) -> None:
        """Drop a file, unless a load after `number` keeps it again, or another rank has dropped it."""
        if self.kept_on_disk[sample] == _HAS_LEFT:
            return
        with self.locked():
            if _HAS_LEFT < self.kept_on_disk[sample] <= number + 1:
                drop(sample)
                self.kept_on_disk[sample] = _HAS_LEFT


def wait_for(
    want: Want, is_there: Callable[[int], bool], board: Board, *, wait_s: float, stop: threading.Event
) -> bool:
    """Wait until a sample is in memory, or its rank has passed the load in which it kept it, or time is over.

    Args:
        want: The sample.
        is_there: Whether a sample is in this node's memory.
        board: Of this node.
        wait_s: At most.
        stop: Ends the wait when set.

    Returns:
        Whether it is there.
    """
    deadline_s = time.monotonic() + wait_s
    while not is_there(want.sample):
        if board.n_kept[want.local_rank] > want.number:
            return is_there(want.sample)  # it may have come between the two looks
        if time.monotonic() >= deadline_s or stop.wait(_LOOK_AGAIN_S):
            return False
    return True


def wait_until_all_staged(
    board: Board, local_rank: int, *, first_rank: int, timeout_s: float, stop: threading.Event
) -> None:
    """Note that a rank has staged its files, and wait until every rank of its node has done so as often.

    Args:
        board: Of this node.
        local_rank: This one.
        first_rank: Of the node.
        timeout_s: For the last one.
        stop: Ends the wait when set.

    Raises:
        RunError: Names the ranks that have not come; or the run has failed.
    """
    board.n_staged[local_rank] += 1
    deadline_s = time.monotonic() + timeout_s
    while len(late := np.flatnonzero(board.n_staged < board.n_staged[local_rank])):
        have_not = f"rank {first_rank + local_rank}: {ranks_have((late + first_rank).tolist())} not staged their files"
        if time.monotonic() > deadline_s:
            raise RunError(f"{have_not} within {timeout_s:g} s; see the output there")
        if stop.wait(_LOOK_AGAIN_S):
            raise RunError(f"{have_not}; the run has failed")
