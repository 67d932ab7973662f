"""How long the steps of a trace take, and what checkpoints add to them, of all ranks together.

    |-- step --|-- step --|- stall -|-- step --|
                          |-- write ----|

A step ends with the last of its operations on any rank. After some of them, ranks stand still for a checkpoint, which
is usable when it is written.
"""

from dataclasses import dataclass

import numpy as np

from simdist.plan import Plan, ops
from simdist.plan.delays import Floats
from simdist.plan.walk import occurrences
from simdist.traces.trace import Trace


@dataclass(frozen=True)
class TimesOfSteps:
    """Times of all steps of a trace; NaN for steps that it does not have.

    Args:
        end_s: When each step ends, without its checkpoint, `[n_steps]`.
        begin_next_s: When ranks no longer stand still for its checkpoint, `[n_steps]`.
        usable_s: When its checkpoint is usable; NaN for steps without, `[n_steps]`.
    """

    end_s: Floats
    begin_next_s: Floats
    usable_s: Floats

    def begin_s(self, step: int, first_step: int) -> float:
        """Return when a step begins in a trace that begins with `first_step` at 0."""
        return float(self.begin_next_s[step - 1]) if step > first_step else 0.0

    def stalls_s(self, first_step: int, last_step: int) -> float:
        """Return how long ranks stand still for the checkpoints of some steps, the last one excluded."""
        return float(np.nansum((self.begin_next_s - self.end_s)[first_step:last_step]))

    @property
    def stall_s(self) -> float:
        """How long ranks stand still for a checkpoint, in the mean; 0 without any."""
        found = (self.begin_next_s - self.end_s)[np.isfinite(self.usable_s)]
        return float(np.nanmean(found)) if np.isfinite(found).any() else 0.0

    @property
    def write_s(self) -> float:
        """How long it takes then until the checkpoint is usable, in the mean; 0 without any."""
        found = self.usable_s - self.begin_next_s
        return max(0.0, float(np.nanmean(found))) if np.isfinite(found).any() else 0.0

    @property
    def step_s(self) -> float:
        """How long a step takes without checkpoints, in the mean."""
        return float(np.nanmean(self.end_s - np.concatenate([[0.0], self.begin_next_s[:-1]])))


def times_of_steps(trace: Trace) -> TimesOfSteps:
    """Return the times of the steps of a trace."""
    n_steps = trace.plan.n_steps
    end_s, begin_next_s, usable_s = (np.full(n_steps, np.nan) for _ in range(3))
    stands = _standing(trace.plan)
    for each in occurrences(trace.plan):
        ends_s = np.fmax.reduce(trace.end_s[each.rows], axis=1)
        if isinstance(each.op, ops.Save):
            usable_s[each.steps] = ends_s
        elif ops.lane_of(each.op).kind != "io":
            begin_next_s[each.steps] = np.fmax(begin_next_s[each.steps], ends_s)
            if each.op not in stands:
                end_s[each.steps] = np.fmax(end_s[each.steps], ends_s)
    return TimesOfSteps(end_s, begin_next_s, usable_s)


def _standing(plan: Plan) -> set[ops.Op]:
    """Return the operations for which ranks stand still, other than writing."""
    everything = [op for body in plan.bodies for op in body]
    saves = [op for op in everything if isinstance(op, ops.Save)]
    copied = {name for op in saves for name in op.srcs}
    written = {op.dst for op in saves if op.dst}
    return {
        op
        for op in everything
        if (isinstance(op, ops.Copy) and op.dst in copied) or (isinstance(op, ops.Wait) and op.buffer in written)
    }
