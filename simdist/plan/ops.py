"""The operations of a plan: data, without behaviour, bandwidth or torch.

The union `Op` is closed. An interpreter matches on the classes and ends in `assert_never`, so that a new
operation is a type error wherever it is not handled. Every operation names the buffers it touches; `reads`, `writes`
and `lane_of` are the only statements of what it depends on and where it runs.

Lanes follow the streams of CUDA: the *host* of each rank walks the body and enqueues; every other lane runs its
operations in order, concurrently with other lanes (`simdist.plan.lanes`).
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never, get_args

import numpy as np
from numpy.typing import NDArray

from simdist.plan.group import Group
from simdist.plan.lanes import COMM, COMPUTE, HOST, IO, SAVE, Lane

Channel: TypeAlias = Literal["host", "compute", "io", "backward", "overlap"]
Reduction: TypeAlias = Literal["mean", "sum"]
Algorithm: TypeAlias = str  # of a collective: `auto`, or see `simdist.plan.algorithms`
SelectMethod: TypeAlias = Literal["exact", "mstopk", "dgc"]
Destination: TypeAlias = Literal["storage", "disk"]
Optimizer: TypeAlias = Literal["inner", "outer"]

_TICK_SLACK = 1e-9  # of a period: a time that should fall on a tick may have been rounded to just after it

ALONE = Group(1)  # every rank for itself

#: A level of storage that samples are read from, the fastest first.
#:
#: memory: the decoded samples in the memory of the own node; peer: those in the memory of another node, over the
#: network; disk: the raw files that the own node keeps on a local disk; storage: the raw files on the server.
#:
#: Source:
#:     Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters, MLSys 2021,
#:     arXiv 2010.10458, section 3.2 (DataCache).
Level: TypeAlias = Literal["memory", "peer", "disk", "storage"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, slots=True)
class Enter:
    """Begin a step, or sit it out: pass over its forward and backward passes, and over its delays (host).

    It stands first in a body. Input is brought all the same.

    Args:
        absent: Ranks that sit it out, in order; they make no update then.
        awaits: The host waits for the last writer of this buffer. If the all-reduce of the step that drops the late is
            over by then, the rank sits the step out, and takes its result.
    """

    absent: tuple[int, ...] = ()
    awaits: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Read the next batch into the host buffer `dst` (kind of lane: io).

    Args:
        dst: Buffer in host memory.
        read: Levels of storage where samples of the plan's data set are looked for, the preferred one first. Without
            any, the batch is one request to the storage server.
        keep: Levels (`disk`, `memory`) where the node keeps what it had to read from a slower one.
    """

    dst: str
    read: tuple[Level, ...] = ()
    keep: tuple[Level, ...] = ()
    lane: Lane = IO


