"""The timeline that a reader can zoom: what every stream of every rank did, drawn by the script of the page.

The script and its style sheet are in `assets/timeline/`, plain JavaScript in parts of one subject each; they ask for
nothing from any network and evaluate no text. How times get into the page, and how exact they are there, is said in
`simdist.report.page.packing`.
"""

import html
from collections.abc import Mapping
from importlib.resources import files
from string import Template

from simdist.errors import TraceError
from simdist.plan import Plan
from simdist.report.figures import shortened
from simdist.report.page.document import json_text, program
from simdist.report.page.packing import pack, plan_record, rows_of_streams, style_key, styles_of
from simdist.traces.trace import Trace

_SCRIPTS = (
    "decode",
    "units",
    "axis",
    "rows",
    "shares",
    "colours",
    "view",
    "paint",
    "margins",
    "overlay",
    "spans",
    "focus",
    "filters",
    "controls",
    "main",
)
_MOST_TRACES = 2


def timeline_section(
    traces: Mapping[str, Trace], *, element_id: str, ranks_per_node: int | None = None, steps: range | None = None
) -> str:
    """Return the HTML of an interactive timeline; equal traces give equal text.

    Args:
        traces: What each is called in the page, such as `simulated` and `measured` -> trace; one, or two of one plan.
        element_id: The id of the element, unlike all others in the page.
        ranks_per_node: Consecutive ranks that share a node, to choose ranks by node. By default that of the plan's data
            set, if it has one.
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
    return Template(_asset("timeline.html")).substitute(
        id=html.escape(element_id),
        label=html.escape(f"Timeline of {shortened(plan.name)}: {plan.world_size} ranks, {_steps_text(shown)}"),
        last_rank=plan.world_size - 1,
        first_step=shown.start,
        last_step=shown.stop - 1,
        streams="".join(_checkbox(stream) for stream in rows_of_streams(plan)),
        shown=_choice(list(traces)),
        nodes=_node_field(plan, ranks_per_node),
        legend="".join(_legend_entry(style_key(style), style.label) for style in styles_of(plan)),
        record=json_text(record),
        data="".join(f'<script type="application/octet-stream">{each.data}</script>\n' for each in packed.values()),
    )


def _steps_text(shown: range) -> str:
    return f"steps {shown.start} to {shown.stop - 1}" if shown.start else f"{shown.stop} steps"


def timeline_assets() -> tuple[str, str]:
    """Return the style sheet and the script of all timelines of a page, for a `<style>` and a `<script>` element."""
    return _asset("timeline.css"), program(*(f"timeline/{name}" for name in _SCRIPTS))


def _asset(name: str) -> str:
    return files("simdist.report.page").joinpath("assets", "timeline", name).read_text(encoding="utf-8")


def _checkbox(stream: str) -> str:
    return f'<label><input type="checkbox" data-stream="{stream}" checked> {stream}</label>\n'


def _choice(names: list[str]) -> str:
    """Return the choice among two traces and both; nothing if there is just one."""
    if len(names) == 1:
        return ""
    options = "".join(f'<option value="{html.escape(name)}">{html.escape(name)}</option>' for name in names)
    both = f'<option value="" selected>{html.escape(" above ".join(names))}</option>'
    return f'<label>Show <select data-control="shown">{both}{options}</select></label>\n'


def _node_field(plan: Plan, ranks_per_node: int | None) -> str:
    """Return the field for nodes; nothing if they are not known, or there is just one."""
    if ranks_per_node is None or plan.world_size <= ranks_per_node:
        return ""
    last = (plan.world_size - 1) // ranks_per_node
    return (
        f'<label>Nodes <input type="text" data-control="nodes" size="8" placeholder="all of 0-{last}" '
        f'autocomplete="off" spellcheck="false"></label>\n'
    )


def _legend_entry(key: str, label: str) -> str:
    return f'<li><canvas class="timeline-swatch" data-style="{key}" aria-hidden="true"></canvas>{label}</li>\n'
