"""How late noise alone makes a rank: the threshold of delays that count.

Nothing is taken to be normal; the delays themselves say how they scatter. A job without stragglers is said to have one
with the probability `FALSE_ALARM`, shared by the tests of it. With n steps, m ranks, and alpha the share of one test:

**Usually.** What a rank *usually* takes beyond the median of the others in the same step is the lower median over its
steps; what lengthens a step on all ranks alike is none of it. By chance it is above x if k = n - floor((n - 1) / 2) of
n values are, so the probability p that one is above x must satisfy P(Binomial(n, p) >= k) = alpha / m, with the 3
channels. Where noise lasts for several steps, n is the number of steps without memory that tell as much. x is where a
share p of all residuals (values less the usual one of their rank) lie above; stretched by sqrt(n / (n - 2)), as
residuals about the median of few steps are too small, and 1 + 2 / sqrt(n m), as quantiles err.

**Once.** A *single* delay has as many chances as there are steps and ranks. Let x(1) >= x(2) >= ... be the delays of
all. The spacings D(j) = j (x(j) - x(j + 1)) of exponential noise are independent, and exponential with one mean. In a
tail of index xi, as of a generalized Pareto distribution, their mean is proportional to j^-xi. Stragglers leave a gap
between themselves and the noise: with j of them above it, D(j) is far larger than the spacings below foretell.

* D(j) is foretold from spacings of smaller delays only: from D(j + 1) on, as many as 8 j + 200 reach, but none below
  the median. So stragglers above the gap do not hide it, however many and however late they are.
* xi is not known. Its values from -0.2 to 1 are weighted by a prior (normal, mean 0.08, standard deviation 0.2: from
  the light tail of normal noise to that of lognormal noise with sigma 1) and by the likelihood of the spacings. With M
  of them, of sum S after scaling, the probability of a spacing beyond z S / M is (1 + z / M)^-M. If the tail is heavy,
  spacings of few delays have one, too: z counts as j ln(1 + xi z / j) / xi.
* The test of D(j) has the share 6 / (pi j)^2 of 0.7 alpha. So that one delay in a gap does not hide it, the sums of 2
  and of 4 spacings in a row are tested as well, with 0.4 alpha each; most false alarms are in several of the tests. The
  most significant gap splits off what is above it; the rest is tested again, until no gap is significant.
* Delays above a gap that are more than a tenth of all must also be nearer to one another than to the noise: rare
  pauses of many sizes are noise, and not all of one kind.
* Where more than half of all delays are exactly alike, as those of hosts that never pause, they tell nothing of a
  tail. Then other delays are stragglers if they are at most a tenth of all, or stand apart as above.

Ranks whose noise is wider than that of others are compared in units of their own noise, as far as chance does not
explain the difference.

Source:
    David & Nagaraja, Order Statistics, 3rd ed. 2003, section 2.1: the distribution of an order statistic.
    Renyi, On the theory of order statistics, Acta Math. Hung. 4 (1953) 191: spacings of exponential variables.
    Beirlant, Dierckx, Goegebeur & Matthys, Tail index estimation and an exponential regression model, Extremes 2
    (1999) 177: spacings of other tails.
    Efron & Morris, Data analysis using Stein's estimator, JASA 70 (1975) 311: as far as chance does not explain.
"""

import math

import numpy as np
from numpy.typing import NDArray

from simdist.profiles.kineto.columns import Floats

#: Probability that a job without stragglers is said to have one.
FALSE_ALARM = 0.05
#: The part of it that is of ranks which are late usually; the rest is of single delays.
USUALLY = 0.01

