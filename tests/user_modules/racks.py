"""A schedule as users write them, with a parameter that must be written, and what it must be."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from simdist.plan import Group
from simdist.schedules.averaging import AveragingSchedule
from simdist.schedules.job import Shape
from simdist.settings.units import Whole


class RackSGD(AveragingSchedule):
    """Average over racks of `ranks` ranks every step, and over all every `period` steps."""

    examples: ClassVar[tuple[dict[str, object], ...]] = ({"ranks": 4}, {"ranks": 2, "period": 6})

    kind: Literal["rack_sgd"] = "rack_sgd"
    ranks: Whole = Field(ge=2)
    period: Whole = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _is_seldom(self) -> Self:
        if self.period % 2:
            raise ValueError(f"period {self.period} is odd: write an even one")
        return self

    def default_label(self) -> str:
        """Return the label."""
        return f"rack-{self.ranks}-{self.period}"

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return whether racks do not divide the world."""
        found = super().problems(shape)
        if shape.world_size % self.ranks:
            found.append(("ranks", f"racks of {self.ranks} do not divide {shape.world_size} ranks"))
        return found

    def average(self, step: int, shape: Shape) -> Group | None:
        """Return the rack, or the world at the end of each period."""
        return Group(shape.world_size if self.fires(self.period, step) else self.ranks)
