"""Doubts from residuals: distributions of log(measured / simulated) by kind and class of hardware.

Families of a class weigh the same, however many rows they have. All other families of the kind together weigh as much
as one of the class. So a class with few families resembles the kind as a whole, and a class without any is it.

Quantiles of few families lie too close together. So the distributions of a kind are widened around their medians, by
the least factor with which 90 % intervals hold enough rows of families that are left out. This factor is that of all
classes of the kind. A class of collectives with few families takes that of a predictive interval, if it is larger: a
further family differs from n families as Student's t distribution with n - 1 degrees of freedom tells. Steps that wait
for storage, and short steps that read, have few families: their distribution is a predictive one.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, t

N_PLACES = 41
SIZES = (2**14, 2**21, 2**28)
BORDERS = (2**16, 2**26)
OTHERS = 1.0
"""Weight of all families outside a class, in families."""
ALONE = {"Slingshot", "TCPXO"}
"""Classes that teach no other, because their errors have causes of their own. Over Slingshot, they are settings of its
software. Over TCPXO, Google's tuner chooses, and times up to 16 MiB are as if one card of eight carried all bytes."""
LEAST_FAMILIES = 3
"""Families of a kind of link that a distribution is made of, at least."""
FACTORS = tuple(1 + number / 10 for number in range(11))
HELD = 0.88
"""Share of the rows of a family that is left out, in the mean over families; ranges of inputs add to it."""
STORAGE = ("storage", "input")
"""Kinds of steps that read from storage. They have no classes of hardware."""
SHORT = "short"
"""Class of short steps that read from storage."""
SHORT_S = 0.02
"""Steps that read from storage and compute for less are short: what the host does besides is a part of them."""
STEP_US = (4_500, 100_000)
"""Microseconds of computing of the short steps, and of steps of which 2 ms on the host are a small part."""
HELD_COLLECTIVES = 0.9
"""The same of collectives, to which ranges of inputs add little."""
UPPER = 0.95
"""Upper end of 90 % intervals."""


@dataclass(frozen=True)
class Residual:
    """How far a row is from its simulation.

    Args:
        family: Its family.
        kind: `machine`, `machines`, `sharded`, `collective`, `batch`, `storage` or `input`.
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
    found = weighted(list(residuals), name)
    return quantiles([each.log for each, _ in found], [weight for _, weight in found])


def weighted(residuals: Sequence[Residual], name: str) -> list[tuple[Residual, float]]:
    """Return the residuals that a class learns from, with their weights; the sum of a family of the class is 1."""
    inside = _members(residuals, name)
    known = set(inside)
    outside = [each for each in residuals if each not in known and ALONE.isdisjoint(each.classes)]
    found: list[tuple[Residual, float]] = []
    for some, total in ((inside, None), (outside, OTHERS)):
        n_rows = Counter(each.family for each in some)
        of_family = 1.0 if total is None else total / max(1, len(n_rows))
        found += [(each, of_family / n_rows[each.family]) for each in some]
    return found


def of_few_families(residuals: Sequence[Residual], name: str) -> float:
    """Return the factor that a class needs because it has few families.

    With variances w within families and b between n of them, a row of a further family is as far as

        sqrt(w + (t / z)^2 (1 + 1/n) b)    instead of    sqrt(w + b)

    where t and z are the 95 % quantiles of Student's distribution and of the normal distribution. Families of unequal
    weight count as fewer: n is (sum of weights)^2 / sum of their squares.
    """
    found = weighted(residuals, name)
    logs: dict[str, list[float]] = {}
    of_family: dict[str, float] = {}
    for each, weight in found:
        logs.setdefault(each.family, []).append(each.log)
        of_family[each.family] = of_family.get(each.family, 0.0) + weight
    weights = np.array(list(of_family.values()))
    means = np.array([np.mean(of) for of in logs.values()])
    variances = np.array([np.var(of) for of in logs.values()])
    n = float(weights.sum() ** 2 / (weights**2).sum())
    if n <= 1:
        return 1.0
    shares = weights / weights.sum()
    within = float(shares @ variances)
    between = float(shares @ (means - shares @ means) ** 2)
    if within + between == 0:
        return 1.0
    ratio = float(t.ppf(UPPER, n - 1) / norm.ppf(UPPER))
    return math.sqrt((within + ratio**2 * (1 + 1 / n) * between * n / (n - 1)) / (within + between))


def of_size(each: Residual) -> int:
    """Return the size class of a row."""
    return size_class(each.nbytes)


def widening(residuals: Sequence[Residual], bucket: Callable[[Residual], int] = of_size, held: float = HELD) -> float:
    """Return the factor that the distributions of a kind need to hold enough rows of a family left out.

    Args:
        residuals: Of the kind.
        bucket: Which of the distributions of a class a row belongs to.
        held: Share of the rows that is enough.
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
        if not needed or np.mean([np.mean(np.array(of) <= factor) for of in needed.values()]) >= held:
            return factor
    return FACTORS[-1]


