"""Phases of a rank that computes on a GPU: the work of its compute streams, and their waits.

A kernel belongs to the phase in which the host launched it. While no kernel ran, the GPU waited for

* a collective that ended in the meantime, if the next kernel had been launched by then or the host itself was blocked:
  only an event can have held the kernel up (`wait_s`). The wait begins when this rank enters the collective. Before
  that, the GPU waits for whatever delays this rank;
* its input, while the host was in its data loader and had not launched the next kernel (`input_s`);
* the host, for the rest of the gap, if that is more than `PAUSE_S`. Shorter gaps are the time that a launch takes, 5 to
  200 microseconds. They belong to the phase of the next kernel.

On the device, a step lasts from the end of the last kernel of the previous step to the end of its own last kernel.
Kernels that were launched before the trace began do not belong to a step.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.kineto.columns import UNKNOWN, EventColumns, Floats, RankEvents
from simdist.profiles.kineto.events import EventKind
from simdist.profiles.kineto.messages import Message
from simdist.profiles.steps.calls import HAND_OVER_S, Transfers, backend_transfers
from simdist.profiles.steps.host import HostRun, host_spans, outermost
from simdist.profiles.steps.phase_spans import Phases, PhaseSpan, StepPhase, overlaid
from simdist.profiles.steps.step_parts import CLOCKS_S, PAUSE_S, gpu_parts
from simdist.profiles.steps.steps import DeviceRun, StepSpan, Window, left_out

_NEARLY = 0.9  # a share that allows for a step that differs


def cuda_run(host: HostRun, windows: Sequence[Window]) -> DeviceRun:
    """Return the work of a GPU in its complete steps, if any."""
    kernels = _kernels(host)
    transfers = _collectives(host.trace)
    woken_s = CLOCKS_S
    if not len(transfers.end_s):  # backends such as gloo move tensors of the device through host memory
        transfers = backend_transfers(host.trace)
        woken_s = HAND_OVER_S
    spans = _spans(windows, kernels)
    phases = _phases(host, kernels, transfers, spans, woken_s)
    whole = [span for span, is_whole in zip(spans, _are_whole(host.trace, windows), strict=True) if is_whole]
    lost = left_out(spans, whole)
    notes = [f"steps of which kernels are missing were left out: {lost}"] if lost else []
    if n_before := int(np.isneginf(_launches(host.trace, host.trace.device)[0]).sum()):
        notes.append(f"{n_before:,} kernels and copies were launched before the trace began: they belong to no step")
    waits = _host_waits(host.own, windows, kernels)
    parts = gpu_parts(host, kernels.queue_s(), transfers, phases)
    return DeviceRun("cuda", whole, phases, parts, transfers, kernels.computed, host_waits=waits, notes=notes)


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The work of a GPU's compute streams in the order of start, including copies on these streams.

    Args:
        start_s: When each kernel or copy began, or the end of the one before if that is later, `[n]`.
        end_s: When each ended, at least `start_s`, `[n]`.
        launch_s: When the host launched it; -inf if that was before the trace began, `[n]`.
        queued_s: When the launch took effect, `[n]`: when its call returned or when the first kernel or copy of the
            call began, whichever is earlier. A call may take milliseconds during which nothing is queued.
        kind: An `EventKind`, `[n]`.
        stream: Number of the stream, `[n]`.
        phase: In which the host launched it, `[n]`. What is copied beside the wire of a sharded model is a part of the
            exchange, `WAIT`, and counts while nothing else runs.
    """

    start_s: Floats
    end_s: Floats
    launch_s: Floats
    queued_s: Floats
    kind: NDArray[np.int8]
    stream: NDArray[np.int32]
    phase: NDArray[np.int8]

    @property
    def on_main(self) -> NDArray[np.bool_]:
        """Which of them ran on the busiest stream, `[n]`."""
        return np.asarray(self.stream == np.bincount(self.stream, weights=self.end_s - self.start_s).argmax())

    def queue_s(self) -> Floats:
        """Return when each kernel of the busiest stream was queued, and when it began, `[2, n]`."""
        return np.stack([self.queued_s[self.on_main], self.start_s[self.on_main]])

    def computed(self, times_s: Floats) -> Floats:
        """Return when the device had finished all work launched before some instants; -inf if there was none."""
        order = np.argsort(self.launch_s, kind="stable")
        done_s = np.append(-np.inf, np.maximum.accumulate(self.end_s[order]))
        return done_s[np.searchsorted(self.launch_s[order], times_s, side="left")]


