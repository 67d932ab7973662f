"""Timelines of every stream of every rank, span by span, that a reader can zoom.

They are drawn by the scripts in `assets/timeline/`, which ask for nothing from any network and evaluate no text. How
times get into the page, and how exact they are there, is said in `simdist.report.page.packing`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template

from simdist.errors import ScenarioError, TraceError
from simdist.plan import Plan
from simdist.report.figures import shortened
from simdist.report.page.document import Section, asset, json_text, program
from simdist.report.page.html import Html, controls, escape, join, notes, prose, select, tag
from simdist.report.page.model import ReportedRun, RunsReport
from simdist.report.page.packing import pack, plan_record, rows_of_streams, style_key, styles_of
from simdist.report.palette import Style
from simdist.traces.trace import Trace
from simdist.traces.waiting import first_steps

#: Operation instances times ranks of one trace in a page, and twice as many in all; then it still opens at once.
MOST_SPANS = 2_000_000

_DRAWING = ("decode", "units", "axis", "rows", "shares", "colours", "view", "paint", "margins", "overlay")
_HANDLING = ("spans", "focus", "filters", "controls", "main")
_MOST_TRACES = 2
_ABOUT = (
    "Spans of the streams of every rank; times are from the start of the run. A collective begins when its last member "
    "is ready; until then the others wait."
)


@dataclass(frozen=True)
class Shown:
    """Part of a run that a timeline shows.

    Args:
        run: Which.
        traces: `simulated`, `measured` or both -> trace up to the last shown step.
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


