"""The statistics of the studies: 95 % intervals of means over seeds, and errors of a simulation against a measurement.

    interval of a mean     mean +- h with h = t(n - 1) s / sqrt(n), with the standard deviation s of n samples
    interval of a ratio    of means of paired samples b and s, r = mean(b) / mean(s), by the delta method: h is that of
                           the mean of the residuals (b - r s) / mean(s)

`t` is the 97.5 % quantile of Student's distribution. Times and their ratios r are positive, and so are their intervals:
from r exp(-h / r) to r exp(h / r), the interval of log r by the delta method. It is r +- h where h is small.

Source:
    Student, The Probable Error of a Mean, Biometrika 6, 1908; Cochran, Sampling Techniques, 3rd ed. 1977, chapter 6,
    of ratios.
"""

import math
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Samples: TypeAlias = NDArray[np.float64]
Interval: TypeAlias = tuple[float, float]

#: The 97.5 % quantile of the standard normal distribution: `student_quantile` of many degrees of freedom.
NORMAL_QUANTILE = 1.959964

#: Keys of `simdist.studies.measuring.ScheduleTimes.drawn` that are seconds per step.
TIMES_OF_DRAWS = ("step", "stated")

_CONFIDENCE = 0.975  # quantile at the upper end of the middle 95 %
# fmt: off
_STUDENT = (  # the quantile at 1, 2, ... degrees of freedom, as scipy has it, which takes half a second to import
    12.706204736174694, 4.302652729749462, 3.1824463052837078, 2.7764451051977934, 2.5705818356363146,
    2.4469118511449786, 2.364624251592784, 2.306004135204166, 2.262157162798205, 2.228138851986274, 2.200985160091639,
    2.1788128296672284, 2.1603686564627913, 2.144786687917804, 2.131449545559776, 2.1199052992212546,
    2.1098155778333156, 2.1009220402410382, 2.0930240544083087, 2.085963447265864, 2.0796138447276795,
    2.0738730679040254, 2.0686576104190486, 2.0638985616280245, 2.0595385527532972, 2.0555294386428735,
    2.0518305164802846, 2.0484071417952454, 2.045229642132703, 2.0422724563012378, 2.039513446396408,
    2.0369333434601016, 2.0345152974493383, 2.0322445093177186, 2.030107928250343, 2.0280940009804502,
    2.0261924630291093, 2.0243941639119694, 2.022690920036761, 2.021075390306273, 2.019540970441376,
    2.0180817028184443, 2.016692199227824, 2.0153675744437636, 2.014103388880846, 2.012895598919429,
    2.0117405137297655, 2.010634757624232, 2.0095752371292392, 2.008559112100761,
)
# fmt: on
_MIDDLE = (2.5, 97.5)  # percentiles that hold 95 %
_WIDE = 0.5
_MOST_LOG = 100.0  # of a ratio of which nothing is known


@cache
def student_quantile(n_free: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution with `n_free` degrees of freedom.

    >>> round(student_quantile(19), 3)
    2.093
    """
    if n_free in range(1, len(_STUDENT) + 1):
        return _STUDENT[int(n_free) - 1]
    from scipy.special import stdtrit

    return float(stdtrit(n_free, _CONFIDENCE))


def mean_interval(samples: Samples, *, error: float = 0.0) -> Interval | None:
    """Return the 95 % confidence interval of the mean of samples `[n]`; None of a single one.

    Args:
        samples: Their differences are chance.
        error: Standard error of the mean that they do not show.

    >>> mean_interval(np.array([1.0, 1.0, 1.0]))
    (1.0, 1.0)
    """
    return _around(float(samples.mean()), samples, error)


def share_of_one(interval: Interval | None) -> Interval | None:
    """Return what of an interval is between 0 and 1, for shares.

    >>> share_of_one((-0.2, 0.9))
    (0.0, 0.9)
    """
    return interval and (max(0.0, interval[0]), min(1.0, interval[1]))


def positive_interval(samples: Samples, *, error: float = 0.0) -> Interval | None:
    """Return the 95 % confidence interval of the mean of samples `[n]` that are positive, such as times.

    Args:
        samples: Their differences are chance.
        error: Standard error of the mean that they do not show.

    >>> low, high = positive_interval(np.array([1.0, 3.0]))
    >>> round(low, 4), round(low * high, 6)
    (0.0035, 4.0)
    """
    return _positive(float(samples.mean()), samples, error)


def ratio_interval(ratio: float, above: Samples, below: Samples, *, error: float = 0.0) -> Interval | None:
    """Return the 95 % confidence interval of a ratio of means of paired, positive samples; None of a single pair.

    Args:
        ratio: mean(above) / mean(below).
        above: Samples `[n]`.
        below: Samples `[n]`.
        error: Standard error of the ratio that they do not show.
    """
    return _positive(ratio, (above - ratio * below) / float(below.mean()), error)


def _around(center: float, samples: Samples, error: float) -> Interval | None:
    half = _half(samples, error)
    return None if half is None else (center - half, center + half)


def _positive(center: float, samples: Samples, error: float) -> Interval | None:
    half = _half(samples, error)
    if half is None:
        return None
    factor = math.exp(min(half / center, _MOST_LOG)) if half and center > 0 else 1.0
    return center / factor, center * factor


def _half(samples: Samples, error: float) -> float | None:
    """Return half the width of the interval of a mean."""
    n = len(samples)
    if n < 2:
        return None
    return math.hypot(student_quantile(n - 1) * samples.std(ddof=1) / np.sqrt(n), NORMAL_QUANTILE * error)


def resampled_interval(center: float, resamples: Samples, *, widening: float) -> Interval:
    """Return the interval around `center` that holds the middle 95 % of resamples `[n]`, made wider by a factor."""
    low, high = (center + widening * (np.percentile(resamples, _MIDDLE) - center)).tolist()
    return low, high


def widened(center: float, interval: Interval | None, factor: float) -> Interval | None:
    """Return an interval with ends whose ratios to `center`, all positive, are to the power of `factor`; None for None.

    >>> widened(2.0, (1.0, 3.0), 2.0)
    (0.5, 4.5)
    """
    if interval is None or interval[0] == interval[1]:
        return interval
    return center * (interval[0] / center) ** factor, center * (interval[1] / center) ** factor


def is_wide(center: float, interval: Interval) -> bool:
    """Tell whether an interval around `center` is so wide that little is known: a quarter of it to one side.

    >>> is_wide(1.0, (0.9, 1.11)), is_wide(1.61, (0.55, 4.74))
    (False, True)
    """
    return interval[1] - interval[0] > _WIDE * center


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
    a = a - a.mean()
    b = b - b.mean()
    return ratio(float(a @ b), float(np.sqrt((a @ a) * (b @ b))))
