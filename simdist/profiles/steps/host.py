"""A rank's host: its main thread, its backward passes, and the phase of each instant.

A backward pass is a sequence of nodes of the backward graph. No forward pass, batch, update or beginning of a step lies
between them. It ends with the last node, the last gradient that DDP copies back from its bucket, or the last
reduce-scatter of a sharded model, whichever is later. Work of the host between this end and the end of the optimizer's
step, such as clipping gradients, counts as the update. It cannot begin before the gradients are reduced.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.kineto.columns import EventColumns, Floats, RankEvents
from simdist.profiles.kineto.events import EventKind
from simdist.profiles.kineto.messages import CollectiveKind
from simdist.profiles.steps.phase_spans import PhaseSpan, StepPhase

_HOOK_S = 0.5e-3  # from the end of a node to the hand-over of the bucket that it filled


@dataclass(frozen=True, slots=True)
class Passes:
    """Backward passes, in order.

    Args:
        start_s: When the first node began, `[n]`.
        computed_s: When the last node ended, `[n]`.
        end_s: When the last gradient was in its place, `[n]`.
    """

    start_s: Floats
    computed_s: Floats
    end_s: Floats

    def containing(self, times_s: Floats) -> NDArray[np.bool_]:
        """Tell which instants are inside a pass."""
        of_pass = np.searchsorted(self.start_s, times_s, side="right") - 1
        return (of_pass >= 0) & (times_s <= np.append(self.end_s, np.inf)[of_pass])


@dataclass(frozen=True, slots=True)
class HostRun:
    """All work of a rank's host."""

    trace: RankEvents
    own: EventColumns
    passes: Passes


def host_run(trace: RankEvents) -> HostRun | None:
    """Find the main thread and its backward passes; None if nothing ran."""
    main = _main_thread(trace.host)
    return None if main is None else HostRun(trace, trace.host.on(main), _backward_passes(trace, main))


def _main_thread(host: EventColumns) -> int | None:
    """Return the thread that runs the training loop, or None if nothing ran.

    It is the thread with the profiler's marks. Without marks, it is the thread that updates, loads or calls the model,
    or else the busiest one.
    """
    for what in (EventKind.STEP, EventKind.OPTIMIZER, EventKind.INPUT, EventKind.FORWARD):
        found = host.thread[host.kind == what]
        if len(found):
            return int(np.bincount(found).argmax())
    own = host.thread[(host.kind != EventKind.TRANSFER) & (host.kind < EventKind.LAUNCH)]
    return int(np.bincount(own).argmax()) if len(own) else None


def _backward_passes(trace: RankEvents, main: int) -> Passes:
    """Find the backward passes, on whichever threads they ran."""
    host = trace.host
    nodes = _nodes(host)
    reduces = _issues(trace, "reduce_scatter")
    copies = host.where((host.kind == EventKind.COPY_BACK) | reduces)
    if not len(nodes):
        return Passes(np.zeros(0), np.zeros(0), np.zeros(0))
    ended_s = np.maximum.accumulate(nodes.end_s)
    breaks_s = np.sort(_breaks_s(host.on(main)))
    n_before = np.searchsorted(breaks_s, nodes.start_s, side="right")
    n_until = np.searchsorted(breaks_s, ended_s, side="left")
    is_first = np.append(True, n_before[1:] > n_until[:-1])
    starts_s = _with_gathers_s(trace, main, nodes.start_s[is_first], breaks_s)
    computed_s = ended_s[np.append(np.flatnonzero(is_first)[1:], len(nodes)) - 1]
    ends_s = computed_s.copy()
    of_pass = np.searchsorted(starts_s, copies.start_s, side="right") - 1
    belongs = of_pass >= 0
    belongs &= np.searchsorted(breaks_s, copies.start_s) <= np.searchsorted(breaks_s, computed_s)[of_pass]
    np.maximum.at(ends_s, of_pass[belongs], copies.end_s[belongs])
    return Passes(starts_s, computed_s, ends_s)


def _issues(trace: RankEvents, kind: CollectiveKind) -> NDArray[np.bool_]:
    """Tell which events of the host issue a collective of a kind."""
    is_kind = np.array([each.kind == kind for each in trace.messages] + [False])
    is_issue = trace.host.kind == EventKind.ISSUE
    return np.asarray(is_issue & is_kind[np.where(is_issue, trace.host.link, -1)])


def _with_gathers_s(trace: RankEvents, main: int, starts_s: Floats, breaks_s: Floats) -> Floats:
    """Return when passes begin, with the gathers before their first node: those on threads that run no forward pass.

    A sharded model gathers its last units before the first node of the backward pass can run.
    """
    gathers_s = trace.host.start_s[_issues(trace, "all_gather") & (trace.host.thread != main)]
    since_s = np.append(-np.inf, breaks_s)[np.searchsorted(breaks_s, starts_s, side="right")]
    since_s = np.maximum(since_s, np.append(-np.inf, starts_s[:-1]))
    first_s = np.append(gathers_s, np.inf)[np.searchsorted(gathers_s, since_s, side="right")]
    return np.asarray(np.minimum(starts_s, first_s))


