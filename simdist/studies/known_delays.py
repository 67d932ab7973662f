"""Means over a few runs, corrected by what is known of rare and heavy delays: a control variate.

Of a disturbance, the expected seconds E of all delays in a run are known (`simdist.scenario.expectations`), and of each
simulated run the drawn seconds D. With b step seconds for each second of delay, the step time T of each run becomes

    Y = T - b (D - E)

The mean of Y is that of T for every b that the run does not decide. Y varies least for b = cov(T, D) / var(D), which is
for independent delays what one delay more costs, in the mean over runs and the place of the delay (Mecke's formula).
So b is simulated: pilot runs with more seeds, each with and without one delay more, as long as the longest to expect.
A run without delays thus gives the same mean as one with three, and a tail without a variance does no harm: the largest
delays cost their full length, and their mean is known. Seconds in each state are corrected likewise.

Runs and pilots have met n delays. Delays of a sort that they have not met may be up to 3 / n of all (rule of three),
and each costs from nothing to its length: `unseen_s`. It keeps the interval from shrinking to nothing.

Source:
    Last & Penrose, Lectures on the Poisson Process, 2017, theorems 4.1 and 18.6; Hanley & Lippman-Hand, If Nothing
    Goes Wrong, Is Everything All Right?, JAMA 249, 1983. `experiments/coverage` has how often the intervals hold.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

from simdist.errors import UnsupportedError
from simdist.plan.delays import Delays, SeedDelays, delays_of
from simdist.plan.ops import Channel
from simdist.plan.plan import Plan
from simdist.runs.building import Built, delay_sampler
from simdist.scenario import Scenario
from simdist.scenario.disturbances import Disturbance
from simdist.scenario.expectations import (
    ExpectedDelays,
    expected_delays,
    is_heavy,
    is_rare,
    long_delay_s,
    share_of_largest,
)
from simdist.scenario.sampling import run_seeds, sampler
from simdist.settings.base import plural
from simdist.settings.units import format_seconds, format_share
from simdist.studies.measuring import ScheduleTimes, measure_delays
from simdist.studies.remarks import Remark, documents, remarks_of

_N_PILOTS = 24
_N_SLOW_PILOTS = 3  # of runs by events, which take far longer
_MOST_VALUES = 2**21  # delays of all pilots: 16 MiB
_MOST_DRAWN_AT_ONCE = 2**20
_FIRST_PILOT = 2**40  # number of the run: no study has so many
_PLACES = 2**64 - 2  # second word of the key that places are drawn with
_FAR_LONGER = 1000.0  # than other delays: what a tail without a variance costs is what its longest delays cost
_RULE_OF_THREE = 3.0
_FEW_EXPECTED = 20.0  # delays in all runs: fewer are said
_MIDDLE = (2.5, 97.5)  # percentiles
_CORRECTED = "; times are corrected to the known mean of the delays"


@dataclass(frozen=True, slots=True)
class KnownDelays:
    """The delays of one disturbance in some runs, and what is expected of them.

    Args:
        index: Of the disturbance in the scenario.
        disturbance: The disturbance.
        expected: Of one run.
        drawn_s: Seconds of all delays of a run, `[n_seeds]`.
        n_late: Steps of ranks that are late, `[n_seeds]`.
    """

    index: int
    disturbance: Disturbance
    expected: ExpectedDelays
    drawn_s: NDArray[np.float64]
    n_late: NDArray[np.int64]

    @property
    def place(self) -> str:
        """Path of the disturbance."""
        return f"disturbances[{self.index}]"

    @property
    def n_expected(self) -> float:
        """Delays to expect in all runs together."""
        return self.expected.delays * len(self.drawn_s)

    @property
    def n_drawn(self) -> float:
        """Delays in all runs together; where they last for several steps, about as many."""
        return float(self.n_late.sum()) * self.expected.delays / self.expected.late_steps

    def unseen_s(self, n_pilots: int) -> float:
        """Return seconds in a run that delays may cost of which neither the runs nor the pilots have met any."""
        n_met = self.n_drawn + n_pilots
        return self.expected.seconds * min(1.0, _RULE_OF_THREE / n_met) if n_met else self.expected.seconds


def known_delays(scenario: Scenario, seeds: Sequence[int]) -> tuple[KnownDelays, ...]:
    """Return the disturbances with rare or heavy delays: means of few runs tell little under them.

    Args:
        scenario: The scenario; its own seed does not count.
        seeds: Those of the runs.
    """
    return tuple(_drawn(scenario, i, seeds) for i in _acting(scenario) if _is_special(scenario, i, len(seeds)))


def _acting(scenario: Scenario) -> list[int]:
    """Return the disturbances of ranks that are random and delay."""
    delays = enumerate(scenario.delays)
    return [i for i, each in delays if each is not None and each.is_random and not each.never_delays]


def _is_special(scenario: Scenario, index: int, n_seeds: int) -> bool:
    found = _expected(scenario, index)
    return found is not None and (is_rare(found, n_seeds) or is_heavy(_disturbance(scenario, index)))


def _disturbance(scenario: Scenario, index: int) -> Disturbance:
    found = scenario.delays[index]
    assert found is not None, "acts on ranks"
    return found


def _expected(scenario: Scenario, index: int) -> ExpectedDelays | None:
    one = _disturbance(scenario, index)
    ranks = one.selected(scenario.cluster.world_size, scenario.cluster.gpus_per_node)
    return expected_delays(one, n_steps=scenario.steps, n_ranks=len(ranks))


def _drawn(scenario: Scenario, index: int, seeds: Sequence[int]) -> KnownDelays:
    one = _disturbance(scenario, index)
    found = _expected(scenario, index)
    assert found is not None, "is special"
    drawn_s, n_late = _totals(one, index, tuple(seeds), _shape(scenario))
    return KnownDelays(index, one, found, drawn_s, n_late)


def _shape(scenario: Scenario) -> tuple[int, int, int, int]:
    """Return steps, ranks, ranks of a node and micro-batches of a run."""
    cluster = scenario.cluster
    return scenario.steps, cluster.world_size, cluster.gpus_per_node, scenario.workload.micro_batches


@lru_cache(maxsize=16)
def _totals(
    disturbance: Disturbance, index: int, seeds: tuple[int, ...], shape: tuple[int, int, int, int]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the seconds of all delays of a disturbance and the number of late steps, each `[n_seeds]`."""
    seconds = np.zeros(len(seeds))
    n_late = np.zeros(len(seeds), dtype=np.int64)
    for of_steps in _late_s(disturbance, index, seeds, shape):
        seconds += of_steps.sum(axis=(1, 2))
        n_late += (of_steps > 0).sum(axis=(1, 2))
    return seconds, n_late


