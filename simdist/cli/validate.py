"""`simdist validate`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from simdist.cli import common, inputs
from simdist.errors import TraceError
from simdist.files import save_text
from simdist.progress import ProgressBar
from simdist.runs import run_directory
from simdist.runs.calibrated import Calibrated
from simdist.scenario import dump_cluster
from simdist.studies.comparison import find_label
from simdist.studies.ranking import summarize
from simdist.studies.remarks import Remark, of_inputs
from simdist.studies.validated_run import SimulatedRun, ValidatedRun, order_document, validate_run, verdict_on_order
from simdist.studies.validation import corrected


@click.command("validate")
@common.run_argument
@click.option("--cluster", type=common.path_type, metavar="FILE", help="Simulate this calibrated cluster instead.")
@click.option(
    "--calibrate", type=common.path_type, metavar="FILE", help="Fit one overhead to this run; write the cluster."
)
@common.schedule
@common.plot_option
@common.options
def command(
    session: common.CliSession,
    name: str,
    *,
    cluster: Path | None,
    calibrate: Path | None,
    schedule: str | None,
    plot: Path | None,
) -> None:
    """Compare simulation and measurement.

    RUN holds trace.real.npz; `torchrun --nproc-per-node N -m real RUN` measures it. Errors are (simulated - measured) /
    measured.
    """
    inputs.check_picture(plot)
    with session.bar() as bar:
        bar.update("read the traces", 0, None)
        if calibrate and calibrate.exists():
            raise click.UsageError(f"--calibrate {calibrate}: exists; choose another file, or remove it")
        calibrated = Calibrated.read(cluster) if cluster else None
        found = inputs.read_runs(name, schedule)
        unmeasured = [run for run in found if not (run.path / run_directory.REAL).exists()]
        simulated = [SimulatedRun(run, reason) for run in unmeasured if (reason := run.only_simulated)]
        marked = {each.run.path for each in simulated}
        others = [run for run in found if run.path not in marked]
        runs = inputs.usable(session, name, others, _missing) if others else []
        unlike = _unlike(runs)
        session.remark("", unlike)
        if calibrate and not runs:
            raise click.UsageError(f"--calibrate: {simulated[0].text()}")
        if calibrate and len(runs) > 1:
            raise click.UsageError(f"--calibrate takes one run; {name} has {len(runs)}: choose one with --schedule")
        done = list(_validate(session, runs, calibrated, bar))
    validations = [each.validation for each in done]
    summary = summarize(validations, baseline=_baseline(runs)) if len(done) > 1 else None
    texts = [each.text(cluster) for each in done] + ([verdict_on_order(summary)] if summary else [])
    texts += [each.text() for each in simulated]
    correction = _corrected(session, done[0], calibrated, calibrate) if calibrate else None
    texts += [f"corrected: {correction}; this run no longer tests it, other runs do"] if correction else []
    document = {
        "run": name,
        "cluster": str(cluster) if cluster else None,
        "corrected": correction,
        "rows": [*(each.document() for each in done), *(each.document() for each in simulated)],
        "summary": order_document(summary, unlike) if summary else None,
    }
    session.result(document, "\n\n\n".join(texts))
    if plot:
        from simdist.report import timeline_figure

        for each in done:
            figure = timeline_figure(each.simulated, each.real, n_steps=min(4, each.validation.n_steps))
            session.draw(figure, inputs.picture_path(plot, each.validation.schedule, len(done)))


def _baseline(runs: Sequence[run_directory.RunDirectory]) -> str:
    """Return the label of the run that speed-ups are over."""
    return runs[find_label([(run.plan.name, run.scenario.schedules[0].kind) for run in runs], None) or 0].plan.name


def _corrected(session: common.CliSession, each: ValidatedRun, calibrated: Calibrated | None, file: Path) -> str:
    """Write the cluster in which the run takes what was measured; return what was changed."""
    if each.validation.n_steps < each.run.plan.n_steps:
        raise TraceError(f"{each.run.path}: the measurement is incomplete, so nothing is corrected: run it again")
    cluster, done = corrected(each.run, calibrated, each.real)
    save_text(file, dump_cluster(cluster))
    session.wrote(file)
    return done


def _unlike(runs: Sequence[run_directory.RunDirectory]) -> list[Remark]:
    """Return remarks on runs of other machines or models: speed-ups between these say nothing of schedules."""
    if not runs:
        return []
    first, *others = runs
    machines = first.scenario.cluster, first.scenario.workload
    unlike = [each for each in others if (each.scenario.cluster, each.scenario.workload) != machines]
    than = f"other machines or another model than {first.path}: speed-ups mean little"
    return [Remark("input", f"{each.path}: {than}") for each in unlike]


def _missing(run: run_directory.RunDirectory) -> str | None:
    """Say what to do if a run was not measured to its end."""
    if (run.path / run_directory.REAL).exists():
        return None
    how = inputs.measure_command(run.path, run.plan.world_size, has_links=run.scenario.has_links)
    if (run.path / run_directory.PARTIAL).exists():
        return f"has only {run_directory.PARTIAL}, of a run that ended early; `{how}` measures all of it"
    return f"has no {run_directory.REAL}: it was not measured yet; `{how}` does it"


def _validate(
    session: common.CliSession,
    runs: Sequence[run_directory.RunDirectory],
    calibrated: Calibrated | None,
    bar: ProgressBar,
) -> Iterator[ValidatedRun]:
    for number, run in enumerate(runs):
        n_steps = run.plan.n_steps

        def progress(step: int, n_steps: int, number: int = number, label: str = run.plan.name) -> None:
            bar.update(f"simulate {label}", number + step / n_steps, len(runs))

        progress(0, n_steps)
        found = validate_run(run, calibrated, progress=progress)
        session.remark(str(run.path), of_inputs(found.remarks))
        kept = run.path / run_directory.SIMULATED
        if not (calibrated or found.run is not run or kept.exists()):
            run_directory.save_trace(found.simulated, kept)
            session.wrote(kept)
        yield found
