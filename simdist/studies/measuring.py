"""One schedule, simulated for many seeds: seconds per step and where they go, without traces."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simdist.engines import Delays, DelaySource, DrawnDelays, Engine, choose_engine, fast, first_exact
from simdist.errors import ScenarioError, UnsupportedError
from simdist.plan.delays import no_delays
from simdist.runs.building import Built, delay_sampler, traffic
from simdist.scenario.scenario import Scenario
from simdist.studies.facets import FACETS, Facet, FacetValues, Line, Simulated, ValueT
from simdist.traces.breakdown import STATES, Breakdown, break_down

if TYPE_CHECKING:
    from simdist.studies.epochs import Epochs

#: Called with a schedule's label, rank-steps done and rank-steps in all.
Progress = Callable[[str, int, int], None]

#: Returns the delays of seeds, from step 0 on.
Draw = Callable[[Sequence[int]], DelaySource]

#: Keys of `ScheduleTimes.drawn` that are seconds per step.
TIMES_OF_DRAWS = ("step", "stated")

_RARE = 0.5  # stragglers, in steps of all seeds for each step: up to here, simulating one rank of each kind pays
_BATCH_VALUES = 16_384  # ranks x seeds whose vectors stay in a core's cache


@dataclass(frozen=True)
class ScheduleTimes:
    """One schedule, simulated for many seeds.

    Args:
        label: The schedule's label.
        engine: `fast` or `des`.
        step_s: Seconds per step of each seed, `[n_seeds]`.
        states_s: Seconds per step in each state, averaged over ranks, by seed: state -> `[n_seeds]`.
        facets: Optional topics, such as epochs.
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

    def of(self, facet: Facet[ValueT]) -> ValueT:
        """Return the value of a facet."""
        return self.facets.of(facet)

    def line(self, facet: Facet[ValueT]) -> Line[ValueT]:
        """Return what a facet says."""
        return Line(self.label, float(self.step_s.mean()), self.of(facet))

    def divided(self, n_parts: int) -> "ScheduleTimes":
        """Return seconds per part of a step, such as a micro-batch, in place of those per step."""
        states_s = {state: seconds / n_parts for state, seconds in self.states_s.items()}
        drawn = {name: values / (n_parts if name in TIMES_OF_DRAWS else 1) for name, values in self.drawn.items()}
        step_s = self.step_s / n_parts
        facets = self.facets.divided(n_parts)
        return replace(self, step_s=step_s, states_s=states_s, drawn=drawn, facets=facets)


