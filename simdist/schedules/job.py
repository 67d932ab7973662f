"""What a schedule needs to know of the job to write its plan."""

from dataclasses import dataclass, field
from typing import Literal

from simdist.plan import Channel, Dataset
from simdist.plan.plan import DType
from simdist.schedules.data import Policy


@dataclass(frozen=True, slots=True)
class InputPath:
    """How a batch reaches the GPU.

    Args:
        source: `device`: it is there already (synthetic data); `memory`: copied from host memory in every step;
            `storage`: loaded from storage into one of `prefetch` host buffers, then copied.
        copy: `pinned`: the copy is enqueued and the host goes on; `pageable`: the host waits for the copy, and so for
            all earlier work of the compute stream.
        prefetch: Batch buffers in rotation.
        dataset: What is loaded from storage, and how many files are read and decoded at once; None for batches of one
            request each.
        policy: Which levels the loads of a data set read.
    """

    source: Literal["device", "memory", "storage"] = "device"
    copy: Literal["pinned", "pageable"] = "pinned"
    prefetch: int = 2
    dataset: Dataset | None = None
    policy: Policy = "naive"


@dataclass(frozen=True, slots=True)
class Job:
    """A data-parallel training job, as far as its plan depends on it.

    Args:
        world_size: Ranks.
        ranks_per_node: Ranks of one node; they are consecutive.
        n_steps: Steps.
        tensor_counts: Elements of every parameter tensor, in forward order.
        dtype: Type of parameters and gradients.
        optimizer: `lars` scales the learning rate of every tensor by its trust ratio.
        batch_nbytes: Bytes of one rank's batch.
        input_path: How the batch reaches the GPU.
        host_waits_for: Where the host looks at what its GPU has done. `loss`: it waits for the loss of step
            t - run_ahead_steps before it enqueues the backward pass of step t. `update`: at the end of every step, but
            before parameters are averaged, it waits for its own update.
        run_ahead_steps: How many steps the host runs ahead of its GPU; 0 is `loss.item()` in every step; None never
            waits.
        delay_channels: Channels on which delays are injected.
        tensor_backward_s: Seconds of the backward pass of every tensor, in forward order, on an undisturbed device; for
            schedules that depend on when gradients are ready. Empty where nobody knows.
    """

    world_size: int
    ranks_per_node: int
    n_steps: int
    tensor_counts: tuple[int, ...]
    dtype: DType = "float32"
    optimizer: Literal["sgd", "lars"] = "sgd"
    batch_nbytes: int = 1
    input_path: InputPath = field(default_factory=InputPath)
    host_waits_for: Literal["loss", "update"] = "loss"
    run_ahead_steps: int | None = 0
    delay_channels: frozenset[Channel] = frozenset()
    tensor_backward_s: tuple[float, ...] = ()
