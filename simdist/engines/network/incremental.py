"""Many flows that share resources max-min fairly, where hardly anything changes when one of them comes or goes.

`max_min_rates` recomputes the rates of n flows in O(n) and more. Among hundreds of readers of one server that is
wasteful: when one ends, all others flow a little faster, but each is still held back by what held it back before.
`IncrementalMaxMin` keeps who is held back by what. By the theorem in `max_min`, feasible rates are max-min fair if and
only if every flow has a bottleneck: a full resource on which no flow is faster. There are two kinds of them here:

    his own pace   the rate that a flow has alone on all of its resources, min over r of c[r] / a[r, i]
    a hub          a resource that several use and that is full: those it holds back are its *level*, and share a rate

    rate of hub h = (c[h] - what others take of h) / (sum of a[h, i] over its level)

Sums over every level and hub are kept in `fair_share`, so a change costs O(resources of the flow) and one division for
every level that it touches; its heaps tell who ends without looking at all.

Invariants; a member that breaks one of them moves:

    a level's members are no slower alone than together         else: to his own pace        (heap of paces)
    those at their own pace are no faster than a full hub       else: to the hub's level     (heap of unconstrained)
    no member of another level is faster on a full hub          else: to the hub's level
    no other hub is overfull                                    else: the hub gets a level
    a level has members                                         else: the hub has room, and loses it

A level is looked at when one of its members, or another flow on its hub, comes, goes or moves, and when the rate of
another level that has members on its hub changes, for whatever reason. When nothing is left to look at and none has
to move, every hub of a level is full, none is overfull, and every flow has a bottleneck: up to rounding (rates that
differ by a share of 1e-12 count as equal), the rates are max-min fair. Whether other hubs are overfull is asked rarely:
an *audit* finds by how much all levels may rise until one would be, and grants a part of it; until a level rises above
its bound, or members that come use up the room that is then left on a hub, nothing needs to be looked at.

That moves come to an end is not proved; in practice they do after a few, since each rate of a level is a step of
Newton's method towards where its hub is full. If they do not, `max_min_rates` says what the rates are.

Source:
    Bertsekas & Gallager, Data Networks, 2nd ed., section 6.5.2: max-min fairness and bottlenecks.
"""

import math

import numpy as np
from numpy.typing import NDArray

from simdist.engines.network.fair_share import SAME, FairShareState, Flow, Level, first
from simdist.engines.network.max_min import max_min_rates

_PRECISE = 2.0**-10  # a sum that subtraction has brought below this share of itself is summed again
_MOST_GROWTH = 4.0  # of the levels, until the next audit
_REFRESH = 1024  # changes, at least, until all sums are summed again
_SLACK_ULPS = 4  # flows due within so many units in the last place of the time end together


