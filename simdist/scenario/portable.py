"""log, exp and the normal quantile with the same bits on every machine.

numpy's `log` and `exp` take different code on different CPUs and differ in the last bit: the same scenario would give
different delays here and there. These use only operations that IEEE 754 rounds exactly (+ - * / sqrt) and exact ones
(frexp, ldexp, rint), one numpy call each, so that nothing is fused. They are right to a few units in the last place.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]

# ln 2 = _LN2_HIGH + _LN2_LOW; the high part has 33 bits, so that its product with an exponent is exact.
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_SQRT_HALF = 0.7071067811865476
_LOG_SERIES = [2.0 / (2 * n + 1) for n in range(11, 0, -1)]  # 2 (z/3 + z^2/5 + ...) = atanh without its first term
_EXP_SERIES = [1 / 6227020800, 1 / 479001600, 1 / 39916800, 1 / 3628800, 1 / 362880, 1 / 40320, 1 / 5040, 1 / 720]
_EXP_SERIES += [1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0]  # 1/13! to 1/0!


def log(x: _Floats) -> _Floats:
    """Return the natural logarithm of finite `x` > 0.

    x = m 2^k with m in [sqrt(1/2), sqrt(2)), f = m - 1, s = f / (2 + f): log m = 2 atanh s.

    Source:
        The splitting into high and low parts is that of fdlibm, e_log.c.
    """
    m, k = np.frexp(x)
    small = m < _SQRT_HALF
    f = np.where(small, 2.0 * m, m) - 1.0
    exponent = (k - small).astype(np.float64)
    s = f / (2.0 + f)
    z = s * s
    half_square = 0.5 * f * f
    tail = s * (half_square + z * _horner(_LOG_SERIES, z)) + exponent * _LN2_LOW
    return exponent * _LN2_HIGH - ((half_square - tail) - f)


def exp(x: _Floats) -> _Floats:
    """Return e^x; infinity above 709.78, and 0 below -745.13.

    x = k ln 2 + r with |r| <= ln(2) / 2: e^x = 2^k (1 + r + r^2/2 + ... + r^13/13!).
    """
    x = np.clip(x, -800.0, 800.0)
    k = np.rint(x / (_LN2_HIGH + _LN2_LOW))
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(_horner(_EXP_SERIES, r), k.astype(np.int32))


def normal_quantile(p: _Floats) -> _Floats:
    """Return z such that a standard normal variable is below z with probability `p`, 0 < p < 1.

    Source:
        Wichura, Algorithm AS 241: Percentage Points of the Normal Distribution, Applied Statistics 37 (1988): PPND16.
    """
    q = p - 0.5
    z = np.empty_like(q)
    central = np.abs(q) <= 0.425
    r = 0.180625 - q[central] * q[central]
    above, below = _fraction(_CENTRAL, r)
    z[central] = above * q[central] / below
    tail_q = q[~central]
    r = np.sqrt(-log(np.where(tail_q < 0, p[~central], 1.0 - p[~central])))
    tail = np.where(r <= 5.0, np.divide(*_fraction(_TAIL, r - 1.6)), np.divide(*_fraction(_FAR_TAIL, r - 5.0)))
    z[~central] = np.where(tail_q < 0, -tail, tail)
    return z


def _fraction(coefficients: Sequence[tuple[float, float]], x: _Floats) -> tuple[_Floats, _Floats]:
    """Evaluate the numerator and the denominator of a fraction of polynomials."""
    return _horner([above for above, _ in coefficients], x), _horner([below for _, below in coefficients], x)


def _horner(coefficients: Sequence[float], x: _Floats) -> _Floats:
    """Evaluate a polynomial, highest power first."""
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result *= x
        result += coefficient
    return result


# AS 241's rational approximations: coefficients of numerator and denominator, highest power first.
_CENTRAL = [
    (2.5090809287301226727e3, 5.2264952788528545610e3),
    (3.3430575583588128105e4, 2.8729085735721942674e4),
    (6.7265770927008700853e4, 3.9307895800092710610e4),
    (4.5921953931549871457e4, 2.1213794301586595867e4),
    (1.3731693765509461125e4, 5.3941960214247511077e3),
    (1.9715909503065514427e3, 6.8718700749205790830e2),
    (1.3314166789178437745e2, 4.2313330701600911252e1),
    (3.3871328727963666080e0, 1.0),
]
_TAIL = [
    (7.74545014278341407640e-4, 1.05075007164441684324e-9),
    (2.27238449892691845833e-2, 5.47593808499534494600e-4),
    (2.41780725177450611770e-1, 1.51986665636164571966e-2),
    (1.27045825245236838258e0, 1.48103976427480074590e-1),
    (3.64784832476320460504e0, 6.89767334985100004550e-1),
    (5.76949722146069140550e0, 1.67638483018380384940e0),
    (4.63033784615654529590e0, 2.05319162663775882187e0),
    (1.42343711074968357734e0, 1.0),
]
_FAR_TAIL = [
    (2.01033439929228813265e-7, 2.04426310338993978564e-15),
    (2.71155556874348757815e-5, 1.42151175831644588870e-7),
    (1.24266094738807843860e-3, 1.84631831751005468180e-5),
    (2.65321895265761230930e-2, 7.86869131145613259100e-4),
    (2.96560571828504891230e-1, 1.48753612908506148525e-2),
    (1.78482653991729133580e0, 1.36929880922735805310e-1),
    (5.46378491116411436990e0, 5.99832206555887937690e-1),
    (6.65790464350110377720e0, 1.0),
]
