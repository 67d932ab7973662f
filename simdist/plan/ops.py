"""The operations of a plan: data, without behaviour, bandwidth or torch.

The union `Op` is closed. An interpreter matches on the classes and ends in `assert_never`, so that a new
operation is a type error wherever it is not handled. Every operation names the buffers it touches. Only `reads`,
`writes` and `lane_of` state its dependencies and its lane.

Lanes follow the streams of CUDA: the *host* of each rank walks the body and enqueues; every other lane runs its
operations in order, concurrently with other lanes (`simdist.plan.lanes`).
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, assert_never, get_args

import numpy as np
from numpy.typing import NDArray

from simdist.plan.group import Group
from simdist.plan.lanes import COMM, COMPUTE, HOST, IO, SAVE, Lane

Channel: TypeAlias = Literal["host", "compute", "io", "backward", "overlap"]
Reduction: TypeAlias = Literal["mean", "sum"]
Algorithm: TypeAlias = str  # of a collective: `auto`, or see `simdist.plan.algorithms`
SelectMethod: TypeAlias = Literal["exact", "mstopk", "dgc"]
Destination: TypeAlias = Literal["storage", "disk", "peer"]
Optimizer: TypeAlias = Literal["inner", "outer"]
LaunchKind: TypeAlias = Literal[
    "forward",
    "backward",
    "optimize",
    "trust_ratios",
    "select",
    "merge",
    "densify",
    "low_rank",
    "copy",
    "pack",
    "unpack",
    "collective",
    "event",
    "graph",
]

_TICK_SLACK = 1e-9  # of a period: rounding may have moved a time from a tick to just after it
_ROUNDING = 2.0**-48  # of the number of a tick, which after millions of them is more

ALONE = Group(1)  # every rank is a group of its own

#: A level of storage that samples are read from, the fastest first.
#:
#: memory: decoded samples in the memory of the own node; peer: decoded samples in the memory of another node, over the
#: network; disk: raw files on the own node's local disk; storage: raw files on the server.
#:
#: Source:
#:     Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters, MLSys 2021,
#:     arXiv 2010.10458, section 3.2 (DataCache).
Level: TypeAlias = Literal["memory", "peer", "disk", "storage"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, slots=True)
class Enter:
    """Begin a step, or sit it out: skip its forward and backward passes and its delays (host).

    It is the first operation of a body. A rank that sits out the step still loads its input.

    Args:
        absent: Ranks that sit out the step, in order. They make no update.
        awaits: The host waits for the last writer of this buffer. If the step's all-reduce with `drop` is over by then,
            the rank sits out the step and takes the result.
    """

    absent: tuple[int, ...] = ()
    awaits: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Read the next batch into the host buffer `dst` (kind of lane: io).

    Args:
        dst: Buffer in host memory.
        read: Levels of storage to search for samples of the plan's data set, the preferred one first. If empty, the
            batch is one request to the storage server. Without a data set, the level of one request.
        keep: Levels (`disk`, `memory`) where the node keeps samples that it read from a slower level.
    """

    dst: str
    read: tuple[Level, ...] = ()
    keep: tuple[Level, ...] = ()
    lane: Lane = IO


