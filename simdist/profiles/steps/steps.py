"""A rank's steps, put together from windows, phases and collectives; the same for CPUs and GPUs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from simdist.profiles.kineto.timeline import Floats
from simdist.profiles.steps.model import Call, RankStep
from simdist.profiles.steps.phase_spans import Phase, Phases
from simdist.profiles.steps.windows import Window

Computed: TypeAlias = Callable[[Floats], Floats]
"""From instants on the host to when the device had computed what had been launched before."""


@dataclass(frozen=True, slots=True)
class Span:
    """A step: as the host saw it, and from when to when it was on the device."""

    host: Window
    start_s: float
    end_s: float


def rank_steps(spans: Iterable[Span], phases: Phases, calls: tuple[Call, ...], computed: Computed) -> list[RankStep]:
    """Return the steps with their phases, buckets and calls.

    Args:
        spans: The steps.
        phases: Of the device.
        calls: Of all steps, in the order in which they were issued.
        computed: When the device had computed what was launched before an instant.
    """
    issued_s = np.array([call.issued_s for call in calls])
    steps = []
    for span in spans:
        first, last = np.searchsorted(issued_s, [span.host.start_s, span.host.end_s]).tolist()
        borders_s = np.array([span.start_s, span.end_s])
        spent_s = {phase: float(np.diff(phases.before(phase, borders_s))[0]) for phase in Phase}
        own = calls[first:last]
        steps.append(
            RankStep(
                number=span.host.number,
                start_s=span.start_s,
                end_s=span.end_s,
                input_s=spent_s[Phase.INPUT],
                forward_s=spent_s[Phase.FORWARD],
                host_s=spent_s[Phase.HOST],
                backward_s=spent_s[Phase.BACKWARD],
                wait_s=spent_s[Phase.WAIT],
                optimize_s=spent_s[Phase.OPTIMIZE],
                buckets_s=_buckets_s(own, phases, computed, borders_s),
                calls=own,
            )
        )
    return steps


def _buckets_s(calls: tuple[Call, ...], phases: Phases, computed: Computed, borders_s: Floats) -> tuple[float, ...]:
    """Cut the backward pass where gradients were handed over; what follows the last goes to the last."""
    handed_over_s = np.array([call.issued_s for call in calls if call.of_gradients])
    if not len(handed_over_s):
        return ()
    ready_s = np.clip(computed(handed_over_s), *borders_s)
    cuts_s = np.concatenate([borders_s[:1], ready_s[:-1], borders_s[1:]])
    return tuple(np.diff(phases.before(Phase.BACKWARD, np.maximum.accumulate(cuts_s))).tolist())
