"""What the ranks of a node share, and how they wait for each other."""

import threading
import time

import numpy as np
from numpy.typing import NDArray

from real.data.segment import Segment
from real.processes.heartbeat import ranks_have
from simdist.caching import look_up
from simdist.errors import RunError
from simdist.plan import Plan

_LOOK_AGAIN_S = 0.01


class Together:
    """Lets the ranks of a node wait for each other, through memory that they share.

    Args:
        name: The same on all ranks of the node, and on no others.
        first_rank: Of the node.
        n_ranks: Of the node.
    """

    def __init__(self, name: str, *, first_rank: int, n_ranks: int) -> None:
        self._first_rank = first_rank
        self._segment = Segment(name, 8 * n_ranks, layout=f"{n_ranks} ranks that wait for each other")
        self._arrived: NDArray[np.int64] = self._segment.array(0, 8 * n_ranks).view(np.int64)

    def wait(self, rank: int, what: str, *, timeout_s: float, stop: threading.Event) -> None:
        """Wait until every rank of the node has come here as often as this one.

        Args:
            rank: This one.
            what: They have done, for the error.
            timeout_s: For the last one.
            stop: Ends the wait when set.

        Raises:
            RunError: Names the ranks that have not come; or the run has failed.
        """
        mine = rank - self._first_rank
        self._arrived[mine] += 1
        deadline_s = time.monotonic() + timeout_s
        while len(late := np.flatnonzero(self._arrived < self._arrived[mine])):
            if time.monotonic() > deadline_s:
                ranks = [self._first_rank + local for local in late.tolist()]
                raise RunError(
                    f"rank {rank}: {ranks_have(ranks)} not {what} within {timeout_s:g} s; see the output there"
                )
            if stop.wait(_LOOK_AGAIN_S):
                raise RunError(f"rank {rank}: the run has failed; {ranks_have([*late + self._first_rank])} not {what}")

    def unlink(self) -> None:
        """Remove the name, once all ranks have opened it."""
        self._segment.unlink()

    def close(self) -> None:
        """Leave."""
        del self._arrived
        self._segment.close()


def most_kept(plan: Plan, node: int) -> int:
    """Return how many samples a node's memory holds at most, by the plan."""
    dataset = plan.dataset
    assert dataset is not None
    if not any("memory" in op.keep for op in set(plan.loads())):
        return 0
    mine = slice(node * dataset.ranks_per_node, (node + 1) * dataset.ranks_per_node)
    held = most = 0
    for batch in look_up(plan):
        held += int(batch.keeps_memory[mine].sum())
        held -= sum(owner == node for owner, _ in batch.evicted_memory)
        most = max(most, held)
    return most
