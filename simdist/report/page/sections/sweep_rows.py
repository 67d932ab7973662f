"""All rows of a sweep, to sort and to filter, and what failed."""

from collections.abc import Iterator
from shlex import quote

from simdist.report.page.document import Section, json_block
from simdist.report.page.html import Html, duration, join, table, tag
from simdist.report.page.sections.sweep_chart import metric_text
from simdist.report.page.sweep_data import METRICS, sweep_data
from simdist.report.page.sweep_model import SweepReport
from simdist.sweep.table import Result

SHOWN = 200
"""Rows that stand in the table at once."""

_SPEEDUP, _STEP = METRICS[0], METRICS[1]
_MOST_POINTS = 10


def rows_section(report: SweepReport) -> Section:
    """Show the first rows; the script sorts and filters all."""
    command = f"simdist results {quote(report.folder.name)} --csv rows.csv"
    about = join(["With all columns and all digits, in SI units: ", tag("code", command), "."])
    parts = [
        tag("p", about),
        _filter(),
        tag("p", _count(report), id="sweep-count", role="status"),
        tag("div", _table(report), id="sweep-rows"),
        json_block("sweep-data", sweep_data(report)),
    ]
    return Section("rows", "All rows", join(parts))


def _filter() -> Html:
    field = tag("input", id="sweep-filter", type="search", autocomplete="off", spellcheck="false")
    hint = tag("span", "Rows in which all of the words occur; headers sort.", class_="muted", id="sweep-filter-hint")
    return tag("div", tag("label", "Filter ", field), hint, class_="controls needs-script", hidden=True)


def _count(report: SweepReport) -> str:
    n = len(report.table.results)
    return f"The first {SHOWN:,} of {n:,} rows." if n > SHOWN else f"{n:,} row{'s' * (n != 1)}."


def _table(report: SweepReport) -> Html:
    words = ["schedule", "failed", *(field.name for field in report.differing if field.numbers is None)]
    header = ["point", *(field.name for field in report.differing), "schedule", "step time", "speed-up"]
    header += ["compute", "comm", "wait", "io", "host", *(["failed"] if report.table.n_failed else [])]
    lines = [list(_cells(report, each)) for each in report.table.results[:SHOWN]]
    caption = f"Rows; speed-up over {report.table.baseline}, with 95 % intervals; seconds per step in each state"
    return table(caption, header, lines, words=words)


def _cells(report: SweepReport, result: Result) -> Iterator[str]:
    point, row = int(result.point), result.row
    yield f"{point}"
    for field in report.differing:
        code = field.codes[point]
        yield "-" if code is None else field.texts[code]
    yield result.schedule
    yield metric_text(result, _STEP)
    yield metric_text(result, _SPEEDUP)
    states = (row.compute_s, row.comm_s, row.wait_s, row.io_s, row.host_s) if row else (None,) * 5
    yield from ("-" if seconds is None else duration(max(0.0, seconds)) for seconds in states)
    if report.table.n_failed:
        yield tag("span", f"{result.failed}: {result.error}" if result.failed else "", class_="sweep-error")


def failures_section(report: SweepReport) -> Section | None:
    """Show why rows failed, each message once, or nothing."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for each in report.table.results:
        if each.failed:
            groups.setdefault((each.failed, each.error), []).append(each)
    if not groups:
        return None
    lines = [
        [kind, tag("span", message, class_="sweep-error"), f"{len(found):,}", _schedules(found), _points(found)]
        for (kind, message), found in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    about = "These rows have no numbers. After a repair, `simdist sweep --retry` computes them once more."
    header = ["error", "message", "rows", "schedules", "points"]
    shown = table("Failed rows by message", header, lines, words=["message", "schedules", "points"])
    return Section("failures", "What failed", join([tag("p", about.replace("`", "")), shown]))


def _schedules(found: list[Result]) -> str:
    return ", ".join(dict.fromkeys(each.schedule for each in found))


def _points(found: list[Result]) -> str:
    points = list(dict.fromkeys(str(each.point) for each in found))
    return ", ".join(points[:_MOST_POINTS]) + (", ..." if len(points) > _MOST_POINTS else "")
