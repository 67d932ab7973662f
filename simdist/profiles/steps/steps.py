"""A rank's steps, assembled from the host's windows, phases and collectives; the same for CPUs and GPUs.

Marked steps extend from one mark to the next, so that no time between them is lost. Without marks, a step extends from
one update to the next.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from simdist.profiles.kineto.columns import UNKNOWN, EventColumns, Floats, Ints
from simdist.profiles.kineto.events import EventKind
from simdist.profiles.steps.calls import Transfers
from simdist.profiles.steps.host import HostRun, Passes
from simdist.profiles.steps.model import Gradient, MicroBatchTimes, RankStep, TracedCollective
from simdist.profiles.steps.phase_spans import Phases, StepPhase
from simdist.profiles.steps.step_parts import BESIDE, EXPOSED, StepPart

_MOST_UPDATES = 3  # updates, each after its own backward pass, in one step; more mean several steps


@dataclass(frozen=True, slots=True)
class Window:
    """A step on the host."""

    number: int
    start_s: float
    end_s: float


def windows_of(host: HostRun) -> tuple[list[Window], list[str]]:
    """Return the steps in order, and notes on how they were found."""
    marks = host.own.of(EventKind.STEP)
    n_updates = len(_last_updates_s(host.own.of(EventKind.OPTIMIZER), host.passes))
    if len(marks) > 1 or (len(marks) and n_updates <= _MOST_UPDATES):
        return _marked(marks), []
    marked = f"one step is marked, with {n_updates} updates in it" if len(marks) else "steps carry no marks"
    for edges_s, name in _repeating(host.own, host.passes):
        if len(edges_s) > 1:
            pairs = zip(edges_s[:-1].tolist(), edges_s[1:].tolist(), strict=True)
            note = f"{marked}; they are taken to reach {name}; call `profiler.step()` to mark them"
            return [Window(number, start_s, end_s) for number, (start_s, end_s) in enumerate(pairs)], [note]
    return [], []


def _marked(marks: EventColumns) -> list[Window]:
    """Extend a step to the mark of the next one if that follows; the profiler may have paused between them.

    Some profilers record a mark twice. A mark that begins well inside another one is not a step of its own.
    """
    marks = marks.where(np.append(True, 2 * marks.start_s[1:] > marks.start_s[:-1] + marks.end_s[:-1]))
    is_followed = np.diff(marks.link) == 1
    ends_s = np.append(np.where(is_followed, marks.start_s[1:], marks.end_s[:-1]), marks.end_s[-1:])
    return [Window(*each) for each in zip(marks.link.tolist(), marks.start_s.tolist(), ends_s.tolist(), strict=True)]


def _repeating(own: EventColumns, passes: Passes) -> list[tuple[Floats, str]]:
    """Return kinds of events that occur once in every step, the most reliable first."""
    updates = own.of(EventKind.OPTIMIZER)
    return [
        (_last_updates_s(updates, passes), "from the end of one `Optimizer.step` to the end of the next"),
        (own.of(EventKind.INPUT).start_s, "from one batch of the data loader to the next"),
        (own.of(EventKind.FORWARD).start_s, "from one forward pass to the next"),
        (passes.end_s, "from the end of one backward pass to the end of the next"),
    ]


def _last_updates_s(updates: EventColumns, passes: Passes) -> Floats:
    """Return the ends of updates; if no backward pass separates several, only the last counts."""
    n_passes = np.searchsorted(passes.start_s, updates.start_s)
    is_last = np.append(n_passes[1:] > n_passes[:-1], True)[: len(updates)]
    ends_s: Floats = np.sort(updates.end_s)[is_last]
    return ends_s


#: Maps instants on the host to the time at which the device had finished all work launched before.
_Computed: TypeAlias = Callable[[Floats], Floats]


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A step on the host, and its beginning and end on the device."""

    host: Window
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """All work of a rank's device: a GPU, or the CPU itself.

    Args:
        kind: The kind of device that computes.
        spans: The steps.
        phases: The phase of each instant.
        parts: The `StepPart` of each instant.
        transfers: The collectives.
        computed: End of the device's work that was launched before an instant.
        host_waits: The host waits for the device in every step.
        notes: Missing facts, and omissions.
    """

    kind: Literal["cpu", "cuda"]
    spans: list[StepSpan]
    phases: Phases
    parts: Phases
    transfers: Transfers
    computed: _Computed
    host_waits: bool
    notes: list[str]


