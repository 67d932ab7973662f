"""MSTopK on a CPU, where to wait for a number costs nothing: one read, and another of the groups that matter."""

import torch
from torch import Tensor

from real.kernels.topk.groups import Groups, kth_cell, reached_by, reaching, summarize
from real.kernels.topk.heights import Scale, heights
from real.kernels.topk.parts import sampled_threshold


def mstopk(values: Tensor, k: int, drawn: float, *, n_bisections: int) -> Tensor:
    """Return k positions, the same as `real.kernels.topk.mstopk.bisect`.

    Args:
        values: Floating point `[count]` on the CPU.
        k: More than 0 and less than `count`.
        drawn: Where the stretch begins, from 0 to 1.
        n_bisections: How many binary digits of a height are told apart, besides the sign.
    """
    groups = summarize(values, k)
    mean = torch.tensor(groups.total / values.numel(), dtype=torch.float64)
    scale = Scale.of(mean, groups.maxima.max(), n_bisections)
    positions, magnitudes = _candidates(groups, k, scale, drawn)
    keys = heights(magnitudes, scale).int().add_(2**n_bisections)
    kth = _kth_largest(keys, k, n_bisections + 1)
    certain, possible = positions[keys > kth], positions[keys == kth]
    n_missing = k - certain.numel()
    first = int(drawn * (possible.numel() - n_missing + 1))
    return torch.cat([certain, possible[first : first + n_missing]])


def _candidates(groups: Groups, k: int, scale: Scale, drawn: float) -> tuple[Tensor, Tensor]:
    """Return positions and magnitudes of at least k, and rarely many more: all on the level of the least, or above."""
    if 2 * k <= groups.maxima.numel():
        return reaching(groups, foot(reached_by(groups.maxima, k), scale))
    aim = min(groups.values.numel(), k + k // 4)
    threshold = sampled_threshold(groups.values, aim, torch.tensor(drawn, dtype=torch.float64))
    positions, magnitudes = reaching(groups, foot(threshold.item(), scale))
    return (positions, magnitudes) if positions.numel() >= k else reaching(groups, 0.0)


def foot(magnitude: float, scale: Scale) -> float:
    """Return a number, at most that magnitude, that all reach which stand on its level or above.

    It is a little below the threshold of the level, for heights are rounded: twice, by 2^-24 of them each time.

    Args:
        magnitude: From 0 to the maximum.
        scale: That of the levels.
    """
    height = heights(torch.tensor(magnitude, dtype=scale.mean.dtype), scale).item()
    offset = height / (scale.up if height >= 0 else scale.down).item()
    return min(magnitude, scale.mean.item() + offset - abs(offset) * 2**-20)


def _kth_largest(keys: Tensor, k: int, n_digits: int) -> int:
    """Return the k-th largest of the integers below 2^n_digits: its upper binary digits, then its lower ones."""
    n_lower = n_digits // 2
    upper, n_above = kth_cell(keys >> n_lower, k)
    lower, _ = kth_cell(keys[keys >> n_lower == upper] & (2**n_lower - 1), k - n_above)
    return (upper << n_lower) + lower
