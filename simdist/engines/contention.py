"""Transfers that share links, for the recurrence of `simdist.engines.recurrence`: when does each group end?

The recurrence goes through a plan in program order. It asks here for the ends of an operation's groups.

**A common start.** Groups that share links, directly or through others, and start together on idle links take seconds
that the fluid network gives once, in advance.

**Windows.** All other transfers go through the fluid network, as in the discrete-event engine. A *window* holds, for
every seed, the transfers since its links were last idle. An operation that starts before the window has ended joins the
window. Its transfers may slow down earlier ones, which then end later. So the recurrence goes back to the first
operation with another end and comes again, with other starts. This repeats until no end changes. Transfers change
nothing before they start, so each pass is right up to a later time than the pass before, and the last pass is exact.

A lane runs in order. So all later operations of the lane start after the first start of the present one, and nothing
changes before that. What has ended by then leaves the window, unless a transfer that it has met is still in flight.
Operations of several lanes may start in another order than that of the program. If they meet on a link, they are
refused. So are windows of many transfers: the discrete-event engine takes them faster.

**Components.** Links and ranks of a lane that transfers connect, directly or through others, are a component. Each
component has windows of its own.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.cost.costs import Costs, Shared, Stage, Transfer, used_by
from simdist.engines.recurrence import Times, in_columns
from simdist.errors import UnforeseenError
from simdist.plan import Op, op_text
from simdist.plan.ops import lane_of

_Numbers: TypeAlias = NDArray[np.int64]
_Cells: TypeAlias = NDArray[np.bool_]  # [n_components, n_seeds]

_MOST_FLIGHTS = 256  # transfers in the window of a seed
_MOST_PASSES = 1000
_FEW_GROUPS = 64  # of an operation in a component: up to here, their transfers are hardly too many


class SharedLinks:
    """The links that several operations or groups may want, and who uses them.

    Args:
        costs: The price list, or one for each seed. A link counts as shared if it is in one of them.
        world_size: Ranks.

    Attributes:
        uses: The links of each operation that may share some.
        n_components: Number of components.
        has_several_lanes: Whether operations of several lanes use a component.
        is_certain: Whether all of the plan's transfers can be computed, whatever their times.
        most_groups: The most groups of an operation that use one component.
    """

    def __init__(self, costs: Sequence[Costs], world_size: int) -> None:
        self._costs = costs
        contested = frozenset[Op]().union(*(each.contested for each in costs))
        by_price: dict[tuple[object, ...], _Use] = {}
        self.uses: dict[Op, _Use] = {}
        for op in (each for each in costs[0].of if each in contested):
            key = lane_of(op), *(id(each.of[op]) for each in costs)
            if key not in by_price:
                by_price[key] = _Use(op, costs, world_size)
            self.uses[op] = by_price[key]
        self._distinct = list(by_price.values())
        self.n_components = _connect(self._distinct, len(costs[0].capacity_Bps), world_size)
        lanes = {(number, lane_of(use.op)) for use in self._distinct for number in use.components.tolist()}
        self.has_several_lanes = len(lanes) > len({number for number, _ in lanes})
        self.most_groups = max(
            (int(np.bincount(use.component[use.has_links]).max()) for use in self._distinct if use.has_links.any()),
            default=0,
        )
        self.is_certain = not self.has_several_lanes and self.most_groups <= _FEW_GROUPS
        self._networks: dict[tuple[int, int], _Network] = {}  # by price list and component

    def network(self, component: int, seed: int) -> "_Network":
        """Return the links of a component, at the prices of a seed."""
        number = seed if len(self._costs) > 1 else 0
        if (number, component) not in self._networks:
            self._networks[number, component] = _Network(self._costs[number], self._distinct, component)
        return self._networks[number, component]


class Contention:
    """The transfers in flight on links that several operations or groups may want.

    Args:
        links: The links.
        n_seeds: Seeds.
        may_go_back: Whether the recurrence can go back. If not, operations that meet are refused.
    """

    def __init__(self, links: SharedLinks, n_seeds: int, *, may_go_back: bool = True) -> None:
        self._links = links
        self._may_go_back = may_go_back
        self.uses = links.uses
        self._busy_s = np.zeros((links.n_components, n_seeds))  # when the transfers that have left the window ended
        self._window: dict[int, _Entry] = {}  # by instance, in program order
        self._is_stale = np.zeros(
            (links.n_components, n_seeds), dtype=bool
        )  # whether the ends of the window are unknown
        self._is_coming_again = False
        self._n_passes = 0

    def of(self, op: Op) -> "_OfGroups":
        """Return what tells the ends of an operation's groups."""
        return _OfGroups(self, op)

    def take(self, op: Op, step: int, start_s: Times, end_s: Times) -> None:
        """Let all groups of an operation use their links from a start to an end, `[1, n]`."""
        components = self.uses[op].components
        self._refuse_busy(op, step, (start_s < self._busy_s[components]).any())
        self._busy_s[components] = np.maximum(self._busy_s[components], end_s)

    def leave(self, until_s: Times) -> bool:
        """See `_Sharing`."""
        last_s = self._last_s()
        if self._is_coming_again or (last_s > until_s).any():
            return False
        self._busy_s = np.maximum(self._busy_s, last_s)
        self._window.clear()
        return True

    def ends(self, op: Op, index: int, step: int, start_s: Times, end_s: Times) -> tuple[Times | None, int]:
        """See `_Sharing`."""
        entry = self._window.get(index)
        if entry is None:
            entry = self._enter(op, index, step, start_s, end_s)
        elif not np.array_equal(start_s, entry.start_s):
            self._refuse_busy(op, step, not self._may_go_back)
            has_moved = start_s != entry.start_s
            self._is_stale |= entry.use.in_components(has_moved, len(self._busy_s))
            entry.end_s = np.where(has_moved, entry.end_s + (start_s - entry.start_s), entry.end_s)
            entry.start_s = start_s
        first = next(iter(self._window))
        if index != next(reversed(self._window)):
            return entry.end_s, first
        self._is_coming_again = False
        if self._is_stale.any():
            changed = self._compute(op, step)
            self._is_stale[:] = False
            self._is_coming_again = changed < index
            if self._is_coming_again:
                self._n_passes += 1
                if self._n_passes > _MOST_PASSES:
                    raise UnforeseenError(f"{_where(op, step)}: the sharing of links does not settle")
                return None, changed
        return entry.end_s, first

    def _enter(self, op: Op, index: int, step: int, start_s: Times, end_s: Times) -> "_Entry":
        """Let what is over leave the window, and a new instance join it."""
        use = self.uses[op]
        first_s = use.first_of_components(start_s, len(self._busy_s))
        self._is_stale = self._leave(first_s)
        self._refuse_busy(op, step, (first_s < self._busy_s).any())
        if self._is_stale.any():
            others = {lane_of(each.op) for each in self._window.values() if each.is_open.any()}
            self._refuse_busy(op, step, others != {lane_of(op)} or not self._may_go_back)
        is_open = np.repeat(use.has_links[:, np.newaxis], start_s.shape[1], axis=1)
        entry = _Entry(op, use, start_s, end_s, is_open)
        self._window[index] = entry
        is_apart = start_s != start_s[use.leader]
        if is_apart.any():
            self._is_stale |= use.in_components(is_apart, len(self._busy_s))
        self._n_passes = 0
        return entry

    def _refuse_busy(self, op: Op, step: int, is_busy: bool | np.bool_) -> None:
        _check_idle(op, step, is_busy)

    def _leave(self, until_s: Times) -> _Cells:
        """Let transfers leave that nothing after a time can change, `[n_components, n_seeds]`; return where some stay.

        Where no transfer is in flight at that time, all leave. The time is infinite for links of other lanes.
        """
        last_s = self._last_s()
        stays = last_s > until_s
        if not stays.any():
            self._busy_s = np.maximum(self._busy_s, last_s)
            self._window.clear()
            return stays
        self._busy_s = np.maximum(self._busy_s, np.where(stays, 0.0, last_s))
        for entry in self._window.values():
            entry.is_open &= stays[entry.use.component]
        for component, seed in np.argwhere(stays).tolist():
            self._leave_before_gap(component, seed, until_s[component, seed])
        while self._window and not next(iter(self._window.values())).is_open.any():
            del self._window[next(iter(self._window))]
        return stays

    def _last_s(self) -> Times:
        """Return the last end in the window, `[n_components, n_seeds]`."""
        last_s = np.zeros_like(self._busy_s)
        for entry in self._window.values():
            last_s = np.maximum(last_s, entry.use.last_of_components(entry.end_s, len(last_s)))
        return last_s

    def _leave_before_gap(self, component: int, seed: int, until_s: float) -> None:
        """Let transfers leave that ended before a moment without any in flight, at or before a time."""
        places = list(self._open(component, seed))
        start_s = np.concatenate([entry.start_s[groups, seed] for _, entry, groups in places])
        end_s = np.concatenate([entry.end_s[groups, seed] for _, entry, groups in places])
        order = np.argsort(start_s, kind="stable")
        ended_s = np.maximum.accumulate(end_s[order])
        n = int(np.searchsorted(ended_s, until_s, side="right"))  # ended by then
        gaps = np.flatnonzero(start_s[order][1 : n + 1] >= ended_s[:-1][:n])
        if not len(gaps):
            return
        last = int(gaps[-1])
        self._busy_s[component, seed] = ended_s[last]
        leaves = np.zeros(len(order), dtype=bool)
        leaves[order[: last + 1]] = True
        first = 0
        for _, entry, groups in places:
            entry.is_open[groups[leaves[first : first + len(groups)]], seed] = False
            first += len(groups)

    def _open(self, component: int, seed: int) -> "Iterator[tuple[int, _Entry, _Numbers]]":
        """Yield the instances with transfers in the window, and their groups."""
        for index, entry in self._window.items():
            yield index, entry, np.flatnonzero(entry.is_open[:, seed] & (entry.use.component == component))

    def _flights(self, component: int, seed: int) -> "Iterator[_Flight]":
        for index, entry, groups in self._open(component, seed):
            for group in groups.tolist():
                yield _Flight(index, entry, group, float(entry.start_s[group, seed]), float(entry.end_s[group, seed]))

    def _compute(self, op: Op, step: int) -> int:
        """Compute the ends of the window where they are unknown. Return the first instance with another end."""
        changed = next(reversed(self._window))
        for entry in self._window.values():
            entry.end_s = entry.end_s.copy()
        for component, seed in np.argwhere(self._is_stale).tolist():
            flights = list(self._flights(component, seed))
            _check_flights(op, step, len(flights))
            ends_s = self._links.network(component, seed).ends_s(flights)
            for flight, end_s in zip(flights, ends_s, strict=True):
                if end_s != flight.end_s:
                    flight.entry.end_s[flight.group, seed] = end_s
                    changed = min(changed, flight.index)
        return changed


