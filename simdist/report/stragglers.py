"""Who slowed a job, and when: a map of ranks and steps, and what each kind of operation and each rank costs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from simdist.report.figures import literal_text, shortened, tidy
from simdist.report.palette import BLUE, GREEN, GREY, ORANGE, VERMILLION, time_unit
from simdist.whatif.ideal import Cause
from simdist.whatif.slowdown import Slowdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_COLORS: dict[Cause, str] = {"host": VERMILLION, "compute": BLUE, "io": ORANGE, "communication": GREEN}
_MOST_BARS = 10
_LEAST_TOP = 1.1  # slowdown at the dark end of the map: without stragglers it stays pale
_PERCENTILE = 99.5  # of the map that is the dark end, so that one very slow step does not pale all others
_TITLE_CHARACTERS = 100
_ROUNDING_S = 1e-12


def stragglers_figure(found: Slowdown, *, title: str) -> "Figure":
    """Draw how much slower each rank alone made each step; below, what kinds of operation and ranks cost.

    Args:
        found: The analysis of a job.
        title: Heading.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 7.0), layout="constrained")
    with literal_text():
        top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=(3, 2))[:, 0]
        heading = f"{shortened(title, most=_TITLE_CHARACTERS)}: slowdown {found.slowdown:.2f}"
        figure.suptitle(heading, x=0.01, ha="left", fontsize="large", fontweight="bold")
        _draw_map(top.subplots(), found)
        left, right = bottom.subplots(1, 2)
        _draw_kinds(left, found)
        _draw_ranks(right, found)
    return figure


def _draw_map(axes: "Axes", found: Slowdown) -> None:
    from matplotlib.ticker import MaxNLocator

    slowdowns = np.nan_to_num(found.rank_step_slowdowns, nan=1.0).T
    dark = max(_LEAST_TOP, float(np.percentile(slowdowns, _PERCENTILE)))
    first, last = found.first_step - 0.5, found.first_step + found.n_steps - 0.5
    sides = first, last, found.world_size - 0.5, -0.5
    image = axes.imshow(slowdowns, "Reds", aspect="auto", interpolation="nearest", vmin=1, vmax=dark, extent=sides)
    axes.set_xlabel("step")
    axes.set_ylabel("rank")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    extend = "max" if slowdowns.max() > 1.01 * dark else "neither"
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, extend=extend)
    bar.set_label("slowdown of the step by this rank alone")


def _draw_kinds(axes: "Axes", found: Slowdown) -> None:
    parts = [part for part in found.kinds if part.lost_s > _ROUNDING_S][:_MOST_BARS] or list(found.kinds[:1])
    unit, scale = time_unit(max(part.lost_s for part in parts))
    colors = [_COLORS[part.channel] for part in parts]
    axes.barh(range(len(parts)), [part.lost_s * scale for part in parts], height=0.62, color=colors)
    names = [f"{part.name} ({part.channel})" for part in parts]
    _name_bars(axes, names, f"{unit} per step lost by one kind of operation alone")


def _draw_ranks(axes: "Axes", found: Slowdown) -> None:
    order = np.argsort(-found.rank_slowdowns, kind="stable")[:_MOST_BARS]
    lost_s = (found.rank_slowdowns[order] - 1) * found.ideal_s
    unit, scale = time_unit(float(lost_s.max()))
    axes.barh(range(len(order)), np.maximum(lost_s, 0) * scale, height=0.62, color=GREY)
    most = "" if found.world_size <= _MOST_BARS else f" ({_MOST_BARS} of {found.world_size})"
    _name_bars(axes, [f"rank {rank}" for rank in order], f"{unit} per step lost by one rank alone{most}")


def _name_bars(axes: "Axes", names: Sequence[str], label: str) -> None:
    """Name bars at the left, from top to bottom, and their axis, which begins at 0."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_xlim(left=0)
    tidy(axes, grid="x")
