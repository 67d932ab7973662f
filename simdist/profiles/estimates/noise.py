"""How late noise alone makes a rank: the threshold above which a delay counts.

No distribution is assumed to be normal: the tests use the scatter of the delays themselves. The probability of finding
a straggler in a job without one is `FALSE_ALARM`, divided among the tests. Let n be the number of steps, m the number
of ranks, and alpha the share of one test.

**Usually.** The *usual* delay of a rank is the lower median, over its steps, of its time beyond the median of the other
ranks in the same step. A slowdown of all ranks in a step does not affect it. By chance the usual delay is above x if
k = n - floor((n - 1) / 2) of n values are above x. So the probability p that one value is above x must satisfy
P(Binomial(n, p) >= k) = alpha / m, where alpha is also divided by the 3 channels. If noise is correlated over several
steps, n is the equivalent number of independent steps. A residual is a value minus the usual delay of its rank. x is
the value that a share p of all residuals exceed, times two factors: sqrt(n / (n - 2)), as residuals about the median
of few steps are too small, and 1 + 2 / sqrt(n m), as quantiles have errors.

**Once.** Each rank may have a *single* delay in each step, so chance has n m attempts. Let x(1) >= x(2) >= ... be the
sorted delays. The spacings D(j) = j (x(j) - x(j + 1)) of exponential noise are independent, and exponential with equal
means. For a tail of index xi, as in a generalized Pareto distribution, their mean is proportional to j^-xi. Stragglers
are further above the noise than the spacings predict: of the k = j + g - 1 delays above x(j + g), j are above x(j) with
probability P(Binomial(k, S) >= j), where S = (1 + xi y / s)^(-1 / xi) is the chance that one of them exceeds x(j + g)
by y = x(j) - x(j + g), and s is the mean of the spacings there.

* The spacings from D(j + g) to D(8 (j + g) + 200) predict s and xi, but none below the median. So the j delays do not
  hide themselves, regardless of their sizes. A second prediction adds D(1) to D(j - 1): delays of one size scatter by
  as much as the noise, and show that its tail is light. The smaller probability counts.
* xi is unknown. Values from -0.2 to 1 are weighted by the likelihood of the spacings and by a prior (normal, mean 0.05,
  standard deviation 0.15). It covers the light tail of normal noise and the tail of lognormal noise with sigma 1. With
  M spacings, the probability S^j is replaced by its mean over the error of s, (1 - j ln(S) / M)^-M.
* j has the share 6 / (pi j)^2 of all false alarms. g is 1, 2, 4 and 8, with 0.6, 0.3, 0.3 and 0.3 of them: large delays
  of the noise must not hide late ones above them, and most false alarms occur for several g. The least probable delays
  are split off. The rest is tested again, until nothing is improbable.
* If the delays split off are more than a tenth of all, they must also be closer to each other than to the noise. Rare
  pauses of many sizes are noise, though not all of one kind.
* If more than half of all delays are exactly equal, as on hosts that never pause, they contain no information on a
  tail. Then the other delays are stragglers if they are at most a tenth of all, or stand apart as above.

The noise of some ranks may be wider than that of others. Delays are then measured in units of the noise of their own
rank, to the extent that chance does not explain the difference.

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

#: Probability of finding a straggler in a job without one.
FALSE_ALARM = 0.05
#: The part of it for ranks that are usually late. The rest is for single delays.
USUALLY = 0.01

_CHANNELS = 3  # host, compute, io
_FEWEST = 3  # steps; fewer do not show a usual delay
_NOISE = 0.6  # share of delays that are noise, at least
_RARE = 0.1  # share of delays that are stragglers even if they have many sizes
_TAILS = np.linspace(-0.2, 1.0, 25)  # xi
_LIKELY_TAIL = 0.05, 0.15  # mean and standard deviation of the prior
_REACH = 8, 200  # number of spacings that predict those above: slope and minimum
_FEWEST_SPACINGS = 2
_GAPS = {1: 0.6, 2: 0.3, 4: 0.3, 8: 0.3}  # g -> share of false alarms; many occur in several tests
_SPREAD_ERROR = 1.6  # times 1 / sqrt(n_steps): relative error of the width of a rank's noise
_NARROWEST = 0.1  # of the scale of all delays: the width of hosts that hardly pause is clock error
_LEAST_EVIDENCE = 2.0  # times what chance explains, for ranks to differ
_MOST_DOUBLINGS = 60
_BISECTIONS = 10
_DECIMALS = 9  # a profiler counts nanoseconds at best


def lower_median_s(seconds: Floats, *, axis: int = 0) -> Floats:
    """Return the median, of an even number the lower one: being late in half of the steps is not usual."""
    return np.asarray(np.quantile(seconds, 0.5, axis=axis, method="lower"))


def beyond_others_s(delay_s: Floats) -> Floats:
    """Return the delay of each rank beyond the median of the others in the same step, `[n_steps, n_ranks]`."""
    others = [np.median(np.delete(delay_s, rank, axis=1), axis=1) for rank in range(delay_s.shape[1])]
    return delay_s - np.stack(others, axis=1)


def by_chance_usually_s(delay_s: Floats) -> float:
    """Return the threshold of usual delays: the largest delay beyond the median of the others that noise explains.

    Args:
        delay_s: Delays `[n_steps, n_ranks]`.

    Returns:
        Seconds; infinite with fewer than three steps or two ranks.
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
    """Return the number of independent steps that one correlated step is worth: (1 - r) / (1 + r).

    r is the correlation of consecutive steps, the median over ranks. It is corrected for the bias of few steps, and
    reduced by the correlation that chance explains.
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


def _widths(delay_s: Floats) -> Floats:
    """Return the width of each rank's noise, relative to a typical rank, `[n_ranks]`.

    The width is the mean distance from the median, over the half of a rank's delays that are nearest to it. It is at
    least a tenth of the scale of all delays. Differences between the logarithms of widths are shrunk towards 0 by the
    share of their variance that chance explains.

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
    """Return the threshold of single delays: noise does not explain larger ones.

    Args:
        delay_s: Delays beyond the usual one, of any shape.
        alarm: Probability that noise alone exceeds it.

    Returns:
        Seconds, in the gap below the smallest delay that counts; infinite if none counts.
    """
    descending_s = np.sort(_without_ties(delay_s), axis=None)[::-1]
    n_all = len(descending_s)
    n_late = 0
    while n_found := _split_off(descending_s, n_late, n_all, alarm):
        n_late += n_found
    return float(descending_s[n_late - 1 : n_late + 1].mean()) if n_late else math.inf


