"""`simdist simulate`."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simdist.cli import inputs
from simdist.cli.session import Session
from simdist.cli.tables import seconds_in_state, table_text
from simdist.cost import Costs, price
from simdist.engines import Engine, fast
from simdist.engines import simulate as simulate_plan
from simdist.errors import UnsupportedError
from simdist.plan import Plan
from simdist.plan.delays import Delays
from simdist.progress import ProgressBar
from simdist.runs import run_directory
from simdist.runs.building import build, delay_sampler, delays, job
from simdist.scenario import Scenario
from simdist.traces.breakdown import STATES, Breakdown, break_down
from simdist.traces.trace import Trace


@dataclass(frozen=True)
class _Run:
    """A plan to simulate, and where its trace goes.

    Args:
        label: The schedule's label.
        scenario: What it is from.
        plan: What to simulate.
        costs: Its price list.
        delays: What to inject; None if no trace is wanted, then those of the scenario's seed are drawn on the way.
        path: The run directory that gets the trace, if any.
    """

    label: str
    scenario: Scenario
    plan: Plan
    costs: Costs
    delays: Delays | None
    path: Path | None


@dataclass(frozen=True)
class _Simulated:
    """Where the time went, by which engine, and the trace if it kept one."""

    where: Breakdown
    engine: str
    trace: Trace | None


def simulate(
    session: Session,
    name: str,
    *,
    engine: Engine,
    output: Path | None,
    label: str | None,
    plot: Path | None,
    force: bool,
) -> None:
    """Simulate plans, print where the time of a step goes, write and draw the traces."""
    inputs.check_picture(plot)
    if Path(name).is_dir():
        runs = _from_directory(session, name, output=output, label=label, force=force)
    else:
        traced = output is not None or plot is not None
        runs = _from_scenario(session, name, output=output, label=label, force=force, traced=traced)
    rows: list[dict[str, object]] = []
    traces: list[tuple[str, Trace]] = []
    with ProgressBar(sys.stderr) as bar:
        for run in runs:
            with inputs.naming(f"{name}: {run.label}"):
                done = _simulate_one(run, engine, bar)
            if run.path and done.trace:
                run_directory.save_trace(done.trace, run.path / run_directory.SIMULATED)
                session.wrote(run.path / run_directory.SIMULATED)
            rows.append(_row(run, done))
            traces += [(run.label, done.trace)] if plot and done.trace else []
    title = f"{Path(name).name}: seconds per step, averaged over ranks"
    header = ("schedule", "step time", *STATES, "engine")
    session.result(
        {"scenario": name, "rows": rows},
        table_text(title, header, [_cells(row) for row in rows], words=("schedule", "engine")),
    )
    if plot:
        _draw(session, traces, plot)


def _from_scenario(
    session: Session, name: str, *, output: Path | None, label: str | None, force: bool, traced: bool
) -> Iterator[_Run]:
    scenario = inputs.read_scenario(session, name)
    schedules = inputs.choose(scenario, label, where=name)
    paths = inputs.targets(output, schedules) if output else [None] * len(schedules)
    drawn = delays(scenario) if traced else None
    for schedule, path in zip(schedules, paths, strict=True):
        with inputs.naming(name):
            built = build(scenario, schedule)
        if path and drawn is not None:
            run_directory.write(
                path, scenario.model_copy(update={"schedules": (schedule,)}), built.plan, drawn, force=force
            )
            session.saved.append(str(path))
        yield _Run(schedule.name, scenario, built.plan, built.costs, drawn, path)


def _from_directory(
    session: Session, name: str, *, output: Path | None, label: str | None, force: bool
) -> Iterator[_Run]:
    found = inputs.read_runs(name, label)
    schedules = [each.scenario.schedules[0] for each in found]
    paths = inputs.targets(output, schedules) if output else [each.path for each in found]
    for each, schedule, path in zip(found, schedules, paths, strict=True):
        with inputs.naming(f"{name}: {schedule.name}"):
            costs = price(each.plan, each.scenario.cluster, each.scenario.workload)
        if output:
            run_directory.write(path, each.scenario, each.plan, each.delays, force=force)
            session.saved.append(str(path))
        yield _Run(schedule.name, each.scenario, each.plan, costs, each.delays, path)
        _warn_of_other_plan(session, each)


def _warn_of_other_plan(session: Session, run: run_directory.RunDirectory) -> None:
    """A plan may be written by hand; then it does not do what the scenario says, which is worth a word."""
    schedule = run.scenario.schedules[0]
    if schedule.plan(job(run.scenario)).digest() != run.plan.digest():
        file = run.path / run_directory.PLAN
        session.say(
            f"warning: {file}: is not the plan that {schedule.name} makes of the scenario; simulated as it stands"
        )


def _simulate_one(run: _Run, engine: Engine, bar: ProgressBar) -> _Simulated:
    n_steps = run.plan.n_steps

    def progress(step: int) -> None:
        bar.update(run.label, step, n_steps)

    progress(0)
    if run.delays is None and engine != "des":
        sampler = delay_sampler(run.scenario, [run.scenario.seed])
        try:
            where = fast.measure(run.plan, run.costs, sampler, n_seeds=1, progress=progress)
            return _Simulated(where, "fast", None)
        except UnsupportedError:
            if engine == "fast":
                raise
            engine = "des"
    injected = delays(run.scenario) if run.delays is None else run.delays
    trace = simulate_plan(run.plan, run.costs, injected, engine=engine, progress=progress)
    return _Simulated(break_down(trace), trace.source.removeprefix("simulated by "), trace)


def _row(run: _Run, done: _Simulated) -> dict[str, object]:
    return {
        "schedule": run.label,
        "step_s": float(done.where.step_s[0]),
        **{f"{state}_s": float(done.where.per_step_s(state)[0]) for state in STATES},
        "makespan_s": float(done.where.makespan_s[0]),
        "steps": run.plan.n_steps,
        "engine": done.engine,
        "digest": run.plan.digest(),
        "trace": str(run.path / run_directory.SIMULATED) if run.path else None,
    }


def _cells(row: dict[str, object]) -> list[str]:
    times = [row[f"{state}_s"] for state in ("step", *STATES)]
    return [str(row["schedule"]), *(seconds_in_state(float(str(time_s))) for time_s in times), str(row["engine"])]


def _draw(session: Session, traces: list[tuple[str, Trace]], plot: Path) -> None:
    """Draw the first steps of each trace, into `plot` or, of several, into files with the label before the suffix."""
    from simdist.report import save, timeline_figure

    for label, trace in traces:
        path = plot if len(traces) == 1 else plot.with_name(f"{plot.stem}-{label}{plot.suffix}")
        save(timeline_figure(trace), path)
        session.wrote(path)
