"""The files of an imported job: its scenario, the recorded delays, and a workload of many tensors.

The scenario is YAML for people to read and change. Comments state the sources of its numbers.
"""

import textwrap
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from simdist.errors import ScenarioError, naming_file
from simdist.files import replacing
from simdist.profiles.estimates.sharded_model import ShardedModel
from simdist.profiles.importing import ImportedJob
from simdist.profiles.job.sharding import described
from simdist.scenario import Link, load, strict_yaml
from simdist.scenario.loading import dump_workload
from simdist.schedules import Schedule
from simdist.settings.base import Settings, listed
from simdist.traces.trace import write_npz


def check_free(path: Path, *, force: bool) -> None:
    """Refuse to replace existing files, before the work is done.

    Raises:
        ScenarioError: A file exists and `force` is not set, the folder does not exist, or the file is not YAML.
        RunError: The folder is not writable.
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
    with naming_file(path), TemporaryFile(dir=path.parent):
        pass


def write_scenario(imported: ImportedJob, path: Path, *, force: bool = False) -> list[Path]:
    """Write the files, and return their paths.

    Raises:
        ScenarioError: A file exists already, and `force` is not set.
        RunError: A file cannot be written.
    """
    check_free(path, force=force)
    delays, workload = _beside(path)
    written = []
    with naming_file(path), ExitStack() as files:  # no file is replaced before all are written
        if imported.delays:
            arrays = {str(channel): seconds for channel, seconds in imported.delays.items()}
            write_npz(files.enter_context(replacing(delays)), arrays)
            written.append(delays)
        if _has_own_workload(imported):
            text = dump_workload(imported.scenario.workload)
            files.enter_context(replacing(workload)).write_text(text, encoding="utf-8")
            written.append(workload)
        text = scenario_text(imported, delays=delays.name, workload=workload.name)
        files.enter_context(replacing(path)).write_text(text, encoding="utf-8")
    with naming_file(path):
        for stale in {delays, workload} - set(written):
            stale.unlink(missing_ok=True)
    load(path)  # checks that the written file can be read
    return [*written, path]


def _beside(path: Path) -> tuple[Path, Path]:
    return path.with_suffix(".delays.npz"), path.with_suffix(".workload.yaml")


_MANY_TENSORS = 16  # more are written to a separate file
_TOLD = 10  # number of stragglers listed, the largest first
_WIDTH = 118


def _has_own_workload(imported: ImportedJob) -> bool:
    """Tell whether the workload has a file of its own."""
    return len(imported.model.tensors) > _MANY_TENSORS


def scenario_text(imported: ImportedJob, *, delays: str, workload: str) -> str:
    """Return the YAML of the scenario.

    Args:
        imported: The job.
        delays: Name of the file of recorded delays beside it.
        workload: Name of the file of the workload, if that has many tensors.
    """
    scenario = imported.scenario
    document = _changed(scenario)
    if _has_own_workload(imported):
        document["workload"] = {"file": workload}
    document["disturbances"] = [{"kind": "recorded", "on": channel, "file": delays} for channel in imported.delays]
    document["schedules"] = [_schedule(each) for each in scenario.schedules]
    comments = _comments(imported)
    lines = [*_wrapped(_head(imported))]
    for line in strict_yaml.dump({key: value for key, value in document.items() if value}).splitlines():
        lines += [*_wrapped(comments.get(line.partition(":")[0], ())), line]
    return "".join(f"{line}\n" for line in lines)


def _changed(settings: Settings) -> dict[str, Any]:
    """Return settings that differ from their defaults, in the form of files."""
    changed = {}
    written = settings.model_dump(mode="json")
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        key = field.alias or name
        if value == field.get_default() or key not in written:
            continue
        changed[key] = written[key]
        if isinstance(value, Settings) and not isinstance(value, Link):
            changed[key] = _changed(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Settings):
            changed[key] = list(map(_changed, value))
    return changed


def _head(imported: ImportedJob) -> Iterator[str]:
    job = imported.job
    proof = imported.proof
    yield (
        f"Imported from profiler traces of {len(job.ranks)} of {job.world_size} ranks, "
        f"steps {listed(job.numbers)}. Measured {_ms(proof.measured_s)} a step; reproduced by this scenario's "
        f"{imported.scenario.schedules[0].name} with the delays as they happened: {_ms(proof.predicted_s)} "
        f"({proof.error_text})."
    )
    if proof.misses:
        yield f"The scenario does not reproduce the traced steps: {proof.misses}."
    yield f"Where a step goes: {imported.budget.verdict}."
    yield from (f"* {note}" for note in imported.notes)


def _wrapped(comments: Iterable[str]) -> Iterator[str]:
    for text in comments:
        more = "#   " if text[:1] == "*" else "# "
        yield from textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent=more)


def _comments(imported: ImportedJob) -> dict[str, list[str]]:
    """Return the comment before each key of the scenario, with the sources of its numbers."""
    scenario = imported.scenario
    base = imported.base
    late = imported.stragglers
    n_passes = scenario.workload.micro_batches
    storage = scenario.cluster.storage
    loaded = [f"storage: {storage.source}: what loading a batch takes"] if storage else []
    inside = []
    if base.host_s > 0:
        inside.append(f"{_ms(base.host_s / n_passes)} of the host")
    if base.input_s > 0 and not imported.host.loads:
        inside.append(f"{_ms(base.input_s / n_passes)} of input")
    first = imported.job.numbers[0]
    each = "step" if n_passes == 1 else "pass"
    where = "step and rank" if n_passes == 1 else "step, micro-batch and rank"
    forward = [f"forward: with {' and '.join(inside)}, which every {each} has"] if inside else []
    told = ((one, one.when(scenario.steps)) for one in late[:_TOLD])
    delays = [f"{one.who}, {when}, {one.channel}: +{_ms(one.seconds)}" for one, when in told]
    if len(late) > _TOLD:
        delays.append(f"and {len(late) - _TOLD} more")
    return {
        "cluster": [
            f"nodes: {imported.layout.source}",
            f"fabric: {_source(imported, 'fabric')}",
            f"network: {_source(imported, 'network')}",
            *loaded,
        ],
        "workload": [*_of_tensors(imported), *forward],
        "steps": [f"as many as were traced; step 0 is step {first} of the profiler"],
        "disturbances": [
            f"what steps took beyond an undisturbed one, by {where}, played as it happened; add resample_steps: N to "
            f"draw other blocks of N steps for every seed",
            *delays,
        ],
        "imported": ["facts of the traced job"],
        "doubts": ["repeated by every command that reads this"],
    }


def _of_tensors(imported: ImportedJob) -> Iterator[str]:
    """State what the seconds of tensors are."""
    model = imported.model
    if not isinstance(model, ShardedModel):
        yield "backward: seconds until a gradient is ready, from the one before"
        return
    sharding = model.sharding
    what = (
        "parameters of its units, whose times are shared by elements" if model.is_real else "one tensor for each unit"
    )
    yield f"{described(sharding)}; tensors: {what}"
    yield "forward, backward: seconds of computing from when a unit is copied out, backward up to its reduce-scatter"
    yield "optimize: of the whole model, of which each rank updates a slice"
    if sharding.root is not None:
        place = "last" if sharding.root_comes_first else "first"
        yield f"what the root computes at the other end of the model counts for the {place} unit"


def _source(imported: ImportedJob, key: str) -> str:
    """State the source of a link's times."""
    layout = imported.layout
    links = imported.links
    if links is None:
        return "as given"
    if key == "fabric" and links.fabric_source:
        return f"not measured: {links.fabric_source}"
    if key in links.measured:
        bound = "" if all(each.is_complete for each in imported.times) else " for traced ranks: an upper bound"
        is_sharded = isinstance(imported.model, ShardedModel)
        what = "gathers, reduce-scatters and all_reduces" if is_sharded else "all_reduces"
        return f"from the time that {what} took, without waiting{bound}"
    if layout.nodes > 1 and layout.gpus_per_node > 1:
        return "not measured"
    return "not used: there is one " + ("node" if key == "network" else "GPU per node")


def _schedule(schedule: Schedule) -> dict[str, Any]:
    written = schedule.model_dump(mode="json", include={"kind"}) | schedule.model_dump(mode="json", exclude_unset=True)
    if "levels" in written:
        written["levels"] = {int(period): size for period, size in written["levels"].items()}
    return written


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"
