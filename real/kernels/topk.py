"""Top-k: the k entries of a vector that are largest in magnitude, found in one of three ways.

`exact` is `torch.topk`. `mstopk` (Shi et al.) bisects a threshold with nothing but reductions and compares, which suit
a GPU better than a sort. `dgc` (Lin et al.) reads a threshold off a small sample.

**Exactly k.** Both approximate methods end with two thresholds, `upper >= lower`, such that at most k entries reach
`upper` and at least k reach `lower`. All of the former are taken, and the gap is filled with a contiguous stretch, from
a random place on, of those between the thresholds. That invariant holds from the first bracket on, so constant vectors
and many ties need no special case. The published MSTopK lacks it: its thresholds lie in
[mean, max], so more entries than reach the mean (42 % of a normal distribution) cannot be bracketed; here the bracket
is then [0, mean].

**No waiting.** On a GPU nothing is copied to the host to decide what comes next, so the host runs ahead of a selection
as it does of any other kernel. Hence the prefix sums where `nonzero` would do, whose size the host must wait for.

**Not finite.** NaN and infinities count as the largest. They are selected first and reach the parameters of all ranks,
as they do in dense training, and the loss shows it. To refuse them would make the host wait; to order them last would
hide a diverged run. Beside an infinity, mstopk chooses the finite rest of the k blindly: its bracket is too wide.
"""

from typing import assert_never

import torch
from torch import Tensor

from simdist.errors import RunError
from simdist.plan.ops import SelectMethod

__all__ = ["densify", "select"]

_N_BISECTIONS = 20  # recall of at least 0.9999 at densities of 0.001 and 0.01
_SAMPLED_SHARE = 0.01  # Lin et al., section 3.1: 0.1 % to 1 %
_MIN_SELECTED_SAMPLES = 32  # so the number that reaches the threshold is off by about 1 / sqrt(32)
_MAX_COUNT = 2**31 - 1  # indices are int32


