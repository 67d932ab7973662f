"""What a program is: the computation of a training job, in the operations of a plan."""

import abc
from collections.abc import Callable, Iterable

from real.execution.transforms import Transform
from simdist.plan import Copy, Forward, Load, Optimize, Save, StageIn, TrustRatios


class Program(abc.ABC):
    """Performs the operations of a plan that compute, load and save; the executor says when.

    On a GPU the methods enqueue kernels on the current CUDA stream and return.
    """

    @abc.abstractmethod
    def load(self, op: Load, number: int) -> None:
        """Read batch `number` into the host buffer `op.dst`."""

    @abc.abstractmethod
    def stage_in(self, op: StageIn) -> None:
        """Bring the files of this rank's node from storage to its disk; return when all ranks of the node have."""

    @abc.abstractmethod
    def copy(self, op: Copy, step: int) -> None:
        """Copy a buffer."""

    @abc.abstractmethod
    def forward(self, op: Forward, step: int) -> None:
        """Compute the loss."""

    @abc.abstractmethod
    def backward(self, buckets: Iterable[str], complete: Callable[[], None]) -> None:
        """Compute all gradients.

        Args:
            buckets: The gradient buckets, in the order of the plan.
            complete: To be called once for each of them, in that order, as soon as its gradients are there. It may
                block, and other operations may be performed inside it.
        """

    @abc.abstractmethod
    def trust_ratios(self, op: TrustRatios) -> None:
        """Compute this rank's share of the trust ratios."""

    @abc.abstractmethod
    def optimize(self, op: Optimize) -> None:
        """Update parameters."""

    @abc.abstractmethod
    def transform(self, op: Transform, step: int) -> None:
        """Select, merge, densify, pack or unpack; called in whichever stream the plan says."""

    @abc.abstractmethod
    def save(self, op: Save, step: int) -> None:
        """Write buffers to storage."""
