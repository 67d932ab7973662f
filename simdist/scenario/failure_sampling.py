"""Draw failures: the same for the same seed, whatever the schedule, the policy and the length of the job.

The n-th failure of a cause has numbers of its own, from counters as in `simdist.scenario.link_sampling`:

    key     = (seed, index of the cause)
    counter = (place in the tile, number of the tile, lane, 3)

Lane 0 gives the time since the cause's failure before, lane 1 which component, lane 2 whether it is one of the worst
nodes, and further lanes what follows from the failure: see `FailureChances`. Failures come by the clock on the wall,
also while the job is down.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.scenario.failures import FailureCause, Failures
from simdist.scenario.link_sampling import uniform_tiles

_Floats: TypeAlias = NDArray[np.float64]

_FAILURES = 3
_TIMES, _PLACES, _EXCESS, _WORST, _FIRST_CHANCE = range(5)
_TILE = 256  # of `uniform_tiles`
_MOST_KNOWN = 64  # tiles that are kept


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure.

    Args:
        at_s: When, from the begin of the job; 0 if it comes at a step.
        cause: Index of its cause.
        number: Counts the failures of the cause from 0.
        first_node: First of the nodes that it hits.
        n_nodes: How many; all of them are hit by a failure of the job.
        rank: First of the ranks that it hits.
        is_excess: Whether it comes only because its node is one of the worst.
    """

    at_s: float
    cause: int
    number: int
    first_node: int
    n_nodes: int
    rank: int
    is_excess: bool = False


def failures_of(failures: Failures, *, seed: int, n_nodes: int, gpus_per_node: int) -> Iterator[Failure]:
    """Yield failures in the order of their times, those at a step excepted; without end unless all are recorded.

    Args:
        failures: Their causes.
        seed: From 0 to 2**64 - 1.
        n_nodes: Nodes of the cluster.
        gpus_per_node: GPUs of each.
    """
    found = []
    for index, cause in enumerate(failures.causes):
        if cause.rate_per_s or cause.every_s:
            found.append(_drawn(cause, seed, index, n_nodes, gpus_per_node))
        elif cause.at_s is not None:
            found.append(iter(sorted(_recorded(cause, index, n_nodes, gpus_per_node), key=_time)))
    return heapq.merge(*found, key=_time)


def failures_at_steps(failures: Failures, *, n_nodes: int, gpus_per_node: int) -> list[tuple[int, Failure]]:
    """Return the failures that come at a step, counted from 0, and their steps, in ascending order."""
    found = []
    for index, cause in enumerate(failures.causes):
        if cause.at_steps is not None:
            of_cause = _recorded(cause, index, n_nodes, gpus_per_node)
            found += list(zip(cause.at_steps, of_cause, strict=True))
    return sorted(found, key=lambda each: each[0])


@dataclass(slots=True)
class FailureChances:
    """Numbers that say what follows from failures, such as whether a try to start again succeeds.

    Args:
        seed: From 0 to 2**64 - 1.
    """

    seed: int
    _n_drawn: dict[tuple[int, int], int] = field(default_factory=dict)
    _known: dict[tuple[int, int, int], _Floats] = field(default_factory=dict)

    def next(self, failure: Failure) -> float:
        """Return the next number above 0 and below 1 that belongs to a failure."""
        which = (failure.cause, failure.number)
        lane = self._n_drawn.get(which, 0)
        self._n_drawn[which] = lane + 1
        tile, place = divmod(failure.number, _TILE)
        key = (failure.cause, lane, tile)
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            numbers = uniform_tiles(self.seed, failure.cause, _FIRST_CHANCE + lane, _FAILURES)
            self._known[key] = next(islice(numbers, tile, None))
        return float(self._known[key][place])


def _time(failure: Failure) -> float:
    return failure.at_s


