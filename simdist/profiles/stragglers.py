"""Stragglers in recorded delays: who was late, when, on what, and by how much.

All thresholds are on delays in seconds. With d[s, r] the delay of rank r in step s:

* *Persistent*: the median over steps of d[:, r], less that of the typical other rank, is above 3 times the spread
  between the other ranks and 3 % of a step.
* *Transient*: d[s, r] less the rank's own median, less what the typical other rank has in the same step, and d[s, r]
  less the rank's own median by itself, are above 5 times the spread of all delays and 5 % of a step. Steps that follow
  one another are one burst.
* Where all traced ranks of a node are late in the same way, it is the node.

Spreads are median absolute deviations, scaled to the standard deviation of a normal distribution.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simdist.plan.ops import Channel
from simdist.profiles.layout import Layout
from simdist.profiles.notes import listed

__all__ = ["Straggler", "find_stragglers", "without"]

_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
_PERSISTENT_SPREADS, _PERSISTENT_SHARE = 3.0, 0.03
_TRANSIENT_SPREADS, _TRANSIENT_SHARE = 5.0, 0.05
_NODE_TOLERANCE = 0.5  # sizes on the ranks of a node differ by less than this share, if the node is the cause


@dataclass(frozen=True, slots=True)
class Straggler:
    """Who is late.

    Args:
        kind: In most steps, or in some.
        ranks: The rank, or those of the node, in ascending order.
        node: If all of its traced ranks are late.
        channel: On what.
        steps: Their numbers, in ascending order; those of a burst follow one another.
        seconds: In each of these steps, more than a typical rank.
    """

    kind: Literal["persistent", "transient"]
    ranks: tuple[int, ...]
    node: int | None
    channel: Channel
    steps: tuple[int, ...]
    seconds: float

    @property
    def who(self) -> str:
        """The rank or the node, in words."""
        return f"rank {self.ranks[0]}" if self.node is None else f"node {self.node} (ranks {listed(self.ranks)})"

    def when(self, n_steps: int) -> str:
        """Return the steps, in words.

        Args:
            n_steps: That were traced.
        """
        if len(self.steps) == n_steps and self.kind == "persistent":
            return "every step"
        if self.kind == "persistent":
            return f"{len(self.steps)} of {n_steps} steps"
        return f"step{'s' * (len(self.steps) > 1)} {listed(self.steps)}"


def find_stragglers(
    excess: dict[Channel, NDArray[np.float64]],
    *,
    step_s: float,
    ranks: Sequence[int],
    numbers: Sequence[int],
    layout: Layout,
) -> tuple[Straggler, ...]:
    """Return who is late: those in every step first, then by size.

    Args:
        excess: Channel -> delays, `[n_steps, n_traced_ranks]`.
        step_s: A typical step.
        ranks: Of the columns.
        numbers: Of the steps.
        layout: Which ranks share a node.
    """
    found: list[Straggler] = []
    for channel, delay_s in excess.items():
        found += _by_node(_persistent(delay_s, step_s, channel, ranks, numbers), ranks, layout)
        found += _by_node(_transient(delay_s, step_s, channel, ranks, numbers), ranks, layout)
    return tuple(sorted(found, key=lambda each: (each.kind, -_total_s(each), each.ranks, each.steps)))


def without(
    excess: dict[Channel, NDArray[np.float64]],
    stragglers: Sequence[Straggler],
    *,
    ranks: Sequence[int],
    numbers: Sequence[int],
) -> dict[Channel, NDArray[np.float64]]:
    """Return the delays as they would be if the stragglers were typical ranks."""
    kept = {channel: seconds.copy() for channel, seconds in excess.items()}
    for each in stragglers:
        rows, columns = [numbers.index(step) for step in each.steps], [ranks.index(rank) for rank in each.ranks]
        kept[each.channel][np.ix_(rows, columns)] -= each.seconds
    return {channel: np.maximum(0.0, seconds) for channel, seconds in kept.items()}


def _total_s(straggler: Straggler) -> float:
    return straggler.seconds * len(straggler.steps)


def _persistent(
    delay_s: NDArray[np.float64], step_s: float, channel: Channel, ranks: Sequence[int], numbers: Sequence[int]
) -> list[Straggler]:
    """Return the ranks that are late in most steps; their steps are those in which they are by half of it or more."""
    usual_s = np.median(delay_s, axis=0)
    found = []
    for column in range(len(usual_s)) if len(usual_s) > 1 else ():
        others_s = np.delete(usual_s, column)
        late_s = float(usual_s[column] - _typical_s(others_s))
        if late_s > max(_PERSISTENT_SPREADS * _spread_s(others_s), _PERSISTENT_SHARE * step_s):
            more_s = delay_s[:, column] - _typical_s(np.delete(delay_s, column, axis=1), axis=1)
            steps = tuple(numbers[row] for row in np.flatnonzero(more_s >= late_s / 2).tolist())
            found.append(Straggler("persistent", (ranks[column],), None, channel, steps, late_s))
    return found


def _transient(
    delay_s: NDArray[np.float64], step_s: float, channel: Channel, ranks: Sequence[int], numbers: Sequence[int]
) -> list[Straggler]:
    """Return the bursts of all ranks."""
    own_s = delay_s - np.median(delay_s, axis=0)
    least_s = max(_TRANSIENT_SPREADS * _spread_s(own_s), _TRANSIENT_SHARE * step_s)
    more_s = own_s - _of_others_s(own_s)
    found = []
    for column in range(delay_s.shape[1]):
        late = np.flatnonzero((own_s[:, column] > least_s) & (more_s[:, column] > least_s))
        for _, run in groupby(enumerate(late.tolist()), key=lambda item: item[1] - item[0]):
            rows = [row for _, row in run]
            steps, seconds = tuple(numbers[row] for row in rows), float(more_s[rows, column].mean())
            found.append(Straggler("transient", (ranks[column],), None, channel, steps, seconds))
    return found


def _of_others_s(own_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for every rank and step the median of the other ranks, 0 if there are none or it is below."""
    n_ranks = own_s.shape[1]
    if n_ranks == 1:
        return np.zeros_like(own_s)
    others = [_typical_s(np.delete(own_s, rank, axis=1), axis=1) for rank in range(n_ranks)]
    return np.maximum(0.0, np.stack(others, axis=1))


def _typical_s(of_ranks_s: NDArray[np.float64], *, axis: int = 0) -> NDArray[np.float64]:
    """Return the median over ranks; of an even number the lower one, since what is typical is not to be late."""
    return np.asarray(np.quantile(of_ranks_s, 0.5, axis=axis, method="lower"))


def _spread_s(seconds: NDArray[np.float64]) -> float:
    return _NORMAL * float(np.median(np.abs(seconds - np.median(seconds))))


def _by_node(found: list[Straggler], ranks: Sequence[int], layout: Layout) -> list[Straggler]:
    """Put together what all traced ranks of a node have in common: the same steps, and sizes alike."""
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
        merged.append(Straggler(of[0].kind, members, node, of[0].channel, steps, float(np.median(sizes_s))))
    return merged