def _late_s(
    disturbance: Disturbance, index: int, seeds: tuple[int, ...], shape: tuple[int, int, int, int]
) -> Iterator[NDArray[np.float64]]:
    """Yield the delays of a disturbance in consecutive steps, `[n_seeds, n_steps, n_ranks]`."""
    n_steps, world_size, ranks_per_node, micro_batches = shape
    alone = [*[None] * index, disturbance]
    nothing_s = np.zeros(world_size)  # no work: none of these disturbances depends on it
    drawn = sampler(
        alone,
        seeds=seeds,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        compute_s=nothing_s,
        micro_batches=micro_batches,
    )
    at_once = max(1, _MOST_DRAWN_AT_ONCE // (len(seeds) * world_size * micro_batches))
    for first in range(0, n_steps, at_once):
        (found,) = drawn.take(min(at_once, n_steps - first)).values()
        yield found if found.ndim == 3 else found.sum(axis=2)


def corrected(scenario: Scenario, built: Built, measured: ScheduleTimes) -> ScheduleTimes:
    """Return the times of a schedule, corrected by what is known of rare and heavy delays: see the module.

    Times stay as they are without such delays, and with a single seed. Actors do not take part in pilot runs.

    Args:
        scenario: The schedule's.
        built: The schedule.
        measured: Its times, with the seeds of the scenario's runs.
    """
    return _corrected(scenario, built, measured, _costs(scenario, built, len(measured.step_s)))


def corrected_ends(
    scenario: Scenario, built: Built, ends_s: NDArray[np.float64]
) -> tuple[ScheduleTimes, NDArray[np.float64]]:
    """Return the times of a schedule, without states, and the ends of its steps, both corrected as `corrected` does.

    Args:
        scenario: The schedule's.
        built: The schedule.
        ends_s: Seconds from the start to the end of each step, `[n_seeds, n_steps]`.
    """
    n_seeds, n_steps = ends_s.shape
    seeds = tuple(run_seeds(scenario.seed, n_seeds))
    costs = _costs(scenario, built, n_seeds)
    times = _corrected(scenario, built, ScheduleTimes(built.schedule.name, "", ends_s[:, -1] / n_steps, {}), costs)
    if times.uncorrected is not None:
        for known, cost in costs:
            parts = _late_s(known.disturbance, known.index, seeds, _shape(scenario))
            late_s = np.concatenate([each.sum(axis=2) for each in parts], axis=1).cumsum(axis=1)
            expected_s = known.expected.seconds * np.arange(1, n_steps + 1) / n_steps
            ends_s = ends_s - n_steps * cost.step_s * (late_s - expected_s)
    return times, ends_s


def with_unseen(scenario: Scenario, built: Built, measured: ScheduleTimes) -> ScheduleTimes:
    """Return the times of a schedule; if no two runs differ, with how much longer a step may be all the same.

    Args:
        scenario: The schedule's.
        built: The schedule.
        measured: Its times, with the seeds of the scenario's runs.
    """
    n_seeds = len(measured.step_s)
    if n_seeds == 1 or not scenario.is_random or np.ptp(measured.step_s) > 0:
        return measured
    channels = {op.channel for op in delays_of(built.plan)}
    return replace(measured, unseen_s=_unseen_s(scenario, channels, run_seeds(scenario.seed, n_seeds)))


@dataclass(frozen=True, slots=True)
class CostOfDelay:
    """What one delay more costs, in the mean over pilot runs.

    Args:
        step_s: Step seconds for each second of delay.
        states_s: The same of the seconds in each state.
        n_pilots: Pilot runs.
    """

    step_s: float
    states_s: dict[str, float]
    n_pilots: int


def cost_of_delay(scenario: Scenario, built: Built, known: KnownDelays) -> CostOfDelay:
    """Simulate what one delay more of a disturbance costs under a schedule."""
    extra_s = long_delay_s(known.disturbance, known.n_expected)
    if share_of_largest(known.disturbance) is not None:
        extra_s *= _FAR_LONGER
    piloted, added_s = _piloted(scenario, replace(built, actors=()), known, extra_s)

    def cost(of_pilots: NDArray[np.float64]) -> float:
        without, with_one = np.split(of_pilots, 2)
        return float((with_one - without).mean()) / added_s

    states_s = {state: cost(seconds) for state, seconds in piloted.states_s.items()}
    return CostOfDelay(cost(piloted.step_s), states_s, len(piloted.step_s) // 2)


def corrected_by(known: KnownDelays, cost: CostOfDelay, measured: ScheduleTimes, *, n_steps: int) -> ScheduleTimes:
    """Correct the times of a schedule by one disturbance, with the same seeds."""
    surplus_s = known.drawn_s - known.expected.seconds
    step_s = measured.step_s - cost.step_s * surplus_s
    if not (np.isfinite(step_s).all() and step_s.mean() > 0):
        return measured
    states_s = {state: its - cost.states_s[state] * surplus_s for state, its in measured.states_s.items()}
    unseen_s = math.hypot(measured.unseen_s, known.unseen_s(cost.n_pilots) / n_steps)
    return replace(measured, step_s=step_s, states_s=states_s, uncorrected=measured.as_simulated, unseen_s=unseen_s)


def _costs(scenario: Scenario, built: Built, n_seeds: int) -> list[tuple[KnownDelays, CostOfDelay]]:
    """Return the disturbances that the times of a schedule are corrected for, and what one delay more costs."""
    if n_seeds == 1 or not scenario.is_random:
        return []
    channels = {op.channel for op in delays_of(built.plan)}
    seeds = run_seeds(scenario.seed, n_seeds)
    known = [each for each in known_delays(scenario, seeds) if each.disturbance.on in channels]
    return [(each, cost_of_delay(scenario, built, each)) for each in known if math.isfinite(each.expected.seconds)]


def _corrected(
    scenario: Scenario, built: Built, measured: ScheduleTimes, costs: Sequence[tuple[KnownDelays, CostOfDelay]]
) -> ScheduleTimes:
    found = measured
    for known, cost in costs:
        found = corrected_by(known, cost, found, n_steps=scenario.steps)
    return found if found.unseen_s else with_unseen(scenario, built, found)


def _piloted(scenario: Scenario, built: Built, known: KnownDelays, extra_s: float) -> tuple[ScheduleTimes, float]:
    """Return the times of pilot runs, then of the same with one delay more, and the latter's mean seconds.

    There are as many runs with every engine.
    """
    n_values = scenario.steps * scenario.workload.micro_batches * scenario.cluster.world_size
    most = max(1, _MOST_VALUES // (2 * n_values))
    try:
        pilots, added_s = _pilots(scenario, built.plan, known, min(_N_PILOTS, most), extra_s)
        return measure_delays(scenario, built, pilots, engine="fast"), added_s
    except UnsupportedError:
        pilots, added_s = _pilots(scenario, built.plan, known, min(_N_SLOW_PILOTS, most), extra_s)
        return measure_delays(scenario, built, pilots), added_s


def _pilots(scenario: Scenario, plan: Plan, known: KnownDelays, n: int, extra_s: float) -> tuple[SeedDelays, float]:
    """Return the delays of pilot runs, then of the same with one delay more at a random place, and its mean seconds.

    It lasts for as many steps as delays last in the mean, or to the end of the run.
    """
    seeds = run_seeds(scenario.seed, n, first=_FIRST_PILOT)
    without: Delays = delay_sampler(scenario, seeds).take(plan.n_steps)
    delays = {channel: np.concatenate([each, each]) for channel, each in without.items()}
    of_channel = delays[known.disturbance.on]
    words = Philox(key=np.array([scenario.seed, _PLACES], dtype=np.uint64)).random_raw(3 * n).reshape(n, 3)
    ranks = known.disturbance.selected(scenario.cluster.world_size, scenario.cluster.gpus_per_node)
    n_late = max(1, round(known.expected.late_steps / known.expected.delays))
    added_s = 0.0
    for pilot, (step, part, rank) in enumerate(words.tolist(), start=n):
        begin = step % plan.n_steps
        steps = slice(begin, begin + n_late)
        place = (steps, part % of_channel.shape[2], ranks[rank % len(ranks)])
        of_channel[(pilot, *(place if of_channel.ndim == 4 else place[::2]))] += extra_s
        added_s += extra_s * (min(begin + n_late, plan.n_steps) - begin) / n
    return SeedDelays.of(delays), added_s


def _unseen_s(scenario: Scenario, channels: set[Channel], seeds: Sequence[int]) -> float:
    """Return how much longer a step may be if no two runs differ; infinity if that is not known."""
    acting = [i for i in _acting(scenario) if _disturbance(scenario, i).on in channels]
    if scenario.has_links:
        return math.inf
    total_s = 0.0
    for i in acting:
        if _expected(scenario, i) is None:
            return math.inf
        total_s += _drawn(scenario, i, seeds).unseen_s(0)
    return total_s / scenario.steps


@dataclass(frozen=True, slots=True)
class Chances:
    """What is known of the delays of some seeds before anything is simulated.

    Args:
        rare: Remarks on delays that are rarer than runs, where times are corrected for them.
        tails: Remarks on tails without a variance, which end with the times of runs.
    """

    rare: tuple[Remark, ...] = ()
    tails: tuple[Remark, ...] = ()

    def document(self) -> dict[str, object]:
        """Return both as JSON.

        Columns:
            rare, tails (list): "A remark", on delays that are rarer than runs, and on tails without a variance.
        """
        return {"rare": documents(self.rare), "tails": documents(self.tails)}

    @classmethod
    def restored(cls, record: Mapping[str, Any]) -> "Chances":
        """Return both from JSON."""
        return cls(*(tuple(Remark(**each) for each in record.get(name, ())) for name in ("rare", "tails")))


def chances_of(scenario: Scenario, n_seeds: int) -> Chances:
    """Return what is known of the delays of some seeds of a scenario."""
    if not scenario.is_random:
        return Chances()
    if n_seeds == 1:
        return Chances(uncorrected_remarks(scenario, 1))
    known = known_delays(scenario, run_seeds(scenario.seed, n_seeds))
    rare = (_of_rare(each) for each in known if each.n_expected < _FEW_EXPECTED)
    tails = (remark for i in _acting(scenario) if (remark := _of_tail(scenario, i, _CORRECTED)))
    return Chances(tuple(rare), tuple(tails))


def uncorrected_remarks(scenario: Scenario, n_runs: int) -> tuple[Remark, ...]:
    """Return what some runs do not show of rare and heavy delays, where their times are not corrected."""
    if not scenario.is_random:
        return ()
    acting = [i for i in _acting(scenario) if _disturbance(scenario, i).on != "io" or scenario.uses.source == "storage"]
    seeds = run_seeds(scenario.seed, n_runs)
    rare = (_drawn(scenario, i, seeds) for i in acting if _is_special(scenario, i, n_runs))
    of_rare = (_of_uncorrected(each) for each in rare if each.n_expected < _FEW_EXPECTED)
    return (*filter(None, of_rare), *filter(None, (_of_tail(scenario, i, "") for i in acting)))


def remarks_on_run(scenario: Scenario) -> tuple[Remark, ...]:
    """Return the remarks on a scenario that is simulated, or measured, with its seed only."""
    return (*remarks_of(scenario), *uncorrected_remarks(scenario, 1))


def chance_remarks(chances: Chances, measured: Sequence[ScheduleTimes]) -> list[Remark]:
    """Say what runs do not show by chance: delays that are rarer than runs, tails without a variance, equal runs.

    Args:
        chances: Of the scenario and the seeds.
        measured: Times of each schedule, with the same seeds.
    """
    n_seeds = len(measured[0].step_s)
    found = [*chances.rare] if n_seeds == 1 or any(each.uncorrected is not None for each in measured) else []
    if chances.tails:
        runs = "; ".join(f"{each.label} {_middle(each.as_simulated.step_s)}" for each in measured)
        of_runs = f"step time of single runs, the median and 95 of 100: {runs}"
        found += [replace(each, text=f"{each}; {of_runs}") for each in chances.tails]
    equal = [each.label for each in measured if math.isinf(each.unseen_s)]
    if equal:
        text = (
            f"no two runs of {', '.join(equal)} differ, although delays are random: they may be rarer than {n_seeds} "
            f"seeds show, so there is no interval"
        )
        found.append(Remark("accuracy", text))
    return found


def _of_rare(known: KnownDelays) -> Remark:
    if not known.n_late.any():
        return Remark("accuracy", f"{_none_fell(known)}, and what one delay costs in runs of its own", known.place)
    return Remark("result", f"{_some_fell(known)}: times are corrected to the expected number", known.place)


def _of_uncorrected(known: KnownDelays) -> Remark | None:
    """Say how many rare delays fell into runs whose times are not corrected; of a single run, if none did."""
    if not known.n_late.any():
        return Remark("accuracy", _none_fell(known), known.place) if known.n_expected else None
    if len(known.n_late) == 1:
        return None
    return Remark("accuracy", f"{_some_fell(known)}: times are not corrected to the expected number", known.place)


def _none_fell(known: KnownDelays) -> str:
    runs = "this run" if len(known.n_late) == 1 else "these runs"
    return f"no delay of {known.place} fell into {runs}, {known.n_expected:.2g} expected: times are those without it"


def _some_fell(known: KnownDelays) -> str:
    n_late = int(known.n_late.sum())
    n_seeds = len(known.n_late)
    late = f"{n_late} late {plural(n_late, 'step')} of {known.place} fell into {n_seeds} seeds"
    return f"{late}, {known.expected.late_steps * n_seeds:.2g} expected"


def _of_tail(scenario: Scenario, index: int, corrected: str) -> Remark | None:
    """Say what a tail without a variance means for the results; `corrected` is said where its mean is known."""
    one = _disturbance(scenario, index)
    share = share_of_largest(one)
    if share is None:
        return None
    place = f"disturbances[{index}]"
    if share == 1:
        known = f"the delays of {place} have no mean, so no number of seeds tells the step time"
    else:
        known = (
            f"the delays of {place} have no variance, so the mean of runs cannot be known: the largest 1 % carry "
            f"{format_share(share)} of it{corrected}"
        )
    return Remark("accuracy", known, place)


def _middle(run_s: NDArray[np.float64]) -> str:
    low, high = (format_seconds(float(each)) for each in np.percentile(run_s, _MIDDLE))
    return f"{format_seconds(float(np.median(run_s)))} ({low} to {high})"
