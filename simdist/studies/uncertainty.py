"""Intervals of results from uncertain inputs, and the measurement that would narrow them.

A quantity is uniform in its range, and independent of the others. A draw is a place in every range, from 0 to 1. The
places of n draws are the middles of n equal parts, each once, in an order that follows from seed and path by
counter-based random numbers (Latin hypercube): all schedules get the same draws.

Schedules are simulated once more for each draw, with the seeds of the stated values in turn. The change of a draw is
its result minus that of the stated values with the same seed. Speed-ups change far less than step times. The 90 %
interval contains the middle 90 % of these changes, combined with the variance over seeds, around the stated result. If
nearly all changes have one sign, it contains 90 % from the stated result on.

The doubt of a kind of prediction is drawn like a quantity, see `simdist.studies.published_errors`.

The 20 draws of a single quantity are evenly spaced, and the ends are its quantiles. For several quantities, a further
draw lies between the ends of 40 with 90 %.

Source:
    McKay, Beckman & Conover, A Comparison of Three Methods for Selecting Values of Input Variables in the Analysis of
    Output from a Computer Code, Technometrics 21, 1979.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Philox

from simdist.scenario import Scenario
from simdist.scenario.fields import find_field, parse_path, with_value
from simdist.scenario.strict_yaml import Path, path_text
from simdist.scenario.uncertain import Range
from simdist.settings.base import plural
from simdist.studies.statistics import NORMAL_QUANTILE, Interval, Samples

if TYPE_CHECKING:
    from simdist.studies.published_errors import Doubt

#: Among the causes: what seeds leave open, which more of them would tell.
CHANCE = "seeds"

#: Probability of a value below an interval, or above it.
TAIL = 0.05

#: Among the causes: a step of a ring between nodes that nobody measured.
RING_STEP = "cluster.network.ring_step"
_FAILURES = "failures"
_ROUNDING = 1e-9  # of a result
_N_NORMAL = 101  # places of the normal distribution that stand for it


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity of a scenario that is known as a range.

    Args:
        name: Its path in the scenario, such as `cluster.network.efficiency`.
        path: The same, in keys and indices.
        ends: Of its range, in SI units.
        written: The range as it is written.
    """

    name: str
    path: Path
    ends: tuple[float, float]
    written: Range

    @property
    def in_words(self) -> str:
        """Its path, its range with the source, and its measurement."""
        source = f", {self.written.source}" if self.written.source else ""
        ends = f"{self.written.from_} to {self.written.to}{source}"
        return f"{self.name} ({ends}): measure {self.written.measure or 'it'}"


def quantities(scenario: Scenario) -> tuple[Quantity, ...]:
    """Return the uncertain quantities of a scenario's steps; its own ranges override those of its cluster.

    A step of a ring over many machines is one if nobody measured it. Rates of failures are none: steps have none.
    """
    from simdist.studies.published_errors import ring_step_range

    of_ring_step = ring_step_range(scenario)
    ranges = {parse_path(RING_STEP): of_ring_step} if of_ring_step else {}
    ranges |= {("cluster", *parse_path(text)): each for text, each in scenario.cluster.uncertain.items()}
    ranges |= {path: each for path, each in _own_ranges(scenario) if path[0] != _FAILURES}
    return _found(scenario, ranges)


def quantities_of_failures(scenario: Scenario) -> tuple[Quantity, ...]:
    """Return the uncertain rates and parts of recoveries; the scenario's own ranges override those of a preset."""
    if scenario.failures is None:
        return ()
    ranges = {(_FAILURES, *parse_path(text)): each for text, each in scenario.failures.uncertain.items()}
    return _found(scenario, ranges | {path: each for path, each in _own_ranges(scenario) if path[0] == _FAILURES})


def _own_ranges(scenario: Scenario) -> list[tuple[Path, Range]]:
    return [(parse_path(text), each) for text, each in scenario.uncertain.items()]


def _found(scenario: Scenario, ranges: Mapping[Path, Range]) -> tuple[Quantity, ...]:
    found = []
    for path, each in ranges.items():
        field = find_field(scenario, path)
        low, high = (float(str(field.number(end))) for end in (each.from_, each.to))
        found.append(Quantity(path_text(path), path, (low, high), each))
    return tuple(found)


def n_draws(n_quantities: int) -> int:
    """Return the number of draws for an interval over this many quantities."""
    return 20 if n_quantities == 1 else 40


def places(name: str, *, seed: int, n: int) -> Samples:
    """Return where `n` draws of a quantity lie in its range, from 0 to 1, `[n]`."""
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    words = Philox(key=np.array([seed, digest], dtype=np.uint64)).random_raw(n)
    return (np.argsort(np.argsort(words)) + 0.5) / n


def drawn(scenario: Scenario, at: Mapping[Quantity, float]) -> Scenario:
    """Return a scenario with uncertain quantities at places in their ranges, from 0 (lower end) to 1 (upper)."""
    for quantity, place in at.items():
        low, high = quantity.ends
        scenario = with_value(scenario, quantity.path, low + place * (high - low))
    return scenario


