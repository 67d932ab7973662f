"""The process groups of a plan, as traces name them: 0 is the world, and every other group has a number from 1."""

from dataclasses import dataclass

from simdist.plan import COLLECTIVES, Plan
from simdist.plan.group import Group

WORLD = "0"


@dataclass(frozen=True, slots=True)
class Groups:
    """Numbers the groups that a plan's collectives are over.

    Args:
        world_size: Ranks.
        first: Number of the first group of each partition of the ranks that is neither the world nor single ranks.
    """

    world_size: int
    first: dict[Group, int]

    @classmethod
    def of(cls, plan: Plan) -> "Groups":
        """Return the groups of a plan, in the order in which its bodies use them."""
        used = dict.fromkeys(op.group for body in plan.bodies for op in body if isinstance(op, COLLECTIVES))
        first, number = {}, 1
        for group in used:
            if 1 < group.size < plan.world_size:
                first[group] = number
                number += plan.world_size // group.size
        return cls(plan.world_size, first)

    def place(self, group: Group, rank: int) -> int:
        """Return which of the groups of a partition a rank belongs to, as in `Group.members`.

        >>> Groups(8, {}).place(Group(2, stride=4), rank=7)
        3
        """
        return rank // (group.size * group.stride) * group.stride + rank % group.stride

    def members(self, group: Group, rank: int) -> range:
        """Return the ranks of the group of a rank.

        >>> list(Groups(8, {}).members(Group(2, stride=4), rank=7))
        [3, 7]
        """
        block = group.size * group.stride
        first = rank // block * block + rank % group.stride
        return range(first, first + block, group.stride)

    def name(self, group: Group, rank: int) -> str:
        """Return what traces call the group of a rank."""
        return str(self.first[group] + self.place(group, rank)) if group in self.first else WORLD

    def document(self) -> dict[str, list[int]]:
        """Return the ranks of every group but the world, by name: the file that simulators take beside the traces."""
        return {
            str(first + n): ranks
            for group, first in self.first.items()
            for n, ranks in enumerate(group.members(self.world_size))
        }
