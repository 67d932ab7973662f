"""What is left to do beside a user's own training loop, which loads, computes and updates by itself."""

from collections.abc import Callable, Iterable
from typing import NoReturn, final

from real.execution import transforms
from real.execution.memory import Memory
from real.execution.transforms import Transform
from real.programs.base import Program
from real.programs.rating import Rating
from simdist.errors import RunError
from simdist.plan import Copy, Forward, Load, Optimize, Save, StageIn, TrustRatios


@final
class LoopProgram(Program):
    """Copies, fuses and compresses buffers of the model.

    Args:
        memory: The buffers.
        rating: Of the model's optimizer.
        rank: Whose they are.
    """

    def __init__(self, memory: Memory, rating: Rating, rank: int) -> None:
        self._memory, self._rating, self._rank = memory, rating, rank

    def load(self, op: Load, number: int) -> None:
        """Do nothing: the loop has its own data."""

    def stage_in(self, op: StageIn) -> None:
        """Do nothing: the loop has its own data."""

    def copy(self, op: Copy, step: int) -> None:
        """Copy a buffer of parameters or gradients; the loop brings its batches to the device itself."""
        if op.src in self._memory and op.dst in self._memory:
            transforms.copy(self._memory, op)

    def forward(self, op: Forward, step: int) -> None:
        """Refuse: the loop does it."""
        self._refuse(op)

    def backward(self, buckets: Iterable[str], complete: Callable[[], None]) -> None:
        """Refuse: the loop does it."""
        self._refuse(f"Backward of {', '.join(buckets)}")

    def transform(self, op: Transform, step: int) -> None:
        """Select, merge, densify, pack or unpack."""
        transforms.transform(self._memory, op, step=step, rank=self._rank)

    def trust_ratios(self, op: TrustRatios) -> None:
        """Compute this rank's share of the trust ratios."""
        self._rating.rate(op)

    def optimize(self, op: Optimize) -> None:
        """Refuse: the loop does it."""
        self._refuse(op)

    def save(self, op: Save, step: int) -> None:
        """Refuse: checkpoints are written between steps."""
        self._refuse(op)

    def _refuse(self, what: object) -> NoReturn:
        raise RunError(f"{what} is for the training loop to do, not for the plan")
