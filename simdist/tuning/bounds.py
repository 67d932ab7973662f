"""Lower bounds of the time of a schedule, from its prices, without a simulation.

An operation takes its price or longer: transfers that share links slow one another down, and delays come on top. So a
run takes at least as long as all operations of one lane of one rank, which run in order. It also takes at least as long
as any chain of operations that come after one another.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simdist.cost import Costs, Local, Shared
from simdist.plan import Enter, Plan
from simdist.plan.ops import Op, drops, lane_of
from simdist.plan.walk import Template, stretches

#: Seconds of each rank, `[world_size]`, or of all ranks.
_Seconds: TypeAlias = float | NDArray[np.float64]
#: Seconds of instances, and distances to those that each comes after.
_Program: TypeAlias = tuple[tuple[float, tuple[int, ...]], ...]
#: Programs of steps, and how often each is repeated.
_Runs: TypeAlias = list[tuple[_Program, int]]

_MOST_RUN = 3  # repetitions
_ROUNDING = 1e-9  # share of a time that sums of its parts in another order may differ by


def least_step_s(plan: Plan, costs: Costs) -> float:
    """Return seconds per step that no run goes below, by lanes. They are 0 if ranks may pass over operations."""
    seconds = _least_seconds(plan, costs)
    n_times: Counter[int] = Counter()
    for run in plan.order:
        for number in run.bodies:
            n_times[number] += run.times
    of_lanes: dict[str, _Seconds] = {}
    for number, times in n_times.items():
        for op in plan.bodies[number] if seconds else ():
            lane = lane_of(op).name
            of_lanes[lane] = of_lanes.get(lane, 0.0) + times * seconds[op]
    longest_s = max((float(np.max(each)) for each in of_lanes.values()), default=0.0)
    return longest_s / plan.n_steps * (1 - _ROUNDING)


def least_chain_step_s(plan: Plan, costs: Costs) -> float:
    """Return seconds per step that no run goes below, by chains. This is more work than `least_step_s`, and sharper."""
    seconds = {op: float(np.min(each)) for op, each in _least_seconds(plan, costs).items()}
    ends_s: list[float] = []  # of the last instances; what is older counts as ended at the start
    for stretch in stretches(plan) if seconds else ():
        of_steps = groupby(stretch.templates, attrgetter("step"))
        known = {number: seconds[op] for number, op in {id(each.op): each.op for each in stretch.templates}.items()}
        programs = (tuple([(known[id(each.op)], _backs(each)) for each in step]) for _, step in of_steps)
        runs = [(program, len(list(equal))) for program, equal in groupby(programs)]
        furthest = max((back for program, _ in runs for _, backs in program for back in backs), default=1)
        n_kept = max((furthest, *stretch.live))
        ends_s = [0.0] * (n_kept - len(ends_s)) + ends_s
        _repeat(partial(_run_all, runs, n_kept), ends_s, stretch.times, n_kept, n_kept, most=_MOST_RUN)
        del ends_s[:-n_kept]
    return max(ends_s, default=0.0) / plan.n_steps * (1 - _ROUNDING)


def _least_seconds(plan: Plan, costs: Costs) -> dict[Op, _Seconds]:
    """Return the seconds that operations take at least. There are none if ranks may pass over operations."""
    if any(drops(body) is not None or any(isinstance(op, Enter) for op in body) for body in plan.bodies):
        return {}
    return {op: _least_s(op, costs, plan.world_size) for op in plan.distinct_ops}


def _backs(template: Template) -> tuple[int, ...]:
    """Return the distances to what an instance comes after."""
    return template.after if template.previous is None else (template.previous, *template.after)


def _repeat(
    run: Callable[[list[float]], None], ends_s: list[float], times: int, n_before: int, n_kept: int, *, most: int
) -> None:
    """Append lower bounds of the ends of some repetitions, or only of the last ones.

    Args:
        run: Appends the ends of one repetition.
        ends_s: Ends of instances so far.
        times: Repetitions.
        n_before: Number of the last ends on which a repetition depends.
        n_kept: Number of the last ends on which anything later depends, `n_before` or more.
        most: Most repetitions to run if times do not become steady.
    """
    for left in range(times - 1, -1, -1):
        n_ends = len(ends_s)
        before_s = ends_s[-n_before:] if left else []
        run(ends_s)
        last_s = ends_s[n_ends:]
        if not (left and last_s):
            break
        moved_s = [end_s - other_s for end_s, other_s in zip(ends_s[-n_before:], before_s, strict=True)]
        by_s = min(moved_s)
        if max(moved_s) - by_s <= _ROUNDING * by_s or times - left == most:
            # each further repetition moves everything by at least what all that it depends on has moved by
            n_copies = min(left, 1 + n_kept // len(last_s))
            for number in range(left - n_copies + 1, left + 1):
                ends_s += [end_s + number * by_s for end_s in last_s]
            break


def _run_all(runs: _Runs, n_kept: int, ends_s: list[float]) -> None:
    """Append the ends of all instances of a stretch."""
    for program, times in runs:
        furthest = max((back for _, backs in program for back in backs), default=1)
        _repeat(partial(_run, program), ends_s, times, furthest, n_kept, most=times)


def _run(program: _Program, ends_s: list[float]) -> None:
    """Append the ends of the instances of a step."""
    for seconds, backs in program:
        ready_s = 0.0
        for back in backs:
            ready_s = max(ready_s, ends_s[-back])
        ends_s.append(ready_s + seconds)


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
    n_blocks, size, stride = cost.group.shape(world_size)
    of_groups = seconds.reshape(n_blocks, 1, stride)
    return cost.group.joined(np.broadcast_to(of_groups, (n_blocks, size, stride)))
