"""`simdist report`."""

import json
import shlex
from pathlib import Path

import click

from simdist.cli import common, inputs
from simdist.cli.learn import LEARNED
from simdist.errors import RunError, ScenarioError
from simdist.files import read_content, save_text
from simdist.learning.answer import learned_columns
from simdist.report.page import pages
from simdist.report.page.model import RunsReport
from simdist.report.page.reading import read_report
from simdist.report.page.sections.making import Making
from simdist.report.page.sections.timelines import Shown, shown_runs
from simdist.report.page.sweep_model import SweepReport, read_sweep_report
from simdist.runs import run_directory
from simdist.runs.calibrated import Calibrated
from simdist.settings.base import picked
from simdist.settings.units import format_nbytes
from simdist.sweeps.results import is_sweep

_PAGES = (".html", ".htm")
#: Run directories on a page; of more, charts and lists are too long to be read.
_MOST_RUNS = 24


@click.command("report")
@click.argument("name", type=common.file_name, metavar="RUN|DIR")
@click.option("-o", "--output", type=common.path_type, metavar="FILE", required=True, help="The .html file to write.")
@common.baseline
@click.option("--steps", metavar="A:B", callback=common.slice_of_steps, help="Only steps A to B - 1 in the timeline.")
@click.option("--cluster", type=common.path_type, metavar="FILE", help="Simulate this calibrated cluster instead.")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
@common.options
def command(
    session: common.CliSession,
    name: str,
    *,
    output: Path,
    baseline: str | None,
    steps: range | None,
    cluster: Path | None,
    opens: bool,
) -> None:
    """Write one HTML page about runs, a sweep, or learning.

    For a RUN, or all runs in a DIR: speed-ups, where the time of a step goes, a timeline, which ranks waited for which,
    and simulation against measurement if there are both. For a sweep in a DIR: which schedule is the fastest where,
    which field matters, and all rows. For a DIR of learn or tune --target: the last answer, with learning curves. The
    page is self-contained: it loads nothing.
    """
    _check(name, output)
    _write(session, Path(name), output=output, baseline=baseline, steps=steps, cluster=cluster)
    if opens:
        from simdist.cli.opening import open_page

        open_page(session, output)


def _write(
    session: common.CliSession,
    folder: Path,
    *,
    output: Path,
    baseline: str | None,
    steps: range | None,
    cluster: Path | None,
) -> None:
    """Write the page of what is in a folder."""
    limits = f"{steps.start}:{steps.stop}" if steps is not None else None
    making = _making(folder, {"--baseline": baseline, "--steps": limits, "--cluster": cluster})
    if is_sweep(folder):
        _refuse("--steps", steps, f"{folder} holds a sweep, which has no timeline")
        _refuse("--cluster", cluster, f"{folder} holds a sweep, which was computed already")
        _report_sweep(session, folder, output=output, baseline=baseline, making=making)
        return
    if (folder / LEARNED).is_file():
        for option, value in (("--steps", steps), ("--cluster", cluster), ("--baseline", baseline)):
            _refuse(option, value, f"{folder} holds curves of training, with the baseline that learn had")
        _report_learned(session, folder / LEARNED, output, making)
        return
    _check_number(folder)
    with session.bar() as bar:
        bar.update("read the runs", 0, None)
        calibrated = Calibrated.read(cluster) if cluster else None
        runs = inputs.read_runs(str(folder), None)
        found = read_report(folder, runs, baseline=baseline, calibrated=calibrated, progress=bar.update)
        shown = shown_runs(found, steps)
        bar.update("write the page", len(runs), len(runs))
        nbytes = save_text(output, pages.runs_page(found, shown, making=making))
    session.wrote(output)
    session.result(_document(found, shown, output, nbytes), _text(found, shown, output, nbytes))


def _making(folder: Path, options: dict[str, object]) -> Making:
    """Return how the page is made: the command without its output."""
    given = (text for option, value in options.items() if value is not None for text in (option, str(value)))
    return Making.now(shlex.join(["simdist", "report", str(folder), *given]))


def _refuse(option: str, value: object, why: str) -> None:
    if value is not None:
        raise ScenarioError(f"{option}: {why}: leave it out")


def _check_number(folder: Path) -> None:
    """Refuse more runs than a page can show, or of several folders, before they are read."""
    paths = run_directory.find(folder)
    parents = list(dict.fromkeys(path.parent for path in paths))
    if len(parents) > 1 or len(paths) > _MOST_RUNS:
        raise ScenarioError(
            f"{folder}: holds {len(paths):,} runs in {len(parents):,} folders, a page compares up to {_MOST_RUNS} in "
            f"one: choose it, such as {parents[0]}; `simdist results {folder}` shows all as a table"
        )


