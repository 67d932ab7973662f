"""Finding the trace files that a user means."""

import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from simdist.errors import TraceError

_SUFFIXES = (".json", ".json.gz")
_PARTS = re.compile(r"(\D*)(\d*)")


def find_traces(places: Sequence[str | Path]) -> list[Path]:
    """Return the trace files in some places, each once, in the order of the places and of the numbers in their names.

    Args:
        places: Files; folders, of which `*.json` and `*.json.gz` are taken, from the folders within only if there are
            none directly in it; or patterns such as `traces/rank*.json`, for folders and files.

    Raises:
        TraceError: There is nothing in one of the places, or no place.
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
    if glob.has_magic(place):
        return _in_pattern(place)
    raise TraceError(f"{place}: no such file or folder")


def _in_pattern(pattern: str) -> list[Path]:
    matches = _sorted(map(Path, glob.glob(pattern, recursive=True)))
    files = [each for each in matches if each.is_file()]
    found = files or [file for folder in matches if folder.is_dir() for file in _in_folder(folder)]
    if not found:
        raise TraceError(f"{pattern}: no file has such a name")
    return found


def _in_folder(folder: Path) -> list[Path]:
    try:
        found = _traces(folder.iterdir()) or _traces(folder.rglob("*"))
    except OSError as error:
        raise TraceError(f"{folder}: cannot be read: {error.strerror or error}") from error
    if not found:
        raise TraceError(f"{folder}: holds no file whose name ends in {' or '.join(_SUFFIXES)}")
    return found


def _traces(paths: Iterable[Path]) -> list[Path]:
    return _sorted(
        path for path in paths if path.name.endswith(_SUFFIXES) and not path.name.startswith(".") and path.is_file()
    )


def _sorted(paths: Iterable[Path]) -> list[Path]:
    """Sort as people count: rank 2 before rank 10."""
    return sorted(paths, key=lambda path: [(text, int(number or 0)) for text, number in _PARTS.findall(str(path))])
