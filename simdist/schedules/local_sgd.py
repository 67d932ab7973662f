"""Local SGD: every rank trains on its own; now and then all average their parameters."""

from typing import ClassVar, Literal, final

from pydantic import Field

from simdist.plan import Group, Plan
from simdist.proof import Result
from simdist.schedules.averaging import averaging_plan, averaging_result
from simdist.schedules.base import Schedule
from simdist.schedules.every import Every
from simdist.schedules.job import Job

__all__ = ["LocalSGD"]


@final
class LocalSGD(Schedule):
    """Average the parameters over all ranks at the end of every `period` steps, after a synchronous warm-up.

    Source:
        Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; torch `PeriodicModelAverager`.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = (
        {"period": 1},
        {"period": 2},
        {"period": 4, "warmup_steps": 3},
        {"period": 3, "phase": 0, "synchronize": False},
    )

    kind: Literal["local_sgd"] = "local_sgd"
    period: int = Field(ge=1)
    """Steps from one average to the next."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps that run synchronous SGD instead."""
    phase: int | None = Field(default=None, ge=0)
    """Average where the step is `phase` modulo `period`, instead of at the end of each period."""
    synchronize: bool = True
    """The host waits for its device before each average, as PyTorch's averagers do."""

    def default_label(self) -> str:
        """Return the label, such as `local-4`."""
        return f"local-{self.period}"

    def plan(self, job: Job) -> Plan:
        """Write the plan."""
        return averaging_plan(
            self.name,
            job,
            self._average,
            own_gradients=None,
            warmup_steps=self.warmup_steps,
            synchronize=self.synchronize,
        )

    def result(self, step: int, job: Job) -> Result:
        """Declare averages over the world at the end of each period."""
        return averaging_result(step, job, self._average, own_gradients=None, warmup_steps=self.warmup_steps)

    def _average(self, step: int, job: Job) -> Group | None:
        fires = Every(self.period, start=self.warmup_steps, phase=self.phase).fires(step)
        return Group(job.world_size) if fires else None
