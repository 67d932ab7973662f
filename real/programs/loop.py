"""What is left to do beside a user's own training loop, which loads, computes and updates by itself."""

from collections.abc import Callable, Iterable
from typing import NoReturn, final

from real.kernels import topk
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
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

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

    def select(self, op: Select) -> None:
        """Select the top k of the gradient plus the residual, and keep the rest."""
        residual, taken = self._memory.dense(op.residual), self._memory.sparse(op.dst)
        residual.add_(self._memory.dense(op.src))
        values, indices = topk.select(residual, op.k, op.method)
        taken.values.copy_(values)
        taken.indices.copy_(indices)
        residual[indices.long()] = 0

    def densify(self, op: Densify) -> None:
        """Scatter-add the values."""
        taken = self._memory.sparse(op.src)
        topk.densify(taken.values, taken.indices, self._memory.dense(op.dst))

    def save(self, op: Save, step: int) -> None:
        """Refuse: checkpoints are written between steps."""
        self._refuse(op)

    def _refuse(self, what: object) -> NoReturn:
        raise RunError(f"{what} is for the training loop to do, not for the plan")
