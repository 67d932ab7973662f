"""Delays of a user's own distribution as points with weights: means, moments and the tail follow from them.

A quantile function is integrated over the numbers that are drawn, from 2^-53 to 1 - 2^-53, by Gauss-Legendre
quadrature. Panels are short near both ends, where tails are, and are halved until a panel and its halves agree: so
jumps, such as from no delay to a delay, are found.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from simdist.scenario.disturbances import Drawn

_Floats: TypeAlias = NDArray[np.float64]
_Function: TypeAlias = Callable[[_Floats], _Floats | None]

_N_POINTS = 8  # of a panel
_BITS = 53  # of the numbers that are drawn
_TOLERANCE = 1e-9  # of a panel, as a share of the integral
_MOST_HALVINGS = 60
_MOST_PANELS = 2**12  # at once
_TAIL_BITS = (20, 40)  # a tail is seen at 2^-20 and 2^-40 from the ends


@final
@dataclass(frozen=True, slots=True, eq=False)
class DelaySizes:
    """Delays above 0 that are drawn from a user's own distribution.

    Args:
        share: Of the numbers that give such a delay.
        seconds: Delays, the longest first, `[n_points]`.
        weights: Share of each among them, `[n_points]`.
        tail_shape: Shape of the Pareto tail that the longest are like; infinity if they are bounded or not known.
    """

    share: float
    seconds: _Floats
    weights: _Floats
    tail_shape: float

    @property
    def mean_s(self) -> float:
        """Their mean."""
        return float(self.weights @ self.seconds)

    @property
    def kurtosis(self) -> float:
        """Fourth central moment over the squared variance; 0 if they are equal."""
        squared = (self.seconds - self.mean_s) ** 2
        variance = float(self.weights @ squared)
        return float(self.weights @ squared**2) / variance**2 if variance > (_TOLERANCE * self.mean_s) ** 2 else 0.0

    def exceeded_by(self, share: float) -> float:
        """Return the delay that a share of them exceed."""
        return float(np.interp(share, np.cumsum(self.weights), self.seconds))

    def carried_by(self, share: float) -> float:
        """Return which part of the mean the longest ones carry, a share of all."""
        carried = np.cumsum(self.weights * self.seconds)
        return float(np.interp(share, np.cumsum(self.weights), carried)) / self.mean_s


@lru_cache(maxsize=16)
def delay_sizes(drawn: Drawn) -> DelaySizes | None:
    """Return what is known of the delays; None if the function fails, returns no delays, or is too rough."""
    if drawn.quantile is None:
        seconds = np.array(drawn.values)
        return _sizes(seconds, np.full(len(seconds), 1 / len(seconds)), math.inf)
    function = _checked(drawn.quantile)
    points = _points(function)
    return points and _sizes(*points, min(_tail_shape(function, end) for end in (0.0, 1.0)))


def _checked(function: Callable[..., object]) -> _Function:
    """Return the function, which gives None for what is no delays; drawing then says what is wrong."""

    def delays_s(numbers: _Floats) -> _Floats | None:
        try:
            found = np.broadcast_to(np.asarray(function(numbers), dtype=np.float64), numbers.shape)
        except Exception:  # whatever the code of a user raises
            return None
        return found if np.isfinite(found).all() and (found >= 0).all() else None

    return delays_s


def _sizes(seconds: _Floats, weights: _Floats, tail_shape: float) -> DelaySizes:
    order = np.argsort(-seconds, kind="stable")[: np.count_nonzero(seconds)]
    share = float(weights[order].sum())
    return DelaySizes(share, seconds[order], weights[order] / share if share else weights[order], tail_shape)


def _points(function: _Function) -> tuple[_Floats, _Floats] | None:
    """Return delays and weights, whose products add up to the integral of the function."""
    ends = 0.5 ** np.arange(1, _BITS + 1)
    edges = np.concatenate([ends[::-1], 1 - ends[1:]])
    panels = np.stack([edges[:-1], edges[1:]], axis=1)
    totals = np.zeros((2, 1))
    kept: list[tuple[_Floats, _Floats]] = []
    for _ in range(_MOST_HALVINGS):
        middles = panels.mean(axis=1)
        halves = np.stack([panels[:, 0], middles, middles, panels[:, 1]], axis=1).reshape(-1, 2)
        whole, whole_weights = _rule(function, panels)
        split, split_weights = _rule(function, halves)
        if whole is None or split is None:
            return None
        of_halves = _integrals(split, split_weights).reshape(2, -1, 2).sum(axis=2)
        totals = np.maximum(totals, of_halves.sum(axis=1, keepdims=True))
        agree = (np.abs(of_halves - _integrals(whole, whole_weights)) <= _TOLERANCE * totals).all(axis=0)
        agreeing = np.repeat(agree, 2)
        kept.append((split[agreeing].ravel(), split_weights[agreeing].ravel()))
        panels = halves[~agreeing]
        if not len(panels):
            seconds, weights = (np.concatenate(each) for each in zip(*kept, strict=True))
            return seconds, weights
        if len(panels) > _MOST_PANELS:
            break
    return None


def _rule(function: _Function, panels: _Floats) -> tuple[_Floats | None, _Floats]:
    """Return delays and weights of the points of each panel, `[n_panels, n_points]`."""
    at, weights = np.polynomial.legendre.leggauss(_N_POINTS)
    half = (panels[:, 1:] - panels[:, :1]) / 2
    numbers = panels[:, :1] + half * (1 + at)
    found = function(numbers.ravel())
    return found if found is None else found.reshape(numbers.shape), half * weights


def _integrals(seconds: _Floats, weights: _Floats) -> _Floats:
    """Return the integrals of the delays, and of whether there is one, over each panel, `[2, n_panels]`."""
    return np.stack([(seconds * weights).sum(axis=1), np.where(seconds > 0, weights, 0.0).sum(axis=1)])


def _tail_shape(function: _Function, end: float) -> float:
    """Return the shape of the Pareto tail through two quantiles near an end: delays grow by 2^(bits / shape)."""
    near, far = _TAIL_BITS
    found = function(np.abs(end - 0.5 ** np.array(_TAIL_BITS)))
    if found is None or found[0] <= 0 or found[1] <= found[0]:
        return math.inf
    return (far - near) * math.log(2) / math.log(found[1] / found[0])
