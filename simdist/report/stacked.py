"""Timelines of several schedules above each other, on one scale of time."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from simdist.errors import TraceError
from simdist.report import palette
from simdist.report.lanes import LEGEND, View, draw_lanes
from simdist.report.lettering import literal_text, shortened
from simdist.report.palette import Style, time_unit
from simdist.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_WIDTH_IN = 9.0  # 900 pixels, the column of a notebook
_LANE_IN, _TITLE_IN, _LEGEND_IN = 0.17, 0.9, 0.6
_SMALLEST_PT = 9.0


def schedules_figure(
    traces: Mapping[str, Trace], *, ranks: Sequence[int], first_step: int = 0, n_steps: int = 4
) -> "Figure":
    """Draw the same steps of several schedules above each other; what takes longer reaches further to the right.

    Args:
        traces: Title -> what happened, from top to bottom.
        ranks: The ranks of each.
        first_step: First step drawn.
        n_steps: Steps drawn.

    Raises:
        TraceError: There are no traces, or one has no such step or rank.
    """
    from matplotlib.figure import Figure

    views = {title: _view(title, traces[title], ranks, range(first_step, first_step + n_steps)) for title in traces}
    if not views:
        raise TraceError("no traces to draw; give at least one")
    longest_s = max(view.end_s - view.begin_s for view in views.values())
    unit, scale = time_unit(max(view.end_s for view in views.values()))
    heights_in = [_TITLE_IN + _LANE_IN * len(view.lanes) * len(ranks) for view in views.values()]
    figure = Figure(figsize=(_WIDTH_IN, sum(heights_in) + _LEGEND_IN), layout="constrained")
    styles: set[Style] = set()
    with literal_text():
        panels = figure.subplots(len(views), 1, squeeze=False, height_ratios=heights_in)[:, 0]
        for axes, (title, view) in zip(panels, views.items(), strict=True):
            styles |= draw_lanes(axes, traces[title], view, scale)
            axes.set_xlim(view.begin_s * scale, (view.begin_s + longest_s) * scale)
            axes.set_title(shortened(title, most=90), loc="left", fontsize="medium", fontweight="bold", pad=18)
            axes.set_xlabel(f"time since the start ({unit})")
            for text in axes.texts:
                text.set_fontsize(_SMALLEST_PT)
        _explain(figure, [style for style in LEGEND if style in styles])
    return figure


def _view(title: str, trace: Trace, ranks: Sequence[int], steps: range) -> View:
    plan = trace.plan
    if not 0 <= steps.start < steps.stop <= plan.n_steps:
        raise TraceError(f"{title}: steps {steps.start} to {steps.stop - 1}; the trace has 0 to {plan.n_steps - 1}")
    outside = [rank for rank in ranks if not 0 <= rank < plan.world_size]
    if outside or not ranks:
        found = f"rank {outside[0]} is not in the trace" if outside else "no rank is chosen"
        raise TraceError(f"{title}: {found}; choose among 0 to {plan.world_size - 1}")
    return View.of(trace, steps, list(ranks))


def _explain(figure: "Figure", styles: Sequence[Style]) -> None:
    """Put the legend below, in rows that fit into the width."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [
        Patch(facecolor=style.face, edgecolor=style.ink, linewidth=0.4, hatch=style.hatch or None, label=style.label)
        for style in styles
    ]
    handles.append(Line2D([], [], color=palette.BLACK, linewidth=1.0, label="end of step"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False, fontsize=_SMALLEST_PT
    )
