"""The import's own proof: synchronous SGD, simulated with the delays as they happened, against the measured step.

The simulated step is reproduced, not predicted: base times, links and delays are from the very steps that it is
compared with. It shows that the parts of a step are put together as they were, and is off by what the model of a step
does not have. It does not show what the traces cannot tell apart, such as a late rank without a trace from slow links,
or links inside nodes from those between them; nor that other steps are like these.
"""

from dataclasses import dataclass

import numpy as np

from simdist.engines import simulate
from simdist.plan.ops import Channel
from simdist.profiles.estimates.base import Parts
from simdist.profiles.job.job import TracedJob
from simdist.profiles.kineto.columns import Floats
from simdist.runs.building import build
from simdist.scenario import Scenario
from simdist.scenario.facts import MOST_ERROR
from simdist.traces.breakdown import break_down


@dataclass(frozen=True, slots=True)
class Proof:
    """A mean step, reproduced and measured.

    Args:
        predicted_s: Simulated with the recorded delays.
        measured_s: Mean over steps and traced ranks.
        calm_s: Simulated with the delays that would be left if stragglers were typical ranks.
        parts: Part of a step -> reproduced and measured seconds: what is computed or held up by the host, what waits
            for communication and other ranks, what waits for input.
        ahead_s: Part of the simulated step for which its first batch is loaded that had been loading before the traced
            steps; it is less, the more steps are traced.
        is_silent: Whether the traced job exchanges no gradients: then the simulated step is of another schedule.
    """

    predicted_s: float
    measured_s: float
    calm_s: float
    parts: dict[str, tuple[float, float]]
    ahead_s: float
    is_silent: bool

    @property
    def error(self) -> float:
        """(reproduced - measured) / measured step."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else 0.0

    @property
    def error_text(self) -> str:
        """The error in per cent, such as `+1.2%`; none is `+0.0%`, on whichever side of it."""
        return f"{round(self.error, 3) + 0.0:+.1%}"

    @property
    def straggling_share(self) -> float:
        """Share of the reproduced step that is lost to stragglers."""
        return max(0.0, 1 - self.calm_s / self.predicted_s) if self.predicted_s else 0.0

    @property
    def misses(self) -> str | None:
        """Say which part of the step is missed most, if the prediction is far off."""
        if abs(self.error) <= MOST_ERROR:
            return None
        if self.is_silent:
            return "its backward passes exchange no gradients, and those of sync do"
        name, (predicted_s, measured_s) = max(self.parts.items(), key=lambda item: abs(item[1][0] - item[1][1]))
        return f"mostly {name}: reproduced {1e3 * predicted_s:.3g} ms, measured {1e3 * measured_s:.3g} ms"


def prove_step(
    scenario: Scenario,
    delays: dict[Channel, Floats],
    of: Parts,
    job: TracedJob,
    *,
    calm: tuple[Scenario, dict[Channel, Floats]],
    ahead_s: float = 0.0,
) -> Proof:
    """Simulate synchronous SGD with the delays as they happened, and without stragglers.

    Args:
        scenario: Its first schedule is synchronous SGD.
        delays: As recorded, `[n_steps, world_size]`.
        of: Name of the measured quantity.
        job: The traced job.
        calm: Scenario and delays without stragglers; the channels are the same or fewer.
        ahead_s: For how long the first batch had been loading when the traced steps began; simulated runs begin with
            loading it, so this is part of the error.
    """
    built = build(scenario, scenario.schedules[0])
    trace = simulate(built.plan, built.costs, {channel: seconds[None] for channel, seconds in delays.items()})
    calm_built = build(calm[0], calm[0].schedules[0])
    calm_delays = {key: calm[1].get(key, np.zeros_like(seconds))[None] for key, seconds in delays.items()}
    quiet = simulate(calm_built.plan, calm_built.costs, calm_delays)
    states = break_down(trace)
    predicted = {state: float(states.per_step_s(state)[0]) for state in ("compute", "comm", "wait", "io", "host")}
    computing_s, waiting_s, input_s = (float(each.mean()) for each in (of.compute_s + of.host_s, of.wait_s, of.input_s))
    loads = scenario.input.source == "storage"
    return Proof(
        predicted_s=trace.makespan_s / scenario.steps,
        measured_s=float(of.step_s.mean()),
        calm_s=quiet.makespan_s / scenario.steps,
        parts={
            "computing": (predicted["compute"] + predicted["host"], computing_s + (0.0 if loads else input_s)),
            "waiting for communication and other ranks": (predicted["comm"] + predicted["wait"], waiting_s),
            "waiting for input": (predicted["io"], input_s if loads else 0.0),
        },
        ahead_s=ahead_s / scenario.steps,
        is_silent=job.world_size > 1 and not any(step.gradient_calls for each in job.profiles for step in each.steps),
    )
