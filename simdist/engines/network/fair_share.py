"""The state of max-min fair sharing: which flows are held back by which full resource, and what that takes.

A flow goes at its own *pace*, the rate that it would have alone, or belongs to the *level* of a hub: a resource that
several use and that is full. Sums over every level and hub are kept: who comes, goes or moves changes those of his own
hubs only. Levels to be looked at then are noted in `changed` and `is_tight`; nothing here sets a rate, or decides who
has to move.

The members of a level all flow at its rate, which changes whenever somebody comes or goes. How far each has come since
it joined is the same for all, so one number tells: the virtual time, the integral of the rate. A member with b bytes
left joins at virtual time v and ends at v + b, however often the rate changes on the way; a heap knows who ends next.

Source:
    Parekh & Gallager, A Generalized Processor Sharing Approach to Flow Control in Integrated Services Networks: The
    Single-Node Case, IEEE/ACM Transactions on Networking 1(3), 1993: virtual time of generalized processor sharing.
"""

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TypeAlias

from simdist.cost.costs import Stage

NO_HUB = -1

#: Rates and loads that differ by less, relative to themselves, are equal.
SAME = 1e-12

_CLOSE = 1e-9  # likewise, rates that come from `max_min_rates`


class Flow:
    """A stage in flight.

    Args:
        stage: The stage that flows.
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
    """A flow that shares resources.

    Args:
        flow: The flow.
        uses: Pairs of a hub and the bytes on it for each byte of the flow.
        alone: Resources that no other flow uses, likewise.
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
        "paces",
        "rate_Bps",
        "settled_s",
        "unconstrained",
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
        self.unconstrained: Heap = []  # who uses the hub at his own pace, fastest first
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


