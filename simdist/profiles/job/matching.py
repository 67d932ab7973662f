"""Matching the collectives of all ranks, and deriving their clocks from it.

The n-th collective of a kind and size in a group and step is the same one on all of its members. If every member needs
data from all others, the collective ends on all of them at about the same time.

**One run.** In one run, the ends of collectives stay together on all ranks. No rank finishes a collective before its
last member arrives, so the ends differ by less than the time from that arrival on. That time is the duration on the
last rank, by that rank's own clock: the shortest of all durations.

Busy hosts observe ends later than that. So all steps are examined before a larger difference is refused. In one run,
ends are late by chance in each step, and are close again in the next. In two runs they drift apart, because each step
adds the difference of two unrelated lengths. Let d[s] be how much later the collectives of step s end than on the other
ranks. In noise, mean |d[s + 1] - d[s]| is 1.4 times mean |d - median d|. In the sum of n independent differences it is
about 3.5 / sqrt(n) times that. If noise lasts for several steps, the lengths of steps still decide: with a wrong step
of the other ranks, ends are further apart.

**Late in turn.** By noise, first one rank is late within a step, then another. A scenario plays one delay for each rank
and step, or micro-batch. If ranks meet once in it, it takes as long as its latest rank. In a job that waits in each of
many exchanges, as `fully_shard` does on CPUs, it takes longer. With the own work w[k, r] of rank r before exchange k,
on busy cores

    sum over k of max over r of w[k, r]  >  max over r of sum over k of w[k, r]

The difference is measured here. What ranks lose in the same place of all steps is no noise and does not count: it
belongs to stragglers, which a scenario plays throughout the step or not at all.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from simdist.errors import TraceError
from simdist.profiles.job.job import TracedJob
from simdist.profiles.kineto.columns import Floats, Ints
from simdist.profiles.kineto.messages import CollectiveKind
from simdist.profiles.steps.model import RankProfile, TracedCollective
from simdist.settings.units import format_seconds


@dataclass(frozen=True, slots=True)
class CollectiveKey:
    """A collective: its kind, its size, and its members.

    Args:
        kind: Such as `all_reduce`.
        nbytes: Bytes of the whole buffer; None if no trace shows them.
        group: Its members, in ascending order.
        place: Number of earlier collectives of its kind and group in the step, on its first traced rank.
    """

    kind: CollectiveKind
    nbytes: int | None
    group: tuple[int, ...]
    place: int


@dataclass(frozen=True, slots=True)
class Matched:
    """The matched collectives. Times are on the rank's own clock, and NaN on ranks that take no part.

    Args:
        collectives: All of them.
        step: Index of the step that issued it, `[n_calls]`.
        arrival_s: When the rank was ready for it: its end minus its duration, without the time that the rank spent on
            other collectives of the group meanwhile, `[n_calls, n_traced_ranks]`.
        end_s: Its end on each rank, of the same shape.
        start_s: When the rank entered it, of the same shape.
        notes: Calls that could not be matched.
    """

    collectives: tuple[CollectiveKey, ...]
    step: Ints
    arrival_s: Floats
    end_s: Floats
    start_s: Floats
    notes: tuple[str, ...]


_Key = tuple[int, CollectiveKind, tuple[int, ...], int | None]  # step, kind, group, size if all traces show sizes
_Place = tuple[int, CollectiveKind, tuple[int, ...], int | None, int]  # and the number of these earlier in the step


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
            arrival_s[row, column] = came_s
            end_s[row, column] = call.end_s
            start_s[row, column] = call.start_s
    note = f"{n_unknown} collectives of groups whose members the traces do not tell were left out of the calibration"
    steps = np.array([step for step, *_ in found], dtype=np.int64)
    return Matched(tuple(collectives), steps, arrival_s, end_s, start_s, (note,) if n_unknown else ())


def _places(
    profile: RankProfile, world_size: int, has_sizes: bool
) -> Iterator[tuple[_Place | None, TracedCollective, float]]:
    """Yield each collective with its place (None if its members are unknown) and the time of the rank's arrival."""
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
    """Return the seconds that each call of a group would take with the links to itself.

    While k of them run at once, as with gloo's two threads, each has an equal share of the links. In t seconds they do
    the work that each would have done alone in t / k. If each begins after the one before, the result is the measured
    duration.
    """
    start_s, end_s = np.array([(call.start_s, call.end_s) for call in calls]).T
    at_s = np.unique(np.concatenate([start_s, end_s]))
    began, ended = (np.searchsorted(np.sort(times_s), at_s[:-1], side="right") for times_s in (start_s, end_s))
    done_s = np.concatenate([[0.0], np.cumsum(np.diff(at_s) / np.maximum(1, began - ended))])
    return list(np.interp(end_s, at_s, done_s) - np.interp(start_s, at_s, done_s))


