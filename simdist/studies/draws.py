"""Common random numbers: delays that all schedules share, and draws of what is uncertain with the same seeds."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simdist.cost import tensor_backward_s
from simdist.engines import Delays, DelaySource, DrawnDelays, Engine, choose_engine, fast, first_exact
from simdist.errors import UnsupportedError
from simdist.plan.delays import no_delays
from simdist.runs.building import Built, build, delay_sampler, job, price_of
from simdist.scenario.scenario import Scenario
from simdist.scenario.strict_yaml import Path
from simdist.settings.base import unchecked_copy
from simdist.studies.measuring import TIMES_OF_DRAWS, Draw, Progress, ScheduleTimes, measure, need_no_events

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
    if not (scenario.is_of_machines or doubts):
        return measured
    from simdist.studies import uncertainty
    from simdist.studies.published_errors import doubted, doubts_of

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
    numbers = np.arange(n_draws) % len(measured.step_s)
    seeds = (scenario.seed + numbers).tolist()
    built_again = [_built_again(each, scenario, built) for each in priced] * (n_draws // n_priced)
    if doubts:
        built_again = [
            replace(each, costs=doubted(each.plan, each.costs, {doubt: at[i] for doubt, at in of_doubts.items()}))
            for i, each in enumerate(built_again)
        ]
    engine: Engine = "des" if measured.engine == "des" else "auto"
    is_calm = quiet and _may_be_calm(scenario, [each.path for each in found])
    stated_s = measured.step_s[numbers]

    def together() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        need_no_events(built)
        if any(each.plan is not built.plan for each in built_again):
            raise UnsupportedError("draws have other plans")
        delays: DelaySource
        if draw and all(each.path[:2] == _NETWORK for each in found):
            source = draw(seeds[: len(measured.step_s)])
            delays = source if n_draws <= len(measured.step_s) else _Chosen(source, numbers)
        else:
            delays = _SideBySide([delay_sampler(each, [seed]) for each, seed in zip(drawn, seeds, strict=True)])
        return fast.step_s(built.plan, [each.costs for each in built_again], delays), stated_s

    def one_by_one() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        runs = (unchecked_copy(each, seed=seed) for each, seed in zip(drawn, seeds, strict=True))
        pairs = zip(runs, built_again, strict=True)
        times_s = np.array([_step_s(run, each, engine, progress, is_calm=is_calm) for run, each in pairs])
        return times_s, np.full(
            n_draws, _step_s(scenario, built, engine, progress, is_calm=True)
        ) if is_calm else stated_s

    both_s = choose_engine("auto", by_fast=together, by_des=one_by_one) if engine == "auto" else one_by_one()
    by_name = {each.name: at for each, at in places.items()} | {each.name: at for each, at in of_doubts.items()}
    return replace(measured, drawn=dict(zip(TIMES_OF_DRAWS, both_s, strict=True)) | by_name)


def _may_be_calm(scenario: Scenario, uncertain: Sequence[Path]) -> bool:
    """Tell whether draws of uncertain quantities may leave out disturbances: all are random, and none is uncertain."""
    is_drawn = all(each.is_random for each in scenario.disturbances) and not scenario.has_links
    return is_drawn and not any(path[0] == _DISTURBANCES for path in uncertain)


def _step_s(scenario: Scenario, built: Built, engine: Engine, progress: Progress | None, *, is_calm: bool) -> float:
    """Return the seconds per step of one seed, by events: of one rank of each kind if that is possible.

    If it is calm, no rank is delayed.
    """
    from simdist.engines import alike

    def draw(seeds: Sequence[int]) -> DelaySource:
        return DrawnDelays(no_delays(built.plan, n_seeds=len(seeds))) if is_calm else delay_sampler(scenario, seeds)

    def by_alike() -> float:
        return float(alike.step_s(built.plan, built.costs, draw([scenario.seed]), n_seeds=1)[0])

    def measured() -> float:
        found = measure(scenario, built, n_seeds=1, engine=engine, progress=progress, draw=draw, facets=())
        return float(found.step_s[0])

    return measured() if built.actors else first_exact(by_alike, measured)


def _built_again(drawn: Scenario, scenario: Scenario, built: Built) -> Built:
    """Return a schedule with the prices of a draw, and with another plan if the draw changes it."""
    stated_s, drawn_s = (tensor_backward_s(each.workload, each.cluster) for each in (scenario, drawn))
    may_differ = drawn.data != scenario.data or drawn_s != stated_s
    if may_differ and built.schedule.plan(job(drawn)).digest() != built.plan.digest():
        return replace(build(drawn, built.schedule), actors=built.actors)
    return replace(built, costs=price_of(built.plan, drawn))


class _SideBySide:
    """Delays of several sources, each of one seed."""

    def __init__(self, sources: Sequence[DelaySource]) -> None:
        self._sources = sources

    def take(self, n_steps: int) -> Delays:
        """Return the delays of the next `n_steps` steps."""
        taken = [each.take(n_steps) for each in self._sources]
        return {channel: np.concatenate([each[channel] for each in taken]) for channel in taken[0]}


class _Chosen:
    """Delays of some of the seeds of a source, by their numbers, which may recur."""

    def __init__(self, source: DelaySource, numbers: NDArray[np.int64]) -> None:
        self._source = source
        self._numbers = numbers

    def take(self, n_steps: int) -> Delays:
        """Return the delays of the next `n_steps` steps, in memory with the seeds side by side."""
        taken = self._source.take(n_steps)
        return {
            channel: np.moveaxis(np.moveaxis(each, 0, -1)[..., self._numbers], -1, 0) for channel, each in taken.items()
        }
