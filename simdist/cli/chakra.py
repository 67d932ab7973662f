"""`simdist chakra export` and `simdist chakra import`."""

import math
from pathlib import Path
from typing import Any

import click

from simdist.chakra.export import Export, cautions, refuse_size, write
from simdist.chakra.files import find_traces
from simdist.chakra.importing import ChakraJob, fit_cluster, import_traces, scenario_of, scenario_text
from simdist.cli import common, inputs
from simdist.errors import ScenarioError
from simdist.scenario import Recorded, Scenario
from simdist.settings.units import format_nbytes, format_seconds


@click.group("chakra")
def command() -> None:
    """Exchange plans and workloads as Chakra execution traces."""


@command.command("export")
@common.scenario_or_run
@click.option("-o", "--output", type=common.path, metavar="FOLDER", required=True, help="Write LABEL.<rank>.et there.")
@common.schedule
@click.option("--steps", "n_steps", type=click.IntRange(min=1), metavar="N", help="Only the first N steps.")
@click.option("--force", is_flag=True, help="Replace traces that are there; write more than is usual.")
@common.options
def _export(
    session: common.Session, name: str, *, output: Path, schedule: str | None, n_steps: int | None, force: bool
) -> None:
    """Write a plan as one execution trace per rank, all its steps unrolled."""
    documents = []
    texts = []
    told: Scenario | None = None
    with session.bar() as bar:
        for planned in inputs.planned(session, name, schedule):
            if planned.scenario is not told:
                _tell_draw(session, planned.scenario)
            told = planned.scenario
            label = planned.schedule.name
            plan = planned.plan
            n_taken = _n_steps(name, n_steps, plan.n_steps)
            export = Export(plan, planned.costs, planned.scenario.workload, planned.drawn_delays(), n_taken)
            if not force:
                refuse_size(export)
            for caution in cautions(plan):
                session.say(f"warning: {label}: {caution}")

            def progress(n_ranks: int, label: str = label, world_size: int = plan.world_size) -> None:
                bar.update(f"write {label}", n_ranks, world_size)

            nbytes = write(export, output, label, force=force, progress=progress)
            session.saved.append(str(output / f"{label}.*.et"))
            documents.append(_export_document(label, export, output, nbytes))
            count = f"{plan.world_size:,} ranks, {n_taken:,} steps, {format_nbytes(nbytes)}"
            texts.append(f"{label}: {count}: {output / label}.<rank>.et, process groups in {output / label}.json")
    session.result({"exports": documents}, "\n".join(texts))


def _export_document(label: str, export: Export, folder: Path, nbytes: int) -> dict[str, object]:
    """Return an export as JSON.

    Columns:
        schedule (str): Label.
        digest (str): Digest of the plan.
        world_size (int): Ranks, and files.
        steps (int): Steps written.
        traces (str): Pattern of the files.
        groups (str): File with the ranks of each process group.
        size (int): Bytes of all traces.
        cautions (list): What consumers of the traces do not see, a text each.
    """
    return {
        "schedule": label,
        "digest": export.plan.digest(),
        "world_size": export.plan.world_size,
        "steps": export.n_steps,
        "traces": str(folder / f"{label}.*.et"),
        "groups": str(folder / f"{label}.json"),
        "size": nbytes,
        "cautions": cautions(export.plan),
    }


def _tell_draw(session: common.Session, scenario: Scenario) -> None:
    """Say so if delays were recorded, but are not written as they were."""
    recorded = (each for each in scenario.disturbances if isinstance(each, Recorded))
    block_steps = next((each.resample_steps for each in recorded if each.resample_steps), None)
    if block_steps is not None:
        session.say(
            f"note: {scenario.name}: recorded delays are written as seed {scenario.seed} draws them, in blocks of "
            f"{block_steps:,} steps; without resample_steps they are written as recorded"
        )


def _n_steps(name: str, asked: int | None, n_steps: int) -> int:
    if asked is not None and asked > n_steps:
        raise ScenarioError(f"{name}: --steps {asked:,} are more than its {n_steps:,} steps")
    return n_steps if asked is None else asked


@command.command("import")
@click.argument("traces", metavar="FOLDER|PREFIX|FILE...", type=common.path, nargs=-1, required=True)
@click.option("-o", "--output", type=common.path, metavar="SCENARIO", required=True, help="The .yaml file to write.")
@click.option(
    "--cluster",
    type=common.file_name,
    metavar="FILE|PRESET",
    required=True,
    help="The machines, which traces do not describe.",
)
@click.option("--steps", "n_steps", type=click.IntRange(min=1), metavar="N", help="Number of steps in the traces.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@common.options
def _import(
    session: common.Session, traces: tuple[Path, ...], *, output: Path, cluster: str, n_steps: int | None, force: bool
) -> None:
    """Turn execution traces of a data-parallel job into a scenario."""
    if output.exists() and not force:
        raise ScenarioError(f"{output}: is there already: write another with -o, or replace it with --force")
    paths = find_traces(traces)
    with session.bar() as bar:
        imported = import_traces(paths, n_steps=n_steps, progress=lambda n: bar.update("read traces", n, len(paths)))
    fitted = fit_cluster(inputs.read_cluster(cluster), imported.world_size, name=cluster)
    inputs.save_text(output, scenario_text(scenario_of(imported, fitted, name=output.stem), imported))
    session.wrote(output)
    for note in imported.notes:
        session.say(f"note: {note}")
    document = _imported_document(imported, output)
    session.result(document, _imported_text(document, imported))


def _imported_document(imported: ChakraJob, output: Path) -> dict[str, Any]:
    """Return imported traces as JSON.

    Columns:
        scenario (str): File written.
        traces (int): Files read.
        world_size (int): Ranks of the job.
        steps (int): Steps.
        forward_s (float): Time of a step, median over ranks and steps.
        backward_s, optimize_s (float): Time of a step.
        buckets (list): "A bucket of imported traces", in the order of the all-reduces.
        notes (list): What the traces do not show, and what was left out, a text each.

    Columns of buckets:
        tensor (str): Name of its tensor.
        count (int): Elements.
        backward_s (float): Backward pass from the previous bucket to this one, median.
    """
    workload = imported.workload
    return {
        "scenario": str(output),
        **common.picked(imported, "world_size", "notes", traces="n_traces", steps="n_steps"),
        **common.picked(workload, "forward_s", "optimize_s"),
        "backward_s": math.fsum(tensor.backward_s or 0.0 for tensor in workload.tensors),
        "buckets": [common.picked(each, "count", "backward_s", tensor="name") for each in reversed(workload.tensors)],
    }


def _imported_text(document: dict[str, Any], imported: ChakraJob) -> str:
    times = (("forward", "forward_s"), ("backward", "backward_s"), ("optimizer", "optimize_s"))
    output = document["scenario"]
    return (
        f"{output}: {imported.world_size:,} ranks, {imported.n_steps:,} steps, {len(document['buckets'])} gradient "
        f"buckets of {format_nbytes(imported.workload.nbytes)}; "
        + ", ".join(f"{name} {format_seconds(document[key] or 0.0)}" for name, key in times)
        + f"\nsimdist compare {output} simulates it; add schedules to compare with"
    )
