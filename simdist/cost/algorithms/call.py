"""One group's part in a collective: what every algorithm needs to know."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simdist.cost.topology import Topology
from simdist.plan import Collective


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that one group performs.

    Args:
        op: The collective.
        members: Ranks of the group, in its order, `[n]`.
        nbytes: Size of the whole (not of a slice), S in the formulas.
        topology: Where the ranks sit.
        number: Of the group, among those of the operation.
    """

    op: Collective
    members: NDArray[np.int64]
    nbytes: int
    topology: Topology
    number: int = 0

    @property
    def n(self) -> int:
        """How many members there are."""
        return len(self.members)

    @property
    def n_nodes(self) -> int:
        """How many machines the members are on."""
        return 1 + int(np.count_nonzero(np.diff(self.topology.node(self.members))))

    def by_node(self) -> list[NDArray[np.int64]]:
        """Return the members on each of the group's nodes, in order."""
        borders = np.flatnonzero(np.diff(self.topology.node(self.members))) + 1
        return np.split(self.members, borders)
