"""The files of an imported job: its scenario, the recorded delays beside it, and a workload of many tensors."""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile

from simdist.errors import RunError, ScenarioError
from simdist.profiles.importing import Imported
from simdist.profiles.scenario_text import Names, has_own_workload, scenario_text
from simdist.runs.run_directory import replacing
from simdist.scenario import load
from simdist.scenario.loading import dump_workload
from simdist.traces.trace import write_npz


def check_free(path: Path, *, force: bool) -> None:
    """Refuse to replace files, before the work is done.

    Raises:
        ScenarioError: One is there, and `force` is not set; there is no such folder; the name is not that of a YAML
            file.
        RunError: Nothing can be written there.
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
    try:
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritten(path, error) from None


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
        with ExitStack() as files:  # nothing is replaced before everything is written
            if imported.delays:
                arrays = {str(channel): seconds for channel, seconds in imported.delays.items()}
                write_npz(files.enter_context(replacing(delays)), arrays)
                written.append(delays)
            if has_own_workload(imported):
                text = dump_workload(imported.scenario.workload)
                files.enter_context(replacing(workload)).write_text(text, encoding="utf-8")
                written.append(workload)
            text = scenario_text(imported, Names(delays.name, workload.name))
            files.enter_context(replacing(path)).write_text(text, encoding="utf-8")
        for stale in {delays, workload} - set(written):
            stale.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritten(path, error) from None
    load(path)  # what is written is also what can be read
    return [*written, path]


def _unwritten(path: Path, error: OSError) -> RunError:
    return RunError(f"{path}: cannot be written: {error.strerror or error}")


def _beside(path: Path) -> tuple[Path, Path]:
    return path.with_suffix(".delays.npz"), path.with_suffix(".workload.yaml")
