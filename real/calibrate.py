"""Measure a cluster: `torchrun --nproc-per-node N -m real.calibrate -o cluster.yaml`, on all of its ranks.

The result is a file that a scenario takes as `cluster: {file: cluster.yaml}`, and with `--model` one that it takes
as `workload: {file: workload.yaml}`. Rank 0 prints and writes; an error is printed by every rank that meets it. Exit
codes are those of `simdist`: 0; 1 for a run that failed; 2 for wrong input.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from real import models
from real.calibration import machine, output
from real.calibration.clusters import Cores, LinkForm, derive
from real.calibration.data import DataRates, Setup, measure_data, with_data
from real.calibration.measure import measure_calls, measure_task, tasks
from real.calibration.steps import SmallTimes, measure_small, measure_step
from real.calibration.tables import MEASURED_OPS, OpName
from real.data.filecache import default_folder
from real.data.sources import choose_decode, sample_shape
from real.data.storages import open_storage, read_storage_index
from real.options import RATE, SIZE, TIME, Parsed, timeout_option
from real.processes.beats import boot_id
from real.processes.exit_codes import run_command
from real.processes.launch import Connection, RankPlace, connect, place
from real.programs.precision import AUTOCAST
from real.recording.timing import share_cores
from simdist.errors import RunError, ScenarioError
from simdist.machine import n_cores
from simdist.scenario import Cluster, dump_cluster, dump_workload
from simdist.scenario.cluster import HostLaunches
from simdist.settings.units import format_nbytes, format_seconds


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line on one rank and return its exit code."""
    return run_command(_command, args, program="real.calibrate")


