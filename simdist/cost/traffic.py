"""Traffic of one seed: changes of links, and flows of other jobs.

Time counts in seconds from the start of the run. A *share* is the remaining part of a link's capacity: 1 undisturbed,
0.5 half the rate, 0 an outage, in which nothing passes. Transfers in flight resume after an outage. Latencies do not
change. A share that is the same for the whole run is not traffic: it is part of `Costs.capacity_Bps`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from simdist.cost.costs import Stage


@dataclass(frozen=True, slots=True)
class LinkShares:
    """The remaining share of links over time.

    If several name the same resource, the product of their shares remains.

    Args:
        resources: Indices of the resources. All have the same share at the same time.
        shares: Starts over with every call. It yields a time in seconds and the share from then on. The first time is
            0.0, and times ascend. It may be endless. A share may be the same as the one before.
        cause: Cause of the disturbance, for messages, such as `disturbances[0] (bursts)`.
    """

    resources: tuple[int, ...]
    shares: Callable[[], Iterator[tuple[float, float]]]
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Flight:
    """One flow of another job: with a number of bytes, or endless until its end. One of the two fields is None.

    Args:
        begin_s: Its beginning.
        nbytes: Bytes that it puts on every resource.
        end_s: Its end; later than `begin_s`, inf if it never ends.
    """

    begin_s: float
    nbytes: float | None = None
    end_s: float | None = None


@dataclass(frozen=True, slots=True)
class Background:
    """Flows of another job, one after the other. A flow begins after the previous one has ended.

    Args:
        stage: The resources, with one byte on each and without latency.
        flights: Starts over with every call. It yields the flows in the order of their beginnings, and may be endless.
        cause: Their origin, for messages, such as `background[0] (periodic)`.
    """

    stage: Stage
    flights: Callable[[], Iterator[Flight]]
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Traffic:
    """All that links do in a run.

    Args:
        shares: Links with changing shares.
        background: Flows of other jobs. Each shares fairly with the plan's transfers and the other flows.
    """

    shares: tuple[LinkShares, ...] = ()
    background: tuple[Background, ...] = ()

    @property
    def causes(self) -> dict[int, str]:
        """The disturbed resources, with the first cause of each."""
        flows = ((int(resource), each.cause) for each in self.background for resource in each.stage.resources)
        changes = ((resource, each.cause) for each in self.shares for resource in each.resources)
        return dict(reversed([*changes, *flows]))
