"""Mean step times that do not come from the correction of `simdist.studies.known_delays`.

closed form      of `sync`: each step takes as long as one without delays, and the longest delay of the ranks more
number of delays of rare `transient` delays: the mean over runs with 0, 1, 2, ... of them, weighted by how likely
                 that number is, each at random places
other seeds      the plain mean over many runs, where delays have a variance
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from simdist.engines.observers import StepSeconds
from simdist.engines.run import run
from simdist.plan.delays import Delays, SeedDelays
from simdist.runs.building import Built, delay_sampler
from simdist.scenario import Scenario
from simdist.scenario import disturbances as kinds
from simdist.scenario.disturbances import Disturbance, mean_of_longest, read_recorded
from simdist.scenario.expectations import share_of_largest
from simdist.studies.measuring import calm_step_s

AT_ONCE = 500  # seeds
FIRST_OTHER = 2**50  # seeds that no study has
FEW = 5.0  # delays in a run
UNLIKELY = 1e-7
DEVIATIONS = np.linspace(-12.0, 40.0, 200_001)  # of a normal distribution


@dataclass(frozen=True, slots=True)
class Truth:
    """The mean step time over endless seeds.

    Args:
        mean_s: Seconds.
        error_s: Its standard error.
        source: Where it is from, see the module.
    """

    mean_s: float
    error_s: float
    source: str


def step_s_of(built: Built, delays: SeedDelays) -> NDArray[np.float64]:
    """Return the step seconds of a schedule under given delays, `[n_seeds]`."""
    return run(built.plan, built.costs, delays, observe=StepSeconds(), courses=built.courses)


def step_s_of_seeds(scenario: Scenario, built: Built, seeds: list[int]) -> NDArray[np.float64]:
    """Return the step seconds of a schedule with some seeds, `[n_seeds]`."""
    parts = (seeds[first : first + AT_ONCE] for first in range(0, len(seeds), AT_ONCE))
    draw = partial(delay_sampler, scenario)
    return np.concatenate([step_s_of(built, SeedDelays(part, draw)) for part in parts])


def truth_of(scenario: Scenario, built: Built, n_others: int) -> Truth | None:
    """Return the mean step time of a schedule; None if only the correction tells it.

    Args:
        scenario: The last disturbance is random, the others are not.
        built: The schedule.
        n_others: How many runs may be simulated.
    """
    random = scenario.disturbances[-1]
    if built.schedule.kind == "sync" and len(scenario.disturbances) == 1:
        longest_s = mean_longest_s(random, scenario.cluster.world_size)
        return Truth(calm_step_s(built) + longest_s, 0.0, "closed form")
    if isinstance(random, kinds.Transient):
        n_places = scenario.steps * scenario.cluster.world_size
        if random.probability * n_places < FEW:
            return _by_number_of_delays(scenario, built, random, n_others)
    if share_of_largest(random) is not None:
        return None
    step_s = step_s_of_seeds(scenario, built, [FIRST_OTHER + number for number in range(n_others)])
    return Truth(float(step_s.mean()), float(step_s.std(ddof=1)) / math.sqrt(n_others), "other seeds")


def mean_longest_s(disturbance: Disturbance, n: int) -> float:
    """Return the mean of the longest delay of some ranks in a step.

    Source:
        Of exponential and Pareto delays: Arnold, Balakrishnan & Nagaraja, A First Course in Order Statistics, 1992.
    """
    match disturbance:
        case kinds.Transient(probability=probability, delay_s=delay_s):
            return delay_s * (1 - (1 - probability) ** n)
        case kinds.Bursts(enter=enter, leave=leave, delay_s=delay_s):
            return delay_s * (1 - (leave / (enter + leave)) ** n)
        case kinds.Exponential(mean_s=mean_s):
            return mean_s * mean_of_longest(n)
        case kinds.HeavyTail(scale_s=scale_s, shape=shape, probability=1.0):
            power = 1 - 1 / shape
            return scale_s * math.exp(math.lgamma(n + 1) + math.lgamma(power) - math.lgamma(n + power))
        case kinds.Jitter(median_s=median_s, sigma=sigma):
            density = np.exp(-(DEVIATIONS**2) / 2) / math.sqrt(2 * math.pi)
            below = np.cumsum(density) * (DEVIATIONS[1] - DEVIATIONS[0])
            longest = n * density * np.minimum(below, 1.0) ** (n - 1) * np.exp(sigma * DEVIATIONS)
            return median_s * float(longest.sum()) * float(DEVIATIONS[1] - DEVIATIONS[0])
        case kinds.Pauses(every=(every, last), first=None, delay_s=(shortest_s, longest_s), covered_s=(_, 0.0)):
            others = 1 - 2 / (every + last)  # of the steps of a rank
            of_ranges_s = (longest_s - shortest_s) * (1 - others ** (n + 1)) / ((1 - others) * (n + 1))
            return longest_s - shortest_s * others**n - of_ranges_s
        case kinds.Recorded():
            return float(read_recorded(disturbance).max(axis=-1).mean())
        case _:
            raise AssertionError(disturbance.kind)


def _by_number_of_delays(scenario: Scenario, built: Built, random: kinds.Transient, n_runs: int) -> Truth:
    shape = (scenario.steps, scenario.cluster.world_size)
    n_places = math.prod(shape)
    others: Delays = delay_sampler(scenario.changed(disturbances=scenario.disturbances[:-1]), [0]).take(scenario.steps)
    numbers = np.random.default_rng(0)
    mean_s = 0.0
    variance = 0.0
    left = 1.0
    number = 0
    while left > UNLIKELY:
        likely = (
            math.comb(n_places, number) * random.probability**number * (1 - random.probability) ** (n_places - number)
        )
        left -= likely
        n_ways = math.comb(n_places, number)
        n = max(50, round(n_runs * likely))
        if n_ways <= n or number == 0:
            places = np.arange(n_ways).reshape(-1, 1)[:, :number]
        else:
            places = np.stack([numbers.choice(n_places, number, replace=False) for _ in range(n)])
        step_s = _with_delays(built, random, others, places, shape)
        mean_s += likely * float(step_s.mean())
        variance += likely**2 * float(step_s.var(ddof=1)) / n if len(step_s) < n_ways else 0.0
        number += 1
    return Truth(mean_s, math.sqrt(variance), "number of delays")


def _with_delays(
    built: Built, random: kinds.Transient, others: Delays, places: NDArray[np.int64], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """Return the step seconds of runs with delays at some places of steps and ranks, `[n_runs, n_delays]`."""
    parts = []
    for first in range(0, len(places), AT_ONCE):
        some = places[first : first + AT_ONCE]
        late_s = np.zeros((len(some), math.prod(shape)))
        np.put_along_axis(late_s, some, random.delay_s, axis=1)
        delays = {channel: np.repeat(each, len(some), axis=0) for channel, each in others.items()}
        delays[random.on] = delays.get(random.on, 0.0) + late_s.reshape(-1, *shape)
        parts.append(step_s_of(built, SeedDelays.of(delays)))
    return np.concatenate(parts)
