"""The top of a page: runs or sweep, versions, completeness, and notes."""

import platform
from collections.abc import Callable, Iterable, Iterator
from shlex import quote

import numpy as np

import simdist
from simdist.report.page.html import Html, join, notes, prose, table, tag
from simdist.report.page.model import RunsReport
from simdist.report.page.sweep_model import SweepReport, VaryingField
from simdist.runs.run_directory import RunDirectory
from simdist.settings.base import plural

_LONG = 24  # letters; more need two columns
_NAMED = 12  # values that are all named
_SCRIPTS = "The chart, the map and the table of rows are drawn by scripts, which are off."
_PAGE_BY = "page by", f"simdist {simdist.__version__}, Python {platform.python_version()}, numpy {np.__version__}"


def heading(report: RunsReport) -> Html:
    """Return the title of the page, facts of its runs, and notes."""
    remarks = [*_simulated_on(report), *report.notes, *_notes_of_runs(report)]
    return join([tag("h1", title(report)), tag("p", _about(report)), _facts_list(_facts(report)), notes(remarks)])


def sweep_heading(report: SweepReport) -> Html:
    """Return the title of the page, facts of its sweep, its fields, and notes."""
    top = [tag("h1", report.name), tag("p", _about_sweep(report)), _facts_list(_sweep_facts(report))]
    return join([*top, notes(_sweep_notes(report)), tag("noscript", tag("p", _SCRIPTS)), _varied(report)])


def _facts_list(facts: Iterable[tuple[str, str]]) -> Html:
    items = (
        tag("div", tag("dt", name), tag("dd", value), class_="wide" if len(value) > _LONG else None)
        for name, value in facts
    )
    return tag("dl", join(items), class_="facts")


def title(report: RunsReport) -> str:
    """Return the name of the scenario, or of the first of several."""
    first, *others = dict.fromkeys(run.run.scenario.name for run in report.runs)
    more = f"{len(others)} other {plural(len(others), 'scenario')}"
    return f"{first} and {more}" if others else first


def _notes_of_runs(report: RunsReport) -> Iterator[str]:
    """Yield the notes of runs, once for all runs that have the same."""
    for note, same in _labels_by((note, run.label) for run in report.runs for note in run.notes):
        is_all = 1 < len(same) == len(report.runs)
        yield f"{'All runs' if is_all else ', '.join(same)}: {note}"


def _labels_by(pairs: Iterable[tuple[str, str]]) -> Iterable[tuple[str, list[str]]]:
    """Return each text with the labels of the runs that have it."""
    labels: dict[str, list[str]] = {}
    for text, label in pairs:
        labels.setdefault(text, []).append(label)
    return labels.items()


def _simulated_on(report: RunsReport) -> Iterator[Html]:
    machines = report.calibrated
    if machines is None:
        return
    name = machines.cluster.name
    yield prose(
        "Simulated are the machines of `{file}`{name}, not those of the scenarios. Where the computation was emulated, "
        "it takes what the scenario says.",
        file=str(machines.file),
        name=f" ({name})" if name else "",
    )


def _about(report: RunsReport) -> str:
    n_runs = len(report.runs)
    one = "" if report.notes else " of one scenario"
    which = f"{n_runs} schedules{one}" if n_runs > 1 else f"the schedule {report.runs[0].label}"
    how = " and ".join(report.origins)
    return f"{which[0].upper()}{which[1:]}, {how}: speed, where the time went, who waited for whom."


def _facts(report: RunsReport) -> Iterator[tuple[str, str]]:
    for name, text in _COMMON.items():
        yield name, "; ".join(dict.fromkeys(text(run.run) for run in report.runs))
    yield "schedules", ", ".join(run.label for run in report.runs)
    for origin in report.origins:
        sources = {each.trace.source for _, each in report.executions() if each.origin == origin}
        yield origin, ", ".join(sorted(source.removeprefix(f"{origin} ") for source in sources))
    yield _PAGE_BY
    for machines, labels in _labels_by((run.machines, run.label) for run in report.runs if run.machines):
        yield f"machines of {', '.join(labels)}", machines