def shown_runs(report: RunsReport, steps: range | None) -> list[Shown]:
    """Choose the steps of every run that the timeline shows.

    Args:
        report: The runs.
        steps: Steps that were asked for; all steps if None. As many as fit are shown.

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
    # later steps are left out, of the plan as well, so that traces of other lengths can stand beside each other
    traces: dict[str, Trace] = {
        origin: first_steps(each.trace, steps.stop) if steps.stop < each.n_steps else each.trace
        for origin, each in run.executions.items()
    }
    return Shown(run, traces, steps, n_steps, is_cut=len(steps) < len(asked))


def fitting_steps(plan: Plan, asked: range, limit: int) -> range:
    """Return the first of the steps of a plan that have no more than `limit` spans, at least one step."""
    first = plan.first_instances()[asked.start : asked.stop + 1]
    n_fit = int(((first[1:] - first[0]) * plan.world_size <= limit).sum())
    return asked[: max(1, n_fit)]


def _n_spans(plan: Plan, steps: range) -> int:
    first = plan.first_instances()
    return int(first[steps.stop] - first[steps.start]) * plan.world_size


def timelines_section(shown: Sequence[Shown]) -> Section:
    """Show the timeline of one run at a time, with a choice of the run if there are several."""
    timelines = []
    for number, each in enumerate(shown):
        per_node = each.run.run.scenario.cluster.gpus_per_node
        name = f"timeline-{number}"
        timeline = timeline_section(each.traces, element_id=name, ranks_per_node=per_node, steps=each.steps)
        timelines.append(tag("div", timeline, data_timeline=number, hidden=number > 0))
    runs = [(each.run.label, number) for number, each in enumerate(shown)]
    parts = [
        tag("p", _ABOUT),
        notes(note for each in shown if (note := _note(each))),
        controls(select("timeline-run", "Run", runs)) if len(shown) > 1 else "",
        *timelines,
    ]
    return Section("timelines", "Timeline", join(parts))


def _note(shown: Shown) -> Html | None:
    """Say so if the timeline does not show all steps, or not all that were asked for."""
    if len(shown.steps) == shown.n_steps:
        return None
    steps = f"steps {shown.steps.start} to {shown.steps.stop - 1} of {shown.n_steps:,}"
    why = "more would make the page too large; `--steps A:B` chooses others" if shown.is_cut else "as asked for"
    return prose("{label}: the timeline shows {steps}: " + why + ".", label=shown.run.label, steps=steps)


def timeline_section(
    traces: Mapping[str, Trace], *, element_id: str, ranks_per_node: int | None = None, steps: range | None = None
) -> Html:
    """Return an interactive timeline; equal traces give equal text.

    Args:
        traces: Traces by their names in the page, such as `simulated` and `measured` -> trace; one, or two of one plan.
        element_id: The id of the element, unlike all others in the page.
        ranks_per_node: Consecutive ranks that share a node. By default that of the plan's data set.
        steps: Consecutive steps that are shown, from the end of the step before; all if None.

    Raises:
        TraceError: There is none, or more than two, or they are of different plans.
    """
    if not 1 <= len(traces) <= _MOST_TRACES:
        raise TraceError(f"{len(traces)} traces for a timeline; it shows one, or two of the same plan")
    first, *others = traces.values()
    for other in others:
        first.difference_s(other)  # refuses traces of different plans
    plan = first.plan
    if ranks_per_node is None and plan.dataset is not None:
        ranks_per_node = plan.dataset.ranks_per_node
    shown = steps or range(plan.n_steps)
    packed = {name: pack(trace, steps) for name, trace in traces.items()}
    record = plan_record(plan, ranks_per_node=ranks_per_node) | {
        "firstStep": shown.start,
        "lastStep": shown.stop - 1,
        "traces": [
            {"name": name, "source": traces[name].source, "tickS": each.tick_s, "begin": each.begin}
            for name, each in packed.items()
        ],
    }
    which = f"steps {shown.start} to {shown.stop - 1}" if shown.start else f"{shown.stop} steps"
    filled = Template(asset("timeline/timeline.html")).substitute(
        id=escape(element_id),
        label=escape(f"Timeline of {shortened(plan.name)}: {plan.world_size} ranks, {which}"),
        last_rank=plan.world_size - 1,
        first_step=shown.start,
        last_step=shown.stop - 1,
        streams=join(_checkbox(stream) for stream in rows_of_streams(plan)),
        shown=_choice(list(traces)),
        nodes=_node_field(plan, ranks_per_node),
        legend=join(_legend_entry(style) for style in styles_of(plan)),
        record=json_text(record),
        data="".join(f'<script type="application/octet-stream">{each.data}</script>\n' for each in packed.values()),
    )
    return Html(filled)


def timeline_assets() -> tuple[str, str]:
    """Return the style sheet and the script of all timelines of a page, for a `<style>` and a `<script>` element."""
    return asset("timeline/timeline.css"), program(*(f"timeline/{name}" for name in (*_DRAWING, *_HANDLING)))


def _checkbox(stream: str) -> Html:
    return tag("label", tag("input", type="checkbox", data_stream=stream, checked=True), f" {stream}")


def _choice(names: list[str]) -> Html:
    """Return the choice among two traces and both; nothing if there is just one."""
    if len(names) == 1:
        return Html("")
    both = tag("option", " above ".join(names), value="", selected=True)
    options = join([both, *(tag("option", name, value=name) for name in names)])
    return tag("label", "Show ", tag("select", options, data_control="shown"))


def _node_field(plan: Plan, ranks_per_node: int | None) -> Html:
    """Return the field for nodes; nothing if they are not known, or there is just one."""
    if ranks_per_node is None or plan.world_size <= ranks_per_node:
        return Html("")
    hint = f"all of 0-{(plan.world_size - 1) // ranks_per_node}"
    off = {"autocomplete": "off", "spellcheck": "false"}
    return tag("label", "Nodes ", tag("input", type="text", data_control="nodes", size=8, placeholder=hint, **off))


def _legend_entry(style: Style) -> Html:
    swatch = tag("canvas", class_="timeline-swatch", data_style=style_key(style), aria_hidden="true")
    return tag("li", swatch, style.label)
