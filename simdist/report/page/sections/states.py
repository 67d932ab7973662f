"""Where the time of a step goes."""

from simdist.report.page.charts import HATCHED, Bar, BarGroup, Segment, bar_chart
from simdist.report.page.document import Section
from simdist.report.page.html import Html, duration, join, percent, table, tag
from simdist.report.page.model import Execution, Report, ReportedPoint, ReportedRun
from simdist.report.page.sections.speed import STATE_WORDS
from simdist.report.palette import time_unit
from simdist.settings.units import format_seconds
from simdist.traces.breakdown import STATES

_SEEN_S = 1e-9  # less is what is left when floating-point numbers are summed
_ABOUT = (
    "The seconds of a step, averaged over ranks and steps, by what a rank does: at any moment it is in the first of "
    "these states that applies. Communication that is hidden behind computing counts as computing."
)


def states_section(report: Report) -> Section:
    """Show how long ranks are in each state, simulated and measured beside each other."""
    unit, scale = time_unit(max(each.step_s for _, each in report.executions()))
    chart = bar_chart(
        [_group(point, run, scale) for point in report.points for run in point.runs],
        element_id="states-chart",
        title="Stacked bars of the seconds of a step by state; the table below has the numbers",
        axis=f"{unit} per step, average over ranks",
    )
    conclusions = [tag("p", states_conclusion(run, each), class_="conclusion") for run, each in _told(report)]
    parts = [tag("p", _ABOUT), *conclusions, _legend(report), tag("div", chart, _table(report), class_="beside")]
    return Section("states", "Where the time of a step goes", join(parts))


def _told(report: Report) -> list[tuple[ReportedRun, Execution]]:
    """Return what is put into sentences: the executions of the baseline of each point."""
    return [(point.runs[0], each) for point in report.points for each in point.runs[0].executions.values()]


def states_conclusion(run: ReportedRun, execution: Execution) -> str:
    """Say how much of a step is computing, and what is most of the rest."""
    shares = {state: execution.state_s(state) / execution.step_s for state in STATES}
    rest = max(STATES[1:], key=lambda state: shares[state])
    computing = f"{run.label}, {execution.origin}: ranks compute {percent(shares['compute'])} of the time"
    if shares[rest] < 0.0005:
        return f"{computing}; there is hardly anything else."
    return f"{computing}; most of the rest is {STATE_WORDS[rest]} ({percent(shares[rest])})."


def _group(point: ReportedPoint, run: ReportedRun, scale: float) -> BarGroup:
    heading = point.title if run is point.runs[0] else ""
    return BarGroup(run.label, tuple(_bar(each, scale) for each in run.executions.values()), heading)


def _bar(execution: Execution, scale: float) -> Bar:
    segments = [
        Segment(state, seconds * scale, f"{state}, {execution.origin}: {format_seconds(seconds)} a step")
        for state in STATES
        for seconds in [execution.state_s(state)]
    ]
    return Bar(tuple(segments), f"{execution.origin} {format_seconds(execution.step_s)}")


def _legend(report: Report) -> Html:
    """Explain the states that occur."""
    found = [state for state in STATES if any(each.state_s(state) > _SEEN_S for _, each in report.executions())]
    items = [tag("li", _swatch(state), f"{state}: {STATE_WORDS[state]}") for state in found]
    return tag("ul", *items, class_="legend")


def _swatch(state: str) -> Html:
    """Return a square as the bars have it; the hatching is that of the chart."""
    box = {"width": 14, "height": 14}
    parts = [tag("rect", class_=f"fill {state}", **box)]
    if state in HATCHED:
        parts.append(tag("rect", fill=f"url(#states-chart-{state})", **box))
    return tag("svg", *parts, aria_hidden="true", **box)


def _table(report: Report) -> Html:
    lines = [
        [
            run.label,
            each.origin,
            duration(each.step_s),
            *(duration(each.state_s(state)) for state in STATES),
            percent(each.state_s("compute") / each.step_s),
        ]
        for run, each in report.executions()
    ]
    header = ["schedule", "trace", "step time", *STATES, "computing"]
    return table("Time per step by state, average over ranks", header, lines, words=["trace"])
