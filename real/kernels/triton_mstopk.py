# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"
"""MSTopK on a GPU: one read of the vector, another of the relevant groups, and no waits of the host.

The algorithm is that of `real.kernels.topk`. Four kernels find candidates, tile by tile of [groups, entries]:

1. `_summarize` reads the vector: maximum of each group, sum and maximum of each span.
2. `_scale` computes from these the mean, the maximum and the distances of thresholds.
3. `_count_maxima` counts the groups by their maxima, in cells of 1/16 octave below the maximum of all.
4. `_collect` reads the groups that reach the level at which the cell of the k-th largest maximum begins. An entry that
   reaches it is a candidate; its key is its level.

`real.kernels.triton_candidates` chooses among these. So b bisections are one read of the candidates.
"""

import torch
from torch import Tensor

from real.kernels import triton_candidates as common
from real.kernels.thresholds import largest_magnitude
from real.kernels.triton_candidates import tl, triton

_CELLS = {"CELLS": 256, "SHIFT": 19}  # 4 of float32's 23 bits of mantissa: 16 octaves, and the last cell for the rest
_CHUNK = 4096  # maxima that one program counts
_DENSEST = torch.finfo(torch.float32).max  # thresholds per unit, as in `real.kernels.topk.Scale`
_SIZES = ("k", "n_tiles", "n_spans", "n_groups")  # no specialised kernels for sizes divisible by 16, or for 1


