"""What is left to do beside a user's own training loop, which loads, computes and updates by itself."""

from collections.abc import Callable, Iterable
from typing import NoReturn, final

from real.kernels import compression
from real.memory import Memory
from real.programs.base import Program
from simdist.errors import RunError
from simdist.plan import Copy, Densify, Forward, Load, Optimize, Save, Select

__all__ = ["LoopProgram"]


@final
class LoopProgram(Program):
    """Copies and compresses buffers of the model.

    Args:
        memory: The buffers.
        rank: Whose they are.
    """

    def __init__(self, memory: Memory, rank: int) -> None:
        self._memory, self._rank = memory, rank

    def load(self, op: Load, step: int) -> None:
        """Do nothing: the loop has its own data."""

    def copy(self, op: Copy, step: int) -> None:
        """Copy a buffer of parameters or gradients; the loop brings its batches to the device itself."""
        if op.src in self._memory and op.dst in self._memory:
            self._memory.dense(op.dst).copy_(self._memory.dense(op.src), non_blocking=True)

    def forward(self, op: Forward, step: int) -> None:
        """Refuse: the loop does it."""
        self._refuse(op)

    def backward(self, buckets: Iterable[str], complete: Callable[[], None]) -> None:
        """Refuse: the loop does it."""
        self._refuse(f"Backward of {', '.join(buckets)}")

    def optimize(self, op: Optimize) -> None:
        """Refuse: the loop does it."""
        self._refuse(op)

    def select(self, op: Select, step: int) -> None:
        """Select the top k of the gradient plus the residual, and keep the rest."""
        compression.select(self._memory, op, step=step, rank=self._rank)

    def densify(self, op: Densify) -> None:
        """Scatter-add the values."""
        compression.densify(self._memory, op)

    def save(self, op: Save, step: int) -> None:
        """Refuse: checkpoints are written between steps."""
        self._refuse(op)

    def _refuse(self, what: object) -> NoReturn:
        raise RunError(f"{what} is for the training loop to do, not for the plan")
