# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
"""MSTopK on a GPU: one read of the vector, another of the groups that matter, and no wait of the host.

The algorithm is that of `real.kernels.topk.mstopk`. A vector is cut into *spans*, one per program, a span into tiles,
and a tile into groups. Eight kernels run one after the other:

1. `_summarize` reads the vector: maximum of each group, sum and maximum of each span.
2. `_scale` makes of these the mean, the maximum and the distances of thresholds.
3. `_count_maxima` counts the groups by their maxima, in cells of 1/16 octave below the maximum of all.
4. `_collect` reads the groups that reach the level on which the cell of the k-th largest maximum begins. Levels and
   positions of entries that reach it are the *candidates*. They are written to where their span begins, in order, which
   needs neither a place that an atomic operation reserves nor memory whose size the host would have to know.
5. `_count_levels` counts the candidates by a digit of their levels: 2^b thresholds at once. It runs once per digit.
6. `_count_taken` counts in each span what lies above the level of the k-th largest, and on it.
7. `_write` adds up the counts of the spans before its own, so it knows which of its candidates go where.

Every kernel finds the k-th largest's cell or digits afresh from the counts of the kernels before: some hundred
numbers in the cache, where a kernel for that alone would cost a launch. No program waits for another, and they add up
nothing but integers together, so the result does not depend on which one comes first.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from real.kernels.topk.parts import largest_magnitude

try:
    import triton
    import triton.language as tl
except ImportError:  # then nobody calls the kernels
    triton = tl = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda each: each), constexpr=int)

__all__ = ["Layout", "mstopk"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a vector is cut."""

    tile: int = 4096
    """Entries that a program reads at once, a power of two of at least 256."""
    max_spans: int = 1024
    """Programs, a power of two: enough to fill a GPU, few enough for each to add up numbers of all others."""


_OCTAVE_SHIFT = 19  # of a float32's 23 bits of mantissa, 4 remain: 16 cells per octave
_MAXIMUM_CELLS = 256  # 16 octaves; smaller ones share the last cell
_CHUNK = 1024  # candidates that a program looks at at once
_SIZES = ("k", "n_tiles", "n_spans", "n_groups", "span_size")  # no new kernel for a size that 16 divides, or for a 1
_DENSEST = torch.finfo(torch.float32).max
_WIDE, _NARROW = ({"num_warps": n, "enable_fp_fusion": False} for n in (8, 4))  # all kernels must round alike
_MAX_DIGIT_BITS = 8  # more would take a histogram long; 32 cells, or 5 bits, are the fewest that it can count


