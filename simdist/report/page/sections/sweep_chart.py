"""A chart of one quantity over one field, a line or a cloud of points per schedule; the script of the page draws it."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from simdist.report.page.document import Section
from simdist.report.page.html import Html, duration, join, number, percent, table, tag
from simdist.report.page.sections.sweep_influence import correlation
from simdist.report.page.sweep_data import Metric, measured_metrics
from simdist.report.page.sweep_fields import VaryingField
from simdist.report.page.sweep_model import SweepReport
from simdist.settings.units import format_seconds
from simdist.sweep.table import Result

_GRID = (
    "Each line is a schedule, at the chosen values of the other fields. Bars are 95 % confidence intervals over seeds, "
    "where they are larger than the marks."
)
_SAMPLE = "Each dot is a schedule at a point; all other fields differ from dot to dot as well."
_KEYS = (
    "Point at the chart, or focus it and use the arrow keys: left and right go along a schedule, up and down to the "
    "next one. The boxes show and hide schedules."
)


@dataclass(frozen=True, slots=True)
class View:
    """What the chart shows before anybody chooses.

    Args:
        x: Place of the field on the horizontal axis among `SweepReport.axes`.
        at: Value of each axis, by place; that of `x` does not matter, and none does of a sample.
        metric: The quantity.
    """

    x: int
    at: tuple[int, ...]
    metric: Metric


def default_view(report: SweepReport) -> View:
    """Choose the field with the most values of a grid, or of a sample the one that speed-ups follow most."""
    axes = report.axes
    if report.is_grid:
        x = max(range(len(axes)), key=lambda place: (axes[place].numbers is not None, axes[place].n_values))
    else:
        x = max(range(len(axes)), key=lambda place: _strength(report, axes[place]))
    at = tuple(field.n_values // 2 for field in axes)
    return View(x, at, measured_metrics(report)[0])


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
        _picture(),
        tag("div", _table(report, view), id="sweep-chart-table"),
    ]
    return Section("chart", "Schedules over a field", join(parts))


def _controls(report: SweepReport, view: View) -> Html:
    metrics = [(metric.name, metric.key) for metric in measured_metrics(report)]
    fields = [(field.name, str(place)) for place, field in enumerate(report.axes)]
    chosen = [
        select("sweep-metric", "Quantity", metrics, view.metric.key),
        select("sweep-x", "over", fields, str(view.x)),
    ]
    if report.is_grid:
        chosen += _values(report, view.at, "sweep-at")
    return controls(chosen)


def _values(report: SweepReport, at: Sequence[int], name: str) -> list[Html]:
    return [
        select(
            f"{name}-{place}", field.name, [(text, str(code)) for code, text in enumerate(field.texts)], str(at[place])
        )
        for place, field in enumerate(report.axes)
    ]


def controls(children: Sequence[Html]) -> Html:
    """Return controls in a row, which only a script makes useful."""
    return tag("div", *children, class_="controls needs-script", hidden=True)


def select(name: str, label: str, options: Sequence[tuple[str, str]], chosen: str) -> Html:
    """Return a labelled select.

    Args:
        name: Its id.
        label: Stands before it.
        options: Text and value of each.
        chosen: Value of the one that is chosen at first.
    """
    found = join(tag("option", text, value=value, selected=value == chosen) for text, value in options)
    return tag("label", label, " ", tag("select", found, id=name, autocomplete="off"))


def _picture() -> Html:
    return tag(
        "div",
        tag("div", id="sweep-legend", class_="sweep-legend", role="group", aria_label="Schedules that are shown"),
        tag(
            "div",
            id="sweep-chart",
            class_="sweep-chart",
            tabindex=0,
            role="application",
            aria_roledescription="chart",
            aria_label="Chart; the table below has its numbers",
            aria_describedby="sweep-keys",
        ),
        tag("output", "No point is chosen.", id="sweep-readout", class_="sweep-readout", aria_live="polite"),
        tag("p", _KEYS, id="sweep-keys", class_="muted"),
        class_="needs-script",
        hidden=True,
    )


def _table(report: SweepReport, view: View) -> Html:
    return _grid_table(report, view) if report.is_grid else _sample_table(report, view)


def _grid_table(report: SweepReport, view: View) -> Html:
    field = report.axes[view.x]
    rows: dict[tuple[int, str], Result] = {}
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


def _caption(report: SweepReport, view: View, others: Sequence[str]) -> str:
    what = f"speed-up over {report.table.baseline}" if view.metric.key == "speedup" else view.metric.name
    field = report.axes[view.x].name
    at = f", at {', '.join(others)}" if others else ""
    return f"{what[0].upper()}{what[1:]}, by {field}{at}"


def _sample_table(report: SweepReport, view: View) -> Html:
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


def metric_value(result: Result, metric: Metric) -> float | None:
    """Return a quantity of a row; None if the row does not have it."""
    row = result.row
    if row is None:
        return None
    seconds = {"compute": row.compute_s, "comm": row.comm_s, "wait": row.wait_s, "io": row.io_s, "host": row.host_s}
    match metric.key:
        case "speedup":
            return row.speedup if result.has_baseline else None
        case "step":
            return row.step_s
        case state:
            return seconds[state] / row.step_s


def metric_text(result: Result | None, metric: Metric) -> Html:
    """Return a quantity of a row, with its interval if it has one."""
    value = metric_value(result, metric) if result else None
    if result is None or result.row is None or value is None:
        return Html("-")
    row = result.row
    intervals = {"speedup": row.speedup_ci95, "step": row.step_s_ci95}
    interval = intervals.get(metric.key)
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
