"""Where a step goes on its device: every instant counts for one part, so that parts add up to the step.

On a GPU, in this order: a kernel computes; a kernel of a collective runs, and none computes; only a copy runs; the GPU
waits for its input. What is left is a gap between launches, short or long, or the host paused.

On a CPU: the main thread waits for its input, for a collective, or for nothing that is seen; it computes; or it is in
Python, between two operators.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.kineto.columns import EventColumns, Floats
from simdist.profiles.kineto.events import EventKind
from simdist.profiles.kineto.messages import CollectiveKind
from simdist.profiles.steps.calls import Transfers
from simdist.profiles.steps.host import HostRun, gaps_between
from simdist.profiles.steps.phase_spans import Phases, StepPhase, cut

PAUSE_S = 0.5e-3  # a gap that is longer is no mere launching
SWITCH_S = 25e-6  # that a GPU needs, profiled, from a kernel to the next, even if that is queued: mostly 1 to 10
CLOCKS_S = 50e-6  # by which the clocks of host and device may disagree after the profiler converted them


class StepPart(IntEnum):
    """A part of a step on its device.

    `COMPUTE` is busy computing. `ALL_REDUCE` to `OTHER` are exposed communication: a collective of this kind goes on,
    and nothing computes. `COPY` only copies. `INPUT` waits for a batch. `QUEUED` is idle though the host has launched
    the next kernel: it waits for an event, or for an unknown reason. Idle because the host has not, or because a GPU
    takes some microseconds from a kernel to the next: `SHORT_GAP` at most 0.5 ms, `LONG_GAP` more, and in `HOST_PAUSE`
    no thread of the host ran an operator either.
    """

    COMPUTE, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, POINT_TO_POINT, BROADCAST, REDUCE, OTHER = range(9)
    COPY, INPUT, QUEUED, SHORT_GAP, LONG_GAP, HOST_PAUSE = range(9, 15)


#: Code of what a CPU computes beside a collective; it is a share of `COMPUTE`.
BESIDE = len(StepPart)
#: Exposed communication, by kind.
EXPOSED: dict[CollectiveKind, StepPart] = {kind: StepPart[kind.upper()] for kind in get_args(CollectiveKind)}

OPERATORS = {kind for kind in EventKind if EventKind.BACKWARD <= kind <= EventKind.WORK} - {EventKind.TRANSFER}
_CALLS = (*OPERATORS, EventKind.LAUNCH, EventKind.SYNC, EventKind.BLOCKING)


def gpu_parts(host: HostRun, queue_s: Floats, transfers: Transfers, phases: Phases) -> Phases:
    """Return the part that each instant of a GPU belongs to.

    Args:
        host: Work of the host.
        queue_s: When each kernel of the main stream was launched, and when it began, `[2, n]`.
        transfers: The collectives.
        phases: Which phase each instant belongs to.
    """
    device = host.trace.device
    calls = host.trace.host.of(*_CALLS)
    ends_s = phases.edges_s[[0, -1]]
    idle_s = gaps_between(*(np.concatenate([times_s, ends_s]) for times_s in (calls.start_s, calls.end_s)))
    idle_s = idle_s[np.diff(idle_s, axis=1)[:, 0] > PAUSE_S]
    computing = device.of(EventKind.KERNEL)
    copying = device.of(EventKind.COPY, EventKind.COPY_IN)
    sending = dict(_by_kind(transfers))
    queue_s = np.stack([queue_s[0] + CLOCKS_S, queue_s[1]])
    spans_s = [_span_s(computing), *sending.values(), _span_s(copying), queue_s, idle_s.T]
    edges_s = _edges_s(phases, spans_s)
    at_s = (edges_s[:-1] + edges_s[1:]) / 2
    is_computing, *are_sending, is_copying, is_queued, is_idle = (_within(at_s, *span_s) for span_s in spans_s)
    loads = phases.at(at_s) == StepPhase.INPUT
    part = np.select(
        [is_computing, *are_sending, is_copying, loads, is_queued],
        [StepPart.COMPUTE, *sending, StepPart.COPY, StepPart.INPUT, StepPart.QUEUED],
        StepPart.SHORT_GAP,
    )
    seconds = np.diff(edges_s)
    part[(part == StepPart.QUEUED) & (_run_lengths_s(part == StepPart.QUEUED, seconds) < SWITCH_S)] = StepPart.SHORT_GAP
    is_long = _run_lengths_s(part == StepPart.SHORT_GAP, seconds) > PAUSE_S
    part[is_long] = np.where(is_idle, StepPart.HOST_PAUSE, StepPart.LONG_GAP)[is_long]
    return cut(edges_s, part.astype(np.int8), BESIDE + 1)


def cpu_parts(host: HostRun, transfers: Transfers, phases: Phases) -> Phases:
    """Return the part that each instant of a main thread belongs to; `BESIDE` where it computes beside a collective."""
    sending = dict(_by_kind(transfers))
    spans_s = [*sending.values(), _span_s(host.own.of(*OPERATORS))]
    edges_s = _edges_s(phases, spans_s)
    at_s = (edges_s[:-1] + edges_s[1:]) / 2
    *are_sending, is_computing = (_within(at_s, *span_s) for span_s in spans_s)
    phase = phases.at(at_s)
    waits = phase == StepPhase.WAIT
    part = np.select(
        [
            phase == StepPhase.INPUT,
            phase == StepPhase.HOST,
            *(waits & each for each in are_sending),
            waits,
            is_computing,
        ],
        [StepPart.INPUT, StepPart.HOST_PAUSE, *sending, StepPart.OTHER, StepPart.COMPUTE],
        StepPart.SHORT_GAP,
    )
    works = _within(at_s, *_span_s(host.own.of(EventKind.LAYER, EventKind.WORK)))  # a node of autograd may just sleep
    is_beside = (part == StepPart.COMPUTE) & works & np.any([np.zeros_like(works), *are_sending], axis=0)
    return cut(edges_s, np.where(is_beside, BESIDE, part).astype(np.int8), BESIDE + 1)


def _by_kind(transfers: Transfers) -> Iterator[tuple[StepPart, Floats]]:
    kinds = np.array([EXPOSED[message.kind] for message in transfers.messages], np.int8)
    for kind in np.unique(kinds):
        of_kind = kinds == kind
        yield StepPart(kind), np.stack([transfers.start_s[of_kind], transfers.end_s[of_kind]])


def _span_s(events: EventColumns) -> Floats:
    return np.stack([events.start_s, events.end_s])


def _edges_s(phases: Phases, spans_s: list[Floats]) -> Floats:
    """Return where the part may change: all edges of the phases and spans, from the first to the last of the phases."""
    first_s, last_s = phases.edges_s[[0, -1]]
    return np.unique(np.clip(np.concatenate([phases.edges_s, *(each.ravel() for each in spans_s)]), first_s, last_s))


def _within(at_s: Floats, starts_s: Floats, ends_s: Floats) -> NDArray[np.bool_]:
    """Tell which instants lie in at least one of some spans."""
    return np.asarray(np.searchsorted(np.sort(starts_s), at_s) > np.searchsorted(np.sort(ends_s), at_s))


def _run_lengths_s(chosen: NDArray[np.bool_], lengths_s: Floats) -> Floats:
    """Return for every piece how long the run of chosen pieces is that it stands in; 0 if it is not chosen."""
    number = np.cumsum(np.append(True, chosen[1:] != chosen[:-1])) - 1 if len(chosen) else np.zeros(0, np.int64)
    return np.where(chosen, np.bincount(number, weights=lengths_s)[number], 0.0)