_CHANNELS = 3  # host, compute, io
_FEWEST = 3  # steps; in fewer nothing is usual
_NOISE = 0.6  # share of delays that are noise, at least
_RARE = 0.1  # share of delays that are no noise even if they are of all sizes
_TAILS = np.linspace(-0.2, 1.0, 25)  # xi
_LIKELY_TAIL = 0.08, 0.2  # mean and standard deviation of the prior
_REACH = 8, 200  # spacings that foretell D(j): slope and least
_FEWEST_SPACINGS = 2
_GAPS = {1: 0.7, 2: 0.4, 4: 0.4}  # gaps in a row -> share of false alarms; the same ones set several off
_SPREAD_ERROR = 1.6  # times 1 / sqrt(n_steps): relative error of the width of a rank's noise
_NARROWEST = 0.1  # of the scale of all delays: of hosts that hardly pause, the width is that of their clocks
_LEAST_EVIDENCE = 2.0  # times what chance explains, for ranks to differ
_MOST_DOUBLINGS = 60
_DECIMALS = 9  # a profiler counts nanoseconds at best


def lower_median_s(seconds: Floats, *, axis: int = 0) -> Floats:
    """Return the median; of an even number the lower one, so that being late in half of the steps is not usual."""
    return np.asarray(np.quantile(seconds, 0.5, axis=axis, method="lower"))


def beyond_others_s(delay_s: Floats) -> Floats:
    """Return how much later each rank was than the median of the other ones in the same step, `[n_steps, n_ranks]`."""
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
    beyond_s = beyond_others_s(delay_s)
    residual_s = beyond_s - lower_median_s(beyond_s)
    n_free = max(_FEWEST, round(n_steps * _free(residual_s)))
    above = n_free - (n_free - 1) // 2
    share = float(betaincinv(above, n_free - above + 1, USUALLY / _CHANNELS / n_ranks))
    stretch = math.sqrt(n_steps / (n_steps - 2)) * (1 + 2 / math.sqrt(residual_s.size))
    return float(np.quantile(residual_s, 1 - share, method="higher")) * stretch


def _free(residual_s: Floats) -> float:
    """Return how many steps without memory tell as much as one of these, where noise lasts: (1 - r) / (1 + r).

    r is the correlation of a step with the next, the median over ranks, without the bias that few steps give it, as far
    as chance does not explain it.
    """
    n_steps, n_ranks = residual_s.shape
    centred = np.clip(residual_s, *np.quantile(residual_s, [0.1, 0.9], axis=0))
    centred = centred - centred.mean(axis=0)
    varies = (centred**2).sum(axis=0)
    together = (centred[1:] * centred[:-1]).sum(axis=0)
    r = float(np.median(np.divide(together, varies, out=np.zeros_like(varies), where=varies > 0)))
    r = r + (1 + 4 * max(0.0, r)) / n_steps - 1.25 / math.sqrt(n_steps * n_ranks)
    r = min(max(0.0, r), 0.9)
    return float((1 - r) / (1 + r))


