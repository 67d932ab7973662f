"""When a clock ticks next after a time: one rule for those who write, price and perform a `Tick`."""

import numpy as np
from numpy.typing import NDArray

_SLACK = 1e-9  # of a period: a time that should fall on a tick may have been rounded to just after it


def next_tick(ready_s: NDArray[np.float64] | float, period_s: float) -> NDArray[np.float64]:
    """Return the number of the first tick that is not before `ready_s`; tick n is n periods after the start.

    >>> next_tick(np.array([0.0, 0.012, 0.015]), 0.005).tolist()
    [0.0, 3.0, 3.0]

    Sums of seconds are rounded. What is ready at a tick, but for that, has not missed it:

    >>> 0.1 + 0.2 > 0.3, float(next_tick(0.1 + 0.2, 0.3))
    (True, 1.0)
    """
    return np.asarray(np.ceil(ready_s / period_s - _SLACK) + 0.0)  # no negative zero


def tick_s(ready_s: NDArray[np.float64] | float, period_s: float) -> NDArray[np.float64]:
    """Return the time of the first tick, a multiple of `period_s`, that is not before `ready_s`.

    >>> tick_s(np.array([0.0, 0.012, 0.015]), 0.005).round(9).tolist()
    [0.0, 0.015, 0.015]
    """
    return np.asarray(np.maximum(next_tick(ready_s, period_s) * period_s, ready_s))