class MeetingEstimate:
    """Finds where operations of several lanes meet, or many transfers, as if no transfer slowed down another."""

    def __init__(self, links: SharedLinks, n_seeds: int, *, may_go_back: bool) -> None:
        self.uses = links.uses
        self._may_go_back = may_go_back
        self._counts = links.most_groups > _FEW_GROUPS
        self._n_components = links.n_components
        lanes = dict.fromkeys(lane_of(op) for op in self.uses)
        self._number_of = {lane: number for number, lane in enumerate(lanes)}
        self._last_s = np.zeros((len(lanes), links.n_components, n_seeds))  # ends of the transfers so far

    def of(self, op: Op) -> "_EstimateOf":
        """Return what tells the ends of an operation's groups."""
        return _EstimateOf(self, op, self.uses[op])

    def add(self, op: Op, step: int, first_s: Times, last_s: Times, components: _Numbers | slice) -> None:
        """Take the first start and the last end of an operation in each component, `[n_components, n]`."""
        lane = self._number_of[lane_of(op)]
        others_s = np.delete(self._last_s, lane, axis=0) if self._may_go_back else self._last_s
        _check_idle(op, step, (first_s < others_s[:, components]).any())
        of_lane = self._last_s[lane]
        of_lane[components] = np.maximum(of_lane[components], last_s)

    def add_groups(self, op: Op, use: "_Use", step: int, start_s: Times, end_s: Times) -> None:
        """Take the starts and ends of the groups of an operation, `[n_groups, n]`."""
        n = self._n_components
        first_s = use.first_of_components(start_s, n)
        if self._counts:
            overlaps = use.in_components(start_s != start_s[use.leader], n)
            overlaps |= first_s < self._last_s[self._number_of[lane_of(op)]]
            n_groups = np.bincount(use.component[use.has_links], minlength=n)[:, np.newaxis]
            _check_flights(op, step, int((overlaps * n_groups).max()) + 1)
        self.add(op, step, first_s, use.last_of_components(end_s, n), slice(None))


