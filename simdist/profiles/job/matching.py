"""Collectives of all ranks, matched, and with them the clocks of ranks.

The n-th collective of a kind and size in a group and step is the same one on all of its members. One in which all hear
from all ends everywhere at about the same time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from simdist.profiles.job.job import TracedJob
from simdist.profiles.kineto.columns import Floats, Ints
from simdist.profiles.kineto.messages import CollectiveKind
from simdist.profiles.steps.model import RankProfile, TracedCollective


@dataclass(frozen=True, slots=True)
class CollectiveKey:
    """A collective: its kind, its size, and its members.

    Args:
        kind: Such as `all_reduce`.
        nbytes: Of the whole buffer; None if no trace tells.
        group: Its members, in ascending order.
        place: How many of its kind and group came before in the step, on the first of its ranks that was traced.
    """

    kind: CollectiveKind
    nbytes: int | None
    group: tuple[int, ...]
    place: int


@dataclass(frozen=True, slots=True)
class Matched:
    """Collectives that were matched; times are NaN on ranks that take no part, and on their own clocks.

    Args:
        collectives: All of them.
        step: Index of the step in which it was issued, `[n_calls]`.
        arrival_s: When the rank was ready for it: so long before the end as it took, less what the rank did for others
            of the group meanwhile, `[n_calls, n_traced_ranks]`.
        end_s: When it was done there, likewise.
        start_s: When the rank was in it, likewise.
        notes: Calls that could not be matched.
    """

    collectives: tuple[CollectiveKey, ...]
    step: Ints
    arrival_s: Floats
    end_s: Floats
    start_s: Floats
    notes: tuple[str, ...]


_Key = tuple[int, CollectiveKind, tuple[int, ...], int | None]  # step, kind, group, size if all traces tell sizes
_Place = tuple[int, CollectiveKind, tuple[int, ...], int | None, int]  # and how many of these came before in the step


def match(job: TracedJob) -> Matched:
    """Match the collectives of all ranks."""
    found: dict[_Place, dict[int, tuple[TracedCollective, float]]] = defaultdict(dict)
    n_unknown = 0
    has_sizes = all(call.nbytes is not None for each in job.profiles for step in each.steps for call in step.calls)
    for column, profile in enumerate(job.profiles):
        for place, call, came_s in _places(profile, job.world_size, has_sizes):
            if place is None:
                n_unknown += 1
            else:
                found[place][column] = call, came_s
    arrival_s, end_s, start_s = (np.full((len(found), len(job.profiles)), np.nan) for _ in range(3))
    collectives = []
    before: Counter[tuple[int, CollectiveKind, tuple[int, ...]]] = Counter()
    for row, ((step, kind, group, *_), of_ranks) in enumerate(found.items()):
        sizes = (call.nbytes for call, _ in of_ranks.values() if call.nbytes is not None)
        collectives.append(CollectiveKey(kind, next(sizes, None), group, before[step, kind, group]))
        before[step, kind, group] += 1
        for column, (call, came_s) in of_ranks.items():
            arrival_s[row, column], end_s[row, column], start_s[row, column] = came_s, call.end_s, call.start_s
    note = f"{n_unknown} collectives of groups whose members the traces do not tell were left out of the calibration"
    steps = np.array([step for step, *_ in found], dtype=np.int64)
    return Matched(tuple(collectives), steps, arrival_s, end_s, start_s, (note,) if n_unknown else ())


def _places(
    profile: RankProfile, world_size: int, has_sizes: bool
) -> Iterator[tuple[_Place | None, TracedCollective, float]]:
    """Yield every collective with its place, None if its members are unknown, and when the rank was ready for it."""
    steps = enumerate(profile.steps)
    calls = [(index, call, call.members(world_size)) for index, step in steps for call in step.calls]
    groups = {group for _, _, group in calls if group}
    seconds = {group: iter(_alone_s([call for _, call, of in calls if of == group])) for group in groups}
    seen: Counter[_Key] = Counter()
    for index, call, group in calls:
        if group is None:
            yield None, call, call.start_s
        elif len(group) > 1:
            key = index, call.kind, group, call.nbytes if has_sizes else None
            yield (*key, seen[key]), call, call.end_s - next(seconds[group])
            seen[key] += 1


def _alone_s(calls: Sequence[TracedCollective]) -> list[float]:
    """Return the seconds of each call of a group if it had its links to itself.

    While several run at once, as with gloo's two threads, each has an equal share of the links: k of them for t seconds
    did what each would have done alone in t / k. Where each begins after the one before, it is what they took.
    """
    start_s, end_s = np.array([(call.start_s, call.end_s) for call in calls]).T
    at_s = np.unique(np.concatenate([start_s, end_s]))
    began, ended = (np.searchsorted(np.sort(times_s), at_s[:-1], side="right") for times_s in (start_s, end_s))
    done_s = np.concatenate([[0.0], np.cumsum(np.diff(at_s) / np.maximum(1, began - ended))])
    return list(np.interp(end_s, at_s, done_s) - np.interp(start_s, at_s, done_s))


#: No rank is done with these before all have come.
HEARS_ALL: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather")
_FEWEST = 9  # calls that show a drift
_LEAST_DRIFT_S = 100e-6  # over the whole trace; less is none


@dataclass(frozen=True, slots=True)
class RankClocks:
    """The clocks of ranks against that of the first rank: what must be taken off their times.

    Args:
        offset_s: At time `zero_s`, `[n_traced_ranks]`.
        drift: Seconds more per second, likewise.
        zero_s: On each rank's own clock, likewise.
        residual_s: The ends of one collective still differ by, in the median.
        apart_s: How far each rank's ends of collectives still are from those of the other ranks, in the median,
            `[n_traced_ranks]`; 0 for a rank without others.
        unknown: Ranks (as indices) that share no collective with the others: they have their own clock.
    """

    offset_s: Floats
    drift: Floats
    zero_s: Floats
    residual_s: float
    apart_s: Floats
    unknown: tuple[int, ...]

    @property
    def skew_s(self) -> float:
        """The largest difference between two clocks."""
        return float(np.ptp(self.offset_s))

    def corrected_s(self, at_s: Floats) -> Floats:
        """Return times of all ranks, `[..., n_traced_ranks]`, on the first rank's clock."""
        return np.asarray(at_s - self.offset_s - self.drift * (at_s - self.zero_s))


