"""Whether the simulation puts schedules in the order that was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from simdist.validate import Validation

__all__ = ["Summary", "SummaryRow", "summarize"]

_CLEAR = 1.05  # of two schedules that differ by less, repetitions of a run may come in either order


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """A schedule among others.

    Args:
        schedule: Its label.
        simulated_s: Makespan.
        measured_s: Makespan.
        error: Of the makespan.
        simulated_speedup: Step time of the baseline / that of this schedule.
        measured_speedup: Likewise.
    """

    schedule: str
    simulated_s: float
    measured_s: float
    error: float
    simulated_speedup: float
    measured_speedup: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Several schedules: does the simulation rank them as they were measured?

    Args:
        baseline: Label of the schedule to which speed-ups are relative.
        rows: A row per schedule.
        n_clear_pairs: Pairs of schedules whose measured step times differ by more than 5 %.
        wrong_pairs: Those of them that the simulation puts in the other order, or takes for equal; the faster first.
        median_error: Of the absolute errors of the makespans.
        worst_error: The error of a makespan that is farthest from 0.
    """

    baseline: str
    rows: tuple[SummaryRow, ...]
    n_clear_pairs: int
    wrong_pairs: tuple[tuple[str, str], ...]
    median_error: float
    worst_error: float


def summarize(validations: Sequence[Validation], *, baseline: str) -> Summary:
    """Compare the order of schedules.

    Args:
        validations: One or more, of one scenario.
        baseline: Schedule of one of them.
    """
    base = next(each for each in validations if each.schedule == baseline)
    rows = tuple(
        SummaryRow(
            each.schedule,
            each.simulated_s,
            each.measured_s,
            each.error,
            simulated_speedup=_speedup(base.simulated_s / base.n_steps, each.simulated_s / each.n_steps),
            measured_speedup=_speedup(base.measured_s / base.n_steps, each.measured_s / each.n_steps),
        )
        for each in validations
    )
    by_speed = sorted(rows, key=lambda row: -row.measured_speedup)
    clear = [(a, b) for a, b in combinations(by_speed, 2) if a.measured_speedup > _CLEAR * b.measured_speedup]
    errors = [row.error for row in rows]
    return Summary(
        baseline,
        rows,
        n_clear_pairs=len(clear),
        wrong_pairs=tuple((a.schedule, b.schedule) for a, b in clear if a.simulated_speedup <= b.simulated_speedup),
        median_error=float(np.median(np.abs(errors))),
        worst_error=max(errors, key=abs),
    )


def _speedup(baseline_s: float, step_s: float) -> float:
    return baseline_s / step_s if step_s else np.nan
