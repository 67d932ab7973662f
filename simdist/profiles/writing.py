"""The files of an imported job: its scenario, the recorded delays beside it, and a workload of many tensors.

The scenario is YAML that people read and change, with comments on where numbers are from.
"""

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from decimal import Decimal
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from simdist.errors import ScenarioError, naming_file
from simdist.files import replacing
from simdist.profiles.importing import ImportedJob
from simdist.profiles.steps.model import listed
from simdist.scenario import Cluster, Link, load, strict_yaml
from simdist.scenario.loading import dump_workload
from simdist.schedules import Schedule
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
    with naming_file(path), TemporaryFile(dir=path.parent):
        pass


def write_scenario(imported: ImportedJob, path: Path, *, force: bool = False) -> list[Path]:
    """Write the files, and return which.

    Raises:
        ScenarioError: One is there already, and `force` is not set.
        RunError: One cannot be written.
    """
    check_free(path, force=force)
    delays, workload = _beside(path)
    written = []
    with naming_file(path), ExitStack() as files:  # nothing is replaced before everything is written
        if imported.delays:
            arrays = {str(channel): seconds for channel, seconds in imported.delays.items()}
            write_npz(files.enter_context(replacing(delays)), arrays)
            written.append(delays)
        if has_own_workload(imported):
            text = dump_workload(imported.scenario.workload)
            files.enter_context(replacing(workload)).write_text(text, encoding="utf-8")
            written.append(workload)
        text = scenario_text(imported, delays=delays.name, workload=workload.name)
        files.enter_context(replacing(path)).write_text(text, encoding="utf-8")
    with naming_file(path):
        for stale in {delays, workload} - set(written):
            stale.unlink(missing_ok=True)
    load(path)  # what is written is also what can be read
    return [*written, path]


def _beside(path: Path) -> tuple[Path, Path]:
    return path.with_suffix(".delays.npz"), path.with_suffix(".workload.yaml")


_MANY_TENSORS = 16  # more stand in a file of their own
_TOLD = 10  # stragglers, the largest
_WIDTH = 118


def has_own_workload(imported: ImportedJob) -> bool:
    """Tell whether the workload stands in a file of its own."""
    return len(imported.model.tensors) > _MANY_TENSORS


def scenario_text(imported: ImportedJob, *, delays: str, workload: str) -> str:
    """Return the YAML of the scenario.

    Args:
        imported: The job.
        delays: Name of the file of recorded delays beside it.
        workload: Name of the file of the workload, if that has many tensors.
    """
    rest = _workload(imported, workload), _behaviour(imported, delays)
    return "".join(f"{line}\n" for line in chain(_head(imported), _cluster(imported), *rest))


def _head(imported: ImportedJob) -> Iterator[str]:
    job, proof = imported.job, imported.proof
    yield from _comment(
        f"Imported from profiler traces of {len(job.ranks)} of {job.world_size} ranks, "
        f"steps {listed(job.numbers)}. Measured {_ms(proof.measured_s)} a step; reproduced by this scenario's sync "
        f"with the delays as they happened: {_ms(proof.predicted_s)} ({proof.error_text})."
    )
    if proof.misses:
        yield from _comment(f"The scenario does not reproduce the traced steps: {proof.misses}.")
    yield from _comment(f"Where a step goes: {imported.budget.verdict}.")
    for note in imported.notes:
        yield from _comment(f"* {note}")
    yield f"name: {strict_yaml.dump_line(imported.scenario.name)}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="#   " if text[:1] == "*" else "# ")


def _cluster(imported: ImportedJob) -> Iterator[str]:
    cluster, layout = imported.scenario.cluster, imported.layout
    plain = Cluster(nodes=1, gpus_per_node=1, fabric=Link.ideal(), network=Link.ideal()).model_dump(mode="json")
    yield "cluster:"
    yield f"  nodes: {layout.nodes}  # {layout.source}"
    yield f"  gpus_per_node: {layout.gpus_per_node}"
    yield from _link(imported, "fabric", cluster.fabric)
    yield from _link(imported, "network", cluster.network)
    for key, value in _changed(cluster.model_dump(mode="json"), plain).items():
        match key:
            case "nodes" | "gpus_per_node" | "fabric" | "network":
                pass
            case "storage" if cluster.storage:
                yield f"  # {cluster.storage.source}: what loading a batch takes"
                yield f"  storage: {{latency: {_time(cluster.storage.latency_s)}, bandwidth: unlimited}}"
            case "slow_devices":
                yield "  slow_devices:  # ranks whose computing takes longer in every step"
                for each in value:
                    yield f"    - {strict_yaml.dump_line({name: it for name, it in each.items() if it is not None})}"
            case _:
                written = _changed(value, plain[key]) if key == "device" else value
                yield f"  {key}: {strict_yaml.dump_line(written)}"


def _changed(written: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in written.items() if value != plain.get(key)}


def _link(imported: ImportedJob, key: str, link: Link) -> Iterator[str]:
    layout, links = imported.layout, imported.links
    if links is None:
        source = "as given"
    elif key == "fabric" and links.fabric_source:
        source = f"not measured: {links.fabric_source}"
    elif key in links.measured:
        bound = "" if all(each.is_complete for each in imported.times) else " for traced ranks: an upper bound"
        source = f"from the time that all_reduces took, without waiting{bound}"
    elif layout.nodes > 1 and layout.gpus_per_node > 1:
        source = "not measured"
    else:
        source = "not used: there is one " + ("node" if key == "network" else "GPU per node")
    if link.table is None:
        yield f"  # {key}: {source}"
        yield f"  {key}: {strict_yaml.dump_line(link.model_dump(mode='json'))}"
        return
    comment = f"{key}: {source}; bytes from one rank to the next, and what they take"
    yield from ("  " + line for line in _comment(comment))
    yield f"  {key}:"
    yield "    table:"
    for point in link.table:
        yield f"      - {{size: {point.nbytes} B, time: {_time(point.time_s)}}}"