def _model(run: RunDirectory) -> str:
    workload = run.scenario.workload
    times = f"{workload.micro_batches} x " if workload.micro_batches > 1 else ""
    return f"{workload.name or 'unnamed'}, batch of {times}{workload.batch_size:,} per rank"


#: Facts that runs have in common, as a rule.
_COMMON: dict[str, Callable[[RunDirectory], str]] = {
    "ranks": lambda run: f"{run.plan.world_size:,}",
    "nodes": lambda run: f"{run.scenario.cluster.nodes:,} x {run.scenario.cluster.gpus_per_node:,} GPUs",
    "cluster": lambda run: run.scenario.cluster.name or "without a name, see the scenario below",
    "model": _model,
    "steps": lambda run: f"{run.plan.n_steps:,}",
    "seed": lambda run: f"{run.scenario.seed}",
}


def _about_sweep(report: SweepReport) -> str:
    n_fields = len(report.axes)
    if n_fields == 0:
        return f"The schedules of {report.scenario}, at one point."
    fields = f"{n_fields} fields" if n_fields > 1 else "one field"
    return f"The schedules of {report.scenario}, with {fields} varied: {_how(report)}."


def _how(report: SweepReport) -> str:
    its = "its" if len(report.axes) == 1 else "their"
    match report.sampling:
        case "grid":
            return "each of its values" if len(report.axes) == 1 else "all combinations of their values"
        case "sobol":
            return f"a Sobol sequence of {its} values"
        case _:
            return f"a random sample of {its} values"


def _sweep_facts(report: SweepReport) -> Iterator[tuple[str, str]]:
    yield "scenario", report.scenario
    yield "points", f"{report.n_points:,}"
    yield "rows", f"{report.n_rows:,}: a schedule at a point"
    yield "failed", f"{report.table.n_failed:,}"
    yield "missing", f"{report.table.n_missing:,}"
    yield "seeds", f"{report.n_seeds:,} for each row"
    yield "baseline", report.table.baseline
    yield "schedules", ", ".join(dict.fromkeys(each.schedule for each in report.table.results)) or "none yet"
    yield "simulated by", f"simdist {report.version}"
    yield _PAGE_BY


def _sweep_notes(report: SweepReport) -> Iterator[str]:
    if report.table.n_missing:
        share = f"{report.table.n_missing:,} of {report.n_rows:,} rows are not there yet"
        goes_on = f" into {report.folder.name} goes on."
        yield join([f"{share}, so all below is of the others: ", tag("code", "simdist sweep"), goes_on])
    if report.table.n_failed:
        rows = f"{report.table.n_failed:,} {plural(report.table.n_failed, 'row')}"
        command = tag("code", f"simdist results {quote(report.folder.name)} --failed")
        yield join([f"{rows} failed, ", command, " shows why. No number below counts failed rows."])
    yield from (f"{each}." for each in report.table.shown_remarks if "not there yet" not in each.text)
    if report.n_seeds == 1:
        yield "With one seed there are no intervals, so nothing says which differences are chance."


def _varied(report: SweepReport) -> Html:
    fields = [*([report.case] if report.case else []), *report.columns]
    if not fields:
        return Html("")
    lines = [[field.column, _values(field, is_sample=not report.is_grid), f"{field.n_values:,}"] for field in fields]
    return table("Varied fields", ["field", "values", "different ones"], lines, words=["values"])


def _values(field: VaryingField, *, is_sample: bool) -> str:
    if not field.texts:
        return "-"
    if field.numbers and (is_sample or field.n_values > _NAMED) and field.n_values > 1:
        return f"{field.texts[0]} to {field.texts[-1]}"
    named = ", ".join(field.texts[:_NAMED]) + (", ..." if field.n_values > _NAMED else "")
    return f"{named}, or as in the scenario" if field.is_left else named
