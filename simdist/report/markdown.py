"""Tables inside pages."""

import re
from collections.abc import Mapping

__all__ = ["insert_tables"]


def insert_tables(page: str, tables: Mapping[str, str]) -> str:
    r"""Replace what stands between `<!-- table NAME -->` and `<!-- end -->` in a page.

    Args:
        page: Markdown.
        tables: Name -> table.

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
