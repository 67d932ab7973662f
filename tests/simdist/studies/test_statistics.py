"""The statistics of the studies against tables, simulation and what they promise of the edges."""

import math

import numpy as np
import pytest

from simdist.studies import statistics


@pytest.mark.parametrize(("n_free", "quantile"), [(1, 12.7062), (4, 2.7764), (19, 2.0930), (1e9, 1.959964)])
def test_student_quantile_is_that_of_the_tables(n_free: float, quantile: float) -> None:
    assert statistics.student_quantile(n_free) == pytest.approx(quantile, rel=2e-5)


def test_intervals_of_means_and_ratios_hold_the_truth_in_95_percent_of_the_cases() -> None:
    rng = np.random.default_rng(1)
    means = ratios = 0
    for _ in range(2000):
        above, below = rng.normal(3.0, 0.3, 40), rng.normal(2.0, 0.2, 40)
        low, high = statistics.mean_interval(above) or (0.0, 0.0)
        means += low <= 3.0 <= high
        low, high = statistics.ratio_interval(float(above.mean() / below.mean()), above, below) or (0.0, 0.0)
        ratios += low <= 1.5 <= high
    assert 0.935 < means / 2000 < 0.965
    assert 0.935 < ratios / 2000 < 0.965


def test_interval_of_a_few_samples_is_that_of_students_formula() -> None:
    samples = np.array([1.0, 2.0, 3.0, 4.0])  # mean 5/2, variance 5/3, t(3) = 3.1824
    half = 3.1824463 * math.sqrt(5 / 3) / 2
    assert statistics.mean_interval(samples) == pytest.approx((2.5 - half, 2.5 + half))
    ratio = statistics.ratio_interval(1.25, samples, np.full(4, 2.0))
    assert ratio == pytest.approx((1.25 * math.exp(-half / 2.5), 1.25 * math.exp(half / 2.5)))
    assert statistics.positive_interval(samples) == pytest.approx(
        (2.5 * math.exp(-half / 2.5), 2.5 * math.exp(half / 2.5))
    )


@pytest.mark.parametrize("factor", [1.0001, 2.0, 30.0, 1e6])
def test_intervals_of_times_and_of_their_ratios_are_positive(factor: float) -> None:
    few = np.array([1.0, factor])
    same = np.ones(2)
    found = [
        statistics.positive_interval(few),
        statistics.positive_interval(few, error=1e6),
        statistics.ratio_interval(float(few.mean()), few, same),
        statistics.ratio_interval(float(1 / few.mean()), same, few),
        statistics.widened(1.0, statistics.positive_interval(few / few.mean()), 10.0),
    ]
    for interval in found:
        assert interval is not None
        assert 0 < interval[0] < interval[1] < math.inf


def test_nothing_and_what_never_differs_have_intervals_without_width() -> None:
    assert statistics.positive_interval(np.zeros(3), error=1.0) == (0.0, 0.0)
    assert statistics.positive_interval(np.full(3, 0.125)) == (0.125, 0.125)
    assert statistics.ratio_interval(2.0, np.full(3, 2.0), np.ones(3)) == (2.0, 2.0)


def test_single_sample_has_no_interval() -> None:
    one = np.array([2.0])
    assert statistics.mean_interval(one) is None
    assert statistics.ratio_interval(1.0, one, one) is None
    assert statistics.widened(2.0, None, 3.0) is None


def test_resampled_interval_holds_the_middle_of_the_resamples_made_wider() -> None:
    resamples = np.linspace(1.0, 2.0, 1001)
    assert statistics.resampled_interval(1.5, resamples, widening=2.0) == pytest.approx((0.55, 2.45))


def test_what_is_undefined_is_nan() -> None:
    assert math.isnan(statistics.relative_error(1.0, 0.0))
    assert math.isnan(statistics.median(np.array([])))
    assert math.isnan(statistics.correlation(np.array([1.0, 2.0]), np.array([3.0, 3.0])))


def test_listed_student_quantiles_are_those_of_scipy() -> None:
    stdtrit = pytest.importorskip("scipy.special").stdtrit
    for n_free in range(1, 52):
        assert statistics.student_quantile(n_free) == pytest.approx(float(stdtrit(n_free, 0.975)), rel=1e-14)
