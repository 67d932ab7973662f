"""What every stream of some ranks did, as a timeline; and that of a simulation above that of a measurement."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from simdist.errors import TraceError
from simdist.plan import Plan
from simdist.report import palette
from simdist.report.lanes import LEGEND, View, draw_lanes
from simdist.report.lettering import literal_text, shortened
from simdist.report.palette import Style, time_unit
from simdist.traces.trace import Trace
from simdist.traces.waiting import waiting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MOST_RANKS = 16


def timeline_figure(
    trace: Trace, *, first_step: int = 0, n_steps: int = 4, ranks: Sequence[int] | None = None
) -> "Figure":
    """Draw what every stream of some ranks did in a few steps.

    Each rank is a band with a lane per stream; the end of a step on a rank is a black mark. Waiting for others is pale
    and hatched, moving bytes solid, an injected delay crossed.

    Args:
        trace: What happened.
        first_step: First step drawn.
        n_steps: Steps drawn, if there are as many.
        ranks: Which ranks. By default all up to 16; of more, the 8 that others waited for most in these steps, and 8
            that are spread evenly over the rest.

    Raises:
        TraceError: The trace has no such step or rank.
    """
    from matplotlib.figure import Figure

    plan = trace.plan
    steps = _steps(plan, first_step, n_steps)
    chosen, why = _choose_ranks(trace, steps, ranks, most=_MOST_RANKS)
    view = View.of(trace, steps, chosen)
    unit, scale = time_unit(view.end_s)
    figure = Figure(figsize=(12.0, 1.7 + _height(view)), layout="constrained")
    with literal_text():
        axes = figure.subplots()
        styles = draw_lanes(axes, trace, view, scale)
        axes.set_xlabel(f"time since the start ({unit})")
        axes.set_title(_title(plan, steps, why), loc="left", fontweight="bold", pad=18)
        _explain(figure, [style for style in LEGEND if style in styles])
    return figure


def comparison_figure(
    simulated: Trace, measured: Trace, *, first_step: int = 0, n_steps: int = 4, ranks: Sequence[int] | None = None
) -> "Figure":
    """Draw the same few steps of a simulation, above, and of a measurement, below, on the same scale of time.

    Both begin at the left edge with the first step; what took longer reaches further to the right.

    Args:
        simulated: What was predicted.
        measured: What happened, of the same plan.
        first_step: First step drawn.
        n_steps: Steps drawn, if there are as many.
        ranks: Which ranks. By default all up to 8; of more, the 4 that others waited for most as measured, and 4 that
            are spread evenly over the rest.

    Raises:
        TraceError: They are traces of different plans, or have no such step or rank.
    """
    from matplotlib.figure import Figure

    simulated.difference_s(measured)  # refuses traces of different plans
    plan = simulated.plan
    steps = _steps(plan, first_step, n_steps)
    chosen, why = _choose_ranks(measured, steps, ranks, most=_MOST_RANKS // 2)
    views = [View.of(trace, steps, chosen) for trace in (simulated, measured)]
    longest_s = max(view.end_s - view.begin_s for view in views)
    unit, scale = time_unit(max(view.end_s for view in views))
    figure = Figure(figsize=(12.0, 1.9 + 2 * _height(views[0])), layout="constrained")
    styles: set[Style] = set()
    with literal_text():
        panels = figure.subplots(2, 1)
        for axes, trace, view in zip(panels, (simulated, measured), views, strict=True):
            styles |= draw_lanes(axes, trace, view, scale)
            axes.set_xlim(view.begin_s * scale, (view.begin_s + longest_s) * scale)
            axes.set_title(shortened(trace.source, most=100), loc="left", fontsize="medium", pad=18)
        panels[-1].set_xlabel(f"time since the start ({unit})")
        figure.suptitle(_title(plan, steps, why), x=0.01, ha="left", fontweight="bold")
        _explain(figure, [style for style in LEGEND if style in styles])
    return figure


def _steps(plan: Plan, first_step: int, n_steps: int) -> range:
    if not 0 <= first_step < plan.n_steps or n_steps < 1:
        raise TraceError(f"{n_steps} steps from step {first_step}: the trace has the steps 0 to {plan.n_steps - 1}")
    return range(first_step, min(first_step + n_steps, plan.n_steps))


def _title(plan: Plan, steps: range, why: str) -> str:
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return f"{shortened(plan.name)}: {which} of {plan.n_steps}, {why}"


def _height(view: View) -> float:
    """Return the inches that the bands of a view take."""
    return (0.15 * len(view.lanes) + 0.08) * len(view.ranks)


def _choose_ranks(trace: Trace, steps: range, ranks: Sequence[int] | None, *, most: int) -> tuple[list[int], str]:
    """Return the ranks to draw, and which these are in words."""
    world_size = trace.plan.world_size
    if ranks is not None:
        outside = [rank for rank in ranks if not 0 <= rank < world_size]
        if outside or not ranks:
            found = f"rank {outside[0]} is not in the trace" if outside else "no rank is chosen"
            raise TraceError(f"{found}; choose among 0 to {world_size - 1}")
        chosen = sorted(set(ranks))
        return chosen, f"{len(chosen)} of {world_size} ranks"
    if world_size <= most:
        return list(range(world_size)), "all ranks" if world_size > 1 else "1 rank"
    caused_s = waiting(trace).caused_s[steps.start : steps.stop].sum(axis=0)
    worst = [int(rank) for rank in np.argsort(-caused_s, kind="stable")[: most // 2] if caused_s[rank] > 0]
    rest = np.setdiff1d(np.arange(world_size), worst)
    spread = rest[np.linspace(0, len(rest) - 1, most - len(worst)).round().astype(int)]
    some = f"{len(worst)} that others waited for most, " if worst else ""
    why = f"{most} of {world_size} ranks ({some}{len(spread)} spread evenly)"
    return sorted([*worst, *spread.tolist()]), why


def _explain(figure: "Figure", styles: Sequence[Style]) -> None:
    """Put the legend below."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [
        Patch(facecolor=style.face, edgecolor=style.ink, linewidth=0.4, hatch=style.hatch or None, label=style.label)
        for style in styles
    ]
    handles.append(Line2D([], [], color=palette.BLACK, linewidth=1.0, label="end of step"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize="small",
        columnspacing=1.5,
    )
