"""Delays of operations by misbehaving links, for simulated and measured traces alike.

Alone on undisturbed links, a stage of an operation takes its latency plus its bytes / capacity on the busiest resource;
groups of one operation that share a link put their bytes on it together. A misbehaving link explains the additional
time of the stages with only this link as it was, from the operation's start on or back from its end, whichever is
longer. Its share of the rate is reduced by flows of other jobs to

    share * n / (n + n_flows)        n groups of the operation on the link

A real operation that is a little slower than alone may still be in progress when a link fails, after it would have
ended alone. The view from its end detects this.

The delay of an operation is its time beyond that alone, at most the time that a link explains. It is charged to the
link that explains most. Sharing links with other operations of the job and overhead therefore do not count.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from simdist.cost.costs import Costs, Local, Shared, Transfer
from simdist.engines.replay import Timing, replayed_step_end_s, timing
from simdist.plan import Load, Op, Plan, occurrences
from simdist.runs.building import traffic
from simdist.runs.run_directory import NO_LINKS, RunDirectory, read_real_report
from simdist.traces.breakdown import HeldUp
from simdist.traces.links import Held, LinkRecorder, LinkState
from simdist.traces.trace import Trace

_ROUNDING = 1e-9
_States = Mapping[int, Sequence[LinkState]]  # by resource


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of a group: its latency, seconds of its bytes, and of links that misbehave their seconds and groups."""

    latency_s: float
    flow_s: float
    on: dict[int, tuple[float, int]]


def find_held(trace: Trace, costs: Costs) -> Held:
    """Charge the additional time of operations to the links that delayed them.

    Args:
        trace: Measured or simulated, with the changes of its links.
        costs: Prices of its plan.
    """
    plan = trace.plan
    resources = costs.resources
    numbers = {resources.name(index): index for index in range(resources.n_resources)} if trace.links else {}
    states = {numbers[name]: each for name, each in trace.links.items() if name in numbers}
    link = np.full((plan.n_instances, plan.world_size), -1)
    seconds = np.zeros((plan.n_instances, plan.world_size))
    of_loads = _rows_of_loads(plan) if states else np.zeros(0, dtype=np.int64)
    place = {resource: number for number, resource in enumerate(states)}
    for each in occurrences(plan) if states else ():
        cost = costs.of[each.op]
        if isinstance(cost, Local):
            continue
        groups = cost.group.members(plan.world_size)
        stages = _stages(cost.transfers, costs, states) if isinstance(cost, Shared) else []
        for row in each.rows.tolist():
            if not isinstance(cost, Shared):
                stages = _stages(cost.transfers(int(np.searchsorted(of_loads, row))), costs, states)
            for members, of_group in zip(groups, stages, strict=True):
                start_s = trace.start_s[row, members].max()
                end_s = trace.end_s[row, members].max()
                found = _longest(of_group, float(start_s), float(end_s), states)
                if found:
                    link[row, members] = place[found[0]]
                    seconds[row, members] = found[1]
    return Held(tuple(map(resources.name, states)), link, seconds)


def steady_held(plan: Plan, costs: Costs) -> HeldUp | None:
    """Return the delays by links that are slow throughout, for every instance; None without such links."""
    states = {resource: ((0.0, share, 0),) for resource, share in costs.shares.items()}
    if not states:
        return None
    found: dict[Op, list[tuple[str, NDArray[np.float64]]]] = {}
    for op, cost in costs.of.items():
        seconds = np.zeros((len(states), plan.world_size, 1))
        if isinstance(cost, Shared):
            for members, stages in zip(
                cost.group.members(plan.world_size), _stages(cost.transfers, costs, states), strict=True
            ):
                if longest := _longest(stages, 0.0, np.inf, states):
                    seconds[list(states).index(longest[0]), members] = longest[1]
        named = zip(map(costs.resources.name, states), seconds, strict=True)
        found[op] = [(name, each_s) for name, each_s in named if each_s.any()]
    return lambda _, template: found[template.op]


def without_links(trace: Trace, held: Held) -> tuple[float, dict[str, float]]:
    """Return when the steps of a trace end, seconds: as it was, and by link, as if it had held nothing up.

    Both are replays; the replay without a link subtracts its delays.

    Raises:
        TraceError: An operation did not run.
    """
    traced = timing(trace)

    def end_s(held_s: NDArray[np.float64] | float) -> float:
        durations_s = np.maximum(traced.durations_s - held_s, 0.0)
        return float(replayed_step_end_s(trace.plan, Timing(traced.gaps_s, durations_s), n_variants=1)[-1, 0])

    return end_s(0.0), {name: end_s(held.of_link(number)) for number, name in enumerate(held.names)}


def with_links(run: RunDirectory, trace: Trace, costs: Costs) -> Trace:
    """Return a measured trace with the planned changes of its links, if it has none of its own.

    A transfer of another job counts for as long as it takes alone.

    Raises:
        TraceError: The report of the run is damaged, or of another run.
    """
    if trace.links or not run.scenario.has_links:
        return trace
    report = read_real_report(run.path, trace) or {}
    if report.get("links") in (None, NO_LINKS):
        return trace
    recorder = LinkRecorder(costs.slow)
    name = costs.resources.name
    for at_s, resource, share, n_flows in sorted(_told(run, costs, trace.makespan_s), key=lambda each: each[0]):
        if share is not None:
            recorder.set_share(at_s, name(resource), share)
        if n_flows:
            recorder.add_flows(at_s, name(resource), n_flows)
    return replace(trace, links=recorder.table())


