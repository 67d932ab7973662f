"""Classes as users write them that are wrong, each in one way."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simdist.plan import Group, Result
from simdist.plan.algorithms import CollectiveAlgorithm
from simdist.scenario.disturbances import CustomDisturbance, Draws
from simdist.schedules.averaging import AveragingSchedule
from simdist.schedules.job import Job, Shape
from simdist.schedules.sync import Sync
from simdist.schedules.tuning import Allowance, Axis, Permit


class Overstated(AveragingSchedule):
    """Declares averages over the world, and averages over nodes."""

    kind: Literal["overstated"] = "overstated"

    def default_label(self) -> str:
        """Return the label."""
        return "overstated"

    def average(self, step: int, shape: Shape) -> Group | None:
        """Return the node."""
        return Group(shape.ranks_per_node)

    def result(self, step: int, job: Job) -> Result:
        """Declare averages over the world."""
        return Result(Group(1), Group(job.world_size))


class Abstract(AveragingSchedule):
    """Does not say who averages."""

    kind: Literal["abstract"] = "abstract"


class Nameless(Sync):
    """Has no kind."""

    kind: str  # type: ignore[assignment]


class NoAxis(Sync):
    """Declares an axis of a field that it does not have."""

    kind: Literal["no_axis"] = "no_axis"  # type: ignore[assignment]

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return an axis of no field."""
        return (Axis("speed", (1, 2)),)


class NoPermit(Sync):
    """Declares an axis that asks for what the class does not declare."""

    kind: Literal["no_permit"] = "no_permit"  # type: ignore[assignment]

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return an axis."""
        return (cls.axis("bucket_nbytes", (None,), Permit("magic", "it is magic")),)


class Helper:
    """Is no schedule."""


class Forgetful(CustomDisturbance):
    """Draws from numpy's own generator, so that every chunk has others."""

    kind: Literal["forgetful"] = "forgetful"

    def delays_s(self, draws: Draws) -> NDArray[np.float64]:
        """Return other numbers each time."""
        return np.random.default_rng().random((draws.stop - draws.start, len(draws.ranks), 1))


class Restarting(CustomDisturbance):
    """Counts steps from the first that it is asked for."""

    kind: Literal["restarting"] = "restarting"

    def delays_s(self, draws: Draws) -> NDArray[np.float64]:
        """Return the number of the step in its chunk."""
        return np.arange(draws.stop - draws.start, dtype=np.float64)[:, None, None]


class Negative(CustomDisturbance):
    """Delays by less than nothing."""

    kind: Literal["negative"] = "negative"

    def delays_s(self, draws: Draws) -> NDArray[np.float64]:
        """Return -1."""
        return np.array(-1.0)


class Shapeless(CustomDisturbance):
    """Returns too many numbers."""

    kind: Literal["shapeless"] = "shapeless"

    def delays_s(self, draws: Draws) -> NDArray[np.float64]:
        """Return seven numbers."""
        return np.zeros(7)


NOTHING = CollectiveAlgorithm(carries=(), messages=list)
