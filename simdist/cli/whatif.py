"""`simdist whatif`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from simdist.cli import inputs
from simdist.cli.session import Session
from simdist.cli.whatif_document import gains_document, slowdown_document
from simdist.cli.whatif_jobs import Job, Wanted, read_job, schedules_of
from simdist.cli.whatif_text import spread_sentence, verdict_sentence, whatif_text
from simdist.cost import price
from simdist.engines.replay import timing
from simdist.errors import RunError, TraceError
from simdist.progress import ProgressBar
from simdist.scenario import Scenario
from simdist.schedules import Schedule
from simdist.settings.units import format_seconds
from simdist.whatif.gains import Gains, gains
from simdist.whatif.pattern import pattern
from simdist.whatif.recording import measured_delays, only_steps, with_recording
from simdist.whatif.slowdown import Slowdown, slowdown

__all__ = ["Wanted", "whatif"]

_REPLAY_ERROR = 0.01
_SIMULATION_ERROR = 0.1


def whatif(session: Session, name: str, wanted: Wanted) -> None:
    """Print what stragglers cost a job, who and what they are, and what other schedules would gain.

    Args:
        session: This run of the command line.
        name: A run directory, or a directory with several, or a scenario.
        wanted: The options.
    """
    inputs.check_picture(wanted.plot)
    with ProgressBar(sys.stderr) as bar:
        bar.update("read", 0, None)
        job = read_job(session, name, wanted)
        schedules = schedules_of(session, job, wanted.schedules) if wanted.n_runs else ()
        found = _slowdown(job, wanted.steps, bar)
        compared = _gains(job, schedules, wanted, bar) if schedules else None
    _warn(session, job, found, compared)
    _print(session, job, found, compared, wanted)
    if wanted.plot:
        _draw(session, job, found, wanted.plot)


def _print(session: Session, job: Job, found: Slowdown, compared: Gains | None, wanted: Wanted) -> None:
    spread = pattern(found)
    document: dict[str, object] = {"job": job.name, "schedule": job.baseline.name, "trace": job.trace.source}
    document |= slowdown_document(found, spread)
    document["stragglers"] = spread_sentence(found, spread)
    document["cluster"] = wanted.cluster
    document["gains"] = gains_document(compared) if compared else None
    document["verdict"] = verdict_sentence(found, spread, compared) if compared else None
    n_steps = job.trace.plan.n_steps
    text = whatif_text(job.baseline.name, job.trace.source, found, spread, compared, n_planned_steps=n_steps)
    session.result(document, text)


def _slowdown(job: Job, steps: range | None, bar: ProgressBar) -> Slowdown:
    def progress(done: float, total: float) -> None:
        bar.update("replay", done, total)

    try:
        return slowdown(job.trace, ranks_per_node=job.scenario.cluster.gpus_per_node, steps=steps, progress=progress)
    except TraceError as error:
        raise TraceError(f"{job.run.path if job.run else job.name}: {error}") from None


def _gains(job: Job, schedules: Sequence[Schedule], wanted: Wanted, bar: ProgressBar) -> Gains:
    """Compare schedules under what disturbed the job; a recording of that is needed only meanwhile."""
    n_total = len(schedules) + 1
    labels = [job.baseline.name, *(schedule.name for schedule in schedules)]

    def progress(label: str, done: int, total: int) -> None:
        bar.update(label, labels.index(label) + done / total, n_total)

    try:
        with TemporaryDirectory(prefix="simdist-") as folder, inputs.naming(job.name):
            return gains(
                _disturbed(job, wanted, Path(folder)),
                schedules,
                baseline=job.baseline,
                n_runs=wanted.n_runs,
                block_steps=wanted.block_steps,
                progress=progress,
            )
    except OSError as error:
        raise RunError(f"no temporary directory: {error.strerror or error}; set TMPDIR") from None


def _disturbed(job: Job, wanted: Wanted, folder: Path) -> Scenario:
    """Return the scenario in which schedules are compared; that of a run replays what disturbed the run."""
    if job.run is None:
        return job.scenario
    n_steps = job.trace.plan.n_steps
    steps = range(n_steps)[wanted.steps.start : wanted.steps.stop] if wanted.steps else range(n_steps)
    if job.is_measured:
        costs = price(job.trace.plan, job.scenario.cluster, job.scenario.workload)
        late_s = measured_delays(job.trace, timing(job.trace), costs)
    else:
        late_s = dict(job.run.delays)
    scenario = with_recording(job.scenario, only_steps(late_s, steps), folder)
    return scenario if wanted.seed is None else scenario.changed(seed=wanted.seed)


def _warn(session: Session, job: Job, found: Slowdown, compared: Gains | None) -> None:
    """Tell where numbers that should be the same are not."""
    traced, replayed = format_seconds(found.traced_s), format_seconds(found.replayed_s)
    if abs(found.replayed_s - found.traced_s) > _REPLAY_ERROR * found.traced_s:
        session.say(
            f"warning: {job.name}: the trace contradicts its plan: replayed {replayed} per step, traced {traced}"
        )
    if compared is None:
        return
    if compared.remark:
        session.say(f"warning: {job.name}: {compared.remark}")
    if not job.is_measured:
        return
    if abs(compared.baseline_step_s - found.traced_s) > _SIMULATION_ERROR * found.traced_s:
        session.say(
            f"warning: {job.name}: {compared.baseline} takes {traced} per step as measured, "
            f"{format_seconds(compared.baseline_step_s)} as simulated: the speed-ups are those of the simulation; "
            f"`simdist validate` shows which operations differ"
        )


def _draw(session: Session, job: Job, found: Slowdown, plot: Path) -> None:
    from simdist.report import save
    from simdist.report.stragglers import stragglers_figure

    save(stragglers_figure(found, title=f"{Path(job.name).name}: {job.baseline.name}"), plot)
    session.wrote(plot)