def _told(run: RunDirectory, costs: Costs, until_s: float) -> Iterator[tuple[float, int, float | None, int]]:
    """Yield the planned changes of links: when, which, their share if it changes, and how many flows more."""
    found = traffic(run.scenario, costs, run.scenario.seed)
    changes = [
        (at_s, resource, number, share)
        for number, each in enumerate(found.shares if found else ())
        for at_s, share in takewhile(lambda change: change[0] <= until_s, each.shares())
        for resource in each.resources
    ]
    left: dict[int, dict[int, float]] = {}  # by resource and number of what disturbs it
    for at_s, resource, number, share in sorted(changes):
        left.setdefault(resource, {})[number] = share
        yield at_s, resource, math.prod(left[resource].values()), 0
    for background in found.background if found else ():
        resources = background.stage.resources.tolist()
        for flight in takewhile(lambda each: each.begin_s <= until_s, background.flights()):
            alone_s = (flight.nbytes or 0.0) / float(costs.undisturbed_Bps[resources].min())
            end_s = flight.begin_s + alone_s if flight.end_s is None else flight.end_s
            for resource in resources:
                yield flight.begin_s, resource, None, 1
                yield end_s, resource, None, -1


def _rows_of_loads(plan: Plan) -> NDArray[np.int64]:
    rows = [each.rows for each in occurrences(plan) if isinstance(each.op, Load)]
    return np.sort(np.concatenate(rows)) if rows else np.zeros(0, dtype=np.int64)


def _stages(transfers: Sequence[Transfer], costs: Costs, states: _States) -> list[list[_Stage]]:
    """Return the stages of every group of an operation, whose groups share links; none if no link misbehaves there."""
    undisturbed_Bps = costs.undisturbed_Bps
    n_resources = costs.resources.n_resources
    found: list[list[_Stage]] = [[] for _ in transfers]
    for number in range(max(len(transfer.stages) for transfer in transfers)):
        beside = {group: each.stages[number] for group, each in enumerate(transfers) if number < len(each.stages)}
        nbytes = np.zeros(n_resources)
        n_groups = np.zeros(n_resources, dtype=np.int64)
        for stage in beside.values():
            nbytes[stage.resources] += stage.nbytes
            n_groups[stage.resources] += 1
        together_s = nbytes / undisturbed_Bps
        for group, stage in beside.items():
            on = {
                each: (float(together_s[each]), int(n_groups[each]))
                for each in stage.resources.tolist()
                if each in states
            }
            flow_s = float(together_s[stage.resources].max(initial=0.0))
            found[group].append(_Stage(stage.latency_s, flow_s, on))
    return [stages if any(stage.on for stage in stages) else [] for stages in found]


def _longest(stages: Sequence[_Stage], start_s: float, end_s: float, states: _States) -> tuple[int, float] | None:
    """Return the link that explains most of a group's additional time, and its seconds."""
    if not stages or not end_s > start_s:
        return None
    alone_s = math.fsum(stage.latency_s + stage.flow_s for stage in stages)
    longer_s = end_s - start_s - alone_s
    if longer_s <= _ROUNDING * alone_s:
        return None
    links = dict.fromkeys(resource for stage in stages for resource in stage.on)
    explained_s = {link: _explained_s(stages, link, start_s, end_s, states[link]) for link in links}
    link = max(explained_s, key=lambda each: explained_s[each])
    held_s = min(longer_s, explained_s[link])
    return (link, held_s) if held_s > _ROUNDING * alone_s else None


def _explained_s(
    stages: Sequence[_Stage], link: int, start_s: float, end_s: float, states: Sequence[LinkState]
) -> float:
    """Return how much longer than alone stages take between two times if one link is as it was: forth, or back."""
    latencies_s = [stage.latency_s for stage in stages]
    flow_s = math.fsum(stage.flow_s for stage in stages)
    forth_s = _played_s(stages, link, start_s, states) - math.fsum(latencies_s) - flow_s
    if math.isinf(end_s):
        return forth_s
    back = [replace(stage, latency_s=after_s) for stage, after_s in zip(stages, [*latencies_s[1:], 0.0], strict=True)]
    until_s = [*(at_s for at_s, _, _ in states[1:]), np.inf]
    backwards = [(-at_s, share, n) for at_s, (_, share, n) in zip(until_s, states, strict=True)]
    back_s = _played_s(back[::-1], link, -end_s, backwards[::-1]) - math.fsum(latencies_s[1:]) - flow_s
    return max(forth_s, back_s)


def _played_s(stages: Sequence[_Stage], link: int, start_s: float, states: Sequence[LinkState]) -> float:
    """Return the time of stages from a start on with one link as it was and all others undisturbed."""
    now_s = start_s
    at = max(bisect_right(states, start_s, key=lambda state: state[0]) - 1, 0)
    for stage in stages:
        now_s += stage.latency_s
        left_s = stage.flow_s  # at full speed
        on_s, n_groups = stage.on.get(link, (0.0, 1))
        while left_s > 0:
            while at + 1 < len(states) and states[at + 1][0] <= now_s:
                at += 1
            _, share, n_flows = states[at]
            rest = share * n_groups / (n_groups + n_flows)
            speed = min(1.0, rest * stage.flow_s / on_s) if on_s else 1.0
            next_s = states[at + 1][0] if at + 1 < len(states) else np.inf
            flowing_s = left_s / speed if speed else np.inf
            if now_s + flowing_s <= next_s:
                now_s += flowing_s
                break
            left_s -= (next_s - now_s) * speed
            now_s = next_s
    return now_s - start_s
