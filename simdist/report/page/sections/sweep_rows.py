"""All rows of a sweep, to sort and to filter."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from shlex import quote

from simdist.report.page.document import Section, json_block
from simdist.report.page.html import Html, controls, framed_table, join, tag
from simdist.report.page.sections.sweep_chart import measured_metrics
from simdist.report.page.sweep_model import SweepReport, VaryingField
from simdist.studies.facets import GOODPUT
from simdist.studies.statistics import Interval
from simdist.sweeps.table import ResultRow
from simdist.traces.breakdown import STATES

_DIGITS = 6  # of a number in the page's data; its tables have all


def rows_section(report: SweepReport) -> Section:
    """Show where the script writes the first rows, sorted and filtered."""
    command = f"simdist results {quote(report.folder.name)} --csv rows.csv"
    about = join(["With all columns and all digits, in SI units: ", tag("code", command), "."])
    caption = f"Rows; speed-up over {report.table.baseline}, with 95 % intervals; seconds per step in each state"
    parts = [
        tag("p", about),
        _filter(),
        tag("p", id="sweep-count", role="status"),
        tag("div", framed_table(caption), id="sweep-rows"),
        json_block("sweep-data", sweep_data(report)),
    ]
    return Section("rows", "All rows", join(parts))


def _filter() -> Html:
    field = tag("input", id="sweep-filter", type="search", autocomplete="off", spellcheck="false")
    hint = tag("span", "Rows in which all of the words occur; headers sort.", class_="muted", id="sweep-filter-hint")
    return controls(tag("label", "Filter ", field), hint)


def sweep_data(report: SweepReport) -> dict[str, object]:
    """Return what stands in the page as JSON: of each field its values, of each row numbers and places in lists."""
    results = report.table.results
    labels = list(dict.fromkeys(each.schedule for each in results))
    failures = list(dict.fromkeys(_failure(each) for each in results if each.failed))
    line_at, label_at, failure_at = map(_places, (report.lines, labels, failures))
    rows = [each.row for each in results]
    jobs = [row.of(GOODPUT) if row else None for row in rows]
    against = [each.row if each.has_baseline else None for each in results]
    return {
        "lines": report.lines,
        "labels": labels,
        "baseline": report.table.baseline,
        "baseLines": [place for place, line in enumerate(report.lines) if line in report.base_lines],
        "grid": report.is_grid,
        "fields": [_field(field, report) for field in report.differing],
        "metrics": [asdict(metric) for metric in measured_metrics(report)],
        "failures": failures,
        "best": _best(report),
        "rows": {
            "point": [each.point for each in results],
            "line": [line_at[report.line_of(each)] for each in results],
            "label": [label_at[each.schedule] for each in results],
            "failure": [failure_at[_failure(each)] if each.failed else -1 for each in results],
            **_with_ends("step", [(row.step_s, row.step_s_ci95) if row else None for row in rows]),
            **_with_ends("speedup", [(row.speedup, row.speedup_ci95) if row else None for row in against]),
            "goodput": _rounded(job.goodput if job else None for job in jobs),
            **{state: _rounded(row.states_s[state] if row else None for row in rows) for state in STATES},
        },
    }


def _places(texts: Sequence[str]) -> dict[str, int]:
    return {text: place for place, text in enumerate(texts)}


def _failure(result: ResultRow) -> str:
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
    with_numbers = zip(found, report.n_schedules, strict=True)
    clear = [report.is_clear(point) if each else None for point, each in enumerate(found)]
    return {
        "line": [places[report.leaders[at][0]] if each and each.next_one else -1 for at, each in enumerate(found)],
        "tied": {point: [places[line] for line in lines] for point, lines in report.leaders.items() if len(lines) > 1},
        "gain": _rounded(each.lead - 1 if each and each.lead else None for each in found),
        "clear": [None if each is None else int(each) for each in clear],
        "partial": [int(each is not None and each.n_schedules < n) for each, n in with_numbers],
    }


def _with_ends(name: str, found: Sequence[tuple[float, Interval | None] | None]) -> dict[str, object]:
    """Return a quantity and the ends of its intervals; None instead of these if no row has an interval."""
    intervals = [each[1] if each else None for each in found]
    values = {name: [each[0] if each else None for each in found]}
    for end, key in enumerate((f"{name}Low", f"{name}High")):
        values[key] = [each[end] if each else None for each in intervals]
    return {key: _rounded(numbers) if key == name or any(intervals) else None for key, numbers in values.items()}


def _rounded(numbers: Iterable[float | None]) -> list[float | None]:
    return [None if number is None else _short(number) for number in numbers]


def _short(number: float) -> float:
    """Return a number with six digits, whole where it is, which JSON writes shorter."""
    rounded = float(f"{number:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
