"""As many seeds as intervals of a stated width take: a comparison is repeated with more of them.

Widths shrink with the square root of the number of seeds, so few repeats are enough. A repeat simulates only new seeds.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from simdist.scenario.scenario import AnyScenario
from simdist.settings.units import format_share
from simdist.studies.comparison import Comparison, compare
from simdist.studies.measuring import RunsSoFar
from simdist.studies.remarks import Remark
from simdist.studies.statistics import Interval

_FIRST = 20
_RESERVE = 1.2  # more than the widths so far call for, because they are estimates
_LEAST_GROWTH = 2.0


@dataclass(frozen=True, slots=True)
class EnoughSeeds:
    """As many seeds as it takes, within a budget.

    Args:
        width: Half the width that every 95 % interval may have, as a share of its value.
        most: Seeds that are drawn at most.
    """

    width: float = 0.01
    most: int = 1000


def compare_with_enough(
    scenario: AnyScenario, *, n_seeds: EnoughSeeds | Literal["auto"] = "auto", **options: Any
) -> Comparison:
    """Return the comparison of `simdist.studies.comparison.compare` with as many seeds as it takes.

    Args:
        scenario: As of `compare`.
        n_seeds: What is enough; `auto` as by default.
        options: As of `compare`. After this, `measured` has the times with the last number of seeds.
    """
    enough = EnoughSeeds() if n_seeds == "auto" else n_seeds
    number = min(_FIRST, enough.most)
    options["measured"] = [] if options.get("measured") is None else options["measured"]
    so_far: RunsSoFar = {}
    while True:
        found = compare(scenario, n_seeds=number, so_far=so_far, **options)
        width = max(max(_width(row.step_s, row.step_s_ci95), _width(row.speedup, row.speedup_ci95)) for row in found)
        if width <= enough.width or number == enough.most:
            break
        growth = max(_LEAST_GROWTH, _RESERVE * (width / enough.width) ** 2)
        number = math.ceil(min(enough.most, number * growth))
        options["measured"].clear()
    found.drawn = _remark(enough, number, width)
    return found


def _width(value: float, interval: Interval | None) -> float:
    """Return half the width of an interval as a share of its value; infinity where there is none."""
    return (interval[1] - interval[0]) / 2 / value if interval else math.inf


def _remark(enough: EnoughSeeds, n_seeds: int, width: float) -> Remark:
    wanted = format_share(enough.width)
    if width <= enough.width:
        text = f"{n_seeds:,} of at most {enough.most:,} seeds were drawn: all intervals are within {wanted}"
        return Remark("result", text)
    reached = f"the widest is within {format_share(width)}" if math.isfinite(width) else "one is not known"
    text = f"{n_seeds:,} seeds, the most, do not bring all intervals within {wanted}: {reached}"
    return Remark("accuracy", text)
