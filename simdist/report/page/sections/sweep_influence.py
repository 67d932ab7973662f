"""Which field matters: how much the speed-up of each schedule follows each field: main effects, and no more.

Of a sample, the rank correlation says whether the result rises or falls with a field, along whatever curve: +1 if
always, 0 if the field says nothing by itself. Of a grid, where each value of a field meets the same values of all
others, the means at its values say how far the field alone moves the result. Neither sees that two fields matter only
together, nor a result that rises first and falls then.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from statistics import median
from typing import TypeVar

import numpy as np

from simdist.report.page.document import Section
from simdist.report.page.html import Html, conclusions, join, number, prose, table, tag
from simdist.report.page.sweep_model import SweepReport, VaryingField
from simdist.studies import statistics

T = TypeVar("T", bound=Hashable)
_FEWEST = 3  # two points are always on a line

_SAMPLE = (
    "Spearman's rank correlation of the speed-up with each field, over all points: +1 if the speed-up rises with the "
    "field wherever the others are, -1 if it falls, 0 if the field says nothing by itself. It does not say by how "
    "much, sees nothing that two fields do only together, and nothing that rises first and falls then. Between numbers "
    "without any relation, a value beyond ±{bound:.2f} comes about in one of twenty random samples of {n:,} points."
)
_DIGITS = 9  # of a speed-up that are not rounding, which has no order
_SAME = 0.005  # differences of speed-ups that are less are written as 0.00
_GRID = (
    "For each field, the mean speed-up at the value with the highest mean less that at the value with the lowest; "
    "means are over all values of the other fields. These are main effects: what two fields do only together is not in "
    "them."
)
_UNBALANCED = "Rows are missing or failed, so the means are not over the same values of the other fields everywhere."
_WORDS = "Fields that are no numbers have no ranks: of them, the range of mean speed-ups over their values is shown."


def influence_section(report: SweepReport) -> Section | None:
    """Show how much each field matters, or nothing where there is no field or no speed-up."""
    lines = [line for line in report.lines if line not in report.base_lines and report.speedups(line)]
    if not report.axes or not lines:
        return None
    rows = [[field.name, *(_cell(report, field, line) for line in lines)] for field in report.axes]
    what = "Range of the mean speed-up" if report.is_grid else "Rank correlation of the speed-up"
    caption = f"{what} over {report.table.baseline}, by field and schedule"
    parts = [tag("p", prose(text)) for text in _texts(report, lines)]
    answers = conclusions(text for line in lines for text in _conclusion(report, line))
    return Section("influence", "Which field matters", join([*parts, answers, table(caption, ["field", *lines], rows)]))


def _texts(report: SweepReport, lines: list[str]) -> Iterator[str]:
    if report.is_grid:
        yield _GRID
        if report.table.n_failed or report.table.n_missing:
            yield _UNBALANCED
        return
    n = max(len(report.speedups(line)) for line in lines)
    yield _SAMPLE.format(bound=_bound(n), n=n)
    if any(field.numbers is None for field in report.axes):
        yield _WORDS


def correlation(report: SweepReport, field: VaryingField, line: str) -> float | None:
    """Return the rank correlation of a line's speed-up with a field of numbers; None where there is none."""
    if field.numbers is None:
        return None
    pairs = _pairs(report, field, line)
    return rank_correlation([field.numbers[x] for x, _ in pairs], [float(f"{y:.{_DIGITS}g}") for _, y in pairs])


def _pairs(report: SweepReport, field: VaryingField, line: str) -> list[tuple[int, float]]:
    """Return the place of the field's value and the speed-up of the rows of a line."""
    codes = ((field.codes[point], row.speedup) for point, row in report.compared_rows(line))
    return [(code, speedup) for code, speedup in codes if code is not None]


def _spread(report: SweepReport, field: VaryingField, line: str) -> tuple[float, str] | None:
    """Return the range of mean speed-ups, and between which values it lies."""
    pairs = _pairs(report, field, line)
    means = means_by_value([code for code, _ in pairs], [speedup for _, speedup in pairs])
    if len(means) < 2:
        return None
    low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    where = f"{means[low]:.2f} at {field.texts[low]}, {means[high]:.2f} at {field.texts[high]}"
    return means[high] - means[low], where


def _cell(report: SweepReport, field: VaryingField, line: str) -> Html:
    if not report.is_grid and field.numbers is not None:
        found = correlation(report, field, line)
        return Html("-") if found is None else number(found, f"{found:+.2f}")
    spread = _spread(report, field, line)
    if spread is None:
        return Html("-")
    size, where = spread
    return join([number(size, f"{size:.2f}"), tag("span", f" ({where})", class_="muted")])


def _conclusion(report: SweepReport, line: str) -> Iterator[str]:
    if len(report.axes) < 2:
        return
    speedups = report.speedups(line)
    if max(speedups) - min(speedups) < _SAME:
        yield f"{line}: no field moves the speed-up, which is {median(speedups):.2f} everywhere."
        return
    if report.is_grid:
        sizes = [(spread[0], field) for field in report.axes if (spread := _spread(report, field, line))]
        if sizes:
            size, field = max(sizes, key=lambda pair: pair[0])
            moves = f"{field.name} moves the mean speed-up most, by {size:.2f}"
            yield f"{line}: {'no field by itself moves the mean speed-up' if size < _SAME else moves}."
        return
    found = [(value, field) for field in report.axes if (value := correlation(report, field, line)) is not None]
    if found:
        value, field = max(found, key=lambda pair: abs(pair[0]))
        if abs(value) < _bound(len(speedups)):
            yield f"{line}: the speed-up follows no field by more than chance does; {field.name} most ({value:+.2f})."
            return
        way = "rises" if value > 0 else "falls"
        yield f"{line}: the speed-up follows {field.name} most, and {way} with it ({value:+.2f})."


def _bound(n_points: int) -> float:
    """Return the rank correlation that one of twenty samples of unrelated numbers exceeds."""
    return min(1.0, 1.96 / math.sqrt(max(n_points - 1, 1)))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return how the ranks of `x` and `y` are correlated, -1 to 1; None where that says nothing.

    It says nothing of fewer than three pairs, or if all of `x` or all of `y` are equal.

    Source:
        Spearman, The Proof and Measurement of Association between Two Things, 1904; ties as in Kendall & Gibbons,
        Rank Correlation Methods, 5th ed., chapter 3.

    >>> rank_correlation([1, 2, 3, 4], [10, 20, 1000, 30])
    0.8
    """
    from scipy.stats import rankdata  # takes half a second

    if len(x) < _FEWEST:
        return None
    found = statistics.correlation(rankdata(x), rankdata(y))
    return None if math.isnan(found) else min(max(found, -1.0), 1.0)


def means_by_value(values: Sequence[T], results: Sequence[float]) -> dict[T, float]:
    """Return the means of results at each value of a field, in the order in which the values first occur.

    Args:
        values: Of the field, one for each result.
        results: In any unit.

    >>> means_by_value([2, 2, 4, 4], [1.0, 2.0, 3.0, 5.0])
    {2: 1.5, 4: 4.0}
    """
    at: dict[T, list[float]] = {}
    for value, result in zip(values, results, strict=True):
        at.setdefault(value, []).append(result)
    return {value: float(np.mean(found)) for value, found in at.items()}