@dataclass(frozen=True, slots=True)
class StageIn:
    """Copy the files that a node will read from storage to its disk (lane `io`). It ends for the whole group at once.

    Args:
        group: The ranks of a node.
    """

    group: Group


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy `src` to `dst`: within the device, or between host and device if the buffers have different places.

    A copy between floating-point buffers of different types converts. A copy from whole tensors to a buffer that is
    sharded takes the rank's own slice.

    Args:
        src: Buffer to copy.
        dst: Its copy.
        by: Only the first member of each of these groups copies. Only a `Save` with the same `by` may read it.
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
    """Split the fusion buffer `src` into `dsts`, converted to their types."""

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
        srcs: Parameters and outputs of the forward pass.
        dst: The bucket.
        adds: Add the gradients to those in the bucket, as in all passes of a step but the first.
    """

    srcs: tuple[str, ...]
    dst: str
    adds: bool = False


@dataclass(frozen=True, slots=True)
class TrustRatios:
    """Compute LARS trust ratios of tensors: member j computes the j-th of `group.size` equal shares of the tensors.

    `dst` holds `dst.count` ratios, one for each tensor of the share. The last shares may have fewer tensors, or none.

    Source:
        You, Gitman, Ginsburg, Large Batch Training of Convolutional Networks, arXiv 1708.03888, equation 6.
    """

    params: tuple[str, ...]
    grads: tuple[str, ...]
    dst: str
    group: Group


@dataclass(frozen=True, slots=True)
class Optimize:
    """Update `params` with `grads`. With `ratios`, each tensor's learning rate is multiplied by its trust ratio.

    With `slices`, ranks share the work. Member j of each group updates the j-th of `shared_by.size` equal slices of
    each of `params`. It writes the result to the corresponding one of `slices`, and `params` do not change. A slice of
    another type than the parameters lasts: it is updated, and the parameters are copies of it in their type. Each
    gradient buffer belongs to the parameters at the same place in the list. It holds either that slice or all. If there
    is one buffer of parameters, several gradient buffers may cover it.

    Args:
        params: Parameters. For the outer optimizer: anchors, the parameters at its last update.
        grads: Gradients. For the outer optimizer: anchors minus parameters.
        ratios: Trust ratios of the tensors.
        optimizer: The optimizer of the training job, or DiLoCo's outer optimizer, which updates anchors.
        slices: The slice that each member updated.
        shared_by: Groups that share the work.
    """

    params: tuple[str, ...]
    grads: tuple[str, ...]
    ratios: str | None = None
    optimizer: Optimizer = "inner"
    slices: tuple[str, ...] = ()
    shared_by: Group = ALONE


@dataclass(frozen=True, slots=True)
class Combine:
    """Replace `dst` by the weighted sum of `srcs`; `dst` may be one of them."""

    srcs: tuple[str, ...]
    weights: tuple[float, ...]
    dst: str
    lane: Lane = COMPUTE


@dataclass(frozen=True, slots=True)
class Servers:
    """The parameter servers of an all-reduce.

    Args:
        parts: Elements of the buffer that each server holds, in order.
        members: Member of the group that each server is. Empty: servers are machines of their own.
    """

    parts: tuple[int, ...]
    members: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Replace `buffer` on every member by the reduction over its group.

    With the algorithm `server`, every member pushes its part to each of `servers` and pulls the reduced parts.

    With `drop`, the reduction covers the first `group.size - drop` members to arrive, by the rule of
    `simdist.plan.first_come`. Member 0 decides which members are in. With the algorithm `server` these push to
    `servers`. With any other algorithm they reduce among themselves.

    On another lane than `COMM`, such as `AVERAGE`, it overlaps with other communication.
    """

    buffer: str
    group: Group
    reduction: Reduction = "mean"
    algorithm: Algorithm = "auto"
    servers: Servers | None = None
    drop: int = 0
    lane: Lane = COMM

    @property
    def n_in(self) -> int:
        """Members of a group whose contents are reduced."""
        return self.group.size - self.drop


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Reduce `src` over the group. Member j keeps the j-th of `group.size` equal slices in `dst`."""

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
    """A parameter server, which serves pushes (`Reduce`) and pulls (`Broadcast`).

    Args:
        number: Its number, from 0.
        apart: It is a machine of its own, beside the ranks, and holds the buffer in place of the root.
    """

    number: int
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Reduce:
    """Replace `buffer` on member number `root` of each group by the reduction over the group.

    With `server` it is a push to that parameter server, on the lane `push_to` that server.
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

    With `server` it is a pull from that parameter server. Its lane is then `pull_from` that server.
    """

    buffer: str
    group: Group
    root: int = 0
    algorithm: Algorithm = "auto"
    server: Server | None = None
    lane: Lane = COMM


@dataclass(frozen=True, slots=True)
class Select:
    """Move the `k` largest magnitudes of `src + residual` to the sparse buffer `dst`. Keep the rest in `residual`."""

    src: str
    dst: str
    residual: str
    k: int
    method: SelectMethod = "exact"
    lane: Lane = COMPUTE


@dataclass(frozen=True, slots=True)
class Merge:
    """Sum the entries of `src` with equal indices and move the largest sums to the smaller sparse buffer `dst`.

    The rest, divided by `divisor`, is added to `residual`. Ranks that merge the same data drop the same entries. Each
    keeps its share of them, so that nothing is lost.
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
    """A tensor of a gradient bucket as a row-major matrix that starts at element `first`. Its factors have `rank`."""

    first: int
    rows: int
    columns: int
    rank: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """A stage of approximating the matrices M of the bucket `grad` by factors, left P and right Q, with M = P Q^T.

    left: M = M + `residual`, saved in `residual`; orthonormalize the columns of Q; P = M Q; `rest` = other tensors
    right: orthonormalize the columns of P; Q = M^T P
    product: `grad` = P Q^T, and `rest`; `residual` = M - P Q^T

    Args:
        stage: The stage.
        grad: The bucket.
        residual: As large as the bucket. It holds nothing for tensors that are not among `matrices`.
        left: P of one matrix after the other.
        right: Q of one matrix after the other.
        matrices: The matrices, in that order.
        rest: The other tensors, one after the other; None if there are none.
        seed: For the stage `left`: draw Q from a standard normal distribution. None: use Q as it is.
        lane: The lane.

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
        """The buffer of the other tensors, if there are any."""
        return (self.rest,) if self.rest else ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Hold a lane until the next tick after `srcs` were written, of a clock that starts with the run.

    It ticks every `period_s`. A lane that is busy until after that tick is not held. Nor is a lane held for buffers
    that it wrote itself or had already waited for.
    """

    srcs: tuple[str, ...]
    period_s: float
    lane: Lane = COMM


