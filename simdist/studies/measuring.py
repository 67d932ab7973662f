"""One schedule, simulated for many seeds: seconds per step and where they go, without traces."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.engines.choose import Engine
from simdist.engines.observers import Observer, StepSeconds, WhereTimeWent
from simdist.engines.run import Live, run
from simdist.errors import ScenarioError
from simdist.plan.delays import Draw, SeedDelays, no_delays
from simdist.runs.building import Built, delay_sampler, traffic
from simdist.scenario.sampling import run_seeds
from simdist.scenario.scenario import Scenario
from simdist.studies.facets import FACETS, Facet, FacetValues, Line, Simulated, ValueT
from simdist.studies.statistics import TIMES_OF_DRAWS
from simdist.traces.breakdown import STATES, Breakdown, break_down

if TYPE_CHECKING:
    from simdist.engines.alike import KindsRun
    from simdist.engines.des import EventRun
    from simdist.engines.vector import VectorRun
    from simdist.studies.epochs import Epochs

#: Called with a schedule's label, rank-steps done and rank-steps in all.
Progress = Callable[[str, int, int], None]

#: Runs so far: the scenario and the label of a schedule -> its results.
RunsSoFar: TypeAlias = dict[tuple[Scenario, str], Simulated]


@dataclass(frozen=True)
class ScheduleTimes:
    """One schedule, simulated for many seeds.

    Args:
        label: The schedule's label.
        engine: `fast` or `des`.
        step_s: Seconds per step of each seed, `[n_seeds]`.
        states_s: Seconds per step in each state, averaged over ranks, by seed: state -> `[n_seeds]`.
        facets: Optional topics, such as epochs.
        uncorrected: The times as simulated, where they are corrected by `simdist.studies.known_delays`; else None.
        unseen_s: Half the width that the interval of `step_s` has at least, because rare delays may not have been met.
        drawn: If something is uncertain, and that was measured, of each draw, `[n_draws]`: `step`, its seconds per
            step; `stated`, those of the same seed as stated; and by path its place in the range of a quantity, 0 to 1.
    """

    label: str
    engine: str
    step_s: NDArray[np.float64]
    states_s: dict[str, NDArray[np.float64]]
    drawn: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    facets: FacetValues = field(default_factory=FacetValues)
    scenario: Scenario | None = field(default=None, repr=False)
    uncorrected: "ScheduleTimes | None" = field(default=None, repr=False)
    unseen_s: float = 0.0

    def of(self, facet: Facet[ValueT]) -> ValueT:
        """Return the value of a facet."""
        return self.facets.of(facet)

    def line(self, facet: Facet[ValueT]) -> Line[ValueT]:
        """Return what a facet says."""
        return Line(self.label, float(self.step_s.mean()), self.of(facet))

    @property
    def as_simulated(self) -> "ScheduleTimes":
        """The times of each seed, not corrected."""
        return self.uncorrected or self

    def divided(self, n_parts: int) -> "ScheduleTimes":
        """Return seconds per part of a step, such as a micro-batch, in place of those per step."""
        states_s = {state: seconds / n_parts for state, seconds in self.states_s.items()}
        drawn = {name: values / (n_parts if name in TIMES_OF_DRAWS else 1) for name, values in self.drawn.items()}
        step_s = self.step_s / n_parts
        facets = self.facets.divided(n_parts)
        uncorrected = self.uncorrected and self.uncorrected.divided(n_parts)
        unseen_s = self.unseen_s / n_parts
        return replace(
            self,
            step_s=step_s,
            states_s=states_s,
            drawn=drawn,
            facets=facets,
            uncorrected=uncorrected,
            unseen_s=unseen_s,
        )


def measure(
    scenario: Scenario,
    built: Built,
    *,
    n_seeds: int,
    engine: Engine = "auto",
    progress: Progress | None = None,
    draw: Draw | None = None,
    facets: Sequence[Facet[Any]] = FACETS,
    so_far: RunsSoFar | None = None,
) -> ScheduleTimes:
    """Simulate one schedule for many seeds, keeping no traces.

    Args:
        scenario: The schedule's.
        built: The schedule.
        n_seeds: Number of seeds, see `simdist.scenario.sampling.run_seeds`.
        engine: `auto` takes the fast engine wherever it is exact.
        progress: See `Progress`.
        draw: Gives the delays of seeds, as `shared_delays` does for several schedules; by default they are drawn here.
        facets: See `compare`; those that take further simulations say nothing.
        so_far: Fewer runs of the same, which are not simulated again. Takes all runs.

    Raises:
        ScenarioError: There are no seeds.
        UnsupportedError: `fast` was asked for and cannot compute this exactly.
    """
    if n_seeds < 1:
        raise ScenarioError(f"{n_seeds} seeds; must be at least 1")
    before = so_far.get((scenario, built.schedule.name)) if so_far else None
    n_before = len(before.step_s) if before else 0
    seeds = run_seeds(scenario.seed, n_seeds - n_before, first=n_before)
    delays = SeedDelays(seeds, draw or partial(delay_sampler, scenario), is_random=scenario.is_random)
    observe = _Measured(scenario, built, facets, before)
    found = _observed(scenario, built, delays, observe, engine, progress)
    if so_far is not None:
        so_far[scenario, built.schedule.name] = observe.simulated
    return found


def measure_delays(
    scenario: Scenario,
    built: Built,
    delays: SeedDelays,
    *,
    engine: Engine = "auto",
    progress: Progress | None = None,
    facets: Sequence[Facet[Any]] = (),
) -> ScheduleTimes:
    """Simulate one schedule under given delays, as `measure` does."""
    return _observed(scenario, built, delays, _Measured(scenario, built, facets), engine, progress)


def _observed(
    scenario: Scenario,
    built: Built,
    delays: SeedDelays,
    observe: "_Measured",
    engine: Engine,
    progress: Progress | None,
) -> ScheduleTimes:
    live = Live(built.actors, traffic=partial(traffic, scenario, built.costs))
    report = _reporter(progress, built) if progress else None
    return run(built.plan, built.costs, delays, observe=observe, engine=engine, live=live, progress=report)


def step_times_s(scenario: Scenario, built: Built, *, n_seeds: int) -> NDArray[np.float64]:
    """Return the seconds per step of one schedule for many seeds, `[n_seeds]`. This is less work than `measure`."""
    seeds = run_seeds(scenario.seed, n_seeds)
    delays = SeedDelays.of(delay_sampler(scenario, seeds).take(scenario.steps), seeds)
    live = Live(built.actors, traffic=partial(traffic, scenario, built.costs))
    return run(built.plan, built.costs, delays, observe=StepSeconds(), live=live, courses=built.courses)


def calm_step_s(built: Built) -> float:
    """Return the seconds per step of a schedule if nothing delays a rank.

    Raises:
        UnsupportedError: Ranks of each kind cannot be simulated once.
    """
    none = no_delays(built.plan)
    found = run(built.plan, built.costs, none, observe=StepSeconds(), engine="alike", courses=built.courses)
    return float(found[0])


def times_of(label: str, engine: str, simulated: Simulated, facets: Sequence[Facet[Any]] = FACETS) -> ScheduleTimes:
    """Return the times of a schedule that was simulated, or measured on machines.

    Args:
        label: The schedule's label.
        engine: `fast` or `des`, or the source of a trace.
        simulated: What it did.
        facets: Optional topics.
    """
    states_s = {state: np.concatenate([part.per_step_s(state) for part in simulated.parts]) for state in STATES}
    values = FacetValues.measured(simulated, facets)
    return ScheduleTimes(label, engine, simulated.step_s, states_s, facets=values)


class _Measured(Observer[ScheduleTimes]):
    """Keeps where the time of a schedule goes, and its epochs if it has a data set."""

    def __init__(
        self, scenario: Scenario, built: Built, facets: Sequence[Facet[Any]], before: Simulated | None = None
    ) -> None:
        """Observe runs of a schedule, which follow others that were simulated `before`."""
        self._scenario = scenario
        self._built = built
        self._facets = facets
        self.simulated = before or Simulated(built.plan, ())
        self.needs_traces = built.plan.dataset is not None
        if built.costs.shares:
            from simdist.studies.held import steady_held

            self.held = steady_held(built.plan, built.costs)

    def by_vectors(self, run: "VectorRun") -> ScheduleTimes:
        return self._times(run.name, WhereTimeWent(self.held).by_vectors(run))

    def by_kinds(self, run: "KindsRun") -> ScheduleTimes:
        return self._times(run.name, WhereTimeWent().by_kinds(run))

    def by_events(self, run: "EventRun") -> ScheduleTimes:
        from simdist.studies.epochs import find_epochs
        from simdist.studies.held import find_held
        from simdist.traces.reads import expected

        reads = expected(run.plan) if run.plan.dataset else None
        parts = []
        epochs = []
        for trace in run.traces():
            parts.append(break_down(trace, find_held(trace, run.costs) if trace.links else None))
            epochs += [find_epochs(trace, reads)] if reads else []
        return self._times(run.name, tuple(parts) * run.n_repeats, tuple(epochs) * run.n_repeats)

    def _times(self, engine: str, parts: Sequence[Breakdown], epochs: "Sequence[Epochs]" = ()) -> ScheduleTimes:
        before = self.simulated
        self.simulated = Simulated(self._built.plan, (*before.parts, *parts), (*before.epochs, *epochs))
        return times_of(self._built.schedule.name, engine, self.simulated, self._facets)


def _reporter(progress: Progress, built: Built) -> Callable[[int, int], None]:
    """Turn steps of seeds into steps of all ranks."""
    label = built.schedule.name
    world_size = built.plan.world_size
    return lambda done, total: progress(label, world_size * done, world_size * total)