@dataclass(frozen=True, slots=True)
class StageIn:
    """Bring the files that a node will read from storage to its disk (lane `io`); it ends for the whole group at once.

    Args:
        group: The ranks of a node.
    """

    group: Group


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy `src` to `dst`: within the device, or between host and device where the buffers' places differ.

    Between floating-point buffers of different types it converts.

    Args:
        src: Buffer to copy.
        dst: Its copy.
        by: The first member of each of these groups does it, the others nothing; only a `Save` by the same may then
            read the copy.
    """

    src: str
    dst: str
    by: Group = ALONE
    lane: Lane = COMPUTE


@dataclass(frozen=True, slots=True)
class Pack:
    """Concatenate `srcs` in the fusion buffer `dst`, converted to its type."""

    srcs: tuple[str, ...]
    dst: str
    lane: Lane = COMM


@dataclass(frozen=True, slots=True)
class Unpack:
    """Take the fusion buffer `src` apart into `dsts`, converted to their types."""

    src: str
    dsts: tuple[str, ...]
    lane: Lane = COMM


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the forward pass: read parameters and input (`srcs`), write activations and loss (`dsts`)."""

    srcs: tuple[str, ...]
    dsts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward pass of the tensors of gradient bucket `dst`.

    Args:
        srcs: Parameters and what the forward pass left.
        dst: The bucket.
        adds: Its gradients are added to those in the bucket, as in all passes of a step but the first.
    """

    srcs: tuple[str, ...]
    dst: str
    adds: bool = False


@dataclass(frozen=True, slots=True)
class TrustRatios:
    """Compute how far LARS may move each tensor: member j does the j-th of `group.size` equal shares of the tensors.

    `dst` holds `dst.count` ratios, one for each tensor of the share; the last shares may have fewer tensors, or none.

    Source:
        You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, arXiv 1708.03888, equation 6.
    """

    params: tuple[str, ...]
    grads: tuple[str, ...]
    dst: str
    group: Group


@dataclass(frozen=True, slots=True)
class Optimize:
    """Update `params` with `grads`; with `ratios`, each tensor's learning rate is multiplied by its trust ratio.

    With `slices`, ranks share the work: member j of each group updates the j-th of `shared_by.size` equal slices of
    each of `params` and writes it to the one of `slices` in the same place; `params` stay as they were. Each gradient
    buffer belongs to the parameters in the same place, and holds either that slice or all.

    Args:
        params: Parameters; of the outer optimizer, anchors: what the parameters were at its last update.
        grads: Gradients; of the outer optimizer, how far the parameters have come from the anchors, with a minus.
        ratios: Trust ratios of the tensors.
        optimizer: The optimizer of the training job, or that of DiLoCo which updates anchors.
        slices: What each member has updated.
        shared_by: Who shares the work.
    """

    params: tuple[str, ...]
    grads: tuple[str, ...]
    ratios: str | None = None
    optimizer: Optimizer = "inner"
    slices: tuple[str, ...] = ()
    shared_by: Group = ALONE


@dataclass(frozen=True, slots=True)
class Combine:
    """Replace `dst` by the sum of `srcs`, each times its weight; `dst` may be one of them."""

    srcs: tuple[str, ...]
    weights: tuple[float, ...]
    dst: str
    lane: Lane = COMPUTE


@dataclass(frozen=True, slots=True)
class Servers:
    """The parameter servers of an all-reduce.

    Args:
        parts: Elements of the buffer that each server holds, in order.
        members: Which member of the group each server is. Without members they are machines of their own, one server
            each, beside the ranks.
    """

    parts: tuple[int, ...]
    members: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Replace `buffer` on every member by the reduction over its group.

    By the algorithm `server`, every member pushes its part to each of `servers`, and pulls what they have reduced.

    With `drop`, the reduction is over the first `group.size - drop` members that come, by the rule of
    `simdist.plan.first_come`. Member 0 decides who is in. By the algorithm `server`, these push to `servers`; by any
    other, they reduce among themselves.

    On another lane than `COMM`, such as `AVERAGE`, it runs beside other communication.
    """

    buffer: str
    group: Group
    reduction: Reduction = "mean"
    algorithm: Algorithm = "auto"
    servers: Servers | None = None
    drop: int = 0
    lane: Lane = COMM


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Reduce `src` over the group; member j keeps the j-th of `group.size` equal slices in `dst`."""

    src: str
    dst: str
    group: Group
    reduction: Reduction = "mean"
    algorithm: Algorithm = "auto"
    lane: Lane = COMM


@dataclass(frozen=True, slots=True)
class AllGather:
    """Concatenate the members' `src`, in the group's order, into `dst` on every member."""

    src: str
    dst: str
    group: Group
    algorithm: Algorithm = "auto"
    lane: Lane = COMM


@dataclass(frozen=True, slots=True)
class Server:
    """A parameter server, which takes pushes (`Reduce`) and pulls (`Broadcast`).

    Args:
        number: Its number, from 0.
        apart: It is a machine of its own, beside the ranks, and keeps what the root would keep.
    """

    number: int
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Reduce:
    """Replace `buffer` on member number `root` of each group by the reduction over the group.

    With `server` it is a push to the parameter server that the root is, or that stands in for the root; its lane is
    then `push_to` that server.
    """

    buffer: str
    group: Group
    root: int = 0
    reduction: Reduction = "mean"
    algorithm: Algorithm = "auto"
    server: Server | None = None
    lane: Lane = COMM


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Replace `buffer` on every member by that of member number `root` of its group.

    With `server` it is a pull from that parameter server; its lane is then `pull_from` that server.
    """

    buffer: str
    group: Group
    root: int = 0
    algorithm: Algorithm = "auto"
    server: Server | None = None
    lane: Lane = COMM


@dataclass(frozen=True, slots=True)
class Select:
    """Move the `k` largest magnitudes of `src + residual` to the sparse buffer `dst`; the rest stays in `residual`."""

    src: str
    dst: str
    residual: str
    k: int
    method: SelectMethod = "exact"
    lane: Lane = COMPUTE