def _ops_of(text: str) -> tuple[OpName, ...]:
    """Return the collectives of a list such as "all_reduce,broadcast"."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in MEASURED_OPS]:
        raise ValueError(f"{unknown[0]!r} is no collective; there are {', '.join(MEASURED_OPS)}")
    return tuple(op for op in MEASURED_OPS if op in names)


# The largest size without `--model` and `--max-size`, by backend; up to the second one, all sizes are measured.
_LARGEST_NBYTES = {"nccl": 256 * 10**6, "gloo": 16 * 10**6}
_SURE_NBYTES = 16 * 10**6


@click.command(
    context_settings={"show_default": True},
    help="Measure links, devices and a model on all ranks; torchrun starts this once per rank.",
)
@click.option("cluster", "-o", "--output", type=click.Path(path_type=Path), help="Cluster file to write.")
@click.option("raw", "--json", type=click.Path(path_type=Path), help="File for the seconds of every repetition.")
@click.option(
    "--ops",
    type=Parsed("ops", _ops_of),
    default=",".join(MEASURED_OPS),
    help="Collectives; links follow from all_reduce, and tables also from all_gather and reduce_scatter.",
)
@click.option("min_nbytes", "--min-size", type=SIZE, default="1 kB", help="Smallest; others are 4, 16, ... times it.")
@click.option(
    "max_nbytes",
    "--max-size",
    type=SIZE,
    help="Sizes go up to this.  [default: as far as the budget allows, up to all bytes of the model; without one up to "
    "256 MB with NCCL, and 16 MB with gloo]",
)
@click.option("budget_s", "--budget", type=TIME, default="30 s", help="Of all repetitions; 3 of each in any case.")
@click.option("gap_s", "--gap", type=TIME, default="20 ms", help="Without traffic, before each repetition.")
@click.option("--links", type=click.Choice(["table", "line"]), default="table", help="Form of links.")
@click.option("rate_Bps", "--rate", type=RATE, help='Stated rate of the network, for --links line: "25 Gbit/s".')
@click.option("--model", help=f"Measure its steps, too: {', '.join(models.names())}.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Of the model; else that of its preset.")
@click.option("--precision", type=click.Choice(list(AUTOCAST)), default="fp32", help="Of the model.")
@click.option("--workload", type=click.Path(path_type=Path), help="Workload file to write.")
@click.option("--data", metavar="URL", help="A data set: measure storage, disk, memory and decoding.")
@click.option("--cache", type=click.Path(path_type=Path), help="Folder on the local disk to measure; else temporary.")
@click.option("n_readers", "--readers", type=click.IntRange(min=1), default=8, help="Threads of a rank that read.")
@click.option("sample_nbytes", "--sample-size", type=SIZE, default="150528 B", help="Decoded: 3 x 224 x 224 bytes.")
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@timeout_option
@click.option("--force", is_flag=True, help="Replace files that are there.")
@click.option("--debug", is_flag=True, expose_value=False, help="Show where an error comes from.")
def _command(**given: Any) -> None:
    options = SimpleNamespace(**given)
    # unless only a workload is wanted
    options.measures_links = bool(options.cluster or options.raw or not options.workload)
    here = place(os.environ)
    _check(options, here)
    if options.max_nbytes is not None:
        sizes_of(options.min_nbytes, options.max_nbytes)
    usual_batch_size = machine.preset_batch_size(options.model) if options.model else 1
    share_cores(here.local_world_size)
    with (
        connect(
            backend=options.backend,
            device=options.device,
            timeout_s=options.timeout_s,
            start_timeout_s=options.timeout_s,
            exit_with_parent=True,
        ) as connection,
        connection.guard.ending_on_sigterm(),
    ):
        nodes = _nodes(connection)
        sizes = sizes_of(options.min_nbytes, options.max_nbytes or _largest(connection, options))
        connection.agree("what to measure", f"{options.ops} {sizes} {options.measures_links} {options.model}")
        if here.rank == 0:
            for path in filter(None, (options.cluster, options.raw, options.workload)):
                output.check_writable(path, force=options.force)
        connection.barrier("the files can be written")
        measured = machine.source(connection, nodes)
        rates = _data(connection, options.data, options) if options.data else None
        if options.measures_links:
            _links(connection, options, sizes, nodes, measured, rates)
        if options.model and options.workload:
            batch_size = options.batch_size or usual_batch_size
            _model(connection, options.model, options.workload, batch_size, options, measured)


def _largest(connection: Connection, options: SimpleNamespace) -> int:
    """Return the largest size to measure if none is given."""
    nbytes = machine.model_nbytes(options.model) if options.model else _LARGEST_NBYTES[connection.backend]
    return max(nbytes, int(options.min_nbytes))


def sizes_of(least: int, most: int) -> tuple[int, ...]:
    """Return the sizes from `least` up to `most`, each 4 times the one before, and `most`.

    >>> sizes_of(1000, 20_000)
    (1000, 4000, 16000, 20000)

    Raises:
        ScenarioError: There are none.
    """
    if not 0 < least <= most:
        raise ScenarioError(f"--min-size is {least} B and --max-size {most} B: sizes go from above 0 B up")
    sizes = [least]
    while sizes[-1] * 4 <= most:
        sizes.append(sizes[-1] * 4)
    return tuple(dict.fromkeys([*sizes, most]))


def _check(options: SimpleNamespace, here: RankPlace) -> None:
    """Refuse what cannot be measured, before the others are met; equal on every rank."""
    network = here.world_size > here.local_world_size
    if (options.model is None) != (options.workload is None):
        raise ScenarioError("--model and --workload go together: the model to measure, and the file to write")
    if options.measures_links and here.world_size == 1:
        raise ScenarioError("one rank has no links to measure; start more: torchrun --nproc-per-node N")
    if options.cluster and "all_reduce" not in options.ops:
        raise ScenarioError("--ops leaves out all_reduce, from which the links of -o follow")
    if options.rate_Bps is not None and options.links == "table":
        raise ScenarioError("--rate has no meaning for a table of measured points; give --links line with it")
    if options.data and options.sample_nbytes < 1:
        raise ScenarioError('--sample-size is 0 B: write the bytes of a decoded sample, e.g. "150528 B"')
    if options.data and not options.cluster:
        raise ScenarioError("--data measures what a cluster file states: give -o CLUSTER with it")
    if network and options.links == "line" and not options.rate_Bps:
        raise ScenarioError('--links line states the rate of the network: give it, e.g. --rate "25 Gbit/s"')


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


def _data(connection: Connection, url: str, options: SimpleNamespace) -> DataRates:
    """Measure what samples are read from."""
    storage = open_storage(url, timeout_s=options.timeout_s)
    index = read_storage_index(storage)
    shape = sample_shape(options.sample_nbytes)
    decode = choose_decode(index, shape, url)
    cache = options.cache or default_folder()
    return measure_data(connection, Setup(index, storage, decode, shape, cache, options.n_readers))


def _links(
    connection: Connection,
    options: SimpleNamespace,
    sizes: Sequence[int],
    nodes: int,
    measured: str,
    rates: DataRates | None,
) -> None:
    here = connection.place
    has_steps = connection.backend == "nccl" and options.links == "line"
    todo = tasks(nodes, here.local_world_size, sizes, options.ops, halves=has_steps)
    if here.rank == 0:
        about = f"about {format_seconds(options.budget_s)}, more where three repetitions take longer"
        click.echo(f"measuring {len(todo)} operations: {about}", err=True)
    device = machine.measure_device(connection)
    small = measure_small(connection)
    cores = _cores(connection) if options.links == "line" and connection.backend == "gloo" else None
    sure_nbytes = sizes[-1] if options.max_nbytes else _SURE_NBYTES
    measurements = measure_task(
        connection, todo, budget_s=options.budget_s, gap_s=options.gap_s, sure_nbytes=sure_nbytes
    )
    calls = measure_calls(connection, measurements, gap_s=options.gap_s) if "all_reduce" in options.ops else None
    if here.rank != 0:
        return
    if len(measurements) < len(todo):
        left_out = format_nbytes(todo[len(measurements)].nbytes)
        click.echo(f"the budget ends before {left_out}: raise --budget, or give --max-size", err=True)
    source = f"{measured}; gaps of {format_seconds(options.gap_s)}"
    if options.raw:
        raw = output.raw_results(
            measurements,
            source=source,
            nodes=nodes,
            ranks_per_node=here.local_world_size,
            gap_s=options.gap_s,
            rates=rates,
            calls=calls,
        )
        _write(options.raw, raw, options.force)
    if calls is None:
        click.echo(output.text(measurements, None))
        return
    derived = derive(
        measurements,
        nodes=nodes,
        ranks_per_node=here.local_world_size,
        form=LinkForm(options.links, options.rate_Bps, cores, calls if connection.backend == "nccl" else None),
        device=device.model_copy(update={"floors": small.floors}) if small else device,
        library=connection.backend,
        name=options.cluster.stem if options.cluster else "measured",
        source=source,
    )
    click.echo("\n".join([output.text(measurements, derived.cluster), *derived.notes]))
    if rates:
        click.echo(output.data_text(rates))
    if options.cluster:
        cluster = with_data(derived.cluster, rates, source=measured) if rates else derived.cluster
        cluster = _with_launches(cluster, small)
        _write(options.cluster, dump_cluster(cluster), options.force)


def _with_launches(cluster: Cluster, small: SmallTimes | None) -> Cluster:
    """Return the cluster with the host's times for launching, if there are any."""
    if small is None or small.launches == HostLaunches():
        return cluster
    return cluster.model_copy(update={"host": {"launches": small.launches}})