def spread(
    center: float, changes: Samples, chance: Interval | None, places: Mapping[str, Samples], *, adds: bool = False
) -> tuple[Interval, dict[str, float]]:
    """Return the interval in which a result lies with 90 %, and the share of its variance that is from each cause.

    The result as stated is in it, too. What is left of the shares of all quantities, by name, and of `CHANCE`, is from
    several quantities together.

    Args:
        center: The result as stated.
        changes: Change by each draw, `[n_draws]`.
        chance: Its 95 % interval over seeds, if there is one.
        places: Where each draw lies in the range of a quantity, from 0 to 1: name -> `[n_draws]`.
        adds: Whether chance adds to a result, such as a difference, which may be below 0. It multiplies others.
    """
    half = _half(center, chance, adds=adds)
    n = len(changes)
    tail = TAIL if len(places) == 1 else (TAIL * (n + 1) - 0.5) / n
    results = center + changes
    if half and adds:
        results = np.add.outer(results, half * _normal()).ravel()
    elif half:  # no result is below 0
        results = np.multiply.outer(results, np.exp(half / center * _normal())).ravel()
    low, high = _ends(results, center, tail)
    parts = _parts(changes, places) if len(places) > 1 else dict.fromkeys(places, float(changes.var()))
    parts |= {CHANCE: (half / NORMAL_QUANTILE) ** 2}
    total = math.fsum(parts.values())
    is_known = total <= (_ROUNDING * center) ** 2
    shares = {} if is_known else {name: part / total for name, part in parts.items() if name}
    return (low, high), shares


def _half(center: float, chance: Interval | None, *, adds: bool) -> float:
    """Return half the width of an interval over seeds; 0 if there is none."""
    if chance is None:
        return 0.0
    if adds:
        return (chance[1] - chance[0]) / 2
    return math.log(chance[1] / chance[0]) / 2 * center if chance[0] else 0.0


def _ends(results: Samples, center: float, tail: float) -> Interval:
    """Return the quantiles with a tail below and above; if both are on one side of `center`, as much from there on."""
    low, high = np.quantile(results, [tail, 1 - tail], method="hazen").tolist()
    if low > center:
        return center, float(np.quantile(results, 1 - 2 * tail + (results < center).mean(), method="hazen"))
    if high < center:
        return float(np.quantile(results, 2 * tail - (results > center).mean(), method="hazen")), center
    return low, high


@cache
def _normal() -> Samples:
    """Return evenly likely places of the normal distribution, 1 for its 97.5 % quantile."""
    quantile = NormalDist().inv_cdf
    return np.array([quantile((i + 0.5) / _N_NORMAL) for i in range(_N_NORMAL)]) / NORMAL_QUANTILE


def _parts(changes: Samples, places: Mapping[str, Samples]) -> dict[str, float]:
    """Return the variance that each quantity explains by a parabola over its places; "" has the rest."""
    columns = np.concatenate([[at - at.mean(), (at - at.mean()) ** 2 - at.var()] for at in places.values()])
    parts = np.linalg.lstsq(columns.T, changes - changes.mean())[0][:, None] * columns
    found = {name: float((parts[2 * i] + parts[2 * i + 1]).var()) for i, name in enumerate(places)}
    return found | {"": float((changes - parts.sum(axis=0)).var())}


def causes(scenario: Scenario, shares_of: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Say which measurement would narrow the intervals of schedules most, a sentence for each.

    Args:
        scenario: That they are of.
        shares_of: Label of a schedule -> shares of its variance, as of `spread`.
    """
    by_cause: dict[str, dict[str, float]] = {}
    for label, shares in shares_of.items():
        if shares:
            cause = max(shares, key=lambda name: shares[name])
            by_cause.setdefault(cause, {})[label] = shares[cause]
    known = {each.name: each.in_words for each in _open(scenario)} | {CHANCE: "chance: simulate more --seeds"}
    return [_sentence(known[cause], labels) for cause, labels in by_cause.items()]


def main_cause(scenario: Scenario, shares: Mapping[str, float]) -> str:
    """Return the quantity that causes most of a variance, and its measurement, in words."""
    return max(_open(scenario), key=lambda each: shares.get(each.name, 0.0)).in_words


def _open(scenario: Scenario) -> "tuple[Quantity | Doubt, ...]":
    from simdist.studies.published_errors import doubts_of

    return (*quantities(scenario), *quantities_of_failures(scenario), *doubts_of(scenario))


def _sentence(cause: str, share_of: Mapping[str, float]) -> str:
    low, high = (f"{100 * share:.0f}" for share in (min(share_of.values()), max(share_of.values())))
    share = low if low == high else f"{low} to {high}"
    intervals = f"the largest part of the {plural(len(share_of), 'interval')} of {', '.join(share_of)}"
    return f"{intervals} ({share} % of the variance) is from {cause}"
