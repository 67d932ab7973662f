"""Local SGD: every rank trains on its own. Periodically all ranks average their parameters."""

import math
from typing import ClassVar, Literal, final

from pydantic import Field, field_validator

from simdist.errors import PlanError
from simdist.plan import Group
from simdist.schedules.averaging import AVERAGING_TRAITS, AveragingSchedule
from simdist.schedules.job import Job, Shape
from simdist.schedules.labels import REQUIRED, LabelForm, Piece, piece, written
from simdist.schedules.tuning import OVERLAP, UNEVEN, Allowance, Axis, ChangedSettings, Levels, Permit
from simdist.settings.base import shown, unchecked_copy
from simdist.settings.units import Whole, parse_whole

_UNEVEN = Piece(
    "inner_steps",
    "-by-speed",
    lambda steps: "" if steps is None else "-by-speed" if steps == "by_speed" else "-uneven",
    lambda _: "by_speed",
)
_ROUNDING = 1e-9  # of a step: relative speeds such as 1/3 are rounded


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
        {"period": 2, "overlap_steps": 2},
        {"period": 4, "warmup_steps": 1, "inner_steps": {1: 2, 6: 3}},
    )

    family: ClassVar[str] = "averaging"
    place: ClassVar[int] = 30
    permits: ClassVar[tuple[Permit, ...]] = (OVERLAP, UNEVEN)
    takes_levels: ClassVar[bool] = True

    label_form: ClassVar[LabelForm] = (
        "local",
        (piece("period", before="-", default=REQUIRED), _UNEVEN, *AVERAGING_TRAITS),
    )
    kind: Literal["local_sgd"] = "local_sgd"
    period: Whole = Field(ge=1)
    """Steps from one average to the next."""
    inner_steps: Literal["by_speed"] | dict[Whole, Whole] | None = None
    """Rank -> number of these steps that it does, the last ones. A rank that is not named does all. `by_speed`: the
    number that its device can do while the fastest does all, at least 1. Averages remain plain means over all ranks."""

    @field_validator("inner_steps", mode="before")
    @classmethod
    def _of_ranks(cls, value: object) -> object:
        if isinstance(value, dict):
            return {parse_whole(rank): parse_whole(steps) for rank, steps in value.items()}
        if value not in (None, "by_speed"):
            raise ValueError(f"{shown(value)}: write by_speed, or steps by rank, e.g. {{3: 2}}")
        return value

    @classmethod
    def axes(cls, job: Job, allowed: Allowance) -> tuple[Axis, ...]:
        """Return also fewer steps for slow devices. This excludes overlapped averages."""
        found = super().axes(job, allowed)
        has_slow_devices = len(set(job.speeds)) > 1
        if not has_slow_devices or allowed.permits(OVERLAP):
            return found
        return (*found, cls.axis("inner_steps", (None, "by_speed"), UNEVEN))

    @classmethod
    def settings_of(cls, levels: Levels, changed: ChangedSettings) -> dict[str, object] | None:
        """Return the settings that average over all ranks, which are one level."""
        return {"period": levels[0][0]} | dict(changed) if len(levels) == 1 else None

    def default_label(self) -> str:
        """Return the label, such as `local-4` or `local-4-by-speed`."""
        steps = self.inner_steps.values() if isinstance(self.inner_steps, dict) else ()
        if self.inner_steps == "by_speed" or any(each < self.period for each in steps):
            return written(self, self.label_form)
        return written(unchecked_copy(self, inner_steps=None), self.label_form)

    def problems(self, shape: Shape) -> list[tuple[str, str]]:
        """Return ranks that do not exist, and ranks with an impossible number of steps."""
        found = super().problems(shape)
        for rank, steps in self.inner_steps.items() if isinstance(self.inner_steps, dict) else ():
            if not 0 <= rank < shape.world_size:
                found.append(("inner_steps", f"rank {rank}; ranks are numbered 0 to {shape.world_size - 1}"))
            if not 1 <= steps <= self.period:
                found.append(("inner_steps", f"{steps} steps of rank {rank}; write 1 to {self.period}, the period"))
        of_all = [*self.inner_steps.values()] if isinstance(self.inner_steps, dict) else []
        if len(of_all) >= shape.world_size and (most := max(of_all)) < self.period:
            problem = f"no rank does all {self.period} steps: leave one out, or write period: {most}"
            found.append(("inner_steps", problem))
        if self.inner_steps is not None and self.overlap_steps:
            found.append(
                ("inner_steps", "ranks that sit steps out cannot overlap averages with them: leave out overlap_steps")
            )
        return found

    def unused_in(self, job: Job) -> list[str]:
        """Return a sentence if all ranks do all steps."""
        if self.inner_steps is None or min(self._inner_steps(job).values(), default=self.period) < self.period:
            return []
        return [f"has inner_steps without effect: every rank does all {self.period} of a period"]

    def shortest_period(self) -> int:
        """Return the period."""
        return self.period

    def average(self, step: int, shape: Shape) -> Group | None:
        """Return the world at the end of each period."""
        return Group(shape.world_size) if self.fires(self.period, step) else None

    def absent(self, step: int, job: Job) -> tuple[int, ...]:
        """Return the ranks that have fewer steps to do than are left of the period.

        Raises:
            PlanError: The steps depend on the speeds of devices, which are not known.
        """
        if self.inner_steps is None or step < self.warmup_steps:
            return ()
        end = self.warmup_steps - 1 if self.phase is None else self.phase
        n_left = self.period - (step - end - 1) % self.period
        return tuple(rank for rank, steps in self._inner_steps(job).items() if steps < n_left)

    def _inner_steps(self, job: Job) -> dict[int, int]:
        if isinstance(self.inner_steps, dict):
            return dict(sorted(self.inner_steps.items()))
        if not job.speeds:
            raise PlanError(
                f"plan {self.name}: inner_steps: it is not known here how fast the devices are: build the plan from a "
                f"scenario (simdist plan SCENARIO), or write inner_steps: {{rank: steps}}"
            )
        fastest = max(job.speeds)
        steps = (math.floor(self.period * speed / fastest + _ROUNDING) for speed in job.speeds)
        return {rank: max(1, n_steps) for rank, n_steps in enumerate(steps)}

    def cycle(self, job: Job) -> range:
        """Return the first period after the warm-up."""
        return self._repeated(self.period, job)
