"""One rank's profiler trace, step by step: the interface between reading traces and assembling ranks into a job."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from simdist.profiles.kineto.columns import Shapes
from simdist.profiles.kineto.events import Hint
from simdist.profiles.kineto.messages import CollectiveKind


@dataclass(frozen=True, slots=True)
class HostMark:
    """An instant on the host, by the work that it had launched in the step.

    Args:
        issued_s: The instant, on the rank's own clock.
        forward_s: Seconds of the forward phase that the device needed for the work launched before.
        backward_s: The same of the backward phase.
        unit: The unit of a sharded model that is copied out then; None if the trace does not name it.
    """

    issued_s: float
    forward_s: float
    backward_s: float
    unit: str | None = None


@dataclass(frozen=True, slots=True)
class TracedCollective:
    """A collective, as one rank saw it.

    Args:
        kind: Kind of work.
        nbytes: Bytes of the whole buffer (the result of an all-gather, the input of a reduce-scatter); None if the
            trace does not show them.
        ranks: Members in ascending order; None if unknown.
        n_ranks: Number of members; None if the trace does not show it.
        issued_s: When the host handed it over, on the rank's own clock.
        start_s: When the rank entered it: its kernel began or, on a CPU, a thread of the backend took it.
        end_s: When it ended on this rank. `end_s - start_s` includes waiting for ranks that arrived later.
        of_gradients: It was issued during the backward pass, and reduces floating-point numbers.
        exposed_s: The part of its time in which the device computed nothing, including waiting.
        dtype: Type of its elements; empty if the trace does not show it.
        communicator: Name of its process group; empty if the trace does not show it.
        unit: The unit of a sharded model that it gathers or reduces; None if the trace does not name it.
        shapes: Shapes of the gradients that a reduce-scatter sends; empty if the trace does not show them.
        mark: When it was issued, in seconds of computing.
        after_passes: It was issued behind the last backward pass of its step.
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
    dtype: str = ""
    communicator: str = ""
    unit: str | None = None
    shapes: Shapes = ()
    mark: HostMark | None = None
    after_passes: bool = False

    def members(self, world_size: int) -> tuple[int, ...] | None:
        """Return the members; None if unknown. Without members and their number in the trace, all ranks take part."""
        if self.ranks is None and self.n_ranks in (None, world_size):
            return tuple(range(world_size))
        return (0,) if self.ranks is None and self.n_ranks == 1 else self.ranks


@dataclass(frozen=True, slots=True)
class MicroBatchTimes:
    """Seconds of a micro-batch: from the end of the backward pass before it to the end of its own.

    Args:
        input_s: See `RankStep`, as for the others.
        forward_s: What its forward pass and loss take.
        host_s: Pauses of the host.
        backward_s: What its backward pass takes.
    """

    input_s: float
    forward_s: float
    host_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of one rank on its device: the compute stream of a GPU, or the main thread on a CPU.

    It has one part for each `StepPhase`. The parts add up: `input_s + forward_s + host_s + backward_s + wait_s +
    optimize_s + sharding_s = end_s - start_s`.

    Args:
        number: The profiler's number of the step; consecutive from 0 if steps have no marks.
        start_s: On the rank's own clock.
        end_s: On the rank's own clock.
        marked_s: When the host began it, on the rank's own clock.
        input_s: Until the batch is ready: the data loader, and the copy to the device.
        forward_s: Forward pass, loss, and all other computing outside of the other phases.
        host_s: Idle between operations, but not because of communication: the host held the device up.
        backward_s: Backward pass, without waiting for communication.
        wait_s: Waiting for unfinished collectives: exposed communication, and waiting for other ranks.
        optimize_s: From the end of the backward pass to the end of the optimizer's step, without waiting.
        sharding_s: What `fully_shard` computes itself: copies, casts and hooks, without waiting.
        parts_s: Seconds of each `StepPart` on the device. They also add up to the step.
        buckets_s: Backward seconds from each gradient bucket to the next, in the order in which the buckets became
            ready. The last number includes the rest of the pass, the first number includes all passes before the last.
            They add up to `backward_s`. Empty if there are no collectives.
        calls: The collectives that were issued in this step, in the order in which they were issued.
        held_s: `host_s`, divided by the work that the device did next: the forward pass, the backward pass from each
            gradient bucket to the next (one number without buckets), the update. Their sum is `host_s`.
        beside_s: Time in which operators ran on a CPU beside a collective.
        reducing_s: Time in which the host copied gradients into DDP's buckets and back.
        micro_batches: Forward and backward passes of the step; only the last exchanges the summed gradients.
        earlier_s: Backward seconds of the passes before the last.
        copy_outs: When each gathered unit of a sharded model was copied out for computing.
        passes: Beginning and end of each backward pass; on a sharded model with several micro-batches, of each.
        reads_loss: The host waits for the device between a forward and a backward pass.
        of_passes: The times of each backward pass with what precedes it. The last includes pauses in the update.
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
    copy_outs: tuple[HostMark, ...] = ()
    passes: tuple[tuple[HostMark, HostMark], ...] = ()
    reads_loss: bool = True
    sharding_s: float = 0.0
    of_passes: tuple[MicroBatchTimes, ...] = ()

    @property
    def gradient_calls(self) -> tuple[TracedCollective, ...]:
        """The collectives that reduce gradients."""
        return tuple(call for call in self.calls if call.of_gradients)


def usual_micro_batches(steps: Iterable[RankStep]) -> int:
    """Return the most frequent number of micro-batches per step."""
    return Counter(step.micro_batches for step in steps).most_common(1)[0][0]


@dataclass(frozen=True, slots=True)
class Gradient:
    """A parameter tensor, in the order in which gradients become ready.

    Args:
        count: Elements.
        backward_s: Backward seconds from the previous gradient to this one, median over the steps.
    """

    count: int
    backward_s: float


@dataclass(frozen=True, slots=True)
class RankProfile:
    """One rank's trace.

    Args:
        path: The file, for messages.
        rank: Rank from the trace, or else from the name of the file; None if neither states it.
        world_size: Number of ranks of the job; None if the trace does not state it.
        hostname: Name of the machine; None if the trace does not state it.
        file_host: The host in the name of the file, which a user may have chosen; None if it has none.
        local_gpu: Index of its GPU on the machine; None on a CPU, or if the trace does not state it.
        n_gpus: GPUs of the machine that the rank sees; None if the trace does not state them.
        device: The device that computes.
        device_name: Such as `NVIDIA A100-SXM4-80GB`; empty if the trace does not state it.
        backend: Such as `nccl` or `gloo`; empty if the trace does not state it.
        steps: Complete steps, in order. The profiler's first step is left out if the trace begins in the middle of it.
        gradients: Parameter tensors; empty if the trace does not show their sizes.
        dtype: Data type of gradients, such as `float32`; empty if the trace does not show it.
        batch_size: Samples of a batch, or of a micro-batch if steps have several; None if the trace does not show them.
        host_waits: The host waits for its device in every step, so it does not run ahead. Always true on a CPU.
        notes: Facts missing from this trace, and omissions, one sentence each.
        is_cut: The end of the file is missing.
        hints: Hints in the names of the trace's events.
        issued: Kind -> number of collectives that the host issued per step.
        recording_s: Upper bound of the seconds per step that the profiler costs a host that is never idle.
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
