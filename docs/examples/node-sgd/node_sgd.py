"""Node SGD: synchronous within a node, local between nodes; a disturbance and an algorithm to try it with."""

from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from simdist.cost.topology import Call, Messages
from simdist.plan import AllReduce, Group
from simdist.plan.algorithms import CollectiveAlgorithm
from simdist.scenario.disturbances import CustomDisturbance, Draws
from simdist.schedules.averaging import AveragingSchedule
from simdist.schedules.job import Job, Shape
from simdist.schedules.tuning import Allowance, Axis
from simdist.settings.units import Fraction, Seconds, Whole

__all__ = ["STAR", "Maintenance", "NodeSGD", "star"]


class NodeSGD(AveragingSchedule):
    """Average gradients within each node in every step, and parameters over all ranks every `period` steps."""

    examples: ClassVar[tuple[dict[str, object], ...]] = ({"period": 4}, {"period": 2, "warmup_steps": 3})

    kind: Literal["node_sgd"] = "node_sgd"
    period: Whole = Field(ge=1)

    def default_label(self) -> str:
        """Return the label, such as `node-4`."""
        return f"node-{self.period}{self.traits}"

    def local_gradients(self, job: Job) -> Group | None:
        """Return the node."""
        return Group(job.ranks_per_node)

    def average(self, step: int, shape: Shape) -> Group | None:
        """Return the world at the end of each period."""
        return Group(shape.world_size) if self.fires(self.period, step) else None

    def shortest_period(self) -> int:
        """Return the period."""
        return self.period

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return the periods that `tune` tries, and what all schedules that average parameters may vary."""
        return (cls.axis("period", (2, 4, 8)), *super().axes(job, allowed))


class Maintenance(CustomDisturbance):
    """Each node is late in one step of every `interval` steps: in which one is random."""

    kind: Literal["maintenance"] = "maintenance"
    interval: Whole = Field(ge=1)
    delay_s: Seconds
    skipped: Fraction = 0.0
    """Share of the intervals without a delay."""

    def delays_s(self, draws: Draws) -> NDArray[np.float64]:
        """Return the delay in the chosen step of each interval."""
        start = draws.start - draws.start % self.interval  # numbers of the whole first interval
        steps = np.arange(draws.start, draws.stop)
        firsts = steps - steps % self.interval - start
        leaders = np.searchsorted(draws.ranks, draws.ranks - draws.ranks % draws.ranks_per_node)
        chosen = draws.uniforms(start=start)[firsts][:, leaders]
        skips = draws.uniforms(lane=1, start=start)[firsts][:, leaders] < self.skipped
        is_now = (steps % self.interval)[:, np.newaxis, np.newaxis] == np.floor(chosen * self.interval)
        return np.where(is_now & ~skips, self.delay_s, 0.0)


def star(call: Call) -> Iterator[Messages]:
    """Send everything to the first member, which adds it up, and back."""
    others = call.members[1:]
    first = np.full_like(others, call.members[0])
    yield Messages(others, first, float(call.nbytes))
    yield Messages(first, others, float(call.nbytes))


STAR = CollectiveAlgorithm(carries=(AllReduce,), messages=star)