def _cores(connection: Connection) -> Cores:
    """Return the cores of a node; nodes whose kernels were booted together are one machine."""
    handover_s = machine.measure_handover(connection)
    here = connection.place
    machines = connection.exchange("the machine", boot_id() or str(connection.place.rank))
    shared = here.world_size > here.local_world_size and len(set(machines)) == 1
    crowd = max(1.0, (here.world_size if shared else here.local_world_size) / n_cores())
    return Cores(n_cores(), shared, handover_s / crowd)


def _model(
    connection: Connection, model: str, path: Path, batch_size: int, options: SimpleNamespace, measured: str
) -> None:
    times = measure_step(
        connection, model, batch_size=batch_size, precision=options.precision, budget_s=options.budget_s / 3
    )
    if times is None:
        return
    parts = {"forward": times.forward_s, "backward": times.backward_s, "optimizer": times.optimize_s}
    said = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items())
    if launches := [f"{kind} {format_seconds(times.launches.of(kind))}" for kind in times.launches.stated()]:
        click.echo(f"{model}: the host launches {', '.join(launches)}")
    if times.is_of_host:
        hint = "with a larger --batch-size, the workload also tells other sizes"
        click.echo(f"{model}: passes take as long as the host launches them, so they hide the device's time: {hint}")
    click.echo(f"{model}: {said}; the slowest rank takes {100 * times.spread:.2g} % longer than the fastest")
    workload = machine.measured_workload(
        model, batch_size=batch_size, precision=options.precision, times=times, measured=measured
    )
    _write(path, dump_workload(workload), options.force)


def _write(path: Path, content: str, force: bool) -> None:
    output.write_file(path, content, force=force)
    click.echo(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
