"""Timelines: the operations of all streams of some ranks, for one execution or several above each other."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from simdist.errors import TraceError
from simdist.report import palette
from simdist.report.figures import WIDTH_IN, literal_text, new_figure, shortened
from simdist.report.lanes import LEGEND, TEXT_PT, LaneView, draw_lanes
from simdist.report.palette import Style, time_unit
from simdist.traces.trace import Trace
from simdist.traces.waiting import attribute_waiting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MOST_RANKS = 16
_LANE_IN = 0.17
_TITLE_IN = 0.9
_LEGEND_IN = 0.6


def timeline_figure(*traces: Trace, first_step: int = 0, n_steps: int = 4) -> "Figure":
    """Draw the operations of all streams of some ranks in a few steps.

    Each rank is a band with a lane per stream; the end of a step on a rank is a black mark. Waiting for others is pale
    and hatched, moving bytes solid, an injected delay crossed. Of several traces of a plan, such as a simulation and a
    measurement, the same steps are drawn above each other on one scale of time; what took longer reaches further.

    Args:
        traces: Of one plan.
        first_step: First step drawn.
        n_steps: Steps drawn, if there are as many.

    Up to 16 ranks are drawn, of two traces 8. Of more, half are those that others waited for most in these steps of the
    last trace, and half are spread evenly over the rest.

    Raises:
        TraceError: They are traces of different plans, or have no such step.
    """
    first, *others = traces
    for other in others:
        first.difference_s(other)  # refuses traces of different plans
    n_all = first.plan.n_steps
    if not 0 <= first_step < n_all or n_steps < 1:
        raise TraceError(f"{n_steps} steps from step {first_step}: the trace has the steps 0 to {n_all - 1}")
    steps = range(first_step, min(first_step + n_steps, n_all))
    chosen, why = _choose_ranks(traces[-1], steps, most=_MOST_RANKS // len(traces))
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    title = f"{shortened(first.plan.name)}: {which} of {n_all}, {why}"
    sources = [shortened(trace.source, most=90) for trace in traces]
    views = [LaneView.of(trace, steps, chosen) for trace in traces]
    return _figure([f"{title}\n{sources[0]}" if others else title, *sources[1:]], views)


def schedules_figure(
    traces: Mapping[str, Trace], *, ranks: Sequence[int], first_step: int = 0, n_steps: int = 4
) -> "Figure":
    """Draw the same steps of several schedules above each other, on one scale of time.

    Args:
        traces: Title -> trace, from top to bottom.
        ranks: The ranks of each.
        first_step: First step drawn.
        n_steps: Steps drawn.

    Raises:
        TraceError: There are no traces, or one has no such step or rank.
    """
    if not traces:
        raise TraceError("no traces to draw; give at least one")
    steps = range(first_step, first_step + n_steps)
    views = [_view(title, trace, ranks, steps) for title, trace in traces.items()]
    return _figure([shortened(title, most=90) for title in traces], views)


def _figure(titles: Sequence[str], views: Sequence[LaneView]) -> "Figure":
    """Draw views above each other, each below its title, and explain the styles at the bottom."""
    heights_in = [_TITLE_IN + _LANE_IN * len(view.lanes) * len(view.ranks) for view in views]
    figure = new_figure(WIDTH_IN, math.fsum(heights_in) + _LEGEND_IN)
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    with literal_text():
        panels = figure.subplots(len(views), 1, squeeze=False, height_ratios=heights_in)[:, 0]
        styles = _draw(panels, views)
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title, loc="left", fontsize="medium", fontweight="bold", pad=18)
        handles: list[Patch | Line2D] = [
            Patch(facecolor=each.face, edgecolor=each.ink, linewidth=0.4, hatch=each.hatch or None, label=each.label)
            for each in LEGEND
            if each in styles
        ]
        handles.append(Line2D([], [], color=palette.BLACK, linewidth=1.0, label="end of step"))
        n_columns = min(len(handles), 5)
        figure.legend(handles=handles, loc="outside lower center", ncols=n_columns, frameon=False, fontsize=TEXT_PT)
    return figure


def _view(title: str, trace: Trace, ranks: Sequence[int], steps: range) -> LaneView:
    last = trace.plan.n_steps - 1
    if not 0 <= steps.start < steps.stop <= last + 1:
        raise TraceError(f"{title}: steps {steps.start} to {steps.stop - 1}; the trace has 0 to {last}")
    outside = [rank for rank in ranks if not 0 <= rank < trace.plan.world_size]
    if outside or not ranks:
        found = f"rank {outside[0]} is not in the trace" if outside else "no rank is chosen"
        raise TraceError(f"{title}: {found}; choose among 0 to {trace.plan.world_size - 1}")
    return LaneView.of(trace, steps, list(ranks))


def _draw(panels: "Iterable[Axes]", views: Sequence[LaneView]) -> set[Style]:
    """Draw views on one scale of time, the longest as wide as its axes; return their styles."""
    longest_s = max(view.end_s - view.begin_s for view in views)
    unit, scale = time_unit(max(view.end_s for view in views))
    styles: set[Style] = set()
    for axes, view in zip(panels, views, strict=True):
        styles |= draw_lanes(axes, view, scale)
        axes.set_xlim(view.begin_s * scale, (view.begin_s + longest_s) * scale)
        axes.set_xlabel(f"time since the start ({unit})")
    return styles


def _choose_ranks(trace: Trace, steps: range, *, most: int) -> tuple[list[int], str]:
    """Return the ranks to draw, and which these are in words."""
    world_size = trace.plan.world_size
    if world_size <= most:
        return list(range(world_size)), "all ranks" if world_size > 1 else "1 rank"
    caused_s = attribute_waiting(trace).caused_s[steps.start : steps.stop].sum(axis=0)
    worst = [int(rank) for rank in np.argsort(-caused_s, kind="stable")[: most // 2] if caused_s[rank] > 0]
    rest = np.setdiff1d(np.arange(world_size), worst)
    spread = rest[np.linspace(0, len(rest) - 1, most - len(worst)).round().astype(int)]
    some = f"{len(worst)} that others waited for most, " if worst else ""
    why = f"{most} of {world_size} ranks ({some}{len(spread)} spread evenly)"
    return sorted([*worst, *spread.tolist()]), why