def told_from_s(noise_s: Floats, late_s: Floats, *, alarm: float = FALSE_ALARM) -> float:
    """Return the smallest further delay that would be told from this noise; infinite if none would.

    Args:
        noise_s: Delays without those of stragglers, of any shape.
        late_s: Delays that are told from it, `[n]`. A further one of their size is, too.
        alarm: Probability that noise alone exceeds it.
    """
    if noise_s.size < 2:
        return math.inf
    known_s = np.concatenate([noise_s.ravel(), late_s])
    most_s = float(noise_s.max())
    spread_s = max(most_s - float(np.median(noise_s)), 1e-9)
    low_s = most_s
    high_s = max(most_s, float(late_s.min())) if len(late_s) else most_s + spread_s
    for _ in range(_MOST_DOUBLINGS):
        if _is_told(known_s, high_s, alarm):
            break
        low_s = high_s
        high_s = most_s + 2 * max(spread_s, high_s - most_s)
    else:
        return math.inf
    for _ in range(_BISECTIONS):
        middle_s = (low_s + high_s) / 2
        if _is_told(known_s, middle_s, alarm):
            high_s = middle_s
        else:
            low_s = middle_s
    return high_s


def _is_told(known_s: Floats, delay_s: float, alarm: float) -> bool:
    return delay_s > by_chance_once_s(np.append(known_s, delay_s), alarm=alarm)


def late_once(delay_s: Floats, *, alarm: float = FALSE_ALARM) -> NDArray[np.bool_]:
    """Tell which single delays noise does not explain, `[n_steps, n_ranks]`.

    Args:
        delay_s: Delays beyond the usual one, `[n_steps, n_ranks]`.
        alarm: Probability of a false alarm from noise alone.
    """
    spread_s = _without_ties(delay_s)
    in_widths = spread_s / _widths(spread_s)
    return np.asarray(in_widths > by_chance_once_s(in_widths, alarm=alarm))


def _without_ties(delay_s: Floats) -> Floats:
    """Spread delays that a clock rounded evenly over the tick before, because ties would look like gaps."""
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


