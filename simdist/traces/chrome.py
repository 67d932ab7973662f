"""Traces for a trace viewer, in Chrome's Trace Event Format. ui.perfetto.dev and chrome://tracing open it.

    process   a rank
    threads   steps, host, compute, comm, io
    spans     operations; a collective is a span from `ready` to `end`, and inside it `wait for others` and `transfer`

    process   links, if some misbehaved
    threads   a link
    spans     the link has less than its rate, or flows of other jobs share it

The spans of a thread must nest: Perfetto drops a span that partly overlaps another, even by a nanosecond. Four rules
ensure nesting.

* Times are whole nanoseconds, rounded once per instant. Lengths are differences of times. So adjacent spans stay
  adjacent, and nested spans stay nested.
* The format requires microseconds. Perfetto multiplies them by 1000 and truncates, but in floating point 1.001 * 1000
  is 1000.999... If that would lose a nanosecond, the next larger number is written.
* A span begins at 0 or later, and not before the previous span of its thread, in the order of the plan, has ended.
  Simulated streams always satisfy this. In a measured trace, a clock correction can violate it slightly. Then the later
  span is cut.
* Steps overlap on the streams when the host runs ahead, so they have a thread of their own. A step of a rank extends
  from the end of the previous step to its own end (see `simdist.traces.waiting.step_end_s`).

A `wait` of the host is a span from the end of the previous host operation. Delays, ticks and waits of length 0 did not
happen and are left out. Other operations of length 0 stay, with duration 0.

A span takes about 200 bytes, and a collective has up to three spans. So 64 ranks x 1000 steps take about 150 MB, and
viewers get slow before that. Select steps and ranks.

Source:
    Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simdist.errors import RunError, TraceError
from simdist.plan import LEVELS, Op, Plan, op_text, ops
from simdist.plan.group import Group
from simdist.plan.text import op_name
from simdist.traces.links import link_in_words
from simdist.traces.reads import Reads, expected
from simdist.traces.trace import Trace
from simdist.traces.waiting import host_waits, step_end_s

_STEPS = "steps"  # a thread of each rank, besides its streams
_THREADS_PER_RANK = 10
_NEVER = -(2**62)
_LINKS_PID = 10**8  # above all ranks and their threads
_PAUSES = ops.Enter | ops.Delay | ops.Tick | ops.Wait
_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def write_chrome(path: Path, lines: Iterator[str]) -> None:
    """Write the text of a trace for Perfetto. If the path ends in `.gz`, the file is compressed; Perfetto opens it too.

    Args:
        path: Such as `trace.json` or `trace.json.gz`. Equal traces give equal bytes.
        lines: From `chrome_trace`.

    Raises:
        RunError: The file cannot be written.
    """
    try:
        with path.open("wb") as file:
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as packed:
                    packed.writelines(line.encode() for line in lines)
            else:
                file.writelines(line.encode() for line in lines)
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror or error}); give a file in a writable folder"
        ) from None


def chrome_trace(
    trace: Trace, *, steps: Sequence[int] | None = None, ranks: Sequence[int] | None = None, reads: Reads | None = None
) -> Iterator[str]:
    """Return the JSON text of a trace, event by event.

    Args:
        trace: The trace to write.
        steps: Steps to include, such as `range(100, 110)`; all if None.
        ranks: Ranks to include; all if None.
        reads: Storage levels of samples; the planned ones if None.

    Returns:
        Lines of text that together form one JSON object. Only the trace is held in memory.

    Raises:
        TraceError: The trace has no such step or rank, or the reads belong to another plan.
    """
    chosen_steps = _chosen("step", steps, trace.plan.n_steps)
    chosen_ranks = _chosen("rank", ranks, trace.plan.world_size)
    if trace.plan.dataset and reads is None:
        reads = expected(trace.plan)
    if reads:
        reads.check(trace.plan)
    return _lines(trace, chosen_steps, chosen_ranks, reads)


def _chosen(what: str, wanted: Sequence[int] | None, count: int) -> list[int]:
    if wanted is None:
        return list(range(count))
    outside = [number for number in wanted if not 0 <= number < count]
    if outside or not wanted:
        found = f"{what} {outside[0]} is not in the trace" if outside else f"no {what} is chosen"
        raise TraceError(f"{found}; choose among 0 to {count - 1}")
    return sorted(set(wanted))


def _lines(trace: Trace, steps: list[int], ranks: list[int], reads: Reads | None) -> Iterator[str]:
    about = {"plan": trace.plan.name, "digest": trace.plan.digest(), "source": trace.source}
    yield f'{{"displayTimeUnit":"ms","otherData":{_json(about)},"traceEvents":[\n'
    threads = _Threads(trace.plan)
    yield ",\n".join(_metadata(ranks, threads))
    for event in chain(_events(trace, steps, ranks, reads, threads), _link_events(trace, steps) if trace.links else ()):
        yield f",\n{event}"
    yield "\n]}\n"


class _Threads:
    """The threads of each rank: its steps, then its streams."""

    def __init__(self, plan: Plan) -> None:
        self._names = (_STEPS, *plan.streams)
        used = {ops.lane_of(op).stream for body in plan.bodies for op in body}
        self.used = [name for name in self._names if name == _STEPS or name in used]

    def tid(self, rank: int, name: str) -> int:
        """Return a unique number other than 0 and the number of its process, which viewers treat specially."""
        return max(_THREADS_PER_RANK, len(self._names)) * (rank + 1) + self._names.index(name)


def _metadata(ranks: list[int], threads: _Threads) -> Iterator[str]:
    """Name processes and threads, and order them: ranks, then links."""
    for rank in ranks:
        yield from _process(rank, f"rank {rank}", rank, {name: threads.tid(rank, name) for name in threads.used})


def _process(pid: int, name: str, sort_index: int, threads: Mapping[str, int]) -> Iterator[str]:
    yield _json({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
    yield _json({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": sort_index}})
    for number, (thread, tid) in enumerate(threads.items()):
        where = {"pid": pid, "tid": tid}
        yield _json({"ph": "M", "name": "thread_name", **where, "args": {"name": thread}})
        yield _json({"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": number}})


@dataclass(frozen=True, slots=True)
class _Label:
    """The fields that all spans of an operation have in common."""

    thread: str
    name: str
    args: dict[str, object]
    is_collective: bool
    is_pause: bool


def _label(plan: Plan, op: Op) -> _Label:
    args: dict[str, object] = {"op": op_text(op)}
    if not isinstance(op, _PAUSES | ops.KernelLaunch | ops.Forward | ops.Backward | ops.TrustRatios | ops.Optimize):
        touched = ops.reads(op), ops.writes(op)
        args["bytes"] = max(sum(plan.buffer(name).nbytes for name in names) for names in touched)
    if isinstance(op, ops.COLLECTIVES):
        args["group"] = str(op.group)
    return _Label(ops.lane_of(op).stream, _name(op), args, isinstance(op, ops.COLLECTIVES), isinstance(op, _PAUSES))


def _name(op: Op) -> str:
    """Return the operation and, if it has exactly one, its buffer."""
    match op:
        case ops.Wait():
            buffers: tuple[str, ...] = (op.buffer,)
        case ops.Unpack():
            buffers = (op.src,)
        case _:
            buffers = ops.writes(op)
    return f"{op_name(op)} {buffers[0]}" if len(buffers) == 1 else op_name(op)


def _events(trace: Trace, steps: list[int], ranks: list[int], reads: Reads | None, threads: _Threads) -> Iterator[str]:
    plan = trace.plan
    first = plan.first_instances().tolist()
    bodies = list(plan.body_of_steps())
    labels = [[(op, _label(plan, op)) for op in body] for body in plan.bodies]
    waits = host_waits(trace)
    waits_begin_s = dict(zip(waits.rows.tolist(), waits.begin_s, strict=True))
    samples = _samples(plan, reads) if reads else {}
    ends_s = np.vstack([np.zeros(plan.world_size), step_end_s(trace)])
    pens = [_Pen(rank, threads) for rank in ranks]
    for step in steps:
        for row, (op, label) in enumerate(labels[bodies[step]], start=first[step]):
            start_s = trace.start_s[row]
            end_s = trace.end_s[row]
            begin_s = trace.ready_s[row] if label.is_collective else waits_begin_s.get(row, start_s)
            times = (_ns(array[ranks]) for array in (begin_s, start_s, end_s))
            last = _last_ready(trace.ready_s[row], op.group) if isinstance(op, ops.COLLECTIVES) else None
            for pen, *moments_ns in zip(pens, *times, strict=True):
                if moments_ns[2] != _NEVER:
                    args = {"step": step, **label.args}
                    if row in samples:
                        counts = zip(LEVELS, samples[row][pen.rank].tolist(), strict=True)
                        args["samples"] = {level: n for level, n in counts if n}
                    yield from pen.operation(label, moments_ns, args, None if last is None else last[pen.rank])
        for pen, begin_ns, end_ns in zip(pens, _ns(ends_s[step, ranks]), _ns(ends_s[step + 1, ranks]), strict=True):
            yield from pen.step(step, begin_ns, end_ns)


def _samples(plan: Plan, reads: Reads) -> dict[int, NDArray[np.int64]]:
    """Return the samples that each rank read from each level, `[world_size, len(LEVELS)]`, by row of the load."""
    instances = (op for body in plan.body_of_steps() for op in plan.bodies[body])
    rows = (row for row, op in enumerate(instances) if isinstance(op, ops.Load))
    return dict(zip(rows, reads.n_samples, strict=True))


class _Pen:
    """Writes the spans of one rank so that spans of a thread do not overlap."""

    def __init__(self, rank: int, threads: _Threads) -> None:
        self.rank = rank
        self._threads = threads
        self._free_ns = dict.fromkeys(threads.used, 0)

    def operation(
        self, label: _Label, moments_ns: Sequence[int], args: dict[str, object], last: int | None
    ) -> Iterator[str]:
        """Write an operation; for a collective, also its parts and the rank that was ready last."""
        begin_ns, start_ns, end_ns = self._after_the_last(label.thread, moments_ns)
        if label.is_pause and begin_ns == end_ns:
            return
        tid = self._threads.tid(self.rank, label.thread)
        step = {"step": args["step"]}
        yield _span(label.name, label.thread, (self.rank, tid), (begin_ns, end_ns), args)
        if label.is_collective and begin_ns < start_ns:
            blamed = {**step, "last": f"rank {last}"}
            yield _span("wait for others", "wait", (self.rank, tid), (begin_ns, start_ns), blamed)
        if label.is_collective and start_ns < end_ns:
            yield _span("transfer", "transfer", (self.rank, tid), (start_ns, end_ns), step)

    def step(self, step: int, begin_ns: int, end_ns: int) -> Iterator[str]:
        """Write a step."""
        begin_ns, _, end_ns = self._after_the_last(_STEPS, (begin_ns, begin_ns, end_ns))
        if begin_ns < end_ns:
            where = self.rank, self._threads.tid(self.rank, _STEPS)
            yield _span(f"step {step}", "step", where, (begin_ns, end_ns), {"step": step})

    def _after_the_last(self, thread: str, moments_ns: Sequence[int]) -> tuple[int, int, int]:
        begin_ns, start_ns, end_ns = moments_ns
        begin_ns = max(begin_ns, self._free_ns[thread])
        end_ns = self._free_ns[thread] = max(end_ns, begin_ns)
        return begin_ns, min(max(start_ns, begin_ns), end_ns), end_ns


def _span(name: str, cat: str, where: tuple[int, int], when_ns: tuple[int, int], args: Mapping[str, object]) -> str:
    """Return a span of a process and thread, from one moment to another."""
    begin_ns, end_ns = when_ns
    times = {"ts": _us(begin_ns), "dur": _us(end_ns - begin_ns)}
    return _json({"ph": "X", "name": name, "cat": cat, "pid": where[0], "tid": where[1], **times, "args": args})


def _link_events(trace: Trace, steps: list[int]) -> Iterator[str]:
    """Write when links had less than their rate, or flows of other jobs, from the first to the last step."""
    ends_s = np.concatenate([[0.0], step_end_s(trace).max(axis=1)])
    first_s = float(ends_s[steps[0]])
    last_s = float(ends_s[steps[-1] + 1])
    tids = {link_in_words(name): _LINKS_PID + number for number, name in enumerate(trace.links, 1)}
    yield from _process(_LINKS_PID, "links", trace.plan.world_size, tids)
    for states, tid in zip(trace.links.values(), tids.values(), strict=True):
        for (begin_s, share, n_flows), (end_s, *_) in zip(states, [*states[1:], (last_s,)], strict=True):
            begin_ns, end_ns = _ns(np.clip([begin_s, end_s], first_s, last_s))
            told = []
            if share != 1:
                told.append(f"{100 * share:.3g} % of the rate")
            if n_flows > 0:
                told.append(f"{n_flows} flows of others")
            if told and begin_ns < end_ns:
                args = {"share": share, "flows": n_flows}
                yield _span(", ".join(told), "link", (_LINKS_PID, tid), (begin_ns, end_ns), args)


def _last_ready(ready_s: NDArray[np.float64], group: Group) -> NDArray[np.int64]:
    """Return for each rank the member of its group that was ready last, the first one in a tie, `[world_size]`."""
    ranks = group.split(np.arange(len(ready_s)))
    of_members_s = group.split(np.where(np.isnan(ready_s), -np.inf, ready_s))
    last = np.take_along_axis(ranks, of_members_s.argmax(axis=1)[:, None, :], axis=1)
    return group.joined(np.broadcast_to(last, ranks.shape))


def _ns(seconds: NDArray[np.float64]) -> list[int]:
    """Return whole nanoseconds, `_NEVER` for operations that did not run."""
    return [int(ns) for ns in np.where(np.isnan(seconds), _NEVER, np.rint(seconds * 1e9)).tolist()]


def _us(ns: int) -> float:
    """Return microseconds as a number that gives the nanoseconds back when multiplied by 1000 and truncated.

    >>> _us(2000), _us(1500), _us(1001)
    (2.0, 1.5, 1.0010000000000001)
    """
    us = ns / 1000
    return us if int(us * 1000) == ns else math.nextafter(us, math.inf)
