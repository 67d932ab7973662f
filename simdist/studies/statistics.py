"""The statistics of the studies: 95 % intervals of means over seeds, and errors of a simulation against a measurement.

    interval of a mean     mean +- t(n - 1) s / sqrt(n), with the standard deviation s of n samples
    interval of a ratio    of means of paired samples b and s, r = mean(b) / mean(s), by the delta method: that of the
                           mean of the residuals (b - r s) / mean(s), put around r

`t` is the 97.5 % quantile of Student's distribution.

Source:
    Student, The Probable Error of a Mean, Biometrika 6, 1908; Cochran, Sampling Techniques, 3rd ed. 1977, chapter 6,
    of ratios.
"""

from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Samples: TypeAlias = NDArray[np.float64]
Interval: TypeAlias = tuple[float, float]

NORMAL_QUANTILE = 1.959964
"""The 97.5 % quantile of the standard normal distribution: `student_quantile` of many degrees of freedom."""

_CONFIDENCE = 0.975  # quantile at the upper end of the middle 95 %
_MIDDLE = (2.5, 97.5)  # percentiles that hold 95 %


@cache
def student_quantile(n_free: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution with `n_free` degrees of freedom.

    >>> round(student_quantile(19), 3)
    2.093
    """
    from scipy.special import stdtrit

    return float(stdtrit(n_free, _CONFIDENCE))


def mean_interval(samples: Samples) -> Interval | None:
    """Return the 95 % confidence interval of the mean of samples `[n]`; None of a single one.

    >>> mean_interval(np.array([1.0, 1.0, 1.0]))
    (1.0, 1.0)
    """
    return _around(float(samples.mean()), samples)


def ratio_interval(ratio: float, above: Samples, below: Samples) -> Interval | None:
    """Return the 95 % confidence interval of a ratio of means of paired samples; None of a single pair.

    Args:
        ratio: mean(above) / mean(below).
        above: Samples `[n]`.
        below: Samples `[n]`.
    """
    return _around(ratio, (above - ratio * below) / float(below.mean()))


def _around(center: float, samples: Samples) -> Interval | None:
    n = len(samples)
    if n < 2:
        return None
    half = float(student_quantile(n - 1) * samples.std(ddof=1) / np.sqrt(n))
    return center - half, center + half


def resampled_interval(center: float, resamples: Samples, *, widening: float) -> Interval:
    """Return the interval around `center` that holds the middle 95 % of resamples `[n]`, made wider by a factor."""
    low, high = (center + widening * (np.percentile(resamples, _MIDDLE) - center)).tolist()
    return low, high


def widened(center: float, interval: Interval | None, factor: float) -> Interval | None:
    """Return an interval around `center` whose ends are `factor` times as far from it; None of None.

    >>> widened(2.0, (1.5, 3.0), 2.0)
    (1.0, 4.0)
    """
    return interval and (center + factor * (interval[0] - center), center + factor * (interval[1] - center))


def median(values: Samples) -> float:
    """Return the median; NaN of no values."""
    return float(np.median(values)) if values.size else np.nan


def ratio(part: float, whole: float) -> float:
    """Return `part / whole`; NaN if `whole` is 0."""
    return part / whole if whole else np.nan


def relative_error(simulated: float, measured: float) -> float:
    """Return (simulated - measured) / measured; NaN if `measured` is 0.

    >>> relative_error(1.5, 2.0)
    -0.25
    """
    return ratio(simulated - measured, measured)


def correlation(a: Samples, b: Samples) -> float:
    """Return Pearson's correlation of samples `[n]`; NaN if all of `a` or all of `b` are equal.

    >>> correlation(np.array([1.0, 2.0, 3.0]), np.array([4.0, 3.0, 2.0]))
    -1.0
    """
    a, b = a - a.mean(), b - b.mean()
    return ratio(float(a @ b), float(np.sqrt((a @ a) * (b @ b))))
