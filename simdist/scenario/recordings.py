"""Files of numbers that stand beside a scenario: recorded delays, and recorded shares of links."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, ValidationInfo

from simdist.arrays import ArrayError, Declared, open_arrays
from simdist.files import open_regular, read_content
from simdist.settings.base import FromFile, refuse, shown

_NAME = "write the name of a .npz or .csv file"


@dataclass(frozen=True, slots=True)
class Form:
    """Contents of a file: a table of numbers, finite and 0 or more.

    Args:
        array: In .npz files that hold several arrays, the name of the one that counts.
        csv: The lines to write in a .csv file, for messages.
        npz: The array to write in an .npz file, likewise.
        column: The meaning of a column, likewise.
        values: The numbers that there may be, likewise.
        place: The meaning of row and column of a number in an .npz file, likewise.
    """

    array: str
    csv: str
    npz: str
    column: str
    values: str
    place: str


def _beside_the_scenario(value: Any, info: ValidationInfo) -> Path:
    if not isinstance(value, str | Path) or Path(value).suffix not in (".npz", ".csv"):
        raise ValueError(f"{shown(value)} is no recording: {_NAME}")
    folder = info.context.folder if isinstance(info.context, FromFile) else Path()
    return (folder / value).absolute()


#: The absolute path of a recording, whose name is relative to the scenario's file.
RecordingFile = Annotated[Path, BeforeValidator(_beside_the_scenario)]


def read_table(
    path: Path, form: Form, *, problems: Callable[[NDArray[np.float64]], Iterable[str]] = lambda _: ()
) -> NDArray[np.float64]:
    """Read the numbers of a recording, two-dimensional.

    Args:
        path: The file.
        form: Its contents.
        problems: Yields what is wrong with the numbers.

    Raises:
        ValidationError: The file cannot be read, or holds something else.
    """
    try:
        _check_file(path, form)
        table = _read_npz(path, form) if path.suffix == ".npz" else _read_csv(read_content(path), path, form)
        for problem in problems(table):
            raise ValueError(f"{path}: {problem}: {form.npz if path.suffix == '.npz' else form.csv}")
    except OSError as error:
        refuse("Recorded", [(("file",), f"{path}: cannot be read: {error.strerror or error}")])
    except ValueError as error:
        refuse("Recorded", [(("file",), str(error))])
    return table


def _check_file(path: Path, form: Form) -> None:
    if not path.exists():
        raise ValueError(f"{path}: there is no such file; the name is relative to the scenario")
    if not path.is_file():  # to open a pipe would wait for a writer
        raise ValueError(f"{path}: is {'a directory' if path.is_dir() else 'no regular file'}: {_NAME}")
    with open_regular(path) as file:
        is_empty = not file.read(1)
    if is_empty:
        raise ValueError(f"{path}: is empty: {form.npz if path.suffix == '.npz' else form.csv}")


def _read_npz(path: Path, form: Form) -> NDArray[np.float64]:
    """Read an .npz file. ValueError tells what is wrong."""
    name, numbers = None, np.empty((0, 0))
    try:
        with open_arrays(path) as file:
            names = file.names
            name = names[0] if len(names) == 1 else form.array
            is_right = name in names and _is_right(found := file.declared(name))
            if is_right:
                numbers = file.read(name)
    except OSError:
        raise
    except ArrayError as error:
        raise ValueError(f"{path}: {error}: {form.npz}") from None
    except Exception:  # of a dozen kinds: numpy, zipfile and tokenize each have their own for damaged files
        what = "is no .npz file" if name is None else f"{name} is damaged, or holds Python objects instead of numbers"
        raise ValueError(f"{path}: {what}: {form.npz}") from None
    if name not in names:
        raise ValueError(f"{path}: holds {', '.join(names) or 'nothing'}: write one array, or one named {form.array!r}")
    if not is_right:
        raise ValueError(f"{path}: {name} holds {found.dtype} of shape {list(found.shape)}: {form.npz}")
    wrong = np.argwhere(~((numbers >= 0) & np.isfinite(numbers)))
    if len(wrong):
        row, column = wrong[0]
        raise ValueError(f"{path}: {numbers[row, column]} at {form.place.format(row, column)}: {form.values}")
    return numbers.astype(np.float64)


def _is_right(found: Declared) -> bool:
    is_number = np.issubdtype(found.dtype, np.number) and not np.issubdtype(found.dtype, np.complexfloating)
    return len(found.shape) == 2 and is_number


def _read_csv(content: bytes, path: Path, form: Form) -> NDArray[np.float64]:
    """Read a .csv file. ValueError tells what is wrong, and in which line."""
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: byte {content[error.start]:#04x} is not UTF-8 text: {form.csv}") from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")]
    if not numbered:
        raise ValueError(f"{path}: is empty: {form.csv}")
    rows = [[_number(cell, f"{path}:{number}", form) for cell in line.split(",")] for number, line in numbered]
    for (number, _), row in zip(numbered, rows, strict=True):
        if len(row) != len(rows[0]):
            found = f"{len(row)} column{'s' * (len(row) > 1)}, but {len(rows[0])} in line {numbered[0][0]}"
            raise ValueError(f"{path}:{number}: {found}: write as many, one per {form.column}")
    return np.array(rows, dtype=np.float64)


def _number(cell: str, where: str, form: Form) -> float:
    try:
        numbers = float(cell)
    except ValueError:
        raise ValueError(f"{where}: {shown(cell.strip())} is not a number: {form.csv}") from None
    if not 0 <= numbers < math.inf:
        raise ValueError(f"{where}: {cell.strip()}: {form.values}")
    return numbers
