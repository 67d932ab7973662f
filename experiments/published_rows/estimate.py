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
ALONE = {"Slingshot", "TCPXO"}
"""Classes of one family that teach no other, because its times follow no model of NCCL. Over Slingshot, times shrink
with the size from 2 to 16 MiB. Over TCPXO, they are those of LL up to 16 MiB, and 0.9 ms plus the bytes beyond."""
LEAST_FAMILIES = 3
"""Families of a kind of link that a distribution is made of, at least."""
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
    inside = _members(residuals, name)
    outside = [each for each in residuals if each not in inside and ALONE.isdisjoint(each.classes)]
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
        if not ALONE.isdisjoint(each.classes):
            continue
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
        factors = [widening(of_kind)]
        training[kind] = {name: _entry(of_kind, name, factors) for name in names(of_kind)}
    collectives = [each for each in residuals if each.kind == "collective"]
    classes = {"": _entry(collectives, "", _factors(collectives))}
    for kind in ("fabric", "network"):
        of_kind = pooled(collectives, kind)
        factors = _factors(of_kind)
        named = names(each for each in of_kind if kind in each.classes)
        classes |= {name: _entry(of_kind, name, factors) for name in named if name}
    return {"training": training, "collectives": {"sizes": list(SIZES), "classes": classes}}


def pooled(collectives: Sequence[Residual], kind: str) -> list[Residual]:
    """Return the rows of a kind of link, and all rows of a size that too few families of the kind have."""
    found: list[Residual] = []
    for of_size in _by_size(collectives):
        of_kind = [each for each in of_size if kind in each.classes]
        found += of_kind if len({each.family for each in of_kind}) >= LEAST_FAMILIES else of_size
    return found


def names(residuals: Iterable[Residual]) -> list[str]:
    """Return the classes that have rows, and the empty name of all."""
    return ["", *sorted({name for each in residuals for name in each.classes})]


def _members(residuals: Iterable[Residual], name: str) -> list[Residual]:
    """Return the rows of a class; an empty name is that of all."""
    return [
        each
        for each in residuals
        if (not name or name in each.classes) and (name in ALONE or ALONE.isdisjoint(each.classes))
    ]


def _by_size(residuals: Sequence[Residual]) -> list[list[Residual]]:
    return [[each for each in residuals if size_class(each.nbytes) == size] for size in range(len(SIZES))]


def _factors(residuals: Sequence[Residual]) -> list[float]:
    """Return the widening of each size."""
    return [widening(of_size) for of_size in _by_size(residuals)]


def _entry(residuals: Sequence[Residual], name: str, factors: Sequence[float]) -> dict[str, Any]:
    """Return the distributions of a class: one, or with a factor for each size one of each."""
    inside = _members(residuals, name)
    parts = [list(residuals)] if len(factors) == 1 else _by_size(residuals)
    found = [widened(distribution(part, name), factor) for part, factor in zip(parts, factors, strict=True)]
    return {
        "rows": len(inside),
        "families": len({each.family for each in inside}),
        "logs": [[round(float(log), 4) for log in logs] for logs in found],
    }


def widened(logs: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """Return a distribution that is a factor wider around its median."""
    middle = logs[N_PLACES // 2]
    return middle + factor * (logs - middle)
