"""Bars as inline SVG: lengths are shares of the width, so that letters keep their size on every screen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from simdist.report.figures import shortened
from simdist.report.page.html import Attribute, Html, tag

# Heights in pixels.
_LABEL = 22
_BAR = 18
_GAP = 5
_GROUP_GAP = 12
_AXIS = 44
_SCALE = 66.0  # percent of the width; the text of the longest bar fits into the rest on a phone

#: Hatched parts, which can be told apart without colours, and their strokes in a square of 8 pixels.
HATCHED = {"comm": "M0 8L8 0", "wait": "M0 0L8 8", "io": "M4 0V8", "host": "M0 4H8", "measured": "M0 8L8 0"}


@dataclass(frozen=True, slots=True)
class BarSegment:
    """A part of a bar.

    Args:
        kind: Class of CSS, which gives the colour; hatched if it is in `HATCHED`.
        length: In the unit of the axis.
        text: Description, for a pointer that rests on it.
    """

    kind: str
    length: float
    text: str


@dataclass(frozen=True, slots=True)
class Bar:
    """Segments in a line, and the text at their end."""

    segments: tuple[BarSegment, ...]
    text: str

    @property
    def length(self) -> float:
        """In the unit of the axis."""
        return math.fsum(segment.length for segment in self.segments)


@dataclass(frozen=True, slots=True)
class BarGroup:
    """Bars below a common label."""

    label: str
    bars: tuple[Bar, ...]


def bar_chart(groups: Sequence[BarGroup], *, element_id: str, title: str, axis: str, mark: float | None = None) -> Html:
    """Return horizontal bars.

    Args:
        groups: From top to bottom.
        element_id: Unique on the page.
        title: Text that a screen reader says instead of the picture; the numbers stand in a table beside it.
        axis: Quantity and unit.
        mark: Where a dashed line is drawn.
    """
    longest = max((bar.length for group in groups for bar in group.bars), default=0.0) or 1.0
    heights = [_LABEL + len(group.bars) * (_BAR + _GAP) + _GROUP_GAP for group in groups]
    *tops, bottom = accumulate(heights, initial=0)
    parts = [_hatches(element_id), _axis(longest, bottom, axis)]
    if mark is not None and mark <= longest:
        at = _x(mark, longest)
        parts.append(tag("line", class_="mark", x1=at, x2=at, y1=0, y2=bottom))
    parts += [_group(group, top, longest, element_id) for group, top in zip(groups, tops, strict=True)]
    return tag("svg", *parts, class_="chart", role="img", aria_label=title, width="100%", height=bottom + _AXIS)


def _group(group: BarGroup, top: int, longest: float, element_id: str) -> Html:
    below = top + _LABEL
    label = tag("text", shortened(group.label), x=0, y=below - _LABEL + 15, class_="label")
    bars = (_bar(bar, below + n * (_BAR + _GAP), longest, element_id) for n, bar in enumerate(group.bars))
    return tag("g", label, *bars)


def _bar(bar: Bar, top: int, longest: float, element_id: str) -> Html:
    parts = []
    left = 0.0
    for segment in bar.segments:
        if segment.length > 0:
            parts.append(_segment(segment, left, top, longest, element_id))
        left += segment.length
    return tag("g", *parts, tag("text", bar.text, x=_x(left, longest), dx=7, y=top + _BAR - 5))


def _segment(segment: BarSegment, left: float, top: int, longest: float, element_id: str) -> Html:
    x = _x(left, longest)
    width = _x(segment.length, longest)
    rects = [tag("rect", x=x, y=top, width=width, height=_BAR, class_=f"fill {segment.kind}")]
    if segment.kind in HATCHED:
        fill = f"url(#{element_id}-{segment.kind})"
        rects.append(tag("rect", x=x, y=top, width=width, height=_BAR, fill=fill))
    return tag("g", tag("title", segment.text), *rects)


def _hatches(element_id: str) -> Html:
    square: dict[str, Attribute] = {"width": 8, "height": 8, "patternUnits": "userSpaceOnUse"}
    paths = ((kind, tag("path", d=path, class_="hatch")) for kind, path in HATCHED.items())
    return tag("defs", *(tag("pattern", path, id=f"{element_id}-{kind}", **square) for kind, path in paths))


def _axis(longest: float, bottom: int, name: str) -> Html:
    parts = [tag("text", name, x=0, y=bottom + 36, class_="axis")]
    for value in ticks(longest):
        at = _x(value, longest)
        parts.append(tag("line", class_="grid", x1=at, x2=at, y1=0, y2=bottom + 4))
        anchor = "middle" if value else "start"
        parts.append(tag("text", f"{value:g}", x=at, y=bottom + 18, text_anchor=anchor, class_="axis"))
    return tag("g", *parts)


def _x(value: float, longest: float) -> str:
    return f"{_SCALE * value / longest:.3f}%"


def ticks(longest: float) -> list[float]:
    """Return round numbers from 0 to at most `longest`: three to six of them.

    >>> ticks(1.25), ticks(192.0)
    ([0.0, 0.5, 1.0], [0.0, 50.0, 100.0, 150.0])
    """
    magnitude = 10.0 ** math.floor(math.log10(longest / 5))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if longest <= 5.000001 * factor * magnitude)
    return [float(f"{number * step:.6g}") for number in range(int(longest / step) + 1)]
