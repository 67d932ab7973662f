"""How long collectives took without the waiting for those that came late."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.job.clocks import Clocks
from simdist.profiles.job.layout import Layout
from simdist.profiles.job.matching import Matched
from simdist.profiles.job.untraced_ranks import Unseen, find_unseen
from simdist.profiles.steps.model import Kind


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """What collectives of one kind, size and number of members took.

    Args:
        kind: Such as `all_reduce`.
        nbytes: Of the whole buffer; None if the traces do not tell.
        group: Members of one of the groups, in ascending order.
        between_nodes: Whether its members are on several machines.
        calls: How many.
        seconds: From when the last member came until it was done; median over the calls.
        wait_share: Share of waiting for the last one in all the time that members spent in these calls.
        is_complete: Whether all members were traced; if not, the last one to come may not have been seen, and
            `seconds` is an upper bound: see `unseen`.
    """

    kind: Kind
    nbytes: int | None
    group: tuple[int, ...]
    between_nodes: bool
    calls: int
    seconds: float
    wait_share: float
    is_complete: bool


def collective_times(
    matched: Matched, clocks: Clocks, layout: Layout, unseen: Unseen | None = None
) -> tuple[CollectiveTimes, ...]:
    """Return a row for each kind, size and number of members, by these.

    Args:
        matched: Collectives of all traced ranks.
        clocks: Of these ranks.
        layout: Which ranks share a node.
        unseen: What waiting for ranks without a trace was told apart; found out if None.
    """
    unseen = unseen or find_unseen(matched, clocks)
    arrival_s, end_s = clocks.corrected_s(matched.arrival_s), clocks.corrected_s(matched.end_s)
    rows: dict[tuple[str, int, int, bool], list[int]] = defaultdict(list)
    for row, what in enumerate(matched.what):
        nbytes = -1 if what.nbytes is None else what.nbytes
        rows[what.kind, nbytes, len(what.group), layout.spans(what.group)].append(row)
    found = []
    for (_, _, size, spans), of in sorted(rows.items()):
        what = matched.what[of[0]]
        seen = np.isfinite(end_s[of])
        is_complete = bool((seen.sum(axis=1) == size).all())
        alone_s, wait_share = _times(arrival_s[of], end_s[of])
        seconds = float(np.median(alone_s if is_complete else unseen.alone_s[of]))
        found.append(
            CollectiveTimes(what.kind, what.nbytes, what.group, spans, len(of), seconds, wait_share, is_complete)
        )
    return tuple(found)


def _times(arrival_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return the seconds of each call from when its last member came, `[n_calls]`, and the share of waiting before."""
    last_s = np.nanmax(arrival_s, axis=1)
    alone_s = np.maximum(0.0, np.nanmedian(end_s, axis=1) - last_s)
    waited_s = float(np.nansum(last_s[:, None] - arrival_s))
    total_s = float(np.nansum(np.maximum(end_s - arrival_s, 0.0)))
    return alone_s, min(1.0, waited_s / total_s) if total_s > 0 else 0.0
