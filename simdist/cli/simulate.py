"""`simdist simulate`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simdist.cli import common, inputs
from simdist.cost import Costs
from simdist.engines.choose import Engine
from simdist.engines.observers import Observer, WhereTimeWent
from simdist.engines.run import run
from simdist.errors import naming
from simdist.plan.delays import Delays, SeedDelays
from simdist.progress import ProgressBar
from simdist.runs import run_directory
from simdist.runs.building import delay_sampler
from simdist.runs.planned import PlannedSchedule
from simdist.runs.run_failures import step_failures
from simdist.studies import facets
from simdist.studies.columns import ENGINE, PLAIN_STEP_TIME, SCHEDULE, STATE_COLUMNS
from simdist.studies.facets import LINKS, Simulated
from simdist.studies.held import find_held, steady_held
from simdist.studies.known_delays import remarks_on_run
from simdist.studies.measuring import ScheduleTimes, times_of
from simdist.studies.remarks import Remark, below_table, documents
from simdist.studies.tables import facets_text, table_text
from simdist.traces.breakdown import Breakdown, HeldUp, break_down
from simdist.traces.trace import TIMES_OF_TRACE, Trace

if TYPE_CHECKING:
    from simdist.engines.alike import KindsRun
    from simdist.engines.des import EventRun
    from simdist.engines.vector import VectorRun

_COLUMNS = (SCHEDULE, PLAIN_STEP_TIME, *STATE_COLUMNS, ENGINE)


@dataclass(frozen=True)
class _Simulated:
    """Where the time went, by which engine and why, and the trace if it kept one."""

    where: Breakdown
    engine: str
    reason: str
    trace: Trace | None


class _Kept(Observer[_Simulated]):
    """Keeps the trace if it is wanted or made anyway."""

    of_one_seed = True

    def __init__(self, costs: Costs, held: HeldUp | None, *, wants_trace: bool) -> None:
        self._costs = costs
        self._wants_trace = wants_trace
        self.held = held
        self.n_arrays = len(TIMES_OF_TRACE) if wants_trace else 0

    def by_vectors(self, run: "VectorRun") -> _Simulated:
        if self._wants_trace:
            return self._with(run, run.trace(run.delays.seeds[0]))
        [where] = WhereTimeWent(self.held).by_vectors(run)
        return _Simulated(where, run.name, run.reason, None)

    def by_kinds(self, run: "KindsRun") -> _Simulated:
        return self._with(run, run.trace())

    def by_events(self, run: "EventRun") -> _Simulated:
        return self._with(run, next(run.traces()))

    def _with(self, run: "VectorRun | KindsRun | EventRun", trace: Trace) -> _Simulated:
        return _Simulated(break_down(trace, find_held(trace, self._costs)), run.name, run.reason, trace)


@click.command("simulate")
@common.scenario_or_run
@common.engine
@click.option("-o", "--output", type=common.path_type, metavar="RUN", help="Write a run directory with the trace.")
@common.schedule
@common.plot_option
@common.force
@common.options
def command(
    session: common.CliSession,
    name: str,
    *,
    engine: Engine,
    output: Path | None,
    schedule: str | None,
    plot: Path | None,
    force: bool,
) -> None:
    """Simulate, and show where the time of a step goes.

    Delays are drawn with the scenario's seed. A RUN is simulated as it is, and its trace is written into it. For a
    SCENARIO, -o writes run directories.
    """
    inputs.check_picture(plot)
    traced = output is not None or plot is not None
    rows: list[dict[str, Any]] = []
    measured: list[ScheduleTimes] = []
    traces: list[tuple[str, Trace]] = []
    of_scenarios: list[Remark] = []
    with session.bar() as bar:
        for planned in inputs.planned(session, name, schedule, output=output, draws=traced):
            label = planned.schedule.name
            path = _write(session, planned, force=force)
            with naming(f"{name}: {label}"):
                done = _simulate(planned, engine, bar)
            file = path / run_directory.SIMULATED if path else None
            if file and done.trace:
                bar.update(f"write the trace of {label}", 0, None)
                run_directory.save_trace(done.trace, file)
                session.wrote(file)
            times = times_of(label, done.engine, Simulated(planned.plan, (done.where,)), facets.FACETS)
            in_order = times.facets.changed(LINKS, done.where.links_per_step_s())  # in which they held ranks up
            times = replace(times, facets=in_order)
            measured.append(times)
            of_scenarios += remarks_on_run(planned.scenario)
            rows.append(_record(planned, times, done, file))
            traces += [(label, done.trace)] if plot and done.trace else []
    tables = [table_text(f"{Path(name).name}: seconds per step, averaged over ranks", _COLUMNS, rows)]
    tables += facets_text(measured, measured[0])
    remarks = [*dict.fromkeys((*of_scenarios, *facets.facet_remarks(None, measured)))]
    tables += [*below_table(remarks), *_reasons(rows, engine)]
    session.result({"scenario": name, "rows": rows, "remarks": documents(remarks)}, "\n\n".join(tables))
    if plot:
        from simdist.report import timeline_figure

        for label, trace in traces:
            session.draw(timeline_figure(trace), inputs.picture_path(plot, label, len(traces)))


def _write(session: common.CliSession, planned: PlannedSchedule, *, force: bool) -> Path | None:
    """Write the run directory that is asked for; return where the trace goes."""
    if planned.output is None:
        return planned.run.path if planned.run else None
    one = planned.scenario.model_copy(update={"schedules": (planned.schedule,)})
    drawn = planned.drawn_delays()
    known = planned.run.failures if planned.run else None
    failures = step_failures(one, planned.plan, planned.costs, drawn) if known is None else known
    run_directory.write(planned.output, one, planned.plan, drawn, failures, force=force)
    session.saved.append(str(planned.output))
    return planned.output


def _simulate(planned: PlannedSchedule, engine: Engine, bar: ProgressBar) -> _Simulated:
    def progress(step: int, n_steps: int) -> None:
        bar.update(planned.schedule.name, step, n_steps)

    plan = planned.plan
    costs = planned.costs
    progress(0, plan.n_steps)
    wants_trace = planned.delays is not None
    delays: Delays | SeedDelays
    if planned.delays is not None:
        delays = planned.delays
    else:
        delays = SeedDelays([planned.scenario.seed], partial(delay_sampler, planned.scenario))
    keep = _Kept(costs, None if wants_trace else steady_held(plan, costs), wants_trace=wants_trace)
    return run(plan, costs, delays, observe=keep, engine=engine, live=planned.live, progress=progress)


def _reasons(rows: Sequence[dict[str, Any]], asked: Engine) -> list[str]:
    """Say why schedules needed another engine than `fast`."""
    labels: dict[str, list[str]] = {}
    for row in rows:
        if row["engine"] == "des" and asked == "auto":
            labels.setdefault(row["engine_reason"], []).append(row["schedule"])
    return [f"Engine des for {', '.join(names)}: {reason}." for reason, names in labels.items()]


def _record(planned: PlannedSchedule, times: ScheduleTimes, done: _Simulated, file: Path | None) -> dict[str, Any]:
    """Return a simulated schedule as JSON.

    Columns:
        schedule, digest (str): Label, digest of the plan.
        makespan_s, step_s, compute_s, comm_s, wait_s, io_s, host_s (float): Times of the run and of a step.
        steps (int): Steps.
        engine, engine_reason (str): `fast` or `des`, and why.
        trace (str or null): File written.
        links_s (object): Only where links held ranks up: link, such as `nic_out[3]` -> seconds (float).
        gradients_used (float): Only below 1: share of batches used.
        late (object): Ranks too late for 90 % of the updates, if any: rank -> that share (float).
    """
    return {
        "schedule": times.label,
        "step_s": float(times.step_s[0]),
        **{f"{state}_s": float(seconds[0]) for state, seconds in times.states_s.items()},
        "makespan_s": float(done.where.makespan_s[0]),
        "steps": planned.plan.n_steps,
        "engine": times.engine,
        "engine_reason": done.reason,
        "digest": planned.plan.digest(),
        "trace": str(file) if file else None,
        **times.facets.document(),
    }
