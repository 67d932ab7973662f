"""`simdist validate`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from simdist.cli import common, inputs
from simdist.errors import TraceError, naming
from simdist.files import save_text
from simdist.progress import ProgressBar
from simdist.runs import run_directory
from simdist.runs.building import Built, price_of
from simdist.runs.calibrated import Calibrated, simulate_run, simulated_scenario
from simdist.scenario import dump_cluster
from simdist.studies.comparison import find_label, range_of_trace
from simdist.studies.epochs import compare_loading
from simdist.studies.held import with_links
from simdist.studies.ranking import summarize
from simdist.studies.validated_run import ValidatedRun, order_document, verdict_on_order
from simdist.studies.validation import corrected
from simdist.studies.validation import validate as validate_traces


@click.command("validate")
@common.run
@click.option("--cluster", type=common.path, metavar="FILE", help="Simulate this calibrated cluster instead.")
@click.option("--calibrate", type=common.path, metavar="FILE", help="Fit one overhead to this run; write the cluster.")
@common.schedule
@common.plot
@common.options
def command(
    session: common.Session,
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
        runs = inputs.usable(session, name, inputs.read_runs(name, schedule), _missing)
        _warn_of_other_scenarios(session, runs)
        if calibrate and len(runs) > 1:
            raise click.UsageError(f"--calibrate takes one run; {name} has {len(runs)}: choose one with --schedule")
        done = list(_validate(session, runs, calibrated, bar))
    validations = [each.validation for each in done]
    base = runs[find_label([(run.plan.name, run.scenario.schedules[0].kind) for run in runs], None) or 0]
    summary = summarize(validations, baseline=base.plan.name) if len(done) > 1 else None
    texts = [each.text(cluster) for each in done] + ([verdict_on_order(summary)] if summary else [])
    correction = _corrected(session, done[0], calibrated, calibrate) if calibrate else None
    texts += [f"corrected: {correction}; this run no longer tests it, other runs do"] if correction else []
    document = {
        "run": name,
        "cluster": str(cluster) if cluster else None,
        "corrected": correction,
        "rows": [each.document() for each in done],
        "summary": order_document(summary) if summary else None,
    }
    session.result(document, "\n\n\n".join(texts))
    if plot:
        from simdist.report import timeline_figure

        for each in done:
            figure = timeline_figure(each.simulated, each.real, n_steps=min(4, each.validation.n_steps))
            session.draw(figure, inputs.picture_path(plot, each.validation.schedule, len(done)))


def _corrected(session: common.Session, each: ValidatedRun, calibrated: Calibrated | None, file: Path) -> str:
    """Write the cluster in which the run takes what was measured; return what was changed."""
    if each.validation.n_steps < each.run.plan.n_steps:
        raise TraceError(f"{each.run.path}: the measurement is incomplete, so nothing is corrected: run it again")
    cluster, done = corrected(each.run, calibrated, each.real)
    save_text(file, dump_cluster(cluster))
    session.wrote(file)
    return done


def _warn_of_other_scenarios(session: common.Session, runs: Sequence[run_directory.RunDirectory]) -> None:
    """Speed-ups between different models or machines say nothing of schedules."""
    first, *others = runs
    for other in others:
        ours, theirs = ((run.scenario.cluster, run.scenario.workload) for run in (first, other))
        if ours != theirs:
            session.say(
                f"warning: {other.path}: other machines or another model than {first.path}: speed-ups mean little"
            )


def _missing(run: run_directory.RunDirectory) -> str | None:
    """Say what to do if a run was not measured to its end."""
    if (run.path / run_directory.REAL).exists():
        return None
    how = inputs.measure_command(run.path, run.plan.world_size, has_links=run.scenario.has_links)
    if (run.path / run_directory.PARTIAL).exists():
        return f"has only {run_directory.PARTIAL}, of a run that ended early; `{how}` measures all of it"
    return f"has no {run_directory.REAL}: it was not measured yet; `{how}` does it"


def _validate(
    session: common.Session, runs: Sequence[run_directory.RunDirectory], calibrated: Calibrated | None, bar: ProgressBar
) -> Iterator[ValidatedRun]:
    for number, run in enumerate(runs):
        path = run.path / run_directory.REAL
        real = run_directory.read_trace(path, plan=run.plan)
        if not real.source.startswith("real"):
            raise TraceError(
                f"{path}: is {real.source!r}, and no measurement: `simdist validate` needs one; move it away"
            )
        planned = run
        run = run_directory.as_measured(run, real)
        if left_out := run is not planned:
            session.say(f"warning: {path}: was measured without its disturbed links, so it is simulated without them")
        n_steps = run.plan.n_steps

        def progress(step: int, number: int = number, label: str = run.plan.name, n_steps: int = n_steps) -> None:
            bar.update(f"simulate {label}", number + step / n_steps, len(runs))

        progress(0)
        simulated = simulate_run(run, calibrated, real=real, progress=progress)
        bar.update(f"compare {run.plan.name}", 0, None)
        kept = run.path / run_directory.SIMULATED
        if not (calibrated or left_out or kept.exists()):
            run_directory.save_trace(simulated, kept)
            session.wrote(kept)
        with naming(str(path)):
            scenario = simulated_scenario(run, calibrated, real=real)
            costs = price_of(run.plan, scenario) if run.scenario.has_links else None
            real = with_links(run, real, costs) if costs else real
            validation = validate_traces(real, simulated, run.delays, costs)
            bounds = None
            if scenario.is_of_machines:
                built = Built(scenario.schedules[0], run.plan, costs or price_of(run.plan, scenario), 0)
                bounds = range_of_trace(scenario, built, simulated)
        if validation.n_steps < run.plan.n_steps:
            session.say(f"warning: {path}: only {validation.n_steps} of {run.plan.n_steps} steps were finished")
        loading = compare_loading(run, simulated, real) if run.plan.dataset else None
        range_s = bounds and (bounds[0] * validation.simulated_s, bounds[1] * validation.simulated_s)
        yield ValidatedRun(run, real, simulated, validation, loading, range_s)
