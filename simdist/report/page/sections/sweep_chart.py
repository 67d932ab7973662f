"""A sweep as pictures: a quantity over one field, and the fastest schedule over two; scripts of the page draw them.

The chart has a line or a cloud of points per schedule. The map has a cell per combination, with the lead.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from simdist.report.page import html
from simdist.report.page.document import Section, asset
from simdist.report.page.html import Html, join, table, tag
from simdist.report.page.sections.sweep_fastest import compared, lead_percent
from simdist.report.page.sections.sweep_influence import correlation
from simdist.report.page.sweep_model import SweepReport, VaryingField
from simdist.settings.units import format_seconds
from simdist.sweep.selection import Fastest
from simdist.sweep.table import ResultRow

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

MetricUnit: TypeAlias = Literal["factor", "seconds", "share"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity that a reader can choose.

    Args:
        key: In the data.
        name: For people.
        unit: Unit of its numbers.
    """

    key: str
    name: str
    unit: MetricUnit


#: All quantities. Shares are of the mean step time.
METRICS = (
    Metric("speedup", "speed-up", "factor"),
    Metric("step", "step time", "seconds"),
    Metric("compute", "share of the step computing", "share"),
    Metric("comm", "share of the step in exposed communication", "share"),
    Metric("wait", "share of the step waiting for others", "share"),
    Metric("io", "share of the step loading and saving", "share"),
    Metric("host", "share of the step held up by hosts", "share"),
)


def measured_metrics(report: SweepReport) -> list[Metric]:
    """Return the quantities that are not zero everywhere."""
    results = report.table.results
    return [each for each in METRICS if each.key == "step" or any(metric_value(row, each) for row in results)]


