"""The parts of a step on its device. Each instant counts for one part, so the parts add up to the step.

On a GPU, the first of these that applies counts: a kernel computes; a kernel of a collective runs while none computes;
only a copy runs; the GPU waits for its input. The rest is a short or long gap between launches, or a pause of the host.

On a CPU, the main thread waits for its input, for a collective, or for an unknown reason; it computes; or it is in
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

PAUSE_S = 0.5e-3  # a longer gap is more than the time of a launch
_SWITCH_S = 25e-6  # a profiled GPU needs this long from a kernel to the next, even if that is queued: mostly 1 to 10
CLOCKS_S = 50e-6  # the clocks of host and device may still disagree by this much after the profiler's conversion


class StepPart(IntEnum):
    """A part of a step on its device.

    In `COMPUTE`, the device computes. `ALL_REDUCE` to `OTHER` are exposed communication: a collective of this kind is
    running, and nothing computes. In `COPY`, the device only copies. In `INPUT`, it waits for a batch. In `QUEUED`, it
    is idle although the host has launched the next kernel: it waits for an event, or for an unknown reason. In the
    other parts it is idle because the host has not launched the next kernel, or because a GPU takes some microseconds
    between kernels: `SHORT_GAP` is at most 0.5 ms, `LONG_GAP` is longer, and in `HOST_PAUSE` no thread of the host ran
    an operator either.
    """

    COMPUTE, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, POINT_TO_POINT, BROADCAST, REDUCE, OTHER = range(9)
    COPY, INPUT, QUEUED, SHORT_GAP, LONG_GAP, HOST_PAUSE = range(9, 15)


#: Code for computing of a CPU beside a collective. It is a share of `COMPUTE`.
BESIDE = len(StepPart)
#: Exposed communication, by kind.
EXPOSED: dict[CollectiveKind, StepPart] = {kind: StepPart[kind.upper()] for kind in get_args(CollectiveKind)}

OPERATORS = {kind for kind in EventKind if EventKind.BACKWARD <= kind <= EventKind.WORK} - {EventKind.TRANSFER}
_CALLS = (*OPERATORS, EventKind.LAUNCH, EventKind.SYNC, EventKind.BLOCKING)


def gpu_parts(host: HostRun, queue_s: Floats, transfers: Transfers, phases: Phases) -> Phases:
    """Return the part of each instant of a GPU.

    Args:
        host: Work of the host.
        queue_s: Launch and start of each kernel of the main stream, `[2, n]`.
        transfers: The collectives.
        phases: The phase of each instant.
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
    part[(part == StepPart.QUEUED) & (_run_lengths_s(part == StepPart.QUEUED, seconds) < _SWITCH_S)] = (
        StepPart.SHORT_GAP
    )
    is_long = _run_lengths_s(part == StepPart.SHORT_GAP, seconds) > PAUSE_S
    part[is_long] = np.where(is_idle, StepPart.HOST_PAUSE, StepPart.LONG_GAP)[is_long]
    return cut(edges_s, part.astype(np.int8), BESIDE + 1)


def cpu_parts(host: HostRun, transfers: Transfers, phases: Phases) -> Phases:
    """Return the part of each instant of a main thread; `BESIDE` if it computes beside a collective."""
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
    works = _within(at_s, *_span_s(host.own.of(EventKind.LAYER, EventKind.WORK)))  # a node of autograd may be asleep
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
    """Return the instants at which the part may change: all edges of phases and spans, within the phases."""
    first_s, last_s = phases.edges_s[[0, -1]]
    return np.unique(np.clip(np.concatenate([phases.edges_s, *(each.ravel() for each in spans_s)]), first_s, last_s))


def _within(at_s: Floats, starts_s: Floats, ends_s: Floats) -> NDArray[np.bool_]:
    """Tell which instants are inside at least one of some spans."""
    return np.asarray(np.searchsorted(np.sort(starts_s), at_s) > np.searchsorted(np.sort(ends_s), at_s))


def _run_lengths_s(chosen: NDArray[np.bool_], lengths_s: Floats) -> Floats:
    """Return the length of the run of chosen pieces around each piece; 0 for pieces that are not chosen."""
    number = np.cumsum(np.append(True, chosen[1:] != chosen[:-1])) - 1 if len(chosen) else np.zeros(0, np.int64)
    return np.where(chosen, np.bincount(number, weights=lengths_s)[number], 0.0)
