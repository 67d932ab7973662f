"""Phases of a rank that computes on its CPU: work and waits of its main thread.

The main thread is idle while no operator runs. It waited for a collective

* where DDP finishes a backward pass: between the last node and the last gradient copied back from its bucket, and
  directly after, while a collective of the pass was still running;
* anywhere else outside of a backward pass, if a collective that was issued before the pause ended in it;
* in each collective of a sharded model, which holds the host up until it ends.

Any other pause of more than `PAUSE_S` outside of a backward pass is a pause of the host. Shorter ones are the time that
Python needs between operators, 10 to 200 microseconds. They belong to the phase around them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simdist.profiles.kineto.columns import EventColumns, Floats, Ints
from simdist.profiles.kineto.events import EventKind
from simdist.profiles.steps.calls import Transfers, backend_transfers
from simdist.profiles.steps.host import HostRun, Passes, gaps_between, host_spans
from simdist.profiles.steps.phase_spans import Phases, PhaseSpan, StepPhase, overlaid
from simdist.profiles.steps.step_parts import OPERATORS, PAUSE_S, cpu_parts
from simdist.profiles.steps.steps import DeviceRun, StepSpan, Window

_LATE_S = 0.2e-3  # a thread of the backend may report the beginning or end of a collective this late


def cpu_run(host: HostRun, windows: Sequence[Window]) -> DeviceRun:
    """Return the work of a CPU in its steps."""
    edges_s = (windows[0].start_s, windows[-1].end_s)
    transfers = backend_transfers(host.trace)
    if transfers.blocks:
        spans_s = zip(transfers.issued_s.tolist(), transfers.end_s.tolist(), strict=True)
        waits = [PhaseSpan(start_s, end_s, StepPhase.WAIT) for start_s, end_s in spans_s]
    else:
        pauses = _Pauses.of(host.own, host.passes, edges_s)
        waits = list(_waits(pauses, transfers, host.passes, finishing=True))
        transfers = _until_resumed(transfers, host.passes, waits)
        waits += _waits(pauses, transfers, host.passes, finishing=False)
    n_issued = int(np.count_nonzero(host.trace.host.kind == EventKind.ISSUE))
    n_lost = n_issued - len(transfers.end_s)
    notes = [f"the ends of {n_lost} of {n_issued} collectives are not in the trace"] if n_lost > 0 else []
    spans = [StepSpan(window, window.start_s, window.end_s) for window in windows]
    phases = _phases(host, waits, edges_s)
    parts = cpu_parts(host, transfers, phases)
    # On a CPU, the work of a call is done when the call returns.
    return DeviceRun("cpu", spans, phases, parts, transfers, np.asarray, host_waits=True, notes=notes)


def _phases(host: HostRun, waits: list[PhaseSpan], edges_s: tuple[float, float]) -> Phases:
    """Return the phase of each instant."""
    spans = host_spans(host)
    updates = [span for span in spans if span.phase == StepPhase.OPTIMIZE]
    others = [span for span in spans if span.phase != StepPhase.OPTIMIZE]
    pauses = _pauses(host, [*others, *waits], edges_s)
    return overlaid(np.array(edges_s), np.array([StepPhase.FORWARD], np.int8), [*updates, *pauses, *others, *waits])


@dataclass(frozen=True, slots=True)
class _Pauses:
    """Times without an operator, outside of backward passes.

    Args:
        start_s: When each began, `[n]`.
        end_s: When the next operator, batch or update began, `[n]`.
        of_pass: Index of the backward pass that a pause finishes; -1 for others, `[n]`.
    """

    start_s: Floats
    end_s: Floats
    of_pass: Ints

    @classmethod
    def of(cls, own: EventColumns, passes: Passes, edges_s: tuple[float, float]) -> "_Pauses":
        """Find the pauses of a main thread."""
        regions = own.of(EventKind.INPUT, EventKind.OPTIMIZER)
        operators = own.of(*OPERATORS)
        starts_s = np.concatenate([operators.start_s, regions.start_s, edges_s])
        ends_s = np.concatenate([operators.end_s, regions.start_s, edges_s])
        pauses_s = gaps_between(starts_s, ends_s)
        of_pass = np.searchsorted(passes.start_s, pauses_s[:, 0], side="right") - 1
        computed_s = np.append(passes.computed_s, -np.inf)
        end_s = np.append(passes.end_s, -np.inf)
        is_copied = end_s > computed_s
        finishes = (pauses_s[:, 0] < end_s[of_pass]) | (~is_copied[of_pass] & (pauses_s[:, 0] <= end_s[of_pass]))
        kept = pauses_s[:, 1] > computed_s[of_pass]
        return cls(pauses_s[kept, 0], pauses_s[kept, 1], np.where(finishes, of_pass, -1)[kept])

    def running(self, transfers: Transfers) -> list[int]:
        """Return the pauses that began while a collective was running."""
        n_issued = np.searchsorted(transfers.issued_s, self.start_s + _LATE_S, side="right")
        n_done = np.searchsorted(np.sort(transfers.end_s), self.start_s, side="right")
        return np.flatnonzero(n_issued > n_done).tolist()


def _waits(pauses: _Pauses, transfers: Transfers, passes: Passes, *, finishing: bool) -> Iterator[PhaseSpan]:
    """Find the waits in pauses that finish a backward pass, or in all others: until the last collective ended.

    If gradients are copied back after a pause that finishes a pass, the whole pause was waiting. In any other pause,
    only collectives that ended in it count.
    """
    for i in pauses.running(transfers):
        start_s = float(pauses.start_s[i])
        end_s = float(pauses.end_s[i])
        of_pass = pauses.of_pass[i]
        if (of_pass >= 0) != finishing:
            continue
        runs = (transfers.issued_s <= start_s + _LATE_S) & (transfers.end_s > start_s)
        runs &= transfers.issued_s >= passes.start_s[of_pass] if finishing else transfers.end_s <= end_s + _LATE_S
        if np.any(runs):
            is_copied = finishing and end_s <= passes.end_s[of_pass]
            done_s = end_s if is_copied else min(end_s, float(transfers.end_s[runs].max()))
            yield PhaseSpan(start_s, done_s, StepPhase.WAIT)


def _until_resumed(transfers: Transfers, passes: Passes, waits: list[PhaseSpan]) -> Transfers:
    """Let collectives of a backward pass end when DDP continued, if the backend reported a later end."""
    waits_end_s = np.array([wait.end_s for wait in waits])
    end_s = transfers.end_s.copy()
    for begin_s, computed_s, pass_end_s in zip(passes.start_s, passes.computed_s, passes.end_s, strict=True):
        inside = (transfers.issued_s >= begin_s) & (transfers.issued_s <= pass_end_s)
        waited_s = waits_end_s[(waits_end_s >= computed_s) & (waits_end_s <= pass_end_s)]
        if len(waited_s):
            latest_s = np.maximum(transfers.start_s[inside], waited_s[-1])
            end_s[inside] = np.minimum(end_s[inside], latest_s)
    return replace(transfers, end_s=end_s)


def _pauses(host: HostRun, others: list[PhaseSpan], edges_s: tuple[float, float]) -> Iterator[PhaseSpan]:
    """Find the pauses of the main thread outside of other spans; an update begins when it is called."""
    busy = host.own.of(*OPERATORS)
    updates = host.own.of(EventKind.OPTIMIZER)
    last = np.searchsorted(host.passes.end_s, updates.end_s, side="right")  # the backward pass before, if any
    begun_s = np.maximum(updates.start_s, np.append(-np.inf, host.passes.end_s)[last])
    starts_s = np.concatenate([busy.start_s, begun_s, [span.start_s for span in others], edges_s])
    ends_s = np.concatenate([busy.end_s, updates.end_s, [span.end_s for span in others], edges_s])
    for start_s, end_s in gaps_between(starts_s, ends_s).tolist():
        if end_s - start_s > PAUSE_S:
            yield PhaseSpan(start_s, end_s, StepPhase.HOST)