def select(
    values: Tensor, k: int, method: SelectMethod, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Return k entries of largest magnitude, and where they stand.

    >>> select(torch.tensor([1.0, -5.0, 0.5, 3.0]), 2, "mstopk")
    (tensor([-5.,  3.]), tensor([1, 3], dtype=torch.int32))

    Args:
        values: Floating point `[count]`, on any device.
        k: From 0 to `count`.
        method: `exact`, or one that misses a few of the largest and takes some a little smaller instead.
        generator: Chooses among nearly equals; torch's default generator of the CPU if absent. `exact` needs none.

    Returns:
        Values `[k]` as they are, signed and of the same dtype; int32 indices `[k]`, all different, in no special order.

    Raises:
        RunError: k or the shape is wrong.

    Source: Shi et al., MLSys 2021, arXiv 2010.10458, algorithm 1 (mstopk); Lin et al., ICLR 2018, arXiv 1712.01887,
    section 3.1 (dgc).
    """
    _check(values, k)
    values = values.detach()
    match method:
        case _ if k in (0, values.numel()):
            indices = torch.arange(k, device=values.device)
        case "exact":
            indices = torch.topk(values.abs(), k, sorted=False).indices
        case "mstopk":
            indices = _mstopk(_magnitudes(values), k, generator)
        case "dgc":
            indices = _dgc(_magnitudes(values), k, generator)
        case _:
            assert_never(method)
    return values[indices], indices.to(torch.int32)


def densify(values: Tensor, indices: Tensor, out: Tensor) -> None:
    """Write the sum of sparse vectors into a dense one.

    >>> out = torch.empty(4)
    >>> densify(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 3, 3], dtype=torch.int32), out)
    >>> out
    tensor([1., 0., 0., 5.])

    Args:
        values: `[k]`, of the dtype of `out`.
        indices: int32 or int64 `[k]`; the values of equal indices are added up.
        out: `[count]`, replaced.
    """
    out.zero_().index_add_(0, indices, values)


def _check(values: Tensor, k: int) -> None:
    if values.dim() != 1 or not values.is_floating_point():
        raise RunError(f"top-k of {values.dtype} {list(values.shape)}: must be a floating-point vector")
    if values.numel() > _MAX_COUNT:
        raise RunError(f"top-k of {values.numel()} elements: int32 indices reach {_MAX_COUNT}; select from shards")
    if not 0 <= k <= values.numel():
        raise RunError(f"top-k with k = {k} of {values.numel()} elements; must be from 0 to {values.numel()}")


def _magnitudes(values: Tensor) -> Tensor:
    """Return |values| in at least float32, where halves do not round thresholds, and finite, so that they compare.

    A quarter of the largest number stands for all above it, and the sum of two does not overflow.
    """
    magnitudes = values.abs().to(torch.promote_types(values.dtype, torch.float32))
    largest = torch.finfo(magnitudes.dtype).max / 4
    return torch.nan_to_num(magnitudes, nan=largest, posinf=largest).clamp_(max=largest)


def _mstopk(magnitudes: Tensor, k: int, generator: torch.Generator | None) -> Tensor:
    """Bisect between mean and maximum, or between 0 and mean if too few reach the mean."""
    highest = magnitudes.max()
    mean = torch.minimum(magnitudes.mean(), highest)  # of equal numbers, the mean may be rounded up
    mean_reached = _n_reaching(magnitudes, mean) >= k
    lower = torch.where(mean_reached, mean, torch.zeros_like(mean))
    above_all = torch.nextafter(highest, torch.full_like(highest, torch.inf))
    upper = torch.where(mean_reached, above_all, mean)
    for _ in range(_N_BISECTIONS):
        threshold = (lower + upper) / 2
        is_upper = _n_reaching(magnitudes, threshold) <= k
        upper = torch.where(is_upper, threshold, upper)
        lower = torch.where(is_upper, lower, threshold)
    return _take(magnitudes, k, lower=lower, upper=upper, generator=generator)


def _dgc(magnitudes: Tensor, k: int, generator: torch.Generator | None) -> Tensor:
    """Take the largest k of up to 4k candidates: entries that reach a sampled threshold which about 2k should reach.

    The paper aims at k, and lets the number selected vary; here a miss would have to be made good blindly.
    """
    n_candidates = 4 * k
    if n_candidates >= magnitudes.numel():
        return torch.topk(magnitudes, k, sorted=False).indices
    threshold = _sampled_threshold(magnitudes, 2 * k, generator)
    above = torch.nextafter(threshold, torch.full_like(threshold, torch.inf))
    above_all, zero = torch.full_like(threshold, torch.inf), torch.zeros_like(threshold)
    too_few = _n_reaching(magnitudes, threshold) < n_candidates
    too_many = _n_reaching(magnitudes, above) > n_candidates  # if neither, many equal the threshold, e.g. 0
    lower = torch.where(too_few, zero, threshold)
    upper = torch.where(too_few, threshold, torch.where(too_many, above_all, above))
    candidates = _take(magnitudes, n_candidates, lower=lower, upper=upper, generator=generator)
    return candidates[torch.topk(magnitudes[candidates], k, sorted=False).indices]


def _sampled_threshold(magnitudes: Tensor, k: int, generator: torch.Generator | None) -> Tensor:
    """Return what the k-th largest would be if every stride-th entry, from a random one on, were typical of all."""
    count = magnitudes.numel()
    n_samples = max(int(_SAMPLED_SHARE * count), _MIN_SELECTED_SAMPLES * count // k)
    stride = max(1, count // n_samples)
    n_samples = count // stride
    first = (_uniform(generator).to(magnitudes.device, non_blocking=True) * stride).long()
    samples = magnitudes[first + stride * torch.arange(n_samples, device=magnitudes.device)]
    n_selected = max(1, round(k * n_samples / count))
    return torch.topk(samples, n_selected, sorted=False).values.min()


def _take(magnitudes: Tensor, n: int, *, lower: Tensor, upper: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return n ascending positions: all that reach `upper`, and a stretch of those that reach `lower` only.

    At most n must reach `upper`, and at least n `lower`.
    """
    certain = magnitudes >= upper
    possible = (magnitudes >= lower) & ~certain
    rank = possible.cumsum(0, dtype=torch.int32)  # of a possible entry among its kind, from 1
    n_missing = n - certain.sum()
    first = (_uniform(generator).to(rank.device, non_blocking=True) * (rank[-1] - n_missing + 1)).int()
    chosen = certain | (possible & (rank > first) & (rank <= first + n_missing))
    slot = torch.where(chosen, chosen.cumsum(0) - 1, n)  # what is not chosen goes to slot n, which is cut off
    positions = torch.empty(n + 1, dtype=torch.int64, device=slot.device)
    return positions.scatter_(0, slot, torch.arange(slot.numel(), device=slot.device))[:n]


def _n_reaching(magnitudes: Tensor, threshold: Tensor) -> Tensor:
    return (magnitudes >= threshold).sum()


def _uniform(generator: torch.Generator | None) -> Tensor:
    """Draw from [0, 1), on the generator's device; float64, so that it resolves every position."""
    device = "cpu" if generator is None else generator.device
    return torch.rand((), dtype=torch.float64, device=device, generator=generator)
