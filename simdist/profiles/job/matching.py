"""Collectives of all ranks, matched: the n-th of a kind in a group and step is the same one on all of its members."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.job.job import TracedJob
from simdist.profiles.steps.model import Call, Kind, RankProfile


@dataclass(frozen=True, slots=True)
class What:
    """What a collective does, and between whom.

    Args:
        kind: Such as `all_reduce`.
        nbytes: Of the whole buffer; None if no trace tells.
        group: Its members, in ascending order.
    """

    kind: Kind
    nbytes: int | None
    group: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Matched:
    """Collectives that were matched; times are NaN on ranks that take no part, and on their own clocks.

    Args:
        what: Of each.
        step: Index of the step in which it was issued, `[n_calls]`.
        arrival_s: When the rank was ready for it: so long before the end as it took, less what the rank did for others
            of the group meanwhile, `[n_calls, n_traced_ranks]`.
        end_s: When it was done there, likewise.
        notes: What could not be matched.
    """

    what: tuple[What, ...]
    step: NDArray[np.int64]
    arrival_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    notes: tuple[str, ...]


_Key = tuple[int, Kind, tuple[int, ...]]  # step, kind, group
_Place = tuple[int, Kind, tuple[int, ...], int]  # and how many of these came before in the step


def match(job: TracedJob) -> Matched:
    """Match the collectives of all ranks."""
    rows: dict[_Place, int] = {}
    sizes: list[int | None] = []
    times: list[tuple[int, int, float, float]] = []
    unknown = 0
    for column, profile in enumerate(job.profiles):
        for place, call, came_s in _places(profile, job.world_size):
            if place is None:
                unknown += 1
                continue
            row = rows.setdefault(place, len(rows))
            if row == len(sizes):
                sizes.append(call.nbytes)
            elif sizes[row] is None:
                sizes[row] = call.nbytes
            times.append((row, column, came_s, call.end_s))
    arrival_s, end_s = (np.full((len(rows), len(job.profiles)), np.nan) for _ in range(2))
    if times:
        table = np.array(times)
        places = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
        arrival_s[places], end_s[places] = table[:, 2], table[:, 3]
    what = tuple(What(kind, nbytes, group) for (_, kind, group, _), nbytes in zip(rows, sizes, strict=True))
    return Matched(what, np.array([step for step, *_ in rows], dtype=np.int64), arrival_s, end_s, _notes(unknown))


def _places(profile: RankProfile, world_size: int) -> Iterator[tuple[_Place | None, Call, float]]:
    """Yield every collective with its place, None if its members are unknown, and when the rank was ready for it."""
    calls = [(index, call, _group(call, world_size)) for index, step in enumerate(profile.steps) for call in step.calls]
    groups = {group for _, _, group in calls if group}
    seconds = {group: iter(_alone_s([call for _, call, of in calls if of == group])) for group in groups}
    seen: Counter[_Key] = Counter()
    for index, call, group in calls:
        if group is None:
            yield None, call, call.start_s
        elif len(group) > 1:
            key = index, call.kind, group
            yield (*key, seen[key]), call, call.end_s - next(seconds[group])
            seen[key] += 1


def _alone_s(calls: Sequence[Call]) -> list[float]:
    """Return the seconds of each call of a group if it had its links to itself.

    While several run at once, as with gloo's two threads, each has an equal share of the links: k of them for t seconds
    did what each would have done alone in t / k. Where each begins after the one before, it is what they took.
    """
    start_s, end_s = np.array([(call.start_s, call.end_s) for call in calls]).T
    at_s = np.unique(np.concatenate([start_s, end_s]))
    began, ended = (np.searchsorted(np.sort(times_s), at_s[:-1], side="right") for times_s in (start_s, end_s))
    done_s = np.concatenate([[0.0], np.cumsum(np.diff(at_s) / np.maximum(1, began - ended))])
    return list(np.interp(end_s, at_s, done_s) - np.interp(start_s, at_s, done_s))


def _group(call: Call, world_size: int) -> tuple[int, ...] | None:
    """Return the members; a trace that does not tell them, nor that they are fewer, means the world."""
    if call.ranks is not None:
        return call.ranks
    if call.n_ranks is None or call.n_ranks == world_size:
        return tuple(range(world_size))
    return (0,) if call.n_ranks == 1 else None


def _notes(unknown: int) -> tuple[str, ...]:
    if not unknown:
        return ()
    return (f"{unknown} collectives of groups whose members the traces do not tell were left out of the calibration",)
