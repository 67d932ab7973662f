"""Groups: partitions of the ranks into groups of equal size, by a pattern or by list."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simdist.errors import PlanError

MAX_WORLD_SIZE = 2**20  # a trace holds one float64 per rank and operation
_N_SHOWN = 4  # groups of a list in a text


@dataclass(frozen=True, slots=True)
class GroupForm:
    """Size and stride of groups; the stride is None if the groups are listed.

    >>> print(Group(4).form, Group(2, stride=4).form, Group.of([[0, 3], [1, 2]]).form, sep="; ")
    group of 4; group of 2 at stride 4; group of 2 by list
    """

    size: int
    stride: int | None

    def __str__(self) -> str:
        how = {None: " by list", 1: ""}.get(self.stride, f" at stride {self.stride}")
        return f"group of {self.size}{how}"


@dataclass(frozen=True, slots=True)
class Group:
    """Partition the ranks into groups of `size` members that lie `stride` apart, or that are listed.

    Blocks have `size * stride` consecutive ranks. Inside a block, the ranks with equal `rank % stride` form one group.

    >>> Group(4).members(8)                 # neighbours: the GPUs of a 4-GPU node
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    >>> Group(2, stride=4).members(8)       # the j-th GPU of every node
    [[0, 4], [1, 5], [2, 6], [3, 7]]

    Groups without such a pattern, such as the pairs of a random matching, are listed:

    >>> Group.of([[0, 3], [1, 2]]).members(4)
    [[0, 3], [1, 2]]

    In numpy: `split`. In torch: the rank lists of `new_group`.

    Args:
        size: Members of each group.
        stride: Distance of the members.
        ranks: The ranks of all groups, one group after the other, if they are listed. See `of`.
    """

    size: int
    stride: int = 1
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.ranks)
        if n and (self.stride != 1 or self.size < 1 or n % self.size or sorted(self.ranks) != list(range(n))):
            raise PlanError(
                f"groups {_listed(self.ranks, self.size)}: list each of the ranks 0 to {n - 1} once, in groups of one "
                f"size, such as Group.of([[0, 3], [1, 2]])"
            )

    @classmethod
    def of(cls, members: Sequence[Sequence[int]]) -> "Group":
        """Return the groups with these members, in the order of their first members.

        Args:
            members: Ranks of each group. All groups have equally many, and each rank is in one.

        Raises:
            PlanError: The groups differ in size, or do not partition the ranks.

        >>> Group.of([[2, 3], [0, 1]])
        Group(size=2, stride=1, ranks=())
        """
        ordered = sorted(map(tuple, members))
        sizes = sorted({len(each) for each in ordered})
        if len(sizes) != 1:
            raise PlanError(f"groups of {', '.join(map(str, sizes)) or 'no'} ranks; write groups of one size")
        (size,) = sizes
        listed = cls(size, ranks=tuple(chain.from_iterable(ordered)))
        regular = cls(size, ordered[0][1] - ordered[0][0] if size > 1 else 1)
        world_size = len(listed.ranks)
        is_regular = regular.divides(world_size) and regular.members(world_size) == list(map(list, ordered))
        return regular if is_regular else listed

    def divides(self, world_size: int) -> bool:
        """Tell whether the groups partition `world_size` ranks exactly."""
        if self.ranks:
            return len(self.ranks) == world_size
        return self.size >= 1 and self.stride >= 1 and world_size % (self.size * self.stride) == 0

    def shape(self, world_size: int) -> tuple[int, int, int]:
        """Return `(n_blocks, size, stride)`: the axes of ranks that were `split`. Groups lie along axis 1.

        Raises:
            PlanError: The groups do not partition the ranks.
        """
        if not self.divides(world_size):
            raise PlanError(self._not_of(world_size))
        return world_size // (self.size * self.stride), self.size, self.stride

    def split(self, values: NDArray[Any], axis: int = 0) -> NDArray[Any]:
        """Return values of ranks by group: the axes `[n_blocks, size, stride]` replace the axis of the ranks.

        Returns:
            A view of the values. If the groups are listed, a copy.

        Raises:
            PlanError: The groups do not partition the ranks.
        """
        shape = self.shape(values.shape[axis])
        if self.ranks:
            values = values.take(self.ranks, axis)
        return values.reshape(*values.shape[:axis], *shape, *values.shape[axis + 1 :])

    def joined(self, values: NDArray[Any], axis: int = 0) -> NDArray[Any]:
        """Return values of ranks, given them by group: the inverse of `split`.

        Args:
            values: Values with the axes `[n_blocks, size, stride]`.
            axis: Number of the first of these axes.
        """
        n_ranks = math.prod(values.shape[axis : axis + 3])
        flat = values.reshape(*values.shape[:axis], n_ranks, *values.shape[axis + 3 :])
        return flat.take(np.argsort(self.ranks), axis) if self.ranks else flat

    def members(self, world_size: int) -> list[list[int]]:
        """Return the ranks of every group, in the order of the groups' first ranks."""
        by_group = np.moveaxis(self.split(np.arange(world_size)), 1, 2)
        return by_group.reshape(-1, self.size).tolist()

    def number(self, rank: int) -> int:
        """Return the number of the group that a rank belongs to, as in `members`.

        >>> Group(2, stride=4).number(7)
        3
        """
        if self.ranks:
            return self.ranks.index(rank) // self.size
        return rank // (self.size * self.stride) * self.stride + rank % self.stride

    def member(self, rank: int) -> int:
        """Return the place of a rank in its group.

        >>> [Group(2, stride=2).member(rank) for rank in range(8)]
        [0, 0, 1, 1, 0, 0, 1, 1]
        """
        if self.ranks:
            return self.ranks.index(rank) % self.size
        return rank // self.stride % self.size

    def is_first(self, rank: int) -> bool:
        """Tell whether a rank is the first of its group.

        >>> [rank for rank in range(8) if Group(2, stride=2).is_first(rank)]
        [0, 1, 4, 5]
        """
        return self.member(rank) == 0

    def over_copies(self, ranks_per_copy: int) -> "Group":
        """Return the groups of ranks that hold the same part, if each rank is replaced by several that share a copy.

        >>> Group(2, stride=2).over_copies(3)
        Group(size=2, stride=6, ranks=())
        """
        if not self.ranks:
            return Group(self.size, self.stride * ranks_per_copy)
        of_copies = np.array(self.members(len(self.ranks))) * ranks_per_copy
        return Group.of([group for part in range(ranks_per_copy) for group in (of_copies + part).tolist()])

    def of_whole_copies(self, ranks_per_copy: int) -> "Group":
        """Return the groups of all ranks of these members, if each rank is replaced by several that share a copy.

        >>> Group(2).of_whole_copies(3)
        Group(size=6, stride=1, ranks=())
        """
        if not self.ranks:
            return Group(self.size * ranks_per_copy, self.stride)
        firsts = np.array(self.members(len(self.ranks)))[:, :, np.newaxis] * ranks_per_copy
        ranks = (firsts + np.arange(ranks_per_copy)).reshape(len(firsts), -1)
        return Group.of(ranks.tolist())

    def _not_of(self, world_size: int) -> str:
        """Say why these groups do not partition the ranks."""
        if self.ranks:
            return f"{self} lists {len(self.ranks)} ranks; list all {world_size}"
        return (
            f"{self} does not divide {world_size} ranks; sizes that do at stride {self.stride}: "
            f"{', '.join(map(str, self._legal_sizes(world_size))) or 'none'}"
        )

    def _legal_sizes(self, world_size: int) -> list[int]:
        if self.stride < 1 or world_size % self.stride:
            return []
        quotient = world_size // self.stride
        return [size for size in range(1, quotient + 1) if quotient % size == 0]

    @property
    def form(self) -> GroupForm:
        """What groups have in common that are counted as one kind."""
        return GroupForm(self.size, None if self.ranks else self.stride)

    def __str__(self) -> str:
        return str(self.form)

    @property
    def text(self) -> str:
        """The same as `str`, and the first groups of a list: `group of 2 by list: 0+3, 1+2`."""
        return f"{self}: {_listed(self.ranks, self.size)}" if self.ranks else str(self)


def group_fields(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a dataclass for a file: of a group, `ranks` only if they are listed.

    It is a `dict_factory` for `dataclasses.asdict`.
    """
    return {name: value for name, value in fields if (name, value) != ("ranks", ())}


def _listed(ranks: Sequence[int], size: int) -> str:
    groups = ["+".join(map(str, ranks[at : at + size])) for at in range(0, len(ranks), max(size, 1))]
    return ", ".join([*groups[:_N_SHOWN], *(["..."] if len(groups) > _N_SHOWN else [])])


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
