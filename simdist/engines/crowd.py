"""Many flows that share resources max-min fairly, where hardly anything changes when one of them comes or goes.

`fairness` finds the rates of n flows anew in O(n) and more. Among hundreds of readers of one server that is wasteful:
when one ends, all others flow a little faster, but each is still held back by what held it back before. A *crowd* keeps
who is held back by what. By the theorem in `fairness`, feasible rates are max-min fair if and only if everybody has a
bottleneck: a full resource on which nobody is faster. There are two kinds of bottlenecks here:

    his own pace   the rate that a flow has alone on all of its resources, min over r of c[r] / a[r, i]
    a hub          a resource that several use and that is full: those it holds back are its *level*, and share a rate

    rate of hub h = (c[h] - what others take of h) / (sum of a[h, i] over its level)

Sums over every level and hub are kept, so a change costs O(resources of the flow) and one division for every level that
it touches; `level` tells how those who end are found without looking at all. What must hold, and who breaks it moves:

    a level's members are no slower alone than together         else: to his own pace        (heap of paces)
    those at their own pace are no faster than a full hub       else: to the hub's level     (heap of outsiders)
    no member of another level is faster on a full hub          else: to the hub's level
    no other hub is overfull                                    else: the hub gets a level
    a level has members                                         else: the hub has room, and loses it

When nobody has to move, the rates are max-min fair. Whether other hubs are overfull is asked rarely: an *audit* finds
by how much all levels may rise until one would be, and grants a part of it; until a level rises above its bound, or
members that come use up the room that is then left on a hub, nothing needs to be looked at.

Moves settle after a few; each rate of a level is a step of Newton's method towards where its hub is full. If ever they
do not, `fairness` says what the rates are.

Source:
    Bertsekas & Gallager, Data Networks, 2nd ed., section 6.5.2: max-min fairness and bottlenecks.
"""

import math
from heapq import heapify, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

from simdist.engines.fairness import max_min_rates
from simdist.engines.level import NO_HUB, Flow, Level, Member, first

__all__ = ["Crowd"]

_SAME = 1e-12  # rates and loads that differ by less are equal
_CLOSE = 1e-9  # likewise, where they come from `fairness`
_WORN = 2.0**-10  # a sum that subtraction has brought below this share of itself is summed anew
_MOST_GROWTH = 4.0  # of the levels, until the next audit
_REFRESH = 1024  # changes, at least, until all sums are summed anew
_SLACK_ULPS = 4  # flows due within so many units in the last place of the time end together