@dataclass(frozen=True, slots=True)
class Merge:
    """Sum what `src` holds under equal indices and move the largest of it to the smaller sparse buffer `dst`.

    The rest, divided by `divisor`, is added to `residual`. Ranks that merge the same data drop the same; each of them
    keeps its share, so that nothing is lost.
    """

    src: str
    dst: str
    residual: str
    divisor: int = 1
    lane: Lane = COMPUTE


@dataclass(frozen=True, slots=True)
class Densify:
    """Scatter-add the sparse buffer `src`, divided by `divisor`, into the dense `dst`, which starts from zero."""

    src: str
    dst: str
    divisor: int = 1
    lane: Lane = COMPUTE


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor of a gradient bucket as a matrix, row by row, from its element `first` on; its factors have `rank`."""

    first: int
    rows: int
    columns: int
    rank: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """A stage of approximating the matrices M of the bucket `grad` by factors, left P and right Q, with M = P Q^T.

    left: `residual` += M, and is M from now on; the columns of Q are made orthonormal; P = M Q; `rest` = other tensors
    right: the columns of P are made orthonormal; Q = M^T P
    product: `grad` = P Q^T, and `rest`; `residual` = M - P Q^T

    Args:
        stage: Which.
        grad: The bucket.
        residual: As large; of the tensors that are no such matrices it holds nothing.
        left: P of one matrix after the other.
        right: Q likewise.
        matrices: The matrices, in that order.
        rest: The other tensors, one after the other; None if there are none.
        seed: Of the stage `left`: draw Q from a standard normal distribution; None: take it as it is.
        lane: Where it runs.

    Source:
        Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019, arXiv 1905.13727, algorithm 1.
    """

    stage: Literal["left", "right", "product"]
    grad: str
    residual: str
    left: str
    right: str
    matrices: tuple[Matrix, ...]
    rest: str | None = None
    seed: int | None = None
    lane: Lane = COMPUTE

    @property
    def others(self) -> tuple[str, ...]:
        """The buffer of the other tensors, if there are some."""
        return (self.rest,) if self.rest else ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Hold a lane until a clock that runs from the start of the run has ticked since `srcs` were written.

    It ticks every `period_s`. A lane that is busy with something else until after that tick is not held, nor is it
    for what it has written itself or had already waited for.
    """

    srcs: tuple[str, ...]
    period_s: float
    lane: Lane = COMM


@dataclass(frozen=True, slots=True)
class Delay:
    """Hold up the host, or a lane, by this step's drawn delay of that channel."""

    channel: Channel


