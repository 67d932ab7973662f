"""The latency and bandwidth that explain several times best: two numbers, found by trying."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from simdist.scenario import Link

_MOST = 300  # tries
_NEAR = 1e-4  # of a factor


def fitted_line(start: Link, ratios: Callable[[Link], list[float]]) -> Link:
    """Return the line whose times are nearest to those measured, in the sum of the squared logarithms of the ratios.

    Args:
        start: A line that is not too far off.
        ratios: Of a link -> measured / predicted times.

    Source:
        Nelder, Mead, A Simplex Method for Function Minimization, The Computer Journal 7, 1965.
    """
    from scipy.optimize import minimize  # takes half a second

    def miss(factors: NDArray[np.float64]) -> float:
        return math.fsum(math.log(ratio) ** 2 for ratio in ratios(_line(factors)))

    first = np.log([max(start.latency_s, 1e-6), start.bandwidth_Bps])
    found = minimize(miss, first, method="Nelder-Mead", options={"maxfev": _MOST, "xatol": _NEAR, "fatol": _NEAR**2})
    return _line(found.x)


def _line(factors: NDArray[np.float64]) -> Link:
    latency_s, bandwidth_Bps = np.exp(np.clip(factors, -30, 40)).tolist()
    return Link(latency_s=float(f"{latency_s:.4g}"), bandwidth_Bps=float(f"{bandwidth_Bps:.6g}"))