def _report_sweep(
    session: common.CliSession, folder: Path, *, output: Path, baseline: str | None, making: Making
) -> None:
    with session.bar() as bar:
        bar.update("read the sweep", 0, None)
        found = read_sweep_report(folder, baseline=baseline)
        bar.update("write the page", 0, None)
        nbytes = save_text(output, pages.sweep_page(found, making=making))
    session.wrote(output)
    session.result(_sweep_document(found, output, nbytes), _sweep_text(found, output, nbytes))


def _report_learned(session: common.CliSession, path: Path, output: Path, making: Making) -> None:
    try:
        found = json.loads(read_content(path))
        columns = learned_columns(found["rows"])
        rows = [[column.cell(row) for column in columns] for row in found["rows"]]
        headings = [column.heading for column in columns]
        page = pages.learned_page(found, headings, rows, files={path.name: path}, making=making)
    except (ValueError, LookupError, TypeError):
        raise RunError(f"{path}: is damaged: run learn into this folder again; finished runs are kept") from None
    nbytes = save_text(output, page)
    session.wrote(output)
    session.result({"report": str(output), "nbytes": nbytes}, f"{output}: {found['title']}; {format_nbytes(nbytes)}")


def _sweep_document(found: SweepReport, output: Path, nbytes: int) -> dict[str, object]:
    """Return a report of a sweep as JSON.

    Columns:
        report, baseline, sweep (str): File written, label or kind, name.
        nbytes (int): Size of the file.
        points, rows, failed, missing (int): Points, rows, rows that failed, rows not computed yet.
    """
    return {
        "report": str(output),
        "nbytes": nbytes,
        **picked(found, sweep="name", points="n_points", rows="n_rows"),
        **picked(found.table, "baseline", failed="n_failed", missing="n_missing"),
    }


def _sweep_text(found: SweepReport, output: Path, nbytes: int) -> str:
    n_failed = found.table.n_failed
    n_missing = found.table.n_missing
    faults = [f"{n:,} {what}" for n, what in ((n_failed, "failed"), (n_missing, "missing")) if n]
    counts = [f"{found.n_points:,} points", f"{found.n_rows:,} rows", *faults]
    return f"{output}: {found.name}; {', '.join(counts)}; {format_nbytes(nbytes)}"


def _check(name: str, output: Path) -> None:
    """Refuse what could not be read or written, before the work is done."""
    if not Path(name).exists():
        raise ScenarioError(
            f"{name}: there is no such run directory; `simdist simulate SCENARIO -o {name}` writes it, or a directory "
            f"with one for each schedule"
        )
    if output.is_dir():
        raise ScenarioError(f"{output}: is a directory; name the page to write, e.g. {output / 'report.html'}")
    if output.suffix.lower() not in _PAGES:
        raise ScenarioError(f"{output}: is not the name of a page; write e.g. {output.with_suffix('.html').name}")
    inputs.check_folder(output)


def _document(found: RunsReport, shown: list[Shown], output: Path, nbytes: int) -> dict[str, object]:
    """Return a report as JSON.

    Columns:
        report, baseline (str): File written, label.
        nbytes (int): Its size.
        cluster (str or null): File of `--cluster`.
        spans (int): Spans in its timelines.
        runs (list): "A run in a report".
    """
    return {
        "report": str(output),
        "nbytes": nbytes,
        "baseline": found.base,
        "cluster": str(found.calibrated.file) if found.calibrated else None,
        "spans": sum(each.n_spans for each in shown),
        "runs": [_run_document(found, each) for each in shown],
    }


def _run_document(found: RunsReport, each: Shown) -> dict[str, object]:
    """Return a run in a report as JSON.

    Columns:
        schedule, run, digest (str): Label, directory, digest of the plan.
        label (str): Unique name on the page.
        sources (object): `simulated` or `real` -> program that wrote that trace (str).
        step_s, speedup (object): The same -> seconds per step, and speed-up in the same folder (float or null).
        simulated_now (bool): Simulated for the report.
        steps, spans (int): Steps shown, spans in the timeline.
        timeline_steps (list): `[first, stop]` of the timeline.
    """
    run = each.run
    rows = {origin: found.rows(origin).get(run.label) for origin in run.executions}
    return {
        "schedule": run.run.scenario.schedules[0].name,
        "label": run.label,
        "run": str(run.path),
        "digest": run.run.plan.digest(),
        "sources": {origin: execution.trace.source for origin, execution in run.executions.items()},
        "step_s": {origin: execution.step_s for origin, execution in run.executions.items()},
        "speedup": {origin: row.speedup if row else None for origin, row in rows.items()},
        "simulated_now": run.simulated_now,
        "steps": each.n_steps,
        "timeline_steps": [each.steps.start, each.steps.stop],
        "spans": each.n_spans,
    }


def _text(found: RunsReport, shown: list[Shown], output: Path, nbytes: int) -> str:
    n_spans = sum(each.n_spans for each in shown)
    what = ", ".join(each.run.label for each in shown)
    return f"{output}: {what}; {' and '.join(found.origins)}; {n_spans:,} spans, {format_nbytes(nbytes)}"
