"""What uncertain rates and recoveries leave open: a job under failures, and under draws of what is uncertain.

A draw takes a place in every range, as in `simdist.studies.uncertainty`: all schedules and policies get the same ones.
The job suffers the failures of the same seeds once as stated and once for each draw, in a length that meets enough of
them. Steps that take longer in a draw let it train as much less; its goodput stays.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from simdist.scenario.failures import Failures, OnFailure
from simdist.scenario.scenario import Scenario
from simdist.studies import uncertainty
from simdist.studies.statistics import TIMES_OF_DRAWS, Interval, Samples
from simdist.studies.suffering import (
    SteadySchedule,
    best_interval,
    for_search,
    scaled,
    suffer,
    time_between_failures_s,
    under,
)
from simdist.studies.uncertainty import Quantity

_N_FAILURES = 150  # that the job meets in each draw
_N_ON_CURVE = 50  # likewise, at each of many rates
_OF_CAUSES = ("failures", "causes")
_RATE = "rate"


@dataclass(frozen=True, slots=True)
class DrawnJob:
    """A job under draws.

    Args:
        places: Where each draw lies in the range of a quantity, by name.
        goodput: Goodput less that of the stated values, `[n_draws]`; None if neither rates nor recovery are uncertain.
        trained: What is trained per second, over that of the stated values, `[n_draws]`.
    """

    places: Mapping[str, Samples]
    goodput: Samples | None
    trained: Samples

    def goodput_range(self, center: float, chance: Interval | None) -> tuple[Interval, dict[str, float]] | None:
        """Return between which ends goodput lies with 90 %, and the share of each cause."""
        if self.goodput is None:
            return None
        (low, high), shares = _within(center, self.goodput, chance, self.places)
        return (max(low, 0.0), min(high, 1.0)), shares

    def difference_range(self, base: "DrawnJob", center: float, chance: Interval | None) -> Interval | None:
        """Return the same of a difference of goodputs."""
        if self.goodput is None or base.goodput is None:
            return None
        return _within(center, self.goodput - base.goodput, chance, self.places)[0]

    def speedup_range(
        self, base: "DrawnJob", center: float, chance: Interval | None
    ) -> tuple[Interval, dict[str, float]]:
        """Return the same of a speed-up, and the share of each cause."""
        changes = center * (self.trained / base.trained - 1)
        return uncertainty.spread(center, changes, chance, self.places)


def _within(
    center: float, changes: Samples, chance: Interval | None, places: Mapping[str, Samples]
) -> tuple[Interval, dict[str, float]]:
    return uncertainty.spread(center, changes, chance, places, adds=True)


@dataclass(frozen=True, slots=True)
class FailureDraws:
    """FailureDraws of what is uncertain of a scenario's failures.

    Args:
        scenario: It.
        quantities: What is uncertain.
        n_draws: FailureDraws.
        failures: Of each draw; none if nothing is uncertain.
    """

    scenario: Scenario
    quantities: tuple[Quantity, ...]
    n_draws: int
    failures: tuple[Failures, ...]

    @classmethod
    def of(cls, scenario: Scenario, *, n_others: int = 0, rates: bool = True) -> "FailureDraws":
        """Draw.

        Args:
            scenario: It.
            n_others: Other quantities that are drawn with them.
            rates: Whether rates are drawn, too.
        """
        found = tuple(each for each in uncertainty.quantities_of_failures(scenario) if rates or not _is_rate(each.path))
        n = uncertainty.n_draws(len(found) + n_others)
        at = cls(scenario, found, n, ()).places
        drawn = [
            uncertainty.drawn(scenario, {each: at[each.name][i] for each in found}).failures
            for i in range(n if found else 0)
        ]
        return cls(scenario, found, n, tuple(each for each in drawn if each is not None))

    @property
    def places(self) -> dict[str, Samples]:
        """Where each draw lies in the range of a quantity, by name."""
        seed = self.scenario.seed
        return {each.name: uncertainty.places(each.name, seed=seed, n=self.n_draws) for each in self.quantities}

    def under(self, policy: OnFailure) -> list[Failures]:
        """Return the failures of each draw with a policy."""
        return [under(each, policy) for each in self.failures]


def _is_rate(path: Sequence[str | int]) -> bool:
    return tuple(path[:2]) == _OF_CAUSES and path[-1] == _RATE


def draws_for(scenario: Scenario, trained: Iterable[SteadySchedule]) -> FailureDraws:
    """Return the draws of a scenario's failures that go with those of the steps of schedules."""
    n_others = max((len(each.drawn) - len(TIMES_OF_DRAWS) for each in trained if each.drawn), default=0)
    return FailureDraws.of(scenario, n_others=n_others)


