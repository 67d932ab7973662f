"""One rank's profiler trace, step by step: the language between reading traces and assembling ranks into a job."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from simdist.profiles.kineto.events import Hint
from simdist.profiles.kineto.messages import CollectiveKind


@dataclass(frozen=True, slots=True)
class TracedCollective:
    """A collective, as one rank saw it.

    Args:
        kind: Kind of work.
        nbytes: Bytes of the whole buffer (of an all-gather its result, of a reduce-scatter its input); None if the
            trace does not tell.
        ranks: Members in ascending order; None if unknown.
        n_ranks: How many take part; None if the trace does not tell.
        issued_s: When the host handed it over, on the rank's own clock.
        start_s: When the rank was in it: its kernel began or, on a CPU, a thread of the backend had it.
        end_s: When it was done on this rank. `end_s - start_s` includes waiting for ranks that came later.
        of_gradients: It was issued during the backward pass, and reduces numbers that are no integers.
        exposed_s: Time of it in which the device computed nothing, waiting included.
    """

    kind: CollectiveKind
    nbytes: int | None
    ranks: tuple[int, ...] | None
    n_ranks: int | None
    issued_s: float
    start_s: float
    end_s: float
    of_gradients: bool
    exposed_s: float = 0.0

    def members(self, world_size: int) -> tuple[int, ...] | None:
        """Return the members, None if unknown; a trace with neither members nor their number means all ranks."""
        if self.ranks is None and self.n_ranks in (None, world_size):
            return tuple(range(world_size))
        return (0,) if self.ranks is None and self.n_ranks == 1 else self.ranks


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of one rank, as its device saw it: the compute stream of a GPU, the main thread on a CPU.

    Its parts, one for each `StepPhase`, add up:
    `input_s + forward_s + host_s + backward_s + wait_s + optimize_s = end_s - start_s`.

    Args:
        number: As the profiler counts steps; consecutive from 0 where steps carry no marks.
        start_s: On the rank's own clock.
        end_s: On the rank's own clock.
        marked_s: When the host began it, likewise.
        input_s: Until the batch was there: the data loader, and the copy to the device.
        forward_s: Forward pass and loss, and what else the device computes outside of the other phases.
        host_s: Idle between its operations, and not for communication: the host held the device up.
        backward_s: Backward pass, without waiting for communication.
        wait_s: Waiting for collectives that had not ended: exposed communication, and waiting for other ranks.
        optimize_s: From the end of the backward pass to the end of the optimizer's step, without waiting.
        parts_s: Where it went on the device, a number for each `StepPart`; they add up to it, too.
        buckets_s: Backward seconds up to each gradient bucket from the one before, in the order in which they became
            ready; the last also holds what follows it, the first all passes before the last. They add up to
            `backward_s`. Empty if there are no collectives.
        calls: The collectives that were issued in this step, in the order in which they were issued.
        held_s: `host_s` by what the device computed next: the forward pass, the backward pass up to each gradient
            bucket from the one before (one number without buckets), the update. They add up to `host_s`; empty if
            unknown.
        beside_s: Time in which operators ran on a CPU beside a collective.
        reducing_s: Time in which the host copied gradients into DDP's buckets, handed these over, and copied back.
        micro_batches: Forward and backward passes of the step; only the last exchanges the summed gradients.
        earlier_s: Backward seconds of those before the last.
    """

    number: int
    start_s: float
    end_s: float
    marked_s: float
    input_s: float
    forward_s: float
    host_s: float
    backward_s: float
    wait_s: float
    optimize_s: float
    parts_s: tuple[float, ...]
    buckets_s: tuple[float, ...]
    calls: tuple[TracedCollective, ...]
    held_s: tuple[float, ...] = ()
    beside_s: float = 0.0
    reducing_s: float = 0.0
    micro_batches: int = 1
    earlier_s: float = 0.0

    @property
    def gradient_calls(self) -> tuple[TracedCollective, ...]:
        """The collectives that reduce gradients."""
        return tuple(call for call in self.calls if call.of_gradients)


def usual_micro_batches(steps: Iterable[RankStep]) -> int:
    """Return the micro-batches of most steps."""
    return Counter(step.micro_batches for step in steps).most_common(1)[0][0]


@dataclass(frozen=True, slots=True)
class Gradient:
    """A parameter tensor, in the order in which gradients become ready.

    Args:
        count: Elements.
        backward_s: Backward seconds from the gradient before to this one, median over the steps.
    """

    count: int
    backward_s: float


@dataclass(frozen=True, slots=True)
class RankProfile:
    """One rank's trace.

    Args:
        path: The file, for messages.
        rank: From the trace or, failing that, from the name of the file; None if neither tells.
        world_size: None if the trace does not tell.
        hostname: Of the machine; None if the trace does not tell.
        file_host: The host in the name of the file, which a user may have given it; None if it tells none.
        local_gpu: Index of its GPU on the machine; None on a CPU, or if the trace does not tell.
        n_gpus: GPUs of the machine that the rank sees; None if the trace does not tell.
        device: The device that computes.
        device_name: Such as `NVIDIA A100-SXM4-80GB`; empty if the trace does not tell.
        backend: Such as `nccl` or `gloo`; empty if the trace does not tell.
        steps: Whole steps, in order; the profiler's first one is left out if its trace begins in the middle of it.
        gradients: Parameter tensors; empty if the trace does not tell their sizes.
        dtype: Of gradients, such as `float32`; empty if the trace does not tell.
        batch_size: Samples of a batch, of a micro-batch where steps have several, if the trace tells; else None.
        host_waits: Whether the host waits for its device in every step, so that it does not run ahead of it; always on
            a CPU.
        notes: Facts missing from this trace, and omissions, a sentence each.
        is_cut: The end of the file is missing.
        hints: Hints in names of the trace.
        issued: Kind -> collectives that the host issued per step.
        recording_s: Seconds of a step that the profiler took of a host that is never idle, at most.
    """

    path: str
    rank: int | None
    world_size: int | None
    hostname: str | None
    local_gpu: int | None
    device: Literal["cpu", "cuda"]
    device_name: str
    backend: str
    steps: tuple[RankStep, ...]
    gradients: tuple[Gradient, ...]
    dtype: str
    batch_size: int | None
    host_waits: bool
    notes: tuple[str, ...]
    is_cut: bool = False
    hints: frozenset[Hint] = frozenset()
    issued: Mapping[CollectiveKind, float] = field(default_factory=dict)
    file_host: str | None = None
    n_gpus: int | None = None
    recording_s: float = 0.0


def listed(numbers: Sequence[int]) -> str:
    """Write numbers in ascending order as ranges.

    >>> listed([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
