"""Local SGD: every rank trains on its own; now and then all average their parameters."""

from typing import ClassVar, Literal, final

from pydantic import Field

from simdist.plan import Group
from simdist.schedules.averaging import AveragingSchedule
from simdist.schedules.job import Job
from simdist.settings.units import Whole


@final
class LocalSGD(AveragingSchedule):
    """Average the parameters over all ranks at the end of every `period` steps, after a synchronous warm-up.

    Source:
        Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; torch `PeriodicModelAverager`.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {"period": 1},
        {"period": 2},
        {"period": 4, "warmup_steps": 3},
        {"period": 3, "phase": 0, "synchronize": False},
        {"period": 4, "overlap_steps": 2},
    )

    kind: Literal["local_sgd"] = "local_sgd"
    period: Whole = Field(ge=1)
    """Steps from one average to the next."""

    def default_label(self) -> str:
        """Return the label, such as `local-4`."""
        return f"local-{self.period}{self._traits}"

    def shortest_period(self) -> int:
        """Return the period."""
        return self.period

    def average(self, step: int, job: Job) -> Group | None:
        """Return the world at the end of each period."""
        return Group(job.world_size) if self.fires(self.period, step) else None

    def cycle(self, job: Job) -> range:
        """Return the first period after the warm-up."""
        return self._repeated(self.period, job)
