"""MSTopK: bisect a threshold, take what reaches it, and fill up with a stretch of those that nearly do.

**The definition.** The threshold of the paper is mean + ratio (max - mean), and N bisections move the ratio through
[0, 1]. The ratio of an entry is its *height*, here in units of 2^-N, so all thresholds that N bisections can try are
the whole numbers below 2^N; what lies between two of them is a *level*. N bisections find the level of the k-th largest
entry: fewer than k entries stand on higher levels, at least k on it or higher. All of the former are taken, and the
rest is a contiguous stretch, from a random place on, of the entries on that level.

**The paper's gaps.** Its thresholds lie in [mean, max], so more entries than reach the mean (42 % of a normal
distribution) cannot be bracketed; here levels go on below, 2^N of them from the mean down to 0. The first bracket holds
the k-th largest whatever the vector is, so constant vectors, many ties and a threshold that is never met need no
special case.

**Several bisections at once.** The levels are numbers of N + 1 binary digits, and a bisection finds one digit of one of
them, the k-th largest's. To count the entries by their next b digits is to try 2^b thresholds in one read, which gives
exactly what b bisections give.

**Few reads.** Cut the vector into groups. If k groups have a maximum that reaches t, then k entries reach t, so the
k-th largest is among the entries that reach t: a few more than k if the groups are small against 1 / density. The
maxima are found in the read that yields mean and maximum, and only groups whose maximum reaches t, or the foot of the
level of t, are read again. All digits are then counted on what reaches it. `real.kernels.topk.mstopk_cpu` and
`real.kernels.triton_mstopk` do that; `bisect` reads the vector N times, as published. All three select the same.
"""

import torch
from torch import Tensor

from real.kernels.topk import mstopk_cpu
from real.kernels.topk.heights import Scale, heights
from real.kernels.topk.parts import can_use_triton, finite_magnitudes, take, uniform

_N_BISECTIONS = 20  # recall of at least 0.9999 at densities of 0.001 and 0.01


def mstopk(
    values: Tensor, k: int, generator: torch.Generator | None = None, *, n_bisections: int = _N_BISECTIONS
) -> Tensor:
    """Return k positions of nearly the largest magnitudes, in the way that is fastest on the device of `values`.

    Args:
        values: Floating point `[count]`.
        k: More than 0 and less than `count`.
        generator: Draws where the stretch begins.
        n_bisections: From 1 to 23, for a float32 has 24 digits. At 10 to 15, 20 the recall of a normal distribution is
            0.96, 0.999 and 0.9999.

    Returns:
        int32 or int64 `[k]`, all different, in no special order.

    Source: Shi et al., MLSys 2021, arXiv 2010.10458, algorithm 1.
    """
    drawn = uniform(generator, values.device)
    if values.device.type == "cpu":
        return mstopk_cpu.mstopk(values, k, drawn.item(), n_bisections=n_bisections)
    if can_use_triton(values):
        from real.kernels import triton_mstopk  # takes a second, and a GPU to be of use

        return triton_mstopk.mstopk(values, k, drawn, n_bisections=n_bisections)
    return bisect(values, k, drawn, n_bisections=n_bisections)


def bisect(values: Tensor, k: int, drawn: Tensor, *, n_bisections: int) -> Tensor:
    """Return what `mstopk` does, by counting what reaches one threshold after the other, on any device.

    Args:
        values: As for `mstopk`, like `k` and `n_bisections`.
        k: How many.
        drawn: Where the stretch begins, from 0 to 1; float64 `[]` on the same device.
        n_bisections: How many thresholds to try between mean and maximum, or mean and 0.
    """
    magnitudes = finite_magnitudes(values)
    mean = magnitudes.sum(dtype=torch.float64) / magnitudes.numel()
    entries = heights(magnitudes, Scale.of(mean, magnitudes.max(), n_bisections))
    top = torch.full((), 2.0**n_bisections, dtype=entries.dtype, device=entries.device)  # which none reaches
    zero = torch.zeros_like(top)
    mean_reached = (entries >= zero).sum() >= k
    lower, upper = torch.where(mean_reached, zero, -top), torch.where(mean_reached, top, zero)
    for _ in range(n_bisections):
        threshold = (lower + upper) / 2
        is_upper = (entries >= threshold).sum() <= k
        upper = torch.where(is_upper, threshold, upper)
        lower = torch.where(is_upper, lower, threshold)
    return take(entries, k, lower=lower, upper=upper, drawn=drawn)
