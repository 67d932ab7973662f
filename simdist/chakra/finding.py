"""Which files belong to a job: its traces, and the process groups beside them."""

import json
from collections.abc import Sequence
from pathlib import Path

from simdist.errors import ScenarioError, TraceError
from simdist.settings.base import shown


def find_traces(names: Sequence[Path]) -> list[Path]:
    """Return the traces that are meant: files, all of a folder, or all that begin with `PREFIX.`.

    Raises:
        ScenarioError: There are none, or a folder holds those of several exports.
    """
    return [path for name in names for path in _found(name)]


def _found(name: Path) -> list[Path]:
    if name.is_file():
        return [name]
    folder, prefix = (name, "") if name.is_dir() else (name.parent, name.name + ".")
    files = [file for file in folder.glob("*") if file.name.startswith(prefix)] if folder.is_dir() else []
    traces = sorted(file for file in files if file.name.endswith((".et", ".et.gz")))
    if not traces:
        raise ScenarioError(
            f"{name}: there are no Chakra traces: write a folder, PREFIX for the files PREFIX.0.et, PREFIX.1.et, ..., "
            f"or the files themselves"
        )
    prefixes = sorted({prefix_of(file) for file in traces})
    if len(prefixes) > 1:
        names = ", ".join(str(folder / each) for each in prefixes)
        raise ScenarioError(f"{name}: holds traces of several jobs; name one of {names}")
    return traces


def prefix_of(path: Path) -> str:
    """Return the part of a trace's name before the rank."""
    return path.name.removesuffix(".gz").removesuffix(".et").rsplit(".", 1)[0]


def groups_beside(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the process groups of `PREFIX.json` beside a trace, if there is such a file.

    Raises:
        TraceError: It holds something else.
    """
    file = path.with_name(f"{prefix_of(path)}.json")
    if not file.exists():
        return {}
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(
            f"{file}: cannot be read as process groups: {error}: write it again, or move it away"
        ) from None
    if not isinstance(document, dict):
        raise TraceError(f'{file}: {shown(document)} are no process groups: write e.g. {{"1": [0, 1, 2, 3]}}')
    for name, ranks in document.items():
        if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            raise TraceError(f'{file}: group {name}: {shown(ranks)} is no list of ranks: write e.g. "{name}": [0, 1]')
    return {name: tuple(ranks) for name, ranks in document.items()}
