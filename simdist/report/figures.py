"""Figures of matplotlib: axes in the style of this package, text of users drawn as it stands, and files."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from simdist.errors import RunError, ScenarioError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: 900 pixels, the column of a notebook.
WIDTH_IN = 9.0

#: The metadata that would make equal figures differ, by the suffixes of what can be written.
_UNDATED = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}


def panels(
    n_columns: int = 1, *, n_rows: int = 1, height_in: float = 3.6, sharex: bool = False, sharey: bool = False
) -> "tuple[Figure, list[Axes]]":
    """Return a figure as wide as a page, and its axes from left to right and top to bottom.

    Args:
        n_columns: Axes beside each other.
        n_rows: Axes above each other.
        height_in: Height of a row, in inches.
        sharex: All have one scale to the right.
        sharey: All have one scale upwards.

    Raises:
        ScenarioError: There would be no axes.

    >>> figure, (left, right) = panels(2)
    >>> left.set_xlabel("GPUs").get_text()
    'GPUs'
    """
    if n_columns < 1 or n_rows < 1 or not height_in > 0:
        raise ScenarioError(f"{n_columns} x {n_rows} panels of {height_in} in; each must be positive")
    figure = new_figure(WIDTH_IN, n_rows * height_in)
    grid = figure.subplots(n_rows, n_columns, sharex=sharex, sharey=sharey, squeeze=False)
    for axes in grid.flat:
        tidy(axes)
    return figure, list(grid.flat)


def new_figure(width_in: float, height_in: float) -> "Figure":
    """Return an empty figure that makes room for its labels.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    require("matplotlib", extra="figures", what="a figure")
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


def tidy(axes: "Axes", *, grid: Literal["both", "x"] = "both") -> None:
    """Draw a pale grid behind what is drawn, and no frame at the top and at the right."""
    axes.grid(axis=grid, color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


@contextmanager
def literal_text() -> Iterator[None]:
    """Take `$` for a dollar and not for the start of a formula, and draw characters that the font lacks as boxes.

    Needed where texts are made, and where a figure is drawn, because labels of ticks may be made only then.
    """
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False, "text.usetex": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(Glyph .* missing|Matplotlib currently does not support)", UserWarning)
        yield


def shortened(text: str, *, most: int = 40) -> str:
    """Return a text with an ellipsis in its middle if it is longer than `most` characters; both ends stay.

    Half characters, as names of files can hold, become question marks: no font can draw them.
    """
    text = text.encode(errors="replace").decode()
    if len(text) <= most:
        return text
    n_last = (most - 1) // 2
    return f"{text[: most - 1 - n_last]}…{text[-n_last:]}"


def svg(figure: "Figure") -> bytes:
    """Return a figure as SVG; equal figures give equal bytes."""
    written = BytesIO()
    _write(figure, written, ".svg")
    return written.getvalue()


def _write(figure: "Figure", where: Path | BytesIO, suffix: str) -> None:
    import matplotlib

    with literal_text(), matplotlib.rc_context({"svg.hashsalt": "simdist"}):
        figure.savefig(where, format=suffix[1:], dpi=150, metadata={_UNDATED[suffix]: None})


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix of `path`; equal figures give equal bytes.

    Raises:
        ScenarioError: The suffix is another.
        RunError: The file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in _UNDATED:
        found = f"{suffix!r} is no picture that can be written" if suffix else "the file needs a suffix"
        raise ScenarioError(f"{path}: {found}; write e.g. {path.with_suffix('.png').name}, .svg or .pdf")
    try:
        _write(figure, path, suffix)
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"{path}: cannot be written ({reason}); give a file in a folder that exists") from None
