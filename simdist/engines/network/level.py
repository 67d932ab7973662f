"""Flows that are equally fast, in virtual time.

The members of a level all flow at its rate, which changes whenever somebody comes or goes. How far each has come since
it joined is the same for all, so one number tells: the virtual time, the integral of the rate. A member with b bytes
left joins at virtual time v and ends at v + b, however often the rate changes on the way; a heap knows who ends next.

Source:
    Parekh & Gallager, A Generalized Processor Sharing Approach to Flow Control in Integrated Services Networks: The
    Single-Node Case, IEEE/ACM Transactions on Networking 1(3), 1993: virtual time of generalized processor sharing.
"""

import math
from collections.abc import Callable
from heapq import heappop
from typing import TypeAlias

from simdist.cost import Stage

NO_HUB = -1


class Flow:
    """A stage in flight.

    Args:
        stage: What flows.
        then: Called when it has ended.
    """

    __slots__ = ("left_nbytes", "most_nbytes", "nbytes", "rate_Bps", "resources", "stage", "then")

    def __init__(self, stage: Stage, then: Callable[[], None]) -> None:
        self.stage = stage
        self.then = then
        self.resources: list[int] = stage.resources.tolist()
        self.nbytes: list[float] = stage.nbytes.tolist()
        self.most_nbytes = self.left_nbytes = max(self.nbytes, default=0.0)
        self.rate_Bps = 0.0


class Member:
    """A flow in a crowd.

    Args:
        flow: The flow.
        uses: Pairs of a hub and the bytes on it for each byte of the flow.
        alone: Resources that nobody else in the crowd uses, likewise.
        pace_Bps: Its rate, if it were alone on all of its resources.
    """

    __slots__ = ("alone", "due", "flow", "level", "pace_Bps", "ticket", "uses")

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.uses: list[tuple[int, float]] = []
        self.alone: dict[int, float] = {}
        self.pace_Bps = math.inf
        self.level: Level
        self.due = 0.0
        self.ticket = 0


Heap: TypeAlias = list[tuple[float, int, Member]]  # a key, and the ticket that the member had when it was put there


class Level:
    """Members that flow at one rate, because a hub that they all use is full.

    Those who flow at their own pace form a level too: its hub is `NO_HUB`, its rate is 1, so that its virtual time is
    time, and what they have left counts in seconds.

    Args:
        hub: The hub, or `NO_HUB`.
        n_hubs: How many hubs there are.
        now_s: Now.
        rate_Bps: The rate of all members.
    """

    __slots__ = (
        "bound_Bps",
        "ends",
        "hub",
        "load",
        "most_load",
        "next_end_s",
        "outsiders",
        "paces",
        "rate_Bps",
        "settled_s",
        "users",
        "virtual",
    )

    def __init__(self, hub: int, n_hubs: int, now_s: float, rate_Bps: float = 0.0) -> None:
        self.hub = hub
        self.rate_Bps = rate_Bps
        self.bound_Bps = rate_Bps
        self.next_end_s = math.inf
        self.empty(n_hubs, now_s)

    def empty(self, n_hubs: int, now_s: float) -> None:
        """Forget all members; the rate stays as it is."""
        self.load = [0.0] * n_hubs  # of every hub, for each byte per second of the rate
        self.users = [0] * n_hubs
        self.most_load = 0.0
        self.ends: Heap = []  # by virtual time
        self.paces: Heap = []  # members by their own pace, slowest first
        self.outsiders: Heap = []  # who uses the hub at his own pace, fastest first
        self.virtual, self.settled_s = 0.0, now_s

    def virtual_at(self, now_s: float) -> float:
        """Return the virtual time."""
        return self.virtual + self.rate_Bps * (now_s - self.settled_s)

    def set_rate(self, rate_Bps: float, now_s: float) -> None:
        """Let the members flow at another rate from now on."""
        self.virtual, self.settled_s = self.virtual_at(now_s), now_s
        self.rate_Bps = rate_Bps

    def find_next_end(self) -> None:
        """Find out when the next member ends if the rate stays what it is."""
        next_due = first(self.ends)
        if next_due is None:
            self.next_end_s = math.inf
        else:
            self.next_end_s = self.settled_s + max(next_due[0] - self.virtual, 0.0) / self.rate_Bps

    def pop_ended(self, now_s: float, slack_s: float) -> list[Member]:
        """Take out the member that ends next, and those who end at the same time, up to rounding."""
        ended: list[Member] = []
        latest = self.virtual_at(now_s) + self.rate_Bps * slack_s
        while (due := first(self.ends)) and (not ended or due[0] <= latest):
            ended.append(heappop(self.ends)[2])
        return ended


def first(heap: Heap) -> tuple[float, int, Member] | None:
    """Return the first entry of a heap that still holds; members that were put elsewhere since are dropped."""
    while heap:
        if heap[0][1] == heap[0][2].ticket:
            return heap[0]
        heappop(heap)
    return None
