"""Reads the results of a sweep from its folder."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from simdist.errors import RunError, naming_file
from simdist.files import lines_of, open_regular, read_jsonl
from simdist.jobs.store import DESIGN, ROWS, damaged_text
from simdist.studies.facets import FacetValues
from simdist.studies.measuring import ScheduleTimes
from simdist.sweeps.fields import Choice
from simdist.sweeps.table import ResultRow, Table, compared, extras_of, lonely, used_notes
from simdist.traces.breakdown import STATES


class _Header(msgspec.Struct, frozen=True):
    """Columns that all rows of a design have in common."""

    columns: tuple[str, ...]
    has_cases: bool
    baseline: str
    seeds: int
    n_points: int


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
    n_points = n_lines = n_lonely = 0
    for _, of_point in groupby(rows, key=lambda row: row.point):
        design = list(of_point)
        n_points = n_points + 1
        n_lines = n_lines + len(design)
        found = compared(list(_results(design, records, header, folder)), wanted)
        n_lonely += any(each.row and not each.has_baseline for each in found)
        results += found
    if n_points != header.n_points:
        raise _damaged(folder / DESIGN)
    n_missing = n_lines - len(results)
    notes = [lonely(n_lonely, wanted)] if n_lonely else []
    if damaged:
        notes.append(damaged_text(folder, damaged))
    if n_missing:
        notes.append(f"{folder}: {n_missing:,} of {n_lines:,} rows are not there yet: `simdist sweep` into it goes on")
    notes += used_notes(results)
    extras = extras_of(results) | ({"case"} if header.has_cases else set())
    return Table(header.columns, tuple(results), n_missing, extras, tuple(notes), wanted)


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
            except (KeyError, TypeError, ValueError):
                pass
            else:
                n_seeds = len(measured.step_s)
                return replace(result, schedule=label, n_seeds=n_seeds, measured=measured)
    raise RunError(f"{path}: the record of {record['key']} is damaged: delete its line, and run `simdist sweep` again")


def _array(seconds: Sequence[float]) -> NDArray[np.float64]:
    array = np.array(seconds, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ValueError("not finite")
    return array
