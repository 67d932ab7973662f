"""What random disturbances do to a run in the mean, where that is known exactly: how many delays, how many seconds.

    kind          delays that begin in a rank-step      seconds in a rank-step
    transient     p                                     p d
    heavy_tail    p                                     p scale a / (a - 1), infinite for a shape a <= 1
    jitter        1                                     median exp(sigma^2 / 2)
    drawn         share above 0                         their mean
    pauses        1 / mean of every, the first random    mean of what is not covered / mean of every
    bursts        (1 - q) enter, at the start q         q d with q = enter / (enter + leave)

Delays are rare if runs have few of them, and heavy if few of them make most of the variance of a sum. Runs that have
not met such delays say little about the mean. The numbers above say it all the same.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simdist.scenario import disturbances as kinds
from simdist.scenario.disturbances import Disturbance
from simdist.scenario.portable import exp, normal_quantile

if TYPE_CHECKING:
    from simdist.scenario.quantiles import DelaySizes

# With more delays, sums over runs are near a normal distribution. Where runs seldom have two, differences between
# schedules come from delays that meet, which are far rarer.
_FEW_IN_A_RUN = 20.0
_FEW_IN_ALL_RUNS = 100.0
_SELDOM_TWO = 2.0
_HEAVY_SHAPE = 4.0  # a Pareto tail up to here has no fourth moment, so variances of samples are erratic
_HEAVY_KURTOSIS = 100.0
_HEAVY_SIGMA = 1.0  # a lognormal delay of this sigma has a kurtosis above 100
_LARGEST_SHARE = 0.01
_LEAST_WITH_VARIANCE = 2.0  # shape of a Pareto tail, not included


@dataclass(frozen=True, slots=True)
class ExpectedDelays:
    """The delays of one disturbance in a run, in the mean.

    Args:
        delays: How many begin, of all ranks.
        late_steps: How many steps of ranks are late; more than `delays` if a delay lasts for several steps.
        seconds: Of all delays of all ranks; infinite if single delays have no mean.
    """

    delays: float
    late_steps: float
    seconds: float


def expected_delays(disturbance: Disturbance, *, n_steps: int, n_ranks: int) -> ExpectedDelays | None:
    """Return what a disturbance does to a run in the mean; None if that is not known.

    Args:
        disturbance: The disturbance.
        n_steps: Steps of the run.
        n_ranks: Ranks that the disturbance selects.

    >>> expected_delays(kinds.Transient(probability=0.01, delay_s=2.0), n_steps=50, n_ranks=4)
    ExpectedDelays(delays=2.0, late_steps=2.0, seconds=4.0)
    """
    n = n_steps * n_ranks
    match disturbance:
        case kinds.Transient(probability=probability, delay_s=delay_s):
            return _independent(n, probability, delay_s)
        case kinds.HeavyTail(scale_s=scale_s, shape=shape, probability=probability):
            return _independent(n, probability, scale_s * shape / (shape - 1) if shape > 1 else math.inf)
        case kinds.Jitter(median_s=median_s, sigma=sigma):
            return _independent(n, 1.0, median_s * math.exp(sigma**2 / 2))
        case kinds.Drawn():
            sizes = _sizes(disturbance)
            if sizes is None:
                return None
            return _independent(n, sizes.share, sizes.mean_s if sizes.tail_shape > 1 else math.inf)
        case kinds.Pauses(every=every, first=None):
            share, mean_s = _not_covered(disturbance)
            return _independent(n, share / (math.fsum(every) / 2), mean_s)
        case kinds.Bursts(enter=enter, leave=leave, delay_s=delay_s):
            share = enter / (enter + leave)
            begun = n_ranks * (share + (n_steps - 1) * (1 - share) * enter)
            return ExpectedDelays(begun, n * share, n * share * delay_s)
        case _:
            return None


def _independent(n: int, probability: float, mean_s: float) -> ExpectedDelays:
    n_late = n * probability
    return ExpectedDelays(n_late, n_late, n_late * mean_s if n_late else 0.0)


def _sizes(drawn: kinds.Drawn) -> "DelaySizes | None":
    from simdist.scenario.quantiles import delay_sizes  # few scenarios need it

    return delay_sizes(drawn)


def _not_covered(pauses: kinds.Pauses) -> tuple[float, float]:
    """Return the share of pauses that delay, and the mean delay of these.

    Both lengths are uniform, L in [a, b] and C in [c, d]. Means of (L - C)^k where it is positive are differences of
    integrals of x^k, one for each range that is not a single number.
    """
    low, high = pauses.covered_s

    def mean(power: int) -> float:
        terms = [(1.0, 0.0)]
        order = power
        for first, last in (pauses.delay_s, (-high, -low)):
            if first == last:
                terms = [(weight, x + first) for weight, x in terms]
                continue
            order += 1
            ends = ((1 / (last - first), last), (-1 / (last - first), first))
            terms = [(weight * sign, x + end) for weight, x in terms for sign, end in ends]
        return math.fsum(weight * x**order / math.factorial(order) for weight, x in terms if x > 0)

    share = mean(0)
    return share, mean(1) / share if share else 0.0


def is_rare(found: ExpectedDelays, n_runs: int) -> bool:
    """Tell whether a run has few delays, and so have all runs together unless a run seldom has two."""
    few_in_all = found.delays < _SELDOM_TWO or found.delays * n_runs < _FEW_IN_ALL_RUNS
    return found.delays < _FEW_IN_A_RUN and few_in_all


def is_heavy(disturbance: Disturbance) -> bool:
    """Tell whether the largest of many delays make most of the variance of their sum."""
    match disturbance:
        case kinds.HeavyTail(shape=shape):
            return shape <= _HEAVY_SHAPE
        case kinds.Jitter(sigma=sigma):
            return sigma >= _HEAVY_SIGMA
        case kinds.Drawn():
            sizes = _sizes(disturbance)
            return sizes is not None and (sizes.kurtosis > _HEAVY_KURTOSIS or sizes.tail_shape <= _HEAVY_SHAPE)
        case _:
            return False


def long_delay_s(disturbance: Disturbance, n_delays: float) -> float:
    """Return a delay that one of this many exceeds, in the mean; that of one step."""
    share = min(0.5, 1 / n_delays) if n_delays > 0 else 0.5
    match disturbance:
        case kinds.Transient(delay_s=delay_s) | kinds.Bursts(delay_s=delay_s):
            return delay_s
        case kinds.Pauses():
            return _not_covered(disturbance)[1]
        case kinds.HeavyTail(scale_s=scale_s, shape=shape):
            return float(scale_s * share ** (-1 / shape))
        case kinds.Jitter(median_s=median_s, sigma=sigma):
            return median_s * float(exp(sigma * normal_quantile(np.array([1 - share])))[0])
        case kinds.Drawn():
            sizes = _sizes(disturbance)
            assert sizes is not None, "something is expected of it"
            return sizes.mean_s if disturbance.quantile is None else sizes.exceeded_by(share)
        case _:
            raise AssertionError(f"nothing is expected of {type(disturbance).__name__}")


def share_of_largest(disturbance: Disturbance) -> float | None:
    """Return which share of the mean the largest 1 % of delays carry, where they have no variance; else None.

    >>> share_of_largest(kinds.HeavyTail(scale_s=1.0, shape=1.5))
    0.21544346900318834
    """
    if isinstance(disturbance, kinds.HeavyTail) and not disturbance.never_delays:
        if disturbance.shape > _LEAST_WITH_VARIANCE:
            return None
        return 1.0 if disturbance.shape <= 1 else float(_LARGEST_SHARE ** (1 - 1 / disturbance.shape))
    if isinstance(disturbance, kinds.Drawn) and (sizes := _sizes(disturbance)):
        if sizes.tail_shape > _LEAST_WITH_VARIANCE:
            return None
        return 1.0 if sizes.tail_shape <= 1 else sizes.carried_by(_LARGEST_SHARE)
    return None
