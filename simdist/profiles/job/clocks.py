"""Clocks of ranks, brought together: a collective in which all hear from all ends everywhere at about the same time."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.job.matching import Matched
from simdist.profiles.steps.model import Kind

_TOGETHER: tuple[Kind, ...] = ("all_reduce", "all_gather")  # nobody is done before everybody has come
_FEWEST = 9  # calls that show a drift
_LEAST_DRIFT_S = 100e-6  # over the whole trace; less is none


@dataclass(frozen=True, slots=True)
class Clocks:
    """What must be taken off a rank's times to have them on the first rank's clock.

    Args:
        offset_s: At time `zero_s`, `[n_traced_ranks]`.
        drift: Seconds more per second, likewise.
        zero_s: On each rank's own clock, likewise.
        residual_s: The ends of one collective still differ by, in the median.
        apart_s: How far each rank's ends of collectives still are from those of the other ranks, in the median,
            `[n_traced_ranks]`; 0 for a rank without others.
        unknown: Ranks (as indices) that share no collective with the others: they have their own clock.
    """

    offset_s: NDArray[np.float64]
    drift: NDArray[np.float64]
    zero_s: NDArray[np.float64]
    residual_s: float
    apart_s: NDArray[np.float64]
    unknown: tuple[int, ...]

    @property
    def skew_s(self) -> float:
        """The largest difference between two clocks."""
        return float(np.ptp(self.offset_s))

    def corrected_s(self, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return times of all ranks, `[..., n_traced_ranks]`, on the first rank's clock."""
        return np.asarray(at_s - self.offset_s - self.drift * (at_s - self.zero_s))


def synchronize(matched: Matched) -> Clocks:
    """Find the skew of all clocks, and their drift where there is one."""
    together = [each.kind in _TOGETHER for each in matched.what]
    end_s = matched.end_s[together]
    n_ranks = matched.end_s.shape[1]
    offset_s, drift, zero_s = np.zeros(n_ranks), np.zeros(n_ranks), np.zeros(n_ranks)
    known = {0}
    corrected_s = end_s.copy()
    for rank, reference_s in _reachable(end_s, corrected_s, known):
        offset_s[rank], drift[rank], zero_s[rank] = _difference(end_s[:, rank], reference_s)
        own_s = end_s[:, rank]
        corrected_s[:, rank] = own_s - offset_s[rank] - drift[rank] * (own_s - zero_s[rank])
    unknown = tuple(sorted(set(range(n_ranks)) - known))
    residual_s = _residual_s(corrected_s[:, sorted(known)])
    return Clocks(offset_s, drift, zero_s, residual_s, _apart_s(corrected_s), unknown)


def _reachable(
    end_s: NDArray[np.float64], corrected_s: NDArray[np.float64], known: set[int]
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield a rank that shares collectives with known ones, and their ends there; the caller corrects it."""
    waiting = list(range(1, end_s.shape[1]))
    while waiting:
        for rank in waiting:
            first = np.full(len(end_s), np.nan)
            for other in sorted(known, reverse=True):  # the first known member counts
                first = np.where(np.isnan(corrected_s[:, other]), first, corrected_s[:, other])
            if np.isfinite(first - end_s[:, rank]).any():
                break
        else:
            return
        waiting.remove(rank)
        yield rank, first
        known.add(rank)


def _difference(own_s: NDArray[np.float64], reference_s: NDArray[np.float64]) -> tuple[float, float, float]:
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


def _residual_s(corrected_s: NDArray[np.float64]) -> float:
    shared = np.isfinite(corrected_s).sum(axis=1) > 1
    if not shared.any():
        return 0.0
    spread_s = np.nanmax(corrected_s[shared], axis=1) - np.nanmin(corrected_s[shared], axis=1)
    return float(np.median(spread_s))


def _apart_s(corrected_s: NDArray[np.float64]) -> NDArray[np.float64]:
    n_ranks = corrected_s.shape[1]
    shared = np.isfinite(corrected_s).sum(axis=1) > 1
    apart_s = np.zeros(n_ranks)
    for rank in range(n_ranks):
        own_s = corrected_s[shared & np.isfinite(corrected_s[:, rank])]
        if len(own_s):
            others_s = np.nanmedian(np.delete(own_s, rank, axis=1), axis=1)
            apart_s[rank] = np.median(np.abs(own_s[:, rank] - others_s))
    return apart_s