class IncrementalMaxMin:
    """Flows that share resources.

    Flows that join or end take part in, or are missing from, the rates as soon as `settle` is called.

    Args:
        capacity_Bps: Bytes per second of every resource, `[n_resources]`; inf where unlimited.
        now_s: Now.
        patience: Moves of each member in one `settle`, after which `max_min_rates` is asked.
    """

    def __init__(self, capacity_Bps: NDArray[np.float64], now_s: float, *, patience: int = 32) -> None:
        self._capacity_Bps = capacity_Bps
        self._patience = patience
        self._state = FairShareState(capacity_Bps.tolist(), now_s)
        self._lost_precision = False
        self._n_changes = 0
        self.is_apart = False
        """Whether the flows were of several kinds that share nothing, when that was last looked at."""

    def __len__(self) -> int:
        return len(self._state.members)

    def rates_Bps(self) -> list[tuple[Flow, float]]:
        """Return every flow with its rate."""
        return [(member.flow, self._state.rate_Bps(member)) for member in self._state.members]

    def join(self, flow: Flow, now_s: float) -> None:
        """Take in a flow that has `left_nbytes` left."""
        self._state.admit(flow, now_s)
        self._n_changes += 1

    def end(self, now_s: float) -> list[Flow]:
        """Take out the flows that end now."""
        slack_s = _SLACK_ULPS * math.ulp(now_s)
        due = [level for level in self._state.levels if level.next_end_s <= now_s + slack_s]
        ended = [member for level in due for member in level.pop_ended(now_s, slack_s)]
        for member in ended:
            self._state.dismiss(member, now_s)
        self._n_changes += len(ended)
        return [member.flow for member in ended]

    def leave(self, now_s: float) -> list[Flow]:
        """Return all flows, with the bytes they have left now. Nothing else may be asked of it afterwards."""
        for member in self._state.members:
            member.flow.left_nbytes = max(self._state.left_nbytes(member, now_s), 0.0)
        return [member.flow for member in self._state.members]

    def settle(self, now_s: float) -> float:
        """Let all flow at max-min fair rates from now on; return when the next of them ends."""
        state = self._state
        self._lost_precision |= self._n_changes > _REFRESH + 4 * len(state.members)
        touched = {state.own: None}
        patience = self._patience * (len(state.members) + 1)
        while state.changed or state.is_tight or self._lost_precision:
            patience -= 1
            if self._lost_precision:
                self._refresh(now_s)
            elif patience < 0:
                self._ask_fairness(now_s)
                touched.update(dict.fromkeys(state.levels))
            elif state.changed:
                level = self._pop_lowest()
                if level.users[level.hub]:
                    touched[level] = None
                    patience -= self._fill(level, now_s)
                else:
                    state.close(level)
                    touched.pop(level, None)
            else:
                self._audit(now_s)
        for level in touched:
            level.find_next_end()
        return max(min([level.next_end_s for level in state.levels]), now_s)

    def _pop_lowest(self) -> Level:
        """Take out the lowest of the levels that have changed."""
        if len(self._state.changed) == 1:
            return self._state.changed.popitem()[0]
        level = min(self._state.changed, key=lambda each: each.rate_Bps)
        del self._state.changed[level]
        return level

    def _fill(self, level: Level, now_s: float) -> int:
        """Let a level rise, or fall, until its hub is full, and move who does not belong there then."""
        before_Bps = level.rate_Bps
        self._set_rate(level, now_s)
        moved = self._move_by_pace(level, now_s) or self._move_between_levels(level, now_s)
        if level.rate_Bps != before_Bps:
            for other in self._state.levels:
                if other is not level and other is not self._state.own and level.users[other.hub]:
                    self._state.changed[other] = None
        return moved

    def _set_rate(self, level: Level, now_s: float) -> None:
        """Share among the members of a level what the others leave of its hub."""
        state, hub, load = self._state, level.hub, level.load[level.hub]
        taken_Bps = 0.0
        for each in state.levels:
            if each is not level:
                taken_Bps += each.load[hub] * each.rate_Bps
        rate_Bps = (state.capacity_Bps[hub] - taken_Bps) / load
        level.set_rate(rate_Bps, now_s)
        level.most_load = max(level.most_load, load)
        self._lost_precision |= load < level.most_load * _PRECISE
        state.is_tight |= rate_Bps > level.bound_Bps

    def _move_by_pace(self, level: Level, now_s: float) -> int:
        """Move members that are slower alone to their own pace, and those who are faster alone to the level."""
        n_moved, rate_Bps = 0, level.rate_Bps
        while (slowest := first(level.paces)) and slowest[0] < rate_Bps * (1 - SAME):
            self._state.move(slowest[2], self._state.own, now_s)
            n_moved += 1
        while (fastest := first(level.unconstrained)) and -fastest[0] > max(rate_Bps * (1 + SAME), 0.0):
            self._state.move(fastest[2], level, now_s)
            n_moved += 1
        return n_moved

    def _move_between_levels(self, level: Level, now_s: float) -> int:
        """Move members of two levels to the lower one, where they use the hubs of both."""
        n_moved = 0
        for other in self._state.levels[1:]:
            if other is level:
                continue
            crosses, is_crossed = level.users[other.hub], other.users[level.hub]
            if crosses and level.rate_Bps > other.rate_Bps * (1 + SAME):
                n_moved += self._move_all(level, other, now_s)
            elif is_crossed and (crosses or other.rate_Bps > level.rate_Bps * (1 + SAME)):
                n_moved += self._move_all(other, level, now_s)
        return n_moved

    def _move_all(self, source: Level, target: Level, now_s: float) -> int:
        """Move the members of a level who use the hub of another one there."""
        moving = [member for member in self._state.users_of(target.hub) if member.level is source]
        for member in moving:
            self._state.move(member, target, now_s)
        return len(moving)

    def _audit(self, now_s: float) -> None:
        """Give a level to the hub that is most overfull; if none is, let the levels rise until one would be."""
        left_Bps, level_Bps = self._loads()
        capacity_Bps = np.array(self._state.capacity_Bps)
        overfull = level_Bps - left_Bps > SAME * capacity_Bps
        if overfull.any():
            filled = np.where(overfull, (level_Bps - left_Bps) / capacity_Bps, 0.0)
            self._state.open(int(filled.argmax()), now_s)
        else:
            self._grant(left_Bps, level_Bps)

    def _loads(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what those at their own pace leave of every hub, inf where a level is, and what the levels take."""
        left_Bps = np.array(self._state.capacity_Bps) - np.array(self._state.own.load)
        level_Bps = np.zeros(len(left_Bps))
        for level in self._state.levels[1:]:
            level_Bps += level.rate_Bps * np.array(level.load)
            left_Bps[level.hub] = np.inf
        return left_Bps, level_Bps

    def _grant(self, left_Bps: NDArray[np.float64], level_Bps: NDArray[np.float64]) -> None:
        """Let all levels grow by half of what the hubs have room for."""
        grown = (level_Bps > 0) & (level_Bps * _MOST_GROWTH > left_Bps)
        may_grow = float((left_Bps[grown] / level_Bps[grown]).min(initial=_MOST_GROWTH))
        growth = 1 + max(may_grow - 1, 0.0) / 2
        slack_Bps = 2 * SAME * np.array(self._state.capacity_Bps)
        self._state.set_room((left_Bps + slack_Bps - growth * level_Bps).tolist())
        for level in self._state.levels[1:]:
            level.bound_Bps = level.rate_Bps * growth

    def _refresh(self, now_s: float) -> None:
        """Recompute all sums: what subtractions leave behind does not pile up, nor do entries that hold no more."""
        self._state.recompute_sums(now_s)
        self._n_changes, self._lost_precision = 0, False
        self.is_apart = self._state.falls_apart()

    def _ask_fairness(self, now_s: float) -> None:
        """Let everybody belong where the rates of `max_min_rates` say."""
        state = self._state
        rates_Bps = max_min_rates([member.flow.stage for member in state.members], self._capacity_Bps)
        state.arrange(rates_Bps.tolist(), now_s)
        for level in sorted(state.levels[1:], key=lambda each: each.rate_Bps):
            self._set_rate(level, now_s)
        state.changed.clear()
        self._grant(*self._loads())