def left_out(spans: Sequence[StepSpan], kept: Sequence[StepSpan]) -> str:
    """Describe the steps that were not kept."""
    return ", ".join(str(span.host.number) for span in spans if span not in kept)


def rank_steps(
    host: HostRun, run: DeviceRun, spans: Iterable[StepSpan], calls: tuple[TracedCollective, ...]
) -> list[RankStep]:
    """Return the steps with their phases, buckets and calls.

    Args:
        host: Work of the host.
        run: Work of the device.
        spans: The steps of the device that count.
        calls: Calls of all steps, in the order in which they were issued.
    """
    issued_s = np.array([call.issued_s for call in calls])
    reducing_s = _reducing_s(host)
    steps = []
    for span in spans:
        first, last = np.searchsorted(issued_s, [span.host.start_s, span.host.end_s]).tolist()
        borders_s = np.array([span.start_s, span.end_s])
        spent_s = {
            f"{phase.name.lower()}_s": float(np.diff(run.phases.before(phase, borders_s))[0]) for phase in StepPhase
        }
        own = _placed(host.passes, span, _exposed(run.parts, calls[first:last]))
        cuts_s = _cuts_s(run, own, borders_s)
        in_buckets_s = tuple(np.diff(run.phases.before(StepPhase.BACKWARD, cuts_s)).tolist())
        *parts_s, beside_s = (float(np.diff(run.parts.before(part, borders_s))[0]) for part in (*StepPart, BESIDE))
        parts_s[StepPart.COMPUTE] += beside_s
        times_s = span.start_s, span.end_s, span.host.start_s
        n_passes, earlier_s = _passes(host, run, span, own)
        step = RankStep(
            span.host.number,
            *times_s,
            **spent_s,
            parts_s=tuple(parts_s),
            buckets_s=in_buckets_s if any(call.of_gradients for call in own) else (),
            calls=own,
            held_s=_held_s(run.phases, own, cuts_s),
            micro_batches=n_passes,
            earlier_s=earlier_s,
            copy_outs=(),
            passes=(),
            reads_loss=True,
            of_passes=_of_passes(host, run, span),
        )
        inside = (reducing_s[0] >= span.start_s) & (reducing_s[0] < span.end_s)
        steps.append(replace(step, beside_s=beside_s, reducing_s=float(np.diff(reducing_s[:, inside], axis=0).sum())))
    return steps


def _exposed(parts: Phases, calls: Sequence[TracedCollective]) -> tuple[TracedCollective, ...]:
    """Return the calls with the time in which each was exposed."""
    exposed = []
    for call in calls:
        borders_s = np.array([call.start_s, call.end_s])
        seconds = float(np.diff(parts.before(EXPOSED[call.kind], borders_s))[0])
        exposed.append(replace(call, exposed_s=seconds))
    return tuple(exposed)


def _placed(passes: Passes, span: StepSpan, calls: Sequence[TracedCollective]) -> tuple[TracedCollective, ...]:
    """Return the calls of a step, and which of them come behind its last backward pass."""
    first, behind = np.searchsorted(passes.start_s, [span.host.start_s, span.host.end_s]).tolist()
    end_s = float(passes.end_s[behind - 1]) if behind > first else np.inf
    return tuple(replace(call, after_passes=call.issued_s > end_s) for call in calls)


