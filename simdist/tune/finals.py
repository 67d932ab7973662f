"""What is simulated again, with seeds that the search has not seen, and what comes of it.

The smallest of many noisy numbers is smaller than what it is a sample of, so the numbers of the search promise too
much. Who is simulated again was decided by them; what is said about those does not depend on them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from simdist.build import Built, build
from simdist.compare import Measured, Row, row
from simdist.scenario import Scenario
from simdist.schedules import Schedule
from simdist.tune.constraints import Facts
from simdist.tune.evaluating import Evaluated
from simdist.tune.pareto import front

__all__ = ["Finalist", "chosen", "clearly_faster", "finalists", "measure_finalists"]

_N_FASTEST = 3


@dataclass(frozen=True)
class Finalist:
    """A schedule that was simulated again.

    Args:
        schedule: With its label.
        facts: What its plan says.
        row: Its line of the speed-up table, over the baseline, with fresh seeds.
        measured: What that follows from.
        search_step_s: Seconds per step with the seeds of the search.
        is_baseline: Whether the others are compared with it.
        on_front: Whether no finalist that exchanges with all ranks as often is faster.
    """

    schedule: Schedule
    facts: Facts
    row: Row
    measured: Measured
    search_step_s: float
    is_baseline: bool
    on_front: bool


def finalists(evaluated: Sequence[Evaluated]) -> list[Evaluated]:
    """Return the fastest three, the fastest of each kind, and the front of step time and global exchanges.

    Args:
        evaluated: Different plans, the baseline too if it keeps to the constraints.
    """
    ranked = sorted(evaluated, key=lambda each: each.step_s)
    of_kinds = {each.schedule.kind: each for each in reversed(ranked)}
    on_front = front([(each.facts.global_gap, each.step_s) for each in evaluated])
    chosen = [*ranked[:_N_FASTEST], *of_kinds.values(), *(evaluated[index] for index in on_front)]
    return sorted({id(each): each for each in chosen}.values(), key=lambda each: each.step_s)


def measure_finalists(
    scenario: Scenario, baseline: Evaluated, others: Iterable[Evaluated], measure: Callable[[Built], Measured]
) -> list[Finalist]:
    """Simulate the baseline and the others again; return them, the fastest first.

    Args:
        scenario: With a seed that the search has not seen.
        baseline: What the others are compared with.
        others: The baseline may be among them.
        measure: Simulates a plan for all fresh seeds.
    """
    each_once = [baseline, *(each for each in others if each is not baseline)]
    measured = [measure(build(scenario, each.schedule)) for each in each_once]
    step_s = [float(each.step_s.mean()) for each in measured]
    on_front = front([(each.facts.global_gap, time_s) for each, time_s in zip(each_once, step_s, strict=True)])
    found = [
        Finalist(
            each.schedule, each.facts, row(again, measured[0]), again, each.step_s, each is baseline, index in on_front
        )
        for index, (each, again) in enumerate(zip(each_once, measured, strict=True))
    ]
    return sorted(found, key=lambda each: each.row.step_s)


def clearly_faster(one: Finalist, other: Finalist) -> bool:
    """Tell whether the interval of the ratio of step times, in pairs of seeds, is above 1."""
    compared = row(one.measured, other.measured)
    return (compared.speedup_ci95 or (compared.speedup,))[0] > 1


def chosen(found: Sequence[Finalist]) -> Finalist:
    """Return the one that the search found fastest, unless another one is clearly faster with fresh seeds.

    To take the fastest with fresh seeds would again be to choose by the numbers that are then shown.

    Args:
        found: The fastest with fresh seeds first.
    """
    best = min(found, key=lambda each: each.search_step_s)
    return next((each for each in found if clearly_faster(each, best)), best)
