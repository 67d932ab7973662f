"""Traffic of one seed: changes of links, and flows of other jobs.

Time counts in seconds from the start of the run. A *share* is the remaining part of a link's capacity: 1 undisturbed,
0.5 half the rate, 0 an outage, in which nothing passes; transfers in flight continue afterwards. Latencies stay as they
are. A share that is the same for the whole run is no traffic: it is part of `Costs.capacity_Bps`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from simdist.cost.costs import Stage


@dataclass(frozen=True, slots=True)
class LinkShares:
    """How much of links is left over time.

    Of a resource that several of them name, the product of their shares is left.

    Args:
        resources: Indices of the resources; all have the same share at the same time.
        shares: Begins anew with every call; yields from when, seconds, and the share from then on: the first at 0.0,
            ascending, endless or not. A share may be the same as the one before.
        cause: What disturbs them, for messages, such as `disturbances[0] (bursts)`.
    """

    resources: tuple[int, ...]
    shares: Callable[[], Iterator[tuple[float, float]]]
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Flight:
    """One flow of another job: so many bytes, or an endless one that shares until it is over. One of both is None.

    Args:
        begin_s: When it begins.
        nbytes: Bytes that it puts on every resource.
        end_s: When it is over; later than `begin_s`, inf if never.
    """

    begin_s: float
    nbytes: float | None = None
    end_s: float | None = None


@dataclass(frozen=True, slots=True)
class Background:
    """Flows of another job, one after the other: one that finds the one before under way begins when that has ended.

    Args:
        stage: The resources, with one byte on each and without latency.
        flights: Begins anew with every call; yields the flows in the order of their beginnings, endless or not.
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
        background: Flows of other jobs; each shares fairly with the plan's transfers and the others.
    """

    shares: tuple[LinkShares, ...] = ()
    background: tuple[Background, ...] = ()

    @property
    def causes(self) -> dict[int, str]:
        """Disturbed resources, and the first cause of each."""
        flows = ((int(resource), each.cause) for each in self.background for resource in each.stage.resources)
        changes = ((resource, each.cause) for each in self.shares for resource in each.resources)
        return dict(reversed([*changes, *flows]))
