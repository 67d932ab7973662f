"""Stragglers in recorded delays: the rank, its steps, its channel, and its delay.

d[s, r] is the delay of rank r in step s. All medians are lower medians.

* *Persistent*: two conditions hold. The median over steps of d[:, r], minus that of the typical other rank, is above 3
  times the spread between the other ranks and above 3 % of a step. The median over steps of d[s, r] beyond the others
  in the same step is above the threshold of noise (`noise`).
* *Transient*: the smaller of two differences is above the threshold of noise (`noise`) and above 5 % of a step. The
  first is d[s, r] minus the rank's own median; for a rank that is not persistent, minus the median of the typical other
  rank if that is smaller. The second subtracts from it a low quartile of the same differences of the other ranks in
  this step, if that is positive: the part that most ranks have in common.
  Consecutive steps with similar delays are one burst.
* If all traced ranks of a node are late in the same way, the straggler is the node.

* *Growing*: d[s, r] minus the median of the other ranks in the same step follows a straight line that rises or falls by
  at least 3 % of a step (`recurring.trend`), as on a device that gets hotter. Its steps are those in which the line is
  above 3 % of a step. The line is subtracted before the other two kinds are searched for.
* *All at once*: the smallest of d[s, :] in a channel, which all ranks have in common, is above the threshold of noise
  and above 5 % of a step, and independent delays of ranks would not coincide so. These are not stragglers.

So a rank that is late in at most half of the steps has bursts of full size. A rank that is late in more steps is
persistently late by its full delay. Delays above 5 % of a step that noise explains are counted, not listed.

A rank that computes longer in nearly every step becomes a slower device in the scenario, not a rank with a delay. A
delay is one block before the forward pass. After it, gradients become ready as fast as on any other rank, and their
collectives queue. On a slow device every layer takes longer, so more of the communication overlaps.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simdist.plan.ops import Channel
from simdist.profiles.estimates.base import typical_s
from simdist.profiles.estimates.noise import (
    FALSE_ALARM,
    USUALLY,
    beyond_others_s,
    by_chance_usually_s,
    late_once,
    lower_median_s,
    told_from_s,
)
from simdist.profiles.estimates.places import Place, Places
from simdist.profiles.estimates.recurring import period, trend
from simdist.profiles.job.layout import RankLayout
from simdist.profiles.kineto.columns import Floats
from simdist.scenario.cluster import DeviceOverride
from simdist.settings.base import listed, plural

_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
_SPREADS = 3.0
# Shares of a step; smaller delays change no decision.
_PERSISTENT_SHARE = 0.03
_TRANSIENT_SHARE = 0.05
_NEARLY = 0.9  # of the steps
_ALIKE = 0.7  # of the largest: delays below this share are listed apart from it
_NODE_TOLERANCE = 0.5  # sizes on the ranks of a node differ by less than this share if the node is the cause


@dataclass(frozen=True, slots=True)
class Straggler:
    """The late rank or node.

    Args:
        kind: Late in most steps, or in some.
        ranks: The rank, or the ranks of the node, in ascending order.
        node: The node, if all of its traced ranks are late.
        channel: Channel of the delay.
        steps: Steps in ascending order; the steps of a burst are consecutive.
        seconds: Excess over a typical rank in each of these steps. It is the difference of medians for a persistent
            straggler, and the mean for a burst or a growing one.
        growth_s: Growth per step, in seconds; 0 unless the delay grows or shrinks steadily.
        place: Part of the step; None if the traces do not show it.
    """

    kind: Literal["persistent", "transient"]
    ranks: tuple[int, ...]
    node: int | None
    channel: Channel
    steps: tuple[int, ...]
    seconds: float
    growth_s: float = 0.0
    place: Place | None = None

    @property
    def who(self) -> str:
        """The rank or the node, in words."""
        return f"rank {self.ranks[0]}" if self.node is None else f"node {self.node} (ranks {listed(self.ranks)})"

    @property
    def step_seconds(self) -> Floats:
        """Seconds in each of its steps, `[n_steps]`."""
        steps = np.array(self.steps, np.float64)
        return np.asarray(self.seconds + self.growth_s * (steps - steps.mean()))

    def when(self, n_steps: int) -> str:
        """Return the steps, in words."""
        is_run = self.steps[-1] - self.steps[0] + 1 == len(self.steps)
        if self.kind == "persistent" and len(self.steps) == n_steps:
            return "every step"
        if self.kind == "persistent" and not is_run:
            return f"{len(self.steps)} of {n_steps} steps"
        return f"{plural(len(self.steps), 'step')} {listed(self.steps)}"


@dataclass(frozen=True, slots=True)
class Repeated:
    """Delays of the same ranks in the same place.

    Args:
        each: The stragglers, in the order of their steps.
    """

    each: tuple[Straggler, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """All steps, in ascending order."""
        return tuple(sorted(step for straggler in self.each for step in straggler.steps))

    @property
    def seconds(self) -> float:
        """The mean delay of a step."""
        sizes_s = [straggler.seconds for straggler in self.each for _ in straggler.steps]
        return float(np.mean(sizes_s))

    @property
    def every(self) -> float | None:
        """Steps from one delay to the next, if the distances are about equal."""
        return period([straggler.steps[0] for straggler in self.each])


@dataclass(frozen=True, slots=True)
class CommonDelay:
    """A delay of all traced ranks in the same steps. No rank waits for another, so no rank is a straggler.

    Args:
        channel: Channel of the delay.
        steps: In ascending order.
        seconds: The mean over these steps and all ranks.
        place: Part of the step; None if the traces do not show it.
    """

    channel: Channel
    steps: tuple[int, ...]
    seconds: float
    place: Place | None = None

    @property
    def every(self) -> float | None:
        """Steps from one delay to the next, if the distances are about equal."""
        return period(self.steps)


@dataclass(frozen=True, slots=True)
class DelayTable:
    """Delays of ranks in steps.

    Args:
        of: Channel -> seconds, `[n_steps, n_ranks]`.
        ranks: Rank of each column.
        steps: Number of each row's step.
        step_s: A typical step.
    """

    of: dict[Channel, Floats]
    ranks: Sequence[int]
    steps: Sequence[int]
    step_s: float

    def cells(self, straggler: Straggler) -> tuple[NDArray[np.intp], ...]:
        """Return the index of the delays of a straggler."""
        rows = [self.steps.index(step) for step in straggler.steps]
        return np.ix_(rows, [self.ranks.index(rank) for rank in straggler.ranks])


@dataclass(frozen=True, slots=True)
class Noise:
    """Noticeable delays of single ranks and steps that do not count as stragglers, because noise explains them.

    Args:
        count: Number of pairs of rank and step.
        seconds: Their sum.
        told_from_s: Channel with such delays -> the smallest further delay that would be told from them, beside the
            stragglers; infinite if none would.
    """

    count: int
    seconds: float
    told_from_s: dict[Channel, float]


def find_stragglers(delays: DelayTable, layout: RankLayout) -> tuple[Straggler, ...]:
    """Return the stragglers, persistent ones first, each kind by size; of equal size, longer bursts first."""
    found: list[Straggler] = []
    for channel in delays.of:
        found += _by_node(_growing(delays, channel), delays.ranks, layout)
    steady = replace(delays, of=without(delays, found))
    usual_of = {channel: _persistent(steady, channel) for channel in steady.of}
    more_of = {channel: _more_s(steady.of[channel], _columns(steady, usual)) for channel, usual in usual_of.items()}
    n_noticeable = sum(bool((more_s.min(axis=0) > _least_s(steady)).any()) for more_s in more_of.values())
    for channel, usual in usual_of.items():
        bursts = _transient(steady, channel, more_of[channel], alarm=(FALSE_ALARM - USUALLY) / max(1, n_noticeable))
        found += [*_by_node(usual, delays.ranks, layout), *_by_node(bursts, delays.ranks, layout)]
    return tuple(sorted(found, key=lambda each: _importance(each, delays.step_s)))


def find_common(delays: DelayTable) -> tuple[CommonDelay, ...]:
    """Return the delays that all traced ranks have in the same steps, the largest first."""
    found = []
    for channel, delay_s in delays.of.items():
        if delay_s.shape[1] < 2:
            continue
        least_s = delay_s.min(axis=1)
        least_s = least_s - np.median(least_s)
        is_late = late_once(least_s[:, None], alarm=FALSE_ALARM / len(delays.of))[:, 0] & (least_s > _least_s(delays))
        rows = np.flatnonzero(is_late)
        rows = rows[_coincidences(delay_s, rows) <= FALSE_ALARM / len(delays.of)]
        if len(rows):
            steps = tuple(delays.steps[row] for row in rows.tolist())
            found.append(CommonDelay(channel, steps, float(delay_s[rows].mean())))
    return tuple(sorted(found, key=lambda each: -each.seconds * len(each.steps)))


def _coincidences(delay_s: Floats, rows: NDArray[np.intp]) -> Floats:
    """Return how many steps would have a delay on all ranks by chance as large as in some rows, `[n_rows]`.

    Delays of ranks are taken to be independent. Each rank has one in the share of the other steps in which it is as
    late, plus half a step.
    """
    others_s = np.delete(delay_s, rows, axis=0)
    least_s = delay_s[rows].min(axis=1)
    n_late = (others_s >= least_s[:, None, None]).sum(axis=1)
    return np.asarray(len(delay_s) * ((n_late + 0.5) / (len(others_s) + 1)).prod(axis=1))


def with_places(stragglers: Sequence[Straggler], places: Places) -> tuple[Straggler, ...]:
    """Return the stragglers with their places in the step."""
    return tuple(replace(each, place=places.find(each.channel, each.ranks, each.steps)) for each in stragglers)


def repeated(stragglers: Sequence[Straggler]) -> tuple[Repeated, ...]:
    """Combine transient stragglers of the same ranks in the same place, of about the same size; the largest first."""
    groups: list[list[Straggler]] = []
    for each in stragglers:
        alike = (group for group in groups if _is_like(each, group[0]))
        group = next(alike, None)
        if group is None:
            groups.append([each])
        else:
            group.append(each)
    return tuple(Repeated(tuple(sorted(group, key=lambda each: each.steps))) for group in groups)


def _is_like(each: Straggler, first: Straggler) -> bool:
    if "persistent" in (each.kind, first.kind):
        return False
    is_same = (each.ranks, each.channel, each.place) == (first.ranks, first.channel, first.place)
    return is_same and each.seconds >= _ALIKE * first.seconds


def noise_of(delays: DelayTable, stragglers: Sequence[Straggler]) -> Noise:
    """Return the noticeable delays that do not belong to stragglers."""
    count = 0
    seconds = 0.0
    from_s: dict[Channel, float] = {}
    steady = without(delays, [each for each in stragglers if each.growth_s])
    for channel, delay_s in steady.items():
        own = [each for each in stragglers if each.channel == channel and not each.growth_s]
        usual = _columns(delays, [each for each in own if each.kind == "persistent"])
        more_s = _more_s(delay_s, usual).min(axis=0)
        is_late = np.zeros(more_s.shape, np.bool_)
        for each in own:
            if each.kind == "transient":
                is_late[delays.cells(each)] = True
        noise_s = more_s[~is_late]
        noticeable_s = noise_s[noise_s > _least_s(delays)]
        count = count + len(noticeable_s)
        seconds = seconds + float(noticeable_s.sum())
        if len(noticeable_s):
            from_s[channel] = told_from_s(noise_s, more_s[is_late], alarm=FALSE_ALARM - USUALLY)
    return Noise(count, seconds, from_s)


def without(delays: DelayTable, stragglers: Sequence[Straggler]) -> dict[Channel, Floats]:
    """Return the delays as they would be if the stragglers were typical ranks."""
    kept = {channel: seconds.copy() for channel, seconds in delays.of.items()}
    for each in stragglers:
        kept[each.channel][delays.cells(each)] -= each.step_seconds[:, None]
    return {channel: np.maximum(0.0, seconds) for channel, seconds in kept.items()}


def without_common(
    of: dict[Channel, Floats], common: Sequence[CommonDelay], steps: Sequence[int]
) -> dict[Channel, Floats]:
    """Return delays `[n_steps, n_ranks]` without the part that all ranks have at once."""
    kept = {channel: seconds.copy() for channel, seconds in of.items()}
    for each in common:
        rows = [steps.index(step) for step in each.steps]
        least_s = kept[each.channel].min(axis=1, keepdims=True)
        kept[each.channel][rows] -= np.maximum(0.0, least_s - np.median(least_s))[rows]
    return kept


def _importance(each: Straggler, step_s: float) -> tuple[str, float, int, tuple[int, ...], tuple[int, ...]]:
    per_cent = round(100 * each.seconds / step_s) if step_s else 0
    return each.kind, -per_cent, -len(each.steps), each.ranks, each.steps


def _growing(delays: DelayTable, channel: Channel) -> list[Straggler]:
    """Return the ranks with steadily growing or shrinking delays; their steps are those with a noticeable delay."""
    delay_s = delays.of[channel]
    least_s = _PERSISTENT_SHARE * delays.step_s
    n_ranks = delay_s.shape[1]
    if n_ranks < 2:
        return []
    found = []
    for column in range(n_ranks):
        more_s = delay_s[:, column] - lower_median_s(np.delete(delay_s, column, axis=1), axis=1)
        drift = trend(more_s, least_s=least_s, alarm=USUALLY / len(delays.of) / n_ranks)
        if drift is None:
            continue
        rows = np.flatnonzero(drift.line_s > least_s)
        if len(rows):
            steps = tuple(delays.steps[row] for row in rows.tolist())
            seconds = float(drift.line_s[rows].mean())
            found.append(
                Straggler("persistent", (delays.ranks[column],), None, channel, steps, seconds, drift.growth_s)
            )
    return found


def _persistent(delays: DelayTable, channel: Channel) -> list[Straggler]:
    """Return the ranks that are late in most steps; their steps have at least half of the usual delay."""
    delay_s = delays.of[channel]
    usual_s = lower_median_s(delay_s)
    found = []
    if len(usual_s) < 2:
        return []
    usually_beyond_s = lower_median_s(beyond_others_s(delay_s))
    by_chance_s = by_chance_usually_s(delay_s)
    for column in range(len(usual_s)):
        others_s = np.delete(usual_s, column)
        late_s = float(usual_s[column] - lower_median_s(others_s))
        is_usual = usually_beyond_s[column] > by_chance_s
        spread_s = _NORMAL * float(np.median(np.abs(others_s - np.median(others_s))))
        if is_usual and late_s > max(_SPREADS * spread_s, _PERSISTENT_SHARE * delays.step_s):
            more_s = delay_s[:, column] - lower_median_s(np.delete(delay_s, column, axis=1), axis=1)
            steps = tuple(delays.steps[row] for row in np.flatnonzero(more_s >= late_s / 2).tolist())
            found.append(Straggler("persistent", (delays.ranks[column],), None, channel, steps, late_s))
    return found


def _more_s(delay_s: Floats, persistent: Sequence[int]) -> Floats:
    """Return the excess of ranks over their usual delay, and its part beyond the typical other rank.

    Args:
        delay_s: Delays `[n_steps, n_ranks]`.
        persistent: Persistent ranks (as indices), for which their own usual delay is subtracted.

    Returns:
        Both, `[2, n_steps, n_ranks]`.
    """
    usual_s = lower_median_s(delay_s)
    n_ranks = len(usual_s)
    for column in sorted(set(range(n_ranks)) - set(persistent)) if n_ranks > 1 else ():
        usual_s[column] = min(usual_s[column], lower_median_s(np.delete(usual_s, column)))
    own_s = delay_s - usual_s
    return np.stack([own_s, own_s - _of_others_s(own_s)])


def _columns(delays: DelayTable, stragglers: Sequence[Straggler]) -> list[int]:
    return [delays.ranks.index(rank) for each in stragglers for rank in each.ranks]


def _least_s(delays: DelayTable) -> float:
    return _TRANSIENT_SHARE * delays.step_s


def _transient(delays: DelayTable, channel: Channel, more_s: Floats, *, alarm: float) -> list[Straggler]:
    """Return the bursts of all ranks."""
    own_s, beyond_s = more_s
    single_s = more_s.min(axis=0)
    is_late = late_once(single_s, alarm=alarm) & (single_s > _least_s(delays))
    is_late &= is_late.mean(axis=0) < _NEARLY  # what comes in nearly every step is not transient: see `_persistent`
    found = []
    for column in range(own_s.shape[1]):
        for rows in _bursts(np.flatnonzero(is_late[:, column]).tolist(), beyond_s[:, column]):
            steps = tuple(delays.steps[row] for row in rows)
            seconds = float(beyond_s[rows, column].mean())
            found.append(Straggler("transient", (delays.ranks[column],), None, channel, steps, seconds))
    return found


def _bursts(late: Sequence[int], beyond_s: Floats) -> Iterator[list[int]]:
    """Yield runs of consecutive late steps, without steps that are less than half as late as the latest of the run."""
    for _, run in groupby(enumerate(late), key=lambda item: item[1] - item[0]):
        rows = [row for _, row in run]
        half_s = beyond_s[rows].max() / 2
        yield from (list(part) for _, part in groupby(rows, key=lambda row: bool(beyond_s[row] >= half_s)))


def _of_others_s(own_s: Floats) -> Floats:
    """Return a low quartile of the other ranks for each rank and step; 0 if it is negative or there are none.

    The median of few ranks has nearly as much noise as each of them, which would hide a delay in twice the noise.
    """
    n_ranks = own_s.shape[1]
    if n_ranks == 1:
        return np.zeros_like(own_s)
    others = [typical_s(np.delete(own_s, rank, axis=1)) for rank in range(n_ranks)]
    return np.maximum(0.0, np.stack(others, axis=1))


def _by_node(found: list[Straggler], ranks: Sequence[int], layout: RankLayout) -> list[Straggler]:
    """Combine delays that all traced ranks of a node have in the same steps, with similar sizes."""
    traced: dict[int, set[int]] = defaultdict(set)
    for rank in ranks:
        traced[layout.node(rank)].add(rank)
    alike: dict[tuple[int, tuple[int, ...]], list[Straggler]] = defaultdict(list)
    for each in found:
        alike[layout.node(each.ranks[0]), each.steps if each.kind == "transient" else ()].append(each)
    merged: list[Straggler] = []
    for (node, _), of in alike.items():
        sizes_s = [each.seconds for each in of]
        is_node = len(of) == len(traced[node]) > 1 and min(sizes_s) > _NODE_TOLERANCE * max(sizes_s)
        if not is_node or len(traced) == 1:
            merged += of
            continue
        members = tuple(sorted(each.ranks[0] for each in of))
        steps = tuple(sorted({step for each in of for step in each.steps}))
        growth_s = float(np.median([each.growth_s for each in of]))
        merged.append(Straggler(of[0].kind, members, node, of[0].channel, steps, float(np.median(sizes_s)), growth_s))
    return merged


def slow_throughout(stragglers: Sequence[Straggler], n_steps: int) -> tuple[Straggler, ...]:
    """Return the stragglers with longer computing in nearly every step."""
    return tuple(
        each
        for each in stragglers
        if each.kind == "persistent" and each.channel == "compute" and len(each.steps) >= _NEARLY * n_steps
        if not each.growth_s
    )


def slow_devices(slow: Sequence[Straggler], computing_s: float) -> tuple[DeviceOverride, ...]:
    """Return slow devices for stragglers that are late because they compute longer.

    Args:
        slow: Stragglers that are slow in all steps.
        computing_s: Computation of an undisturbed step, including the delay that the host always causes.
    """
    if computing_s <= 0:
        return ()
    speeds = ((each.ranks, computing_s / (computing_s + each.seconds)) for each in slow)
    return tuple(DeviceOverride(ranks=ranks, speed=round(speed, 6)) for ranks, speed in speeds)
