"""Describe what a figure shows: its axes, its letters, and a digest of all that is plotted.

The kernel of a notebook runs this beside the figure (see notebook_execution.py). A digest is the same on every machine
and with every release of matplotlib, though the pixels are not: it is made of what is handed to matplotlib, in the
coordinates of the data, before margins, ticks and layout.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.colors import to_hex, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.path import Path
from matplotlib.spines import Spine
from matplotlib.text import Text
from matplotlib.typing import ColorType
from numpy.typing import ArrayLike, NDArray

_BIN = 1e-5  # of a value; a reader of a picture sees a hundredth
_NOTHING = 1e-9  # of the largest value; less than that is what is left of a difference of equals


def description(figure: Figure) -> str:
    """Return as JSON: `axes`, a label and its ticks for each; `smallest_pt`, if there are letters; `drawn`."""
    axes = [
        (axis.get_label_text(), [tick.get_text() for tick in axis.get_ticklabels() if tick.get_visible()])
        for each in figure.axes
        if each.axison
        for axis in (each.xaxis, each.yaxis)
        if axis.get_visible()
    ]
    written = (text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip())
    smallest_pt = min((text.get_fontsize() for text in written), default=None)
    return json.dumps({"axes": axes, "smallest_pt": smallest_pt, "drawn": list(drawn(figure))})


def drawn(figure: Figure) -> Iterator[str]:
    """Yield lines that say what is drawn: of each axes its scales, and of each kind of mark its look and a digest."""
    for number, axes in enumerate(figure.axes):
        sides = (f"{axis.get_label_text()!r} {axis.get_scale()}" for axis in (axes.xaxis, axes.yaxis))
        yield f"axes {number}: {', '.join(sides)}"
        marks: dict[str, list[NDArray[np.int64]]] = {}
        for artist in axes.get_children():
            if artist.get_visible() and artist is not axes.patch:
                for look, values in _mark(artist):
                    marks.setdefault(look, []).append(values)
        for look, found in marks.items():
            yield f"  {look}: {sum(map(len, found))} values, {_digest(found)}"
        yield from _words(axes)
    for legend in figure.legends:
        yield f"legend: {_entries(legend)}"


def bins(values: ArrayLike) -> NDArray[np.int64]:
    """Return numbers that stay the same if values change by less than about a hundred-thousandth of themselves.

    A value is counted in bins of its logarithm. No round number lies on the border of one, as it may where decimals are
    rounded, so the last bits of a sum, which differ between machines, hardly ever matter.

    >>> bins([0.1 + 0.2, 1.0, -1.0, 0.0]).tolist() == bins([0.3, 1.0, -1.0, 1e-17]).tolist()
    True
    >>> (bins([1.0, 2.0]) == bins([1.0, 2.0001])).tolist()
    [True, False]
    """
    flat = np.ma.filled(np.ma.asarray(values, dtype=np.float64), np.nan).ravel()
    sizes = np.abs(flat)
    counts = np.full(len(flat), 2**62)  # of what is not finite
    finite = np.isfinite(flat)
    largest = sizes[finite].max(initial=0.0)
    counted = finite & (sizes > _NOTHING * largest)
    counts[finite] = 0
    shifted = np.floor(np.log(sizes[counted]) / _BIN + 0.5) + 2**32  # above 0, so that the sign can be told
    counts[counted] = np.sign(flat[counted]) * shifted
    return counts


def _mark(artist: Artist) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yield how a mark looks, and its numbers; nothing for what carries no data: spines, axes, letters."""
    match artist:
        case Line2D():
            marker = f"{artist.get_marker()!r} {_colors(artist.get_markerfacecolor())}"
            look = f"line {_colors(artist.get_color())} {artist.get_linestyle()!r}, markers {marker}"
            yield look, np.concatenate([bins(artist.get_xdata(orig=False)), bins(artist.get_ydata(orig=False))])
        case Spine():
            return
        case Patch():
            corners = artist.get_path().transformed(artist.get_patch_transform()).get_extents()
            look = f"patch {_colors(artist.get_facecolor())} {artist.get_hatch() or ''}".rstrip()
            yield look, bins(corners.get_points())
        case Collection():
            look = f"collection {_colors(artist.get_facecolor())}, edges {_colors(artist.get_edgecolor())}"
            yield look, np.concatenate([*map(_vertices, artist.get_paths()), bins(artist.get_offsets())])
            if (shades := artist.get_array()) is not None:
                yield "shades of a collection", bins(shades)
        case AxesImage():
            yield (
                f"image {artist.get_cmap().name}",
                np.concatenate([bins(np.asarray(artist.get_array())), bins(artist.get_extent())]),
            )
        case _:
            return


def _vertices(path: Path) -> NDArray[np.int64]:
    """Return the points of a path, each once and in order of size: releases of matplotlib begin at other corners."""
    corners = np.asarray(path.vertices)
    points = corners if path.codes is None else corners[path.codes != Path.CLOSEPOLY]
    return np.unique(np.stack([bins(points[:, 0]), bins(points[:, 1])], axis=1), axis=0).ravel()


def _colors(colors: ColorType | Sequence[ColorType] | NDArray[np.float64]) -> str:
    found = sorted({to_hex(color, keep_alpha=True) for color in to_rgba_array(colors)})
    return "+".join(found) if 1 <= len(found) <= 3 else f"{len(found)} colours"


def _words(axes: Axes) -> Iterator[str]:
    texts = [text.get_text() for text in axes.get_children() if isinstance(text, Text) and text.get_text()]
    if texts:
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
        yield f"  {texts[0]!r} and {len(texts) - 1} other texts: {digest}"
    if (legend := axes.get_legend()) is not None:
        yield f"  legend: {_entries(legend)}"


def _entries(legend: Legend) -> str:
    return ", ".join(repr(text.get_text()) for text in legend.get_texts())


def _digest(found: Sequence[NDArray[np.int64]]) -> str:
    return hashlib.sha256(np.concatenate(found).astype("<i8").tobytes()).hexdigest()[:12]