def _kernels(host: HostRun) -> _Kernels:
    """Return the work of the compute streams."""
    trace = host.trace
    device = trace.device
    is_kernel = device.kind == EventKind.KERNEL
    busy_s = np.bincount(device.thread[is_kernel], weights=(device.end_s - device.start_s)[is_kernel])
    is_copy = (device.kind == EventKind.COPY_IN) | (device.kind == EventKind.COPY)
    events = device.where(is_kernel | (is_copy & (device.thread == int(busy_s.argmax()))))
    launch_s, _ = _launches(trace, events)
    queued_s, _ = _launches(trace, events, in_effect=True)
    phase = _launched_in(host, launch_s)
    phase[(phase == StepPhase.SHARDING) & (events.thread != busy_s.argmax())] = StepPhase.WAIT
    start_s, end_s = _one_by_one(events, phase == StepPhase.WAIT)
    return _Kernels(start_s, end_s, launch_s, queued_s, events.kind, events.thread, phase)


def _one_by_one(events: EventColumns, is_beside: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return when each kernel was the one that counts: the first to begin, of those beside the wire only alone."""
    ended_s = np.maximum.accumulate(np.where(is_beside, -np.inf, events.end_s))
    start_s = np.maximum(events.start_s, np.append(-np.inf, ended_s[:-1]))
    next_s = np.minimum.accumulate(np.where(is_beside, np.inf, start_s)[::-1])[::-1]
    ended_s = np.maximum.accumulate(np.where(is_beside, np.clip(events.end_s, start_s, next_s), ended_s))
    start_s = np.maximum(start_s, np.append(-np.inf, ended_s[:-1]))
    return np.minimum(start_s, ended_s), ended_s


def _launches(trace: RankEvents, events: EventColumns, *, in_effect: bool = False) -> tuple[Floats, NDArray[np.int32]]:
    """Return when and on which thread the host launched each event of a device.

    With `in_effect`, the result is when the launch took effect: when the call returned or when its first event began,
    whichever is earlier. A call that waits for its copy launched the copy when the call began.

    An event without a launch in the trace was launched with the work before it on its stream, because streams keep the
    order. The first events of a stream were launched before the trace began, at -inf. If the trace has launches, but
    none for a stream, each event of that stream counts as launched when it began, from the first launch of any stream
    on. Threads are -1 if they are unknown.
    """
    launches = trace.host.of(EventKind.LAUNCH, EventKind.BLOCKING)
    order = np.argsort(launches.link, kind="stable")
    at = np.searchsorted(launches.link[order], events.link)
    is_found = (np.append(launches.link[order], UNKNOWN)[at] == events.link) & (events.link > 0)
    found = np.where(is_found, np.append(order, -1)[at], -1)
    launched_s = launches.start_s
    if in_effect:
        begins_s = np.full(len(launches) + 1, np.inf)
        np.minimum.at(begins_s, found, events.start_s)
        returned_s = np.maximum(launched_s, np.minimum(launches.end_s, begins_s[:-1]))
        launched_s = np.asarray(np.where(launches.kind == EventKind.BLOCKING, launched_s, returned_s))
    launch_s = np.append(launched_s, np.nan)[found]
    for stream in np.unique(events.thread[found < 0]):
        on_stream = np.flatnonzero(events.thread == stream)
        known = np.maximum.accumulate(np.where(found[on_stream] < 0, -1, np.arange(len(on_stream))))
        if np.any(known >= 0):
            launch_s[on_stream] = np.where(known < 0, -np.inf, launch_s[on_stream[known]])
        else:
            starts_s = events.start_s[on_stream]
            first_s = launches.start_s.min() if len(launches) else -np.inf
            launch_s[on_stream] = np.where(starts_s < first_s, -np.inf, starts_s)
    return launch_s, np.append(launches.thread, np.int32(-1))[found]


def _collectives(trace: RankEvents) -> Transfers:
    """Return the collectives of the GPU, from its kernels and the host's operators."""
    done = trace.device.of(EventKind.COLLECTIVE)
    issued_s, threads = _launches(trace, done)
    issues = trace.host.of(EventKind.ISSUE)
    if len(done) and np.all(threads < 0):
        _launch_in_order(trace, issues, done, issued_s, threads)
    order = np.argsort(issued_s, kind="stable")
    messages = []
    before_s = -np.inf
    for link, at_s, thread in zip(done.link[order].tolist(), issued_s[order].tolist(), threads[order], strict=True):
        messages.append(_filled(trace.device_messages[link], trace.messages, issues, (before_s, at_s), thread))
        before_s = at_s
    return Transfers(issued_s[order], done.start_s[order], done.end_s[order], tuple(messages))


def _launch_in_order(
    trace: RankEvents, issues: EventColumns, done: EventColumns, issued_s: Floats, threads: NDArray[np.int32]
) -> None:
    """Assign kernels without a known launch to collectives, in their order.

    ROCm up to 6.2 does not show what launched kernels of RCCL: https://github.com/ROCm/roctracer/issues/100. Other
    profilers do not record the calls that launch them. There, each collective launches one kernel.
    """
    launches = trace.host.of(EventKind.LAUNCH)
    launches = launches.where(~np.isin(launches.link, trace.device.link))
    inside = np.zeros(len(launches), np.bool_)
    is_outer = np.zeros(len(issues), np.bool_)
    for thread in np.unique(issues.thread):
        own = issues.on(int(thread))
        is_outer[issues.thread == thread] = outermost(own)
        ended_s = np.append(np.maximum.accumulate(own.end_s), -np.inf)
        last = np.searchsorted(own.start_s, launches.start_s, side="right") - 1
        inside |= (launches.thread == thread) & (launches.start_s <= ended_s[last])
    launches = launches.where(inside) if inside.any() else issues.where(is_outer)
    n_before = max(0, len(done) - len(launches))  # launched before the trace began
    n = len(done) - n_before
    if np.all(launches.start_s[:n] <= done.start_s[n_before:]):
        issued_s[n_before:] = launches.start_s[:n]
        threads[n_before:] = launches.thread[:n]


_NESTED = 6  # largest depth of nested operators of one collective: c10d, the parameters, the annotation


def _filled(
    message: Message, told: Sequence[Message], issues: EventColumns, between_s: tuple[float, float], thread: int
) -> Message:
    """Add information from operators around the launch; for a group of sends, since the last one."""
    before_s, at_s = between_s
    last = int(np.searchsorted(issues.start_s, at_s, side="right"))
    for i in range(last - 1, max(last - 1 - _NESTED, -1), -1):
        is_grouped = message.kind == "other" and issues.start_s[i] > before_s
        if issues.thread[i] == thread and (issues.end_s[i] >= at_s or is_grouped):
            message = message.filled_from(told[int(issues.link[i])])
    return message


def _spans(windows: Sequence[Window], kernels: _Kernels) -> list[StepSpan]:
    """Return the beginning and end of each step on the device; steps that launched nothing have no duration there."""
    borders_s = np.array([[window.start_s, window.end_s] for window in windows])
    edges_s = np.maximum(borders_s, kernels.computed(borders_s))
    return [StepSpan(each, *of_step) for each, of_step in zip(windows, edges_s.tolist(), strict=True)]


def _are_whole(trace: RankEvents, windows: Sequence[Window]) -> list[bool]:
    """Return which steps contain all work that they launched: a damaged step may lack the device's part.

    Some calls launch nothing that the profiler sees. Each step has its share of these calls. At the end of the trace,
    work that was launched after the last visible event is missing. A step beyond it is incomplete.
    """
    launches = trace.host.of(EventKind.LAUNCH)
    is_seen = np.isin(launches.link, trace.device.link) & (launches.link >= 0)
    n_seen = np.append(0, np.cumsum(is_seen))
    borders = np.searchsorted(launches.start_s, [[window.start_s, window.end_s] for window in windows])
    shares = np.diff(n_seen[borders], axis=1)[:, 0] / np.maximum(np.diff(borders, axis=1)[:, 0], 1)
    missing_s = np.append(launches.start_s, np.inf)[np.flatnonzero(np.append(True, is_seen))[-1]]
    ends_s = np.array([window.end_s for window in windows])
    whole: list[bool] = ((shares >= _NEARLY * shares.max()) & (ends_s <= missing_s)).tolist()
    return whole


def _phases(
    host: HostRun, kernels: _Kernels, transfers: Transfers, spans: Sequence[StepSpan], woken_s: float
) -> Phases:
    """Return the phase of each instant on the device, from the first to the last step."""
    begin_s = spans[0].start_s
    end_s = spans[-1].end_s
    inside = (kernels.end_s > begin_s) & (kernels.start_s < end_s)
    starts_s = np.clip(kernels.start_s[inside], begin_s, end_s)
    ends_s = np.clip(kernels.end_s[inside], begin_s, end_s)
    phase = kernels.phase[inside]
    phase[(kernels.kind[inside] == EventKind.COPY_IN) & (phase == StepPhase.FORWARD)] = StepPhase.INPUT
    edges_s = np.concatenate([[begin_s], np.stack([starts_s, ends_s], axis=1).ravel(), [end_s]])
    gaps_s = edges_s.reshape(-1, 2)
    queued_s = np.append(kernels.queued_s[inside], np.inf)  # the last one has no successor
    base = np.append(np.repeat(phase, 2), StepPhase.FORWARD).astype(np.int8)
    return overlaid(edges_s, base, _gaps(host, gaps_s, queued_s, transfers, woken_s))


def _launched_in(host: HostRun, launch_s: Floats) -> NDArray[np.int8]:
    """Return the phase in which the host was when it launched each kernel."""
    spans = [span for span in host_spans(host) if span.start_s < span.end_s]
    if not spans:
        return np.full(len(launch_s), StepPhase.FORWARD, np.int8)
    edges_s = np.array([min(span.start_s for span in spans) - 1.0, max(span.end_s for span in spans) + 1.0])
    return overlaid(edges_s, np.array([StepPhase.FORWARD], np.int8), spans).at(launch_s)


def _gaps(host: HostRun, gaps_s: Floats, queued_s: Floats, transfers: Transfers, woken_s: float) -> Iterator[PhaseSpan]:
    """Find the phases of gaps that are longer than a launch.

    A kernel that was queued no later than `woken_s` after the end of a collective has waited for it.
    """
    loads = host.own.of(EventKind.INPUT)
    blocks = host.trace.host.of(EventKind.SYNC, EventKind.BLOCKING)
    order = np.argsort(transfers.end_s, kind="stable")
    ended_s = transfers.end_s[order]
    entered_s = transfers.start_s[order]
    issued_s = transfers.issued_s[order]
    done_s = ended_s
    last_done = np.searchsorted(done_s, gaps_s[:, 1] + CLOCKS_S) - 1
    done_s = np.append(done_s, -np.inf)[last_done]
    has_waited = (done_s > gaps_s[:, 0]) & (gaps_s[:, 1] > gaps_s[:, 0])
    n_loads = np.searchsorted(loads.start_s, gaps_s[:, 1]) - np.searchsorted(loads.end_s, gaps_s[:, 0])
    is_long = gaps_s[:, 1] - gaps_s[:, 0] > PAUSE_S
    for i in np.flatnonzero(has_waited | (n_loads > 0) | is_long).tolist():
        start_s, end_s = gaps_s[i].tolist()
        if has_waited[i] and (queued_s[i] <= done_s[i] + woken_s or _is_blocked(blocks, float(done_s[i]))):
            first = int(np.searchsorted(ended_s, start_s, side="right"))
            came = first + int(entered_s[first : last_done[i] + 1].argmin())
            if entered_s[came] - start_s > PAUSE_S:
                yield from _idle(start_s, float(entered_s[came]), float(issued_s[came]), loads)
                start_s = float(entered_s[came])
            yield PhaseSpan(start_s, min(float(done_s[i]), end_s), StepPhase.WAIT)
            start_s = min(float(done_s[i]), end_s)
        yield from _idle(start_s, end_s, float(queued_s[i]), loads)


def _is_blocked(blocks: EventColumns, time_s: float) -> bool:
    """Tell whether the host waited for the device at some instants."""
    last = int(np.searchsorted(blocks.start_s, time_s, side="right")) - 1
    return any(blocks.end_s[i] >= time_s - CLOCKS_S for i in range(last, max(last - 4, -1), -1))


def _idle(start_s: float, end_s: float, launch_s: float, loads: EventColumns) -> Iterator[PhaseSpan]:
    """Divide a gap without collectives between the data loader and the host before, between and after loading."""
    first = np.searchsorted(loads.end_s, start_s)
    last = np.searchsorted(loads.start_s, end_s)
    for i in range(int(first), int(last)):
        load_s = min(float(loads.end_s[i]), end_s)
        if load_s > launch_s + CLOCKS_S:
            break
        begin_s = max(float(loads.start_s[i]), start_s)
        if begin_s - start_s > PAUSE_S:
            yield PhaseSpan(start_s, begin_s, StepPhase.HOST)
        yield PhaseSpan(begin_s, load_s, StepPhase.INPUT)
        start_s = max(start_s, load_s)
    if end_s - start_s > PAUSE_S:
        yield PhaseSpan(start_s, end_s, StepPhase.HOST)


def _host_waits(own: EventColumns, windows: Sequence[Window], kernels: _Kernels) -> bool:
    """Tell whether the host waits for its device in nearly every step; one of a few steps may differ.

    It waits in a synchronising call if all earlier launches were done when that returned.
    """
    blocks = own.of(EventKind.SYNC, EventKind.BLOCKING)
    done_s = kernels.computed(blocks.start_s)
    blocks = blocks.where((done_s <= blocks.end_s + CLOCKS_S) & np.isfinite(done_s))
    counts = [int(np.diff(np.searchsorted(blocks.start_s, [w.start_s, w.end_s]))[0]) for w in windows]
    return sum(count > 0 for count in counts) >= max(1, math.floor(_NEARLY * len(windows)))
