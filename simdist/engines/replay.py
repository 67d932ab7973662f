"""Replay a plan with given seconds for every operation of every rank: what would have happened if some were shorter?

The rules are those of the other engines, with time as a vector over `[world_size, n_variants]`
(`simdist.engines.recurrence`).

Durations are not priced. They are taken from a trace (`timing`), changed or not, so they contain contention, slow
machines and injected delays. The seconds of a collective count from its last member's start: the transfer, without the
waiting. The gap is the time before an operation that the trace leaves unexplained. In a simulation there is none; on
real machines it is the program's own overhead. A trace replayed with its own gaps and seconds gives itself. Many
variants of one trace are replayed at once.

Source:
    Lin et al., Understanding Stragglers in Large Model Training Using What-if Analysis, OSDI 2025, arXiv 2505.05713:
    replay by dependencies and durations; their analyzer calls the `gap` launch delay.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from simdist.engines.recurrence import Durations, GroupMeeting, Price, Progress, Recurrence, Times
from simdist.errors import TraceError
from simdist.plan import COLLECTIVES, Op, Plan, Tick
from simdist.plan.ops import lane_of
from simdist.plan.walk import Template, stretches
from simdist.traces.breakdown import Collector
from simdist.traces.trace import Trace

_APART = ("io", "save")  # kinds of lanes


@dataclass(frozen=True)
class Timing:
    """The seconds of every instance in a trace: the single variant that was recorded.

    Args:
        gaps_s: Seconds before each operation was ready that the plan does not explain, float64
            `[n_instances, world_size]`; None if there are no gaps.
        durations_s: Seconds from start to end, likewise.
    """

    gaps_s: Times | None
    durations_s: Times

    def gap_s(self, index: int) -> Times | None:
        """Return the gap before an instance, `[world_size, 1]`."""
        return None if self.gaps_s is None else self.gaps_s[index, :, np.newaxis]

    def seconds(self, index: int) -> Times:
        """Return the seconds of an instance, `[world_size, 1]`."""
        return self.durations_s[index, :, np.newaxis]


def timing(trace: Trace) -> Timing:
    """Take a trace apart into gaps and seconds.

    Clocks of real machines differ, so times may contradict the plan by that much. A negative gap becomes 0.

    Raises:
        TraceError: An operation did not run on some rank.
    """
    _refuse_incomplete(trace)
    plan = trace.plan
    if trace.late:
        raise TraceError(
            f"plan {plan.name} drops the late: at other speeds others would be, which a replay cannot know"
        )
    gaps_s = np.empty_like(trace.end_s)
    durations_s = np.empty_like(trace.end_s)
    for stretch in stretches(plan):
        n = len(stretch.templates)
        last = stretch.first_index + n * stretch.times
        for at, template in enumerate(stretch.templates, start=stretch.first_index):
            rows = slice(at, last, n)
            meets = isinstance(template.op, COLLECTIVES)
            began_s = trace.ready_s[rows] if meets else trace.start_s[rows]
            free_s = np.zeros_like(began_s)
            for back in (template.previous, *template.after):
                if back is not None:
                    np.maximum(free_s, trace.end_s[at - back : last - back : n], out=free_s)
            gaps_s[rows] = 0.0 if isinstance(template.op, Tick) else np.maximum(began_s - free_s, 0.0)
            start_s = trace.start_s[rows]
            if isinstance(template.op, COLLECTIVES):
                meeting = GroupMeeting.of(template.op.group, plan.world_size, len(began_s))
                start_s = meeting.of_ranks(meeting.last_of_groups(began_s.T)).T
            durations_s[rows] = np.maximum(trace.end_s[rows] - start_s, 0.0)
    return Timing(gaps_s if gaps_s.any() else None, durations_s)


def replay(
    plan: Plan, durations: Durations, observer: Collector, *, n_variants: int, progress: Progress | None = None
) -> None:
    """Execute a plan with given durations and report all times to `observer`.

    Memory is that of a few steps, plus what `durations` and `observer` keep.

    Args:
        plan: A legal plan.
        durations: How long everything takes.
        observer: Gets the times of every instance in program order, each `[world_size, n_variants]`.
        n_variants: Variants.
        progress: Called with the number of steps done.
    """
    collectives = (op for body in plan.bodies for op in body if isinstance(op, COLLECTIVES))
    prices: dict[Op, Price] = {op: GroupMeeting.of(op.group, plan.world_size, n_variants) for op in collectives}
    Recurrence(plan, n_variants, prices, durations=durations, observer=observer).run(stretches(plan), progress)


def replayed_step_end_s(
    plan: Plan, durations: Durations, *, n_variants: int, progress: Progress | None = None
) -> Times:
    """Return when the last rank finished each step in each variant, float64 `[n_steps, n_variants]`.

    Loads and saves do not count: they belong to later steps, or to none (as in `simdist.traces.waiting.step_end_s`).
    """
    kept = _StepEnds(plan, n_variants)
    replay(plan, durations, kept, n_variants=n_variants, progress=progress)
    return np.asarray(np.maximum.accumulate(kept.end_s, axis=0))


class _StepEnds:
    """Keeps the end of each step. A stream runs in order, so only its last operation of a step counts."""

    only_ends: ClassVar[bool] = True

    def __init__(self, plan: Plan, n_variants: int) -> None:
        lengths = [len(body) for body in plan.bodies]
        bodies = list(plan.body_of_steps())
        lasts = [_last_positions(plan, body) for body in range(len(plan.bodies))]
        self.end_s = np.zeros((plan.n_steps, n_variants))
        self._steps = np.repeat(np.arange(plan.n_steps), [lengths[body] for body in bodies])
        self._counts = np.concatenate([lasts[body] for body in bodies])

    def add(self, index: int, template: Template, ready_s: Times, start_s: Times, end_s: Times) -> None:
        if self._counts[index]:
            step_end_s = self.end_s[self._steps[index]]
            np.maximum(step_end_s, end_s.max(axis=0), out=step_end_s)


def _last_positions(plan: Plan, number: int) -> NDArray[np.bool_]:
    """Tell which operations of a body are the last in their lane, without input and output lanes."""
    lanes = [lane_of(op) for op in plan.bodies[number]]
    last_of = {lane: position for position, lane in enumerate(lanes) if lane.kind not in _APART}
    return np.isin(np.arange(len(lanes)), list(last_of.values()))


def _refuse_incomplete(trace: Trace) -> None:
    missing = np.argwhere(~np.isfinite(trace.end_s))
    if len(missing):
        raise TraceError(
            f"plan {trace.plan.name}: {len(missing)} operations did not run, the first of them on rank "
            f"{missing[0][1]}: only complete steps can be replayed"
        )
