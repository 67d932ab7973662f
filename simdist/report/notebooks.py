"""Results in a notebook: a picture and a table of each.

`simdist.display` has the methods of results that call these functions.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, assert_never

import numpy as np

from simdist.errors import ScenarioError
from simdist.learning.answer import LearnedSchedules
from simdist.learning.curves import TRAINING_LOSS
from simdist.learning.summary import curves_record
from simdist.plan import LEVELS
from simdist.report.bars import bars_figure
from simdist.report.figures import literal_text, panels, shortened
from simdist.report.goodput import goodput_figure
from simdist.report.learning import learning_figure
from simdist.report.page.html import Html, join, prose, tag
from simdist.report.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, time_unit
from simdist.report.speedup import STATE_STYLES, speedup_figure
from simdist.report.timeline import timeline_figure
from simdist.scenario.scenario import Scenario, dump
from simdist.scenario.strict_yaml import path_text
from simdist.settings.base import plural
from simdist.settings.units import format_Bps, format_seconds, format_share
from simdist.stragglers.gains import Gains
from simdist.stragglers.slowdown import Slowdown
from simdist.studies import facets
from simdist.studies.columns import (
    ENGINE,
    PLAIN_STEP_TIME,
    SCHEDULE,
    SPEEDUP,
    STATE_COLUMNS,
    STEP_TIME,
    Column,
    combined,
    factor,
    seconds,
    shown_epochs,
    without_repeated,
)
from simdist.studies.comparison import Comparison
from simdist.studies.data_knobs import KnobEffects
from simdist.studies.epochs import Epochs
from simdist.studies.goodput import GoodputStudy
from simdist.studies.remarks import Remark
from simdist.studies.tolerable_rate import COLUMNS as TOLERABLE
from simdist.studies.tolerable_rate import Tolerances
from simdist.sweeps.definition import Sweep
from simdist.sweeps.table import ResultRow, Table, shown_text, uses_kinds
from simdist.traces.breakdown import Breakdown, break_down
from simdist.traces.trace import Trace
from simdist.traces.waiting import Waiting
from simdist.tuning.answer import Tuned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: A result with a picture.
_Pictured: TypeAlias = (
    Comparison
    | Tuned
    | Table
    | Trace
    | Breakdown
    | Waiting
    | Epochs
    | KnobEffects
    | Tolerances
    | GoodputStudy
    | Slowdown
    | Gains
    | LearnedSchedules
)
#: A result with a table.
_Shown: TypeAlias = _Pictured | Scenario | Sweep

_COMPARED = (SCHEDULE, STEP_TIME, SPEEDUP, *STATE_COLUMNS, ENGINE)
_KNOBS = (
    Column("knob"),
    Column("time", "seconds", form=seconds),
    Column("staging", "staging_s", form=seconds),
    Column("stalls", "stall_s", form=seconds),
    Column("removed", form=format_share),
)
_WAITED = (
    Column("rank", form=str),
    Column("others waited", "caused_s", form=seconds),
    Column("it waited", "suffered_s", form=seconds),
)
_SLOWED = (Column("rank", form=str), Column("slowdown", form=factor), Column("lost per step", "lost_s", form=seconds))
_EPOCHS = (
    Column("epoch", form=str),
    Column("time", "seconds", form=seconds),
    Column("stalled", "stall_share", form=format_share),
)
_LEARNED = (SCHEDULE, STEP_TIME, SPEEDUP, Column("at the end", "final", form="{:.4g}".format))
_VARIED = (Column("field"), Column("values"), Column("number", form="{:,}".format))
_COLORS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
_MOST_ROWS = 30
_MOST_PANELS = 6
_MOST_RANKS = 64
_MOST_TICKS = 8
_LOGARITHMIC = 8  # largest / smallest value from which an axis is


def plot(result: _Pictured) -> "Figure":
    """Draw a result.

    Args:
        result: A comparison, or the finalists of a search: speed-ups and states. Results of a sweep: speed-ups over the
            first number that is varied, with their intervals, a panel for each combination of the other fields. A
            trace: a timeline. A breakdown: the states of each rank. Waiting: seconds that others waited for each rank.
            Epochs: their seconds, and stalls. Knobs: the same with each. Tolerances: the tolerable probability of each
            schedule. Goodput: the time that is lost, and goodput by the rate of failures. A slowdown: what each rank
            adds to a step. Gains: speed-ups. Schedules that learned: curves.

    Raises:
        ScenarioError: There is nothing to draw, or too much for one picture.
    """
    match result:
        case Comparison():
            return speedup_figure(result, title=result.title)
        case Tuned():
            return speedup_figure([each.row for each in result.finalists], title="finalists, with fresh seeds")
        case Table():
            return _sweep_figure(result)
        case Trace():
            return timeline_figure(result)
        case Breakdown():
            return _states_figure(result)
        case Waiting():
            return _waiting_figure(result)
        case Epochs():
            return _epochs_figure(result)
        case GoodputStudy():
            return goodput_figure(result)
        case LearnedSchedules():
            return learning_figure(curves_record(result, result.target, title="learning"))
        case KnobEffects() | Tolerances() | Slowdown() | Gains():
            return bars_figure(result)
        case unknown:
            assert_never(unknown)


def html_of(result: _Shown) -> str:
    """Return a result as HTML, as notebooks show it, with the remarks on it."""
    remarks: Sequence[Remark] = ()
    match result:
        case Comparison() | Tuned() | Tolerances() | GoodputStudy() | Gains():
            remarks = result.remarks
        case LearnedSchedules() if result:
            remarks = result.remarks
        case Table():
            remarks = result.shown_remarks
    return join([_without_remarks(result), *(tag("p", prose(f"{each}.")) for each in remarks)])


def _without_remarks(result: _Shown) -> Html:
    match result:
        case Scenario():
            return _scenario_html(result)
        case Comparison():
            columns = combined(_COMPARED, facets.facet_columns(result))
            told = facets.told(result)
            tables = [_table(result.title, columns, [each.cells(told) for each in result])]
            tables += [_table(each.title, each.columns, each.records) for each in facets.tables(result, result.base)]
            return join(tables)
        case Tuned():
            rows = [each.row.cells(()) for each in result.finalists]
            return _table("finalists, with fresh seeds", (SCHEDULE, STEP_TIME, SPEEDUP, *STATE_COLUMNS), rows)
        case Table():
            return _sweep_html(result)
        case Sweep():
            return _definition_html(result)
        case Trace() | Breakdown() | Waiting() | Epochs():
            return _trace_html(result)
        case GoodputStudy():
            return join([_table(*each) for each in result.tables()])
        case KnobEffects() | Tolerances() | Slowdown() | Gains() | LearnedSchedules():
            return _answer_html(result)
        case unknown:
            assert_never(unknown)


def _trace_html(result: Trace | Breakdown | Waiting | Epochs) -> Html:
    match result:
        case Trace():
            return _states_html(f"{result.plan.name}, {result.source}", break_down(result))
        case Breakdown():
            return _states_html("breakdown", result)
        case Waiting():
            return _waiting_html(result)
        case Epochs():
            return _epochs_html(result)
        case unknown:
            assert_never(unknown)


def _answer_html(result: KnobEffects | Tolerances | Slowdown | Gains | LearnedSchedules) -> Html:
    match result:
        case KnobEffects():
            return _table("one change at a time", _KNOBS, result.records())
        case Tolerances():
            return _table(result.title, TOLERABLE, [each.record() for each in result])
        case Slowdown():
            return _slowdown_html(result)
        case Gains():
            return _table(f"speed-up over {result.baseline}", (SCHEDULE, PLAIN_STEP_TIME, SPEEDUP), result.records())
        case LearnedSchedules():
            return _table((result.target or TRAINING_LOSS).what, _LEARNED, result.records())
        case unknown:
            assert_never(unknown)


def _table(title: str, columns: Sequence[Column], records: Sequence[Mapping[str, object]]) -> Html:
    columns, repeated = without_repeated(columns, records)
    head = join(tag("th", column.heading) for column in columns)
    rows = (join(tag("td", column.cell(record)) for column in columns) for record in records)
    body = join(tag("tr", row) for row in rows)
    table = tag("table", tag("caption", title), tag("thead", tag("tr", head)), tag("tbody", body))
    return join([table, tag("p", repeated)]) if repeated else table


def _scenario_html(scenario: Scenario) -> Html:
    """Return what people look at first, and the whole as YAML, folded."""
    cluster = scenario.cluster
    workload = scenario.workload
    counts = f"{cluster.nodes} {plural(cluster.nodes, 'node')} x {cluster.gpus_per_node} = {cluster.world_size} ranks"
    bandwidth = "" if cluster.network.table else f", network {format_Bps(cluster.network.bandwidth_Bps)}"
    n_parameters = sum(workload.tensor_counts)
    facts = {
        "cluster": f"{cluster.name} {counts}{bandwidth}".strip(),
        "workload": f"{workload.name} {n_parameters:,} parameters, batch size {workload.batch_size}".strip(),
        "run": f"{scenario.steps:,} {plural(scenario.steps, 'step')}, seed {scenario.seed}",
        "disturbances": ", ".join(each.kind for each in scenario.disturbances) or "none",
        "schedules": ", ".join(each.name for each in scenario.schedules),
    }
    rows = join(tag("tr", tag("th", name), tag("td", text)) for name, text in facts.items())
    whole = tag("details", tag("summary", "as a file"), tag("pre", dump(scenario)))
    return join([tag("table", tag("caption", scenario.name), tag("tbody", rows)), whole])


def _states_html(title: str, found: Breakdown) -> Html:
    means = {f"{state}_s": float(found.per_step_s(state).mean()) for state in STATE_STYLES}
    record: dict[str, object] = {"step_s": float(found.step_s.mean()), **means}
    n_ranks = len(found.compute_s)
    counts = f"{n_ranks} {plural(n_ranks, 'rank')}, {found.n_steps} {plural(found.n_steps, 'step')}"
    columns = (Column("step time", "step_s", form=format_seconds), *STATE_COLUMNS)
    return _table(f"{title}: {counts}; seconds per step, average over ranks", columns, [record])


def _waiting_html(found: Waiting) -> Html:
    """Return the ranks that others waited for most."""
    both = zip(found.caused_by_rank_s.tolist(), found.suffered_by_rank_s.tolist(), strict=True)
    records = [{"rank": rank, "caused_s": caused, "suffered_s": its} for rank, (caused, its) in enumerate(both)]
    ranks = f"{len(records):,} {plural(len(records), 'rank')}"
    most = sorted(records, key=lambda each: each["caused_s"], reverse=True)[:_MOST_ROWS]
    return _table(f"waiting of {ranks} in the whole run, those that others waited for most first", _WAITED, most)


def _slowdown_html(found: Slowdown) -> Html:
    """Return the ranks that cost most."""
    title = f"slowdown {found.slowdown:.2f} of {found.world_size:,} ranks; if only this rank is as traced"
    costs = zip(found.rank_slowdowns.tolist(), ((found.rank_slowdowns - 1) * found.ideal_s).tolist(), strict=True)
    records = [{"rank": rank, "slowdown": slowdown, "lost_s": lost_s} for rank, (slowdown, lost_s) in enumerate(costs)]
    return _table(title, _SLOWED, sorted(records, key=lambda each: each["lost_s"], reverse=True)[:_MOST_ROWS])


def _epochs_html(found: Epochs) -> Html:
    columns = (*_EPOCHS, *(Column(level, form="{:,}".format) for level in LEVELS))
    records = [
        {"epoch": each.number, "seconds": each.seconds, "stall_share": each.stall_share}
        | dict(zip(LEVELS, each.n_samples, strict=True))
        for each in shown_epochs(found.epochs)
        if each
    ]
    return _table(f"{found.schedule}, {found.source}: epochs; samples by level", columns, records)


def _definition_html(found: Sweep) -> Html:
    """Return the varied fields of a sweep."""
    records = []
    for axis in found.axes:
        texts = [shown_text(choice) for choice in axis.choices] or [f"{axis.distribution}"]
        records.append({"field": path_text(axis.field.path), "values": ", ".join(texts), "number": len(axis.choices)})
    counts = f"{found.n_points:,} {plural(found.n_points, 'point')}"
    seeds = f"{found.n_seeds} {plural(found.n_seeds, 'seed')}"
    return _table(f"{found.name}: {counts}, {seeds} each; a sweep of {found.scenario.name}", _VARIED, records)


def _sweep_html(results: Table) -> Html:
    columns = [Column("point"), *(Column(name) for name in results.varied), SCHEDULE, STEP_TIME, SPEEDUP]
    shown = [_sweep_record(each, results.varied) for each in results.results[:_MOST_ROWS]]
    n_rows = len(results.results)
    of_all = f", the first {_MOST_ROWS}" if n_rows > _MOST_ROWS else ""
    over = f"; speed-up over {results.baseline}" if results.baseline else ""
    return _table(f"{n_rows:,} {plural(n_rows, 'row')}{of_all}{over}", columns, shown)


def _sweep_record(result: ResultRow, varied: Sequence[str]) -> dict[str, object]:
    choices = {name: shown_text(result.choices[name]) for name in varied if name in result.choices}
    record: dict[str, object] = {"point": result.point, "schedule": result.schedule, **choices}
    if result.row is None:
        return record
    record |= {"step_s": result.row.step_s, "step_s_ci95": result.row.step_s_ci95}
    if result.has_baseline:
        record |= {"speedup": result.row.speedup, "speedup_ci95": result.row.speedup_ci95}
    return record


def _sweep_figure(results: Table) -> "Figure":
    """Draw speed-ups over the first varied number."""
    rows = [each for each in results.results if each.row and each.has_baseline]
    x = next((name for name in results.varied if all(_is_number(each, name) for each in rows)), None)
    if not rows or x is None:
        raise ScenarioError("these results vary no number over which speed-ups could be drawn: draw from their frame()")
    others = [name for name in results.varied if name != x and len({_written(each, name) for each in rows}) > 1]
    groups: dict[str, list[ResultRow]] = {}
    for each in rows:
        lines = [each.case, *(f"{shortened(name, most=30)} = {_written(each, name)}" for name in others)]
        groups.setdefault("\n".join(line for line in lines if line), []).append(each)
    if len(groups) > _MOST_PANELS:
        raise ScenarioError(f"{len(groups)} combinations of {', '.join(others)} are too many panels: draw from frame()")
    n_columns = min(len(groups), 3)
    figure, axes = panels(n_columns, n_rows=-(-len(groups) // n_columns), sharey=True)
    with literal_text():
        for panel, (title, of_group) in zip(axes, groups.items(), strict=False):
            _draw_lines(panel, of_group, x)
            panel.set_title(title, fontsize="medium")
            panel.set_xlabel(x)
        axes[0].set_ylabel(f"speed-up over {results.baseline}" if results.baseline else "speed-up")
        axes[0].legend(frameon=False)
    return figure


def _written(result: ResultRow, name: str) -> str:
    return shown_text(result.choices[name]) if name in result.choices else "-"


def _is_number(result: ResultRow, name: str) -> bool:
    choice = result.choices.get(name)
    return choice is not None and isinstance(choice.number, int | float) and not isinstance(choice.number, bool)


def _draw_lines(axes: "Axes", rows: Sequence[ResultRow], x: str) -> None:
    by_kind = uses_kinds(rows)
    lines = list(dict.fromkeys(each.kind if by_kind else each.schedule for each in rows))
    for number, line in enumerate(lines):
        color = _COLORS[number % len(_COLORS)]
        points = sorted(
            (float(str(each.choices[x].number)), each.row.speedup, each.row.speedup_ci95 or (each.row.speedup,) * 2)
            for each in rows
            if line == (each.kind if by_kind else each.schedule) and each.row
        )
        places = [at for at, _, _ in points]
        axes.plot(places, [speedup for _, speedup, _ in points], "o-", color=color, label=shortened(line), markersize=4)
        lows = [interval[0] for _, _, interval in points]
        highs = [interval[1] for _, _, interval in points]
        axes.fill_between(places, lows, highs, color=color, alpha=0.2, linewidth=0)
    everywhere = sorted({float(str(each.choices[x].number)) for each in rows})
    if everywhere[0] > 0 and everywhere[-1] / everywhere[0] >= _LOGARITHMIC:
        axes.set_xscale("log")
        axes.minorticks_off()
    if len(everywhere) <= _MOST_TICKS:
        axes.set_xticks(everywhere, [f"{place:.4g}" for place in everywhere])


def _states_figure(found: Breakdown) -> "Figure":
    """Draw the seconds per step of each rank in each state, as stacked bars; of many ranks without gaps."""
    n_ranks = len(found.compute_s)
    per_step_s = found.rank_states_s()
    longest_s = float(found.step_s.mean())
    unit, scale = time_unit(longest_s)
    figure, (axes,) = panels(1, height_in=3.8)
    below = np.zeros(n_ranks)
    for state, style in STATE_STYLES.items():
        heights = per_step_s[state].mean(axis=1) * scale
        look: dict[str, Any] = {"color": style.face, "edgecolor": style.ink, "linewidth": 0, "hatch": style.hatch}
        if heights.max() > 0 and n_ranks > _MOST_RANKS:
            edges = np.arange(n_ranks + 1) - 0.5
            axes.stairs(below + heights, edges, baseline=below, fill=True, color=style.face, label=style.label)
        elif heights.max() > 0:
            axes.bar(range(n_ranks), heights, bottom=below, width=0.8, label=style.label, **look)
        below = below + heights
    axes.set_xlim(-0.6, n_ranks - 0.4)
    axes.set_ylim(0, 1.02 * longest_s * scale)
    axes.set_xlabel("rank")
    axes.set_ylabel(f"{unit} per step")
    figure.legend(loc="outside upper center", ncols=len(STATE_STYLES), frameon=False)
    return figure


def _waiting_figure(found: Waiting) -> "Figure":
    """Draw the seconds that others waited for each rank, and that it waited for others."""
    figure, (axes,) = panels(1)
    ranks = np.arange(found.caused_s.shape[1])
    axes.bar(ranks - 0.2, found.caused_by_rank_s, width=0.4, color=VERMILLION, label="others waited for it")
    axes.bar(ranks + 0.2, found.suffered_by_rank_s, width=0.4, color=BLUE, label="it waited for others")
    axes.set_xlabel("rank")
    axes.set_ylabel("s in the whole run")
    axes.legend(frameon=False)
    return figure


def _epochs_figure(found: Epochs) -> "Figure":
    """Draw the seconds of each epoch, and which of them are stalls."""
    if not found.epochs:
        raise ScenarioError(f"{found.schedule}: no epoch was finished, so there is nothing to draw")
    figure, (axes,) = panels(1)
    numbers = [each.number for each in found.epochs]
    stalls_s = [each.stall_s for each in found.epochs]
    axes.bar(numbers, [each.seconds - each.stall_s for each in found.epochs], color=BLUE, label="training")
    rest_s = [each.seconds - each.stall_s for each in found.epochs]
    axes.bar(numbers, stalls_s, bottom=rest_s, color=ORANGE, hatch="\\\\\\\\", edgecolor="white", label="data stalls")
    axes.set_xticks(numbers)
    axes.set_xlabel("epoch")
    axes.set_ylabel("s")
    axes.legend(frameon=False)
    return figure
