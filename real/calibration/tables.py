"""Times of one hop from times of collectives: pure arithmetic on measurements.

A ring all_reduce of S bytes over n members takes 2 (n - 1) rounds, an all_gather or a reduce_scatter n - 1. In each
round, each member passes S / n bytes to the next one. So one hop of S / n bytes takes t / (2 (n - 1)), whatever the
time of a message depends on. The cost model multiplies again and reproduces the measured time. Each of the three
collectives has its own hops, because libraries perform them in different ways: NCCL may reduce in the switches.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from simdist.errors import ScenarioError
from simdist.plan.group import Group
from simdist.scenario import Library, Link, TablePoint
from simdist.settings.units import format_nbytes

OpName: TypeAlias = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "sendrecv"]
Where: TypeAlias = Literal[
    "node", "one per node", "all per node", "half of the nodes", "world", "pair in node", "pair of nodes"
]
RingOp: TypeAlias = Literal["all_reduce", "reduce_scatter", "all_gather"]
MEASURED_OPS: tuple[OpName, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
FLOAT_NBYTES = 4


@dataclass(frozen=True, slots=True)
class MeasuringTask:
    """An operation to measure.

    Args:
        op: The collective, or `sendrecv`: a message from one rank to another.
        where: The members: the ranks of each node, all nodes at once; the ranks with local rank 0 of all nodes; the
            ranks of equal local rank of all nodes, for all local ranks at once; the ranks of each half of the nodes,
            both at once; all ranks; two ranks.
        group: Group of the collective. For a message, sender and receiver are the first two members of the first group.
        count: float32 elements of the whole.
    """

    op: OpName
    where: Where
    group: Group
    count: int

    @property
    def nbytes(self) -> int:
        """Size of the whole, as in nccl-tests: S in the formulas."""
        return self.count * FLOAT_NBYTES

    @property
    def n_members(self) -> int:
        """Ranks of a group."""
        return 2 if self.op == "sendrecv" else self.group.size

    def taking_part(self, world_size: int) -> list[list[int]]:
        """Return the members of each group that takes part."""
        groups = self.group.members(world_size)
        match self.where:
            case "node" | "all per node" | "half of the nodes" | "world":
                return groups
            case "one per node":
                return groups[:1]
            case "pair in node" | "pair of nodes":
                return [groups[0][:2]]
            case _:
                assert_never(self.where)

    def __str__(self) -> str:
        return f"{self.op} ({self.where}, {format_nbytes(self.nbytes)})"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The times of one operation of one size.

    Args:
        task: The operation.
        seconds: Seconds of each repetition, in each group that took part; at least one.
    """

    task: MeasuringTask
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median seconds of the repetitions."""
        return self.quantile_s(0.5)

    def quantile_s(self, share: float) -> float:
        """Return the quantile of the repetitions' seconds for a share."""
        return float(np.quantile(self.seconds, share))


@dataclass(frozen=True, slots=True)
class Hop:
    """A message from one member of a ring to the next.

    Args:
        nbytes: Bytes of the message.
        time_s: Seconds of the message.
        weight: Number of repetitions behind this point.
    """

    nbytes: int
    time_s: float
    weight: float = 1.0


