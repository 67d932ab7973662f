"""Intervals of a rate from counted events, of a share from counted outcomes, and of a median from few samples.

n events in the component-time T, at a constant rate, have the 95 % interval

    from  q(n, 2.5 %) / T   to  q(n + 1, 97.5 %) / T

with the quantiles q(shape, p) of the Gamma distribution, which are half of chi-square ones with twice as many degrees
of freedom. It is exact: it contains the rate in 95 % of all cases or more. No events give 0 to 3.69 / T.

A share has the interval of Clopper and Pearson, which is exact likewise.

The interval of a median has order statistics as its ends, so it holds for every distribution. Fewer than 6 samples have
none of 95 %.

Source:
    Garwood, Fiducial limits for the Poisson distribution, Biometrika 28, 1936; Clopper & Pearson, The use of confidence
    or fiducial limits illustrated in the case of the binomial, Biometrika 26, 1934; Conover, Practical Nonparametric
    Statistics, 3rd ed. 1999, section 3.2.
"""

from collections.abc import Sequence
from math import comb

_LOW = 0.025
_HIGH = 0.975
_FEWEST = 6  # 1 - 2 / 2**6 > 95 %


def event_bounds(n_events: int) -> tuple[float, float]:
    """Return the 95 % interval of the expected number of events, of which `n_events` were seen.

    >>> [round(end, 3) for end in event_bounds(0)], [round(end, 3) for end in event_bounds(10)]
    ([0.0, 3.689], [4.795, 18.39])
    """
    from scipy.special import gammaincinv

    low = float(gammaincinv(n_events, _LOW)) if n_events else 0.0
    return low, float(gammaincinv(n_events + 1, _HIGH))


def share_bounds(n: int, n_all: int) -> tuple[float, float]:
    """Return the 95 % interval of the share of an outcome that was seen `n` times of `n_all`.

    >>> [round(end, 3) for end in share_bounds(8, 10)]
    [0.444, 0.975]
    """
    from scipy.special import betaincinv

    low = float(betaincinv(n, n_all - n + 1, _LOW)) if n else 0.0
    high = float(betaincinv(n + 1, n_all - n, _HIGH)) if n < n_all else 1.0
    return low, high


def median_event_bound(n_events: int) -> float:
    """Return the expected number of events that is as likely too small as too large, if `n_events` were seen.

    It is the median of Gamma(n + 1/2), above 0 for no events.

    >>> round(median_event_bound(0), 4)
    0.2275
    """
    from scipy.special import gammaincinv

    return float(gammaincinv(n_events + 0.5, 0.5))


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the median of samples; None of fewer than 6.

    >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (1.0, 6.0)
    """
    n = len(samples)
    if n < _FEWEST:
        return None
    below = 0  # the samples that can be left out at each end
    tail = 1 / 2**n
    while tail + comb(n, below + 1) / 2**n <= _LOW:
        below += 1
        tail += comb(n, below) / 2**n
    ordered = sorted(samples)
    return ordered[below], ordered[n - 1 - below]
