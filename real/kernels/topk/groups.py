"""Maxima of groups of neighbours, on a CPU: one read finds them, and they tell which groups to read again.

All goes chunk by chunk through memory that stays in the cache: fresh memory of the size of the vector would cost more
than to read the vector.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from real.kernels.topk.parts import finite_magnitudes, largest_magnitude, wide

_CHUNK = 2**20
_MANTISSA_BITS = {torch.float32: 23, torch.float64: 52}
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
_CELLS_PER_OCTAVE = 4  # as a power of two


@dataclass(frozen=True, slots=True)
class Groups:
    """A vector, and what one read of it tells."""

    values: Tensor
    """`[count]`, as they are; magnitudes if any was not finite."""
    size: int
    """Entries per group; the last group may have fewer."""
    maxima: Tensor
    """Largest magnitude of each group, finite, of the wide dtype."""
    total: float
    """Sum of magnitudes."""


def summarize(values: Tensor, k: int) -> Groups:
    """Return groups, small enough that of those to select from, most have but one of the largest k."""
    size = 64 if 256 * k <= values.numel() else 32  # fewer are slower to reduce than to read twice
    groups = _summarize(values, size)
    if bool(groups.maxima.max() <= largest_magnitude(values.dtype)):
        return groups
    return _summarize(finite_magnitudes(values), size)


def _summarize(values: Tensor, size: int) -> Groups:
    dtype = wide(values.dtype)
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
    return Groups(values, size, maxima, total)


def reached_by(magnitudes: Tensor, k: int) -> float:
    """Return a number that at least k of the magnitudes reach, and not many more: the k-th largest, rounded down.

    As integers, the bits of floats that are not negative have the order of the floats.
    """
    shift = _MANTISSA_BITS[magnitudes.dtype] - _CELLS_PER_OCTAVE
    bits = magnitudes.view(_INTEGERS[magnitudes.dtype])
    cell, _ = kth_cell(bits >> shift, k)
    return torch.tensor(cell << shift, dtype=bits.dtype).view(magnitudes.dtype).item()


def kth_cell(cells: Tensor, k: int) -> tuple[int, int]:
    """Return the k-th largest of the integers, none of them negative, and how many are larger.

    >>> kth_cell(torch.tensor([5, 2, 2, 9, 2]), 3)
    (2, 2)
    """
    counts = torch.bincount(cells)
    not_above = counts.cumsum(0)
    cell = int(torch.searchsorted(not_above, cells.numel() - k, right=True))
    return cell, cells.numel() - int(not_above[cell])


def reaching(groups: Groups, threshold: float) -> tuple[Tensor, Tensor]:
    """Return ascending positions, int64, and magnitudes, wide, of all entries that reach the threshold."""
    found = list(_reaching(groups, threshold))
    return torch.cat([positions for positions, _ in found]), torch.cat([magnitudes for _, magnitudes in found])


def _reaching(groups: Groups, threshold: float) -> Iterator[tuple[Tensor, Tensor]]:
    size = groups.size
    scratch = torch.empty(min(groups.values.numel(), _CHUNK), dtype=groups.maxima.dtype)
    chunks = zip(groups.values.split(_CHUNK), groups.maxima.split(_CHUNK // size), strict=True)
    for first, (chunk, maxima) in zip(itertools.count(0, _CHUNK), chunks, strict=False):
        chosen = (maxima >= threshold).nonzero().squeeze(1)
        if 2 * chosen.numel() > maxima.numel() or chunk.numel() % size:  # to read all is no slower than to gather
            magnitudes = scratch[: chunk.numel()].copy_(chunk).abs_()
            within = (magnitudes >= threshold).nonzero().squeeze(1)
            yield within + first, magnitudes[within]
        else:
            magnitudes = chunk.view(-1, size).index_select(0, chosen).abs_().to(maxima.dtype).view(-1)
            within = (magnitudes >= threshold).nonzero().squeeze(1)
            yield chosen[within // size].mul_(size).add_(within % size).add_(first), magnitudes[within]