def hops(measurements: Iterable[Measurement], where: Where, op: RingOp, library: Library) -> list[Hop]:
    """Return the hops of a collective measured at a place, by size; equal sizes are one hop."""
    times_around = 2 if op == "all_reduce" or (op == "reduce_scatter" and library == "gloo") else 1  # as priced
    found: dict[int, list[Hop]] = {}
    for each in measurements:
        if each.task.op == op and each.task.where == where:
            n = each.task.n_members
            weight = float(len(each.seconds))
            hop = Hop(each.task.nbytes // n, each.median_s / (times_around * (n - 1)), weight)
            found.setdefault(hop.nbytes, []).append(hop)
    return [Hop(nbytes, _mean_s(same), math.fsum(hop.weight for hop in same)) for nbytes, same in sorted(found.items())]


def pooled(points: Sequence[Hop]) -> list[Hop]:
    """Replace decreasing times of growing sizes by their common mean, until no time decreases.

    This is isotonic regression: the weighted least-squares fit among all times that do not decrease.

    >>> [hop.time_s for hop in pooled([Hop(1, 1.0), Hop(2, 4.0), Hop(3, 2.0), Hop(4, 5.0)])]
    [1.0, 3.0, 3.0, 5.0]

    Source:
        Barlow, Bartholomew, Bremner, Brunk, Statistical Inference under Order Restrictions, 1972: pool adjacent
        violators.
    """
    from scipy.optimize import isotonic_regression

    times_s = isotonic_regression([hop.time_s for hop in points], weights=[hop.weight for hop in points]).x.tolist()
    return [replace(hop, time_s=time_s) for hop, time_s in zip(points, times_s, strict=True)]


def link_table(points: Sequence[Hop], of_ops: Mapping[str, Sequence[Hop]] = MappingProxyType({})) -> Link:
    """Return a link with tables of these points, pooled if times decrease.

    Args:
        points: Hops of all_reduces.
        of_ops: Hops of other collectives, by key of `Link.tables`. One size alone is no table.

    Raises:
        ScenarioError: There are fewer than two sizes of all_reduce.
    """
    _need_two(points)
    others = {key: _table(some) for key, some in of_ops.items() if len(some) > 1}
    return Link.model_validate({"table": _table(points), **others})


def _table(points: Sequence[Hop]) -> tuple[TablePoint, ...]:
    return tuple(TablePoint(nbytes=hop.nbytes, time_s=hop.time_s) for hop in pooled(points))


def line(points: Sequence[Hop], rate_Bps: float | None = None) -> Link:
    """Fit the line latency + nbytes / (bandwidth * efficiency) by least squares of the relative errors.

    Args:
        points: At least two sizes.
        rate_Bps: The stated bandwidth; None takes the fitted one, with efficiency 1. If the points exceed the stated
            bandwidth, which no link can do, the efficiency is 1.

    Raises:
        ScenarioError: There are fewer than two sizes, or times do not grow and no rate is stated.
    """
    _need_two(points)
    if rate_Bps is None:
        latency_s, slope_s = _fit(points)
        if slope_s <= 0:
            raise ScenarioError(
                f"times do not grow from {points[0].nbytes} B to {points[-1].nbytes} B a hop, so they tell no "
                f"bandwidth; give a larger --max-size, or --links table"
            )
        return Link(latency_s=latency_s, bandwidth_Bps=1 / slope_s)
    latency_s, slope_s = _fit(points, least_s_per_byte=1 / rate_Bps)
    return Link(latency_s=latency_s, bandwidth_Bps=rate_Bps, efficiency=min(1.0, 1 / (slope_s * rate_Bps)))


def _fit(points: Sequence[Hop], *, least_s_per_byte: float = 0.0) -> tuple[float, float]:
    """Return latency and seconds per byte, each at least its minimum, of the line with the smallest relative errors."""
    nbytes = np.array([hop.nbytes for hop in points], dtype=np.float64)
    time_s = np.array([hop.time_s for hop in points])
    weights = np.sqrt([hop.weight for hop in points]) / time_s
    columns = np.stack([weights, nbytes * weights], axis=1)
    latency_s, slope_s = _non_negative(columns, (time_s - least_s_per_byte * nbytes) * weights).tolist()
    return latency_s, least_s_per_byte + slope_s


def _non_negative(factors: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the non-negative least-squares solution; columns are scaled first, because units differ.

    Args:
        factors: `[n_equations, n_unknowns]`.
        times: `[n_equations]`.
    """
    from scipy.optimize import nnls

    scale = np.linalg.norm(factors, axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(factors / scale, times)
    return np.asarray(solution / scale)


def _need_two(points: Sequence[Hop]) -> None:
    if len(points) < 2:
        raise ScenarioError(
            f"{len(points)} size(s) of all_reduce were measured; a link takes two or more: lower --min-size or raise "
            f"--max-size"
        )


def _mean_s(block: Sequence[Hop]) -> float:
    if len(block) == 1:
        return block[0].time_s
    return math.fsum(hop.weight * hop.time_s for hop in block) / math.fsum(hop.weight for hop in block)
