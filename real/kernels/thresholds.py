"""Functions that the top-k methods share: comparable magnitudes, random numbers, a threshold from a sample.

On a CPU, one read finds the maxima of groups of neighbours, which determine the groups to read again. The vector is
processed in chunks, with memory that stays in the cache, because fresh memory of the size of the vector would cost more
than reading it.
"""

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_SAMPLED_SHARE = 0.01  # Lin et al., section 3.1: 0.1 % to 1 %
_MIN_SELECTED_SAMPLES = 32  # so the number at or above the threshold has a relative error of about 1 / sqrt(32)


def can_use_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether there are kernels for the device and dtype, and their compiler is installed."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    return device.type == "cuda" and dtype in dtypes and importlib.util.find_spec("triton") is not None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for computing with magnitudes: at least float32, because half precision rounds thresholds."""
    return torch.promote_types(dtype, torch.float32)


def largest_magnitude(dtype: torch.dtype) -> float:
    """Return the cap of magnitudes: a quarter of the largest number, so that the sum of two is finite."""
    return torch.finfo(_wide(dtype)).max / 4


def finite_magnitudes(values: Tensor) -> Tensor:
    """Return |values|, wide, with the cap in place of NaN, infinities and larger magnitudes."""
    magnitudes = values.abs().to(_wide(values.dtype))
    return torch.fmin(magnitudes, magnitudes.new_full((), largest_magnitude(values.dtype)))


def uniform(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draw from [0, 1), shape `[]`, to `device`; float64, so that it resolves every position.

    A number drawn on the host is passed as an argument of a kernel, so the host does not wait.
    """
    source = torch.device("cpu") if generator is None else generator.device
    drawn = torch.rand((), dtype=torch.float64, device=source, generator=generator)
    return drawn if source == device else torch.full((), drawn.item(), dtype=torch.float64, device=device)


def sampled_threshold(values: Tensor, k: int, drawn: Tensor) -> Tensor:
    """Estimate the k-th largest magnitude from every stride-th entry, beginning at a random one.

    Args:
        values: Floating point `[count]`.
        k: From 1 to `count`.
        drawn: Where the sample begins: 0 is the first entry, 1 the last possible one; float64 `[]`.

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


_CHUNK = 2**20
_LEAST_GROUP = 32  # smaller groups are slower to reduce than to read twice
_MANTISSA_BITS = {torch.float32: 23, torch.float64: 52}
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
_CELLS_PER_OCTAVE = 4  # as a power of two


@dataclass(frozen=True, slots=True)
class GroupMaxima:
    """A vector, and the results of one read of it.

    Args:
        values: `[count]`, unchanged; magnitudes if any is not finite.
        size: Entries per group; the last group may have fewer.
        maxima: Largest magnitude of each group, finite, of the wide dtype.
        total: Sum of magnitudes.
    """

    values: Tensor
    size: int
    maxima: Tensor
    total: float


def groups_nbytes(count: int, dtype: torch.dtype) -> int:
    """Return the bytes of maxima and chunk of `maxima_of_groups`, at most."""
    return (-(-count // _LEAST_GROUP) + min(count, _CHUNK)) * _wide(dtype).itemsize


def maxima_of_groups(values: Tensor, k: int) -> GroupMaxima:
    """Return groups that are so small that most groups with selected entries have only one of the largest k."""
    size = 64 if 256 * k <= values.numel() else _LEAST_GROUP
    groups = _summarize(values, size)
    if bool(groups.maxima.max() <= largest_magnitude(values.dtype)):
        return groups
    return _summarize(finite_magnitudes(values), size)


def _summarize(values: Tensor, size: int) -> GroupMaxima:
    dtype = _wide(values.dtype)
    maxima = torch.empty(-(-values.numel() // size), dtype=dtype)
    scratch = torch.empty(min(values.numel(), _CHUNK), dtype=dtype)
    total = 0.0
    for chunk, found in zip(values.split(_CHUNK), maxima.split(_CHUNK // size), strict=True):
        magnitudes = scratch[: chunk.numel()].copy_(chunk).abs_()
        total += magnitudes.sum().item()
        n_whole = chunk.numel() // size
        torch.amax(magnitudes[: n_whole * size].view(n_whole, size), 1, out=found[:n_whole])
        if n_whole < found.numel():
            found[n_whole] = magnitudes[n_whole * size :].max()
    return GroupMaxima(values, size, maxima, total)


def reached_by(magnitudes: Tensor, k: int) -> float:
    """Return a number that at least k magnitudes reach, and not many more: the k-th largest, rounded down.

    The bits of non-negative floats, read as integers, have the order of the floats.
    """
    shift = _MANTISSA_BITS[magnitudes.dtype] - _CELLS_PER_OCTAVE
    bits = magnitudes.view(_INTEGERS[magnitudes.dtype])
    cell, _ = kth_cell(bits >> shift, k)
    return torch.tensor(cell << shift, dtype=bits.dtype).view(magnitudes.dtype).item()


def kth_cell(cells: Tensor, k: int) -> tuple[int, int]:
    """Return the k-th largest of non-negative integers, and the number of larger ones.

    >>> kth_cell(torch.tensor([5, 2, 2, 9, 2]), 3)
    (2, 2)
    """
    not_above = torch.bincount(cells).cumsum(0)
    cell = int(torch.searchsorted(not_above, cells.numel() - k, right=True))
    return cell, cells.numel() - int(not_above[cell])


def reaching(groups: GroupMaxima, threshold: float) -> tuple[Tensor, Tensor]:
    """Return ascending positions, int64, and magnitudes, wide, of all entries that reach the threshold."""
    found = list(_reaching(groups, threshold))
    return torch.cat([positions for positions, _ in found]), torch.cat([magnitudes for _, magnitudes in found])


def _reaching(groups: GroupMaxima, threshold: float) -> Iterator[tuple[Tensor, Tensor]]:
    size = groups.size
    scratch = torch.empty(min(groups.values.numel(), _CHUNK), dtype=groups.maxima.dtype)
    chunks = zip(groups.values.split(_CHUNK), groups.maxima.split(_CHUNK // size), strict=True)
    for first, (chunk, maxima) in zip(itertools.count(0, _CHUNK), chunks, strict=False):
        chosen = (maxima >= threshold).nonzero().squeeze(1)
        if 2 * chosen.numel() > maxima.numel() or chunk.numel() % size:  # reading all is not slower than gathering
            magnitudes = scratch[: chunk.numel()].copy_(chunk).abs_()
            within = (magnitudes >= threshold).nonzero().squeeze(1)
            yield within + first, magnitudes[within]
        else:
            magnitudes = chunk.view(-1, size).index_select(0, chosen).abs_().to(maxima.dtype).view(-1)
            within = (magnitudes >= threshold).nonzero().squeeze(1)
            yield chosen[within // size].mul_(size).add_(within % size).add_(first), magnitudes[within]
