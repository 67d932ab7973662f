"""Uneven work: batches that take longer to compute than others, such as those with longer sequences.

The forward and the backward pass of such a batch take longer in the same proportion. The update does not depend on the
batch. A slow device does all three more slowly. Noise and pauses of the host lengthen one of them.

The *work* w[s, r] of rank r in step s is the smaller of two ratios: its forward pass over the median of all, and its
backward pass over the median of all. So a delay in one of the passes is not taken for work. If the update of a rank
usually takes longer than that of others, its device is slow, and the ratios are divided by that factor.

Work is uneven if it varies on most ranks, and both passes vary together: their logarithms have a rank correlation above
0.8, and forward passes explain less than half of it in updates.
"""

import math
from dataclasses import dataclass

import numpy as np

from simdist.profiles.estimates.base import LOW, Parts
from simdist.profiles.kineto.columns import Floats

_NOTABLE = 0.05  # of the typical work: smaller differences between the quartiles of a rank's steps are noise
_TOGETHER = 0.8  # correlation of forward and backward passes
_CONSTANT_S = 1e-9  # a profiler counts nanoseconds at best
_FEWEST = 5  # steps; in fewer, passes vary together by chance


@dataclass(frozen=True, slots=True)
class TracedWork:
    """Work that differs between steps and ranks.

    Args:
        work: Work of each step relative to the median, `[n_steps, n_ranks]`.
        seconds: Seconds of computing that the work takes beyond the least, a low quantile, `[n_steps, n_ranks]`.
    """

    work: Floats
    seconds: Floats

    @property
    def range(self) -> tuple[float, float]:
        """The 5th and the 95th percentile of the work of a step."""
        low, high = np.quantile(self.work, [LOW, 1 - LOW]).tolist()
        return low, high


def find_uneven_work(of: Parts) -> TracedWork | None:
    """Return the uneven work of a job; None if its work is even."""
    passes_s = of.forward_s, of.backward_s
    typical_s = [float(np.median(each)) for each in passes_s]
    if len(of.forward_s) < _FEWEST or min(typical_s) <= 0 or not all(each.all() for each in passes_s):
        return None
    forward, backward = (each / middle_s for each, middle_s in zip(passes_s, typical_s, strict=True))
    spread = np.subtract(*np.quantile(np.minimum(forward, backward), [0.75, 0.25], axis=0))
    if np.quantile(spread, 0.5, method="lower") <= _NOTABLE:
        return None
    together = _correlation(forward, backward)
    if together <= _TOGETHER or _correlation(forward, of.optimize_s) > together / 2:
        return None
    slow = _slow_devices(of.optimize_s)
    work = np.minimum(forward, backward) / slow
    least = float(np.quantile(work, LOW))
    return TracedWork(work, np.maximum(0.0, work - least) * slow * math.fsum(typical_s))


def _correlation(first: Floats, second: Floats) -> float:
    """Return the rank correlation of two quantities within ranks, `[n_steps, n_ranks]`; 0 if one is constant."""
    if np.ptp(first) <= _CONSTANT_S or np.ptp(second) <= _CONSTANT_S:
        return 0.0
    one, other = (each.argsort(axis=0).argsort(axis=0).ravel().astype(np.float64) for each in (first, second))
    return float(np.corrcoef(one, other)[0, 1])


def _slow_devices(update_s: Floats) -> Floats:
    """Return how many times as long each rank's updates usually take as those of a typical rank, at least 1."""
    usual_s = np.median(update_s, axis=0)
    typical_s = float(np.median(usual_s))
    return np.maximum(1.0, usual_s / typical_s) if typical_s > 0 else np.ones(len(usual_s))
