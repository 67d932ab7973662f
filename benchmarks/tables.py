"""The options of benchmarks, and what they print: JSON, or tables for people."""

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    return parser


def conclude(
    options: argparse.Namespace,
    sizes: Any,
    found: Mapping[str, object],
    tables: Mapping[str, Any],
    targets: list[dict[str, object]],
) -> int:
    """Print what was measured; return 1 if a target of the full sizes is missed.

    Args:
        options: Those of `benchmark_parser`.
        sizes: A data class: what was measured.
        found: The results, as JSON shows them.
        tables: The results as tables: rows by title.
        targets: What was to be reached, and whether it `holds`.
    """
    if options.json:
        about = {"python": platform.python_version(), "numpy": version("numpy"), "sizes": asdict(sizes)}
        print(json.dumps({**about, **found, "targets": targets}, indent=1))
    else:
        for title, rows in tables.items():
            print(table(title, rows))
        print(table("targets (for the full sizes)", targets))
    return int(not options.quick and not all(target["holds"] for target in targets))


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