class Crowd:
    """Flows that share resources.

    Whoever joins or ends takes part in, or is missing from, the rates as soon as `settle` is called.

    Args:
        capacity_Bps: Bytes per second of every resource, `[n_resources]`; inf where unlimited.
        now_s: Now.
        patience: Moves of each member in one `settle`, after which `fairness` is asked.
    """

    def __init__(self, capacity_Bps: NDArray[np.float64], now_s: float, *, patience: int = 32) -> None:
        self._capacity_of: list[float] = capacity_Bps.tolist()
        self._patience = patience
        self._members: dict[Member, None] = {}
        self._user_of: dict[int, Member] = {}  # of resources that one member uses
        self._hub_of: dict[int, int] = {}  # of resources that several use, or did
        self._capacity_Bps: list[float] = []  # of hubs
        self._level_at: list[Level | None] = []
        self._room_Bps: list[float] = []  # of hubs, when all levels are at their bounds; inf where a level is
        self._own = Level(NO_HUB, 0, now_s, 1.0)
        self._levels = [self._own]
        self._changed: dict[Level, None] = {}
        self._is_tight = False
        self._is_worn = False
        self._n_changes = 0
        self._tickets = count(1)
        self.is_apart = False
        """Whether the flows were of several kinds that share nothing, when that was last looked at."""

    def __len__(self) -> int:
        return len(self._members)

    def rates_Bps(self) -> list[tuple[Flow, float]]:
        """Return every flow with its rate."""
        return [(member.flow, self._rate_Bps(member)) for member in self._members]

    def join(self, flow: Flow, now_s: float) -> None:
        """Take in a flow that has `left_nbytes` left."""
        member = Member(flow)
        uses, alone, most_nbytes = member.uses, member.alone, flow.most_nbytes
        pace_Bps, lowest_Bps, level = math.inf, math.inf, self._own
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
            there = self._level_at[hub]
            if there is not None and there.rate_Bps < lowest_Bps:
                lowest_Bps, level = there.rate_Bps, there
        member.pace_Bps = pace_Bps
        self._members[member] = None
        self._put(member, level if lowest_Bps < pace_Bps else self._own, flow.left_nbytes, now_s)
        self._n_changes += 1

    def end(self, now_s: float) -> list[Flow]:
        """Take out the flows that end now."""
        slack_s = _SLACK_ULPS * math.ulp(now_s)
        due = [level for level in self._levels if level.next_end_s <= now_s + slack_s]
        ended = [member for level in due for member in level.pop_ended(now_s, slack_s)]
        for member in ended:
            self._take(member, now_s)
            del self._members[member]
            for resource in member.alone:
                del self._user_of[resource]
        self._n_changes += len(ended)
        return [member.flow for member in ended]

    def leave(self, now_s: float) -> list[Flow]:
        """Return all flows, with the bytes they have left now. The crowd is of no use any more."""
        for member in self._members:
            member.flow.left_nbytes = max(self._left_nbytes(member, now_s), 0.0)
        return [member.flow for member in self._members]

    def settle(self, now_s: float) -> float:
        """Let all flow at max-min fair rates from now on; return when the next of them ends."""
        self._is_worn |= self._n_changes > _REFRESH + 4 * len(self._members)
        touched = {self._own: None}
        patience = self._patience * (len(self._members) + 1)
        while self._changed or self._is_tight or self._is_worn:
            patience -= 1
            if self._is_worn:
                self._refresh(now_s)
            elif patience < 0:
                self._ask_fairness(now_s)
                touched.update(dict.fromkeys(self._levels))
            elif self._changed:
                level = self._pop_lowest()
                if level.users[level.hub]:
                    touched[level] = None
                    patience -= self._fill(level, now_s)
                else:
                    self._close(level)
                    touched.pop(level, None)
            else:
                self._audit(now_s)
        for level in touched:
            level.find_next_end()
        return max(min([level.next_end_s for level in self._levels]), now_s)

    def _pop_lowest(self) -> Level:
        """Take out the lowest of the levels that have changed."""
        if len(self._changed) == 1:
            return self._changed.popitem()[0]
        level = min(self._changed, key=lambda each: each.rate_Bps)
        del self._changed[level]
        return level

    def _fill(self, level: Level, now_s: float) -> int:
        """Let a level rise, or fall, until its hub is full, and move who does not belong there then."""
        before_Bps = level.rate_Bps
        self._set_rate(level, now_s)
        moved = self._move_by_pace(level, now_s) or self._move_between_levels(level, now_s)
        if not moved and level.rate_Bps != before_Bps:
            for other in self._levels:
                if other is not level and other is not self._own and level.users[other.hub]:
                    self._changed[other] = None
        return moved

    def _set_rate(self, level: Level, now_s: float) -> None:
        """Share among the members of a level what the others leave of its hub."""
        hub, load = level.hub, level.load[level.hub]
        taken_Bps = 0.0
        for each in self._levels:
            if each is not level:
                taken_Bps += each.load[hub] * each.rate_Bps
        rate_Bps = (self._capacity_Bps[hub] - taken_Bps) / load
        level.set_rate(rate_Bps, now_s)
        level.most_load = max(level.most_load, load)
        self._is_worn |= load < level.most_load * _WORN
        self._is_tight |= rate_Bps > level.bound_Bps

    def _move_by_pace(self, level: Level, now_s: float) -> int:
        """Move members that are slower alone to their own pace, and those who are faster alone to the level."""
        n_moved, rate_Bps = 0, level.rate_Bps
        while (slowest := first(level.paces)) and slowest[0] < rate_Bps * (1 - _SAME):
            self._move(slowest[2], self._own, now_s)
            n_moved += 1
        while (fastest := first(level.outsiders)) and -fastest[0] > max(rate_Bps * (1 + _SAME), 0.0):
            self._move(fastest[2], level, now_s)
            n_moved += 1
        return n_moved

    def _move_between_levels(self, level: Level, now_s: float) -> int:
        """Move members of two levels to the lower one, where they use the hubs of both."""
        n_moved = 0
        for other in self._levels[1:]:
            if other is level:
                continue
            crosses, is_crossed = level.users[other.hub], other.users[level.hub]
            if crosses and level.rate_Bps > other.rate_Bps * (1 + _SAME):
                n_moved += self._move_all(level, other, now_s)
            elif is_crossed and (crosses or other.rate_Bps > level.rate_Bps * (1 + _SAME)):
                n_moved += self._move_all(other, level, now_s)
        return n_moved

    def _move_all(self, source: Level, target: Level, now_s: float) -> int:
        """Move the members of a level who use the hub of another one there."""
        moving = [member for member in self._users_of(target.hub) if member.level is source]
        for member in moving:
            self._move(member, target, now_s)
        return len(moving)

    def _users_of(self, hub: int) -> list[Member]:
        return [member for member in self._members if any(used == hub for used, _ in member.uses)]

    def _audit(self, now_s: float) -> None:
        """Give a level to the hub that is most overfull; if none is, let the levels rise until one would be."""
        left_Bps, level_Bps = self._loads()
        overfull = level_Bps - left_Bps > _SAME * np.array(self._capacity_Bps)
        if overfull.any():
            filled = np.where(overfull, (level_Bps - left_Bps) / np.array(self._capacity_Bps), 0.0)
            self._open(int(filled.argmax()), now_s)
        else:
            self._grant(left_Bps, level_Bps)

    def _loads(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what those at their own pace leave of every hub, inf where a level is, and what the levels take."""
        left_Bps = np.array(self._capacity_Bps) - np.array(self._own.load)
        level_Bps = np.zeros(len(left_Bps))
        for level in self._levels[1:]:
            level_Bps += level.rate_Bps * np.array(level.load)
            left_Bps[level.hub] = np.inf
        return left_Bps, level_Bps

    def _grant(self, left_Bps: NDArray[np.float64], level_Bps: NDArray[np.float64]) -> None:
        """Let all levels grow by half of what the hubs have room for."""
        self._is_tight = False
        grown = (level_Bps > 0) & (level_Bps * _MOST_GROWTH > left_Bps)
        may_grow = float((left_Bps[grown] / level_Bps[grown]).min(initial=_MOST_GROWTH))
        growth = 1 + max(may_grow - 1, 0.0) / 2
        self._room_Bps = (left_Bps + 2 * _SAME * np.array(self._capacity_Bps) - growth * level_Bps).tolist()
        for level in self._levels[1:]:
            level.bound_Bps = level.rate_Bps * growth

    def _open(self, hub: int, now_s: float) -> None:
        """Give a level to a hub that is overfull; the fastest there is the first to be held back."""
        level = Level(hub, len(self._capacity_Bps), now_s)
        self._levels.append(level)
        self._level_at[hub] = level
        self._room_Bps[hub] = math.inf
        users = self._users_of(hub)
        for member in users:
            if member.level is self._own:
                heappush(level.outsiders, (-member.pace_Bps, member.ticket, member))
        self._move(max(users, key=self._rate_Bps), level, now_s)

    def _close(self, level: Level) -> None:
        """Take its level from a hub."""
        self._levels.remove(level)
        self._level_at[level.hub] = None
        self._find_room(level.hub)

    def _find_room(self, hub: int) -> None:
        bound_Bps = sum(each.load[hub] * each.bound_Bps for each in self._levels)
        self._room_Bps[hub] = self._capacity_Bps[hub] * (1 + 2 * _SAME) - bound_Bps
        self._is_tight |= self._room_Bps[hub] < 0

    def _make_hub(self, resource: int) -> int:
        """Let a resource be a hub that one member has used so far; return the hub."""
        hub = self._hub_of[resource] = len(self._capacity_Bps)
        self._capacity_Bps.append(self._capacity_of[resource])
        self._level_at.append(None)
        self._room_Bps.append(0.0)
        for level in self._levels:
            level.load.append(0.0)
            level.users.append(0)
        member = self._user_of.pop(resource)
        weight = member.alone.pop(resource)
        member.uses.append((hub, weight))
        member.level.load[hub] = weight * self._scale(member)
        member.level.users[hub] = 1
        self._find_room(hub)
        return hub

    def _put(self, member: Member, level: Level, left_nbytes: float, now_s: float) -> None:
        """Let a member belong to a level."""
        member.level = level
        member.ticket = ticket = next(self._tickets)
        left = left_nbytes / self._scale(member)
        member.due = level.virtual + level.rate_Bps * (now_s - level.settled_s) + left
        heappush(level.ends, (member.due, ticket, member))
        if level is not self._own:
            heappush(level.paces, (member.pace_Bps, ticket, member))
        else:
            for other in self._levels:
                if other is not level and any(hub == other.hub for hub, _ in member.uses):
                    heappush(other.outsiders, (-member.pace_Bps, ticket, member))
        self._count(member, 1)

    def _take(self, member: Member, now_s: float) -> float:
        """Let a member belong to no level; return how many bytes it has left."""
        left_nbytes = self._left_nbytes(member, now_s)
        member.ticket = 0
        self._count(member, -1)
        return left_nbytes

    def _move(self, member: Member, level: Level, now_s: float) -> None:
        self._put(member, level, self._take(member, now_s), now_s)

    def _count(self, member: Member, sign: int) -> None:
        """Add what a member takes of its hubs, or subtract it."""
        level, level_at, room_Bps = member.level, self._level_at, self._room_Bps
        load, users = level.load, level.users
        scale = sign * member.pace_Bps if level is self._own else float(sign)
        bound = scale * level.bound_Bps
        for hub, weight in member.uses:
            n_users = users[hub] = users[hub] + sign
            load[hub] = load[hub] + weight * scale if n_users else 0.0
            room = room_Bps[hub] = room_Bps[hub] - weight * bound
            if room < 0:
                self._is_tight = True
            there = level_at[hub]
            if there is not None:
                self._changed[there] = None

    def _scale(self, member: Member) -> float:
        """Return the rate of a member for each unit of its level's."""
        return member.pace_Bps if member.level is self._own else 1.0

    def _rate_Bps(self, member: Member) -> float:
        return member.level.rate_Bps * self._scale(member)

    def _left_nbytes(self, member: Member, now_s: float) -> float:
        left = max(member.due - member.level.virtual_at(now_s), 0.0)
        return left * self._scale(member) if left else 0.0

    def _refresh(self, now_s: float) -> None:
        """Sum everything anew: what subtractions leave behind does not pile up, nor do entries that hold no more."""
        left = [(member, member.level, self._left_nbytes(member, now_s)) for member in self._members]
        for level in self._levels:
            level.empty(len(self._capacity_Bps), now_s)
        for member, level, left_nbytes in left:
            self._put(member, level, left_nbytes, now_s)
        self._n_changes, self._is_worn, self._is_tight = 0, False, True
        self._changed = dict.fromkeys(self._levels[1:])
        self.is_apart = self._falls_apart()

    def _falls_apart(self) -> bool:
        """Tell whether some members share nothing with others, not even through third ones."""
        waiting = [{hub for hub, _ in member.uses} for member in self._members]
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

    def _ask_fairness(self, now_s: float) -> None:
        """Let everybody belong where the rates of `fairness` say."""
        members, hubs, capacity_Bps = list(self._members), len(self._capacity_Bps), np.array(self._capacity_of)
        rates_Bps = max_min_rates([member.flow.stage for member in members], capacity_Bps).tolist()
        left_nbytes = [self._left_nbytes(member, now_s) for member in members]
        taken_Bps, fastest_Bps = [0.0] * hubs, [0.0] * hubs
        for member, rate_Bps in zip(members, rates_Bps, strict=True):
            for hub, weight in member.uses:
                taken_Bps[hub] += weight * rate_Bps
                fastest_Bps[hub] = max(fastest_Bps[hub], rate_Bps)
        self._own.empty(hubs, now_s)
        self._levels, self._level_at = [self._own], [None] * hubs
        for member, rate_Bps, each_nbytes in zip(members, rates_Bps, left_nbytes, strict=True):
            level = self._own
            if rate_Bps < member.pace_Bps * (1 - _SAME):
                used = [hub for hub, _ in member.uses]
                fair = [hub for hub in used if fastest_Bps[hub] <= rate_Bps * (1 + _CLOSE)] or used
                hub = max(fair, key=lambda hub: taken_Bps[hub] / self._capacity_Bps[hub])
                level = self._level_at[hub] or Level(hub, hubs, now_s, rate_Bps)
                if self._level_at[hub] is None:
                    self._level_at[hub] = level
                    self._levels.append(level)
            self._put(member, level, each_nbytes, now_s)
        for level in sorted(self._levels[1:], key=lambda each: each.rate_Bps):
            self._set_rate(level, now_s)
        self._find_outsiders()
        self._changed.clear()
        self._grant(*self._loads())

    def _find_outsiders(self) -> None:
        for level in self._levels[1:]:
            level.outsiders = [
                (-member.pace_Bps, member.ticket, member)
                for member in self._users_of(level.hub)
                if member.level is self._own
            ]
            heapify(level.outsiders)