def _nodes(host: EventColumns) -> EventColumns:
    """Return the nodes of the backward graph with their operators.

    Older profilers do not wrap a node and its hooks. There, a collective directly after a node belongs to it.
    """
    wrapped = host.of(EventKind.BACKWARD)
    bare = host.of(EventKind.NODE, EventKind.READY)
    if len(wrapped) or not len(bare):
        return wrapped
    ended_s = np.append(np.maximum.accumulate(bare.end_s), -np.inf)
    before_s = ended_s[np.searchsorted(bare.start_s, host.start_s, side="right") - 1]
    is_hook = np.isin(host.kind, (EventKind.ISSUE, EventKind.TRANSFER)) & (host.start_s - before_s < _HOOK_S)
    nodes = host.where(is_hook | np.isin(host.kind, (EventKind.NODE, EventKind.READY)))
    return replace(nodes, end_s=np.where(nodes.kind == EventKind.TRANSFER, nodes.start_s, nodes.end_s))


def _breaks_s(own: EventColumns) -> Floats:
    """Return the starts of events that no backward pass can span.

    If no module marks its forward pass, each operator outside of the backward graph indicates one.
    """
    whats = [EventKind.STEP, EventKind.INPUT, EventKind.FORWARD, EventKind.OPTIMIZER]
    if np.any(own.kind == EventKind.FORWARD):
        return own.of(*whats).start_s
    top = own.where((own.kind > EventKind.FORWARD) & (own.kind < EventKind.LAUNCH) & (own.kind != EventKind.TRANSFER))
    top = top.where(outermost(top))
    others = top.where(np.isin(top.kind, (EventKind.LAYER, EventKind.COPY_OUT, EventKind.PACK, EventKind.WORK)))
    return np.concatenate([own.of(*whats).start_s, others.start_s])


def outermost(events: EventColumns) -> NDArray[np.bool_]:
    """Tell which events of one thread are not enclosed by another."""
    ended_s = np.maximum.accumulate(events.end_s)
    return np.append(True, events.start_s[1:] >= ended_s[:-1])[: len(events)]


def gaps_between(starts_s: Floats, ends_s: Floats) -> Floats:
    """Return the idle times between the first start and the last end, `[n, 2]`.

    Example:
        >>> gaps_between(np.array([4.0, 0.0, 1.0]), np.array([5.0, 3.0, 2.0])).tolist()
        [[3.0, 4.0]]
    """
    order = np.argsort(starts_s, kind="stable")
    starts_s = starts_s[order][1:]
    reached_s = np.maximum.accumulate(ends_s[order])[:-1]
    is_gap = starts_s > reached_s
    return np.stack([reached_s[is_gap], starts_s[is_gap]], axis=1)


def host_spans(host: HostRun) -> list[PhaseSpan]:
    """Return the phases of the main thread: updates, batches, backward passes, and on top what shards the model.

    The rest is the forward pass.
    """
    own = host.own
    passes = host.passes
    inputs = own.of(EventKind.INPUT)
    updates = own.of(EventKind.OPTIMIZER)
    breaks_s = np.sort(own.of(EventKind.STEP, EventKind.INPUT, EventKind.FORWARD).start_s)
    found = [
        PhaseSpan(_update_start_s(start_s, end_s, passes, breaks_s), end_s, StepPhase.OPTIMIZE)
        for start_s, end_s in zip(updates.start_s.tolist(), updates.end_s.tolist(), strict=True)
    ]
    shards = np.any(_issues(host.trace, "reduce_scatter"))  # `replicate` has the same annotations
    units = host.trace.host.of(*([EventKind.UNIT] if shards else []))
    spans = (
        (inputs.start_s, inputs.end_s, StepPhase.INPUT),
        (passes.start_s, passes.end_s, StepPhase.BACKWARD),
        (units.start_s, units.end_s, StepPhase.SHARDING),
    )
    for starts_s, ends_s, phase in spans:
        found += [PhaseSpan(a, b, phase) for a, b in zip(starts_s.tolist(), ends_s.tolist(), strict=True)]
    return found


def _update_start_s(start_s: float, end_s: float, passes: Passes, breaks_s: Floats) -> float:
    """Return the end of the backward pass before an update, unless something else came in between.

    An optimizer with a closure, as in PyTorch Lightning, runs the pass itself. Its update begins after the pass.
    """
    before = int(np.searchsorted(passes.end_s, end_s, side="right")) - 1
    if before < 0:
        return start_s
    pass_end_s = float(passes.end_s[before])
    is_between = np.any((breaks_s >= pass_end_s) & (breaks_s < start_s))
    return start_s if is_between else pass_end_s