def mstopk(
    values: Tensor, k: int, drawn: Tensor, *, n_bisections: int, layout: common.Layout = common.DEFAULT
) -> Tensor:
    """Return k positions, the same as `real.kernels.topk.bisect`; int32, on the device of `values`.

    Args:
        values: float32, float16 or bfloat16 `[count]`; on a GPU, or anywhere under `TRITON_INTERPRET=1`.
        k: More than 0 and less than `count`.
        drawn: Where the stretch begins, from 0 to 1; float64 `[]` on the same device.
        n_bisections: From 1 to 23.
        layout: How to cut the vector.
    """
    device = values.device
    values = values.contiguous()
    cut = common.Cut.of(values.numel(), layout)
    group = _group_size(k, cut)
    n_groups = common.ceil_div(cut.count, group)
    maxima, span_maxima, scale = (
        torch.empty(n, dtype=torch.float32, device=device) for n in (n_groups, cut.n_spans, 4)
    )
    span_sums = torch.empty(cut.n_spans, dtype=torch.float64, device=device)
    counts = torch.zeros(_CELLS["CELLS"], dtype=torch.int32, device=device)
    candidates = common.Candidates.room(cut, device)
    whole = {"LARGEST": largest_magnitude(values.dtype), "GROUP": group, "ROWS": cut.tile // group} | common.WIDE
    steps = {"STEPS": 2**n_bisections}
    grid = (cut.n_spans,)
    with torch.cuda.device_of(values):
        _summarize[grid](values, maxima, span_sums, span_maxima, cut.count, cut.n_tiles, **whole)
        _scale[(1,)](
            span_sums,
            span_maxima,
            scale,
            cut.count,
            cut.n_spans,
            **({"DENSEST": _DENSEST, "MAX_SPANS": cut.max_spans} | steps | common.NARROW),
        )
        _count_maxima[(common.ceil_div(n_groups, _CHUNK),)](
            maxima, scale, counts, n_groups, **({"CHUNK": _CHUNK} | _CELLS | common.WIDE)
        )
        _collect[grid](
            values,
            maxima,
            scale,
            counts,
            candidates.keys,
            candidates.positions,
            candidates.n_in_span,
            k,
            cut.count,
            cut.n_tiles,
            **(whole | steps | _CELLS),
        )
    return common.take_largest(candidates, cut, k, drawn, n_key_bits=n_bisections + 1)


def _group_size(k: int, cut: common.Cut) -> int:
    """Return about an eighth of the distance between selected entries: then few groups have one, and very few have two.

    A group has at least the 32 bytes that memory delivers at once, even in half precision.
    """
    return min(256, cut.tile, max(16, 1 << (cut.count // (8 * k)).bit_length()))


@triton.jit
def _cell(magnitudes, highest, CELLS: tl.constexpr, SHIFT: tl.constexpr):
    """Return the cells of magnitudes below `highest`; the top cell is `CELLS - 1`.

    The bits of non-negative floats, read as integers, have the order of the floats.
    """
    below = (highest.to(tl.int32, bitcast=True) >> SHIFT) - (magnitudes.to(tl.int32, bitcast=True) >> SHIFT)
    return tl.maximum(CELLS - 1 - below, 0)


@triton.jit
def _floor_of(cell, highest, CELLS: tl.constexpr, SHIFT: tl.constexpr):
    """Return a magnitude that all magnitudes in the cell reach."""
    bits = (highest.to(tl.int32, bitcast=True) >> SHIFT) - (CELLS - 1 - cell)
    floor = (tl.maximum(bits, 0) << SHIFT).to(tl.float32, bitcast=True)
    return tl.where(cell == 0, 0.0, floor)


@triton.jit
def _level(magnitudes, mean, up, down, STEPS: tl.constexpr):
    """Return the height of `real.kernels.topk`, plus `STEPS`: a number with N + 1 binary digits."""
    offset = magnitudes - mean
    height = tl.floor(offset * tl.where(offset >= 0, up, down))
    return tl.minimum(tl.maximum(height, -STEPS), STEPS - 1).to(tl.int32) + STEPS


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
        magnitudes = common.magnitude(tl.load(values + where, mask=where < count, other=0.0), LARGEST)
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
    """Write mean, maximum, and thresholds per unit above and below the mean, as `real.kernels.topk.Scale`."""
    spans = tl.arange(0, MAX_SPANS)
    total = tl.sum(tl.load(span_sums + spans, mask=spans < n_spans, other=0.0), axis=0)
    highest = tl.max(tl.load(span_maxima + spans, mask=spans < n_spans, other=0.0), axis=0)
    mean = tl.minimum((total / count).to(tl.float32), highest)
    shortest = STEPS / DENSEST
    up = STEPS / tl.maximum((highest - mean).to(tl.float64), shortest)  # a quotient of float64 is rounded correctly
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
    found = common.add_histogram(tl.zeros([CELLS], tl.int32), cells, is_valid, CELLS)
    tl.atomic_add(counts + tl.arange(0, CELLS), found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=_SIZES)
def _collect(
    values, maxima, scale, counts, keys, positions, n_in_span, k, count, n_tiles,
    LARGEST: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    CELLS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    mean = tl.load(scale)
    highest = tl.load(scale + 1)
    up = tl.load(scale + 2)
    down = tl.load(scale + 3)
    cell, _ = common.kth_cell(counts, k, CELLS)
    lowest = _level(_floor_of(cell, highest, CELLS, SHIFT), mean, up, down, STEPS)
    span = tl.program_id(0)
    rows = span.to(tl.int64) * n_tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, GROUP)
    begin = span.to(tl.int64) * n_tiles * ROWS * GROUP
    end = begin
    for _ in range(n_tiles):
        is_row = rows * GROUP < count
        row_maxima = tl.load(maxima + rows, mask=is_row, other=0.0)
        is_chosen = is_row & (_level(row_maxima, mean, up, down, STEPS) >= lowest)
        where = rows[:, None] * GROUP + columns[None, :]
        is_read = is_chosen[:, None] & (where < count)
        magnitudes = common.magnitude(tl.load(values + where, mask=is_read, other=0.0), LARGEST)
        found = _level(magnitudes, mean, up, down, STEPS)
        end = common.append(keys, positions, end, found, where, is_read & (found >= lowest))
        rows += ROWS
    tl.store(n_in_span + span, (end - begin).to(tl.int32))
