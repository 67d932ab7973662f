"""Points of a space of parameters: distributions, and where in the unit cube to look.

A distribution is given by its quantile function, so that it serves random numbers as well as a Sobol sequence. Numbers
are in the unit that their bounds are written in, and rounded to six digits: a table of them can be read, and a value
typed from it gives the same scenario.

A longer sample begins with the shorter one: more points never invalidate computed ones.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from simdist.errors import RunError
from simdist.scenario.portable import exp, log, normal_quantile
from simdist.settings.base import Settings, refuse, shown
from simdist.settings.units import Factor, Whole

if TYPE_CHECKING:
    from scipy.stats import qmc


_BATCH = 1024  # points that are made at once
_N_DIGITS = 6
_STREAM = 2**64 - 1  # second word of the key; that of simulated delays is the number of a disturbance


def _list_of(n: int, shape: str) -> BeforeValidator:
    def check(value: object) -> object:
        if not isinstance(value, list) or len(value) != n:
            raise ValueError(f"{shown(value)}: write two values{shape}")
        return value

    return BeforeValidator(check)


_Bounds: TypeAlias = Annotated[tuple[object, object], _list_of(2, ", [low, high]")]
_Spaced: TypeAlias = Annotated[
    tuple[object, object, Annotated[Whole, Field(ge=2, le=1_000_000)]],
    _list_of(3, " and how many to list, [low, high, 5]"),
]


class _Rule(Settings):
    """Values that are not listed, but given by a few."""

    is_logarithmic: ClassVar[bool] = False

    def bounds(self) -> tuple[object, ...]:
        """Return the values that it is given by, as they stand in the file; all are of the field's kind."""
        first = next(iter(dict(self).values()))
        return first[:2] if isinstance(first, tuple) else (first,)

    def problem(self, bounds: tuple[float, ...]) -> str | None:
        """Return an error of its parameters, if any."""
        if self.is_logarithmic and bounds[0] <= 0:
            return "0 has no logarithm: write a lower value above 0"
        if bounds[0] < bounds[1]:
            return None
        low, high = (each if isinstance(each, str) else shown(each) for each in self.bounds())
        return f"{low} is not below {high}: write the lower one first"

    def between(self, share: float, low: float, high: float) -> float:
        """Return low + share (high - low), or low (high / low)^share."""
        value = low * _exp(share * _log(high / low)) if self.is_logarithmic else low + share * (high - low)
        return _rounded(value, low, high)


class Spacing(_Rule):
    """A list of values that is given by its ends and its length."""

    def numbers(self, low: float, high: float) -> list[float]:
        """Return all values from one end to the other, in the unit of both."""
        n: int = next(iter(dict(self).values()))[2]
        return [low, *(self.between(k / (n - 1), low, high) for k in range(1, n - 1)), high]


@final
class Linear(Spacing):
    """Values with equal differences."""

    linear: _Spaced


@final
class Geometric(Spacing):
    """Values with equal ratios."""

    is_logarithmic = True
    geometric: _Spaced


class Distribution(_Rule):
    """How the values of a field are distributed."""

    def quantile(self, u: float, bounds: tuple[float, ...]) -> float:
        """Return the value below which a share `u`, 0 < u < 1, of all values is, in the unit of `bounds`."""
        return self.between(u, *bounds)


@final
class Uniform(Distribution):
    """Every value between two bounds is as likely as any other."""

    uniform: _Bounds


@final
class LogUniform(Distribution):
    """Every factor between two bounds is as likely as any other: as many values in 1 to 10 as in 10 to 100."""

    is_logarithmic = True
    log_uniform: _Bounds


@final
class Integers(Distribution):
    """Every whole number from the first to the last, both included, is as likely as any other."""

    integers: _Bounds

    def quantile(self, u: float, bounds: tuple[float, ...]) -> float:
        """Return low + floor(u n), n whole numbers from low to high."""
        low, high = (int(each) for each in bounds)
        return low + min(int(u * (high - low + 1)), high - low)


