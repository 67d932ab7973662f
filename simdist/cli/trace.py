"""`simdist trace`.

Columns:
    trace, chrome (str): File read; file written, in the Trace Event Format.
    plan, digest (str): Name and digest of the plan.
    source (str): Program that wrote the trace.
    steps, world_size (int): Steps and ranks.
    makespan_s (float): Until the last operation is done.
    late_steps (object): Only of schedules that drop late ranks: rank -> steps in which it was too late.
"""

import sys
from collections import Counter
from pathlib import Path

import click

from simdist.cli import common, inputs
from simdist.errors import ScenarioError
from simdist.plan.walk import drops_late
from simdist.runs import run_directory
from simdist.settings.base import picked
from simdist.studies.run_collectives import no_trace, run_collectives
from simdist.traces.chrome import chrome_trace, write_chrome
from simdist.traces.trace import Trace


@click.command("trace")
@click.argument("run", metavar="RUN|TRACE.npz", type=common.path_type)
@click.option("--chrome", type=common.path_type, metavar="FILE", help="Write JSON for Perfetto.")
@click.option("--collectives", is_flag=True, help="Show what collectives achieved, in the columns of nccl-tests.")
@common.schedule
@common.which_trace
@click.option("--steps", metavar="A:B", callback=common.slice_of_steps, help="Only steps A to B - 1.")
@click.option("--open", "opens", is_flag=True, help="Open FILE in Perfetto, which reads it from this machine.")
@common.options
def command(
    session: common.CliSession,
    run: Path,
    *,
    chrome: Path | None,
    collectives: bool,
    schedule: str | None,
    which: str | None,
    steps: range | None,
    opens: bool,
) -> None:
    """Convert a trace for viewers, or show its collectives.

    `--open` opens FILE in https://ui.perfetto.dev, without sending it anywhere. With --collectives, RUN may hold
    several runs; the time that members wait for the last one has a column of its own.
    """
    if collectives:
        common.refuse_beside("--collectives", "chrome", "which", "steps", "opens")
        _show_collectives(session, str(run), schedule)
        return
    common.refuse_beside("--chrome", "schedule")
    if chrome is None:
        raise click.UsageError("write --chrome FILE, or --collectives")
    with session.bar() as bar:
        bar.update("read the trace", 0, None)
        path, loaded = _load(run, which)
        counts = path.parent / run_directory.REAL_READS
        is_counted = path.name == run_directory.REAL and counts.exists() and loaded.plan.dataset is not None
        reads = run_directory.read_reads(counts, plan=loaded.plan) if is_counted else None
        n_steps = loaded.plan.n_steps
        if steps is not None and steps.stop == sys.maxsize:
            steps = range(steps.start, max(n_steps, steps.start + 1))
        bar.update("write it for viewers", 0, None)
        write_chrome(chrome, chrome_trace(loaded, steps=steps, reads=reads))
    session.wrote(chrome)
    document = {
        "trace": str(path),
        "chrome": str(chrome),
        "plan": loaded.plan.name,
        "digest": loaded.plan.digest(),
        "steps": n_steps,
        "world_size": loaded.plan.world_size,
        **picked(loaded, "source", "makespan_s"),
    }
    late = Counter(rank for row in drops_late(loaded.plan) for rank in loaded.late.get(row, ()))
    if late:
        document["late_steps"] = {str(rank): n_late for rank, n_late in sorted(late.items())}
    said = "".join(f"\nrank {rank} was late in {n_late} of {n_steps} steps" for rank, n_late in sorted(late.items()))
    session.result(document, f"{path}, {loaded.source}: open {chrome} in https://ui.perfetto.dev{said}")
    if opens:
        from simdist.cli.opening import open_in_perfetto

        open_in_perfetto(session, chrome)


def _show_collectives(session: common.CliSession, name: str, schedule: str | None) -> None:
    with session.bar() as bar:
        bar.update("read the traces", 0, None)
        runs = inputs.usable(session, name, inputs.read_runs(name, schedule), no_trace)
        found = []
        for number, each in enumerate(runs):
            bar.update(f"collectives of {each.plan.name}", number, len(runs))
            found.append(run_collectives(each))
    document = {"run": name, "rows": [each.document() for each in found]}
    session.result(document, "\n\n\n".join(each.text() for each in found))


def _load(path: Path, which: str | None) -> tuple[Path, Trace]:
    """Read a trace, or one in a run directory."""
    if not path.exists():
        raise ScenarioError(
            f"{path}: there is no such trace or run directory; `simdist simulate SCENARIO -o RUN` writes one"
        )
    if not path.is_dir():
        if which:
            raise ScenarioError(
                f"{path}: --trace {which} chooses a trace of a run directory; this is a file, so leave it out"
            )
        return path, run_directory.read_trace(path)
    runs = inputs.read_runs(str(path), None)
    if len(runs) > 1:
        raise ScenarioError(f"{path}: holds several runs; name one of {', '.join(str(each.path) for each in runs)}")
    file = inputs.required_trace(runs[0], which)
    return file, run_directory.read_trace(file, plan=runs[0].plan)
