"""Top-k: the k entries of a vector that are largest in magnitude, found in one of three ways.

`exact` is `torch.topk`. `mstopk` (Shi et al.) bisects a threshold between the mean and the maximum; how that takes
little more than one read of the vector is told in `real.kernels.mstopk`. `dgc` (Lin et al.) reads a threshold off
a small sample. The paper aims at k entries and lets the number selected vary; here the threshold aims at 2k, and the
largest k of those are taken, so the largest k are found unless the sample was far off.

**No waiting.** On a GPU nothing is copied to the host to decide what comes next, so the host runs ahead of a selection
as it does of any other kernel.

**Not finite.** NaN and infinities count as the largest. They are selected first and reach the parameters of all ranks,
as they do in dense training, and the loss shows it. To refuse them would make the host wait; to order them last would
hide a diverged run. Beside an infinity, mstopk chooses the finite rest of the k blindly: its steps are too wide.
"""

from typing import assert_never

import torch
from torch import Tensor

from real.kernels import mstopk, thresholds
from simdist.errors import RunError
from simdist.plan.ops import SelectMethod

_MAX_COUNT = 2**31 - 1  # indices are int32
_MAX_CANDIDATES = 4  # times k: of a shorter vector, the largest k are found as fast at once


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
            indices = mstopk.mstopk(values, k, generator)
        case "dgc":
            indices = dgc(values, k, generator)
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


def dgc(values: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Return k positions of nearly the largest magnitudes.

    Args:
        values: Floating point `[count]`.
        k: More than 0 and less than `count`.
        generator: Draws where the sample begins.

    Source: Lin et al., ICLR 2018, arXiv 1712.01887, section 3.1.
    """
    if _MAX_CANDIDATES * k >= values.numel():
        return torch.topk(thresholds.finite_magnitudes(values), k, sorted=False).indices
    drawn = thresholds.uniform(generator, values.device)
    threshold = thresholds.sampled_threshold(values, 2 * k, drawn)
    if values.device.type == "cpu":
        return _among_all_that_reach(threshold.item(), values, k)
    if thresholds.can_use_triton(values):
        from real.kernels import triton_dgc  # takes a second, and a GPU to be of use

        return triton_dgc.dgc(values, k, threshold, drawn)
    return torch.topk(thresholds.finite_magnitudes(values), k, sorted=False).indices


def _among_all_that_reach(threshold: float, values: Tensor, k: int) -> Tensor:
    candidates, magnitudes = thresholds.reaching(thresholds.summarize(values, k), threshold)
    if candidates.numel() < k:
        return torch.topk(thresholds.finite_magnitudes(values), k, sorted=False).indices
    return candidates[torch.topk(magnitudes, k, sorted=False).indices]
