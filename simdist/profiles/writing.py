"""The files of an imported job: its scenario, the recorded delays beside it, and a workload of many tensors."""

from pathlib import Path

from simdist.errors import RunError, ScenarioError
from simdist.profiles.importing import Imported
from simdist.profiles.scenario_text import Names, has_own_workload, scenario_text
from simdist.rundir import replacing
from simdist.scenario import load
from simdist.scenario.files import dump_workload
from simdist.trace import write_npz

__all__ = ["check_free", "write_scenario"]


def check_free(path: Path, *, force: bool) -> None:
    """Refuse to replace files, before the work is done.

    Raises:
        ScenarioError: One is there, and `force` is not set; there is no such folder; the name is not that of a YAML
            file.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ScenarioError(f"{path}: a scenario is a .yaml file: write e.g. -o {path.stem or 'job'}.yaml")
    if not path.parent.is_dir():
        raise ScenarioError(f"{path}: there is no directory {path.parent}: make it first")
    for each in (path, *_beside(path)):
        if each.is_dir():
            raise ScenarioError(f"{each}: is a directory: choose another name with -o")
        if each.exists() and not force:
            raise ScenarioError(f"{each}: is there already: choose another name with -o, or --force replaces it")


def write_scenario(imported: Imported, path: Path, *, force: bool = False) -> list[Path]:
    """Write the files, and return which.

    Raises:
        ScenarioError: One is there already, and `force` is not set.
        RunError: One cannot be written.
    """
    check_free(path, force=force)
    delays, workload = _beside(path)
    written = []
    try:
        if imported.delays:
            with replacing(delays) as part:
                write_npz(part, {str(channel): seconds for channel, seconds in imported.delays.items()})
            written.append(delays)
        if has_own_workload(imported):
            _write_text(workload, dump_workload(imported.scenario.workload))
            written.append(workload)
        _write_text(path, scenario_text(imported, Names(delays.name, workload.name)))
        for stale in {delays, workload} - set(written):
            stale.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None
    load(path)  # what is written is also what can be read
    return [*written, path]


def _beside(path: Path) -> tuple[Path, Path]:
    return path.with_suffix(".delays.npz"), path.with_suffix(".workload.yaml")


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")
