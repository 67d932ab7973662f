"""What is simulated again, with seeds that the search has not seen, and what comes of it.

The smallest of many noisy numbers is smaller than what it is a sample of, so the numbers of the search promise too
much. Who is simulated again was decided by them; what is said about those does not depend on them.

An interval is of the mean over seeds: the error of the simulation, which more seeds make smaller. Where recordings are
resampled, it is what the recording can tell, which they do not: deviations of single runs count; see
`simdist.studies.resampling`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from simdist.runs.building import Built, build
from simdist.schedules import Schedule
from simdist.studies.comparison import Row, ScheduleTimes, row
from simdist.studies.resampling import Runs
from simdist.studies.statistics import widened
from simdist.tune.constraints import Facts
from simdist.tune.evaluating import Evaluated
from simdist.tune.pareto import front

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
        problem: Why its row has no interval, if chance plays a part.
    """

    schedule: Schedule
    facts: Facts
    row: Row
    measured: ScheduleTimes
    search_step_s: float
    is_baseline: bool
    on_front: bool
    problem: str | None = None


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
    runs: Runs, baseline: Evaluated, others: Iterable[Evaluated], measure: Callable[[Built], ScheduleTimes]
) -> list[Finalist]:
    """Simulate the baseline and the others again; return them, the fastest first.

    Args:
        runs: From a seed that the search has not seen.
        baseline: What the others are compared with.
        others: The baseline may be among them.
        measure: Simulates a plan for all fresh seeds.
    """
    each_once = [baseline, *(each for each in others if each is not baseline)]
    measured = [measure(build(runs.scenario_for(each.schedule), each.schedule)) for each in each_once]
    step_s = [float(each.step_s.mean()) for each in measured]
    on_front = front([(each.facts.global_gap, time_s) for each, time_s in zip(each_once, step_s, strict=True)])
    found = [
        Finalist(
            each.schedule,
            each.facts,
            _row(runs, (each.schedule, again), (baseline.schedule, measured[0])),
            again,
            each.step_s,
            is_baseline=each is baseline,
            on_front=index in on_front,
            problem=runs.problem(each.schedule) or runs.problem(baseline.schedule),
        )
        for index, (each, again) in enumerate(zip(each_once, measured, strict=True))
    ]
    return sorted(found, key=lambda each: each.row.step_s)


def _row(runs: Runs, one: tuple[Schedule, ScheduleTimes], base: tuple[Schedule, ScheduleTimes]) -> Row:
    """Return the line of a schedule; its intervals are those of the recording, if there is one."""
    found = row(one[1], base[1])
    if runs.recording is None:
        return found
    if runs.problem(one[0]) or runs.problem(base[0]):
        return replace(found, step_s_ci95=None, speedup_ci95=None)
    factor = math.sqrt(found.seeds) * runs.widening(one[0], base[0])  # from a mean over seeds to a single run
    return replace(
        found,
        step_s_ci95=widened(found.step_s, found.step_s_ci95, factor),
        speedup_ci95=widened(found.speedup, found.speedup_ci95, factor),
    )


def clearly_faster(runs: Runs, one: Finalist, other: Finalist) -> bool:
    """Tell whether the interval of the ratio of step times, in pairs of seeds, is above 1."""
    if one.problem or other.problem:
        return False
    compared = _row(runs, (one.schedule, one.measured), (other.schedule, other.measured))
    return (compared.speedup_ci95 or (compared.speedup,))[0] > 1


def chosen(runs: Runs, found: Sequence[Finalist]) -> Finalist:
    """Return the one that the search found fastest, unless another one is clearly faster with fresh seeds.

    To take the fastest with fresh seeds would again be to choose by the numbers that are then shown.

    Args:
        runs: What the finalists were simulated in.
        found: The fastest with fresh seeds first.
    """
    best = min(found, key=lambda each: each.search_step_s)
    return next((each for each in found if clearly_faster(runs, each, best)), best)
