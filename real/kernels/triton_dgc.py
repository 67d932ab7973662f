# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"
"""DGC's selection on a GPU: one read of the vector for a given threshold, without waits of the host.

`_collect` takes all entries that reach the threshold as candidates, with the bits of their magnitudes as keys. If there
are fewer than k, `_collect_all_if_few` makes every entry a candidate. Otherwise it does nothing.
`real.kernels.triton_candidates` chooses the k largest of them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from real.kernels import triton_candidates as common
from real.kernels.thresholds import largest_magnitude
from real.kernels.triton_candidates import tl, triton

_COLUMNS = 64  # of a tile, so that its candidates are counted by rows, and there are few rows
_KEY_BITS = 31  # bits of a float32 without its sign
_SIZES = ("k", "n_tiles", "n_spans")  # no specialised kernels for sizes divisible by 16, or for 1


def dgc(values: Tensor, k: int, threshold: Tensor, drawn: Tensor, *, layout: common.Layout = common.DEFAULT) -> Tensor:
    """Return the positions of the largest k magnitudes; int32, on the device of `values`.

    Args:
        values: float32, float16 or bfloat16 `[count]`; on a GPU, or anywhere under `TRITON_INTERPRET=1`.
        k: More than 0 and less than `count`.
        threshold: float32 `[]`: a few more than k magnitudes should reach it.
        drawn: Chooses among equal magnitudes if not all are taken, from 0 to 1; float64 `[]`.
        layout: How to cut the vector.
    """
    values = values.contiguous()
    cut = common.Cut.of(values.numel(), layout)
    few = common.Candidates.room(cut, values.device)
    enough = replace(few, n_in_span=torch.empty_like(few.n_in_span))
    shape = {"COLUMNS": _COLUMNS, "ROWS": cut.tile // _COLUMNS}
    tiles = {"LARGEST": largest_magnitude(values.dtype)} | shape | common.WIDE
    with torch.cuda.device_of(values):
        _collect[(cut.n_spans,)](
            values, threshold, few.keys, few.positions, few.n_in_span, cut.count, cut.n_tiles, **tiles
        )
        _collect_all_if_few[(cut.n_spans,)](
            values,
            few.n_in_span,
            few.keys,
            few.positions,
            enough.n_in_span,
            k,
            cut.count,
            cut.n_tiles,
            cut.n_spans,
            **(tiles | {"MAX_SPANS": cut.max_spans}),
        )
    return common.take_largest(enough, cut, k, drawn, n_key_bits=_KEY_BITS)


@triton.jit
def _collect_from(
    values, threshold, keys, positions, count, n_tiles,
    LARGEST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the entries of this program's span that reach the threshold; return their number."""
    begin = tl.program_id(0).to(tl.int64) * n_tiles * ROWS * COLUMNS
    within = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    end = begin
    for tile in range(n_tiles):
        where = begin + tile * ROWS * COLUMNS + within
        magnitudes = common.magnitude(tl.load(values + where, mask=where < count, other=0.0), LARGEST)
        is_candidate = (where < count) & (magnitudes >= threshold)
        end = common.append(keys, positions, end, magnitudes.to(tl.int32, bitcast=True), where, is_candidate)
    return (end - begin).to(tl.int32)


@triton.jit(do_not_specialize=_SIZES)
def _collect(
    values, threshold, keys, positions, n_in_span, count, n_tiles,
    LARGEST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = _collect_from(values, tl.load(threshold), keys, positions, count, n_tiles, LARGEST, COLUMNS, ROWS)
    tl.store(n_in_span + tl.program_id(0), n)


@triton.jit(do_not_specialize=_SIZES)
def _collect_all_if_few(
    values, n_before, keys, positions, n_in_span, k, count, n_tiles, n_spans,
    LARGEST: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, MAX_SPANS: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    spans = tl.arange(0, MAX_SPANS)
    n = tl.load(n_before + span)
    if tl.sum(tl.load(n_before + spans, mask=spans < n_spans, other=0), axis=0) < k:
        n = _collect_from(values, 0.0, keys, positions, count, n_tiles, LARGEST, COLUMNS, ROWS)
    tl.store(n_in_span + span, n)
