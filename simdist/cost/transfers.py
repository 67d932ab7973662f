"""What moves: stages of bytes on resources, and how long they take alone.

A transfer is a sequence of *stages*. A stage has a latency and puts bytes on resources, such as the fabric ports of
GPUs or the network cards (NICs) of nodes. Alone, a stage takes

    latency + max over resources (bytes / capacity)

and stages follow one another. Which bytes go where is the business of `simdist.cost.algorithms` and `Topology`; what
happens when transfers meet on a resource is that of `simdist.engines`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simdist.plan.group import Group


@dataclass(frozen=True, slots=True)
class Stage:
    """A latency, then bytes on resources.

    Args:
        latency_s: Seconds before the bytes flow.
        resources: Indices of the resources used, each once.
        nbytes: Bytes on each of them.
    """

    latency_s: float
    resources: NDArray[np.int64]
    nbytes: NDArray[np.float64]

    def alone_s(self, capacity_Bps: NDArray[np.float64]) -> float:
        """Return its duration when nobody shares its resources."""
        flow_s = float((self.nbytes / capacity_Bps[self.resources]).max()) if len(self.resources) else 0.0
        return self.latency_s + flow_s


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one group (or one rank) moves in one operation: stages, one after the other."""

    stages: tuple[Stage, ...]

    def alone_s(self, capacity_Bps: NDArray[np.float64]) -> float:
        """Return its duration when nobody shares its resources."""
        return sum(stage.alone_s(capacity_Bps) for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Shared:
    """Transfers over resources that others may use too.

    Args:
        group: Who moves bytes together.
        transfers: One per group, in the groups' order.
        alone_s: What each takes when nobody shares its resources, `[n_groups]`, or one number if all are equal.
    """

    group: Group
    transfers: tuple[Transfer, ...]
    alone_s: float | NDArray[np.float64]

    @classmethod
    def of(cls, group: Group, transfers: Iterable[Transfer], capacity_Bps: NDArray[np.float64]) -> "Shared":
        """Return the transfers with their undisturbed durations."""
        transfers = tuple(transfers)
        seconds = np.array([transfer.alone_s(capacity_Bps) for transfer in transfers])
        return cls(group, transfers, float(seconds[0]) if (seconds == seconds[0]).all() else seconds)
