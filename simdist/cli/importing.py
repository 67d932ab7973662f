"""`simdist import`."""

from collections.abc import Sequence
from pathlib import Path

import click
from pydantic import ValidationError

from simdist.cli import common
from simdist.errors import ScenarioError, TraceError
from simdist.profiles import (
    ImportOptions,
    SlowedJob,
    find_traces,
    import_job,
    profile_all,
    readable,
    what_slowed,
    write_scenario,
)
from simdist.profiles.answer import import_document, import_text, slowed_answer, summary_document, summary_text
from simdist.profiles.estimates.links import Fabric
from simdist.profiles.job.job import grouped
from simdist.profiles.job.kind import find_kind
from simdist.profiles.job.layout import UnknownLayoutError
from simdist.profiles.job.step_budget import step_budget
from simdist.profiles.steps.model import RankProfile
from simdist.profiles.steps.step_parts import StepPart
from simdist.profiles.summaries import is_summary, read_summary
from simdist.profiles.writing import check_free
from simdist.scenario import Link, Tensor, load_workload
from simdist.scenario.by_name import find_file, read_cluster
from simdist.settings.units import parse_Bps, parse_seconds


@click.command("import")
@click.argument("traces", type=common.file_name, nargs=-1, required=True)
@click.option(
    "-o", "--output", type=common.path_type, metavar="SCENARIO", required=True, help="The .yaml file to write."
)
@click.option("--nodes", type=common.positive, metavar="N", help="Number of nodes.")
@click.option("--gpus-per-node", type=common.positive, metavar="N", help="Ranks per node.")
@click.option(
    "--cluster",
    type=common.file_name,
    metavar="FILE|PRESET",
    help="Take the links from this cluster, not from the traces.",
)
@click.option(
    "--fabric",
    type=common.file_name,
    metavar="LINK|FILE|PRESET",
    help="Links inside nodes, e.g. '3 us, 240 GB/s'.",
)
@click.option(
    "--tensors", type=common.file_name, metavar="FILE|PRESET", help="The model's tensors, if the traces have no shapes."
)
@click.option(
    "--shard",
    type=common.positive,
    metavar="N",
    help="Ranks that share a copy of a sharded model, if the traces do not tell.",
)
@click.option("--steps", metavar="A:B", callback=common.slice_of_steps, help="Only the profiler's steps A to B - 1.")
@click.option(
    "--workers", type=common.positive, metavar="N", help="Processes that read traces; one per core if omitted."
)
@click.option("--force", is_flag=True, help="Replace existing files.")
@common.options
def command(  # noqa: PLR0913 (one for each option)
    session: common.CliSession,
    traces: tuple[str, ...],
    *,
    output: Path,
    nodes: int | None,
    gpus_per_node: int | None,
    cluster: str | None,
    fabric: str | None,
    tensors: str | None,
    shard: int | None,
    steps: range | None,
    workers: int | None,
    force: bool,
) -> None:
    """Turn a profiled job into a scenario.

    TRACES are the files that the PyTorch profiler wrote of a job with DistributedDataParallel or fully_shard, one of
    each rank, plain or compressed, or folders with them. Says what slowed the job, and writes the job as a SCENARIO:
    its computation, its links, and what held up which rank in which step.
    """
    summaries = [Path(each) for each in traces if is_summary(Path(each))]
    if summaries:
        raise _without_traces(session, summaries[0])
    check_free(output, force=force)
    options = ImportOptions(
        nodes,
        gpus_per_node,
        cluster=read_cluster(cluster) if cluster else None,
        fabric=_fabric(fabric) if fabric else None,
        tensors=_tensors(tensors) if tensors else (),
        steps=steps,
        shard=shard,
    )
    profiles, left_out = readable(_outcomes(session, traces, workers))
    try:
        with session.bar() as bar:
            bar.update("analyse the traces, and simulate what they show", 0, None)
            imported = import_job(profiles, name=output.stem, options=options, left_out=left_out)
    except (TraceError, UnknownLayoutError) as error:
        session.remark("", left_out)
        raise _without_scenario(session, profiles, options, error) from None
    for remark in imported.remarks:
        session.say(f"{'warning' if remark.is_doubt else 'note'}: {remark}")
    written = write_scenario(imported, output, force=force)
    for path in written:
        session.wrote(path)
    session.result(import_document(imported, written), import_text(imported))


def _without_traces(session: common.CliSession, path: Path) -> TraceError:
    """Tell what a summary of collectives shows; return the error that no scenario can be made of it."""
    summary = read_summary(path)
    session.result(summary_document(summary), summary_text(summary))
    return TraceError(
        f"{path}: has no times of computing: give the traces that it was made of for a scenario; no scenario is written"
    )


def _without_scenario(
    session: common.CliSession,
    profiles: Sequence[RankProfile],
    options: ImportOptions,
    error: TraceError | UnknownLayoutError,
) -> TraceError | UnknownLayoutError:
    """Tell what slowed the job of which no scenario can be made, if the traces are of one job; return the error."""
    with_steps = [each for each in profiles if each.steps]
    if len({each.rank for each in with_steps}) < len(with_steps) or not with_steps:
        return error
    slowed = _what_slowed(profiles, options)
    budget = slowed.budget if slowed else step_budget(with_steps)
    kind = slowed.kind if slowed else find_kind(with_steps, waiting_s=float(budget.of_all_s[StepPart.QUEUED]))
    may_differ = kind.is_modelled and len(profiles) > 1 and isinstance(error, TraceError)
    met = slowed is not None and any(step.calls for each in slowed.job.profiles for step in each.steps)
    if may_differ and not met:
        return error
    for note in grouped([(each.rank, note) for each in with_steps for note in each.notes]):
        session.say(f"note: {note}")
    record, text = slowed_answer(budget, kind, slowed)
    session.result(record, text)
    differ = f"; with {' and '.join(kind.names)} ranks may differ" if kind.names and profiles[1:] and not slowed else ""
    return type(error)(f"{error}{differ}; no scenario is written")


def _what_slowed(profiles: Sequence[RankProfile], options: ImportOptions) -> SlowedJob | None:
    """Return what slowed the job; None if the traces do not tell, or are of different jobs."""
    try:
        return what_slowed(profiles, options)
    except (TraceError, ScenarioError):
        return None


def _outcomes(
    session: common.CliSession, traces: Sequence[str], n_workers: int | None
) -> list[RankProfile | TraceError]:
    """Read all traces."""
    paths = find_traces(traces)
    with session.bar() as bar:

        def progress(done: int, total: int) -> None:
            bar.update(f"{done} of {total} traces", done, total)

        return profile_all(paths, n_workers=n_workers, progress=progress)


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
    """Read the tensors of a workload: a file, or a preset."""
    return load_workload(find_file("workloads", name, option="--tensors")).tensors
