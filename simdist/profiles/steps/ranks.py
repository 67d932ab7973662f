"""One rank's trace, read into its steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from simdist.errors import TraceError
from simdist.profiles.kineto.columns import EventColumns, Floats, RankEvents, rank_events
from simdist.profiles.kineto.events import EventKind
from simdist.profiles.kineto.header import Header
from simdist.profiles.kineto.reading import TraceFile
from simdist.profiles.steps.calls import Transfers, backend_transfers, calls_of
from simdist.profiles.steps.cpu_steps import cpu_phases, waits_of
from simdist.profiles.steps.cuda_steps import (
    are_whole,
    collectives_of,
    cuda_phases,
    cuda_spans,
    host_blocks,
    kernels_of,
)
from simdist.profiles.steps.host import Passes, backward_passes, main_thread
from simdist.profiles.steps.model import RankProfile, RankStep, TracedCollective
from simdist.profiles.steps.phase_spans import Phases
from simdist.profiles.steps.steps import Computed, StepSpan, Window, batch_size_of, gradients_of, rank_steps, windows_of


@dataclass(frozen=True, slots=True)
class _Computing:
    """What computed, and when: a GPU, or the CPU itself."""

    kind: Literal["cpu", "cuda"]
    spans: list[StepSpan]
    phases: Phases
    transfers: Transfers
    computed: Computed
    host_waits: bool
    notes: list[str]


def profile_rank(path: Path) -> RankProfile:
    """Read one rank's trace.

    Args:
        path: The trace, plain or compressed with gzip.

    Raises:
        TraceError: Nothing of a training step can be learned from it.
    """
    trace = TraceFile(path)
    timeline = rank_events(trace.batches())
    return _profile(timeline, trace.header())


def _profile(timeline: RankEvents, header: Header) -> RankProfile:
    main = main_thread(timeline.host)
    if main is None:
        raise TraceError(f"{header.path}: no operators of the host; profile with `ProfilerActivity.CPU`, too")
    own = timeline.host.on(main)
    passes = backward_passes(timeline.host, main)
    windows, notes = windows_of(own, passes)
    if not windows:
        raise TraceError(
            f"{header.path}: no whole step: no `ProfilerStep#` marks, and nothing of training repeats; "
            "call `profiler.step()` after every step"
        )
    computing = _on_gpu(timeline, own, passes, windows, header) if _has_kernels(timeline, header) else None
    computing = computing or _on_cpu(timeline, own, passes, windows)
    spans, left_out = _training(computing.spans, own, passes, header)
    calls = calls_of(computing.transfers, passes, header)
    gradients, amiss = gradients_of(timeline.host, spans, passes, computing.phases, computing.computed)
    steps = rank_steps(spans, computing.phases, calls, computing.computed)
    gpu = _gpu(timeline) if computing.kind == "cuda" else None
    return RankProfile(
        path=header.path,
        rank=header.rank,
        world_size=header.world_size,
        hostname=header.hostname,
        local_gpu=gpu,
        device=computing.kind,
        device_name="" if gpu is None else header.gpus.get(gpu, ""),
        backend=_backend(timeline, header),
        steps=tuple(steps),
        gradients=gradients,
        dtype=_dtype(timeline, computing.transfers, calls),
        batch_size=batch_size_of(own, spans),
        host_waits=computing.host_waits,
        notes=(*header.notes, *notes, *computing.notes, *left_out, *amiss, *_missing(own, steps)),
        is_cut=header.is_cut,
    )


def _has_kernels(timeline: RankEvents, header: Header) -> bool:
    if np.any(timeline.device.kind == EventKind.KERNEL):
        return True
    if "nccl" in timeline.backends:
        raise TraceError(
            f"{header.path}: the job communicates with NCCL, but the trace has no kernels of its GPU; "
            f"profile with `activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`{_damage(header)}"
        )
    return False


def _damage(header: Header) -> str:
    """Return what was left out of the trace, as the end of a message: it may be why something is missing."""
    return f". Besides, {'; '.join(header.notes)}" if header.notes else ""


def _on_cpu(timeline: RankEvents, own: EventColumns, passes: Passes, windows: Sequence[Window]) -> _Computing:
    edges_s = (windows[0].start_s, windows[-1].end_s)
    waits, transfers = waits_of(own, passes, backend_transfers(timeline), edges_s)
    phases = cpu_phases(own, passes, waits, edges_s)
    spans = [StepSpan(window, window.start_s, window.end_s) for window in windows]
    n_issued = int(np.count_nonzero(timeline.host.kind == EventKind.ISSUE))
    n_lost = n_issued - len(transfers.end_s)
    notes = [f"the ends of {n_lost} of {n_issued} collectives are not in the trace"] if n_lost > 0 else []
    return _Computing("cpu", spans, phases, transfers, _at_once, host_waits=True, notes=notes)


def _at_once(times_s: Floats) -> Floats:
    """A CPU has computed what it was told to when the call returns."""
    return times_s


def _on_gpu(
    timeline: RankEvents, own: EventColumns, passes: Passes, windows: Sequence[Window], header: Header
) -> _Computing:
    kernels = kernels_of(timeline)
    transfers = collectives_of(timeline)
    transfers = transfers if len(transfers.end_s) else backend_transfers(timeline)
    spans = cuda_spans(windows, kernels)
    phases = cuda_phases(timeline, own, passes, kernels, transfers, spans)
    whole = [span for span, is_whole in zip(spans, are_whole(timeline, windows), strict=True) if is_whole]
    if not whole:
        raise TraceError(
            f"{header.path}: no whole step: of each of its {len(spans)} steps, kernels are missing; was it cut off?"
            f"{_damage(header)}"
        )
    out = f"steps of which kernels are missing were left out: {_numbers(spans, whole)}"
    notes = [out] if len(whole) < len(spans) else []
    waits = host_blocks(own, windows, kernels)
    return _Computing("cuda", whole, phases, transfers, kernels.computed, host_waits=waits, notes=notes)


def _training(
    spans: Sequence[StepSpan], own: EventColumns, passes: Passes, header: Header
) -> tuple[list[StepSpan], list[str]]:
    """Leave out steps that do not train, and a last one that was cut short."""
    trains = _has(passes.start_s, spans)
    if not any(trains):
        why = _damage(header) or "; is this training?"
        raise TraceError(f"{header.path}: no backward pass in any of its {len(spans)} steps{why}")
    notes = []
    kept = [span for span, has_pass in zip(spans, trains, strict=True) if has_pass]
    if len(kept) < len(spans):
        notes.append(f"steps without a backward pass were left out: {_numbers(spans, kept)}")
    computed = [span for span in kept if span.end_s > span.start_s]
    if not computed:
        raise TraceError(f"{header.path}: no kernel was launched in any of its {len(kept)} steps")
    if len(computed) < len(kept):
        notes.append(f"steps that launched no kernels were left out: {_numbers(kept, computed)}")
    updates = _has(own.of(EventKind.OPTIMIZER).start_s, computed)
    if len(computed) > 1 and all(updates[:-1]) and not updates[-1]:
        notes.append(f"step {computed.pop().host.number} ends before its update and was left out")
    return computed, notes


def _numbers(spans: Sequence[StepSpan], kept: Sequence[StepSpan]) -> str:
    """List the steps that were not kept."""
    return ", ".join(str(span.host.number) for span in spans if span not in kept)


def _has(times_s: Floats, spans: Sequence[StepSpan]) -> list[bool]:
    """Tell which steps some ascending instants on the host lie in."""
    borders_s = np.array([[span.host.start_s, span.host.end_s] for span in spans])
    counts = np.diff(np.searchsorted(times_s, borders_s), axis=1)[:, 0]
    return [count > 0 for count in counts.tolist()]


def _gpu(timeline: RankEvents) -> int | None:
    """Return the number of the GPU that computed most."""
    busiest = np.bincount(timeline.device.thread).argmax()
    number = timeline.threads[busiest][0]
    return number if isinstance(number, int) else None


def _backend(timeline: RankEvents, header: Header) -> str:
    if header.backend:
        return header.backend
    if np.any(timeline.device.kind == EventKind.COLLECTIVE):
        return "nccl"
    return min(timeline.backends, default="")


def _dtype(timeline: RankEvents, transfers: Transfers, calls: Sequence[TracedCollective]) -> str:
    """Return the type of gradients or, if shapes were not recorded, that in which they are reduced."""
    if timeline.dtypes:
        return timeline.dtypes.most_common(1)[0][0]
    reduced = (message.dtype for message, call in zip(transfers.messages, calls, strict=True) if call.of_gradients)
    return next((dtype for dtype in reduced if dtype), "")


def _missing(own: EventColumns, steps: Sequence[RankStep]) -> list[str]:
    """Say what the trace does not tell."""
    notes = []
    calls = [call for step in steps for call in step.calls]
    n_without = sum(not step.buckets_s for step in steps)
    if n_without:
        notes.append(f"{n_without} of {len(steps)} steps reduce no gradients")
    sized = [call for call in calls if call.kind != "other"]
    if n_unsized := sum(call.nbytes is None for call in sized):
        notes.append(f"sizes of {n_unsized} of {len(sized)} collectives are unknown; profile with `record_shapes=True`")
    if not np.any(own.kind == EventKind.INPUT):
        notes.append("no `DataLoader` was seen; time spent on input counts as the host's")
    return notes
