"""`simdist results`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from simdist.cli.results_text import failed_text, fastest_text, results_text
from simdist.cli.session import Session
from simdist.errors import ScenarioError
from simdist.progress import ProgressBar
from simdist.sweep.results import check_parquet, csv_text, read_results, write_csv, write_parquet
from simdist.sweep.selection import Fastest, fastest, fastest_columns, order, where
from simdist.sweep.table import Columns, Table, columns

STDOUT = "-"
_SHOWN = 30


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for.

    Args:
        csv: File to write, `-` for stdout; None writes none.
        parquet: Likewise, without `-`.
        conditions: Of rows, such as `COLUMN=VALUE`.
        sort: Column, with a dash for the largest first; None keeps the order of the design.
        only_fastest: One row per point.
        only_failed: Only rows that failed.
        shows_all: However many rows there are.
        baseline: Schedule that speed-ups are over; None leaves it to the sweep.
    """

    csv: Path | None = None
    parquet: Path | None = None
    conditions: tuple[str, ...] = ()
    sort: str | None = None
    only_fastest: bool = False
    only_failed: bool = False
    shows_all: bool = False
    baseline: str | None = None


def results(session: Session, folders: Sequence[Path], wanted: Wanted) -> None:
    """Print and write the table of sweeps and runs; tell what is not in it."""
    _check(session, wanted)
    with ProgressBar(sys.stderr) as bar:
        bar.update("read results", 0, None)
        whole = read_results(folders, baseline=wanted.baseline)
    table = where(whole, wanted.conditions)
    if wanted.only_failed:
        table = replace(table, results=tuple(each for each in table.results if each.failed))
    limit = None if wanted.shows_all else _SHOWN
    if wanted.only_fastest:
        best = _sorted_fastest(table, wanted.sort)
        found, text = fastest_columns(table, best), fastest_text(table, best, limit=limit)
    else:
        table = _sorted(table, wanted.sort)
        found, print_text = columns(table), failed_text if wanted.only_failed else results_text
        text = print_text(table, limit=limit)
    for note in _notes(whole, wanted):
        session.say(note)
    _write(session, found, wanted)
    if wanted.csv != Path(STDOUT):
        session.result(_document(folders, whole, found), text)


def _check(session: Session, wanted: Wanted) -> None:
    if wanted.only_fastest and wanted.only_failed:
        raise ScenarioError("--fastest with --failed: what failed is not fast: write one of them")
    if wanted.csv == Path(STDOUT) and session.as_json:
        raise ScenarioError("--csv - with --json: both would go to stdout: write one of them, or a file")
    for path in (wanted.csv, wanted.parquet):
        if path and not path.parent.is_dir():
            raise ScenarioError(f"{path}: there is no directory {path.parent}: make it first")
    if wanted.parquet:
        check_parquet()


def _sorted(table: Table, column: str | None) -> Table:
    if column is None:
        return table
    return replace(table, results=tuple(table.results[number] for number in order(columns(table), column)))


def _sorted_fastest(table: Table, column: str | None) -> list[Fastest]:
    found = fastest(table)
    return found if column is None else [found[number] for number in order(fastest_columns(table, found), column)]


def _notes(table: Table, wanted: Wanted) -> list[str]:
    n_failed = table.n_failed
    failed = [f"{n_failed:,} row{'s' * (n_failed > 1)} failed: --failed shows why"] if n_failed else []
    return [*table.notes, *([] if wanted.only_failed else failed)]


def _write(session: Session, found: Columns, wanted: Wanted) -> None:
    if wanted.csv == Path(STDOUT):
        click.echo(csv_text(found), nl=False)
    elif wanted.csv:
        write_csv(found, wanted.csv)
        session.wrote(wanted.csv)
    if wanted.parquet:
        write_parquet(found, wanted.parquet)
        session.wrote(wanted.parquet)


def _document(folders: Sequence[Path], table: Table, found: Columns) -> dict[str, object]:
    return {
        "folders": [str(folder) for folder in folders],
        "baseline": table.baseline or None,
        "missing": table.n_missing,
        "failed": table.n_failed,
        "rows": [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)],
    }
