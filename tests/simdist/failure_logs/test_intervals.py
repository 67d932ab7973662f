"""Intervals of rates and medians: against scipy's chi-square, and by the probability that they contain the truth."""

import math

import numpy as np
import pytest
from scipy.stats import chi2, poisson

from simdist.failure_logs.intervals import event_bounds, median_event_bound, median_interval


@pytest.mark.parametrize("n", [0, 1, 2, 7, 148, 10_000])
def test_bounds_are_half_of_chi_square_quantiles(n):
    low, high = event_bounds(n)
    assert low == pytest.approx(chi2.ppf(0.025, 2 * n) / 2 if n else 0.0)
    assert high == pytest.approx(chi2.ppf(0.975, 2 * n + 2) / 2)
    assert low < max(n, median_event_bound(n)) < high


@pytest.mark.parametrize("expected", [0.01, 0.5, 3.0, 3.5, 3.7, 12.0, 60.0])
def test_bounds_contain_each_expected_number_in_95_percent(expected):
    seen = np.arange(400)
    contains = [low <= expected <= high for low, high in map(event_bounds, seen.tolist())]
    assert poisson.pmf(seen, expected)[contains].sum() >= 0.95


def test_no_events_give_a_bound_and_a_rate_above_0():
    assert event_bounds(0) == (0.0, pytest.approx(-math.log(0.025)))
    assert median_event_bound(0) > 0


@pytest.mark.parametrize(("n", "below"), [(6, 0), (8, 0), (9, 1), (12, 2), (20, 5), (100, 39)])
def test_the_interval_of_a_median_is_the_narrowest_of_order_statistics_that_holds(n, below):
    assert median_interval(list(range(n))) == (below, n - 1 - below)
    outside = sum(math.comb(n, i) for i in range(below + 1)) / 2**n
    assert outside <= 0.025 < outside + math.comb(n, below + 1) / 2**n


def test_few_samples_tell_no_interval_of_the_median():
    assert median_interval([1.0] * 5) is None