def _drawn(cause: FailureCause, seed: int, index: int, n_nodes: int, gpus_per_node: int) -> Iterator[Failure]:
    """Yield the failures of a cause: with a rate, they come as a Poisson process."""
    excess = cause.excess(n_nodes)
    worst = _worst_nodes(cause, seed, index, n_nodes)
    hit = _Hit(cause, n_nodes, gpus_per_node)
    lanes = [uniform_tiles(seed, index, lane, _FAILURES) for lane in (_TIMES, _PLACES, _EXCESS)]
    now_s = 0.0
    for tile in count():
        gaps, places, chances = (next(lane) for lane in lanes)
        gaps_s = _gaps_s(cause, gaps, cause.per_s(n_nodes, gpus_per_node))
        times_s = np.cumsum(np.concatenate([[now_s], gaps_s]))[1:].tolist()
        now_s = times_s[-1]
        drawn = (places * hit.n_places).astype(np.int64).tolist()
        is_excess = (chances < excess).tolist()
        bad = (places * len(worst)).astype(np.int64).tolist()
        for i in range(_TILE):
            place = drawn[i]
            if is_excess[i]:
                place = worst[bad[i]] * (gpus_per_node if cause.of == "gpu" else 1)
            first, n_hit, rank = hit.by(place)
            yield Failure(times_s[i], index, tile * _TILE + i, first, n_hit, rank, is_excess[i])


def _gaps_s(cause: FailureCause, uniform: _Floats, per_s: float) -> _Floats:
    """Return times from one failure to the next, from numbers between 0 and 1."""
    from simdist.scenario.portable import log

    if cause.every_s:
        shortest_s, longest_s = cause.every_s
        return shortest_s + (longest_s - shortest_s) * uniform
    return -1.0 / per_s * log(uniform)


def _recorded(cause: FailureCause, index: int, n_nodes: int, gpus_per_node: int) -> Iterator[Failure]:
    """Yield recorded failures as they are written; those at steps have no time."""
    times_s: Sequence[float] = cause.at_s or [0.0] * len(cause.at_steps or ())
    ranks = cause.ranks or [0] * len(times_s)
    hit = _Hit(cause, n_nodes, gpus_per_node)
    for number, (at_s, rank) in enumerate(zip(times_s, ranks, strict=True)):
        first, n_hit, _ = hit.by(hit.place_of(rank))
        yield Failure(at_s, index, number, first, n_hit, rank)


@dataclass(frozen=True, slots=True)
class _Hit:
    """What a failure hits, by its place: the number of a component, or of a node if the job loses one of them."""

    cause: FailureCause
    n_nodes: int
    gpus_per_node: int

    @property
    def n_places(self) -> int:
        """How many places a failure may have, each as likely as any other."""
        if self.cause.of == "job" and self.cause.is_of_node:
            return self.n_nodes
        return self.cause.n_components(self.n_nodes, self.gpus_per_node)

    def by(self, place: int) -> tuple[int, int, int]:
        """Return first node, number of nodes, and first rank that a failure hits."""
        match self.cause.of:
            case "gpu":
                return place // self.gpus_per_node, 1, place
            case "domain":
                size = self.cause.domain_nodes or 1
                first = place * size
                return first, min(size, self.n_nodes - first), first * self.gpus_per_node
            case "job" if not self.cause.is_of_node:
                return 0, self.n_nodes, 0
            case _:
                return place, 1, place * self.gpus_per_node

    def place_of(self, rank: int) -> int:
        """Return the place of a failure that hits a rank."""
        match self.cause.of:
            case "gpu":
                return rank
            case "domain":
                return rank // self.gpus_per_node // (self.cause.domain_nodes or 1)
            case _:
                return rank // self.gpus_per_node


def _worst_nodes(cause: FailureCause, seed: int, index: int, n_nodes: int) -> list[int]:
    """Draw the nodes that fail more often: those with the smallest of a number for each node."""
    if cause.worst is None:
        return []
    n_tiles = -(-n_nodes // _TILE)
    numbers = np.concatenate(list(islice(uniform_tiles(seed, index, _WORST, _FAILURES), n_tiles)))[:n_nodes]
    found: list[int] = np.argsort(numbers, kind="stable")[: cause.worst.nodes].tolist()
    return sorted(found)
