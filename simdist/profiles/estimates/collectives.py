"""Times of collectives without the wait for late ranks, and delays of untraced ranks, derived from that wait.

A collective ends when its last member has arrived and the links have done their work. If that member left no trace, the
two look alike. Two facts separate them. Collectives of one size occupy the links equally long at each place in the
step. A late rank is late for the first collectives of a step or for the last ones, and less for those in between, which
queue for the links anyway. So the place with the shortest calls is the base. What others take more is waiting.

Two kinds of waiting cannot be separated and count as time of the links: waiting that all places have in common, and all
waiting if no two collectives of a step have similar sizes. If few steps were traced, a place that is late in all of
them looks like a place that takes longer. There, a collective takes at least as long as its shortest call.

If a rank is late for several collectives in a row, one delay causes it all, and nothing was held up in between. So the
longest of these waits counts, not their sum. Concurrent collectives share the links and so share the waiting: for them,
the sum counts. All this is silent on steps in which one traced rank is much later than the others: the collectives that
the others queued meanwhile then share the links. So this lateness is a lower bound.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.estimates.base import typical_s
from simdist.profiles.estimates.noise import by_chance_once_s
from simdist.profiles.estimates.stragglers import DelayTable
from simdist.profiles.job.job import TracedJob
from simdist.profiles.job.layout import RankLayout
from simdist.profiles.job.matching import Matched, RankClocks
from simdist.profiles.kineto.columns import Floats, Ints
from simdist.profiles.kineto.messages import CollectiveKind
from simdist.settings.base import listed
from simdist.settings.units import format_seconds

_LOW = 0.1  # quantile over the steps of one place: the untraced rank need not be late in all of them
_SAME_SIZE = 1.25  # sizes within this factor take equally long per byte
_LONGER = 1.15  # times the base; places differ by less without any late rank
_LAST_LONGER = 1.65  # the same for the last place: gloo's last collective shares the links with fewer, and seems longer
_NOTICEABLE = 0.03  # of a step
_FEWEST = 10  # steps; with fewer, a place that takes longer is not assumed to contain waiting in all of them


@dataclass(frozen=True, slots=True)
class UntracedWaits:
    """Waiting for untraced ranks, as far as it can be separated from the links.

    Args:
        alone_s: Upper bound of the duration of each collective without this waiting, `[n_calls]`.
        late_s: Lower bound of the time that the traced ranks waited in each step for others, `[n_steps]`.
        behind_s: How much later than a typical traced rank the last traced rank arrived at the first of these
            collectives, `[n_steps]`; 0 without such collectives.
        is_comparable: There were collectives to compare.
    """

    alone_s: Floats
    late_s: Floats
    behind_s: Floats
    is_comparable: bool


def find_untraced_waits(matched: Matched, clocks: RankClocks) -> UntracedWaits:
    """Separate the wait for untraced ranks from the time on the links, as far as possible."""
    n_steps = int(matched.step.max()) + 1 if len(matched.step) else 0
    arrival_s = clocks.corrected_s(matched.arrival_s)
    end_s = clocks.corrected_s(matched.end_s)
    if not len(matched.collectives):
        return UntracedWaits(np.zeros(0), np.zeros(0), np.zeros(0), is_comparable=False)
    last_s = np.nanmax(arrival_s, axis=1)
    ahead_s = last_s - np.nanmedian(arrival_s, axis=1)
    seconds = np.maximum(0.0, np.nanmedian(end_s, axis=1) - last_s)
    alone_s = seconds.copy()
    waited_s = np.zeros_like(seconds)
    is_comparable = False
    for places in _alike(matched, np.isfinite(end_s).sum(axis=1)):
        lows = [_low(seconds[rows] / _nbytes(matched, rows)) for rows in places]  # seconds per byte
        longer = [*[_LONGER] * (len(places) - 1), _LAST_LONGER]
        for rows, low in zip(places, lows, strict=True):
            alone_s[rows] = (low if low <= _LONGER * min(lows) else min(lows)) * _nbytes(matched, rows)
            if len(rows) < _FEWEST:
                sizes = _nbytes(matched, rows)
                alone_s[rows] = np.maximum(alone_s[rows], [seconds[rows][sizes == each].min() for each in sizes])
        if len(places) > 1:
            is_comparable = True
            for rows, factor in zip(places, longer, strict=True):
                of_place_s = _waited_s(seconds[rows], alone_s[rows], factor)
                waited_s[rows] = np.where(ahead_s[rows] < alone_s[rows], of_place_s, 0.0)
    start_s = np.nanmax(clocks.corrected_s(matched.start_s), axis=1)
    late_s = np.zeros(n_steps)
    behind_s = np.zeros(n_steps)
    for rows in _overlapping(np.flatnonzero(waited_s > 0), matched.step, start_s, np.nanmedian(end_s, axis=1)):
        step = matched.step[rows[0]]
        together_s = waited_s[rows].sum()
        if together_s > late_s[step]:
            late_s[step] = together_s
            behind_s[step] = ahead_s[rows[0]]
    return UntracedWaits(alone_s, late_s, behind_s, is_comparable)


def _overlapping(rows: NDArray[np.intp], step: Ints, start_s: Floats, end_s: Floats) -> Iterator[list[int]]:
    """Yield groups of concurrent collectives, by step and start; the members of a group share their waiting."""
    found: list[int] = []
    for row in rows[np.lexsort((start_s[rows], step[rows]))].tolist():
        if found and (step[row] != step[found[0]] or start_s[row] >= end_s[found].max()):
            yield found
            found = []
        found.append(row)
    if found:
        yield found


def _waited_s(seconds: Floats, alone_s: Floats, factor: float) -> Floats:
    """Return how far the collectives of one place exceed the base; 0 if noise explains it.

    Args:
        seconds: Their durations, `[n_steps]`.
        alone_s: The base, `[n_steps]`.
        factor: Up to this multiple of the base, a duration contains no waiting.
    """
    beyond_s = seconds - alone_s
    least_s = (factor - 1) * alone_s
    if _low(beyond_s / alone_s) <= factor - 1:  # not always late
        least_s = np.maximum(least_s, by_chance_once_s(beyond_s))
    return np.where(beyond_s > least_s, beyond_s, 0.0)


def _low(values: Floats) -> float:
    return max(float(np.quantile(values, _LOW)), 1e-30)


def with_untraced_rank(delays: DelayTable, untraced: UntracedWaits, job: TracedJob) -> DelayTable:
    """Return the delays, including those of an untraced rank if it is the only one and the others waited for it."""
    waited = untraced.late_s > _NOTICEABLE * delays.step_s
    if len(job.missing) != 1 or not waited.any():
        return delays
    late_s = np.where(waited, untraced.late_s + untraced.behind_s, 0.0)
    of_all = {}
    for channel, seconds in delays.of.items():
        own_s = typical_s(seconds) + (late_s if channel == "compute" else 0.0)
        of_all[channel] = np.column_stack([seconds, own_s])
    return replace(delays, of=of_all, ranks=(*job.ranks, *job.missing))


def untraced_note(untraced: UntracedWaits, job: TracedJob, *, step_s: float) -> str:
    """Return the known facts about untraced members of collectives, in a sentence."""
    is_one = len(job.missing) == 1
    who = f"rank{'' if is_one else 's'} {listed(job.missing)}, without a trace"
    bound = "times of collectives, and so of links, are upper bounds"
    late_s = float(np.median(untraced.late_s)) if len(untraced.late_s) else 0.0
    if late_s > _NOTICEABLE * step_s:
        whose = "it is probably a persistent straggler, and this is recorded as its delay"
        of_many = "a persistent straggler is probably among them, but which one cannot be told: no delay is recorded"
        return (
            f"warning: the traced ranks waited at least {format_seconds(late_s)} a step for {who}: "
            f"{whose if is_one else of_many}. Waiting that all collectives have alike cannot be told from slow "
            f"links: {bound}"
        )
    why = "" if untraced.is_comparable else "; no two collectives of a step are of one size, to tell them apart"
    return f"warning: {bound}: a persistent straggler among {who}, would look exactly like slow links{why}"


def _alike(matched: Matched, n_traced: Ints) -> list[list[list[int]]]:
    """Return the incomplete collectives by kind, group and approximate size: the rows of each place in the step."""
    of_group: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for row, each in enumerate(matched.collectives):
        if n_traced[row] < len(each.group):
            of_group[each.kind, each.group].append(row)
    found: list[dict[int, list[int]]] = []
    for rows in of_group.values():
        smallest = 0.0
        for row in sorted(rows, key=lambda row: matched.collectives[row].nbytes or 0):
            each = matched.collectives[row]
            if not smallest or (each.nbytes or 1) > _SAME_SIZE * smallest:
                smallest = each.nbytes or 1
                found.append(defaultdict(list))
            found[-1][each.place].append(row)
    return [[rows for _, rows in sorted(of_place.items())] for of_place in found]


def _nbytes(matched: Matched, rows: Sequence[int]) -> Floats:
    return np.array([matched.collectives[row].nbytes or 1.0 for row in rows])


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """The times of collectives of one kind, size and number of members.

    Args:
        kind: Such as `all_reduce`.
        nbytes: Bytes of the whole buffer; None if the traces do not show them.
        group: Members of one such group, in ascending order.
        between_nodes: Its members are on several machines.
        calls: Number of calls.
        seconds: From the arrival of the last member to the end; median over the calls.
        wait_share: Share of the members' time in these calls that is waiting for the last member.
        is_complete: All members were traced. If not, `seconds` is an upper bound.
    """

    kind: CollectiveKind
    nbytes: int | None
    group: tuple[int, ...]
    between_nodes: bool
    calls: int
    seconds: float
    wait_share: float
    is_complete: bool


def collective_times(
    matched: Matched, clocks: RankClocks, layout: RankLayout, untraced: UntracedWaits | None = None
) -> tuple[CollectiveTimes, ...]:
    """Return a row for each kind, size and number of members, in this order.

    Args:
        matched: Collectives of all traced ranks.
        clocks: Clocks of these ranks.
        layout: The nodes of ranks.
        untraced: The separated wait for untraced ranks; computed if None.
    """
    untraced = untraced or find_untraced_waits(matched, clocks)
    arrival_s = clocks.corrected_s(matched.arrival_s)
    end_s = clocks.corrected_s(matched.end_s)
    rows: dict[tuple[str, int, int, bool], list[int]] = defaultdict(list)
    for row, what in enumerate(matched.collectives):
        nbytes = -1 if what.nbytes is None else what.nbytes
        rows[what.kind, nbytes, len(what.group), layout.spans(what.group)].append(row)
    found = []
    for (_, _, size, spans), of in sorted(rows.items()):
        what = matched.collectives[of[0]]
        seen = np.isfinite(end_s[of])
        is_complete = bool((seen.sum(axis=1) == size).all())
        alone_s, wait_share = _times(arrival_s[of], end_s[of])
        seconds = float(np.median(alone_s if is_complete else untraced.alone_s[of]))
        found.append(
            CollectiveTimes(what.kind, what.nbytes, what.group, spans, len(of), seconds, wait_share, is_complete)
        )
    return tuple(found)


def of_last_members(
    times: tuple[CollectiveTimes, ...], matched: Matched, clocks: RankClocks
) -> tuple[CollectiveTimes, ...]:
    """Return the times of collectives that block their hosts, one after the other: as the last member takes.

    Members of gloo's rings and pairs end one after the other, and begin the next operation then. So a member that ends
    late comes last again, and the time until the others end is too short. The last member waits for no other, and its
    own time is what it adds to the step. It is the mean over the calls, because a step waits for all of each.
    """
    arrival_s = clocks.corrected_s(matched.arrival_s)
    last = np.nanargmax(arrival_s, axis=1)
    own_s = np.take_along_axis(matched.end_s - matched.arrival_s, last[:, None], axis=1)[:, 0]
    rows: dict[tuple[CollectiveKind, int | None, int], list[int]] = defaultdict(list)
    for row, what in enumerate(matched.collectives):
        rows[what.kind, what.nbytes, len(what.group)].append(row)
    found = []
    for each in times:
        seconds = float(own_s[rows[each.kind, each.nbytes, len(each.group)]].mean())
        found.append(replace(each, seconds=seconds) if each.is_complete else each)
    return tuple(found)


def on_shared_cores(
    times: tuple[CollectiveTimes, ...], matched: Matched, clocks: RankClocks
) -> tuple[CollectiveTimes, ...]:
    """Return the times of collectives that share cores with computing and overlap each other.

    Some collectives wait for a core while others use the links. Equal shares of the concurrent time ignore this, and so
    do medians. So the times of all collectives are scaled to add up to the time in which at least one was running, on
    each rank: collectives of two groups without a common member run at once, and do not share this time. Concurrent
    collectives of a rank do not get equal shares of the links either: if the largest took about as long as smaller
    ones, their total time is divided in proportion to their sizes.
    """
    start_s = np.nanmax(clocks.corrected_s(matched.start_s), axis=1)
    end_s = clocks.corrected_s(matched.end_s)
    takes_part = np.isfinite(end_s)
    ended_s = np.nanmedian(end_s, axis=1)
    busy_s = math.fsum(_together_s(start_s[rows], ended_s[rows]) for rows in takes_part.T)
    n_traced: dict[tuple[CollectiveKind, int | None, int], list[int]] = defaultdict(list)
    for what, n in zip(matched.collectives, takes_part.sum(axis=1).tolist(), strict=True):
        n_traced[what.kind, what.nbytes, len(what.group)].append(n)
    told_s = math.fsum(
        each.seconds * each.calls * float(np.mean(n_traced[each.kind, each.nbytes, len(each.group)])) for each in times
    )
    scaled = [replace(each, seconds=each.seconds * (busy_s / told_s)) for each in times if told_s]
    alike = [i for i, each in enumerate(times) if each.kind == "all_reduce" and each.nbytes and each.seconds][::-1]
    pooled = alike[:1]
    for smaller in alike[1:]:
        nbytes, seconds = (
            math.fsum(getattr(scaled[i], of) * times[i].calls for i in pooled) for of in ("nbytes", "seconds")
        )
        last = times[pooled[-1]].nbytes or 0
        small = times[smaller].nbytes or 0
        if 2 * scaled[smaller].seconds * nbytes < (last + small) * seconds:
            break
        pooled.append(smaller)
    if len(pooled) > 1:
        per_byte_s = math.fsum(scaled[i].seconds * times[i].calls for i in pooled)
        per_byte_s /= math.fsum((times[i].nbytes or 0) * times[i].calls for i in pooled)
        for i in pooled:
            scaled[i] = replace(scaled[i], seconds=per_byte_s * (times[i].nbytes or 0))
    return tuple(scaled) or times


def _together_s(start_s: Floats, end_s: Floats) -> float:
    """Return the seconds in which at least one of some collectives was running."""
    order = np.argsort(start_s)
    ended_s = np.maximum.accumulate(end_s[order])
    return float(np.maximum(0.0, ended_s - np.maximum(start_s[order], np.append(-np.inf, ended_s[:-1]))).sum())


def _times(arrival_s: Floats, end_s: Floats) -> tuple[Floats, float]:
    """Return the seconds of each call after its last member arrived, `[n_calls]`, and the share of waiting before."""
    last_s = np.nanmax(arrival_s, axis=1)
    alone_s = np.maximum(0.0, np.nanmedian(end_s, axis=1) - last_s)
    waited_s = float(np.nansum(last_s[:, None] - arrival_s))
    total_s = float(np.nansum(np.maximum(end_s - arrival_s, 0.0)))
    return alone_s, min(1.0, waited_s / total_s) if total_s > 0 else 0.0
