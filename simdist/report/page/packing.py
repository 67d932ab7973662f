"""Traces in few bytes: the timeline data for the script of a page.

A packed plan is a small JSON object (`plan_of_page`): texts, streams and styles of the operations, and which operation
stands in which row of a trace. A packed trace (`pack`) is its times, base64 of a zlib stream of whole numbers.

**Resolution.** Times are counted in ticks. The tick is the finest power of ten of a second of which 2**30 hold the
longest time: between 0.93e-9 and 9.3e-9 of the makespan. Every instant is rounded once, to half a tick, and lengths are
differences of instants; so a time in the page is right to 1e-8 of the makespan, and a length to 2e-8.

**Layout.** Three tables of `[row, rank]`. Rows are those of the trace, stream by stream in the order of `Plan.streams`;
a *lane* is a stream of a rank.

    gap     ready - end of the operation before in the lane; of the first one: ready
    wait    start - ready
    took    end - start

An operation that did not run has the largest number as `took`, and the lane goes on from the one before it. Clocks
that were corrected can make a gap negative, so numbers are folded: 0, -1, 1, -2 ... are 0, 1, 2, 3 ... They are uint32,
little-endian, of a whole table first all lowest bytes, then all second lowest and so on: most bytes are 0 then, or what
they were a step before, and deflate leaves 0.2 bytes of a simulated span and 5 of a noisy measured one.

A `wait` of the host is a moment in a trace, the one when it is over. Here it is `ready` since the host has been blocked
(see `simdist.traces.waiting.host_waits`), as a collective is ready since it waits for others.
"""

import base64
import math
import re
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simdist.plan import (
    COLLECTIVES,
    Enter,
    Op,
    Plan,
    Wait,
    lane_of,
    occurrences,
    op_text,
    reads,
    writes,
)
from simdist.report.lanes import HOST_BLOCKED, LEGEND, WAITING_FOR_OTHERS, style_of
from simdist.report.palette import Style
from simdist.traces.trace import Trace
from simdist.traces.waiting import host_waits, only_steps, step_end_s

#: Length of an operation that did not run.
DID_NOT_RUN = 2**32 - 1

_MOST_TICKS = 2**30  # so that the difference of any two instants fits int32, even of negative ones

#: An object of JSON.
_Record = dict[str, object]


@dataclass(frozen=True, slots=True)
class _PackedTrace:
    """The times of a trace as a page holds them.

    Args:
        tick_s: Seconds in a tick, a power of ten.
        data: Base64 of the compressed times; see the module.
        begin: When each rank was done with all steps before the first that is packed, ticks `[world_size]`.
    """

    tick_s: float
    data: str
    begin: tuple[int, ...] = ()


def pack(trace: Trace, steps: range | None = None) -> _PackedTrace:
    """Pack the times of a trace; equal traces give equal bytes.

    Args:
        trace: The trace to pack.
        steps: Consecutive ones; the others are packed as if they did not run. All if None.
    """
    ready_s = trace.ready_s.copy()
    blocked = host_waits(trace)
    ready_s[blocked.rows] = blocked.begin_s
    packed = only_steps(trace, steps) if steps else trace
    ran = np.isfinite(ready_s) & np.isfinite(packed.start_s) & np.isfinite(packed.end_s)
    times_s = np.where(ran, [ready_s, trace.start_s, trace.end_s], 0.0)
    tick_s = _tick_s(float(np.abs(times_s).max(initial=0.0)))
    times = np.rint(times_s / tick_s).astype(np.int64)
    tables = [_tables(times[:, rows], ran[rows]) for rows in rows_of_streams(trace.plan).values()]
    numbers = (np.concatenate(parts).astype("<u4").view(np.uint8) for parts in zip(*tables, strict=True))
    planes = b"".join(each.reshape(-1, 4).T.tobytes() for each in numbers)  # first the lowest bytes of all numbers
    begin_s = step_end_s(trace)[steps.start - 1] if steps and steps.start else np.empty(0)
    begin = tuple(np.rint(begin_s / tick_s).astype(int).tolist())
    return _PackedTrace(tick_s, base64.b64encode(zlib.compress(planes, 6)).decode(), begin)


def rows_of_streams(plan: Plan) -> dict[str, NDArray[np.int64]]:
    """Return the rows of a trace that each stream in use runs, in the order in which it runs them."""
    streams = plan.streams
    stream_of_rows = np.zeros(plan.n_instances, dtype=np.int16)
    for each in occurrences(plan):
        stream_of_rows[each.rows] = streams.index(lane_of(each.op).stream)
    rows = {stream: np.flatnonzero(stream_of_rows == number) for number, stream in enumerate(streams)}
    return {stream: found for stream, found in rows.items() if len(found)}


