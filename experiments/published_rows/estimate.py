"""Doubts from residuals: distributions of log(measured / simulated) by kind and class of hardware.

Families of a class weigh the same, however many rows they have. All other families of the kind together weigh as much
as one of the class. So a class with few families resembles the kind as a whole, and a class without any is it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

N_PLACES = 41
SIZES = (2**14, 2**21, 2**28)
BORDERS = (2**16, 2**26)
OTHERS = 1.0
"""Weight of all families outside a class, in families."""


@dataclass(frozen=True)
class Residual:
    """How far a row is from its simulation.

    Args:
        family: Its family.
        kind: `machine`, `machines`, or `collective`.
        classes: Classes of hardware that it belongs to.
        log: log(measured / simulated).
        nbytes: Of a collective.
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


def table(residuals: Iterable[Residual]) -> dict[str, Any]:
    """Return the distributions as `simdist/studies/doubts.json` has them."""
    residuals = list(residuals)
    training = {
        kind: {name: _entry(of_kind, name, sized=False) for name in names(of_kind)}
        for kind in ("machine", "machines")
        if (of_kind := [each for each in residuals if each.kind == kind])
    }
    collectives = [each for each in residuals if each.kind == "collective"]
    classes = {name: _entry(collectives, name, sized=True) for name in names(collectives)}
    return {"training": training, "collectives": {"sizes": list(SIZES), "classes": classes}}


def names(residuals: Iterable[Residual]) -> list[str]:
    """Return the classes that have rows, and the empty name of all."""
    return ["", *sorted({name for each in residuals for name in each.classes})]


def _entry(residuals: Sequence[Residual], name: str, *, sized: bool) -> dict[str, Any]:
    inside = [each for each in residuals if not name or name in each.classes]
    by_size = [[each for each in residuals if size_class(each.nbytes) == size] for size in range(len(SIZES))]
    parts = by_size if sized else [list(residuals)]
    return {
        "rows": len(inside),
        "families": len({each.family for each in inside}),
        "logs": [[round(float(log), 4) for log in distribution(part, name)] for part in parts],
    }
