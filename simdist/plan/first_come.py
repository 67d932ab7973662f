"""The rule of an all-reduce that takes the first members that come: who is in, and what the others do.

Of n members, n - drop are in: the first to come, and of several that come at one time those of lower numbers. The
all-reduce starts with the last of them. With d, what it takes, it is over at

    over = (n - drop)-th of the arrivals + d

A member that is not in asks for the result when it comes, and has it as soon as it is there. With l, what that takes,

    end = max(arrival + l, over)

A member that would begin the step when it is over sits it out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.plan.ops import AllReduce

Times: TypeAlias = NDArray[np.float64]


def n_in(op: AllReduce) -> int:
    """Return how many members the reduction is over."""
    return op.group.size - op.drop


@dataclass(frozen=True, slots=True)
class In:
    """Who is in.

    Args:
        first: Members that are in, in order.
        late: Of those that have come, the others, in the order in which they came.
        start_s: When the last of the first came.
    """

    first: tuple[int, ...]
    late: tuple[int, ...]
    start_s: float


@dataclass(frozen=True, slots=True)
class FirstCome:
    """The rule, for the engines.

    Args:
        n_in: How many are in.
        late_s: What it takes one of the others to get the result.
    """

    n_in: int
    late_s: float

    def choose(self, arrivals: Iterable[tuple[float, int]]) -> In:
        """Return who is in.

        Args:
            arrivals: When, and which member came, of at least `n_in`.
        """
        came = sorted(arrivals)
        first = came[: self.n_in]
        late = came[self.n_in :]
        start_s, _ = first[-1]
        return In(tuple(sorted(member for _, member in first)), tuple(member for _, member in late), start_s)

    def end_s(self, come_s: Times | float, over_s: Times | float) -> Times:
        """Return when those have the result that are not in."""
        return np.asarray(np.maximum(come_s + self.late_s, over_s))


def sits_out(begin_s: Times | float, over_s: Times | float) -> NDArray[np.bool_]:
    """Return which of those that could begin a step at some time sit it out."""
    return np.asarray(begin_s >= over_s)


def spread_late(n: int, drop: int) -> NDArray[np.int64]:
    """Return the late members that prices assume: spread evenly."""
    return np.arange(1, drop + 1) * n // drop - 1