@dataclass(frozen=True, slots=True)
class ChartView:
    """First view of the chart.

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
        html.select("sweep-metric", "Quantity", metrics, view.metric.key),
        html.select("sweep-x", "over", [(field.name, place) for place, field in enumerate(report.axes)], view.x),
    ]
    return html.controls(*chosen, *(_value_selects(report, view.at, "sweep-at") if report.is_grid else []))


def _value_selects(report: SweepReport, at: Sequence[int], name: str) -> list[Html]:
    """Return a select of the value of each axis, with ids NAME-PLACE."""
    return [
        html.select(f"{name}-{place}", field.name, [(text, code) for code, text in enumerate(field.texts)], at[place])
        for place, field in enumerate(report.axes)
    ]


def _grid_table(report: SweepReport, view: ChartView) -> Html:
    field = report.axes[view.x]
    rows: dict[tuple[int, str], ResultRow] = {}
    for each in report.table.results:
        if codes := _codes_at(report, int(each.point), view.at, [view.x]):
            rows.setdefault((codes[view.x], report.line_of(each)), each)
    lines = [
        [text, *(metric_text(rows.get((code, line)), view.metric) for line in report.lines)]
        for code, text in enumerate(field.texts)
    ]
    caption = f"{_caption(report, view)}, by {field.name}{_at(report, view.at, [view.x])}"
    return table(caption, [field.name, *report.lines], lines)


def _caption(report: SweepReport, view: ChartView) -> str:
    what = f"speed-up over {report.table.baseline}" if view.metric.key == "speedup" else view.metric.name
    return f"{what[0].upper()}{what[1:]}"


def _at(report: SweepReport, at: Sequence[int], shown: Collection[int]) -> str:
    """Say which values all axes have but those that are shown."""
    others = [f"{axis.name} {axis.texts[at[place]]}" for place, axis in enumerate(report.axes) if place not in shown]
    return f", at {', '.join(others)}" if others else ""


def _codes_at(report: SweepReport, point: int, at: Sequence[int], shown: Collection[int]) -> list[int] | None:
    """Return the values of a point, None if one differs from `at` and is not on a shown axis."""
    codes = [axis.codes[point] for axis in report.axes]
    is_there = all(code == at[place] or place in shown for place, code in enumerate(codes))
    return [code or 0 for code in codes] if is_there else None


def _sample_table(report: SweepReport, view: ChartView) -> Html:
    lines = []
    for line in report.lines:
        results = (each for each in report.table.results if report.line_of(each) == line)
        found = [value for each in results if (value := metric_value(each, view.metric)) is not None]
        cells = [_written(pick(found), view.metric) if found else "-" for pick in (min, median, max)]
        lines.append([line, f"{len(found):,}", *cells])
    return table(f"{_caption(report, view)}, over all points", ["schedule", "points", "least", "median", "most"], lines)


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
            return html.duration(value) if not more else html.number(value, format_seconds(value) + more)
        case "factor":
            return html.number(value, factor_text(value, half))
        case "share":
            return html.number(value, html.percent(value))


def factor_text(value: float, half: float) -> str:
    """Return a speed-up and half of its interval.

    >>> factor_text(1.36, 0.02), factor_text(1.117, 0.004), factor_text(1.0, 0.0)
    ('1.36 ± 0.02', '1.117 ± 0.004', '1.00')
    """
    half = half if half > 1e-9 * value else 0.0
    digits = 3 if 0 < half < 0.01 else 2
    return f"{value:.{digits}f}" + (f" ± {half:.{digits}f}" if half else "")


def marks(report: SweepReport) -> dict[str, str]:
    """Return a letter or two for each line, which stands for it where there is little room."""
    n = len(_LETTERS)
    return {
        line: (_LETTERS[place // n - 1] if place >= n else "") + _LETTERS[place % n]
        for place, line in enumerate(report.lines)
    }


def map_section(report: SweepReport) -> Section | None:
    """Show the map, or nothing where there are no two fields of a grid."""
    if not report.is_grid or len(report.axes) < 2 or not compared(report):
        return None
    readable = [place for place, field in enumerate(report.axes) if field.n_values <= _MOST_CELLS]
    if len(readable) < 2:
        return None
    columns, rows = sorted(readable, key=lambda place: -report.axes[place].n_values)[:2]
    at = tuple(field.n_values // 2 for field in report.axes)
    parts = [
        tag("p", _MAP),
        _map_controls(report, readable, columns, rows, at),
        _map_legend(report),
        tag("div", _map_table(report, columns, rows, at), id="sweep-map"),
    ]
    return Section("map", "Map of the fastest schedule", join(parts))


def _map_controls(report: SweepReport, readable: list[int], columns: int, rows: int, at: tuple[int, ...]) -> Html:
    fields = [(report.axes[place].name, place) for place in readable]
    across = html.select("sweep-map-columns", "From left to right", fields, columns)
    down = html.select("sweep-map-rows", "from top to bottom", fields, rows)
    return html.controls(across, down, *_value_selects(report, at, "sweep-map-at"))


def _map_legend(report: SweepReport) -> Html:
    items = (
        tag("li", tag("span", mark, class_=f"sweep-mark line-{place % _COLOURS}", aria_hidden="true"), f" {line}")
        for place, (line, mark) in enumerate(marks(report).items())
    )
    return tag("ul", *items, class_="legend")


def _map_table(report: SweepReport, columns: int, rows: int, at: tuple[int, ...]) -> Html:
    across, down = report.axes[columns], report.axes[rows]
    cells = dict(_map_cells(report, columns, rows, at))
    head = [tag("th", f"{down.name} \\ {across.name}", scope="col", class_="word")]
    head += [tag("th", text, scope="col", class_="cell") for text in across.texts]
    lines = [_map_line(text, code, across, cells) for code, text in enumerate(down.texts)]
    caption = f"Fastest schedule by {down.name} and {across.name}{_at(report, at, (columns, rows))}"
    return html.framed_table(caption, join(head), lines, class_="sweep-map")


def _map_line(text: str, row: int, across: VaryingField, cells: dict[tuple[int, int], Html]) -> Html:
    found = (cells.get((code, row), tag("td", "-", class_="cell")) for code in range(across.n_values))
    return tag("tr", tag("th", text, scope="row", class_="word"), *found)


def _map_cells(
    report: SweepReport, columns: int, rows: int, at: tuple[int, ...]
) -> Iterator[tuple[tuple[int, int], Html]]:
    """Yield column, row and cell."""
    letters = marks(report)
    for point, each in compared(report).items():
        if codes := _codes_at(report, point, at, (columns, rows)):
            first = report.leaders[point][0]
            unclear = " unclear" if report.is_clear(point) is False else ""
            is_partial = each.n_schedules < report.n_schedules[point]
            cell = tag(
                "td",
                tag("b", " = ".join(letters[line] for line in report.leaders[point])),
                f"{_lead_text(report, point, each)}{'*' if is_partial else ''}",
                title=" and ".join(report.leaders[point]),
                class_=f"cell won line-{report.lines.index(first) % _COLOURS}{unclear}",
            )
            yield (codes[columns], codes[rows]), cell


def _lead_text(report: SweepReport, point: int, each: Fastest) -> str:
    """Return by how much the second takes longer, with ≈ if that is not clear; nothing if there is no lead."""
    if len(report.leaders[point]) > 1:
        return ""
    unclear = " ≈" if report.is_clear(point) is False else ""
    return f"{unclear} {lead_percent(each.lead or 1.0)}"
