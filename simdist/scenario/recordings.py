"""Files of numbers that stand beside a scenario: recorded delays, and recorded shares of links."""

import hashlib
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, ValidationInfo

from simdist.arrays import ArrayError, Declared, open_arrays
from simdist.files import open_regular, read_content, replacing
from simdist.scenario.logs import LOG_FORM, is_bare_log, is_log, table_of_log
from simdist.settings.base import folder_of, refuse, shown, without_mask

_MOST = 1e9  # seconds, tokens or times the bandwidth: more is another column, or another unit
_NAME = "write the name of a .npz or .csv file"


@dataclass(frozen=True, slots=True)
class TableForm:
    """Contents of a file: a table of numbers, finite and 0 or more.

    Args:
        array: In .npz files that hold several arrays, the name of the one that counts.
        csv: The lines to write in a .csv file, for messages.
        npz: The array to write in an .npz file, likewise.
        values: The numbers that there may be, likewise.
        place: The meaning of row and column of a number in an .npz file, likewise.
    """

    array: str
    csv: str
    npz: str
    values: str
    place: str


def _beside_the_scenario(value: Any, info: ValidationInfo) -> Path:
    if info.context is None and not isinstance(value, str | Path):
        return _written(value)
    if not isinstance(value, str | Path) or Path(value).suffix not in (".npz", ".csv"):
        raise ValueError(f"{shown(value)} is not a recording: {_NAME}")
    return (folder_of(info) / value).absolute()


def _written(value: Any) -> Path:
    """Write an array or a frame from Python, or what numpy takes for an array, and return the path of its file.

    Equal arrays have the same file, so that equal settings are equal. The files are removed when Python ends.
    """
    value = _with_columns(value)
    try:
        array = _of_frame(value) if isinstance(value, _Frame) else _of_columns(value)
    except (TypeError, ValueError) as error:
        if isinstance(value, _Frame):
            raise ValueError(f"{shown(list(value.columns))}: {error}") from None
        raise ValueError(f"{shown(value)} is not a recording: {_NAME}, or give a two-dimensional array") from None
    if array.ndim not in (2, 3) or not array.size:
        raise ValueError(f"an array of shape {list(array.shape)} is not a recording: give it two dimensions")
    if is_bare_log(array):
        raise ValueError(
            f"an array of shape {list(array.shape)} whose first columns number steps and ranks is a log, and no table "
            f"[n_steps, world_size]: give a frame with columns step, rank and seconds"
        )
    content = np.ascontiguousarray(array)
    digest = hashlib.sha256(f"{content.shape}".encode() + content.tobytes()).hexdigest()[:16]
    path = Path(_folder().name) / f"array-{digest}.npz"
    if not path.exists():
        np.savez(path, recording=content)
    return path


@runtime_checkable
class _Frame(Protocol):
    """A data frame, of pandas or another library."""

    @property
    def columns(self) -> Iterable[object]: ...

    def __getitem__(self, name: Any, /) -> Any: ...


def _with_columns(value: Any) -> Any:
    """Return what is indexed by step and rank, as pandas does, with these as columns."""
    names = getattr(getattr(value, "index", None), "names", ())
    return value.reset_index() if is_log(names) else value


def _of_columns(value: Any) -> NDArray[np.float64]:
    """Return the delays of a log with named columns, as a mapping or an array of records, or of an array."""
    names = value if isinstance(value, Mapping) else getattr(getattr(value, "dtype", None), "names", None)
    if names is not None:
        return table_of_log(names, lambda name: value[name])
    return _seconds(without_mask(value))


def _seconds(array: NDArray[Any]) -> NDArray[np.float64]:
    """Return an array of numbers, or of durations of any unit, as numbers."""
    if array.dtype.kind == "m":
        return np.asarray(array / np.timedelta64(1, "s"), dtype=np.float64)
    if array.dtype.kind in "bcM":
        raise TypeError(f"an array of {array.dtype}")
    return np.asarray(array, dtype=np.float64)


def _of_frame(frame: _Frame) -> NDArray[np.float64]:
    """Return the delays of a frame: a log, or a column for each rank, 0, 1, ... in this order."""
    names = list(frame.columns)
    if is_log(names):
        return table_of_log(names, lambda name: frame[name])
    ranks = [str(name).removeprefix("rank").strip("_ ") for name in names]
    if ranks != [str(rank) for rank in range(len(names))]:
        raise ValueError(
            "which rank is which column? Name them 0, 1, ..., or give a log: columns step, rank and seconds, or ms"
        )
    return np.stack([_seconds(np.asarray(frame[name])) for name in names], axis=1)


@cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """Return the folder of arrays of this process, which is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="simdist-arrays-")


def kept(value: Any, folder: Path, *, name: str) -> Any:
    """Return a value of a scenario in which files of arrays from Python are copies in a folder that outlives Python.

    Args:
        value: As a scenario file has it.
        folder: Where copies are written, if there are such files in it.
        name: The folder as it is to stand in the value.

    Raises:
        RunError: A copy cannot be written.
    """
    match value:
        case str() if _folder.cache_info().currsize and _folder().name in value:
            here = Path(_folder().name)
            for path in here.iterdir():
                if str(path) in value and not (folder / path.name).exists():
                    folder.mkdir(parents=True, exist_ok=True)
                    with replacing(folder / path.name) as part:
                        shutil.copyfile(path, part)
            return value.replace(str(here), name)
        case list():
            return [kept(each, folder, name=name) for each in value]
        case dict():
            return {key: kept(item, folder, name=name) for key, item in value.items()}
        case _:
            return value


#: The absolute path of a recording, whose name is relative to the scenario's file.
RecordingFile = Annotated[Path, BeforeValidator(_beside_the_scenario)]


def read_table(
    path: Path,
    form: TableForm,
    *,
    dimensions: tuple[int, ...] = (2,),
    problems: Callable[[NDArray[np.float64]], Iterable[str]] = lambda _: (),
) -> NDArray[np.float64]:
    """Read the numbers of a recording.

    Args:
        path: The file.
        form: Its contents.
        dimensions: Numbers of axes that it may have; a .csv file has two.
        problems: Yields what is wrong with the numbers.

    Raises:
        ValidationError: The file cannot be read, or holds something else.
    """
    try:
        _check_file(path, form)
        table = _read_npz(path, form, dimensions) if path.suffix == ".npz" else _read_csv(path, form)
        wrong = np.argwhere(~((table >= 0) & (table <= _MOST)))
        if len(wrong):
            row, *_, column = at = tuple(wrong[0])
            value = table[at]
            bound = f", at most {_MOST:g}" if _MOST < value < math.inf else ""
            raise ValueError(f"{path}: {value:g} at {form.place.format(row, column)}: {form.values}{bound}")
        for problem in problems(table):
            raise ValueError(f"{path}: {problem}: {form.npz if path.suffix == '.npz' else form.csv}")
    except OSError as error:
        refuse("Recorded", [(("file",), f"{path}: cannot be read: {error.strerror or error}")])
    except ValueError as error:
        refuse("Recorded", [(("file",), str(error))])
    return table


def _check_file(path: Path, form: TableForm) -> None:
    if not path.exists():
        raise ValueError(f"{path}: there is no such file; the name is relative to the scenario")
    if not path.is_file():  # to open a pipe would wait for a writer
        raise ValueError(f"{path}: is {'a directory' if path.is_dir() else 'no regular file'}: {_NAME}")
    with open_regular(path) as file:
        is_empty = not file.read(1)
    if is_empty:
        raise ValueError(f"{path}: is empty: {form.npz if path.suffix == '.npz' else form.csv}")


def _read_npz(path: Path, form: TableForm, dimensions: tuple[int, ...]) -> NDArray[np.float64]:
    """Read an .npz file. ValueError tells what is wrong."""
    name = None
    numbers = np.empty((0, 0))
    try:
        with open_arrays(path) as file:
            names = file.names
            name = names[0] if len(names) == 1 else form.array
            is_right = False
            if name in names:
                found = file.declared(name)
                is_right = _is_right(found, dimensions)
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
    return numbers.astype(np.float64)


def _read_csv(path: Path, form: TableForm) -> NDArray[np.float64]:
    """Read a .csv file. ValueError tells what is wrong, and in which row of numbers, counted from 0."""
    has_log = False
    try:
        lines = [line for line in read_content(path).decode("utf-8-sig").splitlines() if line.strip()]
        header = [name.strip() for name in lines[0].lstrip("# ").split(",")] if lines else []
        has_log = is_log(header)
        rows = [line for line in lines[has_log:] if not line.lstrip().startswith("#")]
        if not rows:
            raise ValueError("is empty")
        table = np.loadtxt(rows, delimiter=",", comments=None, ndmin=2)
        if has_log and table.shape[1] != len(header):
            raise ValueError(f"{len(header)} columns in the header, and {table.shape[1]} below it")
    except ValueError as error:
        remedy = LOG_FORM if has_log else form.csv
        raise ValueError(f"{path}: {str(error).partition('; use')[0].rstrip('.')}: {remedy}") from None
    if not has_log:
        return table
    try:
        return table_of_log(header, lambda name: table[:, header.index(str(name))])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _is_right(found: Declared, dimensions: tuple[int, ...]) -> bool:
    is_number = np.issubdtype(found.dtype, np.number) and not np.issubdtype(found.dtype, np.complexfloating)
    return len(found.shape) in dimensions and is_number