class FairShareState:
    """Members, their levels, and the hubs that they share.

    Args:
        capacity_of: Bytes per second of every resource; inf where unlimited.
        now_s: Now.
    """

    __slots__ = (
        "_capacity_of",
        "_hub_of",
        "_room_Bps",
        "_tickets",
        "_user_of",
        "capacity_Bps",
        "changed",
        "is_tight",
        "level_at",
        "levels",
        "members",
        "own",
    )

    def __init__(self, capacity_of: list[float], now_s: float) -> None:
        self._capacity_of = capacity_of
        self._user_of: dict[int, Member] = {}  # of resources that one member uses
        self._hub_of: dict[int, int] = {}  # of resources that several use, or did
        self._room_Bps: list[float] = []  # of hubs, when all levels are at their bounds; inf where a level is
        self._tickets = count(1)
        self.members: dict[Member, None] = {}
        self.capacity_Bps: list[float] = []  # of hubs
        self.level_at: list[Level | None] = []  # hubs
        self.own = Level(NO_HUB, 0, now_s, 1.0)
        self.levels = [self.own]
        self.changed: dict[Level, None] = {}  # levels whose rates are to be recomputed
        self.is_tight = False  # a hub without a level may be overfull

    def admit(self, flow: Flow, now_s: float) -> None:
        """Take in a flow that has `left_nbytes` left."""
        member = Member(flow)
        uses, alone, most_nbytes = member.uses, member.alone, flow.most_nbytes
        pace_Bps, lowest_Bps, level = math.inf, math.inf, self.own
        for resource, nbytes in zip(flow.resources, flow.nbytes, strict=True):
            capacity_Bps = self._capacity_of[resource]
            if not nbytes or capacity_Bps == math.inf:
                continue
            weight = nbytes / most_nbytes
            alone_Bps = capacity_Bps / weight
            if alone_Bps < pace_Bps:
                pace_Bps = alone_Bps
            hub = self._hub_of.get(resource)
            if hub is None:
                if resource not in self._user_of:
                    self._user_of[resource] = member
                    alone[resource] = weight
                    continue
                hub = self._make_hub(resource)
            uses.append((hub, weight))
            there = self.level_at[hub]
            if there is not None and there.rate_Bps < lowest_Bps:
                lowest_Bps, level = there.rate_Bps, there
        member.pace_Bps = pace_Bps
        self.members[member] = None
        self.put(member, level if lowest_Bps < pace_Bps else self.own, flow.left_nbytes, now_s)

    def dismiss(self, member: Member, now_s: float) -> None:
        """Let a member go."""
        self._take(member, now_s)
        del self.members[member]
        for resource in member.alone:
            del self._user_of[resource]

    def rate_Bps(self, member: Member) -> float:
        """Return the rate of a member."""
        return member.level.rate_Bps * self._scale(member)

    def left_nbytes(self, member: Member, now_s: float) -> float:
        """Return the bytes that a member has left now."""
        left = max(member.due - member.level.virtual_at(now_s), 0.0)
        return left * self._scale(member) if left else 0.0

    def users_of(self, hub: int) -> list[Member]:
        """Return the members that use a hub."""
        return [member for member in self.members if any(used == hub for used, _ in member.uses)]

    def put(self, member: Member, level: Level, left_nbytes: float, now_s: float) -> None:
        """Let a member belong to a level."""
        member.level = level
        member.ticket = ticket = next(self._tickets)
        left = left_nbytes / self._scale(member)
        member.due = level.virtual + level.rate_Bps * (now_s - level.settled_s) + left
        heappush(level.ends, (member.due, ticket, member))
        if level is not self.own:
            heappush(level.paces, (member.pace_Bps, ticket, member))
        else:
            for hub, _ in member.uses:
                there = self.level_at[hub]
                if there is not None:
                    heappush(there.unconstrained, (-member.pace_Bps, ticket, member))
        self._count(member, 1)

    def _take(self, member: Member, now_s: float) -> float:
        """Let a member belong to no level; return how many bytes it has left."""
        left_nbytes = self.left_nbytes(member, now_s)
        member.ticket = 0
        self._count(member, -1)
        return left_nbytes

    def move(self, member: Member, level: Level, now_s: float) -> None:
        """Let a member belong to another level."""
        self.put(member, level, self._take(member, now_s), now_s)

    def open(self, hub: int, now_s: float) -> None:
        """Give a level to a hub that is overfull; the fastest there is the first to be held back."""
        level = Level(hub, len(self.capacity_Bps), now_s)
        self.levels.append(level)
        self.level_at[hub] = level
        self._room_Bps[hub] = math.inf
        users = self.users_of(hub)
        for member in users:
            if member.level is self.own:
                heappush(level.unconstrained, (-member.pace_Bps, member.ticket, member))
        self.move(max(users, key=self.rate_Bps), level, now_s)

    def close(self, level: Level) -> None:
        """Take its level from a hub."""
        self.levels.remove(level)
        self.level_at[level.hub] = None
        self._find_room(level.hub)

    def _make_hub(self, resource: int) -> int:
        """Let a resource be a hub that one member has used so far; return the hub."""
        hub = self._hub_of[resource] = len(self.capacity_Bps)
        self.capacity_Bps.append(self._capacity_of[resource])
        self.level_at.append(None)
        self._room_Bps.append(0.0)
        for level in self.levels:
            level.load.append(0.0)
            level.users.append(0)
        member = self._user_of.pop(resource)
        weight = member.alone.pop(resource)
        member.uses.append((hub, weight))
        member.level.load[hub] = weight * self._scale(member)
        member.level.users[hub] = 1
        self._find_room(hub)
        return hub

    def _find_room(self, hub: int) -> None:
        bound_Bps = sum(each.load[hub] * each.bound_Bps for each in self.levels)
        self._room_Bps[hub] = self.capacity_Bps[hub] * (1 + 2 * SAME) - bound_Bps
        self.is_tight |= self._room_Bps[hub] < 0

    def set_room(self, room_Bps: list[float]) -> None:
        """Set the room that every hub has when all levels are at their bounds; inf where a level is."""
        self._room_Bps = room_Bps
        self.is_tight = False

    def _count(self, member: Member, sign: int) -> None:
        """Add what a member takes of its hubs, or subtract it."""
        level, level_at, room_Bps = member.level, self.level_at, self._room_Bps
        load, users = level.load, level.users
        scale = sign * member.pace_Bps if level is self.own else float(sign)
        bound = scale * level.bound_Bps
        for hub, weight in member.uses:
            n_users = users[hub] = users[hub] + sign
            load[hub] = load[hub] + weight * scale if n_users else 0.0
            room = room_Bps[hub] = room_Bps[hub] - weight * bound
            if room < 0:
                self.is_tight = True
            there = level_at[hub]
            if there is not None:
                self.changed[there] = None

    def _scale(self, member: Member) -> float:
        """Return the rate of a member for each unit of its level's."""
        return member.pace_Bps if member.level is self.own else 1.0

    def recompute_sums(self, now_s: float) -> None:
        """Let everybody belong where he does, with new sums."""
        left = [(member, member.level, self.left_nbytes(member, now_s)) for member in self.members]
        for level in self.levels:
            level.empty(len(self.capacity_Bps), now_s)
        for member, level, left_nbytes in left:
            self.put(member, level, left_nbytes, now_s)
        self.changed = dict.fromkeys(self.levels[1:])
        self.is_tight = True

    def arrange(self, rates_Bps: list[float], now_s: float) -> None:
        """Let everybody belong where max-min fair rates say that he does."""
        members, hubs = list(self.members), len(self.capacity_Bps)
        left_nbytes = [self.left_nbytes(member, now_s) for member in members]
        held_back_by = self._held_back_by(rates_Bps)
        self.own.empty(hubs, now_s)
        self.levels, self.level_at = [self.own], [None] * hubs
        for member, rate_Bps, each_nbytes, hub in zip(members, rates_Bps, left_nbytes, held_back_by, strict=True):
            level = self.own if hub == NO_HUB else self.level_at[hub]
            if level is None:
                level = self.level_at[hub] = Level(hub, hubs, now_s, rate_Bps)
                self.levels.append(level)
            self.put(member, level, each_nbytes, now_s)
        self._find_unconstrained()

    def _held_back_by(self, rates_Bps: list[float]) -> list[int]:
        """Return the hub that is the bottleneck of every member, or `NO_HUB`, at max-min fair rates."""
        taken_Bps, fastest_Bps = [0.0] * len(self.capacity_Bps), [0.0] * len(self.capacity_Bps)
        for member, rate_Bps in zip(self.members, rates_Bps, strict=True):
            for hub, weight in member.uses:
                taken_Bps[hub] += weight * rate_Bps
                fastest_Bps[hub] = max(fastest_Bps[hub], rate_Bps)
        bottlenecks = []
        for member, rate_Bps in zip(self.members, rates_Bps, strict=True):
            if rate_Bps >= member.pace_Bps * (1 - SAME):
                bottlenecks.append(NO_HUB)
                continue
            used = [hub for hub, _ in member.uses]
            fair = [hub for hub in used if fastest_Bps[hub] <= rate_Bps * (1 + _CLOSE)] or used
            bottlenecks.append(max(fair, key=lambda hub: taken_Bps[hub] / self.capacity_Bps[hub]))
        return bottlenecks

    def _find_unconstrained(self) -> None:
        for level in self.levels[1:]:
            level.unconstrained = [
                (-member.pace_Bps, member.ticket, member)
                for member in self.users_of(level.hub)
                if member.level is self.own
            ]
            heapify(level.unconstrained)

    def falls_apart(self) -> bool:
        """Tell whether some members share nothing with others, not even through third ones."""
        waiting = [{hub for hub, _ in member.uses} for member in self.members]
        reached = set(waiting[0]) if waiting else set()
        while waiting:
            apart = []
            for hubs in waiting:
                if hubs.isdisjoint(reached):
                    apart.append(hubs)
                else:
                    reached |= hubs
            if len(apart) == len(waiting):
                return True
            waiting = apart
        return False
