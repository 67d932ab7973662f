"""How late noise alone makes a rank: the threshold of delays that count.

Nothing is taken to be normal; the delays themselves say how they scatter. With n steps, m ranks, and alpha the
probability of a false alarm in a whole job without stragglers:

* What a rank *usually* takes beyond the median of the others in the same step is the lower median over its steps; what
  lengthens a step on all ranks alike is none of it. By chance it is above x if k = n - floor((n - 1) / 2) of n values
  are, so the probability p that one is above x must satisfy P(Binomial(n, p) >= k) = alpha / (3 m), with the 3
  channels. x is where a share p of all residuals (values less the usual one of their rank) lie above; stretched by
  sqrt(n / (n - 2)), as residuals about the median of few steps are too small, and 1 + 2 / sqrt(n m), as quantiles err.
* A *single* delay has as many chances as there are steps and ranks. The tail is as heavy as the upper half of the noise
  shows: an exponential one has a value with a share 2^-h above it h - 1 times as far beyond the median Q2 as the
  third quartile Q3 is, and in a generalized Pareto one each halving adds 2^xi times what the one before did. xi is
  from the probability-weighted moments of what is above Q2, and taken to be from 0 to 0.35. A share alpha / (3 n m) is
  above the end of the tail, stretched by 1 + 3 / sqrt(n m) because quartiles err. So that frequent stragglers do not
  hide among themselves, all this is of the delays below the widest gap in the upper 40 % of all.

Source:
    David & Nagaraja, Order Statistics, 3rd ed. 2003, section 2.1: the distribution of an order statistic.
    Hosking & Wallis, Technometrics 29 (1987) 339: the generalized Pareto distribution, by probability-weighted moments.
"""

import math

import numpy as np

from simdist.profiles.kineto.columns import Floats

#: Probability that a job without stragglers is said to have one of a kind, on any channel.
FALSE_ALARM = 0.01

_ALARM = FALSE_ALARM / 3  # host, compute, io
_HEAVIEST = 0.35  # xi; few delays may show any
_NOISE = 0.6  # share of delays that are noise, at least
_FEWEST = 3  # steps; in fewer nothing is usual


def lower_median_s(seconds: Floats, *, axis: int = 0) -> Floats:
    """Return the median; of an even number the lower one, so that being late in half of the steps is not usual."""
    return np.asarray(np.quantile(seconds, 0.5, axis=axis, method="lower"))


def beyond_others_s(delay_s: Floats) -> Floats:
    """Return the excess of ranks over the median of the others in the same step, `[n_steps, n_ranks]`."""
    others = [np.median(np.delete(delay_s, rank, axis=1), axis=1) for rank in range(delay_s.shape[1])]
    return delay_s - np.stack(others, axis=1)


def by_chance_usually_s(delay_s: Floats) -> float:
    """Return how much later than the median of the others noise alone may make a rank usually.

    Args:
        delay_s: Delays `[n_steps, n_ranks]`.

    Returns:
        Seconds; infinite where the steps or ranks are too few to be usual, or others.
    """
    from scipy.special import betaincinv

    n_steps, n_ranks = delay_s.shape
    if n_steps < _FEWEST or n_ranks < 2:
        return math.inf
    above = n_steps - (n_steps - 1) // 2
    share = float(betaincinv(above, n_steps - above + 1, _ALARM / n_ranks))
    beyond_s = beyond_others_s(delay_s)
    residual_s = beyond_s - lower_median_s(beyond_s)
    stretch = math.sqrt(n_steps / (n_steps - 2)) * (1 + 2 / math.sqrt(residual_s.size))
    return float(np.quantile(residual_s, 1 - share, method="higher")) * stretch


def by_chance_once_s(delay_s: Floats) -> float:
    """Return how late noise alone may make one of all ranks in one of all steps.

    Args:
        delay_s: Delays beyond the usual one, of any shape.
    """
    ordered_s = np.sort(delay_s, axis=None)
    least = math.ceil(_NOISE * len(ordered_s))
    gaps_s = np.diff(ordered_s[least - 1 :])
    below = least + int(np.argmax(gaps_s)) if len(gaps_s) else len(ordered_s)
    return min(_tail_end_s(ordered_s[:below], len(ordered_s)), _tail_end_s(ordered_s, len(ordered_s)))


def _tail_end_s(noise_s: Floats, count: int) -> float:
    """Return a bound that no delay of this many exceeds, if the tail continues like the upper half."""
    middle_s, third_s = np.quantile(noise_s, [0.5, 0.75])
    halvings = math.log2(count / (2 * _ALARM))
    stretch = 1 + 3 / math.sqrt(len(noise_s))
    xi = _shape(noise_s[noise_s > middle_s] - middle_s)
    longer = math.expm1(xi * halvings * math.log(2)) / math.expm1(xi * math.log(2)) if xi else halvings
    return float(middle_s + (third_s - middle_s) * longer * stretch)


def _shape(beyond_s: Floats) -> float:
    """Return xi of a generalized Pareto distribution, 0 of an exponential one.

    Args:
        beyond_s: Excesses over a threshold, in ascending order.
    """
    if not len(beyond_s):
        return 0.0
    above = 1 - (np.arange(len(beyond_s)) + 0.65) / len(beyond_s)
    mean_s = float(beyond_s.mean())
    weighted_s = float((beyond_s * above).mean())
    return min(max(0.0, 2 - mean_s / max(mean_s - 2 * weighted_s, 1e-12)), _HEAVIEST)
