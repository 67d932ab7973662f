"""Samples: quantiles at closed forms, even strata, longer ones begin with shorter ones, bits."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from timeouts import TIMEOUT_S

from simdist.settings.base import Settings
from simdist.sweeps.sampling import (
    Geometric,
    Integers,
    Linear,
    LognormalFactor,
    LogUniform,
    Sampling,
    Uniform,
    unit_cube,
)

SHARES = st.floats(0, 1, exclude_min=True, exclude_max=True)
each_kind = pytest.mark.parametrize("kind", ["random", "sobol"])


def points(kind, n, n_dimensions=2, seed=0):
    return np.array(list(unit_cube(Sampling(kind=kind, points=n, seed=seed), n_dimensions)))


# ---------------------------------------------------------------- quantiles


@pytest.mark.parametrize(
    ("distribution", "bounds", "u", "value"),
    [
        (Uniform(uniform=[2, 10]), (2.0, 10.0), 0.25, 4.0),
        (Uniform(uniform=[0, 1]), (0.0, 1.0), 0.5, 0.5),
        (LogUniform(log_uniform=[1, 100]), (1.0, 100.0), 0.5, 10.0),
        (LogUniform(log_uniform=[1e-3, 1e3]), (1e-3, 1e3), 1 / 6, 1e-2),
        (LognormalFactor(median=5, sigma=0.3), (5.0,), 0.5, 5.0),
        (LognormalFactor(median=1, sigma=2), (1.0,), 0.841344746068542948, 7.38906),  # Phi(1); e^2
        (LognormalFactor(median=1, sigma=2), (1.0,), 0.158655253931457051, 0.135335),  # Phi(-1); e^-2
        (Integers(integers=[1, 4]), (1.0, 4.0), 0.2499, 1),
        (Integers(integers=[1, 4]), (1.0, 4.0), 0.25, 2),
        (Integers(integers=[1, 4]), (1.0, 4.0), 0.75, 4),
        (Integers(integers=[1, 4]), (1.0, 4.0), 1 - 2**-53, 4),
    ],
)
def test_quantiles_at_closed_forms(distribution, bounds, u, value):
    assert distribution.quantile(u, bounds) == value


@given(SHARES, SHARES)
def test_quantiles_grow_and_stay_between_their_bounds(u, v):
    low, high = 0.1234567891, 7.654321987  # more digits than values have
    for distribution in (Uniform(uniform=[0, 1]), LogUniform(log_uniform=[1, 2])):
        first, second = sorted(distribution.quantile(share, (low, high)) for share in (u, v))
        assert low <= first <= second <= high
        assert distribution.quantile(min(u, v), (low, high)) == first


def test_whole_numbers_are_equally_likely():
    distribution = Integers(integers=[3, 9])
    drawn = [distribution.quantile(u, (3.0, 9.0)) for (u,) in points("sobol", 7 * 2**6, 1)]
    counts = np.bincount(drawn, minlength=10)[3:]
    assert counts.tolist() == pytest.approx([64] * 7, abs=1)


@pytest.mark.parametrize(
    ("distribution", "cdf"),
    [
        (Uniform(uniform=[0, 1]), lambda x: (x - 1) / 9),
        (LogUniform(log_uniform=[0, 1]), lambda x: math.log10(x)),
        (LognormalFactor(median=1, sigma=0.5), lambda x: 0.5 * math.erfc(-math.log(x) / 0.5 / math.sqrt(2))),
    ],
    ids=["uniform", "log_uniform", "lognormal"],
)
def test_the_distribution_function_of_2_to_the_m_sobol_values_is_off_by_no_more_than_a_point(distribution, cdf):
    """The distance of Kolmogorov and Smirnov: 1 / n if each of n equal strata has a point, 1.36 / sqrt(n) by chance."""
    n = 2**10
    bounds = (1.0,) if isinstance(distribution, LognormalFactor) else (1.0, 10.0)
    drawn = sorted(distribution.quantile(u, bounds) for (u,) in points("sobol", n, 1))
    for k, value in enumerate(drawn):
        assert k / n - 1e-5 < cdf(value) < (k + 1) / n + 1e-5


@pytest.mark.parametrize(
    ("rule", "low", "high", "numbers"),
    [
        (Linear(linear=[0, 1, 5]), 0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (Linear(linear=[1, 2, 2]), 1.0, 2.0, [1.0, 2.0]),
        (Linear(linear=[0, 1, 4]), 0.0, 1.0, [0.0, 0.333333, 0.666667, 1.0]),
        (Geometric(geometric=[1, 8, 4]), 1.0, 8.0, [1.0, 2.0, 4.0, 8.0]),
        (Geometric(geometric=[1, 8, 3]), 1e-3, 1e-1, [1e-3, 1e-2, 1e-1]),
        (Geometric(geometric=[1, 8, 2]), 0.123456789, 1.23456789, [0.123456789, 1.23456789]),
    ],
)
def test_spaced_values_begin_and_end_at_their_ends(rule, low, high, numbers):
    assert rule.numbers(low, high) == numbers


# ---------------------------------------------------------------- points


@each_kind
@pytest.mark.parametrize("n", [1, 7, 1024, 1025])
def test_a_longer_sample_begins_with_the_shorter_one(kind, n):
    assert np.array_equal(points(kind, 1500)[:n], points(kind, n))


@each_kind
def test_all_coordinates_are_inside(kind):
    found = points(kind, 5000, 3)
    assert found.shape == (5000, 3)
    assert ((found > 0) & (found < 1)).all()


@each_kind
def test_another_seed_gives_other_points_and_the_same_seed_the_same(kind):
    assert not np.intersect1d(points(kind, 50), points(kind, 50, seed=1)).size
    assert np.array_equal(points(kind, 50, seed=2**63 - 1), points(kind, 50, seed=2**63 - 1))


@pytest.mark.parametrize("m", [0, 1, 5, 11])
def test_each_of_2_to_the_m_equal_intervals_has_one_of_as_many_sobol_points(m):
    n = 2**m
    for coordinate in points("sobol", n, 6, seed=3).T:
        assert sorted(np.floor(coordinate * n)) == list(range(n))


def test_sobol_points_fill_a_square_more_evenly_than_random_ones():
    def largest_error(kind):
        found = points(kind, 2**10)
        shares = itertools.product(np.linspace(0.1, 0.9, 9), repeat=2)
        return max(abs((found < [a, b]).all(axis=1).mean() - a * b) for a, b in shares)

    assert largest_error("sobol") < 0.25 * largest_error("random")


def test_random_points_are_words_of_philox_as_published_bits():
    """The bits are the sample: exact, so that a folder is found again by another machine and another numpy."""
    words = np.random.Philox(key=np.array([5, 2**64 - 1], dtype=np.uint64)).random_raw(4)
    expected = [((int(word) >> 11) + 0.5) / 2**53 for word in words]
    assert points("random", 2, seed=5).ravel().tolist() == expected
    assert expected[0].hex() == "0x1.85892e1ce3750p-1"


def test_sobol_points_have_these_bits():
    assert [value.hex() for value in points("sobol", 2, 1, seed=5).ravel()] == [
        "0x1.85892e1ce3750p-1",
        "0x1.0b125c39c6ea0p-2",
    ]


def test_points_share_no_random_numbers_with_the_delays_of_their_seed():
    """Delays draw from the key (seed, number of the disturbance)."""
    delays = np.random.Philox(key=np.array([5, 0], dtype=np.uint64)).random_raw(1000)
    assert not np.intersect1d(points("random", 500, seed=5), (delays >> np.uint64(11)) * 2.0**-53 + 2.0**-54).size


FIRST_READ = """
import os, signal, sys, zipfile
from simdist.sweeps.sampling import Sampling, unit_cube

