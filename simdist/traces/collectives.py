"""Bandwidths of collectives, in the columns of nccl-tests, and the waiting for their last members.

A *call* is one instance of a collective in one group. It lasts from the moment when its last member is ready until its
last member is done. The wait of earlier members before that is counted separately.

    algbw = size / time            busbw = algbw x factor
    factor                         2 (n - 1) / n   all_reduce
                                     (n - 1) / n   reduce_scatter, all_gather
                                               1   reduce, broadcast

`size` is the size of the whole: the result of an all_gather on each rank, or the input of a reduce_scatter from each
rank. For these two, `count` is the contribution or result of one rank, as in nccl-tests. The size of sparse data
includes the indices. busbw is comparable to the bandwidth of a link, for all kinds and numbers of ranks.

Source:
    nccl-tests, https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md and the functions GetCollByteCount and GetBw of
    each test.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from simdist.plan import Buffer, Collective, Plan, occurrences, ops
from simdist.plan.group import Group, GroupForm
from simdist.plan.ops import Algorithm
from simdist.plan.text import op_name
from simdist.traces.trace import Trace

_Seconds: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _NcclTestsLine:
    """Collectives that nccl-tests would print in one line.

    Args:
        op: Such as `all_reduce`.
        group: Size and stride of their groups.
        algorithm: Algorithm in the plan; `auto` leaves it to the cluster's library.
        nbytes: Size of the whole, including the indices of sparse data.
        count: Elements; for all_gather and reduce_scatter, those of one rank.
        dtype: Data type of the elements.
        sparse: Each element comes with an index.
    """

    op: str
    group: GroupForm
    algorithm: Algorithm
    nbytes: int
    count: int
    dtype: str
    sparse: bool


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Times and bandwidths that collectives of one kind achieved.

    Args:
        kind: Their kind.
        calls: Calls in all groups. A call that some member did not finish does not count.
        time_s: Median over calls.
        algbw_Bps: Size over that time; NaN if it is 0.
        busbw_Bps: `algbw_Bps` times the factor.
        wait_median_s: Median over calls and members of the seconds that a member waited for the last one.
        wait_mean_s: Their mean.
        transfer_total_s: Sum of the calls' times, over members.
        wait_total_s: Sum of the waiting, over members.
    """

    kind: _NcclTestsLine
    calls: int
    time_s: float
    algbw_Bps: float
    busbw_Bps: float
    wait_median_s: float
    wait_mean_s: float
    transfer_total_s: float
    wait_total_s: float

    @property
    def wait_share(self) -> float:
        """Share of waiting in the members' total time in these calls; NaN if that is 0."""
        return waiting_share([self])


def collective_rows(trace: Trace) -> tuple[CollectiveRow, ...]:
    """Return a row for each kind of called collective, sorted by name, group and size."""
    kinds: dict[_NcclTestsLine, dict[Group, list[NDArray[np.int64]]]] = {}
    for each in occurrences(trace.plan):
        if isinstance(each.op, ops.COLLECTIVES):
            of_groups = kinds.setdefault(_kind(each.op, trace.plan), {})
            of_groups.setdefault(each.op.group, []).append(each.rows)
    rows = (_row(kind, trace, of_groups) for kind, of_groups in kinds.items())
    return tuple(sorted((row for row in rows if row.calls), key=lambda row: _order(row.kind)))


def waiting_share(rows: Sequence[CollectiveRow]) -> float:
    """Return the share of waiting in the ranks' total time in collectives; NaN if that is 0."""
    waited_s = math.fsum(row.wait_total_s for row in rows)
    total_s = waited_s + math.fsum(row.transfer_total_s for row in rows)
    return waited_s / total_s if total_s else np.nan


def bus_factor(op: str, n: int) -> float:
    """Return busbw / algbw of a collective over `n` ranks, as nccl-tests define it.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    match op:
        case "all_reduce":
            return 2 * (n - 1) / n
        case "reduce_scatter" | "all_gather":
            return (n - 1) / n
        case _:
            return 1.0


def _order(kind: _NcclTestsLine) -> tuple[str, int, int, int, str]:
    return kind.op, kind.group.size, kind.group.stride or 0, kind.nbytes, f"{kind.dtype} {kind.algorithm}"


def _kind(op: Collective, plan: Plan) -> _NcclTestsLine:
    whole, part = _buffers(op, plan)
    return _NcclTestsLine(op_name(op), op.group.form, op.algorithm, whole.nbytes, part.count, part.dtype, part.sparse)


def _buffers(op: Collective, plan: Plan) -> tuple[Buffer, Buffer]:
    """Return the buffer of the size, and the buffer of the count."""
    match op:
        case ops.AllReduce() | ops.Reduce() | ops.Broadcast():
            return plan.buffer(op.buffer), plan.buffer(op.buffer)
        case ops.ReduceScatter():
            return plan.buffer(op.src), plan.buffer(op.dst)
        case ops.AllGather():
            return plan.buffer(op.dst), plan.buffer(op.src)
        case _:
            assert_never(op)


def _row(kind: _NcclTestsLine, trace: Trace, of_groups: Mapping[Group, Sequence[NDArray[np.int64]]]) -> CollectiveRow:
    pairs = [_calls(trace, np.concatenate(parts), group) for group, parts in of_groups.items()]
    call_s, waited_s = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    time_s = _median(call_s)
    algbw_Bps = kind.nbytes / time_s if time_s else np.nan
    return CollectiveRow(
        kind,
        calls=len(call_s),
        time_s=time_s,
        algbw_Bps=algbw_Bps,
        busbw_Bps=algbw_Bps * bus_factor(kind.op, kind.group.size),
        wait_median_s=_median(waited_s),
        wait_mean_s=float(waited_s.mean()) if waited_s.size else np.nan,
        transfer_total_s=float(call_s.sum()) * kind.group.size,
        wait_total_s=float(waited_s.sum()),
    )


def _calls(trace: Trace, rows: NDArray[np.int64], group: Group) -> tuple[_Seconds, _Seconds]:
    """Return the seconds of each finished call, `[n_calls]`, and how long its members waited, `[n_calls, size]`."""
    ready_s, start_s, end_s = (group.split(each[rows], axis=1) for each in (trace.ready_s, trace.start_s, trace.end_s))
    call_s = end_s.max(axis=2) - ready_s.max(axis=2)  # [instance, block, offset]; NaN if a member did not finish
    finished = np.isfinite(call_s)
    return call_s[finished], np.moveaxis(start_s - ready_s, 2, -1)[finished]


def _median(values: _Seconds) -> float:
    return float(np.median(values)) if values.size else np.nan
