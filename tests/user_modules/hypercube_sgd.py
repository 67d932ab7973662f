"""A schedule as users write them, which declares nothing to `tune`: pairs of ranks average, farther apart each time."""

from typing import ClassVar, Literal, final

from pydantic import Field

from simdist.plan import Group
from simdist.schedules.averaging import AveragingSchedule
from simdist.schedules.job import Shape
from simdist.settings.units import Whole


@final
class HypercubeSGD(AveragingSchedule):
    """After every `every` steps a rank averages with the one 1, 2, 4, ... apart."""

    examples: ClassVar[tuple[dict[str, object], ...]] = ({}, {"every": 2})

    kind: Literal["hypercube_sgd"] = "hypercube_sgd"
    every: Whole = Field(default=1, ge=1)

    def default_label(self) -> str:
        """Return the label."""
        return f"hypercube-{self.every}"

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return what does not fit: a world that is no power of two."""
        found = super().problems(shape)
        if shape.world_size & (shape.world_size - 1):
            found.append(("kind", f"{shape.world_size} ranks are no hypercube: write a power of two"))
        return found

    def average(self, step: int, shape: Shape) -> Group | None:
        """Return pairs that are a power of two apart."""
        if not self.fires(self.every, step):
            return None
        turn = step // self.every % (shape.world_size.bit_length() - 1)
        return Group(2, stride=1 << turn)
