"""log, exp and the normal quantile: right to a few units in the last place, and the same bits everywhere."""

import math
import statistics

import numpy as np
import pytest

from simdist.scenario import portable


def error_in_ulp(values, expected):
    expected = np.array(expected)
    return np.max(np.abs(values - expected) / np.spacing(np.abs(expected)))


def test_log_is_right_to_2_ulp():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.random(5000), 1 + rng.normal(size=5000) / 1000, np.exp(rng.uniform(-700, 700, 5000))])
    assert error_in_ulp(portable.log(x), [math.log(value) for value in x]) <= 2


def test_exp_is_right_to_2_ulp():
    x = np.random.default_rng(0).uniform(-700, 700, 10_000)
    assert error_in_ulp(portable.exp(x), [math.exp(value) for value in x]) <= 2


def test_normal_quantile_is_right_to_10_ulp():
    p = np.concatenate([np.random.default_rng(0).random(5000), 2.0 ** -np.arange(2, 54), 1 - 2.0 ** -np.arange(2, 54)])
    normal = statistics.NormalDist()
    assert error_in_ulp(portable.normal_quantile(p), [normal.inv_cdf(value) for value in p]) <= 10


def test_normal_quantile_is_antisymmetric():
    p = np.arange(1, 2**10) / 2**10
    assert np.array_equal(portable.normal_quantile(p), -portable.normal_quantile(1 - p))


@pytest.mark.parametrize(
    ("x", "expected"), [(0.0, 1.0), (-1e308, 0.0), (1e308, math.inf), (710.0, math.inf), (-746.0, 0.0)]
)
def test_exp_at_the_ends(x, expected):
    assert portable.exp(np.array([x])) == [expected]


def test_log_of_1_is_0():
    assert portable.log(np.array([1.0, 5e-324])).tolist() == [0.0, math.log(5e-324)]


def test_bits_stay_the_same():
    x = np.array([0.1, 0.7, 1.5, 3e-17])
    found = [[float(value).hex() for value in f(x)] for f in (portable.log, portable.exp)]
    found.append([float(value).hex() for value in portable.normal_quantile(np.array([0.01, 0.5, 0.7, 1e-15]))])
    assert found == GOLDEN


GOLDEN = [
    ["-0x1.26bb1bbb55515p+1", "-0x1.6d3c324e13f50p-2", "0x1.9f323ecbf984cp-2", "-0x1.305cd839b424fp+5"],
    ["0x1.1aec7b35a00d4p+0", "0x1.01c2a61268987p+1", "0x1.1ed3fe64fc541p+2", "0x1.0000000000000p+0"],
    ["-0x1.29c5c4630ff0ep+1", "0x0.0p+0", "0x1.0c7e39582c5fap-1", "-0x1.fc3f007789667p+2"],
]