@dataclass(frozen=True, slots=True)
class Wait:
    """Block the host until the last writer of `buffer` is done."""

    buffer: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write `srcs` to a file, such as a checkpoint (kind of lane: save).

    Args:
        srcs: Buffers.
        dst: Buffer that stands for the file, so that the host can wait for it; None if nobody does.
        to: The storage server, or the node's disk.
        by: The first member of each of these groups does it, the others nothing.
    """

    srcs: tuple[str, ...]
    dst: str | None = None
    to: Destination = "storage"
    by: Group = ALONE
    lane: Lane = SAVE


Collective: TypeAlias = AllReduce | ReduceScatter | AllGather | Reduce | Broadcast
COLLECTIVES = (AllReduce, ReduceScatter, AllGather, Reduce, Broadcast)
Op: TypeAlias = (
    Enter
    | Load
    | StageIn
    | Copy
    | Pack
    | Unpack
    | Forward
    | Backward
    | TrustRatios
    | Optimize
    | Combine
    | Collective
    | Select
    | Merge
    | Densify
    | LowRank
    | Tick
    | Delay
    | Wait
    | Save
)


#: The lane of the delays of each channel.
_OF_CHANNEL: dict[Channel, Lane] = {"host": HOST, "compute": COMPUTE, "backward": COMPUTE, "overlap": COMPUTE, "io": IO}


def lane_of(op: Op) -> Lane:
    """Return the lane that executes `op`."""
    match op:
        case Enter() | Wait():
            return HOST
        case StageIn():
            return IO
        case Forward() | Backward() | TrustRatios() | Optimize():
            return COMPUTE
        case Delay():
            return _OF_CHANNEL[op.channel]
        case Load() | Save() | Copy() | Pack() | Unpack() | Combine() | Tick():
            return op.lane
        case AllReduce() | ReduceScatter() | AllGather() | Reduce() | Broadcast():
            return op.lane
        case Select() | Merge() | Densify() | LowRank():
            return op.lane
        case _:
            assert_never(op)


def reads(op: Op) -> tuple[str, ...]:
    """Return the buffers whose contents `op` needs."""
    match op:
        case Enter():
            return (op.awaits,) if op.awaits else ()
        case Load() | StageIn() | Delay():
            return ()
        case Copy() | Unpack() | ReduceScatter() | AllGather() | Densify():
            return (op.src,)
        case Backward():
            return (*op.srcs, op.dst) if op.adds else op.srcs
        case Forward() | Save() | Pack() | Tick() | Combine():
            return op.srcs
        case TrustRatios():
            return op.params + op.grads
        case Optimize():
            return op.params + op.grads + ((op.ratios,) if op.ratios else ())
        case AllReduce() | Reduce() | Broadcast() | Wait():
            return (op.buffer,)
        case Select() | Merge():
            return (op.src, op.residual)
        case LowRank():
            drawn = (op.grad,) if op.seed is not None else (op.grad, op.right)
            needed = {"left": drawn, "right": (op.left,), "product": (op.left, op.right, *op.others)}
            return (op.residual, *needed[op.stage])
        case _:
            assert_never(op)


def writes(op: Op) -> tuple[str, ...]:
    """Return the buffers that `op` replaces."""
    match op:
        case Enter() | StageIn() | Delay() | Wait() | Tick():
            return ()
        case Save():
            return (op.dst,) if op.dst else ()
        case Load() | Copy() | Pack() | Backward() | TrustRatios() | Combine():
            return (op.dst,)
        case ReduceScatter() | AllGather() | Densify():
            return (op.dst,)
        case Forward() | Unpack():
            return op.dsts
        case Optimize():
            return op.slices or op.params
        case AllReduce() | Reduce() | Broadcast():
            return (op.buffer,)
        case Select() | Merge():
            return (op.dst, op.residual)
        case LowRank():
            factors = op.left, op.right
            replaced = {"left": (op.residual, *factors, *op.others), "right": factors}
            return replaced.get(op.stage, (op.grad, op.residual))
        case _:
            assert_never(op)


def is_passed_over(op: Op, enter: Enter | None) -> bool:
    """Tell whether a rank that sits out a step, which begins with `enter`, passes over an operation of it."""
    if enter is None or (isinstance(op, Delay) and op.channel == "io"):
        return False
    return isinstance(op, Forward | Backward | Delay) or (
        enter.awaits is None and isinstance(op, TrustRatios | Optimize)
    )


def entering(body: tuple[Op, ...]) -> Enter | None:
    """Return the operation that says who sits out a step with this body; None if nobody does."""
    return body[0] if body and isinstance(body[0], Enter) else None


def drops(body: tuple[Op, ...]) -> int | None:
    """Return the position of the all-reduce of a body that drops the late, if there is one."""
    return next((at for at, op in enumerate(body) if isinstance(op, AllReduce) and op.drop), None)


def next_tick(ready_s: NDArray[np.float64] | float, period_s: float) -> NDArray[np.float64]:
    """Return the number of the first tick that is not before `ready_s`; tick n is n periods after the start.

    >>> next_tick(np.array([0.0, 0.012, 0.015]), 0.005).tolist()
    [0.0, 3.0, 3.0]

    Sums of seconds are rounded. An operation that is ready at a tick, but for that, has not missed it:

    >>> 0.1 + 0.2 > 0.3, float(next_tick(0.1 + 0.2, 0.3))
    (True, 1.0)
    """
    return np.asarray(np.ceil(ready_s / period_s - _TICK_SLACK) + 0.0)  # no negative zero


def tick_s(ready_s: NDArray[np.float64] | float, period_s: float) -> NDArray[np.float64]:
    """Return the time of the first tick, a multiple of `period_s`, that is not before `ready_s`.

    >>> tick_s(np.array([0.0, 0.012, 0.015]), 0.005).round(9).tolist()
    [0.0, 0.015, 0.015]
    """
    return np.asarray(np.maximum(next_tick(ready_s, period_s) * period_s, ready_s))
