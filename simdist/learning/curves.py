"""Curves of a training run, and when they reach a target."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from simdist.errors import ScenarioError
from simdist.settings.base import nearest, shown

Model: TypeAlias = Literal["average", "rank0", "training"]

LOSS = "loss"
_TARGET = re.compile(r"\s*(?:(rank0|average)\.)?([^\s<>=]+)\s*([<>]=)\s*(\S+)\s*")


@dataclass(frozen=True, slots=True)
class Curve:
    """Results of one training run.

    Args:
        steps: After which it was evaluated, from 0.
        losses: Mean training loss over the steps since the last evaluation; NaN at step 0.
        rank0: Values of every metric, evaluated with the parameters of rank 0: metric -> one per evaluation.
        average: The same with the average of all ranks' parameters.
        drift: How far the ranks' parameters are from their average, one per evaluation.
        noise_scale: Gradient noise scale in samples, one per evaluation; None where it is not known.
        curvature: Of the loss along the drift, likewise: averaging lowers the loss by curvature * drift^2 / 2.
        ranks: Lowest and highest value that the model of a rank has at the last evaluation, of every metric.
        why: Its ranks were trained one after the other, and not at once; None if at once.
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
    """A value that a metric is to reach.

    Args:
        metric: Its name.
        model: Whose: `average` of all ranks' parameters, or `rank0`; `training`: it is the training loss.
        sign: 1: at least the value; -1: at most.
        value: To reach.
    """

    metric: str
    model: Model
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
        """Return the metric at every evaluation; the task has it, see `check`."""
        found = {"training": {LOSS: curve.losses}, "average": curve.average, "rank0": curve.rank0}
        return np.array(found[self.model][self.metric])

    def check(self, metrics: Collection[str]) -> None:
        """Refuse a metric that the task does not have.

        Raises:
            ScenarioError: It is not.
        """
        if self.model != "training" and self.metric not in metrics:
            hint = nearest(self.metric, metrics)
            raise ScenarioError(f"--target {shown(self.metric)}: the task has no such metric: {hint}")

    def reached(self, values: NDArray[np.float64]) -> int | None:
        """Return the number of the first value that reaches the target; None if none does. NaN never does.

        One that is as large but for what float32 rounds does: 0.7 is 0.69999999 there.
        """
        hits = np.flatnonzero(self.sign * (values - self.value) >= -np.finfo(np.float32).eps * abs(self.value))
        return int(hits[0]) if len(hits) else None


#: What is shown where no target is asked for.
TRAINING_LOSS = Target(LOSS, "training", -1, 0.0)


def parse_target(text: str) -> Target:
    """Read a target: of the average model unless it says `rank0.`; `loss` alone is the training loss.

    Raises:
        ScenarioError: It is none.

    >>> str(parse_target("accuracy >= 0.98")), str(parse_target("loss<=1e-2")), str(parse_target("rank0.top5 >= .9"))
    ('accuracy of the average model >= 0.98', 'training loss <= 0.01', 'top5 of the model of rank 0 >= 0.9')
    """
    found = _TARGET.fullmatch(text)
    try:
        if found is None or not np.isfinite(float(found[4])):
            raise ValueError
        model = cast(Model, found[1] or ("training" if found[2] == LOSS else "average"))
        return Target(found[2], model, 1 if found[3] == ">=" else -1, float(found[4]))
    except ValueError:
        raise ScenarioError(
            f"--target {shown(text)}: write METRIC >= NUMBER or METRIC <= NUMBER, such as 'accuracy >= 0.98', "
            f"'rank0.accuracy >= 0.98' or 'loss <= 0.1'"
        ) from None
