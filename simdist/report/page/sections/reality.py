"""Whether the simulation says what was measured: errors, injected delays, stragglers, order of schedules."""

import math

from simdist.ranking import Summary, summarize
from simdist.report.page.document import Section
from simdist.report.page.html import Html, duration, join, percent, prose, signed_percent, table, tag
from simdist.report.page.model import Report, ReportedRun
from simdist.validate import Validation

__all__ = ["reality_section"]

_MOST_RANKS = 10  # lines of a table of ranks

_ABOUT = (
    "Both traces are of the same plan with the same injected delays. An error is (simulated - measured) / measured: "
    "above 0, the simulation is slower than the machines."
)


def reality_section(report: Report) -> Section | None:
    """Compare simulation and measurement of the runs that have both; None if there is no such run."""
    pairs = [(run, run.validation) for run in report.runs if run.validation]
    if not pairs:
        return None
    parts = [tag("p", _ABOUT), tag("p", prose(_cluster(report))), *_summary(report, pairs)]
    parts += [join(_details(run, found)) for run, found in pairs]
    return Section("reality", "Simulation against measurement", join(parts))


def _cluster(report: Report) -> str:
    name = report.baseline.run.scenario.cluster.name
    which = f"the cluster of the scenario, {name}" if name else "the cluster of the scenario"
    return (
        f"Simulated is {which}. If its links were not measured on these machines, the errors are those of its numbers, "
        f"too: `simdist validate RUN --cluster FILE` simulates calibrated ones."
    )


def _summary(report: Report, pairs: list[tuple[ReportedRun, Validation]]) -> list[Html]:
    """Compare makespans and, of several schedules, their order."""
    base = next((found for run, found in pairs if run is report.baseline), pairs[0][1])
    summary = summarize([found for _, found in pairs], baseline=base.schedule)
    lines = [
        [
            run.label,
            duration(row.simulated_s),
            duration(row.measured_s),
            signed_percent(row.error),
            f"{found.n_steps:,}",
        ]
        for (run, found), row in zip(pairs, summary.rows, strict=True)
    ]
    header = ["schedule", "simulated", "measured", "error", "steps"]
    return [tag("p", _conclusion(summary), class_="conclusion"), table("Makespans", header, lines)]


def _conclusion(summary: Summary) -> str:
    worst, median = f"{100 * summary.worst_error:+.1f} %", f"{100 * summary.median_error:.1f} %"
    if len(summary.rows) == 1:
        return f"The simulated makespan is off by {worst}."
    errors = f"The simulated makespans are off by {median} in the median and by {worst} at worst."
    if not summary.n_clear_pairs:
        return f"{errors} As measured, no two schedules differ by more than 5 %."
    n_right = summary.n_clear_pairs - len(summary.wrong_pairs)
    order = (
        f"{n_right} of {summary.n_clear_pairs} pairs of schedules that differ by more than 5 % are in the right order."
    )
    wrong = "".join(f" Measured, {faster} is faster than {slower}." for faster, slower in summary.wrong_pairs)
    return f"{errors} {order}{wrong}"


def _details(run: ReportedRun, found: Validation) -> list[Html]:
    return [
        tag("h3", run.label),
        tag("p", f"Stragglers: {found.verdict}.{_overlap(found)}", class_="conclusion"),
        tag(
            "div",
            _kinds(run.label, found),
            tag("div", *_injections(run.label, found), _blames(run.label, found)),
            class_="beside",
        ),
    ]


def _overlap(found: Validation) -> str:
    if math.isnan(found.overlap):
        return ""
    return f" {percent(found.overlap)} of the measured waiting is blamed on the same rank in the same step."


def _kinds(label: str, found: Validation) -> Html:
    header = ["operation", "stream", "group", "count", "simulated", "measured", "error", "by instance"]
    lines = [
        [
            kind.op,
            kind.stream,
            kind.group,
            f"{kind.count:,}",
            duration(kind.simulated_s),
            duration(kind.measured_s),
            signed_percent(kind.error),
            percent(kind.instance_error),
        ]
        for kind in found.kinds
    ]
    caption = f"What operations take, {label}: medians; by instance: median of |simulated - measured| / measured"
    return table(caption, header, lines, words=["stream", "group"])


def _injections(label: str, found: Validation) -> list[Html]:
    if not found.injections:
        return []
    header = ["channel", "delays", "drawn", "measured", "largest difference", "where"]
    lines = [
        [
            each.channel,
            f"{each.count:,}",
            duration(each.drawn_s),
            duration(each.measured_s),
            duration(each.difference_s, signed=True),
            f"step {each.step}, rank {each.rank}",
        ]
        for each in found.injections
    ]
    return [table(f"Injected delays, {label}: were they as long as drawn?", header, lines, words=["where"])]


def _blames(label: str, found: Validation) -> Html:
    worst = sorted(found.blames, key=lambda blame: -max(blame.simulated_s, blame.measured_s))[:_MOST_RANKS]
    lines = [
        [f"rank {blame.rank}", duration(blame.simulated_s), duration(blame.measured_s)]
        for blame in sorted(worst, key=lambda blame: blame.rank)
    ]
    n_ranks = len(found.blames)
    which = f"{_MOST_RANKS} of {n_ranks:,} ranks, those blamed most" if n_ranks > _MOST_RANKS else "all ranks"
    return table(f"Waiting that ranks caused, {label}: {which}", ["rank", "simulated", "measured"], lines)
