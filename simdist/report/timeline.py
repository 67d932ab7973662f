"""What every stream of some ranks did, as a timeline."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from simdist.analysis import host_waits, occurrences, step_end_s, waiting
from simdist.errors import TraceError
from simdist.plan import (
    COLLECTIVES,
    STREAMS,
    AllGather,
    AllReduce,
    Backward,
    Broadcast,
    Copy,
    Delay,
    Densify,
    Forward,
    Load,
    Op,
    Optimize,
    Reduce,
    ReduceScatter,
    Save,
    Select,
    Stream,
    Wait,
    stream_of,
)
from simdist.report import palette
from simdist.report.lettering import literal_text, shortened
from simdist.report.palette import Style, time_unit
from simdist.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["timeline_figure"]

Seconds: TypeAlias = NDArray[np.float64]

_HOST_WAIT = Style("host blocked", palette.PALE_GREY)
_DELAY = Style("injected delay", palette.VERMILLION, palette.BLACK, "xxxxx")
_FORWARD = Style("forward", palette.SKY)
_BACKWARD = Style("backward", palette.BLUE)
_OPTIMIZE = Style("optimize", palette.PURPLE, palette.DARK_PURPLE, "\\\\\\\\\\")
_COPY = Style("copy", palette.YELLOW, palette.DARK_YELLOW, ".....")
_COMPRESS = Style("select, densify", palette.YELLOW, palette.DARK_YELLOW, "+++++")
_WAIT_FOR_OTHERS = Style("waiting for others", palette.PALE_GREEN, palette.GREEN, "/////")
_TRANSFER = Style("transfer", palette.GREEN, palette.DARK_GREEN)
_LOAD = Style("load", palette.ORANGE)
_SAVE = Style("save", palette.ORANGE, palette.BLACK, "|||||")
_LEGEND = (
    _DELAY,
    _HOST_WAIT,
    _FORWARD,
    _BACKWARD,
    _OPTIMIZE,
    _COPY,
    _COMPRESS,
    _WAIT_FOR_OTHERS,
    _TRANSFER,
    _LOAD,
    _SAVE,
)

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
    if not 0 <= first_step < plan.n_steps or n_steps < 1:
        raise TraceError(f"{n_steps} steps from step {first_step}: the trace has the steps 0 to {plan.n_steps - 1}")
    steps = range(first_step, min(first_step + n_steps, plan.n_steps))
    chosen, why = _choose_ranks(trace, steps, ranks)
    view = _View.of(trace, steps, chosen)
    unit, scale = time_unit(view.end_s)
    figure = Figure(figsize=(12.0, 1.7 + (0.15 * len(view.lanes) + 0.08) * len(chosen)), layout="constrained")
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    title = f"{shortened(plan.name)}: {which} of {plan.n_steps}, {why}"
    with literal_text():
        axes = figure.subplots()
        styles = _draw_spans(axes, trace, view, scale)
        _draw_steps(axes, trace, view, scale)
        _label(axes, view, unit, scale)
        axes.set_title(title, loc="left", fontweight="bold", pad=18)
        _explain(figure, [style for style in _LEGEND if style in styles])
    return figure


def _choose_ranks(trace: Trace, steps: range, ranks: Sequence[int] | None) -> tuple[list[int], str]:
    """Return the ranks to draw, and which these are in words."""
    world_size = trace.plan.world_size
    if ranks is not None:
        outside = [rank for rank in ranks if not 0 <= rank < world_size]
        if outside or not ranks:
            found = f"rank {outside[0]} is not in the trace" if outside else "no rank is chosen"
            raise TraceError(f"{found}; choose among 0 to {world_size - 1}")
        chosen = sorted(set(ranks))
        return chosen, f"{len(chosen)} of {world_size} ranks"
    if world_size <= _MOST_RANKS:
        return list(range(world_size)), "all ranks" if world_size > 1 else "1 rank"
    caused_s = waiting(trace).caused_s[steps.start : steps.stop].sum(axis=0)
    worst = [int(rank) for rank in np.argsort(-caused_s, kind="stable")[: _MOST_RANKS // 2] if caused_s[rank] > 0]
    rest = np.setdiff1d(np.arange(world_size), worst)
    spread = rest[np.linspace(0, len(rest) - 1, _MOST_RANKS - len(worst)).round().astype(int)]
    most = f"{len(worst)} that others waited for most, " if worst else ""
    why = f"{_MOST_RANKS} of {world_size} ranks ({most}{len(spread)} spread evenly)"
    return sorted([*worst, *spread.tolist()]), why


@dataclass(frozen=True)
class _View:
    """The part of a trace that is drawn, and where.

    Args:
        ranks: The ranks, from top to bottom.
        steps: The steps.
        begin_s: Left edge.
        end_s: Right edge.
        lanes: The streams in use, from top to bottom of a band.
    """

    ranks: list[int]
    steps: range
    begin_s: float
    end_s: float
    lanes: list[Stream]

    @classmethod
    def of(cls, trace: Trace, steps: range, ranks: list[int]) -> "_View":
        """Choose the time in which the ranks run the steps."""
        ends_s = step_end_s(trace)[:, ranks]
        begin_s = float(ends_s[steps[0] - 1].min()) if steps[0] else 0.0
        end_s = max(float(ends_s[steps[-1]].max()), begin_s + 1e-9)
        used = {stream_of(op) for body in trace.plan.bodies for op in body}
        return cls(ranks, steps, begin_s, end_s, [stream for stream in STREAMS if stream in used])

    def top(self, band: int, lane: Stream) -> float:
        """Return where the upper edge of a lane is; a band is 1 high, a tenth of it is a gap."""
        return band - 0.45 + 0.9 * self.lanes.index(lane) / len(self.lanes)

    @property
    def lane_height(self) -> float:
        """Height of a lane; a band is 1 high."""
        return 0.9 / len(self.lanes)


@dataclass(frozen=True)
class _Spans:
    """Spans of one style in one lane, `[n, ranks of the view]`."""

    style: Style
    lane: Stream
    begin_s: Seconds
    end_s: Seconds


def _spans(trace: Trace, ranks: list[int]) -> Iterator[_Spans]:
    """Yield all that is to be drawn, operation by operation."""
    for each in occurrences(trace.plan):
        ready_s, start_s, end_s = (
            array[each.rows[:, None], ranks] for array in (trace.ready_s, trace.start_s, trace.end_s)
        )
        if isinstance(each.op, COLLECTIVES):
            yield _Spans(_WAIT_FOR_OTHERS, "comm", ready_s, start_s)
        if not isinstance(each.op, Wait):
            yield _Spans(_style(each.op), stream_of(each.op), start_s, end_s)
    blocked = host_waits(trace)
    yield _Spans(_HOST_WAIT, "host", blocked.begin_s[:, ranks], blocked.end_s[:, ranks])


def _style(op: Op) -> Style:
    match op:
        case Load():
            return _LOAD
        case Save():
            return _SAVE
        case Copy():
            return _COPY
        case Forward():
            return _FORWARD
        case Backward():
            return _BACKWARD
        case Optimize():
            return _OPTIMIZE
        case Select() | Densify():
            return _COMPRESS
        case Delay():
            return _DELAY
        case Wait():
            return _HOST_WAIT
        case AllReduce() | ReduceScatter() | AllGather() | Reduce() | Broadcast():
            return _TRANSFER
        case _:
            assert_never(op)


def _draw_spans(axes: "Axes", trace: Trace, view: _View, scale: float) -> set[Style]:
    """Draw all spans that can be seen; return their styles."""
    from matplotlib.collections import PolyCollection

    boxes: dict[Style, list[Seconds]] = {}
    for spans in _spans(trace, view.ranks):
        begin_s, end_s = (
            np.clip(spans.begin_s, view.begin_s, view.end_s),
            np.clip(spans.end_s, view.begin_s, view.end_s),
        )
        seen, band = np.nonzero(end_s > begin_s)
        if len(seen):
            left, right = begin_s[seen, band] * scale, end_s[seen, band] * scale
            top = view.top(0, spans.lane) + band
            bottom = top + view.lane_height
            corners = np.array([(left, top), (right, top), (right, bottom), (left, bottom)])
            boxes.setdefault(spans.style, []).append(corners.transpose(2, 0, 1))
    for style, parts in boxes.items():
        collection = PolyCollection(
            list(np.concatenate(parts)),
            facecolors=style.face,
            edgecolors=style.ink,
            linewidths=0.4,
            hatch=style.hatch or None,
            label=style.label,
        )
        axes.add_collection(collection, autolim=False)
    return set(boxes)


def _draw_steps(axes: "Axes", trace: Trace, view: _View, scale: float) -> None:
    """Mark the end of every step on every rank, and number the steps of the first rank above it."""
    from matplotlib.collections import LineCollection

    ends_s = step_end_s(trace)[:, view.ranks]
    steps, bands = np.nonzero((ends_s > view.begin_s) & (ends_s <= view.end_s))
    at = ends_s[steps, bands] * scale
    marks = np.stack([np.stack([at, bands - 0.5], axis=-1), np.stack([at, bands + 0.5], axis=-1)], axis=1)
    lines = LineCollection(list(marks), colors=palette.BLACK, linewidths=1.0, label="end of step")
    axes.add_collection(lines, autolim=False)
    before_s = view.begin_s
    for step in steps[bands == 0].tolist():
        text = _step_text(step, share=(ends_s[step, 0] - before_s) / (view.end_s - view.begin_s))
        middle = (before_s + ends_s[step, 0]) / 2 * scale
        axes.text(middle, -0.56, text, ha="center", va="bottom", fontsize="small")
        before_s = ends_s[step, 0]


def _step_text(step: int, *, share: float) -> str:
    """Return as much as fits above a step that takes this share of the width."""
    if share >= 0.05:
        return f"step {step}"
    return str(step) if share >= 0.015 else ""


def _label(axes: "Axes", view: _View, unit: str, scale: float) -> None:
    """Name ranks and lanes, and set the limits."""
    n_bands = len(view.ranks)
    axes.set_xlim(view.begin_s * scale, view.end_s * scale)
    axes.set_ylim(n_bands - 0.5, -0.5)
    axes.set_yticks(range(n_bands), [f"rank {rank}" for rank in view.ranks])
    axes.set_xlabel(f"time since the start ({unit})")
    for band in range(n_bands):
        for lane in view.lanes:
            middle = view.top(band, lane) + view.lane_height / 2
            axes.text(
                1.004, middle, lane, transform=axes.get_yaxis_transform(), va="center", fontsize=6, color="#555555"
            )
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


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