def table(residuals: Iterable[Residual]) -> dict[str, Any]:
    """Return the distributions as `simdist/studies/published_errors.json` has them."""
    residuals = list(residuals)
    training = {kind: of_training(residuals, kind) for kind in ("machine", "machines", "sharded")}
    collectives = [each for each in residuals if each.kind == "collective"]
    classes = {"": _of_sizes(collectives, [""])[""]}
    for kind in ("fabric", "network"):
        of_kind = pooled(collectives, kind)
        classes |= _of_sizes(of_kind, names(each for each in of_kind if kind in each.classes)[1:])
    storage = {kind: of_storage(residuals, kind) for kind in STORAGE}
    return {
        "training": training,
        "collectives": {"sizes": list(SIZES), "classes": classes},
        "storage": {"step_us": list(STEP_US), "classes": storage},
    }


def of_training(residuals: Iterable[Residual], kind: str) -> dict[str, Any]:
    """Return the distributions of the classes of a kind of training."""
    of_kind = [each for each in residuals if each.kind == kind]
    factors = [widening(of_kind)]
    return {name: _entry([of_kind], name, factors) for name in names(of_kind)}


def of_storage(residuals: Sequence[Residual], kind: str) -> dict[str, Any]:
    """Return the distributions of a kind of steps that read from storage: of short steps and of long ones.

    Short steps of both kinds are pooled. Their error is what the host does besides, whatever the storage does. Three
    families tell little of how far families are apart. So short steps and those that wait for storage do it together.
    """
    short = [each for each in residuals if each.kind in STORAGE and SHORT in each.classes]
    waiting, computing = (
        [each for each in residuals if each.kind == one and SHORT not in each.classes] for one in STORAGE
    )
    apart = [short, waiting]
    long = waiting
    of_long = predictive(waiting, apart)
    if kind == "input":
        long = computing
        factor = max(widening(computing), of_few_families(computing, ""))
        of_long = widened(distribution(computing, ""), factor)
    return _counted([*short, *long], [predictive(short, apart), of_long])


def predictive(residuals: Sequence[Residual], apart: Sequence[Sequence[Residual]]) -> NDArray[np.float64]:
    """Return the quantiles of a row of a further family, given rows of few families, of which each weighs the same.

    With the mean m of n families, the variance w within them, and the variance b between families, the quantile at p is

        m +- sqrt(z^2 w + t^2 (1 + 1/n) b)

    where z and t are those of the normal distribution and of Student's. The outermost quantiles are those in the middle
    of the outermost intervals of places.

    Args:
        residuals: The rows.
        apart: Rows that tell b. Each part adds its families less one to the degrees of freedom.
    """
    squares, freedom = 0.0, 0
    for part in apart:
        means = np.array([np.mean(logs) for logs in _by_family(part)])
        squares += float(((means - means.mean()) ** 2).sum())
        freedom += len(means) - 1
    of_families = _by_family(residuals)
    within = float(np.mean([np.var(logs) for logs in of_families]))
    between = squares / max(freedom, 1) * (1 + 1 / len(of_families))
    end = 0.5 / (N_PLACES - 1)
    at = np.clip(np.linspace(0, 1, N_PLACES), end, 1 - end)
    reach = np.sqrt(norm.ppf(at) ** 2 * within + t.ppf(at, max(freedom, 1)) ** 2 * between)
    return np.asarray(np.mean([np.mean(logs) for logs in of_families]) + np.sign(at - 0.5) * reach)


def _by_family(residuals: Sequence[Residual]) -> list[list[float]]:
    logs: dict[str, list[float]] = {}
    for each in residuals:
        logs.setdefault(each.family, []).append(each.log)
    return list(logs.values())


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


def _of_sizes(residuals: Sequence[Residual], classes: Iterable[str]) -> dict[str, Any]:
    """Return the distributions of classes of collectives: one for each size."""
    parts = _by_size(residuals)
    of_kind = [widening(part, held=HELD_COLLECTIVES) for part in parts]
    found = {}
    for name in classes:
        factors = [max(factor, of_few_families(part, name)) for factor, part in zip(of_kind, parts, strict=True)]
        found[name] = _entry(parts, name, factors)
    return found


def _entry(parts: Sequence[Sequence[Residual]], name: str, factors: Sequence[float]) -> dict[str, Any]:
    """Return the distributions of a class: of each part of its rows, widened by a factor."""
    inside = _members([each for part in parts for each in part], name)
    found = [widened(distribution(part, name), factor) for part, factor in zip(parts, factors, strict=True)]
    return _counted(inside, found)


def _counted(residuals: Sequence[Residual], found: Sequence[NDArray[np.float64]]) -> dict[str, Any]:
    return {
        "rows": len(residuals),
        "families": len({each.family for each in residuals}),
        "logs": [[round(float(log), 4) for log in logs] for logs in found],
    }


def widened(logs: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """Return a distribution that is a factor wider around its median."""
    middle = logs[N_PLACES // 2]
    return middle + factor * (logs - middle)
