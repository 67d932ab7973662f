"""Results show themselves in a notebook: as a table, and some as a picture.

`simdist.report` makes both, and is above the packages of results. So they ask the top package, which imports it then.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Displayed:
    """A result with a table."""

    __slots__ = ()

    def _repr_html_(self: Any) -> str:
        from simdist import html_of

        return html_of(self)


class Pictured(Displayed):
    """A result with a table and a picture."""

    __slots__ = ()

    def plot(self: Any) -> "Figure":
        """Draw the result as `simdist.plot` says."""
        from simdist import plot

        return plot(self)
