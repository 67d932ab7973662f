"""`simdist results`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from simdist.cli import common, inputs
from simdist.errors import ScenarioError
from simdist.settings.base import plural
from simdist.studies import facets
from simdist.studies.columns import SCHEDULE, SPEEDUP, STATE_COLUMNS, STEP_TIME, Column, factor_with_interval
from simdist.studies.remarks import documents
from simdist.studies.tables import table_text
from simdist.sweeps.fastest import Fastest, fastest, fastest_columns
from simdist.sweeps.results import csv_text, read_results, write_csv
from simdist.sweeps.table import Columns, ResultRow, Table, columns, short_names, shown_text, source_text, values_of

_STDOUT = Path("-")
_SHOWN = 30

_FASTEST_COLUMNS = (
    Column("fastest", "schedule"),
    STEP_TIME,
    SPEEDUP,
    Column("next"),
    Column("lead", "lead", "lead_ci95", form=factor_with_interval),
    Column("clear", words=lambda is_clear: "yes" if is_clear else "no"),
)
_FAILED_COLUMNS = (SCHEDULE, Column("reason", form=str))
_REASON_COLUMNS = (Column("reason", form=str), Column("rows", form="{:,}".format), Column("error"))


@click.command("results")
@click.argument("folders", metavar="DIR...", type=common.path_type, nargs=-1, required=True)
@click.option("--csv", type=common.path_type, metavar="FILE", help="Write the table to a CSV file; - is stdout.")
@click.option("--fastest", "only_fastest", is_flag=True, help="Only the fastest schedule of each point, and its lead.")
@click.option("--failed", "only_failed", is_flag=True, help="Only rows that failed, and why.")
@click.option("--all", "shows_all", is_flag=True, help="Show all rows, however many there are.")
@click.option("--baseline", metavar="LABEL", help="Compare with this schedule; that of the sweep if omitted.")
@common.options
def command(
    session: common.CliSession,
    folders: tuple[Path, ...],
    *,
    csv: Path | None,
    only_fastest: bool,
    only_failed: bool,
    shows_all: bool,
    baseline: str | None,
) -> None:
    """Show the results of sweeps and of runs as one table.

    A DIR is the output of `simdist sweep -o`, or holds run directories at any depth, simulated, measured or both. Each
    row is one schedule at one point. Each varied setting has a column: as written on the screen, in SI units in files.
    """
    if only_fastest and only_failed:
        raise ScenarioError("--fastest with --failed: failed rows have no times: write one of them")
    if csv == _STDOUT and session.as_json:
        raise ScenarioError("--csv - with --json: both write to stdout: use one of them, or name a file")
    if csv:
        inputs.check_folder(csv)
    with session.bar() as bar:
        bar.update("read results", 0, None)
        whole = read_results(folders, baseline=baseline)
    table = whole
    if only_failed:
        table = replace(whole, results=tuple(each for each in whole.results if each.failed))
    limit = None if shows_all else _SHOWN
    if only_fastest:
        best = fastest(table)
        found = fastest_columns(table, best)
        text = _fastest_text(table, best, limit)
    else:
        found = columns(table)
        text = _failed_text(table, limit) if only_failed else _results_text(table, limit)
    n_failed = whole.n_failed
    failed = [f"{_count(n_failed, 'row')} failed: --failed shows why"] if n_failed and not only_failed else []
    session.remark("", whole.shown_remarks)
    for sentence in failed:
        session.say(sentence)
    if csv == _STDOUT:
        with common.printing():
            click.echo(csv_text(found), nl=False)
        return
    if csv:
        write_csv(found, csv)
        session.wrote(csv)
    session.result(_document(folders, whole, found), text)


def _document(folders: Sequence[Path], table: Table, found: Columns) -> dict[str, object]:
    """Return results as JSON.

    Columns:
        folders (list): Folders read (str).
        baseline (str or null): Baseline of speed-ups. `null` if several.
        missing (int): Rows not computed yet, and runs without a trace.
        failed (int): Rows that failed.
        rows (list): "A result".
        remarks (list): "A remark".
    """
    return {
        "folders": [str(folder) for folder in folders],
        "baseline": table.baseline or None,
        "missing": table.n_missing,
        "failed": table.n_failed,
        "rows": [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)],
        "remarks": documents(table.remarks),
    }


def _results_text(table: Table, limit: int | None) -> str:
    """Return the table, its first rows if there are more than `limit`."""
    results = table.results
    if not results:
        return "no rows"
    title = f"{_count(len(results), 'row')}, {_sources(table)}{_over(table)}"
    found = [*_point_columns(table), *_result_columns(table)]
    return table_text(title, found, [_record(table, each) for each in results[:limit]]) + _more(results, limit)


def _fastest_text(table: Table, best: Sequence[Fastest], limit: int | None) -> str:
    """Return the table of the fastest schedules, its first rows if there are more than `limit`."""
    if not best:
        return "no rows"
    n_points = len({each.result.place for each in best})
    what = f"the fastest schedule at {_count(n_points, 'point')}, {_sources(table)}"
    title = f"{what}{_over(table)}; lead: over the next one"
    records = [
        _record(table, each.result)
        | {"next": each.next_one or None, "lead": each.lead, "lead_ci95": each.lead_ci95, "clear": each.is_clear}
        for each in best[:limit]
    ]
    return table_text(title, [*_point_columns(table), *_FASTEST_COLUMNS], records) + _more(best, limit)


def _failed_text(table: Table, limit: int | None) -> str:
    """Return why rows failed, the reasons of most rows first, and which did, the first ones if there are many."""
    results = table.results
    if not results:
        return "no rows failed"
    reasons = Counter(f"{each.failed}: {each.error}" for each in results).most_common()
    numbers = {reason: number for number, (reason, _) in enumerate(reasons, start=1)}
    title = f"{_count(len(results), 'row')} failed, for {_count(len(reasons), 'reason')}"
    why = [{"reason": numbers[reason], "rows": n_rows, "error": reason} for reason, n_rows in reasons[:limit]]
    failed = [_record(table, each) | {"reason": numbers[f"{each.failed}: {each.error}"]} for each in results[:limit]]
    where = table_text("where", [*_point_columns(table), *_FAILED_COLUMNS], failed)
    return f"{table_text(title, _REASON_COLUMNS, why)}\n\n{where}{_more(results, limit)}"


def _sources(table: Table) -> str:
    """Say who took so long: simulated, measured or both."""
    return " and ".join(sorted({source_text(each.source) for each in table.results}, reverse=True))


def _count(n: int, what: str) -> str:
    return f"{n:,} {plural(n, what)}"


def _over(table: Table) -> str:
    over = f"; speed-up over {table.baseline or 'the baseline'}"
    return over + (", 95 % confidence" if any(each.n_seeds > 1 for each in table.results) else "")


def _more(rows: Sequence[object], limit: int | None) -> str:
    n = len(rows[limit:]) if limit else 0
    return f"\n\n{n:,} more {plural(n, 'row')}: --all shows them, --csv FILE writes them" if n else ""


def _record(table: Table, result: ResultRow) -> dict[str, object]:
    row = result.row
    return values_of(result, table.varied) | {
        **{f"={column}": result.choices.get(column) for column in table.varied},
        "source": source_text(result.source),
        "step_s_ci95": row.step_s_ci95 if row else None,
        "speedup_ci95": row.speedup_ci95 if row and result.has_baseline else None,
    }


def _point_columns(table: Table) -> list[Column]:
    """Return the columns that tell points apart."""
    found = [Column("folder")] if "folder" in table.extras else []
    if {each.point for each in table.results} != {"."}:  # as runs are that are not in folders
        has_names = any(isinstance(each.point, str) for each in table.results)
        found.append(Column("point") if has_names else Column("point", form=str))
    if "case" in table.extras:
        found.append(Column("case"))
    for column, name in zip(table.varied, short_names(table.varied), strict=True):
        found.append(Column(name, f"={column}", form=shown_text))
    if len({each.source for each in table.results}) > 1:
        found.append(Column("source"))
    return found


def _result_columns(table: Table) -> list[Column]:
    found = [SCHEDULE]
    if len({each.n_seeds for each in table.results}) > 1:  # as of a sweep and of runs of it
        found.append(Column("seeds", form=str))
    found += [STEP_TIME, SPEEDUP, *STATE_COLUMNS]
    for facet in facets.FACETS:
        if table.extras.intersection(facet.names):
            found += facet.brief
    if "error_ratio" in table.extras:
        found.append(Column("sim. error", "error_ratio", form="{:+.1%}".format))
    if table.n_failed:
        found.append(Column("failed"))
    return found
