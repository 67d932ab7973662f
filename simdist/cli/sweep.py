"""`simdist sweep`."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import click

from simdist.cli import common
from simdist.errors import ScenarioError
from simdist.jobs.dask import SYSTEMS, connected, jobs
from simdist.jobs.store import ROWS, damaged_text
from simdist.machine import n_cores
from simdist.settings.base import plural
from simdist.studies.remarks import of_table
from simdist.sweeps import InProcess, LocalPool, Sweep, Workers, load, sweep, write_plans
from simdist.sweeps.driver import SweepProgress
from simdist.sweeps.runs import check_number
from simdist.sweeps.table import RUNS

_LINE_S = 30.0


@click.command("sweep")
@click.argument("name", type=common.file_name, metavar="SWEEP")
@click.option(
    "-o", "--output", type=common.path_type, metavar="DIR", required=True, help="Append rows; resume from those in DIR."
)
@click.option(
    "--workers", type=click.IntRange(0, 10_000), help="Processes or jobs; 0: this process; one per core if omitted."
)
@click.option(
    "--scheduler",
    type=common.file_name,
    metavar="WHERE",
    help="Dask scheduler: tcp://HOST:PORT, a file, or slurm, pbs, lsf, sge, ...",
)
@click.option("--retry", is_flag=True, help="Recompute failed rows.")
@click.option("--plans", is_flag=True, help="Also write a run directory for every row, DIR/runs/POINT/LABEL.")
@common.options
def command(
    session: common.CliSession,
    name: str,
    *,
    output: Path,
    workers: int | None,
    scheduler: str | None,
    retry: bool,
    plans: bool,
) -> int:
    """Simulate all points that a SWEEP file describes.

    Each point is simulated for all schedules and seeds, with one process per core or on a Dask cluster, and its rows
    are appended to DIR. Rerun it after an interruption or with more values: existing rows are not computed again. If
    a row fails, its error is recorded, the other rows continue, and the exit code is 1.
    """
    what = load(name)
    if plans:
        check_number(what)
    last: SweepProgress | None = None
    try:
        with session.bar(line_every_s=_LINE_S) as bar, open_workers(session, workers, scheduler) as pool:

            def progress(state: SweepProgress) -> None:
                nonlocal last
                last = state
                bar.update(progress_text(what.name, state), state.n_done, state.n_all)

            outcome = sweep(what, output, workers=pool, retry=retry, progress=progress)
    except KeyboardInterrupt:
        if last and last.what == "rows":
            session.saved.append(f"{last.n_done:,} of {last.n_all:,} rows in {output / ROWS}")
        raise
    if outcome.damaged:
        session.say(f"warning: {damaged_text(output, outcome.damaged)}")
    session.remark(name, of_table(outcome.remarks, outcome.n_points))
    document = outcome.document()
    if plans:
        document["runs"] = _write_plans(session, what, output)
    session.result(document, outcome.text())
    if outcome.n_failed:
        session.say(
            f"error: {outcome.n_failed:,} of {outcome.n_rows:,} rows failed; all others are complete\n"
            f"`simdist results {output} --failed` shows why; to compute failed rows again, add --retry"
        )
    return int(outcome.n_failed > 0)


def progress_text(name: str, state: SweepProgress) -> str:
    """Say how far a sweep is.

    >>> progress_text("s", SweepProgress("rows", 510, 1010, n_new=500, n_failed=3))
    's: 510 of 1,010 rows, 3 failed'
    """
    failed = f", {state.n_failed:,} failed" if state.n_failed else ""
    return f"{name}: {state.n_done:,} of {state.n_all:,} {state.what}{failed}"


def _write_plans(session: common.CliSession, what: Sweep, output: Path) -> int:
    """Write run directories; return how many."""
    with session.bar() as bar:
        planned = write_plans(what, output, progress=lambda done, n: bar.update(f"{what.name}: plans", done, n))
    if planned.failed:
        n_failed = len(planned.failed)
        session.say(f"warning: {n_failed:,} {plural(n_failed, 'row')} without a run directory: {planned.failed[0]}")
    session.wrote(f"{len(planned.runs):,} run directories in {output / RUNS}")
    return len(planned.runs)


@contextmanager
def open_workers(session: common.CliSession, n_workers: int | None, scheduler: str | None) -> Iterator[Workers]:
    """Give what was asked for: processes of this machine, this one, a Dask cluster, or one of jobs."""
    if scheduler is None:
        n_processes = n_cores() if n_workers is None else n_workers
        if n_processes == 0:
            yield InProcess()
        else:
            with LocalPool(n_processes) as pool:
                yield pool
        return
    if n_workers is not None and scheduler not in SYSTEMS:
        raise ScenarioError("--workers: a running cluster has its own workers; leave it out")
    with _silent(session), _cluster(session, scheduler, n_workers or 1) as cluster:
        yield cluster


def _cluster(session: common.CliSession, scheduler: str, n_jobs: int) -> AbstractContextManager[Workers]:
    if scheduler not in SYSTEMS:
        return connected(scheduler)
    session.say(f"waiting for the first of {n_jobs} {plural(n_jobs, 'job')} of {scheduler}")
    return jobs(scheduler, n_jobs)


@contextmanager
def _silent(session: common.CliSession) -> Iterator[None]:
    """Keep Dask from logging: what matters of it becomes an error of ours."""
    logging.disable(logging.NOTSET if session.debug else logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
