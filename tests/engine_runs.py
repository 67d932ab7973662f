"""Short forms of a run for tests, by a single engine or by the one that `auto` takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simdist.cost import Costs
from simdist.cost.traffic import Traffic
from simdist.engines.choose import AnyEngine
from simdist.engines.observers import FirstRank, StepSeconds, WhereTimeWent, WholeTrace
from simdist.engines.run import Live, run
from simdist.plan import Plan
from simdist.plan.delays import Delays, DelaySource, SeedDelays
from simdist.plan.walk import Template
from simdist.traces.breakdown import Breakdown, side_by_side
from simdist.traces.trace import Trace


class AllTimes:
    """Keeps ready, start and end of every instance of the only variant."""

    only_ends = False

    def __init__(self, plan: Plan) -> None:
        self.times_s = np.empty((3, plan.n_instances, plan.world_size))

    def add(self, index: int, template: Template, *times_s: np.ndarray) -> None:
        for number, each_s in enumerate(times_s):
            self.times_s[number, index] = each_s[:, 0]


@dataclass(frozen=True)
class EngineRun:
    """Runs by an engine."""

    name: AnyEngine

    def simulate(
        self,
        plan: Plan,
        costs: Costs,
        delays: Delays | DelaySource,
        *,
        engine: AnyEngine | None = None,
        traffic: Traffic | None = None,
        actors: Sequence[Any] = (),
        observers: Sequence[Any] = (),
        progress: Any = None,
        courses: Any = None,
    ) -> Trace:
        live = Live(actors, observers, lambda _: traffic)
        report = (lambda step, _: progress(step)) if progress else None
        return run(
            plan,
            costs,
            delays if isinstance(delays, Mapping) else of_seeds(plan, delays, 1),
            observe=WholeTrace(),
            engine=engine or self.name,
            live=live,
            progress=report,
            courses=courses,
        )

    def measure(
        self, plan: Plan, costs: Costs, delays: Delays | DelaySource, *, n_seeds: int, held: Any = None
    ) -> Breakdown:
        seeds = of_seeds(plan, delays, n_seeds)
        parts = run(plan, costs, seeds, observe=WhereTimeWent(held), engine=self.name)
        return parts[0] if len(parts) == 1 else side_by_side(parts)

    def step_s(
        self,
        plan: Plan,
        costs: Costs | Sequence[Costs],
        delays: Delays | DelaySource,
        *,
        n_seeds: int | None = None,
        courses: Any = None,
    ) -> NDArray[np.float64]:
        n = n_seeds or (1 if isinstance(costs, Costs) else len(costs))
        return run(plan, costs, of_seeds(plan, delays, n), observe=StepSeconds(), engine=self.name, courses=courses)

    def times_of_first_rank(
        self, plan: Plan, costs: Costs, delays: Delays | DelaySource, *, courses: Any = None
    ) -> tuple[Any, Any]:
        return run(plan, costs, of_seeds(plan, delays, 1), observe=FirstRank(), engine=self.name, courses=courses)


def of_seeds(plan: Plan, delays: Delays | DelaySource, n_seeds: int) -> SeedDelays:
    """Return delays of seeds that were drawn in advance, or are drawn now."""
    drawn = delays if isinstance(delays, Mapping) else delays.take(plan.n_steps)
    return SeedDelays(range(n_seeds), SeedDelays.of(drawn).draw)


des, fast, alike = EngineRun("des"), EngineRun("fast"), EngineRun("alike")
simulate = EngineRun("auto").simulate
