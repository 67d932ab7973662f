"""Measure a cluster: `torchrun --nproc-per-node N -m real.calibrate -o cluster.yaml`, on all of its ranks.

What comes out is a file that a scenario takes as `cluster: {file: cluster.yaml}`, and with `--model` one that it takes
as `workload: {file: workload.yaml}`. Rank 0 prints and writes; an error is printed by every rank that meets it. Exit
codes are those of `simdist`: 0; 1 for a run that failed; 2 for wrong input.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from real import models
from real.calibration import machine, output
from real.calibration.clusters import Form, derive
from real.calibration.data import DataRates, Setup, measure_data, with_data
from real.calibration.machine import Precision
from real.calibration.measure import Pace, measure, tasks
from real.calibration.options import Data, Options, check_options, ops_of, parsed, sizes_of
from real.calibration.tables import OPS
from real.data.folders import default_folder
from real.data.matching import choose_decode, sample_shape
from real.data.storages import open_storage, read_storage_index
from real.processes.exit_codes import run_command
from real.processes.launch import Connection, Place, connect, place
from real.recording.timing import share_cores
from simdist.errors import RunError
from simdist.scenario import dump_cluster, dump_workload
from simdist.settings.units import format_seconds, parse_Bps, parse_nbytes, parse_seconds


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line on one rank and return its exit code."""
    return run_command(_command, args, program="real.calibrate")


@click.command(help="Measure links, devices and a model on all ranks; torchrun starts this once per rank.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Cluster file to write.")
@click.option("--json", "raw", type=click.Path(path_type=Path), help="File for the seconds of every repetition.")
@click.option("--ops", default=",".join(OPS), show_default=True, help="Collectives; links follow from all_reduce.")
@click.option("--min-size", default="1 kB", show_default=True, help="Smallest size; others are 4, 16, ... times this.")
@click.option("--max-size", default="16 MB", show_default=True, help="Sizes go up to this.")
@click.option("--budget", default="30 s", show_default=True, help="Time of all repetitions; 3 of each in any case.")
@click.option("--gap", default="20 ms", show_default=True, help="Time without traffic before each repetition.")
@click.option(
    "--links", type=click.Choice(["table", "line"]), default="table", show_default=True, help="Form of links."
)
@click.option("--rate", default=None, help='Stated rate of the network, for --links line: "25 Gbit/s".')
@click.option("--model", default=None, help=f"Measure its steps, too: {', '.join(models.names())}.")
@click.option("--batch-size", type=click.IntRange(min=1), default=None, help="Of the model; else that of its preset.")
@click.option(
    "--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="Of the model."
)
@click.option("--workload", type=click.Path(path_type=Path), help="Workload file to write.")
@click.option("--data", default=None, metavar="URL", help="A data set: measure storage, disk, memory and decoding.")
@click.option("--cache", type=click.Path(path_type=Path), help="Folder on the local disk to measure; else temporary.")
@click.option(
    "--readers", type=click.IntRange(min=1), default=8, show_default=True, help="Threads of a rank that read."
)
@click.option("--sample-size", default="150528 B", show_default=True, help="Of a decoded sample: 3 x 224 x 224 bytes.")
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=60.0, show_default=True, help="Seconds to wait for others."
)
@click.option("--force", is_flag=True, help="Replace files that are there.")
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
def _command(
    output: Path | None,
    raw: Path | None,
    ops: str,
    min_size: str,
    max_size: str,
    budget: str,
    gap: str,
    links: Literal["table", "line"],
    rate: str | None,
    model: str | None,
    batch_size: int | None,
    precision: Precision,
    workload: Path | None,
    data: str | None,
    cache: Path | None,
    readers: int,
    sample_size: str,
    backend: Literal["auto", "gloo", "nccl"],
    device: Literal["auto", "cpu", "cuda"],
    timeout: float,
    force: bool,
    debug: bool,
) -> int:
    pace = Pace(budget_s=parsed("--budget", parse_seconds, budget), gap_s=parsed("--gap", parse_seconds, gap))
    form = Form(links, parsed("--rate", parse_Bps, rate) if rate is not None else None)
    sizes = sizes_of(parsed("--min-size", parse_nbytes, min_size), parsed("--max-size", parse_nbytes, max_size))
    options = Options(
        output,
        raw,
        workload,
        ops_of(ops),
        sizes,
        pace,
        form,
        model,
        batch_size,
        precision,
        backend,
        device,
        timeout,
        force,
        Data(data, cache, readers, parsed("--sample-size", parse_nbytes, sample_size)) if data else None,
    )
    _execute(options, place(os.environ))
    return 0


