"""What every stream of every rank did, span by span."""

from collections.abc import Sequence
from dataclasses import dataclass

from simdist.errors import ScenarioError
from simdist.plan import Plan
from simdist.report.page.document import Section
from simdist.report.page.html import Html, join, prose, tag
from simdist.report.page.model import Report, ReportedRun
from simdist.report.page.timeline import timeline_section
from simdist.traces.trace import Trace
from simdist.traces.waiting import first_steps

MOST_SPANS = 2_000_000
"""Operation instances times ranks of one trace in a page, and twice as many in all; then it still opens at once."""

_ABOUT = (
    "What the streams of every rank did; times are from the start of the run. A collective begins when its last member "
    "is ready; until then the others wait."
)


@dataclass(frozen=True)
class Shown:
    """What the timeline shows of a run.

    Args:
        run: Which.
        traces: Simulated, measured or both -> what happened up to the last of the steps that are shown.
        steps: Those steps.
        n_steps: All steps of the run that every rank finished.
        is_cut: More were asked for than fit.
    """

    run: ReportedRun
    traces: dict[str, Trace]
    steps: range
    n_steps: int
    is_cut: bool

    @property
    def n_spans(self) -> int:
        """Operation instances times ranks, of all traces."""
        return sum(_n_spans(trace.plan, self.steps) for trace in self.traces.values())


def shown_runs(report: Report, steps: range | None) -> list[Shown]:
    """Choose the steps of every run that the timeline shows.

    Args:
        report: The runs.
        steps: What was asked for; all steps if None. As many as fit are shown.

    Raises:
        ScenarioError: A run has none of the steps that are asked for.
    """
    limit = MOST_SPANS * 2 // max(2, len(report.executions()))
    return [_shown(run, steps, limit) for run in report.runs]


def _shown(run: ReportedRun, wanted: range | None, limit: int) -> Shown:
    n_steps = min(each.n_steps for each in run.executions.values())
    asked = range(n_steps) if wanted is None else range(wanted.start, min(wanted.stop, n_steps))
    if not asked:
        raise ScenarioError(f"{run.run.path}: the timeline is to show no step; choose some of 0 to {n_steps - 1}")
    steps = fitting_steps(run.run.plan, asked, limit)
    traces: dict[str, Trace] = {origin: _until(each.trace, steps.stop) for origin, each in run.executions.items()}
    return Shown(run, traces, steps, n_steps, is_cut=len(steps) < len(asked))


def fitting_steps(plan: Plan, asked: range, limit: int) -> range:
    """Return the first of the steps of a plan that have no more than `limit` spans, at least one step."""
    first = plan.first_instances()[asked.start : asked.stop + 1]
    n_fit = int(((first[1:] - first[0]) * plan.world_size <= limit).sum())
    return asked[: max(1, n_fit)]


def _until(trace: Trace, n_steps: int) -> Trace:
    """Leave out later steps, from the plan as well, so that traces of other lengths can stand beside each other."""
    return first_steps(trace, n_steps) if n_steps < trace.plan.n_steps else trace


def _n_spans(plan: Plan, steps: range) -> int:
    first = plan.first_instances()
    return int(first[steps.stop] - first[steps.start]) * plan.world_size


def timelines_section(shown: Sequence[Shown]) -> Section:
    """Show the timeline of one run at a time, with a choice of the run if there are several."""
    notes = [tag("li", note) for each in shown if (note := _note(each))]
    timelines = [
        tag(
            "div",
            Html(
                timeline_section(
                    each.traces,
                    element_id=f"timeline-{number}",
                    ranks_per_node=each.run.run.scenario.cluster.gpus_per_node,
                    steps=each.steps,
                )
            ),
            data_timeline=number,
            hidden=number > 0,
        )
        for number, each in enumerate(shown)
    ]
    parts = [
        tag("p", _ABOUT),
        tag("ul", *notes, class_="notes") if notes else "",
        _chooser([each.run.label for each in shown]) if len(shown) > 1 else "",
        *timelines,
    ]
    return Section("timelines", "Timeline", join(parts))


def _chooser(labels: list[str]) -> Html:
    options = join(tag("option", label, value=number) for number, label in enumerate(labels))
    select = tag("select", options, id="timeline-run", autocomplete="off")
    return tag("div", tag("label", "Run ", select), class_="controls needs-script", hidden=True)


def _note(shown: Shown) -> Html | None:
    """Say so if the timeline does not show all steps, or not all that were asked for."""
    if len(shown.steps) == shown.n_steps:
        return None
    steps = f"steps {shown.steps.start} to {shown.steps.stop - 1} of {shown.n_steps:,}"
    why = "more would make the page too large; `--steps A:B` chooses others" if shown.is_cut else "as asked for"
    return prose("{label}: the timeline shows {steps}: " + why + ".", label=shown.run.label, steps=steps)
