"""The lanes of a timeline: a band per rank, in it a lane per stream, in that what the stream did."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from simdist.plan import lane_of, occurrences, ops
from simdist.report import palette
from simdist.report.palette import Style
from simdist.traces.trace import Trace
from simdist.traces.waiting import host_waits, step_end_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_Seconds: TypeAlias = NDArray[np.float64]

TEXT_PT = 9.0
#: All styles, in the order of the legend.
LEGEND = (
    _DELAY := Style("injected delay", palette.VERMILLION, palette.BLACK, "xxxxx"),
    HOST_BLOCKED := Style("host blocked", palette.PALE_GREY),
    _LAUNCH := Style("launch", palette.GREY),
    _FORWARD := Style("forward", palette.SKY),
    _BACKWARD := Style("backward", palette.BLUE),
    _OPTIMIZE := Style("optimize", palette.PURPLE, palette.DARK_PURPLE, "\\\\\\\\\\"),
    _COPY := Style("copy", palette.YELLOW, palette.DARK_YELLOW, "....."),
    _COMPRESS := Style("select, densify", palette.YELLOW, palette.DARK_YELLOW, "+++++"),
    WAITING_FOR_OTHERS := Style("waiting for others", palette.PALE_GREEN, palette.GREEN, "/////"),
    _TRANSFER := Style("transfer", palette.GREEN, palette.DARK_GREEN),
    _LOAD := Style("load", palette.ORANGE),
    _SAVE := Style("save", palette.ORANGE, palette.BLACK, "|||||"),
)


@dataclass(frozen=True)
class LaneView:
    """A trace, the part of it that is drawn, and where.

    Args:
        trace: The trace to draw.
        ranks: The ranks, from top to bottom.
        begin_s: Left edge.
        end_s: Right edge.
        lanes: The streams in use, from top to bottom of a band.
    """

    trace: Trace
    ranks: list[int]
    begin_s: float
    end_s: float
    lanes: list[str]

    @classmethod
    def of(cls, trace: Trace, steps: range, ranks: list[int]) -> "LaneView":
        """Choose the time in which the ranks run the steps."""
        ends_s = step_end_s(trace)[:, ranks]
        begin_s = float(ends_s[steps[0] - 1].min()) if steps[0] else 0.0
        end_s = max(float(ends_s[steps[-1]].max()), begin_s + 1e-9)
        used = {lane_of(op).stream for body in trace.plan.bodies for op in body}
        return cls(trace, ranks, begin_s, end_s, [stream for stream in trace.plan.streams if stream in used])

    def top(self, band: int, lane: str) -> float:
        """Return where the upper edge of a lane is; a band is 1 high, a tenth of it is a gap."""
        return band - 0.45 + 0.9 * self.lanes.index(lane) / len(self.lanes)

    @property
    def lane_height(self) -> float:
        """Height of a lane; a band is 1 high."""
        return 0.9 / len(self.lanes)


def draw_lanes(axes: "Axes", view: LaneView, scale: float) -> set[Style]:
    """Draw all spans of a view that can be seen, and the ends of steps; return the styles."""
    styles = _draw_spans(axes, view, scale)
    _draw_steps(axes, view, scale)
    _label(axes, view, scale)
    return styles


@dataclass(frozen=True)
class _Spans:
    """Spans of one style in one lane, `[n, ranks of the view]`."""

    style: Style
    lane: str
    begin_s: _Seconds
    end_s: _Seconds


def _spans(trace: Trace, ranks: list[int]) -> Iterator[_Spans]:
    """Yield all that is to be drawn, operation by operation."""
    for each in occurrences(trace.plan):
        times_s = trace.ready_s, trace.start_s, trace.end_s
        ready_s, start_s, end_s = (array[each.rows[:, None], ranks] for array in times_s)
        if isinstance(each.op, ops.COLLECTIVES):
            yield _Spans(WAITING_FOR_OTHERS, "comm", ready_s, start_s)
        if not isinstance(each.op, ops.Wait | ops.Enter):
            yield _Spans(style_of(each.op), lane_of(each.op).stream, start_s, end_s)
    blocked = host_waits(trace)
    yield _Spans(HOST_BLOCKED, "host", blocked.begin_s[:, ranks], blocked.end_s[:, ranks])


def style_of(op: ops.Op) -> Style:
    """Return how an operation is drawn from its start to its end."""
    match op:
        case ops.Load() | ops.StageIn():
            return _LOAD
        case ops.Save():
            return _SAVE
        case ops.Copy() | ops.Pack() | ops.Unpack() | ops.Combine():
            return _COPY
        case ops.Forward():
            return _FORWARD
        case ops.Backward():
            return _BACKWARD
        case ops.Optimize() | ops.TrustRatios():
            return _OPTIMIZE
        case ops.Select() | ops.Merge() | ops.Densify() | ops.LowRank():
            return _COMPRESS
        case ops.Delay() | ops.Tick():
            return _DELAY
        case ops.Enter() | ops.Wait():
            return HOST_BLOCKED
        case ops.KernelLaunch():
            return _LAUNCH
        case ops.AllReduce() | ops.ReduceScatter() | ops.AllGather() | ops.Reduce() | ops.Broadcast():
            return _TRANSFER
        case _:
            assert_never(op)


def _draw_spans(axes: "Axes", view: LaneView, scale: float) -> set[Style]:
    """Draw all spans that can be seen; return their styles."""
    from matplotlib.collections import PolyCollection

    boxes: dict[Style, list[_Seconds]] = {}
    for spans in _spans(view.trace, view.ranks):
        begin_s, end_s = np.clip([spans.begin_s, spans.end_s], view.begin_s, view.end_s)
        seen, band = np.nonzero(end_s > begin_s)
        if len(seen):
            left = begin_s[seen, band] * scale
            right = end_s[seen, band] * scale
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


def _draw_steps(axes: "Axes", view: LaneView, scale: float) -> None:
    """Mark the end of every step on every rank, and number the steps of the first rank above it."""
    from matplotlib.collections import LineCollection

    ends_s = step_end_s(view.trace)[:, view.ranks]
    steps, bands = np.nonzero((ends_s > view.begin_s) & (ends_s <= view.end_s))
    at = ends_s[steps, bands] * scale
    marks = np.stack([np.stack([at, bands - 0.5], axis=-1), np.stack([at, bands + 0.5], axis=-1)], axis=1)
    lines = LineCollection(list(marks), colors=palette.BLACK, linewidths=1.0, label="end of step")
    axes.add_collection(lines, autolim=False)
    before_s = view.begin_s
    for step in steps[bands == 0].tolist():
        text = _step_text(step, share=(ends_s[step, 0] - before_s) / (view.end_s - view.begin_s))
        middle = (before_s + ends_s[step, 0]) / 2 * scale
        axes.text(middle, -0.56, text, ha="center", va="bottom", fontsize=TEXT_PT)
        before_s = ends_s[step, 0]


def _step_text(step: int, *, share: float) -> str:
    """Return as much as fits above a step that takes this share of the width."""
    if share >= 0.05:
        return f"step {step}"
    return str(step) if share >= 0.015 else ""


def _label(axes: "Axes", view: LaneView, scale: float) -> None:
    """Name ranks and lanes, and set the limits."""
    n_bands = len(view.ranks)
    axes.set_xlim(view.begin_s * scale, view.end_s * scale)
    axes.set_ylim(n_bands - 0.5, -0.5)
    axes.set_yticks(range(n_bands), [f"rank {rank}" for rank in view.ranks])
    for band in range(n_bands):
        for lane in view.lanes:
            middle = view.top(band, lane) + view.lane_height / 2
            beside = axes.get_yaxis_transform()
            axes.text(1.004, middle, lane, transform=beside, va="center", fontsize=TEXT_PT, color="#555555")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
