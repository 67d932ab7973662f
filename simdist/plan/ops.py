"""The operations of a plan: data, without behaviour, bandwidth or torch.

The union `Op` is closed. Whoever interprets it matches on the classes and ends in `assert_never`, so that a new
operation is a type error wherever it is not handled. Every operation names the buffers it touches; `reads`, `writes`
and `stream_of` are the only statements of what it depends on and where it runs.

Streams follow CUDA: per rank one *host* walks the body and enqueues; `compute`, `comm` and `io` each run in order,
concurrently with each other.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

from simdist.groups import Group

__all__ = [
    "COLLECTIVES",
    "STREAMS",
    "Algorithm",
    "AllGather",
    "AllReduce",
    "Backward",
    "Broadcast",
    "Channel",
    "Collective",
    "Copy",
    "Delay",
    "Densify",
    "Forward",
    "Load",
    "Op",
    "Optimize",
    "Reduce",
    "ReduceScatter",
    "Save",
    "Select",
    "Stream",
    "Wait",
    "reads",
    "stream_of",
    "writes",
]

Stream: TypeAlias = Literal["host", "compute", "comm", "io"]
Channel: TypeAlias = Literal["host", "compute", "io"]
Reduction: TypeAlias = Literal["mean", "sum"]
Algorithm: TypeAlias = Literal["auto", "ring", "tree", "halving_doubling"]
SelectMethod: TypeAlias = Literal["exact", "mstopk", "dgc"]

STREAMS: tuple[Stream, ...] = ("host", "compute", "comm", "io")


@dataclass(frozen=True, slots=True)
class Load:
    """Read the next batch from storage into the host buffer `dst` (io stream)."""

    dst: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy `src` to `dst`: within the device, or between host and device where the buffers' places differ."""

    src: str
    dst: str


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the forward pass: read parameters and input (`srcs`), write activations and loss (`dsts`)."""

    srcs: tuple[str, ...]
    dsts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward pass of the tensors of gradient bucket `dst`."""

    srcs: tuple[str, ...]
    dst: str


@dataclass(frozen=True, slots=True)
class Optimize:
    """Update `params` with `grads`."""

    params: tuple[str, ...]
    grads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Replace `buffer` on every member by the reduction over its group."""

    buffer: str
    group: Group
    reduction: Reduction = "mean"
    algorithm: Algorithm = "auto"


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Reduce `src` over the group; member j keeps the j-th of `group.size` equal slices in `dst`."""

    src: str
    dst: str
    group: Group
    reduction: Reduction = "mean"
    algorithm: Algorithm = "auto"


@dataclass(frozen=True, slots=True)
class AllGather:
    """Concatenate the members' `src`, in the group's order, into `dst` on every member."""

    src: str
    dst: str
    group: Group
    algorithm: Algorithm = "auto"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Replace `buffer` on member number `root` of each group by the reduction over the group."""

    buffer: str
    group: Group
    root: int = 0
    reduction: Reduction = "mean"
    algorithm: Algorithm = "auto"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Replace `buffer` on every member by that of member number `root` of its group."""

    buffer: str
    group: Group
    root: int = 0
    algorithm: Algorithm = "auto"


@dataclass(frozen=True, slots=True)
class Select:
    """Move the `k` largest magnitudes of `src + residual` to the sparse buffer `dst`; the rest stays in `residual`."""

    src: str
    dst: str
    residual: str
    k: int
    method: SelectMethod = "exact"


@dataclass(frozen=True, slots=True)
class Densify:
    """Scatter-add the sparse buffer `src` into the dense buffer `dst`, which starts from zero."""

    src: str
    dst: str


@dataclass(frozen=True, slots=True)
class Delay:
    """Hold up the host, or a stream, by this step's drawn delay of that channel."""

    channel: Channel


@dataclass(frozen=True, slots=True)
class Wait:
    """Block the host until the last writer of `buffer` is done."""

    buffer: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write `srcs` to storage (a checkpoint, io stream)."""

    srcs: tuple[str, ...]


Collective: TypeAlias = AllReduce | ReduceScatter | AllGather | Reduce | Broadcast
COLLECTIVES = (AllReduce, ReduceScatter, AllGather, Reduce, Broadcast)
Op: TypeAlias = Load | Copy | Forward | Backward | Optimize | Collective | Select | Densify | Delay | Wait | Save


def stream_of(op: Op) -> Stream:
    """Return the stream that executes `op`."""
    match op:
        case Load() | Save():
            return "io"
        case Copy() | Forward() | Backward() | Optimize() | Select() | Densify():
            return "compute"
        case AllReduce() | ReduceScatter() | AllGather() | Reduce() | Broadcast():
            return "comm"
        case Delay():
            return op.channel
        case Wait():
            return "host"
        case _:
            assert_never(op)


def reads(op: Op) -> tuple[str, ...]:
    """Return the buffers whose contents `op` needs."""
    match op:
        case Load() | Delay():
            return ()
        case Copy() | ReduceScatter() | AllGather() | Densify():
            return (op.src,)
        case Forward() | Backward() | Save():
            return op.srcs
        case Optimize():
            return op.params + op.grads
        case AllReduce() | Reduce() | Broadcast() | Wait():
            return (op.buffer,)
        case Select():
            return (op.src, op.residual)
        case _:
            assert_never(op)


def writes(op: Op) -> tuple[str, ...]:
    """Return the buffers that `op` replaces."""
    match op:
        case Delay() | Wait() | Save():
            return ()
        case Load() | Copy() | Backward() | ReduceScatter() | AllGather() | Densify():
            return (op.dst,)
        case Forward():
            return op.dsts
        case Optimize():
            return op.params
        case AllReduce() | Reduce() | Broadcast():
            return (op.buffer,)
        case Select():
            return (op.dst, op.residual)
        case _:
            assert_never(op)
