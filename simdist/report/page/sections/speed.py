"""How fast each schedule is, over the baseline, and where the time of its steps goes."""

from collections.abc import Mapping

from simdist.report.page.charts import HATCHED, Bar, BarGroup, BarSegment, bar_chart
from simdist.report.page.document import Section
from simdist.report.page.html import Html, conclusions, duration, join, number, percent, prose, table, tag
from simdist.report.page.model import Execution, Origin, ReportedRun, RunsReport
from simdist.report.palette import time_unit
from simdist.runs.calibrated import simulated_scenario
from simdist.settings.units import format_seconds, in_range
from simdist.studies import facets
from simdist.studies.comparison import Row
from simdist.studies.facets import LINKS, RANGES
from simdist.studies.uncertainty import causes
from simdist.traces.breakdown import STATES

#: The states of `simdist.traces.breakdown` in words.
_STATE_WORDS = {
    "compute": "computing",
    "comm": "exposed communication",
    "wait": "waiting for others",
    "io": "loading and saving",
    "host": "ranks held up by their hosts",
}

_ABOUT_STATES = (
    "The seconds of a step, averaged over ranks and steps, by what a rank does: at any moment it is in the first of "
    "these states that applies. Communication that is hidden behind computing counts as computing."
)
_SEEN_S = 1e-9  # less is what is left when floating-point numbers are summed
_SAME = 0.005  # step times that differ by less are called equal


def speed_section(report: RunsReport) -> Section:
    """Show speed-ups over the baseline, simulated and measured beside each other."""
    rows = {origin: report.rows(origin) for origin in report.origins}
    shown = {origin: found for origin, found in rows.items() if found}
    base = report.base
    about = (
        "How many times as fast as {base} each schedule is: the seconds per step of {base} over its own. Every bar is "
        "one run of one seed, so there are no error bars; `simdist compare` averages over seeds."
    )
    groups = [_group(run, shown) for run in report.runs]
    chart = bar_chart(
        groups,
        element_id="speed-chart",
        title=f"Bars of the speed-up of each schedule over {base}; the table below has the numbers",
        axis=f"speed-up over {base}",
        mark=1.0,
    )
    beside = tag("div", chart, _table(report, shown), class_="beside")
    used = [
        f"{each.origin.capitalize()}, {remark}."
        for run, each in report.executions()
        for remark in facets.facet_remarks(run.run.scenario, [each.times])
    ]
    answers = conclusions([*_conclusions(report), *used, *_to_measure(report)])
    return Section("speed", "Speed-up", join([tag("p", prose(about, base=base)), answers, beside]))


def _group(run: ReportedRun, rows: Mapping[Origin, Mapping[str, Row]]) -> BarGroup:
    speedups = ((origin, found[run.label].speedup) for origin, found in rows.items() if run.label in found)
    bars = [
        Bar((BarSegment(origin, value, f"{run.label}, {origin}: {value:.2f}"),), f"{origin} {value:.2f}")
        for origin, value in speedups
    ]
    return BarGroup(run.label, tuple(bars))


def _table(report: RunsReport, rows: Mapping[Origin, Mapping[str, Row]]) -> Html:
    names = [f"{what}, {origin}" for origin in rows for what in ("step time", "speed-up")]
    lines = [
        [run.label, *(cell for origin, found in rows.items() for cell in _cells(run, origin, found))]
        for run in report.runs
    ]
    return table(f"Step time, and speed-up over {report.base}", ["schedule", *names], lines)


def _cells(run: ReportedRun, origin: Origin, rows: Mapping[str, Row]) -> tuple[str, str]:
    if origin not in run.executions:
        return "-", "-"
    step_s = run.executions[origin].step_s
    row = rows.get(run.label)
    if row is None:
        return duration(step_s), "-"
    step = in_range(step_s, *(row.step_s_range or (step_s, step_s)), form=format_seconds)
    return number(step_s, step), number(row.speedup, in_range(row.speedup, *(row.speedup_range or (1.0, 1.0))))


def _conclusions(report: RunsReport) -> list[str]:
    """Say which schedule is the fastest."""
    rows = {origin: report.rows(origin) for origin in report.origins}
    return [
        f"{origin.capitalize()}, {_unproved(report, origin) or speed_conclusion(found, report.base)}"
        for origin, found in rows.items()
        if len(found) > 1
    ]


def _to_measure(report: RunsReport) -> list[str]:
    """Say which measurement would narrow intervals most, where something is uncertain."""
    scenario = simulated_scenario(report.runs[0].run, report.calibrated, real=None)
    shares = {label: each.of(RANGES) for label, each in report.rows("simulated").items()}
    return [f"{each[0].upper()}{each[1:]}." for each in causes(scenario, shares)]


def _unproved(report: RunsReport, origin: Origin) -> str | None:
    """Say why no schedule is named, if the simulation is not of the job that its scenario was imported from."""
    facts = report.runs[0].run.scenario.imported
    problem = facts.problem if facts and origin == "simulated" else None
    return f"no schedule is recommended: {problem}." if problem else None