def measure(
    scenario: Scenario,
    built: Built,
    *,
    n_seeds: int,
    engine: Engine = "auto",
    progress: Progress | None = None,
    draw: Draw | None = None,
    facets: Sequence[Facet[Any]] = FACETS,
) -> ScheduleTimes:
    """Simulate one schedule for many seeds, keeping no traces.

    Args:
        scenario: The schedule's.
        built: The schedule.
        n_seeds: Seeds, counted up from the scenario's.
        engine: `auto` takes the fast engine wherever it is exact.
        progress: See `Progress`.
        draw: Gives the delays of seeds, as `shared_delays` does for several schedules; by default they are drawn here.
        facets: See `compare`; those that take further simulations say nothing.

    Raises:
        ScenarioError: There are no seeds.
        UnsupportedError: `fast` was asked for and cannot compute this exactly.
    """
    if n_seeds < 1:
        raise ScenarioError(f"{n_seeds} seeds; must be at least 1")
    seeds = [scenario.seed + number for number in range(n_seeds)]
    draw = draw or partial(delay_sampler, scenario)

    def by_fast() -> ScheduleTimes:
        need_no_events(built)
        parts = tuple(_measure_fast(draw, built, seeds, progress))
        return times_of(built.schedule.name, "fast", Simulated(built.plan, parts), facets)

    def by_alike() -> ScheduleTimes:
        parts = (_measure_alike(draw, built, different, progress),) * (len(seeds) // len(different))
        return times_of(built.schedule.name, "des", Simulated(built.plan, parts), facets)

    def by_des() -> ScheduleTimes:
        measured = _measure_des(scenario, draw, built, different, progress)
        parts, epochs = zip(*(measured * (len(seeds) // len(different))), strict=True)
        found = tuple(each for each in epochs if each)
        return times_of(built.schedule.name, "des", Simulated(built.plan, parts, found), facets)

    different = seeds if scenario.is_random or built.actors else seeds[:1]
    needs_events = bool(built.actors or built.plan.dataset)
    return choose_engine(engine, by_fast=by_fast, by_alike=None if needs_events else by_alike, by_des=by_des)


def step_times_s(scenario: Scenario, built: Built, *, n_seeds: int) -> NDArray[np.float64]:
    """Return the seconds per step of one schedule for many seeds, `[n_seeds]`. This is less work than `measure`.

    If stragglers are rare, ranks that are alike are simulated once. Otherwise the fast engine takes all at once.

    Args:
        scenario: The schedule's.
        built: The schedule.
        n_seeds: Seeds, counted up from the scenario's.
    """
    seeds = [scenario.seed + number for number in range(n_seeds)]
    if built.actors or built.plan.dataset:
        return measure(scenario, built, n_seeds=n_seeds, facets=()).step_s
    from simdist.engines import alike

    drawn = delay_sampler(scenario, seeds).take(scenario.steps)

    def by_alike() -> NDArray[np.float64]:
        return alike.step_s(built.plan, built.costs, DrawnDelays(drawn), n_seeds=n_seeds, courses=built.courses)

    def by_fast() -> NDArray[np.float64]:
        return fast.step_s(built.plan, [built.costs] * n_seeds, DrawnDelays(drawn))

    def by_des() -> NDArray[np.float64]:
        return measure(scenario, built, n_seeds=n_seeds, engine="des", facets=()).step_s

    if _n_unequal(drawn) <= scenario.steps * _RARE:
        return first_exact(by_alike, by_fast, by_des)
    return first_exact(by_fast, by_alike, by_des)


def calm_step_s(built: Built) -> float:
    """Return the seconds per step of a schedule if nothing delays a rank.

    Raises:
        UnsupportedError: Ranks of each kind cannot be simulated once.
    """
    from simdist.engines import alike

    delays = DrawnDelays(no_delays(built.plan))
    return float(alike.step_s(built.plan, built.costs, delays, n_seeds=1, courses=built.courses)[0])


def _n_unequal(drawn: Delays) -> int:
    """Return in how many steps, over all seeds, ranks have different delays."""
    differs = [(each != each[..., :1]).any(axis=-1) for each in drawn.values()]
    return int(np.any(differs, axis=0).sum()) if differs else 0


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


def need_no_events(built: Built) -> None:
    """Check that the fast engine can simulate a schedule.

    Raises:
        UnsupportedError: Actors of the user need every event.
    """
    if built.actors:
        raise UnsupportedError("actors need every event, and the fast engine has none: use engine='des'")


def _measure_fast(draw: Draw, built: Built, seeds: list[int], progress: Progress | None) -> Iterator[Breakdown]:
    world_size = built.plan.world_size
    batch = max(1, _BATCH_VALUES // world_size)
    held = None
    if built.costs.shares:
        from simdist.studies.held import steady_held

        held = steady_held(built.plan, built.costs)
    for first in range(0, len(seeds), batch):
        some = seeds[first : first + batch]
        report = _reporter(progress, built, n_seeds=len(seeds), before=first, each=len(some))
        yield fast.measure(built.plan, built.costs, draw(some), n_seeds=len(some), progress=report, held=held)


def _measure_des(
    scenario: Scenario, draw: Draw, built: Built, seeds: list[int], progress: Progress | None
) -> list[tuple[Breakdown, "Epochs | None"]]:
    found = []
    for number, seed in enumerate(seeds):
        report = _reporter(progress, built, n_seeds=len(seeds), before=number, each=1)
        found.append(_measure_events(scenario, built, draw([seed]), seed, report))
    return found


def _measure_alike(draw: Draw, built: Built, seeds: list[int], progress: Progress | None) -> Breakdown:
    """Simulate one rank of each kind, for all seeds."""
    from simdist.engines import alike

    report = _reporter(progress, built, n_seeds=len(seeds), before=0, each=len(seeds))
    return alike.measure(built.plan, built.costs, draw(seeds), n_seeds=len(seeds), progress=report)


def _measure_events(
    scenario: Scenario, built: Built, delays: DelaySource, seed: int, progress: Callable[[int], None] | None
) -> tuple[Breakdown, "Epochs | None"]:
    from simdist.engines import des
    from simdist.studies.epochs import find_epochs
    from simdist.studies.held import find_held
    from simdist.traces.reads import expected

    drawn = delays.take(scenario.steps)
    links = traffic(scenario, built.costs, seed)
    trace = des.simulate(built.plan, built.costs, drawn, traffic=links, actors=built.actors, progress=progress)
    held = find_held(trace, built.costs) if trace.links else None
    reads = expected(built.plan) if built.plan.dataset else None
    return break_down(trace, held), find_epochs(trace, reads) if reads else None


def _reporter(
    progress: Progress | None, built: Built, *, n_seeds: int, before: int, each: int
) -> Callable[[int], None] | None:
    """Turn steps done in one batch of seeds into rank-steps done in all."""
    if progress is None:
        return None
    world_size = built.plan.world_size
    n_steps = built.plan.n_steps

    def report(step: int) -> None:
        progress(built.schedule.name, world_size * (before * n_steps + each * step), world_size * n_seeds * n_steps)

    return report
