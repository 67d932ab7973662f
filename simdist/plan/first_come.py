"""The rule of an all-reduce that takes only the first members to arrive.

Of n members, the first n - drop to arrive are in. If several arrive at the same time, lower numbers go first. The
all-reduce starts when the last member that is in arrives. If it takes d, it is over at

    over = (n - drop)-th of the arrivals + d

Every other member requests the result when it arrives, and gets it as soon as it exists. If the request takes l,

    end = max(arrival + l, over)

A member that would begin the step at `over` or later sits the step out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_Times: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class In:
    """The members of an all-reduce that are in, and those that are late.

    Args:
        first: Members that are in, in order.
        late: Other members that have arrived, in the order of arrival.
        start_s: When the last member that is in arrived.
    """

    first: tuple[int, ...]
    late: tuple[int, ...]
    start_s: float


@dataclass(frozen=True, slots=True)
class FirstCome:
    """The rule, as the engines apply it.

    Args:
        n_in: Number of members that are in.
        late_s: Seconds that another member needs to get the result.
    """

    n_in: int
    late_s: float

    def choose(self, arrivals: Iterable[tuple[float, int]]) -> In:
        """Return which members are in.

        Args:
            arrivals: Time and number of each member that has arrived, at least `n_in` of them.
        """
        came = sorted(arrivals)
        first = came[: self.n_in]
        late = came[self.n_in :]
        start_s, _ = first[-1]
        return In(tuple(sorted(member for _, member in first)), tuple(member for _, member in late), start_s)

    def end_s(self, come_s: _Times | float, over_s: _Times | float) -> _Times:
        """Return when the members that are not in have the result."""
        return np.asarray(np.maximum(come_s + self.late_s, over_s))


def sits_out(begin_s: _Times | float, over_s: _Times | float) -> NDArray[np.bool_]:
    """Tell which members sit a step out, given when they could begin it."""
    return np.asarray(begin_s >= over_s)


def spread_late(n: int, drop: int) -> NDArray[np.int64]:
    """Return the late members that prices assume: `drop` of `n`, evenly spread."""
    return np.arange(1, drop + 1) * n // drop - 1
