"""Tables of what benchmarks measured, for people."""


def table(title: str, rows: list[dict[str, object]]) -> str:
    """Return rows as aligned text."""
    cells = [[shown(value) for value in row.values()] for row in rows]
    head = list(rows[0])
    widths = [max(len(line[column]) for line in [head, *cells]) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in [head, *cells]]
    return "\n".join([title, *lines, ""])


def shown(value: object) -> str:
    """Return a number in a few digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)
