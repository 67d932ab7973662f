"""Agreement of simulation and measurement: errors, injected delays, stragglers, order of schedules."""

import math
from dataclasses import replace

from simdist.report.page.document import Section
from simdist.report.page.html import Html, conclusions, duration, join, percent, prose, signed_percent, table, tag
from simdist.report.page.model import ReportedRun, RunsReport
from simdist.studies.ranking import Summary, summarize
from simdist.studies.validation import Validation

_MOST_RANKS = 10  # lines of a table of ranks

_ABOUT = (
    "Both traces are of the same plan with the same injected delays. An error is (simulated - measured) / measured: "
    "above 0, the simulation is slower than the machines."
)


def reality_section(report: RunsReport) -> Section | None:
    """Compare simulation and measurement of the runs that have both; None if there is no such run."""
    pairs = [(run, run.validation) for run in report.runs if run.validation]
    if not pairs:
        return None
    parts = [tag("p", _ABOUT), tag("p", _cluster(report)), *_summary(report)]
    parts += [join(_details(run, found)) for run, found in pairs]
    return Section("reality", "Simulation against measurement", join(parts))


def _cluster(report: RunsReport) -> Html:
    if report.calibrated:
        return prose(
            "Simulated are the machines of `{file}`, as `simdist validate RUN --cluster FILE` does; an emulated "
            "computation takes what the scenario says.",
            file=str(report.calibrated.file),
        )
    name = report.runs[0].run.scenario.cluster.name
    which = f"the cluster of the scenario, {name}" if name else "the cluster of the scenario"
    return prose(
        "Simulated is {which}. If its links were not measured on these machines, the errors are those of its numbers, "
        "too: `simdist report --cluster FILE` simulates calibrated ones.",
        which=which,
    )


def _summary(report: RunsReport) -> list[Html]:
    """Compare makespans and, of several schedules of a point, their order."""
    pairs = [replace(run.validation, schedule=run.label) for run in report.runs if run.validation]
    sentence = _conclusion(summarize(pairs, baseline=pairs[0].schedule))
    lines = [
        [run.label, *_times(each.simulated_s, each.measured_s, each.error), f"{each.n_steps:,}"]
        for run in report.runs
        if (each := run.validation)
    ]
    header = ["schedule", "simulated", "measured", "error", "steps"]
    return [conclusions([sentence]), table("Makespans", header, lines)]


def _conclusion(summary: Summary) -> str:
    worst = f"{100 * summary.worst_error:+.1f} %"
    median = f"{100 * summary.median_error:.1f} %"
    if len(summary.rows) == 1:
        return f"The simulated makespan is off by {worst}."
    errors = f"The simulated makespans are off by {median} in the median and by {worst} at worst."
    return f"{errors} Their order: {summary.order.verdict}."


def _details(run: ReportedRun, found: Validation) -> list[Html]:
    stragglers = tag("p", f"Stragglers: {found.verdict}.{_overlap(found)}", class_="conclusion")
    of_ranks = tag("div", *_injections(run.label, found), _blames(run.label, found))
    return [tag("h3", run.label), stragglers, tag("div", _kinds(run.label, found), of_ranks, class_="beside")]


def _times(simulated_s: float, measured_s: float, error: float) -> tuple[Html, Html, Html]:
    return duration(simulated_s), duration(measured_s), signed_percent(error)


def _overlap(found: Validation) -> str:
    if math.isnan(found.overlap):
        return ""
    return f" {percent(found.overlap)} of the measured waiting is blamed on the same rank in the same step."


def _kinds(label: str, found: Validation) -> Html:
    header = ["operation", "stream", "group", "count", "simulated", "measured", "error", "by instance", "|by instance|"]
    lines = []
    for kind in found.kinds:
        times = _times(kind.simulated_mean_s, kind.measured_mean_s, kind.error)
        by_instance = signed_percent(kind.signed_instance_error), percent(kind.instance_error)
        lines.append([kind.op, kind.stream, kind.group, f"{kind.count:,}", *times, *by_instance])
    caption = f"Times of operations, {label}: means and their error; by instance: medians of the error and of |error|"
    return table(caption, header, lines, words=["stream", "group"])


def _injections(label: str, found: Validation) -> list[Html]:
    if not found.injections:
        return []
    header = ["channel", "delays", "drawn", "measured", "largest difference", "where"]
    lines = []
    for each in found.injections:
        times = duration(each.drawn_s), duration(each.measured_s), duration(each.difference_s, signed=True)
        lines.append([each.channel, f"{each.count:,}", *times, f"step {each.step}, rank {each.rank}"])
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
