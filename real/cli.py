"""The command line of the real backend, which torchrun starts once per rank.

Rank 0 prints what there is to tell; an error is printed by every rank that meets it, in one line. Exit codes are those
of `simdist`: 0; 1 for a run that failed; 2 for wrong input.
"""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch

from real import jobs, models
from real.collectives.worlds import check_performable
from real.data.inputs import DataOptions, InputReader, open_input
from real.data.tallies import Tally, gather_tallies, reads_of, salvage_tallies, tally_path, totals
from real.execution.attempts import PerformedAttempt, begin_attempt
from real.execution.continuing import ContinuedRun
from real.execution.one_rank import perform_among_simulated
from real.execution.running import ProgramSpec, RunReport, check_world, perform_run
from real.options import timeout_option
from real.processes.agents import host_replicas, run_replicas
from real.processes.exit_codes import run_command
from real.processes.launch import Connection, choose_device, connect, place
from real.processes.membership import connect_replica
from real.programs.precision import AUTOCAST
from real.recording.recorder import forget, salvage
from real.recording.timing import share_cores
from simdist.engines.peers import trace_of_rank
from simdist.errors import PlanError, RunError, ScenarioError
from simdist.files import locked
from simdist.plan import LEVELS
from simdist.runs import run_directory
from simdist.runs.run_directory import EMULATED, NO_LINKS, RunDirectory
from simdist.settings.precision import Precision
from simdist.settings.units import format_seconds
from simdist.traces.reads import Reads
from simdist.traces.trace import Trace

