"""Tables of what benchmarks measured, for people."""

from collections.abc import Sequence


def table(title: str, rows: list[dict[str, object]]) -> str:
    """Return rows as aligned text."""
    cells = [[shown(value) for value in row.values()] for row in rows]
    head = list(rows[0])
    widths = [max(len(line[column]) for line in [head, *cells]) for column in range(len(head))]
    return "\n".join([title, *(aligned(line, widths) for line in [head, *cells]), ""])


def aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return cells as a line of text, each as wide as stated."""
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def shown(value: object) -> str:
    """Return a number in a few digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)
