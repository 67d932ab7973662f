"""What is known of the real job that a scenario was imported from."""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Annotated, Literal

from pydantic import Field

from simdist.settings.base import Settings
from simdist.settings.units import Seconds, format_error, format_seconds, format_share

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


_Share = Annotated[float, Field(ge=0, le=1)]
_TOLD = 0.002  # of a step; smaller losses are not worth a word


class Lost(Settings):
    """Shares of a traced step that are lost, by cause. All were measured against typical ranks and steps.

    Args:
        stragglers: The delays of single ranks and nodes that the import names.
        common: Delays of all ranks at once.
        uneven: Uneven work: ranks wait for the one that has most.
        noise: Ranks wait for one another, late in turns, by no more than the noise of all explains.
    """

    stragglers: _Share = 0.0
    common: _Share = 0.0
    uneven: _Share = 0.0
    noise: _Share = 0.0

    @classmethod
    def of(cls, step_s: float, without_s: Sequence[float]) -> "Lost":
        """Return the shares of a step.

        Args:
            step_s: A step.
            without_s: The step without stragglers; also without delays of all ranks; also with even work; with typical
                ranks and steps only.
        """
        if not step_s:
            return cls()
        left_s = list(accumulate([step_s, *without_s], min))
        shares = [max(0.0, round((more_s - less_s) / step_s, 9)) for more_s, less_s in pairwise(left_s)]
        return cls(**dict(zip(("stragglers", "common", "uneven", "noise"), shares, strict=True)))

    @property
    def named(self) -> float:
        """Share that is lost to what the import names: all but noise."""
        return self.stragglers + self.common + self.uneven

    @property
    def total(self) -> float:
        """Share of a step that typical ranks and steps would save."""
        return self.named + self.noise

    @property
    def causes(self) -> str:
        """The causes in words, with their shares; empty if hardly anything is lost."""
        words = self.named_causes | {"noise of all ranks, which wait for one another": self.noise}
        return ", ".join(f"{format_share(share)} to {what}" for what, share in words.items() if share >= _TOLD)

    @property
    def named_causes(self) -> dict[str, float]:
        """The causes that the import names, without negligible ones -> their shares."""
        words = {
            "stragglers": self.stragglers,
            "delays of all ranks at once": self.common,
            "uneven work": self.uneven,
        }
        return {what: share for what, share in words.items() if share >= _TOLD}


class Imported(Settings):
    """Facts of the real job that a scenario was imported from: how well it is reproduced, and where its steps went.

    Args:
        steps: Numbers of the traced steps, as the profiler counts them, such as `3-22, 25`.
        step_s: A traced step, mean over steps and ranks.
        error: Share of it by which the step that the scenario reproduces is longer; negative: shorter.
        beside_s: Time of a step in which operators run on CPUs beside collectives.
        in_turn_s: Time of a step that ranks wait because they are late in turn within it. It counts with the exchanges.
        profiler_s: Time of a step that the profiler took of the host, at most.
        left_out: What the job does that the scenario does not model, if too much of a step; else empty.
        unsure: Why its traces do not tell what another schedule would gain; empty otherwise.
        verdict: What the job is bound by, a sentence.
        parts: Part of a traced step -> seconds; they add up to it.
        lost: Shares of a step that are lost.
        late_on: On what stragglers are late, by the traces; empty if there are none. Delays may be played elsewhere.
    """

    steps: Annotated[str, Field(pattern=r"^(\d+(-\d+)?(, \d+(-\d+)?)*)?$")] = ""
    step_s: Seconds
    error: Annotated[float, Field(allow_inf_nan=False)]
    beside_s: Seconds = 0.0
    in_turn_s: Seconds = 0.0
    profiler_s: Seconds = 0.0
    left_out: str = ""
    unsure: str = ""
    verdict: str = ""
    parts: dict[str, Seconds] = Field(default_factory=dict)
    lost: Lost = Lost()
    late_on: Literal["", "host", "compute", "io"] = ""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the traced steps, in ascending order; empty if they are not known."""
        ends = (run.partition("-") for run in self.steps.split(", ") if run)
        return tuple(chain.from_iterable(range(int(first), int(last or first) + 1) for first, _, last in ends))

    @property
    def without_named_s(self) -> float:
        """A traced step without the delays that the import names."""
        return (1 - self.lost.named) * self.step_s

    @property
    def uncertainty(self) -> float:
        """Share of a step by which the simulated one may be wrong.

        It is the error, what the profiler took, and that of cores which the traced job may have shared: beside a
        collective, an operator of a CPU then takes up to twice as long, ranks are late in turn, and schedules that
        exchange more seldom are faster than simulated.
        """
        more_s = self.profiler_s + self.in_turn_s
        return self._unexplained + (more_s / self.step_s if self.step_s else 0.0)

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
