"""How late noise alone makes a rank: the threshold of delays that count.

Nothing is taken to be normal; the delays themselves say how they scatter. With n steps, m ranks, and alpha the
probability of a false alarm in a whole job without stragglers:

* The *usual* delay of a rank is the lower median over its steps. By chance it is above x if k = n - floor((n - 1) / 2)
  of n delays are, so the probability p that one delay is above x must satisfy P(Binomial(n, p) >= k) = alpha / m. x is
  where a share p of all residuals (delays less the usual one of their rank) lie above. The typical other rank, with
  which it is compared, errs too, by sqrt(1 + 3 / (m - 1)); and residuals about the median of few steps are too small,
  by sqrt(n / (n - 2)).
* A *single* delay has as many chances as there are steps and ranks. The tail is taken for exponential, as heavy as the
  bulk shows: it halves from the median Q2 to the third quartile Q3, and so with every Q3 - Q2 more. A share
  alpha / (n m) is above Q2 + (Q3 - Q2) log2(n m / (2 alpha)), whose second term is stretched by 1 + 2 / sqrt(n m)
  because quartiles err. So that frequent stragglers do not hide among themselves, quartiles are those of the delays
  below the widest gap in the upper 40 % of all. Noise with a heavier tail than the exponential one still looks like
  stragglers.

Source:
    David & Nagaraja, Order Statistics, 3rd ed. 2003, section 2.1: the distribution of an order statistic.
"""

import math

import numpy as np

from simdist.profiles.kineto.columns import Floats

#: Probability that a job without stragglers is said to have one, of each channel and kind.
FALSE_ALARM = 0.01

_NOISE = 0.6  # share of delays that are noise, at least
_FEWEST = 3  # steps; in fewer nothing is usual


def lower_median_s(seconds: Floats, *, axis: int = 0) -> Floats:
    """Return the median; of an even number the lower one, so that being late in half of the steps is not usual."""
    return np.asarray(np.quantile(seconds, 0.5, axis=axis, method="lower"))


def by_chance_usually_s(delay_s: Floats) -> float:
    """Return how much later than the typical other rank noise alone may make a rank usually.

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
    share = float(betaincinv(above, n_steps - above + 1, FALSE_ALARM / n_ranks))
    residual_s = delay_s - lower_median_s(delay_s)
    stretch = math.sqrt((1 + 3 / (n_ranks - 1)) * n_steps / (n_steps - 2))
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
    """Return what none of so many delays is above, if the tail of this noise is exponential."""
    middle_s, third_s = np.quantile(noise_s, [0.5, 0.75])
    stretch = 1 + 2 / math.sqrt(len(noise_s))
    return float(middle_s + (third_s - middle_s) * math.log2(count / (2 * FALSE_ALARM)) * stretch)
