"""A lower bound of the time of a schedule, from its prices, without a simulation.

A lane runs its operations in order. So a run takes at least as long as all operations of one lane of one rank. An
operation takes its price or longer: transfers that share links slow one another down, and delays come on top.
"""

from collections import Counter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.cost import Costs, Local, Shared
from simdist.plan import Enter, Plan
from simdist.plan.ops import Op, drops, lane_of

#: Seconds of each rank, `[world_size]`, or of all ranks.
_Seconds: TypeAlias = float | NDArray[np.float64]

_ROUNDING = 1e-9  # share of a time that sums of its parts in another order may differ by


def least_step_s(plan: Plan, costs: Costs) -> float:
    """Return seconds per step that no run goes below. They are 0 if ranks may pass over operations.

    Args:
        plan: A legal plan.
        costs: Its price list.
    """
    if any(drops(body) is not None or any(isinstance(op, Enter) for op in body) for body in plan.bodies):
        return 0.0
    seconds = {op: _least_s(op, costs, plan.world_size) for op in plan.distinct_ops}
    n_times: Counter[int] = Counter()
    for run in plan.order:
        for number in run.bodies:
            n_times[number] += run.times
    of_lanes: dict[str, _Seconds] = {}
    for number, times in n_times.items():
        for op in plan.bodies[number]:
            lane = lane_of(op).name
            of_lanes[lane] = of_lanes.get(lane, 0.0) + times * seconds[op]
    longest_s = max((float(np.max(each)) for each in of_lanes.values()), default=0.0)
    return longest_s / plan.n_steps * (1 - _ROUNDING)


def _least_s(op: Op, costs: Costs, world_size: int) -> _Seconds:
    """Return the seconds that an operation takes at least on each rank."""
    cost = costs.of[op]
    if isinstance(cost, Local):
        return cost.seconds
    if not isinstance(cost, Shared):
        return 0.0
    seconds = cost.alone_s
    if cost.segments:  # members that come last may end before others have had their time alone
        each_s = cost.segments.overhead_s + sum(cost.segments.n_of_phases) * cost.segments.segment_s.min()
        seconds = min(float(np.min(seconds)), float(each_s))
    if isinstance(seconds, float | int):
        return seconds
    of_ranks = np.empty(cost.group.shape(world_size))
    of_ranks[...] = seconds.reshape(of_ranks.shape[0], 1, of_ranks.shape[2])
    return of_ranks.ravel()
