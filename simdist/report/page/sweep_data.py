"""The data that the scripts of a sweep's page draw from: columns instead of objects, so that a page stays small."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from simdist.report.page.sweep_fields import VaryingField
from simdist.report.page.sweep_model import SweepReport
from simdist.studies.comparison import Row
from simdist.sweep.table import Result

Unit: TypeAlias = Literal["factor", "seconds", "share"]

_DIGITS = 6  # of a number in the page's data; its tables have all


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity that a reader can choose.

    Args:
        key: In the data.
        name: For people.
        unit: What it is written in.
    """

    key: str
    name: str
    unit: Unit


METRICS = (
    Metric("speedup", "speed-up", "factor"),
    Metric("step", "step time", "seconds"),
    Metric("compute", "share of the step computing", "share"),
    Metric("comm", "share of the step in exposed communication", "share"),
    Metric("wait", "share of the step waiting for others", "share"),
    Metric("io", "share of the step loading and saving", "share"),
    Metric("host", "share of the step held up by hosts", "share"),
)
"""All quantities. Shares are of the mean step time."""


def measured_metrics(report: SweepReport) -> list[Metric]:
    """Return the quantities that are not zero everywhere."""
    rows = [each.row for each in report.table.results if each.row]
    there = {
        "speedup": any(each.has_baseline for each in report.table.results),
        "step": True,
        "compute": any(row.compute_s for row in rows),
        "comm": any(row.comm_s for row in rows),
        "wait": any(row.wait_s for row in rows),
        "io": any(row.io_s for row in rows),
        "host": any(row.host_s for row in rows),
    }
    return [metric for metric in METRICS if there[metric.key]]


def sweep_data(report: SweepReport) -> dict[str, object]:
    """Return what stands in the page as JSON: of each field its values, of each row numbers and places in lists."""
    results = report.table.results
    labels = list(dict.fromkeys(each.schedule for each in results))
    failures = list(dict.fromkeys(_failure(each) for each in results if each.failed))
    line_at, label_at = _places(report.lines), _places(labels)
    failure_at = _places(failures)
    rows = [each.row for each in results]
    against = [each.row if each.has_baseline else None for each in results]
    return {
        "lines": report.lines,
        "labels": labels,
        "baseline": report.table.baseline,
        "baseLines": [place for place, line in enumerate(report.lines) if line in report.base_lines],
        "grid": report.is_grid,
        "fields": [_field(field, report) for field in report.differing],
        "metrics": [
            {"key": metric.key, "name": metric.name, "unit": metric.unit} for metric in measured_metrics(report)
        ],
        "failures": failures,
        "best": _best(report),
        "rows": {
            "point": [each.point for each in results],
            "line": [line_at[report.line_of(each)] for each in results],
            "label": [label_at[each.schedule] for each in results],
            "failure": [failure_at[_failure(each)] if each.failed else -1 for each in results],
            "step": _rounded(row.step_s if row else None for row in rows),
            "stepLow": _ends(rows, 0, "step"),
            "stepHigh": _ends(rows, 1, "step"),
            "speedup": _rounded(row.speedup if row else None for row in against),
            "speedupLow": _ends(against, 0, "speedup"),
            "speedupHigh": _ends(against, 1, "speedup"),
            "compute": _rounded(row.compute_s if row else None for row in rows),
            "comm": _rounded(row.comm_s if row else None for row in rows),
            "wait": _rounded(row.wait_s if row else None for row in rows),
            "io": _rounded(row.io_s if row else None for row in rows),
            "host": _rounded(row.host_s if row else None for row in rows),
        },
    }


def _places(texts: Sequence[str]) -> dict[str, int]:
    return {text: place for place, text in enumerate(texts)}


def _failure(result: Result) -> str:
    return f"{result.failed}: {result.error}"


def _field(field: VaryingField, report: SweepReport) -> dict[str, object]:
    return {
        "name": field.name,
        "title": field.title,
        "axis": field in report.axes,
        "texts": field.texts,
        "numbers": [_short(number / field.unit_size) for number in field.numbers] if field.numbers else None,
        "log": field.is_log,
        "codes": field.codes,
    }


def _best(report: SweepReport) -> dict[str, object]:
    """Return, for each point, its fastest line and the lead; -1 and None where nothing could be compared.

    The lead stands there less 1, so that small ones have their digits; of several lines that take equally long, the
    first is under `line` and all are under `tied`.
    """
    places = _places(report.lines)
    found = [report.best.get(point) for point in range(report.n_points)]
    clear = [report.is_clear(point) if each else None for point, each in enumerate(found)]
    return {
        "line": [
            places[report.leaders[point][0]] if each and each.next_one else -1 for point, each in enumerate(found)
        ],
        "tied": {point: [places[line] for line in lines] for point, lines in report.leaders.items() if len(lines) > 1},
        "gain": _rounded(each.lead - 1 if each and each.lead else None for each in found),
        "clear": [None if each is None else int(each) for each in clear],
        "partial": [
            int(each.n_schedules < n) if each else 0 for each, n in zip(found, report.n_schedules, strict=True)
        ],
    }


def _ends(rows: Sequence[Row | None], end: int, what: Literal["step", "speedup"]) -> list[float | None] | None:
    """Return the lower (0) or upper (1) ends of intervals; None if no row has one."""
    intervals = [(row.step_s_ci95 if what == "step" else row.speedup_ci95) if row else None for row in rows]
    return _rounded(each[end] if each else None for each in intervals) if any(intervals) else None


def _rounded(numbers: Iterable[float | None]) -> list[float | None]:
    return [None if number is None else _short(number) for number in numbers]


def _short(number: float) -> float:
    """Return a number with six digits, whole where it is, which JSON writes shorter."""
    rounded = float(f"{number:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