def speed_conclusion(rows: Mapping[str, Row], base: str) -> str:
    """Say which schedule is the fastest, by how much, and in which state it spends less.

    Args:
        rows: Lines of the speed-up table, two or more, by label.
        base: Label of the baseline.
    """
    best = max((label for label in rows if label != base), key=lambda label: rows[label].speedup)
    factor = rows[best].speedup
    if abs(factor - 1) < _SAME:
        return f"no schedule is faster than {base}; {best} takes as long, within {100 * _SAME:g} %."
    ends = rows[best].speedup_range
    if ends and ends[0] <= 1 <= ends[1]:
        return f"no schedule is surely faster than {base}; {best} is {in_range(factor, *ends)} times as fast."
    if factor < 1:
        next_best = f"{best} comes next, {factor:.2f} times as fast"
        return f"no schedule is faster than {base}; {next_best}: {_why(rows, best, base)}."
    return f"{best} is {factor:.2f} times as fast as {base}; {_why(rows, best, base)}."


def _why(rows: Mapping[str, Row], label: str, base: str) -> str:
    """Name the state that makes most of the difference between two schedules."""
    less_s = {state: rows[label].states_s[state] - rows[base].states_s[state] for state in STATES}
    total_s = rows[label].step_s - rows[base].step_s
    state = (min if total_s < 0 else max)(less_s, key=lambda state: less_s[state])
    share = less_s[state] / total_s
    part = "all" if share >= 0.995 else "most" if share > 0.5 else "the largest part"
    less = f"{'+' if less_s[state] > 0 else ''}{format_seconds(less_s[state])}"
    return f"{part} of the difference is {_STATE_WORDS[state]} ({less} a step)"


def states_section(report: RunsReport) -> Section:
    """Show how long ranks are in each state, simulated and measured beside each other."""
    unit, scale = time_unit(max(each.step_s for _, each in report.executions()))
    bars = {run.label: tuple(_states_bar(each, scale) for each in run.executions.values()) for run in report.runs}
    chart = bar_chart(
        [BarGroup(label, of_run) for label, of_run in bars.items()],
        element_id="states-chart",
        title="Stacked bars of the seconds of a step by state; the table below has the numbers",
        axis=f"{unit} per step, average over ranks",
    )
    first = report.runs[0]
    answers = conclusions(_states_conclusion(first, each) for each in first.executions.values())
    beside = tag("div", chart, _states_table(report), class_="beside")
    parts = [tag("p", _ABOUT_STATES), answers, _legend(report), beside, *_links_table(report)]
    return Section("states", "Where the time of a step goes", join(parts))


def _states_conclusion(run: ReportedRun, execution: Execution) -> str:
    """Return the share of computing in a step, and the largest other part, in a sentence."""
    shares = {state: execution.state_s(state) / execution.step_s for state in STATES}
    rest = max(STATES[1:], key=lambda state: shares[state])
    gaps = ", or their devices are idle between kernels," if run.run.scenario.imported else ""
    computing = f"{run.label}, {execution.origin}: ranks compute{gaps} {percent(shares['compute'])} of the time"
    if shares[rest] < 0.0005:
        return f"{computing}; there is hardly anything else."
    return f"{computing}; most of the rest is {_STATE_WORDS[rest]} ({percent(shares[rest])})."


def _links_table(report: RunsReport) -> list[Html]:
    """Name the links that held ranks up, if any did."""
    lines = [
        [run.label, each.origin, link, duration(held_s), percent(held_s / each.step_s)]
        for run, each in report.executions()
        for link, held_s in LINKS.largest(each.times.of(LINKS))
    ]
    header = ["schedule", "trace", "link", "held up", "of a step"]
    caption = "Links that held ranks up: time per step of a rank, in comm and io; others may wait for it besides"
    return [table(caption, header, lines, words=["trace", "link"])] if lines else []


def _states_bar(execution: Execution, scale: float) -> Bar:
    segments = (
        BarSegment(state, seconds * scale, f"{state}, {execution.origin}: {format_seconds(seconds)} a step")
        for state, seconds in zip(STATES, map(execution.state_s, STATES), strict=True)
    )
    return Bar(tuple(segments), f"{execution.origin} {format_seconds(execution.step_s)}")


def _legend(report: RunsReport) -> Html:
    """Explain the states that occur."""
    found = [state for state in STATES if any(each.state_s(state) > _SEEN_S for _, each in report.executions())]
    items = [tag("li", _swatch(state), f"{state}: {_STATE_WORDS[state]}") for state in found]
    return tag("ul", *items, class_="legend")


def _swatch(state: str) -> Html:
    """Return a square as the bars have it; the hatching is that of the chart."""
    box = {"width": 14, "height": 14}
    parts = [tag("rect", class_=f"fill {state}", **box)]
    if state in HATCHED:
        parts.append(tag("rect", fill=f"url(#states-chart-{state})", **box))
    return tag("svg", *parts, aria_hidden="true", **box)


def _states_table(report: RunsReport) -> Html:
    lines = []
    for run, each in report.executions():
        times = map(duration, (each.step_s, *map(each.state_s, STATES)))
        lines.append([run.label, each.origin, *times, percent(each.state_s("compute") / each.step_s)])
    header = ["schedule", "trace", "step time", *STATES, "computing"]
    return table("Time per step by state, average over ranks", header, lines, words=["trace"])
