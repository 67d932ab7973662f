"""Ranking of schedules: does the simulation put them in the order that was measured?

A pair of schedules counts if its step times differ by more than 5 %, as predicted or as measured. A measured difference
of more than 5 % is an order: it is predicted rightly if the simulation, too, takes less time for the faster one, by
however little, since a simulation has no noise. A smaller one is a tie, as repetitions of a run may come in either
order. So a pair that is measured as a tie, and for which more than 5 % were predicted, is never right, not even where
the signs agree: a difference was predicted that was not measured.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import TypeAlias

import numpy as np

from simdist.studies.statistics import ratio
from simdist.studies.validation import Validation

_CLEAR = 1.05  # of two schedules that differ by less, repetitions of a run may come in either order

#: Two schedules, the faster first.
_Pair: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step of a schedule takes; any time that is proportional to it does, too."""

    schedule: str
    simulated_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class PairOrder:
    """Pairs of schedules whose step times differ by more than 5 %, as predicted or as measured.

    Args:
        right: Measured to differ, and predicted in the same order.
        wrong: Measured to differ, and predicted in the other order or as equal; the faster as measured first.
        unmeasured: Predicted to differ, and measured within 5 %; the faster as predicted first.
    """

    right: tuple[_Pair, ...]
    wrong: tuple[_Pair, ...]
    unmeasured: tuple[_Pair, ...]

    @property
    def n_pairs(self) -> int:
        """Number of the pairs."""
        return len(self.right) + len(self.wrong) + len(self.unmeasured)

    @property
    def counts(self) -> str:
        """Number of right pairs, and the errors of the others, in words."""
        return "; ".join(self._parts(("", "")))

    @property
    def verdict(self) -> str:
        """The same, with the names of pairs that are not right."""
        wrong = ", ".join(f"{faster} is faster than {slower}" for faster, slower in self.wrong)
        unmeasured = ", ".join(f"{faster} against {slower}" for faster, slower in self.unmeasured)
        return "; ".join(self._parts((f" (measured, {wrong})", f" ({unmeasured})")))

    def _parts(self, names: tuple[str, str]) -> Iterator[str]:
        if not self.n_pairs:
            yield "no two schedules differ by more than 5 %, predicted or measured"
            return
        n_wrong = len(self.wrong)
        n_unmeasured = len(self.unmeasured)
        pairs = "1 pair that differs" if self.n_pairs == 1 else f"{self.n_pairs:,} pairs that differ"
        yield f"of {pairs} by more than 5 %, predicted or measured, {_are(len(self.right))} right"
        if n_wrong:
            yield f"{_are(n_wrong)} wrong{names[0]}"
        if n_unmeasured:
            differences = "1 difference was" if n_unmeasured == 1 else f"{n_unmeasured:,} differences were"
            yield f"{differences} predicted but not measured{names[1]}"


def _are(count: int) -> str:
    return f"{count:,} {'is' if count == 1 else 'are'}"


def order(times: Sequence[StepTime]) -> PairOrder:
    """Compare the predicted order of schedules with the measured one, pair by pair.

    >>> found = order([StepTime("sync", 1.0, 1.0), StepTime("local", 0.8, 0.9), StepTime("hsgd", 0.92, 1.02)])
    >>> found.right, found.unmeasured
    ((('local', 'sync'), ('local', 'hsgd')), (('hsgd', 'sync'),))
    """
    right: list[_Pair] = []
    wrong: list[_Pair] = []
    unmeasured: list[_Pair] = []
    for a, b in combinations(sorted(times, key=lambda each: each.measured_s), 2):
        if b.measured_s > _CLEAR * a.measured_s:
            (right if b.simulated_s > a.simulated_s else wrong).append((a.schedule, b.schedule))
        else:
            faster, slower = sorted((a, b), key=lambda each: each.simulated_s)
            if slower.simulated_s > _CLEAR * faster.simulated_s:
                unmeasured.append((faster.schedule, slower.schedule))
    return PairOrder(tuple(right), tuple(wrong), tuple(unmeasured))


def together(orders: Iterable[PairOrder]) -> PairOrder:
    """Put the pairs of several scenarios together; schedules of different scenarios are not compared."""
    found = list(orders)
    return PairOrder(
        right=tuple(chain.from_iterable(each.right for each in found)),
        wrong=tuple(chain.from_iterable(each.wrong for each in found)),
        unmeasured=tuple(chain.from_iterable(each.unmeasured for each in found)),
    )


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """A schedule among others.

    Args:
        schedule: Label.
        simulated_s, measured_s: Makespan.
        error: Its error.
        simulated_speedup, measured_speedup: Speed-up over the baseline.
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
        baseline: Label of the baseline of speed-ups.
        rows: A row per schedule.
        order: Which pairs of them are in the right order.
        median_error: Of the absolute errors of the makespans.
        worst_error: The error of a makespan that is farthest from 0.
    """

    baseline: str
    rows: tuple[SummaryRow, ...]
    order: PairOrder
    median_error: float
    worst_error: float


def summarize(validations: Sequence[Validation], *, baseline: str) -> Summary:
    """Compare the order of schedules.

    Args:
        validations: One or more, of one scenario.
        baseline: Schedule of one of them.
    """
    times = [
        StepTime(each.schedule, each.simulated_s / each.n_steps, each.measured_s / each.n_steps) for each in validations
    ]
    base = next(time for time in times if time.schedule == baseline)
    rows = tuple(
        SummaryRow(
            each.schedule,
            each.simulated_s,
            each.measured_s,
            each.error,
            simulated_speedup=ratio(base.simulated_s, time.simulated_s),
            measured_speedup=ratio(base.measured_s, time.measured_s),
        )
        for each, time in zip(validations, times, strict=True)
    )
    errors = [row.error for row in rows]
    return Summary(
        baseline, rows, order(times), median_error=float(np.median(np.abs(errors))), worst_error=max(errors, key=abs)
    )
