"""Curves of training runs, and the step at which they reach a target."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from simdist.errors import ScenarioError
from simdist.settings.base import nearest, shown

_Model: TypeAlias = Literal["average", "rank0", "training"]

_LOSS = "loss"
_TARGET = re.compile(r"\s*(?:(rank0|average)\.)?([^\s<>=]+)\s*([<>]=)\s*(\S+)\s*")


@dataclass(frozen=True, slots=True)
class Curve:
    """Results of one training run.

    Args:
        steps: Number of steps before each evaluation, from 0.
        losses: Mean training loss over the steps since the last evaluation; NaN at step 0.
        rank0: Metric -> values, one per evaluation, with the parameters of rank 0.
        average: The same with the average of all ranks' parameters.
        drift: Distance of the ranks' parameters from their average, one per evaluation.
        noise_scale: Gradient noise scale in samples, one per evaluation; None if unknown.
        curvature: Curvature of the loss along the drift, one per evaluation: averaging lowers the loss by curvature *
            drift^2 / 2. None if unknown.
        ranks: Metric -> lowest and highest value of the ranks' own models at the last evaluation.
        why: Why ranks were trained one after the other and not at once; None if at once.
    """

    steps: list[int]
    losses: list[float]
    rank0: dict[str, list[float]]
    average: dict[str, list[float]]
    drift: list[float]
    noise_scale: list[float | None]
    curvature: list[float | None]
    ranks: dict[str, list[float]]
    why: str | None


@dataclass(frozen=True, slots=True)
class Target:
    """A value that a metric must reach.

    Args:
        metric: Its name.
        model: `average` of all ranks' parameters, `rank0`, or `training` for the training loss.
        sign: 1 for at least the value, -1 for at most.
        value: The value to reach.
    """

    metric: str
    model: _Model
    sign: int
    value: float

    def __str__(self) -> str:
        return f"{self.what} {'>=' if self.sign > 0 else '<='} {self.value:g}"

    @property
    def what(self) -> str:
        """Metric and model in words."""
        whose = "average model" if self.model == "average" else "model of rank 0"
        return "training loss" if self.model == "training" else f"{self.metric} of the {whose}"

    def values(self, curve: Curve) -> NDArray[np.float64]:
        """Return the metric at each evaluation; the task must have it, see `check`."""
        found = {"training": {_LOSS: curve.losses}, "average": curve.average, "rank0": curve.rank0}
        return np.array(found[self.model][self.metric])

    def check(self, metrics: Collection[str]) -> None:
        """Refuse a metric that the task does not have.

        Raises:
            ScenarioError: The task does not have it.
        """
        if self.model != "training" and self.metric not in metrics:
            hint = nearest(self.metric, metrics)
            raise ScenarioError(f"--target {shown(self.metric)}: the task has no such metric: {hint}")

    def reached(self, values: NDArray[np.float64]) -> int | None:
        """Return the index of the first value that reaches the target; None if none does. NaN never does.

        Rounding to float32 is tolerated: 0.7 becomes 0.69999999 there.
        """
        hits = np.flatnonzero(self.sign * (values - self.value) >= -np.finfo(np.float32).eps * abs(self.value))
        return int(hits[0]) if len(hits) else None


#: The metric to show without a target.
TRAINING_LOSS = Target(_LOSS, "training", -1, 0.0)


def parse_target(text: str) -> Target:
    """Read a target. It is for the average model unless it begins with `rank0.`; `loss` alone is the training loss.

    Raises:
        ScenarioError: It is not a target.

    >>> str(parse_target("accuracy >= 0.98")), str(parse_target("loss<=1e-2")), str(parse_target("rank0.top5 >= .9"))
    ('accuracy of the average model >= 0.98', 'training loss <= 0.01', 'top5 of the model of rank 0 >= 0.9')
    """
    found = _TARGET.fullmatch(text)
    try:
        if found is None or not np.isfinite(float(found[4])):
            raise ValueError
        model = cast(_Model, found[1] or ("training" if found[2] == _LOSS else "average"))
        return Target(found[2], model, 1 if found[3] == ">=" else -1, float(found[4]))
    except ValueError:
        raise ScenarioError(
            f"--target {shown(text)}: write METRIC >= NUMBER or METRIC <= NUMBER, such as 'accuracy >= 0.98', "
            f"'rank0.accuracy >= 0.98' or 'loss <= 0.1'"
        ) from None