PARTS = "parts"
_START_S = 60.0  # for replicas that start when the job is over


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line on one rank and return its exit code."""
    return run_command(_command, args, program="real")


@click.command(
    context_settings={"show_default": True},
    help="Perform the plan of each of RUNS (or of every run directory in it); torchrun starts this once per rank.",
)
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--program",
    default=EMULATED,
    help=(
        f"The computation: {EMULATED} sleeps for the scenario's compute times; a model: {', '.join(models.names())}; "
        f"or MODULE:FUNCTION."
    ),
)
@click.option(
    "--precision", type=click.Choice(list(AUTOCAST)), help="Of a model.  [default: `precision` of the run's workload]"
)
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@timeout_option
@click.option("label", "--schedule", help="Only the run of this schedule.")
@click.option("--force", is_flag=True, help="Replace a trace that is there.")
@click.option(
    "--data",
    metavar="URL",
    help="Read this data set, the plan's: a folder with index.csv, or another URL of fsspec.",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder on each node's disk for files of the data set.  [default: a temporary one of this user]",
)
@click.option(
    "--checkpoints",
    metavar="URL",
    help=(
        f"Write the plan's checkpoints here: a folder, or another URL of fsspec.  [default: RUN/saved; {EMULATED} "
        f"sleeps]"
    ),
)
@click.option(
    "--links",
    metavar="MODULE:FUNCTION",
    help=f"What performs the disturbances of links and other jobs' flows of a scenario; {NO_LINKS} leaves them out.",
)
@click.option(
    "--meet",
    metavar="HOST:PORT",
    help=(
        "With failures.on_failure: continue, on several machines: where the replicas of the job meet. Without "
        "--replica, this process hosts the meeting there.  [default: `python -m real RUN` starts all replicas here]"
    ),
)
@click.option(
    "--replica", type=click.IntRange(0), help="With --meet, under a torchrun for each: which replica this is."
)
@click.option(
    "max_restarts",
    "--max-restarts",
    type=click.IntRange(0),
    default=9,
    help="Of each replica, where `python -m real RUN` starts them.",
)
@click.option(
    "--failures",
    metavar="MODULE:FUNCTION",
    help="What lets nodes and links of a run with failures fail.  [default: ranks end, and pause]",
)
@click.option("rank", "--rank", type=click.IntRange(0), help="With --peers: the rank that this process is.")
@click.option(
    "--peers",
    type=click.Choice(["simulated"]),
    help="This process, without torchrun, is one rank; its peers are simulated.",
)
@click.option(
    "--channels",
    type=click.IntRange(0),
    default=16,
    help="With --peers on a GPU: thread blocks of a collective, which slow down computing as NCCL's do; 0 for none.",
)
@click.option("--debug", is_flag=True, expose_value=False, help="Show where an error comes from.")
def _command(**given: Any) -> None:
    options = SimpleNamespace(**given)
    options.started_s = time.time()
    build = jobs.find_build(options.program)
    if options.peers or options.rank is not None:
        _check_among_simulated(options)
        for each in _runs(options):
            with locked(each.path):
                _one_among_simulated(each, build, options)
        return
    perform_links = jobs.find_links(options.links)
    options.fail_node = jobs.find_failures(options.failures)
    runs = _runs(options)
    if runs[0].others_go_on:
        _continue(runs[0], build, options)
        return
    here = place(os.environ)
    for each in runs:
        check_world(each.plan, here.world_size)
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
        for each in runs:
            with locked(each.path) if here.rank == 0 else nullcontext():
                _one(connection, each, build, perform_links, options)


def _continue(run: RunDirectory, build: jobs.Build | None, options: SimpleNamespace) -> None:
    """Perform a run whose ranks go on when others fail: as one of them, as their meeting place, or start all here."""
    check_performable(run.plan)
    world_size = run.plan.world_size
    if options.backend == "nccl" or options.device == "cuda":
        raise ScenarioError(f"{run.path}: failures.on_failure: continue: ranks use gloo on CPUs: leave --backend out")
    if options.replica is None and "RANK" in os.environ:
        raise ScenarioError(
            f"{run.path}: failures.on_failure: continue: each rank has a torchrun of its own: write `python -m real "
            f"{run.path}` without torchrun, or --meet and --replica"
        )
    if options.replica is None:
        with locked(run.path):
            _check_not_measured(run, options)
            if options.meet:
                host_replicas(options.meet, world_size, timeout_s=options.timeout_s)
            else:
                run_replicas(
                    sys.argv[1:], world_size, max_restarts=options.max_restarts, timeout_s=options.timeout_s + _START_S
                )
        return
    if options.meet is None or options.replica >= world_size:
        raise ScenarioError(f"--replica {options.replica}: write --meet too, and a replica from 0 to {world_size - 1}")
    share_cores(world_size)
    with (
        connect_replica(options.meet, options.replica, world_size, timeout_s=options.timeout_s) as replica,
        replica.connection.guard.ending_on_sigterm(),
    ):
        for name, value in _identity(run, options).items():
            replica.membership.agree(name, value)

        def make_spec(attempt: PerformedAttempt) -> ProgramSpec:
            connection = replica.connection
            return _program(options.replica, connection.device, run, build, options, attempt=attempt)

        done = ContinuedRun(
            replica,
            run.path,
            run.plan,
            run.delays,
            run.failures,
            jobs.Saved(options.checkpoints).files(run, build, options.replica),
            parts=run.path / PARTS,
            make_spec=make_spec,
            started_s=options.started_s,
            anew=options.force,
            fail_node=options.fail_node,
        ).perform()
        if done:
            print(_summary(run, *_save(run, *done, None, None)), flush=True)  # noqa: T201 (the terminal of a run)


def _runs(options: SimpleNamespace) -> list[RunDirectory]:
    """Read the run directories, and refuse those that have a real trace already, unless forced."""
    for path in options.runs:
        if not path.is_dir():
            raise ScenarioError(f"{path}: there is no such run directory; `simdist plan SCENARIO -o RUN` writes one")
    found = [run_directory.read(path) for given in options.runs for path in run_directory.find(given)]
    runs = [each for each in found if options.label in (None, each.scenario.schedules[0].name)]
    if not runs:
        labels = ", ".join(each.scenario.schedules[0].name for each in found)
        where = ", ".join(map(str, options.runs))
        raise ScenarioError(f"{where}: no run is labelled {options.label!r}; there are: {labels}")
    for each in runs:
        _check_not_measured(each, options)
        if not options.peers:
            if each.only_simulated:
                raise RunError(f"{each.path}: {each.only_simulated}")
            jobs.check_links(each, options.links)
        if options.data and each.plan.dataset is None:
            raise ScenarioError(
                f"{each.path}: its plan reads no data set; give its scenario `data`, or leave --data out"
            )
        _check_failures(each, options, n_runs=len(runs))
        if options.checkpoints and not each.plan.has_saves:
            raise ScenarioError(
                f"{each.path}: its plan writes none; give its scenario `checkpoint`, or leave --checkpoints out"
            )
    if options.cache and not options.data:
        raise ScenarioError(f"--cache {options.cache}: there is nothing to keep without --data")
    return runs


def _check_failures(run: RunDirectory, options: SimpleNamespace, *, n_runs: int) -> None:
    """Refuse a run with failures that cannot go on after them."""
    if options.meet and not run.others_go_on:
        raise ScenarioError(
            f"{run.path}: --meet: its ranks do not go on without others (failures.on_failure: continue)"
        )
    if not run.failures and not run.others_go_on:
        if options.failures:
            raise ScenarioError(f"{run.path}: has no failures; leave --failures out")
        return
    if n_runs > 1:
        raise ScenarioError(f"{run.path}: has failures, after which all ranks start again: give this run alone")
    if options.peers:
        raise ScenarioError(f"{run.path}: has failures, which simulated peers do not survive: leave --peers out")
    if options.data:
        raise ScenarioError(f"{run.path}: has failures, and --data is not read again from the middle: leave one out")


def _check_among_simulated(options: SimpleNamespace) -> None:
    """Refuse options that need other processes, or half of what names the real rank."""
    if options.rank is None or not options.peers:
        raise ScenarioError("--rank N and --peers simulated belong together: rank N is real, its peers are simulated")
    refused = {"--data": options.data, "--cache": options.cache, "--links": options.links}
    refused["--backend"] = None if options.backend == "auto" else options.backend
    if given := [name for name, value in refused.items() if value is not None]:
        raise ScenarioError(f"{given[0]}: needs real peers; leave it out, or leave --peers out and start torchrun")


def _check_not_measured(run: RunDirectory, options: SimpleNamespace) -> None:
    if (run.path / run_directory.REAL).exists() and not options.force:
        raise ScenarioError(f"{run.path / run_directory.REAL}: is there already; replace it with --force")


def _one(
    connection: Connection,
    run: RunDirectory,
    build: jobs.Build | None,
    perform_links: jobs.PerformLinks | None,
    options: SimpleNamespace,
) -> None:
    parts = run.path / PARTS
    rank = connection.place.rank
    if rank == 0:
        _check_not_measured(run, options)  # by another start, before this one had the lock
    attempt = _begin_attempt(connection, run, build, options) if run.failures else None
    if connection.place.local_rank == 0 and attempt is None and (earlier := _rescue(run)):
        told = f"real: rank {rank}: {run.plan.name}: an earlier run ended early: what was done is in {earlier}"
        print(told, file=sys.stderr, flush=True)  # noqa: T201 (the terminal of a run)
    connection.agree("plan", run.plan.digest())
    forget(parts, rank)  # what is kept now; it would end up in a trace of this run
    _agree(connection, run, options)
    with ExitStack() as stack:  # left after the others know of a failure, so that no thread waits any longer
        try:
            source = _open_input(stack, connection, run, options)
            begins = stack.enter_context(jobs.open_links(run, perform_links, rank))
            program = _program(rank, connection.device, run, build, options, source=source, attempt=attempt)
            done = perform_run(
                connection,
                run.plan,
                run.delays,
                program,
                parts=parts,
                begins=begins,
                attempt=attempt,
                fail_node=options.fail_node,
            )
            counted = _count(connection, run, source)
            if done:
                done = _save(run, *done, counted, options.links if run.scenario.has_links else None)
            connection.barrier("the trace is written")
        except (PlanError, ScenarioError):
            forget(parts, rank)
            raise
        except Exception as error:
            raise _failure(connection, run, error) from error
        except KeyboardInterrupt:
            connection.guard.fail(KeyboardInterrupt.__name__)
            _keep(run)
            raise
    forget(parts, rank)
    if attempt:
        attempt.forget()
    if done:
        print(_summary(run, *done), flush=True)  # noqa: T201 (the terminal of a run)


def _program(
    rank: int,
    device: torch.device,
    run: RunDirectory,
    build: jobs.Build | None,
    options: SimpleNamespace,
    *,
    source: InputReader | None = None,
    attempt: PerformedAttempt | None = None,
) -> ProgramSpec:
    return jobs.program_spec(
        rank,
        device,
        run,
        build,
        source,
        name=options.program,
        precision=_precision(run, options),
        saved=jobs.Saved(options.checkpoints, attempt),
    )


def _begin_attempt(
    connection: Connection, run: RunDirectory, build: jobs.Build | None, options: SimpleNamespace
) -> PerformedAttempt:
    """Find where a run with failures goes on; rank 0 says so."""
    rank = connection.place.rank
    attempt = begin_attempt(
        connection,
        run.path,
        run.plan,
        run.failures,
        jobs.Saved(options.checkpoints).files(run, build, rank),
        parts=run.path / PARTS,
        anew=options.force and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0",
        started_s=options.started_s,
    )
    if rank == 0:
        where = f"attempt {len(attempt.log.attempts) - 1} begins before step {attempt.first_step}"
        print(f"{run.plan.name}: {where}", flush=True)  # noqa: T201 (the terminal of a run)
        (run.path / run_directory.PARTIAL).unlink(missing_ok=True)
    return attempt


def _one_among_simulated(run: RunDirectory, build: jobs.Build | None, options: SimpleNamespace) -> None:
    """Perform a run on one real rank among simulated peers, and write its trace."""
    _check_not_measured(run, options)
    device = choose_device(options.device)
    program = _program(options.rank, device, run, build, options)
    simulated, peers = jobs.simulate_peers(run, options.rank)
    done = perform_among_simulated(run.plan, run.delays, program, peers, device=device, channels=options.channels)
    source = f"real rank {options.rank}, peers simulated, on {device.type}, {program.name}"
    trace = replace(trace_of_rank(simulated, options.rank, done.times_s, done.ends_s, source), run=done.report.run)
    _save(run, trace, done.report, None, None)
    print(_summary(run, trace, done.report), flush=True)  # noqa: T201 (the terminal of a run)


def _open_input(
    stack: ExitStack, connection: Connection, run: RunDirectory, options: SimpleNamespace
) -> InputReader | None:
    """Open the data set, if there is one to read; all ranks take part."""
    if options.data is None or run.plan.dataset is None:
        return None
    rank = connection.place.rank
    wanted = DataOptions(options.data, options.cache, cold=not run.plan.dataset.warm, timeout_s=options.timeout_s)
    tally = Tally(sum(1 for _ in run.plan.loads()), tally_path(run.path / PARTS, rank))
    failed = connection.guard.failed
    return stack.enter_context(open_input(run.plan, wanted, rank=rank, others=connection, failed=failed, tally=tally))


def _count(connection: Connection, run: RunDirectory, source: InputReader | None) -> "_Counted | None":
    """Bring together what the ranks have read; all take part, rank 0 gets it."""
    if source is None:
        return None
    with connection.guard.explaining(f"{run.plan.name}: bringing together what was read"):
        rows = gather_tallies(source.tally)
    return None if rows is None else _Counted(reads_of(rows, run.plan), totals(rows))


@dataclass(frozen=True, slots=True)
class _Counted:
    """The reads of all ranks, and the sums."""

    reads: Reads
    totals: Mapping[str, int]


def _agree(connection: Connection, run: RunDirectory, options: SimpleNamespace) -> None:
    """Refuse ranks that were given different runs: with other delays, say, the trace would tell of none of them."""
    for name, value in _identity(run, options).items():
        connection.agree(name, value)


def _identity(run: RunDirectory, options: SimpleNamespace) -> dict[str, str]:
    """Return what all ranks must have in common, by its name."""
    contents = run_directory.contents(run.scenario, run.plan, run.delays, run.failures)
    given = {"data": options.data, "checkpoints": options.checkpoints}
    traits = "".join(f" with {name}" for name, value in given.items() if value)
    program = f"{options.program} {_precision(run, options)}{traits}"
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()} | {"program": program}


def _precision(run: RunDirectory, options: SimpleNamespace) -> Precision:
    """Return the precision of a model: the one asked for, or that of the workload."""
    asked: Precision | None = options.precision
    return asked or run.scenario.workload.precision


def _save(
    run: RunDirectory, trace: Trace, report: RunReport, counted: _Counted | None, links: str | None
) -> tuple[Trace, RunReport]:
    """Write what a run leaves; return the trace and the whole report."""
    whole = replace(report, reads=counted.totals if counted else None, links=links)
    run_directory.save_measured(run.path, trace, report=whole.dumps(), reads=counted.reads if counted else None)
    for name in run_directory.MEASURED:
        for torn in run.path.glob(f".{name}.*.part"):  # of writers that were killed
            torn.unlink(missing_ok=True)
    for name in (run_directory.PARTIAL, run_directory.PARTIAL_READS):
        (run.path / name).unlink(missing_ok=True)
    return trace, whole


def _failure(connection: Connection, run: RunDirectory, error: Exception) -> RunError:
    """Tell the other ranks, keep what was done, and return the error for this rank to end with."""
    explained = error if isinstance(error, RunError) else RunError(f"{run.plan.name}: {type(error).__name__}: {error}")
    with _undisturbed():
        connection.guard.fail(str(explained))
    return RunError(f"{explained}{_keep(run)}")


def _keep(run: RunDirectory) -> str:
    """Save the times of what was done; return how that went, to end a sentence with."""
    try:
        with _undisturbed():
            path = _rescue(run)
    except RunError as error:
        return f"; what was done is still in {run.path / PARTS}, and the next start keeps it ({error})"
    return f"; what was done is in {path}" if path else ""


def _rescue(run: RunDirectory) -> Path | None:
    """Save the times that ranks have noted in a run that has ended; return where, None if there are none."""
    parts = run.path / PARTS
    trace = salvage(parts, run.plan)
    if trace is None:
        return None
    rows = salvage_tallies(parts, run.plan)
    reads = None if rows is None else reads_of(rows, run.plan)
    run_directory.save_measured(run.path, trace, report=None, reads=reads)
    return run.path / run_directory.PARTIAL


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore the signals by which torchrun and Ctrl-C end all ranks: this one ends already."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _summary(run: RunDirectory, trace: Trace, report: RunReport) -> str:
    step = format_seconds(trace.makespan_s / run.plan.n_steps)
    ranks = f"{run.plan.world_size} ranks" if trace.real_rank is None else f"1 of {run.plan.world_size} ranks"
    return (
        f"{run.plan.name}: {ranks}, {run.plan.n_steps} steps, {step} a step ({trace.source}); "
        f"tracing took {100 * report.tracing_share:.2g} %{_read(report)}; wrote {run.path / run_directory.REAL}"
    )


def _read(report: RunReport) -> str:
    if report.reads is None:
        return ""
    by_level = {name: report.reads[f"samples_from_{name}"] for name in LEVELS}
    read = ", ".join(f"{count:,} from {name}" for name, count in by_level.items() if count)
    elsewhere = report.reads["samples_not_as_planned"]
    return f"; read {read or 'nothing'}" + (f" ({elsewhere:,} elsewhere than planned)" if elsewhere else "")
