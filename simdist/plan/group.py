"""Groups: partitions of the ranks into groups of equal size."""

from collections.abc import Iterator
from dataclasses import dataclass

from simdist.errors import PlanError

MAX_WORLD_SIZE = 2**20  # a trace holds one float64 per rank and operation


@dataclass(frozen=True, slots=True)
class Group:
    """Partition the ranks into groups of `size` members that lie `stride` apart.

    Blocks have `size * stride` consecutive ranks. Inside a block, the ranks with equal `rank % stride` form one group.

    >>> Group(4).members(8)                 # neighbours: the GPUs of a 4-GPU node
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    >>> Group(2, stride=4).members(8)       # the j-th GPU of every node
    [[0, 4], [1, 5], [2, 6], [3, 7]]

    In numpy: reshape the ranks to `[-1, size, stride]` and reduce axis 1. In torch: the rank lists of `new_group`.
    """

    size: int
    stride: int = 1

    def divides(self, world_size: int) -> bool:
        """Tell whether the groups partition `world_size` ranks exactly."""
        return self.size >= 1 and self.stride >= 1 and world_size % (self.size * self.stride) == 0

    def shape(self, world_size: int) -> tuple[int, int, int]:
        """Return `(n_blocks, size, stride)`: in this shape a vector over ranks has its groups along axis 1.

        Raises:
            PlanError: The groups do not partition the ranks.
        """
        if not self.divides(world_size):
            raise PlanError(
                f"{self} does not divide {world_size} ranks; sizes that do at stride {self.stride}: "
                f"{', '.join(map(str, self._legal_sizes(world_size))) or 'none'}"
            )
        return world_size // (self.size * self.stride), self.size, self.stride

    def members(self, world_size: int) -> list[list[int]]:
        """Return the ranks of every group, in the order of the groups' first ranks."""
        return list(self._iter_members(world_size))

    def number(self, rank: int) -> int:
        """Return the number of the group that a rank belongs to, as in `members`.

        >>> Group(2, stride=4).number(7)
        3
        """
        return rank // (self.size * self.stride) * self.stride + rank % self.stride

    def member(self, rank: int) -> int:
        """Return the place of a rank in its group.

        >>> [Group(2, stride=2).member(rank) for rank in range(8)]
        [0, 0, 1, 1, 0, 0, 1, 1]
        """
        return rank // self.stride % self.size

    def is_first(self, rank: int) -> bool:
        """Tell whether a rank is the first of its group.

        >>> [rank for rank in range(8) if Group(2, stride=2).is_first(rank)]
        [0, 1, 4, 5]
        """
        return self.member(rank) == 0

    def _iter_members(self, world_size: int) -> Iterator[list[int]]:
        n_blocks, size, stride = self.shape(world_size)
        for block in range(n_blocks):
            for offset in range(stride):
                first = block * size * stride + offset
                yield list(range(first, first + size * stride, stride))

    def _legal_sizes(self, world_size: int) -> list[int]:
        if self.stride < 1 or world_size % self.stride:
            return []
        quotient = world_size // self.stride
        return [size for size in range(1, quotient + 1) if quotient % size == 0]

    def __str__(self) -> str:
        return f"group of {self.size}" + (f" at stride {self.stride}" if self.stride != 1 else "")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a step: a schedule declares it, and `simdist.proof` proves it.

    Args:
        gradients: Every rank updates its parameters with the mean gradient over its group. `Group(1)`: with its own.
        parameters: After the update, every rank holds the mean of the parameters over its group. `Group(1)`: no mean.
        micro_batches: Forward and backward passes of the step. A rank's gradient is the sum over them.
        late_steps: The mean is this many steps old. Each rank adds its own progress since then.
        tensors: The mean covers these ranges of tensors only; all of them if empty.
        mixing: The mean is that of outer gradients. The outer optimizer moves anchors against it, and parameters become
            this share of the rank's own plus the rest of the anchors. None: there is no outer optimizer.
        drop: Number of members left out of the mean gradient, the last to arrive.
        absent: Ranks that sit out the step. They have no gradient, and their parameters do not change.
    """

    gradients: Group
    parameters: Group
    micro_batches: int = 1
    late_steps: int = 0
    tensors: tuple[tuple[int, int], ...] = ()
    mixing: float | None = None
    drop: int = 0
    absent: tuple[int, ...] = ()
