"""Collectives of all ranks, matched: the n-th of a kind in a group and step is the same one on all of its members."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.job import TracedJob
from simdist.profiles.model import Call, Kind, RankProfile

__all__ = ["Matched", "What", "match"]


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
        arrival_s: When the rank was in it and done with the one before of its group, `[n_calls, n_traced_ranks]`.
        end_s: When it was done there, likewise.
        notes: What could not be matched.
    """

    what: tuple[What, ...]
    step: NDArray[np.int64]
    arrival_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    notes: tuple[str, ...]


_Place = tuple[int, Kind, tuple[int, ...], int]  # step, kind, group, how many of these came before in the step


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
    free_s: dict[tuple[int, ...], float] = {}
    for index, step in enumerate(profile.steps):
        seen: Counter[tuple[Kind, tuple[int, ...]]] = Counter()
        for call in step.calls:
            group = _group(call, world_size)
            if group is None:
                yield None, call, call.start_s
            elif len(group) > 1:
                arrival_s = max(call.start_s, free_s.get(group, call.start_s))
                free_s[group] = max(call.end_s, free_s.get(group, call.end_s))
                yield (index, call.kind, group, seen[call.kind, group]), call, arrival_s
                seen[call.kind, group] += 1


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
