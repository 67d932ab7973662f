"""The import's self-check: synchronous SGD, simulated with the recorded delays, against the measured step.

The simulated step is a reproduction, not a prediction: base times, links and delays come from the same steps that it is
compared with. It shows that the parts of a step are combined correctly. Its error is the effect of whatever the step
model leaves out. It does not show whether the estimates separated the right causes: slow links look like an untraced
late rank, and links inside nodes look like links between them. It also does not show that other steps resemble these.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simdist.engines.observers import WholeTrace
from simdist.engines.run import run
from simdist.plan.delays import Delays, of_micro_batches
from simdist.plan.ops import Channel
from simdist.profiles.estimates.base import Parts
from simdist.profiles.job.job import TracedJob
from simdist.profiles.kineto.columns import Floats
from simdist.runs.building import build
from simdist.scenario import Scenario
from simdist.scenario.facts import MOST_ERROR, Lost
from simdist.stragglers.slowdown import typical_step_s
from simdist.traces.breakdown import break_down


@dataclass(frozen=True, slots=True)
class Proof:
    """A mean step, reproduced and measured.

    Args:
        predicted_s: Simulated with the recorded delays.
        measured_s: Mean over steps and traced ranks.
        without_s: Simulated with fewer and fewer delays: first without stragglers, then also without those of all
            ranks at once, then also with even work.
        typical_s: Simulated with every operation as on a typical rank in a typical step.
        parts: Part of a step -> reproduced and measured seconds. The parts are computing and host delays, waiting for
            communication and other ranks, and waiting for input.
        ahead_s: Part of the simulated step that loads the first batch, which the job had begun to load before the
            traced steps. More traced steps make it smaller.
        is_silent: The traced job exchanges no gradients. The simulated step then belongs to another schedule.
    """

    predicted_s: float
    measured_s: float
    without_s: tuple[float, float, float]
    typical_s: float
    parts: dict[str, tuple[float, float]]
    ahead_s: float
    is_silent: bool

    @property
    def error(self) -> float:
        """(reproduced - measured) / measured step."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else 0.0

    @property
    def error_text(self) -> str:
        """The error in per cent, such as `+1.2%`; an error that rounds to zero is `+0.0%`, whatever its sign."""
        return f"{round(self.error, 3) + 0.0:+.1%}"

    @property
    def lost(self) -> Lost:
        """What delays cost, as shares of the reproduced step."""
        return Lost.of(self.predicted_s, [*self.without_s, self.typical_s])

    @property
    def misses(self) -> str | None:
        """Name the part of the step with the largest error, if the prediction is far off."""
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
    calm: Scenario,
    without: Sequence[dict[Channel, Floats]],
    ahead_s: float = 0.0,
) -> Proof:
    """Simulate synchronous SGD with the recorded delays, and without stragglers.

    Args:
        scenario: Its first schedule is synchronous SGD.
        delays: The recorded delays, `[n_steps, world_size]` or `[n_steps, n_micro_batches, world_size]`.
        of: Name of the measured quantity.
        job: The traced job.
        calm: The scenario without slow devices.
        without: Delays for it: without stragglers, also without those of all ranks at once, also with even work.
        ahead_s: How long the job had been loading the first batch when the traced steps began. Simulated runs start by
            loading it, so this time is part of the error.
    """
    built = build(scenario, scenario.schedules[0])
    trace = run(built.plan, built.costs, _of_run(delays, scenario), observe=WholeTrace())
    calm_built = build(calm, calm.schedules[0])
    less_s = []
    for fewer in without:
        of_channels = {key: fewer.get(key, np.zeros_like(seconds)) for key, seconds in delays.items()}
        calm_run = run(calm_built.plan, calm_built.costs, _of_run(of_channels, calm), observe=WholeTrace())
        less_s.append(calm_run.makespan_s / scenario.steps)
    states = break_down(trace)
    predicted = {state: float(states.per_step_s(state)[0]) for state in ("compute", "comm", "wait", "io", "host")}
    computing_s, waiting_s, input_s = (float(each.mean()) for each in (of.compute_s + of.host_s, of.wait_s, of.input_s))
    loads = scenario.input.source == "storage"
    return Proof(
        predicted_s=trace.makespan_s / scenario.steps,
        measured_s=float(of.step_s.mean()),
        without_s=(less_s[0], less_s[1], less_s[2]),
        typical_s=typical_step_s(trace),
        parts={
            "computing": (predicted["compute"] + predicted["host"], computing_s + (0.0 if loads else input_s)),
            "waiting for communication and other ranks": (predicted["comm"] + predicted["wait"], waiting_s),
            "waiting for input": (predicted["io"], input_s if loads else 0.0),
        },
        ahead_s=ahead_s / scenario.steps,
        is_silent=job.world_size > 1 and not any(step.gradient_calls for each in job.profiles for step in each.steps),
    )


def _of_run(delays: dict[Channel, Floats], scenario: Scenario) -> Delays:
    """Return recorded delays, as a recording of them delays a run."""
    n = scenario.workload.micro_batches
    return {
        channel: seconds[None] if seconds.ndim == 3 else of_micro_batches(channel, seconds[None], n)
        for channel, seconds in delays.items()
    }