read = zipfile.ZipExtFile._read1
def once(self, n):
    zipfile.ZipExtFile._read1 = read
    {does}
    return read(self, n)
zipfile.ZipExtFile._read1 = once
print(len(set(map(tuple, unit_cube(Sampling(kind="sobol", points=64), 3)))), "points")
"""


def first_read(does: str) -> subprocess.CompletedProcess:
    """Make a sample in a new process, where scipy reads its table, and something happens meanwhile."""
    code = FIRST_READ.format(does=does)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)


def test_table_that_cannot_be_read_is_an_error_and_no_sample_of_equal_points():
    done = first_read("raise OSError('stale file handle')")
    assert done.returncode == 1, done.stdout
    assert "RunError: scipy could not read its table for Sobol's sequence" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_interrupt_while_the_table_is_read_gives_no_sample():
    done = first_read("os.kill(os.getpid(), signal.SIGINT)")
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert "KeyboardInterrupt" in done.stderr


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("cls", "keys", "message"),
    [
        (Uniform, {"uniform": [1]}, "uniform: [1]: write two values, [low, high]"),
        (LogUniform, {"log_uniform": 3}, "log_uniform: 3: write two values, [low, high]"),
        (Integers, {"integers": [1, 2, 3]}, "integers: [1, 2, 3]: write two values, [low, high]"),
        (LognormalFactor, {"median": 3}, "sigma: required key 'sigma' is missing: write e.g. sigma: 1.5"),
        (
            LognormalFactor,
            {"median": 3, "sigma": 0},
            "sigma: 0 is not a factor: write a finite number above 0, e.g. 1.5",
        ),
        (LognormalFactor, {"median": 3, "sigma": 11}, "sigma: 11: write at most 10"),
        (
            LognormalFactor,
            {"median": 3, "sigma": 1, "mean": 2},
            "mean: unknown key 'mean': did you mean 'median'?",
        ),
        (Linear, {"linear": [1, 2]}, "linear: [1, 2]: write two values and how many to list, [low, high, 5]"),
        (Geometric, {"geometric": [1, 2, 1]}, "geometric.2: 1: write at least 2"),
        (Sampling, {"kind": "latin"}, "kind: 'latin': write 'grid', 'random' or 'sobol'"),
        (Sampling, {"kind": "sobol"}, "points: how many sobol points? Write e.g. points: 256"),
        (Sampling, {"kind": "sobol", "points": 0}, "points: 0: write at least 1"),
        (
            Sampling,
            {"points": 3},
            "points: a grid has as many as its lists say: remove it, or write kind: random",
        ),
        (Sampling, {"kind": "random", "points": 3, "seed": -1}, "seed: -1: write at least 0"),
    ],
)
def test_a_wrong_setting_of_a_sample_is_refused(cls: type[Settings], keys, message):
    with pytest.raises(ValidationError) as caught:
        cls.model_validate(keys)
    (error,) = caught.value.errors()
    assert f"{'.'.join(map(str, error['loc']))}: {error['msg']}" == message


@pytest.mark.parametrize(
    ("rule", "bounds", "problem"),
    [
        (Uniform(uniform=["2 us", "1 us"]), (2.0, 1.0), "2 us is not below 1 us: write the lower one first"),
        (Integers(integers=[2, 2]), (2.0, 2.0), "2 is not below 2: write the lower one first"),
        (Linear(linear=[2, 1, 2]), (2.0, 1.0), "2 is not below 1: write the lower one first"),
        (LogUniform(log_uniform=[0, 1]), (0.0, 1.0), "0 has no logarithm: write a lower value above 0"),
        (Geometric(geometric=[0, 1, 2]), (0.0, 1.0), "0 has no logarithm: write a lower value above 0"),
        (LognormalFactor(median=0, sigma=1), (0.0,), "a median of 0 leaves nothing to vary: write one above 0"),
        (Uniform(uniform=[0, 1]), (1.0, 2.0), None),
        (LognormalFactor(median=1, sigma=1), (1.0,), None),
    ],
)
def test_bounds_that_make_no_sense_are_refused(rule, bounds, problem):
    assert rule.problem(bounds) == problem