def drawn_job(draws: FailureDraws, policy: OnFailure, trained: SteadySchedule) -> DrawnJob | None:
    """Return a job under draws; None if nothing of it is uncertain."""
    if not (draws.quantities or trained.drawn):
        return None
    steps = {name: np.resize(values, draws.n_draws) for name, values in trained.drawn.items()}
    longer, stated = (steps.pop(name, np.ones(draws.n_draws)) for name in TIMES_OF_DRAWS)
    faster = stated / longer
    if not draws.quantities:
        return DrawnJob(steps, None, faster)
    as_stated = _failures(draws.scenario, policy)
    met = for_search(draws.scenario, as_stated, trained, n_failures=_N_FAILURES)
    usual = suffer(as_stated, *met)
    found = [suffer(each, *met) for each in draws.under(policy)]
    goodput = np.array([each.goodput.mean() for each in found])
    per_s = np.array([each.trained_per_s.mean() for each in found])
    usual_per_s = float(usual.trained_per_s.mean())
    trained_more = per_s / usual_per_s if usual_per_s else np.ones(draws.n_draws)
    return DrawnJob(steps | draws.places, goodput - usual.goodput.mean(), trained_more * faster)


def _failures(scenario: Scenario, policy: OnFailure) -> Failures:
    assert scenario.failures is not None
    return under(scenario.failures, policy)


def between_failures_range_s(draws: FailureDraws, trained: SteadySchedule) -> Interval | None:
    """Return between which times between failures the truth lies with 90 %; None if no rate is uncertain."""
    found = _by_time_between(draws, trained)
    return (found[0][0], found[-1][0]) if found else None


def _by_time_between(draws: FailureDraws, trained: SteadySchedule) -> list[tuple[float, Failures]]:
    """Return the draws with the middle 90 % of times between failures, the shortest first; none if all are equal."""
    times = sorted(
        ((time_between_failures_s(each, trained.job), each) for each in draws.failures), key=lambda each: each[0]
    )
    if not times or times[0][0] == times[-1][0]:
        return []
    n_left_out = int(uncertainty.TAIL * len(times))
    return times[n_left_out : len(times) - n_left_out]


def best_steps_range(
    draws: FailureDraws, policy: OnFailure, trained: SteadySchedule, best_steps: int
) -> tuple[int, int] | None:
    """Return the best steps between checkpoints at both ends of the time between failures; None if it is known.

    Args:
        draws: Of rates.
        policy: What the job does about failures.
        trained: The job.
        best_steps: Best steps as stated.
    """
    found = _by_time_between(draws, trained)
    if not found:
        return None
    ends = [under(each, policy) for _, each in (found[0], found[-1])]
    best = [best_interval(each, *for_search(draws.scenario, each, trained)) for each in ends]
    known = [best_steps, *(each for each in best if each is not None)]
    return min(known), max(known)


def goodput_range_at(
    draws: FailureDraws, policy: OnFailure, trained: SteadySchedule, *, factor: float, center: float
) -> Interval | None:
    """Return between which ends goodput lies with 90 % at a multiple of the stated rates; None if it is known.

    Args:
        draws: Without rates, which the factor states.
        policy: What the job does about failures.
        trained: The job.
        factor: Of the rates.
        center: Goodput as stated.
    """
    if not draws.failures:
        return None
    as_stated = scaled(_failures(draws.scenario, policy), factor)
    met = for_search(draws.scenario, as_stated, trained, n_failures=_N_ON_CURVE)
    found = np.array([suffer(scaled(each, factor), *met).goodput.mean() for each in draws.under(policy)])
    changes = found - suffer(as_stated, *met).goodput.mean()
    low, high = np.quantile(changes, [uncertainty.TAIL, 1 - uncertainty.TAIL], method="hazen").tolist()
    return max(0.0, center + min(low, 0.0)), min(1.0, center + max(high, 0.0))


def break_even_range_s(
    draws: FailureDraws,
    one: tuple[OnFailure, SteadySchedule],
    base: tuple[OnFailure, SteadySchedule],
    points: Sequence[tuple[float, float, float]],
) -> Interval | None:
    """Return between which times between failures two rows change places, with 90 %; None if nothing leaves it open.

    The speed-up's logarithm at the two rates around the stated place is that of each draw, and a line between them.

    Args:
        draws: Without rates, whose doubt leaves the place as it is.
        one: Policy and schedule.
        base: Those of the baseline.
        points: Factor of the rates, time between failures and speed-up of each point of the curve.
    """
    around = next((pair for pair in pairwise(points) if (pair[0][2] - 1) * (pair[1][2] - 1) < 0), None)
    if around is None or not draws.failures:
        return None
    left, right = (_gains(draws, one, base, factor) for factor, _, _ in around)
    log_s = [math.log(between_s) for _, between_s, _ in around]
    with np.errstate(divide="ignore", invalid="ignore"):
        places = log_s[0] + left / (left - right) * (log_s[1] - log_s[0])
    known = places[np.isfinite(places)]
    if not known.size:
        return None
    low, high = np.exp(np.quantile(known, [uncertainty.TAIL, 1 - uncertainty.TAIL], method="hazen")).tolist()
    return low, high


def _gains(
    draws: FailureDraws, one: tuple[OnFailure, SteadySchedule], base: tuple[OnFailure, SteadySchedule], factor: float
) -> Samples:
    """Return the speed-up's logarithm of each draw at a multiple of the stated rates."""
    per_s = []
    for policy, trained in (one, base):
        found = [scaled(each, factor) for each in draws.under(policy)]
        as_stated = scaled(_failures(draws.scenario, policy), factor)
        met = for_search(draws.scenario, as_stated, trained, n_failures=_N_FAILURES)
        per_s.append(np.array([suffer(each, *met).trained_per_s.mean() for each in found]))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(per_s[0] / per_s[1]))
