"""Recurring delays: periodic, growing from step to step, or on all ranks at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from simdist.profiles.kineto.columns import Floats

_FEWEST_EVENTS = 3
_UNEVEN = 0.2  # of the mean distance: largest difference between the longest and the shortest distance
_BY_CHANCE = 0.05
_FEWEST_STEPS = 16  # for a trend
_SURELY_CORRELATED = 0.95


@dataclass(frozen=True, slots=True)
class Trend:
    """A delay that grows or shrinks from step to step.

    Args:
        line_s: Fitted size in each step, on a straight line, `[n_steps]`.
        growth_s: Growth per step, in seconds.
    """

    line_s: Floats
    growth_s: float


def period(steps: Sequence[int]) -> float | None:
    """Return the mean distance between events if the distances are about equal, else None.

    Three events at exactly equal distances suffice. Distances that differ must be within a fifth of their mean, and
    closer to each other than random events would be.

    Example:
        >>> period([11, 23, 35])
        12.0
        >>> period([9, 30, 52, 70, 90])
        20.25
        >>> period([5, 9, 12, 23])
    """
    distances = [second - first for first, second in pairwise(steps)]
    if len(steps) < _FEWEST_EVENTS or min(distances) < 2:
        return None
    mean = sum(distances) / len(distances)
    uneven = (max(distances) - min(distances)) / mean
    # n - 1 random distances lie within a window of this width with about this probability (order statistics)
    by_chance = len(distances) * uneven ** (len(distances) - 1)
    return mean if uneven <= _UNEVEN and by_chance <= _BY_CHANCE else None


def trend(more_s: Floats, *, least_s: float, alarm: float) -> Trend | None:
    """Return the trend of a delay; None if it has none.

    The slope divided by its standard error follows Student's t. With residuals of a correlation rho from step to step,
    n steps count as n (1 - rho) / (1 + rho). Estimates of rho from residuals about a line are too low by about
    (2 + 4 rho) / n and have an error of 1 / sqrt(n); both are added. A straight line must also fit better than any
    sudden change from one level to another.

    Args:
        more_s: Delay in each step, `[n_steps]`.
        least_s: Smallest change over all steps that counts.
        alarm: Upper bound of the probability that noise alone has a trend.
    """
    n_steps = len(more_s)
    if n_steps < _FEWEST_STEPS:
        return None
    seconds = np.clip(more_s, *np.quantile(more_s, [0.05, 0.95]))
    at = np.arange(n_steps) - (n_steps - 1) / 2
    growth_s = float((at * seconds).sum() / (at**2).sum())
    line_s = seconds.mean() + growth_s * at
    if abs(growth_s) * (n_steps - 1) <= least_s:
        return None
    rest_s = seconds - line_s
    square = float((rest_s**2).sum())
    if square:
        found = float((rest_s[1:] * rest_s[:-1]).sum() / square)
        at_most = found + (2 + 4 * found) / n_steps + 1 / math.sqrt(n_steps)
        correlation = min(max(at_most, 0.0), _SURELY_CORRELATED)
        n_counting = n_steps * (1 - correlation) / (1 + correlation)
        freedom = max(1.0, n_counting - 2)
        error_s = np.sqrt(square / freedom / (at**2).sum())
        # upper bound of the tail of Student's t
        by_chance = (1 + (growth_s / error_s) ** 2 / freedom) ** (-freedom / 2)
        if by_chance > alarm or square >= _least_square_of_two_levels(seconds):
            return None
    return Trend(line_s, growth_s)


def _least_square_of_two_levels(seconds: Floats) -> float:
    """Return the smallest sum of squares about two levels, with a change from one to the other at some step."""
    n_steps = len(seconds)
    before = np.arange(1, n_steps)
    sum_before = np.cumsum(seconds)[:-1]
    sum_behind = seconds.sum() - sum_before
    explained = sum_before**2 / before + sum_behind**2 / (n_steps - before)
    return float((seconds**2).sum() - explained.max())
