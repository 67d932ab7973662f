"""A sweep as pictures: a quantity over one field, and the fastest schedule over two; scripts of the page draw them.

The chart has a line or a cloud of points per schedule. The map has a cell per combination, with the lead.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from simdist.report.page import html
from simdist.report.page.document import Section, asset
from simdist.report.page.html import Html, join, tag
from simdist.report.page.sections.sweep_fastest import compared_points
from simdist.report.page.sweep_model import SweepReport
from simdist.studies.facets import GOODPUT

_GRID = (
    "Each line is a schedule, at the chosen values of the other fields. Bars are 95 % confidence intervals over seeds, "
    "where they are larger than the marks."
)
_SAMPLE = "Each dot is a schedule at a point; all other fields differ from dot to dot as well."

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_COLOURS = 6
_MOST_CELLS = 60  # of a row or column; more cannot be read
_MAP = (
    "The fastest schedule at each combination, and by how many percent the second takes longer. A cell with ≈ and a "
    "pale ground has a lead that is not clear; one with = has schedules that take equally long; one with * lacks a "
    "schedule that failed or is missing."
)

_MetricUnit: TypeAlias = Literal["factor", "seconds", "share", "part"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity that a reader can choose."""

    key: str
    name: str
    unit: _MetricUnit


#: All quantities. A share is of the mean step time, a part is as measured.
_METRICS = (
    Metric("speedup", "speed-up", "factor"),
    Metric("step", "step time", "seconds"),
    Metric("goodput", "goodput of the whole job", "part"),
    Metric("compute", "share of the step computing", "share"),
    Metric("comm", "share of the step in exposed communication", "share"),
    Metric("wait", "share of the step waiting for others", "share"),
    Metric("io", "share of the step loading and saving", "share"),
    Metric("host", "share of the step held up by hosts", "share"),
)


def measured_metrics(report: SweepReport) -> list[Metric]:
    """Return the quantities that are not zero everywhere."""
    rows = [(each.row, each.has_baseline) for each in report.table.results if each.row]
    found = {"step", *(state for row, _ in rows for state, seconds in row.states_s.items() if seconds)}
    found |= {"speedup"} if any(has_baseline for _, has_baseline in rows) else set()
    found |= {"goodput"} if any(row.of(GOODPUT) for row, _ in rows) else set()
    return [each for each in _METRICS if each.key in found]


def chart_section(report: SweepReport) -> Section | None:
    """Show the controls of the chart and where the script draws it and its table."""
    if not report.axes or not any(each.row for each in report.table.results):
        return None
    fields = [(field.name, place) for place, field in enumerate(report.axes)]
    x = max(range(len(fields)), key=lambda place: (report.axes[place].numbers is not None, report.axes[place].n_values))
    chosen = [
        html.select("sweep-metric", "Quantity", [(metric.name, metric.key) for metric in measured_metrics(report)]),
        html.select("sweep-x", "over", fields, x),
        *(_value_selects(report, "sweep-at") if report.is_grid else []),
    ]
    parts = [
        tag("p", _GRID if report.is_grid else _SAMPLE),
        html.controls(*chosen),
        Html(asset("sweep/chart.html")),
        tag("div", html.framed_table(), id="sweep-chart-table"),
    ]
    return Section("chart", "Schedules over a field", join(parts))


def _value_selects(report: SweepReport, name: str) -> list[Html]:
    """Return a select of the value of each axis, with ids NAME-PLACE; the middle one is chosen."""
    return [
        html.select(
            f"{name}-{place}", field.name, zip(field.texts, range(field.n_values), strict=True), field.n_values // 2
        )
        for place, field in enumerate(report.axes)
    ]


def marks(report: SweepReport) -> dict[str, str]:
    """Return a letter or two for each line, which stands for it where there is little room."""
    n = len(_LETTERS)
    return {
        line: (_LETTERS[place // n - 1] if place >= n else "") + _LETTERS[place % n]
        for place, line in enumerate(report.lines)
    }


def map_section(report: SweepReport) -> Section | None:
    """Show the map, or nothing where there are no two fields of a grid."""
    if not report.is_grid or len(report.axes) < 2 or not compared_points(report):
        return None
    readable = [place for place, field in enumerate(report.axes) if field.n_values <= _MOST_CELLS]
    if len(readable) < 2:
        return None
    columns, rows = sorted(readable, key=lambda place: -report.axes[place].n_values)[:2]
    fields = [(report.axes[place].name, place) for place in readable]
    chosen = [
        html.select("sweep-map-columns", "From left to right", fields, columns),
        html.select("sweep-map-rows", "from top to bottom", fields, rows),
        *_value_selects(report, "sweep-map-at"),
    ]
    parts = [
        tag("p", _MAP),
        html.controls(*chosen),
        _map_legend(report),
        tag("div", html.framed_table(class_="sweep-map"), id="sweep-map"),
    ]
    return Section("map", "Map of the fastest schedule", join(parts))


def _map_legend(report: SweepReport) -> Html:
    items = (
        tag("li", tag("span", mark, class_=f"sweep-mark line-{place % _COLOURS}", aria_hidden="true"), f" {line}")
        for place, (line, mark) in enumerate(marks(report).items())
    )
    return tag("ul", *items, class_="legend")
