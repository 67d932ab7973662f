"""One real rank among simulated ones: it performs its own program, and meets its peers when the simulation says so.

There are no other processes and no messages. A collective takes as long as simulated, from the moment when its last
member is ready. The rank itself may be that member. Its peers then come later to what follows, as
`simdist.traces.peers` says. For values, each peer holds what this rank holds.
"""

import threading
from collections import defaultdict, deque
from typing import final

import numpy as np
from numpy.typing import NDArray

from real.buffers.memory import Memory
from real.collectives.equals import combine_equal
from real.recording.timing import Sleeper, now_s
from simdist.errors import RunError
from simdist.plan import COLLECTIVES, Plan, ops
from simdist.plan.lanes import Lane
from simdist.plan.walk import walk
from simdist.traces.peers import PeerArrivals

_LOOK_S = 0.25  # interval at which a blocked thread checks whether the run has failed


@final
class SimulatedPeers:
    """Performs collectives with simulated peers, on a CPU.

    Args:
        plan: The plan.
        peers: The peers of the rank.
        failed: Set when the run has failed, which ends all waits.
    """

    def __init__(self, plan: Plan, peers: PeerArrivals, failed: threading.Event) -> None:
        self._peers = peers
        self._failed = failed
        self._sleep = Sleeper(failed)
        self._due = numbers_by_lane(plan)
        self._ends_s = np.full(len(peers) + 1, np.nan)
        self._changed = threading.Condition()

    def start(self) -> float:
        """Let the run begin now; return when that is, by this rank's clock."""
        self._ends_s[0] = now_s()
        return float(self._ends_s[0])

    def ends_s(self) -> NDArray[np.float64]:
        """Return when each collective ended for the peers, seconds since the start, float64 `[n]`."""
        return np.asarray(self._ends_s[1:] - self._ends_s[0])

    def perform(self, op: ops.Collective, memory: Memory) -> None:
        """Wait for the peers, and as long as the collective takes."""
        arrived_s = now_s()
        number = self._due[op.lane].popleft()
        combine_equal(op, memory, self._peers.rank)
        self._await_sources(number)
        end_s = max(arrived_s, self._peers.ready_s(number, self._ends_s)) + self._peers.seconds[number]
        with self._changed:
            self._ends_s[number + 1] = end_s
            self._changed.notify_all()
        self._sleep(end_s - now_s())

    def is_over(self) -> bool:
        """Refuse: late ranks are dropped by other ranks, which are simulated."""
        raise RunError("an all-reduce drops the late, which simulated peers cannot know")

    def _await_sources(self, number: int) -> None:
        """Wait until the collectives have ended, on other streams, that the peers depend on."""
        sources = self._peers.sources_of(number)
        with self._changed:
            while np.isnan(self._ends_s[sources]).any():
                if self._failed.is_set():
                    raise RunError("another stream has failed")
                self._changed.wait(_LOOK_S)


def numbers_by_lane(plan: Plan) -> dict[Lane, deque[int]]:
    """Return the numbers of collectives, as in `PeerArrivals`, by the lane that performs them, in order."""
    found: dict[Lane, deque[int]] = defaultdict(deque)
    for number, instance in enumerate(each for each in walk(plan) if isinstance(each.op, COLLECTIVES)):
        found[instance.lane].append(number)
    return found
