"""Common random numbers: delays that all schedules share, and draws of what is uncertain with the same seeds."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simdist.cost import tensor_backward_s
from simdist.engines.choose import Engine
from simdist.engines.observers import StepSeconds
from simdist.engines.run import run
from simdist.errors import UnsupportedError
from simdist.plan.delays import Delays, DelaySource, Draw, DrawnDelays, SeedDelays, SideBySide, SomeSeeds, no_delays
from simdist.runs.building import Built, build, delay_sampler, job, price_of
from simdist.scenario.sampling import run_seeds
from simdist.scenario.scenario import Scenario
from simdist.scenario.strict_yaml import Path
from simdist.settings.base import unchecked_copy
from simdist.studies.measuring import Progress, ScheduleTimes, measure
from simdist.studies.statistics import TIMES_OF_DRAWS

if TYPE_CHECKING:
    from simdist.studies.published_errors import Doubt

_DISTURBANCES = "disturbances"
_NETWORK = ("cluster", "network")  # no delay depends on it
_MOST_KEPT_VALUES = 2**23  # delays: 64 MiB


def shared_delays(scenario: Scenario) -> Draw:
    """Return a function that draws the delays of seeds once for all schedules, where they are few enough to keep."""
    kept: dict[tuple[int, ...], Delays] = {}

    def draw(seeds: Sequence[int]) -> DelaySource:
        n_rows = scenario.steps * scenario.workload.micro_batches
        n_values = n_rows * scenario.cluster.world_size * len(seeds) * len(scenario.disturbances)
        key = tuple(seeds)
        if key not in kept:
            if n_values * (len(kept) + 1) > _MOST_KEPT_VALUES:
                return delay_sampler(scenario, seeds)
            kept[key] = delay_sampler(scenario, seeds).take(scenario.steps)
        return DrawnDelays(kept[key])

    return draw


def with_draws(
    scenario: Scenario,
    built: Built,
    measured: ScheduleTimes,
    *,
    progress: Progress | None = None,
    draw: Draw | None = None,
    doubts: "Sequence[Doubt] | None" = None,
    quiet: bool = False,
) -> ScheduleTimes:
    """Simulate a schedule also under draws of uncertain quantities and of the errors of published rows, if any.

    Args:
        scenario: The schedule's.
        built: The schedule; its plan is built again only where a draw changes it.
        measured: Its times as stated.
        progress: See `Progress`.
        draw: As of `measure`.
        doubts: Instead of those of `simdist.studies.published_errors.doubts_of`.
        quiet: Where ranks of each kind are simulated one by one, leave out random disturbances that are not uncertain.
            This is far less work: steps then differ by their prices only, and so do draws, up to second order.
    """
    if doubts is None and (scenario.cluster.has_unknown_gpus or not scenario.is_of_machines):
        return measured
    from simdist.studies import uncertainty
    from simdist.studies.published_errors import doubted, doubts_of, ranged_overhead_s

    doubts = doubts_of(scenario) if doubts is None else doubts
    found = uncertainty.quantities(scenario)
    if not (found or doubts):
        return measured
    n_draws = uncertainty.n_draws(len(found) + len(doubts))
    of_doubts = {each: uncertainty.places(each.name, seed=scenario.seed, n=n_draws) for each in doubts}
    n_priced = n_draws
    if doubts:  # a doubt multiplies prices, so each price list serves several draws
        n_priced = n_draws // 2 if found else 1
    places = {each: uncertainty.places(each.name, seed=scenario.seed, n=n_priced) for each in found}
    priced = [uncertainty.drawn(scenario, {each: at[i] for each, at in places.items()}) for i in range(n_priced)]
    drawn = priced * (n_draws // n_priced)
    places = {each: np.tile(at, n_draws // n_priced) for each, at in places.items()}
    seeds = run_seeds(scenario.seed, len(measured.step_s))
    numbers = np.arange(n_draws) % len(seeds)
    built_again = [_built_again(each, scenario, built) for each in priced] * (n_draws // n_priced)
    if doubts:
        at_draws = [{doubt: at[i] for doubt, at in of_doubts.items()} for i in range(n_draws)]
        built_again = [
            replace(its, costs=doubted(its.plan, its.costs, at, ranged_s=ranged_overhead_s(each)))
            for each, its, at in zip(drawn, built_again, at_draws, strict=True)
        ]
    engine: Engine = "des" if measured.engine == "des" else "auto"
    stated_s = measured.step_s[numbers]

    runs = [unchecked_copy(each, seed=seeds[number]) for each, number in zip(drawn, numbers, strict=True)]
    draw_all = partial(_side_by_side, runs)
    if draw and all(each.path[:2] == _NETWORK for each in found):
        draw_all = partial(_like_stated, draw, seeds, numbers)
    drawn_s = None if engine == "des" else _together_s(built, built_again, draw_all)
    if drawn_s is None:
        is_calm = quiet and _may_be_calm(scenario, [each.path for each in found])
        pairs = zip(runs, built_again, strict=True)
        drawn_s = np.array([_step_s(each, its, engine, progress, is_calm=is_calm) for each, its in pairs])
        if is_calm:
            stated_s = np.full(n_draws, _step_s(scenario, built, engine, progress, is_calm=True))
    by_name = {each.name: at for each, at in places.items()} | {each.name: at for each, at in of_doubts.items()}
    return replace(measured, drawn=dict(zip(TIMES_OF_DRAWS, (drawn_s, stated_s), strict=True)) | by_name)


def _may_be_calm(scenario: Scenario, uncertain: Sequence[Path]) -> bool:
    """Tell whether draws of uncertain quantities may leave out disturbances: all are random, and none is uncertain."""
    is_drawn = all(each.is_random for each in scenario.disturbances) and not scenario.has_links
    return is_drawn and not any(path[0] == _DISTURBANCES for path in uncertain)


def _side_by_side(runs: Sequence[Scenario], places: Sequence[int]) -> DelaySource:
    """Return the delays of some draws, each with its own scenario and seed."""
    return SideBySide([delay_sampler(runs[place], [runs[place].seed]) for place in places])


def _like_stated(draw: Draw, seeds: Sequence[int], numbers: NDArray[np.int64], places: Sequence[int]) -> DelaySource:
    """Return the delays of draws that have the delays of the seeds with these numbers."""
    source = draw(seeds)
    return source if len(places) == len(seeds) else SomeSeeds(source, numbers[places])


def _together_s(built: Built, draws: Sequence[Built], draw: Draw) -> NDArray[np.float64] | None:
    """Return the seconds per step of all draws, simulated together; None if that is impossible."""
    if built.actors or any(each.plan is not built.plan for each in draws):
        return None
    delays = SeedDelays(range(len(draws)), draw)
    try:
        return run(built.plan, [each.costs for each in draws], delays, observe=StepSeconds(), engine="fast")
    except UnsupportedError:
        return None


def _step_s(scenario: Scenario, built: Built, engine: Engine, progress: Progress | None, *, is_calm: bool) -> float:
    """Return the seconds per step of one seed, by events: of one rank of each kind if that is possible.

    If it is calm, no rank is delayed.
    """

    def draw(seeds: Sequence[int]) -> DelaySource:
        return DrawnDelays(no_delays(built.plan, n_seeds=len(seeds))) if is_calm else delay_sampler(scenario, seeds)

    if not built.actors:
        try:
            delays = SeedDelays([scenario.seed], draw)
            return float(run(built.plan, built.costs, delays, observe=StepSeconds(), engine="alike")[0])
        except UnsupportedError:
            pass
    found = measure(scenario, built, n_seeds=1, engine=engine, progress=progress, draw=draw, facets=())
    return float(found.step_s[0])


def _built_again(drawn: Scenario, scenario: Scenario, built: Built) -> Built:
    """Return a schedule with the prices of a draw, and with another plan if the draw changes it."""
    stated_s, drawn_s = (tensor_backward_s(each.workload, each.cluster) for each in (scenario, drawn))
    may_differ = drawn.input.data != scenario.input.data or drawn_s != stated_s
    if may_differ and built.schedule.plan(job(drawn)).digest() != built.plan.digest():
        return replace(build(drawn, built.schedule), actors=built.actors)
    return replace(built, costs=price_of(built.plan, drawn))