@final
class LognormalFactor(Distribution):
    """Uncertainty by a factor: median * exp(sigma z), z standard normal; sigma = 0.1 is about 10 %."""

    median: object
    sigma: Annotated[Factor, Field(le=10)]

    def quantile(self, u: float, bounds: tuple[float, ...]) -> float:
        """Return median * exp(sigma z(u))."""
        z = float(normal_quantile(np.array([u]))[0])
        return _rounded(bounds[0] * _exp(self.sigma * z))

    def problem(self, bounds: tuple[float, ...]) -> str | None:
        """Say if the median is 0."""
        return None if bounds[0] > 0 else "a median of 0 leaves nothing to vary: write one above 0"


class Sampling(Settings):
    """Which points of the space are taken.

    Args:
        kind: `grid`: all combinations of listed values. `random`: independent points. `sobol`: points that fill the
            space evenly (a Sobol sequence, shifted by random numbers of the seed); best with a power of two.
        points: How many, for `random` and `sobol`.
        seed: Seed of the points; simulated delays use the scenario's.

    Source:
        Sobol (1967), directions of Joe and Kuo (2008), as in scipy; the shift modulo 1 is that of Cranley and Patterson
        (1976).
    """

    kind: Literal["grid", "random", "sobol"] = "grid"
    points: Annotated[Whole, Field(ge=1)] | None = None
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "grid" and self.points is not None:
            refuse("Sampling", [(("points",), "a grid has as many as its lists say: remove it, or write kind: random")])
        if self.kind != "grid" and self.points is None:
            refuse("Sampling", [(("points",), f"how many {self.kind} points? Write e.g. points: 256")])
        return self


_UnitPoints: TypeAlias = NDArray[np.float64]


def unit_cube(sampling: Sampling, n_dimensions: int) -> Iterator[_UnitPoints]:
    """Yield the points of a random or Sobol sample, each `[n_dimensions]` with values in (0, 1).

    Raises:
        RunError: The table that Sobol's sequence is made of could not be read.

    >>> [point.round(3).tolist() for point in unit_cube(Sampling(kind="random", points=2), 2)]
    [[0.449, 0.804], [0.48, 0.591]]
    """
    n_points = sampling.points or 0
    random = np.random.Philox(key=np.array([sampling.seed, _STREAM], dtype=np.uint64))
    batches = _sobol(random, n_dimensions) if sampling.kind == "sobol" else _independent(random, n_dimensions)
    for first in range(0, n_points, _BATCH):
        yield from next(batches)[: n_points - first]


def _independent(random: np.random.Philox, n_dimensions: int) -> Iterator[_UnitPoints]:
    while True:
        yield _uniform(random, _BATCH * n_dimensions).reshape(_BATCH, n_dimensions)


def _sobol(random: np.random.Philox, n_dimensions: int) -> Iterator[_UnitPoints]:
    from scipy.stats import qmc  # takes half a second

    shift = _uniform(random, n_dimensions)
    engine = qmc.Sobol(n_dimensions, scramble=False)
    points = _sequence(engine)
    _check_strata(points)
    while True:
        yield np.clip((points + shift) % 1.0, 2.0**-54, 1 - 2.0**-53)
        points = _sequence(engine)


def _sequence(engine: "qmc.Sobol") -> _UnitPoints:
    return np.asarray(engine.random(_BATCH), dtype=np.float64)


def _check_strata(first: _UnitPoints) -> None:
    """Refuse a sequence without exactly one of its first points in each equal interval: scipy makes it of a table."""
    n = len(first)
    if not np.array_equal(np.sort(first, axis=0) * n, np.broadcast_to(np.arange(n)[:, None], first.shape)):
        raise RunError("scipy could not read its table for Sobol's sequence, so the points are wrong: run it again")


def _uniform(random: np.random.Philox, n: int) -> _UnitPoints:
    """Draw the centres of 2^53 equal parts of (0, 1)."""
    words = random.random_raw(n)
    return np.asarray((words >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54)


def _rounded(value: float, low: float = 0.0, high: float = math.inf) -> float:
    return min(max(low, float(f"{value:.{_N_DIGITS}g}")), high)


def _exp(x: float) -> float:
    return float(exp(np.array([x]))[0])


def _log(x: float) -> float:
    return float(log(np.array([x]))[0])
