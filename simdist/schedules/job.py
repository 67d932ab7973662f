"""The training job, as far as a schedule needs it to write its plan."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, assert_never, get_args

from simdist.plan.group import Group
from simdist.plan.ops import ALONE, Channel, Destination, LaunchKind, Level
from simdist.plan.optimizers import OptimizerName
from simdist.plan.plan import Dataset, DType
from simdist.schedules.units import ModelUnit

#: The types that schedules may convert parameters and gradients to.
FloatType: TypeAlias = Literal["float64", "float32", "float16", "bfloat16"]

#: The levels of storage that the loads of each epoch read, and the samples that nodes keep.
#:
#:     naive       every epoch reads from storage
#:     files       a node keeps files from storage on its disk, and reads them there the next time
#:     memory      a node keeps samples from storage, decoded, in its memory; from the second epoch on all nodes read
#:                 from one another's memories
#:     datacache   both: the first epoch reads files that an earlier run left on disk, and all others from storage
#:     staged      before the first step every node copies the files that it will read to its disk
#:
#: A sample that is not where it should be, because a level was full, is read from the next level.
#:
#: Source:
#:     Shi et al., Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters, MLSys 2021,
#:     arXiv 2010.10458, section 3.2: `datacache`.
Policy: TypeAlias = Literal["naive", "files", "memory", "datacache", "staged"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
POLICIES_OF_WORKERS: tuple[Policy, ...] = ("naive", "files")  # without memory or a stage that workers would share


def levels(policy: Policy, epoch: int) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """Return the levels that the loads of an epoch read, the preferred one first, and the levels that keep samples."""
    match policy:
        case "naive":
            return ("storage",), ()
        case "files":
            return ("disk", "storage"), ("disk",)
        case "memory":
            return (("memory", "peer", "storage") if epoch else ("storage",)), ("memory",)
        case "datacache":
            read: tuple[Level, ...] = ("memory", "peer", "disk", "storage") if epoch else ("disk", "storage")
            return read, ("disk", "memory")
        case "staged":
            return ("disk", "storage"), ()
        case _:
            assert_never(policy)


def uses_disk(policy: Policy) -> bool:
    """Tell whether a policy needs local disks."""
    return policy in ("files", "datacache", "staged")


def uses_memory(policy: Policy) -> bool:
    """Tell whether a policy keeps samples in memory."""
    return policy in ("memory", "datacache")


@dataclass(frozen=True, slots=True)
class InputPath:
    """The path of a batch to the GPU.

    Args:
        source: `device`: it is there already (synthetic data); `memory`: copied from host memory in every step;
            `storage`: loaded from storage into one of `prefetch` host buffers, then copied.
        copy: `pinned`: the copy is enqueued and the host continues; `pageable`: the host waits for the copy, and so for
            all earlier work of the compute stream.
        prefetch: Batch buffers in rotation. With workers: batches that they load ahead of the one that is used.
        dataset: Data set loaded from storage. None: each batch is one request.
        policy: The levels of storage that the loads of a data set read.
        workers: Processes that load whole batches in turn, from each epoch's start, as those of torch's DataLoader. 0:
            one load follows the other, also across epochs.
    """

    source: Literal["device", "memory", "storage"] = "device"
    copy: Literal["pinned", "pageable"] = "pinned"
    prefetch: int = 2
    dataset: Dataset | None = None
    policy: Policy = "naive"
    workers: int = 0

    @property
    def n_buffers(self) -> int:
        """Batches in host memory: with workers also one that each of them writes."""
        return self.prefetch + self.workers


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A file that ranks write repeatedly.

    Args:
        every: Steps from one checkpoint to the next.
        what: `parameters`; `state`: also an optimizer momentum for each of them; or a number of bytes of any content.
        to: Destination.
        by: The first member of each of these groups writes.
        is_async: Training continues once the state is copied to the host's memory, and is written from there.
    """

    every: int
    what: Literal["parameters", "state"] | int = "parameters"
    to: Destination = "storage"
    by: Group = ALONE
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranks and steps of a job: they decide whether a schedule fits."""

    world_size: int
    ranks_per_node: int
    n_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Shape):
    """A data-parallel training job, as far as its plan depends on it.

    Args:
        world_size: Ranks.
        ranks_per_node: Ranks of one node; they are consecutive.
        n_steps: Steps.
        tensor_counts: Elements of every parameter tensor, in forward order.
        dtype: Type of parameters and gradients.
        optimizer: The optimizer, see `simdist.plan.optimizers`.
        micro_batches: Forward and backward passes of a step. Their gradients are added up.
        batch_nbytes: Bytes that one rank reads for a step: its batches of all passes.
        input_path: The path of the batch to the GPU.
        host_waits_for: When the host waits for its GPU. `loss`: it waits for the loss of step t - run_ahead_steps
            before it enqueues the backward pass of step t. `update`: at the end of every step, but before parameters
            are averaged, it waits for its own update.
        run_ahead_steps: Steps that the host runs ahead of its GPU. None: it never waits.
        delay_channels: Channels on which delays are injected.
        tensor_backward_s: Seconds of the backward pass of every tensor, in forward order, on an undisturbed device.
            Schedules need them that depend on when gradients are ready. Empty if not known.
        checkpoint: The checkpoint that is written; None for none.
        tensor_rows: Rows of every tensor as a matrix; for a vector, its number of elements. Empty if not known.
        speeds: Relative speeds of the ranks' devices; empty if not known.
        compute_dtype: Type of the arithmetic of forward and backward passes; that of parameters if not known.
        units: What is gathered and reduced together if the model is sharded, in forward order. Empty: the whole model.
        has_param_buffers: Every tensor has a buffer of parameters of its own, instead of one buffer for all of them.
        launches: What the host takes time to launch, see `simdist.plan.launches`.
    """

    tensor_counts: tuple[int, ...]
    dtype: DType = "float32"
    optimizer: OptimizerName = "sgd"
    micro_batches: int = 1
    batch_nbytes: int = 1
    input_path: InputPath = field(default_factory=InputPath)
    host_waits_for: Literal["loss", "update"] = "loss"
    run_ahead_steps: int | None = 0
    delay_channels: frozenset[Channel] = frozenset()
    tensor_backward_s: tuple[float, ...] = ()
    checkpoint: Checkpoint | None = None
    tensor_rows: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    compute_dtype: FloatType | None = None
    units: tuple[ModelUnit, ...] = ()
    has_param_buffers: bool = False
    launches: frozenset[LaunchKind] = frozenset()


def degrees(shape: Shape) -> tuple[int, ...]:
    """Return the numbers of ranks that may share something: parts of a node, or several whole nodes.

    >>> degrees(Shape(world_size=16, ranks_per_node=4))
    (2, 4, 8)
    """
    n = shape.world_size
    node = min(shape.ranks_per_node, n)
    divisors = (each for each in range(2, n) if n % each == 0)
    return tuple(each for each in divisors if each % node == 0 or node % each == 0)
