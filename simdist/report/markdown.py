"""Tables inside pages."""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path


def markdown_table(rows: Iterable[str]) -> str:
    """Return a table of rows such as `| cell | cell |`; the first has the headings."""
    headings, *others = rows
    rule = "|" + "---|" * (headings.count("|") - 1)
    return "\n".join([headings, rule, *others])


def insert_tables(page: str, tables: Mapping[str, str]) -> str:
    r"""Replace what stands between `<!-- table NAME -->` and `<!-- end -->` in a page.

    Raises:
        ValueError: The page has not exactly one place for a table.

    >>> print(insert_tables("<!-- table errors -->\nold\n<!-- end -->", {"errors": "| new |"}))
    <!-- table errors -->
    | new |
    <!-- end -->
    """
    for name, table in tables.items():
        place = re.compile(rf"(<!-- table {re.escape(name)} -->\n).*?(<!-- end -->)", flags=re.DOTALL)
        inside = table.replace("\\", r"\\")
        page, n_found = place.subn(rf"\g<1>{inside}\n\g<2>", page)
        if n_found != 1:
            raise ValueError(f"the page has {n_found} places for table {name}; it needs one")
    return page


def write_tables(page: Path, tables: Mapping[str, str]) -> None:
    """Write tables into a file, see `insert_tables`."""
    page.write_text(insert_tables(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


def print_tables(tables: Mapping[str, str]) -> None:
    """Print tables under their names."""
    for name, table in tables.items():
        sys.stdout.write(f"\n{name}\n\n{table}\n")


def page_command(
    description: str,
    page: Path,
    tables: Callable[[], Mapping[str, str]],
    *,
    draw: Callable[[], object] | None = None,
) -> None:
    """Be the command of an experiment whose result is the tables of a page: print or, with `--write`, write them.

    Args:
        description: Help of the command.
        page: Has a place for each table.
        tables: Returns each table by its name.
        draw: Writes the figure of the page.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = "tables and figure" if draw else "the tables"
    parser.add_argument("--write", action="store_true", help=f"write {what} into {page.name}")
    if parser.parse_args().write:
        write_tables(page, tables())
        if draw is not None:
            draw()
    else:
        print_tables(tables())
