"""Empty axes side by side, in the style of this package, for pictures that are drawn by hand: in notebooks, say."""

from typing import TYPE_CHECKING

from simdist.errors import ScenarioError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_WIDTH_IN = 9.0  # 900 pixels, the column of a notebook


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
    from matplotlib.figure import Figure

    if n_columns < 1 or n_rows < 1 or not height_in > 0:
        raise ScenarioError(f"{n_columns} x {n_rows} panels of {height_in} in; each must be positive")
    figure = Figure(figsize=(_WIDTH_IN, n_rows * height_in), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, sharex=sharex, sharey=sharey, squeeze=False)
    for axes in grid.flat:
        axes.grid(color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(grid.flat)
