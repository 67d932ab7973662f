"""The folder that an export goes into: `PREFIX.<rank>.et` for every rank, and `PREFIX.json` with the process groups."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from simdist.chakra.export import Export
from simdist.chakra.files import write_trace
from simdist.errors import PlanError, RunError
from simdist.runs.run_directory import replacing
from simdist.settings.units import format_nbytes

MAX_NBYTES = 2 * 10**9
"""An export that would be larger is refused unless it is asked for: without loops, every step is written out."""


def refuse_size(export: Export) -> None:
    """Refuse an export that would be larger than `MAX_NBYTES`.

    Raises:
        PlanError: It would; says how large, and how many steps fit.
    """
    if export.nbytes <= MAX_NBYTES:
        return
    fitting = int(export.n_steps * MAX_NBYTES / export.nbytes)
    raise PlanError(
        f"plan {export.plan.name}: {export.n_steps:,} steps of {export.plan.world_size:,} ranks would take about "
        f"{format_nbytes(export.nbytes)}, for traces have no loops; "
        + (f"--steps {fitting} takes {format_nbytes(MAX_NBYTES)}" if fitting else "a step is too large already")
        + "; --force writes all"
    )


def write(
    export: Export, folder: Path, prefix: str, *, force: bool, progress: Callable[[int], None] | None = None
) -> int:
    """Write the traces of all ranks and the process groups; return the bytes that they take.

    Args:
        export: What they tell.
        folder: Made if it is not there.
        prefix: Of the names of the files.
        force: Replace those that are there.
        progress: Called with the number of ranks that are done.

    Raises:
        PlanError: There are such traces already.
        RunError: They cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder, prefix, force=force)
        nbytes = 0
        for rank in range(export.plan.world_size):
            with replacing(folder / f"{prefix}.{rank}.et") as part, part.open("wb") as file:
                nbytes += write_trace(file, export.metadata(rank), export.nodes(rank))
            if progress:
                progress(rank + 1)
        with replacing(folder / f"{prefix}.json") as part:
            part.write_text(json.dumps(export.groups.document()) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{error.filename or folder}: cannot be written: {error.strerror or error}") from None
    return nbytes


def _clear(folder: Path, prefix: str, *, force: bool) -> None:
    """Remove the traces of another export: those of more ranks would be taken for ranks of this one."""
    pattern = re.compile(re.escape(prefix) + r"\.(\d+\.et(\.gz)?|json)")
    there = sorted(file for file in folder.iterdir() if pattern.fullmatch(file.name))
    if there and not force:
        raise PlanError(
            f"{there[0]}: is there already, with {len(there) - 1} more; choose another folder with -o, or replace them "
            f"with --force"
        )
    for file in there:
        file.unlink()
