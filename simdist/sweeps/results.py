"""The table of a folder, of a sweep that was computed there, of the runs in it, or of both; as a frame and as files."""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from simdist.errors import RunError, ScenarioError, naming_file
from simdist.files import lines_of, open_regular, read_jsonl, replacing
from simdist.jobs.store import DESIGN, ROWS, damaged_text, read_remarks
from simdist.runs import run_directory
from simdist.studies.facets import FacetValues
from simdist.studies.known_delays import Chances
from simdist.studies.measuring import ScheduleTimes
from simdist.studies.remarks import Remark
from simdist.sweeps.fields import Choice
from simdist.sweeps.keys import key_of_point
from simdist.sweeps.runs import merged, read_run_table
from simdist.sweeps.table import (
    Columns,
    ResultRow,
    Table,
    collected,
    compared,
    extras_of,
    joined,
    lonely,
    remarks_on_results,
    text_of,
)
from simdist.traces.breakdown import STATES

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
        (both with `_ci95_low` and `_ci95_high`, the interval over seeds), compute_s, comm_s, wait_s, io_s, host_s;
        engine, seeds; failed and error, empty where nothing failed. The data dictionary has all.

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
        return [merged(sweep, read_run_table(folder, runs, baseline=sweep.baseline)) if runs else sweep]
    if others := sorted(str(path.parent) for path in folder.rglob(DESIGN)):
        raise ScenarioError(
            f"{folder}: holds sweeps, but is none: write which, e.g. simdist results {' '.join(others[:3])}"
        )
    if not runs:
        raise ScenarioError(f"{folder}: holds neither a sweep nor runs: `simdist sweep SWEEP.yaml -o DIR` writes one")
    return [read_run_table(folder, runs, baseline=baseline)]


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


class _Header(msgspec.Struct, frozen=True):
    """Columns that all rows of a design have in common."""

    columns: tuple[str, ...]
    has_cases: bool
    baseline: str
    seeds: int
    n_points: int
    remarks: tuple[dict[str, Any], ...] = ()


class _DesignRow(msgspec.Struct, frozen=True):
    """A row that is to be computed."""

    point: int
    case: str
    values: list[Any]
    written: list[Any]
    schedule: str
    kind: str
    key: str


def is_sweep(folder: Path) -> bool:
    """Tell whether a sweep was computed in a folder."""
    return (folder / DESIGN).exists()


def read_sweep(folder: Path, *, baseline: str | None = None) -> Table:
    """Read the rows of a sweep that are there, in the order of its design.

    Args:
        folder: Where `simdist sweep -o` wrote them.
        baseline: Label or kind of the schedule to compare with; that of the sweep if None.

    Raises:
        RunError: A file cannot be read, or holds something else.
    """
    rows = _design(folder / DESIGN)
    header: _Header | None = next(rows, None)
    if header is None:
        raise _damaged(folder / DESIGN)
    damaged: list[int] = []
    records = {str(record["key"]): record for record in read_jsonl(folder / ROWS, damaged) if "key" in record}
    wanted = baseline or header.baseline
    results: list[ResultRow] = []
    stored = read_remarks(folder)
    of_points: list[tuple[int | str, list[dict[str, Any] | Remark]]] = []
    n_points = n_lines = n_lonely = 0
    for point, of_point in groupby(rows, key=lambda row: row.point):
        design = list(of_point)
        n_points = n_points + 1
        n_lines = n_lines + len(design)
        found = compared(list(_results(design, records, header, folder)), wanted)
        n_lonely += any(each.row and not each.has_baseline for each in found)
        results += found
        its = stored.get(key_of_point([each.key for each in design]), {})
        of_points.append((point, [*its.get("remarks", ()), *remarks_on_results(found, Chances.restored(its))]))
    if n_points != header.n_points:
        raise _damaged(folder / DESIGN)
    n_missing = n_lines - len(results)
    remarks = [*collected(of_points), *(Remark(**each) for each in header.remarks)]
    if n_lonely:
        remarks.append(lonely(n_lonely, wanted))
    if damaged:
        remarks.append(Remark("result", damaged_text(folder, damaged)))
    if n_missing:
        goes_on = "rows are not there yet: `simdist sweep` into it goes on"
        remarks.append(Remark("result", f"{folder}: {n_missing:,} of {n_lines:,} {goes_on}"))
    extras = extras_of(results) | ({"case"} if header.has_cases else set())
    return Table(header.columns, tuple(results), n_missing, extras, tuple(remarks), wanted)


def _design(path: Path) -> Iterator[Any]:
    """Yield the header and the rows of a design; a damaged line is an error: its row would be missing unnoticed."""
    kinds = chain([_Header], repeat(_DesignRow))
    try:
        with naming_file(path, "read"), open_regular(path) as file:
            for line, kind in zip(lines_of(file), kinds, strict=False):
                yield msgspec.convert(json.loads(line), kind)
    except (ValueError, msgspec.ValidationError):
        raise _damaged(path) from None


def _damaged(path: Path) -> RunError:
    return RunError(f"{path}: is damaged: run `simdist sweep` into {path.parent} again, which writes a new one")


def _results(
    design: Sequence[_DesignRow], records: Mapping[str, Mapping[str, Any]], header: _Header, folder: Path
) -> Iterator[ResultRow]:
    """Yield the rows of a point that are there."""
    if any(not len(each.values) == len(each.written) == len(header.columns) for each in design):
        raise _damaged(folder / DESIGN)
    # the same at all rows of the point
    written = design[0].written
    values = design[0].values
    both = zip(header.columns, map(Choice, written, values), strict=True)
    choices = {column: choice for column, choice in both if choice.number is not None}
    for each in design:
        if each.key in records:
            row = ResultRow(each.point, each.case, choices, "simulated", each.schedule, each.kind, header.seeds)
            yield _completed(row, records[each.key], folder / ROWS)


def _completed(result: ResultRow, record: Mapping[str, Any], path: Path) -> ResultRow:
    """Complete a row with its record."""
    match record:
        case {"failed": str(kind), "error": str(message)}:
            return replace(result, failed=kind, error=message.replace("\n", "; "))
        case {"schedule": str(label), "engine": str(engine), "step_s": [_, *_], **parts}:
            try:
                means_s = _array([parts[f"{state}_s"] for state in STATES])
                states_s = {state: means_s[number : number + 1] for number, state in enumerate(STATES)}
                facets = FacetValues.restored(parts)
                measured = ScheduleTimes(label, engine, _array(record["step_s"]), states_s, facets=facets)
                measured = _with_chance(measured, parts)
            except (KeyError, TypeError, ValueError):
                pass
            else:
                n_seeds = len(measured.step_s)
                return replace(result, schedule=label, n_seeds=n_seeds, measured=measured)
    raise RunError(f"{path}: the record of {record['key']} is damaged: delete its line, and run `simdist sweep` again")


def _with_chance(measured: ScheduleTimes, parts: Mapping[str, Any]) -> ScheduleTimes:
    """Return times with the corrections of a record, if it has any."""
    uncorrected = replace(measured, step_s=_array(parts["run_s"])) if "run_s" in parts else None
    unseen_s = parts.get("unseen_s", 0.0)
    return replace(measured, uncorrected=uncorrected, unseen_s=math.inf if unseen_s is None else float(unseen_s))


def _array(seconds: Sequence[float]) -> NDArray[np.float64]:
    array = np.array(seconds, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ValueError("not finite")
    return array
