"""What the methods share: magnitudes that compare, random numbers, and taking exactly n without waiting for a GPU."""

import importlib.util

import torch
from torch import Tensor

_SAMPLED_SHARE = 0.01  # Lin et al., section 3.1: 0.1 % to 1 %
_MIN_SELECTED_SAMPLES = 32  # so the number that reaches the threshold is off by about 1 / sqrt(32)


def can_use_triton(values: Tensor) -> bool:
    """Tell whether there are kernels for the device and dtype, and whether what compiles them is installed."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    return values.is_cuda and values.dtype in dtypes and importlib.util.find_spec("triton") is not None


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to compute with magnitudes: at least float32, for halves would round thresholds."""
    return torch.promote_types(dtype, torch.float32)


def largest_magnitude(dtype: torch.dtype) -> float:
    """Return what stands for all above it: a quarter of the largest number, so that the sum of two is finite."""
    return torch.finfo(wide(dtype)).max / 4


def finite_magnitudes(values: Tensor) -> Tensor:
    """Return |values|, wide, with the largest magnitude for NaN, infinities and whatever exceeds it."""
    magnitudes = values.abs().to(wide(values.dtype))
    return torch.fmin(magnitudes, magnitudes.new_full((), largest_magnitude(values.dtype)))


def uniform(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draw from [0, 1), shape `[]`, to `device`; float64, so that it resolves every position.

    A number drawn on the host travels as an argument of a kernel, for which the host need not wait.
    """
    source = torch.device("cpu") if generator is None else generator.device
    drawn = torch.rand((), dtype=torch.float64, device=source, generator=generator)
    return drawn if source == device else torch.full((), drawn.item(), dtype=torch.float64, device=device)


def take(heights: Tensor, n: int, *, lower: Tensor, upper: Tensor, drawn: Tensor) -> Tensor:
    """Return n positions: all that reach `upper`, and a stretch of those that reach `lower` only.

    The host does not wait: hence prefix sums where `nonzero` would do, whose size the host must know.

    Args:
        heights: `[count]`, without NaN.
        n: At most n reach `upper`, and at least n `lower`.
        lower: Of shape `[]`, as `upper`.
        upper: At least `lower`.
        drawn: Where the stretch begins: from 0, at the first that it can, to 1, at the last; float64 `[]`.
    """
    is_certain = heights >= upper
    certain = is_certain.cumsum(0, dtype=torch.int32)  # the i-th is where the sum comes to i
    possible = ((heights >= lower) & ~is_certain).cumsum(0, dtype=torch.int32)
    n_certain, n_possible = certain[-1], possible[-1]
    first = (drawn * (n_possible - (n - n_certain) + 1)).int()
    rank = torch.arange(1, n + 1, dtype=torch.int32, device=heights.device)
    filling = torch.searchsorted(possible, first + rank - n_certain)
    return torch.where(rank <= n_certain, torch.searchsorted(certain, rank), filling)


def sampled_threshold(values: Tensor, k: int, drawn: Tensor) -> Tensor:
    """Return what the k-th largest would be if every stride-th entry, from a random one on, were typical of all.

    Args:
        values: Floating point `[count]`.
        k: From 1 to `count`.
        drawn: Where the sample begins: from 0, at the first entry, to 1, at the last that it can; float64 `[]`.

    Source: Lin et al., ICLR 2018, arXiv 1712.01887, section 3.1.
    """
    count = values.numel()
    n_samples = max(int(_SAMPLED_SHARE * count), _MIN_SELECTED_SAMPLES * count // k)
    stride = max(1, count // n_samples)
    n_samples = count // stride
    first = (drawn * stride).long()
    samples = finite_magnitudes(values[first + stride * torch.arange(n_samples, device=values.device)])
    n_selected = max(1, round(k * n_samples / count))
    return torch.topk(samples, n_selected, sorted=False).values.min()
