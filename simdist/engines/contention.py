"""What the fast engine may say about transfers that share resources.

Transfers of one operation that are joined by shared resources must start together: then their durations are those of
the fluid network from a common start, solved once. Transfers of different operations must not overlap on a resource.
Every other case is refused.
"""

import numpy as np
from numpy.typing import NDArray

from simdist.cost import Costs, Shared
from simdist.engines.network.fluid import common_start_s
from simdist.errors import UnsupportedError
from simdist.plan import Op, op_text

Times = NDArray[np.float64]


class Contention:
    """The resources that several transfers may want, and until when each is taken."""

    def __init__(self, costs: Costs, n_seeds: int) -> None:
        self._busy_s = np.zeros((costs.topology.n_resources, n_seeds))
        self._uses = {op: _Use(op, costs) for op in costs.contested}

    def seconds(self, op: Op) -> Times:
        """Return what the transfers of an operation take when they start together, `[n_groups]`."""
        return self._uses[op].seconds

    def check(self, op: Op, start_s: Times, end_s: Times, step: int) -> None:
        """Take the resources of an operation's transfers.

        Args:
            op: The operation.
            start_s: Start of each transfer, `[n_groups, n_seeds]`.
            end_s: End of each, if they share as foreseen.
            step: Step, for the message.

        Raises:
            UnsupportedError: They do not start together, or somebody else is on a resource.
        """
        use = self._uses[op]
        if (start_s != start_s[use.leader]).any():
            raise UnsupportedError(
                f"{op_text(op)} at step {step}: groups share a link and start at different times; the fast engine is "
                f"exact only for a common start: use --engine des (or auto)"
            )
        if (start_s[use.groups] < self._busy_s[use.resources]).any():
            raise UnsupportedError(
                f"{op_text(op)} at step {step}: another operation may still use a link that it needs; the fast engine "
                f"cannot share a link between operations: use --engine des (or auto)"
            )
        np.maximum.at(self._busy_s, use.resources, end_s[use.groups])


class _Use:
    """Who uses which resource in an operation."""

    def __init__(self, op: Op, costs: Costs) -> None:
        cost = costs.of[op]
        assert isinstance(cost, Shared)
        pairs = [
            np.unique(np.concatenate([stage.resources for stage in transfer.stages] or [np.empty(0, dtype=np.int64)]))
            for transfer in cost.transfers
        ]
        self.groups = np.repeat(np.arange(len(pairs)), [len(resources) for resources in pairs])
        self.resources = np.concatenate(pairs)
        self.leader = self._leaders(len(pairs), costs.topology.n_resources)
        """The first group of each group's component: those that share, directly or through others."""
        self.seconds = common_start_s(cost.transfers, costs.capacity_Bps)

    def _leaders(self, n_groups: int, n_resources: int) -> NDArray[np.int64]:
        """Let the lowest number spread over resources and groups until it stands still."""
        leader = np.arange(n_groups)
        while True:
            lowest = np.full(n_resources, n_groups)
            np.minimum.at(lowest, self.resources, leader[self.groups])
            lower = leader.copy()
            np.minimum.at(lower, self.groups, lowest[self.resources])
            if (lower == leader).all():
                return leader
            leader = lower
