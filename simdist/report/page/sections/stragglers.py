"""Waiting between ranks: a heat map by rank and step, and the ranks that others waited for most."""

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simdist.report.page.document import Section, asset, json_block
from simdist.report.page.html import Html, conclusions, controls, duration, join, percent, select, table, tag
from simdist.report.page.model import Execution, ReportedRun, RunsReport
from simdist.settings.units import format_seconds
from simdist.traces.links import link_in_words
from simdist.traces.waiting import injected_s

_MOST_RANKS = 10  # lines of the table
# Cells along each side of the map; most screens have pixels for no more.
MOST_STEPS = 1024
MOST_RANKS = 256
_DROPPED_BITS = 7  # of 23: numbers stay exact to 8e-6 of their size, and pack into two thirds
_SAME = 1e-9  # sums that differ by less are the same
_HEADING = "Stragglers: who waited for whom"
_NO_WAITING = "In no collective of any run did a rank wait for another."

_ABOUT = (
    "In every collective the members that are ready wait for the last one, which is charged with the sum of their "
    "waiting; several that are last together share it. Caused are the seconds that others waited for a rank, suffered "
    "those that it waited for others; both add up to the same."
)


def stragglers_section(report: RunsReport) -> Section:
    """Show the waiting that each rank caused or suffered in each step, in the run that is chosen."""
    executions = report.executions()
    if not any(each.waits.total_s for _, each in executions):
        return Section("stragglers", _HEADING, conclusions([_NO_WAITING]))
    details = [
        tag("div", *_details(run, each), class_="heat-details", data_view=number)
        for number, (run, each) in enumerate(executions)
    ]
    names = [f"{run.label}, {each.origin}" for run, each in executions]
    data = json_block("stragglers-data", [_data(name, each) for name, (_, each) in zip(names, executions, strict=True)])
    shown = tag("div", Html(asset("heat.html")), tag("div", *details), id="heat-area", class_="heat-and-ranks")
    chosen = controls(
        select("heat-view", "Run", ((name, number) for number, name in enumerate(names))),
        select("heat-quantity", "Waiting", [("caused", "caused"), ("suffered", "suffered")]),
        select("heat-scale", "Colours", [("linear", "linear"), ("logarithmic", "log")]),
    )
    return Section("stragglers", _HEADING, join([tag("p", _ABOUT), chosen, shown, data]))


def _data(name: str, execution: Execution) -> dict[str, object]:
    caused = cells(execution.waits.caused_s)
    suffered = cells(execution.waits.suffered_s)
    size = {"steps": execution.n_steps, "ranks": execution.trace.plan.world_size}
    per_cell = {"stepsPerCell": caused.steps_per_cell, "ranksPerCell": caused.ranks_per_cell}
    return {"name": name, **size, **per_cell, "caused": packed(caused.seconds), "suffered": packed(suffered.seconds)}


def _details(run: ReportedRun, execution: Execution) -> list[Html]:
    of_steps = injected_s(run.run.plan, run.run.delays).items()
    injected = {str(channel): seconds[: execution.n_steps] for channel, seconds in of_steps}
    delays_s = sum((seconds.sum(axis=0) for seconds in injected.values()), np.zeros(execution.trace.plan.world_size))
    name = f"{run.label}, {execution.origin}"
    conclusion = conclusions([f"{name}: {stragglers_conclusion(execution, delays_s)}"])
    rows = [_table(name, execution, delays_s)] if execution.waits.total_s else []
    return [conclusion, *_links_text(execution), _injected_text(injected), *rows]


def _links_text(execution: Execution) -> list[Html]:
    """Say how much of the waiting is no rank's fault."""
    found = sorted(execution.waits.by_link_s.items(), key=lambda item: -item[1])
    named = "; ".join(f"{link_in_words(name)}: {format_seconds(seconds)}" for name, seconds in found)
    return [tag("p", f"Ranks waited for others that a link had held up: {named}.")] if found else []


def stragglers_conclusion(execution: Execution, delays_s: NDArray[np.float64]) -> str:
    """Say which rank the others waited for most, and whether it was delayed for longest.

    Args:
        execution: Waiting between ranks.
        delays_s: Seconds injected into each rank, `[world_size]`.
    """
    caused_s = execution.waits.caused_by_rank_s
    total_s = execution.waits.total_s
    if total_s <= 0:
        return "no rank waited for another in a collective, so there is nothing to draw."
    rank = int(caused_s.argmax())
    share = caused_s[rank] / total_s
    even = 1 / len(caused_s)
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


def _injected_text(injected: Mapping[str, NDArray[np.float64]]) -> Html:
    sentences = [
        f"{(seconds > 0).sum():,} on {channel}, {format_seconds(float(seconds.sum()))} in all, "
        f"{format_seconds(float(seconds.max()))} at most"
        for channel, seconds in injected.items()
        if seconds.any()
    ]
    return tag("p", f"Injected delays: {'; '.join(sentences) or 'none'}.")


def _table(name: str, execution: Execution, delays_s: NDArray[np.float64]) -> Html:
    waits = execution.waits
    caused_s = waits.caused_by_rank_s
    suffered_s = waits.suffered_by_rank_s
    worst = np.argsort(-caused_s, kind="stable")[:_MOST_RANKS].tolist()
    lines = []
    for rank in worst:
        caused = duration(caused_s[rank]), percent(caused_s[rank] / waits.total_s)
        lines.append([f"rank {rank}", *caused, duration(suffered_s[rank]), duration(delays_s[rank])])
    n_ranks = len(caused_s)
    which = f"the {_MOST_RANKS} of {n_ranks:,} ranks that caused most" if n_ranks > _MOST_RANKS else "all ranks"
    header = ["rank", "caused", "of all", "suffered", "injected"]
    return table(f"Seconds of waiting and of injected delays, {name}: {which}", header, lines)


@dataclass(frozen=True)
class Cells:
    """Seconds summed over steps and ranks that lie beside each other.

    Args:
        seconds: float64 `[columns of steps, rows of ranks]`.
        steps_per_cell: Steps in each cell; fewer in the last column.
        ranks_per_cell: Ranks in each cell; fewer in the last row.
    """

    seconds: NDArray[np.float64]
    steps_per_cell: int
    ranks_per_cell: int


def cells(seconds: NDArray[np.float64]) -> Cells:
    """Sum seconds `[n_steps, world_size]` into as few cells as fit.

    >>> cells(np.ones((2049, 2))).seconds[[0, -1]]
    array([[3., 3.],
           [3., 3.]])
    """
    n_steps, world_size = seconds.shape
    steps = -(-n_steps // MOST_STEPS)
    ranks = -(-world_size // MOST_RANKS)
    summed = np.add.reduceat(seconds, np.arange(0, n_steps, steps), axis=0)
    return Cells(np.add.reduceat(summed, np.arange(0, world_size, ranks), axis=1), steps, ranks)


def packed(seconds: NDArray[np.float64]) -> str:
    """Return an array as base64 of deflated little-endian float32, step after step."""
    bits = seconds.astype("<f4").view("<u4")
    half = np.uint32(1 << (_DROPPED_BITS - 1))
    rounded = (bits + half) & ~np.uint32((1 << _DROPPED_BITS) - 1)
    return base64.b64encode(zlib.compress(rounded.tobytes(), 9)).decode()
