"""How much a result follows one field of a sweep, the other fields varying as they do: main effects, and no more.

Of a sample, the rank correlation says whether the result rises or falls with a field, along whatever curve: +1 if
always, 0 if the field says nothing by itself. Of a grid, where each value of a field meets the same values of all
others, the means at its values say how far the field alone moves the result. Neither sees that two fields matter only
together, nor a result that rises first and falls then.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", bound=Hashable)
_FEWEST = 3  # two points are always on a line


@dataclass(frozen=True, slots=True)
class Effect:
    """How far a field moves the mean of a result.

    Args:
        means: Of the result at each value of the field, in the order in which the values first occur.
        lowest: Place of the value with the lowest mean.
        highest: Place of the value with the highest mean.
    """

    means: tuple[float, ...]
    lowest: int
    highest: int

    @property
    def spread(self) -> float:
        """The highest mean minus the lowest."""
        return self.means[self.highest] - self.means[self.lowest]


def ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Return the place of each value in their order, from 1; equal values share the mean of their places.

    >>> ranks([0.3, 0.1, 0.3]).tolist()
    [2.5, 1.0, 2.5]
    """
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    middle: NDArray[np.float64] = (last - (counts - 1) / 2).astype(np.float64)
    return middle[inverse]


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return how the ranks of `x` and `y` are correlated, -1 to 1; None where that says nothing.

    It says nothing of fewer than three pairs, or if all of `x` or all of `y` are equal.

    Source:
        Spearman, The Proof and Measurement of Association between Two Things, 1904; ties as in Kendall & Gibbons,
        Rank Correlation Methods, 5th ed., chapter 3.

    >>> rank_correlation([1, 2, 3, 4], [10, 20, 1000, 30])
    0.8
    """
    if len(x) < _FEWEST:
        return None
    a, b = (each - each.mean() for each in (ranks(x), ranks(y)))
    size = float(a @ a) * float(b @ b)
    if size == 0:
        return None
    return float(np.clip(float(a @ b) / np.sqrt(size), -1.0, 1.0))


def main_effect(values: Sequence[T], results: Sequence[float]) -> Effect | None:
    """Return the means of results at each value of a field; None if there are not two values.

    Args:
        values: Of the field, one for each result.
        results: In any unit.

    >>> main_effect([2, 2, 4, 4], [1.0, 2.0, 3.0, 5.0])
    Effect(means=(1.5, 4.0), lowest=0, highest=1)
    """
    at: dict[T, list[float]] = {}
    for value, result in zip(values, results, strict=True):
        at.setdefault(value, []).append(result)
    if len(at) < 2:
        return None
    means = tuple(float(np.mean(each)) for each in at.values())
    return Effect(means, int(np.argmin(means)), int(np.argmax(means)))