#: No rank finishes these before all have arrived.
_HEARS_ALL: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather")
_FEWEST = 9  # calls that show a drift
_LEAST_DRIFT_S = 100e-6  # over the whole trace; less counts as none


@dataclass(frozen=True, slots=True)
class RankClocks:
    """The clocks of ranks relative to that of the first rank: the offset to subtract from their times.

    Args:
        offset_s: Offset at time `zero_s`, `[n_traced_ranks]`.
        drift: Growth of the offset, in seconds per second, `[n_traced_ranks]`.
        zero_s: Time of the offset on each rank's own clock, `[n_traced_ranks]`.
        residual_s: Median remaining difference between the ends of one collective.
        apart_s: Median remaining difference between the ends of collectives on each rank and on the others,
            `[n_traced_ranks]`; 0 for a rank without others.
        unknown: Ranks (as indices) that share no collective with the others. They keep their own clock.
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
    """Find the skew of all clocks, and their drift if they have one."""
    end_s = matched.end_s[[each.kind in _HEARS_ALL for each in matched.collectives]]
    n_ranks = matched.end_s.shape[1]
    offset_s = np.zeros(n_ranks)
    drift = np.zeros(n_ranks)
    zero_s = np.zeros(n_ranks)
    known = [0]
    waiting = list(range(1, n_ranks))
    corrected_s = end_s.copy()
    while waiting:
        known_s = corrected_s[:, sorted(known)]
        reference_s = known_s[np.arange(len(known_s)), np.isfinite(known_s).argmax(axis=1)]  # the first known member
        linked = [rank for rank in waiting if np.isfinite(reference_s - end_s[:, rank]).any()]
        if not linked:
            break
        rank = linked[0]
        own_s = end_s[:, linked[0]]
        offset_s[rank], drift[rank], zero_s[rank] = _difference(own_s, reference_s)
        corrected_s[:, rank] = own_s - offset_s[rank] - drift[rank] * (own_s - zero_s[rank])
        known.append(rank)
        waiting.remove(rank)
    residual_s = _residual_s(corrected_s[:, sorted(known)])
    return RankClocks(offset_s, drift, zero_s, residual_s, _apart_s(corrected_s), tuple(waiting))


def _difference(own_s: Floats, reference_s: Floats) -> tuple[float, float, float]:
    """Return the offset, the drift, and the time of that offset."""
    both = np.isfinite(own_s - reference_s)
    difference_s = (own_s - reference_s)[both]
    own_s = own_s[both]
    order = np.argsort(own_s)
    own_s = own_s[order]
    difference_s = difference_s[order]
    offset_s = float(np.median(difference_s))
    zero_s = float(np.median(own_s))
    third = len(own_s) // 3
    if len(own_s) < _FEWEST:
        return offset_s, 0.0, zero_s
    span_s = float(np.median(own_s[-third:]) - np.median(own_s[:third]))
    change_s = float(np.median(difference_s[-third:]) - np.median(difference_s[:third]))
    if span_s <= 0:
        return offset_s, 0.0, zero_s
    drift = change_s / span_s
    straight_s = difference_s - drift * (own_s - zero_s)
    if abs(change_s) < max(_LEAST_DRIFT_S, 3 * _deviation_s(straight_s)):
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


_SLICE_S = 5e-3  # a busy host sees an end this late: about a time slice of Linux (sched_base_slice_ns, 3-4 ms)
_FEWEST_STEPS = 16  # steps needed to distinguish noise from drifting apart
_WILD = 5.0  # times the median deviation; larger deviations are clipped to this
_BETTER = 2.5  # product of both ratios; 1 of 100 random pairs of two runs reaches it in 20 steps
_WRONG = 3  # largest offset of wrong pairings, in steps


def check_same_run(job: TracedJob, matched: Matched, clocks: RankClocks) -> None:
    """Refuse a rank that took part in other collectives than the others.

    Raises:
        TraceError: After the correction of clocks, the median distance of the ends on a rank from those on the others
            is longer than the collectives take, and the ends drift apart.
    """
    if not len(matched.end_s) or not len(clocks.apart_s):
        return
    alone_s = float(np.median(np.nanmin(matched.end_s - matched.arrival_s, axis=1)))
    limit_s = max(_SLICE_S, alone_s)
    for rank in np.argsort(-clocks.apart_s).tolist():
        apart_s = float(clocks.apart_s[rank])
        if apart_s <= limit_s:
            return
        later_s, others_s = _by_step(matched, clocks, rank)
        if _stay_together(later_s, others_s):
            continue
        raise TraceError(
            f"{job.profiles[rank].path}: collectives of rank {job.ranks[rank]} end {format_seconds(apart_s)} apart "
            f"from the same ones on other ranks, with clocks corrected, and take only {format_seconds(alone_s)}: it is "
            f"of another run, or its steps are numbered otherwise: give the traces of one run"
        )


def _by_step(matched: Matched, clocks: RankClocks, rank: int) -> tuple[Floats, Floats]:
    """Return how much later the collectives of each step end on a rank than on the others, and their end there."""
    heard = np.array([each.kind in _HEARS_ALL for each in matched.collectives])
    end_s = clocks.corrected_s(matched.end_s)
    others = np.delete(end_s, rank, axis=1)
    heard &= np.isfinite(end_s[:, rank]) & np.isfinite(others).any(axis=1)
    others_s = np.nanmedian(others[heard], axis=1)
    later_s = end_s[heard, rank] - others_s
    step = matched.step[heard]
    rows = [(np.median(later_s[step == each]), others_s[step == each].max()) for each in np.unique(step)]
    return np.array([row[0] for row in rows]), np.array([row[1] for row in rows])


def _stay_together(later_s: Floats, others_s: Floats) -> bool:
    """Tell whether ends are late by chance in each step, without drifting apart."""
    n_steps = len(later_s)
    median_s = np.median(later_s)
    wild_s = _WILD * _deviation_s(later_s)
    tamed_s = np.clip(later_s - median_s, -wild_s, wild_s)
    if n_steps < _FEWEST_STEPS or not wild_s:
        return not wild_s
    nearness = float(np.mean(np.abs(np.diff(tamed_s))) / np.mean(np.abs(tamed_s)))
    own_s = others_s + later_s
    wrong_s = [
        _deviation_s(first_s[by:] - second_s[:-by])
        for by in range(1, _WRONG + 1)
        for first_s, second_s in ((own_s, others_s), (others_s, own_s))
    ]
    worse = float(np.median(wrong_s)) / _deviation_s(later_s)
    return nearness >= 0.95 + 5 / n_steps or nearness * worse >= _BETTER


def _deviation_s(seconds: Floats) -> float:
    return float(np.median(np.abs(seconds - np.median(seconds))))


_ERRORS = 3.0  # standard errors by which the mean of a rank in a place is not noise


def in_turn_s(matched: Matched, clocks: RankClocks, n_steps: int) -> float:
    """Return the seconds of a step that ranks wait in turn by noise, mean.

    It is 0 if not all ranks take part in all exchanges, one after the other and equally many in each step.
    """
    arrival_s = clocks.corrected_s(matched.arrival_s)
    end_s = clocks.corrected_s(matched.end_s)
    n_calls, n_ranks = arrival_s.shape
    if n_steps < 2 or n_ranks < 2 or n_calls % n_steps or not np.isfinite(arrival_s).all():
        return 0.0
    order = np.lexsort((arrival_s.min(axis=1), matched.step))
    arrival_s = arrival_s[order]
    end_s = end_s[order]
    of_steps = matched.step[order].reshape(n_steps, -1)
    if (of_steps != of_steps[:, :1]).any() or (arrival_s[1:] < end_s[:-1]).any():
        return 0.0
    work_s = (arrival_s[1:] - end_s[:-1])[of_steps.shape[1] - 1 :].reshape(n_steps - 1, -1, n_ranks)
    in_turn = work_s.max(axis=2).sum(axis=1) - work_s.sum(axis=1).max(axis=1)
    usual_s = _usual_s(work_s)
    return max(0.0, float(in_turn.mean() - (usual_s.max(axis=1).sum() - usual_s.sum(axis=0).max())))


def _usual_s(work_s: Floats) -> Floats:
    """Return the mean work of each rank in each place, `[n_places, n_ranks]`; within noise, that of all ranks."""
    mean_s = work_s.mean(axis=0)
    error_s = work_s.std(axis=0, ddof=1) / np.sqrt(len(work_s)) if len(work_s) > 1 else np.zeros_like(mean_s)
    all_s = mean_s.mean(axis=1, keepdims=True)
    is_usual = np.abs(mean_s - all_s) > _ERRORS * np.sqrt(error_s**2 + (error_s**2).mean(axis=1, keepdims=True))
    return np.asarray(np.where(is_usual, mean_s, all_s))
