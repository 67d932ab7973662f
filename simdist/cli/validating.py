"""`simdist validate`."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from simdist.cli import inputs
from simdist.cli.data import Loading, compared, reads_text
from simdist.cli.data_text import errors_text
from simdist.cli.session import Session
from simdist.cli.validation_text import summary_text, validation_text
from simdist.errors import ScenarioError, TraceError
from simdist.progress import ProgressBar
from simdist.runs import run_directory
from simdist.runs.calibrated import Calibrated, simulate_run
from simdist.runs.run_directory import RunDirectory
from simdist.studies.ranking import Summary, summarize
from simdist.studies.validation import Validation
from simdist.studies.validation import validate as validate_traces
from simdist.traces.trace import Trace


@dataclass(frozen=True)
class _Validated:
    """A run, both traces of it, and how they compare."""

    run: RunDirectory
    real: Trace
    simulated: Trace
    validation: Validation
    loading: Loading | None


def validate(session: Session, name: str, *, cluster: Path | None, label: str | None, plot: Path | None) -> None:
    """Compare what was measured with a simulation of the same plans and delays, print and draw it.

    Args:
        session: This run of the command line.
        name: A run directory, or a directory with several.
        cluster: A cluster file to simulate instead of the cluster of the scenario; then nothing is written.
        label: Only this schedule.
        plot: What to draw into.
    """
    inputs.check_picture(plot)
    with ProgressBar(sys.stderr) as bar:
        bar.update("read the traces", 0, None)
        calibrated = Calibrated.read(cluster) if cluster else None
        runs = _measured(session, name, inputs.read_runs(name, label))
        _warn_of_other_scenarios(session, runs)
        done = list(_validate(session, runs, calibrated, bar))
    validations = [each.validation for each in done]
    summary = summarize(validations, baseline=_baseline(runs)) if len(done) > 1 else None
    texts = [_text(each, cluster) for each in done] + ([summary_text(summary)] if summary else [])
    document = {
        "run": name,
        "cluster": str(cluster) if cluster else None,
        "rows": [_document(each) for each in done],
        "summary": _summary_document(summary) if summary else None,
    }
    session.result(document, "\n\n\n".join(texts))
    if plot:
        _draw(session, done, plot)


def _measured(session: Session, name: str, runs: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Return the runs that were measured; tell of the others."""
    missing = {run.path: problem for run in runs if (problem := _missing(run))}
    if len(missing) == len(runs):
        path, problem = next(iter(missing.items()))
        more = f"; nor has any other run in {name}" if len(runs) > 1 else ""
        raise ScenarioError(f"{path}: {problem}{more}")
    for path, problem in missing.items():
        session.say(f"warning: {path}: {problem}; left out")
    return [run for run in runs if run.path not in missing]


def _warn_of_other_scenarios(session: Session, runs: Sequence[RunDirectory]) -> None:
    """Speed-ups between different models or machines say nothing of schedules."""
    first, *others = runs
    for other in others:
        ours, theirs = ((run.scenario.cluster, run.scenario.workload) for run in (first, other))
        if ours != theirs:
            session.say(
                f"warning: {other.path}: other machines or another model than {first.path}: speed-ups mean little"
            )


def _missing(run: RunDirectory) -> str | None:
    """Say what to do if a run was not measured to its end."""
    if (run.path / run_directory.REAL).exists():
        return None
    how = inputs.measure_command(run.path, run.plan.world_size)
    if (run.path / run_directory.PARTIAL).exists():
        return f"has only {run_directory.PARTIAL}, of a run that ended early; `{how}` measures all of it"
    return f"has no {run_directory.REAL}: it was not measured yet; `{how}` does it"


def _validate(
    session: Session, runs: Sequence[RunDirectory], calibrated: Calibrated | None, bar: ProgressBar
) -> Iterator[_Validated]:
    for number, run in enumerate(runs):
        path = run.path / run_directory.REAL
        real = run_directory.read_trace(path, plan=run.plan)
        if not real.source.startswith("real"):
            raise TraceError(
                f"{path}: is {real.source!r}, and no measurement: `simdist validate` needs one; move it away"
            )
        bar.update(f"simulate {run.plan.name}", number, len(runs))
        simulated = _simulated(session, run, calibrated, real)
        try:
            validation = validate_traces(real, simulated, run.delays)
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None
        if validation.n_steps < run.plan.n_steps:
            session.say(f"warning: {path}: only {validation.n_steps} of {run.plan.n_steps} steps were finished")
        loading = compared(run, simulated, real) if run.plan.dataset else None
        yield _Validated(run, real, simulated, validation, loading)