def synchronize(matched: Matched) -> RankClocks:
    """Find the skew of all clocks, and their drift where there is one."""
    end_s = matched.end_s[[each.kind in HEARS_ALL for each in matched.collectives]]
    n_ranks = matched.end_s.shape[1]
    offset_s, drift, zero_s = np.zeros(n_ranks), np.zeros(n_ranks), np.zeros(n_ranks)
    known, waiting = [0], list(range(1, n_ranks))
    corrected_s = end_s.copy()
    while waiting:
        known_s = corrected_s[:, sorted(known)]
        reference_s = known_s[np.arange(len(known_s)), np.isfinite(known_s).argmax(axis=1)]  # the first known member
        linked = [rank for rank in waiting if np.isfinite(reference_s - end_s[:, rank]).any()]
        if not linked:
            break
        rank, own_s = linked[0], end_s[:, linked[0]]
        offset_s[rank], drift[rank], zero_s[rank] = _difference(own_s, reference_s)
        corrected_s[:, rank] = own_s - offset_s[rank] - drift[rank] * (own_s - zero_s[rank])
        known.append(rank)
        waiting.remove(rank)
    residual_s = _residual_s(corrected_s[:, sorted(known)])
    return RankClocks(offset_s, drift, zero_s, residual_s, _apart_s(corrected_s), tuple(waiting))


def _difference(own_s: Floats, reference_s: Floats) -> tuple[float, float, float]:
    """Return offset, drift, and the time at which the offset is that."""
    both = np.isfinite(own_s - reference_s)
    own_s, difference_s = own_s[both], (own_s - reference_s)[both]
    order = np.argsort(own_s)
    own_s, difference_s = own_s[order], difference_s[order]
    offset_s, zero_s = float(np.median(difference_s)), float(np.median(own_s))
    third = len(own_s) // 3
    if len(own_s) < _FEWEST:
        return offset_s, 0.0, zero_s
    span_s = float(np.median(own_s[-third:]) - np.median(own_s[:third]))
    change_s = float(np.median(difference_s[-third:]) - np.median(difference_s[:third]))
    if span_s <= 0:
        return offset_s, 0.0, zero_s
    drift = change_s / span_s
    straight_s = difference_s - drift * (own_s - zero_s)
    noise_s = float(np.median(np.abs(straight_s - np.median(straight_s))))
    if abs(change_s) < max(_LEAST_DRIFT_S, 3 * noise_s):
        return offset_s, 0.0, zero_s
    return float(np.median(straight_s)), drift, zero_s


def _residual_s(corrected_s: Floats) -> float:
    shared = np.isfinite(corrected_s).sum(axis=1) > 1
    if not shared.any():
        return 0.0
    spread_s = np.nanmax(corrected_s[shared], axis=1) - np.nanmin(corrected_s[shared], axis=1)
    return float(np.median(spread_s))


def _apart_s(corrected_s: Floats) -> Floats:
    n_ranks = corrected_s.shape[1]
    shared = np.isfinite(corrected_s).sum(axis=1) > 1
    apart_s = np.zeros(n_ranks)
    for rank in range(n_ranks):
        own_s = corrected_s[shared & np.isfinite(corrected_s[:, rank])]
        if len(own_s):
            others_s = np.nanmedian(np.delete(own_s, rank, axis=1), axis=1)
            apart_s[rank] = np.median(np.abs(own_s[:, rank] - others_s))
    return apart_s
