"""The table of a folder, of a sweep that was computed there, of the runs in it, or of both; as a frame and as files."""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from simdist.errors import ScenarioError
from simdist.files import replacing
from simdist.jobs.store import DESIGN
from simdist.runs import run_directory
from simdist.sweeps.computed import is_sweep, read_sweep
from simdist.sweeps.runs import merged, read_runs
from simdist.sweeps.table import Columns, Table, joined, text_of

if TYPE_CHECKING:
    import pandas as pd


def frame(*folders: str | Path, baseline: str | None = None) -> "pd.DataFrame":
    """Return the results of sweeps and of runs as a pandas frame, a row per point, source and schedule.

    Args:
        folders: Where `simdist sweep -o` wrote, or that hold run directories at any depth.
        baseline: Label or kind of the schedule that speed-ups are over; if None, that of the sweep; of runs,
            `simdist.studies.comparison.default_baseline`.

    Columns:
        point, case, and a column for each field that is varied, in SI units; source, schedule, kind; step_s, speedup
        (both with `_low` and `_high`, the 95 % interval over seeds), compute_s, comm_s, wait_s, io_s, host_s; engine,
        seeds; failed and error, empty where nothing failed. The data dictionary has all.

    Raises:
        ScenarioError: A folder holds neither a sweep nor runs.
        RunError: A file cannot be read, or is damaged.

    >>> from tempfile import TemporaryDirectory
    >>> from simdist.sweeps import InProcess, loads, sweep
    >>> what = loads("{scenario: cloud-stragglers, vary: {cluster.nodes: [2, 4], steps: [8]}, seeds: 2}")
    >>> with TemporaryDirectory() as folder:
    ...     _ = sweep(what, folder, workers=InProcess())
    ...     table = frame(folder)
    >>> table[table.schedule == "local-4"][["cluster.nodes", "steps", "seeds"]].values.tolist()
    [[2, 8, 2], [4, 8, 2]]
    """
    return read_results(folders, baseline=baseline).frame()


def read_results(folders: Sequence[str | Path], *, baseline: str | None = None) -> Table:
    """Read the results of sweeps and of runs.

    Args:
        folders: As in `frame`; of several, rows say which one they are from.
        baseline: Likewise.

    Raises:
        ScenarioError: A folder holds neither a sweep nor runs.
        RunError: A file cannot be read, or is damaged.
    """
    tables = {folder: _tables(Path(folder), baseline) for folder in folders}
    if len(tables) == 1:
        return joined([table for found in tables.values() for table in found])
    return joined([_of_folder(table, folder) for folder, found in tables.items() for table in found])


def _tables(folder: Path, baseline: str | None) -> list[Table]:
    if not folder.is_dir():
        raise ScenarioError(f"{folder}: there is no such folder: `simdist sweep SWEEP.yaml -o DIR` writes one")
    runs = run_directory.inside(folder)
    if is_sweep(folder):
        sweep = read_sweep(folder, baseline=baseline)
        return [merged(sweep, read_runs(folder, runs, baseline=sweep.baseline)) if runs else sweep]
    if others := sorted(str(path.parent) for path in folder.rglob(DESIGN)):
        raise ScenarioError(
            f"{folder}: holds sweeps, but is none: write which, e.g. simdist results {' '.join(others[:3])}"
        )
    if not runs:
        raise ScenarioError(f"{folder}: holds neither a sweep nor runs: `simdist sweep SWEEP.yaml -o DIR` writes one")
    return [read_runs(folder, runs, baseline=baseline)]


def _of_folder(table: Table, folder: str | Path) -> Table:
    results = tuple(replace(each, folder=str(folder)) for each in table.results)
    return replace(table, results=results, extras=table.extras | {"folder"})


def csv_text(columns: Columns) -> str:
    """Return a table as CSV: numbers to the last bit, nothing where there is none; equal tables give equal text.

    Text that begins as a formula of a spreadsheet does, with = + - @, a tab or a carriage return, gets an apostrophe.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(map(text_of, row) for row in zip(*columns.values(), strict=True))
    return text.getvalue()


def write_csv(columns: Columns, path: Path) -> None:
    """Write a CSV file; an interruption leaves the old one or none.

    Raises:
        RunError: It cannot be written.
    """
    with replacing(path) as part:
        part.write_text(csv_text(columns), encoding="utf-8", newline="")
