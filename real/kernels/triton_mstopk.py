# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"
"""MSTopK on a GPU: one read of the vector, another of the relevant groups, and no waits of the host.

The algorithm is that of `real.kernels.topk`. Five kernels find candidates:

1. `_summarize` reads the vector, and may add another to it: maximum of each group, sum and maximum of each span.
2. `_scale` computes from these the mean, the maximum and the distances of thresholds.
3. `_count_maxima` counts the groups by their maxima, in cells of 1/16 octave below the maximum of all.
4. `_choose` takes the groups that reach the level at which the cell of the k-th largest maximum begins.
5. `_collect` reads them. An entry that reaches that level is a candidate; its key is its level.

`real.kernels.triton_candidates` chooses among these. So b bisections are one read of the candidates.
"""

import torch
from torch import Tensor

from real.kernels import triton_candidates as common
from real.kernels.thresholds import largest_magnitude
from real.kernels.triton_candidates import tl, triton

_CELLS = {"CELLS": 256, "SHIFT": 19}  # 4 of float32's 23 bits of mantissa: 16 octaves, and the last cell for the rest
_CHUNK = 4096  # maxima that one program counts
_LARGEST = torch.finfo(torch.float32).max
_DENSEST = _LARGEST  # thresholds per unit, as in `real.kernels.topk.Scale`
# No specialised kernels for sizes divisible by 16, or for 1.
_SIZES = ("k", "n_tiles", "n_spans", "n_groups", "groups_in_span")


def mstopk(
    values: Tensor,
    k: int,
    drawn: Tensor,
    *,
    n_bisections: int | None,
    added: Tensor | None = None,
    layout: common.Layout = common.DEFAULT,
) -> Tensor:
    """Return k positions, the same as `real.kernels.topk.by_groups`; int32, on the device of `values`.

    Args:
        values: float32, float16 or bfloat16 `[count]`; on a GPU, or anywhere under `TRITON_INTERPRET=1`.
        k: More than 0 and less than `count`.
        drawn: Where the stretch begins, from 0 to 1; float64 `[]` on the same device.
        n_bisections: From 1 to 23. With None each magnitude is a level of its own, so the selection is exact.
        added: Added to `values` in place first, by the same read; both are contiguous.
        layout: How to cut the vector.
    """
    device = values.device
    values = values.contiguous()
    cut = common.Cut.of(values.numel(), layout)
    group = common.group_size(k, cut)
    n_groups = common.ceil_div(cut.count, group)
    maxima, span_maxima, scale = (
        torch.empty(n, dtype=torch.float32, device=device) for n in (n_groups, cut.n_spans, 4)
    )
    span_sums = torch.empty(cut.n_spans, dtype=torch.float64, device=device)
    counts = torch.zeros(_CELLS["CELLS"], dtype=torch.int32, device=device)
    chosen = common.Chosen.room(cut, group, device)
    candidates = common.Candidates.room(cut, device)
    groups_in_span = cut.n_tiles * (cut.tile // group)
    highest = largest_magnitude(values.dtype) if n_bisections else _LARGEST
    sizes = {"LARGEST": highest, "GROUP": group}
    steps = {"STEPS": 2**n_bisections if n_bisections else 1}
    grid = (cut.n_spans,)
    with torch.cuda.device_of(values):
        _summarize[grid](
            values,
            values if added is None else added,
            maxima,
            span_sums,
            span_maxima,
            cut.count,
            cut.n_tiles,
            **(sizes | {"ROWS": cut.tile // group, "ADDS": added is not None} | common.WIDE),
        )
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
        _choose[grid](
            maxima,
            scale,
            counts,
            chosen.groups,
            chosen.n_in_span,
            k,
            n_groups,
            groups_in_span,
            **({"CHUNK": common.CHUNK} | steps | _CELLS | common.NARROW),
        )
        _collect[grid](
            values,
            scale,
            counts,
            chosen.groups,
            chosen.n_in_span,
            candidates.keys,
            candidates.positions,
            candidates.n_in_span,
            k,
            cut.count,
            groups_in_span,
            **(sizes | {"AT_ONCE": common.entries_at_once(cut)} | steps | _CELLS | common.NARROW),
        )
    return common.take_largest(
        candidates, cut, k, drawn, n_key_bits=n_bisections + 1 if n_bisections else common.MAGNITUDE_BITS
    )


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


@triton.jit(do_not_specialize=_SIZES)
def _summarize(  # noqa: PLR0913 (pointers and sizes one by one)
    values, added, maxima, span_sums, span_maxima, count, n_tiles,
    LARGEST: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    rows = span.to(tl.int64) * n_tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, GROUP)
    sums = tl.zeros([ROWS], tl.float32)
    highest = tl.zeros([ROWS], tl.float32)
    for _ in range(n_tiles):
        where = rows[:, None] * GROUP + columns[None, :]
        found = tl.load(values + where, mask=where < count, other=0.0)
        if ADDS:
            terms = tl.load(added + where, mask=where < count, other=0.0)
            found = (found.to(tl.float32) + terms.to(tl.float32)).to(values.dtype.element_ty)
            tl.store(values + where, found, mask=where < count)
        magnitudes = common.magnitude(found, LARGEST)
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


@triton.jit
def _lowest_level(scale, counts, k, STEPS: tl.constexpr, CELLS: tl.constexpr, SHIFT: tl.constexpr):
    """Return the level at which the cell of the k-th largest maximum begins, and the scale."""
    mean = tl.load(scale)
    highest = tl.load(scale + 1)
    up = tl.load(scale + 2)
    down = tl.load(scale + 3)
    cell, _ = common.kth_cell(counts, k, CELLS)
    return common.level_of(_floor_of(cell, highest, CELLS, SHIFT), mean, up, down, STEPS), mean, up, down


@triton.jit(do_not_specialize=_SIZES)
def _choose(  # noqa: PLR0913 (pointers and sizes one by one)
    maxima, scale, counts, chosen, n_chosen, k, n_groups, groups_in_span,
    STEPS: tl.constexpr, CELLS: tl.constexpr, SHIFT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    lowest, mean, up, down = _lowest_level(scale, counts, k, STEPS, CELLS, SHIFT)
    span = tl.program_id(0)
    first = span.to(tl.int64) * groups_in_span
    n = tl.minimum(n_groups - first, groups_in_span).to(tl.int32)
    end = 0
    for begin in range(0, n, CHUNK):
        groups = begin + tl.arange(0, CHUNK)
        group_maxima = tl.load(maxima + first + groups, mask=groups < n, other=0.0)
        is_chosen = (groups < n) & (common.level_of(group_maxima, mean, up, down, STEPS) >= lowest)
        end = common.append_groups(chosen + first, end, groups, is_chosen)
    tl.store(n_chosen + span, end)


@triton.jit(do_not_specialize=_SIZES)
def _collect(  # noqa: PLR0913 (pointers and sizes one by one)
    values, scale, counts, chosen, n_chosen, keys, positions, n_in_span, k, count, groups_in_span,
    LARGEST: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr, AT_ONCE: tl.constexpr,
    CELLS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    lowest, mean, up, down = _lowest_level(scale, counts, k, STEPS, CELLS, SHIFT)
    common.collect(
        values,
        chosen,
        n_chosen,
        keys,
        positions,
        n_in_span,
        count,
        groups_in_span,
        lowest,
        mean,
        up,
        down,
        LARGEST,
        STEPS,
        GROUP,
        AT_ONCE,
    )