def _simulated(session: Session, run: RunDirectory, calibrated: Calibrated | None, real: Trace) -> Trace:
    """Simulate a run, with its own cluster or with one from a file; write the trace if it is the first of its own."""
    trace = simulate_run(run, calibrated, real=real)
    kept = run.path / run_directory.SIMULATED
    if calibrated:
        return trace
    if not kept.exists():
        run_directory.save_trace(trace, kept)
        session.wrote(kept)
    elif _differ(trace, run_directory.read_trace(kept, plan=run.plan)):
        session.say(
            f"warning: {kept}: is not what {run_directory.SCENARIO} and {run_directory.DELAYS} give now; "
            "simulated afresh for this; "
            f"`simdist simulate {run.path}` replaces it"
        )
    return trace


def _differ(a: Trace, b: Trace) -> bool:
    return not bool((abs(a.difference_s(b)) <= 1e-9 * a.makespan_s).all())


def _baseline(runs: Sequence[RunDirectory]) -> str:
    """Return the label of the run that is called `sync`; else of the first that is synchronous SGD, or of the first."""
    names = [run.plan.name for run in runs]
    if "sync" in names:
        return "sync"
    return next((run.plan.name for run in runs if run.scenario.schedules[0].kind == "sync"), names[0])


def _document(each: _Validated) -> dict[str, object]:
    found = each.validation
    document = {
        "schedule": found.schedule,
        "run": str(each.run.path),
        "digest": each.run.plan.digest(),
        "source": found.source,
        "simulated_by": each.simulated.source,
        "steps": found.n_steps,
        "world_size": each.run.plan.world_size,
        "simulated_s": found.simulated_s,
        "measured_s": found.measured_s,
        "error": found.error,
        "kinds": [asdict(kind) for kind in found.kinds],
        "injections": [asdict(injection) for injection in found.injections],
        "blames": [asdict(blame) for blame in found.blames],
        "correlation": found.correlation,
        "overlap": found.overlap,
        "verdict": found.verdict,
    }
    return document | (_loading_document(each.loading) if each.loading else {})


def _loading_document(loading: Loading) -> dict[str, object]:
    return {
        "epochs": [asdict(error) for error in loading.errors],
        "hits_identical": loading.hits_identical,
        "hits_differences": loading.differences,
    }


def _text(each: _Validated, cluster: Path | None) -> str:
    machines = str(cluster) if cluster else f"the cluster of {each.run.path / run_directory.SCENARIO}"
    plan = each.run.plan
    counts = {"world_size": plan.world_size, "n_planned_steps": plan.n_steps}
    text = validation_text(each.validation, **counts, machines=machines)
    return "\n".join([text, errors_text(each.loading.errors), reads_text(each.loading)]) if each.loading else text


def _summary_document(summary: Summary) -> dict[str, object]:
    found = summary.order
    return {
        "baseline": summary.baseline,
        "rows": [asdict(row) for row in summary.rows],
        "n_clear_pairs": found.n_pairs,
        "n_right_pairs": len(found.right),
        "wrong_pairs": found.wrong,
        "unmeasured_pairs": found.unmeasured,
        "order_agrees": len(found.right) == found.n_pairs,
        "median_error": summary.median_error,
        "worst_error": summary.worst_error,
    }


def _draw(session: Session, done: Sequence[_Validated], plot: Path) -> None:
    """Draw the first steps of each run, into `plot` or, of several, into files with the label before the suffix."""
    from simdist.report import comparison_figure, save

    for each in done:
        label = each.validation.schedule
        path = plot if len(done) == 1 else plot.with_name(f"{plot.stem}-{label}{plot.suffix}")
        n_steps = min(4, each.validation.n_steps)
        save(comparison_figure(each.simulated, each.real, n_steps=n_steps), path)
        session.wrote(path)