@dataclass(frozen=True, slots=True)
class Delay:
    """Delay the host, or a lane, by what was drawn for this step on that channel.

    Args:
        channel: The channel.
        micro_batch: Take what was drawn for this micro-batch. None: take the delays of the whole step.
        lane: Lane that is delayed. None: that of the channel.
    """

    channel: Channel
    micro_batch: int | None = None
    lane: Lane | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Block the host, or another lane, until the last writer of `buffer` is done.

    On another lane it is an event that the stream waits for. It orders operations that share no buffer, such as a
    gather that may run no further ahead than the memory for it allows.
    """

    buffer: str
    lane: Lane = HOST


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """Take the host's time for launching an operation (host): see `simdist.plan.launches`.

    Args:
        kind: What is launched. `collective`: any; `copy`: also a combination; `event`: one that a stream waits for;
            `graph`: a CUDA graph.
        n_tensors: Of a pass or an update: the tensors whose kernels are launched.
    """

    kind: LaunchKind
    n_tensors: int = 0


@dataclass(frozen=True, slots=True)
class Save:
    """Write `srcs` to a file, such as a checkpoint (kind of lane: save).

    Args:
        srcs: Buffers to write.
        dst: Buffer that stands for the file, so that the host can wait for it. None if no host waits.
        to: The storage server, the node's disk, or the memory of a peer: the next node.
        by: Only the first member of each of these groups writes.
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
    | KernelLaunch
    | Save
)


#: The lane of the delays of each channel.
_OF_CHANNEL: dict[Channel, Lane] = {"host": HOST, "compute": COMPUTE, "backward": COMPUTE, "overlap": COMPUTE, "io": IO}

#: Launches that a rank passes over with its passes, and with its update.
_OF_PASSES: tuple[LaunchKind, ...] = ("forward", "backward", "graph")
_OF_UPDATES: tuple[LaunchKind, ...] = ("optimize", "trust_ratios")

_LAUNCHED_AS: dict[type[Op], LaunchKind] = {
    Forward: "forward",
    Backward: "backward",
    Optimize: "optimize",
    TrustRatios: "trust_ratios",
    Select: "select",
    Merge: "merge",
    Densify: "densify",
    LowRank: "low_rank",
    Copy: "copy",
    Combine: "copy",
    Pack: "pack",
    Unpack: "unpack",
}


def lane_of(op: Op) -> Lane:
    """Return the lane that executes `op`."""
    match op:
        case Enter() | KernelLaunch():
            return HOST
        case StageIn():
            return IO
        case Forward() | Backward() | TrustRatios() | Optimize():
            return COMPUTE
        case Delay():
            return op.lane or _OF_CHANNEL[op.channel]
        case Load() | Save() | Copy() | Pack() | Unpack() | Combine() | Tick() | Wait():
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
        case Load() | StageIn() | Delay() | KernelLaunch():
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
        case Enter() | StageIn() | Delay() | Wait() | Tick() | KernelLaunch():
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


