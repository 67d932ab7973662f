"""One rank's trace, read into its steps."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from simdist.errors import TraceError
from simdist.profiles.kineto.columns import EventColumns, Floats, RankEvents, rank_events
from simdist.profiles.kineto.events import EventKind
from simdist.profiles.kineto.reading import Header, TraceFile
from simdist.profiles.steps.calls import Transfers, calls_of, issued_of
from simdist.profiles.steps.cpu_steps import cpu_run
from simdist.profiles.steps.cuda_steps import cuda_run
from simdist.profiles.steps.host import HostRun, host_run
from simdist.profiles.steps.model import RankProfile, RankStep, TracedCollective, usual_micro_batches
from simdist.profiles.steps.sharded_steps import with_units
from simdist.profiles.steps.steps import StepSpan, batch_size_of, gradients_of, left_out, rank_steps, windows_of
from simdist.settings.units import format_seconds


def profile_rank(path: Path) -> RankProfile:
    """Read one rank's trace.

    Raises:
        TraceError: Nothing of a training step can be learned from it.
    """
    file = TraceFile(path)
    return _profile(rank_events(file.batches()), file.header())


def _profile(trace: RankEvents, header: Header) -> RankProfile:
    host = host_run(trace)
    if host is None:
        raise TraceError(f"{header.path}: no operators of the host; profile with `ProfilerActivity.CPU`, too")
    windows, notes = windows_of(host)
    if not windows:
        raise TraceError(
            f"{header.path}: no whole step: no `ProfilerStep#` marks, and nothing of training repeats; "
            "call `profiler.step()` after every step"
        )
    run = cuda_run(host, windows) if _has_kernels(trace, header) else cpu_run(host, windows)
    if not run.spans:
        raise TraceError(
            f"{header.path}: no whole step: of each of its {len(windows)} steps, kernels are missing; was it cut off?"
            f"{_damage(header)}"
        )
    spans, more = _training(run.spans, host, header)
    calls = calls_of(run.transfers, host.passes, header)
    gradients, odd = gradients_of(host, run, spans)
    steps = with_units(host, run, spans, rank_steps(host, run, spans, calls))
    batch_size, n_batches = batch_size_of(host, spans)
    n_samples = batch_size // n_batches if batch_size else None
    of_each = f" of {n_samples} samples" if n_samples else ""
    if (n_passes := usual_micro_batches(steps)) > 1:
        batch_size = n_samples
        odd.append(f"{n_passes} micro-batches{of_each} in a step: their gradients are added up and exchanged once")
    elif (n_sharded := Counter(len(step.passes) for step in steps).most_common(1)[0][0]) > 1:
        batch_size = n_samples
        odd.append(f"{n_sharded} micro-batches{of_each} in a step of a sharded model")
    elif n_batches > 1:
        odd.append(f"{n_batches} micro-batches{of_each} in a step: their forward and backward passes count together")
    gpu = _gpu(trace) if run.kind == "cuda" else None
    recording_s, told = _profiling(trace, spans)
    computing = {trace.threads[thread][0] for thread in np.unique(trace.device.of(EventKind.KERNEL).thread)}
    if len(computing) > 1:
        odd.append(
            f"this process computes on {len(computing)} GPUs: they count as one, which is busy if any of them is"
        )
    return RankProfile(
        path=header.path,
        rank=header.rank,
        world_size=header.world_size,
        hostname=header.hostname,
        local_gpu=gpu,
        device=run.kind,
        device_name="" if gpu is None else header.gpus.get(gpu, ""),
        backend=_backend(trace, header),
        steps=tuple(steps),
        gradients=gradients,
        dtype=_dtype(trace, run.transfers, calls),
        batch_size=batch_size,
        host_waits=run.host_waits,
        notes=(*header.notes, *notes, *run.notes, *more, *odd, *_missing(host.own, steps), *told),
        is_cut=header.is_cut,
        hints=trace.hints,
        recording_s=recording_s,
        issued=issued_of(trace, np.array([[span.host.start_s, span.host.end_s] for span in spans])),
        file_host=header.file_host,
        n_gpus=1 + max(header.gpus) if header.gpus else None,
    )


def _has_kernels(trace: RankEvents, header: Header) -> bool:
    if np.any(trace.device.kind == EventKind.KERNEL):
        return True
    uses_nccl = "nccl" in trace.backends or "nccl" in header.backend
    if uses_nccl or np.any(trace.host.kind == EventKind.LAUNCH):
        what = "communicates with NCCL" if uses_nccl else "launches kernels"
        raise TraceError(
            f"{header.path}: the job {what}, but the trace has no kernels of its GPU; "
            f"profile with `activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`{_damage(header)}"
        )
    return False


def _damage(header: Header) -> str:
    """Return the end of a message, on the omitted part of the trace, which may explain missing facts."""
    return f". Besides, {'; '.join(header.notes)}" if header.notes else ""


def _training(spans: Sequence[StepSpan], host: HostRun, header: Header) -> tuple[list[StepSpan], list[str]]:
    """Omit steps that do not train, and an incomplete last step."""
    trains = _has(host.passes.start_s, spans)
    if not any(trains):
        why = _damage(header) or "; is this training?"
        raise TraceError(f"{header.path}: no backward pass in any of its {len(spans)} steps{why}")
    notes = []
    kept = [span for span, has_pass in zip(spans, trains, strict=True) if has_pass]
    if len(kept) < len(spans):
        notes.append(f"steps without a backward pass were left out: {left_out(spans, kept)}")
    computed = [span for span in kept if span.end_s > span.start_s]
    if not computed:
        raise TraceError(f"{header.path}: no kernel was launched in any of its {len(kept)} steps")
    if len(computed) < len(kept):
        notes.append(f"steps that launched no kernels were left out: {left_out(kept, computed)}")
    updates = _has(host.own.of(EventKind.OPTIMIZER).start_s, computed)
    if len(computed) > 1 and all(updates[:-1]) and not updates[-1]:
        notes.append(f"step {computed.pop().host.number} ends before its update and was left out")
    return computed, notes


def _has(times_s: Floats, spans: Sequence[StepSpan]) -> list[bool]:
    """Return the steps that contain some ascending instants on the host."""
    borders_s = np.array([[span.host.start_s, span.host.end_s] for span in spans])
    return [count > 0 for (count,) in np.diff(np.searchsorted(times_s, borders_s), axis=1).tolist()]


def _gpu(trace: RankEvents) -> int | None:
    """Return the number of the GPU that computed most."""
    busiest = np.bincount(trace.device.thread).argmax()
    number = trace.threads[busiest][0]
    return number if isinstance(number, int) else None


def _backend(trace: RankEvents, header: Header) -> str:
    if header.backend:
        return header.backend
    return "nccl" if np.any(trace.device.kind == EventKind.COLLECTIVE) else min(trace.backends, default="")


def _dtype(trace: RankEvents, transfers: Transfers, calls: Sequence[TracedCollective]) -> str:
    """Return the data type of gradients, or the one in which they are reduced if shapes were not recorded."""
    if trace.dtypes:
        return trace.dtypes.most_common(1)[0][0]
    reduced = (message.dtype for message, call in zip(transfers.messages, calls, strict=True) if call.of_gradients)
    return next((dtype for dtype in reduced if dtype), "")


# Smallest and largest seconds to record one operator of the host. Measured with torch 2.13 on an AMD EPYC, for
# operators in modules and for single ones, without and with shapes. Tracing a GPU costs more.
_RECORDING_S = 0.4e-6, 1.3e-6
_NOTABLE = 0.02  # of a step


def _profiling(trace: RankEvents, spans: Sequence[StepSpan]) -> tuple[float, list[str]]:
    """Return the profiler's maximum cost per step, and a note if it exceeds 2 %."""
    step_s = float(np.mean([span.end_s - span.start_s for span in spans]))
    borders_s = [[span.host.start_s, span.host.end_s] for span in spans]
    n_events = float(np.diff(np.searchsorted(trace.host.start_s, borders_s), axis=1).mean())
    least_s, most_s = (n_events * each_s for each_s in _RECORDING_S)
    if most_s <= _NOTABLE * step_s:
        return most_s, []
    return most_s, [
        f"the profiler recorded {n_events:,.0f} operators and calls of the host in a step: on a host that is never "
        f"idle, at least {format_seconds(least_s)} and at most {format_seconds(most_s)} of its "
        f"{format_seconds(step_s)}; without the profiler the job may be faster"
    ]


def _missing(own: EventColumns, steps: Sequence[RankStep]) -> list[str]:
    """Return notes on missing information."""
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
