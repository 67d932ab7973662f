"""The peers of one rank in a simulation: what the rank has to know of them to meet them, and what it made of them.

Each instance of each peer has the longest paths to its end, from the start of the run and from each collective of the
rank. Their lengths follow the rules of `simdist.engines.recurrence`, with the durations of a trace. A path ends at the
next collective that the peer shares with the rank.

**Exact**: whatever the rank does, its peers do what the engines would let them do, as far as durations do not depend on
when operations begin.

**Approximate**:

* Durations stay those of the simulation where they depend on time: transfers that share links, members of a `chunkwise`
  ring that begin on their own, ticks, links that change.
* A peer that computes past more than `MOST_SOURCES` collectives of the rank without waiting for any of them. The oldest
  is then taken to end as long before the next one as simulated.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from simdist.engines.replay import Timing, timing
from simdist.errors import TraceError
from simdist.plan import COLLECTIVES, Collective, Instance, Plan
from simdist.plan.group import Group
from simdist.plan.lanes import Lane
from simdist.plan.walk import drops_late, walk
from simdist.traces.peers import PeerArrivals
from simdist.traces.trace import Trace

MOST_SOURCES = 64  # collectives of the rank that an instance of a peer may depend on
_NEWEST = 4  # sources that are compared with older ones
_REACH = 4 * MOST_SOURCES  # collectives of the rank; pairs that lie further apart are not compared
_ROUNDING_S = 1e-12
_NEVER = -np.inf

_Seconds: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Paths:
    """The longest paths to an instance.

    Args:
        sources: Where paths begin, see `PeerArrivals`, increasing.
        seconds: Length of the path from each source to each rank, `[k, world_size]`; -inf where there is none.
    """

    sources: tuple[int, ...]
    seconds: _Seconds

    def joined(self, other: "_Paths") -> "_Paths":
        """Return the longer of both paths from each source."""
        if self.sources == other.sources:
            return _Paths(self.sources, np.maximum(self.seconds, other.seconds))
        sources = tuple(sorted({*self.sources, *other.sources}))
        seconds = np.full((len(sources), self.seconds.shape[1]), _NEVER)
        for each in (self, other):
            places = [sources.index(source) for source in each.sources]
            seconds[places] = np.maximum(seconds[places], each.seconds)
        return _Paths(sources, seconds)

    def longer(self, by_s: _Seconds) -> "_Paths":
        """Return paths that are longer by some seconds on each rank."""
        return _Paths(self.sources, self.seconds + by_s)


#: Takes the number of a collective of the rank, its row, its other members, and the paths to its readiness on them.
#: Returns a source, and the seconds from that source to the end on the rank.
_Meet: TypeAlias = Callable[[int, int, NDArray[np.int64], _Paths], tuple[int, float]]


def find_peers(trace: Trace, rank: int) -> PeerArrivals:
    """Return what a rank has to know of its peers in a simulation.

    Raises:
        TraceError: An operation did not run, or the plan drops late ranks: who is late depends on the real rank.
    """
    plan = trace.plan
    if drops_late(plan):
        raise TraceError(
            f"plan {plan.name} drops the late: whether its peers are late depends on rank {rank}; leave --peers out "
            f"and start torchrun"
        )
    took = timing(trace)
    rows = _rows(plan)
    seconds = took.durations_s[rows, rank]
    dependence = _Dependence(trace.end_s[rows, rank], seconds)
    _follow(plan, took, rank, dependence.meet, dependence.shortened)
    width = max((len(lags_s) for _, lags_s in dependence.met), default=1) or 1
    sources = np.zeros((len(rows), width), dtype=np.int64)
    lag_s = np.full((len(rows), width), _NEVER)
    for number, (numbers, lags_s) in enumerate(dependence.met):
        sources[number, : len(numbers)] = numbers
        lag_s[number, : len(numbers)] = lags_s
    return PeerArrivals(rank, rows, seconds, sources, lag_s)


def trace_of_rank(simulated: Trace, rank: int, times_s: _Seconds, ends_s: _Seconds, source: str) -> Trace:
    """Return the trace of a real rank that met simulated peers.

    The peers have times in the collectives of the rank, and NaN elsewhere.

    Args:
        simulated: The simulation of all ranks.
        rank: The real rank.
        times_s: When its operations were ready, and when they ended, float64 `[2, n_instances]`.
        ends_s: When its collectives ended for its peers, float64 `[n]`, as numbered in `PeerArrivals`.
        source: Program that measured.
    """
    plan = simulated.plan
    took = timing(simulated)
    found = np.full((3, plan.n_instances, plan.world_size), np.nan)
    found[:, :, rank] = times_s[[0, 0, 1]]
    ready_s, start_s, end_s = found

    def meet(number: int, row: int, peers: NDArray[np.int64], paths: _Paths) -> tuple[int, float]:
        members = np.append(peers, rank)
        ready_s[row, peers] = paths.seconds[0, peers]
        start_s[row, members] = ready_s[row, members].max()
        end_s[row, peers] = ends_s[number] + took.durations_s[row, peers] - took.durations_s[row, rank]
        end_s[row, members] = np.maximum(start_s[row, members], end_s[row, members])
        return 0, float(ends_s[number])

    _follow(plan, took, rank, meet, lambda paths: paths)
    return Trace(plan, ready_s, start_s, end_s, source, real_rank=rank)


def _follow(plan: Plan, took: Timing, rank: int, meet: _Meet, shortened: Callable[[_Paths], _Paths]) -> None:
    """Follow the paths to every instance on the peers of a rank.

    Args:
        plan: The plan.
        took: How long everything takes.
        rank: The rank; nothing depends on its own operations.
        meet: Called for each collective of the rank, in order.
        shortened: Returns paths without those that do not matter.
    """
    start = _Paths((0,), np.zeros((1, plan.world_size)))
    start.seconds[:, rank] = _NEVER
    last_uses = _last_uses(plan)
    ends: dict[int, _Paths] = {}
    number = 0
    for instance, before in _with_predecessors(plan):
        row = instance.index
        free = shortened(reduce(_Paths.joined, map(ends.__getitem__, before))) if before else start
        ready = free if took.gaps_s is None else free.longer(took.gaps_s[row])
        if isinstance(instance.op, COLLECTIVES):
            peers = _peers_in(instance.op.group, plan.world_size, rank)
            source, end_s = meet(number, row, peers, ready)
            ends[row] = _after(instance.op, ready, took.durations_s[row], peers, rank, source, end_s)
            number += 1
        else:
            ends[row] = ready.longer(took.durations_s[row])
        for each in {*before, row}:
            if last_uses[each] <= row:
                del ends[each]


def _after(
    op: Collective,
    ready: _Paths,
    durations_s: _Seconds,
    peers: NDArray[np.int64],
    rank: int,
    source: int,
    end_s: float,
) -> _Paths:
    """Return the paths to the end of a collective: in the group of the rank from a source, elsewhere as the group was.

    Args:
        op: The collective.
        ready: The paths to its readiness.
        durations_s: Its duration on each rank.
        peers: The members of the rank's group, without the rank.
        rank: The rank.
        source: Where the paths of its group begin.
        end_s: Seconds from there to its end on the rank.
    """
    world_size = len(durations_s)
    by_group = op.group.split(ready.seconds, axis=1)
    last = np.broadcast_to(by_group.max(axis=2, keepdims=True), by_group.shape)
    elsewhere = op.group.joined(last, axis=1) + durations_s
    elsewhere[:, np.append(peers, rank)] = _NEVER
    together = np.full((1, world_size), _NEVER)
    together[0, peers] = end_s + durations_s[peers] - durations_s[rank]
    paths = _Paths((source,), together)
    return paths if len(peers) == world_size - 1 else _Paths(ready.sources, elsewhere).joined(paths)


@final
class _Dependence:
    """How the readiness of peers depends on the ends of the rank's collectives.

    Args:
        ends_s: Ends of the collectives of the rank in the simulation, `[n]`.
        seconds: Their durations, `[n]`.

    Attributes:
        met: Of each collective so far, sources and the longest path from each to any peer.
    """

    def __init__(self, ends_s: _Seconds, seconds: _Seconds) -> None:
        self.met: list[tuple[list[int], _Seconds]] = []
        self._ends_s = np.concatenate([[0.0], ends_s])
        self._seconds = seconds
        self._apart: dict[int, _Seconds] = {}  # end -> least seconds since those 0, 1, 2, ... before it

    def meet(self, number: int, _row: int, peers: NDArray[np.int64], paths: _Paths) -> tuple[int, float]:
        """Note on which ends the peers of a collective depend."""
        lags_s = paths.seconds[:, peers].max(axis=1, initial=_NEVER)
        depends = np.isfinite(lags_s)
        sources = [source for source, does in zip(paths.sources, depends, strict=True) if does]
        self.met.append((sources, lags_s[depends]))
        end = number + 1
        apart = np.full(_REACH, _NEVER)
        apart[0] = 0.0
        for source, lag_s in zip(*self.met[-1], strict=True):
            back = end - source
            earlier = self._apart.get(source)
            if earlier is not None and back < _REACH:
                longer = lag_s + self._seconds[number] + earlier[: _REACH - back]
                apart[back:] = np.maximum(apart[back:], longer)
        self._apart[end] = apart
        self._apart.pop(end - _REACH, None)
        return end, 0.0

    def shortened(self, paths: _Paths) -> _Paths:
        """Leave out paths that are never the longest: from an end that later ends follow by at least as long a path."""
        if len(paths.sources) == 1:
            return paths
        sources = np.array(paths.sources)
        seconds = paths.seconds.copy()
        for at in range(len(sources) - 1, max(0, len(sources) - 1 - _NEWEST), -1):
            apart = self._apart.get(int(sources[at]))
            if apart is not None:
                back = sources[at] - sources[:at]
                least = np.where(back < _REACH, apart[np.minimum(back, _REACH - 1)], _NEVER)
                covered = seconds[:at] <= seconds[at] + least[:, np.newaxis] + _ROUNDING_S
                seconds[:at][covered] = _NEVER
        some = np.isfinite(seconds).any(axis=1)
        return self._limited(sources[some], seconds[some])

    def _limited(self, sources: NDArray[np.int64], seconds: _Seconds) -> _Paths:
        """Let paths from the oldest sources, if there are too many, begin at the next one, as in the simulation."""
        n_folded = max(0, len(sources) - MOST_SOURCES)
        for at in range(n_folded):
            earlier_s = self._ends_s[sources[at + 1]] - self._ends_s[sources[at]]
            seconds[at + 1] = np.maximum(seconds[at + 1], seconds[at] - earlier_s)
        return _Paths(tuple(sources[n_folded:].tolist()), seconds[n_folded:])


def _with_predecessors(plan: Plan) -> Iterator[tuple[Instance, tuple[int, ...]]]:
    """Yield each instance, and the rows of those that it comes after, on its own lane too."""
    latest: dict[Lane, int] = {}
    for instance in walk(plan):
        on_lane = latest.get(instance.lane)
        yield instance, instance.after if on_lane is None else (on_lane, *instance.after)
        latest[instance.lane] = instance.index


def _last_uses(plan: Plan) -> NDArray[np.int64]:
    """Return the last instance that comes after each one, int64 `[n_instances]`; itself if none does."""
    last_uses = np.arange(plan.n_instances)
    for instance, before in _with_predecessors(plan):
        for each in before:
            last_uses[each] = instance.index
    return last_uses


def _rows(plan: Plan) -> NDArray[np.int64]:
    """Return the rows of collectives, in which every rank takes part, int64 `[n]`."""
    return np.array([each.index for each in walk(plan) if isinstance(each.op, COLLECTIVES)], dtype=np.int64)


@lru_cache(maxsize=64)
def _peers_in(group: Group, world_size: int, rank: int) -> NDArray[np.int64]:
    """Return the other members of the group that a rank belongs to."""
    members = np.array(group.members(world_size)[group.number(rank)])
    return np.delete(members, group.member(rank))
