"""What is known of the real job that a scenario was imported from."""

from typing import Annotated, Literal

from pydantic import Field

from simdist.settings.base import Settings
from simdist.settings.units import Seconds, format_error, format_seconds

MOST_ERROR = 0.10  # of a traced step; beyond, the simulation is of another job
_PARTS_IN_WORDS = {
    "compute": "computing",
    "copy": "copying only",
    "input": "waiting for input",
    "queued": "idle, kernels queued",
    "short_gap": "gaps of 0.5 ms or less",
    "long_gap": "longer gaps",
    "host_pause": "host pauses",
}


def part_in_words(part: str) -> str:
    """Return what people call a part of a traced step.

    >>> part_in_words("short_gap"), part_in_words("all_to_all")
    ('gaps of 0.5 ms or less', 'all_to_all, exposed')
    """
    return _PARTS_IN_WORDS.get(part, f"{part}, exposed")


class Imported(Settings):
    """Facts of the real job that a scenario was imported from: how well it is reproduced, and where its steps went.

    Args:
        step_s: A traced step, mean over steps and ranks.
        error: Share of it by which the step that the scenario reproduces is longer; negative: shorter.
        beside_s: Time of a step in which operators run on CPUs beside collectives.
        profiler_s: Time of a step that the profiler took of the host, at most.
        left_out: What the job does that the scenario does not model, if that is too much of a step to compare
            schedules; empty otherwise.
        unsure: Why its traces do not tell what another schedule would gain; empty otherwise.
        verdict: What the job is bound by, a sentence.
        parts: Part of a traced step -> seconds; they add up to it.
        straggling_share: Share of a step that is lost to the stragglers that the import names.
        late_on: On what these are late, by the traces; empty if there are none. Delays may be played elsewhere.
    """

    step_s: Seconds
    error: Annotated[float, Field(allow_inf_nan=False)]
    beside_s: Seconds = 0.0
    profiler_s: Seconds = 0.0
    left_out: str = ""
    unsure: str = ""
    verdict: str = ""
    parts: dict[str, Seconds] = Field(default_factory=dict)
    straggling_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    late_on: Literal["", "host", "compute", "io"] = ""

    @property
    def without_stragglers_s(self) -> float:
        """A traced step without the stragglers that the import names."""
        return (1 - self.straggling_share) * self.step_s

    @property
    def uncertainty(self) -> float:
        """Share of a step by which the simulated one may be wrong.

        It is the error, what the profiler took, and that of cores which the traced job may have shared: beside a
        collective, an operator of a CPU then takes up to twice as long, and schedules that exchange more seldom are
        faster than simulated.
        """
        return self._unexplained + (self.profiler_s / self.step_s if self.step_s else 0.0)

    @property
    def _unexplained(self) -> float:
        return abs(self.error) + (self.beside_s / self.step_s / 2 if self.step_s else 0.0)

    @property
    def problem(self) -> str | None:
        """Say why no schedule may be recommended, if so."""
        if self.left_out:
            return f"the scenario leaves out a part of the job: {self.left_out}"
        if self.unsure:
            return self.unsure
        if abs(self.error) > MOST_ERROR:
            return f"the scenario reproduces the traced steps {format_error(self.error)} off"
        if self._unexplained > MOST_ERROR:
            return (
                f"the scenario reproduces the traced steps {format_error(self.error)} off, and operators run on CPUs "
                f"beside collectives for {format_seconds(self.beside_s)} of a step of {format_seconds(self.step_s)}; "
                f"on shared cores they take up to twice as long as without"
            )
        return None
