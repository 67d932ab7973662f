# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, misc"
# mypy: disable-error-code="import-not-found, import-untyped, assignment"
"""Candidates for the largest k on a GPU: possibly selected entries of a vector, and the choice among them.

A vector is cut into *spans*, one per program, a span into tiles, and a tile into groups. A program writes its
candidates in order, from the beginning of its span on. This needs no atomic operations, and no memory of a size that
the host would have to know. It does so in two steps: first the numbers of the *chosen* groups, which have a candidate,
then their candidates. To number many entries costs far more than to read them, and few groups are chosen.

Candidates are compared by a *key*, a non-negative integer. Three kernels choose:

1. `_count_keys` counts the candidates by a digit of b bits of their keys: 2^b thresholds at once. Once per digit.
2. `_count_taken` counts in each span the candidates above the k-th largest key, and those equal to it.
3. `_write` adds up the counts of the spans before its own, which gives the places of its candidates.

Each kernel recomputes the digits of the k-th largest key from the counts of the kernels before. These are some hundred
numbers in the cache, and a separate kernel would cost a launch. No program waits for another. Programs add up only
integers together, so the result does not depend on their order.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda each: each), constexpr=int)

__all__ = ["tl", "triton"]


# Launch options of kernels that read whole tiles, or candidates. Without fusion, all kernels round in the same way.
WIDE, NARROW = ({"num_warps": n, "enable_fp_fusion": False} for n in (8, 4))

CHUNK = 1024  # candidates, or entries of chosen groups, that a program processes at once
MAGNITUDE_BITS = 31  # of a float32, without its sign
_MAX_DIGIT_BITS = 8  # more bits would make the histogram slow
_MIN_DIGIT_BITS = 5  # the histogram has at least 32 cells
_SIZES = ("k", "span_size", "n_spans")  # no specialised kernels for sizes divisible by 16, or for 1


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of pieces.

    Args:
        tile: Entries that a program reads at once, a power of two of at least 256.
        max_spans: Largest number of programs, a power of two: enough to fill a GPU, but so few that each can add up
            numbers of all others.
    """

    tile: int = 4096
    max_spans: int = 1024


# On an NVIDIA GPU, a tile fills a few kB of registers, and eight programs fill a multiprocessor.
DEFAULT = Layout()


@dataclass(frozen=True, slots=True)
class Cut:
    """A vector in pieces.

    Args:
        count: Number of entries.
        tile: See `Layout`.
        max_spans: See `Layout`.
        n_tiles: Tiles of each span. The last tiles of the last span may be partly or wholly beyond the end of the
            vector.
        n_spans: Number of programs.
    """

    count: int
    tile: int
    max_spans: int
    n_tiles: int
    n_spans: int

    @classmethod
    def of(cls, count: int, layout: Layout) -> "Cut":
        """Return spans with the number of tiles that the layout requires."""
        n_tiles = ceil_div(count, layout.tile)
        per_span = ceil_div(n_tiles, layout.max_spans)
        return cls(count, layout.tile, layout.max_spans, per_span, ceil_div(n_tiles, per_span))


@dataclass(frozen=True, slots=True)
class Candidates:
    """Room for one candidate per entry: 8 bytes for each entry; little of it is ever accessed.

    Args:
        keys: int32 `[count]`; the keys of a span begin at the beginning of the span.
        positions: int32 `[count]`, in the same places.
        n_in_span: int32 `[n_spans]`.
    """

    keys: Tensor
    positions: Tensor
    n_in_span: Tensor

    @classmethod
    def room(cls, cut: Cut, device: torch.device) -> "Candidates":
        """Return uninitialised room for a kernel to fill."""
        return cls(*(torch.empty(n, dtype=torch.int32, device=device) for n in (cut.count, cut.count, cut.n_spans)))


