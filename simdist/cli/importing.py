"""`simdist import`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from simdist.cli.importing_text import document, text
from simdist.cli.links import read_cluster
from simdist.cli.session import Session
from simdist.errors import ScenarioError, TraceError
from simdist.profiles.estimates.links import Fabric
from simdist.profiles.importing import ImportOptions, import_job
from simdist.profiles.steps.model import RankProfile
from simdist.profiles.steps.ranks import profile_rank
from simdist.profiles.trace_files import find_traces, profile_all
from simdist.profiles.writing import check_free, write_scenario
from simdist.progress import ProgressBar
from simdist.scenario import Link, Tensor, Workload, load_workload, presets
from simdist.settings.base import nearest
from simdist.settings.units import format_seconds, parse_Bps, parse_seconds


def import_traces(
    session: Session,
    traces: Sequence[str],
    *,
    output: Path,
    nodes: int | None,
    gpus_per_node: int | None,
    cluster: str | None,
    fabric: str | None,
    tensors: str | None,
    steps: range | None,
    n_workers: int | None,
    force: bool,
) -> None:
    """Read the traces of a job, write its scenario, and say what slowed the job."""
    check_free(output, force=force)
    options = ImportOptions(
        nodes,
        gpus_per_node,
        cluster=read_cluster(cluster) if cluster else None,
        fabric=_fabric(fabric) if fabric else None,
        tensors=_tensors(tensors) if tensors else (),
        steps=steps,
    )
    profiles = _profiles(session, traces, n_workers)
    imported = import_job(profiles, name=output.stem, options=options)
    for note in imported.notes:
        session.say(note if note.startswith("warning") else f"note: {note}")
    if imported.proof.misses:
        session.say(
            f"warning: the scenario does not reproduce the traced steps: {format_seconds(imported.proof.predicted_s)}, "
            f"{imported.proof.error:+.0%} off what was measured: {imported.proof.misses}"
        )
    written = write_scenario(imported, output, force=force)
    for path in written:
        session.wrote(path)
    session.result(document(imported, written), text(imported))


def _profiles(session: Session, traces: Sequence[str], n_workers: int | None) -> list[RankProfile]:
    """Read all traces; tell which could not be read, and go on with the others."""
    paths = find_traces(traces)
    with ProgressBar(sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.update(f"{done} of {total} traces", done, total)

        outcomes = profile_all(paths, reading=profile_rank, n_workers=n_workers, progress=progress)
    read = [each for each in outcomes if isinstance(each, RankProfile)]
    failed = [each for each in outcomes if isinstance(each, TraceError)]
    if not read:
        of_all = f"none of the {len(failed)} traces can be used; the first: " if failed[1:] else ""
        raise TraceError(f"{of_all}{failed[0]}")
    for error in failed:
        session.say(f"warning: left out: {error}")
    return read


def _fabric(text: str) -> Fabric:
    """Read the links inside nodes: latency and bandwidth, or those of a cluster."""
    latency, comma, bandwidth = text.partition(",")
    if not comma or Path(text).is_file():
        hint = "this is no link such as '3 us, 240 GB/s', and "
        return Fabric(read_cluster(text, option="--fabric", hint=hint).fabric, f"--fabric {text}")
    try:
        link = Link(latency_s=parse_seconds(latency.strip()), bandwidth_Bps=parse_Bps(bandwidth.strip()))
    except ValueError as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ScenarioError(f"--fabric '{text}': {why}; a link is e.g. '3 us, 240 GB/s'") from None
    return Fabric(link, f"--fabric {text}")


def _tensors(name: str) -> tuple[Tensor, ...]:
    """Read the tensors of a workload: a file, a CSV of tensors, or a preset."""
    path = Path(name)
    if path.suffix == ".csv" and path.is_file():
        try:
            plain = {"tensors_file": str(path.absolute()), "batch_size": 1, "forward_s": 0.0}
            return Workload.model_validate(plain).tensors
        except ValidationError as error:
            raise ScenarioError(f"--tensors: {error.errors()[0]['msg']}") from None
    if path.is_file():
        return load_workload(path).tensors
    known = presets.names("workloads")
    if name not in known:
        raise ScenarioError(f"--tensors {name}: there is no such file, nor a preset: {nearest(name, known)}")
    return load_workload(presets.path("workloads", name)).tensors
