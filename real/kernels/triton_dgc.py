# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"
"""DGC's selection on a GPU: one read of the vector for a given threshold, without waits of the host.

`_choose` reads the vector and takes the groups with an entry that reaches the threshold. `_collect` reads these groups
again and takes such entries as candidates, with the bits of their magnitudes as keys. If there are fewer than k,
`_take_all_if_few` makes every entry a candidate. Otherwise it does nothing. `real.kernels.triton_candidates` chooses
the k largest of them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from real.kernels import triton_candidates as common
from real.kernels.thresholds import largest_magnitude
from real.kernels.triton_candidates import tl, triton

# No specialised kernels for sizes divisible by 16, or for 1.
_SIZES = ("k", "n_tiles", "n_spans", "groups_in_span", "span_size")


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
    group = common.group_size(k, cut)
    chosen = common.Chosen.room(cut, group, values.device)
    few = common.Candidates.room(cut, values.device)
    enough = replace(few, n_in_span=torch.empty_like(few.n_in_span))
    groups_in_span = cut.n_tiles * (cut.tile // group)
    largest = {"LARGEST": largest_magnitude(values.dtype)}
    grid = (cut.n_spans,)
    with torch.cuda.device_of(values):
        _choose[grid](
            values,
            threshold,
            chosen.groups,
            chosen.n_in_span,
            cut.count,
            cut.n_tiles,
            **(largest | {"GROUP": group, "ROWS": cut.tile // group} | common.WIDE),
        )
        _collect[grid](
            values,
            threshold,
            chosen.groups,
            chosen.n_in_span,
            few.keys,
            few.positions,
            few.n_in_span,
            cut.count,
            groups_in_span,
            **(largest | {"GROUP": group, "AT_ONCE": common.entries_at_once(cut)} | common.NARROW),
        )
        _take_all_if_few[grid](
            values,
            few.n_in_span,
            few.keys,
            few.positions,
            enough.n_in_span,
            k,
            cut.count,
            cut.n_tiles * cut.tile,
            cut.n_spans,
            **(largest | {"CHUNK": common.CHUNK, "MAX_SPANS": cut.max_spans} | common.NARROW),
        )
    return common.take_largest(enough, cut, k, drawn, n_key_bits=common.MAGNITUDE_BITS)


@triton.jit(do_not_specialize=_SIZES)
def _choose(  # noqa: PLR0913 (pointers and sizes one by one)
    values, threshold, chosen, n_chosen, count, n_tiles,
    LARGEST: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    lowest = tl.load(threshold)
    first_group = span.to(tl.int64) * n_tiles * ROWS
    first = first_group * GROUP
    left = tl.minimum(count - first, n_tiles * ROWS * GROUP).to(tl.int32)
    within = tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    end = 0
    for tile in range(n_tiles):
        where = tile * ROWS * GROUP + within
        magnitudes = common.magnitude(tl.load(values + first + where, mask=where < left, other=0.0), LARGEST)
        reaches = ((where < left) & (magnitudes >= lowest)).to(tl.int32)
        is_chosen = tl.max(reaches, axis=1) > 0
        end = common.append_groups(chosen + first_group, end, tile * ROWS + tl.arange(0, ROWS), is_chosen)
    tl.store(n_chosen + span, end)


@triton.jit(do_not_specialize=_SIZES)
def _collect(  # noqa: PLR0913 (pointers and sizes one by one)
    values, threshold, chosen, n_chosen, keys, positions, n_in_span, count, groups_in_span,
    LARGEST: tl.constexpr, GROUP: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    common.collect(
        values,
        chosen,
        n_chosen,
        keys,
        positions,
        n_in_span,
        count,
        groups_in_span,
        tl.load(threshold).to(tl.int32, bitcast=True),
        0.0,
        0.0,
        0.0,
        LARGEST,
        1,
        GROUP,
        AT_ONCE,
    )


@triton.jit(do_not_specialize=_SIZES)
def _take_all_if_few(  # noqa: PLR0913 (pointers and sizes one by one)
    values, n_before, keys, positions, n_in_span, k, count, span_size, n_spans,
    LARGEST: tl.constexpr, CHUNK: tl.constexpr, MAX_SPANS: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    spans = tl.arange(0, MAX_SPANS)
    n = tl.load(n_before + span)
    if tl.sum(tl.load(n_before + spans, mask=spans < n_spans, other=0), axis=0) < k:
        first = span.to(tl.int64) * span_size
        n = tl.maximum(tl.minimum(count - first, span_size), 0).to(tl.int32)
        for begin in range(0, n, CHUNK):
            within = begin + tl.arange(0, CHUNK)
            magnitudes = common.magnitude(tl.load(values + first + within, mask=within < n, other=0.0), LARGEST)
            tl.store(keys + first + within, magnitudes.to(tl.int32, bitcast=True), mask=within < n)
            tl.store(positions + first + within, first.to(tl.int32) + within, mask=within < n)
    tl.store(n_in_span + span, n)
