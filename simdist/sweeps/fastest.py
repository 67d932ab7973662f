"""The fastest schedule at each point of a table, and its lead."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simdist.studies.comparison import row
from simdist.studies.measuring import ScheduleTimes
from simdist.sweeps.table import Columns, ResultRow, Table, columns

_KEPT = {"folder", "point", "case", "source", "schedule", "kind", "seeds"} | {
    f"{name}{end}" for name in ("step_s", "speedup") for end in ("", "_ci95_low", "_ci95_high")
}


@dataclass(frozen=True, slots=True)
class Fastest:
    """The fastest schedule of a point.

    Args:
        result: Its row.
        n_schedules: Number of compared schedules, without failed ones.
        next_one: The second fastest; empty if there is no other.
        lead: Step time of the second / that of the fastest; None if there is no other.
        lead_ci95: 95 % confidence interval of that, over seeds; None with one seed.
        is_clear: Whether it is faster than every other schedule by more than the interval of their difference, and not
            only than the second: a third may vary too much. None with one seed. Of schedules that are
            equal, about one in twenty looks clear by chance.
    """

    result: ResultRow
    n_schedules: int
    next_one: str = ""
    lead: float | None = None
    lead_ci95: tuple[float, float] | None = None
    is_clear: bool | None = None


def fastest(table: Table) -> list[Fastest]:
    """Return the fastest schedule of each point and source, in the order of the table."""
    points: dict[object, list[tuple[float, ResultRow, ScheduleTimes]]] = {}
    for each in table.results:
        if each.measured:
            points.setdefault(each.group, []).append((float(each.measured.step_s.mean()), each, each.measured))
    return [_fastest(of_point) for of_point in points.values()]


def _fastest(of_point: Sequence[tuple[float, ResultRow, ScheduleTimes]]) -> Fastest:
    (_, first, measured), *others = sorted(of_point, key=lambda item: item[0])
    if not others:
        return Fastest(first, 1)
    compared = [row(measured, slower) for _, _, slower in others]  # in pairs: the seeds are the same
    intervals = [each.speedup_ci95 for each in compared]
    is_clear = all(each[0] > 1 for each in intervals if each) if all(intervals) else None
    second = others[0][1]
    return Fastest(first, len(of_point), second.schedule, compared[0].speedup, intervals[0], is_clear)


def fastest_columns(table: Table, found: Sequence[Fastest]) -> Columns:
    """Return a table of the fastest schedules, a row per point and source.

    Columns:
        schedules (int): Schedules at the point.
        next (str): Label of the second.
        lead (float or null): Step time of the second / of the fastest.
        lead_ci95_low, lead_ci95_high (float or null): Its 95 % confidence interval.
        clear (bool or null): All its leads at the point have intervals above 1.

    Args:
        table: The table of the rows.
        found: Results of `fastest` in it, in any order.
    """
    whole = columns(replace(table, results=tuple(each.result for each in found)))
    intervals = [each.lead_ci95 or (None, None) for each in found]
    return {name: values for name, values in whole.items() if name in table.varied or name in _KEPT} | {
        "schedules": [each.n_schedules for each in found],
        "next": [each.next_one for each in found],
        "lead": [each.lead for each in found],
        "lead_ci95_low": [low for low, _ in intervals],
        "lead_ci95_high": [high for _, high in intervals],
        "clear": [each.is_clear for each in found],
    }