def _reducing_s(host: HostRun) -> Floats:
    """Return when DDP copied gradients, from the end of a node to the end of its hooks, and back, `[2, n]`."""
    events = host.trace.host
    nodes, ready, copies = (events.of(kind) for kind in (EventKind.BACKWARD, EventKind.READY, EventKind.COPY_BACK))
    hooks_s = np.zeros((2, 0))
    if len(nodes):
        node = np.searchsorted(nodes.start_s, ready.start_s, side="right") - 1
        hooks_s = np.stack([ready.end_s, np.maximum(ready.end_s, nodes.end_s[node])])
    return np.concatenate([hooks_s, [copies.start_s, copies.end_s]], axis=1)


def _passes(host: HostRun, run: DeviceRun, span: StepSpan, calls: tuple[TracedCollective, ...]) -> tuple[int, float]:
    """Return the number of passes that add to the same gradients, and the backward seconds of those before the last.

    Nothing may be exchanged or updated before the last pass begins. Otherwise all passes count as one.
    """
    first, behind = np.searchsorted(host.passes.start_s, [span.host.start_s, span.host.end_s]).tolist()
    if behind - first < 2:
        return 1, 0.0
    first_s, last_s = host.passes.start_s[[first, behind - 1]].tolist()
    updates_s = host.own.of(EventKind.OPTIMIZER).start_s
    is_exchanged = any(call.of_gradients and call.issued_s < last_s for call in calls)
    if is_exchanged or np.any((updates_s > first_s) & (updates_s < last_s)):
        return 1, 0.0
    borders_s = np.clip(np.append(span.start_s, run.computed(np.array([last_s]))), span.start_s, span.end_s)
    return behind - first, float(np.diff(run.phases.before(StepPhase.BACKWARD, borders_s))[0])


def _of_passes(host: HostRun, run: DeviceRun, span: StepSpan) -> tuple[MicroBatchTimes, ...]:
    """Return the times of each backward pass of a step with what precedes it; one, if it has none."""
    first, behind = np.searchsorted(host.passes.start_s, [span.host.start_s, span.host.end_s]).tolist()
    ended_s = np.clip(run.computed(host.passes.end_s[first : max(first, behind - 1)]), span.start_s, span.end_s)
    cuts_s = np.maximum.accumulate(np.concatenate([[span.start_s], ended_s, [span.end_s]]))
    phases = (StepPhase.INPUT, StepPhase.FORWARD, StepPhase.HOST, StepPhase.BACKWARD)
    spent_s = (np.diff(run.phases.before(phase, cuts_s)).tolist() for phase in phases)
    return tuple(MicroBatchTimes(*each) for each in zip(*spent_s, strict=True))


def _cuts_s(run: DeviceRun, calls: tuple[TracedCollective, ...], borders_s: Floats) -> Floats:
    """Return when each gradient bucket was ready on the device, within the borders of the step.

    The first number is the beginning of the step. The last bucket includes the rest of the step. In a step without
    collectives, the only bucket includes all of it.
    """
    handed_over_s = np.array([call.issued_s for call in calls if call.of_gradients])
    ready_s = np.clip(run.computed(handed_over_s), *borders_s)
    cuts_s: Floats = np.maximum.accumulate(np.concatenate([borders_s[:1], ready_s[:-1], borders_s[1:]]))
    return cuts_s


def _held_s(phases: Phases, calls: tuple[TracedCollective, ...], cuts_s: Floats) -> tuple[float, ...]:
    """Return how long the host held the device up, divided by the work that the device did next.

    If a wait for a gradient collective follows, the host was late to hand over that bucket.
    """
    n_buckets = len(cuts_s) - 1
    held_s = np.zeros(n_buckets + 2)
    entered_s = np.array([call.start_s for call in calls if call.of_gradients])
    first, last = np.searchsorted(phases.edges_s, cuts_s[[0, -1]], side="right") - 1
    for piece in first + np.flatnonzero(phases.phase[first : last + 1] == StepPhase.HOST):
        begin_s = max(float(phases.edges_s[piece]), float(cuts_s[0]))
        end_s = min(float(phases.edges_s[piece + 1]), float(cuts_s[-1]))
        place = _place_after(phases, int(piece), entered_s, cuts_s)
        held_s[place] += max(0.0, end_s - begin_s)
    return tuple(held_s.tolist())


