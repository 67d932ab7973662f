"""Tables as pandas frames and files."""

import csv
import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from simdist.errors import RunError, UnsupportedError
from simdist.runs import run_directory
from simdist.sweep.table import Columns

if TYPE_CHECKING:
    import pandas as pd


_FLOATS = ("_s", "_low", "_high", "speedup", "_ratio")
"""Endings of columns that are float64 even where nothing stands in them."""
_COUNTS = ("point", "seeds")


def frame_of(columns: Columns) -> "pd.DataFrame":
    """Return a frame: numbers as int64 or float64 with NaN where there is none, truth values as bool, others as str."""
    import pandas as pd

    return pd.DataFrame({name: _series(name, values) for name, values in columns.items()})


def _series(name: str, values: Sequence[object]) -> "pd.Series":
    import pandas as pd

    if not values and name in _COUNTS:
        return pd.Series([], dtype="int64")
    there = [value for value in values if value is not None]
    if there and all(isinstance(value, bool) for value in there) and len(there) == len(values):
        return pd.Series(values, dtype=bool)
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in there):
        if there and len(there) == len(values) and all(isinstance(value, int) for value in there):
            return pd.Series(values, dtype="int64")
        if there or name.endswith(_FLOATS):
            return pd.Series(values, dtype="float64")
    return pd.Series(["" if value is None else _text(value) for value in values], dtype=str)


def csv_text(columns: Columns) -> str:
    """Return a table as CSV: numbers to the last bit, nothing where there is none; equal tables give equal text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_text(value) for value in row] for row in zip(*columns.values(), strict=True))
    return text.getvalue()


def _text(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case float():
            return repr(value)
        case _:
            return str(value)


def write_csv(columns: Columns, path: Path) -> None:
    """Write a CSV file; an interruption leaves the old one or none.

    Raises:
        RunError: It cannot be written.
    """
    try:
        with run_directory.replacing(path) as part:
            part.write_text(csv_text(columns), encoding="utf-8", newline="")
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None


def check_parquet() -> None:
    """Refuse to write Parquet before the work is done.

    Raises:
        UnsupportedError: A package is missing.
    """
    if find_spec("pyarrow") is None:
        raise UnsupportedError("Parquet needs pyarrow, which is not installed: pip install pyarrow")


def write_parquet(columns: Columns, path: Path) -> None:
    """Write a Parquet file; an interruption leaves the old one or none.

    Raises:
        UnsupportedError: A package is missing.
        RunError: It cannot be written.
    """
    check_parquet()
    try:
        with run_directory.replacing(path) as part:
            frame_of(columns).to_parquet(part, engine="pyarrow", index=False)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None
