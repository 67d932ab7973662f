"""`simdist whatif`."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import click
import numpy as np

from simdist.cli import common, inputs
from simdist.cli.tables import Column, factor, seconds, table_text
from simdist.cli.whatif_job import WhatifJob, WhatifOptions, read_job, schedules_to_compare
from simdist.cost import price
from simdist.engines.replay import timing
from simdist.errors import RunError
from simdist.progress import ProgressBar
from simdist.runs import run_directory
from simdist.scenario import Scenario
from simdist.schedules import Schedule
from simdist.settings.units import format_seconds, format_share
from simdist.whatif.gains import Gain, Gains, find_gains
from simdist.whatif.recording import measured_delays, only_steps, with_recording
from simdist.whatif.slowdown import Floats, Slowdown, find_slowdown
from simdist.whatif.verdict import Pattern, find_pattern, interval_text, ranks_named, spread_sentence, verdict_sentence

_Record: TypeAlias = dict[str, Any]

_REPLAY_ERROR = 0.01
_SIMULATION_ERROR = 0.1
_MOST_ROWS = 10  # of a table of ranks, nodes or steps; JSON has all
_ROUNDING_S = 1e-12
_SLOW = 1.1  # slowdown of a slow step

_SLOWDOWN = Column("slowdown", form=factor)
_LOST = Column("lost per step", "lost_s", form=seconds)
_KIND_COLUMNS = (Column("operation", "name"), Column("channel"), _SLOWDOWN, _LOST)
_RANK_COLUMNS = (
    *(Column("rank", form=str), Column("node", form=str)),
    *(_SLOWDOWN, _LOST),
    Column("slow steps", form="{:,}".format),
)
_NODE_COLUMNS = (Column("node", form=str), _SLOWDOWN, _LOST)
_STEP_COLUMNS = (
    Column("step", form=str),
    *(Column("time", "step_s", form=format_seconds), Column("ideal", "ideal_s", form=format_seconds)),
    _SLOWDOWN,
    Column("slowest rank", "slowest_rank", form=str),
)
_GAIN_COLUMNS = (
    Column("schedule"),
    *(Column("step time", "step_s", form=format_seconds), Column("speed-up", "speedup", form=factor)),
    Column("95 %", "interval", form=str),
)


@click.command("whatif")
@click.argument("name", metavar="RUN|SCENARIO")
@click.option("--schedule", metavar="LABEL", help="Of the schedule whose steps are looked at; sync.")
@click.option("--trace", "which", type=click.Choice(list(run_directory.TRACES)), help="Of a RUN; real if there is one.")
@click.option("--steps", metavar="A:B", callback=common.slice_of_steps, help="Look only at steps A to B - 1.")
@click.option("--schedules", metavar="LABELS|FILE", help="Compare these, of the scenario or of another one.")
@click.option("--resamples", "n_runs", type=click.IntRange(0, 1_000_000), default=200, help="Runs of each schedule.")
@click.option("--block", "block_steps", type=common.positive, metavar="N", help="Steps of a block of a recording.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Of the first run; the scenario's.")
@click.option("--cluster", metavar="FILE|PRESET", help="Simulate schedules with the links from there.")
@common.plot
@common.options
def command(session: common.Session, name: str, **given: Any) -> None:
    """Show what stragglers cost, and what would help.

    The job without stragglers is a replay in which every operation takes its typical time. What is lost against it is
    shown by kind of operation, rank, node and step. Gains have intervals from runs put together from the delays that
    were recorded.
    """
    options = WhatifOptions(**given)
    inputs.check_picture(options.plot)
    with session.bar() as bar:
        bar.update("read", 0, None)
        job = read_job(session, name, options)
        others = schedules_to_compare(session, job, options.schedules) if options.n_runs else ()
        found = _slowdown(job, options.steps, bar)
        compared = _gains(job, others, options, bar) if others else None
    _warn(session, job, found, compared)
    spread = find_pattern(found)
    document = _document(job, found, spread, compared, options.cluster)
    session.result(document, _text(job, document, found, spread, compared))
    if options.plot:
        from simdist.report.stragglers import stragglers_figure

        session.draw(stragglers_figure(found, title=f"{Path(job.name).name}: {job.baseline.name}"), options.plot)


def _slowdown(job: WhatifJob, steps: range | None, bar: ProgressBar) -> Slowdown:
    ranks_per_node, progress = job.scenario.cluster.gpus_per_node, partial(bar.update, "replay")
    with inputs.naming(str(job.run.path) if job.run else job.name):
        return find_slowdown(job.trace, ranks_per_node=ranks_per_node, steps=steps, progress=progress)


def _gains(job: WhatifJob, schedules: Sequence[Schedule], options: WhatifOptions, bar: ProgressBar) -> Gains:
    """Compare schedules under what disturbed the job; a recording of that is needed only meanwhile."""
    n_total = len(schedules) + 1
    labels = [job.baseline.name, *(schedule.name for schedule in schedules)]

    def progress(label: str, done: int, total: int) -> None:
        bar.update(label, labels.index(label) + done / total, n_total)

    try:
        with TemporaryDirectory(prefix="simdist-") as folder, inputs.naming(job.name):
            return find_gains(
                _disturbed(job, options, Path(folder)),
                schedules,
                baseline=job.baseline,
                n_runs=options.n_runs,
                block_steps=options.block_steps,
                progress=progress,
            )
    except OSError as error:
        raise RunError(f"no temporary directory: {error.strerror or error}; set TMPDIR") from None


def _disturbed(job: WhatifJob, options: WhatifOptions, folder: Path) -> Scenario:
    """Return the scenario in which schedules are compared; that of a run replays what disturbed the run."""
    if job.run is None:
        return job.scenario
    traced = range(job.trace.plan.n_steps)
    chosen = traced[options.steps.start : options.steps.stop] if options.steps else traced
    if job.is_measured:
        costs = price(job.trace.plan, job.scenario.cluster, job.scenario.workload)
        late_s = measured_delays(job.trace, timing(job.trace), costs)
    else:
        late_s = dict(job.run.delays)
    scenario = with_recording(job.scenario, only_steps(late_s, chosen), folder)
    return scenario if options.seed is None else scenario.changed(seed=options.seed)


def _warn(session: common.Session, job: WhatifJob, found: Slowdown, compared: Gains | None) -> None:
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


def _document(job: WhatifJob, found: Slowdown, spread: Pattern, compared: Gains | None, cluster: str | None) -> _Record:
    """Return all that was found; seconds are per step unless they are of one step."""
    ranks, nodes = _losses(found.rank_slowdowns, found.ideal_s), _losses(found.node_slowdowns, found.ideal_s)
    return {
        "job": job.name,
        "schedule": job.baseline.name,
        "trace": job.trace.source,
        "world_size": found.world_size,
        "first_step": found.first_step,
        "steps": found.n_steps,
        "slowdown": found.slowdown,
        "lost_share": found.lost_share,
        "traced_s": found.traced_s,
        "replayed_s": found.replayed_s,
        "explained_s": found.explained_s,
        "ideal_s": found.ideal_s,
        "pattern": asdict(spread),
        "kinds": [asdict(part) for part in found.kinds],
        "channels": [{key: value for key, value in asdict(each).items() if key != "name"} for each in found.channels],
        "ranks": [{"rank": n, "node": n // found.ranks_per_node} | each for n, each in enumerate(ranks)],
        "nodes": [{"node": n} | each for n, each in enumerate(nodes)],
        "by_step": [
            {
                "step": found.first_step + step,
                "step_s": float(found.step_s[step]),
                "ideal_s": float(found.ideal_step_s[step]),
                "slowdown": float(found.step_slowdowns[step]),
                "slowest_rank": int(found.rank_step_s[step].argmax()),
            }
            for step in range(found.n_steps)
        ],
        "slowest_ranks": list(found.slowest_ranks),
        "fixed_by_ranks": found.fixed_by_ranks,
        "slowest_node": found.slowest_node,
        "fixed_by_node": found.fixed_by_node,
        "stragglers": spread_sentence(found, spread),
        "cluster": cluster,
        "gains": _gains_document(compared) if compared else None,
        "verdict": verdict_sentence(found, spread, compared) if compared else None,
    }


def _losses(slowdowns: Floats, ideal_s: float) -> list[dict[str, float]]:
    """Return what each rank, or node, costs."""
    return [{"slowdown": each, "lost_s": (each - 1) * ideal_s} for each in slowdowns.tolist()]


def _gains_document(compared: Gains) -> _Record:
    best, fastest = compared.best, compared.fastest
    return {
        "baseline": compared.baseline,
        "baseline_step_s": compared.baseline_step_s,
        "drawn": compared.drawn,
        "runs": compared.n_runs,
        "steps": compared.n_steps,
        "recorded_steps": compared.recording.n_steps if compared.recording else None,
        "block_steps": compared.recording.block_steps if compared.recording else None,
        "rows": [_gain_record(row) for row in compared.rows],
        "fastest": fastest.schedule if fastest else None,
        "best": best.schedule if best else None,
    }


def _gain_record(row: Gain) -> _Record:
    return {
        "schedule": row.schedule,
        "step_s": row.step_s,
        "speedup": row.speedup,
        "speedup_95": list(row.interval) if row.interval else None,
        "is_sure": row.is_sure,
        "problem": row.problem,
        "engine": row.engine,
    }


def _text(job: WhatifJob, document: _Record, found: Slowdown, spread: Pattern, compared: Gains | None) -> str:
    """Return the analysis of a job, and what other schedules would gain."""
    return "\n".join(
        [
            *_heading(job, found),
            f"stragglers: {document['stragglers']}",
            *_fixed(found),
            _slow_steps(found),
            "",
            "Each line below stands for itself: slowdown if only this is as it was, and all else ideal.",
            "",
            _kinds_text(document["kinds"]),
            "",
            _ranks_text(found, document["ranks"]),
            *_nodes_text(found, document["nodes"]),
            "",
            _slowest("steps", _STEP_COLUMNS, document["by_step"]),
            *(_gains_text(compared, document["gains"]["rows"]) if compared else ()),
            *([document["verdict"]] if compared else ()),
        ]
    )


def _heading(job: WhatifJob, found: Slowdown) -> Iterator[str]:
    last = found.first_step + found.n_steps - 1
    steps = (
        f"{found.n_steps:,} steps" if found.n_steps == job.trace.plan.n_steps else f"steps {found.first_step} to {last}"
    )
    yield f"{job.baseline.name}: {found.world_size:,} ranks, {steps}; {job.trace.source}"
    lost = "nothing is lost" if found.lost_share < 5e-4 else f"{format_share(found.lost_share)} of the time is lost"
    yield (
        f"slowdown {found.slowdown:.2f}: {format_seconds(found.replayed_s)} per step, "
        f"{format_seconds(found.ideal_s)} without stragglers; {lost}"
    )
    unexplained_s = found.replayed_s - found.explained_s
    if unexplained_s > _ROUNDING_S:
        explained, traced = format_seconds(found.explained_s), format_seconds(found.traced_s)
        yield (
            f"replayed {explained} per step, traced {traced}: {format_share(unexplained_s / found.replayed_s)} is in "
            f"no operation of the plan; it is kept where it was, as `between operations`"
        )


def _fixed(found: Slowdown) -> Iterator[str]:
    if found.fixed_by_ranks is None:
        return
    gone = format_share(found.fixed_by_ranks)
    text = f"with {ranks_named(found.slowest_ranks)} as fast as is typical, {gone} of the loss"
    if found.fixed_by_node is not None and len(found.node_slowdowns) > 1 and found.ranks_per_node > 1:
        text += f"; with node {found.slowest_node}, {format_share(found.fixed_by_node)}"
    yield f"would be gone: {text}"


def _slow_steps(found: Slowdown) -> str:
    n_slow = int((found.step_slowdowns > _SLOW).sum())
    return f"slow steps: {n_slow:,} of {found.n_steps:,} take more than {_SLOW} times the ideal"


def _kinds_text(kinds: Sequence[_Record]) -> str:
    costly = [kind for kind in kinds if kind["lost_s"] > _ROUNDING_S]
    if not costly:
        return "kinds of operation: none is slower than typical"
    return table_text("kinds of operation", _KIND_COLUMNS, costly)


def _ranks_text(found: Slowdown, ranks: Sequence[_Record]) -> str:
    slow_steps = (found.rank_step_slowdowns > _SLOW).sum(axis=0).tolist()
    records = [rank | {"slow steps": n_steps} for rank, n_steps in zip(ranks, slow_steps, strict=True)]
    return _slowest("ranks", _RANK_COLUMNS, records)


def _nodes_text(found: Slowdown, nodes: Sequence[_Record]) -> Iterator[str]:
    if len(nodes) > 1 and found.ranks_per_node > 1:
        yield ""
        yield _slowest("nodes", _NODE_COLUMNS, nodes)


def _slowest(what: str, columns: Sequence[Column], records: Sequence[_Record]) -> str:
    """Return the table of the slowest ranks, nodes or steps."""
    known = [record | {"slowdown": float(np.nan_to_num(record["slowdown"], nan=0.0))} for record in records]
    slowest = sorted(known, key=lambda record: -record["slowdown"])[:_MOST_ROWS]
    title = f"all {what}" if len(records) <= _MOST_ROWS else f"the slowest {_MOST_ROWS} of {len(records):,} {what}"
    return table_text(title, columns, slowest)


def _gains_text(compared: Gains, rows: Sequence[_Record]) -> Iterator[str]:
    base = {"schedule": compared.baseline, "step_s": compared.baseline_step_s, "speedup": 1.0}
    records = [row | {"interval": interval_text(gain)} for row, gain in zip(rows, compared.rows, strict=True)]
    yield ""
    yield table_text("schedules", _GAIN_COLUMNS, [base, *records])
    yield _runs_text(compared)
    yield from dict.fromkeys(f"no interval: {row.problem}" for row in compared.rows if row.problem)


def _runs_text(compared: Gains) -> str:
    plural = "s" * (compared.n_runs > 1)
    runs = f"{compared.n_runs:,} run{plural} of {compared.n_steps:,} steps or a few more, in whole periods"
    if recording := compared.recording:
        blocks = f"blocks of {recording.block_steps} of {recording.n_steps:,} recorded steps"
        return f"{runs}, put together from {blocks}; 95 %: what that many recorded steps leave open"
    if compared.drawn == "random":
        return f"{runs}, disturbed by other draws; 95 % of the runs lie in the interval"
    return f"one run of {compared.n_steps:,} steps: nothing is random"