def _workload(imported: ImportedJob, file: str) -> Iterator[str]:
    workload, base = imported.scenario.workload, imported.base
    yield "workload:"
    if has_own_workload(imported):
        yield f"  file: {strict_yaml.dump_line(file)}  # {len(workload.tensors)} tensors"
        yield f"  # forward {_ms(workload.forward_s or 0.0)}, backward {_ms(sum(base.buckets_s))}"
        return
    of_passes, each = workload.micro_batches, "step" if workload.micro_batches == 1 else "pass"
    inside = [f"{_ms(base.host_s / of_passes)} of the host"] * (base.host_s > 0)
    inside += [f"{_ms(base.input_s / of_passes)} of input"] * (base.input_s > 0 and not imported.host.loads)
    yield f"  name: {strict_yaml.dump_line(workload.name)}"
    yield "  tensors:  # in forward order; backward: seconds until the gradient is ready, from the one before"
    for tensor in workload.tensors:
        flops = {"flops": tensor.flops} if tensor.flops else {}
        stated = {"name": tensor.name, "count": tensor.count, **flops, "backward": _time(tensor.backward_s or 0.0)}
        yield f"    - {strict_yaml.dump_line(stated)}"
    yield f"  dtype: {workload.dtype}"
    yield f"  batch_size: {workload.batch_size}"
    if workload.micro_batches > 1:
        yield f"  micro_batches: {workload.micro_batches}  # passes of a step; forward and backward are of one"
    if workload.sample_nbytes:
        yield f"  sample_size: {workload.sample_nbytes} B  # the latency of the storage is all that loading takes"
    comment = f"  # with {' and '.join(inside)}, which every {each} has" if inside else ""
    yield f"  forward: {_time(workload.forward_s or 0.0)}{comment}"
    yield f"  optimize: {_time(workload.optimize_s or 0.0)}"


def _behaviour(imported: ImportedJob, file: str) -> Iterator[str]:
    scenario, stragglers = imported.scenario, imported.stragglers
    first = imported.job.numbers[0]
    counted = f"; step 0 is step {first} of the profiler" if first else ""
    yield f"steps: {scenario.steps}  # as many as were traced{counted}"
    ahead = "null" if scenario.host.run_ahead_steps is None else str(scenario.host.run_ahead_steps)
    waits = ", waits_for: update" if scenario.host.waits_for == "update" else ""
    yield f"host: {{run_ahead_steps: {ahead}{waits}}}"
    if imported.host.loads:
        ahead = "processes of the loader are a batch ahead" if imported.host.ahead_s else "loaded when the step asks"
        yield f"input: {{source: storage, prefetch: {scenario.input.prefetch}}}  # {ahead}"
    if imported.delays:
        yield "disturbances:  # what steps took beyond an undisturbed one, by step and rank"
        late = ((each, each.when(scenario.steps)) for each in stragglers[:_TOLD])
        told = [f"{each.who}, {when}, {each.channel}: +{_ms(each.seconds)}" for each, when in late]
        told += [f"and {len(stragglers) - _TOLD} more"] * (len(stragglers) > _TOLD)
        yield from ("  " + line for each in told for line in _comment(each))
        for channel in imported.delays:
            yield f"  - {{kind: recorded, on: {channel}, file: {strict_yaml.dump_line(file)}}}"
        yield "  # played as they happened; add resample_steps: N to draw other blocks of N steps for every seed"
    yield "schedules:"
    for schedule in scenario.schedules:
        yield f"  - {_schedule_line(schedule)}"
    if facts := scenario.imported:
        yield "imported:  # facts of the traced job"
        yield f"  step: {_time(facts.step_s)}"
        yield f"  error: {facts.error}  # share of it by which the step that this scenario reproduces is longer"
        if facts.beside_s:
            yield f"  beside: {_time(facts.beside_s)}  # operators on CPUs beside collectives"
        yield f"  profiler: {_time(facts.profiler_s)}  # at most, of a host that is never idle"
        for key, text in (("left_out", facts.left_out), ("unsure", facts.unsure), ("verdict", facts.verdict)):
            if text:
                yield f"  {key}: >-"
                yield from textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
        yield "  parts:  # where the step went, mean over ranks"
        yield from (f"    {part}: {_time(seconds)}" for part, seconds in facts.parts.items())
    if scenario.doubts:
        yield "doubts:  # repeated by every command that reads this"
        for caveat in scenario.doubts:
            yield "  - >-"
            yield from textwrap.wrap(caveat, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def _schedule_line(schedule: Schedule) -> str:
    kind = schedule.model_dump(mode="json", include={"kind"})
    written = kind | schedule.model_dump(mode="json", exclude_unset=True)
    if "levels" in written:
        written["levels"] = {int(period): size for period, size in written["levels"].items()}
    return strict_yaml.dump_line(written)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _time(seconds: float) -> str:
    """Write a time exactly, in the unit of its size.

    >>> _time(0.0123), _time(4.2e-06), _time(3.0)
    ('12.3 ms', '4.2 us', '3 s')
    """
    unit, power = next(((unit, power) for unit, power in (("s", 0), ("ms", 3)) if seconds >= 10.0**-power), ("us", 6))
    return f"{(Decimal(repr(seconds)) * 10**power).normalize():f} {unit}"
