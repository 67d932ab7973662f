"""Commands from the user's own job to a decision: what they are called and take."""

from pathlib import Path
from typing import Any

import click

from simdist.cli import common
from simdist.cli.session import Session

__all__ = ["COMMANDS"]

_cluster_of_a_job = click.option(
    "--cluster", metavar="FILE|PRESET", help="Take the links from there, not from what the traces show."
)


@click.command("import")
@click.argument("traces", nargs=-1, required=True)
@click.option("-o", "--output", type=common.path, metavar="SCENARIO", required=True, help="The .yaml file to write.")
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="The ranks were on so many nodes.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), metavar="N", help="So many ranks were on each node.")
@_cluster_of_a_job
@click.option("--tensors", metavar="FILE|PRESET", help="The model's tensors, if the traces have no shapes.")
@click.option("--steps", metavar="A:B", callback=common.slice_of_steps, help="Only steps A to B - 1 of the profiler.")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Read in so many processes; one per core.")
@click.option("--force", is_flag=True, help="Replace files that are there.")
@common.options
@click.pass_obj
def _import(
    session: Session,
    traces: tuple[str, ...],
    output: Path,
    nodes: int | None,
    gpus_per_node: int | None,
    cluster: str | None,
    tensors: str | None,
    steps: range | None,
    workers: int | None,
    force: bool,
) -> None:
    """Make a scenario of a job that was profiled.

    TRACES are the files that the PyTorch profiler wrote of a DistributedDataParallel job, one of each rank, plain or
    compressed, or folders with them. Says what slowed the job, and writes the job as a SCENARIO: its computation, its
    links, and what held up which rank in which step.
    """
    from simdist.cli import importing

    importing.import_traces(
        session,
        traces,
        output=output,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cluster=cluster,
        tensors=tensors,
        steps=steps,
        n_workers=workers,
        force=force,
    )


@click.command("whatif")
@click.argument("job", metavar="RUN|SCENARIO")
@click.option("--schedule", metavar="LABEL", help="Of the schedule whose steps are looked at; sync.")
@click.option("--trace", "which", type=click.Choice(common.TRACES), help="Which trace of a RUN; real if there is one.")
@click.option("--steps", metavar="A:B", callback=common.slice_of_steps, help="Look only at steps A to B - 1.")
@click.option("--schedules", metavar="LABELS|FILE", help="Compare these, of the scenario or of another one.")
@click.option(
    "--resamples", type=click.IntRange(min=0), default=200, show_default=True, help="Runs of each schedule; 0: none."
)
@click.option("--block", type=click.IntRange(min=1), metavar="N", help="Steps of a block of a recording.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Of the first run; the scenario's.")
@common.plot
@common.options
@click.pass_obj
def _whatif(
    session: Session,
    job: str,
    schedule: str | None,
    which: Any,
    steps: range | None,
    schedules: str | None,
    resamples: int,
    block: int | None,
    seed: int | None,
    plot: Path | None,
) -> None:
    """Show what stragglers cost, who they are, and what other schedules would gain.

    The job without stragglers is a replay in which every operation takes its typical time. What is lost against it is
    shown by kind of operation, rank, node and step. Gains have intervals from runs put together anew from the delays
    that were recorded.
    """
    from simdist.cli import whatif

    wanted = whatif.Wanted(
        label=schedule,
        which=which,
        steps=steps,
        schedules=schedules,
        n_runs=resamples,
        block_steps=block,
        seed=seed,
        plot=plot,
    )
    whatif.whatif(session, job, wanted)


@click.group("chakra")
def _chakra() -> None:
    """Exchange plans and workloads as Chakra execution traces."""


@_chakra.command("export")
@click.argument("scenario", metavar="SCENARIO|RUN")
@click.option("-o", "--output", type=common.path, metavar="FOLDER", required=True, help="Write LABEL.<rank>.et there.")
@common.schedule
@click.option("--steps", "n_steps", type=click.IntRange(min=1), metavar="N", help="Only the first N steps.")
@click.option("--force", is_flag=True, help="Replace traces that are there; write more than is usual.")
@common.options
@click.pass_obj
def _chakra_export(
    session: Session, scenario: str, output: Path, schedule: str | None, n_steps: int | None, force: bool
) -> None:
    """Write a plan as one execution trace per rank, all its steps unrolled."""
    from simdist.cli import chakra

    chakra.export(session, scenario, output=output, label=schedule, n_steps=n_steps, force=force)


@_chakra.command("import")
@click.argument("traces", metavar="FOLDER|PREFIX|FILE...", type=common.path, nargs=-1, required=True)
@click.option("-o", "--output", type=common.path, metavar="SCENARIO", required=True, help="The .yaml file to write.")
@click.option("--cluster", metavar="FILE|PRESET", required=True, help="The machines; the traces do not tell them.")
@click.option("--steps", "n_steps", type=click.IntRange(min=1), metavar="N", help="The traces hold so many steps.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@common.options
@click.pass_obj
def _chakra_import(
    session: Session, traces: tuple[Path, ...], output: Path, cluster: str, n_steps: int | None, force: bool
) -> None:
    """Make a scenario of the execution traces of a data-parallel job."""
    from simdist.cli import chakra

    chakra.import_(session, traces, output=output, cluster=cluster, n_steps=n_steps, force=force)


COMMANDS: tuple[click.Command, ...] = (_import, _whatif, _chakra)
"""What `simdist` gains by this module."""
