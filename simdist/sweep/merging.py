"""A sweep and the runs in its folder as one table.

A run directory of a sweep has the delays of the sweep's first seed. So its simulation is one of those that the row of
the sweep averages over: it is left out where that row is there. Its measurement stays, and is compared with it.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from simdist.sweep.performed import extras_of, with_links_note
from simdist.sweep.table import Result, Table, joined

_SAME = 1e-6  # relative difference of step times of two engines


def merged(sweep: Table, runs: Table) -> Table:
    """Return the rows of both, point by point, schedules in the order of the sweep; each simulation once."""
    rows = {_key(each): each for each in sweep.results if each.measured}
    kept = list(_kept(runs, rows))
    places = {place: number for number, place in enumerate(dict.fromkeys(each.place for each in sweep.results))}
    order = {_key(each): number for number, each in enumerate(sweep.results)}
    kept.sort(key=lambda each: (order.get(_key(each), len(order)), each.run, each.source != "simulated"))
    results = [*sweep.results, *kept]
    results.sort(key=lambda each: places.get(each.place, len(places)))
    whole = joined([sweep, replace(runs, extras=extras_of(kept))])
    return with_links_note(replace(whole, results=tuple(results)))


def _kept(runs: Table, rows: dict[object, Result]) -> Iterator[Result]:
    """Yield the rows of runs that say something new."""
    for each in runs.results:
        row = rows.get(_key(each))
        same = row is not None and _numbers(row) == _numbers(each)
        simulated_s = float(row.measured.step_s[0]) if same and row and row.measured else None
        if simulated_s is None or each.measured is None:
            yield each
        elif each.source == "real":
            yield each if each.error_ratio is not None else replace(each, error_ratio=_ratio(each, simulated_s))
        elif not math.isclose(simulated_s, float(each.measured.step_s[0]), rel_tol=_SAME):
            yield each


def _ratio(real: Result, simulated_s: float) -> float | None:
    real_s = float(real.measured.step_s[0]) if real.measured else 0.0
    return (simulated_s - real_s) / real_s if real_s > 0 else None


def _key(result: Result) -> object:
    return result.place, result.schedule


def _numbers(result: Result) -> dict[str, object]:
    return {column: choice.number for column, choice in result.choices.items()}
