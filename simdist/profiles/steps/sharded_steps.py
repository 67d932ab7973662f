"""What a rank's host did with the units of a sharded model: when it gathered, copied out and reduced each.

A mark is an instant on the host. Work that the host launched before it is done on the device after a number of seconds
of computing, so the difference of two marks is the computing of what was launched between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from simdist.profiles.kineto.columns import UNKNOWN, EventColumns, Floats, RankEvents, Shapes
from simdist.profiles.kineto.events import EventKind
from simdist.profiles.steps.host import HostRun
from simdist.profiles.steps.model import HostMark, RankStep, TracedCollective
from simdist.profiles.steps.phase_spans import StepPhase
from simdist.profiles.steps.steps import DeviceRun, StepSpan


@dataclass(frozen=True, slots=True)
class _Units:
    """The events of a host that handle units, in the order of their start."""

    trace: RankEvents
    names: EventColumns
    copy_outs: EventColumns
    packs: EventColumns

    @classmethod
    def of(cls, trace: RankEvents) -> "_Units":
        host = trace.host
        return cls(trace, *(host.of(kind) for kind in (EventKind.UNIT, EventKind.COPY_OUT, EventKind.PACK)))

    def name_at(self, time_s: float) -> str | None:
        """Return the unit of the annotation around an instant; None outside of them."""
        before = int(np.searchsorted(self.names.start_s, time_s, side="right")) - 1
        if before < 0 or self.names.end_s[before] < time_s:
            return None
        return self.trace.units[int(self.names.link[before])]

    def shapes_before(self, time_s: float, since_s: float) -> Shapes:
        """Return the shapes of the gradients that were last copied together before an instant; empty without any."""
        before = int(np.searchsorted(self.packs.start_s, time_s, side="right")) - 1
        if before < 0 or self.packs.start_s[before] < since_s or self.packs.link[before] == UNKNOWN:
            return ()
        return self.trace.shapes[int(self.packs.link[before])]


def with_units(
    host: HostRun, run: DeviceRun, spans: Sequence[StepSpan], steps: Sequence[RankStep]
) -> Sequence[RankStep]:
    """Return the steps of a sharded model with marks, and all others as they are."""
    if not any(call.kind == "all_gather" for step in steps for call in step.calls):
        return steps
    units = _Units.of(host.trace)
    return [_marked(host, run, span, units, step) for span, step in zip(spans, steps, strict=True)]


def _marked(host: HostRun, run: DeviceRun, span: StepSpan, units: _Units, step: RankStep) -> RankStep:
    first, behind = np.searchsorted(host.passes.start_s, [span.host.start_s, span.host.end_s]).tolist()
    starts_s, ends_s = (times_s[first:behind] for times_s in (host.passes.start_s, host.passes.end_s))
    begin, end = np.searchsorted(units.copy_outs.start_s, [span.host.start_s, span.host.end_s]).tolist()
    copy_outs_s = units.copy_outs.start_s[begin:end]
    of_calls = _marks(run, span, np.array([call.issued_s for call in step.calls]))
    of_starts, of_ends, of_copies = (_marks(run, span, times_s) for times_s in (starts_s, ends_s, copy_outs_s))
    return replace(
        step,
        calls=tuple(_named_calls(units, step.calls, of_calls)),
        copy_outs=tuple(replace(mark, unit=units.name_at(mark.issued_s)) for mark in of_copies),
        passes=tuple(zip(of_starts, of_ends, strict=True)),
        reads_loss=run.kind == "cpu" or _reads_loss(host, step, starts_s),
    )


def _marks(run: DeviceRun, span: StepSpan, times_s: Floats) -> list[HostMark]:
    """Return the marks of some instants of a step."""
    done_s = np.clip(run.computed(times_s), span.start_s, span.end_s)
    start_s = np.array([span.start_s])
    spent_s = [
        run.phases.before(phase, done_s) - run.phases.before(phase, start_s)
        for phase in (StepPhase.FORWARD, StepPhase.BACKWARD)
    ]
    return [HostMark(*each) for each in zip(times_s.tolist(), *(each.tolist() for each in spent_s), strict=True)]


def _named_calls(units: _Units, calls: Sequence[TracedCollective], marks: Sequence[HostMark]) -> list[TracedCollective]:
    found = []
    reduced_s = -np.inf
    for call, mark in zip(calls, marks, strict=True):
        shapes: Shapes = ()
        if call.kind == "reduce_scatter":
            shapes = units.shapes_before(call.issued_s, reduced_s)
            reduced_s = call.issued_s
        found.append(replace(call, unit=units.name_at(call.issued_s), shapes=shapes, mark=mark))
    return found


def _reads_loss(host: HostRun, step: RankStep, starts_s: Floats) -> bool:
    """Tell whether the host waits for its device between the last gather of a forward pass and the backward pass."""
    blocks = host.own.of(EventKind.SYNC, EventKind.BLOCKING)
    gathers_s = np.array([call.issued_s for call in step.calls if call.kind == "all_gather"])
    for start_s in starts_s.tolist():
        before_s = gathers_s[gathers_s < start_s]
        if len(before_s) and np.any((blocks.start_s > before_s[-1]) & (blocks.end_s <= start_s)):
            return True
    return False