def mstopk(values: Tensor, k: int, drawn: Tensor, *, n_bisections: int, layout: Layout = Layout()) -> Tensor:
    """Return k positions, the same as `real.kernels.topk.mstopk.bisect`; int32, on the device of `values`.

    Besides, 8 bytes per entry are allocated for candidates, and at most one 16th of the vector for maxima.

    Args:
        values: float32, float16 or bfloat16 `[count]`; on a GPU, or anywhere under `TRITON_INTERPRET=1`.
        k: More than 0 and less than `count`.
        drawn: Where the stretch begins, from 0 to 1; float64 `[]` on the same device.
        n_bisections: From 1 to 23.
        layout: How to cut the vector.
    """
    values, count, device = values.contiguous(), values.numel(), values.device
    group = _group_size(k, count, layout.tile)
    n_tiles = _ceil_div(count, layout.tile)
    n_tiles_per_span = _ceil_div(n_tiles, layout.max_spans)
    n_spans = _ceil_div(n_tiles, n_tiles_per_span)
    n_groups = _ceil_div(count, group)
    n_digits = _ceil_div(n_bisections + 1, _MAX_DIGIT_BITS)
    digit_bits = max(5, _ceil_div(n_bisections + 1, n_digits))

    def empty(n: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(n, dtype=dtype, device=device)

    maxima, scale = empty(n_groups, torch.float32), empty(4, torch.float32)
    span_sums, span_maxima = empty(n_spans, torch.float64), empty(n_spans, torch.float32)
    levels, positions, taken = (empty(n, torch.int32) for n in (count, count, k))
    n_candidates, n_above, n_within = (empty(n_spans, torch.int32) for _ in range(3))
    counts = torch.zeros(_MAXIMUM_CELLS + n_digits * 2**digit_bits, dtype=torch.int32, device=device)
    maximum_counts, level_counts = counts[:_MAXIMUM_CELLS], counts[_MAXIMUM_CELLS:]

    whole = {"LARGEST": largest_magnitude(values.dtype), "GROUP": group, "ROWS": layout.tile // group} | _WIDE
    cells = {"CELLS": _MAXIMUM_CELLS, "SHIFT": _OCTAVE_SHIFT}
    digits = {"CELLS": 2**digit_bits, "BITS": digit_bits, "N_DIGITS": n_digits, "CHUNK": _CHUNK} | _NARROW
    steps, spans = {"STEPS": 2**n_bisections}, {"MAX_SPANS": layout.max_spans}
    span_size = n_tiles_per_span * layout.tile
    with torch.cuda.device_of(values):
        _summarize[(n_spans,)](values, maxima, span_sums, span_maxima, count, n_tiles_per_span, **whole)
        _scale[(1,)](span_sums, span_maxima, scale, count, n_spans, DENSEST=_DENSEST, **steps, **spans, **_NARROW)
        _count_maxima[(_ceil_div(n_groups, 4 * _CHUNK),)](
            maxima, scale, maximum_counts, n_groups, CHUNK=4 * _CHUNK, **cells, **_WIDE
        )
        _collect[(n_spans,)](
            *(values, maxima, scale, maximum_counts, levels, positions, n_candidates, k, count, n_tiles_per_span),
            **(whole | steps | cells),
        )
        for digit in range(n_digits):
            _count_levels[(n_spans,)](levels, n_candidates, level_counts, k, span_size, DIGIT=digit, **digits)
        _count_taken[(n_spans,)](levels, n_candidates, level_counts, n_above, n_within, k, span_size, **digits)
        _write[(n_spans,)](
            *(levels, positions, n_candidates, level_counts, n_above, n_within, drawn, taken, k, span_size, n_spans),
            **(digits | spans),
        )
    return taken


def _group_size(k: int, count: int, tile: int) -> int:
    """Return about an eighth of the distance of selected entries: then few groups hold one, and few hold two.

    At least the 32 bytes are read at once that memory delivers, even of halves.
    """
    return min(256, tile, max(16, 1 << (count // (8 * k)).bit_length()))


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


@triton.jit
def _magnitude(values, LARGEST: tl.constexpr):
    """Return |values| as float32; `LARGEST` for NaN, which no comparison holds for, and all above it."""
    magnitudes = tl.abs(values.to(tl.float32))
    return tl.where(magnitudes <= LARGEST, magnitudes, LARGEST)


@triton.jit
def _cell(magnitudes, highest, CELLS: tl.constexpr, SHIFT: tl.constexpr):
    """Return in which of the cells below `highest` magnitudes lie, the upmost being `CELLS - 1`.

    As integers, the bits of floats that are not negative have the order of the floats.
    """
    below = (highest.to(tl.int32, bitcast=True) >> SHIFT) - (magnitudes.to(tl.int32, bitcast=True) >> SHIFT)
    return tl.maximum(CELLS - 1 - below, 0)


@triton.jit
def _floor_of(cell, highest, CELLS: tl.constexpr, SHIFT: tl.constexpr):
    """Return a magnitude that all in the cell reach."""
    bits = (highest.to(tl.int32, bitcast=True) >> SHIFT) - (CELLS - 1 - cell)
    floor = (tl.maximum(bits, 0) << SHIFT).to(tl.float32, bitcast=True)
    return tl.where(cell == 0, 0.0, floor)


@triton.jit
def _level(magnitudes, mean, up, down, STEPS: tl.constexpr):
    """Return the height of `real.kernels.topk.heights`, plus `STEPS`: a number of N + 1 binary digits."""
    offset = magnitudes - mean
    height = tl.floor(offset * tl.where(offset >= 0, up, down))
    return tl.minimum(tl.maximum(height, -STEPS), STEPS - 1).to(tl.int32) + STEPS


@triton.jit
def _histogram(cells, is_valid, CELLS: tl.constexpr):
    """Count the valid entries of each cell."""
    n_invalid = tl.sum((~is_valid).to(tl.int32), axis=0)
    counts = tl.histogram(tl.where(is_valid, cells, 0), CELLS)
    return counts - tl.where(tl.arange(0, CELLS) == 0, n_invalid, 0)


@triton.jit
def _kth_cell(counts, k, CELLS: tl.constexpr):
    """Return the cell of the k-th largest entry, and how many lie above it; the lowest if there are fewer than k."""
    cells = tl.arange(0, CELLS)
    each = tl.load(counts + cells)
    at_least = tl.sum(each, axis=0) - tl.cumsum(each, axis=0) + each
    cell = tl.max(tl.where(at_least >= k, cells, 0), axis=0)
    return cell, tl.sum(tl.where(cells > cell, each, 0), axis=0)


@triton.jit
def _leading_digits(counts, k, CELLS: tl.constexpr, BITS: tl.constexpr, N_KNOWN: tl.constexpr):
    """Return the first digits of the k-th largest level, as a number, and its rank among those that share them."""
    leading = k * 0
    rank = k
    for digit in tl.static_range(N_KNOWN):
        cell, n_above = _kth_cell(counts + digit * CELLS, rank, CELLS)
        leading = (leading << BITS) + cell
        rank -= n_above
    return leading, rank


@triton.jit(do_not_specialize=_SIZES)
def _summarize(
    values, maxima, span_sums, span_maxima, count, n_tiles,
    LARGEST: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    rows = span.to(tl.int64) * n_tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, GROUP)
    sums = tl.zeros([ROWS], tl.float32)
    highest = tl.zeros([ROWS], tl.float32)
    for _ in range(n_tiles):
        where = rows[:, None] * GROUP + columns[None, :]
        magnitudes = _magnitude(tl.load(values + where, mask=where < count, other=0.0), LARGEST)
        row_maxima = tl.max(magnitudes, axis=1)
        tl.store(maxima + rows, row_maxima, mask=rows * GROUP < count)
        highest = tl.maximum(highest, row_maxima)
        sums += tl.sum(magnitudes, axis=1)
        rows += ROWS
    tl.store(span_sums + span, tl.sum(sums.to(tl.float64), axis=0))
    tl.store(span_maxima + span, tl.max(highest, axis=0))


@triton.jit(do_not_specialize=_SIZES)
def _scale(
    span_sums, span_maxima, scale, count, n_spans,
    DENSEST: tl.constexpr, STEPS: tl.constexpr, MAX_SPANS: tl.constexpr,
):  # fmt: skip
    """Write mean, maximum, thresholds per unit above the mean and below it, as `real.kernels.topk.heights.Scale`."""
    spans = tl.arange(0, MAX_SPANS)
    total = tl.sum(tl.load(span_sums + spans, mask=spans < n_spans, other=0.0), axis=0)
    highest = tl.max(tl.load(span_maxima + spans, mask=spans < n_spans, other=0.0), axis=0)
    mean = tl.minimum((total / count).to(tl.float32), highest)
    shortest = STEPS / DENSEST
    up = STEPS / tl.maximum((highest - mean).to(tl.float64), shortest)  # of float64, the division is rounded rightly
    down = STEPS / tl.maximum(mean.to(tl.float64), shortest)
    tl.store(scale, mean)
    tl.store(scale + 1, highest)
    tl.store(scale + 2, up.to(tl.float32))
    tl.store(scale + 3, down.to(tl.float32))


@triton.jit(do_not_specialize=_SIZES)
def _count_maxima(maxima, scale, counts, n_groups, CHUNK: tl.constexpr, CELLS: tl.constexpr, SHIFT: tl.constexpr):
    groups = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    is_valid = groups < n_groups
    cells = _cell(tl.load(maxima + groups, mask=is_valid, other=0.0), tl.load(scale + 1), CELLS, SHIFT)
    found = _histogram(cells, is_valid, CELLS)
    tl.atomic_add(counts + tl.arange(0, CELLS), found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=_SIZES)
def _collect(
    values, maxima, scale, maximum_counts, levels, positions, n_candidates, k, count, n_tiles,
    LARGEST: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    CELLS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    mean, highest = tl.load(scale), tl.load(scale + 1)
    up, down = tl.load(scale + 2), tl.load(scale + 3)
    cell, _ = _kth_cell(maximum_counts, k, CELLS)
    lowest = _level(_floor_of(cell, highest, CELLS, SHIFT), mean, up, down, STEPS)
    span = tl.program_id(0)
    rows = span.to(tl.int64) * n_tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, GROUP)
    end = span.to(tl.int64) * n_tiles * ROWS * GROUP
    begin = end
    for _ in range(n_tiles):
        is_row = rows * GROUP < count
        row_maxima = tl.load(maxima + rows, mask=is_row, other=0.0)
        is_chosen = is_row & (_level(row_maxima, mean, up, down, STEPS) >= lowest)
        where = rows[:, None] * GROUP + columns[None, :]
        is_read = is_chosen[:, None] & (where < count)
        magnitudes = _magnitude(tl.load(values + where, mask=is_read, other=0.0), LARGEST)
        found = _level(magnitudes, mean, up, down, STEPS)
        is_candidate = is_read & (found >= lowest)
        ones = is_candidate.to(tl.int32)
        n_in_row = tl.sum(ones, axis=1)
        n_before_row = tl.cumsum(n_in_row, axis=0) - n_in_row
        slot = end + n_before_row[:, None] + tl.cumsum(ones, axis=1) - 1
        tl.store(levels + slot, found, mask=is_candidate)
        tl.store(positions + slot, where.to(tl.int32), mask=is_candidate)
        end += tl.sum(n_in_row, axis=0)
        rows += ROWS
    tl.store(n_candidates + span, (end - begin).to(tl.int32))


@triton.jit(do_not_specialize=_SIZES)
def _count_levels(
    levels, n_candidates, counts, k, span_size,
    DIGIT: tl.constexpr, CELLS: tl.constexpr, BITS: tl.constexpr, N_DIGITS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Count the candidates by digit number `DIGIT`, among those that share the k-th largest's digits before it."""
    leading, _ = _leading_digits(counts, k, CELLS, BITS, DIGIT)
    span = tl.program_id(0)
    n = tl.load(n_candidates + span)
    first = levels + span.to(tl.int64) * span_size
    found = tl.zeros([CELLS], tl.int32)
    for begin in range(0, n, CHUNK):
        entries = begin + tl.arange(0, CHUNK)
        digits = tl.load(first + entries, mask=entries < n, other=0) >> (BITS * (N_DIGITS - 1 - DIGIT))
        is_valid = (entries < n) & (digits >> BITS == leading)
        found += _histogram(digits & (CELLS - 1), is_valid, CELLS)
    tl.atomic_add(counts + DIGIT * CELLS + tl.arange(0, CELLS), found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=_SIZES)
def _count_taken(
    levels, n_candidates, counts, n_above, n_within, k, span_size,
    CELLS: tl.constexpr, BITS: tl.constexpr, N_DIGITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    kth, _ = _leading_digits(counts, k, CELLS, BITS, N_DIGITS)
    span = tl.program_id(0)
    n = tl.load(n_candidates + span)
    first = levels + span.to(tl.int64) * span_size
    above = tl.zeros([CHUNK], tl.int32)
    within = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, n, CHUNK):
        entries = begin + tl.arange(0, CHUNK)
        found = tl.load(first + entries, mask=entries < n, other=-1)
        above += (found > kth).to(tl.int32)
        within += (found == kth).to(tl.int32)
    tl.store(n_above + span, tl.sum(above, axis=0))
    tl.store(n_within + span, tl.sum(within, axis=0))


@triton.jit(do_not_specialize=_SIZES)
def _write(
    levels, positions, n_candidates, counts, n_above, n_within, drawn, taken, k, span_size, n_spans,
    CELLS: tl.constexpr, BITS: tl.constexpr, N_DIGITS: tl.constexpr, CHUNK: tl.constexpr,
    MAX_SPANS: tl.constexpr,
):  # fmt: skip
    """Write all above the k-th largest's level from the front, in order; then the stretch on that level, in order."""
    kth, n_missing = _leading_digits(counts, k, CELLS, BITS, N_DIGITS)
    span = tl.program_id(0)
    spans = tl.arange(0, MAX_SPANS)
    above = tl.load(n_above + spans, mask=spans < n_spans, other=0)
    within = tl.load(n_within + spans, mask=spans < n_spans, other=0)
    n_possible = tl.sum(within, axis=0)
    stretch = (tl.load(drawn) * (n_possible - n_missing + 1).to(tl.float64)).to(tl.int32)  # the first of it
    slot_above = tl.sum(tl.where(spans < span, above, 0), axis=0)
    rank_within = tl.sum(tl.where(spans < span, within, 0), axis=0) - stretch
    n = tl.load(n_candidates + span)
    first = span.to(tl.int64) * span_size
    for begin in range(0, n, CHUNK):
        entries = begin + tl.arange(0, CHUNK)
        found = tl.load(levels + first + entries, mask=entries < n, other=-1)
        where = tl.load(positions + first + entries, mask=entries < n, other=0)
        is_above = (found > kth).to(tl.int32)
        is_within = (found == kth).to(tl.int32)
        slot = slot_above + tl.cumsum(is_above, axis=0) - 1
        rank = rank_within + tl.cumsum(is_within, axis=0) - 1
        tl.store(taken + slot, where, mask=found > kth)
        is_taken = (found == kth) & (rank >= 0) & (rank < n_missing)
        tl.store(taken + (k - n_missing) + rank, where, mask=is_taken)
        slot_above += tl.sum(is_above, axis=0)
        rank_within += tl.sum(is_within, axis=0)