@dataclass(frozen=True, slots=True)
class _EstimateOf:
    """Tells the ends of an operation's groups, or of one that stands for all, as an estimate."""

    estimate: MeetingEstimate
    op: Op
    use: "_Use"
    is_of_one: bool = False

    def ends(self, index: int, step: int, start_s: Times, end_s: Times) -> tuple[Times | None, int]:
        """See `_Sharing`."""
        if self.is_of_one:
            self.estimate.add(self.op, step, start_s, end_s, self.use.components)
        else:
            self.estimate.add_groups(self.op, self.use, step, start_s, end_s)
        return end_s, index + 1

    def leave(self, until_s: Times) -> bool:
        """Return that no end can change."""
        return True

    def of_one_rank(self) -> "_EstimateOf":
        """See `_Sharing`."""
        return _EstimateOf(self.estimate, self.op, self.use, is_of_one=True)


def _check_idle(op: Op, step: int, is_busy: bool | np.bool_) -> None:
    """Refuse an operation if another may still use its links."""
    if is_busy:
        raise UnforeseenError(
            f"{_where(op, step)}: another operation may still use a link that it needs; the fast engine shares links "
            f"only between operations of one stream"
        )


def _check_flights(op: Op, step: int, n_flights: int) -> None:
    if n_flights > _MOST_FLIGHTS:
        raise UnforeseenError(f"{_where(op, step)}: {n_flights} transfers share links")


