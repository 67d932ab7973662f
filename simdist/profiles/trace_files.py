"""Finding a user's trace files, and reading each in a process of its own."""

import glob
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from functools import partial
from pathlib import Path
from typing import TypeAlias

from simdist.errors import TraceError, naming_file
from simdist.jobs import LocalPool, finished
from simdist.machine import n_cores
from simdist.profiles.steps.model import RankProfile
from simdist.profiles.steps.ranks import profile_rank
from simdist.studies.remarks import Remark

_SUFFIXES = (".json", ".json.gz")
_PARTS = re.compile(r"(\D*)(\d*)")


def find_traces(places: Sequence[str | Path]) -> list[Path]:
    """Return the trace files in some places, without repetition, by place and by the numbers in their names.

    Args:
        places: Files, folders, or patterns such as `traces/rank*.json` for folders and files. A folder gives its
            `*.json` and `*.json.gz`. If it has none, its subfolders are searched.

    Raises:
        TraceError: One of the places contains no trace file, or no place is given.
    """
    if not places:
        raise TraceError("no traces: name files, folders or patterns, such as traces/ or 'traces/rank*.json.gz'")
    found: dict[Path, Path] = {}
    for place in places:
        for path in _in_place(str(place)):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _in_place(place: str) -> list[Path]:
    path = Path(place)
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return [path]
    if not glob.has_magic(place):
        raise TraceError(f"{place}: no such file or folder")
    matches = _sorted(map(Path, glob.glob(place, recursive=True)))
    files = [each for each in matches if each.is_file()]
    found = files or [file for folder in matches if folder.is_dir() for file in _in_folder(folder)]
    if not found:
        raise TraceError(f"{place}: no file has such a name")
    return found


def _in_folder(folder: Path) -> list[Path]:
    with naming_file(folder, "read", TraceError):
        found = _traces(folder.iterdir()) or _traces(folder.rglob("*"))
    if not found:
        raise TraceError(f"{folder}: holds no file whose name ends in {' or '.join(_SUFFIXES)}")
    return found


def _traces(paths: Iterable[Path]) -> list[Path]:
    return _sorted(
        path for path in paths if path.name.endswith(_SUFFIXES) and not path.name.startswith(".") and path.is_file()
    )


def _sorted(paths: Iterable[Path]) -> list[Path]:
    """Sort numbers by value: rank 2 before rank 10."""
    return sorted(paths, key=lambda path: [(text, int(number or 0)) for text, number in _PARTS.findall(str(path))])


_LITTLE_NBYTES = 16 << 20  # reading this takes about a second, like the start of a process, if it is not compressed

#: The steps of a file's rank, or the reason why it could not be read.
_Outcome: TypeAlias = RankProfile | TraceError


def profile_all(
    paths: Sequence[Path],
    *,
    n_workers: int | None = None,
    reading: Callable[[Path], RankProfile] = profile_rank,
    progress: Callable[[int, int], None] | None = None,
) -> list[_Outcome]:
    """Read trace files; a file that cannot be read does not affect the others.

    Args:
        paths: The files.
        n_workers: Processes. None takes one per core, or none if starting them would take longer than reading. With
            one, or for one file, this process reads.
        reading: The reader of one file; a function that processes can import.
        progress: Called with the number of files done and the total number.

    Returns:
        The outcome of each file, in the order of `paths`.

    Raises:
        RunError: No process can be started.
    """
    if not n_workers:
        nbytes = sum(path.stat().st_size for path in paths if path.is_file())
        n_workers = 1 if nbytes < _LITTLE_NBYTES else n_cores()
    n_workers = min(n_workers, len(paths))
    here = ((number, _outcome(reading, path)) for number, path in enumerate(paths))
    finished = here if n_workers <= 1 else _elsewhere(paths, reading, n_workers)
    outcomes: dict[int, _Outcome] = {}
    for number, outcome in finished:
        outcomes[number] = outcome
        if progress:
            progress(len(outcomes), len(paths))
    return [outcomes[number] for number in range(len(paths))]


def readable(outcomes: Sequence[_Outcome]) -> tuple[list[RankProfile], list[Remark]]:
    """Return the profiles of the traces that could be read, and a remark on each of the others, which are left out.

    Raises:
        TraceError: None could be read.
    """
    read = [each for each in outcomes if isinstance(each, RankProfile)]
    failed = [each for each in outcomes if isinstance(each, TraceError)]
    if not read:
        of_all = f"none of the {len(failed)} traces can be used; the first: " if failed[1:] else ""
        raise TraceError(f"{of_all}{failed[0]}")
    return read, [Remark("accuracy", f"left out: {each}") for each in failed]


def _elsewhere(
    paths: Sequence[Path], reading: Callable[[Path], RankProfile], n_workers: int
) -> Iterator[tuple[int, _Outcome]]:
    """Read in processes that get one file at a time, so a process that dies loses only one file."""
    with LocalPool(n_workers) as pool:
        read = partial(_outcome_of, reading)
        for (number, path), done in finished(pool, read, enumerate(paths), n_underway=n_workers):
            yield number, _result(done, path)


def _result(done: Future[_Outcome], path: Path) -> _Outcome:
    try:
        return done.result()
    except BrokenExecutor:
        return TraceError(f"{path}: the process that read it died, perhaps for lack of memory; take fewer --workers")


def _outcome_of(reading: Callable[[Path], RankProfile], numbered: tuple[int, Path]) -> _Outcome:
    _, path = numbered
    return _outcome(reading, path)


def _outcome(reading: Callable[[Path], RankProfile], path: Path) -> _Outcome:
    try:
        return reading(path)
    except TraceError as error:
        return error
    except MemoryError:
        return TraceError(f"{path}: not enough memory to read it; take fewer --workers")
