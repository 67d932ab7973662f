"""A chart of one quantity over one field, a line or a cloud of points per schedule; the script of the page draws it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from simdist.report.page.document import Section, asset
from simdist.report.page.html import Html, controls, duration, join, number, percent, select, table, tag
from simdist.report.page.sections.sweep_influence import correlation
from simdist.report.page.sweep_fields import VaryingField
from simdist.report.page.sweep_model import SweepReport
from simdist.settings.units import format_seconds
from simdist.sweep.table import ResultRow

_GRID = (
    "Each line is a schedule, at the chosen values of the other fields. Bars are 95 % confidence intervals over seeds, "
    "where they are larger than the marks."
)
_SAMPLE = "Each dot is a schedule at a point; all other fields differ from dot to dot as well."

MetricUnit: TypeAlias = Literal["factor", "seconds", "share"]


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
    unit: MetricUnit


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
    results = report.table.results
    return [each for each in METRICS if each.key == "step" or any(metric_value(row, each) for row in results)]


@dataclass(frozen=True, slots=True)
class ChartView:
    """What the chart shows at first.

    Args:
        x: Place of the field on the horizontal axis among `SweepReport.axes`.
        at: Value of each axis, by place; that of `x` does not matter, and none does of a sample.
        metric: The quantity.
    """

    x: int
    at: tuple[int, ...]
    metric: Metric


def default_view(report: SweepReport) -> ChartView:
    """Choose the field with the most values of a grid, or of a sample the one that speed-ups follow most."""
    axes = report.axes
    if report.is_grid:
        x = max(range(len(axes)), key=lambda place: (axes[place].numbers is not None, axes[place].n_values))
    else:
        x = max(range(len(axes)), key=lambda place: _strength(report, axes[place]))
    at = tuple(field.n_values // 2 for field in axes)
    return ChartView(x, at, measured_metrics(report)[0])


def _strength(report: SweepReport, field: VaryingField) -> float:
    found = (correlation(report, field, line) for line in report.lines)
    return max((abs(each) for each in found if each is not None), default=-1.0)


def chart_section(report: SweepReport) -> Section | None:
    """Show the chart, its controls, and its numbers as a table."""
    if not report.axes or not any(each.row for each in report.table.results):
        return None
    view = default_view(report)
    parts = [
        tag("p", _GRID if report.is_grid else _SAMPLE),
        _controls(report, view),
        Html(asset("sweep/chart.html")),
        tag("div", (_grid_table if report.is_grid else _sample_table)(report, view), id="sweep-chart-table"),
    ]
    return Section("chart", "Schedules over a field", join(parts))


def _controls(report: SweepReport, view: ChartView) -> Html:
    metrics = [(metric.name, metric.key) for metric in measured_metrics(report)]
    chosen = [
        select("sweep-metric", "Quantity", metrics, view.metric.key),
        select("sweep-x", "over", [(field.name, place) for place, field in enumerate(report.axes)], view.x),
    ]
    return controls(*chosen, *(value_selects(report, view.at, "sweep-at") if report.is_grid else []))


def value_selects(report: SweepReport, at: Sequence[int], name: str) -> list[Html]:
    """Return a select of the value of each axis, with ids NAME-PLACE."""
    return [
        select(f"{name}-{place}", field.name, [(text, code) for code, text in enumerate(field.texts)], at[place])
        for place, field in enumerate(report.axes)
    ]


def _grid_table(report: SweepReport, view: ChartView) -> Html:
    field = report.axes[view.x]
    rows: dict[tuple[int, str], ResultRow] = {}
    for each in report.table.results:
        codes = [axis.codes[int(each.point)] for axis in report.axes]
        if all(code == at or place == view.x for place, (code, at) in enumerate(zip(codes, view.at, strict=True))):
            rows.setdefault((int(codes[view.x] or 0), report.line_of(each)), each)
    lines = [
        [text, *(metric_text(rows.get((code, line)), view.metric) for line in report.lines)]
        for code, text in enumerate(field.texts)
    ]
    others = [f"{axis.name} {axis.texts[view.at[place]]}" for place, axis in enumerate(report.axes) if place != view.x]
    return table(_caption(report, view, others), [field.name, *report.lines], lines)


def _caption(report: SweepReport, view: ChartView, others: Sequence[str]) -> str:
    what = f"speed-up over {report.table.baseline}" if view.metric.key == "speedup" else view.metric.name
    field = report.axes[view.x].name
    at = f", at {', '.join(others)}" if others else ""
    return f"{what[0].upper()}{what[1:]}, by {field}{at}"


def _sample_table(report: SweepReport, view: ChartView) -> Html:
    lines = []
    for line in report.lines:
        found = [
            value
            for each in report.table.results
            if report.line_of(each) == line and (value := metric_value(each, view.metric)) is not None
        ]
        cells = [_written(pick(found), view.metric) if found else "-" for pick in (min, median, max)]
        lines.append([line, f"{len(found):,}", *cells])
    caption = _caption(report, view, []).partition(", by ")[0]
    return table(f"{caption}, over all points", ["schedule", "points", "least", "median", "most"], lines)


def metric_value(result: ResultRow, metric: Metric) -> float | None:
    """Return a quantity of a row; None if the row does not have it."""
    row = result.row
    if row is None:
        return None
    match metric.key:
        case "speedup":
            return row.speedup if result.has_baseline else None
        case "step":
            return row.step_s
        case state:
            return row.states_s[state] / row.step_s


def metric_text(result: ResultRow | None, metric: Metric) -> Html:
    """Return a quantity of a row, with its interval if it has one."""
    value = metric_value(result, metric) if result else None
    if result is None or result.row is None or value is None:
        return Html("-")
    interval = {"speedup": result.row.speedup_ci95, "step": result.row.step_s_ci95}.get(metric.key)
    return _written(value, metric, (interval[1] - interval[0]) / 2 if interval else 0.0)


def _written(value: float, metric: Metric, half: float = 0.0) -> Html:
    match metric.unit:
        case "seconds":
            more = f" ± {format_seconds(half, 2)}" if half > 1e-12 else ""
            return duration(value) if not more else number(value, format_seconds(value) + more)
        case "factor":
            return number(value, factor_text(value, half))
        case "share":
            return number(value, percent(value))


def factor_text(value: float, half: float) -> str:
    """Return a speed-up and half of its interval.

    >>> factor_text(1.36, 0.02), factor_text(1.117, 0.004), factor_text(1.0, 0.0)
    ('1.36 ± 0.02', '1.117 ± 0.004', '1.00')
    """
    half = half if half > 1e-9 * value else 0.0
    digits = 3 if 0 < half < 0.01 else 2
    return f"{value:.{digits}f}" + (f" ± {half:.{digits}f}" if half else "")
