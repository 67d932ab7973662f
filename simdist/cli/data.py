"""`simdist data`."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from simdist.cli import inputs
from simdist.cli.data_text import both_text, epochs_text, knobs_text, limits_text
from simdist.cli.session import Session
from simdist.cost import Costs, price
from simdist.engines import Delays, simulate
from simdist.errors import ScenarioError
from simdist.plan import LEVELS, Plan
from simdist.progress import ProgressBar
from simdist.runs import run_directory
from simdist.runs.building import Built, build, delays
from simdist.runs.run_directory import RunDirectory
from simdist.scenario import Scenario
from simdist.schedules import Schedule
from simdist.studies.data_knobs import KnobEffects, Known, Progress, knob_effects, settings, what_to_write
from simdist.studies.epochs import Epoch, EpochError, Epochs, epoch_errors, find_epochs
from simdist.studies.limits import EpochLimits, epoch_limits
from simdist.traces.reads import Reads, differences, expected
from simdist.traces.trace import Trace

_LINE_S = 30.0


@dataclass(frozen=True)
class Loading:
    """How a plan reads its data, simulated and, if it was, measured.

    Args:
        simulated: The epochs of the simulation; those that were measured too, if any were.
        measured: The epochs of the measurement.
        errors: Of the simulated epochs.
        differences: In what the counts of the run differ from those of the plan, a sentence for each level; None if
            the run has no counts.
    """

    simulated: Epochs
    measured: Epochs | None = None
    errors: tuple[EpochError, ...] = ()
    differences: tuple[str, ...] | None = None

    @property
    def hits_identical(self) -> bool | None:
        """Whether every load read from the levels that the plan says; None if the run has no counts."""
        return None if self.differences is None else not self.differences


@dataclass(frozen=True)
class _Source:
    """A schedule whose loading is to be shown, and where it is from."""

    scenario: Scenario
    schedule: Schedule
    plan: Plan
    costs: Costs
    delays: Delays
    simulate: Callable[[Callable[[int], None]], Trace]
    run: RunDirectory | None


def data(session: Session, name: str, *, label: str | None, with_knobs: bool) -> None:
    """Print how schedules read their data, epoch by epoch, simulated and measured.

    Args:
        session: This run of the command line.
        name: A scenario, a run directory, or a directory with several.
        label: Only this schedule.
        with_knobs: Also simulate what would shorten the waiting for data.
    """
    rows: list[dict[str, object]] = []
    texts: list[str] = []
    known: Known = {}
    with ProgressBar(sys.stderr, line_every_s=_LINE_S) as bar:
        bar.update("read", 0, None)
        is_run = Path(name).is_dir()
        sources = list(_from_directory(session, name, label) if is_run else _from_scenario(session, name, label))
        for number, source in enumerate(sources):
            progress = _part(bar, number, len(sources))
            loading = _loading(session, source, None if with_knobs else progress)
            with inputs.naming(f"{name}: {source.schedule.name}"):
                turned = _effects(source, loading, known, progress) if with_knobs else None
            least = epoch_limits(source.plan, source.costs)
            rows.append(_document(source, loading, least, turned))
            texts.append(_text(source, loading, least, turned))
    session.result({"scenario": name, "rows": rows}, "\n\n\n".join(texts))


def _part(bar: ProgressBar, number: int, n_parts: int) -> Progress:
    """Return what shows the progress of one of several parts as that of the whole."""
    return lambda what, done, total: bar.update(what, number + done / total, n_parts)


def _from_scenario(session: Session, name: str, label: str | None) -> Iterator[_Source]:
    scenario = inputs.read_scenario(session, name)
    schedules = inputs.choose(scenario, label, where=name)
    drawn = delays(scenario)
    for schedule in schedules:
        with inputs.naming(name):
            built = build(scenario, schedule)
        if built.plan.dataset is None:
            raise ScenarioError(f"{name}: reads no data set, so it has no epochs: {what_to_write(scenario)}")

        yield _Source(scenario, schedule, built.plan, built.costs, drawn, _of_scenario(built, drawn), None)


def _of_scenario(built: Built, drawn: Delays) -> Callable[[Callable[[int], None]], Trace]:
    """Return what simulates a schedule."""
    return lambda progress: simulate(built.plan, built.costs, drawn, progress=progress)


def _from_directory(session: Session, name: str, label: str | None) -> Iterator[_Source]:
    runs = inputs.read_runs(name, label)
    reading = [run for run in runs if run.plan.dataset is not None]
    if not reading:
        raise ScenarioError(
            f"{name}: reads no data set, so it has no epochs: `simdist simulate` a scenario that has data"
        )
    for run in runs:
        if run.plan.dataset is None:
            session.say(f"warning: {run.path}: reads no data set; left out")
    for run in reading:
        with inputs.naming(str(run.path)):
            costs = price(run.plan, run.scenario.cluster, run.scenario.workload)
        schedule = run.scenario.schedules[0]
        yield _Source(run.scenario, schedule, run.plan, costs, run.delays, _of_run(run, costs), run)


def _of_run(run: RunDirectory, costs: Costs) -> Callable[[Callable[[int], None]], Trace]:
    """Return what reads the simulated trace of a run, or makes it if there is none."""

    def simulated(progress: Callable[[int], None]) -> Trace:
        path = run.path / run_directory.SIMULATED
        if path.exists():
            return run_directory.read_trace(path, plan=run.plan)
        with inputs.naming(str(run.path)):
            return simulate(run.plan, costs, run.delays, progress=progress)

    return simulated


def _loading(session: Session, source: _Source, report: Progress | None) -> Loading:
    def progress(step: int) -> None:
        if report:
            report(source.schedule.name, step, source.plan.n_steps)

    trace = source.simulate(progress)
    if source.run is None or not (source.run.path / run_directory.REAL).exists():
        return Loading(find_epochs(trace))
    real = run_directory.read_trace(source.run.path / run_directory.REAL, plan=source.plan)
    loading = compared(source.run, trace, real)
    if loading.measured and len(loading.measured.step_stall_s) < source.plan.n_steps:
        n_steps = len(loading.measured.step_stall_s)
        session.say(
            f"warning: {source.run.path / run_directory.REAL}: "
            f"only {n_steps} of {source.plan.n_steps} steps were finished"
        )
    return loading


def compared(run: RunDirectory, simulated: Trace, real: Trace) -> Loading:
    """Compare how a plan with a data set read its data in a simulation and in a real run.

    Args:
        run: Whose counts of what was read are taken, if it has any; else those of the plan.
        simulated: A trace of its plan.
        real: Another.
    """
    path = run.path / run_directory.REAL_READS
    wanted = expected(run.plan)
    found: Reads | None = run_directory.read_reads(path, plan=run.plan) if path.exists() else None
    measured = find_epochs(real, found or wanted)
    ours = find_epochs(simulated, wanted, n_steps=len(measured.step_stall_s))
    differing = None if found is None else differences(found, wanted)
    return Loading(ours, measured, epoch_errors(ours, measured), differing)


def _effects(source: _Source, loading: Loading, known: Known, progress: Progress) -> KnobEffects:
    """Turn the knobs of a schedule; all of a scenario have the same delays, so what is `known` of one holds for all."""
    if source.run:  # has delays of its own, and its trace may be of other machines
        return knob_effects(source.scenario, source.schedule, source.delays, progress=progress)
    known[settings(source.scenario, source.schedule)] = loading.simulated
    return knob_effects(source.scenario, source.schedule, source.delays, known=known, progress=progress)


def _text(source: _Source, loading: Loading, least: tuple[EpochLimits, ...], turned: KnobEffects | None) -> str:
    plan, simulated, measured = source.plan, loading.simulated, loading.measured
    dataset = plan.dataset
    assert dataset is not None
    per_epoch = dataset.steps_per_epoch(plan.world_size)
    sources = simulated.source + (f"; measured: {measured.source}" if measured else "")
    about = f"{plan.name}: {plan.world_size:,} ranks, {plan.n_steps:,} steps, {per_epoch:,} an epoch; {sources}"
    tables = both_text(simulated, measured, loading.errors) if measured else epochs_text(simulated)
    counts = [reads_text(loading)] if measured else []
    below = [limits_text(least, simulated, source.scenario.cluster.storage), *([knobs_text(turned)] if turned else [])]
    return "\n".join([about, tables, *counts, *(f"\n{text}" for text in below)])


def reads_text(loading: Loading) -> str:
    """Return whether a run read from the levels that the plan says, a line for each level where it did not."""
    match loading.differences:
        case None:
            return f"samples by level: the run has no {run_directory.REAL_READS}; shown is what the plan says"
        case ():
            return "samples by level: as the plan says, in every load on every rank"
        case lines:
            return "\n".join(f"samples by level: not as the plan says: {line}" for line in lines)


def _document(
    source: _Source, loading: Loading, least: tuple[EpochLimits, ...], turned: KnobEffects | None
) -> dict[str, object]:
    traces = {"simulated": loading.simulated, "measured": loading.measured}
    return {
        "schedule": source.schedule.name,
        "run": str(source.run.path) if source.run else None,
        "digest": source.plan.digest(),
        "traces": [_trace_document(which, found) for which, found in traces.items() if found],
        "errors": [asdict(error) for error in loading.errors],
        "hits_identical": loading.hits_identical,
        "hits_differences": loading.differences,
        "limits": [_limits_document(each) for each in least],
        "knobs": _knobs_document(turned) if turned else None,
    }


def _trace_document(which: str, found: Epochs) -> dict[str, object]:
    return {
        "which": which,
        "source": found.source,
        "staging_s": found.staging_s,
        "epochs": [_epoch_document(epoch) for epoch in found.epochs],
    }


def _epoch_document(epoch: Epoch) -> dict[str, object]:
    return {
        "epoch": epoch.number,
        "steps": epoch.n_steps,
        "seconds": epoch.seconds,
        "stall_s": epoch.stall_s,
        "stall_share": epoch.stall_share,
        "mean_stall_s": epoch.mean_stall_s,
        "hidden": epoch.is_hidden,
        "hits": epoch.hits,
        "samples": dict(zip(LEVELS, epoch.n_samples, strict=True)),
        "nbytes": dict(zip(LEVELS, epoch.nbytes, strict=True)),
    }


def _limits_document(each: EpochLimits) -> dict[str, object]:
    return {
        "epoch": each.epoch,
        "least_s": each.least_s,
        "limit": each.name,
        "least_s_by_limit": each.seconds,
        "storage_nbytes": each.storage_nbytes,
        "needed_Bps": each.needed_Bps,
    }


def _knobs_document(turned: KnobEffects) -> dict[str, object]:
    return {
        "seconds": turned.baseline.seconds,
        "waiting_s": turned.baseline.waiting_s,
        "effects": [asdict(effect) for effect in turned.effects],
        "missing": turned.missing,
    }
