"""Who held up whom: a heat map by rank and step, and the ranks that others waited for most."""

import numpy as np
from numpy.typing import NDArray

from simdist.report.page.document import Section, json_block
from simdist.report.page.heat import cells, packed
from simdist.report.page.html import Html, duration, join, percent, table, tag
from simdist.report.page.model import Execution, Report, ReportedRun
from simdist.settings.units import format_seconds
from simdist.traces.waiting import injected_s

_MOST_RANKS = 10  # lines of the table
_SAME = 1e-9  # sums that differ by less are the same
_HEADING = "Stragglers: who waited for whom"
_NOBODY = "In no collective of any run did a rank wait for another."

_ABOUT = (
    "In every collective the members that are ready wait for the last one, which is charged with the sum of their "
    "waiting; several that are last together share it. Caused are the seconds that others waited for a rank, suffered "
    "those that it waited for others; both add up to the same."
)
_KEYS = (
    "Point at a cell, or focus the map and move with the arrow keys: Page Up and Page Down move by ten steps, Home and "
    "End go to the first and last step, M goes to the largest cell."
)


def stragglers_section(report: Report) -> Section:
    """Show the waiting that each rank caused or suffered in each step, in the run that is chosen."""
    executions = report.executions()
    if not any(each.waits.total_s for _, each in executions):
        return Section("stragglers", _HEADING, tag("p", _NOBODY, class_="conclusion"))
    details = [
        tag("div", *_details(run, each), class_="heat-details", data_view=number)
        for number, (run, each) in enumerate(executions)
    ]
    names = [f"{run.label}, {each.origin}" for run, each in executions]
    data = json_block("stragglers-data", [_data(name, each) for name, (_, each) in zip(names, executions, strict=True)])
    shown = tag("div", _map(), tag("div", *details), id="heat-area", class_="heat-and-ranks")
    parts = [tag("p", _ABOUT), _controls(names), shown, data]
    return Section("stragglers", _HEADING, join(parts))


def _data(name: str, execution: Execution) -> dict[str, object]:
    caused, suffered = cells(execution.waits.caused_s), cells(execution.waits.suffered_s)
    return {
        "name": name,
        "steps": execution.n_steps,
        "ranks": execution.trace.plan.world_size,
        "stepsPerCell": caused.steps_per_cell,
        "ranksPerCell": caused.ranks_per_cell,
        "caused": packed(caused.seconds),
        "suffered": packed(suffered.seconds),
    }


def _controls(names: list[str]) -> Html:
    views = join(tag("option", name, value=number) for number, name in enumerate(names))
    quantities = tag("option", "caused", value="caused") + tag("option", "suffered", value="suffered")
    scales = tag("option", "linear", value="linear") + tag("option", "logarithmic", value="log")
    return tag(
        "div",
        _select("heat-view", "Run", views),
        _select("heat-quantity", "Waiting", Html(quantities)),
        _select("heat-scale", "Colours", Html(scales)),
        class_="controls needs-script",
        hidden=True,
    )


def _select(name: str, label: str, options: Html) -> Html:
    return tag("label", label, " ", tag("select", options, id=name))


def _map() -> Html:
    canvas = tag(
        "canvas",
        id="heat-canvas",
        tabindex=0,
        role="application",
        aria_roledescription="heat map",
        aria_label="Seconds of waiting by step, from left to right, and rank, from top to bottom",
        aria_describedby="heat-keys",
    )
    legend = tag(
        "div",
        tag("canvas", id="heat-scale-bar", aria_hidden="true"),
        tag("span", id="heat-scale-low"),
        tag("span", id="heat-scale-middle"),
        tag("span", id="heat-scale-high"),
        class_="heat-legend",
    )
    return tag(
        "div",
        tag("p", id="heat-cells", class_="muted"),
        tag("div", tag("div", id="heat-ranks", class_="heat-ranks", aria_hidden="true"), canvas, class_="heat-frame"),
        tag("div", id="heat-steps", class_="heat-steps", aria_hidden="true"),
        tag("output", "No cell is chosen.", id="heat-readout", aria_live="polite"),
        legend,
        tag("p", _KEYS, id="heat-keys", class_="muted"),
        id="heat-map",
        class_="needs-script",
        hidden=True,
    )


def _details(run: ReportedRun, execution: Execution) -> list[Html]:
    delays_s = _injected_by_rank_s(run, execution)
    name = f"{run.label}, {execution.origin}"
    conclusion = tag("p", f"{name}: {stragglers_conclusion(execution, delays_s)}", class_="conclusion")
    rows = [_table(name, execution, delays_s)] if execution.waits.total_s else []
    return [conclusion, *_injected_text(run, execution), *rows]


def stragglers_conclusion(execution: Execution, delays_s: NDArray[np.float64]) -> str:
    """Say which rank the others waited for most, and whether it was delayed for longest.

    Args:
        execution: Who waited for whom.
        delays_s: Seconds injected into each rank, `[world_size]`.
    """
    caused_s, total_s = execution.waits.caused_by_rank_s, execution.waits.total_s
    if total_s <= 0:
        return "no rank waited for another in a collective, so there is nothing to draw."
    rank = int(caused_s.argmax())
    share, even = caused_s[rank] / total_s, 1 / len(caused_s)
    most = (
        f"rank {rank} caused most waiting, {format_seconds(caused_s[rank])} or {percent(share)} of the "
        f"{format_seconds(total_s)} that all ranks waited in collectives; an even share would be {percent(even)}"
    )
    if not delays_s.any():
        return f"{most}."
    late = int(delays_s.argmax())
    if delays_s[rank] >= delays_s[late] * (1 - _SAME):
        return f"{most}. No rank was delayed for longer ({format_seconds(delays_s[rank])})."
    return f"{most}. Delayed for longest was rank {late} ({format_seconds(delays_s[late])})."


def _injected_by_rank_s(run: ReportedRun, execution: Execution) -> NDArray[np.float64]:
    total_s = np.zeros(execution.trace.plan.world_size)
    for seconds in injected_s(run.run.plan, run.run.delays).values():
        total_s += seconds[: execution.n_steps].sum(axis=0)
    return total_s


def _injected_text(run: ReportedRun, execution: Execution) -> list[Html]:
    found = {
        channel: seconds[: execution.n_steps] for channel, seconds in injected_s(run.run.plan, run.run.delays).items()
    }
    sentences = [
        f"{(seconds > 0).sum():,} on {channel}, {format_seconds(float(seconds.sum()))} in all, "
        f"{format_seconds(float(seconds.max()))} at most"
        for channel, seconds in found.items()
        if seconds.any()
    ]
    return [tag("p", f"Injected delays: {'; '.join(sentences) or 'none'}.")]


def _table(name: str, execution: Execution, delays_s: NDArray[np.float64]) -> Html:
    waits = execution.waits
    caused_s, suffered_s = waits.caused_by_rank_s, waits.suffered_by_rank_s
    worst = np.argsort(-caused_s, kind="stable")[:_MOST_RANKS].tolist()
    lines = [
        [
            f"rank {rank}",
            duration(caused_s[rank]),
            percent(caused_s[rank] / waits.total_s),
            duration(suffered_s[rank]),
            duration(delays_s[rank]),
        ]
        for rank in worst
    ]
    n_ranks = len(caused_s)
    which = f"the {_MOST_RANKS} of {n_ranks:,} ranks that caused most" if n_ranks > _MOST_RANKS else "all ranks"
    header = ["rank", "caused", "of all", "suffered", "injected"]
    return table(f"Seconds of waiting and of injected delays, {name}: {which}", header, lines)
