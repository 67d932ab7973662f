"""Commands from the user's own job to a decision: what they are called and take."""

from pathlib import Path
from typing import Any

import click

from simdist.cli import common
from simdist.cli.session import Session

_TUNED = ("sync", "torus", "local_sgd", "hierarchical_sgd", "parameter_server", "hitopk", "gtopk", "naive_ag")

_cluster_of_a_job = click.option(
    "--cluster", metavar="FILE|PRESET", help="Take the links from there, not from what the traces show."
)


@click.command("import")
@click.argument("traces", nargs=-1, required=True)
@click.option("-o", "--output", type=common.path, metavar="SCENARIO", required=True, help="The .yaml file to write.")
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="The ranks were on so many nodes.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), metavar="N", help="So many ranks were on each node.")
@_cluster_of_a_job
@click.option(
    "--fabric",
    metavar="LINK|FILE|PRESET",
    help="The links inside nodes, e.g. '3 us, 240 GB/s', or those of a cluster; only the network is from the traces.",
)
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
    fabric: str | None,
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
        fabric=fabric,
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
    "--resamples",
    type=click.IntRange(0, 1_000_000),
    default=200,
    show_default=True,
    help="Runs of each schedule; 0: none.",
)
@click.option("--block", type=click.IntRange(min=1), metavar="N", help="Steps of a block of a recording.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Of the first run; the scenario's.")
@click.option("--cluster", metavar="FILE|PRESET", help="Simulate schedules with the links from there.")
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
    cluster: str | None,
    plot: Path | None,
) -> None:
    """Show what stragglers cost, and what would help.

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
        cluster=cluster,
        plot=plot,
    )
    whatif.whatif(session, job, wanted)


@click.command("tune")
@common.scenario
@click.option(
    "--global-every",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="H",
    help="All ranks exchange at least every H steps.",
)
@click.option(
    "--group-every", multiple=True, metavar="RANKS:H", help="Groups of so many ranks exchange at least every H steps."
)
@click.option("--max-bytes", metavar="SIZE", help="Most that a node sends per step, e.g. 20 MB.")
@click.option("--memory", metavar="SIZE", help="Most that the buffers of a rank take on its device.")
@click.option("--host-memory", metavar="SIZE", help="Most that they take in host memory.")
@click.option("--min-density", metavar="SHARE", help="Also try sparse gradients of this density or more, e.g. 1%.")
@click.option("--only", multiple=True, type=click.Choice(_TUNED), help="Only schedules of this kind; may be repeated.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(("fp16", "servers")),
    help="Also try half precision, or parameter servers.",
)
@click.option(
    "--baseline", default="sync", show_default=True, metavar="LABEL", help="Label or kind of the schedule to beat."
)
@click.option(
    "--seeds",
    type=click.IntRange(2, 1_000_000),
    metavar="N",
    help="Fresh seeds of the finalists; 20, of recordings 200.",
)
@click.option(
    "--search-seeds", type=click.IntRange(1, 1_000_000), default=5, show_default=True, help="Seeds of the search."
)
@click.option(
    "--evaluations", type=click.IntRange(min=1), metavar="N", help="Most to try; all of 200 or fewer, else 100."
)
@click.option("--exhaustive", is_flag=True, help="Simulate all candidates, however many.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the search's own choices.")
@click.option("-o", "--output", type=common.path, metavar="DIR", help="Keep what is simulated there; go on from it.")
@click.option(
    "--write", type=common.path, metavar="FILE", help="Write the scenario with the finalists as its schedules."
)
@common.plot
@common.options
@click.pass_obj
def _tune(
    session: Session,
    scenario: str,
    global_every: int,
    group_every: tuple[str, ...],
    max_bytes: str | None,
    memory: str | None,
    host_memory: str | None,
    min_density: str | None,
    only: tuple[str, ...],
    allow: tuple[str, ...],
    baseline: str,
    seeds: int | None,
    search_seeds: int,
    evaluations: int | None,
    exhaustive: bool,
    seed: int,
    output: Path | None,
    write: Path | None,
    plot: Path | None,
) -> None:
    """Find the fastest schedule for a scenario, within limits.

    Schedules and their parameters are simulated, all of them or, where there are many, those that a search picks. The
    best, and the best of every frequency of global synchronisation, are simulated again with fresh seeds; only those
    numbers are shown. If nothing gains, it says so, and why.
    """
    from simdist.cli import tuning

    asked = tuning.Asked(
        global_every=global_every,
        group_every=group_every,
        max_bytes=max_bytes,
        memory=memory,
        host_memory=host_memory,
        min_density=min_density,
        only=only,
        allow=allow,
        baseline=baseline,
        n_seeds=seeds,
        n_search_seeds=search_seeds,
        evaluations=evaluations,
        is_exhaustive=exhaustive,
        seed=seed,
        output=output,
        scenario_file=write,
        plot=plot,
    )
    tuning.tune(session, scenario, asked)


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


COMMANDS: tuple[click.Command, ...] = (_import, _whatif, _tune, _chakra)
"""What `simdist` gains by this module."""