def _place_after(phases: Phases, piece: int, entered_s: Floats, cuts_s: Floats) -> int:
    """Return where the device continued after a pause: 0 is forward, 1 ... backward to each bucket, the last update."""
    n_buckets = len(cuts_s) - 1
    end_s = float(phases.edges_s[piece + 1])
    after = piece + 1
    while after < len(phases.phase) and phases.phase[after] in (StepPhase.HOST, StepPhase.WAIT, StepPhase.SHARDING):
        after += 1
    if after == len(phases.phase) or phases.edges_s[after] >= cuts_s[-1]:
        return n_buckets + 1
    if phases.phase[piece + 1] == StepPhase.WAIT:
        entered = np.flatnonzero((entered_s >= end_s) & (entered_s < phases.edges_s[after]))
        if len(entered):
            return 1 + int(entered[0])
    match phases.phase[after]:
        case StepPhase.BACKWARD:
            return 1 + int(np.searchsorted(cuts_s[1:-1], end_s, side="left"))
        case StepPhase.OPTIMIZE:
            return n_buckets + 1
        case _:
            return 0


def gradients_of(host: HostRun, run: DeviceRun, spans: Sequence[StepSpan]) -> tuple[tuple[Gradient, ...], list[str]]:
    """Return the parameters in the order of their gradients, and notes on anomalies.

    If a step has several backward passes, the last one counts, because it reduces gradients.

    Args:
        host: Work of the host.
        run: Work of the device.
        spans: The steps of the device that count. Each has a backward pass.
    """
    ready = host.trace.host.of(EventKind.READY)
    found: dict[tuple[int, ...], list[Floats]] = {}
    for span in spans:
        counts, seconds = _in_step(ready, host.passes, run, span)
        if len(counts) and np.all(counts != UNKNOWN):
            found.setdefault(tuple(counts.tolist()), []).append(seconds)
    if not found:
        return (), []
    counts_of, times = max(found.items(), key=lambda item: len(item[1]))
    medians_s = np.median(times, axis=0).tolist()
    gradients = tuple(Gradient(count, max(0.0, median_s)) for count, median_s in zip(counts_of, medians_s, strict=True))
    other = sum(map(len, found.values())) - len(times)
    note = f"in {other} of {len(spans)} steps gradients become ready in another order; their times are left out"
    return gradients, [note] if other else []


def _in_step(ready: EventColumns, passes: Passes, run: DeviceRun, span: StepSpan) -> tuple[Ints, Floats]:
    """Return sizes of the gradients of a step's last backward pass, and the backward seconds before each."""
    last = int(np.searchsorted(passes.start_s, span.host.end_s)) - 1
    begin_s = passes.start_s[last]
    end_s = passes.end_s[last]
    first, behind = np.searchsorted(ready.start_s, [begin_s, end_s]).tolist()
    instants_s = run.computed(np.append(begin_s, ready.end_s[first:behind]))
    spent_s = run.phases.before(StepPhase.BACKWARD, np.clip(instants_s, span.start_s, span.end_s))
    return ready.link[first:behind], np.diff(np.maximum.accumulate(spent_s))


def batch_size_of(host: HostRun, spans: Sequence[StepSpan]) -> tuple[int | None, int]:
    """Return the samples of a step, and its number of micro-batches.

    The samples of a micro-batch are the first dimension of the input of a step's first layer, in most steps. The
    micro-batches of a step are the batches that it takes from its loader or, without a loader, its backward passes.
    """
    layers = host.own.of(EventKind.LAYER)
    loads = host.own.of(EventKind.INPUT)
    borders_s = np.array([[span.host.start_s, span.host.end_s] for span in spans])
    firsts = np.searchsorted(layers.start_s, borders_s[:, 0])
    told = [int(size) for size in layers.link[firsts[firsts < len(layers)]] if size != UNKNOWN]
    begun_s = loads.start_s if len(loads) else host.passes.start_s
    count = max(1, int(np.median(np.diff(np.searchsorted(begun_s, borders_s), axis=1))))
    return (count * Counter(told).most_common(1)[0][0] if told else None), count
