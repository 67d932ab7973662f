"""DGC's selection: a threshold that a small sample suggests, and an exact selection among those that reach it.

The paper aims at k entries and lets the number selected vary. Here the threshold aims at 2k, and the largest k of those
are taken, so the largest k are found unless the sample was far off.
"""

import torch
from torch import Tensor

from real.kernels.topk.groups import reaching, summarize
from real.kernels.topk.parts import can_use_triton, finite_magnitudes, sampled_threshold, take, uniform

_MAX_CANDIDATES = 4  # times k: where the host cannot know how many there are, memory is for that many


def dgc(values: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Return k positions of nearly the largest magnitudes.

    Args:
        values: Floating point `[count]`.
        k: More than 0 and less than `count`.
        generator: Draws where the sample begins.

    Source: Lin et al., ICLR 2018, arXiv 1712.01887, section 3.1.
    """
    if _MAX_CANDIDATES * k >= values.numel():
        return torch.topk(finite_magnitudes(values), k, sorted=False).indices
    drawn = uniform(generator, values.device)
    threshold = sampled_threshold(values, 2 * k, drawn)
    if values.device.type == "cpu":
        return _among_all_that_reach(threshold.item(), values, k)
    if can_use_triton(values):
        from real.kernels import triton_dgc  # takes a second, and a GPU to be of use

        return triton_dgc.dgc(values, k, threshold, drawn)
    return _among_some_that_reach(threshold, finite_magnitudes(values), k, drawn)


def _among_all_that_reach(threshold: float, values: Tensor, k: int) -> Tensor:
    candidates, magnitudes = reaching(summarize(values, k), threshold)
    if candidates.numel() < k:
        return torch.topk(finite_magnitudes(values), k, sorted=False).indices
    return candidates[torch.topk(magnitudes, k, sorted=False).indices]


def _among_some_that_reach(threshold: Tensor, magnitudes: Tensor, k: int, drawn: Tensor) -> Tensor:
    """Select from as many candidates as there is memory for, without waiting to learn how many there are."""
    n_candidates = _MAX_CANDIDATES * k
    above = torch.nextafter(threshold, torch.full_like(threshold, torch.inf))
    above_all, zero = torch.full_like(threshold, torch.inf), torch.zeros_like(threshold)
    too_few = (magnitudes >= threshold).sum() < n_candidates
    too_many = (magnitudes >= above).sum() > n_candidates  # if neither, many equal the threshold, e.g. 0
    lower = torch.where(too_few, zero, threshold)
    upper = torch.where(too_few, threshold, torch.where(too_many, above_all, above))
    candidates = take(magnitudes, n_candidates, lower=lower, upper=upper, drawn=drawn)
    return candidates[torch.topk(magnitudes[candidates], k, sorted=False).indices]
