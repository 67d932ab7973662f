"""The command line, `simdist`: what the commands are called and take.

What they do stands in the modules beside this one. A command imports its own, so that `simdist --help` answers at once.

Results go to stdout, and nothing else does; warnings, progress and errors go to stderr. Exit codes: 0; 1 for a run that
failed; 2 for wrong input, with one message and no traceback (`--debug` shows it); 130 after Ctrl-C.
"""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from simdist import __version__
from simdist.cli import common, decision
from simdist.cli.session import Session
from simdist.errors import RunError, SimdistError

__all__ = ["cli", "main"]

_KINDS = ("clusters", "workloads", "scenarios")


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        args: Without the program's name; those of the process if None.

    >>> main(["--version"])
    simdist 0.1.0
    0
    """
    session = Session()
    if sys.stdout is None:  # closed before the start, as `>&-` does
        return _failed(session, RunError("cannot print: stdout is closed; send it to a file, or to /dev/null"), 1)
    try:
        code = cli.main(args, prog_name="simdist", standalone_mode=False, obj=session)
    except click.Abort as error:
        if isinstance(error.__cause__, EOFError):  # click takes it for a prompt without an answer; there are none
            raise error.__cause__ from None
        session.say(f"interrupted; {'saved: ' + ', '.join(session.saved) if session.saved else 'nothing was saved'}")
        return 130
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f"; see {context.command_path} --help" if context else ""
        session.say(f"error: {error.format_message().rstrip('.')}{hint}")
        return error.exit_code
    except SimdistError as error:
        return _failed(session, error, 1 if isinstance(error, RunError) else 2)
    except MemoryError as error:
        return _failed(session, RunError(f"not enough memory: {error}; simulate fewer steps, ranks or samples"), 1)
    except OSError as error:  # of files, all are told apart where they are used; so it is stdout or stderr
        return _failed(session, RunError(f"cannot print: {error.strerror or error}"), 1)
    return code if isinstance(code, int) else 0


def _failed(session: Session, error: SimdistError, code: int) -> int:
    if session.debug:
        traceback.print_exc()
    else:
        session.say(f"error:\n{error}" if "\n" in str(error) else f"error: {error}")
    return code


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="simdist", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Simulate, run and compare synchronisation schedules for distributed training.

    SCENARIO is a YAML file, or the name of a scenario that ships (`simdist presets scenarios`). RUN is a directory that
    holds a plan, the scenario that it is from, the delays and the traces of it.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command("presets")
@click.argument("kind", type=click.Choice(_KINDS), required=False)
@click.argument("name", required=False)
@common.options
@click.pass_obj
def _presets(session: Session, kind: str | None, name: str | None) -> None:
    """Show the clusters, workloads and scenarios that ship.

    With a KIND only those; with a NAME as well, its YAML.
    """
    from simdist.cli import listing

    listing.show(session, kind, name)


@cli.command("plan")
@common.scenario
@click.option("-o", "--output", type=common.path, metavar="RUN", help="Write a run directory.")
@common.schedule
@common.force
@common.options
@click.pass_obj
def _plan(session: Session, scenario: str, output: Path | None, schedule: str | None, force: bool) -> None:
    """Write plans and prove what they compute.

    Several schedules make one run directory each, RUN/LABEL.
    """
    from simdist.cli import planning

    planning.plan(session, scenario, output=output, label=schedule, force=force)


@cli.command("simulate")
@click.argument("scenario", metavar="SCENARIO|RUN")
@common.engine
@click.option("-o", "--output", type=common.path, metavar="RUN", help="Write a run directory with the trace.")
@common.schedule
@common.plot
@common.force
@common.options
@click.pass_obj
def _simulate(
    session: Session,
    scenario: str,
    engine: Any,
    output: Path | None,
    schedule: str | None,
    plot: Path | None,
    force: bool,
) -> None:
    """Simulate; show where the time of a step goes.

    The delays are those of the scenario's seed. A RUN is simulated as it stands and gets the trace; of a SCENARIO, -o
    writes run directories.
    """
    from simdist.cli import simulating

    simulating.simulate(session, scenario, engine=engine, output=output, label=schedule, plot=plot, force=force)


@cli.command("compare")
@common.scenario
@click.option("--baseline", default="sync", show_default=True, metavar="LABEL", help="Schedule to compare with.")
@click.option(
    "--seeds", type=click.IntRange(1, 1_000_000), default=20, show_default=True, help="Seeds to average over."
)
@common.engine
@common.plot
@click.option(
    "-o", "--output", type=common.path, metavar="DIR", help="Append each finished schedule to DIR/rows.jsonl."
)
@click.option("--force", "anew", is_flag=True, help="Measure anew what DIR/rows.jsonl holds already.")
@common.options
@click.pass_obj
def _compare(
    session: Session,
    scenario: str,
    baseline: str,
    seeds: int,
    engine: Any,
    plot: Path | None,
    output: Path | None,
    anew: bool,
) -> None:
    """Show the speed-ups over a baseline.

    All schedules meet the same delays of the same seeds. Intervals are 95 % confidence intervals over seeds.
    """
    from simdist.cli import comparing

    comparing.compare(
        session, scenario, baseline=baseline, n_seeds=seeds, engine=engine, plot=plot, output=output, anew=anew
    )


@cli.command("sweep")
@click.argument("sweep", metavar="SWEEP")
@click.option(
    "-o", "--output", type=common.path, metavar="DIR", required=True, help="Append rows there; go on where it was."
)
@click.option(
    "--workers", type=click.IntRange(0, 10_000), metavar="N", help="Processes, or jobs; 0: this process. [a core each]"
)
@click.option(
    "--scheduler", metavar="WHERE", help="Of a Dask cluster: tcp://HOST:PORT, a file, or slurm, pbs, lsf, sge, ..."
)
@click.option("--retry", is_flag=True, help="Compute rows that failed again.")
@click.option("--plans", is_flag=True, help="Also write a run directory for every row, DIR/runs/POINT/LABEL.")
@common.options
@click.pass_obj
def _sweep(
    session: Session, sweep: str, output: Path, workers: int | None, scheduler: str | None, retry: bool, plans: bool
) -> int:
    """Simulate all points that a SWEEP file describes.

    Each is computed for all schedules and seeds, by a process per core or on a Dask cluster, and appended to DIR. Run
    it again after an interruption, or with more values: what is there is not computed again. A row that fails is
    recorded, and the others go on; the exit code is then 1.
    """
    from simdist.cli import sweeping

    return sweeping.sweep(
        session, sweep, output=output, n_workers=workers, scheduler=scheduler, retry=retry, with_plans=plans
    )


@cli.command("results")
@click.argument("folders", metavar="DIR...", type=common.path, nargs=-1, required=True)
@click.option("--csv", type=common.path, metavar="FILE", help="Write the table to a CSV file; - is stdout.")
@click.option("--parquet", type=common.path, metavar="FILE", help="Write the table to a Parquet file.")
@click.option(
    "--where",
    "conditions",
    multiple=True,
    metavar="COLUMN=VALUE",
    help="Only these rows; also != < <= > >=; may be repeated.",
)
@click.option("--sort", metavar="COLUMN", help="Order the rows; with -COLUMN the largest come first.")
@click.option("--fastest", "only_fastest", is_flag=True, help="Only the fastest schedule of each point, and its lead.")
@click.option("--failed", "only_failed", is_flag=True, help="Only rows that failed, and why.")
@click.option("--all", "shows_all", is_flag=True, help="Show all rows, however many there are.")
@click.option(
    "--baseline", metavar="LABEL", help="Schedule to compare with.  [default: as in the sweep; of runs, sync]"
)
@common.options
@click.pass_obj
def _results(
    session: Session,
    folders: tuple[Path, ...],
    csv: Path | None,
    parquet: Path | None,
    conditions: tuple[str, ...],
    sort: str | None,
    only_fastest: bool,
    only_failed: bool,
    shows_all: bool,
    baseline: str | None,
) -> None:
    """Show the results of sweeps and of runs as one table.

    A DIR is what `simdist sweep -o` wrote, or holds run directories at any depth, simulated, measured or both. A row is
    a schedule of a point. What is varied has columns of its own, as it was written on the screen, in SI units in files.
    """
    from simdist.cli import results

    wanted = results.Wanted(csv, parquet, conditions, sort, only_fastest, only_failed, shows_all, baseline)
    results.results(session, folders, wanted)


@cli.command("validate")
@click.argument("run", metavar="RUN")
@click.option("--cluster", type=common.path, metavar="FILE", help="Simulate these machines, as calibrated, instead.")
@common.schedule
@common.plot
@common.options
@click.pass_obj
def _validate(session: Session, run: str, cluster: Path | None, schedule: str | None, plot: Path | None) -> None:
    """Compare simulation and measurement.

    RUN holds trace.real.npz; `torchrun --nproc-per-node N -m real RUN` measures it. Errors are (simulated - measured) /
    measured.
    """
    from simdist.cli import validating

    validating.validate(session, run, cluster=cluster, label=schedule, plot=plot)


@cli.command("report")
@click.argument("run", metavar="RUN|DIR")
@click.option("-o", "--output", type=common.path, metavar="FILE", required=True, help="The .html file to write.")
@click.option("--baseline", metavar="LABEL", help="Schedule to compare with; sync if it is there, else the first.")
@click.option("--steps", metavar="A:B", callback=common.slice_of_steps, help="Only steps A to B - 1 in the timeline.")
@click.option("--cluster", type=common.path, metavar="FILE", help="Simulate these machines, as calibrated, instead.")
@common.options
@click.pass_obj
def _report(
    session: Session, run: str, output: Path, baseline: str | None, steps: range | None, cluster: Path | None
) -> None:
    """Write one HTML page about runs, or about a sweep.

    Of a RUN, or of all runs in a DIR: speed-ups, where the time of a step goes, a timeline, who waited for whom, and
    simulation against measurement where there are both. Of a sweep in a DIR: which schedule is the fastest where, which
    field matters, and all rows. The page holds all it shows and requests nothing.
    """
    from simdist.cli import reporting

    reporting.report(session, run, output=output, baseline=baseline, steps=steps, cluster=cluster)


@cli.command("comms")
@click.argument("run", metavar="RUN")
@common.schedule
@common.options
@click.pass_obj
def _comms(session: Session, run: str, schedule: str | None) -> None:
    """Show what collectives achieved.

    RUN holds a simulated trace, a measured one, or both. The columns are those of nccl-tests; what members waited for
    the last one is shown apart.
    """
    from simdist.cli import comms

    comms.comms(session, run, label=schedule)


@cli.command("data")
@click.argument("scenario", metavar="SCENARIO|RUN")
@click.option("--knobs", is_flag=True, help="Also change one thing at a time, and show which stalls that removes.")
@common.schedule
@common.options
@click.pass_obj
def _data(session: Session, scenario: str, knobs: bool, schedule: str | None) -> None:
    """Show what loading data costs, by epoch.

    The time of each epoch, for how long ranks stall for want of a batch, and from which level of storage samples come;
    of a RUN that was measured, simulated and real side by side.
    """
    from simdist.cli import data

    data.data(session, scenario, label=schedule, with_knobs=knobs)


@cli.command("trace")
@click.argument("run", metavar="RUN|TRACE.npz", type=common.path)
@click.option(
    "--chrome", type=common.path, metavar="FILE", required=True, help="Write JSON for Perfetto or chrome://tracing."
)
@click.option("--trace", "which", type=click.Choice(common.TRACES), help="Which trace, if a RUN holds both.")
@click.option("--steps", metavar="A:B", callback=common.slice_of_steps, help="Only steps A to B - 1.")
@click.option("--ranks", metavar="LIST", callback=common.numbers, help="Only these ranks, e.g. 0,3,8-11.")
@click.option("--tensors", is_flag=True, help="Add what each gradient goes through, as Horovod's timeline does.")
@common.options
@click.pass_obj
def _trace(
    session: Session,
    run: Path,
    chrome: Path,
    which: Any,
    steps: range | None,
    ranks: tuple[int, ...] | None,
    tensors: bool,
) -> None:
    """Convert a trace for viewers of timelines.

    Of a RUN, the trace in it; open the FILE in https://ui.perfetto.dev.
    """
    from simdist.cli import tracing

    tracing.trace(session, run, which=which, chrome=chrome, steps=steps, ranks=ranks, tensors=tensors)


for _command in decision.COMMANDS:
    cli.add_command(_command)
