"""Programs, which perform the computation of a training job for a plan; and feeds, which read its batches."""

import abc
from collections.abc import Callable, Sequence
from typing import IO, TypeAlias

import torch
from torch import Tensor

from real.buffers.transforms import Transform
from simdist.plan import ops

# Writes a file of a given name with the contents from a function.
WriteFile: TypeAlias = Callable[[str, Callable[[IO[bytes]], object]], None]
Batch: TypeAlias = tuple[Tensor, Tensor]  # inputs and targets, samples along the first axis

# An operation that programs perform; loads and passes have methods of their own.
Computation: TypeAlias = ops.StageIn | ops.Copy | ops.TrustRatios | ops.Optimize | Transform | ops.Save

# The means over the channels of ImageNet's mean and deviation, 0.485 0.456 0.406 and 0.229 0.224 0.225.
# Source: https://pytorch.org/vision/stable/models.html, "Using the pre-trained models".
_MEAN = 255 * 0.449
_DEVIATION = 255 * 0.226


class Feed(abc.ABC):
    """Performs the operations of a plan that read a data set."""

    @abc.abstractmethod
    def load(self, op: ops.Load, number: int) -> None:
        """Read batch `number` into the host buffer `op.dst`."""

    @abc.abstractmethod
    def stage_in(self, op: ops.StageIn) -> None:
        """Bring the node's files to its disk; return when all ranks of the node have done so."""

    @abc.abstractmethod
    def batch(self, name: str) -> Batch:
        """Return the batch in a host buffer, uint8 `[batch, *shape]` and int64 labels."""


def normalised(images: Tensor, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return images on the device, with a mean of about 0 and a deviation of about 1; always a copy.

    Args:
        images: uint8 `[batch, ...]`, on the host. Copying pinned ones does not block the caller.
        shape: Shape of a sample for the model.
        device: Target device.
        dtype: Data type of the result.
    """
    there = images.to(device, non_blocking=True).view(len(images), *shape)
    return there.to(dtype).sub_(_MEAN).div_(_DEVIATION)


class Program(abc.ABC):
    """Performs the operations of a plan that compute, load and save, when the executor calls it.

    On a GPU the methods enqueue kernels on the current CUDA stream and return.
    """

    @abc.abstractmethod
    def load(self, op: ops.Load, number: int) -> None:
        """Read batch `number` into the host buffer `op.dst`."""

    def launch(self, op: ops.KernelLaunch) -> None:  # noqa: B027  (launching takes the time that it takes)
        """Spend the host's time for launching an operation, if the program does not launch it itself."""

    @abc.abstractmethod
    def perform(self, op: Computation, step: int) -> None:
        """Perform an operation in the stream of the plan; `StageIn` ends when all ranks of the node have done it."""

    @abc.abstractmethod
    def forward(self, parts: Sequence[ops.Forward], step: int, complete: Callable[[], object]) -> None:
        """Compute the outputs and the loss of a pass.

        Args:
            parts: The operations of the pass, in the order of the plan: one, or one for each unit of a sharded model.
            step: The step.
            complete: Call it once for each of them, in that order: before the model uses the next unit, and at the end.
                It may block, and may perform other operations.
        """

    @abc.abstractmethod
    def backward(self, buckets: Sequence[ops.Backward], complete: Callable[[], object]) -> None:
        """Compute all gradients of a pass.

        Args:
            buckets: The operations of its gradient buckets, in the order of the plan.
            complete: Call it once for each bucket, in that order, as soon as its gradients are ready. It may block, and
                may perform other operations.
        """

    def state(self) -> Tensor:
        """Return all that another rank needs to go on as this one does, uint8 `[nbytes]`, between two steps."""
        return torch.empty(0, dtype=torch.uint8)

    def take_state(self, state: Tensor) -> None:  # noqa: B027  (there is none)
        """Go on as the rank that `state` is from."""