def _where(op: Op, step: int) -> str:
    return f"{op_text(op)} at step {step}"


@dataclass(slots=True)
class _Entry:
    """An instance in the window.

    Args:
        op: Its operation.
        use: The links that it uses.
        start_s: Of each group, `[n_groups, n]`, in the latest pass.
        end_s: Likewise.
        is_open: Whether the transfer of a group may still change, or change others, `[n_groups, n]`.
    """

    op: Op
    use: "_Use"
    start_s: Times
    end_s: Times
    is_open: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Flight:
    """A transfer in a window."""

    index: int
    entry: _Entry
    group: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class _OfGroups:
    """Tells the ends of an operation's groups."""

    contention: Contention
    op: Op

    def ends(self, index: int, step: int, start_s: Times, end_s: Times) -> tuple[Times | None, int]:
        """See `_Sharing`."""
        return self.contention.ends(self.op, index, step, start_s, end_s)

    def leave(self, until_s: Times) -> bool:
        """See `_Sharing`."""
        return self.contention.leave(until_s)

    def of_one_rank(self) -> "_OfOne":
        """See `_Sharing`."""
        return _OfOne(self.contention, self.op)


@dataclass(frozen=True, slots=True)
class _OfOne:
    """Tells the ends of an operation whose groups all start and end together."""

    contention: Contention
    op: Op

    def ends(self, index: int, step: int, start_s: Times, end_s: Times) -> tuple[Times | None, int]:
        """See `_Sharing`."""
        self.contention.take(self.op, step, start_s, end_s)
        return end_s, index + 1

    def leave(self, until_s: Times) -> bool:
        """Return that no end can change."""
        return True

    def of_one_rank(self) -> "_OfOne":
        """Return this one."""
        return self