def _tick_s(longest_s: float) -> float:
    """Return the finest power of ten of a second of which `_MOST_TICKS` hold `longest_s`; a nanosecond for none."""
    if longest_s == 0.0:
        return 1e-9
    exponent = math.ceil(math.log10(longest_s / _MOST_TICKS))
    return float(f"1e{exponent}")  # the number that a page reads from the same letters; 10.0**exponent may be another


def _tables(times: NDArray[np.int64], ran: NDArray[np.bool_]) -> tuple[NDArray[np.uint32], ...]:
    """Return gap, wait and took of the rows of a stream, each flat.

    Args:
        times: ready, start and end, in ticks `[3, n_rows, world_size]`.
        ran: Whether each row ran, `[n_rows, world_size]`.
    """
    ready, start, end = times
    gap = np.where(ran, ready - _end_before(end, ran), 0)
    took = np.where(ran, _folded(end - start), DID_NOT_RUN)
    return tuple(table.astype(np.uint32).ravel() for table in (_folded(gap), _folded(start - ready), took))


def _end_before(end: NDArray[np.int64], ran: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return when the operation before that ran was done on the rank, 0 before the first, `[n_rows, world_size]`."""
    newest = np.maximum.accumulate(np.where(ran, np.arange(1, len(end) + 1)[:, None], 0), axis=0)  # row + 1, or 0
    before = np.concatenate([np.zeros_like(newest[:1]), newest[:-1]])
    padded = np.concatenate([np.zeros_like(end[:1]), end])
    return np.take_along_axis(padded, before, axis=0)


def _folded(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, 2, 3, 4 ... for 0, -1, 1, -2, 2 ..."""
    return np.where(numbers < 0, -2 * numbers - 1, 2 * numbers)


def plan_record(plan: Plan, *, ranks_per_node: int | None = None) -> _Record:
    """Return a plan's names, operations and trace rows for a page.

    Args:
        plan: The plan.
        ranks_per_node: Consecutive ranks that share a node, if it is known.
    """
    numbers: dict[Op, int] = {}
    bodies = [[numbers.setdefault(op, len(numbers)) for op in body] for body in plan.bodies]
    styles = styles_of(plan)
    streams = list(rows_of_streams(plan))
    nbytes = {buffer.name: buffer.nbytes for buffer in plan.buffers}
    return {
        "name": plan.name,
        "worldSize": plan.world_size,
        "ranksPerNode": ranks_per_node,
        "streams": streams,
        "styles": [{"key": style_key(style), "label": style.label, "hatch": style.hatch[:1]} for style in styles],
        "ops": [_op_record(op, streams, styles, nbytes) for op in numbers],
        "bodies": bodies,
        "order": [{"bodies": run.bodies, "times": run.times} for run in plan.order],
    }


def styles_of(plan: Plan) -> list[Style]:
    """Return the styles that the spans of a plan can have, in the order of the legend."""
    used = {style for body in plan.bodies for op in body for style in (style_of(op), _waiting_style(op))}
    return [style for style in LEGEND if style in used]


def style_key(style: Style) -> str:
    """Return the name of a style in the style sheet, such as `waiting-for-others`."""
    return re.sub(r"\W+", "-", style.label)


def _waiting_style(op: Op) -> Style | None:
    """Return how the time between ready and start is drawn; None if nothing is."""
    if isinstance(op, COLLECTIVES):
        return WAITING_FOR_OTHERS
    return HOST_BLOCKED if isinstance(op, Wait | Enter) else None


def _op_record(op: Op, streams: list[str], styles: list[Style], nbytes: dict[str, int]) -> _Record:
    waiting = _waiting_style(op)
    stream = lane_of(op).stream
    record: _Record = {
        "text": op_text(op),
        # a body that never runs has operations of no stream
        "stream": streams.index(stream) if stream in streams else -1,
        "style": styles.index(style_of(op)) if style_of(op) in styles else -1,
        "waitStyle": styles.index(waiting) if waiting in styles else -1,
    }
    if isinstance(op, COLLECTIVES):
        moved = (sum(nbytes[name] for name in names) for names in (reads(op), writes(op)))
        record |= {"group": [op.group.size, op.group.stride, op.group.ranks], "nbytes": max(moved)}
    return record