def _split_off(descending_s: Floats, n_late: int, n_all: int, alarm: float) -> int:
    """Return how many of the largest delays stand apart from the others, after those already found to be late.

    Args:
        descending_s: All delays, sorted.
        n_late: Number of delays already found to be late.
        n_all: Number of delays. At least the share `_NOISE` of them is noise.
        alarm: Probability that noise alone stands apart.
    """
    delay_s = descending_s[n_late:]
    middle = len(delay_s) // 2
    n_above = min(middle, int(np.count_nonzero(delay_s > delay_s[middle])))
    n_most = min(n_above, int((1 - _NOISE) * n_all) - n_late)
    if n_most < 1:
        return 0
    place = np.arange(1, n_above + 1)
    spacing_s = place * (delay_s[:n_above] - delay_s[1 : n_above + 1])
    if n_above < middle and n_most == n_above and n_above + n_late <= _RARE * n_all:
        return n_above
    chance = np.ones(n_most)
    for n_gaps, share in _GAPS.items():
        _test(spacing_s, n_gaps, chance, share=share, alarm=alarm)
    if n_above < middle and n_most == n_above:
        chance[-1] = 0.0
    for at in np.argsort(chance, kind="stable").tolist():
        if chance[at] > alarm:
            break
        if n_late + at + 1 <= _RARE * n_all or _stand_together(spacing_s[: at + 1], alarm):
            return int(at) + 1
    return 0


def _test(spacing_s: Floats, n_gaps: int, chance: Floats, *, share: float, alarm: float) -> None:
    """Lower the chances of delays that are further above the noise than it explains.

    Args:
        spacing_s: Spacings from the largest delay on, times their places.
        n_gaps: g: the noise begins so many places below.
        chance: Chance that the largest delays are noise, by their number, corrected for the number of tests.
        share: Share of all false alarms for this g.
        alarm: Larger chances do not count.
    """
    late = np.arange(1, 1 + min(len(chance), len(spacing_s) - n_gaps + 1))
    for with_late in (False, True):
        left = late
        for tails in (_TAILS[:1], _TAILS):  # what the lightest tail explains, all tails do
            n_tests = (math.pi * left) ** 2 / 6 / share
            found = n_tests * _chance(spacing_s, left, n_gaps, with_late=with_late, tails=tails)
            left = left[found <= alarm]
        chance[left - 1] = np.minimum(chance[left - 1], found[found <= alarm])


def _chance(spacing_s: Floats, late: NDArray[np.int64], n_gaps: int, *, with_late: bool, tails: Floats) -> Floats:
    """Return the probability that the largest delays of noise are so far above the delay `n_gaps` places below.

    Args:
        spacing_s: Spacings from the largest delay on, times their places.
        late: j: numbers of largest delays, ascending, `[n]`.
        n_gaps: g.
        with_late: The spacings between these delays are those of noise, too.
        tails: Possible xi.
    """
    from scipy.special import betainc

    if not len(late):
        return np.zeros(0)
    behind = late + n_gaps - 1
    last = np.minimum(len(spacing_s), _REACH[0] * behind + _REACH[1])
    spacing_s = spacing_s[: last[-1]]
    place = np.arange(1.0, len(spacing_s) + 1)
    sums_s = _sums(spacing_s * np.exp(np.outer(tails, np.log(place))))
    logs = _sums(np.log(place))
    distance_s = _sums(spacing_s / place)
    n_known = (last - behind).astype(np.float64)
    known_s = sums_s[:, last] - sums_s[:, behind]
    log = logs[last] - logs[behind]
    is_enough = n_known >= _FEWEST_SPACINGS
    if with_late:
        n_known = n_known + late - 1
        known_s = known_s + sums_s[:, late - 1]
        log = log + logs[late - 1]
    n_known = np.maximum(n_known, 1.0)
    known_s = np.maximum(known_s, 1e-300)
    mean, deviation = _LIKELY_TAIL
    tails = tails[:, None]
    weight = -0.5 * ((tails - mean) / deviation) ** 2 + tails * log - n_known * np.log(known_s)
    weight = np.exp(weight - weight.max(axis=0))
    scale_s = known_s / n_known * behind**-tails
    heavy = np.maximum(tails, 1e-6)
    minus_log = np.log1p(heavy * (distance_s[behind] - distance_s[late - 1]) / scale_s) / heavy  # -ln(S)
    single = np.exp(-n_known / late * np.log1p(late * minus_log / n_known))
    found = (weight * betainc(late, n_gaps, single)).sum(axis=0) / weight.sum(axis=0)
    return np.where(is_enough, found, 1.0)


def _sums(values: Floats) -> Floats:
    """Return the sums of the first 0, 1, ... values along the last axis."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)


def _stand_together(spacing_s: Floats, alarm: float) -> bool:
    """Tell whether the last spacing, below a group of delays, is larger than predicted from those in the group."""
    n_within = len(spacing_s) - 1
    within_s = float(spacing_s[:-1].sum())
    if not n_within:
        return True
    by_chance = -n_within * math.log1p(float(spacing_s[-1]) / max(within_s, 1e-300))
    return by_chance < math.log(6 * alarm / (math.pi * len(spacing_s)) ** 2)