class _Use:
    """The links that the groups of an operation use.

    Attributes:
        op: The operation, or one of several with this price.
        seconds: Of each group if all start together, `[n_groups]`, or with price lists `[n_groups, n]`.
        leader: Per group, the first of the groups that share links, directly or through others.
        has_links: Whether a group uses any, `[n_groups]`.
        component: Of each group. `_connect` finds it.
        components: Those that have links.
    """

    def __init__(self, op: Op, costs: Sequence[Costs], world_size: int) -> None:
        from simdist.engines.network.fluid import common_start_s

        self.op = op
        of_op = [each.of[op] for each in costs]
        shared = [cost for cost in of_op if isinstance(cost, Shared)]
        n_links = len(costs[0].capacity_Bps)
        keys = [np.empty(0, dtype=np.int64)]
        for cost in shared:
            keys += [(groups[:, np.newaxis] * n_links + used).ravel() for groups, _, _, used in used_by(cost.transfers)]
        self.groups, self.links = np.divmod(np.unique(np.concatenate(keys)), n_links)
        self.members = np.array(shared[0].group.members(world_size))
        n_groups = len(self.members)
        self.leader = _lowest(self.groups, self.links, n_groups, n_links)
        self.has_links = np.bincount(self.groups, minlength=n_groups) > 0
        self.component = np.zeros(n_groups, dtype=np.int64)
        self.components = np.zeros(0, dtype=np.int64)
        self._order = self._firsts = self._present = self.component
        seconds = (common_start_s(cost.transfers, its.capacity_Bps) for cost, its in zip(shared, costs, strict=True))
        self.seconds = in_columns(list(seconds))

    def belong_to(self, component: _Numbers) -> None:
        """Set the component of each group."""
        self.component = component
        self.components = np.unique(component[self.has_links])
        self._order = np.argsort(component, kind="stable")
        self._present, self._firsts = np.unique(component[self._order], return_index=True)

    def first_of_components(self, start_s: Times, n_components: int) -> Times:
        """Return the first start in each component, `[n_components, n]`; inf without any."""
        if n_components == 1:
            return np.asarray(start_s.min(axis=0, keepdims=True))
        found = np.full((n_components, start_s.shape[1]), np.inf)
        found[self._present] = np.minimum.reduceat(start_s[self._order], self._firsts, axis=0)
        return found

    def last_of_components(self, end_s: Times, n_components: int) -> Times:
        """Return the last end in each component, `[n_components, n]`; 0 without any."""
        if n_components == 1:
            return np.asarray(end_s.max(axis=0, keepdims=True))
        found = np.zeros((n_components, end_s.shape[1]))
        found[self._present] = np.maximum.reduceat(end_s[self._order], self._firsts, axis=0)
        return found

    def in_components(self, of_groups: NDArray[np.bool_], n_components: int) -> _Cells:
        """Return in which components something is true of a group, given that of groups `[n_groups, n]`."""
        found = np.zeros((n_components, of_groups.shape[1]), dtype=bool)
        found[self._present] = np.logical_or.reduceat(of_groups[self._order], self._firsts, axis=0)
        return found


