"""Doubts from residuals: distributions of log(measured / simulated) by kind and class of hardware.

Families of a class weigh the same, however many rows they have. All other families of the kind together weigh as much
as one of the class. So a class with few families resembles the kind as a whole, and a class without any is it.

Quantiles of few families lie too close together. So the distributions of a kind are widened around their medians, by
the least factor with which 90 % intervals hold enough rows of families that are left out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

N_PLACES = 41
SIZES = (2**14, 2**21, 2**28)
BORDERS = (2**16, 2**26)
OTHERS = 1.0
"""Weight of all families outside a class, in families."""
FACTORS = tuple(1 + number / 10 for number in range(11))
HELD = 0.88
"""Share of the rows of a family that is left out, in the mean over families; ranges of inputs add to it."""


@dataclass(frozen=True)
class Residual:
    """How far a row is from its simulation.

    Args:
        family: Its family.
        kind: `machine`, `machines`, `collective` or `batch`.
        classes: Classes of hardware that it belongs to.
        log: log(measured / simulated).
        nbytes: Of a collective; of a batch, the place of its ratio to the measured one.
    """

    family: str
    kind: str
    classes: tuple[str, ...]
    log: float
    nbytes: int = 1


def size_class(nbytes: int) -> int:
    """Return 0 below 64 KiB, 1 below 64 MiB, else 2."""
    return sum(nbytes >= border for border in BORDERS)


def quantiles(values: Sequence[float], weights: Sequence[float]) -> NDArray[np.float64]:
    """Return weighted quantiles at `N_PLACES` evenly spaced places from 0 to 1."""
    order = np.argsort(values)
    sorted_values = np.array(values)[order]
    sorted_weights = np.array(weights)[order]
    at = (np.cumsum(sorted_weights) - sorted_weights / 2) / sorted_weights.sum()
    return np.interp(np.linspace(0, 1, N_PLACES), at, sorted_values)


def distribution(residuals: Iterable[Residual], name: str) -> NDArray[np.float64]:
    """Return the quantiles of a class among the residuals of a kind; of all, if the name is empty."""
    residuals = list(residuals)
    inside = [each for each in residuals if not name or name in each.classes]
    outside = [each for each in residuals if each not in inside]
    values: list[float] = []
    weights: list[float] = []
    for some, total in ((inside, None), (outside, OTHERS)):
        n_rows = Counter(each.family for each in some)
        of_family = 1.0 if total is None else total / max(1, len(n_rows))
        values += [each.log for each in some]
        weights += [of_family / n_rows[each.family] for each in some]
    return quantiles(values, weights)


def of_size(each: Residual) -> int:
    """Return the size class of a row."""
    return size_class(each.nbytes)


def widening(residuals: Sequence[Residual], bucket: Callable[[Residual], int] = of_size) -> float:
    """Return the factor that the distributions of a kind need to hold `HELD` of the rows of a family left out.

    Args:
        residuals: Of the kind.
        bucket: Which of the distributions of a class a row belongs to.
    """
    needed: dict[str, list[float]] = {}
    ends: dict[tuple[str, str, int], tuple[float, float, float]] = {}
    for each in residuals:
        key = each.family, each.classes[-1], bucket(each)
        if key not in ends:
            others = [one for one in residuals if one.family != key[0] and bucket(one) == key[2]]
            if not others:
                continue
            found = distribution(others, key[1])
            ends[key] = found[N_PLACES // 20], found[N_PLACES // 2], found[-1 - N_PLACES // 20]
        low, middle, high = ends[key]
        reach = high - middle if each.log > middle else middle - low
        needed.setdefault(each.family, []).append(abs(each.log - middle) / max(reach, 1e-9))
    for factor in FACTORS:
        if not needed or np.mean([np.mean(np.array(of) <= factor) for of in needed.values()]) >= HELD:
            return factor
    return FACTORS[-1]


def table(residuals: Iterable[Residual]) -> dict[str, Any]:
    """Return the distributions as `simdist/studies/doubts.json` has them."""
    residuals = list(residuals)
    training = {}
    for kind in ("machine", "machines"):
        of_kind = [each for each in residuals if each.kind == kind]
        factor = widening(of_kind)
        training[kind] = {name: _entry(of_kind, name, factor, sized=False) for name in names(of_kind)}
    collectives = [each for each in residuals if each.kind == "collective"]
    factor = widening(collectives)
    classes = {name: _entry(collectives, name, factor, sized=True) for name in names(collectives)}
    return {"training": training, "collectives": {"sizes": list(SIZES), "classes": classes}}


def names(residuals: Iterable[Residual]) -> list[str]:
    """Return the classes that have rows, and the empty name of all."""
    return ["", *sorted({name for each in residuals for name in each.classes})]


def _entry(residuals: Sequence[Residual], name: str, factor: float, *, sized: bool) -> dict[str, Any]:
    inside = [each for each in residuals if not name or name in each.classes]
    by_size = [[each for each in residuals if size_class(each.nbytes) == size] for size in range(len(SIZES))]
    parts = by_size if sized else [list(residuals)]
    return {
        "rows": len(inside),
        "families": len({each.family for each in inside}),
        "logs": [[round(float(log), 4) for log in widened(distribution(part, name), factor)] for part in parts],
    }


def widened(logs: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """Return a distribution that is a factor wider around its median."""
    middle = logs[N_PLACES // 2]
    return middle + factor * (logs - middle)