@dataclass(frozen=True, slots=True)
class Chosen:
    """Room for the numbers of the chosen groups of each span.

    Args:
        groups: int32 `[n_spans * groups_in_span]`; those of a span begin at the beginning of the span.
        n_in_span: int32 `[n_spans]`.
    """

    groups: Tensor
    n_in_span: Tensor

    @classmethod
    def room(cls, cut: Cut, group: int, device: torch.device) -> "Chosen":
        """Return uninitialised room for a kernel to fill."""
        sizes = cut.n_spans * cut.n_tiles * (cut.tile // group), cut.n_spans
        return cls(*(torch.empty(n, dtype=torch.int32, device=device) for n in sizes))


def candidates_nbytes(count: int, k: int) -> int:
    """Return the bytes of candidates, chosen groups and their maxima, which a selection needs besides some kB."""
    cut = Cut.of(count, DEFAULT)
    return 8 * count + 2 * 4 * cut.n_spans * cut.n_tiles * (cut.tile // group_size(k, cut))


def group_size(k: int, cut: Cut) -> int:
    """Return about an eighth of the distance between selected entries: then few groups have one, and very few have two.

    A group has at least the 32 bytes that memory delivers at once, even in half precision.
    """
    return min(256, cut.tile, max(16, 1 << (cut.count // (8 * k)).bit_length()))


def entries_at_once(cut: Cut) -> int:
    """Return how many entries of chosen groups a program processes at once."""
    return min(CHUNK, cut.tile)


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient of positive integers, rounded up."""
    return -(-dividend // divisor)


def take_largest(candidates: Candidates, cut: Cut, k: int, drawn: Tensor, *, n_key_bits: int) -> Tensor:
    """Return the positions of the k candidates with the largest keys, int32 `[k]`.

    Candidates above the k-th largest key come first, then a contiguous stretch of candidates equal to it. Both are in
    ascending order.

    Args:
        candidates: At least k.
        cut: The cut of their vector.
        k: Number of positions to return.
        drawn: Where the stretch begins: 0 is the first possible place, 1 the last; float64 `[]`.
        n_key_bits: All keys are below 2 to this power.
    """
    device = drawn.device
    n_digits = ceil_div(n_key_bits, _MAX_DIGIT_BITS)
    bits = max(_MIN_DIGIT_BITS, ceil_div(n_key_bits, n_digits))
    counts = torch.zeros(n_digits << bits, dtype=torch.int32, device=device)
    n_above, n_within = (torch.empty(cut.n_spans, dtype=torch.int32, device=device) for _ in range(2))
    taken = torch.empty(k, dtype=torch.int32, device=device)
    digits = {"CELLS": 1 << bits, "BITS": bits, "N_DIGITS": n_digits, "CHUNK": CHUNK} | NARROW
    keys = candidates.keys
    positions = candidates.positions
    n_in_span = candidates.n_in_span
    grid = (cut.n_spans,)
    span_size = cut.n_tiles * cut.tile
    with torch.cuda.device_of(drawn):
        for digit in range(n_digits):
            _count_keys[grid](keys, n_in_span, counts, k, span_size, DIGIT=digit, **digits)
        _count_taken[grid](keys, n_in_span, counts, n_above, n_within, k, span_size, **digits)
        _write[grid](
            keys,
            positions,
            n_in_span,
            counts,
            n_above,
            n_within,
            drawn,
            taken,
            k,
            span_size,
            cut.n_spans,
            **(digits | {"MAX_SPANS": cut.max_spans}),
        )
    return taken


@triton.jit
def magnitude(values, LARGEST: tl.constexpr):
    """Return |values| as float32; `LARGEST` for larger values and for NaN, for which no comparison holds."""
    magnitudes = tl.abs(values.to(tl.float32))
    return tl.where(magnitudes <= LARGEST, magnitudes, LARGEST)


@triton.jit
def append_groups(chosen, end, groups, is_chosen):
    """Write the chosen of some groups after those of before; return the new end."""
    ones = is_chosen.to(tl.int32)
    tl.store(chosen + end + tl.cumsum(ones, axis=0) - 1, groups, mask=is_chosen)
    return end + tl.sum(ones, axis=0)


@triton.jit
def level_of(magnitudes, mean, up, down, STEPS: tl.constexpr):
    """Return the height of `real.kernels.topk`, plus `STEPS`: a number with N + 1 binary digits.

    With one step, each magnitude is a level of its own: its bits.
    """
    if STEPS == 1:
        return magnitudes.to(tl.int32, bitcast=True)
    offset = magnitudes - mean
    height = tl.floor(offset * tl.where(offset >= 0, up, down))
    return tl.minimum(tl.maximum(height, -STEPS), STEPS - 1).to(tl.int32) + STEPS


@triton.jit
def _places(chosen, n_entries, entries, GROUP: tl.constexpr):
    """Return where the entries of chosen groups lie, and which exist, given their numbers."""
    is_entry = entries < n_entries
    return tl.load(chosen + entries // GROUP, mask=is_entry, other=0) * GROUP + entries % GROUP, is_entry


@triton.jit
def collect(  # noqa: PLR0913 (pointers and sizes one by one)
    values, chosen, n_chosen, keys, positions, n_in_span, count, groups_in_span, lowest, mean, up, down,
    LARGEST: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Write a span's entries of chosen groups on the lowest level or above, in order, and their number.

    Pointers move to the beginning of the span: 32 bits suffice for places within it, and need few registers. While
    some entries are numbered, the next are on their way from memory, and so are the numbers of the groups after those.
    Otherwise, each turn would wait for memory twice.
    """
    span = tl.program_id(0)
    first_group = span.to(tl.int64) * groups_in_span
    first = first_group * GROUP
    left = tl.minimum(count - first, groups_in_span * GROUP).to(tl.int32)
    values += first
    chosen += first_group
    keys += first
    positions += first
    entries = tl.arange(0, AT_ONCE)
    n_entries = tl.load(n_chosen + span) * GROUP
    where, is_entry = _places(chosen, n_entries, entries, GROUP)
    found = tl.load(values + where, mask=is_entry & (where < left), other=0.0)
    next_where, is_next = _places(chosen, n_entries, entries + AT_ONCE, GROUP)
    end = 0
    for begin in range(0, n_entries, AT_ONCE):
        next_found = tl.load(values + next_where, mask=is_next & (next_where < left), other=0.0)
        after_where, is_after = _places(chosen, n_entries, entries + (begin + 2 * AT_ONCE), GROUP)
        found_levels = level_of(magnitude(found, LARGEST), mean, up, down, STEPS)
        is_candidate = is_entry & (where < left) & (found_levels >= lowest)
        ones = is_candidate.to(tl.int32)
        slots = end + tl.cumsum(ones, axis=0) - 1
        tl.store(keys + slots, found_levels, mask=is_candidate)
        tl.store(positions + slots, first.to(tl.int32) + where, mask=is_candidate)
        end += tl.sum(ones, axis=0)
        where = next_where
        is_entry = is_next
        found = next_found
        next_where = after_where
        is_next = is_after
    tl.store(n_in_span + span, end)


@triton.jit
def add_histogram(counts, cells, is_valid, CELLS: tl.constexpr):
    """Return the counts plus the number of entries in each cell.

    Invalid entries count in cell 0. The count of cell 0 is not needed: it contains the k-th largest if no other cell
    does.
    """
    return counts + tl.histogram(tl.where(is_valid, cells, 0), CELLS)


@triton.jit
def kth_cell(counts, k, CELLS: tl.constexpr):
    """Return the cell of the k-th largest entry, and the number above it; the lowest if there are fewer than k."""
    cells = tl.arange(0, CELLS)
    each = tl.load(counts + cells)
    at_least = tl.sum(each, axis=0) - tl.cumsum(each, axis=0) + each
    cell = tl.max(tl.where(at_least >= k, cells, 0), axis=0)
    return cell, tl.sum(tl.where(cells > cell, each, 0), axis=0)


@triton.jit
def _leading_digits(counts, k, CELLS: tl.constexpr, BITS: tl.constexpr, N_KNOWN: tl.constexpr):
    """Return the first digits of the k-th largest key, as a number, and its rank among keys with these digits."""
    leading = k * 0
    rank = k
    for digit in tl.static_range(N_KNOWN):
        cell, n_above = kth_cell(counts + digit * CELLS, rank, CELLS)
        leading = (leading << BITS) + cell
        rank -= n_above
    return leading, rank


@triton.jit(do_not_specialize=_SIZES)
def _count_keys(  # noqa: PLR0913 (pointers and sizes one by one)
    keys, n_in_span, counts, k, span_size,
    DIGIT: tl.constexpr, CELLS: tl.constexpr, BITS: tl.constexpr, N_DIGITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Count the candidates by digit number `DIGIT`, among those with the earlier digits of the k-th largest."""
    leading, _ = _leading_digits(counts, k, CELLS, BITS, DIGIT)
    span = tl.program_id(0)
    n = tl.load(n_in_span + span)
    first = keys + span.to(tl.int64) * span_size
    found = tl.zeros([CELLS], tl.int32)
    for begin in range(0, n, CHUNK):
        entries = begin + tl.arange(0, CHUNK)
        digits = tl.load(first + entries, mask=entries < n, other=0) >> (BITS * (N_DIGITS - 1 - DIGIT))
        is_valid = (entries < n) & (digits >> BITS == leading)
        found = add_histogram(found, digits & (CELLS - 1), is_valid, CELLS)
    tl.atomic_add(counts + DIGIT * CELLS + tl.arange(0, CELLS), found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=_SIZES)
def _count_taken(  # noqa: PLR0913 (pointers and sizes one by one)
    keys, n_in_span, counts, n_above, n_within, k, span_size,
    CELLS: tl.constexpr, BITS: tl.constexpr, N_DIGITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    kth, _ = _leading_digits(counts, k, CELLS, BITS, N_DIGITS)
    span = tl.program_id(0)
    n = tl.load(n_in_span + span)
    first = keys + span.to(tl.int64) * span_size
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
def _write(  # noqa: PLR0913 (pointers and sizes one by one)
    keys, positions, n_in_span, counts, n_above, n_within, drawn, taken, k, span_size, n_spans,
    CELLS: tl.constexpr, BITS: tl.constexpr, N_DIGITS: tl.constexpr, CHUNK: tl.constexpr, MAX_SPANS: tl.constexpr,
):  # fmt: skip
    """Write all candidates above the k-th largest key in order, then the stretch of those equal to it, in order."""
    kth, n_missing = _leading_digits(counts, k, CELLS, BITS, N_DIGITS)
    span = tl.program_id(0)
    spans = tl.arange(0, MAX_SPANS)
    above = tl.load(n_above + spans, mask=spans < n_spans, other=0)
    within = tl.load(n_within + spans, mask=spans < n_spans, other=0)
    n_begins = tl.sum(within, axis=0) - n_missing + 1
    stretch = (tl.load(drawn) * n_begins.to(tl.float64)).to(tl.int32)
    slot_above = tl.sum(tl.where(spans < span, above, 0), axis=0)
    rank_within = tl.sum(tl.where(spans < span, within, 0), axis=0) - stretch
    n = tl.load(n_in_span + span)
    first = span.to(tl.int64) * span_size
    for begin in range(0, n, CHUNK):
        entries = begin + tl.arange(0, CHUNK)
        found = tl.load(keys + first + entries, mask=entries < n, other=-1)
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