def _lowest(ones: _Numbers, others: _Numbers, n_ones: int, n_others: int) -> _Numbers:
    """Return, for each of some, the lowest number of those that pairs connect it with, directly or through others."""
    lowest = np.arange(n_ones)
    while True:
        of_others = np.full(n_others, n_ones)
        np.minimum.at(of_others, others, lowest[ones])
        lower = lowest.copy()
        np.minimum.at(lower, ones, of_others[others])
        if (lower == lowest).all():
            return lowest
        lowest = lower


def _connect(uses: Sequence[_Use], n_links: int, world_size: int) -> int:
    """Find the component of every group. Return the number of components."""
    lanes = list(dict.fromkeys(lane_of(use.op) for use in uses))
    ones = [np.zeros(0, dtype=np.int64)]
    others = [np.zeros(0, dtype=np.int64)]
    n_groups = 0
    for use in uses:
        first_rank = n_links + lanes.index(lane_of(use.op)) * world_size
        numbers = n_groups + np.arange(len(use.members))
        ones += [n_groups + use.groups, np.repeat(numbers, use.members.shape[1])]
        others += [use.links, first_rank + use.members.ravel()]
        n_groups += len(use.members)
    lowest = _lowest(np.concatenate(ones), np.concatenate(others), n_groups, n_links + len(lanes) * world_size)
    distinct, component = np.unique(lowest, return_inverse=True)
    first = 0
    for use in uses:
        use.belong_to(component[first : first + len(use.members)])
        first += len(use.members)
    return len(distinct)


class _Network:
    """The links of a component, for transfers with given starts. Links that always carry the same bytes are one."""

    def __init__(self, costs: Costs, uses: Sequence[_Use], component: int) -> None:
        from simdist.engines.network.flows import Flows

        bytes_on: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)  # link -> stage, its bytes
        stages: list[tuple[_Use, int, int, float]] = []  # use, group, place, latency
        for use in uses:
            cost = costs.of[use.op]
            assert isinstance(cost, Shared)
            for groups, place, stage, links in used_by(cost.transfers):
                nbytes = stage.nbytes.tolist()
                for group, of_group in zip(groups.tolist(), links.tolist(), strict=True):
                    if use.component[group] == component:
                        for link, amount in zip(of_group, nbytes, strict=True):
                            bytes_on[link].append((len(stages), amount))
                        stages.append((use, group, place, stage.latency_s))
        narrowest: dict[tuple[tuple[int, float], ...], float] = {}
        for link, carried in bytes_on.items():
            key = tuple(carried)
            narrowest[key] = min(narrowest.get(key, np.inf), float(costs.capacity_Bps[link]))
        self._capacity_Bps = np.array(list(narrowest.values()))
        self._flows = Flows(self._capacity_Bps.tolist(), patience=sys.maxsize)  # too few to compile functions for
        used: list[list[tuple[int, float]]] = [[] for _ in stages]
        for number, key in enumerate(narrowest):
            for at, amount in key:
                used[at].append((number, amount))
        of_groups: defaultdict[tuple[_Use, int], dict[int, Stage]] = defaultdict(dict)
        for (use, group, place, latency_s), of_stage in zip(stages, used, strict=True):
            links = np.array([link for link, _ in of_stage], dtype=np.int64)
            amounts = np.array([amount for _, amount in of_stage])
            of_groups[use, group][place] = Stage(latency_s, links, amounts)
        self._transfers = {
            key: Transfer(tuple(of_places[place] for place in sorted(of_places)))
            for key, of_places in of_groups.items()
        }

    def ends_s(self, flights: Sequence[_Flight]) -> list[float]:
        """Return when transfers end that have these links for themselves."""
        from simdist.engines.network.fluid import FluidNetwork, Timeline

        timeline = Timeline()
        network = FluidNetwork(timeline, self._capacity_Bps, self._flows)
        found = [float("nan")] * len(flights)

        def record(number: int) -> None:
            found[number] = timeline.now

        for number, flight in enumerate(flights):
            transfer = self._transfers[flight.entry.use, flight.group]
            network.fly(transfer, partial(record, number), start_s=flight.start_s)
        timeline.run()
        return found
