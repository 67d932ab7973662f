"""Prices: what engines read of the cost of an operation.

An operation takes seconds of its own rank (`Local`), or its groups move bytes (`Shared`, `Varying`).
A transfer is a sequence of *stages*. A stage has a latency and puts bytes on resources, such as the fabric ports of
GPUs or the network cards (NICs) of nodes. Alone, a stage takes

    latency + max over resources (bytes / capacity)

and stages follow one another. Which bytes go where is the business of `simdist.cost.algorithms` and `Topology`; what
happens when transfers meet on a resource is that of `simdist.engines`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.plan.group import Group
from simdist.plan.ops import Op

if TYPE_CHECKING:
    from simdist.cost.topology import Topology


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
        """Return its duration when it shares its resources with no other."""
        flow_s = float((self.nbytes / capacity_Bps[self.resources]).max()) if len(self.resources) else 0.0
        return self.latency_s + flow_s


@dataclass(frozen=True, slots=True)
class Transfer:
    """Traffic of one group (or one rank) in one operation: stages, one after the other."""

    stages: tuple[Stage, ...]

    def alone_s(self, capacity_Bps: NDArray[np.float64]) -> float:
        """Return its duration when it shares its resources with no other."""
        return sum(stage.alone_s(capacity_Bps) for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Shared:
    """Transfers over resources that others may use too.

    Args:
        group: Who moves bytes together.
        transfers: One per group, in the groups' order.
        alone_s: Duration of each when it shares its resources with no other, `[n_groups]`, or one number.
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


@dataclass(frozen=True, slots=True)
class Local:
    """Seconds that an operation takes on its own rank: one number, or one per rank, `[world_size]`."""

    seconds: float | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Varying:
    """Transfers of every rank by itself that differ from one occurrence of the operation to the next.

    Args:
        group: Every rank by itself.
        transfers: Number of the load -> one transfer for each rank.
    """

    group: Group
    transfers: Callable[[int], tuple[Transfer, ...]]


OpCost: TypeAlias = Local | Shared | Varying


@dataclass(frozen=True)
class Costs:
    """The price list of a plan on a cluster.

    Args:
        topology: Numbers the resources.
        capacity_Bps: Bytes per second of every resource; inf where unlimited.
        of: The cost of every operation in the plan's bodies.
        contested: The operations that may find another transfer on a resource they use; the others never do.
    """

    topology: "Topology"
    capacity_Bps: NDArray[np.float64]
    of: Mapping[Op, OpCost]
    contested: frozenset[Op]