def widths(delay_s: Floats) -> Floats:
    """Return how wide the noise of each rank is, against that of a typical one, `[n_ranks]`.

    The width is the mean distance from the median of the half of all delays that are nearest to it. Ranks differ
    by as much as their logarithms vary more than chance explains. A width far below the scale of all is that of none.

    Args:
        delay_s: Delays beyond the usual one, `[n_steps, n_ranks]`.
    """
    n_steps, n_ranks = delay_s.shape
    distance_s = np.sort(np.abs(delay_s - lower_median_s(delay_s)), axis=0)
    width_s = distance_s[: max(1, n_steps // 2)].mean(axis=0)
    middle_s, high_s = np.quantile(delay_s, [0.5, 0.9])
    width_s = np.maximum(width_s, _NARROWEST * float(high_s - middle_s))
    if n_ranks < 2 or n_steps < _FEWEST or not width_s.all():
        return np.ones(n_ranks)
    ratio = np.log(width_s) - float(np.median(np.log(width_s)))
    explained = _LEAST_EVIDENCE * _SPREAD_ERROR**2 / n_steps
    believed = max(0.0, 1 - explained / max(float(np.mean(ratio**2)), 1e-30))
    return np.asarray(np.exp(believed * ratio))


def by_chance_once_s(delay_s: Floats, *, alarm: float = FALSE_ALARM) -> float:
    """Return a limit between noise and single delays that noise does not explain.

    Args:
        delay_s: Delays beyond the usual one, of any shape.
        alarm: Probability that noise alone is above it.

    Returns:
        Seconds, in the gap below the least delay that counts; infinite if none counts.
    """
    descending_s = np.sort(_without_ties(delay_s), axis=None)[::-1]
    n_all = len(descending_s)
    n_late = 0
    while n_found := _split_off(descending_s, n_late, n_all, alarm):
        n_late += n_found
    return float(descending_s[n_late - 1 : n_late + 1].mean()) if n_late else math.inf


def told_from_s(noise_s: Floats, *, alarm: float = FALSE_ALARM) -> float:
    """Return how late a single delay would have to be in order to be told from this noise; infinite if nothing would.

    Args:
        noise_s: Delays that are no straggler's, of any shape.
        alarm: Probability that noise alone is above it.
    """
    noise_s = np.sort(_without_ties(noise_s), axis=None)[::-1]
    if len(noise_s) < 2:
        return math.inf
    spread_s = max(float(noise_s[0] - np.median(noise_s)), 1e-9)
    low = 0.0
    high = 1.0
    for _ in range(_MOST_DOUBLINGS):
        if _is_late(noise_s, float(noise_s[0]) + high * spread_s, alarm):
            break
        low = high
        high = 2 * high
    else:
        return math.inf
    for _ in range(10):
        middle = (low + high) / 2
        if _is_late(noise_s, float(noise_s[0]) + middle * spread_s, alarm):
            high = middle
        else:
            low = middle
    return float(noise_s[0]) + high * spread_s


def _is_late(noise_s: Floats, delay_s: float, alarm: float) -> bool:
    return _split_off(np.append(delay_s, noise_s), 0, len(noise_s) + 1, alarm, most=1) > 0


def late_once(delay_s: Floats, *, alarm: float = FALSE_ALARM) -> NDArray[np.bool_]:
    """Tell which single delays noise does not explain, `[n_steps, n_ranks]`.

    Args:
        delay_s: Delays beyond the usual one, likewise.
        alarm: Probability that one is told of noise alone.
    """
    spread_s = _without_ties(delay_s)
    in_widths = spread_s / widths(spread_s)
    return np.asarray(in_widths > by_chance_once_s(in_widths, alarm=alarm))


def _without_ties(delay_s: Floats) -> Floats:
    """Return delays that a clock rounded, spread evenly over the tick before: ties would look like gaps."""
    order = np.argsort(-delay_s, axis=None, kind="stable")
    descending_s = delay_s.ravel()[order]
    above_s = descending_s[descending_s > np.median(descending_s)]
    values_s, counts = np.unique(np.round(-above_s, _DECIMALS), return_counts=True)
    if len(values_s) < 2 or 2 * len(values_s) > len(above_s):
        return delay_s
    tick_s = float(np.diff(values_s).min())
    place = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    spread_s = delay_s.flatten()
    spread_s[order[: len(above_s)]] = above_s - tick_s * place
    return spread_s.reshape(delay_s.shape)


def _split_off(descending_s: Floats, n_late: int, n_all: int, alarm: float, most: int | None = None) -> int:
    """Return how many of the largest delays, behind those that are late already, stand apart from the others.

    Args:
        descending_s: All delays.
        n_late: How many of them are late already.
        n_all: Delays of which at least the share `_NOISE` is noise.
        alarm: Probability that noise alone stands apart.
        most: At most so many; None: as many as may be late.
    """
    delay_s = descending_s[n_late:]
    middle = len(delay_s) // 2
    n_above = min(middle, int(np.count_nonzero(delay_s > delay_s[middle])))
    n_most = min(n_above, int((1 - _NOISE) * n_all) - n_late, most or n_above)
    if n_most < 1:
        return 0
    place = np.arange(1, n_above + 1)
    spacing_s = place * (delay_s[:n_above] - delay_s[1 : n_above + 1])
    if n_above < middle and n_most == n_above and n_above + n_late <= _RARE * n_all:
        return n_above
    chance = np.ones(n_most)
    for n_gaps, share in _GAPS.items():
        _test(spacing_s, n_gaps, chance, share)
    if n_above < middle and n_most == n_above:
        chance[-1] = 0.0
    for at in np.argsort(chance, kind="stable").tolist():
        if chance[at] > alarm:
            break
        if n_late + at + 1 <= _RARE * n_all or _stand_together(spacing_s[: at + 1], alarm):
            return int(at) + 1
    return 0


def _test(spacing_s: Floats, n_gaps: int, chance: Floats, share: float) -> None:
    """Lower the chances of the first spacings where some in a row are larger than noise alone makes them.

    Args:
        spacing_s: Weighted by their places, from the largest delay on.
        n_gaps: How many in a row.
        chance: Of each of the first spacings, times the number of such tests; the largest in a row counts.
        share: Of all false alarms, for this number in a row.
    """
    n_most = min(len(chance), len(spacing_s) - n_gaps + 1)
    if n_most < 1:
        return
    first = np.arange(n_most)
    behind = first + n_gaps
    last = np.minimum(len(spacing_s), _REACH[0] * behind + _REACH[1])
    spacing_s = spacing_s[: last[-1]]
    place = np.arange(1, len(spacing_s) + 1)
    n_below = (last - behind).astype(np.float64)
    scale = np.exp(np.outer(_TAILS, np.log(place)))
    sum_s = np.cumsum(spacing_s * scale, axis=1)
    below_s = np.maximum(sum_s[:, last - 1] - sum_s[:, behind - 1], 1e-300)
    logs = np.cumsum(np.log(place))
    mean, deviation = _LIKELY_TAIL
    weight = -0.5 * ((_TAILS[:, None] - mean) / deviation) ** 2
    weight = weight + _TAILS[:, None] * (logs[last - 1] - logs[behind - 1]) - n_below * np.log(below_s)
    weight = np.exp(weight - weight.max(axis=0))
    ratio = np.zeros_like(weight)
    heavy = np.maximum(_TAILS, 1e-6)[:, None]
    for at in (first + each for each in range(n_gaps)):
        of_gap = spacing_s[at] * scale[:, at] * n_below / below_s
        ratio += place[at] / heavy * np.log1p(heavy * of_gap / place[at])
    found = (weight * _above(ratio, n_below, n_gaps)).sum(axis=0) / weight.sum(axis=0)
    found = np.where(n_below >= _FEWEST_SPACINGS, found * (math.pi * place[:n_most]) ** 2 / 6 / share, 1.0)
    in_a_row = np.lib.stride_tricks.sliding_window_view(spacing_s, n_gaps)[:n_most]
    widest = np.minimum(first + in_a_row.argmax(axis=1), len(chance) - 1)
    np.minimum.at(chance, widest, found)


def _above(ratio: Floats, n_below: Floats, n_gaps: int) -> Floats:
    """Return with what probability the sum of some exponential variables is beyond a multiple of the mean of others.

    Args:
        ratio: The multiple.
        n_below: How many others there are.
        n_gaps: How many variables are summed.
    """
    n_others = np.maximum(n_below, 1.0)
    rest: Floats = ratio / (n_others + ratio)
    term: Floats = np.exp(-n_others * np.log1p(ratio / n_others))
    total: Floats = term.copy()
    for each in range(1, n_gaps):
        term = term * rest * (n_others + each - 1) / each
        total += term
    return total


def _stand_together(spacing_s: Floats, alarm: float) -> bool:
    """Tell whether the last spacing, below a group of delays, is larger than those within the group foretell."""
    n_within = len(spacing_s) - 1
    within_s = float(spacing_s[:-1].sum())
    if not n_within:
        return True
    by_chance = -n_within * math.log1p(float(spacing_s[-1]) / max(within_s, 1e-300))
    return by_chance < math.log(6 * alarm / (math.pi * len(spacing_s)) ** 2)
