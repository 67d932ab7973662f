"""What every schedule is: settings a user writes, a plan, and a declaration of what the plan computes."""

import abc
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from simdist.plan import Plan
from simdist.plan.ops import Algorithm
from simdist.proof import Result
from simdist.schedules.job import Job
from simdist.settings import Settings
from simdist.units import Whole

__all__ = ["Schedule"]


class Schedule(Settings, abc.ABC):
    """A way to synchronise the ranks.

    A schedule is one file in `simdist.schedules` with one final subclass. It sets `kind`, a `Literal` field with the
    name that scenarios use, adds its parameters as fields, and writes `default_label`, `write` and `result`. Nothing
    else is edited: the scenario loader, the command line and the conformance tests find it.

    Its plan must compute what `result` declares; `simdist.proof` holds it to that.
    """

    examples: ClassVar[tuple[dict[str, object], ...]] = ({},)
    """Parameters that are legal on 8 ranks of 2 nodes: what the conformance tests run."""

    kind: str
    label: str = Field(default="", max_length=100, pattern=r"^[^/\x00-\x1f]*$", validate_default=False)
    """What tables and files call it; derived from the parameters if not given."""
    algorithm: Algorithm = "auto"
    """How collectives are carried out."""
    run_ahead_steps: Whole | None = Field(default=None, ge=0)
    """Under this schedule the host waits for the loss of so many steps ago; absent: as the scenario's `host` says."""

    @abc.abstractmethod
    def default_label(self) -> str:
        """Return a label that tells the parameters."""

    @abc.abstractmethod
    def write(self, job: Job) -> Plan:
        """Write the plan of this schedule for a job whose `run_ahead_steps` are in force."""

    @abc.abstractmethod
    def result(self, step: int, job: Job) -> Result:
        """Declare what `step` leaves behind."""

    def plan(self, job: Job) -> Plan:
        """Return the plan of this schedule for a job."""
        if self.run_ahead_steps is not None:
            job = replace(job, host_waits_for="loss", run_ahead_steps=self.run_ahead_steps)
        return self.write(job)

    def problems(self, world_size: int, ranks_per_node: int) -> list[tuple[str, str]]:
        """Return `(field, what is wrong)` for parameters that do not fit the cluster; none by default."""
        return []

    @property
    def name(self) -> str:
        """The label in force."""
        return self.label or self.default_label()