def _execute(options: Options, here: Place) -> None:
    check_options(options, here)
    usual_batch_size = machine.preset_batch_size(options.model) if options.model else 1
    share_cores(here.local_world_size)
    with (
        connect(
            backend=options.backend, device=options.device, timeout_s=options.timeout_s, exit_with_parent=True
        ) as connection,
        connection.guard.ending_on_sigterm(),
    ):
        nodes = _nodes(connection)
        connection.agree("what to measure", f"{options.ops} {options.sizes} {options.links} {options.model}")
        if here.rank == 0:
            for path in options.files:
                output.check_free(path, force=options.force)
        connection.barrier("the files can be written")
        measured = machine.source(connection, nodes)
        rates = _data(connection, options.data, options.timeout_s) if options.data else None
        if options.links:
            _links(connection, options, nodes, measured, rates)
        if options.model and options.workload:
            batch_size = options.batch_size or usual_batch_size
            _model(connection, options.model, options.workload, batch_size, options, measured)


def _nodes(connection: Connection) -> int:
    """Return the number of nodes, which must have equal numbers of ranks, consecutive ones."""
    here = connection.place
    connection.agree("the number of ranks on a node", str(here.local_world_size))
    if here.world_size % here.local_world_size or here.rank % here.local_world_size != here.local_rank:
        raise RunError(
            f"rank {here.rank} is number {here.local_rank} of {here.local_world_size} on its node, and there are "
            f"{here.world_size} ranks: ranks must be numbered node by node; torchrun does"
        )
    return here.world_size // here.local_world_size


def _data(connection: Connection, data: Data, timeout_s: float) -> DataRates:
    """Measure what samples are read from."""
    storage = open_storage(data.url, timeout_s=timeout_s)
    index = read_storage_index(storage)
    shape = sample_shape(data.sample_nbytes)
    decode = choose_decode(index, shape, data.url)
    cache = data.cache or default_folder()
    return measure_data(connection, Setup(index, storage, decode, shape, cache, data.n_readers))


def _links(connection: Connection, options: Options, nodes: int, measured: str, rates: DataRates | None) -> None:
    here = connection.place
    todo = tasks(nodes, here.local_world_size, options.sizes, options.ops)
    if here.rank == 0:
        about = f"about {format_seconds(options.pace.budget_s)}, more where three repetitions take longer"
        click.echo(f"measuring {len(todo)} operations: {about}", err=True)
    device = machine.measure_device(connection)
    measurements = measure(connection, todo, options.pace)
    if here.rank != 0:
        return
    source = f"{measured}; gaps of {format_seconds(options.pace.gap_s)}"
    if options.raw:
        raw = output.raw_results(
            measurements,
            source=source,
            nodes=nodes,
            ranks_per_node=here.local_world_size,
            gap_s=options.pace.gap_s,
            rates=rates,
        )
        _write(options.raw, raw, options.force)
    if "all_reduce" not in options.ops:
        click.echo(output.text(todo, measurements, None))
        return
    derived = derive(
        measurements,
        nodes=nodes,
        ranks_per_node=here.local_world_size,
        form=options.form,
        device=device,
        library=connection.backend,
        name=options.cluster.stem if options.cluster else "measured",
        source=source,
    )
    click.echo("\n".join([output.text(todo, measurements, derived.cluster), *derived.notes]))
    if rates:
        click.echo(output.data_text(rates))
    if options.cluster:
        cluster = with_data(derived.cluster, rates, source=measured) if rates else derived.cluster
        _write(options.cluster, dump_cluster(cluster), options.force)


def _model(connection: Connection, model: str, path: Path, batch_size: int, options: Options, measured: str) -> None:
    times = machine.measure_step(
        connection, model, batch_size=batch_size, precision=options.precision, budget_s=options.pace.budget_s / 3
    )
    if connection.place.rank != 0:
        return
    parts = {"forward": times.forward_s, "backward": times.backward_s, "optimizer": times.optimize_s}
    said = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items())
    click.echo(f"{model}: {said}; the slowest rank takes {100 * times.spread:.2g} % longer than the fastest")
    workload = machine.workload_of(
        model, batch_size=batch_size, precision=options.precision, times=times, measured=measured
    )
    _write(path, dump_workload(workload), options.force)


def _write(path: Path, content: str, force: bool) -> None:
    output.write(path, content, force=force)
    click.echo(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
