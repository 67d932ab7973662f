"""The top of a sweep's page: what was varied, how much of it is there, and what a reader must know of it."""

import platform
from collections.abc import Iterator
from shlex import quote

import numpy as np

import simdist
from simdist.report.page.html import Html, escape, join, table, tag
from simdist.report.page.sweep_fields import VaryingField
from simdist.report.page.sweep_model import SweepReport

_LONG = 24  # letters; more need two columns
_NAMED = 12  # values that are all named


def sweep_heading(report: SweepReport) -> Html:
    """Return the title of the page, the facts of its sweep, its fields, and what a reader must know."""
    facts = join(
        tag("div", tag("dt", name), tag("dd", value), class_="wide" if len(value) > _LONG else None)
        for name, value in _facts(report)
    )
    notes = list(_notes(report))
    parts = [
        tag("h1", report.name),
        tag("p", _about(report)),
        tag("dl", facts, class_="facts"),
        tag("ul", *(tag("li", note) for note in notes), class_="notes") if notes else "",
        _varied(report),
    ]
    return join(parts)


def _about(report: SweepReport) -> str:
    n_fields = len(report.axes)
    if n_fields == 0:
        return f"The schedules of {report.scenario}, at one point."
    fields = f"{n_fields} fields" if n_fields > 1 else "one field"
    return f"The schedules of {report.scenario}, with {fields} varied: {_how(report)}."


def _how(report: SweepReport) -> str:
    its = "its" if len(report.axes) == 1 else "their"
    match report.sampling or ("grid" if report.is_grid else ""):
        case "grid":
            return "each of its values" if len(report.axes) == 1 else "all combinations of their values"
        case "sobol":
            return f"a Sobol sequence of {its} values"
        case "random":
            return f"a random sample of {its} values"
        case _:
            return f"a sample of {its} values"


def _facts(report: SweepReport) -> Iterator[tuple[str, str]]:
    yield "scenario", report.scenario
    yield "points", f"{report.n_points:,}"
    yield "rows", f"{report.n_rows:,}, a schedule of a point each"
    yield "failed", f"{report.table.n_failed:,}"
    yield "missing", f"{report.table.n_missing:,}"
    yield "seeds", f"{report.n_seeds:,} for each row"
    yield "baseline", report.table.baseline
    yield "schedules", ", ".join(dict.fromkeys(each.schedule for each in report.table.results)) or "none yet"
    yield "simulated by", f"simdist {report.version}"
    yield "page by", f"simdist {simdist.__version__}, Python {platform.python_version()}, numpy {np.__version__}"


def _notes(report: SweepReport) -> Iterator[Html]:
    if report.table.n_missing:
        share = f"{report.table.n_missing:,} of {report.n_rows:,} rows are not there yet"
        goes_on = f" into {report.folder.name} goes on."
        yield join([f"{share}, so all below is of the others: ", tag("code", "simdist sweep"), goes_on])
    if report.table.n_failed:
        rows = f"{report.table.n_failed:,} row{'s' * (report.table.n_failed > 1)}"
        yield escape(f"{rows} failed, see the end of the page. No number below counts failed rows.")
    yield from (escape(note) for note in report.table.notes if "not there yet" not in note)
    if report.n_seeds == 1:
        yield escape("With one seed there are no intervals, so nothing says which differences are chance.")
    if report.has_runs:
        command = tag("code", f"simdist results {quote(report.folder.name)}")
        yield join(["There are runs in this folder as well: ", command, " shows both."])


def _varied(report: SweepReport) -> Html:
    fields = [*([report.case] if report.case else []), *report.columns]
    if not fields:
        return Html("")
    lines = [[field.column, _values(field, is_sample=not report.is_grid), f"{field.n_values:,}"] for field in fields]
    return table("What is varied", ["field", "values", "different ones"], lines, words=["values"])


def _values(field: VaryingField, *, is_sample: bool) -> str:
    if not field.texts:
        return "-"
    if field.numbers and (is_sample or field.n_values > _NAMED) and field.n_values > 1:
        return f"{field.texts[0]} to {field.texts[-1]}"
    named = ", ".join(field.texts[:_NAMED]) + (", ..." if field.n_values > _NAMED else "")
    return f"{named}, or as in the scenario" if field.is_left else named