def without_names(op: Collective) -> Collective:
    """Return a collective that stands for all that differ from it in the names of buffers only."""
    match op:
        case ReduceScatter() | AllGather():
            return replace(op, src="", dst="")
        case _:
            return replace(op, buffer="")


def is_passed_over(op: Op, enter: Enter | None) -> bool:
    """Tell whether a rank that sits out a step skips an operation of it; `enter` begins the step."""
    if enter is None or (isinstance(op, Delay) and op.channel == "io"):
        return False
    if isinstance(op, KernelLaunch):
        return op.kind in _OF_PASSES or (enter.awaits is None and op.kind in _OF_UPDATES)
    return isinstance(op, Forward | Backward | Delay) or (
        enter.awaits is None and isinstance(op, TrustRatios | Optimize)
    )


def entering(body: tuple[Op, ...]) -> Enter | None:
    """Return the operation by which ranks sit out a step with this body; None if there is none."""
    return body[0] if body and isinstance(body[0], Enter) else None


def forward_passes(body: tuple[Op, ...]) -> dict[int, tuple[Forward, ...]]:
    """Return the operations of each forward pass of a body, by the position of the last of them.

    A forward pass ends where the backward pass begins, or the body ends.
    """
    found: dict[int, tuple[Forward, ...]] = {}
    parts: list[Forward] = []
    last = 0
    for position, op in enumerate((*body, None)):
        if isinstance(op, Forward):
            parts.append(op)
            last = position
        elif parts and (op is None or isinstance(op, Backward)):
            found[last] = tuple(parts)
            parts = []
    return found


def launch_kind(op: Op) -> LaunchKind | None:
    """Return as what the host launches an operation; None if it launches nothing on a device."""
    if isinstance(op, Wait):
        return None if op.lane.kind == "host" else "event"
    return "collective" if isinstance(op, COLLECTIVES) else _LAUNCHED_AS.get(type(op))


def micro_batches(body: tuple[Op, ...]) -> tuple[int, ...]:
    """Return the micro-batch that each operation of a body belongs to. It ends with the last of its backward pass.

    >>> step = (Forward((), ("loss",)), Backward(("loss",), "grad"))
    >>> micro_batches((*step, Delay("compute", 1), *step, Optimize((), ())))
    (0, 0, 1, 1, 1, 1)
    """
    found: list[int] = []
    n_before = 0
    ended_at = 0
    has_computed = False
    for op in body:
        if isinstance(op, Forward) and has_computed:
            n_before += 1
            found[ended_at:] = [n_before] * (len(found) - ended_at)
            has_computed = False
        found.append(n_before)
        if isinstance(op, Backward):
            ended_at = len(found)
            has_computed = True
    return tuple(found)


def drops(body: tuple[Op, ...]) -> int | None:
    """Return the position of a body's all-reduce with `drop`, if there is one."""
    return next((at for at, op in enumerate(body) if isinstance(op, AllReduce) and op.drop), None)


def next_tick(ready_s: NDArray[np.float64] | float, period_s: float) -> NDArray[np.float64]:
    """Return the number of the first tick at or after `ready_s`; tick n is n periods after the start.

    >>> next_tick(np.array([0.0, 0.012, 0.015]), 0.005).tolist()
    [0.0, 3.0, 3.0]

    Sums of seconds are rounded. An operation that would be ready at a tick without rounding does not miss it:

    >>> 0.1 + 0.2 > 0.3, float(next_tick(0.1 + 0.2, 0.3))
    (True, 1.0)

    Late in a long run, the next number after a time is a larger part of a period:

    >>> float(next_tick(np.nextafter(12_345.678, np.inf), 0.001))
    12345678.0
    """
    number = ready_s / period_s
    return np.asarray(np.ceil(number - np.maximum(_TICK_SLACK, number * _ROUNDING)) + 0.0)  # no negative zero


def tick_s(ready_s: NDArray[np.float64] | float, period_s: float) -> NDArray[np.float64]:
    """Return the time of the first tick, a multiple of `period_s`, at or after `ready_s`.

    >>> tick_s(np.array([0.0, 0.012, 0.015]), 0.005).round(9).tolist()
    [0.0, 0.015, 0.015]
    """
    return np.asarray(np.maximum(next_tick(ready_s, period_s) * period_s, ready_s))
